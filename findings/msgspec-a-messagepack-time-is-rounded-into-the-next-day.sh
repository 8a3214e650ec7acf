#!/usr/bin/env bash
# Versions: msgspec 0.22.0, msgpack 1.2.4, ormsgpack 1.13.1; the timestamp extension of MessagePack.
#
# The guess: a reader whose times have microseconds cuts the nanoseconds off, so three readers of one message have one time.
# What happens: msgpack and ormsgpack cut, msgspec rounds, halves up. 23:59:59.999999500 is the next day for it, and the last
# moments of year 9999, which MessagePack and `datetime` both have, are an error. One record lands in two partitions by day.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/python"
"$work/python/bin/pip" -q --disable-pip-version-check install msgspec==0.22.0 msgpack==1.2.4 ormsgpack==1.13.1
"$work/python/bin/python" - <<'PYTHON'
import msgpack
import msgspec
import ormsgpack

READERS = {
    "msgspec": msgspec.msgpack.decode,
    "msgpack": lambda data: msgpack.unpackb(data, timestamp=3),
    "ormsgpack": lambda data: ormsgpack.unpackb(data, option=ormsgpack.OPT_DATETIME_AS_TIMESTAMP_EXT),
}
LAST_OF_2026, LAST_OF_9999 = 1_798_761_599, 253_402_300_799


def read(seconds, nanoseconds):
    data, seen = msgpack.packb(msgpack.Timestamp(seconds, nanoseconds)), {}
    for name, reader in READERS.items():
        try:
            seen[name] = f"{reader(data):%Y-%m-%d %H:%M:%S.%f}"
        except ValueError as error:
            seen[name] = str(error)
    return seen


cases = [read(LAST_OF_2026, 999_999_499), read(LAST_OF_2026, 999_999_500), read(LAST_OF_9999, 999_999_999)]
for case in cases:
    print(case)
cut, end = "2026-12-31 23:59:59.999999", "9999-12-31 23:59:59.999999"
assert cases[0] == dict.fromkeys(READERS, cut), "the behaviour has changed"
assert cases[1] == {"msgspec": "2027-01-01 00:00:00.000000", "msgpack": cut, "ormsgpack": cut}, "the behaviour has changed"
assert cases[2] == {"msgspec": "year 10000 is out of range", "msgpack": end, "ormsgpack": end}, "the behaviour has changed"
PYTHON
