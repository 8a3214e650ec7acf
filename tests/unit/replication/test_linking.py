"""Between the services and replication: errors, credentials, and log events."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import grpc
import pytest
import structlog
from structlog.testing import capture_logs

from sow.v1 import admin_pb2, types_pb2
from sow_replication.options import PeerOptions
from sow_replication.ports import Refused
from sow_replication.service import Replication
from sow_server.config import Config, PeerConfig
from sow_server.dialling import Dialling
from sow_server.engine.pending import Pending, answered
from sow_server.engine.replicas import CommandedPeer, CommandedPeers
from sow_server.engine.replicas.sources import Sources
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.linking import Linked, PeerCommands, log_event, peer_options, store_error

NO_COMMANDS: Final = PeerCommands.__new__(PeerCommands)
"""Commands that nobody gives."""


class RefusingLinks(Replication):
    """Links that refuse everything with one error; a comparison after one answer."""

    def __init__(self, refused: Refused) -> None:
        self.refused = refused
        self.repaired: list[admin_pb2.RepairReplicationResponse] = []
        self.ended = 0

    async def replicated(self, topic: str, sequence: int) -> None:
        raise self.refused

    def sync_peers(self, topic: str) -> int:
        return len(topic)

    def status(self) -> admin_pb2.GetReplicationStatusResponse:
        return admin_pb2.GetReplicationStatusResponse(instance="nyc-1")

    async def verify(
        self, request: admin_pb2.VerifyReplicationRequest
    ) -> AsyncGenerator[admin_pb2.VerifyReplicationResponse, None]:
        try:
            yield admin_pb2.VerifyReplicationResponse(topic="a")
            raise self.refused
        finally:
            self.ended += 1

    async def repair(
        self, request: admin_pb2.RepairReplicationRequest
    ) -> AsyncGenerator[admin_pb2.RepairReplicationResponse, None]:
        for response in self.repaired:
            yield response
        raise self.refused


def refused(reason: str, message: str = "no") -> Refused:
    return Refused(types_pb2.ErrorReason.Value(f"ERROR_REASON_{reason}"), message)


def test_a_refusal_of_replication_becomes_an_error_of_the_store() -> None:
    async def run() -> None:
        links = RefusingLinks(refused("REPLICATION_UNAVAILABLE", "the write stands here"))
        linked = Linked(links, NO_COMMANDS, message_bytes_max=0)
        assert linked.sync_peers("abc") == 3
        assert linked.status().instance == "nyc-1"
        with pytest.raises(StoreError, match="the write stands here") as caught:
            await linked.replicated("a", 1)
        assert caught.value.reason is Reason.REPLICATION_UNAVAILABLE
        answers = linked.verify(admin_pb2.VerifyReplicationRequest())
        assert (await anext(answers)).topic == "a"
        with pytest.raises(StoreError, match="the write stands here"):
            await anext(answers)
        assert links.ended == 1

    asyncio.run(run())


def test_a_comparison_without_a_waiting_caller_ends() -> None:
    async def run() -> None:
        links = RefusingLinks(refused("STOPPING"))
        answers = Linked(links, NO_COMMANDS, message_bytes_max=0).verify(admin_pb2.VerifyReplicationRequest())
        await anext(answers)
        await answers.aclose()
        assert links.ended == 1

    asyncio.run(run())


def test_an_unknown_peer_is_a_field_at_fault() -> None:
    async def run() -> None:
        linked = Linked(RefusingLinks(refused("PEER_NOT_FOUND")), NO_COMMANDS, message_bytes_max=0)
        with pytest.raises(StoreError) as caught:
            await anext(linked.repair(admin_pb2.RepairReplicationRequest()))
        assert (caught.value.reason, caught.value.field) == (Reason.PEER_NOT_FOUND, "peer")

    asyncio.run(run())


def test_every_reason_of_replication_is_one_of_the_store() -> None:
    for name, number in types_pb2.ErrorReason.items():
        error = store_error(Refused(number, "no"))
        assert error.reason.name == (name.removeprefix("ERROR_REASON_") if number else "INTERNAL")
    assert store_error(refused("RESEED_PENDING")).retry_after_micros > 0


def test_the_log_names_reasons_and_warns_of_faults() -> None:
    structlog.reset_defaults()
    with capture_logs() as lines:
        log_event("peer_downgraded", {"peer": "ldn-1"})
        log_event("peer_upgraded", {"peer": "ldn-1"})
        log_event("link_closed", {"peer": "ldn-1", "reason": types_pb2.ERROR_REASON_CLOCK_SKEW, "message": "no"})
        log_event("link_closed", {"peer": "ldn-1", "reason": 0, "message": "another link"})
        log_event("link_closed", {"peer": "ldn-1", "reason": types_pb2.ERROR_REASON_STOPPING, "message": "stopping"})
    assert [(line["event"], line["log_level"], line.get("reason")) for line in lines] == [
        ("peer_downgraded", "warning", None),
        ("peer_upgraded", "info", None),
        ("link_closed", "warning", "CLOCK_SKEW"),
        ("link_closed", "warning", ""),
        ("link_closed", "info", "STOPPING"),
    ]


def test_each_peer_is_dialled_with_its_own_credentials(tmp_path: Path) -> None:
    """R11: the receiver asks for a certificate of its authority, and gets the one of the entry."""
    new = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=localhost"
    command = f"{new} -addext subjectAltName=DNS:localhost -keyout key.pem -out certificate.pem"
    subprocess.run(command.split(), cwd=tmp_path, check=True, capture_output=True)
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"

    async def answer(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        return b"".join(context.auth_context().get("x509_common_name", []))

    async def run() -> list[bytes]:
        server = grpc.aio.server()
        method = grpc.unary_unary_rpc_method_handler(answer, request_deserializer=bytes, response_serializer=bytes)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", {"Ask": method}),))
        plain = f"localhost:{server.add_insecure_port('localhost:0')}"
        pem = certificate.read_bytes()
        shown = grpc.ssl_server_credentials([(key.read_bytes(), pem)], pem, require_client_auth=True)
        secured = f"localhost:{server.add_secure_port('localhost:0', shown)}"
        await server.start()
        peers = (
            PeerConfig("plain", plain),
            PeerConfig("secured", secured, ca=certificate, certificate=certificate, key=key),
        )
        dial = Dialling(Config(peers=peers))
        found = []
        try:
            for peer in peers:
                async with dial(peer_options(peer)) as channel:
                    ask = channel.unary_unary("/test/Ask", request_serializer=bytes, response_deserializer=bytes)
                    found.append(await ask(b"", timeout=10))
        finally:
            await server.stop(0)
        return found

    assert asyncio.run(run()) == [b"", b"localhost"]


# -- commands -------------------------------------------------------------------------------------------------------


class NotedLinks(Replication):
    """Links that note what becomes of them."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.shown: dict[str, str] = {}
        self.node = self  # type: ignore[assignment, misc]  # the commands ask it to accept and to pause

    async def add(self, peer: PeerOptions, token: str) -> None:
        self.events.append(("linked", peer.name))
        self.shown[peer.name] = token

    async def remove(self, name: str) -> None:
        self.events.append(("ended", name))

    def accept_from(self, name: str) -> None:
        self.events.append(("accepted", name))

    def pause(self, name: str) -> None:
        self.events.append(("paused", name))


