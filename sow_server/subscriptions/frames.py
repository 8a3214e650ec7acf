"""The messages to subscribers: rows, and the frames that hold them. Subscribers share them, so they never change.

[1]  A frame holds rows of one topic in the order of their sequences.
[2]  At the position `bookmark` its receiver has everything. While `more` frames follow that belong to it, the
     bookmark stays at the position before the first of them.
"""

from __future__ import annotations

import enum
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress
from operator import add
from typing import Final, NamedTuple, overload

from sow_server.engine.durables import GapReason
from sow_server.engine.formats.payloads import Format
from sow_server.engine.stored import HeaderColumns
from sow_server.engine.values.model import NEVER

FRAME_BYTES: Final = 2**20
ROW_BYTES: Final = 350
"""Memory of a row, besides its key and its payload."""
COLUMN_ROW_BYTES: Final = 130
"""The same of a row in columns: two objects of bytes, and its places in the columns."""


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
    WINDOW = 6
    """To followers of a live result: it still matches, and is not in the list any more."""


class Told(NamedTuple):
    """A version of a record that a subscriber has, unless it was left out because it was due (rules S15, J12)."""

    format: Format
    """The format of both versions. The topic may have another one when they are compared."""
    key_paths: tuple[tuple[str, ...], ...]
    payload: bytes
    """The part that the subscriber may see."""
    skip_from: int
    """The time from which it was no longer handed over."""


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
    """True if the record comes into focus with this put. Known only with `Wants.conflated` and `Wants.oof`."""
    told: Told | None = None
    """The version that this put replaces. Only for conflated deltas, and None where the record has to be sent whole."""

    @property
    def size(self) -> int:
        """Bytes of memory, approximately."""
        size = ROW_BYTES + len(self.key) + len(self.payload)
        return size if self.told is None else size + len(self.told.payload)


class RowColumns(Sequence[Row]):
    """Rows in columns of equal length: a whole chunk of the journal without an object for each row. None is a delta.

    As a sequence it makes the rows that are asked for.
    """

    __slots__ = ("falls_due", "headers", "keys", "ops", "payloads", "reasons")

    def __init__(
        self,
        ops: bytes,
        reasons: bytes,
        keys: list[bytes],
        payloads: list[bytes],
        headers: HeaderColumns,
        *,
        falls_due: bool,
    ) -> None:
        """`falls_due`: a put is no longer handed over once its record is due (rule J12)."""
        self.ops = ops
        self.reasons = reasons
        self.keys = keys
        self.payloads = payloads
        self.headers = headers
        self.falls_due = falls_due

    def __len__(self) -> int:
        return len(self.keys)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as lists have none

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> RowColumns: ...

    def __getitem__(self, index: int | slice) -> Row | RowColumns:
        if isinstance(index, slice):
            return RowColumns(
                self.ops[index],
                self.reasons[index],
                self.keys[index],
                self.payloads[index],
                HeaderColumns(*[column[index] for column in self.headers]),
                falls_due=self.falls_due,
            )
        op, headers = self.ops[index], self.headers
        expire_time = headers.expire_time[index]
        return Row(
            ChangeOp(op),
            ChangeReason(self.reasons[index]),
            self.keys[index],
            self.payloads[index],
            headers.version[index],
            headers.publish_time[index],
            expire_time,
            headers.origin[index],
            headers.sequence[index],
            skip_from=expire_time if self.falls_due and op == ChangeOp.PUT else NEVER,
        )

    def __iter__(self) -> Iterator[Row]:
        return map(self.__getitem__, range(len(self.keys)))

    @property
    def sizes(self) -> list[int]:
        """Bytes of memory of each row, approximately."""
        return _sizes_of(self.keys, self.payloads)

    @property
    def skip_from(self) -> int:
        """The time from which the first of its rows is no longer handed over."""
        if not self.falls_due:
            return NEVER
        expire_times = self.headers.expire_time
        if self.ops.count(ChangeOp.PUT) == len(self.ops):
            return min(expire_times, default=NEVER)
        return min([time for op, time in zip(self.ops, expire_times, strict=True) if op == ChangeOp.PUT], default=NEVER)

    def live(self, now_micros: int) -> RowColumns:
        """The rows that are handed over at this time (rule J12)."""
        if now_micros < self.skip_from:
            return self
        return self.chosen(
            [
                op != ChangeOp.PUT or now_micros < time
                for op, time in zip(self.ops, self.headers.expire_time, strict=True)
            ]
        )

    def chosen(self, choice: Sequence[int]) -> RowColumns:
        """The rows that are chosen: one truth value for each."""
        return RowColumns(
            bytes(compress(self.ops, choice)),
            bytes(compress(self.reasons, choice)),
            list(compress(self.keys, choice)),
            list(compress(self.payloads, choice)),
            HeaderColumns(*[array(column.typecode, compress(column, choice)) for column in self.headers]),
            falls_due=self.falls_due,
        )

    def joined(self, other: RowColumns) -> RowColumns:
        """These rows, and others behind them."""
        return RowColumns(
            self.ops + other.ops,
            self.reasons + other.reasons,
            self.keys + other.keys,
            self.payloads + other.payloads,
            HeaderColumns(*[mine + theirs for mine, theirs in zip(self.headers, other.headers, strict=True)]),
            falls_due=self.falls_due,
        )


