"""Changes of other instances in a store: merged by version, positions in the same commit, tombstones (R1 to R9)."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from sow_peering import MergeCounts, Purged
from sow_server.engine.disk.layout import BURY, DELETE, EXPIRE, INSTANCE_KEY, decode_changes, encode_changes
from sow_server.engine.disk.rocks import META, Batch, Rocks
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import Durability, Expiration, Publish, TopicSettings
from tests.support.replicas import (
    everything,
    greet,
    identity,
    instance,
    live,
    purge,
    seed,
    ship,
    tell,
    tombstones,
)
from tests.support.stores import BINARY, HOUR, MINUTE, SECOND, START, FakeTime, Rig, journal_rows


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Rig, Rig]:
    """Two instances that send to each other, on one time."""
    time = FakeTime()
    rigs = instance(tmp_path, "a", peers=["b"], time=time), instance(tmp_path, "b", peers=["a"], time=time)
    for rig in rigs:
        rig.create_topic("t")
    return rigs


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
    # It has lost its data, so what it sent once is news to it.
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
            "a", after=after, upto=upto, chunks=piece.chunks, origins=a.store.origins.names, done=answers.append
        )
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
    for number in range(20):
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
        "a", after=cursor, upto=entries.upto, chunks=[touch], origins=a.store.origins.names, done=answers.append
    )
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


def test_a_seed_does_not_report_an_expired_record_again(pair: tuple[Rig, Rig]) -> None:
    """L10: an instance that does not act on expiration keeps it for ever, and the tombstone here goes."""
    a, b = pair
    a.alter_topic("t", expiration=Expiration.DISABLED)
    a.put("t", "1", ttl=SECOND)
    ship(a, b)
    a.time.tick(SECOND)
    b.store.sweep()
    assert b.kinds("t") == [("put", "1"), ("expire", "1")]
    purge(b, upto=b.store.writer.last_sequence)
    assert tombstones(b) == {}
    greet(a, b)
    seed(a, b, "t")
    assert b.kinds("t") == [("put", "1"), ("expire", "1"), ("bury", "1")]
    assert live(b) == {}
    assert set(live(a)) == {"1"}
    ship(b, a)
    assert set(live(a)) == {"1"}, "where expiration is not acted on, the row stays"


def test_a_seed_has_records_and_tombstones_in_parts(pair: tuple[Rig, Rig]) -> None:
    a, b = pair
    for number in range(50):
        a.put("t", f"{number:02}", b"x" * 100)
    for number in range(0, 50, 3):
        a.delete("t", f"{number:02}")
    b.put("t", "03", b"older")  # b's clock has not moved: but it was written later, so b keeps it
    greet(a, b)
    parts = seed(a, b, "t", bytes_max=500)
    assert len(parts) > 5
    assert sum(part.applied for part in parts) + sum(part.superseded for part in parts) == 50
    assert set(tombstones(b)) >= set(tombstones(a)) - {"03"}
    (answer,) = b.store.replicas.sources.answers("a", a.store.replicas.shared.matching("t"))
    assert not answer.wanted


def test_an_interrupted_seed_goes_on_where_it_was(pair: tuple[Rig, Rig]) -> None:
    a, b = pair
    for number in range(20):
        a.put("t", f"{number:02}", b"x" * 100)
    greet(a, b)
    tell(a, b)
    rows = a.store.replicas.reader.seed(a.topic("t"), b"", select=everything, bytes_max=500)
    from sow_peering import SeedRange

    answers: list[MergeCounts | StoreError] = []
    b.store.replicas.changes.merge(
        "a",
        SeedRange("t", True, False, b"", rows.upto_key),
        chunk=rows.chunk,
        origins=a.store.origins.names,
        purged=Purged(),
        done=answers.append,
    )
    b.answer(answers)
    b.crash()
    (answer,) = b.store.replicas.sources.answers("a", a.store.replicas.shared.matching("t"))
    assert (answer.wanted, answer.after_key) == (True, rows.upto_key)


def test_a_seed_has_buffered_writes_synced_rather_than_wait_for_that(pair: tuple[Rig, Rig]) -> None:
    """S7: only durable changes are sent. The time stands still, so that the sync of buffered writes never comes by
    itself."""
    a, _ = pair
    writer = a.store.writer
    a.store.commits.submit(Publish("t", [b"x"], ["1"], durability=Durability.BUFFERED), lambda _: None)
    writer.step()
    assert writer.synced_sequence < writer.last_sequence
    a.store.start(lambda answers: answers())
    rows = a.store.replicas.reader.seed(a.topic("t"), b"", select=everything, bytes_max=500)
    assert writer.synced_sequence == writer.last_sequence
    assert decode_changes(1, rows.chunk).keys == [b"1"]


def test_a_topic_that_differs_leaves_the_link_and_is_seeded_once_it_is_mended(pair: tuple[Rig, Rig]) -> None:
    """R12: the rest goes on, and nothing that was passed over is lost."""
    a, b = pair
    a.create_topic("other", TopicSettings(key=("/id",)))
    b.create_topic("other", TopicSettings(key=("/name",)))
    ship_kinds = a.store.replicas.shared.matching(".*")
    greet(a, b)
    seed(a, b, "t")
    answers = dict(
        zip([kind.name for kind in ship_kinds], b.store.replicas.sources.answers("a", ship_kinds), strict=True)
    )
    refusal = answers["other"]
    assert refusal.reason == Reason.TOPIC_DIFFERS
    assert refusal.message == 'other has key = ["/name"] at the receiving end, ["/id"] at the sending one'
    a.run(Publish("other", [b'{"id":1}']))
    a.put("t", "1")
    ship(a, b)
    assert live(b) == live(a)
    b.alter_topic("other", key=("/id",))
    answers = dict(
        zip([kind.name for kind in ship_kinds], b.store.replicas.sources.answers("a", ship_kinds), strict=True)
    )
    assert answers["other"].reason == 0
    assert answers["other"].wanted
    seed(a, b, "other")
    assert live(b, "other") == live(a, "other")


def test_changes_passed_over_make_a_seeded_topic_wanted_again(pair: tuple[Rig, Rig]) -> None:
    """A topic that was seeded, deleted at the receiver and made anew, or refused for a while."""
    a, b = pair
    ship(a, b)
    b.alter_topic("t", journal=False)
    a.put("t", "1")
    ship(a, b)
    b.alter_topic("t", journal=True)
    (answer,) = b.store.replicas.sources.answers("a", a.store.replicas.shared.matching("t"))
    assert answer.wanted


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
                "a", after=cursor, upto=piece.upto, chunks=[(topic, bad)], origins=a.store.origins.names, done=print
            )
        assert refused.value.reason is Reason.BATCH_DAMAGED
    origins: list[str] = []
    answers: list[MergeCounts | StoreError] = []
    b.store.replicas.changes.apply(
        "a", after=cursor, upto=piece.upto, chunks=piece.chunks, origins=origins, done=answers.append
    )
    with pytest.raises(StoreError, match="origin without a name"):
        b.answer(answers)


# --- the journal, and tombstones -------------------------------------------------------------------------------------


def test_the_journal_is_kept_for_a_peer_that_is_behind_up_to_a_bound(tmp_path: Path) -> None:
    """R9."""
    a = instance(tmp_path, "a", peers=["b"], lag_age_micros_max=HOUR)
    a.create_topic("t", BINARY, retain_time_micros=0, retain_bytes=0)
    for _ in range(3):
        a.put("t", "1")
        a.time.tick(MINUTE)
    a.prune()
    assert len(a.journal("t")) == 3
    a.store.replicas.peers.acknowledged("b", identity(a)._replace(name="b"), a.journal("t")[1].sequence)
    a.prune()
    assert len(a.journal("t")) == 1
    a.time.tick(HOUR)
    a.prune()
    assert a.journal("t") == []
    piece = a.store.replicas.reader.read(
        identity(a)._replace(name="b"), 0, topics=["t"], select=everything, bytes_max=1
    )
    assert piece.lost == ["t"]


def test_a_topic_that_no_peer_shares_leaves_no_tombstones(tmp_path: Path) -> None:
    a = instance(tmp_path, "a", peers=["b"], topics="shared.*")
    for name in ("shared.1", "own"):
        a.create_topic(name)
        a.put(name, "1")
        a.put(name, "2", ttl=SECOND)
        a.delete(name, "1")
    a.time.tick(SECOND)
    a.store.sweep()
    assert set(tombstones(a, "shared.1")) == {"1", "2"}
    assert tombstones(a, "own") == {}


def test_tombstones_are_purged_in_the_order_of_making(pair: tuple[Rig, Rig]) -> None:
    a, _ = pair
    for key in "abcd":
        a.put("t", key)
        a.delete("t", key)
        a.time.tick(MINUTE)
    second = tombstones(a)["b"]
    assert purge(a, upto=second.sequence) == 2
    assert set(tombstones(a)) == {"c", "d"}
    assert a.store.replicas.tombstones.purged(a.topic("t")) == Purged(second.version, "a")
    assert a.topic("t").statistics.tombstones == 2
    a.reopen()
    assert a.store.replicas.tombstones.purged(a.topic("t")) == Purged(second.version, "a")
    assert purge(a, made_before=START + 3 * MINUTE) == 1
    assert set(tombstones(a)) == {"d"}


def test_a_purge_by_age_is_remembered_for_peers_that_missed_it(pair: tuple[Rig, Rig]) -> None:
    """R4: the peer has not got the delete, and may hold an older record."""
    a, b = pair
    ship(a, b)
    ship(b, a)
    a.put("t", "1")
    a.delete("t", "1")
    a.time.tick(HOUR)
    assert purge(a, made_before=a.clock.now_micros(), unread=["b"]) == 1
    a.reopen()
    assert a.store.replicas.peers.peer("b").missed
    assert a.store.replicas.sources.by_name["b"].wait_for > 0
    b.put("t", "2")
    with pytest.raises(StoreError) as refused:
        ship(b, a)
    assert refused.value.reason is Reason.RESEED_PENDING


def test_a_record_that_only_the_receiver_has_is_dropped_below_the_purge_mark(pair: tuple[Rig, Rig]) -> None:
    """R4: written to a file first; newer records are kept, and so are records that expired elsewhere and are kept here
    by disabling."""
    a, b = pair
    b.put("t", "dead", b"old")
    b.put("t", "known", b"old")
    b.alter_topic("t", expiration=Expiration.DISABLED)
    b.put("t", "overdue", b"kept", ttl=SECOND)
    a.time.tick(MINUTE)
    a.put("t", "dead")
    a.delete("t", "dead")
    a.put("t", "known", b"new")
    purge(a, upto=a.store.writer.last_sequence)
    a.time.tick(MINUTE)
    b.put("t", "newer", b"mine")
    greet(a, b)
    purged = a.store.replicas.tombstones.purged(a.topic("t"))
    (counts,) = seed(a, b, "t", purged=purged)
    assert counts == MergeCounts(applied=1, dropped=1)
    assert {key: found.payload for key, found in live(b).items()} == {
        "known": b"new",
        "newer": b"mine",
        "overdue": b"kept",
    }
    (file,) = (b.path / "dropped").iterdir()
    (line,) = file.read_text().splitlines()
    assert json.loads(line)["key"] == "dead"
    assert tombstones(b)["dead"].version < purged.version, "right above what it was: nothing newer dies of it"
    assert b.kinds("t")[-2:] == [("delete", "dead"), ("put", "known")]


def test_dropped_records_are_written_to_a_file_whatever_the_names_are(tmp_path: Path) -> None:
    """R4. Story: with a long topic and a long instance the name of the file was too long for the file system: the link
    ended, came back and ended again, and nothing was ever seeded."""
    time, name = FakeTime(), "a" * 100
    a, b = instance(tmp_path, name, peers=["b"], time=time), instance(tmp_path, "b", peers=[name], time=time)
    topics = ["t" * 199 + "1", "t" * 199 + "2"]
    for topic in topics:
        for rig in (a, b):
            rig.create_topic(topic)
        b.put(topic, "dead")
        time.tick(MINUTE)
        a.put(topic, "dead")
        a.delete(topic, "dead")
    purge(a, upto=a.store.writer.last_sequence)
    greet(a, b)
    for topic in topics:
        (counts,) = seed(a, b, topic, purged=a.store.replicas.tombstones.purged(a.topic(topic)))
        assert counts == MergeCounts(dropped=1)
    assert len(list((b.path / "dropped").iterdir())) == 2


def test_many_dropped_records_take_several_commits(pair: tuple[Rig, Rig]) -> None:
    a, b = pair
    b.run(Publish("t", [b"x"] * 2500, [f"{number:04}" for number in range(2500)]))
    a.time.tick(MINUTE)
    a.put("t", "9999")
    a.delete("t", "9999")
    purge(a, upto=a.store.writer.last_sequence)
    greet(a, b)
    (counts,) = seed(a, b, "t", purged=a.store.replicas.tombstones.purged(a.topic("t")))
    assert counts == MergeCounts(dropped=2500)
    assert live(b) == {}


def test_a_row_at_or_below_the_purge_mark_is_not_taken_where_missing_is_deleted(pair: tuple[Rig, Rig]) -> None:
    """R4: a restored source may hold records that are dead here."""
    a, b = pair
    a.put("t", "dead")
    ship(a, b)
    a.time.tick(MINUTE)
    b.delete("t", "dead")
    purge(b, upto=b.store.writer.last_sequence)
    a.time.tick(MINUTE)
    a.put("t", "newer")
    greet(a, b, missing_is_deleted=True)
    (counts,) = seed(a, b, "t")
    assert counts == MergeCounts(applied=1, dropped=1)
    assert set(live(b)) == {"newer"}
    ship(b, a)
    assert set(live(a)) == {"newer"}, "it ends where it came from, too"


def test_a_topic_is_not_deleted_while_a_peer_has_not_received_all_of_it(pair: tuple[Rig, Rig]) -> None:
    """T5: nothing of it is left behind afterwards."""
    a, b = pair
    a.put("t", "1")
    a.delete("t", "1")
    with pytest.raises(StoreError) as refused:
        a.delete_topic("t")
    assert refused.value.reason is Reason.PEER_BEHIND
    assert "--unshipped" in str(refused.value), "--force of the command only means not to ask"
    ship(a, b)
    ship(b, a)
    assert a.delete_topic("t") == 0
    a.create_topic("t")
    assert tombstones(a) == {}
    (answer,) = a.store.replicas.sources.answers("b", b.store.replicas.shared.matching("t"))
    assert answer.wanted
    assert purge(a, upto=a.store.writer.last_sequence) == 1, "its place in the order is cleared up"
    assert a.topic("t").statistics.tombstones == 0


def test_acknowledgements_of_peers_are_stored(pair: tuple[Rig, Rig]) -> None:
    a, b = pair
    a.put("t", "1")
    ship(a, b)
    before = a.store.replicas.peers.peer("b")
    assert before.acknowledged == a.store.writer.synced_sequence
    a.store.replicas.peers.save()
    a.store.writer.step()
    a.crash()
    assert a.store.replicas.peers.peer("b") == before
    # Another instance under its name: what the one before had says nothing of it.
    a.store.replicas.peers.acknowledged("b", identity(b)._replace(id="new"), 1)
    assert a.store.replicas.peers.peer("b").missed


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
        "a", after=cursor, upto=piece.upto, chunks=piece.chunks, origins=a.store.origins.names, done=answers.append
    )
    assert b.answer(answers) == MergeCounts(applied=3)
    assert set(live(b)) == {"1"}


def test_every_change_of_a_seed_has_a_sequence_of_its_own(pair: tuple[Rig, Rig]) -> None:
    """Found by the simulation: a buried delete began its chunk one sequence too late, over the next one's."""
    a, b = pair
    for key in "abcdef":
        a.put("t", key)
    a.delete("t", "b", "e")
    before = b.store.writer.last_sequence
    greet(a, b)
    seed(a, b, "t")
    assert [entry.sequence for entry in b.journal("t")] == list(range(before + 1, before + 7))
    assert {key: stone.sequence for key, stone in tombstones(b).items()} == {
        entry.key.decode(): entry.sequence for entry in b.journal("t") if entry.kind == "bury"
    }


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
        done=answers.append,
    )
    assert b.answer(answers) == MergeCounts(applied=1)
    ((_, value),) = journal_rows(b.store, b.topic("t"))
    changes = decode_changes(1, value)
    assert list(changes.change) == [BURY]
    assert changes_of(b.topic("t"), changes, start=0, stop=1, find=lambda _: None) == []
    assert encode_changes(changes) == value
    assert set(tombstones(b)) == {"1"}


