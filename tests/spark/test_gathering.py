"""Packed pieces put together: the same records, in larger batches."""

from __future__ import annotations

from array import array
from itertools import accumulate

from sow_client import PackedRecords
from sow_spark.gathering import gathered, taken


def piece(first: int, count: int, *, names: tuple[str, ...] = ("here",), origins: bytes = b"") -> PackedRecords:
    payloads = [b'{"n":%d}\n' % number for number in range(first, first + count)]
    return PackedRecords(
        count=count,
        payloads=b"".join(payloads),
        payload_offsets=array("i", accumulate(map(len, payloads), initial=0)).tobytes(),
        keys=b"",
        key_offsets=b"",
        versions=array("q", range(first, first + count)).tobytes(),
        publish_times=b"",
        expire_times=b"",
        sequences=b"",
        origins=origins,
        origin_names=names,
        ops=b"",
        reasons=b"",
    )


def test_small_pieces_become_batches_with_offsets_of_their_own() -> None:
    found = list(gathered([piece(0, 3), piece(3, 4), piece(7, 1), piece(8, 2)], rows=5))

    assert [batch.count for batch in found] == [7, 3]
    whole = [piece(0, 7), piece(7, 3)]
    assert found == whole


def test_rows_are_taken_with_all_their_columns() -> None:
    names, origins = ("here", "there"), array("H", [0, 1, 0]).tobytes()
    assert taken(piece(0, 3, names=names, origins=origins), [1, 2]) == piece(1, 2, names=names, origins=origins[2:])
    assert taken(piece(0, 3), []) == piece(0, 0)


def test_large_batches_stay_unchanged() -> None:
    pieces = [piece(0, 5), piece(5, 6)]
    assert list(gathered(pieces, rows=5)) == pieces
    assert list(gathered([])) == []


def test_numbers_of_other_origins_are_not_mixed() -> None:
    some = [piece(0, 2), piece(2, 2, names=("here", "there"), origins=bytes(4)), piece(4, 1)]
    assert list(gathered(some)) == some
