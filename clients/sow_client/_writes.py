"""Writing: arguments into requests, responses into values. Pure: no I/O, no clock."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

from sow.v1 import admin_pb2, sow_pb2, types_pb2
from sow_client import _process
from sow_client._documents import Document, encode
from sow_client._keys import Key, checked_list, key_text, key_texts
from sow_client._lifetimes import lifetime_message
from sow_client._parameters import Parameters, parameter_values
from sow_client._reads import RECORDS_PER_REQUEST_MAX, changing_filter, texts
from sow_client._records import (
    Deleted,
    DurabilityName,
    ExpireAt,
    Published,
    Restamped,
    RestampMode,
    TouchOnlyName,
    Ttl,
    invalid,
)
from sow_client._statuses import malformed
from sow_client.errors import PublishFailed, Refusal

REQUEST_BYTES_MAX = 16 * 1024 * 1024
"""The most payload bytes in one request (rule K8)."""
CHUNK_BYTES = 8 * 1024 * 1024
"""`publish_many` begins a new request at this many bytes of payloads and keys."""
KEY_CHARACTER_BYTES: Final = 4
"""The most bytes that a character of a key takes in UTF-8."""

RefusalsMode: TypeAlias = Literal["raise", "return"]

PASSING_REASONS = frozenset(
    {
        "OVERLOADED",
        "WRITE_STALLED",
        "DISK_FULL",
        "STORE_FAILED",
        "STOPPING",
        "STREAM_BROKEN",
        "BACKLOG_QUOTA_EXCEEDED",
    }
)
"""Reasons that may pass: the refused record and all after it in the request were not applied (rule P6)."""


def condition(
    *, only_if_absent: bool = False, only_if_present: bool = False, only_if_version: int | None = None
) -> types_pb2.Condition | None:
    """The condition of a write (rule P3): at most one of the three."""
    if only_if_absent + only_if_present + (only_if_version is not None) > 1:
        raise invalid("only_if_version", "give at most one of only_if_absent, only_if_present and only_if_version")
    if only_if_absent:
        return types_pb2.Condition(only_if_absent=True)
    if only_if_present:
        return types_pb2.Condition(only_if_present=True)
    if only_if_version is not None:
        return types_pb2.Condition(only_if_version=only_if_version)
    return None


def durability_value(name: DurabilityName | None) -> types_pb2.Durability.ValueType:
    """The wire's value of a durability (rule P5)."""
    match name:
        case None:
            return types_pb2.DURABILITY_UNSPECIFIED
        case "fsync":
            return types_pb2.DURABILITY_FSYNC
        case "buffered":
            return types_pb2.DURABILITY_BUFFERED
        case "replicated":
            return types_pb2.DURABILITY_REPLICATED
    raise invalid("durability", f"{name!r} is not 'fsync', 'buffered' or 'replicated'")


def durability_name(value: types_pb2.Durability.ValueType) -> str:
    """ "fsync", "buffered", "replicated", or "" when the server did not send it."""
    if value == types_pb2.DURABILITY_UNSPECIFIED:
        return ""
    return types_pb2.Durability.Name(value).removeprefix("DURABILITY_").lower()


def ttl_mode(keep_ttl: bool, extend_ttl: bool) -> types_pb2.TtlMode.ValueType:
    """The wire's value for the effect on the expire time of a live record (rule L6)."""
    if keep_ttl and extend_ttl:
        raise invalid("extend_ttl", "give keep_ttl or extend_ttl, not both")
    if extend_ttl:
        return types_pb2.TTL_MODE_EXTEND
    return types_pb2.TTL_MODE_KEEP if keep_ttl else types_pb2.TTL_MODE_UNSPECIFIED


