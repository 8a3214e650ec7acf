"""One identity of small rights does its worst; the others are served, and right (rules A7, N5, N7).

The default suite has no times in it: it asks whether the others are answered at all, whether the answers are right, how
much memory the server takes, and whether a callback occupied the event loop by its own CPU time. The long run measures
the waits.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from benchmarks.hostile import GET_TARGET, MEMORY_TARGET, NOISE_MS, see
from tests.support.oracles.access import GUARDED, client_of
from tests.support.oracles.attacks import ATTACKS, Attack, Attacker, prepare_others, tables, write_rights
from tests.support.servers.others import Others
from tests.support.servers.server import ServerProcess
from tests.support.servers.watched_server import occupied

OCCUPIED_MS: Final = 30.0
"""CPU time of one callback of the event loop. The aim is a millisecond; the rest is for a slow machine and the garbage
collector."""
WATCHDOG_SECONDS: Final = 240.0
ROUNDS: Final = 2
LOOK_SECONDS: Final = 0.01
SHOWN: Final = 3


@dataclass(frozen=True, slots=True)
class Watched:
    """A server, and what has occupied its event loop."""

    server: ServerProcess
    file: Path


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("exhaustion")
    write_rights(folder, ATTACKS)
    server = ServerProcess(folder, GUARDED + tables(ATTACKS), start=False)
    file = folder / "occupied.jsonl"
    server.module = "tests.support.servers.watched_server"
    server.first_arguments = [str(file), str(OCCUPIED_MS)]
    with server:
        server.start()
        with client_of(server, "root") as root:
            prepare_others(root)
        yield Watched(server, file)


async def attacked(server: ServerProcess, attack: Attack) -> tuple[Others, int]:
    """The others' calls while the attack runs, and the greatest memory of the server meanwhile."""
    greatest = 0

    async def look() -> None:
        nonlocal greatest
        while True:
            greatest = max(greatest, server.resident_bytes)
            await asyncio.sleep(LOOK_SECONDS)

    attacker = Attacker(server.address, attack)
    async with (
        asyncio.timeout(WATCHDOG_SECONDS),
        Others.connected(server.address, attack.published, attack.payload) as others,
    ):
        tasks = [asyncio.create_task(look()), asyncio.create_task(attack.small.run(attacker))]
        try:
            while not attacker.done:
                await others.rounds(1)
            await others.rounds(ROUNDS)
            return others, greatest
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            assert [one for one in ended if not isinstance(one, asyncio.CancelledError)] == []


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_the_others_are_served_while_one_caller_does_its_worst(watched: Watched, attack: Attack) -> None:
    server = watched.server
    with client_of(server, "root") as root:
        attack.small.prepare(root, attack.topic)
    before, known = server.resident_bytes, len(occupied(watched.file))
    others, greatest = asyncio.run(attacked(server, attack))
    assert [sample.failure for sample in others.samples if sample.failure] == []
    assert (greatest - before) / 2**20 <= attack.small_memory
    assert server.faults() == []
    found = sorted(occupied(watched.file)[known:], key=lambda one: -one.milliseconds)
    assert not found, "the event loop was occupied:\n" + "\n".join(map(str, found[:SHOWN]))


@pytest.mark.long
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_the_others_wait_no_longer_than_promised(tmp_path: Path, attack: Attack) -> None:
    seen = see(attack, Path(sys.executable), tmp_path, idle_seconds=5, seconds=15)
    assert seen.failures == {}
    assert seen.attacked["get"].p99 <= GET_TARGET.bound * max(seen.idle["get"].p99, NOISE_MS), seen
    assert seen.longest <= attack.longest, seen
    assert seen.memory <= MEMORY_TARGET.bound, seen
    assert seen.journal <= attack.journal, seen
