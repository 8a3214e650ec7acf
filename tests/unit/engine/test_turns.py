"""Turns of callers (rule N7)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sow_server.engine.values.turns import IDLE_MAX, Turns


def served(turns: Turns[str], count: int, cost: float = 1.0) -> list[str]:
    found = []
    for _ in range(count):
        caller = turns.next_caller()
        found.append(turns.take(caller))
        turns.charge(caller, cost)
    return found


def test_a_caller_with_many_items_gives_the_others_their_turn() -> None:
    """values/turns [1]"""
    turns: Turns[str] = Turns()
    for number in range(100):
        turns.put("much", f"much-{number}")
    assert served(turns, 3) == ["much-0", "much-1", "much-2"]
    turns.put("little", "little-0")
    turns.put("little", "little-1")
    assert served(turns, 4)[:3] in (["little-0", "much-3", "little-1"], ["little-0", "little-1", "much-3"])
    assert len(turns) == 95


def test_a_pause_gives_no_credit() -> None:
    """values/turns [2]"""
    turns: Turns[str] = Turns()
    turns.put("idle", "idle-0")
    for number in range(100):
        turns.put("busy", f"busy-{number}")
    served(turns, 60)
    for number in range(10):
        turns.put("idle", f"idle-{number}")
    assert sum(item.startswith("busy") for item in served(turns, 10)) >= 4


def test_an_expensive_item_is_paid_for() -> None:
    """values/turns [1]: by cost, not by items."""
    turns: Turns[str] = Turns()
    turns.put("a", "a-0")
    turns.put("b", "b-0")
    first = turns.next_caller()
    turns.take(first)
    turns.charge(first, 50.0)
    other = "b" if first == "a" else "a"
    for number in range(20):
        turns.put("a", f"a-{number}")
        turns.put("b", f"b-{number}")
    assert all(item.startswith(other) for item in served(turns, 20))


def test_an_item_that_is_put_back_comes_first() -> None:
    turns: Turns[str] = Turns()
    turns.put("a", "a-0")
    turns.put("a", "a-1")
    item = turns.take("a")
    turns.put_back("a", item)
    assert turns.first("a") == "a-0"
    assert len(turns) == 2
    assert served(turns, 2) == ["a-0", "a-1"]


def test_idle_callers_are_forgotten() -> None:
    """values/turns [3]"""
    turns: Turns[str] = Turns()
    turns.put("stays", "stays")
    for number in range(5 * IDLE_MAX):
        turns.put(f"c{number}", "x")
        turns.take(f"c{number}")
        turns.charge(f"c{number}", 1.0)
    assert len(turns._had) <= IDLE_MAX + 2
    turns.take("stays")
    assert not turns._had


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5)), min_size=1, max_size=60))
def test_nobody_waits_for_more_than_a_turn_of_each_other_caller(items: list[tuple[str, int]]) -> None:
    """While callers have items, no one is behind another by more than the dearest item, and each keeps its order."""
    turns: Turns[tuple[int, int]] = Turns()
    for number, (caller, cost) in enumerate(items):
        turns.put(caller, (number, cost))
    had = dict.fromkeys("abc", 0)
    order: dict[str, list[int]] = {name: [] for name in "abc"}
    while len(turns):
        waiting = [name for name in "abc" if sum(c == name for c, _ in items) > len(order[name])]
        assert max(had[name] for name in waiting) - min(had[name] for name in waiting) <= 5
        caller = turns.next_caller()
        number, cost = turns.take(caller)
        turns.charge(caller, cost)
        had[caller] += cost
        order[caller].append(number)
    assert all(numbers == sorted(numbers) for numbers in order.values())
