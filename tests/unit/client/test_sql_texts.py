"""Texts of SQL are understood without a server: topics, columns, and the records that conditions choose (_sql)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from time import process_time
from typing import Any

import pytest

from sow_client import InvalidArgument
from sow_client._sql import Choice, parsed

TIME = int(datetime(2030, 1, 31, tzinfo=UTC).timestamp() * 1e6)


def choice(where: str, message_type: str = "json", **parameters: object) -> Choice | None:
    return parsed(f"SELECT a, b, flag, zz FROM t WHERE {where}", parameters).choice("t", message_type)


@pytest.mark.parametrize(
    ("where", "filter_text", "values"),
    [
        ("a = 'x'", "/a = :p1", ["x"]),
        ("'x' < a", "/a > :p1", ["x"]),
        ("A = 'x'", "/a = :p1", ["x"]),
        ("t.a >= 2.5", "/a >= :p1", [2.5]),
        ("a BETWEEN -3 AND 1e3", "(/a >= :p1 AND /a <= :p2)", [-3, 1000.0]),
        ("a IN (1, 2.5)", "/a IN :p1", [[1, 2.5]]),
        ("a LIKE 'IB%'", "/a BEGINS WITH :p1", ["IB"]),
        ("flag AND NOT zz", "(/flag = :p1 AND /zz = :p2)", [True, False]),
        ("flag = false", "/flag = :p1", [False]),
        ("(a = 1 OR b = 2) AND zz > 'x'", "((/a = :p1 OR /b = :p2) AND /zz > :p3)", [1, 2, "x"]),
        ("a = $p AND lower(b) = 'x'", "/a = :p1", ["it's"]),
        ("_key = 'k' AND _version > 1", "(@key = :p1 AND @version > :p2)", ["k", 1]),
        ("_expire_time < '2030-01-31'", "@expire_time < :p1", [TIME]),
        ("_publish_time >= TIMESTAMP '2030-01-31 00:00:00.000001'", "@publish_time >= :p1", [TIME + 1]),
        ("_publish_time = $east", "@publish_time = :p1", [TIME]),
        ("_expire_time IS NULL", "@expire_time IS NULL", []),
    ],
)
def test_simple_conditions_are_a_filter(where: str, filter_text: str, values: list[object]) -> None:
    east = datetime(2030, 1, 31, 2, tzinfo=timezone(timedelta(hours=2)))
    found = choice(where, p="it's", east=east)
    assert found is not None
    assert (found.filter, list(found.values.values())) == (filter_text, values)
    assert found.filtered == (found.filter, found.values)


@pytest.mark.parametrize(
    "where",
    [
        "a <> 'x'", "a NOT LIKE 'x%'", "a NOT IN ('x')", "a NOT BETWEEN 1 AND 2", "a LIKE '%x'", "a LIKE 'x_%'",
        "a LIKE 'x!%%' ESCAPE '!'", "a ILIKE 'x%'", "a IN ('x', 5)", "a IN ('x', NULL)", "a = NULL", "a IS NULL",
        "a = ''", "a = b", "a + 1 = 2", "a = 9007199254740993", "a > 0.1234567890123456789", "a = $missing",
        "a = 'x' OR lower(b) = 'x'", "NOT (a = 'x')", "a = DATE '2030-01-31'", "a = 'x' IS NULL", "a > true",
        "_expire_time < now()", "_expire_time < '31 Jan 2030'", "_expire_time < '2030-01-31 00:00:00+02'",
        "_expire_time < DATE '2030-01-31 12:00:00'", "_version = 1.5", "_key = 5", "_version IS NULL", "zzz = 1",
        "(SELECT count(*) FROM t AS other WHERE other.a = t.a) > 1", "result = 'X'", "b[1] = 2", "b.c = 'x'",
    ],
)  # fmt: skip
def test_other_conditions_are_for_duckdb_alone(where: str) -> None:
    text = f"SELECT a, b, upper(a) AS result, 1 AS zzz FROM t WHERE {where}"
    assert parsed(text, {"missing": None}).choice("t", "json") is None


def test_a_condition_chooses_by_the_type_of_its_value() -> None:
    found = choice("a = '106' OR a > 200 OR flag")
    assert found is not None
    rows: list[tuple[dict[str, Any], bool]] = [
        ({"a": "106"}, True), ({"a": 106}, False), ({"a": 201}, True), ({"a": 200.5}, True), ({"a": "201"}, False),
        ({"a": ["106"]}, False), ({"a": None}, False), ({}, False), ({"flag": True}, True), ({"flag": 1}, False),
    ]  # fmt: skip
    assert [found.holds(row) for row, _ in rows] == [chosen for _, chosen in rows]
    one = choice("a = '106'")
    assert one is not None
    doubts: dict[str, set[type]] = {
        "texts": {str},
        "texts and null": {str, type(None)},
        "mixed": {str, int},
        "numbers": {int},
        "none": set(),
    }
    assert {name for name, kinds in doubts.items() if one.doubts({"a": kinds})} == {"mixed", "numbers", "none"}


@pytest.mark.parametrize(
    ("message_type", "where", "is_pushed"),
    [
        ("fix", "a = 'x'", True), ("fix", "a > 'x'", False), ("fix", "a = 5", False), ("nvfix", "a = '\\\\x'", False),
        ("msgpack", "a = 'x'", True), ("msgpack", "flag", True), ("msgpack", "a > 5", False),
        ("binary", "a = 'x'", False), ("binary", "_key > 'x'", True), ("", "a = 'x'", False),
    ],
)  # fmt: skip
def test_each_message_type_has_its_own_simple_conditions(message_type: str, where: str, is_pushed: bool) -> None:
    assert (choice(where, message_type) is not None) == is_pushed


def test_a_filter_that_the_server_would_refuse_is_judged_by_the_client_alone() -> None:
    for where in (
        f"a IN ({', '.join(map(str, range(10_001)))})",
        " OR ".join(f"a = {number}" for number in range(501)),
        f"a = '{'x' * 50_000}'",
    ):
        found = choice(where)
        assert found is not None
        assert found.filtered == (None, {})


@pytest.mark.parametrize(
    ("text", "filters"),
    [
        ("SELECT x.a FROM t AS x JOIN u ON x.a = u.a WHERE x.b = 1 AND u.c = 2", {"t": "/b = :p1", "u": "/c = :p1"}),
        ("SELECT x.a FROM t AS x JOIN u ON x.a = u.a WHERE b = 1", {"t": None, "u": None}),
        ("SELECT x.a FROM t AS x LEFT JOIN u ON x.a = u.a WHERE u._expire_time IS NULL", {"t": None, "u": None}),
        ("SELECT x.a FROM t x ASOF JOIN u ON x.a >= u.a WHERE x.b = 1", {"t": None, "u": None}),
        ("SELECT a FROM t WHERE b = 1 UNION SELECT a FROM t WHERE b = 2", {"t": "(/b = :p1 OR /b = :p2)"}),
        ("SELECT a FROM t WHERE b = 1 UNION SELECT a FROM t", {"t": None}),
        ("WITH w AS (SELECT * FROM t WHERE b = 1) SELECT * FROM w WHERE c = 2", {"t": "/b = :p1"}),
        ("SELECT a FROM t WHERE b = 1 USING SAMPLE 3", {"t": None}),
        ("WITH W AS (SELECT * FROM t WHERE b = 1) SELECT * FROM w", {"t": "/b = :p1"}),
        ("SELECT a FROM T AS x JOIN u AS Y ON X.a = Y.a WHERE X.b = 1", {"T": "/b = :p1", "u": None}),
        ("SELECT x.b FROM t AS x(b, a) WHERE x.b = 1", {"t": None}),
        ('SELECT 1 FROM md.prices, "eu-prices" e WHERE e."x y" = 1', {"md.prices": None, "eu-prices": None}),
    ],
)
def test_topics_are_found_with_their_conditions(text: str, filters: dict[str, str | None]) -> None:
    statement = parsed(text)
    found = {topic: statement.choice(topic, "json") for topic in statement.topics}
    assert {topic: one and one.filter for topic, one in found.items()} == filters


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("SELECT a, count(*) FROM t WHERE b > 1 GROUP BY a ORDER BY _key", {"t", "a", "b", "_key"}),
        ("SELECT pos.x[1] FROM t", {"t", "pos", "x"}),
        ("SELECT * FROM t", None),
        ("SELECT t FROM t", None),
        ("SELECT COLUMNS('a.*') FROM t", None),
        ("SELECT a FROM t NATURAL JOIN u", None),
        ("SELECT md.prices FROM md.prices", None),
        ("SELECT p FROM t AS d(p)", None),
        ("SELECT #1 FROM t", None),
        ("SELECT column_name FROM (DESCRIBE t)", None),
        ("SELECT column_name FROM (SUMMARIZE t)", None),
        ("SELECT a FROM t; -- a remark", {"t", "a"}),
    ],
)
def test_columns_are_found_or_all_are_read(text: str, columns: set[str] | None) -> None:
    assert parsed(text).columns == columns


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("SELECT a FROM t, t", "Alias already used: t"),
        ("SELECT a FROM t x, main.t y", r'this name is quoted: "main.t" \(line 1, column'),
        ('SELECT a FROM md.t x, "md.t" y', 'quote it everywhere, or nowhere: "md.t"'),
        ("SELECT a FROM t, repeat('a', 3)", r"repeat is no topic.*\(line 1, column 18\)"),
    ],
)
def test_a_name_that_is_not_clear_is_refused(text: str, told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        parsed(text)


def test_a_long_condition_is_understood_in_time_that_grows_with_its_length() -> None:
    """4,000 conditions took 36 seconds: each column went up the tree to its SELECT."""
    started = process_time()
    parsed(f"SELECT a FROM t WHERE {' OR '.join(f'a = {number}' for number in range(4_000))}")
    assert process_time() - started < 10
