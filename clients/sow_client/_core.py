"""What a call means: arguments into requests, responses into values, statuses into errors. Pure: no I/O, no clock.

Both clients are shells over this module, so an argument is checked, and an answer read, in exactly one way.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Final, NamedTuple, Protocol, TypeAlias, get_args, runtime_checkable

import grpc
from google.protobuf import message, timestamp_pb2
from google.rpc import error_details_pb2, status_pb2

from sow.v1 import admin_pb2, sow_pb2, types_pb2
from sow_client._documents import Document, encode
from sow_client._records import (
    EARLIEST,
    NEVER_MICROS,
    AccessName,
    ClockAccepted,
    Compacted,
    Deleted,
    DurabilityName,
    EffectiveSetting,
    ExpireAt,
    IndexStatus,
    Never,
    Page,
    Published,
    QueryFooter,
    QueryHeader,
    QueryPlan,
    Record,
    RecordBatch,
    Restamped,
    RestampMode,
    Start,
    Status,
    Topic,
    TopicSettings,
    TopicSettingsArguments,
    TopicStatistics,
    Ttl,
    datetime_of,
    invalid,
    micros_of,
    ttl_micros,
)
from sow_client._settings import PATHS, one_expiration, settings_of, topic_message, topic_settings
from sow_client.errors import Cancelled, InternalError, Refusal, SowError, Unavailable, error_of_reason

RECORDS_PER_REQUEST_MAX = 10_000
"""The most records, or keys, in one request (rule K8)."""
REQUEST_BYTES_MAX = 16 * 1024 * 1024
"""The most payload bytes in one request (rule K8)."""
MESSAGE_BYTES_MAX: Final = 20 * 1024 * 1024
"""Of one message, both directions, both ends (rule K8)."""
CHUNK_BYTES = 8 * 1024 * 1024
"""`publish_many` begins another request at this many bytes of payloads and keys."""
KEY_CHARACTER_BYTES: Final = 4
"""The most that a character of a key takes in UTF-8."""

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
"""Refusals that may pass: that record and all after it in the request were not applied (rule P6)."""


# ---- lifetimes (rules L1, L2) ----


class Lifetime(NamedTuple):
    """One lifetime as the columns of a stream carry it. A tuple, as publishers make one per record."""

    kind: types_pb2.LifetimeKind.ValueType
    micros: int

    def message(self) -> types_pb2.Lifetime:
        """The same as single-record calls carry it."""
        if self.kind == types_pb2.LIFETIME_KIND_TTL:
            return types_pb2.Lifetime(ttl_micros=self.micros)
        if self.kind == types_pb2.LIFETIME_KIND_EXPIRE_TIME:
            return types_pb2.Lifetime(expire_time_micros=self.micros)
        return types_pb2.Lifetime(never=True)


def lifetime(ttl: Ttl | None, expire_at: ExpireAt | None) -> Lifetime | None:
    """The lifetime that the two arguments name; None when neither is given. Raises InvalidArgument."""
    if ttl is not None:
        if expire_at is not None:
            raise invalid("expire_at", "give ttl or expire_at, not both")
        if isinstance(ttl, str):
            return _text_lifetime(ttl)
        if ttl is Never.NEVER:
            return Lifetime(types_pb2.LIFETIME_KIND_NEVER, 0)
        return Lifetime(types_pb2.LIFETIME_KIND_TTL, ttl_micros(ttl, "ttl"))
    if expire_at is None:
        return None
    return Lifetime(types_pb2.LIFETIME_KIND_EXPIRE_TIME, _expire_micros(expire_at))


@lru_cache(maxsize=256)  # a stream gives the same few texts again and again, and parsing takes 5 µs
def _text_lifetime(ttl: str) -> Lifetime:
    if ttl == "never":
        return Lifetime(types_pb2.LIFETIME_KIND_NEVER, 0)
    return Lifetime(types_pb2.LIFETIME_KIND_TTL, ttl_micros(ttl, "ttl"))


def _expire_micros(moment: ExpireAt) -> int:
    if isinstance(moment, str):
        try:
            moment = datetime.fromisoformat(moment)
        except ValueError as error:
            raise invalid("expire_at", f"{error}; write for example '2026-01-31T12:00:00Z'") from error
    if isinstance(moment, datetime):
        micros = zoned_micros(moment, "expire_at")
    else:
        if type(moment) is not int:  # a float would be seconds to one reader and microseconds to another
            raise invalid("expire_at", f"a {type(moment).__name__} is not a point in time")
        micros = moment
    if micros < 0:
        raise invalid("expire_at", "is before 1970", reason="LIFETIME_NEGATIVE")
    if micros > NEVER_MICROS:
        raise invalid("expire_at", "is more than 10 years ahead", reason="LIFETIME_TOO_LONG")
    return micros


def zoned_micros(moment: datetime, field: str) -> int:
    """Microseconds since the epoch of a datetime, which must know its time zone."""
    # Local time is a guess, and a wrong guess about an expiry loses data.
    if moment.utcoffset() is None:
        raise invalid(field, f"{moment.isoformat()} has no time zone")
    return micros_of(moment)


def lifetime_message(ttl: Ttl | None, expire_at: ExpireAt | None) -> types_pb2.Lifetime | None:
    """As `lifetime`, as a message."""
    value = lifetime(ttl, expire_at)
    return None if value is None else value.message()


# ---- publishing ----


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
    raise invalid("durability", f"{name!r} is none of 'fsync', 'buffered', 'replicated'")


def durability_name(value: types_pb2.Durability.ValueType) -> str:
    """ "fsync", "buffered", "replicated", or "" when the server did not say."""
    if value == types_pb2.DURABILITY_UNSPECIFIED:
        return ""
    return types_pb2.Durability.Name(value).removeprefix("DURABILITY_").lower()


def ttl_mode(keep_ttl: bool) -> types_pb2.TtlMode.ValueType:
    """What becomes of the expire time of a live record (rule L6)."""
    return types_pb2.TTL_MODE_KEEP if keep_ttl else types_pb2.TTL_MODE_UNSPECIFIED


class Sequencer:
    """Gives each request of single publishes the position that makes its retry safe (rule P6).

    The server takes a sequence at or below the highest it saw for a retry. So two requests in flight at the same time
    must not share a publisher id, or the slower one would be dropped as a duplicate: each request borrows an id, and
    there are as many ids as there ever were requests at once. Both list operations are atomic: threads need no lock.
    """

    def __init__(self, name: str | None = None) -> None:
        self._name = name or f"client-{secrets.token_hex(8)}"
        self._idle: list[types_pb2.PublisherPosition] = []

    def take(self) -> types_pb2.PublisherPosition:
        """The position of the next request."""
        try:
            return self._idle.pop()
        except IndexError:
            return types_pb2.PublisherPosition(
                publisher_id=f"{self._name}-{secrets.token_hex(4)}", publisher_epoch=1, first_sequence=1
            )

    def give_back(self, position: types_pb2.PublisherPosition, records: int) -> None:
        """The call of so many records has ended, however it ended; its sequences are not used again."""
        position.first_sequence += records
        self._idle.append(position)


def random_publisher_id() -> str:
    """An id that no other publisher has."""
    return f"publisher-{secrets.token_hex(8)}"


class Batch(NamedTuple):
    """Records of one request of `publish_many`."""

    records: list[sow_pb2.PublishRecord]
    first_index: int


def publish_batches(documents: Iterable[Document], keys: Iterable[str] | None, *, atomic: bool) -> Iterator[Batch]:
    """Cuts documents into requests; what is atomic stays in one, however large: the server judges that."""
    key_iterator = None if keys is None else iter(keys)
    records: list[sow_pb2.PublishRecord] = []
    size = first_index = 0
    for document in documents:
        payload = encode(document)
        key = None
        if key_iterator is not None:
            key = next(key_iterator, None)
            if key is None:
                raise invalid(
                    "keys", f"there are fewer keys than documents: none for number {first_index + len(records)}"
                )
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
    condition: types_pb2.Condition | None,
    durability: DurabilityName | None,
    atomic: bool = False,
    delta: bool = False,
    unset: Iterable[str] | None = None,
) -> sow_pb2.PublishRequest:
    """The request without its position, which is filled in when it is sent."""
    if condition is not None:
        for record in records:
            record.condition.CopyFrom(condition)
    return sow_pb2.PublishRequest(
        topic=topic,
        records=records,
        lifetime=lifetime_message(ttl, expire_at),
        ttl_mode=ttl_mode(keep_ttl),
        durability=durability_value(durability),
        atomic=atomic,
        delta=delta,
        unset_paths=unset_paths(delta, unset),
    )


def unset_paths(delta: bool, unset: Iterable[str] | None) -> list[str] | None:
    """The fields that a delta removes (rule P2)."""
    if unset is not None and not delta:
        raise invalid("unset", "is for deltas: a plain publish replaces the whole record")
    return texts(unset, "unset")


def refusal(message: types_pb2.Refusal, *, index: int) -> Refusal:
    """A refusal as the caller sees it; `index` is the record's position in all that was handed over."""
    return Refusal(index, reason_name(message.reason), message.message, message.current_version)


