"""The work of `sow bench` where a server refuses, does nothing, or is late: on fakes, and nothing waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from sow_cli import workload
from sow_cli.bench_plan import Plan, Work
from sow_cli.server_usage import NoMeter, Usage
from sow_cli.workload import BenchFailed, Workload, _Done, _Followers, _Used
from sow_client import DeadlineExceeded, NotFound, PermissionDenied, Refusal, SowError, Unavailable
from tests.support.fakes.fake_client import FakeClient

GONE = Unavailable("gone", reason="UNREACHABLE")
DENIED = PermissionDenied("no", reason="PERMISSION_DENIED")


class Server(FakeClient):
    """A client whose calls fail as the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.fails: dict[str, SowError] = {}
        self.creates_first = False
        """A topic is created although the call of it fails."""

    def _or_fail(self, what: str) -> None:
        if what in self.fails:
            raise self.fails[what]

    def describe_topic(self, name: str) -> Any:
        self._or_fail("describe")
        return super().describe_topic(name)

    def create_topic(self, name: str, **settings: object) -> Any:
        if self.creates_first:
            super().create_topic(name, **settings)
        self._or_fail("create")
        return super().create_topic(name, **settings)

    def delete_topic(self, name: str, *, force: bool = False, here: bool = False) -> int:
        self._or_fail("delete")
        return super().delete_topic(name, force=force, here=here)

    def status(self) -> Any:
        self._or_fail("status")
        return super().status()


class Metered:
    """A meter that reads these figures, and then nothing."""

    def __init__(self, *seconds: float | None) -> None:
        self._left = list(seconds)

    def read(self) -> Usage | None:
        seconds = self._left.pop(0) if self._left else None
        return None if seconds is None else Usage(seconds, 1)


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def left() -> list[tuple[str, SowError]]:
    """The topics that could not be deleted, and why."""
    return []


@pytest.fixture
def work(server: Server, left: list[tuple[str, SowError]], runner: asyncio.Runner) -> Callable[..., Workload]:
    def made(*, meter: Any = None, follower: Any = None, **plan: Any) -> Workload:
        planned = Plan("bench", **({"records": 20, "payload_bytes": 100, "seconds": 0.0} | plan))
        return Workload(
            server,  # type: ignore[arg-type]  # a fake
            follower,
            planned,
            meter or NoMeter(),
            lambda name, error: left.append((name, error)),
            runner,
        )

    return made


# ---- topics ----


def test_topics_are_created_and_deleted_however_the_block_is_left(
    server: Server, work: Callable[..., Workload], left: list[Any]
) -> None:
    seen: list[str] = []

    def interrupted() -> None:
        with work(topics=2):
            seen.extend(topic.name for topic in server.topics())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert seen == ["bench-1", "bench-2"]
    assert (server.topics(), left) == ([], [])


def test_a_topic_that_is_there_stays_as_it_is(server: Server, work: Callable[..., Workload]) -> None:
    server.add("bench-2", records=[{"id": 1}])
    with pytest.raises(SowError), work(topics=2):
        pass
    assert [topic.name for topic in server.topics()] == ["bench-2"]


@pytest.mark.parametrize("error", [GONE, DeadlineExceeded("late", reason="DEADLINE_EXCEEDED")])
@pytest.mark.parametrize("created", [True, False])
def test_a_topic_whose_creation_had_no_answer_is_deleted_if_it_is_there_and_empty(
    server: Server, work: Callable[..., Workload], left: list[Any], error: SowError, created: bool
) -> None:
    server.fails["create"], server.creates_first = error, created
    with pytest.raises(type(error)), work():
        pass
    assert (server.topics(), left) == ([], [])


def test_a_topic_that_somebody_filled_meanwhile_is_left_alone(server: Server, work: Callable[..., Workload]) -> None:
    made = work()
    made._doubtful.append("bench-1")
    server.add("bench-1", records=[{"id": 1}])
    made._delete()
    assert [topic.name for topic in server.topics()] == ["bench-1"]


def test_topics_that_cannot_be_deleted_are_told(server: Server, work: Callable[..., Workload], left: list[Any]) -> None:
    with work():
        server.fails["delete"] = GONE
    assert left == [("bench-1", GONE)]
    doubtful = work()
    doubtful._doubtful.append("bench-1")
    server.fails["describe"] = GONE
    doubtful._delete()
    assert left == [("bench-1", GONE)] * 2


def test_who_may_not_see_topics_may_still_create_one(server: Server, work: Callable[..., Workload]) -> None:
    server.fails["describe"] = DENIED
    made = work()
    assert not made._is_missing("bench-1")
    with made:
        assert made._created == ["bench-1"]
    server.fails["describe"] = GONE
    with pytest.raises(Unavailable):
        made._is_missing("bench-1")


# ---- figures ----


def did(operations: int) -> _Done:
    return _Done(operations, [0.5, 0.25], _Used(2.0))


@pytest.mark.parametrize("kind", ["get", "publish"])
def test_the_disk_is_told_to_whom_may_see_it(
    server: Server, work: Callable[..., Workload], monkeypatch: pytest.MonkeyPatch, kind: Work
) -> None:
    made = work()
    monkeypatch.setattr(made, f"_{kind}", lambda: did(4))
    measured = made.run(kind)
    assert (measured.operations, measured.per_second, measured.latencies) == (4, 2.0, [0.25, 0.5])
    assert measured.disk_bytes is not None
    server.fails["status"] = DENIED
    assert made.run(kind).disk_bytes is None
    server.fails["status"] = GONE
    with pytest.raises(Unavailable):
        made.run(kind)


