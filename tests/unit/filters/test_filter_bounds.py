"""Filters: the bounds that the planner derives."""

from __future__ import annotations

import pytest

from sow_server.filters import parse
from sow_server.filters.bounds import Interval, Kind, after_prefix, bounds_of, entries, key_prefixes, key_texts
from sow_server.filters.tree import Metadata, MetadataName, Path

A, ID = Path(("a",)), Path(("id",))
KEY = Metadata(MetadataName.KEY)
KEYS = [("id",)]


def number(low: float | None, high: float | None, *, low_included: bool = True, high_included: bool = True) -> Interval:
    return Interval(Kind.NUMBER, low, high, low_included, high_included)


def text(low: str | None, high: str | None, *, low_included: bool = True, high_included: bool = True) -> Interval:
    return Interval(Kind.TEXT, low, high, low_included, high_included)


@pytest.mark.parametrize(
    ("filter_text", "expected"),
    [
        ("/a = 5", [{number(5, 5)}]),
        ("5 = /a", [{number(5, 5)}]),
        ("/a = 'x'", [{text("x", "x")}]),
        ("/a = '5'", [{text("5", "5"), number(5, 5)}]),
        ("/a = true", [{Interval(Kind.BOOLEAN, True, True)}]),
        ("/a", [{Interval(Kind.BOOLEAN, True, True)}]),
        ("/a > 5", [{number(5, None, low_included=False)}]),
        ("5 > /a", [{number(None, 5, high_included=False)}]),
        ("/a <= 'x'", [{text(None, "x")}]),
        ("/a BETWEEN 1 AND 3", [{number(1, 3)}]),
        ("/a BETWEEN 'a' AND 'c'", [{text("a", "c")}]),
        ("/a IN ('x', 'y', null)", [{text("x", "x"), text("y", "y")}]),
        ("/a BEGINS WITH 'ab'", [{text("ab", "ac", high_included=False)}]),
        ("/a LIKE '^ab+'", [{text("ab", "ac", high_included=False)}]),
        ("/a LIKE '^ab*'", [{text("a", "b", high_included=False)}]),
        # The canonical text of a number may begin with it.
        ("/a BEGINS WITH '1'", [{text("1", "2", high_included=False), number(None, None)}]),
        # Two conditions on one field are two bounds: two elements of an array may satisfy one each.
        (
            "/a > 1 AND /a < 5",
            [{number(1, None, low_included=False)}, {number(None, 5, high_included=False)}],
        ),
        ("/a = 'x' OR /a = 'y'", [{text("x", "x"), text("y", "y")}]),
        ("/a = 'x' AND /b > 5", [{text("x", "x")}]),
        ("/a = 'x' OR false", [{text("x", "x")}]),
        ("(/a = 'x' AND /b = 1) OR (/a = 'y' AND /a > 'a')", [{text("x", "x"), text("y", "y")}]),
        ("/a = 'x' OR /b = 1", None),
        ("/a != 5", None),
        ("NOT /a = 5", None),
        ("NOT /a > 5", None),
        ("/a LIKE '^ab|c'", None),
        ("/a LIKE 'ab'", None),
        ("/a = /b", None),
        ("/a IS NULL", None),
        ("LOWER(/a) = 'x'", None),
    ],
)
def test_bounds_of_a_field(filter_text: str, expected: list[set[Interval]] | None) -> None:
    found = bounds_of(parse(filter_text), KEYS).get(A)
    assert (None if found is None else [set(bound) for bound in found]) == expected


def test_bounds_of_metadata_are_of_its_kind() -> None:
    version = Metadata(MetadataName.VERSION)
    assert bounds_of(parse("@version >= 5 AND @version < '9'"))[version] == (
        (number(5, None),),
        (number(None, 9, high_included=False),),
    )
    assert bounds_of(parse("@key >= 'm'"))[KEY] == ((text("m", None),),)
    assert bounds_of(parse("@key >= '5'"))[KEY] == ((text("5", None),),)
    assert bounds_of(parse("@key > 5")) == {}  # as numbers, which an order by text does not help to find


