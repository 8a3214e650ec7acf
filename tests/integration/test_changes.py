"""Ranges of changes on a real server, by both clients: planned, read in parts, killed in their midst, pinned."""

from __future__ import annotations

import itertools
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from sow_client import EARLIEST, Change, Client, PackedRecords
from sow_client.errors import FailedPrecondition, InvalidArgument, NotFound, ResyncRequired
from tests.support.servers.forked_commands import sow
from tests.support.servers.server import ServerProcess, until
from tests.support.simulation.clients import Connect, connect

CONFIG = """
[journal]
prune_interval = "100ms"
[topics.orders]
key = ["/id"]
expiration = "enabled"
[topics.short]
retain_time = "100ms"
retain_bytes = "unlimited"
[topics.quiet]
journal = false
retain_time = "0s"
retain_bytes = "0"
"""
PUT, DELETE, EXPIRE = 1, 3, 4

__all__ = ["connect"]  # a fixture

pytestmark = pytest.mark.one_client


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path, CONFIG) as running:
        yield running
        assert running.faults() == []


@pytest.fixture
def client(server: ServerProcess, connect: Connect) -> Iterator[Client]:
    with connect(server.address) as connected:
        yield connected


def texts(data: bytes, offsets: bytes) -> list[bytes]:
    at = [offset for (offset,) in struct.iter_unpack("<i", offsets)]
    return [data[begin:end] for begin, end in itertools.pairwise(at)]


def numbers(column: bytes) -> list[int]:
    return [number for (number,) in struct.iter_unpack("<q", column)]


def keys(batches: list[PackedRecords]) -> list[bytes]:
    return [key for batch in batches for key in texts(batch.keys, batch.key_offsets)]


def publish(client: Client, count: int, *, first: int = 0, topic: str = "orders") -> None:
    client.publish_many(topic, [{"id": number, "v": number % 3} for number in range(first, first + count)])


def test_parts_of_a_range_have_all_of_it_in_every_column(client: Client) -> None:
    begin = client.plan_changes("orders", start=EARLIEST)
    assert (begin.start, begin.entries, begin.part_ends) == (begin.end, 0, ())
    publish(client, 5000)
    client.sow_delete("orders", keys=["3"])
    client.publish("orders", {"id": 7, "v": 0}, ttl="0s")
    until(lambda: client.get("orders", "7") is None, 10, "the record to expire")
    until(lambda: client.plan_changes("orders", start=begin.end).entries == 5003, 10, "the sweep")
    plan = client.plan_changes("orders", start=begin.end, parts=4)
    assert (plan.entries, plan.entries_left, plan.end) == (5003, 0, plan.head)
    assert 2 <= len(plan.part_ends) <= 4
    columns = ("payload", "key", "version", "publish_time", "expire_time", "origin", "sequence", "op")
    batches: list[PackedRecords] = []
    start = plan.start
    for end in plan.part_ends:
        batches += client.read_changes("orders", start, end, columns=columns, batch_size=700)
        start = end
    assert keys(batches) == [b"%d" % number for number in range(5000)] + [b"3", b"7", b"7"]
    assert max(batch.count for batch in batches) <= 700
    ops = b"".join(batch.ops for batch in batches)
    assert ops == bytes([PUT] * 5000 + [DELETE, PUT, EXPIRE])
    assert b"".join(batch.reasons for batch in batches) == bytes(5003)
    sequences = [number for batch in batches for number in numbers(batch.sequences)]
    assert sequences == sorted(set(sequences))
    last = batches[-1]
    assert texts(last.payloads, last.payload_offsets)[-3:] == [b'{"id":3,"v":0}', b'{"id":7,"v":0}', b'{"id":7,"v":0}']
    assert numbers(last.expire_times)[-3] == 2**63 - 1
    assert numbers(last.expire_times)[-2] == numbers(last.publish_times)[-2]
    assert numbers(last.versions)[-2] == numbers(last.versions)[-1]
    assert len(last.origin_names) == 1
    assert last.origins == b""
    matching = list(client.read_changes("orders", plan.start, plan.end, filter="/v = 1", columns=["key"], lines=True))
    # 7 was 1 before it was 0.
    assert keys(matching) == [b"%d" % number for number in range(5000) if number % 3 == 1] + [b"7"]
    assert matching[0].payloads == matching[0].ops == b""
    (lines,) = client.read_changes("orders", plan.part_ends[-2], plan.end, lines=True, batch_size=100_000)
    assert lines.payloads.count(b"\n") == lines.count
    assert list(client.read_changes("orders", plan.end, plan.end)) == []


