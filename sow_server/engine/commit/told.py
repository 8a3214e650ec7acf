"""The parts of what peers tell of publishers (rules F11 and F12). Pure.

[1]  A list of parts is of one publisher. It has the peers' own word, or what they have passed on of one topic.
[2]  No peer takes the place of another one. Above its own bound a peer loses its oldest part, or by [4] its least one.
     Above the bound of all, the peer with the most parts does.
[3]  What was passed on of one topic takes no place of what is known of another one, however much it is. An instance
     does not know who told its peer, and for which topics that one is trusted. So each topic has its own list.
[4]  A part of what was passed on that was lost above a bound does not come back: those of the latest epochs stay, and
     not the newest. Else it would be news again, and go round among peers for ever, with a commit at each of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

OUTCOMES_KEPT: Final = 1000
"""Refusals are kept for this many of a publisher's last sequences."""
AHEAD_MAX: Final = 16
"""Ranges of sequences that are remembered behind a gap."""
TOPICS_MAX: Final = 32
"""Topics that are remembered of an epoch."""
UNKNOWN_TOPIC: Final = 0
"""Among the topics of an epoch: there were more."""
TOLD_MAX: Final = 32
"""Parts of a list ([2])."""
TOLD_OF_PEER_MAX: Final = 8
"""The most of them that are of one peer."""


class Told(NamedTuple):
    """A part of what a peer has told of an epoch of a publisher (publishers [7])."""

    source: str
    """The name of the peer."""
    epoch: int
    token: int
    topics: tuple[int, ...]
    """Ids of the topics of the records."""
    passed_on: bool = False
    """True if the records may have been decided at a third instance, by what the peer says. The part is then of these
    topics and no others."""
    others: tuple[int, ...] = ()
    """Ids of other topics that the publisher had written here when the peer last told this, as far as these are topics
    of the peer, too (publishers [8]). None of what is passed on: of whom they would be topics is not known."""
    contiguous: int = 0
    """All sequences from 1 to here are known."""
    ahead: tuple[tuple[int, int], ...] = ()
    """Ranges that are known, and begin behind a gap, in rising order."""
    refused: tuple[int, ...] = ()
    """The sequences among them that were not applied, of the last ones."""

    @property
    def rank(self) -> tuple[int, int]:
        """Decides between publishers with one id (publishers [6])."""
        return self.epoch, self.token

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """All that are known, in rising order."""
        return ranges_of(self.contiguous, self.ahead)

    @property
    def last(self) -> int:
        """The highest sequence that is known."""
        return self.ahead[-1][1] if self.ahead else self.contiguous

    def is_continued_by(self, later: Told) -> bool:
        """True if this part and `later` are parts of one thing."""
        same = self.rank == later.rank and self.is_like(later)
        return same and (not self.passed_on or set(self.topics) == set(later.topics))

    def is_ended_by(self, later: Told) -> bool:
        """True if the peer has told, with `later`, of a later epoch of this part's topics."""
        return self.rank < later.rank and self.is_like(later) and set(self.topics) <= set(later.topics)

    def is_like(self, other: Told) -> bool:
        """True if both are the peer's own, or both are passed on by it."""
        return (self.source, self.passed_on) == (other.source, other.passed_on)

    def with_bounded_topics(self) -> Told:
        """With each topic once, and only so many of them."""
        return self._replace(topics=with_topics((), self.topics))

    def without_records(self) -> Told:
        """After a loss."""
        return self._replace(contiguous=0, ahead=(), refused=())


PassedOn: TypeAlias = tuple[Told, ...]
"""The parts that peers have passed on of a publisher, of one topic; the newest last ([3])."""


class Elsewhere(NamedTuple):
    """The sequences of the records of one topic that peers have told of, in the epoch of a request."""

    ranges: list[tuple[int, int]]
    refused: frozenset[int]
    last: int


NOTHING_TOLD: Final = Elsewhere([], frozenset(), 0)


