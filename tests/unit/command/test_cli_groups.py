"""`--group-by`, `--aggregate`, `--having`, `--by`: results of groups in each format (rules Q11, Q12)."""

from __future__ import annotations

import json

import pytest

from tests.support.fakes.commands import rows, run
from tests.support.fakes.fake_client import FakeClient

GROUPED = ("query", "trades", "--group-by", "/account", "--aggregate", "COUNT(*) AS n, AVG(/px) AS px")


@pytest.fixture
def client() -> FakeClient:
    client = FakeClient()
    results: list[dict[str, object]] = [{"account": "A1", "n": 1200, "px": 2.5}, {"account": 7, "n": 2, "px": None}]
    client.add("trades", key=("/account",), records=results)
    return client


def test_the_options_go_to_the_client(client: FakeClient) -> None:
    result = run(
        client, *GROUPED, "--group-by", "FLOOR(/ts) AS t", "--having", "/n > 1", "--order-by", "/n", "--top", "9"
    )
    assert result.exit_code == 0, result.stderr
    asked = client.arguments_of("query")
    assert (asked["group_by"], asked["aggregate"], asked["having"]) == (
        ("/account", "FLOOR(/ts) AS t"),
        ("COUNT(*) AS n, AVG(/px) AS px",),
        "/n > 1",
    )
    assert (asked["order_by"], asked["top_n"]) == (["/n"], 9)


def test_json_has_the_results_as_they_came(client: FakeClient) -> None:
    wanted = [{"account": 7, "n": 2, "px": None}, {"account": "A1", "n": 1200, "px": 2.5}]
    result = run(client, *GROUPED)
    assert rows(result) == wanted
    assert "2 records in no group: a value to group by is null, an array or an object" in result.stderr
    assert json.loads(run(client, *GROUPED, "--format", "json").stdout) == wanted
    assert run(client, *GROUPED, "--format", "raw").stdout == result.stdout


def test_a_table_and_a_csv_have_a_column_for_each_name(client: FakeClient) -> None:
    assert run(client, *GROUPED, "--format", "csv").stdout == "account,n,px\n7,2,\nA1,1200,2.5\n"
    table = run(client, *GROUPED, "--format", "table").stdout
    assert table.split() == ["account", "n", "px", "─" * 19, "7", "2", "-", "A1", "1,200", "2.5", *table.split()[10:]]


def test_a_count_by_fields_has_the_most_frequent_first(client: FakeClient) -> None:
    assert run(client, "count", "trades", "/open", "--by", "/account,/site").exit_code == 0
    asked = client.arguments_of("query")
    assert (asked["group_by"], asked["aggregate"], asked["order_by"]) == (
        ("/account,/site",),
        ("COUNT(*) AS count",),
        "/count DESC",
    )


@pytest.mark.parametrize(
    "option", [("--select", "/id"), ("--exclude", "/id"), ("--keys-only",), ("--count",), ("--page", "2")]
)
def test_options_about_records_are_refused(client: FakeClient, option: tuple[str, ...]) -> None:
    result = run(client, *GROUPED, *option)
    assert (result.exit_code, f"--group-by and {option[0]} exclude each other" in result.stderr) == (2, True)


def test_files_of_records_are_refused(client: FakeClient) -> None:
    assert "--format parquet is for records" in run(client, *GROUPED, "--format", "parquet").stderr
