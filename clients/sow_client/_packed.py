"""Records in packed columns, as they came over the wire: for programs that work on columns, such as Arrow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

from sow.v1 import snapshot_pb2
from sow_client._records import invalid

PackedColumn: TypeAlias = Literal[
    "payload", "key", "version", "publish_time", "expire_time", "origin", "sequence", "op"
]
_COLUMNS: Final = {
    name: snapshot_pb2.PackedColumn.Value(f"PACKED_COLUMN_{name.upper()}") for name in get_args(PackedColumn)
}


@dataclass(frozen=True, slots=True)
class PackedRecords:
    """Some records. Numbers are little-endian; a column that was not asked for is empty."""

    count: int
    payloads: bytes
    """The payloads one after the other; with `lines` a line feed follows each."""
    payload_offsets: bytes
    """`count` + 1 int32: the begin of each payload, and the end of the last one, including its line feed."""
    keys: bytes
    """UTF-8, one after the other."""
    key_offsets: bytes
    """`count` + 1 int32."""
    versions: bytes
    """`count` int64."""
    publish_times: bytes
    """`count` int64: microseconds since the epoch."""
    expire_times: bytes
    """`count` int64: microseconds since the epoch; 2^63 - 1 stands for never."""
    sequences: bytes
    """`count` int64."""
    origins: bytes
    """`count` uint16: index into `origin_names`; empty: all are `origin_names[0]`."""
    origin_names: tuple[str, ...]
    ops: bytes
    """The operations of changes: `count` bytes, each a `sow.v1.ChangeOp`."""
    reasons: bytes
    """The reasons of changes: `count` bytes, each a `sow.v1.ChangeReason`."""

    def __repr__(self) -> str:
        return f"PackedRecords({self.count} records, {len(self.payloads)} bytes of payloads)"


def packed(message: snapshot_pb2.PackedRecords) -> PackedRecords:
    """The records of a message."""
    return PackedRecords(
        count=message.count,
        payloads=message.payloads,
        payload_offsets=message.payload_offsets,
        keys=message.keys,
        key_offsets=message.key_offsets,
        versions=message.versions,
        publish_times=message.publish_times_micros,
        expire_times=message.expire_times_micros,
        sequences=message.sequences,
        origins=message.origins,
        origin_names=tuple(message.origin_names),
        ops=message.ops,
        reasons=message.reasons,
    )


def column_values(columns: Iterable[str]) -> list[snapshot_pb2.PackedColumn.ValueType]:
    """Columns by their names. Raises InvalidArgument."""
    if isinstance(columns, str):
        raise invalid("columns", f"is the text {columns!r}, not names of columns")
    values: list[snapshot_pb2.PackedColumn.ValueType] = []
    for name in columns:
        if name not in _COLUMNS:
            raise invalid("columns", f"{name!r} is not one of {', '.join(_COLUMNS)}")
        values.append(_COLUMNS[name])
    return values
