"""The links with other instances, as the services use them: implemented by `linking`, which the services do not
know."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from sow.v1 import admin_pb2


class Links(Protocol):
    """The links of an instance (rules R1 to R12). All errors are StoreErrors."""

    def sync_peers(self, topic: str) -> int:
        """The number of configured sync peers that get a topic. 0: REPLICATED cannot be reached."""

    async def replicated(self, topic: str, sequence: int) -> None:
        """Returns once `min_sync_peers` peers have every change of a topic up to the sequence on disk (rule P5). Raises
        StoreError REPLICATION_UNAVAILABLE."""

    def status(self) -> admin_pb2.GetReplicationStatusResponse:
        """The state of every link."""

    def verify(
        self, request: admin_pb2.VerifyReplicationRequest
    ) -> AsyncGenerator[admin_pb2.VerifyReplicationResponse, None]:
        """Compares with a peer, topic by topic (rule R10). Raises StoreError, PEER_NOT_FOUND among others."""

    async def add_peer(self, request: admin_pb2.AddPeerRequest) -> None:
        """Adds a peer or a source, or replaces the settings of one (rule R14). Raises StoreError."""

    async def remove_peer(self, name: str) -> None:
        """Removes a peer or a source that was added by command (rule R14). Raises StoreError."""

    async def pause_peer(self, name: str) -> None:
        """Sends nothing to a peer until it is resumed (rule R14). Raises StoreError."""

    async def resume_peer(self, name: str) -> None:
        """Sends to a paused peer again (rule R14). Raises StoreError."""

    def repair(
        self, request: admin_pb2.RepairReplicationRequest
    ) -> AsyncGenerator[admin_pb2.RepairReplicationResponse, None]:
        """Sends the rows that differ, in both directions (rule R10). Raises StoreError, PEER_NOT_FOUND among others."""
