"""Converts between protobuf messages and the engine's values: the requests and answers of records.

All checks of a single field are here; each names the field. `settings_convert` does the same for settings, and
`subscribe_convert` for subscriptions.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Final, cast

from google.protobuf.timestamp_pb2 import Timestamp

from sow.v1 import admin_pb2, load_pb2, sow_pb2, types_pb2
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.stored import read_header
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.keys import wrong_parts
from sow_server.engine.values.model import (
    ABSENT,
    NEVER,
    PERMANENT,
    Applied,
    Condition,
    ConditionKind,
    Durability,
    Lifetime,
    LifetimeKind,
    LifetimesOfOneKind,
    MessageType,
    Outcome,
    Publish,
    PublishChannel,
    PublisherPosition,
    Refusal,
    RestampMode,
    TopicSettings,
    Touch,
    TouchOnly,
    TtlMode,
)
from sow_server.query.scan import RecordBatch, Scan

PUBLISHER_ID: Final = re.compile(r"[A-Za-z0-9_.:-]{1,200}\Z")
_KINDS: Final = {kind.value: kind for kind in LifetimeKind}
_WITHOUT_MICROS: Final = {LifetimeKind.ABSENT.value, LifetimeKind.NEVER.value}
_DURABILITIES: Final = {durability.value: durability for durability in Durability}
_TTL_MODES: Final = {mode.value: mode for mode in TtlMode}
_TOUCH_ONLY: Final = {only.value: only for only in TouchOnly}
_RESTAMP_MODES: Final = {mode.value: mode for mode in RestampMode}


RESULTS: Final = TopicSettings(message_type=MessageType.JSON)
"""The settings that the records of an answer with groups would have."""
PACKED_MIN: Final = 8
"""Records from which on it is cheaper to merge the bytes of their columns than to add the numbers."""
EVERY_MICROS: Final = NEVER + 1
"""As `Touch.below_micros`: every record has less left."""


def invalid(field: str, message: str) -> StoreError:
    """INVALID_ARGUMENT on a field."""
    return StoreError(Reason.INVALID_ARGUMENT, f"{field}: {message}", field=field)


def check_key_parts(key_fields: Sequence[str], keys: Iterable[str], field: str = "keys") -> None:
    """Refuses a key that no record of a topic with these key fields can have, as it has another number of parts: it
    would pass for one without a record (rule K3). Raises StoreError INVALID_ARGUMENT."""
    count = len(key_fields)
    if not count:
        return
    for key in keys:
        if (key.count("|") != count - 1 or "\\" in key) and (fault := wrong_parts(key_fields, key)):
            details = {"key_fields": ", ".join(key_fields)}
            raise StoreError(Reason.INVALID_ARGUMENT, f"{field}: {fault}", field=field, details=details)


# --- requests --------------------------------------------------------------------------------------------------------


def durability(number: int, default: Durability) -> Durability:
    """The requested durability, or the server's default."""
    if number == 0:
        return default
    try:
        return _DURABILITIES[number]
    except KeyError:
        raise invalid("durability", f"{number} is not a durability of this server") from None


def ttl_mode(number: int) -> TtlMode:
    """The requested ttl mode."""
    if number == types_pb2.TTL_MODE_UNSPECIFIED:
        return TtlMode.RESET
    try:
        return _TTL_MODES[number]
    except KeyError:
        raise invalid("ttl_mode", f"{number} is not a ttl mode of this server") from None


def lifetime(message: types_pb2.Lifetime, field: str = "lifetime") -> Lifetime:
    """The lifetime of a message; ABSENT for an unset one."""
    match message.WhichOneof("lifetime"):
        case None:
            return ABSENT
        case "ttl_micros":
            return Lifetime(LifetimeKind.TTL, message.ttl_micros)
        case "expire_time_micros":
            return Lifetime(LifetimeKind.EXPIRE_TIME, message.expire_time_micros)
        case "never":
            if not message.never:
                raise invalid(f"{field}.never", "false has no meaning; leave the lifetime unset")
            return PERMANENT


