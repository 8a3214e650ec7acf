"""Channels without a connection, for both kinds of transports: each call takes the next answer of its method."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Self, TypeAlias

import grpc
import grpc.aio
from google.rpc import error_details_pb2, status_pb2

from sow.contract import CONTRACT
from sow.v1 import admin_pb2

DESCRIBE: Final = "/sow.v1.AdminService/DescribeInstance"
HEALTH: Final = "/grpc.health.v1.Health/Check"


class Ended(grpc.RpcError):
    """The status with which a call ends. `reason`: that of a sow server; empty: gRPC's own status."""

    def __init__(
        self, code: grpc.StatusCode, reason: str = "", text: str = "no", told: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(text)
        self._code, self._reason, self._text, self._told = code, reason, text, told or {}

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._text

    def trailing_metadata(self) -> Any:
        if not self._reason:
            return ()
        status = status_pb2.Status(code=self._code.value[0], message=self._text)
        status.details.add().Pack(error_details_pb2.ErrorInfo(reason=self._reason, domain="sow", metadata=self._told))
        return (("grpc-status-details-bin", status.SerializeToString()),)


Answer: TypeAlias = Iterable[Any] | BaseException | Callable[[], Any]
"""Responses, an error, or what the test does in the call before there are none."""


class Call:
    """A call of either kind."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._responses = iter(()) if isinstance(answer, BaseException) or callable(answer) else iter(answer)
        self.cancelled = False

    def _next(self) -> Any:
        if callable(self._answer):
            self._answer()
        if isinstance(self._answer, BaseException):
            raise self._answer
        response = next(self._responses)
        if isinstance(response, BaseException):
            raise response
        return response

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return self._next()

    async def read(self) -> Any:
        await asyncio.sleep(0)  # other tasks run
        try:
            return self._next()
        except StopIteration:
            return grpc.aio.EOF

    def cancel(self) -> bool:
        self.cancelled = True
        return True

    def done(self) -> bool:
        return self.cancelled


@grpc.Channel.register
class FakeChannel:
    """The channel to one address, of a blocking client. It is a blocking one to `isinstance`."""

    def __init__(self) -> None:
        self.answers: defaultdict[str, deque[Answer]] = defaultdict(deque)
        self.calls: list[Call] = []
        self.closes = 0

    def will(self, path: str, *answers: Answer) -> None:
        """The answers of the next calls of a method."""
        self.answers[path] += answers

    def describes(self, **fields: Any) -> None:
        """The next question is answered by an instance."""
        known: dict[str, Any] = {"name": "a", "id": "1", "serving": True, "contract": CONTRACT}
        self.will(DESCRIBE, [admin_pb2.DescribeInstanceResponse(**(known | fields))])

    def unary_unary(self, path: str, *_: Any, **__: Any) -> Any:
        return lambda _request, timeout=None: next(self._call(path))

    def unary_stream(self, path: str, *_: Any, **__: Any) -> Any:
        return lambda _request, timeout=None: self._call(path)

    def stream_stream(self, path: str, *_: Any, **__: Any) -> Any:
        return lambda _requests, timeout=None: self._call(path)

    def _call(self, path: str) -> Call:
        answer = self.answers[path].popleft()
        if isinstance(answer, ValueError | grpc.aio.UsageError):  # a closed channel
            raise answer
        self.calls.append(Call(answer))
        return self.calls[-1]

    def close(self) -> None:
        self.closes += 1


class AioFakeChannel:
    """The same of an asynchronous client."""

    def __init__(self) -> None:
        self._channel = FakeChannel()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def unary_unary(self, path: str, *_: Any, **__: Any) -> Any:
        async def call(_request: Any, **_: Any) -> Any:
            return next(self._channel._call(path))

        return call

    async def close(self) -> None:
        self._channel.close()
