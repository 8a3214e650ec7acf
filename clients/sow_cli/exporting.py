"""`sow export`: the records of a topic, as they were at one instant, in a file.

[1]  The records, also those of several topics, are of one snapshot of the server (rule Q6), whatever is published
     meanwhile.
[2]  A file of that name is either the old one or a complete new one: the records go to a temporary file beside it,
     which is synced and takes the name, and the permissions of the old one, at the end.
[3]  CSV, Parquet and Arrow have columns for the fields of all records, and Parquet and Arrow a type for each. The
     snapshot is read twice where all payloads tell these: without --select, and for the types of selected fields.
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, Protocol

import click
import msgspec

from sow_cli import arguments, display, packing
from sow_cli.columns import Columns
from sow_cli.filter_parameters import Values, param_option
from sow_cli.ignored import remark_on_fields
from sow_cli.kept import CsvKept
from sow_cli.output import Fact, Format, Output, file_output_option, moment, progress, select_option, selected
from sow_cli.rows import BatchColumns, CsvRows, RecordForm, quoted_cell, quoted_safely, record_lines
from sow_cli.session import Session
from sow_client import Client, Export, PackedColumn

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from sow_cli.arrow import ArrowSchema

_FORMATS: Final = {
    ".parquet": Format.PARQUET,
    ".arrow": Format.ARROW,
    ".feather": Format.ARROW,
    ".csv": Format.CSV,
    ".ndjson": Format.NDJSON,
    ".jsonl": Format.NDJSON,
    ".json": Format.JSON,
}
_COLUMNS: Final[Sequence[PackedColumn]] = (
    "payload", "key", "version", "publish_time", "expire_time", "origin", "sequence",
)  # fmt: skip
_WHOLE: Final = (Format.NDJSON, Format.JSON)
"""Formats without columns."""
_BATCH_RECORDS: Final = 20_000
"""Records of a message, and of a row group of Parquet."""
_LOOKED_AT_MAX: Final = 10_000
"""Records in which the fields of --select are looked for, as the server does it for a query (rule Q10)."""
_FIELDS_MAX: Final = 100
"""The server leaves out fields for a reader of no more than these (rule Q6)."""


@click.command(short_help="Write a topic to a file.")
@click.argument("topic")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--also",
    "others",
    type=(str, click.Path(dir_okay=False, path_type=Path)),
    multiple=True,
    metavar="TOPIC FILE",
    help="Another topic into a file of its own, at the same instant; also several times.",
)
@click.option("--filter", "filter_text", metavar="FILTER", help="Only records that match, of each topic.")
@param_option
@select_option
@click.option(
    "--lossy",
    is_flag=True,
    help="Only the columns, without _payload: a record that they do not keep comes back as another one.",
)
@file_output_option
@click.pass_obj
def export(
    session: Session,
    *,
    topic: str,
    file: Path,
    others: tuple[tuple[str, Path], ...],
    filter_text: str | None,
    parameters: Values | None,
    select: tuple[tuple[str, ...], ...],
    lossy: bool,
    output: Output,
) -> None:
    """Write the live records of TOPIC to FILE, as they are at one instant.

    The end of the name tells the format: .parquet, .arrow or .feather, .csv, .ndjson or .jsonl, or .json; .gz or .zst
    behind a text format compresses it. In Parquet, Arrow and CSV each field is a column, of all records, and a record
    that the columns do not keep stands whole in the column _payload, too. `sow publish` and `sow load` make the same
    records of all of them, with their keys and expire times. Parquet, Arrow and .zst need pyarrow: pip install
    'sow[arrow]'.

    FILE appears when it is complete, in place of an older one, whose permissions it keeps. A device or a pipe is
    refused. The answer has the number of records, the bytes, and the bookmark of the instant: `sow subscribe TOPIC
    --from BOOKMARK` continues after it.

    With --also all topics are of one instant: a commit that changes two of them is in both files or in neither. The
    files appear once all are complete.

    \b
    Examples:
      sow export orders orders.parquet
      sow export orders orders.ndjson.zst
      sow export orders big.csv --filter "/price > 9" --select /id,@expire_time
      sow export orders orders.parquet --also trades trades.parquet
    """
    files = [(topic, file), *others]
    kinds = [form_of(target) for _, target in files]
    named = selected(select)
    _check(files, kinds, named, csv_safe=output.csv_safe)
    written: list[tuple[int, int]] = []
    exportings: list[_Exporting] = []
    with session.client() as client:
        forms = [RecordForm.of(name, client.describe_topic(name).settings, select=named) for name, _ in files]
        opened = client.open_export([name for name, _ in files], filter_text, parameters)
        try:
            with ExitStack() as complete:  # the files take their names once all are complete, and on disk
                sinks = [complete.enter_context(replaced(target)) for _, target in files]
                for (_, target), kind, form, plain in zip(files, kinds, forms, sinks, strict=True):
                    began = time.monotonic()
                    with packing.packed(plain, target.name) as sink:
                        made = RecordFile(kind, form, sink, csv_safe=output.csv_safe, keeps_all=not lossy)
                        exportings.append(_Exporting(client, opened, form))
                        written.append((exportings[-1].write(made), round((time.monotonic() - began) * 1e6)))
                    synced(plain)
        finally:
            with suppress(Exception):  # it ends by itself, and an error of its own would hide the first one
                client.close_export(opened.id)
    told = [_told(name, target, opened, *figures) for (name, target), figures in zip(files, written, strict=True)]
    if others:
        output.many(told, names=[fact.name for fact in told[0]], nothing="")
    else:
        output.one(told[0])
    for exporting in exportings:
        remark_on_fields(exporting.absent_fields)


def _check(files: Sequence[tuple[str, Path]], kinds: Sequence[Format], named: Sequence[str], *, csv_safe: bool) -> None:
    """Raises a usage error before anything is asked of the server. `named`: the columns of --select."""
    if named and any(kind in _WHOLE for kind in kinds):
        raise click.UsageError("--select is for columns: JSON and NDJSON have whole records")
    if csv_safe and any(kind is not Format.CSV for kind in kinds):
        raise click.UsageError("--csv-safe is for a file of CSV")
    if len({target.resolve() for _, target in files}) < len(files):
        raise click.UsageError("two topics have the same file")
    if any(kind in (Format.PARQUET, Format.ARROW) for kind in kinds):
        from sow_cli.arrow import load_pyarrow

        load_pyarrow()  # says now what is missing
    for _, target in files:
        packing.check(target.name)


def _told(topic: str, file: Path, opened: Export, records: int, micros: int) -> list[Fact]:
    """The facts about a file that was written."""
    size = file.stat().st_size
    return [
        Fact("topic", topic, topic),
        Fact("file", str(file), display.safe(str(file))),
        Fact("records", records, display.count(records)),
        Fact("bytes", size, display.size(size), label="size"),
        moment("as_of", opened.as_of, label="as of"),
        Fact("bookmark", opened.bookmark, opened.bookmark or ""),
        Fact("elapsed_micros", micros, display.duration(micros), label="time"),
    ]


def form_of(file: Path) -> Format:
    """The format that the name tells. Raises a usage error."""
    name, compression = packing.unpacked_name(file.name)
    kind = _FORMATS.get(name.suffix.lower())
    if kind is None:
        ends = f"{', '.join(_FORMATS)}, perhaps with {' or '.join(packing.SUFFIXES)} behind it"
        raise click.BadParameter(f"the name ends in none of {ends}", param_hint="FILE")
    if compression is not None and kind in (Format.PARQUET, Format.ARROW):
        raise click.BadParameter(
            f"a file of {kind.value} is not compressed as a whole: programs read parts of it; leave out "
            f"{file.suffix}" + (", as Parquet compresses its columns" if kind is Format.PARQUET else ""),
            param_hint="FILE",
        )
    return kind


class _Exporting:
    """Reads a snapshot and writes its records to an open file."""

    def __init__(self, client: Client, export: Export, form: RecordForm) -> None:
        self._client = client
        self._export = export
        self._parts = export.parts_of(form.topic)
        self._form = form
        self._absent: Sequence[str] = ()
        self._selected = _Selected(form)

    @property
    def absent_fields(self) -> Iterable[str]:
        """Fields of the filter and of --select in which no record has a value (rule Q10)."""
        return dict.fromkeys([*self._absent, *self._selected.absent])

    def write(self, file: RecordFile) -> int:
        """Writes all records, and returns their number."""
        records = sum(self._export.parts[part] for part in self._parts)
        with progress("{task.fields[figures]}", measured=records > 0) as bar:
            task = bar.add_task("exporting", total=records * (2 if file.looks else 1), figures="")
            if file.looks:
                for columns in self._shown(bar, task, self._batches(("payload",))):
                    file.look(columns.payloads)
            written = 0
            for columns in self._shown(bar, task, self._batches(_COLUMNS)):
                file.write(columns)
                self._selected.look(columns.payloads)
                written += len(columns.keys)
            file.close()
        return written

    def _shown(self, bar: Progress, task: TaskID, batches: Iterator[BatchColumns]) -> Iterator[BatchColumns]:
        done = 0
        for columns in batches:
            yield columns
            done += len(columns.payloads)
            bar.update(task, advance=len(columns.payloads), figures=display.records(done))

    def _batches(self, columns: Sequence[PackedColumn]) -> Iterator[BatchColumns]:
        form = self._form
        names = [name for name in form.select if not name.startswith("@")]
        # Only top-level fields of JSON: the server reduces these without decoding the rest.
        fields = sorted({arguments.field_path(name, "--select")[0] for name in names})
        reduced = fields if form.payload_is_json and len(fields) <= _FIELDS_MAX else []
        for part in self._parts:
            for packed in self._client.read_export(
                self._export.id,
                part,
                columns=columns,
                batch_size=_BATCH_RECORDS,
                fields=reduced,
                on_absent_fields=self._tell,
            ):
                yield BatchColumns.of_packed(packed)

    def _tell(self, absent: Sequence[str]) -> None:
        self._absent = absent  # of all parts so far


class _Selected:
    """The fields of --select that no record has shown yet. The server does not know them."""

    def __init__(self, form: RecordForm) -> None:
        self._columns = form.columns(()) if form.select else None
        self._unseen = [name for name in form.select if not name.startswith("@")]
        self._names = tuple(self._unseen)
        self._left = _LOOKED_AT_MAX

    @property
    def absent(self) -> Sequence[str]:
        """Those, as they were given; none while no record has been looked at."""
        return self._unseen if self._left < _LOOKED_AT_MAX else ()

    def look(self, payloads: Sequence[bytes]) -> None:
        """Looks at records until each field has been seen."""
        for payload in payloads:
            if self._columns is None or not (self._unseen and self._left):
                return
            self._left -= 1
            shown = dict(zip(self._names, self._columns.texts(payload), strict=True))
            self._unseen = [name for name in self._unseen if shown[name] is None]


class RecordFile:
    """A file of records, written piece by piece. Where `looks`, it must `look` at all payloads first ([3])."""

    def __init__(
        self, kind: Format, form: RecordForm, sink: IO[bytes], *, csv_safe: bool = False, keeps_all: bool = True
    ) -> None:
        """`kind`: NDJSON, JSON, CSV, PARQUET or ARROW. `keeps_all`: a record that the columns do not keep stands whole
        in a column of its own. The sink stays open."""
        self._kind = kind
        self._form = form
        self._sink = sink
        self._keeps_all = keeps_all and not (csv_safe and kind is Format.CSV)  # such a CSV is for people
        self._quoted = quoted_safely if csv_safe else quoted_cell
        self._seen = CsvKept(form)
        self._schema: ArrowSchema | None = None
        self._writer: _Writer | None = None
        if kind in (Format.PARQUET, Format.ARROW):
            from sow_cli.arrow import ArrowSchema

            self._schema = ArrowSchema(form, keeps_all=self._keeps_all)
        self.looks = _is_read_twice(kind, form)

    def look(self, payloads: Sequence[bytes]) -> None:
        """Learns the columns of these payloads."""
        if self._schema is not None:
            self._schema.look(payloads)
        else:
            self._seen.look(payloads)

    def write(self, columns: BatchColumns) -> None:
        """Writes some records."""
        self._made().write(columns)

    def close(self) -> None:
        """Writes the end of the file."""
        self._made().close()

    def _made(self) -> _Writer:
        if self._writer is None:
            self._writer = self._make()
        return self._writer

    def _make(self) -> _Writer:
        form = self._form
        if self._schema is not None:
            from sow_cli.arrow import ArrowFile

            return ArrowFile(self._sink, self._schema, is_parquet=self._kind is Format.PARQUET)
        if self._kind is Format.CSV:
            seen = self._seen
            found = form.columns(())
            if seen.names:
                found = Columns(form.payloads, [(name,) for name in seen.names], chosen=True, mixed=seen.mixed)
            keeps = seen.keeps if self._keeps_all and seen.lacks and seen.names else None
            return _Csv(CsvRows(form, found, self._quoted, keeps), self._sink)
        return _Json(form, self._sink) if self._kind is Format.JSON else _Ndjson(form, self._sink)


def _is_read_twice(kind: Format, form: RecordForm) -> bool:
    """True if all payloads must be seen before the first record is written ([3])."""
    if kind in _WHOLE:
        return False
    has_types = kind in (Format.PARQUET, Format.ARROW)
    return not form.select or (has_types and any(not name.startswith("@") for name in form.select))


class _Writer(Protocol):
    def write(self, columns: BatchColumns, /) -> None: ...

    def close(self) -> None: ...


class _Ndjson:
    def __init__(self, form: RecordForm, sink: IO[bytes]) -> None:
        self._form = form
        self._sink = sink
        self._encode = msgspec.json.Encoder().encode_lines

    def write(self, columns: BatchColumns) -> None:
        self._sink.write(self._encode(record_lines(columns, self._form)))

    def close(self) -> None:
        pass


class _Json:
    def __init__(self, form: RecordForm, sink: IO[bytes]) -> None:
        self._form = form
        self._sink = sink
        self._encode = msgspec.json.Encoder().encode
        self._between = b"["

    def write(self, columns: BatchColumns) -> None:
        for line in record_lines(columns, self._form):
            self._sink.write(self._between + b"\n" + self._encode(line))
            self._between = b","

    def close(self) -> None:
        self._sink.write(b"[]\n" if self._between == b"[" else b"\n]\n")


class _Csv:
    def __init__(self, rows: CsvRows, sink: IO[bytes]) -> None:
        self._rows = rows
        self._sink = sink
        sink.write(rows.first_line)

    def write(self, columns: BatchColumns) -> None:
        self._sink.write(self._rows.lines(columns))

    def close(self) -> None:
        pass


@contextmanager
def replaced(file: Path) -> Iterator[IO[bytes]]:
    """A new file that takes the name `file` once it is complete ([2]); after an error nothing is left of it. Raises a
    usage error where no file can be written."""
    target = file.resolve()  # through a symbolic link, which stays
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        older = target.stat() if target.exists() else None
        if older is not None and not stat.S_ISREG(older.st_mode):
            raise click.UsageError(
                f"{display.safe(str(file))} is a device or a pipe; sow query --format writes to pipes"
            )
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except OSError as error:
        raise click.UsageError(
            f"cannot write {display.safe(str(file))}: {error.strerror or 'unknown error'}"
        ) from error
    try:
        with open(descriptor, "wb", buffering=2**20) as sink:
            if older is not None:  # before the first byte: nobody else reads what the older file kept to its owner
                os.fchmod(descriptor, stat.S_IMODE(older.st_mode))
            yield sink
            synced(sink)
        beside.replace(target)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise


def synced(sink: IO[bytes]) -> None:
    """All that was written is on disk. Raises OSError, as where the disk is full."""
    sink.flush()
    os.fsync(sink.fileno())
