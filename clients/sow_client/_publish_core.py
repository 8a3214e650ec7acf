"""The publisher: buffered, pipelined, ordered, and safe to cut (rules P6, P7).

`PublishCore` is the whole machine, without I/O, threads or clock. `Publisher` and `AsyncPublisher` only carry its
requests to the server and the answers back. A record moves through

      publish()            seal                 next_request            acknowledge
    ───────────▶  buffer  ───────▶  queued requests  ───────▶  sent requests  ───────▶  counted, forgotten
                                          ▲                        │
                                          └──────── rewind ────────┘   the stream was cut

    [1]  Requests are sent, acknowledged and sent again in the order of their sequences, which have no gaps.
    [2]  A record is counted exactly once, as applied, duplicate or refused, by the answer that settles it.
    [3]  At most `max_in_flight` requests are sealed and not acknowledged. Their payloads exceed 16 MiB by at most one
         request.
    [4]  A refusal for a passing reason settles the records before it. The refused record and the rest are sent again
         unchanged.
    [5]  A publisher that has failed stays failed: every later call raises the same error.
    [6]  With a unit, the newest sealed request is held back until there is a newer one, or a caller waits for it. So
         the request that ends the unit is its last one. It is sent only when all before it is settled without a
         refusal.
    [7]  With several addresses, unsettled records that an instance may have are sent to that instance alone, and so is
         everything of a publisher with a unit, or with an id of the program's. With `failover="again"` only a
         publisher with a unit, or with an epoch that has no token, keeps to its instance, and one whose instance tells
        the others nothing, as an older one.
    [8]  A topic that lives in another cell, or moves there, takes the publisher along (rule C13). The cell that says so
         has answered all requests before, and has applied nothing of this one. In the other cell the unsettled records
         begin an epoch. So a publisher with an epoch of the program's stays, and one whose unit has begun.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sow.v1 import sow_pb2, types_pb2
from sow_client import _reads, _statuses, _timeouts, _writes
from sow_client._cells import ELSEWHERE, Led
from sow_client._contract import REMOVALS, Needed, needed
from sow_client._failover import LOSSES, FailoverPublish
from sow_client._publish_columns import CheckedColumns, Pending, RequestColumns, plain_columns, row_columns
from sow_client._records import invalid
from sow_client.errors import PublishFailed, Refusal, SowError, error_of_reason

IN_FLIGHT_BYTES_MAX: Final = 16 * 1024 * 1024
REFUSALS_KEPT_MAX: Final = 10_000
END_SECONDS: Final = 1.0
"""The time that a closing publisher gives the server to end the stream in order."""

RETRIED_REASONS: Final = frozenset(
    {
        "STREAM_BROKEN",
        "OVERLOADED",
        "WRITE_STALLED",
        "STOPPING",
        "BACKLOG_QUOTA_EXCEEDED",
        "ACCESS_CHANGED",
        "LIMIT_EXCEEDED",
    }
)
"""Reasons that pass by themselves: unacknowledged records are sent again."""
_KEPT: Final = (
    "this publisher stays in the cell where its epoch began: open_publisher takes the topic, and begins one in its cell"
)
FATAL_REASONS: Final = frozenset({"DISK_FULL", "STORE_FAILED", "PUBLISHER_FENCED"})
"""Reasons that concern the whole stream and do not pass by themselves."""


@dataclass(frozen=True, slots=True)
class Ack:
    """The records that one answer of the server settled."""

    applied: int
    duplicates: int
    """Records that an earlier attempt had applied, before a reconnect."""
    refusals: tuple[Refusal, ...]
    last_version: int
    """Version of the last applied record; 0 when none was."""
    last_sequence: int
    """Journal sequence of the last applied record; 0 when none was."""
    durability: str
    """The durability reached: "fsync", "buffered" or "replicated"."""
    last_duplicate_version: int = 0
    """Version of the last duplicate; 0: there was none, or the server does not remember it."""
    last_duplicate_sequence: int = 0
    """Journal sequence of the last duplicate; 0: there was none, or the server does not remember it."""
    bookmark: str | None = None
    """The `start` of a subscription to the changes after these records. None: no position of these records is known, or
    the server is an older one."""
    ttls_ignored: int = 0
    """Applied records whose ttl or expire time has no effect, because the topic has expiration disabled. Rule: L3."""
    removed: int = 0
    """Removals among the applied records that have deleted a record. Rule: P11."""

    @property
    def records(self) -> int:
        """The number of records that it settled."""
        return self.applied + self.duplicates + len(self.refusals)


@dataclass(frozen=True, slots=True)
class OpenedPublisher:
    """A new epoch of a publisher; or none, because its unit is finished. Rule: P6."""

    epoch: int
    """The epoch to publish with. With `unit_done` no new epoch has begun."""
    unit_done: bool
    """The whole unit was published before."""
    unit_records: int
    """With `unit_done`: records that the server applied in the attempt that finished the unit; 0 when a later unit has
    finished since."""
    token: int = 0
    """Belongs to the epoch. With it other instances know the publisher. 0: there is none. Rule: F12."""


@dataclass(slots=True)
class _Sealed:
    """A request that is sealed and not yet acknowledged, with the position of its first record in the whole stream."""

    request: sow_pb2.PublishStreamRequest
    first_index: int
    records: int
    size: int
    sent: bool = False
    """The server may have it."""


@dataclass(frozen=True, slots=True)
class PublisherOptions:
    """The options of a publisher. Durations are in seconds."""

    batch_records: int = 1_000
    max_in_flight: int = 16
    linger: float = 0.02
    retry_for: float = 30.0
    connect_timeout: float = 5.0
    failover: FailoverPublish = "unsent"
    """True if records that a lost instance may have are sent to another one (rule F2)."""
    keeps: bool = False
    """The id was given. Without a token its epoch is of one instance."""

    def __post_init__(self) -> None:
        if not 1 <= self.batch_records <= _reads.RECORDS_PER_REQUEST_MAX:
            raise invalid("batch_records", f"{self.batch_records} is not 1 to {_reads.RECORDS_PER_REQUEST_MAX}")
        if self.max_in_flight < 1:
            raise invalid("max_in_flight", f"{self.max_in_flight} is less than 1")
        for name in ("linger", "retry_for"):
            object.__setattr__(self, name, _timeouts.seconds(getattr(self, name), name))


@dataclass(frozen=True, slots=True)
class StreamDefaults:
    """The fields that all requests of a publisher share."""

    topic: str
    lifetime: types_pb2.Lifetime | None = None
    ttl_mode: types_pb2.TtlMode.ValueType = types_pb2.TTL_MODE_UNSPECIFIED
    durability: types_pb2.Durability.ValueType = types_pb2.DURABILITY_UNSPECIFIED
    delta: bool = False
    unset_paths: Sequence[str] = ()
    unit: int = 0


class PublishCore:
    """Owns the buffer, the sealed requests, the counters and the decision to try again. Not thread-safe."""

    def __init__(
        self,
        defaults: StreamDefaults,
        options: PublisherOptions,
        *,
        publisher_id: str,
        publisher_epoch: int,
        publisher_token: int = 0,
        way: Led | None = None,
        opens: bool = False,
    ) -> None:
        """`way`: to the cell of the topic; None: there is one place only. `opens`: whoever runs it can begin epochs."""
        self.options = options
        self.failover = options.failover
        """The option, in the cell in use."""
        self.wants_epoch = False
        """The next stream needs another epoch of the publisher's id ([8])."""
        self._way = way
        self._opens = opens
        self._before = 0  # records that were settled in other cells
        self.topic = defaults.topic
        self.applied = 0
        self.duplicates = 0
        self.refused = 0
        self.ttls_ignored = 0
        self.removed = 0
        self.publisher_epoch = publisher_epoch
        """Stamped on requests when they are sent, so it may become known after the first records were taken."""
        self.publisher_token = publisher_token
        """Stamped with the epoch."""
        self.pending: deque[Pending] = deque()
        """Records that are not yet in a request. Both ends of a deque are atomic, so a record costs its producer one
        append and no lock. A lock would be a large part of the cost of publishing."""
        self.plain = True
        """No record so far had its own key or lifetime. Cleared before the first record that has one is appended."""
        self.encoded_as = ""
        """The form that documents among the pending records have; empty: there was none so far."""
        self.sealed_requests = 0
        self.is_told = True
        """The instance in use tells others which records have arrived there (rule F11). An older one does not."""
        self.needs = needed(
            sow_pb2.PublishStreamRequest(
                ttl_mode=defaults.ttl_mode,
                durability=defaults.durability,
                delta=defaults.delta,
                unset_paths=defaults.unset_paths,
            )
        )
        self.checked: Needed | None = None
        """The contract that the server of the present stream was found to have; None: it was not asked."""
        self.must_reopen = False
        """The present stream cannot take the next request: its server was not asked whether it knows removals."""
        self._defaults = defaults
        self.publisher_id = publisher_id
        self._next_index = 0
        self._queued: deque[_Sealed] = deque()
        self._sent: deque[_Sealed] = deque()
        self._sealed_bytes = 0
        self.unit_finished = False
        """The server has confirmed that the unit is finished."""
        self._holding = defaults.unit != 0
        self._done_without = 0
        """The number of refused records that the caller has accepted as missing from the unit."""
        self._failed: PublishFailed | None = None
        self._refusals: list[Refusal] = []
        self._refused_reported = 0
        self._backoff = _statuses.Backoff()

    # ---- the buffer ----

    @property
    def room(self) -> bool:
        """Another request may be sealed ([3])."""
        in_flight, size = len(self._queued) + len(self._sent), self._sealed_bytes
        if self._holding and self._queued:
            # The held-back request waits for the next one, so it must not keep that one from being sealed.
            in_flight, size = in_flight - 1, size - self._queued[-1].size
        return in_flight < self.options.max_in_flight and size < IN_FLIGHT_BYTES_MAX

    def seal(self) -> None:
        """Turns the oldest pending records into the next request of the stream, as many as one request may have."""
        pending = self.pending
        count = min(len(pending), self.options.batch_records)
        if count == 0:
            return
        taken = [pending.popleft() for _ in range(count)]
        columns = plain_columns(taken) if self.plain else row_columns(taken)
        fitting = len(columns.payloads)
        if fitting < count:
            pending.extendleft(reversed(taken[fitting:]))
        self._seal(columns)

    def seal_columns(self, bulk: CheckedColumns, start: int) -> int:
        """Turns rows of columns, from `start` on, into the next request of the stream. Returns where the rest begins.

        All pending records must be sealed before.
        """
        columns = bulk.cut(start, self.options.batch_records)
        self._seal(columns)
        return start + len(columns.payloads)

    def _seal(self, columns: RequestColumns) -> None:
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
            encoded_as=self.encoded_as,
            remove=columns.removals,
            publisher=types_pb2.PublisherPosition(
                publisher_id=self.publisher_id,
                first_sequence=self._next_index - self._before + 1,
                unit=defaults.unit,
            ),
        )
        if columns.removals:
            self.needs = REMOVALS
        self._queued.append(_Sealed(request, self._next_index, records, columns.size))
        self._next_index += records
        self._sealed_bytes += columns.size
        self.sealed_requests += 1

    def opened(self, opened: OpenedPublisher) -> None:
        """The epoch of the publisher is known."""
        self.publisher_epoch, self.publisher_token, self.wants_epoch = opened.epoch, opened.token, False

    # ---- the unit ----

    def release(self) -> None:
        """Lets the held-back request go, because a caller waits for it; until `hold`."""
        self._holding = False

    def hold(self) -> None:
        """Holds back the newest request from now on, if it belongs to an unfinished unit."""
        self._holding = self._defaults.unit != 0 and not self.unit_finished

    @property
    def held_alone(self) -> bool:
        """Only the held-back request is left to be settled."""
        return not self._sent and len(self._queued) <= self._holding

    def check_unit(self) -> None:
        """Raises InvalidArgument when there is no unit to finish."""
        if not self._defaults.unit:
            raise invalid("unit", "was not given to this publisher, so there is none to finish")

    def end_unit(self, *, without_refused: bool = False) -> None:
        """Sends the held-back request now, after all others are settled. It ends the unit if no record was refused so
        far ([6]). With `without_refused` it ends the unit also if some were; nothing is held back then."""
        self._done_without = self.refused if without_refused else 0
        if self.refused == self._done_without:
            if not self._queued:
                self._seal(RequestColumns((), (), (), (), 0))
            self._queued[-1].request.publisher.unit_done = True
        self.release()

    def unit_ended(self) -> PublishFailed | None:
        """Called when everything is settled. Returns None when the unit is finished, else the error why it is not."""
        self.unit_finished = self.refused == self._done_without
        self.hold()
        return None if self.unit_finished else self.take_refusals() or self._failed

    # ---- the stream ----

    def next_request(self) -> sow_pb2.PublishStreamRequest | None:
        """The next request to write to the current stream; it counts as sent from now on. None: there is none, or
        another stream has to be opened for it (`must_reopen`)."""
        if len(self._queued) <= self._holding:
            return None
        if self._queued[0].request.remove and self.checked != REMOVALS:
            self.must_reopen = True
            return None
        sealed = self._queued.popleft()
        self._sent.append(sealed)
        sealed.sent = True
        sealed.request.publisher.publisher_epoch = self.publisher_epoch
        sealed.request.publisher.publisher_token = self.publisher_token
        return sealed.request

    def acknowledge(self, response: sow_pb2.PublishStreamResponse) -> tuple[Ack, SowError | None]:
        """Settles the oldest sent request, or its part before a refusal that ended it ([2], [4]).

        The error, if there is one, says why the stream can no longer be used; `retry_delay` judges it.
        """
        if not self._sent:
            raise _statuses.malformed("an answer to no request")
        sealed = self._sent[0]
        error: SowError | None = None
        settled = sealed.records
        refusals: list[Refusal] = []
        for message in response.refusals:
            refusal = _writes.refusal(message, index=sealed.first_index + message.index)
            if refusal.reason == ELSEWHERE:
                settled = message.index
                error = error_of_reason(refusal.reason, refusal.message, details=message.details)
                break
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
            durability=_writes.durability_name(response.durability),
            last_duplicate_version=response.last_duplicate_version,
            last_duplicate_sequence=response.last_duplicate_sequence,
            bookmark=_writes.bookmark(
                response.journal_epoch, max(response.last_sequence, response.last_duplicate_sequence)
            ),
            ttls_ignored=response.ttls_ignored,
            removed=response.removed,
        )
        if ack.records != settled or settled > sealed.records:
            raise _statuses.malformed(f"an answer for {ack.records} of {settled} records")
        if error is not None and (error.reason in RETRIED_REASONS or error.reason == ELSEWHERE):
            for refused in self._sent:
                refused.sent = False  # nothing from the refused record on was applied (rule P6)
        if error is None:
            self._sent.popleft()
            self._sealed_bytes -= sealed.size
        elif settled:
            self._trim(sealed, settled)
            if refusals:
                sealed.request.publisher.unit_done = False  # the rest of the request is not the whole unit
        self.applied += ack.applied
        self.duplicates += ack.duplicates
        self.ttls_ignored += ack.ttls_ignored
        self.removed += ack.removed
        self.refused += len(refusals)
        self._refusals.extend(refusals[: REFUSALS_KEPT_MAX - len(self._refusals)])
        if settled:
            self._backoff.reset()
            if self._way is not None:
                self._way.arrived()
        return ack, error

    def _trim(self, sealed: _Sealed, settled: int) -> None:
        """Takes the settled records off the front of a request."""
        request = sealed.request
        size = sum(map(len, request.payload[:settled]))
        for column in (request.payload, request.key, request.lifetime_kind, request.lifetime_micros, request.remove):
            del column[:settled]
        request.publisher.first_sequence += settled
        sealed.first_index += settled
        sealed.records -= settled
        sealed.size -= size
        self._sealed_bytes -= size

    def rewind(self) -> None:
        """The stream is gone: its unacknowledged requests are queued again, in order ([1])."""
        self._queued.extendleft(reversed(self._sent))
        self._sent.clear()

    @property
    def is_bound(self) -> bool:
        """The next stream has to go to the same instance ([7])."""
        if self._defaults.unit:
            return True
        if self.failover == "again" and (self.is_told or not self.is_unsettled):
            return self.options.keeps and not self.publisher_token
        return self.options.keeps or self.is_unsettled

    @property
    def is_unsettled(self) -> bool:
        """An instance may have records of which it has not told the outcome."""
        return any(sealed.sent for sealed in (*self._sent, *self._queued))

    @property
    def has_requests(self) -> bool:
        """Some requests are sealed and not yet acknowledged."""
        return bool(self._queued or self._sent)

    @property
    def acknowledged(self) -> int:
        """Records settled by the server: applied, duplicate or refused."""
        return self.applied + self.duplicates + self.refused

    @property
    def unacknowledged(self) -> int:
        """Records that were handed over and are not yet settled, including buffered ones."""
        return self._next_index + len(self.pending) - self.acknowledged

    # ---- failures ----

    def retry_delay(self, error: SowError, *, now: float, jitter: float) -> float:
        """Seconds to wait before the stream is opened again; raises when the time to retry is over.

        `now` is a monotonic clock in seconds, `jitter` a random number in [0, 1). The time to retry begins with the
        first failure since the last record was settled. It is `retry_for`, or `connect_timeout` while the server was
        never reached.
        """
        if self.must_reopen:
            self.must_reopen = False
            return 0.0
        if self._leads(error):
            return 0.0
        passing = error.reason in RETRIED_REASONS or error.reason in _statuses.CUT_REASONS
        if self._way is not None:
            passing, error = passing or (error.reason == ELSEWHERE and self._way.differs), self._way.told(error)
            if error.reason == ELSEWHERE and passing:
                self._way.begin_again()
        if not passing and not (error.reason in LOSSES and self.failover == "again" and not self.is_bound):
            raise self.failure(error) from error
        delay = self._backoff.delay(error, now=now, jitter=jitter, limit=self.time_to_retry(error))
        if delay is None:
            raise self.failure(error) from error
        return delay

    def _leads(self, error: SowError) -> bool:
        """True if the stream is to be opened again at once, in the cell of the topic ([8])."""
        if self._way is None or error.reason != ELSEWHERE:
            return False
        if (self.options.keeps and not self._opens) or (self._defaults.unit and self.acknowledged):
            raise self.failure(_statuses.error_like(error, f"{error.message}; {_KEPT}")) from error
        self._begin_anew()
        return self._way.leads(error)

    def _begin_anew(self) -> None:
        """Begins an epoch of which the unsettled records are the first: the cell that has refused them takes them for
        decided (rule P4), and it may become theirs again."""
        if self._opens:
            self.wants_epoch = True
        else:
            self.publisher_epoch, self.publisher_token = self.publisher_epoch + 1, _writes.random_token()
        self._before = self.acknowledged
        for sealed in self._queued:
            sealed.sent = False  # the answers to all before the refused one have come
            sealed.request.publisher.first_sequence = sealed.first_index - self._before + 1

    def time_to_retry(self, error: SowError) -> float:
        """Seconds, from the first of consecutive failures."""
        never_reached = error.reason == "UNREACHABLE" and self.acknowledged == 0
        return min(self.options.connect_timeout, self.options.retry_for) if never_reached else self.options.retry_for

    def failure(self, error: SowError) -> SowError:
        """The error as the user gets it, with the numbers of acknowledged and unacknowledged records."""
        return _statuses.error_like(
            error,
            f"{error.message}; {self.acknowledged} records were acknowledged, {self.unacknowledged} were not",
            acknowledged=str(self.acknowledged),
            unacknowledged=str(self.unacknowledged),
            refused=str(self.refused),
        )

    def take_refusals(self) -> PublishFailed | None:
        """The error for the refusals since the last call, if there were any."""
        if not self._refusals:
            return None
        failed = PublishFailed(self._refusals, refused=self.refused - self._refused_reported)
        self._refused_reported = self.refused
        self._refusals = []
        self._failed = self._failed or failed
        return failed


def checked_unit(publisher_id: str | None, epoch: int | None, unit: int) -> int:
    """The unit of a new publisher. Raises InvalidArgument when unit or epoch is negative, or given without an id."""
    for name, value in (("epoch", epoch or 0), ("unit", unit)):
        if value < 0:
            raise invalid(name, f"{value} is negative")
    if publisher_id is None and (unit or epoch is not None):
        raise invalid("unit" if unit else "epoch", "needs the publisher_id to which it belongs")
    return unit


def new_epoch(opened: OpenedPublisher, publisher_id: str, unit: int) -> OpenedPublisher:
    """The epoch of a new publisher. Raises FailedPrecondition (UNIT_DONE) when its unit is finished already."""
    if opened.unit_done:
        raise error_of_reason(
            "UNIT_DONE", f"the whole unit {unit} of {publisher_id!r} was published before", details={"field": "unit"}
        )
    return opened
