"""The wrapper of every RPC: a call that ends in any way gives back all that it held (rules A6, A7)."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from structlog.testing import capture_logs
from structlog.typing import EventDict

from sow.v1 import sow_pb2
from sow_server.access.authorizer import Listener
from sow_server.access.caller import Call
from sow_server.access.credentials import Tokens
from sow_server.access.failed_attempts import PER_MINUTE, WAIT_SECONDS
from sow_server.engine.commit.pace import CallsUnderWay
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.services.door.capacity import InFlight
from sow_server.services.door.guard import CallAdmission, handler_of, handlers, link_handlers
from tests.support.oracles.access import grant, identity
from tests.support.oracles.access_parts import HERE, Guarded, access_of

SERVICE = sow_pb2.DESCRIPTOR.services_by_name["SowService"]
FILE = identity("desk", "desk") + grant("desk", "orders", "read publish") + "[roles.desk.limits]\nrpcs = 3\n"
REQUEST = sow_pb2.GetRequest(topic="orders", keys=["a"]).SerializeToString()


@pytest.fixture(autouse=True)
def logs() -> Iterator[list[EventDict]]:
    """The log has the faults; to print them is most of the work."""
    with capture_logs() as logs:
        yield logs


class Aborted(Exception):
    """As gRPC ends a handler that aborts."""


class FakeContext:
    """gRPC's context of a call."""

    def __init__(self, token: str, arrived: Callable[[], object]) -> None:
        """`arrived`: gives the request, when it is read."""
        self._token = token
        self._arrived = arrived
        self.reason = ""

    async def read(self) -> object:
        return self._arrived()

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return (("authorization", f"Bearer {self._token}"),) if self._token else ()

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

    def peer(self) -> str:
        return HERE

    def time_remaining(self) -> None:
        return None

    async def abort(self, code: grpc.StatusCode, message: str, trailing: tuple[tuple[str, bytes], ...]) -> None:
        found = status_pb2.Status.FromString(dict(trailing)["grpc-status-details-bin"])
        info = error_details_pb2.ErrorInfo()
        found.details[0].Unpack(info)
        self.reason = info.reason
        raise Aborted


class Rpcs:
    def __init__(self) -> None:
        self.codes: list[str] = []

    def rpc_finished(self, method: str, code: str, seconds: float) -> None:
        self.codes.append(code)


class Served:
    """One method of a service behind the guard."""

    def __init__(self, folder: Path, bytes_max: int = 10**6) -> None:
        self.guarded = Guarded(access_of(folder, FILE))
        self.rpcs = Rpcs()
        self.in_flight = InFlight(bytes_max)
        self.publishes = CallsUnderWay()
        self.waited: list[float] = []

        async def sleep(seconds: float) -> None:
            self.waited.append(seconds)

        self.admission = CallAdmission(
            Listener(self.guarded.authorizer, Tokens()),
            self.rpcs,
            self.in_flight,
            calls_max=100,
            message_bytes_max=10**6,
            publishes=self.publishes,
            sleep=sleep,
        )

    def method(self, name: str, handler: Callable[..., object], *, foreign: bool = False) -> Any:
        """The handler as gRPC gets it; it has the functions that fit its method."""
        every = {method.name: handler for method in SERVICE.methods}
        servicer = SimpleNamespace(**every)
        made = (
            link_handlers(SERVICE, servicer, self.admission, lambda context, call: context)
            if foreign
            else handlers(SERVICE, [servicer], self.admission)
        )
        found = made.service(cast(Any, SimpleNamespace(method=f"/sow.v1.SowService/{name}", invocation_metadata=())))
        assert found is not None
        return found

    def check_all_given_back(self) -> None:
        assert self.in_flight.requests.held == 0
        assert not self.publishes
        assert list(self.guarded.authorizer.sessions()) == []
        for name in self.guarded.authorizer.identities:
            usage = self.guarded.authorizer.usage_of(self.guarded.authorizer.identities[name])
            assert [usage.held(limit) for limit in ("rpcs", "bytes_in_flight")] == [0, 0]


