"""Results on stdout, in one of four formats.

[1]  `ndjson`, `csv` and `json` write as they read: memory is one batch, whatever the size of the result.
[2]  The machine formats carry exact values under names that never change. An absent value is omitted in JSON and
     empty in CSV.
[3]  A record's payload is never decoded: the line gets the bytes that were published.
[4]  A table is for people: times are relative, long values are cut with `…`, control characters are escaped.
[5]  No control character of the data reaches a terminal, whatever the format. A pipe and a file get exact bytes.
"""

from __future__ import annotations

import csv
import io
import shutil
import sys
from binascii import b2a_base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from itertools import repeat
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

import click
import msgspec

from sow_cli import display
from sow_client import Record, RecordBatch

if TYPE_CHECKING:  # a command that writes no table starts without rich
    from rich.progress import Progress
    from rich.table import Table
    from rich.text import Text

Scalar: TypeAlias = str | int | float | bool | None
Nested: TypeAlias = Mapping[str, Scalar] | Sequence[Mapping[str, Scalar]]
"""Nested JSON; in CSV, JSON text."""
Batch: TypeAlias = RecordBatch | Sequence[Record]
Command = TypeVar("Command", bound=Callable[..., object])

_NOT_A_TERMINAL_WIDTH: Final = 140
_ROWS_MEASURED: Final = 1_000  # a table's columns get the widths that its first rows need
KEY_WIDTH_MAX: Final = 48
_NEVER_MICROS: Final = 2**63 - 1  # in a column of expire times
_FORMULA_STARTS: Final = ("=", "+", "-", "@", "\t", "\r")
"""A spreadsheet takes a cell that begins like this for a formula."""
_CSV_SAFE: Final = "sow_cli.csv_safe"
"""Where the context of a command keeps `--csv-safe` until there is an Output."""


class Format(Enum):
    """The values of `--format`."""

    TABLE = "table"
    JSON = "json"
    NDJSON = "ndjson"
    CSV = "csv"


@dataclass(frozen=True, slots=True)
class Fact:
    """One named value of a result."""

    name: str
    """The name in JSON and CSV."""
    value: Scalar | Sequence[str] | Nested
    """None: absent ([2])."""
    shown: str
    """The text in a table; empty: nothing to show, so a table of one result omits it."""
    label: str = ""
    """The heading in a table; when empty, the name with spaces."""
    column: str = ""
    """A shorter heading for a table of several results."""
    in_lists: bool = True
    """False: a table of many results has no room for it."""
    right: bool = False
    """True: numbers, aligned at the right."""

    @property
    def heading(self) -> str:
        return self.label or self.name.replace("_", " ")


Facts: TypeAlias = Sequence[Fact]


def moment(name: str, time: datetime | None, *, label: str = "", more: str = "", in_lists: bool = True) -> Fact:
    """A time, as every command shows it: ISO 8601 in JSON and CSV, in UTC to the millisecond in a table. `more` stands
    behind it there."""
    if time is None:
        return Fact(name, None, "", label=label, in_lists=in_lists)
    shown = display.instant(round(time.astimezone(UTC).timestamp() * 1e6))
    return Fact(name, time.isoformat(), shown + more, label=label, in_lists=in_lists)


class RecordLine(msgspec.Struct, gc=False):
    """A record in JSON (docs/cli.md). Field order is the order on the line."""

    topic: str
    key: str
    version: int
    publish_time_micros: int
    expire_time_micros: int | msgspec.UnsetType
    origin: str
    sequence: int
    # msgspec writes Raw as it is and bytes as base64: a json topic's payload is Raw, another's is bytes.
    payload: msgspec.Raw | bytes | msgspec.UnsetType


_COLUMNS: Final = tuple(RecordLine.__struct_fields__)


@dataclass(frozen=True, slots=True)
class RecordForm:
    """The form of the records of one answer."""

    topic: str
    payload_is_json: bool
    keys_only: bool = False


