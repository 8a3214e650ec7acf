"""What a publish, a touch, a delete and a restamp do: the rules, record by record, on a `Draft`.

A `Job` is a request on its way through the writer, perhaps over several commits. Each step stages one slice of it and
returns a `Slice`, the outcome of which the writer merges only after the commit: a commit that fails changes no job.

    [1]  Records are decided in the order of the request (rules P4, P7).
    [2]  A refused record changes nothing but the memory of its publisher.
    [3]  Publisher sequences at or below the highest seen are never applied again (rule P6).
    [4]  A request that ends a unit of work finishes it with its last records, if none of all its records is refused.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import itemgetter
from typing import Final, NamedTuple

from sow_server.engine.catalog.topics import UNDELIVERED_ID, Topic, check_name
from sow_server.engine.commit.draft import Draft, Puts
from sow_server.engine.commit.publishers import SEVERAL, Publisher, PublisherCache, Run
from sow_server.engine.disk.layout import (
    EXPIRE_TIME,
    HEADER,
    HEADER_FAST,
    PUT,
    TOUCH,
    header_start,
    i64,
    payload_bytes_total,
    read_header,
)
from sow_server.engine.formats.deltas import LEVELS_MAX, UnsetTree, unset_tree
from sow_server.engine.formats.payloads import BadRecord, KeyColumn, check_flat
from sow_server.engine.values import lifetimes
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.keys import parse_path, path_text
from sow_server.engine.values.lifetimes import LifetimeError
from sow_server.engine.values.model import (
    NEVER,
    Applied,
    Condition,
    ConditionKind,
    Delete,
    Expiration,
    Lifetime,
    LifetimeKind,
    MessageType,
    Outcome,
    Publish,
    PublisherPosition,
    Refusal,
    Request,
    Restamp,
    RestampMode,
    Touch,
    TtlMode,
)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of rule K8."""

    payload_bytes_max: int = 2**20
    key_bytes_max: int = 1024
    request_records_max: int = 10_000
    request_bytes_max: int = 16 * 2**20
    atomic_records_max: int = 1000


Result = Applied | Refusal
Done = Callable[[Outcome | StoreError], None]


@dataclass(slots=True, eq=False)
class Slice:
    """What one commit does of a job, or would have done."""

    count: int
    applied: int = 0
    duplicates: int = 0
    refusals: list[Refusal] = field(default_factory=list)
    last_version: int = 0
    last_sequence: int = 0
    last_duplicate_version: int = 0
    last_duplicate_sequence: int = 0
    results: list[Result] = field(default_factory=list)
    first_sequence: int | None = None
    """The publisher's sequence of the job's first record; None: there is no publisher."""
    runs: list[Run] = field(default_factory=list)
    """What the publisher remembers of the records that were applied."""


class Delta(NamedTuple):
    """How the payloads of a delta publish are merged (rule P2)."""

    unset: UnsetTree
    payload_bytes_max: int


class AtomicAborted(Exception):
    """A record of an atomic request was refused: nothing of the draft may be written."""

    def __init__(self, refusals: list[Refusal]) -> None:
        super().__init__()
        self.refusals = refusals


class Job:
    """A request in the writer's hands. `keys` is complete once `prepare` has run."""

    __slots__ = (
        "all_have_keys",
        "delta",
        "done",
        "keys",
        "outcome",
        "position",
        "request",
        "size",
        "store_keys",
        "topic",
    )

    def __init__(self, request: Request, done: Done) -> None:
        self.request = request
        self.done = done
        self.topic: Topic | None = None
        self.keys: KeyColumn = []
        self.store_keys: list[bytes] = []
        """topic ‖ record key, in the order of `keys`; empty for a record without a key."""
        self.all_have_keys = True
        self.delta: Delta | None = None
        self.position = 0
        self.size = sum(map(len, request.payloads)) if isinstance(request, Publish) else 0
        """Bytes of payload, for the bounds on requests and on the queue."""
        self.outcome = Outcome(durability=request.durability)
        if not isinstance(request, Publish) or request.want_results:
            self.outcome.results = []

    @property
    def alone(self) -> bool:
        """Whether the job needs a commit of its own: undoing an atomic request undoes the whole commit."""
        return isinstance(self.request, Publish) and self.request.atomic and len(self.request.payloads) > 1

    @property
    def left(self) -> int:
        """Records not yet decided."""
        return len(self.keys) - self.position

    def merge(self, part: Slice) -> None:
        """Takes over what a commit has done."""
        outcome = self.outcome
        self.position += part.count
        outcome.applied += part.applied
        outcome.duplicates += part.duplicates
        outcome.refusals += part.refusals
        outcome.last_version = part.last_version or outcome.last_version
        outcome.last_sequence = part.last_sequence or outcome.last_sequence
        if part.duplicates:
            outcome.last_duplicate_version = part.last_duplicate_version
            outcome.last_duplicate_sequence = part.last_duplicate_sequence
        if outcome.results is not None:
            outcome.results += part.results