@pytest.mark.parametrize("parts", [[], [SimpleNamespace(Get=1), SimpleNamespace(Get=2)]])
def test_a_method_that_not_exactly_one_part_has_is_refused_at_the_start(parts: list[object]) -> None:
    with pytest.raises(AssertionError, match=f"{len(parts)} parts of the service have Get"):
        handler_of(parts, "Get")
    assert handler_of([SimpleNamespace(), SimpleNamespace(Get=answers)], "Get") is answers


async def get(
    served: Served, handler: Callable[..., Awaitable[object]], token: str = "desk", data: bytes = REQUEST
) -> str:
    """Calls a method that answers once; returns the reason of its refusal."""
    method = served.method("Get", handler)
    context = FakeContext(token, lambda: method.request_deserializer(data))
    try:
        await method.stream_unary(None, context)
    except Aborted:
        return context.reason
    return ""


async def answers(request: object, call: Call) -> object:
    return sow_pb2.GetResponse()


async def fails(request: object, call: Call) -> object:
    raise RuntimeError("CANARY")


async def refuses(request: object, call: Call) -> object:
    raise StoreError(Reason.TOPIC_NOT_FOUND, "there is none")


async def aborts_by_cancelling(request: object, call: Call) -> object:
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("handler", "token", "data", "reason"),
    [
        (answers, "desk", REQUEST, ""),
        (fails, "desk", REQUEST, "INTERNAL"),
        (refuses, "desk", REQUEST, "TOPIC_NOT_FOUND"),
        (answers, "", REQUEST, "UNAUTHENTICATED"),
        (answers, "guess", REQUEST, "UNAUTHENTICATED"),
        (answers, "desk", b"\xff\xff", "INVALID_ARGUMENT"),
        (answers, "guess", b"\xff\xff", "UNAUTHENTICATED"),
    ],
)
def test_a_call_that_answers_once_gives_all_back(
    tmp_path: Path, handler: Callable[..., Awaitable[object]], token: str, data: bytes, reason: str
) -> None:
    served = Served(tmp_path)
    for _ in range(5):  # more than `rpcs` allows at a time
        assert asyncio.run(get(served, handler, token, data)) == reason
        served.check_all_given_back()
    assert len(served.rpcs.codes) == 5


@pytest.mark.parametrize(("name", "counted"), [("Publish", True), ("Touch", True), ("Get", False)])
def test_a_call_that_publishes_is_counted_from_its_admission_to_its_answer(
    tmp_path: Path, name: str, counted: bool
) -> None:
    """L14: the sweep gives way to it, also while its request is on its way."""
    served = Served(tmp_path)
    seen: list[bool] = []

    async def handler(request: object, call: Call) -> object:
        seen.append(bool(served.publishes))
        raise StoreError(Reason.TOPIC_NOT_FOUND, "there is none")

    def arrived() -> object:
        seen.append(bool(served.publishes))
        return method.request_deserializer(b"")

    method = served.method(name, handler)
    for token in ("desk", "guess"):
        with pytest.raises(Aborted):
            asyncio.run(method.stream_unary(None, FakeContext(token, arrived)))
        assert not served.publishes
    assert seen == [counted, counted]


def test_a_call_that_is_cancelled_gives_all_back(tmp_path: Path) -> None:
    served = Served(tmp_path)
    for _ in range(5):
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(get(served, aborts_by_cancelling))
        served.check_all_given_back()
    assert served.rpcs.codes == ["CANCELLED"] * 5


def test_calls_beyond_the_limit_are_refused_and_hold_nothing(tmp_path: Path) -> None:
    served = Served(tmp_path)

    async def main() -> None:
        go = asyncio.Event()

        async def waits(request: object, call: Call) -> object:
            await go.wait()
            return sow_pb2.GetResponse()

        running = [asyncio.create_task(get(served, waits)) for _ in range(3)]
        await asyncio.sleep(0)
        assert await get(served, answers) == "LIMIT_EXCEEDED"
        go.set()
        assert await asyncio.gather(*running) == [""] * 3

    asyncio.run(main())
    served.check_all_given_back()


