"""Leases on a real server, of both clients (rule L21). The test moves the server's clock and the holder's, and takes
the turns of the lease; one test alone lets it renew by itself."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, Final

import pytest

from sow_client import Client, ConditionFailed, DeadlineExceeded, InvalidArgument, Lease, LeaseLost, SowError
from sow_client.aio._leasing import AioTicker
from tests.support.servers.clocked_server import STORE_FILE
from tests.support.servers.server import ServerProcess, until
from tests.support.simulation.clients import Connect, connect

__all__ = ["connect"]  # a fixture

WAIT: Final = 20.0
CONFIG = """
[topics.locks]
expiration = "enabled"
[topics.members]
key = ["/id"]
expiration = "enabled"
[topics.short]
expiration = "enabled"
max_ttl = "10s"
[topics.lasting]
[topics.closed]
expiration = "reject"
"""


class NoTicker:
    """The test takes the turns itself."""

    def __init__(self, turn: Callable[[], object]) -> None:
        pass

    def start(self, seconds: float) -> None:
        pass

    def stop(self) -> None:
        pass


class NoAioTicker(NoTicker):
    async def stop(self) -> None:  # type: ignore[override]  # as AioTicker's
        pass


class World:
    """The server, its clock and the holders' clock."""

    def __init__(self, server: ServerProcess, connect: Connect) -> None:
        self.server = server
        self.holder_seconds = 0.0
        self._connect = connect
        self._file = server.config.parent / STORE_FILE
        self._seconds = float(self._file.read_text()) if self._file.exists() else 0.0

    def client(self) -> Client:
        return self._connect(self.server.address, connect_timeout=0.5)

    def tick(self, seconds: float) -> None:
        """Time passes."""
        self.holder_seconds += seconds
        self._seconds += seconds
        beside = self._file.with_suffix(".new")
        beside.write_text(str(self._seconds))
        os.replace(beside, self._file)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("leases"), CONFIG, start=False) as made:
        made.module = "tests.support.servers.clocked_server"
        made.start()
        yield made


