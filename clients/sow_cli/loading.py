"""`sow load`: the records of files as the whole content of a topic.

[1]  All or nothing (rule P9): until the commit nobody sees a record, and a bad record, an error or Ctrl-C ends the load
     without a change, unless --skip-bad is given.
[2]  Nothing is lost by mistake: it asks first, and an input without a record is refused.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from io import BufferedReader
from itertools import islice
from typing import Final, Unpack

import click

from sow_cli import arguments, display
from sow_cli.exits import SERVER_SAID_NO
from sow_cli.ignored import remark_at_once
from sow_cli.lines import NEVER_MICROS, Item, LineNumbers, SentItems
from sow_cli.output import Fact, Output, note, output_option, progress
from sow_cli.session import Session
from sow_cli.sources import (
    FileInput,
    InputOptions,
    Refusals,
    buffered,
    errors_file,
    input_options,
    line_parser,
    reading_of,
    standard_input,
    target_of,
)
from sow_cli.topics import confirm
from sow_client import Client, LoadFigures, LoadPart, LoadStager

_BATCH_RECORDS: Final = 5_000
_EXPIRE_TIME: Final = 2  # LifetimeKind
_NEVER: Final = 3


@click.command(short_help="Replace the content of a topic.")
@click.argument("topic")
@click.argument("files", nargs=-1, type=click.File("rb"), metavar="[FILE]...")
@click.option(
    "--ttl",
    type=arguments.ttl,
    metavar="DURATION|never",
    help="Lifetime of the records, from when each is applied.  [default: that of a record of an export, else the "
    "topic's]",
)
@click.option("--raw", is_flag=True, help="Each line is an unchanged payload, whatever the topic's message type.")
@click.option(
    "--skip-bad", is_flag=True, help="Load the other records where some are bad; the exit code is 1 all the same."
)
@click.option("--allow-empty", is_flag=True, help="Empty the topic if the input has no record; else that is refused.")
@click.option("-f", "--force", is_flag=True, help="Do not ask first.")
@input_options
@output_option
@click.pass_obj
def load(
    session: Session,
    *,
    topic: str,
    files: tuple[BufferedReader, ...],
    ttl: str | None,
    raw: bool,
    skip_bad: bool,
    allow_empty: bool,
    force: bool,
    output: Output,
    **given: Unpack[InputOptions],
) -> None:
    """Replace the whole content of TOPIC by the records of the FILEs, or of standard input (-), all or nothing.

    The files are those of `sow publish`. Nothing changes until all of them are read and the server has checked them. If
    a record is bad, nothing changes and the exit code is 1. Then each record is replaced at once, so no key is missing
    in between, and the records that were not loaded are deleted at the end. Records that others change meanwhile stay
    as they are (superseded). Of two rows with one key the later one counts (repeated).

    The command asks first on a terminal; without a terminal it needs --force. After Ctrl-C nothing is changed, unless
    the load was committed: then the command says that the server goes on with it.

    \b
    Examples:
      sow load venues venues.csv --force
      sow load orders orders.parquet --ttl 12h --skip-bad --errors bad.ndjson
      sow query orders --format ndjson | sow load copy --force
    """
    arguments.refuse_together(
        ("--raw", raw), ("--records", given["records"] is True), ("--key-field", given["key_field"] is not None)
    )
    arguments.refuse_together(("--raw", raw), (f"--as {given['kind']}", given["kind"] not in (None, "ndjson")))
    inputs = tuple(map(buffered, files)) or (standard_input(),)
    started = time.monotonic()
    errors = errors_file(given, inputs)
    with session.client() as client:
        described = client.describe_topic(topic)
        target = target_of(described)
        refusals = Refusals(errors, of_json=target.message_type == "json")
        reading = reading_of(given, target, has_lifetime=ttl is not None, keep_spaces=raw)
        parse = line_parser(reading, target, as_it_is=raw)
        is_told = remark_at_once(described, is_given=ttl not in (None, "never"))
        confirm(f"Replace the content of topic {topic}?", force=force)
        with _open_load(client, topic) as load_id:
            parts = []
            own = False
            for number, file in enumerate(inputs):
                source = FileInput(file, parse, reading, target, in_progress="reading", several=len(inputs) > 1)
                with source.bar, client.stage_load(load_id, part=number, attempt=1) as stager:
                    own |= _stage(source, stager, refusals, ttl)
                    parts.append(stager.part())
            refusals.sum_up()
            _check(refusals.total, sum(part.rows for part in parts), skip_bad=skip_bad, allow_empty=allow_empty)
            figures = _commit(client, load_id, parts)
    output.one([*_facts(topic, figures), *refusals.facts(), _elapsed(started)])
    if not is_told:
        remark_at_once(described, is_given=own)
    if refusals.total:
        if given["errors"] is not None:
            mended = shlex.join([topic, str(given["errors"])])
            note(
                f"once they are mended: {session.command} publish {mended}; another load would remove all other records"
            )
        click.get_current_context().exit(SERVER_SAID_NO)


def _facts(topic: str, figures: LoadFigures) -> list[Fact]:
    facts = [Fact("topic", topic, topic), Fact("staged", figures.staged, display.records(figures.staged), label="read")]
    for name in ("applied", "superseded", "repeated", "deleted"):
        value: int = getattr(figures, name)
        facts.append(Fact(name, value, display.count(value)))
    return facts


def _elapsed(started: float) -> Fact:
    micros = round((time.monotonic() - started) * 1e6)
    return Fact("elapsed_micros", micros, display.duration(micros), label="time")


@contextmanager
def _open_load(client: Client, topic: str) -> Iterator[str]:
    """An open load. After an error or Ctrl-C it is dropped, unless it is committed already ([1])."""
    opened = client.open_load(topic)
    try:
        yield opened.id
    except BaseException:
        with suppress(Exception):  # its lease ends it, too, and the first error is the one to tell
            client.abort_load(opened.id)
        raise


def _stage(source: FileInput, stager: LoadStager, refusals: Refusals, ttl: str | None) -> bool:
    """Stages the records of a file. True: one has an expire time of its own."""
    own = False
    numbers = LineNumbers()
    bad = partial(refusals.add, source.place)
    sent = SentItems()
    told = answered = 0

    def tell() -> None:
        """Reports the records that were refused meanwhile. Only those without an answer are kept."""
        nonlocal told, answered
        before, answered = answered, stager.staged + stager.refused
        if stager.refused > told:
            for refusal in stager.refusals[told:]:
                bad(numbers.line(refusal.index), refusal.reason, refusal.message, sent.item(refusal.index))
                told += 1
        sent.forget(answered - before)

    records = source.records(numbers, bad, lambda: stager.staged + stager.refused)
    while batch := [item for _, item in islice(records, _BATCH_RECORDS)]:
        for item in batch:
            sent.add(item)
        own |= _hand_over(stager, batch, ttl)
        tell()
    stager.flush()
    tell()
    refusals.add_more(stager.refused - len(stager.refusals))
    return own


def _hand_over(stager: LoadStager, batch: list[Item], ttl: str | None) -> bool:
    keys = [item.key for item in batch if item.key is not None]  # of all or of none: others are bad lines
    times = [item.expire_time_micros for item in batch]
    own = any(time is not None for time in times)
    stager.stage(
        [item.data for item in batch],
        keys=keys or None,
        lifetime=ttl,
        lifetime_kinds=[0 if time is None else _NEVER if time == NEVER_MICROS else _EXPIRE_TIME for time in times]
        if own
        else None,
        lifetime_micros=[0 if time == NEVER_MICROS else time or 0 for time in times] if own else None,
    )
    return any(time not in (None, NEVER_MICROS) for time in times)


def _check(refused: int, staged: int, *, skip_bad: bool, allow_empty: bool) -> None:
    """Ends the command where the load would not be what the user wanted ([1], [2])."""
    if refused and not skip_bad:
        bad = f"{display.records(refused)} of the input {'is' if refused == 1 else 'are'} bad"
        note(f"nothing was changed: {bad}; --skip-bad loads the others")
    elif not staged and not allow_empty:
        note("nothing was changed: the input has no record; --allow-empty empties the topic")
    else:
        return
    click.get_current_context().exit(SERVER_SAID_NO)


def _commit(client: Client, load_id: str, parts: list[LoadPart]) -> LoadFigures:
    """Commits the load and waits for its end."""
    figures: LoadFigures | None = None
    total = sum(part.rows for part in parts)
    try:
        with progress("{task.fields[figures]}", measured=total > 0) as bar:
            task = bar.add_task("applying", total=total, figures="")
            for told in client.commit_load(load_id, parts):
                figures = told.figures
                done = figures.applied + figures.superseded + figures.repeated
                bar.update(task, completed=done, figures=f"{display.records(done)}, {figures.deleted:,} deleted")
    except BaseException:
        if figures is not None:
            note(f"the load {load_id} is committed: the server goes on with it")
        raise
    assert figures is not None, "a commit that succeeds tells its figures"
    return figures
