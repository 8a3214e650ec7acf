"""`sow subscribe`: the changes of a topic as they happen."""

from __future__ import annotations

import json
import select
import shlex
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from math import inf
from os import fstat
from typing import Final

import click
from click.core import ParameterSource

from sow.durations import parse_micros
from sow_cli import arguments, display, live
from sow_cli.connection import default_format
from sow_cli.filter_parameters import Values, param_option
from sow_cli.grouping import Grouping, grouping_options
from sow_cli.ignored import remark_on_fields
from sow_cli.live_results import as_messages, rows_of
from sow_cli.messages import MARKS, MessageWriter, TopicForms, message_writer
from sow_cli.output import Output, message_output_option, note
from sow_cli.session import Session
from sow_client import (
    Cancelled,
    Change,
    Client,
    DurableSettingsArguments,
    DurableSubscription,
    Gap,
    JoinedSubscription,
    LiveResult,
    NotFound,
    SowError,
    Subscription,
)

_LOOK_MILLISECONDS: Final = 1_000
_WAIT_SECONDS: Final = 0.5
"""Between two looks for a topic that matches a pattern."""


_HELP: Final = """Follow the changes of the records of TOPIC that match FILTER, until Ctrl-C.

In a pipe each message is a line of JSON, written at once. On a terminal it is a line of text, with a column for
each of the first 50 fields. With --sow a terminal shows a live table of the current state, in the order of the keys
or of --order-by, as many rows as fit. Records that changed in the last two seconds are green. The live table
implies --oof. With --order-by and --top the server keeps the rows, and sends no others. A format that is given, such
as --format table, keeps the lines.

If the connection breaks or the server restarts, the command reconnects for up to five minutes and continues where
it was. If the journal no longer reaches back so far, it ends with code 1; with --sow the mark resync says to forget
all records, and a new snapshot follows.

With --durable the server keeps the position: the command begins after the last acknowledged change, and --from
counts only when the durable subscription is created. Changes that it will never get are replaced by a line with
the op gap and the reason.

\b
Examples:
  sow subscribe orders "/price > 9" --sow
  sow subscribe orders "/price > 9" --sow --oof | process
  sow subscribe orders --sow --order-by "/price DESC" --top 10
  sow subscribe orders --sow --group-by /desk --aggregate "COUNT(*) AS n"
  sow subscribe orders --changes --from earliest | process
  sow subscribe orders --count 1 --for 30s
  sow subscribe orders --durable billing | process
  sow subscribe 'eu-.*' --pattern
"""


