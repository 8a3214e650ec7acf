"""The state of the world on Spark: the last value of each key of a stream, with its lifetime, in Spark's state store.
For topics whose writes outgrow one server.

    [1]  The rules are those of a server, with the time of the micro-batch as the clock (docs/scale.md has the
         differences). Two engines hold to one table of cases: `jvm`, one class of Java, and `python`.
    [2]  After a restart Spark runs no batch until rows come, so overdue records would wait. Rows of a `rate` source
         that are all left out make it run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime
from functools import reduce
from importlib.resources import as_file, files
from operator import and_
from typing import Any, Final, Literal

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  # as everybody does
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
)

from sow.durations import DurationError, parse_micros
from sow_spark.errors import option_error
from sow_spark.state_fold import KEY_BYTES_MAX, PAYLOAD_BYTES_MAX, TTL_MAX_MICROS, Expiration, Settings

Engine = Literal["jvm", "python"]
MARKS: Final = {
    "_op": "STRING",
    "_key": "STRING",
    "_ttl": "STRING",
    "_expire_time": "TIMESTAMP",
    "_ttl_mode": "STRING",
    "_only_if": "STRING",
    "_only_if_version": "BIGINT",
}
"""The columns of a row that are no fields of its document."""
CHANGE: Final = (
    "_op STRING, _key STRING, payload BINARY, _version BIGINT, _publish_time BIGINT, _expire_time BIGINT, "
    "_reason STRING, _message STRING, _batch BIGINT, _now BIGINT"
)
TOLD: Final = ("_topic", "_version", "_publish_time", "_reason", "_message", "_batch", "_now")
"""The columns of the result that no document may have, beside those."""
JAR: Final = "sow-state.jar"
AS_JSON: Final = {
    "timeZone": "UTC",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}
"""Columns as JSON: by default Spark drops microseconds, and a time as a key would change with the session's zone."""

STEPS_MAX: Final = 32
_STEP: Final = re.compile(r"/(?:\[((?:[^\]\\]|\\.)*)\]|([^/\[][^/]*))(?=/|\Z)", re.DOTALL)
_PATH: Final = re.compile(f"(?:{_STEP.pattern})+", re.DOTALL)
_ESCAPED: Final = re.compile(r"\\([\]\\/])")
_ORDERED: Final = (ByteType, ShortType, IntegerType, LongType, TimestampType, DateType)


