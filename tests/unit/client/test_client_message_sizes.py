"""Messages that are too large for a server or a client (rule K8)."""

# ruff: noqa: N802 - RPCs have the names of the contract

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sow.v1 import sow_pb2, types_pb2
from sow_client import (
    AsyncClient,
    Client,
    InvalidArgument,
    SowError,
)
from tests.support.fakes.echo_server import Store, address, serve, store

__all__ = ["address", "store"]  # fixtures


def too_large() -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Calls with a message beyond 20 MiB, of both clients."""
    text = "x" * (21 * 2**20)
    yield "publish", lambda client: client.publish("orders", text)
    yield "delta", lambda client: client.delta_publish("orders", text.encode())
    yield "many", lambda client: client.publish_many("orders", ["{}"] * 3 + [text])
    yield "get", lambda client: client.get("orders", text)
    yield "touch", lambda client: client.touch("orders", ["a" * 3000] * 7500)
    yield "delete by keys", lambda client: client.sow_delete("orders", keys=[text])
    yield "delete by filter", lambda client: client.sow_delete("orders", filter=text)
    yield "delete by document", lambda client: client.sow_delete("orders", data=text)
    yield "count", lambda client: client.count("orders", text)
    yield "page", lambda client: client.page("orders", text, page_size=1)
    yield "explain", lambda client: client.explain("orders", text)
    yield "restamp", lambda client: client.restamp("orders", "clear", filter=text)
    yield "policy", lambda client: client.set_policy("p", text, topics={"max_ttl": "1h"})


@pytest.mark.slow
def test_a_message_that_is_too_large_is_refused_before_it_is_sent(store: Store, address: str) -> None:
    """It was a bare RESOURCE_EXHAUSTED of gRPC, which programs try again."""
    calls = dict(too_large())

    def refused(name: str, error: BaseException | None) -> None:
        assert isinstance(error, InvalidArgument), name
        assert (error.reason, error.details["field"]) == ("REQUEST_TOO_LARGE", "request"), name

    with Client(address) as client:
        for name, call in calls.items():
            with pytest.raises(SowError) as caught:
                call(client)
            refused(name, caught.value)

    async def use() -> None:
        async with AsyncClient(address) as aio:
            for name in ("publish", "get", "count"):
                with pytest.raises(SowError) as caught:
                    await calls[name](aio)
                refused(name, caught.value)

    asyncio.run(use())
    assert store.payloads == [b"{}"] * 3  # of publish_many, which sends the records before it


@pytest.mark.slow
def test_streams_with_a_message_that_is_too_large_are_refused_before_it_is_sent(store: Store, address: str) -> None:
    text = "x" * (21 * 2**20)
    with Client(address) as client:
        calls: list[Callable[[], object]] = [
            client.query("orders", text).__next__,
            lambda: client.subscribe("orders", text),
            lambda: client.durable("orders", "one", text),
        ]
        for call in calls:
            with pytest.raises(InvalidArgument) as refused:
                call()
            assert refused.value.reason == "REQUEST_TOO_LARGE"
        stager = client.stage_load("load", 0, 0)
        with client.publisher("orders") as publisher:
            rows: list[tuple[str, Callable[[], object]]] = [
                ("PAYLOAD_TOO_LARGE", lambda: publisher.publish(text)),
                ("KEY_TOO_LARGE", lambda: publisher.publish(b"{}", key=text)),
                ("PAYLOAD_TOO_LARGE", lambda: publisher.publish_columns([text.encode()])),
                ("KEY_TOO_LARGE", lambda: publisher.publish_columns([b"{}"], keys=[text])),
                ("PAYLOAD_TOO_LARGE", lambda: stager.stage([text.encode()])),
                ("KEY_TOO_LARGE", lambda: stager.stage([b"{}"], keys=[text])),
            ]
            for reason, row in rows:
                with pytest.raises(InvalidArgument) as refused:
                    row()
                assert refused.value.reason == reason
        stager.abort()


@pytest.mark.slow
def test_long_keys_do_not_make_a_message_of_a_publisher_too_large(store: Store, address: str) -> None:
    """Only payloads were counted: 1,000 keys of 30 KB ended the publisher, instead of being refused one by one."""
    keys = [f"{number}{'k' * 30_000}" for number in range(1000)]
    with Client(address) as client, client.publisher("orders") as publisher:
        for key in keys:
            publisher.publish(b"{}", key=key)
        publisher.publish_columns([b"{}"] * 1000, keys=keys)
    assert (publisher.applied, len(store.payloads)) == (2000, 2000)
    with Client(address) as client:
        assert len(client.publish_many("orders", [b"{}"] * 1000, keys=keys)) == 1000


@pytest.mark.slow
def test_an_oversized_answer_and_the_limit_of_another_server_give_the_same_error(address: str) -> None:
    """gRPC says RESOURCE_EXHAUSTED of its own limits, at either end, and nothing but a text that tells why."""

    class Large(Store):
        def Get(self, request: sow_pb2.GetRequest, context: object) -> sow_pb2.GetResponse:
            return sow_pb2.GetResponse(records=[types_pb2.Record(key="1", payload=bytes(21 * 2**20))])

    server = serve(Large(), address)  # which takes no message beyond 4 MiB, gRPC's default
    try:
        with Client(address) as client:
            for call in (
                lambda: client.get("orders", "1"),
                lambda: client.publish("orders", bytes(5 * 2**20)),
                client.query("orders", "x" * (5 * 2**20)).__next__,
            ):
                with pytest.raises(InvalidArgument) as refused:
                    call()
                assert refused.value.reason == "REQUEST_TOO_LARGE"
            publisher = client.publisher("orders")
            publisher.publish(bytes(5 * 2**20))
            with pytest.raises(InvalidArgument) as refused:
                publisher.flush()
            assert refused.value.reason == "REQUEST_TOO_LARGE"
            publisher.abort()
    finally:
        server.stop(None).wait()
