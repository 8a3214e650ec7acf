"""The publisher: buffered, pipelined, ordered, and safe to cut (rules P6, P7).

`PublishCore` is the whole of it without I/O, threads or clock; `Publisher` and `AsyncPublisher` only carry its
requests to the server and the answers back. A record moves through

      publish()            seal                 next_request            acknowledge
    ───────────▶  buffer  ───────▶  queued requests  ───────▶  sent requests  ───────▶  counted, forgotten
                                          ▲                        │
                                          └──────── rewind ────────┘   the stream was cut

W1  Requests are sent, acknowledged and sent again in the order of their sequences, which have no gaps.
W2  A record is counted exactly once, as applied, duplicate or refused, by the answer that settles it.
W3  At most `max_in_flight` requests and, but for one, 16 MiB of payloads are sealed and not acknowledged.
W4  A refusal that may pass settles the records before it; that record and the rest are sent again as they were.
W5  A publisher that has failed stays failed: every later call raises the same error.
W6  With a unit the newest sealed request is held back until there is a newer one, or somebody waits for it: so the
    request that ends the unit is its last one, and is sent only when all before it is settled without a refusal.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add
from types import TracebackType
from typing import Final, Literal, NamedTuple, NoReturn, Protocol, Self, TypeAlias, TypeVar, cast

import grpc

from sow.v1 import sow_pb2, types_pb2
from sow_client import _core
from sow_client._core import Lifetime
from sow_client._documents import Document, encode
from sow_client._records import ExpireAt, Ttl, invalid
from sow_client._transport import task_is_cancelled
from sow_client.errors import PublishFailed, Refusal, SowError, error_of_reason

BATCH_BYTES: Final = 4 * 1024 * 1024
"""A request is sealed before its payloads exceed this; a larger document travels alone."""
IN_FLIGHT_BYTES_MAX: Final = 16 * 1024 * 1024
PAYLOAD_BYTES_MAX: Final = _core.REQUEST_BYTES_MAX
KEY_CHARACTERS_MAX: Final = 512 * 1024
"""A longer key, which no server takes (rule K8), would make a message that is too large with a payload that is not."""
REFUSALS_KEPT_MAX: Final = 10_000
END_SECONDS: Final = 1.0
"""A closing publisher gives the server this long to end the stream in order."""

RETRIED_REASONS: Final = frozenset(
    {"STREAM_BROKEN", "OVERLOADED", "WRITE_STALLED", "STOPPING", "BACKLOG_QUOTA_EXCEEDED"}
)
"""Reasons that pass by themselves: what is not acknowledged is sent again."""
FATAL_REASONS: Final = frozenset({"DISK_FULL", "STORE_FAILED", "PUBLISHER_FENCED"})
"""Refusals that concern the whole stream and do not pass by themselves."""


@dataclass(frozen=True, slots=True)
class Ack:
    """What one answer of the server settled."""

    applied: int
    duplicates: int
    """Records that an earlier attempt, before a reconnect, had applied."""
    refusals: tuple[Refusal, ...]
    last_version: int
    """Version of the last applied record; 0 when none was."""
    last_sequence: int
    """Journal sequence of the last applied record; 0 when none was."""
    durability: str
    """The durability reached: "fsync", "buffered" or "replicated"."""
    last_duplicate_version: int = 0
    """Version of the last of the duplicates; 0: there was none, or it is not remembered."""
    last_duplicate_sequence: int = 0
    """Journal sequence of the last of the duplicates; 0: there was none, or it is not remembered."""
    bookmark: str | None = None
    """The `start` of a subscription to what comes after these records. None: none of them was applied at a position
    that is known, or the server is an older one."""

    @property
    def records(self) -> int:
        """Records settled by it."""
        return self.applied + self.duplicates + len(self.refusals)


@dataclass(frozen=True, slots=True)
class OpenedPublisher:
    """A new epoch of a publisher, or word that there is nothing left to do in one (rule P6)."""

    epoch: int
    """To publish with. With `unit_done` no new one has begun."""
    unit_done: bool
    """The unit has been published whole before."""
    unit_records: int
    """With `unit_done`: records that the server applied in the attempt that finished it; 0 when it is not the last unit
    that was finished."""


@dataclass(slots=True)
class _Sealed:
    """A request that is sealed and not yet acknowledged, and where its first record stands in the whole stream."""

    request: sow_pb2.PublishStreamRequest
    first_index: int
    records: int
    size: int


@dataclass(frozen=True, slots=True)
class PublisherOptions:
    """How a publisher works. Durations are in seconds."""

    batch_records: int = 1_000
    max_in_flight: int = 16
    linger: float = 0.02
    retry_for: float = 30.0
    connect_timeout: float = 5.0

    def __post_init__(self) -> None:
        if not 1 <= self.batch_records <= _core.RECORDS_PER_REQUEST_MAX:
            raise invalid("batch_records", f"{self.batch_records} is not 1 to {_core.RECORDS_PER_REQUEST_MAX}")
        if self.max_in_flight < 1:
            raise invalid("max_in_flight", f"{self.max_in_flight} is less than 1")
        if self.linger < 0 or self.retry_for < 0:
            raise invalid("linger" if self.linger < 0 else "retry_for", "is negative")


@dataclass(frozen=True, slots=True)
class StreamDefaults:
    """What every request of a publisher carries."""

    topic: str
    lifetime: types_pb2.Lifetime | None = None
    ttl_mode: types_pb2.TtlMode.ValueType = types_pb2.TTL_MODE_UNSPECIFIED
    durability: types_pb2.Durability.ValueType = types_pb2.DURABILITY_UNSPECIFIED
    delta: bool = False
    unset_paths: Sequence[str] = ()
    unit: int = 0


Pending: TypeAlias = bytes | tuple[bytes, str | None, Lifetime | None]
"""A record that waits: its payload, or payload, key and lifetime."""


class _Columns(NamedTuple):
    payloads: Sequence[bytes]
    keys: Sequence[str]
    kinds: Sequence[types_pb2.LifetimeKind.ValueType]
    micros: Sequence[int]
    size: int


_ABSENT: Final = Lifetime(types_pb2.LIFETIME_KIND_UNSPECIFIED, 0)


def _plain_columns(taken: list[Pending]) -> _Columns:
    payloads = cast(list[bytes], taken)  # what `plain` promises
    fitting, size = fitting_rows(payloads, None)
    return _Columns(payloads[:fitting], (), (), (), size)


def _columns(taken: list[Pending]) -> _Columns:
    """Columns of the longest beginning that may go in one request: all with a key, or all without."""
    rows = [item if type(item) is tuple else (item, None, None) for item in taken]
    payloads, keys, lifetimes = zip(*rows, strict=True)
    keyed = keys[0] is not None
    alike = len(keys)
    if keys.count(None) != (0 if keyed else alike):
        alike = next(index for index, key in enumerate(keys) if (key is not None) is not keyed)
    fitting, _ = fitting_rows(payloads[:alike], keys[:alike] if keyed else None)
    payloads, lifetimes = payloads[:fitting], lifetimes[:fitting]
    kinds: Sequence[types_pb2.LifetimeKind.ValueType] = ()
    micros: Sequence[int] = ()
    if lifetimes.count(None) < fitting:
        kinds, micros = zip(*[lifetime or _ABSENT for lifetime in lifetimes], strict=True)
    return _Columns(payloads, keys[:fitting] if keyed else (), kinds, micros, sum(map(len, payloads)))


def fitting_rows(payloads: Sequence[bytes], keys: Sequence[str] | None) -> tuple[int, int]:
    """How many of the rows, at least one, stay within `BATCH_BYTES`, and the bytes of their payloads."""
    size = sum(map(len, payloads))
    # A key that is too long is refused by the server, as a record: many of them must not make a message that is.
    key_bytes = 0 if keys is None else _core.KEY_CHARACTER_BYTES * sum(map(len, keys))
    if size + key_bytes <= BATCH_BYTES:
        return len(payloads), size
    sizes = list(accumulate(map(len, payloads)))
    with_keys = sizes
    if keys is not None:
        with_keys = list(map(add, sizes, accumulate(_core.KEY_CHARACTER_BYTES * len(key) for key in keys)))
    fitting = max(1, bisect_right(with_keys, BATCH_BYTES))
    return fitting, sizes[fitting - 1]


class _Bulk(NamedTuple):
    """What was handed over as columns, checked; a column that says nothing is None."""

    payloads: Sequence[bytes]
    keys: Sequence[str] | None
    kinds: Sequence[types_pb2.LifetimeKind.ValueType] | None
    micros: array[int] | None

    def cut(self, start: int, records: int) -> _Columns:
        """Columns of the next request: at most so many records, and bytes as fit."""
        keys = None if self.keys is None else self.keys[start : start + records]
        fitting, size = fitting_rows(self.payloads[start : start + records], keys)
        stop = start + fitting
        return _Columns(
            self.payloads[start:stop],
            () if self.keys is None else self.keys[start:stop],
            () if self.kinds is None else self.kinds[start:stop],
            () if self.micros is None else self.micros[start:stop],
            size,
        )


def _bulk(
    payloads: Sequence[bytes],
    keys: Sequence[str] | None,
    lifetime_kinds: Iterable[int] | None,
    lifetime_micros: Iterable[int] | None,
) -> _Bulk:
    """Checks columns, all before anything is sent. Raises InvalidArgument naming column and row, or PAYLOAD_TOO_LARGE.

    Column by column, so that C does the work: half a microsecond of Python a record would be most of what it costs.
    """
    if set(map(type, payloads)) - {bytes}:
        row = next(index for index, payload in enumerate(payloads) if type(payload) is not bytes)
        raise invalid(f"payloads[{row}]", f"is {type(payloads[row]).__name__}, not bytes")
    if keys is not None:
        _check_length("keys", keys, payloads)
        if set(map(type, keys)) - {str}:
            row = next(index for index, key in enumerate(keys) if type(key) is not str)
            raise invalid(f"keys[{row}]", f"is {type(keys[row]).__name__}, not str")
        try:
            "".join(keys).encode()
        except UnicodeEncodeError:
            row = next(index for index, key in enumerate(keys) if not _well_formed(key))
            raise invalid(f"keys[{row}]", "is not well-formed Unicode") from None
    check_sizes(payloads, keys)
    if lifetime_kinds is None and lifetime_micros is None:
        return _Bulk(payloads, keys, None, None)
    if lifetime_kinds is None or lifetime_micros is None:
        missing = "lifetime_kinds" if lifetime_kinds is None else "lifetime_micros"
        raise invalid(missing, "is missing: a lifetime is a kind and a number of microseconds")
    try:
        kinds = list(lifetime_kinds)
        micros = array("q", lifetime_micros)
    except (TypeError, OverflowError) as error:
        raise invalid("lifetime_micros", f"is no column of whole numbers of 64 bits: {error}") from None
    _check_length("lifetime_kinds", kinds, payloads)
    _check_length("lifetime_micros", micros, payloads)
    found = set(kinds)
    if not found <= _KINDS:
        row = next(index for index, kind in enumerate(kinds) if kind not in _KINDS)
        raise invalid(f"lifetime_kinds[{row}]", f"{kinds[row]!r} is not a kind of lifetime")
    if found & _WITHOUT_MICROS:
        for row, (kind, value) in enumerate(zip(kinds, micros, strict=True)):
            if value and kind in _WITHOUT_MICROS:
                raise invalid(f"lifetime_micros[{row}]", f"is {value}, and must be 0 for this kind of lifetime")
    if found <= {types_pb2.LIFETIME_KIND_UNSPECIFIED}:
        return _Bulk(payloads, keys, None, None)
    return _Bulk(payloads, keys, cast(list[types_pb2.LifetimeKind.ValueType], kinds), micros)


def check_sizes(payloads: Sequence[bytes], keys: Sequence[str] | None) -> None:
    """Raises InvalidArgument (PAYLOAD_TOO_LARGE, KEY_TOO_LARGE) for a row that fits in no request."""
    if payloads and (largest := max(map(len, payloads))) > PAYLOAD_BYTES_MAX:
        row = next(index for index, payload in enumerate(payloads) if len(payload) == largest)
        raise payload_too_large(largest, f"payloads[{row}]")
    if keys and (longest := max(map(len, keys))) > KEY_CHARACTERS_MAX:
        row = next(index for index, key in enumerate(keys) if len(key) == longest)
        raise key_too_large(keys[row], f"keys[{row}]")


def _check_length(name: str, column: Sequence[object], payloads: Sequence[bytes]) -> None:
    if len(column) != len(payloads):
        raise invalid(name, f"has {len(column)} entries for {len(payloads)} payloads")


def _well_formed(key: str) -> bool:
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return True


_KINDS: Final = frozenset(types_pb2.LifetimeKind.values())
_WITHOUT_MICROS: Final = {types_pb2.LIFETIME_KIND_UNSPECIFIED, types_pb2.LIFETIME_KIND_NEVER}


class PublishCore:
    """Owns the buffer, the sealed requests, the counters and the decision to try again. Not thread-safe."""

    def __init__(
        self, defaults: StreamDefaults, options: PublisherOptions, *, publisher_id: str, publisher_epoch: int
    ) -> None:
        self.options = options
        self.applied = 0
        self.duplicates = 0
        self.refused = 0
        self.publisher_epoch = publisher_epoch
        """Stamped on requests as they are sent, so it may be learnt after the first records were taken."""
        self.pending: deque[Pending] = deque()
        """Records not yet in a request. Appending to a deque and taking from its other end are each atomic, so a record
        costs its producer one append and no lock, which is a good part of all that publishing costs."""
        self.plain = True
        """No record so far had a key or a lifetime of its own; cleared before the first one that has is appended."""
        self.sealed_requests = 0
        self._defaults = defaults
        self._publisher_id = publisher_id
        self._next_index = 0
        self._queued: deque[_Sealed] = deque()
        self._sent: deque[_Sealed] = deque()
        self._sealed_bytes = 0
        self.unit_finished = False
        """The server has told that the unit is finished."""
        self._holding = defaults.unit != 0
        self._done_without = 0
        """So many refused records the unit can do without."""
        self._failed: PublishFailed | None = None
        self._refusals: list[Refusal] = []
        self._refused_reported = 0
        self._backoff = _core.Backoff()

    # ---- the buffer ----

    @property
    def room(self) -> bool:
        """Another request may be sealed (W3)."""
        in_flight, size = len(self._queued) + len(self._sent), self._sealed_bytes
        if self._holding and self._queued:
            # What is held back waits for the next one, so it must not be what keeps that from being sealed.
            in_flight, size = in_flight - 1, size - self._queued[-1].size
        return in_flight < self.options.max_in_flight and size < IN_FLIGHT_BYTES_MAX

    def seal(self) -> None:
        """Turns the oldest pending records into the next request of the stream: as many as may go in one."""
        pending = self.pending
        count = min(len(pending), self.options.batch_records)
        if count == 0:
            return
        taken = [pending.popleft() for _ in range(count)]
        columns = _plain_columns(taken) if self.plain else _columns(taken)
        fitting = len(columns.payloads)
        if fitting < count:
            pending.extendleft(reversed(taken[fitting:]))
        self._seal(columns)

    def seal_columns(self, bulk: _Bulk, start: int) -> int:
        """Turns records that were handed over as columns, from `start` on, into the next request of the stream; what
        is pending has to be sealed before. Returns where the rest begins."""
        columns = bulk.cut(start, self.options.batch_records)
        self._seal(columns)
        return start + len(columns.payloads)

    def _seal(self, columns: _Columns) -> None:
        defaults, records = self._defaults, len(columns.payloads)
        request = sow_pb2.PublishStreamRequest(
            topic=defaults.topic,
            key=columns.keys,
            payload=columns.payloads,
            lifetime=defaults.lifetime,
            lifetime_kind=columns.kinds,
            lifetime_micros=columns.micros,
            ttl_mode=defaults.ttl_mode,
            durability=defaults.durability,
            delta=defaults.delta,
            unset_paths=defaults.unset_paths,
            publisher=types_pb2.PublisherPosition(
                publisher_id=self._publisher_id, first_sequence=self._next_index + 1, unit=defaults.unit
            ),
        )
        self._queued.append(_Sealed(request, self._next_index, records, columns.size))
        self._next_index += records
        self._sealed_bytes += columns.size
        self.sealed_requests += 1

    # ---- the unit ----

    def release(self) -> None:
        """What is held back is sent, too, until `hold`: somebody waits for it."""
        self._holding = False

    def hold(self) -> None:
        """From now on the newest request is held back, if it is one of a unit that is not finished."""
        self._holding = self._defaults.unit != 0 and not self.unit_finished

    @property
    def held_alone(self) -> bool:
        """Nothing is left to be settled but what is held back."""
        return not self._sent and len(self._queued) <= self._holding

    def check_unit(self) -> None:
        """Raises InvalidArgument where there is no unit to finish."""
        if not self._defaults.unit:
            raise invalid("unit", "was not given to this publisher, so there is none to finish")

    def end_unit(self, *, without_refused: bool = False) -> None:
        """Everything is sealed, and settled but for what is held back: that is sent now, as the end of the unit if no
        record was refused so far (W6). `without_refused`: also if some were; then nothing is held back."""
        self._done_without = self.refused if without_refused else 0
        if self.refused == self._done_without:
            if not self._queued:
                self._seal(_Columns((), (), (), (), 0))
            self._queued[-1].request.publisher.unit_done = True
        self.release()

    def unit_ended(self) -> PublishFailed | None:
        """Everything is settled: the unit is finished, unless this error is returned."""
        self.unit_finished = self.refused == self._done_without
        self.hold()
        return None if self.unit_finished else self.take_refusals() or self._failed

    # ---- the stream ----

    def next_request(self) -> sow_pb2.PublishStreamRequest | None:
        """The next request to write to the present stream; from then on it counts as sent."""
        if len(self._queued) <= self._holding:
            return None
        sealed = self._queued.popleft()
        self._sent.append(sealed)
        sealed.request.publisher.publisher_epoch = self.publisher_epoch
        return sealed.request

    def acknowledge(self, response: sow_pb2.PublishStreamResponse) -> tuple[Ack, SowError | None]:
        """Settles the oldest sent request, or its part before a refusal that ended it (W2, W4).

        The error, if there is one, says why the stream is of no more use; `retry_delay` judges it.
        """
        if not self._sent:
            raise _core.malformed("an answer to no request")
        sealed = self._sent[0]
        error: SowError | None = None
        settled = sealed.records
        refusals: list[Refusal] = []
        for message in response.refusals:
            refusal = _core.refusal(message, index=sealed.first_index + message.index)
            if refusal.reason in RETRIED_REASONS or refusal.reason in FATAL_REASONS:
                settled, error = message.index, refusal.error()
                break
            refusals.append(refusal)
        ack = Ack(
            applied=response.applied,
            duplicates=response.duplicates,
            refusals=tuple(refusals),
            last_version=response.last_version,
            last_sequence=response.last_sequence,
            durability=_core.durability_name(response.durability),
            last_duplicate_version=response.last_duplicate_version,
            last_duplicate_sequence=response.last_duplicate_sequence,
            bookmark=_core.bookmark(
                response.journal_epoch, max(response.last_sequence, response.last_duplicate_sequence)
            ),
        )
        if ack.records != settled or settled > sealed.records:
            raise _core.malformed(f"an answer for {ack.records} of {settled} records")
        if error is None:
            self._sent.popleft()
            self._sealed_bytes -= sealed.size
        elif settled:
            self._trim(sealed, settled)
            if refusals:
                sealed.request.publisher.unit_done = False  # what is left of it is not all of it
        self.applied += ack.applied
        self.duplicates += ack.duplicates
        self.refused += len(refusals)
        self._refusals.extend(refusals[: REFUSALS_KEPT_MAX - len(self._refusals)])
        if settled:
            self._backoff.reset()
        return ack, error

    def _trim(self, sealed: _Sealed, settled: int) -> None:
        """Takes the settled records off the front of a request."""
        request = sealed.request
        size = sum(map(len, request.payload[:settled]))
        for column in (request.payload, request.key, request.lifetime_kind, request.lifetime_micros):
            del column[:settled]
        request.publisher.first_sequence += settled
        sealed.first_index += settled
        sealed.records -= settled
        sealed.size -= size
        self._sealed_bytes -= size

    def rewind(self) -> None:
        """The stream is gone: what it has not acknowledged is queued again, in order (W1)."""
        self._queued.extendleft(reversed(self._sent))
        self._sent.clear()

    @property
    def has_requests(self) -> bool:
        """Requests are sealed and not yet acknowledged."""
        return bool(self._queued or self._sent)

    @property
    def acknowledged(self) -> int:
        """Records settled by the server: applied, duplicate or refused."""
        return self.applied + self.duplicates + self.refused

    @property
    def unacknowledged(self) -> int:
        """Records handed over and not yet settled, buffered ones included."""
        return self._next_index + len(self.pending) - self.acknowledged

    # ---- failures ----

    def retry_delay(self, error: SowError, *, now: float, jitter: float) -> float:
        """Seconds to wait before the stream is opened again; raises when trying is over.

        `now` is a monotonic clock in seconds, `jitter` a random number in [0, 1). The time to try is counted from
        the first failure since the last record was settled: `retry_for`, or `connect_timeout` while the server was
        never reached.
        """
        if error.reason not in RETRIED_REASONS and error.reason not in _core.CUT_REASONS:
            raise self.failure(error) from error
        never_reached = error.reason == "UNREACHABLE" and self.acknowledged == 0
        limit = min(self.options.connect_timeout, self.options.retry_for) if never_reached else self.options.retry_for
        delay = self._backoff.delay(error, now=now, jitter=jitter, limit=limit)
        if delay is None:
            raise self.failure(error) from error
        return delay

    def failure(self, error: SowError) -> SowError:
        """The error as the user gets it: with what was acknowledged and what was not."""
        return _core.error_like(
            error,
            f"{error.message}; {self.acknowledged} records were acknowledged, {self.unacknowledged} were not",
            acknowledged=str(self.acknowledged),
            unacknowledged=str(self.unacknowledged),
            refused=str(self.refused),
        )

    def take_refusals(self) -> PublishFailed | None:
        """The error for the refusals since the last time, if there were any."""
        if not self._refusals:
            return None
        failed = PublishFailed(self._refusals, refused=self.refused - self._refused_reported)
        self._refused_reported = self.refused
        self._refusals = []
        self._failed = self._failed or failed
        return failed


def payload_too_large(size: int, field: str = "data") -> SowError:
    """The error for a document that fits in no request."""
    return error_of_reason(
        "PAYLOAD_TOO_LARGE",
        f"{field}: the payload of {size} bytes is larger than a request ({PAYLOAD_BYTES_MAX} bytes)",
        details={"field": field},
    )


def key_too_large(key: str, field: str = "key") -> SowError:
    """The error for a key that fits in no request."""
    return error_of_reason(
        "KEY_TOO_LARGE",
        f"{field}: a key of {len(key)} characters is larger than the limit of {KEY_CHARACTERS_MAX} of a request",
        details={"field": field},
    )


def checked_unit(publisher_id: str | None, epoch: int | None, unit: int) -> int:
    """The unit of a new publisher. Raises InvalidArgument where it, or an epoch, is negative or without an id."""
    for name, value in (("epoch", epoch or 0), ("unit", unit)):
        if value < 0:
            raise invalid(name, f"{value} is negative")
    if publisher_id is None and (unit or epoch is not None):
        raise invalid("unit" if unit else "epoch", "needs the publisher_id that it belongs to")
    return unit


def new_epoch(opened: OpenedPublisher, publisher_id: str, unit: int) -> int:
    """The epoch of a new publisher. Raises FailedPrecondition UNIT_DONE where its unit is finished already."""
    if opened.unit_done:
        raise error_of_reason(
            "UNIT_DONE", f"unit {unit} of {publisher_id!r} has been published whole before", details={"field": "unit"}
        )
    return opened.epoch


_ANSWERS: Final = "the stream of acknowledgements"
_Value = TypeVar("_Value")


class _Shell:
    """What both publishers have: the core, the callbacks, and whether it is over. Owns no thread and no task."""

    def __init__(
        self,
        core: PublishCore,
        on_ack: Callable[[Ack], object] | None,
        on_refusal: Callable[[Refusal], object] | None,
    ) -> None:
        self._core = core
        self._on_ack = on_ack
        self._on_refusal = on_refusal
        self._closing = False
        self._failure: BaseException | None = None
        self._stopped = False  # closing, or failed
        # What every record touches, without a way through the core.
        self._pending = core.pending
        self._append = core.pending.append
        self._batch_records = core.options.batch_records
        self._filled = 0  # bytes since `publish` last sealed all there was
        self._stream = 0  # number of the present stream; requests of an older one must not be sent

    @property
    def applied(self) -> int:
        """Records that the server applied."""
        return self._core.applied

    @property
    def duplicates(self) -> int:
        """Records that were applied before a reconnect and sent again after it."""
        return self._core.duplicates

    @property
    def refused(self) -> int:
        """Records that the server refused."""
        return self._core.refused

    @property
    def acknowledged(self) -> int:
        """Records settled: applied, duplicate or refused."""
        return self._core.acknowledged

    @property
    def unacknowledged(self) -> int:
        """Records handed over and not yet settled."""
        return self._core.unacknowledged

    def _refuse(self, size: int) -> NoReturn:
        raise self._stop_error() if self._stopped else payload_too_large(size)

    def _stop_error(self) -> BaseException:
        return self._failure or _core.closed("publisher")

    def _deliver(self, ack: Ack) -> None:
        if self._on_ack is not None:
            self._on_ack(ack)
        if self._on_refusal is not None:
            for refusal in ack.refusals:
                self._on_refusal(refusal)


class Publisher(_Shell):
    """Publishes a stream of documents to one topic: buffered, pipelined, in order, each applied once.

    Made by `Client.publisher`; use it in a `with` block, on one thread. Records are sent in batches of
    `batch_records`, or `linger` seconds after the first of them, and acknowledged while later ones are on their way.
    When too much is on its way, `publish` waits. Connections that break are made again for `retry_for` seconds
    without progress, and what was not acknowledged is sent again; the server drops what it has already (rule P6).

    Records that are refused are collected and raised as PublishFailed by `flush` and at the end of the block, or handed
    to `on_refusal` and then not raised. Both callbacks run on the publisher's own thread and must not call it.
    """

    # Threads: the user's, which fills the buffer and seals; gRPC's sender, which takes sealed requests through
    # `_requests` and seals what lingers; `_run`, which opens streams and reads acknowledgements. One lock.

    def __init__(
        self,
        core: PublishCore,
        open_stream: OpenStream,
        *,
        next_epoch: Callable[[], int] | None = None,
        on_ack: Callable[[Ack], object] | None = None,
        on_refusal: Callable[[Refusal], object] | None = None,
    ) -> None:
        """`next_epoch` begins an epoch of the publisher's id, at once; None: the core has its epoch already."""
        super().__init__(core, on_ack, on_refusal)
        if next_epoch is not None:
            core.publisher_epoch = next_epoch()
        self._open_stream = open_stream
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # there is something to send, or to stop
        self._progress = threading.Condition(self._lock)  # something was acknowledged, or all is over
        self._idle = True  # nobody looks at what is pending before it is told to
        self._delivering = False  # a callback is being told of what has been settled; `flush` waits for that, too
        self._call: StreamCall | None = None
        self._thread: threading.Thread | None = None

    def publish(
        self, data: Document, *, key: str | None = None, ttl: Ttl | None = None, expire_at: ExpireAt | None = None
    ) -> None:
        """Takes one record; `ttl` or `expire_at` overrule the publisher's own (rule L2). May wait for room."""
        # Half a microsecond that every record pays: locals, one append, no lock, no call but what the data needs.
        payload = data if type(data) is bytes else encode(data)
        lifetime = None if ttl is None and expire_at is None else _core.lifetime(ttl, expire_at)
        size = len(payload)
        if self._stopped or size > PAYLOAD_BYTES_MAX:
            self._refuse(size)
        if key is None and lifetime is None:
            self._append(payload)
        else:
            if key is not None and len(key) > KEY_CHARACTERS_MAX:
                raise key_too_large(key)
            self._core.plain = False
            self._append((payload, key, lifetime))
        self._filled = filled = self._filled + size
        if filled >= BATCH_BYTES or len(self._pending) >= self._batch_records:
            with self._lock:
                self._seal_all()
        elif self._idle:
            with self._lock:
                self._wake()

    def publish_columns(
        self,
        payloads: Sequence[bytes],
        *,
        keys: Sequence[str] | None = None,
        lifetime_kinds: Iterable[int] | None = None,
        lifetime_micros: Iterable[int] | None = None,
    ) -> None:
        """Takes many records at once, for a fraction of what as many calls of `publish` cost; in order with those.

        Each column has one entry a record. `keys`: on topics without key fields (K3). `lifetime_kinds` (numbers of
        `sow.v1.LifetimeKind`: 0 the publisher's own, 1 ttl, 2 expire time, 3 never) and `lifetime_micros`
        (microseconds; 0 with 0 and 3) are given together (L2). May wait for room. Raises InvalidArgument naming the
        column and the row, and then none of them is taken.
        """
        bulk = _bulk(payloads, keys, lifetime_kinds, lifetime_micros)
        with self._lock:
            if self._stopped:
                raise self._stop_error()
            if self._pending:
                self._seal_all()
            at = 0
            while at < len(payloads):
                if self._core.room:
                    at = self._core.seal_columns(bulk, at)
                    self._wake()
                else:
                    self._await_progress()

    def finish_unit(self, *, without_refused: bool = False) -> None:
        """Sends the last records and, in the same request and commit, that the publisher's `unit` is finished; returns
        once the server has told that it is (rule P6). Until then the last records are held back.

        Raises PublishFailed where a record was refused since the publisher was made, also with `on_refusal`: all others
        are applied, and the unit is not finished. May be called again; `without_refused`: the unit is finished all the
        same, as whoever calls can do without those records. That is recorded in a commit of its own.
        """
        core = self._core
        core.check_unit()
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if core.unit_finished:
                return
            if without_refused:
                core.release()
                self._drain()
            elif self._pending:
                self._seal_all()
            while not core.held_alone or self._delivering:
                self._await_progress()
            core.end_unit(without_refused=without_refused)
            self._wake()
            while core.has_requests or self._delivering:
                self._await_progress()
            failed = core.unit_ended()
        if failed is not None:
            raise failed

    def flush(self) -> None:
        """Returns once all records so far are settled. Raises PublishFailed for those that were refused since then."""
        with self._lock:
            self._core.release()
            self._drain()
            self._core.hold()
            failed = self._core.take_refusals()
        if failed is not None and self._on_refusal is None:
            raise failed

    def close(self) -> None:
        """Flushes and ends the stream; may be called again. Raises as `flush` does."""
        try:
            if not self._closing:
                self.flush()
        finally:
            self.abort()

    def abort(self) -> None:
        """Ends the stream at once. What is not acknowledged may or may not have been applied."""
        with self._lock:
            self._closing = self._stopped = True
            call = self._call
            self._work.notify_all()
            self._progress.notify_all()
        if self._thread is None or self._thread is threading.current_thread():
            return
        if not self._core.unacknowledged:
            self._thread.join(END_SECONDS)  # the requests have ended, the server ends the answers
        if call is not None:
            call.cancel()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        if error is None:
            self.close()
        elif isinstance(error, Exception):
            # What was published before the mistake is the user's; his exception stays the one that is raised.
            try:
                self.close()
            except SowError as failed:
                if failed is not error:
                    error.add_note(f"the publisher also failed: {failed}")
        else:
            self.abort()  # Ctrl-C does not wait for a server
        return False

    # ---- the user's thread, with the lock ----

    def _seal_all(self) -> None:
        # While this waits, the sender may seal what has lingered long enough.
        while self._pending:
            if self._core.room:
                self._core.seal()
            else:
                self._wake()
                self._await_progress()
        self._filled = 0
        self._wake()

    def _drain(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._pending:
            self._seal_all()
        elif self._core.has_requests:
            self._wake()  # what was held back
        while self._core.unacknowledged or self._delivering:
            self._await_progress()

    def _await_progress(self) -> None:
        if not self._stopped:
            self._progress.wait()
        if self._stopped:
            raise self._stop_error()

    def _wake(self) -> None:
        self._idle = False
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="sow-publisher", daemon=True)
            self._thread.start()
        self._work.notify_all()

    # ---- gRPC's sender thread ----

    def _requests(self, stream: int) -> Iterator[sow_pb2.PublishStreamRequest]:
        """The requests of one stream, as they become ready; ends when the publisher closes or reconnects."""
        core, linger = self._core, self._core.options.linger
        seen, due = -1, 0.0
        while True:
            with self._lock:
                while True:
                    if stream != self._stream:
                        return
                    request = core.next_request()
                    if request is not None:
                        break
                    if self._closing:
                        return
                    if not self._pending:
                        self._await_pending()
                    elif core.sealed_requests != seen:
                        seen, due = core.sealed_requests, time.monotonic() + linger
                    elif (wait := due - time.monotonic()) > 0:
                        self._work.wait(wait)
                    elif core.room:
                        core.seal()
                    else:
                        self._work.wait()  # for the next acknowledgement
            yield request

    # ---- the publisher's thread ----

    def _run(self) -> None:
        try:
            while self._await_work():
                error = self._stream_once()
                with self._lock:
                    self._core.rewind()
                    # Also for what still lingers: without a rest it would be tried at once, again and again.
                    if (self._pending or self._core.has_requests) and not self._closing:
                        delay = self._core.retry_delay(error, now=time.monotonic(), jitter=random.random())
                        self._work.wait_for(lambda: self._closing, delay)
        except BaseException as error:  # noqa: BLE001 - also a callback's; the user's thread raises it
            with self._lock:
                self._failure = error
                self._stopped = True
                self._progress.notify_all()

    def _await_work(self) -> bool:
        with self._lock:
            while not (self._pending or self._core.has_requests):
                if self._closing:
                    return False
                self._await_pending()
            return not self._closing

    def _await_pending(self) -> None:
        # Said first, looked at second: a record appended in between is seen here, or its producer sees `_idle`.
        self._idle = True
        if not self._pending:
            self._work.wait()

    def _stream_once(self) -> SowError:
        """Opens a stream and settles what it answers, until it ends; returns why it ended."""
        with self._lock:
            self._stream += 1
            requests = self._requests(self._stream)
        call = None
        try:
            try:
                call = self._open_stream(requests)
            except SowError as unavailable:
                return unavailable
            with self._lock:
                self._call = call
                stopped = self._stopped
            if stopped:
                call.cancel()  # `abort` came while the call was being opened, and found none to cancel
            for response in call:
                error = self._settle(response)
                if error is not None:
                    return error
            return _core.cut(_ANSWERS)
        except grpc.RpcError as error:
            return _core.stream_error(error, _ANSWERS)
        finally:
            with self._lock:
                self._stream += 1
                self._call = None
                self._work.notify_all()
            if call is not None:
                call.cancel()

    def _settle(self, response: sow_pb2.PublishStreamResponse) -> SowError | None:
        with self._lock:
            ack, error = self._core.acknowledge(response)
            self._delivering = self._on_ack is not None or self._on_refusal is not None
            self._progress.notify_all()
            if self._pending:
                self._work.notify_all()  # what lingers may have waited for the room
        if self._delivering:
            self._deliver(ack)
            with self._lock:
                self._delivering = False
                self._progress.notify_all()
        return error


