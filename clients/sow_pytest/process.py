"""The process of the server that the tests of a session share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final

START_SECONDS: Final = 60.0
STOP_SECONDS: Final = 30.0
LOOK_SECONDS: Final = 0.01


class DidNotStart(Exception):
    """The server ended instead of becoming ready, or did not become ready in time."""


class ServerOfSession:
    """Owns the process, which ends with the process that made it, however that ends: `child` reads a pipe from it."""

    def __init__(self, folder: Path, config: str) -> None:
        """Starts it in a folder, on a free port of the loopback. Raises DidNotStart."""
        file = folder / "sow.toml"
        file.touch(0o600)  # it may have a token (rule X5)
        file.write_text(config, encoding="utf-8")
        self._log = folder / "server.log"
        arguments = ["--config", str(file), "--data-dir", str(folder / "data"), "--listen", "127.0.0.1:0"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sow_pytest.child", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=folder,
                env={name: value for name, value in os.environ.items() if not name.startswith("SOW_")},
                start_new_session=True,  # Ctrl-C is for pytest, whose fixtures still need the server
                text=True,
            )
        self._moving = threading.Lock()
        self.number = 0
        """The number of tests so far."""
        try:
            self.address: Final = self._await_ready()
        except BaseException:
            self.stop()
            raise

    def _await_ready(self) -> str:
        give_up = time.monotonic() + START_SECONDS
        while time.monotonic() < give_up:
            ended = self._process.poll() is not None
            for line in self.log().split("\n")[:-1]:
                if '"ready"' in line and (event := json.loads(line))["event"] == "ready":
                    return str(event["address"])
            if ended:
                raise DidNotStart(f"the server did not start: {self.log().strip().removeprefix('sow-server: ')}")
            time.sleep(LOOK_SECONDS)
        raise DidNotStart(f"the server was not ready within {START_SECONDS:g} s:\n{self.log()}")

    def log(self, begin: int = 0) -> str:
        """The log from a byte on."""
        with self._log.open("rb") as log:
            log.seek(begin)
            return log.read().decode(errors="replace")

    def log_bytes(self) -> int:
        """The length of the log."""
        return self._log.stat().st_size

    def move(self, micros: int) -> None:
        """Moves the store's time forward."""
        orders, answers = self._process.stdin, self._process.stdout
        assert orders is not None, "it is a pipe"
        assert answers is not None, "it is a pipe"
        with self._moving:
            orders.write(f"{micros}\n")
            orders.flush()
            if not answers.readline():
                raise RuntimeError("the server of the tests has ended")

    def stop(self) -> None:
        """Ends it in order; after `STOP_SECONDS` at once."""
        try:
            self._process.communicate(timeout=STOP_SECONDS)  # it closes the pipe
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
