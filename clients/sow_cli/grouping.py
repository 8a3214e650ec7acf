"""`--group-by`, `--aggregate`, `--having`, `--by`: results of groups of records, in place of the records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import click
import msgspec

from sow_cli import arguments, display
from sow_cli.ignored import remark_on_fields
from sow_cli.output import Fact, Facts, Format, Output, note
from sow_client import QueryResult

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
    """The options of a query that groups; the command gets them as `grouping`."""

    def grouped(
        *values: object, group_by: tuple[str, ...], aggregate: tuple[str, ...], having: str | None, **others: object
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
    payloads = (payload for batch in result.batches() for payload in batch.payloads)
    if output.format in (Format.NDJSON, Format.RAW):
        for payload in payloads:
            output.write(payload + b"\n")
    elif output.format is Format.JSON:
        output.write(msgspec.json.format(b"[" + b",".join(payloads) + b"]", indent=2) + b"\n")
    else:
        rows = list(map(_facts, _documents(payloads)))
        names = [fact.name for fact in rows[0]] if rows else []
        output.many(rows, names=names, nothing="no groups")
    footer = result.footer
    if footer is None:
        return
    remark_on_fields(footer.absent_fields)
    if footer.ungrouped:
        note(f"{display.records(footer.ungrouped)} in no group: a value to group by is null, an array or an object")
    if output.is_table:
        shown = f"{footer.returned:,} of " if footer.returned != footer.groups else ""
        note(f"{shown}{display.counted(footer.groups, 'group')} of {display.records(footer.matched)}")


def _documents(payloads: Iterable[bytes]) -> Iterator[dict[str, object]]:
    decode = msgspec.json.Decoder(dict[str, object]).decode
    return map(decode, payloads)


def _facts(document: dict[str, object]) -> Facts:
    return [Fact(name, value, _text(value), label=name, right=_is_number(value)) for name, value in document.items()]  # type: ignore[arg-type]  # all are scalars


def _text(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: display.NOT_SET, True: "true", False: "false"}[value]
    return display.safe(value) if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else repr(value)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
