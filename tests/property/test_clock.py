"""The guarded clock, whatever the machine's clocks do: never backwards, and within its bound (clock [1] to [3])."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sow_server.engine.values.clock import SLEW_PARTS, ClockBehindError, ClockOptions, GuardedClock

SECOND = 1_000_000
HOUR = 3600 * SECOND
YEAR = 365 * 24 * HOUR
START = 1_700_000_000 * SECOND
OPTIONS = ClockOptions()

PASSED = st.integers(0, 50) | st.integers(0, 100 * SECOND) | st.integers(0, 30 * HOUR) | st.integers(-SECOND, 0)
SET = (
    st.just(0)
    | st.integers(-20, 20)
    | st.integers(-12 * SECOND, 12 * SECOND)
    | st.sampled_from([HOUR, -HOUR, YEAR, -YEAR])
)
STEPS = st.lists(
    st.tuples(PASSED, SET, st.sampled_from(["now", "now", "now", "paused", "accept", "restart"])), max_size=30
)


@given(STEPS)
def test_the_clock_never_runs_backwards_and_is_slewed_within_its_bound(steps: list[tuple[int, int, str]]) -> None:
    wall, boot = START, 0
    clock = GuardedClock(wall=lambda: wall, elapsed=lambda: boot)
    clock.start(0)
    last = clock.now_micros()
    highest_boot = 0
    for passed, set_by, action in steps:
        boot += passed
        wall += passed + set_by
        elapsed = max(0, boot - highest_boot)
        highest_boot = max(highest_boot, boot)
        if action == "accept":
            before, after = clock.accept()
            assert last <= before <= after
            assert after >= wall
            assert not clock.paused
            last = after
            continue
        if action == "restart":
            try:
                clock.start(last)
            except ClockBehindError:
                assert wall < last - OPTIONS.behind_max_micros
                clock.start(last, accept=True)
                last = wall
            highest_boot = boot
            assert clock.paused == (wall > last + OPTIONS.ahead_max_micros)
            now = clock.now_micros()
            assert now == (last if clock.paused else max(last, wall))
            last = now
            continue
        paused = clock.paused
        now = clock.now_micros()
        bound = elapsed // SLEW_PARTS + 1
        assert last <= now
        assert elapsed - bound <= now - last <= elapsed + bound
        if paused:
            assert now - last == elapsed
            assert wall > now + OPTIONS.jump_micros
        elif wall >= now:  # approached, never overshot
            assert wall - now <= OPTIONS.jump_micros
        last = now


@given(st.lists(st.tuples(st.integers(0, 100), SET), min_size=1, max_size=200))
def test_over_any_time_the_clock_is_within_five_percent_of_elapsed_time(steps: list[tuple[int, int]]) -> None:
    """clock [2]: also when it is asked every few microseconds."""
    wall, boot = START, 0
    clock = GuardedClock(wall=lambda: wall, elapsed=lambda: boot)
    clock.start(0)
    for passed, set_by in steps:
        boot += passed
        wall += passed + set_by
        clock.now_micros()
    assert abs(clock.now_micros() - START - boot) <= boot // SLEW_PARTS + 1