def test_a_request_without_room_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    served = Served(tmp_path, bytes_max=10)
    assert served.in_flight.requests.take("another", 5)
    assert asyncio.run(get(served, answers)) == "OVERLOADED"
    assert served.in_flight.requests.held == 5


# --- streams ---------------------------------------------------------------------------------------------------------


async def subscribe(
    served: Served,
    handler: Callable[..., AsyncIterator[object]],
    token: str = "desk",
    *,
    meanwhile: Callable[[int], None] = lambda count: None,
    stop_after: int = 100,
) -> tuple[str, int]:
    """Calls a method that answers with a stream; returns the reason of its end, and the number of answers."""
    method = served.method("Subscribe", handler)
    context = FakeContext(token, lambda: method.request_deserializer(b""))
    count = 0

    async def write(answer: object) -> None:
        nonlocal count
        count += 1
        meanwhile(count)
        if count == stop_after:
            calling.cancel()  # the caller has gone
        await asyncio.sleep(0)

    context.write = write  # type: ignore[attr-defined]  # as gRPC's context has it
    calling = asyncio.ensure_future(method.stream_stream(None, context))
    try:
        await calling
    except Aborted:
        return context.reason, count
    except asyncio.CancelledError:
        return "", count
    return "", count


async def forever(request: object, call: Call) -> AsyncIterator[object]:
    while True:
        yield b""
        await asyncio.sleep(0)


async def two(request: object, call: Call) -> AsyncIterator[object]:
    yield b""
    yield b""


async def fails_later(request: object, call: Call) -> AsyncIterator[object]:
    yield b""
    raise RuntimeError("CANARY")


async def refuses_at_once(request: object, call: Call) -> AsyncIterator[object]:
    raise StoreError(Reason.TOPIC_NOT_FOUND, "there is none")
    yield b""  # type: ignore[unreachable]  # it makes a generator


@pytest.mark.parametrize(
    ("handler", "token", "stop_after", "end"),
    [
        (two, "desk", 100, ("", 2)),
        (forever, "desk", 3, ("", 3)),
        (fails_later, "desk", 100, ("INTERNAL", 1)),
        (refuses_at_once, "desk", 100, ("TOPIC_NOT_FOUND", 0)),
        (two, "guess", 100, ("UNAUTHENTICATED", 0)),
    ],
)
def test_a_stream_gives_all_back(
    tmp_path: Path, handler: Callable[..., AsyncIterator[object]], token: str, stop_after: int, end: tuple[str, int]
) -> None:
    served = Served(tmp_path)
    for _ in range(5):
        assert asyncio.run(subscribe(served, handler, token, stop_after=stop_after)) == end
        served.check_all_given_back()


def test_a_stream_ends_with_the_reason_when_its_grants_change(tmp_path: Path) -> None:
    served = Served(tmp_path)

    def change(count: int) -> None:
        if count == 2:
            assert served.guarded.authorizer.replace(access_of(tmp_path, FILE.replace("read", "consume"))) == 1

    reason, count = asyncio.run(subscribe(served, forever, meanwhile=change))
    assert reason == "ACCESS_CHANGED"
    assert count <= 3
    served.check_all_given_back()


def test_a_stream_goes_on_when_the_grants_of_others_change(tmp_path: Path) -> None:
    served = Served(tmp_path)

    def change(count: int) -> None:
        if count == 2:
            more = identity("other", "other") + grant("other", "x", "read")
            assert served.guarded.authorizer.replace(access_of(tmp_path, "# new\n" + FILE + more)) == 0

    assert asyncio.run(subscribe(served, forever, meanwhile=change, stop_after=10)) == ("", 10)
    served.check_all_given_back()


