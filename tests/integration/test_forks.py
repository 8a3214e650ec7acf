"""Forked servers behave as started ones (`tests.support.servers.forks`)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.servers.server import MEASURED, ROOT, ServerProcess, until


def test_a_forked_process_has_its_own_id_exit_code_and_output(tmp_path: Path) -> None:
    """Invariant forks [1]."""
    server = ServerProcess(tmp_path, "[server]\nnonsense = 1\n", start=False)
    server.launch()
    assert server.pid != os.getpid()
    assert server.wait() == 2
    assert "nonsense" in server.said
    server.configure("")
    server.start()
    server.signal(signal.SIGKILL)
    assert server.wait() == -signal.SIGKILL


@pytest.mark.skipif(MEASURED, reason="under coverage, servers are started, not forked")
def test_no_server_outlives_the_process_that_had_it_forked(tmp_path: Path) -> None:
    """Invariant forks [2], also where that process is killed."""
    program = (
        "import sys, time; from pathlib import Path; from tests.support.servers.server import ServerProcess\n"
        f"print(ServerProcess(Path({str(tmp_path)!r})).pid, flush=True); time.sleep(600)"
    )
    paths = os.pathsep.join(str(ROOT / folder) for folder in (".", "proto", "clients", "replication"))
    environment = os.environ | {"PYTHONPATH": paths}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        os.kill(pid, 0)
        process.kill()

    def gone() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except FileNotFoundError:
            return True

    until(gone, 30, "the server to be gone")
