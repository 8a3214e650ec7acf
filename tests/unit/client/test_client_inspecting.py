"""The calls that look at a server: their requests, and the values of their answers, of both clients."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from sow.v1 import admin_pb2
from sow_client import (
    ActiveSubscription,
    CellProblem,
    ConfigSetting,
    ExpiryHorizon,
    Figures,
    InvalidArgument,
    KeptResult,
    LatencyFigures,
    PlacedTopics,
    Placement,
    PlacementReloaded,
    Stray,
    TopicDue,
    Unavailable,
)
from sow_client._inspection import joined
from tests.support.fakes.called_server import Server, loop, script, server
from tests.support.fakes.scripted import SECONDS_MAX

__all__ = ["loop", "script", "server"]  # fixtures

SECOND = 1_000_000


@pytest.mark.parametrize("late", [0, 30])
def test_the_horizon_of_cells_with_several_clocks_is_as_complete_as_the_least_of_theirs(late: int) -> None:
    """C19: clocks that are apart make no complete count incomplete, and no incomplete one complete."""
    begin, hour = datetime(2030, 1, 31, 12, tzinfo=UTC), timedelta(hours=1)
    later = begin + timedelta(seconds=late)
    whole = ExpiryHorizon(later, (hour,), (TopicDue("b", 0, (1,), None, False),), later + hour, later + hour)
    part = ExpiryHorizon(begin, (hour,), (TopicDue("a", 0, (2,), None, False),), begin + hour, begin + hour / 2)
    both = joined([whole, part])
    assert [one.topic for one in both.topics] == ["a", "b"]
    assert (both.as_of, both.complete, both.exact) == (begin, True, False)
    cut = replace(whole, complete_upto=later + hour - timedelta(seconds=1))
    assert not joined([part, cut]).complete
    assert joined([whole]) is whole


def test_the_expiry_horizon(server: Server) -> None:
    call = server.begin(lambda: server.client.expiry_horizon("orders", ["1m", timedelta(hours=1)], exact=True))
    due = admin_pb2.TopicHorizon(topic="orders", overdue=1, due=[2, 3], next_micros=9 * SECOND)
    request = server.answer(
        "GetExpiryHorizon",
        admin_pb2.GetExpiryHorizonResponse(
            as_of_micros=5 * SECOND,
            edge_micros=[60 * SECOND, 3600 * SECOND],
            topics=[due],
            upto_micros=65 * SECOND,
            exact_upto_micros=60 * SECOND,
        ),
    )
    found = call.result(SECONDS_MAX)
    assert request == admin_pb2.GetExpiryHorizonRequest(
        topic="orders", edge_micros=[60 * SECOND, 3600 * SECOND], exact=True
    )
    assert found.spans == (timedelta(minutes=1), timedelta(hours=1))
    assert not found.complete, "it ended within the last span"
    assert not found.exact, "of the last five seconds, entries are counted"
    assert found.exact_upto - found.as_of == timedelta(seconds=55)
    (one,) = found.topics
    assert (one.topic, one.overdue, one.due, one.incomplete) == ("orders", 1, (2, 3), False)
    assert one.next_time is not None
    assert one.next_time - found.as_of == timedelta(seconds=4)


def test_subscriptions_and_the_end_of_one(server: Server) -> None:
    call = server.begin(lambda: server.client.subscriptions("orders"))
    message = admin_pb2.ActiveSubscription(
        id="u4", session="s2", identity="desk", address="ipv4:1.2.3.4:5", since_micros=SECOND, topic="orders",
        filter="/px > 2", position="e.7", behind=True, queued_bytes=9,
        kept=admin_pb2.KeptResult(records=110, bytes=4_096, runs=2, followers=3),
    )  # fmt: skip
    request = server.answer(
        "ListSubscriptions", admin_pb2.ListSubscriptionsResponse(subscriptions=[message], head_bookmark="e.9")
    )
    (found,) = call.result(SECONDS_MAX)
    assert isinstance(found, ActiveSubscription)
    assert (found.id, found.session, found.filter, found.position, found.behind) == ("u4", "s2", "/px > 2", "e.7", True)
    assert found.kept == KeptResult(110, 4_096, 2, 3)
    assert request == admin_pb2.ListSubscriptionsRequest(topic="orders")

    ended = server.begin(lambda: server.client.end_subscription("u4"))
    assert server.answer("EndSubscription", admin_pb2.EndSubscriptionResponse()) == admin_pb2.EndSubscriptionRequest(
        id="u4"
    )
    ended.result(SECONDS_MAX)


def test_figures_come_until_the_stream_ends(server: Server) -> None:
    call = server.begin(lambda: watched(server))
    first = admin_pb2.WatchFiguresResponse(as_of_micros=SECOND, last_sequence=7, topics_total=1)
    topic = admin_pb2.TopicFigures(topic="orders", records=3, changes_per_second=2.5)
    link = admin_pb2.LinkFigures(peer="ldn", state="streaming", lag_sequences=4, lag_micros=SECOND)
    second = admin_pb2.WatchFiguresResponse(
        as_of_micros=3 * SECOND, elapsed_micros=2 * SECOND, changes_per_second=2.5, topics=[topic], links=[link]
    )
    request = server.stream("WatchFigures", first, second)
    one, other = call.result(SECONDS_MAX)
    assert request == admin_pb2.WatchFiguresRequest(interval_micros=2 * SECOND, topics_max=5)
    assert (one.elapsed, one.last_sequence, one.topics_total) == (timedelta(), 7, 1)
    assert (other.elapsed, other.changes_per_second) == (timedelta(seconds=2), 2.5)
    assert (other.topics[0].topic, other.topics[0].records) == ("orders", 3)
    assert (other.links[0].peer, other.links[0].lag) == ("ldn", timedelta(seconds=1))


def watched(server: Server) -> list[Figures]:
    return list(server.client.watch_figures("2s", topics_max=5))


def test_figures_of_the_past_are_asked_for(server: Server) -> None:
    call = server.begin(lambda: list(server.client.watch_figures("2s", history="10m")))
    request = server.stream("WatchFigures", admin_pb2.WatchFiguresResponse(elapsed_micros=5 * SECOND))
    assert [one.elapsed for one in call.result(SECONDS_MAX)] == [timedelta(seconds=5)]
    assert request.history_micros == 600 * SECOND


def test_the_placement_of_topics_in_cells(server: Server) -> None:
    call = server.begin(lambda: server.client.placement("orders"))
    stray = admin_pb2.Stray(topic="orders", cell="b", records=3, last_change_micros=SECOND)
    differs = admin_pb2.CellProblem(
        cell="b", kind=admin_pb2.CellProblem.KIND_DIFFERS, since_micros=SECOND, message="h:1 has version 2"
    )
    later = admin_pb2.CellProblem.FromString(b"\n\x01b\x10\x63")  # of a kind that a later server knows
    request = server.answer(
        "GetPlacement",
        admin_pb2.GetPlacementResponse(
            cell="a", version=3, digest="d", cells=[admin_pb2.Cell(name="b", servers=["h:1", "h:2"])],
            topic_cell="b", default_cell="a", topics=[admin_pb2.PlacedTopics(pattern="o.*", cell="b")],
            strays=[stray, admin_pb2.Stray(topic="x", cell="b")], problems=[differs, later], copy=stray,
        ),
    )  # fmt: skip
    found = call.result(SECONDS_MAX)
    assert request == admin_pb2.GetPlacementRequest(topic="orders")
    moment = datetime.fromtimestamp(1, UTC)
    left = Stray("orders", "b", 3, moment)
    assert found == Placement(
        "a", 3, "d", {"b": ("h:1", "h:2")}, "b", "a", (PlacedTopics("o.*", "b"),), (left, Stray("x", "b", 0, None)),
        (CellProblem("b", "DIFFERS", moment, "h:1 has version 2"),), left,
    )  # fmt: skip

    again = server.begin(server.client.reload_placement)
    server.answer(
        "ReloadPlacement", admin_pb2.ReloadPlacementResponse(version=4, digest="e", changed=True, ended_calls=2)
    )
    assert again.result(SECONDS_MAX) == PlacementReloaded(4, "e", changed=True, ended_calls=2)


def test_latencies_are_among_the_figures(server: Server) -> None:
    call = server.begin(lambda: watched(server))
    latency = admin_pb2.LatencyFigures(name="commit", per_second=2.5, median_micros=1_000, p99_micros=20_000)
    server.stream("WatchFigures", admin_pb2.WatchFiguresResponse(as_of_micros=SECOND, latencies=[latency]))
    (figures,) = call.result(SECONDS_MAX)
    assert figures.latencies == (LatencyFigures("commit", 2.5, timedelta(milliseconds=1), timedelta(milliseconds=20)),)


def test_lines_of_the_log_come_until_the_stream_ends(server: Server) -> None:
    call = server.begin(lambda: list(server.client.watch_log("warning", lines_max=5)))
    line = admin_pb2.LogLine(time_micros=SECOND, level="warning", event="odd", logger="l", fields='{"n":1}')
    answers = (admin_pb2.WatchLogResponse(lines=[line]), admin_pb2.WatchLogResponse(lines=[line, line], missed=3))
    request = server.stream("WatchLog", *answers)
    lines = call.result(SECONDS_MAX)
    assert request == admin_pb2.WatchLogRequest(level="warning", lines_max=5, follow=True)
    assert [one.missed for one in lines] == [0, 3, 0]
    assert (lines[0].event, lines[0].time.timestamp(), lines[0].fields) == ("odd", 1, '{"n":1}')


def test_the_configuration(server: Server) -> None:
    call = server.begin(server.client.config)
    setting = admin_pb2.ConfigSetting(table="replication", key="token", origin="file", hidden=True)
    server.answer("GetConfig", admin_pb2.GetConfigResponse(settings=[setting]))
    assert call.result(SECONDS_MAX) == [ConfigSetting("replication", 0, "token", "", "file", True)]


def test_arguments_that_cannot_be(server: Server) -> None:
    for wrong in (
        lambda: server.client.expiry_horizon("orders", ["soon"]),
        lambda: next(server.client.watch_figures(topics_max=0)),
        lambda: next(server.client.watch_figures(history="61m")),
        lambda: next(server.client.watch_log(lines_max=0)),
    ):
        with pytest.raises((InvalidArgument, Unavailable)):
            wrong()