class Sequencer:
    """Gives each request of single publishes the position that makes its retry safe (rule P6).

    The server regards a sequence at or below its highest one as a retry. Two requests in flight at the same time must
    not share a publisher id: the slower one would be dropped as a duplicate. So each request borrows an id, and there
    are as many ids as there ever were requests at once. Both list operations are atomic: threads need no lock.
    """

    def __init__(self, name: str | None = None) -> None:
        self._name = name or f"client-{secrets.token_hex(8)}"
        self._idle: list[types_pb2.PublisherPosition] = []
        _process.tell(self)

    def _forked(self) -> None:
        # With the ids of the parent, the requests of both would be taken for retries of each other's.
        self._name, self._idle = f"client-{secrets.token_hex(8)}", []

    def take(self) -> types_pb2.PublisherPosition:
        """The position of the next request."""
        try:
            return self._idle.pop()
        except IndexError:
            return types_pb2.PublisherPosition(
                publisher_id=f"{self._name}-{secrets.token_hex(4)}",
                publisher_epoch=1,
                publisher_token=random_token(),
                first_sequence=1,
            )

    def give_back(self, position: types_pb2.PublisherPosition, response: sow_pb2.PublishResponse | None) -> None:
        """The call has ended, well or, without a response, not; its sequences are not used again."""
        if not position.publisher_id.startswith(self._name):
            return  # it was taken before a fork
        if response is not None and not _is_cut_short(response):
            position.first_sequence += len(response.results)
        else:
            # Sequences that nobody has decided would be a gap, and other instances count up to the first one (F11).
            position.publisher_epoch += 1
            position.publisher_token = random_token()
            position.first_sequence = 1
        self._idle.append(position)


def random_publisher_id() -> str:
    """An id that no other publisher has."""
    return f"publisher-{secrets.token_hex(8)}"


def random_token() -> int:
    """A token for an epoch that no instance has given (rule F11)."""
    return secrets.randbits(62) + 1


class Batch(NamedTuple):
    """Records of one request of `publish_many`."""

    records: list[sow_pb2.PublishRecord]
    first_index: int


def publish_batches(
    documents: Iterable[Document],
    keys: Iterable[Key] | None,
    *,
    atomic: bool,
    encode: Callable[[Document], bytes] = encode,
) -> Iterator[Batch]:
    """Cuts documents into requests. An atomic request stays whole, however large: the server checks its size."""
    key_iterator = None if keys is None else iter(checked_list(keys, "keys"))
    records: list[sow_pb2.PublishRecord] = []
    size = first_index = 0
    for document in documents:
        payload = encode(document)
        key = None
        if key_iterator is not None:
            given = next(key_iterator, None)
            if given is None:
                raise invalid(
                    "keys", f"there are fewer keys than documents: document {first_index + len(records)} has none"
                )
            key = key_text(given, "keys")
        row_bytes = len(payload) + (0 if key is None else KEY_CHARACTER_BYTES * len(key))
        full = len(records) == RECORDS_PER_REQUEST_MAX or (records and size + row_bytes > CHUNK_BYTES)
        if full and not atomic:
            yield Batch(records, first_index)
            first_index += len(records)
            records, size = [], 0
        size += row_bytes
        records.append(sow_pb2.PublishRecord(key=key, payload=payload))
    if key_iterator is not None and next(key_iterator, None) is not None:
        raise invalid("keys", f"there are more than the {first_index + len(records)} documents")
    if records:
        yield Batch(records, first_index)


def publish_request(
    topic: str,
    records: Sequence[sow_pb2.PublishRecord],
    *,
    ttl: Ttl | None,
    expire_at: ExpireAt | None,
    keep_ttl: bool,
    extend_ttl: bool,
    condition: types_pb2.Condition | None,
    durability: DurabilityName | None,
    atomic: bool = False,
    delta: bool = False,
    unset: Iterable[str] | None = None,
    encoded_as: str = "",
) -> sow_pb2.PublishRequest:
    """The request without its position, which is filled in when it is sent."""
    if condition is not None:
        for record in records:
            record.condition.CopyFrom(condition)
    return sow_pb2.PublishRequest(
        topic=topic,
        records=records,
        lifetime=lifetime_message(ttl, expire_at),
        ttl_mode=ttl_mode(keep_ttl, extend_ttl),
        durability=durability_value(durability),
        atomic=atomic,
        delta=delta,
        unset_paths=unset_paths(delta, unset),
        encoded_as=encoded_as,
    )


def unset_paths(delta: bool, unset: Iterable[str] | None) -> list[str] | None:
    """The fields that a delta removes (rule P2)."""
    if unset is not None and not delta:
        raise invalid("unset", "is for deltas: a plain publish replaces the whole record")
    return texts(unset, "unset")


