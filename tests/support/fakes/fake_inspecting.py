"""The part of the fake client that looks at a server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta

from sow_client import (
    ActiveSubscription,
    CallerSession,
    ChangesPlan,
    ClockAccepted,
    ConfigSetting,
    ExpiryHorizon,
    Figures,
    History,
    LogLine,
    PastChange,
    Placement,
)
from tests.support.fakes.fake_results import NOW
from tests.support.fakes.fake_retention import FakeRetention


class FakeInspecting(FakeRetention):
    """Answers with what a test has set."""

    def __init__(self) -> None:
        super().__init__()
        self.horizon: ExpiryHorizon | None = None
        self.placed = Placement("")
        self.callers: list[CallerSession] = []
        self.figures: list[Figures] = []
        self.settings: list[ConfigSetting] = []
        self.lines: list[LogLine] = []
        self.active: list[ActiveSubscription] = []
        self.past: list[PastChange] = []
        """The history of every key, the newest first."""
        self.begin: datetime | None = None
        """When the first change was committed that the journal still has; None: it has all changes."""

    def expiry_horizon(
        self, topic: str | None = None, spans: Sequence[object] = (), *, exact: bool = False
    ) -> ExpiryHorizon:
        self._called("expiry_horizon", topic=topic, spans=tuple(spans), exact=exact)
        assert self.horizon is not None, "a test sets it"
        return self.horizon

    def placement(self, topic: str | None = None) -> Placement:
        if self.placed.cell:  # a status asks every server
            self._called("placement", topic=topic)
        return self.placed

    def sessions(self) -> list[CallerSession]:
        self._called("sessions")
        return self.callers

    def end_session(self, id: str) -> int:  # noqa: A002 - as the real one
        self._called("end_session", id=id)
        return 2

    def subscriptions(self, topic: str | None = None) -> list[ActiveSubscription]:
        self._called("subscriptions", topic=topic)
        return self.active

    def end_subscription(self, id: str) -> None:  # noqa: A002 - as the real one
        self._called("end_subscription", id=id)

    def watch_figures(
        self, interval: object = "1s", *, topics_max: int = 100, history: object = None
    ) -> Iterator[Figures]:
        self._called("watch_figures", interval=interval, topics_max=topics_max, history=history)
        yield from self.figures

    def watch_log(self, level: str | None = None, *, lines_max: int = 100, follow: bool = True) -> Iterator[LogLine]:
        self._called("watch_log", level=level, lines_max=lines_max, follow=follow)
        yield from self.lines

    def config(self) -> list[ConfigSetting]:
        self._called("config")
        return self.settings

    def history(self, topic: str, key: str, *, entries_max: int = 100, upto: str | None = None) -> History:
        self._called("history", topic=topic, key=key, entries_max=entries_max, upto=upto)
        first = int(upto or 0)
        shown = tuple(self.past[first : first + entries_max])
        more = first + len(shown) < len(self.past)
        return History(shown, str(first + len(shown)) if more else "", not more and self.begin is not None)

    def plan_changes(self, topic: str, *, start: object) -> ChangesPlan:
        """Of a journal whose first change has the sequence 8, if anything was discarded."""
        self._called("plan_changes", topic=topic, start=start)
        assert self.begin is not None, "only then it is asked"
        after = 9 if isinstance(start, datetime) and start > self.begin else 7
        entries = len(self.past)
        return ChangesPlan(f"e.{after}", "e.9", "e.9", "e.7", entries, 100 * entries, 0, ())

    def accept_clock(self) -> ClockAccepted:
        self._called("accept_clock")
        return ClockAccepted(NOW, NOW + timedelta(hours=1))
