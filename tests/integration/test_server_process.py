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

from sow_client import Client

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


def test_it_starts_by_the_environment_alone_and_tells_so(tmp_path: Path) -> None:
    """As in a container: no file, no option."""
    server = subprocess.Popen(
        [sys.executable, "-m", "sow_server"],
        env=ENVIRONMENT
        | {
            "SOW_SERVER_LISTEN": "127.0.0.1:0",
            "SOW_SERVER_DATA_DIR": str(tmp_path / "d"),
            "SOW_SERVER_DEFAULTS_EXPIRATION": "1h",
            "SOW_SERVER_PORT_7450_TCP": "tcp://10.0.0.1:7450",
        },
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stderr is not None
        event = next(found for found in map(json.loads, server.stderr) if found["event"] == "ready")
        with Client(event["address"]) as client:
            client.publish("orders", {"id": 1}, key="1")
            record = client.get("orders", "1")
            assert record is not None
            assert record.expire_time is not None
            told = {(one.table, one.key) for one in client.config() if one.origin == "environment"}
        assert told == {("server", "listen"), ("server", "data_dir"), ("defaults", "expiration")}
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=30)
        assert server.returncode == 0
    finally:
        server.kill()
        server.wait()


def test_a_variable_with_a_typing_error_is_refused_and_the_help_lists_the_right_ones() -> None:
    done = _run("--check-config", before="import os; os.environ['SOW_SERVER_LISEN'] = '127.0.0.1:1'")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "sow-server: SOW_SERVER_LISEN: is not a variable of the server, did you mean SOW_SERVER_LISTEN?\n"
    )
    assert " SOW_SERVER_LISTEN" in _run("--help").stdout
    lacking = _run("--help", before="sys.modules['re2'] = None")
    assert lacking.returncode == 0
    assert "they are listed where the server's libraries are installed" in lacking.stdout
