"""Loads, step by step: staging, commit, applying, and records left alone (rule P9); `engine/loads`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from sow_server.engine.commit.draft import Draft
from sow_server.engine.commit.requests import RequestLimits
from sow_server.engine.commit.steps import Nothing
from sow_server.engine.disk.rocks import STAGING
from sow_server.engine.loads import Load, LoadOptions, LoadPart, LoadPhase, applying, staging
from sow_server.engine.loads.loads import KEPT_MICROS
from sow_server.engine.pending import Pending
from sow_server.engine.store import StoreOptions
from sow_server.engine.stored import PUT
from sow_server.engine.values.database import DiskFull
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import (
    ABSENT,
    NEVER,
    Expiration,
    Lifetime,
    LifetimeKind,
    Publish,
    Refusal,
    TopicSettings,
)
from sow_server.metrics import Metrics
from tests.support.stores.parts import figures_of
from tests.support.stores.stores import BINARY, MINUTE, SECOND, FaultyRocks, Rig

KEYED = TopicSettings(key=("/id",), expiration=Expiration.ENABLED)


class Loaded(Rig):
    """A rig that loads."""

    def heard(self, started: Pending[Load]) -> Load:
        """Completes the started work. Raises StoreError."""
        return self.store.finish(started)

    def open_load(self, topic: str = "t", lease: int = MINUTE) -> str:
        """Opens a load."""
        return self.heard(self.store.loads.open(topic, lease)).row.id

    def stage(
        self,
        load: str,
        rows: Sequence[tuple[str | None, bytes]],
        *,
        part: int = 0,
        attempt: int = 1,
        first: int = 1,
        lifetimes: Sequence[Lifetime] | None = None,
        stager: int = 0,
    ) -> list[Refusal]:
        """Stages rows of an attempt; returns the refusals."""
        keys = [key for key, _ in rows if key is not None]
        request = Publish("", [payload for _, payload in rows], keys or None, lifetimes=lifetimes)
        limits = RequestLimits(payload_bytes_max=100)
        pieces = self.store.loads.staging.prepare(load, part, attempt, first, request, limits, stager=stager)
        for piece in pieces:
            answers: list[Load | StoreError] = []
            self.store.loads.staging.stage(piece).then(answers.append)
            self.answer(answers)
        return [refusal for piece in pieces for refusal in piece.refusals]

    def commit(self, load: str, *parts: tuple[int, int, int]) -> Load:
        """Commits parts: (part, attempt, rows)."""
        named = [LoadPart(*part) for part in parts]
        return self.heard(self.store.loads.commit(load, named))

    def step_load(self, load: str) -> Load:
        """Applies one chunk. Raises StoreError."""
        chunk = self.store.loads.applying.read(self.store.loads.registry.find(load))
        return self.heard(self.store.loads.applying.apply(chunk))

    def finish(self, load: str) -> Load:
        """Applies all of it."""
        found = self.store.loads.registry.find(load)
        while found.row.working:
            found = self.step_load(load)
        return found

    def payloads(self, topic: str = "t") -> dict[str, bytes]:
        """The records that readers see."""
        return {key.decode(): record.payload for key, record in self.live(topic).items()}


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Loaded]:
    rig = Loaded(tmp_path, options=StoreOptions(loads=LoadOptions(open_max=3)))
    rig.create_topic("t", BINARY)
    yield rig
    rig.close()


def reason(call: Callable[[], object]) -> Reason:
    with pytest.raises(StoreError) as refused:
        call()
    return refused.value.reason


def test_a_load_replaces_the_content(rig: Loaded) -> None:
    for key in "abc":
        rig.put("t", key, b"old")
    load = rig.open_load()
    assert rig.stage(load, [("b", b"new"), ("d", b"new")]) == []
    assert rig.payloads() == {"a": b"old", "b": b"old", "c": b"old"}
    rig.commit(load, (0, 1, 2))
    assert rig.finish(load).row.figures == (2, 2, 0, 0, 2)
    assert rig.payloads() == {"b": b"new", "d": b"new"}
    assert rig.rows(STAGING) == []
    assert rig.kinds("t")[3:] == [("put", "b"), ("put", "d"), ("delete", "a"), ("delete", "c")]


def test_a_commit_of_no_parts_empties_the_topic(rig: Loaded) -> None:
    rig.put("t", "a")
    load = rig.open_load()
    rig.stage(load, [("b", b"not named")])
    rig.commit(load)
    assert rig.finish(load).row.figures == (0, 0, 0, 0, 1)
    assert rig.payloads() == {}


def test_lifetimes_start_when_the_row_is_applied(rig: Loaded) -> None:
    load = rig.open_load()
    ttl = Lifetime(LifetimeKind.TTL, 10 * SECOND)
    rig.stage(load, [("a", b"1"), ("b", b"2")], lifetimes=[ttl, ABSENT])
    rig.time.tick(50 * SECOND)
    rig.commit(load, (0, 1, 2))
    rig.finish(load)
    found = rig.live("t")
    assert found[b"a"].expire_time_micros == rig.clock.now_micros() + 10 * SECOND
    assert found[b"b"].expire_time_micros == NEVER


def test_changes_by_others_after_the_opening_win(rig: Loaded) -> None:
    for key in "abcd":
        rig.put("t", key, b"old")
    load = rig.open_load()
    rig.put("t", "a", b"theirs")
    rig.delete("t", "b")
    rig.touch("t", "c", ttl=MINUTE)
    rig.stage(load, [(key, b"new") for key in "abcd"])
    rig.put("t", "e", b"theirs")
    rig.commit(load, (0, 1, 4))
    rig.put("t", "d", b"late")  # after the commit, before it is applied
    assert rig.finish(load).row.figures == (4, 0, 4, 0, 0)
    assert rig.payloads() == {"a": b"theirs", "c": b"old", "d": b"late", "e": b"theirs"}


def test_a_change_between_reading_and_applying_wins(rig: Loaded) -> None:
    rig.put("t", "a", b"old")
    rig.put("t", "z", b"old")
    load = rig.open_load()
    rig.stage(load, [("a", b"new"), ("b", b"new")])
    rig.commit(load, (0, 1, 2))
    rows = rig.store.loads.applying.read(rig.store.loads.registry.find(load))
    rig.put("t", "b", b"theirs")
    rig.heard(rig.store.loads.applying.apply(rows))
    others = rig.store.loads.applying.read(rig.store.loads.registry.find(load))
    assert others.keys == [b"z"]
    rig.put("t", "z", b"theirs")
    rig.heard(rig.store.loads.applying.apply(others))
    assert rig.payloads() == {"a": b"new", "b": b"theirs", "z": b"theirs"}


def test_a_record_that_has_only_expired_is_loaded_and_one_that_others_let_expire_is_not(rig: Loaded) -> None:
    rig.put("t", "a", b"old", ttl=SECOND)
    load = rig.open_load()
    rig.put("t", "b", b"theirs", ttl=SECOND)
    rig.stage(load, [("a", b"new"), ("b", b"new")])
    rig.time.tick(2 * SECOND)
    rig.store.sweep()
    rig.commit(load, (0, 1, 2))
    assert rig.finish(load).row.figures == (2, 1, 1, 0, 0)
    assert rig.payloads() == {"a": b"new"}


def test_a_row_that_was_applied_is_not_applied_again_after_a_crash(
    rig: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows applied before the crash have gone since: one deleted, one expired. They stay gone."""
    monkeypatch.setattr(applying, "APPLY_ROWS", 2)
    load = rig.open_load()
    ttl = Lifetime(LifetimeKind.TTL, SECOND)
    rig.stage(load, [(key, key.encode()) for key in "abcd"], lifetimes=[ttl, ABSENT, ABSENT, ABSENT])
    rig.commit(load, (0, 1, 4))
    assert rig.step_load(load).row.figures.applied == 2
    rig.delete("t", "b")
    rig.time.tick(2 * SECOND)
    rig.store.sweep()
    rig.crash()
    assert [load.row.figures.applied for load in rig.store.loads.registry.working()] == [2]
    assert rig.finish(load).row.figures == (4, 4, 0, 0, 0)
    assert rig.payloads() == {"c": b"c", "d": b"d"}