def test_the_answers_about_topics_have_a_version_that_rises_with_every_change(pair: tuple[Rig, Rig]) -> None:
    """Links ask for it each second, and for thousands of topics only when it is another."""
    a, b = pair
    versions = [b.store.replicas.sources.version]

    def rises() -> bool:
        versions.append(b.store.replicas.sources.version)
        return versions[-1] > versions[-2]

    greet(a, b)
    assert rises()
    seed(a, b, "t")
    assert rises()
    b.create_topic("u")
    assert rises()
    b.alter_topic("t", expiration=Expiration.DISABLED)
    assert rises()
    a.put("t", "1")
    ship(a, b)
    b.put("t", "2")
    assert not rises(), "records are none of its business"
    b.alter_topic("t", journal=False)
    assert rises()
    a.put("t", "1")
    ship(a, b)
    assert rises(), "it is passed over"
    b.set_policy("p", "t", expiration=Expiration.ENABLED)
    b.alter_topic("t", expiration=Expiration.ENABLED)
    assert rises()
    b.delete_topic("u")
    assert rises()


def test_a_link_carries_a_topic_by_its_name_and_one_without_a_journal_not(pair: tuple[Rig, Rig]) -> None:
    """Also one that is not there yet: a publish may create it, or is told that it is missing, and not that it has no
    peers."""
    a, _ = pair
    a.create_topic("quiet", journal=False)
    carried = a.store.replicas.shared.shares
    assert carried(".*", "t")
    assert carried("t|u", "u")
    assert not carried("t|u", "tu")
    assert not carried(".*", "_durables")
    assert not carried(".*", "quiet")
    a.alter_topic("quiet", journal=True)
    assert carried(".*", "quiet")


