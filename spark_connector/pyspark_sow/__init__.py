"""Lets Spark find the data source `sow` by itself: Spark looks for modules named `pyspark_*`."""

from sow_spark import SowDataSource as DefaultSource

__all__ = ["DefaultSource"]
