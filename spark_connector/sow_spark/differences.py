"""`diff`: a table of a lake compared with a topic, at one instant.

Guarantees:

    [1]  The topic is read by one export, so its rows are of one cut (rule Q6). Each key of the table or of the export
         is compared once.
    [2]  With a position of the table, only keys are compared that have not changed between the position and the cut.
         Both sides of such a key are of the same instant, so a difference is one.
    [3]  A record that was due when the cut was taken is in no export, but the table may be waiting for its expiry. It
         is no difference until `expiry_lag` has passed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Final, Self

from pyspark.sql import Column, DataFrame, functions
from pyspark.sql.types import ArrayType, DataType, MapType, StringType, StructField, StructType, VariantType

from sow.durations import DurationError, parse_micros
from sow_client import Client, Export, PackedRecords
from sow_spark.connection import connect, kept, retried
from sow_spark.errors import SowSourceError, option_error, translated
from sow_spark.option_parsing import parse_reading
from sow_spark.options import Connecting, Reading
from sow_spark.schemas import METADATA_COLUMNS, unsupported

CHANGES_MAX: Final = 1_000_000
"""The most changes between the position of a table and the cut: the driver holds their keys."""
_DECIDED: Final = frozenset(
    name.lower()
    for name in (
        *("topic", "path", "topics", "topicPattern", "export", "snapshot", "pushFilters", "columns", "metadata"),
        *("inferRecords", "jsonSchema", "newFields", "startingFrom", "failOnDataLoss", "pinName", "pinLease"),
        *("maxRecordsPerTrigger", "maxBytesPerTrigger"),
    )
)
"""Options that make no sense in a comparison. With metadata=false every row would be a difference."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Differences:
    """The rows in which a table and a topic differ. They can be read until `close`, or the end of a `with` block."""

    rows: DataFrame
    """A row for each difference: the columns of the key; `difference`, which is `missing` (the table lacks the record),
    `extra` (the topic lacks it), `different`, or `repeated` (the table has several rows with this key); `columns`, the
    names of the columns that differ; `lake` and `topic`, structs of the compared columns on both sides."""
    as_of: datetime
    """The instant of the cut, by which expiry is judged."""
    bookmark: str | None
    """The position of the cut in the journal."""
    unsettled: int
    """The number of keys that are not compared, because they changed between the position and the cut."""
    connecting: Connecting
    export: str

    def counts(self) -> dict[str, int]:
        """The number of rows of each kind of difference. Empty: there is no difference."""
        return {row["difference"]: row["count"] for row in self.rows.groupBy("difference").count().collect()}

    def close(self) -> None:
        """Releases the cut. Without this it ends with its lease."""
        with translated("closing a comparison"), connect(self.connecting) as client:
            client.close_export(self.export)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def diff(
    lake: DataFrame,
    topic: str,
    *,
    options: Mapping[str, str] | None = None,
    on: Sequence[str] = ("_key",),
    columns: Sequence[str] | None = None,
    position: str | None = None,
    expiry_lag: str = "1m",
) -> Differences:
    """Compares a table with a topic.

    `options` are those of reading, such as `server`; with `filter` only matching records of the topic count. `on` names
    the columns of the key, as in a join: `_key`, or fields that make the key. `columns` are compared, exactly; without
    them, all of the table that are no metadata. Name `_version` or `_expire_time` to compare them, too.

    `position` is the bookmark up to which the table has the topic's changes. With it the comparison is exact, also
    while records change: keys that have changed since are left out, and counted. Without it, a record that changed
    since the table was written shows as a difference. It needs `_key` in the table, and the permission `consume`.

    Raises SowSourceError, also for more than a million changes since `position`: bring the table up to date first.
    """
    given = dict(options or {})
    for name in given:
        if name.lower().removeprefix("read.") in _DECIDED:
            raise option_error(
                name, "diff decides about it: give only options of connecting and of decoding, and filter"
            )
    reading = parse_reading({**given, "topic": topic}, "snapshot")
    lag = _lag(expiry_lag)
    schema = _compared(lake, on, columns)
    if position is not None and "_key" not in lake.columns:
        raise SowSourceError("SCHEMA_UNSUPPORTED", "a comparison with a position needs the column _key in the table")
    with translated(f"comparing with topic {topic}"), connect(reading.connecting) as client:
        export = _export(client, reading)
        try:
            reading = replace(reading, connecting=kept(reading.connecting, client, topic))
            moved = sorted(_moved(client, reading, position, export)) if position is not None else []
            return _compare(lake, reading, given, list(on), schema, moved, lag, export)
        except BaseException:
            client.close_export(export.id)
            raise


