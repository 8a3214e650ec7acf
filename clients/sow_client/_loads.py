"""Loads: replace the content of a topic, all or nothing. Rows are staged part by part; a commit names the valid ones.

`StageCore` is a stager without I/O, threads or clock. `LoadStager` and `AsyncLoadStager` carry its requests to the
server and the answers back.

    [1]  Requests are sent, settled and sent again in order; every row has a position among all rows handed over.
    [2]  A row is counted once, as staged or refused, by the answer that settles it. Requests that a cut stream left
         unanswered are sent again, and the server does not count them twice.
    [3]  At most `IN_FLIGHT_MAX` requests are sealed and not settled. Their payloads exceed 16 MiB by at most one
         request.
"""

from __future__ import annotations

import random
import secrets
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, cast

from sow.v1 import load_pb2, types_pb2
from sow_client import _lifetimes, _process, _statuses, _timeouts, _writes
from sow_client._publish_columns import check_sizes, fitting_rows
from sow_client._publish_core import IN_FLIGHT_BYTES_MAX, REFUSALS_KEPT_MAX, RETRIED_REASONS
from sow_client._records import Ttl, invalid
from sow_client.errors import Refusal, SowError

REQUEST_ROWS: Final = 5_000
IN_FLIGHT_MAX: Final = 8
RETRY_SECONDS: Final = 30.0
"""The time to reconnect without progress."""
END_SECONDS: Final = 1.0
LEASE_DAYS_MAX: Final = 1

LoadPhaseName = Literal["staging", "applying", "deleting", "done", "failed"]


@dataclass(frozen=True, slots=True)
class Load:
    """A load that was opened."""

    id: str
    lease: timedelta
    begin_version: int
    """The highest version at that moment. Later changes by others win against the load."""


@dataclass(frozen=True, slots=True)
class LoadPart:
    """A valid attempt at a part, and the rows that it has staged: `LoadStager.staged`."""

    part: int
    attempt: int
    rows: int


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """Counts of a load."""

    staged: int
    """Rows staged by the attempts that the commit names; before the commit, by all attempts."""
    applied: int
    """Rows published."""
    superseded: int
    """Rows left out because others changed or deleted their records since the load was opened."""
    repeated: int
    """Rows left out because another row of the load has the same key."""
    deleted: int
    """Records deleted because the load has no row for them."""


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """The progress of a committed load: its phase, and its figures so far."""

    phase: LoadPhaseName
    figures: LoadFigures


@dataclass(frozen=True, slots=True)
class LoadInfo:
    """A load as the server knows it."""

    id: str
    topic: str
    phase: LoadPhaseName
    figures: LoadFigures
    failure: str
    """The cause, if it has failed; else empty."""
    opened: datetime
    staged_bytes: int
    lease_end: datetime | None
    """While rows are staged: the time at which the load is aborted unless a row is staged or it is renewed."""


_PHASES: Final = {
    load_pb2.LOAD_PHASE_STAGING: "staging",
    load_pb2.LOAD_PHASE_APPLYING: "applying",
    load_pb2.LOAD_PHASE_DELETING: "deleting",
    load_pb2.LOAD_PHASE_DONE: "done",
    load_pb2.LOAD_PHASE_FAILED: "failed",
}


def open_request(topic: str, lease: timedelta | None) -> load_pb2.OpenLoadRequest:
    """Raises InvalidArgument for an invalid lease."""
    micros = 0
    if lease is not None:
        micros = lease // timedelta(microseconds=1)
        if micros <= 0 or lease > timedelta(days=LEASE_DAYS_MAX):
            raise invalid("lease", f"{lease} is not above zero and at most 24 h")
    return load_pb2.OpenLoadRequest(topic=topic, lease_micros=micros)


def opened(response: load_pb2.OpenLoadResponse) -> Load:
    """The load of a response."""
    return Load(response.load_id, timedelta(microseconds=response.lease_micros), response.begin_version)


def commit_request(load_id: str, parts: Iterable[LoadPart]) -> load_pb2.CommitLoadRequest:
    """The request of a commit."""
    named = [load_pb2.LoadPart(part=part.part, attempt=part.attempt, rows=part.rows) for part in parts]
    return load_pb2.CommitLoadRequest(load_id=load_id, parts=named)


