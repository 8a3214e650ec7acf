"""Changes of other instances in a store: merged by version, with their position in the same commit (R1 to R6)."""

from __future__ import annotations

from pathlib import Path

import pytest

from sow_peering import MergeCounts
from sow_server.engine.stored import BURY, DELETE, EXPIRE, decode_changes, encode_changes
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import Expiration, Publish, TopicSettings
from tests.support.stores.replicas import everything, identity, instance, live, pair, ship, tombstones
from tests.support.stores.stores import HOUR, MINUTE, SECOND, START, FakeTime, Rig, journal_rows

__all__ = ["pair"]  # a fixture


def test_a_record_arrives_with_its_version_stamp_time_and_origin(pair: tuple[Rig, Rig]) -> None:
    """R2, AMPS 12: the downstream neither resets nor changes any of them, though its topic has a default of its own."""
    a, b = pair
    b.alter_topic("t", default_ttl_micros=HOUR, max_ttl_micros=HOUR)
    a.put("t", "1", b"one", ttl=30 * SECOND)
    a.put("t", "2", b"two")
    ship(a, b)
    a.time.tick(5 * SECOND)
    a.put("t", "3", b"three", ttl=60 * SECOND)
    a.touch("t", "2", ttl=2 * HOUR)
    assert ship(a, b) == MergeCounts(applied=2)
    assert live(b) == live(a)
    assert live(b)["1"].origin == "a"
    assert live(b)["1"].expire_time_micros == START + 30 * SECOND


def test_a_full_topic_takes_what_peers_have_acknowledged(pair: tuple[Rig, Rig]) -> None:
    """T7: caps hold where clients publish, and only there. A link that refused a change would stop."""
    a, b = pair
    b.alter_topic("t", max_records=1, max_stored_bytes=2)
    for key in "123":
        a.put("t", key)
    assert ship(a, b).applied == 3
    a.put("t", "1", b"longer")
    assert ship(a, b).applied == 1
    assert live(b) == live(a)
    assert [one.reason for one in b.put("t", "4").refusals] == [Reason.TOPIC_FULL]
    assert [one.reason for one in b.put("t", "1", b"longest").refusals] == [Reason.TOPIC_FULL]
    assert not b.put("t", "1", b"short").refusals


def test_each_instance_expires_by_itself(pair: tuple[Rig, Rig]) -> None:
    """R2, AMPS 13: the expiry of one is not told to the other; one that does not act on expiration keeps the row."""
    a, b = pair
    b.alter_topic("t", expiration=Expiration.DISABLED)
    a.put("t", "1", ttl=30 * SECOND)
    ship(a, b)
    a.time.tick(30 * SECOND)
    a.store.sweep()
    assert a.kinds("t")[-1] == ("expire", "1")
    assert ship(a, b) == MergeCounts()
    assert a.get("t", "1") is None
    assert b.get("t", "1") is not None
    ship(b, a)
    assert a.get("t", "1") is None


def test_a_delete_is_shipped_and_leaves_a_tombstone_at_both_ends(pair: tuple[Rig, Rig]) -> None:
    a, b = pair
    a.put("t", "1")
    ship(a, b)
    a.delete("t", "1")
    ship(a, b)
    assert b.get("t", "1") is None
    assert b.kinds("t")[-1] == ("delete", "1")
    here, there = tombstones(a)["1"], tombstones(b)["1"]
    assert (here.version, here.kind) == (there.version, there.kind) == (here.version, DELETE)
    assert a.topic("t").statistics.tombstones == b.topic("t").statistics.tombstones == 1


def test_the_greater_version_wins_whatever_comes_first(pair: tuple[Rig, Rig]) -> None:
    """R3: both ends hold the later write; the other one is counted."""
    a, b = pair
    ship(a, b)
    ship(b, a)
    a.put("t", "1", b"of a")
    a.time.tick(1)
    b.put("t", "1", b"of b")
    assert ship(a, b) == MergeCounts(superseded=1)
    assert ship(b, a) == MergeCounts(applied=1)
    assert live(a) == live(b)
    assert live(a)["1"].payload == b"of b"


