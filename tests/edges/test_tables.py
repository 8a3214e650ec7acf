"""Tables fit the terminal, whatever their content, and never break a number."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import pytest
from click.testing import CliRunner
from rich.cells import cell_len

from sow_cli.command import sow
from sow_cli.tables import column_widths, facts_table, folded, list_table
from tests.support.servers.server import ServerProcess

WIDTHS: Final = (40, 80, 200)
LONG: Final = "a.long.name.of.a.topic.with.many.parts.that.is.wider.than.any.terminal.of.eighty.columns"
TABLES: Final = (
    "topics",
    "topic describe orders",
    f"topic describe {LONG}",
    "query orders --top 5",
    "query orders --top 5 --keys-only",
    "query wide",
    "query wide --keys-only",
    "query wide --select @key,@expire_time,/a",
    "get wide k1",
    "count orders",
    "status",
    "instance",
    "sessions",
    "config show",
    "policy list",
    "durable list",
    "due",
    "replication status",
    "retention get orders",
    "changes wide",
    "subscribe wide --changes --from earliest --count 2",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    config = f"[topics.orders]\nkey = ['/id']\n[topics.wide]\n[topics.'{LONG}']\n"
    with ServerProcess(tmp_path_factory.mktemp("tables"), config) as made, made.client() as client:
        documents = [{"id": number, "price": number * 1.5, "name": "東京" * (number % 9)} for number in range(12_000)]
        with client.publisher("orders", durability="buffered") as publisher:
            for document in documents:
                publisher.publish(document)
        client.publish("wide", {"a": "👩‍👩‍👧 family", "b": "x" * 500}, key="k" * 150)
        client.publish("wide", {"a": 2**60, "b": "京" * 300}, key="東京" * 60)
        client.publish("wide", {"a": 1}, key="k1")
        yield made


def lines(server: ServerProcess, command: str, width: int) -> list[str]:
    arguments = ["--server", server.address, *command.split(), "--format", "table"]
    result = CliRunner().invoke(sow, arguments, env={"COLUMNS": str(width)})
    assert result.exit_code == 0, result.output
    return re.sub(r"\x1b\[[0-9;]*m", "", result.stdout).splitlines()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("command", TABLES)
def test_no_line_is_wider_than_the_terminal(server: ServerProcess, command: str, width: int) -> None:
    assert [line for line in lines(server, command, width) if cell_len(line) > width] == []


@pytest.mark.parametrize("width", [80, 100, 200])
def test_the_list_of_topics_breaks_no_number(server: ServerProcess, width: int) -> None:
    """`12,000` was `12,00` above `0`."""
    row = next(line for line in lines(server, "topics", width) if line.startswith("orders"))
    assert "12,000" in row.split()


def test_columns_without_room_are_named(server: ServerProcess) -> None:
    result = CliRunner().invoke(sow, ["--server", server.address, "topics", "--format", "table"], env={"COLUMNS": "60"})
    assert re.search(r"more columns?: .*set by; see --format ndjson", result.stderr)


def test_figures_are_never_broken_and_long_words_are() -> None:
    headings, rows = ["name", "number", "time"], [["n" * 100, "1,234,567", "2030-03-17T17:46:40.123Z"]]
    assert column_widths(headings, rows, 60) == [23, 9, 24]
    assert column_widths(headings, rows, 48) == [37, 9], "a time that has no room is left out"
    assert column_widths(headings, rows, 5) == [12], "there is one column at least"
    assert column_widths(headings, [], 80) == [4, 6, 4]


def test_a_column_that_lacks_least_is_completed_also_where_there_is_little_room() -> None:
    """`administrator` was `administrato` above `r`, and two columns beside it stood empty."""
    headings, rows = ["live records", "overdue records", "set by"], [["0", "0", "administrator"]]
    assert column_widths(headings, rows, 32) == [8, 7, 13]


def test_due_has_numbers_at_the_right_and_fits(server: ServerProcess) -> None:
    headings, _, row = lines(server, "due orders", 80)
    assert headings.split() == ["topic", "next", "overdue", "≤1m", "≤10m", "≤1h", "≤6h", "≤1d", "≤7d"]
    assert row[headings.index("overdue") + len("overdue") - 1] == "0"


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("two words", 6, ["two", "words"]),
        ("twowords", 5, ["twowo", "rds"]),
        ("longword and", 4, ["long", "word", "and"]),
        ("東京都", 4, ["東京", "都"]),
        ("  indented text", 10, ["  indented", "text"]),
        ("one\n\ntwo", 9, ["one", "", "two"]),
        ("ab", 1, ["a", "b"]),
        ("", 5, [""]),
    ],
)
def test_a_text_is_broken_between_words_and_a_long_word_anywhere(text: str, width: int, lines: list[str]) -> None:
    """Behind a long word there was a line without text, or one that began with a space."""
    assert folded(text, width) == lines


def test_a_list_has_headings_at_the_bottom_and_numbers_at_the_right() -> None:
    rows = [["orders", "12,000"], ["a.longer.name", "7"]]
    table, shown = list_table(["topic", "live records"], rows, 22, right=[False, True])
    assert shown == 2
    assert [line.rstrip() for line in table.splitlines()] == [
        "                  live",
        "topic          records",
        "──────────────────────",
        "orders          12,000",
        "a.longer.name        7",
    ]


@pytest.mark.parametrize("width", [1, 5, 9, 20])
def test_no_terminal_is_too_narrow(width: int) -> None:
    """Below the least width of a column, it is broken anywhere. Of the facts the names took the room of the values."""
    table, shown = list_table(["topic"], [["2030-03-17T17:46:40.123Z"]], width, right=[False])
    assert shown == 1
    assert max(map(cell_len, table.splitlines())) <= width
    if width > 4:
        facts = facts_table([("published", "12,000 records")], width)
        assert max(map(cell_len, facts.splitlines())) <= width


def test_a_table_escapes_what_a_terminal_would_act_upon() -> None:
    table, _ = list_table(["topic"], [["or\x1b[2J\tders"]], 80, right=[False])
    assert "or\\x1b[2J\\tders" in table
    assert "or\\x1b[2J\n" in facts_table([("topic", "or\x1b[2J\nders")], 80)
