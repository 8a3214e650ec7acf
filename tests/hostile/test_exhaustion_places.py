"""One caller takes all the places, the memory to sort in, or the journal that it can get (rules N5, Q2, J19)."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest
from grpc_health.v1 import health_pb2

from sow.v1 import sow_pb2
from sow_client import EARLIEST, Client
from tests.support.oracles.access import GUARDED, client_of, grant, identity, write_access
from tests.support.servers.http2 import RawClient
from tests.support.servers.server import ServerProcess, health, reason_of, until

QUERY: Final = "/sow.v1.SowService/Query"
GET: Final = "/sow.v1.SowService/Get"
FIGURES: Final = "/sow.v1.AdminService/WatchFigures"
DESCRIBE: Final = "/sow.v1.AdminService/DescribeInstance"
CHECK: Final = "/grpc.health.v1.Health/Check"
WATCH: Final = "/grpc.health.v1.Health/Watch"
SECONDS: Final = 20.0
CALLS: Final = 100
PUBLISHERS: Final = 20


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    write_access(
        tmp_path,
        identity("worst", "worst")
        + grant("worst", "orders", "read observe")
        + "[roles.worst.limits]\nrpcs = 'unlimited'\n"
        + identity("desk", "desk")
        + grant("desk", "orders", "read publish"),
    )
    config = GUARDED.replace("[server]\n", f"[server]\nmax_concurrent_rpcs = {CALLS}\n")
    with ServerProcess(tmp_path, config) as made:
        with client_of(made, "root") as root:
            root.create_topic("orders", key=["/id"])
        yield made
        assert not made.faults()


def assert_serves(server: ServerProcess) -> None:
    assert health(server.address) == "SERVING"
    with Client(server.address, token="desk", timeout=SECONDS) as client:
        assert client.count("orders") == 0
    with client_of(server, "root") as root:
        assert root.status().state == "serving"


def test_probes_pass_while_watchers_without_a_credential_stand(server: ServerProcess) -> None:
    """Story: 50 connections with four watches each, without a credential, took all places of health, for ever."""
    nothing = health_pb2.HealthCheckRequest().SerializeToString()
    with ExitStack() as opened:
        for _ in range(50):
            opened.enter_context(RawClient(server.address)).open(WATCH, nothing, 4)
        for _ in range(10):
            assert_serves(server)
    assert_serves(server)


def test_probes_pass_while_checks_without_a_request_stand(server: ServerProcess) -> None:
    """Story: a check that sends no request kept its place for five seconds, and more came all the time."""
    with ExitStack() as opened:
        clients = [opened.enter_context(RawClient(server.address)) for _ in range(10)]
        for _ in range(3):
            for client in clients:
                client.begin(CHECK, 20)
                assert health(server.address) == "SERVING"
        assert_serves(server)


@pytest.mark.parametrize("path", [GET, FIGURES, DESCRIBE])
def test_an_identity_without_limits_leaves_places(server: ServerProcess, path: str) -> None:
    """Story: it took every place of the listener, those of administrators included. Its calls send no request."""
    with ExitStack() as opened:
        for _ in range(3):
            opened.enter_context(RawClient(server.address)).begin(path, 90, token="worst")
        with client_of(server, "root") as root:
            held = sum(sum(session.calls.values()) for session in root.sessions() if session.identity == "worst")
        assert 80 <= held <= 80 * 2
        assert_serves(server)
    until(lambda: _sessions_of(server, "worst") == 0, SECONDS, "the places to be free again")


@pytest.mark.parametrize("reader_processes", [0, 1])
def test_unread_ordered_queries_do_not_keep_others_from_sorting(tmp_path: Path, reader_processes: int) -> None:
    """Story: twenty of them held all memory to sort in, and the first five of others came too late, or never."""
    write_access(
        tmp_path, identity("worst", "all") + identity("desk", "all") + grant("all", "orders", "read publish create")
    )
    few = GUARDED.replace("[server]\n", f"[server]\nreader_processes = {reader_processes}\n")
    records = 4_000
    with ServerProcess(tmp_path, few + "[limits]\nsort_bytes_max = '6MiB'\n") as server:
        with client_of(server, "root") as root:
            root.create_topic("orders", key=["/id"])
            root.publish_many("orders", [{"id": f"{n:04d}", "px": n, "pad": "x" * 1_000} for n in range(records)])
        asked = sow_pb2.QueryRequest(topic="orders", order_by="/px DESC").SerializeToString()
        with RawClient(server.address) as worst, Client(server.address, token="desk", timeout=SECONDS) as desk:
            worst.open(QUERY, asked, 20, token="worst")
            for _ in range(3):
                best = [record.key for record in desk.query("orders", order_by="/px DESC", top_n=5)]
                assert best == [f"{n:04d}" for n in range(records - 1, records - 6, -1)]
            whole = [record.key for record in desk.query("orders", order_by="/px DESC")]
            assert len(whole) == records, "what others needed was taken back from those who do not read"
        assert not server.faults()


# --- consume alone ---------------------------------------------------------------------------------------------------

WORST: Final = identity("worst", "worst") + grant("worst", "orders", "consume")


def _attached(server: ServerProcess, *, retain_bytes: int | None = None, retain_time: str | None = None) -> list[str]:
    """The reasons of the gaps that the durable of `worst` is told; it takes one change, and acknowledges nothing."""
    gaps: list[str] = []
    with (
        client_of(server, "worst") as worst,
        worst.durable(
            "orders",
            "d",
            start=EARLIEST,
            on_gap=lambda gap: gaps.append(gap.reason),
            retain_bytes=retain_bytes,
            retain_time=retain_time,
        ) as durable,
    ):
        next(iter(durable))
    return gaps


def test_a_consumer_that_acknowledges_nothing_does_not_stop_publishers(tmp_path: Path) -> None:
    """Story: `consume` on a topic with a quota that holds was enough to let its publishers wait for ever."""
    write_access(tmp_path, WORST + identity("desk", "desk") + grant("desk", "orders", "publish"))
    with ServerProcess(tmp_path, GUARDED + "[journal]\nhold_max = '1s'\n") as server, client_of(server, "desk") as desk:
        with client_of(server, "root") as root:
            root.create_topic("orders", key=["/id"], backlog_quota_entries=10, retain_bytes="1MiB")
        desk.publish("orders", {"id": "first"})
        assert _attached(server) == []
        for number in range(50):  # a publish that is held for longer than its deadline of 30 s is refused
            desk.publish("orders", {"id": number})
        with client_of(server, "worst") as worst:
            worst.rewind("orders", "d", EARLIEST)
        desk.publish("orders", {"id": "last"})
        until(lambda: _attached(server) == ["evicted"], SECONDS, "the next look at the durable")
        told = server.events("durable_held_publishers")
        assert {(event["topic"], event["durable"]) for event in told} == {("orders", "worst/d")}
        assert not server.faults()


def test_publishers_that_wait_together_go_on_together(tmp_path: Path) -> None:
    """Story: of several that waited for a durable that acknowledges nothing, one went on in each second, for ever."""
    write_access(tmp_path, WORST + identity("desk", "desk") + grant("desk", "orders", "publish"))
    with (
        ServerProcess(tmp_path, GUARDED + "[journal]\nhold_max = '1s'\n") as server,
        Client(server.address, token="desk", timeout=10) as desk,
    ):
        with client_of(server, "root") as root:
            root.create_topic("orders", key=["/id"], backlog_quota_entries=5, retain_bytes="1MiB")
        desk.publish("orders", {"id": "first"})
        assert _attached(server) == []
        with ThreadPoolExecutor(PUBLISHERS) as pool:
            for turn in range(5):  # a publish that waits for as long as its deadline is refused
                waiting = [pool.submit(desk.publish, "orders", {"id": f"{turn} {n}"}) for n in range(PUBLISHERS)]
                for one in waiting:
                    one.result()
        assert len(server.events("durable_held_publishers")) == 1
        assert not server.faults()


def test_a_consumer_that_acknowledges_nothing_does_not_fill_the_disk(tmp_path: Path) -> None:
    """Story: its durable kept the journal under any `retain_bytes`. One with a longer retention than its topic kept it,
    too, acknowledged or not."""
    few = "[roles.worst.limits]\nbacklog_bytes = '64KiB'\n"
    write_access(tmp_path, WORST + few + identity("desk", "desk") + grant("desk", "orders", "publish"))
    with (
        ServerProcess(tmp_path, GUARDED) as server,
        client_of(server, "desk") as desk,
        client_of(server, "root") as root,
    ):
        root.create_topic("orders", key=["/id"], retain_bytes=1_000, retain_time="1s")
        desk.publish("orders", {"id": "first"})
        assert reason_of(lambda: _attached(server, retain_bytes=10_000)) == "PERMISSION_DENIED"
        assert reason_of(lambda: _attached(server, retain_time="1h")) == "PERMISSION_DENIED"
        assert _attached(server) == []

        def kept() -> int:
            figures = root.describe_durable("orders", "worst/d").figures
            assert figures is not None
            return figures.unacknowledged_bytes

        for number in range(300):
            desk.publish("orders", {"id": number, "pad": "x" * 1_000})
        until(lambda: kept() <= 64 * 2**10, SECONDS, "the backlog to be within its bound")
        assert kept() > 0
        assert _attached(server) == ["evicted"]
        assert not server.faults()


def _sessions_of(server: ServerProcess, identity: str) -> int:
    with client_of(server, "root") as root:
        return sum(session.identity == identity for session in root.sessions())
