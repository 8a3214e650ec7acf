"""Durable subscriptions on a real server, through the contract alone: consume, acknowledge, be killed, resume."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner
from google.rpc import error_details_pb2, status_pb2

from sow.v1 import admin_pb2, admin_pb2_grpc, sow_pb2, sow_pb2_grpc, types_pb2
from sow_cli.command import sow
from sow_client import UNLIMITED, AsyncClient, Client, InvalidArgument, ResourceExhausted
from tests.support.servers.server import DYNAMIC, ServerProcess, until

CONFIG = DYNAMIC + '[journal]\nprune_interval = "200ms"\n'
DEADLINE = 30.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path, CONFIG) as running:
        yield running
        assert running.faults() == []


class Caller:
    """The two services over one channel, to the cell of the topic `orders`."""

    def __init__(self, server: ServerProcess) -> None:
        self.channel = grpc.insecure_channel(server.address_of("orders"))
        self.sow = sow_pb2_grpc.SowServiceStub(self.channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(self.channel)

    def create(self, name: str, **settings: object) -> None:
        self.admin.CreateTopic(
            admin_pb2.CreateTopicRequest(name=name, settings=admin_pb2.TopicSettings(**settings)),  # type: ignore[arg-type]  # as named
            timeout=DEADLINE,
        )

    def publish(self, topic: str, *keys: str, payload: bytes = b"{}", timeout: float = DEADLINE) -> list[int]:
        """Returns the sequences."""
        request = sow_pb2.PublishRequest(topic=topic)
        for key in keys:
            request.records.add(key=key, payload=payload)
        return [result.sequence for result in self.sow.Publish(request, timeout=timeout).results]

    def attach(
        self,
        topic: str,
        name: str,
        *,
        filter: str = "",  # noqa: A002  # as everywhere
        **durable: object,
    ) -> Attached:
        """A consumer; `durable` are fields of the attachment."""
        return Attached(self, topic, name, filter, durable)

    def describe(self, topic: str, name: str, *, exact: bool = False) -> admin_pb2.Durable:
        request = admin_pb2.DescribeDurableRequest(topic=topic, name=name, exact=exact)
        return self.admin.DescribeDurable(request, timeout=DEADLINE).durable


class Attached:
    """A consumer; its first frame has come."""

    def __init__(self, caller: Caller, topic: str, name: str, text: str, durable: Mapping[str, object]) -> None:
        self.caller, self.topic, self.name = caller, topic, name
        request = sow_pb2.SubscribeRequest(
            topic=topic,
            filter=text,
            progress_micros=100_000,
            durable=sow_pb2.DurableAttachment(name=name, **durable),  # type: ignore[arg-type]  # as named
        )
        self.call = caller.sow.Subscribe(request, timeout=DEADLINE)
        self.begun = self.next().durable_begin
        self.bookmark = self.begun.bookmark

    def next(self) -> sow_pb2.SubscribeResponse:
        frame: sow_pb2.SubscribeResponse = next(self.call)
        return frame

    def to_the_end(self) -> None:
        """Takes frames until the call ends."""
        for _ in self.call:
            pass

    def batch(self) -> list[int]:
        """The sequences of the next batch of changes."""
        while True:
            frame = self.next()
            if frame.HasField("changes"):
                self.bookmark = frame.changes.bookmark
                return list(frame.changes.records.sequence)

    def acknowledge(self) -> str:
        request = sow_pb2.AcknowledgeRequest(
            topic=self.topic, durable=self.name, bookmark=self.bookmark, session=self.begun.session
        )
        return self.caller.sow.Acknowledge(request, timeout=DEADLINE).bookmark

    def leave(self, *, acknowledges: bool = False) -> str:
        """Leaves, and does not cancel the call."""
        request = sow_pb2.AcknowledgeRequest(
            topic=self.topic,
            durable=self.name,
            bookmark=self.bookmark if acknowledges else "",
            session=self.begun.session,
            detach=True,
        )
        return self.caller.sow.Acknowledge(request, timeout=DEADLINE).bookmark


def reason(error: pytest.ExceptionInfo[grpc.RpcError]) -> str:
    """The details of a refused call."""
    (details,) = [pair.value for pair in error.value.trailing_metadata() if pair.key == "grpc-status-details-bin"]
    told = status_pb2.Status.FromString(bytes(details))
    info = error_details_pb2.ErrorInfo()
    assert told.details[0].Unpack(info)
    return str(info.reason)


def test_a_client_consumes_acknowledges_is_killed_and_resumes(server: ServerProcess) -> None:
    """J2: and the server is killed, too."""
    caller = Caller(server)
    caller.create("orders")
    first = caller.attach("orders", "d")
    assert (first.begun.created, first.begun.reset) == (True, False)
    assert caller.publish("orders", "a", "b", "c") == [1, 2, 3]
    assert first.batch() == [1, 2, 3]
    first.bookmark = first.bookmark.replace(".3", ".2")
    assert first.acknowledge() == first.bookmark
    first.call.cancel()
    server.kill9()
    server.start()
    caller = Caller(server)
    second = caller.attach("orders", "d")
    assert (second.begun.created, second.begun.bookmark) == (False, first.bookmark)
    assert second.batch() == [3]
    with pytest.raises(grpc.RpcError) as refused:
        caller.attach("orders", "d")
    assert reason(refused) == "DURABLE_IN_USE"
    third = caller.attach("orders", "d", force=True)
    with pytest.raises(grpc.RpcError) as ended:
        second.batch()
    assert reason(ended) == "DURABLE_TAKEN_OVER"
    assert third.batch() == [3]


def test_a_consumer_that_has_left_makes_room_before_its_stream_ends(server: ServerProcess) -> None:
    """J2. Story: a client cancelled its stream and attached again, and its instance saw these the other way round."""
    caller = Caller(server)
    caller.create("orders")
    first = caller.attach("orders", "d")
    caller.publish("orders", "a", "b")
    assert first.batch() == [1, 2]
    first.bookmark = first.bookmark.replace(".2", ".1")
    assert first.leave(acknowledges=True) == first.bookmark
    second = caller.attach("orders", "d")
    assert second.batch() == [2]
    with pytest.raises(grpc.RpcError) as ended:
        first.to_the_end()
    assert reason(ended) == "DURABLE_DETACHED"
    assert first.leave() == second.begun.bookmark, "it has left, and the other one stays"
    assert caller.describe("orders", "d").attached


def test_options_that_exclude_a_durable_are_refused(server: ServerProcess) -> None:
    caller = Caller(server)
    caller.create("orders")
    durable = sow_pb2.DurableAttachment(name="d")
    for field, value in (("sow", True), ("delta", True), ("conflation_micros", 1000), ("topic_pattern", "o.*")):
        request = sow_pb2.SubscribeRequest(durable=durable)
        if field != "topic_pattern":
            request.topic = "orders"
        setattr(request, field, value)
        with pytest.raises(grpc.RpcError) as refused:
            next(caller.sow.Subscribe(request, timeout=DEADLINE))
        assert reason(refused) == "INVALID_ARGUMENT"
        assert field in str(refused.value)
    with pytest.raises(grpc.RpcError) as refused:
        caller.describe("orders", "d")
    assert reason(refused) == "DURABLE_NOT_FOUND"


def test_rewinding_clearing_describing_and_deleting(server: ServerProcess) -> None:
    """FTL 3, FTL 7, Pulsar 7: by an administrator."""
    caller = Caller(server)
    caller.create("orders")
    first = caller.attach("orders", "d", filter="/px > 1", settings=types_pb2.DurableSettings(retain_bytes=-1))
    caller.publish("orders", "a", payload=b'{"px":2}')
    caller.publish("orders", "b", payload=b'{"px":1}')
    first.batch()
    found = caller.describe("orders", "d")
    assert (found.attached, found.figures.total_entries, found.figures.unacknowledged_entries) == (True, 2, 2)
    assert found.figures.HasField("oldest_unacknowledged_age")
    assert found.settings.retain_bytes == -1
    exact = caller.describe("orders", "d", exact=True)
    assert (exact.figures.exact, exact.figures.unacknowledged_entries) == (True, 1)
    first.acknowledge()
    rewind = sow_pb2.RewindRequest(topic="orders", durable="d", earliest=True)
    with pytest.raises(grpc.RpcError) as refused:
        caller.sow.Rewind(rewind, timeout=DEADLINE)
    assert reason(refused) == "DURABLE_IN_USE"
    rewind.force = True
    assert caller.sow.Rewind(rewind, timeout=DEADLINE).unacknowledged_entries == 2
    with pytest.raises(grpc.RpcError) as ended:
        first.to_the_end()
    assert reason(ended) == "DURABLE_DETACHED"
    second = caller.attach("orders", "d", filter="/px > 1")
    assert second.batch() == [1]
    clear = admin_pb2.ClearBacklogRequest(topic="orders", name="d")
    assert caller.admin.ClearBacklog(clear, timeout=DEADLINE).acknowledged_entries == 2
    listed = caller.admin.ListDurables(admin_pb2.ListDurablesRequest(), timeout=DEADLINE).durables
    assert [(one.topic, one.name, one.attached) for one in listed] == [("orders", "d", False)]
    caller.admin.DeleteDurable(admin_pb2.DeleteDurableRequest(topic="orders", name="d"), timeout=DEADLINE)
    again = caller.attach("orders", "d")
    assert (again.begun.created, again.begun.reset) == (True, True)


def refused_in_time(call: Callable[[float], object]) -> pytest.ExceptionInfo[grpc.RpcError]:
    """How a call is refused that is given so many seconds. More of them, where this machine is so busy that the
    deadline comes before the server's word."""
    seconds = 0.5
    while True:
        with pytest.raises(grpc.RpcError) as refused:
            call(seconds)
        if refused.value.trailing_metadata() or seconds > 30:
            return refused
        seconds *= 5


