"""Filters: their results. Each table is a piece of docs/filters.md; the property tests go through the rest."""

from __future__ import annotations

import time

import pytest

from sow_server.filters import FilterError, Meta, Predicate, compile_filter, parse
from sow_server.filters.tree import Compare, Comparison, Like, Path, Text

META = Meta("7|x", version=5, publish_time_micros=10, expire_time_micros=None, topic="orders", now_micros=1_000)
NAN = float("nan")


def compiled(text: str, *keys: str) -> Predicate:
    return compile_filter(parse(text), key_paths=[(key,) for key in keys])


def truth(text: str, document: object, meta: Meta = META, keys: tuple[str, ...] = ()) -> bool | None:
    """True, false, or None for unknown: neither the filter nor its negation is true."""
    yes, no = compiled(text, *keys)(document, meta), compiled(f"NOT ({text})", *keys)(document, meta)
    assert not (yes and no)
    return True if yes else False if no else None


@pytest.mark.parametrize(
    ("text", "value", "expected"),
    [
        # null, missing
        ("/a = 1", None, None),
        ("/a != 1", None, None),
        ("/a = null", 1, None),
        ("/a = null", None, None),
        ("/missing > 1", 1, None),
        ("/a IS NULL", None, True),
        ("/a IS NULL", "", False),
        ("/missing IS NULL", 1, True),
        ("/a IS NOT NULL", 0, True),
        ("/a = ''", "", True),
        ("/a = 1 OR /missing = 1", 1, True),
        ("/a = 1 OR /missing = 1", 2, None),
        ("/a = 1 AND /missing = 1", 2, False),
        ("/a = 1 AND /missing = 1", 1, None),
        ("/a NOT IN (1, null)", 2, None),
        ("/a IN (1, null)", 1, True),
        # numbers and text
        ("/a > 100", "100.5", True),
        ("/a > 100", "1e3", True),
        ("/a > 100", "+101", True),
        ("/a > 100", "abc", None),
        ("/a > 100", " 101", None),
        ("/a > 100", "1_000", None),
        ("/a > 100", "inf", None),
        ("/a > 100", "٣٣٣", None),
        ("/a > 100", "9" * 101, None),
        ("/a = 'abc'", 5, None),
        ("/a = '5'", 5, True),
        ("/a = '5.0'", 5, True),
        ("/a = '5'", "5.0", False),
        ("/a > '10'", "9", True),
        ("/a > '10'", 9, False),
        ("/a < 'b'", "B", True),
        ("/a < 'z'", "é", False),
        ("/a = 9007199254740993", 9007199254740993, True),
        ("/a = 9007199254740993", 9007199254740992, False),
        ("/a = 9007199254740993", "9007199254740993", True),
        ("/a = 9007199254740993", "9007199254740992", False),
        ("/a = 18446744073709551615", 2**64 - 1, True),
        ("/a = 1", 1.0, True),
        ("/a > 1", NAN, None),
        ("/a != 1", NAN, None),
        ("/a NOT IN (1)", NAN, None),
        ("/a IS NULL", NAN, True),
        # booleans
        ("/a", True, True),
        ("/a", False, False),
        ("/a", 1, None),
        ("/a", "true", None),
        ("NOT /a", False, True),
        ("/a = true", True, True),
        ("/a = true", 1, None),
        ("/a = 1", True, None),
        ("/a = 'true'", True, None),
        ("/a > false", True, True),
        # LIKE
        ("/a LIKE 'b'", "abc", True),
        ("/a LIKE '^b'", "abc", False),
        ("/a LIKE '^ab'", "abc", True),
        ("/a LIKE 'bc$'", "abc", True),
        ("/a LIKE 'bc$'", "abc\n", False),
        ("/a LIKE '^abc$'", "abc", True),
        ("/a LIKE '^abc$'", "abc\n", False),
        ("/a LIKE 'a.c'", "abc", True),
        (r"/a LIKE 'a\.c'", "abc", False),
        ("/a LIKE '(?i)AB'", "abc", True),
        ("/a LIKE '^1'", 15, True),
        ("/a NOT LIKE 'b'", "xyz", True),
        ("/a NOT LIKE 'b'", None, None),
        ("/a LIKE 'x'", {"x": 1}, None),
        # BEGINS WITH and so on
        ("/a BEGINS WITH 'ab'", "abc", True),
        ("/a BEGINS WITH ('x', 'ab')", "abc", True),
        ("/a BEGINS WITH ('x', null)", "abc", None),
        ("/a ENDS WITH 'bc'", "abc", True),
        ("/a CONTAINS 'b'", "abc", True),
        ("/a CONTAINS ('x', 'y')", "abc", False),
        ("/a BEGINS WITH '1'", 10.5, True),
        ("/a BEGINS WITH /missing", "abc", None),
        # BETWEEN
        ("/a BETWEEN 1 AND 3", 3, True),
        ("/a BETWEEN 1 AND 3", 3.5, False),
        ("/a NOT BETWEEN 1 AND 3", 3.5, True),
        ("/a BETWEEN 'a' AND 'c'", "b", True),
        ("/a BETWEEN 1 AND null", 5, None),
        ("/a BETWEEN 1 AND null", 0, False),
        # arrays
        ("/a = 'x'", ["y", "x"], True),
        ("/a = 'x'", ["y"], False),
        ("/a = 'x'", [], False),
        ("/a = 'x'", ["y", None], None),
        ("/a != 'x'", ["x", "y"], True),
        ("/a NOT IN ('x')", ["x", "y"], False),
        ("/a > 10", [1, [2, [11]]], True),
        ("/a/px > 10", [{"px": 1}, {"px": 11}], True),
        ("/a/px > 10", [{"px": 1}, {}], None),
        ("/a/px > 10", {"px": [1, 11]}, True),
        ("/a[1] = 'x'", ["y", "x"], True),
        ("/a[2] = 'x'", ["y", "x"], None),
        ("/a[0]/px = 1", [{"px": 1}], True),
        ("/a/px[0] = 1", [{"px": [2, 1]}, {"px": [3]}], False),
        ("/a/px[0] = 3", [{"px": [2, 1]}, {"px": [3]}], True),
        ("/a BETWEEN 2 AND 3", [1, 4], False),
        ("/a IS NULL", [], True),
        ("/a IS NULL", [None], True),
        ("/a IS NULL", [None, 1], False),
        ("/a", [False, True], True),
        ("/a LIKE '^x'", ["ax", "xa"], True),
        ("LENGTH(/a) = 2", ["ab", "c"], True),
        ("/a + 1 = 2", [1, 5], True),
        ("ARRAY_COUNT(/a) = 3", [1, None, [4, 5]], True),
        ("ARRAY_COUNT(/a/px) = 2", [{"px": 1}, {}], True),
        ("ARRAY_COUNT(/a) = 1", 5, None),
        # objects
        ("/a = 1", {"b": 1}, None),
        ("/a IS NULL", {}, False),
        ("/a/b/c = 1", {"b": {"c": 1}}, True),
        ("/a/b/c = 1", {"b": 5}, None),
        ("/a/b/c/d/e/f = 1", {"b": {"c": {"d": {"e": {"f": 1}}}}}, True),
        ("/a[0] = 1", {"0": 1}, None),
        # arithmetic
        ("/a * 2 + 1 = 11", 5, True),
        ("/a * 2 + 1 = 11", "5", True),
        ("/a / 2 = 2.5", 5, True),
        ("/a / 0 IS NULL", 5, True),
        ("/a % 3 = 2", 5, True),
        ("/a % 3 = -2", -5, True),
        ("/a % 0 IS NULL", 5, True),
        ("-/a = 5", -5, True),
        ("/a + 1 IS NULL", "x", True),
        ("/a + 1 IS NULL", True, True),
        ("/a + 1 = 9007199254740994", 9007199254740993, True),
        ("/a * /a > 1e37", 2**63, True),
        ("/a - /a IS NULL", float("inf"), True),
        # functions
        ("LENGTH(/a) = 3", "größ"[:3], True),
        ("LENGTH(/a) = 3", 123, True),
        ("LOWER(/a) = 'ab'", "AB", True),
        ("UPPER(/a) = 'AB'", "ab", True),
        ("TRIM(/a) = 'x'", " x\t", True),
        ("CONCAT(/a, '-', 1, true) = '5-1true'", 5.0, True),
        ("CONCAT(/a, /missing) IS NULL", "x", True),
        ("SUBSTR(/a, 2) = 'bc'", "abc", True),
        ("SUBSTR(/a, 2, 1) = 'b'", "abc", True),
        ("SUBSTR(/a, -2) = 'bc'", "abc", True),
        ("SUBSTR(/a, 9) = ''", "abc", True),
        ("SUBSTR(/a, 1, -1) = ''", "abc", True),
        ("REPLACE(/a, 'b', 'xx') = 'axxc'", "abc", True),
        ("REPLACE(/a, '', 'x') = 'abc'", "abc", True),
        ("ABS(/a) = 2", -2, True),
        ("ROUND(/a) = 3", 2.5, True),
        ("ROUND(/a) = -3", -2.5, True),
        ("ROUND(/a, 2) = 2.68", 2.675, True),
        ("ROUND(/a, -2) = 200", 150, True),
        ("FLOOR(/a) = -2", -1.5, True),
        ("CEIL(/a) = -1", -1.5, True),
        ("COALESCE(/missing, /a, 7) = 5", 5, True),
        ("COALESCE(/missing, /a, 7) = 7", None, True),
        ("IF(/a > 1, 'x', 'y') = 'x'", 2, True),
        ("IF(/a > 1, 'x', 'y') = 'y'", None, True),
        ("IF(/a > 1, /a > 5, /a = 0)", 2, False),
        # comparisons as values
        ("(/a = 1) = true", 1, True),
        ("(/a = 1) = false", 2, True),
        ("(/a = 1) IS NULL", None, True),
        ("(/a = 1 AND /missing = 1) IS NULL", 1, True),
        ("(/a = 1 OR /missing = 1) = (NOT /a = 2)", 1, True),
        # two fields
        ("/a = /a", 1, True),
        ("/a = /a", NAN, None),
        ("/a != /a", NAN, None),
        ("/a = /a", True, True),
        ("/a < /a", "x", False),
    ],
)
def test_truth(text: str, value: object, expected: bool | None) -> None:
    assert truth(text, {"a": value}) is expected


