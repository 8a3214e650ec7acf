"""deploy/examples: each configuration starts a real server, and the servers of one example do what they are for."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from sow_client import Client, PermissionDenied, SowError, Tls
from tests.support.servers.certificates import Authority
from tests.support.servers.server import ROOT, ServerProcess, free_port, until

EXAMPLES: Final = ROOT / "deploy" / "examples"
WAIT_SECONDS: Final = 60.0


class Example:
    """The servers of one example, each with a folder as /etc/sow, and the certificates that their callers have."""

    def __init__(self, folder: Path, name: str, hosts: Mapping[str, str], callers: tuple[str, ...]) -> None:
        """`hosts`: by the name of the configuration, that of its access file."""
        self._folder = folder
        self._authority = Authority(folder, "ca")
        self.ports = {host: free_port() for host in hosts}
        self.servers = {host: self._server(EXAMPLES / name, host, access) for host, access in hosts.items()}
        self._callers = {caller: self._authority.issue(caller) for caller in callers}

    def _server(self, example: Path, host: str, access: str) -> ServerProcess:
        text = (example / f"{host}.toml").read_text()
        for other, port in self.ports.items():
            text = text.replace(f"{other}.example.com:7450", f"127.0.0.1:{port}")
        assert "example.com:" not in text, "a server that is not part of the example"
        root = self._folder / host
        # `listen` and `data_dir` are set by the test's server; the folders belong to the unit of systemd.
        text = text.replace("127.0.0.1:9464", "127.0.0.1:0")
        text = text.replace("/var/log/sow", str(root / "log")).replace("/var/lib/sow", str(root / "lib"))
        server = ServerProcess(root, text, port=self.ports[host], start=False)
        (root / "log").mkdir()
        (root / "tls").mkdir()
        shutil.copy(self._authority.file, root / "tls" / "ca.pem")
        instance = "sow-1" if host == "sow" else host
        issued = self._authority.issue(instance)
        shutil.copy(issued.certificate, root / "tls")
        shutil.copy(issued.key, root / "tls")
        shutil.copy(example / access, root / "auth.toml")
        (root / "auth.toml").chmod(0o600)
        return server

    def client(self, host: str, caller: str) -> Client:
        issued = self._callers[caller]
        tls = Tls(ca=self._authority.file, certificate=issued.certificate, key=issued.key)
        return self.servers[host].client(tls=tls)

    def __enter__(self) -> Example:
        for server in self.servers.values():
            server.start()
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers.values():
            server.kill9()


def test_each_example_is_started_by_a_test() -> None:
    assert {folder.name for folder in EXAMPLES.iterdir()} == {"one", "pair", "hub", "cells"}


def test_one_server(tmp_path: Path) -> None:
    with (
        Example(tmp_path, "one", {"sow": "auth.toml"}, ("ops", "desk", "stranger")) as example,
        example.client("sow", "ops") as ops,
        example.client("sow", "desk") as desk,
        example.client("sow", "stranger") as stranger,
    ):
        desk.publish("orders", {"id": 1, "price": 9.5})
        assert [record.key for record in ops.query("orders")] == ["1"]
        with pytest.raises(PermissionDenied):
            desk.compact()
        with pytest.raises(SowError) as refused:
            stranger.get("orders", "1")
        assert refused.value.reason == "UNAUTHENTICATED"
        assert ops.backup("monday").name == "monday"
        assert '"event": "denied"' in (tmp_path / "sow" / "log" / "audit-refused.jsonl").read_text()


def test_a_pair(tmp_path: Path) -> None:
    hosts = {"sow-a": "auth.toml", "sow-b": "auth.toml"}
    with (
        Example(tmp_path, "pair", hosts, ("ops",)) as example,
        example.client("sow-a", "ops") as a,
        example.client("sow-b", "ops") as b,
    ):
        until(lambda: _streams(a) and _streams(b), WAIT_SECONDS, "both links")
        a.publish("orders", {"id": 1, "from": "a"}, durability="replicated")
        assert b.get("orders", "1") is not None, "the acknowledgement says so"
        b.publish("orders", {"id": 2, "from": "b"}, durability="replicated")
        assert a.get("orders", "2") is not None


def _streams(client: Client) -> bool:
    return [link.state for link in client.replication_status().outgoing] == ["streaming"]


def test_a_hub_with_leaves(tmp_path: Path) -> None:
    hosts = {"hub": "hub.auth.toml", "leaf-all": "leaf.auth.toml", "leaf-eu": "leaf.auth.toml"}
    with (
        Example(tmp_path, "hub", hosts, ("feed", "desk")) as example,
        example.client("hub", "feed") as feed,
        example.client("leaf-all", "desk") as everything,
        example.client("leaf-eu", "desk") as europe,
    ):
        for number, region in enumerate(("us", "eu", "us"), 1):
            feed.publish("orders", {"id": number, "region": region})
        until(lambda: _keys(everything) == ["1", "2", "3"], WAIT_SECONDS, "the records at leaf-all")
        until(lambda: _keys(europe) == ["2"], WAIT_SECONDS, "the record at leaf-eu")
        with pytest.raises(PermissionDenied):
            everything.publish("orders", {"id": 4})


def _keys(client: Client) -> list[str]:
    return sorted(record.key for record in client.query("orders"))


@pytest.mark.long
def test_four_cells_on_a_machine(tmp_path: Path) -> None:
    example = Example(tmp_path, "cells", {"sow": "auth.toml"}, ("ops", "desk"))
    server = example.servers["sow"]
    server.arguments = ["--cells", "4"]
    text = (EXAMPLES / "cells" / "placement.toml").read_text()
    for number in range(4):
        text = text.replace(f"sow.example.com:{7450 + number}", f"127.0.0.1:{example.ports['sow'] + number}")
    (tmp_path / "sow" / "placement.toml").write_text(text)
    with example, example.client("sow", "desk") as desk:
        desk.publish("orders", {"id": 1})
        assert len(server.events("cell_ready")) == 4
        names = [file.name for file in (tmp_path / "sow" / "log").iterdir()]
        assert "audit-cell-4.jsonl" in names
        assert server.terminate() == 0
