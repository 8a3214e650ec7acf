"""The pages, in the order of the menu."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from sow_console.pages import (
    connections,
    due,
    durables,
    groups,
    key,
    letters,
    overview,
    records,
    replication,
    server,
    topic,
)
from sow_console.pages.page import Facts, Page, View

__all__ = ["PAGES", "Facts", "Page", "View"]

PAGES: Final[Mapping[str, Page]] = {
    page.name: page
    for page in (
        Page("overview", "Overview", "1", overview.facts, interval=1.0),
        Page("records", "Records", "2", records.facts, twin=records.twin),
        Page("groups", "Groups", "g", groups.facts),
        Page("key", "Key", "3", key.facts, twin=key.twin),
        Page("due", "Due", "4", due.facts),
        Page("durables", "Durables", "5", durables.facts),
        Page("replication", "Replication", "6", replication.facts),
        Page("topic", "Settings", "7", topic.facts, interval=10.0),
        Page("connections", "Connections", "8", connections.facts),
        Page("dead-letters", "Dead letters", "9", letters.facts, twin=letters.twin, interval=5.0),
        Page("server", "Server", "0", server.facts, twin=server.twin, interval=1.0),
    )
}
