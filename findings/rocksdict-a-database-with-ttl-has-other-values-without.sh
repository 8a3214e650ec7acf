#!/usr/bin/env bash
# Versions: rocksdict 0.3.29 (RocksDB 9.8.4).
#
# The guess: whether a database has a TTL is known to it. Opened the other way (a tool without `access_type`, a TTL that comes
# later) it is refused, or the TTL counts from then on.
# What happens: it opens, and rows read otherwise. Without the TTL each value has four bytes more, the time of its write: 5
# is 21-odd thousand million. With it, values that were there before lose their last four bytes, where these look like
# a time. No error either way, and no mark in the folder.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/python"
"$work/python/bin/pip" -q --disable-pip-version-check install rocksdict==0.3.29
"$work/python/bin/python" - "$work" <<'PYTHON'
import sys, time
from rocksdict import AccessType, Rdict

ttl = AccessType.with_ttl(3600)
with_it = Rdict(sys.argv[1] + "/with", access_type=ttl)
with_it["count"], with_it["raw"] = 5, b"ab"
started = int(time.time())
with_it.close()
without = Rdict(sys.argv[1] + "/with")
count, raw = without["count"], without["raw"]
stamp = int.from_bytes(raw[2:], "little")
print(f"written with a TTL, read without: 5 is {count}, b'ab' is {raw} with the time {stamp}")
assert count == int.from_bytes(bytes([5]) + raw[2:], "big") and raw[:2] == b"ab", "the behaviour has changed"
assert abs(stamp - started) <= 2, "the behaviour has changed"

plain = Rdict(sys.argv[1] + "/plain")
plain["name"] = "ACME Ltd"
plain.close()
later = Rdict(sys.argv[1] + "/plain", access_type=ttl)
name = later["name"]
print(f"written without, read with a TTL: 'ACME Ltd' is {name!r}")
assert name == "ACME", "the behaviour has changed"
PYTHON
