"""A log that nobody reads: neither a server nor a supervisor waits for it."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sow_client import Client
from tests.support.servers.server import PYTHONPATH, ROOT, free_port

TOPICS = 200
PIPE_BYTES = 4096


PATHS = (str(ROOT), str(ROOT / "proto"), str(ROOT / "replication"), *PYTHONPATH)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--config", "missing.toml"], ["--cells", "x"]])
def test_a_server_that_refuses_to_start_ends_although_nobody_reads_its_message(arguments: list[str]) -> None:
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    assert os.write(writes, b"x" * PIPE_BYTES) == PIPE_BYTES
    os.set_blocking(writes, True)
    with subprocess.Popen(
        [sys.executable, "-m", "sow_server", *arguments],
        stderr=writes,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(PATHS)},
    ) as server:
        try:
            assert server.wait(60) == 2
        finally:
            server.kill()
            os.close(reads)
            os.close(writes)


@pytest.mark.long
@pytest.mark.parametrize("arguments", [[], ["--cells", "2"]])
def test_a_log_that_nobody_reads_holds_no_call_up(tmp_path: Path, arguments: list[str]) -> None:
    """Story: the collector of the log hung, and with the pipe full the server answered nobody any more."""
    config = tmp_path / "sow.toml"
    config.write_text(
        f'[server]\ndynamic_topics = true\nlisten = "127.0.0.1:{free_port()}"\nreader_processes = 0\n'
        '[log]\nformat = "json"\n'
    )
    reads, writes = os.pipe()
    fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    with subprocess.Popen(
        [sys.executable, "-m", "sow_server", "--config", str(config), "--data-dir", str(tmp_path / "data"), *arguments],
        stdout=writes,
        stderr=writes,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(PATHS)},
    ) as server:
        try:
            os.close(writes)
            address = config.read_text().split('"')[1]
            with Client(address, connect_timeout=90) as client:
                for number in range(TOPICS):
                    client.create_topic(f"topic-{number}")  # each one is a line of more than 100 bytes
            server.send_signal(signal.SIGTERM)
            with open(reads, "rb") as log:
                lines = log.read().splitlines()
            assert server.wait(60) == 0
        finally:
            server.kill()
    assert sum(b'"topic_created"' in line for line in lines) == TOPICS, "all of them, as they fit into memory"
    assert all(line.startswith(b"{") and line.endswith(b"}") for line in lines)
