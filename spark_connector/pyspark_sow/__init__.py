"""By this package Spark finds the data source `sow` by itself: it looks for modules named `pyspark_*`."""

from sow_spark import SowDataSource as DefaultSource

__all__ = ["DefaultSource"]
