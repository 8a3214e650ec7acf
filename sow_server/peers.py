"""Joins replication to the store: what `sow_replication.ports` asks for, by what the engine offers.

Nothing is decided here. Errors of the one become errors of the other, filters are compiled, tuples change their names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from sow.v1 import types_pb2
from sow_replication import ports
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.disk.rocks import RocksError
from sow_server.engine.replicas import comparing, merging, replicas
from sow_server.engine.store import Store
from sow_server.engine.values.clock import GuardedClock
from sow_server.engine.values.errors import StoreError
from sow_server.engine.values.model import RecordMatcher
from sow_server.query.filtering import record_filter

T = TypeVar("T")


class PeerStore:
    """`sow_replication.ports.Store`, on the engine's."""

    def __init__(self, store: Store, clock: GuardedClock, *, name: str) -> None:
        self._store = store
        self._replicas = store.replicas
        self._clock = clock
        self._identity = ports.Identity(name, store.instance_id, store.epoch)

    def now_micros(self) -> int:
        """The time."""
        return self._clock.now_micros()

    # -- sending ----------------------------------------------------------------------------------------------------

    @property
    def identity(self) -> ports.Identity:
        """Who this instance is."""
        return self._identity

    @property
    def authoritative(self) -> bool:
        """Whether its data were restored, and are to be taken as they are (rule J14)."""
        return self._store.authoritative

    def head(self) -> int:
        """The last sequence that is durable."""
        return self._store.writer.synced_sequence

    @property
    def topics_version(self) -> int:
        """Rises whenever what is said of topics may be another."""
        return self._replicas.version

    def topics(self, pattern: str) -> list[ports.TopicKind]:
        """The topics whose whole name matches."""
        return [ports.TopicKind(*kind) for kind in self._replicas.topics(pattern)]

    def shares(self, pattern: str, topic: str) -> bool:
        """Whether a link with this pattern carries a topic of this name."""
        return self._replicas.shares(pattern, topic)

    def read(
        self, peer: ports.Identity, after: int, *, topics: Collection[str], filter_text: str, bytes_max: int
    ) -> ports.Piece:
        """Changes for a peer."""
        piece = _translated(
            lambda: self._replicas.read(
                replicas.Identity(*peer), after, topics=topics, select=_select(filter_text), bytes_max=bytes_max
            )
        )
        return ports.Piece(
            after,
            piece.upto,
            [ports.Packed(*chunk) for chunk in piece.chunks],
            self._store.origins.names,
            piece.first_commit_micros,
            piece.last_commit_micros,
            piece.lost,
            self._kinds({topic for topic, _ in piece.chunks}),
        )

    def seed(self, topic: str, after_key: bytes, *, filter_text: str, bytes_max: int) -> ports.SeedPart:
        """Rows for a peer."""
        rows = _translated(
            lambda: self._replicas.seed(
                self._store.topics.find(topic), after_key, select=_select(filter_text), bytes_max=bytes_max
            )
        )
        return ports.SeedPart(rows.chunk, self._store.origins.names, rows.upto_key, self._kinds({topic}))

    def _kinds(self, names: Collection[str]) -> list[ports.TopicKind]:
        return [ports.TopicKind(*kind) for kind in self._replicas.kinds(names)]

    def purged(self, topic: str) -> ports.Purged:
        """What has been purged of a topic's tombstones."""
        found = self._store.topics.by_name.get(topic)
        return ports.NOTHING_PURGED if found is None else ports.Purged(*self._replicas.purged(found))

    def peer(self, name: str) -> ports.PeerState:
        """What is remembered of a peer."""
        peer = self._replicas.peer(name)
        identity = None if peer.identity is None else ports.Identity(*peer.identity)
        return ports.PeerState(identity, peer.acknowledged, peer.missed)

    def acknowledged(self, name: str, identity: ports.Identity, sequence: int) -> None:
        """A peer has everything up to there."""
        self._replicas.acknowledged(name, replicas.Identity(*identity), sequence)

    def reseeded(self, name: str) -> None:
        """A peer has had everything anew."""
        self._replicas.reseeded(name)

    def save(self) -> None:
        """Writes down what peers have acknowledged; once a second is often enough."""
        self._replicas.save_peers()

    # -- receiving --------------------------------------------------------------------------------------------------

    def source(self, name: str) -> ports.SourceState | None:
        """What is remembered of a sender."""
        source = self._replicas.sources.get(name)
        if source is None:
            return None
        return ports.SourceState(
            identity=ports.Identity(*source.identity),
            cursor=source.cursor,
            wait_for=source.wait_for,
            topics_pattern=source.topics,
            filter=source.filter,
            guarded=source.guarded,
        )

    def answers(self, name: str, topics: Sequence[ports.TopicKind]) -> list[ports.TopicAnswer]:
        """What is wanted of a sender's topics."""
        found = self._replicas.answers(name, [replicas.Kind(*kind) for kind in topics])
        return [_answer(kind.name, answer) for kind, answer in zip(topics, found, strict=True)]

    def answer(self, name: str, topic: ports.TopicKind) -> ports.TopicAnswer:
        """What is wanted of one of a sender's topics."""
        return _answer(topic.name, self._replicas.answer(name, replicas.Kind(*topic)))

    def begin(
        self,
        identity: ports.Identity,
        *,
        topics_pattern: str,
        filter_text: str,
        cursor: int,
        guarded: bool,
        done: ports.Done,
    ) -> None:
        """From now on a sender is this one."""
        _submitted(
            done,
            lambda heard: self._replicas.begin(
                replicas.Identity(*identity),
                topics=topics_pattern,
                filter_text=filter_text,
                cursor=cursor,
                guarded=guarded,
                done=heard,
            ),
        )

    def wait_for(self, name: str, sequence: int, done: ports.Done) -> None:
        """A sender has to have what is up to there here, first."""
        _submitted(done, lambda heard: self._replicas.wait_for(name, sequence, heard))

    def apply(
        self,
        name: str,
        *,
        after: int,
        upto: int,
        chunks: Sequence[ports.Packed],
        origins: Sequence[str],
        done: ports.Done,
    ) -> None:
        """Applies changes of a sender."""
        _submitted(
            done,
            lambda heard: self._replicas.apply(
                name, after=after, upto=upto, chunks=chunks, origins=origins, done=heard
            ),
        )

    def merge(
        self,
        name: str,
        part: ports.SeedRange,
        *,
        chunk: bytes,
        origins: Sequence[str],
        purged: ports.Purged,
        done: ports.Done,
    ) -> None:
        """Merges a part of a topic's snapshot."""
        _submitted(
            done,
            lambda heard: self._replicas.merge(
                name,
                replicas.SeedRange(*part),
                chunk=chunk,
                origins=origins,
                purged=merging.Purged(*purged),
                done=heard,
            ),
        )

    # -- tombstones -------------------------------------------------------------------------------------------------

    def purge(
        self,
        upto: int,
        *,
        held: Collection[str],
        made_before_micros: int,
        unread: Collection[str],
        done: ports.Done,
    ) -> None:
        """Removes old tombstones."""
        _submitted(
            done,
            lambda heard: self._replicas.purge(
                upto, held=held, made_before_micros=made_before_micros, unread=unread, done=heard
            ),
        )

    # -- comparing --------------------------------------------------------------------------------------------------

    def checksums(self, topic: str, buckets: int, now_micros: int) -> tuple[list[int], list[int], int]:
        """Sums of checksums, and numbers of records, by bucket; and how many were left out."""
        found = _translated(
            lambda: comparing.checksums(self._store.cuts, self._store.origins, topic, buckets, now_micros)
        )
        return found.sums, found.records, found.unreadable

    def versions(self, topic: str, buckets: int, wanted: Collection[int], now_micros: int) -> list[ports.Version]:
        """The versions in some buckets."""
        found = _translated(
            lambda: comparing.versions(self._store.cuts, self._store.origins, topic, buckets, wanted, now_micros)
        )
        return [ports.Version(*version) for version in found]

    def rows(self, topic: str, keys: Sequence[bytes]) -> tuple[bytes, Sequence[str]]:
        """Records and tombstones of some keys."""
        chunk = _translated(lambda: self._replicas.rows(self._store.topics.find(topic), keys))
        return chunk, self._store.origins.names

    def check(self, topic: ports.TopicKind) -> ports.TopicAnswer:
        """Whether this instance can take a topic."""
        return _answer(topic.name, replicas.Answer(refusal=self._replicas.check(replicas.Kind(*topic))))

    def merge_rows(self, topic: str, chunk: bytes, origins: Sequence[str], done: ports.Done, *, peer: str) -> None:
        """Merges rows by version."""
        _submitted(
            done,
            lambda heard: self._replicas.merge_rows(self._store.topics.find(topic), chunk, origins, heard, source=peer),
        )


