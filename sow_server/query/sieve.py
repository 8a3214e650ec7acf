"""A filter for many stored records at once, with the least work for each. Queries and exports use it.

[1]  Judging comes in pieces that are bounded by time, as far as a single record allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import compress, repeat
from typing import Final, TypeAlias

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.stored import HEADER_BYTES, header_columns, payloads
from sow_server.engine.values.model import NEVER
from sow_server.filters import Meta
from sow_server.filters.tree import Expression, Function, FunctionCall, Metadata, MetadataName, walk
from sow_server.query.absence import AbsentFields
from sow_server.query.filtering import RecordFilter

Sieve: TypeAlias = Callable[[Sequence[bytes], Sequence[bytes]], Sequence[bool]]
"""From record keys and stored values to the records that match."""
Metas: TypeAlias = Callable[[Sequence[bytes], Sequence[bytes]], Iterable[Meta]]
"""From record keys and stored values to the metadata of each record."""


def sieve(
    topic: Topic, given: RecordFilter | None, now_micros: int, absent: AbsentFields | None = None
) -> Sieve | None:
    """The filter for many records at once, with the least work for each; None: all of them match. `absent` looks at the
    records that it judges."""
    if given is None or given.predicate.constant:
        return None
    predicate = given.predicate
    matches = predicate.matches
    fixed = given.fixed_meta._replace(now_micros=now_micros)
    decode = topic.format.decoder(predicate.fields) if predicate.uses_payload else None
    metas = metas_of(topic, (given.tree,), now_micros) if given.uses_metadata else None

    def judge(keys: Sequence[bytes], values: Sequence[bytes]) -> Sequence[bool]:
        documents: Iterable[object] = repeat(None)
        if absent is not None and absent.looks:
            documents = absent.read(decode, values)
        elif decode is not None:
            documents = map(decode, payloads(values))
        return list(map(matches, documents, repeat(fixed, len(values)) if metas is None else metas(keys, values)))

    return judge


def metas_of(topic: Topic, trees: Iterable[Expression], now_micros: int) -> Metas:
    """The metadata that these expressions read of many records at once."""
    more = any(_is_more(node) for tree in trees for node in walk(tree))

    def metas(keys: Sequence[bytes], values: Sequence[bytes]) -> Iterable[Meta]:
        columns = header_columns(values)
        most = (
            map(_text, keys),
            columns.version,
            columns.publish_time,
            [None if time == NEVER else time for time in columns.expire_time],
            repeat(topic.name),
            repeat(now_micros),
        )
        if not more:
            return map(Meta, *most)
        names = topic.origins.names
        origins = [names[origin] for origin in columns.origin]
        return map(Meta, *most, columns.sequence, origins, [len(value) - HEADER_BYTES for value in values])

    return metas


_MORE: Final = (MetadataName.SEQUENCE, MetadataName.ORIGIN)
"""Metadata that few filters read, and that would cost all others a tenth of their time; so would the size."""


def _is_more(node: Expression) -> bool:
    if isinstance(node, FunctionCall):
        return node.function is Function.MESSAGE_SIZE
    return isinstance(node, Metadata) and node.name in _MORE


JUDGED_FIRST: Final = 16
"""Records that a filter judges without a look at the clock, at first; then more or fewer, as it is quick."""
JUDGED_MAX: Final = 10_000
JUDGING_SECONDS: Final = 0.01
"""The time of a piece: one filter takes a microsecond for a record, another one a millisecond."""


class Judging:
    """Judges the records that were read, a piece at a time [1]. Owns those that wait."""

    def __init__(self, sieve: Sieve, clock: Callable[[], float]) -> None:
        """`clock`: in seconds."""
        self._sieve = sieve
        self._clock = clock
        self._keys: list[bytes] = []
        self._values: list[bytes] = []
        self._at_once = JUDGED_FIRST

    @property
    def waits(self) -> bool:
        """True if there are records to judge."""
        return bool(self._keys)

    def take(self, keys: list[bytes], values: list[bytes]) -> None:
        """Takes records, in place of those that waited."""
        self._keys, self._values = keys, values

    def judge(self, keys: list[bytes], values: list[bytes]) -> None:
        """Does a piece of work: appends the matches among the next records."""
        began = self._clock()
        ends, start, size = began + JUDGING_SECONDS, 0, self._at_once
        while start < len(self._keys) and began < ends:
            some_keys, some_values = self._keys[start : start + size], self._values[start : start + size]
            wanted = self._sieve(some_keys, some_values)
            keys += compress(some_keys, wanted)
            values += compress(some_values, wanted)
            start += size
            now = self._clock()
            took = now - began
            if took < JUDGING_SECONDS / 4:
                size = min(2 * size, JUDGED_MAX)
            elif took > JUDGING_SECONDS / 2:
                size = max(1, int(size * JUDGING_SECONDS / 4 / took))
            began = now
        self._at_once = size
        self._keys, self._values = self._keys[start:], self._values[start:]


def _text(key: bytes) -> str:
    """A filter for keys that also accepts records which no publish could have made, so that they can be deleted."""
    return key.decode(errors="backslashreplace")
