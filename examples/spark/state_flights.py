"""A state of the world on Spark, of real flights: the stream that the pipelines `state_…` share, and the end of a run.

FOLDER has the flights, in files, and Spark's checkpoint. A run that was cut off goes on when it is started again.

    [1]  The last departure of each flight number stays. It lives for an hour, and a second for each mile; a cancelled
         one lives for seconds, and one of more than 4,000 miles for ever.
    [2]  A file is a micro-batch. Spark takes files in the order of their times.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  # as everybody does
from pyspark.sql.streaming.query import StreamingQuery

import sow_spark
from examples.flights import RECORDS_ALL, read_flights
from examples.spark.load_flights import COLUMNS, KEY
from examples.spark.session import Batches, tell

FILES: Final = 6
CANCELLED_SECONDS: Final = 5
TRIGGER: Final = "5s"
"""With pauses between batches also on a busy machine, as only there a query can be stopped."""
FIELDS: Final = [column.split()[0] for column in f"{COLUMNS}, _expire_time TIMESTAMP".split(", ")]
TTL: Final = (
    f"CASE WHEN dep_time IS NULL THEN '{CANCELLED_SECONDS}s' WHEN distance > 4000 THEN 'never' "
    "ELSE concat(3600 + int(distance), 's') END"
)


Sink = Mapping[str, str] | Callable[[DataFrame, int], None]
"""Options of a topic, or a function of `foreachBatch`."""


def run(spark: SparkSession, folder: str, sink: Sink, records: int = RECORDS_ALL) -> int:
    """Puts the flights through a state into a sink, and returns the number of the last batch."""
    files = Path(folder, "in")
    if not files.exists():
        tell(f"writing {records:,} flights to {files}")
        write_files(Path(folder, "ready"), records).rename(files)
    tell(f"a batch for each of the {FILES} files there, and {CANCELLED_SECONDS} s for what expires")
    # About one for each core, not Spark's 200; a first run fixes their number.
    spark.conf.set("spark.sql.shuffle.partitions", spark.sparkContext.defaultParallelism)
    query = sow_spark.start_state(state(spark, files), sink, checkpoint=f"{folder}/checkpoint", trigger=TRIGGER)
    return finish(query)


def write_files(folder: Path, records: int = RECORDS_ALL) -> Path:
    """The flights as lines of JSON, in the order of their departures [2]."""
    folder.mkdir(parents=True)
    flights = iter(read_flights(records))
    for number in range(FILES):
        path = folder / f"{number}.json"
        size = (number + 1) * records // FILES - number * records // FILES
        path.write_bytes(b"".join(flight.document + b"\n" for flight in islice(flights, size)))
        os.utime(path, (number, number))
    return folder


def state(spark: SparkSession, files: Path) -> DataFrame:
    """The changes of the last departure of each flight number [1]."""
    stream = spark.readStream.schema(COLUMNS).option("maxFilesPerTrigger", 1).json(str(files))
    keys = [f"/{name}" for name in KEY]
    return sow_spark.state_of_the_world(stream.withColumn("_ttl", F.expr(TTL)), key=keys, order=["time_hour", "minute"])


def finish(query: StreamingQuery) -> int:
    """Stops a query once it has taken all files, and the cancelled flights among them have expired."""
    quiet: datetime | None = None
    batches = Batches(query)
    while True:
        batches.tell()
        if (error := query.exception()) is not None:
            raise error
        told = query.lastProgress
        if told is not None:
            began = datetime.fromisoformat(told.timestamp)
            quiet = None if told.sources[0].numInputRows else quiet or began
            if quiet is not None and began - quiet > timedelta(seconds=CANCELLED_SECONDS):
                return sow_spark.stop_state(query, timeout="5m")
        time.sleep(0.1)


def last_of_each_key(changes: DataFrame) -> DataFrame:
    """The last change of each key. An expiry has the version of its record."""
    order = F.struct("_version", F.expr("_op <> 'put'"))
    return changes.groupBy("_key").agg(F.max_by(F.struct(*changes.columns), order).alias("last")).select("last.*")


def sums(frame: DataFrame) -> tuple[int, int]:
    """The number of flights, and a sum over all their fields and expire times."""
    row = frame.select(F.crc32(F.to_json(F.struct(*FIELDS))).alias("sum")).agg(F.count("*"), F.sum("sum")).first()
    assert row is not None, "an aggregate has a row"
    return row[0], row[1] or 0
