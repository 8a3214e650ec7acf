"""docs/security.md, followed word for word in an empty folder, gives the results that it shows."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.server import ROOT, START_SECONDS, STOP_SECONDS, free_port, until

PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
WALK = PAGE.split("\n## From programs")[0]
BLOCKS: list[tuple[str, str]] = re.findall(r"```(\w+)\n(.+?)```", WALK, re.DOTALL)
RUN_SECONDS_MAX = 120.0
MODULES = {"sow": "-m sow_cli", "sow-server": "-m sow_server", "python": ""}


PRICER = "sow --tls-cert pricer.pem --tls-key pricer.key whoami"


class Reader:
    """Does what the page says: writes its files, runs its commands, and has one server at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = str(free_port())
        self._server: subprocess.Popen[bytes] | None = None
        self._exports = ""
        programs = folder / "bin"
        programs.mkdir()
        for name, module in MODULES.items():  # of this checkout, whatever is installed
            (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
            (programs / name).chmod(0o755)
        paths = (ROOT, ROOT / "proto", ROOT / "clients", ROOT / "replication")
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("SOW_")} | {
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")]),
            "SOW_SERVER": f"127.0.0.1:{self.port}",
        }

    def follow(self, language: str, text: str) -> str:
        """Follows one block; returns what its commands wrote to standard output."""
        text = text.replace("7450", self.port)
        if language in ("toml", "python"):
            (self.folder / text.split()[1]).write_text(text, encoding="utf-8")
            return ""
        if text.startswith("sow-server"):
            self._serve(text)
            return ""
        done = self._run(self._exports + text)
        self._exports += "".join(re.findall(r"^export .*\n", text, re.MULTILINE))
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
        return done.stdout

    def refusal(self, command: str) -> str:
        """The output of a command to standard error."""
        return self._run(self._exports + command).stderr

    def _run(self, text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-ec", text],
            check=False,
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS_MAX,
        )

    def _serve(self, text: str) -> None:
        self.stop()
        log = self.folder / "server.log"
        with log.open("wb") as file:
            self._server = subprocess.Popen(
                ["bash", "-ec", text], cwd=self.folder, env=self._environment, stderr=file, start_new_session=True
            )
        server = self._server
        until(lambda: '"event": "ready"' in log.read_text() or server.poll() is not None, START_SECONDS, "the server")
        assert server.poll() is None, log.read_text()

    def stop(self) -> None:
        """Ends the server, and the shell that started it."""
        server, self._server = self._server, None
        if server is not None and server.poll() is None:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(STOP_SECONDS)


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    made = Reader(tmp_path)
    yield made
    made.stop()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the page makes certificates with the command openssl")
def test_the_walk_through_tokens_certificates_and_jwts_works(reader: Reader) -> None:
    """Story: the token of the first line was refused, and the query found no topic."""
    written: list[dict[str, object]] = []
    for language, text in BLOCKS:
        written += map(json.loads, reader.follow(language, text).splitlines())
        if "-revoke" in text:
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
