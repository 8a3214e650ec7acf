"""From the writer's commits to subscribers: every change once, in order, once it is durable (rules S5, S7).

    [1]  All attached subscribers have been given everything up to `position`.
    [2]  A subscriber that attaches at a position gets everything after it and nothing before.
    [3]  A slice holds the thread for a bounded time; other work of the event loop runs between slices.
    [4]  A filter that may take longer for a change than the event loop can spare is not evaluated here, see `judging`.
    [5]  Memory is bounded: a backlog beyond `BACKLOG_BYTES_MAX` is dropped, and the subscribers read the journal
         instead.

Everything runs on one thread, the event loop's, except `_created`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, NamedTuple

import structlog

from sow_server.engine.catalog.topics import Topic, topic_deleted
from sow_server.engine.commit.observers import Committed
from sow_server.engine.doors import Reads, Writes
from sow_server.engine.stored import Changes, Entry
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.subscriptions.changes import Change, changes_of
from sow_server.subscriptions.live.groups import FollowedTopic, Group, Member, layout
from sow_server.subscriptions.live.judging import Effort, Unjudged, largest_effort
from sow_server.subscriptions.live.slices import BLOCK_OFFERS, HeavyChange, Slice

log = structlog.get_logger(__name__)

BACKLOG_BYTES_MAX: Final = 64 * 2**20
CHANGE_BYTES: Final = 200
"""Memory of a change in the backlog, besides its payload."""

Schedule = Callable[[Callable[[], None]], object]
"""Runs a callable soon, on the dispatcher's thread, such as `loop.call_soon`."""


class _TopicChanges:
    """The changes of one followed topic in a commit."""

    __slots__ = ("_effort", "_largest", "changes", "followed", "handed_over", "previous_values", "size")

    def __init__(
        self,
        followed: FollowedTopic,
        changes: Changes,
        previous_values: Sequence[bytes | None] | None,
        handed_over: Collection[int],
        size: int,
    ) -> None:
        self.followed = followed
        self.changes = changes
        self.previous_values = previous_values
        self.handed_over = handed_over
        self.size = size
        """Bytes of all payloads, and of the records that they replace."""
        self._largest = 0
        self._effort: Effort | None = None

    def is_light(self) -> bool:
        """True if each change is little work for all filters together. Most chunks are little work as a whole, so that
        is checked first."""
        light_size = self.followed.light_size
        if self.size <= light_size:
            return True
        changes, previous_values = self.changes, self.previous_values
        if not self._largest:
            before = [len(value) for value in previous_values or () if value is not None]
            self._largest = max(map(len, changes.payloads)) + max(before, default=0)
        if self._largest <= light_size:
            return True
        effort = self._effort
        if effort is None:
            effort = self._effort = largest_effort(self.followed.topic, changes.payloads, previous_values)
        return self.followed.is_light(effort)


class _FollowedCommit(NamedTuple):
    """The part of a commit that concerns subscribers."""

    last_sequence: int
    chunks: list[_TopicChanges]
    dropped: Sequence[Topic]
    size: int


