"""The publisher of many topics: one `PublishCore` for each topic, and one stream for each cell (rule C22). Pure.

[1]  A topic has its own publisher id, sequences, batches and refusals, all in its `PublishCore`. So its order, its
     retries and its way to another cell are those of a publisher of one topic (rules P6, C13).
[2]  A stream carries the requests of all topics of its cell, in the order in which they were sealed. Its answers
     come in that order, so `CellCore` only remembers whose request each of them answers.
[3]  What is sealed and buffered is bounded for each cell, and not for each topic: a cell that is down holds up its
     own topics alone.
[4]  An error that concerns one topic is judged by that topic's core, and the topic leaves the stream; the others
     are sent again on another one, where the server drops what it has. An error of the connection, or of the whole
     instance, is judged by the core of each topic that has unsettled records.
[5]  A topic that has failed stays failed; the others go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Protocol

from sow.v1 import sow_pb2
from sow_client import _statuses, _writes
from sow_client._cells import Place, Way
from sow_client._contract import REMOVALS, Needed
from sow_client._failover import LOSSES, FailoverPublish
from sow_client._publish_columns import RequestColumns
from sow_client._publish_core import (
    IN_FLIGHT_BYTES_MAX,
    REFUSALS_KEPT_MAX,
    RETRIED_REASONS,
    Ack,
    PublishCore,
    PublisherOptions,
    StreamDefaults,
)
from sow_client.errors import PublishFailed, Refusal, SowError

TOPIC_BYTES: Final = 4096
"""A topic with buffered records counts for so much in the bound of its cell, beside its payloads."""
_OF_ONE: Final = frozenset({"BACKLOG_QUOTA_EXCEEDED", "LIMIT_EXCEEDED"})
"""Passing reasons that may concern one topic alone."""


class Lane(Protocol):
    """The publisher of one topic, as the stream of its cell sees it."""

    def rests(self) -> None:
        """Its records are about to be sealed: the next one has to ask for that again."""

    def fails(self, error: SowError) -> None:
        """The topic has failed."""

    def leaves(self, delay: float) -> None:
        """The topic has left the stream, and goes to where its way leads, after `delay` seconds."""


class TopicCore(PublishCore):
    """The core of one topic."""

    lane: Lane
    cell: CellCore | None = None
    """Its stream; None: it is under way to another one, or has failed."""

    def __init__(self, defaults: StreamDefaults, options: PublisherOptions, way: Way[Any]) -> None:
        super().__init__(
            defaults,
            options,
            publisher_id=_writes.random_publisher_id(),
            publisher_epoch=1,
            publisher_token=_writes.random_token(),
            way=way,
        )
        self._to = way

    @property
    def place(self) -> Place[Any]:
        """Where the topic lives."""
        return self._to.place

    @property
    def room(self) -> bool:
        """Its cell has room for another request ([3])."""
        return self.cell is not None and self.cell.room

    def _seal(self, columns: RequestColumns) -> None:
        super()._seal(columns)
        assert self.cell is not None, "a topic under way has no room"
        self.cell.sealed(self, columns.size)

    @property
    def sealed_bytes(self) -> int:
        """Bytes of the payloads that are sealed and not acknowledged."""
        return self._sealed_bytes

    @property
    def sealed_count(self) -> int:
        """The number of its requests that are sealed and not acknowledged."""
        return len(self._queued) + len(self._sent)


class CellCore:
    """The requests of all topics of one stream ([2]). It has what a machine that runs a `PublishCore` uses of that."""

    def __init__(self, name: str, options: PublisherOptions) -> None:
        self.topic = name
        self.options = options
        self.cores: dict[str, TopicCore] = {}
        self.pending: deque[TopicCore] = deque()
        """The topics with buffered records, in the order of their first one. One may be there twice, or in vain."""
        self.filled = 0
        """Bytes that were buffered since all was sealed."""
        self.answered: TopicCore | None = None
        """The topic of the last answer."""
        self.must_reopen = False
        self.sealed_requests = 0
        """How often all that was buffered was sealed: what comes then lingers anew."""
        self._left = 0  # topics that are still to be sealed of those that have lingered
        self._queued: deque[TopicCore] = deque()
        self._sent: deque[TopicCore] = deque()
        self._bytes = 0
        self._blamed: TopicCore | None = None
        self._failover = options.failover
        self._is_told = True
        self._checked: Needed | None = None

    # ---- the topics ----

    def attach(self, core: TopicCore) -> None:
        """A topic lives in this cell."""
        core.cell, core.failover, core.is_told, core.checked = self, self._failover, self._is_told, self._checked
        self.cores[core.topic] = core
        self._queued.extend([core] * core.sealed_count)
        self._bytes += core.sealed_bytes
        if core.pending:
            self.pending.append(core)

    def _detach(self, core: TopicCore) -> None:
        core.cell = None
        del self.cores[core.topic]
        self._bytes -= core.sealed_bytes
        self._queued = deque(one for one in self._queued if one is not core)
        while core in self.pending:  # else the stream would be opened for it again and again
            self.pending.remove(core)

    # ---- the buffer ----

    @property
    def room(self) -> bool:
        """Another request may be sealed ([3])."""
        return len(self._queued) + len(self._sent) < self.options.max_in_flight and self._bytes < IN_FLIGHT_BYTES_MAX

    def seal(self) -> None:
        """Turns the buffered records of the next topic into a request."""
        self._left = self._left or len(self.pending)
        while self._left and self.pending:
            self._left -= 1
            core = self.pending.popleft()
            core.lane.rests()
            if core.pending:
                core.seal()
                if core.pending:
                    self.pending.append(core)
                break
        if not self.pending:
            self._left = 0
        if not self._left:
            self.sealed_requests += 1

    def sealed(self, core: TopicCore, size: int) -> None:
        """A topic has sealed a request."""
        self._queued.append(core)
        self._bytes += size

    def release(self) -> None:
        """As `PublishCore.release`: nothing is held back here."""

    # ---- the stream ----

    @property
    def needs(self) -> Needed | None:
        """The contract that the server of the next stream must have."""
        found = None
        for core in self.cores.values():
            if core.needs is not None:
                found = core.needs
                if found == REMOVALS:
                    break
        return found

    def next_request(self) -> sow_pb2.PublishStreamRequest | None:
        """As `PublishCore.next_request`."""
        if not self._queued:
            return None
        core = self._queued[0]
        request = core.next_request()
        if request is None:
            self.must_reopen = core.must_reopen
            return None
        self._sent.append(self._queued.popleft())
        return request

    def acknowledge(self, response: sow_pb2.PublishStreamResponse) -> tuple[Ack, SowError | None]:
        """As `PublishCore.acknowledge`; `answered` is the topic then."""
        if not self._sent:
            raise _statuses.malformed("an answer to no request")
        core = self.answered = self._sent[0]
        before = core.sealed_bytes
        ack, error = core.acknowledge(response)
        self._bytes += core.sealed_bytes - before
        if error is None:
            self._sent.popleft()
        return ack, error

    def rewind(self) -> None:
        """As `PublishCore.rewind`. The oldest request is the one that an error is about ([4])."""
        self._blamed = self._sent[0] if self._sent else None
        for core in {id(core): core for core in self._sent}.values():
            core.rewind()
        self._queued.extendleft(reversed(self._sent))
        self._sent.clear()

    @property
    def is_bound(self) -> bool:
        """As `PublishCore.is_bound`."""
        return any(core.is_bound for core in self.cores.values())

    @property
    def is_unsettled(self) -> bool:
        """As `PublishCore.is_unsettled`."""
        return any(core.is_unsettled for core in self.cores.values())

    @property
    def has_requests(self) -> bool:
        """Some requests are sealed and not yet acknowledged."""
        return bool(self._queued or self._sent)

    @property
    def unacknowledged(self) -> int:
        """Records of its topics that are not yet settled."""
        return sum(core.unacknowledged for core in self.cores.values())

    @property
    def failover(self) -> FailoverPublish:
        """The option, in this cell."""
        return self._failover

    @failover.setter
    def failover(self, value: FailoverPublish) -> None:
        self._failover = value
        for core in self.cores.values():
            core.failover = value

    @property
    def is_told(self) -> bool:
        """As `PublishCore.is_told`."""
        return self._is_told

    @is_told.setter
    def is_told(self, value: bool) -> None:
        self._is_told = value
        for core in self.cores.values():
            core.is_told = value

    @property
    def checked(self) -> Needed | None:
        """As `PublishCore.checked`."""
        return self._checked

    @checked.setter
    def checked(self, value: Needed | None) -> None:
        self._checked = value
        for core in self.cores.values():
            core.checked = value

    # ---- failures ----

    def retry_delay(self, error: SowError, *, now: float, jitter: float) -> float:
        """Seconds to wait before the stream is opened again. Topics whose time to retry is over fail, and leave."""
        blamed, self._blamed = self._blamed, None
        if self.must_reopen:
            self.must_reopen = False
            for core in self.cores.values():
                core.must_reopen = False
            return 0.0
        if blamed is not None and blamed.cell is self and _is_of_one(error):
            delay = self._judged(blamed, error, now, jitter)
            if delay is not None:
                self._detach(blamed)
                blamed.lane.leaves(delay)
            return 0.0
        judged = [core for core in self.cores.values() if core.unacknowledged]
        delays = [self._judged(core, error, now, jitter) for core in judged]
        return max((delay for delay in delays if delay is not None), default=0.0)

    def _judged(self, core: TopicCore, error: SowError, now: float, jitter: float) -> float | None:
        """Seconds until the topic tries again; None: it has failed."""
        try:
            return core.retry_delay(error, now=now, jitter=jitter)
        except SowError as failed:
            self._detach(core)
            core.lane.fails(_statuses.error_like(failed, f"{core.topic}: {failed.message}", topic=core.topic))
            return None


def _is_of_one(error: SowError) -> bool:
    """True for an error that concerns the topic of one request ([4])."""
    if error.reason in _OF_ONE:
        return True
    return error.reason not in RETRIED_REASONS | _statuses.CUT_REASONS | LOSSES


class Totals:
    """The figures of a publisher, over its topics."""

    def __init__(self, cores: Callable[[], Iterable[PublishCore]]) -> None:
        self._cores = cores

    def __getattr__(self, name: str) -> int:
        return sum(getattr(core, name) for core in self._cores())


def refusals_of(failures: Mapping[str, PublishFailed]) -> PublishFailed | None:
    """One error for the refusals of several topics; None: there are none."""
    if not failures:
        return None
    topics = {topic: failed.refusals for topic, failed in failures.items()}
    every: list[Refusal] = [one for refusals in topics.values() for one in refusals]
    refused = sum(failed.refused for failed in failures.values())
    return PublishFailed(every[:REFUSALS_KEPT_MAX], refused=refused, topics=topics)