def state_of_the_world(
    stream: DataFrame,
    *,
    topic: str = "",
    key: str | Sequence[str] = (),
    order: str | Sequence[str],
    expiration: str = "enabled",
    min_ttl: str | None = None,
    max_ttl: str | None = None,
    late: Literal["apply", "drop"] = "apply",
    tombstones: str | None = None,
    engine: Engine | None = None,
) -> DataFrame:
    """The changes of the last value of each key (rules K, P1 to P4, P8, L1 to L10), as a stream.

    A row of `stream` has a document, as its columns or as one column `payload` (text or bytes of JSON), and any of the
    columns `_op` (`put`, the default, `delta`, `touch`, `delete`), `_key`, `_ttl` (a duration, `never`, or whole
    seconds) or `_expire_time`, `_ttl_mode` (RESET, KEEP, EXTEND), `_only_if` (absent, present), `_only_if_version`.

    `key` has the paths of the key fields; without it each row has `_key`. `order` has columns of whole numbers or
    times: the rows of a key in a micro-batch are applied by them, as Spark's shuffle keeps no order. With
    `late="drop"` a row that is before the last row of its key is refused (STALE), also for `tombstones` (a day) after
    the record has gone.
    `expiration`, `min_ttl` and `max_ttl` are those of a topic. `engine`: `jvm`, where the package has its jar and the
    session is not one of Spark Connect, or `python`, which takes some twenty times the CPU.

    A row of the result has `_op` (`put`; `delete` and `expire`, both with the old record; `refused`, with `_reason` and
    `_message`), `_key`, the document as it came in, `_version`, `_publish_time`, `_expire_time`, `_batch`, and `_now`,
    the time of the batch. A record falls due before its `expire` comes: `alive` leaves such rows out.

    Raises SowSourceError (OPTION_INVALID) for a setting that is wrong or without effect.
    """
    if not stream.isStreaming:
        raise option_error("stream", "it is no stream, so no record would expire; read it with readStream")
    paths = [parse_path(path) for path in _texts(key)]
    _check_apart(paths)
    settings = _settings(expiration, min_ttl, max_ttl, late, tombstones)
    connected = is_connected(stream.sparkSession)
    engine = engine or default_engine(connected)
    _check_engine(engine, connected)
    documents = [name for name in stream.columns if name not in MARKS]
    _check_names(documents)
    document = None if "payload" in documents else StructType([stream.schema[name] for name in documents])
    told = {
        "topic": topic,
        "key": paths,
        "engine": engine,
        "late": late,
        "order": _texts(order),
        "document": None if document is None else document.toDDL().replace(" NOT NULL", ""),
        "fields": [] if document is None else document.names,
        "payload": "" if document is not None else stream.schema["payload"].dataType.simpleString(),
        **settings._asdict(),
    }
    rows = _rows(stream, documents, _texts(order), paths)
    rows = rows.unionByName(_beats(rows))  # [2]
    changes = (_in_java if engine == "jvm" else _in_python)(rows, told)
    return changes.select(
        F.col("_op").alias("_op", metadata={"sow_state": json.dumps(told)}),
        *([F.lit(topic).alias("_topic")] if topic else []),
        "_key",
        *document_columns(F.col("payload"), told),
        "_version",
        F.timestamp_micros("_publish_time").alias("_publish_time"),
        F.timestamp_micros("_expire_time").alias("_expire_time"),
        "_reason",
        "_message",
        "_batch",
        F.timestamp_micros("_now").alias("_now"),
    )


def alive(frame: DataFrame, at: datetime | None = None) -> DataFrame:
    """The rows whose record has not expired at an instant, by default when an action runs (rule L8)."""
    instant = F.current_timestamp() if at is None else F.lit(at)
    return frame.where(F.col("_expire_time").isNull() | (F.col("_expire_time") > instant))


def document_columns(payload: Any, told: dict[str, Any]) -> list[Any]:
    """A stored document in the columns in which it came."""
    if told["document"] is None:
        return [payload.cast(told["payload"]).alias("payload")]
    parsed = F.from_json(payload.cast("string"), told["document"], AS_JSON)
    return [parsed[name].alias(name) for name in told["fields"]]


def is_connected(spark: Any) -> bool:
    """True for a session of Spark Connect: its JVM is another program's."""
    return not hasattr(spark, "_jsparkSession")


def default_engine(connected: bool = False) -> Engine:
    """`jvm`, where the package has its jar and this process has the JVM."""
    return "jvm" if not connected and files("sow_spark").joinpath(JAR).is_file() else "python"


# ---- settings ----


def _check_engine(engine: str, connected: bool) -> None:
    if engine not in ("jvm", "python"):
        raise option_error("engine", f"{engine!r} is neither jvm nor python")
    if engine == "jvm" and connected:
        raise option_error("engine", "a client of Spark Connect cannot load jvm, so take python, or spark-submit")
    if engine == "jvm" and default_engine() != "jvm":
        raise option_error("engine", f"this package was built without {JAR}, so only python is here")


def _texts(given: str | Sequence[str]) -> list[str]:
    return [given] if isinstance(given, str) else list(given)


def parse_path(path: str) -> list[str]:
    """The steps of the path of a key field (rule K3). Raises SowSourceError."""
    if not _PATH.fullmatch(path):
        raise option_error("key", f"{path!r} is no path such as /carrier, /a/b or /[odd/name]")
    steps = [_ESCAPED.sub(r"\1", found[1]) if found[1] is not None else found[2] for found in _STEP.finditer(path)]
    if len(steps) > STEPS_MAX:
        raise option_error("key", f"{path!r:.100} has {len(steps)} steps, at most {STEPS_MAX} are taken")
    if any(re.search(r'["\\\x00-\x1f]', step) for step in steps):
        raise option_error("key", f"{path!r}: the name of a key field has no quotes, backslashes or control characters")
    return steps


