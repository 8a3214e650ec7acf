"""`sow publish`: NDJSON lines through the buffered publisher, or one record.

[1]  A line that cannot be published is reported with its number, and the other lines are still published.
[2]  With --strict everything before the first bad line is published, and nothing after it.
[3]  Records reported as published are acknowledged, not merely sent. When the stream breaks off, the report says how
     far the acknowledgements came.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from io import BufferedReader
from itertools import groupby
from operator import attrgetter
from typing import Final, get_args

import click

from sow_cli import arguments, display
from sow_cli.exits import SERVER_SAID_NO
from sow_cli.lines import (
    BadLine,
    Item,
    LineNumbers,
    Parse,
    base64_payload,
    chunks,
    document,
    keyed_by,
    record_form,
)
from sow_cli.output import Fact, Output, note, output_option, progress
from sow_cli.session import Session
from sow_client import Client, DurabilityName, NotFound, Published, Refusal, SowError, Topic

_STRICT_RECORDS_MAX: Final = 1_000  # an atomic request holds no more (rule K8)
_STRICT_BYTES_MAX: Final = 8 * 2**20


@dataclass(frozen=True, slots=True)
class Lifetime:
    """The lifetime that the options give to every record."""

    ttl: str | None
    expire_at: datetime | None
    keep: bool
    extend: bool


@dataclass(frozen=True, slots=True)
class Merging:
    """Tells whether each document is merged into its record (rule P2), and which fields are removed then."""

    delta: bool
    unset: list[str] | None


@dataclass(slots=True)
class Tally:
    """Counts the outcomes of the lines."""

    published: int = 0
    refused: int = 0
    started: float = field(default_factory=time.monotonic)

    def bad(self, line: int, reason: str, message: str) -> None:
        """Counts and reports a line that was not published."""
        self.refused += 1
        report(line, reason, message)


def report(line: int, reason: str, message: str) -> None:
    """Reports on stderr which line was not published, and why."""
    note(f"line {line}: {reason}: {message}")


@click.command(short_help="Publish records from a file or a pipe.")
@click.argument("topic")
@click.argument("file", type=click.File("rb"), default="-")
@click.option("--data", metavar="TEXT", help="Publish this one document instead of a file.")
@click.option(
    "--key",
    type=arguments.key,
    metavar="KEY",
    help="Key of one record: --data, or all of FILE (its bytes as they are). For topics without key fields.",
)
@click.option(
    "--key-field",
    metavar="NAME",
    help="The field, a name or a path such as /a/b, whose text becomes the key. For topics without key fields.",
)
@click.option("--ttl", type=arguments.ttl, metavar="DURATION|never", help="Lifetime, such as 30s or 1h30m.")
@click.option("--expire-at", type=arguments.instant, metavar="TIME", help="When to expire: 2030-01-31T12:00:00Z.")
@click.option(
    "--ttl-mode",
    type=click.Choice(["reset", "keep", "extend"]),
    default="reset",
    show_default=True,
    help="A live record gets the new expire time, keeps its own, or gets the later of both.",
)
@click.option("--keep-ttl", is_flag=True, help="The same as --ttl-mode keep.")
@click.option("--delta", is_flag=True, help="Merge each document into the record of its key instead of replacing it.")
@click.option(
    "--unset",
    type=arguments.comma_separated,
    multiple=True,
    metavar="PATH,…",
    help="With --delta: fields to remove from each record, such as /note.",
)
@click.option("--raw", is_flag=True, help="Each line is an unchanged payload, whatever the topic's message type.")
@click.option("--records", is_flag=True, help="Each line is a record as `sow query --format ndjson` writes it.")
@click.option(
    "--batch",
    "batch_records",
    type=click.IntRange(1, 10_000),
    default=1_000,
    show_default=True,
    metavar="N",
    help="Records per request.",
)
@click.option(
    "--durability",
    type=click.Choice(get_args(DurabilityName)),
    help="Acknowledge once the records are on disk, in the system's memory, or on disk at sync peers, too.  [default: "
    "as configured at the server]",
)
@click.option("--strict", is_flag=True, help="Stop at the first bad line; nothing after it is published.")
@output_option
@click.pass_obj
def publish(
    session: Session,
    *,
    topic: str,
    file: BufferedReader,
    data: str | None,
    key: str | None,
    key_field: str | None,
    ttl: str | None,
    expire_at: datetime | None,
    ttl_mode: str,
    keep_ttl: bool,
    delta: bool,
    unset: tuple[tuple[str, ...], ...],
    raw: bool,
    records: bool,
    batch_records: int,
    durability: DurabilityName | None,
    strict: bool,
    output: Output,
) -> None:
    """Publish records to TOPIC: one from each line of FILE, or of standard input (-).

    On a json topic a line is a document (NDJSON). On topics of other message types it is the base64 text of a
    payload or, with --raw, the payload itself. Empty lines are skipped.

    A bad line is reported on stderr with its number, and the other lines are published; the exit code is then 1. With
    --strict the first bad line ends the command: all lines before it are published, none after it.

    With --records lines carry their key, if the topic needs one, and their expire time, which overrides --ttl:

    \b
      sow query orders --format ndjson | sow publish copy --records --ttl never

    \b
    Examples:
      sow publish orders orders.ndjson --ttl 30s
      sow publish orders --data '{"id": 1, "price": 9.5}'
      sow publish sessions --key alice --data '{"page": "/home"}' --ttl 20m
      sow publish orders --delta --unset /note --data '{"id": 1, "price": 9.7}'
      tail -f ticks.ndjson | sow publish ticks --key-field symbol
      sow publish images --key logo logo.png
    """
    arguments.refuse_together(("--ttl", ttl is not None), ("--expire-at", expire_at is not None))
    _check_input(data, key, key_field, raw=raw, records=records)
    if unset and not delta:
        raise click.UsageError("--unset is for --delta: a plain publish replaces the whole record")
    arguments.refuse_together(("--keep-ttl", keep_ttl), (f"--ttl-mode {ttl_mode}", ttl_mode == "extend"))
    lifetime = Lifetime(ttl, expire_at, keep_ttl or ttl_mode == "keep", ttl_mode == "extend")
    with session.client() as client:
        described = _described(client, topic)
        is_json = described is None or described.settings.message_type == "json"
        if described and described.settings.expiration == "disabled" and (expire_at or ttl not in (None, "never")):
            note(f"topic {topic} has expiration disabled: lifetimes are stored but not acted on")
        if records:
            parse = record_form(payload_is_json=is_json, with_key=described is None or not described.settings.key)
        elif key_field is not None:
            parse = keyed_by(key_field)
        else:
            # A file that is one record is used as it is: unlike a line, it may hold any bytes.
            parse = document if is_json or raw or (key is not None and data is None) else base64_payload
        merging = Merging(delta, [path for some in unset for path in some] or None)
        job = _Job(client, topic, lifetime, merging, durability, batch_records)
        if data is not None or key is not None:
            whole = file.read() if data is None else data.encode("utf-8", "surrogateescape")
            output.one(published_facts(topic, _publish_one(job, whole, parse, key)))
            return
        reading = _Reading(file, parse, keep_spaces=raw)
        tally = Tally()
        with reading.bar:
            if strict:
                _publish_strictly(job, reading, tally)
            else:
                _publish_all(job, reading, tally)
    output.one(_summary(topic, tally))
    if tally.refused:
        click.get_current_context().exit(SERVER_SAID_NO)


def _check_input(data: str | None, key: str | None, key_field: str | None, *, raw: bool, records: bool) -> None:
    """Refuses options that contradict each other about where the records and their keys come from."""
    from_file = click.get_current_context().get_parameter_source("file") is click.core.ParameterSource.COMMANDLINE
    arguments.refuse_together(("--data", data is not None), ("FILE", from_file))
    arguments.refuse_together(("--data", data is not None), ("--records", records))
    arguments.refuse_together(
        ("--key", key is not None), ("--key-field", key_field is not None), ("--records", records)
    )
    arguments.refuse_together(("--key-field", key_field is not None), ("--raw", raw), ("--records", records))
    if key_field is not None and not all(key_field.removeprefix("/").split("/")):
        raise click.BadParameter(f"{key_field!r} has an empty step", param_hint="--key-field")


@dataclass(frozen=True, slots=True)
class _Job:
    """The client, topic and options with which the lines are published."""

    client: Client
    topic: str
    lifetime: Lifetime
    merging: Merging
    durability: DurabilityName | None
    batch_records: int


class _Reading:
    """Turns the input into records. Owns the progress bar, as it knows how much of the file has been read."""

    def __init__(self, file: BufferedReader, parse: Parse, *, keep_spaces: bool) -> None:
        self._file = file
        self._parse = parse
        self._keep_spaces = keep_spaces
        size = _size_of(file)
        self.bar = progress("{task.fields[figures]}", measured=size is not None)
        """The progress display. It is shown only on a terminal, and not while the input is typed there."""
        if file.isatty():
            self.bar.disable = True
            if sys.stderr.isatty():
                note("reading lines from the terminal; Ctrl-D ends the input")
        self._task = self.bar.add_task("publishing", total=size, figures="")
        self._started = time.monotonic()

    def records(
        self, numbers: LineNumbers, bad: Callable[[int, str, str], None], settled: Callable[[], int]
    ) -> Iterator[tuple[int, Item]]:
        """Yields (line number, record); reports bad lines to `bad` and continues when that returns.

        `settled` returns the number of records that the server has answered: the progress display counts these.
        """
        parse, strip = self._parse, None if self._keep_spaces else b" \t\r"
        line_number = position = 0
        for chunk in chunks(self._file):
            read = 0
            for line in chunk:
                line_number += 1
                if line is None:
                    numbers.skip(position)
                    bad(line_number, "PAYLOAD_TOO_LARGE", "the line is longer than 16 MiB")
                    continue
                read += len(line) + 1
                text = line if strip is None else line.strip(strip)
                if not text:
                    numbers.skip(position)
                    continue
                try:
                    item = parse(text)
                except BadLine as error:
                    numbers.skip(position)
                    bad(line_number, error.reason, error.message)
                    continue
                position += 1
                yield line_number, item
            if not self.bar.disable:
                done = settled()
                rate = round(done / max(time.monotonic() - self._started, 1e-3))
                self.bar.update(self._task, advance=read, figures=f"{display.records(done)}  {display.count(rate)}/s")


class _Stop(Exception):
    """The first bad line of a strict run."""


def _publish_one(job: _Job, whole: bytes, parse: Parse, key: str | None) -> Published:
    try:
        item = parse(whole)
    except BadLine as bad:
        raise click.UsageError(f"{bad.reason}: {bad.message}") from bad
    key = item.key if key is None else key
    lifetime = job.lifetime
    if job.merging.delta:
        return job.client.delta_publish(
            job.topic,
            item.data,
            unset=job.merging.unset,
            key=key,
            ttl=lifetime.ttl,
            expire_at=lifetime.expire_at,
            keep_ttl=lifetime.keep,
            extend_ttl=lifetime.extend,
            durability=job.durability,
        )
    return job.client.publish(
        job.topic,
        item.data,
        key=key,
        ttl=lifetime.ttl,
        expire_at=lifetime.expire_at,
        keep_ttl=lifetime.keep,
        extend_ttl=lifetime.extend,
        durability=job.durability,
    )


def _publish_all(job: _Job, reading: _Reading, tally: Tally) -> None:
    """The fast way: pipelined batches; refusals come back later and are matched to their lines ([1])."""
    numbers = LineNumbers()

    def refused(refusal: Refusal) -> None:
        # Runs on the publisher's own thread: it reports, and the publisher counts.
        report(numbers.line(refusal.index), refusal.reason, refusal.message)

    publisher = job.client.publisher(
        job.topic,
        ttl=job.lifetime.ttl,
        expire_at=job.lifetime.expire_at,
        keep_ttl=job.lifetime.keep,
        extend_ttl=job.lifetime.extend,
        durability=job.durability,
        batch_records=job.batch_records,
        on_refusal=refused,
        delta=job.merging.delta,
        unset=job.merging.unset,
    )
    try:
        with publisher:
            send = publisher.publish
            for _, (data, key, expire_time_micros) in reading.records(
                numbers, tally.bad, lambda: publisher.acknowledged
            ):
                send(data, key=key, expire_at=expire_time_micros)
    except (SowError, KeyboardInterrupt):
        # [3]. Later lines may have been applied as well. Publishing them again does no harm, as they have keys.
        settled = publisher.acknowledged
        note(
            f"broke off: lines 1 to {numbers.line(settled - 1)} are published or refused"
            if settled
            else "broke off: no line is published"
        )
        raise
    finally:
        tally.published = publisher.applied + publisher.duplicates
        tally.refused += publisher.refused


def _publish_strictly(job: _Job, reading: _Reading, tally: Tally) -> None:
    """The exact way ([2]): atomic requests, one after another; the records before a bad one are sent once more."""
    batch: list[tuple[int, Item]] = []
    batch_bytes = 0
    batch_records = min(job.batch_records, _STRICT_RECORDS_MAX)

    def bad(line: int, reason: str, message: str) -> None:
        raise _Stop(line, reason, message)

    def send() -> None:
        nonlocal batch_bytes
        pending, batch_bytes = batch.copy(), 0
        batch.clear()
        # A request has one lifetime for all of its records, so a line with another lifetime ends a run.
        for _, run in groupby(pending, key=lambda one: one[1].expire_time_micros):
            _publish_atomically(job, list(run), tally)

    try:
        for line_and_item in reading.records(LineNumbers(), bad, lambda: tally.published):
            batch.append(line_and_item)
            batch_bytes += len(line_and_item[1].data)
            if len(batch) >= batch_records or batch_bytes >= _STRICT_BYTES_MAX:
                send()
        send()
    except _Stop as stop:
        line, reason, message = stop.args
        try:
            send()  # the records read before a line that could not be parsed
        except _Stop as earlier:
            line, reason, message = earlier.args
        tally.bad(line, reason, message)
        note(f"stopped at line {line}; published before it: {display.records(tally.published)}")


def _publish_atomically(job: _Job, run: list[tuple[int, Item]], tally: Tally) -> None:
    """Publishes all of `run`, or the records before its first bad one, which then ends everything."""
    if not run:
        return
    outcomes = _send_atomically(job, [item for _, item in run])
    bad = [one for one in outcomes if isinstance(one, Refusal) and one.reason != "ATOMIC_ABORTED"]
    if not bad:
        tally.published += len(run)
        return
    first = min(bad, key=attrgetter("index"))
    _publish_atomically(job, run[: first.index], tally)
    raise _Stop(run[first.index][0], first.reason, first.message)


def _send_atomically(job: _Job, items: list[Item]) -> list[Published | Refusal]:
    keys = [item.key for item in items if item.key is not None]
    own_expire_time = items[0].expire_time_micros
    return job.client.publish_many(
        job.topic,
        [item.data for item in items],
        keys=keys if len(keys) == len(items) else None,
        ttl=job.lifetime.ttl if own_expire_time is None else None,
        expire_at=job.lifetime.expire_at if own_expire_time is None else own_expire_time,
        keep_ttl=job.lifetime.keep,
        extend_ttl=job.lifetime.extend,
        durability=job.durability,
        atomic=True,
        delta=job.merging.delta,
        unset=job.merging.unset,
        refusals="return",
    )


def _described(client: Client, name: str) -> Topic | None:
    """The topic; None when it does not exist yet: the first publish may create it (rule K1), as a json topic."""
    try:
        return client.describe_topic(name)
    except NotFound:
        return None


def _size_of(file: BufferedReader) -> int | None:
    """Bytes of a regular file; None for pipes and terminals, which end when they end."""
    try:
        status = os.fstat(file.fileno())
    except (OSError, ValueError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def published_facts(topic: str, done: Published) -> list[Fact]:
    """The facts that a publish or a touch of one record returns."""
    expire = done.expire_time_micros
    now_micros = time.time_ns() // 1_000
    expires = display.expires(expire, now_micros) if done.expire_time_known else display.UNKNOWN
    facts = [
        Fact("topic", topic, topic),
        Fact("key", done.key, display.safe(done.key)),
        Fact("version", done.version or None, str(done.version or display.UNKNOWN)),
        Fact(
            "expire_time_micros",
            expire,
            expires if expire is None else f"{display.instant(expire)}  ({expires})",
            label="expires",
        ),
        Fact("sequence", done.sequence or None, str(done.sequence or display.UNKNOWN)),
        Fact("bookmark", done.bookmark, done.bookmark or "", in_lists=False),
        Fact("delivered", done.delivered, "" if done.delivered is None else display.count(done.delivered)),
    ]
    if done.ttl_ignored:
        facts.append(Fact("ttl_ignored", True, "yes: the topic has expiration disabled"))
    if done.duplicate:
        facts.append(Fact("duplicate", True, "yes: an earlier attempt had been applied"))
    if not done.expire_time_known:
        facts.append(Fact("expire_time_known", False, ""))
    return facts


def _summary(topic: str, tally: Tally) -> list[Fact]:
    seconds = max(time.monotonic() - tally.started, 1e-6)
    rate = round(tally.published / seconds)
    return [
        Fact("topic", topic, topic),
        Fact("published", tally.published, display.records(tally.published)),
        Fact("refused", tally.refused, display.records(tally.refused)),
        Fact("seconds", round(seconds, 3), display.duration(round(seconds * 1e6)), label="time"),
        Fact("records_per_second", rate, f"{display.count(rate)} records/s", label="rate"),
    ]
