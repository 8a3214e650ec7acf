"""Payloads by message type (rule K2): check them, derive record keys from them, project, merge, compare them. Pure.

A payload is stored exactly as published. New payloads are made by `project` for a query, `merge` for a delta publish,
and `difference` for a delta subscription.

Each message type is a `Format`. Deriving keys is the hottest Python of a publish: it works on whole columns, decodes
only the key fields of a JSON document, and returns bytes for a key and a `BadRecord` for a refused record.
"""

from __future__ import annotations

import json
import operator
import re
from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final, NamedTuple, Protocol, TypedDict, cast

import msgspec

from sow_server.engine.formats.deltas import (
    DeltaError,
    Difference,
    Documents,
    UnsetTree,
    difference_fields,
    merge_fields,
)
from sow_server.engine.values.errors import Reason
from sow_server.engine.values.keys import KeyFieldError, canonical_text, escape, parse_path, path_text
from sow_server.engine.values.model import MessageType, TopicSettings


class BadRecord(NamedTuple):
    """The reason why a record has no key, or is no document of its message type."""

    reason: Reason
    message: str


KeyColumn = list["bytes | BadRecord"]
Decode = Callable[[bytes], dict[str, object]]
DeriveKeys = Callable[[Sequence[bytes]], KeyColumn]
Steps = tuple[str, ...]
_Raw = dict[str, msgspec.Raw]


class Projection(NamedTuple):
    """The fields of a payload that a query returns: only `include`, or all except `exclude` (rule Q2)."""

    include: tuple[Steps, ...] = ()
    exclude: tuple[Steps, ...] = ()


class Format(Protocol):
    """The operations of a message type."""

    def check(self, payload: bytes) -> BadRecord | None:
        """The reason why `payload` is no document of this type; None if it is one."""

    def derive_keys(self, paths: Sequence[Steps]) -> DeriveKeys:
        """A function from payloads to the keys that `paths` give them."""

    def project(self, payload: bytes, projection: Projection) -> bytes:
        """The payload's projected fields, in its own encoding."""

    def decode(self, payload: bytes) -> dict[str, object]:
        """The document, for filters and indexes. Empty where it is valid by its syntax, but undecodable in fact."""

    def decoder(self, names: Sequence[str]) -> Decode:
        """A `decode` for callers that read only the top-level fields `names`: it may leave out the others."""

    def merge(self, base: bytes, delta: bytes, unset: UnsetTree) -> bytes | BadRecord:
        """`base` without the unset fields, with `delta` merged into it (rule P2); or the reason why that is
        impossible."""

    def difference(self, old: bytes, new: bytes, key_paths: Sequence[Steps]) -> Difference:
        """The changes from one document to another, with the fields of `key_paths` (rule S3)."""


def malformed(detail: str) -> BadRecord:
    """A payload that is no document of its type; `detail` names the position."""
    return BadRecord(Reason.PAYLOAD_MALFORMED, f"payload: {detail}")


def _key_field(path: Steps, error: KeyFieldError) -> BadRecord:
    reason = Reason.KEY_FIELD_MISSING if error.missing else Reason.KEY_FIELD_NOT_SCALAR
    return BadRecord(reason, f"key field {path_text(path)} {error}")


def _key_of(values: Sequence[object], paths: Sequence[Steps]) -> bytes | BadRecord:
    """The record key of the values of the key fields (rules K4, K5)."""
    texts: list[str] = []
    for index, value in enumerate(values):
        try:
            texts.append(escape(canonical_text(value)))
        except KeyFieldError as error:
            return _key_field(paths[index], error)
        except ValueError:  # an integer of thousands of digits
            return BadRecord(Reason.KEY_TOO_LARGE, f"key field {path_text(paths[index])} is too long a number")
    key = "|".join(texts)
    if not key:
        return BadRecord(Reason.KEY_REQUIRED, f"key field {path_text(paths[0])} is empty, and a key is never empty")
    try:
        return key.encode()
    except UnicodeEncodeError:
        return BadRecord(Reason.KEY_NOT_UTF8, "key: a key field is not well-formed UTF-8")


# --- nesting ---------------------------------------------------------------------------------------------------------

