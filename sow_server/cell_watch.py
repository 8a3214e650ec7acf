"""Asks the other servers of all cells for their placement (rule C7), without showing them a credential."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

import grpc

from sow.v1 import admin_pb2, admin_pb2_grpc
from sow_server.cells import Answer, Cells, Problem
from sow_server.config import PlacementConfig
from sow_server.dialling import credentials_of, open_channel

WATCH_SECONDS: Final = 10
AGAIN_SECONDS: Final = 0.2
"""The first pause while a cell is in trouble; each further one is twice as long, up to `WATCH_SECONDS`."""
ANSWER_SECONDS: Final = 3.0
ASKED_AT_A_TIME: Final = 32
ANSWER_BYTES_MAX: Final = 64 * 2**10
"""Without a credential, an answer has three short fields."""
MESSAGE_CHARACTERS_MAX: Final = 400
"""Messages of gRPC begin with all that failed, and have the cause at their end."""
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", ANSWER_BYTES_MAX),
    ("grpc.enable_retries", 0),
    ("grpc.max_reconnect_backoff_ms", 5_000),
)


class CellWatch:
    """Owns a channel to each address of the placement. Event loop only."""

    def __init__(self, config: PlacementConfig, cells: Cells, now_micros: Callable[[], int]) -> None:
        """Raises OSError where a file of the configuration cannot be read."""
        self._credentials = credentials_of(config)
        self._cells = cells
        self._now_micros = now_micros
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._room = asyncio.Semaphore(ASKED_AT_A_TIME)
        self._pause = AGAIN_SECONDS
        self._again: asyncio.TimerHandle | None = None

    async def look(self) -> None:
        """Asks every address once, and again if there was a reload meanwhile: the answers are from before it."""
        places = self._cells.places
        while True:
            digest, cells = places.digest, places.placement.cells
            addresses = [address for servers in cells.values() for address in servers]
            for address in self._channels.keys() - set(addresses):
                await self._channels.pop(address).close()
            answers = dict(zip(addresses, await asyncio.gather(*map(self._ask, addresses)), strict=True))
            if digest == places.digest:
                break
        now = self._now_micros()
        self._cells.forget_others()
        before = self._cells.problems.copy()
        for cell, servers in cells.items():
            self._cells.heard(cell, {address: answers[address] for address in servers}, now)
        self._look_again(before)

    def _look_again(self, before: Mapping[str, Problem]) -> None:
        """Looks again before the next time, while there is trouble: mostly a cell is about to start, or to reload."""
        if self._again is not None:
            self._again.cancel()
            self._again = None
        problems = self._cells.problems
        if not problems or problems.keys() - before.keys():
            self._pause = AGAIN_SECONDS
        if problems and self._pause < WATCH_SECONDS:
            loop, look = asyncio.get_running_loop(), self._cells.look_soon
            self._again = loop.call_later(self._pause, look)
            self._pause *= 2

    async def close(self) -> None:
        """Closes the channels."""
        if self._again is not None:
            self._again.cancel()
        for channel in self._channels.values():
            await channel.close()

    async def _ask(self, address: str) -> Answer | str:
        async with self._room:
            channel = self._channels.get(address)
            if channel is None:
                channel = self._channels[address] = open_channel(address, self._credentials, _OPTIONS)
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            try:
                request = admin_pb2.GetPlacementRequest(asking_cell=self._cells.places.cell)
                found = await stub.GetPlacement(request, timeout=ANSWER_SECONDS)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    return Answer("", 0, "")  # an older server
                return f"{error.code().name}: {(error.details() or '')[:MESSAGE_CHARACTERS_MAX]}"
        cell = found.cell[:MESSAGE_CHARACTERS_MAX]
        return Answer(cell, found.version, found.digest, found.strays_of_asking_cell)
