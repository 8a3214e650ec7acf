"""`sow filter from-amps`: filters of AMPS in the language of this store."""

from __future__ import annotations

import time

import pytest
from click.testing import CliRunner, Result

from sow_cli.amps_filters import from_amps
from sow_cli.amps_patterns import PatternFault, converted
from sow_cli.amps_syntax import AmpsError
from sow_cli.command import sow
from sow_server.filters import Meta, compile_filter, parse

META = Meta("k", 1, 1, None, "t", 1)


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ("/note = ''", "COALESCE(/note, '') = ''"),
        ('"" == /note', "COALESCE(/note, '') = ''"),
        ("/note = NULL", "COALESCE(/note, '') = ''"),
        ("/note IS NULL", "COALESCE(/note, '') = ''"),
        ("/note != ''", "IF(/note = '', false, /note IS NOT NULL)"),
        ("/note IS NOT NULL", "IF(/note = '', false, /note IS NOT NULL)"),
        ("NOT (/note = '' OR /b = 1)", "NOT (IF(/note = '', true, /note IS NULL) OR /b = 1)"),
        ("/a IN ('', 'x')", "COALESCE(/a, '') = '' OR /a IN ('x')"),
        ("/a IN ('')", "COALESCE(/a, '') = ''"),
        ("/a NOT IN ('', 'x')", "NOT (IF(/a = '', true, /a IS NULL) OR /a IN ('x'))"),
        ("/a = 1 && /b <> 2 || !/c", "/a = 1 AND /b != 2 OR NOT /c"),
        ("(/a = 1 or /b = 2) and /c == 3", "(/a = 1 OR /b = 2) AND /c = 3"),
        ("INSTR(/a, 'x') != 0", "/a CONTAINS 'x'"),
        ("0 < INSTR(/a, 'x')", "/a CONTAINS 'x'"),
        ("INSTR(/a, 'x') = 0", "NOT /a CONTAINS 'x'"),
        ("INSTR(/a, 'x') = 3", "INSTR(/a, 'x') = 3"),
        ("INSTR_I(/a, 'MSFT') != 0", "LOWER(/a) CONTAINS 'msft'"),
        ("STREQUAL_I(/a, 'QED') == 1", "LOWER(/a) = 'qed'"),
        ("STREQUAL_I(/a, /b) = 0", "NOT LOWER(/a) = LOWER(/b)"),
        ("/a NOT BEGINS WITH ('x')", "/a NOT BEGINS WITH 'x'"),
        ("/a ENDS  WITH ('x', 'y')", "/a ENDS WITH ('x', 'y')"),
        ("/a NOT BETWEEN 1 AND 5", "/a NOT BETWEEN 1 AND 5"),
        (r"/a LIKE '^\\d+$'", r"/a LIKE '^\\d+$'"),
        (r"/a LIKE r'^\d+$'", r"/a LIKE '^\\d+$'"),
        ("/a LIKE '(?<id>x)'", "/a LIKE '(x)'"),
        (r"/a = 'O\'Brien' AND /b = " + '"it\'s"', r"/a = 'O\'Brien' AND /b = 'it\'s'"),
        (r"/a = '\x41\102\t\q'", r"/a = 'AB\tq'"),
        (r"/a = '\xc3\xa9'", "/a = 'é'"),
        ("/a = 'OR /b = '", "/a = 'OR /b = '"),
        ("CEILING(/a) = LEFT(/b, 3)", "CEIL(/a) = SUBSTR(/b, 1, 3)"),
        ("/a / 2 - -(/b) * (/c + 1) > 0", "/a / 2 - -(/b) * (/c + 1) > 0"),
        ("/legs[0]/px > 1 AND /55 = 'x'", "/legs[0]/px > 1 AND /55 = 'x'"),
        ("NOT NULL", "NOT false"),
        ("1 = 1", "1 = 1"),
        ("(/a = 1) > 0", "/a = 1"),
        ("0 = STREQUAL_I(/a, 'x')", "NOT LOWER(/a) = 'x'"),
        ("STREQUAL_I(/a, 'x') >= 1.0", "LOWER(/a) = 'x'"),
        ("(/a LIKE 'x') < 1", "/a NOT LIKE 'x'"),
        ("(/a = 1) = (/b = 2)", "(/a = 1) = (/b = 2)"),
        ("IF(/a = 1, /b = 2, 1)", "IF(/a = 1, /b = 2, true)"),
        ("IF(/a = 1, /b = 2, 0) = 1", "IF(/a = 1, /b = 2, false)"),
        ("COALESCE(/a, 0)", "COALESCE(/a, false)"),
        ("/a = " + "0" * 5_000 + "1", "/a = " + "0" * 5_000 + "1"),
        ("IF(/a = '', 'x', /a) = 'x'", "IF(IF(/a = '', true, /a IS NULL), 'x', /a) = 'x'"),
        ("INSTR_I(/a, 'MSFT') = 3", "INSTR(LOWER(/a), 'msft') = 3"),
        ("REGEXP_REPLACE(/a, 'x+', 'y') = 'y'", "REGEXP_REPLACE(/a, 'x+', 'y') = 'y'"),
        ("COALESCE(/a, '') = CONCAT(/b, '')", "COALESCE(/a, '') = CONCAT(/b, '')"),
        ("/a LIKE '[[:alpha:]]+?'", "/a LIKE '[[:alpha:]]+?'"),
        (r"/a LIKE r'(?i)[\x41-\x5a\n-\r[]{2,3}|{x'", r"/a LIKE '(?i)[\\x41-\\x5a\\n-\\r\\[]{2,3}|\\{x'"),
    ],
)
def test_a_filter_becomes_one_of_this_store(given: str, made: str) -> None:
    assert from_amps(given).filter == made
    compile_filter(parse(made))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "position", "words"),
    [
        ("", 0, "expected a value"),
        ("/a = ", 5, "expected a value"),
        ("price > 5", 0, "a field is written /price"),
        ("/a = 'x", 5, "its quote is never closed"),
        ("/a = 1 /b", 8, "a field is written /b"),
        ("1 < /a < 5", 7, "expected AND, OR or the end"),
        ("(/a = 1", 7, "expected ')'"),
        ("/a", None, ""),
        ("5", 0, "expected a condition"),
        ("/a/@b = 1", 2, "an attribute of XML"),
        ("/first-name = 1", 6, "one name or a subtraction at 6; write /[first-name] or /first - /name"),
        ("/a/b-c-1 = 1", 4, "write /a/[b-c-1] or /a/b - /c - 1"),
        ("/a[0]-b = 1", 5, "write /[a-b] or /a - /b"),
        ("/a/[0] = 1", 2, "an element of an array is written /a[0]"),
        ("/a < ''", 3, "has no counterpart"),
        ("/a BEGINS WITH ''", 15, "is null in AMPS"),
        ("/a BETWEEN '' AND 'x'", 11, "is null in AMPS"),
        ("/a IS NAN", 3, "null here"),
        ("/a IN (/b)", 7, "expected a literal"),
        ("/a IN ()", 7, "expected a value"),
        ("/a LIKE /b", 8, "expected a regular expression"),
        ("/a LIKE 'x(?=y)'", 8, "look-ahead"),
        ("/a LIKE r'x(?=y)'", 11, "look-ahead"),
        (r"/a LIKE '\d'", 9, r"AMPS reads \d in a text as d"),
        (r"/a = '\xff'", 5, "not UTF-8"),
        ("1 != 'x'", 2, "two literals"),
        ("'x' NOT IN (5)", 4, "literals"),
        ("STREQUAL_I(/a, 'x') != 2", 20, "a condition is compared only with"),
        ("(/a IS NULL) = 'true'", 13, "a condition is compared only with"),
        ("(/a = 1) > true", 9, "a condition is compared only with"),
        ("(/a = 1) + (/b = 1) = 2", 4, "a condition is neither"),
        ("STREQUAL_I(/a, 'x') IN (1)", 0, "a condition is neither"),
        ("LENGTH(/a IS NULL) = 4", 10, "a condition is neither"),
        ("(/a = 1) IS NULL", 4, "a condition is neither"),
        ("IF(/a = 1, /b = 2, 5)", 19, "expected a condition"),
        ("STRFTIME(/a) = 'x'", 0, "FORMAT_TIME"),
        ("NOTHING(/a) = 'x'", 0, "the function NOTHING has no counterpart"),
        ("LENGTH(/a, 1) = 1", 0, "LENGTH takes 1 arguments, not 2"),
        ("REGEXP_REPLACE(/a, 'x', '$1') = 'y'", 24, "groups cannot be put"),
        ("/a = 1\ud800", 6, "not a Unicode character"),
        ("INSTR(/a, '') != 0", 10, "'' is null in AMPS"),
        ("/a BEGINS WITH (/b, 'x')", 16, "expected a text"),
        ("/a IN (" + ",".join("1" * 10_001) + ")", 3, "a list of 10001 is longer than the limit of 10000"),
        ("&&".join(["/a<1"] * 6_000), 2, "the filter becomes longer than the limit of 65536"),
        ("-" * 40 + "/a > 0", 8, "nested deeper than the limit of 64"),
        ("@a = 1", 0, "an attribute of XML"),
        ("/a = 1x", 5, "expected a number"),
        ("/a = .", 5, "expected a number"),
        ("/a = #", 5, "expected a value or an operator"),
        ("/a~b = 1", 2, "expected the end of a field"),
        ("/a" * 65 + " = 1", 0, "a path of 65 steps"),
        ("/ = 1", 0, "expected the name of a field"),
        ("/a NOT IS NULL", 3, "expected IN, LIKE"),
        ("/a NOT = 1", 7, "expected IN, LIKE"),
        ("/a IN 5", 6, "expected a list in parentheses"),
        ("/a BETWEEN 1, 2", 12, "expected AND"),
        ("/a = " + "1" * 4_301, 5, "a number of more than 4300 digits"),
        (r"/a = 'x\400'", 7, "expected a byte, at most"),
        ("NOT " * 100 + "/a", 240, "nested deeper"),
        ("(" * 100, 60, "nested deeper"),
        ("/a" + " + 1" * 100 + " > 0", 243, "nested deeper"),
        ("/a = '" + "x" * 70_000 + "'", 0, "longer than the limit"),
        ("/a IS NULL AND " * 300 + "/b", 3, "more functions than the limit of 250"),
        (" OR ".join(["/a LIKE 'x'"] * 101), 3, "more regular expressions than the limit of 100"),
        (" OR ".join(["/a=1"] * 6_200), 2, "more conditions and functions"),
    ],
)
def test_what_has_no_counterpart_is_an_error_with_its_place(given: str, position: int | None, words: str) -> None:
    if position is None:
        assert from_amps(given).filter == given
        return
    with pytest.raises(AmpsError) as caught:
        from_amps(given)
    assert words in str(caught.value)
    assert caught.value.position == position


@pytest.mark.parametrize(
    ("given", "remarks"),
    [
        ("/a = 'x' AND /b IN (1, 2) AND /c LIKE 'x'", []),
        ("/a = 'x' AND /px > 100", [(17, "where /px is missing, or is a text that is no number")]),
        ("/px < 100", [(4, "where /px is missing this is unknown")]),
        ("/px > 100 AND /px > 200", [(4, "where /px is missing")]),
        ("/a != 'x'", [(3, "where /a is missing, or is a number or a boolean, this is unknown")]),
        ("/a NOT IN ('x', 'y')", [(3, "where /a is missing, or is a number or a boolean,")]),
        ("/a != '5'", [(3, "where /a is missing this")]),
        ("NOT /a = 'x'", [(7, "where /a is missing")]),
        ("/a = /b", [(3, "where /a is missing"), (3, "where /b is missing")]),
        ("/flag = 'true'", [(6, "write /flag = true")]),
        ("/flag", [(0, "only for the value true")]),
        ("IF(/a = 'x', /b, false)", [(6, "where /a is missing"), (13, "/b alone is true only for the value true")]),
        ("STREQUAL_I(/a, /b)", [(15, "an empty text in /b is one here")]),
        ("/a BEGINS WITH /b", [(15, "an empty text in /b is one here")]),
        ("LENGTH(/a) = 0", [(0, "counts characters here"), (11, "where /a is missing")]),
        ("LENGTH(/a) IN (0, 1)", [(0, "counts characters here"), (11, "where /a is missing")]),
        ("LENGTH(/a) = 2", [(0, "counts characters here")]),
        ("/a = 99999999999999999999", [(5, "beyond 64 bits")]),
    ],
)
def test_what_cannot_be_kept_is_told_once_with_its_place(given: str, remarks: list[tuple[int, str]]) -> None:
    told = from_amps(given).remarks
    assert [remark.position for remark in told] == [position for position, _ in remarks]
    for remark, (_, words) in zip(told, remarks, strict=True):
        assert words in remark.text


@pytest.mark.parametrize(
    ("document", "empty"),
    [({}, True), ({"a": None}, True), ({"a": ""}, True), ({"a": "x"}, False), ({"a": 0}, False), ({"a": False}, False)],
)
def test_an_empty_text_is_a_missing_field(document: dict[str, object], empty: bool) -> None:
    for given, wanted in (
        ("/a = ''", empty),
        ("/a != ''", not empty),
        ("NOT /a = ''", not empty),
        ("NOT (/a != '')", empty),
        ("/a IN ('')", empty),
        ("/a NOT IN ('')", not empty),
        ("IF(/a = '', 1, 2) = 1", empty),
    ):
        assert compile_filter(parse(from_amps(given).filter))(document, META) is wanted, given


@pytest.mark.parametrize(
    ("pattern", "what"),
    [
        ("a(?!b)", "look-ahead"),
        ("(?<=a)b", "look-behind"),
        (r"(a)\1", "a back-reference"),
        ("a++", "possessive"),
        ("(?>a)", "atomic"),
        ("(?x)a", "a group of no kind"),
        ("a**", "a repetition is repeated"),
        ("*a", "nothing to repeat"),
        ("^*", "nothing to repeat"),
        ("a{1001}", "more than 1000 times"),
        ("(a{100}){100}", "more than 1000 times"),
        ("a{3,2}", "below its beginning"),
        ("[z-a]", "two ends in order"),
        (r"[\d-z]", "a hyphen in a class"),
        (r"[a\b]", "lacks in a class"),
        (r"a\Z", "an escape"),
        (r"\xff", "a byte"),
        ("(a", "never closed"),
        ("a)", "closes no group"),
        ("[a", "never closed"),
        (r"\pL{200}", "too large"),
        ("(" * 60 + ")" * 60, "nested deeper"),
        ("a{4}" * 1_000, "too large"),
        ("{2}", "nothing to repeat"),
        ("(?)", "a group of no kind"),
        ("[[:letter:]]", "a class inside a class"),
        (r"\x{d800}", "an escape of no character"),
        (r"\x{110000}", "an escape of no character"),
    ],
)
def test_a_pattern_that_only_pcre_has_is_refused(pattern: str, what: str) -> None:
    with pytest.raises(PatternFault, match=what):
        converted(pattern)


