"""The messages to subscribers: rows, and the frames that hold them. Subscribers share them, so they never change.

[1]  A frame holds rows of one topic in the order of their sequences.
[2]  At the position `bookmark` its receiver has everything. While `more` frames follow that belong to it, the
     bookmark stays at the position before the first of them.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from sow_server.engine.disk.layout import HeaderColumns
from sow_server.engine.durables import GapReason
from sow_server.engine.values.model import NEVER

FRAME_BYTES: Final = 2**20
ROW_BYTES: Final = 350
"""Memory of a row, besides its key and its payload."""


class ChangeOp(enum.IntEnum):
    """The operation on a record; numbered as in `sow.v1.ChangeOp`."""

    PUT = 1
    OOF = 2
    DELETE = 3
    EXPIRE = 4


class ChangeReason(enum.IntEnum):
    """The reason of a message; numbered as in `sow.v1.ChangeReason`."""

    NONE = 0
    TOUCHED = 1
    DELETED = 2
    EXPIRED = 3
    MATCH = 4
    NOT_PERMITTED = 5


class Row(NamedTuple):
    """One message about one record. `skip_from`: the time from which it is no longer handed over (rule J12)."""

    op: ChangeOp
    reason: ChangeReason
    key: bytes
    payload: bytes
    version: int
    publish_time: int
    expire_time: int
    origin: int
    sequence: int
    is_delta: bool = False
    unset_paths: tuple[str, ...] = ()
    skip_from: int = NEVER
    enters: bool = False
    """Whether the record comes into focus with this put. Known only with `Wants.conflated`."""

    @property
    def size(self) -> int:
        """Bytes of memory, approximately."""
        return ROW_BYTES + len(self.key) + len(self.payload)


class ChangeFrame:
    """Rows that are sent together."""

    __slots__ = ("after", "atomic", "bookmark", "delivered", "encoded", "more", "rows", "size", "skip_from", "topic")

    def __init__(
        self,
        topic: str,
        rows: Sequence[Row],
        *,
        after: int,
        bookmark: int,
        size: int,
        more: bool = False,
        atomic: bool = False,
        judged: bool = True,
    ) -> None:
        """`judged`: leave out rows that fall due while they wait."""
        self.topic = topic
        self.rows = rows
        self.after = after
        """Everything up to here came before this frame."""
        self.bookmark = bookmark
        self.more = more
        self.atomic = atomic
        self.size = size
        self.skip_from = min([row.skip_from for row in rows], default=NEVER) if judged else NEVER
        self.delivered: Sequence[int] = ()
        """How often each row was handed over before and now; empty: each for the first time, or not counted (rule
        J15)."""
        self.encoded: bytes | None = None
        """Its bytes on the wire, once it has been encoded."""

    def counted(self, delivered: Sequence[int]) -> ChangeFrame:
        """The frame for a subscriber that is told how often each row was handed over."""
        frame = ChangeFrame(
            self.topic,
            self.rows,
            after=self.after,
            bookmark=self.bookmark,
            size=self.size,
            more=self.more,
            atomic=self.atomic,
        )
        frame.delivered = delivered
        return frame

    def at(self, now_micros: int) -> ChangeFrame:
        """The frame to hand over now: without the records that have fallen due (rule J12)."""
        if now_micros < self.skip_from:
            return self
        rows = [row for row in self.rows if now_micros < row.skip_from]
        return ChangeFrame(
            self.topic,
            rows,
            after=self.after,
            bookmark=self.bookmark,
            size=sum([row.size for row in rows]),
            more=self.more,
            atomic=self.atomic,
        )


def frames_of(
    topic: str,
    rows: Sequence[Row],
    *,
    batch_size: int,
    after: int,
    bookmark: int,
    together: bool = False,
    atomic: bool = False,
    judged: bool = True,
) -> list[ChangeFrame]:
    """Rows of one topic in frames of bounded size. `together`: only the end of the last frame is a place to resume
    at."""
    frames: list[ChangeFrame] = []
    begin = 0
    while begin < len(rows):
        size, end = 0, begin
        while end < len(rows) and end - begin < batch_size:
            size += rows[end].size
            if size > FRAME_BYTES and end > begin:
                size -= rows[end].size
                break
            end += 1
        last = end == len(rows)
        frames.append(
            ChangeFrame(
                topic,
                rows[begin:end],
                after=after if together else rows[begin].sequence - 1,
                bookmark=bookmark if last else after if together else rows[end - 1].sequence,
                size=size,
                more=together and not last,
                atomic=atomic,
                judged=judged,
            )
        )
        begin = end
    return frames


@dataclass(frozen=True, slots=True)
class SnapshotBegin:
    """The snapshot begins; it shows the state at `sequence`."""

    sequence: int
    now_micros: int


@dataclass(frozen=True, slots=True)
class SnapshotBatch:
    """Records of one topic in key order."""

    topic: str
    keys: list[bytes]
    payloads: list[bytes]
    headers: HeaderColumns


@dataclass(frozen=True, slots=True)
class SnapshotEnd:
    """The snapshot is complete."""

    sequence: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Everything up to `sequence` has been sent."""

    sequence: int
    now_micros: int


@dataclass(frozen=True, slots=True)
class DurableBegin:
    """A consumer is attached to a durable: everything up to `sequence` is acknowledged."""

    sequence: int
    created: bool
    reset: bool
    session: str


@dataclass(frozen=True, slots=True)
class GapNotice:
    """The entries after `after`, up to `upto`, are not handed over. `entries`: their number before filtering; 0:
    unknown."""

    reason: GapReason
    after: int
    upto: int
    entries: int


Frame = SnapshotBegin | SnapshotBatch | SnapshotEnd | ChangeFrame | Progress | DurableBegin | GapNotice
