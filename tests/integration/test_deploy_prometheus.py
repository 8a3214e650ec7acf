"""deploy/prometheus and deploy/grafana with a real Prometheus that scrapes real servers.

It is Debian's package `prometheus`: where it is missing, these tests are skipped.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import yaml

from sow_client import Client, SowError, Tls
from tests.support.oracles.access import grant, identity, peer, write_access
from tests.support.servers.certificates import Authority
from tests.support.servers.server import ROOT, ServerProcess, free_port, until

PROMETHEUS: Final = ROOT / "deploy" / "prometheus"
DASHBOARD: Final = json.loads((ROOT / "deploy" / "grafana" / "sow.json").read_text())
PANELS: Final = [
    (f"{panel['title']} {target['refId']}", target["expr"])
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", ())
]
RULES: Final = [
    rule for group in yaml.safe_load((PROMETHEUS / "sow.rules.yml").read_text())["groups"] for rule in group["rules"]
]
ALERTS: Final = [(rule["alert"], rule["expr"]) for rule in RULES if "alert" in rule]
RECORDED: Final = [rule["record"] for rule in RULES if "record" in rule]
RUNBOOK: Final = "docs/operations/monitoring.md"
WAIT_SECONDS: Final = 60.0
WITHOUT_TROUBLE: Final = {
    "Links that do not come up A",
    "Dead letters a second A",
    "Changes discarded a second A",
    "Cells in trouble A",
    "Topics in a wrong cell A",
    "Version of the placement A",
}
"""Panels that show nothing while nothing is wrong, or nothing is discarded; and those of cells, as there are none."""

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="prometheus is not installed (Debian: apt-get install prometheus)",
)


@needs_prometheus
def test_the_configuration_and_the_rules_are_valid() -> None:
    _promtool("check", "config", str(PROMETHEUS / "prometheus.yml"))
    _promtool("check", "rules", str(PROMETHEUS / "sow.rules.yml"))


@needs_prometheus
def test_each_alert_fires_where_it_should_and_nowhere_else() -> None:
    cases = PROMETHEUS / "sow.rules.test.yml"
    _promtool("test", "rules", str(cases))
    text = cases.read_text()
    assert [name for name, _ in ALERTS if f'alertname="{name}"' not in text] == []


def test_each_alert_links_to_what_there_is_to_do() -> None:
    page = (ROOT / RUNBOOK).read_text()
    for rule in RULES:
        if "alert" in rule:
            url = rule["annotations"]["runbook_url"]
            assert url.endswith(f"/{Path(RUNBOOK).with_suffix('.html')}#{rule['alert'].lower()}")
            section = page.partition(f"\n#### {rule['alert']}\n")[2].partition("\n#")[0]
            assert f"**To do** ({rule['labels']['severity']}): " in section
    assert page.count("\n#### ") == len(ALERTS)


def _promtool(*arguments: str) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


class Prometheus:
    """A Prometheus that scrapes the metrics of two servers every second."""

    def __init__(self, folder: Path, targets: list[str]) -> None:
        config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(PROMETHEUS / "sow.rules.yml")]
        config["scrape_configs"][0]["static_configs"] = [{"targets": targets}]
        folder.mkdir()
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._address = f"127.0.0.1:{free_port()}"
        command = [
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={self._address}",
        ]
        self.log = folder / "prometheus.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        until(self._is_ready, WAIT_SECONDS, "Prometheus to be ready")

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, self.log.read_text()
        try:
            return bool(self._get("/-/ready"))
        except OSError:
            return False

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://{self._address}{path}", timeout=10) as answer:
            found: bytes = answer.read()
            return found

    def query(self, expression: str) -> list[dict[str, object]]:
        """The series that an expression gives now. An expression that it does not accept is an HTTPError."""
        answer = json.loads(self._get("/api/v1/query?" + urllib.parse.urlencode({"query": expression})))
        assert answer["status"] == "success"
        found: list[dict[str, object]] = answer["data"]["result"]
        return found

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(WAIT_SECONDS)


SERVER = """\
[server]
auth = "token"
[server.tls]
certificate = "{folder}/server.pem"
key = "{folder}/server.key"
[access]
file = "auth.toml"
[metrics]
listen = "127.0.0.1:{metrics}"
[[replication.peers]]
name = "{peer}"
address = "127.0.0.1:{port}"
mode = "sync"
ca = "{folder}/ca.pem"
token_file = "{folder}/{name}.token"
[topics.orders]
key = ["/id"]
expiration = "enabled"
"""


class Site:
    """Two linked servers with traffic of every kind, and a Prometheus that watches them."""

    def __init__(self, folder: Path) -> None:
        authority = Authority(folder, "ca")
        authority.issue("server")
        self._tls = Tls(ca=authority.file)
        ports, metrics = {"a": free_port(), "b": free_port()}, {"a": free_port(), "b": free_port()}
        self.servers: list[ServerProcess] = []
        for name, other in (("a", "b"), ("b", "a")):
            token = folder / f"{name}.token"
            token.touch(0o600)
            token.write_text(name)
            text = SERVER.format(folder=folder, metrics=metrics[name], peer=other, port=ports[other], name=name)
            text = text.replace("[server]\n", f'[server]\ninstance = "{name}"\n', 1)
            server = ServerProcess(folder / name, text, port=ports[name], start=False)
            write_access(folder / name, peer(other) + identity("reader", "reader") + grant("reader", "orders", "read"))
            self.servers.append(server)
        for server in self.servers:
            server.start()
        self.prometheus = Prometheus(folder / "prometheus", [f"127.0.0.1:{port}" for port in metrics.values()])
        self._number = 0

    def client(self, caller: str) -> Client:
        return Client(self.servers[0].address, token=caller, tls=self._tls)

    def use(self, root: Client, reader: Client, stranger: Client) -> None:
        """A little of everything that the dashboard shows."""
        self._number += 1
        root.publish("orders", {"id": self._number}, ttl="50ms", durability="replicated")
        root.publish("orders", {"id": f"kept-{self._number}"})
        assert list(root.query("orders", order_by="/id"))
        for refused in (
            lambda: root.get("nothing", "1"),
            lambda: reader.publish("orders", {"id": 1}),
            lambda: stranger.get("orders", "1"),
        ):
            with pytest.raises(SowError):
                refused()

    def close(self) -> None:
        self.prometheus.close()
        for server in self.servers:
            server.kill9()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    found = Site(tmp_path_factory.mktemp("site"))
    yield found
    found.close()


@needs_prometheus
def test_each_panel_and_each_alert_is_a_query_that_prometheus_answers(site: Site) -> None:
    """Panels show something where there is traffic, and no alert fires on servers where all is well."""
    panels = {name: _filled(query) for name, query in PANELS}
    assert len(panels) == len(PANELS)
    empty = set(panels)

    with (
        site.client("root") as root,
        site.client("reader") as reader,
        site.client("nobody") as stranger,
        root.subscribe("orders") as subscription,
        root.durable("orders", "billing") as durable,
    ):

        def all_panels_show_something() -> bool:
            site.use(root, reader, stranger)
            next(subscription)
            next(durable)  # never acknowledged: there is a backlog
            empty.difference_update([name for name in empty if site.prometheus.query(panels[name])])
            return empty <= WITHOUT_TROUBLE

        try:
            until(all_panels_show_something, WAIT_SECONDS, "all panels to show something")
        finally:
            print("empty panels:", sorted(empty))

    for _, expression in ALERTS:
        site.prometheus.query(expression)
    missing = set(RECORDED)

    def all_figures_are_recorded() -> bool:
        site.use(root, reader, stranger)
        missing.difference_update([name for name in missing if site.prometheus.query(name)])
        return not missing

    with site.client("root") as root, site.client("reader") as reader, site.client("nobody") as stranger:
        until(all_figures_are_recorded, WAIT_SECONDS, "all rules to record something")
    assert site.prometheus.query('ALERTS{alertstate="firing"}') == []


def _filled(query: str) -> str:
    """A query of the dashboard, with what Grafana puts in for its variables."""
    for name, value in (("$cell", ".*"), ("$instance", ".*"), ("$topic", ".*"), ("$__rate_interval", "10s")):
        query = query.replace(name, value)
    assert "$" not in query
    return query
