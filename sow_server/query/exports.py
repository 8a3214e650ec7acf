"""The open exports, each with a lease (rule Q6). `export_parts` reads them.

    [1]  An export ends by itself, a lease after its last use, but not while it is read. A client that does not take the
         records for a lease, and does not renew it, is considered gone.

Exports live in memory: a restart of the server ends them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

import structlog

from sow.durations import format_micros
from sow_server.engine.catalog.topics import Topic, topic_deleted
from sow_server.engine.doors import Reads
from sow_server.engine.values.clock import boot_micros
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import MICROS
from sow_server.query.export_lines import ExportLines
from sow_server.query.export_parts import PartFigures, not_found
from sow_server.query.export_splits import SplitCache

log = structlog.get_logger(__name__)

LEASE_MICROS: Final = 600 * MICROS
LEASE_MICROS_MIN: Final = MICROS
LEASE_MICROS_MAX: Final = 24 * 3600 * MICROS
ENDED_KEPT: Final = 1000
"""Ended exports whose end is remembered, to explain it to clients."""
NAMES_TOLD: Final = 5
"""Topics of an export that the log and errors name."""


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """Limits of exports."""

    exports_max: int = 64


class LeasedExport(Protocol):
    """An open export, as far as its lease goes."""

    @property
    def id(self) -> str:
        """Names it to clients."""

    @property
    def owner(self) -> str:
        """The identity that has opened it."""

    @property
    def topics(self) -> Sequence[Topic]:
        """Its topics. It ends with each of them."""

    @property
    def parts(self) -> Sequence[PartFigures]:
        """Its parts, by their index."""

    def close(self) -> None:
        """Releases the cut once nobody uses it. May be called again."""


E = TypeVar("E", bound=LeasedExport)


class _OpenExport(Generic[E]):
    """An open export."""

    __slots__ = ("busy", "due_micros", "export", "idle", "idle_lease_micros", "lease_micros", "readers", "whole")

    def __init__(self, export: E, lease_micros: int, idle_lease_micros: int) -> None:
        self.export = export
        self.lease_micros = lease_micros
        self.idle_lease_micros = idle_lease_micros
        self.idle = True
        """Nobody has read it yet, or its last reading was broken off."""
        self.due_micros = 0
        self.readers = 0
        self.busy = 0
        """Readers with work under way; the others are being handed records."""
        self.whole: set[int] = set()
        """Parts that were read to their end."""

    def used(self, now_micros: int) -> None:
        """Starts the lease anew."""
        self.due_micros = now_micros + self.lease

    @property
    def lease(self) -> int:
        """The lease that counts now, in microseconds."""
        return self.idle_lease_micros if self.idle and not self.readers else self.lease_micros

    @property
    def read_whole(self) -> bool:
        return not self.readers and len(self.whole) == len(self.export.parts)


class Exports(Generic[E]):
    """Owns the open exports, and ends them. On one thread, the event loop's."""

    def __init__(
        self,
        reads: Reads,
        *,
        options: ExportOptions | None = None,
        elapsed: Callable[[], int] = boot_micros,
    ) -> None:
        """`elapsed`: a clock in microseconds for leases."""
        self._topics = reads.topics
        self._cuts = reads.cuts
        self._options = options or ExportOptions()
        self._elapsed = elapsed
        self._held: dict[str, _OpenExport[E]] = {}
        """In the order in which they were opened."""
        self._opening = 0
        self._ended: dict[str, str | Topic] = {}
        """Why past exports have ended; a topic: it was deleted."""
        self._stopping = False
        self._lines = ExportLines()
        self.splits: Final = SplitCache()
        self.records_total = 0
        """Records handed out since the start."""

    # -- opening ------------------------------------------------------------------------------------------------------

    @contextmanager
    def room(self) -> Generator[None, None, None]:
        """Reserves room for an export while it is opened; call `add` inside. Raises StoreError OVERLOADED, STOPPING."""
        self._check_running()
        most = self._options.exports_max
        self.tick()
        while len(self._held) + self._opening >= most:
            # A client that has read all of it will hardly come back. The oldest goes first.
            spent = next((held for held in self._held.values() if held.read_whole), None)
            if spent is None:
                raise StoreError(
                    Reason.OVERLOADED,
                    f"there are {most} exports, as many as this server allows; close one, or let its lease end",
                    retry_after_micros=MICROS,
                )
            self._end(spent, "it was read to its end, and made room for another one")
        self._opening += 1
        try:
            yield
        finally:
            self._opening -= 1

    def add(
        self, export: E, lease_micros: int, *, idle_lease_micros: int = 0, successor_of: str = "", reader: str = ""
    ) -> None:
        """Opens a prepared export, perhaps as the successor that `successor` has not found. Raises StoreError
        STOPPING; the caller then closes it."""
        self._check_running()
        held = _OpenExport(export, lease_micros, min(idle_lease_micros or lease_micros, lease_micros))
        held.used(self._elapsed())
        self._held[export.id] = held
        if successor_of:
            self._lines.succeed(successor_of, export.id, reader)
        else:
            self._lines.begin(export.id, export.owner, export.topics)

    def successor(self, export_id: str, reader: str, *, owner: str, topics: Sequence[Topic]) -> E | None:
        """The export that `reader` is to read in the place of one that has ended (rule Q8); None: `add` a new one.

        Raises StoreError: EXPORT_NOT_FOUND, also where `reader` has read one that has ended; INVALID_ARGUMENT,
        TOPIC_DELETED, STOPPING."""
        self._check_running()
        line = self._lines.of(export_id)
        if line is None or line.owner != owner:
            raise not_found(export_id, NEVER_OPENED)
        if (gone := self._gone(line.topics)) is not None:
            raise topic_deleted(gone)
        if list(line.topics) != list(topics):
            raise StoreError(
                Reason.INVALID_ARGUMENT,
                f"successor_of: is an export of another topic, or of other ones: {names_of(line.topics)}",
                field="successor_of",
            )
        read = line.readers.get(reader)
        if read is None:
            try:
                found = self.find(line.current)
            except StoreError as error:
                if error.reason is not Reason.EXPORT_NOT_FOUND:
                    raise
                return None
            self._lines.reads(found.id, reader)
            return found
        return self.find(read)

    def _check_running(self) -> None:
        if self._stopping:
            raise StoreError(Reason.STOPPING, "the server is stopping")

    # -- using --------------------------------------------------------------------------------------------------------

    def find(self, export_id: str) -> E:
        """The export with an id. Raises StoreError: EXPORT_NOT_FOUND, TOPIC_DELETED, STOPPING."""
        return self._find(export_id).export

    def _find(self, export_id: str) -> _OpenExport[E]:
        self._check_running()
        held = self._held.get(export_id)
        if held is not None:
            self._judge(held)
        if export_id in self._held:
            return self._held[export_id]
        why = self._ended.get(export_id)
        if isinstance(why, Topic):
            raise topic_deleted(why)
        raise not_found(export_id, why or NEVER_OPENED)

    def owner(self, export_id: str) -> str | None:
        """The identity that has opened an export; None: there is none."""
        held = self._held.get(export_id)
        return None if held is None else held.export.owner

    def held_by(self, owner: str) -> int:
        """The number of open exports of an identity."""
        return sum(held.export.owner == owner for held in self._held.values())

    def _judge(self, held: _OpenExport[E]) -> None:
        """Ends an export whose lease is over."""
        if (gone := self._gone(held.export.topics)) is not None:
            self._end(held, gone)
        elif not held.busy and self._elapsed() >= held.due_micros:
            self._end(held, f"nobody has read or renewed it for its lease of {format_micros(held.lease)}")

    def _gone(self, topics: Sequence[Topic]) -> Topic | None:
        """One of the topics that has been deleted."""
        by_id = self._topics.by_id
        return next((topic for topic in topics if by_id.get(topic.id) is not topic), None)

    @contextmanager
    def reader(self, export_id: str, name: str = "") -> Generator[E, None, None]:
        """Keeps an export from ending by itself while it is read [1]. `name`: the work that reads it, if it tells
        (rule Q8). Raises StoreError as `find`."""
        held = self._find(export_id)
        if name and not self._lines.reads(export_id, name):
            raise not_found(export_id, "this reader has read another one in its place")
        if not held.readers:
            held.idle = False
        held.readers += 1
        held.busy += 1
        try:
            yield held.export
        except BaseException:
            held.idle = True
            raise
        finally:
            held.readers -= 1
            held.busy -= 1
            held.used(self._elapsed())

    @contextmanager
    def handing_over(self, export_id: str, records: int) -> Generator[None, None, None]:
        """Use it inside `reader`, while the client takes this many records: it has one lease for that. Raises
        StoreError as `find`."""
        held = self._find(export_id)
        held.busy -= 1
        held.used(self._elapsed())
        self.records_total += records
        try:
            yield
        finally:
            held.busy += 1

    def ended(self, export_id: str, part: int) -> None:
        """Notes that a part was read to its end."""
        held = self._held.get(export_id)
        if held is not None:
            held.whole.add(part)

    def renew(self, export_id: str) -> tuple[E, int]:
        """Starts the lease anew. Returns the export and the lease. Raises StoreError as `find`."""
        held = self._find(export_id)
        held.idle = False
        held.used(self._elapsed())
        return held.export, held.lease_micros

    # -- ending -------------------------------------------------------------------------------------------------------

    def close(self, export_id: str, why: str = "it was closed") -> None:
        """Ends an export; its readings end with EXPORT_NOT_FOUND. Closing an export that has ended does nothing."""
        held = self._held.get(export_id)
        if held is not None:
            self._end(held, why)

    def tick(self) -> None:
        """Ends the exports whose lease is over. Call it about every second."""
        for held in list(self._held.values()):
            self._judge(held)
        for held in self._held.values():
            for topic in held.export.topics:  # else it would be deleted while its records are read (rule T1)
                self._cuts.used(topic)

    def stop(self) -> None:
        """Ends all, and refuses new ones: the server stops."""
        self._stopping = True
        for held in list(self._held.values()):
            self._end(held, "the server is stopping")

    def _end(self, held: _OpenExport[E], why: str | Topic) -> None:
        export = held.export
        del self._held[export.id]
        while len(self._ended) >= ENDED_KEPT:
            del self._ended[next(iter(self._ended))]
        self._ended[export.id] = why
        told = why if isinstance(why, str) else "its topic was deleted"
        log.info("export_ended", topic=names_of(export.topics), export=export.id, why=told)
        export.close()

    @property
    def count(self) -> int:
        """The number of open exports."""
        return len(self._held)


def names_of(topics: Sequence[Topic]) -> str:
    """The names of some topics, in a text: the first ones of many."""
    names = ", ".join(topic.name for topic in topics[:NAMES_TOLD])
    return names if len(topics) <= NAMES_TOLD else f"{names}, … ({len(topics)})"


NEVER_OPENED: Final = "this server has not opened it since its start"
NOT_PERMITTED: Final = "it has records or fields that this caller may not see any more"
