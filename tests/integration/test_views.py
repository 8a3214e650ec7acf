"""Views through the contract: made, followed, queried, exported, consumed, refused, seen, rebuilt (rules V1 to V9)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from sow.v1 import sow_pb2, sow_pb2_grpc
from sow_client import (
    AsyncClient,
    Client,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    SowError,
    Topic,
    Unavailable,
    ViewDefinition,
)
from sow_client._statuses import error_of_status
from tests.integration.test_exports import payloads
from tests.support.oracles.access import GUARDED, client_of, grant, identity, write_access
from tests.support.servers.server import DidNotStart, ServerProcess, reason_of, until

# With `--cells`, the names of all views decide that they live in the cell of their source, `deals` (rule C6, `spread`).
SUMS = {"n": "COUNT(*)", "qty": "SUM(/qty)", "high": "MAX(/px)"}
DEALS: list[dict[str, object]] = [
    {"id": 1, "account": "A", "qty": 5, "px": 2.5},
    {"id": 2, "account": "A", "qty": 7, "px": 1.5},
    {"id": 3, "account": "B", "qty": 1, "px": 9},
    {"id": 4, "qty": 100, "px": 1},
]
ACCESS = (
    identity("maker", "maker")
    + grant("maker", "deals", "read topic-admin")
    + grant("maker", r"desk\..*", "create read topic-admin")
    + identity("reader", "reader")
    + grant("reader", r"desk\.shared", "read consume")
    + identity("part", "part")
    + grant("part", "deals", "read", 'hide = ["/px"]')
    + grant("part", r"desk\..*", "create")
    + identity("owner", "owner")
    + grant("owner", "deals", "read publish topic-admin")
    + grant("owner", r"desk\.shared", "read")
    + identity("stranger", "stranger")
    + grant("stranger", r"desk\..*", "create")
)


def complete(client: Client, name: str) -> Topic:
    """The view, once it is complete."""
    until(lambda: (status := client.describe_topic(name).view_status) is not None and status.complete, 10, name)
    return client.describe_topic(name)


def made(client: Client, name: str, source: str, **more: object) -> Topic:
    client.create_view(name, source=source, group_by="/account", select=SUMS, **more)  # type: ignore[arg-type]  # its arguments
    return complete(client, name)


def records(client: Client, name: str) -> dict[str, object]:
    return {record.key: record.data for record in client.query(name)}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("views")) as made:
        yield made
        assert made.terminate() == 0
        assert not made.faults()


@pytest.fixture
def client(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[Client]:
    """A client of a server whose topic `deals` and view `positions` are new."""
    with server.client() as client:
        for name in [topic.name for topic in client.topics() if topic.is_view] + ["deals"]:
            if name in [topic.name for topic in client.topics()]:
                client.delete_topic(name)
        client.create_topic("deals", key=["/id"], expiration="enabled")
        client.publish_many("deals", DEALS)
        made(client, "positions", "deals")
        yield client


# --- what a view has -------------------------------------------------------------------------------------------------


def test_a_view_has_the_sums_of_what_is_there_and_of_each_change(client: Client) -> None:
    found = client.describe_topic("positions")
    assert found.view == ViewDefinition(
        "deals", ("/account",), ("COUNT(*) AS n", "SUM(/qty) AS qty", "MAX(/px) AS high")
    )
    assert found.view_status is not None
    assert (found.view_status.complete, found.view_status.groups, found.view_status.ungrouped) == (True, 2, 1)
    assert records(client, "positions") == {
        "A": {"account": "A", "n": 2, "qty": 12, "high": 2.5},
        "B": {"account": "B", "n": 1, "qty": 1, "high": 9},
    }
    client.publish("deals", {"id": 1, "account": "B", "qty": 2, "px": 3})
    client.delta_publish("deals", {"id": 2, "qty": -7})
    assert records(client, "positions") == {
        "A": {"account": "A", "n": 1, "qty": -7, "high": 1.5},
        "B": {"account": "B", "n": 2, "qty": 3, "high": 9},
    }
    client.sow_delete("deals", keys=["2"])
    assert list(records(client, "positions")) == ["B"], "a group without records has no record"


def test_a_record_that_expires_leaves_its_view(client: Client) -> None:
    client.publish("deals", {"id": 9, "account": "C", "qty": 1}, ttl="1ms")
    until(lambda: "C" not in records(client, "positions"), 5, "the expiry")


def test_a_view_is_queried_by_filter_and_index_and_exported(client: Client) -> None:
    made(client, "sorted_deals", "deals", index=["/qty"], where="/qty < 50")
    plan = client.explain("sorted_deals", "/qty > 5")
    assert (plan.access, plan.index_path) == ("index", "/qty")
    assert [record.key for record in client.query("sorted_deals", "/qty > 5")] == ["A"]
    export = client.open_export("sorted_deals", parts=1)
    rows = [
        json.loads(payload)
        for part in range(len(export.parts))
        for packed in client.read_export(export.id, part)
        for payload in payloads(packed)
    ]
    assert rows == [
        {"account": "A", "n": 2, "qty": 12, "high": 2.5},
        {"account": "B", "n": 1, "qty": 1, "high": 9},
    ]


def test_without_groups_a_view_has_a_record_for_each(client: Client) -> None:
    client.create_view("slim_deals", source="deals", where="/px > 2", select="/account, /px * /qty AS notional")
    complete(client, "slim_deals")
    assert records(client, "slim_deals") == {
        "1": {"account": "A", "notional": 12.5},
        "3": {"account": "B", "notional": 9},
    }
    client.publish("deals", {"id": 1, "account": "A", "qty": 5, "px": 1})
    assert list(records(client, "slim_deals")) == ["3"]


# --- following it ----------------------------------------------------------------------------------------------------


def test_a_view_is_followed_with_a_snapshot_and_out_of_focus(client: Client) -> None:
    with client.sow_and_subscribe("positions", "/qty > 5", oof=True) as changes:
        seen = []
        for change in changes:
            seen.append((change.op, change.key))
            if change.op == "snapshot_end":
                client.publish_many("deals", [{"id": 5, "account": "B", "qty": 8}, {"id": 6, "account": "B", "qty": 1}])
                client.sow_delete("deals", keys=["1", "2"])
            if change.op == "oof":
                break
    assert seen[:2] == [("sow", "A"), ("snapshot_end", "")]
    assert ("put", "B") in seen
    assert seen[-1] == ("oof", "A")


def test_a_durable_consumes_a_view(client: Client) -> None:
    with client.durable("positions", "billing"):
        pass
    client.publish("deals", {"id": 1, "account": "A", "qty": 6, "px": 2})
    with client.durable("positions", "billing") as changes:
        change = next(changes)
        assert change.record is not None
        assert (change.key, change.record.data["qty"]) == ("A", 13)


def test_an_atomic_request_changes_a_group_once(client: Client) -> None:
    with client.subscribe("positions") as changes:
        client.publish_many("deals", [{"id": n, "account": "D", "qty": 1} for n in range(10, 20)], atomic=True)
        change = next(changes)
        assert change.record is not None
        assert (change.key, change.record.data["n"]) == ("D", 10)


def test_a_subscription_to_a_pattern_takes_a_view_in(client: Client) -> None:
    client.create_topic("late.source", key=["/id"])
    try:
        with client.subscribe(topic_pattern=r"late\..*") as changes:
            client.create_view("late.view", source="late.source", select="COUNT(*) AS n")
            complete(client, "late.view")
            client.publish("late.source", {"id": 1})
            found = {next(changes).topic for _ in range(2)}
    finally:
        client.delete_topic("late.view")
        client.delete_topic("late.source")
    assert found == {"late.source", "late.view"}


# --- what is refused -------------------------------------------------------------------------------------------------


def test_nothing_is_written_to_a_view(client: Client) -> None:
    writes = [
        lambda: client.publish("positions", {"account": "A", "qty": 1}),
        lambda: client.sow_delete("positions", keys=["A"]),
        lambda: client.sow_delete("positions", filter="/qty > 0"),
        lambda: client.touch("positions", "A", ttl="1h"),
        lambda: client.restamp("positions", "set", ttl="1h"),
        lambda: client.open_load("positions"),
    ]
    assert {reason_of(write) for write in writes} == {"VIEW_READ_ONLY"}
    assert reason_of(lambda: client.alter_topic("positions", expiration="30s")) == "INVALID_ARGUMENT"


def test_a_source_stays_as_it_is_while_it_has_views(client: Client) -> None:
    with pytest.raises(FailedPrecondition) as caught:
        client.delete_topic("deals")
    assert (caught.value.reason, caught.value.details["views"]) == ("TOPIC_HAS_VIEWS", "positions")
    assert "positions" in caught.value.message
    client.delete_topic("positions")
    client.delete_topic("deals")
    client.create_topic("deals", key=["/id"])


@pytest.mark.parametrize(
    ("definition", "reason", "field"),
    [
        ({"select": "SUM(/qty) + /px AS s"}, "EXPRESSION_INVALID", "view.select[0]"),
        ({"select": "COUNT(DISTINCT /px) AS d"}, "EXPRESSION_INVALID", "view.select"),
        ({"group_by": "/a, SUM(/b) AS s", "select": "COUNT(*) AS n"}, "EXPRESSION_INVALID", "view.group_by[1]"),
        ({"where": "/qty >", "select": "COUNT(*) AS n"}, "FILTER_INVALID", "view.where"),
        ({"source": "missing", "select": "COUNT(*) AS n"}, "TOPIC_NOT_FOUND", "view.source"),
        ({"source": "positions", "select": "COUNT(*) AS n"}, "INVALID_ARGUMENT", "view.source"),
    ],
)
def test_a_definition_is_refused_at_its_place(
    client: Client, definition: dict[str, str], reason: str, field: str
) -> None:
    with pytest.raises(SowError) as caught:
        client.create_view("mistakes", **{"source": "deals"} | definition)  # type: ignore[arg-type]  # texts, all of them
    assert (caught.value.reason, caught.value.details["field"]) == (reason, field)
    if "position" in caught.value.details:
        assert "^" in caught.value.message, "a caret shows the place"
    assert "mistakes" not in [topic.name for topic in client.topics()]


def test_a_view_of_that_name_is_there_already(client: Client) -> None:
    assert reason_of(lambda: client.create_view("positions", source="deals", select="COUNT(*) AS n")) == "TOPIC_EXISTS"
    there = client.create_view("positions", source="deals", select="COUNT(*) AS n", exist_ok=True)
    assert there.view is not None
    assert there.view.group_by == ("/account",)


def test_the_asynchronous_client_makes_views_too(client: Client, server: ServerProcess) -> None:
    async def make() -> Topic:
        async with AsyncClient(server.address) as own:
            return await own.create_view("aio_deals", source="deals", select="COUNT(*) AS n")

    assert asyncio.run(make()).view == ViewDefinition("deals", (), ("COUNT(*) AS n",))
    complete(client, "aio_deals")
    assert records(client, "aio_deals") == {"*": {"n": 4}}


# --- access ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("guarded")
    write_access(folder, ACCESS)
    with (
        ServerProcess(folder, GUARDED) as server,
        client_of(server, "root") as root,
        client_of(server, "maker") as maker,
    ):
        root.create_topic("deals", key=["/id"])
        root.publish_many("deals", DEALS)
        made(maker, "desk.shared", "deals")
        made(maker, "desk.concealed", "deals")
        yield server


def test_who_may_not_read_the_source_makes_no_view_of_it(guarded: ServerProcess) -> None:
    """`stranger` has no grant on the source, and hears the same as of a topic that does not exist."""
    with client_of(guarded, "stranger") as stranger, client_of(guarded, "part") as part:
        for source in ("deals", "missing"):
            with pytest.raises(NotFound) as caught:
                stranger.create_view("desk.s", source=source, select="COUNT(*) AS n")
            assert (caught.value.reason, caught.value.details["field"]) == ("TOPIC_NOT_FOUND", "view.source")
            assert caught.value.message.replace(source, "X").endswith("topic: there is no topic 'X'")
        with pytest.raises(PermissionDenied):
            part.create_view("desk.p", source="deals", select="COUNT(*) AS n")
        with pytest.raises(PermissionDenied):
            client_of(guarded, "reader").create_view("desk.shared2", source="deals", select="COUNT(*) AS n")


def test_a_reader_of_a_view_needs_no_rights_on_the_source_and_does_not_see_it(guarded: ServerProcess) -> None:
    with client_of(guarded, "reader") as reader:
        assert records(reader, "desk.shared")["A"] == {"account": "A", "n": 2, "qty": 12, "high": 2.5}
        found = reader.describe_topic("desk.shared")
        assert (found.view, found.is_view) == (None, True), "the definition tells of the source"
        assert [topic.name for topic in reader.topics()] == ["desk.shared"]
    with client_of(guarded, "maker") as maker:
        assert (view := maker.describe_topic("desk.shared").view) is not None
        assert view.source == "deals"


def test_only_views_that_the_caller_sees_are_named(guarded: ServerProcess) -> None:
    with client_of(guarded, "owner") as owner, pytest.raises(FailedPrecondition) as caught:
        owner.delete_topic("deals")
    assert (caught.value.reason, caught.value.details["views"]) == ("TOPIC_HAS_VIEWS", "desk.shared")
    assert "concealed" not in str(caught.value)


# --- while it is built, and after a kill -----------------------------------------------------------------------------

MANY = 30_000


def refusal_of_a_get(address: str, topic: str) -> SowError:
    """As a client hears it that does not try again; ours do, a few times."""
    with grpc.insecure_channel(address) as channel:
        stub = sow_pb2_grpc.SowServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Get(sow_pb2.GetRequest(topic=topic, keys=["1"]))
    return error_of_status(caught.value)


def test_a_view_that_was_being_built_when_the_server_was_killed_is_complete_and_right(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server:
        with server.client() as client:
            client.create_topic("deals", key=["/id"])
            with client.publisher("deals", durability="buffered") as publisher:
                for number in range(MANY):
                    publisher.publish({"id": number, "account": number % 7, "qty": number, "px": number % 13})
            client.create_view("positions", source="deals", group_by="/account", select=SUMS)
            refusal = refusal_of_a_get(server.address_of("positions"), "positions")
            assert (refusal.reason, refusal.retry_after) == ("VIEW_BUILDING", 1.0)
            assert isinstance(refusal, Unavailable)
        server.kill9()
        server.start()
        with server.client() as client:
            client.publish("deals", {"id": 0, "account": 6, "qty": 1, "px": 99})
            found = complete(client, "positions")
            assert found.view_status is not None
            assert found.view_status.groups == 7
            wanted = {
                str(rest): {
                    "account": rest,
                    "n": len(members := [n for n in range(1, MANY) if n % 7 == rest]) + (rest == 6),
                    "qty": sum(members) + (rest == 6),
                    "high": 99 if rest == 6 else 12,
                }
                for rest in range(7)
            }
            assert records(client, "positions") == wanted
            assert {
                record.key: {**record.data} for record in client.query("deals", group_by="/account", aggregate=SUMS)
            } == wanted, "the same as asked once"
        assert server.terminate() == 0
        assert not server.faults()


# --- the configuration -----------------------------------------------------------------------------------------------

CONFIG = """
[topics.deals]
key = ["/id"]
[views.positions]
source = "deals"
group_by = ["/account"]
select = { n = "COUNT(*)", qty = "SUM(/qty)" }
"""


def test_the_configuration_owns_its_views(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, CONFIG) as server:
        with server.client() as client:
            client.publish_many("deals", DEALS)
            assert records(client, "positions")["A"] == {"account": "A", "n": 2, "qty": 12}
            assert reason_of(lambda: client.delete_topic("positions")) == "SET_IN_CONFIG"
            created = client.describe_topic("positions").create_time
        server.terminate()
        server.start()
        with server.client() as client:
            assert client.describe_topic("positions").create_time == created, "the same definition is the same view"
        server.terminate()
        server.configure(CONFIG.replace('"SUM(/qty)"', '"SUM(/qty * 2)"'))
        server.start()
        with server.client() as client:
            complete(client, "positions")
            assert records(client, "positions")["A"] == {"account": "A", "n": 2, "qty": 24}
        server.terminate()
        server.configure(CONFIG.replace("SUM(/qty)", "SUM(/qty"))
        with pytest.raises(DidNotStart) as caught:
            server.start()
        assert "[views.positions]: view.select[1]: " in caught.value.said
        server.configure(CONFIG.partition("[views")[0])
        server.start()
        with server.client() as client:
            assert records(client, "positions")["A"] == {"account": "A", "n": 2, "qty": 24}, "what left the file stays"
            client.delete_topic("positions")


def test_a_definition_of_wrong_type_is_refused_by_the_client(client: Client) -> None:
    with pytest.raises(InvalidArgument, match="select: an expression is empty"):
        client.create_view("mistakes", source="deals", select="COUNT(*) AS n, ")
