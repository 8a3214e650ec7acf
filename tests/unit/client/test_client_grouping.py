"""The expressions of an answer of groups, as Python values."""

from __future__ import annotations

import pytest

from sow.v1 import sow_pb2
from sow_client._contract import needed
from sow_client._grouping import Expressions, divided, expressions
from sow_client._reads import QueryProgress, query_request
from sow_client.errors import InvalidArgument


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("/a", ["/a"]),
        ("COUNT(*) AS n , SUM(/px * /qty) AS s", ["COUNT(*) AS n", "SUM(/px * /qty) AS s"]),
        ("IF(/a, 1, 2) AS x, /b", ["IF(/a, 1, 2) AS x", "/b"]),
        ("/[odd, name], /b", ["/[odd, name]", "/b"]),
        ("/[a\\], b], /c", ["/[a\\], b]", "/c"]),
        ("CONCAT('a,(', /b, \"'\") AS c, /d", ["CONCAT('a,(', /b, \"'\") AS c", "/d"]),
        ("'it\\'s, ' AS t, /d", ["'it\\'s, ' AS t", "/d"]),
        ("a', b", ["a'", "b"]),
        ("/a,", ["/a", ""]),
    ],
)
def test_a_list_is_divided_at_its_own_commas(text: str, parts: list[str]) -> None:
    assert divided(text) == parts


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ("/a, SUM(/b) as total", [("", "/a"), ("total", "SUM(/b)")]),
        (["/a", "/b AS x, /c"], [("", "/a"), ("x", "/b"), ("", "/c")]),
        ({"n": "COUNT(*)", "odd name": "SUM(/x)"}, [("n", "COUNT(*)"), ("odd name", "SUM(/x)")]),
        (["CONCAT(/a, ' AS b')"], [("", "CONCAT(/a, ' AS b')")]),
        ("COUNT(*) AS 1x, /a  as\nb.c-d", [("1x", "COUNT(*)"), ("b.c-d", "/a")]),
        ("/AS, IF(/a, /b AS c, 1)", [("", "/AS"), ("", "IF(/a, /b AS c, 1)")]),
        ("/[odd AS x], 'a AS b' AS t", [("", "/[odd AS x]"), ("t", "'a AS b'")]),
        (None, []),
        ((), []),
    ],
)
def test_expressions_come_with_their_names(given: Expressions | None, made: list[tuple[str, str]]) -> None:
    assert [(each.name, each.expression) for each in expressions(given, "aggregate")] == made


@pytest.mark.parametrize(
    ("text", "place"), [("COUNT(*) AS $x", 12), ("COUNT(*) AS", 11), ("COUNT(*)  AS  'a b'", 14), ("/a AS b c", 6)]
)
def test_a_name_that_is_none_is_shown_with_a_caret(text: str, place: int) -> None:
    """The whole text went to the server, which asked for a name."""
    with pytest.raises(InvalidArgument) as caught:
        expressions(text, "aggregate")
    what, line, caret = caught.value.message.split("\n")
    assert what.startswith(f"aggregate: expected a name after AS at {place}: letters, digits and _")
    assert (line[2:], caret.index("^") - 2) == (text, place)
    with pytest.raises(InvalidArgument) as caught:
        expressions(f"COUNT('{'x' * 500}') AS $x", "aggregate")
    _, line, caret = caught.value.message.split("\n")
    assert len(line) < 100
    assert line[caret.index("^")] == "$"


def test_wrong_types_and_empty_texts_are_refused_by_the_name_of_the_argument() -> None:
    with pytest.raises(InvalidArgument, match="group_by: an expression is empty"):
        query_request("t", group_by="/a, ")
    with pytest.raises(TypeError, match="group_by: 1 is of type int"):
        query_request("t", group_by=[1])  # type: ignore[list-item]  # the test
    with pytest.raises(TypeError, match="aggregate: 'n': 7 is not a name and an expression"):
        query_request("t", aggregate={"n": 7})


@pytest.mark.parametrize("field", ["group_by", "aggregate", "having"])
def test_an_older_server_is_not_asked(field: str) -> None:
    """It would send the records themselves."""
    request = query_request("t", **{field: "/a"})  # type: ignore[arg-type]  # each takes a text
    needs = needed(request)
    assert needs is not None
    assert (needs.field, needs.contract) == (field, 3)


def test_the_footer_counts_groups() -> None:
    progress = QueryProgress("t")
    progress.batch(sow_pb2.QueryResponse(header=sow_pb2.QueryHeader(bookmark="e:1")))
    progress.batch(sow_pb2.QueryResponse(footer=sow_pb2.QueryFooter(matched=9, returned=1, groups=3, ungrouped=2)))
    assert progress.footer is not None
    assert (progress.footer.groups, progress.footer.ungrouped) == (3, 2)
