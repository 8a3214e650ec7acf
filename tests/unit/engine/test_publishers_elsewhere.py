"""Publishers that go on at another instance (rules F11 and F12)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sow_peering import MergeCounts, PublisherMark
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit.requests import RequestLimits
from sow_server.engine.commit.told import AHEAD_MAX
from sow_server.engine.disk.mark import Bounds
from sow_server.engine.disk.rocks import RECORDS, Batch
from sow_server.engine.losses import settle
from sow_server.engine.replicas import serving
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import (
    Condition,
    ConditionKind,
    Durability,
    MessageType,
    OpenedPublisher,
    Outcome,
    Publish,
    PublisherPosition,
    RecordMatcher,
)
from tests.support.stores.replicas import greet, identity, instance, live, pair, ship, tell_publishers
from tests.support.stores.stores import BINARY, DAY, FakeTime, Rig

__all__ = ["pair"]  # a fixture

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
    rig.store.commits.open_publisher("p", 0, token=token).then(answers.append)
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
    monkeypatch.setattr(b.store.replicas.sources, "has_all", lambda source, topic: False)
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


# -- what an instance has learned, told to a third one -------------------------------------------------------------


@pytest.fixture
def line(tmp_path: Path) -> tuple[Rig, Rig, Rig]:
    """a to b to c."""
    time = FakeTime()
    rigs = [
        instance(tmp_path, name, peers=peers, time=time) for name, peers in (("a", ["b"]), ("b", ["c"]), ("c", ["b"]))
    ]
    for rig in rigs:
        rig.create_topic("t")
        rig.create_topic("u")
    a, b, c = rigs
    return a, b, c


def test_learned_publishers_count_at_a_third_instance_only_once_it_has_the_records(line: tuple[Rig, Rig, Rig]) -> None:
    """F11, F12. b learned of a publisher whose records it had long had, and told c, which b was still seeding. At c the
    retry was a duplicate; when b was lost then, the record was nowhere."""
    a, b, c = line
    a.run(batch(1, "1", "2"))
    ship(a, b)
    greet(b, c)  # the rows are still to come
    tell_publishers(a, b)
    ship(b, c)
    assert outcome(c.run(batch(1, "1", "2"))) == (2, 0, [])


def test_a_record_that_lost_at_the_second_instance_is_not_known_at_the_third_before_the_winner_is(
    line: tuple[Rig, Rig, Rig],
) -> None:
    """As above: the record is in no change that b sends, and the one that won over it is in a row."""
    a, b, c = line
    ship(a, b)
    a.run(batch(1, "1"))
    a.time.tick(1)
    b.put("t", "1", b"newer")
    greet(b, c)
    ship(a, b)
    ship(b, c)
    assert outcome(c.run(batch(1, "1"))) == (1, 0, [])


def test_publishers_of_several_topics_are_told_along_a_line(line: tuple[Rig, Rig, Rig]) -> None:
    """F11. They went no further than to the neighbour; and as that was a gap, nothing later counted either."""
    a, b, c = line
    a.run(batch(1, "1"))
    a.run(batch(2, "2", topic="u"))
    ship(a, b)
    ship(b, c)
    tell_publishers(a, b)
    a.run(batch(3, "3"))
    ship(a, b)
    ship(b, c)
    assert outcome(c.run(batch(1, "1"))) == (0, 1, [])
    assert outcome(c.run(batch(2, "2", topic="u"))) == (0, 1, [])
    assert outcome(c.run(batch(3, "3", "4"))) == (1, 1, [])


def test_a_publisher_that_writes_topics_in_turns_is_known_along_a_line(line: tuple[Rig, Rig, Rig]) -> None:
    """F11. Kept topic by topic, its sequences would have too many gaps."""
    a, b, c = line
    ship(a, b)
    ship(b, c)
    requests = [batch(number, f"{number}", topic="tu"[number % 2]) for number in range(1, 4 * AHEAD_MAX)]
    for request in requests:
        a.run(request)
    ship(a, b)
    ship(b, c)
    for rig in (b, c):
        assert [outcome(rig.run(request)) for request in requests] == [(0, 1, [])] * len(requests)
    assert c.store.cuts.publisher_position("p") == (1, len(requests))


def test_a_link_that_lacks_one_of_a_publishers_topics_is_not_told_what_was_learned(line: tuple[Rig, Rig, Rig]) -> None:
    a, b, c = line
    a.run(batch(1, "1"))
    a.run(batch(2, "2", topic="u"))
    ship(a, b)
    ship(b, c)
    tell_publishers(a, b)
    ship(b, c, topics="t")
    assert outcome(c.run(batch(2, "2", topic="u"))) == (1, 0, [])


def test_a_publisher_is_not_kept_alive_by_being_passed_on(line: tuple[Rig, Rig, Rig]) -> None:
    """P6. Each instance that passed a publisher on made it as young as the telling, so in a mesh it never grew old."""
    a, b, c = line
    a.run(batch(1, "1"))
    ship(a, b)
    ship(b, c)
    a.time.tick(6 * DAY)
    tell_publishers(a, b)
    ship(b, c)
    assert c.store.cuts.publisher_position("p") == (1, 1)
    a.time.tick(2 * DAY)
    c.store.upkeep.forget_publishers()
    c.store.writer.step()
    assert c.store.cuts.publisher_position("p") == (0, 0)


@pytest.mark.parametrize(
    ("seen_in", "decided"), [("a change", (0, 0, [Reason.PAYLOAD_TOO_LARGE])), ("the seed", (1, 0, []))]
)
def test_publishers_are_not_told_of_a_topic_of_which_a_row_was_refused(
    pair: tuple[Rig, Rig], tmp_path: Path, seen_in: str, decided: tuple[int, int, list[Reason]]
) -> None:
    """R13, F12. The changes did not count, but once the link began anew all publishers were told, and the retry of the
    delta whose merged record the receiver had refused was a duplicate."""
    a, _ = pair
    options = pair[1].options
    writer = replace(options.writer, limits=RequestLimits(payload_bytes_max=15))
    b = Rig(tmp_path / "small", options=replace(options, writer=writer), time=a.time)
    for rig in (a, b):
        rig.create_topic("j", message_type=MessageType.JSON)
    if seen_in == "a change":
        ship(a, b)
    one, other = [
        replace(batch(number, "k", topic="j"), payloads=[b'{"field%d":1}' % number], delta=True) for number in (1, 2)
    ]
    for delta in (one, other):
        assert outcome(a.run(delta)) == (1, 0, [])
    ship(a, b)
    tell_publishers(a, b)
    assert outcome(b.run(other)) == decided


# -- bounds, and marks that no instance of ours would send ---------------------------------------------------------


def refused_often(rig: Rig, requests: int) -> None:
    """Requests of which all records are refused."""
    rig.put("t", "1")
    for number in range(requests):
        rig.run(batch(1 + 100 * number, *["1"] * 100, absent=True))


def test_publishers_count_for_the_size_of_a_read(pair: tuple[Rig, Rig]) -> None:
    """A peer that came back got the publishers of 5,000 commits in one message, whatever their size."""
    a, b = pair
    ship(a, b)
    refused_often(a, 10)
    sizes: list[int] = []
    cursor = b.store.replicas.sources.by_name["a"].cursor
    while True:
        part = a.store.replicas.reader.read(
            identity(b), cursor, topics=["t"], select=lambda topic: None, bytes_max=1000
        )
        sizes.append(len(part.publishers))
        if part.upto == cursor:
            break
        cursor = part.upto
    assert sum(sizes) == 10
    assert max(sizes) <= 2


def test_a_part_of_the_publishers_is_bounded_by_its_bytes(
    pair: tuple[Rig, Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _ = pair
    monkeypatch.setattr(serving, "PUBLISHERS_BYTES_MAX", 300)
    for name in "vwxyz":
        a.run(replace(batch(1, name), publisher=PublisherPosition(name * 100, 1, 1, token=TOKEN)))
    parts = [a.store.replicas.reader.publishers(["t"], "")]
    while parts[-1].last_id:
        parts.append(a.store.replicas.reader.publishers(["t"], parts[-1].last_id))
    assert [mark.publisher_id[0] for part in parts for mark in part.marks] == list("vwxyz")
    assert [len(part.marks) for part in parts] == [2, 2, 1]


def test_a_publisher_that_has_published_nothing_is_told_to_nobody(pair: tuple[Rig, Rig]) -> None:
    """R11. Its id told an instance that gets some topics of the publishers to others."""
    a, _ = pair
    opened(a, 5)
    assert not a.store.replicas.reader.publishers(["t"], "").marks
    a.run(batch(1, "1", token=5))
    assert [mark.publisher_id for mark in a.store.replicas.reader.publishers(["t"], "").marks] == ["p"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"topics": ()},
        {"first": 0},
        {"first": 6},
        {"last": 2**63 - 1},
        {"token": -1},
        {"epoch": -1},
        {"publisher_id": ""},
        {"publisher_id": "p" * 1001},
        {"topics": ("t", "of no link")},
    ],
)
def test_marks_that_say_too_much_or_nothing_do_not_count(pair: tuple[Rig, Rig], wrong: dict[str, Any]) -> None:
    """R11. A source that may send one topic could make every publisher's records duplicates, by a mark of no topic."""
    a, b = pair
    ship(a, b)
    sound = PublisherMark("p", 1, TOKEN, 1, 5, ("t",))
    source = b.store.replicas.sources.by_name["a"]
    for mark, known in ((sound._replace(**wrong), 0), (sound, 5)):
        answers: list[MergeCounts | StoreError] = []
        b.store.replicas.changes.apply(
            "a", after=source.cursor, upto=source.cursor, chunks=[], origins=[], publishers=[mark]
        ).then(answers.append)
        b.answer(answers)
        assert b.store.cuts.publisher_position("p")[1] == known


