"""What a lease of a simulated holder has in place of a client and a clock: both are of the simulation."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Protocol, TypeAlias
from unittest import mock

from sow.v1 import sow_pb2
from sow_client import _writes
from sow_client._documents import Document, encode
from sow_client._records import Deleted
from sow_client.aio import _leasing
from sow_client.aio._leasing import AsyncLeasing
from sow_client.errors import NotFound, SowError, Unavailable
from tests.support.simulation.replica_world import Instance

Turn: TypeAlias = Callable[[], Coroutine[object, object, float | None]]


class Program(Protocol):
    """A holder, as its client and its clock know it. A request reaches an instance by `ask`, and is served there by
    `publish`, `touch`, `get` or `delete`."""

    @property
    def several(self) -> bool: ...

    @property
    def lease_name(self) -> str: ...

    def seconds(self) -> float: ...

    def begin_turns(self, turn: Turn, seconds: float) -> None: ...

    def end_turns(self) -> None: ...

    async def ask(self, serve: Callable[[Instance], object], at_most: float | None = None) -> object: ...

    def publish(self, at: Instance, request: sow_pb2.PublishRequest) -> sow_pb2.PublishResponse: ...

    def touch(self, at: Instance, request: sow_pb2.TouchRequest) -> sow_pb2.TouchResponse: ...

    def get(self, at: Instance, request: sow_pb2.GetRequest) -> sow_pb2.GetResponse: ...

    def delete(self, at: Instance, topic: str, keys: list[str], versions: list[int] | None) -> Deleted: ...

    def hear(self, topic: str, key: str, version: int) -> None: ...


class LeaseClient:
    """The part of a client that leases use: each call is a request of the simulation."""

    lease = AsyncLeasing.lease

    def __init__(self, holder: Program) -> None:
        self._holder = holder
        self._sequencer = _writes.Sequencer(holder.lease_name)
        self._sow = SimpleNamespace(Touch=holder.touch, Get=holder.get)

    async def _call(
        self,
        method: Callable[[Instance, object], object],
        request: sow_pb2.TouchRequest | sow_pb2.GetRequest,
        *,
        once: bool,
        at_most: float,
    ) -> object:
        answer = await self._holder.ask(lambda at: method(at, request), at_most)
        assert isinstance(answer, sow_pb2.TouchResponse | sow_pb2.GetResponse), "to one of these"
        found = answer.records if isinstance(answer, sow_pb2.GetResponse) else _accepted(answer.results)
        for one in found:
            self._holder.hear(request.topic, one.key, one.version)
        return answer

    async def _publish(self, request: sow_pb2.PublishRequest, *, at_most: float) -> sow_pb2.PublishResponse:
        """As a client does: without a condition it is made again elsewhere (rule F2)."""
        position = self._sequencer.take()
        response: sow_pb2.PublishResponse | None = None
        try:
            request.publisher.CopyFrom(position)
            try:
                answer = await self._holder.ask(lambda at: self._holder.publish(at, request), at_most)
            except Unavailable:
                if not self._goes(request):
                    raise
                answer = await self._holder.ask(lambda at: self._holder.publish(at, request), at_most)
            assert isinstance(answer, sow_pb2.PublishResponse), "to a publish"
            for result in _accepted(answer.results):
                self._holder.hear(request.topic, result.key, result.version)
            response = answer
            return response
        finally:
            self._sequencer.give_back(position, response)

    def _goes(self, request: sow_pb2.PublishRequest) -> bool:
        return self._holder.several and not request.records[0].HasField("condition")

    async def sow_delete(self, topic: str, *, keys: Iterable[str], only_if_versions: Iterable[int] | None) -> object:
        named, versions = list(keys), None if only_if_versions is None else list(only_if_versions)
        return await self._holder.ask(lambda at: self._holder.delete(at, topic, named, versions))

    async def _encoded(self, topic: str, data: Document) -> tuple[bytes, str]:
        return encode(data), ""

    async def describe_topic(self, topic: str) -> object:
        raise NotFound("it is described elsewhere", reason="TOPIC_NOT_FOUND")  # then a lease does not check it


def _accepted(results: Iterable[sow_pb2.PublishResult]) -> list[sow_pb2.PublishResult]:
    return [one for one in results if not one.HasField("refusal")]


class _Ticker:
    """`AioTicker` in the simulation's time."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._holder = _acting[-1]

    def start(self, seconds: float) -> None:
        self._holder.begin_turns(self._turn, seconds)

    async def stop(self) -> None:
        self._holder.end_turns()


_acting: list[Program] = []
"""The holder whose lease runs is the last one."""


@contextmanager
def acting(holder: Program) -> Iterator[None]:
    """The clock and the ticker of leases are those of a holder."""
    _acting.append(holder)
    try:
        yield
    finally:
        _acting.pop()


def _acting_seconds() -> float:
    return _acting[-1].seconds() if _acting else 0.0  # a call that is under way when the world ends is closed later


@contextmanager
def simulated_leases() -> Iterator[None]:
    """Leases take their time from the simulation."""
    with (
        mock.patch.object(_leasing, "lease_now", _acting_seconds),
        mock.patch.object(_leasing, "AioTicker", _Ticker),
    ):
        yield


def unreachable() -> SowError:
    """The connection broke, or was not made."""
    return Unavailable("gone", reason="UNREACHABLE")
