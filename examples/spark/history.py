"""A history: the snapshot and the changes after it give the table at any later bookmark, and the validity of each row.

    .venv/bin/python -m examples.spark.history HOST:PORT FOLDER

FOLDER is that of `examples.spark.snapshot`. Each run appends the changes since the last one, and ends.
"""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession, Window, functions

from examples.spark.session import command, finished, session
from examples.spark.snapshot import PIN


def follow(spark: SparkSession, server: str, folder: str) -> None:
    """Appends the changes since the last run, or since the snapshot."""
    (taken,) = spark.read.json(f"{folder}/bookmark").collect()
    schema = spark.read.parquet(f"{folder}/snapshot").schema.add("_sequence", "long").add("_op", "string")
    changes = (
        spark.readStream.format("sow")
        .schema(schema)
        .option("server", server)
        .option("topic", "flights")
        .option("startingFrom", taken.bookmark)
        .option("pinName", PIN)
        .load()
    )
    sink = changes.writeStream.format("parquet").option("checkpointLocation", f"{folder}/checkpoint")
    finished(sink.trigger(availableNow=True).start(f"{folder}/changes"))


def versions(spark: SparkSession, folder: str) -> DataFrame:
    """Every state of every flight, with the first and last sequence of its validity. Null: it is still valid."""
    start = functions.lit(0).cast("long").alias("_sequence")
    first = spark.read.parquet(f"{folder}/snapshot").select("*", start, functions.lit("put").alias("_op"))
    changes = spark.read.schema(first.schema).parquet(f"{folder}/changes")
    of_key = Window.partitionBy("_key").orderBy("_sequence")
    states = first.unionByName(changes).withColumn("valid_to", functions.lead("_sequence").over(of_key))
    return states.where("_op = 'put'").withColumnRenamed("_sequence", "valid_from").drop("_op")


def table_at(states: DataFrame, sequence: int) -> DataFrame:
    """The topic right after the change `sequence`. Before the first change it is the snapshot."""
    after = functions.col("valid_to").isNull() | (functions.col("valid_to") > sequence)
    return states.where((functions.col("valid_from") <= sequence) & after)


def main(server: str, folder: str) -> None:
    """Appends changes, and prints the growth of the table."""
    spark = session("history of flights")
    follow(spark, server, folder)
    states = versions(spark, folder).cache()
    last = states.agg(functions.max(functions.coalesce("valid_to", "valid_from"))).collect()[0][0]
    print(f"{states.count():,} states; {table_at(states, 0).count():,} flights in the snapshot,", end=" ")
    print(f"{table_at(states, last).count():,} after the change {last}")


if __name__ == "__main__":
    command(main)
