"""Answers as tables of Arrow, pandas and polars, and such tables as documents. The libraries are loaded when needed.

[1]  A table is made of the columns of the answer; no Python object is made for a record.
[2]  No value changes on its way into a table: a text is never taken for a time, and a whole number that fits no column
     of whole numbers is not rounded. A column of several types is text: of each value its JSON.
[3]  A NaN or an infinity is never published, and never becomes null without being asked to.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import chain
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

from sow_client._documents import decode, is_json_object, not_finite
from sow_client._keys import Key
from sow_client._payloads import PayloadForm
from sow_client._records import NEVER_MICROS, RecordBatch, invalid
from sow_client.errors import InvalidArgument

MetadataName: TypeAlias = Literal["key", "version", "publish_time", "expire_time", "origin", "sequence"]
"""Metadata of records as columns of a table, where their names begin with "_": "_key"."""
NanMode: TypeAlias = Literal["refuse", "null"]
"""What becomes of NaN in a frame: it is refused, or published as null. pandas has NaN for missing values, too."""

JSON: Final = PayloadForm()
METADATA: Final = tuple(f"_{name}" for name in get_args(MetadataName))
PAYLOAD: Final = "payload"
"""The column of payloads without fields."""
ROWS_AT_ONCE: Final = 1_000
_BLOCK_BYTES: Final = 1 << 20
_LONG_NUMBER: Final = re.compile(rb"[:,\[ ]-?[0-9]{16}")
"""Where a whole number begins that a float may not hold."""
_LONG: Final = b"0" * 16
_EXACT_IN_FLOAT: Final = 2.0**53
_DIGITS_TO_ZERO: Final = bytes.maketrans(b"123456789", b"0" * 9)
_SAMPLE_BYTES: Final = 1 << 16


def library(name: str, extra: str) -> Any:
    """A library of an extra. Raises ImportError with its name."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(f"{name.partition('.')[0]} is missing; install sow[{extra}]") from error


# ---- answers as tables ----


def to_arrow(batches: Sequence[RecordBatch], schema: object, metadata: Iterable[MetadataName]) -> Any:
    """The records of an answer as a `pyarrow.Table`: metadata first, then the fields."""
    pa = library("pyarrow", "arrow")
    names = _checked_metadata(metadata)
    columns = {f"_{name}": _METADATA[name](pa, batches) for name in names}
    for name, column in _fields(pa, batches, schema).items():
        if name in columns:
            raise invalid("metadata", f"the documents have a field {name!r}; leave {name[1:]!r} out of metadata")
        columns[name] = column
    if columns:
        return pa.table(columns)
    return pa.table({"": pa.nulls(sum(map(len, batches)))}).select([])  # rows, and nothing of them


def to_pandas(table: Any) -> Any:
    """The table as a `pandas.DataFrame`. A column of whole numbers or bools that has nulls gets a type of pandas that
    has them, such as Int64: as floats they would be rounded."""
    pd, pa = library("pandas", "pandas"), library("pyarrow", "pandas")
    nullable = {pa.int64(): pd.Int64Dtype(), pa.uint64(): pd.UInt64Dtype(), pa.bool_(): pd.BooleanDtype()}
    frame = table.to_pandas()
    for name in table.column_names:
        if table[name].null_count and table[name].type in nullable:
            frame[name] = table[name].to_pandas(types_mapper=nullable.get)
    return frame


def to_polars(table: Any) -> Any:
    """The table as a `polars.DataFrame`."""
    return library("polars", "polars").from_arrow(table)


def _checked_metadata(metadata: Iterable[MetadataName]) -> tuple[MetadataName, ...]:
    names = () if isinstance(metadata, str) else tuple(dict.fromkeys(metadata))
    if isinstance(metadata, str) or not set(names) <= set(get_args(MetadataName)):
        raise invalid("metadata", f"{metadata!r} is not a list of {', '.join(get_args(MetadataName))}")
    return names


def _numbers(kind: str, column: str) -> Callable[[Any, Sequence[RecordBatch]], Any]:
    def made(pa: Any, batches: Sequence[RecordBatch]) -> Any:
        target = pa.timestamp("us", tz="UTC") if kind == "time" else pa.int64()
        values = pa.chunked_array(
            [pa.array(list(getattr(batch.columns, column)), pa.int64()) for batch in batches], pa.int64()
        )
        if column == "expire_time_micros":
            pc = import_module("pyarrow.compute")
            values = pc.if_else(pc.equal(values, NEVER_MICROS), pa.scalar(None, pa.int64()), values)
        return values.cast(target)

    return made


def _texts(attribute: str) -> Callable[[Any, Sequence[RecordBatch]], Any]:
    def made(pa: Any, batches: Sequence[RecordBatch]) -> Any:
        return pa.chunked_array([pa.array(getattr(batch, attribute), pa.string()) for batch in batches], pa.string())

    return made


