#!/usr/bin/env bash
# Versions: rocksdict 0.3.29 (RocksDB 9.8.4).
#
# The guess: the object of a column family writes to this family: `family[key] = …`, `family.put(…)`, and so also
# `family.write(batch)`, where the batch names none.
# What happens: a batch goes by its own entries alone. Those without a family land in the default one, also when another wrote
# the batch, so the family does not have them and the next reader of the default one does.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/python"
"$work/python/bin/pip" -q --disable-pip-version-check install rocksdict==0.3.29
"$work/python/bin/python" - "$work/data" <<'PYTHON'
import sys
from rocksdict import Options, Rdict, WriteBatch

options = Options(raw_mode=True)
options.create_if_missing(True)
db = Rdict(sys.argv[1], options)
expiry = db.create_column_family("expiry", Options(raw_mode=True))
expiry[b"by item"] = b"1"
batch = WriteBatch(raw_mode=True)
batch.put(b"by batch", b"1")
expiry.write(batch)
named = WriteBatch(raw_mode=True)
named.put(b"by batch that names it", b"1", db.get_column_family_handle("expiry"))
db.write(named)
seen = list(expiry.keys()), list(db.keys())
print("family: %s; default: %s" % seen)
assert seen == ([b"by batch that names it", b"by item"], [b"by batch"]), "the behaviour has changed"
PYTHON
