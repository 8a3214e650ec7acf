"""Spark jobs see what their identity may see (rules A4, A5)."""

from __future__ import annotations

import json
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql.types import LongType, StringType, StructType

from sow_client import Client
from sow_spark.option_parsing import parse_reading
from sow_spark.read_limits import ReadAllAvailable
from sow_spark.stream_reading import ChangesReader
from tests.support.oracles.access import grant, write_access
from tests.support.servers.server import ServerProcess, free_port

RESTRICTION = 'rows = "/region = \'eu\' AND /price > 2"\nhide = ["/iban"]'


def two_listeners() -> tuple[int, int, str]:
    """A port that asks for no credential, one that asks for a token, and the configuration of a server with both."""
    plain, guarded = free_port(), free_port()
    config = (
        "[access]\nfile = 'auth.toml'\naudit = 'audit.jsonl'\n"
        f"[[server.listeners]]\nlisten = '127.0.0.1:{plain}'\nauth = 'none'\n"
        f"[[server.listeners]]\nlisten = '127.0.0.1:{guarded}'\nauth = 'token'\n"
    )
    return plain, guarded, config


def test_a_snapshot_has_the_permitted_rows_without_hidden_fields(spark: SparkSession, tmp_path: Path) -> None:
    """As root sees them that filters by hand. The job calls a listener that asks for no credential."""
    write_access(
        tmp_path,
        '[[identities]]\nname = "anonymous"\nroles = ["job"]\n' + grant("job", "orders", "read", RESTRICTION),
    )
    plain, guarded, config = two_listeners()
    with ServerProcess(tmp_path, config, port=plain), Client(f"127.0.0.1:{guarded}", token="root") as root:
        root.create_topic("orders", key=["/id"])
        with root.publisher("orders") as publisher:
            for number in range(300):
                region = "eu" if number % 7 == 0 else "us"
                publisher.publish(
                    # The note makes it worth while for the server to leave fields out.
                    {
                        "id": number,
                        "region": region,
                        "price": number % 5,
                        "iban": f"secret {number}",
                        "note": "x" * 400,
                    }
                )
        by_hand = [json.loads(record.payload) for record in root.query("orders", "/region = 'eu' AND /price > 2")]
        frame = (
            spark.read.format("sow")
            .options(server=f"127.0.0.1:{plain}", partitions="3")
            .schema("id LONG, region STRING, price LONG, iban STRING")
            .load("orders")
        )
        assert frame.rdd.getNumPartitions() == 3
        found = sorted(tuple(row) for row in frame.collect())
        assert found == sorted((row["id"], row["region"], row["price"], None) for row in by_hand)
        assert len(found) > 10


def test_a_record_that_leaves_the_permitted_rows_is_a_delete_without_fields(tmp_path: Path) -> None:
    """given a stream of some rows / when a record leaves them, another one comes, and one is deleted / then the first
    comes as a delete with its key alone. It has no document, so the stream failed with ROW_MALFORMED, in every run."""
    write_access(
        tmp_path,
        '[[identities]]\nname = "anonymous"\nroles = ["job"]\n'
        + grant("job", "orders", "read", RESTRICTION)
        + grant("job", "orders", "consume", RESTRICTION),
    )
    plain, guarded, config = two_listeners()
    with ServerProcess(tmp_path, config, port=plain), Client(f"127.0.0.1:{guarded}", token="root") as root:
        root.create_topic("orders", key=["/id"])
        for number, region in enumerate(["eu", "us", "eu"]):
            root.publish("orders", {"id": number, "region": region, "price": 3, "iban": "secret"})
        schema = StructType().add("_key", StringType()).add("_op", StringType()).add("price", LongType())
        options = {"server": f"127.0.0.1:{plain}", "topic": "orders"}
        reader = ChangesReader(parse_reading(options), schema.add("iban", StringType()))
        start = reader.initialOffset()
        root.publish("orders", {"id": 0, "region": "us", "price": 4, "iban": "secret"})
        root.publish("orders", {"id": 1, "region": "eu", "price": 5, "iban": "secret"})
        root.sow_delete("orders", keys=["2"])
        end = reader.latestOffset(start, ReadAllAvailable())
        batches = [batch for part in reader.partitions(start, end) for batch in reader.read(part)]
        assert [tuple(row.values()) for batch in batches for row in batch.to_pylist()] == [
            ("0", "delete", None, None),
            ("1", "put", 5, None),
            ("2", "delete", 3, None),
        ]
        reader.stop()
