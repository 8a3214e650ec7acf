"""The bytes on disk and on the wire, as an earlier commit made them: a change of the code's structure changes none.

One conversation calls every RPC, on a clock that the test owns. `tests/golden/wire.txt` has a digest of each answer,
and `tests/golden/rows.txt` every row of the data directory. The store must write the same rows, and must read them.

[1]  A change of a format or of the contract changes them on purpose: `python -m tests.unit.project.test_golden_bytes`
     writes them anew. Read the difference of rows.txt before you commit it: a user has such rows on disk.
"""

from __future__ import annotations

import hashlib
import itertools
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, NamedTuple
from unittest import mock

import pytest
from google.protobuf import symbol_database
from google.protobuf.message import Message
from google.rpc import status_pb2

from sow.v1 import load_pb2
from sow_server.engine.disk.rocks import FAMILIES, Batch, Rocks
from sow_server.engine.values.model import Publish, PublisherPosition, TopicSettings
from tests.support.fakes.guarded import GuardedParts
from tests.support.stores.replicas import instance, ship
from tests.support.stores.stores import SECOND, FakeTime, Rig
from tests.support.stores.views import ViewRig
from tests.unit.access.test_noninterference import (
    REQUESTS,
    SMALL,
    Request,
    World,
    document,
    orders,
    plain,
    random_is,
    told,
)

GOLDEN: Final = Path(__file__).parents[2] / "golden"
WIRE: Final = GOLDEN / "wire.txt"
ROWS: Final = GOLDEN / "rows.txt"
FIRST_DELETION: Final = "DeleteTopic"
"""The rows are those before this method: afterwards little is left."""
LEFT_OUT: Final = frozenset(
    {"GetStatus", "DescribeInstance", "WatchFigures", "WatchLog"}  # figures of this process
    | {"Backup", "Compact"}  # bytes of RocksDB's files
    | {"VerifyReplication", "RepairReplication"}  # there are no links here
    | {name for name in REQUESTS if name.endswith("Peer")}
)


BEFORE_DELETIONS: Final[list[tuple[str, Request]]] = [
    ("SetPolicy", plain(policy={"name": "kept", "pattern": "ord.*", "topic": {"max_entries": 500}})),
    ("Publish", orders(records=[{"payload": document(f"k{number}", price=number)} for number in range(20)])),
    ("Publish", orders(records=[{"payload": document("k3")}], lifetime={"ttl_micros": 7 * SECOND})),
    ("SowDelete", orders(by_keys={"keys": ["k4", "k5"]})),
    ("PinJournal", lambda world: {"topic": "orders", "name": "pin-2", "bookmark": world.bookmark(30)}),
    ("OpenLoad", orders()),
    (
        "StageLoad",
        lambda world: {
            "load_id": world.know["load"],
            "part": 1,
            "attempt": 2,
            "payload": [document("l1"), document("l2")],
            "lifetime_kind": [1, 0],
            "lifetime_micros": [SECOND, 0],
            "first_row": 1,
        },
    ),
]
"""So that there is a row of every kind."""


class Conversation(NamedTuple):
    """What was answered, and what was on disk."""

    answers: dict[str, list[Message]]
    """By call, such as `Query 3`."""
    frames: list[bytes]
    """What subscribers were sent."""
    rows: list[str]


@contextmanager
def world(folder: Path) -> Iterator[World]:
    """A world in which nothing is drawn or measured."""
    numbers = itertools.count(1)
    with ExitStack() as stack:
        for module, constants in SMALL.items():
            for name, value in constants.items():
                stack.enter_context(mock.patch.object(module, name, value))
        with random_is(lambda size: f"{next(numbers):0{2 * size}x}"):
            made = World(folder / "world", "", hidden_here=True)
        stack.callback(made.close)
        yield made


