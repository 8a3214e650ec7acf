"""The subscriptions that are under way: who follows what, and how far each has come.

Owned by the event loop; other threads may look one up."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from sow.v1 import admin_pb2, sow_pb2
from sow_server.access.caller import Call, CallTrace
from sow_server.engine.values.bookmarks import Instance
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.services.wire.convert import invalid
from sow_server.subscriptions.durable.consumer import Consumer
from sow_server.subscriptions.durable.consumer_registry import Consumers
from sow_server.subscriptions.hub import Hub
from sow_server.subscriptions.results.follower import LiveResult
from sow_server.subscriptions.results.live_results import LiveResults
from sow_server.subscriptions.subscription import Subscription

FILTER_CHARACTERS_MAX: Final = 1_000
"""The most characters that are shown of the filter of a listed subscription. 10,000 filters of the longest kind would
not fit into an answer."""


@dataclass(frozen=True, slots=True, eq=False)
class Follower:
    """One subscription."""

    id: str
    call: Call
    request: sow_pb2.SubscribeRequest
    source: Subscription | Consumer | LiveResult
    since_micros: int

    def described(self, instance: Instance) -> admin_pb2.ActiveSubscription:
        """The subscription as an operator is told of it."""
        call, asked, source = self.call, self.request, self.source
        kept = source.source if isinstance(source, LiveResult) else None
        return admin_pb2.ActiveSubscription(
            id=self.id,
            session=call.session,
            identity=call.owner,
            address=call.address,
            since_micros=self.since_micros,
            topic=asked.topic,
            topic_pattern=asked.topic_pattern,
            filter=_cut_short(asked.filter),
            durable=asked.durable.name,
            position=instance.bookmark(source.position),
            behind=source.behind,
            queued_bytes=source.queued_bytes,
            kept=None
            if kept is None
            else admin_pb2.KeptResult(
                records=kept.records, bytes=kept.size, runs=kept.runs, followers=len(kept.followers)
            ),
        )

    def as_consumer(self, instance: Instance, *, progress: bool) -> admin_pb2.DurableConsumer:
        """The message about the consumer of a durable. `progress`: the message also tells how far the consumer has
        come."""
        told = admin_pb2.DurableConsumer(
            subscription=self.id,
            identity=self.call.owner,
            address=self.call.address,
            since_micros=self.since_micros,
        )
        if progress:
            told.position = instance.bookmark(self.source.position)
            told.behind = self.source.behind
            told.queued_bytes = self.source.queued_bytes
        return told


class Followers:
    """Owns the list."""

    def __init__(self, now_micros: Callable[[], int]) -> None:
        self._now_micros = now_micros
        self._numbers = itertools.count(1)
        self._followers: dict[str, Follower] = {}
        self._consumers: dict[tuple[int, str], Follower] = {}
        """The consumers by the topic's id and the stored name of the durable."""

    @contextmanager
    def following(
        self, call: Call, request: sow_pb2.SubscribeRequest, source: Subscription | Consumer | LiveResult
    ) -> Iterator[None]:
        """Lists a subscription until the end of the block."""
        made = Follower(f"u{next(self._numbers)}", call, request, source, self._now_micros())
        self._followers[made.id] = made
        place = (source.topic.id, source.name) if isinstance(source, Consumer) else None
        if place is not None:
            self._consumers[place] = made
        try:
            yield
        finally:
            del self._followers[made.id]
            if place is not None and self._consumers.get(place) is made:  # else another has taken the durable over
                del self._consumers[place]

    def of(self, topic: str) -> list[Follower]:
        """Those of a topic; "": all. In the order of their begin."""
        return [one for one in self._followers.values() if topic in ("", one.request.topic)]

    def consumer(self, topic_id: int, durable: str) -> Follower | None:
        """The consumer of a durable, by its stored name."""
        return self._consumers.get((topic_id, durable))

    def end(self, follower_id: str) -> Follower:
        """Ends one. Raises StoreError."""
        found = self._followers.get(follower_id)
        if found is None:
            raise invalid("id", f"there is no subscription {follower_id[:80]!r}")
        found.call.end(StoreError(Reason.ACCESS_CHANGED, "an operator has ended this subscription"))
        return found


class Deliveries(Protocol):
    """Traces of messages to subscribers."""

    def delivering(
        self, topic: str, after: int, upto: int, changes: int, call: CallTrace | None
    ) -> Callable[[], None] | None:
        """A message with changes of this range is being sent; the result hears its end. None: it is not traced."""


@dataclass(frozen=True, slots=True)
class Subscribing:
    """Those who take part in a subscription: the hub, or a consumer, or the source of a live result; it is listed, and
    traced."""

    hub: Hub
    consumers: Consumers
    followers: Followers
    results: LiveResults
    deliveries: Deliveries | None = None


def _cut_short(text: str) -> str:
    return text if len(text) <= FILTER_CHARACTERS_MAX else text[: FILTER_CHARACTERS_MAX - 1] + "…"
