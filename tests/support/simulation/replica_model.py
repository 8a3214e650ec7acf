"""The model of a store of dicts, complete: it keeps the promises of `sow_replication.ports`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sow.v1 import types_pb2
from sow_peering import (
    Checksums,
    DurableMark,
    DurablesPart,
    InstanceIdentity,
    JournalPart,
    MergeCounts,
    Packed,
    PeerState,
    PublisherMark,
    PublisherPart,
    Purged,
    RecordVersion,
    SeedPart,
    SeedRange,
    TopicAnswer,
    TopicKind,
)
from sow_replication.ports import Counted, Refused, SourceState
from tests.support.simulation.replica_local import LocalStore, given
from tests.support.simulation.replica_rows import SECOND, Entry, ModelSource, Row, Written, pack, unpack

SKEW_MAX = 10 * SECOND


class ModelStore(LocalStore):
    """One instance's store."""

    # -- sending ----------------------------------------------------------------------------------------------------

    def topics(self, pattern: str) -> list[TopicKind]:
        assert pattern in (".*", "nothing") or pattern in self.disk.topics or pattern.isalnum(), "a simple pattern"
        return [t.kind for name, t in sorted(self.disk.topics.items()) if pattern in (".*", name)]

    def shares(self, pattern: str, topic: str) -> bool:
        found = self.disk.topics.get(topic)
        return pattern in (".*", topic) and (found is None or found.kind.journal)

    def read(
        self, peer: InstanceIdentity, after: int, *, topics: Collection[str], filter_text: str, bytes_max: int
    ) -> JournalPart:
        names: list[str] = []
        chunks: list[Packed] = []
        upto, size, first, last = after, 0, 0, 0
        head = self._readable()
        for entry in self.disk.journal:
            if entry.sequence <= after:
                continue
            if size >= bytes_max or entry.sequence > head:
                break
            upto = entry.sequence
            first, last = first or entry.time, entry.time
            if entry.topic in topics and self._crosses(entry, peer):
                chunk = pack([(entry.key, entry.row)], names)
                size += len(chunk)
                chunks.append(Packed(entry.topic, chunk))
        else:
            upto = max(upto, head)
        lost = [name for name in sorted(topics) if name in self.disk.topics and self.disk.topics[name].floor > after]
        return JournalPart(after, upto, chunks, names, first, last, lost)

    def _readable(self) -> int:
        """Peers are not sent changes that a power cut could take back (rule S7)."""
        return self._synced.head

    def _crosses(self, entry: Entry, peer: InstanceIdentity) -> bool:
        # An expiry that came with a seed is news for others: the row that it ended may never have been here.
        return entry.via != peer and not (entry.row.expired and entry.via is None)

    def seed(self, topic: str, after_key: bytes, *, filter_text: str, bytes_max: int) -> SeedPart:
        found = self.disk.topics.get(topic)
        if found is None:
            raise Refused(types_pb2.ERROR_REASON_TOPIC_NOT_FOUND, topic)
        self.sync()  # as above
        names: list[str] = []
        rows: list[tuple[str, Row]] = []
        size = 0
        for key, kept in sorted(found.rows.items()):
            if key.encode() <= after_key:
                continue
            if size >= bytes_max:
                return SeedPart(pack(rows, names), names, rows[-1][0].encode())
            rows.append((key, kept.row))
            size += 60
        return SeedPart(pack(rows, names) if rows else b"", names, b"")

    def publishers(self, topics: Collection[str], after_id: str) -> PublisherPart:
        return PublisherPart([], self._readable(), "")  # the model has no publishers

    def purged(self, topic: str) -> Purged:
        found = self.disk.topics.get(topic)
        return Purged(0, "") if found is None else Purged(*found.purged)

    def peer(self, name: str) -> PeerState:
        return self._peer_memory.get(name, PeerState(None, 0, False))

    def acknowledged(self, name: str, identity: InstanceIdentity, sequence: int) -> None:
        before = self.peer(name)
        missed = before.missed or before.identity not in (None, identity)
        self._peer_memory[name] = PeerState(identity, sequence, missed)

    def reseeded(self, name: str) -> None:
        self._peer_memory[name] = self.peer(name)._replace(missed=False)

    # -- receiving --------------------------------------------------------------------------------------------------

    def source(self, name: str) -> SourceState | None:
        return self.disk.sources.get(name)

    def answers(self, name: str, topics: Sequence[TopicKind]) -> list[TopicAnswer]:
        row = self.disk.sources[name]
        answers = [self._answer(row, kind) for kind in topics]
        carried = {answer.topic for answer in answers if not answer.reason}
        for topic in [topic for topic in row.seeds if topic not in carried]:
            del row.seeds[topic]
        if row.missing_is_deleted and not any(answer.wanted for answer in answers):
            row.missing_is_deleted = False
        return answers

    def answer(self, name: str, topic: TopicKind) -> TopicAnswer:
        return self._answer(self.disk.sources[name], topic)

    def _answer(self, row: ModelSource, kind: TopicKind) -> TopicAnswer:
        refusal = self.check(kind)
        if refusal.reason:
            return refusal
        seed = row.seeds.get(kind.name, b"")
        return TopicAnswer(kind.name) if seed is None else TopicAnswer(kind.name, wanted=True, after_key=seed)

    def check(self, topic: TopicKind) -> TopicAnswer:
        mine = self.disk.topics.get(topic.name)
        if mine is None:
            return TopicAnswer(topic.name, reason=types_pb2.ERROR_REASON_TOPIC_NOT_FOUND, message="there is none")
        if mine.kind[1:4] != topic[1:4]:
            return TopicAnswer(topic.name, reason=types_pb2.ERROR_REASON_TOPIC_DIFFERS, message="other key fields")
        return TopicAnswer(topic.name)

    def begin(
        self,
        identity: InstanceIdentity,
        *,
        topics: str,
        filter_text: str,
        cursor: int,
        missing_is_deleted: bool,
    ) -> Counted:
        def job() -> MergeCounts:
            self.disk.sources[identity.name] = ModelSource(identity, cursor, topics, filter_text, missing_is_deleted)
            return MergeCounts()

        return self._submit_for(job)

    def wait_for(self, name: str, sequence: int) -> Counted:
        def job() -> MergeCounts:
            self.disk.sources[name].wait_for = sequence
            return MergeCounts()

        return self._submit_for(job)

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
    ) -> Counted:
        return self._submit_for(lambda: self._apply(name, after, upto, chunks, origins))

    def _apply(
        self, name: str, after: int, upto: int, chunks: Sequence[Packed], origins: Sequence[str]
    ) -> MergeCounts | Refused:
        row = self.disk.sources[name]
        changes = [(topic, key, change) for topic, chunk in chunks for key, change in unpack(chunk, origins)]
        refusal = self._refusal(row, [change for _, _, change in changes])
        if refusal is None and self._skips(row, after):
            refusal = Refused(types_pb2.ERROR_REASON_BATCH_DAMAGED, "behind the cursor")
        if refusal is not None:
            return refusal
        result = MergeCounts()
        for topic, key, change in changes:
            if topic in self.disk.topics:
                result = self._take(row, topic, key, change, result)
            else:
                row.seeds.pop(topic, None)
        self._move(row, upto)
        return result

    def _skips(self, row: ModelSource, after: int) -> bool:
        return after > row.cursor

    def _move(self, row: ModelSource, upto: int) -> None:
        row.cursor = max(row.cursor, upto)

    def _refusal(self, row: ModelSource, changes: Sequence[Row]) -> Refused | None:
        if row.wait_for:
            return Refused(types_pb2.ERROR_REASON_RESEED_PENDING, "it has to wait")
        if any(change.version > self._now() + SKEW_MAX for change in changes):
            return Refused(types_pb2.ERROR_REASON_CLOCK_SKEW, "a change is from the future")
        return None

    def _take(self, row: ModelSource, topic: str, key: str, change: Row, result: MergeCounts) -> MergeCounts:
        self._expire_if_due(topic, key)
        found = self.disk.topics[topic]
        kept = found.rows.get(key)
        dead = kept is None or (kept.row.payload is None and kept.row.rank < change.rank)
        if dead and self._counts_missing_as_deleted(row, topic) and change.rank <= found.purged:
            if change.payload is not None:
                self._bury(topic, key, change)
            return result._replace(dropped=result.dropped + 1)
        if kept is not None and not self._wins(change, kept.row):
            if kept.row.rank == change.rank:
                return result._replace(known=result.known + 1)
            return result._replace(superseded=result.superseded + 1)
        if kept is not None and kept.own and change.origin == self._identity.name:
            # By this instance, with data that it has lost: older than all that it has written since (K7).
            self.disk.last = max(self.disk.last, change.version)
            outranking = kept.row._replace(version=self._mint(), expired=False)
            self._put(topic, key, outranking, None, own=True)
            self._unheard.append(Written(self._identity.name, topic, key, outranking))
            return result._replace(superseded=result.superseded + 1)
        self._put(topic, key, self._stored(change), row.identity)
        return result._replace(applied=result.applied + 1)

    def _bury(self, topic: str, key: str, row: Row) -> None:
        """A dead row becomes a tombstone right above it: wherever else it lives, it ends there, too, and nothing that
        is newer does."""
        self._dropped.add((topic, key))
        self._put(topic, key, Row(row.version + 1, self._identity.name, 0, None), None)

    def _counts_missing_as_deleted(self, row: ModelSource, topic: str) -> bool:
        return row.missing_is_deleted and row.seeds.get(topic, b"") is not None

    def _wins(self, change: Row, kept: Row) -> bool:
        return change.rank > kept.rank

    def _stored(self, change: Row) -> Row:
        return change

    def merge(self, name: str, part: SeedRange, *, chunk: bytes, origins: Sequence[str], purged: Purged) -> Counted:
        return self._submit_for(lambda: self._merge(name, part, chunk, origins, purged))

    def _merge(
        self, name: str, part: SeedRange, chunk: bytes, origins: Sequence[str], purged: Purged
    ) -> MergeCounts | Refused:
        row = self.disk.sources[name]
        rows = unpack(chunk, origins)
        refusal = self._refusal(row, [change for _, change in rows])
        if refusal is not None:
            return refusal
        topic = self.disk.topics.get(part.topic)
        if topic is None:
            return MergeCounts()
        result = MergeCounts()
        for key, change in rows:
            result = self._take(row, part.topic, key, change, result)
        if purged.version:
            brought = {key for key, _ in rows}
            for key, kept in list(topic.rows.items()):
                in_range = part.after_key < key.encode() and (part.last or key.encode() <= part.upto_key)
                if in_range and key not in brought and kept.row.rank <= purged:
                    if kept.row.payload is None:
                        continue
                    self._bury(part.topic, key, kept.row)
                    result = result._replace(dropped=result.dropped + 1)
            # A row that is dead there is dead here: this instance has to tell others in its turn.
            topic.purged = max(topic.purged, (purged.version, purged.origin))
        progress = row.seeds.get(part.topic, b"")
        if part.first or (progress is not None and part.after_key <= progress):
            row.seeds[part.topic] = None if part.last else part.upto_key
        return result

    # -- tombstones -------------------------------------------------------------------------------------------------

    def purge(self, upto: int, *, held: Collection[str], made_before_micros: int, unread: Collection[str]) -> Counted:
        return self._submit_for(lambda: self._purge(upto, held, made_before_micros, unread))

    def _purge(self, upto: int, held: Collection[str], made_before_micros: int, unread: Collection[str]) -> MergeCounts:
        gone = 0
        for name, topic in self.disk.topics.items():
            for key, kept in list(topic.rows.items()):
                early = kept.sequence <= upto and name not in held
                if kept.row.payload is not None or not (early or kept.made < made_before_micros):
                    continue
                if not early:
                    for peer in self._peers:
                        if self.peer(peer).acknowledged < kept.sequence or name in held:
                            self._peer_memory[peer] = self.peer(peer)._replace(missed=True)
                    for source in unread:
                        if source in self.disk.sources:
                            self.disk.sources[source].wait_for = self.disk.head
                topic.purged = max(topic.purged, kept.row.rank)
                del topic.rows[key]
                gone += 1
        return MergeCounts(gone)

    # -- durables: the model has none -------------------------------------------------------------------------------

    @property
    def durables_version(self) -> int:
        return 0

    def durables(
        self, peer: InstanceIdentity, topics: Collection[str], *, after: int, also: Collection[tuple[str, str]]
    ) -> DurablesPart:
        return DurablesPart((), 0)

    def take_durables(self, name: str, marks: Sequence[DurableMark]) -> Counted:
        return given(MergeCounts())

    def durables_left(self, name: str) -> None:
        """There are no consumers."""

    # -- commands ---------------------------------------------------------------------------------------------------

    def add_peer(self, name: str) -> None:
        self._submit(lambda: self._peers.append(name))

    def remove_peer(self, name: str) -> None:
        def job() -> None:
            self._peers = [peer for peer in self._peers if peer != name]
            before = self.peer(name)
            if before.identity is not None or before.missed:
                left = PeerState(before.identity, 0, missed=True)
                self._peer_memory[name] = self.disk.peers[name] = left
            source = self.disk.sources.get(name)
            if source is None and before.identity is not None:
                source = self.disk.sources[name] = ModelSource(before.identity, 0, ".*", "", False)
            if source is not None:
                source.seeds, source.missing_is_deleted, source.wait_for = {}, False, self.disk.head

        self._submit(job)

    # -- comparing: not part of this world --------------------------------------------------------------------------

    def checksums(self, topic: str, buckets: int, now_micros: int) -> Checksums:
        raise NotImplementedError

    def versions(self, topic: str, buckets: int, wanted: Collection[int], now_micros: int) -> list[RecordVersion]:
        raise NotImplementedError

    def rows(self, topic: str, keys: Sequence[bytes], bytes_max: int | None = None) -> tuple[bytes, Sequence[str]]:
        raise NotImplementedError

    def merge_rows(self, topic: str, chunk: bytes, origins: Sequence[str], *, peer: str) -> Counted:
        raise NotImplementedError
