"""Owns all subscriptions: makes them, finds where each starts, and ends them when the server stops."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from sow.durations import format_micros
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.doors import Reads, Writes
from sow_server.engine.values.bookmarks import HELD_MAX, Bookmark, Marks, Position, parse
from sow_server.engine.values.clock import boot_micros
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import MICROS
from sow_server.engine.values.patterns import PatternError, matcher
from sow_server.subscriptions.live.dispatch import Dispatcher, Schedule
from sow_server.subscriptions.marking import Marking
from sow_server.subscriptions.request import Request, StartKind, check_topic
from sow_server.subscriptions.subscription import Common, Subscription

PATTERN_CHARACTERS_MAX: Final = 1000
AHEAD_MICROS_MAX: Final = 10 * MICROS
"""A start time may be this far ahead, and then means now: the clocks of clients differ from the server's."""


@dataclass(frozen=True, slots=True)
class HubOptions:
    """Limits of subscriptions."""

    queue_bytes_max: int = 4 * 2**20
    subscriptions_max: int = 1000


class Hub:
    """Owns the dispatcher and the subscriptions. On one thread, the event loop's."""

    def __init__(
        self,
        reads: Reads,
        writes: Writes,
        schedule: Schedule,
        *,
        options: HubOptions | None = None,
        elapsed: Callable[[], int] = boot_micros,
        ticks: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Make it before the store is started: from then on it follows the writer."""
        self._reads = reads
        self._commits = writes.commits
        self._all_topics = reads.topics
        self._instance = reads.instance
        self._marks = writes.replicas.marks
        self._clock = reads.clock
        self._elapsed = elapsed
        self._options = options or HubOptions()
        self.dispatcher: Final = Dispatcher(reads, writes, schedule, ticks)
        self._common = Common(
            reads, writes, elapsed, self.dispatcher, self._options.queue_bytes_max, self._moved, self._closed
        )
        self._subscriptions: dict[Subscription, None] = {}
        self._schedule = schedule
        self._leaving: list[Callable[[], None]] | None = None
        """Those that leave in this turn of the loop; None: there are none."""
        self._stopping = False
        self.resyncs_total = 0
        writes.commits.follow(self.dispatcher.committed)

    def prepare(self, request: Request) -> None:
        """Parses and compiles the filter for `subscribe`, which may take milliseconds: from any thread. Raises
        StoreError."""
        for topic in self._topics(request, self._matches(request)):
            request.view(topic)

    def subscribe(self, request: Request, *, after: int | None = None, held: tuple[Position, ...] = ()) -> Subscription:
        """A new subscription; `request` has passed `request.check`. `after`: a position to start at, instead of the
        start of the request; `held`: what its subscriber was told at other instances. Raises StoreError."""
        self.admit()
        matches = self._matches(request)
        topics = self._topics(request, matches)
        topic = topics[0] if request.topic else None
        for found in topics:
            check_topic(request, found)
            request.view(found)
        marking: Marking | None = None
        if after is None:
            position, accepted, marking = self._begin(request, topics, matches, several=topic is None)
        else:
            # A consumer of a durable needs no marks, because its position is kept here; unless it has come from
            # elsewhere (rule F17).
            position, accepted = after, {}
            held = tuple([at for at in held if at.epoch != self._instance.epoch])
            if held and all(_sees_all(request, one) for one in topics):
                marking = Marking(self._marks, lambda: topics, held=held)
        subscription = Subscription(request, self._common, topic=topic, matches=matches, marking=marking)
        self._subscriptions[subscription] = None
        try:
            subscription.start(position, accepted)
        except BaseException:
            subscription.close()
            raise
        return subscription

    def last_change(self, topic: Topic) -> int:
        """The position of the last change of a topic, as far as it is on disk."""
        return min(self._commits.synced_sequence, topic.statistics.last_sequence)

    def admit(self, also: int = 0) -> None:
        """Raises StoreError if there may be no other subscription. `also`: the number of those that are not of this
        hub."""
        if self._stopping:
            raise StoreError(Reason.STOPPING, "the server is stopping")
        count = len(self._subscriptions) + also
        if count >= self._options.subscriptions_max:
            raise StoreError(
                Reason.OVERLOADED,
                f"there are {count} subscriptions, as many as this server allows",
                retry_after_micros=1_000_000,
            )

    @staticmethod
    def _matches(request: Request) -> Callable[[str], bool]:
        if request.topic:
            return lambda name: name == request.topic
        matches = _pattern(request.pattern)
        return lambda name: not name.startswith("_") and matches(name)  # these are the store's own topics

    def _topics(self, request: Request, matches: Callable[[str], bool]) -> list[Topic]:
        """The existing topics of a request, at least one. Raises StoreError."""
        if request.topic:
            return [self._all_topics.find(request.topic)]
        topics = [topic for topic in self._all_topics.by_id.values() if matches(topic.name) and request.permits(topic)]
        if not topics:
            raise StoreError(
                Reason.PATTERN_MATCHES_NOTHING,
                f"topic_pattern: no topic matches {request.pattern!r}",
                field="topic_pattern",
            )
        return topics

    def stop(self) -> None:
        """Ends every subscription, each with its bookmark, and refuses new ones."""
        self._stopping = True
        for subscription in list(self._subscriptions):
            subscription.stop()

    def _moved(self, then: Callable[[], None]) -> None:
        """As `Common.moved`. A new placement may end a thousand subscriptions at once: they share one step of the
        writer, as each is a commit."""
        if self._leaving is None:
            leaving: list[Callable[[], None]] = []
            self._schedule(self._all_leave)
            self._commits.moved().then(lambda _: [one() for one in leaving])
            self._leaving = leaving
        self._leaving.append(then)

    def _all_leave(self) -> None:
        self._leaving = None

    def _closed(self, subscription: Subscription) -> None:
        error = subscription.error
        self.resyncs_total += error is not None and error.reason is Reason.RESYNC_REQUIRED
        self._subscriptions.pop(subscription, None)

    # -- the start of a subscription ----------------------------------------------------------------------------------

    def _begin(
        self, request: Request, topics: list[Topic], matches: Callable[[str], bool], *, several: bool
    ) -> tuple[int | None, dict[int, int], Marking]:
        """As `start`, also for a bookmark of another instance; and the marks of the subscriber's bookmarks."""

        def followed() -> list[Topic] | None:
            found = topics
            if several:
                found = [one for one in self._all_topics.by_id.values() if matches(one.name) and request.permits(one)]
            return found if all(_sees_all(request, one) for one in found) else None

        position: int | None
        marks: Marks | None = None
        held: tuple[Position, ...] = ()
        if request.start.kind is StartKind.BOOKMARK:
            bookmark = parse(request.start.bookmark)
            own = self._instance.epoch
            last = {position.epoch: position for position in sorted((*bookmark.held, bookmark.at))}
            last.pop(own, None)
            held = tuple(last.values())
            if held and (followed() is None or len(held) > HELD_MAX):
                raise self._other_epoch(bookmark.at.epoch)
            if bookmark.at.epoch != own:
                position = self._translated(bookmark)
                self._check_floors(position, topics, several=several)
                return position, {}, Marking(self._marks, followed, held=held, lasting=request.delta)
            marks = bookmark.marks if followed() is not None else None
        position, accepted = self.start(request, topics, several=several)
        return position, accepted, Marking(self._marks, followed, marks=marks, held=held, lasting=request.delta)

    def _translated(self, bookmark: Bookmark) -> int:
        """The position here from which a subscriber goes on that comes from another instance (rule F7). Raises
        StoreError."""
        marks = bookmark.marks
        here = None if marks is None else dict(marks.sources).get(self._instance.epoch)
        if marks is None or here is None:
            raise self._other_epoch(bookmark.at.epoch)
        self._check_future(here)
        cut = self._reads.cuts.journal()
        try:
            # What expired here up to then was told there: stamps are the same everywhere, whatever the clocks.
            return min(here, cut.last_upto(marks.swept_micros, self._commits.last_sequence))
        finally:
            cut.close()

    def start(self, request: Request, topics: list[Topic], *, several: bool) -> tuple[int | None, dict[int, int]]:
        """The position after which a subscription starts, None for now, and the floors below which it misses
        nothing."""
        start = request.start
        if start.kind is StartKind.NOW:
            return None, {}
        if start.kind is StartKind.BOOKMARK:
            return self._resume(start.bookmark, topics, several=several), {}
        if start.kind is StartKind.TIME:
            self.check_time(start.time_micros, "start_time_micros")
        wanted = self._last_before(start.time_micros) if start.kind is StartKind.TIME else None
        floors = {topic.id: _floor(topic, several=several) for topic in topics}
        earliest = min(floors.values())
        # A topic whose journal begins later starts at its beginning: older changes were not asked for.
        return (earliest if wanted is None else max(wanted, earliest)), floors

    def _last_before(self, time_micros: int) -> int | None:
        cut = self._reads.cuts.journal()
        try:
            return cut.last_before(time_micros)
        finally:
            cut.close()

    def check_time(self, time_micros: int, field: str) -> None:
        """Raises StoreError TIME_IN_FUTURE for a start time in the future (rule S4)."""
        now = self._clock.now_micros()
        ahead = time_micros - now
        if ahead > AHEAD_MICROS_MAX:
            raise StoreError(
                Reason.TIME_IN_FUTURE,
                f"{field}: is {format_micros(ahead // 1_000 * 1_000)} ahead of this server's clock; "
                "give a time that has passed",
                field=field,
                details={"now_micros": str(now)},
            )

    def position(self, bookmark: str) -> int:
        """The sequence that a bookmark of this journal names. Raises StoreError with one of three reasons (rule S4)."""
        epoch, position = parse(bookmark).at
        if epoch != self._instance.epoch:
            raise self._other_epoch(epoch)
        self._check_future(position)
        return position

    def position_here(self, text: str) -> int:
        """As `position`, also for a bookmark of another instance whose marks name a position here (rule F7)."""
        bookmark = parse(text)
        return self.position(text) if bookmark.at.epoch == self._instance.epoch else self._translated(bookmark)

    def age_micros(self, time_micros: int) -> int:
        """The time since a commit."""
        return max(0, self._clock.now_micros() - time_micros)

    def marking(self, topic: Topic) -> Marking:
        """Tells the marks of positions of a topic, to a caller that may see all of it."""
        marking = Marking(self._marks, lambda: [topic])
        marking.sample(self._elapsed())
        return marking

    def marks(self, marking: Marking, position: int) -> str:
        """The end of the bookmark of a position."""
        return marking.tell(position, self._elapsed())

    def _other_epoch(self, epoch: str) -> StoreError:
        return StoreError(
            Reason.BOOKMARK_OTHER_EPOCH,
            f"bookmark: belongs to the journal {epoch}, not to {self._instance.epoch}, and tells no position of this "
            "one that could be used; take a new snapshot",
            field="bookmark",
        )

    def _check_future(self, position: int) -> None:
        last = self._commits.last_sequence
        if position > last:
            raise StoreError(
                Reason.BOOKMARK_IN_FUTURE,
                f"bookmark: names the sequence {position}, and the journal ends at {last}",
                field="bookmark",
            )

    def _resume(self, bookmark: str, topics: list[Topic], *, several: bool) -> int:
        position = self.position(bookmark)
        self._check_floors(position, topics, several=several)
        return position

    def _check_floors(self, position: int, topics: list[Topic], *, several: bool) -> None:
        floor, topic = max((_floor(topic, several=several), topic.name) for topic in topics)
        if position < floor:
            raise StoreError(
                Reason.BOOKMARK_TOO_OLD,
                f"bookmark: names the sequence {position}, and the journal of {topic} begins at {floor + 1}; "
                "take a new snapshot",
                field="bookmark",
                details={
                    "earliest_sequence": str(floor + 1),
                    "earliest_bookmark": self._instance.bookmark(floor),
                },
            )

    # -- figures ------------------------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """The number of subscriptions."""
        return len(self._subscriptions)

    def subscriptions(self) -> Iterator[Subscription]:
        """All subscriptions at this moment."""
        return iter(list(self._subscriptions))


def _sees_all(request: Request, topic: Topic) -> bool:
    """True if a subscriber may see every record of a topic. The keys of other records must not be told (rule A4)."""
    try:
        view = request.view(topic)
    except StoreError:
        return True  # it is told nothing of a topic that does not fit its request
    return view.filter is None or view.filter.granted is None


def _floor(topic: Topic, *, several: bool) -> int:
    """The position below which a topic's journal is incomplete (rule J1).

    A subscription to one topic means this very topic: before its creation there was another topic, perhaps of the same
    name. A subscription to a pattern takes in new topics from their first change on.
    """
    figures = topic.statistics
    return figures.floor_sequence if several else max(figures.floor_sequence, figures.created_sequence)


def _pattern(pattern: str) -> Callable[[str], bool]:
    if len(pattern) > PATTERN_CHARACTERS_MAX:
        raise StoreError(
            Reason.INVALID_ARGUMENT,
            f"topic_pattern: is longer than {PATTERN_CHARACTERS_MAX} characters",
            field="topic_pattern",
        )
    try:
        return matcher(pattern)
    except PatternError as error:
        raise StoreError(
            Reason.INVALID_ARGUMENT, f"topic_pattern: is no regular expression: {error}", field="topic_pattern"
        ) from None
