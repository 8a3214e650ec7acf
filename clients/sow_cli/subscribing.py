"""`sow subscribe`: the changes of a topic as they happen."""

from __future__ import annotations

import re
import select
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from os import environ, fstat
from typing import Final

import click
from click.core import ParameterSource

from sow.durations import parse_micros
from sow_cli import arguments, display, live
from sow_cli.messages import MARKS, TopicForms, message_writer
from sow_cli.output import Output, note, output_option
from sow_cli.session import Session
from sow_client import Change, Client, SowError, Subscription

_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_LOOK_MILLISECONDS: Final = 1_000


def _start(text: str) -> str | datetime:
    """A time, or else what the client takes as it is: `earliest`, or a bookmark, which never looks like a time."""
    return arguments.instant(text) if _DATE.match(text) else text


@click.command(short_help="Follow the changes of a topic.")
@click.argument("topic")
@click.argument("filter", required=False)
@click.option("--sow", is_flag=True, help="First the records as they are; on a terminal a live table of them.")
@click.option("--oof", is_flag=True, help="Tell also when a record goes out of focus, and why.")
@click.option("--delta", is_flag=True, help="Of updates only the changed fields.")
@click.option("--changes", is_flag=True, help="Puts, deletes and expiries as they are in the journal, for pipelines.")
@click.option(
    "--from",
    "start",
    type=_start,
    metavar="BOOKMARK|earliest|TIME",
    help="Begin after a bookmark, with the earliest change that is kept, or at a time; default: now.",
)
@click.option(
    "--conflation",
    type=arguments.duration,
    metavar="DURATION",
    help="The newest value of each key, at most once in this time.",
)
@click.option("--count", "limit", type=click.IntRange(min=1), metavar="N", help="End after N messages.")
@click.option("--for", "lasting", type=arguments.duration, metavar="DURATION", help="End after this time.")
@click.option(
    "--pattern",
    is_flag=True,
    help="TOPIC is a regular expression: every topic whose whole name matches, later ones too.",
)
@output_option
@click.pass_obj
def subscribe(
    session: Session,
    topic: str,
    filter: str | None,  # noqa: A002 - the name of the argument
    sow: bool,
    oof: bool,
    delta: bool,
    changes: bool,
    start: str | datetime | None,
    conflation: str | None,
    limit: int | None,
    lasting: str | None,
    pattern: bool,
    output: Output,
) -> None:
    """Follow the changes of the records of TOPIC that match FILTER, until Ctrl-C.

    In a pipe each message is a line of JSON, written at once. On a terminal it is a line to read or, with --sow, a live
    table of the current state, which takes --oof for granted; --format table keeps the lines. When the connection
    breaks, it goes on where it was.

    \b
    Examples:
      sow subscribe orders "/price > 9" --sow
      sow subscribe orders --changes --from earliest | process
      sow subscribe orders --count 1 --for 30s
    """
    _check(sow=sow, oof=oof, delta=delta, changes=changes, start=start, conflation=conflation)
    chosen = click.get_current_context().get_parameter_source("output") is not ParameterSource.DEFAULT
    terminal = sys.stdout.isatty()
    # A table of the state needs to hear what is gone; the journal as it is (--changes) tells no state.
    as_live_table = sow and terminal and not chosen and not changes
    with session.client() as client:
        forms = TopicForms(client)
        if not pattern:
            forms.of(topic)
        subscription = _open(
            client,
            topic,
            filter,
            pattern=pattern,
            sow=sow,
            oof=oof or as_live_table,
            delta=delta,
            changes=changes,
            start=start,
            conflation=conflation,
        )
        with subscription, _ended_after(lasting, subscription), _ended_without_reader(subscription):
            messages = _first(limit, subscription)
            if as_live_table:
                live.show(messages, forms, several_topics=pattern)
                return
            colour = terminal and "NO_COLOR" not in environ
            writer = message_writer(output, forms, several_topics=pattern, colour=colour)
            written = 0
            try:
                for change in messages:
                    writer.write(change)
                    written += change.op not in MARKS
            finally:
                writer.finish()
    if output.is_table:
        said = "1 message" if written == 1 else f"{display.count(written)} messages"
        note(f"{said}; bookmark {subscription.bookmark}" if subscription.bookmark else said)


def _check(
    *, sow: bool, oof: bool, delta: bool, changes: bool, start: str | datetime | None, conflation: str | None
) -> None:
    if sow and start is not None:
        raise click.UsageError("--sow and --from exclude each other: a snapshot is as of now")
    arguments.refuse_together(("--changes", changes), ("--oof", oof))
    arguments.refuse_together(("--changes", changes), ("--delta", delta), ("--conflation", conflation is not None))


def _open(
    client: Client,
    topic: str,
    wanted: str | None,
    *,
    pattern: bool,
    sow: bool,
    oof: bool,
    delta: bool,
    changes: bool,
    start: str | datetime | None,
    conflation: str | None,
) -> Subscription:
    name, topic_pattern = (None, topic) if pattern else (topic, None)
    if sow:
        return client.sow_and_subscribe(
            name,
            wanted,
            topic_pattern=topic_pattern,
            oof=oof,
            delta=delta,
            changes=changes,
            conflation=conflation,
            on_interruption=_tell,
        )
    return client.subscribe(
        name,
        wanted,
        topic_pattern=topic_pattern,
        oof=oof,
        delta=delta,
        changes=changes,
        start=start,
        conflation=conflation,
        on_interruption=_tell,
    )


def _tell(interruption: SowError | None) -> None:
    """Says on stderr that it waits for the server, and when that is over."""
    if interruption is None:
        note("connected again")
    else:
        note(f"reconnecting … ({interruption.reason}: {interruption.message})")


def _first(limit: int | None, subscription: Subscription) -> Iterator[Change]:
    """The messages up to the `limit`th that is no mark. None: all."""
    left = -1 if limit is None else limit
    for change in subscription:
        yield change
        left -= change.op not in MARKS
        if not left:
            return


@contextmanager
def _ended_after(duration: str | None, subscription: Subscription) -> Iterator[None]:
    """Closes the subscription after a time, which ends the iteration even while nothing comes."""
    if duration is None:
        yield
        return
    timer = threading.Timer(parse_micros(duration) / 1e6, subscription.close)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _ended_without_reader(subscription: Subscription) -> Iterator[None]:
    """Closes the subscription when the reader of the pipe goes away: writing would show it, but only once there is a
    message to write, and `sow subscribe … | head -1` should not wait for that."""
    descriptor = _pipe()
    if descriptor is None:
        yield
        return
    poll = select.poll()
    poll.register(descriptor, 0)  # errors and hang-ups are always told
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            if poll.poll(_LOOK_MILLISECONDS):
                subscription.close()
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
    except (OSError, ValueError):  # a stdout that is no file
        return None