_METADATA: Final[dict[MetadataName, Callable[[Any, Sequence[RecordBatch]], Any]]] = {
    "key": _texts("keys"),
    "version": _numbers("number", "version"),
    "publish_time": _numbers("time", "publish_time_micros"),
    "expire_time": _numbers("time", "expire_time_micros"),
    "origin": _texts("origins"),
    "sequence": _numbers("number", "sequence"),
}


def _fields(pa: Any, batches: Sequence[RecordBatch], schema: object) -> dict[str, Any]:
    if schema is not None and not isinstance(schema, pa.Schema):
        raise invalid("schema", f"a {type(schema).__name__} is not a pyarrow.Schema")
    payloads = list(chain.from_iterable(batch.payloads for batch in batches))
    if not any(payloads):  # no records, or only their keys
        return {} if schema is None else {field.name: pa.nulls(len(payloads), field.type) for field in schema}
    forms = {batch.form for batch in batches if len(batch)}
    form = forms.pop()
    if form.message_type not in ("json", ""):
        return _of_form(pa, payloads, None if forms else form, schema)
    if not is_json_object(payloads[0]):
        return {PAYLOAD: pa.array(payloads, pa.binary())}
    table = _read(pa, payloads, schema)
    if table is None:
        try:
            documents = list(map(decode, payloads))
        except ValueError:
            return {PAYLOAD: pa.array(payloads, pa.binary())}  # bytes that begin like JSON
        return _one_by_one(pa, documents, schema)
    return dict(zip(table.column_names, table.columns, strict=True))


def documents(batch: RecordBatch) -> list[Any]:
    """The documents of a batch whose payloads all have fields."""
    form = batch.form
    if form.message_type in ("json", ""):
        return list(map(decode, batch.payloads))
    return [PayloadForm.in_columns(form.fields(payload)) for payload in batch.payloads]


def _of_form(pa: Any, payloads: Sequence[bytes], form: PayloadForm | None, schema: Any) -> dict[str, Any]:
    """The fields of payloads that are not JSON. `form`: None where the topic has changed its type meanwhile."""
    documents = [None if form is None else form.fields(payload) for payload in payloads]
    if None in documents:
        return {PAYLOAD: pa.array(payloads, pa.binary())}
    return _one_by_one(pa, [PayloadForm.in_columns(document) for document in documents], schema)


def _read(pa: Any, payloads: Sequence[bytes], schema: Any) -> Any:
    """The documents by Arrow's reader; None: it does not read them, or would change a value ([2])."""
    pa_json = import_module("pyarrow.json")
    lines = b"\n".join(payloads)
    if lines.count(b"\n") >= len(payloads) or b"\r" in lines:  # between values, JSON has any white space
        lines = b"\n".join([payload.replace(b"\n", b" ").replace(b"\r", b" ") for payload in payloads])

    def read(explicit: Any, unexpected: str, source: bytes = lines) -> Any:
        return pa_json.read_json(
            pa.BufferReader(source),
            read_options=pa_json.ReadOptions(block_size=max(_BLOCK_BYTES, max(map(len, payloads)) + 2)),
            parse_options=pa_json.ParseOptions(explicit_schema=explicit, unexpected_field_behavior=unexpected),
        )

    try:
        if schema is not None:
            return read(schema, "ignore")
        # The first documents tell which texts the reader takes for times. To find that out by reading all of them would
        # double the cost.
        first = lines[: lines.find(b"\n", _SAMPLE_BYTES) + 1]
        sample = read(None, "infer", first).schema if first else pa.schema([])
        table = read(pa.schema([_without_times(pa, field) for field in sample if _has_times(pa, field)]), "infer")
        if any(_has_times(pa, field) for field in table.schema):
            table = read(pa.schema([_without_times(pa, field) for field in table.schema]), "infer")
        is_rounded = any(map(_has_large, _all_floats(pa, table))) and _has_long_number(lines)
        order = dict.fromkeys([*sample.names, *table.column_names])  # the reader puts given fields first
        return None if is_rounded else table.select(list(order))
    except pa.ArrowInvalid:
        return None


def _all_floats(pa: Any, table: Any) -> Iterator[Any]:
    """The floats in a table, also those in structs and lists."""
    for column in table.columns:
        if _has(pa, column.type, pa.types.is_floating):
            for chunk in column.chunks:
                yield from _floats(pa, chunk)


def _floats(pa: Any, array: Any) -> Iterator[Any]:
    kind, types = array.type, pa.types
    if types.is_floating(kind):
        yield array
    elif types.is_struct(kind):
        for below in array.flatten():
            yield from _floats(pa, below)
    elif types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        yield from _floats(pa, array.flatten())
    elif types.is_map(kind):
        yield from _floats(pa, array.items)
    elif types.is_dictionary(kind):
        yield from _floats(pa, array.dictionary)


def _has_large(floats: Any) -> bool:
    pc = import_module("pyarrow.compute")
    most = pc.max(pc.abs(floats)).as_py()
    return most is not None and most >= _EXACT_IN_FLOAT


