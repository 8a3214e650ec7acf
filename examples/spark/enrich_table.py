"""An enrichment: changes of flights, joined with a snapshot of the planes, into a table of Delta Lake.

    .venv/bin/python -m examples.spark.enrich_table HOST:PORT FOLDER

Each run merges the changes since the last one. A plane that changes later changes the rows of later flights only.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession, functions

from examples.flights import extract
from examples.spark.capture import flights
from examples.spark.days import last_of_each_key
from examples.spark.lake import Source, begin, follow, merge_last
from examples.spark.session import command, session
from sow_client import AlreadyExists, Client

PLANES = "tailnum STRING, manufacturer STRING, model STRING, seats INT"


def enrich_table(spark: SparkSession, source: Source, folder: str) -> None:
    """Merges the changes since the last run, each with the plane as it is when the change is merged."""

    def joined(changes: DataFrame) -> DataFrame:
        # Loaded for each batch: a DataFrame is one snapshot for all its uses, and a stream may run for months.
        planes = spark.read.format("sow").schema(PLANES).option("server", source.server).load("planes")
        return changes.join(functions.broadcast(planes), "tailnum", "left")

    begin(spark, source, folder, joined)
    follow(spark, source, folder, lambda changes: joined(last_of_each_key(changes)), merge_last)


def load_planes(spark: SparkSession, client: Client, server: str, csv: str) -> None:
    """Creates the topic `planes`, and loads it."""
    with contextlib.suppress(AlreadyExists):
        client.create_topic("planes", key=["/tailnum"])
    columns = (
        "tailnum STRING, year INT, type STRING, manufacturer STRING, model STRING, engines INT, seats INT, speed INT, "
        "engine STRING"
    )
    rows = spark.read.csv(csv, columns, header=True, nullValue="NA")
    rows.write.format("sow").option("server", server).option("topic", "planes").mode("append").save()


def main(server: str, folder: str) -> None:
    """Loads the planes, merges, and counts the flights of a manufacturer."""
    spark = session("enrich a table of flights")
    with Client(server) as client, tempfile.TemporaryDirectory() as downloads:
        load_planes(spark, client, server, str(extract(Path(downloads), "planes.csv")))
    source = flights(server)
    enrich_table(spark, Source(server, source.topic, source.columns, "flights-enriched"), folder)
    rows = DeltaTable(folder).to_pyarrow_table(columns=["manufacturer"]).column("manufacturer").to_pylist()
    print(f"{len(rows):,} flights, {rows.count('AIRBUS'):,} of them with a plane of Airbus")


if __name__ == "__main__":
    command(main)
