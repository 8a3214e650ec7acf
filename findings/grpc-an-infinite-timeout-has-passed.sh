#!/usr/bin/env bash
# Versions: grpcio 1.85.3, the blocking API and `grpc.aio`.
#
# The guess: `timeout=math.inf` means no deadline, or is an error of the argument; a timeout of some centuries is one that
# nobody lives to see. A server asks `time_remaining()` and gets None where the caller set no deadline.
# What happens: a timeout beyond the year 2262 ends at once with DEADLINE_EXCEEDED in both APIs: infinity, and 9e9 seconds. 3e9
# works. Without a deadline the blocking server is told of 292 thousand million years, `grpc.aio` of None.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/python"
"$work/python/bin/pip" -q --disable-pip-version-check install grpcio==1.85.3
"$work/python/bin/python" - <<'PYTHON'
import asyncio, math
from concurrent.futures import ThreadPoolExecutor

import grpc

TIMEOUTS = (3e9, 9e9, math.inf)
left = {}


def handlers(answer):
    method = grpc.unary_unary_rpc_method_handler(answer)
    return (grpc.method_handlers_generic_handler("t.T", {"Ask": method}),)


def answer(request, context):
    left.setdefault("blocking", context.time_remaining())
    return request



server = grpc.server(ThreadPoolExecutor(1))
server.add_generic_rpc_handlers(handlers(answer))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
blocking = []
with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
    ask = channel.unary_unary("/t.T/Ask")
    ask(b"", wait_for_ready=True)
    for timeout in TIMEOUTS:
        try:
            ask(b"", timeout=timeout)
            blocking.append("answered")
        except grpc.RpcError as error:
            blocking.append(error.code().name)
server.stop(None)


async def asynchronous():
    async def answer(request, context):
        left.setdefault("aio", context.time_remaining())
        return request

    server, seen = grpc.aio.server(), []
    server.add_generic_rpc_handlers(handlers(answer))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        ask = channel.unary_unary("/t.T/Ask")
        await ask(b"", wait_for_ready=True)
        for timeout in TIMEOUTS:
            try:
                await ask(b"", timeout=timeout)
                seen.append("answered")
            except grpc.RpcError as error:
                seen.append(error.code().name)
    await server.stop(None)
    return seen


aio = asyncio.run(asynchronous())
print(f"timeouts {TIMEOUTS}: blocking {blocking}, aio {aio}; time_remaining() without a deadline: {left}")
assert blocking == aio == ["answered", "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"], "the behaviour has changed"
assert left["blocking"] > 9e18 and left["aio"] is None, "the behaviour has changed"
PYTHON