def reason_name(reason: types_pb2.ErrorReason.ValueType) -> str:
    """The name of a reason without its prefix; its number for reasons of newer servers."""
    try:
        return types_pb2.ErrorReason.Name(reason).removeprefix("ERROR_REASON_")
    except ValueError:
        return f"REASON_{reason}"


def bookmark(journal_epoch: str, sequence: int) -> str | None:
    """The position right after a change, as subscriptions take it (rule S4); None where it is not known."""
    return f"{journal_epoch}.{sequence}" if journal_epoch and sequence else None


def outcome(
    result: sow_pb2.PublishResult, *, index: int, journal_epoch: str = "", ends_at: int = 0
) -> Published | Refusal:
    """What became of one record; `ends_at`: the last sequence of the atomic request that it is one of."""
    if result.HasField("refusal"):
        return refusal(result.refusal, index=index)
    return Published(
        key=result.key,
        version=result.version,
        expire_time_micros=result.expire_time_micros if result.HasField("expire_time_micros") else None,
        sequence=result.sequence,
        ttl_ignored=result.ttl_ignored,
        duplicate=result.duplicate,
        # A server that does not remember anything of duplicates does not say so either.
        expire_time_known=not (result.expire_time_unknown or (result.duplicate and not result.version)),
        bookmark=bookmark(journal_epoch, ends_at or result.sequence),
        delivered=result.delivered if result.HasField("delivered") else None,
    )


