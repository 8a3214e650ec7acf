"""Links over real gRPC, on the loopback, between stores of dicts: they come up, break, come back, and are refused."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import grpc
import pytest
from google.protobuf.message import Message

from sow.v1 import admin_pb2, replication_pb2, replication_pb2_grpc, types_pb2
from sow_replication import checks
from sow_replication.node import Node
from sow_replication.options import Mode, NodeOptions, PeerOptions
from sow_replication.ports import Refused
from sow_replication.sender import Sender
from sow_replication.service import Replication
from sow_replication.wire import opened, refused_by, sealed
from tests.support.simulation.replica_model import ModelStore

CHANNEL_OPTIONS: Final = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.enable_retries", 0),  # the links try again by themselves
    ("grpc.initial_reconnect_backoff_ms", 100),
)


def dialled(peer: PeerOptions) -> grpc.aio.Channel:
    return insecure_channel(peer.address)


def insecure_channel(address: str) -> grpc.aio.Channel:
    """A channel without TLS."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


class Running:
    """An instance with a port."""

    def __init__(self, store: ModelStore, replication: Replication, server: grpc.aio.Server, port: int) -> None:
        self.store = store
        self.replication = replication
        self.server = server
        self.port = port

    def commit(self) -> None:
        """Commits the queue, as a writer would all the time."""
        while self.store.step():
            self.replication.node.wake()

    def outgoing(self) -> admin_pb2.OutgoingLink:
        return self.replication.status().outgoing[0]


def now() -> int:
    return time.monotonic_ns() // 1000 + 1_700_000_000_000_000


@contextlib.asynccontextmanager
async def running(
    name: str,
    peers: tuple[PeerOptions, ...] = (),
    accept: tuple[str, ...] = (),
    *,
    token: str = "",
    port: int = 0,
    store: ModelStore | None = None,
    channel: Callable[[PeerOptions], grpc.aio.Channel] = dialled,
    silence_micros: int = 10_000_000,
) -> AsyncIterator[Running]:
    if store is None:
        store = ModelStore(name, now, [peer.name for peer in peers])
        store.create("T")
        store.step()
    options = NodeOptions(
        peers=peers,
        accept=accept,
        heartbeat_micros=50_000,
        cursor_micros=200_000,
        silence_micros=silence_micros,
        backoff_min_micros=10_000,
        backoff_max_micros=50_000,
        sync_timeout_micros=1_500_000,
    )
    with ThreadPoolExecutor(2) as readers:
        replication = Replication(Node(store, options, random.Random(1)), readers=readers, token=token, channel=channel)
        server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        replication_pb2_grpc.add_ReplicationServiceServicer_to_server(replication.servicer, server)
        bound = server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        await replication.start()
        instance = Running(store, replication, server, bound)
        writing = asyncio.create_task(_write(instance))
        try:
            yield instance
        finally:
            await replication.stop()
            await server.stop(0)
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)


async def _write(instance: Running) -> None:
    while True:
        instance.commit()
        await asyncio.sleep(0.002)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110  # whatever it is, it has no event
            await asyncio.sleep(0.005)


def peer(name: str, port: int, mode: Mode = Mode.ASYNC) -> PeerOptions:
    return PeerOptions(name, f"127.0.0.1:{port}", mode=mode)


def test_changes_flow_and_a_link_that_was_cut_goes_on_where_it_was() -> None:
    async def body() -> None:
        async with running("b", accept=("a",)) as b:
            async with running("a", (peer("b", b.port),)) as a:
                a.store.publish("T", "k1", "one")
                await until(lambda: "k1" in b.store.records("T"))
                await until(lambda: a.outgoing().state == "streaming" and a.outgoing().lag_sequences == 0)
                assert a.outgoing().last_error == ""
                assert b.replication.status().incoming[0].state == "connected"
                a.store.delete("T", "k1")
                a.store.publish("T", "k2", "two")
                await until(lambda: list(b.store.records("T")) == ["k2"])
                store = a.store
            await until(lambda: b.replication.status().incoming[0].state == "away")
            cursor = b.store.disk.sources["a"].cursor
            store.publish("T", "k3", "three")
            async with running("a", (peer("b", b.port),), store=store):
                await until(lambda: "k3" in b.store.records("T"))
                assert b.store.disk.sources["a"].cursor > cursor
                assert b.store.disk.sources["a"].seeds == {"T": None}
                assert b.store.records("T") == store.records("T")

    asyncio.run(body())


