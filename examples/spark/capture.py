"""A change capture: a table of Delta Lake that follows a topic, with its deletes and expiries.

    .venv/bin/python -m examples.spark.capture HOST:PORT FOLDER [SECONDS]

FOLDER is the table. Each run merges the changes since the last one, and ends; with SECONDS it runs on, and merges after
each such time. The first run takes a snapshot.
"""

from __future__ import annotations

from deltalake import DeltaTable
from pyspark.sql import SparkSession

from examples.spark.days import last_of_each_key
from examples.spark.lake import Source, begin, follow, merge_last
from examples.spark.load_flights import COLUMNS, METADATA
from examples.spark.session import command, session


def flights(server: str, topic: str = "flights") -> Source:
    """The topic with all fields of a flight."""
    return Source(server, topic, f"{COLUMNS}, {METADATA}", f"{topic}-lake")


def capture(spark: SparkSession, source: Source, folder: str, seconds: float | None = None) -> None:
    """Merges the changes since the last run; see `examples.spark.lake` for what happens if it is cut off."""
    begin(spark, source, folder)
    follow(spark, source, folder, last_of_each_key, merge_last, seconds=seconds)


def main(server: str, folder: str, seconds: str = "") -> None:
    """Captures the topic `flights`, and counts the rows of the table."""
    spark = session("capture flights")
    capture(spark, flights(server), folder, float(seconds) if seconds else None)
    table = DeltaTable(folder)
    print(f"{table.count():,} flights in version {table.version()} of {folder}")


if __name__ == "__main__":
    command(main)
