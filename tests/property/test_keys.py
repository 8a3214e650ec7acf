"""Composite keys never collide, whatever is in their fields (keys [1])."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sow_client._keys import key_text
from sow_server.engine.values.keys import canonical_text, escape, join, parse_path, path_text, split

# Mostly the characters that matter, so that collisions would be found.
TEXT = st.text(alphabet="|\\ab", max_size=5) | st.text(max_size=20)
FIELDS = st.lists(TEXT, min_size=1, max_size=4)
STEP = st.text(alphabet="ab[/ ]1\\\n", max_size=6)


@given(FIELDS, FIELDS)
def test_different_fields_give_different_keys(one: list[str], other: list[str]) -> None:
    """keys [1]: also for different numbers of fields."""
    assert (join(one) == join(other)) == (one == other)


@given(FIELDS)
def test_a_key_gives_its_fields_back(fields: list[str]) -> None:
    assert split(join(fields)) == fields


@given(TEXT)
def test_an_escaped_text_holds_no_bare_separator(text: str) -> None:
    assert split(escape(text)) == [text]


@given(st.integers())
def test_an_integral_float_has_the_text_of_its_integer(number: int) -> None:
    if abs(number) <= 2**53:
        assert canonical_text(float(number)) == canonical_text(number)
    assert canonical_text(number) == str(number)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_the_text_of_a_float_is_that_float(number: float) -> None:
    assert float(canonical_text(number)) == number


@given(st.floats(allow_nan=False) | st.integers(-(2**60), 2**60), st.floats(allow_nan=False) | st.integers(-9, 9))
def test_numbers_share_a_text_exactly_when_they_are_equal(one: float, other: float) -> None:
    assert (canonical_text(one) == canonical_text(other)) == (one == other)


@given(st.lists(STEP, min_size=1, max_size=4))
def test_a_path_is_written_so_that_it_is_read_back(steps: list[str]) -> None:
    """With any names, a delta subscription gives the paths of the fields that are gone (rule S3)."""
    assert parse_path(path_text(tuple(steps))) == tuple(steps)


SCALAR = TEXT | st.integers() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(SCALAR, min_size=1, max_size=4))
def test_the_client_and_the_server_make_the_same_key_of_the_same_values(values: list[str | int | float]) -> None:
    """Rule K4."""
    assert key_text(tuple(values)) == join([canonical_text(value) for value in values])
    if not isinstance(values[0], str):
        assert key_text(values[0]) == join([canonical_text(values[0])])


@given(st.text())
def test_a_lone_text_is_the_key_itself(key: str) -> None:
    assert key_text(key) == key
