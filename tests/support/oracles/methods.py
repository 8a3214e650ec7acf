"""All methods that a server serves, from the descriptors, and raw calls of them: bytes out, a status and messages back.

found = attempt(channel, METHODS["sow.v1.SowService.Get"], [request], token="root")
assert found.reason == "TOPIC_NOT_FOUND"

[1]  A service that is added to the contract is among them.
"""

from __future__ import annotations

import importlib
import pkgutil
import threading
from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

import sow.v1

_MODULES: Final = [importlib.import_module(f"sow.v1.{module.name}") for module in pkgutil.iter_modules(sow.v1.__path__)]
SERVICES: Final[tuple[ServiceDescriptor, ...]] = tuple(
    service
    for module in (*_MODULES, health_pb2, reflection_pb2)
    if not module.__name__.endswith("_grpc")
    for service in module.DESCRIPTOR.services_by_name.values()
)
METHODS: Final = MappingProxyType({method.full_name: method for service in SERVICES for method in service.methods})
"""By full name such as `sow.v1.SowService.Get`."""
ENDLESS: Final = frozenset({"Subscribe", "Watch", "DescribeInstance", "WatchFigures", "WatchLog", "Replicate"})
"""Streams that go on once they stand."""
CALL_SECONDS: Final = 30.0


def path_of(method: MethodDescriptor) -> str:
    """The path of a method on the wire."""
    return f"/{method.containing_service.full_name}/{method.name}"


class Ended(NamedTuple):
    """The end of a call."""

    code: grpc.StatusCode
    reason: str
    """Of the ErrorInfo; "": it has none."""
    text: str
    answers: list[Message]


class OpenCall(Protocol):
    """A call under way: an iterator of its answers."""

    def __iter__(self) -> Iterator[Any]: ...
    def __next__(self) -> Any: ...
    def cancel(self) -> bool: ...
    def is_active(self) -> bool: ...
    def initial_metadata(self) -> Sequence[tuple[str, str | bytes]] | None: ...
    def code(self) -> grpc.StatusCode: ...
    def details(self) -> str | None: ...
    def trailing_metadata(self) -> Sequence[tuple[str, str | bytes]] | None: ...


def attempt(
    channel: grpc.Channel,
    method: MethodDescriptor,
    requests: Sequence[bytes],
    *,
    token: str = "",
    timeout: float = CALL_SECONDS,
) -> Ended:
    """Calls a method, and awaits its end; of an endless one the first answer."""
    done = threading.Event()
    answers: list[Message] = []

    def sent() -> Iterator[bytes]:
        yield from requests
        if method.name in ENDLESS:
            done.wait(CALL_SECONDS)  # a link whose sender has no more to say ends

    call = opened(channel, method, sent(), token=token, timeout=timeout)
    try:
        for answer in call:
            answers.append(answer)
            if method.name in ENDLESS:
                return Ended(grpc.StatusCode.OK, "", "", answers)
    except grpc.RpcError:
        return Ended(call.code(), reason_of_call(call), call.details() or "", answers)
    finally:
        done.set()
        call.cancel()
    return Ended(grpc.StatusCode.OK, "", "", answers)


def opened(
    channel: grpc.Channel,
    method: MethodDescriptor,
    requests: Iterator[bytes],
    *,
    token: str = "",
    timeout: float = CALL_SECONDS,
) -> OpenCall:
    """An open call of a method. gRPC ends it once nobody refers to it."""
    kind = GetMessageClass(method.output_type)
    read: Callable[[bytes], Message] = kind.FromString
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    # gRPC does not ask how many messages a side sends: a single one is a stream of one.
    call: OpenCall
    if method.client_streaming:
        call = channel.stream_stream(path_of(method), _same, read)(requests, timeout=timeout, metadata=metadata)
    else:
        call = channel.unary_stream(path_of(method), _same, read)(next(requests), timeout=timeout, metadata=metadata)
    return call


def _same(written: bytes) -> bytes:
    return written


def reason_of_call(call: OpenCall) -> str:
    """The reason in the ErrorInfo of the status of a call that has ended; "": it has none."""
    return str(_info_of_call(call).reason)


def details_of_call(call: OpenCall) -> dict[str, str]:
    """The details in that ErrorInfo."""
    return dict(_info_of_call(call).metadata)


def _info_of_call(call: OpenCall) -> error_details_pb2.ErrorInfo:
    info = error_details_pb2.ErrorInfo()
    for name, value in call.trailing_metadata() or ():
        if name == "grpc-status-details-bin" and isinstance(value, bytes):
            for detail in status_pb2.Status.FromString(value).details:
                if detail.Unpack(info):
                    return info
    return error_details_pb2.ErrorInfo()
