"""Queries that keep a state of the world: how they start and stop, and what their checkpoint holds.

[1]  A checkpoint belongs to one topic, key, engine and treatment of late rows, which a note in it tells. Other
     settings may change at a restart, and count for later rows (rule L12). Expiration is disabled from the first run,
     or never: records have no timers then, and nothing could find those that are overdue.
[2]  A query that is stopped inside a batch repeats that batch when it starts again, and cannot be repartitioned.
[3]  Spark itself lists and reads the files of a checkpoint, so all but `repartition_state` works over Spark Connect.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Final

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  # as everybody does
from pyspark.sql.streaming.query import StreamingQuery

from sow.durations import DurationError, parse_micros
from sow_spark.errors import SowSourceError, option_error
from sow_spark.state import alive, document_columns, is_connected

_log: Final = logging.getLogger("sow_spark")
CLOCK_BACK_SECONDS: Final = 1.0
NOTES: Final = "sow-state"
"""The folder of a checkpoint with its notes, each a file of one line. Files are only added, and the highest `number`
counts, so a crash leaves the old note or the new one."""
OLD_NOTE: Final = "sow-state.json"
"""The note of a form that was never released."""
FIXED: Final = ("topic", "key", "engine", "late")
"""The settings that a checkpoint cannot change [1]."""
_TOLD: Final = frozenset({*FIXED, "order", "document", "payload", "expiration", "number"})
"""The settings of a note that are read."""
_UNREADABLE: Final = re.compile(r"""[\s\x00-\x1f\x7f-\x9f"#%*<>?\[\]\\^`{|}]""")
"""Characters of a path that Spark's reader of states escapes, and then finds no batch, or takes as a pattern."""
_ROOT: Final = "sow.state.{id}.checkpoint"
"""The setting of a session with the checkpoint of a query, which Spark Connect tells nowhere."""
_STORE: Final = "spark.sql.streaming.stateStore."
SETTINGS: Final = {
    f"{_STORE}providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    f"{_STORE}rocksdb.changelogCheckpointing.enabled": "true",
    f"{_STORE}encodingFormat": "unsaferow",  # Avro took a fifth of the CPU; a column is left for later releases
    f"{_STORE}rocksdb.trackTotalNumberOfRows": "false",  # else each write reads its key first
}
"""Settings of Spark that a query has from its first run."""
PARQUET_TIMES: Final = ("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
"""For a function that writes Parquet, unless the session sets a form: Spark's default, 96 bits, has no statistics, and
others misread it far from today."""


def start_state(
    changes: DataFrame,
    sink: Mapping[str, str] | Callable[[DataFrame, int], None],
    *,
    checkpoint: str,
    trigger: str = "2s",
    name: str | None = None,
) -> StreamingQuery:
    """Starts a query that writes the changes of `state_of_the_world`.

    `sink` has the options of `format("sow")`, where each change takes effect once, or is a function of `foreachBatch`,
    which may see a batch again after a crash. The function reads each batch whole, as that makes Spark compute the
    state: else the query fails, or, with a Spark that does not look, loses changes.
    `trigger` is the time between two batches; expiries are late by at most it, and a batch without rows costs about a
    second of CPU.

    Raises SowSourceError: OPTION_INVALID, also for a checkpoint of another state [1].
    """
    spark = changes.sparkSession
    told = _told(changes)
    millis = _micros("trigger", trigger) // 1_000
    _check_note(spark, checkpoint, told)
    _check_clock(spark, checkpoint)
    if callable(sink):
        writer = changes.writeStream.foreachBatch(_numbered(sink))
    else:
        # A row that was refused is no change, and these columns would be fields of the documents.
        rows = changes.where("_op <> 'refused'").drop("_message", "_batch", "_now")
        # A record without an expire time has none in the topic either, whatever the topic's default is.
        writer = rows.writeStream.format("sow").options(expireTimeColumn="_expire_time", ttl="never").options(**sink)
    writer = writer.option("checkpointLocation", checkpoint).trigger(processingTime=f"{millis} milliseconds")
    if name is not None:
        writer = writer.queryName(name)
    with _settings(spark):
        query = writer.start()
    if is_connected(spark):
        spark.conf.set(_ROOT.format(id=query.id), checkpoint)
    return query


def _numbered(sink: Callable[[DataFrame, int], None]) -> Callable[[DataFrame, int], None]:
    """The same, with its number in `_batch`, which a batch's tasks do not see over Spark Connect. A program may have
    dropped the column."""

    def called(batch: DataFrame, number: int) -> None:
        told = "_batch" in batch.columns
        sink(batch.withColumn("_batch", F.lit(number).cast("bigint")) if told else batch, number)

    return called


def stop_state(query: StreamingQuery, timeout: str = "1m") -> int:
    """Stops a query after the batch that runs [2]; returns the number of its last batch, or -1.

    Raises SowSourceError: OPTION_INVALID for a query over Spark Connect that its session has not started by
    `start_state`; NOT_STOPPED if the batch takes longer than `timeout`, or if over Spark Connect, where no query can be
    told to end, there is no pause between two batches; BATCH_OPEN if a batch was cut off, which the next start repeats:
    nothing is lost.
    """
    until = time.monotonic() + _micros("timeout", timeout) / 1e6
    spark = SparkSession.active()
    root = _root(spark, query)
    told = is_connected(spark)
    pauses = 0
    while _runs(spark, query) and pauses < 3:  # it may sleep for long before its next trigger
        pauses = 0 if query.status["isTriggerActive"] else pauses + 1
        if not told and _is_executing(spark, query, root):
            # Spark's own `stop` sets this, too, and then interrupts the batch. A query reads it before each batch, and
            # in the planning of one, where it cuts the batch off.
            state = query._jsq.streamingQuery().state()
            package = state.get().getClass().getPackageName()  # another one before 4.2
            state.set(getattr(getattr(spark._jvm, f"{package}.TERMINATED$"), "MODULE$"))
            told = True
        if time.monotonic() > until:
            raise SowSourceError(
                "NOT_STOPPED", f"a batch takes longer than {timeout}", "call it again, with a longer timeout"
            )
        time.sleep(0.005)
    query.stop()
    planned, committed = _last(spark, f"{root}/offsets"), _last(spark, f"{root}/commits")
    if planned != committed:
        raise SowSourceError(
            "BATCH_OPEN", f"batch {planned} was cut off, and {committed} is the last whole one",
            "start the query again, and stop it again; nothing is lost",
        )  # fmt: skip
    return committed


def read_state(
    spark: SparkSession, checkpoint: str, *, batch: int | None = None, at: datetime | None = None
) -> DataFrame:
    """The records of a state that have not expired at an instant, by default when an action runs (rule L8).

    All of them are of one batch, by default the last one; also while the query runs. Columns: `_key`, the document,
    `_version`, `_publish_time`, `_expire_time`. Raises SowSourceError (OPTION_INVALID) for a folder that is no
    checkpoint of a state.
    """
    told, _ = _read_note(spark, checkpoint)
    if told is None and OLD_NOTE in _names(spark, checkpoint):
        raise _of_another_release(f"{checkpoint}/{OLD_NOTE}")
    if told is None:
        raise option_error("checkpoint", f"{checkpoint} has no state of the world")
    if batch is None and _last(spark, f"{checkpoint}/commits") < 0:  # it has just been started
        document = told["document"] or (f"payload {told['payload']}" if told["payload"] else "")
        columns = ["_key STRING", document, "_version BIGINT, _publish_time TIMESTAMP, _expire_time TIMESTAMP"]
        return spark.createDataFrame([], ", ".join(filter(None, columns)))
    reader = spark.read.format("statestore").option("stateVarName", "record")
    if batch is not None:
        reader = reader.option("batchId", batch)
    state = reader.load(checkpoint).where("value.payload IS NOT NULL")
    rows = state.select(
        F.col(f"key.{state.schema['key'].dataType.names[0]}").alias("_key"),  # type: ignore[attr-defined]  # a struct
        *document_columns(F.col("value.payload"), told),
        F.col("value.version").alias("_version"),
        F.timestamp_micros("value.publish_time").alias("_publish_time"),
        F.timestamp_micros("value.expire_time").alias("_expire_time"),
    )
    return rows if told["expiration"] == "disabled" else alive(rows, at)


def repartition_state(spark: SparkSession, checkpoint: str, partitions: int) -> None:
    """Spreads the state of a stopped query over another number of partitions. Needs Spark 4.2 or later.

    Raises SowSourceError: BATCH_OPEN if the query was stopped inside a batch [2]; UNIMPLEMENTED over Spark Connect.
    """
    if is_connected(spark):
        raise SowSourceError(
            "UNIMPLEMENTED", "Spark Connect has no call for it", "run repartition_state by spark-submit"
        )
    if not hasattr(spark, "_streamingCheckpointManager"):
        raise SowSourceError("UNIMPLEMENTED", "Spark repartitions states from version 4.2 on")
    planned, committed = _last(spark, f"{checkpoint}/offsets"), _last(spark, f"{checkpoint}/commits")
    if planned != committed:
        raise SowSourceError(
            "BATCH_OPEN", f"batch {planned} was cut off", "start the query again, and stop it by stop_state"
        )
    with _settings(spark):
        spark._streamingCheckpointManager.repartition(checkpoint, partitions, False)


def _is_executing(spark: SparkSession, query: StreamingQuery, root: str) -> bool:
    """True if a batch is past its planning: its offsets are in the log, and a job of it runs."""
    if _last(spark, f"{root}/offsets") <= _last(spark, f"{root}/commits"):  # this takes its time, so it is the first
        return False
    tracker = spark.sparkContext.statusTracker()
    job = max(tracker.getJobIdsForGroup(str(query.runId)), default=None)
    info = None if job is None else tracker.getJobInfo(job)
    return info is not None and info.status == "RUNNING"


def _micros(name: str, text: str) -> int:
    try:
        return parse_micros(text)
    except DurationError as error:
        raise option_error(name, str(error)) from None


@contextmanager
def _settings(spark: SparkSession) -> Iterator[None]:
    """Spark copies the settings of its session when a query starts."""
    times, micros = PARQUET_TIMES
    before = {name: spark.conf.get(name, None) for name in (*SETTINGS, times)}
    for name, value in (SETTINGS | {times: before[times] or micros}).items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, old)


