"""Requests, staged on a `Draft`: a publish as `puts` decides, touches, deletes and restamps record by record.

[1]  Records are decided in the order of the request (rules P4, P7).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress
from typing import Final

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit.column_changes import delete_all
from sow_server.engine.commit.draft import Draft
from sow_server.engine.commit.publishers import PublisherCache
from sow_server.engine.commit.puts import (
    PLAIN_RECORDS_MIN,
    failed_condition,
    skip_duplicates,
    stage_publish,
    ttl_ignored,
)
from sow_server.engine.commit.requests import AtomicAborted, Job, Result, Slice, store_keys
from sow_server.engine.commit.told import OUTCOMES_KEPT, UNKNOWN_TOPIC
from sow_server.engine.commit.work import touches_stored
from sow_server.engine.formats.payloads import BadRecord
from sow_server.engine.stored import EXPIRE_TIME, RECORD_KEY, TOUCH, read_header
from sow_server.engine.values import lifetimes
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.keys import wrong_parts
from sow_server.engine.values.lifetimes import LifetimeError
from sow_server.engine.values.model import (
    NEVER,
    Applied,
    Condition,
    ConditionKind,
    Delete,
    Publish,
    Refusal,
    Restamp,
    RestampMode,
    Touch,
    TouchOnly,
)

READ_WHOLE: Final = (Touch, Delete, Restamp)
"""Requests that read whole records while they are staged, and their heads with them."""


def fetch_heads(draft: Draft, chosen: Sequence[tuple[Job, int]]) -> None:
    """Looks up the heads that the next so many records of the jobs need, in one list-get."""
    keys: list[bytes] = []
    for job, count in chosen:
        if not job.looked_up:
            keys += store_keys(job, count)
        elif not isinstance(job.request, READ_WHOLE):  # most were looked up before, for the work that they tell of
            keys += [key for key in store_keys(job, count) if key not in draft.heads]
    if keys:
        draft.fetch_heads(keys)


def fetch_values(draft: Draft, chosen: Sequence[tuple[Job, int]]) -> None:
    """Reads the whole records that the next so many records of the jobs need, in one list-get."""
    wanted: list[bytes] = []
    for job, count in chosen:
        if job.looked_up and not isinstance(job.request, READ_WHOLE):
            keys, removals = store_keys(job, count), job.request.removals
            if removals is not None and job.all_have_keys and not touches_stored(job, puts_only=True):
                keys = list(compress(keys, removals[job.position : job.position + count]))
            wanted += keys
    if wanted:
        draft.fetch_values(wanted)


def stage_job(draft: Draft, job: Job, count: int, publishers: PublisherCache) -> Slice:
    """Stages the next `count` records of a job. Raises StoreError (nothing of the job is staged) or AtomicAborted."""
    topic = job.topic
    assert topic is not None, "the job has been prepared"
    match job.request:
        case Publish() as publish:
            return stage_publish(draft, job, publish, topic, count, publishers)
        case Touch() as touch:
            return _stage_touch(draft, job, touch, topic, count)
        case Delete() as delete:
            return _stage_delete(draft, job, delete, topic, count, publishers)
        case Restamp() as restamp:
            return _stage_restamp(draft, job, restamp, topic, count)


def stage_aborted(draft: Draft, job: Job, aborted: AtomicAborted, publishers: PublisherCache) -> Slice:
    """Stages that an atomic request was refused as a whole: its publisher remembers that, and nothing else changes."""
    own = {refusal.index: refusal for refusal in aborted.refusals}
    refusals = [
        own.get(index) or Refusal(index, Reason.ATOMIC_ABORTED, "another record of this atomic request was refused")
        for index in range(len(job.keys))
    ]
    return _stage_refusals(draft, job, refusals, publishers, Slice(job.left))


def stage_refused(draft: Draft, job: Job, error: StoreError, publishers: PublisherCache) -> Slice:
    """Stages that each record left of a publish is refused, for the same reason: its publisher remembers that. Those
    that were decided before have their answers. Raises StoreError as `stage_job`."""
    assert isinstance(job.request, Publish), "others are refused as a whole"
    part, start, stop = Slice(0), job.position, len(job.request.payloads)
    bad = BadRecord(error.reason, error.message)
    job.keys = [bad] * stop
    part.count = job.left
    if (position := job.request.publisher) is not None:
        topic_id = UNKNOWN_TOPIC if job.topic is None else job.topic.id
        publisher = publishers.of_topic(position.publisher_id, topic_id).admit(position, stop, topic_id)
        # Of a record that was decided too long ago to be known as refused, the fault is found again.
        decided = max(0, publisher.highest_sequence + 1 - position.first_sequence)
        for index in range(max(0, decided - OUTCOMES_KEPT), min(stop, decided)):
            job.keys[index] = b""  # whatever its key was
        start = skip_duplicates(job, job.request, topic_id, position, publisher, part, start, stop)
    refusals = [Refusal(index, error.reason, error.message) for index in range(start, stop)]
    return _stage_refusals(draft, job, refusals, publishers, part)


def _stage_refusals(draft: Draft, job: Job, refusals: list[Refusal], publishers: PublisherCache, part: Slice) -> Slice:
    """Stages the refusals of all records of a job that are left, but for those that are in `part`; returns that."""
    request, topic, stop = job.request, job.topic, len(job.keys)
    if isinstance(request, Publish) and request.publisher is not None:
        name, first = request.publisher.publisher_id, request.publisher.first_sequence
        topic_id = UNKNOWN_TOPIC if topic is None else topic.id
        publisher = publishers.of_topic(name, topic_id).admit(request.publisher, stop, topic_id)
        new = max(job.position, publisher.decided_upto(first, publisher.elsewhere(topic_id)) - first + 1)
        kept = [refusal._replace(index=first + refusal.index) for refusal in refusals if refusal.index >= new]
        if kept:
            draft.publishers[name] = advanced = publisher.advance(
                first + stop - 1,
                kept,
                draft.now,
                unit=request.publisher.unit,
                from_sequence=first + new,
                topic_id=topic_id,
            )
            if topic is None:  # it has written to none
                draft.publishers[name] = advanced._replace(topics=publisher.topics)
            else:
                draft.note_publisher(request.publisher, topic, new, stop, [one.index for one in kept])
    part.refusals += refusals
    part.results += refusals
    return part


def stage_decided(draft: Draft, job: Job, publishers: PublisherCache) -> Slice | None:
    """Stages a job all of whose records were decided before, for the same publisher: it needs no stored record, so a
    retry has its answer however large they have become (rule P6). None: there is something new in it."""
    request, topic = job.request, job.topic
    if not isinstance(request, Publish) or (position := request.publisher) is None or topic is None:
        return None
    try:
        publisher = publishers.of_topic(position.publisher_id, topic.id).admit(position, len(job.keys), topic.id)
        decided = publisher.decided_upto(position.first_sequence, publisher.elsewhere(topic.id))
        if decided < position.first_sequence + len(job.keys) - 1:
            return None
        return stage_publish(draft, job, request, topic, job.left, publishers)
    except StoreError:
        return None


def _stage_touch(draft: Draft, job: Job, request: Touch, topic: Topic, count: int) -> Slice:
    part = Slice(count)
    draft.fetch_bodies(store_keys(job, count))
    for index in range(job.position, job.position + count):
        key = job.keys[index]
        if isinstance(key, BadRecord):
            part.add(Refusal(index, key.reason, key.message))
        else:
            part.add(_touch_one(draft, topic, index, key, request))
    if request.atomic and part.refusals and part.applied:
        raise AtomicAborted(part.refusals)
    return part


def _touch_one(draft: Draft, topic: Topic, index: int, key: bytes, request: Touch) -> Result:
    lifetime, condition, permits = request.lifetime, request.condition, request.permits
    if request.versions is not None:
        condition = Condition(ConditionKind.IF_VERSION, request.versions[index])
    store_key = topic.prefix + key
    try:
        expire_time = lifetimes.expire_time(topic.settings, lifetime, draft.now)
    except LifetimeError as error:
        return Refusal(index, error.reason, error.message)
    head = draft.live_head(topic, key, store_key)
    if head is None or (permits is not None and not permits.has(key, draft.body(store_key))):
        if head is None and (wrong := wrong_parts(topic.settings.key, key.decode())):
            return Refusal(index, Reason.INVALID_ARGUMENT, f"key: {wrong}")
        return Refusal(index, Reason.RECORD_NOT_FOUND, f"key: there is no live record {_shown(key)}")
    if condition is not None and (failed := failed_condition(condition, head, index)) is not None:
        return failed
    before = read_header(head)
    if (left_alone := _left_alone(request, before.expire_time_micros, expire_time, draft.now)) is not None:
        return Refusal(index, Reason.CONDITION_FAILED, left_alone, before.version)
    version, sequence = draft.put(
        topic,
        key,
        store_key,
        head,
        draft.body(store_key),
        change=TOUCH,
        publish_time=before.publish_time_micros,
        expire_time=expire_time,
    )
    return Applied(key.decode(), version, expire_time, sequence, ttl_ignored=ttl_ignored(topic, lifetime))


def _left_alone(request: Touch, before: int, after: int, now: int) -> str | None:
    """The reason why a touch does not change a record with the stamp `before` into one with `after` (rules L19, L20);
    None if it does."""
    if request.below_micros is not None:
        if lifetimes.left(before, now) >= request.below_micros:
            return "touch_below: the record has as much left"
    match request.only:
        case TouchOnly.LATER if after <= before:
            return "only: the record would not get a later expire time"
        case TouchOnly.EARLIER if after >= before:
            return "only: the record would not get an earlier expire time"
        case TouchOnly.WITHOUT if before != NEVER:
            return "only: the record has an expire time"
        case TouchOnly.WITH if before == NEVER:
            return "only: the record never expires"
    return None


def _matching(
    draft: Draft, job: Job, request: Delete | Restamp, topic: Topic, count: int
) -> Iterator[tuple[bytes, bytes, bytes]]:
    """Key, store key and head of each live record, among the next `count` keys of the job, that the request matches.
    Lazily: the changes of one record may expire another. The records have been fetched."""
    for key in job.keys[job.position : job.position + count]:
        if isinstance(key, BadRecord):
            continue
        store_key = topic.prefix + key
        head = draft.live_head(topic, key, store_key)
        if head is not None and (request.matches is None or request.matches(key, draft.value(store_key))):
            yield key, store_key, head


def _stage_delete(
    draft: Draft, job: Job, request: Delete, topic: Topic, count: int, publishers: PublisherCache
) -> Slice:
    """Deletes; a key without a live record, or with one that is not meant, does not match: no refusal (rule D2)."""
    part = Slice(count)
    if (position := request.publisher) is not None:
        staged = draft.publishers.get(position.publisher_id)
        found = publishers.of_topic(position.publisher_id, topic.id, staged)
        found.check_acting(position, topic.id)
    draft.fetch_bodies(store_keys(job, count))
    plain = _plain_matches(draft, job, request, topic, count) if count >= PLAIN_RECORDS_MIN else None
    if plain is None:
        for key, store_key, head in _matching(draft, job, request, topic, count):
            part.last_sequence = draft.delete(topic, key, store_key, head)
            part.applied += 1
    elif plain:
        delete_all(draft, topic, list(plain), list(plain.values()))
        part.applied, part.last_sequence = len(plain), draft.next_sequence - 1
    return part


def _plain_matches(draft: Draft, job: Job, request: Delete, topic: Topic, count: int) -> dict[bytes, bytes] | None:
    """Store keys and stored values of the records that a delete removes, among the next `count` keys of the job, in the
    order of the request; None if one of them is overdue, which has to be expired in its turn."""
    heads, value_of = draft.heads, draft.value
    found = {key: value_of(key) for key in store_keys(job, count) if heads[key] is not None}
    if topic.acts and found and min([value[EXPIRE_TIME] for value in found.values()]) <= draft.now_bytes:
        return None
    if (matches := request.matches) is None:
        return found
    return {key: value for key, value in found.items() if matches(key[RECORD_KEY], value)}


def _stage_restamp(draft: Draft, job: Job, request: Restamp, topic: Topic, count: int) -> Slice:
    """Restamps; records that are not meant, or have that lifetime already, are left alone (rule L13)."""
    part = Slice(count)
    try:
        stamp = lifetimes.restamp_time(topic.settings, request.mode, request.lifetime, draft.now)
    except LifetimeError as error:
        raise StoreError(error.reason, error.message, field="lifetime") from None
    draft.fetch_bodies(store_keys(job, count))
    for key, store_key, head in _matching(draft, job, request, topic, count):
        before = read_header(head)
        expire_time = min(before.expire_time_micros, stamp) if request.mode is RestampMode.CAP else stamp
        if expire_time != before.expire_time_micros:
            part.last_version, part.last_sequence = draft.put(
                topic,
                key,
                store_key,
                head,
                draft.body(store_key),
                change=TOUCH,
                publish_time=before.publish_time_micros,
                expire_time=expire_time,
            )
            part.applied += 1
    return part


def _shown(key: bytes) -> str:
    text = key.decode()
    return repr(text if len(text) <= 80 else text[:77] + "…")