def outcomes(
    response: sow_pb2.PublishResponse | sow_pb2.TouchResponse,
    *,
    expected: int,
    first_index: int = 0,
    atomic: bool = False,
) -> list[Published | Refusal]:
    """What became of each record; raises InternalError unless there is one result for each."""
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


def ended_by_passing(results: Sequence[Published | Refusal]) -> bool:
    """True when the last record was refused for a reason that may pass: then what comes after must wait (rule P6)."""
    return bool(results) and isinstance(results[-1], Refusal) and results[-1].reason in PASSING_REASONS


def not_sent(index: int) -> Refusal:
    """Stands for a record that was held back, as one before it was refused for a reason that may pass."""
    return Refusal(index, "STREAM_BROKEN", "an earlier record was refused for a passing reason; this one was not sent")


# ---- reading and deleting ----


def projection(select: Iterable[str] | None, exclude: Iterable[str] | None) -> sow_pb2.Projection | None:
    """The payload fields to return; None: the whole payload."""
    if select is None and exclude is None:
        return None
    if select is not None and exclude is not None:
        raise invalid("exclude", "give select or exclude, not both")
    return sow_pb2.Projection(include=texts(select, "select"), exclude=texts(exclude, "exclude"))


def texts(values: Iterable[str] | None, field: str) -> list[str] | None:
    """The texts as a list, which may be read twice; None stays None."""
    # A lone string is an iterable of strings too: "abc" would ask for the keys a, b and c.
    if isinstance(values, str):
        raise invalid(field, f"is a list of texts; write [{values!r}]")
    return None if values is None else list(values)


def get_request(
    topic: str, keys: Iterable[str], select: Iterable[str] | None = None, exclude: Iterable[str] | None = None
) -> sow_pb2.GetRequest:
    """Get by keys."""
    return sow_pb2.GetRequest(topic=topic, keys=texts(keys, "keys"), select=projection(select, exclude))


