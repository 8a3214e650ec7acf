"""Publishes, decided record by record or column by column, on a `Draft`.

[1]  Records are decided in the order of the request (rules P4, P7).
[2]  A refused record changes nothing but the memory of its publisher.
[3]  Publisher sequences at or below the highest seen are never applied again (rule P6).
[4]  A request that ends a unit of work finishes it with its last records, if none of all its records is refused.
[5]  The caps of the topic are judged last, by the record as it would be stored (`caps`).
[6]  A removal is decided in its place among the puts. One that finds no record is applied, and changes nothing but the
     memory of its publisher (rule P11).
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from itertools import groupby, repeat
from operator import itemgetter
from typing import Final

from sow_server.engine.catalog.indexes import entries_count, may_have_more
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit import caps
from sow_server.engine.commit.alternating import alternate, stage_alternating
from sow_server.engine.commit.column_changes import Puts, delete_all, put_all
from sow_server.engine.commit.draft import Draft
from sow_server.engine.commit.handing_over import HandOver
from sow_server.engine.commit.publishers import REMOVED, SEVERAL, AnsweredRun, Publisher, PublisherCache, joined
from sow_server.engine.commit.requests import AtomicAborted, Delta, Job, Result, Slice
from sow_server.engine.commit.stamps import own_stamps, stamp_of
from sow_server.engine.commit.told import NOTHING_TOLD
from sow_server.engine.formats.payloads import BadRecord
from sow_server.engine.stored import EXPIRE_TIME, HEADER, HEADER_FAST, PUT, header_start, i64, i64s, read_header
from sow_server.engine.values import lifetimes
from sow_server.engine.values.errors import Reason
from sow_server.engine.values.lifetimes import LifetimeError
from sow_server.engine.values.model import (
    NEVER,
    Applied,
    Condition,
    ConditionKind,
    Expiration,
    Lifetime,
    LifetimeKind,
    PermittedRows,
    Publish,
    PublisherPosition,
    Refusal,
    TtlMode,
)


def stage_publish(
    draft: Draft, job: Job, request: Publish, topic: Topic, count: int, publishers: PublisherCache
) -> Slice:
    part = Slice(count)
    start, stop = job.position, job.position + count
    position = request.publisher
    publisher: Publisher | None = None
    ends_unit = False
    if position is not None:
        publisher = draft.publishers.get(position.publisher_id) or publishers.find(position.publisher_id)
        if publisher.has_passed_on:
            publisher = publishers.of_topic(position.publisher_id, topic.id, publisher)
        publisher = publisher.admit(position, len(job.keys), topic.id)
        ends_unit = position.unit_done and position.unit > publisher.unit
        if ends_unit and start == 0:
            publisher.check_finish(position)
        start = skip_duplicates(job, request, topic.id, position, publisher, part, start, stop)
        part.first_sequence = position.first_sequence
    stop = _put_all(draft, job, request, topic, start, stop, part)
    part.count = stop - job.position
    if job.alone and part.count < count:
        return part  # too large, whatever else is wrong with it: who has asked for all of it refuses it
    if request.atomic and part.refusals and part.applied:
        raise AtomicAborted(part.refusals)
    if job.alone and job.caps is not None and (full := caps.check_whole(draft, job, topic)) is not None:
        raise AtomicAborted([full])
    finishes = ends_unit and stop == len(job.keys) and not (job.outcome.refusals or part.refusals)
    if publisher is not None and position is not None and (start < stop or finishes):
        refused = [
            refusal._replace(index=position.first_sequence + refusal.index)
            for refusal in part.refusals
            if refusal.index >= start
        ]
        draft.publishers[position.publisher_id] = publisher.advance(
            position.first_sequence + stop - 1,
            refused,
            draft.now,
            unit=position.unit,
            applied=part.applied,
            finishes=finishes,
            runs=part.runs if request.removals is None or request.want_results else joined(part.runs),
            from_sequence=position.first_sequence + start,
            topic_id=topic.id,
        )
        if start < stop:
            draft.note_publisher(position, topic, start, stop, [refusal.index for refusal in refused])
    return part


def skip_duplicates(
    job: Job,
    request: Publish,
    topic_id: int,
    position: PublisherPosition,
    publisher: Publisher,
    part: Slice,
    start: int,
    stop: int,
) -> int:
    """Answers the records that were decided before with their original outcome; returns the position of the first new
    one."""
    elsewhere = publisher.elsewhere(topic_id) if publisher.told or publisher.passed_on else NOTHING_TOLD
    decided = publisher.decided_upto(position.first_sequence + start, elsewhere)
    first_new = min(stop, max(start, decided + 1 - position.first_sequence))
    runs = publisher.known_runs() if start < first_new else []
    for index in range(start, first_new):
        # The same request as before: an atomic one may have been refused for another reason than its records', too.
        conditional = request.conditions is not None and request.conditions[index] is not None
        refusal = publisher.refusal_of(
            position.first_sequence + index, conditional=conditional, atomic=request.atomic, elsewhere=elsewhere
        )
        key = job.keys[index]
        if refusal is not None:
            refusal = refusal._replace(index=index)
        elif isinstance(key, BadRecord):
            refusal = Refusal(index, key.reason, key.message)
        if refusal is not None:
            part.refusals.append(refusal)
            part.results.append(refusal)
        else:
            assert isinstance(key, bytes), "either a key or a reason"
            part.duplicates += 1
            version, sequence, expire_time = _remembered(runs, position.first_sequence + index)
            known, removal = expire_time != SEVERAL, expire_time == REMOVED
            if not known and version and request.removals is not None:
                removal = request.removals[index]  # its run was joined with one of puts
            if version or not removal:
                part.last_duplicate_version, part.last_duplicate_sequence = version, sequence
            if request.want_results:
                part.results.append(
                    Applied(
                        key.decode(),
                        version,
                        expire_time if known and not removal else NEVER,
                        sequence,
                        duplicate=True,
                        expire_time_known=known,
                        removed=removal and version > 0,
                    )
                )
    return first_new


def _remembered(runs: Sequence[AnsweredRun], sequence: int) -> tuple[int, int, int]:
    """Version, journal sequence and stamp that a publisher's sequence got when it was applied; 0, 0 and SEVERAL if they
    are forgotten."""
    for run in runs:
        if 0 <= (offset := sequence - run.first) < run.count:
            if not run.version:
                return 0, 0, run.expire_time_micros
            return run.version + offset, run.sequence + offset, run.expire_time_micros
    return 0, 0, SEVERAL


def _put_all(draft: Draft, job: Job, request: Publish, topic: Topic, start: int, stop: int, part: Slice) -> int:
    """Puts the records of a slice: runs of plain ones column by column, the others one by one. Returns the position
    behind the last one: deltas that have used the room of the commit up leave the rest to the next.

    One by one: records without a key, with a refused or already-over lifetime, replacing an overdue record, or outside
    of the publisher's rows; and all records if the request has conditions, keeps stamps, merges, is atomic, or wants
    results.
    """
    if (removals := request.removals) is not None and True in removals[start:stop]:
        return _put_and_remove(draft, job, request, topic, start, stop, part, removals)
    if (
        request.conditions is not None
        or job.delta is not None
        or request.ttl_mode is TtlMode.KEEP
        or request.want_results
        or request.atomic
        or stop - start < PLAIN_RECORDS_MIN
    ):
        return _put_each(draft, job, request, topic, start, stop, part)
    return _put_columns(draft, job, request, topic, start, stop, part)


def _put_and_remove(
    draft: Draft,
    job: Job,
    request: Publish,
    topic: Topic,
    start: int,
    stop: int,
    part: Slice,
    removals: Sequence[bool],
) -> int:
    """`_put_all` of a slice with removals: one by one where puts would be; otherwise in one pass where they alternate,
    and else by runs of puts and of removals."""
    one_by_one = request.conditions is not None or request.want_results or request.atomic or job.delta is not None
    if one_by_one or request.permits is not None or request.removal_permits is not None:
        return _put_each(draft, job, request, topic, start, stop, part)
    of_slice = removals[start:stop]
    together = stop - start >= PLAIN_RECORDS_MIN and alternate(of_slice)
    if together and stage_alternating(draft, job, request, topic, start, stop, part, of_slice):
        return stop
    at = start
    for removes, run in groupby(of_slice):
        upto = at + len(list(run))
        if removes:
            _remove_all(draft, job, request, topic, at, upto, part)
        else:
            _put_all(draft, job, request, topic, at, upto, part)
        at = upto
    return stop


def _remove_all(draft: Draft, job: Job, request: Publish, topic: Topic, start: int, stop: int, part: Slice) -> None:
    """Removes the records of a run of removals: column by column, if it is long and nothing in it is overdue or
    refused."""
    store_keys, heads = job.store_keys[start:stop], draft.heads
    if stop - start < PLAIN_RECORDS_MIN or b"" in store_keys:
        _put_each(draft, job, request, topic, start, stop, part)
        return
    values: dict[bytes, bytes] = {}
    found: list[bool] = []
    for store_key in store_keys:
        finds = store_key not in values and heads[store_key] is not None  # of one key twice, the second finds nothing
        found.append(finds)
        if finds:
            values[store_key] = draft.value(store_key)
    if topic.acts and values and min([value[EXPIRE_TIME] for value in values.values()]) <= draft.now_bytes:
        _put_each(draft, job, request, topic, start, stop, part)
        return
    version, sequence = draft.next_version, draft.next_sequence
    part.applied += len(found)
    part.unchanged += len(found) - len(values)
    if values:
        delete_all(draft, topic, list(values), list(values.values()))
        part.removed += len(values)
        part.last_version, part.last_sequence = draft.next_version - 1, draft.next_sequence - 1
    if part.first_sequence is None:
        return
    first = part.first_sequence + start
    for finds, run in groupby(found):
        count = len(list(run))
        part.runs.append(AnsweredRun(first, count, version if finds else 0, sequence if finds else 0, REMOVED))
        first += count
        if finds:
            version, sequence = version + count, sequence + count


def _put_columns(draft: Draft, job: Job, request: Publish, topic: Topic, start: int, stop: int, part: Slice) -> int:
    """`_put_all` of a request whose plain records are put in columns."""
    count = stop - start
    if request.lifetimes is None:
        expire_times = [stamp_of(topic, request.lifetime, draft.now)] * count
    else:
        expire_times = own_stamps(request, request.lifetimes[start:stop], topic, draft.now)
    store_keys = job.store_keys[start:stop]
    extends = request.ttl_mode is TtlMode.EXTEND
    stamps: list[bytes] = []
    if topic.acts or extends:
        stamps = list(map(_STAMP, filter(None, map(draft.heads.get, store_keys))))
    one_by_one = _keyless_or_overdue(draft, job, topic, store_keys, expire_times, stamps)
    if extends and not one_by_one and min(expire_times) == max(expire_times):
        # The usual case, which costs nothing more: one lifetime for all, which renews them all. After an expiry it may
        # be another: a dead letter may have come under the key of a later record.
        extends = max(stamps, default=_NO_STAMP) > i64(expire_times[0])
    if request.permits is not None:
        if one_by_one:
            # One that expires may put a dead letter under the key of a later record, whose rows are to be judged then.
            return _put_each(draft, job, request, topic, start, stop, part)
        one_by_one = _forbidden_records(draft, request.permits, job, request, start, stop)
    if len(one_by_one) * PLAIN_RECORDS_MIN > count:
        return _put_each(draft, job, request, topic, start, stop, part)
    at = 0
    for index in (*sorted(one_by_one), count):
        if at < index:
            run = slice(start + at, start + index)
            if job.caps is not None and not caps.fit(
                draft,
                job.caps,
                topic,
                job.keys[run],  # type: ignore[arg-type]  # plain records have keys
                job.store_keys[run],
                request.payloads[run],
            ):
                _put_each(draft, job, request, topic, run.start, run.stop, part)
            else:
                stamps_of_run = expire_times[at:index]
                _put_plain(draft, job, request, topic, stamps_of_run, run.start, run.stop, part, extends=extends)
        if index < count:
            _put_each(draft, job, request, topic, start + index, start + index + 1, part)
        at = index + 1
    return stop


def _keyless_or_overdue(
    draft: Draft,
    job: Job,
    topic: Topic,
    store_keys: Sequence[bytes],
    expire_times: Sequence[int],
    stamps: Sequence[bytes],
) -> set[int]:
    """The records of a slice, counted from its begin, that have no key, a lifetime that is refused or over, or replace
    an overdue record. `stamps`: of the records that are there."""
    found: set[int] = set()
    if min(expire_times) <= draft.now:
        found.update(index for index, expire_time in enumerate(expire_times) if expire_time <= draft.now)
    if not job.all_have_keys:
        found.update(index for index, store_key in enumerate(store_keys) if not store_key)
    now_bytes = draft.now_bytes
    if topic.acts and stamps and min(stamps) <= now_bytes:
        heads = map(draft.heads.get, store_keys)
        found.update(index for index, head in enumerate(heads) if head is not None and head[EXPIRE_TIME] <= now_bytes)
    return found


def _forbidden_records(
    draft: Draft, permits: PermittedRows, job: Job, request: Publish, start: int, stop: int
) -> set[int]:
    """The records of a slice that the publisher may not write, counted from its begin. All have keys; none expires.

    A key may come twice. The first record of it replaces the stored one, and later ones replace a record of this
    publisher, which it may write. So if the stored one is hidden, all are refused, and otherwise the new ones decide.
    """
    keys: list[bytes] = job.keys[start:stop]  # type: ignore[assignment]  # all have keys
    allowed = permits.judge(keys, request.payloads[start:stop])
    found = {index for index, one in enumerate(allowed) if not one}
    if permits.reads_payloads:
        store_keys = job.store_keys[start:stop]
        there = {
            store_key: key
            for key, store_key in zip(keys, store_keys, strict=True)
            if draft.heads[store_key] is not None
        }
        seen = permits.judge(list(there.values()), list(map(draft.body, there)))
        hidden = {store_key for store_key, one in zip(there, seen, strict=True) if not one}
        if hidden:
            found.update(index for index, store_key in enumerate(store_keys) if store_key in hidden)
    return found


_STAMP: Final = itemgetter(EXPIRE_TIME)


def _put_plain(
    draft: Draft,
    job: Job,
    request: Publish,
    topic: Topic,
    expire_times: list[int],
    start: int,
    stop: int,
    part: Slice,
    *,
    extends: bool,
) -> None:
    """The hot path: unconditional puts with expire times ahead, over nothing overdue. Publishing is as fast as this.
    `extends`: a record that is there may have a later stamp, and keeps it.

    It has the same result as `Draft.put` for each record, but works column by column, so that the interpreter runs only
    a few bytecodes per record and C the rest. Property tests compare the two.
    """
    keys, payloads, store_keys = job.keys[start:stop], request.payloads[start:stop], job.store_keys[start:stop]
    if extends:
        expire_times = _extended(draft, store_keys, expire_times)
    count, version, sequence = stop - start, draft.next_version, draft.next_sequence
    alike = min(expire_times) == max(expire_times)
    expire_bytes = [i64(expire_times[0])] * count if alike else i64s(expire_times)
    now_bytes = draft.now_bytes
    lengths = list(map(len, payloads))
    new_heads = list(
        map(
            HEADER_FAST.pack,
            repeat(header_start(draft.origin)),
            lengths,
            range(version, version + count),
            repeat(now_bytes + expire_bytes[0]) if alike else [now_bytes + stamp for stamp in expire_bytes],
            range(sequence, sequence + count),
        )
    )
    put_all(
        draft,
        topic,
        Puts(
            keys,  # type: ignore[arg-type]  # a plain put has a key
            store_keys,
            new_heads,
            payloads,
            stamps=expire_bytes,
            earliest=expire_times[0] if alike else min(expire_times),
            version=range(version, version + count),
            publish_time=draft.now,
            expire_time=expire_times[0] if alike else array("q", expire_times),
            origin=draft.origin,
        ),
    )
    draft.next_version = version + count
    part.applied += count
    if topic.settings.expiration is Expiration.DISABLED:
        part.ignored += count - expire_times.count(NEVER)
    part.last_version, part.last_sequence = version + count - 1, sequence + count - 1
    if part.first_sequence is not None:
        stamp = expire_times[0] if alike else SEVERAL
        part.runs.append(AnsweredRun(part.first_sequence + start, count, version, sequence, stamp))


def _extended(draft: Draft, store_keys: Sequence[bytes], expire_times: list[int]) -> list[int]:
    """For each record the later of its stamp and that of the record which it replaces (rule L6)."""
    present = [_NO_STAMP if head is None else head[EXPIRE_TIME] for head in map(draft.heads.get, store_keys)]
    stamps = struct.unpack(f">{len(present)}q", b"".join(present))
    if min(expire_times) == max(expire_times):
        return list(map(max, expire_times, stamps))
    latest: dict[bytes, int] = {}  # a key may occur twice: then its second record replaces its first
    extended = []
    for store_key, stamp, expire_time in zip(store_keys, stamps, expire_times, strict=True):
        latest[store_key] = later = max(expire_time, latest.get(store_key, stamp))
        extended.append(later)
    return extended


def _put_each(draft: Draft, job: Job, request: Publish, topic: Topic, start: int, stop: int, part: Slice) -> int:
    """Puts record by record: conditions, own lifetimes, kept stamps, deltas, results; and removes. As `_put_all`."""
    removals = request.removals
    for index in range(start, stop):
        if draft.merge_room <= 0 and job.delta is not None and index > start and not job.alone:
            return index
        key = job.keys[index]
        result: Result
        if isinstance(key, BadRecord):
            result = Refusal(index, key.reason, key.message)
        elif removals is not None and removals[index]:
            result = _remove_one(draft, topic, job, request, index, key)
        else:
            result = _put_one(draft, topic, job, request, index, key)
            if job.alone and draft.merge_room < 0:
                return index  # no later commit takes the rest of an atomic request: it is refused (rule P2)
        part.add(result)
        if part.first_sequence is not None and isinstance(result, Applied):
            stamp = REMOVED if removals is not None and removals[index] else result.expire_time_micros
            run = AnsweredRun(part.first_sequence + index, 1, result.version, result.sequence, stamp)
            if not (part.runs and part.runs[-1].grow(run)):
                part.runs.append(run)
    return stop


def _remove_one(draft: Draft, topic: Topic, job: Job, request: Publish, index: int, key: bytes) -> Result:
    """Deletes the live record of a key, if there is one (rule P11)."""
    store_key = topic.prefix + key
    head = draft.live_head(topic, key, store_key)
    if head is not None:
        for permits in (request.permits, request.removal_permits):
            if permits is not None and not _seen(draft, permits, key, store_key):
                head = None  # it does not exist for this publisher
                break
    condition = None if request.conditions is None else request.conditions[index]
    if condition is not None and (failed := failed_condition(condition, head, index)) is not None:
        return failed
    if head is None:
        return Applied(key.decode(), 0, NEVER, 0)
    if job.caps is not None:
        caps.make_room(draft, job, job.caps, topic, key, head)
    version = draft.next_version
    sequence = draft.delete(topic, key, store_key, head)
    return Applied(key.decode(), version, NEVER, sequence, removed=True)


def _put_one(draft: Draft, topic: Topic, job: Job, request: Publish, index: int, key: bytes) -> Result:
    payload, lifetime, delta = request.payloads[index], request.lifetime, job.delta
    if request.lifetimes is not None and request.lifetimes[index].kind is not LifetimeKind.ABSENT:
        lifetime = request.lifetimes[index]
    condition = None if request.conditions is None else request.conditions[index]
    store_key = topic.prefix + key
    try:
        expire_time = lifetimes.expire_time(topic.settings, lifetime, draft.now)
    except LifetimeError as error:
        return Refusal(index, error.reason, error.message)
    head = draft.live_head(topic, key, store_key)
    permits = request.permits
    hidden = permits is not None and head is not None and not _seen(draft, permits, key, store_key)
    if condition is not None and (failed := failed_condition(condition, None if hidden else head, index)) is not None:
        return failed
    if hidden:
        return _forbidden(index)
    if delta is not None and head is not None:
        base = draft.body(store_key)
        draft.merge_room -= len(base)
        merged = topic.format.merge(base, payload, delta.unset)
        if isinstance(merged, BadRecord):
            return Refusal(index, merged.reason, merged.message)
        if len(merged) > delta.payload_bytes_max:
            return Refusal(
                index,
                Reason.PAYLOAD_TOO_LARGE,
                # Not how many: some of them may be of fields that the publisher may not see.
                f"payload: merged into the record it has more bytes than the limit of {delta.payload_bytes_max}",
            )
        payload = merged
    if (
        delta is not None
        and topic.indexes.all
        and (refused := _too_many_entries(draft, topic, delta, store_key, payload))
    ):
        return Refusal(index, Reason.PAYLOAD_TOO_LARGE, refused)
    if permits is not None and not permits.has(key, payload):
        return _forbidden(index)
    if request.ttl_mode is not TtlMode.RESET and head is not None:
        present = read_header(head).expire_time_micros
        expire_time = present if request.ttl_mode is TtlMode.KEEP else max(present, expire_time)
    due = topic.acts and expire_time <= draft.now
    if job.caps is not None:
        stays = None if due else payload
        if (full := caps.refused(draft, job, job.caps, topic, index, key, head, stays)) is not None:
            return full
    version, sequence = draft.put(
        topic,
        key,
        store_key,
        head,
        payload,
        change=PUT,
        publish_time=draft.now,
        expire_time=expire_time,
        hand_over=True,
        expire_due=not due,
    )
    delivered = None
    if due:
        value = draft.value(store_key)
        delivered = draft.part(HandOver).takers(topic, key, value)
        draft.expire(topic, key, store_key, value[HEADER], letters=not delivered)
    ignored = ttl_ignored(topic, lifetime)
    return Applied(key.decode(), version, expire_time, sequence, ttl_ignored=ignored, delivered=delivered)


def _too_many_entries(draft: Draft, topic: Topic, delta: Delta, store_key: bytes, payload: bytes) -> str | None:
    """Why a delta's record, merged, has too many index entries (rule K8); None if it has not. One that had as many
    already, such as a peer's, may be changed as long as it gets no more of them."""
    indexes, limit = topic.indexes.all, delta.index_entries_max
    if not may_have_more(indexes, topic.settings.message_type, [payload], limit):
        return None
    count, field = entries_count(indexes, topic.decode_indexed(payload))
    if count <= limit:
        return None
    if draft.heads[store_key] is not None:
        before, _ = entries_count(indexes, topic.decode_indexed(draft.body(store_key)))
        if count <= before:
            return None
    # Not how many: as for its bytes.
    return (
        f"payload: merged into the record it has more values in indexed fields, most of them in {field}, than the "
        f"limit of {limit} index entries per record"
    )


