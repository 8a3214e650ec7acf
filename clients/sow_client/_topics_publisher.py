"""The blocking publisher of many topics: threads for each cell, and none for a topic (rule C22)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from sow.v1 import sow_pb2
from sow_client import _ends, _ignored, _process, _statuses
from sow_client._cells import Place
from sow_client._documents import Document
from sow_client._keys import Key
from sow_client._payloads import PayloadForm
from sow_client._publish_columns import BATCH_BYTES
from sow_client._publish_core import Ack
from sow_client._publisher import Sender, StreamCall
from sow_client._publisher_base import ANSWERS, Figures, leave
from sow_client._records import ExpireAt, Ttl
from sow_client._topics_core import TOPIC_BYTES, CellCore, TopicCore, Totals, refusals_of
from sow_client.errors import PublishFailed, Refusal


class Doors(Protocol):
    """Gives a publisher of many topics the use of its client."""

    def core(self, topic: str) -> TopicCore:
        """The core of another topic."""

    def cell(self, place: Place[Any]) -> CellCore:
        """The core of another cell."""

    def stream(
        self, core: CellCore, place: Place[Any], requests: Iterator[sow_pb2.PublishStreamRequest], /
    ) -> StreamCall:
        """Opens a stream to a cell."""

    def form(self, topic: str, anew: bool, /) -> PayloadForm:
        """The form of the payloads of a topic."""


class _Lane(Sender):
    """The publisher of one topic: it has a buffer, and no stream and no thread of its own."""

    def __init__(self, many: Many, core: TopicCore) -> None:
        super().__init__(
            core,
            _no_stream,
            form=partial(many.doors.form, core.topic),
            on_ack=many.on_ack and partial(many.on_ack, core.topic),
            on_refusal=many.on_refusal and partial(many.on_refusal, core.topic),
        )
        core.lane = self
        self._lane_core = core
        self._many = many
        self._made_at = many.made_at
        self._lock, self._progress = many.lock, many.progress
        self._cell: _Cell

    @property
    def _filled(self) -> int:
        return self._cell.cell_core.filled

    @_filled.setter
    def _filled(self, value: int) -> None:
        if hasattr(self, "_cell"):
            self._cell.cell_core.filled = value

    # ---- with the lock ----

    def settles_in(self, cell: _Cell) -> None:
        """Its records go to this cell from now on."""
        self._cell = cell
        cell.cell_core.attach(self._lane_core)
        self._idle = not self._pending
        cell._wake()
        self._progress.notify_all()

    def rests(self) -> None:
        self._idle = True

    def fails(self, error: BaseException) -> None:
        self._failure, self._stopped = error, True
        self._progress.notify_all()

    def leaves(self, delay: float) -> None:
        self._many.goes(self, delay)

    @property
    def is_unsettled(self) -> bool:
        """It has records that may still be settled."""
        return not self._stopped and self._core.unacknowledged > 0

    def _wake(self) -> None:
        if self._idle:
            self._idle = False
            if self._lane_core.cell is None:
                return  # `settles_in` looks at what is pending
            self._cell.cell_core.filled += TOPIC_BYTES
            self._cell.cell_core.pending.append(self._lane_core)
        if self._cell._idle:
            self._cell._wake()

    def _seal_all(self) -> None:
        while self._pending:
            if self._core.room:
                self._core.seal()
            else:
                self._cell._wake()
                self._await_progress()
        cell = self._cell
        if self._filled >= BATCH_BYTES:
            while cell.cell_core.pending and self._cell is cell:
                if cell.cell_core.room:
                    cell.cell_core.seal()
                else:
                    cell._wake()
                    self._await_progress()
            cell.cell_core.filled = 0
        cell._wake()

    def _await_progress(self) -> None:
        self._give_up = self._many.give_up
        super()._await_progress()


class _Cell(Sender):
    """The stream of a cell: its two threads."""

    def __init__(self, many: Many, place: Place[Any]) -> None:
        core = many.doors.cell(place)
        super().__init__(
            core,  # type: ignore[arg-type]  # it has what a machine uses of a `PublishCore`
            partial(many.doors.stream, core, place),
            on_ack=many.on_ack and partial(many.on_ack, ""),
            on_refusal=many.on_refusal and partial(many.on_refusal, ""),
        )
        self.cell_core = core
        self._many = many
        self._lock, self._progress = many.lock, many.progress
        self._work = threading.Condition(many.lock)

    def _run(self) -> None:
        super()._run()
        if self._failure is not None:
            with self._lock:
                self._many.failed(self._failure)

    def _answered(self) -> Sender:
        answered = self.cell_core.answered
        assert answered is not None
        assert isinstance(answered.lane, Sender)
        return answered.lane

    def _heed(self, ack: Ack) -> None:
        self._answered()._heed(ack)

    def _deliver(self, ack: Ack) -> None:
        self._answered()._deliver(ack)

    def _ask_again(self) -> None:
        """It has no documents."""

    def settle(self, give_up: float) -> None:
        self._many.settle(give_up)

    def finish(self, give_up: float) -> None:
        self._many.finish(give_up)


def _no_stream(requests: Iterator[sow_pb2.PublishStreamRequest], /) -> StreamCall:
    raise AssertionError("the stream is that of the cell")


class Many(_process.Owned):
    """The machine of a blocking publisher of many topics. As `Sender`, it does not refer to its publisher."""

    _what = "publisher"

    def __init__(
        self,
        doors: Doors,
        on_ack: Callable[[str, Ack], object] | None,
        on_refusal: Callable[[str, Refusal], object] | None,
    ) -> None:
        _process.tell(self)
        self.doors = doors
        self.on_ack = on_ack
        self.on_refusal = on_refusal
        self.made_at = _ignored.place()
        self.lock = threading.Lock()  # one for all: a topic goes from one cell to another under it
        self.progress = threading.Condition(self.lock)
        self.lanes: dict[str, _Lane] = {}
        self.cells: dict[str, _Cell] = {}
        self.give_up: float | None = None
        self.closing = False
        self.failure: BaseException | None = None

    def _forked(self) -> None:
        super()._forked()
        self.failure = self.failure or _process.forked(self._what)
        self.lock = threading.Lock()
        self.progress = threading.Condition(self.lock)

    def lane(self, topic: str) -> _Lane:
        """The publisher of a topic, from its first record on."""
        lane = self.lanes.get(topic)
        if lane is not None:
            return lane
        made = _Lane(self, self.doors.core(topic))
        with self.lock:
            if self.closing or self.failure is not None:
                raise self.failure or _statuses.closed("publisher")
            if topic not in self.lanes:
                made.settles_in(self._cell_of(made._lane_core))
                self.lanes[topic] = made
            return self.lanes[topic]

    # ---- with the lock ----

    def _cell_of(self, core: TopicCore) -> _Cell:
        cell = self.cells.get(core.place.key)
        if cell is None:
            cell = self.cells[core.place.key] = _Cell(self, core.place)
        return cell

    def goes(self, lane: _Lane, delay: float) -> None:
        """A topic goes to where it lives, after a while."""
        if self.closing:
            return
        if not delay:
            lane.settles_in(self._cell_of(lane._lane_core))
            return
        timer = threading.Timer(delay, self._arrives, [lane])
        timer.daemon = True
        timer.start()

    def _arrives(self, lane: _Lane) -> None:
        with self.lock:
            if not lane._stopped:
                lane.settles_in(self._cell_of(lane._lane_core))

    def failed(self, failure: BaseException) -> None:
        """The publisher ends with what has ended a thread, such as an exception of a callback."""
        self.failure = self.failure or failure
        for lane in self.lanes.values():
            lane.fails(lane._failure or failure)

    def _drain(self) -> None:
        while True:
            if self.failure is not None:
                raise self.failure
            if self.closing:
                raise _statuses.closed("publisher")
            for cell in self.cells.values():
                while cell.cell_core.pending and cell.cell_core.room:
                    cell.cell_core.seal()
                cell._wake()
            unsettled = any(lane.is_unsettled for lane in self.lanes.values())
            if not unsettled and not any(cell._delivering for cell in self.cells.values()):
                return
            left = None if self.give_up is None else self.give_up - time.monotonic()
            if left is not None and left <= 0:
                raise _statuses.out_of_time(ANSWERS)
            self.progress.wait(left)

    def refusals(self) -> PublishFailed | None:
        """The refusals of all topics since the last call."""
        taken = {topic: lane._core.take_refusals() for topic, lane in self.lanes.items()}
        return refusals_of({topic: failed for topic, failed in taken.items() if failed is not None})

    # ---- without it ----

    def flush(self) -> None:
        """As `TopicsPublisher.flush`."""
        with self.lock:
            self._drain()
            failed = self.refusals()
            broken = next((lane._failure for lane in self.lanes.values() if lane._failure is not None), None)
        if self.on_refusal is not None:
            failed = None
        if broken is not None:
            if failed is not None:
                broken.add_note(f"records were refused, too: {failed}")
            raise broken
        if failed is not None:
            raise failed

    def abort(self) -> None:
        """As `TopicsPublisher.abort`."""
        with self.lock:
            self.closing = True
            for lane in self.lanes.values():
                lane._closing = lane._stopped = True
            cells = list(self.cells.values())
        for cell in cells:
            cell._end()
        for cell in cells:
            cell.abort()

    @property
    def unacknowledged(self) -> int:
        """Records of all topics that are not yet settled."""
        return sum(lane._core.unacknowledged for lane in list(self.lanes.values()))

    def dropped(self) -> None:
        """As `Sender.dropped`."""
        if not self.closing:
            give_up = time.monotonic() + _ends.FLUSH_SECONDS_MAX
            threading.Thread(target=self.finish, args=(give_up,), name="sow-publisher-end", daemon=True).start()

    def settle(self, give_up: float) -> None:
        """See `_ends.Unfinished`."""
        try:
            with self.lock:
                self.give_up = give_up
                self._drain()
        except Exception:  # noqa: BLE001, S110 - also of a callback; `finish` tells of it
            pass
        finally:
            self.give_up = None

    def finish(self, give_up: float) -> None:
        """See `_ends.Unfinished`."""
        if self.closing:
            return
        late, self.give_up, why = self.unacknowledged, give_up, ""
        try:
            self.flush()
            if late:
                why = f"{late} records were sent at its end"
        except BaseException as error:  # noqa: BLE001 - also of a callback
            left = self.unacknowledged
            why = f"{left} records may not have been sent ({error})" if left else str(error)
        self.abort()
        if why and self.lanes:
            next(iter(self.lanes.values()))._warn_of_end(why)


class TopicsPublisher(Figures):
    """Publishes to many topics: buffered, pipelined, and the records of each topic in their order, each applied once.

    Made by `Client.topics_publisher`; use it in a `with` block. Each topic is on one thread; two topics may be on two.
    There is one stream for each cell, which carries the batches of all topics there. What waits is bounded for each
    cell: `publish` waits while too much of its topic's cell is unacknowledged. A topic that moves takes its records
    along. A topic fails alone: `publish` to it, `flush` and the end of the block raise its error, whose details name
    the `topic`, and the other topics go on. So a cell that is down stops its own topics.

    Refusals are collected and raised as PublishFailed, with `topics`, by `flush` and at the end of the block. Callbacks
    get the topic first. They run on the publisher's own threads, one for each cell, and must not call the publisher.

    Rules: C22, P6.
    """

    def __init__(
        self,
        doors: Doors,
        on_ack: Callable[[str, Ack], object] | None,
        on_refusal: Callable[[str, Refusal], object] | None,
    ) -> None:
        self._many = many = Many(doors, on_ack, on_refusal)
        self._core = Totals(lambda: [lane._core for lane in list(many.lanes.values())])  # type: ignore[assignment]  # sums

    @property
    def _closing(self) -> bool:  # type: ignore[override]  # read only
        return self._many.closing

    def __repr__(self) -> str:
        settled = f"{self.acknowledged} records acknowledged, {self.unacknowledged} not yet, {self.refused} refused"
        return f"{type(self).__name__}({len(self._many.lanes)} topics, {settled}{', closed' if self._closing else ''})"

    def publish(
        self,
        topic: str,
        data: Document,
        *,
        key: Key | None = None,
        ttl: Ttl | None = None,
        expire_at: ExpireAt | None = None,
    ) -> None:
        """Takes one record of a topic; see `Publisher.publish`. May wait for room in the cell of the topic."""
        lane = self._many.lanes.get(topic)
        (lane or self._many.lane(topic)).publish(data, key=key, ttl=ttl, expire_at=expire_at)

    def remove(self, topic: str, key: Key | None = None, *, data: Document | None = None) -> None:
        """Takes a removal of a topic; see `Publisher.remove`."""
        self._many.lane(topic).remove(key, data=data)

    def flush(self) -> None:
        """Returns once all records of all topics are settled. Raises the error of a topic that has failed, once the
        others are settled; otherwise PublishFailed for refusals since the last flush."""
        self._many.flush()

    def close(self) -> None:
        """Flushes and ends the streams. It may be called again. Raises as `flush` does."""
        try:
            if not self._closing:
                self.flush()
        finally:
            self.abort()

    def abort(self) -> None:
        """Ends the streams at once. Unacknowledged records may or may not have been applied."""
        self._many.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        return leave(error, self.close, self.abort)

    def __del__(self) -> None:
        many = getattr(self, "_many", None)
        if many is not None and not many.closing and not many._is_parents:
            _ends.hand_over(many.dropped)
