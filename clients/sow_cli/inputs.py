"""Files of records as input: lines, a JSON document, CSV, Parquet and Arrow.

[1]  Memory is bounded by a chunk of lines, or a batch of rows. A JSON document, and Parquet from a pipe, are read
     whole.
[2]  One bad record does not stop the others: it comes in its place, as `BadLine`, with its reason.
[3]  The columns that an export writes are read as the same record: fields have their paths as names, and metadata are
     no fields (columns [3]). A cell or a value that is empty or null is no field.
"""

from __future__ import annotations

import base64
import csv
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from io import BufferedReader, BytesIO
from itertools import chain, islice
from json import JSONDecoder
from math import isfinite
from typing import Any, Final, Literal, Protocol, TypeAlias, cast, get_args

import click
import msgspec

from sow_cli import cells, packing, recoding
from sow_cli.cells import Quoted
from sow_cli.columns import METADATA_COLUMNS, Path, below, path_of
from sow_cli.kept import agree, named_payload
from sow_cli.lines import NEVER_MICROS, BadLine, Item, Parse, canonical_text, chunks, document, is_record, no_record
from sow_client import MessageTypeName, PayloadForm

Kind: TypeAlias = Literal["ndjson", "json", "csv", "parquet", "arrow"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
ColumnType: TypeAlias = Literal["text", "number", "int", "bool", "json"]
COLUMN_TYPES: Final[tuple[ColumnType, ...]] = get_args(ColumnType)
Outcome: TypeAlias = Item | BadLine | None
"""A record, a bad one, or nothing: an empty line."""

_SUFFIXES: Final[Mapping[str, Kind]] = {
    ".csv": "csv",
    ".tsv": "csv",
    ".json": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
_SEPARATOR: Final = re.compile("sep=(.)")
_INDEX: Final = re.compile(r"__index_level_\d+__")
"""The name of a column where pandas keeps an index that has no name: no field."""
_JSON_BYTES_MAX: Final = 2**30
_MARK: Final = "\ufeff".encode()
"""The mark that programs of Windows write in front of UTF-8. It belongs to no record."""
_BATCH_ROWS: Final = 10_000
_ROWS_LOOKED_AT: Final = 1_000
_UNQUOTED: Final = {f"_{name}" for name in ("version", "publish_time_micros", "expire_time_micros", "sequence")}
_NO_UTF8: Final = "a text is no UTF-8; see --encoding"
_NO_SPACE: Final = re.compile(r"\S")
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_INT: Final = re.compile(r"-?(?:0|[1-9][0-9]*)")
_STAMP_DIGITS_MIN: Final = 10
"""The digits of a whole second of today: an expire time with an exponent and fewer has lost some."""
_NULL: Final = msgspec.Raw(b"null")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_encode: Final = msgspec.json.Encoder(decimal_format="number").encode


class Input(Protocol):
    """Records in the order of the input, a chunk at a time."""

    unit: str
    """The name of a position: line or record."""
    total: int | None
    """The size of the input, for a progress bar; None: unknown."""

    def __iter__(self) -> Iterator[tuple[list[Outcome], int]]:
        """Chunks: their outcomes, and their part of `total`."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a topic's records are made of."""

    message_type: MessageTypeName = "json"
    separator: str = "\x01"
    has_key: bool = False
    """True: the key comes from fields of the payload."""
    rejects: bool = False
    """True: the topic refuses records with a lifetime, also with one that never ends (rule L3)."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How the user wants the input to be read."""

    kind: Kind | None = None
    """None: as the file's name and its first byte tell."""
    types: Mapping[str, ColumnType] = field(default_factory=dict)
    """The types of columns of CSV; under "" that of all others. Without one, the first rows tell."""
    delimiter: str | None = None
    records: bool | None = None
    """True: lines are records; False: they are documents; None: as the first line tells."""
    record: Parse | None = None
    """Makes a record of a line that is one."""
    stamps: bool = False
    """True: records of an export keep their expire times."""
    absent: int | None = NEVER_MICROS
    """The expire time of those that have none."""
    encoding: str | None = None
    """Of a text; None: UTF-8, or as a mark in front of the text tells."""
    keyed: Parse | None = None
    """Gives a document its key."""
    keep_spaces: bool = False
    """True: spaces around a line belong to it."""


def opened(
    file: BufferedReader, name: str, parse: Parse, reading: Reading, target: Target, *, size: int | None
) -> Input:
    """The input of a file or a pipe of this name. `parse` is for lines; `size`: the bytes of the file, if known."""
    content = packing.unpacked(file, name, as_it_is=reading.keep_spaces)
    if content is not file:
        file, size = content, None
    suffix = packing.unpacked_name(name)[0].suffix.lower()
    kind = reading.kind or _SUFFIXES.get(suffix)
    if kind in ("parquet", "arrow"):
        return ArrowInput(file, reading, target, is_parquet=kind == "parquet")
    if not reading.keep_spaces:
        if not file.isatty():
            packing.refuse_others(file, name)
        file = recoding.recoded(file, name, reading.encoding)
    if reading.kind is None and kind in (None, "json"):
        is_text = target.message_type == "json" or not reading.keep_spaces
        kind = _kind_of_start(file, kind) if is_text and not file.isatty() else None
    if kind == "csv":
        delimiter = reading.delimiter or ("\t" if suffix == ".tsv" else None)
        return CsvInput(file, delimiter, reading, target, size=size)
    if kind == "json":
        return JsonInput(file, parse, reading, size=size)
    return LineInput(file, parse, reading, size=size)


def _kind_of_start(file: BufferedReader, named: Kind | None) -> Kind | None:
    """How a file begins: an array, which no line of its own is where topics have keys; for a file that is `named` JSON
    also one document over several lines, whose first line is no JSON. Anything else is lines."""
    start = file.peek(1).removeprefix(_MARK)
    if start.lstrip()[:1] == b"[":
        return "json"
    first, end, _ = start.partition(b"\n")
    return "json" if named and end and first.strip() and not is_json(first) else None


class LineInput:
    """Lines; those without a character other than spaces are nothing."""

    unit = "line"

    def __init__(self, file: BufferedReader, parse: Parse, reading: Reading, *, size: int | None) -> None:
        self.total = size
        self._file = file
        self._parse = parse
        self._reading = reading
        self._spaces = b"" if reading.keep_spaces else b" \t\r"

    def __iter__(self) -> Iterator[tuple[list[Outcome], int]]:
        is_text = bool(self._spaces)  # with --raw each byte belongs to a payload
        is_first = is_unknown = is_text
        for chunk in chunks(self._file, recoding.line_end(self._file) if is_text else b"\n"):
            if is_first and chunk:
                chunk[0] = chunk[0] and chunk[0].removeprefix(_MARK)
                is_first = False
            if is_unknown and (first := next(filter(None, chunk), None)) is not None:
                self._parse = parse_of(first, self._parse, self._reading)
                is_unknown = False
            yield self._outcomes(chunk), sum([0 if line is None else len(line) + 1 for line in chunk])

    def _outcomes(self, lines: list[bytes | None]) -> list[Outcome]:
        parse, spaces = self._parse, self._spaces
        outcomes: list[Outcome] = []
        add = outcomes.append
        for line in lines:  # without further calls: there may be millions
            if line is None:
                add(BadLine("PAYLOAD_TOO_LARGE", "the line is longer than 48 MiB"))
                continue
            text = line.strip(spaces) if spaces else line
            try:
                add(parse(text) if text else None)
            except BadLine as bad:
                bad.text = text
                add(bad)
        return outcomes


def _one_after_another(whole: bytes) -> list[bytes]:
    """Documents over several lines each, as `jq .` writes them; none where the text is something else."""
    decode, at, documents = JSONDecoder().raw_decode, 0, []
    try:
        text = whole.decode()
        if is_json(text.partition("\n")[0].encode()):
            return []  # lines, of which one is bad
        while at < len(text.rstrip()):
            at = _NO_SPACE.search(text, at).start()  # type: ignore[union-attr]  # there is more than space
            end = decode(text, at)[1]
            documents.append(text[at:end].encode())
            at = end
    except ValueError:
        return []
    return documents


def parse_of(first: bytes, parse: Parse, reading: Reading) -> Parse:
    """What makes a record of each line, if this is the first one: lines that `sow export` and `sow query` have written
    are records."""
    if reading.records is not None or reading.record is None:
        return parse
    if is_record(first):
        return reading.record
    return no_record if parse is document else parse


def _attempted(parse: Parse, text: bytes) -> Outcome:
    try:
        return parse(text)
    except BadLine as bad:
        bad.text = text
        return bad


class JsonInput:
    """A JSON array of documents, or one document over any number of lines; anything else is lines ([1])."""

    unit = "record"

    def __init__(self, file: BufferedReader, parse: Parse, reading: Reading, *, size: int | None) -> None:
        self.total = size
        self._file = file
        self._parse = parse
        self._reading = reading

    def __iter__(self) -> Iterator[tuple[list[Outcome], int]]:
        whole = self._file.read(_JSON_BYTES_MAX + 1)
        if len(whole) > _JSON_BYTES_MAX:
            raise click.UsageError("a JSON array of more than 1 GiB; make lines of it: jq -c '.[]'")
        whole = whole.removeprefix(_MARK)
        if whole.lstrip()[:1] == b"[":
            try:
                documents = [bytes(one) for one in msgspec.json.decode(whole, type=list[msgspec.Raw])]
            except msgspec.DecodeError as error:
                raise click.UsageError(f"the input is no JSON array: {error}") from error
        elif is_json(whole):
            documents = [whole]
        else:
            documents = _one_after_another(whole) or [line for line in whole.split(b"\n") if line.strip()]
        parse = parse_of(documents[0], self._parse, self._reading) if documents else self._parse
        for start in range(0, len(documents), _BATCH_ROWS):
            batch = documents[start : start + _BATCH_ROWS]
            yield [_attempted(parse, one) for one in batch], round(len(whole) * len(batch) / len(documents))


class CsvInput:
    """CSV whose first line has the names of the fields."""

    unit = "record"

    def __init__(
        self, file: BufferedReader, delimiter: str | None, reading: Reading, target: Target, *, size: int | None
    ) -> None:
        """`delimiter`: None: as the first line tells."""
        self.total = size
        self._file = file
        self._delimiter = delimiter
        self._reading = reading
        self._target = target
        self._read = 0
        self._in_chunk = 0
        self._header: list[str] = []
        self._number = -1
        """The column of a number of metadata; -1: there is none."""

    def __iter__(self) -> Iterator[tuple[list[Outcome], int]]:
        lines = self._lines()
        first_line = next(lines, "")
        delimiter = self._delimiter or _delimiter_in(first_line)
        if (told := _SEPARATOR.fullmatch(first_line.rstrip("\r"))) is not None:  # a line for Excel, before the names
            first_line, delimiter = next(lines, ""), self._delimiter or told[1]
        reader = cells.rows(chain([first_line], lines), delimiter)
        header = next(reader, [])
        if isinstance(header, csv.Error):
            raise click.UsageError(f"the first line is no CSV: {header}")
        if header and (unknown := self._reading.types.keys() - {"", *header}):
            raise click.UsageError(f"--types: the input has no column {min(unknown)!r}")
        maker = RecordMaker(header, self._reading, self._target)
        self._header = header
        self._number = next((number for number, name in enumerate(header) if name in _UNQUOTED), -1)
        first = list(islice(self._rows(reader), _ROWS_LOOKED_AT))
        is_own = _is_of_an_export(header, first)
        makers = [self._maker(name, number, first, is_own) for number, name in enumerate(header)]
        yield [_row(one, makers, maker) for one in first], self._taken()
        while rows := list(islice(self._rows(reader), _BATCH_ROWS)):
            yield [_row(one, makers, maker) for one in rows], self._taken()

    def _lines(self) -> Iterator[str]:
        is_first = True
        for chunk in chunks(self._file, recoding.line_end(self._file)):
            self._in_chunk = len(chunk)
            for line in chunk:
                self._in_chunk -= 1
                if line is None:
                    raise click.UsageError("a line of the CSV is longer than 48 MiB")
                self._read += len(line) + 1
                text = line.decode("utf-8", "surrogateescape")
                yield text.removeprefix("\ufeff") if is_first else text
                is_first = False

    def _rows(self, reader: Iterator[cells.Row]) -> Iterator[cells.Row]:
        """Rows, to the end of the chunk that was read: a pipe may have no more for a while. In exports that were put
        into one file the names of the columns come again."""
        for row in reader:
            yield [] if self._number >= 0 and isinstance(row, list) and self._is_header(row) else row
            if not self._in_chunk:
                return

    def _is_header(self, row: list[str]) -> bool:
        if len(row) == len(self._header):
            if row[self._number] not in _UNQUOTED:
                return False
            if row == self._header:
                return True
        elif _UNQUOTED.isdisjoint(row):
            return False
        raise click.UsageError("names of other columns come behind the first records; publish each export by itself")

    def _taken(self) -> int:
        read, self._read = self._read, 0
        return read

    def _maker(self, name: str, number: int, rows: Iterable[cells.Row], is_own: bool) -> Callable[[str], object]:
        """What makes the value of a cell of this column."""
        types = self._reading.types
        known = types.get(name) or types.get("")
        if known is not None or name in METADATA_COLUMNS:
            return _cell(known or "text")
        found = [row[number] for row in rows if isinstance(row, list) and len(row) > number and row[number]]
        if is_own:
            plain = [cell for cell in found if type(cell) is not Quoted]
            if not plain:
                return _own_cell(are_values=False)
            are_values = all(cells.looks_like_a_value(cell) for cell in plain)
            # An export quotes the texts of a column that has values, too. Where one stands without quotation marks,
            # another program has written the file anew, and nothing but a text fits all cells.
            return _own_cell(are_values=True) if are_values else _cell("text")
        if not found:
            return _cell("text")
        if all(_NUMBER.fullmatch(cell) for cell in found):
            return _cell("number")
        if all(cell in ("true", "false") for cell in found):
            return _cell("bool")
        return _cell("json" if all(cell[0] in "{[" and cells.is_json(cell) for cell in found) else "text")


def _delimiter_in(first_line: str) -> str:
    """The delimiter that the names of the columns tell. Excel writes semicolons where numbers have a decimal comma, and
    tabs as "Unicode text"."""
    outside = re.sub(r'"[^"]*"', "", first_line)
    return next((one for one in (",", ";", "\t") if one in outside), ",")


def _is_of_an_export(header: Sequence[str], rows: Iterable[cells.Row]) -> bool:
    """Whether `sow` has written the CSV, so that a cell in quotation marks is a text, whatever it looks like: it has
    the numbers of metadata, without such marks. Other programs may put them around all cells."""
    numbers = [number for number, name in enumerate(header) if name in _UNQUOTED]
    whole = [row for row in rows if isinstance(row, list) and len(row) == len(header)]
    return bool(numbers) and not any(type(row[number]) is Quoted for row in whole for number in numbers)


def _row(row: cells.Row, makers: Sequence[Callable[[str], object]], maker: RecordMaker) -> Outcome:
    if isinstance(row, csv.Error):
        return BadLine("PAYLOAD_MALFORMED", f"no CSV: {row}")
    if not row:
        return None
    if len(row) != len(makers):
        return BadLine("PAYLOAD_MALFORMED", f"has {len(row)} cells where the first line has {len(makers)}")
    values: list[object] = []
    for number, (cell, convert) in enumerate(zip(row, makers, strict=True)):
        try:
            values.append(convert(cell) if cell or type(cell) is Quoted else None)
        except UnicodeError:
            return BadLine("PAYLOAD_MALFORMED", f"column {maker.names[number]}: {_NO_UTF8}")
        except ValueError as error:
            return BadLine("PAYLOAD_MALFORMED", f"column {maker.names[number]}: {cell[:40]!r} is {error}; see --types")
    return maker.outcome(values)


def _own_cell(*, are_values: bool) -> Callable[[str], object]:
    """What makes a value of the text of a cell in a file of an export. `are_values`: a cell without quotation marks is
    a number, true, false or JSON; else it may be a text as well. In quotation marks it is a text, or an object or an
    array: the text of one stands in `_payload` (`CsvKept`)."""

    def made(cell: str) -> object:
        if type(cell) is Quoted:
            return msgspec.Raw(_bytes(cell)) if cell[:1] in ("{", "[") and cells.is_json(cell) else str(cell)
        if cells.looks_like_a_value(cell):
            return msgspec.Raw(_bytes(cell))
        if are_values:
            raise ValueError("not a number, true, false or JSON")
        return cell

    return made


def _cell(kind: ColumnType) -> Callable[[str], object]:
    """What makes a value of the text of a cell; raises ValueError. Numbers keep their digits."""

    def number(text: str) -> object:
        if not text:
            return None  # `""`: some programs quote all cells, also empty ones
        if not (_INT if kind == "int" else _NUMBER).fullmatch(text):
            raise ValueError("not a whole number" if kind == "int" else "not a number")
        return msgspec.Raw(text.encode())

    def boolean(text: str) -> object:
        if not text:
            return None
        if text not in ("true", "false"):
            raise ValueError("not true or false")
        return text == "true"

    def json(text: str) -> object:
        if not text:
            return None
        data = _bytes(text)
        if not is_json(data):
            raise ValueError("not JSON")
        return msgspec.Raw(data)

    makers: dict[ColumnType, Callable[[str], object]] = {
        "text": str,
        "number": number,
        "int": number,
        "bool": boolean,
        "json": json,
    }
    return makers[kind]


def _bytes(cell: str) -> bytes:
    """The bytes of a cell, as they are in the file."""
    return cell.encode("utf-8", "surrogateescape")


def is_json(text: bytes) -> bool:
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except msgspec.DecodeError:
        return False
    return True


class ArrowInput:
    """The rows of a Parquet file, or of an Arrow file or stream."""

    unit = "record"

    def __init__(self, file: BufferedReader, reading: Reading, target: Target, *, is_parquet: bool) -> None:
        from importlib import import_module

        from sow_cli.arrow import check_types, load_pyarrow, told_in

        pa = load_pyarrow()
        self.total: int | None = None
        self._reading = reading
        self._target = target
        source: Any = file if file.seekable() else BytesIO(file.read())
        try:
            if is_parquet:
                table = import_module("pyarrow.parquet").ParquetFile(source)
                self.total = table.metadata.num_rows
                schema = table.schema_arrow
                self._batches: Iterable[Any] = table.iter_batches(batch_size=_BATCH_ROWS)
            else:
                is_file = source.read(6) == b"ARROW1"
                source.seek(0)
                opened_file = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(source)
                schema = opened_file.schema
                number = opened_file.num_record_batches if is_file else 0
                self._batches = (opened_file.get_batch(one) for one in range(number)) if is_file else opened_file
        except (pa.ArrowException, OSError, ValueError) as error:
            raise click.UsageError(f"cannot read the input: {error}") from error
        check_types(schema)
        self._columns = [number for number, name in enumerate(schema.names) if not _INDEX.fullmatch(name)]
        self._names: list[str] = [schema.names[number] for number in self._columns]
        self._told = told_in(schema)

    def _own(self, name: str, values: list[object]) -> list[object]:
        """The values of a column of a file that `sow` has written, as they were (`arrow.Told`)."""
        if name in self._told.whole:
            return [int(one) if type(one) is float and one.is_integer() else one for one in values]
        return [_NULL if one is None else one for one in values] if name in self._told.nulls else values

    def __iter__(self) -> Iterator[tuple[list[Outcome], int]]:
        maker = RecordMaker(self._names, self._reading, self._target)
        from sow_cli.arrow import load_pyarrow, read_values

        pa = load_pyarrow()
        batches = iter(self._batches)
        read = 0
        while True:
            try:
                batch = next(batches, None)
            except (pa.ArrowException, OSError) as error:
                raise click.UsageError(f"cannot read the input after record {read}: {error}") from error
            if batch is None:
                return
            columns = [
                self._own(name, read_values(pa, name, one))
                for name, one in zip(self._names, [batch.column(number) for number in self._columns], strict=True)
            ]
            yield [_first_bad(row) or maker.outcome(row) for row in zip(*columns, strict=True)], batch.num_rows
            read += batch.num_rows


def _first_bad(row: Sequence[object]) -> BadLine | None:
    return next((one for one in row if type(one) is BadLine), None)


class RecordMaker:
    """Makes records of rows whose columns have names ([3])."""

    def __init__(self, names: Sequence[str], reading: Reading, target: Target) -> None:
        """Raises a usage error for a name that is no field."""
        self.names = names
        self._target = target
        self._keyed = reading.keyed
        self._absent = reading.absent
        self._paths: list[tuple[int, Path]] = []
        self._key = self._expires = self._payload = self._whole = -1
        for number, name in enumerate(names):
            metadata = METADATA_COLUMNS.get(name)
            if metadata is None:
                self._paths.append((number, self._path(name)))
            elif metadata == "key" and not target.has_key:
                self._key = number
            elif metadata == "expire_time" and reading.stamps:
                self._expires = number
            elif metadata == "payload":
                self._whole = number
        if len(set(names)) < len(names):
            twice = next(name for name in names if list(names).count(name) > 1)
            raise click.UsageError(f"the column {twice!r} is there twice")
        paths = {path for _, path in self._paths}
        for number, path in self._paths:
            if any(path[:steps] in paths for steps in range(1, len(path))):
                raise click.UsageError(f"the column {names[number]!r} is inside the field of another column")
        fields = [names[number] for number, _ in self._paths]
        if target.message_type == "binary" or (target.message_type != "json" and fields == ["payload"]):
            self._payload = next((number for number, path in self._paths if path == ("payload",)), -1)
            if self._payload < 0:
                raise click.UsageError("a binary topic needs a column payload, and the input has none")
        self._form = PayloadForm(target.message_type, target.separator)

    def _path(self, name: str) -> Path:
        try:
            path = path_of(name)
        except ValueError as error:
            raise click.UsageError(f"the column {name!r}: {error}") from error
        if not name:
            raise click.UsageError(f"column {list(self.names).index('') + 1} of {len(self.names)} has no name")
        return path

    def outcome(self, values: Sequence[object]) -> Outcome:
        """The record of a row, whose values are None where there is none."""
        try:
            data = self._data(values)
            key = None if self._key < 0 else _key_text(values[self._key], self.names[self._key])
            if key is None and self._key >= 0 and self._keyed is None:
                return BadLine("KEY_REQUIRED", f"column {self.names[self._key]} is empty")
            item = Item(data, key, None if self._expires < 0 else self._stamp(values[self._expires]))
            if self._keyed is not None:
                return self._keyed(data)._replace(expire_time_micros=item.expire_time_micros)
        except BadLine as bad:
            return bad
        except UnicodeEncodeError:
            return BadLine("PAYLOAD_MALFORMED", _NO_UTF8)
        except (TypeError, ValueError, msgspec.MsgspecError) as error:
            return BadLine("PAYLOAD_MALFORMED", str(error))
        return item

    def _stamp(self, value: object) -> int | None:
        stamp = _micros(value)
        return self._absent if stamp is None else stamp

    def _data(self, values: Sequence[object]) -> bytes:
        if self._payload >= 0:
            return _bytes_of(values[self._payload])
        if self._whole >= 0 and (whole := values[self._whole]) is not None:
            return self._whole_payload(whole, values)
        document: dict[str, object] = {}
        for number, path in self._paths:
            value = values[number]
            if value is None:
                continue
            inside = document
            for name in path[:-1]:
                inside = cast(dict[str, object], inside.setdefault(name, {}))
            inside[path[-1]] = _cleaned(value, self.names[number])
        if self._target.message_type in ("fix", "nvfix"):
            return named_payload(document, self._form)
        data = _encode(document)
        return data if self._target.message_type == "json" else _msgpack(msgspec.json.decode(data))

    def _whole_payload(self, whole: object, values: Sequence[object]) -> bytes:
        """The payload that stands in a column of its own; it must be the one that the other columns show (kept [2])."""
        is_json_text = self._target.message_type == "json" and not isinstance(whole, bytes)
        data = _bytes(_text_of(whole)) if is_json_text else _bytes_of(whole)
        found = self._form.fields(data) or {}
        for number, path in self._paths:
            if not agree(below(found, path), values[number]):
                raise BadLine(
                    "PAYLOAD_MALFORMED",
                    f"column {self.names[number]}: it is another value than in the record of the column _payload; "
                    "empty _payload to publish the columns",
                )
        return data


def _msgpack(document: dict[str, object]) -> bytes:
    try:
        return msgspec.msgpack.encode(document)
    except OverflowError:
        name = next(name for name, value in document.items() if not _fits_msgpack(value))
        message = f"column {name}: MessagePack has no integer of more than 64 bits"
        raise BadLine("PAYLOAD_MALFORMED", message) from None


def _fits_msgpack(value: object) -> bool:
    try:
        msgspec.msgpack.encode(value)
    except OverflowError:
        return False
    return True


def _text_of(cell: object) -> str:
    return bytes(cell).decode("utf-8", "surrogateescape") if isinstance(cell, msgspec.Raw) else str(cell)


def _bytes_of(cell: object) -> bytes:
    return cell if isinstance(cell, bytes) else base64.b64decode(_text_of(cell) if cell else "", validate=True)


def _cleaned(value: object, name: str) -> object:
    """The value without the nulls of objects ([3]). JSON has no NaN and no infinity, and a null in their place would be
    another value."""
    match value:
        case dict():
            return {field: _cleaned(one, name) for field, one in value.items() if one is not None}
        case list():
            return [_cleaned(one, name) for one in value]
        case float() if not isfinite(value):
            finite = False
        case Decimal():
            finite = value.is_finite()
        case _:
            finite = True
    if not finite:
        raise BadLine("PAYLOAD_MALFORMED", f"column {name}: {value} is no number of JSON")
    return value


def _key_text(value: object, name: str) -> str | None:
    """The key that the server would make of a document with this value."""
    if value is None or isinstance(value, str):
        return value
    return canonical_text(msgspec.json.decode(_encode(_cleaned(value, name))), name)


def _micros(value: object) -> int | None:
    """An expire time: microseconds, or a time with a zone; None: never."""
    if value is None or isinstance(value, int):
        return value
    moment = value if isinstance(value, datetime) else None
    if moment is None:
        text = bytes(value).decode() if isinstance(value, msgspec.Raw) else str(value)
        if not text:
            return None  # `""`: some programs quote all cells, also empty ones
        if text.isdecimal():
            return int(text)
        if _NUMBER.fullmatch(text) and (number := Decimal(text)) == number.to_integral_value():
            if "e" in text.lower() and len(number.as_tuple().digits) < _STAMP_DIGITS_MIN:
                raise ValueError(f"the expire time {text} is rounded, as spreadsheets do; empty or remove its column")
            return int(number)  # pandas has floats for whole numbers beside missing ones
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise ValueError(f"the expire time {text!r} is no time: microseconds, or ISO 8601 with a zone") from None
    if moment.tzinfo is None:
        raise ValueError(f"the expire time {moment.isoformat()} has no time zone")
    return (moment - _EPOCH) // timedelta(microseconds=1)
