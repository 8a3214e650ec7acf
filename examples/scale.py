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
from typing import Final

import pyspark
from pyspark.sql import DataFrame, SparkSession

import sow_spark
from examples.demo import exit_code
from examples.flights import RECORDS_ALL
from examples.narration import Narration
from examples.server_process import HOST, ServerProcess, free_port
from examples.spark import shares, state_lake
from examples.spark.lake import frame
from examples.spark.load_flights import COLUMNS
from examples.spark.state_flights import CANCELLED_SECONDS, FILES, last_of_each_key, state, sums, write_files

CONFIG: Final = """\
[server]
listen = "{address}"
data_dir = "data"
[topics.flights]
key = ["/carrier", "/flight", "/origin"]
expiration = "enabled"
"""


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
                shares.write(last_of_each_key(changes), self._servers, "flights")
                state_lake.merge(changes, number, self._table)
        finally:
            rows.unpersist()
        if number not in self.batches:
            self.batches.add(number)
            self.puts += counts.get("put", 0)
            self.expiries += counts.get("expire", 0)
            self.refused += counts.get("refused", 0)


def tell(narration: Narration, records: int, folder: Path) -> None:
    """The story."""
    narration.title("More than one server: the state of the world on Spark")
    spark = session(folder)  # before anything else starts: it forks
    addresses = [f"{HOST}:{free_port(0)}" for _ in range(2)]
    ready = write_files(folder / "ready", records)
    (folder / "in").mkdir()
    table, checkpoint = str(folder / "table"), str(folder / "checkpoint")
    state_lake.create(spark, table)
    servers = []
    for at, address in enumerate(addresses):
        home = folder / f"server{at}"
        home.mkdir()
        (home / "sow.toml").write_text(CONFIG.format(address=address))
        servers.append(ServerProcess(home, "sow.toml"))
    with servers[0], servers[1]:
        for server in servers:
            server.start()
        changes = state(spark, folder / "in")
        narration.step(
            "A state on two executors",
            f"{records:,} flights in {FILES} batches; the last one of each number stays.",
            f"Cancelled ones live for {CANCELLED_SECONDS} seconds.",
            "Two servers have half of the keys each; a Delta table has all.",
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
        while sow_spark.read_state(spark, checkpoint, at=ever).where("dep_time IS NULL").count():
            time.sleep(0.5)
        last = sow_spark.stop_state(query, timeout="5m")
        narration.say(f"stopped after batch {last}; {sink.expiries:,} expiries in all")
        narration.step("Four places, one state", "Count and a checksum over all fields.")
        found = {
            "the state": sums(sow_spark.read_state(spark, checkpoint)),
            "the two servers": sums(shares.frame(spark, addresses, "flights", f"{COLUMNS}, _expire_time TIMESTAMP")),
            "the table": sums(frame(spark, table)),
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
