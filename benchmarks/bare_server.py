"""The bare gRPC stream: a server that answers like sow and stores nothing, to measure the limit of the transport.

`python -m benchmarks.bare_server PORT` serves until SIGTERM. A publish costs it the decoding of the request and the
answer. Its records are pushed to every open subscription. A query sends the same batch repeatedly, encoded each time.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from typing import Final

import grpc
import grpc.aio
import uvloop

from benchmarks.documents import documents, keys
from benchmarks.processes import Process, free_port
from sow.v1 import sow_pb2, types_pb2

BATCH_RECORDS: Final = 1_000
MESSAGE_BYTES_MAX: Final = 20 * 2**20


class BareServer(Process):
    """The process, as benchmarks start it."""

    def __init__(self) -> None:
        """Starts it and waits until it serves."""
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        super().__init__([sys.executable, "-m", __name__, str(port)], lambda line: line.startswith("ready"))
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise


class _Answers:
    def __init__(self) -> None:
        numbers = range(BATCH_RECORDS)
        self._keys = keys(numbers)
        self._payloads = documents(numbers)
        self._subscriptions: list[asyncio.Queue[bytes]] = []

    async def publish(self, request: sow_pb2.PublishRequest, _context: object) -> sow_pb2.PublishResponse:
        for subscription in self._subscriptions:
            for record in request.records:
                subscription.put_nowait(record.payload)
        return sow_pb2.PublishResponse(
            results=[sow_pb2.PublishResult(version=1, sequence=1) for _ in request.records],
            durability=types_pb2.DURABILITY_FSYNC,
        )

    async def publish_stream(
        self, requests: AsyncIterator[sow_pb2.PublishStreamRequest], _context: object
    ) -> AsyncIterator[sow_pb2.PublishStreamResponse]:
        async for request in requests:
            # list(): every engine takes the payloads out of the message, so this belongs to the transport's share.
            applied = len(list(request.payload))
            yield sow_pb2.PublishStreamResponse(applied=applied, durability=types_pb2.DURABILITY_FSYNC)

    async def subscribe(
        self, request: sow_pb2.SubscribeRequest, _context: object
    ) -> AsyncIterator[sow_pb2.SubscribeResponse]:
        payloads = asyncio.Queue[bytes]()
        self._subscriptions.append(payloads)
        try:
            yield sow_pb2.SubscribeResponse(progress=sow_pb2.Progress(bookmark="bare.1", now_micros=1))
            while True:
                columns = types_pb2.RecordColumns(
                    key=self._keys[:1],
                    payload=[await payloads.get()],
                    version=[1],
                    publish_time_micros=[1_700_000_000_000_000],
                    expire_time_micros=[1_700_000_000_000_000],
                    sequence=[1],
                    origins=["bare"],
                )
                yield sow_pb2.SubscribeResponse(
                    changes=sow_pb2.ChangeBatch(
                        topic=request.topic, op=[sow_pb2.CHANGE_OP_PUT], records=columns, bookmark="bare.1"
                    )
                )
        finally:
            self._subscriptions.remove(payloads)

    async def query(self, request: sow_pb2.QueryRequest, _context: object) -> AsyncIterator[sow_pb2.QueryResponse]:
        yield sow_pb2.QueryResponse(header=sow_pb2.QueryHeader(bookmark="0", as_of_micros=1))
        times = [1_700_000_000_000_000] * BATCH_RECORDS
        columns = types_pb2.RecordColumns(
            key=self._keys,
            payload=self._payloads,
            version=times,
            publish_time_micros=times,
            expire_time_micros=times,
            sequence=times,
            origins=["bare"],
        )
        answer = sow_pb2.QueryResponse(batch=columns)
        batches = request.top_n // BATCH_RECORDS
        for _ in range(batches):
            yield answer
        sent = batches * BATCH_RECORDS
        yield sow_pb2.QueryResponse(footer=sow_pb2.QueryFooter(matched=sent, returned=sent, scanned=sent))

    def handler(self) -> grpc.GenericRpcHandler:
        """The calls that benchmarks make; all others are unimplemented."""
        return grpc.method_handlers_generic_handler(
            sow_pb2.DESCRIPTOR.services_by_name["SowService"].full_name,
            {
                "Publish": grpc.unary_unary_rpc_method_handler(
                    self.publish,
                    sow_pb2.PublishRequest.FromString,
                    sow_pb2.PublishResponse.SerializeToString,
                ),
                "PublishStream": grpc.stream_stream_rpc_method_handler(
                    self.publish_stream,
                    sow_pb2.PublishStreamRequest.FromString,
                    sow_pb2.PublishStreamResponse.SerializeToString,
                ),
                "Subscribe": grpc.unary_stream_rpc_method_handler(
                    self.subscribe,
                    sow_pb2.SubscribeRequest.FromString,
                    sow_pb2.SubscribeResponse.SerializeToString,
                ),
                "Query": grpc.unary_stream_rpc_method_handler(
                    self.query,
                    sow_pb2.QueryRequest.FromString,
                    sow_pb2.QueryResponse.SerializeToString,
                ),
            },
        )


async def _serve(port: int) -> None:
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
            ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        ]
    )
    server.add_generic_rpc_handlers((_Answers().handler(),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    print("ready", flush=True)
    await stop.wait()
    await server.stop(1)


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1])))
