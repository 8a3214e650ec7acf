"""Aggregates in queries: the CPU of the server, beside that of a count whose filter reads the same fields."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Final

import grpc

from benchmarks.documents import TTL_SECONDS, documents
from benchmarks.processes import TOPIC, SowServer
from benchmarks.rows import MICROSECONDS, TIMES, Figure, Row, Target, ratio, ratio_range, take_turns
from benchmarks.setting import Setting
from sow.v1 import sow_pb2, sow_pb2_grpc
from sow_client import Client

TARGET: Final = Target(0.4, f"{TIMES} the count", ambition=0.8)
LOAD_CHUNK: Final = 100_000
FILTER: Final = "/symbol != '' AND /price >= 0 AND /quantity >= 0"
"""It is true for every record, so it reads all three fields of each."""
AGGREGATES: Final = ("COUNT(*)", "SUM(/price)", "AVG(/price)", "MAX(/price)", "SUM(/quantity)", "MIN(/quantity)")
GROUPS: Final = 500


def aggregates(setting: Setting) -> Iterator[Row]:
    """Six aggregates of each symbol, against a count of the same records. Both in CPU of the server."""
    records = setting.size(1_000_000, quick=100_000)
    rounds = setting.size(5, quick=3)
    counted = sow_pb2.QueryRequest(topic=TOPIC, filter=FILTER, count_only=True)
    grouped = sow_pb2.QueryRequest(
        topic=TOPIC,
        group_by=[sow_pb2.NamedExpression(expression="/symbol")],
        aggregate=[sow_pb2.NamedExpression(name=f"a{at}", expression=text) for at, text in enumerate(AGGREGATES)],
    )
    with ExitStack() as stack:
        server = stack.enter_context(SowServer(setting.directory / "sow"))
        client = stack.enter_context(Client(server.address))
        stub = sow_pb2_grpc.SowServiceStub(stack.enter_context(grpc.insecure_channel(server.address)))
        setting.say(f"loading {records:,} records")
        for first in range(0, records, LOAD_CHUNK):
            with client.publisher(TOPIC, ttl=TTL_SECONDS, durability="buffered") as publisher:
                for payload in documents(range(first, min(first + LOAD_CHUNK, records))):
                    publisher.publish(payload)

        def rate(request: sow_pb2.QueryRequest, groups: int) -> float:
            """Records for a second of CPU."""
            before = server.cpu_seconds()
            footer = [response.footer for response in stub.Query(request)][-1]
            assert (footer.matched, footer.groups) == (records, groups), str(footer)
            return records / (server.cpu_seconds() - before)

        setting.say(f"{rounds} rounds")
        rates = take_turns(rounds, {"groups": lambda: rate(grouped, GROUPS), "count": lambda: rate(counted, 0)})
    yield Row(
        f"{len(AGGREGATES)} aggregates, {GROUPS} groups, CPU a record: {rounds} rounds of {records:,} records",
        Figure(1e6 / statistics.median(rates["groups"]), MICROSECONDS),
        peer=Figure(1e6 / statistics.median(rates["count"]), MICROSECONDS),
        judged=ratio(rates["groups"], rates["count"]),
        target=TARGET,
        note=f"{ratio_range(rates['groups'], rates['count'])}; the peer is our own count that reads the same fields",
    )
