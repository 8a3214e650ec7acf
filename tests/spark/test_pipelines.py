"""The pipelines of examples/spark: their functions in this session, and in the long run as commands."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from examples.flights import extract
from examples.spark.enrich import enrich
from examples.spark.history import follow, table_at, versions
from examples.spark.load_flights import KEY, load
from examples.spark.snapshot import PIN, snapshot
from sow_client import Client, Record
from tests.support.servers.server import DYNAMIC, ROOT, ServerProcess

ROWS = 1_000
MINUTES = 60


def fields(record: Record) -> dict[str, Any]:
    """The document of a record."""
    assert isinstance(record.data, dict)
    return record.data


@pytest.fixture(scope="module")
def server(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server"), DYNAMIC) as process:
        yield process


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Client]:
    with server.client() as client:
        for topic in ("flights", "flights.enriched"):
            client.create_topic(topic, key=[f"/{name}" for name in KEY], expiration="enabled")
        yield client


@pytest.fixture(scope="module")
def loaded(
    spark: SparkSession, server: ServerProcess, client: Client, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, str]]:
    """The latest flight of each key among the first of the file, as it has been loaded."""
    folder = tmp_path_factory.mktemp("flights")
    whole = extract(folder, "flights.csv")
    part = folder / "part.csv"
    with whole.open(encoding="utf-8") as lines:
        part.write_text("".join(islice(lines, ROWS + 1)), encoding="utf-8")
    assert load(spark, server.address, str(part)) == ROWS
    with part.open(encoding="utf-8", newline="") as file:
        rows = sorted(csv.DictReader(file), key=lambda row: (row["time_hour"], int(row["minute"])))
    return {"|".join(row[name] for name in KEY): row for row in rows}


def test_the_bulk_load_keeps_the_latest_flight_of_each_number_for_its_time(
    client: Client, loaded: dict[str, dict[str, str]]
) -> None:
    found = {record.key: record for record in client.query("flights")}
    assert found.keys() == loaded.keys()
    for key, row in loaded.items():
        record = found[key]
        assert fields(record).get("tailnum", "NA") == row["tailnum"], "a null field is left out"
        assert (fields(record)["month"], fields(record)["day"]) == (int(row["month"]), int(row["day"]))
        assert record.expire_time is not None
        lives = (record.expire_time - record.publish_time).total_seconds()
        assert lives == pytest.approx(3600 + float(row["distance"]), abs=1e-3)


def test_snapshot_and_changes_are_the_table_at_any_later_bookmark(
    spark: SparkSession, server: ServerProcess, client: Client, loaded: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    folder = str(tmp_path)
    snapshot(spark, client, server.address, folder)
    assert client.describe_durable("flights", PIN).name == PIN

    def table(at: int) -> dict[str, tuple[int, float | None]]:
        rows = table_at(versions(spark, folder), at).select("_key", "_version", "dep_delay").collect()
        assert len({row[0] for row in rows}) == len(rows), "one state of a key at a time"
        return {row[0]: (row[1], row[2]) for row in rows}

    def as_served() -> tuple[dict[str, tuple[int, float | None]], int]:
        result = client.query("flights")
        found = {record.key: (record.version, fields(record).get("dep_delay")) for record in result}
        assert result.header is not None, "it was read"
        return found, int(result.header.bookmark.rpartition(".")[2])

    first, taken = as_served()
    keys = sorted(loaded)
    moments = [(taken, first)]
    for delay in (1.5, 2.5):
        for key in keys[:20]:
            record = client.get("flights", key)
            assert record is not None
            client.publish("flights", fields(record) | {"dep_delay": delay}, ttl="1h")
        client.sow_delete("flights", keys=keys[20 + int(delay) : 25])
        moments.append(as_served()[::-1])
        follow(spark, server.address, folder)
    assert len({len(served) for _, served in moments}) > 1, "some were deleted"
    for at, served in moments:
        assert table(at) == served


@pytest.mark.long
def test_the_enrichment_sends_each_change_on_once(
    spark: SparkSession, server: ServerProcess, client: Client, loaded: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    airlines = str(extract(tmp_path, "airlines.csv"))

    def enriched() -> dict[str, tuple[int, str, bool]]:
        return {
            record.key: (record.version, fields(record)["airline"], fields(record)["late"])
            for record in client.query("flights.enriched")
        }

    enrich(spark, server.address, str(tmp_path), airlines)
    before = enriched()
    assert before.keys() == {record.key for record in client.query("flights")}
    assert {airline for _, airline, _ in before.values()} >= {"United Air Lines Inc.", "Delta Air Lines Inc."}

    gone, delayed, *_ = sorted(before)
    record = client.get("flights", delayed)
    assert record is not None
    client.publish("flights", fields(record) | {"dep_delay": 100.0}, ttl="1h")
    client.sow_delete("flights", keys=[gone])
    enrich(spark, server.address, str(tmp_path), airlines)
    after = enriched()

    assert gone not in after
    assert after[delayed][2] is True
    others = before.keys() - {gone, delayed}
    assert {key: after[key] for key in others} == {key: before[key] for key in others}, "nothing was sent again"
    expires = {record.key: record.expire_time for record in client.query("flights")}
    assert {one.key: one.expire_time for one in client.query("flights.enriched")} == expires


@pytest.mark.long
def test_each_is_one_command(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, DYNAMIC) as server:
        told = [
            _run("load_flights", server.address),
            _run("snapshot", server.address, str(tmp_path / "table")),
            _run("history", server.address, str(tmp_path / "table")),
            _run("enrich", server.address, str(tmp_path / "enriched")),
        ]
    with ServerProcess(tmp_path / "lake", DYNAMIC) as server:
        lake = str(tmp_path / "flights")
        for name, argument, said in (
            ("load_flights", "", "336,776 rows loaded"),
            ("capture", lake, " flights in version 1 of "),
            ("compare", lake, "no difference; 0 keys have changed"),
            ("backfill", lake, " flights in flights.restored"),
            ("enrich_table", str(tmp_path / "planes"), " of them with a plane of Airbus"),
            ("dimension", str(tmp_path / "versions"), " open, 0 ended by put"),
            ("load_departures", "", "336,776 rows loaded; the topic holds 336,776"),
            ("days", str(tmp_path / "days"), "336,776 departures on 365 days"),
        ):
            assert said in _run(name, server.address, *filter(None, [argument]))
    with ServerProcess(tmp_path / "first", DYNAMIC) as first, ServerProcess(tmp_path / "second", DYNAMIC) as second:
        topic, servers, table = (str(tmp_path / name) for name in ("state-topic", "state-servers", "state-table"))
        both = (first.address, second.address)
        fed = _run("state_topic", first.address, topic)
        spread = _run("state_servers", servers, *both)
        read = _run("shares", "UA|15|EWR", *both)
        _run("state_lake", str(tmp_path / "state-lake"), table)
        back = _run("backfill", second.address, table)
    kept = re.search(r": ([\d,]+) flights in the state, \1 in flights.state", fed)
    assert kept is not None, fed
    shares = re.search(rf": {kept[1]} flights in the state, ([\d,]+) \+ ([\d,]+) on the servers", spread)
    assert shares is not None, spread
    assert sum(int(share.replace(",", "")) for share in shares.groups()) == int(kept[1].replace(",", ""))
    assert f"{kept[1]} flights, " in read
    assert "the longest one: HA|51|JFK" in read
    assert f"{kept[1]} flights in flights.restored" in back
    assert told[0].startswith("336,776 rows loaded; the topic holds ")
    assert "flights of 16 carriers, as of " in told[1]
    assert " flights in the snapshot, " in told[2]
    assert " of them late" in told[3]


def _run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", f"examples.spark.{name}", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONUTF8": "1"},
        check=False,
        capture_output=True,
        encoding="utf-8",
        timeout=10 * MINUTES,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
