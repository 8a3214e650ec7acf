"""An answer as libraries of tables read it by themselves."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl
import pyarrow as pa
import pytest

from sow_client import Client
from sow_client._arrow_stream import SCHEMA_RECORDS
from tests.support.servers.server import ServerProcess


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with (
        ServerProcess(tmp_path_factory.mktemp("server"), "[topics.t]\nkey = ['/id']\n") as server,
        server.client() as client,
    ):
        documents = [
            {"id": f"{number:06}", "n": number, "x": number / 2, "s": {"a": number}, "m": number if number % 2 else "a"}
            for number in range(SCHEMA_RECORDS + 5_000)
        ]
        client.publish_many("t", documents)
        yield client


def test_polars_and_pyarrow_read_an_answer(client: Client) -> None:
    frame = pl.DataFrame(client.query("t"))

    assert frame.equals(client.query("t").to_polars())
    assert pa.RecordBatchReader.from_stream(client.query("t")).read_all() == client.query("t").to_arrow()
    assert pl.DataFrame(client.query("t", "/id = 'none'")).shape == (0, 1)


def test_a_stream_holds_one_batch_beyond_its_beginning(client: Client) -> None:
    result = client.query("t", batch_size=500)
    reader = pa.RecordBatchReader.from_stream(result)

    assert next(iter(result.batches())).keys[0] == f"{SCHEMA_RECORDS:06}"
    reader.close()


def test_whoever_asks_twice_gets_all_records_or_an_error(client: Client) -> None:
    """Story: DuckDB asks for the columns first, and again for the records; it got those after the first 10,000."""
    result = client.query("t")
    columns = pa.RecordBatchReader.from_stream(result).schema

    assert pa.RecordBatchReader.from_stream(result).read_all() == client.query("t").to_arrow()
    assert columns == client.query("t").to_arrow().schema
    with pytest.raises(pa.ArrowException, match="read once"):
        pa.RecordBatchReader.from_stream(result).read_all()


@pytest.mark.parametrize(
    ("later", "told"),
    [
        ({"new": 1}, "the field 'new' came after"),
        ({"x": "text"}, "the field 'x' is string after"),
        ({"n": 0.5}, "the field 'n' is double after"),
        ({"x": 2**60 + 1}, "the field 'x' has values that are not double"),
        ({"s": {"b": 1}}, "the field 's' is struct<b: int64> after"),
    ],
)
def test_a_later_record_that_does_not_fit_ends_the_stream_by_name(
    client: Client, later: dict[str, object], told: str
) -> None:
    client.publish("t", {"id": "z", **later})
    try:
        with pytest.raises(pl.exceptions.ComputeError, match=told):
            pl.DataFrame(client.query("t"))
    finally:
        client.sow_delete("t", keys=["z"])


def test_later_records_with_fewer_fields_and_narrower_numbers_fit(client: Client) -> None:
    client.publish("t", {"id": "z", "x": 7, "s": {}, "m": {"b": [1]}})  # alone in the fourth batch
    try:
        last = pl.DataFrame(client.query("t", batch_size=5_000)).row(-1, named=True)
    finally:
        client.sow_delete("t", keys=["z"])

    assert last == {"_key": "z", "id": "z", "n": None, "x": 7.0, "s": {"a": None}, "m": '{"b":[1]}'}