def test_two_fields_of_different_types() -> None:
    document = {"i": 5, "f": 5.0, "t": "5", "w": "x", "b": True, "l": [1, 5], "m": ["x", True], "n": None}
    assert truth("/i = /f", document) is True
    assert truth("/i = /t", document) is True
    assert truth("/i = /w", document) is None
    assert truth("/i = /b", document) is None
    assert truth("/i < /n", document) is None
    assert truth("/i = /l", document) is True
    assert truth("/l > /t", document) is False
    assert truth("/l = /m", document) is None
    assert truth("/m = /b", document) is True


def test_key_fields_compare_canonical_texts() -> None:
    """Rule K4: 1, 1.0 and "1" are one key, so a filter must not tell them apart."""
    for value in (1, 1.0, "1"):
        for literal in ("1", "1.0", "'1'"):
            assert truth(f"/id = {literal}", {"id": value}, keys=("id",)) is True
            assert truth(f"/id != {literal}", {"id": value}, keys=("id",)) is False
            assert truth(f"/id IN ({literal}, 'x')", {"id": value}, keys=("id",)) is True
    # Without it these would be equal as numbers; as keys they are two.
    assert truth("/id = '1.0'", {"id": "1"}, keys=("id",)) is False
    assert truth("/id = 1", {"id": "1.0"}, keys=("id",)) is False
    assert truth("/id = 1", {"id": "1.0"}) is True
    assert truth("/id = true", {"id": "true"}, keys=("id",)) is True
    assert truth("/id NOT IN (2, 3)", {"id": "x"}, keys=("id",)) is True
    assert truth("/id = /other", {"id": 1, "other": "1"}, keys=("id",)) is True
    # Only equality; order is as everywhere.
    assert truth("/id > 9", {"id": "10"}, keys=("id",)) is True


