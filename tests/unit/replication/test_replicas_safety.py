"""Changes must not get lost, return, or be reported twice while instances replicate (K7, S7, R2 to R6, R12)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from sow.v1.replication_pb2 import ReplicateRequest
from sow_peering import InstanceIdentity, JournalPart, MergeCounts, PeerState, Purged, SeedRange
from sow_replication.link_topics import TopicState
from sow_replication.node import Node
from sow_replication.options import NodeOptions, PeerOptions
from sow_server.config import LimitsConfig
from sow_server.engine.commit import origins
from sow_server.engine.commit.options import WriterOptions
from sow_server.engine.disk.layout import INSTANCE_KEY, MADE_ORDER, STATISTICS_KEY, peer_key, source_key
from sow_server.engine.disk.mark import load, save
from sow_server.engine.disk.rocks import META, RECORDS, TOMBSTONES, Batch, Rocks
from sow_server.engine.pending import Pending
from sow_server.engine.replicas import receiving, serving, sharing, sources
from sow_server.engine.replicas.tombstone_purge import MADE_END
from sow_server.engine.stored import Changes, Column, decode_changes, encode_changes, unpack_i64
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import (
    Delete,
    Durability,
    Expiration,
    Lifetime,
    LifetimeKind,
    MessageType,
    Publish,
    TopicSettings,
)
from sow_server.engine.values.patterns import is_quick, matcher
from sow_server.linking import NoLinks
from tests.support.stores.parts import peer_store_of
from tests.support.stores.replicas import (
    everything,
    greet,
    identity,
    instance,
    live,
    pair,
    purge,
    seed,
    ship,
    tell,
    tombstones,
)
from tests.support.stores.stores import BINARY, MINUTE, SECOND, Rig

__all__ = ["pair"]  # a fixture

JSON = TopicSettings(expiration=Expiration.ENABLED)


def test_a_repair_gets_only_rows_that_are_durable(pair: tuple[Rig, Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """S7, ports [1]: else a power cut would leave the other instance ahead of this one."""
    a, _ = pair
    a.put("t", "1", ttl=1)
    a.time.tick(MINUTE)
    a.store.sweep()  # not synced by itself
    monkeypatch.setattr(serving, "SYNC_PATIENCE_SECONDS", 0.0)
    with pytest.raises(StoreError) as refused:
        a.store.replicas.reader.rows(a.topic("t"), [b"1"])
    assert refused.value.reason is Reason.STORE_FAILED
    a.store.sync()
    assert a.store.replicas.reader.rows(a.topic("t"), [b"1"])


def test_rows_for_a_peer_are_read_only_up_to_their_bound(
    pair: tuple[Rig, Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: a peer asked for a thousand records of a megabyte. All were read before the answer was found too large."""
    a, _ = pair
    for number in range(20):
        a.put("t", f"{number:02}", b"x" * 1000)
    a.store.sync()
    monkeypatch.setattr(serving, "ROWS_AT_ONCE", 2)
    read = Rocks.multi_get
    taken: list[bytes] = []

    def multi_get(rocks: Rocks, family: str, keys: Sequence[bytes]) -> list[bytes | None]:
        taken.extend(keys if family == RECORDS else ())
        return read(rocks, family, keys)

    monkeypatch.setattr(Rocks, "multi_get", multi_get)
    keys = [f"{number:02}".encode() for number in range(20)]
    with pytest.raises(StoreError) as refused:
        a.store.replicas.reader.rows(a.topic("t"), keys, 2500)
    assert (refused.value.reason, len(taken)) == (Reason.RESULT_TOO_LARGE, 4)
    assert "the rows of 20 keys have more bytes than the limit of 2500" in str(refused.value)
    assert a.store.replicas.reader.rows(a.topic("t"), keys[:2], 2500)
    assert a.store.replicas.reader.rows(a.topic("t"), keys[:1], 10), "one record goes, however large"
    a.store.replicas.reader.rows(a.topic("t"), keys)


