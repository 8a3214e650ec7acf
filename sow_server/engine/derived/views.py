"""Views, settled in the commit of every change of their sources (rules V2 to V4).

[1]  A commit's change of a view follows from the records of the source that the commit touches: as they are on disk
     before it, and as its batch has them. Whatever has changed them (requests, merges, loads, the sweep, dead letters)
     needs no code for views, and a key that changes twice counts once.
[2]  The rows of a view, its records and their journal are in the batch of that commit. A draft that is dropped leaves
     nothing, in memory neither (view_memory [1]).
[3]  A view that is being built takes the changes of records before its position; those behind it are read later, as
     they are then. Nothing of it is journaled until it is complete (rule V6).
[4]  The least and greatest values of a group are kept in order. When one is lost, the next one is looked up among those
     that were there before the commit and stay.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Final

import structlog

from sow_server.engine.catalog.topics import Topic, Topics
from sow_server.engine.commit.column_changes import Puts, delete_all, put_all
from sow_server.engine.commit.draft import Draft
from sow_server.engine.derived.plans import NOTHING, Entries, Group, PlanOf, Row, ViewPlan
from sow_server.engine.derived.view_memory import ROWS_BYTES_MAX, ROWS_MAX, GroupCache, RowCache
from sow_server.engine.disk.layout import (
    VIEW_KEY,
    ViewCounts,
    decode_view_counts,
    encode_view_counts,
    group_state_prefix,
    ordered_prefix,
    view_counts_key,
)
from sow_server.engine.disk.rocks import META, RECORDS, VIEWS, Cursor, Rocks
from sow_server.engine.stored import (
    HEADER_FAST,
    ORDERED_END,
    RECORD_KEY,
    header_start,
    i64,
    read_ordered,
)
from sow_server.engine.values.errors import OpenError, Reason, StoreError, no_topic
from sow_server.engine.values.model import NEVER
from sow_server.engine.values.views import VIEWS_MAX, ViewDefinition

log = structlog.get_logger(__name__)

READ_BYTES: Final = 16 * 2**20
"""Old records that are read at a time, about."""
_NEVER_BYTES: Final = i64(NEVER)


class View:
    """One view. The writer's thread changes it after a commit."""

    __slots__ = ("counts", "plan", "position", "rows", "source", "topic")

    def __init__(self, topic: Topic, source: Topic, plan: ViewPlan, counts: ViewCounts, position: bytes | None) -> None:
        self.topic: Final = topic
        self.source: Final = source
        self.plan: Final = plan
        self.counts = counts
        self.position = position
        """The store key of the source at which building goes on; None: it is complete."""
        self.rows: Final = RowCache()
        self.show()

    def show(self) -> None:
        """Its topic tells how far it is."""
        self.topic.complete = self.position is None
        self.topic.records_read, self.topic.ungrouped = self.counts


