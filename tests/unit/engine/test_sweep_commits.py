"""The commits of a long sweep: their sizes, and the entries of the expiry index that they remove (L9, L14)."""

from __future__ import annotations

from pathlib import Path

import pytest

from sow_server.engine.administration import expiration
from sow_server.engine.commit import expiry
from sow_server.engine.commit.options import WriterOptions
from sow_server.engine.disk.rocks import EXPIRY, RECORDS, Batch
from sow_server.engine.store import StoreOptions
from sow_server.engine.stored import DUE, unpack_i64
from sow_server.engine.values.database import Stalled
from sow_server.engine.values.errors import StoreError
from sow_server.engine.values.model import Expiration, Lifetime, LifetimeKind, Publish
from tests.support.stores.stores import DAY, MINUTE, SECOND, FaultyRocks, Rig


def load(rig: Rig, topic: str, count: int, ttl: int) -> None:
    rig.run(Publish(topic, [b"x"] * count, [str(n) for n in range(count)], lifetime=Lifetime(LifetimeKind.TTL, ttl)))


def scattered(rig: Rig, topic: str, count: int, *, over: int = SECOND) -> None:
    """Records whose expire times are in another order than their keys."""
    for number in range(count):
        rig.put(topic, f"{number:03}", ttl=over + number * 617_761_931 % over)


def stored_after_each_commit(rig: Rig) -> list[int]:
    """Sweeps all that is due; returns the number of records of `orders` that each commit leaves."""
    stored: list[int] = []
    while rig.store.writer.sweep_now(entries_max=1):
        stored.append(len(rig.stored("orders")))
    return stored


def test_what_one_commit_removes_goes_in_the_order_of_its_times(tmp_path: Path) -> None:
    """L9."""
    rig = Rig(tmp_path)
    rig.create_topic("orders")
    scattered(rig, "orders", 50)
    rig.time.tick(2 * SECOND)
    due = sorted(rig.stored("orders").items(), key=lambda row: row[1].expire_time_micros)
    rig.store.sweep()
    assert [key for kind, key in rig.kinds("orders") if kind == "expire"] == [key.decode() for key, _ in due]
    rig.close()


def test_a_long_sweep_goes_by_windows_in_the_order_of_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """L9, expiry [4]: no record is removed before one of an earlier window; each window goes in one range delete."""
    monkeypatch.setattr(expiry, "WINDOW_ENTRIES", 40)
    rig = Rig(tmp_path, options=StoreOptions(writer=WriterOptions(sweep_entries_max=16)))
    rig.create_topic("orders")
    scattered(rig, "orders", 95)
    rig.put("orders", "later", ttl=DAY)
    rig.time.tick(2 * SECOND)
    due = sorted(rig.stored("orders").items(), key=lambda row: row[1].expire_time_micros)
    order = [key.decode() for key, _ in due[:95]]
    stored: list[int] = []
    left: list[int] = []
    while rig.store.writer.sweep_now(entries_max=1):
        stored.append(len(rig.stored("orders")))
        left.append(len(rig.rows(EXPIRY)))
    assert stored == [80, 64, 56, 40, 24, 16, 1]
    assert left == [96, 96, 56, 56, 56, 16, 1], "the last fits into one commit"
    expired = [key for kind, key in rig.kinds("orders") if kind == "expire"]
    assert expired == sorted(order[:40]) + sorted(order[40:80]) + order[80:]
    assert [key for _, key in rig.entries()] == [rig.topic("orders").prefix + b"later"]
    rig.close()


def test_a_window_that_a_crash_cuts_short_is_popped_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """L10, expiry [4]: each record expires once, and nothing stays."""
    monkeypatch.setattr(expiry, "WINDOW_ENTRIES", 40)
    rig = Rig(tmp_path, options=StoreOptions(writer=WriterOptions(sweep_entries_max=10)))
    rig.create_topic("orders")
    load(rig, "orders", 95, SECOND)
    rig.time.tick(SECOND)
    assert rig.store.writer.sweep_now(entries_max=61) == 70
    rig.store.sync()
    rig.crash()
    assert (len(rig.stored("orders")), len(rig.entries())) == (25, 55)
    assert rig.store.sweep() == 55
    assert (rig.rows(EXPIRY), rig.stored("orders")) == ([], {})
    assert [kind for kind, _ in rig.kinds("orders")].count("expire") == 95, "each once"
    rig.close()


