"""Values of the Python clients at a real server: keys of any type, documents of a program's own types, frames."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pandas as pd
import polars as pl
import pydantic
import pytest

from sow_client import AlreadyExists, Client, PublishFailed
from tests.support.servers.server import ServerProcess, pytest_runtest_makereport
from tests.support.simulation.clients import CLIENT_KINDS, client_of

__all__ = ["pytest_runtest_makereport"]

CONFIG = """
[topics.flights]
key = ["/carrier", "/number", "/late"]
expiration = "enabled"

[topics.copies]

[topics.orders]
key = ["/id"]
expiration = "enabled"
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("values"), CONFIG) as made:
        yield made


@pytest.fixture(scope="module", params=CLIENT_KINDS)
def client(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[Client]:
    """Each of the two clients."""
    with client_of(request.param, server.client, server.async_client) as made:
        yield made


@dataclass
class Flight:
    carrier: str
    number: int
    late: bool
    delay: float = 0.0


class Order(pydantic.BaseModel):
    id: float
    note: str = pydantic.Field(alias="Note")


def test_the_values_of_key_fields_find_the_record(client: Client) -> None:
    """Rule K4: the server has made the keys of the documents."""
    for flight in (Flight("LH", 400, True, 1.5), Flight("a|b\\", -7, False)):
        done = client.publish("flights", flight)
        found = client.get("flights", (flight.carrier, flight.number, flight.late))
        assert found is not None
        assert found.key == done.key
        assert found.as_(Flight) == flight
    for number in (1, 2.0, 0.1, 1e22, 1e-7, -0.0, 12345678901234567890):
        done = client.publish("orders", {"id": number})
        assert [one.key for one in client.get_many("orders", [number, "none"])] == [done.key]
        client.touch("orders", number, ttl="1h")
    assert client.sow_delete("orders", keys=[1, 2, 0.1]).deleted == 3


def test_records_are_the_same_however_they_came(client: Client) -> None:
    client.publish("orders", Order(id=7, Note="x"), ttl=timedelta(hours=1))
    (one,), other = list(client.query("orders", keys=[7])), client.get("orders", 7)
    assert one == other == pickle.loads(pickle.dumps(one))
    assert one.as_(Order) == Order(id=7, Note="x")
    client.publish("orders", Order(id=7, Note="x"))
    assert client.get("orders", 7) != one


def test_a_frame_goes_and_comes_back(client: Client) -> None:
    client.sow_delete("orders", all=True)
    frame = pd.DataFrame({"id": range(2_500), "price": [number / 4 for number in range(2_500)], "name": "a"})
    frame["ttl"] = ["1h" if number % 2 else None for number in range(2_500)]
    assert client.publish_frame("orders", frame, ttl_column="ttl") == 2_500
    back = client.query("orders", order_by="/id").to_pandas(metadata=["expire_time"])
    pd.testing.assert_frame_equal(back[["id", "price", "name"]], frame[["id", "price", "name"]])
    assert back["_expire_time"].isna().tolist() == [number % 2 == 0 for number in range(2_500)]
    polars = client.query("orders", "/price >= 600", order_by="/id").to_polars()
    assert polars.columns == ["_key", "id", "price", "name"]
    assert polars.height == 100
    copied = polars.select("_key", "price")
    assert client.publish_frame("copies", copied, key="_key") == 100
    again = client.query("copies", order_by="/price").to_polars()
    assert again.equals(copied.sort("price"))
    assert isinstance(again, pl.DataFrame)


def test_a_row_without_its_key_is_refused_and_the_others_are_there(client: Client) -> None:
    client.sow_delete("orders", all=True)
    with pytest.raises(PublishFailed, match="1 record was refused") as caught:
        client.publish_frame("orders", pl.DataFrame({"id": [1, None, 3]}))
    assert caught.value.refusals[0].index == 1
    assert client.count("orders") == 2


def test_a_topic_may_exist(client: Client, tmp_path: Path) -> None:
    name = f"made-{tmp_path.name}"
    made = client.create_topic(name, key=["/id"], exist_ok=True)
    assert client.create_topic(name, exist_ok=True).settings == made.settings
    with pytest.raises(AlreadyExists):
        client.create_topic(name, key=["/id"])
