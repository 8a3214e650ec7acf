"""Whoever follows the database sees states between two commits, and all that was committed (engine/following)."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.disk.rocks import (
    EXPIRY,
    FOLLOWED,
    JOURNAL,
    MARK_KEY,
    META,
    RECORDS,
    Batch,
    Cursor,
    Rocks,
    Secondary,
)
from sow_server.engine.disk.rocks import secondary as secondary_module
from sow_server.engine.following import FollowedCuts, Follower, Moment, TopicImage
from sow_server.engine.reading import Cut
from sow_server.engine.stored import StoredStatistics, header_columns, i64, unpack_i64
from sow_server.engine.values.database import Failed, RocksOptions, Stale
from sow_server.engine.values.errors import StoreError
from sow_server.engine.values.model import Expiration, Publish, TopicSettings
from sow_server.query.filtering import record_filter
from sow_server.query.scan import Query, Scan
from tests.support.stores.stores import SECOND, Rig

TINY = RocksOptions(records_memtable_bytes=64 * 2**10, other_memtable_bytes=64 * 2**10, log_bytes_max=256 * 2**10)
"""Memtables are written out, and logs removed, many times a second."""
ROW = bytes(2_000)
KEPT = 500
COMMITS = 4_500
AHEAD = 150
"""Commits in which some memtables are written out: so many are made while a state is read."""


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    folder.mkdir()
    return folder


# --- the secondary ---------------------------------------------------------------------------------------------------


def commit(number: int) -> Batch:
    """A commit that leaves its number in each of four column families, and keeps `KEPT` of them in one."""
    batch = Batch()
    for family in (RECORDS, EXPIRY, JOURNAL):
        batch.puts[family][i64(number)] = ROW
    batch.puts[META][b"number"] = i64(number)
    if number > KEPT:
        batch.deletes[EXPIRY].append(i64(number - KEPT))
    return batch


def beat_of(database: Rocks) -> int:
    """The number of a write that a secondary has to see."""
    database.write_waiting(Batch(beat=True))
    return database.write_number


def keys(cursor: Cursor) -> list[bytes]:
    try:
        return list(cursor.keys(b"", MARK_KEY))
    finally:
        cursor.close()


def seen(secondary: Secondary) -> int:
    """The number of the commit that the secondary shows; every column family must show the same."""
    cursor = secondary.cursor(META)
    row = cursor.find(b"number")
    cursor.close()
    number = 0 if row is None else unpack_i64(row)
    expected = [i64(each) for each in range(1, number + 1)]
    assert keys(secondary.cursor(RECORDS)) == expected
    assert keys(secondary.cursor(JOURNAL)) == expected
    assert keys(secondary.cursor(EXPIRY)) == expected[-KEPT:]
    return number


@pytest.mark.slow
def test_every_state_is_that_of_one_commit_while_memtables_are_written_out_and_logs_go(
    tmp_path: Path, logs: Path
) -> None:
    """rocks [14]. Story: one in twenty states had rows of one column family without those of another."""
    database = Rocks(tmp_path / "db", TINY, create=True)
    database.marking = True
    written, stop, writing_lock, turns = 0, threading.Event(), threading.Lock(), threading.Semaphore(0)

    def write() -> None:
        nonlocal written
        while not stop.is_set() and written < COMMITS:
            if written % AHEAD == 0:
                turns.acquire()
            with writing_lock:
                database.write_waiting(commit(written + 1))
                written += 1

    def caught_up() -> int:
        """Catches up; returns the commit that has to be seen."""
        while True:
            with writing_lock:
                least, beat = written, beat_of(database)
            try:
                secondary.catch_up(beat)
            except Stale:  # a memtable was written out in between
                continue
            return least

    secondary = Secondary(tmp_path / "db", TINY, log_folder=logs)
    writing = threading.Thread(target=write)
    writing.start()
    try:
        before = states = 0
        while writing.is_alive():
            states += 1
            turns.release()
            least = caught_up()
            number = seen(secondary)
            assert number >= max(least, before)
            before = number
    finally:
        stop.set()
        turns.release()
        writing.join()
    assert states >= COMMITS // AHEAD
    assert caught_up() == seen(secondary) == written > KEPT
    secondary.close()
    database.close()


def test_it_catches_up_again_when_a_log_was_removed_meanwhile(
    tmp_path: Path, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rocks [14]."""
    database = Rocks(tmp_path / "db", create=True)
    database.marking = True
    secondary = Secondary(tmp_path / "db", RocksOptions(), log_folder=logs)
    secondary.move()
    lists = [{"4.log", "9.log"}, {"9.log"}, {"9.log"}, {"9.log", "11.log"}]
    monkeypatch.setattr(Secondary, "_logs", lambda self: lists.pop(0))
    secondary.move()
    assert lists == []
    endless = iter(range(10**6))
    monkeypatch.setattr(Secondary, "_logs", lambda self: {f"{next(endless)}.log"})
    monkeypatch.setattr(secondary_module, "TRIES", 3)
    with pytest.raises(Failed, match="removed faster"):
        secondary.catch_up(beat_of(database))
    secondary.close()
    database.close()


