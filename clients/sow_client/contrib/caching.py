"""Answers of functions, kept on the server for all programs: `@cached("5m")`, for functions and for those of asyncio.

[1]  Of all callers of all programs one calls the function: the holder of a lease on the answer's lock. The others wait
     for the answer. If the holder dies, the lease ends, and another caller takes over.
[2]  An answer is stored in the commit that removes its lock. So a caller that has lost its lease, or whose answer was
     invalidated while it was made, stores nothing.
[3]  The server alone decides how long an answer lives. An error is never stored.
"""

from __future__ import annotations

import ast
import asyncio
import hashlib
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from functools import wraps
from typing import Any, Final, Literal, ParamSpec, Protocol, TypeVar, cast

from sow_client import AsyncClient, AsyncLease, Client, ConditionFailed, Lease, NotFound, SowError, errors
from sow_client._documents import decode, encode
from sow_client._records import Ttl, ttl_micros
from sow_client.contrib._clients import client_of, finished, settled

P = ParamSpec("P")
T_co = TypeVar("T_co", covariant=True)

KEY_CHARACTERS_MAX: Final = 250  # in UTF-8 a key has 1,024 bytes at most (rule K8)
AWAY_SECONDS: Final = 1.0  # in which a store that has failed is not asked again
LOOK_SECONDS_MIN, LOOK_SECONDS_MAX, LOOK_PART = 0.005, 0.25, 0.1  # of the time that a caller has waited so far
_LOCK: Final = "lock "  # before the key of the answer
_AWAY: Final = (errors.Unavailable, errors.DeadlineExceeded, errors.ResourceExhausted, errors.LeaseLost)


class Cached(Protocol[P, T_co]):
    """A function whose answers are kept. `invalidate` takes back the answer for these arguments, and one that is being
    made; await it if the function is one of asyncio."""

    def __call__(self, *args: P.args, **named: P.kwargs) -> T_co: ...
    def invalidate(self, *args: P.args, **named: P.kwargs) -> Any: ...


@dataclass
class cached:  # noqa: N801 - it is used as a decorator
    """Keeps the answers of a function for `ttl`. All callers get them as JSON has them: a tuple becomes a list.

    `server`: an address as for `Client`, or a client, which for a function of asyncio is an AsyncClient. `key` makes
    the key of the arguments; else it is the function's name with its arguments. A caller that has died gives way after
    the time `lease`. If the store is away or full, the function is called, or with `when_away="raise"` that is raised.
    """

    ttl: Ttl
    _: KW_ONLY
    server: str | Client | AsyncClient | None = None
    topic: str = "cache"
    key: Callable[..., str] | None = None
    lease: Ttl = "10s"
    when_away: Literal["call", "raise"] = "call"
    _away_until = 0.0

    def __post_init__(self) -> None:
        if callable(self.ttl):
            raise TypeError('@cached: give the lifetime of the answers, as @cached("2m")')
        ttl_micros(self.ttl, "ttl")
        if self.when_away not in ("call", "raise"):
            raise ValueError(f'when_away: {self.when_away!r} is neither "call" nor "raise"')

    def __call__(self, function: Callable[P, T_co]) -> Cached[P, T_co]:
        @wraps(function)
        def call(*args: P.args, **named: P.kwargs) -> Any:
            return finished(self._answer(function, args, named))

        @wraps(function)
        async def awaited(*args: P.args, **named: P.kwargs) -> Any:
            return await self._answer(function, args, named)

        async def take_back(*args: P.args, **named: P.kwargs) -> None:
            key, client = self._key(function, args, named), client_of(self.server, for_asyncio=made is awaited)
            with suppress(NotFound):
                await settled(client.sow_delete(self.topic, keys=[_LOCK + key, key]))  # the lock first ([2])

        made: Any = awaited if inspect.iscoroutinefunction(function) else call
        made.invalidate = take_back if made is awaited else lambda *args, **named: finished(take_back(*args, **named))
        return cast(Cached[P, T_co], made)

    def _key(self, function: Callable[..., object], args: tuple[object, ...], named: dict[str, object]) -> str:
        if self.key is not None:
            return self.key(*args, **named)
        given = inspect.signature(function).bind(*args, **named)
        given.apply_defaults()
        called = f"{function.__module__}.{function.__qualname__}"
        written = []
        for name, value in given.arguments.items():
            if (literal := _literal(value)) is None:
                raise TypeError(f"@cached: {name} of {called} is no literal; make a key of it: @cached(…, key=…)")
            written.append(f"{name}={literal}")
        text = f"{called}({', '.join(written)})"
        return text if len(text) <= KEY_CHARACTERS_MAX else f"{text[:150]}…{hashlib.sha256(text.encode()).hexdigest()}"

    async def _answer(self, function: Callable[..., Any], args: tuple[object, ...], named: dict[str, object]) -> Any:
        client = client_of(self.server, for_asyncio=inspect.iscoroutinefunction(function))
        key, lease = self._key(function, args, named), None
        try:
            if time.monotonic() >= self._away_until:
                with self._heeding():
                    lease = client.lease(self.lease)
                    if (found := await self._found(client, lease, key)) is not None:
                        return found["value"]
            made = function(*args, **named)
            answer: Any = decode(encode({"value": await made if isinstance(client, AsyncClient) else made}))
            if lease is not None:
                with self._heeding():
                    await settled(lease._end_with(self.topic, [(key, answer, self.ttl)], "buffered"))  # [2]
            return answer["value"]
        finally:
            if lease is not None:
                with suppress(SowError):  # the lock ends by itself
                    await settled(lease.close())

    async def _found(self, client: Client | AsyncClient, lease: Lease | AsyncLease, key: str) -> dict[str, Any] | None:
        """The stored answer. None: there is none, and the lease has its lock ([1])."""
        began, locked = time.monotonic(), False
        while True:
            try:
                record = await settled(client.get(self.topic, key))
            except NotFound:
                await settled(client.create_topic(self.topic, exist_ok=True, expiration="enabled"))
                continue
            if record is not None and isinstance(record.data, dict) and "value" in record.data:
                return record.data
            if locked:
                return None
            try:
                lock = lease.publish(self.topic, {}, key=_LOCK + key, only_if_absent=True, durability="buffered")
                await settled(lock)
                locked = True  # and look again: an answer may have come before the lock
            except ConditionFailed:
                seconds = min(LOOK_SECONDS_MIN + (time.monotonic() - began) * LOOK_PART, LOOK_SECONDS_MAX)
                await settled((time.sleep if isinstance(client, Client) else asyncio.sleep)(seconds))

    @contextmanager
    def _heeding(self) -> Iterator[None]:
        try:
            yield
        except _AWAY:
            if self.when_away == "raise":
                raise
            self._away_until = time.monotonic() + AWAY_SECONDS


def _literal(value: object) -> str | None:
    """A literal as every process writes it, with the members of a dict in one order; None: the value is none. A set has
    another order in each process."""
    if isinstance(value, dict | list | tuple) and type(value) in (dict, list, tuple):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        inside = [(_literal(name), _literal(one)) for name, one in pairs]
        if any(None in pair for pair in inside):
            return None
        if isinstance(value, dict):
            return f"{{{', '.join(sorted(f'{name}: {one}' for name, one in inside))}}}"
        joined = ", ".join(str(one) for _, one in inside)
        return f"[{joined}]" if isinstance(value, list) else f"({joined},)"
    with suppress(ValueError, SyntaxError):
        if not isinstance(value, set) and ast.literal_eval(repr(value)) == value:
            return repr(value)
    return None
