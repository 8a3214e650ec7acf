"""docs/spark.md: it names everything that the connector knows, and its programs run, one after the other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from sow_client import Client
from sow_spark.errors import HINTS
from sow_spark.options import READ_OPTIONS, WRITE_OPTIONS
from sow_spark.schemas import METADATA_COLUMNS
from tests.support.server import ROOT, ServerProcess

PAGE = (ROOT / "docs" / "spark.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.+?)```", PAGE, re.DOTALL)
FIRST_PAGE = (ROOT / "README.md").read_text(encoding="utf-8")
CONFIG = """
[topics.orders]
key = ["/id"]
expiration = "enabled"
[topics."orders.copy"]
key = ["/id"]
expiration = "enabled"
[topics."orders.counts"]
key = ["/price"]
"""


def table(heading: str) -> set[str]:
    """The names in the first columns of the tables below a heading, up to the next one."""
    below = PAGE.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return {name for cell in re.findall(r"^\| (.+?) \|", below, re.MULTILINE) for name in re.findall(r"`(\w+)`", cell)}


def test_every_option_of_reading_has_its_line() -> None:
    there = table("Options for every use") | table("Reading a snapshot") | table("Following the changes")
    assert set(READ_OPTIONS) - {"path"} <= there
    assert "`path`" in PAGE


def test_every_option_of_writing_has_its_line() -> None:
    spark_s_own = {"path", "queryName", "checkpointLocation"}
    assert set(WRITE_OPTIONS) - spark_s_own <= table("Options for every use") | table("Writing")
    for name in spark_s_own:
        assert f"`{name}`" in PAGE


def test_there_is_no_line_for_an_option_that_is_none() -> None:
    listed = table("Options for every use") | table("Writing") | table("Following the changes")
    assert listed <= {*READ_OPTIONS, *WRITE_OPTIONS}


def test_every_metadata_column_has_its_line() -> None:
    assert set(METADATA_COLUMNS) <= table("Reading a snapshot")


def reasons() -> Iterator[str]:
    """The first argument of each exception that the connector raises."""
    for path in (ROOT / "spark_connector" / "sow_spark").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "SowSourceError" and node.args:
                reason = node.args[0]
                if isinstance(reason, ast.Constant):
                    yield str(reason.value)


def test_every_reason_of_the_connector_has_its_line() -> None:
    found = set(reasons())
    assert {"OPTION_INVALID", "DATA_LOST", "ROWS_DIFFER"} <= found
    assert found | set(HINTS) <= table("When something is wrong")


def test_links_to_itself_and_to_files_lead_somewhere() -> None:
    headings = {
        re.sub(r"[^\w -]", "", one).lower().replace(" ", "-") for one in re.findall(r"^#+ (.+)$", PAGE, re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) <= headings
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", PAGE):
        assert (ROOT / "docs" / link).exists(), link


def test_the_programs_of_the_page_run(spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """given a server with the page's topics / when its programs run / then the topics hold the records that it shows"""
    with ServerProcess(tmp_path / "server", CONFIG) as server:
        known: dict[str, object] = {}
        for program in PROGRAMS:
            told = program.replace("127.0.0.1:7450", server.address).replace('"/data/', f'"{tmp_path}/')
            exec(compile(told, "docs/spark.md", "exec"), known)
        with server.client() as client:
            assert contents(client, "orders") == set(map(str, range(500)))  # of the overwrite
            assert contents(client, "orders.copy") == set(map(str, range(500)))
            assert client.count("orders.counts") == 1000
        log = spark.read.parquet(str(tmp_path / "log")).groupBy("_op").count().collect()
        assert {row["_op"]: row["count"] for row in log} == {"put": 2501, "delete": 500}
    assert "+------+-----+" in capsys.readouterr().out


def test_the_program_of_the_first_page_runs(
    spark: SparkSession, server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    (program,) = re.findall(r"\n## Spark\n.+?```python\n(.+?)```", FIRST_PAGE, re.DOTALL)
    ends = program.replace(".start()", ".trigger(availableNow=True).start()")
    exec(compile(ends.replace("127.0.0.1:7450", server.address), "README.md", "exec"), {})
    assert "|     254.5|" in capsys.readouterr().out  # the average from 9.5 to 499.5; Java prints the stream's count
    with server.client() as client:
        assert client.count("orders") == 1000


def contents(client: Client, topic: str) -> set[str]:
    return {record.key for record in client.query(topic)}
