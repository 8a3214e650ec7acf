"""Long queries and exports are answered by reader processes, with the guarantees of all others (rule Q7)."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import grpc
import pytest
from google.protobuf.message import Message

from sow.v1 import sow_pb2, sow_pb2_grpc
from sow_client import Client, NotFound, Record, Unavailable
from tests.support.oracles.access import GUARDED, client_of, grant, identity, write_access
from tests.support.servers.server import MEASURED, ServerProcess, until

RECORDS: Final = 4_800
"""A query that reads more than 3,000 is long."""
MANY: Final = 12_000
"""Exports of more than 10,000 are opened in a reader process."""
CONFIG: Final = """
[server]
reader_processes = 1
[topics.t]
key = ["/id"]
index = ["/group"]
expiration = "enabled"
"""
GUARDED_CONFIG: Final = GUARDED.replace("[server]", "[server]\nreader_processes = 1") + CONFIG.partition("= 1\n")[2]
SECONDS: Final = 60


def fill(client: Client, records: int = RECORDS, pad: str = "x" * 100) -> None:
    """Three quarters of the records are in group 2."""
    with client.publisher("t", durability="buffered") as publisher:
        for number in range(records):
            publisher.publish({"id": f"{number:06}", "n": number, "group": min(number % 8, 2), "pad": pad})


def document(record: Record) -> dict[str, object]:
    found: dict[str, object] = json.loads(record.payload)
    return found


def reader_of(server: ServerProcess, client: Client) -> int:
    """The reader process, once it is ready."""
    before = losses(server)
    client.count("t", "/n >= 0")  # the first long query starts it
    until(lambda: len(server.events("reader_process_ready")) > before, SECONDS, "a reader process")
    pid = server.events("reader_process_ready")[-1]["pid"]
    assert isinstance(pid, int)
    return pid


def runs(pid: int) -> bool:
    try:
        return b"reader_processes" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return False


def losses(server: ServerProcess) -> int:
    """The number of reader processes that it has lost."""
    return len(server.events("reader_process_lost"))


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    until(lambda: not runs(pid), SECONDS, "the end of the process")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("processes"), CONFIG) as made:
        with made.client() as client:
            fill(client)
        yield made
        assert made.terminate() == 0
        assert not made.faults()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with server.client() as made:
        yield made


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server with 6 MB of records. It keeps at most 4 MiB of an answer, so a reader process does not finish one that
    nobody reads."""
    with ServerProcess(tmp_path, CONFIG) as made:
        with made.client() as client:
            fill(client, MANY, "x" * 450)
        yield made
        assert made.terminate() == 0
        assert not made.faults()


def named(**expressions: str) -> list[sow_pb2.NamedExpression]:
    return [sow_pb2.NamedExpression(name=name, expression=text) for name, text in expressions.items()]


REQUESTS: Final = [
    sow_pb2.QueryRequest(topic="t"),
    sow_pb2.QueryRequest(topic="t", filter="/n >= 100 AND /group IN (0, 2)", batch_size=777),
    sow_pb2.QueryRequest(topic="t", filter="/group = 2"),
    sow_pb2.QueryRequest(topic="t", filter="/group = 2 AND /n > 2400", explain=True),
    sow_pb2.QueryRequest(topic="t", filter="/pad LIKE '^y'"),
    sow_pb2.QueryRequest(topic="t", filter="@version > 0", count_only=True),
    sow_pb2.QueryRequest(topic="t", order_by="/n DESC", skip_n=5, top_n=50),
    sow_pb2.QueryRequest(topic="t", order_by="/group, /id DESC"),
    sow_pb2.QueryRequest(topic="t", filter="/n > 3100", page_size=1000),
    sow_pb2.QueryRequest(topic="t", order_by="/group DESC, /n", page_size=1000),
    sow_pb2.QueryRequest(topic="t", filter="/n > 1500", keys_only=True, skip_n=7),
    sow_pb2.QueryRequest(topic="t", select=sow_pb2.Projection(include=["/n", "/group"]), filter="/n > 3"),
    sow_pb2.QueryRequest(topic="t", aggregate=named(n="COUNT(*)", s="SUM(/n / 7)", a="AVG(/n / 3)"), filter="/n > 9"),
    sow_pb2.QueryRequest(topic="t", group_by=named(g="/group"), aggregate=named(d="COUNT(DISTINCT /n)", m="MAX(/pad)")),
    sow_pb2.QueryRequest(
        topic="t",
        group_by=named(rest="/n % 900", g="/group"),
        aggregate=named(s="SUM(/n / 10)", px="SUM(/n * 0.1) / COUNT(*)"),
        having="/s > 5",
        order_by="/px DESC, /rest",
        skip_n=3,
        top_n=700,
        batch_size=100,
    ),
]