def test_the_greater_name_wins_at_equal_versions(pair: tuple[Rig, Rig]) -> None:
    a, b = pair
    ship(a, b)
    ship(b, a)
    for rig in pair:
        rig.time.wall_micros = START + HOUR  # the one time of both
        rig.put("t", "1", rig.options.instance.encode())
    assert live(a)["1"].version == live(b)["1"].version
    assert ship(a, b) == MergeCounts(superseded=1)
    assert ship(b, a) == MergeCounts(applied=1)
    assert live(a) == live(b)
    assert live(a)["1"].origin == "b"


def test_an_older_version_does_not_bring_a_deleted_or_expired_record_back(pair: tuple[Rig, Rig]) -> None:
    """R4: not even one with a longer life."""
    a, b = pair
    ship(a, b)
    ship(b, a)
    b.put("t", "deleted", b"old", ttl=HOUR)
    b.put("t", "expired", b"old", ttl=HOUR)
    a.time.tick(SECOND)
    a.put("t", "deleted", b"new")
    a.delete("t", "deleted")
    a.put("t", "expired", b"new", ttl=SECOND)
    a.time.tick(SECOND)
    a.store.sweep()
    assert ship(b, a) == MergeCounts(superseded=2)
    assert live(a) == {}
    assert tombstones(a)["expired"].kind == EXPIRE
    ship(a, b)
    b.store.sweep()
    assert live(b) == {}


def test_a_change_that_arrives_expired_supersedes_an_older_version(pair: tuple[Rig, Rig]) -> None:
    """R5."""
    a, b = pair
    a.put("t", "1", b"long", ttl=HOUR)
    ship(a, b)
    a.put("t", "1", b"short", ttl=SECOND)
    a.time.tick(SECOND)
    assert ship(a, b) == MergeCounts(applied=1)
    assert b.get("t", "1") is None
    assert b.kinds("t")[-2:] == [("put", "1"), ("expire", "1")]


def test_an_overdue_record_is_expired_before_a_change_of_a_peer(pair: tuple[Rig, Rig]) -> None:
    """L10: its expiry comes exactly once."""
    a, b = pair
    a.put("t", "1", b"old", ttl=SECOND)
    ship(a, b)
    a.time.tick(SECOND)
    a.put("t", "1", b"new")
    ship(a, b)
    assert b.kinds("t") == [("put", "1"), ("expire", "1"), ("put", "1")]
    assert live(b) == live(a)


def test_a_delete_of_a_missing_record_is_remembered_and_forwarded(tmp_path: Path) -> None:
    """R4: a third instance may hold the deleted record; subscribers get no message."""
    time = FakeTime()
    a, b, c = (instance(tmp_path, name, peers=["b"] if name != "b" else ["a", "c"], time=time) for name in "abc")
    for rig in (a, b, c):
        rig.create_topic("t")
    ship(a, b)
    ship(b, c)
    c.put("t", "1", b"old")
    time.tick(SECOND)
    a.put("t", "1", b"newer")
    a.delete("t", "1")
    b_only_the_delete = a.store.replicas.reader.read(identity(b), 0, topics=["t"], select=everything, bytes_max=1)
    assert b_only_the_delete.chunks
    ship(a, b)
    ship(b, c)
    assert live(c) == {}
    assert c.get("t", "1") is None


def test_changes_from_a_peer_go_to_others_but_not_back(tmp_path: Path) -> None:
    """R7."""
    time = FakeTime()
    a, b = instance(tmp_path, "a", peers=["b"], time=time), instance(tmp_path, "b", peers=["a", "c"], time=time)
    for rig in (a, b):
        rig.create_topic("t")
    ship(a, b)
    a.put("t", "1")
    ship(a, b)
    b.put("t", "2")
    b.store.sync()

    def shipped_to(peer: str) -> list[bytes]:
        to = identity(a) if peer == "a" else identity(a)._replace(name=peer)
        piece = b.store.replicas.reader.read(to, 0, topics=["t"], select=everything, bytes_max=2**20)
        return [key for _, chunk in piece.chunks for key in decode_changes(0, chunk).keys]

    assert shipped_to("a") == [b"2"]
    assert shipped_to("c") == [b"1", b"2"]
    # It has lost its data, so its own earlier changes are new to it.
    reborn = identity(a)._replace(epoch="another")
    piece = b.store.replicas.reader.read(reborn, 0, topics=["t"], select=everything, bytes_max=2**20)
    assert [key for _, chunk in piece.chunks for key in decode_changes(0, chunk).keys] == [b"1", b"2"]


