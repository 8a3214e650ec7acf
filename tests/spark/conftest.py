"""One Spark session for the tests of a process: starting a JVM takes longer than most of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql import SparkSession

from sow_client import Client, Export
from tests.support.servers.server import ROOT, ServerProcess, pytest_runtest_makereport

__all__ = ["pytest_runtest_makereport"]

SOURCES = [ROOT, ROOT / "proto", ROOT / "clients", ROOT / "spark_connector"]


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session on two cores that finds the data source as a cluster does: on the path of its Python workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([*map(str, SOURCES), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        session = (
            SparkSession.builder.master("local[2,4]")  # a task may fail three times
            .appName("sow-tests")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.python.authenticate.socketTimeout", "60s")  # Python workers start slowly on a busy machine
            .config("spark.python.daemon.module", "tests.spark.preloaded_daemon")
            .config("spark.driver.memory", "1g")
            # Most of the time of these tests is that of a JVM that has just started. The first compiler alone, and a
            # collector without threads, take a third less of it.
            .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.sql.shuffle.partitions", "2")
            .config("spark.sql.session.timeZone", "UTC")
            .config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
            .getOrCreate()
        )
        session.sparkContext.setLogLevel("OFF")
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