def test_the_highest_part_wins_for_a_repeated_key_and_the_last_row_within_an_attempt(rig: Loaded) -> None:
    load = rig.open_load()
    rig.stage(load, [("a", b"0"), ("a", b"0 again"), ("b", b"0")], part=0)
    rig.stage(load, [("a", b"1")], part=1)
    rig.stage(load, [("a", b"other attempt")], part=1, attempt=7)
    rig.stage(load, [("a", b"not named")], part=2)
    rig.commit(load, (1, 7, 1), (0, 1, 3))
    assert rig.finish(load).row.figures == (4, 2, 0, 2, 0)
    assert rig.payloads() == {"a": b"other attempt", "b": b"0"}


def test_a_request_that_comes_again_is_counted_once_and_a_gap_is_refused(rig: Loaded) -> None:
    load = rig.open_load()
    rig.stage(load, [("a", b"1"), ("b", b"2")])
    rig.stage(load, [("a", b"3")], first=3)
    rig.stage(load, [("a", b"1"), ("b", b"2")])  # late, and older than the rows staged since
    assert reason(lambda: rig.stage(load, [("c", b"4")], first=5)) is Reason.LOAD_INCOMPLETE
    assert reason(lambda: rig.commit(load, (0, 1, 2))) is Reason.LOAD_INCOMPLETE
    assert reason(lambda: rig.commit(load, (0, 2, 3))) is Reason.LOAD_INCOMPLETE
    rig.commit(load, (0, 1, 3))
    rig.finish(load)
    assert rig.payloads() == {"a": b"3", "b": b"2"}


