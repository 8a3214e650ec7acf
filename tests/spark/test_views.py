"""A view is a topic to Spark: as a DataFrame, and as a stream of changes (rule V1)."""

from __future__ import annotations

from pyspark.sql import SparkSession
from pyspark.sql.types import LongType, StringType, StructType

from sow_spark.read_limits import ReadAllAvailable
from tests.spark.test_reading import read
from tests.spark.test_stream_reading import reader_of, rows_between
from tests.support.servers.server import ServerProcess, until

CHANGES = StructType().add("qty", LongType()).add("_key", StringType()).add("_op", StringType())


def test_a_view_is_read_as_a_frame_and_as_a_stream(spark: SparkSession, server: ServerProcess) -> None:
    with server.client() as client:
        client.create_topic("spark.deals", key=["/id"])
        client.publish_many("spark.deals", [{"id": n, "account": "ABC"[n % 3], "qty": n} for n in range(9)])
        client.create_view("spark.sums", source="spark.deals", group_by="/account", select="SUM(/qty) AS qty")
        until(lambda: client.describe_topic("spark.sums").view_status.complete, 10, "the view")  # type: ignore[union-attr]  # it is a view
        frame = read(spark, server, "account STRING, qty LONG, _key STRING", topic="spark.sums", partitions="2")
        assert [tuple(row) for row in frame.orderBy("_key").collect()] == [
            ("A", 9, "A"),
            ("B", 12, "B"),
            ("C", 15, "C"),
        ]
        reader = reader_of(server, "spark.sums", CHANGES)
        begin = reader.initialOffset()
        client.publish_many("spark.deals", [{"id": 0, "account": "B", "qty": 1}, {"id": 3, "account": "B", "qty": 2}])
        client.sow_delete("spark.deals", keys=["6"])
        end = reader.latestOffset(begin, ReadAllAvailable())
        changes = rows_between(reader, begin, end)
        reader.stop()
    last = {key: (qty, op) for qty, key, op in changes}
    assert (last["A"][1], last["B"]) == ("delete", (15, "put"))
