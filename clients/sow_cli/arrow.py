"""Records as Parquet and Arrow files. It needs pyarrow, which is imported only where one of them is asked for.

[1]  A column has one type, which holds every value that was looked at: whole numbers become floats beside floats, an
     object gets the fields of all objects. Values that no type holds exactly are JSON text.
[2]  No value is changed and none is dropped in silence: one that does not fit its column ends the output.
[3]  Metadata have the names and types that Spark reads: `_key`, `_expire_time` …, times in UTC.
[4]  A file of `sow export` is published as the same records: a record that its columns do not keep stands whole in the
     column `_payload` (kept [1]), and `Told` in the metadata of the file has the rest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from decimal import Decimal
from importlib import import_module
from itertools import repeat
from types import ModuleType, NoneType
from typing import IO, Any, Final

import click
import msgspec

from sow_cli import display
from sow_cli.columns import METADATA, Path, heading, steps
from sow_cli.kept import CsvKept, is_plain
from sow_cli.row_records import FineTime, Unread
from sow_cli.rows import NEVER_MICROS, BatchColumns, RecordForm
from sow_client import PayloadForm
from sow_client._frame_rows import foreign_type
from sow_client._shapes import DataType, Shape

RECORDS_LOOKED_AT: Final = 10_000
"""A stream of records has the types of its first ones."""
_TOLD: Final = b"sow"
"""The name of `Told` in the metadata of a file."""
_LONG_FLOAT: Final = re.compile(rb"[0-9][0-9.]{15}|[eE]-[0-9]{3}")
"""Where a number begins that a float may not hold. Others have 15 digits at most, and come back."""
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


class Told(msgspec.Struct):
    """The notes of a file about its columns, so that its records come back as they were."""

    whole: list[str] = []
    """Columns of floats, where one without a fraction stands for a whole number."""
    nulls: list[str] = []
    """Columns where null is a null of the document, and not a field that it lacks."""


def told_in(schema: Any) -> Told:
    """Reads the notes from the metadata of a file. A file that others have written has none."""
    try:
        return msgspec.json.decode((schema.metadata or {}).get(_TOLD, b"{}"), type=Told)
    except (msgspec.MsgspecError, UnicodeError):
        return Told()


class ArrowSchema:
    """The columns of one output, whose types grow while `look` sees records ([1])."""

    def __init__(self, form: RecordForm, *, keeps_all: bool = False) -> None:
        """`keeps_all`: a record that its columns do not keep stands whole in one more ([4]); for that all records must
        have been seen."""
        self._pa = load_pyarrow()
        self._form = form
        self._shapes: dict[Path, Shape] = {}
        for name in form.select:
            if not name.startswith("@"):
                self._shapes[steps(name)] = Shape()
        self._chosen = bool(form.select)
        self._keeps_all = keeps_all and not self._chosen and not form.keys_only
        self._flat = CsvKept(form) if form.message_type in ("fix", "nvfix") else None
        self._documents = 0
        self._lacks = False  # a payload is no document, or does not become one exactly
        self._types: dict[Path, DataType] | None = None
        self.left_out: dict[str, None] = {}
        """Names of fields without a column."""

    def look(self, payloads: Sequence[bytes]) -> None:
        """Makes the columns wide enough for these payloads."""
        if self._form.keys_only or (self._chosen and not self._shapes):
            return
        self._types = None
        if self._flat is not None:
            self._flat.look(payloads)
        documents = []
        for payload in payloads:
            document, is_exact = _document(payload, self._form)
            self._lacks |= not is_exact
            if document is not None:
                documents.append(document)
        self._documents += len(documents)
        if self._chosen:
            for path, shape in self._shapes.items():
                shape.add([_at(document, path) for document in documents])
            return
        columns: dict[str, list[object]] = {}
        for document in documents:
            for name, value in document.items():
                columns.setdefault(name, []).append(value)
        for name, values in columns.items():
            self._shapes.setdefault((name,), Shape()).add(values)

    def _kinds(self) -> dict[Path, DataType]:
        """The type of each column; None: the text of the values."""
        if self._types is None:
            self._types = {path: shape.kind(self._pa) for path, shape in self._shapes.items()}
        return self._types

    def _has_nulls(self, path: Path) -> bool:
        """True if a null is one of the document: each has the field."""
        shape = self._shapes[path]
        return NoneType in shape.kinds and shape.count == self._documents

    @property
    def _has_payloads(self) -> bool:
        """True if there is a column of whole payloads ([4])."""
        if not self._keeps_all or self._form.message_type == "binary":
            return False
        if self._flat is not None:
            return self._flat.lacks
        return self._lacks or not all(
            shape.keeps_all(self._kinds()[path], whole=shape.is_whole)
            and (NoneType not in shape.kinds or self._has_nulls(path))
            for path, shape in self._shapes.items()
        )

    def schema(self) -> Any:
        """The pyarrow.Schema of the records."""
        told = Told()
        if self._keeps_all:
            told.whole = [self._heading(path) for path, shape in self._shapes.items() if shape.is_whole]
            told.nulls = [self._heading(path) for path in self._shapes if self._has_nulls(path)]
        return self._pa.schema(
            [self._pa.field(name, kind) for name, kind in self._columns()],
            metadata={_TOLD: msgspec.json.encode(told)} if self._keeps_all else None,
        )

    def batch(self, columns: BatchColumns) -> Any:
        """The pyarrow.RecordBatch of some records. Raises a usage error for a value that does not fit ([2])."""
        pa = self._pa
        values = self._values(columns)
        arrays = []
        for name, kind in self._columns():
            try:
                arrays.append(self._array(values[name], kind))
            except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
                key = next(filter(None, map(self._unfit, columns.keys, values[name], repeat(kind))), columns.keys[0])
                raise click.ClickException(
                    f"a value of {display.safe(name)}, in the record {display.safe(key)}, does not fit the type {kind} "
                    f"of the first {RECORDS_LOOKED_AT:,} records ({display.safe(str(error))}); `sow export` looks at "
                    "all records first"
                ) from error
        return pa.record_batch(arrays, schema=self.schema())

    def _array(self, values: Sequence[object], kind: DataType) -> Any:
        """The values as a column. Given the type, Arrow would cut 2.5 to 2 and drop fields of objects ([2])."""
        pa = self._pa
        if type(values) is list and not (pa.types.is_timestamp(kind) or pa.types.is_string(kind)):
            shape = Shape()
            shape.add(values)
            if not shape.fits(pa, kind):
                found = shape.kind(pa)
                raise ValueError(f"it is {'of several types' if found is None else found}")
        return pa.array(values, kind)

    def _unfit(self, key: str, value: object, kind: DataType) -> str:
        """The key of a record whose value does not fit; empty: it fits."""
        try:
            self._array([value], kind)
        except (self._pa.ArrowException, OverflowError, TypeError, ValueError):
            return key
        return ""

    def _columns(self) -> list[tuple[str, DataType]]:
        pa = self._pa
        moment = pa.timestamp("us", tz="UTC")
        metadata = {
            "key": pa.string(), "version": pa.int64(), "publish_time": moment, "expire_time": moment,
            "origin": pa.string(), "sequence": pa.int64(),
        }  # fmt: skip
        fields = {path: pa.string() if kind is None else _filled(pa, kind) for path, kind in self._kinds().items()}
        if self._chosen:
            return [
                (f"_{name[1:]}", metadata[name[1:]]) if name[0] == "@" else (heading(steps(name)), fields[steps(name)])
                for name in self._form.select
            ]
        named = [(self._heading(path), kind) for path, kind in fields.items()]
        of_payloads = pa.string() if self._form.payload_is_json else pa.binary()
        if self._has_payloads:
            named.append(("_payload", of_payloads))
        elif not named and not self._form.keys_only:
            named = [("_payload" if self._form.payload_is_json else "payload", of_payloads)]
        return [("_key", metadata["key"]), *named, *[(f"_{name}", metadata[name]) for name in METADATA[1:]]]

    def _heading(self, path: Path) -> str:
        """The name of a field's column. A single column `payload` stands for whole payloads, except those of JSON."""
        is_whole = path == ("payload",) and len(self._shapes) == 1 and not self._form.payload_is_json
        return "/payload" if is_whole else heading(path)

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
        is_text = self._form.payload_is_json
        if not self._shapes:
            whole = [one.decode() if is_text else one for one in columns.payloads]
            return values | {"payload": whole, "_payload": whole}
        read = [_document(payload, self._form) for payload in columns.payloads]
        documents = [document for document, _ in read]
        if not self._chosen:
            for document in documents:
                if document and not all((name,) in self._shapes for name in document):
                    self.left_out.update((heading((name,)), None) for name in document if (name,) not in self._shapes)
        if self._has_payloads:
            kept = [self._keeps(payload, *one) for payload, one in zip(columns.payloads, read, strict=True)]
            values["_payload"] = [
                None if is_kept else payload.decode() if is_text else payload
                for is_kept, payload in zip(kept, columns.payloads, strict=True)
            ]
        for path, kind in self._kinds().items():
            found = [_at(document, path) for document in documents]
            is_string = kind is None or self._pa.types.is_string(kind) or self._pa.types.is_null(kind)
            values[self._heading(path)] = [PayloadForm.text(one) for one in found] if is_string else found
        return values

    def _keeps(self, payload: bytes, document: dict[str, object] | None, is_exact: bool) -> bool:
        """True if the columns give this payload back."""
        if document is None or not is_exact:
            return False
        if self._flat is not None:
            return self._flat.keeps(payload)
        for name, value in document.items():
            path = (name,)
            shape = self._shapes[path]
            if value is None and not self._has_nulls(path):
                return False
            if not shape.keeps(value, self._kinds()[path], whole=shape.is_whole):
                return False
        return True


