"""The work of requests, estimated before they are staged: it bounds a commit, and callers are charged for it (N7).

[1]  A commit takes as much work as `WriterOptions.commit_work_micros`, and at least one record of each request in it.
     Others wait for no more than that, so the estimates matter to a factor of two or so, not more.
[2]  Work on stored records is known only once their heads are: a delta of some bytes writes the whole record.
[3]  Memory is bounded by the bytes of stored records: heads are looked up in pieces, and values are read for those
     records alone that fit.
"""

from __future__ import annotations

import sys
from math import inf
from typing import Final

from sow_server.engine.commit.draft import Draft
from sow_server.engine.commit.options import WriterOptions
from sow_server.engine.commit.requests import Job
from sow_server.engine.stored import payload_bytes_each, read_header
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import Delete, Publish, TtlMode

REQUEST: Final = 10.0
"""Microseconds for a request, whatever it has; and so are all figures of work."""
PLAIN_RECORD: Final = 3.0
"""For a record that is put column by column."""
SINGLE_RECORD: Final = 12.0
"""For a record that is decided one by one."""
BYTE: Final = 0.002
"""For a byte that is read, or checked, journaled and stored: 2 ms for 1 MiB."""
INDEX_BYTE: Final = 0.008
"""For a byte of a document that is decoded for its entries in indexes, before and after a change."""
ENTRY: Final = 4.0
"""For an index entry of a record that has many."""
ENTRY_KEY_BYTE: Final = 0.03
"""For a byte of the record's key in such an entry: 34 us with a key of 1,000 bytes."""
MERGE_BYTE: Final = 0.02
"""For a byte of a stored record that a delta is merged into: 20 ms for 1 MiB."""
VIEW_RECORD: Final = 8.0
"""For a record in a view of its topic."""
UNSET_PATH: Final = 0.5
"""For a path to unset, in each record."""
HEADS_FIRST: Final = 64
"""Heads in the first look-up for a request; each later one has four times as many. A head that is not in the cache
costs the memory of its whole record."""


class Room:
    """The room that is left in one commit: records, work, and bytes of the stored records that the commit changes."""

    __slots__ = ("_bytes", "_micros", "_options", "left", "records")

    def __init__(self, options: WriterOptions) -> None:
        self._options = options
        self.records = options.commit_records_max
        self._micros = float(options.commit_work_micros)
        self._bytes = options.commit_merged_bytes_max
        self.left = True
        """True if there is room for another job."""

    def take(self, draft: Draft, job: Job, *, first: bool) -> tuple[int, float] | None:
        """Takes as much of a job as fits: how many records, and what they have of a commit, for which callers are
        charged. None: the job has to wait for the next commit, as it is not the `first`. Raises StoreError
        ATOMIC_TOO_LARGE, and the errors of a look-up."""
        left, stored = job.left, 0
        if left > self.records and not first and (left <= self._options.commit_records_max or not self._divided(job)):
            return None
        job.looked_up = touches_stored(job)
        if job.looked_up:
            records, micros, stored = self._stored_part(draft, job, least=first)
        else:
            each = job.record_micros or _each(job)
            records, micros = left, REQUEST + left * each
            if not job.alone and (left > self.records or micros > self._micros):
                records = min(left, self.records, max(first, int((self._micros - REQUEST) / each)))
                micros = REQUEST + records * each
        if not first and (records < left or micros > self._micros) and not (records and self._divided(job)):
            return None
        self.records -= records
        self._micros -= micros
        self._bytes -= stored
        self.left = self.records > 0 and self._micros > 0 and self._bytes > 0
        options = self._options
        share = max(micros / options.commit_work_micros, records / options.commit_records_max)
        if stored:
            share = max(share, stored / options.commit_merged_bytes_max)
        return records, (max(1.0, share) if job.alone else share)

    def _stored_part(self, draft: Draft, job: Job, *, least: int) -> tuple[int, float, int]:
        if job.whole:
            return _fitting(draft, job, job.left, inf, sys.maxsize, least=1)
        # A delete, too, is atomic up to the size of a commit (rule D2): only its bytes bound it.
        undivided = job.alone or (least and isinstance(job.request, Delete))
        count = job.left if job.alone else min(job.left, self.records)
        rewrites = job.delta is not None or not isinstance(job.request, Publish) or job.request.removals is not None
        room_bytes = self._bytes if rewrites or not job.alone else sys.maxsize
        part = _fitting(draft, job, count, inf if undivided else self._micros, room_bytes, least=least)
        if job.alone and part[0] < job.left:
            raise atomic_too_large(job, self._options)
        return part

    def _divided(self, job: Job) -> bool:
        """True if a job fills up a commit that others have begun. A job that fits into a commit of its own is not split
        over two."""
        if job.whole or isinstance(job.request, Delete):
            return False
        options = self._options
        return (
            touches_stored(job)
            or job.left > options.commit_records_max
            or REQUEST + job.left * _each(job) > options.commit_work_micros
        )