class Output:
    """Writes the results of one command. Owns stdout while the command runs."""

    def __init__(self, chosen: Format, *, csv_safe: bool = False) -> None:
        """`csv_safe`: no cell of a CSV is a formula to a spreadsheet."""
        self.format = chosen
        self._csv_safe = csv_safe
        self._encoder = msgspec.json.Encoder()

    def one(self, facts: Facts) -> None:
        """Writes one result; as a table, one fact per line."""
        if self.format is Format.TABLE:
            self._print(_vertical(facts))
        elif self.format is Format.CSV:
            self.csv_rows([[fact.name for fact in facts], [_csv_value(fact.value) for fact in facts]])
        elif self.format is Format.JSON:
            self.write(msgspec.json.format(self._encoder.encode(_json_object(facts)), indent=2) + b"\n")
        else:
            self.write(self._encoder.encode(_json_object(facts)) + b"\n")

    def many(self, results: Sequence[Facts], *, names: Sequence[str], nothing: str) -> None:
        """Writes a list of results. `names`: the columns of a CSV; `nothing`: the text of an empty table."""
        if self.format is Format.TABLE:
            self._print(_horizontal(results) if results else _text(nothing, style="dim"))
        elif self.format is Format.CSV:
            values = [{fact.name: _csv_value(fact.value) for fact in facts} for facts in results]
            self.csv_rows([names, *([row.get(name) for name in names] for row in values)])
        elif self.format is Format.JSON:
            encoded = self._encoder.encode([_json_object(facts) for facts in results])
            self.write(msgspec.json.format(encoded, indent=2) + b"\n")
        else:
            self.write(self._encoder.encode_lines([_json_object(facts) for facts in results]))

    @property
    def is_table(self) -> bool:
        """True: a person reads the output, so remarks may be added."""
        return self.format is Format.TABLE

    def record(self, record: Record, form: RecordForm, now_micros: int) -> None:
        """Writes one record; as a table, all its fields and the whole document."""
        if self.format is not Format.TABLE:
            self.records([[record]], form, now_micros=lambda: now_micros, as_list=False)
            return
        self._print(_vertical(_record_facts(record, form, now_micros)))

    def records(
        self,
        batches: Iterable[Batch],
        form: RecordForm,
        *,
        now_micros: Callable[[], int],
        as_list: bool = True,
    ) -> int:
        """Writes records batch by batch ([1]) and returns their number. `as_list`: in JSON an array, even of one
        record."""
        if self.format is Format.TABLE:
            return self._record_table(batches, form, now_micros)
        if self.format is Format.CSV:
            return self._record_csv(batches, form)
        if self.format is Format.NDJSON or not as_list:
            return self._record_lines(batches, form)
        return self._record_array(batches, form)

    def _record_lines(self, batches: Iterable[Batch], form: RecordForm) -> int:
        written = 0
        encode = self._encoder.encode_lines
        for batch in batches:
            self.write(encode(_lines(batch, form)))
            written += len(batch)
        return written

    def _record_array(self, batches: Iterable[Batch], form: RecordForm) -> int:
        written = 0
        encode = self._encoder.encode
        for batch in batches:
            if len(batch):
                lines = b",\n".join([encode(line) for line in _lines(batch, form)])
                self.write((b",\n" if written else b"[\n") + lines)
                written += len(batch)
        self.write(b"\n]\n" if written else b"[]\n")
        return written

    def _record_csv(self, batches: Iterable[Batch], form: RecordForm) -> int:
        written = 0
        columns = _COLUMNS[:-1] if form.keys_only else _COLUMNS
        quoted = _quoted_safely if self._csv_safe else _quoted
        self.csv_rows([columns])
        for batch in batches:
            self.write(_record_csv(batch, form, quoted))
            written += len(batch)
        return written

    def _record_table(self, batches: Iterable[Batch], form: RecordForm, now_micros: Callable[[], int]) -> int:
        """A layout of our own: a rich table needs every row before it shows the first, and 0.3 ms per row."""
        written = 0
        layout: _Layout | None = None
        for batch in batches:
            if not len(batch):
                continue
            rows = [_record_row(record, form, now_micros()) for record in batch]
            if layout is None:
                layout = _Layout.measured(
                    _record_headings(form), rows[:_ROWS_MEASURED], terminal_width(), form.keys_only
                )
                self._print(_text(layout.line(_record_headings(form)), style="bold"))
            self.write(("\n".join([layout.line(row) for row in rows]) + "\n").encode())
            written += len(batch)
        if not written:
            self._print(_text("no records", style="dim"))
        return written

    def _print(self, content: Table | Text) -> None:
        from rich.console import Console

        console = Console(
            file=sys.stdout, highlight=False, markup=False, emoji=False, width=terminal_width(), soft_wrap=False
        )
        console.print(content)
        sys.stdout.flush()

    def csv_rows(self, rows: Iterable[Sequence[Scalar]]) -> None:
        """Writes CSV: few rows, or rows that come one by one; `_record_csv` is for many."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows([[_harmless(cell) for cell in row] for row in rows] if self._csv_safe else rows)
        self.write(text.getvalue().encode())

    def write(self, data: bytes) -> None:
        """Binary and flushed: the reader of a pipe gets each batch at once, and a reader that goes away is noticed. A
        terminal gets no control characters of the data ([5]); those of a table are its own colours."""
        if self.format is not Format.TABLE and sys.stdout.isatty():
            data = display.safe_output(data)
        out = sys.stdout.buffer
        out.write(data)
        out.flush()


def output_option(command: Command) -> Command:
    """Adds `--format` and `--csv-safe` to a command, which receives them as `output: Output`."""

    def chosen(ctx: click.Context, _param: click.Parameter, value: str | None) -> Output:
        csv_safe: bool = ctx.meta[_CSV_SAFE]
        if csv_safe and value != Format.CSV.value:
            raise click.UsageError("--csv-safe is for --format csv")
        found = Format(value) if value else Format.TABLE if sys.stdout.isatty() else Format.NDJSON
        return Output(found, csv_safe=csv_safe)

    def noted(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
        ctx.meta[_CSV_SAFE] = value

    command = click.option(
        "--csv-safe",
        is_flag=True,
        is_eager=True,  # its value is there when that of --format is read
        expose_value=False,
        callback=noted,
        help="With --format csv, for spreadsheets: an apostrophe in front of texts that begin like a formula.",
    )(command)
    return click.option(
        "--format",
        "output",
        type=click.Choice([one.value for one in Format]),
        callback=chosen,
        help="How results are written.  [default: table on a terminal, ndjson in a pipe]",
    )(command)


def note(text: str) -> None:
    """Writes a remark to stderr: neither a result nor an error. A progress bar on the terminal makes room for it."""
    click.echo(display.safe(text), err=True)


def progress(*texts: str, measured: bool) -> Progress:
    """A progress display on stderr that shows only on a terminal. `measured`: the total is known, so it has a bar.
    `texts`: further columns, such as `{task.fields[figures]}`."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, highlight=False)
    parts = [BarColumn(bar_width=30), TextColumn("{task.percentage:>3.0f}%")] if measured else [SpinnerColumn()]
    return Progress(
        TextColumn("{task.description}"),
        *parts,
        *map(TextColumn, texts),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        refresh_per_second=5,
        disable=not sys.stderr.isatty(),
    )