def test_rows_of_table_files_are_newer_than_those_of_its_memtable(tmp_path: Path, logs: Path) -> None:
    """rocks [15]. Story: a look-up by key found the old row, a cursor beside it the new one."""
    database = Rocks(tmp_path / "db", create=True)
    database.marking = True
    database.write(commit(1))
    secondary = Secondary(tmp_path / "db", RocksOptions(), log_folder=logs)
    database.write(commit(2))
    secondary.catch_up(beat_of(database))
    for number in range(3, 50):
        database.write(commit(number))
    database.flush()
    secondary.catch_up(beat_of(database))
    assert seen(secondary) == 49
    secondary.close()
    database.close()


def test_its_state_moves_only_when_it_catches_up_and_cursors_keep_theirs(tmp_path: Path, logs: Path) -> None:
    database = Rocks(tmp_path / "db", create=True)
    database.marking = True
    database.write(commit(1))
    secondary = Secondary(tmp_path / "db", RocksOptions(), log_folder=logs)
    database.write(commit(2))
    assert seen(secondary) == 1
    cursor = secondary.cursor(RECORDS)
    secondary.catch_up(beat_of(database))
    assert seen(secondary) == 2
    for number in range(3, 50):
        database.write(commit(number))
    database.flush()
    database.compact(RECORDS)
    secondary.catch_up(beat_of(database))
    assert keys(cursor) == [i64(1)], "also once its table files are removed"
    assert seen(secondary) == 49
    secondary.close()
    database.close()


def test_it_leaves_the_database_to_its_owner(tmp_path: Path, logs: Path) -> None:
    database = Rocks(tmp_path / "db", create=True)
    database.marking = True
    database.write(commit(1))
    secondary = Secondary(tmp_path / "db", RocksOptions(), log_folder=logs)
    files = {path.name for path in (tmp_path / "db").iterdir()}
    secondary.close()
    assert {path.name for path in (tmp_path / "db").iterdir()} == files
    database.close()
    Rocks(tmp_path / "db", create=False).close()


def test_a_database_that_nobody_follows_has_no_marks(rig: Rig) -> None:
    """They cost up to three rows a write."""
    rig.create_topic("t")
    rig.put("t", "1")
    assert [rig.store._rocks.get(family, MARK_KEY) for family in FOLLOWED] == [None] * 3
    rig.store.beats.begin()
    rig.put("t", "1")
    assert rig.store._rocks.get(RECORDS, MARK_KEY) is not None
    written = rig.store._rocks.write_number
    rig.reopen()
    assert rig.store._rocks.write_number >= written, "numbers rise for as long as there are some"


# --- the follower ----------------------------------------------------------------------------------------------------


class Following:
    """A store, and a follower of it."""

    def __init__(self, rig: Rig, logs: Path) -> None:
        self.rig = rig
        rig.store.beats.begin()
        self.follower = Follower(rig.path, RocksOptions(), log_folder=logs)
        self.skipped: list[bytes] = []

    def moment(self) -> Moment:
        answers: list[Moment | StoreError] = []
        self.rig.store.beats.make().then(answers.append)
        return self.rig.answer(answers)

    def cuts(self) -> FollowedCuts:
        return self.follower.at(self.moment(), lambda topic, found, now: self.skipped.extend(found))

    def both(self, name: str) -> tuple[dict[bytes, bytes], dict[bytes, bytes]]:
        """The records of a topic as the store reads them, and as the follower does."""
        topic = self.rig.topic(name)
        image = TopicImage.of(topic).topic()
        own = self.rig.store.cuts.records(topic)
        there = self.cuts().records(image, reads_from=b"")
        assert (there.sequence, there.now_micros) == (own.sequence, own.now_micros)
        return records(own, topic), records(there, image)


def records(cut: Cut, topic: Topic) -> dict[bytes, bytes]:
    found_keys: list[bytes] = []
    values: list[bytes] = []
    headers = header_columns(())
    following, _ = cut.fill(topic.prefix, 10_000, found_keys, values, headers=headers)
    assert following is None
    assert headers == header_columns(values)
    cut.close()
    return dict(zip(found_keys, values, strict=True))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


@pytest.fixture
def following(rig: Rig, logs: Path) -> Iterator[Following]:
    rig.create_topic("t", expiration=Expiration.ENABLED)
    made = Following(rig, logs)
    yield made
    made.follower.close()


def test_a_follower_reads_what_the_store_reads_after_any_changes(rig: Rig, following: Following) -> None:
    draw = random.Random(15)
    for _ in range(60):
        for _ in range(draw.randint(1, 6)):
            key = str(draw.randint(0, 30))
            match draw.randint(0, 4):
                case 0:
                    rig.delete("t", key)
                case 1:
                    rig.time.tick(draw.randint(0, 3) * SECOND)
                case 2:
                    rig.put("t", key, ttl=draw.randint(1, 5) * SECOND)
                case 3:
                    rig.store.writer.sweep_now()
                case _:
                    rig.put("t", key)
        if draw.random() < 0.1:
            rig.store._rocks.flush()
        own, there = following.both("t")
        assert own == there