def test_a_key_field_with_an_index_of_its_own() -> None:
    """`=` compares canonical texts there, so everything with that text has to be looked up."""
    assert set(bounds_of(parse("/id = 1"), KEYS)[ID][0]) == {text("1", "1"), number(1, 1)}
    assert set(bounds_of(parse("/id = 'true'"), KEYS)[ID][0]) == {
        text("true", "true"),
        Interval(Kind.BOOLEAN, True, True),
    }
    assert set(bounds_of(parse("/id = '1.0'"), KEYS)[ID][0]) == {text("1.0", "1.0")}


@pytest.mark.parametrize(
    ("filter_text", "expected"),
    [
        ("/id = 1", {"1"}),
        ("/id = 1.0", {"1"}),
        ("/id = '1.0'", {"1.0"}),
        ("/id IN (1, 'x', true, null)", {"1", "x", "true"}),
        ("/id IN (1, 2) AND /id IN (2, 3) AND /a = 5", {"2"}),
        ("/id = 1 AND /id = 2", set()),
        ("/id = 1 OR /id = 2 AND /a = 5", {"1", "2"}),
        ("NOT (/id != 1)", {"1"}),
        ("NOT (/id != 1 OR /a = 5)", {"1"}),
        ("/id = 1 OR /a = 5", None),
        ("/id != 1", None),
        ("NOT /id = 1", None),
        ("/id > 1", None),
        ("/a = 1", None),
    ],
)
def test_texts_of_a_key_field(filter_text: str, expected: set[str] | None) -> None:
    found = key_texts(parse(filter_text), KEYS)
    assert found.get(ID) == expected
    assert A not in found


def test_texts_of_a_composite_key_and_of_the_key_itself() -> None:
    tree = parse("/carrier = 'UA' AND /flight IN (1545, 1546) AND @key = 'UA|1545'")
    assert key_texts(tree, [("carrier",), ("flight",)]) == {
        Path(("carrier",)): {"UA"},
        Path(("flight",)): {"1545", "1546"},
        KEY: {"UA|1545"},
    }


def test_prefixes_of_key_fields() -> None:
    assert key_prefixes(parse("/id BEGINS WITH 'UA' AND /a BEGINS WITH 'x'"), KEYS) == {ID: {"UA"}}
    assert key_prefixes(parse("@key LIKE '^UA\\|15' OR @key BEGINS WITH 'DL'"), KEYS) == {KEY: {"UA|15", "DL"}}
    assert key_prefixes(parse("NOT /id BEGINS WITH 'UA'"), KEYS) == {}
    assert key_prefixes(parse("/id BEGINS WITH 15"), KEYS) == {ID: {"15"}}


def test_entries_of_a_field() -> None:
    assert entries({"a": 5}, ("a",)) == [(Kind.NUMBER, 5)]
    assert entries({"a": "5"}, ("a",)) == [(Kind.TEXT, "5"), (Kind.NUMBER, 5)]
    assert entries({"a": ["x", [True], None, {}]}, ("a",)) == [(Kind.TEXT, "x"), (Kind.BOOLEAN, True)]
    assert entries({"a": [{"b": 1}, {"b": 2}]}, ("a", "b")) == [(Kind.NUMBER, 1), (Kind.NUMBER, 2)]
    assert entries({"a": float("nan")}, ("a",)) == entries({}, ("a",)) == []


def test_membership_of_an_interval() -> None:
    interval = number(1, 5, high_included=False)
    assert interval.holds((Kind.NUMBER, 1))
    assert interval.holds((Kind.NUMBER, 4.9))
    assert not interval.holds((Kind.NUMBER, 5))
    assert not interval.holds((Kind.TEXT, "3"))
    assert not interval.is_point
    assert text("x", "x").is_point
    assert text(None, None).holds((Kind.TEXT, ""))


def test_the_text_after_a_prefix() -> None:
    assert after_prefix("ab") == "ac"
    assert after_prefix("a\U0010ffff") == "b"
    assert after_prefix("a\ud7ff") == "a\ue000"  # the code points in between are no characters
    assert after_prefix("\U0010ffff") is None
    assert after_prefix("") is None