class NotedPeers(CommandedPeers):
    """Peers of the data; the commit of a change may be refused."""

    def __init__(self, *peers: CommandedPeer, paused: str = "") -> None:
        self.peers_added = list(peers)
        self.name_paused = paused
        self.sources = cast(Sources, SimpleNamespace(disabled={}))  # type: ignore[misc]  # its own here
        self.refusal: StoreError | None = None
        self.committing: Callable[[], object] = lambda: None

    def added(self) -> list[CommandedPeer]:
        return self.peers_added

    def paused(self) -> set[str]:
        return {self.name_paused}

    def add(self, settings: CommandedPeer) -> Pending[None]:
        self.committing()
        return answered(self.refusal)

    def remove(self, name: str) -> Pending[None]:
        return answered(self.refusal)


def commands(links: NotedLinks, peers: NotedPeers) -> PeerCommands:
    config = Config()
    return PeerCommands(links, peers, config, Dialling(config))


@pytest.mark.parametrize(
    ("peer", "again"),
    [
        (CommandedPeer("b", "127.0.0.1:9"), [("linked", "b"), ("paused", "b")]),
        (CommandedPeer("b"), [("accepted", "b")]),
    ],
)
def test_a_removal_that_is_not_committed_leaves_the_links(
    tmp_path: Path, peer: CommandedPeer, again: list[tuple[str, str]]
) -> None:
    """R14, X2. The caller was told that nothing was written, and the peer was sent nothing until the next restart."""
    token = tmp_path / "token"
    token.write_text("secret")
    links = NotedLinks()
    peers = NotedPeers(peer._replace(token_file=str(token) if peer.address else ""), paused="b")
    peers.refusal = StoreError(Reason.WRITE_STALLED, "the disk cannot keep up")
    with pytest.raises(StoreError, match="keep up"):
        asyncio.run(commands(links, peers).remove("b"))
    assert links.events == [("ended", "b"), *again]
    assert links.shown == ({"b": "secret"} if peer.address else {})
    peers.refusal = None
    asyncio.run(commands(links, peers).remove("b"))
    assert links.events[-1] == ("ended", "b")


