"""Changes that may be too much work for the event loop: reader threads judge them (rule S6).

[1]  The work of a change is estimated before it is decoded, from its size and from the filters (`Effort`).
[2]  If one filter may take long for a change, the change is `Unjudged` for that filter's subscribers. It keeps its
     place in the queue of each until a reader thread has judged it. So the order holds, and other subscribers do
     not wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.stored import HEADER_BYTES
from sow_server.engine.values.model import MessageType
from sow_server.filters.cost import Cost
from sow_server.subscriptions.changes import Change
from sow_server.subscriptions.frames import ROW_BYTES, ChangeFrame, Row
from sow_server.subscriptions.live import focus
from sow_server.subscriptions.live.matching import VersionMatcher
from sow_server.subscriptions.request import Wants

EFFORT_MAX: Final = 10_000_000
"""Nanoseconds that the event loop may take for one filter and one change, in the worst case."""
DECODING: Final = Cost(per_byte=30)
COMPARING: Final = Cost(per_byte=120)
"""The difference of two documents, which both are decoded for it."""


class Effort(NamedTuple):
    """The size of a change as work: bytes, with those of the replaced record, and elements of arrays."""

    size: int
    elements: int

    def of(self, cost: Cost) -> int:
        """Nanoseconds, at most."""
        return cost.of(self.size, self.elements)


def effort_of(topic: Topic, payload: bytes, before: bytes | None) -> Effort:
    """Estimates from the bytes, without decoding. `before`: the stored value of the replaced record."""
    kind = topic.settings.message_type
    elements = _elements(kind, payload, 0)
    if before is None:
        return Effort(len(payload), elements)
    return Effort(len(payload) + len(before), elements + _elements(kind, before, HEADER_BYTES))


def largest_effort(topic: Topic, payloads: Sequence[bytes], before: Sequence[bytes | None] | None) -> Effort:
    """The work of the largest of several changes, at most."""
    kind = topic.settings.message_type
    size = max(map(len, payloads))
    elements = max([_elements(kind, payload, 0) for payload in payloads])
    values = [value for value in before or () if value is not None]
    if values:
        size += max(map(len, values))
        elements += max([_elements(kind, value, HEADER_BYTES) for value in values])
    return Effort(size, elements)


def _elements(kind: MessageType, document: bytes, start: int) -> int:
    """How many elements the arrays of a document may have. A document without a bracket has no array."""
    if kind is MessageType.JSON:
        return document.count(b",", start) + 1 if document.find(b"[", start) >= 0 else 1
    return len(document) if kind is MessageType.MSGPACK else 1


def cost_of_matching(matcher: VersionMatcher) -> Cost:
    """The cost of evaluating a filter, before and after a change."""
    return matcher.cost.plus(DECODING) if matcher.uses_payload else matcher.cost


def cost_of_rows(wants: Wants) -> Cost:
    """The cost of making a row for these wants."""
    cost = Cost()
    if wants.delta and not wants.conflated:  # conflated ones are compared later, see `conflation`
        cost = cost.plus(COMPARING)
    if wants.projection is None:
        return cost
    return cost.plus(Cost(per_byte=wants.projection.byte_nanos, per_element=wants.projection.element_nanos))


class Unjudged:
    """One change, or an atomic request, whose filter has not been evaluated. Shared by all members of a group."""

    __slots__ = ("_changes", "_frames", "_matcher", "_topic", "_wants", "after", "atomic", "bookmark", "size")

    def __init__(
        self,
        topic: Topic,
        matcher: VersionMatcher,
        wants: Wants,
        changes: Sequence[Change],
        *,
        after: int,
        bookmark: int,
        atomic: bool,
    ) -> None:
        self.after = after
        """Everything up to here came before."""
        self.bookmark = bookmark
        """Everything up to here is told with this change."""
        self.atomic = atomic
        self.size = sum([ROW_BYTES + len(change.key) + change.bytes_held for change in changes])
        self._topic = topic
        self._matcher = matcher
        self._wants = wants
        self._changes = changes
        self._frames: list[ChangeFrame] | None = None

    def judge(self, now_micros: int) -> list[ChangeFrame]:
        """The frames of the change. From any thread; two threads that ask at once both work, and get equal frames."""
        frames = self._frames
        if frames is None:
            wants = self._wants
            rows: list[Row] = []
            for change in self._changes:
                row = focus.row_of(change, wants, self._matcher, now_micros)
                if row is not None:
                    rows.append(row)
            frames = self._frames = wants.frames(
                self._topic.name, rows, after=self.after, bookmark=self.bookmark, atomic=self.atomic
            )
        return frames