class ArrowFile:
    """A Parquet file, or an Arrow file or stream, that is written batch by batch."""

    def __init__(self, sink: IO[bytes], schema: ArrowSchema, *, is_parquet: bool, is_stream: bool = False) -> None:
        """`is_stream`: Arrow in the form for pipes."""
        self._schema = schema
        pa = load_pyarrow()
        target = pa.PythonFile(Sink(sink), mode="w")
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


def write_rows(sink: IO[bytes], columns: Any, batches: Iterable[Any], *, is_parquet: bool) -> None:
    """Writes batches of Arrow with this schema: as a Parquet file, or as a stream of Arrow."""
    pa = load_pyarrow()
    target = pa.PythonFile(Sink(sink), mode="w")
    make = import_module("pyarrow.parquet").ParquetWriter if is_parquet else pa.ipc.new_stream
    with make(target, columns) as writer:
        for batch in batches:
            writer.write_batch(batch)


class Sink:
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


def read_values(pa: ModuleType, column: Any) -> list[object]:
    """The values of a column of a file; an `Unread` in place of one that Python does not have."""
    kind = _in_micros(pa, column.type)
    try:
        values: list[object] = (column if kind == column.type else column.cast(kind)).to_pylist(
            maps_as_pydicts="strict"
        )
    except (pa.ArrowException, KeyError, OverflowError, TypeError, ValueError):
        return [_read_value(pa, column.slice(row, 1)) for row in range(len(column))]
    return values


