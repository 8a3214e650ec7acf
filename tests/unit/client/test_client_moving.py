"""A client's way to its server, without a connection: what each answer of an address makes of it, in both clients."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import grpc
import grpc.aio
import pytest

from sow.v1 import admin_pb2
from sow_client import Cancelled, DeadlineExceeded, FailedPrecondition, PermissionDenied, SowError, Unavailable
from sow_client import _transport as parts
from sow_client._addresses import Address
from sow_client._contract import Needed
from sow_client._lines import Home, Line
from sow_client.aio import _moving as aio_moving
from sow_client.blocking import _moving as moving
from tests.support.fakes.fake_channels import DESCRIBE, HEALTH, AioFakeChannel, Ended, FakeChannel

SOME_FIELD: Final = Needed("some_field", 1)
DEADLINE: Final = grpc.StatusCode.DEADLINE_EXCEEDED
UNKNOWN_METHOD: Final = Ended(grpc.StatusCode.UNIMPLEMENTED)
QUERY: Final = "/sow.v1.SowService/Query"


class Way:
    """Makes transports of one kind, whose channels the test answers. Watches are made, and do not run."""

    def __init__(self, kind: str, patch: pytest.MonkeyPatch) -> None:
        self.is_async = kind == "AsyncClient"
        self.module: Any = aio_moving if self.is_async else moving
        self.closed_channel: BaseException = grpc.aio.UsageError("closed") if self.is_async else ValueError("closed")
        self.opened: list[tuple[str, Any]] = []
        """The channels that were opened, with their addresses."""
        self.looked_up: list[tuple[str, ...]] = []
        self.found: dict[str, list[str]] = {}
        """The addresses of names."""
        self.after_looking_up: Callable[[], Any] = lambda: None
        self.watches: list[Any] = []
        self._runner = asyncio.Runner()
        patch.setattr(self.module, "aio_open_channel" if self.is_async else "open_channel", self._open)
        patch.setattr(parts, "resolved", self._resolved)
        patch.setattr(parts, "aio_resolved", self._aio_resolved)
        patch.setattr(parts.AioWatch if self.is_async else parts.Watch, "start", lambda *of: self.watches.append(of))
        patch.setattr(self.module, "AioConnection" if self.is_async else "Connection", Connected)
        self._first: dict[str, Any] = {}

    def close(self) -> None:
        self._runner.close()

    def at(self, target: str) -> Any:
        """The channel that will be opened to an address next, to give it answers before."""
        return self._first.setdefault(target, AioFakeChannel() if self.is_async else FakeChannel())

    def run(self, call: Callable[[], Any]) -> Any:
        """Makes a call, and waits for its result."""

        async def made() -> Any:
            result = call()
            return await result if inspect.isawaitable(result) else result

        return self._runner.run(made()) if self.is_async else call()

    def make(self, server: str = "a:1,b:1", channel: Any = None) -> Any:
        kind = self.module.AsyncTransport if self.is_async else self.module.Transport
        return self.run(lambda: kind(server, None, 5.0, channel, patient=False))

    def ready(self) -> Any:
        """A transport that uses the instance a."""
        made = self.make()
        self.at("a:1").describes()
        self.run(made.await_ready)
        return made

    def own(self) -> tuple[Any, Any]:
        """A transport with a channel of the program's, and that channel."""
        channel = AioFakeChannel() if self.is_async else FakeChannel()
        return self.make("a:1", channel), channel

    def _open(self, target: str, *_: Any) -> Any:
        channel = self.at(target)
        del self._first[target]
        self.opened.append((target, channel))
        return channel

    def _resolved(self, names: tuple[str, ...], _seconds: float) -> dict[str, Sequence[str]]:
        self.looked_up.append(tuple(names))
        self.after_looking_up()
        return {name: self.found.get(name, ()) for name in names}

    async def _aio_resolved(self, names: tuple[str, ...], seconds: float) -> dict[str, Sequence[str]]:
        return self._resolved(names, seconds)


class Connected:
    """In place of a connection: it is ready."""

    def __init__(self, _channel: Any, server: str, *_: Any, **__: Any) -> None:
        self.server = server

    def await_ready(self, _seconds: float | None, *, looks: bool) -> Any:
        class Ready:
            def __await__(self) -> Iterator[None]:
                return iter(())

        return Ready()

    def follow(self) -> int:
        return 1

    def close(self) -> None: ...


