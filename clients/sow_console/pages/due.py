"""Due: how many records fall due when, which topic is next, and how far expiry is behind."""

from __future__ import annotations

from sow_console import horizon
from sow_console.pages.page import Facts, View


async def facts(view: View) -> Facts:
    """The expiry horizon of a topic, or of all."""
    within = view.argument("within", horizon.DEFAULT_WITHIN)
    if within not in horizon.WITHIN:
        within = horizon.DEFAULT_WITHIN
    topic = view.argument("topic")
    found = await view.client.expiry_horizon(topic or None, horizon.spans(horizon.WITHIN[within]))
    bars = horizon.bars(found)
    return {
        "topic": topic,
        "within": within,
        "choices": list(horizon.WITHIN),
        "as_of": found.as_of,
        "bars": bars,
        "most": max((bar.due for bar in bars), default=0),
        "total": sum(bar.due for bar in bars),
        "overdue": sum(one.overdue for one in found.topics),
        "complete": found.complete,
        "complete_upto": found.complete_upto,
        "topics": sorted(
            (
                {
                    "topic": one.topic,
                    "overdue": one.overdue,
                    "due": sum(one.due),
                    "next_time": one.next_time,
                    "incomplete": one.incomplete,
                }
                for one in found.topics
                if one.next_time or one.overdue
            ),
            key=lambda one: (one["next_time"] is None, one["next_time"] or found.as_of),
        ),
        "command": view.command("due", *([topic] if topic else []), "--within", within),
    }