def _compare(
    lake: DataFrame,
    reading: Reading,
    given: Mapping[str, str],
    on: list[str],
    schema: StructType,
    moved: list[str],
    lag: timedelta,
    export: Export,
) -> Differences:
    """The differences from an open export, without the keys that have moved."""
    spark = lake.sparkSession
    source = spark.read.format("sow").schema(_read_schema(lake, on, schema))
    for name, value in given.items():
        if name.lower().removeprefix("read.") not in ("filter", "parameters", "partitions", "lease", "server"):
            source = source.option(name, value)
    source = source.option("server", reading.connecting.server).option("export", export.id)
    held = source.load(reading.topic)
    if moved:
        keys = spark.createDataFrame([(key,) for key in moved], StructType([StructField("_key", StringType())]))
        lake, held = (side.join(keys, "_key", "left_anti") for side in (lake, held))
    return Differences(
        rows=_differing(lake, held, on, schema.names, export.as_of, lag),
        as_of=export.as_of,
        bookmark=export.bookmark,
        unsettled=len(moved),
        connecting=reading.connecting,
        export=export.id,
    )


def _differing(
    lake: DataFrame, held: DataFrame, on: list[str], columns: list[str], as_of: datetime, lag: timedelta
) -> DataFrame:
    """The rows of `Differences.rows`."""
    # The keys get names of our own: a column of the table may have any of the names below.
    lake_keys, topic_keys = ([f"{side}_{at}" for at in range(len(on))] for side in ("lake", "topic"))
    values = functions.struct(*map(_named, columns)) if columns else functions.lit(None)
    expires = functions.col("_expire_time") if "_expire_time" in lake.columns else functions.lit(None)
    # Counted by an aggregate and not by a window, whose memory grows with the rows of a key.
    left = lake.groupBy(*[_named(name).alias(key) for name, key in zip(on, lake_keys, strict=True)]).agg(
        functions.count(functions.lit(1)).alias("copies"),
        functions.first(values).alias("lake"),
        functions.first(expires.cast("timestamp")).alias("expires"),
    )
    right = held.select(
        *[_named(name).alias(key) for name, key in zip(on, topic_keys, strict=True)],
        functions.lit(1).alias("held"),
        values.alias("topic"),
    )
    # Null equals null: a field of the key may be missing on both sides.
    same = [
        functions.col(one).eqNullSafe(functions.col(other)) for one, other in zip(lake_keys, topic_keys, strict=True)
    ]
    joined = left.join(right, same, "full_outer")
    both = [(name, functions.col("lake").getField(name), functions.col("topic").getField(name)) for name in columns]
    unequal = [functions.when(~one.eqNullSafe(other), functions.lit(name)) for name, one, other in both]
    names = functions.array_compact(functions.array(*unequal)) if unequal else functions.array().cast("array<string>")
    in_lake, in_topic = functions.col("copies").isNotNull(), functions.col("held").isNotNull()
    overdue = (functions.col("expires") <= _moment(as_of)) & (functions.col("expires") > _moment(as_of - lag))
    kind = (
        functions.when(~in_lake, "missing")
        .when(~in_topic & overdue, None)  # [3]
        .when(~in_topic, "extra")
        .when(functions.col("copies") > 1, "repeated")
        .when(functions.size("columns") > 0, "different")
    )
    return (
        joined.withColumn("columns", functions.when(in_lake & in_topic, names))
        .withColumn("difference", kind)
        .where("difference IS NOT NULL")
        .select(
            *[
                functions.when(in_lake, functions.col(one)).otherwise(functions.col(other)).alias(name)
                for name, one, other in zip(on, lake_keys, topic_keys, strict=True)
            ],
            *("difference", "columns", "lake", "topic"),
        )
    )