def test_rows_are_refused_as_a_publish_would_refuse_them(rig: Loaded) -> None:
    rig.create_topic("keyed", KEYED)
    load = rig.open_load("keyed")
    good, long = Lifetime(LifetimeKind.TTL, SECOND), Lifetime(LifetimeKind.TTL, 2**62)
    rows: list[tuple[str | None, bytes]] = [
        (None, b'{"id": 1}'),
        (None, b'{"ID": 1}'),
        (None, b"{"),
        (None, b'{"id": "' + b"x" * 100 + b'"}'),
        (None, b'{"id": 2}'),
    ]
    refusals = rig.stage(load, rows, lifetimes=[good, ABSENT, ABSENT, ABSENT, long])
    assert [(refusal.index, refusal.reason) for refusal in refusals] == [
        (1, Reason.KEY_FIELD_MISSING),
        (2, Reason.PAYLOAD_MALFORMED),
        (3, Reason.PAYLOAD_TOO_LARGE),
        (4, Reason.LIFETIME_TOO_LONG),
    ]
    assert reason(lambda: rig.stage(load, [("given", b"{}")], first=6)) is Reason.KEY_NOT_ALLOWED
    rig.commit(load, (0, 1, 1))
    rig.finish(load)
    assert rig.payloads("keyed") == {"1": b'{"id": 1}'}


def test_the_end_of_the_lease_leaves_the_topic_as_it_was(rig: Loaded) -> None:
    rig.put("t", "a", b"old")
    load = rig.open_load(lease=MINUTE)
    rig.time.tick(50 * SECOND)
    rig.stage(load, [("a", b"new")])  # which renews it
    rig.time.tick(50 * SECOND)
    rig.store.loads.upkeep()
    rig.store.writer.step()
    assert rig.store.loads.registry.renew(load).lease_end_micros == rig.clock.now_micros() + MINUTE
    rig.time.tick(MINUTE)
    rig.store.loads.upkeep()
    rig.store.writer.step()
    assert reason(lambda: rig.commit(load, (0, 1, 1))) is Reason.LOAD_NOT_FOUND
    assert reason(lambda: rig.store.loads.registry.renew(load)) is Reason.LOAD_NOT_FOUND
    assert rig.payloads() == {"a": b"old"}
    assert rig.rows(STAGING) == []
    assert rig.topic("t").loads == ()


