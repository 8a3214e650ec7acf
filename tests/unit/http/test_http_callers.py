"""The clients of the door: their number has a bound, whatever comes at once."""

from __future__ import annotations

import asyncio
from typing import cast

from sow_client import AsyncClient
from sow_http.callers import CALLERS_MAX, Callers


class _Client:
    """Takes a while to close, as a connection does."""

    open = 0

    def __init__(self) -> None:
        _Client.open += 1

    async def close(self) -> None:
        await asyncio.sleep(0)
        _Client.open -= 1


def test_callers_that_come_at_once_make_no_more_clients_than_there_is_room_for() -> None:
    """Each of those that came while one was closed took its room, and none of them was ever closed."""

    async def call(door: Callers, token: str) -> None:
        async with door.client(token):
            pass

    async def story() -> None:
        door = Callers(lambda token: cast(AsyncClient, _Client()))
        for number in range(CALLERS_MAX):
            await call(door, f"first {number}")
        for turn in range(20):
            await asyncio.gather(*[call(door, f"{turn}.{number}") for number in range(10)])
        assert _Client.open <= CALLERS_MAX
        await door.close()
        assert _Client.open == 0

    asyncio.run(story())