def condition(message: types_pb2.Condition, field: str = "condition") -> Condition | None:
    """The condition of a message; None for an unset one."""
    match message.WhichOneof("condition"):
        case None:
            return None
        case "only_if_absent":
            if not message.only_if_absent:
                raise invalid(f"{field}.only_if_absent", "false has no meaning; leave the condition unset")
            return Condition(ConditionKind.IF_ABSENT)
        case "only_if_present":
            if not message.only_if_present:
                raise invalid(f"{field}.only_if_present", "false has no meaning; leave the condition unset")
            return Condition(ConditionKind.IF_PRESENT)
        case "only_if_version":
            return Condition(ConditionKind.IF_VERSION, message.only_if_version)


def position(message: types_pb2.PublisherPosition) -> PublisherPosition:
    """The publisher's position."""
    publisher_id(message.publisher_id, "publisher.publisher_id")
    if message.publisher_epoch < 0:
        raise invalid("publisher.publisher_epoch", "must not be negative")
    if not 1 <= message.first_sequence <= 2**62:
        raise invalid("publisher.first_sequence", "must be between 1 and 2^62")
    if message.publisher_token < 0:
        raise invalid("publisher.publisher_token", "must not be negative")
    unit = publisher_unit(message.unit, "publisher.unit")
    if message.unit_done and not unit:
        raise invalid("publisher.unit_done", "needs the number of the unit that it ends, in publisher.unit")
    return PublisherPosition(
        message.publisher_id,
        message.publisher_epoch,
        message.first_sequence,
        unit,
        message.unit_done,
        message.publisher_token,
    )


def acting(message: types_pb2.PublisherPosition) -> PublisherPosition:
    """The publisher of an action that has no place in the publisher's sequence."""
    if message.first_sequence or message.unit_done:
        raise invalid("publisher.first_sequence", "has no meaning for a delete; neither has unit_done")
    return position(
        types_pb2.PublisherPosition(
            publisher_id=message.publisher_id,
            publisher_epoch=message.publisher_epoch,
            publisher_token=message.publisher_token,
            first_sequence=1,
            unit=message.unit,
        )
    )


def publisher_id(text: str, field: str) -> str:
    """A valid publisher id."""
    if not PUBLISHER_ID.match(text):
        raise invalid(field, "must be 1 to 200 characters of [A-Za-z0-9_.:-]")
    return text


def publisher_unit(unit: int, field: str) -> int:
    """The number of a unit of work; 0: none."""
    if unit < 0:
        raise invalid(field, "must not be negative")
    return unit


def publish(request: sow_pb2.PublishRequest, default: Durability) -> Publish:
    """A unary publish. Either all records give keys, or none does."""
    records = list(request.records)
    payloads: list[bytes] = []
    keys: list[str] = []
    own: dict[int, Lifetime] = {}
    conditions: dict[int, Condition] = {}
    removals: list[int] = []
    for index, record in enumerate(records):
        payloads.append(record.payload)
        if record.HasField("key"):
            keys.append(record.key)
        if record.remove:
            removals.append(index)
    count = len(payloads)
    if removals:
        keys = [record.key for record in records]
        for index in removals:
            if records[index].HasField("lifetime"):
                raise invalid(f"records[{index}].lifetime", "a removal has none")
    if keys and len(keys) < count:
        missing = [record.HasField("key") for record in records].index(False)
        raise invalid(f"records[{missing}].key", "is missing, while other records have one")
    for index, record in enumerate(records):
        if record.HasField("lifetime"):
            given = lifetime(record.lifetime, f"records[{index}].lifetime")
            if given is not ABSENT:
                own[index] = given
    for index, record in enumerate(records):
        if record.HasField("condition"):
            wanted = condition(record.condition, f"records[{index}].condition")
            if wanted is not None:
                conditions[index] = wanted
    return Publish(
        request.topic,
        payloads,
        keys=keys or None,
        lifetime=lifetime(request.lifetime) if request.HasField("lifetime") else ABSENT,
        lifetimes=[own.get(index, ABSENT) for index in range(count)] if own else None,
        ttl_mode=ttl_mode(request.ttl_mode),
        conditions=[conditions.get(index) for index in range(count)] if conditions else None,
        durability=durability(request.durability, default),
        atomic=request.atomic,
        publisher=position(request.publisher) if request.HasField("publisher") else None,
        want_results=True,
        delta=request.delta,
        unset_paths=tuple(paths) if (paths := request.unset_paths) else (),
        encoded_as=request.encoded_as,
        removals=[record.remove for record in records] if removals else None,
    )