def test_a_load_whose_lease_is_renewed_at_its_end_does_not_end(rig: Loaded) -> None:
    """The end of the lease is in the writer's queue when the renewal comes."""
    load = rig.open_load(lease=MINUTE)
    rig.time.tick(MINUTE)
    rig.store.loads.upkeep()
    rig.store.loads.registry.renew(load)
    rig.store.writer.step()
    assert rig.store.loads.registry.find(load).row.phase is LoadPhase.STAGING


def test_an_aborted_load_is_removed_and_a_committed_one_is_not_aborted(rig: Loaded) -> None:
    load, other = rig.open_load(), rig.open_load()
    rig.stage(load, [("a", b"new")])
    rig.heard(rig.store.loads.abort(load))
    assert rig.rows(STAGING) == []
    assert reason(lambda: rig.heard(rig.store.loads.abort(load))) is Reason.LOAD_NOT_FOUND
    rig.commit(other)
    assert reason(lambda: rig.heard(rig.store.loads.abort(other))) is Reason.LOAD_COMMITTED
    assert reason(lambda: rig.stage(other, [("a", b"late")])) is Reason.LOAD_COMMITTED


def test_an_ended_load_is_known_for_a_day(rig: Loaded) -> None:
    load = rig.open_load()
    rig.commit(load)
    done = rig.finish(load).row
    assert done.phase is LoadPhase.DONE
    rig.reopen()
    assert rig.commit(load).row == done
    rig.time.tick(KEPT_MICROS - SECOND)
    rig.store.loads.upkeep()
    rig.store.writer.step()
    assert rig.commit(load).row == done
    assert reason(lambda: rig.commit(load, (0, 1, 0))) is Reason.LOAD_COMMITTED
    rig.time.tick(SECOND)
    rig.store.loads.upkeep()
    rig.store.writer.step()
    assert reason(lambda: rig.commit(load)) is Reason.LOAD_NOT_FOUND


def test_staging_goes_on_after_a_restart(rig: Loaded) -> None:
    load = rig.open_load()
    rig.stage(load, [("a", b"1")])
    rig.put("t", "x", b"theirs")
    rig.crash()
    rig.delete("t", "x")
    rig.put("t", "b", b"theirs")
    assert rig.store.loads.registry.find(load).figures.staged == 1
    rig.stage(load, [("b", b"2"), ("x", b"3")], first=2)
    rig.commit(load, (0, 1, 3))
    rig.finish(load)
    assert rig.payloads() == {"a": b"1", "b": b"theirs"}


def test_more_loads_than_allowed_are_refused_and_ended_ones_do_not_count(rig: Loaded) -> None:
    first, *_ = [rig.open_load() for _ in range(3)]
    assert reason(rig.open_load) is Reason.OVERLOADED
    rig.commit(first)
    assert reason(rig.open_load) is Reason.OVERLOADED
    rig.finish(first)
    rig.open_load()


def test_the_loads_of_a_deleted_topic_fail(rig: Loaded) -> None:
    staging, committed = rig.open_load(), rig.open_load()
    rig.stage(staging, [("a", b"1")])
    rig.stage(committed, [("a", b"1")])
    rig.commit(committed, (0, 1, 1))
    chunk = rig.store.loads.applying.read(rig.store.loads.registry.find(committed))
    rig.delete_topic("t")
    rig.create_topic("t", BINARY)
    assert reason(lambda: rig.commit(staging, (0, 1, 1))) is Reason.LOAD_FAILED
    assert reason(lambda: rig.commit(committed, (0, 1, 1))) is Reason.LOAD_FAILED
    rig.heard(rig.store.loads.applying.apply(chunk))  # it had been read before
    assert rig.payloads() == {}
    assert rig.rows(STAGING) == []
    assert "deleted" in rig.store.loads.registry.find(staging).row.failure


def test_the_loads_of_a_topic_that_takes_other_keys_fail(rig: Loaded) -> None:
    rig.put("t", "late", ttl=SECOND)
    load = rig.open_load()
    rig.put("t", "late", ttl=SECOND)
    rig.stage(load, [("a", b"1")])
    rig.time.tick(SECOND)
    rig.alter_topic("t", {"message_type": "json", "key": ("/id",)})  # overdue records expire in the same commit
    assert reason(lambda: rig.stage(load, [("b", b"1")], first=2)) is Reason.LOAD_FAILED
    assert rig.rows(STAGING) == []