def _phase(value: load_pb2.LoadPhase.ValueType) -> LoadPhaseName:
    name = _PHASES.get(value)
    if name is None:
        raise _statuses.malformed(f"a load in phase {value}")
    return cast(LoadPhaseName, name)


def _figures(message: load_pb2.LoadFigures) -> LoadFigures:
    return LoadFigures(message.staged, message.applied, message.superseded, message.repeated, message.deleted)


def progress(response: load_pb2.CommitLoadResponse) -> LoadProgress:
    """The progress of a response."""
    return LoadProgress(_phase(response.phase), _figures(response.figures))


def info(response: load_pb2.GetLoadResponse) -> LoadInfo:
    """The load of a response."""
    return LoadInfo(
        response.load_id,
        response.topic,
        _phase(response.phase),
        _figures(response.figures),
        response.failure,
        _moment(response.open_time_micros),
        response.staged_bytes,
        _moment(response.lease_end_micros) if response.lease_end_micros else None,
    )


def _moment(micros: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=micros)


def passes(error: SowError) -> bool:
    """True when an error passes by itself, so that a repetition may succeed."""
    return error.reason in RETRIED_REASONS or error.reason in _statuses.CUT_REASONS


@dataclass(slots=True)
class _Sealed:
    request: load_pb2.StageLoadRequest
    rows: int
    size: int


class StageCore:
    """Owns the requests, the counters, and the decision to retry. Not thread-safe."""

    def __init__(self, load_id: str, part: int, attempt: int, *, retry_for: float) -> None:
        if not 0 <= part < 2**32:
            raise invalid("part", f"{part} is not 0 to 2^32 - 1")
        if not 0 <= attempt < 2**64:
            raise invalid("attempt", f"{attempt} is not 0 to 2^64 - 1")
        self.load_id = load_id
        self.part = part
        self.attempt = attempt
        self.staged = 0
        self.refused = 0
        self.refusals: list[Refusal] = []
        self._stager = secrets.randbits(64) | 1
        """Lets the server distinguish repeated rows from the rows of another stager with the same numbers."""
        self._retry_for = _timeouts.seconds(retry_for, "retry_for")
        self._next_row = 1
        self._queued: deque[_Sealed] = deque()
        self._sent: deque[_Sealed] = deque()
        self._sealed_bytes = 0
        self._backoff = _statuses.Backoff()

    def requests(
        self,
        payloads: Sequence[bytes],
        keys: Sequence[str] | None,
        lifetime: Ttl | None,
        kinds: Sequence[int] | None,
        micros: Sequence[int] | None,
    ) -> Iterator[load_pb2.StageLoadRequest]:
        """The rows as requests, to be queued in this order. Raises InvalidArgument before the first."""
        for name, column in (("keys", keys), ("lifetime_kinds", kinds), ("lifetime_micros", micros)):
            if column is not None and len(column) != len(payloads):
                raise invalid(name, f"has {len(column)} entries for {len(payloads)} payloads")
        if (kinds is None) != (micros is None):
            raise invalid("lifetime_micros", "must be given together with lifetime_kinds")
        common = _lifetimes.lifetime_message(lifetime, None)
        check_sizes(payloads, keys)
        return self._requests(payloads, keys, common, kinds, micros)

    def _requests(
        self,
        payloads: Sequence[bytes],
        keys: Sequence[str] | None,
        common: types_pb2.Lifetime | None,
        kinds: Sequence[int] | None,
        micros: Sequence[int] | None,
    ) -> Iterator[load_pb2.StageLoadRequest]:
        start = 0
        while start < len(payloads):
            stop = min(start + REQUEST_ROWS, len(payloads))
            stop = start + fitting_rows(payloads[start:stop], None if keys is None else keys[start:stop])[0]
            yield load_pb2.StageLoadRequest(
                load_id=self.load_id,
                part=self.part,
                attempt=self.attempt,
                stager=self._stager,
                key=() if keys is None else keys[start:stop],
                payload=payloads[start:stop],
                lifetime=common,
                lifetime_kind=()
                if kinds is None
                else cast(Sequence[types_pb2.LifetimeKind.ValueType], kinds[start:stop]),
                lifetime_micros=() if micros is None else micros[start:stop],
            )
            start = stop

    @property
    def room(self) -> bool:
        """Another request may be queued ([3])."""
        in_flight = len(self._queued) + len(self._sent)
        return in_flight < IN_FLIGHT_MAX and self._sealed_bytes < IN_FLIGHT_BYTES_MAX

    @property
    def busy(self) -> bool:
        """Some requests are not settled."""
        return bool(self._queued or self._sent)

    def queue(self, request: load_pb2.StageLoadRequest) -> None:
        """The next request of the stager."""
        rows, size = len(request.payload), sum(map(len, request.payload))
        request.first_row = self._next_row
        self._next_row += rows
        self._sealed_bytes += size
        self._queued.append(_Sealed(request, rows, size))

    def next_request(self) -> load_pb2.StageLoadRequest | None:
        """The next request to write to the current stream; it counts as sent from now on."""
        if not self._queued:
            return None
        self._sent.append(self._queued.popleft())
        return self._sent[-1].request

    def settle(self, response: load_pb2.StageLoadResponse) -> None:
        """Settles the oldest sent request ([2])."""
        if not self._sent:
            raise _statuses.malformed("an answer to no request")
        sealed = self._sent.popleft()
        if response.staged + len(response.refusals) != sealed.rows:
            raise _statuses.malformed(f"an answer for {response.staged + len(response.refusals)} of {sealed.rows} rows")
        self._sealed_bytes -= sealed.size
        before = sealed.request.first_row - 1
        for message in response.refusals[: REFUSALS_KEPT_MAX - len(self.refusals)]:
            self.refusals.append(_writes.refusal(message, index=before + message.index))
        # The counts come last: another thread that reads them knows the refusals of all rows that are counted.
        self.refused += len(response.refusals)
        self.staged += response.staged
        self._backoff.reset()

    def rewind(self) -> None:
        """The stream is gone: its unanswered requests are queued again, in order."""
        self._queued.extendleft(reversed(self._sent))
        self._sent.clear()

    def retry_delay(self, error: SowError, *, now: float, jitter: float) -> float:
        """Seconds to wait before the stream is opened again; raises when the time to retry is over."""
        if not passes(error):
            raise error
        delay = self._backoff.delay(error, now=now, jitter=jitter, limit=self._retry_for)
        if delay is None:
            raise error
        return delay


