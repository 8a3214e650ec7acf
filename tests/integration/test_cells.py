"""Topics in cells (rules C1 to C7), against real servers."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import grpc
import pytest
from google.protobuf.message import Message

from sow.v1 import admin_pb2, load_pb2, snapshot_pb2, sow_pb2, types_pb2
from tests.support.oracles.access import grant, identity, write_access
from tests.support.oracles.access_cases import CASES, Case, Things
from tests.support.oracles.access_matrix import full_name
from tests.support.oracles.methods import METHODS, Ended, attempt, details_of_call, opened, reason_of_call
from tests.support.servers.cells import ALONE, NOBODY, CellServer, placement
from tests.support.servers.server import until

NOT_CHECKED: Final = {
    "AccessService.CheckAccess": "it asks the access file, which is of this cell, and shows nothing of the topic",
    "SnapshotService.CloseExport": "closing shows nothing, and frees what the export holds",
    "AdminService.VerifyReplication": "a topic that moves is compared before the placement names its new cell",
    "AdminService.RepairReplication": "as VerifyReplication",
}
"""Methods that name a topic, or something of one, and are not refused; each with its reason."""


class World:
    """A server of the cell a, and the things that requests are made about."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.server = stack.enter_context(CellServer(folder, "a", placement(1), config=SERVER))
        self.channel = stack.enter_context(grpc.insecure_channel(self.server.address))
        self.things = self._make_things()

    def call(self, method: str, request: Message) -> Ended:
        return attempt(self.channel, METHODS[full_name(method)], [request.SerializeToString()])

    def done(self, method: str, request: Message) -> Message:
        ended = self.call(method, request)
        assert ended.code is grpc.StatusCode.OK, (method, ended)
        return ended.answers[0]

    def reload(self, text: str) -> admin_pb2.ReloadPlacementResponse:
        self.server.rewrite(text)
        found = self.done("AdminService.ReloadPlacement", admin_pb2.ReloadPlacementRequest())
        assert isinstance(found, admin_pb2.ReloadPlacementResponse)
        return found

    def placed(self, topic: str = "") -> admin_pb2.GetPlacementResponse:
        found = self.done("AdminService.GetPlacement", admin_pb2.GetPlacementRequest(topic=topic))
        assert isinstance(found, admin_pb2.GetPlacementResponse)
        return found

    def publish(self, topic: str, key: str) -> Ended:
        record = sow_pb2.PublishRecord(payload=b'{"id":"%s","region":"eu"}' % key.encode())
        return self.call("SowService.Publish", sow_pb2.PublishRequest(topic=topic, records=[record]))

    def _make_things(self) -> Things:
        for topic in ("orders", "loaded", "doomed-me"):
            settings = admin_pb2.TopicSettings(key=["/id"], expiration=admin_pb2.EXPIRATION_ENABLED)
            self.done("AdminService.CreateTopic", admin_pb2.CreateTopicRequest(name=topic, settings=settings))
        for key in ("eu", "us", "d-me", "us-d-me"):
            assert self.publish("orders", key).code is grpc.StatusCode.OK
        plan = self.done("SnapshotService.PlanChanges", snapshot_pb2.PlanChangesRequest(topic="orders", latest=True))
        assert isinstance(plan, snapshot_pb2.PlanChangesResponse)
        head = plan.head_bookmark
        for name in ("rewind", "doomed", "kept"):
            self.done(
                "SnapshotService.PinJournal",
                snapshot_pb2.PinJournalRequest(topic="orders", name=name, bookmark=head),
            )
        loads = {}
        for use in ("own", "commit", "another's", "another's commit"):
            load = self.done("LoadService.OpenLoad", load_pb2.OpenLoadRequest(topic="loaded"))
            assert isinstance(load, load_pb2.OpenLoadResponse)
            loads[use] = load.load_id
        exports = {}
        for use in ("own", "another's"):
            export = self.done("SnapshotService.OpenExport", snapshot_pb2.OpenExportRequest(topic="orders"))
            assert isinstance(export, snapshot_pb2.OpenExportResponse)
            exports[use] = export.export_id
        return Things("me", loads, exports, head=head)

    def content(self) -> list[object]:
        """Everything of the topics of the cell that a request could have changed."""
        asked: list[tuple[str, Message]] = [
            ("AdminService.ListTopics", admin_pb2.ListTopicsRequest(with_statistics=True)),
            ("SowService.Query", sow_pb2.QueryRequest(topic="orders")),
            ("SowService.Query", sow_pb2.QueryRequest(topic="loaded")),
            ("AdminService.ListDurables", admin_pb2.ListDurablesRequest(topic="orders")),
            *(("LoadService.GetLoad", load_pb2.GetLoadRequest(load_id=load)) for load in self.things.loads.values()),
        ]
        return [self._timeless(self.call(method, request).answers) for method, request in asked]

    def _timeless(self, answers: list[Message]) -> list[Message]:
        for answer in answers:
            if isinstance(answer, load_pb2.GetLoadResponse):
                answer.ClearField("lease_end_micros")
            if isinstance(answer, sow_pb2.QueryResponse):
                answer.ClearField("footer")
                answer.header.ClearField("as_of_micros")
        return answers


