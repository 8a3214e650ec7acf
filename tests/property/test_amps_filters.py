"""Filters of AMPS: whatever the text, there is an error with a position, or a filter that the server takes and that
means what AMPS does of an empty text."""

from __future__ import annotations

import re
from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sow_cli.amps_filters import Converted, from_amps
from sow_cli.amps_patterns import PatternFault, converted
from sow_cli.amps_syntax import AmpsError
from sow_server.engine.values.patterns import searcher
from sow_server.filters import Meta, compile_filter, parse
from tests.support.oracles.examples import examples

META = Meta("k", 1, 1, None, "t", 1)

FIELDS = st.sampled_from(["/a", "/b/c", "/55", "/legs[0]/px", "/[odd name]", "/a.b:c", "/a/[x/y]"])
TEXTS = st.sampled_from(
    [*["''", '""', "'a'", '"it\'s"', r"'O\'B'", "r'\\d'", "'AND /x = 1'", "'%{}'", "'é'", r"'\x41\101\n'", "'true'"]]
)
NUMBERS = st.sampled_from(["0", "1", "-5", "1.5", ".5", "1e3", "18446744073709551617", "007", "1."])
PATTERNS = st.sampled_from(
    ["'^a'", "'a|b$'", "r'^\\d+$'", "'(?i)x'", "'a(?=b)'", r"'\\w'", "'[^a-z]*'", "'('", "'a{2,3}'", "''", "r'(a)\\1'"]
)
LITERALS = st.one_of(TEXTS, NUMBERS, st.sampled_from(["true", "NULL"]))


