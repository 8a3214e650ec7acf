"""Floods are told sparsely, in bounded memory, and each event counts (rule A8)."""

from __future__ import annotations

import pytest

from sow_server.access import tally
from sow_server.access.tally import COUNTS_TOLD_MAX, IN_ALL_MAX, OTHERS, SOURCES_MAX, Tally, Untold
from tests.support.fakes.clocks import Clock

EACH_MAX = 10


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def counted(clock: Clock) -> Tally:
    return Tally(clock, EACH_MAX)


def test_the_first_of_a_minute_are_told_and_then_their_number(counted: Tally, clock: Clock) -> None:
    told = [counted.told("desk") for _ in range(25)]
    assert told == [True] * EACH_MAX + [False] * 15
    clock.now += 59
    assert counted.due() == []
    clock.now += 1
    assert counted.due() == [Untold("desk", 15)]
    assert counted.due() == [], "each count is told once"
    assert counted.told("desk"), "the next minute begins"


def test_counts_that_are_not_due_are_told_at_the_end(counted: Tally) -> None:
    for _ in range(EACH_MAX + 2):
        counted.told("desk")
    assert counted.due(at_the_end=True) == [Untold("desk", 2)]


def test_sources_do_not_share_what_is_told(counted: Tally) -> None:
    for _ in range(EACH_MAX + 1):
        counted.told("desk")
    assert counted.told("other")


def test_many_sources_together_do_not_flood_the_log(counted: Tally, clock: Clock) -> None:
    """Story: each of the addresses of a network had ten lines of its own, which pushed all else out of the log."""
    told = sum(counted.told(f"source {n}") for n in range(2 * IN_ALL_MAX))
    assert told == IN_ALL_MAX
    clock.now += 60
    counts = counted.due()
    assert len(counts) == COUNTS_TOLD_MAX + 1
    assert counts[-1].source == OTHERS
    assert sum(count.events for count in counts) == IN_ALL_MAX
    assert counted.told("desk"), "a minute later there is room again"


def test_memory_is_bounded_and_no_event_is_lost_from_the_counts(
    counted: Tally, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert SOURCES_MAX <= 100_000
    monkeypatch.setattr(tally, "SOURCES_MAX", 20)
    events = told = 0
    for n in range(200):
        for _ in range(EACH_MAX + 2):
            told += counted.told(f"source {n}")
            events += 1
        clock.now += 0.001
    counts = counted.due(at_the_end=True)
    assert len(counts) <= 21
    assert told + sum(count.events for count in counts) == events
