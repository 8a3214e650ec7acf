"""How a plan finds the records of a filter (rule Q3; planner [1] to [4])."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest

from sow_server.engine.catalog.indexes import interval
from sow_server.engine.values.fields import Kind, Steps
from sow_server.filters import parse
from sow_server.query import planner
from sow_server.query.planner import ABOVE_ALL, EVERYTHING, Access, Plan, Range, plan

ONE = [("id",)]
TWO = [("carrier",), ("flight",)]


def planned(
    text: str,
    key_paths: Sequence[tuple[str, ...]] = (),
    indexed: Collection[Steps] = (),
    keys: Collection[bytes] | None = None,
) -> Plan:
    return plan(parse(text), key_paths=key_paths, indexed=indexed, keys=keys)


# --- points ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "key_paths", "points"),
    [
        ("/id = 5", ONE, [b"5"]),
        ("/id = '5' AND /price > 3", ONE, [b"5"]),
        ("/id IN (10, 9, '9', 9.0)", ONE, [b"10", b"9"]),
        ("/id IN (1, 2, 3) AND /id IN (3, 4)", ONE, [b"3"]),
        ("/id = 1 OR /id = 2", ONE, [b"1", b"2"]),
        ("(/id = 1 OR /id = 2) AND NOT /id != 1", ONE, [b"1"]),
        ("/id = 'a|b'", ONE, [b"a\\|b"]),
        ("/id = true", ONE, [b"true"]),
        ("@key = 'a|b'", TWO, [b"a|b"]),
        ("@key IN ('a', 'b') AND @key != 'a'", [], [b"a", b"b"]),
        ("/carrier = 'LH' AND /flight IN (400, 401)", TWO, [b"LH|400", b"LH|401"]),
        ("/flight IN (1, 2) AND /carrier IN ('A', 'B|')", TWO, [b"A|1", b"A|2", b"B\\||1", b"B\\||2"]),
        ("/carrier = 'A' AND /flight = 1 AND @key IN ('A|1', 'A|2')", TWO, [b"A|1"]),
    ],
)
def test_fixed_keys_are_looked_up(text: str, key_paths: list[tuple[str, ...]], points: list[bytes]) -> None:
    assert planned(text, key_paths, indexed=[("id",)]) == Plan(Access.POINTS, points=tuple(points))


def test_keys_of_the_request_are_looked_up_and_meet_those_of_the_filter() -> None:
    assert plan(None, keys=[b"b", b"a"]) == Plan(Access.POINTS, points=(b"a", b"b"))
    assert planned("/price > 3", ONE, keys=[b"b", b"a"]).points == (b"a", b"b")
    assert planned("/id IN (1, 2)", ONE, keys=[b"2", b"3"]).points == (b"2",)
    assert planned("/id = 1", ONE, keys=[b"2"]).access is Access.NOTHING


def test_more_points_than_allowed_become_ranges_of_the_leading_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "PROBES_MAX", 3)
    text = "/carrier IN ('A', 'B') AND /flight IN (1, 2)"
    assert planned(text, TWO) == Plan(Access.KEY_RANGES, ranges=(Range(b"A|", b"A}"), Range(b"B|", b"B}")))
    assert planned("/id IN (1, 2, 3, 4)", ONE).access is Access.SCAN
    assert planned("@key IN ('1', '2', '3', '4')").ranges == tuple(Range(b"%d" % n, b"%d\0" % n) for n in range(1, 5))


# --- ranges of keys --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "key_paths", "ranges"),
    [
        ("/carrier = 'LH'", TWO, [(b"LH|", b"LH}")]),
        ("/carrier IN ('LH', 'AF') AND /gate = 1", TWO, [(b"AF|", b"AF}"), (b"LH|", b"LH}")]),
        ("/carrier = 'a|b'", TWO, [(b"a\\|b|", b"a\\|b}")]),
        ("/carrier = 'LH' AND /flight BEGINS WITH '4'", TWO, [(b"LH|4", b"LH|5")]),
        ("/carrier = 'LH' AND /flight BEGINS WITH ('4', '40', '7')", TWO, [(b"LH|4", b"LH|5"), (b"LH|7", b"LH|8")]),
        ("/carrier BEGINS WITH 'L'", TWO, [(b"L", b"M")]),
        ("/carrier LIKE '^L\\\\|' AND /flight = 4", TWO, [(b"L\\|", b"L\\}")]),
        ("/id BEGINS WITH 'ü'", ONE, [("ü".encode(), "ý".encode())]),
        ("@key BEGINS WITH 'a|'", TWO, [(b"a|", b"a}")]),
        ("@key >= 'b' AND @key < 'd'", [], [(b"b", b"d")]),
        ("@key > 'b'", [], [(b"b\0", ABOVE_ALL)]),
        ("@key <= 'b'", [], [(b"", b"b\0")]),
        ("@key BETWEEN 'b' AND 'd' OR @key BEGINS WITH 'c' OR @key = 'x'", [], [(b"b", b"d\0"), (b"x", b"x\0")]),
        ("(@key < 'c' OR @key > 'f') AND (@key > 'b' AND @key < 'g')", [], [(b"b\0", b"c"), (b"f\0", b"g")]),
        ("/carrier = 'LH' AND @key < 'LH|5'", TWO, [(b"LH|", b"LH|5")]),
    ],
)
def test_leading_fields_and_comparisons_of_the_key_give_ranges(
    text: str, key_paths: list[tuple[str, ...]], ranges: list[tuple[bytes, bytes]]
) -> None:
    assert planned(text, key_paths) == Plan(Access.KEY_RANGES, ranges=tuple(Range(*each) for each in ranges))


@pytest.mark.parametrize(
    ("text", "key_paths"),
    [
        ("/flight = 400", TWO),
        ("/carrier = 'LH' OR /gate = 1", TWO),
        ("NOT /carrier = 'LH'", TWO),
        ("/carrier != 'LH'", TWO),
        ("/carrier > 'A'", TWO),  # a number compares by its value, and the key has its text
        ("/id BEGINS WITH ''", ONE),
        ("/id BEGINS WITH ('a', '')", ONE),
        ("@key > 5", []),  # as numbers
        ("@key ENDS WITH 'a'", []),
        ("LENGTH(@key) = 2", []),
        ("/price > 3", []),
        ("true", ONE),
    ],
)
def test_a_filter_without_keys_is_a_scan(text: str, key_paths: list[tuple[str, ...]]) -> None:
    assert planned(text, key_paths) == Plan(Access.SCAN, ranges=EVERYTHING)
    assert plan(None, key_paths=key_paths) == Plan(Access.SCAN, ranges=EVERYTHING)


# --- nothing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "/id = 1 AND /id = 2",
        "@key = 'a' AND @key = 'b'",
        "@key < 'a' AND @key > 'b'",
        "@key BETWEEN 'b' AND 'a'",
        "/id = 1 AND @key = 2",
        "/id IN (null)",
        "/price BETWEEN 2 AND 1",
    ],
)
def test_a_contradicting_filter_reads_nothing(text: str) -> None:
    assert planned(text, ONE, indexed=[("price",)]).access is Access.NOTHING


# --- indexes ---------------------------------------------------------------------------------------------------------


def test_an_index_is_offered_beside_the_scan() -> None:
    found = planned("/symbol = 'IBM' AND /price > 3", indexed=[("symbol",)])
    assert (found.access, found.ranges) == (Access.SCAN, EVERYTHING)
    (bound,) = found.bounds
    assert bound == (("symbol",), (interval(Kind.TEXT, "IBM", "IBM"),), True)
    assert planned("/symbol = 'IBM'", indexed=[("sym",)]).bounds == ()
    assert planned("LOWER(/symbol) = 'ibm'", indexed=[("symbol",)]).bounds == ()


def test_points_are_offered_before_ranges_and_few_before_many() -> None:
    indexed = [("a",), ("b",), ("c",), ("d",)]
    found = planned("/a > 1 AND /b IN ('x', 'y') AND /c = 'z' AND /d BEGINS WITH 'x'", indexed=indexed)
    assert [(bound.steps, bound.points) for bound in found.bounds] == [
        (("c",), True),
        (("b",), True),
        (("a",), False),
        (("d",), False),
    ]


def test_two_ranges_on_one_field_stay_two_bounds() -> None:
    """One element of an array may satisfy the one, another the other."""
    found = planned("/a > 1 AND /a < 3", indexed=[("a",)])
    assert [len(bound.intervals) for bound in found.bounds] == [1, 1]


def test_an_index_is_offered_beside_ranges_of_keys() -> None:
    found = planned("/carrier = 'LH' AND /gate = 'A1'", TWO, indexed=[("gate",)])
    assert (found.access, [bound.steps for bound in found.bounds]) == (Access.KEY_RANGES, [("gate",)])


def test_no_more_bounds_are_compared_than_allowed() -> None:
    text = " AND ".join([f"/f{number} = 1" for number in range(10)])
    assert len(planned(text, indexed=[(f"f{number}",) for number in range(10)]).bounds) == planner.CANDIDATES_MAX
