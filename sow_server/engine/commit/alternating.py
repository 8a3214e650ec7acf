"""Slices of a publish in which puts and removals alternate, decided in one pass (rule P11).

[1]  Versions, sequences and changes are those of the request's order, as if its records were decided one by one.
     Property tests compare the two ways.
[2]  Only what is plain is decided here: all records have keys, nothing is overdue, due or bounded by caps. For the rest
     it says so before it stages anything.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Sequence
from itertools import compress, groupby
from operator import itemgetter
from typing import Final

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit.column_changes import arm_all, disarm_all, removed_all
from sow_server.engine.commit.draft import Draft
from sow_server.engine.commit.publishers import REMOVED, SEVERAL, AnsweredRun
from sow_server.engine.commit.requests import Job, Slice
from sow_server.engine.commit.stamps import own_stamps, stamp_of
from sow_server.engine.disk.rocks import RECORDS
from sow_server.engine.journal.builder import ChunkBuilder
from sow_server.engine.stored import (
    DELETE,
    EXPIRE_TIME,
    HEADER_FAST,
    PAYLOAD,
    PUT,
    RECORD_KEY,
    header_columns,
    header_start,
    i64,
    i64s,
    payload_bytes_each,
    record_keys,
    sequences,
    unpack_i64,
)
from sow_server.engine.values.model import NEVER, Expiration, Publish, TtlMode

RUN_RECORDS_MIN: Final = 16
"""Puts and removals alternate where fewer records of one kind follow each other, on average. Longer runs cost less by
themselves, column by column."""


def alternate(removals: Sequence[bool]) -> bool:
    """True if there are so many runs of puts and of removals that they are decided together."""
    runs: int = 1 + sum(map(operator.ne, removals, removals[1:]))
    return runs * RUN_RECORDS_MIN > len(removals)


def stage_alternating(
    draft: Draft, job: Job, request: Publish, topic: Topic, start: int, stop: int, part: Slice, removals: Sequence[bool]
) -> bool:
    """Stages the records of a slice; `removals` says which are. False: not all of them are plain ([2])."""
    if not job.all_have_keys or job.caps is not None or request.ttl_mode is not TtlMode.RESET:
        return False
    if request.lifetimes is None:
        expire_times = [stamp_of(topic, request.lifetime, draft.now)] * len(removals)
    else:
        expire_times = own_stamps(request, request.lifetimes[start:stop], topic, draft.now)
    of_puts = list(compress(expire_times, map(operator.not_, removals)))
    if min(of_puts, default=NEVER) <= draft.now:
        return False
    store_keys = job.store_keys[start:stop]
    if topic.acts:
        stamps = map(_STAMP, filter(None, map(draft.heads.get, store_keys)))
        if min(stamps, default=_NEVER_BYTES) <= draft.now_bytes:
            return False
    version, sequence = draft.next_version, draft.next_sequence
    changes = _Changes(draft, topic)
    changed = changes.stage(store_keys, request.payloads[start:stop], removals, i64s(expire_times))
    changes.finish()
    unchanged = changed.count(False)
    part.applied += len(changed)
    part.unchanged += unchanged
    part.removed += len(removals) - len(of_puts) - unchanged
    if topic.settings.expiration is Expiration.DISABLED:
        part.ignored += len(of_puts) - of_puts.count(NEVER)
    if unchanged < len(changed):
        part.last_version, part.last_sequence = draft.next_version - 1, draft.next_sequence - 1
    if part.first_sequence is not None:
        part.runs += _runs(part.first_sequence + start, version, sequence, changed, removals, expire_times)
    return True


def _runs(
    first: int, version: int, sequence: int, changed: list[bool], removals: Sequence[bool], expire_times: list[int]
) -> list[AnsweredRun]:
    """The memory of the publisher, as few runs as possible."""
    found: list[AnsweredRun] = []
    at = 0
    for changes, run in groupby(changed):
        upto = at + len(list(run))
        if changes:
            stamps = {REMOVED if removal else SEVERAL for removal in removals[at:upto]}
            if stamps == {SEVERAL}:
                stamps = set(expire_times[at:upto])
            stamp = stamps.pop() if len(stamps) == 1 else SEVERAL
            found.append(AnsweredRun(first + at, upto - at, version, sequence, stamp))
            version, sequence = version + upto - at, sequence + upto - at
        else:
            found.append(AnsweredRun(first + at, upto - at, 0, 0, REMOVED))
        at = upto
    return found


class _Changes:
    """Puts and removals of one topic, in the columns of its journal: all but the removals that find no record."""

    __slots__ = (
        "_chunk",
        "_draft",
        "_gone",
        "_kinds",
        "_old_heads",
        "_old_values",
        "_payloads",
        "_store_keys",
        "_told_heads",
        "_topic",
    )

    def __init__(self, draft: Draft, topic: Topic) -> None:
        self._draft = draft
        self._topic = topic
        self._chunk: ChunkBuilder | None = None
        self._kinds = bytearray()
        self._store_keys: list[bytes] = []
        self._payloads: list[bytes] = []
        self._old_heads: list[bytes | None] = []
        self._told_heads: list[bytes] = []
        """Those of new records, and of removed ones as they were."""
        self._old_values: list[bytes | None] = []
        """For chunks and indexes that need them."""
        self._gone: dict[int, bytes] = {}
        """The stored values of removed records, by the place of the removal in the columns."""

    def stage(
        self, store_keys: Sequence[bytes], payloads: Sequence[bytes], removals: Sequence[bool], stamps: Sequence[bytes]
    ) -> list[bool]:
        """Puts and removes fetched records. `stamps`: the expire times of the puts as eight bytes. Returns which of the
        records have changed something."""
        draft, topic, kinds = self._draft, self._topic, self._kinds
        heads, rows, old_heads, told_heads = draft.heads, draft.batch.puts[RECORDS], self._old_heads, self._told_heads
        if all(removals) and not any(map(heads.get, store_keys)):
            return [False] * len(removals)  # a chunk of no changes must not begin
        # Not what the topic says: subscribers come and go meanwhile, and a chunk has the old values of all or of none.
        self._chunk = chunk = draft.chunk(topic)
        indexes = topic.indexes.all
        looks = bool(indexes) or (chunk is not None and chunk.previous_values is not None)
        start, now, pack = header_start(draft.origin), draft.now_bytes, HEADER_FAST.pack
        version, sequence = draft.next_version, draft.next_sequence
        changed: list[bool] = []
        # One by one, because a key may occur twice: its second change meets its first.
        for store_key, payload, removes, stamp in zip(store_keys, payloads, removals, stamps, strict=True):
            old = heads[store_key]
            if removes and old is None:
                changed.append(False)
                continue
            before = draft.value(store_key) if old is not None and (removes or looks) else None
            if looks:
                self._old_values.append(before)
            if indexes:
                draft.reindex(topic, store_key[RECORD_KEY], before, None if removes else payload)
            if before is not None and old is not None and removes:
                self._gone[len(kinds)] = before
                self._payloads.append(before[PAYLOAD])
                heads[store_key] = None
                rows.pop(store_key, None)
                told_heads.append(old)
                kinds.append(DELETE)
            else:
                head = pack(start, len(payload), version, now + stamp, sequence)
                self._payloads.append(payload)
                heads[store_key] = head
                rows[store_key] = head + payload
                told_heads.append(head)
                kinds.append(PUT)
            self._store_keys.append(store_key)
            old_heads.append(old)
            changed.append(True)
            version, sequence = version + 1, sequence + 1
        return changed

    def finish(self) -> None:
        """Adds them to the journal, to the expiry index and to the figures."""
        draft, topic, count = self._draft, self._topic, len(self._kinds)
        if not count:
            return
        versions = range(draft.next_version, draft.next_version + count)
        minted = range(draft.next_sequence, draft.next_sequence + count)
        keys, told = record_keys(self._store_keys), header_columns(self._told_heads)
        deletes = [kind == DELETE for kind in self._kinds]
        if (chunk := self._chunk) is not None:
            chunk.add_columns(
                self._kinds,
                keys,
                self._payloads,
                version=versions,
                publish_time=told.publish_time,
                expire_time=told.expire_time,
                origin=draft.origin,
                previous=sequences(self._old_heads),
                removed_version=array("q", map(operator.mul, told.version, deletes)),
                removed_origin=array("q", map(operator.mul, told.origin, deletes)),
            )
            if chunk.previous_values is not None:
                chunk.previous_values += self._old_values
        draft.next_version, draft.next_sequence = versions.stop, minted.stop
        puts = [not is_delete for is_delete in deletes]
        self._note_puts(list(compress(keys, puts)), puts)
        if self._gone:
            gone, values = list(map(self._store_keys.__getitem__, self._gone)), list(self._gone.values())
            disarm_all(draft, topic, gone, values)
            numbers = list(compress(versions, deletes)), list(compress(minted, deletes))
            removed_all(draft, topic, record_keys(gone), gone, values, header_columns(values), *numbers, change=DELETE)

    def _note_puts(self, keys: list[bytes], puts: list[bool]) -> None:
        draft, topic = self._draft, self._topic
        old_heads, store_keys = list(compress(self._old_heads, puts)), list(compress(self._store_keys, puts))
        if topic.acts:
            stamps = [head[EXPIRE_TIME] for head in compress(self._told_heads, puts)]
            entries = [
                stamp + store_key
                for stamp, store_key, old in zip(stamps, store_keys, old_heads, strict=True)
                if stamp != _NEVER_BYTES and (old is None or stamp < old[EXPIRE_TIME])
            ]
            if entries:
                arm_all(draft, unpack_i64(min(entries)[:8]), entries)
        replaced = [old for old in old_heads if old is not None]
        size = sum(map(len, compress(self._payloads, puts))) - sum(payload_bytes_each(replaced))
        size += sum([len(key) for key, old in zip(keys, old_heads, strict=True) if old is None])
        draft.count(topic, len(keys) - len(replaced), size)


_STAMP: Final = itemgetter(EXPIRE_TIME)
_NEVER_BYTES: Final = i64(NEVER)
