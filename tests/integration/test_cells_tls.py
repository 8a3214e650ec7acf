"""Cells that ask each other over TLS (rule C7)."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from sow_client import Client, Tls
from tests.support.servers.cells import CellServer, placement
from tests.support.servers.certificates import Authority, Issued
from tests.support.servers.server import free_port, until

SECONDS = 30.0


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


def _config(cell: str, issued: Issued, ours: Authority, mutual: bool) -> str:
    config = f'[server]\ndynamic_topics = true\ninstance = "{cell}-1"\nreader_processes = 0\n'
    config += f'[server.tls]\ncertificate = "{issued.certificate}"\nkey = "{issued.key}"\n'
    return config + (f'client_ca = "{ours.file}"\n' if mutual else "")


def _trust(authority: Authority, issued: Issued, mutual: bool) -> str:
    """The rest of the table [placement]."""
    own = f'certificate = "{issued.certificate}"\nkey = "{issued.key}"\n' if mutual else ""
    return f'ca = "{authority.file}"\n{own}'
