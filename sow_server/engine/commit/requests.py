"""Requests on their way through the writer: checking them, deriving their keys, and collecting their outcome.

A `Job` is a request in the writer's hands, perhaps over several commits. Each commit stages one slice of it and gives a
`Slice`, whose outcome the writer merges only after the commit: a commit that fails changes no job.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import not_
from typing import Final, NamedTuple

from sow_server.engine.catalog.indexes import ENTRIES_MAX, entries_count, may_have_more
from sow_server.engine.catalog.topics import UNDELIVERED_ID, Topic, check_name
from sow_server.engine.commit.publishers import AnsweredRun
from sow_server.engine.formats.deltas import LEVELS_MAX
from sow_server.engine.formats.paths import PathTree, path_tree
from sow_server.engine.formats.payloads import BadRecord, KeyColumn
from sow_server.engine.formats.topic_formats import check_flat
from sow_server.engine.pending import Pending
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.keys import parse_path, path_text, wrong_parts
from sow_server.engine.values.model import (
    NEVER,
    Applied,
    Caps,
    Delete,
    MessageType,
    Outcome,
    Publish,
    Refusal,
    Request,
    Restamp,
    TopicSettings,
    Touch,
)
from sow_server.engine.values.turns import CALLER
from sow_server.engine.values.views import view_read_only


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits of rule K8."""

    payload_bytes_max: int = 2**20
    key_bytes_max: int = 1024
    request_records_max: int = 10_000
    request_bytes_max: int = 16 * 2**20
    atomic_records_max: int = 1000
    index_entries_max: int = ENTRIES_MAX
    """The most index entries of one record."""
    atomic_entries_max: int = 50_000
    """The most index entries of the records with arrays of an atomic request. Two commits cannot share such a
    request."""


Result = Applied | Refusal


@dataclass(slots=True, eq=False)
class Slice:
    """The part of a job in one commit, written or dropped."""

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
    runs: list[AnsweredRun] = field(default_factory=list)
    """The applied records, for the memory of the publisher."""
    ignored: int = 0
    """The applied records with a lifetime that the topic does not act on (rule L3)."""
    removed: int = 0
    """The applied removals that have deleted a record (rule P11)."""
    unchanged: int = 0
    """The applied removals that have found none."""

    def add(self, result: Result) -> None:
        """Adds the result of one record."""
        self.results.append(result)
        if isinstance(result, Refusal):
            self.refusals.append(result)
        else:
            self.applied += 1
            if result.version:
                self.last_version, self.last_sequence = result.version, result.sequence
                self.removed += result.removed
            else:
                self.unchanged += 1
            self.ignored += result.ttl_ignored and result.expire_time_micros != NEVER


class Delta(NamedTuple):
    """How the payloads of a delta publish are merged (rule P2)."""

    unset: PathTree
    payload_bytes_max: int
    index_entries_max: int


class AtomicAborted(Exception):
    """A record of an atomic request was refused: nothing of the draft may be written."""

    def __init__(self, refusals: list[Refusal]) -> None:
        super().__init__()
        self.refusals = refusals