def test_metadata() -> None:
    assert truth("@key = '7|x' AND @version = 5 AND @publish_time < 11 AND @topic LIKE '^ord'", {}) is True
    assert truth("@expire_time IS NULL", {}) is True
    assert truth("@expire_time > 5", {}) is None
    assert truth("@expire_time > NOW_MICROS()", {}, META._replace(expire_time_micros=2_000)) is True
    assert truth("@key = 7", {}, META._replace(key="7")) is True
    assert truth("@key = 7", {}, META._replace(key="7.0")) is False
    assert truth("@key IN (7, 8)", {}, META._replace(key="8")) is True
    assert truth("NOW_MICROS() = 1000", {}) is True


def test_a_predicate_names_the_fields_that_it_reads() -> None:
    predicate = compiled("/a/b[0] > 1 AND (LENGTH(/c) = 1 OR /a/b[0] = 5) AND @version > 1")
    assert predicate.paths == (("a", "b", 0), ("c",))
    assert predicate.uses_payload
    assert predicate.constant is None
    assert not compiled("@version > 1").uses_payload
    assert compiled("@version > 1").matches(None, META) is True


@pytest.mark.parametrize(
    ("text", "constant"),
    [
        ("true", True),
        ("false", False),
        ("null", False),
        ("1 + 1 = 2", True),
        ("1 / 0 = 1", False),
        ("NOT (1 / 0 = 1)", False),
        ("/a = null", False),
        ("/a = 1 OR true", True),
        ("/a = 1 AND LENGTH('x') = 2", False),
        ("IF(1 = 1, true, /a)", True),
        ("'abc' LIKE '^a'", True),
        ("/a = 1 AND true", None),
        ("@version > 1 OR false", None),
    ],
)
def test_constant_conditions_are_evaluated_once(text: str, constant: bool | None) -> None:
    predicate = compiled(text)
    assert predicate.constant is constant
    if constant is not None:
        assert predicate.paths == ()
        assert predicate({"a": 1}, META) is constant