def test_the_token_of_a_new_peer_is_read_before_the_commit(tmp_path: Path) -> None:
    """R14. Where the file went away in between, the peer was in the data and had no link."""
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o600)
    links, peers = NotedLinks(), NotedPeers()
    peers.committing = token.unlink
    request = admin_pb2.AddPeerRequest(name="b", address="127.0.0.1:9", token_file=str(token))
    asyncio.run(commands(links, peers).add(request))
    assert links.shown == {"b": "secret"}


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"name": "no name", "address": "127.0.0.1:9"}, "name"),
        ({"name": "no name", "accept": True}, "name"),
        ({"name": "nyc-1", "address": "127.0.0.1:9"}, "name"),
        ({"name": "nyc-1", "accept": True}, "name"),
        ({"name": "b", "address": "127.0.0.1"}, "address"),
        ({"name": "b", "address": "db.example:9"}, "address"),
        ({"name": "b", "address": "127.0.0.1:8"}, "address"),
        ({"name": "b"}, "address"),
        ({"name": "b", "accept": True, "sync": True}, "address"),
        ({"name": "b", "address": "127.0.0.1:9", "topics_pattern": "("}, "topics_pattern"),
        ({"name": "b", "address": "127.0.0.1:9", "filter": "/a ="}, "filter"),
        ({"name": "b", "address": "127.0.0.1:9", "ca": "ca.pem"}, "ca"),
        ({"name": "b", "address": "127.0.0.1:9", "ca": "/missing"}, "ca"),
        ({"name": "b", "address": "127.0.0.1:9", "key": "/missing"}, "key"),
        ({"name": "b", "address": "127.0.0.1:9", "token_file": "/missing"}, "token_file"),
    ],
)
def test_a_refused_peer_has_its_field_named(given: dict[str, Any], field: str) -> None:
    """X2."""
    config = replace(Config(), server=replace(Config().server, instance="nyc-1"))
    links = NotedLinks()
    one = PeerCommands(links, NotedPeers(CommandedPeer("z", "127.0.0.1:8")), config, Dialling(config))
    with pytest.raises(StoreError) as caught:
        asyncio.run(one.add(admin_pb2.AddPeerRequest(**given)))
    assert (caught.value.reason, caught.value.field) == (Reason.INVALID_ARGUMENT, field)
    assert links.events == []
