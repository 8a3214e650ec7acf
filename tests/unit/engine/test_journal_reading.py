"""Readers of the journal see every journaled change, from any position, one topic or the total order (J1)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sow_server.engine.stored import Changes, Column, decode_changes, decode_entry, encode_changes
from sow_server.engine.values.model import Delete, Publish, Touch
from tests.support.stores.stores import MINUTE, SECOND, Rig


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    rig.create_topic("orders")
    rig.create_topic("quotes")
    yield rig
    rig.close()


def sequences(chunks: Iterator[Changes]) -> list[list[int]]:
    return [list(range(chunk.first_sequence, chunk.first_sequence + len(chunk.keys))) for chunk in chunks]


def some_traffic(rig: Rig) -> None:
    """orders 1 to 3, quotes 4, orders 5; orders 6 and 7; quotes 8."""
    rig.run_together(
        [Publish("orders", [b"x"] * 3, list("abc")), Publish("quotes", [b"y"], ["a"]), Delete("orders", ["b"])]
    )
    rig.run(Publish("orders", [b"z"] * 2, list("cd")))
    rig.run(Publish("quotes", [b"y"], ["b"]))


def test_a_topic_is_read_from_any_position_to_any_other(rig: Rig) -> None:
    some_traffic(rig)
    with closing(rig.store.cuts.journal()) as cut:
        orders = rig.topic("orders")
        assert sequences(cut.changes(orders, 0, 9)) == [[1, 2, 3], [5], [6, 7]]
        # A chunk that reaches over the position comes whole.
        assert sequences(cut.changes(orders, 2, 9)) == [[1, 2, 3], [5], [6, 7]]
        assert sequences(cut.changes(orders, 3, 9)) == [[5], [6, 7]]
        assert sequences(cut.changes(orders, 4, 5)) == [[5]]
        assert sequences(cut.changes(orders, 6, 9)) == [[6, 7]]
        assert sequences(cut.changes(orders, 7, 9)) == []
        assert sequences(cut.changes(rig.topic("quotes"), 0, 9)) == [[4], [8]]


def test_the_total_order_is_read_from_any_position_to_any_other(rig: Rig) -> None:
    some_traffic(rig)
    with closing(rig.store.cuts.journal()) as cut:

        def firsts(after: int, upto: int) -> list[int]:
            return [commit.first_sequence for commit in cut.commits(after, upto)]

        assert firsts(0, 9) == [1, 6, 8]
        assert firsts(4, 9) == [1, 6, 8]
        assert firsts(5, 9) == [6, 8]
        assert firsts(5, 7) == [6]
        assert firsts(8, 9) == []
        (run, _, _) = next(cut.commits(0, 9)).runs
        found = cut.chunk(rig.topic("orders"), run.first_sequence)
        assert found is not None
        assert list(found.keys) == [b"a", b"b", b"c"]
        assert cut.chunk(rig.topic("orders"), 2) is None


def test_one_change_is_found_by_its_sequence(rig: Rig) -> None:
    some_traffic(rig)
    rig.run(Touch("orders", ["a"]))
    with closing(rig.store.cuts.journal()) as cut:
        orders, quotes = rig.topic("orders"), rig.topic("quotes")
        found = [cut.entry(orders, sequence) for sequence in range(10)]
        keys = [None if entry is None else (entry.key, entry.payload) for entry in found]
        x, z = b"x", b"z"
        assert keys == [None, (b"a", x), (b"b", x), (b"c", x), None, (b"b", x), (b"c", z), (b"d", z), None, (b"a", x)]
        assert cut.entry(quotes, 4) is not None
        assert cut.entry(quotes, 5) is None
        assert cut.entry(quotes, 3) is None


def test_pruned_changes_are_gone_and_the_floor_is_above_them(rig: Rig) -> None:
    some_traffic(rig)
    rig.time.tick(20 * MINUTE)
    rig.prune()
    rig.put("orders", "e")
    with closing(rig.store.cuts.journal()) as cut:
        orders = rig.topic("orders")
        assert cut.floors == {orders.id: 7, rig.topic("quotes").id: 8}
        assert sequences(cut.changes(orders, 0, 99)) == [[9]]
        assert cut.entry(orders, 6) is None


def test_a_cut_does_not_change(rig: Rig) -> None:
    some_traffic(rig)
    with closing(rig.store.cuts.journal()) as cut:
        rig.put("orders", "e")
        rig.time.tick(20 * MINUTE)
        rig.prune()
        assert sequences(cut.changes(rig.topic("orders"), 0, 99)) == [[1, 2, 3], [5], [6, 7]]


def test_the_last_commit_before_a_time_is_found(rig: Rig) -> None:
    """However many commits there are, and whatever sequences lie between them."""
    with closing(rig.store.cuts.journal()) as cut:
        assert cut.last_before(rig.clock.now_micros()) is None
    rig.create_topic("quiet", journal=False)
    lasts: list[tuple[int, int]] = []
    for number in range(40):
        rig.time.tick(SECOND)
        rig.run(Publish("orders", [b"x"] * (1 + number % 4), [str(key) for key in range(1 + number % 4)]))
        lasts.append((rig.clock.now_micros(), rig.store.writer.last_sequence))
        rig.put("quiet", "a")
    with closing(rig.store.cuts.journal()) as cut:
        assert cut.last_before(lasts[0][0]) is None
        for (time, last), (later, _) in zip(lasts, [*lasts[1:], (lasts[-1][0] + SECOND, 0)], strict=True):
            assert cut.last_before(time + 1) == cut.last_before(later) == last


columns = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=7, max_size=7)


@given(
    rows=st.lists(
        st.tuples(st.integers(1, 4), columns, st.binary(min_size=1, max_size=5), st.binary(max_size=20)), min_size=1
    ),
    alike=st.booleans(),
    atomic=st.booleans(),
)
def test_a_change_decodes_alone_as_among_others(
    rows: list[tuple[int, list[int], bytes, bytes]], alike: bool, atomic: bool
) -> None:
    if alike:  # columns that are constant, or count up, are written as such
        rows = [(kind, [1, index, *rows[0][1][2:]], key, payload) for index, (kind, _, key, payload) in enumerate(rows)]
    made = [Column([numbers[column] for _, numbers, _, _ in rows]) for column in range(7)]
    version, publish_time, expire_time, origin, previous, removed_version, removed_origin = made
    changes = Changes(
        5,
        77,
        bytes(kind for kind, _, _, _ in rows),
        version,
        publish_time,
        expire_time,
        origin,
        previous,
        removed_version,
        removed_origin,
        [key for _, _, key, _ in rows],
        [payload for _, _, _, payload in rows],
        atomic,
    )
    value = encode_changes(changes)
    whole = decode_changes(5, value)
    assert whole.atomic == atomic
    for index in range(len(rows)):
        assert decode_entry(value, index) == (
            whole.change[index],
            whole.version[index],
            whole.publish_time_micros[index],
            whole.expire_time_micros[index],
            whole.origin[index],
            whole.keys[index],
            whole.payloads[index],
        )
