"""The window of the best records against all records, sorted: results/window [1] to [3]. No time passes here."""

from __future__ import annotations

import random

import pytest

from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import NEVER
from sow_server.subscriptions.frames import ROW_BYTES, ChangeOp, ChangeReason, Row
from sow_server.subscriptions.results import window
from sow_server.subscriptions.results.window import Window

LARGE = 10**9
KEYS = [b"%02d" % number for number in range(24)]


def row(key: bytes, version: int, *, expires: int = NEVER, payload: bytes = b"") -> Row:
    return Row(ChangeOp.PUT, ChangeReason.NONE, key, payload, version, 0, expires, 0, version)


class Topic:
    """All records: of each its place, and its row."""

    def __init__(self, skip: int, top: int, bytes_max: int = LARGE) -> None:
        self.skip, self.top = skip, top
        self.records: dict[bytes, tuple[tuple[int, bytes], Row]] = {}
        self.window = Window(skip, top, bytes_max)
        self.reads = 0
        self.read()

    def read(self, now: int = 0) -> None:
        """Reads the best records anew, as they are now."""
        self.reads += 1
        live = [record for record in self.records.values() if now < record[1].expire_time]
        best = sorted(live, key=lambda record: record[0])
        most = self.window.records_max
        self.window.begin()
        self.window.load(best[:most])
        self.window.loaded(complete=len(best) <= most)

    def put(self, key: bytes, rank: int, version: int, expires: int = NEVER) -> None:
        self.records[key] = (rank, key), row(key, version, expires=expires)
        self.window.put(*self.records[key])

    def remove(self, key: bytes) -> None:
        self.records.pop(key, None)
        self.window.remove(key)

    def wanted(self, now: int) -> list[Row]:
        live = [record for record in self.records.values() if now < record[1].expire_time]
        best = [found for _, found in sorted(live, key=lambda record: record[0])]
        return best[self.skip : self.skip + self.top]


@pytest.mark.parametrize("seed", range(60))
def test_a_window_shows_the_same_as_all_records_sorted(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ties, tiny reserves, records that move, leave and fall due."""
    monkeypatch.setattr(window, "RESERVE_MIN", 1)
    chance = random.Random(seed)
    topic = Topic(chance.randint(0, 3), chance.randint(1, 4))
    shown: list[Row] | None = None
    now = at = 0
    for version in range(1, 120):
        key = chance.choice(KEYS)
        match chance.randint(0, 5):
            case 0 | 1:
                topic.remove(key)
            case 2:
                topic.put(key, chance.randint(0, 5), version, expires=now + chance.randint(1, 30))
            case 3:
                now += chance.randint(0, 3)
                for due in [key for key, (_, found) in topic.records.items() if found.expire_time <= now - 5]:
                    topic.remove(due)
            case _:
                topic.put(key, chance.randint(0, 5), version)
        assert len(topic.window) <= 2 * topic.window.records_max
        if topic.window.changed:
            shown = topic.window.shown(now)
            if shown is None:
                topic.read(now)
                shown = topic.window.shown(now)
            at = now
            assert shown == topic.wanted(now), (seed, version)
        else:  # what has fallen due since stays until something else changes
            assert shown == topic.wanted(at), (seed, version)


def test_a_change_behind_the_list_does_not_concern_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "RESERVE_MIN", 1)
    topic = Topic(0, 3)
    for number in range(3):
        topic.put(KEYS[number], number, number + 1)
    assert topic.window.shown(0) == topic.wanted(0)
    topic.put(KEYS[9], 9, 10)
    topic.remove(KEYS[9])
    assert not topic.window.changed
    topic.put(KEYS[8], 1, 11)
    assert topic.window.changed


def test_a_removed_record_counts_for_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """[1]: behind the boundary there may be any number of better ones than those that come."""
    monkeypatch.setattr(window, "RESERVE_MIN", 1)
    topic = Topic(0, 1)
    for number in range(8):
        topic.put(KEYS[number], number, number + 1)
    reads = topic.reads
    for number in range(2):
        topic.remove(KEYS[number])
    topic.put(KEYS[20], 9, 20)  # behind all that is known
    assert topic.window.shown(0) is None
    topic.read()
    assert topic.window.shown(0) == topic.wanted(0)
    assert topic.reads == reads + 1


def test_the_memory_of_a_window_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "RESERVE_MIN", 1)
    each = ROW_BYTES + 2
    topic = Topic(0, 2, bytes_max=4 * each)
    for number in range(10):
        topic.put(KEYS[number], number, number + 1)
        assert topic.window.size <= 4 * each
    assert topic.window.shown(0) == topic.wanted(0)
    small = Window(0, 3, bytes_max=2 * each)
    for number in range(2):
        small.put((number, KEYS[number]), row(KEYS[number], 1))
    with pytest.raises(StoreError) as refused:
        small.put((2, KEYS[2]), row(KEYS[2], 1))
    assert (refused.value.reason, refused.value.field) == (Reason.RESULT_TOO_LARGE, "top_n")
