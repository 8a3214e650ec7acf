"""Files as the input of a command: its options, the progress on a terminal, and the report about bad records.

[1]  Of the records that were refused, the first ones are reported one by one with their places. All are counted by
     their reasons, and go to the file of --errors.
"""

from __future__ import annotations

import os
import stat
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import IO, BinaryIO, Final, TypedDict, TypeVar, cast

import click
import msgspec

from sow_cli import advice, arguments, display, packing, recoding
from sow_cli.cell_values import COLUMN_TYPES, ColumnType
from sow_cli.inputs import opened
from sow_cli.lines import (
    NEVER_MICROS,
    PAYLOAD_BYTES_MAX,
    BadLine,
    Item,
    LineNumbers,
    Parse,
    base64_payload,
    document,
    keyed_by,
    record_form,
)
from sow_cli.operations import Operations, marked
from sow_cli.output import Fact, note, progress
from sow_cli.refused import RowReader, kept, pointed_at
from sow_cli.row_records import KINDS, Kind, Reading, Target
from sow_client import InvalidArgument, PayloadForm, Topic
from sow_client._lifetimes import lifetime
from sow_client._publish_columns import KEY_CHARACTERS_MAX

Command = TypeVar("Command", bound=Callable[..., object])

REPORTED_MAX: Final = 10
"""Refused records that are reported one by one."""


class FileInput:
    """The records of one file. Owns the progress bar, as it knows how much of the file has been read."""

    def __init__(
        self,
        file: BufferedReader,
        parse: Parse,
        reading: Reading,
        target: Target,
        *,
        in_progress: str,
        several: bool,
    ) -> None:
        """`in_progress`: the word in front of the bar. `several`: there are other files, so places name this one."""
        self._removes = reading.removes
        self._input = opened(file, name_of(file), parse, reading, target, size=_size_of(file))
        self.place = Place(name_of(file) if several else "", self._input.unit)
        total = self._input.total
        self.bar = progress("{task.fields[figures]}", measured=total is not None)
        """The progress display. It is shown only on a terminal, and not while the input is typed there."""
        if file.isatty():
            self.bar.disable = True
            if sys.stderr.isatty():
                note("reading lines from the terminal; Ctrl-D ends the input")
        self._task = self.bar.add_task(in_progress, total=total, figures="")
        self._started = time.monotonic()

    def records(
        self, numbers: LineNumbers, bad: Callable[[int, str, str, Item | BadLine], None], settled: Callable[[], int]
    ) -> Iterator[tuple[int, Item]]:
        """Yields (number of the line or record, record); reports bad ones to `bad` and continues when that returns.

        `settled` returns the number of records that the server has answered: the progress display counts these.
        """
        number = position = 0
        for outcomes, read in self._input:
            for outcome in outcomes:
                number += 1
                if self._removes is not None and isinstance(outcome, Item):
                    outcome = marked(outcome, self._removes)  # noqa: PLW2901 - the same one
                if type(outcome) is Item:
                    wrong = _fault(outcome)
                    if wrong is None:
                        position += 1
                        yield number, outcome
                        continue
                    bad(number, *wrong, outcome)
                numbers.skip(position)
                if isinstance(outcome, BadLine):
                    bad(number, outcome.reason, outcome.message, outcome)
            if not self.bar.disable:
                done = settled()
                rate = round(done / max(time.monotonic() - self._started, 1e-3))
                self.bar.update(self._task, advance=read, figures=f"{display.records(done)}  {display.count(rate)}/s")


def _fault(item: Item) -> tuple[str, str] | None:
    """Why the client refuses a record, which would end the whole run; None: it does not."""
    data, key, stamp, _ = item
    if len(data) > PAYLOAD_BYTES_MAX:
        return "PAYLOAD_TOO_LARGE", "the payload is larger than 16 MiB"
    if key is not None and len(key) > KEY_CHARACTERS_MAX:
        return "KEY_TOO_LARGE", f"the key has {len(key):,} characters"
    if stamp is None or stamp == NEVER_MICROS:
        return None
    try:
        lifetime(None, stamp)
    except InvalidArgument as error:
        return error.reason, error.message
    return None