# --- preparing -------------------------------------------------------------------------------------------------------


def prepare(job: Job, topic: Topic, limits: Limits) -> None:
    """Checks a request against its topic and the limits, and derives its keys. Raises StoreError."""
    request = job.request
    job.topic = topic
    if topic.id == UNDELIVERED_ID and not isinstance(request, Delete):
        check_name(topic.name)
    match request:
        case Publish():
            check_size(request, job.size, limits)
            job.delta = _delta(request, topic, limits)
            if request.payloads:  # else it ends a unit, and nothing more
                job.keys = _publish_keys(request, topic)
                _check_lengths(job.keys, request.payloads, limits)
        case Touch():
            job.keys = _given_keys(request.keys, limits)
        case Restamp():
            _check_topic(request.topic_id, topic)
            job.keys = _given_keys(request.keys, limits)
        case Delete(payload=None, keys=keys):
            assert keys is not None, "a delete has keys or a payload; the services check it"
            _check_topic(request.topic_id, topic)
            job.keys = _given_keys(keys, limits)
        case Delete(payload=payload):
            assert payload is not None, "as above"
            job.keys = [payload_key(topic, payload)]
    job.all_have_keys = BadRecord not in set(map(type, job.keys))
    prefix = topic.prefix
    job.store_keys = [prefix + key if type(key) is bytes else b"" for key in job.keys]


def check_size(request: Publish, size: int, limits: Limits) -> None:
    """Raises StoreError for a request beyond the limits of rule K8, or with columns of unequal length."""
    count = len(request.payloads)
    if count == 0 and not (request.publisher is not None and request.publisher.unit_done):
        raise StoreError(
            Reason.INVALID_ARGUMENT,
            "payload: a publish needs at least one record, unless it ends a unit",
            field="payload",
        )
    for name, column in (("key", request.keys), ("lifetime_kind", request.lifetimes)):
        if column is not None and len(column) != count:
            raise StoreError(
                Reason.INVALID_ARGUMENT, f"{name}: has {len(column)} entries for {count} payloads", field=name
            )
    if count > limits.request_records_max:
        raise StoreError(
            Reason.REQUEST_TOO_LARGE,
            f"payload: {count} records are more than the limit of {limits.request_records_max} per request",
            field="payload",
        )
    if size > limits.request_bytes_max:
        raise StoreError(
            Reason.REQUEST_TOO_LARGE,
            f"payload: {size} bytes are more than the limit of {limits.request_bytes_max} per request",
            field="payload",
        )
    if request.atomic and count > limits.atomic_records_max:
        raise StoreError(
            Reason.ATOMIC_TOO_LARGE,
            f"payload: {count} records are more than the limit of {limits.atomic_records_max} per atomic request",
            field="payload",
        )


def payload_key(topic: Topic, payload: bytes) -> bytes:
    """The record key of the record that a delete means by its payload (rule D1). Raises StoreError."""
    if topic.derive_keys is None:
        raise StoreError(
            Reason.KEY_REQUIRED,
            f"payload: topic {topic.name} has no key fields to derive a key from; delete by key",
            field="by_payload",
        )
    (key,) = topic.derive_keys([payload])
    if isinstance(key, BadRecord):
        raise StoreError(key.reason, key.message, field="by_payload")
    return key


def _check_topic(topic_id: int | None, topic: Topic) -> None:
    """Raises StoreError TOPIC_NOT_FOUND for keys that were found in a topic that is gone."""
    if topic_id is not None and topic_id != topic.id:
        raise StoreError(
            Reason.TOPIC_NOT_FOUND, f"topic: {topic.name} was deleted meanwhile, this is another one", field="topic"
        )


