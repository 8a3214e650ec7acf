"""Clients that are slow, that vanish and that flood: memory is bounded, the others are served, and it passes."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import grpc
import pytest

from sow.v1 import sow_pb2, sow_pb2_grpc, types_pb2
from sow_client import Client, ResourceExhausted
from tests.support.servers.server import ServerProcess, until

MIB: Final = 2**20
PATIENCE_SECONDS: Final = 30.0
"""The longest time that another client waits for a small durable write; generous, as the flood runs on the same
machine."""
OPTIONS: Final = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # a connection for each channel, as from as many machines
)
BIG_RECORDS: Final = 2_500


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path) as made:
        with made.client() as client:
            client.publish("probe", {"n": 0}, key="1")
        yield made
        assert made.alive
        assert made.terminate() == 0
        assert not made.faults()


@pytest.fixture
def big(server: ServerProcess) -> str:
    """A topic of 10 MB."""
    with server.client() as client, client.publisher("big", durability="buffered") as publisher:
        for number in range(BIG_RECORDS):
            publisher.publish({"n": number, "pad": "x" * 4000}, key=str(number))
    with server.client() as client:
        assert len(list(client.query("big"))) == BIG_RECORDS  # warm: its cost does not count as the stopped readers'
    return "big"


class Watch:
    """Samples the server's memory, and how long another client waits, while something happens."""

    def __init__(self, server: ServerProcess) -> None:
        self.before = server.resident_bytes
        self.peak = 0
        self.slowest = 0.0
        self._server = server
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        print(f"memory {self.before / MIB:.0f} MiB, at most {self.peak / MIB:.0f}; slowest write {self.slowest:.3f} s")

    def _sample(self) -> None:
        with self._server.client() as client:
            while not self._stopped.wait(0.05):
                started = time.monotonic()
                client.publish("probe", {"n": 1}, key="1")
                self.slowest = max(self.slowest, time.monotonic() - started)
                self.peak = max(self.peak, self._server.resident_bytes)

    def check(self, *, growth_mib: int) -> None:
        assert self.slowest < PATIENCE_SECONDS
        assert self.peak - self.before < growth_mib * MIB


def channels(server: ServerProcess, count: int, *more: tuple[str, int]) -> list[grpc.Channel]:
    return [grpc.insecure_channel(server.address, options=(*OPTIONS, *more)) for _ in range(count)]


def close(opened: Sequence[grpc.Channel]) -> None:
    for channel in opened:
        channel.close()


def assert_recovers(server: ServerProcess, *, sockets: int, resident_bytes: int) -> None:
    until(lambda: server.sockets <= sockets + 2, 20, "the connections to be gone")
    until(lambda: server.resident_bytes < resident_bytes, 20, "the memory to be given back")
    with server.client() as client:
        started = time.monotonic()
        client.publish("probe", {"n": 2}, key="1")
        assert time.monotonic() - started < 2
        assert client.count("probe") == 1


@pytest.mark.parametrize("readers", [20, pytest.param(200, marks=pytest.mark.long)])
def test_readers_that_stop_reading_cost_a_few_batches_each(server: ServerProcess, big: str, readers: int) -> None:
    sockets = server.sockets
    opened = channels(server, readers)
    with Watch(server) as watch:
        calls = [sow_pb2_grpc.SowServiceStub(channel).Query(sow_pb2.QueryRequest(topic=big)) for channel in opened]
        for call in calls:
            assert next(call).HasField("header")
        time.sleep(2)  # the server goes on as far as it can
    watch.check(growth_mib=6 * readers)
    # They were slow, not gone: one of them reads on, and gets everything, as of its own instant.
    rest = list(calls[0])
    assert sum(len(response.batch.key) for response in rest) == BIG_RECORDS
    assert rest[-1].footer.returned == BIG_RECORDS
    close(opened)
    assert_recovers(server, sockets=sockets, resident_bytes=watch.before + 150 * MIB)


def test_a_publisher_that_never_reads_its_acknowledgements_is_slowed_down(server: ServerProcess) -> None:
    sockets = server.sockets
    sent = 0
    stop = threading.Event()
    batch = sow_pb2.PublishStreamRequest(
        topic="unread",
        key=[str(number) for number in range(20)],
        payload=[b'{"pad":"' + b"x" * 10_000 + b'"}'] * 20,
        durability=types_pb2.DURABILITY_BUFFERED,
    )

    def requests() -> Iterator[sow_pb2.PublishStreamRequest]:
        nonlocal sent
        while not stop.is_set():
            sent += 1
            yield batch

    opened = channels(server, 4)
    with Watch(server) as watch:
        calls = [sow_pb2_grpc.SowServiceStub(channel).PublishStream(requests()) for channel in opened]
        time.sleep(1)
        stop.set()
    assert sent > 4
    watch.check(growth_mib=700)  # the queue, and what RocksDB buffers
    assert calls[0].is_active()
    close(opened)
    assert_recovers(server, sockets=sockets, resident_bytes=watch.before + 600 * MIB)


