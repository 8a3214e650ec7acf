"""Durables: the backlog of each durable subscription, its age, and its consumer."""

from __future__ import annotations

from datetime import timedelta

from sow_client import Durable
from sow_console.pages.page import Facts, View


async def facts(view: View) -> Facts:
    """The durables of a topic, or of all; the one with the oldest backlog first."""
    topic = view.argument("topic")
    found = await view.client.durables(topic or None, with_figures=True)
    return {
        "topic": topic,
        "durables": sorted(found, key=_urgency),
        "command": view.command("durable", "list", *([topic] if topic else [])),
    }


def _urgency(durable: Durable) -> tuple[timedelta, str, str]:
    figures = durable.figures
    age = figures.oldest_unacknowledged_age if figures else None
    return -(age or timedelta(0)), durable.topic, durable.name