SERVER: Final = '[server]\ndynamic_topics = true\ninstance = "a-1"\n[limits]\nloads_max = 100\n'


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with ExitStack() as stack:
        made = World(tmp_path_factory.mktemp("cells"), stack)
        yield made
        assert not made.server.faults()


def names_a_topic(case: Case, things: Things) -> bool:
    """Whether a request names a topic, or a thing of one."""
    if case.method.startswith("ReplicationService."):
        return False  # peers are not checked: a topic that moves is replicated before the placement names its cell
    request = case.request(things)
    if "Policy" in case.method or "Peer" in case.method:
        return False
    if getattr(request, "here", False):
        return False
    fields = request.DESCRIPTOR.fields_by_name
    named = [name for name in ("topic", "topics", "load_id", "export_id") if name in fields and getattr(request, name)]
    return bool(named) or (case.method.endswith("Topic") and bool(getattr(request, "name", "")))


NOTHING: Final = Things(
    "me", dict.fromkeys(("own", "commit", "another's", "another's commit"), "x"), {"own": "x", "another's": "x"}
)
OF_TOPICS: Final = [case for case in CASES if names_a_topic(case, NOTHING)]


def test_every_method_that_names_a_topic_is_refused_where_it_lives_elsewhere(world: World) -> None:
    """And nothing of the request is applied: the topics, their records, durables and loads are as before."""
    before = world.content()
    number = world.placed().version
    changed = world.reload(placement(number + 1, default="b"))
    assert (changed.version, changed.changed) == (number + 1, True)

    found = {case.name: world.call(case.method, case.request(world.things)) for case in OF_TOPICS}

    reasons = {name: (ended.reason, ended.code) for name, ended in found.items()}
    streams = {name: ended for name, ended in found.items() if name.startswith("SowService.PublishStream")}
    for name, ended in streams.items():
        (answer,) = ended.answers
        assert isinstance(answer, sow_pb2.PublishStreamResponse)
        assert [refusal.reason for refusal in answer.refusals] == [types_pb2.ERROR_REASON_TOPIC_ELSEWHERE], name
        assert answer.refusals[0].details["servers"] == NOBODY
    refused = ("TOPIC_ELSEWHERE", grpc.StatusCode.FAILED_PRECONDITION)
    assert {
        name
        for name, reason in reasons.items()
        if reason != refused and name not in streams and name.partition(" ")[0] not in NOT_CHECKED
    } == set()
    assert {case.method for case in OF_TOPICS} > {
        "SowService.Publish",
        "LoadService.StageLoad",
        "AdminService.CreateTopic",
    }

    world.reload(placement(number + 2))
    assert world.content() == before


def test_the_refusal_tells_a_client_where_to_go(world: World) -> None:
    number = world.placed().version + 1
    cells = {**ALONE, "b": ["10.0.0.2:7450", "10.0.0.3:7450"]}
    world.reload(placement(number, ("orders", "b"), cells=cells))
    get = METHODS["sow.v1.SowService.Get"]
    call = opened(world.channel, get, iter([sow_pb2.GetRequest(topic="orders", keys=["eu"]).SerializeToString()]))
    with pytest.raises(grpc.RpcError):
        next(call)
    assert details_of_call(call) == {
        "topic": "orders",
        "cell": "b",
        "servers": "10.0.0.2:7450,10.0.0.3:7450",
        "from_cell": "a",
        "placement_version": str(number),
        "field": "topic",
    }
    assert "'orders' lives in the cell b at 10.0.0.2:7450,10.0.0.3:7450" in (call.details() or "")
    world.reload(placement(number + 1))


