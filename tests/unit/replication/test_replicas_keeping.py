"""An instance keeps journal entries, tombstones and topics for its peers, and answers about its topics (R1 to R9)."""

from __future__ import annotations

from pathlib import Path

import pytest

from sow_peering import Purged
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import Expiration
from tests.support.stores.replicas import everything, greet, identity, instance, pair, purge, seed, ship, tombstones
from tests.support.stores.stores import BINARY, HOUR, MINUTE, SECOND, START, Rig

__all__ = ["pair"]  # a fixture


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
    # Another instance under its name: the state of the one before says nothing of it.
    a.store.replicas.peers.acknowledged("b", identity(b)._replace(id="new"), 1)
    assert a.store.replicas.peers.peer("b").missed


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