def records(topic: str, response: sow_pb2.GetResponse) -> list[Record]:
    """The records of a get; they share one set of columns, like those of a query."""
    found = response.records
    origins = list(dict.fromkeys(record.origin for record in found))
    columns = types_pb2.RecordColumns(
        key=[record.key for record in found],
        payload=[record.payload for record in found],
        version=[record.version for record in found],
        publish_time_micros=[record.publish_time_micros for record in found],
        expire_time_micros=[
            record.expire_time_micros if record.HasField("expire_time_micros") else NEVER_MICROS for record in found
        ],
        sequence=[record.sequence for record in found],
        origin=[origins.index(record.origin) for record in found] if len(origins) > 1 else [],
        origins=origins,
    )
    return list(RecordBatch(topic, columns))


def key_chunks(keys: Iterable[str]) -> Iterator[list[str]]:
    """Keys in lists of at most 10,000 (rule K8)."""
    every = texts(keys, "keys") or []
    for start in range(0, len(every), RECORDS_PER_REQUEST_MAX):
        yield every[start : start + RECORDS_PER_REQUEST_MAX]


def changing_filter(value: str) -> str:
    """The filter of a request that changes records. A blank one, which would take them all, is taken for a mistake."""
    if not value.strip():
        raise invalid("filter", "is empty; for every record write 'true'", reason="FILTER_INVALID")
    return value


def order_text(order_by: str | Iterable[str] | None) -> str:
    """What to sort by, as one text such as "/price DESC, /symbol"; empty: the order of keys."""
    if order_by is None or isinstance(order_by, str):
        return order_by or ""
    return ", ".join(order_by)


def query_request(
    topic: str,
    filter_text: str | None = None,
    *,
    order_by: str | Iterable[str] | None = None,
    explain: bool = False,
    keys: Iterable[str] | None = None,
    select: Iterable[str] | None = None,
    exclude: Iterable[str] | None = None,
    keys_only: bool = False,
    count_only: bool = False,
    batch_size: int = 0,
    page_size: int = 0,
    page_token: str = "",
    skip_n: int = 0,
    top_n: int | None = None,
) -> sow_pb2.QueryRequest:
    """A query (rule Q2). No keys at all would ask for every record on the wire, so an empty list is refused."""
    if keys is not None and not (keys := texts(keys, "keys")):
        raise invalid("keys", "is empty; leave it out to ask for every record")
    if top_n is not None and top_n < 1:
        raise invalid("top_n", f"{top_n} is less than 1")
    for name, value in (("batch_size", batch_size), ("page_size", page_size), ("skip_n", skip_n)):
        if value < 0:
            raise invalid(name, f"{value} is negative")
    return sow_pb2.QueryRequest(
        topic=topic,
        keys=keys,
        select=projection(select, exclude),
        batch_size=batch_size,
        keys_only=keys_only,
        count_only=count_only,
        page_size=page_size,
        page_token=page_token,
        skip_n=skip_n,
        top_n=top_n or 0,
        filter=filter_text or "",
        order_by=order_text(order_by),
        explain=explain,
    )


_ACCESS: Final[Mapping[int, AccessName]] = {
    sow_pb2.QueryPlan.ACCESS_POINTS: "points",
    sow_pb2.QueryPlan.ACCESS_KEY_RANGES: "key_ranges",
    sow_pb2.QueryPlan.ACCESS_INDEX: "index",
    sow_pb2.QueryPlan.ACCESS_SCAN: "scan",
    sow_pb2.QueryPlan.ACCESS_NOTHING: "nothing",
}


def _plan(footer: sow_pb2.QueryFooter) -> QueryPlan:
    plan = footer.plan
    return QueryPlan(
        access=_ACCESS.get(plan.access, "unknown"),
        index_path=plan.index_path,
        probes=plan.probes,
        index_entries=plan.index_entries,
        scanned=footer.scanned,
        matched=footer.matched,
        returned=footer.returned,
        filter=plan.filter,
        order_by=plan.order_by,
    )


