"""The lines that `sow tls init` prints, word for word: a server that asks for certificates, and a command with one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from sow_cli.command import sow
from tests.support.servers.server import ROOT, free_port, unmeasured, until

SOURCES = os.pathsep.join(str(ROOT / folder) for folder in (".", "proto", "clients", "replication"))
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


class Trial:
    """A folder of certificates, and a server that was started as printed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        done = CliRunner().invoke(sow, ["tls", "init", str(folder / "certs"), "--client", "desk"])
        assert done.exit_code == 0, done.output
        _, _, self.server_line, _, self.command_line = [
            part.strip() for part in done.stdout.replace("\\\n", " ").splitlines()
        ]
        address = f"localhost:{free_port()}"
        self.environment = unmeasured() | {
            "PYTHONPATH": SOURCES,
            "PATH": PATH,
            "SOW_SERVER_LISTEN": address,
            "SOW_SERVER_DATA_DIR": str(folder / "data"),
        }
        self.command_line = self.command_line.replace("localhost:7450", address)
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.server = subprocess.Popen(
                ["bash", "-c", f"export {self.server_line.replace(' sow-server', '; exec sow-server')}"],
                env=self.environment, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        until(lambda: '"ready"' in self.log.read_text() or self.server.poll() is not None, 60, "the server")
        assert self.server.poll() is None, self.log.read_text()

    def run(self, line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", line], env=self.environment, capture_output=True, text=True, check=False, timeout=60
        )


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    made = Trial(tmp_path_factory.mktemp("trial"))
    yield made
    made.server.send_signal(signal.SIGTERM)
    assert made.server.wait(30) == 0


def test_the_printed_lines_start_a_server_and_ask_it(trial: Trial) -> None:
    done = trial.run(trial.command_line)
    assert done.returncode == 0, done.stderr
    assert '"serving"' in done.stdout


def test_a_client_without_a_certificate_of_the_authority_is_refused(trial: Trial) -> None:
    without = trial.run(trial.command_line.partition(" --tls-cert")[0] + " status")
    assert without.returncode == 4, without.stderr
    other = trial.folder / "other"
    assert CliRunner().invoke(sow, ["tls", "init", str(other), "--client", "desk"]).exit_code == 0
    certs = str(trial.folder / "certs")
    stranger = trial.run(
        trial.command_line.replace(f"{certs}/desk.pem", f"{other}/desk.pem").replace(
            f"{certs}/desk.key", f"{other}/desk.key"
        )
    )
    assert stranger.returncode == 4, stranger.stderr