class Views:
    """Owns the views, and settles them. All calls but those of a start come on the writer's thread."""

    def __init__(self, rocks: Rocks, topics: Topics, plan_of: PlanOf | None) -> None:
        """`plan_of`: None where there can be no views."""
        self._rocks = rocks
        self.topics: Final = topics
        self._plan_of = plan_of
        self._cache = GroupCache()
        self._of_source: dict[int, tuple[View, ...]] = {}
        self.seconds = 0.0
        """The time that settling has taken since the start."""
        self.hooks: Final[list[Callable[[Draft], None]]] = []
        """For the writer: empty while there are no views, so that a store without them pays nothing."""
        self._count = 0
        """How many views there are."""

    # -- the views that there are -----------------------------------------------------------------------------------

    def load(self) -> None:
        """Finds the views among the topics of a store that is opened. Raises OpenError."""
        for topic in self.topics.by_id.values():
            if topic.view is None:
                continue
            source = self.topics.by_name.get(topic.view.source)
            if source is None:
                topic.complete = False  # a loss has taken its source (rule X4)
                log.error("view_without_source", topic=topic.name, source=topic.view.source)
                continue
            try:
                plan = self._plan(topic.view, source)
            except StoreError as error:
                raise OpenError(f"the view {topic.name} cannot be computed: {error.message}") from error
            row = self._rocks.get(VIEWS, view_counts_key(topic.prefix))
            counts = ViewCounts() if row is None else decode_view_counts(row)
            self.add(View(topic, source, plan, counts, self._rocks.get(META, VIEW_KEY + topic.prefix)))

    def source_of(self, definition: ViewDefinition) -> Topic:
        """The source of a new view. TOPIC_NOT_FOUND, INVALID_ARGUMENT."""
        source = self.topics.by_name.get(definition.source)
        if source is None or source.reserved:
            missing = no_topic(definition.source)
            message = f"view.source: {missing.message.removeprefix('topic: ')}"
            raise StoreError(missing.reason, message, field="view.source", details=missing.details)
        why = ""
        if source.view is not None:
            why = "is a view, and a view is no source of another one"
        elif len(source.views) >= VIEWS_MAX:
            why = f"has {len(source.views)} views, as many as it may have"
        if why:
            raise StoreError(Reason.INVALID_ARGUMENT, f"view.source: {source.name} {why}", field="view.source")
        return source

    def stage_new(self, draft: Draft, topic: Topic, definition: ViewDefinition) -> View:
        """Stages a new view: complete if its source has no records, else to be built. EXPRESSION_INVALID,
        FILTER_INVALID, and as `source_of`."""
        source = self.source_of(definition)
        plan = self._plan(definition, source)
        position = None
        if draft.statistics.get(source.id, source.statistics).records:
            position = draft.batch.puts[META][VIEW_KEY + topic.prefix] = source.prefix
        return View(topic, source, plan, ViewCounts(), position)

    def _plan(self, definition: ViewDefinition, source: Topic) -> ViewPlan:
        if self._plan_of is None:
            raise StoreError(Reason.INVALID_ARGUMENT, "view: this store has no views", field="view")
        return self._plan_of(definition, source)

    def add(self, view: View) -> None:
        """From the next commit on, the view is settled."""
        source = view.source
        self._of_source[source.id] = (*self._of_source.get(source.id, ()), view)
        source.views = (*source.views, view.topic)
        self._count += 1
        self.hooks[:] = [self.settle]

    def remove(self, topic: Topic) -> None:
        """A topic was deleted, which may be a view."""
        for source_id, views in list(self._of_source.items()):
            kept = tuple([view for view in views if view.topic is not topic])
            if len(kept) < len(views):
                views[0].source.views = tuple([view.topic for view in kept])
                self._count -= 1
                del self._of_source[source_id]
                if kept:
                    self._of_source[source_id] = kept
        if not self._count:
            self.hooks.clear()

    def incomplete(self) -> list[View]:
        """The views that are to be built."""
        return [view for views in self._of_source.values() for view in views if view.position is not None]

    # -- settling ---------------------------------------------------------------------------------------------------

    def settle(self, draft: Draft) -> None:
        """Adds the changes of views to a draft that is otherwise complete [1]."""
        sources = [topic_id for topic_id in draft.statistics if topic_id in self._of_source]
        if not sources:
            return
        begun = time.perf_counter()
        own, draft.journal.source = draft.journal.source, 0  # they are this instance's own changes
        for topic_id in sources:
            views = self._of_source[topic_id]
            keys = _touched(draft, views[0].source)
            puts = draft.batch.puts[RECORDS]
            for view in views:
                wanted = keys if view.position is None else [key for key in keys if key < view.position]  # [3]
                if wanted:
                    gone = self._rows_before(draft, view, wanted)
                    there = [key for key in wanted if key in puts]
                    come = view.plan.rows([key[RECORD_KEY] for key in there], [puts[key] for key in there])
                    self._stage(draft, view, gone, come)
                    self._remember(draft, view, wanted, come)
        draft.journal.source = own
        self.seconds += time.perf_counter() - begun

    def stage_built(self, draft: Draft, view: View, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Stages that records, given by store keys and stored values, are in a view from now on."""
        counts = view.counts._replace(records_read=view.counts.records_read + len(keys))
        come = view.plan.rows([key[RECORD_KEY] for key in keys], values)
        self._stage(draft, view, (), come, counts)
        self._remember(draft, view, keys, come)

    def _rows_before(self, draft: Draft, view: View, store_keys: Sequence[bytes]) -> list[Row]:
        """The rows of records as they were before a commit."""
        found = view.rows.find(store_keys)
        if None not in found:
            return [row for row in found if row]
        rows = [row for row in found if row]
        missing = [key for key, row in zip(store_keys, found, strict=True) if row is None]
        figures = view.source.statistics
        # So many that old records of a large topic do not fill the memory.
        piece = max(16, READ_BYTES * figures.records // (figures.record_bytes or 1))
        for start in range(0, len(missing), piece):
            keys = missing[start : start + piece]
            there = [
                (key[RECORD_KEY], value)
                for key, value in zip(keys, draft.before(keys), strict=True)
                if value is not None
            ]
            rows += view.plan.rows([key for key, _ in there], [value for _, value in there])
        return rows

    def _remember(self, draft: Draft, view: View, store_keys: Sequence[bytes], come: Sequence[Row]) -> None:
        """After the commit, these records bring these rows, or nothing."""
        if view.plan.per_record:
            return
        rows: dict[bytes, Row] = dict.fromkeys(store_keys, NOTHING)
        prefix = view.source.prefix
        rows.update([(prefix + row[-1], row) for row in come])  # type: ignore[operator]  # a key is the last thing in a row
        share = max(1, self._count)
        draft.on_commit.append(partial(view.rows.update, rows, ROWS_MAX // share, ROWS_BYTES_MAX // share))

    def _stage(
        self, draft: Draft, view: View, gone: Sequence[Row], come: Sequence[Row], counts: ViewCounts | None = None
    ) -> None:
        draft.journal.end_request()
        draft.journal.atomic = True  # rule V4
        ungrouped = self._stage_records(draft, view, gone, come)
        draft.journal.end_request()
        before = view.counts if counts is None else counts
        after = before._replace(ungrouped=before.ungrouped + ungrouped)
        if after != view.counts:
            draft.batch.puts[VIEWS][view_counts_key(view.topic.prefix)] = encode_view_counts(after)
            draft.on_commit.append(partial(_counted, view, after))

    def _stage_records(self, draft: Draft, view: View, gone: Sequence[Row], come: Sequence[Row]) -> int:
        """Stages the records of a view and their states; returns by how many records in no group there are more."""
        plan = view.plan
        if plan.per_record:
            computed = plan.compute(gone, come)
            before, after = computed.gone, computed.come
            puts = {key: payload for key, payload in after.items() if before.get(key) != payload}
            _put(draft, view.topic, puts, [key for key in before if key not in after])
            return computed.ungrouped
        grouped = plan.divide(gone, come)
        keys = sorted(grouped.shares)
        groups = self._groups(view, keys)
        settling = _Settling(self._rocks, draft, view)
        give, shares, settle = plan.give, grouped.shares, settling.settle
        try:
            for key in keys:
                group = groups[key]
                settle(key, group, give(group, shares[key]))
        finally:
            settling.close()
        _put(draft, view.topic, settling.documents, settling.emptied)
        kept = {key: group for key, group in groups.items() if group.records}
        draft.on_commit.append(partial(self._cache.keep, view.topic.prefix, kept))
        return grouped.ungrouped

    def _groups(self, view: View, keys: Sequence[bytes]) -> dict[bytes, Group]:
        """Groups by their keys, as they are on disk."""
        groups = self._cache.take(view.topic.prefix, keys)
        missing = [key for key in keys if key not in groups]
        if missing:
            prefix, plan = group_state_prefix(view.topic.prefix), view.plan
            for key, row in zip(missing, self._rocks.multi_get(VIEWS, [prefix + key for key in missing]), strict=True):
                groups[key] = plan.new(key) if row is None else plan.load(key, row)
        return groups


def _touched(draft: Draft, source: Topic) -> list[bytes]:
    """The store keys of the records of a source that a draft changes [1], in order: they are found faster so."""
    puts, deletes = draft.batch.puts[RECORDS], draft.batch.deletes[RECORDS]
    touched: Iterable[bytes] = {*deletes, *puts} if deletes else puts
    if len(draft.statistics) > 1:
        touched = [key for key in touched if key.startswith(source.prefix)]
    return sorted(touched)


class _Settling:
    """Settles the groups of one view in one draft."""

    def __init__(self, rocks: Rocks, draft: Draft, view: View) -> None:
        self._rocks = rocks
        self._prefix = view.topic.prefix
        self._state_prefix = group_state_prefix(view.topic.prefix)
        self._greatest = view.plan.greatest
        self._puts = draft.batch.puts[VIEWS]
        self._deletes = draft.batch.deletes[VIEWS]
        self._cursor: Cursor | None = None
        self.documents: dict[bytes, bytes] = {}
        """Payloads that are others than before, by group key."""
        self.emptied: list[bytes] = []
        """Groups that have lost their last record."""

    def settle(self, key: bytes, group: Group, changes: Sequence[Entries]) -> None:
        """Stages the state of a group that has changed. A document that stays byte for byte is no change (rule V4)."""
        for slot, entries in enumerate(changes):
            if entries.come or entries.gone:
                group.extremes[slot] = self._settle_values(slot, key, group, entries)
        if not group.records:
            self._deletes.append(self._state_prefix + key)
            if group.document:
                self.emptied.append(key)
            return
        document = group.draw()
        if document != group.document:
            self.documents[key] = group.document = document
        self._puts[self._state_prefix + key] = group.dump()

    def _settle_values(self, slot: int, key: bytes, group: Group, entries: Entries) -> bytes:
        """Stages the ordered values of one extreme; returns the extreme."""
        greatest = self._greatest[slot]
        prefix = ordered_prefix(self._prefix, slot, key)
        went = {prefix + place + record_key for place, record_key in entries.gone}
        self._deletes += went
        self._puts.update(dict.fromkeys([prefix + place + record_key for place, record_key in entries.come], b""))
        before = group.extremes[slot]
        if not group.records:
            return b""
        best = max if greatest else min
        places = [place for place, _ in entries.come]
        come = best(places) if places else b""
        if not before or before not in [place for place, _ in entries.gone]:
            return best(before, come) if before and come else before or come
        if come and best(come, before) == come:
            return come  # none that stays is beyond the one that was lost
        stays = self._first_of(prefix, went, greatest)
        return best(stays, come) if stays and come else stays or come

    def _first_of(self, prefix: bytes, went: set[bytes], greatest: bool) -> bytes:
        """The first value that was there before and stays [4]; empty: there is none."""
        if self._cursor is None:
            self._cursor = self._rocks.cursor(VIEWS)
        end = prefix + ORDERED_END
        keys: Iterable[bytes]
        if greatest:
            keys = (key for key, _ in self._cursor.rows_back(end, prefix))
        else:
            keys = self._cursor.keys(prefix, end)
        for key in keys:
            if key not in went:
                _, stop = read_ordered(key, len(prefix), integers_last=greatest)
                return key[len(prefix) : stop]
        return b""

    def close(self) -> None:
        """Frees the rows."""
        if self._cursor is not None:
            self._cursor.close()


def _put(draft: Draft, topic: Topic, payloads: Mapping[bytes, bytes], removed: Sequence[bytes]) -> None:
    """Puts and removes records of a view."""
    prefix = topic.prefix
    if removed:
        there = draft.read([prefix + key for key in removed])
        draft.fetch_heads(list(there))
        delete_all(draft, topic, list(there), list(there.values()))
    if not payloads:
        return
    keys, bodies, count = list(payloads), list(payloads.values()), len(payloads)
    store_keys = list(map(prefix.__add__, keys))
    draft.fetch_heads(store_keys)
    if topic.wants_previous:
        draft.fetch_values(store_keys)
    version, sequence = draft.next_version, draft.next_sequence
    new_heads = list(
        map(
            HEADER_FAST.pack,
            repeat(header_start(draft.origin)),
            map(len, bodies),
            range(version, version + count),
            repeat(draft.now_bytes + _NEVER_BYTES),
            range(sequence, sequence + count),
        )
    )
    put_all(
        draft,
        topic,
        Puts(
            keys,
            store_keys,
            new_heads,
            bodies,
            stamps=[_NEVER_BYTES] * count,
            earliest=NEVER,
            version=range(version, version + count),
            publish_time=draft.now,
            expire_time=NEVER,
            origin=draft.origin,
        ),
    )
    draft.next_version = version + count


def _counted(view: View, counts: ViewCounts) -> None:
    view.counts = counts
    view.show()
