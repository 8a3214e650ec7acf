"""One Spark session for the tests of a process: starting a JVM takes longer than most of them."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from sow_client import Client, Export
from tests.spark.cell_streams import Stream
from tests.support.servers.forked_commands import PYTHON, ForkedCommands
from tests.support.servers.server import ROOT, ServerProcess, pytest_runtest_makereport

__all__ = ["pytest_runtest_makereport"]

SOURCES = [str(ROOT), *(str(ROOT / name) for name in ("proto", "clients", "spark_connector"))]
IMPORTED = (
    "pyspark.sql.worker.commit_data_source_write",
    "pyspark.sql.worker.create_data_source",
    "pyspark.sql.worker.lookup_data_sources",
    "pyspark.sql.worker.write_into_data_source",
    "pyspark.sql.streaming.python_streaming_source_runner",
    "pyspark.worker",
    "sow_spark.overwriting",
    "sow_spark.reading",
    "sow_spark.schemas",
    "sow_spark.stream_reading",
    "sow_spark.stream_writing",
    "sow_spark.writing",
)
"""What the Python processes import that Spark starts."""


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session on two cores that finds the data source as a cluster does: on the path of its Python workers."""
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory() as folder,
        ForkedCommands(Path(folder), SOURCES, programs=[PYTHON], imported=IMPORTED) as forked,
    ):
        patch.setenv("PYTHONPATH", os.pathsep.join([*SOURCES, os.environ.get("PYTHONPATH", "")]))
        patch.setenv("PYSPARK_PYTHON", str(forked.programs / PYTHON))
        session = (
            SparkSession.builder.master("local[2,4]")  # a task may fail three times
            .appName("sow-tests")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.python.authenticate.socketTimeout", "60s")  # Python workers start slowly on a busy machine
            .config("spark.driver.memory", "1g")
            # Most of the time of these tests is that of a JVM that has just started. The first compiler alone, and a
            # collector without threads, take a third less of it; classes of Spark that are not verified, a tenth.
            .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xverify:none")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.sql.shuffle.partitions", "2")
            .config("spark.sql.codegen.wholeStage", "false")  # a plan runs once, on a few rows: compiling it costs more
            .config("spark.sql.codegen.factoryMode", "NO_CODEGEN")
            .config("spark.sql.session.timeZone", "UTC")
            .config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
            .getOrCreate()
        )
        session.sparkContext.setLogLevel("OFF")
        patch.setenv("PYSPARK_PYTHON", sys.executable)  # for clusters that tests start themselves
        yield session
        session.stop()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server for the tests of a module that leave it as it is."""
    config = """
[server]
dynamic_topics = true
[topics.orders]
key = ["/id"]
expiration = "enabled"
[topics.texts]
message_type = "binary"
"""
    with ServerProcess(tmp_path_factory.mktemp("server"), config) as process:
        yield process


@pytest.fixture
def opened_exports(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The exports that a client in this process opens from here on."""
    opened: list[str] = []
    original = Client.open_export

    def open_export(self: Client, *args: Any, **keywords: Any) -> Export:
        export = original(self, *args, **keywords)
        opened.append(export.id)
        return export

    monkeypatch.setattr(Client, "open_export", open_export)
    return opened


@pytest.fixture
def stopped() -> Iterator[None]:
    """Stops streams at the end: their pins are renewed by threads."""
    yield
    while Stream.readers:
        Stream.readers.pop().stop()
