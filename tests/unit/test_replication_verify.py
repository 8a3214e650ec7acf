"""Verify and repair between two stores in memory, through the messages and the answering side of either (rule R10).

Nothing waits: `sleep` runs the events that a test has set for it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import pytest

from sow.v1 import admin_pb2, replication_pb2, types_pb2
from sow_peering import Checksums, Identity, MergeCounts, RecordVersion, TopicAnswer, TopicKind
from sow_replication import repair as repairing
from sow_replication import verify as verifying
from sow_replication.messages import topic_of
from sow_replication.ports import Done, Refused
from sow_replication.repair import fetch_rows, merge_rows, repair
from sow_replication.verify import Means, checksum, list_versions, verify

SECOND = 1_000_000
START = 1_700_000_000 * SECOND
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
        self.identity = Identity(name, f"id-{name}", "epoch")
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

    def rows(self, topic: str, keys: Sequence[bytes]) -> tuple[bytes, Sequence[str]]:
        found = [(key.decode(), self.rows_of[topic][key]) for key in keys if key in self.rows_of[topic]]
        return (json.dumps(found).encode(), sorted({row.origin for _, row in found})) if found else (b"", ())

    def merge_rows(self, topic: str, chunk: bytes, origins: Sequence[str], done: Done, *, peer: str) -> None:
        if self.refuses is not None:
            done(self.refuses)
            return
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
        asyncio.get_running_loop().call_soon(done, MergeCounts(applied, len(rows) - applied))


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


# --- verify ----------------------------------------------------------------------------------------------------------


def test_ends_that_are_equal_are_read_once() -> None:
    world = World()
    world.both({b"%d" % number: Row(number) for number in range(5000)})

    answer = world.verified()

    assert (answer.topic, answer.records, answer.differing, answer.left_out) == ("orders", 5000, 0, "")
    assert world.peer.calls == ["checksum"]
    assert world.slept == []


def test_differences_are_listed_with_both_versions() -> None:
    world = World()
    world.both({b"%d" % number: Row(number) for number in range(100)})
    world.a.orders |= {b"newer": Row(7), b"here": Row(3), b"content": Row(5, payload="x")}
    world.b.orders |= {b"newer": Row(6), b"there": Row(4), b"content": Row(5, payload="y")}

    answer = world.verified()

    assert answer.records == 103
    assert answer.differing == 4
    assert differences(answer) == [("content", 5, 5), ("here", 3, 0), ("newer", 7, 6), ("there", 0, 4)]


def test_tombstones_are_no_records() -> None:
    world = World()
    world.a.orders[b"1"] = Row(7, dead=True)

    assert world.verified().differing == 0


@pytest.mark.parametrize(("keys_max", "listed"), [(None, 100), (3, 3), (0, 0), (1000, 300)])
def test_a_bounded_number_of_keys_is_listed_and_all_are_counted(keys_max: int | None, listed: int) -> None:
    world = World()
    world.a.orders |= {b"%03d" % number: Row(1) for number in range(300)}

    (answer,) = world.verify(keys_max=keys_max)

    assert answer.differing == 300
    assert len(answer.differences) == listed


def test_the_keys_of_an_answer_fit_into_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "LISTED_BYTES_MAX", 50)
    world = World()
    world.a.orders |= {b"%010d" % number: Row(1) for number in range(300)}

    (answer,) = world.verify(keys_max=1000)

    assert (answer.differing, len(answer.differences)) == (300, 5)


def test_a_large_topic_has_more_buckets_so_that_little_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "BUCKETS_FIRST", 16)
    monkeypatch.setattr(verifying, "BUCKET_RECORDS", 10)
    world = World()
    world.both({b"%06d" % number: Row(1) for number in range(16 * 10 * 32)})
    world.b.orders[b"000007"] = Row(2)

    answer = world.verified()

    assert differences(answer) == [("000007", 1, 2)]
    assert max(world.peer.lists) < 3 * verifying.BUCKET_RECORDS


@pytest.mark.parametrize(("records", "buckets"), [(0, 1024), (65_536, 1024), (65_537, 2048), (10**9, 65_536)])
def test_the_number_of_buckets_follows_the_size_of_the_topic(records: int, buckets: int) -> None:
    assert verifying.buckets_for(records) == buckets


def test_much_that_differs_is_listed_in_groups_of_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "GROUP_RECORDS", 500)
    monkeypatch.setattr(verifying, "MESSAGE_VERSIONS", 100)
    world = World()
    world.b.orders |= {b"%05d" % number: Row(1) for number in range(3000)}

    (answer,) = world.verify(keys_max=3000)

    assert answer.differing == 3000
    assert [key for key, _, _ in differences(answer)] == [f"{number:05d}" for number in range(3000)]
    assert max(world.peer.lists) == 100
    looks = world.peer.calls.count("list_versions")
    assert looks == 2 * 6 or looks == 2 * 7  # two looks at each group of about 500


def test_long_keys_make_more_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "MESSAGE_KEY_BYTES", 1000)
    world = World()
    world.b.orders |= {b"%0500d" % number: Row(1) for number in range(10)}

    assert world.verified().differing == 10
    assert max(world.peer.lists) == 2


# --- changes under way -----------------------------------------------------------------------------------------------


def test_a_change_that_arrives_between_two_looks_is_no_difference() -> None:
    world = World()
    world.both({b"1": Row(1)})
    world.a.orders[b"1"] = Row(2)

    world.meanwhile = [lambda: world.b.orders.update({b"1": Row(2)})]

    assert world.verified().differing == 0
    assert len(world.slept) == 1


def test_a_key_that_keeps_changing_is_not_reported_and_one_that_differs_is() -> None:
    world = World()
    world.both({b"busy": Row(1), b"other": Row(1)})
    world.a.orders |= {b"busy": Row(2), b"stays": Row(9)}

    def change() -> None:
        version = world.a.orders[b"busy"].version
        world.b.orders[b"busy"] = Row(version)
        world.a.orders[b"busy"] = Row(version + 1)

    world.meanwhile = [change] * 10

    answer = world.verified()

    assert differences(answer) == [("stays", 9, 0)]
    assert answer.differing == 1
    assert tuple(world.slept) == verifying.PAUSES  # and it has an end


def test_while_the_link_lags_nothing_is_called_a_difference_too_soon() -> None:
    """Two looks in a row can both be in front of the same change."""
    world = World()
    world.both({b"1": Row(1)})
    world.a.orders[b"1"] = Row(2)
    lag = [True]

    def arrives() -> None:
        world.b.orders[b"1"] = Row(2)
        lag[0] = False

    world.meanwhile = [lambda: None, lambda: None, arrives]
    world.means = replace(world.means, lagging=lambda: lag[0])

    assert world.verified().differing == 0
    assert len(world.slept) == 3


def test_lag_that_ends_after_a_look_does_not_settle_its_differences() -> None:
    world = World()
    world.both({b"1": Row(1)})
    world.a.orders[b"1"] = Row(2)
    lag = [True]
    looks = [0]

    def before(call: str) -> None:
        if call == "listed":
            looks[0] += 1
            if looks[0] == 2:  # arrives right behind the second look, which had begun with the link behind
                world.b.orders[b"1"] = Row(2)
                lag[0] = False

    world.peer.before = before
    world.means = replace(world.means, lagging=lambda: lag[0])

    assert world.verified().differing == 0


def test_stable_differences_are_reported_in_the_end_on_a_link_that_always_lags() -> None:
    world = World()
    world.a.orders[b"1"] = Row(2)
    world.means = replace(world.means, lagging=lambda: True)

    assert differences(world.verified()) == [("1", 2, 0)]
    assert tuple(world.slept) == verifying.PAUSES


# --- expiration ------------------------------------------------------------------------------------------------------


def test_records_due_soon_are_left_out_at_both_ends() -> None:
    world = World()
    world.both({b"1": Row(1)})
    world.a.orders[b"due"] = Row(2, expire_time=START + verifying.MARGIN_MICROS)

    answer = world.verified()

    assert (answer.records, answer.differing) == (1, 0)


@pytest.mark.parametrize("seconds", [-100, 2, 100, 1800])
def test_clocks_that_differ_make_no_differences(seconds: int) -> None:
    """The end with the clock ahead has expired records that the other one still has."""
    world = World()
    world.both({b"stays": Row(1)})
    world.b.now = START + seconds * SECOND
    expiring = {b"%d" % number: Row(2, expire_time=START + number * SECOND) for number in range(-2999, 3000, 50)}
    for store in (world.a, world.b):
        store.orders.update({key: row for key, row in expiring.items() if row.expire_time > store.now})
    assert world.a.orders != world.b.orders

    answer = world.verified()

    assert (answer.differing, answer.left_out) == (0, "")
    assert answer.records >= 1


def test_the_offset_of_the_clocks_is_learned_once_for_all_topics() -> None:
    other = ORDERS._replace(name="other")
    world = World(ORDERS, other)
    world.b.now = START + 10 * SECOND

    assert [answer.left_out for answer in world.verify()] == ["", ""]

    assert world.peer.calls.count("checksum") == 4  # margins of 1, 4 and 16 seconds; then 16 at once


def test_clocks_far_apart_leave_topics_out_that_act_on_expiration() -> None:
    keeps = ORDERS._replace(name="keeps", acts=False)
    world = World(ORDERS, keeps)
    world.b.now = START + 2 * verifying.MARGIN_MICROS_MAX

    acting, keeping = world.verify()

    assert "at b: " in acting.left_out
    assert keeping.left_out == ""


# --- topics that are left out ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("there", "why"),
    [
        (None, "at b: there is no "),
        (ORDERS._replace(key=("/other",)), "at b: the key differs"),
        (ORDERS._replace(message_type="msgpack"), "at b: the key differs"),
        (ORDERS._replace(acts=False), "at b: expiration differs"),
        (ORDERS._replace(journal=False), "at b: it has no journal"),
    ],
)
def test_a_topic_that_cannot_be_compared_is_left_out_and_the_rest_goes_on(there: TopicKind | None, why: str) -> None:
    other = ORDERS._replace(name="other")
    world = World(ORDERS, other)
    world.a.orders[b"1"] = Row(1)
    world.a.rows_of["other"][b"1"] = Row(1)
    if there is None:
        del world.b.kinds["orders"]
    else:
        world.b.kinds["orders"] = there

    verified = world.verify()
    repaired = world.repair()

    for left_out, gone_on in (verified, repaired):
        assert left_out.topic == "orders"
        assert left_out.left_out.startswith(why)
        assert (gone_on.topic, gone_on.left_out) == ("other", "")
    assert world.b.rows_of["orders"] == {}
    assert world.b.rows_of["other"] == {b"1": Row(1)}


def test_only_the_wanted_topics_are_compared_and_unknown_ones_are_named() -> None:
    world = World(ORDERS, ORDERS._replace(name="other"))

    answers = world.verify("other", "nothing", "other")

    assert [(answer.topic, answer.left_out) for answer in answers] == [
        ("other", ""),
        ("nothing", verifying.NOT_OF_THE_LINK),
    ]
    assert [answer.topic for answer in world.repair("nothing")] == ["nothing"]


def test_a_topic_without_a_journal_here_and_a_link_with_a_filter_are_left_out_without_asking() -> None:
    world = World(ORDERS._replace(journal=False))
    assert world.verified().left_out == "it has no journal here"

    world = World()
    world.means = replace(world.means, filter_text="/x = 1")
    assert world.verified().left_out == "the link has a filter: /x = 1"
    assert world.repair()[0].left_out == "the link has a filter: /x = 1"
    assert world.peer.calls == []


def test_a_topic_that_is_deleted_meanwhile_is_left_out() -> None:
    world = World()
    world.a.orders[b"1"] = Row(1)
    world.meanwhile = [world.b.kinds.clear]

    assert world.verified().left_out.startswith("at b: there is no topic")


def test_an_instance_does_not_verify_itself() -> None:
    """It would always be equal."""
    world = World()
    world.peer.store = world.a

    assert refused(world.verify)[0] == "PEER_IS_SELF"


# --- a peer that goes away -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost_at", ["checksum", "list_versions", "listed", "fetch_rows", "merge_rows"])
def test_a_peer_that_goes_away_ends_it_with_the_reason_and_earlier_answers_stay(lost_at: str) -> None:
    first = ORDERS._replace(name="a-first")
    world = World(first, ORDERS)
    world.a.orders[b"1"] = Row(1)
    world.b.orders[b"2"] = Row(1)
    answered: list[str] = []

    def before(call: str) -> None:
        if answered and call == lost_at:
            raise Refused(types_pb2.ERROR_REASON_REPLICATION_UNAVAILABLE, "the connection is gone")

    world.peer.before = before

    async def use() -> None:
        nonlocal answered
        request = admin_pb2.RepairReplicationRequest(peer="b")
        async for answer in repair(world.a, world.peer, list(world.a.kinds.values()), request, means=world.means):
            answered += [answer.topic]

    reason, message = refused(lambda: asyncio.run(use()))

    assert (reason, message) == ("REPLICATION_UNAVAILABLE", "at b: the connection is gone")
    assert answered == ["a-first"]


def test_an_answer_that_breaks_the_protocol_is_refused() -> None:
    world = World()
    world.b.checksums = lambda topic, buckets, now_micros: Checksums([0], [0], 0)  # type: ignore[method-assign]  # the peer is at fault

    assert refused(world.verify)[0] == "PROTOCOL_MISMATCH"


# --- repair ----------------------------------------------------------------------------------------------------------


def test_the_newer_one_wins_at_both_ends() -> None:
    world = World()
    world.both({b"%d" % number: Row(number) for number in range(100)})
    world.a.orders |= {b"newer": Row(7), b"older": Row(3), b"here": Row(3), b"tie": Row(5, origin="a")}
    world.b.orders |= {b"newer": Row(6), b"older": Row(4), b"there": Row(4), b"tie": Row(5, origin="b")}

    assert world.repaired() == (0, 2, 3)

    assert world.a.orders == world.b.orders
    assert world.a.orders[b"newer"] == Row(7)
    assert world.a.orders[b"older"] == Row(4)
    assert world.a.orders[b"tie"] == Row(5, origin="b")


def test_a_delete_that_was_missed_is_made_good_not_undone() -> None:
    world = World()
    world.a.orders |= {b"deleted here": Row(9, dead=True), b"deleted there": Row(1)}
    world.b.orders |= {b"deleted here": Row(1), b"deleted there": Row(9, dead=True)}

    assert world.repaired() == (0, 1, 1)

    assert all(row.dead for store in (world.a, world.b) for row in store.orders.values())


def test_ends_that_are_equal_are_not_written_to() -> None:
    world = World()
    world.both({b"1": Row(1)})

    assert world.repaired() == (0, 0, 0)
    assert world.peer.calls == ["checksum"]


def test_one_version_with_two_contents_is_reported_as_differing_still() -> None:
    """No version decides between them: it should not be, and it is not passed over in silence."""
    world = World()
    world.a.orders |= {b"1": Row(5, payload="x"), b"2": Row(1)}
    world.b.orders[b"1"] = Row(5, payload="y")

    assert world.repaired() == (1, 1, 0)
    assert differences(world.verified()) == [("1", 5, 5)]


def test_many_keys_go_in_messages_of_a_thousand_at_most() -> None:
    world = World()
    world.a.orders |= {b"a%05d" % number: Row(1) for number in range(3000)}
    world.b.orders |= {b"b%05d" % number: Row(1) for number in range(3000)}

    assert world.repaired() == (0, 3000, 3000)

    assert max(world.peer.keys) == repairing.ROWS_MAX
    assert max(world.a.merges) <= repairing.ROWS_MAX
    assert len(world.peer.keys) < 15  # small first messages, soon full ones


@pytest.mark.parametrize("side", ["a", "b"])
def test_large_rows_go_in_messages_of_bounded_size(monkeypatch: pytest.MonkeyPatch, side: str) -> None:
    monkeypatch.setattr(repairing, "ROWS_BYTES_MAX", 10_000)
    world = World()
    rows = {b"%03d" % number: Row(1, payload="x" * 3000) for number in range(20)}
    rows[b"huge"] = Row(1, payload="x" * 50_000)
    (world.a if side == "a" else world.b).orders.update(rows)

    assert world.repaired() == ((0, 21, 0) if side == "a" else (0, 0, 21))

    assert world.a.orders == world.b.orders == rows
    assert max(world.a.merges + world.b.merges) <= 3


def test_a_store_that_refuses_to_merge_ends_the_repair_with_its_reason() -> None:
    for side in ("a", "b"):
        world = World()
        world.a.orders[b"1"] = Row(1)
        world.b.orders[b"2"] = Row(1)
        store = world.a if side == "a" else world.b
        store.refuses = Refused(types_pb2.ERROR_REASON_DISK_FULL, "the disk is full")

        assert refused(world.repair) == ("DISK_FULL", f"at {side}: the disk is full")


def test_the_repaired_part_of_a_topic_is_reported_when_it_is_deleted_meanwhile() -> None:
    world = World()
    world.a.orders[b"1"] = Row(1)

    def before(call: str) -> None:
        if call == "checksum" and "merge_rows" in world.peer.calls:
            world.b.kinds.clear()

    world.peer.before = before

    (answer,) = world.repair()

    assert (answer.sent, answer.received) == (1, 0)
    assert answer.left_out.startswith("at b: there is no ")


def test_whatever_differs_the_ends_are_equal_after_a_repair(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(30):
        world = World()
        for store in (world.a, world.b):
            for _ in range(draw.randrange(200)):
                key, version, origin = b"%d" % draw.randrange(150), draw.randrange(1, 6), draw.choice("ab")
                # Version and origin identify a change.
                store.orders[key] = Row(version, origin, f"{version}{origin}", dead=(version + len(key)) % 3 == 0)

        assert world.repaired()[0] == 0

        live = [{key: row for key, row in store.orders.items() if not row.dead} for store in (world.a, world.b)]
        assert live[0] == live[1]


# --- answering -------------------------------------------------------------------------------------------------------


def test_requests_out_of_bounds_are_refused() -> None:
    store = FakeStore("b")
    topic = topic_of(ORDERS)

    def sums(**changes: int) -> Callable[[], object]:
        request = replication_pb2.ChecksumRequest(topic=topic, buckets=8, now_micros=START)
        for name, value in changes.items():
            setattr(request, name, value)
        return lambda: called(checksum(store, request, run=run))

    def listed(topic: str = "orders", bucket: int = 0, times: int = 1) -> Callable[[], object]:
        request = replication_pb2.ListVersionsRequest(topic=topic, buckets=8, bucket=[bucket] * times, now_micros=START)
        return lambda: collected(list_versions(store, request, run=run))

    def fetched(*keys: str, topic: str = "orders") -> Callable[[], object]:
        return lambda: called(fetch_rows(store, replication_pb2.FetchRowsRequest(topic=topic, key=keys), run=run))

    sums()()
    listed()()
    fetched(*map(str, range(1000)))()
    assert refused(sums(buckets=0))[0] == "INVALID_ARGUMENT"
    assert refused(sums(buckets=65_537))[0] == "INVALID_ARGUMENT"
    assert refused(sums(now_micros=0))[0] == "INVALID_ARGUMENT"
    assert refused(listed(bucket=8))[0] == "INVALID_ARGUMENT"
    assert refused(listed(times=65_537))[0] == "INVALID_ARGUMENT"
    assert refused(listed(topic="nothing"))[0] == "TOPIC_NOT_FOUND"
    assert refused(fetched())[0] == "INVALID_ARGUMENT"
    assert refused(fetched(*map(str, range(1001))))[0] == "REQUEST_TOO_LARGE"
    assert refused(fetched("1", topic="nothing"))[0] == "TOPIC_NOT_FOUND"


def test_rows_that_do_not_match_their_checksum_are_not_merged() -> None:
    store = FakeStore("b")
    other = FakeStore("a")
    other.orders[b"1"] = Row(1)
    chunk, origins = other.rows("orders", [b"1"])
    request = replication_pb2.MergeRowsRequest(
        topic=topic_of(ORDERS), chunk=chunk.replace(b"x", b"y"), origins=origins, crc32=zlib.crc32(chunk)
    )

    assert refused(lambda: called(merge_rows(store, request)))[0] == "BATCH_DAMAGED"
    assert store.orders == {}

    request.chunk = chunk
    assert called(merge_rows(store, request)) == replication_pb2.MergeRowsResponse(applied=1, passed_over=0)
    assert called(merge_rows(store, request)) == replication_pb2.MergeRowsResponse(applied=0, passed_over=1)


def test_rows_of_a_topic_that_differs_are_not_merged() -> None:
    store = FakeStore("b", ORDERS._replace(key=("/other",)))
    request = replication_pb2.MergeRowsRequest(topic=topic_of(ORDERS), chunk=b"[]", crc32=zlib.crc32(b"[]"))

    assert refused(lambda: called(merge_rows(store, request)))[0] == "TOPIC_DIFFERS"
    assert store.merges == []
