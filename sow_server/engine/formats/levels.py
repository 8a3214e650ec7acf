"""Documents that are opened level by level, in time that is linear in their bytes. Pure.

To open a level, msgspec reads all bytes below it. Opened one by one, the levels of a deep document would be read
hundreds of times.

    [1]  The values of the first `DECODED_LEVELS` levels are read by msgspec as they are. A value at that depth is
         indexed: where each of its objects and arrays with others inside begins and ends. From then on each of these,
         a `Part`, is read without the parts inside it.
    [2]  A level that was opened is changed in place. A document is encoded once, at the end.
    [3]  A value that is not opened keeps its bytes.
    [4]  Large objects of many names are read and written in pieces. One call of msgspec on 100,000 names holds the
         interpreter, and so all other threads, for 40 ms; pieces take as long together, but let the others in between.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias, TypedDict, final

import msgspec

DECODED_LEVELS: Final = 8
"""Few paths are longer. An index costs as much as msgspec needs for the same bytes five to fifty times."""
LARGE_BYTES: Final = 32 * 1024
"""Objects with more bytes are read in part. Smaller ones are opened faster as a whole."""
PIECE_BYTES: Final = 16 * 1024
"""The size of a piece of a large object, which takes some 0.3 ms."""
FEW_NAMES: Final = 16
"""So many fields msgspec finds in one pass. It compares each name of a document with each of them."""

Value: TypeAlias = "msgspec.Raw | Part | dict[str, Value] | list[Value]"
"""A value of a document: as published, or opened."""
Fields: TypeAlias = "dict[str, Value]"
_OPENED: Final = (dict, list)


class Index(NamedTuple):
    """The places of the parts of a value, in the order of their beginnings. The first is the value itself; there is
    none if it has no objects or arrays inside. Arrays of numbers, as there may be a part for every few bytes.
    """

    text: bytes
    starts: array[int]
    ends: array[int]
    following: array[int]
    """For each part the number of the first one that begins behind its end."""


@final
class Part:
    """An object or array that has others inside, in an index."""

    __slots__ = ("index", "number")
    __hash__ = None  # type: ignore[assignment]  # nobody keeps parts in a set

    def __init__(self, index: Index, number: int) -> None:
        self.index = index
        self.number = number

    @property
    def start(self) -> int:
        return self.index.starts[self.number]

    @property
    def end(self) -> int:
        return self.index.ends[self.number]

    @property
    def first_byte(self) -> int:
        return self.index.text[self.start]

    @property
    def has_parts(self) -> bool:
        return self.index.following[self.number] > self.number + 1

    def __eq__(self, other: object) -> bool:
        """True if the bytes are the same. Without a copy: parts of large documents are compared at each level."""
        if not isinstance(other, Part) or self.end - self.start != other.end - other.start:
            return False
        return self.index.text.startswith(memoryview(other.index.text)[other.start : other.end], self.start)

    def __bytes__(self) -> bytes:
        """As published."""
        return self.index.text[self.start : self.end]


def published(value: Value) -> bytes:
    """The bytes of a value that is not open."""
    return bytes(value)  # type: ignore[arg-type]  # a check would cost more than the work


def raw_part(part: object) -> msgspec.Raw:
    """The `enc_hook` of the encoders of opened documents."""
    assert type(part) is Part, "a document holds nothing else that msgspec does not know"
    return msgspec.Raw(bytes(part))


@dataclass(frozen=True, slots=True)
class Encoding:
    """The parts of an encoding that `Levels` needs."""

    decoder: Callable[[object], Callable[[bytes | msgspec.Raw], Any]]
    """Makes the `decode` for a type."""
    encode: Callable[[object], bytes]
    """With `raw_part`."""
    objects: bytes
    """The bytes that an object can begin with."""
    arrays: bytes
    """The bytes that an array can begin with."""
    index: Callable[[bytes], Index]
    """The index of an object or array."""
    place_holder: Callable[[int], bytes]
    """An array in an array that stands for the part of that number. Where it stands there is no other one: it would
    have been a part."""
    held: Callable[[bytes], int | None]
    """The number of a place holder; None for other values."""

    pieces: Callable[[bytes, int], Iterator[bytes]]
    """Objects of about so many bytes, each with some of the members of an object, in their order."""
    joined: Callable[[Sequence[bytes]], bytes]
    """The object of which these are the pieces."""


def is_large(payload: bytes) -> bool:
    return len(payload) > LARGE_BYTES


def fit_for_msgspec(names: Collection[str]) -> bool:
    """True if msgspec finds these fields in a TypedDict: it takes others than ASCII for the empty name, unless Python
    happens to have their UTF-8 at hand (0.22)."""
    return all(name.isascii() and name for name in names)


class Levels:
    """Opens the levels of documents of one encoding. Depths are counted from 0, the top."""

    def __init__(self, encoding: Encoding) -> None:
        self.top: Callable[[bytes | msgspec.Raw], Fields] = encoding.decoder(dict[str, msgspec.Raw])
        """The fields of a whole document. Raises MsgspecError and RecursionError."""
        self.encode = encoding.encode
        self._encoding = encoding
        self._elements: Callable[[bytes | msgspec.Raw], list[Value]] = encoding.decoder(list[msgspec.Raw])
        self._any = encoding.decoder(dict[str, msgspec.Raw] | list[msgspec.Raw] | str | int | float | bool | None)
        self._few = lru_cache(maxsize=64)(self._few_of)
        self._objects = frozenset(encoding.objects)
        self._nested = frozenset(encoding.objects + encoding.arrays)

    def is_object(self, value: Value) -> bool:
        """True if a value that is not open begins like an object."""
        if type(value) is Part:
            return value.first_byte in self._objects
        return memoryview(value)[0] in self._objects  # type: ignore[arg-type]  # a `Raw`

    # -- large objects [4] -------------------------------------------------------------------------------------------

    def some(self, text: bytes | msgspec.Raw, names: Collection[str]) -> Fields:
        """The fields of an object that have one of `names`, a dict or its keys, in their order. Raises as `top`."""
        if len(names) <= FEW_NAMES and fit_for_msgspec(names):
            return self._few(tuple(names))(text)
        found: Fields = {}
        for piece in self._encoding.pieces(bytes(text), PIECE_BYTES):
            fields = self.top(piece)
            if not fields.keys().isdisjoint(names):
                found.update([(name, value) for name, value in fields.items() if name in names])
        return found

    def _few_of(self, names: tuple[str, ...]) -> Callable[[bytes | msgspec.Raw], Fields]:
        made = TypedDict("Some", dict.fromkeys(names, msgspec.Raw), total=False)  # type: ignore[misc]  # at run time
        return self._encoding.decoder(made)

    def document(self, payload: bytes) -> msgspec.Raw:
        """A whole document as a value."""
        return msgspec.Raw(payload.lstrip())  # no object of MessagePack begins with a space

    def some_fields(self, value: Value, names: Collection[str], depth: int) -> tuple[Value, Fields | None]:
        """A value, as a part if it is a large one, and its fields with one of `names`: `rewritten` changes them. No
        fields if it is open, no object, or not large without them."""
        if isinstance(value, msgspec.Raw) and memoryview(value).nbytes > LARGE_BYTES:
            value = self.indexed(value, depth)
        if isinstance(value, Part) and value.end - value.start > LARGE_BYTES:
            text = self._own_level(value)
        elif isinstance(value, msgspec.Raw) and memoryview(value).nbytes > LARGE_BYTES:
            text = bytes(value)
        else:
            return value, None
        if len(text) <= LARGE_BYTES or text[0] not in self._objects:
            return value, None
        try:
            found = self.some(text, names)
        except msgspec.MsgspecError:
            return value, None
        if len(text) - sum([len(published(inner)) for inner in found.values()]) <= LARGE_BYTES:
            return value, None
        return value, self._with_parts(value, found)

    def rewritten(self, value: Value, old: Fields, new: Fields) -> msgspec.Raw | None:
        """The object `value` with `new` in the place of some of its fields, `old`: fields without a new value are
        gone, new names come at the end. As in all opened levels, spaces and repeated names are gone. None if it
        cannot be read."""
        added = {name: field for name, field in new.items() if name not in old}
        changes = [(name, new.get(name)) for name, field in old.items() if new.get(name) is not field]
        repeated: dict[str, Value | None] = {}
        try:
            written = self._encoding.joined(self._written(value, changes, added, repeated))
            if repeated:
                written = self._encoding.joined(self._written(value, changes, added, repeated, again=True))
        except msgspec.MsgspecError:
            return None
        return msgspec.Raw(written)

    def _written(
        self,
        value: Value,
        changes: list[tuple[str, Value | None]],
        added: Fields,
        repeated: dict[str, Value | None],
        *,
        again: bool = False,
    ) -> list[bytes]:
        """The pieces of an object with changed fields. Finds the last values of names that are in several pieces;
        `again` puts these in the place of the first ones."""
        written: list[bytes] = []
        names: set[str] = set()
        last: Fields | None = None
        for fields in self._fields_of_pieces(value):
            for name, field in changes:
                if name in fields:
                    if field is None:
                        del fields[name]
                    else:
                        fields[name] = field
            if again:
                for name in repeated.keys() & fields.keys():
                    if (final := repeated[name]) is None:
                        del fields[name]
                    else:
                        fields[name], repeated[name] = final, None
            else:
                if not names.isdisjoint(fields):
                    repeated.update([(name, field) for name, field in fields.items() if name in names])
                names.update(fields)
            if last is not None:
                written.append(self.encode(last))
            last = fields
        assert last is not None, "an object has a piece"
        last.update(added)
        written.append(self.encode(last))
        while names:
            names.pop()  # to free all at once holds the interpreter as long as a large piece would
        return written

    def _fields_of_pieces(self, value: Value) -> Iterator[Fields]:
        text = self._own_level(value) if isinstance(value, Part) else published(value)
        for piece in self._encoding.pieces(text, PIECE_BYTES):
            yield self._with_parts(value, self.top(piece))

    def _with_parts(self, value: Value, fields: Fields) -> Fields:
        """The fields of an object with parts in the place of place holders."""
        if isinstance(value, Part) and value.has_parts:
            held = self._encoding.held
            for name, inner in fields.items():
                if (number := held(published(inner))) is not None:
                    fields[name] = Part(value.index, number)
        return fields

    # -- levels -----------------------------------------------------------------------------------------------------

    def fields(self, value: Value | None, depth: int, names: Collection[str] | None = None) -> Fields | None:
        """The fields of an object at a depth; of a large one perhaps only those with one of `names`. None for no value
        and for every other one, such as a map that has other keys than texts. For a scalar that is slow: ask
        `is_object` where most are."""
        if value is None:
            return None
        try:
            value = self.indexed(value, depth)
            if isinstance(value, msgspec.Raw):
                if names is None or memoryview(value).nbytes <= LARGE_BYTES:
                    return self.top(value)
                return self.some(value, names) if self.is_object(value) else None
            if isinstance(value, Part):
                return self._fields_of(value, names) if value.first_byte in self._objects else None
        except msgspec.MsgspecError:
            return None
        return value if isinstance(value, dict) else None

    def opened(self, value: Value, depth: int) -> Value | None:
        """A value at a depth, opened if it is an object or array. None for a value that cannot be read."""
        try:
            value = self.indexed(value, depth)
            if isinstance(value, msgspec.Raw):
                inner = self._any(value)
                return inner if isinstance(inner, _OPENED) else value
            if isinstance(value, Part):
                return self._fields_of(value) if value.first_byte in self._objects else self._elements_of(value)
        except msgspec.MsgspecError:
            return None
        return value

    def indexed(self, value: Value, depth: int) -> Value:
        """A value at a depth, as a part if it is one [1]. Below, a value that is no part has nothing inside, unless it
        is a large one that was rewritten."""
        if depth < DECODED_LEVELS or not isinstance(value, msgspec.Raw):
            return value
        if memoryview(value)[0] not in self._nested:
            return value
        if depth > DECODED_LEVELS and memoryview(value).nbytes <= LARGE_BYTES:
            return value
        index = self._encoding.index(bytes(value))
        return Part(index, 0) if index.starts else value

    def _fields_of(self, part: Part, names: Collection[str] | None = None) -> Fields:
        text = self._own_level(part)
        whole = names is None or len(text) <= LARGE_BYTES
        return self._with_parts(part, self.top(text) if whole else self.some(text, names or ()))

    def _elements_of(self, part: Part) -> list[Value]:
        elements = self._elements(self._own_level(part))
        if part.has_parts:
            held = self._encoding.held
            for at, value in enumerate(elements):
                if (number := held(published(value))) is not None:
                    elements[at] = Part(part.index, number)
        return elements

    def _own_level(self, part: Part) -> bytes:
        """A part with place holders for the objects and arrays inside it."""
        text, starts, ends, following = part.index
        at, child, stop = part.start, part.number + 1, following[part.number]
        place_holder = self._encoding.place_holder
        pieces: list[bytes] = []
        while child < stop:
            pieces += text[at : starts[child]], place_holder(child)
            at, child = ends[child], following[child]
        pieces.append(text[at : part.end])
        return b"".join(pieces)
