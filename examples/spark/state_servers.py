"""A state of the world on Spark feeds several servers, each with a share of the keys.

    .venv/bin/python -m examples.spark.state_servers FOLDER HOST:PORT HOST:PORT …

FOLDER gets the flights, and Spark's checkpoint. `examples.spark.shares` reads over all servers. Run it again with other
servers, or more of them, and the state is spread over these.

    [1]  A batch that is repeated after a crash is written again: at least once. The records are the same in the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

import sow_spark
from examples.flights import RECORDS_ALL
from examples.spark.load_flights import KEY
from examples.spark.session import command, session
from examples.spark.shares import Shares, write
from examples.spark.state_flights import last_of_each_key, run
from sow_client import AlreadyExists

TOPIC = "flights"


def serve(spark: SparkSession, folder: str, servers: Sequence[str], records: int = RECORDS_ALL) -> int:
    """Has the servers follow the state; returns the number of the last batch."""
    noted, told = Path(folder, "servers"), "\n".join(servers)
    if Path(folder, "checkpoint").exists() and noted.read_text() != told:  # most keys have another server now
        write(sow_spark.read_state(spark, f"{folder}/checkpoint"), servers, TOPIC, "overwrite")
    noted.parent.mkdir(parents=True, exist_ok=True)
    noted.write_text(told)

    def sink(batch: DataFrame, _: int) -> None:
        changes = batch.where("_op <> 'refused'").drop("_message", "_batch", "_now")
        last = last_of_each_key(changes).persist()
        try:
            if last.count():  # most batches without rows have no changes either
                write(last, servers, TOPIC)
        finally:
            last.unpersist()

    return run(spark, folder, sink, records)


def main(folder: str, first: str, *others: str) -> None:
    """Creates the topics, and has them follow the state."""
    spark, servers = session("a state into several servers"), [first, *others]
    with Shares(servers) as shares:
        for client in shares.clients:
            with contextlib.suppress(AlreadyExists):
                client.create_topic(TOPIC, key=[f"/{name}" for name in KEY], expiration="enabled")
        batch = serve(spark, folder, servers)
        counts = [client.count(TOPIC) for client in shares.clients]
    kept = sow_spark.read_state(spark, f"{folder}/checkpoint").count()
    print(f"batch {batch}: {kept:,} flights in the state, {' + '.join(f'{one:,}' for one in counts)} on the servers")


if __name__ == "__main__":
    command(main)