def publish_stream(
    request: sow_pb2.PublishStreamRequest, topic: str, default: Durability, channel: PublishChannel
) -> Publish:
    """One request of a publish stream; its columns stay columns."""
    payloads = list(request.payload)
    count = len(payloads)
    common = condition(request.condition) if request.HasField("condition") else None
    return Publish(
        topic,
        payloads,
        keys=list(request.key) if request.key else None,
        lifetime=lifetime(request.lifetime),
        lifetimes=_lifetimes(request, count),
        ttl_mode=ttl_mode(request.ttl_mode),
        conditions=None if common is None else [common] * count,
        durability=durability(request.durability, default),
        atomic=request.atomic,
        publisher=position(request.publisher) if request.HasField("publisher") else None,
        channel=channel,
        delta=request.delta,
        unset_paths=tuple(paths) if (paths := request.unset_paths) else (),
        encoded_as=request.encoded_as,
        removals=_removals(request, count) if request.remove else None,
    )


def _removals(request: sow_pb2.PublishStreamRequest, count: int) -> list[bool] | None:
    """The column of removals; None: no record is one."""
    removals = list(request.remove)
    if len(removals) != count:
        raise invalid("remove", f"has {len(removals)} entries for {count} payloads")
    for index, (removes, kind) in enumerate(zip(removals, request.lifetime_kind, strict=False)):
        if removes and kind:
            raise invalid(f"lifetime_kind[{index}]", "a removal has no lifetime")
    return removals if True in removals else None


def staged_rows(request: load_pb2.StageLoadRequest) -> Publish:
    """Staged rows, in the form of a publish without a topic."""
    payloads = list(request.payload)
    return Publish(
        "",
        payloads,
        keys=list(request.key) if request.key else None,
        lifetime=lifetime(request.lifetime),
        lifetimes=_lifetimes(request, len(payloads)),
    )


def _lifetimes(
    request: sow_pb2.PublishStreamRequest | load_pb2.StageLoadRequest, count: int
) -> Sequence[Lifetime] | None:
    """The entries of a lifetime column; None if there is none. It runs on the event loop, so it works column by column,
    in C."""
    if not (request.lifetime_kind or request.lifetime_micros):
        return None
    for name, column in (("lifetime_kind", request.lifetime_kind), ("lifetime_micros", request.lifetime_micros)):
        if len(column) != count:
            raise invalid(name, f"has {len(column)} entries for {count} payloads")
    numbers, values = list(request.lifetime_kind), list(request.lifetime_micros)
    found = set(numbers)
    for kind in found - _KINDS.keys():
        raise invalid(f"lifetime_kind[{numbers.index(kind)}]", f"{kind} is not a kind of lifetime")
    if found & _WITHOUT_MICROS:
        for index, (kind, value) in enumerate(zip(numbers, values, strict=True)):
            if value and kind in _WITHOUT_MICROS:
                raise invalid(f"lifetime_micros[{index}]", "must be 0 for this kind of lifetime")
    if len(found) == 1 and not found & _WITHOUT_MICROS:
        return LifetimesOfOneKind(_KINDS[numbers[0]], values)
    # Does the same as `Lifetime._make`, without a Python call for each entry.
    pairs = zip(map(_KINDS.__getitem__, numbers), values, strict=True)
    return list(map(tuple.__new__, repeat(Lifetime), pairs))


def touch(request: sow_pb2.TouchRequest, default: Durability) -> Touch:
    """A touch."""
    if request.versions and request.HasField("condition"):
        raise invalid("versions", "are conditions of their own; leave `condition` unset")
    if request.only and request.only not in _TOUCH_ONLY:
        raise invalid("only", f"{request.only} is not a condition of this server")
    return Touch(
        request.topic,
        list(request.keys),
        lifetime=lifetime(request.lifetime),
        condition=condition(request.condition) if request.HasField("condition") else None,
        durability=durability(request.durability, default),
        only=_TOUCH_ONLY.get(request.only),
        atomic=request.atomic,
        versions=versions(request.versions, request.keys, "versions"),
    )


def versions(given: Sequence[int], keys: Sequence[str], field: str) -> list[int] | None:
    """The versions that records must have, one for each key; None: no such condition."""
    if given and len(given) != len(keys):
        raise invalid(field, f"has {len(given)} entries for {len(keys)} keys")
    return list(given) or None


