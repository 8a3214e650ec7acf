"""An enrichment: changes of flights, with the name of the airline, from one topic to another.

    .venv/bin/python -m examples.spark.enrich HOST:PORT FOLDER

FOLDER keeps its position. It ends when there are no more changes. Without `availableNow` it runs on.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from pyspark.sql import SparkSession, functions

from examples.flights import extract
from examples.spark.load_flights import KEY
from examples.spark.session import command, finished, session
from sow_client import AlreadyExists, Client

FLIGHT = "carrier STRING, flight INT, origin STRING, dest STRING, dep_delay DOUBLE, _op STRING, _expire_time TIMESTAMP"
"""With `_op` the sink also removes deleted and expired flights."""


def enrich(spark: SparkSession, server: str, folder: str, airlines: str) -> None:
    """Forwards the changes since the last run, each change once, through failures in between."""
    names = spark.read.csv(airlines, "carrier STRING, airline STRING", header=True)
    changes = spark.readStream.format("sow").schema(FLIGHT).option("server", server).option("topic", "flights")
    late = (
        changes.option("startingFrom", "earliest")
        .load()
        .join(functions.broadcast(names), "carrier", "left")
        .withColumn("late", functions.coalesce(functions.col("dep_delay") > 15, functions.lit(False)))
        .withColumnRenamed("_expire_time", "until")  # an enriched record lives as long as its flight
    )
    sink = late.writeStream.format("sow").option("server", server).option("topic", "flights.enriched")
    sink = sink.option("expireTimeColumn", "until").option("checkpointLocation", f"{folder}/checkpoint")
    finished(sink.trigger(availableNow=True).start())


def main(server: str, folder: str) -> None:
    """Creates the topic, and enriches the present flights."""
    spark = session("enrich flights")
    with Client(server) as client, tempfile.TemporaryDirectory() as downloads:
        with contextlib.suppress(AlreadyExists):
            client.create_topic("flights.enriched", key=[f"/{name}" for name in KEY], expiration="enabled")
        enrich(spark, server, folder, str(extract(Path(downloads), "airlines.csv")))
        print(
            f"{client.count('flights.enriched'):,} flights, {client.count('flights.enriched', '/late'):,} of them late"
        )


if __name__ == "__main__":
    command(main)
