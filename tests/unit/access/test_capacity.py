"""Places of calls, waits for requests, and bytes of connections (rule N5)."""

from __future__ import annotations

import asyncio

import pytest

from sow_server.access.needs import NEEDS, Need
from sow_server.engine.values.errors import StoreError
from sow_server.engine.values.turns import CALLER
from sow_server.services.door.capacity import (
    ADMINISTRATIVE_CALLS_MAX,
    HEALTH_CHECKS_MAX,
    HEALTH_WATCHES_MAX,
    WATCHES_PER_CONNECTION_MAX,
    Arrivals,
    InFlight,
    KeptBytes,
    Place,
    Places,
    SharedRoom,
)
from tests.support.fakes.loops import FakeLoop

GET = NEEDS["/sow.v1.SowService/Get"]
STATUS = NEEDS["/sow.v1.AdminService/GetStatus"]
REPLICATE = NEEDS["/sow.v1.ReplicationService/Replicate"]
CHECK = NEEDS["/grpc.health.v1.Health/Check"]
LIST = NEEDS["/grpc.health.v1.Health/List"]
WATCH = NEEDS["/grpc.health.v1.Health/Watch"]


def entered(places: Places, need: Need, caller: str = "desk", connection: str = "a", *, times: int = 1) -> list[Place]:
    """The places that a caller gets of so many that it asks for."""
    found = []
    for _ in range(times):
        try:
            found.append(places.enter(need, connection, caller))
        except StoreError:
            break
    return found


def test_a_caller_alone_gets_most_and_each_further_one_finds_something() -> None:
    """capacity [2]. Whatever the callers before it hold."""
    room = SharedRoom(100, 4.0)
    got = []
    for caller in range(10):
        taken = 0
        while room.take(f"{caller}"):
            taken += 1
        got.append(taken)
    assert got[:3] == [80, 16, 4], "four times what is free"
    assert room.held == 100
    room.free("0", 5)
    assert room.take("3"), "a caller that holds nothing"
    assert not room.take("0"), "and not the one that gave them back"


def test_room_that_nobody_holds_takes_any_size() -> None:
    room = SharedRoom(100, 0.5)
    assert room.take("a", 1_000)
    assert not room.take("b", 1)
    room.free("a", 1_000)
    assert room.held == 0
    assert room.take("b", 1)


def test_one_caller_cannot_hold_all_places() -> None:
    """capacity [2]. Story: an identity without limits held every place of a listener, ordinary and administrative."""
    places = Places(100)
    assert len(entered(places, GET, "desk", times=100)) == 80
    assert entered(places, GET, "other")
    assert len(entered(places, STATUS, "other", times=1_000)) == 80 + 15, "the rest where ordinary calls are"
    assert entered(places, STATUS, "root")


def test_administrative_calls_and_health_find_a_place_where_others_find_none() -> None:
    """capacity [1]."""
    places = Places(2)
    held = entered(places, GET, times=3)
    assert len(held) == 2
    assert not entered(places, REPLICATE, "peer"), "a link is no administrative call"
    held += entered(places, STATUS, times=ADMINISTRATIVE_CALLS_MAX)
    assert len(held) == 2 + ADMINISTRATIVE_CALLS_MAX * 4 // 5
    assert entered(places, CHECK)
    assert entered(places, WATCH)
    for place in held:
        place.leave()
    assert len(entered(places, GET, times=3)) == 2


def test_watchers_of_health_leave_the_places_of_those_who_ask() -> None:
    """capacity [1]. Story: fifty connections with four watches each, without a credential, had every probe refused."""
    places = Places(2)
    watches = [
        place
        for number in range(50)
        for place in entered(places, WATCH, "host", f"{number}", times=WATCHES_PER_CONNECTION_MAX)
    ]
    assert len(watches) == HEALTH_WATCHES_MAX * 4 // 5
    assert entered(places, CHECK, "host")
    assert entered(places, LIST, "host")
    assert entered(places, WATCH, "another host", "other"), "a load balancer watches, too"
    assert entered(places, GET)
    watches.pop().leave()
    assert entered(places, WATCH, "a third host", "third")