NESTING_MAX: Final = 256
"""Levels of a document. The decoder also counts Python's own stack, which differs from thread to thread: a document
near that limit would be readable on one thread and not on another, and have index entries or not. So the limit is well
below."""
_JSON_TEXT: Final = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_AT_BYTE: Final = re.compile(r"\(byte ([0-9]+)\)")
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_STEPS: Final = bytes.maketrans(b"[]{}", b"\x01\xff\x01\xff")


def _check_json_nesting(payload: bytes) -> None:
    """Raises RecursionError for a well-formed document that is nested too deeply."""
    if payload.count(b"{") + payload.count(b"[") > NESTING_MAX:
        brackets = _JSON_TEXT.sub(b"", payload).translate(_STEPS, _NOT_BRACKETS)
        if max(accumulate(array("b", brackets))) > NESTING_MAX:
            raise RecursionError


def _check_nesting(document: object) -> None:
    """Raises RecursionError for a document that is nested too deeply."""
    level: list[object] = [document]
    for _ in range(NESTING_MAX):
        inner: list[object] = []
        for at in level:
            if type(at) is dict:
                inner += [value for value in at.values() if type(value) in (dict, list)]
            elif type(at) is list:
                inner += [value for value in at if type(value) in (dict, list)]
        if not inner:
            return
        level = inner
    raise RecursionError


# --- json ------------------------------------------------------------------------------------------------------------


class JsonFormat:
    """JSON objects. Syntax and UTF-8 of the whole document are checked; only key fields become Python objects."""

    def __init__(self) -> None:
        self._object = msgspec.json.Decoder(msgspec.defstruct("Document", []))
        self._level: msgspec.json.Decoder[_Raw] = msgspec.json.Decoder(_Raw)
        self._whole: msgspec.json.Decoder[dict[str, object]] = msgspec.json.Decoder(dict[str, object])
        self._documents = Documents(
            self._level.decode,
            msgspec.json.Decoder(object).decode,
            msgspec.json.encode,
            msgspec.json.Encoder(order="sorted").encode,
            null=b"null",
            opening=b"{",
        )

    def check(self, payload: bytes) -> BadRecord | None:
        try:
            self._object.decode(payload)
            if len(payload) > NESTING_MAX:
                _check_json_nesting(payload)
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
                        _check_json_nesting(payload)
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
                    keys.append(key.encode() if key else _key_of(values, paths))
                except KeyFieldError:
                    keys.append(_key_of(values, paths))
                except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                    keys.append(_json_error(error, payload))
            return keys

        return derive

    def project(self, payload: bytes, projection: Projection) -> bytes:
        try:
            level = self._level.decode(payload)
            return msgspec.json.encode(_project_level(level, projection, self._level.decode, msgspec.json.encode))
        except (msgspec.MsgspecError, RecursionError):
            return b"{}"  # valid by its syntax, undecodable in fact: a document without fields

    def decode(self, payload: bytes) -> dict[str, object]:
        try:
            return self._whole.decode(payload)
        except (msgspec.MsgspecError, RecursionError, ValueError):
            return _decode_large(payload)

    def decoder(self, names: Sequence[str]) -> Decode:
        if not _fit_for_msgspec(names):
            return self.decode
        return _with_fallback(msgspec.json.Decoder(_fields_type(names)).decode, self.decode)

    def merge(self, base: bytes, delta: bytes, unset: UnsetTree) -> bytes | BadRecord:
        return _merge(self._documents, base, delta, unset)

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
    return int(text) if len(text) <= 4000 else float(text)  # int() refuses longer ones


def _fit_for_msgspec(names: Sequence[str]) -> bool:
    """Whether msgspec finds these fields in a TypedDict: it takes others than ASCII for the empty name, unless Python
    happens to have their UTF-8 at hand (0.22)."""
    return all(name.isascii() and name for name in names)


def _fields_type(names: Sequence[str]) -> type[dict[str, object]]:
    """A type of documents of which msgspec makes objects only for `names`; it skips the rest twice as fast."""
    made = TypedDict("Fields", dict.fromkeys(names, object), total=False)  # type: ignore[misc]  # at run time
    return cast(type[dict[str, object]], made)


def _with_fallback(decode: Decode, whole: Decode) -> Decode:
    """`decode`, and `whole` where that raises."""

    def decode_fields(payload: bytes) -> dict[str, object]:
        try:
            return decode(payload)
        except (msgspec.MsgspecError, RecursionError, ValueError):
            return whole(payload)

    return decode_fields


