"""Connections: who is connected with which calls, and the subscriptions with their positions and queues."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

from sow_client import ActiveSubscription, AsyncClient, CallerSession
from sow_client._cells import in_cell
from sow_console.pages import cells
from sow_console.pages.page import Facts, View


async def facts(view: View) -> Facts:
    """The callers and the subscriptions of a topic, or of all. Of several cells, an id has the name of its cell in
    front, as in the lists of a client."""
    topic = view.argument("topic")
    told = await cells.joined(view, _of_one)
    listed = {cell if told.has_cells else "": found for cell, found in told.answers.items()}
    subscriptions = [
        replace(one, id=in_cell(cell, one.id), session=in_cell(cell, one.session))
        for cell, (_, found) in listed.items()
        for one in found
    ]
    if topic:
        subscriptions = await view.client.subscriptions(topic)
    return {
        "topic": topic,
        "sessions": [replace(one, id=in_cell(cell, one.id)) for cell, (found, _) in listed.items() for one in found],
        "subscriptions": sorted(subscriptions, key=attrgetter("since")),
        "missing": told.missing,
        "command": view.command("sessions", "--subscriptions", *(["--topic", topic] if topic else [])),
    }


async def _of_one(client: AsyncClient) -> tuple[list[CallerSession], list[ActiveSubscription]]:
    return await client.sessions(), await client.subscriptions()
