"""The documents of the model: the keys derived from them, and deltas. Written from the rules, as the model is."""

from __future__ import annotations

import json
from collections.abc import Sequence

from sow_server.engine.values.errors import Reason
from sow_server.engine.values.model import MessageType, Publish, TopicSettings


def keys_of(settings: TopicSettings, request: Publish) -> list[bytes | Reason]:
    """The key of each record of a publish, or the reason why it has none."""
    if request.removals is not None and settings.key:
        # A removal by key has no document (rule P11).
        assert request.keys is not None
        return [
            key.encode() if key else derived_key(settings, payload)
            for key, payload in zip(request.keys, request.payloads, strict=True)
        ]
    if settings.key:
        return [derived_key(settings, payload) for payload in request.payloads]
    assert request.keys is not None, "the tests give keys where the topic has no key fields"
    found: list[bytes | Reason] = []
    removals = request.removals or [False] * len(request.keys)
    for key, payload, removes in zip(request.keys, request.payloads, removals, strict=True):
        if removes:
            found.append(key.encode())
        elif settings.message_type is MessageType.JSON and not isinstance(_document(payload), dict):
            found.append(Reason.PAYLOAD_MALFORMED)
        elif not key:
            found.append(Reason.KEY_REQUIRED)
        else:
            found.append(key.encode())
    return found


def derived_key(settings: TopicSettings, payload: bytes) -> bytes | Reason:
    """The key of a JSON document with one top-level key field: all that the random tests need."""
    (path,) = settings.key
    document = _document(payload)
    if not isinstance(document, dict):
        return Reason.PAYLOAD_MALFORMED
    value = document.get(path.removeprefix("/"))
    if value is None:
        return Reason.KEY_FIELD_MISSING
    if isinstance(value, (list, dict)):
        return Reason.KEY_FIELD_NOT_SCALAR
    return str(value).encode()


def _document(payload: bytes) -> object:
    try:
        return json.loads(payload)
    except ValueError:
        return None


def refused_delta(settings: TopicSettings, request: Publish) -> Reason | None:
    """The reason to refuse a whole publish for its use of deltas (rule P2)."""
    if not request.delta:
        return Reason.INVALID_ARGUMENT if request.unset_paths else None
    if settings.message_type is MessageType.BINARY:
        return Reason.UNSUPPORTED_FOR_MESSAGE_TYPE
    return Reason.UNSET_KEY_FIELD if set(settings.key) & set(request.unset_paths) else None


def merged(base: bytes, delta: bytes, unset_paths: Sequence[str]) -> bytes:
    """Rule P2 on compact JSON, whose bytes are those of its encoding."""
    document = json.loads(base)
    for path in unset_paths:
        *steps, last = path.removeprefix("/").split("/")
        at = document
        for step in steps:
            at = at.get(step, {}) if isinstance(at, dict) else {}
        if isinstance(at, dict):
            at.pop(last, None)

    def merge(into: dict[str, object], changes: dict[str, object]) -> dict[str, object]:
        for name, value in changes.items():
            if isinstance(value, dict):
                before = into.get(name)
                into[name] = merge(before if isinstance(before, dict) else {}, value)
            elif value is not None:
                into[name] = value
        return into

    return json.dumps(merge(document, json.loads(delta)), separators=(",", ":")).encode()
