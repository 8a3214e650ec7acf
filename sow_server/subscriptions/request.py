"""The request of a subscriber, and the checks of it that need no store."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.formats.payloads import Projection
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import MICROS, MessageType
from sow_server.filters import Filter, Meta, Predicate
from sow_server.subscriptions.frames import ChangeFrame, Row, SnapshotBatch, SnapshotBegin, frames_of

BATCH_RECORDS_MAX: Final = 10_000
PROGRESS_MICROS: Final = 5 * MICROS
PROGRESS_MICROS_MIN: Final = MICROS // 10
INTERVAL_MICROS_MAX: Final = 86_400 * MICROS
"""The longest interval of progress and of conflation."""


class ViewFilter(Protocol):
    """A filter that has been checked against a topic."""

    @property
    def tree(self) -> Filter: ...
    @property
    def text(self) -> str:
        """The canonical text."""

    @property
    def asked(self) -> str:
        """The canonical text of the subscriber's own part; "": none."""

    @property
    def granted(self) -> ViewFilter | None:
        """The part that decides which rows the subscriber may see at all; None: all (rule A4)."""

    @property
    def predicate(self) -> Predicate: ...
    @property
    def uses_metadata(self) -> bool:
        """False: `fixed_meta` fits every record."""

    @property
    def fixed_meta(self) -> Meta: ...
    @property
    def matches(self) -> Callable[[bytes, bytes], bool]:
        """A function that returns True if a live record matches, by its record key and its stored value."""


class Snapshot(Protocol):
    """The records at one instant. One thread at a time; its owner closes it."""

    @property
    def begin(self) -> SnapshotBegin:
        """Its first frame, with the sequence at which it was cut."""

    @property
    def done(self) -> bool:
        """True if all records have been read."""

    @property
    def truncated(self) -> bool:
        """True if records are missing, because there are more than the subscriber wants. Known once it is done."""

    @property
    def absent_fields(self) -> Sequence[str]:
        """The fields of the filter and the projection that no record has (rule Q10). Known once it is done."""

    def read(self) -> SnapshotBatch | None:
        """The next records; None if this step found none that match."""

    def close(self) -> None:
        """Releases the cut."""


class View(NamedTuple):
    """The part of one topic that a subscriber sees; None: all records, whole payloads."""

    filter: ViewFilter | None = None
    projection: Projection | None = None


class StartKind(enum.Enum):
    """The kind of place where a subscription starts (rule S4)."""

    NOW = enum.auto()
    BOOKMARK = enum.auto()
    TIME = enum.auto()
    EARLIEST = enum.auto()


class Start(NamedTuple):
    """The place to start at; `bookmark` and `time_micros` are set for their kinds only."""

    kind: StartKind = StartKind.NOW
    bookmark: str = ""
    time_micros: int = 0


FROM_NOW: Final = Start()


def _all(topic: Topic) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Wants:
    """The kinds of messages that a subscriber wants. Subscribers with equal views and equal wants share their
    frames."""

    oof: bool = False
    delta: bool = False
    changes: bool = False
    empty_deltas: bool = False
    projection: Projection | None = None
    batch_size: int = 1000
    conflated: bool = False
    """True if `Conflation` takes the rows, and the subscriber wants oof or deltas. `Conflation` has to know which of
    them come into focus, and the versions that they replace. It decides by itself which records are due."""
    with_due: bool = False
    """True: versions that are due are handed over, too. A live result judges when it is told, and must not keep the
    version before."""

    @property
    def leaving(self) -> bool:
        """True if the subscriber hears of records that leave its view."""
        return self.oof or self.changes

    def frames(self, topic: str, rows: Sequence[Row], *, after: int, bookmark: int, atomic: bool) -> list[ChangeFrame]:
        """The rows of a topic as frames. Those of an atomic request are only resumed at its end."""
        return frames_of(
            topic,
            rows,
            batch_size=self.batch_size,
            after=after,
            bookmark=bookmark,
            together=atomic,
            atomic=atomic,
            judged=not (self.changes or self.delta or self.with_due),
        )