def _delta(request: Publish, topic: Topic, limits: Limits) -> Delta | None:
    """How the payloads are merged; None for a publish that is no delta. Raises StoreError naming the path at fault."""
    paths = request.unset_paths

    def refuse(reason: Reason, message: str) -> StoreError:
        return StoreError(reason, f"unset_paths: {message}", field="unset_paths")

    if not request.delta:
        if paths:
            raise refuse(Reason.INVALID_ARGUMENT, "have a meaning only with delta")
        return None
    if topic.settings.message_type is MessageType.BINARY:
        raise StoreError(
            Reason.UNSUPPORTED_FOR_MESSAGE_TYPE,
            f"delta: topic {topic.name} is binary, its payloads have no fields to merge",
            field="delta",
        )
    if len(paths) > UNSET_PATHS_MAX:
        raise refuse(Reason.INVALID_ARGUMENT, f"{len(paths)} paths are more than the limit of {UNSET_PATHS_MAX}")
    characters = sum(map(len, paths))
    if characters > UNSET_CHARACTERS_MAX:
        raise refuse(
            Reason.INVALID_ARGUMENT, f"{characters} characters are more than the limit of {UNSET_CHARACTERS_MAX}"
        )
    unset = []
    for path in paths:
        try:
            steps = parse_path(path)
            check_flat(topic.settings, steps)
        except ValueError as error:
            raise refuse(Reason.INVALID_ARGUMENT, str(error)) from None
        if len(steps) > LEVELS_MAX:
            raise refuse(
                Reason.INVALID_ARGUMENT, f"{path[:80]!r} has {len(steps)} steps, more than the limit of {LEVELS_MAX}"
            )
        for key_path in topic.key_paths:
            if key_path[: len(steps)] == steps:
                raise refuse(
                    Reason.UNSET_KEY_FIELD, f"{path} would remove the key field {path_text(key_path)}; a key stays"
                )
        unset.append(steps)
    return Delta(unset_tree(unset), limits.payload_bytes_max)


def _publish_keys(request: Publish, topic: Topic) -> KeyColumn:
    if topic.derive_keys is not None:
        if request.keys is not None:
            raise StoreError(
                Reason.KEY_NOT_ALLOWED,
                f"key: topic {topic.name} derives its keys from {', '.join(topic.settings.key)}",
                field="key",
            )
        return topic.derive_keys(request.payloads)
    if request.keys is None:
        raise StoreError(
            Reason.KEY_REQUIRED,
            f"key: topic {topic.name} has no key fields, so every record needs a key",
            field="key",
        )
    keys: KeyColumn = []
    check = topic.format.check
    for key, payload in zip(request.keys, request.payloads, strict=True):
        bad = check(payload)
        if bad is not None:
            keys.append(bad)
        elif not key:
            keys.append(BadRecord(Reason.KEY_REQUIRED, "key: is empty"))
        else:
            keys.append(_encode_key(key))
    return keys


def _encode_key(key: str | bytes) -> bytes | BadRecord:
    if isinstance(key, bytes):
        return key
    try:
        return key.encode()
    except UnicodeEncodeError:
        return BadRecord(Reason.KEY_NOT_UTF8, "key: is not well-formed Unicode")


def _given_keys(keys: Sequence[str] | Sequence[str | bytes], limits: Limits) -> KeyColumn:
    if not keys:
        raise StoreError(Reason.INVALID_ARGUMENT, "keys: at least one key is needed", field="keys")
    if len(keys) > limits.request_records_max:
        raise StoreError(
            Reason.REQUEST_TOO_LARGE,
            f"keys: {len(keys)} keys are more than the limit of {limits.request_records_max} per request",
            field="keys",
        )
    return [_encode_key(key) for key in keys]


def _check_lengths(keys: KeyColumn, payloads: Sequence[bytes], limits: Limits) -> None:
    """Replaces the keys of records that are too large by the reason."""
    if max(map(len, payloads)) > limits.payload_bytes_max:
        for index, payload in enumerate(payloads):
            if len(payload) > limits.payload_bytes_max:
                keys[index] = BadRecord(
                    Reason.PAYLOAD_TOO_LARGE,
                    f"payload: {len(payload)} bytes are more than the limit of {limits.payload_bytes_max}",
                )
    if max(map(len, keys)) > limits.key_bytes_max:
        for index, key in enumerate(keys):
            if type(key) is bytes and len(key) > limits.key_bytes_max:
                keys[index] = BadRecord(
                    Reason.KEY_TOO_LARGE, f"key: {len(key)} bytes are more than the limit of {limits.key_bytes_max}"
                )


