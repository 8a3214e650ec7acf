"""What the services know of other instances, and who answers for an instance that has none.

Where links come from is not their business: they get a `Replicas`, and its errors are StoreErrors.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from sow.v1 import admin_pb2
from sow_server.engine.store import Store
from sow_server.engine.values.errors import Reason, StoreError


class Replicas(Protocol):
    """The links of an instance (rules R1 to R12)."""

    def sync_peers(self, topic: str) -> int:
        """How many configured sync peers get a topic. 0: REPLICATED cannot be reached."""

    async def replicated(self, topic: str, sequence: int) -> None:
        """Returns once as many sync peers as are wanted have everything of a topic up to there on disk (rule P5).
        Raises StoreError REPLICATION_UNAVAILABLE."""

    def status(self) -> admin_pb2.GetReplicationStatusResponse:
        """How every link is."""

    def verify(
        self, request: admin_pb2.VerifyReplicationRequest
    ) -> AsyncGenerator[admin_pb2.VerifyReplicationResponse, None]:
        """Compares with a peer, topic by topic (rule R10). Raises StoreError, PEER_NOT_FOUND among others."""

    def repair(
        self, request: admin_pb2.RepairReplicationRequest
    ) -> AsyncGenerator[admin_pb2.RepairReplicationResponse, None]:
        """Sends what differs, both ways (rule R10). Raises StoreError, PEER_NOT_FOUND among others."""


class NoReplicas(Replicas):
    """An instance without peers that accepts none."""

    def __init__(self, store: Store, instance: str) -> None:
        self._store = store
        self._instance = instance

    def sync_peers(self, topic: str) -> int:
        """None."""
        return 0

    async def replicated(self, topic: str, sequence: int) -> None:
        """Nobody could have it."""
        raise StoreError(Reason.REPLICATION_UNAVAILABLE, "this instance has no peers")

    def status(self) -> admin_pb2.GetReplicationStatusResponse:
        """No links."""
        return admin_pb2.GetReplicationStatusResponse(
            instance=self._instance, last_sequence=self._store.writer.synced_sequence
        )

    def verify(
        self, request: admin_pb2.VerifyReplicationRequest
    ) -> AsyncGenerator[admin_pb2.VerifyReplicationResponse, None]:
        """PEER_NOT_FOUND."""
        raise no_peer(request.peer)

    def repair(
        self, request: admin_pb2.RepairReplicationRequest
    ) -> AsyncGenerator[admin_pb2.RepairReplicationResponse, None]:
        """PEER_NOT_FOUND."""
        raise no_peer(request.peer)


def no_peer(name: str) -> StoreError:
    """PEER_NOT_FOUND."""
    return StoreError(Reason.PEER_NOT_FOUND, f"peer: no peer {name!r} is configured", field="peer")
