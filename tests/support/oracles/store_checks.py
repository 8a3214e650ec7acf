"""A store and the model on plain dicts side by side: random programs drive both, and they agree at every step.

Bounds that are thousands in service are a handful here, so that requests are split over commits, sweeps end half-way,
caches overflow and reservations run out all the time.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from unittest import mock

from hypothesis.stateful import RuleBasedStateMachine, invariant

from sow_server.engine import background, upkeep
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit import expiry, mutations, publishers, puts
from sow_server.engine.commit.options import WriterOptions
from sow_server.engine.commit.publishers import decode as decode_publisher
from sow_server.engine.commit.requests import RequestLimits
from sow_server.engine.disk.layout import BOUNDS_KEY, PUBLISHER_KEY, REARM_KEY
from sow_server.engine.disk.rocks import COMMITS, JOURNAL, META, RECORDS
from sow_server.engine.store import StoreOptions
from sow_server.engine.stored import HEADER_BYTES, changes_head, decode_commit, unpack_i64
from sow_server.engine.values.model import NEVER, Expiration, MessageType, Publish, Request, TopicSettings
from tests.support.oracles.model import Change, ModelStore
from tests.support.stores.indexes import check_indexes
from tests.support.stores.stores import FakeTime, JournalEntry, Rig, journal_rows

OUTCOMES_KEPT = 6
PAYLOAD_BYTES_MAX = 64
MERGED_BYTES_MAX = 130
OPTIONS = StoreOptions(
    head_cache_records=4,
    writer=WriterOptions(
        commit_records_max=4,
        commit_merged_bytes_max=MERGED_BYTES_MAX,
        limits=RequestLimits(payload_bytes_max=PAYLOAD_BYTES_MAX),
        sweep_entries_max=2,
        version_reserve_micros=40,
        sequence_reserve=10,
    ),
)
TOPICS = {
    "keyed": TopicSettings(key=("/k",), expiration=Expiration.ENABLED, index=("/s",)),
    "dead": TopicSettings(message_type=MessageType.BINARY, expiration=Expiration.ENABLED),
    "given": TopicSettings(
        message_type=MessageType.BINARY, expiration=Expiration.ENABLED, dead_letter="dead", dead_letter_by_key=True
    ),
    "quiet": TopicSettings(expiration=Expiration.ENABLED, journal=False),
}
KEYS = ["a", "b", "c"]


class StoreChecks(RuleBasedStateMachine):
    """A store and the model side by side, and all that holds at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = [
            mock.patch.object(background, "REARM_CHUNK", 2),
            mock.patch.object(expiry, "WINDOW_ENTRIES", 5),
            mock.patch.object(expiry, "COMMIT_BYTES", 200),
            mock.patch.object(expiry, "RECORDS_AT_ONCE", 1),
            mock.patch.object(background, "INDEX_CHUNK", 2),
            mock.patch.object(upkeep, "PRUNE_READS", 1),
            mock.patch.object(publishers, "OUTCOMES_KEPT", OUTCOMES_KEPT),
            # The requests are small, and are to take both paths, that of columns and that of single records.
            mock.patch.object(puts, "PLAIN_RECORDS_MIN", 1),
            mock.patch.object(mutations, "PLAIN_RECORDS_MIN", 2),
        ]
        for patch in self.patches:
            patch.start()
        self.directory = Path(tempfile.mkdtemp())
        self.time = FakeTime()
        self.rig = Rig(self.directory, options=OPTIONS, time=self.time)
        self.model = ModelStore(
            outcomes_kept=OUTCOMES_KEPT, payload_bytes_max=PAYLOAD_BYTES_MAX, merged_bytes_max=MERGED_BYTES_MAX
        )
        self.queued: list[Request] = []
        self.sent: list[Publish] = []
        self.next_sequence: dict[tuple[str, int], int] = {}
        self.last_now = 0
        self.last_journaled = 0
        self.highest_version = 0
        self.pruned: dict[str, dict[bytes, tuple[bytes, int, int, int, int]]] = {}
        """Per topic, the start of a replay: the state at the floor of its journal."""
        self.payloads = 0
        self.steps = 0

    @invariant()
    def time_does_not_run_backwards(self) -> None:
        self.steps += 1
        now = self.rig.clock.now_micros()
        assert now >= self.last_now
        self.last_now = now

    @invariant()
    def readers_see_the_live_records(self) -> None:
        now = self.rig.clock.now_micros()
        for name, topic in self.model.topics.items():
            live = topic.live(now)
            seen = self.rig.live(name)
            assert list(seen) == sorted(live)
            assert self.rig.live(name, batch=2) == seen
            for key, found in seen.items():
                kept = live[key]
                assert (found.payload, found.publish_time_micros, found.expire_time_micros) == (
                    kept.payload,
                    kept.publish_time_micros,
                    kept.expire_time_micros,
                )
            handle = self.rig.topic(name)
            at, values = self.rig.store.cuts.get(handle, [key.encode() for key in KEYS])
            assert at == now
            assert [value is not None for value in values] == [key.encode() in live for key in KEYS]
            assert self.rig.store.cuts.count(handle) == len(live)
            assert self.rig.store.cuts.counts()[handle.id] == (len(live), len(topic.overdue(now)))

    @invariant()
    def figures_are_those_of_the_rows(self) -> None:
        for name, topic in self.model.topics.items():
            stored = self.rig.stored(name)
            assert set(stored) == set(topic.records)
            handle = self.rig.topic(name)
            figures = self.rig.store.durable_commits.topic_statistics(handle)
            assert figures.stored_records == len(stored)
            assert figures.stored_bytes == sum(len(key) + len(kept.payload) for key, kept in stored.items())
            chunks = self._chunks(name)
            assert figures.journal_bytes == sum(size for _, size, _ in chunks)
            assert figures.journal_entries == len(topic.journal)
            assert all(first > figures.floor_sequence for first, _, _ in chunks)
            self._check_heads(handle)

    def _check_heads(self, topic: Topic) -> None:
        """builder [3]: a chunk's head counts everything that was ever before it."""
        figures = topic.statistics
        entries, size = figures.trimmed_entries, figures.trimmed_bytes
        for _, value in journal_rows(self.rig.store, topic):
            head = changes_head(value)
            assert (head.entries_before, head.bytes_before) == (entries, size)
            entries, size = entries + head.entries, size + len(value)
        assert (figures.appended_entries, figures.appended_bytes) == (entries, size)

    @invariant()
    def versions_rise_and_are_reserved(self) -> None:
        bounds = dict(self.rig.rows(META, BOUNDS_KEY, BOUNDS_KEY + b"\0"))[BOUNDS_KEY] if self.model.topics else b""
        minted = []
        for name, topic in self.model.topics.items():
            for key, found in self.rig.stored(name).items():
                kept = topic.records[key]
                if kept.version is None:
                    assert found.version > self.highest_version, "a version is issued once (rule K7)"
                    kept.version = found.version
                assert found.version == kept.version
                minted.append((kept.order, found.version, found.sequence))
        minted.sort()
        assert [version for _, version, _ in minted] == sorted({version for _, version, _ in minted})
        assert [sequence for _, _, sequence in minted] == sorted({sequence for _, _, sequence in minted})
        for _, version, sequence in minted:
            assert version <= unpack_i64(bounds[:8])
            assert sequence <= unpack_i64(bounds[8:])
            self.highest_version = max(self.highest_version, version)

    @invariant()
    def journal_tells_the_whole_story(self) -> None:
        told: list[JournalEntry] = []
        for name, topic in self.model.topics.items():
            entries = self.rig.journal(name)
            assert [
                Change(entry.kind, entry.key, entry.payload, entry.publish_time_micros, entry.expire_time_micros)
                for entry in entries
            ] == topic.journal
            told += entries
            if topic.settings.journal:
                state = dict(self.pruned[name])
                self._replay(state, entries)
                assert state == {
                    key: (kept.payload, kept.publish_time_micros, kept.expire_time_micros, kept.version, kept.sequence)
                    for key, kept in self.rig.stored(name).items()
                }
        told.sort()
        sequences = [entry.sequence for entry in told]
        assert len(set(sequences)) == len(sequences), "one total order (rule P7)"
        versions = [entry.version for entry in told if entry.kind != "expire"]
        assert versions == sorted(set(versions)), "versions rise with the sequence (rule K7)"
        new = [sequence for sequence in sequences if sequence > self.last_journaled]
        if new:
            self.last_journaled = new[-1]
        assert self.last_journaled <= self.rig.store.writer.last_sequence

    @staticmethod
    def _replay(state: dict[bytes, tuple[bytes, int, int, int, int]], entries: list[JournalEntry]) -> None:
        """Applies journaled changes to the state before them, checking what each says of the one before it."""
        for entry in entries:
            before = state.get(entry.key)
            assert entry.previous == (0 if before is None else before[4])
            if entry.kind in ("put", "touch"):
                assert entry.removed_version == 0
                assert before is None or entry.version > before[3]
                if entry.kind == "touch":
                    assert before is not None
                    assert before[:2] == (entry.payload, entry.publish_time_micros)
                state[entry.key] = (
                    entry.payload,
                    entry.publish_time_micros,
                    entry.expire_time_micros,
                    entry.version,
                    entry.sequence,
                )
            else:
                assert before is not None, "only present records are removed, and once"
                assert before[:3] == (entry.payload, entry.publish_time_micros, entry.expire_time_micros)
                assert entry.removed_version == before[3]
                assert (entry.version == before[3]) == (entry.kind == "expire")
                if entry.kind == "expire":
                    assert entry.expire_time_micros <= entry.commit_time_micros
                del state[entry.key]

    @invariant()
    def commits_are_the_total_order(self) -> None:
        commits = [decode_commit(*row) for row in self.rig.rows(COMMITS)]
        runs: dict[int, tuple[int, int]] = {}
        last = 0
        for commit in commits:
            assert commit.first_sequence > last
            last = commit.last_sequence
            for run in commit.runs:
                runs[run.first_sequence] = (run.topic_id, run.length)
        for key, value in self.rig.rows(JOURNAL):
            assert runs[unpack_i64(key[4:])] == (int.from_bytes(key[:4], "big"), changes_head(value).entries)

    @invariant()
    def expiry_index_is_early_enough(self) -> None:
        """draft [2], expiry [1]: a record that can expire has an entry at or before its stamp, not below the
        floor; the sweep will wake."""
        earliest: dict[bytes, int] = {}
        for expire_time, store_key in self.rig.entries():
            earliest.setdefault(store_key, expire_time)
        assert not self.rig.rows(META, REARM_KEY, REARM_KEY + b"\xff"), "re-arming has run to its end"
        floor = dict(self.rig.rows(META, b"sweep", b"sweep\0")).get(b"sweep", b"")
        assert floor == self.rig.store.writer.sweep.floor
        for name, topic in self.model.topics.items():
            if not topic.acts:
                continue
            prefix = self.rig.topic(name).prefix
            for key, kept in topic.records.items():
                if kept.expire_time_micros != NEVER:
                    assert earliest.get(prefix + key, NEVER) <= kept.expire_time_micros
                    assert self.rig.store.writer.sweep.next_due <= kept.expire_time_micros

    @invariant()
    def indexes_say_what_the_records_say(self) -> None:
        check_indexes(self.rig.store)

    @invariant()
    def head_cache_is_what_is_on_disk(self) -> None:
        cache = self.rig.store.writer.heads
        rows = dict(self.rig.rows(RECORDS))
        existing = {self.rig.topic(name).prefix for name in self.model.topics}
        for key, head in {**cache._old, **cache._young}.items():
            if key[:4] in existing and head is not None:
                assert rows[key][:HEADER_BYTES] == head

    @invariant()
    def sequences_of_publishers_are_remembered(self) -> None:
        for name, publisher in self.model.publishers.items():
            assert self.rig.store.cuts.publisher_position(name) == (publisher.epoch, publisher.highest)
            key = PUBLISHER_KEY + name.encode()
            ((_, row),) = self.rig.rows(META, key, key + b"\0")
            found = decode_publisher(row)
            assert (found.unit, found.unit_records) == (publisher.unit, publisher.unit_records)

    def _chunks(self, name: str) -> list[tuple[int, int, int]]:
        """(first sequence, bytes, commit time) of the chunks of a topic's journal."""
        rows = list(journal_rows(self.rig.store, self.rig.topic(name)))
        return [(unpack_i64(key[4:]), len(value), changes_head(value)[1]) for key, value in rows]
