"""Spark and the server on one machine: snapshots against Spark's own JSON source, bulk loads against sow's publisher.

All share two cores: two tasks, the JVM, the Python workers, the server, the client.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Final

import grpc
from pyspark.sql import DataFrame, SparkSession, functions

from benchmarks.documents import documents
from benchmarks.processes import TOPIC, CpuMeter, SowServer
from benchmarks.publishing import publish
from benchmarks.querying import query_rate
from benchmarks.rows import (
    MEBIBYTES,
    MILLISECONDS,
    PER_SECOND,
    TIMES,
    Figure,
    Row,
    Target,
    percentile,
    ratio,
    ratio_range,
    take_turns,
)
from benchmarks.setting import Setting
from benchmarks.singly import SinglePublisher
from benchmarks.spark_session import SCHEMA, WorkerMemory, spark_session, write_lines
from sow_client import Client

COUNT_TARGET: Final = Target(0.2, f"{TIMES} spark.read.json")
AGGREGATE_TARGET: Final = Target(0.35, f"{TIMES} spark.read.json", ambition=0.8)
STREAM_TARGET: Final = Target(0.5, f"{TIMES} the query stream")
LOAD_TARGET: Final = Target(60_000, PER_SECOND)
PUBLISHER_TARGET: Final = Target(0.4, f"{TIMES} the publisher", ambition=0.8)
MEMORY_TARGET: Final = Target(1024, MEBIBYTES, at_least=False)
WORKER_TARGET: Final = Target(512, MEBIBYTES, at_least=False)
DISTURBANCE_TARGET: Final = Target(1.5, f"{TIMES} while Spark reads files", at_least=False)
LOAD_CHUNK: Final = 50_000
TTL_COLUMN: Final = "ttl_seconds"


def _topic(spark: SparkSession, server: SowServer) -> DataFrame:
    """The topic with a given schema, newly loaded, so that every action takes its own snapshot."""
    source = spark.read.format("sow").schema(SCHEMA)
    return source.option("server", server.address).option("topic", TOPIC).load()


def _count(frame: DataFrame) -> int:
    return frame.count()


def _aggregate(frame: DataFrame) -> int:
    """Reads every column, so that Spark leaves none out."""
    texts = ("symbol", "side", "account", "text")
    sums = [functions.sum(name) for name in ("id", "price", "quantity", "revision")]
    (row,) = frame.agg(
        functions.count("id"), *sums, *[functions.sum(functions.length(name)) for name in texts]
    ).collect()
    counted: int = row[0]
    return counted


def _rate(frame: Callable[[], DataFrame], action: Callable[[DataFrame], int], records: int) -> float:
    begin = time.perf_counter()
    found = action(frame())
    seconds = time.perf_counter() - begin
    assert found == records, f"{found} records came"
    return records / seconds


def snapshot(setting: Setting) -> Iterator[Row]:
    """A count and an aggregate over all columns of a snapshot."""
    records = setting.size(1_000_000, quick=100_000)
    rounds = setting.size(5, quick=3)
    with ExitStack() as stack:
        spark = stack.enter_context(spark_session(setting.directory / "spark"))
        server = stack.enter_context(SowServer(setting.directory / "sow"))
        client = stack.enter_context(Client(server.address))
        setting.say(f"loading {records:,} records, writing them as files")
        _load(client, records)
        lines = write_lines(setting.directory / "lines", records)
        cpu = CpuMeter(server)
        memory = stack.enter_context(WorkerMemory())

        def files() -> DataFrame:
            return spark.read.schema(SCHEMA).json(lines)

        def ours() -> DataFrame:
            return _topic(spark, server)

        assert _aggregate(files()) == _aggregate(ours()) == records  # warm, both of them
        setting.say(f"{rounds} rounds")
        rates = take_turns(
            rounds,
            {
                "count": lambda: cpu.measured(records, lambda: _rate(ours, _count, records)),
                "count of files": lambda: _rate(files, _count, records),
                "aggregate": lambda: cpu.measured(records, lambda: _rate(ours, _aggregate, records)),
                "aggregate of files": lambda: _rate(files, _aggregate, records),
                "stream": lambda: query_rate(client, records),
            },
        )
        resident = server.resident_peak_mebibytes()
    for name, files_target in (("count", COUNT_TARGET), ("aggregate", AGGREGATE_TARGET)):
        for peer, target in ((f"{name} of files", files_target), ("stream", STREAM_TARGET)):
            yield Row(
                f"to {'a count' if name == 'count' else 'an aggregate of all columns'}: {rounds} rounds of"
                f" {records:,} records",
                Figure(statistics.median(rates[name]), PER_SECOND),
                peer=Figure(statistics.median(rates[peer]), PER_SECOND),
                judged=ratio(rates[name], rates[peer]),
                target=target,
                note=f"{ratio_range(rates[name], rates[peer])}; {cpu}; machine: {setting.machine}",
            )
    yield from _memory(memory, resident, f"snapshots of {records:,} records")


def bulk_write(setting: Setting) -> Iterator[Row]:
    """An append of rows with a lifetime each, and the same by sow's publisher."""
    records = setting.size(1_000_000, quick=100_000)
    rounds = setting.size(3, quick=2)
    with ExitStack() as stack:
        spark = stack.enter_context(spark_session(setting.directory / "spark"))
        server = stack.enter_context(SowServer(setting.directory / "sow"))
        client = stack.enter_context(Client(server.address))
        lines = write_lines(setting.directory / "lines", records)
        rows = str(setting.directory / "rows")
        lived = functions.lit(3600) + functions.col("id") % 600
        spark.read.schema(SCHEMA).json(lines).withColumn(TTL_COLUMN, lived).write.parquet(rows)
        memory = stack.enter_context(WorkerMemory())
        cpu = CpuMeter(server)
        number = 0

        def next_number() -> int:
            nonlocal number
            number += records
            return number

        def written() -> float:
            first = next_number()
            frame = spark.read.parquet(rows).withColumn("id", functions.col("id") + functions.lit(first))
            sink = frame.write.format("sow").option("server", server.address).option("topic", TOPIC)
            begin = time.perf_counter()
            sink.option("ttlColumn", TTL_COLUMN).mode("append").save()
            return records / (time.perf_counter() - begin)

        def published() -> float:
            first = next_number()
            rates = []
            for start in range(first, first + records, LOAD_CHUNK):
                payloads = documents(range(start, min(start + LOAD_CHUNK, first + records)))
                rates.append(publish(client, payloads, "fsync"))
            return statistics.harmonic_mean(rates)

        setting.say(f"{rounds} rounds")
        rates = take_turns(rounds, {"spark": lambda: cpu.measured(records, written), "publisher": published})
        resident = server.resident_peak_mebibytes()
        live = client.count(TOPIC)
        assert live == 2 * rounds * records, f"{live} records are there"
    rate = Figure(statistics.median(rates["spark"]), PER_SECOND)
    case = f"{rounds} rounds of {records:,} new rows, a lifetime each, FSYNC"
    note = f"{cpu}; machine: {setting.machine}"
    yield Row(case, rate, judged=rate, target=LOAD_TARGET, note=note)
    yield Row(
        f"the same, against our publisher: {case}",
        rate,
        peer=Figure(statistics.median(rates["publisher"]), PER_SECOND),
        judged=ratio(rates["spark"], rates["publisher"]),
        target=PUBLISHER_TARGET,
        note=ratio_range(rates["spark"], rates["publisher"]),
    )
    yield from _memory(memory, resident, f"appends of {records:,} rows")


