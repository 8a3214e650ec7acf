"""`sow bench` against a real server: what it measures, what it touches, and what it leaves behind."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from click.testing import CliRunner, Result

from sow.version import __version__
from sow_cli import command
from sow_cli.bench_plan import WORKS
from sow_cli.workload import Workload
from sow_client import AsyncSubscription, Client, Unavailable
from tests.support.oracles.access import GUARDED, client_of, grant, identity, write_access, write_private
from tests.support.servers.forked_commands import sow
from tests.support.servers.server import ServerProcess, free_port, until

SAID_NO: Final = 1
WRONG_USAGE: Final = 2
NOT_REACHABLE: Final = 3
SMALL: Final = ("--records", "1000", "--seconds", "0.1", "--format", "ndjson")


@pytest.fixture(scope="module")
def metrics_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, metrics_port: int) -> Iterator[ServerProcess]:
    config = f"[server]\nreader_processes = 0\n[metrics]\nlisten = '127.0.0.1:{metrics_port}'\n"
    with ServerProcess(tmp_path_factory.mktemp("bench"), config) as made:
        yield made
        assert not made.faults()


def bench(address: str, *arguments: str, before: tuple[str, ...] = ()) -> Result:
    return CliRunner().invoke(command.sow, ["--server", address, *before, "bench", *arguments])


def rows(done: Result) -> dict[str, dict[str, object]]:
    """The results by their work."""
    return {str(row["work"]): row for row in map(json.loads, done.stdout.splitlines())}


def topics(server: ServerProcess) -> list[str]:
    with server.client() as client:
        return [topic.name for topic in client.topics()]


def test_every_work_is_measured_and_no_topic_is_left(server: ServerProcess) -> None:
    done = bench(server.address, *SMALL, "--indexes", "2", "--subscribers", "3", "--topics", "2", "--ttl", "1h")

    assert done.exit_code == 0, done.stderr
    found = rows(done)
    assert list(found) == list(WORKS)
    assert found["publish"]["operations"] == 1000
    assert int(str(found["query"]["operations"])) % 500 == 0, "whole topics"
    assert int(str(found["deliver"]["operations"])) % 100 == 0, "each record of a publish is for one subscriber"
    assert found["expire"]["operations"] == 500
    for row in found.values():
        assert float(str(row["per_second"])) > 0
        assert 0 < float(str(row["p50_micros"])) <= float(str(row["p99_micros"]))
        assert float(str(row["server_cpu_micros"])) > 0, "the server is on this machine"
        assert int(str(row["server_memory_bytes"])) > 2**20
        assert int(str(row["server_disk_bytes"])) > 0
    assert topics(server) == []


def test_of_several_instances_one_is_measured_with_its_cpu_time(server: ServerProcess) -> None:
    """The list was taken for the address of the server, so there was no CPU time; and a work could have moved."""
    done = bench(f"127.0.0.1:{free_port()},{server.address}", *SMALL, "--work", "publish")

    assert done.exit_code == 0, done.stderr
    assert f"at {server.address}, and no other" in done.stderr
    assert float(str(rows(done)["publish"]["server_cpu_micros"])) > 0
    assert topics(server) == []


def test_subscribers_of_everything_get_each_record(server: ServerProcess) -> None:
    done = bench(server.address, *SMALL, "--work", "deliver", "--subscribers", "4", "--follow", "all")

    assert int(str(rows(done)["deliver"]["operations"])) % 400 == 0


def test_a_table_has_a_line_for_each_work_that_was_asked_for(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    done = bench(server.address, *SMALL[:-1], "table", "--work", "get")

    header, _, *lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stdout
    publish, get = lines
    assert header.split()[:3] == ["work", "operations", "time"]
    assert publish.split()[0:2] == ["publish", "1,000"]
    assert get.split()[0] == "get"


def test_times_are_drawn(server: ServerProcess) -> None:
    done = bench(server.address, *SMALL[:-2], "--work", "get", "--plot")
    assert done.exit_code == 0, done.stderr
    figures, publishes, gets = done.stdout.split("\n\n")
    assert figures.split()[0] == "work"
    assert publishes.splitlines()[0] == "publish: samples by time"
    title, *bars = gets.splitlines()
    assert title == "get: samples by time"
    operations = next(line for line in figures.splitlines() if line.startswith("get")).split()[1]
    assert sum(int(re.split(" {2,}", bar)[1].replace(",", "")) for bar in bars) == int(operations.replace(",", ""))
    assert bench(server.address, *SMALL, "--plot").exit_code == WRONG_USAGE, "NDJSON has no bars"


def test_a_report_has_the_figures_with_settings_and_versions(server: ServerProcess, tmp_path: Path) -> None:
    file = tmp_path / "bench.md"
    done = bench(server.address, "--records", "500", "--seconds", "0.1", "--work", "get", "--report", str(file))

    assert done.exit_code == 0, done.stderr
    text = file.read_text()
    assert f"| server | {__version__} |" in text
    assert "| records | 500 |" in text
    (heading,) = [line for line in text.splitlines() if line.startswith("| work |")]
    assert "| p50 | p99 |" in heading
    assert [line.split(" | ")[0] for line in text.splitlines()[-4:-2]] == ["| publish", "| get"]


def test_a_report_is_there_although_nobody_reads_the_table(server: ServerProcess, tmp_path: Path) -> None:
    """Story: `q` in the pager, or `| head`, threw away the report of a long measurement."""
    file = tmp_path / "bench.md"
    command = [sow(), "--server", server.address, "bench", "--records", "50", "--seconds", "0.1", "--work", "get"]
    process = subprocess.Popen([*command, "--report", str(file)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(60) == 0
    assert "| publish |" in file.read_text()


def test_json_is_one_list(server: ServerProcess) -> None:
    done = bench(server.address, *SMALL[:-1], "json", "--work", "single")

    assert [row["work"] for row in json.loads(done.stdout)] == ["publish", "single"]


def test_a_topic_whose_creation_had_no_answer_is_deleted(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was left behind."""
    create = Client.create_topic

    def cut(self: Client, name: str, *arguments: Any, **named: Any) -> object:
        made = create(self, name, *arguments, **named)
        if name.endswith("-2"):
            raise Unavailable("the answer was lost", reason="UNREACHABLE")
        return made

    monkeypatch.setattr(Client, "create_topic", cut)
    done = bench(server.address, *SMALL, "--topics", "3")

    assert done.exit_code == NOT_REACHABLE
    assert topics(server) == []


