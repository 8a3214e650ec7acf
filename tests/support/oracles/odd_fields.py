"""Messages with one odd field: every field of a message type, found by its descriptor, with values that a program with
bad intent may send.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

M = TypeVar("M", bound=Message)

TOO_LARGE_PATTERN: Final = "[^a]{1000}" * 60
"""RE2 refuses it for its size; it is short."""
TEXTS: Final = ("(", "", "\0", "x" * 100_000, TOO_LARGE_PATTERN, "a/b\n\u2028'\"", "\U0010ffff" * 60, "/a = ", "..")
BLOBS: Final = (b"\xff\xfe", b"", b"\0", b"x" * 100_000, bytes(range(256)))
SIGNED: Final = (2**63 - 1, 2**62, -1, 0, -(2**63), 2**53 + 1)
UNSIGNED: Final = {32: (2**32 - 1, 0, 1), 64: (2**64 - 1, 2**63, 0)}
INT32: Final = (2**31 - 1, -1, 0, -(2**31))
MANY: Final = 70_000
"""Entries of a repeated field."""
_SIGNED: Final = (
    FieldDescriptor.TYPE_INT64,
    FieldDescriptor.TYPE_SINT64,
    FieldDescriptor.TYPE_SFIXED64,
)
_WIDE: Final = (FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_FIXED64)
_NARROW: Final = (FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_FIXED32)
_INT32: Final = (FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_ENUM)


class Odd(NamedTuple):
    """A field of a message, by its path, and its value."""

    path: tuple[str, ...]
    value: object
    """`MANY` entries, where it is that number for a repeated field."""
    many: bool = False

    @property
    def name(self) -> str:
        """For people."""
        shown = repr(self.value)
        return f"{'.'.join(self.path)} = {shown if len(shown) < 50 else shown[:40] + '…'}{' ×' * self.many}"


def odd_fields(kind: type[Message], *, skip: Sequence[str] = ()) -> Iterator[list[Odd]]:
    """For each field of a message type, and of the messages in it, the odd values. `skip`: fields of the outermost
    message."""
    yield from _of(kind.DESCRIPTOR, (), frozenset(skip))


def _of(kind: Any, path: tuple[str, ...], skip: frozenset[str]) -> Iterator[list[Odd]]:
    for field in kind.fields:
        if field.name in skip:
            continue
        here = (*path, field.name)
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            yield from _of(field.message_type, here, frozenset())
            if field.is_repeated:
                yield [Odd(here, None, many=True)]
            continue
        found = [Odd(here, value) for value in _values(field)]
        yield [*found, Odd(here, found[-1].value, many=True)] if field.is_repeated else found


def _values(field: FieldDescriptor) -> Sequence[object]:
    if field.type == FieldDescriptor.TYPE_STRING:
        return TEXTS
    if field.type == FieldDescriptor.TYPE_BYTES:
        return BLOBS
    if field.type == FieldDescriptor.TYPE_BOOL:
        return (True, False)
    if field.type in _SIGNED:
        return SIGNED
    if field.type in _INT32:
        return INT32
    assert field.type in (*_WIDE, *_NARROW), f"{field.full_name}: values for such a field are missing here"
    return UNSIGNED[64 if field.type in _WIDE else 32]


def with_odd(base: M, odd: Odd) -> M:
    """A copy of a message with one odd field; messages on the way to it are made, if they are absent."""
    made = type(base)()
    made.CopyFrom(base)
    at: Any = made
    for name in odd.path[:-1]:
        inner = getattr(at, name)
        if isinstance(inner, Message):
            inner.SetInParent()
            at = inner
        else:
            at = inner[0] if inner else inner.add()
    name = odd.path[-1]
    field = at.DESCRIPTOR.fields_by_name[name]
    if not field.is_repeated:
        setattr(at, name, odd.value)
    elif odd.value is None:
        entries = getattr(at, name)
        entry = entries[0] if entries else entries.add()
        entries.extend([entry] * MANY)
    else:
        del getattr(at, name)[:]
        getattr(at, name).extend([odd.value] * (MANY if odd.many else 1))
    return made