def test_a_record_that_is_over_is_not_seen_though_it_is_not_swept(rig: Rig, following: Following) -> None:
    """rule L8."""
    rig.put("t", "1", ttl=SECOND)
    rig.put("t", "2", ttl=2 * SECOND)
    rig.time.tick(SECOND)
    own, there = following.both("t")
    assert own == there
    assert list(there) == [b"2"]


@pytest.mark.parametrize(("batch_size", "skip_n", "top_n"), [(1000, 0, 0), (7, 0, 0), (9, 11, 40)])
def test_each_record_comes_with_its_own_header(
    rig: Rig, following: Following, batch_size: int, skip_n: int, top_n: int
) -> None:
    """rule L8. Without a filter the headers tell the live records; with one, each record is looked at by itself."""
    for number in range(100):
        rig.put("t", f"{number:03}", ttl=(number % 5) * SECOND or None)
    rig.time.tick(2 * SECOND)  # two of five are over, one of these just now, and nobody has swept
    image = TopicImage.of(rig.topic("t")).topic()
    told = []
    for text in ("", "@key > '' AND @version > 0"):
        chosen = record_filter(image, text, 0) if text else None
        for cuts in (following.cuts(), rig.store.cuts):
            scan = Scan(cuts, Query(image, filter=chosen, batch_size=batch_size, skip_n=skip_n, top_n=top_n))
            rows: list[tuple[object, ...]] = []
            while (batch := scan.next_batch()) is not None:
                rows += zip(batch.keys, batch.payloads or (), *batch.headers, strict=True)
            told.append(rows)
            scan.close()
    assert len(told[0]) == (top_n or 60)
    assert told == [told[0]] * 4


def test_a_topic_that_does_not_fit_into_the_cache_does_not_fill_it(
    following: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = following.follower._database
    filled: list[bool] = []

    def cursor(family: str, *, fill_cache: bool = True, reads_from: bytes | None = None) -> Cursor:
        filled.append(fill_cache)
        return Secondary.cursor(database, family, fill_cache=fill_cache, reads_from=reads_from)

    cuts = following.cuts()
    monkeypatch.setattr(database, "cursor", cursor)
    image = TopicImage.of(following.rig.topic("t"))
    for size in (database.cache_bytes, database.cache_bytes + 1):
        topic = image.topic(StoredStatistics(record_bytes=size))
        cuts.records(topic, reads_from=b"").close()
        cuts.records(topic).close()
    assert filled == [True, True, False, True]


def test_the_now_of_a_cut_is_not_before_the_commits_that_it_shows(rig: Rig, following: Following) -> None:
    early = following.moment()
    rig.time.tick(SECOND)
    rig.put("t", "1")
    cuts = following.follower.at(early, lambda topic, found, now: None)
    cut = cuts.records(TopicImage.of(rig.topic("t")).topic())
    assert cut.now_micros == early.now_micros + SECOND
    assert cut.sequence == early.sequence + 1
    cut.close()


def test_a_follower_that_has_not_reached_the_moment_says_so(rig: Rig, following: Following) -> None:
    moment = following.moment()
    with pytest.raises(Failed, match="was committed"):
        following.follower.at(moment._replace(sequence=moment.sequence + 1), lambda topic, found, now: None)
    with pytest.raises(Stale, match="records"):
        following.follower.at(moment._replace(write_number=moment.write_number + 1), lambda topic, found, now: None)


def test_after_a_restart_the_sequence_is_that_of_the_store(rig: Rig, tmp_path: Path) -> None:
    """A start goes on from the bound that was reserved, as after a crash; nothing is committed yet."""
    rig.create_topic("t")
    rig.put("t", "1")
    rig.crash()
    (tmp_path / "more").mkdir()
    found = Following(rig, tmp_path / "more")
    own, there = found.both("t")
    assert own == there != {}
    found.follower.close()


def test_an_index_is_read_as_the_store_reads_it(rig: Rig, following: Following) -> None:
    rig.create_topic("i", TopicSettings(key=("/id",), index=("/a",)))
    for number in range(20):
        rig.run(Publish("i", [b'{"id": %d, "a": %d}' % (number, number % 4)]))
    topic = rig.topic("i")
    image = TopicImage.of(topic).topic()
    found = []
    for cuts, which in ((rig.store.cuts, topic), (following.cuts(), image)):
        scan = Scan(cuts, Query(which, filter=record_filter(which, "/a = 3", 0)))
        batch = scan.next_batch()
        assert batch is not None
        scan.next_batch()
        found.append((batch.keys, scan.explanation().index_path))
        scan.close()
    assert found[0] == found[1] == ([b"11", b"15", b"19", b"3", b"7"], "/a")


def test_an_image_shows_whether_the_topic_is_read_in_the_same_way(rig: Rig, following: Following) -> None:
    topic = rig.topic("t")
    image = TopicImage.of(topic)
    rig.put("t", "1")
    assert image.shows(topic)
    rig.alter_topic("t", expiration=Expiration.DISABLED)
    assert not image.shows(rig.topic("t"))