# ---- the note ----


def _told(changes: DataFrame) -> dict[str, Any]:
    """The settings of the operator, which its column `_op` carries through what a program does with the frame."""
    field = next((field for field in changes.schema.fields if field.name == "_op"), None)
    text = None if field is None else field.metadata.get("sow_state")
    if text is None:
        raise option_error("changes", "it has no column _op of state_of_the_world")
    told: dict[str, Any] = json.loads(text)
    return told


def _check_note(spark: SparkSession, checkpoint: str, told: dict[str, Any]) -> None:
    if _UNREADABLE.search(checkpoint):
        raise option_error("checkpoint", f"Spark cannot read a state in {checkpoint!r}: avoid spaces, #, % and *")
    noted, number = _read_note(spark, checkpoint)
    begun = _last(spark, f"{checkpoint}/offsets") >= 0
    if noted is None and begun and OLD_NOTE in _names(spark, checkpoint):
        raise _of_another_release(f"{checkpoint}/{OLD_NOTE}")
    if noted is None and begun:
        raise option_error("checkpoint", f"{checkpoint} is that of another query, and has no state of the world")
    if noted is not None and begun:  # else a query has failed to start, and left nothing but its note
        for name in (*FIXED, *(["order"] if told["late"] == "drop" else [])):
            if noted[name] != told[name]:
                raise option_error(name, f"the state in {checkpoint} has {noted[name]!r}, not {told[name]!r}")
        disabled = [one["expiration"] == "disabled" for one in (noted, told)]
        if disabled[0] != disabled[1]:
            change = "from" if disabled[0] else "to"
            raise option_error("expiration", f"that of the state in {checkpoint} cannot change {change} disabled")
    if noted != told:
        text = json.dumps({**told, "number": number + 1}, sort_keys=True)
        row = spark.range(0, 1, 1, 1).select(F.lit(text).alias("value"))
        row.write.mode("append").text(f"{checkpoint}/{NOTES}")


