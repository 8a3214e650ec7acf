"""The sweep removes overdue records in bounded commits, and never a record that was refreshed in time (L9 to L11,
L14)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sow_server.engine import background, reading, store
from sow_server.engine.commit import expiry
from sow_server.engine.commit.expiry import Sweep
from sow_server.engine.commit.options import WriterOptions
from sow_server.engine.disk.layout import REARM_KEY
from sow_server.engine.disk.rocks import META, Cursor
from sow_server.engine.store import StoreOptions
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import Delete, Expiration, Lifetime, LifetimeKind, Publish
from tests.support.stores.stores import DAY, MINUTE, SECOND, Rig, journal_rows


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


def load(rig: Rig, topic: str, count: int, ttl: int) -> None:
    rig.run(Publish(topic, [b"x"] * count, [str(n) for n in range(count)], lifetime=Lifetime(LifetimeKind.TTL, ttl)))


# --- order and delay -------------------------------------------------------------------------------------------------


def test_records_are_swept_in_the_order_of_their_deadlines_whatever_the_order_of_publishing(rig: Rig) -> None:
    """RabbitMQ 3, L9: a long-lived record does not delay later ones."""
    rig.create_topic("orders")
    rig.put("orders", "long", ttl=DAY)
    rig.put("orders", "third", ttl=3 * SECOND)
    rig.put("orders", "first", ttl=1 * SECOND)
    rig.put("orders", "second", ttl=2 * SECOND)
    rig.time.tick(3 * SECOND)
    assert rig.store.sweep() == 3
    assert rig.kinds("orders")[4:] == [("expire", "first"), ("expire", "second"), ("expire", "third")]
    assert list(rig.stored("orders")) == [b"long"]


def test_records_not_yet_due_cost_a_sweep_nothing(rig: Rig) -> None:
    """L9: the sweep visits only due entries, however many are not due."""
    rig.create_topic("orders")
    load(rig, "orders", 2000, DAY)
    rig.put("orders", "due", ttl=SECOND)
    rig.time.tick(SECOND)
    assert rig.store.sweep() == 1


def test_a_sweep_does_not_read_entries_that_are_not_yet_due(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """L9, L14: disabling one topic must not read the expiry index of all the others in the writer's thread."""
    rig.create_topic("others")
    load(rig, "others", 100, DAY)
    rig.create_topic("orders")
    load(rig, "orders", 11, SECOND)
    rig.time.tick(SECOND)
    read: list[bytes] = []
    fill_keys = Cursor.fill_keys

    def counted(cursor: Cursor, start: bytes, limit: int, keys: list[bytes]) -> None:
        found: list[bytes] = []
        fill_keys(cursor, start, limit, found)
        read.extend(found)
        keys += found

    monkeypatch.setattr(expiry, "READ_MAX", 5)
    monkeypatch.setattr(Cursor, "fill_keys", counted)
    monkeypatch.setattr(rig.store.writer, "sweep_now", lambda *_: 0)
    rig.alter_topic("orders", expiration=Expiration.DISABLED)
    assert rig.stored("orders") == {}
    assert 11 < len(read) <= 11 + 2 + 5 + 1, "those that are due, and one chunk with those that follow"
    assert rig.store.writer.sweep.next_due == rig.time.wall_micros - SECOND + DAY


def test_publishers_have_their_turn_while_much_is_swept_before_a_change_of_settings(tmp_path: Path) -> None:
    """L14: a control that wants everything overdue to be gone sweeps a bounded part of it in each of its turns."""
    rig = Rig(tmp_path, options=StoreOptions(writer=WriterOptions(sweep_entries_max=10)))
    rig.create_topic("orders")
    load(rig, "orders", 35, SECOND)
    rig.time.tick(SECOND)
    answered: list[str] = []
    rig.submit_alter("orders", lambda _: answered.append("altered"), {"expiration": Expiration.DISABLED})
    for name in ("first", "second"):
        rig.store.commits.submit(Publish("orders", [b"x"], [name])).then(lambda _, name=name: answered.append(name))  # type: ignore[misc]  # a lambda's default argument
    rig.turn()
    assert (answered, len(rig.stored("orders"))) == ([], 25)
    rig.store.writer.step()
    assert answered == ["first", "second", "altered"]
    assert list(rig.stored("orders")) == [b"first", b"second"]
    assert not rig.topic("orders").acts
    rig.close()