def test_subscribers_of_all_topics_are_there_before_a_record_is_published_that_expires(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They came after the publishes: with many topics some records had expired by then, and were waited for in vain."""
    told: list[str] = []
    enter, publish = AsyncSubscription.__aenter__, Workload._stream

    async def entered(self: AsyncSubscription) -> AsyncSubscription:
        subscription = await enter(self)
        told.append("subscribed")
        return subscription

    def published(self: Workload, chunks: Any, expire_times: Any = None) -> Any:
        if expire_times is not None:
            told.append("publishes")
        return publish(self, chunks, expire_times)

    monkeypatch.setattr(AsyncSubscription, "__aenter__", entered)
    monkeypatch.setattr(Workload, "_stream", published)
    done = bench(server.address, *SMALL, "--topics", "3", "--work", "expire")

    assert done.exit_code == 0, done.stderr
    assert told[:4] == ["subscribed"] * 3 + ["publishes"]
    assert rows(done)["expire"]["operations"] == 500


def test_a_topic_that_exists_is_not_touched(server: ServerProcess) -> None:
    with server.client() as client:
        client.create_topic("sow-bench-2", key=("/id",))
        client.publish("sow-bench-2", {"id": 1})
        try:
            done = bench(server.address, *SMALL, "--topics", "3")

            assert done.exit_code == SAID_NO
            assert "TOPIC_EXISTS" in done.stderr
            assert done.stdout == ""
            assert topics(server) == ["sow-bench-2"], "the first one was made, and is gone again"
            assert client.count("sow-bench-2") == 1
        finally:
            client.delete_topic("sow-bench-2")


@pytest.mark.parametrize(
    ("work", "number", "code"),
    [("single", signal.SIGINT, 130), ("deliver", signal.SIGTERM, 143), ("expire", signal.SIGINT, 130)],
)
def test_an_interrupted_bench_keeps_its_figures_and_leaves_no_topic(
    server: ServerProcess, work: str, number: signal.Signals, code: int
) -> None:
    arguments = ["bench", "--records", "1000", "--seconds", "300", "--work", work, "--format", "ndjson"]
    running = subprocess.Popen(
        [sow(), "--server", server.address, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert running.stdout is not None
        assert json.loads(running.stdout.readline())["work"] == "publish"
        with server.client() as client:

            def changes() -> int:
                return sum(cell.status().last_sequence for cell in client.cells().values())

            journal = changes()
            until(lambda: changes() > journal, 30, f"{work} to begin")
        running.send_signal(number)
        _, errors = running.communicate(timeout=60)
        assert running.returncode == code, errors
        assert "Traceback" not in errors
    finally:
        running.kill()
        running.communicate()
    assert topics(server) == []


def test_the_cpu_time_comes_from_the_metrics_where_they_are_given(server: ServerProcess, metrics_port: int) -> None:
    url = f"http://127.0.0.1:{metrics_port}/metrics"
    done = bench(server.address, *SMALL, "--work", "single", "--metrics", url)

    assert done.exit_code == 0, done.stderr
    assert int(str(rows(done)["single"]["server_memory_bytes"])) > 2**20


@pytest.mark.parametrize("page", ["healthz", "nothing"])
def test_another_page_than_the_metrics_is_wrong_usage(server: ServerProcess, metrics_port: int, page: str) -> None:
    done = bench(server.address, *SMALL, "--metrics", f"http://127.0.0.1:{metrics_port}/{page}")

    assert done.exit_code == WRONG_USAGE
    assert f"/{page}" in done.stderr
    assert topics(server) == []


def test_a_server_that_is_not_there_is_not_reachable() -> None:
    done = bench(f"127.0.0.1:{free_port()}", *SMALL)

    assert done.exit_code == NOT_REACHABLE
    assert "UNREACHABLE" in done.stderr


def test_a_caller_needs_the_rights_to_create_and_delete_the_topics(tmp_path: Path) -> None:
    every = "read consume publish create topic-admin"
    granted = (
        identity("tester", "tester")
        + grant("tester", "sow-bench.*", every)
        + identity("reader", "reader")
        + grant("reader", ".*", "read")
        + identity("maker", "maker")
        + grant("maker", "sow-bench.*", "read consume publish create")
    )
    write_access(tmp_path, granted)
    for name in ("tester", "reader", "maker"):
        write_private(tmp_path / name, name)
    with ServerProcess(tmp_path, GUARDED) as server, client_of(server, "root") as root:
        for name, code in (("tester", 0), ("reader", SAID_NO), ("maker", 0)):
            done = bench(
                server.address,
                *(*SMALL, "--subscribers", "1"),
                before=("--token-file", str(tmp_path / name)),
            )
            assert done.exit_code == code, done.stderr
            if name == "tester":
                assert "server_disk_bytes" not in rows(done)["publish"], "it may not observe"
                assert rows(done)["deliver"]
            elif name == "reader":
                assert "PERMISSION_DENIED" in done.stderr
            left = [topic.name for topic in root.topics()]
            assert left == (["sow-bench-1"] if name == "maker" else [])
            if left:
                assert "sow-bench-1 could not be deleted: PERMISSION_DENIED" in done.stderr
                assert "topic delete sow-bench-1" in done.stderr