def test_lists_and_patterns_have_the_topics_of_this_cell_alone(world: World) -> None:
    number = world.placed().version + 1
    world.reload(placement(number, ("orders", "b")))
    listed = world.done("AdminService.ListTopics", admin_pb2.ListTopicsRequest())
    assert isinstance(listed, admin_pb2.ListTopicsResponse)
    assert "orders" not in [topic.name for topic in listed.topics]
    subscribed = world.call("SowService.Subscribe", sow_pb2.SubscribeRequest(topic_pattern="ord.*", sow=True))
    assert subscribed.reason == "PATTERN_MATCHES_NOTHING"
    meant = world.call("SowService.Query", sow_pb2.QueryRequest(topic="order"))
    assert (meant.reason, "orders" in meant.text) == ("TOPIC_NOT_FOUND", False)
    (stray,) = world.placed().strays
    assert (stray.topic, stray.cell, stray.records) == ("orders", "b", 4)
    assert stray.last_change_micros > 0
    world.reload(placement(number + 1))
    assert not world.placed().strays


def test_a_stream_ends_once_its_topic_lives_elsewhere(world: World) -> None:
    number = world.placed().version
    requests = {
        "topic": sow_pb2.SubscribeRequest(topic="orders", sow=True),
        "pattern": sow_pb2.SubscribeRequest(topic_pattern="or.*|lo.*", sow=True),
        "other": sow_pb2.SubscribeRequest(topic="loaded", sow=True),
        "other pattern": sow_pb2.SubscribeRequest(topic_pattern="lo.*", sow=True),
    }
    subscribe = METHODS["sow.v1.SowService.Subscribe"]
    calls = {
        name: opened(world.channel, subscribe, iter([request.SerializeToString()]))
        for name, request in requests.items()
    }
    for call in calls.values():
        next(call)
    changed = world.reload(placement(number + 1, ("orders", "b")))
    assert changed.ended_calls == 2
    reasons = {}
    for name in ("topic", "pattern"):
        with pytest.raises(grpc.RpcError):
            for _ in calls[name]:
                pass
        reasons[name] = reason_of_call(calls[name])
    assert reasons == {"topic": "TOPIC_ELSEWHERE", "pattern": "ACCESS_CHANGED"}
    assert calls["other"].is_active()
    assert calls["other pattern"].is_active()
    for call in calls.values():
        call.cancel()
    world.reload(placement(number + 2))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("version = 0\n", "version: 0 is below the minimum, 1"),
        (placement(1, ("x", "b")), "version: 1 is not above"),
        (placement(99, ("x", "c")), '[topics[0]] cell: "c" is none of [cells]'),
        (placement(99, cells={"b": [NOBODY]}, default="b"), '[cells] has no "a"'),
        (placement(99, cells={"a": [NOBODY], "b": [NOBODY]}), '[cells] b: "127.0.0.1:1" occurs in "a", too'),
        ("version = ", "placement.toml:1:11: invalid value"),
    ],
)
def test_a_reload_with_a_fault_changes_nothing(world: World, text: str, told: str) -> None:
    before = world.placed()
    world.server.rewrite(text)
    ended = world.call("AdminService.ReloadPlacement", admin_pb2.ReloadPlacementRequest())
    assert ended.reason == "INVALID_ARGUMENT"
    assert "nothing was changed" in ended.text
    assert told in ended.text
    assert world.placed() == before


def test_a_signal_reloads_the_placement(world: World) -> None:
    number = world.placed().version + 1
    world.server.rewrite(placement(number, ("orders", "b")))
    world.server.signal(signal.SIGHUP)
    until(lambda: world.placed().version == number, 30, "the reload")
    assert world.placed("orders").topic_cell == "b"
    world.reload(placement(number + 1))


