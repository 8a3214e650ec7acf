"""The subscribers of one topic: equal filters are evaluated once, and equal wants share their frames.

topic ── watch (one filter) ── group (one kind of wants) ── members

[1]  A change is decoded once, and each filter is evaluated once for it, however many subscribers there are.
[2]  A filter that demands certain values of a field is found by the value, and not evaluated for every change.
[3]  A filter without a match costs nothing per change and subscriber.
[4]  A `light` change is offered to all filters at once; for any other change the dispatcher takes turns
     (`concerned`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import structlog

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.stored import BURY, HEADER_BYTES
from sow_server.engine.values.errors import StoreError
from sow_server.engine.values.fields import Entry
from sow_server.filters.cost import Cost
from sow_server.filters.tree import Field
from sow_server.subscriptions.changes import UNKNOWN, Change
from sow_server.subscriptions.frames import ChangeFrame, Row
from sow_server.subscriptions.live import focus
from sow_server.subscriptions.live.judging import (
    DECODING,
    EFFORT_MAX,
    Effort,
    Unjudged,
    cost_of_matching,
    cost_of_rows,
    effort_of,
)
from sow_server.subscriptions.live.matching import FieldIndex, VersionMatcher
from sow_server.subscriptions.request import Wants

log = structlog.get_logger(__name__)


class Member(Protocol):
    """A subscriber, as the dispatcher sees it. Called on the dispatcher's thread, unless a method says otherwise."""

    @property
    def several(self) -> bool:
        """True if the subscriber may follow more than one topic, so that frames of different topics must come in
        order."""

    @property
    def wants_previous(self) -> bool:
        """True if the subscriber needs the records that changes replace."""

    @property
    def conflates(self) -> bool:
        """True if the subscriber may never get a record that is replaced or removed soon after."""

    def follows(self, topic: Topic) -> bool:
        """True if the subscriber is subscribed to a topic. From any thread."""

    def view(self, topic: Topic) -> tuple[VersionMatcher, Wants] | None:
        """The filter and the wants for a topic; None if the topic does not fit the request."""

    def joined(self, position: int) -> None:
        """Tells that it gets everything after `position` from here on."""

    def push(self, frames: Sequence[ChangeFrame | Unjudged]) -> bool:
        """Takes frames, and changes to be judged first. False: there is no room; it has taken nothing and leaves."""

    def detached(self, position: int) -> None:
        """Tells that it gets nothing any more; it has everything up to `position`."""

    def end(self, error: StoreError) -> None:
        """Ends the subscription, once the taken frames are sent."""


class Group:
    """Subscribers that get the same frames of one topic. Owns the rows that are not yet in a frame."""

    __slots__ = ("filter_text", "members", "rows", "several", "topic", "wants")

    def __init__(self, topic: Topic, filter_text: str, wants: Wants, *, several: bool) -> None:
        self.topic = topic
        self.filter_text = filter_text
        self.wants = wants
        self.several = several
        self.members: dict[Member, None] = {}
        self.rows: list[Row] = []

    def forget(self, position: int) -> None:
        """Drops its rows after a position."""
        self.rows = [row for row in self.rows if row.sequence <= position]

    def take(self, *, bookmark: int, after: int, atomic: bool) -> list[ChangeFrame]:
        """Takes its rows out, as frames."""
        rows, self.rows = self.rows, []
        return self.wants.frames(self.topic.name, rows, after=after, bookmark=bookmark, atomic=atomic)