def _json_one_key(decode: Callable[[bytes], object], paths: Sequence[Steps]) -> DeriveKeys:
    """The most frequent case, one top-level key field, without a list per record."""

    def derive(payloads: Sequence[bytes]) -> KeyColumn:
        keys: KeyColumn = []
        add = keys.append
        for payload in payloads:
            try:
                value = decode(payload).f0  # type: ignore[attr-defined]  # a struct made at run time
                if len(payload) > NESTING_MAX:
                    _check_json_nesting(payload)
                if not payload.isascii():
                    payload.decode()
                if type(value) is int:
                    add(b"%d" % value)
                elif type(value) is str and value and "|" not in value and "\\" not in value:
                    add(value.encode())
                else:
                    add(_key_of((value,), paths))
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                add(_json_error(error, payload))
        return keys

    return derive


def _json_error(error: Exception, payload: bytes) -> BadRecord:
    if isinstance(error, UnicodeDecodeError):
        # msgspec tells the position inside the text that it was decoding; ours is that in the payload.
        start = error.start
        try:
            payload.decode()
        except UnicodeDecodeError as whole:
            start = whole.start
        return malformed(f"not well-formed UTF-8 at byte {start}")
    bad = _not_decoded(error, payload, "a JSON object")
    position = _AT_BYTE.search(bad.message)
    if position is not None and payload.startswith((b"NaN", b"Infinity"), int(position[1])):
        return bad._replace(message=f"{bad.message}; JSON has no NaN and no infinities, publish null instead")
    return bad


def _not_decoded(error: Exception, payload: bytes, wanted: str) -> BadRecord:
    """The text of msgspec's other errors, with a position: for a truncated document it gives none."""
    if isinstance(error, RecursionError):
        return malformed(f"nested deeper than {NESTING_MAX} levels")
    text = str(error)
    if isinstance(error, msgspec.ValidationError):
        return malformed(f"not {wanted}: {text}" if text.startswith("Expected") else text)
    return malformed(text if "(byte " in text else f"{text} (byte {len(payload)})")


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


def _project_level(
    level: _Raw,
    projection: Projection,
    decode: Callable[[bytes], _Raw],
    encode: Callable[[object], bytes],
) -> _Raw:
    """Projects one level of a document; values keep their published bytes."""
    kept: _Raw = {}
    for name, raw in level.items():
        if projection.include:
            below = [path[1:] for path in projection.include if path[0] == name]
            if not below:
                continue
            child = Projection(include=tuple(path for path in below if path))
            whole = () in below
        else:
            below = [path[1:] for path in projection.exclude if path[0] == name]
            if () in below:
                continue
            child = Projection(exclude=tuple(below))
            whole = not below
        if whole:
            kept[name] = raw
            continue
        try:
            inner = decode(bytes(raw))
        except msgspec.MsgspecError:  # not an object: nothing below it to include, nothing to exclude
            if projection.exclude:
                kept[name] = raw
            continue
        projected = _project_level(inner, child, decode, encode)
        if projected or projection.exclude:
            kept[name] = msgspec.Raw(encode(projected))
    return kept


def _merge(documents: Documents, base: bytes, delta: bytes, unset: UnsetTree) -> bytes | BadRecord:
    try:
        return documents.merge(base, delta, unset)
    except DeltaError as error:
        return malformed(str(error))
    except (msgspec.MsgspecError, RecursionError) as error:
        # Both have passed the check of a publish, so this is about depth, or numbers that no decoder takes.
        return malformed(f"cannot be merged: {error}")


# --- msgpack ---------------------------------------------------------------------------------------------------------


