"""The sync that several parts of a seed share (engine/replicas/receiving)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from sow_server.engine.commit.commits import Commits
from sow_server.engine.replicas.receiving import SharedSyncs
from sow_server.engine.values.errors import Reason, StoreError


class Barriers:
    """The commits, as far as a sync needs them. The test lets each barrier pass."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[object], None]] = []

    def barrier(self, done: Callable[[object], None]) -> None:
        self.waiting.append(done)

    def passes(self, result: object = None) -> None:
        """The oldest barrier passes."""
        self.waiting.pop(0)(result)


def syncs() -> tuple[Barriers, SharedSyncs]:
    barriers = Barriers()
    return barriers, SharedSyncs(cast(Commits, barriers))


def test_those_who_come_while_a_sync_is_awaited_share_the_next_one() -> None:
    barriers, shared = syncs()
    first: list[StoreError | None] = []
    later: list[StoreError | None] = []
    shared.await_sync(first.append)
    shared.await_sync(later.append)
    shared.await_sync(later.append)
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

    shared.await_sync(told.append)
    shared.await_sync(faulty)
    shared.await_sync(told.append)
    barriers.passes()
    shared.await_sync(told.append)
    failure = StoreError(Reason.STORE_FAILED, "no")
    barriers.passes(failure)
    assert told == [None, failure]
    barriers.passes()
    assert told == [None, failure, None]
