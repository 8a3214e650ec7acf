"""The files that the command writes and reads, against a real server: exports, publishes and loads."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner, Result
from pyarrow import ipc, parquet

from sow_cli import command
from tests.support.server import ServerProcess

TOPICS = """
[topics.orders]
key = ['/id']
expiration = 'enabled'
[topics.images]
message_type = 'binary'
"""
ORDERS = [
    {"id": 1, "price": 9.5, "note": "a,b"},
    {"id": 2, "price": 10, "at": {"bid": 1}},
    {"id": 3, "note": "", "at": {"ask": 2.5}, "odd": 1},
    {"id": 4, "odd": "x", "big": 2**70, "list": [1, 2]},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("files"), TOPICS) as made:
        with made.client() as client:
            client.publish_many("orders", ORDERS[:3])
            client.publish("orders", ORDERS[3], expire_at=datetime(2030, 1, 1, tzinfo=UTC))
            client.publish("images", b"\x89PNG\r\n\x00\xff", key="logo")
        yield made
        assert not made.faults()


def run(server: ServerProcess, *arguments: object, given: bytes | None = None) -> Result:
    return CliRunner().invoke(command.sow, ["--server", server.address, *map(str, arguments)], input=given)


def done(server: ServerProcess, *arguments: object, given: bytes | None = None) -> dict[str, object]:
    """The result of a command that must succeed."""
    result = run(server, *arguments, given=given)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout.splitlines()[-1])
    assert isinstance(told, dict)
    return told


def test_an_image_comes_back_as_it_went_in(server: ServerProcess) -> None:
    assert run(server, "get", "images", "logo", "--raw").stdout_bytes == b"\x89PNG\r\n\x00\xff"


# ---- exports ----


def test_parquet_has_a_typed_column_for_each_field(server: ServerProcess, tmp_path: Path) -> None:
    told = done(server, "export", "orders", tmp_path / "orders.parquet")

    table = parquet.read_table(tmp_path / "orders.parquet")
    assert (told["records"], told["topic"]) == (4, "orders")
    assert {field.name: str(field.type) for field in table.schema} == {
        "_key": "string",
        "id": "int64",
        "price": "double",
        "note": "string",
        "at": "struct<bid: int64, ask: double>",
        "odd": "string",
        "big": "string",
        "list": "list<element: int64>",
        "_version": "int64",
        "_publish_time": "timestamp[us, tz=UTC]",
        "_expire_time": "timestamp[us, tz=UTC]",
        "_origin": "string",
        "_sequence": "int64",
    }
    rows = table.to_pylist()
    assert [row["id"] for row in rows] == [1, 2, 3, 4]
    assert [row["price"] for row in rows] == [9.5, 10.0, None, None]
    assert rows[1]["at"] == {"bid": 1, "ask": None}
    assert [row["odd"] for row in rows] == [None, None, "1", "x"]
    assert rows[3]["big"] == str(2**70), "no type holds it exactly, so it is text"
    assert [row["_expire_time"] for row in rows] == [None, None, None, datetime(2030, 1, 1, tzinfo=UTC)]


def test_arrow_and_csv_have_the_same_columns(server: ServerProcess, tmp_path: Path) -> None:
    done(server, "export", "orders", tmp_path / "orders.arrow", "--select", "/id,/at/bid,@key")
    with ipc.open_file(tmp_path / "orders.arrow") as file:
        table = file.read_all()
    assert table.to_pydict() == {
        "id": [1, 2, 3, 4],
        "/at/bid": [None, 1, None, None],
        "_key": ["1", "2", "3", "4"],
    }

    done(server, "export", "orders", tmp_path / "orders.csv", "--filter", "/id >= 3")
    with (tmp_path / "orders.csv").open(newline="") as text:
        rows = list(csv.DictReader(text))
    assert list(rows[0])[:6] == ["_key", "id", "note", "at", "odd", "big"]
    assert [row["at"] for row in rows] == ['{"ask":2.5}', ""]
    assert rows[1]["big"] == str(2**70)
    assert rows[1]["_expire_time_micros"] == "1893456000000000"


def test_ndjson_is_as_a_query_writes_it(server: ServerProcess, tmp_path: Path) -> None:
    done(server, "export", "orders", tmp_path / "orders.ndjson")
    assert (tmp_path / "orders.ndjson").read_bytes() == run(server, "query", "orders").stdout_bytes


def test_binary_payloads_are_one_column(server: ServerProcess, tmp_path: Path) -> None:
    done(server, "export", "images", tmp_path / "images.parquet")
    (row,) = parquet.read_table(tmp_path / "images.parquet").to_pylist()
    assert (row["_key"], row["payload"]) == ("logo", b"\x89PNG\r\n\x00\xff")


def test_parquet_and_arrow_go_to_a_pipe_as_well(server: ServerProcess) -> None:
    written = run(server, "query", "orders", "--format", "parquet", "--select", "/id,/price").stdout_bytes
    assert parquet.read_table(io.BytesIO(written)).to_pydict()["id"] == [1, 2, 3, 4]
    written = run(server, "get", "orders", "1", "--format", "arrow").stdout_bytes
    with ipc.open_stream(pa.py_buffer(written)) as stream:
        assert stream.read_all().to_pydict()["note"] == ["a,b"]
    written = run(server, "query", "orders", "--top", "1", "/id > 100", "--format", "arrow").stdout_bytes
    with ipc.open_stream(pa.py_buffer(written)) as stream:
        assert stream.read_all().num_rows == 0


def test_an_export_that_fails_leaves_the_older_file(server: ServerProcess, tmp_path: Path) -> None:
    file = tmp_path / "orders.ndjson"
    file.write_text("older")

    assert run(server, "export", "nowhere", file).exit_code == 1
    assert run(server, "export", "orders", file, "--filter", "/price >").exit_code == 1

    assert file.read_text() == "older"
    assert [one.name for one in tmp_path.iterdir()] == ["orders.ndjson"]
    done(server, "export", "orders", file)
    assert len(file.read_text().splitlines()) == 4
    assert [one.name for one in tmp_path.iterdir()] == ["orders.ndjson"]


@pytest.mark.parametrize("arguments", [("orders.xlsx",), ("orders",), ("orders.ndjson", "--select", "/id")])
def test_a_file_that_cannot_be_written_is_wrong_usage(
    server: ServerProcess, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    assert run(server, "export", "orders", tmp_path / arguments[0], *arguments[1:]).exit_code == 2
    assert run(server, "export", "orders", tmp_path / "no" / "folder.csv").exit_code != 0
    assert list(tmp_path.iterdir()) == []
