"""Exports through the contract and both clients: columns, errors, cut connections, a server that goes (rule Q6)."""

from __future__ import annotations

import asyncio
import json
import threading
from array import array
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final

import grpc
import pytest

from sow.v1 import snapshot_pb2, snapshot_pb2_grpc
from sow_client import (
    AsyncClient,
    Client,
    Export,
    ExportOf,
    NotFound,
    PackedColumn,
    PackedRecords,
    SowError,
    Unavailable,
)
from tests.support.servers.proxy import Proxy
from tests.support.servers.server import ServerProcess
from tests.support.simulation.clients import Connect, connect

CONFIG: Final = """
[topics.large]
key = ["/n"]
expiration = "enabled"
[topics.pretty]
[topics.going]
key = ["/n"]
[topics.still]
key = ["/n"]
journal = false
[limits]
exports_max = 4
"""
LARGE: Final = 40_000
PAD: Final = "x" * 400
KEY: Final = snapshot_pb2.PACKED_COLUMN_KEY
OP: Final = snapshot_pb2.PACKED_COLUMN_OP
UNSPECIFIED: Final = snapshot_pb2.PACKED_COLUMN_UNSPECIFIED

__all__ = ["connect"]  # a fixture

pytestmark = pytest.mark.one_client


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("exports"), CONFIG) as made:
        with made.client() as client:
            publish_large(client)
        yield made
        assert made.terminate() == 0
        assert not made.faults()


@pytest.fixture
def client(server: ServerProcess, connect: Connect) -> Iterator[Client]:
    with connect(server.address) as made:
        yield made


def publish_large(client: Client) -> None:
    with client.publisher("large", durability="buffered") as publisher:
        for number in range(LARGE):
            publisher.publish({"n": number, "pad": PAD})


def payloads(records: PackedRecords) -> list[bytes]:
    return cells(records.payloads, records.payload_offsets)


def cells(joined: bytes, offsets: bytes) -> list[bytes]:
    ends = array("i", offsets)
    return [joined[start:stop] for start, stop in pairwise(ends)]


def numbers(batches: Iterator[PackedRecords]) -> list[int]:
    return [json.loads(payload)["n"] for records in batches for payload in payloads(records)]


@pytest.mark.both_clients
def test_parts_are_the_topic_while_publishing_goes_on(client: Client) -> None:
    export = client.open_export("large", parts=5)
    stop = threading.Event()

    def disturb() -> None:
        number = 0
        while not stop.is_set():
            client.publish("large", {"n": LARGE + number}, ttl="1h")
            client.publish("large", {"n": number, "pad": "changed"})
            number += 1

    disturbing = threading.Thread(target=disturb)
    disturbing.start()
    try:
        found = [number for part in range(5) for number in numbers(client.read_export(export.id, part))]
        again = [number for part in (3, 1) for number in numbers(client.read_export(export.id, part, batch_size=777))]
    finally:
        stop.set()
        disturbing.join()
        client.sow_delete("large", filter=f"/n >= {LARGE}")
        client.publish_many("large", [{"n": number, "pad": PAD} for number in range(1000)])
    assert sorted(found) == list(range(LARGE))
    assert len(again) == export.parts[3] + export.parts[1]
    client.close_export(export.id)


def test_columns_equal_the_records_of_a_query(client: Client) -> None:
    names: tuple[PackedColumn, ...] = ("payload", "key", "version", "publish_time", "expire_time", "origin", "sequence")
    export = client.open_export("large", "/n < 50")
    expected = {record.key: record for record in client.query("large", "/n < 50")}
    found = 0
    for part in range(len(export.parts)):
        for records in client.read_export(export.id, part, columns=names):
            keys = [key.decode() for key in cells(records.keys, records.key_offsets)]
            assert [json.loads(payload)["n"] for payload in payloads(records)] == [int(key) for key in keys]
            assert [expected[key].version for key in keys] == array("q", records.versions).tolist()
            assert [expected[key].sequence for key in keys] == array("q", records.sequences).tolist()
            times = [int(expected[key].publish_time.timestamp() * 1e6) for key in keys]
            assert all(
                abs(one - other) <= 1 for one, other in zip(times, array("q", records.publish_times), strict=True)
            )
            assert set(array("q", records.expire_times)) == {2**63 - 1}
            assert (records.origins, records.origin_names) == (b"", (expected[keys[0]].origin,))
            assert records.ops == b""
            found += records.count
    assert found == 50
    client.close_export(export.id)


