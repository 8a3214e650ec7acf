"""`sow get`, `query`, `count`, `delete`, `touch`, `persist`: records that exist."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from functools import partial
from io import BufferedReader
from typing import Final, TypeVar, get_args

import click

from sow.durations import parse_micros
from sow_cli import arguments, display
from sow_cli.exits import SERVER_SAID_NO
from sow_cli.filter_parameters import Values, param_option
from sow_cli.ignored import count_ignored, remark, remark_if_past, remark_on_fields, told_in_remarks
from sow_cli.output import (
    Fact,
    Format,
    Output,
    note,
    output_option,
    progress,
    raw_option,
    record_output_option,
    select_option,
    selected,
)
from sow_cli.rows import NEVER_MICROS, Batch, RecordForm
from sow_cli.session import Session
from sow_client import Client, Deleted, Page, Published, QueryPlan, QueryResult, RecordBatch, Refusal, TouchOnlyName

Command = TypeVar("Command", bound=Callable[..., object])


def _if_version_option(text: str) -> Callable[[Command], Command]:
    return click.option("--if-version", "versions", type=click.IntRange(min=1), multiple=True, metavar="N", help=text)


def _projection_options(command: Command) -> Command:
    for option in (
        click.option(
            "--exclude",
            type=arguments.comma_separated,
            multiple=True,
            metavar="PATH,…",
            help="All payload fields but these.",
        ),
        select_option,
    ):
        command = option(command)
    return command


_min_position_option = click.option(
    "--min-position",
    metavar="BOOKMARK",
    help="Wait up to a second for everything up to this bookmark of a publish or touch, perhaps at another instance; "
    "else the exit code is 1 (BEHIND).",
)


@click.command(short_help="Show the records of some keys.")
@click.argument("topic")
@click.argument("keys", nargs=-1, required=True, type=arguments.key, metavar="KEY...")
@arguments.parts_option
@_projection_options
@click.option(
    "--touch", type=arguments.ttl, metavar="DURATION|never", help="Also give the records this lifetime from now on."
)
@click.option(
    "--touch-below",
    type=arguments.duration,
    metavar="DURATION",
    help="With --touch: only records with less left than this.",
)
@_min_position_option
@raw_option
@record_output_option
@click.pass_obj
def get(
    session: Session,
    *,
    topic: str,
    keys: tuple[str, ...],
    parts: bool,
    select: tuple[tuple[str, ...], ...],
    exclude: tuple[tuple[str, ...], ...],
    touch: str | None,
    touch_below: str | None,
    min_position: str | None,
    output: Output,
) -> None:
    """Show the records of TOPIC that have these keys.

    One key shows the whole record. The exit code is 1 when a key has no live record; the other records are still shown.
    --raw writes the payload as it was published, byte by byte; of several keys a line feed follows each.

    \b
    Examples:
      sow get orders 1
      sow get orders 1 2 3 --select /id,/price --format csv
      sow get flights LH 400 --parts
      sow get images logo --raw > logo.png
      sow get fix-orders 17 --raw --soh='|'
      sow get sessions alice --touch 20m --touch-below 5m
    """
    keys = arguments.whole_keys(keys, parts=parts)
    if touch_below is not None and touch is None:
        raise click.UsageError("--touch-below needs --touch")
    named, include, leave_out = _paths(select, exclude)
    with session.client() as client:
        form = _form(client, topic, output, select=named, has_lifetime=touch not in (None, "never"))
        records = client.get_many(
            topic,
            list(keys),
            select=include,
            exclude=leave_out,
            touch=touch,
            touch_below=touch_below,
            min_position=min_position,
        )
    now_micros = time.time_ns() // 1_000
    if len(keys) == 1 and records:
        output.record(records[0], form, now_micros)
    elif records or len(keys) > 1:
        output.records([records], form, now_micros=lambda: now_micros)
    stamped = any(record.expire_time_micros is not None for record in records)
    if not form.acts and (touch not in (None, "never") or (output.is_table and stamped)):
        remark(topic)
    missing = sorted(set(keys) - {record.key for record in records})
    for key in missing:
        note(f"sow: RECORD_NOT_FOUND: key: there is no live record {key!r}")
    if missing:
        click.get_current_context().exit(SERVER_SAID_NO)


_QUERY_HELP: Final = """Show the live records of TOPIC that match FILTER, in key order, as they were at one instant.