class QueryProgress:
    """How far the answer to a query has come: header, then batches, then footer (rule Q1)."""

    __slots__ = ("footer", "header", "plan", "topic", "yielded")

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.header: QueryHeader | None = None
        self.footer: QueryFooter | None = None
        self.plan: QueryPlan | None = None
        self.yielded = False

    def restart(self) -> None:
        """The call is made again, which is right only while nothing has been yielded: a second call is another cut."""
        assert not self.yielded, "records of two instants would be mixed (rule Q1)"
        self.header = self.footer = None

    def batch(self, response: sow_pb2.QueryResponse) -> RecordBatch | None:
        """The batch of a response; None for the header and the footer, which are kept."""
        kind = response.WhichOneof("response")
        if kind == "batch":
            if self.header is None:
                raise malformed("records before the header")
            self.yielded = True
            return RecordBatch(self.topic, response.batch)
        if kind == "header":
            self.header = QueryHeader(response.header.bookmark, response.header.as_of_micros)
        elif kind == "footer":
            footer = response.footer
            self.footer = QueryFooter(footer.matched, footer.returned, footer.scanned, footer.next_page_token)
            self.plan = _plan(footer) if footer.HasField("plan") else None
        return None

    def broken(self, error: BaseException) -> SowError:
        """Why the stream ended with an error; a connection that broke amid the records is a cut, not unreachable."""
        translated = stream_error(error, "the answer to the query")
        if self.yielded and translated.reason == "UNREACHABLE":
            return cut(f"the answer to the query ({translated.message})")
        return translated

    def finished(self) -> None:
        """The stream has ended in order; raises Unavailable (STREAM_CUT) when the answer has not."""
        if self.footer is None:
            raise cut("the answer to the query")

    @property
    def matched(self) -> int:
        """Live records that matched."""
        return 0 if self.footer is None else self.footer.matched

    def explained(self) -> QueryPlan:
        """The plan that was asked for."""
        self.finished()
        if self.plan is None:
            raise malformed("no plan to a question for it")
        return self.plan

    def page(self, records: list[Record]) -> Page:
        """The whole answer as a page."""
        self.finished()
        if self.header is None or self.footer is None:
            raise malformed("an answer without a header")
        return Page(records, self.footer.next_page_token, self.header, self.footer)


def delete_request(
    topic: str,
    *,
    keys: Iterable[str] | None,
    filter_text: str | None,
    data: Document | None,
    everything: bool,
    dry_run: bool,
    durability: DurabilityName | None,
) -> sow_pb2.SowDeleteRequest:
    """A delete: exactly one of keys, filter, data and all selects the records (rule D1)."""
    if (keys is not None) + (filter_text is not None) + (data is not None) + everything != 1:
        raise invalid("keys", "give exactly one of keys, filter, data and all=True")
    request = sow_pb2.SowDeleteRequest(topic=topic, dry_run=dry_run, durability=durability_value(durability))
    if keys is not None:
        request.by_keys.keys.extend(texts(keys, "keys") or ())
    elif filter_text is not None:
        request.by_filter = changing_filter(filter_text)
    elif data is not None:
        request.by_payload = encode(data)
    else:
        request.all = True
    return request


def act_for(request: sow_pb2.SowDeleteRequest, publisher_id: str | None, epoch: int | None, unit: int) -> None:
    """In whose name to delete."""
    if publisher_id is None:
        if epoch is not None or unit:
            raise invalid("publisher_id", "is missing: whose epoch and unit are they?")
        return
    request.publisher.publisher_id = publisher_id
    request.publisher.publisher_epoch = epoch or 0
    request.publisher.unit = unit


def deleted(response: sow_pb2.SowDeleteResponse) -> Deleted:
    """How far a delete has come."""
    return Deleted(response.matched, response.deleted, response.last_sequence)


def touch_request(
    topic: str,
    keys: Sequence[str],
    *,
    ttl: Ttl | None,
    expire_at: ExpireAt | None,
    only_if_version: int | None,
    durability: DurabilityName | None,
) -> sow_pb2.TouchRequest:
    """A change of lifetimes without payloads (rule P8)."""
    return sow_pb2.TouchRequest(
        topic=topic,
        keys=keys,
        lifetime=lifetime_message(ttl, expire_at),
        condition=condition(only_if_version=only_if_version),
        durability=durability_value(durability),
    )


