"""The memory of what peers tell of a publisher (rules F11 and F12): ranges of sequences, and what they count for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

import msgspec
import pytest

from sow_server.engine.commit.passed_on import decode_passed_on, encode_passed_on
from sow_server.engine.commit.publishers import EPOCH_MAX, EPOCH_STEP_MAX, Publisher, decode, encode
from sow_server.engine.commit.told import (
    AHEAD_MAX,
    OUTCOMES_KEPT,
    TOLD_MAX,
    TOLD_OF_PEER_MAX,
    TOPICS_MAX,
    UNKNOWN_TOPIC,
    PassedOn,
    Told,
    with_range,
)
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import PublisherPosition

NOW = 1_700_000_000_000_000
TOKEN = 7
SHARED, PRIVATE = 1, 2


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


def test_ranges_behind_gaps_are_bounded_and_the_last_are_kept() -> None:
    """F11. A retry is of the last ones, and in a mesh, where two peers tell in turns, each one's have many gaps."""
    contiguous, ahead = with_range(0, (), 1, 1)
    for number in range(AHEAD_MAX + 5):
        contiguous, ahead = with_range(contiguous, ahead, 2 * number + 3, 2 * number + 3)
    assert (contiguous, len(ahead), ahead[-1]) == (1, AHEAD_MAX, (2 * AHEAD_MAX + 11,) * 2)


def mark(*topics: int, epoch: int = 1, token: int = TOKEN, source: str = "a", refused: Iterable[int] = ()) -> Told:
    return Told(source, epoch, token, topics, refused=tuple(refused))


class Rows:
    """The rows of what peers have passed on of a publisher."""

    def __init__(self) -> None:
        self.by_topic: dict[int, PassedOn] = {}

    def learn(self, publisher: Publisher, told: Told, first: int, last: int) -> bool:
        """Whether it is new."""
        passed_on = told._replace(passed_on=True)
        changed = publisher.learn_passed_on(passed_on, first, last, known=self._known)
        self.by_topic |= {topic_id: decode_passed_on(encode_passed_on(row)) for topic_id, row in changed.items()}
        return bool(changed)

    def _known(self, topic_ids: Sequence[int]) -> dict[int, PassedOn]:
        return {topic_id: self.by_topic.get(topic_id, ()) for topic_id in topic_ids}

    def of(self, publisher: Publisher, topic_id: int) -> Publisher:
        """The publisher, as a request for a topic finds it."""
        return publisher._replace(passed_on=self.by_topic.get(topic_id, ()))


def test_topics_of_an_epoch_are_bounded() -> None:
    publisher = Publisher(epoch=1, token=TOKEN)
    for topic_id in range(1, TOPICS_MAX + 3):
        publisher = publisher.learn(mark(topic_id), topic_id, topic_id, NOW)
    (told,) = publisher.told
    assert UNKNOWN_TOPIC in told.topics
    assert len(told.topics) == TOPICS_MAX + 1
    rows = Rows()
    assert rows.learn(publisher, mark(*range(1, 100), *range(1, 100)), 100, 101)
    assert sorted(rows.by_topic) == sorted(set(told.topics) - {UNKNOWN_TOPIC})
    assert all(row[0].topics == told.topics for row in rows.by_topic.values())


def test_refusals_from_elsewhere_are_bounded() -> None:
    known = Publisher(epoch=1, token=TOKEN).learn(mark(1, refused=range(1, 3001)), 1, 3000, NOW)
    assert len(known.told[0].refused) == OUTCOMES_KEPT
    assert decode(encode(known)) == known


def test_what_is_known_already_changes_nothing() -> None:
    known = Publisher(epoch=2, token=TOKEN).learn(mark(1, 9, epoch=2), 1, 5, NOW)
    for source in ("a", "b"):
        assert known.learn(mark(9, epoch=2, source=source), 2, 4, NOW + 1) is known
    assert known.learn(mark(1, token=99), 1, 9, NOW) is known
    assert known.learn(mark(1, epoch=2, token=TOKEN - 1), 1, 9, NOW) is known
    assert known.learn(mark(1, epoch=9, token=0), 1, 9, NOW) is known
    here = known.advance(7, [], NOW, from_sequence=6, topic_id=1)
    assert here.learn(mark(1, epoch=2), 6, 7, NOW) is here


