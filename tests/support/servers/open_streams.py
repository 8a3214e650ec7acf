"""Calls that last, of every method that has some, opened as they are on the wire: without a client that calls again.

[1]  A stream stands when its function in `LASTING` returns: the server runs its handler, and waits for something.
[2]  `goes_on` makes it deliver something that it could not deliver before.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from sow.v1 import load_pb2, replication_pb2, snapshot_pb2, sow_pb2
from sow_client import Client
from sow_replication.wire import sealed
from tests.support.oracles.access_cases import ORDERS
from tests.support.oracles.methods import METHODS, OpenCall, opened, reason_of_call
from tests.support.servers.server import ServerProcess

SLOW_READER: Final = (("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0))
"""Options of a channel that takes no more than is read from it: else gRPC lets the server send megabytes ahead."""
BIG_RECORDS: Final = 20
BIG_BYTES: Final = 500_000
PEER: Final = "ldn"


class Stream(NamedTuple):
    """A call that lasts."""

    call: OpenCall
    goes_on: Callable[[], None]


@dataclass(slots=True)
class Caller:
    """An identity, its connection, and a way to make changes that its streams hear of."""

    server: ServerProcess
    root: Client
    token: str
    _open: ExitStack = field(default_factory=ExitStack)
    _channel: grpc.Channel = field(init=False)
    _number: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._channel = self._open.enter_context(grpc.insecure_channel(self.server.address, SLOW_READER))

    def close(self) -> None:
        """Ends all of its calls."""
        self._open.close()

    def call(self, method: str, requests: Iterator[Message]) -> OpenCall:
        """Opens a call."""
        return opened(
            self._channel,
            METHODS[method],
            (request.SerializeToString() for request in requests),
            token=PEER if "Replication" in method else self.token,
        )

    def one(self, method: str, request: Message) -> Any:
        """The one answer of a call."""
        (answer,) = self.call(method, iter([request]))
        return answer

    def fresh_key(self) -> str:
        """A key that no record has."""
        self._number += 1
        return f"{self.token}-{id(self)}-{self._number}"

    def change(self) -> str:
        """Publishes a record of `orders` that is new, as root; returns its key."""
        key = self.fresh_key()
        self.root.publish("orders", {"id": key})
        return key


def prepare(root: Client) -> None:
    """Makes the topics that the streams are about."""
    root.create_topic("orders", key=["/id"])
    root.create_topic("loaded", key=["/id"])
    root.create_topic("big", key=["/id"])
    root.publish("orders", {"id": "first"})
    for number in range(BIG_RECORDS):
        root.publish("big", {"id": number, "pad": "x" * BIG_BYTES})


class Sending:
    """The requests of a client that streams, as the test sends them."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Message | None] = queue.Queue()

    def send(self, request: Message) -> None:
        """Sends one."""
        self._queue.put(request)

    def end(self) -> None:
        """Sends no more."""
        self._queue.put(None)

    def __iter__(self) -> Iterator[Message]:
        while (request := self._queue.get()) is not None:
            yield request


def _keys_of(call: OpenCall, key: str) -> None:
    """Reads until a change of a key comes."""
    for frame in call:
        if key in frame.changes.records.key:
            return
    raise AssertionError(f"the stream ended without {key}")


def _followed(caller: Caller, request: sow_pb2.SubscribeRequest, until: str) -> Stream:
    call = caller.call("sow.v1.SowService.Subscribe", iter([request]))
    for frame in call:
        if frame.WhichOneof("frame") == until:
            break
    return Stream(call, lambda: _keys_of(call, caller.change()))


def subscribe(caller: Caller) -> Stream:
    """A snapshot, and the changes after it."""
    return _followed(caller, sow_pb2.SubscribeRequest(topic="orders", sow=True), "snapshot_end")


def subscribe_to_pattern(caller: Caller) -> Stream:
    """The same, of a pattern."""
    return _followed(caller, sow_pb2.SubscribeRequest(topic_pattern="ord.*", sow=True), "snapshot_end")


def consume(caller: Caller) -> Stream:
    """A durable."""
    durable = sow_pb2.DurableAttachment(name="durable", force=True)
    return _followed(caller, sow_pb2.SubscribeRequest(topic="orders", durable=durable), "durable_begin")


def publish(caller: Caller) -> Stream:
    """A stream of publishes, of which the first is acknowledged."""
    sending = Sending()
    call = caller.call("sow.v1.SowService.PublishStream", iter(sending))

    def publish() -> None:
        document = f'{{"id":"{caller.fresh_key()}"}}'.encode()
        sending.send(sow_pb2.PublishStreamRequest(topic="orders", payload=[document]))
        assert next(call).applied == 1

    publish()
    return Stream(call, publish)