# -- an instance that has lost its data -------------------------------------------------------------------------------


def wiped(rig: Rig, path: Path) -> Rig:
    """The same instance with new data, and a clock that is five seconds behind."""
    rig.close()
    time = FakeTime(START - 5 * SECOND)
    again = instance(path / "again", rig.options.instance, peers=["b"], time=time)
    again.create_topic("t")
    return again


def test_writes_of_an_instance_after_it_lost_its_data_outrank_its_earlier_writes(
    pair: tuple[Rig, Rig], tmp_path: Path
) -> None:
    """K7: an instance was wiped, and wrote with a clock that was behind. The peer had its earlier write, of a greater
    version, so the newer one, although acknowledged (even as REPLICATED), was gone everywhere after the seed."""
    a, b = pair
    a.put("t", "1", b"before")
    a.put("t", "2", b"before")
    ship(a, b)
    a = wiped(a, tmp_path)
    a.put("t", "1", b"after", ttl=30 * SECOND)
    expire_time = live(a)["1"].expire_time_micros
    ship(b, a)
    assert live(a)["1"].payload == b"after"
    assert live(a)["1"].expire_time_micros == expire_time, "it keeps the lifetime that it was given"
    assert live(a)["1"].version > live(b)["1"].version
    assert live(a)["2"].payload == b"before"
    ship(a, b)
    assert live(a)["1"] == live(b)["1"]
    assert ship(b, a) == MergeCounts()