def _select(text: str) -> replicas.Select:
    def select(topic: Topic) -> RecordMatcher | None:
        return record_filter(topic, text, 0, allow_now=False).matches if text else None

    return select


def _answer(topic: str, answer: replicas.Answer) -> ports.TopicAnswer:
    if answer.refusal is None:
        return ports.TopicAnswer(topic, answer.wanted, answer.after_key)
    refused = refusal(answer.refusal)
    return ports.TopicAnswer(topic, reason=refused.reason, message=refused.message)


def refusal(error: StoreError) -> ports.Refused:
    """What replication is told of an error of the store."""
    return ports.Refused(error.reason.value, error.message)  # type: ignore[arg-type]  # same numbers


def _translated(call: Callable[[], T]) -> T:
    try:
        return call()
    except StoreError as error:
        raise refusal(error) from error
    except RocksError as error:
        raise ports.Refused(types_pb2.ERROR_REASON_STORE_FAILED, f"reading failed: {error}") from error


def _submitted(done: ports.Done, submit: Callable[[replicas.Done], None]) -> None:
    """Submits something, so that `done` hears whatever becomes of it."""

    def heard(result: merging.Counts | StoreError) -> None:
        done(refusal(result) if isinstance(result, StoreError) else ports.Applied(*result))

    try:
        submit(heard)
    except StoreError as error:
        heard(error)
