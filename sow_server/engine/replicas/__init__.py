"""Other instances: their changes applied here, the changes of this one read for them, tombstones, positions.

    [1]  A change of a source is merged by version, see `merging`.
    [2]  The position up to which a source has been applied moves in the commit that applies (rule R6); so does the
         progress of seeding a topic.
    [3]  A peer gets neither changes that came from it with its present id and epoch (rule R7) nor expiries (rule R2).
    [4]  A removal from a topic that peers share leaves a tombstone until no instance can bring the record back (rule
         R4), at most for the grace, or until every peer that has to be heard first was heard. A peer that has missed a
         tombstone purged by age is remembered, and is seeded anew.
    [5]  The journal is kept for peers that are behind, within bounds (rule R9).

An instance that this one sends to is a *peer*; one that it receives from is a *source*. Mostly each is both.

    model       options, a source, and rows as stored
    sharing     the topics that links carry
    peers       acknowledged positions, and the journal that is held for them
    commanded   peers that were added by command, and pauses
    sources     positions of sources, their topics, and the progress of their seeds
    marks       how far this instance is with its sources, at positions of its own journal
    tombstones  the purge of tombstones, and purge marks
    serving     changes and rows are read for peers
    receiving   changes and rows of sources are merged, by `merging`
    dropped     records are written to files before they are dropped
    shipping    changes and rows are packed for other instances
    comparing   checksums and versions of records
    replicas    the parts above, as the store uses them
"""

from __future__ import annotations

from sow_server.engine.replicas.commanded import CommandedPeer, CommandedPeers
from sow_server.engine.replicas.model import PeerSettings, ReplicaOptions, SelectRecords, Source
from sow_server.engine.replicas.replicas import Replicas

__all__ = [
    "CommandedPeer",
    "CommandedPeers",
    "PeerSettings",
    "ReplicaOptions",
    "Replicas",
    "SelectRecords",
    "Source",
]