@pytest.fixture(params=["Client", "AsyncClient"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Way]:
    made = Way(request.param, monkeypatch)
    yield made
    made.close()


def error_of(way: Way, call: Callable[[], Any]) -> SowError:
    with pytest.raises(SowError) as caught:
        way.run(call)
    return caught.value


# ---- a forked child ----


@pytest.mark.parametrize("server", ["a:1,b:1", "a:1"], ids=["of several", "of one"])
def test_a_child_opens_channels_of_its_own_with_its_first_call(way: Way, server: str) -> None:
    made = way.make(server)
    for _ in range(2):
        way.at("a:1").describes()
        way.run(made.await_ready)
        way.run(made._forked)
    parents = way.opened[0][1]
    assert [target for target, _ in way.opened] == ["a:1", "a:1"]
    assert parents.closes == 0, "it is the parent's"
    way.at("a:1").describes()
    line = way.run(made.await_ready)
    way.run(made._begin_anew)  # as another thread would, which has come at the same time
    assert line.channel is way.opened[2][1]
    assert len(way.opened) == 3


def test_a_child_cannot_use_a_channel_of_the_program(way: Way) -> None:
    made, _ = way.own()
    way.run(made._forked)
    assert error_of(way, made.await_ready).reason == "FORKED"


def test_a_client_that_was_closed_before_the_fork_is_closed_in_the_child(way: Way) -> None:
    made = way.ready()
    way.run(made.close)
    way.run(made._forked)
    assert made.is_closed
    assert error_of(way, made.await_ready).reason == "CLOSED"


# ---- one address ----


def test_a_name_with_one_address_is_used_as_a_single_address(way: Way) -> None:
    way.found = {"sow.example:1": ["192.0.2.1"]}
    made = way.make("sow.example:1")
    for _ in range(2):
        line = way.run(made.await_ready)
        assert line is made.lines.single
    assert made._connection.server == "sow.example:1"
    assert way.looked_up == [("sow.example:1",)], "once"
    assert made.moves_max == 0


def test_a_client_that_is_closed_while_its_name_is_looked_up_waits_for_nothing(way: Way) -> None:
    way.found = {"sow.example:1": ["192.0.2.1"]}
    made = way.make("sow.example:1")
    way.after_looking_up = made._closing.set  # the first thing of `close`, in another thread
    assert error_of(way, made.await_ready).reason == "CLOSED"


def test_a_client_with_one_address_has_nowhere_to_go_back_to(way: Way) -> None:
    made, _ = way.own()
    assert way.run(made.go_back) is None
    assert made.moves_max == 0


# ---- what an address answers ----


def answer(way: Way, *answers: Any, health: Any = None) -> Any:
    """What a question for the instance at an address makes of these answers."""
    made, channel = way.own()
    channel.will(DESCRIBE, *answers)
    if health is not None:
        channel.will(HEALTH, health)
    return way.run(lambda: made.ask(made.lines.single, 1.0))


def test_an_answer_without_an_instance_is_none_of_a_sow_server(way: Way) -> None:
    found = answer(way, [])
    assert isinstance(found, FailedPrecondition)
    assert found.reason == "NO_SOW_SERVER"
    assert "a:1 is no sow server" in found.message


def test_an_instance_that_does_not_describe_itself_is_asked_for_its_health(way: Way) -> None:
    assert answer(way, UNKNOWN_METHOD, health=[parts.SERVING]).serving
    assert not answer(way, UNKNOWN_METHOD, health=[b"\x08\x02"]).serving
    assert answer(way, UNKNOWN_METHOD, health=UNKNOWN_METHOD).reason == "NO_SOW_SERVER"


def test_a_question_over_a_closed_channel_is_answered_by_the_end_of_the_client(way: Way) -> None:
    for found in (answer(way, way.closed_channel), answer(way, UNKNOWN_METHOD, health=way.closed_channel)):
        assert isinstance(found, Cancelled)
        assert found.reason == "CLOSED"


def test_the_refusal_of_an_identity_is_the_error_of_its_calls(way: Way) -> None:
    made, channel = way.own()
    channel.will(DESCRIBE, Ended(grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED"))
    assert isinstance(error_of(way, lambda: made.await_ready(needs=SOME_FIELD)), PermissionDenied)


@pytest.mark.parametrize(
    ("health", "kind"),
    [
        (Ended(DEADLINE), DeadlineExceeded),
        (Ended(grpc.StatusCode.UNIMPLEMENTED), Unavailable),
        ([b""], Unavailable),
        (None, Unavailable),
    ],
    ids=["crowded", "it answers", "healthy", "closed"],
)
def test_silence_on_a_connection_whose_places_streams_have_taken_says_so(
    way: Way, health: Any, kind: type[SowError]
) -> None:
    """N4: a call that waits for a place looks like one that the server works on."""
    made, channel = way.own()
    channel.will(QUERY, [b""])
    held = way.run(lambda: made.lines.single.calls.unary_stream(QUERY)(None))
    channel.will(DESCRIBE, Ended(DEADLINE))
    channel.will(HEALTH, way.closed_channel if health is None else health)
    error = error_of(way, lambda: made.await_ready(needs=SOME_FIELD))
    assert isinstance(error, kind)
    assert ("1 stream" in error.message) == (kind is DeadlineExceeded)
    held.cancel()


# ---- searching ----


def test_tasks_that_look_for_an_instance_at_once_share_one_search(way: Way) -> None:
    made = way.make()
    way.at("a:1").describes()

    async def both() -> list[Any]:
        return list(await asyncio.gather(made.await_ready(), made.await_ready()))

    lines = way.run(both if way.is_async else lambda: [made.await_ready(), made.await_ready()])
    assert lines[0] is lines[1]
    assert len(way.opened[0][1].calls) == 1


def test_closing_a_client_ends_its_search_after_the_answer_under_way(way: Way) -> None:
    made = way.make()
    way.at("a:1").will(DESCRIBE, made._closing.set)
    assert error_of(way, made.await_ready).reason == "CLOSED"
    assert [target for target, _ in way.opened] == ["a:1"], "b was not asked any more"


def test_what_keeps_to_a_lost_instance_names_it(way: Way) -> None:
    made = way.ready()
    home = Home("the export", made.lines.line(Address("b:1")))
    way.opened[1][1].will(DESCRIBE, *[Ended(grpc.StatusCode.UNAVAILABLE)] * 2)
    error = error_of(way, lambda: made.await_ready(0.01, home))
    assert error.reason == "UNREACHABLE"
    assert "the export keeps to b:1, where it began" in error.message


# ---- following ----


class Ending:
    """A call that can be cancelled."""

    def __init__(self) -> None:
        self.ends = 0

    def cancel(self) -> None:
        self.ends += 1


def test_a_subscription_that_began_on_a_line_that_was_left_is_ended(way: Way) -> None:
    made = way.ready()
    here, elsewhere = Ending(), Ending()
    made.follows(made.lines.current, here)
    made.follows(made.lines.line(Address("b:1")), elsewhere)
    assert (here.ends, elsewhere.ends) == (0, 1)


def test_an_instance_is_watched_once_and_an_older_one_never(way: Way) -> None:
    made = way.ready()
    assert len(way.watches) == 1
    way.opened[0][1].describes()
    made.lines.doubt("UNREACHABLE")
    way.run(made.await_ready)
    assert len(way.watches) == 1, "it is the same instance"
    older = way.make("c:1,d:1")
    way.at("c:1").will(DESCRIBE, UNKNOWN_METHOD)
    way.opened.clear()
    older.lines.line(Address("c:1")).channel.will(HEALTH, [parts.SERVING])
    way.run(older.await_ready)
    assert len(way.watches) == 1, "it could not tell when it stops"


def watched(way: Way, made: Any, *, before: Callable[[Any], object] = lambda watch: None) -> Any:
    """Watches the instance in use until the watch ends, and returns its line."""
    line: Line[Any] = made.lines.current
    watch: Any = line.watch
    before(watch)
    way.run(lambda: way.module._keep_watch(line, watch, made.lines, made._closing))
    return line


SERVES: Final = admin_pb2.DescribeInstanceResponse(serving=True)
STOPS: Final = admin_pb2.DescribeInstanceResponse(serving=False)


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ([[SERVES, STOPS]], "NOT_SERVING"),
        ([[SERVES]], "STOPPING"),
        ([Ended(grpc.StatusCode.UNAVAILABLE)], "UNREACHABLE"),
        ([Ended(grpc.StatusCode.UNAVAILABLE, "STOPPING")], "STOPPING"),
        ([Ended(grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_CALLS"), [SERVES, STOPS]], "NOT_SERVING"),
        ([UNKNOWN_METHOD, [SERVES]], "STOPPING"),
    ],
    ids=["says so", "ends", "lost", "refuses", "was refused", "was unknown"],
)
def test_a_watch_ends_with_its_instance_and_ends_what_follows_it(
    way: Way, monkeypatch: pytest.MonkeyPatch, answers: list[Any], reason: str
) -> None:
    monkeypatch.setattr(parts, "LOOK_AGAIN_SECONDS", 0.0)
    made, subscription = way.ready(), Ending()
    made.follows(made.lines.current, subscription)
    way.opened[0][1].will(DESCRIBE, *answers)
    line = watched(way, made)
    assert (made.lines.current, made.lines.lost, subscription.ends) == (None, reason, 1)
    assert line.watch is None


@pytest.mark.parametrize("moment", ["before its call", "in its call", "before it runs"])
def test_a_watch_that_is_over_leaves_the_line_in_use(way: Way, moment: str) -> None:
    made = way.ready()
    line, channel = made.lines.current, way.opened[0][1]

    def leave(*_: Any) -> None:
        line.watch = None

    channel.will(DESCRIBE, leave if moment == "in its call" else [SERVES])
    before: dict[str, Callable[[Any], object]] = {
        "before its call": lambda watch: watch.cancel(),
        "before it runs": leave,
    }
    watched(way, made, before=before.get(moment, bool))
    assert made.lines.current is line


def test_a_watch_of_a_closed_client_ends_quietly(way: Way) -> None:
    made = way.ready()
    way.opened[0][1].will(DESCRIBE, way.closed_channel)
    watched(way, made)
    assert made.lines.current is not None