def scale(setting: Setting) -> Iterator[Row]:
    """A bulk load and a snapshot of ten million records: neither a worker nor a partition grows with the topic."""
    records = setting.count(10_000_000, quick=200_000)
    with ExitStack() as stack:
        spark = stack.enter_context(spark_session(setting.directory / "spark"))
        server = stack.enter_context(SowServer(setting.directory / "sow"))
        client = stack.enter_context(Client(server.address))
        memory = stack.enter_context(WorkerMemory())
        rows = spark.range(records).selectExpr(
            "id",
            "'S' || id % 500 AS symbol",
            "if(id % 2 = 0, 'buy', 'sell') AS side",
            "100 + id % 1000 / 8 AS price",
            "id % 900 AS quantity",
            "'account-' || id % 10000 AS account",
            "0L AS revision",
            "repeat('x', 40) AS text",
        )
        sink = rows.write.format("sow").option("server", server.address).option("topic", TOPIC)
        setting.say(f"loading {records:,} records")
        load_cpu, read_cpu = CpuMeter(server), CpuMeter(server)

        def loaded() -> float:
            begin = time.perf_counter()
            sink.mode("append").save()
            return records / (time.perf_counter() - begin)

        load = load_cpu.measured(records, loaded)
        setting.say("reading them")
        read = read_cpu.measured(records, lambda: _rate(lambda: _topic(spark, server), _aggregate, records))
        partitions = _topic(spark, server).rdd.getNumPartitions()
        resident = server.resident_peak_mebibytes()
        assert client.count(TOPIC) == records
    for what, rate, cpu in (("an append", load, load_cpu), ("an aggregate of all columns", read, read_cpu)):
        note = f"{partitions} partitions; {cpu}; machine: {setting.machine}"
        yield Row(f"{what} of {records:,} records, once", Figure(rate, PER_SECOND), note=note)
    worker = Figure(memory.mebibytes, MEBIBYTES)
    yield Row(
        f"greatest resident set of a Python worker of Spark: {records:,} records",
        worker,
        judged=worker,
        target=WORKER_TARGET,
    )
    yield Row(f"greatest resident set of the server: {records:,} records", Figure(resident, MEBIBYTES))


