"""Requests as they arrive: parsed if there is room for their bytes, and counted as long as their call holds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias

import grpc
from google.protobuf.message import DecodeError, Message

from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.turns import CALLER
from sow_server.services.door.capacity import InFlight, SharedRoom, no_room, unread

Context = grpc.aio.ServicerContext[Any, Any]

STANDARD_BYTES_MAX: Final = 4096
"""Bytes of a request of health and reflection."""
LARGE_BYTES: Final = 64 * 2**10
"""Bytes of a message from which on it counts for its connection."""


class Unreadable:
    """Stands for a request whose bytes are no message of its method."""


UNREADABLE: Final = Unreadable()
_NO_ROOM: Final = Unreadable()
"""Stands for a request that was not parsed, because there is no room for its bytes."""
_TOO_LARGE: Final = Unreadable()


class Received(NamedTuple):
    """A request as it arrived: parsed, and its size on the wire. It is counted until `Held.release`."""

    request: object
    size: int


Reader: TypeAlias = Callable[[bytes], Received]


def reader(kind: type[Message], requests: SharedRoom, bytes_max: int) -> Reader:
    """Parses requests, if there is room for them: their bytes are counted before."""
    parse = kind.FromString

    def read(data: bytes) -> Received:
        size = len(data)
        if size > bytes_max:
            return Received(_TOO_LARGE, 0)
        if not requests.take(CALLER.get(), size):
            return Received(_NO_ROOM, 0)
        try:
            return Received(parse(data), size)
        except DecodeError:
            return Received(UNREADABLE, size)

    return read


def link_reader(kind: type[Message], requests: SharedRoom) -> Reader:
    """Parses requests of peers. They are counted, and there is always room: a peer has its own bounds, and would come
    again."""
    parse = kind.FromString

    def read(data: bytes) -> Received:
        requests.add(CALLER.get(), len(data))
        try:
            return Received(parse(data), len(data))
        except DecodeError:
            return Received(UNREADABLE, len(data))

    return read


def standard_reader(kind: type[Message]) -> Reader:
    """Parses requests that have nothing but a name. Callers without a credential send them, too."""
    parse = kind.FromString

    def read(data: bytes) -> Received:
        if len(data) > STANDARD_BYTES_MAX:
            return Received(_TOO_LARGE, 0)
        try:
            return Received(parse(data), 0)
        except DecodeError:
            return Received(UNREADABLE, 0)

    return read


class Held:
    """The memory that one call holds. Small messages are not worth counting for each connection."""

    __slots__ = ("_arrived", "_caller", "_connection", "_in_flight", "_kept")

    def __init__(self, in_flight: InFlight, connection: str, caller: str) -> None:
        self._in_flight = in_flight
        self._connection = connection
        self._caller = caller
        self._arrived = self._kept = 0

    def take(self, received: Received) -> object:
        """A request that a reader has counted. Raises StoreError if it is `Unreadable`, or if there is no room."""
        size = self._arrived = received.size
        if size > LARGE_BYTES:
            if not self._in_flight.kept.take(self._connection, self._caller, size):
                raise no_room()
            self._kept = size
        request = received.request
        if isinstance(request, Unreadable):
            readable(request)
        return request

    def answered(self) -> None:
        """The call has an answer. Its request counts for its connection alone, if it is large: it may be kept."""
        if self._arrived:
            arrived, self._arrived = self._arrived, 0
            self._in_flight.requests.free(self._caller, arrived)

    def release(self) -> None:
        """The request is no longer held."""
        self.answered()
        if self._kept:
            kept, self._kept = self._kept, 0
            self._in_flight.kept.free(self._connection, self._caller, kept)

    def sending(self, answer: bytes, context: Context) -> None:
        """Holds the only answer of a call until the client has taken it. Raises StoreError."""
        size = len(answer)
        if size <= LARGE_BYTES:
            return
        kept, connection, caller = self._in_flight.kept, self._connection, self._caller
        if not kept.take(connection, caller, size):
            raise unread()
        context.add_done_callback(lambda _: kept.free(connection, caller, size))  # type: ignore[arg-type]  # a protocol in the stubs that no function fits


def unreadable() -> StoreError:
    """The error of a request that is `Unreadable`."""
    return StoreError(
        Reason.INVALID_ARGUMENT,
        "request: these bytes are no request of this method, or a text among them is not UTF-8",
        field="request",
    )


def readable(request: object) -> None:
    """Raises StoreError if a request is `Unreadable`."""
    if request is UNREADABLE:
        raise unreadable()
    if request is _NO_ROOM:
        raise no_room()
    if request is _TOO_LARGE:
        raise StoreError(
            Reason.REQUEST_TOO_LARGE, "request: it is larger than requests of this method may be", field="request"
        )
