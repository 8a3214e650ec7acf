"""Deltas: documents merged, and compared, field by field (rules P2, S3). Pure.

A path to a field is a tuple of names; an `UnsetTree` holds many of them, name by name.

    [1]  Fields that a delta does not change keep their published bytes and their order; a merge that changes nothing
         gives the base itself.
    [2]  Fields are unset first, then the delta is merged. So an object that is both unset and given is replaced whole.
    [3]  A difference, merged into the old document with null taken as a value, gives the content of the new one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import msgspec

from sow_server.engine.values.keys import path_text

LEVELS_MAX: Final = 32
"""Objects are merged and compared field by field down to this depth. A level is read once for every level above it:
without a bound a small, deep delta to a large, deep document would keep the writer busy for seconds."""

Fields: TypeAlias = dict[str, msgspec.Raw]
Steps: TypeAlias = tuple[str, ...]
UnsetTree: TypeAlias = "Mapping[str, UnsetTree | None]"
"""The fields to unset at one level: None for the field itself, a tree for fields below it."""


class DeltaError(ValueError):
    """The reason why a delta cannot be merged."""


class Difference(NamedTuple):
    """The changes from one document to another."""

    payload: bytes
    """The changed fields and the key fields; null is a value here."""
    unset_paths: tuple[str, ...]
    """The removed fields."""
    changed: bool
    """False: the payload has the key fields alone."""


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
                    raw = msgspec.Raw(self._encode(before))  # noqa: PLW2901  # the merged value is put
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


def merge_fields(base: bytes, delta: bytes, unset: UnsetTree, separator: bytes) -> bytes:
    """`base` without the fields that are unset, each field of `delta` in the place of the base's first field of that
    name, or at the end. If `delta` repeats a name, the first counts; other fields of `base` stay unchanged."""
    parts = base.split(separator)
    if unset:
        names = {name.encode() for name in unset}
        parts = [part for part in parts if not part or part.split(b"=", 1)[0] not in names]
    given = _first_fields(delta, separator)
    for index, part in enumerate(parts):
        if part and (replacement := given.pop(part.split(b"=", 1)[0], None)) is not None:
            parts[index] = replacement
    end = len(parts) - base.endswith(separator)  # a separator at the end stays there
    parts[end:end] = given.values()
    return separator.join(parts)


def difference_fields(old: bytes, new: bytes, key_paths: Sequence[Steps], separator: bytes) -> Difference:
    """The changes from `old` to `new`: whole fields, and the first of repeated ones."""
    before, after = _first_fields(old, separator), _first_fields(new, separator)
    keys = {path[0].encode() for path in key_paths}
    changes = {name for name, part in after.items() if before.get(name) != part}
    gone = tuple([path_text((name.decode(errors="replace"),)) for name in before if name not in after])
    kept = [part + separator for name, part in after.items() if name in changes or name in keys]
    return Difference(b"".join(kept), gone, bool(changes or gone))


def _first_fields(payload: bytes, separator: bytes) -> dict[bytes, bytes]:
    """The first field of each name, `name=value`, in their order."""
    fields: dict[bytes, bytes] = {}
    for part in payload.split(separator):
        if part:
            fields.setdefault(part.split(b"=", 1)[0], part)
    return fields
