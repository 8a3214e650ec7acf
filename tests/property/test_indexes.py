"""Entries of indexes have the order of their values, and ranges of them leave none out (catalog/indexes [4])."""

from __future__ import annotations

from hypothesis import assume, example, given
from hypothesis import strategies as st

from sow_server.engine.catalog.indexes import Index, changed_keys, entry_keys, interval
from sow_server.engine.disk.layout import PREFIX_BYTES, TEXT_BYTES_MAX, index_prefix, indexed_keys
from sow_server.engine.values.fields import Kind, Scalar, entries, number_of

INDEX = Index(7, "/a", ("a",), index_prefix(3, 7), complete=True)

near_powers = st.builds(lambda power, off: 2**power + off, st.integers(50, 70), st.integers(-3, 3))
integers = st.one_of(st.integers(-5, 5), near_powers, near_powers.map(lambda number: -number), st.integers())
floats = st.one_of(
    st.floats(allow_nan=False),
    st.sampled_from([0.0, -0.0, 5e-324, -5e-324, 1.5, 2.0**53, 2.0**64, float("inf"), float("-inf")]),
)
numbers = st.one_of(integers, floats)
# Zeros, their neighbours in an entry, and characters on both sides of the surrogates.
characters = st.one_of(st.sampled_from("\0\x01\xffab\ud7ff\ud800\udfff\ue000\U0010ffff"), st.characters())
texts = st.one_of(
    st.text(characters, max_size=6),
    st.builds(
        lambda length, filler, end: filler * length + end,
        st.integers(TEXT_BYTES_MAX // 3 - 2, TEXT_BYTES_MAX + 1),
        st.sampled_from("a\0€"),
        st.text(characters, max_size=3),
    ),
)
keys = st.text(st.sampled_from("\0\x01ab\xff\U0010ffff"), min_size=1, max_size=4).map(str.encode)
scalars = st.one_of(
    st.none(), st.booleans(), numbers, st.just(float("nan")), texts, st.sampled_from(["1", "-2.50", "1e3"])
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.just("b"), inner), max_leaves=5
)


def _entry(kind: Kind, value: Scalar, key: bytes = b"k") -> bytes:
    """The entry of one value, behind the prefix of its index."""
    (entry,) = (entry for entry in entry_keys(INDEX, {"a": value}, key) if entry[PREFIX_BYTES] == kind)
    assert entry.startswith(INDEX.prefix)
    assert entry < INDEX.stop
    return entry[PREFIX_BYTES:]


@given(one=numbers, other=numbers)
@example(one=2**53, other=float(2**53))
@example(one=0.0, other=-0.0)
def test_numbers_stand_in_the_order_of_their_values(one: float, other: float) -> None:
    if one == other:
        assert _entry(Kind.NUMBER, one) == _entry(Kind.NUMBER, other)
    elif one < other:
        assert _entry(Kind.NUMBER, one) <= _entry(Kind.NUMBER, other)
        if abs(one) <= 2**53 and abs(other) <= 2**53:
            assert _entry(Kind.NUMBER, one) < _entry(Kind.NUMBER, other), "they are exact as floats"


@given(one=texts, other=texts)
def test_texts_stand_in_the_order_of_their_code_points(one: str, other: str) -> None:
    low, high = sorted([one, other])
    assert _entry(Kind.TEXT, low) <= _entry(Kind.TEXT, high)
    assert len(_entry(Kind.TEXT, low)) <= 2 * TEXT_BYTES_MAX + 4, "however long it is"
    if low != high and all(len(text.encode("utf-8", "surrogatepass")) <= TEXT_BYTES_MAX for text in (low, high)):
        assert _entry(Kind.TEXT, low) < _entry(Kind.TEXT, high), "they are there whole"


@given(
    found=st.lists(st.tuples(st.one_of(texts, numbers, st.booleans()), keys), min_size=1, max_size=8),
)
def test_the_record_keys_come_back(found: list[tuple[Scalar, bytes]]) -> None:
    by_entry = {entry: key for value, key in found for entry in entry_keys(INDEX, {"a": value}, key)}
    ordered = sorted(by_entry)
    assert indexed_keys(ordered) == [by_entry[entry] for entry in ordered]


@given(one=texts, other=texts, one_key=keys, other_key=keys)
def test_two_records_have_no_entry_in_common(one: str, other: str, one_key: bytes, other_key: bytes) -> None:
    assume(one_key != other_key)
    assert entry_keys(INDEX, {"a": one}, one_key).isdisjoint(entry_keys(INDEX, {"a": other}, other_key))


@given(
    kind_and_values=st.one_of(
        st.tuples(st.just(Kind.NUMBER), st.tuples(numbers, st.none() | numbers, st.none() | numbers)),
        st.tuples(st.just(Kind.TEXT), st.tuples(texts, st.none() | texts, st.none() | texts)),
        st.tuples(st.just(Kind.BOOLEAN), st.tuples(*[st.booleans()] * 3)),
    ),
    key=keys,
)
def test_a_range_holds_the_entries_of_the_values_in_it(
    kind_and_values: tuple[Kind, tuple[Scalar, Scalar | None, Scalar | None]], key: bytes
) -> None:
    kind, (value, low, high) = kind_and_values
    start, stop = interval(kind, low, high)
    within = (low is None or low <= value) and (high is None or value <= high)  # type: ignore[operator]  # of one kind
    entry = _entry(kind, value, key)
    if within:
        assert start <= entry < stop
    elif _exact(value) and _exact(low) and _exact(high):
        assert not start <= entry < stop
    for other in Kind:
        if other is not kind:
            assert interval(other, None, None)[1] <= start or stop <= interval(other, None, None)[0]


def _exact(value: Scalar | None) -> bool:
    """Whether an entry holds all of a value."""
    if type(value) is str:
        return len(value.encode("utf-8", "surrogatepass")) <= TEXT_BYTES_MAX
    return value is None or abs(value) <= 2**53  # type: ignore[arg-type]  # numbers are left


@given(before=st.none() | values, after=st.none() | values, key=keys)
@example(before=1, after=True, key=b"k")
@example(before=[1], after=[True], key=b"k")
@example(before="1", after=1, key=b"k")
@example(before=1, after=1.0, key=b"k")
def test_a_change_brings_and_removes_just_the_entries_that_differ(before: object, after: object, key: bytes) -> None:
    old, new = {"a": before}, {"a": after}
    gone, come = changed_keys(INDEX, old, new, key)
    had, has = entry_keys(INDEX, old, key), entry_keys(INDEX, new, key)
    assert (set(gone), set(come)) == (had - has, has - had)
    assert set(changed_keys(INDEX, None, new, key)[1]) == has
    assert set(changed_keys(INDEX, new, None, key)[0]) == has


@given(value=values)
def test_every_scalar_of_the_field_and_the_number_of_a_numeric_text_has_an_entry(value: object) -> None:
    assert len(entry_keys(INDEX, {"a": value}, b"k")) <= len(entries({"a": value}, ("a",)))
    for found in _scalars(value):
        kind = Kind.BOOLEAN if type(found) is bool else Kind.TEXT if type(found) is str else Kind.NUMBER
        wanted = {_entry(kind, found)}
        if kind is Kind.TEXT and (number := number_of(found)) is not None:
            wanted.add(_entry(Kind.NUMBER, number))
        assert {INDEX.prefix + entry for entry in wanted} <= entry_keys(INDEX, {"a": value}, b"k")


def _scalars(value: object) -> list[Scalar]:
    if isinstance(value, list):
        return [found for element in value for found in _scalars(element)]
    return [value] if isinstance(value, (bool, int, float, str)) and value == value else []
