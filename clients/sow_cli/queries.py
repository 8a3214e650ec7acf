"""`sow query`, `sow count`: the records that match a filter, a page of them, their number, and the way to them."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Final

import click

from sow.durations import parse_micros
from sow_cli import arguments, display
from sow_cli.filter_parameters import Values, param_option
from sow_cli.grouping import (
    COUNTED,
    Grouping,
    check_plot,
    grouping_options,
    plot_groups,
    plot_option,
    show_groups,
)
from sow_cli.ignored import remark, remark_on_fields
from sow_cli.output import Fact, Output, note, output_option, record_output_option
from sow_cli.records import min_position_option, projected, projection_options, record_form
from sow_cli.rows import NEVER_MICROS, Batch, RecordForm
from sow_cli.session import Session
from sow_client import Client, InvalidArgument, Page, QueryPlan, QueryResult, RecordBatch
from sow_client._reads import WAYS, way_of

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
  sow query orders --group-by /site --aggregate "SUM(/px * /qty) AS value"
  sow query orders --group-by /site --aggregate "SUM(/qty) AS n" --plot
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
@projection_options
@grouping_options
@plot_option
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
@min_position_option
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
    grouping: Grouping,
    plot: bool,
    output: Output,
) -> None:
    named, include, leave_out = projected(select, exclude)
    _check_payloads(bool(named), leave_out is not None, bool(order_by), keys_only=keys_only, count_only=count_only)
    _check_plans(count_only, min_position, watch, output, explain=explain, no_run=no_run, with_plan=with_plan)
    alone = {"count": count_only, "watch": watch}
    _check_page(page, after, top=top, skip=skip, keys=keys, explain=explain, with_plan=with_plan, **alone)
    of_records = {"select": select, "exclude": exclude, "keys-only": keys_only, "page": page, **alone}
    _check_groups(grouping, output, of_records, plot=plot, explain=explain)
    # One more than is shown tells whether there are more.
    limit = TERMINAL_RECORDS_MAX if top is None and not count_only and sys.stdout.isatty() else None
    wanted, order = [key for some in keys for key in some] or None, list(order_by) or None
    selection = topic, filter_text, parameters
    with session.client() as client:
        if explain:
            explained = partial(client.explain, *selection, order_by=order, keys=wanted, run=not no_run)
            _show_plan(topic, explained(skip_n=skip, top_n=top, **grouping.arguments), output)
            return
        if grouping.given:
            grouped = partial(client.query, *selection, order_by=order, keys=wanted, skip_n=skip, top_n=top)
            _show_groups(
                partial(grouped, min_position=min_position, with_plan=with_plan), grouping, output, limit, plot
            )
            return
        if count_only and not (wanted or top or skip):
            _show_count(client, selection, min_position, output)
            return
        without_payload = keys_only or count_only or (bool(named) and include is None)
        form = record_form(client, topic, output, keys_only=without_payload, select=named)
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


def _show_groups(
    ask: Callable[..., QueryResult], grouping: Grouping, output: Output, limit: int | None, plot: bool
) -> None:
    with ask(**grouping.arguments) as result:
        if plot:
            plot_groups(result, grouping.group_by, limit)
        else:
            show_groups(result, output)
    if result.plan is not None:
        note(display.safe(way_of(result.plan)))


def _check_groups(
    grouping: Grouping, output: Output, of_records: Mapping[str, object], *, plot: bool, explain: bool
) -> None:
    grouping.refuse(*[(f"--{name}", bool(given)) for name, given in of_records.items()])
    check_plot(output, plot=plot, grouped=bool(grouping.aggregate), needs="--aggregate")
    arguments.refuse_together(("--plot", plot), ("--explain", explain))


def _check_payloads(select: bool, exclude: bool, order_by: bool, *, keys_only: bool, count_only: bool) -> None:
    for fields in (("--select", select), ("--exclude", exclude)):
        arguments.refuse_together(fields, ("--keys-only", keys_only), ("--count", count_only))
    arguments.refuse_together(("--order-by", order_by), ("--count", count_only))


def _check_plans(
    count_only: bool,
    min_position: str | None,
    watch: str | None,
    output: Output,
    *,
    explain: bool,
    no_run: bool,
    with_plan: bool,
) -> None:
    for others in (("--count", count_only), ("--min-position", min_position is not None)):
        arguments.refuse_together(("--explain", explain), others)
    arguments.refuse_together(("--with-plan", with_plan), ("--explain", explain), ("--count", count_only))
    if no_run and not explain:
        raise click.UsageError("--no-run needs --explain")
    _check_watch(watch, output, count_only=count_only, explain=explain, with_plan=with_plan)


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
        note(display.safe(way_of(result.plan)))
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
@click.option("--by", multiple=True, metavar="PATH,…", help="A count for each group with equal values; most first.")
@plot_option
@min_position_option
@output_option
@click.pass_obj
def count(
    session: Session,
    topic: str,
    filter_text: str | None,
    parameters: Values | None,
    by: tuple[str, ...],
    plot: bool,
    min_position: str | None,
    output: Output,
) -> None:
    """Count the live records of TOPIC that match FILTER.

    \b
    Examples:
      sow count orders
      sow count orders "/price > 9"
      sow count orders --by /site
      sow count orders --by /site --plot
    """
    check_plot(output, plot=plot, grouped=bool(by), needs="--by")
    with session.client() as client:
        if by:
            ask = partial(
                client.query, topic, filter_text, parameters, order_by="/count DESC", min_position=min_position
            )
            limit = TERMINAL_RECORDS_MAX if sys.stdout.isatty() else None
            try:
                _show_groups(ask, Grouping(by, (COUNTED,), None), output, limit, plot)
            except InvalidArgument as error:
                if error.details.get("field") != "aggregate[0]":
                    raise
                # Nothing else about COUNT(*) AS count can be wrong.
                other = "the number of records has the name count; give another one to the field, as in '/count AS n'"
                raise click.BadParameter(other, param_hint="--by") from error
            return
        _show_count(client, (topic, filter_text, parameters), min_position, output)


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


def _show_plan(topic: str, plan: QueryPlan, output: Output) -> None:
    output.one(_plan_facts(topic, plan))
    remark_on_fields(plan.absent_fields)


def _plan_facts(topic: str, plan: QueryPlan) -> list[Fact]:
    return [
        Fact("topic", topic, topic),
        Fact("access", plan.access, WAYS.get(plan.access, "reads records in a way that this command does not know")),
        Fact("index_path", plan.index_path or None, display.safe(plan.index_path) or display.NOT_SET, label="index"),
        Fact("probes", plan.probes, display.count(plan.probes)),
        Fact("index_entries", plan.index_entries, display.count(plan.index_entries)),
        Fact("scanned", plan.scanned, display.records(plan.scanned)),
        Fact("matched", plan.matched, display.records(plan.matched)),
        Fact("returned", plan.returned, display.records(plan.returned)),
        Fact("filter", plan.filter or None, display.safe(plan.filter) or display.NOT_SET),
        Fact("order_by", plan.order_by or None, display.safe(plan.order_by) or "the key"),
    ]