def test_a_peer_is_sent_only_changes_that_are_durable(pair: tuple[Rig, Rig]) -> None:
    """S7, ports [1]."""
    a, b = pair
    ship(a, b)
    cursor = b.store.replicas.sources.by_name["a"].cursor
    a.run(Publish("t", [b"x"], ["1"], durability=Durability.BUFFERED))

    def read() -> JournalPart:
        return a.store.replicas.reader.read(identity(b), cursor, topics=["t"], select=everything, bytes_max=2**20)

    assert (read().upto, read().chunks) == (cursor, [])
    a.store.sync()
    assert read().chunks


def test_changes_acknowledged_to_a_sender_survive_a_power_cut(pair: tuple[Rig, Rig]) -> None:
    """R6, P5: the parts of a seed, and changes.

    Story: an acknowledgement before the sync passed all tests, since the system keeps the writes of a killed process.
    """
    a, b = pair
    a.put("t", "seeded")
    ship(a, b)
    b.cut_power()
    assert set(live(b)) == {"seeded"}
    a.put("t", "sent")
    ship(a, b)
    cursor = b.store.replicas.sources.by_name["a"].cursor
    b.cut_power()
    assert set(live(b)) == {"seeded", "sent"}
    assert b.store.replicas.sources.by_name["a"].cursor == cursor


def test_missing_counts_as_deleted_only_until_every_topic_is_seeded(pair: tuple[Rig, Rig]) -> None:
    """R4: a topic that joins the link later is merged as any other; nothing of it was in the data that came back."""
    a, b = pair
    a.create_topic("later", BINARY._replace(journal=False))  # not sent
    a.put("later", "lives")
    a.time.tick(MINUTE)
    b.create_topic("later")
    b.put("later", "other")
    b.delete("later", "other")
    purge(b, upto=b.store.writer.last_sequence)
    greet(a, b, missing_is_deleted=True)
    seed(a, b, "t")
    tell(a, b)
    a.put("t", "1")
    ship(a, b)
    a.alter_topic("later", journal=True)
    assert seed(a, b, "later") == [MergeCounts(applied=1)]
    assert set(live(b, "later")) == {"lives"}


@pytest.mark.slow
def test_an_acknowledgement_does_not_undo_the_mark_of_a_purge_meanwhile(pair: tuple[Rig, Rig]) -> None:
    """R4: the writer's thread notes that a peer has missed tombstones; another one notes its acknowledgements."""
    a, b = pair
    a.put("t", "1")
    a.delete("t", "1")
    purging = threading.Thread(target=lambda: purge(a, made_before=2**60))

    class Peers(dict[str, PeerState]):
        def get(self, name: str, default: PeerState | None = None) -> PeerState | None:  # type: ignore[override]  # as it is used
            found = super().get(name, default)
            if threading.current_thread() is not purging and purging.ident is None:
                purging.start()
                purging.join(1)  # it may have to wait for the acknowledgement
            return found

    a.store.replicas.peers.by_name = Peers(a.store.replicas.peers.by_name)
    a.store.replicas.peers.acknowledged("b", identity(b), 1)
    purging.join()
    assert a.store.replicas.peers.peer("b") == PeerState(identity(b), 1, missed=True)


