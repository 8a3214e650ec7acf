"""Answers as tables of Arrow, pandas and polars, whose libraries are loaded when needed. `_frame_rows` goes back.

[1]  A table is made of the columns of the answer; no Python object is made for a record.
[2]  No value changes on its way into a table: a text is never taken for a time, and a whole number that fits no column
     of whole numbers is not rounded. A column of several types is text: of each value its JSON.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal
from importlib import import_module
from itertools import chain
from typing import Any, Final, Literal, TypeAlias, get_args
from uuid import UUID

from sow_client._documents import decode, is_json_object
from sow_client._payloads import PayloadForm
from sow_client._records import NEVER_MICROS, RecordBatch, invalid

MetadataName: TypeAlias = Literal["key", "version", "publish_time", "expire_time", "origin", "sequence"]
"""Metadata of records as columns of a table, where their names begin with "_": "_key"."""

PAYLOAD: Final = "payload"
"""The column of payloads without fields."""
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
        is_rounded = any(map(_has_large, all_floats(pa, table))) and _has_long_number(lines)
        order = dict.fromkeys([*sample.names, *table.column_names])  # the reader puts given fields first
        return None if is_rounded else table.select(list(order))
    except pa.ArrowInvalid:
        return None


def all_floats(pa: Any, table: Any) -> Iterator[Any]:
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
