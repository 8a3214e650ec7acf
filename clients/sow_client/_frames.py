"""Answers as tables of Arrow, pandas and polars, and such tables as documents. The libraries are loaded when needed.

[1]  A table is made of the columns of the answer; no Python object is made for a record.
[2]  No value changes on its way into a table: a text is never taken for a time, and a whole number that fits no column
     of whole numbers is not rounded. A column of several types is text: of each value its JSON.
[3]  A NaN or an infinity is never published, and never becomes null without being asked to.
[4]  All rows of a frame are checked before the first one is given out: none is sent where one cannot be.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from functools import partial
from importlib import import_module
from itertools import chain
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args
from uuid import UUID

from sow_client._documents import decode, is_json_object, not_finite
from sow_client._keys import Key
from sow_client._payloads import PayloadForm
from sow_client._records import NEVER_MICROS, RecordBatch, invalid
from sow_client.errors import InvalidArgument, SowError

MetadataName: TypeAlias = Literal["key", "version", "publish_time", "expire_time", "origin", "sequence"]
"""Metadata of records as columns of a table, where their names begin with "_": "_key"."""
NanMode: TypeAlias = Literal["refuse", "null"]
"""The two treatments of NaN in a frame: it is refused, or published as null. pandas has NaN for missing values, too."""

JSON: Final = PayloadForm()
METADATA: Final = (*(f"_{name}" for name in get_args(MetadataName)), "_payload")
"""Columns that are no fields of documents."""
WHOLE: Final = "_payload"
"""In files of `sow export`: records that the other columns do not keep."""
PLAIN_EXTENSIONS: Final = ("arrow.uuid", "arrow.json", "arrow.bool8", "pandas.interval")
"""Extension types of Arrow whose values have a form in JSON."""
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
    """The table as a `polars.DataFrame`. Types that polars does not have become those that hold the same values."""
    polars, pa = library("polars", "polars"), library("pyarrow", "polars")
    for at, field in enumerate(table.schema):
        kind = _in_polars(pa, field.type)
        if kind == field.type:
            continue
        try:
            table = table.set_column(at, field.with_type(kind), table.column(at).cast(kind))
        except pa.ArrowException as error:
            raise invalid(
                "schema", f"polars has no type for the field {field.name!r}, {field.type}: {error}"
            ) from error
    return polars.from_arrow(table)


def _in_polars(pa: Any, kind: Any) -> Any:
    """The type as one that polars reads. It ends the process's call with a panic for some others."""
    types = pa.types
    if types.is_decimal256(kind):
        return pa.decimal128(min(kind.precision, 38), kind.scale)
    if types.is_run_end_encoded(kind):
        return _in_polars(pa, kind.value_type)
    if types.is_struct(kind):
        return pa.struct([field.with_type(_in_polars(pa, field.type)) for field in kind])
    if types.is_map(kind):
        return pa.map_(kind.key_type, _in_polars(pa, kind.item_type))
    if types.is_list(kind) or types.is_list_view(kind):
        return pa.list_(_in_polars(pa, kind.value_type))
    return kind


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
    chosen: Sequence[Any] = () if schema is None else tuple(schema)
    unread = [field for field in chosen if not _is_read(pa, field.type)]
    known = [field for field in chosen if field not in unread]
    table = _read(pa, payloads, pa.schema(known) if chosen else schema) if known or not chosen else None
    if table is None or unread:
        try:
            documents = list(map(decode, payloads))
        except ValueError:
            return {PAYLOAD: pa.array(payloads, pa.binary())}  # bytes that begin like JSON
        if table is None:
            return _one_by_one(pa, documents, schema)
        columns = _one_by_one(pa, documents, pa.schema(unread))
        return {field.name: columns[field.name] if field in unread else table[field.name] for field in chosen}
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


def _is_read(pa: Any, kind: Any) -> bool:
    """True if Arrow's reader of JSON makes columns of this type."""
    pa_json = import_module("pyarrow.json")
    try:
        pa_json.read_json(
            pa.BufferReader(b"{}\n"), parse_options=pa_json.ParseOptions(explicit_schema=pa.schema([("a", kind)]))
        )
    except pa.ArrowException:
        return False
    return True


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
        return pa.array([_fitting(pa, value, field.type) for value in values], field.type)
    except (pa.ArrowException, OverflowError, TypeError, ValueError, ArithmeticError) as error:
        raise invalid("schema", f"the field {field.name!r} has values that are not {field.type}: {error}") from error


def _fitting(pa: Any, value: Any, kind: Any) -> Any:
    """A value of JSON as Arrow takes it for this type: it makes no time, no decimal and no UUID of a text."""
    types = pa.types
    if value is None:
        return None
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _fitting(pa, value, kind.value_type)
    if types.is_decimal(kind):
        return value if isinstance(value, int) else Decimal(value if isinstance(value, str) else repr(value))
    if isinstance(value, dict):
        if types.is_struct(kind):
            return {field.name: _fitting(pa, value.get(field.name), field.type) for field in kind}
        if types.is_map(kind):
            by_number = types.is_integer(kind.key_type)  # names of JSON are texts
            return [
                (int(name) if by_number else name, _fitting(pa, one, kind.item_type)) for name, one in value.items()
            ]
    if isinstance(value, list) and hasattr(kind, "value_type"):
        return [_fitting(pa, one, kind.value_type) for one in value]
    if isinstance(value, str):
        if types.is_temporal(kind) and not types.is_duration(kind):
            return pa.scalar(value, pa.string()).cast(kind)
        if getattr(kind, "extension_name", "") == "arrow.uuid":
            return UUID(value).bytes
    return value


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
    check: Callable[[Row], object] = bool,
) -> Iterator[Row]:
    """The rows of a frame. Columns of metadata, such as "_key", and those of lifetimes are no fields of the documents.
    `check` raises where a row cannot be sent. Raises InvalidArgument before the first row where one cannot be
    published ([4])."""
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
    """The table in types that a document takes. Raises InvalidArgument for NaN and infinities ([3])."""
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
