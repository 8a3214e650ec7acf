"""The asynchronous publisher of many topics: a task for each cell, and none for a topic (rule C22)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from sow.v1 import sow_pb2
from sow_client import _ignored, _process, _statuses
from sow_client._aio_publisher import AioStreamCall, AsyncPublisher
from sow_client._cells import Place
from sow_client._documents import Document
from sow_client._keys import Key
from sow_client._payloads import PayloadForm
from sow_client._publish_columns import BATCH_BYTES
from sow_client._publish_core import Ack
from sow_client._publisher_base import Figures, leave_async
from sow_client._records import ExpireAt, Ttl
from sow_client._topics_core import TOPIC_BYTES, CellCore, TopicCore, Totals, refusals_of
from sow_client.errors import Refusal


class AioDoors(Protocol):
    """Gives a publisher of many topics the use of its client; see `Doors`."""

    def core(self, topic: str) -> TopicCore: ...

    def cell(self, place: Place[Any]) -> CellCore: ...

    def stream(
        self, core: CellCore, place: Place[Any], requests: AsyncIterator[sow_pb2.PublishStreamRequest], /
    ) -> Awaitable[AioStreamCall]: ...

    def form(self, topic: str, anew: bool, /) -> Awaitable[PayloadForm]: ...


class _Lane(AsyncPublisher):
    """The publisher of one topic: it has a buffer and a timer, and no stream and no task of its own."""

    def __init__(self, many: AsyncTopicsPublisher, core: TopicCore) -> None:
        super().__init__(
            core,
            _no_stream,
            form=partial(many._doors.form, core.topic),
            on_ack=many._on_ack and partial(many._on_ack, core.topic),
            on_refusal=many._on_refusal and partial(many._on_refusal, core.topic),
        )
        core.lane = self
        self._lane_core = core
        self._many = many
        self._made_at = many._made_at
        self._progress = many._progress
        self._cell: _Cell

    @property
    def _filled(self) -> int:
        return self._cell.cell_core.filled

    @_filled.setter
    def _filled(self, value: int) -> None:
        if hasattr(self, "_cell"):
            self._cell.cell_core.filled = value

    def settles_in(self, cell: _Cell) -> None:
        """Its records go to this cell from now on."""
        self._cell = cell
        cell.cell_core.attach(self._lane_core)
        cell.sweep()
        self._progress.set()

    def rests(self) -> None:
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None

    def fails(self, error: BaseException) -> None:
        self._failure, self._stopped = error, True
        self.rests()
        self._progress.set()

    def leaves(self, delay: float) -> None:
        self._many._goes(self, delay)

    @property
    def is_unsettled(self) -> bool:
        """It has records that may still be settled."""
        return not self._stopped and self._core.unacknowledged > 0

    def _lingered(self) -> None:
        self._linger = None
        if not self._stopped and self._pending and self._lane_core.cell is not None:
            self._cell.cell_core.filled += TOPIC_BYTES
            self._cell.cell_core.pending.append(self._lane_core)
            self._cell.sweep()

    async def _seal_all(self) -> None:
        while self._pending:
            if self._core.room:
                self._core.seal()
                self._cell._start()
            else:
                await self._await_progress()
        self.rests()
        if self._filled >= BATCH_BYTES:
            await self._many._seal(self._cell, self)

    def __del__(self) -> None:
        """Its publisher warns."""


class _Cell(AsyncPublisher):
    """The stream of a cell: its task."""

    def __init__(self, many: AsyncTopicsPublisher, place: Place[Any]) -> None:
        core = many._doors.cell(place)
        super().__init__(
            core,  # type: ignore[arg-type]  # it has what a machine uses of a `PublishCore`
            partial(many._doors.stream, core, place),
        )
        self.cell_core = core
        self._many = many
        self._progress = many._progress

    async def _run(self) -> None:
        await super()._run()
        if self._failure is not None:
            self._many._failed(self._failure)

    def sweep(self) -> None:
        """Seals what has lingered, as far as there is room; the rest when there is."""
        while self.cell_core.pending and self.cell_core.room:
            self.cell_core.seal()
        self._overdue = bool(self.cell_core.pending)
        if self.cell_core.has_requests:
            self._start()

    _lingered = sweep

    def _answered(self) -> AsyncPublisher:
        answered = self.cell_core.answered
        assert answered is not None
        assert isinstance(answered.lane, AsyncPublisher)
        return answered.lane

    def _heed(self, ack: Ack) -> None:
        self._answered()._heed(ack)

    def _deliver(self, ack: Ack) -> None:
        self._answered()._deliver(ack)

    def _ask_again(self) -> None:
        """It has no documents."""

    def __del__(self) -> None:
        """Its publisher warns."""


async def _no_stream(requests: AsyncIterator[sow_pb2.PublishStreamRequest], /) -> AioStreamCall:
    raise AssertionError("the stream is that of the cell")


class AsyncTopicsPublisher(Figures, _process.Owned):
    """`TopicsPublisher` for asyncio: the same calls with `await`; each topic is used by one task. Callbacks run on the
    event loop."""

    _what = "publisher"
    _closing = False

    def __init__(
        self,
        doors: AioDoors,
        on_ack: Callable[[str, Ack], object] | None,
        on_refusal: Callable[[str, Refusal], object] | None,
    ) -> None:
        _process.tell(self)
        self._doors = doors
        self._on_ack = on_ack
        self._on_refusal = on_refusal
        self._made_at = _ignored.place()
        self._progress = asyncio.Event()
        self._lanes: dict[str, _Lane] = {}
        self._cells: dict[str, _Cell] = {}
        self._failure: BaseException | None = None
        self._core = Totals(lambda: [lane._core for lane in self._lanes.values()])  # type: ignore[assignment]  # sums

    def __repr__(self) -> str:
        settled = f"{self.acknowledged} records acknowledged, {self.unacknowledged} not yet, {self.refused} refused"
        return f"{type(self).__name__}({len(self._lanes)} topics, {settled}{', closed' if self._closing else ''})"

    def _forked(self) -> None:
        super()._forked()
        self._failure = self._failure or _process.forked(self._what)

    async def publish(
        self,
        topic: str,
        data: Document,
        *,
        key: Key | None = None,
        ttl: Ttl | None = None,
        expire_at: ExpireAt | None = None,
    ) -> None:
        """Takes one record of a topic; see `Publisher.publish`. May wait for room in the cell of the topic."""
        lane = self._lanes.get(topic)
        await (lane or self._lane(topic)).publish(data, key=key, ttl=ttl, expire_at=expire_at)

    async def remove(self, topic: str, key: Key | None = None, *, data: Document | None = None) -> None:
        """Takes a removal of a topic; see `Publisher.remove`."""
        await self._lane(topic).remove(key, data=data)

    def _lane(self, topic: str) -> _Lane:
        lane = self._lanes.get(topic)
        if lane is None:
            if self._closing or self._failure is not None:
                raise self._failure or _statuses.closed("publisher")
            lane = _Lane(self, self._doors.core(topic))
            lane.settles_in(self._cell_of(lane._lane_core))
            self._lanes[topic] = lane
        return lane

    def _cell_of(self, core: TopicCore) -> _Cell:
        cell = self._cells.get(core.place.key)
        if cell is None:
            cell = self._cells[core.place.key] = _Cell(self, core.place)
        return cell

    def _goes(self, lane: _Lane, delay: float) -> None:
        if delay and not self._closing:
            asyncio.get_running_loop().call_later(delay, self._arrives, lane)
        else:
            self._arrives(lane)

    def _arrives(self, lane: _Lane) -> None:
        if not lane._stopped:
            lane.settles_in(self._cell_of(lane._lane_core))

    def _failed(self, failure: BaseException) -> None:
        self._failure = self._failure or failure
        for lane in self._lanes.values():
            lane.fails(lane._failure or failure)

    async def _seal(self, cell: _Cell, lane: _Lane) -> None:
        """Seals all that a cell has buffered; it is too much."""
        core = cell.cell_core
        core.pending.extend(one for one in core.cores.values() if one.pending)
        cell.sweep()
        while core.pending and lane._cell is cell:
            await lane._await_progress()
            cell.sweep()
        core.filled = 0

    async def flush(self) -> None:
        """Returns once all records of all topics are settled. Raises the error of a topic that has failed, once the
        others are settled; otherwise PublishFailed for refusals since the last flush."""
        while True:
            if self._failure is not None:
                raise self._failure
            if self._closing:
                raise _statuses.closed("publisher")
            for cell in self._cells.values():
                cell.cell_core.pending.extend(one for one in cell.cell_core.cores.values() if one.pending)
                cell.sweep()
            if not any(lane.is_unsettled for lane in self._lanes.values()):
                break
            self._progress.clear()
            await self._progress.wait()
        taken = {topic: lane._core.take_refusals() for topic, lane in self._lanes.items()}
        failed = refusals_of({topic: one for topic, one in taken.items() if one is not None})
        if self._on_refusal is not None:
            failed = None
        broken = next((lane._failure for lane in self._lanes.values() if lane._failure is not None), None)
        if broken is not None:
            if failed is not None:
                broken.add_note(f"records were refused, too: {failed}")
            raise broken
        if failed is not None:
            raise failed

    async def close(self) -> None:
        """Flushes and ends the streams. It may be called again. Raises as `flush` does."""
        try:
            if not self._closing:
                await self.flush()
        finally:
            await self.abort()

    async def abort(self) -> None:
        """Ends the streams at once. Unacknowledged records may or may not have been applied."""
        self._closing = True
        for lane in self._lanes.values():
            lane._closing = lane._stopped = True
            lane.rests()
        await asyncio.gather(*(cell.abort() for cell in self._cells.values()))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        return await leave_async(error, self.close, self.abort)

    def __del__(self) -> None:
        # As that of `AsyncPublisher`: the loop has ended.
        if self._is_parents or self._closing:
            return
        for lane in getattr(self, "_lanes", {}).values():
            if lane.is_unsettled:
                lane._warn_of_end(f"{lane._core.unacknowledged} records may not have been sent")
