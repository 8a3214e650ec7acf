"""Queries of groups beside others: in a reader process, cancelled, counted and audited (rules Q11, Q12, A8)."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import grpc
import pytest

from sow.v1 import sow_pb2, sow_pb2_grpc
from sow_client import NotFound
from tests.support.oracles.access import GUARDED, audited, client_of, grant, identity, write_access
from tests.support.servers.metrics_endpoint import page
from tests.support.servers.server import ServerProcess, free_port, reason_of, until

RECORDS: Final = 6_000
"""A query that reads more than 3,000 is answered in a reader process, where there is one."""
CANCELLED: Final = 12
SECONDS: Final = 60.0

EACH: Final = sow_pb2.QueryRequest(
    topic="t",
    group_by=[sow_pb2.NamedExpression(expression="/id")],
    aggregate=[sow_pb2.NamedExpression(name="s", expression="SUM(/n)")],
    order_by="/s DESC",
)
"""A group for each record: together they need more than a half of the memory to sort in."""


class Measured:
    """A server, and the page of its metrics."""

    def __init__(self, folder: Path, processes: int) -> None:
        port = free_port()
        self._address = ("127.0.0.1", port)
        config = (
            f"[server]\nreader_processes = {processes}\n[limits]\nsort_bytes_max = '10MiB'\n"
            f"[metrics]\nlisten = '127.0.0.1:{port}'\n[topics.t]\nkey = ['/id']\n"
        )
        self.server = ServerProcess(folder, config)

    def figure(self, name: str) -> float:
        """The value of a metric, by its name and labels; 0: it is not there."""
        code, body = page(self._address, "/metrics")
        assert code == 200
        lines = [line for line in body.decode().splitlines() if line.startswith(f"{name} ")]
        return float(lines[0].rpartition(" ")[2]) if lines else 0.0


@pytest.fixture(params=[0, 1], ids=["here", "in a reader process"])
def measured(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Measured]:
    made = Measured(tmp_path, request.param)
    with made.server as server:
        with server.client() as client:
            client.publish_many("t", [{"id": f"{number:060}", "n": number} for number in range(RECORDS)])
            if request.param:
                client.count("t", "/n >= 0")  # the first long query starts it
                until(lambda: server.events("reader_process_ready"), SECONDS, "a reader process")
        yield made
        assert server.terminate() == 0
        assert not server.faults()


def whole(stub: sow_pb2_grpc.SowServiceStub) -> sow_pb2.QueryFooter:
    """The footer of an answer that was read to its end."""
    *_, last = stub.Query(EACH, timeout=SECONDS)
    assert last.footer.returned == RECORDS
    footer: sow_pb2.QueryFooter = last.footer
    return footer


@pytest.mark.slow
def test_groups_that_are_left_midway_free_their_memory_and_their_turn(measured: Measured, seed: int) -> None:
    """Each query holds more than a half of the memory, so the next one is answered only if the one before has given
    back all of it."""
    draw = random.Random(seed)
    with grpc.insecure_channel(measured.server.address) as channel:
        stub = sow_pb2_grpc.SowServiceStub(channel)
        began = time.monotonic()
        whole(stub)
        took = time.monotonic() - began
        for _ in range(2):
            calls = [stub.Query(EACH) for _ in range(CANCELLED)]
            time.sleep(draw.uniform(0.0, 1.5 * took))  # so they are read, grouped, put in order or sent
            for call in calls:
                call.cancel()
            until(lambda: not measured.figure("sow_sort_bytes"), SECONDS, "the memory to be free")
            assert measured.figure("sow_sorts_waiting") == 0
            assert whole(stub).groups == RECORDS


def test_metrics_count_queries_of_groups_as_others(measured: Measured) -> None:
    of_query = 'method="Query"'
    ok, wrong = f'sow_rpcs_total{{code="OK",{of_query}}}', f'sow_rpcs_total{{code="INVALID_ARGUMENT",{of_query}}}'
    seconds = f"sow_rpc_seconds_count{{{of_query}}}"
    with measured.server.client() as client:
        before = [measured.figure(name) for name in (ok, wrong, seconds, "sow_reader_queries_total")]
        (found,) = client.query("t", aggregate="COUNT(*) AS n")
        assert found.data == {"n": RECORDS}
        assert reason_of(lambda: list(client.query("t", group_by="/n +"))) == "EXPRESSION_INVALID"
        after = [measured.figure(name) for name in (ok, wrong, seconds, "sow_reader_queries_total")]
    processes = len(measured.server.events("reader_process_ready"))
    assert [one - other for one, other in zip(after, before, strict=True)] == [1, 1, 2, processes]


def test_the_audit_log_has_queries_of_groups_as_others_and_no_expression(tmp_path: Path) -> None:
    write_access(tmp_path, identity("desk", "desk") + grant("desk", "orders", "read", "rows = \"/site = 'eu'\""))
    config = GUARDED + "audit_reads = true\n[topics.orders]\nkey = ['/id']\n[topics.secret]\n"
    with ServerProcess(tmp_path, config) as server, client_of(server, "desk") as desk:
        list(desk.query("orders", "/px > 1"))
        list(desk.query("orders", group_by="/px", aggregate="SUM(/px + 424242) AS CANARY", having="/CANARY > 424242"))
        for ask in ({}, {"group_by": "/px", "aggregate": "SUM(/px + 424242) AS CANARY"}):
            with pytest.raises(NotFound):
                list(desk.query("secret", **ask))  # type: ignore[arg-type]  # keywords of several types
        until(lambda: len(shapes(audited(tmp_path), "end")) == 4, SECONDS, "the end of the last one in the log")
        lines = audited(tmp_path)
    assert shapes(lines, "end") == ["Query"] * 4, "also of those that are denied"
    assert shapes(lines, "denied") == ["Query"] * 2
    assert "CANARY" not in json.dumps(lines)
    assert "424242" not in json.dumps(lines)


def shapes(lines: list[dict[str, object]], event: str) -> list[str]:
    """The names of the calls of one kind of event about queries. All lines of it have the same fields."""
    found = [line for line in lines if line["event"] == event and str(line.get("method", "")).endswith("Query")]
    assert len({tuple(sorted(line)) for line in found}) == 1, found
    return [str(line["method"]).rpartition("/")[2] for line in found]