class Dispatcher:
    """Owns the followed topics with their subscribers, and the way from a commit to their groups."""

    def __init__(
        self,
        reads: Reads,
        writes: Writes,
        schedule: Schedule,
        ticks: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`ticks`: seconds, for the length of slices."""
        self._commits = writes.commits
        self._all_topics = reads.topics
        self._cuts = reads.cuts
        self._ticks = ticks
        self._clock = reads.clock
        self._schedule = schedule
        self._scheduled = False
        self._backlog: deque[_FollowedCommit] = deque()
        self._backlog_bytes = 0
        self._chunk = 0
        self._index = 0
        """Where the next slice continues in the first commit of the backlog."""
        self._unit: HeavyChange | None = None
        """The change in the midst of which the next slice continues; no frames are given out meanwhile."""
        self._topics: dict[int, FollowedTopic] = {}
        self._seen: Mapping[int, Topic] = reads.topics.by_id
        self._incomplete: frozenset[int] = _incomplete(self._seen)
        """The ids of views that were not complete then. Members of several topics join them later (rule V6)."""
        self._several: tuple[Member, ...] = ()
        self._waiting: dict[Member, int] = {}
        """The subscribers that are about to attach, with their positions, in rising order."""
        self._groups: dict[Member, list[tuple[FollowedTopic, Group]]] = {}
        self._dirty: list[Group] = []
        self.position = self.synced = self._commits.synced_sequence
        self.changes_total = 0
        self.unjudged_total = 0
        """How often a change, or an atomic request, was left to reader threads for one filter."""
        self.dropped_total = 0
        """How often the backlog was dropped."""
        reads.topics.created = self._created

    @property
    def mid_change(self) -> bool:
        """True if a slice has ended in the midst of a change, so that rows from before the change may wait."""
        return self._unit is not None

    # -- members ------------------------------------------------------------------------------------------------------

    def register(self, member: Member) -> bool:
        """Makes the store keep the values that a subscriber needs of its topics. True: they are kept only from the next
        staged commit on, so a barrier has to pass before the subscriber may attach."""
        self._adopt()
        barrier = False

        def follow(topics: Collection[Topic]) -> None:
            nonlocal barrier
            for topic in topics:
                if member.follows(topic):
                    barrier = self._register(member, topic) or barrier
            if member.several:
                self._several = (*self._several, member)

        self._commits.follow_topics(follow)
        return barrier

    def _register(self, member: Member, topic: Topic) -> bool:
        """Under the cut lock."""
        followed = self._topics.get(topic.id)
        if followed is None:
            followed = self._topics[topic.id] = FollowedTopic(topic)
            topic.takers = followed.takers
            # The topic may be new. The members that follow several topics are registered here at once, so that none is
            # missed.
            followed.registered.update(dict.fromkeys([other for other in self._several if other.follows(topic)]))
        followed.registered[member] = None
        had = topic.followers, topic.previous_wanted
        self._set_followers(followed)
        # A journaled topic has chunks in any case, and its journal has the previous changes.
        return not topic.settings.journal and (had[0] == 0 or (member.wants_previous and had[1] == 0))

    def _set_followers(self, followed: FollowedTopic) -> None:
        """Under the cut lock."""
        topic = followed.topic
        topic.followers = len(followed.registered)
        topic.previous_wanted = sum(member.wants_previous for member in followed.registered)
        # A subscriber that comes has used the topic; one that goes has used it until now (rule T1).
        topic.last_use_micros = self._clock.now_micros()
        topic.was_followed = True
        if not topic.followers:
            self._all_topics.lost(topic)

    def unregister(self, member: Member) -> None:
        """Removes a subscriber."""
        self.leave(member)

        def unfollow(_: object) -> None:
            self._several = tuple(other for other in self._several if other is not member)
            for topic_id, followed in list(self._topics.items()):
                if member in followed.registered:
                    del followed.registered[member]
                    self._set_followers(followed)
                    if not followed.registered:
                        followed.topic.takers = None
                        del self._topics[topic_id]

        self._commits.follow_topics(unfollow)

    def attach(self, member: Member, at: int) -> None:
        """Gives the subscriber every commit from the position `at` on, which is the store's current one."""
        assert member not in self._waiting, "it is about to attach already"
        assert member not in self._groups, "it is attached already"
        self._waiting[member] = at
        for followed in self._topics.values():
            if member in followed.registered:
                followed.take(member)
        if not self._backlog and at <= self.synced:
            self._join_waiting(self.synced)

    def leave(self, member: Member) -> None:
        """Gives the subscriber nothing until it attaches again."""
        for followed in self._topics.values():
            followed.take_no_more(member)
        self._waiting.pop(member, None)
        for followed, group in self._groups.pop(member, ()):
            followed.leave(member, group)

    def _join_waiting(self, position: int) -> None:
        """Joins the subscribers that attach at or before `position`, up to which everything has been dispatched."""
        while self._waiting:
            member, at = next(iter(self._waiting.items()))
            if at > position:
                return
            self._flush(self.position)  # the rows in the groups came before
            del self._waiting[member]
            self._groups[member] = []
            for followed in list(self._topics.values()):
                if member in followed.registered:
                    self._join(member, followed)
            member.joined(at)

    def _join(self, member: Member, followed: FollowedTopic) -> None:
        group = followed.join(member)
        if group is not None:
            self._groups[member].append((followed, group))

    def _created(self, topic: Topic) -> None:
        """Prepares a topic that is about to appear: on the writer's thread, under the cut lock."""
        several = [member for member in self._several if member.follows(topic)]
        topic.followers = len(several)
        topic.previous_wanted = sum(member.wants_previous for member in several)

    def _adopt(self) -> None:
        """Registers the members that follow several topics with topics that have appeared."""
        if self._seen is self._all_topics.by_id:
            return
        known, self._seen = self._seen.keys() - self._incomplete, self._all_topics.by_id
        self._incomplete = _incomplete(self._seen)

        def follow(topics: Collection[Topic]) -> None:
            for topic in topics:
                if topic.id not in known:
                    for member in self._several:
                        if member.follows(topic):
                            self._register(member, topic)

        self._commits.follow_topics(follow)
        for followed in self._topics.values():
            for member in followed.registered:
                if not member.several or not (member in self._groups or member in self._waiting):
                    continue
                followed.take(member)
                if member in self._groups and followed not in [at for at, _ in self._groups[member]]:
                    self._join(member, followed)

    # -- commits ------------------------------------------------------------------------------------------------------

    def committed(self, commits: Sequence[Committed], synced: int) -> None:
        """The `engine.commit.writer.Follow` of the store."""
        for commit in commits:
            if commit.control:
                self._adopt()
                self._check_layouts()
            chunks: list[_TopicChanges] = []
            size = 0
            for chunk in commit.chunks:
                followed = self._topics.get(chunk.topic.id)
                if followed is not None:
                    payloads, previous_values = chunk.payloads, chunk.previous_values
                    chunk_size = sum(map(len, payloads))
                    if previous_values is not None:
                        chunk_size += sum([len(value) for value in previous_values if value is not None])
                    size += CHANGE_BYTES * len(payloads) + chunk_size
                    changes = chunk.finish(commit.commit_time_micros)
                    chunks.append(_TopicChanges(followed, changes, previous_values, chunk.handed_over, chunk_size))
            if chunks or commit.dropped:
                self._backlog.append(_FollowedCommit(commit.last_sequence, chunks, commit.dropped, size))
                self._backlog_bytes += size
        self.synced = synced
        if self._backlog_bytes > BACKLOG_BYTES_MAX:
            self._drop_backlog()
        if not self._backlog:
            self._advance()
        elif not self._scheduled:
            self._run_slice()  # at once: subscribers hear of it before the loop sends the answers of the same commit

    def _advance(self) -> None:
        """Notes that every durable commit has been dispatched."""
        self.position = self.synced
        self._join_waiting(self.synced)

    def _run_soon(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._schedule(self._run_slice)

    def _run_slice(self) -> None:
        self._scheduled = False
        try:
            self._dispatch_slice()
        except Exception:
            # A fault of ours. Some subscribers may have got the changes, others not, so all have to come back with a
            # bookmark.
            log.exception("dispatch_failed")
            self._backlog.clear()
            self._dirty.clear()
            self._unit = None
            self._backlog_bytes = self._chunk = self._index = 0
            self.position = self.synced
            for followed in list(self._topics.values()):
                self._end_all(followed, _unexpected())

    def _dispatch_slice(self) -> None:
        slice_ = Slice(self._ticks)
        while self._backlog:
            commit = self._backlog[0]
            if self._chunk == self._index == 0 and self._unit is None:
                self._join_waiting(commit.last_sequence - 1)
            self._dispatch_some(commit, slice_)
            if self._chunk == len(commit.chunks):
                self._backlog.popleft()
                self._backlog_bytes -= commit.size
                self._chunk = 0
                self.position = commit.last_sequence
                for topic in commit.dropped:
                    self._flush(self.position)
                    self._topic_deleted(topic)
            if self._backlog and slice_.over:
                break
        if self._dirty and self._unit is None:
            self._flush(self.position)
        if self._backlog:
            self._run_soon()
        else:
            self._advance()

    def _dispatch_some(self, commit: _FollowedCommit, slice_: Slice) -> None:
        """Dispatches a part of a commit. An atomic request is one chunk and is dispatched whole. Its dead letters come
        after it and do not belong to it."""
        now = self._clock.now_micros()
        while self._chunk < len(commit.chunks):
            chunk = commit.chunks[self._chunk]
            changes = chunk.changes
            count = len(changes.keys)
            filters = chunk.followed.asked_count
            in_one_go = not changes.atomic or filters <= 1 or count * filters <= BLOCK_OFFERS
            if self._unit is not None or not in_one_go or not chunk.is_light():
                if not self._dispatch_unit(chunk, slice_, now):
                    return
                stop = self._index
            else:
                start = self._index
                stop = count if changes.atomic else slice_.block(changes.payloads, start, filters)
                if changes.atomic:
                    self._flush(self.position)  # atomic requests have frames of their own
                    slice_.changes += count
                elif self._dirty:
                    self._flush_other_topics(chunk.followed, changes.first_sequence + start - 1)
                self._dispatch(chunk, start, stop, now)
                self.changes_total += stop - start
                self._index = stop
                reached = changes.first_sequence + stop - 1
                if changes.atomic:
                    self._flush(reached, after=self.position, atomic=True)
                self.position = reached
            if stop == count:
                self._chunk += 1
                self._index = 0
            if slice_.over:
                return

    def _dispatch_unit(self, chunk: _TopicChanges, slice_: Slice, now_micros: int) -> bool:
        """Continues with a change, or an atomic request, that may be much work. Returns whether it is finished."""
        followed, changes = chunk.followed, chunk.changes
        unit, position = self._unit, self.position
        if unit is None:
            start = self._index
            stop = len(changes.keys) if changes.atomic else start + 1
            if changes.atomic:
                self._flush(position)
            else:
                self._flush_other_topics(followed, changes.first_sequence + start - 1)
            slice_.bytes += sum(map(len, changes.payloads[start:stop]))
            found = [] if followed.quiet else self._changes(chunk, start, stop)
            unit = self._unit = HeavyChange(followed, found, stop, position)
        try:
            if not unit.ask(slice_, now_micros, self._dirty):
                return False
        except Exception:
            log.exception("dispatch_failed", topic=followed.topic.name)
            self._end_all(followed, _unexpected())
        self._unit = None
        reached = changes.first_sequence + unit.stop - 1
        self._leave_to_readers(unit, after=position, reached=reached, atomic=changes.atomic)
        if changes.atomic:
            self._flush(reached, after=position, atomic=True)
        self.changes_total += unit.stop - self._index
        slice_.changes += unit.stop - self._index
        self._index = unit.stop
        self.position = reached
        return True

    def _leave_to_readers(self, unit: HeavyChange, *, after: int, reached: int, atomic: bool) -> None:
        """Gives the changes to the subscribers whose filters were left to reader threads."""
        if not unit.unjudged:
            return
        groups = {group: watch for watch in unit.unjudged for group in watch.groups.values()}
        others = [group for group in self._dirty if group not in groups]
        self._dirty = [group for group in self._dirty if group in groups]
        self._flush(after)  # the rows from before
        self._dirty = others
        removes = all(change.removes for change in unit.changes)
        topic = unit.followed.topic
        for group, watch in groups.items():
            if removes and not group.wants.leaving:
                continue
            self.unjudged_total += 1
            left = Unjudged(
                topic, watch.matcher, group.wants, unit.changes, after=after, bookmark=reached, atomic=atomic
            )
            for member in list(group.members):
                if not member.push([left]):
                    self.leave(member)

    def _flush_other_topics(self, followed: FollowedTopic, bookmark: int) -> None:
        """Keeps rows of all topics in the order of their sequences (frames [1])."""
        if any(group.several and group.topic is not followed.topic for group in self._dirty):
            self._flush(bookmark)

    def _dispatch(self, chunk: _TopicChanges, start: int, stop: int, now_micros: int) -> None:
        followed, dirty = chunk.followed, self._dirty
        topic = followed.topic
        if followed.quiet:
            return
        try:
            for change in self._changes(chunk, start, stop):
                followed.dispatch(change, now_micros, dirty)
        except Exception:
            # A fault of ours: the subscribers of this topic have to hear of it, the others are not affected.
            log.exception("dispatch_failed", topic=topic.name)
            self._end_all(followed, _unexpected())

    def _changes(self, chunk: _TopicChanges, start: int, stop: int) -> list[Change]:
        topic = chunk.followed.topic
        return changes_of(
            topic,
            chunk.changes,
            start=start,
            stop=stop,
            find=lambda sequence: self._find(topic, sequence),
            previous_values=chunk.previous_values,
            handed_over=chunk.handed_over,
            buried=chunk.followed.hears_burials,
        )

    def _find(self, topic: Topic, sequence: int) -> Entry | None:
        """The previous change of a key, for changes staged just before previous values were wanted."""
        if not topic.settings.journal:
            return None
        cut = self._cuts.journal()
        try:
            return cut.entry(topic, sequence)
        finally:
            cut.close()

    def _flush(self, bookmark: int, *, after: int = 0, atomic: bool = False) -> None:
        """Makes frames of the rows so far, and gives them out."""
        while self._dirty:
            dirty, self._dirty = self._dirty, []
            for group in dirty:
                if not group.rows:
                    continue
                frames = group.take(bookmark=bookmark, after=after, atomic=atomic)
                for member in list(group.members):
                    if not member.push(frames):
                        self.leave(member)

    # -- failures -----------------------------------------------------------------------------------------------------

    def _drop_backlog(self) -> None:
        """Drops the backlog: the filters take longer than the publishers, so everybody continues from the journal.

        This bounds memory [5]."""
        log.warning("dispatch_behind", backlog_bytes=self._backlog_bytes, changes_behind=self.synced - self.position)
        self.dropped_total += 1
        if self._unit is not None:
            self._unit = None
            for group in self._dirty:
                group.forget(self.position)  # all of it comes from the journal
        self._flush(self.position)
        for member in list(self._groups):
            self.leave(member)
            member.detached(self.position)
        for member, at in list(self._waiting.items()):
            if at < self.synced:
                self.leave(member)
                member.joined(at)
                member.detached(at)
        backlog = list(self._backlog)
        self._backlog.clear()
        self._backlog_bytes = self._chunk = self._index = 0
        self.position = self.synced
        for commit in backlog:
            for topic in commit.dropped:
                self._topic_deleted(topic)

    def _topic_deleted(self, topic: Topic) -> None:
        """Ends the subscriptions to a topic; those to several topics just lose it."""
        followed = self._topics.pop(topic.id, None)
        if followed is None:
            return
        error = topic_deleted(topic)
        for member in list(followed.registered):
            if member.several:
                for at, group in self._groups.get(member, []):
                    if at is followed:
                        followed.leave(member, group)
                        self._groups[member].remove((at, group))
                        break
            else:
                self.leave(member)
                member.end(error)

    def _check_layouts(self) -> None:
        """Ends the subscriptions to a topic whose key fields or message type have changed: its filters do not fit any
        more."""
        for followed in list(self._topics.values()):
            if layout(followed.topic) != followed.layout:
                followed.layout = layout(followed.topic)
                topic = followed.topic.name
                message = f"topic: the key fields or the message type of {topic} have changed; take a new snapshot"
                self._end_all(followed, StoreError(Reason.RESYNC_REQUIRED, message, field="topic"))

    def _end_all(self, followed: FollowedTopic, error: StoreError) -> None:
        for member in list(followed.registered):
            self.leave(member)
            member.end(error)

    # -- figures ------------------------------------------------------------------------------------------------------

    @property
    def group_count(self) -> int:
        """The number of groups of attached subscribers."""
        return sum(followed.group_count for followed in list(self._topics.values()))


def _unexpected() -> StoreError:
    return StoreError(Reason.INTERNAL, "an unexpected fault; the server's log has the details")


def _incomplete(topics: Mapping[int, Topic]) -> frozenset[int]:
    return frozenset([topic.id for topic in topics.values() if not topic.complete])