def _check_apart(paths: list[list[str]]) -> None:
    for at, path in enumerate(paths):
        for other in paths[:at] + paths[at + 1 :]:
            if path == other[: len(path)]:
                raise option_error("key", f"/{'/'.join(path)} holds, or is, another key field")


def _settings(expiration: str, min_ttl: str | None, max_ttl: str | None, late: str, tombstones: str | None) -> Settings:
    kinds: dict[str, Expiration] = {"disabled": "disabled", "enabled": "enabled", "reject": "reject"}
    default = None if expiration in kinds else _micros("expiration", expiration)
    kind = kinds.get(expiration, "enabled")
    if kind != "enabled" and (min_ttl is not None or max_ttl is not None):
        raise option_error("min_ttl" if min_ttl is not None else "max_ttl", f"without effect with expiration = {kind}")
    shortest = None if min_ttl is None else _micros("min_ttl", min_ttl)
    longest = None if max_ttl is None else _micros("max_ttl", max_ttl)
    if shortest is not None and longest is not None and shortest > longest:
        raise option_error("min_ttl", f"{min_ttl} is more than max_ttl, {max_ttl}")
    if late not in ("apply", "drop"):
        raise option_error("late", f"{late!r} is neither apply nor drop")
    if tombstones is not None and late == "apply":
        raise option_error("tombstones", "without effect with late = apply")
    kept = _micros("tombstones", tombstones or "1d") if late == "drop" else None
    return Settings(kind, default, shortest, longest, kept)


def _micros(name: str, text: str) -> int:
    """A lifetime of the settings (rule L18)."""
    try:
        micros = parse_micros(text)
    except DurationError as error:
        raise option_error(name, str(error)) from None
    if micros > TTL_MAX_MICROS:
        raise option_error(name, f"{text} is more than the longest lifetime of ten years")
    return micros


# ---- rows ----


def _check_names(documents: list[str]) -> None:
    for name in documents:
        if name.lower() in MARKS or name.lower() in TOLD:
            raise option_error("stream", f"its column {name} has the name of one of the result, so drop or rename it")


def _beats(rows: DataFrame) -> DataFrame:
    """No rows, but batches [2]."""
    beats = rows.sparkSession.readStream.format("rate").option("rowsPerSecond", 1).load().where("value < 0")
    return beats.select(*[F.lit(None).cast(field.dataType).alias(field.name) for field in rows.schema.fields])


def _rows(stream: DataFrame, documents: list[str], order: list[str], paths: list[list[str]]) -> DataFrame:
    """The rows in the columns of the engines."""
    schema = stream.schema
    if not paths and "_key" not in schema.names:
        raise option_error("key", "the rows have no column _key, so give the paths of the key fields")
    if not order:
        raise option_error("order", "give a column: the rows of a micro-batch have no order of their own")
    for name in order:
        if name not in schema.names:
            raise option_error("order", f"there is no column {name!r}")
        if not isinstance(schema[name].dataType, _ORDERED):
            raise option_error(
                "order", f"{name} is {schema[name].dataType.simpleString()}, no whole number and no time"
            )
    if "payload" in documents:
        if not isinstance(schema["payload"].dataType, StringType | BinaryType):
            raise option_error("payload", f"it is {schema['payload'].dataType.simpleString()}, not text or bytes")
        payload = F.col("payload").cast("binary")
    elif documents:
        payload = F.to_json(F.struct(*map(_quoted, documents)), AS_JSON).cast("binary")
        if paths and "_key" in schema.names:  # a touch or delete that has only `_key`
            no_fields = [_quoted(path[0]).isNull() for path in paths if path[0] in documents]
            by_key = reduce(and_, no_fields, F.expr("_op IN ('touch', 'delete') AND _key IS NOT NULL"))
            payload = F.when(by_key, F.lit(None)).otherwise(payload) if "_op" in schema.names else payload
    else:
        payload = F.lit(None).cast("binary")
    return stream.select(
        F.coalesce(_mark(schema, "_op"), F.lit("put")).alias("op"),
        payload.alias("payload"),
        _mark(schema, "_key").alias("key"),
        _mark(schema, "_ttl").alias("ttl"),
        F.unix_micros(_mark(schema, "_expire_time")).alias("expire_time"),
        _mark(schema, "_ttl_mode").alias("ttl_mode"),
        _mark(schema, "_only_if").alias("only_if"),
        _mark(schema, "_only_if_version").alias("only_if_version"),
        F.array(*[_number(name, schema[name].dataType) for name in order]).alias("ord"),
        _plain_key(schema, documents, paths, payload).alias("plain_key"),
    )


