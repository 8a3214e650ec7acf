"""A bulk load: every departure from New York in 2013 as a record of its own, where `load_flights` keeps the latest of
each flight.

    .venv/bin/python -m examples.spark.load_departures [HOST:PORT] [CSV]
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Final

from examples.flights import DEPARTURE_FIELDS, extract
from examples.spark.load_flights import load
from examples.spark.session import command, session
from sow_client import AlreadyExists, Client

TOPIC: Final = "departures"


def create(client: Client) -> None:
    """Creates the topic, unless it is there."""
    with contextlib.suppress(AlreadyExists):
        client.create_topic(TOPIC, key=[f"/{name}" for name in DEPARTURE_FIELDS], expiration="enabled")


def main(server: str = "127.0.0.1:7450", csv: str = "") -> None:
    """Creates the topic, and loads it."""
    spark = session("load departures")
    with Client(server) as client, tempfile.TemporaryDirectory() as folder:
        create(client)
        rows = load(spark, server, csv or str(extract(Path(folder), "flights.csv")), TOPIC)
        print(f"{rows:,} rows loaded; the topic holds {client.count(TOPIC):,} departures")


if __name__ == "__main__":
    command(main)