# --- staging ---------------------------------------------------------------------------------------------------------


def store_keys(job: Job, count: int) -> list[bytes]:
    """The store keys of the next `count` records of a job that have one."""
    keys = job.store_keys[job.position : job.position + count]
    return keys if job.all_have_keys else [key for key in keys if key]


def merged_fits(draft: Draft, job: Job, count: int, bytes_max: int) -> tuple[int, int]:
    """How many of the next `count` records of a delta publish merge into records of at most `bytes_max` together, and
    how many bytes these are. Their heads have been fetched."""
    found = [draft.heads[key] for key in store_keys(job, count)]
    size = payload_bytes_total([head for head in found if head is not None])
    if size <= bytes_max:
        return count, size
    size = 0
    for index, store_key in enumerate(job.store_keys[job.position : job.position + count]):
        head = draft.heads[store_key] if store_key else None
        record_bytes = 0 if head is None else read_header(head).payload_bytes
        if size + record_bytes > bytes_max:
            return index, size
        size += record_bytes
    return count, size


def stage_job(draft: Draft, job: Job, count: int, publishers: PublisherCache) -> Slice:
    """Stages the next `count` records of a job. Raises StoreError (nothing of the job is staged) or AtomicAborted."""
    topic = job.topic
    assert topic is not None, "the job has been prepared"
    match job.request:
        case Publish() as publish:
            return _stage_publish(draft, job, publish, topic, count, publishers)
        case Touch() as touch:
            return _stage_touch(draft, job, touch, topic, count)
        case Delete() as delete:
            return _stage_delete(draft, job, delete, topic, count, publishers)
        case Restamp() as restamp:
            return _stage_restamp(draft, job, restamp, topic, count)


def _stage_publish(
    draft: Draft, job: Job, request: Publish, topic: Topic, count: int, publishers: PublisherCache
) -> Slice:
    part = Slice(count)
    start, stop = job.position, job.position + count
    position = request.publisher
    publisher: Publisher | None = None
    ends_unit = False
    if position is not None:
        publisher = draft.publishers.get(position.publisher_id) or publishers.find(position.publisher_id)
        publisher = publisher.admit(position, len(job.keys))
        ends_unit = position.unit_done and position.unit > publisher.unit
        if ends_unit and start == 0:
            publisher.check_finish(position)
        start = _skip_duplicates(job, request, position, publisher, part, start, stop)
        part.first_sequence = position.first_sequence
    _put_all(draft, job, request, topic, start, stop, part)
    if request.atomic and part.refusals and part.applied:
        raise AtomicAborted(part.refusals)
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
            runs=part.runs,
        )
    return part


def _skip_duplicates(
    job: Job,
    request: Publish,
    position: PublisherPosition,
    publisher: Publisher,
    part: Slice,
    start: int,
    stop: int,
) -> int:
    """Answers the records that were decided before with their original outcome; returns where new ones begin."""
    first_new = min(stop, max(start, publisher.highest_sequence + 1 - position.first_sequence))
    runs = publisher.known_runs() if start < first_new else []
    for index in range(start, first_new):
        # The same request as then: also an atomic one may have been refused for another reason than its records'.
        conditional = request.atomic or (request.conditions is not None and request.conditions[index] is not None)
        refusal = publisher.refusal_of(position.first_sequence + index, conditional=conditional)
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
            part.last_duplicate_version, part.last_duplicate_sequence = version, sequence
            if request.want_results:
                known = expire_time != SEVERAL
                part.results.append(
                    Applied(
                        key.decode(),
                        version,
                        expire_time if known else NEVER,
                        sequence,
                        duplicate=True,
                        expire_time_known=known,
                    )
                )
    return first_new


def _remembered(runs: Sequence[Run], sequence: int) -> tuple[int, int, int]:
    """Version, journal sequence and stamp that a publisher's sequence got when it was applied; 0, 0 and SEVERAL where
    that is forgotten."""
    for run in runs:
        if 0 <= (offset := sequence - run.first) < run.count:
            return run.version + offset, run.sequence + offset, run.expire_time_micros
    return 0, 0, SEVERAL


