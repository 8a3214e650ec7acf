"""A live result at one position, and the difference to another one (rule S11). Pure.

[1]  Applied to the result that was told before, the messages give exactly the new one: first the `oof`s are taken
     out, and the old places of the `put`s. Then the `put`s are inserted at their positions, in rising order.
[2]  Unchanged rows keep their order among each other: a place depends on the record alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from sow_server.engine.stored import HeaderColumns, header_columns
from sow_server.engine.values.model import NEVER
from sow_server.subscriptions.frames import (
    FRAME_BYTES,
    ChangeFrame,
    ChangeOp,
    ChangeReason,
    Row,
    SnapshotBatch,
    frames_of,
)

Told: TypeAlias = Mapping[bytes, object]
"""The rows that a follower was told, in order: their keys, and of each what tells whether it has changed."""


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """A result as it is at one position."""

    number: int
    """Rises with the results of one source."""
    sequence: int
    """It is right at this position."""
    now_micros: int
    """The instant by which expiry was judged."""
    rows: Sequence[Row]
    """In order; all are puts."""
    told: Told
    """The same as a follower remembers it."""
    absent_fields: Sequence[str] = ()
    """As for a query (rule Q10)."""


class Difference(NamedTuple):
    """The messages that lead from one result to another, in columns."""

    rows: list[Row]
    positions: list[int]
    """0 for an `oof`."""


def difference(told: Told, result: Result, reason_of: Callable[[bytes], ChangeReason]) -> Difference:
    """The difference between what was told and a result [1]. `reason_of`: why a record has left."""
    here = result.told
    rows = [_left(key, reason_of(key), result.sequence) for key in told if key not in here]
    positions = [0] * len(rows)
    for position, row in enumerate(result.rows):
        if told.get(row.key) != here[row.key]:
            rows.append(row)
            positions.append(position)
    return Difference(rows, positions)


def _left(key: bytes, reason: ChangeReason, sequence: int) -> Row:
    """The key alone: its receiver has the record, and may not be allowed to see a newer one."""
    return Row(ChangeOp.OOF, reason, key, b"", 0, 0, NEVER, 0, sequence)


def change_frames(
    topic: str, found: Difference, *, after: int, bookmark: int, batch_size: int, results: bool
) -> list[ChangeFrame]:
    """The messages as frames that belong together: only the last one has the bookmark. `results`: they are of
    groups."""
    frames = frames_of(
        topic, found.rows, batch_size=batch_size, after=after, bookmark=bookmark, together=True, judged=False
    )
    begin = 0
    for frame in frames:
        frame.positions = found.positions[begin : begin + len(frame.rows)]
        frame.results = results
        begin += len(frame.rows)
    return frames


def snapshot_batches(topic: str, rows: Sequence[Row], batch_size: int, *, results: bool) -> list[SnapshotBatch]:
    """The rows as batches of a snapshot, in their order. `results`: they are of groups."""
    batches: list[SnapshotBatch] = []
    begin = size = 0
    for at, row in enumerate(rows):
        size += len(row.payload)
        if at + 1 == len(rows) or at + 1 - begin == batch_size or size >= FRAME_BYTES:
            batches.append(_batch(topic, rows[begin : at + 1], results=results))
            begin, size = at + 1, 0
    return batches


def _batch(topic: str, rows: Sequence[Row], *, results: bool) -> SnapshotBatch:
    headers = header_columns(())
    for row in rows:
        words = row.version, row.publish_time, row.expire_time, row.sequence, row.origin
        for column, word in zip(headers, words, strict=True):
            column.append(word)
    return SnapshotBatch(topic, [row.key for row in rows], [row.payload for row in rows], headers, results=results)


def rows_of(batch: SnapshotBatch) -> list[Row]:
    """The records of a batch as puts."""
    return [
        Row(ChangeOp.PUT, ChangeReason.NONE, key, payload, *words)
        for key, payload, *words in zip(batch.keys, batch.payloads, *_in_order(batch.headers), strict=True)
    ]


def _in_order(headers: HeaderColumns) -> tuple[Sequence[int], ...]:
    """The columns in the order of the fields of a row."""
    return headers.version, headers.publish_time, headers.expire_time, headers.origin, headers.sequence