def test_a_change_of_settings_is_made_before_the_end_however_much_is_overdue(tmp_path: Path) -> None:
    """Requests queued when the store is closed are completed."""
    rig = Rig(tmp_path, options=StoreOptions(writer=WriterOptions(sweep_entries_max=10)))
    rig.create_topic("orders")
    load(rig, "orders", 35, SECOND)
    rig.time.tick(SECOND)
    answers: list[object] = []
    rig.submit_alter("orders", answers.append, {"expiration": Expiration.DISABLED})
    rig.reopen()
    (answer,) = answers
    assert not isinstance(answer, StoreError)
    assert not rig.topic("orders").acts
    rig.close()


def test_the_sweep_knows_when_the_next_record_falls_due(rig: Rig) -> None:
    """L9: the writer sleeps until then and no longer."""
    rig.create_topic("orders")
    now = rig.clock.now_micros()
    rig.put("orders", "a", ttl=MINUTE)
    assert rig.store.writer.sweep.next_due == now + MINUTE
    rig.put("orders", "b", ttl=SECOND)
    assert rig.store.writer.sweep.next_due == now + SECOND
    rig.time.tick(SECOND)
    rig.store.sweep()
    assert rig.store.writer.sweep.next_due == now + MINUTE


def test_an_expiry_is_delete_processing(rig: Rig) -> None:
    """AMPS 10, L10: record, index entry and journal entry in one commit; the journal has the previous record."""
    rig.create_topic("orders")
    put = rig.put("orders", "a", b"body", ttl=SECOND)
    rig.time.tick(SECOND)
    rig.store.sweep()
    assert (rig.stored("orders"), rig.entries()) == ({}, [])
    _, expire = rig.journal("orders")
    assert (expire.kind, expire.payload, expire.version) == ("expire", b"body", put.last_version)
    assert (expire.previous, expire.removed_version) == (put.last_sequence, put.last_version)


def test_mass_expiry_goes_in_bounded_commits_and_publishing_goes_on_between(tmp_path: Path) -> None:
    """L14: one call of the sweep visits a bounded number of entries; a publish gets in between."""
    rig = Rig(tmp_path, options=StoreOptions(writer=WriterOptions(sweep_entries_max=100)))
    rig.create_topic("orders")
    rig.create_topic("other")
    load(rig, "orders", 1000, SECOND)
    rig.time.tick(SECOND)
    left = []
    while rig.store.writer.sweep_now(entries_max=1):
        left.append(len(rig.stored("orders")))
        rig.put("other", "a")
        assert rig.count("orders") == 0, "whatever is left cannot be seen"
    assert left == list(range(900, -100, -100))
    largest = max(entry[1].count("expire") for entry in _commits(rig))
    assert largest == 100
    rig.close()


def _commits(rig: Rig) -> list[tuple[int, list[str]]]:
    """(first sequence, kinds) of every chunk of the topic `orders`."""
    chunks: dict[int, list[str]] = {}
    starts = [int.from_bytes(key[4:], "big") for key, _ in journal_rows(rig.store, rig.topic("orders"))]
    for entry in rig.journal("orders"):
        chunks.setdefault(max(start for start in starts if start <= entry.sequence), []).append(entry.kind)
    return list(chunks.items())


# --- refreshing against the sweep ------------------------------------------------------------------------------------


def test_refreshing_a_key_survives_the_sweep_of_its_old_deadline(rig: Rig) -> None:
    """AMPS 8, L10: the old index entry fires, finds a later stamp, and is re-armed there."""
    rig.create_topic("orders")
    rig.put("orders", "a", b"1", ttl=SECOND)
    rig.time.tick(SECOND - 1)
    rig.put("orders", "a", b"2", ttl=MINUTE)
    assert len(rig.entries()) == 1, "a later stamp costs no index entry"
    rig.time.tick(SECOND)
    assert rig.store.sweep() == 1
    found = rig.get("orders", "a")
    assert found is not None
    assert rig.entries() == [(found.expire_time_micros, rig.topic("orders").prefix + b"a")]
    rig.time.tick(MINUTE)
    rig.store.sweep()
    assert rig.stored("orders") == {}


