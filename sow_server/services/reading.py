"""The parts of the store that services read through, once the caller has a topic (access [3])."""

from __future__ import annotations

from dataclasses import dataclass

from sow_server.engine.catalog.topics import Topics
from sow_server.engine.commit.origins import Origins
from sow_server.engine.reading import Cuts
from sow_server.engine.values.bookmarks import Instance
from sow_server.engine.values.model import TopicSettings


@dataclass(frozen=True, slots=True)
class StoreReading:
    """Cuts, bookmarks, and the forms of topics' payloads. The services and their conversions share one."""

    cuts: Cuts
    origins: Origins
    instance: Instance
    topics: Topics

    def settings(self, topic: str) -> TopicSettings | None:
        """The settings of a topic whose records are sent; None: it has just been deleted."""
        found = self.topics.by_name.get(topic)
        return None if found is None else found.settings
