"""Altering topics: new declared settings, and their effects on journal, durables, indexes and dead letters."""

from __future__ import annotations

from collections.abc import Callable

from sow_server.engine.administration.creating import check_dead_letters
from sow_server.engine.administration.expiration import changes_kind, stage_expiration, take_into_force
from sow_server.engine.administration.parts import Parts
from sow_server.engine.catalog.indexes import Index, Indexes, altered
from sow_server.engine.catalog.policies_in_force import check_view_settings
from sow_server.engine.catalog.rows import encode_topic, paths_and_steps
from sow_server.engine.catalog.topics import ONLY_WHILE_EMPTY, Declaration, Topic, Topics, check_name, check_settings
from sow_server.engine.commit.draft import Draft
from sow_server.engine.commit.steps import Staged
from sow_server.engine.disk.layout import INDEX_KEY, TOPIC_KEY
from sow_server.engine.disk.rocks import INDEXES, JOURNAL, META
from sow_server.engine.durables import DurableEditor
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.policies import Declared, tidy
from sow_server.engine.values.views import everything, has_views


class AlterTopic:
    """Changes the declared settings of a topic, in rounds; answers the topic."""

    def __init__(
        self,
        parts: Parts,
        name: str,
        change: Callable[[Declared], Declared],
        *,
        in_config: bool,
        sees: Callable[[str], bool],
    ) -> None:
        """`sees`: true for a topic that the caller sees, by its name."""
        self._parts = parts
        self._sees = sees
        self._name = name
        self._change = change
        self._in_config = in_config
        self._new: NewSettings | None = None

    def stage(self, draft: Draft) -> Staged:
        """Stages the new settings. SET_IN_CONFIG, TOPIC_NOT_FOUND, TOPIC_NOT_EMPTY, TOPIC_HAS_VIEWS,
        INVALID_ARGUMENT."""
        topic = alterable(self._parts.core.topics, self._name, in_config=self._in_config)
        declared = tidy(self._change(topic.declaration.settings))
        check_settings(declared, topic=self._name, in_config=self._in_config)
        if topic.view is not None:
            check_view_settings(declared)
        expiring = topic.declaration.expiring and not self._in_config
        declaration = Declaration(declared, self._in_config, expiring, topic.view)
        self._new = NewSettings(self._parts, topic, declaration, self._sees)
        return self._new.stage(draft)

    def committed(self) -> Topic:
        """The topic, with its new settings in force."""
        assert self._new is not None, "it was staged"
        return self._new.committed()


class ReleaseTopic:
    """Leaves a topic that has left the configuration file to administrators, in rounds; answers the topic."""

    def __init__(self, parts: Parts, name: str) -> None:
        self._parts = parts
        self._name = name
        self._new: NewSettings | None = None

    def stage(self, draft: Draft) -> Staged:
        """Stages the settings as they are when the file no longer has a say."""
        topic = self._parts.core.topics.find(self._name)
        self._new = NewSettings(self._parts, topic, topic.declaration._replace(in_config=False))
        return self._new.stage(draft)

    def committed(self) -> Topic:
        """The topic."""
        assert self._new is not None, "it was staged"
        return self._new.committed()


