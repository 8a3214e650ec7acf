"""deploy/compose: what the Compose Specification accepts, with files, ports and settings that are there.

No test starts the containers: tests/integration/test_deploy_compose.py starts the server and the console as they do.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any, Final

import jsonschema
import pytest
import yaml
from packaging.requirements import Requirement

from sow_cli.command import COMMANDS
from sow_cli.console import console
from sow_server.access_control import check
from sow_server.config import load, split_address, warnings

ROOT: Final = Path(__file__).parents[3]
FOLDER: Final = ROOT / "deploy" / "compose"
SCHEMA: Final = json.loads((ROOT / "tests" / "support" / "compose-spec.json").read_text())
COMPOSE: Final[dict[str, Any]] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICES: Final[dict[str, dict[str, Any]]] = COMPOSE["services"]
SERVER: Final = SERVICES["server"]["environment"]


def _mounts(service: str) -> dict[str, str]:
    """The source of each target."""
    return {target: source for source, target, *_ in (one.split(":") for one in SERVICES[service].get("volumes", ()))}


def _file(text: str) -> Any:
    return yaml.safe_load((FOLDER / text).read_text())


def test_it_is_what_the_specification_accepts() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.Draft7Validator(SCHEMA).validate({key: value for key, value in COMPOSE.items() if key != "name"})
    assert re.fullmatch("[a-z0-9][a-z0-9_-]*", COMPOSE["name"]), "it came to the specification after this schema"


def test_the_schema_refuses_a_misspelt_field() -> None:
    """Or the test above would prove nothing."""
    wrong = json.loads(json.dumps(COMPOSE).replace("stop_grace_period", "stop_grace"))
    with pytest.raises(jsonschema.ValidationError, match="stop_grace"):
        jsonschema.Draft7Validator(SCHEMA).validate(wrong)


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_is_hardened_watched_and_reached_from_this_machine_alone(name: str) -> None:
    service = SERVICES[name]
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["healthcheck"]["test"][0] == "CMD"
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port) for port in service.get("ports", ()))
    assert re.fullmatch(r"[a-z/]+(:v?\d+\.\d+\.\d+|@sha256:[0-9a-f]{64})|\$\{SOW_IMAGE:-sow:\d\S+\}", service["image"])
    assert set(service.get("depends_on", ())) <= SERVICES.keys()


@pytest.mark.parametrize("name", SERVICES)
def test_what_a_container_mounts_is_there(name: str) -> None:
    for source in _mounts(name).values():
        if source.startswith("."):
            assert (FOLDER / source).is_file(), source
        else:
            assert source in COMPOSE["volumes"]
    if "build" in SERVICES[name]:
        assert (FOLDER / SERVICES[name]["build"]["context"]).resolve() == ROOT
        assert (ROOT / SERVICES[name]["build"]["dockerfile"]).is_file()


def test_the_settings_of_the_server_are_those_of_a_server_that_starts() -> None:
    assert SERVICES["server"]["entrypoint"] == ["sow-server"]
    settings = load(None, None, SERVER)
    assert (check(settings), warnings(settings)) == ([], [])
    assert len(settings.given) == len(SERVER), "each variable has set something"
    assert str(settings.server.data_dir).startswith(f"{next(iter(_mounts('server')))}/"), "data outlive the container"
    assert f":{split_address(settings.server.listen)[1]}" in SERVICES["server"]["ports"][0]


def test_the_image_has_what_the_server_and_the_console_need() -> None:
    """The command of the health check comes with it, too."""
    steps = (ROOT / "deploy" / "container" / "Containerfile").read_text()
    files = re.findall(r"-r (requirements/(?:server|console)\.txt)", steps)
    pinned = "".join((ROOT / file).read_text() for file in files)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for text in (*extras["server"], *extras["console"]):
        assert re.search(rf"^{re.escape(Requirement(text).name)}==", pinned, re.MULTILINE | re.IGNORECASE), text


def test_the_console_is_started_by_options_that_it_has() -> None:
    service = SERVICES["console"]
    program, name, *options = service["entrypoint"]
    assert (program, name in COMMANDS) == ("sow", True)
    context = console.make_context("console", options)
    assert context.params["listen"] in "".join(service["healthcheck"]["test"])
    assert service["network_mode"] == "host", "it listens on the loopback, which a container has for itself"
    assert SERVICES["server"]["ports"][0].startswith(f"{service['environment']['SOW_SERVER']}:")


def test_prometheus_scrapes_the_server_and_loads_the_alerts() -> None:
    found = _file("prometheus.yml")
    own = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    (job,), (own_job,) = found["scrape_configs"], own["scrape_configs"]
    port = split_address(SERVER["SOW_SERVER_METRICS_LISTEN"])[1]
    assert job["static_configs"] == [{"targets": [f"server:{port}"]}]
    assert {**found, "scrape_configs": job["job_name"]} == {**own, "scrape_configs": own_job["job_name"]}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus is not installed")
def test_prometheus_accepts_its_configuration(tmp_path: Path) -> None:
    for target, source in _mounts("prometheus").items():
        if source.startswith("."):
            shutil.copy(FOLDER / source, tmp_path / Path(target).name)
    done = subprocess.run(
        ["promtool", "check", "config", str(tmp_path / "prometheus.yml")],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    (source,) = _file("grafana/datasources.yml")["datasources"]
    assert (source["type"], source["url"], source["isDefault"]) == ("prometheus", "http://prometheus:9090", True)
    assert SERVICES["prometheus"]["ports"][0].endswith(":9090")
    mounts = _mounts("grafana")
    (dashboard,) = [target for target, file in mounts.items() if file.endswith("grafana/sow.json")]
    (provider,) = _file("grafana/dashboards.yml")["providers"]
    assert provider["options"]["path"] == str(Path(dashboard).parent)
    assert SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == dashboard
