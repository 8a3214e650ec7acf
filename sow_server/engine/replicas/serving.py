"""Serving: durable changes and rows of this instance are read for peers."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

from sow_peering import InstanceIdentity, JournalPart, Packed, PublisherMark, PublisherPart, SeedPart
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit.passed_on import decode_passed_on
from sow_server.engine.commit.publishers import decode as decode_publisher
from sow_server.engine.commit.steps import Nothing
from sow_server.engine.commit.told import Told
from sow_server.engine.core import Core
from sow_server.engine.disk.layout import (
    PASSED_ON_KEY,
    PUBLISHER_KEY,
    Tombstone,
    decode_tombstone,
    passed_on_publisher,
    publisher_key,
)
from sow_server.engine.disk.rocks import META, RECORDS, TOMBSTONES, Cursor
from sow_server.engine.journal.reading import JournalCut
from sow_server.engine.replicas.model import SelectRecords
from sow_server.engine.replicas.sharing import SharedTopics
from sow_server.engine.replicas.shipping import pack_changes, pack_rows
from sow_server.engine.replicas.sources import Sources
from sow_server.engine.stored import RECORD_KEY, PublisherNote, changes_source
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import RecordMatcher

COMMITS_MAX: Final = 5000
"""Commits that one read visits at most, so that it returns even if few of them are for the peer."""
ROWS_MAX: Final = 1000
"""Rows of one part of a seed: a part is one commit at the receiver, and others there wait for it."""
ROWS_AT_ONCE: Final = 32
"""Rows of given keys that are read at a time: so many may be read beyond the bound in bytes."""
PUBLISHERS_MAX: Final = 1000
"""Publishers that are read and sent together, at most: they are one commit at the receiver."""
PUBLISHERS_BYTES_MAX: Final = 2**18
"""As above, about. One publisher may have more."""
SYNC_PATIENCE_SECONDS: Final = 10.0
SYNC_LOOK_SECONDS: Final = 0.002


class PeerReader:
    """Reads for peers. From any thread; owns nothing."""

    def __init__(self, core: Core, shared: SharedTopics, sources: Sources) -> None:
        self._rocks = core.rocks
        self._commits = core.commits
        self._topics = core.topics
        self._cuts = core.cuts
        self._origins = core.origins
        self._shared = shared
        self._sources = sources

    def read(
        self, peer: InstanceIdentity, after: int, *, topics: Collection[str], select: SelectRecords, bytes_max: int
    ) -> JournalPart:
        """The durable changes of some topics after a sequence, without changes that came from the peer itself (replicas
        [3])."""
        upto = self._commits.synced_sequence
        source = self._sources.get(peer.name)
        own = source.number if source is not None and source.identity == peer else None
        # Before the cut: a journal that is switched on again in between has a floor in the cut.
        by_name = self._topics.by_name
        unread = {name for name in topics if name in by_name and not by_name[name].settings.journal}
        cut = self._cuts.journal()
        try:
            return self._read(cut, own, after, upto, topics, unread, select, bytes_max)
        finally:
            cut.close()

    def _read(
        self,
        cut: JournalCut,
        own: int | None,
        after: int,
        upto: int,
        names: Collection[str],
        unread: Collection[str],
        select: SelectRecords,
        bytes_max: int,
    ) -> JournalPart:
        wanted: dict[int, tuple[Topic, RecordMatcher | None]] = {}
        lost: list[str] = []
        for name in names:
            topic = self._topics.by_name.get(name)
            if topic is None:
                continue
            wanted[topic.id] = topic, select(topic)
            if name in unread or cut.floors.get(topic.id, 0) > after:
                lost.append(name)
        chunks: list[Packed] = []
        marks: list[PublisherMark] = []
        size = first = last = 0
        reached, walked = after, 0
        for commit in cut.commits(after, upto):
            if commit.last_sequence > upto or size >= bytes_max or walked == COMMITS_MAX:
                break
            for run in commit.runs:
                if run.topic_id not in wanted:
                    continue
                topic, matches = wanted[run.topic_id]
                value = cut.packed(topic, run.first_sequence)
                if value is None or changes_source(value) == own:
                    continue
                packed = pack_changes(value, run.first_sequence, matches)
                if packed:
                    chunks.append(Packed(topic.name, packed))
                    size += len(packed)
            for note in commit.notes:
                if self._counts(note, own, wanted, lost):
                    mark = _mark(note, [wanted[topic_id][0].name for topic_id in note.topic_ids])
                    marks.append(mark)
                    size += mark.size
            walked += 1
            reached, last = commit.last_sequence, commit.commit_time_micros
            first = first or last
        else:
            reached = upto  # there are no changes behind the last commit
        kinds = self._shared.kinds({chunk.topic for chunk in chunks})
        return JournalPart(
            after, max(after, reached), chunks, self._origins.names, first, last, sorted(lost), kinds, marks
        )

    def _counts(
        self,
        note: PublisherNote,
        own: int | None,
        wanted: Mapping[int, tuple[Topic, RecordMatcher | None]],
        lost: Collection[str],
    ) -> bool:
        """True if the peer gets all records of a note over this link."""
        if note.source == own or not all(topic_id in wanted for topic_id in note.topic_ids):
            return False
        topics = [wanted[topic_id] for topic_id in note.topic_ids]
        return all(matches is None and topic.name not in lost for topic, matches in topics)

    def publishers(self, names: Collection[str], after_id: str) -> PublisherPart:
        """The marks of publishers, of these topics alone, behind an earlier part. Not from the event loop: it waits for
        the next sync."""
        with self._commits.cut_lock:
            sequence = self._commits.last_sequence
            cursor = self._rocks.cursor(META, fill_cache=False)
            by_id = self._topics.by_id
            ids = {topic_id: by_id[topic_id].name for topic_id in by_id if by_id[topic_id].name in names}
        marks: list[PublisherMark] = []
        read = size = 0
        last = ""
        try:
            for key, row in _rows_of_publishers(cursor, after_id.encode("latin-1")):
                found = self._marks_in(key, row, ids)
                marks += found
                size += sum([mark.size for mark in found])
                read += 1
                if read == PUBLISHERS_MAX or size >= PUBLISHERS_BYTES_MAX:
                    last = key.decode("latin-1")
                    break
        finally:
            cursor.close()
        self._wait_for_sync(sequence)
        return PublisherPart(marks, sequence, last)

    def _marks_in(self, key: bytes, row: bytes, names: Mapping[int, str]) -> list[PublisherMark]:
        if key.startswith(PUBLISHER_KEY):
            known = decode_publisher(row)
            refused = tuple([refusal.index for refusal in known.refusals])
            own = Told("", known.epoch, known.token, known.topics, False, (), known.contiguous, known.ahead, refused)
            return _marks_of(key[len(PUBLISHER_KEY) :].decode(), (own, *known.told), known.last_use_micros, names)
        publisher_id = passed_on_publisher(key)
        its_row = self._rocks.get(META, publisher_key(publisher_id))
        if its_row is None:
            return []  # it is being forgotten
        return _marks_of(publisher_id, decode_passed_on(row), decode_publisher(its_row).last_use_micros, names)

    def seed(self, topic: Topic, after_key: bytes, *, select: SelectRecords, bytes_max: int) -> SeedPart:
        """The records and tombstones of a topic behind a key, in the order of keys, all of them durable. Not from the
        event loop: it waits for the next sync."""
        with self._commits.cut_lock:
            sequence = self._commits.last_sequence
            records = self._rocks.cursor(RECORDS, fill_cache=False)
            tombstones = self._rocks.cursor(TOMBSTONES, fill_cache=False)
        # A row with an empty key is never sent (rule R13): as the last one of a part it would mark the end.
        start = topic.prefix + after_key + b"\0"
        keys: list[bytes] = []
        values: list[bytes] = []
        dead: dict[bytes, Tombstone] = {}
        try:
            following = records.fill(start, topic.stop, ROWS_MAX, keys, values, bytes_max=bytes_max)
            stop = topic.stop if following is None else keys[-1] + b"\0"
            for key, value in tombstones.rows(start, stop, limit=ROWS_MAX):
                dead[key] = decode_tombstone(value)
            if len(dead) == ROWS_MAX:
                # There may be more tombstones before the last record: the part ends with the last of these.
                following = stop = next(reversed(dead)) + b"\0"
                kept = sum(key < stop for key in keys)
                del keys[kept:], values[kept:]
        finally:
            records.close()
            tombstones.close()
        self._wait_for_sync(sequence)
        last = max([*keys[-1:], *list(dead)[-1:]], default=b"")[RECORD_KEY] if following is not None else b""
        chunk = pack_rows(keys, values, dead, select(topic))
        return SeedPart(chunk, self._origins.names, last, self._shared.kinds({topic.name}))

    def _wait_for_sync(self, sequence: int) -> None:
        commits = self._commits
        give_up = time.monotonic() + SYNC_PATIENCE_SECONDS
        asked = False
        while commits.synced_sequence < sequence:
            if time.monotonic() > give_up or commits.failure is not None:
                raise StoreError(Reason.STORE_FAILED, "the writes do not become durable")
            time.sleep(SYNC_LOOK_SECONDS)
            if not asked and commits.synced_sequence < sequence:
                # BUFFERED publishes are synced now and then: a peer would be seeded by one part each time. A step is
                # synced at once, together with everything written before.
                asked = True
                self._commits.run(Nothing())

    def rows(self, topic: Topic, record_keys: Sequence[bytes], bytes_max: int | None = None) -> bytes:
        """Records and tombstones of some keys, packed as in a seed, all of them durable. Not from the event loop.
        Raises StoreError RESULT_TOO_LARGE for several keys whose records have more than `bytes_max` bytes."""
        wanted = sorted(topic.prefix + key for key in set(record_keys))
        live: dict[bytes, bytes] = {}
        dead: dict[bytes, Tombstone] = {}
        sequence, size = 0, 0
        for first in range(0, len(wanted), ROWS_AT_ONCE):
            keys = wanted[first : first + ROWS_AT_ONCE]
            with self._commits.cut_lock:  # each record and its tombstone are of one instant
                sequence = self._commits.last_sequence
                values = self._rocks.multi_get(RECORDS, keys)
                marks = self._rocks.multi_get(TOMBSTONES, keys)
            live.update({key: value for key, value in zip(keys, values, strict=True) if value is not None})
            dead.update({key: decode_tombstone(row) for key, row in zip(keys, marks, strict=True) if row is not None})
            size += sum([len(key) + len(value or b"") for key, value in zip(keys, values, strict=True)])
            if bytes_max is not None and size > bytes_max and len(wanted) > 1:
                # Before they are all read: a peer may ask for any.
                raise StoreError(
                    Reason.RESULT_TOO_LARGE,
                    f"key: the rows of {len(wanted)} keys have more bytes than the limit of {bytes_max}",
                    field="key",
                )
        self._wait_for_sync(sequence)
        return pack_rows(
            list(live),
            list(live.values()),
            dead,
            None,
        )


def _mark(note: PublisherNote, topics: Sequence[str]) -> PublisherMark:
    """The records of what was decided here are in the changes of the same commit. Those of what a peer has told may
    have been here before, so another peer has them only once it is seeded."""
    return PublisherMark(
        note.publisher_id,
        note.epoch,
        note.token,
        note.first,
        note.last,
        tuple(topics),
        note.refused,
        note.used_micros,
        whole=note.source != 0,
    )


def _rows_of_publishers(cursor: Cursor, after: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The rows behind a key: publishers, and what has been passed on of them. Each row is small, however much there is
    of one publisher."""
    for prefix in (PUBLISHER_KEY, PASSED_ON_KEY):  # in their order
        yield from cursor.rows(max(prefix, after + b"\0"), prefix + b"\xff")


def _marks_of(
    publisher_id: str, parts: Sequence[Told], used_micros: int, names: Mapping[int, str]
) -> list[PublisherMark]:
    """The sequences that are known of a publisher, here and from peers, of records that are all for topics with these
    names. None without a token, and none of an epoch without records: a peer is not told of publishers to other
    topics."""
    return [
        PublisherMark(
            publisher_id,
            told.epoch,
            told.token,
            low,
            high,
            tuple([names[topic_id] for topic_id in told.topics]),
            tuple([one for one in told.refused if low <= one <= high]),
            used_micros,
            whole=True,
        )
        for told in parts
        if told.token and told.topics and all(topic_id in names for topic_id in told.topics)
        for low, high in told.ranges
    ]
