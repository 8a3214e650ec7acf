"""When a range is compacted, and which (rule L17): `engine/commit/reclaim.py`, `Upkeep.reclaim`, its timer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from sow_server.engine import upkeep
from sow_server.engine.commit.reclaim import RECLAIM_RECORDS
from sow_server.engine.disk.rocks import COMMITS, EXPIRY, INDEXES, JOURNAL, RECORDS
from sow_server.engine.stored import i64
from sow_server.engine.values.database import Failed
from sow_server.engine.values.errors import StoreError
from sow_server.engine.values.model import Expiration, Outcome, Publish, TopicSettings
from tests.support.stores.stores import HOUR, MINUTE, SECOND, Rig
from tests.support.stores.timers import timers

PLAIN = TopicSettings(expiration=Expiration.ENABLED, journal=False)
JOURNALED = TopicSettings(expiration=Expiration.ENABLED, journal=True, retain_time_micros=MINUTE)


class Ranges(list[tuple[str, bytes, bytes]]):
    """The ranges that were compacted, as Rocks is told."""

    def families(self) -> list[str]:
        """Their column families, in order."""
        return [family for family, _, _ in self]

    def of(self, family: str) -> list[tuple[bytes, bytes]]:
        """Those of one column family."""
        return [(begin, end) for name, begin, end in self if name == family]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


@pytest.fixture
def compacted(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Ranges:
    ranges = Ranges()
    monkeypatch.setattr(rig.store._rocks, "compact", lambda *of: ranges.append(of))
    return ranges


def yes() -> bool:
    return True


def put(rig: Rig, topic: str, count: int, *, ttl: int | None = None, name: str = "k") -> None:
    for number in range(count):
        rig.put(topic, f"{name}{number}", b'{"n":1}', ttl=ttl)


def expire(rig: Rig, topic: str, count: int) -> None:
    """Puts so many records, and lets the sweep remove them."""
    put(rig, topic, count, ttl=SECOND, name="expires")
    rig.time.tick(2 * SECOND)
    rig.store.sweep()


def test_too_few_expired_records_are_left_alone_and_count_on(rig: Rig, compacted: Ranges) -> None:
    topic = rig.create_topic("t", PLAIN)
    expire(rig, "t", 3)
    assert rig.store.upkeep.reclaim(4, yes) == 0
    assert compacted == []
    expire(rig, "t", 1)
    assert rig.store.upkeep.reclaim(4, yes) == 3
    floor = rig.store.writer.sweep.floor
    assert compacted == [
        (RECORDS, topic.prefix, topic.stop),
        (INDEXES, topic.prefix, topic.stop),
        (EXPIRY, b"", floor),
    ]


def test_compacted_removals_count_no_more(rig: Rig, compacted: Ranges) -> None:
    rig.create_topic("t", PLAIN)
    expire(rig, "t", 4)
    assert rig.store.upkeep.reclaim(4, yes)
    compacted.clear()
    expire(rig, "t", 3)
    assert rig.store.upkeep.reclaim(4, yes) == 0
    assert compacted == []


def test_a_topic_with_more_records_than_were_removed_from_it_is_not_written_again(rig: Rig, compacted: Ranges) -> None:
    """reclaim [1]. Of the swept entries of the expiry index, which hold nothing else, no more is written than was
    removed."""
    rig.create_topic("large", PLAIN)
    small = rig.create_topic("small", PLAIN)
    put(rig, "large", 5)
    put(rig, "small", 4)
    expire(rig, "large", 4)
    expire(rig, "small", 4)
    assert rig.store.upkeep.reclaim(4, yes)
    assert [one for one in compacted if one[0] != EXPIRY] == [
        (RECORDS, small.prefix, small.stop),
        (INDEXES, small.prefix, small.stop),
    ]
    expire(rig, "large", 1)
    compacted.clear()
    assert rig.store.upkeep.reclaim(4, yes), "earlier removals still count"
    assert compacted.families() == [RECORDS, INDEXES]


def test_records_that_do_not_deserve_it_do_not_help_others_to_be_enough(rig: Rig, compacted: Ranges) -> None:
    rig.create_topic("large", PLAIN)
    rig.create_topic("small", PLAIN)
    put(rig, "large", 5)
    expire(rig, "large", 4)
    expire(rig, "small", 3)
    rig.store.upkeep.reclaim(4, yes)
    assert compacted.families() == [EXPIRY]


def test_deleted_records_count_like_expired_ones(rig: Rig, compacted: Ranges) -> None:
    rig.create_topic("t", PLAIN)
    put(rig, "t", 2)
    rig.delete("t", "k0", "k1")
    assert rig.store.upkeep.reclaim(2, yes) == 2
    assert compacted.families() == [RECORDS, INDEXES]


def test_compaction_does_not_rewrite_the_retained_journal(rig: Rig, compacted: Ranges) -> None:
    topic = rig.create_topic("t", JOURNALED)
    put(rig, "t", 3)
    rig.time.tick(HOUR)
    put(rig, "t", 2)
    rig.prune()
    floor = topic.statistics.floor_sequence
    assert topic.statistics.journal_entries == 2
    assert rig.store.upkeep.reclaim(4, yes) == 0
    assert rig.store.upkeep.reclaim(3, yes) == 2
    journal, commits = compacted
    assert journal == (JOURNAL, topic.prefix, topic.prefix + i64(floor + 1))
    family, begin, end = commits
    assert (family, begin) == (COMMITS, b"")
    assert i64(floor) <= end <= i64(floor + 1)


def test_a_deleted_topic_is_given_back_whole(rig: Rig, compacted: Ranges) -> None:
    topic = rig.create_topic("t", JOURNALED)
    rig.create_topic("empty", PLAIN)
    put(rig, "t", 2)
    rig.delete_topic("t")
    rig.delete_topic("empty")
    assert rig.store.upkeep.reclaim(2, yes)
    assert [one for one in compacted if one[0] != COMMITS] == [
        (RECORDS, topic.prefix, topic.stop),
        (INDEXES, topic.prefix, topic.stop),
        (JOURNAL, topic.prefix, topic.stop),
    ]
    assert not rig.store.writer.removals.counts()


def test_a_stop_does_not_wait_for_more_than_one_range(rig: Rig, compacted: Ranges) -> None:
    """reclaim [2]. Removals that were not compacted still count."""
    rig.create_topic("t", PLAIN)
    expire(rig, "t", 4)
    assert rig.store.upkeep.reclaim(4, lambda: not compacted) == 1
    assert compacted.families() == [RECORDS]
    compacted.clear()
    assert rig.store.upkeep.reclaim(4, yes) == 3
    assert compacted.families() == [RECORDS, INDEXES, EXPIRY]


def test_removals_during_a_compaction_count_for_the_next(rig: Rig, compacted: Ranges) -> None:
    rig.create_topic("t", PLAIN)
    expire(rig, "t", 4)
    steps: list[None] = []

    def meanwhile() -> bool:
        if not steps:
            steps.append(None)
            expire(rig, "t", 3)
        return True

    assert rig.store.upkeep.reclaim(4, meanwhile) == 3
    compacted.clear()
    assert rig.store.upkeep.reclaim(3, yes) == 3


def test_a_large_topic_is_compacted_in_parts_that_cover_it(
    rig: Rig, compacted: Ranges, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "RECLAIM_BYTES", 20_000)
    topic = rig.create_topic("t", PLAIN)
    other = rig.create_topic("u", PLAIN)
    draw = random.Random(1)
    for number in range(12):
        for name in ("t", "u"):
            rig.put(name, f"{number:02}", b'{"n":"%s"}' % draw.randbytes(5_000).hex().encode(), ttl=SECOND)
            rig.store._rocks.flush()
    rig.time.tick(2 * SECOND)
    rig.store.sweep()
    assert rig.store.upkeep.reclaim(1, yes)
    parts = compacted.of(RECORDS)
    assert len(parts) > 4
    assert (parts[0][0], parts[-1][1]) == (topic.prefix, other.stop)
    assert all(before[1] == after[0] for before, after in pairwise(parts))
    assert all(begin < end for begin, end in parts)


def test_topics_that_share_files_are_compacted_together(rig: Rig, compacted: Ranges) -> None:
    """A range each would have written the same file again and again."""
    topics = [rig.create_topic(f"t{number}", PLAIN) for number in range(5)]
    put(rig, "t2", 3)
    for number in range(5):
        expire(rig, f"t{number}", 2)
    rig.store._rocks.flush()
    assert rig.store.upkeep.reclaim(8, yes) == 3
    assert compacted.of(RECORDS) == [(topics[0].prefix, topics[4].stop)]


def test_ranges_with_much_between_them_are_compacted_each_for_itself(
    rig: Rig, compacted: Ranges, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "RECLAIM_BYTES", 20_000)
    first, between, last = (rig.create_topic(name, PLAIN) for name in ("t", "u", "v"))
    draw = random.Random(1)
    for number in range(5):
        rig.put("u", f"{number}", b'{"n":"%s"}' % draw.randbytes(5_000).hex().encode())
        rig.store._rocks.flush()
    expire(rig, "t", 2)
    expire(rig, "v", 2)
    assert rig.store.upkeep.reclaim(4, yes)
    assert compacted.of(RECORDS) == [(first.prefix, first.stop), (last.prefix, last.stop)]
    assert between.statistics.records == 5


@pytest.fixture
def asked(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """How often the timer has asked the store: from how many on, and whether to go on."""
    asked: list[tuple[int, bool]] = []

    def reclaim(at_least: int, go_on: Callable[[], bool]) -> int:
        asked.append((at_least, go_on()))
        return 0

    monkeypatch.setattr(rig.store.upkeep, "reclaim", reclaim)
    return asked


@pytest.mark.parametrize("stopping", [False, True])
def test_the_timer_tells_from_when_on_it_is_worth_it_and_when_to_stop(
    rig: Rig, asked: list[tuple[int, bool]], stopping: bool
) -> None:
    with ThreadPoolExecutor(1) as readers:
        asyncio.run(timers(rig, readers, lambda: not stopping)._reclaim())
    assert asked == [(RECLAIM_RECORDS, not stopping)]


def test_the_timer_waits_until_nothing_waits_for_the_writer(rig: Rig, asked: list[tuple[int, bool]]) -> None:
    rig.create_topic("t", PLAIN)
    answers: list[Outcome | StoreError] = []
    with ThreadPoolExecutor(1) as readers:
        reclaim = timers(rig, readers)._reclaim
        rig.store.commits.submit(Publish("t", [b"{}"], keys=["k"])).then(answers.append)
        asyncio.run(reclaim())
        assert asked == []
        rig.store.writer.step()
        asyncio.run(reclaim())
        assert len(asked) == 1


def test_a_compaction_that_fails_does_not_end_the_timer_and_is_done_the_next_time(
    rig: Rig, compacted: Ranges, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.create_topic("t", PLAIN)
    expire(rig, "t", 2)

    def fail(family: str, begin: bytes, end: bytes) -> None:
        raise Failed("no space")

    with ThreadPoolExecutor(1) as readers:
        reclaim = timers(rig, readers, reclaim_records=2)._reclaim
        with monkeypatch.context() as broken:
            broken.setattr(rig.store._rocks, "compact", fail)
            asyncio.run(reclaim())
        assert compacted == []
        asyncio.run(reclaim())
    assert compacted.families() == [RECORDS, INDEXES, EXPIRY]


def test_how_soon_space_is_given_back_can_be_tuned(rig: Rig, compacted: Ranges) -> None:
    """Pulsar 10, L17: with `reclaim_records` at 3 nothing is done for two records that have gone, and all for three;
    and it is looked at every `reclaim_interval`."""
    rig.create_topic("t", PLAIN)
    with ThreadPoolExecutor(1) as readers:
        jobs = timers(rig, readers, reclaim_records=3, reclaim_interval_micros=7 * SECOND)
        assert {job.name: job.seconds for job in jobs.jobs}["reclaim"] == 7
        expire(rig, "t", 2)
        asyncio.run(jobs._reclaim())
        assert compacted == []
        expire(rig, "t", 1)
        asyncio.run(jobs._reclaim())
        assert compacted.families() == [RECORDS, INDEXES, EXPIRY]