def _put_all(draft: Draft, job: Job, request: Publish, topic: Topic, start: int, stop: int, part: Slice) -> None:
    """Puts the records of a slice: runs of plain ones column by column, what needs more thought record by record.

    More thought needs a record without a key, one whose lifetime is refused or is over at once, and one that meets an
    overdue record; and all of them where the request has conditions, keeps stamps, merges, is atomic, or wants results.
    """
    count = stop - start
    if (
        request.conditions is not None
        or job.delta is not None
        or request.ttl_mode is TtlMode.KEEP
        or request.want_results
        or request.atomic
        or count < PLAIN_RECORDS_MIN
    ):
        _put_each(draft, job, request, topic, start, stop, part)
        return
    expire_times = _expire_times(request, topic, draft.now, start, stop)
    store_keys = job.store_keys[start:stop]
    thought: set[int] = set()
    if min(expire_times) <= draft.now:
        thought.update(index for index, expire_time in enumerate(expire_times) if expire_time <= draft.now)
    if not job.all_have_keys:
        thought.update(index for index, store_key in enumerate(store_keys) if not store_key)
    if topic.acts:
        stamps = [_NEVER_BYTES if head is None else head[EXPIRE_TIME] for head in map(draft.heads.get, store_keys)]
        if min(stamps) <= draft.now_bytes:
            thought.update(index for index, stamp in enumerate(stamps) if stamp <= draft.now_bytes)
    if len(thought) * PLAIN_RECORDS_MIN > count:
        _put_each(draft, job, request, topic, start, stop, part)
        return
    at = 0
    for index in sorted(thought):
        if at < index:
            _put_plain(draft, job, request, topic, expire_times[at:index], start + at, start + index, part)
        _put_each(draft, job, request, topic, start + index, start + index + 1, part)
        at = index + 1
    if at < count:
        _put_plain(draft, job, request, topic, expire_times[at:], start + at, stop, part)


def _expire_times(request: Publish, topic: Topic, now_micros: int, start: int, stop: int) -> list[int]:
    """The stamps of a slice of records; 0 where the lifetime is refused."""

    def stamp(lifetime: Lifetime) -> int:
        try:
            return lifetimes.expire_time(topic.settings, lifetime, now_micros)
        except LifetimeError:
            return 0

    common = stamp(request.lifetime)
    if request.lifetimes is None:
        return [common] * (stop - start)
    given = request.lifetimes[start:stop]
    if (stamps_alike := _stamps_of_one_kind(topic, given, now_micros)) is not None:
        return stamps_alike
    # Publishers use few different lifetimes, so each is worked out once.
    stamps = {lifetime: stamp(lifetime) for lifetime in set(given) if lifetime.kind is not LifetimeKind.ABSENT}
    return [stamps.get(lifetime, common) for lifetime in given]


def _stamps_of_one_kind(topic: Topic, given: Sequence[Lifetime], now_micros: int) -> list[int] | None:
    """The stamps of lifetimes that are all ttls, or all expire times, and none of them refused; None for others.

    A lifetime column often has another one for each record. A stamp rises with its lifetime, so the shortest and the
    longest tell whether any is refused or bounded, and the rest is an addition.
    """
    kinds = list(map(_KIND, given))
    kind = kinds[0]
    # By identity: to hash a member of an enumeration, as a set does, runs Python.
    if kind not in (LifetimeKind.TTL, LifetimeKind.EXPIRE_TIME) or kinds.count(kind) != len(kinds):
        return None
    micros = list(map(_MICROS, given))
    base = now_micros if kind is LifetimeKind.TTL else 0
    shortest, longest = min(micros), max(micros)
    try:
        low = lifetimes.expire_time(topic.settings, Lifetime(kind, shortest), now_micros)
        high = lifetimes.expire_time(topic.settings, Lifetime(kind, longest), now_micros)
    except LifetimeError:
        return None
    if low == base + shortest and high == base + longest:
        return [base + value for value in micros]
    return [min(max(base + value, low), high) for value in micros]


_KIND: Final = itemgetter(0)
_MICROS: Final = itemgetter(1)