def _has_long_number(lines: bytes) -> bool:
    # The expression costs as much as reading the documents, and this a tenth of it.
    return _LONG in lines.translate(_DIGITS_TO_ZERO) and _LONG_NUMBER.search(lines) is not None


def _has_times(pa: Any, field: Any) -> bool:
    return _has(pa, field.type, pa.types.is_timestamp)


def _has(pa: Any, kind: Any, wanted: Callable[[Any], bool]) -> bool:
    if pa.types.is_struct(kind):
        return any(_has(pa, field.type, wanted) for field in kind)
    return _has(pa, kind.value_type, wanted) if pa.types.is_list(kind) else bool(wanted(kind))


def _without_times(pa: Any, field: Any) -> Any:
    kind = field.type
    if pa.types.is_timestamp(kind):
        return field.with_type(pa.string())
    if pa.types.is_struct(kind):
        return field.with_type(pa.struct([_without_times(pa, below) for below in kind]))
    return field.with_type(pa.list_(_without_times(pa, kind.value_field))) if pa.types.is_list(kind) else field


def _one_by_one(pa: Any, documents: Sequence[Any], schema: Any) -> dict[str, Any]:
    """The documents field by field: slower, and for all that JSON can have."""
    names = dict.fromkeys(name for document in documents for name in document) if schema is None else schema.names
    columns = {}
    for name in names:
        values = [document.get(name) for document in documents]
        if schema is not None:
            columns[name] = _of_type(pa, values, schema.field(name))
            continue
        try:
            columns[name] = _alike(pa, values)
        except (pa.ArrowException, OverflowError):
            columns[name] = pa.array([PayloadForm.text(value) for value in values], pa.string())
    return columns


def _alike(pa: Any, values: Sequence[Any]) -> Any:
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int}:
        numbers = [value for value in values if value is not None]
        return pa.array(values, pa.uint64() if min(numbers) >= 0 and max(numbers) >= 2**63 else pa.int64())
    if kinds == {int, float} and any(type(value) is int and abs(value) > 2**53 for value in values):
        raise pa.ArrowInvalid("a float would round it")
    return pa.array(values)


def _of_type(pa: Any, values: Sequence[Any], field: Any) -> Any:
    try:
        if pa.types.is_integer(field.type) and (cut := [one for one in values if type(one) is float and one % 1]):
            raise pa.ArrowInvalid(f"{cut[0]} is no whole number")  # Arrow would cut it
        return pa.array(values, field.type)
    except (pa.ArrowException, OverflowError) as error:
        raise invalid("schema", f"the field {field.name!r} has values that are not {field.type}: {error}") from error


# ---- tables as documents ----


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
) -> Iterator[Row]:
    """The rows of a frame. Columns of metadata, such as "_key", and those of lifetimes are no fields of the documents.
    Raises InvalidArgument before the first row where a column cannot be published."""
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
    return _rows(table, fields, keys, isinstance(key, str), ttl_column, expire_time_column, form)


def _rows(
    table: Any,
    fields: list[str],
    keys: list[str],
    single: bool,
    ttl: str | None,
    expire_time: str | None,
    form: PayloadForm,
) -> Iterator[Row]:
    index = 0
    has_null = form.message_type in ("json", "msgpack")
    whole = len(fields) == len(table.column_names)
    for batch in table.to_batches(max_chunksize=ROWS_AT_ONCE):
        for row in batch.to_pylist():
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


@contextmanager
def _told(index: int) -> Iterator[None]:
    """Adds the number of the row to an error."""
    try:
        yield
    except InvalidArgument as error:
        raise InvalidArgument(
            f"row {index}: {error.message}", reason=error.reason, details=error.details | {"row": str(index)}
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
    arrays = []
    for name, series in frame.items():
        if str(series.dtype).startswith("float"):  # of numpy; the Float64 of pandas has nulls
            arrays.append(pa.array(series.to_numpy(), from_pandas=False))  # NaN stays NaN, to be refused or asked for
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
    return pa.table(arrays, names=[name if isinstance(name, str) else _no_text(name) for name in names])


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


def _no_text(name: object) -> str:
    raise invalid("frame", f"the name of the column {name!r} is no text")


def _checked(pa: Any, table: Any, nan: NanMode) -> Any:
    """The table in types that a document takes. Raises InvalidArgument for NaN and infinities ([3])."""
    pc = import_module("pyarrow.compute")
    if len(set(table.column_names)) < len(table.column_names):
        raise invalid("frame", f"has several columns of one name: {', '.join(table.column_names)}")
    for at, field in enumerate(table.schema):
        column = table.column(at)
        if pa.types.is_floating(field.type):
            if nan == "null":
                column = pc.if_else(pc.is_nan(column), pa.scalar(None, field.type), column)
            wrong = pc.index(pc.fill_null(pc.invert(pc.is_finite(column)), False), True).as_py()
            if wrong >= 0:
                raise _not_finite(field.name, wrong)
        elif any(not pc.all(pc.is_finite(one)).as_py() for one in _all_floats(pa, table.select([at]))):
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
