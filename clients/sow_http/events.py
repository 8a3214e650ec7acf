"""Changes of a topic as server-sent events. Listeners who ask for the same share one subscription and its bytes.

[1]  A subscription is shared only between requests with the same token: each sees what its own token may see.
[2]  The id of an event is the bookmark after it: a client that shows it again misses nothing, and has nothing twice.
     Events inside an atomic request have no id; the last one has it.
[3]  A listener that does not read delays nobody: it holds at most `WAITING_BYTES_MAX`, then a sentence ends it.
[4]  The pause between two pieces grows with the number of listeners, so that their cost has a bound.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from itertools import islice
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
WAITING_BYTES_MAX: Final = 4 * 1024 * 1024
KEPT_BYTES_MAX: Final = 1024 * 1024
"""Bytes of the newest events, which a subscription keeps for listeners that come back."""
HEARTBEAT_SECONDS: Final = 10.0
RETRY_MILLISECONDS: Final = 2_000
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
_Asked: TypeAlias = tuple[str | None, str, str | None, str | None, tuple[str, ...]]
"""The token, the topic, the filter, its parameters, and the fields: all that makes one subscription another."""


class Listener:
    """Owns the bytes that wait for one client."""

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._more = asyncio.Event()
        self._ended = False

    def give(self, piece: bytes) -> bool:
        """Takes a piece; False: the listener has fallen too far behind, and is ended ([3])."""
        if self._bytes + len(piece) > WAITING_BYTES_MAX and self._waiting:
            self._waiting.clear()
            behind = f"more than {WAITING_BYTES_MAX} bytes wait for this client; connect again to go on"
            self.end(problem(ResourceExhausted(behind, reason="LISTENER_BEHIND")))
            return False
        self._waiting.append(piece)
        self._bytes += len(piece)
        self._more.set()
        return True

    def end(self, last: bytes = b"") -> None:
        """Ends the stream behind what waits."""
        self._waiting.append(last)
        self._ended = True
        self._more.set()

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """The bytes for the client; all that wait in one piece."""
        while True:
            await self._more.wait()
            self._more.clear()
            piece = b"".join(self._waiting) if len(self._waiting) != 1 else self._waiting[0]
            self._waiting.clear()
            self._bytes = 0
            if piece:
                yield piece
            if self._ended and not self._waiting:
                return


@dataclass(slots=True, eq=False)
class _Followed:
    """One subscription, its newest events, and its listeners."""

    subscription: AsyncSubscription
    position: str
    """The bookmark behind the newest piece; "": inside the snapshot or before it."""
    listeners: set[Listener] = field(default_factory=set)
    kept: deque[tuple[str, bytes]] = field(default_factory=deque)
    """The newest pieces, each with the bookmark before it."""
    kept_bytes: int = 0

    def since(self, bookmark: str | None) -> bytes | None:
        """The events behind a bookmark, None: those from now on. Returns None where they are not kept."""
        if bookmark is None or bookmark == self.position:
            return b"" if self.position else None
        for number, (before, _) in enumerate(reversed(self.kept), 1):
            if before == bookmark:
                return b"".join(piece for _, piece in islice(self.kept, len(self.kept) - number, None))
        return None

    def tell(self, before: str, piece: bytes) -> None:
        self.kept.append((before, piece))
        self.kept_bytes += len(piece)
        while self.kept_bytes > KEPT_BYTES_MAX:
            self.kept_bytes -= len(self.kept.popleft()[1])
        self.spread(piece)

    def spread(self, piece: bytes) -> None:
        for listener in [one for one in self.listeners if not one.give(piece)]:
            self.listeners.discard(listener)


class Events:
    """Owns the subscriptions."""

    def __init__(
        self, callers: Callers, *, listeners_max: int = LISTENERS_MAX, heartbeat_seconds: float = HEARTBEAT_SECONDS
    ) -> None:
        self._callers = callers
        self._listeners_max = listeners_max
        self._heartbeat = heartbeat_seconds
        self._listeners: set[Listener] = set()
        self._followed: dict[_Asked, list[_Followed]] = {}
        self._opening: dict[_Asked, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def changes(self, request: Request, token: str | None) -> Response:
        """The stream of events that a request asks for."""
        arguments = Arguments(request, EVENTS)
        asked = (
            token,
            request.path_params["topic"],
            arguments.text("filter"),
            arguments.text("params"),
            tuple(arguments.texts("select") or ()),
        )
        after = request.headers.get("last-event-id") or arguments.text("after")
        if len(self._listeners) >= self._listeners_max:
            raise Refused(503, f"{self._listeners_max} streams are open already; try again", reason="OVERLOADED")
        listener = Listener()
        self._listeners.add(listener)
        try:
            snapshot = arguments.flag("snapshot")
            followed = await self._join(asked, arguments, after, listener, snapshot=snapshot)
        except BaseException:
            self._listeners.discard(listener)
            raise

        async def sent() -> AsyncGenerator[bytes, None]:
            try:
                async for piece in listener.pieces():
                    yield piece
            finally:
                self._listeners.discard(listener)
                followed.listeners.discard(listener)
                if not followed.listeners:
                    await followed.subscription.close()

        return StreamingResponse(sent(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    async def _join(
        self, asked: _Asked, arguments: Arguments, after: str | None, listener: Listener, *, snapshot: bool
    ) -> _Followed:
        # One at a time for those that ask for the same: the second one finds what the first one has opened.
        lock = self._opening.setdefault(asked, asyncio.Lock())
        try:
            async with lock:
                for followed in self._followed.get(asked, ()):
                    missed = followed.since(after)
                    if missed is not None and followed.listeners and (after is not None or not snapshot):
                        return _joined(followed, listener, missed)
                return await self._open(asked, arguments, after, listener, snapshot=snapshot)
        finally:
            if not lock.locked():
                self._opening.pop(asked, None)

    async def _open(
        self, asked: _Asked, arguments: Arguments, after: str | None, listener: Listener, *, snapshot: bool
    ) -> _Followed:
        token, topic, filter_text, _, select = asked
        parameters = arguments.parameters()
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(self._callers.client(token))

            def made(*, sow: bool) -> AsyncSubscription:
                follow: Callable[..., AsyncSubscription] = client.sow_and_subscribe if sow else client.subscribe
                start = {} if sow else {"start": after}
                return follow(
                    topic,
                    filter_text,
                    parameters,
                    oof=True,
                    select=select or None,
                    retry_for=INTERRUPTION_SECONDS_MAX,
                    **start,
                )

            subscription, missed = made(sow=snapshot and after is None), b""
            try:
                await subscription.open()
            except ResyncRequired:
                await subscription.close()
                if not snapshot:
                    raise
                # All records come anew, so what the client has is void.
                subscription, missed = made(sow=True), b"event: resync\ndata: {}\n\n"
                await subscription.open()
            stack.push_async_callback(subscription.close)
            followed = _Followed(subscription, subscription.bookmark or "")
            self._followed.setdefault(asked, []).append(followed)
            _joined(followed, listener, missed)
            task = asyncio.create_task(self._follow(asked, followed, stack.pop_all()), name=f"events of {topic}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return followed

    async def _follow(self, asked: _Asked, followed: _Followed, stack: AsyncExitStack) -> None:
        """Tells the events of a subscription to its listeners, until the last one has gone."""
        last = b""
        try:
            async with stack:
                async for changes in followed.subscription.batches(timeout=self._heartbeat):
                    if not changes:
                        followed.position = followed.subscription.bookmark or followed.position
                        followed.spread(_mark(followed.position))
                        continue
                    before = followed.position
                    piece = b"".join(map(event, changes))
                    # Inside a snapshot and an atomic request there is no bookmark, so nobody can join there.
                    followed.position = changes[-1].bookmark or ""
                    followed.tell(before, piece)
                    await asyncio.sleep(min(PAUSE_SECONDS_MAX, len(followed.listeners) * PAUSE_SECONDS_PER_LISTENER))
        except SowError as error:
            last = problem(error)
        finally:
            self._followed[asked].remove(followed)
            if not self._followed[asked]:
                del self._followed[asked]
            for listener in followed.listeners:
                listener.end(last)

    async def close(self) -> None:
        """Ends all streams, so that their clients connect again elsewhere or later."""
        for followed in [one for several in self._followed.values() for one in several]:
            await followed.subscription.close()
        if self._tasks:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.gather(*self._tasks, return_exceptions=True), 1)


def _joined(followed: _Followed, listener: Listener, missed: bytes) -> _Followed:
    # An event of only an id is not dispatched, and yet a browser shows it when it connects again.
    listener.give(b"retry: %d\n" % RETRY_MILLISECONDS + _mark(followed.position if not missed else "") + missed)
    followed.listeners.add(listener)
    return followed


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
