"""The expiry horizon: records by when they fall due (rule L22)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.disk.layout import REARM_KEY
from sow_server.engine.disk.rocks import META
from sow_server.engine.stored import DUE_TOPIC
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import Expiration, TopicSettings
from sow_server.query import horizon
from sow_server.query.horizon import Horizon
from sow_server.services import horizons
from tests.support.stores.stores import BINARY, MINUTE, SECOND, Rig

EDGES = (10 * SECOND, MINUTE, 10 * MINUTE)
ENABLED = TopicSettings(expiration=Expiration.ENABLED, message_type=BINARY.message_type)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    for name in ("a", "b"):
        rig.create_topic(name, ENABLED)
    yield rig
    rig.close()


def counted(rig: Rig, *names: str, exact: bool = False, edges: Sequence[int] = EDGES) -> Horizon:
    found = Horizon(rig.store.cuts, [rig.topic(name) for name in names], edges, exact=exact)
    while not found.done:
        found.read()
    found.close()
    return found


def due(rig: Rig, name: str, *, exact: bool = False) -> list[int]:
    (found,) = counted(rig, name, exact=exact).counted.values()
    return found.due


def with_former_times(rig: Rig) -> None:
    """Records whose entries have former times, which the sweep has not met yet."""
    for key, *lifetimes in (
        ("extended", SECOND, 5 * MINUTE),
        ("shortened", 5 * MINUTE, 20 * SECOND),
        ("persisted", SECOND, None),
        ("both", 5 * MINUTE, SECOND, 9 * MINUTE),
    ):
        for ttl in lifetimes:
            rig.put("a", key, ttl=ttl)
    rig.put("a", "deleted", ttl=2 * SECOND)
    rig.delete("a", "deleted")


@pytest.mark.parametrize("exact", [False, True])
def test_records_are_counted_by_when_they_fall_due(rig: Rig, exact: bool) -> None:
    """L22: a record that falls due at an end counts before it; overdue ones are apart, and never is nowhere."""
    for key, ttl in (("now", 1), ("10s", 10 * SECOND), ("11s", 11 * SECOND), ("5m", 5 * MINUTE), ("1h", 60 * MINUTE)):
        rig.put("a", key, ttl=ttl)
    rig.put("a", "never")
    rig.put("b", "other", ttl=SECOND)
    rig.time.tick(1)
    found = counted(rig, "a", exact=exact, edges=(10 * SECOND - 1, MINUTE, 10 * MINUTE))
    (of_a,) = found.counted.values()
    assert of_a.due == [1, 1, 1, 1]
    assert of_a.next_micros == found.now_micros
    assert found.upto_micros == found.now_micros + 10 * MINUTE


@pytest.mark.parametrize("exact", [False, True])
def test_records_are_looked_at_where_the_index_has_their_former_times(rig: Rig, exact: bool) -> None:
    """L22, horizon [1]: `sow due` told 82,800 where there were 32,853 records, whose lifetimes had been renewed."""
    with_former_times(rig)
    found = counted(rig, "a", exact=exact)
    assert found.counted[rig.topic("a").prefix].due == [0, 0, 1, 2]
    assert found.exact_upto_micros == found.upto_micros == found.now_micros + 10 * MINUTE


@pytest.mark.parametrize(
    ("looks", "upto", "expected"),
    [
        (0, SECOND - 1, [0, 3, 0, 1, 2, 0]),  # all by entries
        (1, SECOND - 1, [0, 2, 0, 1, 1, 1]),  # "both" at its own time, and not at its second entry
        (2, SECOND - 1, [0, 1, 0, 1, 2, 1]),  # "extended", too
        (3, 20 * SECOND - 1, [0, 0, 0, 1, 2, 1]),  # "persisted" is nowhere
        (4, 5 * MINUTE - 1, [0, 0, 0, 1, 2, 1]),
        (6, 10 * MINUTE, [0, 0, 0, 1, 1, 1]),  # all records
    ],
)
def test_behind_so_many_records_entries_are_counted_and_the_answer_says_so(
    rig: Rig, looks: int, upto: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """horizon [1]: what is told to be exact is, and no record that was looked at counts again by an entry."""
    monkeypatch.setattr(horizon, "RECORDS_MAX", looks)
    monkeypatch.setattr(horizon, "PIECE_RECORDS", 2)
    with_former_times(rig)
    edges = [SECOND - 1, SECOND, 3 * SECOND, MINUTE, 6 * MINUTE, 10 * MINUTE]
    found = counted(rig, "a", edges=edges)
    assert found.counted[rig.topic("a").prefix].due[1:] == expected
    assert found.exact_upto_micros - found.now_micros == upto


@pytest.mark.parametrize("seed", range(4))
def test_exact_counts_are_those_of_the_records(rig: Rig, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    program = random.Random(seed)
    monkeypatch.setattr(horizon, "PIECE_RECORDS", 3)
    monkeypatch.setattr(horizon, "PIECE_ENTRIES", 3)
    for _ in range(150):
        name, key = program.choice("ab"), str(program.randrange(20))
        kind = program.randrange(6)
        if kind == 0:
            rig.delete(name, key)
        elif kind == 1:
            rig.time.tick(program.randrange(8) * SECOND)
            if program.random() < 0.5:
                rig.store.sweep()
        else:
            rig.put(name, key, ttl=program.choice([None, 2 * SECOND, 30 * SECOND, 5 * MINUTE, 60 * MINUTE]))
    found = counted(rig, "a", "b", exact=seed % 2 == 0)
    for one in found.counted.values():
        stamps = [record.expire_time_micros - found.now_micros for record in rig.stored(one.topic.name).values()]
        expected = [0, 0, 0, 0]
        for stamp in stamps:
            for place, end in enumerate((0, *EDGES)):
                if stamp <= end:
                    expected[place] += 1
                    break
        assert one.due == expected
        assert one.next_micros == min(
            (stamp + found.now_micros for stamp in stamps if stamp <= EDGES[-1]), default=None
        )


@pytest.mark.parametrize("exact", [False, True])
def test_a_count_ends_after_so_many_entries_of_its_own_topics(
    rig: Rig, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """horizon [2]: where it ends tells nothing of other topics (A4)."""
    monkeypatch.setattr(horizon, "ENTRIES_MAX", 3)
    monkeypatch.setattr(horizon, "RECORDS_MAX", 3)
    for number in range(1, 6):
        rig.put("a", str(number), ttl=number * SECOND)
    alone = counted(rig, "a", exact=exact)
    for number in range(1, 6):
        rig.put("b", str(number), ttl=number * SECOND - 1)
    beside = counted(rig, "a", exact=exact)
    for found in (alone, beside):
        (of_a,) = found.counted.values()
        assert of_a.due == [0, 3, 0, 0]
        assert found.upto_micros == found.now_micros + 4 * SECOND - 1


def test_topics_without_expiration_have_nothing_due(rig: Rig) -> None:
    rig.put("a", "1", ttl=SECOND)
    rig.alter_topic("a", expiration=Expiration.DISABLED)
    assert due(rig, "a") == [0, 0, 0, 0]


def test_finding_the_next_of_each_topic_takes_time_in_proportion_to_the_entries(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each topic's first entry was searched from the first one on, so 5,000 topics held a reader thread for half a
    second, and twice as many for two."""
    for number in range(40):
        rig.create_topic(f"t{number}", ENABLED)
        rig.put(f"t{number}", "1", ttl=SECOND + number)
    looked_at = 0

    def topic_of(entry: bytes) -> bytes:
        nonlocal looked_at
        looked_at += 1
        return entry[DUE_TOPIC]

    monkeypatch.setattr(horizon, "_topic_of", topic_of)
    found = counted(rig, *[f"t{number}" for number in range(40)])
    assert looked_at <= 2 * 40
    assert [one.next_micros for one in found.counted.values()] == [found.now_micros + SECOND + n for n in range(40)]


