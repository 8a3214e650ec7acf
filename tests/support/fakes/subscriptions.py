"""A server's side of subscriptions, as the contract describes it: a journal in memory, and the frames of a call.

journal = Journal()
journal.put("a", {"n": 1})
journal.commit(put("b", {}), put("c", {}), atomic=True)
for frame in journal.frames(request): …

[1]  `frames` follows the contract, for topics, keys and payloads that match every filter.
[2]  Frames have the commits up to the time at which they were asked for, and none since.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from sow.v1 import sow_pb2, types_pb2
from sow_client.errors import SowError, error_of_reason

NEVER_MICROS = 2**63 - 1
TOPIC = "orders"


@dataclass(frozen=True, slots=True)
class Entry:
    """One change: what to do to a key."""

    key: str
    payload: bytes | None
    """None: removed."""
    reason: sow_pb2.ChangeReason.ValueType = sow_pb2.CHANGE_REASON_UNSPECIFIED
    topic: str = TOPIC


def put(key: str, document: object, *, topic: str = TOPIC) -> Entry:
    """A publish."""
    return Entry(key, json.dumps(document, separators=(",", ":")).encode(), topic=topic)


def removed(
    key: str, reason: sow_pb2.ChangeReason.ValueType = sow_pb2.CHANGE_REASON_DELETED, *, topic: str = TOPIC
) -> Entry:
    """A delete, or an expiry."""
    return Entry(key, None, reason, topic)


@dataclass(frozen=True, slots=True)
class Commit:
    """Changes of consecutive sequences."""

    first: int
    entries: tuple[Entry, ...]
    atomic: bool

    @property
    def last(self) -> int:
        """Sequence of the last change."""
        return self.first + len(self.entries) - 1


@dataclass(frozen=True, slots=True)
class Told:
    """A change as a subscriber ought to be told of it."""

    sequence: int
    key: str
    payload: bytes | None


@dataclass(slots=True)
class Journal:
    """Owns the commits of a store. `floor` is the highest sequence that was discarded."""

    epoch: str = "e0"
    floor: int = 0
    last: int = 0
    commits: list[Commit] = field(default_factory=list)

    def commit(self, *entries: Entry, atomic: bool = False) -> Commit:
        """Adds changes in one commit."""
        made = Commit(self.last + 1, entries, atomic)
        self.commits.append(made)
        self.last = made.last
        return made

    def bookmark(self, sequence: int) -> str:
        """A position."""
        return f"{self.epoch}.{sequence}"

    def state(self, up_to: int | None = None) -> dict[str, bytes]:
        """The payloads by key, in the order of keys."""
        return {key: payload for key, (payload, _) in sorted(self._rows(up_to).items())}

    def _rows(self, up_to: int | None) -> dict[str, tuple[bytes, int]]:
        rows: dict[str, tuple[bytes, int]] = {}
        for commit in self.commits:
            for sequence, entry in enumerate(commit.entries, commit.first):
                if up_to is not None and sequence > up_to:
                    return rows
                if entry.payload is None:
                    rows.pop(entry.key, None)
                else:
                    rows[entry.key] = (entry.payload, sequence)
        return rows

    def told(self, after: int = 0) -> list[Told]:
        """Every change after a position, in order."""
        return [
            Told(sequence, entry.key, entry.payload)
            for commit in self.commits
            for sequence, entry in enumerate(commit.entries, commit.first)
            if sequence > after
        ]

    def frames(self, request: sow_pb2.SubscribeRequest) -> Iterator[sow_pb2.SubscribeResponse]:
        """The frames of a call, ended by a Progress once all is told. Raises SowError as a server refuses."""
        size = request.batch_size or 1_000
        last = self.last
        return self._frames(request, size, last)

    def _frames(self, request: sow_pb2.SubscribeRequest, size: int, last: int) -> Iterator[sow_pb2.SubscribeResponse]:
        if request.sow:
            at = last
            yield sow_pb2.SubscribeResponse(
                snapshot_begin=sow_pb2.SnapshotBegin(bookmark=self.bookmark(at), as_of_micros=1)
            )
            rows = sorted(self._rows(at).items())
            for start in range(0, len(rows), size):
                part = rows[start : start + size]
                records = columns([(key, payload, sequence) for key, (payload, sequence) in part])
                yield sow_pb2.SubscribeResponse(
                    snapshot=sow_pb2.SnapshotBatch(topic=request.topic or TOPIC, records=records)
                )
            yield sow_pb2.SubscribeResponse(snapshot_end=sow_pb2.SnapshotEnd(bookmark=self.bookmark(at)))
        else:
            at = self._start(request)
            yield self.progress(at)
        yield from self.changes(at, last, size)

    def changes(self, at: int, last: int, size: int = 1_000) -> Iterator[sow_pb2.SubscribeResponse]:
        """The frames of the commits after a position and up to `last`, ended by a Progress."""
        for commit in [commit for commit in self.commits if at < commit.last <= last]:
            rows = [(sequence, one) for sequence, one in enumerate(commit.entries, commit.first) if sequence > at]
            for start in range(0, len(rows), size):
                part = rows[start : start + size]
                more = commit.atomic and start + size < len(rows)
                end = "" if more else self.bookmark(part[-1][0])
                yield self._frame(part, bookmark=end, more=more, atomic=commit.atomic)
        yield self.progress(last)

    def progress(self, at: int) -> sow_pb2.SubscribeResponse:
        """Tells that everything up to here was sent."""
        return sow_pb2.SubscribeResponse(progress=sow_pb2.Progress(bookmark=self.bookmark(at), now_micros=1))

    def _start(self, request: sow_pb2.SubscribeRequest) -> int:
        if request.earliest:
            return self.floor
        if not request.bookmark:
            return self.last
        epoch, _, sequence = request.bookmark.rpartition(".")
        at = int(sequence)
        if epoch != self.epoch:
            raise refusal("BOOKMARK_OTHER_EPOCH")
        if at > self.last:
            raise refusal("BOOKMARK_IN_FUTURE")
        if at < self.floor:
            raise refusal("BOOKMARK_TOO_OLD")
        # A bookmark in the middle of an atomic request is none that the contract gives out.
        assert not any(one.atomic and one.first <= at < one.last for one in self.commits), request.bookmark
        return at

    def _frame(
        self, rows: Sequence[tuple[int, Entry]], *, bookmark: str, more: bool, atomic: bool
    ) -> sow_pb2.SubscribeResponse:
        previous = {sequence: self._rows(sequence - 1).get(entry.key) for sequence, entry in rows}
        records = columns(
            [(entry.key, entry.payload or (previous[sequence] or (b"",))[0], sequence) for sequence, entry in rows]
        )
        batch = sow_pb2.ChangeBatch(
            topic=rows[0][1].topic,
            op=[sow_pb2.CHANGE_OP_PUT if one.payload is not None else sow_pb2.CHANGE_OP_OOF for _, one in rows],
            reason=[entry.reason for _, entry in rows] if any(entry.reason for _, entry in rows) else [],
            records=records,
            bookmark=bookmark,
            more=more,
            atomic=atomic,
        )
        return sow_pb2.SubscribeResponse(changes=batch)


def refusal(reason: str) -> SowError:
    """The error that a server raises when it refuses for this reason."""
    return error_of_reason(reason, f"refused: {reason}")


def columns(rows: Sequence[tuple[str, bytes, int]]) -> types_pb2.RecordColumns:
    """Records of (key, payload, sequence)."""
    sequences = [sequence for _, _, sequence in rows]
    return types_pb2.RecordColumns(
        key=[key for key, _, _ in rows],
        payload=[payload for _, payload, _ in rows],
        version=[sequence + 1_000 for sequence in sequences],
        publish_time_micros=sequences,
        expire_time_micros=[NEVER_MICROS] * len(rows),
        sequence=sequences,
        origins=["nyc"],
    )
