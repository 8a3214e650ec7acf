"""A live result: the list that a query finds, kept right by the server (rules S10, S11, S13, S14).

[1]  The list is always the result of the query at one position. The changes that lead to the next one are taken in
     together, before the first of them is handed out.
[2]  Each call begins with a snapshot. Behind the first one it is told as the differences to the list so far, so the
     program that applies all changes has the list, whatever happens to the connection.
[3]  Another query begins with a call of its own, and its list is told as the differences, too. Until its snapshot is
     complete, the list is that of the query before. If the server refuses it, that one is called again (S14).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress

from msgspec import structs

from sow.v1 import sow_pb2
from sow_client import _reads, _statuses
from sow_client._cells import Led
from sow_client._change_frames import changes_of
from sow_client._grouping import Expressions, expressions
from sow_client._parameters import Parameters
from sow_client._records import Change, Record, RecordBatch, Ttl, invalid
from sow_client._subscription_core import RESYNC_REASONS, SubscriptionCore
from sow_client._view import differ, in_own_batch
from sow_client.errors import SowError


class ResultCore(SubscriptionCore):
    """Owns the list, and the snapshot that is to take its place. Not thread-safe."""

    def __init__(
        self,
        request: sow_pb2.SubscribeRequest,
        *,
        retry_for: float,
        connect_timeout: float,
        on_interruption: Callable[[SowError | None], object] | None = None,
        way: Led | None = None,
    ) -> None:
        super().__init__(
            request, retry_for=retry_for, connect_timeout=connect_timeout, on_interruption=on_interruption, way=way
        )
        self.rows: Sequence[Record] = ()
        self.reached: str | None = None
        """The position of the list; None: there was no snapshot yet."""
        self.absent_fields: tuple[str, ...] = ()
        self._next: list[Record] = []  # the snapshot that is put together
        self._together: list[Change] = []  # of an interval that is not complete
        self._before: sow_pb2.SubscribeRequest | None = None  # the query of the list, while another one is to follow
        self._ends = False  # the present call is of the query before
        self._left: list[Change] = []  # changes of the list before that were not handed out
        self.refused: SowError | None = None
        """Why the server refused the last change of the query; None: it did not."""

    @property
    def bookmark(self) -> str | None:
        return self.reached

    @property
    def topic(self) -> str:
        """The topic that it is about."""
        return self._request.topic

    @property
    def changing(self) -> bool:
        """True from the wish for another query until its list is there, or the server has refused it."""
        return self._before is not None

    def change(self, wanted: sow_pb2.SubscribeRequest) -> None:
        """From the next call on it is the list of another query ([3]). The present call has to be ended."""
        request, now = sow_pb2.SubscribeRequest(), self._request
        request.CopyFrom(wanted)
        request.conflation_micros, request.progress_micros = now.conflation_micros, now.progress_micros
        request.batch_size = now.batch_size
        if now.HasField("select"):
            request.select.CopyFrom(now.select)
        self._left += self.pending
        self._before = self._before or now
        self._request, self._ends, self.refused = request, True, None

    def request(self, *, now: float) -> sow_pb2.SubscribeRequest:
        """As `SubscriptionCore.request`."""
        self._ends = False
        return super().request(now=now)

    def feed(self, response: sow_pb2.SubscribeResponse) -> None:
        """As `SubscriptionCore.feed`."""
        if self._ends:
            raise _statuses.cut("the list of the query before")
        super().feed(response)

    def _go_on(self, request: sow_pb2.SubscribeRequest) -> None:
        self._snapshot = True  # a bookmark begins no live result

    def ended(self, error: SowError, *, now: float, jitter: float) -> float:
        """As `SubscriptionCore.ended`. The next call begins with a snapshot ([2])."""
        self._snapshot = self.behind = True
        if self._ends:
            return 0.0
        if self._before is not None and not self._passes(error) and error.reason not in RESYNC_REASONS:
            self._request, self._before, self.refused = self._before, None, error
            return 0.0
        return super().ended(error, now=now, jitter=jitter)

    def _begin_snapshot(self, begin: sow_pb2.SnapshotBegin) -> None:
        self._stand()
        self._next, self._together = [], []

    def _feed_snapshot(self, snapshot: sow_pb2.SnapshotBatch) -> None:
        self._next += list(RecordBatch(snapshot.topic, snapshot.records))

    def _end_snapshot(self, end: sow_pb2.SnapshotEnd) -> None:
        self._backoff.reset()
        rows, first = self._next, self.reached is None
        told = () if first else _ending(list(differences(self.rows, rows, self._request.topic)), end.bookmark)
        told = (*self._left, *told)
        pending = iter(told)
        self.absent_fields = tuple(end.absent_fields)
        self.rows, self.reached, self._next = rows, end.bookmark, []
        self._left, self._before = [], None
        self._changes, self.pending = told, pending
        self._snapshot = self.behind = False

    def _feed_changes(self, batch: sow_pb2.ChangeBatch) -> None:
        if not batch.more and not batch.bookmark:
            raise _statuses.malformed("changes without a bookmark")
        self._together += _placed(batch)
        if batch.more:
            return
        self._backoff.reset()
        held = {record.key: record for record in self.rows}
        told = _ending([_with_held(change, held) for change in self._together], batch.bookmark)
        rows, pending = applied(self.rows, told), iter(told)
        self._together = []
        self.rows, self.reached = rows, batch.bookmark
        self._changes, self.pending = told, pending

    def _feed_progress(self, bookmark: str, *, covers: bool = True) -> None:
        super()._feed_progress(bookmark, covers=covers)
        self._after = ""
        if not self._together:
            self.reached = bookmark


def _ending(told: list[Change], bookmark: str) -> tuple[Change, ...]:
    """Changes that belong together: the last one has the bookmark."""
    return (*told[:-1], *[structs.replace(last, bookmark=bookmark) for last in told[-1:]])


def _placed(batch: sow_pb2.ChangeBatch) -> list[Change]:
    """The changes of a frame, with their places."""
    positions = batch.position
    changes = changes_of(batch, "")
    if len(positions) != len(changes):
        raise _statuses.malformed("columns of unequal length")
    return [
        Change("put", None, record, topic=batch.topic, position=position)
        if change.op == "put" and (record := change.record) is not None
        else Change("oof", change.reason, None, change.record or change.previous, topic=batch.topic)
        for change, position in zip(changes, positions, strict=True)
    ]


def _with_held(change: Change, held: Mapping[str, Record]) -> Change:
    """The change as it is handed out: an "oof" with the record that was in the list, a record that stays in a batch of
    its own."""
    if change.op == "oof":
        return Change("oof", change.reason, None, held.get(change.key, change.previous), topic=change.topic)
    assert change.record is not None, "a put has its record"
    record = in_own_batch(change.record, change.record.payload)
    return Change("put", None, record, topic=change.topic, position=change.position)


def applied(rows: Sequence[Record], changes: Sequence[Change]) -> list[Record]:
    """The list after these changes: they are taken out, then the puts are inserted in their order (rule S11)."""
    concerned = {change.key for change in changes}
    left = [record for record in rows if record.key not in concerned]
    for change in changes:
        if change.record is not None:
            assert change.position is not None, "a put has its place"
            if change.position > len(left):
                raise _statuses.malformed(f"a place {change.position} in a list of {len(left)}")
            left.insert(change.position, change.record)
    return left


def differences(before: Sequence[Record], after: Sequence[Record], topic: str) -> Iterable[Change]:
    """The changes that lead from one list to another, in the order of rule S11."""
    old = {record.key: record for record in before}
    new = {record.key for record in after}
    for record in before:
        if record.key not in new:
            yield Change("oof", None, None, record, topic=topic)
    fresh = [(known := old.get(record.key)) is None or differ(known, record) for record in after]
    stay = list(compress((record.key for record in after), [not one for one in fresh]))
    kept = set(stay)
    if stay != [record.key for record in before if record.key in kept]:
        fresh = [True] * len(after)  # by sequences, which another instance numbers in another way
    for position, record in enumerate(after):
        if fresh[position]:
            yield Change("put", None, record, topic=topic, position=position)


def result_request(
    topic: str,
    filter_text: str | None,
    parameters: Parameters | None,
    *,
    order_by: str | Iterable[str] | None,
    top_n: int | None,
    skip_n: int,
    group_by: Expressions | None,
    aggregate: Expressions | None,
    having: str | None,
    conflation: Ttl | None,
    progress: Ttl | None,
    select: Iterable[str] | None,
    exclude: Iterable[str] | None,
    batch_size: int,
) -> sow_pb2.SubscribeRequest:
    """The request of a list of records, or of the results of groups."""
    if not (group_by or aggregate or having):
        if not order_by:
            raise invalid("order_by", "is needed, or group_by or aggregate")
        if top_n is None:
            raise invalid("top_n", "is needed with order_by")
    for given, least, field in ((top_n, 1, "top_n"), (skip_n, 0, "skip_n")):
        if given is not None and given < least:
            raise invalid(field, f"{given} is less than {least}")
    request = _reads.subscribe_request(
        topic,
        filter_text,
        parameters,
        topic_pattern=None,
        sow=True,
        oof=True,
        delta=False,
        changes=False,
        start=None,
        conflation=conflation,
        progress=progress,
        empty_deltas=False,
        select=select,
        exclude=exclude,
        batch_size=batch_size,
    )
    request.order_by = _reads.order_text(order_by)
    request.top_n, request.skip_n = top_n or 0, skip_n
    request.group_by.extend(expressions(group_by, "group_by"))
    request.aggregate.extend(expressions(aggregate, "aggregate"))
    request.having = having or ""
    return request
