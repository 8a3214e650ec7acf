#!/usr/bin/env bash
# Versions: grpcio 1.85.3, the blocking API and `grpc.aio`, one server.
#
# The guess: a client that leaves its `async for` over a stream, and keeps no reference to the call, has ended it: the call is
# collected and so cancelled, as in the blocking API.
# What happens: the blocking call is cancelled at once. The one of `grpc.aio` is not, also after a collection of garbage:
# the server goes on producing until the channel is closed. `break` needs a `cancel()`.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/python"
"$work/python/bin/pip" -q --disable-pip-version-check install grpcio==1.85.3
"$work/python/bin/python" - <<'PYTHON'
import asyncio, gc

import grpc

ended = []


async def produce(request, context):
    try:
        while True:
            yield b"row"
            await asyncio.sleep(0.01)
    finally:
        ended.append(request.decode())


def blocking(address):
    with grpc.insecure_channel(address) as channel:
        for _row in channel.unary_stream("/t.T/Rows")(b"blocking"):
            break
        gc.collect()
        asyncio.run(asyncio.sleep(2))
        return list(ended)


async def take_one(channel, name, cancel=False):
    call = channel.unary_stream("/t.T/Rows")(name)
    async for _row in call:
        break
    if cancel:
        call.cancel()


async def main():
    server = grpc.aio.server()
    method = grpc.unary_stream_rpc_method_handler(produce)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", {"Rows": method}),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    first = await asyncio.to_thread(blocking, address)
    ended.clear()
    async with grpc.aio.insecure_channel(address) as channel:
        await take_one(channel, b"left")
        await take_one(channel, b"cancelled", cancel=True)
        for _ in range(4):
            await asyncio.sleep(0.5)
            gc.collect()
        open_channel = list(ended)
    await asyncio.sleep(1)
    closed = list(ended)
    await server.stop(None)
    print(f"ended 2 s later: {first}; of aio: {open_channel}; when the channel is closed: {closed}")
    assert first == ["blocking"] and open_channel == ["cancelled"], "the behaviour has changed"
    assert closed == ["cancelled", "left"], "the behaviour has changed"


asyncio.run(main())
PYTHON
