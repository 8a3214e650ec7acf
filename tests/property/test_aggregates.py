"""Aggregates: equal to exact arithmetic, and the same bytes whatever the order of the records (rules Q11, Q12)."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from functools import partial
from itertools import count

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.stored import StoredStatistics, header, payloads
from sow_server.engine.values.fields import number_of
from sow_server.engine.values.model import NEVER, TopicSettings
from sow_server.filters.aggregate_values import Count, Sum, clean
from sow_server.filters.restriction import UNRESTRICTED
from sow_server.query.aggregating import Aggregator, aggregating
from sow_server.query.ordering import Ranking, sort_key
from sow_server.query.sort_memory import SortMemory, SortRoom

FLOATS = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([0.1, 0.2, 0.3, -0.1, 1e16, -1e16, 1e300, -1e300, 1.5, 5e-324, -0.0, 1e308, -1e308]),
)
NUMBERS = st.one_of(st.integers(-(2**70), 2**70), FLOATS, st.integers(-3, 3))
SCALARS = st.one_of(NUMBERS, st.none(), st.booleans(), st.sampled_from(["", "a", "1", "1.0", "0.1", "x" * 300, "true"]))
VALUES = st.one_of(SCALARS, st.lists(SCALARS, max_size=2), st.just({"a": 1}))


def topic() -> Topic:
    return Topic(1, "t", TopicSettings(), create_time_micros=0, statistics=StoredStatistics())


def stored(document: object) -> bytes:
    payload = msgspec.json.encode(document)
    head = header(origin=0, payload_bytes=len(payload), version=1, publish_time=1, expire_time=NEVER, sequence=1)
    return head + payload


def answer(
    records: Sequence[tuple[bytes, bytes]],
    groups: Sequence[tuple[str, str]],
    items: Sequence[tuple[str, str]],
    *,
    having: str = "",
    order_by: str = "",
    sizes: Sequence[int] = (1000,),
    seconds: float = 0.0,
) -> list[bytes]:
    """The payloads of the results. `sizes`: of the pieces in which the records come. `seconds`: that pass between two
    looks at the clock."""
    asked = aggregating(topic(), groups, items, having, order_by, UNRESTRICTED)
    ticks = count()
    gathering = Aggregator(asked, 7, SortMemory(), clock=lambda: next(ticks) * seconds)
    start = 0
    for piece in range(len(records) + 1):
        size = sizes[piece % len(sizes)]
        some = records[start : start + size]
        if some:
            assert gathering.add([key for key, _ in some], [value for _, value in some]) is SortRoom.GRANTED
        while gathering.busy:
            assert gathering.work() is SortRoom.GRANTED
        start += size
    while gathering.settle() is not None:
        pass
    found = payloads([value for _, _, value in gathering.rows()])
    gathering.close()
    return found


def rounded(value: Fraction, *, whole: bool) -> int | float | None:
    if whole:
        return int(value)
    try:
        return float(value)
    except OverflowError:
        return None


@given(st.lists(NUMBERS, max_size=30), st.randoms(use_true_random=False), st.integers(1, 7))
def test_a_sum_is_that_of_fractions_in_any_order_and_any_pieces(
    values: list[int | float], order: random.Random, size: int
) -> None:
    exact, whole = sum(map(Fraction, values), Fraction()), all(type(value) is int for value in values)
    order.shuffle(values)
    found = Sum()
    for start in range(0, len(values), size):
        found.add(*clean(values[start : start + size]))
    assert found.count == len(values)
    assert repr(found.total) == repr(rounded(exact, whole=whole) if values else None)
    assert found.average == (rounded(exact / len(values), whole=False) if values else None)


@given(st.lists(VALUES, max_size=20), st.lists(VALUES, max_size=20), st.randoms(use_true_random=False))
def test_what_was_taken_back_was_never_there(stay: list[object], leave: list[object], order: random.Random) -> None:
    all_of_them, alone = Sum(), Sum()
    counted, counted_alone = Count(), Count()
    both = [*stay, *leave]
    order.shuffle(both)
    for state in (all_of_them, counted):
        state.add(*clean(both))
        order.shuffle(leave)
        state.take(*clean(leave))
    for state in (alone, counted_alone):
        state.add(*clean(stay))
    assert repr(all_of_them.total) == repr(alone.total)
    assert repr(all_of_them.average) == repr(alone.average)
    assert counted.count == counted_alone.count


def test_a_later_piece_may_need_what_an_earlier_one_would_round_away() -> None:
    """Planted mistake: a sum that is rounded with each piece depends on the order of the records."""
    found = Sum()
    found.add([1e16, 1.0, 0.5, 0.25], {float})
    found.add([-1e16], {float})
    assert found.total == 1.75


def test_infinite_values_are_taken_back_too() -> None:
    found = Sum()
    found.add([math.inf, -math.inf, 1.5], {float})
    assert repr(found.total) == "None"
    found.take([math.inf, -math.inf], {float})
    assert (found.total, found.average) == (1.5, 1.5)


# --- against plain Python --------------------------------------------------------------------------------------------

ITEMS = [
    ("n", "COUNT(*)"),
    ("c", "COUNT(/v)"),
    ("s", "SUM(/v)"),
    ("a", "AVG(/v)"),
    ("lo", "MIN(/v)"),
    ("hi", "MAX(/v)"),
    ("d", "COUNT(DISTINCT /v)"),
    ("both", "SUM(/v) / COUNT(*)"),
]
DOCUMENTS = st.lists(
    st.fixed_dictionaries(
        {"g": st.one_of(SCALARS, st.just(["x"]), st.sampled_from(["b", 2, 2.0]))}, optional={"v": VALUES}
    ),
    max_size=40,
)


def first(value: object) -> object:
    while type(value) is list:
        value = value[0] if value else None
    return value


def text(value: object) -> str | None:
    """Rule K4, by hand."""
    if value is None or isinstance(value, (list, dict)):
        return None
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value)) if abs(value) <= 2**53 else str(int(Decimal(repr(value))))
    return str(value)


def expected(documents: Sequence[dict[str, object]]) -> dict[str, dict[str, object]]:
    groups: dict[str, list[object]] = {}
    for document in documents:
        key = text(document["g"])
        if key is not None:
            groups.setdefault(key, []).append(first(document.get("v")))
    results = {}
    for key, values in groups.items():
        numbers = [number for value in values if (number := number_of(value)) is not None]
        exact = sum(map(Fraction, numbers), Fraction())
        short = [value for value in values if not (isinstance(value, str) and len(value) > 256)]
        ranked = [value for value in short if type(value) in (bool, int, float, str)]
        ranked.sort(key=lambda value: sort_key(value, Ranking.ASCENDING))
        results[key] = {
            "n": len(values),
            "c": sum(value is not None for value in values),
            "s": rounded(exact, whole=all(type(number) is int for number in numbers)) if numbers else None,
            "a": rounded(exact / len(numbers), whole=False) if numbers else None,
            "lo": ranked[0] if ranked else None,
            "hi": ranked[-1] if ranked else None,
            "d": len({text(value) for value in short} - {None}),
        }
    return results


@given(DOCUMENTS, st.randoms(use_true_random=False), st.lists(st.integers(1, 9), min_size=1, max_size=3))
def test_results_are_those_of_a_plain_loop_and_the_same_bytes_in_any_order(
    documents: list[dict[str, object]], order: random.Random, sizes: list[int]
) -> None:
    records = [(b"%03d" % number, stored(document)) for number, document in enumerate(documents)]
    found = answer(records, [("", "/g")], ITEMS)
    order.shuffle(records)
    assert answer(records, [("", "/g")], ITEMS, sizes=sizes, seconds=0.004) == found
    wanted = expected([json.loads(msgspec.json.encode(document)) for document in documents])
    decoded = [json.loads(payload) for payload in found]
    assert len(decoded) == len(wanted)
    for result, key in zip(decoded, sorted(wanted, key=str.encode), strict=True):
        one = wanted[key]
        assert text(result["g"]) == key
        for name in ("n", "c", "s", "a", "lo", "hi", "d"):
            assert result[name] == one[name], (key, name)
            if name in ("n", "c", "s", "a", "d"):
                assert type(result[name]) is type(one[name]), (key, name)


@given(DOCUMENTS, st.randoms(use_true_random=False))
def test_groups_of_several_values_are_the_same_bytes_in_any_order(
    documents: list[dict[str, object]], order: random.Random
) -> None:
    groups = [("", "/g"), ("big", "/v > 1"), ("kind", "COALESCE(/v, 'none')")]
    records = [(b"%03d" % number, stored(document)) for number, document in enumerate(documents)]
    ask = partial(answer, groups=groups, items=ITEMS, having="/n >= 1", order_by="/big DESC, /n, /kind DESC")
    found = ask(records)
    order.shuffle(records)
    assert ask(records, sizes=(3, 1), seconds=0.003) == found
