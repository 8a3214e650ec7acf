"""Subscriptions of both clients against a real server that is killed under load: no gap, no repeat, the view exact.

A subscriber over many connections must get the same changes as one that was never cut.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from sow_client import (
    EARLIEST,
    AsyncSubscription,
    Change,
    Client,
    NotFound,
    Record,
    ResyncRequired,
    Subscription,
    Unavailable,
    View,
)
from tests.support.servers.server import ServerProcess, until

SECONDS_MAX: Final = 60.0
CONFIG: Final = """
[topics.orders]
key = ["/id"]
expiration = "enabled"
[topics.other]
key = ["/id"]
"""
FILTER: Final = "/price > 50"
KEYS: Final = 40
KILLS: Final = 3


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path, CONFIG) as made:
        yield made
        assert made.terminate() == 0
        assert not made.faults()


class Load:
    """Publishes, deltas, deletes and short lifetimes on two topics, from a thread of its own, until it is stopped.

    Calls that the death of the server breaks are let go: whether they were applied does not matter here.
    """

    def __init__(self, server: ServerProcess, seed: int) -> None:
        self._server = server
        self._draw = random.Random(seed)
        self._over = threading.Event()
        self._threads = ThreadPoolExecutor(1)
        self.steps = 0
        self._done: Future[None] = self._threads.submit(self._run)

    def stop(self) -> None:
        self._over.set()
        self._done.result(SECONDS_MAX)
        self._threads.shutdown()

    def _run(self) -> None:
        with self._server.client() as client:
            while not self._over.is_set():
                try:
                    self._step(client)
                except Unavailable:
                    pass
                self.steps += 1

    def _step(self, client: Client) -> None:
        draw = self._draw
        document = {"id": draw.randrange(KEYS), "price": draw.randrange(100), "step": self.steps}
        match draw.randrange(10):
            case 0:
                client.sow_delete("orders", keys=[str(document["id"])])
            case 1 | 2:
                client.delta_publish("orders", {"id": document["id"], "price": document["price"]}, unset=["/step"])
            case 3:
                client.publish("orders", document, ttl=draw.choice(["20ms", "80ms", "200ms"]))
            case 4:
                many = [document | {"id": draw.randrange(KEYS)} for _ in range(7)]
                client.publish_many("orders", many, atomic=True)
            case 5:
                client.publish("other", document)
            case 6:
                client.sow_delete("orders", filter=f"/price = {document['price']}")
            case _:
                client.publish("orders", document)

    def among_kills(self) -> None:
        """Kills the server again and again while it is at work."""
        for _ in range(KILLS):
            done = self.steps
            until(lambda done=done: self.steps > done + 60, SECONDS_MAX, "some load")  # type: ignore[misc]  # its default
            self._server.kill9()
            self._server.start()
        done = self.steps
        until(lambda: self.steps > done + 60, SECONDS_MAX, "some load")


@pytest.fixture
def load(server: ServerProcess, seed: int) -> Iterator[Load]:
    made = Load(server, seed)
    yield made
    made.stop()


def sequence_of(bookmark: str | None) -> int:
    return 0 if bookmark is None else int(bookmark.rpartition(".")[2])


def state(records: Iterator[Record] | list[Record]) -> dict[str, tuple[object, int, int | None]]:
    return {record.key: (record.data, record.version, record.expire_time_micros) for record in records}


def checked_at_rest(
    server: ServerProcess, view: View, reached: Iterator[int], *, exact_stamps: bool = True
) -> dict[str, object]:
    """Compares the view with a query at the same position, which comes once expiries are over; returns the state."""
    with server.client() as client:
        for sequence in reached:
            result = client.query("orders", FILTER)
            found = state(list(result))
            assert result.header is not None
            status = client.status()
            # An expired record that the query hides is swept in a later commit, which the view lacks.
            is_last = sequence_of(result.header.bookmark) == sequence == status.last_sequence
            if not is_last or status.overdue_records:
                continue
            held = state(list(view.values()))
            if exact_stamps:
                assert held == found
            else:  # an update of the lifetime alone is no delta
                assert {key: data for key, (data, _, _) in held.items()} == {
                    key: data for key, (data, _, _) in found.items()
                }
            return {key: data for key, (data, _, _) in found.items()}
    raise AssertionError("the iteration ended")


class Options(NamedTuple):
    """How a subscriber follows."""

    oof: bool = True
    delta: bool = False
    batch_size: int = 1_000
    conflation: str | None = None
    order_by: str | None = None


@pytest.mark.parametrize(
    "options",
    [
        Options(),
        pytest.param(Options(delta=True, batch_size=3), marks=pytest.mark.long),
        pytest.param(Options(batch_size=3), marks=pytest.mark.long),
        pytest.param(Options(conflation="50ms"), marks=pytest.mark.long),
        pytest.param(Options(conflation="50ms", delta=True, batch_size=3), marks=pytest.mark.long),
        pytest.param(Options(order_by="/price DESC, /id", delta=True), marks=pytest.mark.long),
    ],
)
def test_the_view_of_a_subscriber_equals_a_query_whatever_dies(
    server: ServerProcess, load: Load, options: Options
) -> None:
    view = View()
    resyncs = 0

    def follow(changes: Subscription) -> Iterator[int]:
        """Where the subscriber has got to, whenever it has got somewhere."""
        nonlocal resyncs
        for change in changes:
            resyncs += change.op == "resync"
            view.apply(change)
            yield sequence_of(changes.bookmark)

    with server.client() as client, ThreadPoolExecutor(1) as threads:
        changes = client.sow_and_subscribe("orders", FILTER, progress="100ms", **options._asdict())
        at_rest = threading.Event()

        def run() -> dict[str, object]:
            reached = follow(changes)
            for _ in reached:
                if at_rest.is_set():
                    break
            return checked_at_rest(server, view, reached, exact_stamps=not options.delta)

        checking = threads.submit(run)
        load.among_kills()
        load.stop()
        at_rest.set()
        knock(server, checking)
        assert len(checking.result(SECONDS_MAX)) > 0
        assert view.complete
        changes.close()
    print(f"{load.steps} steps, {resyncs} resyncs")


def knock(server: ServerProcess, checking: Future[dict[str, object]]) -> None:
    """One more change now and then, at which a subscriber looks whether it is at rest, until it is done."""
    number = 0
    with server.client() as client:

        def step() -> bool:
            nonlocal number
            number += 1
            client.publish("orders", {"id": "knock", "price": 51 + number % 40, "step": number})
            return checking.done()

        until(step, SECONDS_MAX, "the subscriber to be at rest")


def test_the_asynchronous_client_s_view_equals_a_query_too(server: ServerProcess, load: Load) -> None:
    async def run() -> None:
        view = View()
        async with server.async_client() as client:
            async with client.sow_and_subscribe("orders", FILTER, oof=True, progress="100ms") as changes:
                killing = asyncio.get_running_loop().run_in_executor(None, load.among_kills)
                while not killing.done():
                    view.apply(await anext(changes))
                await killing
                await asyncio.to_thread(load.stop)
                number = 0
                while True:
                    number += 1
                    marker = await client.publish("orders", {"id": "knock", "price": 51 + number % 40})
                    await until_sequence(changes, view, marker.sequence)
                    result = client.query("orders", FILTER)
                    found = [record async for record in result]
                    assert result.header is not None
                    status = await client.status()
                    # An expired record that the query hides is swept in a later commit, which the view lacks.
                    is_last = sequence_of(result.header.bookmark) == marker.sequence == status.last_sequence
                    if is_last and not status.overdue_records:
                        assert state(list(view.values())) == state(found)
                        assert view.complete
                        assert len(view) > 1
                        return

    asyncio.run(asyncio.wait_for(run(), 2 * SECONDS_MAX))


async def until_sequence(changes: AsyncSubscription, view: View, sequence: int) -> None:
    async for change in changes:
        view.apply(change)
        if sequence_of(change.bookmark) >= sequence:
            return


class Heard(NamedTuple):
    """A change as a reader heard it."""

    sequence: int
    topic: str
    op: str
    key: str
    payload: bytes

    @classmethod
    def of(cls, change: Change) -> Heard:
        about = change.record or change.previous
        assert about is not None
        return cls(about.sequence, change.topic, change.op, about.key, about.payload)


@pytest.mark.parametrize(
    ("topics", "batch_size"),
    [
        ("orders", 2),
        pytest.param("o.*", 1_000, marks=pytest.mark.long),
        pytest.param("orders", 1_000, marks=pytest.mark.long),
        pytest.param("o.*", 2, marks=pytest.mark.long),
    ],
)
def test_a_reader_gets_the_whole_journal_over_many_connections(
    server: ServerProcess, load: Load, topics: str, batch_size: int
) -> None:
    """Ordered, unique and complete (rule S5): as a reader hears it that reads the journal afterwards, in one go."""
    chosen = {"topic": topics} if topics == "orders" else {"topic_pattern": topics}
    end = {"id": "end", "price": 60}

    def heard(changes: Subscription) -> list[Heard]:
        result = []
        with changes:
            for change in changes:
                result.append(Heard.of(change))
                if change.key == "end":
                    return result
        raise AssertionError("the iteration ended")

    with server.client() as client, ThreadPoolExecutor(1) as threads:
        changes = client.subscribe(**chosen, changes=True, start=EARLIEST, batch_size=batch_size)  # type: ignore[arg-type]  # keywords of several types
        hearing = threads.submit(heard, changes)
        load.among_kills()
        load.stop()
        client.publish("orders", end)
        live = hearing.result(SECONDS_MAX)
        again = heard(client.subscribe(**chosen, changes=True, start=EARLIEST))  # type: ignore[arg-type]  # keywords of several types
    assert live == again
    sequences = [one.sequence for one in live]
    assert sequences == sorted(set(sequences))
    assert {one.op for one in live} == {"put", "delete", "expire"}
    assert {one.topic for one in live} == ({"orders"} if topics == "orders" else {"orders", "other"})


def test_a_stored_bookmark_of_any_change_leads_on_after_a_kill(server: ServerProcess, load: Load) -> None:
    """A program that stores the bookmark with its result of a change, dies, and begins again."""
    load.among_kills()
    load.stop()
    with server.client() as client:
        client.publish("orders", {"id": "end", "price": 60})
        seen: list[tuple[str | None, Heard]] = []
        for change in client.subscribe("orders", start=EARLIEST, changes=True):
            seen.append((change.bookmark, Heard.of(change)))
            if change.key == "end":
                break
        server.kill9()
        server.start()
        for index in range(0, len(seen) - 1, max(1, len(seen) // 25)):
            bookmark, _ = seen[index]
            if bookmark is not None:
                with client.subscribe("orders", start=bookmark, changes=True) as changes:
                    assert Heard.of(next(changes)) == seen[index + 1][1]


# ---- where there is no way on ----


def test_data_that_were_made_anew_are_a_resync_with_a_snapshot_and_an_error_without(server: ServerProcess) -> None:
    """Rule J14: bookmarks of another epoch are refused."""
    with server.client() as client:
        client.publish("orders", {"id": 1, "price": 60})
        view = View()
        following = client.sow_and_subscribe("orders", FILTER, oof=True)
        for change in following:
            view.apply(change)
            if view.complete:
                break
        plain = client.subscribe("orders")
        reached = plain.bookmark
        assert server.terminate() == 0
        shutil.rmtree(server.data)
        server.start()
        client.publish("orders", {"id": 2, "price": 70})
        with pytest.raises(ResyncRequired) as caught:
            next(plain)
        assert (caught.value.reason, caught.value.bookmark) == ("BOOKMARK_OTHER_EPOCH", reached)
        ops = []
        for change in following:
            ops.append(change.op)
            view.apply(change)
            if view.complete:
                break
        assert ops == ["resync", "sow", "snapshot_end"]
        assert list(view) == ["2"]
        following.close()


def test_a_topic_that_is_deleted_ends_its_subscriptions(server: ServerProcess) -> None:
    with server.client() as client:
        client.create_topic("passing", key=["/id"])
        changes = client.subscribe("passing")
        client.delete_topic("passing")
        with pytest.raises(NotFound) as caught:
            next(changes)
        assert caught.value.reason == "TOPIC_DELETED"
        with pytest.raises(StopIteration):
            next(changes)
