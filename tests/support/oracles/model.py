"""The guarantees of the store, on plain dicts: the oracle of the random tests.

Written from the rules, not from the engine: it shares the engine's vocabulary (requests, settings, reasons) and none of
its logic. The model knows the *stored* records, also overdue ones; `live` is the part that a reader may see.

Versions are known by their order only: a record's `version` is None until the test has read it from the store.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from sow_server.engine.stored import record
from sow_server.engine.values.errors import Reason
from sow_server.engine.values.model import (
    ABSENT,
    NEVER,
    PERMANENT,
    TTL_MAX_MICROS,
    Applied,
    Condition,
    ConditionKind,
    Delete,
    Expiration,
    Lifetime,
    LifetimeKind,
    Outcome,
    Publish,
    Refusal,
    Request,
    Restamp,
    RestampMode,
    TopicSettings,
    Touch,
    TouchOnly,
    TtlMode,
)
from tests.support.oracles.model_documents import derived_key, keys_of, merged, refused_delta


class Change(NamedTuple):
    """One journaled change, as far as the model can foretell it."""

    kind: str
    key: bytes
    payload: bytes
    publish_time_micros: int
    expire_time_micros: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """A filter in Python, which may also read the model's metadata of a record."""

    remainder: int
    """Records of a payload with so many bytes, modulo 3."""
    expires_before: int
    """And with a stamp before this."""

    def means(self, payload: bytes, expire_time_micros: int) -> bool:
        """Whether a record is meant."""
        return len(payload) % 3 == self.remainder and expire_time_micros < self.expires_before

    def __call__(self, key: bytes, value: bytes) -> bool:
        """As the writer asks it (`RecordMatcher`)."""
        found = record(key, value)
        return self.means(found.payload, found.expire_time_micros)


@dataclass(slots=True)
class ModelRecord:
    """A stored record; `order` rises with every version that is minted."""

    payload: bytes
    publish_time_micros: int
    expire_time_micros: int
    order: int
    version: int | None = None


@dataclass(slots=True)
class ModelTopic:
    """A topic: its stored records, and its retained journal."""

    settings: TopicSettings
    records: dict[bytes, ModelRecord] = field(default_factory=dict)
    journal: list[Change] = field(default_factory=list)

    @property
    def acts(self) -> bool:
        """Whether stamps make records expire."""
        return self.settings.expiration is not Expiration.DISABLED

    def overdue(self, now: int) -> dict[bytes, ModelRecord]:
        """Stored records that must not be seen."""
        if not self.acts:
            return {}
        return {key: kept for key, kept in self.records.items() if kept.expire_time_micros <= now}

    def live(self, now: int) -> dict[bytes, ModelRecord]:
        """Records that a reader may see."""
        overdue = self.overdue(now)
        return {key: kept for key, kept in self.records.items() if key not in overdue}

    def remove(self, key: bytes, kind: str) -> None:
        """Deletes or expires a record."""
        gone = self.records.pop(key)
        self._journal(kind, key, gone)

    def put(self, key: bytes, kind: str, new: ModelRecord) -> None:
        """Puts or touches a record."""
        self.records[key] = new
        self._journal(kind, key, new)

    def _journal(self, kind: str, key: bytes, what: ModelRecord) -> None:
        if self.settings.journal:
            self.journal.append(Change(kind, key, what.payload, what.publish_time_micros, what.expire_time_micros))


@dataclass(slots=True)
class ModelPublisher:
    """The memory of a publisher."""

    epoch: int = 0
    highest: int = 0
    refusals: dict[int, Refused] = field(default_factory=dict)
    unit: int = 0
    """The last one that is finished."""
    unit_records: int = 0
    open_unit: int = 0
    open_records: int = 0
    ever_refused: set[int] = field(default_factory=set)
    """The sequences that were, for ever."""
    removed: set[int] = field(default_factory=set)
    """The sequences of removals that have deleted a record."""


