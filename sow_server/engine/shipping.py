"""Changes and rows, packed for other instances: in the layout of the journal, without what is not for them.

Expiries are not shipped: every instance expires by itself (rule R2). On a link with a filter, a record that does not
match is withdrawn where the peer may have had it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from sow_server.engine.codec import (
    DELETE,
    EXPIRE,
    HEADER_BYTES,
    PUT,
    TOUCH,
    WITHDRAW,
    Changes,
    Column,
    Tombstone,
    changes_kinds,
    decode_changes,
    encode_changes,
    header,
    header_columns,
)
from sow_server.engine.model import RecordMatcher

_PUTS: Final = frozenset((PUT, TOUCH))


def pack_changes(value: bytes, first_sequence: int, matches: RecordMatcher | None) -> bytes:
    """A chunk of the journal as peers get it: as it is, or without what is not for them; empty when nothing is left."""
    kinds = changes_kinds(value)
    # Nor do peers get what was removed: a delete of many large records makes a commit that no message could carry.
    if matches is None and EXPIRE not in kinds and DELETE not in kinds:
        return value
    changes = decode_changes(first_sequence, value)
    stored = [] if matches is None else _stored(changes)
    previous = changes.previous.tolist()
    chosen: list[int] = []
    shipped = bytearray()
    for index, kind in enumerate(kinds):
        withdrawn = kind in _PUTS and matches is not None and not matches(changes.keys[index], stored[index])
        if kind == EXPIRE or (withdrawn and not previous[index]):
            continue  # the latter: there was none that the peer could have
        chosen.append(index)
        shipped.append(WITHDRAW if withdrawn else kind)
    return _pack(changes, chosen, bytes(shipped)) if chosen else b""


def _stored(changes: Changes) -> list[bytes]:
    """Changes as their records are stored."""
    return [
        header(
            origin=origin,
            payload_bytes=len(payload),
            version=version,
            publish_time=publish_time,
            expire_time=expire_time,
            sequence=sequence,
        )
        + payload
        for payload, origin, version, publish_time, expire_time, sequence in zip(
            changes.payloads,
            changes.origin,
            changes.version,
            changes.publish_time_micros,
            changes.expire_time_micros,
            range(changes.first_sequence, changes.first_sequence + len(changes.payloads)),
            strict=True,
        )
    ]


def _pack(changes: Changes, chosen: Sequence[int], kinds: bytes) -> bytes:
    """Some of the changes of a chunk; those that remove something without what they remove."""

    def picked(column: Column) -> Column:
        numbers = column.tolist()
        return Column([numbers[index] for index in chosen])

    return encode_changes(
        changes._replace(
            change=kinds,
            version=picked(changes.version),
            publish_time_micros=picked(changes.publish_time_micros),
            expire_time_micros=picked(changes.expire_time_micros),
            origin=picked(changes.origin),
            previous=picked(changes.previous),
            removed_version=picked(changes.removed_version),
            removed_origin=picked(changes.removed_origin),
            keys=[changes.keys[index] for index in chosen],
            payloads=[
                changes.payloads[index] if kind in _PUTS else b"" for index, kind in zip(chosen, kinds, strict=True)
            ],
        )
    )


def pack_rows(
    keys: list[bytes], values: list[bytes], dead: Mapping[bytes, Tombstone], matches: RecordMatcher | None
) -> bytes:
    """Records and tombstones as a chunk, in the order of keys; empty when there are none. Of a key that has both the
    record counts: it came later."""
    columns = header_columns(values)
    rows: dict[bytes, tuple[int, int, int, int, int, bytes]] = {
        key: (stone.kind, stone.version, 0, 0, stone.origin, b"") for key, stone in dead.items()
    }
    for key, value, version, publish_time, expire_time, origin in zip(
        keys, values, columns.version, columns.publish_time, columns.expire_time, columns.origin, strict=True
    ):
        if matches is None or matches(key[4:], value):
            rows[key] = PUT, version, publish_time, expire_time, origin, value[HEADER_BYTES:]
        else:
            rows[key] = WITHDRAW, version, publish_time, expire_time, origin, b""
    if not rows:
        return b""
    order = sorted(rows)
    kinds, row_versions, publish_times, expire_times, origins, payloads = zip(
        *[rows[key] for key in order], strict=True
    )
    count = len(order)
    nothing = Column([0] * count)

    def column(numbers: Iterable[int]) -> Column:
        packed = Column()
        packed.numbers(array("q", numbers))
        return packed

    return encode_changes(
        Changes(
            0,
            0,
            bytes(kinds),
            column(row_versions),
            column(publish_times),
            column(expire_times),
            column(origins),
            nothing,
            nothing,
            nothing,
            [key[4:] for key in order],
            payloads,
        )
    )
