"""Peers: the positions that they have acknowledged, and the journal that is held for them (replicas [4], [5])."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import partial

import structlog

from sow_peering import InstanceIdentity, PeerState
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit.draft import Draft
from sow_server.engine.core import Core
from sow_server.engine.disk.layout import PEER_KEY, peer_key
from sow_server.engine.disk.rocks import META
from sow_server.engine.journal.reading import ChunkHeads
from sow_server.engine.journal.retention import JournalBounds, Retention
from sow_server.engine.replicas.model import ReplicaOptions, decode_peer, encode_peer
from sow_server.engine.stored import StoredStatistics
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.patterns import matcher

log = structlog.get_logger(__name__)


class Peers:
    """Owns the states of peers. Acknowledgements come on one thread; rows are put on the writer's thread."""

    def __init__(self, core: Core, options: ReplicaOptions) -> None:
        self._options = options
        self._commits = core.commits
        self._matches = {peer.name: matcher(peer.topics) for peer in options.peers}
        self._configured = {peer.name: peer.topics for peer in options.peers}
        self._patterns = dict(self._configured)
        self.by_name: dict[str, PeerState] = {}
        rows = core.rocks.cursor(META)
        try:
            for key, row in rows.rows(PEER_KEY, PEER_KEY + b"\xff"):
                self._read(key[len(PEER_KEY) :].decode(errors="backslashreplace"), row)
        finally:
            rows.close()
        self._marking = threading.Lock()
        """Held while a peer's state is replaced by one derived from it: acknowledgements come on one thread, and a
        purge marks missed tombstones on another."""
        self._unsaved: set[str] = set()
        """Peers whose rows are older than their states."""
        self._retention = Retention()

    def _read(self, name: str, row: bytes) -> None:
        try:
            self.by_name[name] = decode_peer(row)
        except ValueError as error:
            # Nothing is known of what it has: it is seeded anew, and tombstones may have gone that it has not seen.
            # Its next acknowledgement replaces the row.
            self.by_name[name] = PeerState(missed=True)
            log.error("peer_state_unreadable", peer=name, cause=str(error)[:300])

    def declare(self, name: str, topics: str) -> None:
        """An instance is sent topics of this pattern from now on."""
        self._matches = {**self._matches, name: matcher(topics)}  # anew, because other threads walk through it
        self._patterns[name] = topics

    def configure(self, name: str) -> None:
        """The configuration names an instance that was declared otherwise: it wins."""
        topics = self._configured.get(name)
        if topics is None:
            self.undeclare(name, self.peer(name))  # it only sends here
        else:
            self.declare(name, topics)

    def undeclare(self, name: str, state: PeerState) -> None:
        """An instance is sent nothing from now on; `state`: the notes that are left of it."""
        self._matches = {other: matches for other, matches in self._matches.items() if other != name}
        self._patterns.pop(name, None)
        with self._marking:
            self._unsaved.discard(name)
            if state == PeerState():
                self.by_name.pop(name, None)
            else:
                self.by_name[name] = state

    def pattern(self, name: str) -> str | None:
        """The pattern of the topics that are sent to an instance; None: it is sent nothing."""
        return self._patterns.get(name)

    def patterns(self) -> list[str]:
        """The patterns of the topics that are sent to peers."""
        return list(self._patterns.values())

    def peer(self, name: str) -> PeerState:
        """The state of a peer."""
        return self.by_name.get(name, PeerState())

    def of(self, topic: Topic) -> list[str]:
        """The peers that a topic is sent to. No view is (rule V9)."""
        if topic.reserved or topic.view is not None or not topic.settings.journal:
            return []
        return [name for name, matches in self._matches.items() if matches(topic.name)]

    def acknowledged(self, name: str, identity: InstanceIdentity, sequence: int) -> None:
        """A peer has everything up to a sequence on its disk. `save` stores that."""
        with self._marking:
            before = self.peer(name)
            # Another instance under the name, or restored data. Tombstones that were purged because the previous
            # instance had acknowledged them may belong to records that are alive in this one.
            missed = before.missed or (before.identity is not None and before.identity != identity)
            after = PeerState(identity, sequence, missed)
            if after != before:
                self.by_name[name] = after
                self._unsaved.add(name)

    def reseeded(self, name: str) -> None:
        """A peer has been seeded anew with everything."""
        with self._marking:
            if self.peer(name).missed:
                self.by_name[name] = self.peer(name)._replace(missed=False)
                self._unsaved.add(name)

    def save(self) -> None:
        """Stores the states of peers. An acknowledgement that a crash loses comes again."""
        if not self._unsaved:
            return
        names, self._unsaved = self._unsaved, set()

        def saved(result: StoreError | None) -> None:
            if isinstance(result, StoreError):
                self._unsaved |= names

        try:
            self._commits.run(SavePeers(self, names)).then(saved)
        except StoreError as error:  # the store is stopping, or has failed
            saved(error)

    def held(self, heads: ChunkHeads, topic: Topic, figures: StoredStatistics, now_micros: int) -> int:
        """The sequence up to which no peer that is behind needs the topic's journal (replicas [5])."""
        names = self.of(topic) if self._matches else []
        if not names:
            return figures.last_sequence
        held = min(self.peer(name).acknowledged for name in names)
        if held >= figures.last_sequence:
            return held
        bounds = JournalBounds(self._options.lag_age_micros_max, self._options.lag_bytes_max)
        return max(held, self._retention.first(heads, topic, figures, bounds, now_micros) - 1)

    def forget(self, topic_id: int) -> None:
        """Forgets a topic that was deleted."""
        self._retention.forget(topic_id)

    def check_shipped(self, topic: Topic) -> None:
        """Raises StoreError PEER_BEHIND while a peer has not received all changes of a topic (rule T5)."""
        for name in self.of(topic):
            if self.peer(name).acknowledged < topic.statistics.last_sequence and topic.statistics.journal_entries:
                raise StoreError(
                    Reason.PEER_BEHIND,
                    f"topic: {name} has not yet received all changes of {topic.name}; wait for it, or "
                    "delete it all the same (force in the API, --unshipped on the command line)",
                    field="name",
                    details={"peer": name},
                )

    def stage_missed(self, draft: Draft, sequence: int, *, by_all: bool) -> None:
        """Marks the peers that have not acknowledged a sequence, or all of them: they miss tombstones that this commit
        purges by age (replicas [4])."""
        for name in self._matches:
            peer = self.peer(name)
            if not peer.missed and (by_all or peer.acknowledged < sequence):
                draft.batch.puts[META][peer_key(name)] = encode_peer(peer._replace(missed=True))
                draft.on_commit.append(partial(self._miss, name))

    def _miss(self, name: str) -> None:
        with self._marking:
            self.by_name[name] = self.peer(name)._replace(missed=True)


class SavePeers:
    """The step that stores the states of some peers."""

    def __init__(self, peers: Peers, names: Iterable[str]) -> None:
        self._peers = peers
        self._names = names

    def stage(self, draft: Draft) -> None:
        """Puts their rows."""
        for name in self._names:
            draft.batch.puts[META][peer_key(name)] = encode_peer(self._peers.peer(name))

    def committed(self) -> None:
        """Has no effects."""
