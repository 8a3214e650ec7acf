"""The story of a key: each change of its history in words, with the fields that it changed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeAlias

from sow_client import PastChange
from sow_console import documents

Event: TypeAlias = Literal["published", "changed", "touched", "deleted", "expired", "left your rows"]
"""The kind of a change. "published": there was no record before it; "changed": there was one, or that is
not known."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field that differs from the record before."""

    path: str
    before: str | None
    """The text of its JSON; None: it is new."""
    after: str | None
    """None: it is gone."""


@dataclass(frozen=True, slots=True)
class Chapter:
    """One change of the key."""

    event: Event
    time: datetime
    """When it was committed at the instance that tells."""
    instance: str
    """The instance that accepted it; empty: not to be seen."""
    sequence: int
    version: int
    expire_time: datetime | None
    """The expire time of the record after the change. None: never, or there is no record."""
    fields: tuple[Field, ...]
    """In the order of the document; empty where the payload is no JSON object, or nothing differs."""
    payload: str
    """The payload as text; empty for a removal."""
    replicated: bool
    """True if another instance than the one that tells accepted it."""
    compared: bool
    """False: a payload is too large to be compared with the one before."""


def chapters(entries: Sequence[PastChange], instance: str, *, whole: bool) -> tuple[Chapter, ...]:
    """The story, the newest change first, as the history is. `instance`: the one that tells; `whole`: no older change
    of the key is known to be missing. Otherwise the oldest change has no difference, as the one before it is not
    known."""
    told = []
    for index, entry in enumerate(entries):
        older = entries[index + 1] if index + 1 < len(entries) else None
        told.append(_chapter(entry, older, instance, may_be_first=whole or older is not None))
    return tuple(told)


def difference(before: bytes, after: bytes) -> tuple[Field, ...]:
    """The fields in which two documents differ: first those of the new one, then those that are gone."""
    if max(len(before), len(after)) > documents.SHOWN_BYTES_MAX:
        return ()
    old, new = documents.leaves(before), documents.leaves(after)
    if old is None or new is None:
        return ()
    changed = [Field(path, old.get(path), value) for path, value in new.items() if old.get(path) != value]
    return (*changed, *(Field(path, value, None) for path, value in old.items() if path not in new))


def _chapter(entry: PastChange, older: PastChange | None, instance: str, *, may_be_first: bool) -> Chapter:
    record = entry.record
    had_record = older is not None and older.op == "put"
    fields: tuple[Field, ...] = ()
    event: Event
    if entry.reason == "not_permitted":
        event = "left your rows"
    elif entry.op == "delete":
        event = "deleted"
    elif entry.op == "expire":
        event = "expired"
    elif entry.reason == "touched":
        event = "touched"
    elif had_record:
        event = "changed"
        assert older is not None, "there was a record"
        fields = difference(documents.shown(older.record), documents.shown(record))
    else:
        event = "published" if may_be_first else "changed"
    is_there = entry.op == "put" and entry.reason != "not_permitted"
    return Chapter(
        event,
        entry.time,
        entry.instance,
        record.sequence,
        record.version,
        record.expire_time if is_there else None,
        fields,
        documents.pretty(documents.shown(record)) if is_there else "",
        bool(entry.instance) and entry.instance != instance,
        not had_record
        or max(len(older.record.payload) if older else 0, len(record.payload)) <= documents.SHOWN_BYTES_MAX,
    )
