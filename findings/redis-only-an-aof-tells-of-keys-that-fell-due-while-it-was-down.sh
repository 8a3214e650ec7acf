#!/usr/bin/env bash
# Versions: redis-server 7.0.15-1~deb12u10 of Debian 12, redis 8.1.0 (Python); `notify-keyspace-events KEA`.
#
# The guess: keys whose time ended while the server was down are dropped while it loads, with either kind of persistence, and
# nobody is told of them.
# What happens: from an RDB file so, and `expired_keys` stays 0. From an append-only file they are loaded, expire after the
# start, and are told as `expired` to who has subscribed by then, seconds or days after their time.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/packages" "$work/unpacked"
cd "$work/packages"
apt-get -qq download redis-server=5:7.0.15-1~deb12u10 redis-tools=5:7.0.15-1~deb12u10 libjemalloc2=5.3.0-1 liblzf1=3.6-3 \
    libatomic1=12.2.0-14+deb12u1
for package in *.deb; do dpkg-deb -x "$package" "$work/unpacked"; done
python3 -m venv "$work/python"
"$work/python/bin/pip" -q --disable-pip-version-check install redis==8.1.0
cat >"$work/seen.py" <<'PYTHON'
import os, socket, subprocess, sys, time

import redis

work = sys.argv[1]
libraries = ":".join(f"{work}/unpacked/{folder}/x86_64-linux-gnu" for folder in ("usr/lib", "lib"))
environment = {**os.environ, "LD_LIBRARY_PATH": libraries}


def start(name, settings):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = f"{work}/{name}"
    os.makedirs(folder, exist_ok=True)
    command = [f"{work}/unpacked/usr/bin/redis-server", "--bind", "127.0.0.1", "--port", str(port), "--dir", folder, *settings]
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    client = redis.Redis("127.0.0.1", port)
    while True:
        try:
            client.ping()
            return server, client
        except (redis.ConnectionError, redis.BusyLoadingError):
            time.sleep(0.05)


seen = {}
for name, settings in {"rdb": ["--save", "3600 1"], "aof": ["--save", "", "--appendonly", "yes"]}.items():
    server, client = start(name, settings)
    try:
        for number in range(20):
            client.set(f"session:{number}", "x", px=1500)
        client.set("kept", "x")
        server.terminate()
        server.wait()
        time.sleep(2)
        server, client = start(name, settings)
        time.sleep(2)
        figures = client.info()
        seen[name] = figures["expired_keys"], client.dbsize()
    finally:
        server.terminate()
        server.wait()
    print(f"{name}: {seen[name][0]} keys expired after the start, {seen[name][1]} is left")
assert seen == {"rdb": (0, 1), "aof": (20, 1)}, "the behaviour has changed"
PYTHON
"$work/python/bin/python" "$work/seen.py" "$work"
