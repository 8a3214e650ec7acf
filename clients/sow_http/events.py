"""Changes of a topic as server-sent events. Listeners who ask for the same share one subscription and its bytes.

[1]  A subscription is shared only between requests with the same token: each sees what its own token may see.
[2]  The id of an event is the bookmark after it: a client that shows it again misses nothing, and has nothing twice.
     Events inside an atomic request have no id; the last one has it.
[3]  An event is encoded once, into the log of its subscription, and a listener is a place in there. One whose place is
     not kept any more is ended with a sentence. So a listener that does not read delays nobody, and holds one piece.
[4]  A subscription waits for the fastest of its listeners: one that is alone gets a snapshot of any size at its pace.
[5]  The pause between two pieces grows with the number of listeners, so that their cost has a bound.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from sow_client import Change, ResourceExhausted, ResyncRequired, SowError
from sow_client._aio_subscription import AsyncSubscription
from sow_http import problems
from sow_http.arguments import Arguments
from sow_http.callers import Callers
from sow_http.problems import Refused
from sow_http.records import shown

LISTENERS_MAX: Final = 2_000
LOG_BYTES_MAX: Final = 1024 * 1024
"""The newest events of a subscription, also for listeners that come back; an event that is larger is kept whole."""
PIECE_BYTES: Final = 128 * 1024
"""A listener gets so much at once, and its last event whole."""
HEARTBEAT_SECONDS: Final = 10.0
RETRY: Final = b"retry: 2000\n"
"""Milliseconds after which a browser connects again."""
PAUSE_SECONDS_PER_LISTENER: Final = 0.000_1
PAUSE_SECONDS_MAX: Final = 0.1
INTERRUPTION_SECONDS_MAX: Final = 60.0
"""The longest time without the server; then the streams end, and their clients connect again."""
EVENTS: Final = {
    "filter": "a condition, such as /price > 10",
    "params": 'a JSON object: the values of the names in the filter, {"x": 1} for :x',
    "select": "fields to send, as paths with commas",
    "snapshot": "true: first the present records, each as sow, then snapshot_end",
    "after": "a bookmark, as the header Last-Event-ID has it: go on behind it",
}
_Asked: TypeAlias = tuple[str | None, str, str | None, str | None, tuple[str, ...], bool]
"""The token, the topic, the filter, its parameters, the fields, and the wish for a snapshot: all that makes one
subscription another."""


@dataclass(slots=True, eq=False)
class Listener:
    """The place in the log of what a client gets next."""

    at: int = 0


class Followed:
    """Owns the log of one subscription, and the places of its listeners."""

    def __init__(self, subscription: AsyncSubscription, after: str | None, missed: bytes = b"") -> None:
        self.subscription = subscription
        self.position = subscription.bookmark or ""
        """The bookmark behind the log; "": inside the snapshot or an atomic request, where nobody can join."""
        self.ended: bytes | None = None
        """The last bytes of each stream; None: it goes on."""
        self._listeners: set[Listener] = set()
        self._log = bytearray(b"\n" + _mark(after or "") + _mark(self.position))
        self._first = 0  # the place of the first byte of the log
        self._cut: tuple[int, int, bytes] = (0, 0, b"")  # the newest piece, and the places that it lies between
        self._fastest = len(self._log)
        self._log += missed
        self._more, self._room = asyncio.Event(), asyncio.Event()
        self._waking: asyncio.TimerHandle | None = None
        self._woken = 0.0

    @property
    def end(self) -> int:
        return self._first + len(self._log)

    def place(self, bookmark: str | None) -> int | None:
        """The place behind a bookmark, None: of what comes from now on. Returns None where the log has it not."""
        if bookmark is None:
            return self.end if self.position and not self.subscription.behind else None
        at = self._log.rfind(b"\nid: %s\n" % bookmark.encode())
        return None if at < 0 else self._first + self._log.index(b"\n\n", at) + 2

    def join(self, at: int | None = None) -> Listener:
        """A listener from a place on; None: that where the log began."""
        listener = Listener(self._fastest if at is None else at)
        self._listeners.add(listener)
        self._fastest = max(self._fastest, listener.at)
        return listener

    def leave(self, listener: Listener) -> bool:
        """True: it was the last one."""
        self._listeners.discard(listener)
        self._fastest = max((one.at for one in self._listeners), default=self.end)
        self._room.set()
        return not self._listeners

    async def tell(self, piece: bytes, position: str) -> None:
        """Adds whole events, once there is room ([4])."""
        while self.end - self._fastest > LOG_BYTES_MAX // 2:
            self._room.clear()
            await self._room.wait()
        self._log += piece
        self.position = position
        if (over := len(self._log) - max(LOG_BYTES_MAX, len(piece))) > 0:
            del self._log[:over]
            self._first += over
        if self._waking is None:
            pause = min(PAUSE_SECONDS_MAX, len(self._listeners) * PAUSE_SECONDS_PER_LISTENER)
            self._waking = asyncio.get_running_loop().call_at(self._woken + pause, self._wake)

    def _wake(self) -> None:
        self._waking, self._woken = None, asyncio.get_running_loop().time()
        self._more.set()
        self._more.clear()

    def finish(self, last: bytes) -> None:
        """Ends the streams behind what is in the log."""
        self.ended = last
        self._wake()

    async def pieces(self, listener: Listener, head: bytes = b"") -> AsyncGenerator[bytes, None]:
        """The bytes for one client. Each piece ends with a whole event."""
        if head:
            yield head
        while True:
            while listener.at < self.end:
                if listener.at < self._first:
                    behind = f"{LOG_BYTES_MAX} bytes of newer events have been sent to others; connect again to go on"
                    yield problem(ResourceExhausted(behind, reason="LISTENER_BEHIND"))
                    return
                piece = self._piece(listener.at)
                listener.at += len(piece)
                if listener.at > self._fastest:
                    self._fastest = listener.at
                    self._room.set()
                yield piece
            if self.ended is not None:
                yield self.ended
                return
            await self._more.wait()

    def _piece(self, at: int) -> bytes:
        if self._cut[:2] != (at, self.end):  # listeners at the same place share it
            start = at - self._first
            stop = start + PIECE_BYTES
            if stop < len(self._log):
                last = self._log.rfind(b"\n\n", start, stop)
                stop = (self._log.index(b"\n\n", stop - 1) if last < 0 else last) + 2
            self._cut = at, self.end, bytes(self._log[start:stop])
        return self._cut[2]


class Events:
    """Owns the subscriptions."""

    def __init__(self, callers: Callers, *, listeners_max: int = LISTENERS_MAX) -> None:
        self.callers = callers
        self._listeners_max = listeners_max
        self._streams = 0
        self._followed: dict[_Asked, dict[Followed, asyncio.Task[None]]] = {}
        self._opening: dict[_Asked, asyncio.Lock] = {}

    @asynccontextmanager
    async def changes(self, request: Request, token: str | None) -> AsyncIterator[Response]:
        """The stream of events that a request asks for; the stream ends with the block."""
        arguments = Arguments(request, EVENTS)
        asked = (
            token,
            request.path_params["topic"],
            arguments.text("filter"),
            arguments.text("params"),
            tuple(arguments.texts("select") or ()),
            arguments.one_of("snapshot", ("true", "false"), "false") == "true",
        )
        after = request.headers.get("last-event-id") or arguments.text("after")
        if self._streams >= self._listeners_max:
            raise Refused(503, f"{self._listeners_max} streams are open already; try again", reason="OVERLOADED")
        self._streams += 1
        try:
            followed, listener = await self._join(asked, arguments, after)
            # An event of only an id is not dispatched, and yet a browser shows it when it connects again.
            head = RETRY + _mark(followed.position if after is None else "")

            through = {"X-Accel-Buffering": "no"}  # nginx would hold events back
            try:
                yield StreamingResponse(followed.pieces(listener, head), 200, through, "text/event-stream")
            finally:
                # Nobody joins what ends: it leaves the list now, and not once its task has ended.
                if followed.leave(listener) and (task := self._followed.get(asked, {}).pop(followed, None)):
                    task.cancel()
        finally:
            self._streams -= 1

    async def _join(self, asked: _Asked, arguments: Arguments, after: str | None) -> tuple[Followed, Listener]:
        # One at a time for those that ask for the same: the second one finds what the first one has opened.
        lock = self._opening.setdefault(asked, asyncio.Lock())
        try:
            async with lock:
                if after is not None or not asked[-1]:
                    for followed in self._followed.get(asked, ()):
                        if (at := followed.place(after)) is not None:
                            return followed, followed.join(at)
                followed = await self._open(asked, arguments, after)
                return followed, followed.join()
        finally:
            if not lock.locked():
                self._opening.pop(asked, None)

    async def _open(self, asked: _Asked, arguments: Arguments, after: str | None) -> Followed:
        token, topic, filter_text, _, select, snapshot = asked
        parameters = arguments.parameters()
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(self.callers.client(token))

            async def opened(*, sow: bool) -> AsyncSubscription:
                follow: Callable[..., AsyncSubscription] = client.sow_and_subscribe if sow else client.subscribe
                start = {} if sow else {"start": after}
                made = follow(
                    topic,
                    filter_text,
                    parameters,
                    oof=True,
                    select=select or None,
                    retry_for=INTERRUPTION_SECONDS_MAX,
                    **start,
                )
                stack.push_async_callback(made.close)
                await made.open()
                return made

            try:
                followed = Followed(await opened(sow=snapshot and after is None), after)
            except ResyncRequired:
                if not snapshot:
                    raise
                # All records come anew, so what the client has is void.
                followed = Followed(await opened(sow=True), None, b"event: resync\ndata: {}\n\n")
            following = self._follow(asked, followed, stack.pop_all())
            task = asyncio.create_task(following, name=f"events of {topic}")
            self._followed.setdefault(asked, {})[followed] = task
            return followed

    async def _follow(self, asked: _Asked, followed: Followed, stack: AsyncExitStack) -> None:
        """Tells the events of a subscription to its listeners, until it is cancelled, as the last one has gone."""
        last = b""
        try:
            async with stack:
                async for changes in followed.subscription.batches(timeout=HEARTBEAT_SECONDS):
                    if changes:
                        await followed.tell(b"".join(map(event, changes)), changes[-1].bookmark or "")
                    else:
                        position = followed.subscription.bookmark or followed.position
                        await followed.tell(_mark(position), position)
        except SowError as error:
            last = problem(error)
        finally:
            self._followed.get(asked, {}).pop(followed, None)
            if not self._followed.get(asked):
                self._followed.pop(asked, None)
            followed.finish(last)

    async def close(self) -> None:
        """Ends all streams, so that their clients connect again elsewhere or later."""
        tasks = [task for several in self._followed.values() for task in several.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _mark(bookmark: str) -> bytes:
    return f"id: {bookmark}\n: \n\n".encode() if bookmark else b": \n\n"


def event(change: Change) -> bytes:
    """A change as an event: its op, its bookmark as the id ([2]), and one line of JSON."""
    record = change.record or change.previous
    data = b"{}" if record is None else shown(record)
    if change.reason is not None:
        more = msgspec.json.encode({"reason": change.reason})
        data = more if data == b"{}" else more[:-1] + b"," + data[1:]
    mark = f"id: {change.bookmark}\n".encode() if change.bookmark else b""
    return b"event: %s\n%sdata: %s\n\n" % (change.op.encode(), mark, data)


def problem(error: SowError) -> bytes:
    """The event that ends a stream with a sentence."""
    return b"event: problem\ndata: %s\n\n" % msgspec.json.encode(problems.document(error))
