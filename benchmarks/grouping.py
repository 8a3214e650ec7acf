"""Aggregates in queries: their CPU, beside that of a count whose filter reads the same fields, and beside that of a
program that reads the records and groups them itself, with DuckDB."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Final

import grpc

from benchmarks.documents import TTL_SECONDS, documents
from benchmarks.duckdb_peer import DuckDb
from benchmarks.processes import TOPIC, NotInstalled, SowServer
from benchmarks.rows import MICROSECONDS, TIMES, Figure, Row, Target, ratio, ratio_range, take_turns
from benchmarks.setting import Setting
from sow.v1 import sow_pb2, sow_pb2_grpc
from sow_client import Client

TARGET: Final = Target(0.4, f"{TIMES} the count", ambition=0.8)
DUCKDB_TARGET: Final = Target(1.0, f"{TIMES} DuckDB", ambition=1.5)
LOAD_CHUNK: Final = 100_000
FILTER: Final = "/symbol != '' AND /price >= 0 AND /quantity >= 0"
"""It is true for every record, so it reads all three fields of each."""
AGGREGATES: Final = ("COUNT(*)", "SUM(/price)", "AVG(/price)", "MAX(/price)", "SUM(/quantity)", "MIN(/quantity)")
STATEMENT: Final = f"SELECT symbol, {', '.join(AGGREGATES).replace('/', '')} FROM records GROUP BY symbol"
FIELDS: Final = {"symbol": "string", "price": "double", "quantity": "int64"}
GROUPS: Final = 500


def aggregates(setting: Setting) -> Iterator[Row]:
    """Six aggregates of each symbol, against a count of the same records, in CPU of the server; and against DuckDB, in
    CPU of the server and the client."""
    records = setting.size(1_000_000, quick=100_000)
    rounds = setting.size(5, quick=3)
    counted = sow_pb2.QueryRequest(topic=TOPIC, filter=FILTER, count_only=True)
    named = {f"a{at}": text for at, text in enumerate(AGGREGATES)}
    grouped = sow_pb2.QueryRequest(
        topic=TOPIC,
        group_by=[sow_pb2.NamedExpression(expression="/symbol")],
        aggregate=[sow_pb2.NamedExpression(name=name, expression=text) for name, text in named.items()],
    )
    duckdb, skipped = _peer()
    with ExitStack() as stack:
        server = stack.enter_context(SowServer(setting.directory / "sow"))
        client = stack.enter_context(Client(server.address))
        stub = sow_pb2_grpc.SowServiceStub(stack.enter_context(grpc.insecure_channel(server.address)))
        setting.say(f"loading {records:,} records")
        _load(client, records)

        def rate(request: sow_pb2.QueryRequest, groups: int) -> float:
            """Records for a second of CPU of the server."""
            before = server.cpu_seconds()
            footer = [response.footer for response in stub.Query(request)][-1]
            assert (footer.matched, footer.groups) == (records, groups), str(footer)
            return records / (server.cpu_seconds() - before)

        def rate_of_all(rows: Callable[[], list[int]]) -> float:
            """Records for a second of CPU of the server and of this process. `rows`: the records of each group."""
            before = server.cpu_seconds() + time.process_time()
            found = rows()
            spent = server.cpu_seconds() + time.process_time() - before
            assert (len(found), sum(found)) == (GROUPS, records), f"{len(found)} groups of {sum(found)} records"
            return records / spent

        def ours() -> list[int]:
            return [record.data["a0"] for record in client.query(TOPIC, group_by=["/symbol"], aggregate=named)]

        contestants = {"groups": lambda: rate(grouped, GROUPS), "count": lambda: rate(counted, 0)}
        if duckdb is not None:
            peer = duckdb
            contestants["ours"] = lambda: rate_of_all(ours)
            contestants["duckdb"] = lambda: rate_of_all(lambda: [row[1] for row in peer.rows(client, TOPIC)])
        setting.say(f"{rounds} rounds")
        rates = take_turns(rounds, contestants)
    case = f"{len(AGGREGATES)} aggregates, {GROUPS} groups, CPU a record: {rounds} rounds of {records:,} records"
    yield Row(
        case,
        Figure(1e6 / statistics.median(rates["groups"]), MICROSECONDS),
        peer=Figure(1e6 / statistics.median(rates["count"]), MICROSECONDS),
        judged=ratio(rates["groups"], rates["count"]),
        target=TARGET,
        note=f"{ratio_range(rates['groups'], rates['count'])}; the peer is our own count that reads the same fields",
    )
    of_all = f"server and client, {case}"
    if duckdb is None:
        ours_alone = Figure(1e6 / statistics.median(rates["groups"]), MICROSECONDS)
        yield Row(of_all, ours_alone, target=DUCKDB_TARGET, skipped=skipped)
        return
    yield Row(
        of_all,
        Figure(1e6 / statistics.median(rates["ours"]), MICROSECONDS),
        peer=Figure(1e6 / statistics.median(rates["duckdb"]), MICROSECONDS),
        judged=ratio(rates["ours"], rates["duckdb"]),
        target=DUCKDB_TARGET,
        note=f"{ratio_range(rates['ours'], rates['duckdb'])}; the peer exports the three fields, and groups in "
        f"{duckdb.described}",
    )


def _load(client: Client, records: int) -> None:
    for first in range(0, records, LOAD_CHUNK):
        with client.publisher(TOPIC, ttl=TTL_SECONDS, durability="buffered") as publisher:
            for payload in documents(range(first, min(first + LOAD_CHUNK, records))):
                publisher.publish(payload)


def _peer() -> tuple[DuckDb | None, str]:
    """DuckDB, or the reason why there is none."""
    try:
        return DuckDb(STATEMENT, FIELDS), ""
    except NotInstalled as missing:
        return None, str(missing)