def test_no_change_is_applied_twice_and_a_cursor_never_skips(pair: tuple[Rig, Rig]) -> None:
    """R6."""
    a, b = pair
    ship(a, b)
    a.put("t", "1")
    cursor = b.store.replicas.sources.by_name["a"].cursor
    piece = a.store.replicas.reader.read(identity(b), cursor, topics=["t"], select=everything, bytes_max=2**20)

    def apply(after: int, upto: int) -> MergeCounts:
        answers: list[MergeCounts | StoreError] = []
        b.store.replicas.changes.apply(
            "a", after=after, upto=upto, chunks=piece.chunks, origins=a.store.origins.names
        ).then(answers.append)
        return b.answer(answers)

    with pytest.raises(StoreError) as refused:
        apply(cursor + 1, piece.upto + 1)
    assert refused.value.reason is Reason.BATCH_DAMAGED
    assert apply(cursor, piece.upto) == MergeCounts(applied=1)
    journal = len(b.journal("t"))
    assert apply(cursor, piece.upto) == MergeCounts()
    assert apply(cursor, piece.upto + 1) == MergeCounts(known=1)
    assert len(b.journal("t")) == journal, "a change that changes nothing is not journaled"


def test_the_cursor_is_in_the_batch_of_the_applied_changes(pair: tuple[Rig, Rig]) -> None:
    """R6: a crash leaves both or neither, and a restart goes on behind it."""
    a, b = pair
    ship(a, b)
    for number in range(5):
        a.put("t", str(number))
        ship(a, b)
        b.crash()
        assert b.store.replicas.sources.by_name["a"].cursor == a.store.writer.synced_sequence
        assert live(b) == live(a)


def test_a_version_from_the_far_future_is_not_applied(pair: tuple[Rig, Rig]) -> None:
    """K7: nothing is skipped; when the clocks agree again it comes."""
    a, b = pair
    ship(a, b)
    b.time = FakeTime(START - HOUR)
    b.close()
    b.open(accept_clock=True)
    a.put("t", "1")
    with pytest.raises(StoreError) as refused:
        ship(a, b)
    assert refused.value.reason is Reason.CLOCK_SKEW
    assert live(b) == {}
    b.time.tick(HOUR - 10 * SECOND)
    ship(a, b)
    assert live(b) == live(a)


def test_a_received_version_moves_the_next_one_of_this_instance(pair: tuple[Rig, Rig]) -> None:
    """K7: later writes here have higher versions, though this clock is behind."""
    a, b = pair
    ship(a, b)
    b.time = FakeTime(START - 5 * SECOND)
    b.close()
    b.open()
    a.put("t", "1", b"first")
    ship(a, b)
    b.put("t", "1", b"second")
    assert live(b)["1"].version > live(a)["1"].version


def test_a_touch_of_a_value_that_never_came_is_a_put(pair: tuple[Rig, Rig]) -> None:
    """A touch carries the whole record; indexes and subscribers must not take the payload for the old one."""
    a, b = pair
    for rig in pair:
        rig.create_topic("j", TopicSettings(index=("/n",)))
    a.put("j", "1", b'{"n":1}')
    ship(a, b)
    a.put("j", "1", b'{"n":2}')
    a.touch("j", "1", ttl=HOUR)
    entries = a.store.replicas.reader.read(
        identity(b), b.store.replicas.sources.by_name["a"].cursor, topics=["j"], select=everything, bytes_max=2**20
    )
    (put, touch) = entries.chunks
    del put  # superseded on its way by a seed, say
    answers: list[MergeCounts | StoreError] = []
    cursor = b.store.replicas.sources.by_name["a"].cursor
    b.store.replicas.changes.apply(
        "a", after=cursor, upto=entries.upto, chunks=[touch], origins=a.store.origins.names
    ).then(answers.append)
    assert b.answer(answers) == MergeCounts(applied=1)
    assert b.kinds("j")[-1] == ("put", "1")
    assert live(b, "j") == live(a, "j")


