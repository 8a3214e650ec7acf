"""Publishers that go on at another instance (rules F11 and F12)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit.publishers import (
    AHEAD_MAX,
    OUTCOMES_KEPT,
    TOPICS_MAX,
    UNKNOWN_TOPIC,
    Publisher,
    decode,
    encode,
    with_range,
)
from sow_server.engine.replicas import serving
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import (
    Condition,
    ConditionKind,
    Durability,
    OpenedPublisher,
    Outcome,
    Publish,
    PublisherPosition,
    RecordMatcher,
)
from tests.support.replicas import instance, live, pair, ship, tell_publishers
from tests.support.stores import BINARY, DAY, FakeTime, Rig

__all__ = ["pair"]  # a fixture

NOW = 1_700_000_000_000_000
TOKEN = 7
IF_ABSENT = Condition(ConditionKind.IF_ABSENT)


def batch(
    first: int,
    *keys: str,
    topic: str = "t",
    epoch: int = 1,
    token: int = TOKEN,
    absent: bool = False,
    atomic: bool = False,
) -> Publish:
    return Publish(
        topic,
        [b"%d" % (first + index) for index in range(len(keys))],
        list(keys),
        conditions=[IF_ABSENT] * len(keys) if absent else None,
        publisher=PublisherPosition("p", epoch, first, token=token),
        atomic=atomic,
    )


def outcome(result: Outcome) -> tuple[int, int, list[Reason]]:
    return result.applied, result.duplicates, [refusal.reason for refusal in result.refusals]


def opened(rig: Rig, token: int) -> OpenedPublisher:
    answers: list[OpenedPublisher | StoreError] = []
    rig.store.commits.open_publisher("p", 0, answers.append, token=token)
    rig.store.writer.step()
    (answer,) = answers
    assert isinstance(answer, OpenedPublisher)
    return answer


def fenced(rig: Rig, request: Publish) -> bool:
    try:
        rig.run(request)
    except StoreError as error:
        if error.reason is not Reason.PUBLISHER_FENCED:
            raise
        return True
    return False


# -- a retry at another instance ------------------------------------------------------------------------------------


def test_a_retry_at_another_instance_is_a_duplicate_and_keeps_what_others_wrote_since(pair: tuple[Rig, Rig]) -> None:
    a, b = pair
    ship(a, b)
    a.run(batch(1, "1", "2"))
    ship(a, b)
    b.put("t", "1", b"since")
    assert outcome(b.run(batch(1, "1", "2"))) == (0, 2, [])
    assert live(b)["1"].payload == b"since"
    assert outcome(b.run(batch(3, "3"))) == (1, 0, [])


def test_the_memory_is_on_disk_with_the_records(pair: tuple[Rig, Rig]) -> None:
    a, b = pair
    ship(a, b)
    a.run(batch(1, "1", "2"))
    ship(a, b)
    b.crash()
    assert outcome(b.run(batch(1, "1", "2", "3"))) == (1, 2, [])


def test_records_that_were_not_sent_are_applied_at_the_other_instance(pair: tuple[Rig, Rig]) -> None:
    """F13: and the first instance's own change loses once it is back, because it is the older one."""
    a, b = pair
    ship(a, b)
    ship(b, a)
    a.run(batch(1, "1"))
    ship(a, b)
    a.run(batch(2, "2"))
    assert outcome(b.run(batch(1, "1", "2"))) == (1, 1, [])
    ship(a, b)
    ship(b, a)
    assert live(a) == live(b)
    assert live(b)["2"].origin == "b"


def test_with_a_condition_the_outcome_is_unknown(pair: tuple[Rig, Rig]) -> None:
    a, b = pair
    ship(a, b)
    assert outcome(a.run(batch(1, "1", "1", absent=True))) == (1, 0, [Reason.CONDITION_FAILED])
    ship(a, b)
    unknown = Reason.OUTCOME_UNKNOWN
    assert outcome(b.run(batch(1, "1", "1", absent=True))) == (0, 0, [unknown, unknown])
    # Where it was decided, the outcome is known as ever.
    assert outcome(a.run(batch(1, "1", "1", absent=True))) == (0, 1, [Reason.CONDITION_FAILED])


def test_a_record_that_was_refused_there_does_not_count_as_applied_here(pair: tuple[Rig, Rig]) -> None:
    a, b = pair
    ship(a, b)
    a.run(batch(1, "1", "1", absent=True))
    ship(a, b)
    assert outcome(b.run(batch(1, "1", "1"))) == (0, 1, [Reason.OUTCOME_UNKNOWN])


