"""A topic and a table of Delta Lake: the parts that the pipelines into and out of a lake share.

Spark reads the changes, and its executors write the files of a first snapshot. The driver merges the changes of each
micro-batch with delta-rs (`pip install deltalake`), which needs neither a jar nor a catalog.

    [1]  Each commit of a table carries the sequence of the last change in it, as a transaction (Delta's action `txn`)
         of the topic's journal: its epoch, and the creation of the topic. Changes at or below that sequence are left
         out. So a batch that is run twice changes nothing the second time, and a topic that was deleted and made again
         is not merged into the rows of the former one.
    [2]  Of two drivers that merge into a table at the same time, one commits. The other fails with CommitFailedError,
         and finds the changes applied when it is run again. Of two drivers that begin a table, one makes its rows.
    [3]  A run starts at the position of the table. There is no checkpoint that could be lost, or tell another
         position. The pin of the table keeps the journal from there on, for a week after the last run.
    [4]  A run never merges into a table that lacks earlier changes: one that was replaced meanwhile ends the run.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.transaction import AddAction, RemoveAction
from pyspark.sql import DataFrame, SparkSession, functions
from pyspark.sql.types import StructType

from examples.spark.session import finished
from sow_client import Client

RECORDS_PER_BATCH: Final = 100_000
"""The driver holds the changes of one batch. A commit of the topic is not split."""
PIN_LEASE: Final = "7d"


@dataclass(frozen=True, slots=True)
class Source:
    """A topic whose changes go into a table."""

    server: str
    topic: str
    columns: str
    """The columns of the rows in Spark's notation: fields of the documents, and metadata. `_key`, `_op` and
    `_sequence` come in addition."""
    pin: str
    """The name of the pin that keeps the journal for the table."""
    records_per_batch: int = RECORDS_PER_BATCH


Prepare = Callable[[DataFrame], DataFrame]
"""Makes the rows for the table out of changes."""
Merge = Callable[[DeltaTable, pa.Table, CommitProperties], object]
"""Merges rows into a table, in one commit that has these properties."""


def follow(
    spark: SparkSession, source: Source, folder: str, prepare: Prepare, merge: Merge, *, seconds: float | None = None
) -> None:
    """Merges the changes since the position of the table, and ends. With `seconds` it does not end, and takes a batch
    after each such time.

    The rows of `prepare` have the column `_sequence`; one of them has the greatest of the batch. Raises LookupError for
    a table that was replaced meanwhile [4].
    """
    journal, sequence = position(source, folder)
    reached = sequence

    def take(batch: DataFrame, _: int) -> None:
        nonlocal reached
        table = DeltaTable(folder)
        applied = table.transaction_version(journal)
        if applied is None or applied < reached:
            raise LookupError(f"{folder} was at {reached}, and is now at {applied or 'another journal'}: run it again")
        reached = applied
        rows = prepare(batch.where(functions.col("_sequence") > applied)).toArrow()
        if rows.num_rows:
            reached = max(rows.column("_sequence").to_pylist())
            merge(table, rows, at(journal, reached))

    changes = (
        spark.readStream.format("sow")
        .schema(f"{source.columns}, _key STRING, _op STRING, _sequence LONG")
        .option("server", source.server)
        .option("topic", source.topic)
        .option("startingFrom", bookmark(journal, sequence))
        .option("pinName", source.pin)
        .option("pinLease", PIN_LEASE)
        .option("maxRecordsPerTrigger", source.records_per_batch)
        .load()
    )
    stream = changes.writeStream.foreachBatch(take)  # without a checkpoint [3]
    if seconds is None:
        finished(stream.trigger(availableNow=True).start())
    else:
        finished(stream.trigger(processingTime=f"{seconds} seconds").start())


def merge_last(table: DeltaTable, changes: pa.Table, commit: CommitProperties) -> None:
    """Merges the last change of each key: puts replace rows, deletes and expiries delete them."""
    names = [name for name in changes.column_names if name != "_op"]
    merging = table.merge(
        changes, "lake._key = change._key", source_alias="change", target_alias="lake", commit_properties=commit
    )
    merging = merging.when_matched_delete("change._op <> 'put'").when_matched_update(values(names))
    merging.when_not_matched_insert(values(names), "change._op = 'put'").execute()


def values(names: Sequence[str]) -> dict[str, str]:
    """Columns of the table, each with the column of a change that fills it."""
    return {f'"{name}"': f'change."{name}"' for name in names}


# ---- positions ----


def position(source: Source, folder: str) -> tuple[str, int]:
    """Journal and sequence of the last change that a table has. Raises LookupError if it has none of this journal."""
    with Client(source.server) as client:
        journal = journal_of(client, source.topic)
    sequence = DeltaTable(folder).transaction_version(journal)
    if sequence is None:
        raise LookupError(
            f"{folder} is the table of another journal than {journal}, that of topic {source.topic} of "
            f"{source.server}: the topic was made again, or the server was restored. Begin a new table"
        )
    return journal, sequence


def journal_of(client: Client, topic: str) -> str:
    """The name of a topic's journal in a table [1]."""
    epoch = client.plan_changes(topic, start="latest").start.rpartition(".")[0]
    return f"{epoch} since {client.describe_topic(topic).create_time.isoformat()}"


