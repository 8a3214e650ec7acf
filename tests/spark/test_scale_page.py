"""docs/scale.md: its programs run, and its tables name every argument and column."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import sow_spark
from sow_client import Client
from sow_spark.state import MARKS
from tests.support.servers.server import ROOT, ServerProcess
from tools import state_jar

PAGE = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.+?)```", PAGE, re.DOTALL)


@pytest.mark.long  # the queries of tests/spark/test_state.py are the default ones
def test_the_programs_of_the_page_run(spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state_jar.main()
    known: dict[str, Any] = {}
    with ServerProcess(tmp_path / "server") as server, ServerProcess(tmp_path / "second") as second:
        clients: list[Client] = []
        try:
            for program in PROGRAMS:
                told = program.replace("127.0.0.1:7450", server.address).replace("127.0.0.1:7451", second.address)
                exec(compile(told.replace('"/data"', f'"{tmp_path}"'), "docs/scale.md", "exec"), known)
                clients += [*known.get("clients", []), *([known["client"]] if "client" in known else [])]
            with server.client() as one:
                trade = one.get("trades.02", "7")
                assert trade is not None
                assert (trade.data, sum(one.count(f"trades.{number:02}") for number in range(64))) == (
                    {"id": 7, "price": 7.0},
                    100,
                )
            wanted = {"1": {"id": 1, "price": 9.75, "at": 2}, "2": {"id": 2, "at": 3}}
            with server.client() as one, second.client() as other:
                for topic, some in (("orders.state", [one]), ("orders.spread", [one, other]), ("orders.back", [one])):
                    assert {record.key: record.data for each in some for record in each.query(topic)} == wanted
        finally:
            for client in clients:
                client.close()
    said = capsys.readouterr().out
    seven = "{'id': 7, 'price': 3.5}"
    assert said.startswith(f"{seven}\n100 trades\n{seven}\n100 orders\n[49.5, 49.0, 48.5]\n")
    assert re.search(r"\| +2\| +9\.75\|", said), said
    assert "2 rows\n2 orders are back\n" in said
    assert re.search(r"\| +1\| +9\.75\|", said), said


def test_the_tables_name_every_argument_and_column() -> None:
    def first_cells(head: str) -> set[str]:
        below = PAGE.split(f"| {head} |", 1)[1].split("\n\n", 1)[0]
        return set(re.findall(r"`(\w+)`", " ".join(line.split("|")[1] for line in below.splitlines()[2:])))

    assert first_cells("argument") == set(inspect.signature(sow_spark.state_of_the_world).parameters)
    assert first_cells("column") == set(MARKS)
