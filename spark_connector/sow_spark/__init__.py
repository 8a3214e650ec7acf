"""The Spark data source `sow`: topics as tables, read and written, in batches and as streams.

    import sow_spark
    spark.dataSource.register(sow_spark.SowDataSource)
    spark.read.format("sow").option("server", "127.0.0.1:7450").option("topic", "orders").load()

docs/spark.md describes the options and their guarantees.
"""

from sow_spark.source import SowDataSource

__all__ = ["SowDataSource"]
