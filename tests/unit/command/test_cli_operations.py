"""`sow publish --op-field`: lines that publish or remove (rule P11), against a fake client."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.fakes.commands import client, rows, run
from tests.support.fakes.fake_client import FakeClient

__all__ = ["client"]  # a fixture

EVENTS = b"""{"id":7,"name":"Ada","__op":"c"}
{"id":8,"name":"Bob","__op":"r"}
{"id":7,"name":"Ada L.","__op":"u"}
{"id":8,"__op":"d"}
{"id":9,"__op":"delete"}
"""


def test_lines_are_published_and_removed_in_their_order(client: FakeClient) -> None:
    table = client.add("customers")
    result = run(client, "publish", "customers", "--op-field", "__op", stdin=EVENTS)
    assert result.exit_code == 0, result.output
    assert {key: row.payload for key, row in table.rows.items()} == {"7": b'{"id":7,"name":"Ada L.","__op":"u"}'}
    assert (rows(result)[0]["published"], rows(result)[0]["removed"]) == (5, 1)


def test_a_csv_has_operations_too(client: FakeClient, tmp_path: Path) -> None:
    table = client.add("customers")
    (tmp_path / "events.csv").write_text("id,_op\n1,put\n2,put\n1,d\n")
    result = run(client, "publish", "customers", str(tmp_path / "events.csv"), "--op-field", "/_op")
    assert result.exit_code == 0, result.output
    assert set(table.rows) == {"2"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"id":1,"_op":"x"}', "line 2: INVALID_ARGUMENT: field /_op is 'x', and none of put, c,"),
        (b'{"id":1}', "line 2: INVALID_ARGUMENT: field /_op is missing"),
        (b'{"id":1,"_op":null}', "line 2: INVALID_ARGUMENT: field /_op is null"),
        (b'{"id":1,"_op":["d"]}', "line 2: INVALID_ARGUMENT: field /_op is no text"),
        (b'{"id":1,', "line 2: PAYLOAD_MALFORMED:"),
    ],
)
def test_an_operation_that_is_not_known_is_told_with_its_line(client: FakeClient, line: bytes, message: str) -> None:
    """The others are published all the same."""
    table = client.add("customers")
    lines = b'{"id":1,"_op":"c"}\n%s\n{"id":2,"_op":"c"}\n' % line
    result = run(client, "publish", "customers", "--op-field", "/_op", stdin=lines)
    assert result.exit_code == 1
    assert message in result.stderr
    assert set(table.rows) == {"1", "2"}


def test_changes_of_one_topic_are_those_of_another(client: FakeClient) -> None:
    """NDJSON of `sow changes`: its deletes and expiries have a key, and no payload."""
    table = client.add("copy")
    meta = {"topic": "orders", "version": 1, "publish_time_micros": 1, "origin": "a", "sequence": 1}
    changes = [
        {"op": "put", **meta, "key": "1", "payload": {"id": 1, "px": 9.5}},
        {"op": "put", **meta, "key": "2", "payload": {"id": 2}},
        {"op": "put", "reason": "touched", **meta, "key": "3", "payload": {"id": 3}},
        {"op": "delete", "topic": "orders", "key": "1", "sequence": 3, "previous": {**meta, "key": "1"}},
        {"op": "expire", "topic": "orders", "key": "2", "sequence": 4, "previous": {**meta, "key": "2"}},
    ]
    lines = "".join(json.dumps(change) + "\n" for change in changes).encode()
    result = run(client, "publish", "copy", "--records", "--op-field", "op", stdin=lines)
    assert result.exit_code == 0, result.output
    assert set(table.rows) == {"3"}
    assert rows(result)[0]["removed"] == 2


def test_a_refused_removal_is_kept_as_one(client: FakeClient, tmp_path: Path) -> None:
    """--errors [1]: mended and published again, it still removes."""
    client.add("plain", key=())
    errors = tmp_path / "bad.ndjson"
    result = run(client, "publish", "plain", "--op-field", "_op", "--errors", str(errors), stdin=b'{"_op":"d"}\n')
    assert result.exit_code == 1
    kept = json.loads(errors.read_text())
    assert (kept["op"], kept["payload"], kept["reason"]) == ("delete", {"_op": "d"}, "KEY_REQUIRED")
    table = client.add("again")
    run(client, "publish", "again", "--data", '{"id":1}')
    kept["payload"]["id"] = 1
    result = run(client, "publish", "again", stdin=json.dumps(kept).encode())
    assert result.exit_code == 0, result.output
    assert table.rows == {}


@pytest.mark.parametrize("options", [["--strict"], ["--if-absent"], ["--raw"], ["--data", "{}"]])
def test_ways_without_removals_are_refused(client: FakeClient, options: list[str]) -> None:
    client.add("customers")
    result = run(client, "publish", "customers", "--op-field", "_op", *options)
    assert result.exit_code == 2
    assert "--op-field" in result.stderr
