"""Operations that JSON and MessagePack documents share: bounds of nesting, partial decoding, projection, merging."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from operator import attrgetter
from typing import Final, TypedDict, cast

import msgspec

from sow_server.engine.formats.deltas import DeltaError, Documents
from sow_server.engine.formats.levels import Fields, Levels, Value, fit_for_msgspec, is_large
from sow_server.engine.formats.paths import PathTree
from sow_server.engine.formats.payloads import BadRecord, Columns, Decode, Projection, malformed

NESTING_MAX: Final = 256
"""Levels of a document. The decoder also counts Python's own stack, which differs from thread to thread: a document
near that limit would be readable on one thread and not on another, and have index entries or not. So the limit is well
below."""
_JSON_TEXT: Final = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_STEPS: Final = bytes.maketrans(b"[]{}", b"\x01\xff\x01\xff")


def check_json_nesting(payload: bytes) -> None:
    """Raises RecursionError for a well-formed document that is nested too deeply."""
    if payload.count(b"{") + payload.count(b"[") > NESTING_MAX:
        brackets = _JSON_TEXT.sub(b"", payload).translate(_STEPS, _NOT_BRACKETS)
        if max(accumulate(array("b", brackets))) > NESTING_MAX:
            raise RecursionError


def check_nesting(document: object) -> None:
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


DECODED_NAMES_MAX: Final = 64
"""msgspec compares each name of a document with each of the fields that it is to decode. For more fields than that,
documents are decoded whole."""


def fields_type(names: Sequence[str]) -> type[dict[str, object]]:
    """A type of documents of which msgspec makes objects only for `names`; it skips the rest twice as fast."""
    made = TypedDict("Fields", dict.fromkeys(names, object), total=False)  # type: ignore[misc]  # at run time
    return cast(type[dict[str, object]], made)


_UNDECODED: Final = (msgspec.MsgspecError, RecursionError, ValueError)
"""The errors of documents that msgspec does not take for the type: they are decoded whole."""


def with_fallback(decode: Decode, whole: Decode) -> Decode:
    """`decode`, and `whole` where that raises."""

    def decode_fields(payload: bytes) -> dict[str, object]:
        try:
            return decode(payload)
        except _UNDECODED:
            return whole(payload)

    return decode_fields


def columns_of(
    decoder: Callable[[type[msgspec.Struct]], Callable[[bytes], object]], names: Sequence[str], whole: Decode
) -> Columns | None:
    """See `Format.columns`. `decoder` makes that of an encoding, and `whole` decodes what it refuses."""
    if not names or len(names) > DECODED_NAMES_MAX or not fit_for_msgspec(names):
        return None
    if any(not name.isprintable() or '"' in name or "\\" in name for name in names):
        return None  # msgspec has no struct with such names
    kind = _fields_struct(tuple(names))
    decode, values_of = decoder(kind), [attrgetter(f"f{at}") for at in range(len(names))]

    def decode_one(payload: bytes) -> object:
        try:
            return decode(payload)
        except _UNDECODED:
            document: object = whole(payload)
            return kind(*map(document.get, names)) if isinstance(document, dict) else kind()

    def columns(payloads: Sequence[bytes]) -> list[Sequence[object]]:
        try:
            documents = list(map(decode, payloads))
        except _UNDECODED:
            documents = list(map(decode_one, payloads))
        return [list(map(value_of, documents)) for value_of in values_of]

    return columns


@lru_cache(maxsize=256)
def _fields_struct(names: tuple[str, ...]) -> type[msgspec.Struct]:
    """A struct of these fields, null where they are missing: it is made and read in less time than a dict."""
    fields = [f"f{at}" for at in range(len(names))]
    return msgspec.defstruct(
        "Fields",
        [(field, object, None) for field in fields],
        rename=dict(zip(fields, names, strict=True)),
        gc=False,  # a document has no circles
    )


def is_no_utf8(error: Exception) -> bool:
    """True for the error of a text that is no UTF-8. msgspec has an error of its own for it from 0.23 on."""
    return isinstance(error, UnicodeDecodeError) or str(error).startswith("Invalid UTF-8")


def not_decoded(error: Exception, payload: bytes, wanted: str) -> BadRecord:
    """The text of msgspec's other errors, with a position: for a truncated document it gives none."""
    if isinstance(error, RecursionError):
        return malformed(f"nested deeper than {NESTING_MAX} levels")
    text = str(error)
    if isinstance(error, msgspec.ValidationError):
        return malformed(f"not {wanted}: {text}" if text.startswith("Expected") else text)
    return malformed(text if "(byte " in text else f"{text} (byte {len(payload)})")


