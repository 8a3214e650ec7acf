"""A family of topics over cells (rule C24, docs/scale.md): one large topic in shares of its keys."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from examples import family
from examples.flights import read_flights
from examples.spark import family_frame
from sow_client import Client
from tests.support.servers.cells import TwoCells


@pytest.fixture(scope="module")
def odd_in_b(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoCells]:
    """Two cells, of which b has the odd topics of each family."""
    with TwoCells(tmp_path_factory.mktemp("family")) as made:
        made.place((r".*\.\d[13579]", "b"))
        yield made


@pytest.mark.slow
def test_a_program_uses_a_family_over_cells(odd_in_b: TwoCells, capsys: pytest.CaptureFixture[str]) -> None:
    """given real flights in 64 topics of two cells / when they are published, looked up and followed / then each flight
    number is in the topic of its key"""
    family.main(odd_in_b.home, 1_500)
    told = capsys.readouterr().out.splitlines()
    assert told[:2] == ["a has 32 topics of the family", "b has 32 topics of the family"]
    numbers = {flight.key for flight in read_flights(1_500)}
    assert f"the last departure of each of {len(numbers):,} numbers is there" in told[2]
    with Client(odd_in_b.home) as client:
        flights = family.Family(client, "flights")
        assert told[3] == f"{flights.of('UA|1545|EWR')} has UA|1545|EWR"
        assert told[4].startswith(f"{len(numbers):,} flights are followed")
        for topic in flights.topics:
            keys = {record.key for record in client.query(topic)}
            assert keys == {key for key in numbers if flights.of(key) == topic}


def test_a_family_is_followed_where_a_cell_has_none_of_it(odd_in_b: TwoCells) -> None:
    """Story: whoever had placed no topic of the family got PATTERN_MATCHES_NOTHING of the empty cell."""
    with Client(odd_in_b.home) as client:
        orders = family.Family(client, "all_in_a", 2)
        for topic in orders.topics:
            client.create_topic(topic, key=["/id"])
            client.publish(topic, {"id": topic})
        live = family.Live(orders)
        with client.sow_and_subscribe(topic_pattern=orders.pattern, oof=True) as changes:
            for change in changes:
                live.apply(change)
                if change.op == "snapshot_end":
                    break
        assert len(live) == 2
        assert all(view.complete for view in live.views.values())


@pytest.mark.long
def test_spark_reads_and_writes_a_family_over_cells(
    spark: SparkSession, odd_in_b: TwoCells, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """given the flights of a family / when Spark reads all topics as one DataFrame, and marks some / then each mark is
    at its flight"""
    family.main(odd_in_b.home, 1_500)
    monkeypatch.setattr(family_frame, "session", lambda _: spark)
    family_frame.main(odd_in_b.home)
    numbers = {flight.key for flight in read_flights(1_500)}
    assert f"{len(numbers):,} flights in 64 topics" in capsys.readouterr().out
    with Client(odd_in_b.home) as client:
        flights = family.Family(client, "flights")
        assert flights.count() == len(numbers)
        assert flights.count("/late = true") == flights.count("/dep_delay > 60") > 10
