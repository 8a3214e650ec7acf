"""Projections, merges and differences of documents as they were first written: each level decoded, and encoded again.

Their time grows with names times paths, and with depth times bytes. So they are the oracle of the linear ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import msgspec

from sow_server.engine.formats.deltas import LEVELS_MAX, DeltaError, Difference
from sow_server.engine.formats.paths import Steps
from sow_server.engine.formats.payloads import Projection
from sow_server.engine.values.keys import path_text

Level: TypeAlias = dict[str, msgspec.Raw]
Fields: TypeAlias = Level
UnsetTree: TypeAlias = "Mapping[str, UnsetTree | None]"


class FirstLevels:
    """The operations of JSON or MessagePack (`kind`)."""

    def __init__(self, *, json: bool) -> None:
        kind = msgspec.json if json else msgspec.msgpack
        self._json = json
        self._encode: Callable[[object], bytes] = kind.encode
        self._level: Callable[[bytes], Level] = kind.Decoder(Level).decode
        self._inner: Callable[[bytes], Inner] = kind.Decoder(Inner).decode
        self._documents = Documents(
            self._level,
            kind.Decoder(object).decode,
            kind.encode,
            kind.Encoder(order="sorted").encode,
            null=b"null" if json else b"\xc0",
            opening=b"{" if json else bytes((*range(0x80, 0x90), 0xDE, 0xDF)),
        )

    def project(self, payload: bytes, projection: Projection) -> bytes:
        level = self._level(payload)
        if projection.hidden:
            level = hide_level(level, projection.hidden, self._inner, self._encode)
        if projection.include or projection.exclude:
            level = project_level(level, projection, self._level, self._encode)
        return self._encode(level)

    def merge(self, base: bytes, delta: bytes, unset: Sequence[Steps]) -> bytes | None:
        """None: refused."""
        try:
            return self._documents.merge(base, delta, unset_tree(unset))
        except DeltaError:
            return None

    def difference(self, old: bytes, new: bytes, key_paths: Sequence[Steps]) -> Difference:
        return self._documents.difference(old, new, key_paths)


def project_level(
    level: Level,
    projection: Projection,
    decode: Callable[[bytes], Level],
    encode: Callable[[object], bytes],
) -> Level:
    """Projects one level of a document; values keep their published bytes."""
    kept: Level = {}
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
        projected = project_level(inner, child, decode, encode)
        if projected or projection.exclude:
            kept[name] = msgspec.Raw(encode(projected))
    return kept


Inner = Level | list[msgspec.Raw] | str | int | float | bool | None
"""One level of any value."""


def hide_level(
    level: Level,
    hidden: Sequence[Steps],
    decode: Callable[[bytes], Inner],
    encode: Callable[[object], bytes],
) -> Level:
    """One level of a document without its hidden fields; other values keep their published bytes."""
    kept: Level = {}
    for name, raw in level.items():
        below = [path[1:] for path in hidden if path[0] == name]
        if not below:
            kept[name] = raw
        elif () not in below:
            shown = _without(raw, below, decode, encode)
            if shown is not None:
                kept[name] = shown
    return kept


def _without(
    raw: msgspec.Raw, hidden: Sequence[Steps], decode: Callable[[bytes], Inner], encode: Callable[[object], bytes]
) -> msgspec.Raw | None:
    """A value without its hidden fields; None where it cannot be told whether it has any."""
    try:
        inner = decode(bytes(raw))
    except msgspec.MsgspecError:
        return None
    if isinstance(inner, dict):
        return msgspec.Raw(encode(hide_level(inner, hidden, decode, encode)))
    if isinstance(inner, list):
        elements = [_without(element, hidden, decode, encode) for element in inner]
        return msgspec.Raw(encode([element for element in elements if element is not None]))
    return raw


def unset_tree(paths: Sequence[Steps]) -> UnsetTree:
    """Many paths in one tree; fields below an unset field are unset with it."""
    below: dict[str, list[Steps]] = {}
    for path in paths:
        below.setdefault(path[0], []).append(path[1:])
    return {name: None if () in rests else unset_tree(rests) for name, rests in below.items()}


class Documents:
    """Merges and compares documents of one encoding that nests objects; values stay bytes."""

    def __init__(
        self,
        fields: Callable[[bytes], Fields],
        whole: Callable[[bytes], object],
        encode: Callable[[object], bytes],
        encode_sorted: Callable[[object], bytes],
        *,
        null: bytes,
        opening: bytes,
    ) -> None:
        """`opening`: the bytes that an object can begin with."""
        self._fields = fields
        self._whole = whole
        self._encode = encode
        self._encode_sorted = encode_sorted
        self._null = null
        self._opening = frozenset(opening)

    # -- merging ----------------------------------------------------------------------------------------------------

    def merge(self, base: bytes, delta: bytes, unset: UnsetTree) -> bytes:
        """`base` without the unset fields, with `delta` merged into it: objects field by field, everything else
        replaced; null leaves a field as it is. Raises DeltaError for a delta that is too deep."""
        fields = self._fields(base)
        changed = self._unset(fields, unset)
        changed = self._merge(fields, self._fields(delta), LEVELS_MAX) or changed
        return self._encode(fields) if changed else base

    def _unset(self, fields: Fields, unset: UnsetTree) -> bool:
        changed = False
        for name in unset.keys() & fields.keys():
            below = unset[name]
            if below is None:
                del fields[name]
                changed = True
            elif (inner := self._object(bytes(fields[name]))) is not None and self._unset(inner, below):
                fields[name] = msgspec.Raw(self._encode(inner))
                changed = True
        return changed

    def _merge(self, fields: Fields, delta: Fields, levels: int) -> bool:
        """Changes `fields`; whether that made a difference."""
        if not levels:
            raise DeltaError(f"objects of a delta are merged down to {LEVELS_MAX} levels, and this one goes deeper")
        changed = False
        for name, raw in delta.items():
            value = bytes(raw)
            if value == self._null:
                continue
            old = fields.get(name)
            inner = self._object(value)
            if inner is None:
                if old is None or bytes(old) != value:
                    fields[name] = raw
                    changed = True
                continue
            before = None if old is None else self._object(bytes(old))
            if before is None:
                if self._null in value:  # perhaps; a missing field stays missing
                    before = {}
                    self._merge(before, inner, levels - 1)
                    raw = msgspec.Raw(self._encode(before))  # the merged value is put
                fields[name] = raw
                changed = True
            elif self._merge(before, inner, levels - 1):
                fields[name] = msgspec.Raw(self._encode(before))
                changed = True
        return changed

    def _object(self, value: bytes) -> Fields | None:
        """The fields of an object; None for every other value."""
        if value[0] not in self._opening:
            return None
        try:
            return self._fields(value)
        except msgspec.MsgspecError:  # a MessagePack map with other keys than texts: a value as a whole
            return None

    # -- comparing --------------------------------------------------------------------------------------------------

    def difference(self, old: bytes, new: bytes, key_paths: Sequence[Steps]) -> Difference:
        """The changes from `old` to `new`. Arrays and scalars are whole, objects field by field."""
        before, after = self._top(old), self._top(new)
        gone: list[Steps] = []
        kept = self._compare(before, after, (), gone)
        changed = bool(kept or gone)
        for path in key_paths:
            self._include(kept, after, path)
        payload = self._encode({name: kept[name] for name in after if name in kept})
        return Difference(payload, tuple([path_text(path) for path in gone]), changed)

    def _top(self, document: bytes) -> Fields:
        try:
            return self._fields(document)
        except (msgspec.MsgspecError, RecursionError):
            return {}  # valid by its syntax, undecodable in fact: a document without fields, as everywhere

    def _compare(self, old: Fields, new: Fields, at: Steps, gone: list[Steps]) -> Fields:
        """The fields of `new` that differ from those of `old`; adds the paths of removed fields."""
        kept: Fields = {}
        for name, raw in new.items():
            before = old.get(name)
            if before is None:
                kept[name] = raw
                continue
            old_value, value = bytes(before), bytes(raw)
            if old_value == value:
                continue
            old_inner, inner = self._object(old_value), self._object(value)
            if old_inner is None or inner is None:
                if old_inner is not inner or not self._alike(old_value, value):
                    kept[name] = raw
            elif len(at) + 1 < LEVELS_MAX:
                below = self._compare(old_inner, inner, (*at, name), gone)
                if below:
                    kept[name] = msgspec.Raw(self._encode(below))
            elif not self._alike(old_value, value):
                gone.append((*at, name))  # [2]: replaced whole
                kept[name] = raw
        gone += [(*at, name) for name in old if name not in new]
        return kept

    def _alike(self, one: bytes, other: bytes) -> bool:
        """Whether two values differ only in spaces, escapes, and the order of the fields in objects."""
        try:
            return self._encode_sorted(self._whole(one)) == self._encode_sorted(self._whole(other))
        except (msgspec.MsgspecError, RecursionError, ValueError, TypeError, OverflowError):
            return False  # a value that cannot be decoded, such as 1e400, is compared by its bytes, and those differ

    def _include(self, kept: Fields, document: Fields, path: Steps) -> None:
        """Adds the field of `document` at `path` to the fields that are kept."""
        raw = document.get(path[0])
        if raw is None:
            return
        if len(path) == 1:
            kept.setdefault(path[0], raw)
            return
        inner = self._object(bytes(raw))
        if inner is not None:
            below = self._object(bytes(kept[path[0]])) if path[0] in kept else None
            below = below or {}
            self._include(below, inner, path[1:])
            if below:
                kept[path[0]] = msgspec.Raw(self._encode(below))


# --- fix and nvfix ---------------------------------------------------------------------------------------------------


def project_fields(payload: bytes, projection: Projection, separator: bytes) -> bytes:
    """The projection of a flat payload."""
    included = {path[0].encode() for path in projection.include}
    excluded = {path[0].encode() for path in projection.exclude}
    hidden = {path[0].encode() for path in projection.hidden if len(path) == 1}

    def keeps(part: bytes) -> bool:
        name = part.split(b"=", 1)[0]
        return name not in hidden and (name in included if included else name not in excluded)

    return b"".join([part + separator for part in payload.split(separator) if part and keeps(part)])