def renewal(request: sow_pb2.GetRequest, default: Durability) -> Touch | None:
    """The touch that a get asks for, of no keys yet; None: it only reads."""
    if not request.HasField("touch"):
        if request.HasField("touch_below_micros"):
            raise invalid("touch_below_micros", "has a meaning only with touch")
        return None
    below = request.touch_below_micros if request.HasField("touch_below_micros") else EVERY_MICROS
    if below < 0:
        raise invalid("touch_below_micros", "must not be negative")
    return Touch(request.topic, (), lifetime(request.touch, "touch"), durability=default, below_micros=below)


def restamp(request: admin_pb2.RestampRequest) -> tuple[RestampMode, Lifetime]:
    """The mode and the lifetime of a restamp: ABSENT with CLEAR."""
    if request.mode == admin_pb2.RESTAMP_MODE_UNSPECIFIED:
        raise invalid("mode", "one of SET, CAP and CLEAR is needed")
    try:
        mode = _RESTAMP_MODES[request.mode]
    except KeyError:
        raise invalid("mode", f"{request.mode} is not a mode of this server") from None
    given = lifetime(request.lifetime)
    if mode is RestampMode.CLEAR and given != ABSENT:
        raise invalid("lifetime", "has no meaning with CLEAR, after which records never expire")
    if mode is not RestampMode.CLEAR and given == ABSENT:
        raise invalid("lifetime", f"is needed with {mode.name}")
    if mode is RestampMode.CAP and given == PERMANENT:
        raise invalid("lifetime.never", "has no meaning with CAP; CLEAR makes records permanent")
    return mode, given


# --- responses -------------------------------------------------------------------------------------------------------


def refusal(entry: Refusal, details: Mapping[str, str] | None = None) -> types_pb2.Refusal:
    """A refused record. `details`: those of the error that refused its request."""
    return types_pb2.Refusal(
        index=entry.index,
        reason=types_pb2.ErrorReason.ValueType(entry.reason.value),
        message=entry.message,
        current_version=entry.current_version,
        details=details,
    )


def result(entry: Applied | Refusal) -> sow_pb2.PublishResult:
    """The result for one record."""
    if isinstance(entry, Refusal):
        return sow_pb2.PublishResult(refusal=refusal(entry))
    key, version, expire_time, sequence, ttl_ignored, duplicate, known, delivered, removed = entry
    # Most results have no more than this. A message takes a field more quickly than its initial value.
    made = sow_pb2.PublishResult()
    made.key, made.version, made.sequence = key, version, sequence
    if expire_time != NEVER:
        made.expire_time_micros = expire_time
    if ttl_ignored or duplicate or not known:
        made.ttl_ignored, made.duplicate, made.expire_time_unknown = ttl_ignored, duplicate, not known
    if delivered is not None:
        made.delivered = delivered
    if removed:
        made.removed = True
    return made


def results(outcome: Outcome) -> list[sow_pb2.PublishResult]:
    """The results for all records."""
    assert outcome.results is not None, "the request wanted them"
    return list(map(result, outcome.results))


def stream_response(outcome: Outcome, journal_epoch: str) -> sow_pb2.PublishStreamResponse:
    """The answer to one request of a publish stream."""
    refused = outcome.refused
    elsewhere = refused.details if refused is not None and refused.reason is Reason.TOPIC_ELSEWHERE else None
    return sow_pb2.PublishStreamResponse(
        applied=outcome.applied,
        duplicates=outcome.duplicates,
        refusals=[refusal(entry, elsewhere) for entry in outcome.refusals],
        last_version=outcome.last_version,
        last_sequence=outcome.last_sequence,
        durability=types_pb2.Durability.ValueType(outcome.durability),
        last_duplicate_version=outcome.last_duplicate_version,
        last_duplicate_sequence=outcome.last_duplicate_sequence,
        journal_epoch=journal_epoch,
        ttls_ignored=outcome.ttls_ignored,
        removed=outcome.removed,
    )


