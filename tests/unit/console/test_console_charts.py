"""Charts of a server's figures, and the library that draws them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast

import pytest

import sow_console
from sow_client import AsyncClient, FailedPrecondition, Figures, LatencyFigures, PermissionDenied
from sow_console import charts
from sow_console.figures import LOOKED_SECONDS, Watch, hour_of

NOW = datetime(2030, 1, 31, 12, tzinfo=UTC)


def figures(second: int, *latencies: LatencyFigures) -> Figures:
    elapsed = timedelta(seconds=1 if second else 0)
    return Figures(NOW + timedelta(seconds=second), elapsed, 0, second, 0, 0, 0, 0, 0, 0, 0, 0, (), (), latencies)


def test_the_first_figures_have_no_rates_and_are_not_drawn() -> None:
    drawn = charts.charts([figures(0), figures(1), figures(2)])
    assert list(drawn[0].seconds) == [NOW.timestamp() + 1, NOW.timestamp() + 2]
    assert list(drawn[0].series[0].values) == [1, 2]
    assert {one.title for one in drawn} == {"Changes", "Waiting", "Subscriptions"}


@pytest.mark.parametrize("step", [timedelta(hours=-2), timedelta(days=2)])
def test_moments_rise_although_the_clock_of_the_server_was_set(step: timedelta) -> None:
    """Story: a clock that was set back by two hours drew lines to and fro, of "the last -2 hours"."""
    told = [figures(1), figures(2), *[replace(one, as_of=one.as_of + step) for one in (figures(3), figures(4))]]
    last = (NOW + step).timestamp() + 4
    assert charts.charts(told)[0].seconds == (last - 3, last - 2, last - 1, last)
    assert charts.span(told) == timedelta(seconds=4)


def test_a_moment_without_a_commit_is_a_gap() -> None:
    commit = LatencyFigures("commit", 3, timedelta(milliseconds=2), timedelta(milliseconds=9))
    drawn = charts.charts([figures(1, commit), figures(2), figures(3, commit)])
    (chart,) = [one for one in drawn if one.unit == "time"]
    assert [line.values for line in chart.series] == [(2, None, 2), (9, None, 9)]


def test_the_vendored_files_are_those_that_were_looked_at() -> None:
    folder = Path(sow_console.__file__).parent / "static" / "vendor"
    listed = dict(line.split()[::-1] for line in (folder / "SHA256SUMS").read_text().splitlines())
    found = {one.name: hashlib.sha256(one.read_bytes()).hexdigest() for one in folder.iterdir() if one.suffix != ""}
    assert found == listed
    assert "MIT" in (folder / "uPlot.LICENSE").read_text()


def test_a_stream_is_followed_once_and_ends_when_nobody_looks() -> None:
    async def run() -> None:
        now, opened, more = 0.0, 0, asyncio.Event()

        async def stream() -> AsyncGenerator[int, None]:
            nonlocal opened
            opened += 1
            for number in range(3):
                yield number
            await more.wait()
            yield 3

        watch = Watch(stream, 2, clock=lambda: now)
        await watch.look()
        assert await watch.look() == (1, 2)
        assert opened == 1
        now = LOOKED_SECONDS + 1
        assert watch._task is not None
        more.set()
        await watch._task
        await watch.look()
        assert opened == 2
        await watch.close()

    asyncio.run(run())


def test_a_stream_in_which_nothing_comes_ends_when_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sow_console.figures.LOOKED_SECONDS", 0)
    monkeypatch.setattr("sow_console.figures.FIRST_SECONDS", 0)

    async def silent() -> AsyncGenerator[int, None]:
        await asyncio.Event().wait()
        yield 1

    async def run() -> None:
        watch = Watch(silent, 2)
        assert await watch.look() == ()
        assert watch._task is not None
        await watch._task
        assert watch.error is None

    asyncio.run(run())


def test_a_stream_that_is_refused_says_so_each_time() -> None:
    async def refused() -> AsyncGenerator[int, None]:
        for _ in range(1):
            raise PermissionDenied("no", reason="PERMISSION_DENIED")
        yield 1

    async def run() -> None:
        watch = Watch(refused, 2)
        for _ in range(2):
            with pytest.raises(PermissionDenied):
                await watch.look()

    asyncio.run(run())


class Served:
    """A server with figures of these moments; that of now is 0. `reason`: that of its refusal of a history."""

    def __init__(self, moments: list[int], reason: str = "") -> None:
        self.moments = moments
        self.reason = reason
        self.asked: list[object] = []

    async def watch_figures(
        self, interval: str, *, topics_max: int, history: str | None = None
    ) -> AsyncGenerator[Figures, None]:
        self.asked.append(history)
        if history and self.reason:
            raise FailedPrecondition("no", reason=self.reason)
        for moment in self.moments if history else [0]:
            yield figures(moment)
            await asyncio.sleep(0)
        await asyncio.Event().wait()


def looked(server: Served) -> list[int]:
    """The moments that the first look has."""

    async def run() -> list[int]:
        watch = hour_of(cast(AsyncClient, server))
        try:
            return [(one.as_of - NOW).seconds for one in await watch.look()]
        finally:
            await watch.close()

    return asyncio.run(run())


def test_the_first_look_has_the_whole_hour() -> None:
    """It waits until those of the past have come, and does not draw the first few."""
    assert looked(Served([1, 2, 3, 4, 0])) == [1, 2, 3, 4, 0]


def test_an_older_server_has_those_from_the_first_look_on() -> None:
    served = Served([1, 2, 0], "SERVER_TOO_OLD")
    assert looked(served) == [0]
    assert served.asked == ["1h", None]
    with pytest.raises(FailedPrecondition):
        looked(Served([1, 0], "FAILED_PRECONDITION"))


def test_the_span_of_figures_is_told() -> None:
    assert charts.span([figures(0), figures(1), figures(2)]) == timedelta(seconds=2)
    assert charts.span([figures(0)]) == charts.span([]) == timedelta(0)


def test_a_small_line_keeps_its_peaks() -> None:
    values = [0.0] * 720
    values[311] = 7.0
    assert sorted(charts.peaks(values, 120))[-2:] == [0, 7]
    assert len(charts.peaks(values, 120)) == 120
    assert charts.peaks([1.0, 2.0], 120) == [1, 2]
    assert charts.peaks([], 120) == []
