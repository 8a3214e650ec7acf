"""REGEXP_REPLACE and MESSAGE_SIZE."""

from __future__ import annotations

import pytest

from sow_server.engine.values.patterns import REPLACING_BYTES_MAX, replacer
from sow_server.filters import FilterError, Meta, compile_filter, parse, print_filter
from sow_server.filters.cost import cost_of
from sow_server.filters.parameters import parameters
from sow_server.filters.values import TEXT_CHARACTERS_MAX

META = Meta("k", 1, 1, None, "t", 1, size=42)


def holds(text: str, **document: object) -> bool:
    return compile_filter(parse(text))(document, META)


@pytest.mark.parametrize(
    ("text", "pattern", "new", "result"),
    [
        ("+49 30/12 34", "[^0-9]+", "", "49301234"),
        ("aXbXc", "X", "--", "a--b--c"),
        ("abc", "x", "y", "abc"),
        ("", "^$", "y", ""),
        ("abc", "", "-", "abc"),
        ("abc", "x*", "-", "abc"),
        ("aaa", "^a", "b", "baa"),
        ("aaa", "a$", "b", "aab"),
        ("été à", r"\B", "-", "été à"),
        ("é€é", "€", "\U0001f600", "é\U0001f600é"),
        ("IBM ibm", "(?i)ibm", "x", "x x"),
        ("a1b2", "([a-z])([0-9])", r"\2\1", r"\2\1\2\1"),
        (1.5, r"\.", ",", "1,5"),
        (True, "t", "T", "True"),
    ],
)
def test_every_match_is_replaced(text: object, pattern: str, new: str, result: str) -> None:
    compiled = compile_filter(parse("REGEXP_REPLACE(/a, :pattern, /new) = /result", parameters({"pattern": pattern})))
    assert compiled({"a": text, "new": new, "result": result}, META)


@pytest.mark.parametrize("document", [{}, {"a": {}}, {"a": None}, {"a": []}])
def test_what_is_no_text_is_null(document: dict[str, object]) -> None:
    assert holds("REGEXP_REPLACE(/a, 'x', 'y') IS NULL", **document)
    assert holds("REGEXP_REPLACE('x', 'x', /a) IS NULL", **document)


def test_without_fields_it_is_computed_once() -> None:
    assert compile_filter(parse("REGEXP_REPLACE('a-b', '-', '') = 'ab'")).constant is True


def test_a_longer_text_is_null() -> None:
    most = "a" * TEXT_CHARACTERS_MAX
    assert holds("REGEXP_REPLACE(/a, '^a', 'b') IS NOT NULL", a=most)
    assert holds("REGEXP_REPLACE(/a, '^a', 'bb') IS NULL", a=most)
    assert holds("REGEXP_REPLACE(/a, '^a', 'bb') IS NULL AND REGEXP_REPLACE(/a, 'x', '') IS NULL", a=most + "a")
    assert holds("REGEXP_REPLACE(/a, '.', /new) IS NULL", a="a" * 100, new="é" * (TEXT_CHARACTERS_MAX // 100 + 1))


def test_matches_that_take_long_to_find_end_in_null() -> None:
    """Each search of this pattern reads the rest of the text, so all of them would take quadratic time."""
    replaced = replacer("a[^b]*b|a")
    size = int((2 * REPLACING_BYTES_MAX) ** 0.5)
    assert replaced("a" * (size - 10), "x", TEXT_CHARACTERS_MAX) == "x" * (size - 10)
    assert replaced("a" * (size + 10), "x", TEXT_CHARACTERS_MAX) is None


def test_a_subscription_with_it_is_judged_on_a_thread() -> None:
    assert cost_of(parse("REGEXP_REPLACE(/a, 'x', 'y') = 'y'")).of(10, 0) > 10_000_000
    assert cost_of(parse("MESSAGE_SIZE() > 9")).of(10**6, 0) < 10_000


@pytest.mark.parametrize(
    ("text", "position", "what"),
    [
        ("REGEXP_REPLACE(/a, /b, 'x') = 'x'", 19, "expected a text, the pattern"),
        ("REGEXP_REPLACE(/a, 1, 'x') = 'x'", 19, "expected a text, the pattern"),
        ("REGEXP_REPLACE(/a, '(', 'x') = 'x'", 19, "expected a regular expression"),
        ("REGEXP_REPLACE(/a, '(?=x)', 'x') = 'x'", 19, "expected a regular expression"),
        ("REGEXP_REPLACE(/a, 'x') = 'x'", 0, "REGEXP_REPLACE takes 3 arguments, not 2"),
        ("REGEXP_REPLACE(/a, :list, 'x') = 'x'", 19, "the parameter :list is a list"),
        ("MESSAGE_SIZE(/a) > 1", 0, "MESSAGE_SIZE takes no arguments, not 1"),
    ],
)
def test_an_error_has_its_position(text: str, position: int, what: str) -> None:
    with pytest.raises(FilterError, match=what.replace("(", r"\(")) as caught:
        parse(text, parameters({"list": ("x",)}) if ":list" in text else ())
    assert caught.value.position == position


def test_its_patterns_count_with_those_of_like() -> None:
    each = "REGEXP_REPLACE(/a, 'x', '') LIKE 'y'"
    parse(" OR ".join([each] * 50))
    with pytest.raises(FilterError, match="more regular expressions than the limit of 100"):
        parse(" OR ".join([each] * 51))


def test_the_size_is_that_of_the_payload() -> None:
    assert print_filter(parse("message_size() = 42")) == "MESSAGE_SIZE() = 42"
    assert holds("MESSAGE_SIZE() = 42 AND NOT MESSAGE_SIZE() > 42")
    assert compile_filter(parse("MESSAGE_SIZE() > 1")).constant is None
    assert not compile_filter(parse("MESSAGE_SIZE() > 1")).uses_payload
