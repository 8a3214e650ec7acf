"""The store's clock: never backwards, and a bad time step does not erase the store (L15)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sow_server.engine.values.errors import OpenError
from sow_server.engine.values.model import Durability, Lifetime, LifetimeKind, Publish
from tests.support.stores.stores import DAY, HOUR, MINUTE, SECOND, START, FakeTime, Rig


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    rig.create_topic("orders")
    yield rig
    rig.close()


def paused(rig: Rig) -> bool:
    return rig.clock.paused


def test_a_forward_jump_pauses_sweeping_until_the_clock_has_come_back(rig: Rig) -> None:
    """L15: while paused, the store's time goes by elapsed time, and nothing expires before its time."""
    rig.put("orders", "a", ttl=MINUTE)
    rig.time.step_wall(DAY)
    assert paused(rig)
    assert rig.clock.now_micros() == START
    assert rig.count("orders") == 1
    rig.time.tick(30 * SECOND)
    assert rig.store.sweep() == 0
    assert rig.clock.now_micros() == START + 30 * SECOND
    rig.time.step_wall(-DAY)
    assert not paused(rig)
    rig.time.tick(30 * SECOND)
    assert rig.store.sweep() == 1
    assert rig.clock.jumps_total == 1


def test_while_paused_records_that_are_due_by_elapsed_time_are_hidden_and_stay(rig: Rig) -> None:
    """L8, L15."""
    rig.put("orders", "a", ttl=SECOND)
    rig.time.step_wall(DAY)
    rig.time.tick(SECOND)
    assert rig.count("orders") == 0
    assert rig.store.sweep() == 0
    assert len(rig.stored("orders")) == 1


def test_the_writer_sweeps_nothing_while_paused_and_syncs_all_the_same(rig: Rig) -> None:
    """L15, P5: one look at the clock tells both."""
    rig.run(
        Publish("orders", [b"a"], ["a"], lifetime=Lifetime(LifetimeKind.TTL, SECOND), durability=Durability.BUFFERED)
    )
    writer = rig.store.writer
    rig.time.step_wall(DAY)
    rig.time.tick(SECOND)
    assert writer.synced_sequence < writer.last_sequence
    assert writer._do_due(after_answers=False) == (START + SECOND, True)
    assert len(rig.stored("orders")) == 1
    assert writer.synced_sequence == writer.last_sequence
    rig.time.step_wall(-DAY)
    assert writer._do_due(after_answers=False) == (START + SECOND, False)
    assert rig.stored("orders") == {}


def test_an_operator_confirms_a_jump(rig: Rig) -> None:
    """L15: the store's time steps to the wall clock, and records due by it expire."""
    rig.put("orders", "a", ttl=MINUTE)
    rig.time.step_wall(DAY)
    assert rig.clock.accept() == (START, START + DAY)
    assert not paused(rig)
    assert rig.store.sweep() == 1


def test_a_backward_step_slows_time_down_and_never_turns_it_back(rig: Rig) -> None:
    """L15: slewed by at most 5 %."""
    rig.time.step_wall(-5 * SECOND)
    before = rig.clock.now_micros()
    assert before == START
    rig.time.tick(20 * SECOND)
    assert rig.clock.now_micros() == START + 19 * SECOND
    rig.time.tick(100 * SECOND)
    assert rig.clock.now_micros() == rig.time.wall_micros


def test_a_small_forward_step_speeds_time_up(rig: Rig) -> None:
    """L15."""
    rig.time.step_wall(5 * SECOND)
    rig.time.tick(20 * SECOND)
    assert rig.clock.now_micros() == START + 21 * SECOND


@pytest.mark.parametrize("end", ["close", "kill"])
def test_time_goes_on_from_the_stored_mark_after_a_restart(rig: Rig, end: str) -> None:
    """L15: a wall clock that is a little behind does not turn it back."""
    rig.time.tick(HOUR)
    rig.put("orders", "a", ttl=SECOND)
    now = rig.clock.now_micros()
    getattr(rig, end)()
    rig.time.step_wall(-9 * SECOND)
    rig.open()
    assert rig.clock.now_micros() == now


def test_a_start_with_a_wall_clock_far_behind_is_refused_with_a_remedy(rig: Rig) -> None:
    """L15."""
    rig.put("orders", "a", ttl=MINUTE)
    rig.close()
    rig.time.step_wall(-11 * SECOND)
    with pytest.raises(OpenError, match=r"11 s behind .*--accept-clock"):
        rig.open()
    rig.open(accept_clock=True)
    assert rig.clock.now_micros() == START - 11 * SECOND
    assert rig.count("orders") == 1


@pytest.mark.parametrize("end", ["close", "kill"])
def test_a_clock_that_was_accepted_stays_so(rig: Rig, end: str) -> None:
    """L15: `--accept-clock` is needed once. The time of the last commit, which was ahead, once refused the start after
    that, too, until something was published."""
    rig.put("orders", "a")
    rig.close()
    rig.time.step_wall(-11 * SECOND)
    rig.open(accept_clock=True)
    getattr(rig, end)()
    rig.open()
    assert rig.clock.now_micros() == START - 11 * SECOND
    rig.put("orders", "b")
    rig.close()
    rig.time.step_wall(-11 * SECOND)
    with pytest.raises(OpenError, match="11 s behind"):
        rig.open()
    rig.open(accept_clock=True)


def test_a_refused_start_frees_the_directory(rig: Rig) -> None:
    rig.close()
    rig.time.step_wall(-11 * SECOND)
    for _ in range(2):
        with pytest.raises(OpenError):
            rig.open()
    rig.time.step_wall(11 * SECOND)
    rig.open()


def test_a_wall_clock_that_is_far_ahead_starts_with_sweeping_paused(rig: Rig) -> None:
    """L15: a bad clock at start must not erase the store; an operator confirms, or the clock comes back."""
    rig.put("orders", "a", ttl=HOUR)
    rig.close()
    rig.time.step_wall(8 * DAY)
    rig.open()
    rig.store.start(lambda answers: answers())
    assert paused(rig)
    assert rig.count("orders") == 1
    assert len(rig.stored("orders")) == 1
    rig.clock.accept()
    assert rig.count("orders") == 0


def test_a_server_that_was_down_for_days_starts_as_usual(rig: Rig) -> None:
    """L15, L11: up to a week."""
    rig.put("orders", "a", ttl=HOUR)
    rig.close()
    rig.time.tick(6 * DAY)
    rig.open()
    assert not paused(rig)
    assert rig.store.sweep() == 1


def test_the_mark_is_stored_without_any_change_to_the_data(rig: Rig) -> None:
    """L15: an idle store knows the time, too."""
    rig.time.tick(HOUR)
    rig.store.upkeep.mark_clock()
    rig.store.writer.step()
    rig.kill()
    rig.time = FakeTime(START)
    with pytest.raises(OpenError, match="3600 s behind"):
        rig.open()
    rig.open(accept_clock=True)