def refusal(message: types_pb2.Refusal, *, index: int) -> Refusal:
    """A refusal as the caller sees it; `index` is the record's position among all records handed over."""
    return Refusal(index, reason_name(message.reason), message.message, message.current_version)


def reason_name(reason: types_pb2.ErrorReason.ValueType) -> str:
    """The name of a reason without its prefix; for a reason of a newer server its number."""
    try:
        return types_pb2.ErrorReason.Name(reason).removeprefix("ERROR_REASON_")
    except ValueError:
        return f"REASON_{reason}"


def bookmark(journal_epoch: str, sequence: int) -> str | None:
    """The position right after a change, as a start for subscriptions (rule S4); None when it is not known."""
    return f"{journal_epoch}.{sequence}" if journal_epoch and sequence else None


def outcome(
    result: sow_pb2.PublishResult, *, index: int, journal_epoch: str = "", ends_at: int = 0
) -> Published | Refusal:
    """The outcome of one record; `ends_at`: the last sequence of its atomic request."""
    if result.HasField("refusal"):
        return refusal(result.refusal, index=index)
    return Published(
        key=result.key,
        version=result.version,
        expire_time_micros=result.expire_time_micros if result.HasField("expire_time_micros") else None,
        sequence=result.sequence,
        ttl_ignored=result.ttl_ignored,
        duplicate=result.duplicate,
        # A server that remembers nothing about duplicates does not set `expire_time_unknown` either.
        expire_time_known=not (result.expire_time_unknown or (result.duplicate and not result.version)),
        bookmark=bookmark(journal_epoch, ends_at or result.sequence),
        delivered=result.delivered if result.HasField("delivered") else None,
        removed=result.removed,
    )


def outcomes(
    response: sow_pb2.PublishResponse | sow_pb2.TouchResponse,
    *,
    expected: int,
    first_index: int = 0,
    atomic: bool = False,
) -> list[Published | Refusal]:
    """The outcome of each record; raises InternalError unless there is one result for each."""
    results = response.results
    if len(results) != expected:
        raise malformed(f"{len(results)} results for {expected} records")
    ends_at = max(result.sequence for result in results) if atomic and results else 0
    return [
        outcome(result, index=first_index + index, journal_epoch=response.journal_epoch, ends_at=ends_at)
        for index, result in enumerate(results)
    ]


def only(response: sow_pb2.PublishResponse | sow_pb2.TouchResponse) -> Published:
    """The one result of a call for one record; its refusal is raised."""
    match outcomes(response, expected=1)[0]:
        case Refusal() as refused:
            raise refused.error()
        case published:
            return published


def answered(results: list[Published | Refusal], refusals: RefusalsMode) -> list[Published] | list[Published | Refusal]:
    """The outcomes of `publish_many`. Raises PublishFailed unless they are to be returned."""
    refused = [one for one in results if isinstance(one, Refusal)]
    if refused and refusals == "raise":
        failed = PublishFailed(refused)
        raise failed from next(one for one in refused if one.reason == failed.reason).error()
    return results


def checked_refusals(refusals: RefusalsMode) -> RefusalsMode:
    """Raises InvalidArgument for another text."""
    if refusals not in get_args(RefusalsMode):
        raise invalid("refusals", f'{refusals!r} is neither "raise" nor "return"')
    return refusals


def ended_by_passing(results: Sequence[Published | Refusal]) -> bool:
    """True when the last record was refused for a passing reason: the records after it must wait (rule P6)."""
    return bool(results) and isinstance(results[-1], Refusal) and results[-1].reason in PASSING_REASONS


def _is_cut_short(response: sow_pb2.PublishResponse) -> bool:
    """True if the last records were not decided, for a passing reason."""
    last = response.results[-1] if response.results else sow_pb2.PublishResult()
    return last.HasField("refusal") and reason_name(last.refusal.reason) in PASSING_REASONS


def not_sent(index: int) -> Refusal:
    """The outcome of a record that was held back because an earlier one was refused for a passing reason."""
    return Refusal(index, "STREAM_BROKEN", "an earlier record was refused for a passing reason; this one was not sent")


