"""The commands that read, delete and touch records, against a fake client: their calls and their output."""

from __future__ import annotations

from pathlib import Path

from tests.support.fakes.commands import client, rows, run
from tests.support.fakes.fake_client import FakeClient
from tests.support.fakes.fake_results import NOW_MICROS

__all__ = ["client"]  # a fixture


def test_get_shows_records_and_names_the_keys_without_one(client: FakeClient) -> None:
    client.add("orders", records=[{"id": 1}, {"id": 2}])

    found = run(client, "get", "orders", "2", "1")
    partly = run(client, "get", "orders", "1", "9")

    assert [one["key"] for one in rows(found)] == ["2", "1"]
    assert (found.exit_code, partly.exit_code) == (0, 1)
    assert [one["key"] for one in rows(partly)] == ["1"]
    assert partly.stderr == "sow: RECORD_NOT_FOUND: key: there is no live record '9'\n"


def test_get_of_one_key_shows_all_about_it_in_a_table(client: FakeClient) -> None:
    client.add("orders", expiration="enabled")
    run(client, "publish", "orders", "--data", '{"id":1,"note":"[bold]\\u001b[2J"}')

    table = run(client, "get", "orders", "1", "--format", "table").stdout

    assert '"note": "[bold]\\u001b[2J"' in table
    assert "expires    never" in table
    assert "origin     fake-1" in table


def test_query_passes_its_options_on(client: FakeClient) -> None:
    client.add("orders", records=[{"id": one} for one in range(1, 8)])

    result = run(client, "query", "orders", "--top", "2", "--skip", "1", "--select", "/id,/price", "--select", "/a")

    assert [one["key"] for one in rows(result)] == ["2", "3"]
    assert client.arguments_of("query") == {
        "filter": None,
        "order_by": None,
        "select": ["/id", "/price", "/a"],
        "exclude": None,
        "keys_only": False,
        "skip_n": 1,
        "top_n": 2,
        "min_position": None,
    }
    assert [one["key"] for one in rows(run(client, "query", "orders", "--keys", "5,6", "--keys", "99"))] == ["5", "6"]


def test_query_takes_a_filter_and_an_order(client: FakeClient) -> None:
    client.add("orders", records=[{"id": one, "price": one * 10} for one in range(1, 8)])

    result = run(client, "query", "orders", "/price > 50", "--order-by", "/price DESC, /id", "--order-by", "/x")

    assert [one["key"] for one in rows(result)] == ["6", "7"]
    assert client.arguments_of("query")["order_by"] == ["/price DESC, /id", "/x"]


def test_explain_tells_how_records_are_found_and_shows_none(client: FakeClient) -> None:
    client.add("orders", records=[{"id": one, "price": one * 10} for one in range(1, 8)])

    arguments = ("query", "orders", "/price > 50", "--explain", "--top", "3", "--keys", "6,7", "--order-by", "/id")
    (plan,) = rows(run(client, *arguments))
    table = run(client, *arguments, "--format", "table").stdout

    assert plan == {
        "topic": "orders",
        "access": "index",
        "index_path": "/price",
        "probes": 1,
        "index_entries": 2,
        "scanned": 2,
        "matched": 2,
        "returned": 2,
        "filter": "/price > 50",
    }
    assert client.arguments_of("explain") == {
        "filter": "/price > 50",
        "order_by": ["/id"],
        "keys": ["6", "7"],
        "skip_n": 0,
        "top_n": 3,
        "run": True,
    }
    assert "reads an index, then its records" in table


def test_query_of_an_unknown_topic_ends_with_1(client: FakeClient) -> None:
    result = run(client, "query", "nothing")

    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "sow: TOPIC_NOT_FOUND: there is no topic 'nothing'\n  field: topic\n"