def _seen(draft: Draft, permits: PermittedRows, key: bytes, store_key: bytes) -> bool:
    """True if an existing record is among the publisher's rows."""
    return permits.has(key, draft.body(store_key) if permits.reads_payloads else b"")


def _forbidden(index: int) -> Refusal:
    """The same for a new record outside of the publisher's rows, and for one that would replace a hidden record."""
    return Refusal(index, Reason.PERMISSION_DENIED, "this publisher may not write this record")


def failed_condition(condition: Condition, head: bytes | None, index: int) -> Refusal | None:
    """The reason why a condition does not hold; None if it holds (rule P3)."""
    current = 0 if head is None else read_header(head).version
    if condition.kind is ConditionKind.IF_ABSENT:
        holds, wanted = head is None, "to be absent"
    elif condition.kind is ConditionKind.IF_PRESENT:
        holds, wanted = head is not None, "to be present"
    else:
        holds, wanted = head is not None and current == condition.version, f"at version {condition.version}"
    if holds:
        return None
    found = "there is none" if head is None else f"it is at version {current}"
    return Refusal(index, Reason.CONDITION_FAILED, f"condition: the record was wanted {wanted}, {found}", current)


def ttl_ignored(topic: Topic, lifetime: Lifetime) -> bool:
    """True if a lifetime was given to a topic that does not act on expiration."""
    return topic.settings.expiration is Expiration.DISABLED and lifetime.kind is not LifetimeKind.ABSENT


_NEVER_BYTES: Final = i64(NEVER)
_NO_STAMP: Final = i64(0)
"""Before every stamp."""
PLAIN_RECORDS_MIN: Final = 8
"""The number of records from which on working column by column is cheaper, despite its fixed cost."""
