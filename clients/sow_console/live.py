"""Frames for a browser: one under way, the next made after the last was drawn.

[1]  A frame is sent once the browser has said that it has drawn the one before. A slow browser, or a hidden tab, gets
     newer frames, not older ones.
[2]  Of each key, the newest change waits. Once KEYS_MAX keys or WAITING_BYTES_MAX wait, the subscription is not read
     on, and the server waits, too.
[3]  A frame comes at least every HEARTBEAT_SECONDS, so a page that has heard nothing for longer knows that it is old.
[4]  A socket ends with its session.
[5]  A grid that has an order follows a live result. Each frame has the keys in their order, so a browser that has
     missed frames is right again with the next one. Where the server has no such list, the order is that of the
     answer, and the frames say so.
[6]  Where the changes of a grid break off again and again, a growing wait comes before each whole query.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterable, Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Final, Protocol, TypeAlias, TypeVar

from starlette.websockets import WebSocket, WebSocketDisconnect

from sow_client import AsyncClient, Change, DeadlineExceeded, Record, ResyncRequired, SowError, Unavailable
from sow_client._reads import way_of
from sow_console import documents
from sow_console.pages import records
from sow_console.sessions import Session

KEYS_MAX: Final = 10_000
WAITING_BYTES_MAX: Final = 16_777_216
"""The bound of the payloads that wait."""
HEARTBEAT_SECONDS: Final = 3.0
FRAMES_APART_SECONDS: Final = 0.1
"""No eye needs more than ten frames a second, and each costs the console some time."""
RETRY_SECONDS: Final = 1.0
RETRY_SECONDS_MAX: Final = 10.0
CALM_SECONDS: Final = 60.0
"""Whole queries of a grid that are further apart have no wait between them."""
REST: Final = 9.0
"""A page rests for so many times the time that it took to make, so it takes at most a tenth of the servers' time."""
UNRANKED: Final = frozenset({"SERVER_TOO_OLD", "RESULT_TOO_LARGE"})
"""A server with these reasons keeps no list of the order."""
ENDED: Final = 4401
"""The code of a socket whose session has ended."""

Frame: TypeAlias = Mapping[str, object]
_Result = TypeVar("_Result")


class Source(Protocol):
    """Makes frames."""

    async def frame(self) -> Frame:
        """The next frame, as soon as there is something to tell, and after HEARTBEAT_SECONDS in any case."""

    async def close(self) -> None:
        """Ends its calls."""


