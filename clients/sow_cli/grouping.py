"""`--group-by`, `--aggregate`, `--having`, `--by`: results of groups of records, in place of the records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import click
import msgspec
from click.core import ParameterSource

from sow_cli import arguments, display
from sow_cli.ignored import remark_on_fields
from sow_cli.output import Fact, Facts, Format, Output, note
from sow_client import QueryFooter, QueryResult
from sow_client._grouping import divided

COUNTED: Final = "COUNT(*) AS count"


@dataclass(frozen=True, slots=True)
class Grouping:
    """The options of one command."""

    group_by: tuple[str, ...]
    aggregate: tuple[str, ...]
    having: str | None

    @property
    def given(self) -> bool:
        """True if the answer has results of groups."""
        return bool(self.group_by or self.aggregate or self.having)

    @property
    def arguments(self) -> dict[str, Any]:
        """The same as arguments of the client's `query` and `explain`."""
        if not self.given:
            return {}
        return {"group_by": self.group_by, "aggregate": self.aggregate, "having": self.having}

    def refuse(self, *options: tuple[str, bool]) -> None:
        """Raises a usage error if one of these (name, is it given), which are about records, is given as well."""
        name = "--group-by" if self.group_by else "--aggregate" if self.aggregate else "--having"
        for option in options:
            arguments.refuse_together((name, self.given), option)


def grouping_options(command: Callable[..., object]) -> Callable[..., object]:
    """The options of a command whose records may be grouped; it gets them as `grouping`."""

    def grouped(
        *values: object,
        group_by: tuple[str, ...],
        aggregate: tuple[str, ...],
        having: str | None,
        **others: object,
    ) -> object:
        return command(*values, grouping=Grouping(group_by, aggregate, having), **others)

    grouped.__name__, grouped.__doc__ = command.__name__, command.__doc__
    grouped.__click_params__ = getattr(command, "__click_params__", [])  # type: ignore[attr-defined]  # click's own
    for option in (
        click.option(
            "--having",
            metavar="CONDITION",
            help="Only results for which this is true, such as '/n > 10' or 'SUM(/qty) > 0'.",
        ),
        click.option(
            "--aggregate",
            multiple=True,
            metavar="EXPRESSION AS NAME,…",
            help="Instead of records, results over all records or over each group: COUNT(*), COUNT(x), "
            "COUNT(DISTINCT x), SUM, AVG, MIN, MAX, and expressions of these (repeatable).",
        ),
        click.option(
            "--group-by",
            multiple=True,
            metavar="PATH,…",
            help="Instead of records, a result for each group of records with equal values; an expression needs "
            "AS NAME (repeatable).",
        ),
    ):
        grouped = option(grouped)
    return grouped


def show_groups(result: QueryResult, output: Output) -> None:
    """Writes the results of groups, and remarks on them."""
    output.page()
    payloads = (payload for batch in result.batches() for payload in batch.payloads)
    if output.format in (Format.NDJSON, Format.RAW):
        for payload in payloads:
            output.write(payload + b"\n")
    elif output.format is Format.JSON:
        output.write(msgspec.json.format(b"[" + b",".join(payloads) + b"]", indent=2) + b"\n")
    else:
        _show_table(list(_documents(payloads)), output)
    _remark_on(result.footer, is_for_people=output.is_table)


def _show_table(documents: Sequence[dict[str, object]], output: Output) -> None:
    rows = list(map(_facts, documents))
    output.many(rows, names=[fact.name for fact in rows[0]] if rows else [], nothing="no groups")


def plot_groups(result: QueryResult, group_by: Sequence[str], limit: int | None) -> None:
    """Draws the results of groups as bars, and remarks on them. `limit`: the most groups that are drawn."""
    from sow_cli import plots  # only here, as it needs rich

    documents = _documents(payload for batch in result.batches() for payload in batch.payloads)
    drawn = list(islice(documents, limit))
    more = next(documents, None) is not None
    for _ in documents:
        pass  # the footer comes behind them
    charts = plots.charts(drawn, sum([len(divided(text)) for text in group_by]))
    shown = {name: bars for name, bars in charts.items() if plots.has_bars(bars)}
    if not shown:
        _show_table(drawn, Output(Format.TABLE))
    plots.show({display.safe(name): bars for name, bars in shown.items()})
    if drawn and (without := [name for name in charts if name not in shown]):
        note(f"no bars for {', '.join(without)}: no group has a number there")
    if more:
        first = display.counted(len(drawn), "group")
        note(f"the first {first}, and there are more: --top N shows N, a pipe all of them")
    _remark_on(result.footer, is_for_people=True)


def _remark_on(footer: QueryFooter | None, *, is_for_people: bool) -> None:
    if footer is None:
        return
    remark_on_fields(footer.absent_fields)
    if footer.ungrouped:
        note(f"{display.records(footer.ungrouped)} in no group: a value to group by is null, an array or an object")
    if is_for_people:
        shown = f"{footer.returned:,} of " if footer.returned != footer.groups else ""
        note(f"{shown}{display.counted(footer.groups, 'group')} of {display.records(footer.matched)}")


def check_plot(output: Output, *, plot: bool, grouped: bool = True, needs: str = "") -> None:
    """Raises a usage error where `--plot` is given without numbers of groups, or with a format that was chosen. The
    format of a pipe, which nobody has chosen, does not matter. `needs`: the option that makes the numbers."""
    if plot and not grouped:
        raise click.UsageError(f"--plot needs {needs}")
    chosen = click.get_current_context().get_parameter_source("output") is ParameterSource.COMMANDLINE
    arguments.refuse_together(("--plot", plot), (f"--format {output.format.value}", chosen and not output.is_table))


plot_option: Final = click.option(
    "--plot",
    is_flag=True,
    help="Draw the numbers of groups as bars, also in a pipe; a chart for each aggregate.",
)


def _documents(payloads: Iterable[bytes]) -> Iterator[dict[str, object]]:
    decode = msgspec.json.Decoder(dict[str, object]).decode
    return map(decode, payloads)


def _facts(document: dict[str, object]) -> Facts:
    return [Fact(name, value, _text(value), label=name, right=_is_number(value)) for name, value in document.items()]  # type: ignore[arg-type]  # all are scalars


def _text(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: display.NOT_SET, True: "true", False: "false"}[value]
    return display.safe(value) if isinstance(value, str) else f"{value:,}"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