def whole(stub: sow_pb2_grpc.SowServiceStub, request: sow_pb2.QueryRequest) -> tuple[list[tuple[object, ...]], Message]:
    """The records and the footer of an answer, however it is cut into batches."""
    records: list[tuple[object, ...]] = []
    responses = list(stub.Query(request, timeout=SECONDS))
    assert responses[0].HasField("header")
    for response in responses[1:-1]:
        batch = response.batch
        payloads = batch.payload or [b""] * len(batch.key)
        records += zip(batch.key, payloads, batch.version, batch.sequence, batch.expire_time_micros, strict=True)
    return records, responses[-1].footer


def test_a_reader_process_answers_as_the_server_itself(tmp_path: Path) -> None:
    def answers(server: ServerProcess) -> list[tuple[list[tuple[object, ...]], Message]]:
        with grpc.insecure_channel(server.address) as channel:
            stub = sow_pb2_grpc.SowServiceStub(channel)
            return [whole(stub, request) for request in REQUESTS]

    with ServerProcess(tmp_path, CONFIG) as server:
        with server.client() as client:
            fill(client)
            pid = reader_of(server, client)
        there = answers(server)
        assert runs(pid)
        assert server.terminate() == 0
        server.config.write_text(server.config.read_text().replace("reader_processes = 1", "reader_processes = 0"))
        server.start()
        here = answers(server)
        assert not server.faults()
    for request, one, other in zip(REQUESTS, there, here, strict=True):
        assert one == other, request


def test_every_acknowledged_write_is_seen(server: ServerProcess, client: Client) -> None:
    reader_of(server, client)
    stop = threading.Event()

    def disturb() -> None:
        with server.client() as other:
            while not stop.is_set():
                other.publish_many("t", [{"id": f"d{number}", "n": -5} for number in range(100)], durability="buffered")

    disturbing = threading.Thread(target=disturb)
    disturbing.start()
    try:
        for number in range(20):
            client.publish("t", {"id": "seen", "n": -1, "at": number}, durability="buffered")
            assert [document(record)["at"] for record in client.query("t", "/n = -1")] == [number]
        client.sow_delete("t", keys=["seen"])
        assert client.count("t", "/n = -1") == 0
    finally:
        stop.set()
        disturbing.join()
        client.sow_delete("t", filter="/n = -5")


def test_an_answer_is_of_one_instant(server: ServerProcess, client: Client) -> None:
    """rule Q1: records that change together are never seen half changed."""
    reader_of(server, client)
    stop = threading.Event()

    def disturb() -> None:
        number = 0
        with server.client() as other:
            while not stop.is_set():
                number += 1
                pair = [{"id": place, "n": -2, "at": number} for place in ("000000a", "999999z")]
                other.publish_many("t", pair, atomic=True, durability="buffered")

    disturbing = threading.Thread(target=disturb)
    disturbing.start()
    try:
        for _ in range(15):
            seen = map(document, client.query("t", "/n < 0 OR /n > 4790"))
            found = {one["at"] for one in seen if one["n"] == -2}
            assert len(found) <= 1
    finally:
        stop.set()
        disturbing.join()
        client.sow_delete("t", filter="/n = -2")


def test_a_lost_reader_process_costs_the_answers_under_way_an_error(fresh: ServerProcess) -> None:
    with fresh.client() as client:
        pid = reader_of(fresh, client)
        with grpc.insecure_channel(fresh.address) as channel:
            answer = sow_pb2_grpc.SowServiceStub(channel).Query(
                sow_pb2.QueryRequest(topic="t", batch_size=100), timeout=SECONDS
            )
            assert next(answer).HasField("header")
            next(answer)
            kill(pid)
            with pytest.raises(grpc.RpcError) as caught:
                list(answer)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "the process that was reading the records has ended" in str(caught.value.details())
        assert client.count("t", "/n >= 0") == MANY, "the server answers by itself"
        until(lambda: losses(fresh), SECONDS, "its loss")  # else `reader_of` finds the lost one
        assert reader_of(fresh, client) != pid, "and starts another process"


def test_the_exports_of_a_lost_reader_process_are_gone(fresh: ServerProcess) -> None:
    with fresh.client() as client:
        pid = reader_of(fresh, client)
        export = client.open_export("t", parts=3)
        batches = client.read_export(export.id, 0, batch_size=100)
        next(batches)
        kill(pid)
        with pytest.raises((Unavailable, NotFound)):
            list(batches)
        with pytest.raises((Unavailable, NotFound)):
            list(client.read_export(export.id, 1))
        with pytest.raises(NotFound, match="has ended"):
            list(client.read_export(export.id, 1))
        again = client.open_export("t", parts=3)
        assert sum(batch.count for part in range(3) for batch in client.read_export(again.id, part)) == MANY
        client.close_export(again.id)