class MsgpackFormat:
    """MessagePack maps with text keys. Decoded whole: msgspec checks the UTF-8 of a text only when it decodes it."""

    def __init__(self) -> None:
        self._map: msgspec.msgpack.Decoder[dict[str, object]] = msgspec.msgpack.Decoder(dict[str, object])
        self._level: msgspec.msgpack.Decoder[_Raw] = msgspec.msgpack.Decoder(_Raw)
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
                _check_nesting(document)
            return document
        except UnicodeDecodeError as error:
            return malformed(f"a text is not well-formed UTF-8, at its byte {error.start}")
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            return _not_decoded(error, payload, "a MessagePack map with text keys")

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
            return _key_of(values, paths)

        return lambda payloads: [derive_one(payload) for payload in payloads]

    def project(self, payload: bytes, projection: Projection) -> bytes:
        try:
            level = self._level.decode(payload)
            return msgspec.msgpack.encode(_project_level(level, projection, self._level.decode, msgspec.msgpack.encode))
        except RecursionError:
            # How deep a document may be nested depends on the depth of the caller's stack: one at the very limit was
            # accepted by the writer and is too deep here. One such record must not end a whole query.
            return b"\x80"

    def decode(self, payload: bytes) -> dict[str, object]:
        document = self._document(payload)
        return {} if isinstance(document, BadRecord) else document

    def decoder(self, names: Sequence[str]) -> Decode:
        if not _fit_for_msgspec(names):
            return self.decode
        return _with_fallback(msgspec.msgpack.Decoder(_fields_type(names)).decode, self.decode)

    def merge(self, base: bytes, delta: bytes, unset: UnsetTree) -> bytes | BadRecord:
        return _merge(self._documents, base, delta, unset)

    def difference(self, old: bytes, new: bytes, key_paths: Sequence[Steps]) -> Difference:
        return self._documents.difference(old, new, key_paths)


# --- fix and nvfix ---------------------------------------------------------------------------------------------------


class FieldFormat:
    """`name=value` fields with a one-byte separator: FIX (names are tags) and nvfix.

    Of a repeated name the first field counts.
    """

    def __init__(self, separator: bytes, *, tags: bool) -> None:
        self._separator = separator
        self._tags = tags

    def _fields(self, payload: bytes) -> list[list[bytes]] | BadRecord:
        fields: list[list[bytes]] = []
        position = 0
        for part in payload.split(self._separator):
            if part:
                field = part.split(b"=", 1)
                if len(field) != 2 or not field[0]:
                    return malformed(f"field {part[:40]!r} at byte {position} is not name=value")
                if self._tags and not field[0].isdigit():
                    return malformed(f"tag {field[0][:40]!r} at byte {position} is not a number")
                fields.append(field)
            position += len(part) + 1
        return fields or malformed("has no fields")

    def check(self, payload: bytes) -> BadRecord | None:
        fields = self._fields(payload)
        return fields if isinstance(fields, BadRecord) else None

    def derive_keys(self, paths: Sequence[Steps]) -> DeriveKeys:
        names = [path[0].encode() for path in paths]

        def derive_one(payload: bytes) -> bytes | BadRecord:
            fields = self._fields(payload)
            if isinstance(fields, BadRecord):
                return fields
            first = dict(reversed(fields))
            try:
                values = [value.decode() if (value := first.get(name)) is not None else None for name in names]
            except UnicodeDecodeError:
                return BadRecord(Reason.KEY_NOT_UTF8, "key: a key field is not well-formed UTF-8")
            return _key_of(values, paths)

        return lambda payloads: [derive_one(payload) for payload in payloads]

    def project(self, payload: bytes, projection: Projection) -> bytes:
        included = {path[0].encode() for path in projection.include}
        excluded = {path[0].encode() for path in projection.exclude}

        def keeps(part: bytes) -> bool:
            name = part.split(b"=", 1)[0]
            return name in included if included else name not in excluded

        parts = [part for part in payload.split(self._separator) if part and keeps(part)]
        return b"".join([part + self._separator for part in parts])

    def decode(self, payload: bytes) -> dict[str, object]:
        fields = self._fields(payload)
        if isinstance(fields, BadRecord):
            return {}
        return {name.decode(errors="replace"): value.decode(errors="replace") for name, value in reversed(fields)}

    def decoder(self, names: Sequence[str]) -> Decode:
        if any("\ufffd" in name for name in names):
            return self.decode  # it may represent bytes that are not UTF-8
        wanted = {name.encode("utf-8", "surrogatepass"): name for name in names if name}
        separator = self._separator

        def decode(payload: bytes) -> dict[str, object]:
            found: dict[str, object] = {}
            for part in payload.split(separator):
                field, _, value = part.partition(b"=")
                name = wanted.get(field)
                if name is not None and name not in found:
                    found[name] = value.decode(errors="replace")
            return found

        return decode

    def merge(self, base: bytes, delta: bytes, unset: UnsetTree) -> bytes | BadRecord:
        return merge_fields(base, delta, unset, self._separator)

    def difference(self, old: bytes, new: bytes, key_paths: Sequence[Steps]) -> Difference:
        return difference_fields(old, new, key_paths, self._separator)