def test_popped_entries_that_an_earlier_version_left_below_the_floor_go_with_the_next_sweep(tmp_path: Path) -> None:
    """expiry [4]: it removed popped entries many commits later, and a restart might come before."""
    rig = Rig(tmp_path)
    rig.create_topic("orders")
    load(rig, "orders", 25, SECOND)
    rows = rig.rows(EXPIRY)
    rig.time.tick(SECOND)
    rig.store.sweep()
    left = Batch()
    left.puts[EXPIRY].update(rows)
    rig.store._rocks.write(left)
    rig.reopen()
    assert (len(rig.rows(EXPIRY)), rig.entries()) == (25, [])
    rig.put("orders", "new", ttl=SECOND)
    rig.time.tick(SECOND)
    assert rig.store.sweep() == 1
    assert rig.rows(EXPIRY) == []
    rig.close()


def test_a_commit_of_large_records_is_bounded_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Story, expiry [7]: 1,000 records of a megabyte were due at once, and their one commit took 5 GB."""
    monkeypatch.setattr(expiry, "COMMIT_BYTES", 2500)
    monkeypatch.setattr(expiry, "RECORDS_AT_ONCE", 1)
    rig = Rig(tmp_path, options=StoreOptions(writer=WriterOptions(sweep_entries_max=20)))
    rig.create_topic("orders")
    for number in range(10):
        rig.put("orders", f"{number}", b"x" * 1000, ttl=SECOND + number)
    rig.time.tick(2 * SECOND)
    assert stored_after_each_commit(rig) == [7, 4, 1, 0]
    assert [key for kind, key in rig.kinds("orders") if kind == "expire"] == [str(number) for number in range(10)]
    assert rig.rows(EXPIRY) == []
    rig.close()


def test_a_window_of_long_keys_is_bounded_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """expiry [7]: it holds the keys of its records."""
    monkeypatch.setattr(expiry, "WINDOW_BYTES", 1000)
    monkeypatch.setattr(expiry, "READ_MAX", 5)
    rig = Rig(tmp_path, options=StoreOptions(writer=WriterOptions(sweep_entries_max=20)))
    rig.create_topic("orders")
    order = [f"{number * 7 % 30:02}{'k' * 100}" for number in range(30)]
    for number, key in enumerate(order):
        rig.put("orders", key, ttl=SECOND + number)
    rig.time.tick(2 * SECOND)
    assert stored_after_each_commit(rig) == [20, 10, 0]
    assert [key for kind, key in rig.kinds("orders") if kind == "expire"] == order
    rig.close()


def enable_without_a_sweep(rig: Rig, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the entries of all records of a topic, whose times may be long past."""
    with monkeypatch.context() as held:
        held.setattr(rig.store.writer, "sweep_now", lambda *_: 0)
        rig.alter_topic(topic, expiration=Expiration.ENABLED)