def _check_clock(spark: SparkSession, checkpoint: str) -> None:
    """Warns of a clock that is before the last batch: until it gets there, records live longer (rule L15)."""
    batch = _last(spark, f"{checkpoint}/offsets")
    rows = spark.read.text(f"{checkpoint}/offsets/{batch}").collect() if batch >= 0 else []
    found = re.search(r'"batchTimestampMs":(\d+)', "".join(row.value for row in rows))
    seconds = 0.0 if found is None else int(found[1]) / 1e3 - time.time()
    if seconds > CLOCK_BACK_SECONDS:
        _log.warning(
            "the clock of this driver is %.0f s before the last batch of %s: records live that much longer",
            seconds,
            checkpoint,
        )


def _runs(spark: SparkSession, query: StreamingQuery) -> bool:
    """True until the last batch of a query has ended."""
    if is_connected(spark):
        return query.isActive
    return bool(query._jsq.streamingQuery().queryExecutionThread().isAlive())  # told to end, it is not active any more


def _read_note(spark: SparkSession, checkpoint: str) -> tuple[dict[str, Any] | None, int]:
    """The last note and its number; None and -1 where there is none."""
    folder = f"{checkpoint}/{NOTES}"
    rows = spark.read.text(folder).collect() if _names(spark, folder) else []
    if not rows:
        return None, -1
    try:
        notes: list[dict[str, Any]] = [json.loads(row.value) for row in rows]
        told = max(notes, key=lambda note: int(note["number"]))
    except (ValueError, KeyError, TypeError):
        raise _of_another_release(folder) from None
    if missing := _TOLD - told.keys():
        raise _of_another_release(folder, f", which lack {', '.join(sorted(missing))}")
    return told, told.pop("number")


