"""A family of 64 topics in Spark: one DataFrame over all of them, and rows that go to the topics of their keys.

    .venv/bin/python -m examples.spark.family_frame [HOST:PORT]

reads the flights that `examples.family` has published, and marks those that were late. The topics may be in any cells.

    [1]  Spark's crc32 is the sum of `sow_client.share_of`. So Spark and clients find a key in the same topic.
    [2]  Each cell is read at an instant of its own: its topics are of one cut, those of two cells are not.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  # as everybody does

from examples.spark.load_flights import COLUMNS, KEY
from examples.spark.session import command, session

SHARES = 64


def topic_of(name: str, key: Column, shares: int = SHARES) -> Column:
    """The topic of a family that has a key [1]."""
    digits = len(str(shares - 1))
    return F.format_string(f"{name}.%0{digits}d", F.crc32(key) % shares)


def frame(spark: SparkSession, server: str, columns: str, name: str = "flights") -> DataFrame:
    """The records of a family [2]."""
    reader = spark.read.format("sow").schema(columns).option("server", server)
    return reader.option("topicPattern", f"{name}[.][0-9]+").load()


def write(rows: DataFrame, server: str, key: Column, name: str = "flights", **options: str) -> None:
    """Writes rows to the family, each to the topic of its key."""
    named = rows.withColumn("topic", topic_of(name, key))
    # The rows of a topic come together, and so do those of a key: a task has some topics, and not all.
    sink = named.repartition("topic").write.format("sow").option("server", server).option("topicColumn", "topic")
    sink.options(**options).mode("append").save()


def main(server: str = "127.0.0.1:7450") -> None:
    """Counts flights, and marks some."""
    spark = session("a family of topics")
    flights = frame(spark, server, f"{COLUMNS}, _key STRING, _topic STRING")
    print(f"{flights.count():,} flights in {flights.select('_topic').distinct().count()} topics", flush=True)
    late = flights.where("dep_delay > 60").select(*KEY, "_key", F.lit(True).alias("late"))
    write(late, server, F.col("_key"), mode="delta")
    marked = frame(spark, server, "origin STRING, late BOOLEAN").where("late")
    marked.groupBy("origin").count().orderBy("origin").show()


if __name__ == "__main__":
    command(main)
