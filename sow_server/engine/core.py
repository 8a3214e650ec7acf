"""The parts that the features of the store are built on. Each feature gets all of them, and nobody outside the engine
does."""

from __future__ import annotations

from dataclasses import dataclass

from sow_server.engine.catalog.topics import Topics
from sow_server.engine.commit.commits import Commits
from sow_server.engine.commit.origins import Origins
from sow_server.engine.commit.requests import RequestLimits
from sow_server.engine.commit.soundness import SoundnessReports
from sow_server.engine.disk.rocks import Rocks
from sow_server.engine.reading import Cuts
from sow_server.engine.values.bookmarks import Instance
from sow_server.engine.values.clock import GuardedClock


@dataclass(frozen=True, slots=True)
class Core:
    """One of each. It has no methods: whoever has it uses its parts."""

    rocks: Rocks
    topics: Topics
    clock: GuardedClock
    commits: Commits
    cuts: Cuts
    origins: Origins
    instance: Instance
    limits: RequestLimits
    """The limits of records and requests (rule K8)."""
    unsound: SoundnessReports