def _plain_key(schema: StructType, documents: list[str], paths: list[list[str]], payload: Any) -> Any:
    """The key of a row whose key fields are columns of texts, whole numbers or booleans; null where the engine has to
    read the document."""
    names = [path[0] for path in paths if len(path) == 1 and path[0] in documents]
    if not paths or "payload" in documents or len(names) < len(paths):
        return F.lit(None).cast("string")
    parts: list[Any] = []
    for name in names:
        column, kind = _quoted(name), schema[name].dataType
        if isinstance(kind, StringType):
            column = F.replace(F.replace(column, F.lit("\\"), F.lit("\\\\")), F.lit("|"), F.lit("\\|"))
        elif not isinstance(kind, ByteType | ShortType | IntegerType | LongType | BooleanType):
            return F.lit(None).cast("string")
        parts += [F.lit("|"), column.cast("string")]
    key = F.concat(*parts[1:])
    fits = F.octet_length(key).between(1, KEY_BYTES_MAX) & (F.octet_length(payload) <= PAYLOAD_BYTES_MAX)
    return F.when(fits, key)


def _quoted(name: str) -> Any:
    return F.col(f"`{name.replace('`', '``')}`")


def _mark(schema: StructType, name: str) -> Any:
    wanted = MARKS[name]
    if name not in schema.names:
        return F.lit(None).cast(wanted)
    kind = schema[name].dataType.simpleString()
    if name == "_ttl" and kind in ("tinyint", "smallint", "int", "bigint"):
        return F.concat(F.col(name).cast("string"), F.lit("s"))
    if kind != wanted.lower() and not (wanted == "BIGINT" and kind in ("tinyint", "smallint", "int")):
        raise option_error(name, f"the column is {kind}, not {wanted.lower()}")
    return F.col(name).cast(wanted)


def _number(name: str, kind: DataType) -> Any:
    column = _quoted(name)
    if isinstance(kind, TimestampType):
        return F.unix_micros(column)
    return F.unix_date(column).cast("bigint") if isinstance(kind, DateType) else column.cast("bigint")


# ---- engines ----


def _in_java(rows: DataFrame, told: dict[str, Any]) -> DataFrame:
    spark = rows.sparkSession
    java = spark._jsparkSession
    with as_file(files("sow_spark") / JAR) as jar:
        java.sessionState().resourceLoader().addJar(str(jar))
    loader = java.sharedState().jarClassLoader()
    operator = loader.loadClass("sow.spark.StateOfTheWorld").newInstance()
    return DataFrame(operator.apply(rows._jdf, json.dumps(told)), spark)


def _in_python(rows: DataFrame, told: dict[str, Any]) -> DataFrame:
    from sow_spark.state_python import Processor, key_or_none  # for this engine alone

    paths = told["key"]
    group = F.udf(lambda payload, key: key_or_none(payload, key, paths), "string")
    settings = Settings(**{name: told[name] for name in Settings._fields})
    keyed = rows.drop("plain_key").withColumn("group", group("payload", "key"))  # a call in any case
    return keyed.groupBy("group").transformWithState(Processor(settings, paths), CHANGE, "append", "processingTime")
