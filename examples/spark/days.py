"""A log of changes in Parquet, with a partition for each day of departure, and the table that it makes.

    .venv/bin/python -m examples.spark.days HOST:PORT FOLDER

Run `examples.spark.load_departures` first. Each run appends the changes since the last one, each once, and ends. A day
is a folder, so a reader of some days reads only their files; deletes and expiries are in the folder of their flight.
"""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession, Window, functions

from examples.spark.load_departures import TOPIC
from examples.spark.load_flights import COLUMNS, METADATA
from examples.spark.session import command, finished, session


def follow_days(spark: SparkSession, server: str, folder: str) -> None:
    """Appends the changes since the last run. Spark's checkpoint and the sink's own log make it exactly once."""
    changes = (
        spark.readStream.format("sow")
        .schema(f"{COLUMNS}, {METADATA}, _key STRING, _op STRING, _sequence LONG")
        .option("server", server)
        .option("topic", TOPIC)
        .option("startingFrom", "earliest")
        .option("maxRecordsPerTrigger", 500_000)
        .load()
        .withColumn("date", functions.make_date("year", "month", "day"))
    )
    # All changes of a day in one file of a batch: small files cost more than the shuffle.
    sink = changes.repartition("date").writeStream.format("parquet").partitionBy("date")
    sink = sink.option("checkpointLocation", f"{folder}/_checkpoint").trigger(availableNow=True)
    finished(sink.start(f"{folder}/changes"))


def table(spark: SparkSession, folder: str) -> DataFrame:
    """The present flights. With a condition on `date` only the files of these days are read.

    A departure never changes its day, so all changes of a key are in one partition.
    """
    return last_of_each_key(spark.read.parquet(f"{folder}/changes"), "date").where("_op = 'put'").drop("_op")


def last_of_each_key(changes: DataFrame, *partition: str) -> DataFrame:
    """The last change of each key, within the partitions by which the changes are stored, if any."""
    newest = Window.partitionBy(*partition, "_key").orderBy(functions.desc("_sequence"))
    return changes.withColumn("_rank", functions.row_number().over(newest)).where("_rank = 1").drop("_rank")


def main(server: str, folder: str) -> None:
    """Appends changes, and prints the days with the most delays."""
    spark = session("departures by day")
    follow_days(spark, server, folder)
    days = table(spark, folder).groupBy("date").agg(functions.count("*").alias("flights"), functions.avg("dep_delay"))
    print(f"{days.agg(functions.sum('flights')).collect()[0][0]:,} departures on {days.count()} days")
    days.orderBy(functions.desc("avg(dep_delay)")).show(3)


if __name__ == "__main__":
    command(main)
