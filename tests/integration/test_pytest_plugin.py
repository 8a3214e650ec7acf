"""The fixtures for tests of users (docs/howto/testing.md): pytest runs in a process of its own, as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

import pytest

from tests.support.servers.server import ROOT, until

SECONDS_MAX: Final = 120
SOURCES: Final = (ROOT, ROOT / "proto", ROOT / "clients", ROOT / "replication")
Pytest = Callable[..., subprocess.CompletedProcess[str]]
pytestmark = pytest.mark.slow

SEVERAL: Final = """
import asyncio, sys, threading
import pytest
from pathlib import Path

def test_1_unused():
    ours = [name for name in sys.modules if name.partition(".")[0] in ("sow", "sow_client", "sow_server", "grpc")]
    assert ours == []

@pytest.fixture(scope="module")
def shared(sow_server_process):
    from sow_client import Client
    with Client(sow_server_process.address) as client:
        client.create_topic("shared", key=["/id"])

def test_2_makes_all_kinds_of_things(shared, sow_server, sow_clock):
    client = sow_server.client
    orders = sow_server.topic("orders", key=["/id"], expiration="1h")
    assert orders == sow_server.topic("orders") and orders.endswith("orders") and "makes_all" in orders
    client.publish_many(orders, [{"id": number, "desk": number % 7} for number in range(3_000)])
    client.publish(orders, {"id": "lasting"}, ttl="3h")
    client.create_view("by_desk", source=orders, group_by=["/desk"], select={"n": "COUNT(*)"})
    client.set_policy("mine", "zz.*", topics={"expiration": "1h"})
    with client.durable(orders, "worker"):
        pass
    with sow_server.connect().subscribe(orders, oof=True) as changes:
        sow_clock.advance("61m")
        assert client.count(orders) == 1
        seen = [next(changes) for _ in range(3_000)]
        assert {change.reason for change in seen} == {"expired"}
    sow_clock.advance(7200)
    assert client.count(orders) == 0

def test_3_meets_nothing_of_it(sow_client, sow_server):
    assert [topic.name for topic in sow_client.topics()] == ["shared"]
    assert sow_client.policies() == [] and sow_client.durables() == []
    sow_server.client.close()  # a program that closes it leaves nothing behind, either

async def lives(sow_server):
    topic = sow_server.topic("orders", expiration="1h")
    async with sow_server.async_client() as client:
        await client.publish(topic, {"a": 1}, key="x")
        assert await client.count(topic) == 1

def test_4_of_asyncio_an_hour_later(sow_server):
    asyncio.run(lives(sow_server))

def test_5_time_goes_forward(sow_clock):
    sow_clock.advance("-1h")

def test_6_fails(sow_server):
    from sow_client import Client
    sow_server.client.publish("noted", b"{}", key="a")
    Path("log").write_text(sow_server.process.log())
    with sow_server.process._log.open("a") as log:
        log.write("said in test 6\\n")
    assert False
"""


@pytest.fixture
def run_pytest(tmp_path: Path) -> Pytest:
    """Runs pytest in an empty folder with one file of tests."""

    def run(
        text: str, *arguments: str, folder: Path = tmp_path, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        if text:
            (folder / "test_it.py").write_text(text, encoding="utf-8")
        registered = any(entry.name == "sow" for entry in entry_points(group="pytest11"))
        paths = os.pathsep.join([environment.pop("FIRST_PATH", ""), *map(str, SOURCES)]).strip(os.pathsep)
        return subprocess.run(
            [sys.executable, "-m", "pytest", *([] if registered else ["-p", "sow_pytest.plugin"]), *arguments],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": paths} | environment,
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
        )

    return run


def test_tests_share_a_server_and_meet_nothing_of_each_other(run_pytest: Pytest) -> None:
    done = run_pytest(SEVERAL, "-q", "-p", "no:randomly", "-p", "no:cacheprovider")
    assert "2 failed, 4 passed" in done.stdout, done.stdout + done.stderr
    assert "InvalidArgument: by: duration '-1h' is negative" in done.stdout
    assert "log of sow-server on 127.0.0.1:" in done.stdout
    of_last_test = done.stdout.partition("test_6_fails")[2]
    assert "said in test 6" in of_last_test
    assert '"ready"' not in of_last_test.partition("short test summary")[0], "the log of others is not shown"


def test_each_worker_of_xdist_has_a_server_of_its_own(run_pytest: Pytest, tmp_path: Path) -> None:
    done = run_pytest(
        "import os\nfrom pathlib import Path\ndef test_it(sow_server, sow_clock):\n"
        "    sow_server.client.publish('settings', b'{}', key=os.environ['PYTEST_XDIST_WORKER'], ttl='1h')\n"
        "    assert sow_server.client.count('settings') == 1\n"
        "    sow_clock.advance('1h')\n"
        "    Path(os.environ['PYTEST_XDIST_WORKER']).write_text(sow_server.address)\n",
        *("-q", "-n", "2", "--dist", "each", "-p", "no:cacheprovider"),
    )
    assert "2 passed" in done.stdout, done.stdout + done.stderr
    first, second = ((tmp_path / worker).read_text() for worker in ("gw0", "gw1"))
    assert first != second


def test_our_own_example_uses_the_fixtures(run_pytest: Pytest) -> None:
    done = run_pytest("", "-q", "-p", "no:cacheprovider", "examples/testing", folder=ROOT)
    assert "2 passed" in done.stdout, done.stdout + done.stderr


def test_without_the_packages_of_the_server_a_test_is_an_error_that_names_them(
    run_pytest: Pytest, tmp_path: Path
) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "rocksdict.py").write_text("raise ModuleNotFoundError('gone', name='rocksdict')")
    done = run_pytest("def test_it(sow_client): pass\ndef test_other(): pass", "-q", FIRST_PATH=str(tmp_path / "first"))
    assert "1 passed, 1 error" in done.stdout, done.stdout
    assert "sow_server: the server did not start: the Python package 'rocksdict' is missing" in done.stdout
    assert "pip install 'sow[server]'" in done.stdout
    assert "Traceback" not in done.stdout


def test_a_configuration_that_is_refused_is_an_error_with_its_line(run_pytest: Pytest, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "import pytest\n@pytest.fixture(scope='session')\ndef sow_server_config():\n    return '[server]\\nportt = 1'\n"
    )
    done = run_pytest("def test_it(sow_client): pass", "-q")
    assert "1 error" in done.stdout
    assert "portt" in done.stdout


def test_the_time_moves_with_a_configuration_that_has_no_dynamic_topics(run_pytest: Pytest, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "import pytest\n@pytest.fixture(scope='session')\ndef sow_server_config():\n"
        '    return \'[topics.prices]\\nkey = ["/symbol"]\\nexpiration = "1m"\'\n'
    )
    done = run_pytest(
        "def test_it(sow_client, sow_clock):\n    sow_client.publish('prices', {'symbol': 'ACME'})\n"
        "    sow_clock.advance('1m')\n    assert sow_client.count('prices') == 0\n",
        *("-q", "-p", "no:cacheprovider"),
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_the_server_ends_with_a_pytest_that_is_killed(run_pytest: Pytest, tmp_path: Path) -> None:
    done = run_pytest(
        "import os, signal\nfrom pathlib import Path\ndef test_it(sow_server):\n"
        "    Path('pid').write_text(str(sow_server.process._process.pid))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n",
        "-q",
    )
    assert done.returncode < 0
    pid = int((tmp_path / "pid").read_text())
    until(lambda: not Path(f"/proc/{pid}").exists() or _is_zombie(pid), 30, "the server to end")


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
