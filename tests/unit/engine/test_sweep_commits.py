"""The commits of a long sweep: their sizes, and the entries of the expiry index that they remove (L9, L14)."""

from __future__ import annotations

from pathlib import Path

import pytest

from sow_server.engine.commit import expiry
from sow_server.engine.commit.options import WriterOptions
from sow_server.engine.disk.rocks import EXPIRY, RECORDS, Batch
from sow_server.engine.store import StoreOptions
from sow_server.engine.values.model import Expiration, Lifetime, LifetimeKind, Publish
from tests.support.stores.stores import DAY, MINUTE, SECOND, Rig


def load(rig: Rig, topic: str, count: int, ttl: int) -> None:
    rig.run(Publish(topic, [b"x"] * count, [str(n) for n in range(count)], lifetime=Lifetime(LifetimeKind.TTL, ttl)))


def test_a_long_sweep_removes_its_entries_by_ranges_and_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """expiry [4]: the entries of ten commits go in three ranges; the records go in the commits that pop them."""
    monkeypatch.setattr(expiry, "CLEAR_ENTRIES", 40)
    rig = Rig(tmp_path, options=StoreOptions(writer=WriterOptions(sweep_entries_max=10)))
    rig.create_topic("orders")
    load(rig, "orders", 95, SECOND)
    rig.put("orders", "later", ttl=DAY)
    rig.time.tick(SECOND)
    stored: list[int] = []
    left: list[int] = []
    while rig.store.writer.sweep_now(entries_max=1):
        stored.append(len(rig.stored("orders")))
        left.append(len(rig.rows(EXPIRY)))
    assert stored == [86, 76, 66, 56, 46, 36, 26, 16, 6, 1]
    assert left == [96, 96, 96, 56, 56, 56, 56, 16, 16, 1]
    assert [key for _, key in rig.entries()] == [rig.topic("orders").prefix + b"later"]
    rig.close()


def test_entries_that_a_restart_finds_below_the_floor_go_with_the_next_sweep(tmp_path: Path) -> None:
    """expiry [4]: a long sweep was cut short before it had removed the entries that it had popped."""
    rig = Rig(tmp_path, options=StoreOptions(writer=WriterOptions(sweep_entries_max=10)))
    rig.create_topic("orders")
    load(rig, "orders", 25, SECOND)
    rig.time.tick(SECOND)
    assert rig.store.writer.sweep_now(entries_max=11) == 20
    rig.reopen()
    assert (len(rig.rows(EXPIRY)), len(rig.entries())) == (25, 5)
    assert rig.store.sweep() == 5
    assert (rig.rows(EXPIRY), rig.stored("orders")) == ([], {})
    assert [kind for kind, _ in rig.kinds("orders")].count("expire") == 25, "each once"
    rig.close()


def test_an_entry_that_comes_below_the_floor_during_a_long_sweep_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L12: a topic whose expiration is enabled again has older stamps than the entries popped so far (expiry [4]).
    The range that removes those must not take the new entries with it."""
    monkeypatch.setattr(expiry, "CLEAR_ENTRIES", 20)
    rig = Rig(tmp_path, options=StoreOptions(writer=WriterOptions(sweep_entries_max=10)))
    rig.create_topic("old", expiration=Expiration.DISABLED)
    load(rig, "old", 15, SECOND)
    rig.create_topic("orders")
    load(rig, "orders", 75, MINUTE)
    rig.time.tick(MINUTE)
    for _ in range(3):
        rig.store.writer.sweep_now(entries_max=1)
    monkeypatch.setattr(rig.store.writer, "sweep_now", lambda *_: 0)
    rig.alter_topic("old", expiration=Expiration.ENABLED)
    monkeypatch.undo()
    assert len(rig.stored("old")) == 15, "not swept yet"
    assert len(rig.stored("orders")) == 45
    rig.store.sweep()
    assert (rig.stored("old"), rig.stored("orders"), rig.rows(EXPIRY)) == ({}, {}, [])
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
        writer._sweep_if_due(after_answers=False)
        rig.time.tick(200)  # the pause between commits
    assert sizes == [20, 40, 80, 150, 150, 75, 150, 135]
    rig.close()