@dataclass(frozen=True, slots=True)
class _Columns:
    """The records of a batch, column by column: half the time of asking each record for its values."""

    keys: Sequence[str]
    versions: Sequence[int]
    publish_times_micros: Sequence[int]
    expire_times_micros: Sequence[int]
    """`_NEVER_MICROS` for never."""
    origins: Sequence[str]
    sequences: Sequence[int]
    payloads: Sequence[bytes]

    @classmethod
    def of(cls, batch: Batch, form: RecordForm) -> _Columns:
        if isinstance(batch, RecordBatch):
            keys, versions, published = batch.keys, batch.versions, batch.publish_times_micros
            expire, origins, sequences = batch.expire_times_micros, batch.origins, batch.sequences
            payloads = batch.payloads
        else:
            keys, versions = [one.key for one in batch], [one.version for one in batch]
            published, payloads = [one.publish_time_micros for one in batch], [one.payload for one in batch]
            sequences, origins = [one.sequence for one in batch], [one.origin for one in batch]
            expire = [_NEVER_MICROS if one.expire_time_micros is None else one.expire_time_micros for one in batch]
        if form.payload_is_json:
            # Line ends are rare: the whole batch is searched first, and each document only when there are any.
            together = b"".join(payloads)
            if b"\n" in together or b"\r" in together:
                payloads = [one_line(document) for document in payloads]
        return cls(keys, versions, published, expire, origins, sequences, payloads)


