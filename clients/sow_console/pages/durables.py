"""Durables: the backlog of each durable subscription, its age, and its consumer."""

from __future__ import annotations

from datetime import timedelta

from sow_client import Durable
from sow_console.pages import cells
from sow_console.pages.page import Facts, View


async def facts(view: View) -> Facts:
    """The durables of a topic, or of all; the one with the oldest backlog first."""
    topic = view.argument("topic")
    told: cells.Joined[list[Durable]] = cells.Joined({}, {})
    if topic:
        found = await view.client.durables(topic, with_figures=True)
    else:
        told = await cells.joined(view, lambda client: client.durables(with_figures=True))
        found = [one for listed in told.answers.values() for one in listed]
    return {
        "topic": topic,
        "durables": sorted(found, key=_urgency),
        "cells": {one.topic: cell for cell, listed in told.answers.items() if cell for one in listed},
        "missing": told.missing,
        "command": view.command("durable", "list", *([topic] if topic else [])),
    }


def _urgency(durable: Durable) -> tuple[timedelta, str, str]:
    figures = durable.figures
    age = figures.oldest_unacknowledged_age if figures else None
    return -(age or timedelta(0)), durable.topic, durable.name
