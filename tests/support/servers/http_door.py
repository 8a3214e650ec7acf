"""`sow http` for tests, in a process of its own."""

from __future__ import annotations

import re
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.support.servers.console import NO_AUTHORITIES
from tests.support.servers.forked_commands import sow
from tests.support.servers.server import until


@dataclass(frozen=True, slots=True)
class RunningDoor:
    """The process, and its address."""

    address: str
    process: subprocess.Popen[str]

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def kill(self) -> None:
        """SIGKILL. Returns once nobody listens: another process may stand in its place, whose end is its end."""
        self.process.kill()
        self.process.wait()
        until(lambda: socket.socket().connect_ex(("127.0.0.1", self.port)) != 0, 20, "the end of the door")

    def client(self, token: str | None = None, *, verify: Path | None = None) -> httpx.Client:
        """A caller, who shows a token, and trusts an authority."""
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        trusted = NO_AUTHORITIES if verify is None else ssl.create_default_context(cafile=verify)
        return httpx.Client(base_url=self.address, headers=headers, timeout=30, verify=trusted)


@contextmanager
def running_door(servers: str, *options: str, port: int = 0) -> Iterator[RunningDoor]:
    """Starts `sow http` for servers, on a free port by default."""
    process = subprocess.Popen(
        [sow(), "--server", servers, "http", "--listen", f"127.0.0.1:{port}", *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        found = re.match(r"serves .* at (https?://127\.0\.0\.1:\d+)$", first)
        assert found, first + process.stdout.read()
        yield RunningDoor(found[1], process)
    finally:
        process.terminate()
        try:
            process.wait(30)
        finally:
            process.kill()
