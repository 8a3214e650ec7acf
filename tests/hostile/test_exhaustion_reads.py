"""One caller reads as much as it can: what others get, and how much memory the server takes (rules N5, N7)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Final

import grpc
import pytest

from sow.v1 import sow_pb2, sow_pb2_grpc
from tests.support.oracles.access import GUARDED, client_of, grant, identity, write_access
from tests.support.oracles.examples import examples
from tests.support.servers.server import ServerProcess, until

MEBIBYTE: Final = 2**20
SECONDS: Final = 60.0
GREEDY: Final = (("authorization", "Bearer greedy"),)
PATHS: Final = [f"/f{number}/x" for number in range(1000)]
LARGE: Final = examples(480)
"""Records of a megabyte."""
WIDE: Final = examples(16_000)
"""Records of twenty fields."""
STREAM_MAX: Final = 8 * MEBIBYTE
"""Of one answer that nobody reads, in all processes: 4 MiB, and as much for what malloc keeps."""
REST: Final = 64 * MEBIBYTE
"""For caches that fill up meanwhile, and a reader process."""
ACCESS: Final = (
    identity("greedy", "user") + identity("other", "user") + grant("user", "large|wide|orders", "read publish")
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("reads")
    write_access(folder, ACCESS)
    with ServerProcess(folder, GUARDED.replace("[server]", "[server]\nreader_processes = 0")) as made:
        with client_of(made, "root") as root:
            for name in ("large", "wide", "orders"):
                root.create_topic(name, key=["/id"])
            with root.publisher("large", durability="buffered") as publisher:
                for number in range(LARGE):
                    publisher.publish({"id": str(number), "pad": "x" * 1_000_000})
            with root.publisher("wide", durability="buffered") as publisher:
                for number in range(WIDE):
                    publisher.publish({"id": str(number)} | {f"f{field}": {"x": field} for field in range(20)})
            with root.publisher("orders", durability="buffered") as publisher:
                for number in range(100):
                    publisher.publish({"id": str(number), "price": number})
        yield made
        assert not made.faults()


def greedy(server: ServerProcess, stack: ExitStack, number: int = 0) -> sow_pb2_grpc.SowServiceStub:
    """A connection of its own."""
    options = (("grpc.use_local_subchannel_pool", 1), ("number", number))
    return sow_pb2_grpc.SowServiceStub(stack.enter_context(grpc.insecure_channel(server.address, options=options)))


def unread(server: ServerProcess, stack: ExitStack, request: sow_pb2.QueryRequest, count: int) -> list[Any]:
    """Answers of which the client takes the header, and no more: its window stays full."""
    stubs = [greedy(server, stack, number) for number in range(0, count, 25)]
    calls = []
    for number in range(count):
        call = stubs[number // 25].Query(request, metadata=GREEDY, timeout=SECONDS)
        stack.callback(call.cancel)
        calls.append(call)
    for call in calls:
        assert next(call).HasField("header")
    return calls


def rest(server: ServerProcess) -> int:
    """The memory of the server, once it does not grow any more."""
    looks = [0, 0]

    def is_still() -> bool:
        looks.append(server.resident_bytes)
        return max(looks[-20:]) - min(looks[-20:]) < MEBIBYTE // 4

    until(is_still, SECONDS, "the memory to stay as it is")
    return looks[-1]


@pytest.mark.parametrize(
    ("topic", "count"), [("large", 6), pytest.param("wide", 100, marks=pytest.mark.long)], ids=["large", "many"]
)
def test_answers_that_nobody_reads_take_a_few_mebibytes_each(server: ServerProcess, topic: str, count: int) -> None:
    """N5. Story: each kept up to 3,000 records, of a megabyte each, before it sent the first."""
    before = rest(server)
    with ExitStack() as stack:
        calls = unread(server, stack, sow_pb2.QueryRequest(topic=topic), count)
        assert rest(server) - before <= count * STREAM_MAX + REST
        whole = sum(len(answer.batch.key) for answer in calls[0])
        assert whole == (LARGE if topic == "large" else WIDE), "and whoever reads gets everything"


def ask_other(server: ServerProcess, rounds: int) -> None:
    """A caller with short calls: each is answered, and right."""
    with client_of(server, "other") as other:
        for number in range(rounds):
            record = other.get("orders", str(number))
            assert record is not None
            assert json.loads(record.payload)["price"] == number
            assert [one.key for one in other.query("orders", f"/price = {number}")] == [str(number)]
            other.publish("orders", {"id": "new", "price": -1})


@pytest.mark.parametrize(
    "keys",
    [["0"] * 256, [str(number) for number in range(1000)], ["0", "large"]],
    ids=["equal keys", "many keys", "a large record"],
)
def test_others_are_answered_between_the_pieces_of_long_gets(server: ServerProcess, keys: list[str]) -> None:
    """N7. Story: with four such callers, the others' filtered query went from 4 ms to 44 s."""
    request = sow_pb2.GetRequest(topic="wide", keys=keys, select=sow_pb2.Projection(include=PATHS))
    if "large" in keys:
        with client_of(server, "root") as root:
            root.publish("wide", {"id": "large"} | {f"f{number}": {"x": "y" * 90} for number in range(8000)})
    answered = itertools.count()
    ended = False

    def repeat(stub: sow_pb2_grpc.SowServiceStub) -> None:
        while not ended:
            found = stub.Get(request, metadata=GREEDY, timeout=SECONDS).records
            assert len(found) == len(keys)
            assert json.loads(found[0].payload) == {f"f{field}": {"x": field} for field in range(20)}
            next(answered)

    with ExitStack() as stack, ThreadPoolExecutor(4) as threads:
        running = [threads.submit(repeat, greedy(server, stack, number)) for number in range(4)]
        try:
            ask_other(server, 10)
        finally:
            ended = True
        for one in running:
            one.result()
    assert next(answered) >= 4


def test_a_long_get_whose_caller_has_gone_leaves_its_place(server: ServerProcess) -> None:
    """N7: of one caller, two long gets go on at a time. Those behind ones that were cancelled are answered."""
    request = sow_pb2.GetRequest(
        topic="wide", keys=[str(number) for number in range(1000)], select=sow_pb2.Projection(include=PATHS)
    )
    with ExitStack() as stack:
        stub = greedy(server, stack)
        gone = [stub.Get.future(request, metadata=GREEDY, timeout=SECONDS) for _ in range(30)]
        for call in gone:
            call.cancel()
        assert len(stub.Get(request, metadata=GREEDY, timeout=SECONDS).records) == 1000
