"""Spark's daemon of Python workers, with the modules of the data source imported before it forks workers.

Spark starts a Python process for each plan, commit and batch of a query. Each of them would import the client, gRPC and
Arrow anew, which takes a second of processor time, some hundred times in a run of the tests. Imports alone start no
thread and open no connection, so they survive the fork.
"""

from __future__ import annotations

import importlib
from typing import Final

from pyspark import daemon

MODULES: Final = (
    "sow_spark.overwriting",
    "sow_spark.reading",
    "sow_spark.schemas",
    "sow_spark.stream_reading",
    "sow_spark.stream_writing",
    "sow_spark.writing",
)

if __name__ == "__main__":
    for module in MODULES:
        importlib.import_module(module)
    daemon.manager()
