"""The program of tests/spark/test_connect.py: a client of Spark Connect, without a JVM."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

import sow_spark
from sow_client import Client
from tests.support.servers.server import until

MINUTE = 60.0


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:  # the test says which
        return str(error)
    return "not refused"


def main(url: str, server: str, topic: str, folder: str) -> None:
    spark = SparkSession.builder.remote(url).getOrCreate()
    checkpoint, out = f"{folder}/checkpoint", Path(folder) / "out"
    stream = spark.readStream.schema("id LONG, name STRING, n LONG, _ttl STRING").json(f"{folder}/in")
    changes = sow_spark.state_of_the_world(stream, key="/id", order="n")
    query = sow_spark.start_state(changes, {"server": server, "topic": topic}, checkpoint=checkpoint, trigger="10s")
    with Client(server) as client:
        until(
            lambda: {record.key for record in client.query(topic)} == {"1", "2"} or not query.isActive,
            5 * MINUTE,
            "the first rows",
        )
    assert query.isActive, query.exception()
    first = sow_spark.stop_state(query, "5m")

    def write(batch: DataFrame, number: int) -> None:
        batch.coalesce(1).write.mode("overwrite").json(f"{out}/{number}")

    def told(key: str) -> list[str]:
        rows = [json.loads(line) for file in sorted(out.glob("*/*.json")) for line in file.read_text().splitlines()]
        rows.sort(key=lambda row: int(row["_batch"]))
        return [row["_op"] for row in rows if row.get("_key") == key]

    (Path(folder) / "in" / "2.json").write_text('{"id": 4, "name": "d", "n": 4, "_ttl": "1s"}\n{"n": 5}\n')
    changes = sow_spark.state_of_the_world(stream, key="/id", order="n", max_ttl="2h")
    query = sow_spark.start_state(changes, write, checkpoint=checkpoint, trigger="10s")
    until(lambda: told("4") == ["put", "expire"] or not query.isActive, 5 * MINUTE, "an expiry")
    assert query.isActive, query.exception()
    last = sow_spark.stop_state(query, "5m")
    rates = spark.readStream.format("rate").load().writeStream.format("noop")
    other = rates.option("checkpointLocation", f"{folder}/other").start()
    rows = sow_spark.read_state(spark, checkpoint).orderBy("_key").select("_key", "name").collect()
    answer = {
        "batches": [first, last],
        "rows": [list(row) for row in rows],
        "read": spark.read.format("sow").option("server", server).load(topic).count(),
        "earlier": sow_spark.read_state(spark, checkpoint, batch=first).count(),
        "refused": [
            refusal(lambda: sow_spark.state_of_the_world(stream, key="/id", order="n", engine="jvm")),
            refusal(
                lambda: sow_spark.start_state(
                    sow_spark.state_of_the_world(stream, key="/name", order="n"), write, checkpoint=checkpoint
                )
            ),
            refusal(lambda: sow_spark.read_state(spark, folder)),
            refusal(lambda: sow_spark.stop_state(other)),
            refusal(lambda: sow_spark.repartition_state(spark, checkpoint, 4)),
        ],
    }
    other.stop()
    (Path(folder) / "answer").write_text(json.dumps(answer))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
