"""What a running server tells of itself: latencies, its log, its disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from itertools import takewhile

import pytest

from sow_client import Client, Figures, LatencyFigures
from tests.support.servers.server import ServerProcess, reason_of, until


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with ServerProcess(tmp_path_factory.mktemp("told")) as server, server.client() as made:
        yield made


def test_figures_of_the_past_come_first(client: Client) -> None:
    """X11: the server has taken them, and nobody has watched."""
    topic = "sampled"
    client.create_topic(topic, key=["/id"])
    client.publish_many(topic, [{"id": number} for number in range(10)])

    def past() -> list[Figures]:
        with closing(client.watch_figures("1h", history="1h")) as watching:
            return list(takewhile(lambda one: one.elapsed, watching))

    until(lambda: any(one.topic == topic for figures in past() for one in figures.topics), 30, "a sample")
    found = past()
    assert [one.as_of for one in found] == sorted(one.as_of for one in found)
    changed = [(one, of) for one in found for of in one.topics if of.topic == topic]
    assert round(sum(of.changes_per_second * one.elapsed.total_seconds() for one, of in changed)) == 10
    assert reason_of(lambda: next(client.watch_figures(history="2h"))) == "INVALID_ARGUMENT"


def test_latencies_of_commits_and_calls_are_among_the_figures(client: Client) -> None:
    client.create_topic("orders", key=["/id"])
    with closing(client.watch_figures("100ms", topics_max=1)) as watching:
        next(watching)
        client.publish("orders", {"id": 1})
        seen: dict[str, LatencyFigures] = {}
        for figures in watching:  # the commit may be told before the call has ended
            seen |= {one.name: one for one in figures.latencies}
            if {"commit", "Publish"} <= seen.keys():
                break
    assert all(timedelta(0) < one.median <= one.p99 for one in seen.values())


def test_the_log_is_told_to_those_who_follow_it(client: Client) -> None:
    with closing(client.watch_log("info")) as watching:
        client.create_topic("logged", key=["/id"])
        line = next(line for line in watching if '"logged"' in line.fields)
    assert (line.event, line.level) == ("topic_created", "info")
    (last,) = client.watch_log(lines_max=1, follow=False)
    assert last.event
    assert reason_of(lambda: next(client.watch_log("loud"))) == "INVALID_ARGUMENT"  # type: ignore[arg-type]  # wrong on purpose


def test_the_disk_is_told(client: Client) -> None:
    status = client.status()
    assert status.disk_free_bytes is not None
    assert status.disk_size_bytes is not None
    assert 0 < status.disk_free_bytes <= status.disk_size_bytes