def _read_value(pa: ModuleType, one: Any) -> object:
    try:
        return _as_python(pa, one[0])
    except (pa.ArrowException, KeyError, OverflowError, TypeError, ValueError) as error:
        is_time = pa.types.is_temporal(one.type)
        shown = one.cast(pa.string()) if is_time else one
        return Unread(str(shown.to_pylist()[0]), "time" if is_time else "json", str(error))


def _as_python(pa: ModuleType, scalar: Any) -> object:
    """The value of a scalar, with a text for a time that is finer than a microsecond. A text that is no UTF-8 has its
    bytes as surrogates, as that of CSV."""
    kind, types = scalar.type, pa.types
    if not scalar.is_valid:
        return None
    if types.is_dictionary(kind):
        return _as_python(pa, scalar.value)
    if types.is_struct(kind):
        return {field.name: _as_python(pa, scalar[number]) for number, field in enumerate(_fields(kind))}
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return [_as_python(pa, one) for one in scalar.values]
    if types.is_map(kind):
        if types.is_nested(kind.key_type):
            raise ValueError("a map has keys that are no texts")
        pairs = [(_as_python(pa, one[0]), _as_python(pa, one[1])) for one in scalar.values]
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a map has a key twice")
        return dict(pairs)
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        text: str = scalar.as_buffer().to_pybytes().decode("utf-8", "surrogateescape")
        return text
    if _in_micros(pa, kind) == kind:
        value: object = scalar.as_py()
        return value
    micros, nanos = divmod(scalar.value, 1_000)
    coarse = pa.scalar(micros, pa.int64()).cast(_in_micros(pa, kind)).as_py()
    if not nanos:
        return coarse
    if isinstance(coarse, timedelta):
        seconds, rest = divmod(abs(scalar.value), 10**9)
        return f"{'-' * (scalar.value < 0)}PT{seconds}.{rest:09}S"
    at = coarse.isoformat(timespec="microseconds")
    fraction = at.index(".") + 7
    text = f"{at[:fraction]}{nanos:03}{at[fraction:].replace('+00:00', 'Z')}"  # as JSON of a datetime
    return FineTime.of(text, scalar.value) if types.is_timestamp(kind) and kind.tz else text


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
        return pa.map_(_in_micros(pa, kind.key_type), kind.item_field.with_type(_in_micros(pa, kind.item_type)))
    if types.is_dictionary(kind) and (inside := _in_micros(pa, kind.value_type)) != kind.value_type:
        return inside
    return kind