def disturbance(setting: Setting) -> Iterator[Row]:
    """Single durable publishes while snapshots run, and while Spark reads the same records from files instead."""
    records = setting.size(1_000_000, quick=100_000)
    rounds = setting.size(3, quick=2)
    seconds = setting.size(15, quick=5)
    calls: dict[str, list[float]] = {"snapshots": [], "files": []}
    shares: list[float] = []
    with ExitStack() as stack:
        spark = stack.enter_context(spark_session(setting.directory / "spark"))
        server = stack.enter_context(SowServer(setting.directory / "sow"))
        client = stack.enter_context(Client(server.address))
        publisher = SinglePublisher(stack.enter_context(grpc.insecure_channel(server.address)))
        setting.say(f"loading {records:,} records, writing them as files")
        _load(client, records)
        lines = write_lines(setting.directory / "lines", records)
        work: dict[str, Callable[[], int]] = {
            "snapshots": lambda: _aggregate(_topic(spark, server)),
            "files": lambda: _aggregate(spark.read.schema(SCHEMA).json(lines)),
        }
        for run in work.values():
            run()  # warm
        for number in range(1, rounds + 1):
            setting.say(f"round {number} of {rounds}")
            p99: dict[str, float] = {}
            for name, run in work.items():
                milliseconds = _publish_beside(publisher, run, seconds)
                calls[name] += milliseconds
                p99[name] = percentile(milliseconds, 0.99)
            shares.append(p99["snapshots"] / p99["files"])
    ours, theirs = percentile(calls["snapshots"], 0.99), percentile(calls["files"], 0.99)
    yield Row(
        f"publish p99 while snapshots of {records:,} records run ({len(calls['snapshots']):,} calls), to that while"
        f" Spark reads them as files ({len(calls['files']):,} calls)",
        Figure(ours, MILLISECONDS),
        peer=Figure(theirs, MILLISECONDS),
        judged=Figure(ours / theirs, TIMES),
        target=DISTURBANCE_TARGET,
        note=f"rounds {min(shares):.2f}–{max(shares):.2f} ×; p50 {percentile(calls['snapshots'], 0.5):.2f} ms,"
        f" {percentile(calls['files'], 0.5):.2f} ms; machine: {setting.machine}",
    )


def _publish_beside(publisher: SinglePublisher, run: Callable[[], int], seconds: int) -> list[float]:
    """Publishes while `run` is repeated. Returns the milliseconds of each call."""
    over = threading.Event()

    def again() -> None:
        while not over.is_set():
            run()

    with ThreadPoolExecutor(1, "spark-action") as thread:
        running = thread.submit(again)
        try:
            milliseconds = publisher.run(until=time.time() + seconds)
        finally:
            over.set()
        running.result()
    return milliseconds


def _memory(memory: WorkerMemory, server_mebibytes: float, what: str) -> Iterator[Row]:
    for who, mebibytes in (("a Python worker of Spark", memory.mebibytes), ("the server", server_mebibytes)):
        figure = Figure(mebibytes, MEBIBYTES)
        yield Row(f"greatest resident set of {who}: {what}", figure, judged=figure, target=MEMORY_TARGET)


def _load(client: Client, records: int) -> None:
    for first in range(0, records, LOAD_CHUNK):
        publish(client, documents(range(first, min(first + LOAD_CHUNK, records))), "buffered")