class Accepted(NamedTuple):
    """A record that is to be applied, or is known to have been."""

    key: bytes
    expire_time_micros: int
    ttl_ignored: bool = False
    duplicate: bool = False
    removed: bool = False
    """A removal that deletes, or has deleted, a record (rule P11)."""


class Refused(NamedTuple):
    """A record that is to be refused; a `current_version` of None is one that the model does not know yet."""

    reason: Reason
    current_version: int | None = 0


@dataclass(slots=True)
class Expected:
    """The expected answer to a request: refused as a whole, or record by record."""

    refused: Reason | None = None
    results: list[Accepted | Refused] = field(default_factory=list)
    changed: int = 0
    """Records that a delete or a restamp changes: it has no results."""

    def check(self, outcome: Outcome) -> None:
        """Asserts that an outcome says the same."""
        assert self.refused is None, f"the request was to be refused: {self.refused}"
        fresh = [result for result in self.results if isinstance(result, Accepted) and not result.duplicate]
        duplicates = [result for result in self.results if isinstance(result, Accepted) and result.duplicate]
        refused = [(index, result) for index, result in enumerate(self.results) if isinstance(result, Refused)]
        assert outcome.applied == len(fresh) + self.changed
        assert outcome.duplicates == len(duplicates)
        assert outcome.removed == sum(result.removed for result in fresh)
        assert [refusal.index for refusal in outcome.refusals] == [index for index, _ in refused]
        for refusal, (_, wanted) in zip(outcome.refusals, refused, strict=True):
            _check_refusal(refusal, wanted)
        if outcome.results is not None and not self.changed:
            assert len(outcome.results) == len(self.results)
            for index, (result, accepted) in enumerate(zip(outcome.results, self.results, strict=True)):
                if isinstance(accepted, Refused):
                    assert isinstance(result, Refusal)
                    assert result.index == index
                    _check_refusal(result, accepted)
                else:
                    assert isinstance(result, Applied)
                    assert (result.key.encode(), result.duplicate) == (accepted.key, accepted.duplicate)
                    if result.removed != accepted.removed:
                        assert accepted.duplicate
                        assert (result.version, result.removed) == (0, False), "forgotten, and no guess"
                    if not accepted.duplicate:
                        assert result.expire_time_micros == accepted.expire_time_micros
                        assert result.ttl_ignored == accepted.ttl_ignored


def _check_refusal(refusal: Refusal, wanted: Refused) -> None:
    assert refusal.reason is wanted.reason
    if wanted.current_version is not None:
        assert refusal.current_version == wanted.current_version


def stamp(settings: TopicSettings, lifetime: Lifetime, now: int) -> int | Reason:
    """The expire time that rules L2 to L5 and L18 give, or why the lifetime is refused."""
    kind, micros = lifetime
    if settings.expiration is Expiration.REJECT and kind is not LifetimeKind.ABSENT:
        return Reason.LIFETIME_REJECTED
    if kind in (LifetimeKind.TTL, LifetimeKind.EXPIRE_TIME):
        if micros < 0:
            return Reason.LIFETIME_NEGATIVE
        ttl = micros if kind is LifetimeKind.TTL else micros - now
        if ttl < -TTL_MAX_MICROS:
            return Reason.INVALID_ARGUMENT
        if ttl > TTL_MAX_MICROS:
            return Reason.LIFETIME_TOO_LONG
        wanted = now + ttl
    elif kind is LifetimeKind.ABSENT and settings.default_ttl_micros is not None:
        wanted = now + settings.default_ttl_micros
    else:
        wanted = NEVER
    if settings.expiration is Expiration.ENABLED:
        if settings.max_ttl_micros is not None:
            wanted = min(wanted, now + settings.max_ttl_micros)
        if settings.min_ttl_micros is not None:
            wanted = max(wanted, now + settings.min_ttl_micros)
    return wanted


