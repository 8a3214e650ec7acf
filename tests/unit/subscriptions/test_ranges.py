"""Ranges of changes: planned, split, read, read again; the journal pinned for their readers (S2, S4, S7, J1, J10)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sow_server.engine.durables import Durable
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import BacklogAction, Delete, Durability, Expiration, Publish, TopicSettings
from sow_server.query.filtering import record_filter
from sow_server.subscriptions.frames import ChangeOp, ChangeReason
from sow_server.subscriptions.journal import ranges
from sow_server.subscriptions.journal.ranges import (
    KeySet,
    KeyShare,
    RangeBounds,
    RangeLimits,
    RangePlan,
    RangeReader,
    plan_range,
)
from sow_server.subscriptions.request import FROM_NOW, Start, StartKind
from tests.support.stores.stores import HOUR, MINUTE, SECOND, Rig
from tests.support.stores.subscribers import EARLIEST, NAMES, Subscribers

JSON = TopicSettings(expiration=Expiration.ENABLED, retain_time_micros=10 * MINUTE, retain_bytes=None)
BOOKMARK = Start(StartKind.BOOKMARK)
SHORT = TopicSettings(retain_time_micros=SECOND, retain_bytes=None)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    rig.create_topic("orders", JSON)
    rig.create_topic("other", JSON)
    yield rig
    rig.close()


@pytest.fixture
def subscribers(rig: Rig) -> Subscribers:
    return Subscribers(rig)


def put(rig: Rig, *keys: str, px: int = 1, topic: str = "orders", atomic: bool = False) -> None:
    """One commit."""
    rig.run(Publish(topic, [b'{"px":%d}' % px] * len(keys), list(keys), atomic=atomic))


def planned(
    rig: Rig,
    start: Start | int = EARLIEST,
    end: int | None = None,
    *,
    entries: int = 0,
    size: int = 0,
    parts: int = 1,
    topic: str = "orders",
) -> RangePlan:
    position = start if isinstance(start, int) else 0
    kind = BOOKMARK if isinstance(start, int) else start
    return plan_range(
        rig.store.cuts, rig.store.instance, rig.topic(topic), kind, position, end, RangeLimits(entries, size, parts)
    )


Seen = tuple[str, str, int]
"""The operation, the key and the price."""


def read(
    rig: Rig,
    start: int,
    end: int,
    text: str = "",
    *,
    history: int | None = None,
    batch_size: int = 10_000,
    topic: str = "orders",
    share: KeyShare | None = None,
    elsewhere: bool = False,
) -> list[list[Seen]]:
    """The pieces of a range."""
    found = rig.topic(topic)
    given = record_filter(found, text, 0, allow_now=False) if text else None
    reader = RangeReader(
        rig.store.reads,
        found,
        given,
        RangeBounds(start, end, history),
        batch_size=batch_size,
        share=share,
        elsewhere=elsewhere,
    )
    pieces: list[list[Seen]] = []
    while not reader.done:
        columns = reader.read().columns
        pieces.append(
            [
                (NAMES[ChangeOp(op), ChangeReason(why)], key.decode(), int(payload[6:-1]))
                for op, why, key, payload in zip(
                    columns.ops, columns.reasons, columns.keys, columns.payloads, strict=True
                )
            ]
        )
    return pieces


def rows(rig: Rig, start: int, end: int, text: str = "", *, history: int | None = None) -> list[Seen]:
    return [row for piece in read(rig, start, end, text, history=history) for row in piece]


def last(rig: Rig) -> int:
    return rig.store.writer.last_sequence


# --- planning --------------------------------------------------------------------------------------------------------


def test_a_plan_reaches_from_its_start_to_the_head(rig: Rig) -> None:
    begin = last(rig)
    put(rig, "a", "b")
    put(rig, "c")
    whole = planned(rig, begin)
    assert (whole.start, whole.end, whole.head, whole.entries, whole.entries_left) == (
        begin,
        last(rig),
        last(rig),
        3,
        0,
    )
    assert whole.part_ends == (last(rig),)
    assert whole.bytes == rig.topic("orders").statistics.appended_bytes
    assert planned(rig, EARLIEST).entries == 3
    assert planned(rig, FROM_NOW) == planned(rig, last(rig))
    assert planned(rig, FROM_NOW).part_ends == ()


def test_planning_a_range_uses_the_topic(rig: Rig) -> None:
    """T1. A query that follows by ranges would otherwise lose its topic while nothing is published."""
    rig.time.tick(HOUR)
    planned(rig, 0)
    assert rig.topic("orders").last_use_micros == rig.clock.now_micros()


def test_a_plan_of_an_idle_topic_follows_the_head(rig: Rig) -> None:
    """Else the offset of a query on a topic that is quiet would fall behind the journal of the instance."""
    put(rig, "a")
    begin = last(rig)
    put(rig, "x", topic="other")
    idle = planned(rig, begin)
    assert (idle.end, idle.entries, idle.part_ends) == (last(rig), 0, ())
    assert last(rig) > begin


def test_a_plan_is_never_ahead_of_the_disk(rig: Rig) -> None:
    """S7."""
    put(rig, "a")
    synced = last(rig)
    rig.run(Publish("orders", [b'{"px":2}'], ["b"], durability=Durability.BUFFERED))
    assert last(rig) > synced
    found = planned(rig)
    assert (found.end, found.head, found.entries, found.entries_left) == (synced, synced, 1, 0)


def test_a_plan_starts_at_a_time(rig: Rig) -> None:
    put(rig, "a")
    first = last(rig)
    rig.time.tick(MINUTE)
    put(rig, "b")
    begin = rig.clock.now_micros()
    assert planned(rig, Start(StartKind.TIME, time_micros=begin - SECOND)).start == first
    assert planned(rig, Start(StartKind.TIME, time_micros=begin + HOUR)).start == last(rig)
    assert planned(rig, Start(StartKind.TIME, time_micros=1)) == planned(rig, EARLIEST)


def test_limits_end_a_plan_with_a_commit(rig: Rig) -> None:
    begin = last(rig)
    put(rig, "a", "b", "c")
    one = last(rig)
    put(rig, "x", "y", topic="other")
    put(rig, "d", "e", atomic=True)
    two = last(rig)
    put(rig, "f")
    size = planned(rig, begin, one).bytes
    for limit, end, entries in (
        (1, one, 3),
        (3, one, 3),
        (4, one, 3),
        (5, two, 5),
        (6, last(rig), 6),
        (99, last(rig), 6),
    ):
        found = planned(rig, begin, entries=limit)
        assert found.entries == entries
        assert rows(rig, begin, found.end) == rows(rig, begin, end)
        assert found.entries_left == 6 - entries
        assert [len(piece) for piece in read(rig, found.end, last(rig))] in ([6 - entries], [])
    assert planned(rig, begin, size=1).entries == 3
    assert planned(rig, begin, size=size).entries == 3
    assert planned(rig, begin, size=size, entries=99).entries == 3
    assert planned(rig, begin, size=10**9, entries=5).entries == 5


def test_requests_that_share_a_commit_stay_together(rig: Rig) -> None:
    """ranges [1]: also where it has several chunks of the topic."""
    begin = last(rig)
    requests = [
        Publish(topic, [b'{"px":1}'] * len(keys), list(keys))
        for topic, keys in (("orders", "abc"), ("other", "x"), ("orders", "ef"), ("other", "y"), ("orders", "gh"))
    ]
    rig.run_together(requests)
    end = last(rig)
    cut = rig.store.cuts.journal()
    assert [(commit.last_sequence, len(commit.runs)) for commit in cut.commits(begin, end)] == [(end, 5)]
    cut.close()
    put(rig, "i")
    for found in (planned(rig, begin, entries=1), planned(rig, begin, entries=7), planned(rig, begin, size=1)):
        assert (found.end, found.entries) == (end, 7)
    assert planned(rig, begin, parts=9).part_ends == (end, end + 1)


def test_a_plan_that_begins_inside_a_commit_ends_with_it(rig: Rig) -> None:
    begin = last(rig)
    put(rig, "a", "b", "c")
    put(rig, "d")
    found = planned(rig, begin + 1, entries=1)
    assert (found.end, found.entries) == (begin + 3, 2)


def test_parts_are_about_equal_and_none_is_empty(rig: Rig) -> None:
    begin = last(rig)
    for number in range(20):
        put(rig, *[f"k{number}-{index}" for index in range(5)])
        put(rig, "x", topic="other")
    for parts in (1, 2, 3, 4, 7, 20, 50):
        found = planned(rig, begin, parts=parts)
        starts = (begin, *found.part_ends)
        counts = [planned(rig, start, end).entries for start, end in zip(starts, found.part_ends, strict=False)]
        assert found.part_ends[-1] == found.end
        assert sum(counts) == found.entries == 100
        assert len(counts) == min(parts, 20)
        assert max(counts) <= 100 / min(parts, 20) + 5
        assert min(counts) > 0
        assert all(count % 5 == 0 for count in counts), "commits are whole"


@pytest.mark.parametrize("kind", ["old", "backwards"])
def test_plans_that_cannot_be(rig: Rig, kind: str) -> None:
    begin = last(rig)
    put(rig, "a")
    if kind == "old":
        rig.time.tick(HOUR)
        rig.prune()
        with pytest.raises(StoreError) as refused:
            planned(rig, begin)
        assert refused.value.reason is Reason.BOOKMARK_TOO_OLD
        earliest = rig.topic("orders").statistics.floor_sequence
        assert refused.value.details["earliest_sequence"] == str(earliest + 1)
        assert refused.value.details["earliest_bookmark"] == rig.store.instance.bookmark(earliest)
        assert planned(rig, earliest).entries == 0
        assert planned(rig, EARLIEST).start == planned(rig, FROM_NOW).earliest == earliest
    else:
        with pytest.raises(StoreError) as refused:
            planned(rig, begin + 1, begin)
        assert refused.value.reason is Reason.INVALID_ARGUMENT


def test_a_topic_made_anew_does_not_go_on_with_the_old_one(rig: Rig) -> None:
    """The last position of the old one was taken for the beginning of the new one."""
    begin = last(rig)
    put(rig, "a")
    end = last(rig)
    rig.delete_topic("orders")
    rig.create_topic("orders", JSON)
    for position in (begin, end):
        with pytest.raises(StoreError) as refused:
            planned(rig, position)
        assert refused.value.reason is Reason.BOOKMARK_TOO_OLD


def test_a_topic_without_a_journal_has_no_ranges(rig: Rig) -> None:
    rig.alter_topic("orders", journal=False)
    with pytest.raises(StoreError) as refused:
        planned(rig, EARLIEST)
    assert refused.value.reason is Reason.NO_JOURNAL
    with pytest.raises(StoreError) as refused:
        read(rig, last(rig) - 1, last(rig))
    assert refused.value.reason is Reason.NO_JOURNAL


# --- reading ---------------------------------------------------------------------------------------------------------


def test_a_range_has_every_change_with_the_record_that_went(rig: Rig) -> None:
    begin = last(rig)
    rig.put("orders", "a", b'{"px":1}', ttl=MINUTE)
    put(rig, "b", px=2)
    rig.touch("orders", "b", ttl=HOUR)
    rig.delete("orders", "b")
    rig.time.tick(2 * MINUTE)
    rig.store.sweep()
    rig.store.writer.step()
    expected = [("put", "a", 1), ("put", "b", 2), ("touched", "b", 2), ("delete", "b", 2), ("expire", "a", 1)]
    assert rows(rig, begin, last(rig)) == expected
    assert rows(rig, begin, last(rig)) == expected, "also when it is read again"


def test_a_filter_is_checked_against_the_old_and_the_new_record(rig: Rig) -> None:
    """S2."""
    begin = last(rig)
    put(rig, "a", "b", px=1)
    put(rig, "a", px=5)
    put(rig, "b", px=6)
    put(rig, "a", px=2)
    rig.delete("orders", "a", "b")
    assert rows(rig, begin, last(rig), "/px > 4") == [
        ("put", "a", 5),
        ("put", "b", 6),
        ("put", "a", 2),
        ("delete", "b", 6),
    ]


@pytest.mark.parametrize("text", ["", "/px > 1"])
def test_shares_of_the_keys_have_every_change_and_those_of_a_key_in_order(rig: Rig, text: str) -> None:
    """Readers of a range in parallel would otherwise bring the changes of a key in any order."""
    begin = last(rig)
    names = [f"k{number}" for number in range(40)]
    for px in (1, 2, 3):
        put(rig, *names, px=px)
    rig.delete("orders", *names[:10])
    whole = rows(rig, begin, last(rig), text)

    shares = [
        [row for piece in read(rig, begin, last(rig), text, share=KeyShare(number, 3), batch_size=7) for row in piece]
        for number in range(3)
    ]

    assert all(len(share) >= len(whole) // 10 for share in shares), "one of them has hardly anything"
    for share in shares:
        keys = {key for _, key, _ in share}
        assert share == [row for row in whole if row[1] in keys], "all of a key, in order"
    assert sum(map(len, shares)) == len(whole)


@pytest.mark.parametrize("text", ["", "/px < 5"])
def test_some_keys_have_their_changes_alone(rig: Rig, text: str) -> None:
    begin = last(rig)
    put(rig, "a", "b", "c", px=1)
    rig.delete("orders", "b")
    put(rig, "b", "a", px=2, atomic=True)
    found = rig.topic("orders")
    reader = RangeReader(
        rig.store.reads,
        found,
        record_filter(found, text, 0, allow_now=False) if text else None,
        RangeBounds(begin, last(rig)),
        share=KeySet(frozenset([b"b", b"none"])),
    )
    columns = reader.read().columns
    assert reader.done
    assert set(columns.keys) == {b"b"}
    assert list(columns.ops) == [ChangeOp.PUT, ChangeOp.DELETE, ChangeOp.PUT]


def test_with_a_history_a_range_reads_the_same_after_earlier_changes_are_pruned(rig: Rig) -> None:
    """J1: the previous value of a record is unknown below the floor, which rises; from `history` on it never is."""
    put(rig, "a", "b", px=1)
    begin = last(rig)
    rig.time.tick(9 * MINUTE)
    put(rig, "a", px=2)
    put(rig, "a", px=3)
    end = last(rig)
    known, cautious = rows(rig, begin, end, "/px > 4"), rows(rig, begin, end, "/px > 4", history=begin)
    assert known == []
    assert cautious == [("put", "a", 2)], "it may have matched; after the range has begun it is known"
    rig.time.tick(2 * MINUTE)
    rig.prune()
    assert rig.topic("orders").statistics.floor_sequence == begin
    assert rows(rig, begin, end, "/px > 4") == rows(rig, begin, end, "/px > 4", history=begin) == cautious
    rig.time.tick(8 * MINUTE)
    rig.prune()
    with pytest.raises(StoreError) as refused:
        rows(rig, end, end + 1, "/px > 4", history=begin)
    assert (refused.value.reason, refused.value.field) == (Reason.BOOKMARK_TOO_OLD, "history_bookmark")


def test_pieces_are_bounded_and_each_can_be_gone_on_from(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """ranges [5]."""
    monkeypatch.setattr(ranges, "READ_CHANGES", 2)
    begin = last(rig)
    put(rig, "a", "b", "c", px=5)
    put(rig, "d", "e", "f", px=5, atomic=True)
    put(rig, *"ghijk", px=5, atomic=True)
    whole = rows(rig, begin, last(rig))
    assert [len(piece) for piece in read(rig, begin, last(rig), batch_size=4) if piece] == [3, 3, 4, 1]
    for text in ("", "/px > 4"):
        for batch_size in (1, 2, 3, 4, 5, 100):
            pieces = read(rig, begin, last(rig), text, batch_size=batch_size)
            assert [row for piece in pieces for row in piece] == whole
            assert max(map(len, pieces)) <= batch_size
        for position in range(begin, last(rig) + 1):
            assert rows(rig, begin, position, text) + rows(rig, position, last(rig), text) == whole
    monkeypatch.setattr(ranges, "PIECE_BYTES", 3 * (ranges.ROW_BYTES + 9))
    assert [len(piece) for piece in read(rig, begin, last(rig)) if piece] == [3, 3, 3, 2]
    monkeypatch.setattr(ranges, "PIECE_BYTES", 1)
    assert [row for piece in read(rig, begin, last(rig)) for row in piece] == whole, "one at least"


@pytest.mark.parametrize("how", ["pruned", "deleted", "journal off"])
def test_a_range_that_is_lost_while_it_is_read_is_refused(rig: Rig, how: str) -> None:
    """ranges [4]: never a silent gap."""
    begin = last(rig)
    put(rig, *"abcdef")
    rig.time.tick(MINUTE)
    put(rig, "g")
    reader = RangeReader(rig.store.reads, rig.topic("orders"), None, RangeBounds(begin, last(rig)), batch_size=2)
    assert len(reader.read().columns.keys) == 2
    match how:
        case "pruned":
            rig.time.tick(9 * MINUTE + SECOND)
            rig.prune()
        case "deleted":
            rig.delete_topic("orders")
        case _:
            rig.alter_topic("orders", journal=False)
    with pytest.raises(StoreError) as refused:
        reader.read()
    reasons = {"pruned": Reason.BOOKMARK_TOO_OLD, "deleted": Reason.TOPIC_DELETED, "journal off": Reason.NO_JOURNAL}
    assert refused.value.reason is reasons[how]


# --- pinning ---------------------------------------------------------------------------------------------------------


def pin(subscribers: Subscribers, position: int, name: str = "query", *, idle_ttl: int = HOUR) -> tuple[Durable, bool]:
    answers: list[tuple[Durable, bool] | StoreError] = []
    topic = subscribers.rig.topic("orders")
    subscribers.consumers.pin(topic, name, position, idle_ttl_micros=idle_ttl).then(answers.append)
    return subscribers.answer(answers)


def test_a_pin_keeps_the_journal_from_its_position_on(rig: Rig, subscribers: Subscribers) -> None:
    put(rig, "a")
    begin = last(rig)
    put(rig, "b")
    middle = last(rig)
    put(rig, "c")
    end = last(rig)
    durable, created = pin(subscribers, begin)
    assert (created, durable.position, durable.attached, durable.filter) == (True, begin, False, "")
    rig.time.tick(30 * MINUTE)
    rig.prune()
    assert rows(rig, begin, end) == [("put", "b", 1), ("put", "c", 1)]
    with pytest.raises(StoreError):
        planned(rig, begin - 1)
    durable, created = pin(subscribers, middle)
    assert (created, durable.position) == (False, middle)
    assert pin(subscribers, begin)[0].position == middle, "never back"
    rig.prune()
    assert rows(rig, middle, end) == [("put", "c", 1)]
    with pytest.raises(StoreError):
        planned(rig, begin)


def test_a_pin_goes_when_it_is_not_renewed(rig: Rig, subscribers: Subscribers) -> None:
    """J10. To renew it is to use it, also where it stays where it is; `idle_ttl` is that of the first call."""
    put(rig, "a")
    begin = last(rig)
    put(rig, "b")
    pin(subscribers, begin, idle_ttl=MINUTE)
    for _ in range(30):
        rig.time.tick(59 * SECOND)
        subscribers.upkeep()
        rig.prune()
        assert not pin(subscribers, begin, idle_ttl=SECOND)[1]
    assert planned(rig, begin).entries == 1
    rig.time.tick(59 * SECOND)
    subscribers.upkeep()
    assert rig.store.durables.count(rig.topic("orders")) == 1
    rig.time.tick(SECOND)
    subscribers.upkeep()
    assert rig.store.durables.count(rig.topic("orders")) == 0
    rig.prune()
    with pytest.raises(StoreError) as refused:
        pin(subscribers, begin)
    assert refused.value.reason is Reason.BOOKMARK_TOO_OLD
    assert pin(subscribers, last(rig))[1]


def test_a_pin_outlives_the_process(rig: Rig, subscribers: Subscribers) -> None:
    put(rig, "a")
    begin = last(rig)
    put(rig, "b")
    pin(subscribers, begin, idle_ttl=HOUR)
    rig.crash()
    again = Subscribers(rig)
    rig.time.tick(30 * MINUTE)
    again.upkeep()
    rig.prune()
    assert rows(rig, begin, planned(rig, begin).end) == [("put", "b", 1)]
    assert not pin(again, begin)[1]
    rig.time.tick(HOUR)
    again.upkeep()
    assert rig.store.durables.count(rig.topic("orders")) == 0


def test_a_pin_is_no_consumers_durable(rig: Rig, subscribers: Subscribers) -> None:
    put(rig, "a")
    subscribers.attach("orders", "filtered", filter="/px > 4").close()
    with pytest.raises(StoreError) as refused:
        pin(subscribers, last(rig), "filtered")
    assert refused.value.reason is Reason.DURABLE_DIFFERS
    consumer = subscribers.attach("orders", "used")
    with pytest.raises(StoreError) as refused:
        pin(subscribers, last(rig), "used")
    assert refused.value.reason is Reason.DURABLE_IN_USE
    consumer.close()
    subscribers.settle()
    assert not pin(subscribers, last(rig), "used")[1]
    pin(subscribers, last(rig))
    consumer = subscribers.attach("orders", "query")
    with pytest.raises(StoreError) as refused:
        pin(subscribers, last(rig))
    assert refused.value.reason is Reason.DURABLE_IN_USE
    consumer.close()


def test_hard_limits_and_quotas_count_for_pins(rig: Rig, subscribers: Subscribers) -> None:
    begin = last(rig)
    put(rig, *"abc")
    put(rig, *"def")
    pin(subscribers, begin)
    rig.alter_topic("orders", max_entries=3)
    rig.prune()
    with pytest.raises(StoreError) as refused:
        planned(rig, begin)
    assert refused.value.reason is Reason.BOOKMARK_TOO_OLD
    assert pin(subscribers, begin)[0].position == begin + 3, "it tells the position that it keeps"
    rig.alter_topic("orders", max_entries=None, backlog_quota_age_micros=MINUTE, backlog_action=BacklogAction.EVICT)
    rig.time.tick(2 * MINUTE)
    subscribers.upkeep()
    assert pin(subscribers, begin)[0].position == last(rig)
    assert not pin(subscribers, last(rig))[0].gaps, "gaps that lie behind are of no use to anybody"


def test_a_topic_without_a_journal_cannot_be_pinned(rig: Rig, subscribers: Subscribers) -> None:
    pin(subscribers, last(rig))
    rig.alter_topic("orders", journal=False)
    for name in ("query", "new"):
        with pytest.raises(StoreError) as refused:
            pin(subscribers, last(rig), name)
        assert refused.value.reason is Reason.NO_JOURNAL


# ---- readers that have come from another instance (rule F18) ----


def test_a_reader_from_elsewhere_is_told_what_holds_here(rig: Rig) -> None:
    """given a reader with a filter that another instance has told of a record that matches / when the record, which
    never matched here, changes and goes / then it is told both, as it is told nothing of them otherwise"""
    put(rig, "k", px=1)
    put(rig, "k", px=2)
    rig.run(Delete("orders", ["k"]))
    start, end = 0, last(rig)
    assert read(rig, start, end, "/px > 5") == [[]]
    told = [row for piece in read(rig, start, end, "/px > 5", elsewhere=True) for row in piece]
    assert [row[:2] for row in told] == [("put", "k"), ("put", "k"), ("delete", "k")]
    assert read(rig, start, end, elsewhere=True) == read(rig, start, end)
