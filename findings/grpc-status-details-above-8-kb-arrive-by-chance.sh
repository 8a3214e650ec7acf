#!/usr/bin/env bash
# Versions: grpcio 1.85.3, client and server in one process, default options.
#
# The guess: an error's details (`grpc-status-details-bin`) of up to 8 KB, or of up to 16 KB, arrive, and larger ones do not.
# What happens: below 8 KB always and above 16 KB never, as said. Between them each call decides by a random number, which falls
# with the size: of 200 calls with 12,000 bytes some end with NOT_FOUND and their details, the others with RESOURCE_EXHAUSTED. A
# test that passes once, and a retry that helps, prove nothing.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/python"
"$work/python/bin/pip" -q --disable-pip-version-check install grpcio==1.85.3
"$work/python/bin/python" - <<'PYTHON'
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import grpc


def fail(request, context):
    context.set_trailing_metadata((("grpc-status-details-bin", b"x" * int(request)),))
    context.abort(grpc.StatusCode.NOT_FOUND, "no such order")


server = grpc.server(ThreadPoolExecutor(1))
method = grpc.unary_unary_rpc_method_handler(fail)
server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", {"Fail": method}),))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
seen = {}
with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
    call = channel.unary_unary("/t.T/Fail")
    for size in (7_000, 12_000, 17_000):
        seen[size] = Counter()
        for _ in range(200):
            try:
                call(str(size).encode())
            except grpc.RpcError as error:
                seen[size][error.code().name] += 1
        print(f"{size} bytes of details: {dict(seen[size])}")
server.stop(None)
assert seen[7_000] == {"NOT_FOUND": 200} and seen[17_000] == {"RESOURCE_EXHAUSTED": 200}, "the behaviour has changed"
assert set(seen[12_000]) == {"NOT_FOUND", "RESOURCE_EXHAUSTED"}, "the behaviour has changed"
PYTHON