class Newest:
    """The changes that were not sent: the newest of each key. Pure."""

    def __init__(self) -> None:
        self._waiting: dict[str, Record | str] = {}
        self._bytes = 0
        self.changes = 0
        """Changes since the last frame, those included that newer ones have replaced."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        """True if no more should be taken in before the next frame ([2])."""
        return len(self._waiting) >= KEYS_MAX or self._bytes >= WAITING_BYTES_MAX

    def take_in(self, change: Change) -> None:
        """A change of a record, or its removal."""
        self.changes += 1
        if change.op == "put" and change.record is not None:
            self._waiting[change.key] = change.record
            self._bytes += len(change.record.payload)
        elif change.op in ("oof", "delete", "expire"):
            self._waiting[change.key] = change.reason or change.op

    def frame(self) -> dict[str, object]:
        """All that waits, which waits no longer."""
        rows = [documents.row(one) for one in self._waiting.values() if isinstance(one, Record)]
        gone = [[key, one] for key, one in self._waiting.items() if isinstance(one, str)]
        made: dict[str, object] = {"rows": rows, "gone": gone, "changes": self.changes}
        self._waiting.clear()
        self.changes = self._bytes = 0
        return made


class Ranked:
    """The list of a live result that was not sent: its order, and the records that the browser has not. Pure."""

    is_full: Final = False  # the list is bounded by the server

    def __init__(self, rows: Callable[[], Sequence[Record]], rows_max: int) -> None:
        """`rows`: the newest list, with one record more than `rows_max` where there are more."""
        self._rows = rows
        self._rows_max = rows_max
        self._sent: dict[str, Record] | None = None  # by key; None: nothing
        self._differs = True
        self._changes = 0

    def __len__(self) -> int:
        return int(self._differs)

    def take_in(self, _: Change) -> None:
        """A change of the list."""
        self._changes += 1
        self._differs = True

    def frame(self) -> dict[str, object]:
        """The list as it is now, if it has changed: rows that are new or have changed, and the keys of all."""
        made: dict[str, object] = {"rows": [], "gone": [], "changes": self._changes}
        if self._differs:
            rows = self._rows()
            shown = rows[: self._rows_max]
            sent = self._sent or {}
            made["rows"] = [documents.row(one) for one in shown if sent.get(one.key) is not one]
            made["order"] = [one.key for one in shown]
            made["more"] = len(rows) > self._rows_max
            self._sent = {one.key: one for one in shown}
        self._differs, self._changes = False, 0
        return made


class Waits:
    """The seconds to wait before a thing is done once more: none at first, then more each time, up to a bound; none
    again after CALM_SECONDS without it."""

    def __init__(self, first: float, most: float, clock: Callable[[], float]) -> None:
        """`clock`: monotonic seconds."""
        self._first = first
        self._most = most
        self._clock = clock
        self._done: float | None = None
        self._wait = 0.0

    def done(self) -> None:
        """It was done now."""
        self._done = self._clock()

    def next(self) -> float:
        """The seconds to wait now."""
        if self._done is None or self._clock() - self._done >= CALM_SECONDS:
            self._wait = 0.0
            return 0.0
        wait, self._wait = self._wait, min(self._most, max(self._first, 2 * self._wait))
        return wait


class RecordFrames:
    """The frames of the grid: first the answer to the query, then its changes."""

    def __init__(
        self,
        client: AsyncClient,
        query: records.Asked,
        *,
        now_micros: Callable[[], int] = lambda: time.time_ns() // 1_000,
        heartbeat: float = HEARTBEAT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """`clock`: monotonic seconds."""
        self._client = client
        self._query = query
        self._now_micros = now_micros
        self._heartbeat = heartbeat
        self._sleep = sleep
        self._between = Waits(RETRY_SECONDS, RETRY_SECONDS_MAX, clock)
        self._newest: Newest | Ranked = Newest()
        self._unranked: SowError | None = None
        """The reason why the order is only that of the answer."""
        self._more = asyncio.Event()
        self._less = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self._wants_answer = True
        self._error: SowError | None = None
        """The reason why the grid is not live."""
        self._since_micros: int | None = None
        """Since when the server is away."""
        self._silent_micros: int | None = None
        """Since when it says nothing, though the connection is there."""
        self._as_of_micros = 0
        self._asking: asyncio.Task[Frame] | None = None

    async def frame(self) -> Frame:
        if not (self._wants_answer or self._newest):
            try:
                async with asyncio.timeout(self._heartbeat):
                    await self._more.wait()
            except TimeoutError:
                await self._check()
        self._more.clear()
        if self._wants_answer:
            if self._asking is None:
                self._asking = asyncio.create_task(self._answer(), name="answer of a grid")
            await asyncio.wait({self._asking}, timeout=self._heartbeat)
            if not self._asking.done():
                return self._state()  # the query takes its time; a browser that has left is noticed with this frame
            asking, self._asking = self._asking, None
            return asking.result()
        if self._newest:
            self._silent_micros = None
        frame = self._newest.frame()
        self._less.set()
        if self._error is None and self._since_micros is None and self._silent_micros is None:
            self._as_of_micros = self._now_micros()
        return frame | self._state()

    async def close(self) -> None:
        await _ended(self._asking)
        await _ended(self._reader)

    async def _check(self) -> None:
        """Where no change has come: whether that is because the server is stuck, which the connection tells late."""
        if self._error is not None or self._since_micros is not None:
            return
        try:
            async with asyncio.timeout(self._heartbeat):
                await self._client.describe_instance()
            self._silent_micros = None
        except (TimeoutError, Unavailable):
            self._silent_micros = self._silent_micros or self._now_micros()
        except SowError:
            self._silent_micros = None  # it has answered

    def _state(self) -> dict[str, object]:
        error = self._error
        return {
            "as_of": self._as_of_micros or None,
            "away_since": self._since_micros or self._silent_micros,
            "error": None if error is None else records.error_of(error),
            "unranked": "" if self._unranked is None else self._unranked.message,
        }

    async def _answer(self) -> Frame:
        """Asks, and follows from there on."""
        if wait := self._between.next():
            self._since_micros = self._since_micros or self._now_micros()  # nothing is followed meanwhile
            await self._sleep(wait)
        begun = self._now_micros()
        try:
            found = await records.answer(self._client, self._query, documents.row)
        except Unavailable as error:
            if self._since_micros is None:
                self._since_micros = self._now_micros()
            else:
                await self._sleep(RETRY_SECONDS)
            return self._state() | {"error": records.error_of(error)}
        except SowError as error:
            self._wants_answer, self._error = False, error
            return self._state()
        self._wants_answer, self._error, self._since_micros, self._silent_micros = False, None, None, None
        self._as_of_micros = found.header.as_of_micros
        self._between.done()
        await _ended(self._reader)
        self._newest = Newest()
        self._reader = asyncio.create_task(self._read(found.header.bookmark), name="changes of a grid")
        return self._state() | {
            "reset": True,
            "rows": found.records,
            "read": found.footer.scanned,
            "absent": found.footer.absent_fields,
            "matched": found.matched,
            "more": found.more,
            "asked_at": found.header.as_of_micros,
            # The server's clock, by which lifetimes count down. The query may have taken long since it was read.
            "clock": found.header.as_of_micros + self._now_micros() - begun,
            "plan": found.plan,
            "way": None if found.plan is None else way_of(found.plan),
        }

    async def _read(self, bookmark: str) -> None:
        try:
            if not (self._query.order and self._unranked is None and await self._read_ranked()):
                async with self._client.subscribe(
                    self._query.topic,
                    self._query.filter or None,
                    self._query.values,
                    oof=True,
                    start=bookmark,
                    on_interruption=self._interrupted,
                ) as changes:
                    await self._follow(changes)
        except (ResyncRequired, Unavailable):
            self._wants_answer = True
        except SowError as error:
            self._error = error
        self._more.set()

    async def _read_ranked(self) -> bool:
        """Follows the list of the order; False: the server has none, and nothing was followed."""
        try:
            async with self._client.live_result(
                self._query.topic,
                self._query.filter or None,
                self._query.values,
                order_by=self._query.order,
                top_n=self._query.rows + 1,
                on_interruption=self._interrupted,
            ) as result:
                self._newest = Ranked(result.list, self._query.rows)
                self._more.set()
                await self._follow(result)
        except SowError as error:
            if error.reason not in UNRANKED:
                raise
            self._unranked = error
            if isinstance(self._newest, Ranked):
                self._wants_answer = True  # changes from the answer on may be gone by now
                return True
            return False
        return True

    async def _follow(self, changes: AsyncIterable[Change]) -> None:
        newest = self._newest
        async for change in changes:
            newest.take_in(change)
            self._more.set()
            while newest.is_full:
                self._less.clear()
                await self._less.wait()

    def _interrupted(self, error: SowError | None) -> None:
        self._since_micros = None if error is None else self._now_micros()
        self._more.set()


class PageFrames:
    """The frames of a page: its content, made anew each `interval`; no content where it is the same."""

    def __init__(
        self,
        content: Callable[[], Awaitable[str]],
        interval: float,
        *,
        now_micros: Callable[[], int] = lambda: time.time_ns() // 1_000,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """`content` raises SowError. `clock`: monotonic seconds."""
        self._content = content
        self._interval = interval
        self._clock = clock
        self._sleep = sleep
        self._now_micros = now_micros
        self._as_of_micros = 0
        self._since_micros: int | None = None
        self._error: SowError | None = None
        self._left = interval
        """Seconds until the content is made anew."""
        self._sent = ""

    async def frame(self) -> Frame:
        wait = min(self._left, HEARTBEAT_SECONDS)
        await self._sleep(wait)
        self._left -= wait
        if self._left > 0:
            return self._state(None)
        html: str | None = None
        begun = self._clock()
        try:
            html = await self._content()
            self._as_of_micros, self._since_micros, self._error = self._now_micros(), None, None
        except (Unavailable, DeadlineExceeded) as error:
            self._since_micros = self._since_micros or self._now_micros()
            self._error = error
        except SowError as error:
            self._since_micros, self._error = None, error  # that is an answer
        self._left = max(self._interval, REST * (self._clock() - begun))
        if html == self._sent:
            return self._state(None)
        self._sent = html or self._sent
        return self._state(html)

    def _state(self, html: str | None) -> Frame:
        return {
            "html": html,
            "as_of": self._as_of_micros or None,
            "away_since": self._since_micros,
            "error": None if self._error is None else records.error_of(self._error),
        }

    async def close(self) -> None:
        """It has no calls of its own between two frames."""


async def serve(socket: WebSocket, session: Session, source: Source, *, still: Callable[[], bool]) -> None:
    """Carries frames to a browser until it leaves or its session ends. `still`: whether the session goes on."""
    await socket.accept()
    ended = asyncio.create_task(session.ended.wait())
    number = 0
    try:
        while still():
            frame = await _unless(ended, source.frame())
            if frame is None:
                break
            number += 1
            await socket.send_bytes(documents.encoded({"frame": number, **frame}))
            if await _unless(ended, _drawn(socket, number)) is None:
                break
            if await _unless(ended, _pause()) is None:
                break
        await socket.close(ENDED, "the session has ended")
    except WebSocketDisconnect:
        pass  # the browser has left
    finally:
        ended.cancel()
        await source.close()


async def _ended(task: asyncio.Task[_Result] | None) -> None:
    """Cancels a task and waits for its end."""
    if task is not None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _drawn(socket: WebSocket, number: int) -> bool:
    """Waits until the browser has drawn this frame; it overhears whatever else is said."""
    while (message := await socket.receive()).get("text") != str(number):
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message["code"])
    return True


async def _pause() -> bool:
    await asyncio.sleep(FRAMES_APART_SECONDS)
    return True


async def _unless(ended: asyncio.Task[bool], work: Coroutine[object, object, _Result]) -> _Result | None:
    """The result; None: the session ended first."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
