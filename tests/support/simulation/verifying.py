"""Two stores in memory that verify and repair, through the messages and the answering side of either (rule R10).

Nothing waits: `sleep` runs the events that a test has set for it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import pytest

from sow.v1 import admin_pb2, replication_pb2, types_pb2
from sow_peering import Checksums, InstanceIdentity, MergeCounts, RecordVersion, TopicAnswer, TopicKind
from sow_peering.answers import Answer
from sow_replication.ports import Counted, Refused
from sow_replication.repair import fetch_rows, merge_rows, repair
from sow_replication.verify import Means, checksum, list_versions, verify
from tests.support.simulation.replica_local import given
from tests.support.stores.stores import START

NEVER = 2**63 - 1
ORDERS = TopicKind("orders", ("/id",), "json", b"\1", acts=True)
T = TypeVar("T")


class Row(NamedTuple):
    """A record, or a tombstone."""

    version: int
    origin: str = "a"
    payload: str = "x"
    expire_time: int = NEVER
    dead: bool = False


class FakeStore:
    """A store as verify and repair see it: topics as dicts, a clock that stands, and merging by version."""

    def __init__(self, name: str, *kinds: TopicKind) -> None:
        self.identity = InstanceIdentity(name, f"id-{name}", "epoch")
        self.cluster = ""
        self.kinds = {kind.name: kind for kind in kinds or (ORDERS,)}
        self.rows_of: dict[str, dict[bytes, Row]] = {kind.name: {} for kind in kinds or (ORDERS,)}
        self.orders = self.rows_of.setdefault("orders", {})
        """The rows of the topic of most tests."""
        self.now = START
        self.merges: list[int] = []
        """Rows of each merge."""
        self.scans = 0
        self.refuses: Refused | None = None
        self.unreadable = 0
        """The answer to a merge."""

    def now_micros(self) -> int:
        return self.now

    def topics(self, pattern: str) -> list[TopicKind]:
        return [kind for name, kind in self.kinds.items() if pattern.replace("\\", "") == name]

    def check(self, topic: TopicKind) -> TopicAnswer:
        own = self.kinds.get(topic.name)
        if own is None:
            return TopicAnswer(
                topic.name, reason=types_pb2.ERROR_REASON_TOPIC_NOT_FOUND, message="there is no such topic"
            )
        if (own.key, own.message_type, own.separator) != (topic.key, topic.message_type, topic.separator):
            return TopicAnswer(topic.name, reason=types_pb2.ERROR_REASON_TOPIC_DIFFERS, message="the key differs")
        if not own.journal:
            return TopicAnswer(topic.name, reason=types_pb2.ERROR_REASON_NO_JOURNAL, message="it has no journal")
        return TopicAnswer(topic.name)

    def _live(self, topic: str, now_micros: int) -> dict[bytes, tuple[Row, int]]:
        self.scans += 1
        if self.kinds[topic].acts and self.now > now_micros:
            raise Refused(types_pb2.ERROR_REASON_CLOCK_SKEW, "the clock here is beyond that")
        return {
            key: (row, int.from_bytes(hashlib.blake2b(repr((key, row)).encode(), digest_size=8).digest(), "big"))
            for key, row in sorted(self.rows_of[topic].items())
            if not row.dead and row.expire_time > now_micros
        }

    def checksums(self, topic: str, buckets: int, now_micros: int) -> Checksums:
        sums, records = [0] * buckets, [0] * buckets
        for key, (_, number) in self._live(topic, now_micros).items():
            bucket = zlib.crc32(key) % buckets
            sums[bucket] = (sums[bucket] + number) % 2**64
            records[bucket] += 1
        return Checksums(sums, records, self.unreadable)

    def versions(self, topic: str, buckets: int, wanted: Collection[int], now_micros: int) -> list[RecordVersion]:
        live = self._live(topic, now_micros).items()
        return [
            RecordVersion(key, row.version, number)
            for key, (row, number) in live
            if zlib.crc32(key) % buckets in wanted
        ]

    def rows(self, topic: str, keys: Sequence[bytes], bytes_max: int | None = None) -> tuple[bytes, Sequence[str]]:
        found = [(key.decode(), self.rows_of[topic][key]) for key in keys if key in self.rows_of[topic]]
        chunk = json.dumps(found).encode() if found else b""
        if bytes_max is not None and len(chunk) > bytes_max and len(keys) > 1:
            raise Refused(types_pb2.ERROR_REASON_RESULT_TOO_LARGE, "key: too many bytes")
        return chunk, sorted({row.origin for _, row in found})

    def merge_rows(self, topic: str, chunk: bytes, origins: Sequence[str], *, peer: str) -> Counted:
        if self.refuses is not None:
            return given(self.refuses)
        rows = [(key.encode(), Row(*fields)) for key, fields in json.loads(chunk)]
        assert sorted({row.origin for _, row in rows}) == sorted(origins)
        applied = 0
        for key, row in rows:
            mine = self.rows_of[topic].get(key)
            if mine is None or (row.version, row.origin) > (mine.version, mine.origin):
                self.rows_of[topic][key] = row
                applied += 1
        self.merges.append(len(rows))
        # Durable a little later, as in reality: a caller has to wait for it.
        counted: Counted = Answer()
        asyncio.get_running_loop().call_soon(counted.settle, MergeCounts(applied, len(rows) - applied))
        return counted


async def run(work: Callable[[], T]) -> T:
    """Instead of a reader thread."""
    return work()


def wire(message: T) -> T:
    """The part of a message that arrives."""
    return type(message).FromString(message.SerializeToString())  # type: ignore[attr-defined,no-any-return]  # a message


@dataclass
class FakePeer:
    """The calls, straight to the answering side of another store. `before` sees each call first, and may raise."""

    store: FakeStore
    before: Callable[[str], None] = lambda call: None
    calls: list[str] = field(default_factory=list)
    lists: list[int] = field(default_factory=list)
    """Versions in each message."""
    keys: list[int] = field(default_factory=list)
    """Keys of each fetch."""

    def _called(self, call: str) -> None:
        self.calls.append(call)
        self.before(call)

    async def checksum(self, request: replication_pb2.ChecksumRequest, /) -> replication_pb2.ChecksumResponse:
        self._called("checksum")
        return wire(await checksum(self.store, wire(request), run=run))

    async def list_versions(
        self, request: replication_pb2.ListVersionsRequest, /
    ) -> AsyncGenerator[replication_pb2.ListVersionsResponse, None]:
        self._called("list_versions")
        async for part in list_versions(self.store, wire(request), run=run):
            self.lists.append(len(part.key))
            yield wire(part)
            self._called("listed")

    async def fetch_rows(self, request: replication_pb2.FetchRowsRequest, /) -> replication_pb2.FetchRowsResponse:
        self._called("fetch_rows")
        self.keys.append(len(request.key))
        return wire(await fetch_rows(self.store, wire(request), run=run))

    async def merge_rows(self, request: replication_pb2.MergeRowsRequest, /) -> replication_pb2.MergeRowsResponse:
        self._called("merge_rows")
        return wire(await merge_rows(self.store, wire(request)))


class World:
    """Two instances, a and b; a asks."""

    def __init__(self, *kinds: TopicKind) -> None:
        self.a = FakeStore("a", *kinds)
        self.b = FakeStore("b", *kinds)
        self.peer = FakePeer(self.b)
        self.slept: list[float] = []
        self.meanwhile: list[Callable[[], None]] = []
        """The events in the first, second, … pause."""
        self.means = Means(run=run, sleep=self._sleep)

    def both(self, rows: dict[bytes, Row]) -> None:
        """Both have these."""
        self.a.orders.update(rows)
        self.b.orders.update(rows)

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        if self.meanwhile:
            self.meanwhile.pop(0)()

    def verify(self, *topics: str, keys_max: int | None = None) -> list[admin_pb2.VerifyReplicationResponse]:
        """All that verify answers."""
        request = admin_pb2.VerifyReplicationRequest(peer="b", topics=topics, keys_max=keys_max)
        return collected(verify(self.a, self.peer, list(self.a.kinds.values()), request, means=self.means))

    def verified(self) -> admin_pb2.VerifyReplicationResponse:
        """Its answer about the one topic."""
        (answer,) = self.verify()
        return answer

    def repair(self, *topics: str) -> list[admin_pb2.RepairReplicationResponse]:
        """All that repair answers."""
        request = admin_pb2.RepairReplicationRequest(peer="b", topics=topics)
        return collected(repair(self.a, self.peer, list(self.a.kinds.values()), request, means=self.means))

    def repaired(self) -> tuple[int, int, int]:
        """Its answer about the one topic: remaining differences, sent, received."""
        (answer,) = self.repair()
        assert answer.left_out == ""
        return answer.differing, answer.sent, answer.received


def collected(answers: AsyncIterator[T]) -> list[T]:
    """All answers."""

    async def collect() -> list[T]:
        return [answer async for answer in answers]

    return asyncio.run(collect())


def called(work: Awaitable[T]) -> T:
    """The result of one call."""

    async def call() -> T:
        return await work

    return asyncio.run(call())


def refused(work: Callable[[], object]) -> tuple[str, str]:
    """The reason and the message of a refusal."""
    with pytest.raises(Refused) as error:
        work()
    return types_pb2.ErrorReason.Name(error.value.reason).removeprefix("ERROR_REASON_"), error.value.message


def differences(answer: admin_pb2.VerifyReplicationResponse) -> list[tuple[str, int, int]]:
    """Keys with the versions here and there."""
    return [(each.key, each.version_here, each.version_there) for each in answer.differences]