@pytest.mark.parametrize("action", ["hold", "reject"])
def test_a_publish_beyond_the_quota_waits_or_is_refused_until_somebody_acknowledges(
    server: ServerProcess, action: str
) -> None:
    """Pulsar 5, J9."""
    caller = Caller(server)
    number = {"hold": admin_pb2.BACKLOG_ACTION_HOLD, "reject": admin_pb2.BACKLOG_ACTION_REJECT}[action]
    caller.create("orders", backlog_quota_bytes=1000, backlog_action=number)
    caller.publish("orders", "free")
    consumer = caller.attach("orders", "d")
    caller.publish("orders", "a", payload=b'{"x":"%s"}' % bytes(2000).replace(b"\0", b"x"))
    statistics = caller.admin.DescribeTopic(admin_pb2.DescribeTopicRequest(name="orders"), timeout=DEADLINE)
    assert statistics.topic.statistics.durables == 1
    assert statistics.topic.statistics.backlog_bytes > 2000
    refused = refused_in_time(lambda seconds: caller.publish("orders", "b", timeout=seconds))
    assert reason(refused) == "BACKLOG_QUOTA_EXCEEDED"
    sow_delete = sow_pb2.SowDeleteRequest(topic="orders", by_keys=sow_pb2.KeyList(keys=["free"]))
    assert [part.deleted for part in caller.sow.SowDelete(sow_delete, timeout=DEADLINE)] == [1], "deletes pass"
    published: list[list[int]] = []
    if action == "hold":
        waiting = threading.Thread(target=lambda: published.append(caller.publish("orders", "c")))
        waiting.start()
        consumer.batch()
        consumer.acknowledge()
        waiting.join(DEADLINE)
    else:
        consumer.batch()
        consumer.acknowledge()
        published.append(caller.publish("orders", "c"))
    assert len(published) == 1