@click.command(short_help="Follow the changes of a topic.", help=_HELP)
@click.argument("topic")
@click.argument("filter_text", metavar="[FILTER]", required=False)
@param_option
@click.option(
    "--sow", is_flag=True, help="First the current records, then the mark snapshot_end; on a terminal, a live table."
)
@click.option(
    "--select",
    type=arguments.comma_separated,
    multiple=True,
    metavar="PATH,…",
    help="Only these payload fields, such as /id,/price/bid; they are then the columns. Not with --delta.",
)
@click.option(
    "--order-by",
    multiple=True,
    metavar="PATH [DESC],…",
    help="The order of the live table, such as '/price DESC, /symbol' (repeatable); default: the key. In a pipe: of "
    "the first records of --sow.",
)
@click.option(
    "--top",
    type=click.IntRange(min=1),
    metavar="N",
    help="At most N rows in the live table. In a pipe, with --order-by: at most N records first.",
)
@grouping_options
@click.option(
    "--snapshot-max",
    type=click.IntRange(min=1),
    metavar="N",
    help="With --sow: at most N records first; the reason of snapshot_end is truncated if more match.",
)
@click.option(
    "--oof", is_flag=True, help="Also report records that go out of focus: deleted, expired, or no longer a match."
)
@click.option("--delta", is_flag=True, help="Of updates only the changed fields and the key fields.")
@click.option(
    "--changes",
    is_flag=True,
    help="Each put, delete and expire where the new or the previous record matches. Not with --oof, --delta, "
    "--conflation.",
)
@click.option(
    "--from",
    "start",
    type=arguments.positions,
    metavar="BOOKMARK|earliest|TIME",
    help="Begin after a bookmark, with the earliest retained change, or at a time; default: now. "
    "Not with --sow. Quote a bookmark that has semicolons or, as that of --pattern over several cells, braces.",
)
@click.option(
    "--conflation",
    type=arguments.duration,
    metavar="DURATION",
    help="The newest value of each key, at most once in this time. With --delta: the difference to what came last.",
)
@click.option(
    "--count",
    "limit",
    type=click.IntRange(min=1),
    metavar="N",
    help="End after N messages, with exit code 0. Marks do not count.",
)
@click.option(
    "--for", "lasting", type=arguments.duration, metavar="DURATION", help="End after this time, with exit code 0."
)
@click.option(
    "--pattern",
    is_flag=True,
    help="TOPIC is a regular expression (RE2): follow every topic whose whole name matches, later ones too. "
    "If there is none, wait for the first.",
)
@click.option(
    "--durable",
    metavar="NAME",
    help="Consume the durable subscription NAME; create it if it does not exist. Not with --sow, "
    "--delta, --conflation, --pattern.",
)
@click.option("--force", is_flag=True, help="With --durable: take over from an attached consumer.")
@click.option(
    "--ack/--no-ack",
    default=None,
    help="With --durable: acknowledge each change once it is written, so that it does not come again.  [default: ack]",
)
@click.option(
    "--replicated",
    is_flag=True,
    help="With --durable: create it so that peers know it, too, and its consumer goes on there.",
)
@message_output_option
@click.pass_obj
def subscribe(
    session: Session,
    *,
    topic: str,
    filter_text: str | None,
    parameters: Values | None,
    sow: bool,
    select: tuple[tuple[str, ...], ...],
    order_by: tuple[str, ...],
    top: int | None,
    snapshot_max: int | None,
    grouping: Grouping,
    oof: bool,
    delta: bool,
    changes: bool,
    start: str | datetime | Mapping[str, str] | None,
    conflation: str | None,
    limit: int | None,
    lasting: str | None,
    pattern: bool,
    durable: str | None,
    force: bool,
    ack: bool | None,
    replicated: bool,
    output: Output,
) -> None:
    _check(sow=sow, oof=oof, delta=delta, changes=changes, start=start, conflation=conflation, most=snapshot_max)
    _check_groups(grouping, sow=sow, delta=delta, changes=changes, pattern=pattern, durable=durable, most=snapshot_max)
    fields = _fields(select, delta=delta)
    grouping.refuse(("--select", fields is not None))
    order = _order(order_by)
    _check_durable(
        durable, force, ack, replicated=replicated, sow=sow, delta=delta, conflation=conflation, pattern=pattern
    )
    # What the environment, a context and the options in front of the command say comes as a default.
    given = click.get_current_context().get_parameter_source("output") is not ParameterSource.DEFAULT
    chosen = given or default_format() is not None
    # A table of the state needs the removed records, too; plain journal entries (--changes) do not show a state.
    as_live_table = sow and sys.stdout.isatty() and not chosen and not changes
    ordered = partial(_first_by, order_by, top, sow=sow, pattern=pattern, most=snapshot_max)
    first_by = None if as_live_table or grouping.given else ordered()
    with session.client() as client:
        forms = _forms(client, topic, pattern=pattern)
        if durable is not None:
            gaps = _Gaps(topic)
            of_durable: DurableSettingsArguments = {"replicated": True} if replicated else {}
            at = arguments.of_one_cell(start)
            consume = partial(client.durable, topic, durable, filter_text, parameters, start=at, force=force)
            consume = partial(consume, select=fields, oof=oof, changes=changes, on_interruption=_tell, on_gap=gaps.tell)
            consumer = consume(**of_durable)
            writer = message_writer(output, forms, several_topics=False, select=fields or ())
            written = _consume(consumer, gaps, writer, limit=limit, lasting=lasting, acknowledges=ack is not False)
            _sum_up(written, consumer, output)
            return
        shown = None
        if as_live_table:
            table = live.LiveTable(forms, several_topics=pattern, order=order, top=top, select=fields or ())
            shown = live.LiveDisplay(table, forms)
        opened = partial(_open, client, topic, filter_text, parameters, pattern=pattern, sow=sow, delta=delta)
        opened = partial(opened, oof=oof or as_live_table, changes=changes, conflation=conflation, select=fields)
        tell = _tell if shown is None else shown.tell
        opened = partial(opened, snapshot_max=snapshot_max, on_interruption=tell)
        opened = partial(opened, order_by=first_by, top=None if as_live_table else top)
        kept = grouping.given or (shown and order_by and top and not (pattern or delta or snapshot_max))
        asked = partial(client.live_result, topic, filter_text, parameters) if kept else None
        rows = rows_of(asked, grouping, order_by, top, shown, conflation=conflation, select=fields, tell=tell)
        give_up = _end_of(lasting)
        subscription = rows or _opened_patiently(opened, start, topic if pattern else None, give_up)
        writer = message_writer(output, forms, several_topics=pattern, select=fields or ())
        _show(subscription, shown, writer, output, limit=limit, give_up=give_up)