def project(levels: Levels, payload: bytes, projection: Projection) -> bytes:
    """The projected fields of a document. Raises MsgspecError and RecursionError."""
    if is_large(payload):
        return _project_large(levels, payload, projection)
    fields = levels.top(payload)
    if projection.hidden:
        _hide(levels, fields, projection.hidden_tree, 0)
    if projection.include:
        fields = _included(levels, fields, projection.include_tree, 0)
    elif projection.exclude:
        _exclude(levels, fields, projection.exclude_tree, 0)
    return levels.encode(fields)


def _project_large(levels: Levels, payload: bytes, projection: Projection) -> bytes:
    document: Value | None = levels.document(payload)
    if projection.hidden and document is not None:
        document = _hide(levels, document, projection.hidden_tree, 0)
    if projection.include:
        fields = levels.fields(document, 0, projection.include_tree)
        document = None if fields is None else _included(levels, fields, projection.include_tree, 0)
    elif projection.exclude and document is not None:
        document = _excluded(levels, document, projection.exclude_tree, 0)
    if document is None:
        raise msgspec.ValidationError("no object that can be read")
    return levels.encode(document)


def _included(levels: Levels, fields: Fields, tree: PathTree, depth: int) -> Fields:
    """The fields of a level that are in a tree, in their order."""
    kept: Fields = {}
    for name, value in fields.items():
        if name in tree:
            below = tree[name]
            if below is None:
                kept[name] = value
                continue
            inner = levels.fields(value, depth + 1, below)
            if inner is not None and (included := _included(levels, inner, below, depth + 1)):
                kept[name] = included
    return kept


def _exclude(levels: Levels, fields: Fields, tree: PathTree, depth: int) -> None:
    """Removes the fields in a tree from a level."""
    for name in tree.keys() & fields.keys():  # at the cost of the smaller one
        below = tree[name]
        if below is None:
            del fields[name]
        else:
            fields[name] = _excluded(levels, fields[name], below, depth + 1)


def _excluded(levels: Levels, value: Value, tree: PathTree, depth: int) -> Value:
    """A value without the fields in a tree."""
    value, some = levels.some_fields(value, tree, depth)
    if some is not None:
        left = dict(some)
        _exclude(levels, left, tree, depth)
        return levels.rewritten(value, some, left) or value
    fields = levels.fields(value, depth)
    if fields is None:
        return value
    _exclude(levels, fields, tree, depth)
    return fields


def _hide(levels: Levels, value: Value, tree: PathTree, depth: int) -> Value | None:
    """A value without the fields in a tree, in all elements of arrays. Changes opened levels in place. None where it
    cannot be told whether the value has such fields."""
    value, some = levels.some_fields(value, tree, depth)
    if some is not None:
        left = dict(some)
        _hide_fields(levels, left, tree, depth)
        return levels.rewritten(value, some, left)
    opened = levels.opened(value, depth)
    if type(opened) is dict:
        _hide_fields(levels, opened, tree, depth)
    elif type(opened) is list:
        elements: list[Value] = []
        for element in opened:
            shown = _hide(levels, element, tree, depth + 1)
            if shown is not None:
                elements.append(shown)
        return elements
    return opened


def _hide_fields(levels: Levels, fields: Fields, tree: PathTree, depth: int) -> None:
    """Removes the fields in a tree from a level, in all elements of arrays."""
    for name in tree.keys() & fields.keys():
        below = tree[name]
        shown = None if below is None else _hide(levels, fields[name], below, depth + 1)
        if shown is None:
            del fields[name]
        else:
            fields[name] = shown


def merge_documents(documents: Documents, base: bytes, delta: bytes, unset: PathTree) -> bytes | BadRecord:
    try:
        return documents.merge(base, delta, unset)
    except DeltaError as error:
        return malformed(str(error))
    except (msgspec.MsgspecError, RecursionError) as error:
        # Both have passed the check of a publish, so this is about depth, or numbers that no decoder takes.
        return malformed(f"cannot be merged: {error}")
