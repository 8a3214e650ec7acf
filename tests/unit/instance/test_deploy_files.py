"""deploy/: manifests, units and images are what their programs accept, and name what this server has.

tests/integration/test_deploy_examples.py starts the examples, and test_deploy_prometheus.py runs the queries.
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

from sow_server.access.audit import Part, path_of
from sow_server.access.file import load_access
from sow_server.access_control import check
from sow_server.config import load
from tests.support.oracles.access import write_private
from tests.support.servers.certificates import Authority

ROOT: Final = Path(__file__).parents[3]
DEPLOY: Final = ROOT / "deploy"
SCHEMA: Final = json.loads((ROOT / "tests" / "support" / "kubernetes-1.30.json").read_text())
VALIDATORS: Final = {
    kind: jsonschema.Draft202012Validator({**schema, "$defs": SCHEMA["$defs"]})
    for kind, schema in SCHEMA["kinds"].items()
}
MANIFESTS: Final[list[dict[str, Any]]] = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "sow.yaml").read_text()))
SET: Final = next(one for one in MANIFESTS if one["kind"] == "StatefulSet")
POD: Final = SET["spec"]["template"]["spec"]
PODS: Final = [f"sow-{number}" for number in range(SET["spec"]["replicas"])]
EXPOSURE_MAX: Final = 2.0


def _manifest(kind: str, name: str = "sow") -> dict[str, Any]:
    (found,) = [one for one in MANIFESTS if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


# --- Kubernetes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda one: f"{one['kind']}-{one['metadata']['name']}")
def test_a_manifest_is_what_kubernetes_accepts(manifest: dict[str, Any]) -> None:
    VALIDATORS[manifest["kind"]].validate(manifest)


def test_the_schema_refuses_a_misspelt_field() -> None:
    """Or the test above would prove nothing."""
    wrong = json.loads(json.dumps(SET).replace("terminationGracePeriodSeconds", "terminationGraceSeconds"))
    with pytest.raises(jsonschema.ValidationError, match="terminationGraceSeconds"):
        VALIDATORS["StatefulSet"].validate(wrong)


def test_the_parts_of_the_manifest_find_each_other() -> None:
    labels = SET["spec"]["template"]["metadata"]["labels"].items()
    for kind, name in (("Service", "sow"), ("Service", "sow-peers")):
        assert _manifest(kind, name)["spec"]["selector"].items() <= labels
    assert _manifest("PodDisruptionBudget")["spec"]["selector"]["matchLabels"].items() <= labels
    assert SET["spec"]["serviceName"] == "sow-peers"
    ports = {port["name"] for port in POD["containers"][0]["ports"]}
    used = {port["targetPort"] for name in ("sow", "sow-peers") for port in _manifest("Service", name)["spec"]["ports"]}
    probes = [POD["containers"][0][probe]["httpGet"]["port"] for probe in ("livenessProbe", "readinessProbe")]
    assert {*used, *probes} <= ports
    volumes = {volume["name"] for volume in POD["volumes"]}
    volumes |= {claim["metadata"]["name"] for claim in SET["spec"]["volumeClaimTemplates"]}
    for container in POD["containers"] + POD["initContainers"]:
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


def test_pods_are_reached_and_reach_others_only_where_it_is_needed() -> None:
    """Metrics tell the names of topics, durables and identities, so they are for Prometheus alone."""
    policy = _manifest("NetworkPolicy")["spec"]
    assert sorted(policy["policyTypes"]) == ["Egress", "Ingress"]
    assert [rule["ports"] for rule in policy["ingress"] if "from" not in rule] == [[{"port": "grpc"}]]
    assert all(rule["to"] and rule["ports"] for rule in policy["egress"])
    assert {port["port"] for rule in policy["egress"] for port in rule["ports"]} == {7451, 53}
    for text in _manifest("ConfigMap")["data"].values():
        assert tomllib.loads(text)["metrics"]["token_file"]


WORKFLOWS: Final = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda file: file.name)
def test_a_workflow_names_actions_by_their_commits(workflow: Path) -> None:
    """A tag can be moved to other code."""
    used = re.findall(r"uses: (\S+)", workflow.read_text())
    assert used
    assert [one for one in used if not re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", one)] == []


def test_only_a_tag_publishes_and_no_job_may_more_than_it_needs() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    found = yaml.safe_load(text)
    assert found["permissions"] == {"contents": "read"}
    jobs = found["jobs"]
    publishing = {name for name, job in jobs.items() if re.search(r"publish|push |release create", str(job["steps"]))}
    assert publishing == {"pypi", "npm", "image"}
    for name in publishing:
        assert jobs[name]["if"] == "github.event_name == 'push' && github.ref_type == 'tag'"
        assert (jobs[name]["needs"], jobs[name]["environment"]) == ("build", "release")
        assert jobs[name]["permissions"].keys() <= {"contents", "id-token", "packages"}
    assert jobs.keys() - publishing == {"build"}
    assert "permissions" not in jobs["build"], "it can read, and no more"
    assert re.findall(r"secrets\.(\w+)", text) == ["NPM_TOKEN"]
    commands = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    assert not any("${{" in command for command in commands), "the name of a tag would be a part of the command"


def test_no_container_runs_as_root_or_writes_to_its_image() -> None:
    assert POD["securityContext"]["runAsNonRoot"] is True
    assert POD["automountServiceAccountToken"] is False
    for container in POD["containers"] + POD["initContainers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_the_configuration_of_each_pod_loads(tmp_path: Path) -> None:
    """With the files that the init container copies: those of this pod, and the access file."""
    configurations = _manifest("ConfigMap")["data"]
    assert sorted(configurations) == [f"{pod}.toml" for pod in PODS]
    (copied,) = [container["args"] for container in POD["initContainers"]]
    run = tmp_path / "run"
    run.mkdir()
    authority = Authority(run, "authority")
    for pod in PODS:
        issued = authority.issue(pod)
        have = {
            f"/secret/{pod}.crt": issued.pem,
            f"/secret/{pod}.key": issued.key.read_bytes(),
            "/secret/ca.crt": authority.file.read_bytes(),
            "/secret/auth.toml": _with_a_token((DEPLOY / "kubernetes" / "auth.toml").read_text()).encode(),
            "/secret/metrics.token": b"token\n",
        }
        for path in copied:
            file = run / Path(path.replace("$(POD_NAME)", pod)).name
            write_private(file, have[path.replace("$(POD_NAME)", pod)].decode())
        config = tmp_path / f"{pod}.toml"
        text = configurations[config.name].replace("/run/sow", str(run)).replace("/var/lib/sow", str(tmp_path / pod))
        config.write_text(text)
        (tmp_path / pod).mkdir()  # the volume
        settings = load(config)
        assert check(settings) == [], "and nothing of it is doubtful"
        assert settings.server.instance == pod
        assert [peer.name for peer in settings.peers] == [other for other in PODS if other != pod]
        assert [peer.address for peer in settings.peers] == [f"{peer.name}.sow-peers:7451" for peer in settings.peers]
        assert load_access(run / "auth.toml").peers.keys() == set(PODS)
        for file in run.glob(f"{pod}.*"):
            file.unlink()


def _with_a_token(text: str) -> str:
    return re.sub(r'token_sha256 = ".*"', f'token_sha256 = "{"0" * 64}"', text)


# --- the image -------------------------------------------------------------------------------------------------------

CONTAINERFILE: Final = (DEPLOY / "container" / "Containerfile").read_text()
STEPS: Final = [line for line in CONTAINERFILE.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]


def test_the_image_runs_the_server_as_its_own_user_with_a_health_check() -> None:
    last = [line.split(maxsplit=1) for line in STEPS[max(i for i, line in enumerate(STEPS) if "FROM" in line) :]]
    assert ["USER", "7450:7450"] in last
    assert ["ENTRYPOINT", '["sow-server"]'] in last
    assert any(name == "HEALTHCHECK" and "--check-ready" in rest for name, rest in last)
    for setting in ("runAsUser", "runAsGroup", "fsGroup"):
        assert POD["securityContext"][setting] == 7450


def test_the_image_takes_what_the_checkout_has_and_only_locked_packages() -> None:
    ignored = (DEPLOY / "container" / "Containerfile.containerignore").read_text().splitlines()
    for line in STEPS:
        words = line.split()
        if words[0] == "COPY" and not words[1].startswith("--from"):
            for source in words[1:-1]:
                assert (ROOT / source).exists(), line
                assert f"!{source.split('/')[0]}" in ignored
        if "pip install" in line:
            assert all("--require-hashes" in part or "--no-index" in part for part in line.split("pip install")[1:])
        assert words[0] != "ADD"
        if words[0] == "FROM":
            assert re.fullmatch(r"[a-z]+:\d\S+@sha256:[0-9a-f]{64}", words[1]), "an image with version and digest"


def test_the_image_takes_all_that_the_build_of_the_wheel_reads() -> None:
    """Pages of the help and a hook came to the build, and the image would not have had them."""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    read = [*wheel["packages"], "docs", wheel["hooks"]["custom"]["path"]]
    copied = {source for line in STEPS if line.startswith("COPY") for source in line.split()[1:-1]}
    assert {path.split("/")[0] for path in read} <= copied


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed")
def test_hadolint_finds_nothing() -> None:
    file = str(DEPLOY / "container" / "Containerfile")
    done = subprocess.run(["hadolint", file], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


# --- systemd and logrotate -------------------------------------------------------------------------------------------

UNIT: Final = DEPLOY / "systemd" / "sow.service"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_the_unit_is_valid_and_hardened(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/sow/bin/sow-server", "/bin/true"))  # it looks whether it is there
    verified = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False, timeout=60
    )
    assert (verified.returncode, verified.stderr) == (0, "")
    judged = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", "--no-pager", str(unit)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if "Unknown option" in judged.stderr or "unrecognized option" in judged.stderr:
        pytest.skip("this systemd judges no unit that it does not run")
    exposure = re.search(r"Overall exposure level for \S+: ([\d.]+)", judged.stdout)
    assert exposure is not None, judged.stdout + judged.stderr
    assert float(exposure[1]) <= EXPOSURE_MAX


def test_the_unit_lets_the_server_write_where_the_examples_write() -> None:
    unit = UNIT.read_text()
    writable = {f"/var/lib/{_setting(unit, 'StateDirectory')}", f"/var/log/{_setting(unit, 'LogsDirectory')}"}
    for file in (DEPLOY / "examples").glob("*/*.toml"):
        settings = tomllib.loads(file.read_text())
        paths = [settings.get("server", {}).get("data_dir"), settings.get("access", {}).get("audit")]
        paths.append(settings.get("backup", {}).get("root"))
        for path in filter(None, paths):
            assert any(Path(path).is_relative_to(folder) for folder in writable), f"{file}: {path}"


def _setting(unit: str, name: str) -> str:
    found = re.search(rf"^{name}=(\S+)$", unit, re.MULTILINE)
    assert found is not None, name
    return found[1]


def test_logrotate_rotates_the_audit_log_of_the_examples() -> None:
    rules = (DEPLOY / "logrotate" / "sow").read_text()
    logs = {tomllib.loads(file.read_text())["access"]["audit"] for file in (DEPLOY / "examples").glob("*/*.toml")
            if "auth" not in file.name and file.name != "placement.toml"}  # fmt: skip
    rotated = re.search(r"^(/.+) \{$", rules, re.MULTILINE)
    assert rotated is not None
    of_cells = "/var/log/sow/audit-cell-*.jsonl"
    assert set(rotated[1].split()) == {str(path_of(Path(log), part)) for log in logs for part in Part} | {of_cells}
    for part in Part:
        assert path_of(Path("/var/log/sow/audit-cell-2.jsonl"), part).match(of_cells)


@pytest.mark.skipif(shutil.which("logrotate") is None, reason="logrotate is not installed")
def test_logrotate_moves_the_file_away_and_makes_none(tmp_path: Path) -> None:
    """The server makes the next one (access/audit [4])."""
    log = tmp_path / "audit.jsonl"
    log.write_text('{"event": "denied"}\n')
    rules = (DEPLOY / "logrotate" / "sow").read_text()
    text = re.sub(r"^/.+ \{$", f"{log} {{", rules, flags=re.MULTILINE)
    (tmp_path / "rules").write_text(re.sub(r"^    su .*\n", "", text, flags=re.MULTILINE))
    done = subprocess.run(
        ["logrotate", "--force", "--state", str(tmp_path / "state"), str(tmp_path / "rules")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not log.exists()
    assert [file.read_text() for file in tmp_path.glob("audit.jsonl-*")] == ['{"event": "denied"}\n']


# --- Prometheus and Grafana ------------------------------------------------------------------------------------------

RULES: Final = yaml.safe_load((DEPLOY / "prometheus" / "sow.rules.yml").read_text())
RECORDED: Final = {
    rule["record"]: rule["expr"] for group in RULES["groups"] for rule in group["rules"] if "record" in rule
}
ALERTS: Final = [rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule]
DASHBOARD: Final = json.loads((DEPLOY / "grafana" / "sow.json").read_text())
QUERIES: Final = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]


def test_alerts_and_panels_use_metrics_that_the_server_has() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    documented = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) | {"up"}
    for query in [*QUERIES, *RECORDED.values(), *(rule["expr"] for rule in ALERTS)]:
        for name, expression in RECORDED.items():
            query = query.replace(name, expression)
        names = set(re.findall(r"\b(?:sow|process)_\w+|\bup\b", query))
        assert names, query
        unknown = {re.sub("_(bucket|sum|count)$", "", name) for name in names} - documented
        assert unknown == set(), query


def test_every_alert_has_a_severity_and_texts() -> None:
    for rule in ALERTS:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}


def test_panels_have_ids_and_places_of_their_own() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells
