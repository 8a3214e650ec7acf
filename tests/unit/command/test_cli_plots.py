"""`--plot`: results of groups as bars, on a terminal and elsewhere."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from click.testing import _NamedTextIOWrapper

from sow_cli import courses, plots
from sow_cli.plots import Bar, lines
from sow_cli.tables import text_width
from sow_client import Client, Figures, InvalidArgument
from tests.support.fakes.commands import run
from tests.support.fakes.fake_client import FakeClient

PLOTTED = ("query", "trades", "--group-by", "/account", "--aggregate", "COUNT(*) AS n, AVG(/px) AS px", "--plot")
NOW = datetime(2030, 1, 31, 12, tzinfo=UTC)
STYLE = re.compile("\x1b\\[[0-9;]*m")


@pytest.fixture
def client() -> FakeClient:
    client = FakeClient()
    results: list[dict[str, object]] = [
        {"account": "A1", "n": 1200, "px": 2.5},
        {"account": "B", "n": 300, "px": None},
        {"account": "C", "n": 2, "px": -2.5},
    ]
    client.add("trades", key=("/account",), records=results)
    return client


@pytest.fixture(autouse=True)
def width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.delenv("FORCE_COLOR", raising=False)


def drawn(bars: list[Bar], width: int = 40) -> list[str]:
    """The lines of the bars."""
    return list(lines("n", bars, width))[1:]


def lengths(bars: list[Bar], width: int = 40) -> list[int]:
    """The columns that each bar takes."""
    return [len(re.sub("[^▏▎▍▌▋▊▉█▐▕]", "", line)) for line in drawn(bars, width)]


def test_a_pipe_gets_a_chart_of_each_aggregate_in_plain_text(client: FakeClient) -> None:
    result = run(client, *PLOTTED)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines() == [
        "n",
        "A1  1,200  █████████████████████████████",
        "B     300  ███████▎",
        "C       2  ▏",
        "",
        "px",
        "A1   2.5                 ███████████████",
        "B      -",
        "C   -2.5  ███████████████",
    ]
    assert "3 groups of 3 records" in result.stderr
    assert "2 records in no group" in result.stderr


def test_a_terminal_has_colours_unless_they_are_not_wanted(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    coloured = run(client, *PLOTTED)
    assert "\x1b[36m" in coloured.stdout
    assert "\x1b[31m" in coloured.stdout, "below zero"
    monkeypatch.setenv("NO_COLOR", "1")
    assert run(client, *PLOTTED).stdout == STYLE.sub("", coloured.stdout)
    assert "\x1b" not in run(client, *PLOTTED).stdout


def test_a_count_by_fields_is_drawn(client: FakeClient) -> None:
    result = run(client, "count", "trades", "--by", "/account", "--plot")
    assert result.stdout.splitlines()[:2] == ["n", "A1  1,200  █████████████████████████████"]
    asked = client.arguments_of("query")
    assert (asked["group_by"], asked["order_by"]) == (("/account",), "/count DESC")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("query", "trades", "--plot"), "--plot needs --aggregate"),
        (("query", "trades", "--group-by", "/desk", "--plot"), "--plot needs --aggregate"),
        (("count", "trades", "--plot"), "--plot needs --by"),
        ((*PLOTTED, "--format", "csv"), "--plot and --format csv exclude each other"),
        ((*PLOTTED, "--explain"), "--plot and --explain exclude each other"),
        (("count", "trades", "--by", "/a", "--plot", "--format", "json"), "--plot and --format json exclude"),
    ],
)
def test_options_that_do_not_go_with_a_chart(client: FakeClient, arguments: tuple[str, ...], message: str) -> None:
    result = run(client, *arguments)
    assert (result.exit_code, message in result.stderr) == (2, True), result.stderr


def test_no_groups_and_values_that_are_no_numbers_are_told(client: FakeClient) -> None:
    client.add("none", key=("/account",), records=[])
    assert run(client, "query", "none", *PLOTTED[2:]).stdout == "no groups\n"
    client.add("texts", key=("/account",), records=[{"account": "A", "first": "x", "n": 1}])
    result = run(client, "query", "texts", *PLOTTED[2:])
    assert result.stdout.splitlines()[0] == "n"
    assert "no bars for first: no group has a number there" in result.stderr
    client.add("words", key=("/account",), records=[{"account": "A", "first": "x"}])
    result = run(client, "query", "words", *PLOTTED[2:])
    assert result.stdout.split() == ["account", "first", "─" * 14, "A", "x"]


def test_all_records_are_one_group_where_nothing_groups(client: FakeClient) -> None:
    client.add("one", key=("/n",), records=[{"n": 7}])
    result = run(client, "query", "one", "--aggregate", "COUNT(*) AS n", "--plot")
    assert result.stdout.splitlines() == ["n", "all  7  " + "█" * 32]


def test_a_terminal_gets_the_first_groups_and_is_told_of_the_others(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sow_cli.queries.TERMINAL_RECORDS_MAX", 2)
    assert "C " in run(client, *PLOTTED).stdout, "a pipe gets all"
    monkeypatch.setattr(_NamedTextIOWrapper, "isatty", lambda _: True, raising=False)
    result = run(client, *PLOTTED)
    assert [line for line in result.stdout.splitlines() if line.startswith("C ")] == []
    assert "the first 2 groups, and there are more: --top N shows N, a pipe all of them" in result.stderr
    assert "C " in run(client, *PLOTTED, "--top", "3").stdout


@pytest.mark.parametrize("value", [0, None, "text", True])
def test_a_value_without_a_bar(value: object) -> None:
    assert lengths([Bar("a", value), Bar("b", 1)])[0] == 0


def test_lengths_compare_as_values_do() -> None:
    assert lengths([Bar("a", 10), Bar("b", 5), Bar("c", 1)], 10 + 6 + 20) == [29, 15, 3]
    assert lengths([Bar("a", 1e9), Bar("b", 1)])[1] == 1, "a small one has a bar, too"
    left, right = lengths([Bar("a", -10), Bar("b", 30)], 46)
    assert abs(3 * left - right) <= 3, "one scale for both sides"
    assert lengths([Bar("a", -1), Bar("b", -2)]) == [17, 33]


@pytest.mark.parametrize(
    ("value", "figure"),
    [
        (10**400, "1.00000e+400"),
        (-(10**30), "-1.00000e+30"),
        (10**17, "100,000,000,000,000,000"),
        (1.7976931348623157e308, "1.7976931348623157e+308"),
        (5e-324, "5e-324"),
        (-0.0, "-0.0"),
    ],
)
def test_numbers_of_any_size(value: float, figure: str) -> None:
    """A sum of integers has all its digits, also beyond those of a double."""
    (line,) = drawn([Bar("a", value)], 80)
    assert line.split()[1] == figure
    assert lengths([Bar("a", value), Bar("b", 10**401)], 80)[1] > 40


@pytest.mark.parametrize("width", [1, 2, 8, 12, 20, 33, 80, 200])
def test_a_line_fits_the_terminal_where_the_number_does(width: int) -> None:
    values: list[object] = [None, 3, -7.5, 10**9, "word", 0]
    names = ["x", "long " * 40, "漢字" * 30, "e\u0301" * 50, "\x1b[2J\n", "naïve"]
    bars = [Bar(name, value) for name, value in itertools.product(names, values)]
    for line in drawn(bars, width):
        assert line.isprintable()
        if width >= plots.NAME_WIDTH_MIN + 2 * 2 + 13:
            assert text_width(line) <= width


def test_a_chart_has_no_control_character_of_the_data(client: FakeClient) -> None:
    """X7."""
    client.add("odd", key=("/a",), records=[{"a": "\x1b[2J\u202e", "n\x1b": 1}])
    result = run(client, "query", "odd", "--group-by", "/a", "--aggregate", "COUNT(*) AS n", "--plot")
    assert "\x1b" not in result.stdout
    assert "\\x1b[2J\\u202e" in result.stdout
    (line,) = drawn([Bar("a", "\x1b[2J\n")], 80)  # the greatest of texts, beside groups with numbers
    assert line.split() == ["a", "\\x1b[2J\\n"]


def test_the_name_of_the_count_is_taken_and_the_message_says_what_to_do(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message was about an aggregate, which nobody had given."""

    def refuse(*given: object, **named: Any) -> object:
        raise InvalidArgument("no", reason="EXPRESSION_INVALID", details={"field": named.get("field", "aggregate[0]")})

    monkeypatch.setattr(FakeClient, Client.query.__name__, refuse)
    result = run(client, "count", "trades", "--by", "/count")
    assert result.exit_code == 2
    assert "the number of records has the name count; give another one to the field, as in '/count AS n'" in (
        " ".join(result.stderr.split())
    )


# ---- spreads and courses ----


@pytest.mark.parametrize(
    ("micros", "expected"),
    [
        ([], []),
        ([3.0], [("≤ 5µs", 1)]),
        ([1.0, 1.5, 2.0], [("≤ 1µs", 1), ("≤ 2µs", 2)]),
        ([90.0, 600.0, 900.0, 1_900.0], [("≤ 100µs", 1), ("≤ 200µs", 0), ("≤ 500µs", 0), ("≤ 1ms", 2), ("≤ 2ms", 1)]),
        ([30e6], [("≤ 50.0s", 1)]),
    ],
)
def test_a_spread_counts_each_value_once(micros: list[float], expected: list[tuple[str, int]]) -> None:
    assert [(bar.name, bar.value) for bar in plots.spread(micros)] == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], ""),
        ([0, 0], "▁▁"),
        ([0, 1, 500, 1_000], "▁▂▅█"),
        ([7], "█"),
    ],
)
def test_a_course_has_a_height_for_each_value(values: list[float], expected: str) -> None:
    assert plots.sparkline(values) == expected


def test_courses_have_the_last_figures_that_the_terminal_has_room_for() -> None:
    shown = courses.Courses()
    first = Figures(NOW, timedelta(), 9, 0.0, 0.0, 99, 2, 3, 4, 1, 5, 2, (), ())
    shown.add(first)
    assert [line.split() for line in shown.lines(40)] == [["changes/s"], ["expired/s"], ["queue"]], "no rates yet"
    for rate in range(1, 101):
        shown.add(replace(first, elapsed=timedelta(seconds=1), changes_per_second=rate * 100.0, queued_requests=0))
    changes, expired, queue = shown.lines(40)
    assert changes == "changes/s  " + "█" * 13 + "  max 10,000"
    assert expired == "expired/s  " + "▁" * 13 + "  max 0"
    assert queue.startswith("queue      ▁")
    assert all(len(line) <= 40 for line in (changes, expired, queue))
    assert len(list(shown.lines(1))) == 3