def with_told(
    parts: tuple[Told, ...],
    told: Told,
    first: int,
    last: int,
    *,
    others: Sequence[int] = (),
    sends: Callable[[int], bool | None] = lambda topic_id: True,
) -> tuple[Told, ...]:
    """The parts after a peer has told of sequences from `first` to `last`. The same object if that is nothing new.
    `others`: topics that the publisher has written here. `sends`: see `Publisher.learn`."""
    before = told._replace(topics=(), refused=())
    kept: list[Told] = []
    for one in parts:
        if one.is_continued_by(told):
            before = one
        elif not one.is_ended_by(told):
            kept.append(one)
    if told.passed_on:
        topics = before.topics or told.topics  # the same set, whose topics have a row each: so this has to be quick
    else:
        # Those that are the peer's no longer go: they would count with what it tells now.
        topics = with_topics(tuple([one for one in before.topics if not one or sends(one)]), told.topics)
    contiguous, ahead = with_range(before.contiguous, before.ahead, first, last)
    refused = before.refused
    if refused or told.refused:
        oldest = max(before.last, last) - OUTCOMES_KEPT
        refused = tuple(sorted({one for one in (*refused, *told.refused) if one > oldest}))
    learned = before._replace(
        topics=topics,
        others=tuple([one for one in others if one and one not in topics and sends(one) is not False]),
        contiguous=contiguous,
        ahead=ahead,
        refused=refused,
    )
    if learned in parts:
        return parts
    kept.append(learned)
    counts = Counter([one.source for one in kept])
    loser = ""
    if counts[told.source] > TOLD_OF_PEER_MAX:
        loser = told.source
    elif len(kept) > TOLD_MAX:
        loser = max(counts, key=lambda source: (counts[source], source == told.source))
    if loser:
        its_parts = [one for one in kept if one.source == loser]  # the oldest first
        kept.remove(min(its_parts, key=_precedence) if told.passed_on else its_parts[0])
    return tuple(kept)


def _precedence(told: Told) -> tuple[int, int, int, list[int]]:
    """The order in which parts of what was passed on are kept ([4]): no two of a peer are equal in it."""
    return *told.rank, told.last, sorted(told.topics)


def with_range(
    contiguous: int, ahead: tuple[tuple[int, int], ...], first: int, last: int
) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Known sequences, from 1 to `contiguous` and the ranges `ahead`, with one more range. Where there would be too
    many ranges, the lowest ones behind the first gap are forgotten: a retry is of the last ones."""
    if last <= contiguous or first > last:
        return contiguous, ahead
    if first <= contiguous + 1:
        contiguous = last
        if not ahead:
            return contiguous, ahead
        ranges = ahead
    else:
        ranges = tuple(sorted((*ahead, (first, last))))
    kept: list[tuple[int, int]] = []
    for low, high in ranges:
        if low <= contiguous + 1:
            contiguous = max(contiguous, high)
        elif kept and low <= kept[-1][1] + 1:
            kept[-1] = kept[-1][0], max(kept[-1][1], high)
        else:
            kept.append((low, high))
    return contiguous, tuple(kept[-AHEAD_MAX:])


def ranges_of(contiguous: int, ahead: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
    return [(1, contiguous), *ahead] if contiguous else [*ahead]


def known_upto(known: int, ranges: Sequence[tuple[int, int]]) -> int:
    """The sequence up to which ranges, in any order, continue what is known up to `known`."""
    for low, high in sorted(ranges):
        if low > known + 1:
            break
        known = max(known, high)
    return known


def with_topics(topics: tuple[int, ...], more: Sequence[int]) -> tuple[int, ...]:
    for topic_id in more:
        topics = with_topic(topics, topic_id)
    return topics


def with_topic(topics: tuple[int, ...], topic_id: int) -> tuple[int, ...]:
    if topic_id in topics or UNKNOWN_TOPIC in topics:
        return topics
    return (*topics, topic_id) if len(topics) < TOPICS_MAX else (*topics, UNKNOWN_TOPIC)