def test_a_refresh_that_is_queued_with_its_sweep_is_not_lost(rig: Rig) -> None:
    """L10. A well-known project lost records here: the refresh stood in the very batch in which the sweep removed the
    key, and the removal was decided on a value that was read before the batch."""
    rig.create_topic("orders")
    rig.put("orders", "a", b"1", ttl=SECOND)
    rig.time.tick(SECOND - 1)
    answers: list[object] = []
    fresh = Publish("orders", [b"2"], ["a"], lifetime=Lifetime(LifetimeKind.TTL, MINUTE))
    rig.store.commits.submit(fresh).then(answers.append)
    # A control with a sweep first is how a sweep comes as close to a publish as it can.
    rig.submit_alter("orders", answers.append, {"max_ttl_micros": DAY})
    rig.time.tick(0)
    rig.store.writer.step()
    rig.time.tick(SECOND)
    rig.store.sweep()
    assert len(answers) == 2
    found = rig.get("orders", "a")
    assert found is not None
    assert found.payload == b"2"


@pytest.mark.parametrize("first", ["sweep", "refresh"])
def test_a_refresh_at_the_deadline_and_the_sweep_give_one_outcome_in_either_order(rig: Rig, first: str) -> None:
    """L10: at the deadline the old record has expired; the refresh is a new record, and stays. One EXPIRE."""
    rig.create_topic("orders")
    rig.put("orders", "a", b"1", ttl=SECOND)
    rig.time.tick(SECOND)
    if first == "sweep":
        rig.store.sweep()
    rig.put("orders", "a", b"2", ttl=SECOND)
    rig.store.sweep()
    assert rig.kinds("orders") == [("put", "a"), ("expire", "a"), ("put", "a")]
    assert rig.count("orders") == 1


def test_a_refresh_to_the_same_stamp_is_not_lost(rig: Rig) -> None:
    """draft [2]. A well-known project lost records here: on a refresh it put the new index entry and removed the old
    one, which was the same entry when the stamp was the same."""
    rig.create_topic("orders")
    deadline = Lifetime(LifetimeKind.EXPIRE_TIME, rig.clock.now_micros() + MINUTE)
    for payload in (b"1", b"2", b"3"):
        rig.put("orders", "a", payload, lifetime=deadline)
        rig.run(Publish("orders", [payload] * 2, ["b", "b"], lifetime=deadline, want_results=True))
    rig.delete("orders", "b")
    rig.put("orders", "b", lifetime=deadline)
    rig.time.tick(MINUTE - 1)
    rig.store.sweep()
    assert rig.count("orders") == 2
    rig.time.tick(1)
    rig.store.sweep()
    assert rig.stored("orders") == {}
    assert [kind for kind, _ in rig.kinds("orders")].count("expire") == 2


def test_delete_and_put_again_in_one_commit_keeps_the_index_entry(rig: Rig) -> None:
    """draft [2]: the delete takes its entry away, the put of the same stamp brings it back, in one batch."""
    rig.create_topic("orders")
    deadline = Lifetime(LifetimeKind.EXPIRE_TIME, rig.clock.now_micros() + MINUTE)
    rig.put("orders", "a", lifetime=deadline)
    rig.run_together([Delete("orders", ["a"]), Publish("orders", [b"2"], ["a"], lifetime=deadline)])
    assert len(rig.entries()) == 1
    rig.time.tick(MINUTE)
    rig.store.sweep()
    assert rig.stored("orders") == {}


def test_an_earlier_stamp_is_armed_at_once(rig: Rig) -> None:
    """draft [2]: shortening a lifetime needs an entry of its own."""
    rig.create_topic("orders")
    rig.put("orders", "a", ttl=DAY)
    rig.put("orders", "a", ttl=SECOND)
    rig.time.tick(SECOND)
    rig.store.sweep()
    assert rig.stored("orders") == {}


