"""deploy/helm: the chart makes what deploy/kubernetes has, which other tests check, and refuses values that are wrong.

Helm renders it: the command `helm`, or the Python package helm-python-sdk, which has Helm inside. Where neither is
installed, these tests are skipped, but for those of the values.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import jsonschema
import pytest
import yaml

from sow.version import __version__
from sow_server.config import variables
from sow_server.placement import load_placement

ROOT: Final = Path(__file__).parents[3]
CHART: Final = ROOT / "deploy" / "helm" / "sow"
KUBERNETES: Final = json.loads((ROOT / "tests" / "support" / "kubernetes-1.30.json").read_text())
SCHEMA: Final = json.loads((CHART / "values.schema.json").read_text())
VALUES: Final[dict[str, Any]] = yaml.safe_load((CHART / "values.yaml").read_text())
HELM: Final = shutil.which("helm")
HAS_PACKAGE: Final = importlib.util.find_spec("helm_python") is not None
needs_helm = pytest.mark.skipif(
    HELM is None and not HAS_PACKAGE, reason="Helm is not installed, nor the package helm-python-sdk"
)
OTHERS: Final[dict[str, Any]] = {
    "replicas": 5,
    "mode": "async",
    "image": {"repository": "registry.example.com/sow", "digest": f"sha256:{'0' * 64}", "pullSecrets": ["registry"]},
    "storage": {"class": "fast", "size": "1.5Ti"},
    "secret": "certificates",
    "config": '[topics."a b"]\nkey = ["/k"]\n\n[limits]\nexports_max = 3\n',
    "env": {"SOW_SERVER_STORAGE_BLOCK_CACHE": "1GiB", "SOW_SERVER_READER_THREADS": "8"},
    "networkPolicy": {"enabled": False},
}
WRONG: Final = [
    ({"replica": 2}, "replica"),
    ({"replicas": 0}, "replicas"),
    ({"replicas": "3"}, "replicas"),
    ({"mode": "snyc"}, "mode"),
    ({"env": {"sow_server_listen": "x"}}, "sow_server_listen"),
    ({"env": {"SOW_SERVER_READER_THREADS": 8}}, "SOW_SERVER_READER_THREADS"),
    ({"image": {"digest": "0.1.0"}}, "digest"),
    ({"image": {"tag": "a b"}}, "tag"),
    ({"storage": {"size": "big"}}, "size"),
    ({"cells": -1}, "cells"),
    ({"placement": {"version": 0}}, "version"),
    ({"placement": {"topics": [{"patern": "a", "cell": "cell-1"}]}}, "patern"),
    ({"placement": {"topics": [{"pattern": "a", "cell": "sow-0"}]}}, "sow-0"),
]


class Refused(Exception):
    """Helm does not render it."""


def _rendered(values: Mapping[str, object], name: str = "sow") -> list[dict[str, Any]]:
    """The manifests of a release. Raises Refused."""
    if HELM is not None:
        done = subprocess.run(
            [HELM, "template", name, str(CHART), "--values", "-"],
            input=json.dumps(values), capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        if done.returncode:
            raise Refused(done.stderr)
        text = done.stdout
    else:
        helm = importlib.import_module("helm_python")  # it may be missing, and mypy does not need it
        with helm.Chart.load(str(CHART)) as chart:
            try:
                chart.validate_schema(values)
                made = chart.render(values, name=name, namespace="default")
            except helm.HelmError as error:
                raise Refused(str(error)) from error
        text = "\n---\n".join(made[file] for file in sorted(made) if file.endswith(".yaml"))
    return [one for one in yaml.safe_load_all(text) if one is not None]


def _by_name(manifests: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(one["kind"], one["metadata"]["name"]): one for one in manifests}


@needs_helm
def test_the_chart_makes_what_the_manifests_have() -> None:
    """So everything that other tests say of deploy/kubernetes holds for it."""
    found = _by_name(_rendered({}))
    annotations = found["StatefulSet", "sow"]["spec"]["template"]["metadata"].pop("annotations")
    assert annotations.keys() == {"checksum/config"}
    assert found == _by_name(list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "sow.yaml").read_text())))


@needs_helm
def test_other_values_make_what_kubernetes_accepts() -> None:
    found = _rendered(OTHERS, "prod")
    for manifest in found:
        schema = {**KUBERNETES["kinds"][manifest["kind"]], "$defs": KUBERNETES["$defs"]}
        jsonschema.Draft202012Validator(schema).validate(manifest)
    by_name = _by_name(found)
    assert not any(kind == "NetworkPolicy" for kind, _ in by_name)
    stateful = by_name["StatefulSet", "prod-sow"]["spec"]
    pod = stateful["template"]["spec"]
    assert stateful["replicas"] == 5
    assert {one["image"] for one in pod["containers"] + pod["initContainers"]} == {
        f"registry.example.com/sow@sha256:{'0' * 64}"
    }
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert {"name": "secret", "secret": {"secretName": "certificates"}} in pod["volumes"]
    given = {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}
    assert given.pop("POD_NAME") is None
    assert given == OTHERS["env"]
    assert given.keys() <= variables().keys()
    (claim,) = stateful["volumeClaimTemplates"]
    assert claim["spec"]["storageClassName"] == "fast"
    assert claim["spec"]["resources"]["requests"]["storage"] == "1.5Ti"


@needs_helm
def test_each_pod_has_all_others_as_peers_and_the_own_configuration() -> None:
    files = _by_name(_rendered(OTHERS, "prod"))["ConfigMap", "prod-sow"]["data"]
    pods = [f"prod-sow-{number}" for number in range(5)]
    assert sorted(files) == [f"{pod}.toml" for pod in pods]
    for pod in pods:
        found = tomllib.loads(files[f"{pod}.toml"])
        peers = found["replication"]["peers"]
        assert [peer["name"] for peer in peers] == [other for other in pods if other != pod]
        assert all(peer["address"] == f"{peer['name']}.prod-sow-peers:7451" for peer in peers)
        assert {peer["mode"] for peer in peers} == {"async"}
        assert (found["server"]["instance"], found["server"]["cluster"]) == (pod, "prod-sow")
        assert found["topics"] == {"a b": {"key": ["/k"]}}
        assert found["limits"] == {"exports_max": 3}
    (alone,) = _by_name(_rendered({"replicas": 1, "config": ""}))["ConfigMap", "sow"]["data"].values()
    assert tomllib.loads(alone).keys() == {"server", "access", "metrics", "backup", "log"}


@needs_helm
@pytest.mark.parametrize("replicas", [1, 3])
def test_each_cell_is_a_set_of_pods_and_all_have_one_placement(tmp_path: Path, replicas: int) -> None:
    topics = [{"pattern": 'trades|a"<b\\..*', "cell": "cell-2"}, {"pattern": "eu", "cell": "cell-3"}]
    values = {"cells": 3, "replicas": replicas, "placement": {"version": 7, "topics": topics}}
    rendered = _rendered(values, "prod")
    for manifest in rendered:
        schema = {**KUBERNETES["kinds"][manifest["kind"]], "$defs": KUBERNETES["$defs"]}
        jsonschema.Draft202012Validator(schema).validate(manifest)
    by_name = _by_name(rendered)
    file = tmp_path / "placement.toml"
    file.write_text(by_name["ConfigMap", "prod-sow-placement"]["data"]["placement.toml"])
    placement = load_placement(file)
    assert (placement.version, placement.default) == (7, "cell-1")
    assert [(one.pattern, one.cell) for one in placement.topics] == [(one["pattern"], one["cell"]) for one in topics]

    files = by_name["ConfigMap", "prod-sow"]["data"]
    sets = {name: found["spec"] for (kind, name), found in by_name.items() if kind == "StatefulSet"}
    assert sorted(sets) == [f"prod-sow-cell-{number}" for number in (1, 2, 3)]
    selectors = [found["selector"]["matchLabels"] for found in sets.values()]
    assert len({tuple(sorted(one.items())) for one in selectors}) == 3, "no set takes the pods of another one"
    for name, found in sets.items():
        cell = name.removeprefix("prod-sow-")
        assert found["template"]["metadata"]["labels"] == found["selector"]["matchLabels"]
        pods = [f"{name}-{number}" for number in range(replicas)]
        assert placement.cells[cell] == tuple(f"{pod}.{found['serviceName']}:7450" for pod in pods)
        mounts = {one["name"]: one["mountPath"] for one in found["template"]["spec"]["containers"][0]["volumeMounts"]}
        assert {"name": "placement", "configMap": {"name": "prod-sow-placement"}} in found["template"]["spec"][
            "volumes"
        ]
        for pod in pods:
            config = tomllib.loads(files.pop(f"{pod}.toml"))
            assert config["placement"]["cell"] == cell
            assert config["placement"]["file"] == f"{mounts['placement']}/placement.toml"
            assert (config["server"]["instance"], config["server"]["cluster"]) == (pod, name)
            peers = config.get("replication", {}).get("peers", [])
            assert [peer["name"] for peer in peers] == [other for other in pods if other != pod]
    assert not files
    (policy,) = [found["spec"] for (kind, _), found in by_name.items() if kind == "NetworkPolicy"]
    assert {"port": 7450} in policy["egress"][0]["ports"], "cells ask each other for their placement"
    assert by_name["Service", "prod-sow"]["spec"]["selector"] == sets["prod-sow-cell-1"]["selector"]["matchLabels"], (
        "a client has one cell as its home"
    )


@needs_helm
@pytest.mark.parametrize(
    ("placement", "said"),
    [
        ({"default": "cell-3"}, "placement.default: cell-3 is none of the 2 cells"),
        ({"topics": [{"pattern": "a", "cell": "cell-9"}]}, "placement.topics[0].cell: cell-9 is none of the 2 cells"),
    ],
)
def test_a_placement_in_a_cell_that_there_is_not_is_refused(placement: dict[str, object], said: str) -> None:
    with pytest.raises(Refused) as refused:
        _rendered({"cells": 2, "placement": placement})
    assert said in str(refused.value)


@needs_helm
def test_another_configuration_starts_the_pods_anew() -> None:
    def checksum(values: Mapping[str, object]) -> object:
        return _by_name(_rendered(values))["StatefulSet", "sow"]["spec"]["template"]["metadata"]["annotations"]

    assert checksum({}) == checksum({"storage": {"size": "30Gi"}})
    assert checksum({}) != checksum({"config": "[log]\n"})


@needs_helm
def test_another_placement_starts_no_pod_anew() -> None:
    """The pods see the file, and `sow cells reload` has them read it."""

    def sets(version: int) -> list[dict[str, Any]]:
        found = _rendered({"cells": 2, "placement": {"version": version}})
        return [one for one in found if one["kind"] == "StatefulSet"]

    assert sets(1) == sets(2) != []


@needs_helm
def test_releases_in_one_namespace_do_not_select_the_pods_of_each_other() -> None:
    first, second = (
        _by_name(_rendered({}, name))["Service", name]["spec"]["selector"] for name in ("sow-one", "sow-two")
    )
    assert first != second


@needs_helm
@pytest.mark.parametrize("cells", [0, 64])
def test_kubernetes_can_make_the_pods_of_a_release_with_a_long_name(cells: int) -> None:
    """Each pod has a label with the name of its set, a hyphen and ten more characters, and a label has 63."""
    rendered = _rendered({"cells": cells, "replicas": 1}, "a" * 53)
    names = [one["metadata"]["name"] for one in rendered if one["kind"] == "StatefulSet"]
    assert len(names) == max(1, cells)
    assert max(map(len, names)) <= 63 - 11


@needs_helm
@pytest.mark.parametrize(("values", "named"), WRONG)
def test_helm_refuses_wrong_values_by_their_name(values: dict[str, object], named: str) -> None:
    with pytest.raises(Refused) as refused:
        _rendered(values)
    assert named in str(refused.value)


@pytest.mark.parametrize(("values", "named"), WRONG)
def test_the_schema_refuses_wrong_values(values: dict[str, Any], named: str) -> None:
    merged = {
        key: {**value, **values.get(key, {})} if isinstance(value, dict) else values.get(key, value)
        for key, value in {**values, **VALUES}.items()
    }
    errors = list(jsonschema.Draft7Validator(SCHEMA).iter_errors(merged))
    assert errors
    assert any(named in f"{list(error.path)} {error.message}" for error in errors)


def test_the_schema_knows_the_values_of_the_chart() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.Draft7Validator(SCHEMA).validate(VALUES)
    assert SCHEMA["properties"].keys() - VALUES.keys() == {"global"}, "which Helm adds"


def test_the_chart_has_the_version_of_the_server() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)
