"""Callers that look for holes, against a real server with an access file (rules A3 to A7)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from sow.v1 import snapshot_pb2, snapshot_pb2_grpc
from sow_client import AsyncClient, Client, Gap, NotFound, PermissionDenied, ResourceExhausted, SowError
from sow_server.access.audit import Part
from sow_server.subscriptions.journal.replay import READ_CHANGES
from tests.support.oracles.access import GUARDED, audit_file, client_of, grant, identity, write_access
from tests.support.servers.server import ServerProcess, until

DESK = (("authorization", "Bearer desk"),)
EU = "rows = \"/region = 'eu'\"\n"
ACCESS = (
    identity("desk", "desk")
    + grant("desk", "orders|gaps", "read consume publish", EU)
    + identity("admin", "admin")
    + grant("admin", "secret|open", "topic-admin create")
    + grant("admin", "open", "read publish")
    + grant("admin", "part", "publish", EU)
    + grant("admin", "mine", "read topic-admin create publish")
    + identity("reader", "reader")
    + grant("reader", "orders", "read")
    + identity("few", "few")
    + grant("few", "orders", "read consume load")
    + "[roles.few.limits]\nexports = 1\ndurables = 1\nloads = 1\n"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("hostile")
    write_access(folder, ACCESS)
    with ServerProcess(folder, GUARDED + '[journal]\nprune_interval = "200ms"\n') as made:
        with client_of(made, "root") as root:
            for name in ("orders", "secret", "mine"):
                root.create_topic(name, key=["/id"], retain_time="1h")
            for name in ("open", "part"):
                root.create_topic(name)
        yield made


@pytest.fixture
def root(server: ServerProcess) -> Iterator[Client]:
    with client_of(server, "root") as client:
        yield client


def sequence_of(bookmark: str) -> int:
    return int(bookmark.rpartition(".")[2])


# --- reading by detours ----------------------------------------------------------------------------------------------


def test_dead_letters_carry_no_records_to_where_a_caller_may_read_them(server: ServerProcess) -> None:
    """Story: who may alter a topic and not read it sent all of its records, as dead letters, to a topic of its own."""
    with client_of(server, "admin") as admin:
        with pytest.raises(PermissionDenied, match="read on secret"):
            admin.alter_topic("secret", dead_letter="open", max_age="1s")
        with pytest.raises((PermissionDenied, NotFound)):
            admin.create_topic("secret", key=["/id"], dead_letter="open")
        with pytest.raises(PermissionDenied, match=r"publish on .*part"):
            admin.alter_topic("mine", dead_letter="part")  # letters would not be judged by its rows
        with pytest.raises(NotFound):
            admin.alter_topic("mine", dead_letter="orders")  # it may not even see that one
        assert admin.alter_topic("mine", dead_letter="open").settings.dead_letter == "open"


def test_figures_of_durables_do_not_count_hidden_records(root: Client, server: ServerProcess) -> None:
    """Story: a rewind and a cleared backlog told how many changes a topic had, those of hidden records included."""
    root.publish("orders", {"id": "eu", "region": "eu"})
    with client_of(server, "desk") as desk:
        with desk.durable("orders", "counting", start="earliest") as consumer:
            next(iter(consumer))
        for number in range(7):
            root.publish("orders", {"id": str(number), "region": "us"})
        assert desk.rewind("orders", "counting", "earliest").unacknowledged_entries == 0
        assert desk.clear_backlog("orders", "counting") == 0
        desk.delete_durable("orders", "counting")


def test_a_gap_does_not_count_hidden_records(root: Client, server: ServerProcess) -> None:
    root.create_topic("gaps", key=["/id"], retain_time="1h", backlog_quota_entries=3, backlog_action="evict")
    with client_of(server, "desk") as desk:
        root.publish("gaps", {"id": "eu", "region": "eu"})
        with desk.durable("gaps", "late", start="earliest") as consumer:
            next(iter(consumer))
        for number in range(9):
            root.publish("gaps", {"id": str(number), "region": "us"})
        root.publish("gaps", {"id": "eu", "region": "eu"})

        def evicted() -> bool:
            figures = root.describe_durable("gaps", "desk/late").figures
            return figures is not None and figures.unacknowledged_entries <= 3

        until(evicted, 20, "the eviction")
        gaps: list[Gap] = []
        with desk.durable("gaps", "late", on_gap=gaps.append) as consumer:
            next(iter(consumer))
        assert gaps
        assert not any(gap.entries for gap in gaps)


def test_a_plan_does_not_tell_where_hidden_records_changed(root: Client, server: ServerProcess) -> None:
    """Story: a range of at most one entry ended with the next change of the topic, also with one that is hidden, and so
    did each of its parts. Without other topics' changes in between, every plan showed how many there were."""
    with client_of(server, "desk") as desk:
        start = desk.plan_changes("orders", start="latest").head
        ends = []
        for topic, key in (("orders", None), ("open", "key")):  # as many changes of a topic that it may not see
            for number in range(20):
                root.publish(topic, {"id": str(number), "region": "us"}, key=key)
            plan = desk.plan_changes("orders", start=start, max_entries=3, parts=2)
            whole = desk.plan_changes("orders", start=start, parts=4)
            told = (*plan.part_ends, plan.end, *whole.part_ends, whole.end)
            ends.append([sequence_of(bookmark) - sequence_of(start) for bookmark in told])
            assert (plan.bytes, whole.bytes) == (0, 0)
            start = desk.plan_changes("orders", start="latest").head
        assert ends[0] == ends[1]