# ---- following (rules S1 to S4) ----


def subscribe_request(
    topic: str | None,
    filter_text: str | None,
    *,
    topic_pattern: str | None,
    sow: bool,
    oof: bool,
    delta: bool,
    changes: bool,
    start: Start | None,
    conflation: Ttl | None,
    progress: Ttl | None,
    empty_deltas: bool,
    select: Iterable[str] | None,
    exclude: Iterable[str] | None,
    batch_size: int,
) -> sow_pb2.SubscribeRequest:
    """A subscription to one topic or to those of a pattern. What contradicts what, the server judges."""
    if (topic is None) == (topic_pattern is None):
        raise invalid("topic", "give exactly one of topic and topic_pattern")
    if batch_size < 0:
        raise invalid("batch_size", f"{batch_size} is negative")
    request = sow_pb2.SubscribeRequest(
        topic=topic or "",
        topic_pattern=topic_pattern or "",
        filter=filter_text or "",
        sow=sow,
        oof=oof,
        delta=delta,
        changes=changes,
        conflation_micros=0 if conflation is None else ttl_micros(conflation, "conflation"),
        progress_micros=0 if progress is None else ttl_micros(progress, "progress"),
        empty_deltas=empty_deltas,
        select=projection(select, exclude),
        batch_size=batch_size,
    )
    match start:
        case None:
            pass
        case datetime():
            request.start_time_micros = zoned_micros(start, "start")
        case "earliest":  # before the bookmarks, none of which looks like it
            request.earliest = True
        case str():
            request.bookmark = start
        case _:
            if start is not EARLIEST:
                raise invalid("start", f"a {type(start).__name__} is not a bookmark, a datetime or EARLIEST")
            request.earliest = True
    return request


# ---- administration ----


def restamp_request(
    topic: str,
    mode: RestampMode,
    filter_text: str | None,
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
        mode=admin_pb2.RestampMode.Value(f"RESTAMP_MODE_{mode.upper()}"),
        lifetime=chosen,
        dry_run=dry_run,
    )


def restamped(response: admin_pb2.RestampResponse) -> Restamped:
    """How far a restamp has come."""
    return Restamped(response.matched, response.restamped, response.last_sequence)


def settings_message(arguments: TopicSettingsArguments) -> admin_pb2.TopicSettings:
    """The settings that are named and not None."""
    arguments = one_expiration(arguments)
    named = [name for name, value in arguments.items() if value is not None]
    return topic_message(topic_settings(arguments), named)


def create_request(
    name: str, values: TopicSettings | None, arguments: TopicSettingsArguments
) -> admin_pb2.CreateTopicRequest:
    """A new topic, from a `TopicSettings` or from keyword arguments."""
    if values is None:
        return admin_pb2.CreateTopicRequest(name=name, settings=settings_message(arguments))
    if arguments:
        raise invalid("settings", "give a TopicSettings or single settings, not both")
    return admin_pb2.CreateTopicRequest(name=name, settings=topic_message(values, values.named()))


def alter_request(name: str, arguments: TopicSettingsArguments) -> admin_pb2.AlterTopicRequest:
    """A change of the settings that are named; None: not set any more, so that a policy or the default counts."""
    if not arguments:
        raise invalid("settings", "names no setting to change")
    arguments = one_expiration(arguments)
    return admin_pb2.AlterTopicRequest(
        name=name,
        settings=settings_message(arguments),
        update_paths=[path for argument in arguments for path in PATHS[argument]],
    )


def topic(response: admin_pb2.Topic, warnings: Iterable[str] = ()) -> Topic:
    """A topic as the server has it."""
    return Topic(
        name=response.name,
        settings=settings_of(response.settings),
        set_in_config=response.set_in_config,
        create_time=moment(response.create_time),
        statistics=_statistics(response.statistics) if response.HasField("statistics") else None,
        indexes=tuple(IndexStatus(index.path, index.complete) for index in response.indexes),
        effective=tuple(EffectiveSetting(one.name, one.value, one.origin) for one in response.effective),
        planned_journal_bytes=response.planned_journal_bytes if response.effective else None,
        warnings=tuple(warnings),
    )


