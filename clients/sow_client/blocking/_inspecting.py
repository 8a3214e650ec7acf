# Generated from aio/_inspecting.py by clients/generate_blocking.py. Change that file, then run `make client`.
"""Looking at a server: the history of a key, the records that fall due, the subscriptions under way,
figures, the configuration, the log."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import closing
from dataclasses import replace
from operator import attrgetter

from sow.v1 import admin_pb2
from sow_client import _history, _inspection, _placement, _statuses
from sow_client._cells import in_cell
from sow_client._history import History
from sow_client._inspection import ActiveSubscription, ConfigSetting, ExpiryHorizon, Figures, LogLevel, LogLine
from sow_client._keys import Key
from sow_client._placement import Placement, PlacementReloaded
from sow_client._records import Ttl
from sow_client.blocking._calls import Calls


class Inspecting(Calls):
    """The calls that look, and those that end what was found."""

    def history(self, topic: str, key: Key, *, entries_max: int = 100, upto: str | None = None) -> History:
        """The changes of a key that the journal still has, the newest first, across deletes and expiries: at most
        `entries_max`, up to the bookmark `upto`. `History.bookmark` continues it.

        A change costs one look-up at the server. Only where the key was gone the journal is searched, some hundred
        thousand changes a second. Raises FailedPrecondition (NO_JOURNAL) if the topic has no journal.

        Rule: S9.
        """
        request = _history.request(topic, key, entries_max=entries_max, upto=upto)
        reading = _history.Reading()
        with closing(self._answers(self._sow.ReadHistory, request)) as responses:
            for response in responses:
                if (found := reading.feed(response)) is not None:
                    return found
        raise _statuses.cut("the history")

    def expiry_horizon(
        self, topic: str | None = None, spans: Iterable[Ttl] = (), *, exact: bool = False
    ) -> ExpiryHorizon:
        """The numbers of records of a topic, or of all topics of all cells, that fall due in each of several spans of
        time.

        `spans`: their ends from now, rising, such as ("1m", "1h"); by default 1m, 10m, 1h, 6h, 1d, 7d. Up to 100,000
        records are looked at, and further ones counted by the expiry index, which is an estimate where lifetimes were
        changed: `ExpiryHorizon.exact_upto`. With `exact` the count ends there. A caller with `rows` on a topic may not
        ask for it.

        Each cell counts from its own clock; the horizon of several has the earliest of their times.

        Rules: L22, C19.
        """
        request = _inspection.horizon_request(topic, spans, exact=exact)
        answers = self._everywhere(self._admin.GetExpiryHorizon, request)
        return _inspection.joined([_inspection.horizon(answer) for answer in answers.values()])

    def subscriptions(self, topic: str | None = None) -> list[ActiveSubscription]:
        """The subscriptions under way in all cells, or those of a topic, in the order of their begin. Where there are
        several cells, an id has the name of its cell in front of it, such as "b/u4".

        Rule: C19.
        """
        request = admin_pb2.ListSubscriptionsRequest(topic=topic or "")
        answers = self._everywhere(self._admin.ListSubscriptions, request)
        told = bool(topic) or len(answers) > 1
        found = [
            replace(one, id=in_cell(cell, one.id), session=in_cell(cell, one.session)) if told else one
            for cell, answer in answers.items()
            for one in map(_inspection.subscription, answer.subscriptions)
        ]
        return found if len(answers) == 1 else sorted(found, key=attrgetter("since"))

    def end_subscription(self, id: str) -> None:  # noqa: A002 - the name that subscriptions() shows
        """Ends a subscription with ACCESS_CHANGED. Its client may subscribe again; `subscribe` does so by itself. `id`
        as `subscriptions` has it; without a cell in front, one of the client's own."""
        way, number = self._way_of(id)
        request = admin_pb2.EndSubscriptionRequest(id=number)
        self._call(self._admin.EndSubscription, request, once=True, way=way)

    def watch_figures(
        self, interval: Ttl = "1s", *, topics_max: int = 100, history: Ttl | None = None
    ) -> Generator[Figures, None, None]:
        """Figures of the server: at once, then each time that `interval` has passed (100 ms to 1 h), without end. They
        name the `topics_max` topics with the most changes. With `history`, such as "1h", those of so long before come
        first: one for each 5 s since the server's start, of an hour at most, with at most 10 topics each. It raises
        when the connection breaks, and ends when the server stops.

        Rule: X11.
        """
        request = _inspection.watch_request(interval, topics_max, history)
        with closing(self._answers(self._admin.WatchFigures, request)) as responses:
            for response in responses:
                yield _inspection.figures(response)

    def placement(self, topic: str | None = None) -> Placement:
        """The cell of the server, and the placement of topics in cells, as far as the caller may know it: every caller
        may ask. With a topic, which need not exist, `Placement.topic_cell` is its cell.

        Rules: C1, C8.
        """
        request = admin_pb2.GetPlacementRequest(topic=topic or "")
        return _placement.placement(self._call(self._admin.GetPlacement, request))

    def reload_placement(self, text: str = "") -> PlacementReloaded:
        """Makes the server read its placement file again. All of it counts, or nothing if it has a fault. `text`: that
        of the next file, which the server writes into the place of its own.

        Rules: C4, C15.
        """
        return self._reload(admin_pb2.ReloadPlacementRequest(placement=text))

    def prepare_placement(self, text: str, topics: Iterable[str], sources: Iterable[str]) -> PlacementReloaded:
        """Makes the server keep the text of a placement file until the cells that `topics` leave have it, and all of
        these topics is there. `sources`: the names of the instances of these cells.

        Rule: C16.
        """
        prepare = admin_pb2.PreparePlacement(topics=topics, sources=sources)
        return self._reload(admin_pb2.ReloadPlacementRequest(placement=text, prepare=prepare))

    def drop_placement(self) -> PlacementReloaded:
        """Makes the server forget the placement that it keeps prepared. Rule: C16."""
        return self._reload(admin_pb2.ReloadPlacementRequest(drop_prepared=True))

    def _reload(self, request: admin_pb2.ReloadPlacementRequest) -> PlacementReloaded:
        return _placement.reloaded(self._call(self._admin.ReloadPlacement, request, once=True))

    def config(self) -> list[ConfigSetting]:
        """The configuration that the server runs with: each setting with its origin, without secrets. Those of topics
        and policies are in `describe_topic`."""
        return _inspection.settings(self._call(self._admin.GetConfig, admin_pb2.GetConfigRequest()))

    def watch_log(
        self, level: LogLevel | None = None, *, lines_max: int = 100, follow: bool = True
    ) -> Generator[LogLine, None, None]:
        """The last lines of the server's log, then those that follow, without end; with `follow=False` only the last
        ones. `level`: only lines of this level or a worse one. `lines_max`: the lines to begin with, at most 1,000: the
        server keeps no more. It raises when the connection breaks, and ends when the server stops.

        Rule: X10.
        """
        request = _inspection.log_request(level, lines_max, follow=follow)
        with closing(self._answers(self._admin.WatchLog, request)) as responses:
            for response in responses:
                yield from _inspection.log_lines(response)
