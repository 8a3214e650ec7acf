"""The writer acknowledges only durable writes, fails loudly, and answers every request (writer [1] to [5], X3)."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog

from sow_server.engine.commit import requests as mutations
from sow_server.engine.commit.draft import Draft
from sow_server.engine.commit.expiry import Sweep
from sow_server.engine.commit.options import WriterOptions
from sow_server.engine.disk.layout import BOUNDS_KEY
from sow_server.engine.disk.rocks import META, RECORDS, Cursor
from sow_server.engine.store import StoreOptions
from sow_server.engine.upkeep import SCRUB_KEYS
from sow_server.engine.values.database import Damaged, DiskFull, Failed, Stalled
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import Delete, Durability, Lifetime, LifetimeKind, Outcome, Publish, Touch
from tests.support.stores.stores import DAY, SECOND, FaultyRocks, Rig, no_drafts_left


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    rig.create_topic("orders")
    yield rig
    rig.close()


def put(key: str, payload: bytes = b"x", *, durability: Durability = Durability.FSYNC) -> Publish:
    return Publish("orders", [payload], [key], durability=durability)


def reason(answer: Outcome | StoreError) -> Reason | None:
    return answer.reason if isinstance(answer, StoreError) else None


# --- memory ----------------------------------------------------------------------------------------------------------


def test_no_commit_is_left_to_the_garbage_collector(tmp_path: Path) -> None:
    """A draft that something in it holds stays with all its rows until the collector comes, and that stops the writer:
    for 0.1 s and more, at 10,000 expiries a second."""
    rig = Rig(tmp_path)
    with no_drafts_left():
        rig.create_topic("orders", max_records=100)
        rig.put("orders", "kept")
        rig.put("orders", "late", ttl=SECOND)
        rig.touch("orders", "kept", ttl=SECOND)
        rig.delete("orders", "kept")
        rig.time.tick(2 * SECOND)
        rig.store.sweep()
        assert not rig.stored("orders")
    rig.close()


# --- acknowledging ---------------------------------------------------------------------------------------------------


def test_requests_that_are_queued_together_share_a_commit_and_its_sync(rig: Rig) -> None:
    """writer [1], P5: group commit; the sync comes before the answers."""
    rig.put("orders", "first")  # reserves
    rocks = FaultyRocks(rig)
    answers: list[object] = []
    synced: list[int] = []
    rocks.on_sync = lambda: synced.append(len(answers))
    for key in "abc":
        rig.store.commits.submit(put(key)).then(answers.append)
    rig.store.writer.step()
    assert len(answers) == 3
    assert len(rocks.attempts) == 1
    assert synced == [0], "one sync, before any answer"


def test_the_answer_says_which_durability_was_reached(rig: Rig) -> None:
    """P5: a buffered request that shares a commit with a synced one is synced, too."""
    rig.put("orders", "first")
    rocks = FaultyRocks(rig)
    buffered = rig.run(put("a", durability=Durability.BUFFERED))
    assert buffered.durability is Durability.BUFFERED
    one, two = rig.run_together([put("b", durability=Durability.BUFFERED), put("c")])
    assert not isinstance(one, StoreError)
    assert not isinstance(two, StoreError)
    assert one.durability is two.durability is Durability.FSYNC
    assert len(rocks.attempts) == 2


@pytest.mark.parametrize("first", [Durability.FSYNC, Durability.BUFFERED])
def test_writes_answered_as_on_disk_survive_a_power_cut(rig: Rig, first: Durability) -> None:
    """writer [1], P5: whichever request of a commit asked for it.

    Story: a commit that was synced only if its last request asked for that passed all tests.
    """
    (second,) = {Durability.FSYNC, Durability.BUFFERED} - {first}
    answers = rig.run_together([put("a", durability=first), put("b", durability=second)])
    assert [reason(answer) for answer in answers] == [None, None]
    rig.cut_power()
    assert rig.get("orders", "a")
    assert rig.get("orders", "b")


def test_versions_and_sequences_that_a_power_cut_takes_back_are_not_used_again(rig: Rig) -> None:
    """writer [4], K7: somebody may have seen them."""
    before = rig.run(put("a", durability=Durability.BUFFERED))
    rig.cut_power()
    assert rig.get("orders", "a") is None
    after = rig.put("orders", "a")
    assert after.last_sequence > before.last_sequence
    assert after.last_version > before.last_version


def test_buffered_commits_are_synced_within_their_bound(rig: Rig) -> None:
    """P5: within 50 ms all the same."""
    rig.put("orders", "first")
    synced: list[bool] = []
    FaultyRocks(rig).on_sync = lambda: synced.append(True)
    rig.run(put("a", durability=Durability.BUFFERED))
    rig.store.writer.committer.sync_if_due(rig.clock.now_micros())
    assert synced == []
    rig.time.tick(50_000)
    rig.store.writer.committer.sync_if_due(rig.clock.now_micros())
    assert synced == [True]
    rig.store.writer.committer.sync_if_due(rig.clock.now_micros())
    assert synced == [True], "once is enough"


def test_a_buffered_write_survives_a_killed_process(rig: Rig) -> None:
    """P5."""
    rig.run(put("a", durability=Durability.BUFFERED))
    rig.crash()
    assert rig.count("orders") == 1


def test_bounds_are_synced_before_the_writes_that_they_cover(rig: Rig) -> None:
    """writer [4], K7: the first batch of a start is the reservation."""
    rig.crash()
    rocks = FaultyRocks(rig)
    rig.put("orders", "a")
    assert BOUNDS_KEY in rocks.attempts[0].puts[META]
    assert not rocks.attempts[0].puts[RECORDS]
    assert rocks.attempts[1].puts[RECORDS]


# --- failing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Failed("IO error: bad disk"), Reason.STORE_FAILED),
        (DiskFull("IO error: No space left on device"), Reason.DISK_FULL),
        (Damaged("Corruption: checksum mismatch"), Reason.DATA_DAMAGED),
    ],
)
@pytest.mark.parametrize("where", ["write", "sync"])
def test_a_commit_that_fails_ends_writing_and_reads_go_on(
    rig: Rig, error: Exception, expected: Reason, where: str
) -> None:
    """X3, writer [3]: requests in the same commit, queued behind it or coming later are refused, each once."""
    rig.put("orders", "before", b"kept")
    rocks = FaultyRocks(rig)
    (rocks.writes if where == "write" else rocks.syncs).append(error)
    atomic = Publish("orders", [b"x"] * 2, ["c", "d"], atomic=True)
    answers = rig.run_together([put("a"), put("b"), atomic, Delete("orders", ["before"]), Touch("orders", ["before"])])
    assert [reason(answer) for answer in answers] == [expected] * 5
    assert len(rocks.attempts) == 1, "nothing is written after a failure"
    for _ in range(2):
        with pytest.raises(StoreError) as caught:
            rig.put("orders", "later")
        assert caught.value.reason is expected
    with pytest.raises(StoreError):
        rig.create_topic("more")
    assert rig.store.writer.queue.failure is not None
    found = rig.get("orders", "before")
    assert found is not None
    assert found.payload == b"kept"
    assert b"before" in rig.live("orders")


def test_acknowledged_records_survive_the_restart_after_a_failure(rig: Rig) -> None:
    """X3."""
    rig.put("orders", "acknowledged")
    FaultyRocks(rig).writes.append(Failed("IO error"))
    rig.run_together([put("lost")])
    rig.reopen()
    assert list(rig.live("orders")) == [b"acknowledged"]
    assert rig.put("orders", "again").applied == 1


def test_a_failing_reservation_ends_writing_too(rig: Rig) -> None:
    """X3, writer [4]."""
    rig.crash()
    rocks = FaultyRocks(rig)
    rocks.syncs.append(Failed("IO error"))
    (answer,) = rig.run_together([put("a")])
    assert reason(answer) is Reason.STORE_FAILED
    assert rig.stored("orders") == {}


def test_a_failing_sweep_ends_writing_and_shows_nothing_expired(rig: Rig) -> None:
    """X3, L8."""
    rig.put("orders", "a", ttl=SECOND)
    rig.time.tick(SECOND)
    FaultyRocks(rig).writes.append(Failed("IO error"))
    rig.store.sweep()
    assert rig.store.writer.queue.failure is not None
    assert rig.count("orders") == 0
    rig.reopen()
    assert rig.store.sweep() == 1
    assert rig.kinds("orders") == [("put", "a"), ("expire", "a")]


def test_nothing_is_written_after_a_failure_in_the_same_turn(tmp_path: Path) -> None:
    """writer [3]. The creation of a dynamic topic failed to sync while the jobs of the turn were being chosen; those
    were committed all the same, behind a gap in the log, and acknowledged."""
    rig = Rig(tmp_path, options=StoreOptions(dynamic_topics=True))
    rig.create_topic("orders")
    rig.put("orders", "first")
    rocks = FaultyRocks(rig)
    rocks.syncs.append(Failed("IO error"))
    answers = rig.run_together([Publish("new", [b"{}"], ["a"]), put("a"), put("b")])
    assert [reason(answer) for answer in answers] == [Reason.STORE_FAILED] * 3
    assert list(rig.stored("orders")) == [b"first"]
    rig.close()


def test_a_change_of_settings_is_not_made_when_the_sweep_before_it_failed(rig: Rig) -> None:
    """writer [3], L12."""
    rig.put("orders", "a", ttl=SECOND)
    rig.time.tick(SECOND)
    settings = rig.topic("orders").settings
    FaultyRocks(rig).writes.append(Failed("IO error"))
    with pytest.raises(StoreError):
        rig.alter_topic("orders", max_ttl_micros=DAY)
    assert rig.topic("orders").settings == settings
    rig.reopen()
    assert rig.topic("orders").settings == settings


def test_a_check_that_cannot_read_says_so_in_the_log(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """X3. The scrub runs where nobody waits for it: an error other than damage was lost with it."""

    def unreadable(self: Cursor, start: bytes, stop: bytes | None, *, limit: int | None = None) -> Iterator[bytes]:
        raise Failed("IO error: bad disk")

    monkeypatch.setattr(Cursor, "keys", unreadable)
    with structlog.testing.capture_logs() as logs:
        rig.store.upkeep.scrub(lambda: True)
    assert [entry["event"] for entry in logs] == ["scrub_failed"]
    assert rig.store.writer.queue.failure is None


def test_a_check_between_two_chunks_keeps_no_files_of_removed_records(rig: Rig) -> None:
    """Story: one cursor read a whole column family. For minutes after a start it kept the files of everything that was
    compacted meanwhile, so that a store under updates took twice its disk."""
    keys = [f"{number:05}" for number in range(2 * SCRUB_KEYS)]
    chance = random.Random(1)
    rig.create_topic("bare", journal=False)
    rig.run(Publish("bare", [chance.randbytes(1000) for _ in keys], keys))
    rig.store.upkeep.compact()
    sizes = [table_bytes(rig)]
    pauses = itertools.count(1)

    def pause() -> bool:
        if next(pauses) == 2:  # the first chunk of the records is read
            rig.run(Delete("bare", keys))
            rig.store.upkeep.compact()
            sizes.append(table_bytes(rig))
        return True

    rig.store.upkeep.scrub(pause)
    assert sizes[1] < sizes[0] / 2


def table_bytes(rig: Rig) -> int:
    """Bytes of the files of tables."""
    return sum(path.stat().st_size for path in rig.path.rglob("*.sst"))


def test_damage_found_from_outside_ends_writing(rig: Rig) -> None:
    """X3."""
    rig.store.writer.fail(StoreError(Reason.DATA_DAMAGED, "a check found damage"))
    with pytest.raises(StoreError, match="a check found damage"):
        rig.put("orders", "a")


# --- stalling --------------------------------------------------------------------------------------------------------


def test_a_stalled_commit_is_tried_again_unchanged(rig: Rig) -> None:
    """writer [3]: the same batch, once; nobody hears of it."""
    rig.put("orders", "first")
    rocks = FaultyRocks(rig)
    stall = Stalled("Result incomplete: Write stall")
    rocks.writes += [stall, stall, stall]
    outcome = rig.put("orders", "a")
    assert outcome.applied == 1
    assert len(rocks.attempts) == 4
    assert all(attempt == rocks.attempts[0] for attempt in rocks.attempts)
    assert rig.kinds("orders") == [("put", "first"), ("put", "a")]


def test_a_stalled_reservation_is_tried_again(rig: Rig) -> None:
    """writer [3], [4]: bounds are moved every other second, and a request that met a stall just then was refused at
    once."""
    rig.crash()
    rocks = FaultyRocks(rig)
    stall = Stalled("Result incomplete: Write stall")
    rocks.writes += [stall, stall]
    assert rig.put("orders", "a").applied == 1
    assert [BOUNDS_KEY in attempt.puts[META] for attempt in rocks.attempts] == [True, True, True, False]


def test_a_stall_that_lasts_refuses_the_request_and_not_the_store(tmp_path: Path) -> None:
    """writer [3], P6: a refusal that may pass, with a hint when to come again; nothing was written or used up."""
    rig = Rig(tmp_path, options=StoreOptions(writer=WriterOptions(stall_patience_micros=0)))
    rig.create_topic("orders")
    before = rig.put("orders", "first")
    rocks = FaultyRocks(rig)
    rocks.writes += [Stalled("Result incomplete: Write stall")]
    answers = rig.run_together([put("a"), put("b")])
    assert [reason(answer) for answer in answers] == [Reason.WRITE_STALLED] * 2
    assert isinstance(answers[0], StoreError)
    assert answers[0].retry_after_micros > 0
    assert rig.store.writer.queue.failure is None
    after = rig.put("orders", "a")
    assert after.last_sequence == before.last_sequence + 1
    assert list(rig.live("orders")) == [b"a", b"first"]
    rig.close()


def test_a_stalled_sweep_is_tried_again(tmp_path: Path) -> None:
    """writer [3], L9."""
    rig = Rig(tmp_path, options=StoreOptions(writer=WriterOptions(stall_patience_micros=0)))
    rig.create_topic("orders")
    rig.put("orders", "a", ttl=SECOND)
    rig.time.tick(SECOND)
    FaultyRocks(rig).writes += [Stalled("Result incomplete: Write stall")]
    assert rig.store.sweep() == 0
    assert rig.store.sweep() == 1
    assert rig.kinds("orders") == [("put", "a"), ("expire", "a")]
    rig.close()


# --- exceptions nobody has thought of --------------------------------------------------------------------------------


def failing(key: bytes, original: Callable[..., object]) -> Callable[..., object]:
    def put_or_fail(*arguments: object, **options: object) -> object:
        if key in arguments:
            raise ZeroDivisionError("a fault of ours")
        return original(*arguments, **options)

    return put_or_fail


def test_an_exception_while_staging_fails_its_request_only(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """writer [5], X2: INTERNAL without details; other requests of its commit are committed."""
    monkeypatch.setattr(Draft, "put", failing(b"bad", Draft.put))
    requests = [Publish("orders", [b"x"], [key], want_results=True) for key in ("a", "bad", "b")]
    answers = rig.run_together(requests)
    assert [reason(answer) for answer in answers] == [None, Reason.INTERNAL, None]
    assert "fault" not in str(answers[1])
    assert list(rig.live("orders")) == [b"a", b"b"]
    assert rig.store.writer.queue.depth == (0, 0)
    assert rig.store.writer.queue.failure is None
    assert [entry.sequence for entry in rig.journal("orders")] == [1, 2]


def test_an_exception_while_preparing_fails_its_request_only(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """writer [5]."""
    check = mutations.check_size

    def fail_on_three(request: Publish, *arguments: object) -> None:
        if len(request.payloads) == 3:
            raise ZeroDivisionError
        check(request, *arguments)  # type: ignore[arg-type]  # as they came

    monkeypatch.setattr(mutations, "check_size", fail_on_three)
    answers = rig.run_together([put("a"), Publish("orders", [b"x"] * 3, list("bcd")), put("e")])
    assert [reason(answer) for answer in answers] == [None, Reason.INTERNAL, None]


def test_an_exception_in_a_control_fails_the_control_only(rig: Rig) -> None:
    """writer [5]."""

    def explode(settings: object) -> object:
        raise ZeroDivisionError

    answers: list[object] = []
    rig.store.administration.alter_topic("orders", explode).then(answers.append)  # type: ignore[arg-type]  # never returns
    rig.store.writer.step()
    (answer,) = answers
    assert isinstance(answer, StoreError)
    assert answer.reason is Reason.INTERNAL
    assert rig.put("orders", "a").applied == 1


@pytest.mark.parametrize("where", ["finish", "update"])
def test_an_exception_while_committing_fails_the_store_and_answers_everybody(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """writer [5]. Such an exception ended the thread, and with it the requests that were in its hands: they had left
    the queue, so nobody ever answered them."""

    def explode(*arguments: object) -> None:
        raise ZeroDivisionError

    if where == "finish":
        monkeypatch.setattr(Draft, "finish", explode)
    else:
        monkeypatch.setattr(rig.store.writer.heads.__class__, "update", explode)
    rig.store.start(lambda answers: answers())
    answers: list[Outcome | StoreError] = []
    done = threading.Event()

    def hear(answer: Outcome | StoreError) -> None:
        answers.append(answer)
        done.set()

    rig.store.commits.submit(put("a")).then(hear)
    assert done.wait(10), "the request was never answered"
    assert [reason(answer) for answer in answers] == [Reason.STORE_FAILED]
    with pytest.raises(StoreError):
        rig.store.commits.submit(put("b")).then(answers.append)


def test_an_exception_of_the_thread_itself_fails_the_store_and_answers_queued_requests(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """writer [5]: never silently."""

    def explode(sweep: object, draft: object, entries_max: int) -> int:
        raise ZeroDivisionError

    rig.put("orders", "a", ttl=SECOND)
    rig.store.start(lambda answers: answers())
    monkeypatch.setattr(Sweep, "stage", explode)
    rig.time.tick(SECOND)
    done = threading.Event()
    with contextlib.suppress(StoreError):  # it may have failed already
        rig.store.commits.submit(put("b")).then(lambda _: done.set())
        assert done.wait(10)
    thread = rig.store.writer._thread
    assert thread is not None
    thread.join(10)
    assert rig.store.writer.queue.failure is not None
    assert rig.store.writer.queue.failure.reason is Reason.STORE_FAILED


def test_a_callback_that_raises_does_not_prevent_other_answers(rig: Rig) -> None:
    """writer [5]. One client that had gone away made its answer raise, and all answers of that turn behind it were
    lost."""

    def explode(answer: object) -> None:
        raise ZeroDivisionError

    answers: list[object] = []
    rig.store.commits.submit(put("a")).then(explode)
    rig.store.commits.submit(put("b")).then(answers.append)
    rig.store.writer.step()
    assert len(answers) == 1


# --- admission and the end -------------------------------------------------------------------------------------------


def test_the_queue_is_bounded_in_requests(tmp_path: Path) -> None:
    """A refusal that may pass, at once, with a hint."""
    rig = Rig(tmp_path, options=StoreOptions(writer=WriterOptions(queue_requests_max=2)))
    rig.create_topic("orders")
    answers = rig.run_together([put("a"), put("b"), put("c")])
    assert [reason(answer) for answer in answers] == [None, None, Reason.OVERLOADED]
    assert rig.put("orders", "c").applied == 1
    assert rig.store.writer.queue.depth == (0, 0)
    rig.close()


def test_the_queue_is_bounded_in_bytes_and_takes_one_request_of_any_size(tmp_path: Path) -> None:
    rig = Rig(tmp_path, options=StoreOptions(writer=WriterOptions(queue_bytes_max=10)))
    rig.create_topic("orders")
    answers = rig.run_together([put("a", b"x" * 100), put("b")])
    assert [reason(answer) for answer in answers] == [None, Reason.OVERLOADED]
    rig.close()


def test_stopping_finishes_queued_requests_and_refuses_new_ones(rig: Rig) -> None:
    """Accepted requests are committed, synced and answered."""
    answers: list[Outcome | StoreError] = []
    for key in "abc":
        rig.store.commits.submit(put(key, durability=Durability.BUFFERED)).then(answers.append)
    rig.store.writer.stop()
    assert [reason(answer) for answer in answers] == [None] * 3
    with pytest.raises(StoreError) as caught:
        rig.store.commits.submit(put("d")).then(answers.append)
    assert caught.value.reason is Reason.STOPPING
    rig.reopen()
    assert rig.count("orders") == 3


@pytest.mark.slow
def test_a_running_writer_sweeps_by_itself_and_stops_in_order(rig: Rig) -> None:
    """L9: through the thread."""
    rig.store.start(lambda answers: answers())
    done = threading.Event()
    requests = 50
    left = [requests]

    def count_down(answer: object) -> None:
        left[0] -= 1
        if not left[0]:
            done.set()

    for number in range(requests):
        ttl = Lifetime(LifetimeKind.TTL, SECOND)
        rig.store.commits.submit(Publish("orders", [b"x"], [str(number)], lifetime=ttl)).then(count_down)
    assert done.wait(10)
    rig.time.tick(SECOND)
    swept = threading.Event()
    for _ in range(100):
        rig.store.commits.submit(put("wake")).then(lambda _: swept.set())
        if not rig.store.cuts.counts()[rig.topic("orders").id].overdue:
            break
        rig.time.tick(1000)  # it breathes between commits
        threading.Event().wait(0.01)
    rig.reopen()
    assert list(rig.stored("orders")) == [b"wake"]


def test_a_delete_and_a_touch_of_a_damaged_record_refuse_themselves_only(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """writer [5], X3: damage under one key is found by its reader; other requests continue."""
    rig.put("orders", "a")
    rig.put("orders", "b")
    rig.reopen()
    multi_get = rig.store._rocks.multi_get

    def damaged(family: str, keys: list[bytes]) -> list[bytes | None]:
        if any(key.endswith(b"a") for key in keys):
            raise Damaged("Corruption: block checksum mismatch")
        return multi_get(family, keys)

    monkeypatch.setattr(rig.store._rocks, "multi_get", damaged)
    answers = rig.run_together([Delete("orders", ["a"]), Delete("orders", ["b"]), put("c")])
    assert [reason(answer) for answer in answers] == [Reason.DATA_DAMAGED, None, None]