def test_a_count_of_an_incomplete_index_says_so_even_if_it_is_complete_meanwhile(rig: Rig) -> None:
    """L22: the count is of one instant. The flag was asked for at its end, when the index had every record."""
    rig.alter_topic("a", expiration=Expiration.DISABLED)
    rig.put("a", "1", ttl=SECOND)
    rig.submit_alter("a", lambda _: None, {"expiration": Expiration.ENABLED})
    rig.turn()
    found = Horizon(rig.store.cuts, [rig.topic("a"), rig.topic("b")], EDGES, exact=False)
    while rig.rows(META, REARM_KEY, REARM_KEY + b"\xff"):
        rig.turn()
    while not found.done:
        found.read()
    found.close()
    assert [(one.due, one.incomplete) for one in found.counted.values()] == [
        ([0, 0, 0, 0], True),
        ([0, 0, 0, 0], False),
    ]
    (complete,) = counted(rig, "a").counted.values()
    assert (complete.due, complete.incomplete) == ([0, 1, 0, 0], False)


def test_an_answer_has_a_bounded_number_of_counts(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """L22: 1,000 spans of each of 10,000 topics were ten million counts, on the event loop."""
    monkeypatch.setattr(horizons, "CELLS_MAX", 4)
    topics = [rig.topic(name) for name in "ab"]
    with ThreadPoolExecutor(1) as readers:

        def answer(topics: Sequence[Topic], edges: Sequence[int]) -> list[list[int]]:
            found = asyncio.run(horizons.counted(rig.store.cuts, readers, topics, edges, exact=False))
            return [list(one.due) for one in found.topics]

        assert answer(topics, (SECOND, MINUTE)) == [[0, 0], [0, 0]]
        with pytest.raises(StoreError) as refused:
            answer(topics, EDGES)
        assert (refused.value.reason, refused.value.field) == (Reason.INVALID_ARGUMENT, "edge_micros")
        assert answer([], EDGES) == []
