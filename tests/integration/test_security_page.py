"""docs/security.md, followed word for word in an empty folder, gives the results that it shows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.servers.forked_commands import commands
from tests.support.servers.pages import Reader, blocks
from tests.support.servers.server import ROOT, until

PAGE = ROOT / "docs" / "security.md"
END = PAGE.read_text(encoding="utf-8").split("\n## From programs")[0].count("\n")
"""The line at which the walk ends."""
PRICER = "sow --tls-cert pricer.pem --tls-key pricer.key whoami"


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    made = Reader(tmp_path, commands())
    yield made
    made.close()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the page makes certificates with the command openssl")
def test_the_walk_through_tokens_certificates_and_jwts_works(reader: Reader) -> None:
    """Story: the token of the first line was refused, and the query found no topic."""
    written: list[dict[str, object]] = []
    for block in blocks(PAGE):
        if block.line > END or block.language == "json":
            continue
        reader.follow_block(block)
        if "tls init" not in block.text:  # its lines are for a shell
            written += map(json.loads, reader.told.splitlines())
        if "-revoke" in block.text:
            until(lambda: "the client certificate is revoked" in reader.refusal(PRICER), 30, "the revocation")
    assert [line["identity"] for line in written if "identity" in line] == ["desk-eu", "pricer", "alice"]
    assert [line["credential"] for line in written if "credential" in line] == ["token", "certificate", "jwt"]
    payloads = [line["payload"] for line in written if "payload" in line]
    assert payloads == [{"id": 1, "region": "eu", "client": {"name": "A"}}] * 3, "without /client/iban"
    (checked,) = (line for line in written if "allowed" in line)
    assert checked["allowed"]
    assert str(checked["decided_by"]).startswith("auth.toml:11 "), "the line of [[roles.trader-eu.grants]]"
    for name in ("auth.toml", "desk.token", "ops.token", "alice.jwt", "server.key", "pricer.key", "sow-audit.jsonl"):
        assert (reader.folder / name).stat().st_mode & 0o777 == 0o600, name