def test_changes_that_are_read_do_not_tell_how_many_were_hidden(root: Client, server: ServerProcess) -> None:
    """Story: a batch came with the position of the last change that was looked at, and not of the last one that it
    had; so it told where a hidden one was."""
    with client_of(server, "desk") as desk:
        start = desk.plan_changes("orders", start="latest").head
        root.publish("orders", {"id": "seen", "region": "eu"})
        hidden = [{"id": f"hidden-{number}", "region": "us"} for number in range(2 * READ_CHANGES)]
        for begin in range(0, len(hidden), 1_000):
            root.publish_many("orders", hidden[begin : begin + 1_000])
        root.publish("orders", {"id": "seen", "region": "eu"})
        end = desk.plan_changes("orders", start="latest").head
    asked = snapshot_pb2.ReadChangesRequest(topic="orders", start_bookmark=start, end_bookmark=end)
    asked.columns.append(snapshot_pb2.PACKED_COLUMN_SEQUENCE)
    with grpc.insecure_channel(server.address) as channel:
        stub = snapshot_pb2_grpc.SnapshotServiceStub(channel)
        found = [answer for answer in stub.ReadChanges(asked, metadata=DESK) if answer.HasField("batch")]
    assert [answer.batch.count for answer in found] == [1, 1]
    assert sequence_of(found[0].bookmark) - sequence_of(start) == 1, "the bookmark is that of the change itself"
    assert found[1].bookmark == end


def test_an_export_shows_no_more_than_its_owner_may_see_by_now(tmp_path: Path) -> None:
    """Story: who had opened an export kept what it showed then, for its lease of up to a day, whatever was taken from
    the caller since."""
    write_access(tmp_path, identity("desk", "desk") + grant("desk", "orders", "read"))
    with ServerProcess(tmp_path, GUARDED) as server, client_of(server, "root") as root:
        root.create_topic("orders", key=["/id"])
        root.publish("orders", {"id": "us", "region": "us"})
        with client_of(server, "desk") as desk:
            wide = desk.open_export("orders")
            assert sum(batch.count for batch in desk.read_export(wide.id, 0)) == 1
            write_access(tmp_path, identity("desk", "desk") + grant("desk", "orders", "read", EU))
            root.reload_access()
            with pytest.raises(NotFound):
                list(desk.read_export(wide.id, 0))


def test_the_durables_of_others_are_in_no_figure(root: Client, server: ServerProcess) -> None:
    """Story: the figures of a topic named its slowest durable, with the identity that owns it."""
    root.publish("orders", {"id": "eu", "region": "eu"})
    with client_of(server, "desk") as desk, desk.durable("orders", "slow", start="earliest") as consumer:
        next(iter(consumer))
    with client_of(server, "reader") as reader:
        statistics = reader.describe_topic("orders").statistics
        assert statistics is not None
        assert not statistics.slowest_durable
        (listed,) = reader.topics(with_statistics=True)
        assert "desk" not in str(listed)
    assert "desk/slow" in str(root.describe_topic("orders").statistics)
    root.delete_durable("orders", "desk/slow")


# --- using up --------------------------------------------------------------------------------------------------------


def test_a_name_that_no_topic_can_have_costs_nothing(server: ServerProcess) -> None:
    """Story: decisions are remembered by name, so a caller without any grant filled the memory with long names."""
    with client_of(server, "desk") as desk:
        before = server.resident_bytes
        for number in range(100):
            with pytest.raises(SowError) as refused:
                desk.get(f"{number}-" + "x" * 2**21, "key")
            assert refused.value.reason == "TOPIC_NAME_INVALID"
        assert server.resident_bytes - before < 100 * 2**20


def test_limits_hold_for_what_is_asked_for_at_the_same_time(server: ServerProcess) -> None:
    """Story: what was not finished did not count yet, so a caller that asked for everything at once got all of it."""

    async def main() -> None:
        async with AsyncClient(server.address, token="few") as few:
            here = (await few.plan_changes("orders", start="latest")).head
            for limit, ask in (
                ("exports", lambda number: few.open_export("orders")),
                ("loads", lambda number: few.open_load("orders")),
                ("durables", lambda number: few.pin_journal("orders", f"pin-{number}", here)),
            ):
                results = await asyncio.gather(*[ask(number) for number in range(12)], return_exceptions=True)
                refused = [found for found in results if isinstance(found, ResourceExhausted)]
                assert len(refused) == 11, (limit, results)
                assert {found.details["limit"] for found in refused} == {limit}

    asyncio.run(main())


# --- the audit log ---------------------------------------------------------------------------------------------------


def test_names_with_control_characters_forge_no_line(server: ServerProcess) -> None:
    with client_of(server, "desk") as desk:
        for name in ('x\n{"event": "forged"}', "x\u2028forged", "\x1b[2Jforged"):
            with pytest.raises(SowError):
                desk.count(name)
            with pytest.raises(SowError):
                desk.delete_durable("orders", name)
    lines = [line for part in Part for line in audit_file(server.config.parent, part).read_bytes().splitlines()]
    assert all(json.loads(line)["event"] != "forged" for line in lines)
    assert all(byte >= 0x20 for line in lines for byte in line)