VANISHING: Final = """
import sys
from sow.v1 import sow_pb2, sow_pb2_grpc
from sow_client import Client
import grpc, itertools
address = sys.argv[1]
channel = grpc.insecure_channel(address)
stub = sow_pb2_grpc.SowServiceStub(channel)
queries = [stub.Query(sow_pb2.QueryRequest(topic="big")) for _ in range(5)]
for query in queries:
    next(query)
deletes = stub.SowDelete(sow_pb2.SowDeleteRequest(topic="doomed", all=True))
client = Client(address)
with client.publisher("vanished", batch_records=10) as publisher:
    for number in itertools.count():
        publisher.publish({"n": number}, key=str(number))
        if publisher.acknowledged > 100:
            print(publisher.acknowledged, flush=True)
"""


def test_killed_clients_leave_only_acknowledged_changes_behind(server: ServerProcess, big: str, tmp_path: Path) -> None:
    """Story: gRPC logs a traceback for every client that goes away while it is being answered."""
    with server.client() as client:
        client.publish_many("doomed", [{"n": n} for n in range(3000)], keys=map(str, range(3000)))
    sockets, resident = server.sockets, server.resident_bytes
    script = tmp_path / "vanishing.py"
    script.write_text(VANISHING)
    acknowledged = []
    for _ in range(2):
        process = subprocess.Popen([sys.executable, str(script), server.address], stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            acknowledged.append(int(process.stdout.readline()))
            time.sleep(0.05)
        finally:
            process.kill()
            process.communicate()
    assert_recovers(server, sockets=sockets, resident_bytes=resident + 200 * MIB)
    with server.client() as client:
        assert client.count("vanished") >= max(acknowledged)
        numbers = {record.data["n"] for record in client.query("vanished")}
        assert numbers == set(range(len(numbers))), "a prefix of the stream, without gaps"
        assert client.count("doomed") == len(list(client.query("doomed"))), (
            "a delete that was cut is cut between batches"
        )


def test_a_flood_of_large_publishes_is_refused_in_part_and_passes(server: ServerProcess) -> None:
    """Story: after a flood the process kept three times the memory that it used, for good."""
    sockets = server.sockets
    payload = b'{"pad":"' + b"x" * (MIB - 100) + b'"}'
    requests = [
        sow_pb2.PublishRequest(topic="flood", records=[sow_pb2.PublishRecord(key=str(n % 20), payload=payload)])
        for n in range(100)
    ]
    opened = channels(server, 6)
    stubs = [sow_pb2_grpc.SowServiceStub(channel) for channel in opened]
    with Watch(server) as watch:
        calls = [stubs[n % 6].Publish.future(request, timeout=60) for n, request in enumerate(requests)]
        until(lambda: all(call.done() for call in calls), 60, "all answers")
    codes = Counter(call.code() for call in calls)
    assert codes.keys() <= {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}, codes
    assert codes[grpc.StatusCode.OK] > 60, "at least what fits into the queue"
    watch.check(growth_mib=700)
    close(opened)
    assert_recovers(server, sockets=sockets, resident_bytes=watch.before + 250 * MIB)
    with server.client() as client:
        assert client.count("flood") == 20


def test_calls_beyond_the_limit_are_refused_and_do_no_harm(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, "[server]\ndynamic_topics = true\nmax_concurrent_rpcs = 20\n") as server:
        with server.client() as client, client.publisher("big", durability="buffered") as publisher:
            for number in range(5000):
                publisher.publish({"n": number, "pad": "x" * 1000}, key=str(number))
        # On a busy machine gRPC took the connections for long ones, and let the whole answers into its buffers.
        opened = channels(server, 40, ("grpc.http2.bdp_probe", 0))
        stubs = [sow_pb2_grpc.SowServiceStub(channel) for channel in opened]
        within = [stub.Query(sow_pb2.QueryRequest(topic="big")) for stub in stubs[:10]]
        for call in within:
            next(call)  # it is served, and goes on
        beyond = [stub.Query(sow_pb2.QueryRequest(topic="big")) for stub in stubs[10:]]
        refused = 0
        for call in beyond:
            try:
                next(call)
            except grpc.RpcError:
                assert call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                refused += 1
        assert refused >= 10
        close(opened)
        with server.client() as client:
            until(lambda: _answers(client), 10, "room again")
        assert not server.faults()


def _answers(client: Client) -> bool:
    try:
        return client.count("big") == 5000
    except ResourceExhausted:
        return False
