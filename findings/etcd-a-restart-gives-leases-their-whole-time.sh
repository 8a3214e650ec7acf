#!/usr/bin/env bash
# Versions: etcd-server and etcd-client 3.4.23-4+b4 of Debian 12, one member.
#
# The guess: the end of a lease is known to the server, so a lease of 8 s that is 6 s old has 2 s left after a restart; and
# one whose time was over while the server was down has ended.
# What happens: the server counts from its start. The lease has its whole 8 s again, and after another restart once more, so
# keys live on for as long as the server is restarted often enough.
set -euo pipefail
work=$(mktemp -d)
pid=
finish() {
    [ -n "$pid" ] && kill "$pid" 2>/dev/null && wait "$pid" 2>/dev/null || true
    rm -rf "$work"
}
trap finish EXIT

mkdir "$work/packages" "$work/unpacked"
cd "$work/packages"
apt-get -qq download etcd-server=3.4.23-4+b4 etcd-client=3.4.23-4+b4
for package in *.deb; do dpkg-deb -x "$package" "$work/unpacked"; done
free() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
clients=http://127.0.0.1:$(free)
peers=http://127.0.0.1:$(free)
export ETCDCTL_API=3 ETCDCTL_ENDPOINTS=$clients
ctl() { "$work/unpacked/usr/bin/etcdctl" "$@"; }
start() {
    "$work/unpacked/usr/bin/etcd" --data-dir "$work/data" --listen-client-urls "$clients" --advertise-client-urls "$clients" \
        --listen-peer-urls "$peers" --initial-advertise-peer-urls "$peers" --initial-cluster "default=$peers" \
        >>"$work/server.log" 2>&1 &
    pid=$!
    until ctl endpoint health >/dev/null 2>&1; do sleep 0.1; done
}
restart() {
    kill "$pid"
    wait "$pid" || true
    sleep "$1"
    start
}
left() { ctl lease timetolive "$lease" | sed 's/.*remaining(\([0-9-]*\)s).*/\1/'; }

start
"$work/unpacked/usr/bin/etcd" --version | head -1
lease=$(ctl lease grant 8 | awk '{print $2}')
ctl put key value --lease="$lease" >/dev/null
sleep 6
before=$(left)
restart 0
after=$(left)
sleep 5
restart 6  # now 11 s have passed since the first restart: longer than the lease
again=$(left)
value=$(ctl get key --print-value-only)
echo "a lease of 8 s: $before s left after 6 s; $after s after a restart; $again s after being down for longer; key: $value"
[ "$before" -le 2 ] && [ "$after" -ge 7 ] && [ "$again" -ge 7 ] && [ "$value" = value ] || {
    echo "the behaviour has changed" >&2
    exit 1
}
