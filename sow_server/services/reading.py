"""The parts of the store that services read through, once the caller has a topic (access [3])."""

from __future__ import annotations

from dataclasses import dataclass

from sow_server.engine.commit.origins import Origins
from sow_server.engine.opening import Instance
from sow_server.engine.reading import Cuts


@dataclass(frozen=True, slots=True)
class StoreReading:
    """Cuts and bookmarks. The services and their conversions share one."""

    cuts: Cuts
    origins: Origins
    instance: Instance
