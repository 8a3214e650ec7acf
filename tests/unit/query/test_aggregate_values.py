"""The states of aggregates: clean columns, and the memory that they tell of (aggregate_values [3])."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import pytest

from sow_server.filters.aggregate_values import Count, Distinct, Extreme, State, Sum, clean


@pytest.mark.parametrize("values", [[math.nan], [math.nan, 1.5], [math.inf, -math.inf, math.nan], [math.nan, 2, True]])
def test_a_float_that_is_no_number_is_null(values: list[object]) -> None:
    """msgpack and bson have it. `clean` has to tell of the nulls that it makes: the states go by the types."""
    column, types = clean(values)
    assert set(map(type, column)) <= types
    count, total, least = Count(), Sum(), Extreme(greatest=False, numeric=False)
    for state in (count, total, least):
        state.add(column, types)
    numbers = [value for value in values if value == value]
    assert count.count == len(numbers)
    assert total.total == ({2: 1.5, 4: None}.get(len(values)) if 2 not in values else 2)
    assert least.value == min(numbers, key=lambda value: (type(value) is not bool, value), default=None)


def memory(found: object) -> int:
    """Of a state, or of what it has."""
    if found is None or (isinstance(found, int) and abs(found) < 256):
        return 0  # Python has one of each
    size = sys.getsizeof(found)
    if isinstance(found, (list, set)):
        size += sum(map(memory, found))
    for name in getattr(type(found), "__slots__", ()):
        size += memory(getattr(found, name))
    return size


PIECES: Sequence[Sequence[object]] = [
    [1.5],
    [7, 8],
    ["a" * 256],
    ["\U0001f600" * 64, "b"],
    [1e300, 1.1e-300, 1e-100],
    [1e308, 1e308, 5e-324],
    [10**300, 0.1],
    [None, "1e-7", "x" * 300],
]


@pytest.mark.parametrize(
    "state", [Count(), Sum(), Distinct(), Extreme(greatest=False, numeric=False), Extreme(greatest=True, numeric=True)]
)
def test_a_state_has_no_more_memory_than_it_tells(state: State) -> None:
    """Planted mistake: the memory of a group is that of an empty one, and three times the bound fits."""
    told = state.BYTES
    for piece in PIECES:
        told += state.add(*clean(piece))
        if isinstance(state, Sum):
            assert state.total != 0
            assert state.average != 0
        assert memory(state) <= told, piece