class ChangeFrame:
    """Rows that are sent together."""

    __slots__ = (
        "after",
        "arrived_micros",
        "atomic",
        "bookmark",
        "delivered",
        "emissions",
        "encoded",
        "more",
        "positions",
        "results",
        "rows",
        "size",
        "skip_from",
        "topic",
    )

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
        self.skip_from = _skip_from(rows) if judged else NEVER
        self.delivered: Sequence[int] = ()
        """How often each row was handed over before and now; empty: each for the first time, or not counted (rule
        J15)."""
        self.encoded: bytes | None = None
        """Its bytes on the wire, once it has been encoded."""
        self.arrived_micros = 0
        """The time at which the first conflating subscriber got it; 0: none has. Equal subscribers count it in the same
        interval (conflation [4])."""
        self.emissions: Sequence[object] = ()
        """The emissions of conflating subscribers that end with this frame (conflation [4])."""
        self.positions: Sequence[int] = ()
        """The place of each row in a live result (rule S11); empty: it is of no live result."""
        self.results = False
        """True if the rows are results of groups, which are json documents."""

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
        rows = (
            self.rows.live(now_micros)
            if isinstance(self.rows, RowColumns)
            else [row for row in self.rows if now_micros < row.skip_from]
        )
        return ChangeFrame(
            self.topic,
            rows,
            after=self.after,
            bookmark=self.bookmark,
            size=sum(_sizes(rows)),
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
    sizes = list(accumulate(_sizes(rows), initial=0))
    begin = 0
    while begin < len(rows):
        room = bisect_right(sizes, sizes[begin] + FRAME_BYTES, begin) - 1
        end = min(max(room, begin + 1), begin + batch_size)
        last = end == len(rows)
        frames.append(
            ChangeFrame(
                topic,
                rows if last and not begin else rows[begin:end],
                after=after if together else rows[begin].sequence - 1,
                bookmark=bookmark if last else after if together else rows[end - 1].sequence,
                size=sizes[end] - sizes[begin],
                more=together and not last,
                atomic=atomic,
                judged=judged,
            )
        )
        begin = end
    return frames


def within(keys: Sequence[bytes], payloads: Sequence[bytes], room: int) -> int:
    """The number of rows in columns that fill so many bytes: the last one may go beyond them."""
    if COLUMN_ROW_BYTES * len(keys) + sum(map(len, keys)) + sum(map(len, payloads)) <= room:
        return len(keys)
    return min(len(keys), bisect_left(list(accumulate(_sizes_of(keys, payloads))), room) + 1)


def _sizes_of(keys: Sequence[bytes], payloads: Sequence[bytes]) -> list[int]:
    return list(map(COLUMN_ROW_BYTES.__add__, map(add, map(len, keys), map(len, payloads))))


def _sizes(rows: Sequence[Row]) -> list[int]:
    return rows.sizes if isinstance(rows, RowColumns) else [row.size for row in rows]


def _skip_from(rows: Sequence[Row]) -> int:
    return rows.skip_from if isinstance(rows, RowColumns) else min([row.skip_from for row in rows], default=NEVER)


@dataclass(frozen=True, slots=True)
class SnapshotBegin:
    """The snapshot begins; it shows the state at `sequence`."""

    sequence: int
    now_micros: int
    view: bytes = b""
    """Names what the subscriber sees of its one topic; empty: of several."""
    expires: bool = False
    """True if its one topic acts on lifetimes."""
    held: bool = False
    """True if ranges that the subscriber holds are left out (`held`)."""


@dataclass(frozen=True, slots=True)
class SnapshotBatch:
    """Records of one topic in key order."""

    topic: str
    keys: list[bytes]
    payloads: list[bytes]
    headers: HeaderColumns
    replaced: Sequence[tuple[bytes, bytes]] = ()
    """Ranges of keys, from behind the first one to the last one (empty: to the end), in which the subscriber forgets
    what it holds. Records of this batch, and of later ones, take their place."""
    results: bool = False
    """True if these are results of groups, which are json documents."""


@dataclass(frozen=True, slots=True)
class SnapshotEnd:
    """The snapshot is complete. `marks`: the end of its bookmark (rule F6). `truncated`: it has not all records."""

    sequence: int
    marks: str = ""
    truncated: bool = False
    absent_fields: Sequence[str] = ()
    """Those in which no record that was read has a value (rule Q10)."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Everything up to `sequence` has been sent. `marks`: the end of its bookmark (rule F6). Not `covers`: this
    instance may lack changes that the subscriber was told elsewhere (rule F9). `behind`: changes from before it are
    still to be read in the journal. `sources`: other instances send to this one."""

    sequence: int
    now_micros: int
    marks: str = ""
    covers: bool = True
    behind: bool = False
    sources: bool = False


@dataclass(frozen=True, slots=True)
class DurableBegin:
    """A consumer is attached to a durable: everything up to `sequence` is acknowledged."""

    sequence: int
    created: bool
    reset: bool
    session: str
    replicated: bool = False


@dataclass(frozen=True, slots=True)
class GapNotice:
    """The entries after `after`, up to `upto`, are not handed over. `entries`: their number before filtering; 0:
    unknown."""

    reason: GapReason
    after: int
    upto: int
    entries: int


Frame = SnapshotBegin | SnapshotBatch | SnapshotEnd | ChangeFrame | Progress | DurableBegin | GapNotice