FILTER is a condition such as /price > 9 AND /symbol IN ('IBM', 'MSFT'). In a shell put it in double quotes, and the
texts in it in single quotes; values from elsewhere belong into --param.

On a terminal at most 1,000 records are shown, unless --top is given; a remark says so. A pipe and a file get all.
Records are written as they come: `sow query big | head` is quick. In JSON the payload is the document itself for
json topics and base64 for others. In tables and CSV its fields are columns: those of --select, else those of the
first records. With --format raw each payload is a line.

A field of the filter, --order-by or --select in which no record has a value is a remark on stderr: its name may be
mistyped. On a topic that has expiration disabled a table shows `never (off)` in place of the time left.

\b
Examples:
  sow query orders --top 20
  sow query orders "/price > 9 AND /symbol LIKE '^I'" --order-by "/price DESC"
  sow query orders --select /id,/price,@expire_time --format csv > orders.csv
  sow query orders --exclude /notes --format json > orders.json
  sow query orders "/symbol = :s AND /price > :p" --param "s=$S" --param p:=9
  sow query orders "/symbol IN :list" --param 'list:=["IBM", "MSFT"]'
  sow query orders "/symbol = 'IBM'" --explain
  sow query orders --order-by "/price DESC" --watch 2s
  sow query orders --order-by "/price DESC" --page 20