def test_requests_that_were_refused_whole_leave_no_gap(pair: tuple[Rig, Rig]) -> None:
    """Their commits change no record, and tell peers of the publisher all the same."""
    a, b = pair
    ship(a, b)
    a.put("t", "1")
    a.run(batch(1, "1", absent=True))
    assert outcome(a.run(batch(2, "2", "1", absent=True, atomic=True)))[:2] == (0, 0)
    a.run(batch(4, "4"))
    ship(a, b)
    assert outcome(b.run(batch(4, "4"))) == (0, 1, [])
    assert outcome(b.run(batch(2, "2", "1", atomic=True))) == (0, 0, [Reason.OUTCOME_UNKNOWN] * 2)


def test_an_atomic_request_is_a_duplicate_elsewhere(pair: tuple[Rig, Rig]) -> None:
    a, b = pair
    ship(a, b)
    a.run(batch(1, "1", "2", atomic=True))
    ship(a, b)
    assert outcome(b.run(batch(1, "1", "2", atomic=True))) == (0, 2, [])


def test_a_publisher_comes_back_to_the_first_instance(pair: tuple[Rig, Rig]) -> None:
    a, b = pair
    ship(a, b)
    ship(b, a)
    a.run(batch(1, "1", "2"))
    ship(a, b)
    b.run(batch(2, "2", "3"))
    ship(b, a)
    assert outcome(a.run(batch(3, "3", "4"))) == (1, 1, [])
    ship(a, b)
    assert outcome(b.run(batch(4, "4", "5"))) == (1, 1, [])


def test_a_third_instance_knows_what_the_second_one_has_passed_on(tmp_path: Path) -> None:
    """A line: a to b to c."""
    time = FakeTime()
    a, b, c = [
        instance(tmp_path, name, peers=peers, time=time) for name, peers in (("a", ["b"]), ("b", ["c"]), ("c", ["b"]))
    ]
    for rig in (a, b, c):
        rig.create_topic("t")
    ship(a, b)
    ship(b, c)
    a.run(batch(1, "1", "2"))
    ship(a, b)
    b.run(batch(3, "3"))
    ship(b, c)
    assert outcome(c.run(batch(1, "1", "2", "3", "4"))) == (1, 3, [])


def test_what_comes_behind_a_gap_counts_once_the_gap_is_closed(tmp_path: Path) -> None:
    time = FakeTime()
    a, b, c = [instance(tmp_path, name, peers=["a", "b", "c"], time=time) for name in "abc"]
    for rig in (a, b, c):
        rig.create_topic("t")
    ship(a, b)
    ship(a, c)
    ship(b, c)
    a.run(batch(1, "1"))
    b.run(batch(2, "2"))
    ship(b, c)
    ship(a, c)
    assert outcome(c.run(batch(1, "1", "2"))) == (0, 2, [])


# -- what does not count --------------------------------------------------------------------------------------------


def test_a_message_of_which_a_topic_was_not_taken_counts_for_none(pair: tuple[Rig, Rig]) -> None:
    """F11. Story of the mistake: the record for the missing topic would be lost, because its retry is a duplicate."""
    a, b = pair
    a.create_topic("u")
    ship(a, b)
    a.run(batch(1, "1"))
    a.run(batch(2, "2", topic="u"))
    ship(a, b)  # b has no topic u
    assert outcome(b.run(batch(1, "1"))) == (1, 0, [])
    b.create_topic("u")
    assert outcome(b.run(batch(2, "2", topic="u"))) == (1, 0, [])


def test_records_of_a_topic_that_is_not_of_the_link_end_the_count(pair: tuple[Rig, Rig]) -> None:
    a, b = pair
    for rig in pair:
        rig.create_topic("u")
    ship(a, b)
    a.run(batch(1, "1"))
    a.run(batch(2, "2", topic="u"))
    a.run(batch(3, "3"))
    ship(a, b, topics="t")
    assert outcome(b.run(batch(1, "1"))) == (0, 1, [])
    assert outcome(b.run(batch(2, "2", topic="u"))) == (1, 0, [])


def test_a_link_with_a_filter_tells_of_no_publishers(pair: tuple[Rig, Rig]) -> None:
    def only_even(topic: Topic) -> RecordMatcher:
        return lambda key, value: int(key) % 2 == 0

    a, b = pair
    ship(a, b)
    a.run(batch(1, "1", "2"))
    ship(a, b, select=only_even)
    assert outcome(b.run(batch(1, "1", "2"))) == (2, 0, [])