def check_types(pa: ModuleType, schema: Any) -> None:
    """Raises a usage error where a column has values that only the program knows which has written them: the periods of
    pandas are ordinals, and the opaque types of DuckDB bytes. And for times in a zone that this machine lacks."""
    for field in schema:
        if name := foreign_type(field):
            raise click.UsageError(
                f"the column {display.safe(field.name)} has the type {display.safe(name)}, whose values this command "
                "does not know; write it as text"
            )
        for kind in _with_zones(pa, field.type):
            try:
                pa.scalar(0, kind).as_py()
            except (pa.ArrowException, LookupError, ValueError) as error:
                raise click.UsageError(
                    f"the column {display.safe(field.name)} has times of the zone {display.safe(kind.tz)}, which this "
                    "machine does not know; install its time zones (pip install tzdata), or write the times in UTC"
                ) from error


def _with_zones(pa: ModuleType, kind: DataType) -> Iterator[DataType]:
    """The types of times with a zone, in this type or below it."""
    if pa.types.is_timestamp(kind) and kind.tz:
        yield kind
    elif pa.types.is_dictionary(kind):
        yield from _with_zones(pa, kind.value_type)
    else:
        for number in range(kind.num_fields):
            yield from _with_zones(pa, kind.field(number).type)


def _document(payload: bytes, form: RecordForm) -> tuple[dict[str, object] | None, bool]:
    """The fields of a payload as Python values, and whether they are it exactly: a float has 17 digits. A number beyond
    a float is its text."""
    if form.message_type != "json":
        found = form.payloads.fields(payload)
        if found is None:
            return None, False
        return {name: PayloadForm.in_columns(one) for name, one in found.items()}, all(map(is_plain, found.values()))
    try:
        return _decode_fields(payload), _LONG_FLOAT.search(payload) is None or _is_exact(payload)
    except msgspec.MsgspecError:
        raw = form.payloads.fields(payload)
    return None if raw is None else {name: _value(one) for name, one in raw.items()}, False


def _is_exact(payload: bytes) -> bool:
    """True if floats hold the numbers of a document."""
    kept = True

    def number(text: str) -> float:
        nonlocal kept
        kept = kept and Decimal(text) == Decimal(repr(float(text)))
        return 0.0

    json.loads(payload, parse_float=number)
    return kept


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
