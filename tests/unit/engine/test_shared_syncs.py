"""The sync that several parts of a seed share (engine/replicas/receiving)."""

from __future__ import annotations

from typing import Any, cast

from sow_server.engine.commit.commits import Commits
from sow_server.engine.pending import Pending
from sow_server.engine.replicas.receiving import SharedSyncs
from sow_server.engine.values.errors import Reason, StoreError


class Barriers:
    """The commits, as far as a sync needs them. The test lets each barrier pass."""

    def __init__(self) -> None:
        self.waiting: list[Pending[object]] = []

    def barrier(self) -> Pending[object]:
        self.waiting.append(Pending())
        return self.waiting[-1]

    def passes(self, result: object = None) -> None:
        """The oldest barrier passes."""
        self.waiting.pop(0).settle(result)


def syncs() -> tuple[Barriers, SharedSyncs]:
    barriers = Barriers()
    return barriers, SharedSyncs(cast(Commits, barriers))


def test_those_who_come_while_a_sync_is_awaited_share_the_next_one() -> None:
    barriers, shared = syncs()
    first: list[StoreError | None] = []
    later: list[StoreError | None] = []
    shared.next().then(first.append)
    shared.next().then(later.append)
    shared.next().then(later.append)
    assert len(barriers.waiting) == 1
    barriers.passes()
    assert (first, later) == ([None], [])
    barriers.passes()
    assert later == [None, None]
    assert barriers.waiting == []


def test_a_fault_of_one_keeps_no_other_from_its_answer() -> None:
    """The part of a seed that shared a sync with it was never acknowledged, and nothing after it was asked for."""
    barriers, shared = syncs()
    told: list[Any] = []

    def faulty(error: StoreError | None) -> None:
        raise RuntimeError("a fault")

    shared.next().then(told.append)
    shared.next().then(faulty)
    shared.next().then(told.append)
    barriers.passes()
    shared.next().then(told.append)
    failure = StoreError(Reason.STORE_FAILED, "no")
    barriers.passes(failure)
    assert told == [None, failure]
    barriers.passes()
    assert told == [None, failure, None]