def test_lines_are_documents_also_where_these_have_line_breaks(client: Client) -> None:
    documents = ['{\n "a": 1\r\n}', '{"a":2}', '{"a":"\\n"}']
    client.publish_many("pretty", documents, keys=["1", "2", "3"])
    export = client.open_export("pretty")
    (records,) = client.read_export(export.id, 0, lines=True)
    assert [json.loads(line)["a"] for line in records.payloads.splitlines()] == [1, 2, "\n"]
    assert payloads(records) == [line + b"\n" for line in records.payloads.split(b"\n")[:-1]]
    (plain,) = client.read_export(export.id, 0)
    assert [payload.decode() for payload in payloads(plain)] == documents
    client.close_export(export.id)


def test_large_documents_come_without_the_fields_that_nobody_needs(client: Client) -> None:
    export = client.open_export("large", "/n < 500", parts=1)
    for lines in (False, True):
        found = [
            json.loads(payload)
            for records in client.read_export(export.id, 0, fields=["n", "other"], lines=lines, batch_size=100)
            for payload in payloads(records)
        ]
        assert sorted(document["n"] for document in found) == list(range(500))
        assert all(set(document) == {"n"} for document in found)
    with pytest.raises(SowError, match="fields: 101 are more than the limit of 100"):
        list(client.read_export(export.id, 0, fields=[f"f{number}" for number in range(101)]))
    with pytest.raises(SowError, match="fields: is the text 'n'"):
        client.read_export(export.id, 0, fields="n")
    client.close_export(export.id)


def test_small_documents_stay_whole_whatever_fields_are_needed(client: Client) -> None:
    client.sow_delete("going", all=True)
    client.publish("going", {"n": 1, "m": 2})
    export = client.open_export("going")
    (records,) = client.read_export(export.id, 0, fields=["m"])
    assert [json.loads(payload) for payload in payloads(records)] == [{"n": 1, "m": 2}]
    client.close_export(export.id)


def test_changes_after_the_bookmark_are_those_after_the_export(client: Client) -> None:
    client.sow_delete("going", all=True)
    client.publish("going", {"n": 1}, durability="buffered")
    export = client.open_export("going")
    client.publish("going", {"n": 2})
    assert export.bookmark is not None
    with client.subscribe("going", start=export.bookmark) as subscription:
        change = next(subscription)
    assert change.record is not None
    assert change.record.key == "2"
    assert numbers(client.read_export(export.id, 0)) == [1]
    client.publish("still", {"n": 1})
    assert client.open_export("still").bookmark is None


def totals(client: Client, export: Export) -> dict[str, int]:
    """By topic of an export: the number of its documents, or the sum of their `records`."""
    found = dict.fromkeys(export.topics, 0)
    for part, topic in enumerate(export.part_topics):
        for records in client.read_export(export.id, part):
            found[topic] += sum(json.loads(payload).get("records", 1) for payload in payloads(records))
    return found


@pytest.mark.both_clients
def test_several_topics_are_exported_at_one_instant(server: ServerProcess, client: Client) -> None:
    """Q6. A view changes in the commit of its source, so both are whole only at one instant. The topic behind them gets
    a record after each that is acknowledged."""
    client.create_topic("source", key=["/n"], exist_ok=True)
    client.create_view("counts", source="source", group_by=["/even"], select={"records": "COUNT(*)"}, exist_ok=True)
    client.create_topic("behind", key=["/n"], exist_ok=True)
    stop = threading.Event()

    def write() -> None:
        with server.client() as other:
            number = 0
            while not stop.is_set():
                number += 1
                for topic in ("source", "behind"):
                    other.publish(topic, {"n": number, "even": number % 2}, durability="buffered")

    writing = threading.Thread(target=write)
    writing.start()
    try:
        for _ in range(20):
            export = client.open_export(["counts", "behind", "source"])
            assert export.topics == ("counts", "behind", "source")
            found = totals(client, export)
            assert found["counts"] == found["source"]
            assert found["source"] - found["behind"] in (0, 1)
            assert totals(client, export) == found, "also when it is read again"
            client.close_export(export.id)
    finally:
        stop.set()
        writing.join()


