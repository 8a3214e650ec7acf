"""Numbers that lie closer together than floats: comparisons, indexes, keys and orders agree with Python's fractions."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Final, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sow_server.engine.values.model import MessageType, Publish, TopicSettings
from sow_server.filters import Meta, compile_filter, parse
from sow_server.query.filtering import record_filter
from sow_server.query.ordering import order
from sow_server.query.scan import Query, Scan
from tests.support.oracles.examples import examples
from tests.support.stores.stores import Rig

BASES: Final = (0, 2**53, 2**63, 2**64, 10**23, 10**30, 123456789012345680000)
COMPARISONS: Final[dict[str, Callable[[Fraction, Fraction], bool]]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
TOPICS: Final = [
    (message_type, index) for message_type in (MessageType.JSON, MessageType.NVFIX) for index in ((), ("/n",))
]


class Number(NamedTuple):
    """A number in one of its forms."""

    text: str

    @property
    def value(self) -> Fraction:
        return Fraction(self.pythons)

    @property
    def pythons(self) -> int | float:
        return int(self.text) if self.is_integer else float(self.text)

    @property
    def is_integer(self) -> bool:
        return self.text.lstrip("-").isdigit()

    @property
    def key(self) -> str:
        """Rule K4."""
        number = self.pythons
        if isinstance(number, float) and number.is_integer():
            return str(int(Decimal(repr(number))))
        return repr(number)


def near(base: int, steps: int) -> float:
    number = float(base)
    for _ in range(abs(steps)):
        number = math.nextafter(number, math.copysign(math.inf, steps))
    return number


signs = st.sampled_from([1, -1])
integers = st.builds(
    lambda sign, base, away: str(sign * (base + away)), signs, st.sampled_from(BASES), st.integers(-3, 3)
)
forms = st.sampled_from([repr, "{:.17e}".format, "{:.1f}".format, "{:.17E}".format])
floats = st.builds(
    lambda sign, base, steps, form: form(sign * near(base, steps)),
    signs,
    st.sampled_from(BASES[1:]),
    st.integers(-2, 2),
    forms,
)
fractions = st.sampled_from(["0.1", "-0.5", "1e-7", "0.10000000000000001", "1.5", "0.30000000000000004"])
# The digits of a float, as a language without exponents writes it.
expanded = floats.map(lambda text: str(int(Decimal(repr(float(text))))))
numbers: st.SearchStrategy[Number] = st.one_of(integers, integers, floats, expanded, fractions).map(Number)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    rig = Rig(tmp_path_factory.mktemp("numbers"))
    yield rig
    rig.close()


def document(message_type: MessageType, number: Number) -> bytes:
    form = b'{"n":%b}' if message_type is MessageType.JSON else b"n=%b\x01"
    return form % number.text.encode()


def ask(rig: Rig, query: Query) -> list[str]:
    """The keys of the answer."""
    found = Scan(rig.store.cuts, query)
    keys: list[str] = []
    try:
        while (batch := found.next_batch()) is not None:
            keys += [key.decode() for key in batch.keys]
        return keys
    finally:
        found.close()


def conditions(one: Number, other: Number) -> dict[str, Callable[[Number], bool]]:
    """Filters on `/n`, and which numbers they take."""
    low, high = one, other
    found: dict[str, Callable[[Number], bool]] = {}
    for sign, test in COMPARISONS.items():
        found[f"/n {sign} {one.text}"] = lambda number, test=test: test(number.value, one.value)  # type: ignore[misc]  # of a default
        found[f"{one.text} {sign} /n"] = lambda number, test=test: test(one.value, number.value)  # type: ignore[misc]  # of a default
        found[f"NOT /n {sign} {one.text}"] = lambda number, test=test: not test(number.value, one.value)  # type: ignore[misc]  # of a default
        found[f"(/n {sign} {one.text}) = true"] = found[f"/n {sign} {one.text}"]  # the slow path
    found |= {
        f"/n IN ({one.text}, {other.text})": lambda number: number.value in (one.value, other.value),
        f"/n NOT IN ({one.text}, {other.text})": lambda number: number.value not in (one.value, other.value),
        f"/n IN ('x', {one.text})": lambda number: number.value == one.value,
        f"/n BETWEEN {low.text} AND {high.text}": lambda number: low.value <= number.value <= high.value,
        f"/n NOT BETWEEN {low.text} AND {high.text}": lambda number: not low.value <= number.value <= high.value,
        f"/n + 0 = {one.text}": lambda number: number.value == one.value,
        f"-/n = -({one.text})": lambda number: number.value == one.value,
        f"ABS(/n) = ABS({one.text})": lambda number: abs(number.value) == abs(one.value),
        f"COALESCE(/missing, /n) = {one.text}": lambda number: number.value == one.value,
    }
    if one.is_integer:
        # With a float it is done in floats, which may round.
        found[f"/n + {other.text} = {one.text} + {other.text} AND /n IN ({one.text})"] = lambda number: (
            number.value == one.value and number.pythons + other.pythons == one.pythons + other.pythons
        )
    return found


@given(st.lists(numbers, min_size=4, max_size=8), numbers, numbers, st.sampled_from(TOPICS))
@settings(max_examples=examples(40))
def test_filters_and_orders_go_by_the_exact_value(
    rig: Rig, stored: Sequence[Number], one: Number, other: Number, kind: tuple[MessageType, tuple[str, ...]]
) -> None:
    message_type, index = kind
    stored = [*stored, one]
    topic = rig.create_topic("t", TopicSettings(message_type=message_type, index=index))
    try:
        for place, number in enumerate(stored):
            rig.run(Publish("t", [document(message_type, number)], [str(place)]))
        for text, holds in conditions(one, other).items():
            query = Query(topic, filter=record_filter(topic, text, 0))
            assert ask(rig, query) == [str(place) for place, number in enumerate(stored) if holds(number)], text
        for text, sign in (("/n", 1), ("/n DESC", -1)):
            expected = sorted(range(len(stored)), key=lambda place: (sign * stored[place].value, place))
            assert ask(rig, Query(topic, order=order(topic, text))) == [str(place) for place in expected]
    finally:
        rig.delete_topic("t")


@pytest.mark.slow
@given(numbers, numbers, numbers)
@example(Number("-9007199254740992.0"), Number("-9007199254740992"), Number("9007199254740993"))
@settings(max_examples=examples(400))
def test_the_compiled_filter_takes_what_python_takes(stored: Number, one: Number, other: Number) -> None:
    topic_formats = {"json": int(stored.text) if stored.is_integer else float(stored.text), "text": stored.text}
    for text, holds in conditions(one, other).items():
        matches = compile_filter(parse(text))
        for value in topic_formats.values():
            assert matches({"n": value}, META) is holds(stored), (text, value)
            assert matches({"n": [value]}, META) is holds(stored), (text, [value])


META: Final = Meta("k", 1, 1, None, "t", 1)


@pytest.mark.slow
@given(st.lists(numbers, min_size=3, max_size=8), numbers, st.booleans())
@settings(max_examples=examples(40))
def test_a_number_in_any_form_has_one_key_and_is_found_by_it(
    rig: Rig, stored: Sequence[Number], one: Number, indexed: bool
) -> None:
    topic = rig.create_topic("t", TopicSettings(key=("/n",), index=("/n",) if indexed else ()))
    try:
        for number in [*stored, one]:
            rig.run(Publish("t", [document(MessageType.JSON, number)]))
        keys = sorted({number.key for number in [*stored, one]}, key=str.encode)
        assert ask(rig, Query(topic)) == keys
        for number in [*stored, one]:
            others = [key for key in keys if key != number.key]
            for text, expected in {
                f"/n = {number.text}": [number.key],
                f"/n = '{number.key}'": [number.key],
                f"/n = '{number.key}' OR false": [number.key],
                f"(/n = {number.text}) = true": [number.key],
                f"/n IN ({number.text}, 'x')": [number.key],
                f"/n IN ({number.text})": [number.key],
                f"/n != {number.text}": others,
                f"NOT /n = {number.text}": others,
                f"/n NOT IN ({number.text}, 17)": others,
            }.items():
                assert ask(rig, Query(topic, filter=record_filter(topic, text, 0))) == expected, text
    finally:
        rig.delete_topic("t")
