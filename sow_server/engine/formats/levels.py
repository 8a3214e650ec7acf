"""Documents that are opened level by level, in time that is linear in their bytes. Pure.

To open a level, msgspec reads all bytes below it. Opened one by one, the levels of a deep document would be read
hundreds of times.

    [1]  The values of the first `DECODED_LEVELS` levels are read by msgspec as they are. A value at that depth is
         indexed: where each of its objects and arrays with others inside begins and ends. From then on each of these,
         a `Part`, is read without the parts inside it.
    [2]  A level that was opened is changed in place. A document is encoded once, at the end.
    [3]  A value that is not opened keeps its bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias, final

import msgspec

DECODED_LEVELS: Final = 8
"""Few paths are longer. An index costs as much as msgspec needs for the same bytes five to fifty times."""

Value: TypeAlias = "msgspec.Raw | Part | dict[str, Value] | list[Value]"
"""A value of a document: as published, or opened."""
Fields: TypeAlias = "dict[str, Value]"
_OPENED: Final = (dict, list)


class Index(NamedTuple):
    """Where the parts of a value are, in the order of their beginnings. The first is the value itself; there is none if
    it has no objects or arrays inside. Arrays of numbers, as there may be a part for every few bytes.
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
        """Whether the bytes are the same. Without a copy: parts of large documents are compared at each level."""
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


class Levels:
    """Opens the levels of documents of one encoding. Depths are counted from 0, the top."""

    def __init__(self, encoding: Encoding) -> None:
        self.top: Callable[[bytes | msgspec.Raw], Fields] = encoding.decoder(dict[str, msgspec.Raw])
        """The fields of a whole document. Raises MsgspecError and RecursionError."""
        self.encode = encoding.encode
        self._encoding = encoding
        self._elements: Callable[[bytes | msgspec.Raw], list[Value]] = encoding.decoder(list[msgspec.Raw])
        self._any = encoding.decoder(dict[str, msgspec.Raw] | list[msgspec.Raw] | str | int | float | bool | None)
        self._objects = frozenset(encoding.objects)
        self._nested = frozenset(encoding.objects + encoding.arrays)

    def is_object(self, value: Value) -> bool:
        """Whether a value that is not open begins like an object."""
        if type(value) is Part:
            return value.first_byte in self._objects
        return memoryview(value)[0] in self._objects  # type: ignore[arg-type]  # a `Raw`

    def fields(self, value: Value | None, depth: int) -> Fields | None:
        """The fields of an object at a depth. None for no value and for every other one, such as a map that has other
        keys than texts. For a scalar that is slow: ask `is_object` where most are."""
        try:
            if isinstance(value, msgspec.Raw) and depth == DECODED_LEVELS:
                value = self._indexed(value)
            if isinstance(value, msgspec.Raw):
                return self.top(value)
            if isinstance(value, Part):
                return self._fields_of(value) if value.first_byte in self._objects else None
        except msgspec.MsgspecError:
            return None
        return value if isinstance(value, dict) else None

    def opened(self, value: Value, depth: int) -> Value | None:
        """A value at a depth, opened if it is an object or array. None for a value that cannot be read."""
        try:
            if isinstance(value, msgspec.Raw) and depth == DECODED_LEVELS:
                value = self._indexed(value)
            if isinstance(value, msgspec.Raw):
                inner = self._any(value)
                return inner if isinstance(inner, _OPENED) else value
            if isinstance(value, Part):
                return self._fields_of(value) if value.first_byte in self._objects else self._elements_of(value)
        except msgspec.MsgspecError:
            return None
        return value

    def _indexed(self, value: msgspec.Raw) -> msgspec.Raw | Part:
        """The value as a part, if it is one."""
        if memoryview(value)[0] not in self._nested:
            return value
        index = self._encoding.index(bytes(value))
        return Part(index, 0) if index.starts else value

    def _fields_of(self, part: Part) -> Fields:
        fields = self.top(self._own_level(part))
        if part.has_parts:
            held = self._encoding.held
            for name, value in fields.items():
                if (number := held(published(value))) is not None:
                    fields[name] = Part(part.index, number)
        return fields

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