def test_a_reader_process_shows_several_topics_at_one_instant(fresh: ServerProcess) -> None:
    """Q6. The records behind those of `t` are published after them, one by one; the view changes in their commit."""
    with fresh.client() as client:
        client.create_topic("behind", key=["/id"])
        client.create_view("counts", source="t", group_by=["/group"], select={"records": "COUNT(*)"})
        pid = reader_of(fresh, client)
        stop = threading.Event()

        def write() -> None:
            with fresh.client() as other:
                number = MANY
                while not stop.is_set():
                    number += 1
                    for topic in ("t", "behind"):
                        other.publish(topic, {"id": f"{number:06}", "group": 7}, durability="buffered")

        writing = threading.Thread(target=write)
        writing.start()
        try:
            for _ in range(10):
                export = client.open_export(["counts", "t", "behind"])
                found = dict.fromkeys(export.topics, 0)
                for part, topic in enumerate(export.part_topics):
                    for batch in client.read_export(export.id, part, lines=True):
                        found[topic] += sum(
                            json.loads(line).get("records", 1) for line in bytes(batch.payloads).splitlines()
                        )
                assert found["counts"] == found["t"]
                assert found["t"] - MANY - found["behind"] in (0, 1)
                client.close_export(export.id)
        finally:
            stop.set()
            writing.join()
        export = client.open_export(["behind", "t"])
        kill(pid)
        until(lambda: losses(fresh), SECONDS, "its loss")
        with pytest.raises(NotFound, match="the process that read it has ended"):
            list(client.read_export(export.id, 0))


def test_the_answer_of_a_caller_that_may_see_a_part_has_that_part(tmp_path: Path) -> None:
    """rules A4, A5: what a caller may see is decided before a reader process is asked, and holds there."""
    write_access(
        tmp_path,
        identity("desk", "desk") + grant("desk", "t", "read", 'rows = "/group = 2"\nhide = ["/pad"]'),
    )
    with ServerProcess(tmp_path, GUARDED_CONFIG) as server:
        with client_of(server, "root") as root:
            fill(root, MANY)
            reader_of(server, root)
        with client_of(server, "desk") as desk:
            found = [document(record) for record in desk.query("t", "/n >= 0")]
            assert len(found) == MANY * 3 // 4 == desk.count("t", "/pad IS NULL")
            assert all(one["group"] == 2 and "pad" not in one for one in found)
            export = desk.open_export("t")
            batches = [batch for part in range(len(export.parts)) for batch in desk.read_export(export.id, part)]
            assert sum(batch.count for batch in batches) == MANY * 3 // 4
            assert not any(b"xxx" in bytes(batch.payloads) for batch in batches)


def test_a_reader_process_ends_with_its_server(tmp_path: Path) -> None:
    for ends in ("stops", "is killed"):
        with ServerProcess(tmp_path / ends.replace(" ", "-"), CONFIG) as server:
            with server.client() as client:
                fill(client)
                pid = reader_of(server, client)
            if ends == "stops":
                assert server.terminate() == 0
                assert not (server.config.parent / "data" / "readers").exists()
            else:
                server.kill9()
            until(lambda pid=pid: not runs(pid), SECONDS, "the end of the process")  # type: ignore[misc]  # a default


def test_a_server_without_reader_processes_starts_none(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, CONFIG.replace("= 1", "= 0", 1)) as server, server.client() as client:
        fill(client)
        assert client.count("t", "/n >= 0") == RECORDS
        assert not server.events("reader_process_ready")


def test_a_signal_to_all_processes_leaves_the_answers_under_way_their_time(fresh: ServerProcess) -> None:
    """A service manager sends SIGTERM to every process of a service at once. A reader process that ended by it took its
    answers along, though the server gave them time to end."""
    with fresh.client() as client, grpc.insecure_channel(fresh.address) as channel:
        pid = reader_of(fresh, client)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            answer = sow_pb2_grpc.SowServiceStub(channel).Query(
                sow_pb2.QueryRequest(topic="t", batch_size=100), timeout=SECONDS
            )
            assert next(answer).HasField("header")
            os.kill(pid, number)
            assert list(answer)[-1].footer.returned == MANY, number
            assert runs(pid), number


@pytest.mark.skipif(MEASURED, reason="coverage itself takes modules from the working directory")
def test_the_modules_of_a_reader_process_are_those_of_the_server(tmp_path: Path) -> None:
    """The working directory may belong to somebody else, so no module is taken from there."""
    with ServerProcess(tmp_path, CONFIG) as server, server.client() as client:
        fill(client)
        for module in ("structlog.py", "pickle.py", "sow_server.py"):
            (server.config.parent / module).write_text("raise SystemExit(3)")
        assert runs(reader_of(server, client))
        assert not losses(server)
        assert not server.faults()


def test_a_lost_export_is_gone_also_if_nobody_was_reading_it(fresh: ServerProcess) -> None:
    with fresh.client() as client:
        pid = reader_of(fresh, client)
        export = client.open_export("t", parts=3)
        kill(pid)
        until(lambda: losses(fresh), SECONDS, "its loss")
        with pytest.raises(NotFound, match="the process that read it has ended"):
            client.renew_export(export.id)
