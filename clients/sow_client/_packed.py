"""Records whose columns are one run of bytes each, as exports and ranges of changes come: to be used as they are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from sow.v1 import snapshot_pb2
from sow_client._records import invalid

ColumnName: TypeAlias = Literal["payload", "key", "version", "publish_time", "expire_time", "origin", "sequence", "op"]

_COLUMNS: Final[dict[str, snapshot_pb2.PackedColumn.ValueType]] = {
    "payload": snapshot_pb2.PACKED_COLUMN_PAYLOAD,
    "key": snapshot_pb2.PACKED_COLUMN_KEY,
    "version": snapshot_pb2.PACKED_COLUMN_VERSION,
    "publish_time": snapshot_pb2.PACKED_COLUMN_PUBLISH_TIME,
    "expire_time": snapshot_pb2.PACKED_COLUMN_EXPIRE_TIME,
    "origin": snapshot_pb2.PACKED_COLUMN_ORIGIN,
    "sequence": snapshot_pb2.PACKED_COLUMN_SEQUENCE,
    "op": snapshot_pb2.PACKED_COLUMN_OP,
}


@dataclass(frozen=True, slots=True)
class PackedRecords:
    """Some records; columns that were not asked for are empty. Numbers are little-endian.

    `payloads` and `keys` stand one after the other, `payload_offsets` and `key_offsets` (int32, one more than there are
    records) say where each begins. `versions`, `publish_times`, `expire_times` (microseconds since 1970; the largest
    int64 stands for never) and `sequences` are int64. `origins`: uint16, indexes of `origin_names`; empty where all
    are the first one. Of changes: `ops` has a byte for each, 1 put, 3 delete, 4 expire, and `reasons` 1 for a touch.
    """

    count: int
    payloads: bytes = b""
    payload_offsets: bytes = b""
    keys: bytes = b""
    key_offsets: bytes = b""
    versions: bytes = b""
    publish_times: bytes = b""
    expire_times: bytes = b""
    sequences: bytes = b""
    origins: bytes = b""
    origin_names: tuple[str, ...] = ()
    ops: bytes = b""
    reasons: bytes = b""


def packed(message: snapshot_pb2.PackedRecords) -> PackedRecords:
    """Records as they came."""
    return PackedRecords(
        message.count,
        message.payloads,
        message.payload_offsets,
        message.keys,
        message.key_offsets,
        message.versions,
        message.publish_times_micros,
        message.expire_times_micros,
        message.sequences,
        message.origins,
        tuple(message.origin_names),
        message.ops,
        message.reasons,
    )


def column_values(columns: Iterable[str]) -> list[snapshot_pb2.PackedColumn.ValueType]:
    """The columns by their names."""
    if isinstance(columns, str):
        raise invalid("columns", "is one text; give a list of names")
    found: list[snapshot_pb2.PackedColumn.ValueType] = []
    for name in columns:
        value = _COLUMNS.get(name)
        if value is None:
            raise invalid("columns", f"{name!r} is none of {', '.join(_COLUMNS)}")
        found.append(value)
    return found