def test_a_record_made_permanent_survives_its_old_entries(rig: Rig) -> None:
    """P8: persist."""
    rig.create_topic("orders")
    rig.put("orders", "a", ttl=SECOND)
    rig.touch("orders", "a", lifetime=Lifetime(LifetimeKind.NEVER))
    rig.time.tick(DAY)
    assert rig.store.sweep() == 1
    assert rig.count("orders") == 1
    assert rig.entries() == []


# --- the floor -------------------------------------------------------------------------------------------------------


def test_the_sweep_goes_on_where_it_was_after_a_crash(rig: Rig) -> None:
    """expiry [1]: the floor is stored with the sweep; swept entries are not scanned again."""
    rig.create_topic("orders")
    load(rig, "orders", 50, SECOND)
    rig.time.tick(SECOND)
    rig.store.sweep()
    floor = rig.store.writer.sweep.floor
    assert floor
    rig.crash()
    assert rig.store.writer.sweep.floor == floor
    assert rig.store.sweep() == 0


@pytest.mark.parametrize("crashed", [False, True])
def test_enabling_a_topic_lowers_the_floor_to_its_overdue_records(rig: Rig, crashed: bool) -> None:
    """expiry [1]: entries that come in below the floor must still be found, also by the floor on disk."""
    rig.create_topic("orders")
    rig.create_topic("other")
    rig.put("orders", "early", ttl=SECOND)
    rig.alter_topic("orders", expiration=Expiration.DISABLED)
    rig.put("other", "a", ttl=MINUTE)
    rig.time.tick(MINUTE)
    rig.store.sweep()
    rig.alter_topic("orders", expiration=Expiration.ENABLED)
    if crashed:
        rig.crash()
    assert rig.store.cuts.counts()[rig.topic("orders").id] == (0, 1)
    rig.store.sweep()
    assert rig.stored("orders") == {}


def test_an_entry_at_the_time_of_the_floor_but_before_its_key_is_not_overlooked(rig: Rig) -> None:
    """expiry [1]. The floor is an index entry: a time and a key. Comparing the times alone, with `<`, left an entry of
    the same microsecond whose key came first below the floor for ever: its record was hidden, and never removed."""
    rig.create_topic("first")
    rig.create_topic("second")
    deadline = Lifetime(LifetimeKind.EXPIRE_TIME, rig.clock.now_micros() + SECOND)
    rig.put("first", "a", lifetime=deadline)
    rig.put("second", "a", lifetime=deadline)
    rig.alter_topic("first", expiration=Expiration.DISABLED)
    rig.time.tick(SECOND)
    rig.store.sweep()
    rig.alter_topic("first", expiration=Expiration.ENABLED)
    rig.store.sweep()
    assert rig.stored("first") == {}
    assert rig.count("first") == 0


def test_a_stamp_below_the_floor_after_the_clock_was_set_back_is_swept(rig: Rig) -> None:
    """expiry [1], L15: an operator accepts a clock that is behind; the floor is in the future now."""
    rig.create_topic("orders")
    rig.put("orders", "a", ttl=DAY)
    rig.time.tick(DAY)
    rig.store.sweep()
    rig.close()
    rig.time.step_wall(-DAY)
    rig.open(accept_clock=True)
    rig.put("orders", "b", ttl=SECOND)
    rig.time.tick(SECOND)
    assert rig.count("orders") == 0
    rig.store.sweep()
    assert rig.stored("orders") == {}


# --- stale entries, re-arming ----------------------------------------------------------------------------------------


def test_index_entries_of_a_deleted_topic_are_dropped(rig: Rig) -> None:
    """K1: a topic's id is never used again, so its entries cannot hit the records of its successor."""
    rig.create_topic("orders")
    load(rig, "orders", 10, SECOND)
    assert rig.delete_topic("orders") == 10
    rig.create_topic("orders")
    load(rig, "orders", 10, MINUTE)
    rig.time.tick(SECOND)
    assert rig.store.sweep() == 10
    assert rig.count("orders") == 10
    assert [kind for kind, _ in rig.kinds("orders")] == ["put"] * 10
    rig.reopen()
    assert rig.count("orders") == 10


