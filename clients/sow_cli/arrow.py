"""Records as Parquet and Arrow files. It needs pyarrow, which is imported only where one of them is asked for.

[1]  A column has one type, which holds every value that was looked at: whole numbers become floats beside floats, an
     object gets the fields of all objects. Values that no type holds exactly are JSON text.
[2]  No value is changed and none is dropped in silence: one that does not fit its column ends the output.
[3]  Metadata have the names and types that Spark reads: `_key`, `_expire_time` …, times in UTC.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from types import ModuleType
from typing import IO, Any, Final, TypeAlias

import click
import msgspec

from sow_cli import display
from sow_cli.columns import METADATA, Path, heading, steps
from sow_cli.lines import BadLine
from sow_cli.rows import NEVER_MICROS, BatchColumns, RecordForm
from sow_client import PayloadForm

DataType: TypeAlias = Any
"""A pyarrow.DataType: pyarrow has no annotations."""

RECORDS_LOOKED_AT: Final = 10_000
"""A stream of records has the types of its first ones."""
_EXACT_IN_FLOAT: Final = 2**53
_decode_fields: Final = msgspec.json.Decoder(dict[str, object]).decode


def load_pyarrow() -> ModuleType:
    """The package. Raises a usage error that tells how to install it."""
    try:
        return import_module("pyarrow")
    except ImportError as error:
        raise click.UsageError(
            "Parquet and Arrow need the Python package pyarrow: pip install 'sow[arrow]', or in a checkout: "
            "pip install '.[arrow]'"
        ) from error


class ArrowSchema:
    """The columns of one output, whose types grow while `look` sees records ([1])."""

    def __init__(self, form: RecordForm) -> None:
        self._pa = load_pyarrow()
        self._form = form
        self._types: dict[Path, DataType] = {}
        self._wide: set[Path] = set()  # whole numbers that no float holds
        for name in form.select:
            if not name.startswith("@"):
                self._types[steps(name)] = self._pa.null()
        self._chosen = bool(form.select)
        self.left_out: dict[str, None] = {}
        """Names of fields without a column."""

    def look(self, payloads: Sequence[bytes]) -> None:
        """Makes the columns wide enough for these payloads."""
        if self._form.keys_only or (self._chosen and not self._types):
            return
        documents = [_document(payload, self._form) for payload in payloads]
        if not self._chosen:
            for document in documents:
                for name in document or ():
                    self._types.setdefault((name,), self._pa.null())
        for path, known in self._types.items():
            self._types[path] = self._widest(path, known, self._inferred(path, [_at(one, path) for one in documents]))

    def _inferred(self, path: Path, values: list[object]) -> DataType:
        """The type of these values; string if they have none in common."""
        pa = self._pa
        try:
            kind = pa.array(values).type
        except (pa.ArrowException, OverflowError, TypeError, ValueError):
            return pa.string()
        if pa.types.is_integer(kind) and any(abs(one) > _EXACT_IN_FLOAT for one in values if isinstance(one, int)):
            self._wide.add(path)
        return kind if _is_held(pa, kind) else pa.string()

    def _widest(self, path: Path, one: DataType, other: DataType) -> DataType:
        pa = self._pa
        wide = _widest(pa, one, other)
        return pa.string() if wide is None or (path in self._wide and pa.types.is_floating(wide)) else wide

    def schema(self) -> Any:
        """The pyarrow.Schema of the records."""
        return self._pa.schema([self._pa.field(name, kind) for name, kind in self._columns()])

    def batch(self, columns: BatchColumns) -> Any:
        """The pyarrow.RecordBatch of some records. Raises a usage error for a value that does not fit ([2])."""
        pa = self._pa
        values = self._values(columns)
        arrays = []
        for name, kind in self._columns():
            try:
                arrays.append(self._array(values[name], kind))
            except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
                raise click.ClickException(
                    f"a value of {display.safe(name)} does not fit the type {kind} of the first {RECORDS_LOOKED_AT:,} "
                    f"records ({display.safe(str(error))}); `sow export` looks at all records first"
                ) from error
        return pa.record_batch(arrays, schema=self.schema())

    def _array(self, values: Sequence[object], kind: DataType) -> Any:
        """The values as a column. Given the type, Arrow would cut 2.5 to 2 and drop fields of objects ([2])."""
        pa = self._pa
        if pa.types.is_timestamp(kind) or pa.types.is_string(kind):
            return pa.array(values, kind)
        array = pa.array(values)
        if array.type == kind:
            return array
        if _widest(pa, kind, array.type) != kind:
            raise ValueError(f"it is {array.type}")
        return pa.array(values, kind)

    def _columns(self) -> list[tuple[str, DataType]]:
        pa = self._pa
        moment = pa.timestamp("us", tz="UTC")
        metadata = {
            "key": pa.string(), "version": pa.int64(), "publish_time": moment, "expire_time": moment,
            "origin": pa.string(), "sequence": pa.int64(),
        }  # fmt: skip
        fields = {path: _filled(pa, kind) for path, kind in self._types.items()}
        if self._chosen:
            return [
                (f"_{name[1:]}", metadata[name[1:]]) if name[0] == "@" else (heading(steps(name)), fields[steps(name)])
                for name in self._form.select
            ]
        named = [(heading(path), kind) for path, kind in fields.items()]
        if not named and not self._form.keys_only:
            named = [("payload", pa.string() if self._form.payload_is_json else pa.binary())]
        return [("_key", metadata["key"]), *named, *[(f"_{name}", metadata[name]) for name in METADATA[1:]]]

    def _values(self, columns: BatchColumns) -> dict[str, Sequence[object]]:
        never = NEVER_MICROS
        values: dict[str, Sequence[object]] = {
            "_key": columns.keys,
            "_version": columns.versions,
            "_publish_time": columns.publish_times_micros,
            "_expire_time": [None if micros == never else micros for micros in columns.expire_times_micros],
            "_origin": columns.origins,
            "_sequence": columns.sequences,
        }
        if not self._types:
            is_text = self._form.payload_is_json
            values["payload"] = [one.decode() if is_text else one for one in columns.payloads]
            return values
        documents = [_document(payload, self._form) for payload in columns.payloads]
        if not self._chosen:
            for document in documents:
                if document and not all((name,) in self._types for name in document):
                    self.left_out.update((heading((name,)), None) for name in document if (name,) not in self._types)
        for path, kind in self._types.items():
            found = [_at(document, path) for document in documents]
            is_string = self._pa.types.is_string(kind) or self._pa.types.is_null(kind)
            values[heading(path)] = [PayloadForm.text(one) for one in found] if is_string else found
        return values


class ArrowFile:
    """A Parquet file, or an Arrow file or stream, that is written batch by batch."""

    def __init__(self, sink: IO[bytes], schema: ArrowSchema, *, is_parquet: bool, is_stream: bool = False) -> None:
        """`is_stream`: Arrow in the form for pipes."""
        self._schema = schema
        pa = load_pyarrow()
        target = pa.PythonFile(_Sink(sink), mode="w")
        if is_parquet:
            parquet = import_module("pyarrow.parquet")
            self._writer = parquet.ParquetWriter(target, schema.schema(), compression="zstd")
        else:
            make = pa.ipc.new_stream if is_stream else pa.ipc.new_file
            self._writer = make(target, schema.schema())

    def write(self, columns: BatchColumns) -> None:
        """Writes some records. A batch is a row group of Parquet, so it should be large."""
        self._writer.write_batch(self._schema.batch(columns))

    def close(self) -> None:
        """Writes the end of the file; the sink stays open."""
        self._writer.close()


class _Sink:
    """A pipe or a file as pyarrow takes it: it asks for the position, which a pipe does not know."""

    closed = False

    def __init__(self, sink: IO[bytes]) -> None:
        self._sink = sink
        self._position = 0

    def write(self, data: bytes) -> int:
        self._sink.write(data)
        self._position += len(data)
        return len(data)

    def tell(self) -> int:
        return self._position

    def flush(self) -> None:
        self._sink.flush()

    def close(self) -> None:
        self.flush()

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False


def read_values(pa: ModuleType, name: str, column: Any) -> list[object]:
    """The values of a column of a file; a BadLine in place of one that Python does not have."""
    kind = _in_micros(pa, column.type)
    try:
        values: list[object] = (column if kind == column.type else column.cast(kind)).to_pylist(
            maps_as_pydicts="strict"
        )
    except (pa.ArrowException, KeyError, OverflowError, ValueError):
        return [_read_value(pa, name, column.slice(row, 1), kind) for row in range(len(column))]
    return values


def _read_value(pa: ModuleType, name: str, one: Any, kind: DataType) -> object:
    try:
        value: object = (one if kind == one.type else one.cast(kind)).to_pylist(maps_as_pydicts="strict")[0]
    except (pa.ArrowException, KeyError, OverflowError, ValueError) as error:
        return BadLine("PAYLOAD_MALFORMED", f"column {name}: {error}")
    return value


def _in_micros(pa: ModuleType, kind: DataType) -> DataType:
    """The type with times in microseconds, which Python has: Spark and pandas write nanoseconds."""
    types = pa.types
    if types.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", tz=kind.tz)
    if types.is_duration(kind) and kind.unit == "ns":
        return pa.duration("us")
    if types.is_time64(kind):
        return pa.time64("us")
    if types.is_struct(kind):
        return pa.struct([field.with_type(_in_micros(pa, field.type)) for field in _fields(kind)])
    if types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_in_micros(pa, kind.value_type)))
    if types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_in_micros(pa, kind.value_type)))
    if types.is_map(kind):
        return pa.map_(kind.key_type, kind.item_field.with_type(_in_micros(pa, kind.item_type)))
    return _in_micros(pa, kind.value_type) if types.is_dictionary(kind) else kind


def _document(payload: bytes, form: RecordForm) -> dict[str, object] | None:
    """The fields of a payload as Python values. A number beyond a float is its text."""
    if form.message_type != "json":
        found = form.payloads.fields(payload)
        return None if found is None else {name: PayloadForm.in_columns(value) for name, value in found.items()}
    try:
        return _decode_fields(payload)
    except msgspec.MsgspecError:
        raw = form.payloads.fields(payload)
    return None if raw is None else {name: _value(one) for name, one in raw.items()}


def _value(raw: object) -> object:
    assert isinstance(raw, msgspec.Raw), "the fields of JSON are"
    try:
        return msgspec.json.decode(raw)
    except msgspec.MsgspecError:
        return bytes(raw).decode("utf-8", "backslashreplace")


def _at(document: dict[str, object] | None, path: Path) -> object:
    value: object = document
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _is_held(pa: ModuleType, kind: DataType) -> bool:
    """True for a type that Parquet can hold."""
    types = pa.types
    if types.is_struct(kind):
        return kind.num_fields > 0 and all(_is_held(pa, one.type) for one in _fields(kind))
    return _is_held(pa, kind.value_type) if types.is_list(kind) else not types.is_decimal(kind)


def _widest(pa: ModuleType, one: DataType, other: DataType) -> DataType | None:
    """A type that holds the values of both ([1]); None: there is none but their text."""
    types = pa.types
    if one.equals(other) or types.is_null(other):
        return one
    if types.is_null(one):
        return other
    numbers = (pa.int64(), pa.float64())
    if one in numbers and other in numbers:
        return pa.float64()
    if types.is_list(one) and types.is_list(other):
        item = _widest(pa, one.value_type, other.value_type)
        return None if item is None else pa.list_(item)
    if types.is_struct(one) and types.is_struct(other):
        kinds = {field.name: field.type for field in _fields(one)}
        for field in _fields(other):
            kinds[field.name] = _widest(pa, kinds.get(field.name, pa.null()), field.type)
        return None if None in kinds.values() else pa.struct(list(kinds.items()))
    return None


def _filled(pa: ModuleType, kind: DataType) -> DataType:
    """The type with text where only nulls were seen: readers of Parquet know no type of nulls."""
    types = pa.types
    if types.is_struct(kind):
        return pa.struct([(one.name, _filled(pa, one.type)) for one in _fields(kind)])
    if types.is_list(kind):
        return pa.list_(_filled(pa, kind.value_type))
    return pa.string() if types.is_null(kind) else kind


def _fields(kind: DataType) -> Iterable[Any]:
    return [kind.field(one) for one in range(kind.num_fields)]
