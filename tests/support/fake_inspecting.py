"""The part of the fake client that looks at a server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta

from sow_client import ActiveSubscription, CallerSession, ClockAccepted, ConfigSetting, ExpiryHorizon, Figures
from tests.support.fake_results import NOW
from tests.support.fake_retention import FakeRetention


class FakeInspecting(FakeRetention):
    """Answers with what a test has set."""

    def __init__(self) -> None:
        super().__init__()
        self.horizon: ExpiryHorizon | None = None
        self.callers: list[CallerSession] = []
        self.figures: list[Figures] = []
        self.settings: list[ConfigSetting] = []
        self.active: list[ActiveSubscription] = []

    def expiry_horizon(
        self, topic: str | None = None, spans: Sequence[object] = (), *, exact: bool = False
    ) -> ExpiryHorizon:
        self._called("expiry_horizon", topic=topic, spans=tuple(spans), exact=exact)
        assert self.horizon is not None, "a test sets it"
        return self.horizon

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

    def watch_figures(self, interval: object = "1s", *, topics_max: int = 100) -> Iterator[Figures]:
        self._called("watch_figures", interval=interval, topics_max=topics_max)
        yield from self.figures

    def config(self) -> list[ConfigSetting]:
        self._called("config")
        return self.settings

    def accept_clock(self) -> ClockAccepted:
        self._called("accept_clock")
        return ClockAccepted(NOW, NOW + timedelta(hours=1))
