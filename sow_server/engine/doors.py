"""The two doors of a store: all that services, the hub, consumers, timers and peers hold of the engine.

[1]  `Reads` changes no data. Every change goes through a part of `Writes`, and whoever asks for one of records, topics,
     policies, durables or loads gets a Pending.
[2]  A door has no verbs of its own beside a look-up: whoever holds one takes the part that it uses, once, when it is
     built. So a door costs no call.
[3]  They stand above all features, as they hold some of each. Inside the engine `Core` is what features get.
"""

from __future__ import annotations

from dataclasses import dataclass

from sow_server.engine.administration.administration import Administration
from sow_server.engine.catalog.topics import Topics
from sow_server.engine.commit.commits import Commits
from sow_server.engine.commit.origins import Origins
from sow_server.engine.commit.soundness import SoundnessReports
from sow_server.engine.durables import Durables
from sow_server.engine.durables.commits import DurableCommits
from sow_server.engine.loads import Loads
from sow_server.engine.reading import Cuts
from sow_server.engine.replicas import Replicas
from sow_server.engine.upkeep import Upkeep
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
    durables: Durables
    unsound: SoundnessReports
    """The rows that reads have skipped."""

    def settings(self, topic: str) -> TopicSettings | None:
        """The settings of a topic whose records are sent; None: it has just been deleted."""
        found = self.topics.by_name.get(topic)
        return None if found is None else found.settings


@dataclass(frozen=True, slots=True)
class Writes:
    """Everything that changes the store, by what it changes."""

    commits: Commits
    """Records and publishers, and how far the writer is."""
    administration: Administration
    """Topics and policies."""
    durables: DurableCommits
    loads: Loads
    replicas: Replicas
    """The state of peers, and their changes."""
    upkeep: Upkeep
    """The rows that nobody needs any more, the marks on disk, backups."""
