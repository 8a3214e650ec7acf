"""Places of calls, waits for requests, and bytes of connections (rule N5)."""

from __future__ import annotations

import asyncio

import pytest

from sow_server.access.needs import NEEDS, Need
from sow_server.engine.values.errors import StoreError
from sow_server.services.capacity import (
    ADMINISTRATIVE_CALLS_MAX,
    OPEN_CALLS_MAX,
    OPEN_CALLS_PER_CONNECTION_MAX,
    Arrivals,
    ConnectionBytes,
    InFlight,
    Places,
)
from tests.support.loops import FakeLoop

GET = NEEDS["/sow.v1.SowService/Get"]
STATUS = NEEDS["/sow.v1.AdminService/GetStatus"]
REPLICATE = NEEDS["/sow.v1.ReplicationService/Replicate"]
HEALTH = NEEDS["/grpc.health.v1.Health/Check"]


def enters(places: Places, need: Need, connection: str = "a") -> bool:
    try:
        places.enter(need, connection)
    except StoreError:
        return False
    return True


def test_administrative_calls_and_health_find_a_place_where_others_find_none() -> None:
    """capacity [1]."""
    places = Places(2)
    assert [enters(places, GET) for _ in range(3)] == [True, True, False]
    assert not enters(places, REPLICATE), "a link is no administrative call"
    assert [enters(places, STATUS) for _ in range(ADMINISTRATIVE_CALLS_MAX + 1)] == [
        True
    ] * ADMINISTRATIVE_CALLS_MAX + [False]
    assert enters(places, HEALTH)
    for _ in range(ADMINISTRATIVE_CALLS_MAX + 1):
        places.leave(STATUS, "a")
    assert enters(places, GET)


def test_calls_without_a_credential_are_few_for_each_connection_and_few_in_all() -> None:
    """capacity [2]."""
    places = Places(2)
    own = [enters(places, HEALTH, "a") for _ in range(OPEN_CALLS_PER_CONNECTION_MAX + 1)]
    assert own == [True] * OPEN_CALLS_PER_CONNECTION_MAX + [False]
    others = sum(enters(places, HEALTH, f"{number}") for number in range(OPEN_CALLS_MAX))
    assert others == OPEN_CALLS_MAX - OPEN_CALLS_PER_CONNECTION_MAX
    assert enters(places, GET)
    places.leave(HEALTH, "a")
    assert enters(places, HEALTH, "b")


def test_the_bytes_of_one_connection_leave_room_for_others() -> None:
    """capacity [4]."""
    held = ConnectionBytes(100)
    assert held.take("a", 500), "one message of any size can be sent"
    assert not held.take("a", 1)
    assert held.take("b", 60)
    assert not held.take("b", 41)
    assert held.take("b", 40)
    held.free("b", 60)
    assert held.take("b", 60)
    held.free("a", 500)
    assert held.held("a") == 0


def test_bytes_in_flight_have_a_bound_in_all() -> None:
    """capacity [3]."""
    in_flight = InFlight(100)
    assert in_flight.take(60)
    assert not in_flight.take(41)
    in_flight.free(60)
    assert in_flight.take(1_000)
    assert not in_flight.take(1)


def test_a_wait_for_a_request_ends_in_its_own_time_alone() -> None:
    """capacity [5]. One timer serves all waits: it must neither end a later one early nor forget it."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        arrivals = Arrivals(60.0)
        ended: dict[str, float] = {}

        async def wait(name: str, begin: float) -> None:
            await asyncio.sleep(begin)
            with pytest.raises(TimeoutError):
                await arrivals.of(loop.create_future())
            ended[name] = loop.time()

        async def arrive(begin: float) -> str:
            await asyncio.sleep(begin)
            return await arrivals.of(asyncio.sleep(59.0, "it is here"))

        begin = loop.time()
        waits = [wait("first", 0.0), wait("second", 20.0), wait("much later", 500.0)]
        arrived, *_ = await asyncio.gather(arrive(10.0), *waits)
        assert arrived == "it is here"
        assert {name: round(end - begin) for name, end in ended.items()} == {
            "first": 60,
            "second": 80,
            "much later": 560,
        }

    with asyncio.Runner(loop_factory=FakeLoop) as runner:
        runner.run(run())


def test_a_call_that_is_cancelled_is_not_told_that_its_request_is_late() -> None:
    """capacity [5]. Also not if both happen in the same turn of the event loop: gRPC waits for the cancellation."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        arrivals = Arrivals(60.0)

        async def call() -> None:
            await arrivals.of(loop.create_future())

        early = asyncio.create_task(call())
        await asyncio.sleep(1)
        early.cancel()
        with pytest.raises(asyncio.CancelledError):
            await early

        both = asyncio.create_task(call())
        await asyncio.sleep(0)
        loop.call_at(loop.time() + 60.0, both.cancel)
        with pytest.raises(asyncio.CancelledError):
            await both

    with asyncio.Runner(loop_factory=FakeLoop) as runner:
        runner.run(run())