class Job:
    """A request in the writer's hands. `keys` is complete once `prepare` has run."""

    __slots__ = (
        "all_have_keys",
        "alone",
        "answered",
        "caller",
        "caps",
        "delta",
        "entries",
        "keys",
        "looked_up",
        "outcome",
        "pending",
        "position",
        "record_micros",
        "refused",
        "request",
        "settings",
        "size",
        "store_keys",
        "swept_micros",
        "topic",
        "whole",
    )

    def __init__(self, request: Request) -> None:
        self.request = request
        self.pending: Final[Pending[Outcome]] = Pending()
        self.caller: Final = CALLER.get()
        self.topic: Topic | None = None
        self.settings: TopicSettings | None = None
        """Those of the topic when `prepare` ran: with others the keys may be others."""
        self.keys: KeyColumn = []
        self.store_keys: list[bytes] = []
        """topic ‖ record key, in the order of `keys`; empty for a record without a key."""
        self.all_have_keys = True
        self.delta: Delta | None = None
        self.caps: Caps | None = None
        """The caps that hold for its records, once `prepare` has run (caps [5])."""
        self.swept_micros: int | None = 0
        """The time up to which overdue records are swept before it is refused; 0: none has stood in its way, None: they
        cannot be swept now."""
        self.entries: dict[int, int] = {}
        """The index entries of the records that may have many, by their position."""
        self.position = 0
        self.answered = False
        self.refused: StoreError | None = None
        """Why all its records that are left are to be refused; None: they are not."""
        self.record_micros = 0.0
        """The estimated work on a record; 0: not estimated yet."""
        self.looked_up = False
        """True if the heads of its next records have been looked up, because its work depends on them."""
        self.alone = False
        """True if the job needs a separate commit, because undoing an atomic request undoes the whole commit."""
        self.whole = False
        """True if all its records are decided in one commit, although each stands alone."""
        if isinstance(request, Publish):
            self.alone = request.atomic and len(request.payloads) > 1
        elif isinstance(request, Touch):
            self.alone = request.atomic and len(request.keys) > 1
            self.whole = request.below_micros is not None
        self.size = sum(map(len, request.payloads)) if isinstance(request, Publish) else 0
        """Bytes of payload, for the bounds on requests and on the queue."""
        self.outcome = Outcome(durability=request.durability)
        if not isinstance(request, Publish) or request.want_results:
            self.outcome.results = []

    @property
    def is_part(self) -> bool:
        """True if the job is a part of a longer change, by filter or of a whole topic."""
        return isinstance(self.request, Delete | Restamp) and self.request.topic_id is not None

    @property
    def left(self) -> int:
        """Records not yet decided."""
        return len(self.keys) - self.position

    def merge(self, part: Slice) -> None:
        """Merges the result of a commit."""
        outcome = self.outcome
        self.swept_micros = 0
        self.position += part.count
        outcome.applied += part.applied
        outcome.duplicates += part.duplicates
        outcome.ttls_ignored += part.ignored
        outcome.removed += part.removed
        outcome.refusals += part.refusals
        outcome.last_version = part.last_version or outcome.last_version
        outcome.last_sequence = part.last_sequence or outcome.last_sequence
        if part.duplicates:
            outcome.last_duplicate_version = part.last_duplicate_version
            outcome.last_duplicate_sequence = part.last_duplicate_sequence
        if outcome.results is not None:
            outcome.results += part.results


# --- preparing -------------------------------------------------------------------------------------------------------


def prepare(job: Job, topic: Topic, limits: RequestLimits) -> None:
    """Checks a request against its topic and the limits, and derives its keys. Raises StoreError."""
    request = job.request
    job.topic, job.settings, job.record_micros, job.caps = topic, topic.settings, 0.0, topic.caps
    if topic.id == UNDELIVERED_ID and not isinstance(request, Delete):
        check_name(topic.name)
    if topic.view is not None:
        raise view_read_only(topic.name)
    match request:
        case Publish():
            check_size(request, job.size, limits)
            job.delta = _delta(request, topic, limits) if request.delta or request.unset_paths else None
            if request.payloads:  # otherwise it only ends a unit
                job.keys = _publish_keys(request, topic)
                _check_lengths(job.keys, request.payloads, limits)
                job.entries = _check_entries(job, request, topic, limits) if topic.indexes.all else {}
        case Touch():
            job.keys = _given_keys(request.keys, limits)
            if request.atomic:
                check_atomic(len(job.keys), limits, "keys")
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
    if job.all_have_keys:
        job.store_keys = list(map(prefix.__add__, job.keys))  # type: ignore[arg-type]  # they are keys
    else:
        job.store_keys = [prefix + key if type(key) is bytes else b"" for key in job.keys]


def check_size(request: Publish, size: int, limits: RequestLimits) -> None:
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
    if request.atomic:
        check_atomic(count, limits, "payload")


