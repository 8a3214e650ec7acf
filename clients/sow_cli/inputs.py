"""Files of records as input: lines, a JSON document, CSV, Parquet and Arrow.

[1]  Memory is bounded by a chunk of lines, or a batch of rows. A JSON document, and Parquet from a pipe, are read
     whole.
[2]  One bad record does not stop the others: it comes in its place, as `BadLine`, with its reason.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BufferedReader, BytesIO
from itertools import chain, islice
from json import JSONDecoder
from typing import Any, Final, Protocol

import click
import msgspec

from sow_cli import cells, packing, recoding
from sow_cli.arguments import is_utf8
from sow_cli.cell_values import CONVERT, NO_UTF8, CellType
from sow_cli.cells import BadRow, Quoted
from sow_cli.columns import INDEX, METADATA_COLUMNS
from sow_cli.display import counted, safe
from sow_cli.lines import BadLine, Parse, chunks, document, is_record, is_refused, no_record
from sow_cli.row_records import NULL, Kind, Outcome, Reading, RecordMaker, Target

_SUFFIXES: Final[Mapping[str, Kind]] = {
    ".csv": "csv",
    ".tsv": "csv",
    ".json": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
_SEPARATOR: Final = re.compile("sep=(.)")
_JSON_BYTES_MAX: Final = 2**30
_MARK: Final = "\ufeff".encode()
"""The mark that programs of Windows write in front of UTF-8. It belongs to no record."""
_BATCH_ROWS: Final = 10_000
_ROWS_LOOKED_AT: Final = 1_000
_UNQUOTED: Final = {f"_{name}" for name in ("version", "publish_time_micros", "expire_time_micros", "sequence")}
_NO_SPACE: Final = re.compile(r"\S")


class Input(Protocol):
    """Records in the order of the input, a chunk at a time."""

    unit: str
    """The name of a position: line or record."""
    total: int | None
    """The size of the input, for a progress bar; None: unknown."""

    def __iter__(self) -> Iterator[tuple[list[Outcome], int]]:
        """Chunks: their outcomes, and their part of `total`."""


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
    return "json" if named and end and first.strip() and not cells.is_json(first) else None


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
        if cells.is_json(text.partition("\n")[0].encode()):
            return []  # lines, of which one is bad
        while at < len(text.rstrip()):
            at = _NO_SPACE.search(text, at).start()  # type: ignore[union-attr]  # there is more than space
            end = decode(text, at)[1]
            documents.append(text[at:end].encode())
            at = end
    except (ValueError, RecursionError):
        return []
    return documents


def parse_of(first: bytes, parse: Parse, reading: Reading) -> Parse:
    """Chooses the function that makes a record of each line, by the first one: lines that `sow export`, `sow query` and
    --errors have written are records."""
    if reading.records is not None or reading.record is None:
        return parse
    if is_refused(first) or (reading.keyed is None and is_record(first)):
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
            except (msgspec.DecodeError, RecursionError) as error:
                raise click.UsageError(f"the input is no JSON array, or nested too deeply: {error}") from error
        elif cells.is_json(whole):
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
        if isinstance(header, BadRow):
            raise click.UsageError(f"the first line is no CSV: {header.message}")
        if not all(map(is_utf8, header)):  # no record would be one, nor a line of --errors
            raise click.UsageError("the first line, with the names of the columns, is no UTF-8; see --encoding")
        if header and (unknown := self._reading.types.keys() - {"", *header}):
            raise click.UsageError(
                f"--types: the input has no column {min(unknown)!r}; it has {safe(', '.join(header))}"
            )
        maker = RecordMaker(header, self._reading, self._target)
        self._header = header
        self._number = next((number for number, name in enumerate(header) if name in _UNQUOTED), -1)
        first = list(islice(self._rows(reader), _ROWS_LOOKED_AT))
        is_own = _is_of_an_export(header, first)
        kinds = [self._kind(name, number, first, is_own) for number, name in enumerate(header)]
        made = _CsvRecords(maker, kinds, delimiter).outcome
        yield list(map(made, first)), self._taken()
        while rows := list(islice(self._rows(reader), _BATCH_ROWS)):
            yield list(map(made, rows)), self._taken()

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

    def _kind(self, name: str, number: int, rows: Iterable[cells.Row], is_own: bool) -> CellType:
        """The type of the cells of this column."""
        types = self._reading.types
        if name in METADATA_COLUMNS:
            return types.get(name, "text")  # the type of all columns is that of fields
        known = types.get(name) or types.get("")
        if known is not None:
            return known
        found = [row[number] for row in rows if isinstance(row, list) and len(row) > number and row[number]]
        if is_own:
            plain = [cell for cell in found if type(cell) is not Quoted]
            if not plain:
                return "any"
            # An export quotes the texts of a column that has values, too. Where one stands without quotation marks,
            # another program has written the file anew, and nothing but a text fits all cells.
            return "value" if all(map(cells.looks_like_a_value, plain)) else "text"
        if not found:
            return "text"
        if all(cells.NUMBER.fullmatch(cell) for cell in found):
            return "number"
        if all(cell in ("true", "false") for cell in found):
            return "bool"
        return "json" if all(cell[0] in "{[" and cells.is_json(cell) for cell in found) else "text"


def _delimiter_in(first_line: str) -> str:
    """The delimiter that the names of the columns tell. Excel writes semicolons where numbers have a decimal comma, and
    tabs as "Unicode text"."""
    outside = re.sub(r'"[^"]*"', "", first_line)
    return next((one for one in (",", ";", "\t") if one in outside), ",")


def _is_of_an_export(header: Sequence[str], rows: Iterable[cells.Row]) -> bool:
    """True if `sow` has written the CSV, so that a cell in quotation marks is a text, whatever it looks like: it has
    the numbers of metadata, without such marks. Other programs may put them around all cells."""
    numbers = [number for number, name in enumerate(header) if name in _UNQUOTED]
    whole = [row for row in rows if isinstance(row, list) and len(row) == len(header)]
    return bool(numbers) and not any(type(row[number]) is Quoted for row in whole for number in numbers)


class _CsvRecords:
    """Makes records of the rows of a CSV."""

    def __init__(self, maker: RecordMaker, kinds: Sequence[CellType], delimiter: str) -> None:
        """`kinds`: the types of the columns."""
        self._maker = maker
        self._kinds = kinds
        self._makers = [CONVERT[kind] for kind in kinds]
        self._delimiter = delimiter

    def outcome(self, row: cells.Row) -> Outcome:
        """The record of a row."""
        if isinstance(row, BadRow):
            return self._no_row(f"no CSV: {row.message}", row.text)
        if not row:
            return None
        maker, makers = self._maker, self._makers
        if len(row) != len(makers):
            told = f"has {counted(len(row), 'cell')} where the first line has {len(makers)}"
            return self._no_row(told, cells.text_of(row, self._delimiter))
        values: list[object] = []
        try:
            for cell, convert in zip(row, makers, strict=True):
                values.append(convert(cell) if cell or type(cell) is Quoted else None)
        except ValueError:
            return self._bad_cells(row)
        return maker.outcome(values)

    def _bad_cells(self, row: Sequence[str]) -> BadLine:
        """A row with cells that are no values of the types of their columns; the first one is told."""
        values: list[object] = []
        told = ""
        types: dict[str, CellType] = {}
        for cell, name, kind in zip(row, self._maker.names, self._kinds, strict=True):
            try:
                values.append(CONVERT[kind](cell) if cell or type(cell) is Quoted else None)
            except ValueError as error:
                values.append(str(cell))
                types[name] = kind
                remedy = f"--types {shlex.quote(f'{name}=text')} keeps it, and an empty cell is no value"
                fault = NO_UTF8 if isinstance(error, UnicodeError) else f"{cell[:40]!r} is {error}; {remedy}"
                told = told or f"column {name}: {fault}"
        bad = BadLine("PAYLOAD_MALFORMED", told)
        bad.kept = self._maker.kept(values, types)
        return bad

    def _no_row(self, message: str, text: str) -> BadLine:
        bad = BadLine("PAYLOAD_MALFORMED", message)
        if text:
            bad.kept = self._maker.kept_text(text, self._kinds, self._delimiter)
        return bad


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
        if file.peek(4).startswith(b"FEA1"):
            raise click.UsageError("the input is a Feather file of version 1; write one of version 2, which is Arrow")
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
        check_types(pa, schema)
        self._columns = [number for number, name in enumerate(schema.names) if not INDEX.fullmatch(name)]
        self._names: list[str] = [schema.names[number] for number in self._columns]
        self._told = told_in(schema)

    def _own(self, name: str, values: list[object]) -> list[object]:
        """The values of a column of a file that `sow` has written, as they were (`arrow.Told`)."""
        if name in self._told.whole:
            return [int(one) if type(one) is float and one.is_integer() else one for one in values]
        return [NULL if one is None else one for one in values] if name in self._told.nulls else values

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
                self._own(name, read_values(pa, one))
                for name, one in zip(self._names, [batch.column(number) for number in self._columns], strict=True)
            ]
            yield list(map(maker.outcome, zip(*columns, strict=True))), batch.num_rows
            read += batch.num_rows
