"""The sinks of a state of the world (docs/scale.md): topics, shares of a topic, and tables have what the state has."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pytest
from deltalake import DeltaTable
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from examples.spark import lake, shares, state_flights, state_lake, state_servers
from examples.spark.backfill import backfill
from examples.spark.load_flights import COLUMNS, KEY
from examples.spark.shares import Shares
from examples.spark.state_flights import run, sums
from sow_client import share_of
from sow_spark.state_queries import read_state
from tests.support.servers.server import DYNAMIC, ROOT, ServerProcess
from tools import state_jar

FLIGHTS: Final = 6_000
TABLE: Final = f"{COLUMNS}, _key STRING, _expire_time TIMESTAMP"
NOW: Final = datetime.now(UTC)


@pytest.fixture(scope="module")
def servers(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    with ExitStack() as stack:
        made = [ServerProcess(tmp_path_factory.mktemp("server"), DYNAMIC) for _ in range(2)]
        yield [stack.enter_context(one).address for one in made]


def test_a_key_has_one_server_in_python_and_in_spark(spark: SparkSession) -> None:
    keys = ["1", "a|b\\|c", "ü", "🛩", "x" * 1_024, " "]
    rows = spark.createDataFrame([(key,) for key in keys], "_key STRING")
    found = rows.selectExpr("_key", "crc32(_key) % 2 AS of_two", "crc32(_key) % 7 AS of_seven").collect()
    assert [(row["of_two"], row["of_seven"]) for row in found] == [(share_of(key, 2), share_of(key, 7)) for key in keys]
    assert share_of("123456789", 1 << 32) == 0xCBF43926, "as the sum is defined"


def test_shares_and_a_table_have_the_last_change_of_each_key(
    spark: SparkSession, servers: list[str], tmp_path: Path
) -> None:
    """given random changes in two batches, the second of which is repeated / when they are written to servers and to a
    table / then each key has its last record and expire time, once, and a key that is removed has none"""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    held: dict[str, tuple[int, datetime | None]] = {}
    batches: list[list[tuple[Any, ...]]] = [[], []]
    for number, rows in enumerate(batches):
        for version in range(40):
            key = draw.choice("abcdeü")
            ends = draw.choice([None, NOW + timedelta(hours=version + 1, microseconds=7)])
            held[key] = (version + 100 * number, ends)
            rows.append(("put", key, *held[key], version + 100 * number))
            if draw.random() < 0.3:
                op = draw.choice(["delete", "expire"])
                rows.append((op, key, *held.pop(key), version + 100 * number))
        for gone in range(10):  # an expiry has the version of its record, and comes after it
            rows += [(op, f"gone{gone}", gone, NOW, gone) for op in ("put", "expire")]
        draw.shuffle(rows)  # as Spark does
    topic, table = "shares.random", str(tmp_path / "table")
    state_lake.create(spark, table, "_key STRING, n LONG, _expire_time TIMESTAMP, _version LONG")
    schema = "_op STRING, _key STRING, n LONG, _expire_time TIMESTAMP, _version LONG"
    spark.sparkContext.setLocalProperty("sql.streaming.queryId", "a query")
    with Shares(servers) as over:
        for client in over.clients:
            client.create_topic(topic, expiration="1s")
        for number in (0, 1, 1):
            changes = spark.createDataFrame(batches[number], schema)
            shares.write(state_flights.last_of_each_key(changes), servers, topic)
            state_lake.merge(changes, number, table)
        assert DeltaTable(table).version() == 2
        kept = lake.frame(spark, table).collect()
        assert {row["_key"]: (row["n"], row["_expire_time"]) for row in kept} == {
            key: (n, ends and ends.astimezone().replace(tzinfo=None)) for key, (n, ends) in held.items()
        }
        assert len(kept) == len(held) == over.count(topic)
        assert {one.key: (one.data, one.expire_time) for one in over.query(topic)} == {
            key: ({"n": n}, ends) for key, (n, ends) in held.items()
        }
        for key, (n, _) in held.items():
            record = over.get(topic, key)
            assert record is not None
            assert record.data == {"n": n}
        union = shares.frame(spark, servers, topic, "_key STRING, n LONG").collect()
        assert {row["_key"]: row["n"] for row in union} == {key: n for key, (n, _) in held.items()}
    spark.sparkContext.setLocalProperty("sql.streaming.queryId", "another query")
    with pytest.raises(LookupError, match="is the table of another checkpoint: begin a new table"):
        state_lake.merge(spark.createDataFrame(batches[0], schema), 0, table)


# ---- flights ----


@pytest.fixture
def engine() -> None:
    if shutil.which("javac") is None and not (ROOT / "spark_connector" / "sow_spark" / "sow-state.jar").is_file():
        pytest.skip("there is no javac to compile the engine with")
    state_jar.main()


def fails_after(call: Callable[..., object], calls: int) -> Callable[..., object]:
    """A function whose call of this number does what it has to do, and fails: a crash between sink and commit."""
    left = calls

    def failing(*arguments: Any) -> object:
        nonlocal left
        left -= 1
        result = call(*arguments)
        if left == 0:
            raise RuntimeError("killed")
        return result

    return failing


@pytest.mark.long
@pytest.mark.usefixtures("engine")
def test_a_topic_has_the_flights_of_the_state(spark: SparkSession, servers: list[str], tmp_path: Path) -> None:
    topic = "flights.state"
    with Shares(servers[:1]) as over:
        over.clients[0].create_topic(topic, key=[f"/{name}" for name in KEY], expiration="1s")
        run(spark, str(tmp_path), {"server": servers[0], "topic": topic}, FLIGHTS)
    kept = sums(read_state(spark, f"{tmp_path}/checkpoint"))
    assert kept == sums(shares.frame(spark, servers[:1], topic, TABLE))
    assert kept[0] > 1_000


@pytest.mark.long
@pytest.mark.usefixtures("engine")
def test_servers_have_the_flights_of_the_state_in_shares(
    spark: SparkSession, servers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """given a crash between the servers and the commit of a batch / when it goes on, and later with a third server /
    then all have the state together, each key where it belongs"""
    topic, folder = state_servers.TOPIC, str(tmp_path)
    with ServerProcess(tmp_path / "third", DYNAMIC) as third, Shares([*servers, third.address]) as over:
        for client in over.clients:
            client.create_topic(topic, key=[f"/{name}" for name in KEY], expiration="enabled")
        monkeypatch.setattr(state_servers, "write", fails_after(shares.write, 3))
        with pytest.raises(StreamingQueryException):
            state_servers.serve(spark, folder, servers, FLIGHTS)
        for some in (servers, [*servers, third.address]):
            state_servers.serve(spark, folder, some)
            kept = sums(read_state(spark, f"{folder}/checkpoint"))
            assert kept == sums(shares.frame(spark, some, topic, TABLE))
            for at, client in enumerate(over.clients[: len(some)]):
                keys = [record.key for record in client.query(topic)]
                assert {share_of(key, len(some)) for key in keys} == {at}


@pytest.mark.long
@pytest.mark.usefixtures("engine")
def test_a_table_has_the_flights_of_the_state_and_gives_them_back(
    spark: SparkSession, servers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """given a crash between the table and the commit of a batch / when it goes on / then the table has the state, each
    batch once, and a topic that is filled from it has the same expire times"""
    table, topic = str(tmp_path / "table"), "flights.back"
    merged: list[int] = []

    def counted(*told: Any) -> None:
        merged.append(1)
        lake.merge_last(*told)

    monkeypatch.setattr(state_lake, "merge_last", counted)
    monkeypatch.setattr(state_lake, "merge", fails_after(state_lake.merge, 3))
    with pytest.raises(StreamingQueryException):
        state_lake.keep(spark, str(tmp_path), table, FLIGHTS)
    assert len(merged) == DeltaTable(table).version() == 3
    state_lake.keep(spark, str(tmp_path), table)
    assert len(merged) == DeltaTable(table).version()
    assert len(merged) >= state_flights.FILES + 1, "with a batch of expiries"
    kept = read_state(spark, f"{tmp_path}/checkpoint")
    assert sums(kept) == sums(lake.frame(spark, table))
    with Shares(servers[:1]) as over:
        over.clients[0].create_topic(topic, key=[f"/{name}" for name in KEY], expiration="1s")
        backfill(spark, servers[0], table, topic)
        assert sums(kept) == sums(shares.frame(spark, servers[:1], topic, TABLE))
        never = [one.key for one in over.query(topic) if one.expire_time is None]
        assert len(never) == kept.where("_expire_time IS NULL").count() > 0
