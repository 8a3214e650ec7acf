"""The times and the sizes of the sweep's commits (L14): publishers come first, and the sweep gets its share."""

from __future__ import annotations

from pathlib import Path

from sow_server.engine.commit.options import WriterOptions
from sow_server.engine.commit.pace import ENTRIES_MIN, GIVE_WAY_MICROS, CallsUnderWay, SweepPace
from sow_server.engine.values.model import Delete, Lifetime, LifetimeKind, Publish
from tests.support.stores.stores import SECOND, Rig

NOW = 1_000_000_000
OPTIONS = WriterOptions()


def a_pace() -> tuple[SweepPace, CallsUnderWay]:
    calls = CallsUnderWay()
    return SweepPace(OPTIONS, calls), calls


def test_a_sweep_that_has_reached_the_end_pauses_longer_than_one_in_the_middle() -> None:
    """A trickle of expiries shares commits; between commits of a long sweep the event loop gets a turn."""
    pace, _ = a_pace()
    pace.published(NOW)
    pace.swept(20, NOW, NOW + 10, more=False)
    assert pace.not_before() == NOW + 10 + OPTIONS.sweep_pause_micros
    pace.swept(19, NOW, NOW + 10, more=True)
    assert pace.not_before() == NOW + 10 + OPTIONS.sweep_busy_pause_micros


def test_without_publishers_a_long_sweep_does_not_pause_and_its_commits_are_large() -> None:
    pace, _ = a_pace()
    assert pace.entries_max(NOW) == OPTIONS.sweep_entries_max
    pace.swept(1000, NOW, NOW + 10, more=True)
    assert pace.not_before() == NOW + 10
    pace.published(NOW)
    assert pace.entries_max(NOW + OPTIONS.busy_window_micros - 1) == 2 * ENTRIES_MIN
    assert pace.entries_max(NOW + OPTIONS.busy_window_micros) == OPTIONS.sweep_entries_max


def test_the_sweep_gives_way_to_a_call_but_not_for_longer_than_its_share_allows() -> None:
    """pace [2]."""
    pace, calls = a_pace()
    pace.swept(20, NOW, NOW + 10, more=True)
    calls.begin()
    assert pace.not_before() == NOW + 10 + GIVE_WAY_MICROS
    calls.end()
    assert pace.not_before() == NOW + 10


def test_the_end_of_the_last_call_wakes_a_writer_that_waits_for_it_and_no_other() -> None:
    """A wake-up costs a change of threads: a publish beside which nothing is swept pays nothing for it."""
    pace, calls = a_pace()
    woken: list[str] = []
    calls.wake = lambda: woken.append("woken")
    calls.begin()
    calls.end()
    assert woken == []
    calls.begin()
    calls.begin()
    pace.not_before()
    calls.end()
    assert woken == []
    calls.end()
    assert woken == ["woken"]
    calls.begin()
    calls.end()
    assert woken == ["woken"]


def test_a_call_under_way_has_its_turn_before_the_next_commit_of_a_long_sweep(tmp_path: Path) -> None:
    """A publish arrived while the sweep had the interpreter. The sweep went on before the publish was queued, so it
    waited for two commits instead of the rest of one."""
    rig = Rig(tmp_path)
    rig.create_topic("orders")
    lifetime = Lifetime(LifetimeKind.TTL, SECOND)
    rig.run(Publish("orders", [b"x"] * 300, [str(number) for number in range(300)], lifetime=lifetime))
    rig.time.tick(SECOND)
    rig.put("orders", "new")
    writer = rig.store.writer
    writer._sweep_if_due(rig.clock.now_micros(), after_answers=False)
    left = len(rig.stored("orders"))
    assert left == 301 - ENTRIES_MIN
    writer.calls.begin()
    rig.time.tick(OPTIONS.sweep_busy_pause_micros)
    writer._sweep_if_due(rig.clock.now_micros(), after_answers=False)
    assert len(rig.stored("orders")) == left
    wait = writer._wait_micros(rig.clock.now_micros(), paused=False)
    assert wait == GIVE_WAY_MICROS - OPTIONS.sweep_busy_pause_micros
    writer.calls.end()
    assert not writer.queue.take(10 * SECOND), "woken: it does not wait so long"
    writer._sweep_if_due(rig.clock.now_micros(), after_answers=False)
    assert len(rig.stored("orders")) < left
    rig.close()


def test_a_long_delete_does_not_count_as_publishing(tmp_path: Path) -> None:
    """Its own commits would make each other small."""
    rig = Rig(tmp_path)
    rig.create_topic("orders")
    rig.put("orders", "a")
    rig.put("orders", "b")
    busy = [rig.store.writer.busy()]
    rig.time.tick(OPTIONS.busy_window_micros)
    rig.run(Delete("orders", ["a"], topic_id=rig.topic("orders").id))
    busy.append(rig.store.writer.busy())
    rig.run(Delete("orders", ["b"]))
    busy.append(rig.store.writer.busy())
    assert busy == [True, False, True]
    rig.close()