def _lines(batch: Batch, form: RecordForm) -> list[RecordLine]:
    columns = _Columns.of(batch, form)
    unset = msgspec.UNSET
    expire = [unset if micros == _NEVER_MICROS else micros for micros in columns.expire_times_micros]
    payloads: Iterable[msgspec.Raw | bytes | msgspec.UnsetType] = columns.payloads
    if form.keys_only:
        payloads = repeat(unset)
    elif form.payload_is_json:
        payloads = map(msgspec.Raw, columns.payloads)
    return list(
        map(
            RecordLine,
            repeat(form.topic),
            columns.keys,
            columns.versions,
            columns.publish_times_micros,
            expire,
            columns.origins,
            columns.sequences,
            payloads,
        )
    )


def _record_csv(batch: Batch, form: RecordForm, quoted: Callable[[str], str]) -> bytes:
    """Quoting of our own: the csv module looks at every character, and takes ten times as long. `quoted` makes cells of
    texts."""
    columns = _Columns.of(batch, form)
    topic = quoted(form.topic)
    keys, origins = map(quoted, columns.keys), map(quoted, columns.origins)
    expire = ["" if micros == _NEVER_MICROS else micros for micros in columns.expire_times_micros]
    numbers = (columns.versions, columns.publish_times_micros, expire)
    if form.keys_only:
        texts: Iterable[str] = repeat("")
    elif form.payload_is_json:
        texts = ["," + quoted(document.decode("utf-8", "backslashreplace")) for document in columns.payloads]
    else:
        texts = ["," + quoted(b2a_base64(payload, newline=False).decode()) for payload in columns.payloads]
    lines = [
        f"{topic},{key},{version},{published},{expires},{origin},{sequence}{text}\n"
        for key, version, published, expires, origin, sequence, text in zip(
            keys, *numbers, origins, columns.sequences, texts, strict=False
        )
    ]
    return "".join(lines).encode()


def _quoted(text: str) -> str:
    if '"' in text:
        return '"' + text.replace('"', '""') + '"'
    return f'"{text}"' if "," in text or "\n" in text or "\r" in text else text


def _quoted_safely(text: str) -> str:
    return _quoted(_harmless_text(text))


def one_line(document: bytes) -> bytes:
    """Removes the line ends of a document that was published over several lines; its values stay. They would break
    NDJSON."""
    if b"\n" in document or b"\r" in document:
        return msgspec.json.format(document, indent=-1)
    return document


def _json_object(facts: Facts) -> dict[str, Scalar | Sequence[str] | Nested]:
    return {fact.name: fact.value for fact in facts if fact.value is not None}


def _harmless(cell: Scalar) -> Scalar:
    """A cell that no spreadsheet takes for a formula. Numbers stay numbers."""
    return _harmless_text(cell) if isinstance(cell, str) else cell


def _harmless_text(text: str) -> str:
    return f"'{text}" if text.startswith(_FORMULA_STARTS) else text


def _csv_value(value: Scalar | Sequence[str] | Nested) -> Scalar:
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None or isinstance(value, (str, int, float)):
        return value
    texts = [] if isinstance(value, Mapping) else [one for one in value if isinstance(one, str)]
    return " ".join(texts) if len(texts) == len(value) else msgspec.json.encode(value).decode()


