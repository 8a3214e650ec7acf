"""The Spark session of these programs: that of spark-submit, or one on this machine."""

from __future__ import annotations

import os
import sys

from pyspark.sql import SparkSession


def session(name: str) -> SparkSession:
    """Two tasks at a time, with the Python that runs this, unless spark-submit has other settings.

    The data source needs no registration: Spark finds it where `sow` is installed.
    """
    builder = SparkSession.builder.appName(name).config("spark.sql.session.timeZone", "UTC")
    # Spark's default in Parquet is a form of nanoseconds that Delta Lake and others do not have.
    builder = builder.config("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        builder = builder.master("local[2]").config("spark.ui.enabled", "false")
        builder = builder.config("spark.ui.showConsoleProgress", "false").config("spark.log.level", "ERROR")
    return builder.getOrCreate()
