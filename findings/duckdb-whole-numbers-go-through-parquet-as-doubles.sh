#!/usr/bin/env bash
# Versions: duckdb 2.0.1, pyarrow 26.0.1.
#
# The guess: HUGEINT, which `sum()` of a BIGINT column is, goes into Parquet as DECIMAL(38,0), as it goes into Arrow; and a column
# DECIMAL(50,2) that DuckDB has no type for is refused.
# What happens: both are DOUBLE. A sum of 9007199254740993 cents is written as …992.0, and a DECIMAL(50,2) is read back as a double
# of 16 digits, without a warning. A cast to DECIMAL(38,0) before the write keeps all digits.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/python"
"$work/python/bin/pip" -q --disable-pip-version-check install duckdb==2.0.1 pyarrow==26.0.1
cd "$work"
"$work/python/bin/python" - <<'PYTHON'
from decimal import Decimal

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

CENTS = 9007199254740993
total = f"select sum(cents) as total from (values ({CENTS}::bigint), (0::bigint)) as fills(cents)"
kind = duckdb.sql(f"select typeof(total) from ({total})").fetchall()[0][0]
arrow = duckdb.sql(total).to_arrow_table()["total"]
duckdb.sql(f"copy ({total}) to 'sum.parquet'")
duckdb.sql(f"copy (select total::decimal(38,0) as total from ({total})) to 'cast.parquet'")
written, cast = (pq.read_table(name)["total"] for name in ("sum.parquet", "cast.parquet"))
print(f"{CENTS} is {kind}; Arrow: {arrow.type} {arrow[0]}; Parquet: {written.type} {written[0]}; with a cast: {cast[0]}")
assert (kind, str(arrow.type), arrow[0].as_py()) == ("HUGEINT", "decimal128(38, 0)", CENTS), "the behaviour has changed"
assert (written.type, written[0].as_py(), cast[0].as_py()) == (pa.float64(), float(CENTS), CENTS), "the behaviour has changed"

amount = Decimal("12345678901234567890.12")
pq.write_table(pa.table({"amount": pa.array([amount], pa.decimal256(50, 2))}), "amounts.parquet")
read = duckdb.sql("select amount, typeof(amount) from 'amounts.parquet'").fetchall()[0]
print(f"DECIMAL(50,2) {amount} is read as {read[1]} {read[0]}")
assert read == (float(amount), "DOUBLE"), "the behaviour has changed"
PYTHON
