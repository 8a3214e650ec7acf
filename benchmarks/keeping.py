"""A state of the world on Spark, against aggregations of Spark itself over the same rows, in one session.

Each batch has two rows for each of its keys, and new keys. What counts is the CPU of the JVM and its Python workers for
a batch. The first batches of each query warm it, and do not count.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  # as everybody does
from pyspark.sql.streaming.query import StreamingQuery

import sow_spark
from benchmarks.processes import TOPIC, SowServer
from benchmarks.rows import MEBIBYTES, MICROSECONDS, PER_SECOND, SECONDS, TIMES, Figure, Row, Target, ratio
from benchmarks.setting import Setting
from benchmarks.spark_session import executor_mebibytes, spark_session
from sow_spark.state import Engine
from sow_spark.state_queries import SETTINGS
from tools import state_jar

SCHEMA: Final = "id LONG, n LONG, name STRING, price DOUBLE, venue STRING, note STRING"
WARM: Final = 4
BATCHES: Final = 9
TRIGGER: Final = "200 milliseconds"
MAX_BY: Final = Target(1.6, f"{TIMES} max_by", at_least=False, ambition=1.0)
COLUMNS: Final = Target(3.0, f"{TIMES} max_by", at_least=False)
DISTINCT: Final = Target(3.0, f"{TIMES} dropDuplicates", at_least=False, ambition=2.0)
PYTHON: Final = Target(80, f"{TIMES} the JVM", at_least=False, ambition=20)
EXPIRY: Final = Target(3.0, f"{TIMES} an update", at_least=False, ambition=1.5)
EXECUTOR: Final = "local-cluster[1,2,2048]"
EXECUTOR_MEMORY: Final = Target(2_048, MEBIBYTES, at_least=False)
FILES: Final = 10
BYTES: Final = Target(2.0, f"{TIMES} keys and payloads", at_least=False)

SHARES: Final = Target(3.0, f"{TIMES} the state", at_least=False)
MERGED: Final = Target(3.0, f"{TIMES} the state", at_least=False)

Query = Callable[[DataFrame], DataFrame]
Sink = Callable[[DataFrame, int], None]


class Keeper:
    """Owns the input of the queries, and runs one after the other."""

    def __init__(self, spark: SparkSession, folder: Path, keys: int) -> None:
        self._spark = spark
        self._folder = folder
        self.rows = 2 * keys
        java = spark._jvm.java.lang.ProcessHandle.current()  # type: ignore[union-attr]  # there is a JVM
        self._java = int(java.pid())
        ids = spark.range(self.rows)
        for number in range(BATCHES):
            batch = ids.select(
                (F.col("id") % keys + number * keys).alias("id"),
                (F.col("id") + number * self.rows).alias("n"),
                F.concat(F.lit("name"), F.col("id") % 97).alias("name"),
                (F.col("id") * 0.5).alias("price"),
                F.lit("XPAR").alias("venue"),
                F.lit("x" * 60).alias("note"),
            )
            batch.coalesce(2).write.parquet(str(folder / "batches" / str(number)))

    def measure(self, name: str, query: Query, mode: str = "append", sink: Sink | None = None) -> list[float]:
        """The CPU of a row in µs, of each batch that counts."""
        into = self._folder / name
        (into / "in").mkdir(parents=True)
        stream = self._spark.readStream.schema(SCHEMA).parquet(str(into / "in"))
        writer = query(stream).writeStream.outputMode(mode).foreachBatch(sink or _drop)
        started = writer.option("checkpointLocation", str(into / "checkpoint")).trigger(processingTime=TRIGGER).start()
        costs: list[float] = []
        try:
            for number in range(BATCHES):
                before = self._cpu_seconds()
                files = list((self._folder / "batches" / str(number)).glob("*.parquet"))
                for file in files:
                    os.link(file, into / "in" / f"{number}-{file.name}")
                self._await(started, (number + 1) * self.rows)
                costs.append((self._cpu_seconds() - before) / self.rows * 1e6)
        finally:
            started.stop()
        return costs[WARM:]

    def expiries(self, name: str) -> list[float]:
        """The CPU of an expiry in µs: that of rows which expire, without that of the same rows which stay."""
        lived = self.measure(f"{name}-stay", lambda rows: _state(rows, "30d"))
        gone = self.measure(f"{name}-go", lambda rows: _state(rows, "1ms"))
        # Each of the two rows of a key is put; its record expires once, in a later batch.
        return [2 * (statistics.median(gone) - one) for one in lived]

    def bytes_kept(self, name: str) -> int:
        """The size of the state in a checkpoint."""
        return _size(self._folder / name / "checkpoint" / "state")

    def _await(self, query: StreamingQuery, rows: int) -> None:
        while sum(one["numInputRows"] for one in query.recentProgress) < rows:
            assert query.exception() is None, query.exception()
            time.sleep(0.02)

    def _cpu_seconds(self) -> float:
        """So far, of the JVM and all processes that it has started."""
        parents: dict[int, int] = {}
        spent: dict[int, int] = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
            parents[int(entry.name)] = int(fields[1])
            spent[int(entry.name)] = sum(map(int, fields[11:15]))
        ours = {self._java}
        while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
            ours |= more
        return sum(spent[pid] for pid in ours if pid in spent) / os.sysconf("SC_CLK_TCK")


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _drop(batch: DataFrame, _: int) -> None:
    batch.write.format("noop").mode("overwrite").save()


def _state(rows: DataFrame, ttl: str | None = None, engine: Engine = "jvm") -> DataFrame:
    """Documents as one column, as a source such as Kafka has them."""
    payload = F.to_json(F.struct("*")).alias("payload")
    rows = rows.select(payload, "n", *([F.lit(ttl).alias("_ttl")] if ttl else []))
    return sow_spark.state_of_the_world(rows, key="/id", order="n", engine=engine)


def _columns(rows: DataFrame) -> DataFrame:
    return sow_spark.state_of_the_world(rows, key="/id", order="n", engine="jvm")


def _last(rows: DataFrame) -> DataFrame:
    payload = F.to_json(F.struct("*")).alias("payload")
    return rows.select("id", "n", payload).groupBy("id").agg(F.max_by(F.struct("n", "payload"), "n").alias("last"))


def state(setting: Setting) -> Iterator[Row]:
    """The engines, and what Spark has."""
    state_jar.main()
    keys = setting.size(100_000, quick=10_000)
    with spark_session(setting.directory / "spark") as spark:
        keeper = Keeper(spark, setting.directory, keys)
        for name, value in SETTINGS.items():
            if not name.endswith("encodingFormat"):  # aggregations do not have it
                spark.conf.set(name, value)
        peers = {"max_by": keeper.measure("max_by", _last, "update")}
        peers["dropDuplicates"] = keeper.measure("distinct", lambda rows: rows.dropDuplicates(["id"]))
        for name, value in SETTINGS.items():
            spark.conf.set(name, value)
        ours = keeper.measure("jvm", _state)
        columns = keeper.measure("columns", _columns)
        expiries = keeper.expiries("expiry")
        size = keeper.bytes_kept("jvm")
        few = Keeper(spark, setting.directory / "few", max(1_000, keys // 20))
        python = few.measure("python", lambda rows: _state(rows, engine="python"))
        as_few = few.measure("jvm", _state)
    note = f"machine: {setting.machine}"
    rows = f"batches of {keeper.rows:,} rows"
    for case, cost, peer, target in (
        (f"payloads, the JVM: {rows}", ours, peers["max_by"], MAX_BY),
        (f"payloads, the JVM: {rows}", ours, peers["dropDuplicates"], DISTINCT),
        (f"columns, the JVM: {rows}", columns, peers["max_by"], COLUMNS),
        (f"payloads, Python: batches of {few.rows:,} rows", python, as_few, PYTHON),
        (f"an expiry, the JVM: {rows}", expiries, ours, EXPIRY),
    ):
        yield Row(
            case,
            Figure(statistics.median(cost), MICROSECONDS),
            peer=Figure(statistics.median(peer), MICROSECONDS),
            judged=ratio(cost, peer),
            target=target,
            note=note,
        )
    stored = BATCHES * keys * 130  # 8 + about 122 bytes of key and payload
    yield Row(
        f"bytes of the checkpoint a record: {BATCHES * keys:,} records",
        Figure(size / (BATCHES * keys), "B"),
        judged=Figure(size / stored, TIMES),
        target=BYTES,
        note=note,
    )


def sinks(setting: Setting) -> Iterator[Row]:
    """The last change of each key, written as `examples.spark` does it. Every second row is one."""
    from examples.spark import shares, state_lake  # they need delta-rs
    from examples.spark.state_flights import last_of_each_key

    state_jar.main()
    keys = setting.size(100_000, quick=10_000)
    with ExitStack() as stack:
        spark = stack.enter_context(spark_session(setting.directory / "spark"))
        servers = [stack.enter_context(SowServer(setting.directory / f"sow{at}")) for at in range(2)]
        keeper = Keeper(spark, setting.directory, keys)
        for name, value in SETTINGS.items():
            spark.conf.set(name, value)
        table = str(setting.directory / "table")
        state_lake.create(spark, table, f"{SCHEMA}, _key STRING, _version LONG, _expire_time TIMESTAMP")

        def share(batch: DataFrame, _: int) -> None:
            changes = last_of_each_key(batch.drop("_message", "_batch", "_now")).persist()
            shares.write(changes, [server.address for server in servers], TOPIC)
            changes.unpersist()

        driven = 0.0

        def merge(batch: DataFrame, number: int) -> None:
            nonlocal driven
            began = time.process_time()
            state_lake.merge(batch, number, table)
            driven += time.process_time() - began

        alone = keeper.measure("alone", _columns)
        before = sum(server.cpu_seconds() for server in servers)
        shared = keeper.measure("shared", _columns, sink=share)
        served = (sum(server.cpu_seconds() for server in servers) - before) / (BATCHES * keys) * 1e6
        merged = keeper.measure("merged", _columns, sink=merge)
    note = f"CPU of a row; batches of {keeper.rows:,} rows; machine: {setting.machine}"
    for case, cost, target, more in (
        ("two servers, half of the keys each", shared, SHARES, f"the servers: {served:.1f} µs a change; "),
        ("a table of Delta Lake", merged, MERGED, f"the driver: {driven / (BATCHES * keys) * 1e6:.1f} µs a change; "),
    ):
        yield Row(
            f"the state and its last changes into {case}, to the state alone",
            Figure(statistics.median(cost), MICROSECONDS),
            peer=Figure(statistics.median(alone), MICROSECONDS),
            judged=ratio(cost, alone),
            target=target,
            note=more + note,
        )


def scale(setting: Setting) -> Iterator[Row]:
    """Ten million keys in one executor of 2 GiB, half of it for Java, and a restart in a new one."""
    state_jar.main()
    keys = setting.count(10_000_000, quick=200_000)
    files, checkpoint = str(setting.directory / "in"), setting.directory / "checkpoint"
    seconds: list[float] = []
    memory: list[float] = []
    for run in ("load", "restart"):
        with spark_session(setting.directory / run, EXECUTOR, {"spark.executor.memory": "1g"}) as spark:
            if run == "load":
                ids = spark.range(keys).select("id", F.concat(F.lit("name"), F.col("id") % 97).alias("name"))
                ids.withColumn("note", F.lit("x" * 76)).repartition(FILES, "id").write.parquet(files)
            stream = spark.readStream.schema("id LONG, name STRING, note STRING").option("maxFilesPerTrigger", 1)
            rows = stream.parquet(files).select(F.col("id").alias("n"), F.to_json(F.struct("*")).alias("payload"))
            changes = sow_spark.state_of_the_world(rows, key="/id", order="n", expiration="30d", engine="jvm")
            setting.say(f"{run}: {keys:,} keys")
            begin = time.perf_counter()
            query = sow_spark.start_state(changes, _drop, checkpoint=str(checkpoint))
            wanted = keys if run == "load" else 0
            while not query.recentProgress or sum(one["numInputRows"] for one in query.recentProgress) < wanted:
                assert query.exception() is None, query.exception()
                time.sleep(0.05)
            seconds.append(time.perf_counter() - begin)
            memory.append(executor_mebibytes())
            sow_spark.stop_state(query, "10m")
    with spark_session(setting.directory / "count") as spark:
        assert sow_spark.read_state(spark, str(checkpoint)).count() == keys
    size = _size(checkpoint / "state")
    note = f"machine: {setting.machine}"
    rate = Figure(keys / seconds[0], PER_SECOND)
    yield Row(f"new keys with a lifetime: {keys:,} in {FILES} batches, once", rate, note=note)
    peak = Figure(max(memory), MEBIBYTES)
    yield Row(f"greatest resident set of the executor: {keys:,} keys", peak, judged=peak, target=EXECUTOR_MEMORY)
    yield Row(f"from a start with {keys:,} keys to the end of its first batch", Figure(seconds[1], SECONDS))
    yield Row(f"bytes of the checkpoint a record: {keys:,} records", Figure(size / keys, "B"))
