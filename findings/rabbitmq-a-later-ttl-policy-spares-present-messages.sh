#!/usr/bin/env bash
# Versions: rabbitmq-server 3.10.8-1.1+deb12u1 and Erlang 25.2.3 of Debian 12, pika 1.3.2; a classic and a quorum queue.
#
# The guess: a policy with `message-ttl` that comes later also counts for messages that are in the queue already. They are
# dropped once they are older than that and at the head.
# What happens: a message gets its expire time when it comes to the queue. One that was there before the policy has none.
# It stays, is delivered long after its second is over, and holds messages behind it that have expired.
set -euo pipefail
work=$(mktemp -d)
pids=()
finish() {
    for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
    [ -f "$work/pid" ] && kill "$(cat "$work/pid")" 2>/dev/null || true
    for pid in "${pids[@]}"; do wait "$pid" 2>/dev/null || true; done
    rm -rf "$work"
}
trap finish EXIT

mkdir "$work/packages" "$work/unpacked"
cd "$work/packages"
erlang=1:25.2.3+dfsg-1+deb12u4
packages=(rabbitmq-server=3.10.8-1.1+deb12u1)
for name in asn1 base crypto eldap ftp inets mnesia os-mon parsetools public-key runtime-tools snmp ssl syntax-tools tftp \
    tools xmerl; do
    packages+=("erlang-$name=$erlang")
done
apt-get -qq download "${packages[@]}"
for package in *.deb; do dpkg-deb -x "$package" "$work/unpacked"; done
python3 -m venv "$work/python"
"$work/python/bin/pip" -q --disable-pip-version-check install pika==1.3.2

cd "$work"
erl=$work/unpacked/usr/lib/erlang
sed -i "s|ROOTDIR=/usr/lib/erlang|ROOTDIR=$erl|" "$erl/bin/erl"  # it was not installed where it expects to be
free() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
port=$(free)
ERL_EPMD_PORT=$(free)
RABBITMQ_DIST_PORT=$(free)
export ERL_EPMD_PORT RABBITMQ_DIST_PORT ERL_EPMD_ADDRESS=127.0.0.1 HOME=$work PATH=$erl/bin:$PATH
export RABBITMQ_NODENAME=finding@localhost RABBITMQ_NODE_IP_ADDRESS=127.0.0.1 RABBITMQ_NODE_PORT=$port
export RABBITMQ_MNESIA_BASE=$work/data RABBITMQ_LOG_BASE=$work/log RABBITMQ_ENABLED_PLUGINS_FILE=$work/plugins
export RABBITMQ_CONFIG_FILE=$work/none RABBITMQ_CONF_ENV_FILE=/dev/null RABBITMQ_PID_FILE=$work/pid
sbin=$work/unpacked/usr/lib/rabbitmq/lib/rabbitmq_server-3.10.8/sbin
echo '[].' >"$work/plugins"
"$work/unpacked/usr/bin/epmd" -address 127.0.0.1 -port "$ERL_EPMD_PORT" >/dev/null 2>&1 &
pids+=($!)
"$sbin/rabbitmq-server" >"$work/server.log" 2>&1 &
pids+=($!)
ctl() { "$sbin/rabbitmqctl" -q "$@"; }
until ctl await_startup --timeout 60 >/dev/null 2>&1; do
    kill -0 "${pids[1]}" || { cat "$work/server.log"; exit 1; }
    sleep 1
done
ctl version

cat >"$work/seen.py" <<'PYTHON'
import subprocess, sys, time
import pika

port, ctl = int(sys.argv[1]), sys.argv[2]
channel = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port)).channel()
kinds = {"classic": {}, "quorum": {"x-queue-type": "quorum"}}
for name, arguments in kinds.items():
    channel.queue_declare(name, durable=True, arguments=arguments)
    channel.basic_publish("", name, b"before the policy")
time.sleep(1)
policy = ["set_policy", "ttl", "^(classic|quorum)$", '{"message-ttl":1000}', "--apply-to", "queues"]
subprocess.run([ctl, "-q", *policy], check=True)
time.sleep(1)
for name in kinds:
    channel.basic_publish("", name, b"after the policy")
time.sleep(9)  # nine times the lifetime
for name in kinds:
    depth = channel.queue_declare(name, passive=True).method.message_count
    first = channel.basic_get(name, auto_ack=True)[2]
    time.sleep(1)
    second = channel.basic_get(name, auto_ack=True)[2]
    print(f"{name}: {depth} messages 9 s later; first {first}, then {second}")
    assert (depth, first, second) == (2, b"before the policy", None), "the behaviour has changed"
PYTHON
"$work/python/bin/python" "$work/seen.py" "$port" "$sbin/rabbitmqctl"