@dataclass(frozen=True, slots=True)
class Request:
    """One subscription. `view` gives the view of a topic, and raises StoreError if the request does not fit it; any
    thread may call it. `snapshot` begins a snapshot of a topic."""

    view: Callable[[Topic], View]
    snapshot: Callable[[Topic], Snapshot]
    topic: str = ""
    pattern: str = ""
    sow: bool = False
    oof: bool = False
    delta: bool = False
    changes: bool = False
    empty_deltas: bool = False
    start: Start = FROM_NOW
    conflation_micros: int = 0
    progress_micros: int = PROGRESS_MICROS
    batch_size: int = 1000
    permits: Callable[[Topic], bool] = _all
    """Returns True if the subscriber may see anything of a topic. A topic that it may not see matches no pattern (rule
    A4). From any thread."""
    name: bytes = b""
    """Names all that it sees of the topics that match its pattern."""
    with_due: bool = False
    """As in `Wants`."""

    def wants(self, view: View) -> Wants:
        """The messages that it wants of a topic."""
        conflated = (self.oof or self.delta) and self.conflation_micros != 0
        return Wants(
            self.oof,
            self.delta,
            self.changes,
            self.empty_deltas,
            view.projection,
            self.batch_size,
            conflated,
            self.with_due,
        )

    @property
    def previous(self) -> bool:
        """True if the subscriber needs the records that changes replace."""
        return self.oof or self.changes or self.delta


def check(request: Request, *, selects: bool) -> None:
    """Raises StoreError naming the field that is out of bounds, or the two fields that contradict each other.
    `selects`: the view projects payloads."""
    if bool(request.topic) == bool(request.pattern):
        raise _refuse("topic", "exactly one of topic and topic_pattern is needed")
    starts = request.start.kind is not StartKind.NOW
    field_of_start = {
        StartKind.NOW: "start",
        StartKind.BOOKMARK: "bookmark",
        StartKind.TIME: "start_time_micros",
        StartKind.EARLIEST: "earliest",
    }[request.start.kind]
    conflates = request.conflation_micros != 0
    for given, field, other_given, other in (
        (request.sow, "sow", starts, field_of_start),
        (request.changes, "changes", request.oof, "oof"),
        (request.changes, "changes", request.delta, "delta"),
        (request.changes, "changes", conflates, "conflation_micros"),
        (request.delta, "delta", selects, "select"),
    ):
        if given and other_given:
            raise _refuse(field, f"cannot be combined with {other}")
    if request.empty_deltas and not request.delta:
        raise _refuse("empty_deltas", "has no meaning without delta")
    if not 0 <= request.conflation_micros <= INTERVAL_MICROS_MAX:
        raise _refuse("conflation_micros", f"must be between 0 and {INTERVAL_MICROS_MAX}")
    if not PROGRESS_MICROS_MIN <= request.progress_micros <= INTERVAL_MICROS_MAX:
        raise _refuse("progress_micros", f"must be between {PROGRESS_MICROS_MIN} and {INTERVAL_MICROS_MAX}")
    if not 1 <= request.batch_size <= BATCH_RECORDS_MAX:
        raise _refuse("batch_size", f"must be between 1 and {BATCH_RECORDS_MAX}")
    if request.start.time_micros < 0:
        raise _refuse("start_time_micros", "must not be negative")


def check_topic(request: Request, topic: Topic) -> None:
    """Raises StoreError if a topic cannot serve the request."""
    if request.delta and topic.settings.message_type is MessageType.BINARY:
        raise StoreError(
            Reason.UNSUPPORTED_FOR_MESSAGE_TYPE,
            f"delta: topic {topic.name} is binary, its payloads have no fields",
            field="delta",
        )
    if request.start.kind is not StartKind.NOW and not topic.settings.journal:
        raise StoreError(
            Reason.NO_JOURNAL,
            f"topic: {topic.name} has no journal, so there is nothing to start from; take a snapshot by key (sow)",
            field="topic",
        )


def _refuse(field: str, message: str) -> StoreError:
    return StoreError(Reason.INVALID_ARGUMENT, f"{field}: {message}", field=field)
