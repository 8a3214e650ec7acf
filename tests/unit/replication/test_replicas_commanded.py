"""Peers that were added by command: what is held for them, what is left of them, and their links (R14)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sow_replication.options import Mode, PeerOptions
from sow_replication.ports import Refused
from sow_server.engine.replicas import CommandedPeer, PeerSettings, ReplicaOptions
from sow_server.engine.values.errors import Reason, StoreError
from tests.support.stores.replicas import greet, identity, instance, pair, ship, tombstones
from tests.support.stores.stores import BINARY, Rig
from tests.unit.replication.test_replication_machines import Pair

__all__ = ["pair"]  # a fixture

PEER = CommandedPeer("b", "b:1", mode="sync", ca="/ca", token_file="/token")


def add(rig: Rig, peer: CommandedPeer = PEER) -> None:
    answers: list[StoreError | None] = []
    rig.store.replicas.commanded.add(peer).then(answers.append)
    rig.answer(answers)


def remove(rig: Rig, name: str = "b") -> None:
    answers: list[StoreError | None] = []
    rig.store.replicas.commanded.remove(name).then(answers.append)
    rig.answer(answers)


def test_journal_and_tombstones_are_kept_for_an_added_peer_and_not_for_a_removed_one(tmp_path: Path) -> None:
    """R14, R9, R4, T5."""
    a = instance(tmp_path, "a")
    a.create_topic("t", BINARY, retain_time_micros=0, retain_bytes=0)
    a.put("t", "1")
    a.delete("t", "1")
    assert tombstones(a) == {}
    add(a)
    a.put("t", "2")
    a.delete("t", "2")
    a.prune()
    assert set(tombstones(a)) == {"2"}
    assert len(a.journal("t")) > 0
    with pytest.raises(StoreError) as caught:
        a.store.replicas.peers.check_shipped(a.topic("t"))
    assert caught.value.reason is Reason.PEER_BEHIND
    remove(a)
    a.prune()
    assert a.journal("t") == []
    a.store.replicas.peers.check_shipped(a.topic("t"))


def test_added_peers_and_pauses_are_there_after_a_crash(tmp_path: Path) -> None:
    """R14."""
    a = instance(tmp_path, "a", peers=["file"])
    a.create_topic("t")
    add(a)
    add(a, CommandedPeer("source"))
    for name in ("b", "file"):
        answers: list[StoreError | None] = []
        a.store.replicas.commanded.pause(name, paused=True).then(answers.append)
        a.answer(answers)
    a.crash()
    commanded = a.store.replicas.commanded
    assert commanded.added() == [PEER, CommandedPeer("source")]
    assert commanded.paused() == {"b", "file"}
    assert set(a.store.replicas.peers.of(a.topic("t"))) == {"b", "file"}
    remove(a)
    a.crash()
    assert a.store.replicas.commanded.added() == [CommandedPeer("source")]
    assert a.store.replicas.peers.of(a.topic("t")) == ["file"]


def test_the_configuration_takes_over_what_it_names_and_keeps_pauses(tmp_path: Path) -> None:
    """R14."""
    a = instance(tmp_path, "a")
    add(a)
    answers: list[StoreError | None] = []
    a.store.replicas.commanded.pause("b", paused=True).then(answers.append)
    a.answer(answers)
    assert settled(a, "b") == ["b"]
    assert a.store.replicas.commanded.added() == []
    assert a.store.replicas.commanded.paused() == {"b"}
    assert a.store.replicas.commanded.settle({"b"}) is None
    assert settled(a) == []  # it has left the file
    assert a.store.replicas.commanded.paused() == set()


def settled(rig: Rig, *configured: str) -> list[str]:
    taken = rig.store.replicas.commanded.settle(configured)
    assert taken is not None
    return rig.store.finish(taken)


@pytest.mark.parametrize(("in_file", "sent"), [("peer", ["b"]), ("accept", [])])
def test_what_the_configuration_says_of_an_added_peer_is_in_force_at_once(
    tmp_path: Path, in_file: str, sent: list[str]
) -> None:
    """R14. The pattern of the command stayed in force until the next start but one: no journal was held for the other
    topics, and their deletes left no tombstones. A peer that only sends, by the file, held all journals."""
    a = instance(tmp_path, "a")
    a.create_topic("t")
    add(a, PEER._replace(topics="u" if in_file == "peer" else ".*"))
    peers = (PeerSettings("b", ".*"),) if in_file == "peer" else ()
    a.options = replace(a.options, replicas=ReplicaOptions(peers=peers))
    a.crash()
    assert settled(a, "b") == ["b"]
    assert a.store.replicas.peers.of(a.topic("t")) == sent
    assert a.topic("t").replicated == bool(sent)
    a.put("t", "1")
    a.delete("t", "1")
    assert set(tombstones(a)) == ({"1"} if sent else set())


def test_a_removed_instance_is_remembered_as_one_that_missed_tombstones(pair: tuple[Rig, Rig]) -> None:
    """R14, R4."""
    a, b = pair
    a.put("t", "1")
    greet(a, b)
    greet(b, a)
    ship(a, b)
    a.store.replicas.peers.acknowledged("b", identity(b), a.store.writer.synced_sequence)
    remove(a)
    a.crash()
    state, source = a.store.replicas.peers.peer("b"), a.store.replicas.sources.get("b")
    assert (state.identity, state.acknowledged, state.missed) == (identity(b), 0, True)
    assert source is not None
    assert source.wait_for > 0
    with pytest.raises(StoreError) as caught:
        a.store.replicas.sources.ready("b")
    assert caught.value.reason is Reason.RESEED_PENDING
    a.put("t", "2")
    a.delete("t", "2")
    assert set(tombstones(a)) == {"2"}, "without it no purge mark would rise"


def test_nothing_is_left_of_an_instance_that_never_came(tmp_path: Path) -> None:
    """R14."""
    a = instance(tmp_path, "a")
    add(a)
    remove(a)
    assert a.store.replicas.peers.by_name == {}
    assert a.store.replicas.sources.get("b") is None


# -- links ----------------------------------------------------------------------------------------------------------


def test_a_paused_sync_peer_counts_as_downgraded_at_once_and_again_when_it_has_caught_up() -> None:
    """R14, R8."""
    pair = Pair(mode=Mode.SYNC)
    sender, receiver = pair.connect()
    answers: list[Refused | None] = []
    pair.publish(1)
    pair.sending.gates.replicated("T", pair.a.head()).then(answers.append)
    assert answers == []
    pair.sending.pause("b")
    assert [answer is not None for answer in answers] == [True]
    assert sender.failure is not None
    pair.sending.closed(sender)
    receiver.fail(sender.failure)
    [out] = pair.sending.outgoing.values()
    assert (out.state, out.downgraded, pair.sending.due()) == ("paused", True, [])
    pair.sending.resume("b")
    pair.connect()
    assert (out.state, out.downgraded) == ("streaming", False)


def test_a_removed_peer_is_waited_for_no_longer_and_its_links_end() -> None:
    """R14, R8."""
    pair = Pair(mode=Mode.SYNC)
    sender, receiver = pair.connect()
    answers: list[Refused | None] = []
    pair.publish(1)
    pair.sending.gates.replicated("T", pair.a.head()).then(answers.append)
    pair.sending.remove("b")
    assert [answer is not None for answer in answers] == [True]
    assert sender.failure is not None
    pair.sending.closed(sender)  # of a peer that is not there any more
    pair.receiving.remove("a")
    assert receiver.failure is not None
    pair.sending.add(PeerOptions("b", "elsewhere"))
    assert [out.peer.address for out in pair.sending.due()] == ["elsewhere"]