def calls(value: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    several = ("LENGTH", "lower", "SUBSTR", "INSTR", "INSTR_I", "STREQUAL_I", "IF", "COALESCE", "CONCAT", "LEFT")
    names = st.sampled_from([*several, "CEILING", "ROUND", "REGEXP_REPLACE", "REPLACE", "ABS", "NOTHING"])
    return st.builds(lambda name, given: f"{name}({', '.join(given)})", names, st.lists(value, max_size=3))


def values(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    operator = st.sampled_from(["+", "-", "*", "/", "%"])
    return st.one_of(
        st.builds(lambda a, word, b: f"{a} {word} {b}", inner, operator, inner),
        inner.map(lambda one: f"({one})"),
        inner.map(lambda one: f"-{one}"),
        calls(inner),
    )


VALUES = st.recursive(st.one_of(FIELDS, LITERALS), values, max_leaves=4)


def listed(items: list[str]) -> str:
    return f"({', '.join(items)})"


TESTS = st.one_of(
    st.builds(
        lambda a, word, b: f"{a} {word} {b}",
        VALUES,
        st.sampled_from(["=", "==", "!=", "<>", "<", "<=", ">", ">="]),
        VALUES,
    ),
    st.builds(
        lambda a, word, b: f"{a} {word} {listed(b)}",
        VALUES,
        st.sampled_from(["IN", "NOT IN", "BEGINS WITH", "not ends with", "CONTAINS"]),
        st.lists(LITERALS, min_size=1, max_size=4),
    ),
    st.builds(lambda a, b, c: f"{a} BETWEEN {b} AND {c}", VALUES, VALUES, VALUES),
    st.builds(lambda a, word, b: f"{a} {word} {b}", VALUES, st.sampled_from(["LIKE", "NOT LIKE"]), PATTERNS),
    st.builds(lambda a, word: f"{a} IS {word}", VALUES, st.sampled_from(["NULL", "NOT NULL", "NAN"])),
    VALUES,
)


def conditions(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.builds(
            lambda word, parts: f" {word} ".join(parts),
            st.sampled_from(["AND", "or", "&&", "||"]),
            st.lists(inner, min_size=2, max_size=3),
        ),
        inner.map(lambda one: f"NOT {one}"),
        inner.map(lambda one: f"!({one})"),
        inner.map(lambda one: f"({one}) = 1"),
        inner.map(lambda one: f"({one}) IS NULL"),
        inner.map(lambda one: f"IF({one}, /a, 'x') = 'x'"),
    )


FILTERS = st.recursive(TESTS, conditions, max_leaves=6)
PIECES = st.text(alphabet=st.sampled_from("/ab'\"\\()[]=!<>&|,.-+*%@~ r1x0:é\n\ud800\U0001f600"), max_size=4)


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """A filter with a piece cut out, and another one put in."""
    text = draw(FILTERS)
    begin = draw(st.integers(0, len(text)))
    return text[:begin] + draw(PIECES) + text[begin + draw(st.integers(0, 4)) :]


def outcome(text: str) -> Converted | AmpsError:
    try:
        return from_amps(text)
    except AmpsError as error:
        return error


def check(text: str) -> None:
    """A text is converted into a filter of the server, with remarks that have places; or its error has a place."""
    made = outcome(text)
    if isinstance(made, AmpsError):
        assert 0 <= made.position <= len(text)
        assert re.search(r" at \d+(;|$)", str(made))
        return
    compile_filter(parse(made.filter))({"a": "x", "b": {"c": 1}}, META)
    assert all(0 <= remark.position < len(text) for remark in made.remarks)
    assert list(made.remarks) == sorted(made.remarks)


@pytest.mark.slow
@settings(max_examples=examples(600), deadline=None)
@given(FILTERS)
def test_a_filter_becomes_an_error_with_a_place_or_a_filter_of_the_server(text: str) -> None:
    check(text)


@pytest.mark.slow
@settings(max_examples=examples(600), deadline=None)
@given(damaged())
def test_so_does_a_text_that_is_nearly_a_filter(text: str) -> None:
    check(text)


@pytest.mark.slow
@settings(max_examples=examples(2_000), deadline=None)
@given(st.text(alphabet=st.sampled_from("abz019()[]{}|*+?.^$\\-:=!<>,dDwWsSbBxpPLiQEk é"), max_size=24))
def test_a_pattern_that_is_passed_on_is_one_of_re2(pattern: str) -> None:
    try:
        made = converted(pattern)
    except PatternFault as error:
        place = error.position
    else:
        searcher(made)
        place = 0
    assert 0 <= place <= len(pattern)


@pytest.mark.slow
@settings(max_examples=examples(1_000), deadline=None)
@given(st.text(max_size=20))
def test_a_text_stays_the_same_text(value: str) -> None:
    """Whatever its characters, also quotes and what looks like a filter."""
    source = value.replace("\\", "\\\\").replace("'", "\\'")
    made = from_amps(f"/a = '{source}x'")
    predicate = compile_filter(parse(made.filter))
    assert predicate({"a": f"{value}x"}, META)
    assert not predicate({"a": f"{value}y"}, META)


DOCUMENTS = st.fixed_dictionaries(
    {}, optional={"a": st.sampled_from([None, "", "x", 0, 5, True, False]), "b": st.sampled_from([None, "", "y", 1])}
)
EMPTY = {"=": True, "IS NULL": True, "!=": False, "IS NOT NULL": False}


Case: TypeAlias = tuple[str, object]
"""A filter on which fields are empty, and the same as a tree of Python."""


def single(name: str, word: str) -> Case:
    return (f"/{name} {word}" if "NULL" in word else f"/{name} {word} ''"), (name, EMPTY[word])


CASES: st.SearchStrategy[Case] = st.recursive(
    st.builds(single, st.sampled_from("ab"), st.sampled_from(list(EMPTY))),
    lambda inner: st.one_of(
        inner.map(lambda one: (f"NOT ({one[0]})", ("not", one[1]))),
        st.builds(
            lambda word, one, other: (f"({one[0]}) {word} ({other[0]})", (word, one[1], other[1])),
            st.sampled_from(["and", "or"]),
            inner,
            inner,
        ),
    ),
    max_leaves=5,
)


def truth(tree: object, document: dict[str, object]) -> bool:
    match tree:
        case ("not", inner):
            return not truth(inner, document)
        case ("and", one, other):
            return truth(one, document) and truth(other, document)
        case ("or", one, other):
            return truth(one, document) or truth(other, document)
        case (str(name), bool(empty)):
            return (document.get(name) in (None, "")) is empty
    raise AssertionError(tree)


@pytest.mark.slow
@settings(max_examples=examples(600), deadline=None)
@given(CASES, DOCUMENTS)
def test_an_empty_text_is_null_whatever_is_around_the_comparison(case: Case, document: dict[str, object]) -> None:
    """Also for values of other types, and below NOT: no comparison with '' is unknown."""
    text, tree = case
    assert compile_filter(parse(from_amps(text).filter))(document, META) is truth(tree, document)
