"""The guarded clock under wrong, jumping and corrected wall clocks (clock [1] to [3], rule L15).

No time passes but a fake one.
"""

from __future__ import annotations

import pytest

from sow_server.engine.values.clock import (
    SLEW_PARTS,
    ClockBehindError,
    ClockOptions,
    GuardedClock,
    boot_micros,
    wall_micros,
)

SECOND = 1_000_000
HOUR = 3600 * SECOND
DAY = 24 * HOUR
YEAR = 365 * DAY
START = 1_700_000_000 * SECOND


class Machine:
    """A wall clock that can be set, and time since boot."""

    def __init__(self) -> None:
        self.wall = START
        self.boot = 77 * SECOND

    def pass_time(self, micros: int) -> None:
        self.wall += micros
        self.boot += micros


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def clock(machine: Machine) -> GuardedClock:
    clock = GuardedClock(wall=lambda: machine.wall, elapsed=lambda: machine.boot)
    clock.start(0)
    return clock


# --- running ---------------------------------------------------------------------------------------------------------


def test_the_clock_follows_a_right_wall_clock(machine: Machine, clock: GuardedClock) -> None:
    assert clock.now_micros() == START
    for micros in (0, 1, 999, SECOND, HOUR, 30 * DAY):
        machine.pass_time(micros)
        assert clock.now_micros() == machine.wall
    assert not clock.paused
    assert clock.jumps_total == 0


def test_asking_does_not_move_the_clock(machine: Machine, clock: GuardedClock) -> None:
    machine.wall += 3 * SECOND  # nothing to slew by while no time passes
    assert [clock.now_micros() for _ in range(100)] == [START] * 100


def test_a_wall_clock_that_is_a_little_ahead_is_approached_slowly(machine: Machine, clock: GuardedClock) -> None:
    """clock [2]: 5 % of the time that passes."""
    machine.wall += 5 * SECOND
    machine.pass_time(20 * SECOND)
    assert clock.now_micros() == START + 21 * SECOND
    machine.pass_time(80 * SECOND)
    assert clock.now_micros() == machine.wall
    machine.pass_time(SECOND)
    assert clock.now_micros() == machine.wall
    assert not clock.paused


def test_asking_often_slews_as_much_as_asking_seldom(machine: Machine, clock: GuardedClock) -> None:
    """clock [2]: a busy server asks every few microseconds, and a twentieth of those is nothing."""
    machine.wall += 5 * SECOND
    for _ in range(1000):
        machine.pass_time(7)
        clock.now_micros()
    assert clock.now_micros() == START + 7000 + 7000 // SLEW_PARTS


@pytest.mark.parametrize("back", [SECOND, HOUR, YEAR])
def test_a_wall_clock_that_steps_back_slows_the_clock_down_and_never_turns_it_back(
    machine: Machine, clock: GuardedClock, back: int
) -> None:
    """clock [1], clock [2]."""
    machine.wall -= back
    assert clock.now_micros() == START
    machine.pass_time(20)
    assert clock.now_micros() == START + 19
    machine.pass_time(10 * SECOND)
    assert clock.now_micros() == START + 19 + 19 * SECOND // 2
    assert not clock.paused
    machine.pass_time(20 * back)
    assert clock.now_micros() == machine.wall


def test_time_since_boot_that_steps_back_is_not_believed(machine: Machine, clock: GuardedClock) -> None:
    machine.boot -= HOUR
    assert clock.now_micros() == START
    machine.boot += HOUR + 40
    assert START + 38 <= clock.now_micros() <= START + 40


# --- jumps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jump", [11 * SECOND, HOUR, YEAR])
def test_a_jump_forward_pauses_sweeping_and_is_not_followed(machine: Machine, clock: GuardedClock, jump: int) -> None:
    """clock [3]: a bad time step must not erase the store."""
    machine.wall += jump
    assert clock.paused  # seen by whoever looks first
    assert clock.now_micros() == START
    machine.pass_time(HOUR)
    assert clock.now_micros() == START + HOUR
    assert clock.paused
    assert clock.jumps_total == 1


def test_ten_seconds_are_no_jump_and_a_microsecond_more_is_one(machine: Machine, clock: GuardedClock) -> None:
    machine.wall += 10 * SECOND
    before = clock.paused
    machine.wall += 1
    assert (before, clock.paused) == (False, True)


def test_small_steps_that_add_up_are_a_jump(machine: Machine, clock: GuardedClock) -> None:
    for _ in range(3):
        machine.wall += 4 * SECOND
        machine.pass_time(1)
        clock.now_micros()
    assert clock.paused


def test_the_clock_goes_on_by_itself_when_the_wall_clock_comes_back(machine: Machine, clock: GuardedClock) -> None:
    """clock [3]."""
    paused = []
    machine.wall += HOUR
    machine.pass_time(60 * SECOND)
    paused.append(clock.paused)
    machine.wall -= HOUR
    paused.append(clock.paused)
    assert clock.now_micros() == machine.wall == START + 60 * SECOND
    machine.wall += HOUR
    paused.append(clock.paused)
    assert paused == [True, False, True]
    assert clock.jumps_total == 2