def bookmark(journal: str, sequence: int) -> str:
    """The position in the journal as the server knows it."""
    return f"{journal.partition(' ')[0]}.{sequence}"


def at(journal: str, sequence: int) -> CommitProperties:
    """The properties of a commit with all changes up to a sequence [1]."""
    told = {"bookmark": bookmark(journal, sequence)}
    return CommitProperties(app_transactions=[Transaction(journal, sequence)], custom_metadata=told)


# ---- whole tables ----


def begin(spark: SparkSession, source: Source, folder: str, prepare: Prepare = lambda records: records) -> None:
    """Makes a table of a snapshot, unless it is there. `prepare` makes its rows.

    Executors write the files, and the driver commits their names with the position of the snapshot. A run that is cut
    off before that leaves files that belong to no table, and so does one that another driver has overtaken [2].
    """
    with Client(source.server) as client:
        empty = not DeltaTable.is_deltatable(folder) or not DeltaTable(folder).version()
        if not empty:
            return
        journal = journal_of(client, source.topic)
        export = client.open_export(source.topic)
        try:
            assert export.bookmark is not None, "the topic has a journal"
            client.pin_journal(source.topic, source.pin, export.bookmark, idle_ttl=PIN_LEASE)
            reader = spark.read.format("sow").schema(f"{source.columns}, _key STRING, _sequence LONG")
            reader = reader.option("server", source.server).option("topic", source.topic).option("export", export.id)
            rows = prepare(reader.load())
            part = f"snapshot-{secrets.token_hex(4)}"
            rows.write.option("compression", "zstd").parquet(f"{folder}/{part}")
        finally:
            client.close_export(export.id)
    schema = spark.createDataFrame([], rows.schema).toArrow().schema
    table = DeltaTable.create(folder, schema, mode="ignore")
    if table.version():
        return  # Another driver has begun it, and may have merged changes after this snapshot.
    now = time.time_ns() // 1_000_000
    files = sorted(Path(folder, part).glob("*.parquet"))
    added: list[AddAction | RemoveAction] = [
        # delta-rs counts the rows of a table by these statistics alone, and a file without them as empty.
        AddAction(
            f"{part}/{file.name}",
            file.stat().st_size,
            {},
            now,
            True,
            json.dumps({"numRecords": pq.read_metadata(file).num_rows}),
        )
        for file in files
    ]
    sequence = int(export.bookmark.rpartition(".")[2])
    # If another driver commits right now, this one fails: both tell a position of the same journal.
    table.create_write_transaction(added, "overwrite", schema, commit_properties=at(journal, sequence))


def frame(spark: SparkSession, folder: str) -> DataFrame:
    """The rows of a table at its present version. Executors read its files.

    Raises ValueError for a table that consists of more than files, such as one with deletion vectors. delta-rs makes
    none of these; Delta's own connector for Spark reads them.
    """
    table = DeltaTable(folder)
    if needs := table.protocol().reader_features:
        raise ValueError(f"{folder} needs {', '.join(needs)}")
    schema = StructType.fromJson(json.loads(table.schema().to_json()))  # Delta's notation is that of Spark
    files = table.file_uris()
    return spark.read.schema(schema).parquet(*files) if files else spark.createDataFrame([], schema)