class Watch:
    """One filter on one topic, and the groups that have it."""

    __slots__ = ("cost", "groups", "leaving", "matcher", "points")

    def __init__(self, matcher: VersionMatcher, points: tuple[Field, tuple[Entry, ...]] | None) -> None:
        self.matcher = matcher
        self.cost = cost_of_matching(matcher)
        """The cost of a change, for all of its groups."""
        self.points = points
        self.groups: dict[tuple[Wants, bool], Group] = {}
        self.leaving: list[Group] = []
        """The groups that hear of records which leave the view."""

    def offer(self, change: Change, now_micros: int, dirty: list[Group]) -> None:
        """Gives each group its row of a change; adds to `dirty` the groups that had no row."""
        matcher = self.matcher
        if change.removes:
            if self.leaving and matcher.held(change):
                for group in self.leaving:
                    _add(group, focus.gone(change, group.wants), dirty)
        elif matcher.holds(change):
            for group in self.groups.values():
                row = focus.here(change, group.wants, matcher, now_micros)
                if row is not None:
                    _add(group, row, dirty)
        elif self.leaving and matcher.held_before(change):
            for group in self.leaving:
                _add(group, focus.left(change, group.wants, matcher), dirty)


def _add(group: Group, row: Row, dirty: list[Group]) -> None:
    if not group.rows:
        dirty.append(group)
    group.rows.append(row)