def test_a_row_that_is_refused_when_it_is_applied_ends_the_load(rig: Loaded) -> None:
    rig.put("t", "old")
    load = rig.open_load()
    rig.stage(load, [("a", b"1")], lifetimes=[Lifetime(LifetimeKind.TTL, SECOND)])
    rig.commit(load, (0, 1, 1))
    rig.alter_topic("t", expiration=Expiration.REJECT)
    with pytest.raises(StoreError) as refused:
        rig.step_load(load)
    assert refused.value.reason is Reason.LOAD_FAILED
    found = rig.store.loads.registry.find(load)
    rig.heard(rig.store.loads.fail(found, refused.value.message))
    assert found.row.phase is LoadPhase.FAILED
    assert "LIFETIME_REJECTED" in found.row.failure
    assert rig.payloads() == {"old": b"x"}
    rig.reopen()
    assert rig.store.loads.registry.working() == []


def test_a_topic_with_an_open_load_is_in_use(rig: Loaded) -> None:
    load = rig.open_load()
    topic = rig.topic("t")
    answers: list[bool | StoreError] = []
    rig.store.administration.delete_unused(topic, lambda *_: True).then(answers.append)
    assert rig.answer(answers) is False
    rig.heard(rig.store.loads.abort(load))
    answers.clear()
    rig.store.administration.delete_unused(topic, lambda *_: True).then(answers.append)
    assert rig.answer(answers) is True


def test_a_restore_ends_staged_loads_and_continues_committed_ones(rig: Loaded, tmp_path: Path) -> None:
    staging, committed = rig.open_load(), rig.open_load()
    for load in (staging, committed):
        rig.stage(load, [("a", b"1")])
    rig.commit(committed, (0, 1, 1))
    rig.store.upkeep.backup("backup")
    rig.close()
    rig.path = tmp_path / "backup"
    rig.open()
    assert reason(lambda: rig.store.loads.registry.find(staging)) is Reason.LOAD_NOT_FOUND
    assert {key[:4] for key, _ in rig.rows(STAGING)} == {(2).to_bytes(4, "big")}
    rig.finish(committed)
    assert rig.payloads() == {"a": b"1"}


def test_a_disk_that_is_full_while_rows_are_staged_leaves_the_topic_as_it_was(rig: Loaded) -> None:
    rig.put("t", "a", b"old")
    load = rig.open_load()
    faulty = FaultyRocks(rig)
    faulty.writes = [DiskFull("no space")]
    assert reason(lambda: rig.stage(load, [("a", b"new")])) is Reason.DISK_FULL
    assert rig.payloads() == {"a": b"old"}
    rig.crash()
    assert rig.store.loads.registry.find(load).figures.staged == 0
    rig.stage(load, [("a", b"new")])
    rig.commit(load, (0, 1, 1))
    rig.finish(load)
    assert rig.payloads() == {"a": b"new"}


def test_two_loads_of_one_topic_do_not_undo_each_other(rig: Loaded) -> None:
    rig.put("t", "old")
    first, second = rig.open_load(), rig.open_load()
    rig.stage(first, [("a", b"first"), ("b", b"first")])
    rig.stage(second, [("b", b"second"), ("c", b"second")])
    rig.commit(second, (0, 1, 2))
    rig.commit(first, (0, 1, 2))
    rig.finish(first)
    rig.finish(second)
    assert rig.payloads() == {"a": b"first", "b": b"first", "c": b"second"}


