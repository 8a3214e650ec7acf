#!/usr/bin/env bash
# Versions: rocksdict 0.3.29 (RocksDB 9.8.4).
#
# The guess: `ReadOptions.set_iterate_lower_bound(b"c")` leaves out the keys before c, and `set_iterate_upper_bound(b"c")` those
# from c on.
# What happens: both leave out those from c on. A scan from a key onwards by the lower bound gets exactly the other keys, without
# an error.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/python"
"$work/python/bin/pip" -q --disable-pip-version-check install rocksdict==0.3.29
"$work/python/bin/python" - "$work/data" <<'PYTHON'
import sys
from rocksdict import Options, Rdict, ReadOptions

options = Options(raw_mode=True)
options.create_if_missing(True)
db = Rdict(sys.argv[1], options)
for key in (b"a", b"b", b"c", b"d"):
    db[key] = b""
seen = {}
for name in ("set_iterate_lower_bound", "set_iterate_upper_bound"):
    bound, reading = b"c", ReadOptions()
    getattr(reading, name)(bound)
    seen[name] = list(db.keys(read_opt=reading))
    print(f"{name}(b'c'): {seen[name]}")
assert set(map(tuple, seen.values())) == {(b"a", b"b")}, "the behaviour has changed"
PYTHON
