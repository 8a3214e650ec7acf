"""Records: a query, live. The grid is filled over a WebSocket; the JSON of the page is the answer of one instant."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from sow_client import AsyncClient, InvalidArgument, QueryFooter, QueryHeader, QueryPlan, Record
from sow_client._parameters import Parameters, parameters_of
from sow_client._reads import way_of
from sow_console import documents
from sow_console.pages import cells
from sow_console.pages.page import Facts, View

ROWS: Final = 200
ROWS_MAX: Final = 2_000
AGAIN_MAX: Final = 100_000
"""The number of all matches, where not all are shown, costs another run of the query. In a topic of more records it is
counted on request only."""
ANSWER_BYTES_MAX: Final = 16_777_216
"""Payloads beyond these bytes are not kept whole: 2,000 of the largest would be gigabytes."""

_Made = TypeVar("_Made")
_Made_co = TypeVar("_Made_co", covariant=True)


class Make(Protocol[_Made_co]):
    """Makes of a record the part that is kept; not `whole`: with little of its payload."""

    def __call__(self, record: Record, /, *, whole: bool) -> _Made_co: ...


@dataclass(frozen=True, slots=True)
class Asked:
    """A query as a person writes it."""

    topic: str
    filter: str
    parameters: str
    """The values of the names in the filter, as a JSON object; empty: none."""
    order: str
    rows: int
    count: bool
    """True if all matches are to be counted, whatever it costs."""

    @property
    def values(self) -> Parameters | None:
        """The parameters. Raises InvalidArgument."""
        return parameters_of(self.parameters) if self.parameters else None

    @property
    def options(self) -> list[str]:
        """The parameters as options of the command; none while they are wrong."""
        try:
            values = self.values or {}
        except InvalidArgument:
            return []
        return [
            word
            for name, value in values.items()
            for word in ("--param", f"{name}={value}" if isinstance(value, str) else f"{name}:={json.dumps(value)}")
        ]

    @property
    def words(self) -> list[str]:
        """The command that does the same."""
        words = ["query", self.topic, *([self.filter] if self.filter else []), *self.options]
        if self.order:
            words += ["--order-by", self.order]
        return [*words, "--top", str(self.rows)]


@dataclass(frozen=True, slots=True)
class Answer(Generic[_Made]):
    """The answer of one instant."""

    header: QueryHeader
    footer: QueryFooter
    records: list[_Made]
    more: bool
    """True if more records matched than were asked for."""
    matched: int | None
    """All that matched, counted a moment later where there are more; None: not counted, as that would cost much."""
    plan: QueryPlan | None
    """How the records were found; None: an older server, which does not tell."""


def asked(arguments: Mapping[str, str]) -> Asked:
    """The query in the arguments of a page."""
    rows = arguments.get("rows", "")
    return Asked(
        arguments.get("topic", "").strip(),
        arguments.get("filter", "").strip(),
        arguments.get("parameters", "").strip(),
        arguments.get("order", "").strip(),
        min(ROWS_MAX, max(1, int(rows))) if rows.isdecimal() and len(rows) < 9 else ROWS,
        arguments.get("count", "") == "1",
    )


async def answer(client: AsyncClient, query: Asked, make: Make[_Made]) -> Answer[_Made]:
    """Runs the query. One record more than wanted tells whether there are more."""
    byte_count = 0
    records: list[_Made] = []
    async with client.query(
        query.topic,
        query.filter or None,
        query.values,
        order_by=query.order or None,
        top_n=query.rows + 1,
        with_plan=True,
    ) as result:
        async for record in result:
            byte_count += len(record.payload)
            records.append(make(record, whole=byte_count <= ANSWER_BYTES_MAX))
        assert result.header is not None, "an answer that ended in order has a header"
        assert result.footer is not None, "and a footer"
        header, footer, plan = result.header, result.footer, result.plan
    if len(records) <= query.rows:
        return Answer(header, footer, records, more=False, matched=len(records), plan=plan)
    statistics = (await client.describe_topic(query.topic)).statistics
    is_small = statistics is not None and statistics.live_records <= AGAIN_MAX
    matched = await client.count(query.topic, query.filter or None, query.values) if is_small or query.count else None
    return Answer(header, footer, records[:-1], more=True, matched=matched, plan=plan)


def error_of(error: Exception) -> dict[str, object]:
    """An error for the browser, with the column of a filter that it is about."""
    details = getattr(error, "details", {})
    position = details.get("position", "")
    return {
        "message": getattr(error, "message", str(error)),
        "reason": getattr(error, "reason", ""),
        "field": details.get("field", ""),
        "position": int(position) if position.isdecimal() else None,
    }


async def facts(view: View) -> Facts:
    """The form of the page. The grid comes over the socket."""
    query = asked(view.arguments)
    names = await cells.names(view)
    return {
        "query": query,
        "topics": names,
        "command": view.command(*query.words) if query.topic else "",
        "follow": view.command(
            *("subscribe", query.topic, *([query.filter] if query.filter else []), *query.options, "--sow"),
            *(["--order-by", query.order, "--top", str(query.rows)] if query.order else []),
        )
        if query.topic
        else "",
        "save": view.command(
            "export",
            query.topic,
            f"{query.topic}.csv",
            *(["--filter", query.filter] if query.filter else []),
            *query.options,
            "--csv-safe",
        )
        if query.topic
        else "",
    }


async def twin(view: View) -> Facts:
    """The answer, the plan, and the commands."""
    query = asked(view.arguments)
    made: dict[str, object] = dict(await facts(view))
    if not query.topic:
        return made
    found = await answer(view.client, query, documents.twin)
    return made | {
        "plan": found.plan,
        "way": None if found.plan is None else way_of(found.plan),
        "as_of": found.header.as_of,
        "bookmark": found.header.bookmark,
        "read": found.footer.scanned,
        "absent": found.footer.absent_fields,
        "matched": found.matched,
        "more": found.more,
        "records": found.records,
    }
