"""The rows of what peers have passed on of publishers, by publisher and topic (told [3]).

[1]  A row is written in the same batch as the publisher's own one, which says that there are such rows. So a publisher
     without any costs no read of them.
[2]  Rows go with the publisher, or once their topic has been deleted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from sow_server.engine.commit.told import PassedOn, Told
from sow_server.engine.disk.layout import passed_on_prefix
from sow_server.engine.disk.rocks import META, Rocks
from sow_server.engine.stored import u32

_CACHED_MAX: Final = 10_000
"""Publishers with rows in the cache, also missing ones."""
_CACHED_TOPICS_MAX: Final = 32
"""The most topics of one publisher in the cache."""
_CACHED_BYTES_MAX: Final = 2**12
"""A larger row is read anew each time: peers say how large it is."""

_decoder: Final[msgspec.msgpack.Decoder[PassedOn]] = msgspec.msgpack.Decoder(tuple[Told, ...])


def encode_passed_on(parts: PassedOn) -> bytes:
    """The stored row."""
    return msgspec.msgpack.encode(parts)


def encode_passed_on_rows(publisher_id: str, rows: Mapping[int, PassedOn]) -> dict[bytes, bytes]:
    """The stored rows, by key. Rows that are one object are encoded once."""
    encoded = {number: encode_passed_on(parts) for number, parts in {id(one): one for one in rows.values()}.items()}
    prefix = passed_on_prefix(publisher_id)
    return {prefix + u32(topic_id): encoded[id(parts)] for topic_id, parts in rows.items()}


def decode_passed_on(row: bytes) -> PassedOn:
    """The parts of a stored row."""
    return _decoder.decode(row)


def read_passed_on(rocks: Rocks, publisher_id: str) -> PassedOn:
    """The parts that have been passed on of all topics of a publisher, each once, without their refusals. From any
    thread, and not from the event loop: there may be 10,000 topics."""
    prefix = passed_on_prefix(publisher_id)
    cursor = rocks.cursor(META, fill_cache=False)
    found: dict[Told, None] = {}
    try:
        for _, row in cursor.rows(prefix, prefix + b"\xff" * 5):
            found |= dict.fromkeys([part.told() for part in _brief_decoder.decode(row)])
    finally:
        cursor.close()
    return tuple(found)


class _Brief(msgspec.Struct, array_like=True):
    """A part as it is stored, up to its refusals, which are passed over. They are most of it where a peer lies."""

    source: str
    epoch: int
    token: int
    topics: tuple[int, ...]
    passed_on: bool
    others: tuple[int, ...]
    contiguous: int
    ahead: tuple[tuple[int, int], ...]

    def told(self) -> Told:
        return Told(*[getattr(self, field) for field in self.__struct_fields__])


_brief_decoder: Final[msgspec.msgpack.Decoder[tuple[_Brief, ...]]] = msgspec.msgpack.Decoder(tuple[_Brief, ...])


class PassedOnRows:
    """The rows, and a cache of those used last. Owned by the writer thread."""

    def __init__(self, rocks: Rocks) -> None:
        self._rocks = rocks
        self._known: OrderedDict[str, dict[int, PassedOn]] = OrderedDict()

    def of_topic(self, publisher_id: str, topic_id: int) -> PassedOn:
        """The parts of one topic."""
        return self.of_topics(publisher_id, [topic_id])[topic_id]

    def of_topics(self, publisher_id: str, topic_ids: Sequence[int]) -> dict[int, PassedOn]:
        """The parts of some topics. Rows that are equal are one object."""
        known = self._known.setdefault(publisher_id, {})
        self._known.move_to_end(publisher_id)
        missing = [topic_id for topic_id in topic_ids if topic_id not in known]
        found = {topic_id: known[topic_id] for topic_id in topic_ids if topic_id in known}
        if missing:
            prefix = passed_on_prefix(publisher_id)
            rows = self._rocks.multi_get(META, [prefix + u32(topic_id) for topic_id in missing])
            decoded: dict[bytes | None, PassedOn] = {row: decode_passed_on(row) for row in set(rows) if row}
            for topic_id, row in zip(missing, rows, strict=True):
                found[topic_id] = parts = decoded.get(row, ())
                if row is None or len(row) <= _CACHED_BYTES_MAX:
                    known[topic_id] = parts
            while len(known) > _CACHED_TOPICS_MAX:
                known.pop(next(iter(known)))
            if len(self._known) > _CACHED_MAX:
                self._known.popitem(last=False)
        return found

    def of_publisher(self, publisher_id: str) -> PassedOn:
        """As `read_passed_on`."""
        return read_passed_on(self._rocks, publisher_id)

    def changed(self, publisher_id: str, topic_ids: Iterable[int]) -> None:
        """Forgets rows of which others have been committed."""
        known = self._known.get(publisher_id, {})
        for topic_id in topic_ids:
            known.pop(topic_id, None)

    def forget(self, publisher_id: str) -> None:
        """Forgets the rows of a publisher."""
        self._known.pop(publisher_id, None)
