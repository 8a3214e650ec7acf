"""A filter for many stored records at once, with the least work for each. Queries and exports use it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import TypeAlias

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.disk.layout import HEADER_BYTES, header_columns
from sow_server.engine.values.model import NEVER
from sow_server.filters import Meta
from sow_server.query.filtering import RecordFilter

Sieve: TypeAlias = Callable[[Sequence[bytes], Sequence[bytes]], Sequence[bool]]
"""From record keys and stored values to the records that match."""


def sieve(topic: Topic, given: RecordFilter | None, now_micros: int) -> Sieve | None:
    """The filter for many records at once, with the least work for each; None: all of them match."""
    if given is None or given.predicate.constant:
        return None
    predicate = given.predicate
    matches = predicate.matches
    fixed = given.fixed_meta._replace(now_micros=now_micros)
    decode = topic.format.decoder(predicate.fields) if predicate.uses_payload else None

    def metas(keys: Sequence[bytes], values: Sequence[bytes]) -> Iterable[Meta]:
        columns = header_columns(values)
        return map(
            Meta,
            map(_text, keys),
            columns.version,
            columns.publish_time,
            [None if time == NEVER else time for time in columns.expire_time],
            repeat(fixed.topic),
            repeat(now_micros),
        )

    if given.uses_metadata:
        if decode is None:
            return lambda keys, values: [matches(None, meta) for meta in metas(keys, values)]
        decoded = decode
        return lambda keys, values: [
            matches(decoded(value[HEADER_BYTES:]), meta)
            for value, meta in zip(values, metas(keys, values), strict=True)
        ]
    if decode is None:
        answer = matches(None, fixed)
        return lambda keys, values: [answer] * len(keys)
    decoded = decode
    return lambda keys, values: [matches(decoded(value[HEADER_BYTES:]), fixed) for value in values]


def _text(key: bytes) -> str:
    """A filter for keys that also accepts records which no publish could have made, so that they can be deleted."""
    return key.decode(errors="backslashreplace")