class StagedRows(_process.Owned):
    """The part of a stager that is alike for threads and tasks: what it shows."""

    _what = "stager"

    def __init__(self, core: StageCore) -> None:
        _process.tell(self)
        self._core = core
        self._failure: BaseException | None = None
        self._closing = False
        self._stream = 0

    def _forked(self) -> None:
        super()._forked()
        if not self._closing:
            self._failure = _process.forked(self._what)

    def __repr__(self) -> str:
        core, state = self._core, ", closed" if self._closing else ""
        return f"{type(self).__name__}(part {core.part}, {core.staged} rows staged, {core.refused} refused{state})"

    @property
    def staged(self) -> int:
        """Rows that the server has staged. After `flush` this is the value for `LoadPart.rows`."""
        return self._core.staged

    @property
    def refused(self) -> int:
        """Rows that were refused; the others are staged."""
        return self._core.refused

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """The first 10,000 refusals. An index counts all rows that were handed over, from 0."""
        return tuple(self._core.refusals)

    def part(self) -> LoadPart:
        """The part that names this attempt in a commit; valid after `flush`."""
        return LoadPart(self._core.part, self._core.attempt, self._core.staged)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closing:
            raise _statuses.closed("stager")


class CommitRetry:
    """Decides when to ask again for the progress of a committed load, after its stream was cut off."""

    def __init__(self, retry_for: float) -> None:
        self._backoff = _statuses.Backoff()
        self._retry_for = _timeouts.seconds(retry_for, "retry_for")

    def heard(self) -> None:
        """The server has sent progress."""
        self._backoff.reset()

    def delay(self, error: SowError) -> float:
        """Seconds to wait; raises when the time to retry is over."""
        delay = None
        if passes(error):
            delay = self._backoff.delay(error, now=time.monotonic(), jitter=random.random(), limit=self._retry_for)
        if delay is None:
            raise error
        return delay
