"""JSON documents.

Deriving keys is the hottest Python of a publish: it works on whole columns, decodes only the key fields of a document,
and returns bytes for a key and a `BadRecord` for a refused record.
"""

from __future__ import annotations

import json
import operator
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal, InvalidOperation
from typing import Final

import msgspec

from sow_server.engine.formats.deltas import Difference, Documents
from sow_server.engine.formats.levels import Encoding, Index, Levels, fit_for_msgspec, raw_part
from sow_server.engine.formats.nested import (
    DECODED_NAMES_MAX,
    NESTING_MAX,
    check_json_nesting,
    columns_of,
    fields_type,
    is_no_utf8,
    merge_documents,
    not_decoded,
    project,
    with_fallback,
)
from sow_server.engine.formats.paths import PathTree, Steps
from sow_server.engine.formats.payloads import (
    BadRecord,
    Columns,
    Decode,
    DeriveKeys,
    KeyColumn,
    Projection,
    key_of,
    malformed,
)
from sow_server.engine.values.fields import INTEGER_DIGITS_MAX
from sow_server.engine.values.keys import KeyFieldError, canonical_text, escape

_AT_BYTE: Final = re.compile(r"\(byte ([0-9]+)\)")
_TEXT: Final = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_FLAT: Final = rb'[^"\[\]{}]*+(?:%b[^"\[\]{}]*+)*+' % _TEXT
"""No bracket outside of texts."""
_BRACKET: Final = re.compile(rb"(?:%b[\[{]%b[\]}])*+%b(?:([\[{])|([\]}])|\Z)" % (_FLAT, _FLAT, _FLAT), re.DOTALL)
"""Up to the next bracket of an object or array that has others inside; group 1: an opening one, group 2: a closing one.
It matches everywhere, so that no search begins in the middle of a text."""


def _nested_text(levels: int) -> bytes:
    inner = _FLAT
    for _ in range(levels):
        inner = rb'[^"\[\]{}]*+(?:(?:%b|[\[{]%b[\]}])[^"\[\]{}]*+)*+' % (_TEXT, inner)
    return inner


_MEMBERS: Final = re.compile(
    rb'(?:[^"\[\]{},]*+(?:(?:%b|[\[{]%b[\]}])[^"\[\]{},]*+)*+,)*+' % (_TEXT, _nested_text(7)), re.DOTALL
)
"""Members of an object with a comma behind each, whose values are nested at most eight deep."""
_BEFORE_VALUE: Final = re.compile(rb"\s*+%b\s*+:\s*+" % _TEXT, re.DOTALL)
_BEHIND_VALUE: Final = re.compile(rb"\s*+,")
_FIRST_VALUE: Final = msgspec.json.Decoder(msgspec.defstruct("First", [("v", msgspec.Raw)]))
_PASSES_MAX: Final = 16
"""For so many members msgspec finds the end of a large value, in a pass over all that follows."""


def _pieces(text: bytes, size: int) -> Iterator[bytes]:
    at, passes = 1, 0
    while len(text) - at > size:
        end = _members_end(text, at, at + size) or _members_end(text, at, at + 4 * size)
        if not end and passes < _PASSES_MAX:
            end, passes = _first_end(text, at), passes + 1
        if not end:
            break
        yield b"{%b}" % text[at : end - 1]
        at = end
    yield b"{%b" % text[at:]


def _members_end(text: bytes, at: int, stop: int) -> int:
    """The end of the members that end before `stop`, with their last comma; 0 if there are none."""
    members = _MEMBERS.match(text, at, stop)
    return members.end() if members is not None and members.end() > at else 0


def _first_end(text: bytes, at: int) -> int:
    """The end of the first of several members, with its comma; 0 for the last one, and where it cannot be told."""
    name = _BEFORE_VALUE.match(text, at)
    if name is None:
        return 0
    # A struct made at run time, whose field mypy does not know.
    value = memoryview(_FIRST_VALUE.decode(b'{"v":%b' % text[name.end() :]).v)  # type: ignore[attr-defined]  # as told
    if not text.startswith(value, name.end()):
        return 0  # a later member has the name `v`
    behind = _BEHIND_VALUE.match(text, name.end() + len(value))
    return behind.end() if behind is not None else 0


