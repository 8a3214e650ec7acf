"""The links with other instances as the server runs them: between the services, replication and the configuration.

Here errors of replication become errors of the store, credentials become channels, and events of a node become lines in
the log.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from concurrent.futures import Executor
from typing import Final, Protocol, TypeVar

import grpc
import structlog

from sow.v1 import admin_pb2, replication_pb2, types_pb2
from sow_replication import ports
from sow_replication.node import Node
from sow_replication.options import Mode, NodeOptions, PeerOptions
from sow_replication.service import Replication
from sow_server.access.caller import Call
from sow_server.config import Config, PeerConfig, peer_tokens, replication_token
from sow_server.config.kinds import is_loopback
from sow_server.engine.commit.commits import Commits
from sow_server.engine.store import Store
from sow_server.engine.values.clock import GuardedClock
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import MICROS
from sow_server.peers import PeerStore
from sow_server.services.guard import CallAdmission, Context, link_handlers
from sow_server.services.replication import Links

log = structlog.get_logger(__name__)
T = TypeVar("T")

RETRY_MICROS: Final = MICROS
REPORT_SECONDS: Final = 1.0
_WARNINGS: Final = frozenset({"link_closed", "link_refused", "peer_downgraded", "purge_failed", "tick_failed"})


def node_options(config: Config) -> NodeOptions:
    """The links that the configuration declares."""
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


class InstanceLinks(Links, Protocol):
    """The links of an instance as the server runs them: `Linked`, or `NoLinks` where the configuration has none."""

    services: tuple[str, ...]
    """Names of the gRPC services of the links."""
    message_bytes_max: int
    """The largest message between instances; 0: there are none."""

    def handlers(self, admission: CallAdmission) -> tuple[grpc.GenericRpcHandler, ...]:
        """The handlers of `services`, for one listener."""

    async def start(self, report: Callable[[admin_pb2.GetReplicationStatusResponse], None]) -> None:
        """Dials the peers from now on, and reports the state of the links every second, on the event loop."""

    async def stop(self) -> None:
        """Ends all links."""


def link(store: Store, clock: GuardedClock, config: Config, readers: Executor) -> InstanceLinks:
    """The links of an instance, not yet dialled. To be made before the store starts: they follow its commits. Raises
    OSError where a credential cannot be read."""
    if not config.replicates:
        return NoLinks(store.commits, config.server.instance)
    peer_store = PeerStore(
        store.replicas,
        commits=store.commits,
        topics=store.topics,
        cuts=store.cuts,
        origins=store.origins,
        clock=clock,
        instance=store.instance,
        name=config.server.instance,
        cluster=config.server.cluster,
    )
    node = Node(peer_store, node_options(config), random.Random())
    node.observe = log_event
    links = Replication(
        node, readers=readers, token=replication_token(config), tokens=peer_tokens(config), channel=dialling(config)
    )
    store.commits.follow(lambda commits, synced: node.wake())
    return Linked(links, message_bytes_max=config.limits.link_bytes_max)


class Linked(InstanceLinks):
    """Links that run: errors of replication become StoreErrors."""

    services = ("sow.v1.ReplicationService",)

    def __init__(self, links: Replication, *, message_bytes_max: int) -> None:
        self.message_bytes_max = message_bytes_max
        self._links = links
        self._reporting: asyncio.Task[None] | None = None

    def handlers(self, admission: CallAdmission) -> tuple[grpc.GenericRpcHandler, ...]:
        """The handlers of the service that peers call."""
        service = replication_pb2.DESCRIPTOR.services_by_name["ReplicationService"]
        return (link_handlers(service, self._links.servicer, admission, _LinkContext),)

    async def start(self, report: Callable[[admin_pb2.GetReplicationStatusResponse], None]) -> None:
        """Dials the peers, and reports."""
        await self._links.start()
        self._reporting = asyncio.create_task(self._report(report))

    async def stop(self) -> None:
        """Ends the links, and the reports."""
        if self._reporting is not None:
            self._reporting.cancel()
        await self._links.stop()

    async def _report(self, report: Callable[[admin_pb2.GetReplicationStatusResponse], None]) -> None:
        """Links belong to the event loop, and scrapes of metrics come on threads of their own."""
        while True:
            report(self.status())
            await asyncio.sleep(REPORT_SECONDS)

    def sync_peers(self, topic: str) -> int:
        """The number of configured sync peers that get a topic."""
        return self._links.sync_peers(topic)

    async def replicated(self, topic: str, sequence: int) -> None:
        """Returns once enough sync peers have every change of a topic up to the sequence."""
        try:
            await self._links.replicated(topic, sequence)
        except ports.Refused as refused:
            raise store_error(refused) from refused

    def status(self) -> admin_pb2.GetReplicationStatusResponse:
        """The state of every link."""
        return self._links.status()

    def verify(
        self, request: admin_pb2.VerifyReplicationRequest
    ) -> AsyncGenerator[admin_pb2.VerifyReplicationResponse, None]:
        """Compares with a peer."""
        return _translated(self._links.verify(request), "peer")

    def repair(
        self, request: admin_pb2.RepairReplicationRequest
    ) -> AsyncGenerator[admin_pb2.RepairReplicationResponse, None]:
        """Repairs the rows that differ."""
        return _translated(self._links.repair(request), "peer")


class NoLinks(InstanceLinks):
    """The null object: an instance without peers that accepts no sources."""

    services = ()
    message_bytes_max = 0

    def __init__(self, commits: Commits, instance: str) -> None:
        self._commits = commits
        self._instance = instance

    def handlers(self, admission: CallAdmission) -> tuple[grpc.GenericRpcHandler, ...]:
        """None."""
        return ()

    async def start(self, report: Callable[[admin_pb2.GetReplicationStatusResponse], None]) -> None:
        """Dials and reports nothing."""

    async def stop(self) -> None:
        """Ends nothing."""

    def sync_peers(self, topic: str) -> int:
        """None."""
        return 0

    async def replicated(self, topic: str, sequence: int) -> None:
        """Always REPLICATION_UNAVAILABLE."""
        raise StoreError(Reason.REPLICATION_UNAVAILABLE, "this instance has no peers")

    def status(self) -> admin_pb2.GetReplicationStatusResponse:
        """The status without links."""
        return admin_pb2.GetReplicationStatusResponse(
            instance=self._instance, last_sequence=self._commits.synced_sequence
        )

    def verify(
        self, request: admin_pb2.VerifyReplicationRequest
    ) -> AsyncGenerator[admin_pb2.VerifyReplicationResponse, None]:
        """Always PEER_NOT_FOUND."""
        raise _no_peer(request.peer)

    def repair(
        self, request: admin_pb2.RepairReplicationRequest
    ) -> AsyncGenerator[admin_pb2.RepairReplicationResponse, None]:
        """Always PEER_NOT_FOUND."""
        raise _no_peer(request.peer)


class _LinkContext:
    """gRPC's context of a call, and the peer that calls."""

    def __init__(self, context: Context, call: Call) -> None:
        self._context = context
        peer = call.peer
        self.peer_caller: Final = ports.ANY_CALLER if peer is None else ports.PeerCaller(peer.name, peer.matches)

    def __getattr__(self, name: str) -> object:
        return getattr(self._context, name)


