"""Asks the other servers of all cells for their placement (rules C7, C16), without showing them a credential."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final, Protocol

import grpc
import structlog

from sow.v1 import admin_pb2, admin_pb2_grpc
from sow_server.cells import Answer, Cells, Problem, Trouble
from sow_server.config import PlacementConfig
from sow_server.dialling import credentials_of, open_channel
from sow_server.engine.values.errors import StoreError
from sow_server.engine.values.model import MICROS
from sow_server.prepared import Prepared

log = structlog.get_logger(__name__)

WATCH_SECONDS: Final = 10
AGAIN_SECONDS: Final = 0.2
"""The first pause while a cell is in trouble; each further one is twice as long, up to `WATCH_SECONDS`."""
PASSES_SECONDS: Final = 1.0
"""Another version of the placement is looked at again so soon: the switch of a move is over by then."""
ANSWER_SECONDS: Final = 3.0
PREPARED_SECONDS: Final = 0.05
"""While a placement is prepared, the cells that its topics leave are asked so often: until they have answered, no cell
takes the topics."""
PREPARED_LONG_SECONDS: Final = 1.0
"""As often, once it has waited for a minute: the move was broken off, or is delayed."""
LONG_MICROS: Final = 60 * MICROS
ASKED_AT_A_TIME: Final = 32
ANSWER_BYTES_MAX: Final = 64 * 2**10
"""Without a credential, an answer has three short fields."""
MESSAGE_CHARACTERS_MAX: Final = 400
"""Messages of gRPC begin with all that failed, and have the cause at their end."""
_NO_CERTIFICATE: Final = "; if it asks for certificates, this server needs `certificate` and `key` in [placement]"
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", ANSWER_BYTES_MAX),
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),  # else a cell that has started is reached after a second
    ("grpc.max_reconnect_backoff_ms", 5_000),
)


class Sources(Protocol):
    """The links on which others send here."""

    def probe_sources(self) -> int:
        """Sends all sources another probe, at once; returns it."""


class CellWatch:
    """Owns a channel to each address of the placement. Event loop only."""

    def __init__(self, config: PlacementConfig, cells: Cells, now_micros: Callable[[], int]) -> None:
        """Raises OSError where a file of the configuration cannot be read."""
        self._credentials = credentials_of(config)
        self._hint = _NO_CERTIFICATE if config.ca is not None and config.certificate is None else ""
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
        pauses = [PASSES_SECONDS] if Trouble.DIFFERS in [kind for _, kind in self._cells.suspected.values()] else []
        if problems and self._pause < WATCH_SECONDS:
            pauses.append(self._pause)
            self._pause *= 2
        if pauses:
            self._again = asyncio.get_running_loop().call_later(min(pauses), self._cells.look_soon)

    async def await_prepared(self, links: Sources) -> None:
        """Takes each placement that is prepared into use, as soon as it may be (rule C16). Never ends."""
        cells = self._cells
        while True:
            await cells.has_prepared.wait()
            prepared = cells.prepared
            assert prepared is not None, "it is set as long as there is one"
            probe = 0
            while cells.prepared is prepared:
                try:
                    probe = await self._look_at_prepared(prepared, links, probe)
                except StoreError as error:
                    if cells.waits_for != error.message:
                        log.error("placement_cannot_arrive", cause=error.message)
                    cells.waits_for = error.message
                except Exception as error:  # a fault of ours must not end the wait for good
                    log.exception("placement_cannot_arrive")
                    cells.waits_for = f"internal error: {type(error).__name__}"
                waited = self._now_micros() - prepared.since_micros
                await asyncio.sleep(PREPARED_SECONDS if waited < LONG_MICROS else PREPARED_LONG_SECONDS)

    async def _look_at_prepared(self, prepared: Prepared, links: Sources, probe: int) -> int:
        """Looks once. `probe`: a probe of the links after all cells that the topics leave had the placement; 0: they
        did not have it so far. Returns it. Raises StoreError."""
        cells, places = self._cells, self._cells.places
        if prepared.is_over(places.placement, places.cell):
            await cells.arrived(prepared)  # the server ended before it had forgotten it
            return probe
        if not probe:
            cells.waits_for = await self._not_switched(prepared)
            if cells.waits_for:
                return 0
        if prepared.held(places.cell):
            asked = links.probe_sources()  # each time: with the answer a source also says how far it is
            probe = probe or asked
            if reason := cells.lacks(probe, prepared):
                cells.waits_for = reason
                return probe
            if reason := await self._not_switched(prepared, again=True):  # somebody may have placed the topics back
                cells.waits_for = reason
                return 0
        await cells.arrived(prepared)
        return probe

    async def unanswered(self, prepared: Prepared) -> str:
        """The reason why a server of a cell that the topics leave gives no answer here; "": all do. After the switch
        they have to, so a topic would be in no cell until they do."""
        for cell in sorted(set(prepared.leaves.values())):
            addresses = prepared.placement.cells[cell]
            for address, answer in zip(addresses, await asyncio.gather(*map(self._ask, addresses)), strict=True):
                if isinstance(answer, str):
                    return f"the cell {cell} has to answer at {address}: {answer}"
        return ""

    async def _not_switched(self, prepared: Prepared, *, again: bool = False) -> str:
        """The reason why a cell that the topics leave may take them; "": none does. `again`: they all have answered
        before that they do not, and need not answer once more."""
        places = self._cells.places
        wanted = prepared.wanted(places)
        digests = wanted.digest, prepared.placement.digest  # neither places the topics there
        for cell in sorted(set(prepared.leaves.values()) - {places.cell}):
            # A cell that has left the placement since may still take them.
            addresses = wanted.cells.get(cell) or prepared.placement.cells[cell]
            for address, answer in zip(addresses, await asyncio.gather(*map(self._ask, addresses)), strict=True):
                if isinstance(answer, str):
                    if again:
                        continue
                    return f"the cell {cell} has to answer at {address}: {answer}"
                if answer.cell and not answer.digest:
                    return f"the cell {cell} at {address} still applies changes of topics that it has given away"
                if answer.cell != cell or answer.digest not in digests:
                    return f"the cell {cell} at {address} has version {answer.version} of the placement"
        return ""

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
                details = error.details() or ""
                is_cut = error.code() is grpc.StatusCode.UNAVAILABLE and "refused" not in details
                hint = self._hint if is_cut else ""
                return f"{error.code().name}: {details[:MESSAGE_CHARACTERS_MAX]}{hint}"
            except asyncio.CancelledError:
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise
                return "the address has left the placement"  # so the channel was closed
        cell = found.cell[:MESSAGE_CHARACTERS_MAX]
        return Answer(cell, found.version, found.digest, found.strays_of_asking_cell)