# -- what a peer says counts for its topics alone ------------------------------------------------------------------


def known_to(publisher: Publisher, topic_id: int, first: int = 1) -> int:
    return publisher.decided_upto(first, publisher.elsewhere(topic_id))


def is_fenced(publisher: Publisher, topic_id: int, epoch: int = 1, token: int = TOKEN) -> bool:
    try:
        publisher.admit(PublisherPosition("p", epoch, 100, token=token), 1, topic_id)
    except StoreError as error:
        return error.reason is Reason.PUBLISHER_FENCED
    return False


def test_sequences_count_for_records_of_the_topics_that_were_told() -> None:
    """F11. Story of the mistake: with the token that F11 tells it, a peer of one topic made new records of another one
    duplicates."""
    known = Publisher(epoch=1, token=TOKEN).advance(3, [], NOW, topic_id=PRIVATE).learn(mark(SHARED), 4, 99, NOW)
    assert (known_to(known, SHARED, 4), known_to(known, PRIVATE, 4)) == (99, 3)
    assert known.refusal_of(9, conditional=True, elsewhere=known.elsewhere(PRIVATE)) is None


def test_what_is_passed_on_is_not_joined_with_what_the_peer_itself_may_say() -> None:
    """F11. Story of the mistake: a peer of one topic told an instance, which is trusted by a third one with another
    topic of this publisher, too; there both became one."""
    known, rows = Publisher(epoch=1, token=TOKEN).learn(mark(PRIVATE), 1, 3, NOW), Rows()
    rows.learn(known, mark(SHARED), 4, 99)
    assert (known_to(rows.of(known, PRIVATE), PRIVATE), known_to(rows.of(known, SHARED), SHARED, 4)) == (3, 99)
    rows.learn(known, mark(PRIVATE), 4, 4)
    assert known_to(rows.of(known, PRIVATE), PRIVATE) == 4
    # Nor are the parts of one topic, if they are of different ones besides: the wider one may count for all of these.
    rows.learn(known, mark(SHARED, PRIVATE), 100, 100)
    assert [told.topics for told in rows.by_topic[SHARED]] == [(SHARED,), (SHARED, PRIVATE)]
    assert known_to(rows.of(known, SHARED), SHARED, 4) == 100
    assert known_to(rows.of(known, PRIVATE), PRIVATE) == 4


def test_what_was_told_of_a_topic_that_is_the_peers_no_longer_is_forgotten() -> None:
    """F11. Story of the mistake: after the rights of the peer had become fewer, what it told of the topic that was left
    counted for the others, too."""
    known = Publisher(epoch=1, token=TOKEN).learn(mark(SHARED, PRIVATE), 1, 3, NOW)
    known = known.learn(mark(SHARED), 4, 99, NOW, sends=lambda topic_id: topic_id == SHARED)
    assert (known_to(known, SHARED), known_to(known, PRIVATE)) == (99, 0)


@pytest.mark.parametrize("step", [1, EPOCH_STEP_MAX, EPOCH_STEP_MAX + 10, 2**62, EPOCH_MAX - 1])
@pytest.mark.parametrize("trusted", [False, True])
def test_a_told_epoch_fences_only_publishers_of_the_peers_topics_and_within_bounds(step: int, trusted: bool) -> None:
    """F12. Story of the mistake: a peer of one topic fenced a publisher of another one, or used its id up."""

    def sends(topic_id: int) -> bool:
        return trusted or topic_id == SHARED

    known = Publisher(epoch=1, token=TOKEN).advance(3, [], NOW, topic_id=PRIVATE)
    for told in (mark(SHARED, epoch=1 + step), mark(SHARED, epoch=1 + step, token=TOKEN + 1)):
        known = known.learn(told, 1, 9, NOW, sends=sends)
    counts = trusted and step <= EPOCH_STEP_MAX
    assert [is_fenced(known, topic_id) for topic_id in (SHARED, PRIVATE, 3)] == [counts, counts, False]
    assert known.position() == ((1 + step, 9) if counts else (1, 3))
    begun, opened = known.open(0, "p", NOW)
    assert opened.epoch == (2 + step if counts else 2)
    assert not is_fenced(begun, PRIVATE, begun.epoch, begun.token)
    # The topics of earlier epochs are remembered, and what did not count is not in the way of what does.
    again = begun.learn(mark(SHARED, epoch=begun.epoch + 1), 1, 9, NOW, sends=sends)
    assert is_fenced(again, SHARED, begun.epoch, begun.token) is trusted