def fill_record(
    record: types_pb2.Record, names: Sequence[str], topic: Topic, key: bytes, value: bytes, payload: bytes
) -> None:
    """Fills a message with a stored record; `names` are those of the origins, and `payload` is its own one, or a
    projection."""
    origin, _, version, publish_time, expire_time, sequence = read_header(value)
    record.topic, record.key, record.payload = topic.name, key.decode(), payload
    record.version, record.publish_time_micros, record.sequence = version, publish_time, sequence
    record.origin = names[origin]
    if expire_time != NEVER:
        record.expire_time_micros = expire_time
    record.message_type = topic.settings.message_type.value
    if separator := _separator(topic.settings):
        record.fix_separator = separator


def query_plan(scan: Scan) -> sow_pb2.QueryPlan:
    """The plan of a finished scan."""
    taken, query = scan.explanation(), scan.query
    order = query.order or query.aggregating
    order_text = "" if order is None else order.text
    if query.filter is not None and query.filter.granted is not None:
        # The way there, and the entries on it, would tell about records that the caller may not see.
        return sow_pb2.QueryPlan(filter=query.filter.asked, order_by=order_text)
    return sow_pb2.QueryPlan(
        access=sow_pb2.QueryPlan.Access.ValueType(taken.access.value),
        index_path=taken.index_path,
        probes=taken.probes,
        filter="" if query.filter is None else query.filter.text,
        order_by=order_text,
        index_entries=taken.index_entries,
    )


def fill_columns(
    columns: types_pb2.RecordColumns, names: Sequence[str], batch: RecordBatch, settings: TopicSettings | None
) -> None:
    """Fills a message with records in columns; `names` are those of the origins, and `settings` those of the topic,
    while there is one. It fills the message in place, because setting a message inside another one copies it."""
    if settings is not None:
        columns.message_type = settings.message_type.value
        columns.fix_separator = _separator(settings)
    headers = batch.headers
    origins = headers.origin
    first = origins[0]
    # Bytes of UTF-8 are welcome as well; decoding them here would double the cost of the keys.
    columns.key.extend(cast("list[str]", batch.keys))
    if batch.payloads is not None:
        columns.payload.extend(batch.payloads)
    if len(origins) < PACKED_MIN:
        columns.version.extend(headers.version)
        columns.publish_time_micros.extend(headers.publish_time)
        columns.expire_time_micros.extend(headers.expire_time)
        columns.sequence.extend(headers.sequence)
    else:
        # On the wire, a packed column of sfixed64 is the little-endian array itself. Merging those bytes is one copy;
        # extend() makes a Python integer of every entry. It makes a query twice as fast.
        columns.MergeFromString(
            b"".join(
                [
                    _packed(_VERSION, headers.version),
                    _packed(_PUBLISH_TIME, headers.publish_time),
                    _packed(_EXPIRE_TIME, headers.expire_time),
                    _packed(_SEQUENCE, headers.sequence),
                ]
            )
        )
    if origins.count(first) == len(origins):
        columns.origins.append(names[first])
    else:
        columns.origin.extend(origins)
        columns.origins.extend(names)


def _separator(settings: TopicSettings) -> str:
    is_flat = settings.message_type in (MessageType.FIX, MessageType.NVFIX)
    return settings.separator.decode("latin-1") if is_flat else ""


def _packed(tag: bytes, column: array[int]) -> bytes:
    """The bytes of a packed column of sfixed64 on the wire."""
    if sys.byteorder == "big":
        column = column[:]
        column.byteswap()
    return packed(tag, column.tobytes())


def packed(tag: bytes, blob: bytes) -> bytes:
    """A length-delimited field on the wire; for enums below 128, one byte each, that is a packed column of them."""
    length, size = bytearray(), len(blob)
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    length.append(size)
    return tag + length + blob


def _tag(field: str) -> bytes:
    """The tag of a length-delimited field; its number is below 16, so it is one byte."""
    return bytes((types_pb2.RecordColumns.DESCRIPTOR.fields_by_name[field].number << 3 | 2,))


_VERSION: Final = _tag("version")
_PUBLISH_TIME: Final = _tag("publish_time_micros")
_EXPIRE_TIME: Final = _tag("expire_time_micros")
_SEQUENCE: Final = _tag("sequence")


def timestamp(micros: int) -> Timestamp:
    """A point in time of an admin message."""
    stamp = Timestamp()
    stamp.FromMicroseconds(micros)
    return stamp