class ModelStore:
    """All topics and publishers."""

    def __init__(
        self, *, outcomes_kept: int = 1000, payload_bytes_max: int = 2**20, merged_bytes_max: int = 2**25
    ) -> None:
        self._payload_bytes_max: Final = payload_bytes_max
        self._merged_bytes_max: Final = merged_bytes_max
        self.topics: dict[str, ModelTopic] = {}
        self.publishers: dict[str, ModelPublisher] = {}
        self._outcomes_kept: Final = outcomes_kept
        self._order = 0
        self._later: list[tuple[str, bytes, bytes]] | None = None
        """Dead letters that wait for the end of an atomic request: target, key, payload."""
        self._merged_bytes = 0
        """Of the records that the deltas of the present request were merged into."""

    # -- requests ---------------------------------------------------------------------------------------------------

    def apply(self, request: Request, now: int) -> Expected:
        """Does a request at `now`, and says how it is to be answered."""
        match request:
            case Publish():
                return self._publish(request, now)
            case Touch():
                return self._touch(request, now)
            case Delete():
                return self._delete(request, now)
            case Restamp():
                return self._restamp(request, now)

    def _publish(self, request: Publish, now: int) -> Expected:
        topic = self.topics[request.topic]
        if (refused := refused_delta(topic.settings, request)) is not None:
            return Expected(refused=refused)
        keys = keys_of(topic.settings, request) if request.payloads else []
        rewrites = request.delta or request.removals is not None
        is_large = rewrites and request.atomic and self._too_large(topic, keys)
        if is_large and not self._all_decided_before(request, len(keys)):
            return Expected(refused=Reason.ATOMIC_TOO_LARGE)
        expected = self._publish_keys(topic, request, keys, now)
        return Expected(refused=Reason.ATOMIC_TOO_LARGE) if is_large and expected.refused is not None else expected

    def _too_large(self, topic: ModelTopic, keys: Sequence[bytes | Reason]) -> bool:
        """Whether an atomic request names records of too many bytes. One that is named twice counts twice, and one that
        is overdue counts until it is removed (rules P2, L19)."""
        stored = [topic.records[key] for key in keys if isinstance(key, bytes) and key in topic.records]
        return len(keys) > 1 and sum(len(kept.payload) for kept in stored) > self._merged_bytes_max

    def _all_decided_before(self, request: Publish, count: int) -> bool:
        """Whether it is a retry: that has its answer however large the records have become (rule P6)."""
        if request.publisher is None:
            return False
        name, epoch, first = request.publisher[:3]
        publisher = self.publishers.get(name, ModelPublisher())
        return epoch == publisher.epoch and first + count - 1 <= publisher.highest

    def _publish_keys(self, topic: ModelTopic, request: Publish, keys: Sequence[bytes | Reason], now: int) -> Expected:
        publisher, first, unit, unit_done = ModelPublisher(), 1, 0, False
        if request.publisher is not None:
            name, epoch, first, unit, unit_done = request.publisher[:5]
            publisher = copy.deepcopy(self.publishers.get(name, ModelPublisher()))
            if epoch < publisher.epoch:
                return Expected(refused=Reason.PUBLISHER_FENCED)
            repeated = epoch == publisher.epoch and first + len(keys) - 1 <= publisher.highest
            if 0 < unit <= publisher.unit and not (repeated and (keys or unit == publisher.unit)):
                return Expected(refused=Reason.UNIT_DONE)
            if epoch > publisher.epoch:
                publisher = ModelPublisher(epoch, unit=publisher.unit, unit_records=publisher.unit_records)
            last_refused = max(publisher.ever_refused, default=0)
            forgotten = first <= last_refused <= publisher.highest - self._outcomes_kept
            if unit_done and unit > publisher.unit and forgotten:
                return Expected(refused=Reason.OUTCOME_UNKNOWN)
        before = copy.deepcopy(topic)
        self._merged_bytes = 0
        if request.atomic and len(keys) > 1:
            self._later = []
        decided_before = publisher.highest if request.publisher is not None else 0
        results: list[Accepted | Refused] = []
        for index, key in enumerate(keys):
            sequence = first + index
            if sequence <= decided_before:
                results.append(self._decided_before(publisher, decided_before, sequence, request, index, key))
                continue
            removes = request.removals is not None and request.removals[index]
            change = self._remove if removes else self._put
            results.append(change(topic, request, index, key, now))
        if request.atomic and len(keys) > 1 and self._merged_bytes > self._merged_bytes_max:
            self.topics[request.topic] = before
            self._later = None
            return Expected(refused=Reason.ATOMIC_TOO_LARGE)
        new = [result for index, result in enumerate(results) if first + index > decided_before]
        if request.atomic and any(isinstance(result, Refused) for result in new):
            if not all(isinstance(result, Refused) for result in new):
                self.topics[request.topic] = before
                self._later = None
            results = [
                result if isinstance(result, Refused) or result.duplicate else Refused(Reason.ATOMIC_ABORTED)
                for result in results
            ]
        later, self._later = self._later or [], None
        for letter in later:
            self._deliver(*letter, now)
        finishes = False
        if request.publisher is not None:
            if unit_done and unit > publisher.unit and not any(isinstance(result, Refused) for result in results):
                finishes = True
        if request.publisher is not None and (new or finishes):
            self._note_outcomes(publisher, first, decided_before, results)
            if unit != publisher.open_unit:
                publisher.open_unit, publisher.open_records = unit, 0
            publisher.open_records += sum(isinstance(result, Accepted) and not result.duplicate for result in results)
            if finishes:
                publisher.unit, publisher.unit_records = unit, publisher.open_records
            self.publishers[request.publisher.publisher_id] = publisher
        return Expected(results=results)

    def _note_outcomes(
        self, publisher: ModelPublisher, first: int, decided_before: int, results: list[Accepted | Refused]
    ) -> None:
        for index, result in enumerate(results):
            if first + index > decided_before and isinstance(result, Refused):
                publisher.refusals[first + index] = result
                publisher.ever_refused.add(first + index)
            elif first + index > decided_before and isinstance(result, Accepted) and result.removed:
                publisher.removed.add(first + index)
        publisher.highest = max(publisher.highest, first + len(results) - 1)
        oldest = publisher.highest - self._outcomes_kept
        publisher.refusals = {at: why for at, why in publisher.refusals.items() if at > oldest}

    def open_publisher(self, name: str, unit: int) -> tuple[int, bool, int]:
        """Begins an epoch: (epoch, whether the unit is finished, records of it)."""
        known = self.publishers.get(name, ModelPublisher())
        if 0 < unit <= known.unit:
            return known.epoch, True, known.unit_records if unit == known.unit else 0
        begun = ModelPublisher(known.epoch + 1, unit=known.unit, unit_records=known.unit_records)
        self.publishers[name] = begun
        return begun.epoch, False, 0

    def _decided_before(
        self,
        publisher: ModelPublisher,
        highest: int,
        sequence: int,
        request: Publish,
        index: int,
        key: bytes | Reason,
    ) -> Accepted | Refused:
        if sequence in publisher.refusals:
            return publisher.refusals[sequence]
        conditional = request.atomic or (request.conditions is not None and request.conditions[index] is not None)
        if conditional and sequence <= highest - self._outcomes_kept:
            return Refused(Reason.OUTCOME_UNKNOWN)
        if isinstance(key, Reason):
            return Refused(key)
        return Accepted(key, NEVER, duplicate=True, removed=sequence in publisher.removed)

    def _remove(
        self, topic: ModelTopic, request: Publish, index: int, key: bytes | Reason, now: int
    ) -> Accepted | Refused:
        """A removal (rule P11)."""
        if isinstance(key, Reason):
            return Refused(key)
        current = self._live(topic, key, now)
        condition = None if request.conditions is None else request.conditions[index]
        if (failed := _failed(condition, current)) is not None:
            return failed
        if current is not None:
            topic.remove(key, "delete")
        return Accepted(key, NEVER, removed=current is not None)

    def _put(
        self, topic: ModelTopic, request: Publish, index: int, key: bytes | Reason, now: int
    ) -> Accepted | Refused:
        if isinstance(key, Reason):
            return Refused(key)
        lifetime = request.lifetime
        if request.lifetimes is not None and request.lifetimes[index].kind is not LifetimeKind.ABSENT:
            lifetime = request.lifetimes[index]
        expire_time = stamp(topic.settings, lifetime, now)
        if isinstance(expire_time, Reason):
            return Refused(expire_time)
        current = self._live(topic, key, now)
        condition = None if request.conditions is None else request.conditions[index]
        if (failed := _failed(condition, current)) is not None:
            return failed
        payload = request.payloads[index]
        if request.delta and current is not None:
            self._merged_bytes += len(current.payload)
            payload = merged(current.payload, payload, request.unset_paths)
            if len(payload) > self._payload_bytes_max:
                return Refused(Reason.PAYLOAD_TOO_LARGE)
        if request.ttl_mode is TtlMode.KEEP and current is not None:
            expire_time = current.expire_time_micros
        if request.ttl_mode is TtlMode.EXTEND and current is not None and current.expire_time_micros > expire_time:
            expire_time = current.expire_time_micros
        topic.put(key, "put", ModelRecord(payload, now, expire_time, self._next()))
        self._expire_if_due(topic, key, now)
        return Accepted(key, expire_time, ttl_ignored=_ignored(topic, lifetime))

    def _touch(self, request: Touch, now: int) -> Expected:
        topic = self.topics[request.topic]
        if request.atomic and self._too_large(topic, [text.encode() for text in request.keys]):
            return Expected(refused=Reason.ATOMIC_TOO_LARGE)
        before = copy.deepcopy(topic)
        if request.atomic and len(request.keys) > 1:
            self._later = []
        results: list[Accepted | Refused] = []
        for index, text in enumerate(request.keys):
            key = text.encode()
            expire_time = stamp(topic.settings, request.lifetime, now)
            if isinstance(expire_time, Reason):
                results.append(Refused(expire_time))
                continue
            current = self._live(topic, key, now)
            if current is None:
                results.append(Refused(Reason.RECORD_NOT_FOUND))
            elif (failed := _failed(_condition_of(request, index), current)) is not None:
                results.append(failed)
            elif not _to_touch(request, current, expire_time, now):
                results.append(Refused(Reason.CONDITION_FAILED, current.version))
            else:
                touched = ModelRecord(current.payload, current.publish_time_micros, expire_time, self._next())
                topic.put(key, "touch", touched)
                self._expire_if_due(topic, key, now)
                results.append(Accepted(key, expire_time, ttl_ignored=_ignored(topic, request.lifetime)))
        refused = [result for result in results if isinstance(result, Refused)]
        if request.atomic and 0 < len(refused) < len(results):
            self.topics[request.topic] = before
            self._later = None
            results = [result if isinstance(result, Refused) else Refused(Reason.ATOMIC_ABORTED) for result in results]
        later, self._later = self._later or [], None
        for letter in later:
            self._deliver(*letter, now)
        return Expected(results=results)

    def _delete(self, request: Delete, now: int) -> Expected:
        topic = self.topics[request.topic]
        if request.payload is not None:
            derived = derived_key(topic.settings, request.payload)
            if isinstance(derived, Reason):
                return Expected(refused=derived)
            keys: Sequence[bytes] = [derived]
        else:
            keys = [key if isinstance(key, bytes) else key.encode() for key in request.keys or ()]
        deleted = 0
        for key in keys:
            current = self._live(topic, key, now)
            if current is not None and _meant(request.matches, current):
                topic.remove(key, "delete")
                deleted += 1
        return Expected(changed=deleted)

    def _restamp(self, request: Restamp, now: int) -> Expected:
        topic = self.topics[request.topic]
        if request.mode is not RestampMode.CLEAR:
            wanted = stamp(topic.settings, request.lifetime, now)
        elif topic.settings.expiration is Expiration.REJECT:
            wanted = NEVER
        else:
            wanted = stamp(topic.settings, PERMANENT, now)
        if isinstance(wanted, Reason):
            return Expected(refused=wanted)
        changed = 0
        for text in request.keys:
            key = text if isinstance(text, bytes) else text.encode()
            current = self._live(topic, key, now)
            if current is None or not _meant(request.matches, current):
                continue
            lowered = min(wanted, current.expire_time_micros)
            expire_time = lowered if request.mode is RestampMode.CAP else wanted
            if expire_time != current.expire_time_micros:
                restamped = ModelRecord(current.payload, current.publish_time_micros, expire_time, self._next())
                topic.put(key, "touch", restamped)
                self._expire_if_due(topic, key, now)
                changed += 1
        return Expected(changed=changed)

    def _live(self, topic: ModelTopic, key: bytes, now: int) -> ModelRecord | None:
        """The live record of a key that a write meets; an overdue one is expired first (rule L10)."""
        self._expire_if_due(topic, key, now)
        return topic.records.get(key)

    def _expire_if_due(self, topic: ModelTopic, key: bytes, now: int) -> None:
        if key not in topic.overdue(now):
            return
        payload = topic.records[key].payload
        topic.remove(key, "expire")
        target = topic.settings.dead_letter
        if self._later is not None and target:
            self._later.append((target, key, payload))
        elif target:
            self._deliver(target, key, payload, now)

    def _deliver(self, target: str, key: bytes, payload: bytes, now: int) -> None:
        """A dead letter arrives (rule T3): under the key that the record had, and with its payload as it was, which is
        all that the tests ask for."""
        self._expire_if_due(self.topics[target], key, now)
        self.put_letter(target, key, payload, now)
        self._expire_if_due(self.topics[target], key, now)

    def put_letter(self, target: str, key: bytes, payload: bytes, now: int) -> None:
        """Puts a dead letter over the existing record."""
        topic = self.topics[target]
        expire_time = stamp(topic.settings, ABSENT, now)
        assert isinstance(expire_time, int), "no lifetime is never refused"
        topic.put(key, "put", ModelRecord(payload, now, expire_time, self._next()))

    def _next(self) -> int:
        self._order += 1
        return self._order