def test_count_counts(client: FakeClient) -> None:
    client.add("orders", records=[{"id": one} for one in range(5)])

    assert rows(run(client, "count", "orders")) == [{"topic": "orders", "count": 5}]
    assert rows(run(client, "query", "orders", "--count")) == [{"topic": "orders", "count": 5}]
    assert rows(run(client, "query", "orders", "--count", "--keys", "1,2,77")) == [{"topic": "orders", "count": 2}]
    for arguments in (("count", "orders", "/id > 2"), ("query", "orders", "/id > 2", "--count")):
        assert rows(run(client, *arguments)) == [{"topic": "orders", "count": 2}]
    assert rows(run(client, "query", "orders", "/id > 2", "--count", "--skip", "1")) == [
        {"topic": "orders", "count": 1}
    ]


def test_a_query_goes_on_behind_its_page(client: FakeClient) -> None:
    client.add("orders", records=[{"id": one} for one in range(5)])
    first = run(client, "query", "orders", "--order-by", "/id DESC", "--page", "2", "--select", "/id")
    assert [row["key"] for row in rows(first)] == ["0", "1"]
    assert "the next page: --after 1\n" in first.stderr
    given = client.arguments_of("page")
    assert (given["order_by"], given["select"], given["page_token"]) == (["/id DESC"], ["/id"], "")
    last = run(client, "query", "orders", "--page", "3", "--after", "1", "--format", "table")
    assert client.arguments_of("page")["page_token"] == "1"
    assert "this is the last page" in last.stderr
    for others in (["--top", "1"], ["--keys", "1"], ["--count"], ["--with-plan"], ["--explain"], ["--skip", "1"]):
        assert run(client, "query", "orders", "--page", "2", *others).exit_code == 2, others
    assert run(client, "query", "orders", "--after", "1").exit_code == 2


def test_delete_by_keys_by_document_and_all(client: FakeClient, tmp_path: Path) -> None:
    table = client.add("orders", records=[{"id": one} for one in range(6)])
    file = tmp_path / "order.json"
    file.write_text('{"id": 3}')

    by_keys = rows(run(client, "delete", "orders", "--key", "0", "--key", "1", "--key", "77"))[0]
    by_document = rows(run(client, "delete", "orders", "--data", str(file)))[0]
    by_stdin = rows(run(client, "delete", "orders", "--data", "-", stdin=b'{"id":4}'))[0]
    counted = rows(run(client, "delete", "orders", "--all", "--dry-run"))[0]
    assert list(table.rows) == ["2", "5"]
    everything = rows(run(client, "delete", "orders", "--all", "--force"))[0]

    assert (by_keys["matched"], by_keys["deleted"]) == (2, 2)
    assert (by_document["deleted"], by_stdin["deleted"]) == (1, 1)
    assert (counted["matched"], counted["deleted"]) == (2, 0)
    assert everything["deleted"] == 2
    assert table.rows == {}


def test_delete_and_touch_at_a_version(client: FakeClient) -> None:
    """The versions go with the keys, in their order; a record of another version stays, and the exit code tells."""
    table = client.add("orders", records=[{"id": one} for one in range(3)], expiration="enabled")
    versions = [str(row.version) for row in table.rows.values()]
    both = ("--key", "0", "--key", "1")

    changed = run(client, "delete", "orders", *both, "--if-version", versions[0], "--if-version", "7")
    wrong = run(client, "delete", "orders", *both, "--if-version", versions[1])
    assert (changed.exit_code, list(table.rows)) == (1, ["1", "2"])
    assert '"deleted":1' in changed.stdout
    assert "CONDITION_FAILED" in changed.stderr
    assert wrong.exit_code == 2
    assert run(client, "delete", "orders", "--all", "--if-version", "7").exit_code == 2
    assert run(client, "delete", "orders", "--key", "1", "--if-version", versions[1]).exit_code == 0

    run(client, "touch", "orders", "2", "--ttl", "1m", "--if-version", versions[2])
    assert client.arguments_of("touch")["only_if_versions"] == (int(versions[2]),)


