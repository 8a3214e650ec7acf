"""The log of a subscription, and the places of its listeners in it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from starlette.requests import Request
from starlette.responses import StreamingResponse

from sow_http import events
from sow_http.events import Events, Followed, Listener
from sow_http.problems import Refused


@dataclass
class Subscription:
    """What a log asks of a subscription."""

    bookmark: str | None = "e.1"
    behind: bool = False


def event(number: int, size: int = 10) -> bytes:
    return b"event: put\nid: e.%d\ndata: %s\n\n" % (number, b"x" * size)


def run(life: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(asyncio.wait_for(life(), 20))


def log(bookmark: str | None = "e.1", after: str | None = None, *, behind: bool = False) -> Followed:
    return Followed(Subscription(bookmark, behind), after)  # type: ignore[arg-type]  # it asks for no more


async def taken(pieces: AsyncGenerator[bytes, None], until: bytes) -> bytes:
    told = b""
    while not told.endswith(until):
        told += await anext(pieces)
    return told


def test_a_listener_that_comes_back_gets_what_is_behind_its_bookmark() -> None:
    async def life() -> None:
        followed = log("e.1", "e.0")
        first = followed.join()
        await followed.tell(event(2) + event(3), "e.3")
        await followed.tell(event(4), "e.4")
        assert await taken(followed.pieces(first), event(4)) == event(2) + event(3) + event(4)
        for bookmark, expected in {
            "e.0": b"id: e.1\n: \n\n" + event(2) + event(3) + event(4),
            "e.1": event(2) + event(3) + event(4),
            "e.2": event(3) + event(4),
            "e.3": event(4),
        }.items():
            place = followed.place(bookmark)
            assert place is not None
            assert await anext(followed.pieces(followed.join(place))) == expected, bookmark
        assert followed.place("e.4") == followed.place(None) == followed.end
        for unknown in ("e.5", "e", "e.33", "e.3\ndata: x", "x"):
            assert followed.place(unknown) is None

    run(life)


def test_nobody_joins_from_now_on_where_no_bookmark_is_or_the_past_still_comes() -> None:
    async def life() -> None:
        assert log(None).place(None) is None
        assert log(behind=True).place(None) is None
        followed = log()
        followed.join()
        await followed.tell(b"event: put\ndata: {}\n\n", "")  # inside an atomic request
        assert followed.place(None) is None

    run(life)


def test_a_listener_that_does_not_read_is_ended_and_the_log_stays_small() -> None:
    async def life() -> None:
        followed = log()
        fast, slow = followed.join(), followed.join()
        reading, stopped = followed.pieces(fast), followed.pieces(slow)
        most = 0
        for number in range(2, 60):
            await followed.tell(event(number, 50_000), f"e.{number}")
            await taken(reading, event(number, 50_000))
            most = max(most, followed.end - followed._first)
        assert most <= events.LOG_BYTES_MAX
        assert b"LISTENER_BEHIND" in await anext(stopped)
        with pytest.raises(StopAsyncIteration):
            await anext(stopped)

    run(life)


def test_a_subscription_waits_for_the_fastest_listener_and_for_nobody_when_that_has_gone() -> None:
    async def life() -> None:
        followed = log()
        alone = followed.join()
        pieces = followed.pieces(alone)
        told = asyncio.ensure_future(tell_all(followed))
        await asyncio.sleep(0)
        assert not told.done()
        assert followed.end - followed._first <= events.LOG_BYTES_MAX
        whole = await taken(pieces, event(99, 50_000))
        assert whole == b"".join(event(number, 50_000) for number in range(2, 100))
        assert told.done()
        again = asyncio.ensure_future(tell_all(followed))
        await asyncio.sleep(0)
        end = followed.end
        assert followed.leave(alone)
        await asyncio.sleep(0)
        assert followed.end > end, "it does not wait for one that has gone"
        again.cancel()

    async def tell_all(followed: Followed) -> None:
        for number in range(2, 100):
            await followed.tell(event(number, 50_000), f"e.{number}")

    run(life)


def test_pieces_end_with_whole_events_also_where_one_is_larger_than_the_log() -> None:
    async def life() -> None:
        followed = log()
        listener = followed.join()
        pieces = followed.pieces(listener)
        large = event(2, 3 * events.LOG_BYTES_MAX)
        for number, one in ((2, large), (3, event(3)), (4, event(4, events.PIECE_BYTES))):
            await followed.tell(one, f"e.{number}")
            assert await anext(pieces) == one
        for number in range(5, 9):
            await followed.tell(event(number, events.PIECE_BYTES // 3), f"e.{number}")
        while listener.at < followed.end:
            piece = await anext(pieces)
            assert piece.startswith(b"event: put")
            assert piece.endswith(b"x\n\n")
            assert len(piece) <= events.PIECE_BYTES

    run(life)


def test_the_end_comes_behind_what_is_in_the_log() -> None:
    async def life() -> None:
        followed = log()
        pieces = followed.pieces(followed.join())
        await followed.tell(event(2), "e.2")
        followed.finish(b"event: problem\ndata: {}\n\n")
        assert [piece async for piece in pieces] == [event(2), b"event: problem\ndata: {}\n\n"]

    run(life)


def test_listeners_at_one_place_share_their_bytes() -> None:
    async def life() -> None:
        followed = log()
        both = [followed.pieces(followed.join()) for _ in range(2)]
        await followed.tell(event(2), "e.2")
        one, other = [await anext(pieces) for pieces in both]
        assert one is other

    run(life)


def test_many_listeners_are_woken_in_turns_of_a_tenth_of_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wake-up costs about the same for one event and for a hundred."""

    async def life() -> None:
        followed = log()
        for _ in range(3_000):
            followed.join()
        first = followed.pieces(Listener(followed.end))
        loop = asyncio.get_running_loop()
        waking: list[float] = []
        call_at = loop.call_at

        def noted(when: float, call: Callable[[], object]) -> asyncio.TimerHandle:
            waking.append(when - loop.time())
            return call_at(when, call)

        monkeypatch.setattr(loop, "call_at", noted)
        followed._woken = loop.time()
        for number in range(2, 12):
            await followed.tell(event(number), f"e.{number}")
        monkeypatch.undo()
        assert len(waking) == 1
        assert waking[0] == pytest.approx(events.PAUSE_SECONDS_MAX, abs=0.05)
        assert (await anext(first)).count(b"event: put") == 10

    run(life)


