"""The instances of the overview: which alarms they have, and that none waits for one that does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Self, cast

import pytest

from sow_client import AsyncClient, Instance, PermissionDenied, Placement, SowError, Status, Topic, Unavailable
from sow_console import instances
from sow_console.instances import ALARM_SECONDS, LOST_SECONDS, Known, Watched
from sow_console.pages import overview
from sow_console.pages.page import View
from sow_console.sessions import Session
from tests.support.servers.console import Clock

NOW = datetime(2030, 1, 31, 12, tzinfo=UTC)


def go(work: Callable[[], Coroutine[object, object, None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 30))


def _set() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


# ---- alarms ----


def status(**other: object) -> Status:
    given: dict[str, object] = {
        "instance": "ldn", "instance_id": "", "journal_epoch": "", "server_version": "", "state": "serving",
        "failure": "", "ready_time": NOW, "clock_time": NOW, "sweep_paused": False, "last_sequence": 0,
        "live_records": 0, "overdue_records": 0, "topics": 0, "disk_bytes": 0,
    }  # fmt: skip
    return Status(**(given | other))  # type: ignore[arg-type]  # of the types that they have above


def test_a_healthy_instance_has_no_alarm() -> None:
    assert overview.alarms(status(), serving=True, now=NOW) == []


@pytest.mark.parametrize(
    ("other", "word"),
    [
        ({"state": "failed", "failure": "disk"}, "failed, writes have stopped: disk"),
        ({"sweep_paused": True}, "expiry is paused"),
        ({"overdue_records": 10_001}, "10,001 records are overdue"),
        ({"clock_time": NOW + timedelta(seconds=6)}, "clock differs"),
        ({"disk_free_bytes": 5 << 30, "disk_size_bytes": 100 << 30}, "5.0 GiB of 100.0 GiB free"),
        ({"disk_free_bytes": 1 << 29, "disk_size_bytes": 2 << 30}, "512.0 MiB of 2.0 GiB free"),
    ],
)
def test_a_sick_instance_has_one(other: dict[str, object], word: str) -> None:
    (alarm,) = overview.alarms(status(**other), serving=True, now=NOW)
    assert word in alarm


# ---- instances ----


@dataclass
class Asked:
    """A client of an instance that answers when it is told to."""

    answering: asyncio.Event = field(default_factory=_set)
    error: SowError | None = None
    asked: int = 0

    async def describe_instance(self) -> Instance:
        self.asked += 1
        await self.answering.wait()
        if self.error is not None:
            raise self.error
        return Instance("ldn:7450", "ldn", "", "", "", True, "0.1.0", "ldn")

    async def placement(self) -> Placement:
        return Placement("")

    async def status(self) -> Status:
        return status()

    @property
    def here(self) -> Self:
        return self

    async def in_each_cell(self, ask: Callable[[Asked], Coroutine[object, object, object]]) -> dict[str, object]:
        return {"": await ask(self)}

    def servers_of(self, topic: str) -> str:
        return topic

    async def topics(self, *, with_statistics: bool) -> list[Topic]:
        await self.answering.wait()
        return []


def watched(client: Asked, clock: Clock) -> Watched:
    return Watched(cast(AsyncClient, client), clock=clock, now=lambda: NOW)


def test_an_instance_that_was_lost_is_not_waited_for_and_not_asked_at_once() -> None:
    """Each look at the overview waited for its connection, and the other instances with it."""

    async def work() -> None:
        client, clock = Asked(), Clock()
        one = watched(client, clock)
        assert (await one.look()).status == status()
        client.error = Unavailable("refused", reason="UNREACHABLE")
        lost = await one.look()
        assert (lost.lost, lost.error, lost.status, lost.time) == (True, "not reachable: refused", status(), NOW)
        assert client.asked == 2
        clock.now += LOST_SECONDS - 0.1
        assert await one.look() == lost
        assert client.asked == 2, "it is not asked for some seconds"
        clock.now += 0.1
        client.error = None
        while (found := await one.look()).lost:
            pass
        assert (found.status, found.error, client.asked) == (status(), "", 3)
        await one.close()

    go(work)


def test_who_has_lost_its_token_is_shown_nothing_of_before() -> None:
    """Story: whose token was taken out of use saw the figures of before until its session ended."""

    async def work() -> None:
        client, clock = Asked(), Clock()
        one = watched(client, clock)
        assert (await one.look()).status == status()
        client.error = PermissionDenied("it belongs to no identity", reason="UNAUTHENTICATED")
        lost = await one.look()
        assert lost == Known(lost=True, error="it belongs to no identity")
        await one.close()

    asyncio.run(work())


def test_an_instance_that_says_nothing_is_lost_after_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection may stand, as that of a stopped process does."""
    monkeypatch.setattr(instances, "WAIT_SECONDS", 0)

    async def work() -> None:
        client, clock = Asked(), Clock()
        one = watched(client, clock)
        while (await one.look()).status is None:
            pass
        client.answering.clear()
        first = await one.look()
        assert (first.silent, first.lost) == (True, False)
        clock.now += ALARM_SECONDS
        second = await one.look()
        assert (second.lost, second.error, second.status) == (True, "no answer for 3.0s", status())
        client.answering.set()
        while (found := await one.look()).lost:
            pass
        assert (found.silent, found.error, client.asked) == (False, "", 2)
        client.answering.clear()
        await one.look()
        await one.close()

    go(work)


def test_an_instance_that_says_nothing_does_not_hold_up_the_overview(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instances, "WAIT_SECONDS", 0.01)
    stuck, well = Asked(asyncio.Event()), Asked()
    clients = {"ldn:1": stuck, "nyc:1": well}

    async def work() -> None:
        session = Session({}, None, lambda server, token: cast(AsyncClient, clients[server]), 0.0)
        told = await overview.facts(View(session, "ldn:1", tuple(clients), {}, NOW))
        first, second = cast("tuple[overview.Seen, ...]", told["instances"])
        assert (told["is_there"], first.instance, first.alarms) == (False, None, ())
        assert (second.status, second.lost) == (status(), False)
        for server in clients:
            await session.instance(server).close()

    go(work)
