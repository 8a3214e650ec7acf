"""Changes and rows, packed for other instances: in the layout of the journal, without changes that are not for them.

Expiries are not shipped: every instance expires by itself (rule R2). On a link with a filter, a record that does not
match is withdrawn where the peer may have had it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeVar

from sow_server.engine.disk.layout import Tombstone
from sow_server.engine.stored import (
    DELETE,
    EXPIRE,
    PAYLOAD,
    PUT,
    RECORD_KEY,
    TOUCH,
    WITHDRAW,
    Changes,
    Column,
    changes_kinds,
    decode_changes,
    encode_changes,
    header,
    header_columns,
)
from sow_server.engine.values.model import RecordMatcher

T = TypeVar("T")

_PUTS: Final = frozenset((PUT, TOUCH))


def pack_changes(value: bytes, first_sequence: int, matches: RecordMatcher | None) -> bytes:
    """A chunk of the journal for peers: unchanged, or without changes that are not for them; empty if none is left."""
    kinds = changes_kinds(value)
    # Peers do not get removed records either: a delete of many large records makes a commit that no message could
    # carry.
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
    """Some of the changes of a chunk; removals come without the removed records."""

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
    """Records, in the order of keys, and tombstones as a chunk in that order; empty when there are none. If a key has
    both, the record counts, because it came later. Works column by column, which decides the speed of seeding."""
    here = set(keys) if dead else frozenset()
    buried = {key: stone for key, stone in dead.items() if key not in here}
    stones = buried.values()
    rows = [*keys, *buried]
    if not rows:
        return b""
    order = sorted(range(len(rows)), key=rows.__getitem__) if buried else None

    def ordered(column: list[T]) -> list[T]:
        return column if order is None else [column[index] for index in order]

    def numbers(records: Iterable[int], of_stones: Iterable[int]) -> Column:
        column, of_all = Column(), ordered([*records, *of_stones])
        if of_all.count(of_all[0]) == len(of_all):
            column.constant(of_all[0], len(of_all))
        else:
            column.numbers(array("q", of_all))
        return column

    kinds = bytes((PUT,)) * len(keys)
    payloads = [value[PAYLOAD] for value in values]
    if matches is not None:
        shipped = [matches(key[RECORD_KEY], value) for key, value in zip(keys, values, strict=True)]
        kinds = bytes([PUT if ships else WITHDRAW for ships in shipped])
        payloads = [payload if ships else b"" for payload, ships in zip(payloads, shipped, strict=True)]
    records, no_times, nothing = header_columns(values), [0] * len(buried), Column()
    nothing.constant(0, len(rows))
    return encode_changes(
        Changes(
            0,
            0,
            bytes(ordered([*kinds, *(stone.kind for stone in stones)])),
            numbers(records.version, [stone.version for stone in stones]),
            numbers(records.publish_time, no_times),
            numbers(records.expire_time, no_times),
            numbers(records.origin, [stone.origin for stone in stones]),
            nothing,
            nothing,
            nothing,
            [key[RECORD_KEY] for key in ordered(rows)],
            ordered([*payloads, *[b""] * len(buried)]),
        )
    )
