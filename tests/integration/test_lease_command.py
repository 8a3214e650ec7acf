"""`sow lease` on a real server: one command at a time, and a record as long as it runs (rule L21)."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sow_client import Client
from tests.support.servers.forked_commands import sow
from tests.support.servers.server import ServerProcess

CONFIG = """
[topics.locks]
expiration = "enabled"
[topics.lasting]
"""
SAY_AND_READ = "print('runs', flush=True); input()"
"""A command that tells that it runs, and ends with its input."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("lease"), CONFIG) as made:
        yield made


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with Client(server.address) as made:
        made.sow_delete("locks", all=True)
        yield made


def start(server: ServerProcess, *arguments: str) -> subprocess.Popen[str]:
    """Starts `sow lease`."""
    command = [sow(), "--server", server.address, "lease", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def running(server: ServerProcess, *options: str, program: str = SAY_AND_READ) -> subprocess.Popen[str]:
    """Starts `sow lease` with a command of Python, and returns once that runs."""
    started = start(server, "locks", "--key", "job", *options, "--", sys.executable, "-c", program)
    assert started.stdout is not None
    assert started.stdout.readline() == "runs\n"
    return started


def test_one_command_runs_at_a_time(server: ServerProcess, client: Client) -> None:
    first = running(server, "--data", '{"by": 1}')
    record = client.get("locks", "job")
    assert record is not None
    assert record.data == {"by": 1}
    assert record.expire_time is not None

    second = start(server, "locks", "--key", "job", "--", sys.executable, "-c", "print('runs')")
    said, complained = second.communicate()
    assert (second.returncode, said) == (1, "")
    assert "another has this record of locks" in complained
    assert "CONDITION_FAILED" in complained

    first.communicate("\n")
    assert first.returncode == 0
    assert client.get("locks", "job") is None


def test_the_exit_code_is_that_of_the_command(server: ServerProcess, client: Client) -> None:
    ends = [("exit(7)", 7), ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", 128 + signal.SIGTERM)]
    for program, code in ends:
        done = start(server, "locks", "--key", "job", "--", sys.executable, "-c", program)
        done.communicate()
        assert done.returncode == code
    assert client.get("locks", "job") is None


def test_a_command_that_has_lost_its_record_is_stopped(server: ServerProcess, client: Client) -> None:
    started = running(server, "--ttl", "1s")
    client.publish("locks", {"by": "another"}, key="job", ttl="1h")
    _, complained = started.communicate()  # its input ends, so what has stopped it does not matter here
    assert started.returncode == 1
    assert "LEASE_LOST" in complained
    record = client.get("locks", "job")
    assert record is not None
    assert record.data == {"by": "another"}


def test_a_lost_record_ends_a_command_that_would_go_on(server: ServerProcess, client: Client) -> None:
    started = running(
        server, "--ttl", "1s", program="import threading; print('runs', flush=True); threading.Event().wait()"
    )
    client.sow_delete("locks", keys=["job"])
    _, complained = started.communicate()
    assert started.returncode == 1
    assert "LEASE_LOST" in complained


def test_sigterm_ends_the_command_and_deletes_the_record(server: ServerProcess, client: Client) -> None:
    started = running(server, program="import threading; print('runs', flush=True); threading.Event().wait()")
    started.send_signal(signal.SIGTERM)
    started.communicate()
    assert started.returncode == 143
    assert client.get("locks", "job") is None


def test_a_lease_that_cannot_be_runs_nothing(server: ServerProcess, client: Client, tmp_path: Path) -> None:
    made = tmp_path / "made"
    touch = [sys.executable, "-c", f"open({str(made)!r}, 'w')"]
    refused = start(server, "lasting", "--key", "job", "--", *touch)
    refused.communicate()
    assert refused.returncode == 1
    assert not made.exists()
    missing = start(server, "locks", "--key", "job", "--", str(made))
    missing.communicate()
    assert missing.returncode == 2
    assert client.get("locks", "job") is None


def test_a_wrong_key_tells_the_next_step(server: ServerProcess, client: Client) -> None:
    client.create_topic("members", key=["/id"], exist_ok=True)
    for arguments, hint in ((["locks"], "--key KEY names the record"), (["members", "--key", "1"], "as --data '{…}'")):
        refused = start(server, *arguments, "--", sys.executable, "-c", "print('runs')")
        out, told = refused.communicate()
        assert (refused.returncode, out) == (1, "")
        assert hint in told.splitlines()[-1]