class FollowedTopic:
    """A topic with subscribers. `registered` has all of them, attached at this moment or not."""

    def __init__(self, topic: Topic) -> None:
        self.topic = topic
        self.registered: dict[Member, None] = {}
        self.layout = layout(topic)
        """The settings for which the filters were made."""
        self._watches: dict[str, Watch] = {}
        self._asked: list[Watch] = []
        self._index: FieldIndex[Watch] = FieldIndex()
        self._indexed_leaving: dict[Watch, None] = {}
        self._leaving = 0
        self._elsewhere = 0
        """The number of watches whose subscribers have come from another instance (matching [3])."""
        self._cost = DECODING
        """The cost of a change, for all watches."""
        self.light_size = 0
        """A change of at most this many bytes is little work for all filters together, whatever its content."""
        self._add_cost(Cost())
        self._taking: dict[Member, VersionMatcher] = {}
        self._takers: dict[str, tuple[VersionMatcher, int]] = {}
        """The number of subscribers with each filter that are attached or about to attach (rule L7)."""

    def take(self, member: Member) -> None:
        """Notes that a subscriber gets every commit from now on."""
        view = None if member.conflates or member in self._taking else member.view(self.topic)
        if view is not None:
            matcher = self._taking[member] = view[0]
            self._takers[matcher.text] = matcher, self._takers.get(matcher.text, (matcher, 0))[1] + 1

    def take_no_more(self, member: Member) -> None:
        """Notes that it gets commits no longer."""
        matcher = self._taking.pop(member, None)
        if matcher is not None:
            count = self._takers[matcher.text][1] - 1
            if count:
                self._takers[matcher.text] = matcher, count
            else:
                del self._takers[matcher.text]

    def takers(self, key: bytes, value: bytes, give_up: float) -> int:
        """The `engine.catalog.topics.Takers` of the topic: on the writer's thread, while subscribers come and go."""
        taken = 0
        effort: Effort | None = None
        for matcher, count in list(self._takers.values()):
            if matcher.constant is None:
                if time.perf_counter() >= give_up:
                    break
                effort = effort or effort_of(self.topic, value[HEADER_BYTES:], None)
                if effort.of(cost_of_matching(matcher)) > EFFORT_MAX:
                    continue  # this filter alone could keep all publishers waiting
            try:
                taken += count * matcher.holds_stored(key, value)
            except Exception:
                log.exception("filter_failed", topic=self.topic.name)  # a fault of the filter must not fail the publish
        return taken

    @property
    def group_count(self) -> int:
        """The number of groups of attached subscribers."""
        return sum(len(watch.groups) for watch in list(self._watches.values()))

    def join(self, member: Member) -> Group | None:
        """Puts a subscriber into its group; None if the topic does not fit its request."""
        view = member.view(self.topic)
        if view is None:
            return None
        matcher, wants = view
        watch = self._watches.get(matcher.text)
        if watch is None:
            watch = self._watches[matcher.text] = Watch(matcher, matcher.points(self.topic.key_paths))
            if watch.points is not None:
                self._index.add(*watch.points, watch)
            elif matcher.constant is not False or matcher.elsewhere:
                self._asked.append(watch)
            self._add_cost(watch.matcher.cost)
            self._elsewhere += watch.matcher.elsewhere
        key = wants, member.several
        group = watch.groups.get(key)
        if group is None:
            group = watch.groups[key] = Group(self.topic, matcher.text, wants, several=member.several)
            if wants.leaving:
                watch.leaving.append(group)
                self._leaving += 1
                if watch.points is not None:
                    self._indexed_leaving[watch] = None
            cost = cost_of_rows(wants)
            watch.cost = watch.cost.plus(cost)
            self._add_cost(cost)
        group.members[member] = None
        return group

    def leave(self, member: Member, group: Group) -> None:
        """Takes a subscriber out of its group, and removes groups and watches without members."""
        del group.members[member]
        if group.members:
            return
        watch = self._watches[group.filter_text]
        del watch.groups[group.wants, group.several]
        cost = cost_of_rows(group.wants)
        watch.cost = watch.cost.minus(cost)
        self._add_cost(Cost().minus(cost))
        if group.wants.leaving:
            watch.leaving.remove(group)
            self._leaving -= 1
            if not watch.leaving:
                self._indexed_leaving.pop(watch, None)
        if not watch.groups:
            del self._watches[group.filter_text]
            self._add_cost(Cost().minus(watch.matcher.cost))
            self._elsewhere -= watch.matcher.elsewhere
            if watch.points is not None:
                self._index.remove(*watch.points, watch)
            elif watch in self._asked:
                self._asked.remove(watch)

    @property
    def quiet(self) -> bool:
        """True if nobody is attached."""
        return not self._watches

    @property
    def hears_burials(self) -> bool:
        """True if somebody is told of deletes of records that are not here."""
        return self._elsewhere > 0

    def dispatch(self, change: Change, now_micros: int, dirty: list[Group]) -> None:
        """Offers a change to the filters that it may concern."""
        if change.removes and not self._leaving:
            return
        for watch in self._asked:
            watch.offer(change, now_micros, dirty)
        if self._index and change.kind != BURY:
            for watch in self._found(change):
                watch.offer(change, now_micros, dirty)

    # -- slow filters -------------------------------------------------------------------------------------------------

    def _add_cost(self, cost: Cost) -> None:
        self._cost = total = self._cost.plus(cost)
        self.light_size = (EFFORT_MAX - total.once) // (total.per_byte + total.per_element)

    @property
    def asked_count(self) -> int:
        """The number of filters that every change is offered to."""
        return len(self._asked)

    def is_light(self, effort: Effort) -> bool:
        """True if a change is little work for all filters together."""
        return effort.of(self._cost) <= EFFORT_MAX

    def effort(self, change: Change) -> Effort | None:
        """The work of a change; None: it is little for all filters together."""
        effort = effort_of(self.topic, change.payload, change.previous_value)
        return None if self.is_light(effort) else effort

    def concerned(self, change: Change, effort: Effort | None) -> list[Watch]:
        """The filters to offer a change to. May have more than necessary, as finding the right ones by the values of a
        document takes time, too."""
        if change.removes and not self._leaving:
            return []
        if not self._index or change.kind == BURY:
            return list(self._asked)
        lookup = DECODING.plus(Cost(per_element=self._index.lookup_nanos))
        if effort is not None and effort.of(lookup) > EFFORT_MAX:
            return list(self._watches.values())
        return self._asked + self._found(change)

    def _found(self, change: Change) -> list[Watch]:
        found = self._index.candidates(change)
        if not self._indexed_leaving or change.removes:
            return found
        # A record may leave the view of a filter that its new values do not find.
        before = change.before
        if before is None:
            return found
        left = list(self._indexed_leaving) if before is UNKNOWN else self._index.candidates(before)
        return list(dict.fromkeys(found + left)) if left else found


def layout(topic: Topic) -> tuple[object, ...]:
    """The settings that decide the meaning of keys, fields and filters."""
    settings = topic.settings
    return settings.key, settings.message_type, settings.separator