@dataclass(frozen=True, slots=True)
class _Layout:
    """Column widths of a table that is written while it is read."""

    widths: tuple[int, ...]

    @classmethod
    def measured(cls, headings: Sequence[str], rows: Sequence[Sequence[str]], width: int, keys_only: bool) -> _Layout:
        """Makes each column as wide as these rows need, the key up to its maximum; the payload, at the end, gets the
        rest."""
        from rich.cells import cell_len

        widths = [max(cell_len(text) for text in column) for column in zip(headings, *rows, strict=True)]
        widths[0] = min(widths[0], KEY_WIDTH_MAX if not keys_only else width)
        if not keys_only:
            widths[-1] = max(20, width - sum(widths[:-1]) - 2 * (len(widths) - 1))
        return cls(tuple(widths))

    def line(self, cells: Sequence[str]) -> str:
        return "  ".join([fit(text, width) for text, width in zip(cells, self.widths, strict=True)]).rstrip()


def fit(text: str, width: int) -> str:
    """`text` in exactly `width` columns of a terminal."""
    if text.isascii():
        return text.ljust(width) if len(text) <= width else text[: width - 1] + "…"
    from rich.cells import cell_len, set_cell_size

    length = cell_len(text)
    return text + " " * (width - length) if length <= width else set_cell_size(text, width - 1) + "…"


def _record_headings(form: RecordForm) -> tuple[str, ...]:
    return ("key", "expires", "published", "sequence") if form.keys_only else ("key", "expires", "published", "payload")


def _record_row(record: Record, form: RecordForm, now_micros: int) -> tuple[str, str, str, str]:
    last = str(record.sequence) if form.keys_only else shown_payload(record.payload, form)
    return (
        display.safe(record.key),
        display.expires(record.expire_time_micros, now_micros),
        display.short_instant(record.publish_time_micros, now_micros),
        last,
    )


def shown_payload(payload: bytes, form: RecordForm) -> str:
    """The beginning of a payload, for one line of a table ([4])."""
    return display.safe_bytes(one_line(payload) if form.payload_is_json else payload, 400)


def _record_facts(record: Record, form: RecordForm, now_micros: int) -> list[Fact]:
    expire = record.expire_time_micros
    expires = display.expires(expire, now_micros)
    published_ago = display.duration(max(0, now_micros - record.publish_time_micros))
    facts = [
        Fact("topic", form.topic, form.topic),
        Fact("key", record.key, display.safe(record.key)),
        Fact("version", record.version, str(record.version)),
        Fact("published", None, f"{display.instant(record.publish_time_micros)}  ({published_ago} ago)"),
        Fact("expires", None, expires if expire is None else f"{display.instant(expire)}  ({expires})"),
        Fact("origin", record.origin, display.safe(record.origin)),
        Fact("sequence", record.sequence, str(record.sequence)),
    ]
    if not form.keys_only:
        facts.append(Fact("payload", None, _full_payload(record.payload, form)))
    return facts


def _full_payload(payload: bytes, form: RecordForm) -> str:
    if not form.payload_is_json:
        return display.safe_bytes(payload)
    text = msgspec.json.format(payload, indent=2).decode("utf-8", "backslashreplace")
    return "\n".join(display.safe(line) for line in text.split("\n"))


def _text(text: str, *, style: str = "") -> Text:
    from rich.text import Text

    return Text(text, style=style)


def _vertical(facts: Facts) -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for fact in facts:
        if fact.shown:
            table.add_row(_text(fact.heading), _text(fact.shown))
    return table


def _horizontal(results: Sequence[Facts]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)
    for fact in results[0]:
        if fact.in_lists:
            table.add_column(fact.column or fact.heading, justify="right" if fact.right else "left", overflow="fold")
    for facts in results:
        table.add_row(*(_text(fact.shown) for fact in facts if fact.in_lists))
    return table


def terminal_width() -> int:
    """The terminal's columns; a large number without a terminal, as nothing wraps there."""
    return shutil.get_terminal_size((_NOT_A_TERMINAL_WIDTH, 40)).columns