@pytest.mark.parametrize("action", ["hold", "reject"])
def test_a_publish_stream_is_held_or_refused_at_the_quota_in_order(server: ServerProcess, action: str) -> None:
    """J9, P6: earlier requests are answered while the rest waits; all that waits passes, in the order it was
    sent in; a deadline tells why it ended."""
    caller = Caller(server)
    number = {"hold": admin_pb2.BACKLOG_ACTION_HOLD, "reject": admin_pb2.BACKLOG_ACTION_REJECT}[action]
    caller.create("orders", backlog_quota_bytes=1000, backlog_action=number)
    consumer = caller.attach("orders", "d")

    def requests(*keys: str) -> Iterator[sow_pb2.PublishStreamRequest]:
        for key in keys:
            yield sow_pb2.PublishStreamRequest(topic="orders", key=[key], payload=[b"{}".ljust(2000)])

    def sequence(response: sow_pb2.PublishStreamResponse) -> int:
        return int(response.last_sequence)

    stream = caller.sow.PublishStream(requests("a", "b", "c"), timeout=DEADLINE)
    assert sequence(next(stream)) == 1
    if action == "hold":
        for expected in (2, 3):
            assert consumer.batch() == [expected - 1]
            consumer.acknowledge()
            assert sequence(next(stream)) == expected
        assert list(stream) == []
        refused = refused_in_time(lambda seconds: next(caller.sow.PublishStream(requests("d"), timeout=seconds)))
        assert consumer.batch() == [3]
        consumer.acknowledge()
        assert caller.publish("orders", "e") == [4], "a refused record is not published later"
    else:
        with pytest.raises(grpc.RpcError) as refused:
            next(stream)
    assert reason(refused) == "BACKLOG_QUOTA_EXCEEDED"