def test_a_change_that_comes_late_from_another_instance_wins_whatever_its_version(tmp_path: Path) -> None:
    """It was made before the load was opened, so its version is below that of the opening; it came after."""
    rig = Loaded(tmp_path)
    topic = rig.create_topic("t", BINARY)
    rig.put("t", "a", b"old")
    version = rig.live("t")[b"a"].version + 1
    rig.time.tick(MINUTE)
    rig.put("t", "b", b"old")
    load = rig.open_load()
    assert rig.store.loads.registry.find(load).row.begin_version > version

    class Merge(Nothing):
        def stage(self, draft: Draft) -> None:
            head = rig.stored("t")[b"a"]
            draft.fetch_heads([topic.prefix + b"a"])
            draft.put(
                topic,
                b"a",
                topic.prefix + b"a",
                draft.heads[topic.prefix + b"a"],
                b"theirs",
                change=PUT,
                publish_time=head.publish_time_micros,
                expire_time=NEVER,
                version=version,
            )
            draft.bury(topic, b"c", topic.prefix + b"c", version=version, origin=0)

    rig.store.commits.run(Merge())
    rig.store.writer.step()
    rig.stage(load, [("a", b"new"), ("b", b"new"), ("c", b"new")])
    rig.commit(load, (0, 1, 3))
    assert rig.finish(load).row.figures == (3, 1, 2, 0, 0)
    assert rig.payloads() == {"a": b"theirs", "b": b"new"}
    rig.close()


def test_a_part_that_is_named_twice_is_refused(rig: Loaded) -> None:
    load = rig.open_load()
    with pytest.raises(StoreError) as refused:
        rig.commit(load, (0, 1, 0), (0, 2, 0))
    assert (refused.value.reason, refused.value.field) == (Reason.INVALID_ARGUMENT, "parts[1].part")