def test_a_conversion_takes_time_in_proportion_to_its_text() -> None:
    """Operands stand twice in a test for emptiness: nested ones must end at a bound, and not double the work."""
    nested = "/a"
    for _ in range(50):
        nested = f"(IF({nested} != '', 1, 2))"
    started = time.process_time()
    with pytest.raises(AmpsError):
        from_amps(f"{nested} = 1")
    assert time.process_time() - started < 10


def run(*words: str, text: str = "") -> Result:
    return CliRunner().invoke(sow, ["filter", "from-amps", *words], input=text)


def test_the_command_prints_the_filter_and_tells_what_it_cannot_keep() -> None:
    result = run("/note = '' AND /px > 5")
    assert (result.exit_code, result.stdout) == (0, "COALESCE(/note, '') = '' AND /px > 5\n")
    assert result.stderr.startswith("at 19: where /px is missing")
    assert result.stderr.count("\n") == 1
    assert run("-", text="/a = 1\n").stdout == "/a = 1\n"


def test_the_command_shows_the_place_of_an_error_and_prints_no_filter() -> None:
    result = run("/note = 'é' AND /a LIKE 'x(?=y)'")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        "sow: FILTER_INVALID: expected a regular expression of RE2 at 24; it has look-ahead, which RE2 lacks\n"
        "  /note = 'é' AND /a LIKE 'x(?=y)'\n"
        "                          ^\n"
    )
