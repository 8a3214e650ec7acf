"""Results on stdout, in the format that was asked for.

[1]  Every format is written as it is read: memory is one batch, whatever the size of the result.
[2]  The machine formats carry exact values under names that never change. An absent value is omitted in JSON and
     empty in CSV, where an empty text is `""`. Times are integers under names that end in `_micros`.
[3]  JSON and `raw` get a record's payload as it was published, without decoding it. In CSV and tables its fields are
     columns, whose texts are exact (columns [1]).
[4]  A table is for people: times are ISO 8601 or relative, long values are cut with `…`, control characters are
     escaped.
[5]  No control character of the data reaches a terminal, whatever the format. A pipe and a file get exact bytes: JSON
     has colours on a terminal only.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

import click
import msgspec
from click.core import ParameterSource

from sow_cli import arguments, display
from sow_cli.columns import Columns
from sow_cli.rows import (
    Batch,
    BatchColumns,
    CsvRows,
    RecordForm,
    TableRows,
    harmless_text,
    quoted_cell,
    quoted_safely,
    record_lines,
)
from sow_client import Record

if TYPE_CHECKING:  # a command that writes no table starts without these
    from rich.progress import Progress

    from sow_cli.tables import TableLayout

Scalar: TypeAlias = str | int | float | bool | None
Nested: TypeAlias = Mapping[str, Scalar] | Sequence[Mapping[str, Scalar]]
"""Nested JSON; in CSV, JSON text."""
Command = TypeVar("Command", bound=Callable[..., object])

_ROWS_MEASURED: Final = 1_000  # a table's columns get the widths that its first rows need
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_CSV_SAFE: Final = "sow_cli.csv_safe"
"""Where the context of a command keeps `--csv-safe` until there is an Output."""
_SOH: Final = "sow_cli.soh"
_RAW: Final = "sow_cli.raw"
"""The same for `--soh` and `--raw`."""
NO_PAGER: Final = "sow_cli.no_pager"
"""Where contexts keep `--no-pager`."""


class Format(Enum):
    """The values of `--format`."""

    TABLE = "table"
    JSON = "json"
    NDJSON = "ndjson"
    CSV = "csv"
    RAW = "raw"
    PARQUET = "parquet"
    ARROW = "arrow"


RESULT_FORMATS: Final = (Format.TABLE, Format.JSON, Format.NDJSON, Format.CSV)
"""For results that are no records."""
MESSAGE_FORMATS: Final = (*RESULT_FORMATS, Format.RAW)
"""For records that come one by one."""


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
    """A time, as every command shows it: microseconds since the epoch under `name` and `_micros` in JSON and CSV, ISO
    8601 in UTC to the millisecond in a table. `more` stands behind it there."""
    name, label = f"{name}_micros", label or name.replace("_", " ")
    if time is None:
        return Fact(name, None, "", label=label, in_lists=in_lists)
    micros = (time - _EPOCH) // timedelta(microseconds=1)
    return Fact(name, micros, display.instant(micros) + more, label=label, in_lists=in_lists)


def length(name: str, time: timedelta | None, *, column: str = "", in_lists: bool = True) -> Fact:
    """A length of time that was measured: microseconds under `name` and `_micros` in JSON and CSV, exact in a table."""
    micros = None if time is None else time // timedelta(microseconds=1)
    shown = display.NOT_SET if time is None else display.exact_duration(time)
    label = name.replace("_", " ")
    return Fact(f"{name}_micros", micros, shown, label=label, column=column, in_lists=in_lists)


class Output:
    """Writes the results of one command. Owns stdout while the command runs."""

    def __init__(self, chosen: Format, *, csv_safe: bool = False, soh: str = "") -> None:
        """`csv_safe`: no cell of a CSV is a formula to a spreadsheet. `soh`: the text for the byte 1 in whole payloads;
        empty: the byte itself."""
        self.format = chosen
        self.csv_safe = csv_safe
        self._soh = soh.encode()
        self._encoder = msgspec.json.Encoder()

    def one(self, facts: Facts) -> None:
        """Writes one result; as a table, one fact per line."""
        self._refuse_for_results()
        if self.format is not Format.NDJSON:
            self.page()
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
        self._refuse_for_results()
        self.page()
        if self.format is Format.TABLE:
            if not results:
                self._print(_dim(nothing))
                return
            table, hidden = _horizontal(results)
            self._print(table)
            if hidden:
                note(f"{display.counted(len(hidden), 'more column')}: {', '.join(hidden)}; see --format ndjson")
        elif self.format is Format.CSV:
            values = [{fact.name: _csv_value(fact.value) for fact in facts} for facts in results]
            self.csv_rows([names, *([row.get(name) for name in names] for row in values)])
        elif self.format is Format.JSON:
            encoded = self._encoder.encode([_json_object(facts) for facts in results])
            self.write(msgspec.json.format(encoded, indent=2) + b"\n")
        else:
            self.write(self._encoder.encode_lines([_json_object(facts) for facts in results]))

    def _refuse_for_results(self) -> None:
        if self.format not in RESULT_FORMATS:
            raise click.UsageError(f"--format {self.format.value} is for records")

    @property
    def is_table(self) -> bool:
        """True: a person reads the output, so remarks may be added."""
        return self.format is Format.TABLE

    def record(self, record: Record, form: RecordForm, now_micros: int) -> None:
        """Writes one record; as a table, all about it and the whole document; raw, its bytes and nothing more."""
        if self.format is Format.RAW:
            self.write(self.raw(record.payload) + (b"\n" if sys.stdout.isatty() else b""))
            return
        if self.format is not Format.TABLE:
            self.records([[record]], form, now_micros=lambda: now_micros, as_list=False)
            return
        self.page()
        facts = _record_facts(record, self.raw(record.payload), form, now_micros)
        self._print(_vertical(facts))

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
        self.page()
        match self.format:
            case Format.TABLE:
                return self._record_table(batches, form, now_micros)
            case Format.CSV:
                return self._record_csv(batches, form)
            case Format.RAW:
                return self._raw_records(batches, form)
            case Format.PARQUET | Format.ARROW:
                return self._arrow_records(batches, form)
            case Format.NDJSON:
                return self._record_lines(batches, form)
        return self._record_array(batches, form) if as_list else self._record_lines(batches, form)

    def page(self) -> None:
        """A terminal gets all that follows, which ends, through the pager of the user."""
        if sys.stdout.isatty() and NO_PAGER not in click.get_current_context().meta:
            from sow_cli import outlets

            outlets.page()

    def raw(self, payload: bytes) -> bytes:
        """A payload as `--format raw` writes it."""
        return payload.replace(b"\x01", self._soh) if self._soh else payload

    def _raw_records(self, batches: Iterable[Batch], form: RecordForm) -> int:
        written = 0
        for batch in batches:
            columns = BatchColumns.of(batch)
            lines = [key.encode() for key in columns.keys] if form.keys_only else map(self.raw, columns.payloads)
            self.write(b"".join([line + b"\n" for line in lines]))
            written += len(batch)
        return written

    def _arrow_records(self, batches: Iterable[Batch], form: RecordForm) -> int:
        """The types are those of the first records, which are kept until there are enough of them."""
        from sow_cli.arrow import RECORDS_LOOKED_AT, ArrowFile, ArrowSchema

        schema = ArrowSchema(form)
        written = 0
        remaining = iter(batches)
        first: list[BatchColumns] = []
        for batch in remaining:
            first.append(BatchColumns.of(batch))
            schema.look(first[-1].payloads)
            written += len(batch)
            if written >= RECORDS_LOOKED_AT:
                break
        file = ArrowFile(sys.stdout.buffer, schema, is_parquet=self.format is Format.PARQUET, is_stream=True)
        for columns in first:
            file.write(columns)
        for batch in remaining:
            file.write(BatchColumns.of(batch))
            written += len(batch)
        file.close()
        sys.stdout.buffer.flush()
        if schema.left_out:
            note(f"fields that have no column: {', '.join(schema.left_out)}; see --select, or `sow export`")
        return written

    def _record_lines(self, batches: Iterable[Batch], form: RecordForm) -> int:
        written = 0
        encode = self._encoder.encode_lines
        for batch in batches:
            self.write(encode(record_lines(BatchColumns.of(batch), form)))
            written += len(batch)
        return written

    def _record_array(self, batches: Iterable[Batch], form: RecordForm) -> int:
        written = 0
        encode = self._encoder.encode
        for batch in batches:
            if len(batch):
                lines = b",\n".join([encode(line) for line in record_lines(BatchColumns.of(batch), form)])
                self.write((b",\n" if written else b"[\n") + lines)
                written += len(batch)
        self.write(b"\n]\n" if written else b"[]\n")
        return written

    def _record_csv(self, batches: Iterable[Batch], form: RecordForm) -> int:
        written = 0
        rows: CsvRows | None = None
        for batch in batches:
            if not len(batch):
                continue
            columns = BatchColumns.of(batch)
            if rows is None:
                rows = CsvRows(form, form.columns(columns.payloads), quoted_safely if self.csv_safe else quoted_cell)
                self.write(rows.first_line)
            self.write(rows.lines(columns))
            written += len(batch)
        if rows is None:
            self.write(CsvRows(form, form.columns(())).first_line)
        else:
            _tell_left_out(rows.columns)
        return written

    def _record_table(self, batches: Iterable[Batch], form: RecordForm, now_micros: Callable[[], int]) -> int:
        from sow_cli import colours, tables

        written = 0
        rows: TableRows | None = None
        layout: TableLayout | None = None
        for batch in batches:
            if not len(batch):
                continue
            if rows is None:
                rows = TableRows(form, batch)
            texts = [rows.cells(record, now_micros()) for record in batch]
            if layout is None:
                layout = tables.TableLayout.of_lines(
                    rows.headings, texts[:_ROWS_MEASURED], tables.terminal_width(), last_grows=rows.columns is None
                )
                self._print(colours.styled(layout.line(rows.headings), "heading") + "\n")
            self.write(("\n".join([layout.line(row) for row in texts]) + "\n").encode())
            written += len(batch)
        if layout is None or rows is None:
            self._print(_dim("no records"))
            return written
        if hidden := rows.headings[len(layout.widths) :]:
            more = display.counted(len(hidden), "more column")
            note(f"{more}: {', '.join(hidden)}; see --select, or --format ndjson")
        _tell_left_out(rows.columns)
        return written

    def _print(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def csv_rows(self, rows: Iterable[Sequence[Scalar]]) -> None:
        """Writes CSV: few rows, or rows that come one by one; `_record_csv` is for many."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows([[_harmless(cell) for cell in row] for row in rows] if self.csv_safe else rows)
        self.write(text.getvalue().encode())

    def write(self, data: bytes) -> None:
        """Binary and flushed: the reader of a pipe gets each batch at once, and a reader that goes away is noticed. A
        terminal gets no control characters of the data ([5]); those of a table are its own colours."""
        if self.format is not Format.TABLE and sys.stdout.isatty():
            data = display.safe_output(data)
            if self.format in (Format.JSON, Format.NDJSON):
                from sow_cli import colours

                data = colours.json(data.decode()).encode()
        out = sys.stdout.buffer
        out.write(data)
        out.flush()


