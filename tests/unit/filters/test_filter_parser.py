"""Filters: texts that the parser accepts, and its messages about others."""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Final

import pytest

from sow_server.filters import FilterError, parse, print_filter, print_path
from sow_server.filters.parser import (
    FUNCTIONS_MAX,
    LENGTH_BYTES_MAX,
    LIST_ITEMS_MAX,
    NESTING_MAX,
    PATTERNS_MAX,
    TERMS_MAX,
)
from sow_server.filters.tree import (
    STEPS_MAX,
    And,
    Arithmetic,
    Boolean,
    Compare,
    Comparison,
    Expression,
    Function,
    FunctionCall,
    In,
    Like,
    Matches,
    Negate,
    Not,
    Null,
    Number,
    Operator,
    Or,
    Path,
    Text,
    TextTest,
)

A, B = Path(("a",)), Path(("b",))


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("/a", ("a",)),
        ("/a/b", ("a", "b")),
        ("/arr[0]", ("arr", 0)),
        ("/arr[0]/x[12]", ("arr", 0, "x", 12)),
        ("/arr[007]", ("arr", 7)),
        ("/55", ("55",)),
        ("/0", ("0",)),
        ("[/odd name]", ("odd name",)),
        ("[/odd name/b-c][1]/d", ("odd name", "b-c", 1, "d")),
        (r"[/a\/b/c\]]", ("a/b", "c]")),
        ("/[odd/name]/b", ("odd/name", "b")),
        (r"/[a\]b]", ("a]b",)),
        (r"/[a\b]", (r"a\b",)),
        ("/größe", ("größe",)),
        ("/a.b:c$d#e", ("a.b:c$d#e",)),
        ("/and", ("and",)),
        ("/NULL", ("NULL",)),
    ],
)
def test_paths(text: str, steps: tuple[str | int, ...]) -> None:
    assert parse(text) == Path(steps)
    assert parse(print_path(steps)) == Path(steps)