def test_each_topic_of_an_export_may_have_a_filter_and_a_number_of_parts(client: Client) -> None:
    client.sow_delete("going", all=True)
    client.publish_many("going", [{"n": number} for number in range(5)])
    export = client.open_export(
        [ExportOf("large", "/n < :n", {"n": 250}, parts=2), "going", ExportOf("still", "1 = 2")], "/n = 3", lease="1m"
    )
    assert (export.topic, export.others) == ("large", ("going", "still"))
    assert export.parts_of("going") == [len(export.parts) - 1]
    assert export.parts_of("still") == []
    large = [number for part in export.parts_of("large") for number in numbers(client.read_export(export.id, part))]
    assert sorted(large) == list(range(250))
    assert numbers(client.read_export(export.id, export.parts_of("going")[0])) == [3]
    assert client.renew_export(export.id) == export
    client.close_export(export.id)


def test_an_export_of_several_topics_ends_with_each_of_them(client: Client) -> None:
    client.create_topic("brief", key=["/n"])
    export = client.open_export(["going", "brief"])
    client.delete_topic("brief", force=True)
    for call in (lambda: client.renew_export(export.id), lambda: list(client.read_export(export.id, 0))):
        with pytest.raises(NotFound, match="brief has been deleted") as error:
            call()
        assert error.value.reason == "TOPIC_DELETED"


def test_a_refusal_names_the_topic_of_an_export_that_is_at_fault(client: Client) -> None:
    for topics, field, text in (
        (["large", "goin"], "others[0].topic", "there is no topic 'goin'; did you mean 'going'?"),
        (["large", "going", "large"], "others[1].topic", "'large' is in the export already"),
        (
            ["large", ExportOf("going", "/n <")],
            "others[0].filter",
            "topic going: others[0].filter: expected a value at 4",
        ),
        (["large", ExportOf("going", "/n = :x")], "others[0].filter", ":x"),
        ([ExportOf("large", parts=6_000), ExportOf("going", parts=6_000)], "parts", "more than 11000 for all topics"),
        (["large", ExportOf("going", parts=10_001)], "others[0].parts", "between 1 and 10000"),
        ([f"t{number}" for number in range(1_001)], "others", "there are 1001 topics"),
    ):
        with pytest.raises(SowError) as error:
            client.open_export(topics)  # type: ignore[arg-type]  # both kinds
        assert error.value.details["field"] == field
        assert text in str(error.value)
    with pytest.raises(SowError, match="topic: names no topic"):
        client.open_export([])


def test_a_refusal_names_the_fault_of_the_request(server: ServerProcess, client: Client) -> None:
    export = client.open_export("large", parts=2)
    with grpc.insecure_channel(server.address) as channel:
        stub = snapshot_pb2_grpc.SnapshotServiceStub(channel)
        asked = snapshot_pb2.ReadExportRequest(export_id=export.id)
        for wrong, field in (
            (snapshot_pb2.ReadExportRequest(part=2), "part"),
            (snapshot_pb2.ReadExportRequest(batch_size=100_001), "batch_size"),
            (snapshot_pb2.ReadExportRequest(columns=[KEY, OP]), "columns[1]"),
            (snapshot_pb2.ReadExportRequest(columns=[UNSPECIFIED]), "columns[0]"),
            (snapshot_pb2.ReadExportRequest(resume_token=b"none of yours"), "resume_token"),
        ):
            wrong.MergeFrom(asked)
            with pytest.raises(grpc.RpcError) as refusal:
                list(stub.ReadExport(wrong))
            assert f'details = "{field}: ' in str(refusal.value)
    for wrong_call, reason in (
        (lambda: client.open_export("nothing"), "TOPIC_NOT_FOUND"),
        (lambda: client.open_export("large", "/n <"), "FILTER_INVALID"),
        (lambda: client.open_export("large", parts=10_001), "INVALID_ARGUMENT"),
        (lambda: client.open_export("large", lease="10ms"), "INVALID_ARGUMENT"),
        (lambda: client.open_export("large", lease="25h"), "INVALID_ARGUMENT"),
        (lambda: client.renew_export("none"), "EXPORT_NOT_FOUND"),
        (lambda: list(client.read_export("none", 0)), "EXPORT_NOT_FOUND"),
        (lambda: list(client.read_export(export.id, 9)), "INVALID_ARGUMENT"),
        (lambda: list(client.read_export(export.id, 0, columns=("price",))), "INVALID_ARGUMENT"),  # type: ignore[arg-type]  # a column that does not exist
    ):
        with pytest.raises(SowError) as error:
            wrong_call()
        assert error.value.reason == reason
    client.close_export(export.id)
    client.close_export(export.id)
    with pytest.raises(NotFound, match="it was closed"):
        list(client.read_export(export.id, 0))