def test_work_of_which_nothing_was_done_has_no_figures(
    work: Callable[..., Workload], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = work()
    monkeypatch.setattr(made, "_get", lambda: did(0))
    with pytest.raises(BenchFailed, match="get: nothing was done within 0 s"):
        made.run("get")


@pytest.mark.parametrize(
    ("readings", "cpu"),
    [
        ([1.0, 5.0, 8.0, 8.0, 8.0], 7.0),  # it compacts for a while, and then twice it does nothing
        ([1.0, 5.0, None], 0.5),
        ([None], 0.5),
    ],
)
def test_publishing_counts_what_the_server_does_behind_it(
    work: Callable[..., Workload], monkeypatch: pytest.MonkeyPatch, readings: Sequence[float | None], cpu: float
) -> None:
    monkeypatch.setattr(workload, "_LOOK_SECONDS", 1e-9)
    monkeypatch.setattr(workload, "_QUIET_SHARE", 1.0)
    monkeypatch.setattr(workload, "_QUIET_SECONDS_MAX", 60.0)
    made = work(meter=Metered(*readings))
    monkeypatch.setattr(made, "_publish", lambda: _Done(10, [1.0], _Used(2.0, 0.5, 7)))
    measured = made.run("publish")
    assert measured.cpu_seconds == cpu


def test_without_a_meter_at_either_end_there_is_no_cpu_time() -> None:
    assert _Used.between(None, Usage(1.0, 1), 2.0) == _Used(2.0)
    assert _Used.between(Usage(1.0, 1), None, 2.0) == _Used(2.0)
    assert _Used.between(Usage(1.0, 1), Usage(4.0, 9), 2.0) == _Used(2.0, 3.0, 9)


def test_a_record_that_is_not_there_fails_the_work(server: Server, work: Callable[..., Workload]) -> None:
    with work(seconds=60.0) as made, pytest.raises(BenchFailed, match=r"get: bench-1 has no record \d+"):
        made.run("get")


def test_records_that_fall_due_too_early_are_tried_again_with_more_time(
    server: Server, work: Callable[..., Workload], monkeypatch: pytest.MonkeyPatch
) -> None:
    with work() as made:
        spares: list[float] = []

        async def late(first: int, count: int, attempt: int, spare: float, ahead: float) -> _Done | None:
            spares.append(spare)
            return did(count) if len(spares) == 5 else None

        monkeypatch.setattr(made, "_fall_due", late)
        with pytest.raises(BenchFailed, match="were not published before they fell due"):
            made.run("expire")
        assert [round(one / spares[0]) for one in spares] == [1, 3, 9]
        assert made.run("expire").operations == workload.NOTICED


def test_a_publish_that_is_refused_fails_the_deliveries(
    work: Callable[..., Workload], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Following:
        async def __aenter__(self) -> Any:
            return self

        async def __aexit__(self, *_: object) -> None: ...

        def subscribe(self, *_: object) -> Any:
            return self

        def __aiter__(self) -> Any:
            return self

        async def __anext__(self) -> Any:
            await asyncio.Event().wait()

        async def publish_many(self, *_: object, **__: object) -> list[Refusal]:
            return [Refusal(0, "TOPIC_FULL", "no room")]

    made = work(subscribers=1, follower=Following)
    with pytest.raises(BenchFailed, match=r"deliver: .*no room"):
        made.run("deliver")


# ---- followers ----


def following(runner: asyncio.Runner, *, end: BaseException | None, wanted: int = 1, seconds: float = 60.0) -> None:
    """Waits for an arrival from a subscription that ends so; the limit counts where it does not end."""

    async def wait() -> None:
        followers = _Followers([])

        async def read() -> None:
            if seconds == 0.0:
                await asyncio.Event().wait()
            followers.arrived(0.5)
            if end is not None:
                raise end

        followers.start(read())
        try:
            await followers.until(wanted, seconds, "deliver: late")
        finally:
            followers.end()

    runner.run(wait())


def test_followers_are_waited_for_until_they_have_enough_or_one_of_them_fails(runner: asyncio.Runner) -> None:
    following(runner, end=None, wanted=1)
    with pytest.raises(BenchFailed, match="a subscription has ended"):
        following(runner, end=None, wanted=2)
    with pytest.raises(NotFound):
        following(runner, end=NotFound("no topic", reason="TOPIC_NOT_FOUND"), wanted=2)
    with pytest.raises(BenchFailed, match="deliver: late within 0 s"):
        following(runner, end=None, seconds=0.0)


def test_the_failure_of_a_subscription_counts_though_all_has_arrived(runner: asyncio.Runner) -> None:
    async def run() -> None:
        followers = _Followers([0.5])
        followers._ended(SimpleNamespace(cancelled=lambda: False, exception=lambda: GONE))  # type: ignore[arg-type]  # a task
        followers._ended(SimpleNamespace(cancelled=lambda: True))  # type: ignore[arg-type]  # a task
        await followers.until(1, 60.0, "late")

    with pytest.raises(Unavailable):
        runner.run(run())
