"""The store of the engine as replication asks for it: `sow_replication.ports.Store`.

Both sides speak in the values of `sow_peering`. Here filter texts become matchers, names of topics become topics, and
errors of the engine become `Refused`. Every other method is the engine's own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, Protocol, TypeVar

from sow.v1 import types_pb2
from sow_peering import (
    NOTHING_PURGED,
    Checksums,
    DurableMark,
    DurablesPart,
    InstanceIdentity,
    JournalPart,
    MergeCounts,
    Packed,
    PublisherMark,
    PublisherPart,
    Purged,
    RecordVersion,
    SeedPart,
    SeedRange,
)
from sow_peering.answers import Answer
from sow_replication import ports
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.doors import Reads, Writes
from sow_server.engine.pending import Pending, answered
from sow_server.engine.replicas import SelectRecords, comparing
from sow_server.engine.replicas.sharing import compiled, covering
from sow_server.engine.values.database import RocksError
from sow_server.engine.values.errors import StoreError
from sow_server.engine.values.model import RecordMatcher
from sow_server.engine.values.patterns import PatternError
from sow_server.filters import FilterError
from sow_server.filters import parse as parse_filter
from sow_server.query.filtering import record_filter
from sow_server.subscriptions.durable.replicated import ReplicatedDurables

T = TypeVar("T")


class LinkTraces(Protocol):
    """Traces of commits, which travel beside their changes."""

    def between(self, after: int, upto: int) -> tuple[str, ...]:
        """The traces of the commits in a range of the journal. From any thread."""

    def applying(self, source: str, upto: int, traces: Sequence[str]) -> Callable[[MergeCounts | None], None] | None:
        """Changes of a source with these traces are being applied; the result hears the outcome, None for a refusal."""


class PeerStore:
    """`sow_replication.ports.Store` on the engine's store."""

    def __init__(
        self,
        reads: Reads,
        writes: Writes,
        *,
        name: str,
        cluster: str = "",
        durables: ReplicatedDurables | None = None,
        traces: LinkTraces | None = None,
    ) -> None:
        """`name`, `cluster`: of this instance. `durables`: None where there are no consumers."""
        self._traces = traces
        replicas = self._replicas = writes.replicas
        self._commits = writes.commits
        self._topics = reads.topics
        self._cuts = reads.cuts
        self._origins = reads.origins
        instance = reads.instance
        self.identity: Final = InstanceIdentity(name, instance.id, instance.epoch)
        self.cluster: Final = cluster
        self._durables = durables
        self.authoritative: Final = instance.authoritative
        # The engine has these as the ports ask for them: nothing to translate.
        self.now_micros: Final = reads.clock.now_micros
        self.topics: Final = replicas.shared.matching
        self.shares: Final = replicas.shared.shares
        self.peer: Final = replicas.peers.peer
        self.acknowledged: Final = replicas.peers.acknowledged
        self.reseeded: Final = replicas.peers.reseeded
        self.source: Final = replicas.sources.get
        self.answers: Final = replicas.sources.answers
        self.answer: Final = replicas.sources.answer
        self.check: Final = replicas.sources.announced.check

    @property
    def disabled(self) -> Mapping[str, str]:
        """Sources whose stored state cannot be used, with the faults."""
        return {name: row.fault for name, row in self._replicas.sources.disabled.items()}

    def pattern_fault(self, text: str) -> str:
        """The reason why a text is no pattern; empty: it is one."""
        try:
            compiled(text)
            covering(text)  # here, so that the writer's thread finds it
        except PatternError as error:
            return f"is not an RE2 expression ({error})"
        return ""

    def filter_fault(self, text: str) -> str:
        """The reason why a text is no filter; empty: it is one."""
        try:
            parse_filter(text)
        except FilterError as error:
            return str(error)
        return ""

    def head(self) -> int:
        """The last sequence that is durable."""
        return self._commits.synced_sequence

    @property
    def topics_version(self) -> int:
        """Changes whenever the topics, or the answers about them, may have changed."""
        return self._replicas.sources.version

    # -- reading ----------------------------------------------------------------------------------------------------

    def read(
        self, peer: InstanceIdentity, after: int, *, topics: Collection[str], filter_text: str, bytes_max: int
    ) -> JournalPart:
        """Reads changes for a peer."""
        select = _select(filter_text)
        part = _translated(
            lambda: self._replicas.reader.read(peer, after, topics=topics, select=select, bytes_max=bytes_max)
        )
        if self._traces is not None and part.chunks:
            return part._replace(traces=self._traces.between(after, part.upto))
        return part

    def seed(self, topic: str, after_key: bytes, *, filter_text: str, bytes_max: int) -> SeedPart:
        """Reads rows of a topic for a peer."""
        select = _select(filter_text)
        return _translated(
            lambda: self._replicas.reader.seed(self._topics.find(topic), after_key, select=select, bytes_max=bytes_max)
        )

    def publishers(self, topics: Collection[str], after_id: str) -> PublisherPart:
        """Reads publishers for a peer."""
        return _translated(lambda: self._replicas.reader.publishers(topics, after_id))

    def purged(self, topic: str) -> Purged:
        """The purge mark of a topic."""
        found = self._topics.by_name.get(topic)
        return NOTHING_PURGED if found is None else self._replicas.tombstones.purged(found)

    def checksums(self, topic: str, buckets: int, now_micros: int) -> Checksums:
        """Checksums of a topic, bucket by bucket."""
        return _translated(lambda: comparing.checksums(self._cuts, self._origins, topic, buckets, now_micros))

    def versions(self, topic: str, buckets: int, wanted: Collection[int], now_micros: int) -> list[RecordVersion]:
        """The versions of the records in some buckets."""
        return _translated(lambda: comparing.versions(self._cuts, self._origins, topic, buckets, wanted, now_micros))

    def rows(self, topic: str, keys: Sequence[bytes], bytes_max: int | None = None) -> tuple[bytes, Sequence[str]]:
        """Records and tombstones of some keys, and the names of origins."""
        chunk = _translated(lambda: self._replicas.reader.rows(self._topics.find(topic), keys, bytes_max))
        return chunk, self._origins.names

    # -- durables ---------------------------------------------------------------------------------------------------

    @property
    def durables_version(self) -> int:
        """Changes whenever peers should be told of durables at once."""
        return 0 if self._durables is None else self._durables.version

    def durables(
        self, peer: InstanceIdentity, topics: Collection[str], *, after: int, also: Collection[tuple[str, str]]
    ) -> DurablesPart:
        """The replicated durables that have changed, as they are for a peer."""
        if self._durables is None:
            return DurablesPart((), 0)
        return self._durables.told(peer, topics, after=after, also=also)

    def take_durables(self, name: str, marks: Sequence[DurableMark]) -> ports.Counted:
        """Takes over what a source tells of its durables."""
        durables = self._durables
        return _submitted(lambda: answered(MergeCounts()) if durables is None else durables.take(name, marks))

    def durables_left(self, name: str) -> None:
        """Nothing is known of the consumers at a source."""
        if self._durables is not None:
            self._durables.left(name)

    # -- writing ----------------------------------------------------------------------------------------------------

    def begin(
        self,
        identity: InstanceIdentity,
        *,
        topics: str,
        filter_text: str,
        cursor: int,
        missing_is_deleted: bool,
    ) -> ports.Counted:
        """Starts anew with a source."""
        return _submitted(
            lambda: self._replicas.sources.begin(
                identity,
                topics=topics,
                filter_text=filter_text,
                cursor=cursor,
                missing_is_deleted=missing_is_deleted,
            )
        )

    def wait_for(self, name: str, sequence: int) -> ports.Counted:
        """Stores that a source must first acknowledge a sequence of ours."""
        return _submitted(lambda: self._replicas.sources.wait_for(name, sequence))

    def apply(
        self,
        name: str,
        *,
        after: int,
        upto: int,
        chunks: Sequence[Packed],
        origins: Sequence[str],
        publishers: Sequence[PublisherMark] = (),
        traces: Sequence[str] = (),
    ) -> ports.Counted:
        """Applies changes of a source."""
        ended = self._traces.applying(name, upto, traces) if self._traces is not None and traces else None
        counted = _submitted(
            lambda: self._replicas.changes.apply(
                name, after=after, upto=upto, chunks=chunks, origins=origins, publishers=publishers
            )
        )
        if ended is not None:
            counted.then(lambda result: ended(None if isinstance(result, ports.Refused) else result))
        return counted

    def merge(
        self, name: str, part: SeedRange, *, chunk: bytes, origins: Sequence[str], purged: Purged
    ) -> ports.Counted:
        """Merges a part of a topic's seed."""
        return _submitted(lambda: self._replicas.changes.merge(name, part, chunk=chunk, origins=origins, purged=purged))

    def merge_rows(self, topic: str, chunk: bytes, origins: Sequence[str], *, peer: str) -> ports.Counted:
        """Merges rows of a peer by version."""
        return _submitted(
            lambda: self._replicas.changes.merge_rows(self._topics.find(topic), chunk, origins, source=peer)
        )

    def purge(
        self, upto: int, *, held: Collection[str], made_before_micros: int, unread: Collection[str]
    ) -> ports.Counted:
        """Removes old tombstones."""
        return _submitted(
            lambda: self._replicas.tombstones.purge(
                upto, held=held, made_before_micros=made_before_micros, unread=unread
            )
        )


def _select(text: str) -> SelectRecords:
    def select(topic: Topic) -> RecordMatcher | None:
        return record_filter(topic, text, 0, allow_now=False).matches if text else None

    return select


def refusal(error: StoreError) -> ports.Refused:
    """An error of the store, for replication."""
    return ports.Refused(types_pb2.ErrorReason.ValueType(error.reason), error.message)  # the same numbers


def _translated(call: Callable[[], T]) -> T:
    try:
        return call()
    except StoreError as error:
        raise refusal(error) from error
    except RocksError as error:
        raise ports.Refused(types_pb2.ERROR_REASON_STORE_FAILED, f"reading failed: {error}") from error


def _submitted(submit: Callable[[], Pending[MergeCounts]]) -> ports.Counted:
    """Submits a request to the store; the answer of a request that the store refuses at once is that refusal."""
    counted: ports.Counted = Answer()

    def heard(result: MergeCounts | StoreError) -> None:
        counted.settle(refusal(result) if isinstance(result, StoreError) else result)

    try:
        submit().then(heard)
    except StoreError as error:
        heard(error)
    return counted
