"""Publishers that are opened, units of work, and records in bulk, against a real server (rule P6)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from sow.v1 import sow_pb2
from sow_client import Client, OpenedPublisher, PublishFailed, SowError
from tests.support.servers.server import ServerProcess

CONFIG: Final = """
[topics.orders]
key = ["/id"]
expiration = "enabled"
[topics.plain]
expiration = "enabled"
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path, CONFIG) as made:
        yield made
        assert not made.faults()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with server.client() as made:
        yield made


def rows(number: int, count: int, by: str = "x") -> list[bytes]:
    return [b'{"id":"%d-%d","unit":%d,"by":"%s"}' % (number, index, number, by.encode()) for index in range(count)]


def test_two_clients_that_open_a_publisher_at_the_same_time_get_different_epochs(client: Client) -> None:
    found: list[int] = []
    threads = [
        threading.Thread(
            target=lambda: found.extend(client.open_publisher("p", topic="orders").epoch for _ in range(10))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(1, 41))


def test_a_fenced_publisher_gets_its_error_at_once(client: Client) -> None:
    """P6: a zombie that wakes up late."""
    old = client.open_publisher("p", topic="orders", unit=1).epoch
    zombie = client.publisher("orders", publisher_id="p", epoch=old, unit=1)
    zombie.publish_columns(rows(1, 10, "zombie"))
    zombie.flush()
    with client.publisher(
        "orders", publisher_id="p", epoch=client.open_publisher("p", topic="orders", unit=1).epoch, unit=1
    ) as other:
        other.publish_columns(rows(1, 10, "other"))
        zombie.publish_columns(rows(1, 10, "zombie"))
        with pytest.raises(SowError) as caught:
            zombie.finish_unit()
        assert caught.value.reason == "PUBLISHER_FENCED"
        zombie.abort()
        other.finish_unit()
        other.finish_unit()
    assert client.count("orders", "/by = 'other'") == client.count("orders") == 10
    assert client.open_publisher("p", topic="orders", unit=1) == OpenedPublisher(2, True, 10)
    with pytest.raises(SowError) as caught:
        client.publisher("orders", publisher_id="p", unit=1)
    assert caught.value.reason == "UNIT_DONE"
    with pytest.raises(SowError) as caught, client.publisher("orders", publisher_id="p", epoch=9, unit=1) as late:
        late.publish({"id": "late"})
    assert caught.value.reason == "UNIT_DONE"


def test_a_delete_in_the_name_of_a_publisher_is_fenced_with_it(client: Client) -> None:
    """given an attempt that was fenced, or whose unit is finished / when it deletes late / then nothing is deleted"""
    old = client.open_publisher("p", topic="orders", unit=1).epoch
    client.publish("orders", {"id": "a"})
    assert client.sow_delete("orders", keys=["a"], publisher_id="p", epoch=old, unit=1).deleted == 1
    new = client.open_publisher("p", topic="orders", unit=1).epoch
    with client.publisher("orders", publisher_id="p", epoch=new, unit=1) as publisher:
        publisher.publish({"id": "a"})
        publisher.flush()
        for selection in ({"keys": ["a"]}, {"data": {"id": "a"}}):
            with pytest.raises(SowError, match="is fenced by epoch"):
                client.sow_delete("orders", publisher_id="p", epoch=old, unit=1, **selection)
        publisher.finish_unit()
    with pytest.raises(SowError) as caught:
        client.sow_delete("orders", keys=["a"], publisher_id="p", epoch=new, unit=1)
    assert caught.value.reason == "UNIT_DONE"
    with pytest.raises(SowError, match="by key and by document"):
        client.sow_delete("orders", all=True, publisher_id="p", epoch=new)
    assert client.count("orders") == 1


def test_a_unit_with_a_refused_record_is_not_finished(client: Client) -> None:
    refused: list[int] = []
    publisher = client.publisher(
        "orders", publisher_id="p", unit=1, batch_records=4, on_refusal=lambda refusal: refused.append(refusal.index)
    )
    publisher.publish({"id": "first"})
    publisher.publish_columns([*rows(1, 10), b"{}", *rows(2, 3)])
    with pytest.raises(PublishFailed) as caught:
        publisher.finish_unit()
    assert [refusal.index for refusal in caught.value.refusals] == refused == [11]
    publisher.close()
    assert client.count("orders") == 14
    assert not client.open_publisher("p", topic="orders", unit=1).unit_done


def test_a_unit_is_finished_without_records_refused_long_ago(client: Client) -> None:
    """given a refusal that the server has forgotten / when the unit is to be finished without it / then it is"""
    with client.publisher("orders", publisher_id="p", unit=1, on_refusal=lambda _: None) as publisher:
        publisher.publish_columns([b"{}", *rows(1, 3_000)])
        with pytest.raises(PublishFailed):
            publisher.finish_unit()
        publisher.publish({"id": "last"})
        publisher.finish_unit(without_refused=True)
        publisher.finish_unit()
    assert client.open_publisher("p", topic="orders", unit=1) == OpenedPublisher(1, True, 3_001)


def test_columns_carry_keys_and_lifetimes_to_the_records(client: Client) -> None:
    keys, payloads = [f"{number}" for number in range(3_000)], [b"{}"] * 3_000
    soon = time.time_ns() // 1_000 + 7_200_000_000
    kinds, micros = [1, 2, 3] * 1_000, [3_600_000_000, soon, 0] * 1_000
    with client.publisher("plain", ttl="2h") as publisher:
        publisher.publish_columns(payloads, keys=keys, lifetime_kinds=kinds, lifetime_micros=micros)
    assert (publisher.applied, client.count("plain")) == (3_000, 3_000)
    first, second, third = (client.get("plain", str(number)) for number in range(3))
    assert first is not None
    assert second is not None
    assert third is not None
    assert first.expire_time_micros == first.publish_time_micros + 3_600_000_000
    assert (second.expire_time_micros, third.expire_time_micros) == (soon, None)


def test_columns_larger_than_a_message_are_sent_in_pieces(client: Client) -> None:
    large = b'{"text":"%s"}' % (b"x" * (2**20 - 20))
    with client.publisher("plain", batch_records=10_000) as publisher:
        publisher.publish_columns([large] * 40, keys=[str(number) for number in range(40)])
    assert client.count("plain") == 40


def test_both_calls_name_the_field_of_a_unit_that_is_wrong(client: Client) -> None:
    for unit, done, field in ((-1, False, "publisher.unit"), (0, True, "publisher.unit_done")):
        request = sow_pb2.PublishRequest(topic="orders", records=[sow_pb2.PublishRecord(payload=b'{"id":1}')])
        position = request.publisher
        position.publisher_id, position.publisher_epoch, position.first_sequence = "p", 1, 1
        position.unit, position.unit_done = unit, done
        with pytest.raises(SowError) as caught:
            client._call(client._sow.Publish, request)
        assert (caught.value.reason, caught.value.details["field"]) == ("INVALID_ARGUMENT", field)
    with pytest.raises(SowError) as caught:
        client.open_publisher("p", topic="orders", unit=-1)
    assert caught.value.details["field"] == "unit"


def test_the_asynchronous_publisher_does_the_same(server: ServerProcess) -> None:
    async def run() -> None:
        async with server.async_client() as client:
            opened = await client.open_publisher("p", topic="orders", unit=1)
            async with client.publisher("orders", publisher_id="p", epoch=opened.epoch, unit=1) as publisher:
                await publisher.publish({"id": "first"})
                await publisher.publish_columns(rows(1, 2_500))
                await publisher.finish_unit()
            assert await client.open_publisher("p", topic="orders", unit=1) == OpenedPublisher(1, True, 2_501)
            async with client.publisher("orders", publisher_id="p", unit=2) as empty:
                await empty.finish_unit()
            assert await client.open_publisher("p", topic="orders", unit=2) == OpenedPublisher(2, True, 0)
            refused = client.publisher("orders", publisher_id="p", unit=3)
            await refused.publish_columns([b"{}"])
            with pytest.raises(PublishFailed):
                await refused.finish_unit()
            await refused.close()
            assert not (await client.open_publisher("p", topic="orders", unit=3)).unit_done
            async with client.publisher("orders", publisher_id="p", unit=3, on_refusal=lambda _: None) as without:
                await without.publish_columns([b"{}", *rows(3, 2_500)])
                await without.finish_unit(without_refused=True)
            found = await client.open_publisher("p", topic="orders", unit=3)
            assert (found.unit_done, found.unit_records) == (True, 2_500)

    asyncio.run(run())


@pytest.mark.parametrize("rounds", [5, pytest.param(50, marks=pytest.mark.long)])
def test_a_server_that_is_killed_around_the_end_of_a_unit_has_all_of_it_or_has_not_finished_it(
    server: ServerProcess, rounds: int
) -> None:
    """publishers [1]: the client that goes on finishes it exactly once; who asks after a restart hears the truth."""
    with Client(server.address, connect_timeout=60) as client:
        for number in range(1, rounds + 1):
            publisher = client.publisher("orders", publisher_id="job", unit=number, batch_records=100, retry_for=120)
            publisher.publish_columns(rows(number, 950, "first"))
            told: list[object] = []

            def finish(publisher: object = publisher, told: list[object] = told) -> None:
                try:
                    publisher.finish_unit()  # type: ignore[attr-defined]  # of this round
                    told.append("finished")
                except SowError as error:
                    told.append(error.reason)

            thread = threading.Thread(target=finish)
            thread.start()
            thread.join((number % 5) * 0.004)
            server.kill9()
            server.start()
            if number % 2:
                thread.join()  # the same attempt goes on, and does not know whether the server had its last request
                assert told == ["finished"]
            else:
                opened = client.open_publisher("job", topic="orders", unit=number)  # another attempt
                if not opened.unit_done:
                    with client.publisher("orders", publisher_id="job", epoch=opened.epoch, unit=number) as other:
                        other.publish_columns(rows(number, 950, "second"))
                        other.finish_unit()
                thread.join()
                assert told in (["finished"], ["PUBLISHER_FENCED"], ["UNIT_DONE"])
            publisher.abort()
            opened = client.open_publisher("job", topic="orders", unit=number)
            assert (opened.unit_done, opened.unit_records) == (True, 950)
            counts = [client.count("orders", f"/unit = {number} AND /by = '{by}'") for by in ("first", "second")]
            assert sorted(counts) == [0, 950]