@pytest.mark.slow
def test_both_ways_and_replicated_when_the_sync_peer_has_it() -> None:
    async def body() -> None:
        async with running("b", accept=("a",)) as b:
            async with running("a", (peer("b", b.port, Mode.SYNC),)) as a:
                assert a.replication.sync_peers("T") == 1
                await until(lambda: a.outgoing().state == "streaming")
                a.store.publish("T", "k", "v")
                a.commit()
                await a.replication.replicated("T", a.store.head())
                assert "k" in b.store.records("T")
                await b.replication.stop()
                await b.server.stop(0)
                a.store.publish("T", "k", "w")
                a.commit()
                with pytest.raises(Refused) as raised:
                    await a.replication.replicated("T", a.store.head())
                assert raised.value.reason == types_pb2.ERROR_REASON_REPLICATION_UNAVAILABLE
                assert "0 of 1" in raised.value.message
                assert a.outgoing().mode == "downgraded"

    asyncio.run(body())


@pytest.mark.slow
def test_equal_failures_of_attempts_are_logged_once() -> None:
    """There was a warning each attempt, for as long as a peer was away."""

    async def body() -> None:
        dialled: list[str] = []
        told: list[tuple[str, object]] = []

        def dial(peer: PeerOptions) -> grpc.aio.Channel:
            dialled.append(peer.address)
            return insecure_channel(peer.address)

        async with running("b", accept=("a",)) as b:
            port = b.port
        async with running("a", (peer("b", port),), channel=dial) as a:
            a.replication.node.observe = lambda event, fields: told.append((event, fields.get("message")))
            unreachable = ("link_closed", f"cannot reach 127.0.0.1:{port}: connection refused")
            await until(lambda: len(dialled) > 5)
            assert told == [unreachable]
            assert a.outgoing().last_error == unreachable[1]

            async with running("b", accept=("a",), port=port):
                await until(lambda: a.outgoing().state == "streaming")
            dialled.clear()
            await until(lambda: len(dialled) > 5)

        events = [event for event, _ in told]
        assert events[:3] == ["link_closed", "link_opened", "link_closed"]
        assert told.count(unreachable) == 2
        assert events.count("link_opened") == 1

    asyncio.run(body())


async def refusal_of(a: Running) -> int:
    await until(lambda: a.outgoing().last_error_reason != types_pb2.ERROR_REASON_UNSPECIFIED)
    assert a.outgoing().state == "refused"
    return a.outgoing().last_error_reason


def test_a_wrong_token_is_refused() -> None:
    async def body() -> None:
        async with running("b", accept=("a",), token="right") as b:
            async with running("a", (peer("b", b.port),), token="wrong") as a:
                assert await refusal_of(a) == types_pb2.ERROR_REASON_PEER_UNAUTHENTICATED
            async with running("a", (peer("b", b.port),), token="right") as a:
                await until(lambda: a.outgoing().state == "streaming")

    asyncio.run(body())


def test_an_unknown_sender_is_refused() -> None:
    async def body() -> None:
        async with running("b") as b, running("a", (peer("b", b.port),)) as a:
            assert await refusal_of(a) == types_pb2.ERROR_REASON_PEER_NOT_ACCEPTED

    asyncio.run(body())