def test_many_tellings_reach_no_further_than_one() -> None:
    """F12."""
    known = Publisher(epoch=5, token=TOKEN)
    for number in range(1, 100):
        for source in "abc":
            known = known.learn(mark(SHARED, epoch=5 + number * (EPOCH_STEP_MAX // 2), source=source), 1, 1, NOW)
    assert known.position()[0] <= 5 + EPOCH_STEP_MAX
    assert known.open(0, "p", NOW)[1].epoch <= 6 + EPOCH_STEP_MAX


def test_an_epoch_told_before_the_publisher_came_fences_its_other_topics_not_and_later_none() -> None:
    """F12."""
    known = Publisher().learn(mark(SHARED, epoch=1000), 1, 9, NOW)
    assert is_fenced(known, SHARED)
    assert not is_fenced(known, PRIVATE)
    known = known.admit(PublisherPosition("p", 1, 1, token=TOKEN), 1, PRIVATE).advance(1, [], NOW, topic_id=PRIVATE)
    assert not is_fenced(known, SHARED)


def test_what_is_passed_on_fences_publishers_of_its_topics_alone() -> None:
    """F12. The peer may send the other topic, too; whoever told it may not."""
    known = Publisher(epoch=1, token=TOKEN).advance(3, [], NOW, topic_id=PRIVATE)
    told = mark(SHARED, epoch=2)
    rows = Rows()
    rows.learn(known, told, 1, 9)
    assert not is_fenced(rows.of(known, SHARED), SHARED)
    assert not is_fenced(rows.of(known, PRIVATE), PRIVATE)
    rows.learn(known, mark(SHARED, PRIVATE, epoch=2), 10, 19)
    assert is_fenced(rows.of(known, SHARED), SHARED)
    assert is_fenced(rows.of(known, PRIVATE), PRIVATE)
    assert is_fenced(known.learn(told, 1, 9, NOW), PRIVATE)


def test_a_later_epoch_of_some_topics_does_not_hide_what_the_peer_tells_of_others() -> None:
    """F11. Story of the mistake: in a chain, the epoch of a hostile peer replaced what was known of other topics."""
    known = Publisher().learn(mark(PRIVATE), 1, 3, NOW).learn(mark(SHARED, epoch=9), 1, 9, NOW)
    known = known.learn(mark(PRIVATE), 4, 6, NOW)
    here = known.admit(PublisherPosition("p", 1, 1, token=TOKEN), 1, PRIVATE)
    assert known_to(here, PRIVATE) == 6
    assert known.learn(mark(PRIVATE, SHARED, epoch=10), 1, 1, NOW).told[0].rank == (10, TOKEN)


def test_what_is_passed_on_of_one_topic_takes_no_place_of_another_one() -> None:
    """F11. Story of the mistake: a heard from b, and passed on to c, which sequences for the topic private are there.
    b itself told c later: that was known already. Then a passed on lies about the topic shared, each of another epoch
    or token, and c kept the last eight parts of what a had passed on. So at c a retry was applied again."""
    known, rows = Publisher(epoch=1, token=TOKEN), Rows()
    assert rows.learn(known, mark(PRIVATE), 1, 5)
    assert known.learn(mark(PRIVATE, source="b"), 1, 5, NOW) is not known, "its own word counts beside"
    for number in range(3 * TOLD_MAX):
        token = TOKEN + 1000 - number  # a lower one does not end a higher one
        rows.learn(known, mark(SHARED, epoch=1 + number % 3, token=token, source="ab"[number % 2]), 1, 99)
        # The liar may send several topics, and tell of each set of them.
        rows.learn(known, mark(SHARED, 10 + number, token=token + 1000), 1, 99)
        rows.learn(known, mark(10 + number, epoch=2), 1, 99)
    assert known_to(rows.of(known, PRIVATE), PRIVATE) == 5
    assert max(Counter(told.source for told in rows.by_topic[SHARED]).values()) == TOLD_OF_PEER_MAX
    assert len(rows.by_topic[PRIVATE]) == 1


def test_what_peers_tell_is_bounded_and_one_takes_no_place_of_another() -> None:
    """F11. Story of the mistake: above the bound of all, the oldest part went, whose ever it was. So five peers of one
    topic, each within its own bound, pushed out what an honest one had told of another."""
    honest = mark(PRIVATE, source="honest")
    new, rows = Publisher(epoch=1, token=TOKEN), Rows()
    known = new.learn(honest, 1, 5, NOW)
    rows.learn(new, mark(SHARED, source="honest"), 1, 5)
    for number in range(10 * TOLD_MAX):
        lie = mark(SHARED, token=TOKEN + 1000 - number, source=f"s{number % 6}")
        known = known.learn(lie, 1, 9, NOW)
        rows.learn(new, lie, 1, 9)
        for parts in (known.told, rows.by_topic[SHARED]):
            assert max(Counter(told.source for told in parts).values()) <= TOLD_OF_PEER_MAX
            assert len(parts) <= TOLD_MAX
            assert parts[0].source == "honest"
    assert known_to(known, PRIVATE) == 5
    assert len(known.told) == len(rows.by_topic[SHARED]) == TOLD_MAX


def test_what_is_passed_on_does_not_go_round_for_ever() -> None:
    """F11. Story of the mistake: b, c, d and e are peers of each other, and the peer a passed 40 notes of one topic on
    to b at once. Above the bound each of them lost its oldest part. When another one passed that on again, it was news
    again. So the notes went round for ever, with a commit at each instance, long after a had gone."""
    names, random = "bcde", Random(1)
    rows = {name: Rows() for name in names}
    sent = {(one, other): list[int]() for one in f"a{names}" for other in names if one != other}
    sent["a", "b"] = [TOKEN + number for number in range(40)]
    heard = 0
    while ways := [way for way, tokens in sent.items() if tokens]:
        sender, receiver = random.choice(ways)
        size = random.choice((1, 50))
        message, sent[sender, receiver] = sent[sender, receiver][:size], sent[sender, receiver][size:]
        for token in message:
            heard += 1
            assert heard < 20_000, "it ends"
            if rows[receiver].learn(Publisher(), mark(SHARED, token=token, source=sender), 1, 5):
                for other in sorted(set(names) - {sender, receiver}):
                    sent[receiver, other].append(token)
    for row in [one.by_topic[SHARED] for one in rows.values()]:
        assert max(told.token for told in row) == TOKEN + 39, "the latest is known everywhere"


def test_parts_of_an_earlier_epoch_than_the_one_here_leave_their_row() -> None:
    known, rows = Publisher(epoch=1, token=TOKEN), Rows()
    rows.learn(known, mark(SHARED, PRIVATE), 1, 5)
    begun = known.admit(PublisherPosition("p", 2, 1, token=TOKEN), 1, SHARED)
    assert not rows.learn(begun, mark(SHARED), 6, 9)
    assert rows.learn(begun, mark(SHARED, epoch=2), 1, 1)
    assert [told.rank for told in rows.by_topic[SHARED]] == [(2, TOKEN)]


def test_rows_of_earlier_releases_are_read_without_what_peers_had_told() -> None:
    """F11. Which of the sequences were told, and by whom, the row does not say. Fencing stays."""
    fields: list[Any] = [4, 3, NOW, [(2, 12, "refused", 0), (9, 27, "told", 0)], *[0] * 5, b"", TOKEN, True]
    for told, known in ((0, (9, ((11, 12),))), (9, (0, ()))):
        row = msgspec.msgpack.encode([*fields, 9, ((11, 12),), told, (PRIVATE, SHARED)])
        publisher = decode(row)
        assert (publisher.epoch, publisher.token, publisher.highest_sequence) == (4, TOKEN, 3)
        assert (publisher.contiguous, publisher.ahead) == known
        assert known_to(publisher, PRIVATE) == 3
        assert len(publisher.refusals) == (1 if told else 2)
        assert decode(encode(publisher)) == publisher
