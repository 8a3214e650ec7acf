"""etcd as a peer: Debian's etcd, and its Put called with plain grpcio, as sow's Publish is.

Only two messages of its contract are needed. They are described here rather than generated.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

from benchmarks.processes import Process, free_port, program

_FIELD: Final = descriptor_pb2.FieldDescriptorProto
_PACKAGE: Final = "etcdserverpb"


def _message_class(
    name: str, fields: dict[str, tuple[int, descriptor_pb2.FieldDescriptorProto.Type.ValueType]]
) -> type[Message]:
    """A message class with these optional scalar fields."""
    described = descriptor_pb2.DescriptorProto(name=name)
    for field_name, (number, kind) in fields.items():
        described.field.add(name=field_name, number=number, type=kind, label=_FIELD.LABEL_OPTIONAL)
    file = descriptor_pb2.FileDescriptorProto(
        name=f"{_PACKAGE}/{name}.proto", package=_PACKAGE, syntax="proto3", message_type=[described]
    )
    # A separate pool: the default one would clash with a program that has loaded etcd's real contract.
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


# rpc.proto of etcd: PutRequest { bytes key = 1; bytes value = 2; int64 lease = 3; … },
# PutResponse { ResponseHeader header = 1; … }. Only the presence of the header matters here, so it stays bytes.
_PutRequest: Final = _message_class(
    "PutRequest", {"key": (1, _FIELD.TYPE_BYTES), "value": (2, _FIELD.TYPE_BYTES), "lease": (3, _FIELD.TYPE_INT64)}
)
_PutResponse: Final = _message_class("PutResponse", {"header": (1, _FIELD.TYPE_BYTES)})


class EtcdServer(Process):
    """A single etcd, which syncs every put before it answers, and a channel to it."""

    def __init__(self, directory: Path) -> None:
        """Starts it and waits until a put is answered. Raises NotInstalled."""
        path = program("etcd", "etcd-server")
        self.address = f"127.0.0.1:{free_port()}"
        client, peer = f"http://{self.address}", f"http://127.0.0.1:{free_port()}"
        super().__init__(
            [
                *(path, "--name", "bench", "--data-dir", str(directory)),
                *("--listen-client-urls", client, "--advertise-client-urls", client),
                *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                *("--initial-cluster", f"bench={peer}", "--logger", "zap", "--log-level", "error"),
            ]
        )
        self._channel = grpc.insecure_channel(self.address)
        self._put = self._channel.unary_unary(
            f"/{_PACKAGE}.KV/Put",
            request_serializer=_PutRequest.SerializeToString,
            response_deserializer=_PutResponse.FromString,
        )
        try:
            self.wait_until(self._answers)
        except BaseException:
            self.stop()
            raise

    def _answers(self) -> bool:
        try:
            self.put(b"ready", b"?")
        except grpc.RpcError:
            return False
        return True

    def put(self, key: bytes, value: bytes) -> None:
        """One durable put."""
        self._put(_PutRequest(key=key, value=value), timeout=10)

    def stop(self) -> None:
        """Ends the channel and the process."""
        self._channel.close()
        super().stop()