def check_atomic(count: int, limits: RequestLimits, field: str) -> None:
    """Raises StoreError for more records than may be changed together."""
    if count > limits.atomic_records_max:
        raise StoreError(
            Reason.ATOMIC_TOO_LARGE,
            f"{field}: {count} records are more than the limit of {limits.atomic_records_max} per atomic request",
            field=field,
        )


def payload_key(topic: Topic, payload: bytes) -> bytes:
    """The record key of the record that a delete selects by its payload (rule D1). Raises StoreError."""
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
    """Raises StoreError TOPIC_NOT_FOUND for keys that were found in a topic that was removed."""
    if topic_id is not None and topic_id != topic.id:
        raise StoreError(
            Reason.TOPIC_NOT_FOUND, f"topic: {topic.name} was deleted meanwhile, this is another one", field="topic"
        )


def _delta(request: Publish, topic: Topic, limits: RequestLimits) -> Delta:
    """How the payloads are merged. Raises StoreError naming the path at fault."""
    paths = request.unset_paths

    def refuse(reason: Reason, message: str) -> StoreError:
        return StoreError(reason, f"unset_paths: {message}", field="unset_paths")

    if not request.delta:
        raise refuse(Reason.INVALID_ARGUMENT, "have a meaning only with delta")
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
    return Delta(path_tree(unset), limits.payload_bytes_max, limits.index_entries_max)


def _encoded_otherwise(request: Publish, topic: Topic) -> BadRecord | None:
    """Documents that were encoded for another type or separator: the topic was made anew. The payload may well be
    malformed in no way: a JSON text with an `=` is a field of nvfix."""
    settings = topic.settings
    has_separator = settings.message_type in (MessageType.FIX, MessageType.NVFIX)
    form = settings.message_type.value + (settings.separator.decode("latin-1") if has_separator else "")
    if request.encoded_as == form:
        return None
    return BadRecord(
        Reason.PAYLOAD_MALFORMED,
        f"payload: the document was encoded as {request.encoded_as[:20]!r}, and topic {topic.name} takes {form!r}, "
        "perhaps since it was made anew: publish the document again",
    )


def _publish_keys(request: Publish, topic: Topic) -> KeyColumn:
    if request.encoded_as and (bad := _encoded_otherwise(request, topic)) is not None:
        return [bad] * len(request.payloads)
    if request.removals is not None:
        return _keys_with_removals(request, topic, request.removals)
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
            f"key: topic {topic.name} has no key fields, so every record needs a key; "
            "a topic can be given key fields while it has no records",
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


def _keys_with_removals(request: Publish, topic: Topic, removals: Sequence[bool]) -> KeyColumn:
    """The keys of records of which some are removals: these may have a key of their own on every topic (rule P11)."""
    payloads, key_fields = request.payloads, topic.settings.key
    given = request.keys or [""] * len(payloads)
    by_key = [bool(key) and removes for key, removes in zip(given, removals, strict=True)]
    of_removals = iter(_keys_of_removals(list(compress(given, by_key)), list(compress(payloads, by_key)), key_fields))
    rest = list(map(not_, by_key))
    documents, names = list(compress(payloads, rest)), list(compress(given, rest))
    own: Sequence[bytes | BadRecord | None]
    own = list(map(topic.format.check, documents)) if topic.derive_keys is None else topic.derive_keys(documents)
    if topic.derive_keys is None or any(names):
        own = [_key_of_document(key, found, key_fields, topic) for key, found in zip(names, own, strict=True)]
    of_documents: Iterator[bytes | BadRecord] = iter(own)  # type: ignore[arg-type]  # each has a key now, or a fault
    return [next(of_removals) if keyed else next(of_documents) for keyed in by_key]