def _no_peer(name: str) -> StoreError:
    return StoreError(Reason.PEER_NOT_FOUND, f"peer: no peer {name!r} is configured", field="peer")


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
    """An error of replication as a StoreError; `field`: the field of the request that names a peer."""
    if refused.reason == types_pb2.ERROR_REASON_UNSPECIFIED:
        return StoreError(Reason.INTERNAL, refused.message)
    reason = Reason(refused.reason)
    return StoreError(
        reason,
        refused.message,
        field=field if reason is Reason.PEER_NOT_FOUND else "",
        retry_after_micros=RETRY_MICROS if reason is Reason.RESEED_PENDING else 0,
    )


def log_event(event: str, fields: Mapping[str, object]) -> None:
    """Logs an event of a node."""
    shown = dict(fields)
    if isinstance(reason := shown.get("reason"), int):
        shown["reason"] = Reason(reason).name if reason else ""  # 0: a link ended without a fault
    orderly = shown.get("reason") == Reason.STOPPING.name  # an operator stops one of the two ends
    (log.warning if event in _WARNINGS and not orderly else log.info)(event, **shown)


def dialling(config: Config) -> Callable[[str], grpc.aio.Channel]:
    """A function that opens a channel to the peer at an address. Raises OSError where a certificate cannot be read. A
    replaced certificate is used from the next start on."""
    options = (
        ("grpc.max_receive_message_length", config.limits.link_bytes_max),
        ("grpc.max_send_message_length", config.limits.link_bytes_max),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.enable_retries", 0),
        # Replication has its own backoff: gRPC reconnects at once.
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
    )
    credentials = {peer.address: _credentials(peer) for peer in config.peers}
    # A connection to this machine needs no proxy, whatever http_proxy says; and a proxy would read its token.
    without_proxy = (*options, ("grpc.enable_http_proxy", 0))

    def dial(address: str) -> grpc.aio.Channel:
        shown = credentials[address]
        if shown is None:
            return grpc.aio.insecure_channel(address, without_proxy if is_loopback(address) else options)
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
