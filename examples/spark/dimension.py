"""A slowly changing dimension of type 2: every version of every flight, and when it was valid.

    .venv/bin/python -m examples.spark.dimension HOST:PORT FOLDER

FOLDER is a table of Delta Lake. Each run merges the changes since the last one. A version is open as long as
`valid_to` is null; `ended_by` says whether a later put, a delete or an expiry ended it.
"""

from __future__ import annotations

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable
from pyspark.sql import DataFrame, SparkSession, Window, functions

from examples.spark.capture import flights
from examples.spark.lake import Source, begin, follow, values
from examples.spark.session import command, session


def dimension(spark: SparkSession, source: Source, folder: str) -> None:
    """Merges the changes since the last run."""
    begin(spark, source, folder, _open)
    follow(spark, source, folder, versions, merge)


def _open(records: DataFrame) -> DataFrame:
    """The rows of a snapshot: an open version of each record."""
    columns = records.withColumn("valid_from", functions.col("_sequence")).withColumn(
        "valid_to", functions.lit(None).cast("long")
    )
    return columns.withColumn("valid_until", functions.lit(None).cast("timestamp")).withColumn(
        "ended_by", functions.lit(None).cast("string")
    )


def versions(changes: DataFrame) -> DataFrame:
    """A row for each put, which is a new version, and one for the first change of each key, which ends the version that
    the table has open (`closes`)."""
    of_key = Window.partitionBy("_key").orderBy("_sequence")
    # The time of an expiry and of a put are in their records. That of a delete is not: it is the time of this batch.
    time = functions.expr(
        "CASE _op WHEN 'put' THEN _publish_time WHEN 'expire' THEN _expire_time ELSE current_timestamp() END"
    )
    timed = changes.withColumn("_time", time).withColumn("_rank", functions.row_number().over(of_key))
    new = (
        timed.withColumn("valid_from", functions.col("_sequence"))
        .withColumn("valid_to", functions.lead("_sequence").over(of_key))
        .withColumn("valid_until", functions.lead("_time").over(of_key))
        .withColumn("ended_by", functions.lead("_op").over(of_key))
        .withColumn("closes", functions.lit(False))
        .where("_op = 'put'")
    )
    ends = (
        timed.where("_rank = 1")
        .withColumn("valid_from", functions.lit(None).cast("long"))
        .withColumn("valid_to", functions.col("_sequence"))
        .withColumn("valid_until", functions.col("_time"))
        .withColumn("ended_by", functions.col("_op"))
        .withColumn("closes", functions.lit(True))
    )
    # The row of a version also tells of the change that ended it, so that the greatest sequence of the batch is here.
    last = functions.greatest("_sequence", functions.coalesce("valid_to", functions.lit(0)))
    return new.unionByName(ends).withColumn("_sequence", last).drop("_time", "_rank", "_op")


def merge(table: DeltaTable, rows: pa.Table, commit: CommitProperties) -> None:
    """Ends open versions, and inserts the new ones, in one commit."""
    names = [name for name in rows.column_names if name != "closes"]
    condition = "lake._key = change._key AND lake.valid_to IS NULL AND change.closes"
    merging = table.merge(rows, condition, source_alias="change", target_alias="lake", commit_properties=commit)
    merging = merging.when_matched_update(values(["valid_to", "valid_until", "ended_by"]))
    merging.when_not_matched_insert(values(names), "NOT change.closes").execute()


def table_at(rows: DataFrame, sequence: int) -> DataFrame:
    """The topic right after the change with this sequence: a bookmark ends with one."""
    return rows.where(f"valid_from <= {sequence} AND (valid_to IS NULL OR valid_to > {sequence})")


def main(server: str, folder: str) -> None:
    """Merges, and counts the versions."""
    spark = session("versions of flights")
    source = flights(server)
    dimension(spark, Source(server, source.topic, source.columns, "flights-versions"), folder)
    ended = DeltaTable(folder).to_pyarrow_table(columns=["ended_by"]).column("ended_by").to_pylist()
    told = ", ".join(f"{ended.count(by):,} ended by {by}" for by in ("put", "delete", "expire"))
    print(f"{len(ended):,} versions of flights: {ended.count(None):,} open, {told}")


if __name__ == "__main__":
    command(main)
