"""Records in packed columns: `sow.v1.PackedRecords`, each column one run of bytes, little-endian.

A column is made in C, from lists and arrays: no line of Python per record.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate, count
from operator import add
from typing import Final

from sow.v1 import snapshot_pb2
from sow_server.engine.stored import HeaderColumns, header_columns, payloads
from sow_server.services.wire.convert import invalid
from sow_server.services.wire.narrowing import Narrow

BATCH_RECORDS: Final = 10_000
BATCH_RECORDS_MAX: Final = 100_000
COLUMNS_MAX: Final = 100
"""Columns that a request may name, repetitions included."""

PAYLOAD: Final = snapshot_pb2.PACKED_COLUMN_PAYLOAD
KEY: Final = snapshot_pb2.PACKED_COLUMN_KEY
VERSION: Final = snapshot_pb2.PACKED_COLUMN_VERSION
PUBLISH_TIME: Final = snapshot_pb2.PACKED_COLUMN_PUBLISH_TIME
EXPIRE_TIME: Final = snapshot_pb2.PACKED_COLUMN_EXPIRE_TIME
ORIGIN: Final = snapshot_pb2.PACKED_COLUMN_ORIGIN
SEQUENCE: Final = snapshot_pb2.PACKED_COLUMN_SEQUENCE
OP: Final = snapshot_pb2.PACKED_COLUMN_OP
RECORD_COLUMNS: Final = frozenset({PAYLOAD, KEY, VERSION, PUBLISH_TIME, EXPIRE_TIME, ORIGIN, SEQUENCE})
"""The columns of records."""
CHANGE_COLUMNS: Final = RECORD_COLUMNS | {OP}
"""The columns of changes."""
_OF_HEADERS: Final = frozenset({VERSION, PUBLISH_TIME, EXPIRE_TIME, ORIGIN, SEQUENCE})


def columns(wanted: Sequence[int], allowed: Collection[int]) -> frozenset[int]:
    """The columns that a request names. Raises StoreError INVALID_ARGUMENT."""
    if len(wanted) > COLUMNS_MAX:
        raise invalid("columns", f"{len(wanted)} are more than the limit of {COLUMNS_MAX}")
    for index, column in enumerate(wanted):
        if column == OP and OP not in allowed:
            raise invalid(f"columns[{index}]", "records of an export have no op; changes do")
        if column not in allowed:
            raise invalid(f"columns[{index}]", f"{column} is not a column of this server")
    return frozenset(wanted)


def batch_size(asked: int) -> int:
    """Records per batch at most. Raises StoreError INVALID_ARGUMENT."""
    if asked > BATCH_RECORDS_MAX:
        raise invalid("batch_size", f"must be between 1 and {BATCH_RECORDS_MAX}")
    return asked or BATCH_RECORDS


def fill_records(
    message: snapshot_pb2.PackedRecords,
    keys: Sequence[bytes],
    values: Sequence[bytes],
    wanted: frozenset[int],
    origins: Sequence[str],
    *,
    lines: bool,
    json: bool,
    project: Callable[[bytes], bytes] | None = None,
    narrow: Narrow | None = None,
) -> None:
    """Fills a message with stored records. `lines`, `json`: as for `fill_payloads`. `project`: makes the payload that
    the caller may see; `narrow` leaves out what it does not need of that."""
    message.count = len(values)
    if PAYLOAD in wanted:
        told: Sequence[bytes] = payloads(values)
        if project is not None:
            told = [project(payload) for payload in told]
        if narrow is not None:
            told = narrow(told)
        fill_payloads(message, told, lines=lines, json=json)
    if KEY in wanted:
        fill_keys(message, keys)
    if wanted & _OF_HEADERS:
        fill_headers(message, header_columns(values), wanted, origins)


def fill_payloads(message: snapshot_pb2.PackedRecords, payloads: Sequence[bytes], *, lines: bool, json: bool) -> None:
    """Fills in the payloads; with `lines` each is followed by a line feed. In documents of `json`, line breaks between
    the tokens become spaces, so that each line is one document."""
    if not lines:
        message.payloads = b"".join(payloads)
        message.payload_offsets = _offsets(payloads)
        return
    if json:
        # One check for all of them: joining them is cheaper than checking each.
        joined = b"".join(payloads)
        if b"\n" in joined or b"\r" in joined:
            payloads = [payload.replace(b"\n", b" ").replace(b"\r", b" ") for payload in payloads]
    message.payloads = b"\n".join([*payloads, b""])
    ends = map(add, accumulate(map(len, payloads), initial=0), count())
    message.payload_offsets = _little(array("i", ends))


def fill_keys(message: snapshot_pb2.PackedRecords, keys: Sequence[bytes]) -> None:
    """Fills in the record keys."""
    message.keys = b"".join(keys)
    message.key_offsets = _offsets(keys)


def fill_headers(
    message: snapshot_pb2.PackedRecords, headers: HeaderColumns, wanted: frozenset[int], origins: Sequence[str]
) -> None:
    """Fills in the columns that come from headers; `origins` are the names for the numbers in them."""
    if VERSION in wanted:
        message.versions = _little(headers.version)
    if PUBLISH_TIME in wanted:
        message.publish_times_micros = _little(headers.publish_time)
    if EXPIRE_TIME in wanted:
        message.expire_times_micros = _little(headers.expire_time)
    if SEQUENCE in wanted:
        message.sequences = _little(headers.sequence)
    if ORIGIN in wanted and headers.origin:
        first = headers.origin[0]
        if headers.origin.count(first) == len(headers.origin):
            message.origin_names.append(origins[first])
        else:
            message.origins = _little(headers.origin)
            message.origin_names.extend(origins)


def _offsets(texts: Sequence[bytes]) -> bytes:
    return _little(array("i", accumulate(map(len, texts), initial=0)))


def _little(numbers: array[int]) -> bytes:
    if sys.byteorder == "big":
        numbers = numbers[:]
        numbers.byteswap()
    return numbers.tobytes()
