"""deploy/: the files for several cells are what their programs accept, and fit each other.

tests/integration/test_deploy_examples.py starts the example.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import jsonschema
import pytest
import yaml

from sow_server.access.file import load_access
from sow_server.access_control import check
from sow_server.config import Config, Overrides, all_cells, load, split_address
from sow_server.placement import configured_places, load_placement
from sow_server.supervision.placement_file import to_make
from tests.support.oracles.access import write_private
from tests.support.servers.certificates import Authority

ROOT: Final = Path(__file__).parents[3]
DEPLOY: Final = ROOT / "deploy"
SCHEMA: Final = json.loads((ROOT / "tests" / "support" / "kubernetes-1.30.json").read_text())
MANIFESTS: Final[list[dict[str, Any]]] = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "cells.yaml").read_text()))
BY_KIND: Final = {one["kind"]: one for one in MANIFESTS}
POD: Final = BY_KIND["StatefulSet"]["spec"]["template"]["spec"]
PODS: Final = [f"sow-cell-{number}" for number in range(BY_KIND["StatefulSet"]["spec"]["replicas"])]
COMPOSE: Final = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())["services"]["server"]
OVERRIDE: Final[dict[str, Any]] = yaml.safe_load((DEPLOY / "compose" / "cells.yaml").read_text())


# --- Kubernetes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda one: str(one["kind"]))
def test_a_manifest_is_what_kubernetes_accepts(manifest: dict[str, Any]) -> None:
    schema = SCHEMA["kinds"][manifest["kind"]]
    jsonschema.Draft202012Validator({**schema, "$defs": SCHEMA["$defs"]}).validate(manifest)


def test_the_parts_of_the_manifest_find_each_other() -> None:
    labels = BY_KIND["StatefulSet"]["spec"]["template"]["metadata"]["labels"].items()
    assert BY_KIND["Service"]["spec"]["selector"].items() <= labels
    for kind, selector in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        assert BY_KIND[kind]["spec"][selector]["matchLabels"].items() <= labels
    assert BY_KIND["StatefulSet"]["spec"]["serviceName"] == BY_KIND["Service"]["metadata"]["name"]
    assert POD["serviceAccountName"] == BY_KIND["ServiceAccount"]["metadata"]["name"]
    ports = {port["name"] for port in POD["containers"][0]["ports"]}
    probes = [POD["containers"][0][probe]["httpGet"]["port"] for probe in ("livenessProbe", "readinessProbe")]
    assert {*probes, *(port["targetPort"] for port in BY_KIND["Service"]["spec"]["ports"])} <= ports
    for container in POD["containers"] + POD["initContainers"]:
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
    reached = {port["port"] for rule in BY_KIND["NetworkPolicy"]["spec"]["egress"] for port in rule["ports"]}
    assert reached == {7450, 53}, "the cells ask each other for their placement"


def test_each_pod_is_a_cell_of_the_placement_at_the_address_that_it_has(tmp_path: Path) -> None:
    data = BY_KIND["ConfigMap"]["data"]
    run = tmp_path / "run"
    run.mkdir()
    authority = Authority(run, "authority")
    issued = authority.issue("cells")
    access = (DEPLOY / "kubernetes" / "cells-auth.toml").read_text().replace("REPLACE: sow token new --out ops.token "
             "prints this line", "0" * 64)  # fmt: skip
    for path in POD["initContainers"][0]["args"]:
        name = Path(path).name
        texts = {"tls.crt": issued.pem.decode(), "tls.key": issued.key.read_text(), "auth.toml": access}
        texts |= {"ca.crt": authority.file.read_text(), "metrics.token": "token\n"}
        write_private(run / name, texts[name])
    (tmp_path / "placement.toml").write_text(data["placement.toml"])
    config = tmp_path / "sow.toml"
    text = data["sow.toml"].replace("/run/sow", str(run)).replace("/etc/sow", str(tmp_path))
    config.write_text(text.replace("/var/lib/sow", str(tmp_path)))
    names = [variable["name"] for variable in POD["containers"][0]["env"]]
    for pod in PODS:
        settings = load(config, None, dict.fromkeys(names, pod))
        assert (settings.server.instance, settings.placement.cell) == (pod, pod)
        places = configured_places(settings)
        assert places is not None
        assert places.placement.cells[pod] == (f"{pod}.{BY_KIND['Service']['metadata']['name']}:7450",)
        assert check(settings) == []
        assert sorted(places.placement.cells) == PODS
    assert load_access(run / "auth.toml").identities


# --- compose ---------------------------------------------------------------------------------------------------------


def test_the_containers_of_cells_are_those_of_the_placement(tmp_path: Path) -> None:
    server = OVERRIDE["services"]["server"]
    schema = json.loads((ROOT / "tests" / "support" / "compose-spec.json").read_text())
    jsonschema.Draft7Validator(schema).validate(OVERRIDE)
    option, number = server["command"]
    assert (option, server["healthcheck"]["test"]) == (
        "--cells",
        ["CMD", "sow-server", "--cells", number, "--check-ready"],
    )
    (volume,) = server["volumes"]
    source, target, _ = volume.split(":")
    environment = {**COMPOSE["environment"], **server["environment"]}
    assert environment["SOW_SERVER_PLACEMENT_FILE"] == target
    environment["SOW_SERVER_PLACEMENT_FILE"] = str(DEPLOY / "compose" / source)
    environment["SOW_SERVER_DATA_DIR"] = str(tmp_path)
    cells = _cells(None, int(number), environment)
    assert to_make(cells) == "", "the file is good as it is"
    published = {port.split(":")[1] for port in [*COMPOSE["ports"], *server["ports"]]}
    assert published == {str(split_address(cell.server.listen)[1]) for cell in cells.values()}
    (prometheus,) = OVERRIDE["services"]["prometheus"]["volumes"]
    scraped = yaml.safe_load((DEPLOY / "compose" / prometheus.split(":")[0]).read_text())
    assert scraped["scrape_configs"][0]["static_configs"] == [
        {"targets": [f"server:{split_address(cell.metrics.listen)[1]}"], "labels": {"cell": name}}
        for name, cell in cells.items()
    ]


def _cells(path: Path | None, of: int, environment: dict[str, str]) -> dict[str, Config]:
    return {cell.name: load(path, Overrides(cell=cell), environment) for cell in all_cells(of, 4)}


# --- systemd ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_the_unit_with_cells_is_valid(tmp_path: Path) -> None:
    folder = tmp_path / "sow.service.d"
    folder.mkdir()
    for source, target in (("sow.service", tmp_path / "sow.service"), ("cells.conf", folder / "cells.conf")):
        text = (DEPLOY / "systemd" / source).read_text()
        target.write_text(text.replace("/opt/sow/bin/sow-server", "/bin/true"))  # it looks whether it is there
    command = ["systemd-analyze", "verify", str(tmp_path / "sow.service")]
    environment = os.environ | {"SYSTEMD_UNIT_PATH": f"{tmp_path}:"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    (folder / "cells.conf").write_text("[Service]\nOOMPolicies=continue\n")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)
    assert "OOMPolicies" in done.stderr, "or this would prove nothing"


def test_the_unit_starts_the_cells_that_it_checks_and_that_the_example_places() -> None:
    text = (DEPLOY / "systemd" / "cells.conf").read_text()
    lines = [line for line in text.splitlines() if line.startswith("ExecStart") and "/" in line]
    check_first, start = [line.split("=", 1)[1] for line in lines]
    assert check_first == f"{start} --check-config"
    assert start.endswith(" --cells 4")
    placed = load_placement(DEPLOY / "examples" / "cells" / "placement.toml")
    assert list(placed.cells) == [f"cell-{number}" for number in range(1, 5)]
