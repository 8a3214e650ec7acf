"""`sow due`: how many records fall due when."""

from __future__ import annotations

from datetime import datetime

import click

from sow_cli import arguments, display, joined
from sow_cli.grouping import check_plot
from sow_cli.output import Fact, Output, moment, note, output_option
from sow_cli.session import Session
from sow_client import ExpiryHorizon, InvalidArgument, TopicDue
from sow_client._inspection import joined as joined_horizon


@click.command(short_help="Count the records that fall due, by when.")
@click.argument("topic", required=False)
@click.option(
    "--within",
    "spans",
    type=arguments.duration,
    multiple=True,
    metavar="DURATION",
    help="The end of a span of time; each begins where the one before ends. May be repeated, rising. Default: 1m 10m "
    "1h 6h 1d 7d.",
)
@click.option("--exact", is_flag=True, help="End the count where it would not be exact any more.")
@click.option("--plot", is_flag=True, help="Draw the counts of each topic as bars, also in a pipe.")
@joined.here_option
@output_option
@click.pass_obj
def due(
    session: Session, output: Output, topic: str | None, spans: tuple[str, ...], exact: bool, plot: bool, here: bool
) -> None:
    """Count the records of TOPIC, or of all topics, that fall due in each span of time from now.

    Up to 100,000 records are looked at. Behind those, up to 1,000,000 entries of the expiry index are counted. There a
    record whose lifetime was changed may count at its former time, and a deleted record may count at its time. Remarks
    on stderr say up to when the counts are exact, and up to when they are complete. With --exact the count ends where
    it would not be exact. The answer also has when the next record falls due.

    \b
    Examples:
      sow due
      sow due sessions --within 30s --within 5m --within 1h --exact
      sow due sessions --plot
    """
    check_plot(output, plot=plot)
    with session.client() as client:
        try:
            found = joined.of_topic(client, topic, lambda one: one.expiry_horizon(topic, spans, exact=exact), here=here)
        except InvalidArgument as error:
            if error.details.get("field") != "spans":
                raise
            raise click.BadParameter(error.message.removeprefix("spans: "), param_hint="--within") from error
    whole = joined_horizon(list(found.answers.values()))
    ends = [display.exact_duration(span) for span in whole.spans]
    if plot:
        _draw(found, ends)
    else:
        names = ("topic", "next_time_micros", "overdue", *[f"due_{end}" for end in ends], "incomplete")
        rows = found.rows(lambda horizon: (_facts(one, ends) for one in horizon.topics), ordered_by=1)
        output.many(rows, names=found.names(names), nothing="no topics")
    _remark(whole)
    found.end()


def _draw(found: joined.Joined[ExpiryHorizon], ends: list[str]) -> None:
    """Draws a chart for each topic that has records which fall due."""
    from sow_cli import plots  # only here, as it needs rich

    drawn = {}
    for cell, horizon in found.answers.items():
        for one in horizon.topics:
            bars = [plots.Bar("overdue", one.overdue)]
            bars += [plots.Bar(f"≤{end}", count) for end, count in zip(ends, one.due, strict=True)]
            if any(bar.value for bar in bars):
                drawn[display.safe(one.topic) + (f" in {cell}" if found.several else "")] = bars
    plots.show(drawn)
    if not drawn:
        note("no record falls due in these spans")


def _facts(one: TopicDue, ends: list[str]) -> list[Fact]:
    due = [
        Fact(f"due_{end}", count, display.count(count), column=f"≤{end}", right=True)
        for end, count in zip(ends, one.due, strict=True)
    ]
    return [
        Fact("topic", one.topic, display.safe(one.topic)),
        moment("next_time", one.next_time, label="next")
        if one.next_time is not None
        else Fact("next_time", None, display.NOT_SET, label="next"),
        Fact("overdue", one.overdue, display.count(one.overdue), right=True),
        *due,
        Fact("incomplete", one.incomplete, "yes" if one.incomplete else "no", in_lists=False),
    ]


def _remark(found: ExpiryHorizon) -> None:
    if not found.exact:
        since = "all counts" if found.exact_upto < found.as_of else f"counts behind {_time(found.exact_upto)}"
        note(f"{since} are entries of the expiry index, also of records that were changed or deleted")
    if not found.complete:
        note(f"counted up to {_time(found.complete_upto)}: there is more than is counted at once")
    for one in found.topics:
        if one.incomplete:
            note(f"{display.safe(one.topic)}: expiration was just enabled, so some records are not counted yet")


def _time(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M:%S}Z"