def _meant(matches: object, current: ModelRecord) -> bool:
    assert matches is None or isinstance(matches, Wanted), "the tests use filters that the model understands"
    return matches is None or matches.means(current.payload, current.expire_time_micros)


def _failed(condition: Condition | None, current: ModelRecord | None) -> Refused | None:
    if condition is None:
        return None
    holds = {
        ConditionKind.IF_ABSENT: current is None,
        ConditionKind.IF_PRESENT: current is not None,
        ConditionKind.IF_VERSION: current is not None and current.version == condition.version,
    }
    if holds[condition.kind]:
        return None
    return Refused(Reason.CONDITION_FAILED, 0 if current is None else current.version)


def _condition_of(request: Touch, index: int) -> Condition | None:
    return (
        request.condition if request.versions is None else Condition(ConditionKind.IF_VERSION, request.versions[index])
    )


def _to_touch(request: Touch, current: ModelRecord, expire_time: int, now: int) -> bool:
    """Rules L19 and L20. A record that never expires has an endless stamp, and endless time left."""
    before, after = (math.inf if at == NEVER else at for at in (current.expire_time_micros, expire_time))
    if request.below_micros is not None:
        below = math.inf if request.below_micros == NEVER else request.below_micros
        every = request.below_micros > NEVER
        if not every and before - now >= below:
            return False
    return {
        None: True,
        TouchOnly.LATER: after > before,
        TouchOnly.EARLIER: after < before,
        TouchOnly.WITHOUT: before == math.inf,
        TouchOnly.WITH: before < math.inf,
    }[request.only]


def _ignored(topic: ModelTopic, lifetime: Lifetime) -> bool:
    return topic.settings.expiration is Expiration.DISABLED and lifetime.kind is not LifetimeKind.ABSENT