class StreamCall(Protocol):
    """A stream that is open."""

    def __iter__(self) -> Iterator[sow_pb2.PublishStreamResponse]: ...

    def cancel(self) -> object: ...


class OpenStream(Protocol):
    """What a blocking publisher needs of a client: the stub's PublishStream, made once there is a connection."""

    def __call__(self, requests: Iterator[sow_pb2.PublishStreamRequest], /) -> StreamCall: ...


class _Cancellable(Protocol):
    """A call, or a task."""

    def cancel(self) -> object: ...


class AioStreamCall(_Cancellable, Protocol):
    """A stream that is open."""

    def __aiter__(self) -> AsyncIterator[sow_pb2.PublishStreamResponse]: ...


class OpenAioStream(Protocol):
    """What an asynchronous publisher needs of a client; see `OpenStream`."""

    def __call__(self, requests: AsyncIterator[sow_pb2.PublishStreamRequest], /) -> Awaitable[AioStreamCall]: ...


class AsyncPublisher(_Shell):
    """`Publisher` for asyncio: the same with `await`, used by one task; callbacks run on the event loop."""

    def __init__(
        self,
        core: PublishCore,
        open_stream: OpenAioStream,
        *,
        next_epoch: Callable[[], Awaitable[int]] | None = None,
        on_ack: Callable[[Ack], object] | None = None,
        on_refusal: Callable[[Refusal], object] | None = None,
    ) -> None:
        """`next_epoch` begins an epoch of the publisher's id, before the first stream; None: the core has its epoch."""
        super().__init__(core, on_ack, on_refusal)
        self._open_stream = open_stream
        self._next_epoch = next_epoch
        self._work = asyncio.Event()
        self._progress = asyncio.Event()
        self._linger: asyncio.TimerHandle | None = None
        self._overdue = False  # what lingers has lingered long enough, and waits for room
        self._call: _Cancellable | None = None  # what the task waits for, so that `abort` can end that
        self._task: asyncio.Task[None] | None = None

    async def publish(
        self, data: Document, *, key: str | None = None, ttl: Ttl | None = None, expire_at: ExpireAt | None = None
    ) -> None:
        """Takes one record; `ttl` or `expire_at` overrule the publisher's own (rule L2). May wait for room."""
        payload = data if type(data) is bytes else encode(data)
        lifetime = None if ttl is None and expire_at is None else _core.lifetime(ttl, expire_at)
        size = len(payload)
        if self._stopped or size > PAYLOAD_BYTES_MAX:
            self._refuse(size)
        if key is None and lifetime is None:
            self._append(payload)
        else:
            if key is not None and len(key) > KEY_CHARACTERS_MAX:
                raise key_too_large(key)
            self._core.plain = False
            self._append((payload, key, lifetime))
        self._filled = filled = self._filled + size
        if filled >= BATCH_BYTES or len(self._pending) >= self._batch_records:
            await self._seal_all()
        elif self._linger is None:
            self._linger = asyncio.get_running_loop().call_later(self._core.options.linger, self._lingered)

    async def publish_columns(
        self,
        payloads: Sequence[bytes],
        *,
        keys: Sequence[str] | None = None,
        lifetime_kinds: Iterable[int] | None = None,
        lifetime_micros: Iterable[int] | None = None,
    ) -> None:
        """Takes many records at once, for a fraction of what as many calls of `publish` cost; see
        `Publisher.publish_columns`."""
        bulk = _bulk(payloads, keys, lifetime_kinds, lifetime_micros)
        if self._stopped:
            raise self._stop_error()
        if self._pending:
            await self._seal_all()
        at = 0
        while at < len(payloads):
            if self._core.room:
                at = self._core.seal_columns(bulk, at)
                self._start()
            else:
                await self._await_progress()

    async def finish_unit(self, *, without_refused: bool = False) -> None:
        """Sends the last records and that the publisher's `unit` is finished; see `Publisher.finish_unit`."""
        core = self._core
        core.check_unit()
        if self._failure is not None:
            raise self._failure
        if core.unit_finished:
            return
        if without_refused:
            await self._drain()
        elif self._pending:
            await self._seal_all()
        while not core.held_alone:
            await self._await_progress()
        core.end_unit(without_refused=without_refused)
        self._start()
        while core.has_requests:
            await self._await_progress()
        failed = core.unit_ended()
        if failed is not None:
            raise failed

    async def flush(self) -> None:
        """Returns once all records so far are settled. Raises PublishFailed for those that were refused since then."""
        if self._failure is not None:
            raise self._failure
        await self._drain()
        self._core.hold()
        failed = self._core.take_refusals()
        if failed is not None and self._on_refusal is None:
            raise failed

    async def _drain(self) -> None:
        self._core.release()
        if self._pending:
            await self._seal_all()
        elif self._core.has_requests:
            self._start()  # what was held back
        while self._core.unacknowledged:
            await self._await_progress()

    async def close(self) -> None:
        """Flushes and ends the stream; may be called again. Raises as `flush` does."""
        try:
            if not self._closing:
                await self.flush()
        finally:
            await self.abort()

    async def abort(self) -> None:
        """Ends the stream at once. What is not acknowledged may or may not have been applied."""
        self._closing = self._stopped = True
        if self._linger is not None:
            self._linger.cancel()
        self._work.set()
        self._progress.set()
        if self._task is None:
            return
        if not self._core.unacknowledged:
            await asyncio.wait([self._task], timeout=END_SECONDS)
        if self._call is not None:
            self._call.cancel()
        await asyncio.wait([self._task])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        if error is None:
            await self.close()
        elif isinstance(error, Exception):
            try:
                await self.close()
            except SowError as failed:
                if failed is not error:
                    error.add_note(f"the publisher also failed: {failed}")
        else:
            await self.abort()
        return False

    async def _seal_all(self) -> None:
        while self._pending:
            if self._core.room:
                self._seal()
            else:
                await self._await_progress()
        self._filled = 0

    def _seal(self) -> None:
        self._core.seal()
        self._overdue = False
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        self._start()

    def _start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="sow-publisher")
        self._work.set()

    def _lingered(self) -> None:
        self._linger = None
        if self._stopped or not self._pending:
            return
        if not self._core.room:
            self._overdue = True
            return
        self._seal()
        if self._pending:  # more than one request
            self._linger = asyncio.get_running_loop().call_later(self._core.options.linger, self._lingered)

    async def _await_progress(self) -> None:
        if not self._stopped:
            self._progress.clear()
            await self._progress.wait()
        if self._stopped:
            raise self._stop_error()

    async def _requests(self, stream: int) -> AsyncIterator[sow_pb2.PublishStreamRequest]:
        """The requests of one stream, as they become ready; ends when the publisher closes or reconnects."""
        while stream == self._stream:
            request = self._core.next_request()
            if request is not None:
                yield request
            elif self._closing:
                return
            else:
                self._work.clear()
                await self._work.wait()

    async def _run(self) -> None:
        try:
            if self._next_epoch is not None:
                self._core.publisher_epoch = await self._waited_for(self._next_epoch())
            while not self._closing:
                if not self._core.has_requests:
                    self._work.clear()
                    await self._work.wait()
                    continue
                error = await self._stream_once()
                self._core.rewind()
                if self._core.has_requests:
                    delay = self._core.retry_delay(error, now=time.monotonic(), jitter=random.random())
                    await self._sleep(delay)
        except BaseException as error:  # noqa: BLE001 - also a callback's; the user's task raises it
            if self._closing and isinstance(error, asyncio.CancelledError):
                return  # `abort` has ended what was waited for
            self._failure = error
            self._stopped = True
            self._progress.set()

    async def _waited_for(self, what: Awaitable[_Value]) -> _Value:
        """Awaits it so that `abort` need not."""
        waiting = self._call = asyncio.ensure_future(what)
        try:
            return await waiting
        finally:
            self._call = None

    async def _sleep(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not self._closing:
                    self._work.clear()
                    await self._work.wait()
        except TimeoutError:
            pass  # slept

    async def _stream_once(self) -> SowError:
        self._stream += 1
        call = None
        try:
            try:
                call = await self._waited_for(self._open_stream(self._requests(self._stream)))
            except SowError as unavailable:
                return unavailable
            self._call = call
            if self._stopped:
                call.cancel()  # `abort` came while it was being opened, and found it done
            async for response in call:
                ack, error = self._core.acknowledge(response)
                self._progress.set()
                if self._overdue:
                    if self._linger is not None:
                        self._linger.cancel()
                    self._lingered()
                self._deliver(ack)
                if error is not None:
                    return error
            return _core.cut(_ANSWERS)
        except grpc.RpcError as error:
            return _core.stream_error(error, _ANSWERS)
        except asyncio.CancelledError:
            if self._closing or task_is_cancelled():
                raise
            return _core.cut(_ANSWERS)
        finally:
            self._stream += 1
            self._call = None
            self._work.set()
            if call is not None:
                call.cancel()
