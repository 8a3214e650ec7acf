"""The command line and the Spark session of these programs: that of spark-submit, or one on this machine."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable
from typing import Final

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from sow_client import SowError
from sow_spark.errors import SowSourceError

_TOLD: Final = re.compile(r"^(?:\S.*: )?[\w.]*Error: (.+)$", re.MULTILINE)


def session(name: str) -> SparkSession:
    """Two tasks at a time, with the Python that runs this, unless spark-submit has other settings.

    The data source needs no registration: Spark finds it where `sow` is installed. Standard error tells how far it is.
    """
    tell(f"{name}: starting Spark")
    builder = SparkSession.builder.appName(name).config("spark.sql.session.timeZone", "UTC")
    # Spark's default in Parquet is a form of nanoseconds that Delta Lake and others do not have.
    builder = builder.config("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        builder = builder.master("local[2]").config("spark.ui.enabled", "false")
        builder = builder.config("spark.ui.showConsoleProgress", "false").config("spark.log.level", "ERROR")
    return builder.getOrCreate()


def tell(text: str) -> None:
    """Tells people how far a program is."""
    print(text, file=sys.stderr, flush=True)


class Batches:
    """Tells each micro-batch of a query that had rows, once."""

    def __init__(self, query: StreamingQuery) -> None:
        self._query = query
        self._told = -1

    def tell(self) -> None:
        """Tells those that have ended since."""
        for progress in self._query.recentProgress:
            if progress.batchId > self._told and progress.numInputRows:
                self._told = progress.batchId
                tell(f"batch {progress.batchId}: {progress.numInputRows:,} rows")


def finished(query: StreamingQuery) -> None:
    """Awaits the end of a query, and tells its micro-batches."""
    batches = Batches(query)
    while not query.awaitTermination(1):
        batches.tell()
    batches.tell()


def command(main: Callable[..., int | None], *errors: type[Exception]) -> None:
    """Runs a program with the words of its command line. What is wrong is told in a sentence, also these errors."""
    words = sys.argv[1:]
    try:
        inspect.signature(main).bind(*words)
    except TypeError:
        usage = next(line for line in main.__globals__["__doc__"].splitlines() if " -m examples." in line)
        sys.exit(f"usage: {usage.strip()}")
    told: tuple[type[Exception], ...] = (SowError, SowSourceError, OSError, *errors)
    try:
        sys.exit(main(*words))
    except told as error:
        sys.exit(str(error))
    except PySparkException as error:
        sys.exit(cause(str(error)))


def cause(text: str) -> str:
    """The sentence of an error of a task or a sink, in whose text Spark has the traces of Python and Java."""
    return (_TOLD.findall(text) or text.splitlines())[-1 if _TOLD.search(text) else 0]