@pytest.mark.parametrize(
    ("text", "literal"),
    [
        ("1", Number(1)),
        ("-5", Number(-5)),
        ("007", Number(7)),
        ("1.50", Number(1.5)),
        (".5", Number(0.5)),
        ("5.", Number(5.0)),
        ("1e-3", Number(0.001)),
        ("-1E+2", Number(-100.0)),
        ("1e999", Number(float("inf"))),
        ("18446744073709551615", Number(2**64 - 1)),
        ("-9223372036854775808", Number(-(2**63))),
        ("18446744073709551617", Number(2**64 + 1)),
        ("-9223372036854775809", Number(-(2**63) - 1)),
        ("123456789012345680000", Number(123456789012345680000)),
        ("9" * 400, Number(10**400 - 1)),
        ("0" * 5000 + "7", Number(7)),
        ("9" * 4300, Number(10**4300 - 1)),
        ("9" * 4301 + ".", Number(float("inf"))),
        ("'text'", Text("text")),
        ('"text"', Text("text")),
        ("''", Text("")),
        (r"'it\'s'", Text("it's")),
        ('"it\'s"', Text("it's")),
        (r"'a\\b\n\t\r\"'", Text('a\\b\n\t\r"')),
        (r"'\d+\.\w'", Text(r"\d+\.\w")),
        (r"'\u00e9\ud83d\ude00'", Text("é😀")),
        (r"'\u00'", Text(r"\u00")),
        ("'two\nlines'", Text("two\nlines")),
        ("TRUE", Boolean(True)),
        ("False", Boolean(False)),
        ("nUlL", Null()),
    ],
)
def test_literals(text: str, literal: Expression) -> None:
    tree = parse(f"/a = {text}")
    assert repr(tree) == repr(Compare(Comparison.EQUAL, A, literal))
    assert repr(parse(print_filter(tree))) == repr(tree)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("/a==1&&/b<>2||not/c!=3", "/a = 1 AND /b != 2 OR NOT /c != 3"),
        ("/a = 1 or /b = 2 and not (/c = 3 or /d = 4)", "/a = 1 OR /b = 2 AND NOT (/c = 3 OR /d = 4)"),
        ("not not /a", "NOT NOT /a"),
        ("not /a = 1", "NOT /a = 1"),
        ("((/a)) = ((1))", "/a = 1"),
        ("/a+1*2-/b/3 > -/c % 2", "/a + 1 * 2 - /b/3 > -/c % 2"),
        ("(/a+1)*2 - (/b - (/c - 1)) > 0", "(/a + 1) * 2 - (/b - (/c - 1)) > 0"),
        ("/a / /b / 2 > 1", "/a / /b / 2 > 1"),
        ("/a / (/b / 2) > 1", "/a / (/b / 2) > 1"),
        ("/a --1 > - -1", "/a - -1 > --1"),
        ("-(5) = /a", "-(5) = /a"),
        ("not /a in (1, 'x', null, -2)", "/a NOT IN (1, 'x', null, -2)"),
        ("/a not in (1)", "/a NOT IN (1)"),
        ("/a between 1 and 2 and /b not between /c and /d + 1", "/a BETWEEN 1 AND 2 AND /b NOT BETWEEN /c AND /d + 1"),
        ("/a like 'x' or /a not like \"y\"", "/a LIKE 'x' OR /a NOT LIKE 'y'"),
        ("/a is null or /b is not null", "/a IS NULL OR /b IS NOT NULL"),
        ("/a begins  with 'x'", "/a BEGINS WITH 'x'"),
        ("/a not ends\nwith ('x')", "/a NOT ENDS WITH 'x'"),
        ("/a contains lower(/b)", "/a CONTAINS LOWER(/b)"),
        ("/a begins with ('x', 'y')", "/a BEGINS WITH ('x', 'y')"),
        ("(/a = 1) = true", "(/a = 1) = true"),
        ("(/a = 1) is null", "(/a = 1) IS NULL"),
        ("If ( /a > 1 , 'x' , 'y' ) = 'x'", "IF(/a > 1, 'x', 'y') = 'x'"),
        ("@Key = 1 and @EXPIRE_TIME < now_micros()", "@key = 1 AND @expire_time < NOW_MICROS()"),
        ("true", "true"),
        ("  \t\n/a\u00a0= 1 ", "/a = 1"),
        ("(/a and /b) and /c", "(/a AND /b) AND /c"),
    ],
)
def test_the_canonical_text(text: str, canonical: str) -> None:
    tree = parse(text)
    assert print_filter(tree) == canonical
    assert repr(parse(canonical)) == repr(tree)


def test_a_chain_is_one_level() -> None:
    assert parse("/a and /b and /a or /b") == Or((And((A, B, A)), B))
    assert parse("/a - 1 - 2 = 0") == Compare(
        Comparison.EQUAL,
        Arithmetic(Operator.SUBTRACT, Arithmetic(Operator.SUBTRACT, A, Number(1)), Number(2)),
        Number(0),
    )


def test_a_slash_is_a_division_where_no_value_can_stand() -> None:
    assert parse("/a / /b = 1") == Compare(Comparison.EQUAL, Arithmetic(Operator.DIVIDE, A, B), Number(1))
    assert parse("/a/b = 1") == Compare(Comparison.EQUAL, Path(("a", "b")), Number(1))
    assert parse("(/a)/2 = 1") == Compare(Comparison.EQUAL, Arithmetic(Operator.DIVIDE, A, Number(2)), Number(1))


