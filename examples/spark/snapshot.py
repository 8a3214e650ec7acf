"""A snapshot: a topic at one instant, written to Parquet files by carrier, with the bookmark of that instant.

    .venv/bin/python -m examples.spark.snapshot HOST:PORT FOLDER

Run `examples.spark.load_flights` first. `examples.spark.history` continues from the bookmark.
"""

from __future__ import annotations

from pyspark.sql import SparkSession

from examples.spark.session import command, session
from sow_client import Client

PIN = "flights-history"


def snapshot(spark: SparkSession, client: Client, server: str, folder: str) -> str:
    """Writes the files; returns the bookmark."""
    # Opened here and not by Spark, so that its bookmark and its time are known.
    export = client.open_export("flights")
    assert export.bookmark is not None, "the topic has a journal"
    # The changes after it are kept until the history has read them, for at most a week.
    client.pin_journal("flights", PIN, export.bookmark, idle_ttl="7d")
    flights = spark.read.format("sow").option("server", server).option("topic", "flights").option("export", export.id)
    flights.load().write.partitionBy("carrier").mode("overwrite").parquet(f"{folder}/snapshot")
    client.close_export(export.id)
    taken = [(export.bookmark, export.as_of)]
    spark.createDataFrame(taken, "bookmark STRING, as_of TIMESTAMP").coalesce(1).write.mode("overwrite").json(
        f"{folder}/bookmark"
    )
    return export.bookmark


def main(server: str, folder: str) -> None:
    """Takes the snapshot, and reads the written files."""
    spark = session("snapshot of flights")
    with Client(server) as client:
        bookmark = snapshot(spark, client, server, folder)
    written = spark.read.parquet(f"{folder}/snapshot")
    print(f"{written.count():,} flights of {written.select('carrier').distinct().count()} carriers, as of {bookmark}")
    written.groupBy("carrier").count().orderBy("count", ascending=False).show(3)


if __name__ == "__main__":
    command(main)