def _show(
    subscription: Subscription | None,
    shown: live.LiveDisplay | None,
    writer: MessageWriter,
    output: Output,
    *,
    limit: int | None,
    give_up: float | None,
) -> None:
    """Shows the messages in the live table, or writes them. `subscription` None: no topic has come. `give_up`: as
    `_end_of` gives it."""
    if subscription is None:
        _sum_up(0, None, output)
        return
    with subscription, _ended_at(give_up, subscription), _ended_without_reader(subscription):
        changes = as_messages(subscription) if isinstance(subscription, LiveResult) else subscription
        messages = _remarked(_first(limit, changes), shown)
        if shown is not None:
            shown.show(messages)
            return
        written = _write(messages, writer)
    _sum_up(written, subscription, output)


def _forms(client: Client, topic: str, *, pattern: bool) -> TopicForms:
    """The forms of topics. A topic that does not exist is refused at once, unless a pattern stands for it."""
    forms = TopicForms(client)
    if not pattern:
        forms.of(topic)
    return forms


def _fields(select: tuple[tuple[str, ...], ...], *, delta: bool) -> list[str] | None:
    """The payload fields to send; None: all."""
    arguments.refuse_together(("--select", bool(select)), ("--delta", delta))
    found = [path for some in select for path in some]
    for path in found:
        arguments.field_path(path, "--select")
    return found or None


def _order(order_by: tuple[str, ...]) -> list[live.Term]:
    """The order of the live table, as `sow query` takes it."""
    terms = []
    for part in ",".join(order_by).split(",") if order_by else []:
        path, _, direction = part.strip().partition(" ")
        if direction.strip().upper() not in ("", "ASC", "DESC"):
            raise click.BadParameter(f"{part.strip()!r} is not PATH, PATH ASC or PATH DESC", param_hint="--order-by")
        arguments.column(path, "--order-by")
        terms.append(live.Term(path, direction.strip().upper() == "DESC"))
    return terms


def _first_by(order_by: tuple[str, ...], top: int | None, *, sow: bool, pattern: bool, most: int | None) -> str | None:
    """The order of the first records, where there is no live table; None: of the keys."""
    if (order_by or top) and not sow:
        raise click.UsageError("--order-by and --top are for the records of --sow; see sow query")
    if top and not order_by:
        raise click.UsageError("--top needs --order-by here; --snapshot-max bounds the records in the order of keys")
    if not order_by:
        return None
    arguments.refuse_together(("--order-by", True), ("--pattern", pattern), ("--snapshot-max", most is not None))
    return ", ".join(order_by)


