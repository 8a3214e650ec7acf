"""docs/lake.md: its programs run, one after the other, and its tables name what there is."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import sow_spark
from tests.support.servers.server import ROOT, ServerProcess

PAGE = (ROOT / "docs" / "lake.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.+?)```", PAGE, re.DOTALL)


def test_the_programs_of_the_page_run(spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """given a server / when the programs of the page run / then the tables and topics hold what it says"""
    zone = spark.conf.get("spark.sql.session.timeZone")
    with ServerProcess(tmp_path / "server") as server:
        known: dict[str, object] = {}
        try:
            for program in PROGRAMS:
                told = program.replace("127.0.0.1:7450", server.address).replace('"/data/', f'"{tmp_path}/')
                exec(compile(told, "docs/lake.md", "exec"), known)
            with server.client() as client:
                restored = {record.key: record.data for record in client.query("orders.restored")}
        finally:
            known["client"].close()  # type: ignore[attr-defined]  # the page makes it
            spark.conf.set("spark.sql.session.timeZone", zone or "UTC")
    assert restored.keys() == {str(at) for at in range(100)} - {"2", "3"}
    assert restored["1"] == {"id": 1, "day": "2024-01-02", "price": 99.0}
    said = capsys.readouterr().out
    assert "98 rows in version 2" in said
    assert "98 orders" in said
    assert "{} 1 2" in said  # no difference, and one key that has changed


def test_the_tables_name_every_argument_and_column() -> None:
    def first_cells(head: str) -> set[str]:
        below = PAGE.split(f"| {head} |", 1)[1].split("\n\n", 1)[0]
        return set(re.findall(r"`(\w+)`", " ".join(line.split("|")[1] for line in below.splitlines()[2:])))

    assert first_cells("argument of `diff`") == set(inspect.signature(sow_spark.diff).parameters)
    assert first_cells("column of `rows`") == {"difference", "columns", "lake", "topic"}
    for field in fields(sow_spark.Differences):
        assert f"`{field.name}`" in PAGE or field.name in ("connecting", "export")


def test_every_pipeline_has_its_line() -> None:
    pages = [PAGE, *((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("spark.md", "scale.md"))]
    named = set(re.findall(r"examples\.spark\.(\w+)", "".join(pages)))
    there = {path.stem for path in (ROOT / "examples" / "spark").glob("[a-z]*.py")}
    assert named == there - {"lake", "session", "state_flights"}
