"""A state of the world on Spark feeds a topic: the last departure of each flight of 2013, with its lifetime.

    .venv/bin/python -m examples.spark.state_topic HOST:PORT FOLDER [TOPIC]

FOLDER gets the flights, and Spark's checkpoint. Each change takes effect once, whatever is cut off and run again.
"""

from __future__ import annotations

import contextlib

import sow_spark
from examples.spark.load_flights import KEY
from examples.spark.session import command, session
from examples.spark.state_flights import run
from sow_client import AlreadyExists, Client


def main(server: str, folder: str, topic: str = "flights.state") -> None:
    """Creates the topic, and has it follow the state."""
    spark = session("a state into a topic")
    with Client(server) as client:
        with contextlib.suppress(AlreadyExists):
            client.create_topic(topic, key=[f"/{name}" for name in KEY], expiration="enabled")
        batch = run(spark, folder, {"server": server, "topic": topic})
        kept = sow_spark.read_state(spark, f"{folder}/checkpoint").count()
        print(f"batch {batch}: {kept:,} flights in the state, {client.count(topic):,} in {topic}")


if __name__ == "__main__":
    command(main)