def test_an_export_ends_with_its_topic_in_the_middle_of_a_read(client: Client) -> None:
    client.create_topic("gone", key=["/n"])
    client.publish_many("gone", [{"n": number, "pad": PAD} for number in range(10_000)])
    export = client.open_export("gone", parts=1)
    reading = client.read_export(export.id, 0, batch_size=100)
    next(reading)
    client.delete_topic("gone", force=True)
    with pytest.raises(NotFound) as error:
        list(reading)
    assert error.value.reason == "TOPIC_DELETED"


def test_a_cut_connection_is_made_again_and_nothing_is_missing_or_twice(server: ServerProcess) -> None:
    with Proxy(server.address) as proxy, Client(proxy.address) as client:
        export = client.open_export("large", parts=1)
        found: list[int] = []
        batches = client.read_export(export.id, 0, batch_size=500)
        for index, records in enumerate(batches):
            found += [json.loads(payload)["n"] for payload in payloads(records)]
            if index in (1, 20, 21):
                proxy.cut()
        assert sorted(found) == list(range(LARGE))
        assert len(found) == LARGE
        client.close_export(export.id)


def test_the_asynchronous_client_reads_parts_at_the_same_time(server: ServerProcess) -> None:
    async def main() -> list[int]:
        with Proxy(server.address) as proxy:
            async with AsyncClient(proxy.address) as client:
                export = await client.open_export("large", parts=4, lease="1m")
                assert (await client.renew_export(export.id)).lease == export.lease

                async def part(index: int) -> list[int]:
                    found: list[int] = []
                    async for records in client.read_export(export.id, index, batch_size=500):
                        found += [json.loads(payload)["n"] for payload in payloads(records)]
                        if index == 2 and len(found) == 1000:
                            proxy.cut()
                    return found

                parts = await asyncio.gather(*[part(index) for index in range(len(export.parts))])
                await client.close_export(export.id)
                return [number for part in parts for number in part]

    assert sorted(asyncio.run(main())) == list(range(LARGE))


@pytest.mark.parametrize("way", ["killed", "stopped"])
def test_a_server_that_ends_during_a_read_is_reported_and_no_partial_result_looks_complete(
    tmp_path: Path, way: str
) -> None:
    with ServerProcess(tmp_path, CONFIG) as server, server.client() as client:
        publish_large(client)
        export: Export = client.open_export("large", parts=1)
        reading = client.read_export(export.id, 0, batch_size=500)
        next(reading)
        if way == "killed":
            server.kill9()
        else:
            assert server.terminate() == 0
        server.start()
        with pytest.raises((NotFound, Unavailable)) as error:
            list(reading)
        assert error.value.reason in ({"EXPORT_NOT_FOUND"} if way == "killed" else {"EXPORT_NOT_FOUND", "STOPPING"})
        with pytest.raises(NotFound):
            client.renew_export(export.id)
        assert sum(records.count for records in client.read_export(client.open_export("large", parts=1).id, 0)) == LARGE
        assert not server.faults()
