"""The parts of replication in the store, and the end of a topic in all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from sow_server.engine.catalog.topics import Topic, Topics
from sow_server.engine.commit.commits import Commits
from sow_server.engine.commit.draft import Draft
from sow_server.engine.commit.expiry import Sweep
from sow_server.engine.commit.origins import Origins
from sow_server.engine.commit.requests import RequestLimits
from sow_server.engine.commit.soundness import SoundnessReports
from sow_server.engine.disk.layout import seed_key
from sow_server.engine.disk.rocks import META, TOMBSTONES, Rocks
from sow_server.engine.reading import Cuts
from sow_server.engine.replicas.commanded import CommandedPeers
from sow_server.engine.replicas.marks import SourceMarks
from sow_server.engine.replicas.model import ReplicaOptions
from sow_server.engine.replicas.peers import Peers
from sow_server.engine.replicas.receiving import PeerChanges
from sow_server.engine.replicas.serving import PeerReader
from sow_server.engine.replicas.sharing import SharedTopics
from sow_server.engine.replicas.sources import Sources
from sow_server.engine.replicas.tombstones import Tombstones
from sow_server.engine.values.clock import GuardedClock


class Replicas:
    """Builds the parts."""

    def __init__(
        self,
        rocks: Rocks,
        path: Path,
        options: ReplicaOptions,
        *,
        commits: Commits,
        topics: Topics,
        cuts: Cuts,
        origins: Origins,
        unsound: SoundnessReports,
        limits: RequestLimits,
        clock: GuardedClock,
        sweep: Sweep,
    ) -> None:
        self.shared: Final = SharedTopics(topics)
        self.peers: Final = Peers(rocks, options, commits)
        self.sources: Final = Sources(rocks, commits, topics, self.shared, self.peers.patterns)
        self.commanded: Final = CommandedPeers(rocks, commits, topics, self.peers, self.sources, self.shared)
        self.marks: Final = SourceMarks(rocks, clock, commits, sweep, self.sources)
        self.tombstones: Final = Tombstones(rocks, commits, topics, origins, self.peers, self.sources)
        self.reader: Final = PeerReader(rocks, commits, topics, cuts, origins, self.shared, self.sources)
        self.changes: Final = PeerChanges(
            rocks,
            path,
            options,
            commits=commits,
            topics=topics,
            origins=origins,
            unsound=unsound,
            limits=limits,
            sources=self.sources,
            tombstones=self.tombstones,
        )

    def stage_drop(self, draft: Draft, topic: Topic) -> None:
        """Removes the tombstones and seeds of a topic with the topic."""
        draft.batch.ranges.append((TOMBSTONES, topic.prefix, topic.stop))
        draft.batch.deletes[META] += [seed_key(name, topic.id) for name in self.sources.by_name]
        draft.on_commit.append(lambda: self.peers.forget(topic.id))
