"""The part of the fake client that looks at a server."""

from __future__ import annotations

from collections.abc import Sequence

from sow_client import ExpiryHorizon
from tests.support.fake_retention import FakeRetention


class FakeInspecting(FakeRetention):
    """Answers with what a test has set."""

    def __init__(self) -> None:
        super().__init__()
        self.horizon: ExpiryHorizon | None = None

    def expiry_horizon(
        self, topic: str | None = None, spans: Sequence[object] = (), *, exact: bool = False
    ) -> ExpiryHorizon:
        self._called("expiry_horizon", topic=topic, spans=tuple(spans), exact=exact)
        assert self.horizon is not None, "a test sets it"
        return self.horizon
