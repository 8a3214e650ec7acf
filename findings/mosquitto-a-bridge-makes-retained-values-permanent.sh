#!/usr/bin/env bash
# Versions: mosquitto 2.0.11-1.2+deb12u2 of Debian 12 at both ends, paho-mqtt 2.2.0 (MQTT 5).
#
# The guess: between two brokers of one kind a bridge carries a retained message as it is, with its expiry.
# What happens: a bridge speaks MQTT 3.1.1 unless `bridge_protocol_version mqttv50` is set, and drops the expiry without a line
# in the log. The value ends at the first broker and is retained at the second for good.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/packages" "$work/unpacked"
cd "$work/packages"
apt-get -qq download mosquitto=2.0.11-1.2+deb12u2 libcjson1=1.7.15-1+deb12u4 libdlt2=2.18.8-6 libwebsockets17=4.1.6-3 \
    libwrap0=7.6.q-32
for package in *.deb; do dpkg-deb -x "$package" "$work/unpacked"; done
python3 -m venv "$work/python"
"$work/python/bin/pip" -q --disable-pip-version-check install paho-mqtt==2.2.0
cat >"$work/seen.py" <<'PYTHON'
import os, socket, subprocess, sys, threading, time

import paho.mqtt.client as mqtt
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

work = sys.argv[1]
libraries = ":".join(f"{work}/unpacked/{folder}/x86_64-linux-gnu" for folder in ("usr/lib", "lib"))
servers = []


def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def broker(name, at, extra=""):
    with open(f"{work}/{name}.conf", "w") as file:
        file.write(f"user root\nlistener {at} 127.0.0.1\nallow_anonymous true\n{extra}")
    command = [f"{work}/unpacked/usr/sbin/mosquitto", "-c", f"{work}/{name}.conf"]
    with open(f"{work}/{name}.log", "w") as log:
        servers.append(subprocess.Popen(command, env={**os.environ, "LD_LIBRARY_PATH": libraries}, stderr=log))
    while socket.socket().connect_ex(("127.0.0.1", at)):
        time.sleep(0.05)


def client(at):
    made, connected = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, protocol=mqtt.MQTTv5), threading.Event()
    made.on_connect = lambda *_: connected.set()
    made.connect("127.0.0.1", at)
    made.loop_start()
    assert connected.wait(5)
    return made


def retained(at, topics="state/#"):
    """Topics, and the seconds that they have left."""
    got, reader = {}, client(at)
    reader.on_message = lambda _client, _data, message: got.update(
        {message.topic: getattr(message.properties, "MessageExpiryInterval", None)}
    )
    reader.subscribe(topics, 1)
    time.sleep(0.5)
    reader.disconnect()
    reader.loop_stop()
    return got


first, plain, five = port(), port(), port()
try:
    broker("first", first)
    bridge = f"address 127.0.0.1:{first}\ntopic # in 1\n"
    broker("plain", plain, "connection plain\n" + bridge)
    broker("five", five, "connection five\n" + bridge + "bridge_protocol_version mqttv50\n")
    publisher, lifetime = client(first), Properties(PacketTypes.PUBLISH)
    lifetime.MessageExpiryInterval = 6
    publisher.publish("ready/now", b"yes", qos=1, retain=True).wait_for_publish(5)
    while not all(retained(at, "ready/#") for at in (plain, five)):
        pass  # a bridge takes a while to connect
    publisher.publish("state/door", b"open", qos=1, retain=True, properties=lifetime).wait_for_publish(5)
    time.sleep(0.5)
    young = {name: retained(at) for name, at in (("first", first), ("bridge", plain), ("bridge of MQTT 5", five))}
    time.sleep(6)
    old = {name: retained(at) for name, at in (("first", first), ("bridge", plain), ("bridge of MQTT 5", five))}
    publisher.disconnect()
    publisher.loop_stop()
finally:
    for server in servers:
        server.terminate()
        server.wait()
print(f"a lifetime of 6 s; soon: {young}; later: {old}")
assert all("state/door" in values for values in young.values()), "the behaviour has changed"
assert young["bridge"]["state/door"] is None and young["bridge of MQTT 5"]["state/door"], "the behaviour has changed"
assert old == {"first": {}, "bridge": {"state/door": None}, "bridge of MQTT 5": {}}, "the behaviour has changed"
PYTHON
"$work/python/bin/python" "$work/seen.py" "$work"