"""


@click.command(short_help="Show the records of a topic.", help=_QUERY_HELP)
@click.argument("topic")
@click.argument("filter_text", metavar="[FILTER]", required=False)
@param_option
@click.option(
    "--order-by",
    multiple=True,
    metavar="PATH [DESC],…",
    help="The sort order: fields and metadata, such as '/price DESC, @expire_time' (repeatable), nulls last; default: "
    "the key.",
)
@click.option(
    "--keys",
    type=arguments.comma_separated,
    multiple=True,
    metavar="KEY,…",
    help="Only these keys (repeatable). For a key with a comma use get.",
)
@click.option("--top", type=click.IntRange(min=1), metavar="N", help="At most N records.")
@click.option("--skip", type=click.IntRange(min=0), default=0, metavar="N", help="Skip the first N records.")
@click.option(
    "--page",
    type=click.IntRange(min=1),
    metavar="N",
    help="A page of N records; stderr has the token of the next one. Not with --top, --skip, --keys.",
)
@click.option("--after", metavar="TOKEN", help="With --page: the page that this token continues with.")
@_projection_options
@click.option("--keys-only", is_flag=True, help="Omit the payloads; in raw each line is a key.")
@click.option("--count", "count_only", is_flag=True, help="Only count, as `sow count`.")
@click.option(
    "--watch",
    type=arguments.duration,
    metavar="DURATION",
    help="On a terminal: ask again after each such time, such as 2s, and show the newest answer.",
)
@click.option("--explain", is_flag=True, help="Instead of the records: how they are found, and how much is read.")
@click.option("--no-run", is_flag=True, help="With --explain: the plan alone; no record is read.")
@click.option("--with-plan", is_flag=True, help="Tell on stderr how the records were found.")
@_min_position_option
@record_output_option
@click.pass_obj
def query(
    session: Session,
    *,
    topic: str,
    filter_text: str | None,
    parameters: Values | None,
    order_by: tuple[str, ...],
    keys: tuple[tuple[str, ...], ...],
    top: int | None,
    skip: int,
    page: int | None,
    after: str | None,
    select: tuple[tuple[str, ...], ...],
    exclude: tuple[tuple[str, ...], ...],
    keys_only: bool,
    count_only: bool,
    watch: str | None,
    explain: bool,
    no_run: bool,
    with_plan: bool,
    min_position: str | None,
    output: Output,
) -> None:
    named, include, leave_out = _paths(select, exclude)
    for fields in (("--select", bool(named)), ("--exclude", leave_out is not None)):
        arguments.refuse_together(fields, ("--keys-only", keys_only), ("--count", count_only))
    arguments.refuse_together(("--order-by", bool(order_by)), ("--count", count_only))
    _check_plans(count_only, min_position, explain=explain, no_run=no_run, with_plan=with_plan)
    _check_watch(watch, output, count_only=count_only, explain=explain, with_plan=with_plan)
    alone = {"count": count_only, "explain": explain, "watch": watch, "with_plan": with_plan}
    _check_page(page, after, top=top, skip=skip, keys=keys, **alone)
    # One more than is shown tells whether there are more.
    limit = TERMINAL_RECORDS_MAX if top is None and not count_only and sys.stdout.isatty() else None
    wanted, order = [key for some in keys for key in some] or None, list(order_by) or None
    selection = topic, filter_text, parameters
    with session.client() as client:
        if explain:
            explained = partial(client.explain, *selection, order_by=order, keys=wanted, run=not no_run)
            _show_plan(topic, explained(skip_n=skip, top_n=top), output)
            return
        if count_only and not (wanted or top or skip):
            _show_count(client, selection, min_position, output)
            return
        without_payload = keys_only or count_only or (bool(named) and include is None)
        form = _form(client, topic, output, keys_only=without_payload, select=named)
        if page is not None:
            asked = partial(client.page, *selection, page_size=page, page_token=after or "", order_by=order)
            asked = partial(asked, select=include, exclude=leave_out, min_position=min_position)
            _show_page(asked(keys_only=form.keys_only), form, output)
            return
        part = partial(client.query, *selection, order_by=order, keys=wanted, keys_only=form.keys_only)
        part = partial(part, select=include, exclude=leave_out, skip_n=skip, min_position=min_position)
        if watch is not None:
            _watch(form, watch, lambda top_n: part(top_n=top_n), top)
            return
        with part(top_n=top if limit is None else limit + 1, with_plan=with_plan) as result:
            if count_only:
                output.one(_count_facts(topic, sum(len(batch) for batch in result.batches())))
                remark_on_fields(result.footer.absent_fields if result.footer else ())
                return
            batches = _Watched(result.batches(), limit)
            written = output.records(batches, form, now_micros=lambda: _as_of(result))
        _remark_on(result, batches, written, form, output)


def _check_plans(count_only: bool, min_position: str | None, *, explain: bool, no_run: bool, with_plan: bool) -> None:
    for others in (("--count", count_only), ("--min-position", min_position is not None)):
        arguments.refuse_together(("--explain", explain), others)
    arguments.refuse_together(("--with-plan", with_plan), ("--explain", explain), ("--count", count_only))
    if no_run and not explain:
        raise click.UsageError("--no-run needs --explain")


def _check_page(page: int | None, after: str | None, **others: object) -> None:
    for name, given in others.items():
        arguments.refuse_together(("--page", page is not None), (f"--{name.replace('_', '-')}", bool(given)))
    if after is not None and page is None:
        raise click.UsageError("--after needs --page")


def _show_page(page: Page, form: RecordForm, output: Output) -> None:
    output.records([page.records], form, now_micros=lambda: page.header.as_of_micros)
    if page.next_page_token:
        note(f"the next page: --after {page.next_page_token}")
    elif output.is_table:
        note("this is the last page")
    remark_on_fields(page.footer.absent_fields)


def _check_watch(watch: str | None, output: Output, *, count_only: bool, explain: bool, with_plan: bool) -> None:
    watched = ("--watch", watch is not None)
    arguments.refuse_together(watched, ("--count", count_only), ("--explain", explain), ("--with-plan", with_plan))
    if watch is not None and not (output.is_table and sys.stdout.isatty()):
        raise click.UsageError("--watch shows a table on a terminal; in a pipe, follow with sow subscribe --sow")


def _watch(form: RecordForm, every: str, ask: Callable[[int], QueryResult], top: int | None) -> None:
    from sow_cli import watching  # a query that is not watched starts without rich

    watching.watch(watching.WatchedTable(form, every), ask, parse_micros(every) / 1e6, top=top)


def _remark_on(result: QueryResult, batches: _Watched, written: int, form: RecordForm, output: Output) -> None:
    """Remarks on what a query has shown, and has not."""
    if result.plan is not None:
        note(_way(result.plan))
    if result.footer is not None:
        remark_on_fields(result.footer.absent_fields)
    if batches.more:
        note(f"the first {display.records(written)}, and there are more: --top N shows N, a pipe all of them")
    if not output.is_table or result.footer is None:
        return
    matched = result.footer.matched
    whole = batches.more or matched == written
    shown = display.records(written) if whole else f"{written:,} of {display.records(matched)}"
    note(f"{shown}, as of {display.instant(_as_of(result))}")
    if batches.stamped and not form.acts:
        remark(form.topic)


TERMINAL_RECORDS_MAX: Final = 1_000
"""A terminal is shown so many records of a query, unless the user asks for more."""


@click.command(short_help="Count the records of a topic.")
@click.argument("topic")
@click.argument("filter_text", metavar="[FILTER]", required=False)
@param_option
@_min_position_option
@output_option
@click.pass_obj
def count(
    session: Session,
    topic: str,
    filter_text: str | None,
    parameters: Values | None,
    min_position: str | None,
    output: Output,
) -> None:
    """Count the live records of TOPIC that match FILTER.

    \b
    Examples:
      sow count orders
      sow count orders "/price > 9"
    """
    with session.client() as client:
        _show_count(client, (topic, filter_text, parameters), min_position, output)


@click.command(short_help="Delete records.")
@click.argument("topic")
@click.argument("given", nargs=-1, type=arguments.key, metavar="[KEY]...")
@click.option("--key", "keys", multiple=True, type=arguments.key, metavar="KEY", help="The same as KEY (repeatable).")
@arguments.parts_option
@click.option(
    "--filter",
    "filter_text",
    metavar="FILTER",
    help="Delete the records that match, each only if it still matches then.",
)
@param_option
@click.option(
    "--data",
    type=click.File("rb"),
    metavar="FILE",
    help="Delete the record that has the key of the document in FILE (-: standard input).",
)
@click.option("--all", "everything", is_flag=True, help="Delete every record; asks first, see --force.")
@_if_version_option("Once for each KEY: delete the record only if it has this version.")
@click.option("--dry-run", is_flag=True, help="Only count what would be deleted.")
@click.option("-f", "--force", is_flag=True, help="Do not ask before --all.")
@output_option
@click.pass_obj
def delete(
    session: Session,
    *,
    topic: str,
    given: tuple[str, ...],
    keys: tuple[str, ...],
    parts: bool,
    filter_text: str | None,
    parameters: Values | None,
    data: BufferedReader | None,
    everything: bool,
    versions: tuple[int, ...],
    dry_run: bool,
    force: bool,
    output: Output,
) -> None:
    """Delete records of TOPIC, chosen by exactly one of KEYs, --filter, --data and --all.

    A key without a record is no error: look at the count. With --if-version the exit code is 1 if a record stays or
    was not there. With --all the command asks first on a terminal; without a terminal it needs --force. A KEY that
    looks like a filter is refused: give it as --filter, or as --key if it is one.

    \b
    Examples:
      sow delete orders 1 2
      sow delete orders 1 --if-version 1905432180000123
      sow delete flights LH 400 --parts
      sow delete orders --filter "/state = 'done'"
      sow delete orders --data order.json
      sow delete orders --all --dry-run
    """
    _refuse_filters(given)
    keys = arguments.whole_keys(given + keys, parts=parts)
    if bool(keys) + (filter_text is not None) + (data is not None) + everything != 1:
        raise click.UsageError("give exactly one of KEYs, --filter, --data and --all")
    if parameters and filter_text is None:
        raise click.UsageError("--param is for the parameters of --filter")
    arguments.refuse_together(("--if-version", bool(versions)), ("--dry-run", dry_run))
    _check_versions(versions, keys, "KEY")
    if everything and not dry_run:
        from sow_cli.topics import confirm  # `get` starts without that module

        confirm(f"Delete every record of topic {topic}?", force=force)
    document = None if data is None else data.read()
    with session.client() as client, progress("{task.fields[figures]}", measured=False) as bar:
        task = bar.add_task("counting" if dry_run else "deleting", total=None, figures="")

        def show(so_far: Deleted) -> None:
            bar.update(task, figures=display.records(so_far.matched if dry_run else so_far.deleted))

        done = client.sow_delete(
            topic,
            keys=list(keys) or None,
            only_if_versions=versions or None,
            filter=filter_text,
            parameters=parameters,
            data=document,
            all=everything,
            dry_run=dry_run,
            on_progress=show,
        )
    facts = [
        Fact("topic", topic, topic),
        Fact("matched", done.matched, display.records(done.matched)),
        Fact("deleted", done.deleted, f"{done.deleted:,}" + (" (dry run)" if dry_run else "")),
    ]
    if done.sequence:
        facts.append(Fact("sequence", done.sequence, str(done.sequence)))
    output.one(facts)
    remark_on_fields(done.absent_fields)
    if versions and done.deleted < len(set(keys)):
        note("sow: CONDITION_FAILED: no live record of that version")
        click.get_current_context().exit(SERVER_SAID_NO)


@click.command(short_help="Renew or change lifetimes.")
@click.argument("topic")
@click.argument("keys", nargs=-1, required=True, type=arguments.key, metavar="KEY...")
@arguments.parts_option
@click.option("--ttl", type=arguments.ttl, metavar="DURATION|never", help="New lifetime from now on, such as 30s.")
@click.option("--expire-at", type=arguments.instant, metavar="TIME", help="When to expire: 2030-01-31T12:00:00Z.")
@click.option(
    "--only",
    type=click.Choice(get_args(TouchOnlyName)),
    help="Only records that get a later or an earlier expire time, or records without or with one.",
)
@_if_version_option("Once for each KEY: only if its record has this version.")
@click.option("--atomic", is_flag=True, help="All records or none, in one commit.")
@output_option
@click.pass_obj
def touch(
    session: Session,
    *,
    topic: str,
    keys: tuple[str, ...],
    parts: bool,
    ttl: str | None,
    expire_at: datetime | None,
    only: TouchOnlyName | None,
    versions: tuple[int, ...],
    atomic: bool,
    output: Output,
) -> None:
    """Renew or change the lifetime of records of TOPIC; their payloads stay.

    Without --ttl and --expire-at they get the topic's lifetime for records that carry none; a topic that has none
    needs one of the two. `sow persist` takes lifetimes away. The answer has the new expire time. The exit code is 1
    when a key has no live record or its record is refused, also by --only; the others change, unless --atomic is given.

    \b
    Examples:
      sow touch sessions alice --ttl 20m
      sow touch sessions alice bob --atomic
      sow touch sessions alice --expire-at 2030-01-31T12:00:00Z
      sow touch sessions alice --ttl 20m --only later
    """
    arguments.refuse_together(("--ttl", ttl is not None), ("--expire-at", expire_at is not None))
    keys = arguments.whole_keys(keys, parts=parts)
    _check_versions(versions, keys, "KEY")
    with session.client() as client, told_in_remarks():
        if ttl is None and expire_at is None:
            _check_default(client, topic)
        if expire_at is not None:
            remark_if_past(client.describe_topic(topic), expire_at)
        outcomes = client.touch(
            topic,
            list(keys),
            ttl=ttl,
            expire_at=expire_at,
            only=only,
            only_if_versions=versions or None,
            atomic=atomic,
        )
    _write_outcomes(output, topic, keys, outcomes)


_FILTER: Final = re.compile(
    r"\s*(?:NOT\s|\()?\s*[/@]\S+\s*(?:[=<>!]|\s(?:IN|IS|NOT|LIKE|BETWEEN|BEGINS|ENDS|CONTAINS)\b)", re.IGNORECASE
)


def _refuse_filters(keys: tuple[str, ...]) -> None:
    """`query` and `count` take a filter at the place of the keys. As a key it would delete nothing, and say so only in
    a count."""
    for key in keys:
        if _FILTER.match(key):
            raise click.UsageError(f"{key!r} is a filter: give it as --filter; if it is a key, as --key")


def _check_versions(versions: tuple[int, ...], keys: tuple[str, ...], of: str) -> None:
    if versions and len(versions) != len(keys):
        raise click.UsageError(f"--if-version is given once for each {of}, in their order")


def _check_default(client: Client, topic: str) -> None:
    """A touch without a lifetime would make records permanent where the topic has none to give."""
    settings = client.describe_topic(topic).settings
    if settings.expiration in ("disabled", "enabled", "reject") and settings.max_ttl is None:
        raise click.UsageError(
            f"topic {topic} has no default lifetime: give --ttl DURATION or --expire-at TIME; "
            f"`sow persist {topic} KEY` makes records permanent"
        )


@click.command(short_help="Take lifetimes away.")
@click.argument("topic")
@click.argument("keys", nargs=-1, required=True, type=arguments.key, metavar="KEY...")
@arguments.parts_option
@output_option
@click.pass_obj
def persist(session: Session, topic: str, keys: tuple[str, ...], parts: bool, output: Output) -> None:
    """Remove the lifetime of records of TOPIC: they never expire, unless the topic has a maximum lifetime.

    The exit code is 1 when a key has no live record.

    \b
    Example:
      sow persist sessions alice
    """
    keys = arguments.whole_keys(keys, parts=parts)
    with session.client() as client:
        outcomes = client.touch(topic, list(keys), ttl="never")
    _write_outcomes(output, topic, keys, outcomes)


def _write_outcomes(output: Output, topic: str, keys: tuple[str, ...], outcomes: list[Published | Refusal]) -> None:
    from sow_cli.publishing import published_facts  # `get` starts without that module

    done = [published_facts(topic, one) for one in outcomes if isinstance(one, Published)]
    refused = [one for one in outcomes if isinstance(one, Refusal)]
    if len(keys) == 1 and done:
        output.one(done[0])
    elif done:
        output.many(done, names=_OUTCOME_NAMES, nothing="")
    if count_ignored(outcomes):
        remark(topic)
    for refusal in refused:
        note(f"{keys[refusal.index]}: {refusal.reason}: {refusal.message}")
    if any(refusal.reason == "INVALID_ARGUMENT" for refusal in refused):  # keys with too few or too many parts
        note("  hint: the parts of one key are arguments of their own with --parts, or one argument with | between")
    if refused:
        click.get_current_context().exit(SERVER_SAID_NO)


_OUTCOME_NAMES = ("topic", "key", "version", "expire_time_micros", "sequence")


def _form(
    client: Client,
    topic: str,
    output: Output,
    *,
    keys_only: bool = False,
    select: Sequence[str] = (),
    has_lifetime: bool = False,
) -> RecordForm:
    """Asks the server for the topic's settings, which records do not carry. Lines of keys and bytes as they are need
    none, unless records get a lifetime, which may have no effect."""
    if (keys_only or output.format is Format.RAW) and not (output.is_table or has_lifetime):
        return RecordForm(topic, "binary", keys_only=keys_only, select=tuple(select))
    return RecordForm.of(topic, client.describe_topic(topic).settings, keys_only=keys_only, select=select)


class _Watched:
    """Passes batches on, up to a number of records. Remembers whether there are more, and whether one of them had an
    expire time."""

    def __init__(self, batches: Iterable[RecordBatch], limit: int | None) -> None:
        self._batches = batches
        self._limit = limit
        self.stamped = False
        self.more = False

    def __iter__(self) -> Iterator[Batch]:
        left = self._limit
        for batch in self._batches:
            self.stamped = self.stamped or any(micros != NEVER_MICROS for micros in batch.expire_times_micros)
            if left is None:
                yield batch
                continue
            yield batch if len(batch) <= left else list(batch)[:left]
            self.more = self.more or len(batch) > left
            left = max(0, left - len(batch))


def _paths(
    select: tuple[tuple[str, ...], ...], exclude: tuple[tuple[str, ...], ...]
) -> tuple[list[str], list[str] | None, list[str] | None]:
    """The columns that --select names; the fields to ask the server for; the fields to leave out."""
    arguments.refuse_together(("--select", bool(select)), ("--exclude", bool(exclude)))
    named = selected(select)
    fields = [path for path in named if not path.startswith("@")]
    return named, fields or None, [path for some in exclude for path in some] or None


def _as_of(result: QueryResult) -> int:
    """The server's time, so that "expires in" is right even if this machine's clock is wrong."""
    return time.time_ns() // 1_000 if result.header is None else result.header.as_of_micros


def _show_count(
    client: Client, selection: tuple[str, str | None, Values | None], min_position: str | None, output: Output
) -> None:
    absent: list[str] = []
    number = client.count(
        *selection,
        min_position=min_position,
        timeout=math.inf,  # Ctrl-C ends it
        on_absent_fields=absent.extend,
    )
    output.one(_count_facts(selection[0], number))
    remark_on_fields(absent)


def _count_facts(topic: str, number: int) -> list[Fact]:
    return [Fact("topic", topic, topic), Fact("count", number, display.records(number))]


_ACCESS = {
    "points": "looks records up by their keys",
    "key_ranges": "reads ranges of keys",
    "index": "reads an index, then its records",
    "scan": "reads every record",
    "nothing": "reads nothing: no record can match",
}


def _way(plan: QueryPlan) -> str:
    """One line about the way that found records."""
    way = _ACCESS.get(plan.access)
    if way is None:  # also for a caller that may see a part of the records: the way would tell of the others
        return "the server does not tell how the records were found"
    if plan.index_path:
        way = f"reads the index on {display.safe(plan.index_path)}, then its records"
    return f"{way}: {display.records(plan.scanned)} read, {display.count(plan.index_entries)} entries of indexes"


def _show_plan(topic: str, plan: QueryPlan, output: Output) -> None:
    output.one(_plan_facts(topic, plan))
    remark_on_fields(plan.absent_fields)


def _plan_facts(topic: str, plan: QueryPlan) -> list[Fact]:
    return [
        Fact("topic", topic, topic),
        Fact("access", plan.access, _ACCESS.get(plan.access, "reads records in a way that this command does not know")),
        Fact("index_path", plan.index_path or None, display.safe(plan.index_path) or display.NOT_SET, label="index"),
        Fact("probes", plan.probes, display.count(plan.probes)),
        Fact("index_entries", plan.index_entries, display.count(plan.index_entries)),
        Fact("scanned", plan.scanned, display.records(plan.scanned)),
        Fact("matched", plan.matched, display.records(plan.matched)),
        Fact("returned", plan.returned, display.records(plan.returned)),
        Fact("filter", plan.filter or None, display.safe(plan.filter) or display.NOT_SET),
        Fact("order_by", plan.order_by or None, display.safe(plan.order_by) or "the key"),
    ]
