"""Publishers retry, and nothing is applied twice (P6)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import msgspec
import pytest

from sow_server.engine import upkeep
from sow_server.engine.commit import publishers
from sow_server.engine.commit.options import WriterOptions
from sow_server.engine.commit.publishers import RUNS_KEPT
from sow_server.engine.disk.layout import PUBLISHER_KEY
from sow_server.engine.disk.rocks import META
from sow_server.engine.store import StoreOptions
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import (
    Applied,
    Condition,
    ConditionKind,
    Expiration,
    Lifetime,
    LifetimeKind,
    OpenedPublisher,
    Outcome,
    Publish,
    PublishChannel,
    PublisherPosition,
    Refusal,
    TopicSettings,
)
from tests.support.stores.stores import DAY, SECOND, FaultyRocks, Rig

IF_ABSENT = Condition(ConditionKind.IF_ABSENT)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    rig.create_topic("orders")
    yield rig
    rig.close()


def batch(first: int, *keys: str, epoch: int = 1, name: str = "p", absent: bool = False) -> Publish:
    return Publish(
        "orders",
        [b"%d" % (first + index) for index in range(len(keys))],
        list(keys),
        conditions=[IF_ABSENT] * len(keys) if absent else None,
        publisher=PublisherPosition(name, epoch, first),
    )


def reasons(outcome: Outcome) -> list[tuple[int, Reason]]:
    return [(refusal.index, refusal.reason) for refusal in outcome.refusals]


@pytest.mark.parametrize("want_results", [False, True])
@pytest.mark.parametrize("restart", [None, "crash", "reopen"])
def test_a_retry_is_not_applied_again_not_after_a_restart_either(
    rig: Rig, want_results: bool, restart: str | None
) -> None:
    """P6: a sequence at or below the highest seen is a duplicate; the journal has each record once."""
    request = replace(batch(1, "a", "b", "a"), want_results=want_results)
    assert rig.run(request).applied == 3
    rig.put("orders", "a", b"newer")
    if restart is not None:
        getattr(rig, restart)()
    again = rig.run(request)
    assert (again.applied, again.duplicates) == (0, 3)
    if want_results:
        assert again.results is not None
        assert all(isinstance(result, Applied) and result.duplicate for result in again.results)
    found = rig.get("orders", "a")
    assert found is not None
    assert found.payload == b"newer"
    assert len(rig.journal("orders")) == 4


@pytest.mark.parametrize("restart", [None, "crash", "reopen"])
@pytest.mark.parametrize("several", [1, 7, 20])
def test_a_duplicate_gets_the_version_sequence_and_stamp_of_its_first_attempt(
    rig: Rig, several: int, restart: str | None
) -> None:
    """It was told version 0 and no expire time, so that whoever had missed the first answer had to guess."""
    keys = [f"k{number}" for number in range(several)]
    request = replace(batch(1, *keys), want_results=True, lifetime=Lifetime(LifetimeKind.TTL, 60 * SECOND))
    first = rig.run(request)
    rig.put("orders", "k0", b"newer")
    if restart is not None:
        getattr(rig, restart)()
    again = rig.run(request)
    assert again.results == [result._replace(duplicate=True) for result in applied(first)]
    assert (again.last_version, again.last_duplicate_version) == (0, first.last_version)
    assert again.last_duplicate_sequence == first.last_sequence
    stream = rig.run(replace(request, want_results=False))
    assert stream.last_duplicate_version == first.last_version


@pytest.mark.slow
def test_a_duplicate_gets_its_first_answer_or_is_marked_as_forgotten(rig: Rig, seed: int) -> None:
    """publishers [4], for requests of every kind: with conditions, refusals, deltas, lifetimes alike and not, overdue
    records."""
    random = Random(seed)
    rig.create_topic("timed", expiration=Expiration.ENABLED)
    told: dict[int, Applied | Refusal] = {}
    requests: list[Publish] = []
    sequence = 1
    for _ in range(120):
        count = random.choice([1, 1, 2, 9, 30])
        keys = [random.choice("abcdef") + (str(index) if random.random() < 0.7 else "") for index in range(count)]
        lifetimes = [Lifetime(LifetimeKind.TTL, random.choice([1, 5, 9]) * SECOND) for _ in keys]
        request = replace(
            batch(sequence, *keys, absent=random.random() < 0.2),
            topic="timed",
            want_results=True,
            lifetime=Lifetime(LifetimeKind.TTL, 3 * SECOND) if random.random() < 0.5 else Lifetime(LifetimeKind.ABSENT),
            lifetimes=lifetimes if random.random() < 0.4 else None,
        )
        outcome = rig.run(replace(request, want_results=random.random() < 0.5))
        if outcome.results is None:  # the versions and stamps of a stream's records, as they are stored
            outcome.results = seen(rig, request, outcome)
        for index, result in enumerate(outcome.results):
            told[sequence + index] = result
        requests.append(request)
        sequence += count
        rig.time.tick(random.choice([0, 0, SECOND]))
        if random.random() < 0.05:
            rig.crash()
        # The newest is always known, whatever it was.
        assert all(result.version for result in applied(rig.run(request)))
    known = 0
    for request in requests:
        assert request.publisher is not None
        for index, result in enumerate(rig.run(request).results or ()):
            before = told[request.publisher.first_sequence + index]
            if isinstance(result, Refusal) or isinstance(before, Refusal):
                continue
            assert result.duplicate
            assert result.version in (0, before.version)
            assert result.sequence in (0, before.sequence)
            assert (result.version == 0) == (result.sequence == 0)
            assert not result.expire_time_known or result.expire_time_micros == before.expire_time_micros
            known += result.version != 0
    assert known >= RUNS_KEPT


def applied(outcome: Outcome) -> list[Applied]:
    return [result for result in outcome.results or () if isinstance(result, Applied)]


def seen(rig: Rig, request: Publish, outcome: Outcome) -> list[Applied | Refusal]:
    """The answer to a request without results, from the journal."""
    refused = {refusal.index: refusal for refusal in outcome.refusals}
    puts = [entry for entry in rig.journal("timed") if entry.kind == "put"]
    entries = iter(puts[len(puts) - outcome.applied :])
    results: list[Applied | Refusal] = []
    for index in range(len(request.payloads)):
        if index in refused:
            results.append(refused[index])
        else:
            entry = next(entries)
            results.append(Applied(entry.key.decode(), entry.version, entry.expire_time_micros, entry.sequence))
    return results


def test_a_retry_that_overlaps_is_applied_from_where_it_is_new(rig: Rig) -> None:
    """P6."""
    rig.run(batch(1, "a", "b"))
    outcome = rig.run(batch(2, "b", "c", "d"))
    assert (outcome.duplicates, outcome.applied) == (1, 2)
    assert rig.store.cuts.publisher_position("p") == (1, 4)


def test_duplicates_within_one_commit_are_found_too(rig: Rig) -> None:
    """P6: the retry may be queued behind the first try."""
    first, second = rig.run_together([batch(1, "a", "b"), batch(1, "a", "b")])
    assert not isinstance(first, StoreError)
    assert not isinstance(second, StoreError)
    assert (first.applied, second.duplicates) == (2, 2)
    assert second.last_duplicate_version == first.last_version


def test_requests_of_a_stream_in_one_commit_are_remembered_as_one_run(rig: Rig) -> None:
    """So that many small requests under way do not push each other out of the memory."""
    requests = [batch(1 + 2 * number, "a", "b") for number in range(3 * RUNS_KEPT)]
    first = [outcome for outcome in rig.run_together(requests) if isinstance(outcome, Outcome)]
    again = [rig.run(request).last_duplicate_version for request in requests]
    assert again == [outcome.last_version for outcome in first]


def test_a_new_epoch_remembers_nothing_of_the_one_before(rig: Rig) -> None:
    rig.run(batch(1, "a", "b"))
    rig.run(batch(1, "c", epoch=2))
    assert rig.run(batch(1, "c", epoch=2)).last_duplicate_version != 0
    assert publishers.decode(rig.store._rocks.get(META, PUBLISHER_KEY + b"p") or b"").known_runs()[0].count == 1
    assert len(publishers.decode(rig.store._rocks.get(META, PUBLISHER_KEY + b"p") or b"").known_runs()) == 1


def test_a_row_from_before_versions_were_remembered_is_read(rig: Rig) -> None:
    row = msgspec.msgpack.encode((1, 7, 5, [], 0, 0, 0, 0, 0))
    assert publishers.decode(row).known_runs() == []
    assert publishers.decode(row).highest_sequence == 7


def test_publishers_do_not_know_of_each_other(rig: Rig) -> None:
    rig.run(batch(1, "a", "b"))
    assert rig.run(batch(1, "c", name="q")).applied == 1
    assert rig.store.cuts.publisher_position("p") == (1, 2)
    assert rig.store.cuts.publisher_position("nobody") == (0, 0)


def test_a_request_that_is_split_over_commits_is_remembered_whole(tmp_path: Path) -> None:
    """P6: after each of its commits the sequence stands where the commit ended."""
    rig = Rig(tmp_path, options=StoreOptions(writer=WriterOptions(commit_records_max=2)))
    rig.create_topic("orders")
    request = batch(1, "a", "b", "c", "d", "e")
    answers: list[object] = []
    rig.store.commits.submit(request).then(answers.append)
    rig.turn()
    rig.crash()
    assert answers == []
    assert rig.store.cuts.publisher_position("p") == (1, 2)
    outcome = rig.run(request)
    assert (outcome.duplicates, outcome.applied) == (2, 3)
    rig.close()


def test_a_higher_epoch_fences_older_holders_and_restarts_the_sequences(rig: Rig) -> None:
    """P6."""
    rig.run(batch(1, "a", "b", "c"))
    assert rig.run(batch(1, "d", epoch=2)).applied == 1
    assert rig.store.cuts.publisher_position("p") == (2, 1)
    for _ in range(2):
        with pytest.raises(StoreError) as caught:
            rig.run(batch(4, "e"))
        assert caught.value.reason is Reason.PUBLISHER_FENCED
        rig.crash()
    assert rig.get("orders", "e") is None


def test_a_fenced_request_does_not_affect_others_in_its_commit(rig: Rig) -> None:
    """writer [5]: staging one by one finds the request at fault."""
    rig.run(batch(1, "a", epoch=2))
    answers = rig.run_together([batch(1, "x", name="q"), batch(2, "y"), batch(1, "z", name="r")])
    assert isinstance(answers[1], StoreError)
    assert list(rig.live("orders")) == [b"a", b"x", b"z"]


@pytest.mark.parametrize("restart", [None, "crash", "reopen"])
def test_a_duplicate_gets_its_original_refusal(rig: Rig, restart: str | None) -> None:
    """P6: although it would be applied now, and another one refused."""
    rig.put("orders", "a", b"0")
    request = batch(1, "a", "b", absent=True)
    first = rig.run(request)
    assert reasons(first) == [(0, Reason.CONDITION_FAILED)]
    rig.delete("orders", "a")
    if restart is not None:
        getattr(rig, restart)()
    again = rig.run(request)
    assert again.refusals == first.refusals
    assert again.duplicates == 1
    assert rig.get("orders", "a") is None


def test_an_aborted_atomic_request_stays_aborted(rig: Rig) -> None:
    """P6, P4."""
    rig.put("orders", "b")
    request = replace(batch(1, "a", "b", absent=True), atomic=True)
    first = rig.run(request)
    assert reasons(first) == [(0, Reason.ATOMIC_ABORTED), (1, Reason.CONDITION_FAILED)]
    rig.delete("orders", "b")
    rig.crash()
    again = rig.run(request)
    assert again.refusals == first.refusals
    assert rig.live("orders") == {}
    assert rig.run(batch(3, "a")).applied == 1


def test_an_atomic_request_that_overlaps_and_is_aborted_does_not_rewrite_history(rig: Rig) -> None:
    """P6. The abort was remembered for all its sequences, also those that had been applied before: a later retry of
    them was told that they had not."""
    first = batch(1, "a", "b")
    rig.run(first)
    rig.put("orders", "d")
    overlapping = replace(batch(2, "b", "c", "d", absent=True), atomic=True)
    rig.run(overlapping)
    again = rig.run(first)
    assert (again.duplicates, again.refusals) == (2, [])


def test_the_outcome_of_an_old_conditional_sequence_is_unknown(rig: Rig) -> None:
    """P6: refusals are kept among the last 1,000 sequences; an unconditional one was applied for sure."""
    rig.put("orders", "a")
    conditional, plain = batch(1, "a", "b", absent=True), batch(3, "c")
    rig.run(conditional)
    rig.run(plain)
    rig.run(batch(4, *(str(number) for number in range(998))))
    assert reasons(rig.run(conditional)) == [(0, Reason.OUTCOME_UNKNOWN)]
    rig.run(batch(1002, "z"))
    rig.crash()
    assert reasons(rig.run(conditional)) == [(0, Reason.OUTCOME_UNKNOWN), (1, Reason.OUTCOME_UNKNOWN)]
    assert rig.run(plain).duplicates == 1


def test_refusals_are_kept_for_the_last_thousand_sequences(rig: Rig) -> None:
    """P6."""
    rig.put("orders", "a")
    refused = batch(1, "a", absent=True)
    first = rig.run(refused)
    rig.run(batch(2, *(str(number) for number in range(999))))
    assert rig.run(refused).refusals == first.refusals
    rig.run(batch(1001, "z"))
    assert reasons(rig.run(refused)) == [(0, Reason.OUTCOME_UNKNOWN)]


def test_a_duplicate_without_a_key_gets_its_reason_again(rig: Rig) -> None:
    rig.create_topic("json", TopicSettings(key=("/id",)))
    request = Publish("json", [b"{}", b'{"id":1}'], publisher=PublisherPosition("p", 1, 1))
    for _ in range(2):
        assert reasons(rig.run(request)) == [(0, Reason.KEY_FIELD_MISSING)]


def test_after_a_refused_request_nothing_of_its_stream_is_applied(rig: Rig) -> None:
    """P6, P7: later requests must not overtake it; requests without the stream go on."""
    channel = PublishChannel()
    rig.run(batch(1, "x", epoch=2))
    stream = [replace(batch(first, key), channel=channel) for first, key in ((1, "a"), (2, "b"))]
    answers = rig.run_together([*stream, batch(1, "c", name="q")])
    assert [answer.reason for answer in answers if isinstance(answer, StoreError)] == [
        Reason.PUBLISHER_FENCED,
        Reason.STREAM_BROKEN,
    ]
    with pytest.raises(StoreError) as caught:
        rig.run(replace(batch(2, "d", epoch=2), channel=channel))
    assert caught.value.reason is Reason.STREAM_BROKEN
    assert list(rig.live("orders")) == [b"c", b"x"]


def test_a_refused_record_does_not_end_its_stream(rig: Rig) -> None:
    """P4: only a request that is refused whole does."""
    channel = PublishChannel()
    rig.put("orders", "a")
    rig.run(replace(batch(1, "a", absent=True), channel=channel))
    assert rig.run(replace(batch(2, "b"), channel=channel)).applied == 1


def test_publishers_idle_for_a_week_are_forgotten(rig: Rig) -> None:
    """P6."""
    rig.run(batch(1, "a"))
    rig.time.tick(4 * DAY)
    rig.run(batch(1, "b", name="q"))
    rig.time.tick(3 * DAY)
    rig.store.upkeep.forget_publishers()
    rig.store.writer.step()
    assert rig.store.cuts.publisher_position("p") == (0, 0)
    assert rig.store.cuts.publisher_position("q") == (1, 1)
    assert rig.run(batch(1, "a")).applied == 1


def test_all_idle_publishers_are_forgotten_in_bounded_steps(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """P6, L14. A call looked at all rows at once, and forgot a thousand at most: where more fall idle an hour, they
    became more and more."""
    monkeypatch.setattr(upkeep, "PUBLISHERS_CHUNK", 3)
    for number in range(10):
        rig.run(batch(1, "a", name=f"idle-{number}"))
    rig.time.tick(7 * DAY)
    rig.run(batch(1, "a", name="idle-5-not"))
    rocks = FaultyRocks(rig)
    rig.store.upkeep.forget_publishers()
    rig.store.writer.step()
    assert [len(attempt.deletes[META]) for attempt in rocks.attempts] == [3, 3, 2, 2]
    assert [key for key, _ in rig.rows(META, PUBLISHER_KEY, PUBLISHER_KEY + b"\xff")] == [PUBLISHER_KEY + b"idle-5-not"]


def test_a_lifetime_that_is_refused_is_a_kept_outcome_too(rig: Rig) -> None:
    request = replace(batch(1, "a"), lifetime=Lifetime(LifetimeKind.TTL, -SECOND))
    first = rig.run(request)
    assert first.refusals == [Refusal(0, Reason.LIFETIME_NEGATIVE, first.refusals[0].message)]
    rig.crash()
    assert rig.run(request).refusals == first.refusals


# --- epochs that are begun, and units of work ------------------------------------------------------------------------


def opened(rig: Rig, unit: int = 0, name: str = "p") -> OpenedPublisher:
    answers: list[OpenedPublisher | StoreError] = []
    rig.store.commits.open_publisher(name, unit).then(answers.append)
    rig.store.writer.step()
    (answer,) = answers
    assert isinstance(answer, OpenedPublisher)
    return answer


def part(first: int, *keys: str, unit: int = 1, epoch: int = 1, done: bool = False, absent: bool = False) -> Publish:
    """Records of a unit of work; `done`: the last ones of it."""
    return replace(batch(first, *keys, absent=absent), publisher=PublisherPosition("p", epoch, first, unit, done))


def refused(rig: Rig, request: Publish) -> Reason:
    with pytest.raises(StoreError) as caught:
        rig.run(request)
    return caught.value.reason


def test_every_new_epoch_is_different_and_fences_the_earlier_ones(rig: Rig) -> None:
    """P6: also of two who begin one at the same time, and after a crash."""
    answers: list[OpenedPublisher | StoreError] = []
    for _ in range(2):
        rig.store.commits.open_publisher("p", 0).then(answers.append)
    rig.store.writer.step()
    assert answers == [OpenedPublisher(1), OpenedPublisher(2)]
    rig.crash()
    assert rig.store.cuts.publisher_position("p") == (2, 0)
    assert refused(rig, batch(1, "a", epoch=1)) is Reason.PUBLISHER_FENCED
    assert rig.run(batch(1, "a", epoch=2)).applied == 1
    assert opened(rig) == OpenedPublisher(3)


@pytest.mark.parametrize("restart", [None, "crash", "reopen"])
def test_a_unit_is_finished_with_its_last_records(rig: Rig, restart: str | None) -> None:
    """P6, publishers [1]: later attempts are told, and change nothing."""
    rig.run(part(1, "a", "b"))
    assert opened(rig, unit=1) == OpenedPublisher(2)
    rig.run(part(1, "b", "a", epoch=2))
    last = part(3, "c", epoch=2, done=True)
    assert rig.run(last).applied == 1
    if restart is not None:
        getattr(rig, restart)()
    assert opened(rig, unit=1) == OpenedPublisher(2, True, 3)
    assert rig.run(last).duplicates == 1
    assert refused(rig, part(4, "z", epoch=2)) is Reason.UNIT_DONE
    assert refused(rig, part(1, "z", epoch=3)) is Reason.UNIT_DONE
    assert rig.get("orders", "z") is None
    assert len(rig.journal("orders")) == 5
    assert opened(rig, unit=2) == OpenedPublisher(3)
    assert refused(rig, part(1, "z", epoch=3)) is Reason.UNIT_DONE
    assert rig.run(part(1, "z", epoch=3, unit=2)).applied == 1


def test_a_unit_may_end_with_a_request_without_records(rig: Rig) -> None:
    """P6: which is nothing to the journal."""
    rig.run(part(1, "a", "b"))
    end = part(3, done=True)
    for _ in range(2):
        outcome = rig.run(end)
        assert (outcome.applied, outcome.duplicates, outcome.refusals) == (0, 0, [])
    assert opened(rig, unit=1) == OpenedPublisher(1, True, 2)
    assert len(rig.journal("orders")) == 2
    assert refused(rig, part(3)) is Reason.INVALID_ARGUMENT
    rig.create_topic("json", TopicSettings(key=("/id",)))
    empty = replace(part(3, unit=2, done=True), topic="json", keys=None, want_results=True, delta=True)
    assert rig.run(empty).results == []
    assert opened(rig, unit=2) == OpenedPublisher(1, True, 0)


def test_a_request_without_records_shares_a_commit_with_deltas(rig: Rig) -> None:
    """A delta that fits into no room is put off; one of no records needs none."""
    rig.create_topic("json", TopicSettings(key=("/id",)))
    end = Publish("json", [], publisher=PublisherPosition("p", 1, 1, 1, True), delta=True)
    some = Publish("json", [b'{"id":1}'], delta=True)
    answers = rig.run_together([end, some, replace(end, publisher=PublisherPosition("q", 1, 1, 1, True))])
    assert [answer.applied for answer in answers if isinstance(answer, Outcome)] == [0, 1, 0]


def test_a_unit_is_not_finished_when_a_record_of_its_last_request_is_refused(rig: Rig) -> None:
    """publishers [2]: and a retry of it does not finish it either."""
    rig.put("orders", "b")
    last = part(1, "a", "b", done=True, absent=True)
    for _ in range(2):
        assert reasons(rig.run(last)) == [(1, Reason.CONDITION_FAILED)]
        rig.crash()
    assert opened(rig, unit=1) == OpenedPublisher(2)
    rig.run(part(1, "c", epoch=2, done=True))
    assert opened(rig, unit=1).unit_done


def test_an_atomic_request_that_is_aborted_finishes_nothing(rig: Rig) -> None:
    rig.put("orders", "b")
    last = replace(part(1, "a", "b", done=True, absent=True), atomic=True)
    for _ in range(2):
        assert len(rig.run(last).refusals) == 2
    assert opened(rig, unit=1) == OpenedPublisher(2)


def test_a_refusal_that_is_forgotten_still_keeps_its_unit_from_being_finished(rig: Rig) -> None:
    """publishers [2]: a refusal of a lifetime is remembered among the last 1,000 sequences; behind those its record
    counts as applied, which must not finish a unit."""
    lifetimes = [Lifetime(LifetimeKind.TTL, -1), *[Lifetime(LifetimeKind.TTL, SECOND)] * 1_500]
    last = replace(part(1, *map(str, range(1_501)), done=True), lifetimes=lifetimes)
    assert reasons(rig.run(last)) == [(0, Reason.LIFETIME_NEGATIVE)]
    rig.crash()
    assert refused(rig, last) is Reason.OUTCOME_UNKNOWN
    assert opened(rig, unit=1) == OpenedPublisher(2)


def test_a_last_request_over_several_commits_finishes_its_unit_in_the_last_of_them(tmp_path: Path) -> None:
    """publishers [1]: a crash in between leaves it open, and the retry finishes it."""
    rig = Rig(tmp_path, options=StoreOptions(writer=WriterOptions(commit_records_max=2)))
    rig.create_topic("orders")
    last = part(1, "a", "b", "c", "d", "e", done=True)
    answers: list[object] = []
    rig.store.commits.submit(last).then(answers.append)
    rig.turn()
    rig.crash()
    assert answers == []
    outcome = rig.run(last)
    assert (outcome.duplicates, outcome.applied) == (2, 3)
    rig.crash()
    assert opened(rig, unit=1) == OpenedPublisher(1, True, 5)
    rig.close()


def test_a_unit_that_is_stalled_is_finished_by_the_retry_alone(rig: Rig) -> None:
    """P6: a temporary refusal leaves it open; later requests of the stream cannot finish it."""
    channel = PublishChannel()
    rig.run(batch(1, "x", epoch=1))
    answers = rig.run_together(
        [replace(part(2, "a"), channel=channel, unset_paths=["/a"]), replace(part(3, done=True), channel=channel)]
    )
    assert [answer.reason for answer in answers if isinstance(answer, StoreError)] == [
        Reason.INVALID_ARGUMENT,
        Reason.STREAM_BROKEN,
    ]
    assert opened(rig, unit=1) == OpenedPublisher(2)


def test_units_are_forgotten_with_their_publisher(rig: Rig) -> None:
    """P6."""
    rig.run(part(1, "a", done=True))
    rig.time.tick(6 * DAY)
    assert opened(rig, unit=1).unit_done  # whoever asks uses it
    rig.time.tick(6 * DAY)
    rig.store.upkeep.forget_publishers()
    rig.store.writer.step()
    assert opened(rig, unit=1).unit_done
    rig.time.tick(7 * DAY)
    rig.store.upkeep.forget_publishers()
    rig.store.writer.step()
    assert opened(rig, unit=1) == OpenedPublisher(1)