# -- after a loss ---------------------------------------------------------------------------------------------------


def test_after_an_accepted_loss_no_sequence_is_known_and_older_epochs_stay_fenced(pair: tuple[Rig, Rig]) -> None:
    """X4, F12. The row of a publisher may have been in a table file, and its records not. Their retries were duplicates
    here, and wherever peers were told so."""
    a, _ = pair
    for token in (3, 5):
        opened(a, token)
    a.run(replace(batch(1, "1", "2", epoch=2, token=5), publisher=PublisherPosition("p", 2, 1, 1, True, token=5)))
    batch_of_loss = Batch()
    batch_of_loss.deletes[RECORDS].append(a.topic("t").prefix + b"2")
    a.store._rocks.write(batch_of_loss)
    settle(a.store._rocks, Bounds(), {"id": "other", "epoch": "other", "origin": None})
    a.abandon()
    a.open()
    assert not a.store.replicas.reader.publishers(["t"], "").marks
    assert outcome(a.run(batch(1, "1", "2", epoch=2, token=5))) == (2, 0, [])
    assert set(live(a)) == {"1", "2"}
    assert fenced(a, batch(1, "3", epoch=1, token=3))


def test_after_an_accepted_loss_what_was_passed_on_is_not_known(line: tuple[Rig, Rig, Rig]) -> None:
    """X4, F12."""
    a, b, c = line
    ship(a, b)
    ship(b, c)
    a.run(batch(1, "1", epoch=2, token=5))
    ship(a, b)
    ship(b, c)
    settle(c.store._rocks, Bounds(), {"id": "other", "epoch": "other", "origin": None})
    c.abandon()
    c.open()
    assert c.store.cuts.publisher_position("p") == (2, 0)
    assert fenced(c, batch(1, "3", epoch=1, token=3))
    assert outcome(c.run(batch(1, "1", epoch=2, token=5))) == (1, 0, [])
