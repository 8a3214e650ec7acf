# Generated from aio/_following.py by clients/generate_blocking.py. Change that file, then run `make client`.
"""Following topics: subscriptions and durable subscriptions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from functools import partial
from operator import attrgetter
from types import TracebackType
from typing import Self, Unpack

from sow.v1 import admin_pb2, sow_pb2
from sow_client import _lines, _process, _reads, _retention, _statuses, _timeouts
from sow_client._cells import Way
from sow_client._contract import needed
from sow_client._durable import LEAVE_SECONDS_MAX, Acknowledgements, DurableCore
from sow_client._flags import Flag
from sow_client._grouping import Expressions
from sow_client._joined_core import JoinedCore
from sow_client._lines import Home
from sow_client._live_result import ResultCore, result_request
from sow_client._live_view import LiveCore, Readable, ViewFilter, view_closed, view_entered, with_held
from sow_client._ordered import Asked, OrderedCall, OrderedSnapshot, ReadCall, snapshot_query
from sow_client._parameters import Parameters, parameter_values
from sow_client._reads import PatternStart
from sow_client._records import Change, Start, Ttl
from sow_client._reports import Browsed, Durable, Gap, Rewound
from sow_client._setting_values import DurableSettingsArguments
from sow_client._subscription import OpenSubscription, SubscribeCall, Subscription, opened
from sow_client._subscription_core import RETRY_SECONDS, SubscriptionCore
from sow_client._workers import Fault, Worker
from sow_client.blocking._calls import Calls
from sow_client.blocking._consuming import DurableSubscription
from sow_client.blocking._joining import CellCalls, JoinedSubscription
from sow_client.blocking._moving import Transport
from sow_client.blocking._results import LiveResult
from sow_client.errors import SowError


class Following(Calls):
    """The calls that follow topics, and those that manage durable subscriptions."""

    def subscribe(
        self,
        topic: str | None = None,
        filter: str | None = None,  # noqa: A002 - the name that users know from the contract
        parameters: Parameters | None = None,
        *,
        topic_pattern: str | None = None,
        oof: bool = False,
        delta: bool = False,
        changes: bool = False,
        start: PatternStart | None = None,
        conflation: Ttl | None = None,
        progress: Ttl | None = None,
        empty_deltas: bool = False,
        select: Iterable[str] | None = None,
        exclude: Iterable[str] | None = None,
        batch_size: int = 1_000,
        retry_for: float = RETRY_SECONDS,
        on_interruption: Callable[[SowError | None], object] | None = None,
    ) -> Subscription:
        """The changes of the records of a topic that match `filter`, as they happen.

        `parameters`: the values of the names in the filter, {"name": user} for "/Name = :name". `topic_pattern` instead
        of `topic`: every topic whose whole name matches this regular expression (RE2), also topics made later. `oof`:
        also report records that go out of focus. `delta`: send only the changed fields of updates, and skip updates
        that change none, unless `empty_deltas`. `changes`: puts, deletes and expiries where the new or the previous
        record matches, for pipelines. `start`: a bookmark, a datetime or EARLIEST; by default now. `conflation`: the
        newest value of each key, at most once in this time; with `delta` the difference to what came last. `progress`:
        the longest quiet time before the server reports its position, which moves `bookmark`; by default 5 s. `select`
        or `exclude`: payload fields to send, as paths. `batch_size`: the most records in one frame.

        After a break it reconnects for `retry_for` seconds (`math.inf`: for ever), then raises Unavailable.
        `on_interruption` gets the error, once, when an interruption begins, and None when the subscription continues.
        Raises ResyncRequired, with the bookmark reached, when the journal does not continue there: take a snapshot.

        A pattern has the topics of all cells. Where there are several, `bookmark` and `start` are mappings from cells
        to bookmarks. An interruption of one cell names it, and the others go on.

        Rules: S1, S2, S3, S4, S15, C21.
        """
        starts = None
        if topic_pattern is not None and not self._is_part:
            starts, start = _reads.starts_of_cells(start)
        request = _reads.subscribe_request(
            topic,
            filter,
            parameters,
            topic_pattern=topic_pattern,
            sow=False,
            oof=oof,
            delta=delta,
            changes=changes,
            start=start,
            conflation=conflation,
            progress=progress,
            empty_deltas=empty_deltas,
            select=select,
            exclude=exclude,
            batch_size=batch_size,
        )
        return self._follow(request, retry_for, on_interruption, starts=starts)

    def sow_and_subscribe(
        self,
        topic: str | None = None,
        filter: str | None = None,  # noqa: A002 - the name that users know from the contract
        parameters: Parameters | None = None,
        *,
        topic_pattern: str | None = None,
        oof: bool = False,
        delta: bool = False,
        changes: bool = False,
        conflation: Ttl | None = None,
        progress: Ttl | None = None,
        empty_deltas: bool = False,
        select: Iterable[str] | None = None,
        exclude: Iterable[str] | None = None,
        batch_size: int = 1_000,
        retry_for: float = RETRY_SECONDS,
        on_interruption: Callable[[SowError | None], object] | None = None,
        snapshot_max: int | None = None,
        order_by: str | Iterable[str] | None = None,
        top_n: int | None = None,
    ) -> Subscription:
        """First the records that match, each as a "sow", then "snapshot_end", then their changes: nothing is missing
        and nothing comes twice. A `View` keeps the resulting state.

        The arguments are those of `subscribe`. Where `subscribe` raises ResyncRequired, and when the connection breaks
        inside the snapshot, this gives a "resync" (forget all records) and a new snapshot. `snapshot_max`: of a single
        topic, at most so many records, the first ones in key order. The "snapshot_end" then has the reason "truncated"
        if more match, and changes come of all of them.

        `order_by`, as for `query`: the records of the snapshot come in this order, at most `top_n` of them. The changes
        come in their own order, of all matching records. The snapshot is a query then, and the subscription begins at
        its bookmark, so the topic needs a journal.

        A pattern has the topics of all cells. Where there are several, "snapshot_end" comes once those of all cells are
        in, and a "resync" names the topic whose records are to be forgotten.

        Rules: S1, S15, C21.
        """
        request = _reads.subscribe_request(
            topic,
            filter,
            parameters,
            topic_pattern=topic_pattern,
            sow=True,
            oof=oof,
            delta=delta,
            changes=changes,
            start=None,
            conflation=conflation,
            progress=progress,
            empty_deltas=empty_deltas,
            select=select,
            exclude=exclude,
            batch_size=batch_size,
            snapshot_max=snapshot_max,
        )
        return self._follow(request, retry_for, on_interruption, snapshot_query(request, order_by, top_n))

    def live_view(
        self,
        topic: str,
        filter: str | None = None,  # noqa: A002 - the name that users know from the contract
        parameters: Parameters | None = None,
        *,
        on_change: Callable[[Change], object] | None = None,
        progress: Ttl | None = "1s",
        batch_size: int = 1_000,
        retry_for: float = math.inf,
        on_interruption: Callable[[SowError | None], object] | None = None,
    ) -> LiveView:
        """The records of a topic that match `filter`, as a mapping that keeps itself up to date.

        It is complete when it is handed out, and right again after every outage. Where the server does not keep the
        changes since then, it sends only the records that differ. A topic that is deleted has no records until it is
        made again.

        `on_change` gets every change of the map after it was made, those of the first records too: a "put" with the
        record, or an "oof" for a record that has gone. It runs in the view's thread; an exception from it ends the
        view. `progress`: how often the server tells that nothing has happened. The other arguments are those of
        `subscribe`, except that by default the view connects again for ever.

        Rules: F4, F5.
        """
        request = _reads.subscribe_request(
            topic,
            filter,
            parameters,
            topic_pattern=None,
            sow=True,
            oof=True,
            delta=False,
            changes=False,
            start=None,
            conflation=None,
            progress=progress,
            empty_deltas=False,
            select=None,
            exclude=None,
            batch_size=batch_size,
        )
        way = self._cells.way(topic)
        core = LiveCore(
            request,
            retry_for=retry_for,
            connect_timeout=self._connect_timeout,
            on_interruption=on_interruption,
            tells=on_change is not None,
            way=way,
        )
        return opened(LiveView(core, partial(self._open_subscription, way, None), on_change))

    def live_result(
        self,
        topic: str,
        filter: str | None = None,  # noqa: A002 - the name that users know from the contract
        parameters: Parameters | None = None,
        *,
        order_by: str | Iterable[str] | None = None,
        top_n: int | None = None,
        skip_n: int = 0,
        group_by: Expressions | None = None,
        aggregate: Expressions | None = None,
        having: str | None = None,
        conflation: Ttl | None = None,
        progress: Ttl | None = "1s",
        select: Iterable[str] | None = None,
        exclude: Iterable[str] | None = None,
        batch_size: int = 1_000,
        retry_for: float = RETRY_SECONDS,
        on_interruption: Callable[[SowError | None], object] | None = None,
    ) -> LiveResult:
        """The list that a query finds, kept right by the server: in the order of `order_by` the first `top_n` records
        behind the first `skip_n`, as a program shows them on a page.

        The list is there when it is handed out. Iterating gives its changes: first an "oof" for each record that has
        left, then a "put" for each that is new or has changed, at its `position`. All changes that belong together are
        in `list` when the first of them is handed out. They come at most once per `conflation`, by default 100 ms. The
        reason "window" says that a record still matches, and is not among the first any more.

        With `group_by` or `aggregate`, perhaps with `having`, it is the list of the results of groups, as for `query`.
        They are at most 10,000, and are told at most once per second by default. `order_by` and `top_n` may be absent
        then. The server asks again when something has changed.

        `skip_n` and `top_n` together are at most 10,000. After a break the differences to the new list come. The other
        arguments are those of `subscribe`. `sow_and_subscribe` with `order_by` is for programs that want every change
        of all matching records instead.

        Rules: S10, S11, S13.
        """
        request = result_request(
            topic,
            filter,
            parameters,
            order_by=order_by,
            top_n=top_n,
            skip_n=skip_n,
            group_by=group_by,
            aggregate=aggregate,
            having=having,
            conflation=conflation,
            progress=progress,
            select=select,
            exclude=exclude,
            batch_size=batch_size,
        )
        way = self._cells.way(topic)
        core = ResultCore(
            request,
            retry_for=retry_for,
            connect_timeout=self._connect_timeout,
            on_interruption=on_interruption,
            way=way,
        )
        return opened(LiveResult(core, partial(self._open_subscription, way, None)))

    def durable(
        self,
        topic: str,
        name: str,
        filter: str | None = None,  # noqa: A002 - the name that users know from the contract
        parameters: Parameters | None = None,
        *,
        start: Start | None = None,
        force: bool = False,
        oof: bool = False,
        changes: bool = False,
        progress: Ttl | None = None,
        select: Iterable[str] | None = None,
        exclude: Iterable[str] | None = None,
        batch_size: int = 1_000,
        retry_for: float = RETRY_SECONDS,
        on_interruption: Callable[[SowError | None], object] | None = None,
        on_gap: Callable[[Gap], object] | None = None,
        **settings: Unpack[DurableSettingsArguments],
    ) -> DurableSubscription:
        """Consumes a durable subscription: the server keeps its position, and a later consumer continues there.

        It is created if it does not exist, at now or at `start`: a bookmark, a datetime or EARLIEST. Acknowledge each
        change when it is processed. Unacknowledged changes come again to the next consumer, so nothing is lost. It has
        one consumer at a time: a second one gets FailedPrecondition (DURABLE_IN_USE), or takes over with `force`.
        Another `filter`, or other settings, under the same name are refused (DURABLE_DIFFERS). With `replicated=True`
        peers know it, too: the consumer of a client with several addresses goes on at another instance.

        `retain_time`, `retain_bytes`, `backlog_ttl`, `idle_ttl`: see `DurableSettings`. `on_gap` gets each gap of
        changes that could not be handed over, in its place among the changes. After a gap "conflated" the matching
        records come, each as a "sow", then "snapshot_end". The other arguments are those of `subscribe`.

        Rules: J2, F17.
        """
        request = _retention.durable_request(
            topic,
            name,
            filter,
            parameters,
            start=start,
            force=force,
            oof=oof,
            changes=changes,
            settings=settings,
            progress=progress,
            select=select,
            exclude=exclude,
            batch_size=batch_size,
        )
        home, way = Home(f"the consumer of the durable {topic}/{name}"), self._cells.way(topic)
        acknowledgements = Acknowledgements(topic, name, retry_for=retry_for)
        core = DurableCore(
            request,
            acknowledgements,
            retry_for=retry_for,
            connect_timeout=self._connect_timeout,
            on_interruption=on_interruption,
            on_gap=on_gap,
            home=home,
            way=way,
        )
        return opened(
            DurableSubscription(
                core,
                partial(self._open_subscription, way, home),
                acknowledgements,
                partial(self._acknowledge, home),
            )
        )

    def durables(self, topic: str | None = None, *, with_figures: bool = False) -> list[Durable]:
        """The durable subscriptions of a topic, or of all topics of all cells; `with_figures`: with figures before
        filtering.

        Rule: C19.
        """
        request = admin_pb2.ListDurablesRequest(topic=topic or "", with_figures=with_figures)
        answers = self._everywhere(self._admin.ListDurables, request)
        told = bool(topic) or len(answers) > 1
        found = [
            _retention.durable(one, cell if told else "")
            for cell, response in answers.items()
            for one in response.durables
        ]
        return found if len(answers) == 1 else sorted(found, key=attrgetter("topic", "name"))

    def describe_durable(self, topic: str, name: str, *, exact: bool = False) -> Durable:
        """One durable subscription with its figures. With `exact` the server reads the entries and counts only those
        that match the filter.

        Rule: J7.
        """
        request = _retention.describe_request(topic, name, exact=exact)
        way = self._cells.way(topic)
        response = self._call(self._admin.DescribeDurable, request, unbounded=exact, way=way)
        return _retention.durable(response.durable, self._name_of(way))

    def durable_browse(self, topic: str, name: str, *, entries_max: int = 100, after: str | None = None) -> Browsed:
        """Shows unacknowledged entries of a durable subscription, also while a consumer is attached, and consumes
        nothing: at most `entries_max` entries, those after the bookmark `after`.

        Rule: J16.
        """
        request = _retention.browse_request(topic, name, entries_max=entries_max, after=after)
        browsing = _retention.Browsing()
        with closing(self._answers(self._sow.BrowseDurable, request, timeout=self._timeout)) as responses:
            for response in responses:
                if (browsed := browsing.feed(response)) is not None:
                    return browsed
        raise _statuses.cut("the answer to the browse")

    def rewind(self, topic: str, name: str, to: Start, *, force: bool = False) -> Rewound:
        """Moves a durable subscription back to EARLIEST, a bookmark or a datetime: retained entries come again.

        Refused while a consumer is attached, unless `force`, which ends its stream (DURABLE_DETACHED).

        Rule: J6.
        """
        request = _retention.rewind_request(topic, name, to, force=force)
        return _retention.rewound(self._call(self._sow.Rewind, request, once=True))

    def delete_durable(self, topic: str, name: str, *, force: bool = False) -> None:
        """Deletes a durable subscription and its position. `force` deletes it also while a consumer is attached."""
        request = _retention.delete_request(topic, name, force=force)
        self._call(self._admin.DeleteDurable, request, once=True)

    def clear_backlog(self, topic: str, name: str | None = None) -> int:
        """Acknowledges all entries of a durable subscription, or of all durables of the topic. Returns the number of
        entries that were unacknowledged, before filtering.

        Rule: J13.
        """
        request = _retention.clear_request(topic, name)
        response = self._call(self._admin.ClearBacklog, request, once=True)
        return response.acknowledged_entries

    def _follow(
        self,
        request: sow_pb2.SubscribeRequest,
        retry_for: float,
        on_interruption: Callable[[SowError | None], object] | None,
        query: sow_pb2.QueryRequest | None = None,
        starts: Mapping[str, str] | None = None,
    ) -> Subscription:
        seconds = {"retry_for": retry_for, "connect_timeout": self._connect_timeout}
        if request.topic_pattern and not self._is_part:
            joined = JoinedCore(request, starts, **seconds, on_interruption=on_interruption)
            calls = CellCalls(self._all_places, self._cells.at, self._placement_version, self._open_subscription)
            return opened(JoinedSubscription(joined, calls))
        way = self._cells.way(request.topic)
        core = SubscriptionCore(request, **seconds, on_interruption=on_interruption, way=way)
        open_call: OpenSubscription = partial(self._open_subscription, way, None)
        if query is not None:
            open_call = partial(self._open_ordered, way, query)
        return opened(Subscription(core, open_call))

    def _placement_version(self, way: Way[Transport]) -> int:
        return (self._call(self._admin.GetPlacement, admin_pb2.GetPlacementRequest(), way=way)).version

    def _open_ordered(
        self,
        way: Way[Transport],
        query: sow_pb2.QueryRequest,
        request: sow_pb2.SubscribeRequest,
        *,
        connect_seconds: float | None = None,
    ) -> SubscribeCall:
        """A call whose snapshot is a query, if it begins with a snapshot."""
        if not request.sow:
            return self._open_subscription(way, None, request, connect_seconds=connect_seconds)
        line = self._ready(way, connect_seconds, None, needed(request))
        subscribed, queried = _lines.at(line, self._sow.Subscribe), _lines.at(line, self._sow.Query)

        def call_of(asked: Asked) -> ReadCall:
            return queried(asked) if isinstance(asked, sow_pb2.QueryRequest) else subscribed(asked)

        call = OrderedCall(OrderedSnapshot(request, query), call_of)
        way.place.transport.follows(line, call)
        return call

    def _open_subscription(
        self,
        way: Way[Transport],
        home: Home | None,
        request: sow_pb2.SubscribeRequest,
        *,
        connect_seconds: float | None = None,
    ) -> SubscribeCall:
        """`home`: of the consumer of a durable, which keeps to one instance unless the durable is replicated; None: a
        move takes the subscription along."""
        if home is not None and home.moves:
            home.line = None
        line = self._ready(way, connect_seconds, home, needed(request))
        call = _lines.at(line, self._sow.Subscribe)(request)
        if home is not None:
            home.call = call
        way.place.transport.follows(line, call if home is None else home)
        return call

    def _acknowledge(self, home: Home, request: sow_pb2.AcknowledgeRequest) -> sow_pb2.AcknowledgeResponse:
        at_most = LEAVE_SECONDS_MAX if request.detach else None
        place = self._cells.way("", home).place  # where its consumer is, also if the topic is about to move
        return self._call_at(place, self._sow.Acknowledge, request, home=home, at_most=at_most)


class LiveView(Readable):
    """The records of a topic that match a filter, kept up to date in this process: a mapping from keys to records that
    can only be read. Made by `Client.live_view`; any thread may read it.

    A thread of its own keeps it up to date, through broken connections, restarts and lost data of the server. Reading
    raises the error that ended the view, if one did. `close`, the end of a `with` block, or dropping the last
    reference ends it; the records stay readable.

    Rules: F4, F5.
    """

    # Its worker does not refer to it, so that dropping the last reference ends it.

    def __init__(
        self, core: LiveCore, open_call: OpenSubscription, on_change: Callable[[Change], object] | None
    ) -> None:
        self._core = core
        self._on_change = on_change
        self._settled = core.settled = Flag()
        self._subscription = Subscription(core, with_held(core, open_call))
        self._worker = Worker("sow-live-view")
        _process.tell(self)

    def _forked(self) -> None:
        super()._forked()
        _process.keep(self._worker)
        self._worker = Worker("sow-live-view")

    def open(self) -> None:
        """Returns once the view is current for the first time; `live_view` has called it already."""
        self._check_process()
        try:
            self._worker.start(_keep_current, self._subscription, self._core, self._on_change)
            self.wait()
        except BaseException:
            self.close()
            raise

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until the view is current, for at most `seconds`; False if it is not by then."""
        self._check_process()
        self._settled.wait(_timeouts.perhaps(seconds, "seconds"))
        self._check()
        return self.current

    def change(
        self,
        filter: str | None = None,  # noqa: A002 - the name that users know from the contract
        parameters: Parameters | None = None,
    ) -> None:
        """From now on it is a view of the records that match another filter; None: of all. Returns once it is current.

        The view keeps the records that it holds, and the server sends only those that differ. Until all have come, the
        map shows the records of the filter before; it never shows a mixture. A filter that the server refuses changes
        nothing, and raises its error.

        Rule: S14.
        """
        self._check_process()
        self._check()
        if self._core.is_over:
            raise _statuses.closed("live view")
        self._core.change(
            ViewFilter.of(sow_pb2.SubscribeRequest(filter=filter or "", parameters=parameter_values(parameters)))
        )
        self._subscription.call_again()
        self.wait()
        if (refused := self._core.refused) is not None:
            raise refused
        if self._core.is_over:
            raise _statuses.closed("live view")

    def close(self) -> None:
        """Ends the view. No change is told after it, except one that is being told in another thread."""
        self._check_process()
        self._subscription.close()
        view_closed(self._worker)

    def __enter__(self) -> Self:
        view_entered(self.open)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._is_parents and hasattr(self, "_worker"):  # else it was never made
            self._worker.drop(self._subscription.close)


def _keep_current(subscription: Subscription, core: LiveCore, on_change: Callable[[Change], object] | None) -> None:
    try:
        for change in subscription:
            if on_change is not None:
                on_change(change)
        core.end()
    except Fault as error:  # whoever reads the view gets it
        subscription.close()
        core.end(error)
