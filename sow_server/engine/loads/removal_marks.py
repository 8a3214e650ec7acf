"""Marks of records that are removed from a topic while a load of it is open.

[1]  A removal is marked for the load in its own commit, so that the loaded row does not bring the record back. The
     exceptions are a record that the load itself removes, and one that expires and was there before the opening.
"""

from __future__ import annotations

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit.draft import Draft, Removed
from sow_server.engine.disk.layout import mark_key
from sow_server.engine.disk.rocks import STAGING
from sow_server.engine.stored import EXPIRE


class AppliedLoad:
    """The load that makes the changes of one draft."""

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0
        """0: none does."""


def on_removed(draft: Draft, topic: Topic, removed: Removed) -> None:
    """Marks removals for the loads of the topic that were opened before them ([1])."""
    if not topic.loads:
        return
    own = draft.part(AppliedLoad).number
    puts = draft.batch.puts[STAGING]
    sequences = removed.previous if removed.change == EXPIRE else removed.sequences
    for load, begin_sequence in topic.loads:
        if load == own:
            continue
        for key, sequence in zip(removed.keys, sequences, strict=True):
            if sequence > begin_sequence:
                puts[mark_key(load, key)] = b""
