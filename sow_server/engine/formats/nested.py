"""Operations that JSON and MessagePack documents share: bounds of nesting, partial decoding, projection, merging."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final, TypedDict, cast

import msgspec

from sow_server.engine.formats.deltas import DeltaError, Documents, UnsetTree
from sow_server.engine.formats.payloads import BadRecord, Decode, Projection, Steps, malformed

Level = dict[str, msgspec.Raw]
"""One level of a document, whose values are not decoded."""

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


def fit_for_msgspec(names: Sequence[str]) -> bool:
    """Whether msgspec finds these fields in a TypedDict: it takes others than ASCII for the empty name, unless Python
    happens to have their UTF-8 at hand (0.22)."""
    return all(name.isascii() and name for name in names)


def fields_type(names: Sequence[str]) -> type[dict[str, object]]:
    """A type of documents of which msgspec makes objects only for `names`; it skips the rest twice as fast."""
    made = TypedDict("Fields", dict.fromkeys(names, object), total=False)  # type: ignore[misc]  # at run time
    return cast(type[dict[str, object]], made)


def with_fallback(decode: Decode, whole: Decode) -> Decode:
    """`decode`, and `whole` where that raises."""

    def decode_fields(payload: bytes) -> dict[str, object]:
        try:
            return decode(payload)
        except (msgspec.MsgspecError, RecursionError, ValueError):
            return whole(payload)

    return decode_fields


def not_decoded(error: Exception, payload: bytes, wanted: str) -> BadRecord:
    """The text of msgspec's other errors, with a position: for a truncated document it gives none."""
    if isinstance(error, RecursionError):
        return malformed(f"nested deeper than {NESTING_MAX} levels")
    text = str(error)
    if isinstance(error, msgspec.ValidationError):
        return malformed(f"not {wanted}: {text}" if text.startswith("Expected") else text)
    return malformed(text if "(byte " in text else f"{text} (byte {len(payload)})")


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


def merge_documents(documents: Documents, base: bytes, delta: bytes, unset: UnsetTree) -> bytes | BadRecord:
    try:
        return documents.merge(base, delta, unset)
    except DeltaError as error:
        return malformed(str(error))
    except (msgspec.MsgspecError, RecursionError) as error:
        # Both have passed the check of a publish, so this is about depth, or numbers that no decoder takes.
        return malformed(f"cannot be merged: {error}")
