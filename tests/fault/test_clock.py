"""A wall clock that is set while the store runs or while it is closed, by an hour and by a year (rule L15)."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import pytest

from sow_server.engine.disk.private import tighten
from sow_server.engine.values.clock import GuardedClock
from sow_server.engine.values.errors import OpenError
from sow_server.engine.values.model import Expiration, MessageType, TopicSettings
from tests.support.servers.server import DidNotStart, ServerProcess
from tests.support.stores.stores import DAY, HOUR, MINUTE, SECOND, START, FakeTime, Rig

YEAR: Final = 365 * DAY
CONFIG: Final = """
[server]
instance = "sow"
[topics.orders]
message_type = "binary"
expiration = "enabled"
"""
ORDERS: Final = TopicSettings(message_type=MessageType.BINARY, expiration=Expiration.ENABLED)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    made = Rig(tmp_path)
    made.create_topic("orders", ORDERS)
    made.put("orders", "minute", ttl=MINUTE)
    made.put("orders", "month", ttl=30 * DAY)
    made.put("orders", "never")
    return made


def keys(rig: Rig) -> set[str]:
    return {key.decode() for key in rig.live("orders")}


ALL: Final = {"minute", "month", "never"}


# --- while it runs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jump", [HOUR, YEAR])
def test_a_jump_ahead_erases_nothing_until_an_operator_confirms_it(rig: Rig, jump: int) -> None:
    rig.time.step_wall(jump)
    assert rig.clock.paused
    rig.store.sweep()
    assert keys(rig) == ALL
    assert len(rig.stored("orders")) == 3

    rig.time.tick(MINUTE)  # elapsed time goes on: a record that is due by it is not seen, and not swept
    assert keys(rig) == ALL - {"minute"}
    rig.store.sweep()
    assert len(rig.stored("orders")) == 3

    rig.clock.accept()
    rig.store.sweep()
    expected = {"month", "never"} if jump == HOUR else {"never"}
    assert keys(rig) == expected
    assert set(map(bytes.decode, rig.stored("orders"))) == expected
    rig.close()


@pytest.mark.parametrize("jump", [HOUR, YEAR])
def test_a_jump_ahead_that_is_taken_back_leaves_no_trace(rig: Rig, jump: int) -> None:
    rig.time.step_wall(jump)
    rig.time.tick(30 * SECOND)
    assert keys(rig) == ALL
    rig.time.step_wall(-jump)
    assert not rig.clock.paused
    rig.time.tick(30 * SECOND)
    rig.store.sweep()
    assert keys(rig) == ALL - {"minute"}
    rig.close()


@pytest.mark.parametrize("jump", [HOUR, YEAR])
def test_a_jump_back_neither_turns_time_back_nor_stops_expiry(rig: Rig, jump: int) -> None:
    before = rig.clock.now_micros()
    rig.time.step_wall(-jump)
    assert not rig.clock.paused
    assert rig.clock.now_micros() >= before
    version = rig.put("orders", "new", ttl=10 * SECOND).last_version
    assert version > before
    for _ in range(70):
        rig.time.tick(SECOND)
    rig.store.sweep()
    assert keys(rig) == {"month", "never"}, "the clock is slewed, by a twentieth at most, and goes on"
    rig.close()


# --- while it is closed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("jump", [HOUR, YEAR])
def test_a_clock_behind_the_data_is_refused_with_the_remedy(rig: Rig, jump: int, crash: bool) -> None:
    version = rig.put("orders", "last").last_version
    if crash:
        rig.kill()
    else:
        rig.close()
    rig.time.step_wall(-jump)
    with pytest.raises(OpenError) as refused:
        rig.open()
    assert "--accept-clock" in str(refused.value)
    rig.open(accept_clock=True)
    assert keys(rig) == ALL | {"last"}
    assert rig.put("orders", "last").last_version > version, "versions rise all the same (rule K7)"
    rig.close()


def test_a_year_ahead_at_the_start_pauses_the_sweep_until_it_is_confirmed(rig: Rig) -> None:
    rig.close()
    rig.time.step_wall(YEAR)
    rig.open()
    assert rig.clock.paused
    assert keys(rig) == ALL
    rig.store.sweep()
    assert len(rig.stored("orders")) == 3
    rig.clock.accept()
    rig.store.sweep()
    assert keys(rig) == {"never"}
    rig.close()


def test_an_hour_ahead_at_the_start_is_an_hour_that_has_passed(rig: Rig) -> None:
    rig.close()
    rig.time.step_wall(HOUR)
    rig.open()
    assert not rig.clock.paused
    assert keys(rig) == {"month", "never"}
    rig.close()


# --- the process -----------------------------------------------------------------------------------------------------


def prepare(folder: Path, wall_micros: int) -> None:
    """Makes the data of a server as of some other time."""
    rig = Rig(folder, time=FakeTime(wall_micros), opened=False)
    rig.path = folder / "data"
    rig.open()
    rig.create_topic("orders", ORDERS)
    rig.put("orders", "minute", ttl=MINUTE)
    rig.put("orders", "years", ttl=3 * YEAR)
    rig.close()


def wall() -> int:
    return time.time_ns() // 1000


def test_a_server_whose_data_is_a_year_ahead_starts_only_when_told_that_the_clock_is_right(tmp_path: Path) -> None:
    prepare(tmp_path, wall() + YEAR)
    with ServerProcess(tmp_path, CONFIG, start=False) as server:
        tighten(server.data)  # else the server tells of that, too
        with pytest.raises(DidNotStart) as refused:
            server.start()
        assert refused.value.code == 2
        (line,) = refused.value.said.splitlines()
        assert "behind the last time that this data has seen" in line
        assert "--accept-clock" in line

        server.start("--accept-clock")
        with server.client() as client:
            before = client.get("orders", "years")
            assert before is not None
            after = client.publish("orders", b"y", key="years", ttl="1h")
            assert after.version > before.version, "versions rise all the same (rule K7)"
            assert after.expire_time_micros is not None
            assert abs(after.expire_time_micros - wall() - HOUR) < MINUTE, "the wall clock is the clock"
        # The mark has come down with the clock: nobody has to say it twice.
        server.restart()
        with server.client() as client:
            again = client.publish("orders", b"y", key="years")
            assert again.version > after.version


def test_a_server_whose_data_is_a_year_old_starts_with_the_sweep_paused(tmp_path: Path) -> None:
    prepare(tmp_path, wall() - YEAR)
    with ServerProcess(tmp_path, CONFIG) as server:
        (event,) = server.events("clock_jumped")
        assert event["level"] == "error"
        with server.client() as client:
            status = client.status()
            assert status.sweep_paused
            assert abs(status.clock_time.timestamp() - (wall() - YEAR) / SECOND) < 60
            assert {record.key for record in client.query("orders")} == {"minute", "years"}
            command = [
                sys.executable,
                "-m",
                "sow_cli",
                "--server",
                server.address,
                "accept-clock",
                "--format",
                "ndjson",
            ]
            subprocess.run(command, check=True, timeout=30, capture_output=True)
            status = client.status()
            assert not status.sweep_paused
            assert abs(status.clock_time.timestamp() - wall() / SECOND) < 5
            assert {record.key for record in client.query("orders")} == {"years"}
            assert client.count("orders") == 1
        assert server.terminate() == 0


def test_the_clock_that_servers_use_is_the_machines() -> None:
    clock = GuardedClock()
    first = clock.now_micros()
    assert abs(first - wall()) < SECOND
    assert clock.now_micros() >= first > START