def test_entries_of_a_disabled_topic_are_dropped_and_made_anew_when_it_is_enabled(rig: Rig) -> None:
    """L12."""
    rig.create_topic("orders")
    rig.put("orders", "a", ttl=SECOND)
    rig.alter_topic("orders", expiration=Expiration.DISABLED)
    rig.time.tick(SECOND)
    rig.store.sweep()
    assert (rig.count("orders"), rig.entries()) == (1, [])
    rig.alter_topic("orders", expiration=Expiration.ENABLED)
    assert len(rig.entries()) == 1
    rig.store.sweep()
    assert rig.stored("orders") == {}


def disabled_with_stamps(rig: Rig, count: int) -> None:
    """A topic with stamped records and no index entries."""
    rig.create_topic("orders", expiration=Expiration.DISABLED)
    load(rig, "orders", count, MINUTE)


def test_rearming_is_taken_up_after_a_crash_in_its_middle(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """draft [2], L12: the position is stored with each chunk; before the end, expired records are hidden all the
    same."""
    monkeypatch.setattr(background, "REARM_CHUNK", 3)
    disabled_with_stamps(rig, 10)
    answers: list[object] = []
    rig.submit_alter("orders", answers.append, {"expiration": Expiration.ENABLED})
    rig.turn()
    rig.turn()
    assert len(rig.entries()) == 3
    rig.time.tick(MINUTE)
    assert rig.live("orders") == {}
    rig.crash()
    assert not rig.rows(META, REARM_KEY, REARM_KEY + b"\xff")
    assert rig.count("orders") == 0
    rig.store.sweep()
    assert rig.stored("orders") == {}


def test_a_store_that_is_started_takes_rearming_up(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """draft [2]: as above, through `Store.start`, in the writer's thread."""
    monkeypatch.setattr(background, "REARM_CHUNK", 3)
    disabled_with_stamps(rig, 10)
    rig.submit_alter("orders", lambda _: None, {"expiration": Expiration.ENABLED})
    rig.turn()
    rig.kill()
    monkeypatch.setattr(Rig, "open", lambda rig: None)
    rig._store = store.Store.open(rig.path, clock=rig.clock)
    rig.store.start(lambda answers: answers())
    topic = rig.topic("orders")
    for _ in range(10):
        done = threading.Event()
        rig.store.commits.submit(Publish("orders", [b"x"], ["other"])).then(lambda _, done=done: done.set())  # type: ignore[misc]  # a lambda's default argument
        assert done.wait(10)
    assert not rig.rows(META, REARM_KEY, REARM_KEY + b"\xff")
    assert len([entry for entry in rig.entries() if entry[1].startswith(topic.prefix)]) == 10


def test_disabling_ends_a_rearming_that_is_under_way(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """L12. The row with its position stayed behind, so the next start armed a topic that does not expire."""
    monkeypatch.setattr(background, "REARM_CHUNK", 3)
    disabled_with_stamps(rig, 10)
    rig.submit_alter("orders", lambda _: None, {"expiration": Expiration.ENABLED})
    rig.submit_alter("orders", lambda _: None, {"expiration": Expiration.DISABLED})
    rig.store.writer.step()
    assert not rig.rows(META, REARM_KEY, REARM_KEY + b"\xff")
    rig.time.tick(MINUTE)
    rig.store.sweep()
    assert (rig.count("orders"), rig.entries()) == (10, [])
    rig.alter_topic("orders", expiration=Expiration.ENABLED)
    assert len(rig.entries()) == 10


@pytest.mark.parametrize("restarted", [False, True])
def test_hidden_records_that_are_not_rearmed_yet_do_not_reappear_when_expiration_is_disabled(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, restarted: bool
) -> None:
    """L12. Disabling expired the records that were overdue in the expiry index. While the index was being made anew,
    the rest had been hidden by the enabling, and was shown again."""
    monkeypatch.setattr(background, "REARM_CHUNK", 3)
    disabled_with_stamps(rig, 10)
    rig.time.tick(MINUTE)
    rig.put("orders", "lasting", ttl=MINUTE)
    rig.submit_alter("orders", lambda _: None, {"expiration": Expiration.ENABLED})
    rig.turn()
    assert list(rig.live("orders")) == [b"lasting"]
    if restarted:  # as a start does that takes it from the configuration, before the work goes on
        rig.kill()
        rig.clock = rig.time.clock()
        rig._store = store.Store.open(rig.path, clock=rig.clock)
    rig.alter_topic("orders", expiration=Expiration.DISABLED)
    assert rig.topic("orders").settings.expiration is Expiration.DISABLED
    assert list(rig.live("orders")) == [b"lasting"]
    assert [kind for kind, _ in rig.kinds("orders")].count("expire") == 10
    rig.time.tick(DAY)
    rig.store.sweep()
    assert rig.count("orders") == 1


def test_a_disabling_that_waits_for_the_rearming_hears_why_it_cannot_be(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X2: whoever asked is answered once, also when writing ends while it waits."""
    monkeypatch.setattr(background, "REARM_CHUNK", 3)
    disabled_with_stamps(rig, 10)
    answers: list[object] = []
    rig.submit_alter("orders", lambda _: None, {"expiration": Expiration.ENABLED})
    rig.submit_alter("orders", answers.append, {"expiration": Expiration.DISABLED})
    rig.turn()
    writer = rig.store.writer
    writer._turn()  # a chunk of the re-arming
    writer.fail(StoreError(Reason.DATA_DAMAGED, "a check found damage"))
    assert answers == []
    writer.step()
    (answer,) = answers
    assert isinstance(answer, StoreError)
    assert answer.reason is Reason.DATA_DAMAGED
    assert rig.topic("orders").settings.expiration is Expiration.ENABLED


def test_records_that_are_not_rearmed_yet_are_not_counted_either(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """L8, L16. Counts subtract the overdue records of the expiry index: while the index was being made anew, they
    counted records that a query would not show."""
    monkeypatch.setattr(background, "REARM_CHUNK", 3)
    disabled_with_stamps(rig, 10)
    rig.submit_alter("orders", lambda _: None, {"expiration": Expiration.ENABLED})
    for _ in range(3):
        rig.turn()
        assert rig.count("orders") == 10
    rig.time.tick(MINUTE)
    assert rig.rows(META, REARM_KEY, REARM_KEY + b"\xff")
    assert (rig.live("orders"), rig.count("orders")) == ({}, 0)


def test_counting_a_topic_that_is_rearmed_keeps_no_writer_waiting(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """L14. All its records were read under the lock that every commit needs."""
    monkeypatch.setattr(background, "REARM_CHUNK", 3)
    disabled_with_stamps(rig, 10)
    rig.submit_alter("orders", lambda _: None, {"expiration": Expiration.ENABLED})
    rig.turn()
    locked: list[bool] = []
    fill = reading.Cut.fill

    def watched(*arguments: object, **named: object) -> object:
        locked.append(rig.store.writer.cut_lock.locked())
        return fill(*arguments, **named)  # type: ignore[arg-type]  # passed on

    monkeypatch.setattr(reading.Cut, "fill", watched)
    assert rig.count("orders") == 10
    assert locked
    assert not any(locked)


def test_a_topic_deleted_while_it_is_rearmed_leaves_nothing_behind(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "REARM_CHUNK", 3)
    disabled_with_stamps(rig, 10)
    rig.submit_alter("orders", lambda _: None, {"expiration": Expiration.ENABLED})
    rig.store.administration.delete_topic("orders")
    rig.store.writer.step()
    assert not rig.rows(META, REARM_KEY, REARM_KEY + b"\xff")
    assert rig.entries() == []


def test_records_refreshed_while_their_topic_is_rearmed_keep_an_entry(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """draft [2]: an update to a later stamp puts no entry, trusting the old one, which is not there yet."""
    monkeypatch.setattr(background, "REARM_CHUNK", 3)
    disabled_with_stamps(rig, 10)
    rig.submit_alter("orders", lambda _: None, {"expiration": Expiration.ENABLED})
    rig.turn()
    answers: list[object] = []
    for key in ("0", "9"):
        refresh = Publish("orders", [b"2"], [key], lifetime=Lifetime(LifetimeKind.TTL, 2 * MINUTE))
        rig.store.commits.submit(refresh).then(answers.append)
    rig.store.writer.step()
    assert {key[4:] for _, key in rig.entries()} == {str(number).encode() for number in range(10)}
    rig.time.tick(2 * MINUTE)
    rig.store.sweep()
    assert rig.stored("orders") == {}


# --- at start --------------------------------------------------------------------------------------------------------


def test_records_that_fell_due_while_the_server_was_down_expire_before_it_is_ready(rig: Rig) -> None:
    """AMPS 9, L11: once, with its events in the journal."""
    rig.create_topic("orders")
    load(rig, "orders", 20, SECOND)
    rig.put("orders", "stays", ttl=DAY)
    rig.kill()
    rig.time.tick(MINUTE)
    rig.clock = rig.time.clock()
    rig._store = store.Store.open(rig.path, clock=rig.clock)
    assert rig.count("orders") == 1
    rig.store.start(lambda answers: answers())
    assert list(rig.stored("orders")) == [b"stays"]
    assert [kind for kind, _ in rig.kinds("orders")].count("expire") == 20
    rig.reopen()
    rig.store.sweep()
    assert [kind for kind, _ in rig.kinds("orders")].count("expire") == 20


def test_many_overdue_records_do_not_hold_up_the_start(tmp_path: Path) -> None:
    """L11: beyond a bound the rest is expired right after; nobody can see them meanwhile."""
    rig = Rig(tmp_path, options=StoreOptions(writer=WriterOptions(sweep_pause_micros=0, sweep_entries_max=100)))
    rig.create_topic("orders", journal=False)
    keys = [str(number) for number in range(1_200)]
    rig.run(Publish("orders", [b"x"] * 1_200, keys, lifetime=Lifetime(LifetimeKind.TTL, SECOND)))
    rig.time.tick(MINUTE)
    swept = rig.store.writer.sweep_now(entries_max=1_000)
    assert 1_000 <= swept < 1_200
    assert rig.count("orders") == 0
    rig.store.start(lambda answers: answers())
    rig.close()
    rig.options = replace(rig.options)
    rig.open()
    assert rig.live("orders") == {}
    rig.close()


def test_a_count_is_of_one_instant_while_the_sweep_goes_on(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stored records were counted first and the overdue ones looked up afterwards, so neither subtracted the
    records that the sweep removed in between: right after a restart with 50,000 overdue records, `count` said 54,000 of
    50,000.
    """
    rig.create_topic("sessions", expiration=Expiration.ENABLED)
    rig.put("sessions", "lasting", ttl=MINUTE)
    for number in range(10):
        rig.put("sessions", str(number), ttl=SECOND)
    rig.time.tick(SECOND)
    count_overdue = Sweep.overdue

    def sweep_then_count(*arguments: object, **named: object) -> dict[int, int]:
        rig.store.sweep()
        return count_overdue(*arguments, **named)  # type: ignore[arg-type]  # keywords of several types

    monkeypatch.setattr(Sweep, "overdue", sweep_then_count)

    assert rig.store.cuts.count(rig.store.topics.by_name["sessions"]) == 1


def test_a_count_is_of_one_instant_while_its_topic_is_disabled(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """L12, L16. Whether the topic acts on expiration was asked again after the cut, so its overdue records were counted
    as live."""
    rig.create_topic("sessions")
    load(rig, "sessions", 10, SECOND)
    rig.put("sessions", "lasting", ttl=MINUTE)
    rig.time.tick(SECOND)
    count_overdue = Sweep.overdue

    def disable_then_count(*arguments: object, **named: object) -> dict[int, int]:
        rig.alter_topic("sessions", expiration=Expiration.DISABLED)
        return count_overdue(*arguments, **named)  # type: ignore[arg-type]  # keywords of several types

    monkeypatch.setattr(Sweep, "overdue", disable_then_count)
    assert rig.count("sessions") == 1
