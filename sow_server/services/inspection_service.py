"""The part of `sow.v1.AdminService` that looks at a running server: what falls due, who follows what."""

from __future__ import annotations

from concurrent.futures import Executor

from sow.v1 import admin_pb2
from sow_server.access.caller import Call
from sow_server.engine.commit.commits import Commits
from sow_server.services import horizons
from sow_server.services.followers import Followers
from sow_server.services.reading import StoreReading


class InspectionService:
    """Validates, asks, translates; owns nothing."""

    def __init__(self, reading: StoreReading, commits: Commits, followers: Followers, readers: Executor) -> None:
        self._reading = reading
        self._commits = commits
        self._followers = followers
        self._readers = readers

    async def GetExpiryHorizon(
        self, request: admin_pb2.GetExpiryHorizonRequest, call: Call
    ) -> admin_pb2.GetExpiryHorizonResponse:
        edges = horizons.edges_of(request)
        if request.topic:
            call.require(request.topic, all_rows=True)
            topics = [call.topic(request.topic).topic]
        else:
            parts = [(topic, call.part_of(topic)) for topic in call.topics()]
            topics = [topic for topic, part in parts if part is not None and part.rows is None]
        return await horizons.counted(self._reading.cuts, self._readers, topics, edges, exact=request.exact)

    async def ListSubscriptions(
        self, request: admin_pb2.ListSubscriptionsRequest, call: Call
    ) -> admin_pb2.ListSubscriptionsResponse:
        instance = self._reading.instance
        return admin_pb2.ListSubscriptionsResponse(
            subscriptions=[follower.described(instance) for follower in self._followers.of(request.topic)],
            head_bookmark=instance.bookmark(self._commits.last_sequence),
        )

    async def EndSubscription(
        self, request: admin_pb2.EndSubscriptionRequest, call: Call
    ) -> admin_pb2.EndSubscriptionResponse:
        ended = self._followers.end(request.id)
        call.notes.update(subscription=ended.id, ended_identity=ended.call.owner)
        return admin_pb2.EndSubscriptionResponse()