def stage(caller: Caller) -> Stream:
    """The rows of a load, of which the first is staged."""
    load = caller.one("sow.v1.LoadService.OpenLoad", load_pb2.OpenLoadRequest(topic="loaded")).load_id
    sending = Sending()
    call = caller.call("sow.v1.LoadService.StageLoad", iter(sending))
    rows = iter(range(1, 1_000_000))

    def stage() -> None:
        row = next(rows)
        sending.send(load_pb2.StageLoadRequest(load_id=load, first_row=row, payload=[f'{{"id":{row}}}'.encode()]))
        assert next(call).staged == 1

    stage()
    return Stream(call, stage)


def _read(call: OpenCall) -> Stream:
    next(call)
    return Stream(call, lambda: next(call))


def query(caller: Caller) -> Stream:
    """A query with more records than the caller reads."""
    return _read(caller.call("sow.v1.SowService.Query", iter([sow_pb2.QueryRequest(topic="big", batch_size=1)])))


def read_export(caller: Caller) -> Stream:
    """The same of an export."""
    asked = snapshot_pb2.OpenExportRequest(topic="big", parts=1)
    export = caller.one("sow.v1.SnapshotService.OpenExport", asked).export_id
    return _read(caller.call("sow.v1.SnapshotService.ReadExport", iter([reading(export)])))


def reading(export: str) -> snapshot_pb2.ReadExportRequest:
    """A request to read an export record by record."""
    columns = [snapshot_pb2.PACKED_COLUMN_PAYLOAD]
    return snapshot_pb2.ReadExportRequest(export_id=export, columns=columns, batch_size=1)


def read_changes(caller: Caller) -> Stream:
    """The same of the journal."""
    plan = caller.one("sow.v1.SnapshotService.PlanChanges", snapshot_pb2.PlanChangesRequest(topic="big", earliest=True))
    request = snapshot_pb2.ReadChangesRequest(
        topic="big",
        start_bookmark=plan.start_bookmark,
        end_bookmark=plan.end_bookmark,
        columns=[snapshot_pb2.PACKED_COLUMN_PAYLOAD],
        batch_size=1,
    )
    return _read(caller.call("sow.v1.SnapshotService.ReadChanges", iter([request])))


def replicate(caller: Caller) -> Stream:
    """A link, whose sender was welcomed."""
    sending = Sending()
    call = caller.call("sow.v1.ReplicationService.Replicate", iter(sending))
    instance = replication_pb2.Instance(name=PEER, id="id", epoch="epoch")
    hello = replication_pb2.Hello(protocol=1, instance=instance, topics_pattern="orders", topics=[ORDERS])

    def answer() -> replication_pb2.ReplicateResponse:
        return replication_pb2.ReplicateResponse.FromString(next(call).message)

    def acknowledged() -> None:
        sequence = next(sequences)
        changes = replication_pb2.Changes(after=sequence - 1, upto=sequence)
        sending.send(sealed(replication_pb2.ReplicateRequest(changes=changes)))
        while answer().acknowledged.sequence != sequence:
            pass

    sending.send(sealed(replication_pb2.ReplicateRequest(hello=hello)))
    sequences = iter(range(answer().welcome.cursor + 1, 1_000_000))
    return Stream(call, acknowledged)


def reflect(caller: Caller) -> Stream:
    """Reflection, which has answered once."""
    sending = Sending()
    call = caller.call("grpc.reflection.v1alpha.ServerReflection.ServerReflectionInfo", iter(sending))

    def ask() -> None:
        sending.send(reflection_pb2.ServerReflectionRequest(list_services="*"))
        assert next(call).HasField("list_services_response")

    ask()
    return Stream(call, ask)


def watch(caller: Caller) -> Stream:
    """The watch of health. It belongs to nobody, so nothing of the access file ends it."""
    call = caller.call("grpc.health.v1.Health.Watch", iter([health_pb2.HealthCheckRequest()]))
    assert next(call).status == health_pb2.HealthCheckResponse.SERVING

    def stands() -> None:
        assert call.is_active()

    return Stream(call, stands)


LASTING: Final[Mapping[str, Callable[[Caller], Stream]]] = MappingProxyType(
    {
        "Subscribe": subscribe,
        "Subscribe to a pattern": subscribe_to_pattern,
        "Subscribe as a durable": consume,
        "PublishStream": publish,
        "StageLoad": stage,
        "Query": query,
        "ReadExport": read_export,
        "ReadChanges": read_changes,
        "Replicate": replicate,
        "ServerReflectionInfo": reflect,
    }
)
"""By name: opens a stream, and returns once it stands."""


class End(NamedTuple):
    """The end of a stream."""

    code: grpc.StatusCode
    reason: str


def end_of(stream: Stream) -> End:
    """Reads a stream to its end."""
    try:
        for _ in stream.call:
            pass
    except grpc.RpcError:
        return End(stream.call.code(), reason_of_call(stream.call))
    return End(grpc.StatusCode.OK, "")
