"""The grid of an order: the frames over a scripted live result."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import pytest

from sow_client import AsyncClient, Change, FailedPrecondition, PermissionDenied, Record, SowError
from sow_console import live
from sow_console.pages import records
from tests.unit.console.test_console_parts import Script, Subscribed, eventually, go, put, record


class Ranking(Subscribed):
    """A live result: a test sets its list, and puts a change."""

    def __init__(self, changes: asyncio.Queue[Change | SowError], rows: list[Record] | SowError) -> None:
        super().__init__(changes)
        self._first = rows
        self.rows: list[Record] = []

    async def __aenter__(self) -> Ranking:
        if isinstance(self._first, SowError):
            raise self._first
        self.rows = self._first
        return self

    def list(self) -> list[Record]:
        return [*self.rows]


@dataclass
class Lists(Script):
    """A client whose live results are written down, too."""

    lists: list[list[Record] | SowError] = field(default_factory=list)
    """What a live result has first, by its call."""
    result: Ranking | None = None
    """The live result that was asked for last."""

    def live_result(
        self, topic: str, filter: str | None, parameters: object, *, order_by: str, top_n: int,  # noqa: A002 - likewise
        on_interruption: Callable[[SowError | None], object],
    ) -> Ranking:  # fmt: skip
        assert (order_by, top_n) == ("/a DESC", 3), "one more than are shown tells whether there are more"
        self.interrupt = on_interruption
        self.result = Ranking(self.changes, self.lists.pop(0))
        return self.result


def ranked(script: Lists) -> live.RecordFrames:
    asked = records.asked({"topic": "orders", "order": "/a DESC", "rows": "2"})
    return live.RecordFrames(cast(AsyncClient, script), asked, now_micros=lambda: 77, heartbeat=0.001)


def keys_of(frame: live.Frame) -> list[object]:
    return [one[0] for one in cast(list[list[object]], frame["rows"])]


def test_a_grid_with_an_order_has_the_first_rows_of_the_list() -> None:
    async def work() -> None:
        a, b, c, d = (record(key, b"{}") for key in "abcd")
        script = Lists([[a, b, c]], lists=[[a, b, c]])
        source = ranked(script)
        assert keys_of(await source.frame()) == ["a", "b"]
        first = await eventually(source, lambda frame: "order" in frame)
        assert (first["order"], first["more"], first["unranked"], script.starts) == (["a", "b"], True, "", [])
        assert script.result is not None
        script.result.rows = [d, a, b]
        script.changes.put_nowait(put("d", b"{}"))
        second = await eventually(source, lambda frame: "order" in frame)
        assert (keys_of(second), second["order"], second["more"], second["changes"]) == (["d"], ["d", "a"], True, 1)
        script.result.rows = [a, b]
        script.changes.put_nowait(Change("oof", reason="deleted", previous=d))
        third = await eventually(source, lambda frame: "order" in frame)
        assert (keys_of(third), third["order"], third["more"]) == (["b"], ["a", "b"], False), "b was not kept there"
        assert "order" not in await source.frame(), "nothing has changed"
        await source.close()

    go(work)


@pytest.mark.parametrize("reason", sorted(live.UNRANKED))
def test_without_a_list_the_order_is_that_of_the_answer_and_the_frames_say_why(reason: str) -> None:
    async def work() -> None:
        script = Lists([[record("a", b"{}")]], lists=[FailedPrecondition("an older server", reason=reason)])
        source = ranked(script)
        script.changes.put_nowait(put("b", b"{}"))
        frame = await eventually(source, lambda frame: bool(frame["rows"]) and "reset" not in frame)
        assert (frame["unranked"], "order" in frame, frame["error"]) == ("an older server", False, None)
        assert script.starts == ["e.7"]
        await source.close()

    go(work)


def test_a_list_that_grows_too_large_is_asked_for_no_more() -> None:
    async def work() -> None:
        a = record("a", b"{}")
        script = Lists([[a], [a]], lists=[[a]])
        source = ranked(script)
        await eventually(source, lambda frame: "order" in frame)
        script.changes.put_nowait(FailedPrecondition("16 MiB", reason="RESULT_TOO_LARGE"))
        again = await eventually(source, lambda frame: "reset" in frame)
        assert (again["unranked"], keys_of(again), script.lists) == ("16 MiB", ["a"], [])
        script.changes.put_nowait(put("b", b"{}"))
        await eventually(source, lambda frame: keys_of(frame) == ["b"])
        assert script.starts == ["e.7"]
        await source.close()

    go(work)


def test_an_order_that_one_may_not_see_is_not_live() -> None:
    async def work() -> None:
        script = Lists([[]], lists=[PermissionDenied("no", reason="PERMISSION_DENIED")])
        source = ranked(script)
        frame = await eventually(source, lambda frame: frame["error"] is not None)
        assert (cast(dict[str, object], frame["error"])["reason"], script.starts) == ("PERMISSION_DENIED", [])
        await source.close()

    go(work)