def talk(folder: Path) -> Conversation:
    """Has the conversation."""
    folder.mkdir(exist_ok=True)
    answers: dict[str, list[Message]] = {}
    rows: list[str] = []
    with world(folder) as one:
        one.follow()
        one.happen()
        numbers = itertools.count(1)
        for method, requests in REQUESTS.items():
            if method == FIRST_DELETION:
                for index, (name, request) in enumerate(BEFORE_DELETIONS):
                    answers[f"before deletions {name} {index}"] = asked(one, name, request, next(numbers))
                rows = all_rows(one.rig)
            for index, request in enumerate(() if method in LEFT_OUT else requests):
                answers[f"{method} {index}"] = asked(one, method, request, next(numbers))
        return Conversation(answers, one.frames, rows)


def asked(one: World, method: str, request: Request, number: int) -> list[Message]:
    """The answers to a call of root, which may do everything."""
    found = told(one, method, request, number, identity="root")
    for answer in found:
        if isinstance(answer, load_pb2.OpenLoadResponse):
            one.know["load"] = answer.load_id
    return found


def all_rows(rig: Rig) -> list[str]:
    """Each row of each column family: the family, the key and the value."""
    return [f"{family} {key.hex()} {value.hex()}" for family in FAMILIES for key, value in rig.rows(family)]


def digests(told: Conversation) -> list[str]:
    """A line for each call."""
    found = {call: b"".join(map(written, answer)) for call, answer in told.answers.items()}
    if told.frames:
        found["frames"] = b"".join(told.frames)
    return [
        f"{call}: {len(data)} bytes {hashlib.blake2b(data, digest_size=8).hexdigest()}" for call, data in found.items()
    ]


def written(answer: Message) -> bytes:
    """The bytes of an answer, with every map in the order of its keys: also those in the details of a status."""
    if isinstance(answer, status_pb2.Status):
        for detail in answer.details:
            inner = symbol_database.Default().GetSymbol(detail.TypeName())()
            detail.Unpack(inner)
            detail.value = inner.SerializeToString(deterministic=True)
    return answer.SerializeToString(deterministic=True)


READING: Final[dict[str, list[Request]]] = {
    "ListTopics": [plain(with_statistics=True)],
    "Query": [orders(), orders(filter="/price >= 5", with_plan=True), orders(order_by="/price DESC, @version")],
    "ReadHistory": [orders(key="k3"), orders(key="c1")],
    "ReadChanges": [
        lambda world: {
            "topic": "orders",
            "start_bookmark": world.bookmark(0),
            "end_bookmark": world.head,
            "lines": True,
        },
    ],
    "ListDurables": [plain(with_figures=True)],
    "GetPublisher": [plain(publisher_id="p")],
    "ListPolicies": [plain()],
    "ListLoads": [plain()],
    "GetExpiryHorizon": [orders(exact=True, edge_micros=[SECOND, 90 * SECOND])],
}
"""What a data directory is asked that is made of the rows."""


def read_back(folder: Path, rows: Sequence[str]) -> Conversation:
    """Makes a data directory of rows, and has them read."""
    folder.mkdir(exist_ok=True)
    with world(folder) as one:
        one.rig.close()
        database = Rocks(one.rig.path / "db", create=False)
        restored = Batch()
        for family in FAMILIES:
            restored.ranges.append((family, b"", b"\xff" * 64))
        database.write(restored)
        restored = Batch()
        for row in rows:
            family, key, value = row.split(" ")
            restored.puts[family][bytes.fromhex(key)] = bytes.fromhex(value)
        database.write(restored)
        database.close()
        one.rig.time.tick(30 * SECOND)
        one.rig.open()
        one.parts = GuardedParts(one.rig, "")
        numbers = itertools.count(1)
        answers = {
            f"{method} {index} of the rows": asked(one, method, request, next(numbers))
            for method, requests in READING.items()
            for index, request in enumerate(requests)
        }
        return Conversation(answers, [], all_rows(one.rig))


