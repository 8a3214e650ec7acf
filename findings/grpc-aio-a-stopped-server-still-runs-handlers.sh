#!/usr/bin/env bash
# Versions: grpcio 1.85.3, `grpc.aio`.
#
# The guess: once `await server.stop(grace)` has returned, no handler runs any more, and what they use can be closed.
# What happens: it waits for calls, not for handlers. Those that it cancels are still in their `finally` when it returns,
# and one that cleans up for a second does so a second after the stop.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/python"
"$work/python/bin/pip" -q --disable-pip-version-check install grpcio==1.85.3
"$work/python/bin/python" - <<'PYTHON'
import asyncio

import grpc


async def stopped(grace):
    events, running = [], asyncio.Event()

    async def work(request, context):
        running.set()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(1)
            events.append("handler has cleaned up")

    server = grpc.aio.server()
    method = grpc.unary_unary_rpc_method_handler(work)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", {"Work": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/t.T/Work")(b"")
        await running.wait()
        await server.stop(grace)
        events.append("stop has returned")
        await asyncio.sleep(2)
        assert (await call.code()) in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    return events


async def main():
    for grace in (None, 0.2):
        events = await stopped(grace)
        print(f"stop({grace}): {events}")
        assert events == ["stop has returned", "handler has cleaned up"], "the behaviour has changed"


asyncio.run(main())
PYTHON