def _index(text: bytes) -> Index:
    index = Index(text, array("I"), array("I"), array("I"))
    _, starts, ends, following = index
    opened: list[int] = []
    for bracket in _BRACKET.finditer(text):
        if bracket.lastindex == 1:
            opened.append(len(starts))
            starts.append(bracket.end() - 1)
            ends.append(0)
            following.append(0)
        elif opened:
            number = opened.pop()
            ends[number] = bracket.end()
            following[number] = len(starts)
    return index


ENCODING: Final = Encoding(
    decoder=lambda kind: msgspec.json.Decoder(kind).decode,
    encode=msgspec.json.Encoder(enc_hook=raw_part).encode,
    objects=b"{",
    arrays=b"[",
    index=_index,
    place_holder=lambda number: b"[[%d]]" % number,
    held=lambda text: int(text[2:-2]) if text.startswith(b"[[") else None,
    pieces=_pieces,
    joined=lambda pieces: b"{%b}" % b",".join([piece[1:-1] for piece in pieces if piece != b"{}"]),
)


class JsonFormat:
    """JSON objects. Syntax and UTF-8 of the whole document are checked; only key fields become Python objects."""

    def __init__(self) -> None:
        self._object = msgspec.json.Decoder(msgspec.defstruct("Document", []))
        self._levels = Levels(ENCODING)
        self._whole: msgspec.json.Decoder[dict[str, object]] = msgspec.json.Decoder(dict[str, object])
        self._documents = Documents(
            self._levels,
            msgspec.json.Decoder(object).decode,
            msgspec.json.Encoder(order="sorted").encode,
            null=b"null",
            with_digits=msgspec.json.Decoder(object, float_hook=_digits).decode,
        )

    def check(self, payload: bytes) -> BadRecord | None:
        try:
            self._object.decode(payload)
            if len(payload) > NESTING_MAX:
                check_json_nesting(payload)
            if not payload.isascii():  # skipped strings are not decoded, so their UTF-8 is checked here
                payload.decode()
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return _json_error(error, payload)
        return None

    def derive_keys(self, paths: Sequence[Steps]) -> DeriveKeys:
        decode = msgspec.json.Decoder(_key_struct(paths)).decode
        if all(len(path) == 1 for path in paths):
            names = [f"f{index}" for index in range(len(paths))]
            if len(paths) == 1:
                return _json_one_key(decode, paths)
            values_of: Callable[[object], Sequence[object]] = operator.attrgetter(*names)
        else:
            values_of = _nested_values(paths)

        def derive(payloads: Sequence[bytes]) -> KeyColumn:
            keys: KeyColumn = []
            for payload in payloads:
                values: Sequence[object] = ()
                try:
                    values = values_of(decode(payload))
                    if len(payload) > NESTING_MAX:
                        check_json_nesting(payload)
                    if not payload.isascii():
                        payload.decode()
                    texts: list[str] = []
                    for value in values:
                        # The two common kinds inline: a call per key field costs as much as decoding it.
                        if type(value) is str:
                            texts.append(value if "|" not in value and "\\" not in value else escape(value))
                        elif type(value) is int:
                            texts.append(str(value))
                        else:
                            texts.append(escape(canonical_text(value)))
                    key = "|".join(texts)
                    keys.append(key.encode() if key else key_of(values, paths))
                except KeyFieldError:
                    keys.append(key_of(values, paths))
                except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                    keys.append(_json_error(error, payload))
            return keys

        return derive

    def project(self, payload: bytes, projection: Projection) -> bytes:
        try:
            return project(self._levels, payload, projection)
        except (msgspec.MsgspecError, RecursionError):
            return b"{}"  # valid by its syntax, undecodable in fact: a document without fields

    def decode(self, payload: bytes) -> dict[str, object]:
        try:
            return self._whole.decode(payload)
        except (msgspec.MsgspecError, RecursionError, ValueError):
            return _decode_large(payload)

    def decoder(self, names: Sequence[str]) -> Decode:
        if len(names) > DECODED_NAMES_MAX or not fit_for_msgspec(names):
            return self.decode
        return with_fallback(msgspec.json.Decoder(fields_type(names)).decode, self.decode)

    def columns(self, names: Sequence[str]) -> Columns | None:
        return columns_of(lambda kind: msgspec.json.Decoder(kind).decode, names, self.decode)

    def merge(self, base: bytes, delta: bytes, unset: PathTree) -> bytes | BadRecord:
        return merge_documents(self._documents, base, delta, unset)

    def difference(self, old: bytes, new: bytes, key_paths: Sequence[Steps]) -> Difference:
        return self._documents.difference(old, new, key_paths)


