"""R13 against a real server: a peer that is no instance sends rows that no publish could have made; topics that
hold such rows already."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator
from typing import Final

import grpc
import pytest
from click.testing import CliRunner

from sow.v1 import replication_pb2, replication_pb2_grpc
from sow_cli.command import sow
from sow_client import Client
from sow_replication.wire import opened, sealed
from sow_server.engine.replicas import ReplicaOptions
from sow_server.engine.store import StoreOptions
from sow_server.engine.values.model import Expiration, MessageType
from tests.support.servers.server import ServerProcess, until
from tests.support.stores import bad_rows
from tests.support.stores.bad_rows import Bad
from tests.support.stores.stores import HOUR, Rig

CONFIG: Final = """
[server]
instance = "here"
[replication]
accept = ["peer"]
"""
ME: Final = replication_pb2.Instance(name="peer", id="id", epoch="epoch")
TOPIC: Final = replication_pb2.ReplicatedTopic(
    name="given", message_type="json", separator=b"\x01", acts_on_expiration=True
)
POISON: Final = (
    Bad(key=b"", payload=b'{"n":1}'),
    Bad(key=b"\xff\xfe", payload=b'{"n":2}'),
    Bad(key=b"x" * 20_000, payload=b'{"n":3}'),
    Bad(key=b"type", payload=b"\xff"),
    Bad(key=b"version", payload=b'{"n":5}', version=-3),
    Bad(key=b"large", payload=b'{"pad":"%s"}' % (b"x" * 2**20)),
)
POISONED: Final = ("queried", "emptied", "filtered", "mended")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("soundness")
    made = ServerProcess(folder, CONFIG, start=False)
    options = StoreOptions(instance="here", replicas=ReplicaOptions(max_clock_skew_micros=HOUR))
    rig = Rig(folder / "rig", options=options, opened=False)
    rig.path = made.data
    rig.open()
    for name in (*POISONED, "given"):
        rig.create_topic(name, message_type=MessageType.JSON, expiration=Expiration.ENABLED)
        rig.put(name, "fine", b'{"n":0}')
    rig.store.sync()
    for name in POISONED:
        bad_rows.poison(rig, name, *POISON)
    rig.close()
    with made:
        made.start()
        yield made
        assert made.terminate() == 0
        assert not made.faults()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Client]:
    with server.client() as made:
        yield made


def changes(rows: list[Bad], *, after: int, upto: int) -> replication_pb2.ReplicateRequest:
    chunk = bad_rows.packed(rows)
    return replication_pb2.ReplicateRequest(
        changes=replication_pb2.Changes(
            after=after,
            upto=upto,
            chunks=[replication_pb2.Packed(topic="given", chunk=chunk)],
            origins=["peer"],
            crc32=zlib.crc32(chunk),
        )
    )


def test_a_link_and_a_repair_apply_sound_rows_and_continue(server: ServerProcess, client: Client) -> None:
    """soundness [1], R6. Story: the row was applied, and every read of the topic was INTERNAL from then on."""
    hello = replication_pb2.Hello(protocol=1, instance=ME, topics_pattern=".*", topics=[TOPIC])
    bad = [Bad(key=b"\xff\xfe"), Bad(key=b""), Bad(key=b"x" * 20_000), Bad(payload=b"\xff"), Bad(version=-1)]
    chunk = bad_rows.packed([Bad(key=b"seeded"), *bad])
    seed = replication_pb2.Seed(
        topic="given", first=True, last=True, chunk=chunk, crc32=zlib.crc32(chunk), origins=["peer"]
    )

    welcomed, applied = threading.Event(), threading.Event()

    def requests() -> Iterator[replication_pb2.Sealed]:
        yield sealed(replication_pb2.ReplicateRequest(hello=hello))
        welcomed.wait(20)
        yield sealed(replication_pb2.ReplicateRequest(seed=seed))
        yield sealed(changes([Bad(key=b"changed"), *bad], after=0, upto=6))
        yield sealed(changes(bad, after=6, upto=11))
        yield sealed(changes([Bad(key=b"later")], after=11, upto=12))
        applied.wait(20)

    with grpc.insecure_channel(server.address) as channel:
        stub = replication_pb2_grpc.ReplicationServiceStub(channel)
        for number, answer in enumerate(stub.Replicate(requests()), 1):
            response = opened(replication_pb2.ReplicateResponse, answer, number)
            welcomed.set()
            if response.acknowledged.sequence == 12:
                # An acknowledgement may be sent before the last rows are counted.
                until(lambda: client.replication_status().incoming[0].rows_refused == 15, 20, "all rows to be counted")
                (link,) = client.replication_status().incoming
                assert (link.rows_refused, link.cursor, link.last_error) == (15, 12, "")
                applied.set()
                break
        mend = bad_rows.packed([Bad(key=b"mended"), *bad])
        request = replication_pb2.MergeRowsRequest(
            instance=ME, topic=TOPIC, chunk=mend, origins=["peer"], crc32=zlib.crc32(mend)
        )
        merged = opened(replication_pb2.MergeRowsResponse, stub.MergeRows(sealed(request)))
        assert (merged.applied, merged.refused) == (1, 5)
    keys = [record.key for record in client.query("given")]
    assert keys == ["changed", "fine", "later", "mended", "seeded"]
    assert server.events("peer_rows_refused")


READABLE: Final = ["fine", "large", "type", "version", "x" * 20_000]


def test_every_read_of_a_topic_that_holds_such_rows_works(server: ServerProcess, client: Client) -> None:
    """soundness [2]."""
    assert [record.key for record in client.query("queried")] == READABLE
    assert sorted(record.key for record in client.query("queried", order_by="/n DESC")) == READABLE
    assert [record.key for record in client.query("queried", "@key < 'm'")] == ["fine", "large"]
    assert client.count("queried", "/n >= 0") == 3
    assert client.count("queried") == 7, "from the figures, which count all that is stored"
    with client.sow_and_subscribe("queried", "/n >= 0") as subscription:
        found = [next(subscription).key for _ in range(3)]
        assert sorted(found) == ["fine", "version", "x" * 20_000]
        client.publish("queried", {"n": 9}, key="live")
        assert next(change for change in subscription if change.key == "live").key == "live"
    client.alter_topic("queried", index=["/n"])
    assert [record.key for record in client.query("queried", "/n = 5")] == ["version"]
    assert [record.key for record in client.query("queried", "/n = 2")] == []
    with client.subscribe("queried", start="earliest") as replayed:
        assert {next(replayed).key for _ in range(6)} == {*READABLE, "live"}
    assert server.events("rows_unreadable")


def test_verify_says_how_many_rows_it_cannot_compare(server: ServerProcess, client: Client) -> None:
    kind = replication_pb2.ReplicatedTopic(
        name="queried", message_type="json", separator=b"\x01", acts_on_expiration=True
    )
    with grpc.insecure_channel(server.address) as channel:
        stub = replication_pb2_grpc.ReplicationServiceStub(channel)
        due = 2**53  # the latest time that a peer may name
        asked = replication_pb2.ChecksumRequest(instance=ME, topic=kind, buckets=4, now_micros=due)
        assert opened(replication_pb2.ChecksumResponse, stub.Checksum(sealed(asked))).unreadable == 2
        wanted = replication_pb2.ListVersionsRequest(
            instance=ME, topic="queried", buckets=4, bucket=range(4), now_micros=due
        )
        answers = enumerate(stub.ListVersions(sealed(wanted)), 1)
        parts = [opened(replication_pb2.ListVersionsResponse, answer, number) for number, answer in answers]
        assert set(READABLE) <= {key for part in parts for key in part.key}


def test_deletes_by_filter_and_of_all_remove_them(client: Client) -> None:
    assert client.sow_delete("emptied", all=True).deleted == 7
    assert client.count("emptied") == 0
    assert client.sow_delete("filtered", filter="/n = 2 OR @key > 'm'").deleted == 4
    assert client.sow_delete("filtered", filter="true").deleted == 3
    assert client.count("filtered") == 0


def test_a_check_lists_unsound_rows_and_its_repair_leaves_sound_ones(server: ServerProcess, client: Client) -> None:
    found = client.check_topic("mended")
    assert (found.checked, found.unsound, found.removed) == (7, 6, 0)
    assert {(row.key, row.reason) for row in found.rows} == {
        (b"", "KEY_REQUIRED"),
        (b"\xff\xfe", "KEY_NOT_UTF8"),
        (b"x" * 20_000, "KEY_TOO_LARGE"),
        (b"type", "PAYLOAD_MALFORMED"),
        (b"version", "INVALID_ARGUMENT"),
        (b"large", "PAYLOAD_TOO_LARGE"),
    }
    assert {row.origin for row in found.rows} == {"peer"}
    run = CliRunner().invoke(sow, ["--server", server.address, "topic", "check", "mended", "--repair"])
    assert run.exit_code == 0, run.output
    again = client.check_topic("mended")
    assert (again.checked, again.unsound) == (1, 0)
    assert [record.key for record in client.query("mended")] == ["fine"]
