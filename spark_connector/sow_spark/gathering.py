"""Joins the server's pieces of some 400 KiB into batches of the size that Spark prefers, and takes rows out of them.

Each Arrow batch has a fixed cost for Spark and for the decoder. At 2,000 rows it is a third of the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Final

import numpy as np

from sow_client import PackedRecords

ROWS: Final = 10_000
"""The number of rows that Spark itself puts into an Arrow batch."""
PAYLOAD_BYTES: Final = 2 * 2**20


def gathered(pieces: Iterable[PackedRecords], *, rows: int = ROWS) -> Iterator[PackedRecords]:
    """The same records in the same order, in batches of at least `rows` or `PAYLOAD_BYTES`.

    A batch is smaller at the end, and where the next piece has other names of origins.
    """
    held: list[PackedRecords] = []
    count = size = 0
    for piece in pieces:
        if held and not _alike(held[0], piece):
            yield _joined(held)
            held, count, size = [], 0, 0
        held.append(piece)
        count += piece.count
        size += len(piece.payloads)
        if count >= rows or size >= PAYLOAD_BYTES:
            yield _joined(held)
            held, count, size = [], 0, 0
    if held:
        yield _joined(held)


def taken(packed: PackedRecords, rows: Sequence[int]) -> PackedRecords:
    """Some of the records, in this order."""

    def values(column: bytes, width: int) -> bytes:
        words = np.frombuffer(column, f"V{width}")
        return words[list(rows)].tobytes() if column else b""

    def texts(column: bytes, offsets: bytes) -> tuple[bytes, bytes]:
        if not offsets:
            return b"", b""
        ends = np.frombuffer(offsets, np.int32)
        pieces = [column[ends[row] : ends[row + 1]] for row in rows]
        return b"".join(pieces), np.cumsum([0, *map(len, pieces)], dtype=np.int32).tobytes()

    payloads, payload_offsets = texts(packed.payloads, packed.payload_offsets)
    keys, key_offsets = texts(packed.keys, packed.key_offsets)
    return PackedRecords(
        count=len(rows),
        payloads=payloads,
        payload_offsets=payload_offsets,
        keys=keys,
        key_offsets=key_offsets,
        origin_names=packed.origin_names,
        **{name: values(getattr(packed, name), width) for name, width in _WIDTHS.items()},
    )


def _alike(one: PackedRecords, other: PackedRecords) -> bool:
    """True if the numbers of origins mean the same in both. A piece has only the names that it needs, and no numbers if
    all of its records have one origin."""
    return one.origin_names == other.origin_names and bool(one.origins) == bool(other.origins)


def _joined(pieces: Sequence[PackedRecords]) -> PackedRecords:
    if len(pieces) == 1:
        return pieces[0]
    columns = {name: b"".join(map(attrgetter(name), pieces)) for name in _COLUMNS}
    return PackedRecords(
        count=sum(piece.count for piece in pieces),
        payload_offsets=_offsets([piece.payload_offsets for piece in pieces]),
        key_offsets=_offsets([piece.key_offsets for piece in pieces]),
        origin_names=pieces[0].origin_names,
        **columns,
    )


def _offsets(pieces: Sequence[bytes]) -> bytes:
    """Offsets into the joined column; empty if the column was not requested."""
    if not pieces[0]:
        return b""
    found = [np.zeros(1, np.int32)]
    end = np.int32(0)
    for piece in pieces:
        offsets = np.frombuffer(piece, np.int32)
        found.append(offsets[1:] + end)
        end += offsets[-1]
    return np.concatenate(found).tobytes()


_WIDTHS: Final = {
    "versions": 8,
    "publish_times": 8,
    "expire_times": 8,
    "sequences": 8,
    "origins": 2,
    "ops": 1,
    "reasons": 1,
}
"""The bytes of a value of each column of numbers."""
_COLUMNS: Final = ("payloads", "keys", *_WIDTHS)