@pytest.mark.both_clients
def test_the_changes_of_a_range_are_those_of_a_subscription(client: Client) -> None:
    begin = client.plan_changes("orders", start="latest").end
    publish(client, 20)
    client.touch("orders", "5", ttl="1h")
    client.sow_delete("orders", keys=["3", "4"])
    publish(client, 3)
    plan = client.plan_changes("orders", start=begin)
    ranged = list(client.changes("orders", plan.start, plan.end))
    with client.subscribe("orders", start=begin, changes=True) as followed:
        told = list(itertools.islice(followed, plan.entries))
    assert len(ranged) == plan.entries == 26
    assert [replaced(change) for change in ranged] == [replaced(change) for change in told]
    matching = [change.key for change in client.changes("orders", begin, plan.end, filter="/id = 3", history=begin)]
    assert matching == [change.key for change in client.changes("orders", begin, plan.end, keys=["3"])] == ["3", "3"]


def replaced(change: Change) -> Change:
    """A change without its bookmark: a range is continued at its end."""
    return msgspec.structs.replace(change, bookmark=None)


def test_admission_by_entries_and_bytes_and_a_start_by_time(client: Client) -> None:
    publish(client, 100)
    between = datetime.now(UTC)
    publish(client, 100, first=100)
    first = client.plan_changes("orders", start="earliest", max_entries=150)
    assert (first.entries, first.entries_left) == (100, 100)
    second = client.plan_changes("orders", start=first.end, max_bytes=1)
    assert (second.entries, second.entries_left) == (100, 0), "one commit at least"
    assert client.plan_changes("orders", start=between).entries == 100
    # Clocks differ a little; a time that has not come is refused.
    assert client.plan_changes("orders", start=datetime.now(UTC) + timedelta(seconds=2)).start == second.head
    assert client.plan_changes("orders", start="earliest", end=first.end).end == first.end


