#!/usr/bin/env bash
# Versions: polars 2.1.0, duckdb 2.0.1, pyarrow 26.0.1.
#
# The guess: Parquet has no integer of 128 bits, so `write_parquet` refuses a column Int128, or writes a DECIMAL(38,0).
# What happens: it writes 16 bytes, the lowest first, marked as an integer of 128 bits, which is no logical type of Parquet. Polars
# itself reads the number, DuckDB a BLOB, and pyarrow refuses the whole file, also its other columns.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/python"
"$work/python/bin/pip" -q --disable-pip-version-check install polars==2.1.0 duckdb==2.0.1 pyarrow==26.0.1
cd "$work"
"$work/python/bin/python" - <<'PYTHON'
import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

ACCOUNT = 2**100
pl.DataFrame({"name": ["ACME"], "account": [ACCOUNT]}, schema_overrides={"account": pl.Int128}).write_parquet("accounts.parquet")
own = pl.read_parquet("accounts.parquet")["account"][0]
duck = duckdb.sql("select account, typeof(account) from 'accounts.parquet'").fetchall()[0]
try:
    arrow = pq.read_table("accounts.parquet", columns=["name"]).to_pydict()
except pa.ArrowNotImplementedError as error:
    arrow = str(error)
print(f"polars: {own}; DuckDB: {duck}; pyarrow, the other column: {arrow}")
assert own == ACCOUNT and duck == (ACCOUNT.to_bytes(16, "little"), "BLOB"), "the behaviour has changed"
assert arrow == "Integers with more than 64 bits not implemented", "the behaviour has changed"
PYTHON