# -- who may see it ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CellServer]:
    """A cell with an access file, whose topics named `orders` and `other` live elsewhere."""
    folder = tmp_path_factory.mktemp("guarded")
    roles = grant("desk", "orders|own", "read publish") + grant("sight", "orders", "read observe")
    callers = identity("desk", "desk") + identity("sight", "sight") + identity("nobody")
    write_access(folder, roles + callers)
    config = '[server]\ninstance = "a-1"\nauth = "token"\ninsecure = true\n[access]\nfile = "auth.toml"\n'
    with CellServer(folder, "a", placement(1), config=config) as server:
        channel = grpc.insecure_channel(server.address)
        for topic in ("orders", "own", "other"):
            made = admin_pb2.CreateTopicRequest(name=topic, settings=admin_pb2.TopicSettings(key=["/id"]))
            assert _as(channel, "root", "AdminService.CreateTopic", made).code is grpc.StatusCode.OK
        channel.close()
        server.rewrite(placement(2, ("orders|other|never", "b")))
        server.restart()
        yield server


def _as(channel: grpc.Channel, token: str, method: str, request: Message) -> Ended:
    return attempt(channel, METHODS[full_name(method)], [request.SerializeToString()], token=token)


def test_everybody_learns_of_a_placement_as_much_as_the_caller_may(guarded: CellServer) -> None:
    with grpc.insecure_channel(guarded.address) as channel:

        def told(token: str, topic: str = "") -> set[str]:
            asked = admin_pb2.GetPlacementRequest(topic=topic)
            (answer,) = _as(channel, token, "AdminService.GetPlacement", asked).answers
            return {field.name for field, _ in answer.ListFields()}

        assert told("") == {"cell", "version", "digest"}
        assert told("nobody") == {"cell", "version", "digest", "cells"}
        assert told("desk", "orders") == {"cell", "version", "digest", "cells", "topic_cell"}
        assert told("desk", "other") == {"cell", "version", "digest", "cells"}
        until(lambda: "problems" in told("sight"), 30, "the first look at the other cell")
        every = {"cell", "version", "digest", "cells", "default_cell", "topics", "strays", "problems"}
        assert told("sight") == every
        assert told("sight", "own") == {*every, "topic_cell", "copy"}, "it may know of all topics"
        guessed = _as(channel, "guessed", "AdminService.GetPlacement", admin_pb2.GetPlacementRequest())
        assert guessed.reason == "UNAUTHENTICATED"
        denied = _as(channel, "desk", "AdminService.ReloadPlacement", admin_pb2.ReloadPlacementRequest())
        assert denied.reason == "PERMISSION_DENIED"


BY_NAME: Final = [case for case in OF_TOPICS if "topic" in case.request(NOTHING).DESCRIPTOR.fields_by_name]


@pytest.mark.parametrize("case", BY_NAME, ids=lambda case: case.name)
def test_who_may_not_see_a_topic_does_not_learn_that_it_lives_elsewhere(guarded: CellServer, case: Case) -> None:
    """The same answer for a topic of this cell, for one that is left here, and for one that never was."""
    with grpc.insecure_channel(guarded.address) as channel:
        found = set()
        for topic in ("own", "other", "never"):
            request = type(case.request(NOTHING))()
            request.CopyFrom(case.request(NOTHING))
            request.topic = topic  # type: ignore[attr-defined]  # the case is chosen by that
            ended = _as(channel, "nobody", case.method, request)
            answers = repr(ended.answers).replace(topic, "T")
            found.add((ended.code, ended.reason, ended.text.replace(repr(topic), "T"), answers))
        assert len(found) == 1


def test_a_copy_that_was_left_behind_is_deleted_on_purpose_alone(guarded: CellServer) -> None:
    with grpc.insecure_channel(guarded.address) as channel:

        def delete(token: str, topic: str, *, here: bool) -> str:
            request = admin_pb2.DeleteTopicRequest(name=topic, here=here)
            return _as(channel, token, "AdminService.DeleteTopic", request).reason

        assert delete("root", "orders", here=False) == "TOPIC_ELSEWHERE"
        assert delete("desk", "orders", here=True) == "PERMISSION_DENIED"
        assert delete("root", "own", here=True) == "INVALID_ARGUMENT"
        assert delete("root", "never", here=True) == "TOPIC_NOT_FOUND"
        assert delete("root", "orders", here=True) == ""
        (answer,) = _as(channel, "root", "AdminService.GetPlacement", admin_pb2.GetPlacementRequest()).answers
        assert isinstance(answer, admin_pb2.GetPlacementResponse)
        assert [stray.topic for stray in answer.strays] == ["other"]
