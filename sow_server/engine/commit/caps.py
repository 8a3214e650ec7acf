"""The caps of a topic, as the publishes of clients meet them (rules T6, T7).

[1]  The content of a topic is what its figures count in this draft. So a cap is exact under concurrency, for several
     records of one request, and for several requests of one commit.
[2]  A record is refused only if it adds a key beyond `max_records`, or bytes beyond `max_stored_bytes`. One that adds
     neither passes, also above the caps.
[3]  An atomic request is judged as a whole, by what it adds in the end.
[4]  Nothing is refused because of overdue records that the sweep could remove: `SweepFirst` has the writer do it first.
[5]  Caps hold for requests that have been prepared: loads, peers and dead letters put records regardless of them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import compress
from typing import Final

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit.draft import Draft
from sow_server.engine.commit.requests import Job
from sow_server.engine.stored import StoredStatistics, payload_bytes_each, read_header
from sow_server.engine.values.errors import Reason
from sow_server.engine.values.model import Caps, Refusal


class SweepFirst(Exception):
    """A record of a job would be refused, and some records of the topic may be overdue ([4]). Nothing is written."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job


class Growth:
    """The growth of a topic by the atomic request of a draft ([3])."""

    __slots__ = ("at", "records", "size")

    def __init__(self) -> None:
        self.records = 0
        self.size = 0
        self.at: int | None = None
        """The record that made the topic exceed a cap, if the ones after it have not made room again."""


def refused(
    draft: Draft, job: Job, caps: Caps, topic: Topic, index: int, key: bytes, head: bytes | None, payload: bytes | None
) -> Refusal | None:
    """The reason why a record may not be put over the one with `head`; None if it may. `payload`: None for a record
    that does not stay. Records of an atomic request are added up, and judged by `check_whole`."""
    records = (payload is not None) - (head is not None)
    size = 0 if payload is None else len(key) + len(payload)
    if head is not None:
        size -= len(key) + read_header(head).payload_bytes
    figures = draft.statistics.get(topic.id) or topic.statistics
    full = _exceeded(caps, figures, records, size)
    if not job.alone:
        return None if not full else _refusal(draft, job, topic, index, full)
    growth = draft.part(Growth)
    growth.records += records
    growth.size += size
    if full:
        growth.at = index if growth.at is None else growth.at
    elif figures.records + records <= caps.records and figures.record_bytes + size <= caps.size:
        growth.at = None
    return None


def make_room(draft: Draft, job: Job, caps: Caps, topic: Topic, key: bytes, head: bytes) -> None:
    """Takes into account that a removal takes away the record with `head` (rule P11). Before it does."""
    refused(draft, job, caps, topic, 0, key, head, None)


def check_whole(draft: Draft, job: Job, topic: Topic) -> Refusal | None:
    """The reason why an atomic request, all of which has been put, may not be; None if it may."""
    caps, growth = job.caps, draft.part(Growth)
    figures = draft.statistics.get(topic.id) or topic.statistics
    if caps is None or growth.at is None:
        return None
    if growth.records > 0 and figures.records > caps.records:
        return _refusal(draft, job, topic, growth.at, _RECORDS)
    if growth.size > 0 and figures.record_bytes > caps.size:
        return _refusal(draft, job, topic, growth.at, _BYTES)
    return None


def fit(
    draft: Draft,
    caps: Caps,
    topic: Topic,
    keys: Sequence[bytes],
    store_keys: Sequence[bytes],
    payloads: Sequence[bytes],
) -> bool:
    """True if none of these records can be refused, in their order. May be False although none would be. Their heads
    have been fetched, and none is overdue."""
    figures = draft.statistics.get(topic.id) or topic.statistics
    records, size = caps.records - figures.records, caps.size - figures.record_bytes
    if len(keys) <= records and sum(map(len, keys)) + sum(map(len, payloads)) <= size:
        return True
    if len(set(store_keys)) < len(store_keys):
        return False  # the second record of a key replaces the first, whose head is not there yet
    heads = list(map(draft.heads.get, store_keys))
    there = [head is not None for head in heads]
    new = len(there) - sum(there)
    if new > max(0, records):
        return False
    before = payload_bytes_each(list(filter(None, heads)))
    after = map(len, compress(payloads, there))
    grown = sum([max(0, new_size - old_size) for new_size, old_size in zip(after, before, strict=True)])
    if new:
        absent = list(map(operator.not_, there))
        grown += sum(map(len, compress(keys, absent))) + sum(map(len, compress(payloads, absent)))
    return grown <= max(0, size)


def _exceeded(caps: Caps, figures: StoredStatistics, records: int, size: int) -> str:
    """The cap that a record exceeds which adds so much; empty if none ([2])."""
    if records > 0 and figures.records + records > caps.records:
        return _RECORDS
    if size > 0 and figures.record_bytes + size > caps.size:
        return _BYTES
    return ""


def _refusal(draft: Draft, job: Job, topic: Topic, index: int, cap: str) -> Refusal:
    """Raises SweepFirst if some records of the topic may be overdue."""
    if topic.acts and draft.next_due <= draft.now and job.swept_micros is not None:
        if job.swept_micros == 0 or draft.next_due <= job.swept_micros:
            raise SweepFirst(job)
    # Not how much there is: the publisher may not be allowed to see all of it.
    return Refusal(index, Reason.TOPIC_FULL, f"topic: {topic.name} is full, {cap} has no room for this record")


_RECORDS: Final = "max_records"
_BYTES: Final = "max_stored_bytes"
