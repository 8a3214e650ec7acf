"""`sow publish`: the records of files through the buffered publisher, or one record.

[1]  A record that cannot be published is counted by its reason, and the others are still published. The first ones are
     reported with their places; --errors has all.
[2]  With --strict everything before the first bad record is published, and nothing after it.
[3]  Records reported as published are acknowledged, not merely sent. When the stream breaks off, the report says how
     far the acknowledgements came.
[4]  Under a condition (rule P3) each record is decided by itself, request by request: this is slower.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from io import BufferedReader
from itertools import groupby, islice
from operator import attrgetter
from typing import Final, Unpack, get_args

import click

from sow_cli import arguments, display
from sow_cli.exits import SERVER_SAID_NO
from sow_cli.ignored import (
    count_ignored,
    remark,
    remark_at_once,
    remark_created,
    remark_if_past,
    told_in_remarks,
)
from sow_cli.lines import NEVER_MICROS, BadLine, Item, LineNumbers, Parse, SentItems
from sow_cli.one_record import published_facts
from sow_cli.operations import operations_of
from sow_cli.output import Fact, Output, note, output_option
from sow_cli.session import Session
from sow_cli.sources import (
    FileInput,
    InputOptions,
    Place,
    Refusals,
    buffered,
    errors_file,
    input_options,
    line_parser,
    reading_of,
    standard_input,
    target_of,
)
from sow_client import Client, DurabilityName, NotFound, Published, Refusal, SowError, Topic

_STRICT_RECORDS_MAX: Final = 1_000  # an atomic request holds no more (rule K8)
_STRICT_BYTES_MAX: Final = 8 * 2**20
_OTHER_WAYS: Final = "--strict, --if-absent, --if-present, --data or --key"
"""Ways to publish that have no removals."""


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


@dataclass(frozen=True, slots=True)
class Condition:
    """The condition under which a record is applied (rule P3)."""

    absent: bool
    present: bool
    version: int | None

    @property
    def is_one(self) -> bool:
        """True: there is a condition."""
        return self.absent or self.present or self.version is not None


@dataclass(slots=True)
class Tally:
    """Counts the outcomes of a run."""

    refusals: Refusals
    published: int = 0
    ttls_ignored: int = 0
    removed: int | None = None
    """None: no record can be a removal."""
    started: float = field(default_factory=time.monotonic)


_HELP: Final = """Publish records to TOPIC: those of the FILEs, or of standard input (-).

On a json topic a line is a document (NDJSON); also a JSON array, CSV, Parquet and Arrow are read, as the name of
the file or --as tells. On topics of other message types a line is the base64 text of a payload or, with --raw, the
payload itself. Empty lines are skipped.

A bad record does not stop the others; the first ten are reported on stderr with their places, all are counted, and
the exit code is then 1. With --strict the first bad record ends the command: all before it are published, none
after it. A payload has at most 16 MiB, and a line 48 MiB.

Files of `sow export`, and lines of `sow query --format ndjson`, become the same records: with their keys, if the
topic needs them, and their expire times, unless --ttl or --expire-at gives others.

Every record that counts as published is acknowledged by the server. If the connection breaks, the command
reconnects for 30 seconds, and no record is applied twice. After that it ends with code 3 and reports the line up to
which every record is published or refused. The whole file may be published again, as records have keys.

The answer to one record, of --data or --key, has its version, sequence and bookmark, for `sow subscribe --from`. If
the record was expired on arrival, `delivered` is the number of subscribers that got it.

\b
Examples:
  sow publish orders orders.ndjson --ttl 30s
  sow publish orders --data '{"id": 1, "price": 9.5}' --if-absent
  sow publish orders prices.csv --types zip=text --errors bad.ndjson
  sow publish sessions --key alice --data '{"page": "/home"}' --ttl 20m
  sow publish orders --delta --unset /note --data '{"id": 1, "price": 9.7}'
  tail -f ticks.ndjson | sow publish ticks --key-field symbol
  sow query orders --format ndjson | sow publish copy
  sow publish customers events.ndjson --op-field __op
  sow changes orders | sow publish copy --records --op-field op
  sow publish images --key logo logo.png
