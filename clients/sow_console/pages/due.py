"""Due: how many records fall due when, which topic is next, and how far expiry is behind."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from sow_client import ExpiryHorizon, Record
from sow_client._inspection import joined as horizons_joined
from sow_console import documents, horizon
from sow_console.pages import cells
from sow_console.pages.page import Facts, View

READ_MAX: Final = 100_000
"""In a topic of more records none are read for this page."""
NEXT: Final = 20
"""Records that are listed."""


async def facts(view: View) -> Facts:
    """The expiry horizon of a topic, of all, or of the records of a filter."""
    within = view.argument("within", horizon.DEFAULT_WITHIN)
    if within not in horizon.WITHIN:
        within = horizon.DEFAULT_WITHIN
    topic = view.argument("topic")
    filter_text = view.argument("filter") if topic else ""
    spans = horizon.spans(horizon.WITHIN[within])
    small = bool(topic) and await _is_small(view, topic)
    upcoming: list[Record] = []
    told: cells.Joined[ExpiryHorizon] = cells.Joined({}, {})
    if small:
        async with view.client.query(
            topic, _and(filter_text, "@expire_time IS NOT NULL"), order_by="@expire_time", top_n=NEXT
        ) as result:
            upcoming = [record async for record in result]
    if filter_text and small:
        found = await _of_filter(view, topic, filter_text, spans)
    elif topic:
        found = await view.client.expiry_horizon(topic, spans)
    else:
        told = await cells.joined(view, lambda client: client.expiry_horizon(None, spans))
        found = horizons_joined(list(told.answers.values()))
    bars = horizon.bars(found)
    return {
        "topic": topic,
        "within": within,
        "filter": filter_text,
        "is_filtered": bool(filter_text) and small,
        "is_small": small,
        "read_max": READ_MAX,
        "upcoming": [
            {"key": one.key, "expire_time": one.expire_time, "payload": documents.text(documents.shown(one))[:200]}
            for one in upcoming
        ],
        "choices": list(horizon.WITHIN),
        "as_of": found.as_of,
        "bars": bars,
        "most": max((bar.due for bar in bars), default=0),
        "total": sum(bar.due for bar in bars),
        "overdue": sum(one.overdue for one in found.topics),
        "complete": found.complete,
        "complete_upto": found.complete_upto,
        "exact": found.exact,
        "exact_upto": max(found.as_of, found.exact_upto),
        "cells": {one.topic: cell for cell, part in told.answers.items() if cell for one in part.topics},
        "missing": told.missing,
        "topics": sorted(
            (
                {
                    "topic": one.topic,
                    "overdue": one.overdue,
                    "due": sum(one.due),
                    "next_time": one.next_time,
                    "lag": found.as_of - one.next_time if one.overdue and one.next_time else None,
                    "incomplete": one.incomplete,
                }
                for one in found.topics
                if one.next_time or one.overdue
            ),
            key=lambda one: (one["next_time"] is None, one["next_time"] or found.as_of),
        ),
        "command": view.command(*_words(topic, filter_text, within)),
    }


def _words(topic: str, filter_text: str, within: str) -> list[str]:
    if filter_text:
        matching = _and(filter_text, "@expire_time IS NOT NULL")
        return ["query", topic, matching, "--order-by", "@expire_time", "--top", str(NEXT)]
    return ["due", *([topic] if topic else []), "--within", within]


async def _is_small(view: View, topic: str) -> bool:
    statistics = (await view.client.describe_topic(topic)).statistics
    return statistics is not None and statistics.live_records <= READ_MAX


async def _of_filter(view: View, topic: str, filter_text: str, spans: list[timedelta]) -> ExpiryHorizon:
    """The horizon of the live records that match: each is read, so the count is exact."""
    async with view.client.query(topic, _and(filter_text, "@expire_time IS NOT NULL"), keys_only=True) as result:
        times = [record.expire_time async for record in result if record.expire_time is not None]
    assert result.header is not None, "an answer that ended in order has a header"
    return horizon.counted(topic, times, result.header.as_of, spans)


def _and(filter_text: str, more: str) -> str:
    return f"({filter_text}) AND {more}" if filter_text else more
