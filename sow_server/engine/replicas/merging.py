"""Changes of other instances, merged into this one's by version: in any order, and any number of times.

A change is applied if, and only if, its (version, origin) is greater than that of the record or tombstone here (rule
R3). Versions, stamps and times of publish stay unchanged (rule R2). On the writer's thread, on a `Draft`.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, repeat
from struct import Struct
from typing import Final, NamedTuple

from sow_peering import NOTHING_PURGED, MergeCounts, Purged
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit.column_changes import Puts, put_all
from sow_server.engine.commit.draft import Draft
from sow_server.engine.commit.letter_posting import Letters
from sow_server.engine.commit.soundness import KEY_FAULTS, NO_FAULTS, Fault
from sow_server.engine.commit.tombstones import may_have_tombstones, tombstone, with_tombstone
from sow_server.engine.stored import (
    EXPIRE_TIME,
    HEADER_FAST,
    PUT,
    TOUCH,
    WITHDRAW,
    Changes,
    foreign_changes,
    header_start,
    i64,
    read_header,
    versions,
)
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import NEVER

_TIMES: Final = Struct(">qq")
_PUTS: Final = frozenset((PUT, TOUCH))
_NEVER_BYTES: Final = i64(NEVER)


@dataclass(slots=True)
class Tally:
    """Counts while merging."""

    applied: int = 0
    superseded: int = 0
    known: int = 0
    dropped: int = 0
    refused: int = 0

    def counts(self) -> MergeCounts:
        """The result of a count."""
        return MergeCounts(self.applied, self.superseded, self.known, self.dropped, self.refused)


class Dead(NamedTuple):
    """A record that is dropped, or left out, because it is dead according to the purge mark (rule R4)."""

    key: bytes
    version: int
    publish_time_micros: int
    expire_time_micros: int
    origin: str
    payload: bytes


class PeerRows(NamedTuple):
    """Changes of one topic, in columns of equal length, origins by their numbers here."""

    kinds: bytes
    keys: Sequence[bytes]
    store_keys: Sequence[bytes]
    payloads: Sequence[bytes]
    versions: list[int]
    publish_times: list[int]
    expire_times: list[int]
    origins: list[int]
    changes: Changes | None = None
    """The chunk that they are the whole of: its columns may be two numbers."""

    def picked(self, chosen: Sequence[bool]) -> PeerRows:
        """Some of them."""
        return PeerRows(
            bytes(compress(self.kinds, chosen)),
            list(compress(self.keys, chosen)),
            list(compress(self.store_keys, chosen)),
            list(compress(self.payloads, chosen)),
            list(compress(self.versions, chosen)),
            list(compress(self.publish_times, chosen)),
            list(compress(self.expire_times, chosen)),
            list(compress(self.origins, chosen)),
        )


class Merge:
    """Merges chunks into one topic, in one commit."""

    def __init__(
        self,
        draft: Draft,
        topic: Topic,
        names: Sequence[str],
        tally: Tally,
        *,
        guard: Purged = NOTHING_PURGED,
        buries: bool = True,
        snapshot: bool = False,
    ) -> None:
        """`buries`: records that are dead by the guard have to end on every instance. `snapshot`: these are current
        records, not single changes."""
        self._snapshot = snapshot
        self._draft = draft
        self._topic = topic
        self._names = names
        """The names of origins, keyed by their numbers here."""
        self._tally = tally
        self._guard = guard
        self._buries = buries
        self._before = earlier_numbers(names, draft.origin)
        self.not_taken: list[Dead] = []
        """Records that were left out because they are dead by the guard."""

    def apply(self, changes: Changes, own: Sequence[int], found: Mapping[int, Fault] = NO_FAULTS) -> None:
        """Merges a chunk; `own`: the numbers here of the origins that it points at; `found`: the changes that are left
        out because they are unsound. Raises StoreError BATCH_DAMAGED."""
        draft, topic = self._draft, self._topic
        if not changes.keys:
            return
        try:
            origins = [own[number] for number in changes.origin.tolist()]
        except IndexError:
            raise StoreError(Reason.BATCH_DAMAGED, f"a change of {topic.name} has an origin without a name") from None
        store_keys = [topic.prefix + key for key in changes.keys]
        rows = PeerRows(
            changes.change,
            changes.keys,
            store_keys,
            changes.payloads,
            changes.version.tolist(),
            changes.publish_time_micros.tolist(),
            changes.expire_time_micros.tolist(),
            origins,
            changes,
        )
        if found:
            rows = rows.picked(self._taken(rows, found))
            store_keys = list(rows.store_keys)
            if not store_keys:
                return
        draft.fetch_heads(store_keys)
        if topic.wants_previous:
            draft.fetch_values(store_keys)
        every = range(len(store_keys))
        if self._guard.version or len(set(store_keys)) < len(store_keys):
            one_by_one: Collection[int] = every
        else:
            one_by_one = self._one_by_one(rows)
        letters = draft.part(Letters).posted
        for index in sorted(one_by_one):
            self._apply_one(rows, index)
        if draft.part(Letters).posted > letters:
            # A record has expired, and its dead letter may have been put under any key, even of this topic.
            for index in every:
                if index not in one_by_one:
                    self._apply_one(rows, index)
            return
        if not one_by_one:
            self._put_all(rows)
        elif len(one_by_one) < len(every):
            self._put_all(rows.picked([index not in one_by_one for index in every]))

    def _taken(self, rows: PeerRows, found: Mapping[int, Fault]) -> list[bool]:
        """The changes that are applied; the ones in `found` are unsound. A removal under a key that no publish could
        have made is applied if there is a record under this key, so one instance repairs all. If there is none, nothing
        is needed, because no put under that key will be applied."""
        taken = [index not in found for index in range(len(rows.keys))]
        removals = [
            index for index, fault in found.items() if rows.kinds[index] not in _PUTS and fault.reason in KEY_FAULTS
        ]
        if removals:
            self._draft.fetch_heads([rows.store_keys[index] for index in removals])
            for index in removals:
                taken[index] = self._draft.heads[rows.store_keys[index]] is not None
                self._tally.known += not taken[index]
        self._tally.refused += len(found) - len(removals)
        return taken

    def _one_by_one(self, rows: PeerRows) -> set[int]:
        """The rows that are merged one by one: all except puts of newer versions over older ones. Such puts are made
        column by column, and decide the speed of replication."""
        heads = [self._draft.heads[key] for key in rows.store_keys]
        one_by_one: set[int] = set()
        if set(rows.kinds) != {PUT}:
            one_by_one.update(index for index, kind in enumerate(rows.kinds) if kind != PUT)
        one_by_one.update(self._not_newer(rows, heads))
        if self._topic.acts:
            one_by_one.update(self._overdue(rows, heads))
        if None in heads and may_have_tombstones(self._draft, self._topic):
            one_by_one.update(self._buried(rows, heads))
        return one_by_one

    def _not_newer(self, rows: PeerRows, heads: Sequence[bytes | None]) -> Iterator[int]:
        """Rows that may lose to the record here."""
        older = list(map(operator.gt, rows.versions, versions(heads)))
        if False in older:
            # An equal version is known already, or is of another instance: then names decide.
            yield from (index for index, wins in enumerate(older) if not wins)
        if not self._before.isdisjoint(rows.origins):
            for index, origin in enumerate(rows.origins):
                if origin in self._before and heads[index] is not None:
                    yield index

    def _overdue(self, rows: PeerRows, heads: Sequence[bytes | None]) -> Iterator[int]:
        """Rows that are due, or replace a record that is."""
        now, now_bytes = self._draft.now, self._draft.now_bytes
        if min(rows.expire_times) <= now:
            yield from (index for index, due in enumerate(rows.expire_times) if due <= now)
        stamps = [_NEVER_BYTES if head is None else head[EXPIRE_TIME] for head in heads]
        if min(stamps) <= now_bytes:
            yield from (index for index, stamp in enumerate(stamps) if stamp <= now_bytes)

    def _buried(self, rows: PeerRows, heads: Sequence[bytes | None]) -> Iterator[int]:
        """Rows whose record was deleted here, so that a tombstone decides."""
        missing = [index for index, head in enumerate(heads) if head is None]
        dead = with_tombstone(self._draft, [rows.store_keys[index] for index in missing])
        return (index for index in missing if rows.store_keys[index] in dead)

    def _put_all(self, rows: PeerRows) -> None:
        draft, topic, count = self._draft, self._topic, len(rows.keys)
        sequence, one = draft.next_sequence, rows.origins[0]
        starts = repeat(header_start(one)) if rows.origins.count(one) == count else map(header_start, rows.origins)
        new_heads = list(
            map(
                HEADER_FAST.pack,
                starts,
                map(len, rows.payloads),
                rows.versions,
                map(_TIMES.pack, rows.publish_times, rows.expire_times),
                range(sequence, sequence + count),
            )
        )
        changes = rows.changes
        put_all(
            draft,
            topic,
            Puts(
                rows.keys,
                rows.store_keys,
                new_heads,
                rows.payloads,
                stamps=[head[EXPIRE_TIME] for head in new_heads],
                earliest=min(rows.expire_times),
                version=array("q", rows.versions) if changes is None else changes.version,
                publish_time=array("q", rows.publish_times) if changes is None else changes.publish_time_micros,
                expire_time=array("q", rows.expire_times) if changes is None else changes.expire_time_micros,
                origin=one if rows.origins.count(one) == count else array("q", rows.origins),
            ),
        )
        draft.next_version = max(draft.next_version, max(rows.versions) + 1)
        self._tally.applied += count

    def _apply_one(self, rows: PeerRows, index: int) -> None:
        draft, topic, tally = self._draft, self._topic, self._tally
        key, store_key, kind, origin = rows.keys[index], rows.store_keys[index], rows.kinds[index], rows.origins[index]
        head = draft.live_head(topic, key, store_key)
        standing = self._standing(head, store_key)
        ours = None if standing is None else (standing[0], self._names[standing[1]])
        theirs = rows.versions[index], self._names[origin]
        if ours == theirs:
            tally.known += 1
        elif ours is not None and ours > theirs:
            tally.superseded += 1
        elif standing is not None and standing[1] == draft.origin and origin in self._before:
            self._outrank(key, store_key, head, theirs[0])
            tally.superseded += 1
        elif head is None and self._guard.version and theirs <= self._guard:
            if kind in _PUTS:
                self.not_taken.append(
                    Dead(
                        key,
                        theirs[0],
                        rows.publish_times[index],
                        rows.expire_times[index],
                        theirs[1],
                        rows.payloads[index],
                    )
                )
                tally.dropped += 1
                if self._buries:
                    # Wherever else it lives, also where it came from, it ends with this, and nothing that is newer
                    # does.
                    source, draft.journal.source = draft.journal.source, 0
                    by = min(self._before, default=draft.origin)  # nothing was written here that could outrank others
                    draft.bury(topic, key, store_key, version=theirs[0] + 1, origin=by)
                    draft.journal.source = source
            else:
                tally.known += 1
        elif ours is None and kind == WITHDRAW:
            tally.known += 1
        elif self._snapshot and head is None and kind in _PUTS and topic.acts and rows.expire_times[index] <= draft.now:
            # It is over, and a record that it may have replaced is not here: its expiry was reported here, or need not
            # be. An instance that does not act on expiration keeps such rows for ever, and seeds them again and again.
            draft.bury(topic, key, store_key, version=theirs[0], origin=origin)
            tally.applied += 1
        else:
            tally.applied += 1
            if kind in _PUTS:
                payload = rows.payloads[index]
                if kind == TOUCH and (head is None or draft.body(store_key) != payload):
                    kind = PUT  # the touched record has not been here
                draft.put(
                    topic,
                    key,
                    store_key,
                    head,
                    payload,
                    change=kind,
                    publish_time=rows.publish_times[index],
                    expire_time=rows.expire_times[index],
                    version=theirs[0],
                    origin=origin,
                )
            elif head is not None:
                draft.delete(topic, key, store_key, head, version=theirs[0], origin=origin)
            else:
                draft.bury(topic, key, store_key, version=theirs[0], origin=origin)

    def _outrank(self, key: bytes, store_key: bytes, head: bytes | None, version: int) -> None:
        """Puts a record of this instance, or the tombstone of its delete, anew above a version that it wrote with
        earlier data. Those writes came before all its later writes, whatever its clock, so a greater version does not
        make them newer (rule K7)."""
        draft, topic = self._draft, self._topic
        source, draft.journal.source = draft.journal.source, 0
        draft.next_version = max(draft.next_version, version + 1)
        if head is None:
            draft.bury(topic, key, store_key, version=draft.next_version, origin=draft.origin)
        else:
            draft.put(
                topic,
                key,
                store_key,
                head,
                draft.body(store_key),
                change=PUT,
                publish_time=read_header(head).publish_time_micros,
                expire_time=read_header(head).expire_time_micros,
            )
        draft.journal.source = source

    def _standing(self, head: bytes | None, store_key: bytes) -> tuple[int, int] | None:
        """The version and the origin's number of the record or tombstone here."""
        if head is not None:
            record = read_header(head)
            return record.version, record.origin
        draft = self._draft
        dead = tombstone(draft, store_key) if may_have_tombstones(draft, self._topic) else None
        return None if dead is None else (dead.version, dead.origin)


def earlier_numbers(names: Sequence[str], own: int) -> set[int]:
    """The numbers of the instance `own` for its writes with earlier data, under the same name (rule K7)."""
    return {number for number, name in enumerate(names) if name == names[own] and number != own}


def decoded(topic: str, chunk: bytes) -> Changes:
    """The changes that another instance has packed. Raises StoreError BATCH_DAMAGED."""
    try:
        return foreign_changes(chunk)
    except ValueError as error:
        raise StoreError(Reason.BATCH_DAMAGED, f"a batch of {topic} cannot be read: {error}") from None
