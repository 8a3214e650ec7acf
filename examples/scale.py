"""`make demo-scale`: a year of real flights goes through a state of the world on Spark into two servers and a table of
Delta Lake, while an executor is killed. In the end all four have the same flights.

The executors are processes of their own, as on a cluster. Exit codes are those of the demo.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pyspark
from deltalake import CommitProperties, DeltaTable, Transaction
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  # as everybody does

import sow_spark
from examples.demo import exit_code
from examples.flights import RECORDS_ALL, extract
from examples.narration import Narration
from examples.server_process import HOST, ServerProcess, free_port
from examples.spark.lake import merge_last
from examples.spark.load_flights import COLUMNS, KEY

FILES: Final = 6
CANCELLED_TTL: Final = "5s"
CONFIG: Final = """\
[server]
listen = "{address}"
data_dir = "data"
[topics.flights]
key = ["/carrier", "/flight", "/origin"]
expiration = "enabled"
"""
FIELDS: Final = ("carrier", "flight", "origin", "dest", "month", "day", "dep_delay", "distance", "at")
TABLE: Final = (
    "_key STRING, carrier STRING, flight INT, origin STRING, dest STRING, month INT, day INT, dep_delay DOUBLE, "
    "distance DOUBLE, at LONG, _expire_time TIMESTAMP"
)


def session(folder: Path) -> SparkSession:
    """Two executors of one core each, in a home of Spark of their own: they write into it."""
    home = folder / "spark"
    home.mkdir()
    for name in ("bin", "jars"):
        (home / name).symlink_to(Path(pyspark.__file__).parent / name)
    os.environ.update(SPARK_HOME=str(home), SPARK_LOCAL_IP=HOST, PYSPARK_PYTHON=sys.executable)
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "OFF",
        "spark.driver.host": HOST,
        "spark.executor.memory": "1g",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.local.dir": str(folder / "local"),
        "spark.python.authenticate.socketTimeout": "60s",
    }
    builder = SparkSession.builder.appName("scale").master("local-cluster[2,1,1024]")
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def flights(spark: SparkSession, folder: Path, records: int) -> Path:
    """The flights in files of about equal size, in the order of their departure; `at` is their place in it."""
    csv = extract(folder, "flights.csv")
    frame = spark.read.csv(str(csv), COLUMNS, header=True, nullValue="NA").limit(records)
    rows: Any = frame.toPandas()
    rows = rows.sort_values(["time_hour", "minute"], kind="stable").reset_index(drop=True)
    rows["at"] = rows.index
    rows["_ttl"] = rows["dep_time"].isna().map({True: CANCELLED_TTL, False: "30d"})
    ready = folder / "ready"
    ready.mkdir()
    for number in range(FILES):
        part = rows.iloc[number * len(rows) // FILES : (number + 1) * len(rows) // FILES]
        part[[*FIELDS, "_ttl"]].to_json(ready / f"{number}.json", orient="records", lines=True)
    return ready


def kill_an_executor(spark: SparkSession) -> int:
    """Ends one of the two at once; returns its process id."""
    application = spark.sparkContext.applicationId.encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue  # it has ended
        if b"CoarseGrainedExecutorBackend" in command and application in command:
            os.kill(int(entry.name), signal.SIGKILL)
            return int(entry.name)
    raise RuntimeError("there is no executor")


class Sink:
    """Writes each batch of changes to the servers, each its share of the keys, and to the table."""

    def __init__(self, servers: Sequence[str], table: str) -> None:
        self._servers = servers
        self._table = table
        self.puts = self.expiries = self.refused = 0
        self.batches: set[int] = set()

    def __call__(self, batch: DataFrame, number: int) -> None:
        rows = batch.persist()
        try:
            counts = {row["_op"]: row["count"] for row in rows.groupBy("_op").count().collect()}
            changes = rows.where("_op <> 'refused'").drop("_message", "_batch", "_now")
            if sum(counts.values()) > counts.get("refused", 0):
                self._serve(changes)
                self._merge(changes, number)
        finally:
            rows.unpersist()
        if number not in self.batches:
            self.batches.add(number)
            self.puts += counts.get("put", 0)
            self.expiries += counts.get("expire", 0)
            self.refused += counts.get("refused", 0)

    def _serve(self, changes: DataFrame) -> None:
        last = _last(changes).repartition(2, "_key")
        for at, server in enumerate(self._servers):
            share = last.where(F.expr(f"pmod(xxhash64(_key), {len(self._servers)}) = {at}"))
            writer = share.write.format("sow").options(server=server, expireTimeColumn="_expire_time")
            writer.mode("append").save("flights")

    def _merge(self, changes: DataFrame, number: int) -> None:
        table = DeltaTable(self._table)
        if (table.transaction_version("flights") or -1) < number:  # else it has this batch, from before a crash
            names = [field.name for field in table.schema().fields]
            commit = CommitProperties(app_transactions=[Transaction("flights", number)])
            merge_last(table, _last(changes).select(*names, "_op").toArrow(), commit)


def _last(changes: DataFrame) -> DataFrame:
    """The last change of each key; an expiry has the version of its record."""
    order = F.struct("_version", F.expr("_op <> 'put'"))
    return changes.groupBy("_key").agg(F.max_by(F.struct(*changes.columns), order).alias("it")).select("it.*")


def sums(frame: DataFrame) -> tuple[int, int]:
    """The number of flights, and a sum over all their fields."""
    row = frame.select(*FIELDS).agg(F.count("*"), F.sum(F.crc32(F.to_json(F.struct(*FIELDS))))).first()
    assert row is not None, "an aggregate has a row"
    return row[0], row[1] or 0


def tell(narration: Narration, records: int, folder: Path) -> None:
    """The story."""
    narration.title("More than one server: the state of the world on Spark")
    spark = session(folder)  # before anything else starts: it forks
    addresses = [f"{HOST}:{free_port(0)}" for _ in range(2)]
    ready = flights(spark, folder, records)
    (folder / "in").mkdir()
    table, checkpoint = str(folder / "table"), str(folder / "checkpoint")
    DeltaTable.create(table, spark.createDataFrame([], TABLE).toArrow().schema)
    servers = []
    for at, address in enumerate(addresses):
        home = folder / f"server{at}"
        home.mkdir()
        (home / "sow.toml").write_text(CONFIG.format(address=address))
        servers.append(ServerProcess(home, "sow.toml"))
    with servers[0], servers[1]:
        for server in servers:
            server.start()
        fields = TABLE.removeprefix("_key STRING, ").removesuffix(", _expire_time TIMESTAMP")
        stream = (
            spark.readStream.schema(f"{fields}, _ttl STRING").option("maxFilesPerTrigger", 1).json(str(folder / "in"))
        )
        changes = sow_spark.state_of_the_world(stream, key=[f"/{name}" for name in KEY], order="at")
        narration.step(
            "A state on two executors",
            f"{records:,} flights in {FILES} batches; the last one of each number stays.",
            f"Cancelled ones live for {CANCELLED_TTL}. Two servers have half of the keys each; a Delta table has all.",
        )
        sink = Sink(addresses, table)
        query = sow_spark.start_state(changes, sink, checkpoint=checkpoint, trigger="2s")
        began = time.monotonic()
        killed = 0
        for number in range(FILES):
            (ready / f"{number}.json").rename(folder / "in" / f"{number}.json")
            wanted = (number + 1) * records // FILES
            if number == FILES // 2:
                killed = kill_an_executor(spark)
                narration.say(f"executor {killed} was killed in the middle")
            while sink.puts < wanted:
                if query.exception() is not None:
                    raise RuntimeError(str(query.exception()))
                time.sleep(0.1)
            narration.say(f"{sink.puts:,} puts, {sink.expiries:,} expiries after {time.monotonic() - began:.0f} s")
        narration.claim(f"each of the {records:,} rows was put once", sink.puts == records and not sink.refused)
        narration.step("The cancelled flights expire", "Also without new rows.")
        ever = datetime(1970, 1, 1, tzinfo=UTC)  # also those that are overdue
        while sow_spark.read_state(spark, checkpoint, at=ever).where("dep_delay IS NULL").count():
            time.sleep(0.5)
        last = sow_spark.stop_state(query, timeout="5m")
        narration.say(f"stopped after batch {last}; {sink.expiries:,} expiries in all")
        narration.step("Four places, one state", "Count and a checksum over all fields.")
        state = sow_spark.read_state(spark, checkpoint)
        served = [spark.read.format("sow").schema(fields).option("server", one).load("flights") for one in addresses]
        found = {
            "the state": sums(state),
            "the two servers": sums(served[0].union(served[1])),
            "the table": sums(spark.createDataFrame(DeltaTable(table).to_pyarrow_table().to_pandas(), TABLE)),
        }
        for name, (count, checksum) in found.items():
            narration.say(f"{name}: {count:,} flights, checksum {checksum:x}")
        narration.claim("state, servers and table agree in every field", len(set(found.values())) == 1)
    spark.stop()


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.scale", description=__doc__.partition("\n")[0])
    parser.add_argument("--records", type=int, default=RECORDS_ALL, metavar="N", help="only the first N flights")
    given = parser.parse_args(arguments)
    narration = Narration()
    with tempfile.TemporaryDirectory() as folder:
        return exit_code(narration, lambda: tell(narration, given.records, Path(folder)))


if __name__ == "__main__":
    sys.exit(main())
