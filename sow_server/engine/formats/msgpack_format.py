"""MessagePack documents."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sow_server.engine.formats.deltas import Difference, Documents, UnsetTree
from sow_server.engine.formats.nested import (
    NESTING_MAX,
    Inner,
    Level,
    check_nesting,
    fields_type,
    fit_for_msgspec,
    hide_level,
    merge_documents,
    not_decoded,
    project_level,
    with_fallback,
)
from sow_server.engine.formats.payloads import BadRecord, Decode, DeriveKeys, Projection, Steps, key_of, malformed


class MsgpackFormat:
    """MessagePack maps with text keys. Decoded whole: msgspec checks the UTF-8 of a text only when it decodes it."""

    def __init__(self) -> None:
        self._map: msgspec.msgpack.Decoder[dict[str, object]] = msgspec.msgpack.Decoder(dict[str, object])
        self._level: msgspec.msgpack.Decoder[Level] = msgspec.msgpack.Decoder(Level)
        self._inner: msgspec.msgpack.Decoder[Inner] = msgspec.msgpack.Decoder(Inner)
        self._documents = Documents(
            self._level.decode,
            msgspec.msgpack.Decoder(object).decode,
            msgspec.msgpack.encode,
            msgspec.msgpack.Encoder(order="sorted").encode,
            null=b"\xc0",
            opening=bytes((*range(0x80, 0x90), 0xDE, 0xDF)),
        )

    def _document(self, payload: bytes) -> dict[str, object] | BadRecord:
        try:
            document = self._map.decode(payload)
            if len(payload) > NESTING_MAX:
                check_nesting(document)
            return document
        except UnicodeDecodeError as error:
            return malformed(f"a text is not well-formed UTF-8, at its byte {error.start}")
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
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
            level = self._level.decode(payload)
            if projection.hidden:
                level = hide_level(level, projection.hidden, self._inner.decode, msgspec.msgpack.encode)
            if projection.include or projection.exclude:
                level = project_level(level, projection, self._level.decode, msgspec.msgpack.encode)
            return msgspec.msgpack.encode(level)
        except RecursionError:
            # How deep a document may be nested depends on the depth of the caller's stack: one at the very limit was
            # accepted by the writer and is too deep here. One such record must not end a whole query.
            return b"\x80"

    def decode(self, payload: bytes) -> dict[str, object]:
        document = self._document(payload)
        return {} if isinstance(document, BadRecord) else document

    def decoder(self, names: Sequence[str]) -> Decode:
        if not fit_for_msgspec(names):
            return self.decode
        return with_fallback(msgspec.msgpack.Decoder(fields_type(names)).decode, self.decode)

    def merge(self, base: bytes, delta: bytes, unset: UnsetTree) -> bytes | BadRecord:
        return merge_documents(self._documents, base, delta, unset)

    def difference(self, old: bytes, new: bytes, key_paths: Sequence[Steps]) -> Difference:
        return self._documents.difference(old, new, key_paths)
