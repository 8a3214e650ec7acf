"""Links with other instances, as the server has them: between the services, replication, and the configuration.

Errors of replication become errors of the store here, credentials become channels, and what a node tells becomes a line
in the log.
"""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from concurrent.futures import Executor
from typing import Final, Protocol, TypeVar

import grpc
import structlog

from sow.v1 import admin_pb2, types_pb2
from sow_replication import ports
from sow_replication.node import Node
from sow_replication.options import Mode, NodeOptions, PeerOptions
from sow_replication.service import Replication
from sow_server.config import Config, PeerConfig, replication_token
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import MICROS
from sow_server.peers import PeerStore
from sow_server.services.replication import Replicas

log = structlog.get_logger(__name__)
T = TypeVar("T")

RETRY_MICROS: Final = MICROS
_WARNINGS: Final = frozenset({"link_closed", "link_refused", "peer_downgraded", "purge_failed", "tick_failed"})


def node_options(config: Config) -> NodeOptions:
    """The links that the configuration asks for."""
    replication = config.replication
    return NodeOptions(
        peers=tuple(
            PeerOptions(peer.name, peer.address, peer.topics, Mode(peer.mode.value), peer.filter)
            for peer in config.peers
        ),
        accept=replication.accept,
        min_sync_peers=replication.min_sync_peers,
        sync_timeout_micros=replication.sync_timeout_micros,
        tombstone_grace_micros=replication.tombstone_grace_micros,
    )


def link(store: PeerStore, config: Config, readers: Executor) -> Replication:
    """The links of an instance, not yet dialled. Raises OSError where a credential cannot be read."""
    node = Node(store, node_options(config), random.Random())
    links = Replication(node, readers=readers, token=replication_token(config), channel=dialling(config))
    node.observe = told
    return links


class Links(Protocol):
    """What `Linked` needs of the links of its instance: `sow_replication.service.Replication` has it."""

    async def replicated(self, topic: str, sequence: int) -> None:
        """As of `Replicas`. Raises Refused."""

    def sync_peers(self, topic: str) -> int:
        """As of `Replicas`."""

    def status(self) -> admin_pb2.GetReplicationStatusResponse:
        """As of `Replicas`."""

    def verify(self, request: admin_pb2.VerifyReplicationRequest) -> AsyncIterator[admin_pb2.VerifyReplicationResponse]:
        """As of `Replicas`. Raises Refused."""

    def repair(self, request: admin_pb2.RepairReplicationRequest) -> AsyncIterator[admin_pb2.RepairReplicationResponse]:
        """As of `Replicas`. Raises Refused."""


class Linked(Replicas):
    """The links, for the services."""

    def __init__(self, links: Links) -> None:
        self._links = links

    def sync_peers(self, topic: str) -> int:
        """How many configured sync peers get a topic."""
        return self._links.sync_peers(topic)

    async def replicated(self, topic: str, sequence: int) -> None:
        """Returns once sync peers have everything of a topic up to there."""
        try:
            await self._links.replicated(topic, sequence)
        except ports.Refused as refused:
            raise store_error(refused) from refused

    def status(self) -> admin_pb2.GetReplicationStatusResponse:
        """How every link is."""
        return self._links.status()

    def verify(
        self, request: admin_pb2.VerifyReplicationRequest
    ) -> AsyncGenerator[admin_pb2.VerifyReplicationResponse, None]:
        """Compares with a peer."""
        return _translated(self._links.verify(request), "peer")

    def repair(
        self, request: admin_pb2.RepairReplicationRequest
    ) -> AsyncGenerator[admin_pb2.RepairReplicationResponse, None]:
        """Repairs what differs."""
        return _translated(self._links.repair(request), "peer")


async def _translated(answers: AsyncIterator[T], field: str) -> AsyncGenerator[T, None]:
    try:
        async for answer in answers:
            yield answer
    except ports.Refused as refused:
        raise store_error(refused, field=field) from refused
    finally:
        if isinstance(answers, AsyncGenerator):
            await answers.aclose()


def store_error(refused: ports.Refused, *, field: str = "") -> StoreError:
    """What a caller is told of an error of replication; `field`: of the request, where a peer is not known."""
    if refused.reason == types_pb2.ERROR_REASON_UNSPECIFIED:
        return StoreError(Reason.INTERNAL, refused.message)
    reason = Reason(refused.reason)
    return StoreError(
        reason,
        refused.message,
        field=field if reason is Reason.PEER_NOT_FOUND else "",
        retry_after_micros=RETRY_MICROS if reason is Reason.RESEED_PENDING else 0,
    )


def told(event: str, fields: Mapping[str, object]) -> None:
    """Logs what a node tells."""
    shown = dict(fields)
    if isinstance(reason := shown.get("reason"), int):
        shown["reason"] = Reason(reason).name if reason else ""  # 0: a link ended that nothing is wrong with
    orderly = shown.get("reason") == Reason.STOPPING.name  # one of the two ends stops, as somebody has told it to
    (log.warning if event in _WARNINGS and not orderly else log.info)(event, **shown)


def dialling(config: Config) -> Callable[[str], grpc.aio.Channel]:
    """A function that opens a channel to the peer at an address. Raises OSError where a certificate cannot be read; one
    that is replaced is used after the next start."""
    options = (
        ("grpc.max_receive_message_length", config.limits.link_bytes_max),
        ("grpc.max_send_message_length", config.limits.link_bytes_max),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.enable_retries", 0),
        # Links come back as replication wants it, which has its own backoff.
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
    )
    credentials = {peer.address: _credentials(peer) for peer in config.peers}

    def dial(address: str) -> grpc.aio.Channel:
        shown = credentials[address]
        if shown is None:
            return grpc.aio.insecure_channel(address, options)
        return grpc.aio.secure_channel(address, shown, options)

    return dial


def _credentials(peer: PeerConfig) -> grpc.ChannelCredentials | None:
    if peer.ca is None:
        return None
    return grpc.ssl_channel_credentials(
        root_certificates=peer.ca.read_bytes(),
        private_key=None if peer.key is None else peer.key.read_bytes(),
        certificate_chain=None if peer.certificate is None else peer.certificate.read_bytes(),
    )
