"""Secondary indexes: which entries a record has, and where in an index a range of values lies (rule Q3). Pure.

    IX1  The entries of a record change in the same batch as the record.
    IX2  A complete index has exactly the entries of every stored record, overdue ones included, and no others.
    IX3  An index that is being built has, behind the position of its build, exactly those entries, and is never read.
    IX4  A value within a range has its entry within the `interval` of the range. The reverse does not hold: a number is
         there as the nearest float, a text as its beginning. Whoever finds a record this way asks the whole filter.

What a document's entries are belongs to the format on disk: they are computed anew when the record changes, and those
that were there are removed by what is computed of the old document then.

An entry is a key without a value; `codec` draws it. Entries are in the order of values: booleans, numbers by value,
texts by code point, and those of one value by record key.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from struct import Struct
from typing import Final, NamedTuple

from sow_server.engine.disk.layout import u16, u32
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.fields import Kind, Scalar, Steps, as_float, entries_of, value_at

INDEXES_MAX: Final = 16
"""Indexes of a topic. Each costs every change of its field a write."""
TEXT_BYTES_MAX: Final = 256
"""What of a longer text is in its entry."""
PREFIX_BYTES: Final = 6
_ID_MAX: Final = 0xFFFF
_FLOAT: Final = Struct(">d")
_WORD: Final = Struct(">Q")
_SIGN: Final = 1 << 63
_ALL_ONES: Final = (1 << 64) - 1
_TEXT_END: Final = b"\0\0"
_NO_KEYS: Final[frozenset[bytes]] = frozenset()
_SCALARS: Final = (str, int, float, bool, type(None))
_ENTRY_BYTES: Final = {Kind.BOOLEAN: PREFIX_BYTES + 2, Kind.NUMBER: PREFIX_BYTES + 9}
"""Where the record key begins, for values of one length."""


class Index(NamedTuple):
    """One index of a topic; `prefix` is what its entries begin with. Ids are the topic's own, and never used again."""

    id: int
    path: str
    steps: Steps
    prefix: bytes
    complete: bool

    @property
    def stop(self) -> bytes:
        """Above all its entries: no kind is 255."""
        return self.prefix + b"\xff"


# --- entries ---------------------------------------------------------------------------------------------------------


def entry_keys(index: Index, document: object, record_key: bytes) -> set[bytes]:
    """The keys of a record's entries."""
    return _keys(index, value_at(document, index.steps), record_key)


def changed_keys(
    index: Index, before: object, after: object, record_key: bytes
) -> tuple[AbstractSet[bytes], AbstractSet[bytes]]:
    """(keys that go, keys that come) when the document of a record changes; None where there is no record."""
    old, new = value_at(before, index.steps), value_at(after, index.steps)
    if type(old) is type(new) and type(old) in _SCALARS and old == new:
        return _NO_KEYS, _NO_KEYS  # most frequent: what identifies or describes stays when the other fields change
    gone = _keys(index, old, record_key) if old is not None else _NO_KEYS
    come = _keys(index, new, record_key) if new is not None else _NO_KEYS
    return gone - come, come - gone


def _keys(index: Index, value: object, record_key: bytes) -> set[bytes]:
    prefix = index.prefix
    return {prefix + _encoded(kind, scalar) + record_key for kind, scalar in entries_of(value)}


def _encoded(kind: Kind, value: Scalar) -> bytes:
    """A value in bytes that have its order, its kind in front."""
    if kind is Kind.TEXT:
        assert type(value) is str, "texts are str"
        # UTF-8 has the order of code points. A text of 256 bytes has no more than 256 characters.
        raw = value[:TEXT_BYTES_MAX].encode("utf-8", "surrogatepass")[:TEXT_BYTES_MAX]
        if b"\0" in raw:
            raw = raw.replace(b"\0", b"\0\xff")  # above the end, which a shorter text has in this place
        return b"\3" + raw + _TEXT_END
    if kind is Kind.NUMBER:
        assert type(value) is int or type(value) is float, "numbers are int or float"
        (bits,) = _WORD.unpack(_FLOAT.pack(as_float(value) + 0.0))  # -0.0 + 0.0 is 0.0
        return b"\2" + _WORD.pack(bits ^ _ALL_ONES if bits & _SIGN else bits ^ _SIGN)
    return b"\1\1" if value else b"\1\0"


# --- ranges ----------------------------------------------------------------------------------------------------------


def interval(kind: Kind, low: Scalar | None, high: Scalar | None) -> tuple[bytes, bytes]:
    """(start, stop) in an index, behind its prefix, of the entries from `low` to `high`, both included (IX4).

    None: no such end. A range without values, its low above its high, has a stop that is not above its start.
    """
    start = bytes((kind,)) if low is None else _encoded(kind, low)
    return start, _after(bytes((kind,)) if high is None else _encoded(kind, high))


def _after(prefix: bytes) -> bytes:
    """The least bytes above all that begin with `prefix`; it begins with a kind, so there are some."""
    return (int.from_bytes(prefix, "big") + 1).to_bytes(len(prefix), "big")


def record_keys(entries: Sequence[bytes]) -> list[bytes]:
    """The record keys of entries that stand in order."""
    if not entries:
        return []
    kind = entries[0][PREFIX_BYTES]
    if kind != entries[-1][PREFIX_BYTES]:
        return [record_keys([entry])[0] for entry in entries]
    if kind == Kind.TEXT:
        # Zeros inside a text are followed by 255, so the first two in a row are its end.
        return [entry[entry.index(_TEXT_END, PREFIX_BYTES + 1) + 2 :] for entry in entries]
    begin = _ENTRY_BYTES[Kind(kind)]
    return [entry[begin:] for entry in entries]


# --- the indexes of a topic ------------------------------------------------------------------------------------------


class Indexes(NamedTuple):
    """All indexes of a topic, in the order of its settings, and the id that the next new one gets."""

    all: tuple[Index, ...] = ()
    next_id: int = 1


NO_INDEXES: Final = Indexes()


def altered(
    before: Indexes, topic_id: int, paths: Iterable[tuple[str, Steps]], *, keep: bool, complete: bool
) -> Indexes:
    """The indexes of a topic whose settings name `paths`: those that are there stay, unless not `keep`; new ones are
    `complete` or to be built. Raises StoreError INVALID_ARGUMENT once the ids are used up."""
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


def index_prefix(topic_id: int, index_id: int) -> bytes:
    """What the entries of an index begin with."""
    return u32(topic_id) + u16(index_id)
