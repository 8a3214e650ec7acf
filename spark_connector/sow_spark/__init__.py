"""The Spark data source `sow`: topics as tables, read and written, in batches and as streams.

    import sow_spark
    spark.dataSource.register(sow_spark.SowDataSource)
    spark.read.format("sow").option("server", "127.0.0.1:7450").option("topic", "orders").load()

`sow_spark.diff` compares a table with a topic. docs/spark.md describes the options and their guarantees, docs/lake.md
the comparison.
"""

from typing import TYPE_CHECKING

from sow_spark.source import SowDataSource

if TYPE_CHECKING:
    from sow_spark.differences import Differences, diff

__all__ = ["Differences", "SowDataSource", "diff"]


def __getattr__(name: str) -> object:
    """Imports the comparison when it is used: every process that Spark starts for a plan pays for its imports."""
    if name in ("Differences", "diff"):
        from sow_spark import differences

        return getattr(differences, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
