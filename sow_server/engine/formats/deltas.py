"""Deltas: documents merged, and compared, field by field (rules P2, S3). Pure.

A path to a field is a tuple of names; an `PathTree` holds many of them, name by name.

    [1]  Fields that a delta does not change keep their published bytes and their order; a merge that changes nothing
         gives the base itself.
    [2]  Fields are unset first, then the delta is merged. So an object that is both unset and given is replaced whole.
    [3]  A difference, merged into the old document with null taken as a value, gives the content of the new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from sow.flat_fields import FlatFields, Item, first_fields
from sow_server.engine.formats.levels import Fields, Levels, Value, published
from sow_server.engine.formats.paths import PathTree, Steps
from sow_server.engine.values.keys import path_text

LEVELS_MAX: Final = 32
"""Objects are merged and compared field by field down to this depth. So equal bytes are compared at most so often: a
value is compared as a whole before it is opened."""


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


class Documents:
    """Merges and compares documents of one encoding that nests objects; values stay bytes."""

    def __init__(
        self,
        levels: Levels,
        whole: Callable[[bytes], object],
        encode_sorted: Callable[[object], bytes],
        *,
        null: bytes,
        with_digits: Callable[[bytes], object] | None = None,
    ) -> None:
        """`with_digits`: decodes a value with all digits of its numbers, where `whole` does not."""
        self._levels = levels
        self._whole = whole
        self._encode_sorted = encode_sorted
        self._null = null
        self._raw_null = msgspec.Raw(null)
        self._with_digits = with_digits

    # -- merging ----------------------------------------------------------------------------------------------------

    def merge(self, base: bytes, delta: bytes, unset: PathTree) -> bytes:
        """`base` without the unset fields, with `delta` merged into it: objects field by field, everything else
        replaced; null leaves a field as it is. Raises DeltaError for a delta that is too deep."""
        fields = self._levels.top(base)
        changed = bool(unset) and self._unset(fields, unset, 0)
        changed = self._merge(fields, self._levels.top(delta), 0) or changed
        return self._levels.encode(fields) if changed else base

    def _unset(self, fields: Fields, unset: PathTree, depth: int) -> bool:
        changed = False
        for name in fields.keys() & unset.keys():
            below = unset[name]
            if below is None:
                del fields[name]
                changed = True
                continue
            inner = self._levels.fields(fields[name], depth + 1)
            if inner is not None and self._unset(inner, below, depth + 1):
                fields[name] = inner
                changed = True
        return changed

    def _merge(self, fields: Fields, delta: Fields, depth: int) -> bool:
        """Changes `fields`; whether that made a difference."""
        if depth >= LEVELS_MAX:
            raise DeltaError(f"objects of a delta are merged down to {LEVELS_MAX} levels, and this one goes deeper")
        levels, changed = self._levels, False
        for name, given in delta.items():
            old = fields.get(name)
            inner = levels.fields(given, depth + 1) if levels.is_object(given) else None
            if inner is None:
                if given not in (self._raw_null, old):
                    fields[name] = given
                    changed = True
                continue
            before = levels.fields(old, depth + 1)
            if before is None:
                if self._null in published(given):  # perhaps; a missing field stays missing
                    before = {}
                    self._merge(before, inner, depth + 1)
                fields[name] = given if before is None else before
                changed = True
            elif self._merge(before, inner, depth + 1):
                fields[name] = before
                changed = True
        return changed

    # -- comparing --------------------------------------------------------------------------------------------------

    def difference(self, old: bytes, new: bytes, key_paths: Sequence[Steps]) -> Difference:
        """The changes from `old` to `new`. Arrays and scalars are whole, objects field by field."""
        before, after = self._top(old), self._top(new)
        gone: list[Steps] = []
        kept = self._compare(before, after, (), gone)
        changed = bool(kept or gone)
        for path in key_paths:
            self._include(kept, after, path, 0)
        payload = self._levels.encode({name: kept[name] for name in after if name in kept})
        return Difference(payload, tuple([path_text(path) for path in gone]), changed)

    def _top(self, document: bytes) -> Fields:
        try:
            return self._levels.top(document)
        except (msgspec.MsgspecError, RecursionError):
            return {}  # valid by its syntax, undecodable in fact: a document without fields, as everywhere

    def _compare(self, old: Fields, new: Fields, at: Steps, gone: list[Steps]) -> Fields:
        """The fields of `new` that differ from those of `old`; adds the paths of removed fields."""
        levels, depth = self._levels, len(at) + 1
        kept: Fields = {}
        for name, value in new.items():
            before = old.get(name)
            if before is None:
                kept[name] = value
                continue
            if before == value:  # at each level above a change anew, but that costs a hundredth of opening one
                continue
            old_inner = levels.fields(before, depth) if levels.is_object(before) else None
            inner = levels.fields(value, depth) if levels.is_object(value) else None
            if old_inner is None or inner is None:
                if old_inner is not inner or not self._alike(before, value):
                    kept[name] = value
            elif depth < LEVELS_MAX:
                below = self._compare(old_inner, inner, (*at, name), gone)
                if below:
                    kept[name] = below
            elif not self._alike(before, value):
                gone.append((*at, name))  # [2]: replaced whole
                kept[name] = value
        gone += [(*at, name) for name in old if name not in new]
        return kept

    def _alike(self, one: Value, other: Value) -> bool:
        """True if two values differ only in spaces, escapes, and the order of the fields in objects."""
        ours, theirs, encode, decode = published(one), published(other), self._encode_sorted, self._with_digits
        try:
            if encode(self._whole(ours)) != encode(self._whole(theirs)):
                return False
            return decode is None or encode(decode(ours)) == encode(decode(theirs))  # slow, and rare
        except (msgspec.MsgspecError, RecursionError, ValueError, TypeError, OverflowError):
            return False  # a value that cannot be decoded, such as 1e400, is compared by its bytes, and those differ

    def _include(self, kept: Fields, document: Fields, path: Steps, depth: int) -> None:
        """Adds the field of `document` at `path` to the fields that are kept; both are levels at a depth. Levels on the
        way stay open, so those of a key of many fields are opened once."""
        name = path[depth]
        value = document.get(name)
        if value is None:
            return
        if depth + 1 == len(path):
            kept.setdefault(name, value)
            return
        inner = self._levels.fields(value, depth + 1)
        if inner is not None:
            document[name] = inner
            below = self._levels.fields(kept[name], depth + 1) if name in kept else None
            below = below or {}
            self._include(below, inner, path, depth + 1)
            if below:
                kept[name] = below


# --- fix and nvfix ---------------------------------------------------------------------------------------------------


def difference_fields(old: bytes, new: bytes, key_paths: Sequence[Steps], flat: FlatFields) -> Difference:
    """The changes from `old` to `new`: whole fields, and the first of repeated ones."""
    before, after = first_fields(flat.items(old)), first_fields(flat.items(new))
    keys = {flat.name(path[0].encode()) for path in key_paths}
    changes = {name for name, item in after.items() if before.get(name) != item}
    kept = [item for name, item in after.items() if name in changes or name in keys]
    names = _names(after.values())
    gone = tuple([path_text((name.decode(errors="replace"),)) for name in _names(before.values()) if name not in names])
    return Difference(b"".join([flat.joined([item]) + flat.separator for item in kept]), gone, bool(changes or gone))


def _names(items: Iterable[Item]) -> dict[bytes, None]:
    """The names of fields, also of lengths, in their order."""
    names: dict[bytes, None] = {}
    for item in items:
        if item.length:
            names[item.length] = None
        names[item.name] = None
    return names
