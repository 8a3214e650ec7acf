"""Following topics of several cells as one subscription (rule C21). Pure: no I/O, no threads, no clock.

A pattern may match topics of all cells. The subscription to it has a part for each cell, and a part is a
`SubscriptionCore` of its own: it has a position, calls again after a break, and tells why it cannot go on.

                 frames of a          ┌───────────┐
    cell a  ────────────────▶  part a │           │ take_up
                 frames of b          │   joined  ├─────────▶  changes, in the order of each topic
    cell b  ────────────────▶  part b │           │
                                      └───────────┘

    [1]  One frame of each part is at hand. Parts take turns, so no cell keeps the others waiting. Changes of one topic
         come from one part, in their order.
    [2]  The bookmark is a map: cell → the position after the changes of that cell that were handed out, and the version
         of its placement. With another version, topics may have left the cell before all their changes were told.
    [3]  A cell without a topic that matches is asked again every `EMPTY_SECONDS`. Its first topic is followed from its
         first change.
    [4]  "snapshot_end" is told once no cell owes its snapshot. A "resync" of one cell names each topic that was shown
         from there. A topic that another cell shows from now on is told as a "resync", too.
    [5]  A topic that moves is shown by two parts in turn. The cell that it leaves ends the call once it has sent all
         changes of it. If that part hands out changes of the topic after the newer part, the newer one goes back to its
         first change of it once the older one has ended: so the last state of a record comes last. Its own call is not
         ended for that while its cell may still owe changes of a topic that has left there, as where two topics swap
         their cells. Under snapshots the changes of the older part are left out.
    [6]  Without a placement there is one part, and all is as if that were the subscription itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import length_hint
from typing import Final

from msgspec import structs

from sow.v1 import sow_pb2
from sow_client import _statuses
from sow_client._change_frames import marks_of, prefix_of
from sow_client._records import Change, invalid
from sow_client._subscription_core import SubscriptionCore
from sow_client.errors import ResyncRequired, SowError, Unavailable

EMPTY_SECONDS: Final = 1.0
NOTHING: Final = "PATTERN_MATCHES_NOTHING"
_GONE: Final = "CELL_GONE"
_PLACED: Final = ";p="
"""In front of the version of the placement, at the end of a bookmark of a map ([2])."""
_ANY: Final = -1
_NO_CHANGES: Final[Iterator[Change]] = iter(())


class PartCore(SubscriptionCore):
    """The part of one cell. `cell` is empty until the placement is known, and where there is none ([6])."""

    def __init__(
        self,
        request: sow_pb2.SubscribeRequest,
        *,
        retry_for: float,
        connect_timeout: float,
        on_interruption: Callable[[SowError | None], object],
    ) -> None:
        own = sow_pb2.SubscribeRequest()
        own.CopyFrom(request)
        super().__init__(own, retry_for=retry_for, connect_timeout=connect_timeout, on_interruption=self._heard)
        self.cell = ""
        self.empty: SowError | None = None
        """No topic there matches ([3]); None: one does, as far as is known."""
        self.has_emptied = False
        """That has just begun, and its topics are to be forgotten."""
        self.interruption: SowError | None = None
        """Why it waits for its cell; None: it does not."""
        self.is_over = False
        """The cell has left the placement."""
        self.is_cell = False
        """There was no placement as it began, and now there is one."""
        self.placement_is_old = False
        """It has ended as it does with another placement: home is asked before the next call."""
        self.version = 0
        """The placement of its cell, as its present call began; 0: it was not asked."""
        self.is_overtaken = False
        """An older part has handed out changes of a topic after this one ([5])."""
        self.back_to: str | None = None
        """The position before its first change of a topic that it has taken over ([5])."""
        self.calls = 0
        self._began_at: str | None = None  # its position at the begin with this placement; empty: the earliest change
        self._seen = 0, 0, ""  # the version of the cell while a call went on, the number of that call, and a position
        self._goes_back = False
        self._left_at = 0  # with this placement the cell has ended the call, and had sent everything of what has left
        self._heard_of = 0  # this placement has ended a call
        self._checked = 0  # the number of the call whose begin was checked
        self._owes_nothing = 0  # the number of the call of which nothing is lost if it is ended
        self._had_none = False  # no topic of the cell matched before the present call
        self._hears = on_interruption

    def begin(self, cell: str, start: str | None, first: sow_pb2.SubscribeRequest | None = None) -> None:
        """Its cell is known. `start`: the bookmark of that cell; empty: its earliest change; None: as the program has
        said for all cells. `first`: the request of its first call, if it is made already, and not sent."""
        self.cell = cell
        if start is None:
            return
        plain, _, version = start.rpartition(_PLACED)
        if version.isdecimal() and plain:
            start, self.version = plain, int(version)
        for one in (self._request, first):
            if one is not None and start:
                one.bookmark = start
            elif one is not None:
                one.earliest = True
        self._position, self._prefix, self._marks = start, prefix_of(start), marks_of(start)

    def placed(self, version: int, call: sow_pb2.SubscribeRequest) -> bool:
        """The placement of its cell, before a call is made. True: it is another one than before. Raises
        ResyncRequired."""
        self.calls += 1
        version = max(version, self._heard_of)  # a cell names it to others a little after it has taken it into use
        before, self.version = self.version, version
        self._had_none = self._left_at == _ANY
        in_order = self._left_at in (version, _ANY)
        self._go_back(call)
        if version == before:
            return False
        self.is_overtaken, self.back_to = False, None
        self._began_at = self._position or ("" if call.earliest else None)
        if not before:
            return False
        if not (in_order or self._request.sow):
            raise ResyncRequired(
                "it has another placement since it was followed last: changes of topics that have left may be missing",
                reason="RESYNC_REQUIRED",
            )
        if self._request.sow:
            self._snapshot = call.sow = True
            call.ClearField("bookmark")
            call.ClearField("view")
        return True

    @property
    def is_new(self) -> bool:
        """Its call has begun, and the cell is to be asked for its placement once more: see `began`."""
        return self._checked != self.calls and (self._standing or self.empty is not None)

    def began(self, version: int) -> bool:
        """The cell has this placement after the begin of a call. False: it has come about that time. Topics may have
        left before it, and the next call tells so."""
        self._checked = self.calls
        if version <= self.version or self._had_none:
            return True  # it tells all of a topic that has come, and its end tells of one that leaves
        self._left_at = 0
        return False

    def knows(self, version: int) -> bool:
        """The cell has this placement now. False: `saw` is to tell of it. Nothing of the call is lost where it has
        reached a position from after the begin of that placement: topics that have left would be handed over before."""
        self._owes_nothing = 0
        if version > self.version and self._standing:
            seen, call, after = self._seen
            if (seen, call) != (version, self.calls):
                return False
            if not _is_behind(after, self.bookmark):
                return True
            self.version = version
        self._owes_nothing = self.calls
        return True

    def saw(self, version: int, position: str | None) -> None:
        """The cell has had this placement at a position."""
        self._seen = version, self.calls, position or ""

    def go_back(self) -> None:
        """The next call begins before its first change of a topic that it has taken over ([5])."""
        self.is_overtaken, self._goes_back = False, True

    @property
    def is_to_end(self) -> bool:
        """Its call is to be ended, as it goes back, and its cell owes no change of a topic that has left: that would be
        passed over."""
        if not (self._goes_back and self._standing):
            return False
        version, call, _ = self._seen
        if call == self.calls:
            self.knows(version)
        return self._owes_nothing == self.calls

    def _go_back(self, call: sow_pb2.SubscribeRequest) -> None:
        if not self._goes_back:
            return
        self._goes_back = False
        self._sequence = self._repeated = 0
        self._position = self._before
        self.back_to = None
        if self._position:
            call.bookmark = self._position
        else:
            call.earliest = True

    @property
    def _before(self) -> str:
        return (self._began_at if self.back_to is None else self.back_to) or ""

    @property
    def resumes_at(self) -> str | None:
        """The place where another subscription goes on ([2]); empty: its earliest change; None: there is none."""
        position = self._before if self.is_overtaken or self._goes_back else self.bookmark
        if position is None:
            return "" if self.begins_at_earliest else None
        return f"{position}{_PLACED}{self.version}" if position and self.version else position

    @property
    def is_settled(self) -> bool:
        """It follows its cell, or has told why it does not yet."""
        return self.stood or self.empty is not None or self.interruption is not None

    @property
    def begins_at_earliest(self) -> bool:
        """It has no position, and would begin with the earliest change in another subscription, too."""
        return self.empty is not None or (self._request.earliest and not self._request.bookmark)

    @property
    def _lasts(self) -> bool:
        # A cell that is down keeps no other one waiting, if nothing is missed until it is there.
        request = self._request
        starts = request.sow or request.bookmark or request.earliest or request.start_time_micros
        return self.stood or self.empty is not None or bool(self.cell and starts)

    def _heard(self, interruption: SowError | None) -> None:
        self.interruption = interruption
        self._hears(interruption)

    def hand_out(self, changes: Sequence[Change]) -> None:
        """These are the changes of the current frame, of which none was handed out."""
        self._changes, self.pending = changes, iter(changes)

    def feed(self, response: sow_pb2.SubscribeResponse) -> None:
        """As `SubscriptionCore.feed`."""
        super().feed(response)
        self.empty = None
        if self._began_at is None:
            self._began_at = self._after or self._position

    def request(self, *, now: float) -> sow_pb2.SubscribeRequest:
        """As `SubscriptionCore.request`."""
        request = super().request(now=now)
        if self.empty is not None:
            self.behind = False
            if not (request.sow or request.bookmark or request.start_time_micros):
                request.earliest = True
        return request

    def ended(self, error: SowError, *, now: float, jitter: float) -> float:
        """As `SubscriptionCore.ended`."""
        if self.is_cell:
            raise self._failure(error)
        if not self.cell:
            return super().ended(error, now=now, jitter=jitter)
        placed = error.details.get("placement_version", "") if error.reason == "ACCESS_CHANGED" else ""
        self._heard_of = max(self._heard_of, int(placed) if placed.isdecimal() else 0)
        if self._standing:
            self._left_at = self._heard_of if placed and error.details.get("complete") == "true" else 0
        if self._goes_back and self._standing:
            return 0.0  # that call is over; one that fails before it stands is as any other
        if error.reason == NOTHING:
            self._left_at = _ANY  # it has no topic that could have left
            self._backoff.reset()
            self.has_emptied = self.has_emptied or self.empty is None
            self.empty, self.behind = error, False
            self._snapshot = self._request.sow
            if self._interrupted:
                self._interrupted = False
                self._tell(None)
            return EMPTY_SECONDS
        self.is_over = error.reason == _GONE
        self.placement_is_old = error.reason == "ACCESS_CHANGED"
        return super().ended(self._named(error), now=now, jitter=jitter)

    def _named(self, error: SowError) -> SowError:
        """The error with the name of the cell. A cell that refuses is waited for as one that is not reached, where the
        others go on meanwhile. One that accepts calls and says nothing is not reached either."""
        named = error
        if "cell" not in error.details:
            named = _statuses.error_like(error, f"the cell {self.cell}: {error.message}", cell=self.cell)
        if error.reason == "DEADLINE_EXCEEDED" or (self._lasts and isinstance(error, _statuses.AllRefused)):
            named = Unavailable(named.message, reason="UNREACHABLE", details=named.details)
        if named is not error:
            named.__cause__ = error.__cause__
        return named


class JoinedCore(SubscriptionCore):
    """Owns the parts, and the order in which their frames are handed out. Not thread-safe."""

    def __init__(
        self,
        request: sow_pb2.SubscribeRequest,
        starts: Mapping[str, str] | None,
        *,
        retry_for: float,
        connect_timeout: float,
        on_interruption: Callable[[SowError | None], object] | None = None,
    ) -> None:
        """`starts`: the bookmarks of the cells, as `bookmark` gives them."""
        super().__init__(request, retry_for=retry_for, connect_timeout=connect_timeout)
        self._starts = starts
        self._told = on_interruption
        self._tellings: list[SowError | None] = []
        self.home = self._part()
        self.parts: dict[str, PartCore] | None = None
        """The part of each cell; None: the cells are not known yet. Without a placement home's alone, under ""."""
        self._turns: list[PartCore] = []  # those that have waited longest for their turn come first
        self._shown_by: dict[str, tuple[PartCore, int]] = {}  # the newest part that has shown a topic, and its version
        self._left: dict[tuple[str, PartCore], int] = {}  # topics that another part shows, and the version of this one
        self._complete: set[PartCore] = set()  # the parts whose snapshot was handed out
        self._vanished: list[str] = []  # topics that are to be forgotten, as their cell has none any more

    def _part(self) -> PartCore:
        return PartCore(
            self._request,
            retry_for=self._retry_for,
            connect_timeout=self._connect_timeout,
            on_interruption=self._tellings.append,
        )

    # ---- cells ----

    def begin(self, home: str, first: sow_pb2.SubscribeRequest, cells: Iterable[str] = ()) -> None:
        """The name of home is known, and empty without a placement, and so are those of all cells. `first`: as for
        `PartCore.begin`. Raises InvalidArgument where the start does not fit it, and ResyncRequired."""
        if not home and self._starts is not None:
            raise invalid("start", "has the bookmarks of cells, and this server has no placement: give the one of it")
        if home and self._request.bookmark:
            raise invalid(
                "start", "is the bookmark of one cell, and there are several: give the mapping that `bookmark` gives"
            )
        if home and (lost := sorted((self._starts or {}).keys() - cells)):
            raise ResyncRequired(
                f"start: there is no cell {lost[0]!r} any more: its last changes may be missing",
                reason="RESYNC_REQUIRED",
            )
        self.home.begin(home, self._start_of(home), first)

    def _start_of(self, cell: str) -> str | None:
        return None if self._starts is None else self._starts.get(cell, "")

    def found(self, cells: Iterable[str]) -> list[PartCore]:
        """These are the cells, home among them. Returns the parts of those that have come."""
        known = self.parts
        if known is None:
            self.parts = {self.home.cell: self.home}
            self._turns.append(self.home)
        assert self.parts is not None, "home is one of them"
        come = [] if known is not None else [self.home]
        for cell in cells:
            if cell not in self.parts:
                part = self.parts[cell] = self._part()
                # A topic may have come there before anyone has told of that cell.
                late = known is not None and not self._request.sow
                part.begin(cell, "" if late else self._start_of(cell))
                self._turns.append(part)
                come.append(part)
        return come

    def probe(self) -> SubscriptionCore:
        """A subscription that begins now, for the position of a cell."""
        request = sow_pb2.SubscribeRequest(topic_pattern=self._request.topic_pattern)
        return SubscriptionCore(request, retry_for=0.0, connect_timeout=self._connect_timeout)

    @property
    def is_single(self) -> bool:
        """There is no placement ([6])."""
        return self.parts is not None and "" in self.parts

    @property
    def stood(self) -> bool:
        """Each cell is followed, or has told why it is not yet."""
        return self.parts is not None and all(part.is_settled for part in self.parts.values())

    @stood.setter
    def stood(self, _value: bool) -> None:
        """It is what the parts say."""

    @property
    def nothing(self) -> SowError | None:
        """The error of a pattern that has never matched a topic, in any cell; None: it has, or it is not known."""
        parts = list((self.parts or {}).values())
        if not parts or any(part.stood or part.empty is None for part in parts):
            return None
        return parts[0].empty

    def cells(self) -> dict[str, SowError | None]:
        """The cells, each with the error of an interruption that lasts."""
        if self.parts is None or self.is_single:
            return {}
        return {cell: part.interruption for cell, part in self.parts.items()}

    def drop(self, part: PartCore) -> None:
        """The cell has left the placement, and the part has ended."""
        assert self.parts is not None, "it had a cell"
        del self.parts[part.cell]
        self._turns.remove(part)
        self._complete.discard(part)
        self._vanished += self._topics_of(part)

    # ---- changes ----

    def next_frame(self) -> bool:
        """Hands out the frame of a part, or what follows from the cells; False: none is at hand. The frame before must
        have been handed out."""
        if marks := self._marks_of_cells():
            self.pending = iter(marks)
            return True
        for part in self._turns:
            if length_hint(part.pending):
                self._turns.remove(part)
                self._turns.append(part)
                self._take_up(part)
                return True
        return False

    def _marks_of_cells(self) -> list[Change]:
        """The marks that no frame brings."""
        if not self._request.sow:
            return []
        topics, self._vanished = self._vanished, []
        ended = False
        for part in self._turns:
            if part.has_emptied:
                part.has_emptied = False
                topics += self._topics_of(part)
                ended = ended or part not in self._complete
                self._complete.add(part)
        marks = [Change("resync", topic=topic) for topic in topics]
        return [*marks, *(self._end() if ended or marks else ())]

    def _take_up(self, part: PartCore) -> None:
        position, changes = part.bookmark, list(part.pending)
        for change in changes:
            structs.force_setattr(change, "cell", part.cell)  # cheaper than another struct
        part.hand_out(self._joined(part, changes, position or ""))
        self.pending = part.pending

    def _joined(self, part: PartCore, changes: Sequence[Change], position: str) -> Sequence[Change]:
        """The changes of a frame, which are all of one topic, or a mark ([4], [5]). `position`: that before them."""
        first = changes[0]
        if first.op == "resync":
            self._complete.discard(part)
            return [Change("resync", topic=topic) for topic in self._topics_of(part)]
        if first.op == "snapshot_end":
            self._complete.add(part)
            return self._end()
        topic = first.topic
        before, version = self._shown_by.get(topic, (part, 0))
        if before is part:
            self._shown_by[topic] = part, part.version
            return changes
        if version > part.version or self._left.get((topic, part)) == part.version:
            before.is_overtaken = True
            return () if self._request.sow else changes
        self._shown_by[topic] = part, part.version
        self._left[topic, before] = version
        if part.back_to is None:
            part.back_to = position
        return [Change("resync", topic=topic), *changes] if self._request.sow else changes

    def newer(self, part: PartCore) -> list[PartCore]:
        """A part begins with another placement, or has ended. Returns those that now go back ([5]): the call of each
        is to be ended, once it `is_to_end`."""
        back = [one for one in self._turns if one is not part and one.is_overtaken and not self._request.sow]
        for one in back:
            one.go_back()
        return back

    def _topics_of(self, part: PartCore) -> list[str]:
        topics = [topic for topic, (shown_by, _) in self._shown_by.items() if shown_by is part]
        for topic in topics:
            del self._shown_by[topic]
        return topics

    def _end(self) -> list[Change]:
        return [Change("snapshot_end")] if self._complete.issuperset(self._turns) else []

    @property
    def has_heard(self) -> bool:
        """There are interruptions to tell."""
        return self._tellings != []

    def heard(self) -> Iterator[SowError | None]:
        """The interruptions to tell: the error of each, and None once no cell is interrupted any more."""
        while self._tellings:
            error = self._tellings.pop(0)
            if error is not None or not any(part.interruption for part in self._turns):
                yield error

    def tell(self) -> None:
        """Tells the program of interruptions, in its own thread or task."""
        for error in self.heard():
            if self._told is not None:
                self._told(error)

    # ---- where it stands ----

    @property
    def bookmarks(self) -> str | Mapping[str, str] | None:
        """The position after the last change that was handed out; None: there is none to continue from."""
        if self.parts is None:
            return self._starts or self._request.bookmark or None
        if self.is_single:
            return self.home.bookmark
        found = {cell: part.resumes_at for cell, part in self.parts.items()}
        return None if None in found.values() else {cell: at for cell, at in found.items() if at} or None

    @property
    def covers(self) -> bool:
        """As `SubscriptionCore.covers`, of all cells."""
        return all(part.covers for part in self._turns)

    @property
    def behind(self) -> bool:
        """As `SubscriptionCore.behind`, of any cell."""
        return self.parts is None or any(part.behind for part in self._turns)

    @behind.setter
    def behind(self, _value: bool) -> None:
        """It is what the parts say."""


def came() -> SowError:
    """The error of a subscription that began without a placement, and would miss the topics of other cells."""
    return ResyncRequired("the server has become one of several cells: subscribe again", reason="RESYNC_REQUIRED")


def alone() -> SowError:
    """The error of a subscription to several cells whose home knows of none any more."""
    return ResyncRequired("the server has no placement any more: subscribe again", reason="RESYNC_REQUIRED")


def gone(cell: str) -> SowError:
    """The error of a call in a cell that has left the placement."""
    return SowError(f"the cell {cell} has left the placement", reason=_GONE, details={"cell": cell})


def _is_behind(one: str, other: str | None) -> bool:
    """True if a bookmark is known to be at or before another one."""
    plain, reached = one.partition(";")[0], (other or "").partition(";")[0]
    prefix, until = prefix_of(plain), prefix_of(reached)
    return bool(plain) and prefix == until and int(plain[len(prefix) :]) <= int(reached[len(until) :])