def moment(timestamp: timestamp_pb2.Timestamp) -> datetime:
    """A point in time, UTC."""
    return datetime_of(timestamp.ToMicroseconds())


def _statistics(values: admin_pb2.TopicStatistics) -> TopicStatistics:
    return TopicStatistics(
        live_records=values.live_records,
        stored_bytes=values.stored_bytes,
        overdue_records=values.overdue_records,
        journal_bytes=values.journal_bytes,
        journal_entries=values.journal_entries,
        floor_sequence=values.floor_sequence,
        durables=values.durables,
        backlog_bytes=values.backlog_bytes,
        slowest_durable=values.slowest_durable,
        backlog_entries=values.backlog_entries,
        backlog_age=values.backlog_age.ToTimedelta() if values.HasField("backlog_age") else None,
        tombstones=values.tombstones,
    )


def status(response: admin_pb2.GetStatusResponse) -> Status:
    """How the server is."""
    return Status(
        instance=response.instance,
        instance_id=response.instance_id,
        journal_epoch=response.journal_epoch,
        server_version=response.server_version,
        state=response.state,
        failure=response.failure,
        ready_time=moment(response.ready_time),
        clock_time=moment(response.clock_time),
        sweep_paused=response.sweep_paused,
        last_sequence=response.last_sequence,
        live_records=response.live_records,
        overdue_records=response.overdue_records,
        topics=response.topics,
        disk_bytes=response.disk_bytes,
    )


def clock_accepted(response: admin_pb2.AcceptClockResponse) -> ClockAccepted:
    """The guarded clock before and after."""
    return ClockAccepted(moment(response.before), moment(response.after))


def compacted(response: admin_pb2.CompactResponse) -> Compacted:
    """Bytes before and after."""
    return Compacted(response.bytes_before, response.bytes_after)


# ---- errors (rule X1) ----


@runtime_checkable
class EndedCall(Protocol):
    """What the errors of the blocking and of the asynchronous stubs have in common."""

    def code(self) -> grpc.StatusCode | None: ...

    def details(self) -> str | None: ...

    def trailing_metadata(self) -> Sequence[tuple[str, str | bytes]] | None: ...


STATUS_DETAILS_KEY = "grpc-status-details-bin"
ERROR_DOMAIN = "sow"


def error_of_status(error: BaseException) -> SowError:
    """The exception for the status that a call ended with, from its ErrorInfo; its text is only passed on."""
    if isinstance(error, SowError):
        return error
    if not isinstance(error, EndedCall):
        return InternalError(f"the call failed: {error!r}", reason="INTERNAL")
    code = error.code() or grpc.StatusCode.UNKNOWN
    text = error.details() or code.name
    reason, details, retry_after = _details(error.trailing_metadata() or ())
    if reason is None:
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in text:
            # The one thing that only gRPC's text tells: its own limit of messages, at either end.
            return error_of_reason("REQUEST_TOO_LARGE", f"the request, or its answer, is too large: {text}")
        reason = "UNREACHABLE" if code is grpc.StatusCode.UNAVAILABLE else code.name
    return error_of_reason(reason, text, code=code.name, details=details, retry_after=retry_after)


_TOO_LARGE: Final = "message larger than max"


def reason_of(error: BaseException) -> str | None:
    """The reason that the server gave, None when it gave none: then the transport ended the call."""
    return _details(error.trailing_metadata() or ())[0] if isinstance(error, EndedCall) else None


_Parsed: TypeAlias = tuple[str | None, dict[str, str], float | None]


def _details(metadata: Iterable[tuple[str, str | bytes]]) -> _Parsed:
    """Reason, details and seconds to wait of a rich status; nothing when there is none, or one that is damaged."""
    reason: str | None = None
    details: dict[str, str] = {}
    retry_after: float | None = None
    encoded = next((value for key, value in metadata if key == STATUS_DETAILS_KEY), None)
    if not isinstance(encoded, bytes):
        return reason, details, retry_after
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    bad = error_details_pb2.BadRequest()
    try:
        for item in status_pb2.Status.FromString(encoded).details:
            if item.Unpack(info) and info.domain == ERROR_DOMAIN:
                reason = info.reason
                details.update(info.metadata)
            elif item.Unpack(retry):
                retry_after = retry.retry_delay.ToTimedelta().total_seconds()
            elif item.Unpack(bad) and bad.field_violations:
                details.setdefault("field", bad.field_violations[0].field)
    except message.DecodeError:
        return None, {}, None
    return reason, details, retry_after