@pytest.mark.parametrize("token", ["", "secret"])
def test_an_instance_that_is_not_accepted_cannot_compare_or_repair(token: str) -> None:
    """R1, R11: the right token does not make a peer."""
    stranger = replication_pb2.Instance(name="stranger", id="s", epoch="e")

    async def body() -> None:
        async with running("b", accept=("a",), token="secret") as b, insecure_channel(f"127.0.0.1:{b.port}") as channel:
            stub = replication_pb2_grpc.ReplicationServiceStub(channel)
            metadata = (("authorization", f"Bearer {token}"),)
            expected = (
                types_pb2.ERROR_REASON_PEER_NOT_ACCEPTED if token else types_pb2.ERROR_REASON_PEER_UNAUTHENTICATED
            )
            for call in (
                stub.Checksum(sealed(replication_pb2.ChecksumRequest(instance=stranger)), metadata=metadata),
                stub.FetchRows(sealed(replication_pb2.FetchRowsRequest(instance=stranger)), metadata=metadata),
                stub.MergeRows(sealed(replication_pb2.MergeRowsRequest(instance=stranger)), metadata=metadata),
                exhausted(
                    stub.ListVersions(sealed(replication_pb2.ListVersionsRequest(instance=stranger)), metadata=metadata)
                ),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await call
                assert refused_by(raised.value, "b").reason == expected

    asyncio.run(body())


@pytest.mark.slow
def test_a_request_with_a_flipped_bit_is_refused() -> None:
    """R10. Story: rows whose topic, or an origin's name, was wrong by one bit on the way were merged by a repair; only
    the chunk had a checksum."""
    chunk = b"[]"
    whole = replication_pb2.MergeRowsRequest(
        instance=replication_pb2.Instance(name="a", id="a", epoch="e"),
        topic=replication_pb2.ReplicatedTopic(name="T", message_type="json", separator=b"\x01"),
        chunk=chunk,
        origins=["a"],
        crc32=zlib.crc32(chunk),
    )
    message, crc32 = whole.SerializeToString(), sealed(whole).crc32

    async def body() -> None:
        async with running("b", accept=("a",)) as b, insecure_channel(f"127.0.0.1:{b.port}") as channel:
            stub = replication_pb2_grpc.ReplicationServiceStub(channel)
            for at in range(len(message)):
                damaged = message[:at] + bytes([message[at] ^ 1 << at % 8]) + message[at + 1 :]
                for call in (
                    stub.Checksum,
                    stub.FetchRows,
                    stub.MergeRows,
                    lambda request: exhausted(stub.ListVersions(request)),
                ):
                    with pytest.raises(grpc.aio.AioRpcError) as raised:
                        await call(replication_pb2.Sealed(message=damaged, crc32=crc32))
                    assert refused_by(raised.value, "b").reason == types_pb2.ERROR_REASON_BATCH_DAMAGED

    asyncio.run(body())


def test_an_instance_that_dials_itself_is_refused() -> None:
    async def body() -> None:
        async with running("a", accept=("b",)) as b, running("a", (peer("b", b.port),), store=b.store) as a:
            assert await refusal_of(a) == types_pb2.ERROR_REASON_PEER_IS_SELF

    asyncio.run(body())


def test_two_instances_of_one_name_are_refused() -> None:
    async def body() -> None:
        async with running("a", accept=("b",)) as b:
            other = ModelStore("a", now, ["b"])
            other.restore(other.disk)  # another id
            async with running("a", (peer("b", b.port),), store=other) as a:
                assert await refusal_of(a) == types_pb2.ERROR_REASON_INSTANCE_NAME_CLASH

    asyncio.run(body())


def test_the_wrong_instance_at_an_address_is_refused() -> None:
    async def body() -> None:
        async with running("c", accept=("a",)) as c, running("a", (peer("b", c.port),)) as a:
            assert await refusal_of(a) == types_pb2.ERROR_REASON_PEER_NOT_FOUND

    asyncio.run(body())


def test_another_version_of_the_protocol_is_refused_with_its_reason() -> None:
    async def body() -> None:
        async with running("b", accept=("a",)) as b, insecure_channel(f"127.0.0.1:{b.port}") as channel:
            call = replication_pb2_grpc.ReplicationServiceStub(channel).Replicate()
            hello = replication_pb2.Hello(protocol=2, instance=replication_pb2.Instance(name="a", id="i", epoch="e"))
            await call.write(sealed(replication_pb2.ReplicateRequest(hello=hello)))
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call.read()
            assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert refused_by(raised.value, "b").reason == types_pb2.ERROR_REASON_PROTOCOL_MISMATCH
            assert "version 2" in (raised.value.details() or "")

    asyncio.run(body())


async def exhausted(
    call: grpc.aio.StreamStreamCall[replication_pb2.Sealed, replication_pb2.Sealed]
    | grpc.aio.UnaryStreamCall[replication_pb2.Sealed, replication_pb2.Sealed],
) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


@pytest.mark.parametrize("damage", ["message", "crc32"])
def test_a_message_with_a_flipped_bit_anywhere_ends_the_link_and_is_not_applied(damage: str) -> None:
    """Story: only the chunks of changes had a checksum. A flipped bit in the position beside them moved the cursor over
    changes that had not come, and they were lost for good."""

    async def body() -> None:
        async with running("b", accept=("a",)) as b, insecure_channel(f"127.0.0.1:{b.port}") as channel:
            call = replication_pb2_grpc.ReplicationServiceStub(channel).Replicate()
            hello = replication_pb2.Hello(protocol=1, instance=replication_pb2.Instance(name="a", id="i", epoch="e"))
            await call.write(sealed(replication_pb2.ReplicateRequest(hello=hello)))
            answer = await call.read()
            assert isinstance(answer, replication_pb2.Sealed)
            welcome = opened(replication_pb2.ReplicateResponse, answer, 1)
            assert welcome.WhichOneof("message") == "welcome"
            changes = sealed(replication_pb2.ReplicateRequest(changes=replication_pb2.Changes(after=0, upto=4)))
            if damage == "message":
                changes.message = changes.message[:-1] + bytes((changes.message[-1] ^ 1,))
            else:
                changes.crc32 ^= 1
            await call.write(changes)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await exhausted(call)
            assert refused_by(raised.value, "b").reason == types_pb2.ERROR_REASON_BATCH_DAMAGED
            assert b.store.disk.sources["a"].cursor == 0
            assert b.replication.status().incoming[0].last_error_reason == types_pb2.ERROR_REASON_BATCH_DAMAGED

    asyncio.run(body())


def test_a_damaged_answer_ends_the_link_at_the_sender() -> None:
    third = sealed(replication_pb2.ReplicateResponse(), 3)
    assert opened(replication_pb2.ReplicateResponse, third, 3) == replication_pb2.ReplicateResponse()
    other = replication_pb2.Sealed()
    other.CopyFrom(third)
    other.number = 2
    for given in (replication_pb2.Sealed(message=b"x", crc32=1), third, other):
        with pytest.raises(Refused) as raised:
            opened(replication_pb2.ReplicateResponse, given, 2)
        assert raised.value.reason == types_pb2.ERROR_REASON_BATCH_DAMAGED


@pytest.mark.slow
def test_a_link_of_which_a_read_or_an_answer_cannot_be_taken_ends_with_that_and_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body(method: str) -> None:
        taking = getattr(Sender, method)
        broken: list[object] = []

        def breaks(self: Sender, given: object) -> None:
            if self.streaming and not broken:
                broken.append(given)
                raise ValueError("a fault")
            taking(self, given)

        async with running("b", accept=("a",)) as b, running("a", (peer("b", b.port),)) as a:
            ended: list[object] = []
            a.replication.node.observe = lambda event, fields: ended.append((event, fields.get("message")))
            await until(lambda: a.outgoing().state == "streaming")
            monkeypatch.setattr(Sender, method, breaks)
            a.store.publish("T", "k", "v")
            await until(lambda: ("link_closed", "ValueError: a fault") in ended)
            await until(lambda: "k" in b.store.records("T"))

    asyncio.run(body("took"))
    monkeypatch.undo()
    asyncio.run(body("take"))


@pytest.mark.slow
def test_a_peer_that_does_not_read_is_given_up_though_a_message_is_stuck_on_its_way() -> None:
    async def body() -> None:
        calls: list[object] = []

        async def welcomes_and_no_more(
            requests: AsyncIterator[replication_pb2.Sealed], context: object
        ) -> AsyncIterator[replication_pb2.Sealed]:
            calls.append(await anext(requests))
            welcome = replication_pb2.Welcome(
                instance=replication_pb2.Instance(name="b", id="i", epoch="e"),
                cursor=0,
                topics=[replication_pb2.TopicAnswer(topic="T", state=replication_pb2.TOPIC_STATE_SEEDED)],
            )
            yield sealed(replication_pb2.ReplicateResponse(welcome=welcome))
            await asyncio.Event().wait()

        handler = grpc.stream_stream_rpc_method_handler(
            welcomes_and_no_more,
            request_deserializer=replication_pb2.Sealed.FromString,
            response_serializer=replication_pb2.Sealed.SerializeToString,
        )
        server = grpc.aio.server()
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("sow.v1.ReplicationService", {"Replicate": handler}),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with running("a", (peer("b", port),), silence_micros=300_000) as a:
                for number in range(8):
                    a.store.publish("T", f"k{number}", "v" * 2**22)
                await until(lambda: len(calls) > 2)
        finally:
            await server.stop(0)

    asyncio.run(body())


@pytest.mark.slow
def test_a_link_that_is_given_up_before_its_connection_was_up_is_dialled_again() -> None:
    """The peer's machine takes connections while the peer itself says nothing: it is stopped, or the greeting of the
    connection was damaged on its way. The link was given up, but a write on a call that had been cancelled before its
    connection was up never ended in gRPC: so the link stood still for ever, also once the peer was well again."""

    async def body() -> None:
        silent = socket.create_server(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        async with running("a", (peer("b", port),), silence_micros=300_000) as a:
            a.store.publish("T", "k", "v")
            await until(lambda: "silent" in a.outgoing().last_error)
            silent.close()
            async with running("b", accept=("a",), port=port) as b:
                await until(lambda: "k" in b.store.records("T"))

    asyncio.run(body())


@contextlib.asynccontextmanager
async def frames_vanish(port: int, marked: bytes) -> AsyncIterator[tuple[int, list[bytes]]]:
    """A way to a port on which one bit flips: in the type of the first HTTP/2 DATA frame that has `marked` in it. Gives
    the port to connect to, and the frames that were hit."""
    hit: list[bytes] = []

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(24))  # the preface
        while True:
            head = await reader.readexactly(9)
            body = await reader.readexactly(int.from_bytes(head[:3], "big"))
            if not hit and head[3] == 0 and marked in body:
                hit.append(body)
                head = head[:3] + b"\x10" + head[4:]
            writer.write(head + body)

    async def back(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(65_536):
            writer.write(chunk)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, there = await asyncio.open_connection("127.0.0.1", port)
        pumps = [asyncio.create_task(forward(reader, there)), asyncio.create_task(back(answers, writer))]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            writer.close()
            there.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], hit


def test_changes_that_vanish_on_their_way_end_the_link_and_come_again() -> None:
    """HTTP/2 passes over frames of a type that it does not know. So one flipped bit has a message vanish without an
    error; and where nothing followed it the next heartbeat moved the cursor over it. Its changes never came."""

    async def body() -> None:
        async with running("b", accept=("a",)) as b, frames_vanish(b.port, b"vanishes") as (port, hit):
            async with running("a", (peer("b", port),)) as a:
                await until(lambda: a.outgoing().state == "streaming")
                a.store.publish("T", "k", "vanishes")
                await until(lambda: hit != [])
                await until(lambda: "k" in b.store.records("T"))

    asyncio.run(body())


def test_a_message_with_many_parts_is_checked_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of one message of 2 MB took a second of the event loop, in which nobody had an answer. In either
    direction."""
    checked_by: list[tuple[str, int]] = []
    check = checks.check

    def spying(message: Message) -> None:
        checked_by.append((threading.current_thread().name, message.ByteSize()))
        check(message)

    async def body() -> None:
        names = [f"topic-{number}-{'n' * 50}" for number in range(60)]
        stores = {name: ModelStore(name, now, peers) for name, peers in (("a", ["b"]), ("b", []))}
        for store in stores.values():
            for name in names:
                store.create(name)
            store.step()
        async with (
            running("b", accept=("a",), store=stores["b"]) as b,
            running("a", (peer("b", b.port),), store=stores["a"]) as a,
        ):
            await until(lambda: a.outgoing().state == "streaming")
            a.store.create("more")
            a.store.publish(names[1], "k", "v")
            await until(lambda: "k" in b.store.records(names[1]))

    monkeypatch.setattr("sow_replication.receiver.check", spying)
    monkeypatch.setattr("sow_replication.checks.check", spying)
    asyncio.run(body())
    large = [thread for thread, size in checked_by if size > 2048]
    assert len(large) >= 2, "the greeting and the welcome at least"
    assert threading.main_thread().name not in large
    assert threading.main_thread().name in {thread for thread, size in checked_by if size <= 2048}, "no hop for these"
