"""MessagePack documents."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

import msgspec

from sow_server.engine.formats.deltas import Difference, Documents
from sow_server.engine.formats.levels import Encoding, Index, Levels, fit_for_msgspec, raw_part
from sow_server.engine.formats.nested import (
    DECODED_NAMES_MAX,
    NESTING_MAX,
    check_nesting,
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
    Projection,
    key_of,
    malformed,
)

_OBJECTS: Final = bytes((*range(0x80, 0x90), 0xDE, 0xDF))
_ARRAYS: Final = bytes((*range(0x90, 0xA0), 0xDC, 0xDD))
_SIZES: Final = (
    *[1] * 128,  # small integers
    *[0] * 32,  # small maps and arrays
    *range(1, 33),  # short texts
    *(1, 0, 1, 1),  # null, (unused), false, true
    *[0] * 6,  # binary and extensions with a length
    *(5, 9, 2, 3, 5, 9, 2, 3, 5, 9),  # floats, unsigned and signed integers
    *(3, 4, 6, 10, 18),  # extensions of a fixed size
    *[0] * 7,  # longer texts, arrays and maps
    *[1] * 32,  # small negative integers
)
"""How many bytes a value has, by its first byte; 0: more than that byte tells it."""
_LENGTHS: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""How many bytes the length of a binary, an extension or a text has."""
_EXTENSIONS: Final = frozenset((0xC7, 0xC8, 0xC9))
"""They have a byte for their type, which their length does not count."""

_COUNTS: Final = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
"""How many bytes the count of a larger array or map has."""


def _index(text: bytes) -> Index:
    index = Index(text, array("I"), array("I"), array("I"))
    _, starts, ends, following = index
    opened: list[tuple[int, int]] = []  # the objects and arrays around: their numbers, and the values that follow
    at, left, number, flat = 0, 1, 0, True
    while True:
        while not left:
            if flat:  # nothing is inside: it is no part
                del starts[number], ends[number], following[number]
            else:
                ends[number], following[number] = at, len(starts)
            number, left = opened.pop()
            flat = False
            if not opened:
                return index
        first = text[at]
        left -= 1
        if size := _SIZES[first]:
            at += size
        elif width := _LENGTHS.get(first):
            at += 1 + width + (first in _EXTENSIONS) + int.from_bytes(text[at + 1 : at + 1 + width], "big")
        else:
            opened.append((number, left))
            number, flat = len(starts), True
            starts.append(at)
            ends.append(0)
            following.append(0)
            width = _COUNTS.get(first, 0)
            left = int.from_bytes(text[at + 1 : at + 1 + width], "big") if width else first & 0x0F
            if first in _OBJECTS:
                left *= 2
            at += 1 + width


ENCODING: Final = Encoding(
    decoder=lambda kind: msgspec.msgpack.Decoder(kind).decode,
    encode=msgspec.msgpack.Encoder(enc_hook=raw_part).encode,
    objects=_OBJECTS,
    arrays=_ARRAYS,
    index=_index,
    place_holder=lambda number: b"\x91\x91\xce" + number.to_bytes(4, "big"),
    held=lambda text: int.from_bytes(text[3:], "big") if text.startswith(b"\x91\x91") else None,
    pieces=lambda text, _size: iter((text,)),
    joined=lambda pieces: pieces[0],
)


class MsgpackFormat:
    """MessagePack maps with text keys. Decoded whole: msgspec checks the UTF-8 of a text only when it decodes it."""

    def __init__(self) -> None:
        self._map: msgspec.msgpack.Decoder[dict[str, object]] = msgspec.msgpack.Decoder(dict[str, object])
        self._levels = Levels(ENCODING)
        self._documents = Documents(
            self._levels,
            msgspec.msgpack.Decoder(object).decode,
            msgspec.msgpack.Encoder(order="sorted").encode,
            null=b"\xc0",
        )

    def _document(self, payload: bytes) -> dict[str, object] | BadRecord:
        try:
            document = self._map.decode(payload)
            if len(payload) > NESTING_MAX:
                check_nesting(document)
            return document
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            if is_no_utf8(error):
                place = f", at its byte {error.start}" if isinstance(error, UnicodeDecodeError) else ""
                return malformed(f"a text is not well-formed UTF-8{place}")
            return not_decoded(error, payload, "a MessagePack map with text keys")

    def check(self, payload: bytes) -> BadRecord | None:
        document = self._document(payload)
        return document if isinstance(document, BadRecord) else None

    def derive_keys(self, paths: Sequence[Steps]) -> DeriveKeys:
        def derive_one(payload: bytes) -> bytes | BadRecord:
            document = self._document(payload)
            if isinstance(document, BadRecord):
                return document
            values: list[object] = []
            for path in paths:
                at: object = document
                for step in path:
                    at = at.get(step) if isinstance(at, dict) else None
                values.append(at)
            return key_of(values, paths)

        return lambda payloads: [derive_one(payload) for payload in payloads]

    def project(self, payload: bytes, projection: Projection) -> bytes:
        try:
            return project(self._levels, payload, projection)
        except RecursionError:
            # How deep a document may be nested depends on the depth of the caller's stack: one at the very limit was
            # accepted by the writer and is too deep here. One such record must not end a whole query.
            return b"\x80"

    def decode(self, payload: bytes) -> dict[str, object]:
        document = self._document(payload)
        return {} if isinstance(document, BadRecord) else document

    def decoder(self, names: Sequence[str]) -> Decode:
        if len(names) > DECODED_NAMES_MAX or not fit_for_msgspec(names):
            return self.decode
        return with_fallback(msgspec.msgpack.Decoder(fields_type(names)).decode, self.decode)

    def columns(self, names: Sequence[str]) -> Columns | None:
        return columns_of(lambda kind: msgspec.msgpack.Decoder(kind).decode, names, self.decode)

    def merge(self, base: bytes, delta: bytes, unset: PathTree) -> bytes | BadRecord:
        return merge_documents(self._documents, base, delta, unset)

    def difference(self, old: bytes, new: bytes, key_paths: Sequence[Steps]) -> Difference:
        return self._documents.difference(old, new, key_paths)
