"""A source that hears of the changes of its records by an ordinary subscription (rule S12).

[1]  Rows come in the order of their sequences, each once. Behind a gap (`_missed`) the subscription is a new one, and
     what it missed has to be read.
[2]  Whose rows may be seen was decided when the result was asked for. It is a part of the name under which results
     are shared, and a change of it ends the calls of those who follow (rules A4 to A6).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.subscriptions.frames import ChangeFrame, Frame, Row
from sow_server.subscriptions.hub import Hub
from sow_server.subscriptions.live.groups import layout
from sow_server.subscriptions.request import Request
from sow_server.subscriptions.results.source import Source
from sow_server.subscriptions.stream import Machine
from sow_server.subscriptions.subscription import Subscription, reached

LOSSES_MAX: Final = 5
"""A result ends if its subscription is lost so often without a result in between."""


class Drive(Protocol):
    """Drives a machine in the background."""

    def __call__(
        self, machine: Machine, hear: Callable[[Frame], None], ended: Callable[[StoreError], None]
    ) -> Callable[[], object]:
        """Begins. `hear` gets the frames, `ended` the error at the end. The result ends it without `ended`."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A result as a subscriber asks for it."""

    name: tuple[object, ...]
    """Equal for all that may share it: what may be seen, and what is asked for."""
    topic: Topic
    request: Request
    """The subscription that feeds it: whole payloads, with `oof` and with what is due."""
    view: bytes
    """Names what it may see."""
    conflation_micros: int


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The things that all sources have in common."""

    hub: Hub
    drive: Drive
    now_micros: Callable[[], int]
    """The store's clock."""
    elapsed: Callable[[], int]
    """Microseconds of a clock that nobody sets."""
    sources: Callable[[], int]
    """The number of all sources."""
    bytes_max: int
    """Memory of one result."""
    has_read: Callable[[str, int], None]
    """Hears of each reading why it was made, and how many microseconds it took."""


class FedSource(Source):
    """Owns the subscription."""

    def __init__(self, asked: Asked, around: Surroundings) -> None:
        """Raises StoreError."""
        super().__init__(asked.topic.name, asked.conflation_micros, around.now_micros, around.elapsed, around.sources)
        self._asked_for = asked
        self._around = around
        self._layout = layout(asked.topic)
        """The settings for which its filter and its order were made."""
        self._feed: Subscription = around.hub.subscribe(asked.request)
        self._together = False
        """True in the midst of an atomic request."""
        self._begun = False
        """True once the present subscription has begun."""
        self._losses = 0
        self._end_feed = around.drive(self._feed, self._hear, self._lost)

    @abstractmethod
    def _take(self, row: Row) -> None:
        """A change of a record that matches now, or did before. Raises StoreError."""

    @abstractmethod
    def _heard(self) -> None:
        """All changes that belong together were taken. The first time, the subscription has just begun."""

    @abstractmethod
    def _missed(self) -> None:
        """The subscription was lost; the next one begins. `_heard` follows."""

    def _hear(self, frame: Frame) -> None:
        if isinstance(frame, ChangeFrame):
            try:
                for row in frame.rows:
                    self._take(row)
            except StoreError as error:
                self._fail(error)
                return
            self._together = frame.more
        self._begun = True
        if not self._together:
            self._heard()

    def _lost(self, error: StoreError) -> None:
        """The subscription has ended."""
        self._losses += 1
        same = layout(self._asked_for.topic) == self._layout
        if error.reason is not Reason.RESYNC_REQUIRED or self._losses > LOSSES_MAX or not same:
            self._fail(error)
            return
        self._begun = self._together = False
        self._missed()
        try:
            self._feed = self._around.hub.subscribe(self._asked_for.request)
        except StoreError as refused:
            self._fail(refused)
            return
        self._end_feed = self._around.drive(self._feed, self._hear, self._lost)

    @property
    def reached(self) -> int:
        return reached(self._feed)

    def close(self) -> None:
        self._end_feed()
