"""A view: the records in focus, kept up to date by the messages of a subscription.

[1]  After every message the view holds the records that a query would have found at that message's bookmark. The
     subscription must begin with a snapshot and report records that go out of focus (`oof=True`).
[2]  A delta is merged as by the server (rules P2, S3): first the unset fields are removed, then objects are merged
     field by field and other values replaced; null is a value.
[3]  A kept record does not keep the frame in which it came: memory is proportional to the records in focus.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

import msgspec

from sow_client._payloads import PayloadForm, flat_fields
from sow_client._records import (
    NEVER_MICROS,
    UNKNOWN_FORM,
    Change,
    Record,
    html_table,
    invalid,
    record_of,
)

_Fields: TypeAlias = dict[str, msgspec.Raw]


class View(Mapping[str, Record]):
    """Records by key, kept up to date from the messages of one subscription to one topic; see `apply`.

        view = View()
        with client.sow_and_subscribe("orders", "/price > 9", oof=True) as changes:
            for change in changes:
                view.apply(change)

    Deltas are merged for every message type. `fix_separator` is for fix and nvfix topics of servers that are older than
    this client, and do not tell it.
    """

    def __init__(self, *, fix_separator: str = "\x01") -> None:
        self.complete = False
        """True: the snapshot is in; False before that, and again after a "resync"."""
        self._records: dict[str, Record] = {}
        self._unknown = PayloadForm("", fix_separator)

    def apply(self, change: Change) -> None:
        """Takes in the next message."""
        record = change.record
        if change.op == "sow":
            assert record is not None, "a row of a snapshot has its record"
            # All records of a snapshot's frames stay in the view, so copying them would save nothing ([3]).
            self._records[record.key] = record
        elif change.op == "put":
            assert record is not None, "a put has its record"
            base = self._records.get(record.key) if change.is_delta else None
            payload = record.payload
            if base is not None:
                form = record.form
                form = form if form.message_type else self._unknown
                payload = merged(base.payload, payload, change.unset_paths, form=form)
            self._records[record.key] = in_own_batch(record, payload)
        elif change.op == "snapshot_end":
            self.complete = True
        elif change.op == "resync":
            self.complete = False
            self._records.clear()
        else:
            self._records.pop(change.key, None)

    def __getitem__(self, key: str) -> Record:
        return self._records[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def __repr__(self) -> str:
        return f"View({len(self._records)} records{'' if self.complete else ', not complete'})"

    def _repr_html_(self) -> str:
        return html_table(self.values(), repr(self))


def in_own_batch(record: Record, payload: bytes) -> Record:
    """The record with this payload, in a batch of its own ([3])."""
    expire = record.expire_time_micros
    return record_of(
        record.topic,
        record.key,
        payload,
        record.version,
        record.publish_time_micros,
        NEVER_MICROS if expire is None else expire,
        record.sequence,
        record.origin,
        form=record.form,
    )


def differ(old: Record, new: Record) -> bool:
    """True if two states of a record are not the same."""
    # The versions of nearly all differ, and reading a field costs more than comparing it.
    return old.version != new.version or old.origin != new.origin or old.payload != new.payload


def merged(base: bytes, delta: bytes, unset_paths: Sequence[str], *, form: PayloadForm = UNKNOWN_FORM) -> bytes:
    """`base` without the fields that are unset, with `delta` merged into it ([2])."""
    documents = _documents(delta, form.message_type)
    if documents is None:
        names = {_steps(path)[0].encode() for path in unset_paths}
        return flat_fields(form).merged(base, delta, names)
    fields = documents.fields(base)
    for path in unset_paths:
        documents.unset(fields, _steps(path))
    documents.merge(fields, documents.fields(delta))
    return documents.encode(fields)


class _Documents:
    """Documents of one encoding, level by level. Values stay bytes, so no number changes its form."""

    def __init__(
        self, fields: Callable[[bytes], _Fields], encode: Callable[[object], bytes], opening: frozenset[int]
    ) -> None:
        self.fields = fields
        self.encode = encode
        self._opening = opening

    def begins(self, payload: bytes) -> bool:
        """True when the payload can be a document of this encoding."""
        return payload[:1] != b"" and payload[0] in self._opening

    def unset(self, fields: _Fields, path: Sequence[str]) -> None:
        """Removes a field if it is there."""
        name, below = path[0], path[1:]
        if not below:
            fields.pop(name, None)
        elif (inner := self._object(fields.get(name))) is not None:
            self.unset(inner, below)
            fields[name] = msgspec.Raw(self.encode(inner))

    def merge(self, fields: _Fields, delta: _Fields) -> None:
        """Merges `delta` into `fields`."""
        for name, value in delta.items():
            inner, before = self._object(value), self._object(fields.get(name))
            if inner is None or before is None:
                fields[name] = value
            else:
                self.merge(before, inner)
                fields[name] = msgspec.Raw(self.encode(before))

    def _object(self, value: msgspec.Raw | None) -> _Fields | None:
        if value is None or not self.begins(content := bytes(value)):
            return None
        try:
            return self.fields(content)
        except msgspec.MsgspecError:  # a MessagePack map with keys that are not texts is replaced as a whole
            return None


_JSON: Final = _Documents(msgspec.json.Decoder(_Fields).decode, msgspec.json.encode, frozenset(b"{ \t\r\n"))
_MSGPACK: Final = _Documents(
    msgspec.msgpack.Decoder(_Fields).decode, msgspec.msgpack.encode, frozenset((*range(0x80, 0x90), 0xDE, 0xDF))
)


def _documents(payload: bytes, message_type: str) -> _Documents | None:
    """The encoding of a payload, recognised by its first byte if the type is not known; None for fix and nvfix."""
    if message_type:
        return {"json": _JSON, "msgpack": _MSGPACK}.get(message_type)
    return next((documents for documents in (_JSON, _MSGPACK) if documents.begins(payload)), None)


_BRACKETED: Final = re.compile(r"\[((?:[^\]\\]|\\.)*)\](?=/|\Z)", re.DOTALL)
_ESCAPED: Final = re.compile(r"\\([\]\\/])")


def _steps(path: str) -> list[str]:
    """The names of a path such as `/a/b`; a name with other characters is `/[odd name]`, with `]` and `\\` escaped."""
    names: list[str] = []
    at = 0
    while at < len(path):
        if path[at] != "/":
            raise invalid("unset_paths", f"{path!r} is not a path")
        if (bracketed := _BRACKETED.match(path, at + 1)) is not None:
            names.append(_ESCAPED.sub(r"\1", bracketed[1]))
            at = bracketed.end()
        else:
            end = path.find("/", at + 1)
            names.append(path[at + 1 : end if end >= 0 else len(path)])
            at = end if end >= 0 else len(path)
    if not names:
        raise invalid("unset_paths", f"{path!r} is not a path")
    return names