def _decode_large(payload: bytes) -> dict[str, object]:
    """A document with numbers beyond the range of floats: they become infinite, like such a literal of a filter. Slow,
    and rare."""
    try:
        document: dict[str, object] = json.loads(payload, parse_int=_integer)
    except (ValueError, RecursionError):
        return {}
    return document


def _integer(text: str) -> int | float:
    return int(text) if len(text.lstrip("-")) <= INTEGER_DIGITS_MAX else float(text)  # int() refuses longer ones


def _digits(text: str) -> object:
    """A number with a point or an exponent, as a text that is the same for all forms of the number."""
    try:
        sign, digits, exponent = Decimal(text).as_tuple()
    except InvalidOperation:  # an exponent of 19 digits or more
        return text
    written = "".join(map(str, digits)).lstrip("0")
    kept = written.rstrip("0")
    assert isinstance(exponent, int), "JSON has no NaN and no infinities"
    return f"{sign} {kept} {exponent + len(written) - len(kept) if kept else 0}"


def _json_one_key(decode: Callable[[bytes], object], paths: Sequence[Steps]) -> DeriveKeys:
    """The most frequent case, one top-level key field, without a list per record."""

    def derive(payloads: Sequence[bytes]) -> KeyColumn:
        keys: KeyColumn = []
        add = keys.append
        for payload in payloads:
            try:
                value = decode(payload).f0  # type: ignore[attr-defined]  # a struct made at run time
                if len(payload) > NESTING_MAX:
                    check_json_nesting(payload)
                if not payload.isascii():
                    payload.decode()
                if type(value) is int:
                    add(b"%d" % value)
                elif type(value) is str and value and "|" not in value and "\\" not in value:
                    add(value.encode())
                else:
                    add(key_of((value,), paths))
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                add(_json_error(error, payload))
        return keys

    return derive


def _json_error(error: Exception, payload: bytes) -> BadRecord:
    if is_no_utf8(error):
        # msgspec tells the position inside the text that it was decoding, or none; ours is that in the payload.
        start = getattr(error, "start", 0)
        try:
            payload.decode()
        except UnicodeDecodeError as whole:
            start = whole.start
        return malformed(f"not well-formed UTF-8 at byte {start}")
    bad = not_decoded(error, payload, "a JSON object")
    position = _AT_BYTE.search(bad.message)
    if position is not None and payload.startswith((b"NaN", b"Infinity"), int(position[1])):
        return bad._replace(message=f"{bad.message}; JSON has no NaN and no infinities, publish null instead")
    return bad


def _key_struct(paths: Sequence[Steps]) -> type[msgspec.Struct]:
    """A struct type with just the key fields; `fN` is the N-th child of its level."""
    leaves: dict[str, list[Steps]] = {}
    for path in paths:
        leaves.setdefault(path[0], []).append(path[1:])
    fields: list[tuple[str, object, object]] = []
    names: dict[str, str] = {}
    for index, (name, rests) in enumerate(leaves.items()):
        field = f"f{index}"
        names[field] = name
        if rests == [()]:
            fields.append((field, object, None))
        else:
            child = _key_struct(rests)
            # Anything but an object here means that the key field below is missing, which is not a malformed payload.
            fields.append((field, child | str | int | float | bool | list[object] | None, None))
    return msgspec.defstruct("KeyFields", fields, rename=names, gc=False)


def _nested_values(paths: Sequence[Steps]) -> Callable[[object], Sequence[object]]:
    """Reads the key fields out of nested `_key_struct`s, in the order of `paths`."""

    def routes(rests: Sequence[Steps]) -> list[tuple[str, ...]]:
        children: dict[str, list[int]] = {}
        for position, rest in enumerate(rests):
            children.setdefault(rest[0], []).append(position)
        found: list[tuple[str, ...]] = [()] * len(rests)
        for index, positions in enumerate(children.values()):
            below = [rests[position][1:] for position in positions]
            tails = routes(below) if below != [()] else [()]
            for position, tail in zip(positions, tails, strict=True):
                found[position] = (f"f{index}", *tail)
        return found

    ways = routes(paths)

    def values_of(document: object) -> Sequence[object]:
        values: list[object] = []
        for way in ways:
            at: object = document
            for field in way:
                at = getattr(at, field, None)
            values.append(at)
        return values

    return values_of
