"""A state of the world on Spark is a table of Delta Lake, too: puts as rows, deletes and expiries as deletes of rows.

    .venv/bin/python -m examples.spark.state_lake FOLDER TABLE

FOLDER gets the flights, and Spark's checkpoint. `examples.spark.backfill` fills a topic from the table.

    [1]  Each commit of the table has the number of its batch, as a transaction (Delta's action `txn`) of the query. So
         a batch that is repeated after a crash is merged once. The id of the query is that of its checkpoint.
    [2]  A table belongs to one checkpoint: another state does not know which rows the former one would have deleted.
"""

from __future__ import annotations

from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import DeltaError
from pyspark.sql import DataFrame, SparkSession

import sow_spark
from examples.flights import RECORDS_ALL
from examples.spark.lake import merge_last
from examples.spark.load_flights import COLUMNS, METADATA
from examples.spark.session import command, session
from examples.spark.state_flights import last_of_each_key, run

TABLE = f"{COLUMNS}, {METADATA}, _key STRING"


def create(spark: SparkSession, folder: str, columns: str = TABLE) -> None:
    """Makes an empty table, unless there is one."""
    DeltaTable.create(folder, spark.createDataFrame([], columns).toArrow().schema, mode="ignore")


def merge(batch: DataFrame, number: int, folder: str) -> None:
    """Merges a batch of changes, unless the table has it [1].

    Raises LookupError for a table of another checkpoint [2].
    """
    table = DeltaTable(folder)
    names = [field.name for field in table.schema().fields]
    # Spark computes the state as the batch is read, so also one that the table has is read, and whole.
    changes = last_of_each_key(batch.where("_op <> 'refused'")).select(*names, "_op").toArrow()
    query = batch.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
    assert query is not None, "Spark sets it for the time of a batch"
    merged = table.transaction_version(query)
    if merged is None and table.version():
        raise LookupError(f"{folder} is the table of another checkpoint: begin a new table")
    if changes.num_rows and (merged is None or merged < number):
        merge_last(table, changes, CommitProperties(app_transactions=[Transaction(query, number)]))


def keep(spark: SparkSession, folder: str, table: str, records: int = RECORDS_ALL) -> int:
    """Has the table follow the state; returns the number of the last batch."""
    create(spark, table)
    return run(spark, folder, lambda batch, number: merge(batch, number, table), records)


def main(folder: str, table: str) -> None:
    """Has the table follow the state, and counts its rows."""
    spark = session("a state into a lake")
    batch = keep(spark, folder, table)
    kept = sow_spark.read_state(spark, f"{folder}/checkpoint").count()
    made = DeltaTable(table)
    print(f"batch {batch}: {kept:,} flights in the state, {made.count():,} in version {made.version()} of {table}")


if __name__ == "__main__":
    command(main, DeltaError)
