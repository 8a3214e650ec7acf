"""Secondary indexes: the entries of a record, and the interval of an index for a range of values (rule Q3). Pure.

    [1]  The entries of a record change in the same batch as the record.
    [2]  A complete index has exactly the entries of every stored record, overdue ones included, and no others.
    [3]  An index that is being built has exactly those entries up to the position of its build, and is never read.
    [4]  A value within a range has its entry within the `interval` of the range. The reverse does not hold: an entry
         has a number as the nearest float, and only the beginning of a text. So a reader that finds a record by an
         index evaluates the whole filter.

The entries that a document gives are part of the format on disk: when a record changes, the entries of its old document
are computed again, and removed.

An entry is a key without a value; `layout/indexes` draws it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Final, NamedTuple

from sow_server.engine.disk.layout import index_prefix, index_value
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.fields import Kind, Scalar, Steps, entries_of, value_at
from sow_server.engine.values.model import MessageType

INDEXES_MAX: Final = 16
"""Indexes of a topic. Each costs a write for every change of its field."""
ENTRIES_MAX: Final = 10_000
"""Entries of one record, in all indexes of its topic together (rule K8). Each costs tens of microseconds of a commit,
as it has the record's key: so many are a third of a second, however small the payload is. They are counted, not their
bytes, because whoever publishes can count values."""
_ID_MAX: Final = 0xFFFF
_MSGPACK_ARRAY: Final = re.compile(rb"[\x90-\x9f\xdc\xdd]").search
"""Finds what may be the begin of an array; also other bytes, but none of ASCII."""
_NO_KEYS: Final[frozenset[bytes]] = frozenset()
_SCALARS: Final = (str, int, float, bool, type(None))


class Index(NamedTuple):
    """One index of a topic; its entries begin with `prefix`. Ids are the topic's own, and never used again."""

    id: int
    path: str
    steps: Steps
    prefix: bytes
    complete: bool

    @property
    def stop(self) -> bytes:
        """A key above all its entries: no kind is 255."""
        return self.prefix + b"\xff"


# --- entries ---------------------------------------------------------------------------------------------------------


def entry_keys(index: Index, document: object, record_key: bytes) -> set[bytes]:
    """The keys of a record's entries."""
    return _keys(index, value_at(document, index.steps), record_key)


def may_have_more(
    indexes: Sequence[Index], message_type: MessageType, payloads: Sequence[bytes], few: int
) -> list[int]:
    """The positions of the payloads that may give more than a `few` entries. Cheap: it runs no Python for a payload.

    Without an array a field has one value; and a value has at most two entries, as a text that is a number.
    """
    values = few // (2 * len(indexes))
    if message_type is MessageType.JSON:
        return [at for at, payload in enumerate(payloads) if b"[" in payload and payload.count(b",") >= values]
    if message_type is MessageType.MSGPACK:
        return [at for at, payload in enumerate(payloads) if len(payload) > values and _MSGPACK_ARRAY(payload)]
    return []


def entries_count(indexes: Sequence[Index], document: object) -> tuple[int, str]:
    """The number of entries that a document has in all indexes, and the field with the most of them. It does not make
    them. Values that differ only beyond the precision of an entry count each."""
    counts = [(len(set(entries_of(value_at(document, index.steps)))), index.path) for index in indexes]
    return sum(count for count, _ in counts), max(counts)[1]


def changed_keys(
    index: Index, before: object, after: object, record_key: bytes
) -> tuple[AbstractSet[bytes], AbstractSet[bytes]]:
    """(keys that go, keys that come) when the document of a record changes; None where there is no record."""
    old, new = value_at(before, index.steps), value_at(after, index.steps)
    if type(old) is type(new) and type(old) in _SCALARS and old == new:
        return _NO_KEYS, _NO_KEYS  # most frequent: identifying fields stay the same when the other fields change
    if type(old) is list and type(new) is list and set(entries_of(old)) == set(entries_of(new)):
        return _NO_KEYS, _NO_KEYS  # by entries: 1 and true are equal
    gone = _keys(index, old, record_key) if old is not None else _NO_KEYS
    come = _keys(index, new, record_key) if new is not None else _NO_KEYS
    return gone - come, come - gone


def _keys(index: Index, value: object, record_key: bytes) -> set[bytes]:
    prefix = index.prefix
    return {prefix + index_value(kind, scalar) + record_key for kind, scalar in entries_of(value)}


# --- ranges ----------------------------------------------------------------------------------------------------------


def interval(kind: Kind, low: Scalar | None, high: Scalar | None) -> tuple[bytes, bytes]:
    """(start, stop) in an index, behind its prefix, of the entries from `low` to `high`, both included ([4]).

    None: no such end. A range without values, its low above its high, has a stop that is not above its start.
    """
    start = bytes((kind,)) if low is None else index_value(kind, low)
    return start, _after(bytes((kind,)) if high is None else index_value(kind, high))


def _after(prefix: bytes) -> bytes:
    """The least bytes above all that begin with `prefix`. They exist, because `prefix` begins with a kind."""
    return (int.from_bytes(prefix, "big") + 1).to_bytes(len(prefix), "big")


# --- the indexes of a topic ------------------------------------------------------------------------------------------


class Indexes(NamedTuple):
    """All indexes of a topic, in the order of its settings, and the id of the next new one."""

    all: tuple[Index, ...] = ()
    next_id: int = 1


NO_INDEXES: Final = Indexes()


def altered(
    before: Indexes, topic_id: int, paths: Iterable[tuple[str, Steps]], *, keep: bool, complete: bool
) -> Indexes:
    """The indexes of a topic whose settings name `paths`: existing ones stay if `keep` is set; new ones are `complete`
    or to be built. Raises StoreError INVALID_ARGUMENT once the ids are used up."""
    known = {index.steps: index for index in before.all} if keep else {}
    found: list[Index] = []
    next_id = before.next_id
    for path, steps in paths:
        if steps in known:
            found.append(known[steps]._replace(path=path))
            continue
        if next_id > _ID_MAX:
            raise StoreError(
                Reason.INVALID_ARGUMENT,
                f"index: the topic has had {_ID_MAX} indexes, and their numbers are not used again; make a new topic",
                field="settings.index",
            )
        found.append(Index(next_id, path, steps, index_prefix(topic_id, next_id), complete))
        next_id += 1
    return Indexes(tuple(found), next_id)