def test_the_handler_of_a_stream_is_closed_when_its_caller_has_gone(tmp_path: Path) -> None:
    served = Served(tmp_path)
    closed: list[bool] = []

    async def noting(request: object, call: Call) -> AsyncIterator[object]:
        try:
            with call.holding("subscriptions"):
                while True:
                    yield b""
        finally:
            closed.append(True)

    asyncio.run(subscribe(served, noting, stop_after=2))
    assert closed == [True]
    usage = served.guarded.authorizer.usage_of(served.guarded.authorizer.identities["desk"])
    assert usage.held("subscriptions") == 0


# --- what a refusal keeps ---------------------------------------------------------------------------------------------


class Large:
    """Stands for what a handler has made of a large request."""


@pytest.mark.parametrize("kind", ["once", "stream", "foreign"])
def test_the_frames_of_a_refused_call_are_gone_while_its_caller_takes_the_status(tmp_path: Path, kind: str) -> None:
    """A caller may take its status late. Until then, nothing keeps its request."""
    served = Served(tmp_path)
    kept: list[weakref.ref[Large]] = []
    alive: list[bool] = []

    def refuse() -> None:
        large = Large()
        kept.append(weakref.ref(large))
        raise StoreError(Reason.TOPIC_NOT_FOUND, "there is none")

    async def once(request: object, call: object) -> object:
        refuse()
        return sow_pb2.GetResponse()

    async def stream(request: object, call: object) -> AsyncIterator[object]:
        refuse()
        yield b""

    class Late(FakeContext):
        async def abort(self, code: grpc.StatusCode, message: str, trailing: tuple[tuple[str, bytes], ...]) -> None:
            alive.append(kept[0]() is not None)
            await super().abort(code, message, trailing)

    async def call() -> None:
        name, handler = ("Subscribe", stream) if kind == "stream" else ("Get", once)
        method = served.method(name, handler, foreign=kind == "foreign")
        context = Late("desk", lambda: method.request_deserializer(b"" if kind == "stream" else REQUEST))
        with pytest.raises(Aborted):
            await (method.stream_stream or method.stream_unary)(None, context)

    asyncio.run(call())
    assert alive == [False]


# --- handlers of gRPC's own services ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token", "data", "fault", "reason"),
    [
        ("desk", REQUEST, None, ""),
        ("guess", REQUEST, None, "UNAUTHENTICATED"),
        ("desk", b"\xff\xff", None, "INVALID_ARGUMENT"),
        ("desk", REQUEST, RuntimeError("CANARY"), "INTERNAL"),
    ],
)
def test_a_foreign_call_gives_all_back(
    tmp_path: Path, token: str, data: bytes, fault: Exception | None, reason: str
) -> None:
    served = Served(tmp_path)

    async def handler(request: object, context: object) -> object:
        if fault is not None:
            raise fault
        return sow_pb2.GetResponse()

    async def main() -> str:
        method = served.method("Get", handler, foreign=True)
        context = FakeContext(token, lambda: method.request_deserializer(data))
        try:
            await method.stream_unary(None, context)
        except Aborted:
            return context.reason
        return ""

    for _ in range(5):
        assert asyncio.run(main()) == reason
        served.check_all_given_back()


# --- many failed attempts --------------------------------------------------------------------------------------------


def test_failed_attempts_of_every_kind_of_call_wait(tmp_path: Path) -> None:
    served = Served(tmp_path)
    for _ in range(PER_MINUTE + 1):
        served.guarded.authorizer.failures.failed(HERE)

    async def foreign(request: object, context: object) -> object:
        raise AssertionError("it is not admitted")

    def unread() -> object:
        raise AssertionError("the request of a caller that is not admitted is not read")

    async def call_foreign() -> None:
        method = served.method("Get", foreign, foreign=True)
        with pytest.raises(Aborted):
            await method.stream_unary(None, FakeContext("guess", unread))

    for act, waits in (
        (lambda: get(served, answers, "guess"), 1),
        (lambda: subscribe(served, two, "guess"), 1),
        (call_foreign, 1),
        (lambda: get(served, answers, "desk"), 0),
        (lambda: subscribe(served, two, "desk"), 0),
    ):
        served.waited.clear()
        asyncio.run(act())
        assert served.waited == [WAIT_SECONDS] * waits
        served.check_all_given_back()
