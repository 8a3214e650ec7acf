"""The life of a load: it is opened, committed, aborted, and ends. Each change is a step of the writer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import structlog

from sow_server.engine.catalog.topics import Topic, Topics, check_name
from sow_server.engine.commit.draft import Draft
from sow_server.engine.commit.steps import Step
from sow_server.engine.core import Core
from sow_server.engine.disk.layout import NEXT_LOAD_KEY, AttemptCounts, encode_named, named_key, staged_range
from sow_server.engine.disk.rocks import META, STAGING
from sow_server.engine.loads.applying import LoadApplying
from sow_server.engine.loads.model import (
    PARTS_MAX,
    Load,
    LoadContent,
    LoadFigures,
    LoadOptions,
    LoadPart,
    LoadPhase,
    LoadRow,
    load_failed,
)
from sow_server.engine.loads.registry import LoadRegistry
from sow_server.engine.loads.staging import LoadStaging
from sow_server.engine.pending import Pending
from sow_server.engine.stored import u32
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import MICROS, Caps
from sow_server.engine.values.views import view_read_only

log = structlog.get_logger(__name__)

KEPT_MICROS: Final = 86_400 * MICROS
"""How long a load that has ended is remembered, for clients that ask again."""
KEPT_MAX: Final = 1000

CreateTopic = Callable[[str], Pending[Topic]]


class Loads:
    """Owns the loads of a store. Changes go through the writer."""

    def __init__(self, core: Core, options: LoadOptions, *, create_topic: CreateTopic | None) -> None:
        """`create_topic`: creates a topic as the first publish to it would; None where publishes create none."""
        self._core = core
        self._commits = core.commits
        self._topics = core.topics
        self._create_topic = create_topic
        self._clock = core.clock
        self._options = options
        self.registry: Final = LoadRegistry(core)
        self.staging: Final = LoadStaging(core, self.registry, options)
        self.applying: Final = LoadApplying(core, self.registry)

    def open(self, topic_name: str, lease_micros: int, *, owner: str = "") -> Pending[Load]:
        """Opens a load of a topic, which is created where a publish would create it. TOPIC_NOT_FOUND, OVERLOADED."""
        step = OpenLoad(self._core, self.registry, self._options, topic_name, lease_micros, owner)
        if topic_name in self._topics.by_name or self._create_topic is None:
            return self._commits.run(step, topic=topic_name)
        opened: Pending[Load] = Pending()

        def created(result: Topic | StoreError) -> None:
            if isinstance(result, StoreError) and result.reason is not Reason.TOPIC_EXISTS:
                opened.settle(result)
                return
            try:
                self._commits.run(step, topic=topic_name).then(opened.settle)
            except StoreError as error:
                opened.settle(error)

        self._create_topic(topic_name).then(created)
        return opened

    def content(self, load_id: str, parts: Sequence[LoadPart]) -> LoadContent | None:
        """The records that the staged rows of these parts make; None where they may be more by now. Not on the event
        loop. Raises StoreError, RocksError."""
        _check_parts(parts)
        load = self.registry.find(load_id)
        if any(_counts(load, part).staged != part.rows for part in parts):
            return None
        return self.applying.content(load, {part.part: part.attempt for part in parts})

    def commit(self, load_id: str, parts: Sequence[LoadPart], content: LoadContent | None = None) -> Pending[Load]:
        """Commits a load; with the same parts again it answers the load as it is. LOAD_NOT_FOUND, LOAD_INCOMPLETE,
        LOAD_FAILED; LOAD_COMMITTED where other parts were committed; TOPIC_FULL where the `content` exceeds the caps
        of the topic. Without it an upper bound is taken, so that it has to be counted only after such a refusal."""
        _check_parts(parts)
        step = CommitLoad(self.registry, self._topics, load_id, parts, content)
        return self._commits.run(step, topic=self.registry.find(load_id).row.topic)

    def abort(self, load_id: str) -> Pending[Load]:
        """Drops a load and its staged rows. LOAD_NOT_FOUND, also where it was dropped before; LOAD_COMMITTED."""
        return self._commits.run(AbortLoad(self.registry, load_id))

    def fail(self, load: Load, why: str) -> Pending[Load]:
        """Ends a committed load that cannot go on: the rest of its work stays undone."""
        return self._commits.run(FailLoad(self.registry, load, why))

    def upkeep(self) -> None:
        """Aborts loads whose lease has ended, and forgets those that ended long ago. Called every second or so."""
        now = self._clock.now_micros()
        ended = [load for load in self.registry.all() if load.row.end_micros]
        old = ended[: max(0, len(ended) - KEPT_MAX)]
        for load in self.registry.all():
            row = load.row
            if row.phase is LoadPhase.STAGING and load.lease_end_micros <= now:
                self._end(load, EndLapsedLoad(self.registry, load))
            elif row.end_micros and (row.end_micros + KEPT_MICROS <= now or load in old):
                self._end(load, ForgetLoad(self.registry, load))

    def _end(self, load: Load, step: Step[None]) -> None:
        """Queues the end of a load once, however long the writer takes to come to it."""

        def done(_: object) -> None:
            load.ending = False

        if not load.ending:
            load.ending = True
            self._commits.run_quietly(step).then(done)


class OpenLoad:
    """The step that opens a load."""

    def __init__(
        self,
        core: Core,
        registry: LoadRegistry,
        options: LoadOptions,
        topic_name: str,
        lease_micros: int,
        owner: str,
    ) -> None:
        self._owner = owner
        self._registry = registry
        self._rocks = core.rocks
        self._options = options
        self._topics = core.topics
        self._epoch = core.instance.epoch
        self._topic_name = topic_name
        self._lease_micros = lease_micros
        self._opened: tuple[Load, Topic] | None = None

    def stage(self, draft: Draft) -> None:
        """Puts the row of a new load."""
        topic = self._topics.find(self._topic_name)
        if topic.reserved:
            check_name(topic.name)
        if topic.view is not None:
            raise view_read_only(topic.name)
        if any(load.row.topic_id == topic.id for load in self._registry.working()):
            # The other load has published a part of its rows. For this load the rows that follow would be changes by
            # others, and the rows before would not: the topic would end with some of each (loads [4]).
            raise StoreError(
                Reason.OVERLOADED,
                f"topic: a committed load of {topic.name} is being applied; open another one when it has ended",
                field="topic",
                retry_after_micros=MICROS,
            )
        count = sum(load.row.open for load in self._registry.all())
        if count >= self._options.open_max:
            raise StoreError(
                Reason.OVERLOADED,
                f"topic: {count} loads are open, as many as there may be",
                field="topic",
                retry_after_micros=10 * MICROS,
            )
        number = int.from_bytes(self._rocks.get(META, NEXT_LOAD_KEY) or u32(1), "big")
        row = LoadRow(
            number,
            self._epoch,
            topic.id,
            topic.name,
            open_micros=draft.now,
            owner=self._owner,
            begin_sequence=draft.next_sequence - 1,
            begin_version=draft.next_version - 1,
            lease_micros=self._lease_micros,
        )
        draft.batch.puts[META][NEXT_LOAD_KEY] = u32(number + 1)
        self._registry.stage_row(draft, row)
        self._opened = Load(row, draft.now + self._lease_micros), topic

    def committed(self) -> Load:
        """Adds the load."""
        assert self._opened is not None, "a step is committed after it was staged"
        load, topic = self._opened
        topic.last_use_micros = load.row.open_micros
        self._registry.add(load, topic)
        return load


class CommitLoad:
    """The step that commits a load (loads [2])."""

    def __init__(
        self,
        registry: LoadRegistry,
        topics: Topics,
        load_id: str,
        parts: Sequence[LoadPart],
        content: LoadContent | None,
    ) -> None:
        self._registry = registry
        self._topics = topics
        self._load_id = load_id
        self._parts = parts
        self._content = content
        self._named = sorted((part.part, part.attempt) for part in parts)
        self._load: Load | None = None
        self._row: LoadRow | None = None

    def stage(self, draft: Draft) -> None:
        """Checks the parts, and puts the load's row and the attempts that count."""
        self._load = load = self._registry.find(self._load_id)
        self._row = None
        row = load.row
        digest = hashlib.sha256(encode_named(self._named)).hexdigest()
        if row.phase is LoadPhase.FAILED:
            raise load_failed(load, row.failure)
        if row.phase is not LoadPhase.STAGING:
            if row.parts_digest != digest:
                raise StoreError(Reason.LOAD_COMMITTED, "parts: the load is committed with other parts", field="parts")
            return
        staged = 0
        for index, part in enumerate(self._parts):
            counts = _counts(load, part)
            staged += counts.staged
            if counts.staged != part.rows:
                raise StoreError(
                    Reason.LOAD_INCOMPLETE,
                    f"parts[{index}].rows: attempt {part.attempt} at part {part.part} has staged"
                    f" {counts.staged} rows, not {part.rows}",
                    field=f"parts[{index}].rows",
                )
        self._check_caps(load)
        draft.batch.puts[STAGING][named_key(row.number)] = encode_named(self._named)
        self._row = row._replace(
            phase=LoadPhase.APPLYING,
            figures=LoadFigures(staged=staged),
            position=staged_range(row.number)[0],
            parts_digest=digest,
        )
        self._registry.stage_row(draft, self._row)

    def _check_caps(self, load: Load) -> None:
        """Raises StoreError TOPIC_FULL for rows that exceed the caps of the topic by themselves (rule T7)."""
        topic = self._topics.by_id[load.row.topic_id]  # with the topic its loads fail
        content = self._content or _upper_bound(load, self._parts)
        if topic.caps is not None and _exceed(topic.caps, content):
            is_records = content.records > topic.caps.records
            cap, limit = ("max_records", topic.caps.records) if is_records else ("max_stored_bytes", topic.caps.size)
            raise StoreError(
                Reason.TOPIC_FULL,
                f"parts: the staged rows are more than {cap} of topic {topic.name} allows, {limit}; nothing was loaded",
                field="parts",
            )

    def committed(self) -> Load:
        """Takes the load's row over."""
        assert self._load is not None, "a step is committed after it was staged"
        if self._row is not None:
            self._registry.take_over(self._load, self._row)
        return self._load


