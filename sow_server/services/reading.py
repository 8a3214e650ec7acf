"""The parts of the store that services read through."""

from __future__ import annotations

from dataclasses import dataclass

from sow_server.engine.catalog.topics import Topics
from sow_server.engine.commit.origins import Origins
from sow_server.engine.opening import Instance
from sow_server.engine.reading import Cuts


@dataclass(frozen=True, slots=True)
class StoreReading:
    """Finds topics, cuts and bookmarks. The services and their conversions share one."""

    topics: Topics
    cuts: Cuts
    origins: Origins
    instance: Instance
