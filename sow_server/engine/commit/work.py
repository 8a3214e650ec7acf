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
from typing import Final, NamedTuple

from sow_server.engine.commit.draft import Draft
from sow_server.engine.commit.options import WriterOptions
from sow_server.engine.commit.requests import Job
from sow_server.engine.disk.layout import payload_bytes_total, read_header
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import Delete, Publish, Restamp, Touch, TtlMode

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
MERGE_BYTE: Final = 0.02
"""For a byte of a stored record that a delta is merged into: 20 ms for 1 MiB."""
UNSET_PATH: Final = 0.5
"""For a path to unset, in each record."""
HEADS_FIRST: Final = 64
"""Heads in the first look-up for a request; each later one has four times as many. A head that is not in the cache
costs the memory of its whole record."""


class Part(NamedTuple):
    """How much of a request fits into a commit."""

    records: int
    micros: float
    """The work."""
    stored_bytes: int = 0
    """The bytes of the stored records that it is applied to, where they matter."""


class Room:
    """What is left of one commit: records, work, and bytes of the stored records that it changes."""

    __slots__ = ("_bytes", "_micros", "_options", "records")

    def __init__(self, options: WriterOptions) -> None:
        self._options = options
        self.records = options.commit_records_max
        self._micros = options.commit_work_micros
        self._bytes = options.commit_merged_bytes_max

    def __bool__(self) -> bool:
        return self.records > 0 and self._micros > 0 and self._bytes > 0

    def part(self, draft: Draft, job: Job, *, first: bool) -> Part | None:
        """How much of a job goes into the commit; None: it has to begin the next one, as it is not the `first`. Raises
        StoreError ATOMIC_TOO_LARGE, and the errors of a look-up."""
        left = job.left
        if job.whole:
            part = stored_part(draft, job, left, inf, sys.maxsize, least=1)
        else:
            undivided = job.alone or (first and isinstance(job.request, Delete))  # bounded by its bytes alone
            micros = inf if undivided else self._micros
            count = left if job.alone else min(left, self.records)
            if touches_stored(job):
                part = stored_part(draft, job, count, micros, self._bytes, least=first)
                if job.alone and part.records < left:
                    raise atomic_too_large(self._options)
            else:
                part = plain_part(job, count, micros, least=first)
        if first or part.records == left or (part.records and self._is_divided(job)):
            return part
        return None

    def _is_divided(self, job: Job) -> bool:
        """Whether a job fills up a commit that others have begun. One that fits into a commit of its own is not split
        over two; up to that size a delete is atomic (rule D2)."""
        if job.whole or isinstance(job.request, Delete):
            return False
        options = self._options
        return (
            touches_stored(job)
            or job.left > options.commit_records_max
            or plain_part(job, job.left, options.commit_work_micros, least=0).records < job.left
        )

    def take(self, part: Part) -> None:
        """A part goes into the commit."""
        self.records -= part.records
        self._micros -= part.micros
        self._bytes -= part.stored_bytes

    def share(self, part: Part, job: Job) -> float:
        """What a part has of a whole commit; an atomic request has all of it."""
        options = self._options
        share = max(
            part.micros / options.commit_work_micros,
            part.records / options.commit_records_max,
            part.stored_bytes / options.commit_merged_bytes_max,
        )
        return max(1.0, share) if job.alone else share


def atomic_too_large(options: WriterOptions) -> StoreError:
    """The answer to an atomic request that would write too much."""
    return StoreError(
        Reason.ATOMIC_TOO_LARGE,
        "payload: this atomic request is merged into records of more bytes than the limit of "
        f"{options.commit_merged_bytes_max}",
        field="payload",
    )


def merge_room(options: WriterOptions, *, alone: bool) -> int:
    """Bytes of merged records after which a commit takes no more of a request. As deltas of one request may meet the
    same record, which grows, the estimate alone would not bound them."""
    most = options.commit_merged_bytes_max
    return most if alone else min(most, int(options.commit_work_micros / MERGE_BYTE))


def touches_stored(job: Job) -> bool:
    """Whether the work on a request depends on records that are stored, as of [2]."""
    request, topic = job.request, job.topic
    if not isinstance(request, Publish):
        return True
    assert topic is not None, "the job has been prepared"
    if job.delta is not None or topic.wants_previous or topic.indexes.all:
        return True
    return request.permits is not None and request.permits.reads_payloads


def plain_part(job: Job, count: int, room_micros: float, *, least: int) -> Part:
    """How many of the next `count` records fit, by their number and the mean of their payloads; at least `least`."""
    each = _each(job)
    fits = count
    if REQUEST + count * each > room_micros:
        fits = min(count, max(least, int((room_micros - REQUEST) / each)))
    return Part(fits, REQUEST + fits * each)


def stored_part(draft: Draft, job: Job, count: int, room_micros: float, room_bytes: int, *, least: int) -> Part:
    """How many of the next `count` records fit, with the stored ones that they change; at least `least`. The heads of
    these have been looked up then."""
    each, per_byte = _each(job), MERGE_BYTE if job.delta is not None else _per_byte(job)
    used, used_bytes, fits, step = REQUEST, 0, 0, HEADS_FIRST
    store_keys = job.store_keys[job.position : job.position + count]
    while fits < count:
        piece = store_keys[fits : fits + step]
        draft.fetch_heads([key for key in piece if key and key not in draft.heads])
        heads = [draft.heads[key] if key else None for key in piece]
        size = payload_bytes_total([head for head in heads if head is not None])
        work = len(piece) * each + size * per_byte
        if used_bytes + size > room_bytes or used + work > room_micros:
            for head in heads:
                size = 0 if head is None else read_header(head).payload_bytes
                work = each + size * per_byte
                if fits >= least and (used_bytes + size > room_bytes or used + work > room_micros):
                    return Part(fits, used, used_bytes)
                used, used_bytes, fits = used + work, used_bytes + size, fits + 1
        else:
            used, used_bytes, fits = used + work, used_bytes + size, fits + len(piece)
        step *= 4
    return Part(fits, used, used_bytes)


def _each(job: Job) -> float:
    """The work on a record, without the stored one."""
    request = job.request
    match request:
        case Publish():
            single = request.want_results or request.atomic or request.ttl_mode is TtlMode.KEEP
            if single or job.delta is not None or request.conditions is not None or request.permits is not None:
                each = SINGLE_RECORD
            else:
                each = PLAIN_RECORD
            if job.delta is not None:
                each += UNSET_PATH * len(request.unset_paths)
            return each + _per_byte(job) * job.size / max(1, len(job.keys))
        case Delete():
            return PLAIN_RECORD
        case Touch() | Restamp():
            return SINGLE_RECORD


def _per_byte(job: Job) -> float:
    assert job.topic is not None, "the job has been prepared"
    return INDEX_BYTE if job.topic.indexes.all else BYTE
