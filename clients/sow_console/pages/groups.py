"""Groups: the records of a topic by the values of a field, as bars: their number, or the sum of another field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from sow_console import charts
from sow_console.pages import cells, records
from sow_console.pages.page import Facts, View, operands

SHOWN: Final = 50
"""Groups that are drawn: those with the greatest values."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The groups that a person wants."""

    records: records.Asked
    """The records to group."""
    by: str
    """Paths or expressions, with commas between them."""
    total: str
    """The field to add up; empty: the records are counted."""

    @property
    def name(self) -> str:
        """The name of the number of a group: no part of `by`, as names must differ."""
        name = "sum" if self.total else "count"
        while name in self.by:
            name += "_"
        return name

    @property
    def number(self) -> str:
        """The expression of the number of a group."""
        return f"SUM({self.total})" if self.total else "COUNT(*)"

    @property
    def order(self) -> str:
        """The greatest first."""
        return f"/{self.name} DESC"

    @property
    def words(self) -> list[str]:
        """The command that does the same."""
        query = self.records
        options = ["--group-by", self.by, "--aggregate", f"{self.number} AS {self.name}", "--order-by", self.order]
        options += ["--top", str(SHOWN), "--plot"]
        filters = [query.filter] if query.filter else []
        return ["query", *query.options, *options, *operands(query.topic, *filters)]


def asked(arguments: Mapping[str, str]) -> Asked:
    """The groups in the arguments of the page."""
    return Asked(records.asked(arguments), arguments.get("by", "").strip(), arguments.get("total", "").strip())


async def facts(view: View) -> Facts:
    """The groups with the greatest numbers, and how many there are besides."""
    wanted = asked(view.arguments)
    query = wanted.records
    made: dict[str, object] = {
        "topic": query.topic,
        "by": wanted.by,
        "total": wanted.total,
        "topics": await cells.names(view),
        "command": view.command(*wanted.words) if query.topic and wanted.by else "",
    }
    if not (query.topic and wanted.by):
        return made
    async with view.client.query(
        query.topic,
        query.filter or None,
        query.values,
        group_by=wanted.by,
        aggregate={wanted.name: wanted.number},  # by name: a field with commas in it is not several
        order_by=wanted.order,
        top_n=SHOWN,
    ) as result:
        payloads = [record.payload async for record in result]
        assert result.header is not None, "an answer that ended in order has a header"
        assert result.footer is not None, "and a footer"
        header, footer = result.header, result.footer
    # The number of a group is the last of its values, the others name it.
    found = [tuple(json.loads(payload).values()) for payload in payloads]
    numbers = [values[-1] for values in found]
    grouped = footer.matched - footer.ungrouped
    return made | {
        "as_of": header.as_of,
        "bookmark": header.bookmark,
        "matched": footer.matched,
        "ungrouped": footer.ungrouped,
        "groups": footer.groups,
        "others": footer.groups - len(found),
        "others_records": None if wanted.total else grouped - sum(numbers),
        "absent": footer.absent_fields,
        "results": [msgspec.Raw(payload) for payload in payloads],
        "bars": charts.bars([values[:-1] for values in found], numbers),
    }