def _opened_patiently(
    open_: Callable[..., Subscription],
    start: str | datetime | Mapping[str, str] | None,
    pattern: str | None,
    give_up: float | None,
) -> Subscription | None:
    """Opens a subscription. One to a pattern that no topic matches waits for the first topic; None: there is none by
    `give_up`, as `_end_of` gives it.

    That topic is followed from its first change: whatever it has was published after the command began.
    """
    if pattern is None:
        return open_(start=start)
    try:
        return open_(start=start)
    except NotFound:
        note(f"no topic matches {pattern} yet: waiting for one")
    while (left := inf if give_up is None else give_up - time.monotonic()) > 0:
        time.sleep(min(left, _WAIT_SECONDS))
        with suppress(NotFound):
            return open_(start="earliest" if start is None else start)
    return None


def _write(messages: Iterable[Change], writer: MessageWriter) -> int:
    """Writes messages; returns how many of them are no marks."""
    written = 0
    try:
        for change in messages:
            writer.write(change)
            written += change.op not in MARKS
    finally:
        writer.finish()
    return written


class _Gaps:
    """Passes gaps to the writer in their place. Gaps of the first frame wait until there is a writer."""

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._writer: MessageWriter | None = None
        self._early: list[Gap] = []

    def tell(self, gap: Gap) -> None:
        """Writes a gap."""
        if self._writer is None:
            self._early.append(gap)
        else:
            self._writer.write_gap(self._topic, gap)

    def go_to(self, writer: MessageWriter) -> None:
        """From now on gaps are written there."""
        self._writer = writer
        for gap in self._early:
            writer.write_gap(self._topic, gap)


def _consume(
    subscription: DurableSubscription,
    gaps: _Gaps,
    writer: MessageWriter,
    *,
    limit: int | None,
    lasting: str | None,
    acknowledges: bool,
) -> int:
    """Writes and acknowledges the changes of a durable subscription; returns the number of messages."""
    written = 0
    with subscription, _ended_at(_end_of(lasting), subscription), _ended_without_reader(subscription):
        try:
            gaps.go_to(writer)
            for change in _first(limit, subscription):
                writer.write(change)
                written += change.op not in MARKS
                if acknowledges:
                    _acknowledge(subscription, change)
        finally:
            writer.finish()
    return written


def _acknowledge(subscription: DurableSubscription, change: Change) -> None:
    """Acknowledges a change. If the subscription was closed because its time is over, the change comes again."""
    try:
        subscription.acknowledge(change)
    except Cancelled as error:
        if error.reason != "CLOSED":
            raise


def _sum_up(written: int, subscription: Subscription | None, output: Output) -> None:
    if not output.is_table:
        return
    said = display.counted(written, "message")
    bookmark = None if subscription is None else subscription.bookmark
    if isinstance(subscription, JoinedSubscription) and isinstance(joined := subscription.bookmark, Mapping):
        bookmark = json.dumps(joined)
    # Quoted for a shell: with the marks of other instances it has semicolons.
    note(f"{said}; bookmark {shlex.quote(bookmark)}" if bookmark else said)


def _check_groups(
    grouping: Grouping, *, sow: bool, delta: bool, changes: bool, pattern: bool, durable: str | None, most: int | None
) -> None:
    if grouping.given and not sow:
        raise click.UsageError("--group-by, --aggregate and --having need --sow: the results of now come first")
    grouping.refuse(
        ("--delta", delta), ("--changes", changes), ("--pattern", pattern), ("--durable", durable is not None)
    )
    grouping.refuse(("--snapshot-max", most is not None))


def _check_durable(
    durable: str | None,
    force: bool,
    ack: bool | None,
    *,
    replicated: bool,
    sow: bool,
    delta: bool,
    conflation: str | None,
    pattern: bool,
) -> None:
    if durable is None:
        if force or ack is not None or replicated:
            raise click.UsageError("--force, --ack, --no-ack and --replicated are for --durable")
        return
    for name, is_given in (
        ("--sow", sow),
        ("--delta", delta),
        ("--conflation", conflation is not None),
        ("--pattern", pattern),
    ):
        arguments.refuse_together(("--durable", True), (name, is_given))