def test_a_merge_in_rounds_is_answered_when_the_store_ends_in_between(
    pair: tuple[Rig, Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ports [2]: it is answered once, whatever happens."""
    a, b = pair
    for number in range(5):
        b.put("t", str(number))
    ship(a, b)
    purged = Purged(b.time.wall_micros + SECOND, "a")
    monkeypatch.setattr(receiving, "DROP_MAX", 2)
    queue = b.store.commits.run
    queued: list[object] = []

    def run(*args: Any, **options: Any) -> Pending[Any]:
        if queued:
            raise StoreError(Reason.STOPPING, "the server is stopping")
        queued.append(args)
        return queue(*args, **options)

    monkeypatch.setattr(b.store.commits, "run", run)
    answers: list[MergeCounts | StoreError] = []
    b.store.replicas.changes.merge(
        "a",
        SeedRange("t", True, True, b"", b""),
        chunk=b"",
        origins=a.store.origins.names,
        purged=purged,
    ).then(answers.append)
    b.store.writer.step()
    (answer,) = answers
    assert isinstance(answer, StoreError)
    assert answer.reason is Reason.STOPPING


def test_writes_without_a_journal_are_not_skipped(pair: tuple[Rig, Rig]) -> None:
    """R6: not even when it is on again before the link has heard of that: the topic is lost to the journal."""
    a, b = pair
    ship(a, b)
    a.alter_topic("t", journal=False)
    a.put("t", "1")
    a.store.sync()
    after = b.store.replicas.sources.by_name["a"].cursor
    piece = a.store.replicas.reader.read(identity(b), after, topics=["t"], select=everything, bytes_max=2**20)
    a.alter_topic("t", journal=True)
    assert (piece.upto, piece.lost) == (a.store.writer.last_sequence, ["t"])


def test_tombstones_of_a_topic_do_not_outlive_the_kind_of_its_records(pair: tuple[Rig, Rig]) -> None:
    """K1, R4: the key "1" by other fields is another record; those left are counted until it is their turn."""
    a, b = pair
    for rig in pair:
        rig.create_topic("u", TopicSettings(key=("/x",), expiration=Expiration.ENABLED))
    b.alter_topic("u", key=("/y",))
    b.run(Publish("u", [b'{"x": 2, "y": 1}'], None))
    a.time.tick(MINUTE)
    a.run(Publish("u", [b'{"x": 1, "y": 2}', b'{"x": 3, "y": 4}'], None, lifetime=Lifetime(LifetimeKind.TTL, SECOND)))
    a.run(Delete("u", ["1"]))
    a.time.tick(MINUTE)
    a.alter_topic("u", key=("/y",))  # overdue records go in this commit
    assert tombstones(a, "u") == {}
    assert a.store.replicas.tombstones.purged(a.topic("u")) == Purged()
    greet(a, b)
    seed(a, b, "u")
    assert set(live(b, "u")) == {"1"}
    ship(b, a)
    assert set(live(a, "u")) == {"1"}
    a.run(Delete("u", ["1"]))
    assert a.topic("u").statistics.tombstones == 3
    purge(a, upto=a.store.writer.last_sequence)
    assert a.topic("u").statistics.tombstones == 0


def test_a_repair_deletes_nothing_where_it_came_from(pair: tuple[Rig, Rig]) -> None:
    """R4, R10: a record that the other end lacks may be dead, so it does not come back there; or lost, so it stays
    here."""
    a, b = pair
    a.put("t", "old")
    a.time.tick(MINUTE)
    b.put("t", "other")
    b.delete("t", "other")
    purge(b, upto=b.store.writer.last_sequence)
    answers: list[MergeCounts | StoreError] = []
    chunk = a.store.replicas.reader.rows(a.topic("t"), [b"old"])
    b.store.replicas.changes.merge_rows(b.topic("t"), chunk, a.store.origins.names, source="a").then(answers.append)
    assert b.answer(answers) == MergeCounts(dropped=1)
    assert (live(b), tombstones(b)) == ({}, {})
    ship(b, a)
    assert set(live(a)) == {"old"}


def test_a_delete_goes_to_peers_without_the_removed_record(pair: tuple[Rig, Rig]) -> None:
    """K8: a thousand large records go in one commit, and it has to fit into one message."""
    a, b = pair
    a.put("t", "1", b"x" * 2**20)
    ship(a, b)
    after = b.store.replicas.sources.by_name["a"].cursor
    a.delete("t", "1")
    piece = a.store.replicas.reader.read(identity(b), after, topics=["t"], select=everything, bytes_max=2**20)
    assert [len(chunk) < 1000 for _, chunk in piece.chunks] == [True]
    assert ship(a, b) == MergeCounts(applied=1)
    assert tombstones(b)["1"].version == tombstones(a)["1"].version


def test_a_message_between_instances_has_room_for_all_that_can_be_in_one_commit() -> None:
    """A commit holds at most all that was queued, and a message may hold one read more."""
    most = LimitsConfig().link_bytes_max
    assert WriterOptions().queue_bytes_max + NodeOptions(peers=()).read_bytes_max < most


def test_a_dead_letter_that_comes_to_the_topic_being_merged_is_not_overwritten(pair: tuple[Rig, Rig]) -> None:
    """R3, T3: a change of a peer makes a record expire, of which the letter makes another one expire, of which the
    letter comes to a key that is changed, too: it is newer."""
    a, b = pair
    a.create_topic("j", JSON)
    b.create_topic("j", JSON._replace(dead_letter="d", dead_letter_by_key=True))
    b.create_topic("d", JSON._replace(dead_letter="j"))
    a.put("j", "1", b"{}", ttl=SECOND)
    ship(a, b)
    b.put("d", "1", b"{}", ttl=SECOND)
    key = f"d|1|{live(b, 'd')['1'].version}"
    a.time.tick(MINUTE)
    a.run(Publish("j", [b"{}", b"{}"], ["1", key]))
    a.time.tick(SECOND)
    ship(a, b)
    ship(b, a)
    assert live(b, "j").keys() == {"1", key}
    assert live(b, "j")[key].origin == "b"
    assert live(a, "j") == live(b, "j")


def test_a_chunk_without_changes_is_no_fault(pair: tuple[Rig, Rig]) -> None:
    a, b = pair
    ship(a, b)
    a.put("t", "1")
    after = b.store.replicas.sources.by_name["a"].cursor
    piece = a.store.replicas.reader.read(identity(b), after, topics=["t"], select=everything, bytes_max=2**20)
    ((_, chunk),) = piece.chunks
    changes = decode_changes(0, chunk)
    empty = Column()
    none = Changes(0, changes.commit_time_micros, b"", empty, empty, empty, empty, empty, empty, empty, [], [])
    answers: list[MergeCounts | StoreError] = []
    b.store.replicas.changes.apply(
        "a",
        after=after,
        upto=piece.upto,
        chunks=[("t", encode_changes(none))],
        origins=a.store.origins.names,
    ).then(answers.append)
    assert b.answer(answers) == MergeCounts()


def test_sources_and_origins_beyond_the_room_of_the_journal_are_refused(
    pair: tuple[Rig, Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """writer [3]: a commit with such a number could not be encoded, which would end all writing."""
    a, b = pair
    ship(a, b)
    monkeypatch.setattr(origins, "ORIGINS_MAX", origins.OWN_MAX + 2)
    answers: list[MergeCounts | StoreError] = []
    part = SeedRange("t", True, True, b"", b"")
    b.store.replicas.changes.merge("a", part, chunk=b"", origins=["c"], purged=Purged()).then(answers.append)
    with pytest.raises(StoreError, match="origins"):
        b.answer(answers)
    monkeypatch.undo()
    monkeypatch.setattr(sources, "SOURCES_MAX", 2)
    greet(a, b)
    with pytest.raises(StoreError, match="sources"):
        greet(a, b)
    ship(a, b)
    assert live(b) == live(a)


@pytest.mark.parametrize(
    "row", [b"", b"{", b"\xff", b'{"identity": ["b", "", "e"], "acknowledged": 1, "missed": false}']
)
def test_a_position_of_a_peer_that_cannot_be_read_counts_as_none(pair: tuple[Rig, Rig], row: bytes) -> None:
    """R15: the start failed. The peer is seeded anew, as one that may have missed tombstones."""
    a, b = pair
    ship(a, b)
    batch = Batch()
    batch.puts[META][peer_key("b")] = row
    a.store._rocks.write(batch)
    a.close()
    a.open()
    assert a.store.replicas.peers.peer("b") == PeerState(missed=True)
    a.put("t", "k")
    ship(a, b)
    assert live(b) == live(a)


def test_without_links_the_state_of_a_disabled_source_can_be_removed(tmp_path: Path) -> None:
    """R14, R15: an instance that no longer serves links."""
    rig = Rig(tmp_path)
    batch = Batch()
    batch.puts[META][source_key("ldn")] = b"{"
    rig.store._rocks.write(batch)
    rig.close()
    rig.open()
    links = NoLinks(rig.store.commits, rig.store.replicas.sources, "nyc-1")
    (link,) = links.status().incoming
    assert (link.peer, link.state) == ("ldn", "disabled")

    async def remove() -> None:
        removing = asyncio.create_task(links.remove_peer("ldn"))
        await asyncio.sleep(0)
        rig.store.writer.step()
        await removing

    asyncio.run(remove())
    assert not links.status().incoming
    rig.close()
    rig.open()
    assert not rig.store.replicas.sources.disabled
    assert rig.store.replicas.sources.by_name["ldn"].topics == ".*", "deletes leave tombstones for it"


def test_one_source_cannot_take_the_numbers_that_all_share(
    pair: tuple[Rig, Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """sources [3]: a peer that begins anew all the time, or names ever more instances, left no number to the others."""
    a, b = pair
    ship(a, b)
    monkeypatch.setattr(sources, "TAKEN_MAX", 5)
    part = SeedRange("t", True, True, b"", b"")

    def bring(*names: str) -> None:
        answers: list[MergeCounts | StoreError] = []
        b.store.replicas.changes.merge("a", part, chunk=b"", origins=names, purged=Purged()).then(answers.append)
        b.answer(answers)

    bring("c1", "c2", "c3", "c4")
    bring("c1", "c2", "c3", "c4")
    with pytest.raises(StoreError, match="brought records of 5 instances") as refused:
        bring("c5", "c6")
    assert refused.value.reason is Reason.LIMIT_EXCEEDED
    for _ in range(4):
        greet(a, b)
    with pytest.raises(StoreError, match="begun anew 5 times"):
        greet(a, b)
    b.close()
    b.open()
    with pytest.raises(StoreError, match="begun anew 5 times"):
        greet(a, b)


def test_the_space_of_purged_tombstones_is_given_back(pair: tuple[Rig, Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """L17: of the topic, when more were purged than are left; of the order of making the records behind the purge."""
    a, _ = pair
    compacted: list[tuple[str, bytes, bytes]] = []
    monkeypatch.setattr(a.store._rocks, "compact", lambda *of: compacted.append(of))
    for number in range(7):
        a.put("t", str(number))
        a.delete("t", str(number))
    topic, made = a.topic("t"), [row for row, _ in a.rows(TOMBSTONES, MADE_ORDER, MADE_END)]
    purge(a, upto=unpack_i64(made[2][4:12]))
    a.store.upkeep.reclaim(3, lambda: True)
    assert TOMBSTONES not in {family for family, _, _ in compacted}, "four are left"
    purge(a, upto=unpack_i64(made[3][4:12]))
    a.store.upkeep.reclaim(4, lambda: True)
    ranges = {(begin, end) for family, begin, end in compacted if family == TOMBSTONES}
    whole = min(begin for begin, _ in ranges), max(end for _, end in ranges)
    assert whole == (topic.prefix, made[4])
    compacted.clear()
    a.store.upkeep.reclaim(4, lambda: True)
    assert TOMBSTONES not in {family for family, _, _ in compacted}


def test_a_topic_of_another_kind_is_announced_before_anything_of_that_kind_goes(pair: tuple[Rig, Rig]) -> None:
    """R12: else its changes would be taken for those that were announced, and find a topic of that kind there."""
    nodes = [
        Node(
            peer_store_of(rig.store, name=rig.options.instance),
            NodeOptions(peers=peers, accept=("a",)),
            Random(1),
        )
        for rig, peers in zip(pair, [(PeerOptions("b", "b"),), ()], strict=True)
    ]
    a, b = pair
    (out,) = nodes[0].due()
    sender, receiver = nodes[0].dialled(out), nodes[1].accept()

    def sent() -> list[ReplicateRequest]:
        requests: list[ReplicateRequest] = []
        while True:
            request, read = sender.next_message(), sender.next_read()
            if read is not None:
                sender.took(read.run())
            if request is not None:
                requests.append(request)
            elif read is None:
                return requests

    for _ in range(3):
        for request in sent():
            receiver.received(request)
        b.store.writer.step()
        while (response := receiver.next_message()) is not None:
            sender.received(response)
    assert [state for _, state, _ in sender.link_topics.states()] == [TopicState.SEEDED]
    a.alter_topic("t", message_type=MessageType.JSON)
    a.put("t", "1", b"{}")
    kinds = [request.WhichOneof("message") for request in sent()]
    assert kinds == ["topics", "changes"]


# --- a loss at the end of the log that was accepted (X4) -------------------------------------------------------------


def lose(rig: Rig, *batches: Batch) -> None:
    """A loss that is accepted. Families go to table files one by one, so that one lacks rows that another one has."""
    for batch in batches:
        rig.store._rocks.write(batch)
    rig.close()
    mark = load(rig.path)
    assert mark is not None
    save(rig.path, replace(mark, number=mark.number + 1, accepted_after=0))
    rig.open()


def without(family: str, *rows: bytes) -> Batch:
    batch = Batch()
    batch.deletes[family] += rows
    return batch


def with_rows(family: str, rows: dict[bytes, bytes]) -> Batch:
    batch = Batch()
    batch.puts[family].update(rows)
    return batch


def test_after_a_loss_every_source_seeds_all_anew(pair: tuple[Rig, Rig]) -> None:
    """X4. Story: how far a source had been applied was kept, and records of it that were lost never came again."""
    a, b = pair
    a.put("t", "1")
    ship(a, b)
    tell(a, b)
    (kind,) = a.store.replicas.shared.matching("t")
    assert not b.store.replicas.sources.answer("a", kind).wanted
    lose(b, without(RECORDS, b.topic("t").prefix + b"1"))
    assert b.get("t", "1") is None
    tell(a, b)
    assert b.store.replicas.sources.answer("a", kind).wanted
    assert b.store.replicas.sources.by_name["a"].identity == identity(a), (
        "it is no new one: its purged records are dead here"
    )
    seed(a, b, "t")
    assert live(b) == live(a)


def test_after_a_loss_a_record_with_a_kept_delete_stays_deleted(pair: tuple[Rig, Rig]) -> None:
    """X4, R4. Story: the tombstone was there, the delete of the record was lost, and a seed sent the record on."""
    a, b = pair
    a.put("t", "1")
    a.put("t", "2", ttl=SECOND)
    a.put("t", "again")
    a.delete("t", "again")
    a.put("t", "again")
    records = dict(a.rows(RECORDS))
    a.delete("t", "1")
    a.time.tick(SECOND)
    a.store.sweep()
    lose(a, with_rows(RECORDS, records))
    assert live(a).keys() == {"again"}
    assert a.topic("t").statistics.records == 1
    ship(a, b)
    assert live(b) == live(a)


def test_after_a_loss_tombstones_are_counted_anew(pair: tuple[Rig, Rig]) -> None:
    """X4, R3. Story: the figures said that there was none, so none was looked for, and a change of before the delete
    brought the record back."""
    a, b = pair
    a.put("t", "1")
    a.store.sync()
    piece = a.store.replicas.reader.read(identity(b), 0, topics=["t"], select=everything, bytes_max=2**20)
    a.put("t", "2")
    ship(a, b)
    figures = dict(b.rows(META, STATISTICS_KEY, STATISTICS_KEY + b"\xff"))
    b.delete("t", "1")
    lose(b, with_rows(META, figures))
    assert b.topic("t").statistics.tombstones == 1
    greet(a, b, cursor=0)
    tell(a, b)
    answers: list[MergeCounts | StoreError] = []
    b.store.replicas.changes.apply(
        "a", after=0, upto=piece.upto, chunks=piece.chunks, origins=a.store.origins.names
    ).then(answers.append)
    assert b.answer(answers).superseded == 1
    assert live(b).keys() == {"2"}


def test_after_a_loss_of_names_tombstones_of_others_do_not_pass_for_our_own(pair: tuple[Rig, Rig]) -> None:
    """X4, K7. Story: the number of an origin that tombstones alone point at was given to this instance."""
    a, b = pair
    names = dict(b.rows(META, INSTANCE_KEY, INSTANCE_KEY + b"\xff"))
    a.put("t", "1")
    ship(a, b)
    a.delete("t", "1")
    ship(a, b)
    number = tombstones(b)["1"].origin
    lose(b, with_rows(META, names))
    assert b.store.origins.names[number] == "lost-1"
    b.put("t", "2")
    assert b.store.origins.names[b.live("t")[b"2"].origin] == "b"


def test_a_slow_pattern_of_a_source_is_matched_against_no_topic_on_the_writers_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R15: the pattern below takes RE2 some 34 ms a name, and the writer matched the names of all topics."""
    a, b = instance(tmp_path, "a"), instance(tmp_path, "b")
    for name in ("t", "u"):
        b.create_topic(name)
    assert not b.topic("t").replicated
    slow = "(?:x|xx|xxx)*" * 3_000
    matched: list[str] = []

    def compiled(pattern: str) -> Callable[[str], bool]:
        def matches(name: str) -> bool:
            matched.append(pattern)
            return matcher(pattern)(name)

        return matches

    monkeypatch.setattr(sharing, "compiled", compiled)
    begin(b, identity(a), slow)
    b.create_topic("v")
    assert matched
    assert slow not in matched
    assert all(b.topic(name).replicated for name in ("t", "u", "v")), "none of its deletes may be missed"
    assert b.store.replicas.sources.by_name["a"].topics == slow, "the link is as before"
    b.crash()
    assert b.topic("u").replicated
    assert slow not in matched


def test_a_list_of_some_hundred_topics_covers_these_topics_alone(tmp_path: Path) -> None:
    """R15."""
    a, b = instance(tmp_path, "a"), instance(tmp_path, "b")
    for name in ("desk.1.orders", "desk-1.orders", "fills.eu"):
        b.create_topic(name)
    names = [rf"desk\.{number}\.orders" for number in range(400)]
    begin(b, identity(a), "|".join([*names, r"fills\..*"]))
    assert b.topic("desk.1.orders").replicated
    assert b.topic("fills.eu").replicated
    assert not b.topic("desk-1.orders").replicated


@pytest.mark.parametrize(
    ("pattern", "quick"),
    [
        (".*", True),
        (r"orders|flights\..*", True),
        (r"(desk|fx|eq)[0-9]{4}\.(orders|fills|quotes)", True),
        ("|".join(f"orders_{number}.*" for number in range(500)), True),
        ("|".join(f"orders_{number}.*" for number in range(5_000)), False),  # too long
        ("|".join(f"orders_{number}[a-z]*" for number in range(500)), False),  # no list
        ("(?:x|xx|xxx)*" * 3_000, False),
        ("(?:x{0,400})*y", False),  # short
    ],
)
def test_a_pattern_is_quick_by_its_size_in_re2_or_as_a_list(pattern: str, quick: bool) -> None:
    assert is_quick(pattern) is quick


def begin(receiver: Rig, sender: InstanceIdentity, pattern: str) -> None:
    answers: list[MergeCounts | StoreError] = []
    receiver.store.replicas.sources.begin(
        sender, topics=pattern, filter_text="", cursor=0, missing_is_deleted=False
    ).then(answers.append)
    receiver.answer(answers)
