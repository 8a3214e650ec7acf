"""Live views of both clients against a real server that is killed, loses its data, or lets records expire (rule F5)."""

from __future__ import annotations

import asyncio
import gc
import shutil
import threading
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from sow_client import AsyncClient, AsyncLiveView, Change, Client, LiveView, NotFound, Record, SowError
from tests.integration.test_following import CONFIG, FILTER, SECONDS_MAX, Load
from tests.support.servers.server import ServerProcess, until


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path, CONFIG) as made:
        yield made
        assert made.terminate() == 0
        assert not made.faults()


@pytest.fixture
def load(server: ServerProcess, seed: int) -> Iterator[Load]:
    made = Load(server, seed)
    yield made
    made.stop()


def state(records: Mapping[str, Record]) -> dict[str, tuple[object, int, int | None]]:
    return {key: (record.data, record.version, record.expire_time_micros) for key, record in records.items()}


def found(client: Client) -> dict[str, tuple[object, int, int | None]]:
    return state({record.key: record for record in client.query("orders", FILTER)})


class Told:
    """Applies the changes that a view tells."""

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}

    def take(self, change: Change) -> None:
        if change.op == "put":
            assert change.record is not None, "a put has its record"
            self.records[change.key] = change.record
        else:
            del self.records[change.key]


def wiped(server: ServerProcess) -> None:
    """The server loses everything, and comes back."""
    server.kill9()
    shutil.rmtree(server.data)
    server.start()


def test_a_live_view_equals_a_query_whatever_dies(server: ServerProcess, load: Load) -> None:
    told = Told()
    with server.client() as client, client.live_view("orders", FILTER, on_change=told.take) as view:
        load.among_kills()
        wiped(server)
        load.among_kills()
        load.stop()
        until(lambda: view.current and state(view) == found(client), SECONDS_MAX, "the view to equal a query")
        assert len(view) > 0
        until(lambda: state(told.records) == state(view), SECONDS_MAX, "all changes to be told")


@pytest.mark.long
def test_the_asynchronous_live_view_equals_a_query_too(server: ServerProcess, load: Load) -> None:
    async def run(client: Client, asynchronous: AsyncClient) -> None:
        told = Told()
        async with asynchronous.live_view("orders", FILTER, on_change=told.take) as view:
            await asyncio.to_thread(load.among_kills)
            await asyncio.to_thread(wiped, server)
            await asyncio.to_thread(load.among_kills)
            await asyncio.to_thread(load.stop)
            until_equal = lambda: view.current and state(view) == found(client)  # noqa: E731  # of two lines
            await asyncio.to_thread(until, until_equal, SECONDS_MAX, "the view to equal a query")
            assert state(told.records) == state(view)
        assert len(view) > 0, "a closed view can be read"

    async def main() -> None:
        with server.client() as client:
            async with server.async_client() as asynchronous:
                await asyncio.wait_for(run(client, asynchronous), 3 * SECONDS_MAX)

    asyncio.run(main())


def test_it_is_complete_at_once_and_tells_how_old_it_is(server: ServerProcess) -> None:
    with server.client() as client:
        client.publish("orders", {"id": 1, "price": 60})
        done = client.publish("orders", {"id": 2, "price": 70})
        with client.live_view("orders", FILTER) as view:
            assert view.current
            assert view.age == 0.0
            assert view.position == done.bookmark
            assert list(view) == list(view.keys()) == ["1", "2"]
            assert view["2"].data == {"id": 2, "price": 70}
            assert "3" not in view
            assert [record.key for record in view.values()] == ["1", "2"]
            assert repr(view) == "LiveView(2 records, current)"
            server.kill9()
            until(lambda: not view.current, SECONDS_MAX, "the loss to be noticed")
            assert view.age > 0
            assert not view.wait(0)
            assert view.keys() == {"1", "2"}
            server.start()
            assert view.wait(SECONDS_MAX)
            assert view.age == 0.0


