"""docs/scale.md: its programs run, and its tables name every argument and column."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import sow_spark
from sow_spark.state import MARKS
from tests.support.servers.server import ROOT, ServerProcess
from tools import state_jar

PAGE = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.+?)```", PAGE, re.DOTALL)


@pytest.mark.long  # the queries of tests/spark/test_state.py are the default ones
def test_the_programs_of_the_page_run(spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state_jar.main()
    known: dict[str, object] = {}
    with ServerProcess(tmp_path / "server") as server:
        try:
            for program in PROGRAMS:
                told = program.replace("127.0.0.1:7450", server.address).replace('"/data"', f'"{tmp_path}"')
                exec(compile(told, "docs/scale.md", "exec"), known)
            with server.client() as client:
                for topic in ("orders.state", "orders.shares"):
                    records = {record.key: record.data for record in client.query(topic)}
                    assert records == {"1": {"id": 1, "price": 9.75, "at": 2}, "2": {"id": 2, "at": 3}}
        finally:
            known["client"].close()  # type: ignore[attr-defined]  # the page makes it
    said = capsys.readouterr().out
    assert "2 rows" in said
    assert re.search(r"\| +1\| +9\.75\|", said), said


def test_the_tables_name_every_argument_and_column() -> None:
    def first_cells(head: str) -> set[str]:
        below = PAGE.split(f"| {head} |", 1)[1].split("\n\n", 1)[0]
        return set(re.findall(r"`(\w+)`", " ".join(line.split("|")[1] for line in below.splitlines()[2:])))

    assert first_cells("argument") == set(inspect.signature(sow_spark.state_of_the_world).parameters)
    assert first_cells("column") == set(MARKS)
