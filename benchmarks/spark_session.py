"""A local Spark session for measurements, its Python workers, and files with the records of the server."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Final

from pyspark.sql import SparkSession
from pyspark.sql.types import DoubleType, LongType, StringType, StructField, StructType

from benchmarks.documents import documents

SAMPLE_SECONDS: Final = 0.1
FILES: Final = 4
CHUNK: Final = 50_000
SCHEMA: Final = StructType(
    [
        StructField("id", LongType()),
        StructField("symbol", StringType()),
        StructField("side", StringType()),
        StructField("price", DoubleType()),
        StructField("quantity", LongType()),
        StructField("account", StringType()),
        StructField("revision", LongType()),
        StructField("text", StringType()),
    ]
)
"""The schema of `benchmarks.documents`."""


@contextmanager
def spark_session(
    directory: Path, master: str = "local[2]", settings: Mapping[str, str] = MappingProxyType({})
) -> Iterator[SparkSession]:
    """Two tasks at a time, as the targets say. Make it before a client, because Java is started by a fork."""
    from sow_spark import SowDataSource

    # Workers are separate processes, which must find the same modules as this one.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, map(str, _import_path())))
    builder = SparkSession.builder
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = (
        builder.master(master)
        .appName("sow-bench")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", "2g")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.warehouse.dir", str(directory / "warehouse"))
        .config("spark.local.dir", str(directory / "local"))
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    try:
        spark.dataSource.register(SowDataSource)
        yield spark
    finally:
        spark.stop()


def _import_path() -> Sequence[str]:
    import sys

    return [entry or os.getcwd() for entry in sys.path]


def write_lines(directory: Path, records: int) -> str:
    """Writes the documents 0 to `records` as NDJSON files, and returns their directory."""
    directory.mkdir(parents=True)
    share = -(-records // FILES)
    for number in range(FILES):
        with (directory / f"part-{number}.json").open("wb") as file:
            for first in range(number * share, min((number + 1) * share, records), CHUNK):
                last = min(first + CHUNK, (number + 1) * share, records)
                file.writelines(document + b"\n" for document in documents(range(first, last)))
    return str(directory)


class WorkerMemory:
    """The greatest resident set of a Python worker of Spark while it is watched."""

    def __init__(self) -> None:
        self.mebibytes = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="worker-memory", daemon=True)

    def __enter__(self) -> WorkerMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            for pid in _descendants(os.getpid()):
                self.mebibytes = max(self.mebibytes, _worker_mebibytes(pid))


def _descendants(of: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found: list[int] = []
    new = [of]
    while new:
        new = [child for parent in new for child in children.get(parent, ())]
        found += new
    return found


def executor_mebibytes() -> float:
    """The greatest resident set so far of an executor of a `local-cluster`, which is a process of its own."""
    found = [pid for pid in _descendants(os.getpid()) if b"CoarseGrainedExecutorBackend" in _command(pid)]
    assert found, "there is one"
    return max(map(_peak_mebibytes, found))


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""  # it has ended


def _worker_mebibytes(pid: int) -> float:
    """Its greatest resident set so far; 0 for a process that is not a Python worker of Spark."""
    try:
        if b"pyspark" not in _command(pid) or b"java" in Path(f"/proc/{pid}/comm").read_bytes():
            return 0.0
    except OSError:
        return 0.0  # it has ended
    return _peak_mebibytes(pid)


def _peak_mebibytes(pid: int) -> float:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass  # it has ended
    return 0.0