def _keys_of_removals(keys: Sequence[str], payloads: Sequence[bytes], key_fields: Sequence[str]) -> KeyColumn:
    """The keys of removals that have one of their own."""
    joined = "".join(keys)
    if len(key_fields) < 2 and joined.isascii() and "|" not in joined and "\\" not in joined and not any(payloads):
        return list(map(str.encode, keys))  # as below, in a tenth of the time
    found: KeyColumn = []
    for key, payload in zip(keys, payloads, strict=True):
        if payload:
            found.append(BadRecord(Reason.INVALID_ARGUMENT, "payload: a removal has a key or a document, not both"))
        elif (key.count("|") != len(key_fields) - 1 or "\\" in key) and (wrong := wrong_parts(key_fields, key)):
            found.append(BadRecord(Reason.INVALID_ARGUMENT, f"key: {wrong}"))
        else:
            found.append(_encode_key(key))
    return found


def _key_of_document(
    key: str, own: bytes | BadRecord | None, key_fields: Sequence[str], topic: Topic
) -> bytes | BadRecord:
    """The key of a record with a document, beside removals. `own`: the one that the document gives, or its fault."""
    if key and key_fields:
        message = f"key: topic {topic.name} derives its keys from {', '.join(key_fields)}"
        return BadRecord(Reason.KEY_NOT_ALLOWED, message)
    if own is not None:
        return own
    return _encode_key(key) if key else BadRecord(Reason.KEY_REQUIRED, "key: is empty")


def _encode_key(key: str | bytes) -> bytes | BadRecord:
    if isinstance(key, bytes):
        return key
    try:
        return key.encode()
    except UnicodeEncodeError:
        return BadRecord(Reason.KEY_NOT_UTF8, "key: is not well-formed Unicode")


def _given_keys(keys: Sequence[str] | Sequence[str | bytes], limits: RequestLimits) -> KeyColumn:
    if not keys:
        raise StoreError(Reason.INVALID_ARGUMENT, "keys: at least one key is needed", field="keys")
    if len(keys) > limits.request_records_max:
        raise StoreError(
            Reason.REQUEST_TOO_LARGE,
            f"keys: {len(keys)} keys are more than the limit of {limits.request_records_max} per request",
            field="keys",
        )
    return [_encode_key(key) for key in keys]


def _check_lengths(keys: KeyColumn, payloads: Sequence[bytes], limits: RequestLimits) -> None:
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


def _check_entries(job: Job, request: Publish, topic: Topic, limits: RequestLimits) -> dict[int, int]:
    """Counts the index entries of the records that may have many, and replaces the keys of those with too many by the
    reason; those of a delta are judged once it is merged. Raises StoreError for an atomic request with too many."""
    indexes, counts = topic.indexes.all, dict[int, int]()
    payloads, keys = request.payloads, job.keys
    for at in may_have_more(indexes, topic.settings.message_type, payloads, ENTRIES_FEW):
        if isinstance(keys[at], BadRecord) or (request.removals is not None and request.removals[at]):
            continue
        count, field = entries_count(indexes, topic.decode_indexed(payloads[at]))
        if count > limits.index_entries_max and job.delta is None:
            keys[at] = BadRecord(
                Reason.PAYLOAD_TOO_LARGE,
                f"payload: {count} values in indexed fields, most of them in {field}, are more than the limit of "
                f"{limits.index_entries_max} index entries per record",
            )
        elif count > ENTRIES_FEW:
            counts[at] = count
    if request.atomic and (total := sum(counts.values())) > limits.atomic_entries_max:
        raise StoreError(
            Reason.ATOMIC_TOO_LARGE,
            f"payload: {total} values in indexed fields are more than the limit of {limits.atomic_entries_max} index "
            "entries per atomic request",
            field="payload",
        )
    return counts


def store_keys(job: Job, count: int) -> list[bytes]:
    """The store keys of the next `count` records of a job that have one."""
    keys = job.store_keys[job.position : job.position + count]
    return keys if job.all_have_keys else [key for key in keys if key]


ENTRIES_FEW: Final = 32
"""Index entries of a record that are not counted: a topic with the most indexes has as many without any array."""
UNSET_PATHS_MAX: Final = 1000
UNSET_CHARACTERS_MAX: Final = 64 << 10
"""The most characters of all paths of a request together. The writer's thread parses them."""