_TRANSPORT_CODES: Final = frozenset({"CANCELLED", "UNKNOWN", "INTERNAL"})


def call_error(error: BaseException, *, client_closed: bool) -> SowError:
    """Why a call with one answer ended. No caller cancels one: CANCELLED without a reason is how a server that stops
    gives it up, or how it ends when the client is closed meanwhile."""
    translated = error_of_status(error)
    if reason_of(error) is None and translated.reason == "CANCELLED" and not isinstance(error, SowError):
        if client_closed:
            return closed("client")
        return Unavailable(f"the server gave the call up ({translated.message})", reason="UNREACHABLE")
    return translated


def stream_error(error: BaseException, what: str) -> SowError:
    """Why a stream ended. Without a reason of the server's, the connection broke, whatever gRPC's code for that is."""
    translated = error_of_status(error)
    if reason_of(error) is None and translated.reason in _TRANSPORT_CODES and not isinstance(error, SowError):
        return cut(f"{what} ({translated.message})")
    return translated


def error_like(error: SowError, message: str, **details: str) -> SowError:
    """The same kind of error with another message and more details."""
    return type(error)(message, reason=error.reason, details=error.details | details, retry_after=error.retry_after)


BACKOFF_SECONDS_FIRST: Final = 0.1
BACKOFF_SECONDS_MAX: Final = 2.0
CUT_REASONS: Final = frozenset({"UNREACHABLE", "STREAM_CUT"})
"""The connection broke, or never was."""


class Backoff:
    """When to try again, and when trying is over. Owns the count of failures in a row."""

    __slots__ = ("_attempts", "_failing_since")

    def __init__(self) -> None:
        self._failing_since: float | None = None
        self._attempts = 0

    def begin(self, now: float) -> None:
        """An attempt begins; of those in a row, the first one counts."""
        if self._failing_since is None:
            self._failing_since = now

    def reset(self) -> None:
        """Something has come of the last attempt."""
        self._failing_since, self._attempts = None, 0

    def delay(self, error: SowError, *, now: float, jitter: float, limit: float) -> float | None:
        """Seconds to wait before the next attempt, as this one failed; None: it would come more than `limit` seconds
        after the first of them began, or failed. `now` is a monotonic clock in seconds, `jitter` a random number in
        [0, 1)."""
        if self._failing_since is None:
            self._failing_since = now
        # Half fixed, half random: many clients that were cut at once must not come back at once.
        delay = min(BACKOFF_SECONDS_FIRST * 2.0**self._attempts, BACKOFF_SECONDS_MAX) * (0.5 + 0.5 * jitter)
        delay = max(delay, error.retry_after or 0.0)
        self._attempts = min(self._attempts + 1, 16)
        return None if now + delay - self._failing_since > limit else delay


def cut(what: str) -> Unavailable:
    """A stream ended in order, but before its end."""
    return Unavailable(f"{what} was cut off before its end", reason="STREAM_CUT")


def unreachable(server: str, seconds: float, cause: str = "") -> Unavailable:
    """No connection came about in time; `cause`: why, as far as gRPC tells."""
    why = f": {cause}" if cause else ""
    return Unavailable(f"cannot connect to {server} within {seconds:g} s{why}", reason="UNREACHABLE")


def request_too_large(size: int, field: str = "request") -> SowError:
    """A request that no server takes, known before it is sent (rule K8)."""
    return error_of_reason(
        "REQUEST_TOO_LARGE",
        f"{field}: {size} bytes are more than the limit of {MESSAGE_BYTES_MAX} of a message",
        details={"field": field},
    )


def closed(what: str) -> Cancelled:
    """What the calls of a closed client, publisher or subscription raise."""
    return Cancelled(f"the {what} is closed", reason="CLOSED")


def malformed(what: str) -> InternalError:
    """An answer that the contract does not allow."""
    return InternalError(f"the server sent {what}", reason="MALFORMED_RESPONSE")