def test_evicting_tells_the_one_that_comes_back(server: ServerProcess) -> None:
    """Pulsar 5, J9."""
    caller = Caller(server)
    caller.create("orders", backlog_quota_bytes=10_000, backlog_action=admin_pb2.BACKLOG_ACTION_EVICT)
    caller.attach("orders", "d").call.cancel()
    for number in range(30):
        caller.publish("orders", str(number), payload=b'{"x":"%s"}' % bytes(1000).replace(b"\0", b"x"))
    until(lambda: caller.describe("orders", "d").figures.unacknowledged_bytes < 10_000, 10, "the eviction")
    consumer = caller.attach("orders", "d")
    gap = consumer.next().gap
    assert gap.reason == sow_pb2.GAP_REASON_EVICTED
    assert gap.entries + caller.describe("orders", "d").figures.unacknowledged_entries == 30


def test_acknowledgements_survive_kills(server: ServerProcess) -> None:
    """J2: what an answer has told is never handed over again, and nothing is left out."""
    draw = random.Random(7)
    caller = Caller(server)
    caller.create("orders")
    caller.attach("orders", "d").call.cancel()
    acknowledged, answered, seen = 0, set[int](), set[int]()
    for _ in range(5):
        stopping = threading.Event()

        def publish(caller: Caller = caller, stopping: threading.Event = stopping) -> None:
            while not stopping.is_set():
                try:
                    answered.update(caller.publish("orders", *[str(number) for number in range(20)]))
                except grpc.RpcError:
                    return

        publisher = threading.Thread(target=publish)
        publisher.start()
        consumer = caller.attach("orders", "d", force=True)
        position = int(consumer.begun.bookmark.split(".")[1])
        assert position >= acknowledged
        for _ in range(draw.randrange(5, 40)):
            batch = consumer.batch()
            assert batch[0] > position, "an acknowledged entry does not come again"
            position = batch[-1]
            seen.update(batch)
            if draw.random() < 0.7:
                acknowledged = int(consumer.acknowledge().split(".")[1])
        server.kill9()
        stopping.set()
        publisher.join(DEADLINE)
        server.start()
        caller = Caller(server)
    consumer = caller.attach("orders", "d", force=True)
    last = int(consumer.begun.bookmark.split(".")[1])
    assert last >= acknowledged
    while last < max(answered):
        batch = consumer.batch()
        last = batch[-1]
        seen.update(batch)
    assert answered <= seen


def test_an_entry_that_consumers_fail_on_is_set_aside_and_the_rest_is_browsed(server: ServerProcess) -> None:
    """FTL 6, FTL 8, J15, J16, J17: through the contract, the clients and the command, and over a kill of the server."""
    with Client(server.address) as client:
        client.create_topic("orders.letters", message_type="binary")
        kept = client.create_topic(
            "orders", dead_letter="orders.letters", retain_bytes=UNLIMITED, backlog_quota_entries=3
        )
        assert [warning.partition(":")[0] for warning in kept.warnings] == ["retain_bytes"]
        client.create_topic("unbounded", retain_bytes=UNLIMITED)
        assert client.alter_topic("orders", max_bytes=2**30).warnings == ()
        assert client.set_policy("wide", "x.*", topics={"retain_bytes": UNLIMITED}).warnings
        assert client.set_policy("limit", "orders/.*", durables={"delivery_limit": 1}).warnings == ()
        with client.durable("orders", "billing"):
            pass
        for key in ("poison", "next"):
            client.publish("orders", {"id": key}, key=key)
        assert handed(client) == [("poison", 1), ("next", 1)]
        until(lambda: not client.describe_durable("orders", "billing").attached, DEADLINE, "the consumer to be gone")
        client.publish("orders", {}, key="third")  # on disk, and so are all writes before it
    server.kill9()
    server.start()
    assert [event["topic"] for event in server.events("settings_questionable")] == ["unbounded"]
    with Client(server.address) as client:
        browsed = client.durable_browse("orders", "billing", entries_max=1)
        assert [(one.key, one.delivery_count) for one in browsed.entries] == [("poison", 1)]
        assert not browsed.complete
        last = client.durable_browse("orders", "billing", after=browsed.bookmark)
        assert ([one.key for one in last.entries], last.complete) == (["next", "third"], True)

        assert handed(client) == [("delivery_limit", 1), ("next", 2)]

        (listed,) = client.durables("orders", with_figures=True)
        figures = listed.figures
        assert figures is not None
        assert (figures.unacknowledged_entries, figures.set_aside_entries) == (2, 1)
        (letter,) = client.query("orders.letters")
        assert letter.key.startswith("orders|poison|")
        assert letter.key.endswith("|billing")
        statistics = client.describe_topic("orders").statistics
        assert statistics is not None
        assert (statistics.slowest_durable, statistics.backlog_entries) == ("billing", 2)
        until(lambda: not client.describe_durable("orders", "billing").attached, DEADLINE, "the consumer to be gone")
        client.publish("orders", {}, key="fourth")
        client.alter_topic("orders", backlog_action="reject")
        with pytest.raises(ResourceExhausted) as refused:
            client.publish("orders", {}, key="one too many")
        assert refused.value.reason == "BACKLOG_QUOTA_EXCEEDED"
        assert {record.key for record in client.query("orders")} == {"poison", "next", "third", "fourth"}

    run = CliRunner()
    shown = run.invoke(
        sow, ["--server", server.address, "durable", "browse", "orders", "billing", "--format", "ndjson"]
    )
    assert shown.exit_code == 0, shown.output
    rows = [json.loads(line) for line in shown.stdout.splitlines()]
    assert [(row["key"], row["delivery_count"]) for row in rows] == [("next", 2), ("third", 1), ("fourth", 0)]
    table = run.invoke(sow, ["--server", server.address, "durable", "list", "--format", "table"])
    assert "billing" in table.stdout
    told = run.invoke(sow, ["--server", server.address, "topic", "create", "wide", "--retain-bytes", "unlimited"])
    assert "warning: retain_bytes" in told.stderr

    async def browse() -> list[str]:
        async with AsyncClient(server.address) as client:
            return [one.key for one in (await client.durable_browse("orders", "billing")).entries]

    assert asyncio.run(browse()) == ["next", "third", "fourth"]