@pytest.fixture
def world(server: ServerProcess, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(server, connect)
    for package, ticker in (("blocking", "Ticker"), ("aio", "AioTicker")):
        module = f"sow_client.{package}._leasing"
        monkeypatch.setattr(f"{module}.lease_now", lambda: made.holder_seconds)
        monkeypatch.setattr(f"{module}.{ticker}", NoTicker if ticker == "Ticker" else NoAioTicker)
    yield made
    with made.client() as client:
        for topic in ("locks", "members"):
            client.sow_delete(topic, all=True)


def turn(lease: Lease) -> float | None:
    """The lease renews its records; the seconds until the next time."""
    return lease._turn()


def ends(client: Client, *keys: tuple[str, str]) -> set[int | None]:
    """The expire times of records, given by topic and key."""
    found = [client.get(topic, key) for topic, key in keys]
    assert all(found)
    return {record.expire_time_micros for record in found if record is not None}


def test_all_records_of_a_lease_end_in_one_instant(world: World) -> None:
    """Lifetime 4: etcd's lease over many keys."""
    keys = ("locks", "a"), ("locks", "b"), ("members", "1")
    with world.client() as client:
        lease = client.lease("15s")
        lease.publish("locks", {"n": 1}, key="a")
        world.tick(2)
        lease.publish("locks", {"n": 2}, key="b")
        lease.publish("members", {"id": 1})
        (first,) = ends(client, *keys)
        world.tick(5)
        assert turn(lease) == 5.0
        (second,) = ends(client, *keys)
        assert first is not None
        assert second is not None
        assert 6_500_000 < second - first < 9_000_000
        world.tick(13)
        ends(client, *keys)
        assert lease.lost is None
        world.tick(2)  # nobody has renewed
        assert [client.get(topic, key) for topic, key in keys] == [None] * 3
        with pytest.raises(LeaseLost):
            lease.close()


def test_leaving_deletes_the_records_at_once(world: World) -> None:
    """Lifetime 4."""
    with world.client() as client:
        with client.lease("15s") as lease:
            lease.publish("locks", {"n": 1}, key="a")
            turn(lease)
            lease.publish("members", {"id": 1})
        assert client.get("locks", "a") is None
        assert client.get("members", "1") is None
        lease.close()
        with pytest.raises(SowError) as caught:
            lease.publish("locks", {"n": 1}, key="a")
        assert caught.value.reason == "CLOSED"


def test_a_lease_is_a_lock_whose_versions_rise_from_holder_to_holder(world: World) -> None:
    """Lifetime 6: Redis's SET with NX and EX."""
    with world.client() as client:
        with client.lease("15s") as first:
            one = first.publish("locks", {"by": 1}, key="a", only_if_absent=True)
            turn(first)
            with client.lease("15s") as second, pytest.raises(ConditionFailed):
                second.publish("locks", {"by": 2}, key="a", only_if_absent=True)
        with client.lease("15s") as third:
            other = third.publish("locks", {"by": 3}, key="a", only_if_absent=True)
        assert other.version > one.version


@pytest.mark.parametrize("how", ["publish", "delete", "touch"])
def test_the_holder_is_told_that_another_has_taken_a_record(world: World, how: str) -> None:
    """Lifetime 5: as etcd's session tells it."""
    told: list[LeaseLost] = []
    with world.client() as client:
        lease = client.lease("15s", on_lost=told.append)
        lease.publish("locks", {"by": "me"}, key="a")
        lease.publish("locks", {"by": "me"}, key="b")
        turn(lease)
        before = client.get("locks", "b")
        if how == "publish":
            client.publish("locks", {"by": "another"}, key="a", ttl="1h")
        elif how == "delete":
            client.sow_delete("locks", keys=["a"])
        else:
            client.touch("locks", "a", ttl="1h")
        taken = client.get("locks", "a")

        assert turn(lease) is None

        assert [error.reason for error in told] == ["LEASE_LOST"]
        assert lease.lost is told[0]
        with pytest.raises(LeaseLost):
            lease.check()
        assert before is not None
        after = client.get("locks", "b")
        assert after is not None
        assert (after.version, after.expire_time) == (before.version, before.expire_time), "all are renewed, or none"
        with pytest.raises(LeaseLost):
            lease.close()
        left = client.get("locks", "a")
        assert (left and left.version) == (taken and taken.version), "another's record is neither renewed nor deleted"
        assert client.get("locks", "b") is None


def test_leaving_tells_that_another_has_taken_a_record(world: World) -> None:
    """Lifetime 5: as the release of a lock of Redis does."""
    with world.client() as client:
        lease = client.lease("15s")
        lease.publish("locks", {"by": "me"}, key="a")
        client.publish("locks", {"by": "another"}, key="a")
        with pytest.raises(LeaseLost), lease:
            pass
        record = client.get("locks", "a")
        assert record is not None
        assert record.data == {"by": "another"}
        lease = client.lease("15s")
        lease.publish("locks", {"by": "me"}, key="b")
        client.publish("locks", {"by": "another"}, key="b")
        with pytest.raises(ZeroDivisionError) as caught, lease:
            raise ZeroDivisionError
        assert "the lease also failed" in caught.value.__notes__[0]


def test_a_holder_that_was_suspended_knows_that_its_time_is_over(world: World) -> None:
    """Lifetime 6: a holder sleeps, another gets the lock, and both act, if the first does not look at its clock."""
    with world.client() as client:
        lease = client.lease("15s")
        lease.publish("locks", {"by": "me"}, key="a", only_if_absent=True)
        world.tick(16)
        with client.lease("15s") as other:
            taken = other.publish("locks", {"by": "another"}, key="a", only_if_absent=True)
            assert lease.lost is not None
            with pytest.raises(LeaseLost):
                lease.publish("locks", {"by": "me"}, key="b")
            assert turn(lease) is None
            with pytest.raises(LeaseLost):
                lease.close()
            record = client.get("locks", "a")
            assert record is not None
            assert record.version == taken.version


@pytest.mark.parametrize("renews", [False, True])
def test_a_holder_counts_less_time_than_the_server(world: World, renews: bool) -> None:
    """It stops to rely on a record before that ends, also where the store's clock runs 5 % fast."""
    with world.client() as client:
        lease = client.lease("15s")
        lease.publish("locks", {"by": "me"}, key="a")
        if renews:
            world.tick(5)
            assert turn(lease) == 5.0
        world.tick(14.2)
        lease.check()
        world.tick(0.2)
        assert lease.lost is not None
        assert client.get("locks", "a") is not None
        with pytest.raises(LeaseLost):
            lease.close()


def test_a_server_that_is_away_is_no_loss_until_the_time_is_over(world: World) -> None:
    """Lifetime 5."""
    told: list[LeaseLost] = []
    with world.client() as client:
        lease = client.lease("60s", on_lost=told.append)
        lease.publish("locks", {"by": "me"}, key="a")
        world.server.kill9()
        world.tick(20)
        assert turn(lease) == 1.0
        assert lease.lost is None
        world.server.start()
        world.tick(1)
        until(lambda: turn(lease) == 20.0, 20, "the client to be connected again")
        world.tick(55)
        assert client.get("locks", "a") is not None, "it was renewed at the 21st second"
        turn(lease)
        world.server.kill9()
        world.tick(55)
        wait = turn(lease)
        assert wait is not None
        assert wait == pytest.approx(1.0)
        world.tick(4)
        assert turn(lease) is None
        (error,) = told
        assert isinstance(error.__cause__, SowError)
        with pytest.raises(LeaseLost):
            lease.close()
        world.server.start()


class Slow:
    """A publish that waits, as one with the durability REPLICATED whose peer is away. The server has the record."""

    def __init__(self, lease: Any) -> None:
        target = getattr(lease, "_target", lease)
        self._client = target._client
        self._publish = self._client._publish
        self._go_on = threading.Event()
        self.entered = threading.Event()
        self._client._publish = self._slowly if isinstance(lease, Lease) else self._aio_slowly

    def _slowly(self, request: Any, **named: Any) -> Any:
        response = self._publish(request, **named)
        self.entered.set()
        assert self._go_on.wait(WAIT)
        return response

    async def _aio_slowly(self, request: Any, **named: Any) -> Any:
        response = await self._publish(request, **named)
        self.entered.set()
        assert await asyncio.to_thread(self._go_on.wait, WAIT)
        return response

    def go_on(self) -> None:
        """The peer has the record."""
        self._client._publish = self._publish
        self._go_on.set()


def test_a_publish_that_waits_for_a_peer_keeps_no_record_from_being_renewed(world: World) -> None:
    """The lease died, though its holder lived: renewals waited for the end of the publish."""
    with world.client() as client, futures.ThreadPoolExecutor() as threads:
        lease = client.lease("15s")
        lease.publish("locks", {"by": "me"}, key="a")
        world.tick(2)
        slow = Slow(lease)
        publishing = threads.submit(lease.publish, "locks", {"by": "me"}, key="b")
        assert slow.entered.wait(WAIT)
        world.tick(3)
        assert threads.submit(turn, lease).result(WAIT) == 5.0
        assert not publishing.done()
        (before,) = ends(client, ("locks", "a"))
        slow.go_on()
        publishing.result(WAIT)
        (together,) = ends(client, ("locks", "a"), ("locks", "b"))
        assert together is not None
        assert before is not None
        assert together >= before, "the record that joined has the expire time of the others"
        lease.close()
        assert client.get("locks", "b") is None


def test_a_holder_that_publishes_its_record_again_during_a_renewal_keeps_its_lease(world: World) -> None:
    """Story: the new version was taken for another's, so a holder that published often lost its lease within seconds.
    Somebody else's record is still found."""
    with world.client() as client, futures.ThreadPoolExecutor() as threads:
        lease = client.lease("15s")
        lease.publish("locks", {"by": "me", "n": 0}, key="a")
        for number in range(1, 4):
            world.tick(5)
            slow = Slow(lease)
            publishing = threads.submit(lease.publish, "locks", {"by": "me", "n": number}, key="a")
            assert slow.entered.wait(WAIT)
            assert threads.submit(turn, lease).result(WAIT) == 5.0
            slow.go_on()
            publishing.result(WAIT)
            assert turn(lease) == 5.0
        record = client.get("locks", "a")
        assert record is not None
        assert record.data == {"by": "me", "n": 3}
        slow = Slow(lease)
        publishing = threads.submit(lease.publish, "locks", {"by": "me", "n": 4}, key="a")
        assert slow.entered.wait(WAIT)
        with world.client() as other:
            other.publish("locks", {"by": "another"}, key="a")
        assert threads.submit(turn, lease).result(WAIT) is None
        slow.go_on()
        assert isinstance(publishing.exception(WAIT), LeaseLost)
        with pytest.raises(LeaseLost):
            lease.close()


def test_a_record_whose_publish_took_longer_than_its_time_is_not_in_the_lease(world: World) -> None:
    """It may have ended, and another may have it."""
    with world.client() as client, futures.ThreadPoolExecutor() as threads:
        lease = client.lease("15s")
        lease.publish("locks", {"by": "me"}, key="a")
        slow = Slow(lease)
        publishing = threads.submit(lease.publish, "locks", {"by": "me"}, key="b")
        assert slow.entered.wait(WAIT)
        for _ in range(4):
            world.tick(4)
            assert turn(lease) == 5.0
        with world.client() as other:
            other.publish("locks", {"by": "another"}, key="b", ttl="1h")
        slow.go_on()
        assert isinstance(publishing.exception(WAIT), DeadlineExceeded)
        lease.check()
        lease.close()
        assert client.get("locks", "a") is None
        assert client.get("locks", "b") is not None


def test_a_record_that_is_published_while_the_holder_leaves_goes_too(world: World) -> None:
    with world.client() as client, futures.ThreadPoolExecutor() as threads:
        lease = client.lease("15s")
        slow = Slow(lease)
        publishing = threads.submit(lease.publish, "locks", {"by": "me"}, key="a")
        assert slow.entered.wait(WAIT)
        threads.submit(lease.close).result(WAIT)
        slow.go_on()
        error = publishing.exception(WAIT)
        assert isinstance(error, SowError)
        assert error.reason == "CLOSED"
        assert client.get("locks", "a") is None


def test_a_lost_lease_whose_holder_fails_to_hear_it_is_left_all_the_same(world: World) -> None:
    """`on_lost` raised, and the end of the block raised that again before it deleted the other records."""

    def fails(lost: LeaseLost) -> None:
        raise ZeroDivisionError("in on_lost")

    with world.client() as client:
        lease = client.lease("15s", on_lost=fails)
        lease.publish("locks", {"by": "me"}, key="a")
        lease.publish("locks", {"by": "me"}, key="b")
        client.publish("locks", {"by": "another"}, key="a", ttl="1h")
        assert turn(lease) is None
        with pytest.raises(LeaseLost) as caught:
            lease.close()
        assert "ZeroDivisionError('in on_lost')" in caught.value.__notes__[0]
        assert client.get("locks", "a") is not None
        assert client.get("locks", "b") is None


def test_a_task_of_a_lease_that_has_failed_is_stopped_without_an_error() -> None:
    """Its error was raised by the end of the block, before that deleted the records."""

    async def use() -> None:
        fails = asyncio.Event()

        async def turn() -> float | None:
            fails.set()
            raise ZeroDivisionError

        ticker = AioTicker(turn)
        ticker.start(0.0)
        await fails.wait()
        await ticker.stop()

    asyncio.run(use())


def test_a_fault_of_a_renewal_loses_the_lease_and_is_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing would renew it any more, and nobody would hear of it before its time was over."""
    told: list[LeaseLost] = []
    with world.client() as client:
        lease: Any = client.lease("15s", on_lost=told.append)
        lease.publish("locks", {"by": "me"}, key="a")
        monkeypatch.setattr(lease._core, "renewal", None)
        assert turn(lease) is None
        assert lease.lost is told[0]
        assert isinstance(told[0].__cause__, TypeError)
        monkeypatch.undo()
        with pytest.raises(LeaseLost):
            lease.close()


def test_a_server_that_is_away_does_not_keep_a_holder_from_leaving(world: World) -> None:
    with world.client() as client, client.lease("15s") as lease:
        lease.publish("locks", {"by": "me"}, key="a")
        world.server.kill9()
    world.server.start()


@pytest.mark.parametrize("meanwhile", ["nothing", "another record"])
def test_a_renewal_whose_answer_was_lost_is_recognized(world: World, meanwhile: str) -> None:
    with world.client() as client:
        lease: Any = client.lease("15s")
        lease.publish("locks", {"by": "me"}, key="a")
        lease.publish("locks", {"by": "me"}, key="b")
        client.touch("locks", ["a", "b"], ttl="15s", atomic=True)  # as the renewal whose answer nobody has got
        lease._core.failed("locks", SowError("cut", reason="STREAM_CUT"), world.holder_seconds)
        if meanwhile == "another record":
            client.publish("locks", {"by": "another"}, key="b", ttl="15s")
            assert turn(lease) is None
            return
        assert turn(lease) == 5.0
        lease._core.failed("locks", SowError("cut", reason="STREAM_CUT"), world.holder_seconds)
        client.touch("locks", ["a", "b"], ttl="15s", atomic=True)
        lease.close()
        assert client.get("locks", "a") is None
        assert client.get("locks", "b") is None


class GivenUp(BaseException):
    """As a task that is cancelled, and as Ctrl-C."""


@pytest.mark.parametrize("name", ["_publish", "_call"])
def test_a_request_that_its_caller_gives_up_is_no_loss(
    world: World, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The server had it, and the lease took the new version of its record for that of another."""
    with world.client() as client:
        lease: Any = client.lease("15s")
        lease.publish("locks", {"by": "me"}, key="a")
        within = getattr(lease, "_target", lease)._client
        call = getattr(within, name)

        def given_up(*arguments: Any, **named: Any) -> None:
            call(*arguments, **named)
            raise GivenUp

        async def aio_given_up(*arguments: Any, **named: Any) -> None:
            await call(*arguments, **named)
            raise GivenUp

        def request() -> object:
            return turn(lease) if name == "_call" else lease.publish("locks", {"by": "me still"}, key="a")

        monkeypatch.setattr(within, name, given_up if isinstance(lease, Lease) else aio_given_up)
        with pytest.raises(GivenUp):
            request()
        monkeypatch.setattr(within, name, call)
        assert turn(lease) == 5.0
        lease.close()
        assert client.get("locks", "a") is None


def test_a_lease_refuses_topics_on_which_it_would_not_end_or_end_early(world: World) -> None:
    with world.client() as client, client.lease("15s") as lease:
        for topic in ("short", "lasting", "closed"):
            with pytest.raises(InvalidArgument):
                lease.publish(topic, {"n": 1}, key="a")
            assert client.get(topic, "a") is None
        with pytest.raises(InvalidArgument):
            client.lease("0.9s")
        many = [str(number) for number in range(1_000)]
        core: Any = getattr(lease, "_core")  # noqa: B009  # of either kind
        lease.publish("locks", {"n": 1}, key="0")
        core.held["locks"] |= dict.fromkeys(many[1:], core.held["locks"]["0"])
        with pytest.raises(InvalidArgument):
            lease.publish("locks", {"n": 1}, key="one too many")
        for key in many[1:]:
            del core.held["locks"][key]


def test_a_lease_renews_by_itself(server: ServerProcess, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """The subscriber gets a change only because the lease has renewed its record."""
    monkeypatch.setattr("sow_client._lease_core.RENEWALS", 300)  # so that nothing here waits, and no pause loses it
    with connect(server.address) as client:
        with client.lease("30s") as lease:
            published = lease.publish("members", {"id": "me"})
            renewed = [published.version]
            assert published.bookmark is not None
            for change in client.subscribe("members", start=published.bookmark):
                renewed.append(change.record.version if change.record else 0)
                if len(renewed) == 4:
                    break
            lease.check()
        assert renewed == sorted(set(renewed))
        assert client.get("members", "me") is None


def test_a_holder_that_publishes_all_the_time_keeps_its_lease(
    server: ServerProcess, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease renews by itself, and threads publish its record, until some renewals have come."""
    monkeypatch.setattr("sow_client._lease_core.RENEWALS", 3_000)
    with connect(server.address) as client, client.lease("30s") as lease:
        within: Any = getattr(lease, "_target", lease)
        renewals: list[None] = []
        all_renewed = within._core.all_renewed

        def renewed(*arguments: Any) -> None:
            renewals.append(None)
            all_renewed(*arguments)

        within._core.all_renewed = renewed
        number = 0
        while len(renewals) < 20:
            number += 1
            lease.publish("members", {"id": "me", "n": number})
        lease.check()