def _of_another_release(notes: str, why: str = "") -> SowSourceError:
    return option_error(
        "checkpoint",
        f"another release of sow has written the notes {notes}{why}: go on with that release, or begin a new "
        "checkpoint, which reads its source anew",
    )


def _root(spark: SparkSession, query: StreamingQuery) -> str:
    """The checkpoint of a query."""
    if not is_connected(spark):
        return str(query._jsq.streamingQuery().resolvedCheckpointRoot())  # Spark tells it nowhere else
    root = spark.conf.get(_ROOT.format(id=query.id), None)
    if root is None:
        raise option_error("query", "this session has not started it by start_state, so its checkpoint is not known")
    return root


def _last(spark: SparkSession, folder: str) -> int:
    """The highest number that is the name of a file in a log of Spark; -1 for none."""
    return max((int(name) for name in _names(spark, folder) if name.isdigit()), default=-1)


def _names(spark: SparkSession, folder: str) -> list[str]:
    """The names of the files in a folder. Spark lists them for a plan, and reads none."""
    try:
        # Twice, as Spark logs a stack trace where a single folder is missing.
        found = set(spark.read.format("binaryFile").load([folder, folder]).inputFiles())
    except AnalysisException as error:
        if error.getCondition() != "PATH_NOT_FOUND":
            raise
        return []
    return [file.rpartition("/")[2] for file in found]
