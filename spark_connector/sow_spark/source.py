"""The data source itself: what Spark calls, handed on to the module that does it."""

from __future__ import annotations

from pyspark.sql.datasource import DataSource


class SowDataSource(DataSource):
    """Format `sow`."""

    @classmethod
    def name(cls) -> str:
        """What `format(...)` takes."""
        return "sow"
