# Generated from aio/_joining.py by clients/generate_blocking.py. Change that file, then run `make client`.
"""Following the topics of a pattern in all cells, as `_joined_core` says it (rule C21)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import length_hint
from typing import Final, Protocol, TypeAlias

from sow.v1 import sow_pb2
from sow_client import _process, _statuses
from sow_client._cells import Place, Way
from sow_client._joined_core import JoinedCore, PartCore, alone, came, gone
from sow_client._subscription import OpenSubscription, SubscribeCall, Subscription
from sow_client._workers import Condition, Fault, Guard, Worker
from sow_client.blocking._moving import Transport
from sow_client.errors import InvalidArgument, SowError

LOOK_SECONDS: Final = 10.0
"""How often home is asked for its cells: as often as cells look at each other (rule C7)."""


Places: TypeAlias = Mapping[str, Place[Transport]]
"""The cells by name; {"": home} without a placement."""


class OpenPart(Protocol):
    """A client's Subscribe on the way to a certain cell."""

    def __call__(
        self,
        way: Way[Transport],
        home: None,
        request: sow_pb2.SubscribeRequest,
        /,
        *,
        connect_seconds: float | None = None,
    ) -> SubscribeCall: ...


@dataclass(frozen=True, slots=True)
class CellCalls:
    """The calls of a client that a joined subscription makes."""

    places: Callable[[], Places]
    """Asks home for the cells."""
    way_to: Callable[[Place[Transport]], Way[Transport]]
    version: Callable[[Way[Transport]], int]
    """Asks a cell for the version of its placement."""
    open_call: OpenPart


class JoinedSubscription(Subscription):
    """The subscription to a pattern: an `Subscription` in each cell, joined. Without cells it is as any other.

    The changes of a topic come in their order. A cell that comes with another placement joins by itself. When a cell is
    interrupted, the others go on, and `cells` says which one is missing.

    Rule: C21.
    """

    # What its workers need is in `Parts`, which does not refer to it: dropping the last reference to it ends them.

    def __init__(self, core: JoinedCore, calls: CellCalls) -> None:
        parts = Parts(core, calls)
        super().__init__(core, parts.opening(core.home))
        self._joined = core
        self._home = Subscription(core.home, parts.opening(core.home))
        self._parts = parts

    def _forked(self) -> None:
        super()._forked()
        _process.keep(self._parts)

    def open(self) -> None:
        """As that of any subscription. A cell that does not answer is told as an interruption, and the others go on. If
        the subscription begins now and without a snapshot, changes would be missing: then it raises Unavailable."""
        self._check_process()
        parts = self._parts
        while parts.found is None:
            if not self._advance():
                raise _statuses.closed("subscription")
        if self._joined.is_single:
            self._home.open()
            return
        with parts.guard:
            while not self._joined.stood and not self._is_ended(parts):
                parts.changed.wait()
        self._joined.tell()
        self._ended_by(parts)
        if parts.is_over:
            raise _statuses.closed("subscription")

    def close(self) -> None:
        """As that of any subscription."""
        super().close()
        self._home.close()
        self._parts.close()

    @property
    def bookmark(self) -> str | Mapping[str, str] | None:  # type: ignore[override]  # a topic has one position
        """As that of any subscription. Over several cells it is a mapping from the cells to their bookmarks: give it as
        the `start`. A cell that it lacks begins with its earliest change."""
        return self._joined.bookmarks

    @property
    def cells(self) -> Mapping[str, SowError | None]:
        """As that of any subscription."""
        return self._joined.cells()

    def call_again(self) -> None:
        """As that of any subscription."""
        self._home.call_again()
        for subscription, _, _ in self._parts.running:
            subscription.call_again()

    def __del__(self) -> None:
        if not self._is_parents and hasattr(self, "_parts"):  # else it was never made
            self._parts.drop()

    def _advance(self, give_up: float | None = None) -> bool:
        core, parts = self._joined, self._parts
        if parts.found is None or core.is_single:
            try:
                goes_on = self._home._advance(give_up)
            except SowError:
                self.close()
                raise
            if parts.found is not None and core.parts is None:
                with parts.guard:
                    parts.join(self._home)
            if core.is_single:
                core.pending = core.home.pending
            core.tell()
            return goes_on
        is_handed_out = is_late = False
        while not is_handed_out and not is_late:
            with parts.guard:
                parts.changed.notify_all()  # the frame before was handed out
                while not (is_handed_out := core.next_frame()) and not self._is_ended(parts) and not core.has_heard:
                    left = None if give_up is None else give_up - time.monotonic()
                    if is_late := left is not None and left <= 0:
                        break
                    parts.changed.wait(left)
                    if parts.found is not parts.joined:
                        parts.join(self._home)
            core.tell()  # also while no cell has a frame
            if self._is_ended(parts):
                break
        self._ended_by(parts)
        return is_handed_out

    def _is_ended(self, parts: Parts) -> bool:
        return bool(parts.is_over or parts.failure or self._joined.nothing)

    def _ended_by(self, parts: Parts) -> None:
        error = parts.failure or self._joined.nothing
        if error is not None:
            self.close()
            raise error


