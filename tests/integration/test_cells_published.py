"""One publisher of many topics over two cells (rule C22), with real servers."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from sow_client import Ack, PublishFailed, Refusal, Unavailable
from tests.support.servers.cells import Calls, TwoCells, calls
from tests.support.simulation.clients import Connect, connect

__all__ = ["calls", "connect"]  # fixtures
pytestmark = pytest.mark.one_client


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoCells]:
    with TwoCells(tmp_path_factory.mktemp("cells")) as made:
        yield made


def test_many_topics_share_a_stream_in_each_cell(connect: Connect, cells: TwoCells, calls: Calls) -> None:
    topics = [cells.topic(cell) for cell in "aab" * 4]
    acks: list[tuple[str, int]] = []

    def settled(topic: str, ack: Ack) -> None:
        acks.append((topic, ack.records))

    with connect(cells.home) as client:
        for topic in topics:
            client.create_topic(topic)
        calls.clear()
        with client.topics_publisher(batch_records=3, on_ack=settled) as publisher:
            for number in range(10):
                for topic in topics:
                    publisher.publish(topic, {"n": number}, key=str(number))
            publisher.remove(topics[0], "0")
            publisher.flush()
            assert (publisher.acknowledged, publisher.refused, publisher.unacknowledged) == (121, 0, 0)
        streams = [address for address, method in calls if method == "PublishStream"]
        assert len(set(streams)) == 2
        assert len(streams) <= 3, "one in each cell, and another where the server was asked about removals"
    for topic in topics:
        assert sum(records for name, records in acks if name == topic) == 10 + (topic == topics[0])
        first = int(topic == topics[0])
        assert cells.keys(topic[0], topic) == [str(number) for number in range(first, 10)]


def test_the_records_of_a_topic_that_moves_go_along_in_their_order(connect: Connect, cells: TwoCells) -> None:
    """And back, while other topics go on. The topics are new to the client, and begin at home."""
    moving, here, there = cells.topic("a"), cells.topic("a"), cells.topic("b")
    with connect(cells.home) as client:
        with client.topics_publisher(batch_records=3) as publisher:

            def publish(step: int) -> None:
                for number in range(20):
                    for topic in (moving, here, there):
                        publisher.publish(topic, b"{}", key=f"{step}-{number:02}")
                        publisher.publish(topic, b'{"n":%d}' % (100 * step + number), key="last")

            publish(1)
            publisher.flush()
            cells.place((moving, "b"))
            publish(2)
            publisher.flush()
            publish(3)
            cells.place()
            publish(4)
        assert publisher.refused == 0
        assert publisher.acknowledged == 480
        last = [client.get(topic, "last") for topic in (moving, here, there)]
        assert [record and record.data for record in last] == [{"n": 419}] * 3
    found = {step: {key for key in cells.keys("a", moving) if key[0] == step} for step in "14"}
    assert [len(keys) for keys in found.values()] == [20, 20]
    keys = {topic: cells.keys(topic[0], topic) for topic in (here, there)}
    assert {len(of) for of in keys.values()} == {81}
    cells.place((moving, "b"))
    both = [*found["1"], *(key for key in cells.keys("b", moving)), *found["4"]]
    assert {f"2-{number:02}" for number in range(20)} <= set(both)
    cells.place()
    assert len({*both, *cells.keys("a", moving)}) == 81


def test_a_publisher_waits_for_the_topic_about_which_the_cells_disagree(connect: Connect, cells: TwoCells) -> None:
    topic, here, there = cells.topic("a"), cells.topic("a"), cells.topic("b")
    settled: Counter[str] = Counter()

    def count(of: str, ack: Ack) -> None:
        settled[of] += ack.records

    with connect(cells.home) as client:
        cells.place((topic, "b"), at="a")  # b does not know it yet
        with client.topics_publisher(batch_records=2, on_ack=count) as publisher:
            for number in range(6):
                for name in (topic, here, there):
                    publisher.publish(name, b"{}", key=str(number))
            give_up = time.monotonic() + 20
            while (settled[here], settled[there]) != (6, 6) and time.monotonic() < give_up:
                threading.Event().wait(0.01)
            assert settled == {here: 6, there: 6}
            cells.place((topic, "b"))
        assert (publisher.acknowledged, publisher.refused) == (18, 0)
    assert cells.keys("b", topic) == [str(number) for number in range(6)]
    cells.place()


def test_refusals_are_told_by_topic(connect: Connect, cells: TwoCells) -> None:
    keyed, plain = cells.topic("b"), cells.topic("a")
    with connect(cells.home) as client:
        client.create_topic(keyed, key=["/id"])
        publisher = client.topics_publisher()
        publisher.publish(keyed, {"id": 1})
        publisher.publish(plain, {"n": 1}, key="1")
        publisher.publish(keyed, {"n": 2})
        with pytest.raises(PublishFailed, match=f"^{keyed}: 1 record was refused; the first is number 1: ") as failed:
            publisher.close()
        assert list(failed.value.topics) == [keyed]
        refusals: list[tuple[str, int]] = []

        def refused(topic: str, refusal: Refusal) -> None:
            refusals.append((topic, refusal.index))

        with client.topics_publisher(on_refusal=refused) as publisher:
            publisher.publish(keyed, {"n": 1})
        assert refusals == [(keyed, 0)]
    assert cells.keys("b", keyed) == ["1"]
    assert cells.keys("a", plain) == ["1"]


def test_a_cell_that_is_down_stops_its_own_topics_alone(connect: Connect, cells: TwoCells) -> None:
    here, there, later = cells.topic("a"), cells.topic("b"), cells.topic("a")
    with connect(cells.home, connect_timeout=0.3) as client:
        publisher = client.topics_publisher(batch_records=2, retry_for=0.5)
        for topic in (here, there):
            publisher.publish(topic, b"{}", key="0")
        publisher.flush()
        cells.servers["b"].kill9()
        try:
            for number in range(1, 4):
                for topic in (there, here):
                    publisher.publish(topic, b"{}", key=str(number))
            with pytest.raises(Unavailable, match=f"^{there}: the cell b: ") as down:
                publisher.flush()
            assert (down.value.details["cell"], down.value.details["topic"]) == ("b", there)
            assert cells.keys("a", here) == ["0", "1", "2", "3"], "it has waited for the other cell"
            publisher.publish(later, b"{}", key="1")
            publisher.publish(here, b"{}", key="4")
            with pytest.raises(Unavailable, match="the cell b"):
                publisher.publish(there, b"{}", key="4")
            with pytest.raises(Unavailable, match="the cell b"):
                publisher.close()
            assert cells.keys("a", later) == ["1"]
            assert cells.keys("a", here)[-1] == "4"
        finally:
            cells.servers["b"].start()
        with client.topics_publisher() as anew:
            anew.publish(there, b"{}", key="9")
    assert cells.keys("b", there)[-1] == "9"


def test_a_cell_that_comes_back_gets_each_record_once(connect: Connect, cells: TwoCells) -> None:
    here, there = cells.topic("a"), cells.topic("b")
    with connect(cells.home) as client:
        with client.topics_publisher(batch_records=2) as publisher:
            for number in range(4):
                publisher.publish(there, b"{}", key=str(number))
            publisher.flush()
            cells.servers["b"].kill9()
            for number in range(4, 8):
                publisher.publish(there, b"{}", key=str(number))
                publisher.publish(here, b"{}", key=str(number))
            cells.servers["b"].start()
        assert publisher.acknowledged == 12
    assert cells.keys("b", there) == [str(number) for number in range(8)]
    assert cells.keys("a", here) == ["4", "5", "6", "7"]


def test_an_end_of_the_publisher_is_told(connect: Connect, cells: TwoCells) -> None:
    topic = cells.topic("a")
    with connect(cells.home) as client:
        publisher = client.topics_publisher()
        publisher.publish(topic, b"{}", key="1")
        publisher.close()
        publisher.close()
        assert publisher.acknowledged == 1
        with pytest.raises(Exception, match="closed"):
            publisher.publish(topic, b"{}", key="2")
        with pytest.raises(Exception, match="closed"):
            publisher.publish(cells.topic("a"), b"{}", key="2")