def _put_plain(
    draft: Draft,
    job: Job,
    request: Publish,
    topic: Topic,
    expire_times: list[int],
    start: int,
    stop: int,
    part: Slice,
) -> None:
    """The hot path: unconditional puts with expire times ahead, over nothing overdue. Publishing is as fast as this.

    It does to each record what `Draft.put` does, column by column instead of record by record, so that the interpreter
    runs a few bytecodes a record and C the rest; the property tests hold the two together.
    """
    keys, payloads, store_keys = job.keys[start:stop], request.payloads[start:stop], job.store_keys[start:stop]
    count, version, sequence = stop - start, draft.next_version, draft.next_sequence
    alike = min(expire_times) == max(expire_times)
    expire_bytes = [i64(expire_times[0])] * count if alike else list(map(i64, expire_times))
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
    draft.put_all(
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
    part.last_version, part.last_sequence = version + count - 1, sequence + count - 1
    if part.first_sequence is not None:
        stamp = expire_times[0] if alike else SEVERAL
        part.runs.append(Run(part.first_sequence + start, count, version, sequence, stamp))


def _put_each(draft: Draft, job: Job, request: Publish, topic: Topic, start: int, stop: int, part: Slice) -> None:
    """Puts record by record: conditions, lifetimes of their own, kept stamps, deltas, results."""
    for index in range(start, stop):
        key = job.keys[index]
        result: Result
        if isinstance(key, BadRecord):
            result = Refusal(index, key.reason, key.message)
        else:
            lifetime = request.lifetime
            if request.lifetimes is not None and request.lifetimes[index].kind is not LifetimeKind.ABSENT:
                lifetime = request.lifetimes[index]
            condition = None if request.conditions is None else request.conditions[index]
            result = _put_one(
                draft, topic, index, key, request.payloads[index], lifetime, request.ttl_mode, condition, job.delta
            )
        _add(part, result)
        if part.first_sequence is not None and isinstance(result, Applied):
            run = Run(part.first_sequence + index, 1, result.version, result.sequence, result.expire_time_micros)
            if not (part.runs and part.runs[-1].grow(run)):
                part.runs.append(run)


def _put_one(
    draft: Draft,
    topic: Topic,
    index: int,
    key: bytes,
    payload: bytes,
    lifetime: Lifetime,
    ttl_mode: TtlMode,
    condition: Condition | None,
    delta: Delta | None,
) -> Result:
    store_key = topic.prefix + key
    try:
        expire_time = lifetimes.expire_time(topic.settings, lifetime, draft.now)
    except LifetimeError as error:
        return Refusal(index, error.reason, error.message)
    head = draft.live_head(topic, key, store_key)
    if condition is not None and (failed := _failed(condition, head, index)) is not None:
        return failed
    if delta is not None and head is not None:
        merged = topic.format.merge(draft.body(store_key), payload, delta.unset)
        if isinstance(merged, BadRecord):
            return Refusal(index, merged.reason, merged.message)
        if len(merged) > delta.payload_bytes_max:
            return Refusal(
                index,
                Reason.PAYLOAD_TOO_LARGE,
                f"payload: merged into the record it has {len(merged)} bytes, more than the limit of"
                f" {delta.payload_bytes_max}",
            )
        payload = merged
    if ttl_mode is TtlMode.KEEP and head is not None:
        expire_time = read_header(head).expire_time_micros
    due = topic.acts and expire_time <= draft.now
    version, sequence = draft.put(
        topic,
        key,
        store_key,
        head,
        payload,
        change=PUT,
        publish_time=draft.now,
        expire_time=expire_time,
        expire_due=not due,
    )
    delivered = None
    if due:
        value = draft.value(store_key)
        delivered = draft.part(HandOver).takers(topic, key, value)
        draft.expire(topic, key, store_key, value[HEADER], letters=not delivered)
    ignored = _ttl_ignored(topic, lifetime)
    return Applied(key.decode(), version, expire_time, sequence, ttl_ignored=ignored, delivered=delivered)


class HandOver:
    """Hands records that are due at once to attached subscribers, in a bounded part of one commit's time (rule L7)."""

    __slots__ = ("_seconds",)

    def __init__(self) -> None:
        self._seconds = TAKING_SECONDS_MAX

    def takers(self, topic: Topic, key: bytes, value: bytes) -> int:
        """How many attached subscribers a record is for; those that were not asked in time do not count."""
        if topic.takers is None or self._seconds <= 0:
            return 0
        begin = time.perf_counter()
        try:
            return topic.takers(key, value, begin + self._seconds)
        finally:
            self._seconds -= time.perf_counter() - begin


def _stage_touch(draft: Draft, job: Job, request: Touch, topic: Topic, count: int) -> Slice:
    part = Slice(count)
    draft.fetch_bodies(store_keys(job, count))
    for index in range(job.position, job.position + count):
        key = job.keys[index]
        if isinstance(key, BadRecord):
            _add(part, Refusal(index, key.reason, key.message))
        else:
            _add(part, _touch_one(draft, topic, index, key, request.lifetime, request.condition))
    return part


def _touch_one(
    draft: Draft, topic: Topic, index: int, key: bytes, lifetime: Lifetime, condition: Condition | None
) -> Result:
    store_key = topic.prefix + key
    try:
        expire_time = lifetimes.expire_time(topic.settings, lifetime, draft.now)
    except LifetimeError as error:
        return Refusal(index, error.reason, error.message)
    head = draft.live_head(topic, key, store_key)
    if head is None:
        return Refusal(index, Reason.RECORD_NOT_FOUND, f"key: there is no live record {_shown(key)}")
    if condition is not None and (failed := _failed(condition, head, index)) is not None:
        return failed
    version, sequence = draft.put(
        topic,
        key,
        store_key,
        head,
        draft.body(store_key),
        change=TOUCH,
        publish_time=read_header(head).publish_time_micros,
        expire_time=expire_time,
    )
    return Applied(key.decode(), version, expire_time, sequence, ttl_ignored=_ttl_ignored(topic, lifetime))


def _stage_delete(
    draft: Draft, job: Job, request: Delete, topic: Topic, count: int, publishers: PublisherCache
) -> Slice:
    """Deletes; a key without a live record, or with one that is not meant, does not match: no refusal (rule D2)."""
    part = Slice(count)
    if (position := request.publisher) is not None:
        found = draft.publishers.get(position.publisher_id) or publishers.find(position.publisher_id)
        found.check_acting(position)
    draft.fetch_bodies(store_keys(job, count))
    for index in range(job.position, job.position + count):
        key = job.keys[index]
        if isinstance(key, BadRecord):
            continue
        store_key = topic.prefix + key
        head = draft.live_head(topic, key, store_key)
        if head is not None and (request.matches is None or request.matches(key, draft.value(store_key))):
            part.last_sequence = draft.delete(topic, key, store_key, head)
            part.applied += 1
    return part


def _stage_restamp(draft: Draft, job: Job, request: Restamp, topic: Topic, count: int) -> Slice:
    """Restamps; records that are not meant, or have that lifetime already, are left alone (rule L13)."""
    part = Slice(count)
    try:
        stamp = lifetimes.restamp_time(topic.settings, request.mode, request.lifetime, draft.now)
    except LifetimeError as error:
        raise StoreError(error.reason, error.message, field="lifetime") from None
    draft.fetch_bodies(store_keys(job, count))
    for index in range(job.position, job.position + count):
        key = job.keys[index]
        if isinstance(key, BadRecord):
            continue
        store_key = topic.prefix + key
        head = draft.live_head(topic, key, store_key)
        if head is None or not (request.matches is None or request.matches(key, draft.value(store_key))):
            continue
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


def _failed(condition: Condition, head: bytes | None, index: int) -> Refusal | None:
    """Why a condition does not hold; None when it does (rule P3)."""
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


def _ttl_ignored(topic: Topic, lifetime: Lifetime) -> bool:
    return topic.settings.expiration is Expiration.DISABLED and lifetime.kind is not LifetimeKind.ABSENT


def _add(part: Slice, result: Result) -> None:
    part.results.append(result)
    if isinstance(result, Refusal):
        part.refusals.append(result)
    else:
        part.applied += 1
        part.last_version, part.last_sequence = result.version, result.sequence


def _shown(key: bytes) -> str:
    text = key.decode()
    return repr(text if len(text) <= 80 else text[:77] + "…")


_NEVER_BYTES: Final = i64(NEVER)
TAKING_SECONDS_MAX: Final = 0.05
"""Of one commit: asking filters to whom records that are due at once are handed. The writer does nothing else
meanwhile."""
PLAIN_RECORDS_MIN: Final = 8
"""Going column by column has a price of its own, which this many records earn back."""
UNSET_PATHS_MAX: Final = 1000
UNSET_CHARACTERS_MAX: Final = 64 << 10
"""Of all paths of a request together: they are taken apart in the writer's thread."""
FETCH_LATER: Final = (Touch, Delete, Restamp)
"""Requests that read whole records, not just heads."""
