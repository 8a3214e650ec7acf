"""One change as subscribers look at it. Each part is decoded at most once, and only if it is needed.

A change comes from a commit that has just become durable, with the stored value of the replaced record, or from the
journal, which finds the previous change of the key by its sequence (rule J1).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Sequence
from typing import Final, NamedTuple

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit.soundness import all_told, is_utf8
from sow_server.engine.stored import BURY, DELETE, EXPIRE, HEADER_BYTES, TOUCH, Changes, Entry, read_header
from sow_server.engine.values.model import NEVER
from sow_server.filters import Meta
from sow_server.subscriptions.frames import ChangeOp, ChangeReason, Row

Find = Callable[[int], Entry | None]
"""Finds the change of one topic with a sequence; None when the journal has discarded it."""


class Unknown(enum.Enum):
    """Stands for a previous record that the journal has discarded. It counts as having been in focus (rule J1)."""

    UNKNOWN = enum.auto()


UNKNOWN: Final = Unknown.UNKNOWN


class Version:
    """A record as it was at one time."""

    __slots__ = (
        "_document",
        "_made",
        "_meta",
        "expire_time",
        "key",
        "origin",
        "payload",
        "publish_time",
        "topic",
        "version",
    )

    def __init__(
        self,
        topic: Topic,
        key: bytes,
        payload: bytes,
        version: int,
        publish_time: int,
        expire_time: int,
        origin: int,
        sequence: int,
    ) -> None:
        self.topic = topic
        self.key = key
        self.payload = payload
        self.version = version
        self.publish_time = publish_time
        self.expire_time = expire_time
        self.origin = origin
        self._made = sequence
        self._document: dict[str, object] | None = None
        self._meta: Meta | None = None

    @property
    def record_sequence(self) -> int:
        """The sequence of the change that made the record."""
        return self._made

    @property
    def document(self) -> dict[str, object]:
        """The decoded payload."""
        found = self._document
        if found is None:
            found = self._document = self.topic.format.decode(self.payload)
        return found

    @property
    def meta(self) -> Meta:
        """The metadata for a filter. Filters of subscriptions never ask for the time, so it is 0."""
        found = self._meta
        if found is None:
            expire_time = None if self.expire_time == NEVER else self.expire_time
            found = self._meta = Meta(
                self.key.decode(),
                self.version,
                self.publish_time,
                expire_time,
                self.topic.name,
                0,
                self.record_sequence,
                self.topic.origins.names[self.origin],
                len(self.payload),
            )
        return found


class ChangeChunk(NamedTuple):
    """The values that all changes of one journal chunk share."""

    topic: Topic
    find: Find
    handed_over: Collection[int]
    """The sequences of records that were due when they were put, and are handed over all the same (rule L7)."""


ChangeFields = tuple[int, int, bytes, bytes, int, int, int, int, int, bytes | None]
"""The fields of one change: sequence, kind, key, payload, version, publish time, expire time, origin, sequence of the
key's previous change, and the stored value of the replaced record where that came along.

