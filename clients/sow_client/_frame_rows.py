"""The rows of frames: those of Arrow, pandas and polars as documents with their keys and lifetimes.

[1]  A NaN or an infinity is never published, and never becomes null without being asked to.
[2]  All rows of a frame are checked before the first one is given out: none is sent where one cannot be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

from sow_client._documents import not_finite
from sow_client._frames import MetadataName, all_floats, library
from sow_client._keys import Key
from sow_client._payloads import PayloadForm
from sow_client._records import invalid
from sow_client.errors import InvalidArgument, SowError

NanMode: TypeAlias = Literal["refuse", "null"]
"""The two treatments of NaN in a frame: it is refused, or published as null. pandas has NaN for missing values, too."""

JSON: Final = PayloadForm()
METADATA: Final = (*(f"_{name}" for name in get_args(MetadataName)), "_payload")
"""Columns that are no fields of documents."""
WHOLE: Final = "_payload"
"""In files of `sow export`: records that the other columns do not keep."""
PLAIN_EXTENSIONS: Final = ("arrow.uuid", "arrow.json", "arrow.bool8", "pandas.interval")
"""Extension types of Arrow whose values have a form in JSON."""
ROWS_AT_ONCE: Final = 1_000


class Row(NamedTuple):
    """A row of a frame, as a publisher takes it."""

    payload: bytes
    key: Key | None
    ttl: Any
    expire_at: Any


def rows(
    frame: object,
    *,
    key: str | Sequence[str] | None,
    ttl_column: str | None,
    expire_time_column: str | None,
    nan: NanMode,
    form: PayloadForm = JSON,
    check: Callable[[Row], object] = bool,
) -> Iterator[Row]:
    """The rows of a frame. Columns of metadata, such as "_key", and those of lifetimes are no fields of the documents.
    `check` raises where a row cannot be sent. Raises InvalidArgument before the first row where one cannot be
    published ([2])."""
    if nan not in get_args(NanMode):
        raise invalid("nan", f'{nan!r} is neither "refuse" nor "null"')
    pa = library("pyarrow", "arrow")
    table = _checked(pa, _table(pa, frame, nan), nan)
    keys = [] if key is None else [key] if isinstance(key, str) else list(key)
    lifetimes = {ttl_column, expire_time_column} - {None}
    for name in (*keys, *sorted(filter(None, lifetimes))):
        if name not in table.column_names:
            raise invalid("frame", f"has no column {name!r}")
    if ttl_column is not None and ttl_column == expire_time_column:
        raise invalid("expire_time_column", "is ttl_column, too")
    fields = [name for name in table.column_names if name not in METADATA and name not in lifetimes]
    if WHOLE in table.column_names and table[WHOLE].null_count < len(table):
        raise invalid(
            "frame",
            f"the column {WHOLE!r} has whole records, which the other columns do not keep: publish the file with `sow "
            "publish`, or drop the column to publish the others",
        )
    made = partial(_rows, table, fields, keys, isinstance(key, str), ttl_column, expire_time_column, form)
    # Made twice, so that memory holds no second copy of the frame.
    for index, row in enumerate(made()):
        with _told(index):
            check(row)
    return made()


def _rows(
    table: Any,
    fields: list[str],
    keys: list[str],
    single: bool,
    ttl: str | None,
    expire_time: str | None,
    form: PayloadForm,
) -> Iterator[Row]:
    pa = import_module("pyarrow")
    index = 0
    has_null = form.message_type in ("json", "msgpack", "")
    whole = len(fields) == len(table.column_names)
    for batch in table.to_batches(max_chunksize=ROWS_AT_ONCE):
        for row in _values(pa, batch, index):
            with _told(index):
                document = row if whole else {name: row[name] for name in fields}
                values = tuple(row[name] for name in keys)
                if None in values:
                    raise invalid("key", "is null")
                if not has_null:
                    document = {name: value for name, value in document.items() if value is not None}
                yield Row(
                    form.encode(document),
                    (values[0] if single else values) if keys else None,
                    None if ttl is None else row[ttl],
                    None if expire_time is None else row[expire_time],
                )
            index += 1


def _values(pa: Any, batch: Any, start: int) -> list[dict[str, Any]]:
    """The rows of a batch as values of Python, maps as objects. Raises InvalidArgument with the number of a row."""
    try:
        rows: list[dict[str, Any]] = batch.to_pylist(maps_as_pydicts="strict")
    except (pa.ArrowException, ValueError, OverflowError, KeyError, TypeError):
        for row in range(len(batch)):
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                try:
                    column[row].as_py(maps_as_pydicts="strict")
                except (pa.ArrowException, ValueError, OverflowError, KeyError, TypeError) as error:
                    raise InvalidArgument(
                        f"row {start + row}: /{name} has no form in JSON: {error}",
                        reason="PAYLOAD_MALFORMED",
                        details={"field": "frame", "path": f"/{name}", "row": str(start + row)},
                    ) from error
        raise
    return rows


@contextmanager
def _told(index: int) -> Iterator[None]:
    """Adds the number of the row to an error."""
    try:
        yield
    except SowError as error:
        raise InvalidArgument(
            f"row {index}: {error.message}", reason=error.reason, details=error.details | {"row": str(index)}
        ) from error
    except (TypeError, ValueError) as error:
        raise InvalidArgument(
            f"row {index}: {error}", reason="INVALID_ARGUMENT", details={"field": "frame", "row": str(index)}
        ) from error


def _table(pa: Any, frame: Any, nan: NanMode) -> Any:
    if isinstance(frame, pa.Table):
        return frame
    if isinstance(frame, pa.RecordBatch):
        return pa.Table.from_batches([frame])
    package = type(frame).__module__.partition(".")[0]
    if package == "pandas" and hasattr(frame, "columns"):
        return _of_pandas(pa, frame, nan)
    is_polars = package == "polars" and isinstance(getattr(frame, "schema", None), Mapping)
    objects = [name for name, kind in frame.schema.items() if str(kind) == "Object"] if is_polars else []
    if objects:  # of these Arrow gets addresses in memory
        raise invalid("frame", f"the column {objects[0]!r} has objects of Python")
    if not hasattr(frame, "__arrow_c_stream__"):
        raise TypeError(f"frame: a {type(frame).__name__} is no frame of pandas or polars, and no table of Arrow")
    try:
        return pa.table(frame)
    except (pa.ArrowException, TypeError) as error:
        raise invalid("frame", f"Arrow does not take it: {error}") from error


def _of_pandas(pa: Any, frame: Any, nan: NanMode) -> Any:
    names = list(frame.columns)
    for number, name in enumerate(names, 1):
        if not isinstance(name, str):
            what = "has no name" if name is None else f"has the name {name!r}, which is no text"
            raise invalid("frame", f"column {number} of {len(names)} {what}; a column is a field, and needs one")
    arrays = []
    for name, series in frame.items():
        if str(series.dtype).startswith("float"):  # of numpy; the Float64 of pandas has nulls
            arrays.append(pa.array(series.to_numpy(), from_pandas=False))  # NaN stays NaN, to be refused or asked for
            continue
        if str(series.dtype).startswith("period"):  # Arrow has ordinals for them
            arrays.append(pa.array([None if text == "NaT" else text for text in series.astype(str)], pa.string()))
            continue
        if str(series.dtype) == "object":
            for index, value in enumerate(series):
                below = _nan_in(value)
                if below or (below is not None and nan == "refuse"):  # Arrow would take it for a missing value
                    raise _not_finite(name, index, below)
        try:
            arrays.append(pa.array(series, from_pandas=True))
        except (pa.ArrowException, OverflowError) as error:
            raise invalid("frame", f"the column {name!r} has values of several types: {error}") from error
    return pa.table(arrays, names=names)


def _nan_in(value: Any) -> str | None:
    """The path of a NaN or an infinity in a value of any type; empty: the value itself is one; None: there is none."""
    if isinstance(value, str | int | bytes | None):
        return None
    if hasattr(value, "tolist"):  # an array of numpy
        value = value.tolist()
    try:
        return not_finite(value)
    except (TypeError, ValueError, OverflowError):
        return None  # a value that Arrow, or the document, refuses


def _checked(pa: Any, table: Any, nan: NanMode) -> Any:
    """The table in types that a document takes. Raises InvalidArgument for NaN and infinities ([1])."""
    pc = import_module("pyarrow.compute")
    if len(set(table.column_names)) < len(table.column_names):
        raise invalid("frame", f"has several columns of one name: {', '.join(table.column_names)}")
    for at, field in enumerate(table.schema):
        if name := foreign_type(field):
            raise invalid(
                "frame",
                f"the column {field.name!r} has the type {name}, whose values sow does not know; cast it to text",
            )
        column = table.column(at)
        if pa.types.is_floating(field.type):
            if nan == "null":
                column = pc.if_else(pc.is_nan(column), pa.scalar(None, field.type), column)
            wrong = pc.index(pc.fill_null(pc.invert(pc.is_finite(column)), False), True).as_py()
            if wrong >= 0:
                raise _not_finite(field.name, wrong)
        elif any(not pc.all(pc.is_finite(one)).as_py() for one in all_floats(pa, table.select([at]))):
            for row, value in enumerate(column.to_pylist()):  # it may be below a null, and then it is not published
                if below := not_finite(value):
                    raise _not_finite(field.name, row, below)
        target = _micros(pa, field.type)
        if target != field.type:
            try:
                column = column.cast(target)
            except pa.ArrowException as error:
                raise invalid("frame", f"the column {field.name!r} has times finer than microseconds") from error
        table = table.set_column(at, field.name, column)
    return table


def foreign_type(field: Any) -> str:
    """The name of an extension type of Arrow, in this field of a schema or below it, whose values have no form in JSON:
    the periods of pandas are ordinals, the opaque types of DuckDB bytes. Empty: there is none."""
    told = (field.metadata or {}).get(b"ARROW:extension:name", b"").decode(errors="replace")
    return _foreign(field.type, told)


def _foreign(kind: Any, told: str = "") -> str:
    name: str = getattr(kind, "extension_name", told)
    if name and name not in PLAIN_EXTENSIONS:
        return name
    kind = getattr(kind, "storage_type", kind)
    if hasattr(kind, "index_type"):  # a dictionary
        return _foreign(kind.value_type)
    return next(filter(None, (foreign_type(kind.field(number)) for number in range(kind.num_fields))), "")


def _micros(pa: Any, kind: Any) -> Any:
    """The type with times in microseconds, which Python has."""
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", tz=kind.tz)
    if pa.types.is_duration(kind) and kind.unit == "ns":
        return pa.duration("us")
    if pa.types.is_time64(kind) and kind.unit == "ns":
        return pa.time64("us")
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_micros(pa, field.type)) for field in kind])
    return pa.list_(_micros(pa, kind.value_type)) if pa.types.is_list(kind) else kind


def _not_finite(name: object, index: int, below: str = "") -> InvalidArgument:
    hint = "" if below else '; nan="null" publishes NaN as null'
    return InvalidArgument(
        f"row {index}: /{name}{below} is NaN or infinite, which JSON cannot express{hint}",
        reason="PAYLOAD_MALFORMED",
        details={"field": "frame", "path": f"/{name}{below}", "row": str(index)},
    )
