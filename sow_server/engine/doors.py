"""The parts of a store that the rest of the server holds, beside its features."""

from __future__ import annotations

from dataclasses import dataclass

from sow_server.engine.catalog.topics import Topics
from sow_server.engine.commit.origins import Origins
from sow_server.engine.reading import Cuts
from sow_server.engine.values.bookmarks import Instance
from sow_server.engine.values.clock import GuardedClock
from sow_server.engine.values.model import TopicSettings


@dataclass(frozen=True, slots=True)
class Reads:
    """Everything that reading takes. Services use it once the caller has a topic (access [3])."""

    cuts: Cuts
    origins: Origins
    instance: Instance
    topics: Topics
    clock: GuardedClock

    def settings(self, topic: str) -> TopicSettings | None:
        """The settings of a topic whose records are sent; None: it has just been deleted."""
        found = self.topics.by_name.get(topic)
        return None if found is None else found.settings