def test_the_answer_is_a_bool() -> None:
    for text in ("/a", "/a = 1", "/a AND /b", "COALESCE(/a, /b)", "/a IS NULL", "/a LIKE 'x'", "/a IN (1, 'x')"):
        values: list[object] = [None, 0, 1, "", "x", [], [1], {}, True]
        for value in values:
            assert type(compiled(text)({"a": value}, META)) is bool


def test_a_payload_that_is_no_object_has_no_fields() -> None:
    for document in (None, 5, "x", [1], b"x"):
        assert truth("/a = 1", document) is None
        assert truth("/a IS NULL", document) is True


def test_values_that_no_literal_can_be_are_unknown() -> None:
    for value in (b"x", (1, 2), object()):
        assert truth("/a = 1 OR /a = 'x' OR /a = true OR /a = /a OR /a LIKE '' OR /a IN (1, 'x')", {"a": value}) is None
        assert truth("/a IS NULL", {"a": value}) is False


def test_now_is_refused_where_records_are_watched() -> None:
    tree = parse("/a = 1 OR @expire_time < NOW_MICROS()")
    compile_filter(tree)
    with pytest.raises(FilterError) as caught:
        compile_filter(tree, allow_now=False)
    assert "NOW_MICROS()" in caught.value.message


def test_a_hand_made_tree_with_a_bad_pattern_is_refused() -> None:
    with pytest.raises(FilterError):
        compile_filter(Like(Path(("a",)), "("))


def test_a_name_or_text_cannot_become_code() -> None:
    for name in ("__import__('os')", "');raise SystemExit#", '"""'):
        tree = Compare(Comparison.EQUAL, Path((name,)), Text(name))
        assert compile_filter(tree)({name: name}, META)


# --- the cost of a filter ---


def test_texts_do_not_grow_without_end() -> None:
    """Functions in each other would make 8 ** 60 characters of one."""
    text = "/a"
    for _ in range(60):
        text = f"REPLACE({text}, 'x', 'xxxxxxxx')"
    assert truth(f"{text} IS NULL", {"a": "x"}) is True
    assert truth(f"CONCAT({', '.join(['/a'] * 5)}) IS NULL", {"a": "x" * 300_000}) is True


def test_integers_do_not_grow_without_end() -> None:
    text = " * ".join(["/a"] * 60)
    assert truth(f"{text} > 1e300", {"a": 2**63}) is True
    assert truth("/a + 0.5 > 1 AND ROUND(/a) > 1 AND FLOOR(/a / 3) > 1 AND /a > 1", {"a": 10**400}) is True
    assert truth("-/a < 0 AND /a % 7 >= 0 AND LENGTH(/a) > 1 AND /a / 1e-300 > 1", {"a": 10**400}) is True
    assert truth("LENGTH(/a) IS NULL", {"a": 10**5000}) is True


@pytest.mark.slow
def test_two_long_arrays_compare_without_forming_all_pairs() -> None:
    """60,000 by 60,000 elements, pair by pair, would be minutes."""
    document: dict[str, object] = {"a": list(range(60_000)), "b": [f"x{number}" for number in range(60_000)]}
    started = time.perf_counter()
    assert truth("/a > /b", document) is None
    assert truth("/a < /a", document) is True
    assert truth("/b = /b", document) is True
    assert truth("/a != /b", document) is None
    assert time.perf_counter() - started < 20


def test_arrays_nested_deeper_than_the_stack() -> None:
    nested: object = {"x": 7}
    for _ in range(5_000):
        nested = [nested]
    assert truth("/a/x = 7", {"a": nested}) is True
    assert truth("/a = 7", {"a": nested}) is None
    assert truth("LENGTH(/a) = 7", {"a": nested}) is None


@pytest.mark.slow
def test_the_longest_filters_compile() -> None:
    deep = "/a = 1"
    for level in range(18):
        deep = f"IF(({deep}) = true, /b{level} > 1, false)"
    for text in (
        " OR ".join([f"/a{number} = {number}" for number in range(1_000)]),
        "NOT (" + " AND ".join([f"/a = {number}" for number in range(300)]) + ")",
        f"/a IN ({','.join([str(number) for number in range(10_000)])})",
        f"CONCAT({','.join(['/a'] * 2_000)}) = 'x'",
        f"COALESCE({','.join(['/missing'] * 2_000)}, /a) = 1",
        deep,
        "NOT " * 60 + "/a",
        "-" * 60 + "/a = 1",
        "/" + "/".join(["a"] * 64) + " = 1",
    ):
        predicate = compiled(text)
        for value in (1, "x", None, [1]):
            predicate({"a": value}, META)


def test_patterns_take_linear_time() -> None:
    """A back-tracking engine would need 2 ** 40 steps."""
    assert truth("/a LIKE '^(a+)+$'", {"a": "a" * 40 + "b"}) is False
