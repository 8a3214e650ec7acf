"""One topic on several servers, each with a share of its keys: writing, and reading over all of them.

    .venv/bin/python -m examples.spark.shares KEY HOST:PORT HOST:PORT …

looks up one flight, such as `DL|2319|LGA`, and asks all servers that `examples.spark.state_servers` has filled, by
clients and by Spark.

    [1]  The server of a key is that of its CRC-32 modulo the number of servers (`sow_client.share_of`). Spark SQL has
         that sum, too. So the order of the servers belongs to the data, and so does their number.
    [2]  An answer of all servers is no cut: each server answers at an instant of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import reduce
from typing import Literal, Self

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  # as everybody does

from examples.spark.load_flights import COLUMNS
from examples.spark.session import command, session
from sow_client import Client, Record, share_of


class Shares:
    """A client of each server. What concerns one key is asked of its server alone."""

    def __init__(self, servers: Sequence[str]) -> None:
        self._open = ExitStack()
        self.clients = [self._open.enter_context(Client(server)) for server in servers]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def of(self, key: str) -> Client:
        """The client of the server that has a key."""
        return self.clients[share_of(key, len(self.clients))]

    def get(self, topic: str, key: str) -> Record | None:
        """The record of a key, from the server that has it."""
        return self.of(key).get(topic, key)

    def count(self, topic: str, wanted: str = "") -> int:
        """The number of records that match a filter, on all of them [2]."""
        return sum(client.count(topic, wanted) for client in self.clients)

    def query(self, topic: str, wanted: str = "") -> Iterator[Record]:
        """The records that match a filter, server by server [2]."""
        for client in self.clients:
            yield from client.query(topic, wanted)


def write(rows: DataFrame, servers: Sequence[str], topic: str, mode: Literal["append", "overwrite"] = "append") -> None:
    """Writes records, or changes of them, each to the server of its `_key`, with the expire time that it has.

    An overwrite replaces the content of each topic by its share, completely or not at all; of several servers some may
    have it and others not, so a run that was cut off is run again.
    """
    for at, server in enumerate(servers):
        share = rows.where(F.crc32("_key") % len(servers) == at)
        sink = share.write.format("sow").options(server=server, expireTimeColumn="_expire_time", ttl="never")
        sink.mode(mode).save(topic)


def frame(spark: SparkSession, servers: Sequence[str], topic: str, columns: str) -> DataFrame:
    """The records of all servers. Each share is a snapshot at one instant, and all together are not [2]."""
    reader = spark.read.format("sow").schema(columns)
    return reduce(DataFrame.union, [reader.option("server", server).load(topic) for server in servers])


def main(key: str, first: str, *others: str, topic: str = "flights") -> None:
    """Asks for one key, for numbers, and for a table."""
    spark, servers = session("shares"), [first, *others]
    with Shares(servers) as shares:
        found = shares.get(topic, key)
        print(f"server {share_of(key, len(servers)) + 1} of {len(servers)} has {key}: {found and found.data}")
        late = shares.count(topic, "/dep_delay > 60")
        print(f"{shares.count(topic):,} flights, {late:,} of them an hour late or more")
        longest = max(shares.query(topic, "/distance > 2000"), key=lambda record: record.data["distance"])
        print("the longest one:", longest.key)
    flights = frame(spark, servers, topic, COLUMNS)
    flights.groupBy("origin").agg(F.count("*").alias("flights"), F.avg("dep_delay")).orderBy("origin").show()


if __name__ == "__main__":
    command(main)
