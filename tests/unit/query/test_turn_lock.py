"""A lock whose waiters come in turns by caller (turn_lock [1], [2])."""

from __future__ import annotations

import asyncio

from sow_server.reader_processes.turn_lock import TurnLock


class Rig:
    """A lock whose holders take a second of a fake clock, and the order of the holders."""

    def __init__(self) -> None:
        self.now = 0.0
        self.lock = TurnLock(lambda: self.now)
        self.order: list[str] = []

    async def hold(self, caller: str) -> None:
        async with self.lock.held(caller):
            self.order.append(caller)
            self.now += 1
            await asyncio.sleep(0)


def test_a_caller_with_many_waiters_gives_the_others_their_turns() -> None:
    """turn_lock [1]"""

    async def scenario() -> None:
        rig = Rig()
        async with asyncio.TaskGroup() as group:
            for caller in ["much"] * 20 + ["little"] * 3:
                group.create_task(rig.hold(caller))
        assert len(rig.order) == 23
        assert rig.order.index("little") <= 2
        assert max(place for place, caller in enumerate(rig.order) if caller == "little") <= 7, rig.order

    asyncio.run(scenario())


def test_a_waiter_that_is_cancelled_has_no_turn() -> None:
    """turn_lock [2]: neither while it waits, nor at the moment of its turn."""

    async def scenario() -> None:
        rig = Rig()
        first, second, third, last = [asyncio.create_task(rig.hold(name)) for name in ("a", "b", "c", "d")]
        await asyncio.sleep(0)
        third.cancel()
        await first
        second.cancel()  # it has been told that it is its turn
        await asyncio.gather(second, third, return_exceptions=True)
        await last
        assert [name for name in rig.order if name != "b"] == ["a", "d"]
        await rig.hold("e")
        assert rig.order[-1] == "e", "it is free"

    asyncio.run(scenario())