class AbortLoad:
    """The step that drops a load at the wish of its client."""

    def __init__(self, registry: LoadRegistry, load_id: str) -> None:
        self._registry = registry
        self._load_id = load_id
        self._load: Load | None = None

    def stage(self, draft: Draft) -> None:
        """Removes the load's rows."""
        self._load = load = self._registry.find(self._load_id)
        if load.row.phase is not LoadPhase.FAILED:
            self._registry.check_staging(load)
        self._registry.stage_forget(draft, load)

    def committed(self) -> Load:
        """Forgets the load."""
        assert self._load is not None, "a step is committed after it was staged"
        self._registry.forget(self._load)
        return self._load


class EndLapsedLoad:
    """The step that drops a load whose lease has ended, unless it was renewed or committed meanwhile."""

    def __init__(self, registry: LoadRegistry, load: Load) -> None:
        self._registry = registry
        self._load = load
        self._lapsed = False

    def stage(self, draft: Draft) -> None:
        """Removes the load's rows."""
        load = self._load
        self._lapsed = (
            self._registry.holds(load) and load.row.phase is LoadPhase.STAGING and load.lease_end_micros <= draft.now
        )
        if self._lapsed:
            log.warning("load_lease_ended", load=load.row.id, topic=load.row.topic, staged=load.staged_rows)
            self._registry.stage_forget(draft, load)

    def committed(self) -> None:
        """Forgets the load."""
        if self._lapsed:
            self._registry.forget(self._load)