def test_a_delete_after_the_loss_wins_over_earlier_writes(pair: tuple[Rig, Rig], tmp_path: Path) -> None:
    """K7: else the record that the instance had deleted came back with the seed."""
    a, b = pair
    a.put("t", "1", b"before")
    ship(a, b)
    a = wiped(a, tmp_path)
    a.store.replicas.sources.begin(
        identity(b), topics=".*", filter_text="", cursor=0, missing_is_deleted=False, done=lambda _: None
    )
    a.store.writer.step()
    a.put("t", "1", b"after")
    a.delete("t", "1")
    ship(b, a)
    assert live(a) == {}
    ship(a, b)
    assert live(b) == {}


def test_a_newer_write_of_before_replaces_an_older_one_of_before(pair: tuple[Rig, Rig], tmp_path: Path) -> None:
    """K7: a row that came back from one peer is no write of the present life: a newer one that another peer has
    wins."""
    a, b = pair
    c = instance(tmp_path, "c", peers=["a"], time=b.time)
    c.create_topic("t")
    a.put("t", "1", b"first")
    ship(a, b)
    a.put("t", "1", b"second")
    ship(a, c)
    a = wiped(a, tmp_path)
    ship(b, a)
    assert live(a)["1"].payload == b"first"
    ship(c, a)
    assert live(a)["1"].payload == b"second"