def output_option(command: Command) -> Command:
    """Adds `--format` and `--csv-safe` to a command, which receives them as `output: Output`."""
    return _output_option(command, RESULT_FORMATS)


def message_output_option(command: Command) -> Command:
    """The same, and `raw`, for a command that shows records one by one."""
    return _output_option(_soh_option(command), MESSAGE_FORMATS)


def record_output_option(command: Command) -> Command:
    """The same with every format, for a command that shows records."""
    return _output_option(_soh_option(command), tuple(Format))


def _soh_option(command: Command) -> Command:
    def noted(ctx: click.Context, _param: click.Parameter, value: str | None) -> None:
        ctx.meta[_SOH] = value or ""

    return click.option(
        "--soh",
        metavar="TEXT",
        is_eager=True,  # its value is there when that of --format is read
        expose_value=False,
        callback=noted,
        help="In raw payloads, and in the table of one record: what stands for the byte SOH, such as '|' in FIX.",
    )(command)


def raw_option(command: Command) -> Command:
    """Adds `--raw`, which is short for `--format raw`."""

    def noted(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
        ctx.meta[_RAW] = value

    return click.option(
        "--raw",
        is_flag=True,
        is_eager=True,  # as `--soh`
        expose_value=False,
        callback=noted,
        help="The payload as it was published, byte by byte: the same as --format raw.",
    )(command)


def file_output_option(command: Command) -> Command:
    """As `output_option`, for a command that writes a file, which `--csv-safe` is about."""
    return _output_option(command, RESULT_FORMATS, of_files=True)


_OF_A_FILE: Final = (
    "A CSV for spreadsheets: an apostrophe in front of texts that begin like a formula. It has no column _payload, and "
    "is not for `sow publish`."
)


def _output_option(command: Command, formats: Sequence[Format], *, of_files: bool = False) -> Command:
    def chosen(ctx: click.Context, _param: click.Parameter, value: str | None) -> Output:
        csv_safe: bool = ctx.meta[_CSV_SAFE]
        soh: str = ctx.meta.get(_SOH, "")
        if ctx.meta.get(_RAW):
            given = ctx.get_parameter_source("output") is ParameterSource.COMMANDLINE  # not a default of the user
            if given and value != Format.RAW.value:
                raise click.UsageError(f"--raw and --format {value} exclude each other")
            value = Format.RAW.value
        if csv_safe and value != Format.CSV.value and not of_files:
            raise click.UsageError("--csv-safe is for --format csv")
        found = Format(value) if value else Format.TABLE if sys.stdout.isatty() else Format.NDJSON
        if soh and found not in (Format.RAW, Format.TABLE):
            raise click.UsageError("--soh is for --format raw, and for a table")
        if found in (Format.PARQUET, Format.ARROW):
            from sow_cli.arrow import load_pyarrow

            load_pyarrow()
            if sys.stdout.isatty():
                raise click.UsageError(f"--format {value} is not for a terminal: write it to a file or a pipe")
        return Output(found, csv_safe=csv_safe, soh=soh)

    def noted(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
        ctx.meta[_CSV_SAFE] = value

    command = click.option(
        "--csv-safe",
        is_flag=True,
        is_eager=True,  # its value is there when that of --format is read
        expose_value=False,
        callback=noted,
        help=_OF_A_FILE
        if of_files
        else "With --format csv, for spreadsheets: an apostrophe in front of texts that begin like a formula.",
    )(command)
    return click.option(
        "--format",
        "output",
        type=click.Choice([one.value for one in formats]),
        callback=chosen,
        help="How results are written.  [default: table on a terminal, ndjson in a pipe]",
    )(command)


def select_option(command: Command) -> Command:
    """Adds `--select`, which `selected` reads."""
    return click.option(
        "--select",
        type=arguments.comma_separated,
        multiple=True,
        metavar="PATH,…",
        help="Only these payload fields, such as /id,/price/bid; where they are columns also metadata, such as @key.",
    )(command)


def selected(select: Iterable[Sequence[str]]) -> list[str]:
    """The columns that `--select` names. Raises a usage error for one that cannot be."""
    named = [path for some in select for path in some]
    for one in named:
        arguments.column(one, "--select")
    return named


def note(text: str) -> None:
    """Writes a remark to stderr: neither a result nor an error. A progress bar on the terminal makes room for it."""
    click.echo(display.safe(text), err=True)


def progress(*texts: str, measured: bool) -> Progress:
    """A progress display on stderr that shows only on a terminal. `measured`: the total is known, so it has a bar.
    `texts`: further columns, such as `{task.fields[figures]}`."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    ctx = click.get_current_context(silent=True)
    console = Console(stderr=True, highlight=False, no_color=(ctx is not None and ctx.color is False) or None)
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


@contextmanager
def telling(doing: str) -> Iterator[Callable[[str], None]]:
    """A progress display for work of unknown length, such as "deleting". The block gets a function that shows how far
    it is."""
    with progress("{task.fields[so_far]}", measured=False) as bar:
        task = bar.add_task(doing, total=None, so_far="")
        yield lambda so_far: bar.update(task, so_far=so_far)


def _tell_left_out(columns: Columns | None) -> None:
    if columns is not None and columns.records_left_out:
        names = ", ".join(columns.left_out)
        note(f"{display.records(columns.records_left_out)} with fields that have no column: {names}; see --select")


def _json_object(facts: Facts) -> dict[str, Scalar | Sequence[str] | Nested]:
    return {fact.name: fact.value for fact in facts if fact.value is not None}


def _harmless(cell: Scalar) -> Scalar:
    """A cell that no spreadsheet takes for a formula. Numbers stay numbers."""
    return harmless_text(cell) if isinstance(cell, str) else cell


def _csv_value(value: Scalar | Sequence[str] | Nested) -> Scalar:
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None or isinstance(value, (str, int, float)):
        return value
    texts = [] if isinstance(value, Mapping) else [one for one in value if isinstance(one, str)]
    return " ".join(texts) if len(texts) == len(value) else msgspec.json.encode(value).decode()


def _record_facts(record: Record, payload: bytes, form: RecordForm, now_micros: int) -> list[Fact]:
    published_ago = display.duration(max(0, now_micros - record.publish_time_micros))
    facts = [
        Fact("topic", form.topic, form.topic),
        Fact("key", record.key, display.safe(record.key)),
        Fact("version", record.version, str(record.version)),
        Fact("published", None, f"{display.instant(record.publish_time_micros)}  ({published_ago} ago)"),
        Fact("expires", None, display.expire_time(record.expire_time_micros, now_micros, acts=form.acts)),
        Fact("origin", record.origin, display.safe(record.origin)),
        Fact("sequence", record.sequence, str(record.sequence)),
    ]
    if not form.keys_only:
        facts.append(Fact("payload", None, _full_payload(payload, form)))
    return facts


def _full_payload(payload: bytes, form: RecordForm) -> str:
    document = form.payloads.json(payload) if form.message_type in ("json", "msgpack") else None
    if document is None:
        return display.safe_bytes(payload)
    text = msgspec.json.format(document, indent=2).decode("utf-8", "backslashreplace")
    return "\n".join(display.safe(line) for line in text.split("\n"))


def _dim(text: str) -> str:
    from sow_cli import colours

    return colours.styled(text, "faint") + "\n"


def _vertical(facts: Facts) -> str:
    from sow_cli import tables

    return tables.facts_table([(fact.heading, fact.shown) for fact in facts if fact.shown], tables.terminal_width())


def _horizontal(results: Sequence[Facts]) -> tuple[str, list[str]]:
    """The table, and the headings of the columns that it has no room for."""
    from sow_cli import tables

    listed = [[fact for fact in facts if fact.in_lists] for facts in results]
    columns = max(listed, key=len)  # the last facts of a result may be unknown
    headings = [fact.column or fact.heading for fact in columns]
    rows = [[fact.shown for fact in facts] + [""] * (len(columns) - len(facts)) for facts in listed]
    table, shown = tables.list_table(headings, rows, tables.terminal_width(), right=[fact.right for fact in columns])
    return table, headings[shown:]