def atomic_too_large(job: Job, options: WriterOptions) -> StoreError:
    """The answer to an atomic request that would write stored records of too many bytes anew, or remove them."""
    field, what = ("payload", "names") if isinstance(job.request, Publish) else ("keys", "touches")
    if job.delta is not None:
        what = "is merged into"
    limit = options.commit_merged_bytes_max
    return StoreError(
        Reason.ATOMIC_TOO_LARGE,
        f"{field}: this atomic request {what} records of more bytes than the limit of {limit}",
        field=field,
    )


def merge_room(options: WriterOptions) -> int:
    """Bytes of merged records after which a commit takes no more deltas, unless they are atomic. The deltas of one
    request may meet the same record, which grows: the estimate alone would not bound them."""
    return min(options.commit_merged_bytes_max, int(options.commit_work_micros / MERGE_BYTE))


def touches_stored(job: Job, *, puts_only: bool = False) -> bool:
    """True if the work on a request depends on records that are stored, as [2] says. `puts_only`: leaving out the
    removals of a publish."""
    request, topic = job.request, job.topic
    if not isinstance(request, Publish) or (request.removals is not None and not puts_only):
        return True
    assert topic is not None, "the job has been prepared"
    if job.delta is not None or topic.indexes.all or topic.previous_wanted:
        return True
    return request.permits is not None and request.permits.reads_payloads


def _fitting(
    draft: Draft, job: Job, count: int, room_micros: float, room_bytes: int, *, least: int
) -> tuple[int, float, int]:
    """How many of the next `count` records fit, at least `least`; the work on them, and the bytes of the stored ones
    that they change. The heads of these have been looked up then."""
    assert job.topic is not None, "the job has been prepared"
    each, per_byte = _each(job), BYTE
    if job.delta is not None:
        per_byte = MERGE_BYTE
    elif job.topic.indexes.all:
        per_byte = INDEX_BYTE
    used, used_bytes, fits, step = REQUEST, 0, 0, HEADS_FIRST
    store_keys = job.store_keys[job.position : job.position + count]
    while fits < count:
        piece = store_keys[fits : fits + step]
        draft.fetch_heads([key for key in piece if key and key not in draft.heads])
        heads = [draft.heads[key] if key else None for key in piece]
        size = sum(payload_bytes_each([head for head in heads if head is not None]))
        work = len(piece) * each + size * per_byte + entries_work(job, fits, len(piece))
        if used_bytes + size > room_bytes or used + work > room_micros:
            for head in heads:
                size = 0 if head is None else read_header(head).payload_bytes
                work = each + size * per_byte + entries_work(job, fits, 1)
                if fits >= least and (used_bytes + size > room_bytes or used + work > room_micros):
                    return fits, used, used_bytes
                used, used_bytes, fits = used + work, used_bytes + size, fits + 1
        else:
            used, used_bytes, fits = used + work, used_bytes + size, fits + len(piece)
        step *= 4
    return fits, used, used_bytes


def entries_work(job: Job, start: int, count: int) -> float:
    """The work on the index entries of `count` records, `start` behind the position of the job."""
    if not job.entries:
        return 0.0
    entries, keys, begin = job.entries, job.keys, job.position + start
    return sum(
        entries[at] * (ENTRY + ENTRY_KEY_BYTE * len(keys[at])) for at in range(begin, begin + count) if at in entries
    )


def _each(job: Job) -> float:
    """The work on a record, without the stored one."""
    request, topic = job.request, job.topic
    assert topic is not None, "the job has been prepared"
    if isinstance(request, Publish):
        single = request.want_results or request.atomic or request.ttl_mode is TtlMode.KEEP
        one_by_one = job.delta is not None or request.conditions is not None or request.removals is not None
        if single or one_by_one or request.permits is not None:
            each = SINGLE_RECORD + UNSET_PATH * len(request.unset_paths)
        else:
            each = PLAIN_RECORD
        each += (INDEX_BYTE if topic.indexes.all or topic.views else BYTE) * job.size / (len(job.keys) or 1)
    else:
        each = PLAIN_RECORD if isinstance(request, Delete) else SINGLE_RECORD
    each += VIEW_RECORD * len(topic.views)
    job.record_micros = each
    return each
