"""Both clients under one interface, so that a test is written once: `blocking()` shows AsyncClient as a Client.

with EventLoop() as loop:
    client = blocking(loop, loop.make(lambda: AsyncClient(address)))   # used like a Client, from any thread
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias, TypeVar, cast

import pytest

from sow_client import AsyncClient, AsyncSubscription, Client

_Value = TypeVar("_Value")

ClientKind: TypeAlias = Literal["Client", "AsyncClient"]
CLIENT_KINDS: tuple[ClientKind, ...] = ("Client", "AsyncClient")


Connect: TypeAlias = Callable[..., Client]
"""Makes a client; the arguments are those of `Client`."""


@pytest.fixture(params=CLIENT_KINDS)
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Makes clients of each kind, which are used like a `Client`. It opens no connection by itself."""
    if request.param == "Client":
        yield Client
        return
    with EventLoop() as loop:
        yield lambda *arguments, **options: blocking(loop, loop.make(lambda: AsyncClient(*arguments, **options)))


@contextmanager
def client_of(kind: ClientKind, make: Callable[[], Client], make_async: Callable[[], AsyncClient]) -> Iterator[Client]:
    """A client of one kind, which is used like a `Client`, for the fixtures of whole modules."""
    if kind == "Client":
        with make() as client:
            yield client
        return
    with EventLoop() as loop:
        aio = loop.make(make_async)
        yield blocking(loop, aio)
        loop.run(aio.close)


class EventLoop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="test-loop", daemon=True)
        self._thread.start()

    def make(self, call: Callable[[], _Value]) -> _Value:
        """Makes a call on the loop."""
        return cast(_Value, self.result_of(call))

    def run(self, call: Callable[[], Awaitable[_Value]]) -> _Value:
        """Makes a call on the loop, and awaits its result."""
        return cast(_Value, self.result_of(call))

    def result_of(self, call: Callable[[], Any]) -> Any:
        """As `run` where the result can be awaited, else as `make`."""

        async def made() -> Any:
            result = call()
            return await result if inspect.isawaitable(result) else result

        return asyncio.run_coroutine_threadsafe(made(), self._loop).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def blocking(loop: EventLoop, client: AsyncClient) -> Client:
    """The asynchronous client as a blocking one."""
    return cast(Client, _Blocking(loop, client))


class _Blocking:
    """An asynchronous object whose methods wait: results that are asynchronous themselves are shown likewise."""

    def __init__(self, loop: EventLoop, target: object) -> None:
        self._loop = loop
        self._target = target
        self._iterator: Any = None

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if name == "here":
            return _Blocking(self._loop, value)
        return _Method(self._loop, value) if inspect.ismethod(value) else value

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._iterator is None:
            target: Any = self._target
            self._iterator = aiter(target)
        try:
            return self._loop.run(lambda: anext(self._iterator))
        except StopAsyncIteration:
            raise StopIteration from None

    def __enter__(self) -> Self:
        target: Any = self._target
        self._loop.run(target.__aenter__)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        target: Any = self._target
        self._loop.run(lambda: target.__aexit__(kind, error, trace))


class _Method:
    """A method that waits for its result."""

    def __init__(self, loop: EventLoop, method: Callable[..., Any]) -> None:
        self._loop = loop
        self._method = method

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        result = self._loop.result_of(lambda: self._method(*arguments, **named))
        if isinstance(result, AsyncSubscription):
            self._loop.run(result.open)  # as the blocking client does by itself
        if isinstance(result, dict) and self._method.__name__ == "cells":
            return {cell: _Blocking(self._loop, client) for cell, client in result.items()}
        if hasattr(result, "__aiter__") or hasattr(result, "__aenter__"):
            return _Blocking(self._loop, result)
        return result