@pytest.mark.parametrize("ttl", [SECOND, MINUTE, MINUTE + SECOND // 2], ids=["below", "at", "within"])
def test_an_entry_that_comes_into_the_window_or_below_it_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ttl: int
) -> None:
    """L12: a topic whose expiration is enabled again has older stamps than entries that have been popped (expiry [5]).
    The range that removes those must not take the new entries with it."""
    monkeypatch.setattr(expiry, "WINDOW_ENTRIES", 40)
    rig = Rig(tmp_path, options=StoreOptions(writer=WriterOptions(sweep_entries_max=10)))
    rig.create_topic("old", expiration=Expiration.DISABLED)
    load(rig, "old", 15, ttl)
    rig.create_topic("orders")
    scattered(rig, "orders", 75, over=MINUTE)
    rig.time.tick(2 * MINUTE)
    for _ in range(3):
        rig.store.writer.sweep_now(entries_max=1)
    enable_without_a_sweep(rig, "old", monkeypatch)
    assert len(rig.stored("old")) == 15, "not swept yet"
    assert len(rig.stored("orders")) == 45
    rig.store.sweep()
    assert (rig.stored("old"), rig.stored("orders"), rig.rows(EXPIRY)) == ({}, {}, [])
    rig.close()


def test_what_falls_due_behind_a_window_that_is_under_way_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L9: its entry came after the window had been read."""
    monkeypatch.setattr(expiry, "WINDOW_ENTRIES", 40)
    rig = Rig(tmp_path, options=StoreOptions(writer=WriterOptions(sweep_entries_max=10)))
    rig.create_topic("orders")
    load(rig, "orders", 20, SECOND)
    rig.put("orders", "last", ttl=DAY)
    rig.time.tick(SECOND)
    rig.store.writer.sweep_now(entries_max=1)
    rig.put("orders", "soon", ttl=SECOND)
    rig.store.sweep()
    assert rig.store.writer.sweep.next_due == rig.clock.now_micros() + SECOND
    rig.close()


def test_entries_that_come_into_every_window_do_not_hold_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """L14, expiry [5]: peers may send overdue records all the time. Each window still ends, and is not read again as a
    whole."""
    monkeypatch.setattr(expiry, "WINDOW_ENTRIES", 40)
    rig = Rig(tmp_path, options=StoreOptions(writer=WriterOptions(sweep_entries_max=10)))
    rig.create_topic("orders")
    load(rig, "orders", 200, MINUTE)
    rig.time.tick(MINUTE)
    first, _ = min(rig.rows(EXPIRY))
    visited = rounds = 0
    while rig.stored("orders"):
        visited += rig.store.writer.sweep_now(entries_max=1)
        arrived = Batch()
        arrived.puts[EXPIRY][first] = b""  # of a record that has gone: the entry alone comes again
        rig.store._rocks.write(arrived)
        draft = rig.store.writer.committer.new_draft()
        draft.earliest = unpack_i64(first[DUE])
        rig.store.writer.sweep.committed(draft)
        rounds += 1
        assert rounds < 100
    assert visited <= 2 * 200
    rig.close()


def test_a_change_of_settings_expires_what_falls_due_just_before_it_in_bounded_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L12, expiry [7]: as many records as there were went in one commit, with the settings."""
    monkeypatch.setattr(expiration, "SWEEP_ROUND", 10)
    monkeypatch.setattr(expiry, "COMMIT_BYTES", 2500)
    monkeypatch.setattr(expiry, "RECORDS_AT_ONCE", 1)
    rig = Rig(tmp_path)
    rig.create_topic("orders")
    load(rig, "orders", 25, SECOND)
    for number in range(5):
        rig.put("orders", f"large {number}", b"x" * 1000, ttl=SECOND + number)
    rig.put("orders", "later", ttl=DAY)
    rig.time.tick(2 * SECOND)
    rocks = rig.store._rocks
    write, removed = rocks.write, []

    def counted(batch: Batch) -> None:
        removed.append(len(batch.deletes[RECORDS]))
        write(batch)

    monkeypatch.setattr(rocks, "write", counted)
    monkeypatch.setattr(rig.store.writer, "sweep_now", lambda *_: 0)
    rig.alter_topic("orders", expiration=Expiration.DISABLED)
    assert [count for count in removed if count] == [10, 10, 8, 2]
    assert list(rig.stored("orders")) == [b"later"]
    assert not rig.topic("orders").acts
    monkeypatch.undo()
    rig.alter_topic("orders", expiration=Expiration.ENABLED)
    rig.time.tick(DAY)
    assert rig.store.sweep() == 1
    rig.close()


def test_a_change_of_settings_that_stalls_leaves_no_empty_window(tmp_path: Path) -> None:
    """L9, L12: it found nothing overdue, and was refused. The next sweep reads the index anew."""
    rig = Rig(tmp_path, options=StoreOptions(writer=WriterOptions(stall_patience_micros=0)))
    rig.create_topic("orders")
    rig.put("orders", "a", ttl=SECOND)
    FaultyRocks(rig).writes += [Stalled("Result incomplete: Write stall")]
    with pytest.raises(StoreError, match="nothing was written"):
        rig.alter_topic("orders", expiration=Expiration.DISABLED)
    rig.time.tick(SECOND)
    assert rig.store.sweep() == 1
    rig.close()


def test_a_window_is_larger_than_a_commit_by_a_bounded_factor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """L14, expiry [6]: while somebody publishes, 20 entries fit into the time of a commit. One that read 20,000 of them
    first took ten times as long."""
    monkeypatch.setattr(expiry, "WINDOW_COMMITS", 3)
    rig = Rig(tmp_path, options=StoreOptions(writer=WriterOptions(sweep_entries_max=10)))
    rig.create_topic("orders")
    scattered(rig, "orders", 95)
    rig.time.tick(2 * SECOND)
    order = [key.decode() for key, _ in sorted(rig.stored("orders").items(), key=lambda row: row[1].expire_time_micros)]
    rig.store.sweep()
    expired = [key for kind, key in rig.kinds("orders") if kind == "expire"]
    assert expired == [*sorted(order[:30]), *sorted(order[30:60]), *sorted(order[60:90]), *order[90:]]
    rig.close()


def test_a_bounded_count_of_overdue_records_is_not_used_up_by_what_a_window_has_popped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L16: the entries of a window stay until it is done. Near its end a count that is bounded would find next to
    nothing, however much is overdue."""
    monkeypatch.setattr(expiry, "WINDOW_ENTRIES", 40)
    rig = Rig(tmp_path, options=StoreOptions(writer=WriterOptions(sweep_entries_max=19)))
    rig.create_topic("orders")
    scattered(rig, "orders", 95)
    rig.time.tick(2 * SECOND)
    assert rig.store.writer.sweep_now(entries_max=20) == 38
    assert rig.store.cuts.overdue(at_most=20, entries_max=20) == 20
    rig.close()


def test_the_last_commit_of_a_window_is_not_the_end_of_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L14: it visits what is left of the window. It was followed by a pause, as if nothing else were overdue."""
    monkeypatch.setattr(expiry, "WINDOW_ENTRIES", 25)
    rig = Rig(tmp_path, options=StoreOptions(writer=WriterOptions(sweep_entries_max=20)))
    rig.create_topic("orders")
    load(rig, "orders", 60, SECOND)
    rig.time.tick(SECOND)
    stored = []
    for _ in range(4):
        rig.store.writer._sweep_if_due(rig.clock.now_micros(), after_answers=False)
        stored.append(len(rig.stored("orders")))
    assert stored == [40, 35, 15, 10]
    rig.close()


def test_while_somebody_publishes_one_slow_commit_of_the_sweep_halves_the_next_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L14: commits have as many entries as fit into `busy_time`, 1.5 ms. One that took long because others had the
    processor once made the next ones tiny, so that a drain on a busy machine took several times as long."""
    rig = Rig(tmp_path)
    rig.create_topic("orders")
    load(rig, "orders", 800, SECOND)
    rig.time.tick(SECOND)
    rig.put("orders", "new")
    rocks, writer = rig.store._rocks, rig.store.writer
    write, slow, sizes = rocks.write, [5], []

    def timed(batch: Batch) -> None:
        sizes.append(len(batch.deletes[RECORDS]))
        write(batch)
        rig.time.tick(10 * sizes[-1] + (150_000 if len(sizes) in slow else 0))

    monkeypatch.setattr(rocks, "write", timed)
    for _ in range(8):
        writer._sweep_if_due(rig.clock.now_micros(), after_answers=False)
        rig.time.tick(200)  # the pause between commits
    assert sizes == [20, 40, 80, 150, 110, 75, 150, 150], "the fifth is the rest of a window"
    rig.close()