def test_a_start_in_the_future_is_refused(server: ServerProcess, client: Client) -> None:
    """S4: a subscriber that asked to start at a time in the future was given changes from now on."""
    publish(client, 1)
    tomorrow = datetime.now(UTC) + timedelta(days=1)

    def refused(run: Callable[[], object], field: str) -> None:
        with pytest.raises(FailedPrecondition) as caught:
            run()
        assert (caught.value.reason, caught.value.details["field"]) == ("TIME_IN_FUTURE", field)
        assert abs(int(caught.value.details["now_micros"]) - time.time_ns() // 1000) < 60_000_000

    refused(lambda: next(iter(client.subscribe("orders", start=tomorrow))), "start_time_micros")
    refused(lambda: client.plan_changes("orders", start=tomorrow), "start_time_micros")
    refused(lambda: next(iter(client.durable("orders", "later", start=tomorrow))), "start_time_micros")
    assert list(client.durables("orders")) == []
    with client.durable("orders", "later", start=EARLIEST) as consumer:
        assert next(iter(consumer)).key == "0"
    refused(lambda: client.rewind("orders", "later", tomorrow), "time_micros")

    for arguments in (
        ("subscribe", "orders", "--from", tomorrow.isoformat()),
        ("durable", "rewind", "orders", "later", tomorrow.isoformat()),
    ):
        run = subprocess.run(
            [sow(), "--server", server.address, *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert run.returncode != 0
        assert "ahead of this server's clock; give a time that has passed" in run.stderr, "also right for a rewind"


def test_refusals_name_the_fault(client: Client) -> None:
    publish(client, 3)
    plan = client.plan_changes("orders", start="earliest")
    foreign = "0123456789ab.1"
    ahead = plan.end.split(".")[0] + ".99999999"
    with pytest.raises(NotFound):
        client.plan_changes("absent", start="earliest")
    for bookmark, reason in ((foreign, "BOOKMARK_OTHER_EPOCH"), (ahead, "BOOKMARK_IN_FUTURE")):
        with pytest.raises(ResyncRequired) as refused:
            client.plan_changes("orders", start=bookmark)
        assert refused.value.reason == reason
        with pytest.raises(ResyncRequired) as refused:
            list(client.read_changes("orders", plan.start, bookmark))
        assert refused.value.reason == reason
        with pytest.raises(ResyncRequired) as refused:
            client.pin_journal("orders", "query", bookmark)
        assert refused.value.reason == reason
    for call in (
        lambda: client.plan_changes("orders", start="earliest", parts=10_001),
        lambda: client.plan_changes("orders", start=plan.end, end=plan.start),
        lambda: list(client.read_changes("orders", plan.end, plan.start)),
        lambda: list(client.read_changes("orders", plan.start, plan.end, history=plan.end)),
        lambda: list(client.read_changes("orders", plan.start, plan.end, filter="NOW_MICROS() > 1")),
        lambda: list(client.read_changes("orders", plan.start, plan.end, filter="/v =")),
        lambda: list(client.read_changes("orders", plan.start, plan.end, batch_size=100_001)),
        lambda: list(client.read_changes("orders", plan.start, plan.end, columns=["value"])),
        lambda: client.read_changes("orders", plan.start, plan.end, batch_size=-1),
        lambda: client.plan_changes("orders", start="earliest", parts=-1),
        lambda: client.pin_journal("orders", "no name", plan.end),
        lambda: client.pin_journal("orders", "query", plan.end, idle_ttl="1ms"),
        lambda: client.pin_journal("orders", "query", plan.end, idle_ttl="8d"),
        lambda: client.pin_journal("orders", "query", plan.end, reader="r" * 201),
        lambda: client.pin_journal("orders", "query", plan.end, reader="two\nlines"),
    ):
        with pytest.raises(InvalidArgument):
            call()
    with pytest.raises(FailedPrecondition) as unjournaled:
        client.plan_changes("quiet", start="latest")
    assert unjournaled.value.reason == "NO_JOURNAL"


def test_a_server_that_is_killed_while_a_range_is_read(server: ServerProcess, client: Client) -> None:
    """The reading goes on after the last batch: nothing is missing, nothing comes twice."""
    begin = client.plan_changes("orders", start="latest").end
    publish(client, 20_000)
    client.publish_many("orders", [{"id": f"x{number}"} for number in range(1000)], atomic=True)
    plan = client.plan_changes("orders", start=begin)
    reading = client.read_changes("orders", plan.start, plan.end, columns=("key", "payload"), batch_size=100)
    found = [next(reading) for _ in range(3)]
    server.kill9()
    server.start()
    publish(client, 10, first=50_000)
    found += reading
    expected = [b"%d" % number for number in range(20_000)] + [b"x%d" % number for number in range(1000)]
    assert keys(found) == expected
    again = list(client.read_changes("orders", plan.start, plan.end, columns=("key",)))
    assert keys(again) == expected
    assert client.plan_changes("orders", start=plan.end).entries == 10


def test_a_pin_tells_who_reads_until_a_consumer_attaches(server: ServerProcess, client: Client) -> None:
    """J18: also after a restart of the server, and a renewal without the text keeps it."""
    publish(client, 2)
    head = client.plan_changes("orders", start="latest").end
    client.pin_journal("orders", "query", head, reader="a query of ana")
    server.kill9()
    server.start()
    client.pin_journal("orders", "query", head)
    pin = client.describe_durable("orders", "query")
    assert (pin.pin, pin.reader, pin.owner) == (True, "a query of ana", "")
    with client.durable("orders", "query"):
        pass
    ordinary = client.describe_durable("orders", "query")
    assert (ordinary.pin, ordinary.reader) == (False, "")
    client.delete_durable("orders", "query")


def test_a_pin_keeps_changes_beyond_retention(client: Client) -> None:
    client.publish("short", {"n": 1}, key="a")
    begin = client.plan_changes("short", start="latest").end
    pin = client.pin_journal("short", "spark", begin, idle_ttl="1h")
    assert (pin.bookmark, pin.created) == (begin, True)
    client.publish("short", {"n": 2}, key="a")
    end = client.plan_changes("short", start=begin).end
    assert client.pin_journal("short", "spark", begin).created is False
    (durable,) = client.durables("short")
    assert (durable.name, durable.filter or "") == ("spark", "")
    until(lambda: client.plan_changes("short", start="earliest").start == begin, 10, "all before it to be pruned")
    assert [batch.payloads for batch in client.read_changes("short", begin, end)] == [b'{"n":2}']
    client.delete_durable("short", "spark")
    until(lambda: client.plan_changes("short", start="earliest").entries == 0, 10, "the rest to be pruned")
    with pytest.raises(ResyncRequired) as refused:
        list(client.read_changes("short", begin, end))
    assert refused.value.reason == "BOOKMARK_TOO_OLD"
    assert refused.value.details["earliest_bookmark"]
