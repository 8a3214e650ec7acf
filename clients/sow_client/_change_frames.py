"""Frames of changes into changes with their bookmarks. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

from sow.v1 import sow_pb2
from sow_client import _statuses
from sow_client._records import Change, ChangeOp, ChangeReason, Record, RecordBatch
from sow_client.errors import SowError

_OPS: Final[Mapping[int, ChangeOp]] = {
    sow_pb2.CHANGE_OP_PUT: "put",
    sow_pb2.CHANGE_OP_OOF: "oof",
    sow_pb2.CHANGE_OP_DELETE: "delete",
    sow_pb2.CHANGE_OP_EXPIRE: "expire",
}
_REASONS: Final[Mapping[int, ChangeReason | None]] = {
    sow_pb2.CHANGE_REASON_UNSPECIFIED: None,
    sow_pb2.CHANGE_REASON_TOUCHED: "touched",
    sow_pb2.CHANGE_REASON_DELETED: "deleted",
    sow_pb2.CHANGE_REASON_EXPIRED: "expired",
    sow_pb2.CHANGE_REASON_MATCH: "match",
    sow_pb2.CHANGE_REASON_NOT_PERMITTED: "not_permitted",
    sow_pb2.CHANGE_REASON_WINDOW: "window",
}
_REMOVED: Final = frozenset({("oof", "deleted"), ("oof", "expired"), ("delete", None), ("expire", None)})
"""Messages whose record is the removed one."""

_Column = TypeVar("_Column")


def changes_of(batch: sow_pb2.ChangeBatch, prefix: str, position_marks: str = "") -> list[Change]:
    """The changes of a frame; `prefix` begins the bookmarks of single changes, and `position_marks` ends them."""
    topic = batch.topic
    records = RecordBatch(topic, batch.records)
    count = len(records)
    ops = _column(batch.op, count, 0)
    reasons = _column(batch.reason, count, 0, optional=True)
    marks: list[str | None]
    if batch.atomic or batch.more:
        marks = [None] * count
        if count and not batch.more:
            marks[-1] = batch.bookmark + position_marks
    else:
        marks = [f"{prefix}{sequence}{position_marks}" for sequence in batch.records.sequence]
    plain = not (any(reasons) or batch.is_delta or batch.unset_paths or batch.delivery_count)
    if plain and set(ops) <= {sow_pb2.CHANGE_OP_PUT}:
        # Nearly all frames are like this. The general way below takes twice the time.
        return [Change("put", None, record, None, mark, topic) for record, mark in zip(records, marks, strict=True)]
    deltas = _column(batch.is_delta, count, False, optional=True)
    deliveries = _column(batch.delivery_count, count, 1, optional=True)
    unset = [tuple(one.paths) for one in batch.unset_paths] or [()] * count
    if len(unset) != count:
        raise _unequal()
    try:
        return [
            _change(_OPS[op], _REASONS[reason], record, mark, topic, is_delta, gone, times)
            for op, reason, record, mark, is_delta, gone, times in zip(
                ops, reasons, records, marks, deltas, unset, deliveries, strict=True
            )
        ]
    except KeyError as error:
        raise _statuses.malformed(f"a change of the unknown kind {error}") from error


def prefix_of(bookmark: str) -> str:
    """The epoch of a bookmark with the dot after it."""
    return bookmark.partition(";")[0].rstrip("0123456789")


def marks_of(bookmark: str) -> str:
    """The positions of other instances that a bookmark tells, with the semicolon in front; "": none (rule F6)."""
    at = bookmark.find(";")
    return "" if at < 0 else bookmark[at:]


def _change(
    op: ChangeOp,
    reason: ChangeReason | None,
    record: Record,
    bookmark: str | None,
    topic: str,
    is_delta: bool,
    unset_paths: tuple[str, ...],
    delivery_count: int,
) -> Change:
    if (op, reason) in _REMOVED:
        return Change(op, reason, None, record, bookmark, topic, delivery_count=delivery_count)
    return Change(op, reason, record, None, bookmark, topic, is_delta, unset_paths, delivery_count)


def _column(values: Sequence[_Column], count: int, absent: _Column, *, optional: bool = False) -> Sequence[_Column]:
    """A column of a frame, checked. An optional column that is absent is filled with its default."""
    if optional and not values:
        return [absent] * count
    if len(values) != count:
        raise _unequal()
    return values


def _unequal() -> SowError:
    return _statuses.malformed("columns of unequal length")