def replicated_rows(folder: Path) -> list[str]:
    """The rows of an instance that has taken records, a deletion, an expiry and a publisher from another one."""
    time = FakeTime()
    names = itertools.count(1)
    with random_is(lambda size: f"{next(names):0{2 * size}x}"):
        a, b = instance(folder, "a", peers=["b"], time=time), instance(folder, "b", peers=["a"], time=time)
    for rig in (a, b):
        rig.create_topic("t")
    for key in ("1", "2", "3"):
        a.put("t", key, ttl=5 * SECOND if key == "3" else None)
    b.put("t", "2", b"another")
    ship(a, b)
    a.delete("t", "1")
    time.tick(6 * SECOND)
    b.store.sweep()
    a.run(Publish("t", [b"x"], ["4"], publisher=PublisherPosition("p", 1, 1)))
    ship(a, b)
    b.put("t", "5")
    ship(b, a)
    found = all_rows(b)
    a.close()
    b.close()
    return found


def view_rows(folder: Path) -> list[str]:
    """The rows of views that are complete, and of one that is not."""
    names = itertools.count(1)
    with random_is(lambda size: f"{next(names):0{2 * size}x}"):
        rig = ViewRig(folder, time=FakeTime())
    rig.create_topic("t", TopicSettings())
    rig.create_view("v", "t", group_by=["/g"], select=["SUM(/v) AS s", "MIN(/v) AS lo", "MAX(/v) AS hi"])
    for key, value in (("1", "1.5"), ("2", str(2**70)), ("3", '"x"'), ("4", "true"), ("5", "0.1")):
        rig.put("t", key, b'{"g":"A","v":%b}' % value.encode())
    rig.create_view("w", "t", select=["/v"], built=False)
    found = all_rows(rig)
    rig.close()
    return found


def current(folder: Path) -> tuple[list[str], list[str]]:
    """The lines of both golden files, as the code makes them now."""
    told = talk(folder / "told")
    read = read_back(folder / "read", told.rows)
    return [*digests(told), *digests(read)], [
        *told.rows,
        "# replicated",
        *replicated_rows(folder),
        "# views",
        *view_rows(folder),
    ]


def write() -> None:
    """Writes the golden files anew."""
    GOLDEN.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for file, lines in zip((WIRE, ROWS), current(Path(folder)), strict=True):
            file.write_text("".join(f"{line}\n" for line in lines))


def golden(file: Path) -> list[str]:
    return file.read_text().splitlines()


@pytest.fixture(scope="module")
def talked(tmp_path_factory: pytest.TempPathFactory) -> Conversation:
    return talk(tmp_path_factory.mktemp("told"))


@pytest.mark.slow
def test_every_answer_and_frame_has_the_bytes_that_it_had(talked: Conversation) -> None:
    found = digests(talked)
    assert [line for line in golden(WIRE) if " of the rows" not in line] == found, changed(talked, found)


def test_every_row_of_a_data_directory_has_the_bytes_that_it_had(talked: Conversation, tmp_path: Path) -> None:
    assert golden(ROWS) == [*talked.rows, "# replicated", *replicated_rows(tmp_path), "# views", *view_rows(tmp_path)]
    assert {row.split(" ")[0] for row in golden(ROWS)} == {*FAMILIES, "#"}, "there are rows of every family"


def test_a_data_directory_of_then_is_read_as_it_was(tmp_path: Path) -> None:
    rows = golden(ROWS)
    read = read_back(tmp_path, rows[: rows.index("# replicated")])
    found = digests(read)
    assert [line for line in golden(WIRE) if " of the rows" in line] == found, changed(read, found)


def changed(told: Conversation, found: Sequence[str]) -> str:
    """The answers that differ from the golden ones, as messages."""
    known = set(golden(WIRE))
    calls = [line.split(":")[0] for line in found if line not in known]
    return "\n\n".join(f"{call}: {told.answers.get(call)}" for call in calls[:5])


if __name__ == "__main__":
    write()
