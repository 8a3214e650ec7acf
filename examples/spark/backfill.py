"""A backfill: a topic gets the rows of a table of Delta Lake, each with the rest of its lifetime.

    .venv/bin/python -m examples.spark.backfill HOST:PORT FOLDER [TOPIC]

FOLDER is a table of `examples.spark.capture` or `state_lake`. All rows come, or none; a second run repeats it.
"""

from __future__ import annotations

import contextlib

from deltalake.exceptions import DeltaError
from pyspark.sql import SparkSession

from examples.spark.lake import frame
from examples.spark.load_flights import KEY
from examples.spark.session import command, session
from sow_client import AlreadyExists, Client


def backfill(spark: SparkSession, server: str, folder: str, topic: str) -> None:
    """Replaces the content of a topic with the rows of a table that have not expired.

    Changes that others make while this runs stay (rule P9), so the topic can be in use already.
    """
    rows = frame(spark, folder)
    alive = rows.where("_expire_time IS NULL OR _expire_time > current_timestamp()")
    sink = alive.write.format("sow").option("server", server).option("topic", topic)
    # The same expire time, and not the same lifetime again. A row without one never expires, whatever the topic says.
    sink.option("expireTimeColumn", "_expire_time").option("ttl", "never").mode("overwrite").save()


def main(server: str, folder: str, topic: str = "flights.restored") -> None:
    """Creates the topic, and fills it."""
    spark = session("backfill flights")
    with Client(server) as client:
        with contextlib.suppress(AlreadyExists):
            client.create_topic(topic, key=[f"/{name}" for name in KEY], expiration="enabled")
        backfill(spark, server, folder, topic)
        print(f"{client.count(topic):,} flights in {topic}")
        soonest = next(iter(client.query(topic, order_by="@expire_time", top_n=1)))
        print("the next one to expire:", soonest.key, "at", soonest.expire_time)


if __name__ == "__main__":
    command(main, DeltaError)
