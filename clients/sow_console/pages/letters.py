"""Dead letters: the topics that keep them, and the letters of one, the newest first."""

from __future__ import annotations

from typing import Final

from sow_console import letter_contents
from sow_console.pages import cells
from sow_console.pages.page import Facts, View

LETTERS: Final = 50
"""That are shown."""
SORTED_MAX: Final = 100_000
"""The newest are found by reading the whole topic; in a larger one the first in the order of keys are shown."""


async def facts(view: View) -> Facts:
    """The topics of dead letters, and the letters of the one that was chosen, or that matches a filter."""
    told = await cells.topics(view, with_statistics=True)
    topics = cells.all_of(told)
    boxes = letter_contents.boxes(topics)
    topic, filter_text = view.argument("topic"), view.argument("filter")
    made: dict[str, object] = {
        "topic": topic,
        "filter": filter_text,
        "boxes": boxes,
        "missing": told.missing,
        "command": view.command("query", topic, *([filter_text] if filter_text else []), "--top", str(LETTERS))
        if topic
        else view.command("topic", "list"),
        "known": [one.name for one in topics],
    }
    if not topic:
        return made
    described = next((one for one in topics if one.name == topic), None)
    newest = described is None or described.statistics is None or described.statistics.live_records <= SORTED_MAX
    async with view.client.query(
        topic, filter_text or None, order_by="@publish_time DESC" if newest else None, top_n=LETTERS + 1
    ) as found:
        records = [record async for record in found]
    return made | {
        "letters": [letter_contents.read(record, topics) for record in records[:LETTERS]],
        "more": len(records) > LETTERS,
        "newest": newest,
        "by_key": [one.name for one in topics if one.settings.dead_letter == topic],
    }


async def twin(view: View) -> Facts:
    """The same, with the payloads as text."""
    made = dict(await facts(view))
    found = made.get("letters")
    if isinstance(found, list):
        made["letters"] = [
            {
                "key": one.key,
                "version": one.version,
                "time": one.time,
                "topic": one.topic,
                "record_key": one.record_key,
                "reason": one.reason,
                "durable": one.durable,
                "was_due": one.was_due,
                "payload": one.text,
            }
            for one in found
        ]
    return made