def test_a_record_that_falls_due_during_an_outage_is_out_of_sight(server: ServerProcess) -> None:
    with server.client() as client:
        client.publish("orders", {"id": 1, "price": 60})
        client.publish("orders", {"id": 2, "price": 60}, ttl="2s")
        with client.live_view("orders") as view:
            server.kill9()
            until(lambda: not view.current, SECONDS_MAX, "the loss to be noticed")
            until(lambda: "2" not in view, SECONDS_MAX, "the record to be out of sight")
            assert not view.current
            assert view.keys() == {"1"}
            assert len(view) == 1
            with pytest.raises(KeyError):
                view["2"]
            server.start()
            assert view.wait(SECONDS_MAX)
            assert view.keys() == {"1"}


def test_a_topic_that_is_deleted_and_made_again(server: ServerProcess) -> None:
    with server.client() as client, client.live_view("other") as view:
        client.create_topic("short", key=["/id"])
        client.publish("short", {"id": 1})
        with client.live_view("short") as short:
            assert len(short) == 1
            client.delete_topic("short", force=True)
            until(lambda: not short, SECONDS_MAX, "the records to be gone")
            client.create_topic("short", key=["/id"])
            client.publish("short", {"id": 2})
            until(lambda: short.keys() == {"2"}, SECONDS_MAX, "the new topic's records")
        assert view.current


def test_errors_end_it_and_reading_raises_them(server: ServerProcess) -> None:
    class Mine(Exception):
        pass

    def fails(change: Change) -> None:
        if change.key == "bad":
            raise Mine

    with server.client() as client:
        with pytest.raises(NotFound):
            client.live_view("none")
        with pytest.raises(SowError):
            client.live_view("orders", "(")
        with client.live_view("orders", on_change=fails) as view:
            client.publish("orders", {"id": "bad"})
            for read in (lambda: view["bad"], lambda: len(view), lambda: list(view), view.wait):
                until(lambda: not view.current, SECONDS_MAX, "its end")
                with pytest.raises(Mine):
                    read()


def test_dropping_the_last_reference_ends_it(server: ServerProcess) -> None:
    with server.client() as client:
        view: LiveView | None = client.live_view("orders")
        gone = weakref.ref(view)
        view = None
        gc.collect()
        assert gone() is None
        until(
            lambda: "sow-live-view" not in {one.name for one in threading.enumerate()}, SECONDS_MAX, "its thread to end"
        )


def test_dropping_the_last_reference_ends_the_asynchronous_one_too(server: ServerProcess) -> None:
    """Its task went on for as long as the loop."""

    async def run() -> None:
        async with server.async_client() as client:
            view: AsyncLiveView | None = client.live_view("orders")
            assert view is not None
            await view.open()
            (keeping,) = [task for task in asyncio.all_tasks() if task.get_name() == "sow-live-view"]
            gone = weakref.ref(view)
            view = None
            gc.collect()
            assert gone() is None
            done, _ = await asyncio.wait([keeping], timeout=SECONDS_MAX)
            assert done == {keeping}

    asyncio.run(run())


def test_a_cancelled_opening_leaves_nothing_behind(server: ServerProcess) -> None:
    async def run() -> None:
        server.kill9()
        async with server.async_client() as client:
            view: AsyncLiveView = client.live_view("orders")
            opening = asyncio.create_task(view.open())
            await asyncio.sleep(0)
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
            assert len(asyncio.all_tasks()) == 1
        server.start()

    asyncio.run(run())


def test_a_live_view_changes_its_filter(server: ServerProcess) -> None:
    """Rule S14."""
    with server.client() as client:
        for number in range(20):
            client.publish("orders", {"id": number, "price": number})
        told: list[SowError | None] = []
        with client.live_view("orders", "/price > 15", on_interruption=told.append) as view:
            assert len(view) == 4
            view.change("/price > :least", {"least": 9})
            assert sorted(view, key=int) == [str(number) for number in range(10, 20)]
            with pytest.raises(SowError, match="filter"):
                view.change("(")
            client.publish("orders", {"id": 77, "price": 12})
            until(lambda: "77" in view, SECONDS_MAX, "the change")
            view.change()
            assert len(view) == 21
        assert told == []
        with pytest.raises(SowError):
            view.change("/price > 1")

    async def follow() -> None:
        async with server.async_client() as asynchronous:
            async with asynchronous.live_view("orders", "/price > 15") as other:
                await other.change("/price > 18")
                assert list(other) == ["19"]

    asyncio.run(follow())