"""


@click.command(short_help="Publish records from a file or a pipe.", help=_HELP)
@click.argument("topic")
@click.argument("files", nargs=-1, type=click.File("rb"), metavar="[FILE]...")
@click.option("--data", type=click.UNPROCESSED, metavar="TEXT", help="Publish this one document instead of a file.")
@click.option(
    "--key",
    type=arguments.key,
    metavar="KEY",
    help="Key of one record: --data, or all of FILE (its bytes as they are). For topics without key fields.",
)
@click.option(
    "--ttl",
    type=arguments.ttl,
    metavar="DURATION|never",
    help="Lifetime of every record, such as 30s or 1h30m.  [default: that of a record of an export, else the topic's]",
)
@click.option(
    "--expire-at",
    type=arguments.instant,
    metavar="TIME",
    help="When every record expires, such as 2030-01-31T12:00:00Z.",
)
@click.option(
    "--ttl-mode",
    type=click.Choice(["reset", "keep", "extend"]),
    default="reset",
    show_default=True,
    help="A live record gets the new expire time, keeps its own, or gets the later of both.",
)
@click.option("--keep-ttl", is_flag=True, help="The same as --ttl-mode keep.")
@click.option(
    "--delta",
    is_flag=True,
    help="Merge each document into the live record of its key. Objects merge, scalars and arrays replace, a missing or "
    "null field stays. Without a live record it is published as it is.",
)
@click.option(
    "--unset",
    type=arguments.comma_separated,
    multiple=True,
    metavar="PATH,…",
    help="With --delta: fields to remove from each record, such as /note (repeatable).",
)
@click.option(
    "--op-field",
    metavar="NAME",
    help="The field that says what is done with a record: it is removed where the field is delete or d, and published "
    "where it is put, c, u or r. With --records it is a field of the line, as in those of `sow changes`.",
)
@click.option("--raw", is_flag=True, help="Each line is an unchanged payload, whatever the topic's message type.")
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
    help="When the server acknowledges: once the records are on its disk, in its system's memory, or on disk at sync "
    "peers, too. If sync peers fail, the exit code is 1, and the records stay on this server.  [default: "
    "as configured at the server]",
)
@click.option(
    "--if-absent",
    is_flag=True,
    help="Only records whose key has no live record. Requests of a file wait for each other, which is slower.",
)
@click.option("--if-present", is_flag=True, help="Only records whose key has a live record; likewise.")
@click.option(
    "--if-version",
    type=click.IntRange(min=1),
    metavar="VERSION",
    help="One record, only if the live record has this version.",
)
@click.option(
    "--strict",
    is_flag=True,
    help="Stop at the first bad record; nothing after it is published. Atomic requests make this slower.",
)
@input_options
@output_option
@click.pass_obj
def publish(
    session: Session,
    *,
    topic: str,
    files: tuple[BufferedReader, ...],
    data: str | None,
    key: str | None,
    ttl: str | None,
    expire_at: datetime | None,
    ttl_mode: str,
    keep_ttl: bool,
    delta: bool,
    unset: tuple[tuple[str, ...], ...],
    op_field: str | None,
    raw: bool,
    batch_records: int,
    durability: DurabilityName | None,
    if_absent: bool,
    if_present: bool,
    if_version: int | None,
    strict: bool,
    output: Output,
    **given: Unpack[InputOptions],
) -> None:
    arguments.refuse_together(("--ttl", ttl is not None), ("--expire-at", expire_at is not None))
    _check_input(data, key, files, given, raw=raw)
    arguments.refuse_together(("--keep-ttl", keep_ttl), (f"--ttl-mode {ttl_mode}", ttl_mode == "extend"))
    condition = _condition(if_absent, if_present, if_version, of_one=data is not None or key is not None)
    one_by_one = strict or condition.is_one or data is not None or key is not None
    for name, there in ((_OTHER_WAYS, one_by_one), ("--raw", raw)):
        arguments.refuse_together(("--op-field", op_field is not None), (name, there))
    lifetime = Lifetime(ttl, expire_at, keep_ttl or ttl_mode == "keep", ttl_mode == "extend")
    inputs: tuple[BufferedReader, ...] = tuple(map(buffered, files)) or (standard_input(),)
    with session.client() as client, told_in_remarks():
        found = described_topic(client, topic)
        target = target_of(found)
        is_told = remark_lifetime(found, ttl, expire_at)
        removes = operations_of(op_field, target, of_lines=given["records"] is True)
        is_given = bool(ttl or expire_at)
        reading = reading_of(given, target, has_lifetime=is_given, keep_spaces=raw, removes=removes)
        parse = line_parser(reading, target, as_it_is=raw or (key is not None and data is None))
        job = _Job(client, topic, lifetime, _merging(delta, unset), durability, batch_records, condition)
        if data is not None or key is not None:
            whole = inputs[0].read() if data is None else data.encode("utf-8", "surrogateescape")
            output.one(published_facts(topic, _publish_one(job, whole, parse, key)))
            tell_created(client, topic, found, published=1)
            return
        tally = Tally(Refusals(errors_file(given, inputs), of_json=target.message_type == "json"))
        tally.removed = None if removes is None else 0
        for file in inputs:
            source = FileInput(file, parse, reading, target, in_progress="publishing", several=len(inputs) > 1)
            if not _publish_file(job, source, tally, strict=strict):
                break
        tell_created(client, topic, found, published=tally.published)
    tally.refusals.sum_up()
    output.one(_summary(topic, tally))
    if tally.ttls_ignored and not is_told:
        remark(topic)
    if tally.refusals.total:
        click.get_current_context().exit(SERVER_SAID_NO)


def _merging(delta: bool, unset: tuple[tuple[str, ...], ...]) -> Merging:
    if unset and not delta:
        raise click.UsageError("--unset is for --delta: a plain publish replaces the whole record")
    return Merging(delta, [path for some in unset for path in some] or None)


def _condition(absent: bool, present: bool, version: int | None, *, of_one: bool) -> Condition:
    arguments.refuse_together(("--if-absent", absent), ("--if-present", present), ("--if-version", version is not None))
    if version is not None and not of_one:
        raise click.UsageError("--if-version is for one record: --data, or --key with a file")
    return Condition(absent, present, version)


def _check_input(
    data: str | None,
    key: str | None,
    files: tuple[BufferedReader, ...],
    given: InputOptions,
    *,
    raw: bool,
) -> None:
    """Refuses options that contradict each other about where the records and their keys come from."""
    of_lines, records = given["kind"] in (None, "ndjson"), given["records"] is True
    arguments.refuse_together(("--data", data is not None), ("FILE", bool(files)))
    arguments.refuse_together(("--data", data is not None), ("--records", records))
    arguments.refuse_together(
        ("--key", key is not None), ("--key-field", given["key_field"] is not None), ("--records", records)
    )
    arguments.refuse_together(("--key-field", given["key_field"] is not None), ("--raw", raw), ("--records", records))
    arguments.refuse_together(("--raw", raw), (f"--as {given['kind']}", not of_lines))
    arguments.refuse_together(("--data", data is not None), ("--as", given["kind"] is not None))
    if key is not None and len(files) > 1:
        raise click.UsageError("--key is for one file: its bytes are the record")


@dataclass(frozen=True, slots=True)
class _Job:
    """The client, topic and options with which the lines are published."""

    client: Client
    topic: str
    lifetime: Lifetime
    merging: Merging
    durability: DurabilityName | None
    batch_records: int
    condition: Condition


class _Stop(Exception):
    """The first bad line of a strict run."""


def _publish_one(job: _Job, whole: bytes, parse: Parse, key: str | None) -> Published:
    try:
        item = parse(whole)
    except BadLine as bad:
        raise click.UsageError(f"{bad.reason}: {bad.message}") from bad
    key = item.key if key is None else key
    lifetime, condition = job.lifetime, job.condition
    client, merging = job.client, job.merging
    publish = partial(client.delta_publish, unset=merging.unset) if merging.delta else client.publish
    return publish(
        job.topic,
        item.data,
        key=key,
        ttl=lifetime.ttl,
        expire_at=lifetime.expire_at,
        keep_ttl=lifetime.keep,
        extend_ttl=lifetime.extend,
        only_if_absent=condition.absent,
        only_if_present=condition.present,
        only_if_version=condition.version,
        durability=job.durability,
    )


def _publish_file(job: _Job, source: FileInput, tally: Tally, *, strict: bool) -> bool:
    """Publishes the records of a file. False: a strict run has met a bad one, which ends everything."""
    with source.bar:
        if strict:
            return _publish_strictly(job, source, tally)
        if job.condition.is_one:
            _publish_checked(job, source, tally)
        else:
            _publish_all(job, source, tally)
    return True


def _publish_all(job: _Job, source: FileInput, tally: Tally) -> None:
    """The fast way: pipelined batches; refusals come back later and are matched to their places ([1])."""
    numbers = LineNumbers()
    bad = partial(tally.refusals.add, source.place)

    sent = SentItems()

    def refused(refusal: Refusal) -> None:
        # Runs on the publisher's own thread.
        bad(numbers.line(refusal.index), refusal.reason, refusal.message, sent.item(refusal.index))

    publisher = job.client.publisher(
        job.topic,
        ttl=job.lifetime.ttl,
        expire_at=job.lifetime.expire_at,
        keep_ttl=job.lifetime.keep,
        extend_ttl=job.lifetime.extend,
        durability=job.durability,
        batch_records=job.batch_records,
        on_ack=lambda ack: sent.settled(ack.applied + ack.duplicates + len(ack.refusals)),
        on_refusal=refused,
        delta=job.merging.delta,
        unset=job.merging.unset,
    )
    try:
        with publisher:
            send = publisher.publish
            for _, item in source.records(numbers, bad, lambda: publisher.acknowledged):
                sent.add(item)
                data, key, expire_time_micros, removes = item
                if removes:
                    publisher.remove(key, data=data if key is None else None)
                elif expire_time_micros == NEVER_MICROS:
                    send(data, key=key, ttl="never")
                else:
                    send(data, key=key, expire_at=expire_time_micros)
    except (SowError, KeyboardInterrupt, click.UsageError, OSError) as error:  # of --errors, whose disk may be full
        # [3]. Later lines may have been applied as well. Publishing them again does no harm, as they have keys.
        settled = publisher.acknowledged
        if settled or not isinstance(error, click.UsageError):  # of a file that cannot be read further
            _broke_off(source.place, numbers.line(settled - 1) if settled else 0)
        raise
    finally:
        tally.published += publisher.applied + publisher.duplicates
        tally.ttls_ignored += publisher.ttls_ignored
        if tally.removed is not None:
            tally.removed += publisher.removed


def _publish_checked(job: _Job, source: FileInput, tally: Tally) -> None:
    """Under a condition ([4]): requests one after another, each record by itself."""
    bad = partial(tally.refusals.add, source.place)
    records = source.records(LineNumbers(), bad, lambda: tally.published + tally.refusals.total)
    done = 0
    try:
        while batch := list(islice(records, job.batch_records)):
            # A request has one lifetime for all of its records, so a record with another lifetime ends a run.
            for _, group in groupby(batch, key=lambda one: one[1].expire_time_micros):
                run = list(group)
                outcomes = _send(job, [item for _, item in run])
                tally.ttls_ignored += count_ignored(outcomes)
                for (number, item), outcome in zip(run, outcomes, strict=True):
                    if isinstance(outcome, Refusal):
                        bad(number, outcome.reason, outcome.message, item)
                    else:
                        tally.published += 1
                    done = number
    except (SowError, KeyboardInterrupt):
        _broke_off(source.place, done)
        raise


def _broke_off(place: Place, last: int) -> None:
    """Reports how far a run came that ends with an error."""
    where = f" of {place.file}" if place.file else ""
    note(
        f"broke off: {place.unit}s 1 to {last}{where} are published or refused"
        if last
        else f"broke off: no {place.unit}{where} is published"
    )


def _publish_strictly(job: _Job, source: FileInput, tally: Tally) -> bool:
    """The exact way ([2]): atomic requests, one after another; the records before a bad one are sent once more. False:
    there was a bad one."""
    batch: list[tuple[int, Item]] = []
    batch_bytes = 0
    batch_records = min(job.batch_records, _STRICT_RECORDS_MAX)

    def bad(line: int, reason: str, message: str, record: Item | BadLine) -> None:
        raise _Stop(line, reason, message, record)

    def send() -> None:
        nonlocal batch_bytes
        pending, batch_bytes = batch.copy(), 0
        batch.clear()
        # A request has one lifetime for all of its records, so a record with another lifetime ends a run.
        for _, run in groupby(pending, key=lambda one: one[1].expire_time_micros):
            _publish_atomically(job, list(run), tally)

    try:
        for number_and_item in source.records(LineNumbers(), bad, lambda: tally.published):
            batch.append(number_and_item)
            batch_bytes += len(number_and_item[1].data)
            if len(batch) >= batch_records or batch_bytes >= _STRICT_BYTES_MAX:
                send()
        send()
    except _Stop as stop:
        line, reason, message, record = stop.args
        try:
            send()  # the records read before one that could not be parsed
        except _Stop as earlier:
            line, reason, message, record = earlier.args
        tally.refusals.add(source.place, line, reason, message, record)
        note(f"stopped at {source.place.shown(line)}; published before it: {display.records(tally.published)}")
        return False
    return True


def _publish_atomically(job: _Job, run: list[tuple[int, Item]], tally: Tally) -> None:
    """Publishes all of `run`, or the records before its first bad one, which then ends everything."""
    if not run:
        return
    outcomes = _send(job, [item for _, item in run], atomic=True)
    bad = [one for one in outcomes if isinstance(one, Refusal) and one.reason != "ATOMIC_ABORTED"]
    if not bad:
        tally.published += len(run)
        tally.ttls_ignored += count_ignored(outcomes)
        return
    first = min(bad, key=attrgetter("index"))
    _publish_atomically(job, run[: first.index], tally)
    raise _Stop(run[first.index][0], first.reason, first.message, run[first.index][1])


def _send(job: _Job, items: list[Item], *, atomic: bool = False) -> list[Published | Refusal]:
    """Publishes records that have one lifetime."""
    keys = [item.key for item in items if item.key is not None]
    own = items[0].expire_time_micros
    return job.client.publish_many(
        job.topic,
        [item.data for item in items],
        keys=keys if len(keys) == len(items) else None,
        ttl=job.lifetime.ttl if own is None else "never" if own == NEVER_MICROS else None,
        expire_at=job.lifetime.expire_at if own is None else None if own == NEVER_MICROS else own,
        keep_ttl=job.lifetime.keep,
        extend_ttl=job.lifetime.extend,
        only_if_absent=job.condition.absent,
        only_if_present=job.condition.present,
        durability=job.durability,
        atomic=atomic,
        delta=job.merging.delta,
        unset=job.merging.unset,
        refusals="return",
    )


def described_topic(client: Client, name: str) -> Topic | None:
    """The topic; None when it does not exist yet: the first publish may create it (rule K1), as a json topic."""
    try:
        return client.describe_topic(name)
    except NotFound:
        return None


def remark_lifetime(found: Topic | None, ttl: str | None, expire_at: datetime | None) -> bool:
    """Remarks on a lifetime in an option that is over, or has no effect. True: it has none."""
    remark_if_past(found, expire_at)
    return remark_at_once(found, is_given=expire_at is not None or ttl not in (None, "never"))


def tell_created(client: Client, name: str, found: Topic | None, *, published: int) -> None:
    """Tells that the topic is new, if it was not `found` before."""
    if found is None and published:
        with suppress(SowError):  # all is published; a caller may lack the right to list topics
            remark_created(name, [topic.name for topic in client.topics()])


def _summary(topic: str, tally: Tally) -> list[Fact]:
    seconds = max(time.monotonic() - tally.started, 1e-6)
    micros, rate = round(seconds * 1e6), round(tally.published / seconds)
    ignored = tally.ttls_ignored
    return [
        Fact("topic", topic, topic),
        Fact("published", tally.published, display.records(tally.published)),
        *([] if tally.removed is None else [Fact("removed", tally.removed, display.records(tally.removed))]),
        *tally.refusals.facts(),
        *([Fact("ttls_ignored", ignored, f"of {display.records(ignored)}", label="no effect: ttl")] if ignored else []),
        Fact("elapsed_micros", micros, display.duration(micros), label="time"),
        Fact("records_per_second", rate, f"{display.count(rate)} records/s", label="rate"),
    ]
