"""Seeds: they send whole topics in parts, and drop records that only the receiver has (R1 to R9)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sow_peering import MergeCounts, Purged, SeedRange
from sow_server.engine.stored import decode_changes
from sow_server.engine.values.database import Failed
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import Durability, Expiration, Publish, TopicSettings
from tests.support.stores.replicas import everything, greet, instance, live, pair, purge, seed, ship, tell, tombstones
from tests.support.stores.stores import MINUTE, SECOND, FakeTime, Rig

__all__ = ["pair"]  # a fixture


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
    answers: list[MergeCounts | StoreError] = []
    b.store.replicas.changes.merge(
        "a",
        SeedRange("t", True, False, b"", rows.upto_key),
        chunk=rows.chunk,
        origins=a.store.origins.names,
        purged=Purged(),
    ).then(answers.append)
    b.answer(answers)
    b.crash()
    (answer,) = b.store.replicas.sources.answers("a", a.store.replicas.shared.matching("t"))
    assert (answer.wanted, answer.after_key) == (True, rows.upto_key)


def test_parts_of_a_seed_share_a_sync_and_are_reported_after_it(
    pair: tuple[Rig, Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """receiver [1]: a sync for each part would be most of the time of a seed on a slow disk."""
    a, b = pair
    answers = parts_under_way(a, b)
    told: list[int] = []
    sync = b.store._rocks.sync

    def counted() -> None:
        told.append(len(answers))
        sync()

    monkeypatch.setattr(b.store._rocks, "sync", counted)
    b.store.writer.step()
    assert told == [0, 1], "the sync of the first part, and the one that the others share"
    assert [answer.applied for answer in answers if isinstance(answer, MergeCounts)] == [4, 4, 4, 4, 4]


def test_no_part_of_a_seed_is_reported_as_durable_after_a_sync_that_failed(
    pair: tuple[Rig, Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """receiver [1], X3."""
    a, b = pair
    answers = parts_under_way(a, b)

    def failing() -> None:
        raise Failed("the disk is gone")

    monkeypatch.setattr(b.store._rocks, "sync", failing)
    b.store.writer.step()
    assert [type(answer) for answer in answers] == [StoreError] * 5


def parts_under_way(a: Rig, b: Rig) -> list[MergeCounts | StoreError]:
    """Five parts of a seed wait for the receiver's writer. Their answers come into the list."""
    for number in range(20):
        a.put("t", f"{number:02}", b"x" * 100)
    greet(a, b)
    tell(a, b)
    answers: list[MergeCounts | StoreError] = []
    after, last = b"", False
    while not last:
        rows = a.store.replicas.reader.seed(a.topic("t"), after, select=everything, bytes_max=500)
        last = not rows.upto_key
        b.store.replicas.changes.merge(
            "a",
            SeedRange("t", not after, last, after, rows.upto_key),
            chunk=rows.chunk,
            origins=a.store.origins.names,
            purged=Purged(),
        ).then(answers.append)
        after = rows.upto_key
    return answers


def test_a_seed_has_buffered_writes_synced_rather_than_wait_for_that(pair: tuple[Rig, Rig]) -> None:
    """S7: only durable changes are sent. The time stands still, so that the sync of buffered writes never comes by
    itself."""
    a, _ = pair
    writer = a.store.writer
    a.store.commits.submit(Publish("t", [b"x"], ["1"], durability=Durability.BUFFERED))
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
    assert tombstones(b)["dead"].version < purged.version, "right above its version: nothing newer dies of it"
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
