"""The clients of a round end well, whatever faults their calls have met."""

from __future__ import annotations

from typing import cast

from sow_client import DeadlineExceeded, Subscription
from tests.robustness.workload import close_faulted


class Faulted:
    """A durable subscription whose acknowledgement met a fault."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True
        raise DeadlineExceeded("Deadline Exceeded", reason="DEADLINE_EXCEEDED")


def test_a_follower_whose_acknowledgement_met_a_fault_is_closed() -> None:
    """A round failed of it: an acknowledgement had timed out at a killed instance, and `close` raised that."""
    following = Faulted()
    close_faulted(cast(Subscription, following))
    assert following.is_closed