def test_an_atomic_request_stays_whole_on_a_replica(pair: tuple[Rig, Rig]) -> None:
    a, b = pair
    ship(a, b)
    a.run(Publish("t", [b"1", b"2"], ["x", "y"], atomic=True))
    a.run(Publish("t", [b"1", b"2"], ["z", "u"], atomic=True))
    a.put("t", "plain")
    ship(a, b)
    chunks = [decode_changes(0, value) for _, value in journal_rows(b.store, b.topic("t"))]
    assert [(chunk.atomic, chunk.keys) for chunk in chunks] == [
        (True, [b"x", b"y"]),
        (True, [b"z", b"u"]),
        (False, [b"plain"]),
    ]


def test_only_durable_changes_are_shipped(pair: tuple[Rig, Rig]) -> None:
    """S7."""
    a, b = pair
    ship(a, b)
    before = a.store.writer.synced_sequence
    a.time.tick(1)
    a.put("t", "1", ttl=1)
    a.time.tick(MINUTE)
    a.store.sweep()  # not synced by itself
    piece = a.store.replicas.reader.read(identity(b), before, topics=["t"], select=everything, bytes_max=2**20)
    assert piece.upto == a.store.writer.synced_sequence < a.store.writer.last_sequence


def test_a_damaged_batch_is_refused(pair: tuple[Rig, Rig]) -> None:
    a, b = pair
    ship(a, b)
    a.put("t", "1")
    cursor = b.store.replicas.sources.by_name["a"].cursor
    piece = a.store.replicas.reader.read(identity(b), cursor, topics=["t"], select=everything, bytes_max=2**20)
    ((topic, chunk),) = piece.chunks
    for bad in (b"", chunk[:-1], chunk + b"x", b"\x09" + chunk[1:], chunk[: len(chunk) // 2]):
        with pytest.raises(StoreError) as refused:
            b.store.replicas.changes.apply(
                "a", after=cursor, upto=piece.upto, chunks=[(topic, bad)], origins=a.store.origins.names
            ).then(print)
        assert refused.value.reason is Reason.BATCH_DAMAGED
    origins: list[str] = []
    answers: list[MergeCounts | StoreError] = []
    b.store.replicas.changes.apply("a", after=cursor, upto=piece.upto, chunks=piece.chunks, origins=origins).then(
        answers.append
    )
    with pytest.raises(StoreError, match="origin without a name"):
        b.answer(answers)


def test_a_filter_withdraws_records_that_have_ceased_to_match(pair: tuple[Rig, Rig]) -> None:
    a, b = pair
    ship(a, b)

    def select(topic: object) -> object:
        return lambda key, value: value.endswith(b"yes")

    a.put("t", "1", b"yes")
    a.put("t", "2", b"no")
    a.put("t", "3", b"yes")
    a.put("t", "3", b"no")
    cursor = b.store.replicas.sources.by_name["a"].cursor
    piece = a.store.replicas.reader.read(identity(b), cursor, topics=["t"], select=select, bytes_max=2**20)  # type: ignore[arg-type]  # a matcher
    answers: list[MergeCounts | StoreError] = []
    b.store.replicas.changes.apply(
        "a", after=cursor, upto=piece.upto, chunks=piece.chunks, origins=a.store.origins.names
    ).then(answers.append)
    assert b.answer(answers) == MergeCounts(applied=3)
    assert set(live(b)) == {"1"}


def test_a_buried_delete_reaches_no_subscriber(pair: tuple[Rig, Rig]) -> None:
    """Only peers read it: there is no record that went."""
    from sow_server.subscriptions.changes import changes_of

    a, b = pair
    ship(a, b)
    a.put("t", "1")
    a.delete("t", "1")
    chunk = a.store.replicas.reader.read(
        identity(b), b.store.replicas.sources.by_name["a"].cursor, topics=["t"], select=everything, bytes_max=2**20
    ).chunks[-1]
    answers: list[MergeCounts | StoreError] = []
    source = b.store.replicas.sources.by_name["a"]
    b.store.replicas.changes.apply(
        "a",
        after=source.cursor,
        upto=source.cursor + 2,
        chunks=[chunk],
        origins=a.store.origins.names,
    ).then(answers.append)
    assert b.answer(answers) == MergeCounts(applied=1)
    ((_, value),) = journal_rows(b.store, b.topic("t"))
    changes = decode_changes(1, value)
    assert list(changes.change) == [BURY]
    assert changes_of(b.topic("t"), changes, start=0, stop=1, find=lambda _: None) == []
    assert encode_changes(changes) == value
    assert set(tombstones(b)) == {"1"}
