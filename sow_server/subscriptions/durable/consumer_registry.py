"""The consumers of durable subscriptions (rules J2, J6).

    [1]  A durable has at most one consumer. A forced attachment ends the stream of the consumer before.
    [2]  An acknowledgement counts only for the session that was handed the entries, and never goes beyond them.
    [3]  Once every handed-over entry is acknowledged, the position also moves over entries that the filter left out.

`deadlines`, `quotas` and `backlogs` take entries away, or whole durables; `upkeep` lets them act.

Everything runs on the dispatcher's thread, the event loop's, except the reads of a `FloorScan`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Final

from sow_server.engine.catalog.topics import Topic, topic_deleted
from sow_server.engine.doors import Reads, Writes
from sow_server.engine.durables import (
    AttachedDurable,
    ClearedBacklogs,
    Durable,
    DurableEditor,
    Merged,
    RewindTo,
    check_same,
    detached,
    in_use,
    not_found,
)
from sow_server.engine.pending import Pending
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import NEVER
from sow_server.filters.parser import LENGTH_BYTES_MAX
from sow_server.filters.restriction import UNRESTRICTED, Restriction
from sow_server.subscriptions.durable.backlogs import HOLD_MICROS, Backlogs
from sow_server.subscriptions.durable.batches import DurableChanges
from sow_server.subscriptions.durable.consumer import Attachment, Consumer, EndedConsumer, SubscriptionSource
from sow_server.subscriptions.durable.deadlines import Deadlines
from sow_server.subscriptions.durable.entries import Browse, DurableEntries, FirstEntries, FloorScan, ViewOf
from sow_server.subscriptions.durable.holders import Holders, Key
from sow_server.subscriptions.durable.quotas import Quotas
from sow_server.subscriptions.request import Request, StartKind


class Consumers:
    """Owns the attachments of durables."""

    def __init__(
        self,
        reads: Reads,
        writes: Writes,
        source: SubscriptionSource,
        view_of: ViewOf,
        *,
        instance: str = "",
        hold_micros: int = HOLD_MICROS,
    ) -> None:
        """`instance`: the name of this one. `hold_micros`: how long a durable may hold publishers (rule J19)."""
        self.holders: Final = Holders(instance)
        """The consumers of replicated durables, here and elsewhere (rule F15)."""
        self.source: Final = source
        """Makes the inner subscriptions, which count among those of the server."""
        topics = self._topics = reads.topics
        durables = self._durables = reads.durables
        self._commits = writes.commits
        self._clock = reads.clock
        self.entries: Final = DurableEntries(reads, writes, view_of)
        self._changes: Final = DurableChanges(writes.durables)
        self.backlogs: Final = Backlogs(reads, self._changes, self._tell, hold_micros=hold_micros)
        self._quotas = Quotas(reads, self._changes, self._tell)
        self._consumers: dict[Key, Consumer] = {}
        self._sessions: dict[Key, Consumer | EndedConsumer] = {}
        """The last session of each durable, ended or not: it may still acknowledge the entries that it was handed."""
        self.deadlines: Final = Deadlines(
            reads, self._changes, self.holders, self._consumers.keys(), tell=self._tell, gone=self._forget
        )
        self._settled: deque[Topic] = deque(
            [topic for topic in map(topics.by_id.get, durables.topic_ids()) if topic is not None]
        )
        """Topics whose settings, or whose durables' settings, have changed. Any thread may append."""
        topics.watch(lambda topic, settings: self._settled.append(topic) if settings else None)
        self._dropped = 0
        """`Durables.dropped`, the count of deleted topics, up to which sessions have been forgotten."""
        for topic_id in durables.topic_ids():
            topic = topics.by_id.get(topic_id)
            for durable in [] if topic is None else durables.of(topic):
                if durable.attached and topic is not None:
                    # Its consumer ended with the last process.
                    self._changes.submit(_detach(topic, durable.name))

    # -- attaching --------------------------------------------------------------------------------------------------

    def attach(self, request: Request, attachment: Attachment) -> Pending[Consumer]:
        """Attaches a consumer; `request` has passed `request.check`. Raises StoreError at once, or answers it:
        DURABLE_IN_USE, DURABLE_DIFFERS, NO_JOURNAL, …"""
        topic = self._topics.find(request.topic)
        view = request.view(topic)
        text = "" if view.filter is None else view.filter.asked
        key = topic.id, attachment.name
        present = self._consumers.get(key)
        if present is not None and not attachment.force:
            raise in_use(topic, attachment.name)
        self._check_elsewhere(topic, attachment.name, force=attachment.force)
        known = self._durables.get(topic.id, attachment.name)
        if known is None:
            _check_kept(text)
        else:
            check_same(topic, known, text, attachment.declared)
        start, unstartable = None, None
        try:
            start, _ = self.source.start(request, [topic], several=False)
        except StoreError as error:
            if known is None:
                raise
            unstartable = error  # matters only if the durable is gone by the time of the commit
        if present is not None:
            present.end(
                StoreError(
                    Reason.DURABLE_TAKEN_OVER,
                    f"durable: another consumer has taken {attachment.name} of {topic.name} over",
                    field="durable",
                )
            )
        consumer = Consumer(self, request, topic, attachment, self._closed)
        self._consumers[key] = self._sessions[key] = consumer
        self.holders.attach(key, self._clock.now_micros(), force=attachment.force)

        def attach(durables: DurableEditor) -> AttachedDurable:
            if self._topics.by_id.get(topic.id) is not topic:
                raise topic_deleted(topic)
            if unstartable is not None and durables.get(topic, attachment.name) is None:
                raise unstartable
            return durables.attach(
                topic,
                attachment.name,
                filter_text=text,
                start=start,
                declared=attachment.declared,
                expected=attachment.expected,
                bookmarked=request.start.kind is StartKind.BOOKMARK,
                handed=0 if present is None else present.handed,
            )

        def begin(result: AttachedDurable) -> Consumer:
            try:
                consumer.begin(result)
            except StoreError:
                consumer.close()
                raise
            self._quotas.watch(topic)
            self.deadlines.look_at(topic, result.durable)
            self.holders.changed()
            return consumer

        try:
            attached = self._changes.submit(attach)
        except StoreError:
            self._drop(consumer, None)
            raise
        attached.then(lambda result: self._drop(consumer, present) if isinstance(result, StoreError) else None)
        return attached.map(begin)

    def _drop(self, consumer: Consumer, present: Consumer | None) -> None:
        """Undoes a refused attachment. `present`: the consumer that it replaced, which the row still shows as
        attached."""
        key = consumer.topic.id, consumer.name
        if self._consumers.get(key) is consumer:
            del self._consumers[key]
            self.holders.detach(key)
            if present is not None:
                self._changes.submit_quietly(_detach(consumer.topic, consumer.name, present.handed))
        if self._sessions.get(key) is consumer:
            del self._sessions[key]

    def _closed(self, consumer: Consumer) -> None:
        key = consumer.topic.id, consumer.name
        if self._sessions.get(key) is consumer:
            self._sessions[key] = consumer.ended()
        if self._consumers.get(key) is consumer:
            del self._consumers[key]
            self.holders.detach(key)
            self._changes.submit_quietly(_detach(consumer.topic, consumer.name, consumer.handed))

    def _check_elsewhere(self, topic: Topic, name: str, *, force: bool) -> None:
        """Raises StoreError DURABLE_IN_USE if another instance has the consumer of a durable (rule F15)."""
        elsewhere = self.holders.elsewhere((topic.id, name))
        if elsewhere is not None and not force:
            raise in_use(topic, name, at=elsewhere.instance)

    def row(self, consumer: Consumer) -> Durable | None:
        """The current row of a consumer's durable."""
        return self._durables.get(consumer.topic.id, consumer.name)

    @property
    def attached_count(self) -> int:
        """The number of attached consumers."""
        return len(self._consumers)

    def is_attached(self, topic: Topic, name: str) -> bool:
        """True if a consumer is attached to a durable."""
        return (topic.id, name) in self._consumers

    # -- acknowledging ----------------------------------------------------------------------------------------------

    def acknowledge(self, topic: Topic, name: str, session: str, position: int) -> Pending[Durable]:
        """Acknowledges everything up to `position`. Raises StoreError at once, or answers it: DURABLE_NOT_FOUND,
        DURABLE_TAKEN_OVER, DURABLE_DETACHED, BOOKMARK_IN_FUTURE."""
        self._durables.find(topic, name)
        consumer = self._sessions.get((topic.id, name))
        if consumer is None:
            raise detached(topic, name)
        if consumer.session != session:
            raise StoreError(
                Reason.DURABLE_TAKEN_OVER,
                f"session: another consumer has taken {name} of {topic.name} over",
                field="session",
            )
        if position > consumer.sent:
            raise StoreError(
                Reason.BOOKMARK_IN_FUTURE,
                f"bookmark: names the sequence {position}, but {name} was handed entries up to {consumer.sent}",
                field="bookmark",
            )
        told = min(position, consumer.told)
        if position >= consumer.handed and not consumer.snapshot_pending:
            position = max(position, consumer.sent)  # [3]

        def acknowledged(durable: Durable | None) -> Durable:
            if durable is None:
                raise not_found(topic, name)
            return durable

        life = consumer.life
        return self._changes.submit(
            lambda durables: durables.acknowledge(topic, name, position, told=told, life=life)
        ).map(acknowledged)

    def leave(self, topic: Topic, name: str, session: str) -> Durable:
        """The consumer with this session leaves: its stream ends, and another one can attach now. If it has left
        already, nothing happens. Its acknowledgements still count. Raises StoreError DURABLE_NOT_FOUND. Rule: J2."""
        durable, consumer = self._durables.find(topic, name), self._consumers.get((topic.id, name))
        if consumer is not None and consumer.session == session:
            consumer.end(
                StoreError(
                    Reason.DURABLE_DETACHED,
                    f"durable: the consumer of {name} of {topic.name} has left",
                    field="durable",
                )
            )
            self._closed(consumer)
        return durable

    def follow(self, consumer: Consumer) -> None:
        """Moves the position over entries that the filter left out, if every handed-over entry is acknowledged [3]."""
        durable = self.row(consumer)
        if durable is None or consumer.snapshot_pending:
            return
        if consumer.handed <= durable.position < consumer.sent:
            topic, name, before, sent = consumer.topic, consumer.name, durable.position, consumer.sent
            life = durable.life if consumer.life is None else consumer.life
            self._changes.submit_quietly(lambda durables: durables.follow(topic, name, before, sent, life))

    # -- browsing ---------------------------------------------------------------------------------------------------

    def browse(
        self, topic: Topic, name: str, after: int, entries_max: int, *, restriction: Restriction = UNRESTRICTED
    ) -> Browse:
        """Shows the unacknowledged entries of a durable after `after`, without handing them over. `restriction`: the
        part of the topic that the caller may see. Raises StoreError DURABLE_NOT_FOUND."""
        durable, consumer = self._durables.find(topic, name), self._consumers.get((topic.id, name))
        handed = durable.handed if consumer is None else max(durable.handed, consumer.handed)

        def deliveries(sequence: int) -> int:
            return durable.delivered(sequence) + (sequence <= handed)

        upto = min(self._commits.synced_sequence, topic.statistics.last_sequence)
        start = max(after, durable.position)
        return Browse(
            self.entries.replay(topic, durable.filter, restriction), start, max(start, upto), entries_max, deliveries
        )

    # -- the delivery limit -----------------------------------------------------------------------------------------

    def set_aside(self, topic: Topic, name: str, before: int, entries: FirstEntries) -> Pending[bool]:
        """Sets entries aside, if the durable is still at `before` (rule J15); answers whether it was. Raises
        StoreError."""
        sequences, upto = entries
        return self._changes.submit(lambda durables: durables.set_aside(topic, name, before, sequences, upto))

    # -- pinning ----------------------------------------------------------------------------------------------------

    def pin(
        self, topic: Topic, name: str, position: int, *, idle_ttl_micros: int, reader: str = ""
    ) -> Pending[tuple[Durable, bool]]:
        """Pins the entries after a position under a name: a durable without a filter and without a consumer,
        acknowledged up to there. Creates it if needed. Raises StoreError at once, or answers it: DURABLE_IN_USE,
        DURABLE_DIFFERS, NO_JOURNAL, BOOKMARK_TOO_OLD, INVALID_ARGUMENT."""
        if (topic.id, name) in self._consumers:
            raise in_use(topic, name)
        self._check_elsewhere(topic, name, force=False)
        declared = {"idle_ttl_micros": idle_ttl_micros}

        def pin(durables: DurableEditor) -> tuple[Durable, bool]:
            if self._topics.by_id.get(topic.id) is not topic:
                raise topic_deleted(topic)
            return durables.pin(topic, name, position, declared, reader)

        def pinned(result: tuple[Durable, bool]) -> tuple[Durable, bool]:
            durable, created = result
            if created:
                self._quotas.watch(topic)
                self.deadlines.look_at(topic, durable)
            return result

        return self._changes.submit(pin).map(pinned)

    # -- administering ----------------------------------------------------------------------------------------------

    def rewind(self, topic: Topic, name: str, to: RewindTo, *, force: bool) -> Pending[tuple[Durable, int]]:
        """Moves a durable back (rule J6). Raises StoreError at once, or answers it: DURABLE_NOT_FOUND,
        DURABLE_IN_USE, BOOKMARK_TOO_OLD, INVALID_ARGUMENT."""
        self._durables.find(topic, name)
        self._free(topic, name, "rewound", force=force)

        def rewound(result: tuple[Durable, int]) -> tuple[Durable, int]:
            self.deadlines.look_at(topic, result[0])  # the entries ahead of it may be due already (rule J4)
            self.holders.changed()
            return result

        return self._changes.submit(lambda durables: durables.rewind(topic, name, to)).map(rewound)

    def delete(self, topic: Topic, name: str, *, force: bool) -> Pending[Durable]:
        """Deletes a durable. Raises StoreError at once, or answers it: DURABLE_NOT_FOUND, DURABLE_IN_USE."""
        self._durables.find(topic, name)
        self._free(topic, name, "deleted", force=force)

        deleted = self._changes.submit(lambda durables: durables.remove(topic, name))
        deleted.then(lambda _: self.holders.changed())
        return deleted

    def clear(self, topic: Topic, name: str) -> Pending[ClearedBacklogs]:
        """Acknowledges everything; for all durables of the topic if `name` is empty (rule J13). Consumers are detached
        and come back for the next entries. Raises StoreError at once, or answers it: DURABLE_NOT_FOUND."""
        if name:
            self._durables.find(topic, name)
        for topic_id, other in list(self._sessions):
            if topic_id == topic.id and name in ("", other):
                self._free(topic, other, "cleared", force=True)
        return self._changes.submit(lambda durables: durables.clear(topic, name))

    def _free(self, topic: Topic, name: str, what: str, *, force: bool) -> None:
        """Detaches the consumer, if there is one. Raises StoreError DURABLE_IN_USE."""
        key = topic.id, name
        self._check_elsewhere(topic, name, force=force)
        consumer = self._consumers.get(key)
        if consumer is not None:
            if not force:
                raise in_use(topic, name)
            consumer.end(
                StoreError(Reason.DURABLE_DETACHED, f"durable: {name} of {topic.name} has been {what}", field="durable")
            )
            self._consumers.pop(key)
            self.holders.detach(key)
            self._changes.submit(_detach(topic, name, consumer.handed))
        self._sessions.pop(key, None)

    # -- replicated durables: as `ConsumersHere` --------------------------------------------------------------------

    def check_new(self, topic: Topic, filter_text: str) -> None:
        self.entries.check_filter(topic, filter_text)

    def end_here(self, topic: Topic, name: str, error: StoreError, *, for_good: bool) -> None:
        key = topic.id, name
        consumer = self._consumers.pop(key, None)
        if consumer is not None:
            consumer.end(error)
            self.holders.detach(key)
            self._changes.submit_quietly(_detach(topic, name, consumer.handed))
        if for_good:
            self._sessions.pop(key, None)

    def is_stale(self, topic: Topic, name: str) -> bool:
        session, found = self._sessions.get((topic.id, name)), self._durables.get(topic.id, name)
        return session is not None and session.life is not None and (found is None or session.life != found.life)

    def merge(self, run: Callable[[DurableEditor], list[Merged]]) -> Pending[list[Merged]]:
        return self._changes.submit(run)

    def look_at(self, topic: Topic, name: str) -> None:
        found = self._durables.get(topic.id, name)
        if found is not None:
            self._quotas.watch(topic)
            self.deadlines.look_at(topic, found)
        self._tell(topic, [name])

    def used_elsewhere(self, keys: Collection[Key]) -> None:
        self.deadlines.used(keys)

    def _replicate(self, topic: Topic, durable: Durable) -> None:
        """Makes a durable known at the peers whose settings say so by now."""
        if durable.replicated or not self._durables.settings(topic, durable).replicated:
            return
        replicated = self._changes.submit_quietly(lambda durables: durables.replicate(topic, durable.name))
        replicated.then(lambda _: self.holders.changed())

    # -- upkeep -----------------------------------------------------------------------------------------------------

    def upkeep(self) -> int:
        """Acts on deadlines and quotas. Call it about every second, and at the returned time, at which the next
        deadline may come, or once `deadlines.wake` is called. Costs in proportion to the deadlines that have come and
        to the durables whose settings have changed."""
        if self._commits.failure is not None:
            return NEVER
        now, topics, durables = self._clock.now_micros(), self._topics.by_id, self._durables
        while self._settled:
            topic = self._settled.popleft()
            self._quotas.forget(topic)
            if topics.get(topic.id) is topic and durables.count(topic):
                self._quotas.watch(topic)
                for durable in durables.of(topic):
                    self.deadlines.look_at(topic, durable)
                    self._replicate(topic, durable)
        if self._dropped != durables.dropped:
            self._dropped = durables.dropped
            for key in [key for key in self._sessions if key[0] not in topics]:
                self._forget(key)
        self._quotas.look(now)
        self.backlogs.look()
        return self.deadlines.act(now)

    def _forget(self, key: Key) -> None:
        """Forgets the session of a durable that is gone, unless a consumer is attaching and creates it anew."""
        if key not in self._consumers:
            self._sessions.pop(key, None)

    def _tell(self, topic: Topic, names: list[str] | StoreError) -> None:
        """Wakes the consumers of durables whose entries were acknowledged on their behalf, so that they tell of the
        gaps."""
        for name in [] if isinstance(names, StoreError) else names:
            consumer = self._consumers.get((topic.id, name))
            if consumer is not None:
                consumer.wake()

    def scans(self) -> Iterator[FloorScan]:
        """The durables to scan at prune time (rule J2): of each topic the one that holds the floor, if it has a filter
        and no consumer. Run `read` on a reader thread and give its result to `scanned`."""
        synced = self._commits.synced_sequence
        for topic_id in self._durables.topic_ids():
            topic = self._topics.by_id.get(topic_id)
            durable = None if topic is None else self._durables.slowest(topic)
            if topic is None or durable is None or not durable.filter or (topic_id, durable.name) in self._consumers:
                continue
            upto = min(synced, topic.statistics.last_sequence)
            if durable.position < upto:
                yield FloorScan(topic, durable, self.entries.scan(topic, durable, upto))

    def scanned(self, scan: FloorScan, position: int) -> Pending[object]:
        """Moves the position of a scanned durable, if nobody has moved it since."""
        topic, durable = scan.topic, scan.durable
        return self._changes.submit_quietly(
            lambda durables: durables.follow(topic, durable.name, durable.position, position, durable.life)
        )


def _detach(topic: Topic, name: str, handed: int = 0) -> Callable[[DurableEditor], None]:
    return lambda durables: durables.detach(topic, name, handed)


def _check_kept(text: str) -> None:
    """Raises StoreError if the canonical text of a filter could not be parsed again: here later, or at a peer."""
    length = len(text.encode())
    if length > LENGTH_BYTES_MAX:
        raise StoreError(
            Reason.FILTER_INVALID,
            f"filter: a durable keeps the canonical text, with blanks and the values of parameters: {length} bytes, "
            f"more than the limit of {LENGTH_BYTES_MAX}",
            field="filter",
        )