def test_the_disk_space_of_staged_rows_is_given_back(rig: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    compacted: list[tuple[str, bytes | None, bytes | None]] = []
    monkeypatch.setattr(rig.store._rocks, "compact", lambda *of: compacted.append(of))
    load, other = rig.open_load(), rig.open_load()
    rig.stage(load, [(str(number), b"x") for number in range(10)])
    rig.stage(other, [("a", b"x")])
    assert rig.store.upkeep.reclaim(5, lambda: True) == 0
    rig.heard(rig.store.loads.abort(load))
    assert rig.store.upkeep.reclaim(5, lambda: True) == 1
    assert compacted == [(STAGING, (1).to_bytes(4, "big"), (2).to_bytes(4, "big"))]
    assert rig.store.upkeep.reclaim(5, lambda: True) == 0


def test_the_figures_of_loads_are_metrics(rig: Loaded) -> None:
    metrics = Metrics()
    metrics.watch(figures_of(rig.store))

    def value(name: str) -> float | None:
        return metrics.registry.get_sample_value(name)

    rig.put("t", "old")
    load = rig.open_load()
    rig.stage(load, [("a", b"12345"), ("b", b"12345")])
    assert (value("sow_loads"), value("sow_load_staged_rows")) == (1, 2)
    assert (value("sow_load_staged_bytes") or 0) > 10
    rig.commit(load, (0, 1, 2))
    rig.finish(load)
    assert (value("sow_loads"), value("sow_load_staged_rows"), value("sow_load_staged_bytes")) == (0, 0, 0)
    assert (value("sow_load_applied_total"), value("sow_load_deleted_total")) == (2, 1)
    metrics.release()


def test_no_load_is_opened_while_a_committed_one_of_the_topic_is_applied(
    rig: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows that are applied by then would be older than the new load, and the others newer: some of each stayed."""
    monkeypatch.setattr(applying, "APPLY_ROWS", 1)
    rig.create_topic("other", BINARY)
    load = rig.open_load()
    rig.stage(load, [("a", b"1"), ("b", b"1")])
    rig.commit(load, (0, 1, 2))
    rig.step_load(load)
    assert reason(rig.open_load) is Reason.OVERLOADED
    rig.open_load("other")
    rig.finish(load)
    later = rig.open_load()
    rig.stage(later, [("c", b"2")])
    rig.commit(later, (0, 1, 1))
    rig.finish(later)
    assert rig.payloads() == {"c": b"2"}


def test_attempts_that_do_not_count_are_passed_over_in_bounded_steps(
    rig: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applying, "READ_ROWS", 2)
    monkeypatch.setattr(applying, "SCAN_RECORDS", 8)
    load = rig.open_load()
    keys = [f"{number:02}" for number in range(20)]
    for attempt in range(3):
        rig.stage(load, [(key, b"lost") for key in keys], attempt=attempt)
    rig.stage(load, [(key, b"kept") for key in keys[::7]], part=1)
    rig.commit(load, (1, 1, 3))
    steps = 0
    while rig.store.loads.registry.find(load).row.phase is LoadPhase.APPLYING:
        chunk = rig.store.loads.applying.read(rig.store.loads.registry.find(load))
        rig.heard(rig.store.loads.applying.apply(chunk))
        steps += 1
    assert 6 < steps < 25
    assert rig.finish(load).row.figures == (3, 3, 0, 0, 0)
    assert rig.payloads() == dict.fromkeys(keys[::7], b"kept")


def test_the_deletes_of_one_commit_are_bounded_in_bytes(rig: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applying, "APPLY_BYTES", 2_500_000)
    for key in "abcdef":
        rig.run(Publish("t", [bytes(900_000)], [key]))
    load = rig.open_load()
    rig.commit(load)
    rig.step_load(load)
    assert len(rig.store.loads.applying.read(rig.store.loads.registry.find(load)).keys) < 6
    assert rig.finish(load).row.figures.deleted == 6


def test_staging_ends_before_the_disk_is_full(rig: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    load = rig.open_load()
    rig.stage(load, [("a", b"1")])
    monkeypatch.setattr(rig.store._rocks, "free_bytes", lambda: 2**30)
    assert reason(lambda: rig.stage(load, [("b", b"2")], first=2)) is Reason.DISK_FULL
    rig.put("t", "x")  # others go on
    monkeypatch.undo()
    rig.stage(load, [("b", b"2")], first=2)
    rig.commit(load, (0, 1, 2))
    assert rig.finish(load).row.phase is LoadPhase.DONE


def test_loads_stage_no_more_together_than_is_allowed(tmp_path: Path) -> None:
    rig = Loaded(tmp_path, options=StoreOptions(loads=LoadOptions(staged_bytes_max=250)))
    rig.create_topic("t", BINARY)
    first, second = rig.open_load(), rig.open_load()
    rig.stage(first, [("a", bytes(100))])
    rig.stage(second, [("a", bytes(50))])
    assert reason(lambda: rig.stage(second, [("b", bytes(100))], first=2)) is Reason.REQUEST_TOO_LARGE
    rig.stage(second, [("a", bytes(50))])  # again: nothing new
    rig.heard(rig.store.loads.abort(first))
    rig.stage(second, [("b", bytes(100))], first=2)
    rig.close()


def test_attempts_beyond_the_limit_leave_nothing_behind(rig: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "ATTEMPTS_MAX", 2)
    load = rig.open_load()
    for attempt in (1, 2, 1):
        rig.stage(load, [("a", b"1")], attempt=attempt, first=1)
    assert reason(lambda: rig.stage(load, [("a", b"1")], attempt=3)) is Reason.REQUEST_TOO_LARGE


def test_the_end_of_a_load_is_queued_once_while_the_writer_is_busy(rig: Loaded) -> None:
    rig.open_load(lease=SECOND)
    rig.time.tick(SECOND)
    for _ in range(5):
        rig.store.loads.upkeep()
    assert rig.store.writer.queue.depth[0] == 1
    rig.store.writer.step()
    assert rig.store.loads.registry.all() == ()


def test_another_stager_with_the_same_numbers_is_refused(rig: Loaded) -> None:
    """Its rows would pass for those that are sent again, and be lost without a word."""
    load = rig.open_load()
    rig.stage(load, [("a", b"1")], stager=2**64 - 1)
    assert reason(lambda: rig.stage(load, [("b", b"2")], stager=8)) is Reason.LOAD_INCOMPLETE
    assert reason(lambda: rig.stage(load, [("b", b"2")])) is Reason.LOAD_INCOMPLETE
    rig.crash()
    assert rig.stage(load, [("a", b"1"), ("b", b"2")], stager=2**64 - 1) == []
    rig.stage(load, [("b", b"2")], attempt=2, stager=8)
    rig.commit(load, (0, 1, 2))
    rig.finish(load)
    assert rig.payloads() == {"a": b"1", "b": b"2"}