# --- binary ----------------------------------------------------------------------------------------------------------


class BinaryFormat:
    """Opaque bytes: any payload is one, nothing can be derived from it."""

    def check(self, payload: bytes) -> BadRecord | None:
        return None

    def derive_keys(self, paths: Sequence[Steps]) -> DeriveKeys:
        raise AssertionError("a binary topic has no key fields: check_settings refuses them")

    def project(self, payload: bytes, projection: Projection) -> bytes:
        raise AssertionError("a binary payload has no fields: check_projection refuses them")

    def decode(self, payload: bytes) -> dict[str, object]:
        return {}

    def decoder(self, names: Sequence[str]) -> Decode:
        return self.decode

    def merge(self, base: bytes, delta: bytes, unset: UnsetTree) -> bytes | BadRecord:
        raise AssertionError("a binary payload has no fields: a delta publish is refused")

    def difference(self, old: bytes, new: bytes, key_paths: Sequence[Steps]) -> Difference:
        raise AssertionError("a binary payload has no fields: a delta subscription is refused")


_JSON: Final = JsonFormat()
_MSGPACK: Final = MsgpackFormat()
_BINARY: Final = BinaryFormat()


KEY_STEPS_MAX: Final = 32
"""How deep a key field may lie."""
INDEX_STEPS_MAX: Final = 32
"""How deep an indexed field may lie."""
_SUBSCRIPT: Final = re.compile(r"\[[0-9]+\]\Z")
_UNFIT_NAME: Final = re.compile(r'["\\\x00-\x1f]')
"""Characters that msgspec refuses in the name of a struct field: its encoder writes names unescaped."""


def format_of(settings: TopicSettings) -> Format:
    """The format of a topic's payloads."""
    match settings.message_type:
        case MessageType.JSON:
            return _JSON
        case MessageType.MSGPACK:
            return _MSGPACK
        case MessageType.FIX | MessageType.NVFIX:
            return FieldFormat(settings.separator, tags=settings.message_type is MessageType.FIX)
        case MessageType.BINARY:
            return _BINARY


def index_paths(settings: TopicSettings) -> list[Steps]:
    """The parsed paths of a topic's indexes. Raises ValueError naming the path at fault."""
    paths = [parse_path(path) for path in settings.index]
    if paths and settings.message_type is MessageType.BINARY:
        raise ValueError("a binary topic has no fields")
    for index, path in enumerate(paths):
        if len(path) > INDEX_STEPS_MAX:
            raise ValueError(f"{path_text(path)[:80]}… has {len(path)} steps, more than the limit of {INDEX_STEPS_MAX}")
        if any(_SUBSCRIPT.search(step) for step in path):
            raise ValueError(f"{path_text(path)}: an index holds all elements of an array; leave out the subscript")
        check_flat(settings, path)
        if path in paths[:index]:
            raise ValueError(f"{path_text(path)} is there twice")
    return paths


def check_flat(settings: TopicSettings, path: Steps) -> None:
    """Raises ValueError for a path that a fix or nvfix payload does not have."""
    if settings.message_type in (MessageType.FIX, MessageType.NVFIX) and len(path) != 1:
        raise ValueError(f"{path_text(path)}: a {settings.message_type} payload is flat")
    if settings.message_type is MessageType.FIX and not (path[0].isascii() and path[0].isdigit()):
        raise ValueError(f"{path_text(path)}: a fix field is a tag such as /55")


def key_paths(settings: TopicSettings) -> list[Steps]:
    """The parsed key paths of a topic. Raises ValueError naming the path at fault."""
    paths = [parse_path(path) for path in settings.key]
    if paths and settings.message_type is MessageType.BINARY:
        raise ValueError("a binary topic has no fields, so its publishers supply the key")
    for index, path in enumerate(paths):
        if len(path) > KEY_STEPS_MAX:
            raise ValueError(f"{path_text(path)[:80]}… has {len(path)} steps, more than the limit of {KEY_STEPS_MAX}")
        if settings.message_type is MessageType.JSON and any(_UNFIT_NAME.search(step) for step in path):
            raise ValueError(f"{path_text(path)}: a key field's name has no quotes, backslashes or control characters")
        check_flat(settings, path)
        for other in paths[:index]:
            shared = min(len(path), len(other))
            if path[:shared] == other[:shared]:
                raise ValueError(f"{path_text(other)} and {path_text(path)} overlap")
    return paths