class Parts:
    """The parts of a joined subscription: each has a worker that keeps its next frame at hand."""

    def __init__(self, core: JoinedCore, calls: CellCalls) -> None:
        self.guard = Guard()
        self.changed = Condition(self.guard)
        self.found: Places | None = None
        """The cells, as home has named them last; None: it has not yet."""
        self.joined: Places | None = None
        """Those that have a part."""
        self.is_over = False
        self.failure: BaseException | None = None
        self.running: list[tuple[Subscription, PartCore, Worker]] = []
        self._core = core
        self._calls = calls
        self._looking = Worker("sow-cells")

    def opening(self, part: PartCore) -> OpenSubscription:
        """Makes the calls of a part."""
        return partial(self._open, part)

    def _open(
        self, part: PartCore, request: sow_pb2.SubscribeRequest, *, connect_seconds: float | None = None
    ) -> SubscribeCall:
        is_first = self.found is None
        if part.interruption is not None:
            with self.guard:  # whoever waits for a frame tells the program of it
                self.changed.notify_all()
        if self.found is None:  # of home
            found = self._calls.places()
            (name,) = (cell for cell, place in found.items() if not place.key)
            self._core.begin(name, request, found)
            self.found = found
        elif part.placement_is_old:
            self.look()
        place = self.found.get(part.cell)
        if place is None:
            raise gone(part.cell)
        way = self._calls.way_to(place)
        if part.cell and part.placed(self._calls.version(way), request):
            self._go_back(part)
        call = self._calls.open_call(way, None, request, connect_seconds=connect_seconds)
        if not (is_first or part.cell) and self._has_cells():
            call.cancel()
            part.is_cell = True
            raise came()
        return call

    def _has_cells(self) -> bool:
        """True if a server that had no placement has one now. It is asked once a connection."""
        with suppress(SowError):
            return "" not in self._calls.places()
        return False

    def _go_back(self, than: PartCore) -> None:
        """Parts that an older one has overtaken go back, as that one has ended now."""
        with self.guard:
            back = self._core.newer(than)
            again = [(subscription, part) for subscription, part, _ in self.running if part in back]
        for subscription, part in again:
            self._look_at(part)
            if part.is_to_end:
                subscription.call_again()

    def check(self, subscription: Subscription, part: PartCore) -> None:
        """A call of a part has begun: its cell had the placement of before."""
        if self.found is None or (place := self.found.get(part.cell)) is None:
            return
        with suppress(SowError):
            if not part.began(self._calls.version(self._calls.way_to(place))):
                subscription.call_again()

    def look(self) -> None:
        """Asks home for the cells, if it answers."""
        failure: SowError | None = None
        found = self.found
        try:
            found = self._calls.places()
        except InvalidArgument as error:
            failure = error  # it does not go to a cell that has come, and would miss its topics
        except SowError:
            return
        if found is not None and "" in found:
            failure = alone()
        with self.guard:
            if failure is None:
                self.found = found
            self.failure = self.failure or failure
            self.changed.notify_all()

    def look_at_each(self) -> None:
        """Asks each cell for its placement, if it answers."""
        for _, part, _ in list(self.running):
            self._look_at(part)

    def _look_at(self, part: PartCore) -> None:
        if self.found is not None and (place := self.found.get(part.cell)) is not None:
            with suppress(SowError):
                way = self._calls.way_to(place)
                version = self._calls.version(way)
                if not part.knows(version):
                    part.saw(version, self._position(way))

    def _position(self, way: Way[Transport]) -> str | None:
        """That of a cell now."""
        probe = Subscription(self._core.probe(), partial(self._calls.open_call, way, None))
        try:
            probe.open()
            return probe.bookmark
        finally:
            probe.close()

    def join(self, home: Subscription) -> None:
        """Each cell that has come gets a part. Without a placement there is that of home, which needs no worker."""
        assert self.found is not None, "home has named them"
        come, self.joined = self._core.found(self.found), self.found
        if self._core.is_single or self.is_over:  # `close` may have come from another thread
            return
        for part in come:
            subscription = home if part is self._core.home else Subscription(part, self.opening(part))
            worker = Worker("sow-subscription-part")
            self.running.append((subscription, part, worker))
            worker.start(_carry, self, subscription, part)
        self._looking.start(_look, self)

    def ended(self, part: PartCore, error: BaseException) -> None:
        """A part cannot go on."""
        if part.is_over:
            self._go_back(part)
        with self.guard:
            if part.is_over:
                self._core.drop(part)
            else:
                self.failure = self.failure or error
            self.changed.notify_all()

    def close(self) -> None:
        """Ends all parts."""
        with self.guard:
            self.is_over = True
            self.changed.notify_all()
        for subscription, _, worker in self.running:
            subscription.close()
            worker.end()
        self._looking.end()

    def drop(self) -> None:
        """Ends all parts, from a finalizer."""
        for _, _, worker in self.running:
            worker.drop(self.close)
        self._looking.drop(self.close)


def _carry(parts: Parts, subscription: Subscription, part: PartCore) -> None:
    """Keeps the next frame of a cell at hand."""
    try:
        while True:
            if part.is_new:
                parts.check(subscription, part)
            with parts.guard:
                while length_hint(part.pending) and not parts.is_over:
                    parts.changed.wait()
            if not subscription._advance():
                return
            if part.is_to_end:
                subscription.call_again()
            with parts.guard:
                parts.changed.notify_all()
    except Fault as error:  # whoever reads the subscription gets it
        parts.ended(part, error)


def _look(parts: Parts) -> None:
    """Looks for cells that have come."""
    while True:
        with parts.guard:
            parts.changed.wait_for(lambda: parts.is_over, LOOK_SECONDS)
            if parts.is_over:
                return
        parts.look()
        parts.look_at_each()