A plain tuple: one is made for every change of every followed topic."""


class Change(Version):
    """One change. For a removal, the record is the removed one, with its version and origin."""

    __slots__ = (
        "_before",
        "_chunk",
        "_match_row",
        "_previous_value",
        "_put_row",
        "_removed_row",
        "kind",
        "previous",
        "sequence",
    )

    def __init__(self, chunk: ChangeChunk, fields: ChangeFields) -> None:
        # Without super(): this runs for every change of every followed topic.
        (
            self.sequence,
            self.kind,
            self.key,
            self.payload,
            self.version,
            self.publish_time,
            self.expire_time,
            self.origin,
            self.previous,
            self._previous_value,
        ) = fields
        self.topic = chunk.topic
        self._chunk = chunk
        self._document = None
        self._meta = None
        self._before: Version | Unknown | None = None
        self._put_row: Row | None = None
        self._match_row: Row | None = None
        self._removed_row: Row | None = None

    @property
    def record_sequence(self) -> int:
        """As the change before has left it, where this one removes it."""
        return self.previous if self.removes else self.sequence

    @property
    def removes(self) -> bool:
        """True if the change removes the record: a delete or an expiry, or a delete of a record that is not here."""
        return self.kind == DELETE or self.kind == EXPIRE or self.kind == BURY

    @property
    def before(self) -> Version | Unknown | None:
        """The live record that a put replaced; None if there was none."""
        if self.previous == 0:
            return None
        found = self._before
        if found is None:
            found = self._before = self._read_before()
        return found

    def _read_before(self) -> Version | Unknown:
        value = self._previous_value
        if value is not None:
            head = read_header(value)
            return Version(
                self.topic,
                self.key,
                value[HEADER_BYTES:],
                head.version,
                head.publish_time_micros,
                head.expire_time_micros,
                head.origin,
                head.sequence,
            )
        entry = self._chunk.find(self.previous)
        if entry is None:
            return UNKNOWN
        assert entry.key == self.key, "`previous` is the sequence of the same key's previous change"
        return Version(
            self.topic,
            self.key,
            entry.payload,
            entry.version,
            entry.publish_time_micros,
            entry.expire_time_micros,
            entry.origin,
            self.previous,
        )

    @property
    def previous_value(self) -> bytes | None:
        """The stored value of the replaced record, where it came along."""
        return self._previous_value

    @property
    def bytes_held(self) -> int:
        """Bytes of the payloads that this object keeps in memory."""
        return len(self.payload) + (0 if self._previous_value is None else len(self._previous_value))

    def due(self, now_micros: int) -> bool:
        """True if a put is no longer handed over because the record is due (rule J12)."""
        return self.expire_time <= now_micros and self._falls_due

    @property
    def _falls_due(self) -> bool:
        return self.topic.acts and self.sequence not in self._chunk.handed_over

    @property
    def put_row(self) -> Row:
        """The record as a put."""
        found = self._put_row
        if found is None:
            why = ChangeReason.TOUCHED if self.kind == TOUCH else ChangeReason.NONE
            found = self._put_row = self._row(ChangeOp.PUT, why, self.expire_time if self._falls_due else NEVER)
        return found

    @property
    def match_row(self) -> Row:
        """The updated record, which no longer matches."""
        found = self._match_row
        if found is None:
            found = self._match_row = self._row(ChangeOp.OOF, ChangeReason.MATCH, NEVER)
        return found

    def removed_row(self, *, oof: bool) -> Row:
        """The removed record: as out of focus, or for change readers as a delete or an expiry. Of a record that is not
        here, the key alone (rule F8)."""
        found = self._removed_row
        deleted = self.kind != EXPIRE
        if self.kind == BURY:
            op, why = (ChangeOp.OOF, ChangeReason.DELETED) if oof else (ChangeOp.DELETE, ChangeReason.NONE)
            return self._bare_row(op, why)
        if oof:
            if found is None:
                found = self._removed_row = self._row(
                    ChangeOp.OOF, ChangeReason.DELETED if deleted else ChangeReason.EXPIRED, NEVER
                )
            return found
        return self._row(ChangeOp.DELETE if deleted else ChangeOp.EXPIRE, ChangeReason.NONE, NEVER)

    def forbidden_row(self, *, oof: bool) -> Row:
        """The update of a record that the subscriber may not see any more: without its payload, its times and its
        origin."""
        return self._bare_row(ChangeOp.OOF if oof else ChangeOp.DELETE, ChangeReason.NOT_PERMITTED)

    def _bare_row(self, op: ChangeOp, why: ChangeReason) -> Row:
        return Row(
            op,
            why,
            self.key,
            b"",
            self.version,
            0,
            NEVER,
            0,
            self.sequence,
            False,
            (),
            NEVER,
        )

    def _row(self, op: ChangeOp, why: ChangeReason, skip_from: int) -> Row:
        return Row(
            op,
            why,
            self.key,
            self.payload,
            self.version,
            self.publish_time,
            self.expire_time,
            self.origin,
            self.sequence,
            False,
            (),
            skip_from,
        )


def changes_of(
    topic: Topic,
    changes: Changes,
    *,
    start: int,
    stop: int,
    find: Find,
    previous_values: Sequence[bytes | None] | None = None,
    handed_over: Collection[int] = (),
    buried: bool = False,
) -> list[Change]:
    """The changes of a chunk from index `start` up to `stop`, excluded. Leaves out those whose key does not fit into a
    message (rule R13), and, unless `buried`, deletes of records that are not here: those are for peers, and for
    subscribers that have come from one (rule F8)."""
    version, origin = shown(changes, start, stop)
    before: Sequence[bytes | None] = [None] * len(version) if previous_values is None else previous_values[start:stop]
    keys = changes.keys[start:stop]
    told = all_told(keys)
    chunk = ChangeChunk(topic, find, handed_over)
    return [
        Change(chunk, fields)
        for fields in zip(
            range(changes.first_sequence + start, changes.first_sequence + stop),
            changes.change[start:stop],
            keys,
            changes.payloads[start:stop],
            version,
            changes.publish_time_micros.part(start, stop),
            changes.expire_time_micros.part(start, stop),
            origin,
            changes.previous.part(start, stop),
            before,
            strict=True,
        )
        if (buried or fields[1] != BURY) and (told or ((key := fields[2]) and is_utf8(key)))
    ]


def shown(changes: Changes, start: int, stop: int) -> tuple[list[int], list[int]]:
    """The versions and origins that subscribers see, from index `start` up to `stop`: for a removal, those of the
    removed record."""
    # Slice first: a chunk is taken in blocks, and the columns are as long as the whole chunk.
    version, origin = changes.version.part(start, stop), changes.origin.part(start, stop)
    kinds = changes.change[start:stop]
    if DELETE in kinds or EXPIRE in kinds:
        version = [
            removed if kind == DELETE else own
            for kind, own, removed in zip(kinds, version, changes.removed_version.part(start, stop), strict=True)
        ]
        origin = [
            removed if kind in (DELETE, EXPIRE) else own
            for kind, own, removed in zip(kinds, origin, changes.removed_origin.part(start, stop), strict=True)
        ]
    return version, origin
