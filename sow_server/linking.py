"""The links with other instances as the server runs them: between the services, replication and the configuration.

Here errors of replication become errors of the store, and events of a node become lines in the log.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol, TypeVar

import grpc
import structlog

from sow.v1 import admin_pb2, replication_pb2, types_pb2
from sow_replication import ports
from sow_replication.node import Node
from sow_replication.options import Mode, NodeOptions, PeerOptions
from sow_replication.service import Replication
from sow_replication.status import disabled_link
from sow_server.access.caller import Call
from sow_server.config import (
    Config,
    ConfigError,
    LinkMode,
    PeerConfig,
    check_accepted,
    peer_tokens,
    read_peer,
    replication_token,
    token_in,
)
from sow_server.dialling import Dialling
from sow_server.engine.commit.commits import Commits
from sow_server.engine.replicas import CommandedPeer, CommandedPeers
from sow_server.engine.replicas.sources import Sources
from sow_server.engine.store import Store
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import MICROS
from sow_server.peer_store import LinkTraces, PeerStore
from sow_server.services.door.guard import CallAdmission, link_handlers
from sow_server.services.door.received import Context
from sow_server.services.replication import Links
from sow_server.subscriptions.durable.replicated import ReplicatedDurables

log = structlog.get_logger(__name__)
T = TypeVar("T")

RETRY_MICROS: Final = MICROS
REPORT_SECONDS: Final = 1.0
_FILES: Final = ("ca", "certificate", "key", "token_file")
_FIELDS: Final = {"topics": "topics_pattern", "mode": "sync", "accept": "name"}
"""Keys of the configuration that the fields of AddPeer name otherwise. `accept` has the name alone."""
_WARNINGS: Final = frozenset({"link_closed", "link_refused", "peer_downgraded", "purge_failed", "tick_failed"})


def node_options(config: Config, added: Sequence[CommandedPeer] = ()) -> NodeOptions:
    """The links that the configuration declares, and those that were added by command."""
    replication = config.replication
    return NodeOptions(
        peers=tuple(peer_options(peer) for peer in (*config.peers, *map(_peer_config, filter(_is_sent, added)))),
        accept=(*replication.accept, *(one.name for one in added if not one.address)),
        commanded=frozenset(one.name for one in added),
        min_sync_peers=replication.min_sync_peers,
        sync_timeout_micros=replication.sync_timeout_micros,
        tombstone_grace_micros=replication.tombstone_grace_micros,
    )


def peer_options(peer: PeerConfig) -> PeerOptions:
    """A peer, as the links know it."""
    return PeerOptions(peer.name, peer.address, peer.topics, Mode(peer.mode.value), peer.filter)


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

    def ask_access(self, may_send: Callable[[str], bool]) -> None:
        """Sets the function that tells whether the access file lets an instance of some name send here. To be called
        before calls are served."""

    def probe_sources(self) -> int:
        """Sends all sources another probe, at once; returns it."""

    def lacks(self, probe: int, sources: Sequence[str], topics: Sequence[str]) -> str:
        """The reason why not everything of some topics is here that the sources had when they heard a probe; "":
        everything is. With the probe 0: the reason why they do not send these topics whole."""

    def stop_receiving(self) -> None:
        """Ends the links on which others send. Running writes may still wait for peers (rule P5)."""

    async def stop(self) -> None:
        """Ends all links."""


def link(
    store: Store,
    config: Config,
    readers: Executor,
    durables: ReplicatedDurables,
    traces: LinkTraces | None = None,
) -> InstanceLinks:
    """The links of an instance, not yet dialled. To be made before the store starts: they follow its commits. Raises
    OSError where a credential cannot be read."""
    commanded = store.replicas.commanded
    _settle(store, config)
    if not config.replicates:
        if commanded.added():
            raise LinkingError(
                "[replication] serve_links: must be true, because peers were added by command "
                f"({', '.join(one.name for one in commanded.added())}); with it they can be removed"
            )
        return NoLinks(store.commits, store.replicas.sources, config.server.instance)
    peer_store = PeerStore(
        store.reads,
        store.writes,
        name=config.server.instance,
        cluster=config.server.cluster,
        durables=durables,
        traces=traces,
    )
    added = commanded.added()
    node = Node(peer_store, node_options(config, added), random.Random())
    for name in commanded.paused():
        node.pause(name)
    node.observe = log_event
    dial = Dialling(config)
    tokens = peer_tokens(config)
    for one in filter(_is_sent, added):
        dial.added[one.name] = _peer_config(one)
        if token := _stored_token(one):
            tokens[one.name] = token
    links = Replication(node, readers=readers, token=replication_token(config), tokens=tokens, channel=dial)
    store.commits.follow(lambda commits, synced: node.wake())
    durables.wake_with(node.wake)
    commands = PeerCommands(links, commanded, config, dial)
    return Linked(links, commands, message_bytes_max=config.limits.link_bytes_max)


class LinkingError(Exception):
    """The server cannot start: one message with the reason and the remedy."""


def _settle(store: Store, config: Config) -> None:
    """Peers that the configuration names are its own from now on (rule R14). Raises LinkingError."""
    settled = store.replicas.commanded.settle(_configured(config))
    if settled is not None:
        try:
            names = store.finish(settled)
        except StoreError as error:
            raise LinkingError(f"[[replication.peers]]: {error.message}") from error
        for name in names:
            log.info("peer_taken_over", peer=name)


def _stored_token(one: CommandedPeer) -> str:
    """The token of a peer of the data; empty: it has none of its own, or none that can be read."""
    try:
        return token_in(Path(one.token_file)) if one.token_file else ""
    except OSError as error:  # nobody could remove the peer, if the start were refused
        log.error("peer_token_unreadable", peer=one.name, cause=str(error))
        return ""


def _configured(config: Config) -> frozenset[str]:
    return frozenset((*(peer.name for peer in config.peers), *config.replication.accept))


def _is_sent(one: CommandedPeer) -> bool:
    return bool(one.address)


def _peer_config(one: CommandedPeer) -> PeerConfig:
    files = {key: Path(getattr(one, key)) for key in _FILES if getattr(one, key)}
    return PeerConfig(one.name, one.address, one.topics, LinkMode(one.mode), one.filter, **files)


class Linked(InstanceLinks):
    """Links that run: errors of replication become StoreErrors."""

    services = ("sow.v1.ReplicationService",)

    def __init__(self, links: Replication, commands: PeerCommands, *, message_bytes_max: int) -> None:
        self.message_bytes_max = message_bytes_max
        self._links = links
        self._commands = commands
        self._reporting: asyncio.Task[None] | None = None

    def handlers(self, admission: CallAdmission) -> tuple[grpc.GenericRpcHandler, ...]:
        """The handlers of the service that peers call."""
        service = replication_pb2.DESCRIPTOR.services_by_name["ReplicationService"]
        return (link_handlers(service, self._links.servicer, admission, _LinkContext),)

    async def start(self, report: Callable[[admin_pb2.GetReplicationStatusResponse], None]) -> None:
        """Dials the peers, and reports."""
        await self._links.start()
        self._reporting = asyncio.create_task(self._report(report))

    def stop_receiving(self) -> None:
        """Ends the links on which others send."""
        self._links.stop_receiving()

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

    def ask_access(self, may_send: Callable[[str], bool]) -> None:
        """The names that the access file lets send here."""
        self._commands.may_send = may_send

    def probe_sources(self) -> int:
        """Sends all sources another probe."""
        return self._links.node.probe_sources()

    def lacks(self, probe: int, sources: Sequence[str], topics: Sequence[str]) -> str:
        """The reason why not everything of the topics is here."""
        return self._links.node.lacks(probe, sources, topics)

    async def add_peer(self, request: admin_pb2.AddPeerRequest) -> None:
        """Adds a peer or a source."""
        # To its end, also where the caller goes: the store and the links must agree.
        await asyncio.shield(self._commands.add(request))

    async def remove_peer(self, name: str) -> None:
        """Removes a peer or a source that was added by command."""
        await asyncio.shield(self._commands.remove(name))

    async def pause_peer(self, name: str) -> None:
        """Sends nothing to a peer until it is resumed."""
        await asyncio.shield(self._commands.pause(name, paused=True))

    async def resume_peer(self, name: str) -> None:
        """Sends to a paused peer again."""
        await asyncio.shield(self._commands.pause(name, paused=False))

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


class PeerCommands:
    """Adds, removes, pauses and resumes peers while links run (rule R14). All errors are StoreErrors."""

    def __init__(self, links: Replication, commanded: CommandedPeers, config: Config, dial: Dialling) -> None:
        self.may_send: Callable[[str], bool] = lambda name: True
        self._links = links
        self._commanded = commanded
        self._config = config
        self._dial = dial
        self._one_at_a_time = asyncio.Lock()
        """The checks of one command would miss another one that is under way."""

    async def add(self, request: admin_pb2.AddPeerRequest) -> None:
        """Adds a peer or a source, or replaces the settings of one."""
        async with self._one_at_a_time:
            name = request.name
            self._check_name(request)
            peer = self._checked(request)
            if not self.may_send(name):
                raise StoreError(
                    Reason.INVALID_ARGUMENT,
                    f"name: the access file has no [[peers]] {name}, which would send here: add it, then call "
                    "ReloadAccess (sow auth reload)",
                    field="name",
                )
            try:  # before the commit: the store and the links must agree
                token = "" if peer is None or peer.token_file is None else token_in(peer.token_file)
            except OSError as error:
                raise _at_fault("token_file", f"cannot be read ({error.strerror or error})") from error
            added = _commanded(name, peer)
            await self._commanded.add(added)
            await self._link(added, token)

    async def _link(self, one: CommandedPeer, token: str) -> None:
        """Opens the links of a peer or source of the data."""
        if not one.address:
            self._links.node.accept_from(one.name)
            return
        peer = self._dial.added[one.name] = _peer_config(one)
        await self._links.add(peer_options(peer), token)
        if one.name in self._commanded.paused():
            self._links.node.pause(one.name)

    def _check_name(self, request: admin_pb2.AddPeerRequest) -> None:
        name = request.name
        if name in _configured(self._config):
            raise StoreError(
                Reason.SET_IN_CONFIG,
                f"name: {name} is in the configuration file; change it there, and restart",
                field="name",
            )
        present = {one.name: one for one in self._commanded.added()}
        if not request.replace and name in present:
            raise StoreError(
                Reason.PEER_EXISTS,
                f"name: {name} was added before; replace its settings (--replace), or remove it first",
                field="name",
                details={"peer": name},
            )
        if request.replace and name not in present:
            raise _no_peer(name, field="name")
        if request.replace and present[name].address and not request.address:
            raise _at_fault("address", f"{name} is sent to; to end that, remove it first")

    def _checked(self, request: admin_pb2.AddPeerRequest) -> PeerConfig | None:
        """The settings of the peer; None: it only sends here."""
        others = [one for one in self._commanded.added() if one.name != request.name and one.address]
        config = replace(self._config, peers=(*self._config.peers, *map(_peer_config, others)))
        given: dict[str, object] = {"name": request.name, "address": request.address}
        texts = {
            "topics": request.topics_pattern,
            "mode": "sync" if request.sync else "",
            "filter": request.filter,
            **{key: getattr(request, key) for key in _FILES},
        }
        given |= {key: text for key, text in texts.items() if text}
        for key in _FILES:
            if key in given and not Path(str(given[key])).is_absolute():
                raise _at_fault(key, f"{given[key]} is no absolute path")
        try:
            if request.address:
                return read_peer(config, given)
            if not request.accept or len(given) > 2:
                raise _at_fault(
                    "address", "is needed to send to the peer; without one, only accept can be set (--accept)"
                )
            check_accepted(config, request.name)
        except ConfigError as error:
            field = _FIELDS.get(error.key, error.key)
            known = field in admin_pb2.AddPeerRequest.DESCRIPTOR.fields_by_name
            raise StoreError(Reason.INVALID_ARGUMENT, str(error), field=field if known else "") from error
        return None

    async def remove(self, name: str) -> None:
        """Removes a peer or a source that was added by command. Of a source that is disabled, first what is stored of
        it; if the configuration names it, or nothing does, that is all."""
        async with self._one_at_a_time:
            if await _state_removed(self._commanded.sources, name) and name not in {
                one.name for one in self._commanded.added()
            }:
                return
            if name in _configured(self._config):
                raise StoreError(
                    Reason.SET_IN_CONFIG,
                    f"name: {name} is in the configuration file; take it out there, and restart; until then you can "
                    "pause it (PausePeer, sow replication pause)",
                    field="name",
                )
            present = {one.name: one for one in self._commanded.added()}
            if name not in present:
                raise _no_peer(name, field="name")
            # The links end first. So nothing of them is committed after the notes for the peer's return.
            await self._links.remove(name)
            try:
                await self._commanded.remove(name)
            except StoreError:  # a stalled disk, say
                await self._link(present[name], _stored_token(present[name]))
                raise
            self._dial.added.pop(name, None)

    async def pause(self, name: str, *, paused: bool) -> None:
        """Stops sending to a peer, or begins again."""
        async with self._one_at_a_time:
            node = self._links.node
            if name not in node.outgoing:
                if name in node.incoming:
                    raise StoreError(
                        Reason.PEER_NOT_FOUND,
                        f"name: nothing is sent to {name}, it only sends here; pause the link there",
                        field="name",
                    )
                raise _no_peer(name, field="name")
            if (name in self._commanded.paused()) != paused:
                await self._commanded.pause(name, paused=paused)
            if paused:
                node.pause(name)
            else:
                node.resume(name)


def _at_fault(field: str, message: str) -> StoreError:
    return StoreError(Reason.INVALID_ARGUMENT, f"{field}: {message}", field=field)


def _commanded(name: str, peer: PeerConfig | None) -> CommandedPeer:
    if peer is None:
        return CommandedPeer(name)
    files = {key: str(path) for key in _FILES if (path := getattr(peer, key)) is not None}
    return CommandedPeer(name, peer.address, peer.topics, peer.mode.value, peer.filter, **files)


async def _state_removed(sources: Sources, name: str) -> bool:
    """Removes the state of a disabled source; False: there is none of this name. Raises StoreError."""
    if name not in sources.disabled:
        return False
    await sources.remove_disabled(name)
    log.warning("source_state_removed", peer=name)
    return True


class NoLinks(InstanceLinks):
    """The null object: an instance without peers that accepts no sources."""

    services = ()
    message_bytes_max = 0

    def __init__(self, commits: Commits, sources: Sources, instance: str) -> None:
        self._commits = commits
        self._sources = sources
        self._instance = instance

    def handlers(self, admission: CallAdmission) -> tuple[grpc.GenericRpcHandler, ...]:
        """None."""
        return ()

    async def start(self, report: Callable[[admin_pb2.GetReplicationStatusResponse], None]) -> None:
        """Dials and reports nothing."""

    def stop_receiving(self) -> None:
        """Ends nothing."""

    async def stop(self) -> None:
        """Ends nothing."""

    def sync_peers(self, topic: str) -> int:
        """None."""
        return 0

    async def replicated(self, topic: str, sequence: int) -> None:
        """Always REPLICATION_UNAVAILABLE."""
        raise StoreError(Reason.REPLICATION_UNAVAILABLE, "this instance has no peers")

    def status(self) -> admin_pb2.GetReplicationStatusResponse:
        """The status without links: sources of earlier links that are disabled."""
        return admin_pb2.GetReplicationStatusResponse(
            instance=self._instance,
            last_sequence=self._commits.synced_sequence,
            incoming=[disabled_link(name, row.fault) for name, row in sorted(self._sources.disabled.items())],
        )

    def ask_access(self, may_send: Callable[[str], bool]) -> None:
        """Nobody sends here."""

    def probe_sources(self) -> int:
        """Sends nothing."""
        return 0

    def lacks(self, probe: int, sources: Sequence[str], topics: Sequence[str]) -> str:
        """They never send here."""
        return "this instance serves no links"

    async def add_peer(self, request: admin_pb2.AddPeerRequest) -> None:
        """Always SET_IN_CONFIG."""
        raise StoreError(
            Reason.SET_IN_CONFIG,
            "this instance serves no links: set [replication] serve_links = true, and restart it once; from then on "
            "peers come and go by command",
        )

    async def remove_peer(self, name: str) -> None:
        """PEER_NOT_FOUND, unless it is a source that is disabled."""
        if not await _state_removed(self._sources, name):
            raise _no_peer(name, field="name")

    async def pause_peer(self, name: str) -> None:
        """Always PEER_NOT_FOUND."""
        raise _no_peer(name, field="name")

    async def resume_peer(self, name: str) -> None:
        """Always PEER_NOT_FOUND."""
        raise _no_peer(name, field="name")

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


def _no_peer(name: str, *, field: str = "peer") -> StoreError:
    return StoreError(Reason.PEER_NOT_FOUND, f"{field}: there is no peer {name[:200]!r}", field=field)


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