def delete_request(
    topic: str,
    *,
    keys: Iterable[Key] | None,
    filter_text: str | None,
    payload: bytes | None,
    parameters: Parameters | None = None,
    everything: bool,
    dry_run: bool,
    durability: DurabilityName | None,
    only_if_versions: Iterable[int] | None = None,
) -> sow_pb2.SowDeleteRequest:
    """A delete: exactly one of keys, filter, data and all selects the records (rule D1)."""
    if only_if_versions is not None and keys is None:
        raise invalid("only_if_versions", "is for deletes by keys")
    if (keys is not None) + (filter_text is not None) + (payload is not None) + everything != 1:
        raise invalid("keys", "give exactly one of keys, filter, data and all=True")
    if parameters is not None and filter_text is None:
        raise invalid("parameters", "belong to filter")
    request = sow_pb2.SowDeleteRequest(topic=topic, dry_run=dry_run, durability=durability_value(durability))
    if keys is not None:
        request.by_keys.keys.extend(key_texts(keys))
        request.by_keys.versions.extend(only_if_versions or ())
    elif filter_text is not None:
        request = sow_pb2.SowDeleteRequest(
            topic=topic,
            by_filter=changing_filter(filter_text),
            parameters=parameter_values(parameters),
            dry_run=dry_run,
            durability=durability_value(durability),
        )
    elif payload is not None:
        request.by_payload = payload
    else:
        request.all = True
    return request


def act_for(
    request: sow_pb2.SowDeleteRequest, publisher_id: str | None, epoch: int | None, unit: int, token: int = 0
) -> None:
    """Makes the delete a part of the work of a publisher."""
    if publisher_id is None:
        if epoch is not None or unit:
            raise invalid("publisher_id", "is missing, and is needed with epoch or unit")
        return
    request.publisher.publisher_id = publisher_id
    request.publisher.publisher_epoch = epoch or 0
    request.publisher.unit = unit
    request.publisher.publisher_token = token


def deleted(response: sow_pb2.SowDeleteResponse) -> Deleted:
    """The figures of a delete so far."""
    return Deleted(response.matched, response.deleted, response.last_sequence, tuple(response.absent_fields))


def touch_request(
    topic: str,
    keys: Sequence[str],
    *,
    ttl: Ttl | None,
    expire_at: ExpireAt | None,
    only_if_version: int | None,
    durability: DurabilityName | None,
    only: TouchOnlyName | None = None,
    atomic: bool = False,
    only_if_versions: Iterable[int] | None = None,
) -> sow_pb2.TouchRequest:
    """A change of lifetimes without payloads (rules P8, L19)."""
    if only is not None and only not in get_args(TouchOnlyName):
        raise invalid("only", f"{only!r} is not one of {', '.join(get_args(TouchOnlyName))}")
    return sow_pb2.TouchRequest(
        topic=topic,
        keys=keys,
        lifetime=lifetime_message(ttl, expire_at),
        condition=condition(only_if_version=only_if_version),
        durability=durability_value(durability),
        only=sow_pb2.TouchOnly.Value(f"TOUCH_ONLY_{(only or 'unspecified').upper()}"),
        atomic=atomic,
        versions=only_if_versions,
    )


def restamp_request(
    topic: str,
    mode: RestampMode,
    filter_text: str | None,
    parameters: Parameters | None = None,
    *,
    ttl: Ttl | None,
    expire_at: ExpireAt | None,
    dry_run: bool,
) -> admin_pb2.RestampRequest:
    """A restamp (rule L13): "set" and "cap" need a lifetime, "clear" takes none."""
    if mode not in get_args(RestampMode):
        raise invalid("mode", f"{mode!r} is not one of {', '.join(get_args(RestampMode))}")
    chosen = lifetime_message(ttl, expire_at)
    if (chosen is None) != (mode == "clear"):
        raise invalid("ttl", "is not for 'clear'" if chosen else f"a lifetime is needed for {mode!r}")
    return admin_pb2.RestampRequest(
        topic=topic,
        filter="" if filter_text is None else changing_filter(filter_text),
        parameters=parameter_values(parameters),
        mode=admin_pb2.RestampMode.Value(f"RESTAMP_MODE_{mode.upper()}"),
        lifetime=chosen,
        dry_run=dry_run,
    )


def restamped(response: admin_pb2.RestampResponse) -> Restamped:
    """The figures of a restamp so far."""
    return Restamped(response.matched, response.restamped, response.last_sequence, tuple(response.absent_fields))