class Followable(Subscription):
    """A subscription without changes."""

    async def open(self) -> None:
        """It stands at once."""

    async def close(self) -> None:
        """It takes a while."""
        await asyncio.sleep(0)

    async def batches(self, **_: float) -> AsyncGenerator[list[object], None]:
        yield await asyncio.Event().wait()  # type: ignore[misc]  # never


class Client:
    """A client, and whoever lends it."""

    def __init__(self) -> None:
        self.made: list[Followable] = []

    @asynccontextmanager
    async def client(self, token: str | None) -> AsyncIterator[Client]:
        yield self

    def subscribe(self, *_: object, **__: object) -> Followable:
        self.made.append(Followable())
        return self.made[-1]


def test_nobody_joins_a_stream_whose_last_listener_has_just_gone() -> None:
    async def life() -> None:
        client = Client()
        opened = Events(client)  # type: ignore[arg-type]  # it lends itself
        async with opened.changes(request(), None):
            async with opened.changes(request(), None):
                assert len(client.made) == 1
        async with opened.changes(request(), None) as response:
            assert len(client.made) == 2
            assert isinstance(response, StreamingResponse)
            pieces = aiter(response.body_iterator)
            assert (await anext(pieces)) == b"retry: 2000\nid: e.1\n: \n\n"
            for _ in range(5):
                await asyncio.sleep(0)
            following = asyncio.ensure_future(anext(pieces))
            await asyncio.sleep(0)
            assert not following.done(), "the end of the first one is not its end"
            await opened.close()
            assert await following == b""

    run(life)


def request() -> Request:
    return Request({"type": "http", "query_string": b"", "headers": [], "path_params": {"topic": "x"}})


def test_no_more_streams_are_opened_than_are_allowed() -> None:
    async def life() -> None:
        many = Events(SimpleNamespace(), listeners_max=0)  # type: ignore[arg-type]  # nobody is asked
        with pytest.raises(Refused) as refused:
            async with many.changes(request(), None):
                pass
        assert (refused.value.status, refused.value.reason) == (503, "OVERLOADED")

    run(life)
