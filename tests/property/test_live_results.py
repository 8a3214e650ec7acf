"""S10 to S12: at each bookmark the list of a follower is the result of the query there.

Others publish, touch and delete; records fall due, are swept, or not yet; the server's queue of the list overflows, or
its changes are lost; readings of the topic take many turns.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sow.v1 import sow_pb2
from sow_server.access.caller import Granted
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import Expiration, TopicSettings
from sow_server.filters import parse
from sow_server.filters.restriction import UNRESTRICTED, Restriction
from sow_server.services.wire import result_convert
from sow_server.subscriptions.frames import ChangeFrame, ChangeOp, Progress, SnapshotEnd
from sow_server.subscriptions.results import fed, window
from tests.support.oracles.examples import examples
from tests.support.stores.parts import reading_of
from tests.support.stores.stores import SECOND, FakeTime, Rig
from tests.support.stores.subscribers import ResultFollower, Subscribers

KEYS = [f"k{number}" for number in range(9)]
ROWS = Restriction(rows=parse("/own = 1"))

documents = st.fixed_dictionaries(
    {"px": st.integers(0, 4), "own": st.integers(0, 1)}, optional={"n": st.integers(0, 2)}
)
operations = st.one_of(
    st.tuples(st.just("put"), st.sampled_from(KEYS), documents, st.sampled_from([None, None, SECOND // 4, SECOND])),
    st.tuples(st.just("put"), st.sampled_from(KEYS), documents, st.none()),
    st.tuples(st.just("touch"), st.sampled_from(KEYS), st.just({}), st.sampled_from([SECOND // 4, SECOND, 9 * SECOND])),
    st.tuples(st.just("delete"), st.sampled_from(KEYS), st.just({}), st.none()),
    st.tuples(st.just("tick"), st.just(""), st.just({}), st.sampled_from([SECOND // 4, SECOND])),
    st.tuples(
        st.sampled_from(["settle", "sweep", "read", "turn", "late", "lose", "others"]),
        st.just(""),
        st.just({}),
        st.none(),
    ),
)


class Version(NamedTuple):
    key: str
    document: dict[str, int]
    expire_time: int
    sequence: int


def by_price(one: Version) -> tuple[object, ...]:
    return -one.document["px"], one.key


def by_two(one: Version) -> tuple[object, ...]:
    n = one.document.get("n")
    return one.document["px"], n is None, -(n or 0), one.key


def by_sequence(one: Version) -> tuple[object, ...]:
    return (-one.sequence,)


ORDERS: dict[str, Callable[[Version], tuple[object, ...]]] = {
    "/px DESC": by_price,
    "/px, /n DESC": by_two,
    "@sequence DESC": by_sequence,
}


class Sides:
    """A reader of every change, and followers of a list."""

    def __init__(
        self, rig: Rig, order: str, skip: int, top: int, *, queue: int, restriction: Restriction, batch_size: int
    ) -> None:
        self.rig = rig
        self.order, self.skip, self.top = order, skip, top
        self.restriction = restriction
        self.subscribers = Subscribers(rig, queue_bytes_max=queue)
        self.records: dict[str, Version] = {}
        self.at: dict[int, dict[str, Version]] = {0: {}}
        self.heard = 0
        self.reader = self.subscribers.subscribe("orders", changes=True)
        self.batch_size = batch_size
        self.followers: list[ResultFollower] = []
        self.seen: dict[ResultFollower, int] = {}
        self.told_at: dict[ResultFollower, int] = {}

    def follow(self) -> None:
        message = sow_pb2.SubscribeRequest(
            topic="orders", filter="/px > 0", sow=True, order_by=self.order, top_n=self.top, skip_n=self.skip
        )
        message.conflation_micros = SECOND // 2
        granted = Granted(self.rig.topic("orders"), self.restriction)
        asked = result_convert.asked_list(message, reading_of(self.rig.store), granted)
        follower = self.subscribers.follow(asked, progress=SECOND // 5, batch_size=self.batch_size)
        self.followers.append(follower)
        self.seen[follower] = 0

    def look(self) -> None:
        """The records as of each change."""
        self.subscribers.sync()
        self.subscribers.loop.run()
        self.hear()

    def hear(self) -> None:
        """Takes in what the reader of every change was told."""
        self.reader.pump()
        rows = self.reader.changes()
        for row in rows[self.heard :]:
            key = row.key.decode()
            self.records.pop(key, None)
            if row.op is ChangeOp.PUT:
                self.records[key] = Version(key, json.loads(row.payload), row.expire_time, row.sequence)
            self.at[row.sequence] = dict(self.records)
        self.heard = len(rows)

    def turn(self, steps: int = 10_000) -> None:
        self.look()
        self.subscribers.driven.run(steps_max=steps)

    def read(self) -> None:
        now = self.rig.clock.now_micros()
        for follower in self.followers:
            follower.pump()
            assert follower.error is None, follower.error
            for frame in follower.frames[self.seen[follower] :]:
                if isinstance(frame, SnapshotEnd) or (isinstance(frame, ChangeFrame) and not frame.more):
                    self.told_at[follower] = now
            last = follower.frames[-1] if len(follower.frames) > self.seen[follower] else None
            self.seen[follower] = len(follower.frames)
            if isinstance(last, ChangeFrame | SnapshotEnd | Progress):
                self.check(follower)

    def check(self, follower: ResultFollower) -> None:
        """The list is that of the query at its bookmark, at the instant at which it was told."""
        assert follower.bookmark is not None
        self.hear()
        state = self.at[max(sequence for sequence in self.at if sequence <= follower.bookmark)]
        now = self.told_at[follower]
        found = [
            one
            for one in state.values()
            if one.document["px"] > 0
            and now < one.expire_time
            and (self.restriction is UNRESTRICTED or one.document["own"] == 1)
        ]
        found.sort(key=ORDERS[self.order])
        wanted = [(one.key, one.sequence) for one in found[self.skip : self.skip + self.top]]
        assert follower.list() == tuple(wanted), follower.bookmark

    def lose(self) -> None:
        """The changes for the list are lost."""
        for subscription in self.subscribers.hub.subscriptions():
            if subscription.request.with_due:
                self.subscribers.hub.dispatcher.leave(subscription)
                subscription.end(StoreError(Reason.RESYNC_REQUIRED, "lost"))


def _run(
    traffic: list[tuple[str, str, dict[str, int], int | None]],
    order: str,
    skip: int,
    top: int,
    *,
    queue: int,
    restricted: bool,
    batch_size: int,
    journal: bool,
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        rig = Rig(Path(directory), time=FakeTime())
        try:
            rig.create_topic("orders", TopicSettings(expiration=Expiration.ENABLED, journal=journal))
            sides = Sides(
                rig,
                order,
                skip,
                top,
                queue=queue if journal else 10**6,
                restriction=ROWS if restricted else UNRESTRICTED,
                batch_size=batch_size,
            )
            sides.follow()
            for what, key, document, micros in traffic:
                match what:
                    case "put" | "touch" | "delete" | "tick":
                        rig.play("orders", what, key, document, micros)
                    case "settle":
                        sides.look()
                    case "sweep":
                        rig.store.sweep()
                    case "turn":
                        sides.turn(1)
                    case "late":  # the topic is read ahead of what was told of its changes
                        sides.subscribers.driven.run()
                        sides.read()
                    case "lose":
                        sides.look()
                        sides.lose()
                    case "others":
                        sides.look()
                        sides.follow()
                    case _:
                        sides.turn()
                        sides.read()
            for _ in range(4):
                rig.time.tick(SECOND)
                rig.store.sweep()
                sides.turn()
                sides.read()
            lists = {follower.list() for follower in sides.followers}
            assert len(lists) == 1
            assert len(list(sides.subscribers.results.sources())) == 1
            for follower in sides.followers:
                assert follower.bookmark is not None
                assert follower.bookmark >= max(sides.at)
        finally:
            rig.close()


@pytest.mark.slow
@settings(max_examples=examples(200), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    traffic=st.lists(operations, min_size=5, max_size=40),
    order=st.sampled_from(sorted(ORDERS)),
    skip=st.sampled_from([0, 0, 2]),
    top=st.integers(1, 3),
    queue=st.sampled_from([1_500, 10**6]),
    restricted=st.booleans(),
    batch_size=st.sampled_from([1, 1000]),
    journal=st.booleans(),
)
def test_the_list_is_that_of_the_query_at_every_bookmark(
    traffic: list[tuple[str, str, dict[str, int], int | None]],
    order: str,
    skip: int,
    top: int,
    queue: int,
    restricted: bool,
    batch_size: int,
    journal: bool,
) -> None:
    with mock.patch.object(window, "RESERVE_MIN", 1), mock.patch.object(fed, "LOSSES_MAX", 10**6):
        _run(traffic, order, skip, top, queue=queue, restricted=restricted, batch_size=batch_size, journal=journal)