class ForgetLoad:
    """The step that forgets a load that ended long ago."""

    def __init__(self, registry: LoadRegistry, load: Load) -> None:
        self._registry = registry
        self._load = load

    def stage(self, draft: Draft) -> None:
        """Removes the load's rows."""
        self._registry.stage_forget(draft, self._load)

    def committed(self) -> None:
        """Forgets the load."""
        self._registry.forget(self._load)


class FailLoad:
    """The step that ends a committed load that cannot go on."""

    def __init__(self, registry: LoadRegistry, load: Load, why: str) -> None:
        self._registry = registry
        self._load = load
        self._why = why
        self._row: LoadRow | None = None

    def stage(self, draft: Draft) -> None:
        """Puts the load's row, and removes its staged rows."""
        working = self._load.row.working
        self._row = self._registry.stage_failed(draft, self._load, self._why) if working else None

    def committed(self) -> Load:
        """Takes the load's row over."""
        if self._row is not None:
            self._registry.take_over(self._load, self._row)
        return self._load


def _counts(load: Load, part: LoadPart) -> AttemptCounts:
    return load.attempts.get((part.part, part.attempt), AttemptCounts())


def _upper_bound(load: Load, parts: Sequence[LoadPart]) -> LoadContent:
    """No less than the records that the staged rows make: a key may have several rows, and rows have more bytes."""
    counts = [_counts(load, part) for part in parts]
    return LoadContent(sum(one.staged for one in counts), sum(one.bytes for one in counts))


def _exceed(caps: Caps, content: LoadContent) -> bool:
    return content.records > caps.records or content.size > caps.size


def _check_parts(parts: Iterable[LoadPart]) -> None:
    """Raises StoreError INVALID_ARGUMENT for a part that is named twice, or REQUEST_TOO_LARGE for too many."""
    seen: set[int] = set()
    for index, part in enumerate(parts):
        if part.part in seen:
            raise StoreError(
                Reason.INVALID_ARGUMENT,
                f"parts[{index}].part: {part.part} is named twice",
                field=f"parts[{index}].part",
            )
        seen.add(part.part)
    if len(seen) > PARTS_MAX:
        raise StoreError(
            Reason.REQUEST_TOO_LARGE, f"parts: {len(seen)} are more than the limit of {PARTS_MAX}", field="parts"
        )