def test_checks_of_one_host_leave_places_to_the_others() -> None:
    """capacity [2]."""
    places = Places(2)
    assert len(entered(places, CHECK, "host", times=1_000)) == HEALTH_CHECKS_MAX * 4 // 5
    assert entered(places, CHECK, "probe")


def test_a_connection_has_few_watches() -> None:
    places = Places(2)
    held = entered(places, WATCH, "host", "a", times=10)
    assert len(held) == WATCHES_PER_CONNECTION_MAX
    assert entered(places, WATCH, "host", "b")
    held.pop().leave()
    assert len(entered(places, WATCH, "host", "a", times=10)) == 1


def test_the_bytes_of_one_connection_leave_room_for_others() -> None:
    """capacity [4]."""
    kept = KeptBytes(400)
    assert kept.take("a", "desk", 110), "one message of any size can be sent"
    assert not kept.take("a", "desk", 1)
    assert kept.take("b", "other", 60)
    assert not kept.take("b", "other", 41)
    assert kept.take("b", "other", 40)
    kept.free("b", "other", 60)
    assert kept.take("b", "other", 60)
    kept.free("a", "desk", 110)
    assert kept.take("a", "desk", 50)


def test_the_bytes_of_one_caller_leave_room_for_others_however_many_connections_it_has() -> None:
    """capacity [4]. Story: an answer that nobody read counted for its connection alone, and an identity had fifty."""
    kept = KeptBytes(400)
    taken = sum(kept.take(f"{number}", "desk", 20) for number in range(50))
    assert taken * 20 == 140
    assert kept.take("other", "other", 100)


def test_bytes_in_flight_have_a_bound_for_each_caller_and_in_all() -> None:
    """capacity [3]."""
    requests = InFlight(100).requests
    assert requests.take("desk", 40)
    assert not requests.take("desk", 10), "half of what is free is less"
    assert requests.take("other", 50)
    assert not requests.take("third", 11)
    assert requests.take("third", 10)
    requests.free("desk", 40)
    requests.free("other", 50)
    requests.free("third", 10)
    assert requests.take("desk", 1_000), "the first of all"
    assert not requests.take("other", 1)


def test_without_an_access_file_one_host_may_have_everything() -> None:
    """capacity [2]. Story: all clients of one host were one caller, so a fifth of the calls and two thirds of the bytes
    were kept free for nobody."""
    places = Places(100, shared=False)
    held = entered(places, GET, "host", times=101)
    assert len(held) == 100
    assert len(entered(places, STATUS, "host", times=1_000)) == ADMINISTRATIVE_CALLS_MAX
    assert len(entered(places, CHECK, "host", times=1_000)) == HEALTH_CHECKS_MAX * 4 // 5, "a probe is of another host"
    held.pop().leave()
    assert entered(places, GET, "another host")
    in_flight = InFlight(100, shared=False)
    assert [in_flight.requests.take("host", 20) for _ in range(6)] == [True] * 5 + [False]
    assert [in_flight.kept.take(f"{number}", "host", 20) for number in range(6)] == [True] * 5 + [False]


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


def test_calls_that_send_no_request_make_room_for_those_that_do() -> None:
    """capacity [6]. The oldest of the host with most of them ends; no other caller's does."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        arrivals = Arrivals(5.0, waiting_max=3)
        ended: list[str] = []

        async def wait(name: str, host: str) -> None:
            CALLER.set(host)
            with pytest.raises(TimeoutError):
                await arrivals.of(loop.create_future())
            ended.append(name)

        async def ask(host: str) -> str:
            CALLER.set(host)
            return await arrivals.of(asyncio.sleep(0, "it is here"))

        waits = []
        for name, host in (("honest", "a"), ("first", "b"), ("second", "b")):
            waits.append(asyncio.create_task(wait(name, host)))
            await asyncio.sleep(0)
        assert await asyncio.create_task(ask("probe")) == "it is here"
        assert ended == ["first"]
        waits.append(asyncio.create_task(wait("third", "b")))
        await asyncio.sleep(0)
        assert await asyncio.create_task(ask("b")) == "it is here"
        assert ended == ["first", "second"]
        await asyncio.gather(*waits)
        assert loop.time() < 6.0

    with asyncio.Runner(loop_factory=FakeLoop) as runner:
        runner.run(run())
