#!/usr/bin/env bash
# Versions: rocksdict 0.3.29 (RocksDB 9.8.4).
#
# The guess: `items()`, `keys()`, `values()` and `iter()` of a snapshot show the database as of the snapshot, as `snapshot[key]`
# does.
# What happens: they show it as of the call. One snapshot has the old value for `snapshot[key]` and the new one in `items()`,
# with keys that came later.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/python"
"$work/python/bin/pip" -q --disable-pip-version-check install rocksdict==0.3.29
"$work/python/bin/python" - "$work/data" <<'PYTHON'
import sys
from rocksdict import Options, Rdict

options = Options(raw_mode=True)
options.create_if_missing(True)
db = Rdict(sys.argv[1], options)
db[b"order"] = b"new"
snapshot = db.snapshot()
db[b"order"] = b"filled"
db[b"later"] = b"x"
rows = snapshot.iter()
rows.seek_to_first()
seen = snapshot[b"order"], list(snapshot.items()), list(snapshot.keys()), list(snapshot.values()), (rows.key(), rows.value())
print("snapshot[key]: %s; items: %s; keys: %s; values: %s; first of iter: %s" % seen)
assert seen[0] == b"new", "the behaviour has changed"
assert seen[1] == [(b"later", b"x"), (b"order", b"filled")], "the behaviour has changed"
assert seen[2:] == ([b"later", b"order"], [b"x", b"filled"], (b"later", b"x")), "the behaviour has changed"
PYTHON