def test_an_operator_can_accept_a_jump(machine: Machine, clock: GuardedClock) -> None:
    """clock [3]."""
    machine.wall += YEAR
    machine.pass_time(SECOND)
    assert clock.accept() == (START + SECOND, START + SECOND + YEAR)
    assert not clock.paused
    assert clock.now_micros() == machine.wall


def test_accepting_a_wall_clock_that_is_behind_does_not_turn_the_clock_back(
    machine: Machine, clock: GuardedClock
) -> None:
    """clock [1]."""
    machine.wall -= YEAR
    assert clock.accept() == (START, START)
    assert clock.now_micros() == START


def test_suspended_time_is_no_jump(machine: Machine, clock: GuardedClock) -> None:
    """A laptop that slept for a night: time since boot went on."""
    machine.pass_time(10 * HOUR)
    assert not clock.paused
    assert clock.now_micros() == machine.wall


# --- starting --------------------------------------------------------------------------------------------------------


def restarted(machine: Machine, high_water: int, *, accept: bool = False) -> GuardedClock:
    clock = GuardedClock(wall=lambda: machine.wall, elapsed=lambda: machine.boot)
    clock.start(high_water, accept=accept)
    return clock


def test_without_a_mark_the_clock_starts_at_the_wall_clock(machine: Machine) -> None:
    clock = restarted(machine, 0)
    assert (clock.now_micros(), clock.paused) == (START, False)


@pytest.mark.parametrize("away", [0, 1, HOUR, 7 * DAY])
def test_after_a_while_the_clock_starts_at_the_wall_clock(machine: Machine, away: int) -> None:
    clock = restarted(machine, START - away)
    assert (clock.now_micros(), clock.paused, clock.jumps_total) == (START, False, 0)


@pytest.mark.parametrize("behind", [1, SECOND, 10 * SECOND])
def test_a_wall_clock_a_little_behind_the_mark_starts_at_the_mark(machine: Machine, behind: int) -> None:
    """clock [1]: across restarts too."""
    clock = restarted(machine, START + behind)
    assert (clock.now_micros(), clock.paused) == (START + behind, False)


@pytest.mark.parametrize("behind", [10 * SECOND + 1, HOUR, YEAR])
def test_a_wall_clock_far_behind_the_mark_refuses_to_start(machine: Machine, behind: int) -> None:
    """Rule L15: with the remedy in the message."""
    with pytest.raises(ClockBehindError) as caught:
        restarted(machine, START + behind)
    assert caught.value.behind_micros == behind
    assert f"{behind / SECOND:.0f} s behind" in str(caught.value)
    assert "--accept-clock" in str(caught.value)


@pytest.mark.parametrize("ahead", [7 * DAY + 1, YEAR])
def test_a_wall_clock_far_ahead_of_the_mark_starts_paused_at_the_mark(machine: Machine, ahead: int) -> None:
    """Rule L15."""
    clock = restarted(machine, START - ahead)
    assert (clock.now_micros(), clock.paused, clock.jumps_total) == (START - ahead, True, 1)
    machine.pass_time(HOUR)
    assert (clock.now_micros(), clock.paused, clock.jumps_total) == (START - ahead + HOUR, True, 1)
    clock.accept()
    assert (clock.now_micros(), clock.paused) == (machine.wall, False)


@pytest.mark.parametrize("mark", [START - YEAR, START, START + YEAR])
def test_accepting_the_clock_at_the_start_overrides_every_check(machine: Machine, mark: int) -> None:
    """Rule L15: also backwards; the operator says that the data was ahead."""
    clock = restarted(machine, mark, accept=True)
    assert (clock.now_micros(), clock.paused) == (START, False)


def test_starting_again_forgets_a_jump(machine: Machine, clock: GuardedClock) -> None:
    machine.wall += HOUR
    assert clock.paused
    clock.start(START)
    assert (clock.now_micros(), clock.paused) == (START + HOUR, False)


def test_the_bounds_can_be_set(machine: Machine) -> None:
    options = ClockOptions(jump_micros=1, behind_max_micros=2, ahead_max_micros=3)
    clock = GuardedClock(wall=lambda: machine.wall, elapsed=lambda: machine.boot, options=options)
    clock.start(START + 2)
    with pytest.raises(ClockBehindError):
        clock.start(START + 3)
    paused = []
    for mark in (START - 4, START - 3):
        clock.start(mark)
        paused.append(clock.paused)
    machine.wall += 2
    paused.append(clock.paused)
    assert paused == [True, False, True]


def test_the_real_clocks_do_not_run_backwards() -> None:
    assert wall_micros() > START
    clock = GuardedClock()
    clock.start(0)
    for ask in (boot_micros, clock.now_micros):
        seen = [ask() for _ in range(1000)]
        assert seen == sorted(seen)
