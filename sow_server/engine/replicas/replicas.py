"""The parts of replication in the store, and the end of a topic in all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit.draft import Draft
from sow_server.engine.commit.expiry import Sweep
from sow_server.engine.core import Core
from sow_server.engine.disk.layout import seed_key
from sow_server.engine.disk.rocks import META, TOMBSTONES
from sow_server.engine.replicas.commanded import CommandedPeers
from sow_server.engine.replicas.marks import SourceMarks
from sow_server.engine.replicas.model import ReplicaOptions
from sow_server.engine.replicas.peers import Peers
from sow_server.engine.replicas.receiving import PeerChanges
from sow_server.engine.replicas.serving import PeerReader
from sow_server.engine.replicas.sharing import SharedTopics
from sow_server.engine.replicas.sources import Sources
from sow_server.engine.replicas.tombstone_purge import Tombstones


class Replicas:
    """Builds the parts."""

    def __init__(self, core: Core, path: Path, options: ReplicaOptions, sweep: Sweep) -> None:
        self.shared: Final = SharedTopics(core.topics)
        self.peers: Final = Peers(core, options)
        self.sources: Final = Sources(core, self.shared, self.peers.patterns)
        self.commanded: Final = CommandedPeers(core, self.peers, self.sources, self.shared)
        self.marks: Final = SourceMarks(core, sweep, self.sources)
        self.tombstones: Final = Tombstones(core, self.peers, self.sources)
        self.reader: Final = PeerReader(core, self.shared, self.sources)
        self.changes: Final = PeerChanges(core, path, options, self.sources, self.tombstones)

    def stage_drop(self, draft: Draft, topic: Topic) -> None:
        """Removes the tombstones and seeds of a topic with the topic."""
        draft.batch.ranges.append((TOMBSTONES, topic.prefix, topic.stop))
        draft.batch.deletes[META] += [seed_key(name, topic.id) for name in self.sources.by_name]
        draft.on_commit.append(lambda: self.peers.forget(topic.id))
