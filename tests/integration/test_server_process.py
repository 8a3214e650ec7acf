"""`sow-server` as a process: its exit codes, its one message, its signals."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = os.pathsep.join(str(ROOT / folder) for folder in (".", "proto", "clients"))
ENVIRONMENT = {**os.environ, "PYTHONPATH": SOURCES}


def _run(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    code = f"import sys; {before or None}; from sow_server.__main__ import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("package", ["structlog", "rocksdict"])
def test_without_the_servers_libraries_the_message_names_the_remedy(package: str) -> None:
    done = _run("--check-config", before=f"sys.modules[{package!r}] = None")
    assert done.returncode == 2
    assert done.stderr == (
        f"sow-server: the Python package {package!r} is missing; install the server with: pip install 'sow[server]', "
        "or in a checkout: pip install '.[server]'\n"
    )


def test_a_port_that_is_taken_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = _run("--listen", address, "--data-dir", str(tmp_path / "d"))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"sow-server: cannot listen on {address}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_says_ready_with_its_address_and_stops_in_order(tmp_path: Path, number: signal.Signals) -> None:
    server = subprocess.Popen(
        [sys.executable, "-m", "sow_server", "--listen", "127.0.0.1:0", "--data-dir", str(tmp_path / "d")],
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stderr is not None
        event: dict[str, str] = {}
        for line in server.stderr:
            event = json.loads(line)
            if event["event"] == "ready":
                break
        assert event.get("event") == "ready"
        host, _, port = event["address"].rpartition(":")
        socket.create_connection((host, int(port)), timeout=10).close()
        server.send_signal(number)
        rest = server.communicate(timeout=30)[1]
        assert server.returncode == 0
        assert "Traceback" not in rest
    finally:
        server.kill()
        server.wait()