def _check(
    *,
    sow: bool,
    oof: bool,
    delta: bool,
    changes: bool,
    start: str | datetime | Mapping[str, str] | None,
    conflation: str | None,
    most: int | None,
) -> None:
    if most is not None and not sow:
        raise click.UsageError("--snapshot-max needs --sow")
    if sow and start is not None:
        raise click.UsageError("--sow and --from exclude each other: a snapshot is as of now")
    arguments.refuse_together(("--changes", changes), ("--oof", oof))
    arguments.refuse_together(("--changes", changes), ("--delta", delta))
    arguments.refuse_together(("--changes", changes), ("--conflation", conflation is not None))


def _open(
    client: Client,
    topic: str,
    wanted: str | None,
    parameters: Values | None,
    *,
    pattern: bool,
    sow: bool,
    oof: bool,
    delta: bool,
    changes: bool,
    start: str | datetime | Mapping[str, str] | None,
    conflation: str | None,
    select: list[str] | None,
    on_interruption: Callable[[SowError | None], None],
    snapshot_max: int | None,
    order_by: str | None,
    top: int | None,
) -> Subscription:
    name, topic_pattern = (None, topic) if pattern else (topic, None)
    snapshot = partial(client.sow_and_subscribe, snapshot_max=snapshot_max, order_by=order_by, top_n=top)
    begin = snapshot if sow else partial(client.subscribe, start=start)
    return begin(
        name,
        wanted,
        parameters,
        topic_pattern=topic_pattern,
        oof=oof,
        delta=delta,
        changes=changes,
        conflation=conflation,
        select=select,
        on_interruption=on_interruption,
    )


def _tell(interruption: SowError | None) -> None:
    """Reports on stderr that the command waits for the server, and when the wait is over."""
    if interruption is None:
        note("connected again")
    else:
        note(f"reconnecting … ({interruption.reason}: {interruption.message})")


def _first(limit: int | None, changes: Iterable[Change]) -> Iterator[Change]:
    """The messages up to the `limit`th one, not counting marks. None: all."""
    left = -1 if limit is None else limit
    for change in changes:
        yield change
        left -= change.op not in MARKS
        if not left:
            return


def _remarked(messages: Iterable[Change], shown: live.LiveDisplay | None) -> Iterator[Change]:
    """The messages; a remark on fields that no record of the snapshot has comes once (rule Q10)."""
    told = False
    for change in messages:
        yield change
        if change.op == "snapshot_end" and not told:
            told = True
            of_table = [] if shown is None else shown.absent_fields  # which has sorted them by now
            remark_on_fields(dict.fromkeys([*change.absent_fields, *of_table]))


def _close(subscription: Subscription) -> None:
    """Called from another thread. The fate of an acknowledgement no longer matters: the change comes again."""
    with suppress(SowError):
        subscription.close()


def _end_of(duration: str | None) -> float | None:
    """The time of the monotonic clock at which a duration that begins now is over; None: never."""
    return None if duration is None else time.monotonic() + parse_micros(duration) / 1e6


@contextmanager
def _ended_at(give_up: float | None, subscription: Subscription) -> Iterator[None]:
    """Closes the subscription at a time, as `_end_of` gives it. This ends the iteration even while no message comes."""
    if give_up is None:
        yield
        return
    timer = threading.Timer(max(0.0, give_up - time.monotonic()), _close, [subscription])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _ended_without_reader(subscription: Subscription) -> Iterator[None]:
    """Closes the subscription when the reader of the pipe goes away. A write would show it, too, but only with the next
    message, and `sow subscribe … | head -1` should not wait for one."""
    descriptor = _pipe()
    if descriptor is None:
        yield
        return
    poll = select.poll()
    poll.register(descriptor, 0)  # errors and hang-ups are always reported
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            if poll.poll(_LOOK_MILLISECONDS):
                _close(subscription)
                return

    threading.Thread(target=look, name="sow-reader-gone", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _pipe() -> int | None:
    """The descriptor of stdout if it is a pipe, where the system can watch one."""
    if not hasattr(select, "poll"):
        return None
    try:
        descriptor = sys.stdout.fileno()
        return descriptor if stat.S_ISFIFO(fstat(descriptor).st_mode) else None
    except (OSError, ValueError):  # a stdout without a file
        return None
