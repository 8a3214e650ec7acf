"""The part of `sow.v1.AdminService` for links with other instances: their state, the peers, and comparing with them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import structlog

from sow.v1 import admin_pb2
from sow_server.access.caller import Call
from sow_server.services.replication import Links
from sow_server.services.wire.convert import invalid

log = structlog.get_logger(__name__)


class LinksService:
    """Validates, calls the links, logs. Owns nothing."""

    def __init__(self, links: Links) -> None:
        self._links = links

    async def GetReplicationStatus(
        self, request: admin_pb2.GetReplicationStatusRequest, call: Call
    ) -> admin_pb2.GetReplicationStatusResponse:
        return self._links.status()

    async def VerifyReplication(
        self, request: admin_pb2.VerifyReplicationRequest, call: Call
    ) -> AsyncGenerator[admin_pb2.VerifyReplicationResponse, None]:
        _check_named(request.peer, "peer")
        differing = 0
        async with aclosing(self._links.verify(request)) as responses:
            async for response in responses:
                differing += response.differing
                yield response
        log.info("replication_verified", peer=request.peer, differing=differing)

    async def RepairReplication(
        self, request: admin_pb2.RepairReplicationRequest, call: Call
    ) -> AsyncGenerator[admin_pb2.RepairReplicationResponse, None]:
        _check_named(request.peer, "peer")
        sent = received = 0
        async with aclosing(self._links.repair(request)) as responses:
            async for response in responses:
                sent += response.sent
                received += response.received
                yield response
        log.info("replication_repaired", peer=request.peer, sent=sent, received=received)

    async def AddPeer(self, request: admin_pb2.AddPeerRequest, call: Call) -> admin_pb2.AddPeerResponse:
        await self._links.add_peer(request)
        log.info("peer_added", peer=request.name, address=request.address, replaced=request.replace)
        return admin_pb2.AddPeerResponse()

    async def RemovePeer(self, request: admin_pb2.RemovePeerRequest, call: Call) -> admin_pb2.RemovePeerResponse:
        _check_named(request.name)
        await self._links.remove_peer(request.name)
        log.info("peer_removed", peer=request.name)
        return admin_pb2.RemovePeerResponse()

    async def PausePeer(self, request: admin_pb2.PausePeerRequest, call: Call) -> admin_pb2.PausePeerResponse:
        _check_named(request.name)
        await self._links.pause_peer(request.name)
        log.info("peer_paused", peer=request.name)
        return admin_pb2.PausePeerResponse()

    async def ResumePeer(self, request: admin_pb2.ResumePeerRequest, call: Call) -> admin_pb2.ResumePeerResponse:
        _check_named(request.name)
        await self._links.resume_peer(request.name)
        log.info("peer_resumed", peer=request.name)
        return admin_pb2.ResumePeerResponse()


def _check_named(peer: str, field: str = "name") -> None:
    if not peer:
        raise invalid(field, "the name of a peer is needed")
