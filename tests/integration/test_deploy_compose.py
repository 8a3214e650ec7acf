"""deploy/compose without containers: its server and its console, with the same variables, options and health checks.

Ports, and the folder of the data, are those of the test. Prometheus and Grafana are not started.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.support.servers.server import ROOT, free_port, unmeasured, until

SERVICES: Final[dict[str, Any]] = yaml.safe_load((ROOT / "deploy" / "compose" / "compose.yaml").read_text())["services"]
SOURCES: Final = os.pathsep.join(str(ROOT / folder) for folder in (".", "proto", "clients", "replication"))
PATH: Final = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
START_SECONDS: Final = 60.0


class Containers:
    """Services as processes of this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._own = {port: str(free_port()) for port in ("7450", "9464", "7480")} | {"/var/lib/sow": str(folder)}

    def _text(self, text: str) -> str:
        for theirs, own in self._own.items():
            text = text.replace(theirs, own)
        return text.replace("0.0.0.0", "127.0.0.1")

    def _environment(self, service: str) -> dict[str, str]:
        given = {name: self._text(text) for name, text in SERVICES[service]["environment"].items()}
        return unmeasured() | {"PYTHONPATH": SOURCES, "PATH": PATH} | given

    def check(self, service: str) -> int:
        """The exit code of the health check."""
        command = [self._text(word) for word in SERVICES[service]["healthcheck"]["test"][1:]]
        return subprocess.run(
            command, env=self._environment(service), cwd=self._folder, capture_output=True, check=False, timeout=30
        ).returncode

    @contextmanager
    def up(self, service: str) -> Iterator[Path]:
        """Starts it and waits until it is healthy; yields the file of its output."""
        log = self._folder / f"{service}.log"
        with log.open("wb") as out:
            command = [self._text(word) for word in SERVICES[service]["entrypoint"]]
            process = subprocess.Popen(
                command, env=self._environment(service), cwd=self._folder, stdout=out, stderr=out
            )
        try:
            until(lambda: process.poll() is not None or b"ready" in log.read_bytes() or b"serves" in log.read_bytes(),
                  START_SECONDS, service)  # fmt: skip
            assert process.poll() is None, log.read_text()
            until(lambda: self.check(service) == 0, START_SECONDS, f"{service} to be healthy")
            yield log
        finally:
            process.terminate()
            process.wait(30)


@pytest.mark.slow
def test_the_server_and_the_console_become_healthy(tmp_path: Path) -> None:
    containers = Containers(tmp_path)
    assert containers.check("server") != 0
    with containers.up("server"):
        assert containers.check("console") != 0
        with containers.up("console") as log:
            assert "/open?code=" in log.read_text(), "the address that a user opens"
    assert (tmp_path / "data").is_dir()