def handed(client: Client) -> list[tuple[str, int]]:
    """The deliveries to a consumer that acknowledges nothing, with their counts; gaps by their reason."""
    found: list[tuple[str, int]] = []
    with client.durable(
        "orders", "billing", on_gap=lambda gap: found.append((gap.reason, gap.entries or 0))
    ) as durable:
        for change in durable:
            found.append((change.key, change.delivery_count))
            if change.key == "next":
                return found
    return found


def test_records_due_at_once_go_to_the_attached_consumer(server: ServerProcess) -> None:
    """R8, L7: handed over, or dead-lettered; the answer says which."""
    with Client(server.address) as client:
        client.create_topic("orders.letters")
        client.create_topic("orders", expiration="enabled", dead_letter="orders.letters")
        with client.durable("orders", "billing", "/n > 1") as durable:
            assert client.publish("orders", {"n": 1}, key="a", ttl="0s").delivered == 0
            assert client.publish("orders", {"n": 2}, key="b", ttl="0s").delivered == 1
            assert client.publish("orders", {"n": 3}, key="c", ttl="1h").delivered is None
            assert [next(durable).key, next(durable).key] == ["b", "c"]
        until(lambda: not client.describe_durable("orders", "billing").attached, DEADLINE, "the consumer to be gone")
        assert client.publish("orders", {"n": 4}, key="d", ttl="0s").delivered == 0
        assert sorted(record.key.split("|")[1] for record in client.query("orders.letters")) == ["a", "d"]
        assert [record.key for record in client.query("orders")] == ["c"]


def test_a_filter_that_is_kept_is_parsed_again(server: ServerProcess) -> None:
    """Q9: the canonical text may be longer than what was given. Where it went beyond 64 KiB, no call could read the
    durable's entries, and the journal was kept for it."""
    terms = "OR".join(["/aaaaaaaa='1'"] * 400)
    fits, whole = terms + "OR/b=:value", 64 << 10
    room = whole - (400 * len("/aaaaaaaa = '1' OR ") + len("/b = ''"))
    with Client(server.address) as client:
        client.create_topic("orders")
        client.publish("orders", {"b": "x" * room}, key="a")
        with pytest.raises(InvalidArgument, match=rf"filter: a durable keeps .* {whole + 1} bytes") as refused:
            client.durable("orders", "long", fits, parameters={"value": "x" * (room + 1)}).__enter__()
        assert refused.value.reason == "FILTER_INVALID"
        assert client.durables("orders") == []
        with client.durable("orders", "billing", fits, parameters={"value": "x" * room}, start="earliest") as durable:
            assert next(durable).key == "a"
        client.publish("orders", {}, key="on disk")
    server.restart()
    with Client(server.address) as client:
        assert [one.key for one in client.durable_browse("orders", "billing").entries] == ["a"]
        with client.durable("orders", "billing", fits, parameters={"value": "x" * room}) as durable:
            assert next(durable).key == "a"