def _named(column: str) -> Column:
    """A column by its name, whatever characters it has."""
    return functions.col("`" + column.replace("`", "``") + "`")


def _moment(at: datetime) -> Column:
    """An instant, whatever the zone of the session."""
    return functions.timestamp_micros(functions.lit((at - _EPOCH) // timedelta(microseconds=1)))


def _export(client: Client, reading: Reading) -> Export:
    lease = f"{reading.lease_micros}us" if reading.lease_micros else None
    return retried(
        reading.connecting,
        lambda: client.open_export(
            reading.topic, reading.filter or None, reading.parameters, parts=reading.partitions, lease=lease
        ),
        full=True,
    )


def _moved(client: Client, reading: Reading, position: str, export: Export) -> set[str]:
    """The keys that changed after a position, up to the cut [2]."""
    if export.bookmark is None:
        raise SowSourceError("NO_JOURNAL", f"topic {reading.topic} has no journal, so a position in it says nothing")
    plan = retried(reading.connecting, lambda: client.plan_changes(reading.topic, start=position, end=export.bookmark))
    if plan.entries > CHANGES_MAX:
        raise SowSourceError(
            "OPTION_INVALID",
            f"{plan.entries:,} changes lie between the position of the table and now",
            f"bring the table up to date first; up to {CHANGES_MAX:,} are left out one by one",
        )
    if not plan.entries:
        return set()
    found: set[str] = set()
    for packed in client.read_changes(reading.topic, plan.start, plan.end, columns=("key",)):
        found.update(_keys(packed))
    return found


def _keys(packed: PackedRecords) -> Iterator[str]:
    offsets = memoryview(packed.key_offsets).cast("i")
    for row in range(packed.count):
        yield packed.keys[offsets[row] : offsets[row + 1]].decode()


def _compared(lake: DataFrame, on: Sequence[str], columns: Sequence[str] | None) -> StructType:
    """The columns to compare."""
    fields = {field.name: field for field in lake.schema.fields}
    for name in (*on, *(columns or ())):
        if name not in fields:
            raise SowSourceError("SCHEMA_UNSUPPORTED", f"column {name} is not in the table")
    if not on:
        raise SowSourceError("SCHEMA_UNSUPPORTED", "a comparison needs at least one column of the key")
    if columns is None:
        columns = [name for name in fields if name not in METADATA_COLUMNS and name not in on]
    chosen = [fields[name] for name in columns if name not in on]
    for field in chosen:
        if _has_unequal(field.dataType):
            raise unsupported(
                field.name, "has a map or a variant, which Spark does not compare", "leave it out of `columns`"
            )
    return StructType(chosen)


def _read_schema(lake: DataFrame, on: Sequence[str], compared: StructType) -> StructType:
    """The columns to read of the topic: nullable, so that a record without one is a difference and no error."""
    names = {*on, *compared.names}
    fields = [StructField(field.name, field.dataType) for field in lake.schema.fields if field.name in names]
    if "_key" not in names:
        fields.append(StructField("_key", StringType()))
    return StructType(fields)


def _has_unequal(kind: DataType) -> bool:
    """True if there is a type in it that Spark does not compare."""
    if isinstance(kind, StructType):
        return any(_has_unequal(field.dataType) for field in kind.fields)
    return isinstance(kind, MapType | VariantType) or (isinstance(kind, ArrayType) and _has_unequal(kind.elementType))


def _lag(text: str) -> timedelta:
    try:
        return timedelta(microseconds=parse_micros(text))
    except DurationError as error:
        raise option_error("expiry_lag", str(error)) from None