@pytest.mark.parametrize(
    ("text", "position", "what"),
    [
        ("", 0, "expected a value"),
        ("   ", 3, "expected a value"),
        ("/price > AND /b = 1", 9, "expected a value"),
        ("/price >", 8, "expected a value"),
        ("/a = 1 and", 10, "expected a value"),
        ("/ 2 = 1", 0, "expected a value"),
        ("/a = 12abc", 5, "expected a value"),
        ("/a = ~", 5, "expected a value"),
        ("/a = = 1", 5, "expected a value"),
        ("length(", 7, "expected a value or ')'"),
        ("length(/a", 9, "expected an operator, AND, OR, ',' or ')'"),
        ("/a ! 1", 3, "expected an operator, AND, OR or the end"),
        ("/a < 1 < 2", 7, "expected AND, OR or the end"),
        ("/a = 'x' 'y'", 9, "expected AND, OR or the end"),
        ("/a = 1)", 6, "expected the end"),
        ("(/a = 1", 7, "expected AND, OR or ')'"),
        ("/a not 5", 7, "expected IN, LIKE, BETWEEN, BEGINS WITH, ENDS WITH, CONTAINS"),
        ("/a in 5", 6, "expected '('"),
        ("/a in ()", 7, "expected a value"),
        ("/a in (1,", 9, "expected a value"),
        ("/a in (-)", 8, "expected a value"),
        ("/a in (1 2)", 9, "expected ',' or ')'"),
        ("/a between 1", 12, "expected"),
        ("/a is 5", 6, "expected NULL or NOT NULL"),
        ("/a is not", 9, "expected NULL"),
        ("/a like 5", 8, "expected a text"),
        ("/a like '('", 8, "expected a regular expression"),
        (r"/a like '(?=x)'", 8, "expected a regular expression"),
        (r"/a like '(a)\\1'", 8, "expected a regular expression"),
        ("/a = 'x", 5, "expected the end of a text"),
        ("/a = '\\ud800'", 5, "half a Unicode character"),
        ("/a = IBM", 5, "expected a value"),
        ("/first-name = 'x'", 7, "expected a value"),
        ("foo(1) = 1", 0, "no function foo"),
        ("length() = 1", 0, "LENGTH takes 1 argument, not 0"),
        ("round(1, 2, 3) = 1", 0, "ROUND takes 1 or 2 arguments, not 3"),
        ("concat() = 'x'", 0, "CONCAT takes at least 1 argument, not 0"),
        ("now_micros(1) = 1", 0, "NOW_MICROS takes no arguments, not 1"),
        ("array_count(1) = 1", 12, "expected a field"),
        ("@foo = 1", 0, "expected one of @key, @version, @publish_time, @expire_time, @topic"),
        ("/a + 1", 0, "expected a condition"),
        ("/b = 1 and 'x'", 11, "expected a condition"),
        ("not 5", 4, "expected a condition"),
        ("/b or length(/a)", 6, "expected a condition"),
        ("if(5, true, false)", 3, "expected a condition"),
        ("if(/a, 1, 2)", 0, "expected a condition"),
        ("@key", 0, "expected a condition"),
        ("/a[x] = 1", 2, "expected an operator, AND, OR or the end"),
        ("/a[-1] = 1", 2, "expected an operator, AND, OR or the end"),
        ("/a[99999999999999999999] = 1", 0, "a step is"),
        ("/a = '\ud800'", 6, "not a Unicode character"),
    ],
)
def test_an_error_says_where_and_what(text: str, position: int, what: str) -> None:
    with pytest.raises(FilterError) as caught:
        parse(text)
    assert caught.value.position == position
    first = caught.value.message.splitlines()[0]
    assert first.startswith(what)
    assert f" at {position}" in first
    assert str(caught.value) == caught.value.message


def test_an_error_shows_the_text_and_a_caret() -> None:
    with pytest.raises(FilterError) as caught:
        parse("/price > AND /symbol = 'IBM'")
    assert caught.value.message == (
        "expected a value at 9\n"
        "  /price > AND /symbol = 'IBM'\n"
        "           ^"
    )  # fmt: skip


