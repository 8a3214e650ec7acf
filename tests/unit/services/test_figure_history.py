"""The figures of the last hour, which the server takes itself (rule X11). The tests own the clock."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from sow.v1 import admin_pb2
from sow_server.services.figure_history import KEPT_MICROS, SAMPLE_SECONDS, SAMPLES_MAX, TOPICS_KEPT
from tests.support.fakes.guarded import GuardedParts
from tests.support.oracles.access import grant, identity
from tests.support.stores.stores import BINARY, HOUR, SECOND, Rig

ACCESS = identity("desk", "desk") + grant("desk", "a", "read publish")
BETWEEN = SAMPLE_SECONDS * SECOND


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[GuardedParts]:
    rig = Rig(tmp_path)
    rig.create_topic("a", BINARY)
    with GuardedParts(rig, ACCESS) as parts:
        yield parts
    rig.close()


def sampled(parts: GuardedParts, changes: int = 0, topic: str = "a", *, after: int = BETWEEN) -> None:
    """So much time passes, with so many changes."""
    for number in range(changes):
        parts.rig.put(topic, str(number))
    parts.rig.time.tick(after)
    parts.sample_figures()


def history(parts: GuardedParts, micros: int = HOUR, topics_max: int = 100) -> list[admin_pb2.WatchFiguresResponse]:
    """What a call begins with."""
    parts.healthy.is_stopping = True  # it has no figures of now
    return parts.answers("root", "WatchFigures", history_micros=micros, topics_max=topics_max)


def rates(found: list[admin_pb2.WatchFiguresResponse]) -> list[float]:
    return [one.changes_per_second for one in found]


def test_each_sample_has_the_rates_since_the_one_before_and_the_first_those_since_the_start(
    parts: GuardedParts,
) -> None:
    before = parts.rig.clock.now_micros()
    sampled(parts, 10)
    sampled(parts, 0)
    sampled(parts, 5)
    found = history(parts)
    assert rates(found) == [2, 0, 1]
    assert [one.elapsed_micros for one in found] == [BETWEEN] * 3
    assert [one.as_of_micros - before for one in found] == [BETWEEN, 2 * BETWEEN, 3 * BETWEEN]
    assert [[(one.topic, one.changes_per_second) for one in past.topics] for past in found] == [
        [("a", 2)],
        [],
        [("a", 1)],
    ]


def test_those_of_so_long_are_told_and_of_an_hour_at_most(parts: GuardedParts) -> None:
    for number in range(SAMPLES_MAX + 3):
        sampled(parts, 1 if number == 3 else 0)
    found = history(parts)
    assert len(found) == SAMPLES_MAX
    assert rates(found)[:2] == [1 / SAMPLE_SECONDS, 0], "the three before are gone"
    assert len(history(parts, 10 * SECOND)) == 2, "of now, and of 5 s ago"
    assert len(history(parts, 1)) == 1


def test_no_more_samples_are_kept_than_an_hour_has(parts: GuardedParts) -> None:
    """The scheduler runs its jobs again whenever the wall clock was set back."""
    for _ in range(SAMPLES_MAX + 3):
        sampled(parts, after=1)
    assert len(history(parts)) == SAMPLES_MAX


def test_samples_that_came_late_are_told_for_an_hour_only(parts: GuardedParts) -> None:
    """A machine that slept, or a busy server, has fewer samples in an hour than there are places."""
    sampled(parts, 100)
    sampled(parts, after=HOUR)
    (late,) = history(parts)
    assert late.elapsed_micros == HOUR
    assert late.changes_per_second == 0
    sampled(parts, 36, after=3_600 * SECOND // 2)
    assert rates(history(parts)) == [0, 36 / 1_800]


@pytest.mark.parametrize("step", [-2 * HOUR, 2 * HOUR, 48 * HOUR])
def test_a_clock_that_is_set_makes_no_false_rate(parts: GuardedParts, step: int) -> None:
    """L15: an accepted clock steps by days; divided by those, ten changes a second are none."""
    sampled(parts, 50)
    parts.rig.time.step_wall(step)
    parts.rig.clock.accept()
    sampled(parts, 50)
    sampled(parts, 50)
    found = history(parts)
    assert rates(found) == [10, 10, 10]
    assert [one.elapsed_micros for one in found] == [BETWEEN] * 3


def test_the_busiest_topics_are_kept_and_no_more(parts: GuardedParts) -> None:
    for number in range(TOPICS_KEPT + 5):
        parts.rig.create_topic(f"t{number:02}", BINARY)
        for key in range(number):
            parts.rig.put(f"t{number:02}", str(key))
    sampled(parts)
    (found,) = history(parts)
    assert [one.topic for one in found.topics] == [f"t{number:02}" for number in range(14, 4, -1)]
    assert found.topics_total == TOPICS_KEPT + 6
    (few,) = history(parts, topics_max=2)
    assert [one.topic for one in few.topics] == ["t14", "t13"]


def test_a_deleted_topic_is_not_told_even_if_another_has_its_name(parts: GuardedParts) -> None:
    """Story: figures by name gave a new topic the rates of the one that was deleted."""
    sampled(parts, 10)
    parts.rig.delete_topic("a")
    parts.rig.create_topic("a", BINARY)
    sampled(parts, 5)
    found = history(parts)
    assert [[one.changes_per_second for one in past.topics] for past in found] == [[], [1]]
    assert rates(found)[0] >= 2, "the server has done this work"


def test_an_hour_of_a_busy_server_takes_few_bytes(parts: GuardedParts) -> None:
    """[1]: 100 topics that all change, with names of 100 characters, for as long as there are samples."""
    sampled(parts)
    for number in range(100):
        parts.rig.create_topic(f"{'n' * 97}{number:03}", BINARY)
        parts.rig.put(f"{'n' * 97}{number:03}", "k")
    sampled(parts)
    (_, busy) = history(parts)
    assert len(busy.topics) == TOPICS_KEPT
    assert SAMPLES_MAX * busy.ByteSize() < 2_000_000


def test_the_history_needs_the_right_to_observe(parts: GuardedParts) -> None:
    sampled(parts, 10)
    refused = parts.status("desk", "WatchFigures", history_micros=HOUR)
    assert refused.code == grpc.StatusCode.PERMISSION_DENIED.value[0]


@pytest.mark.parametrize("micros", [-1, KEPT_MICROS + 1])
def test_more_than_is_kept_is_refused(parts: GuardedParts, micros: int) -> None:
    refused = parts.status("root", "WatchFigures", history_micros=micros)
    assert refused.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert refused.message == "history_micros: must be between 0 and 1 h"


def test_a_server_that_was_started_again_has_those_since_then(parts: GuardedParts) -> None:
    sampled(parts, 10)
    with GuardedParts(parts.rig, ACCESS) as started:
        sampled(started, 5)
        assert rates(history(started)) == [1]


def test_a_call_that_asks_for_none_begins_with_those_of_now(parts: GuardedParts) -> None:
    sampled(parts, 10)
    assert history(parts, 0) == []
