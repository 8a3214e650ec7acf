"""Clients that the parts of a program share, and one source for functions of both kinds."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Coroutine
from typing import Any, Final, TypeVar, cast

from sow_client import AsyncClient, Client

T = TypeVar("T")

_lock: Final = threading.Lock()
_blocking: Final[dict[str | None, Client]] = {}
_of_loop: Final[dict[asyncio.AbstractEventLoop, dict[str | None, AsyncClient]]] = {}


def blocking_client(server: str | None) -> Client:
    """The program's client of an address."""
    with _lock:
        if server not in _blocking:
            _blocking[server] = Client(server)
        return _blocking[server]


def client_of(server: str | Client | AsyncClient | None, *, for_asyncio: bool) -> Client | AsyncClient:
    """The client that was given, or that of the program or of the running event loop for an address."""
    if isinstance(server, Client | AsyncClient):
        if isinstance(server, AsyncClient) is not for_asyncio:
            raise TypeError(f"server: this function needs {'an AsyncClient' if for_asyncio else 'a Client'}")
        return server
    if not for_asyncio:
        return blocking_client(server)
    with _lock:  # loops of other threads
        for loop in [loop for loop in _of_loop if loop.is_closed()]:
            del _of_loop[loop]  # its clients can be used no more, and hold it
        clients = _of_loop.setdefault(asyncio.get_running_loop(), {})
        if server not in clients:
            clients[server] = AsyncClient(server)
        return clients[server]


async def settled(value: T | Awaitable[T]) -> T:
    """The result of a call of either client. With a blocking one it waits for no event loop, see `finished`."""
    return await value if isinstance(value, Awaitable) else value


def finished(steps: Coroutine[Any, Any, T]) -> T:
    """The result of steps that wait for no event loop."""
    try:
        steps.send(None)
    except StopIteration as end:
        return cast(T, end.value)
    raise AssertionError("a blocking client returns results")