@pytest.mark.slow
def test_an_error_is_told_where_no_more_files_can_be_opened() -> None:
    """X1. What the parser expected had got a module of its own, which the first faulty filter of a process loaded while
    its error was handled: with all its files open, a server answered that one INTERNAL."""
    program = """
import os, resource
from sow_server.filters import FilterError, parse

parse("/price > 9")
resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
opened = []
try:
    while True:
        opened.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
try:
    parse("/price > ")
except FilterError as error:
    print(str(error).splitlines()[0])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert done.stdout == "expected a value at 9\n", done.stderr


def test_an_error_in_a_long_filter_of_several_lines_shows_the_place() -> None:
    text = "/a = 1\nAND " + "/b = 2 AND " * 20 + "/c = = 3 AND" + " /d = 4 AND" * 20 + " /e = 5"
    with pytest.raises(FilterError) as caught:
        parse(text)
    what, line, caret = caught.value.message.splitlines()
    assert what == f"expected a value at {text.index('= 3')} (line 2, column {text.index('= 3') - 6})"
    assert len(line) < 80
    assert line[caret.index("^") :].startswith("= 3 AND")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("/symbol = IBM", "; a field is written /IBM, a text 'IBM'"),
        ("price > 1", "; a field is written /price, a text 'price'"),
        ("/first-name = 'x'", "; a name with a hyphen is put in brackets: /[a-b]"),
        ("/a = 'x", "; its quote is never closed"),
        ("/a like '('", "; missing ): ("),
        ("foo(1) = 1", "; there are LENGTH, LOWER"),
    ],
)
def test_an_error_advises(text: str, hint: str) -> None:
    with pytest.raises(FilterError) as caught:
        parse(text)
    assert hint in caught.value.message


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("SELECT * FROM cars WHERE year = 70", "write only the condition, as it stands after WHERE"),
        ("with x as (select 1) select * from x", "write only the condition, as it stands after WHERE"),
        ("DELETE FROM cars WHERE /year = 70", "the call says what becomes of the records"),
        ("UPDATE cars SET year = 1", "the call says what becomes of the records"),
        ("WHERE /year = 70", "leave out WHERE"),
        ("/year = 70 LIMIT 10", "top_n and skip_n"),
        ("/year = 70 offset 10", "top_n and skip_n"),
        ("/year = 70 ORDER BY year", "that is order_by"),
        ("/year = 70 GROUP BY year", "groups nothing"),
        ("/name ILIKE 'x'", "LIKE '(?i)abc'"),
        ("/name ~ 'x'", "a regular expression is written LIKE 'pattern'"),
        ("/name =~ 'x'", "a regular expression is written LIKE 'pattern'"),
        ("/name NOTNULL", "write IS NULL or IS NOT NULL"),
        ("/name EXISTS", "write /field IS NOT NULL"),
        ("CASE WHEN /a THEN 1 END = 1", "write IF(condition, x, y)"),
        ("/a = 1;", "without ; and comments"),
        ("/a = 1 -- all", "without ; and comments"),
        ("/a = ?", "a parameter is written :name"),
        ("/a = %s", "a parameter is written :name"),
        ("/a = $1", "a parameter is written :name"),
        ("/a = ${name}", "a parameter is written :name"),
        ("`name` = 'x'", "a field is written /name"),
        ("name = 'x'", "a field is written /name, a text 'name'"),
        ("customer.name = 'x'", "one inside another /customer/name"),
        ("limit = 5", "a field is written /limit"),
        ("/a = 1 AND offset > 5", "a field is written /offset"),
    ],
)
def test_a_text_in_sql_gets_a_sentence_about_the_form_here(text: str, hint: str) -> None:
    with pytest.raises(FilterError) as caught:
        parse(text)
    assert hint in caught.value.message


@pytest.mark.parametrize(
    "text", ["/limit = 5", "/select = 'where'", "/a = 'ORDER BY x; --'", "/case AND /[group by] = 1"]
)
def test_words_of_sql_are_names_and_texts_as_others(text: str) -> None:
    assert print_filter(parse(text)) == text


def nested(levels: int) -> list[str]:
    return [
        "(" * levels + "/a" + ")" * levels,
        "NOT " * levels + "/a",
        "-" * levels + "/a = 1",
        "abs(" * levels + "/a" + ")" * levels + " = 1",
        "/a = 1" + " + 1" * levels,
    ]


@pytest.mark.slow
def test_the_bounds_each_have_their_error() -> None:
    for text in nested(NESTING_MAX - 2):
        parse(text)
    for text in [*nested(NESTING_MAX + 1), *nested(2_000)]:
        with pytest.raises(FilterError) as caught:
            parse(text)
        assert "nested deeper than the limit of 64" in caught.value.message
        assert caught.value.position >= 0

    parse("/a = '" + "x" * (LENGTH_BYTES_MAX - 7) + "'")
    with pytest.raises(FilterError) as caught:
        parse("/a = '" + "é" * (LENGTH_BYTES_MAX // 2) + "'")
    assert caught.value.message == "a filter of 65543 bytes, more than the limit of 65536"
    assert caught.value.position == -1

    items = ",".join(["1"] * LIST_ITEMS_MAX)
    parse(f"/a in ({items})")
    for test in ("in", "begins with"):
        with pytest.raises(FilterError) as caught:
            parse(f"/a {test} ({items},1)")
        assert "a list of 10001, more than the limit of 10000, at " in caught.value.message

    parse("/x" * STEPS_MAX)
    with pytest.raises(FilterError) as caught:
        parse("/x" * (STEPS_MAX + 1))
    assert "a path of 65 steps, more than the limit of 64, at 0" in caught.value.message

    parse("/a like 'x' or " * (PATTERNS_MAX - 1) + "/a like 'x'")
    with pytest.raises(FilterError) as caught:
        parse("/a like 'x' or " * PATTERNS_MAX + "/a like 'x'")
    assert caught.value.message.startswith("more regular expressions than the limit of 100 at 1500\n")
    parse("/a not like 'x' and not /a like 'x' and " * (PATTERNS_MAX // 2 - 1) + "/a like 'x'")
    for text, limit in (("/a = 1", TERMS_MAX - 1), ("ABS(/a) > 1", FUNCTIONS_MAX)):
        parse(" or ".join([text] * limit))
        with pytest.raises(FilterError) as caught:
            parse(" or ".join([text] * (limit + 1)))
        assert (
            f"than the limit of {limit + (limit != FUNCTIONS_MAX)} at {limit * (len(text) + 4)}\n"
            in caught.value.message
        )
    assert parse("(" * 3 + "ABS(/a) = 1" + ")" * 3) == parse("ABS(/a) = 1")


def test_a_pattern_has_a_bound_on_its_memory() -> None:
    with pytest.raises(FilterError) as caught:
        parse(r"/a like '((\\pL{100}){10}){10}'")
    assert "expected a regular expression at 8; " in caught.value.message


@pytest.mark.slow
def test_a_long_chain_is_no_nesting() -> None:
    tree = parse(" OR ".join(["/a = 1"] * 5000))
    assert isinstance(tree, Or)
    assert len(tree.operands) == 5000


def test_literals_of_different_kinds_are_different_filters() -> None:
    """1 == True in Python, but `/a = 1` and `/a = true` are not the same filter."""
    assert len({parse(f"/a = {text}") for text in ("1", "true", "'1'", "null")}) == 4


def test_a_tree_that_no_text_can_be_is_refused() -> None:
    refused: list[Callable[[], object]] = [
        lambda: Number(10**4300),
        lambda: Number(-(10**4300)),
        lambda: Number(float("nan")),
        lambda: Number(True),
        lambda: Path(()),
        lambda: Path((0,)),
        lambda: Path(("a", "")),
        lambda: Path(("a", -1)),
        lambda: Path(("a",) * 65),
        lambda: And((A,)),
        lambda: Or(()),
        lambda: In(A, ()),
        lambda: Matches(TextTest.CONTAINS, A, ()),
        lambda: Matches(TextTest.CONTAINS, A, (A, B)),
        lambda: FunctionCall(Function.LENGTH, ()),
        lambda: FunctionCall(Function.ARRAY_COUNT, (Number(1),)),
    ]
    for make in refused:
        with pytest.raises(ValueError):
            make()


def test_a_printed_name_or_text_of_any_characters_is_read_back() -> None:
    for odd in ("a b", "]", "[", "\\", "a\\]", "/", "'", "\n", "\x00", "\u2028", "😀", "a-b", "-", "\\u0041"):
        for tree in (Path((odd,)), Path(("x", 1, odd)), Compare(Comparison.EQUAL, A, Text(odd))):
            assert parse(print_filter(tree)) == tree
    assert parse(print_filter(Like(A, r"^\d+'\\"))) == Like(A, r"^\d+'\\")


def test_minus_before_a_number_belongs_to_it() -> None:
    for tree in (Negate(Number(5)), Negate(Number(-5)), Negate(Negate(Number(5))), Negate(A), Number(-0.0)):
        compared = Compare(Comparison.EQUAL, A, tree)
        assert repr(parse(print_filter(compared))) == repr(compared)


def test_not_is_part_of_the_condition_where_there_is_such_a_form() -> None:
    assert parse("/a NOT IN (1)") == Not(In(A, (Number(1),))) == parse("NOT /a IN (1)")


def digits(count: int) -> str:
    return "1" * count


SHAPES: Final[dict[str, Callable[[int], str]]] = {
    "a number with a letter behind": lambda size: "/a = " + digits(size) + "x",
    "a number with two points": lambda size: "/a = " + digits(size) + "." + digits(size) + ".",
    "a number in a list": lambda size: "/a IN (" + digits(size) + "_)",
    "blanks": lambda size: "/a = 1" + " " * size + "=",
    "a word and blanks": lambda size: "/a = A" + " " * size,
    "BEGINS and blanks": lambda size: "/a BEGINS" + " " * size,
    "lines": lambda size: "\n" * size + "=",
    "open parentheses": lambda size: "(" * size,
    "NOTs": lambda size: "NOT " * (size // 4),
    "minus signs": lambda size: "-" * size,
    "a text without an end": lambda size: "/a = '" + "x" * size,
    "escapes without an end": lambda size: "/a = '" + "\\'" * (size // 2),
    "names in brackets without an end": lambda size: "/[a" * (size // 3),
    "a path in brackets without an end": lambda size: "[/a" * (size // 3),
    "subscripts": lambda size: "/a" + "[1]" * (size // 3),
    "a subscript without an end": lambda size: "/a[" + digits(size),
    "an end that is missing": lambda size: " AND ".join(["/a = 1"] * (size // 11)) + " AND",
    "a list without an end": lambda size: "/a IN (" + ",".join(["1"] * (size // 2)),
    "conditions": lambda size: " OR ".join([f"/a{number} = {number}" for number in range(size // 16)]),
    "arguments": lambda size: "CONCAT(" + ",".join(["/a"] * (size // 3)) + ") = 'x'",
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_parsing_takes_time_in_proportion_to_the_text(shape: str) -> None:
    """A number of 30,000 digits with a letter behind took minutes: every way to divide the digits between two
    repetitions was tried. Four such filters kept everybody waiting. Of four times the text the work is about fourfold;
    quadratic would be sixteenfold."""

    def work(size: int) -> float:
        text, best = SHAPES[shape](size), math.inf
        for _ in range(2):
            begin = time.thread_time()
            with contextlib.suppress(FilterError):
                parse(text)
            best = min(best, time.thread_time() - begin)
        return best

    work(500)
    short, long = work(1_000), work(4_000)
    assert long < 9 * short + 0.005