def test_restored_data_get_the_rows_written_after_the_backup(pair: tuple[Rig, Rig], tmp_path: Path) -> None:
    """J14, K7: the backup is older than the rows of the peers, though both are by the same instance."""
    a, b = pair
    a.put("t", "1", b"in the backup")
    a.store.upkeep.backup(tmp_path / "backup")
    a.put("t", "1", b"after the backup")
    ship(a, b)
    a.close()
    restored = Rig(tmp_path, options=a.options, time=a.time, opened=False)
    restored.path = tmp_path / "backup"
    restored.open()
    ship(b, restored)
    assert live(restored)["1"].payload == b"after the backup"


def test_an_instance_that_takes_over_a_name_gets_the_rows_written_under_it(
    pair: tuple[Rig, Rig], tmp_path: Path
) -> None:
    """K7. Story: rows received from the previous instance counted as its own, and was put above newer writes of that
    one, which had reached another peer alone: an acknowledged write was gone everywhere."""
    a, b = pair
    c = instance(tmp_path, "c", peers=["b"], time=a.time)
    c.create_topic("t")
    a.put("t", "1", b"first")
    ship(a, c)
    a.put("t", "1", b"second")
    ship(a, b)
    c.options = replace(c.options, instance="a")
    c.reopen()
    ship(b, c)
    assert live(c)["1"].payload == b"second"
    c.put("t", "2", b"own")
    c.reopen()
    assert c.store.origins.names[c.live("t")[b"2"].origin] == "a"
    assert c.store.origins.names.count("a") == 2, "a start alone gives no further number"


def test_data_of_an_older_release_get_newer_writes_of_the_same_name(pair: tuple[Rig, Rig], tmp_path: Path) -> None:
    """K7. Story: in older data all that an instance wrote, before and after a restore, has one number."""
    a, b = pair
    a.put("t", "1", b"first")
    a.store.sync()
    shutil.copytree(a.path, tmp_path / "older")
    a.put("t", "1", b"second")
    ship(a, b)
    a.close()
    older = Rig(tmp_path, options=a.options, time=a.time, opened=False)
    older.path = tmp_path / "older"
    (older.path / "MARK").unlink(missing_ok=True)
    rocks = Rocks(older.path / "db", create=False)
    fields = json.loads(rocks.get(META, INSTANCE_KEY) or b"")
    del fields["origin"]
    batch = Batch()
    batch.puts[META][INSTANCE_KEY] = json.dumps(fields | {"id": "restored", "epoch": "restored"}).encode()
    rocks.write(batch)
    rocks.close()
    older.open()
    ship(b, older)
    assert live(older)["1"].payload == b"second"
