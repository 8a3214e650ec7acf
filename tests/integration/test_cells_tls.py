"""Cells that ask each other, and move topics, over TLS (rules C7, C15)."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from sow_cli import command, moving
from sow_cli import placement as placement_command
from sow_cli.moving import LinkFiles
from sow_client import Client, Tls
from tests.support.oracles.access import GUARDED, grant, identity, peer, write_access, write_private
from tests.support.servers.cells import CellServer, placement
from tests.support.servers.certificates import Authority, Issued
from tests.support.servers.server import free_port, until

SECONDS = 30.0


class Ended(Exception):
    """The command was ended."""


@pytest.mark.long
@pytest.mark.parametrize("mutual", [False, True])
def test_cells_hear_of_each_other_over_tls_and_trust_their_own_authority_alone(tmp_path: Path, mutual: bool) -> None:
    """The third one trusts another authority: to it the others are unreachable, and to them it is well."""
    ours, other = Authority(tmp_path, "ours"), Authority(tmp_path, "other")
    issued = ours.issue("sow")
    ports = {cell: free_port() for cell in "abc"}
    addresses = {cell: [f"127.0.0.1:{port}"] for cell, port in ports.items()}
    tls = Tls(ca=ours.file, certificate=issued.certificate, key=issued.key) if mutual else Tls(ca=ours.file)
    with ExitStack() as stack:
        clients = {}
        for cell, port in ports.items():
            text = placement(1, cells=addresses)
            authority = other if cell == "c" else ours
            server = CellServer(
                tmp_path / cell, cell, text, config=_config(cell, issued, ours, mutual), port=port, start=False
            )
            stack.enter_context(server)
            server.configure(server.config.read_text() + _trust(authority, issued, mutual))
            server.start()
            clients[cell] = stack.enter_context(Client(server.address, tls=tls))

        def problems(cell: str) -> dict[str, str]:
            return {problem.cell: problem.kind for problem in clients[cell].placement().problems}

        until(lambda: problems("a") == {} and problems("b") == {}, SECONDS, "the cells that trust each other")
        until(lambda: problems("c") == {"a": "UNREACHABLE", "b": "UNREACHABLE"}, SECONDS, "the one that does not")
        (told,) = [problem.message for problem in clients["c"].placement().problems if problem.cell == "a"]
        assert told.startswith(f"{addresses['a'][0]}: UNAVAILABLE: ")
        assert "CERTIFICATE_VERIFY_FAILED" in told


class GuardedCells:
    """Two cells with mutual TLS, and with an access file each, between which `orders` is to move."""

    def __init__(self, folder: Path, auth: str, stack: ExitStack) -> None:
        """Servers and clients end with `stack`."""
        ours = Authority(folder, "ours")
        served, admin, link = (ours.issue(name) for name in ("sow", "admin", "link"))
        for name in ("root", "watcher", "to-a", "to-b"):
            write_private(folder / name, name)
        ports = {cell: free_port() for cell in "ab"}
        self.home = f"127.0.0.1:{ports['a']}"
        self.tls = Tls(ca=ours.file, certificate=admin.certificate, key=admin.key)
        self.links = LinkFiles(str(ours.file), str(link.certificate), str(link.key))
        for cell, other in ("ab", "ba"):
            known = f'[[peers]]\nname = "{other}-1"\ncertificate = "CN:link"\n'
            known += '[[identities]]\nname = "admin"\ncertificate = "CN:admin"\nroles = ["root"]\n'
            if auth == "token":
                known = peer(f"to-{cell}").replace(f'"to-{cell}"', f'"{other}-1"', 1)
                known += identity("watcher", "watcher") + grant("watcher", ".*", "observe read")
            write_access(folder / cell, known)
            config = GUARDED.replace('"token"', f'"{auth}"\ninstance = "{cell}-1"\nreader_processes = 0')
            config += "[replication]\nserve_links = true\n" + _served(served, ours, mutual=True)
            text = placement(1, cells={name: [f"127.0.0.1:{port}"] for name, port in ports.items()})
            server = CellServer(folder / cell, cell, text, config=config, port=ports[cell], start=False)
            stack.enter_context(server)
            server.configure(server.config.read_text() + _trust(ours, served, mutual=True))
            server.start()
        token = folder / "root" if auth == "token" else None
        self.client = stack.enter_context(Client(self.home, tls=self.tls, token=token))
        self.client.create_topic("orders", key=["/id"])
        self.client.publish("orders", {"id": 1})

    def move(self, *arguments: str, token: Path | None = None) -> Result:
        """Runs the command."""
        line = ["--server", self.home, "--tls-ca", str(self.tls.ca), "--tls-cert", str(self.tls.certificate)]
        line += ["--tls-key", str(self.tls.key), *(["--token-file", str(token)] if token else [])]
        line += ["cells", "move", "orders", "--to", "b", "--links-for", "0s", "--links-before", "0s"]
        line += ["--link-ca", self.links.ca, "--link-certificate", self.links.certificate, "--link-key", self.links.key]
        return CliRunner().invoke(command.sow, [*line, *arguments])

    def check_moved(self) -> None:
        assert [record.key for record in self.client.query("orders")] == ["1"]
        assert self.client.placement("orders").topic_cell == "b"


@pytest.mark.slow
def test_over_tls_a_move_needs_the_credentials_of_the_links_and_a_token_for_each_direction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt to prepare is audited: there are few, however long the copy takes."""
    told: list[str] = []

    def tell(step: str) -> None:
        told.append(step)
        assert len(told) < 300, told
        if "nothing goes back to a-1 yet (the token whose SHA-256 begins with" in step:
            raise Ended
        if re.match(r"no link from a-1 is up; a-1 \(.*\) says: the token whose SHA-256 begins with", step):
            raise Ended

    monkeypatch.setattr(moving, "TELL_SECONDS", 0.1)
    monkeypatch.setattr(placement_command, "note", tell)
    with ExitStack() as stack:
        cells = GuardedCells(tmp_path, "token", stack)
        to_b = ("--link-token-file", str(tmp_path / "to-b"))
        refused = cells.move(*to_b, token=tmp_path / "watcher")
        assert "permission operator" in refused.stderr
        wrong = cells.move("--link-token-file", str(tmp_path / "to-a"), token=tmp_path / "root")
        assert type(wrong.exception) is Ended
        assert cells.move("--abort", token=tmp_path / "root").exit_code == 0
        one_for_both = cells.move(*to_b, token=tmp_path / "root")
        assert type(one_for_both.exception) is Ended
        assert cells.move("--abort", token=tmp_path / "root").exit_code == 0
        done = cells.move(*to_b, "--link-back-token-file", str(tmp_path / "to-a"), token=tmp_path / "root")
        assert done.exit_code == 0, (done.output, told)
        assert json.loads(done.stdout)["kept"] == []
        cells.check_moved()
        audited = (tmp_path / "b" / "audit.jsonl").read_text(encoding="utf-8")
    attempts = audited.count('"prepares": "orders"')
    assert 1 <= attempts <= 36, "of three moves"


@pytest.mark.long
def test_a_topic_moves_over_links_that_show_certificates(tmp_path: Path) -> None:
    with ExitStack() as stack:
        cells = GuardedCells(tmp_path, "certificate", stack)
        done = cells.move()
        assert done.exit_code == 0, done.output
        cells.check_moved()


def _config(cell: str, issued: Issued, ours: Authority, mutual: bool) -> str:
    config = f'[server]\ndynamic_topics = true\ninstance = "{cell}-1"\nreader_processes = 0\n'
    return config + _served(issued, ours, mutual)


def _served(issued: Issued, ours: Authority, mutual: bool) -> str:
    config = f'[server.tls]\ncertificate = "{issued.certificate}"\nkey = "{issued.key}"\n'
    return config + (f'client_ca = "{ours.file}"\n' if mutual else "")


def _trust(authority: Authority, issued: Issued, mutual: bool) -> str:
    """The rest of the table [placement]."""
    own = f'certificate = "{issued.certificate}"\nkey = "{issued.key}"\n' if mutual else ""
    return f'ca = "{authority.file}"\n{own}'