def test_a_topic_without_a_journal_ends_the_count(tmp_path: Path) -> None:
    time = FakeTime()
    a, b = [instance(tmp_path, name, peers=["a", "b"], time=time) for name in "ab"]
    for rig in (a, b):
        rig.create_topic("t")
        rig.create_topic("u", BINARY._replace(journal=False))
    ship(a, b)
    a.run(batch(1, "1"))
    a.run(batch(2, "2", topic="u"))
    a.run(batch(3, "3"))
    ship(a, b)
    assert outcome(b.run(batch(2, "2", topic="u"))) == (1, 0, [])


def test_without_a_token_nothing_is_known_elsewhere(pair: tuple[Rig, Rig]) -> None:
    """An older client: an equal epoch at two instances says nothing."""
    a, b = pair
    ship(a, b)
    a.run(batch(1, "1", token=0))
    ship(a, b)
    assert outcome(b.run(batch(1, "x", token=0))) == (1, 0, [])


def test_a_topic_that_no_peer_has_costs_no_notes(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.create_topic("t")
    rig.run(batch(1, "1"))
    cut = rig.store.cuts.journal()
    assert [commit.notes for commit in cut.commits(0, rig.store.writer.last_sequence)] == [()]
    cut.close()
    rig.close()


# -- tokens ---------------------------------------------------------------------------------------------------------


def test_equal_epochs_of_two_instances_are_never_compared(pair: tuple[Rig, Rig]) -> None:
    """F12. Both instances give epoch 1 while they are apart. Story of the mistake: the records of the one would be
    duplicates of the other's, and lost."""
    a, b = pair
    ship(a, b)
    ship(b, a)
    assert (opened(a, 5), opened(b, 9)) == (OpenedPublisher(1, token=5), OpenedPublisher(1, token=9))
    a.run(batch(1, "a1", "a2", token=5))
    b.run(batch(1, "b1", token=9))
    ship(a, b)
    assert outcome(b.run(batch(1, "b1", "b2", token=9))) == (1, 1, [])
    ship(b, a)
    assert fenced(a, batch(3, "a3", token=5))
    assert not fenced(a, batch(3, "b3", token=9))
    assert set(live(a)) == {"a1", "a2", "b1", "b2", "b3"}


def test_a_higher_epoch_from_elsewhere_fences(pair: tuple[Rig, Rig]) -> None:
    a, b = pair
    ship(a, b)
    opened(b, 9)
    b.run(batch(1, "b1", token=9))
    for token in (3, 4):
        opened(a, token)
    a.run(batch(1, "a1", epoch=2, token=4))
    ship(a, b)
    assert fenced(b, batch(2, "b2", token=9))
    assert opened(b, 1) == OpenedPublisher(3, token=1)


def test_a_client_without_tokens_goes_on_in_the_epoch_that_this_instance_gave(pair: tuple[Rig, Rig]) -> None:
    a, b = pair
    ship(b, a)
    opened(a, 5)
    assert outcome(a.run(batch(1, "1", token=0))) == (1, 0, [])
    assert outcome(a.run(batch(1, "1", "2", token=0))) == (1, 1, [])
    opened(b, 9)
    b.run(batch(1, "b1", token=9))
    ship(b, a)
    assert fenced(a, batch(3, "3", token=0))


# -- after seeding --------------------------------------------------------------------------------------------------


def test_publishers_of_before_the_link_are_known_after_the_seed(pair: tuple[Rig, Rig]) -> None:
    a, b = pair
    a.run(batch(1, "1", "2"))
    a.put("t", "3")
    a.run(batch(3, "3", absent=True))
    ship(a, b)
    assert outcome(b.run(batch(1, "1"))) == (1, 0, []), "not yet told"
    tell_publishers(a, b)
    a.run(batch(4, "4"))
    ship(a, b)
    assert outcome(b.run(batch(2, "2", "3", "4", "5"))) == (1, 2, [Reason.OUTCOME_UNKNOWN])


def test_publishers_are_told_only_to_whom_gets_all_their_topics(pair: tuple[Rig, Rig]) -> None:
    a, _ = pair
    a.create_topic("u")
    a.run(batch(1, "1"))
    a.run(batch(2, "2", topic="u"))
    assert len(a.store.replicas.reader.publishers(["t", "u"], "").marks) == 1
    assert not a.store.replicas.reader.publishers(["t"], "").marks


def test_publishers_do_not_count_before_the_seed_is_complete(
    pair: tuple[Rig, Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    a.run(batch(1, "1"))
    ship(a, b)
    monkeypatch.setattr(b.store.replicas.sources, "is_whole", lambda source, topic: False)
    tell_publishers(a, b)
    assert outcome(b.run(batch(1, "1"))) == (1, 0, [])


def test_publishers_are_read_in_parts(pair: tuple[Rig, Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    a, _ = pair
    monkeypatch.setattr(serving, "PUBLISHERS_MAX", 2)
    for name in "vwxyz":
        a.run(replace(batch(1, name), publisher=PublisherPosition(name, 1, 1, token=TOKEN)))
    found: list[str] = []
    after = ""
    while True:
        part = a.store.replicas.reader.publishers(["t"], after)
        found += [mark.publisher_id for mark in part.marks]
        after = part.last_id
        if not after:
            break
    assert found == list("vwxyz")


def test_a_publisher_that_was_forgotten_is_not_kept_alive_by_peers(pair: tuple[Rig, Rig]) -> None:
    """P6: its last use is that of its records, and not that of the telling."""
    a, b = pair
    a.run(batch(1, "1"))
    ship(a, b)
    a.time.tick(6 * DAY)
    tell_publishers(a, b)
    a.time.tick(2 * DAY)
    b.store.upkeep.forget_publishers()
    b.store.writer.step()
    assert b.store.cuts.publisher_position("p") == (0, 0)


def test_only_durable_publishers_are_told(pair: tuple[Rig, Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """S7: else a power cut would take a record that the peer takes for a duplicate."""
    a, _ = pair
    a.run(replace(batch(1, "1"), durability=Durability.BUFFERED))
    monkeypatch.setattr(serving, "SYNC_PATIENCE_SECONDS", 0.0)
    with pytest.raises(StoreError) as refused:
        a.store.replicas.reader.publishers(["t"], "")
    assert refused.value.reason is Reason.STORE_FAILED


# -- the arithmetic -------------------------------------------------------------------------------------------------


def test_ranges_are_the_set_of_what_came(seed: int) -> None:
    for number in range(200):
        random = Random(seed + number)
        known: set[int] = set()
        contiguous: int = 0
        ahead: tuple[tuple[int, int], ...] = ()
        for _ in range(12):
            first = random.randint(1, 30)
            last = first + random.randint(0, 4)
            known |= set(range(first, last + 1))
            contiguous, ahead = with_range(contiguous, ahead, first, last)
            shown = set(range(1, contiguous + 1)).union(*[range(low, high + 1) for low, high in ahead])
            assert shown == known, (seed, number)
            assert contiguous + 1 not in known
            assert list(ahead) == sorted(ahead)


def test_ranges_behind_gaps_are_bounded_and_the_lowest_are_kept() -> None:
    contiguous: int = 0
    ahead: tuple[tuple[int, int], ...] = ()
    for number in range(AHEAD_MAX + 5):
        contiguous, ahead = with_range(contiguous, ahead, 2 * number + 2, 2 * number + 2)
    assert (contiguous, len(ahead), ahead[0]) == (0, AHEAD_MAX, (2, 2))


def test_topics_of_an_epoch_are_bounded() -> None:
    publisher = Publisher(epoch=1, token=TOKEN)
    for topic_id in range(1, TOPICS_MAX + 3):
        publisher = publisher.learn(1, TOKEN, topic_id, topic_id, (), [topic_id], NOW)
    assert UNKNOWN_TOPIC in publisher.topics
    assert len(publisher.topics) == TOPICS_MAX + 1


def test_refusals_from_elsewhere_are_bounded() -> None:
    known = Publisher(epoch=1, token=TOKEN).learn(1, TOKEN, 1, 3000, range(1, 3001), [1], NOW)
    assert len(known.refusals) == OUTCOMES_KEPT
    assert decode(encode(known)) == known


def test_what_is_known_already_changes_nothing() -> None:
    known = Publisher(epoch=2, token=TOKEN).learn(2, TOKEN, 1, 5, (), [1], NOW)
    assert known.learn(2, TOKEN, 2, 4, (), [9], NOW + 1) is known
    assert known.learn(1, 99, 1, 9, (), [1], NOW) is known
    assert known.learn(2, TOKEN - 1, 1, 9, (), [1], NOW) is known
    assert known.learn(9, 0, 1, 9, (), [1], NOW) is known