class Refusals:
    """Counts the records that were refused, and reports them ([1]). Any thread may add one."""

    def __init__(self, errors: IO[bytes] | None, *, of_json: bool = True) -> None:
        """`errors`: gets a line of JSON for each. `of_json`: the records of the topic are JSON."""
        self.reasons: Counter[str] = Counter()
        self._of_json = of_json
        self._errors = errors
        self._has_hinted = False
        self._lock = threading.Lock()

    @property
    def total(self) -> int:
        """The number of all."""
        return self.reasons.total()

    def add(self, place: Place, number: int, reason: str, message: str, record: Item | BadLine | None = None) -> None:
        """Counts and reports a record. `record`: a line that is none; None if it is not known."""
        with self._lock:
            self.reasons[reason] += 1
            if self.total <= REPORTED_MAX:
                note(f"{place.shown(number)}: {reason}: {message}")
                if self._of_json and record is not None:
                    click.echo(pointed_at(record.data if isinstance(record, Item) else record.text), err=True, nl=False)
                if self._of_json and not self._has_hinted and isinstance(record, Item):
                    if near := advice.field_for(message, record.data):
                        note(f"  hint: it has /{display.safe(near)}; are the key fields of the topic right?")
                        self._has_hinted = True
            if self._errors is not None:
                told: dict[str, object] = {"file": place.file} if place.file else {}
                line = (
                    told
                    | {place.unit: number, "reason": reason, "message": message}
                    | dict(kept(record, self._of_json))
                )
                self._errors.write(msgspec.json.encode(line) + b"\n")

    def add_more(self, number: int) -> None:
        """Counts records of which the server did not say more."""
        if number:
            self.reasons["OTHERS"] += number

    def sum_up(self) -> None:
        """Reports the number for each reason, if there are more than were reported one by one."""
        if self.total > REPORTED_MAX:
            hint = "" if self._errors else "; --errors FILE writes all"
            note(f"… {self.total:,} refused: {self.shown}{hint}")

    @property
    def shown(self) -> str:
        """The numbers by reason."""
        return ", ".join([f"{number:,} {reason}" for reason, number in self.reasons.most_common()])

    def facts(self) -> list[Fact]:
        """The numbers in a result."""
        facts = [Fact("refused", self.total, display.records(self.total))]
        if self.reasons:
            facts.append(Fact("refused_by_reason", dict(self.reasons.most_common()), self.shown, label="reasons"))
        return facts


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a record: the file, if there are several, and line or record."""

    file: str
    unit: str

    def shown(self, number: int) -> str:
        """The place of one record."""
        return f"{self.file} {self.unit} {number}".lstrip()


def input_options(command: Command) -> Command:
    """Adds the options that say how files are read: `given: Unpack[InputOptions]`."""
    for option in (
        click.option(
            "--errors",
            type=click.Path(dir_okay=False, path_type=Path),
            metavar="FILE",
            help="A file for all records that are refused: a line of JSON each, to be mended and published again. .gz "
            "or .zst behind its name compresses it.",
        ),
        click.option(
            "--delimiter",
            type=arguments.separator,
            metavar="CHAR",
            help="Between the cells of CSV.  [default: the first of comma, semicolon and tab in the first line]",
        ),
        click.option(
            "--types",
            multiple=True,
            type=arguments.comma_separated,
            metavar="[COLUMN=]TYPE,…",
            help="Types of the columns of CSV: text, number, int, bool or json; without a name, of all others.  "
            "[default: from the first 1,000 rows]",
        ),
        click.option(
            "--encoding",
            type=recoding.encoding,
            metavar="NAME",
            help="Encoding of lines, JSON and CSV, such as cp1252.  [default: UTF-8, or that of the mark at the begin]",
        ),
        click.option(
            "--records/--no-records",
            default=None,
            help="Whether the input has records, as `sow export` and `sow query --format ndjson` write them, with "
            "their keys and expire times, or documents.  [default: from the first line]",
        ),
        click.option(
            "--as", "kind", type=click.Choice(KINDS), help="How to read FILE.  [default: from its name, else ndjson]"
        ),
        click.option(
            "--key-field",
            metavar="NAME",
            help="The field whose text becomes the key: a name, or a path such as /a/b. For topics without key fields.",
        ),
    ):
        command = option(command)
    return command


class InputOptions(TypedDict):
    """The values of `input_options`."""

    errors: Path | None
    delimiter: str | None
    types: tuple[tuple[str, ...], ...]
    encoding: str | None
    records: bool | None
    kind: Kind | None
    key_field: str | None


def errors_file(given: InputOptions, inputs: Iterable[BufferedReader]) -> IO[bytes] | None:
    """The file of --errors, opened until the command ends. Raises a usage error if it is one of the inputs, which would
    be emptied before it is read."""
    path = given["errors"]
    if path is None:
        return None
    try:
        if path.is_file() and any(
            _size_of(one) is not None and os.path.samestat(os.fstat(one.fileno()), path.stat()) for one in inputs
        ):
            raise click.UsageError(f"--errors: {display.safe(str(path))} is the input")
        packing.check(path.name)
        plain = path.open("wb")
    except OSError as error:
        raise click.UsageError(f"--errors: cannot write {display.safe(str(path))}: {error.strerror}") from error
    context = click.get_current_context()
    return context.with_resource(packing.packed(context.with_resource(plain), path.name))


def reading_of(
    given: InputOptions,
    target: Target,
    *,
    has_lifetime: bool,
    keep_spaces: bool = False,
    removes: Operations | None = None,
) -> Reading:
    """The way in which the options want files to be read. `has_lifetime`: one is given for all records. `removes`:
    whether a document is a removal; with --records, whether a line is. Raises a usage error."""
    types: dict[str, ColumnType] = {}
    for one in [one for some in given["types"] for one in some]:
        name, _, kind = one.rpartition("=")
        if kind not in COLUMN_TYPES:
            raise click.BadParameter(f"{kind!r} is none of {', '.join(COLUMN_TYPES)}", param_hint="--types")
        types[name] = kind
    key_field, records = given["key_field"], given["records"]
    form = PayloadForm(target.message_type, target.separator)
    try:
        keyed = None if key_field is None else keyed_by(key_field, form)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--key-field") from error
    # A lifetime on the command line is for every record, unless --records says that records have their own.
    stamps = records is True or (records is None and not has_lifetime)
    absent = None if has_lifetime or target.rejects else NEVER_MICROS
    reading = Reading(
        given["kind"],
        types,
        given["delimiter"],
        records,
        stamps=stamps,
        absent=absent,
        encoding=given["encoding"],
        keyed=keyed,
        keep_spaces=keep_spaces,
        removes=None if records else removes,
    )
    if keep_spaces:
        return reading
    record = record_form(
        form,
        with_key=not target.has_key,
        stamps=stamps,
        absent=absent,
        is_told=records is True,
        keyed=keyed,
        row=RowReader(reading, target),
        removes=removes if records else None,
    )
    return replace(reading, record=record)


def target_of(topic: Topic | None) -> Target:
    """The form of a topic's records. A topic that does not exist is a json topic without key fields (rule K1)."""
    if topic is None:
        return Target()
    settings = topic.settings
    rejects = settings.expiration == "reject"
    return Target(settings.message_type, settings.fix_separator, bool(settings.key), rejects)


def line_parser(reading: Reading, target: Target, *, as_it_is: bool) -> Parse:
    """The function that makes a record of a line. `as_it_is`: its bytes are the payload, whatever the message type."""
    if reading.records and reading.record is not None:
        return reading.record
    parse = document if target.message_type == "json" or as_it_is else base64_payload
    keyed = reading.keyed
    if keyed is None or parse is document:
        return keyed or parse
    return lambda line: keyed(parse(line).data)


def standard_input() -> BufferedReader:
    """Standard input, in bytes."""
    return buffered(sys.stdin.buffer)


def buffered(stream: BinaryIO) -> BufferedReader:
    """The stream as one that can be peeked into; tests give others."""
    return stream if isinstance(stream, BufferedReader) else BufferedReader(cast(RawIOBase, stream))


def _size_of(file: BufferedReader) -> int | None:
    """Bytes of a regular file; None for pipes and terminals, which end when they end."""
    try:
        status = os.fstat(file.fileno())
    except (OSError, ValueError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def name_of(file: BufferedReader) -> str:
    """The name of a file; of standard input "-"."""
    name = getattr(file, "name", "-")
    return name if isinstance(name, str) and name != "<stdin>" else "-"