class NewSettings:
    """New settings of one topic, as one change in rounds."""

    def __init__(
        self, parts: Parts, topic: Topic, declaration: Declaration, sees: Callable[[str], bool] = everything
    ) -> None:
        self._parts = parts
        self._sees = sees
        self._topic = topic
        self._declaration = declaration
        self._settings = parts.policies.resolve(topic.name, declaration).settings
        self._draft: Draft | None = None
        self._indexes = topic.indexes
        self._letters_wait = False

    def stage(self, draft: Draft) -> Staged:
        """Stages them. TOPIC_NOT_EMPTY, TOPIC_HAS_VIEWS."""
        parts, topic, settings = self._parts, self._topic, self._settings
        check_dead_letters(parts.core.topics, draft, topic.name, settings, self._declaration)
        if topic.views and changes_kind(topic, settings):
            raise has_views(topic.name, seen_views(topic, self._sees), "change its key, type or separator")
        self._check_empty()
        if stage_expiration(parts, draft, [(topic, settings)]) is Staged.AGAIN:
            return Staged.AGAIN
        of_another_kind = changes_kind(topic, settings)
        if of_another_kind:
            self._stage_another_kind(draft)
        journal_ends = of_another_kind or settings.journal != topic.settings.journal
        if journal_ends:
            _stage_journal_ends(draft, topic)
        with DurableEditor(parts.durables, draft, parts.core.topics.by_id) as durables:
            if journal_ends:
                durables.reset(topic)
            else:
                durables.freeze(topic)
        self._letters_wait = of_another_kind and topic.view is None and parts.background.stage_delivery(draft, topic)
        self._indexes = self._stage_indexes(draft)
        draft.batch.puts[META][TOPIC_KEY + topic.prefix] = encode_topic(
            topic, settings, self._indexes, self._declaration
        )
        self._draft = draft
        return Staged.DONE

    def _check_empty(self) -> None:
        topic, settings = self._topic, self._settings
        for name in ONLY_WHILE_EMPTY:
            if getattr(settings, name) != getattr(topic.settings, name) and self._parts.core.cuts.count(topic):
                raise StoreError(
                    Reason.TOPIC_NOT_EMPTY,
                    f"{name}: changes only while the topic is empty",
                    field=f"settings.{name}",
                )

    def _stage_another_kind(self, draft: Draft) -> None:
        topic = self._topic
        if draft.figures(topic).records:
            raise StoreError(
                Reason.TOPIC_NOT_EMPTY, "topic: is not empty any more: dead letters have just come to it", field="name"
            )
        self._parts.replicas.tombstones.stage_refound(draft, topic)
        self._parts.loads.registry.stage_fail_all(draft, topic, "the topic now has records of another kind")

    def _stage_indexes(self, draft: Draft) -> Indexes:
        """Stages the change of the topic's indexes. The entries of one that goes are removed. One that comes is
        complete where no record is stored; otherwise it is to be built. Returns the indexes as they will be."""
        topic, settings, before = self._topic, self._settings, self._topic.indexes
        stored = draft.statistics.get(topic.id, topic.statistics).records
        # A document that is read differently has other entries. Overdue ones may be there, though none is live.
        keep = (settings.message_type, settings.separator) == (topic.settings.message_type, topic.settings.separator)
        after = altered(before, topic.id, paths_and_steps(settings), keep=keep, complete=stored == 0)
        for gone in _missing(before, after):
            draft.batch.ranges.append((INDEXES, gone.prefix, gone.stop))
            draft.batch.deletes[META].append(INDEX_KEY + gone.prefix)
        for new in _missing(after, before):
            if not new.complete:
                draft.batch.puts[META][INDEX_KEY + new.prefix] = topic.prefix
        return after

    def committed(self) -> Topic:
        """The topic, with the settings in force."""
        assert self._draft is not None, "it was staged"
        topic, background, before = self._topic, self._parts.background, self._topic.indexes
        topic.declaration = self._declaration
        take_into_force(self._parts, self._draft, [(topic, self._settings, self._indexes)])
        if self._letters_wait:
            background.deliver(topic)
        for new in _missing(self._indexes, before):
            if not new.complete:
                background.build(topic, new)
        return topic


def seen_views(topic: Topic, sees: Callable[[str], bool]) -> list[str]:
    """The names of the views of a topic that a caller sees."""
    return [view.name for view in topic.views if sees(view.name)]


def alterable(topics: Topics, name: str, *, in_config: bool) -> Topic:
    """A topic that may be altered or deleted; `in_config`: by the configuration file. Raises StoreError."""
    topic = topics.find(name)
    if topic.reserved:
        check_name(name)
    if topic.in_config and not in_config:
        raise StoreError(
            Reason.SET_IN_CONFIG,
            f"topic: {name} is declared in the configuration file; change it there",
            field="name",
        )
    return topic


def _stage_journal_ends(draft: Draft, topic: Topic) -> None:
    """Drops the journal of a topic. Changes that are not journaled are as good as discarded: nobody may read across the
    gap (rule J1). Nor may anybody read changes whose payloads and keys are of another kind."""
    for chunk in draft.journal.chunks:
        if chunk.topic is topic:
            chunk.journaled = False
    draft.batch.ranges.append((JOURNAL, topic.prefix, topic.stop))
    draft.statistics[topic.id] = draft.figures(topic).trimmed(draft.next_sequence - 1)


def _missing(indexes: Indexes, among: Indexes) -> list[Index]:
    """The indexes that are not among the others."""
    ids = {index.id for index in among.all}
    return [index for index in indexes.all if index.id not in ids]