def test_delete_by_filter(client: FakeClient) -> None:
    table = client.add("orders", records=[{"id": one} for one in range(6)])

    counted = rows(run(client, "delete", "orders", "--filter", "/id >= 4", "--dry-run"))[0]
    deleted = rows(run(client, "delete", "orders", "--filter", "/id >= 4"))[0]

    assert (counted["matched"], counted["deleted"]) == (2, 0)
    assert (deleted["matched"], deleted["deleted"]) == (2, 2)
    assert list(table.rows) == ["0", "1", "2", "3"]


def test_touch_and_persist_report_each_key(client: FakeClient) -> None:
    table = client.add("sessions", records=[{"id": "alice"}, {"id": "bob"}], expiration="enabled")

    touched = run(client, "touch", "sessions", "alice", "nobody", "bob", "--ttl", "20m")
    persisted = run(client, "persist", "sessions", "alice")

    assert touched.exit_code == 1
    assert [one["key"] for one in rows(touched)] == ["alice", "bob"]
    assert touched.stderr == "nobody: RECORD_NOT_FOUND: no live record of that key\n"
    assert table.rows["bob"].expire_time_micros == NOW_MICROS + 20 * 60_000_000
    assert persisted.exit_code == 0
    assert "expire_time_micros" not in rows(persisted)[0]
    assert client.arguments_of("touch")["ttl"] == "never"


def test_touch_passes_its_conditions_on(client: FakeClient) -> None:
    client.add("sessions", records=[{"id": "alice"}], expiration="enabled")

    result = run(client, "touch", "sessions", "alice", "--ttl", "20m", "--only", "later", "--atomic")

    assert result.exit_code == 0, result.output
    given = client.arguments_of("touch")
    assert given == {"ttl": "20m", "expire_at": None, "only": "later", "only_if_versions": None, "atomic": True}


def test_get_passes_on_what_it_renews(client: FakeClient) -> None:
    client.add("sessions", records=[{"id": "alice"}], expiration="enabled")

    result = run(client, "get", "sessions", "alice", "--touch", "20m", "--touch-below", "5m")
    alone = run(client, "get", "sessions", "alice", "--touch-below", "5m")

    assert result.exit_code == 0, result.output
    given = client.arguments_of("get_many")
    assert (given["touch"], given["touch_below"]) == ("20m", "5m")
    assert alone.exit_code == 2


def test_reads_pass_on_the_position_that_they_have_to_show(client: FakeClient) -> None:
    """F10."""
    client.add("orders", records=[{"id": 1}])
    for call, arguments in (
        ("get_many", ("get", "orders", "1")),
        ("query", ("query", "orders")),
        ("query", ("query", "orders", "--count", "--top", "1")),
        ("count", ("query", "orders", "--count")),
        ("count", ("count", "orders")),
    ):
        assert run(client, *arguments, "--min-position", "0d4c5b7e8f90.17").exit_code == 0
        assert client.arguments_of(call)["min_position"] == "0d4c5b7e8f90.17"
    assert run(client, "query", "orders", "--explain", "--min-position", "0d4c5b7e8f90.17").exit_code == 2


def test_a_plan_is_told_beside_the_records_or_without_running(client: FakeClient) -> None:
    client.add("orders", records=[{"id": 1, "price": 9}])
    shown = run(client, "query", "orders", "/price = 9", "--with-plan")
    assert len(rows(shown)) == 1
    assert "reads the index on /price, then its records: 1 record read" in shown.stderr
    assert "read" not in run(client, "query", "orders", "/price = 9").stderr
    run(client, "query", "orders", "--explain", "--no-run")
    assert client.arguments_of("explain")["run"] is False
    assert run(client, "query", "orders", "--no-run").exit_code == 2
    assert run(client, "query", "orders", "--with-plan", "--explain").exit_code == 2
