"""Creating topics: by an administrator, by the configuration file, or by the first publish (rule K1)."""

from __future__ import annotations

from collections.abc import Callable

from sow_server.engine.background import Background
from sow_server.engine.catalog.indexes import NO_INDEXES, altered
from sow_server.engine.catalog.policies_in_force import PoliciesInForce, check_view_settings
from sow_server.engine.catalog.rows import encode_topic, paths_and_steps
from sow_server.engine.catalog.topics import Declaration, Topic, Topics, check_name, check_settings
from sow_server.engine.commit import letter_copies, letter_posting
from sow_server.engine.commit.draft import Draft
from sow_server.engine.core import Core
from sow_server.engine.derived import View, ViewBuild, Views
from sow_server.engine.disk.layout import NEXT_TOPIC_KEY, STATISTICS_KEY, TOPIC_KEY
from sow_server.engine.disk.rocks import META
from sow_server.engine.pending import Pending
from sow_server.engine.stored import StoredStatistics, encode_statistics, u32, unpack_u32
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import OnMissing, TopicSettings
from sow_server.engine.values.policies import Declared, tidy
from sow_server.engine.values.views import ViewDefinition


class TopicCreation:
    """Creates topics; the steps are for the writer and for loads, too."""

    def __init__(
        self,
        core: Core,
        policies: PoliciesInForce,
        background: Background,
        views: Views,
        *,
        covers: Callable[[str], bool],
    ) -> None:
        """`covers`: whether peers send a topic of a name, or are sent it."""
        self.rocks = core.rocks
        self.topics = core.topics
        self.policies = policies
        self.background = background
        self.views = views
        self.covers = covers
        self._commits = core.commits

    def create(
        self,
        name: str,
        declared: Declared,
        *,
        in_config: bool,
        stray: bool = False,
        view: ViewDefinition | None = None,
    ) -> Pending[Topic]:
        """Creates a topic that declares these settings, or a view. TOPIC_NAME_INVALID, TOPIC_EXISTS, INVALID_ARGUMENT;
        for a view TOPIC_NOT_FOUND, EXPRESSION_INVALID, FILTER_INVALID."""
        # The file says itself which of its topics expire, so that it means the same with every release.
        expiring = not in_config and view is None
        step = CreateTopic(self, name, Declaration(declared, in_config, expiring, view))
        return self._commits.run(step, topic="" if stray else name)

    def create_dynamic(self, name: str) -> Pending[Topic]:
        """Creates a topic as the first publish to it does. TOPIC_NAME_INVALID, TOPIC_EXISTS."""
        return self._commits.run(self.dynamic_step(name), topic=name)

    def dynamic_step(self, name: str) -> CreateTopic:
        """The step by which the first publish to a topic creates it."""
        return CreateTopic(self, name, Declaration(expiring=True))


class CreateTopic:
    """The step that creates a topic; answers the topic."""

    def __init__(self, creation: TopicCreation, name: str, declaration: Declaration) -> None:
        self._in = creation
        self._name = name
        self._declaration = declaration
        self._topic: Topic | None = None
        self._letters_wait = False
        self._view: View | None = None

    @property
    def topic(self) -> Topic:
        """The topic as it was staged last."""
        assert self._topic is not None, "it was staged"
        return self._topic

    def stage(self, draft: Draft) -> None:
        """Stages the rows of the topic."""
        name, topics = self._name, self._in.topics
        check_name(name)
        if (found := topics.by_name.get(name)) is not None:
            found.last_use_micros = draft.now  # a declaration announces a use (rule T1)
            raise StoreError(Reason.TOPIC_EXISTS, f"topic: {name} exists already", field="name")
        declaration = self._declaration._replace(settings=tidy(self._declaration.settings))
        check_settings(declaration.settings, topic=name, in_config=declaration.in_config)
        if declaration.view is not None:
            check_view_settings(declaration.settings)
        settings = self._in.policies.resolve(name, declaration).settings
        check_dead_letters(topics, draft, name, settings, declaration)
        topic_id = unpack_u32(self._in.rocks.get(META, NEXT_TOPIC_KEY) or u32(1))
        topic = Topic(
            topic_id,
            name,
            settings,
            create_time_micros=draft.now,
            statistics=StoredStatistics(created_sequence=draft.next_sequence - 1),
            indexes=altered(NO_INDEXES, topic_id, paths_and_steps(settings), keep=False, complete=True),
            declaration=declaration,
        )
        self._view = None
        if topic.view is not None:
            self._view = self._in.views.stage_new(draft, topic, topic.view)
        topic.replicated = topic.view is None and self._in.covers(name)
        meta = draft.batch.puts[META]
        meta[NEXT_TOPIC_KEY] = u32(topic_id + 1)
        meta[TOPIC_KEY + topic.prefix] = encode_topic(topic, settings, topic.indexes, declaration)
        meta[STATISTICS_KEY + topic.prefix] = encode_statistics(topic.statistics)
        self._letters_wait = topic.view is None and self._in.background.stage_delivery(draft, topic)
        self._topic = topic

    def committed(self) -> Topic:
        """The topic, which is there from now on."""
        topic = self.topic
        self._in.topics.created(topic)
        self._in.topics.add(topic)
        if (view := self._view) is not None:
            self._in.views.add(view)
            if view.position is not None:
                self._in.background.run(ViewBuild(self._in.rocks, self._in.views, view))
        if self._letters_wait:
            self._in.background.deliver(topic)
        return topic


def check_dead_letters(
    topics: Topics, draft: Draft, name: str, settings: TopicSettings, declaration: Declaration
) -> None:
    """Checks that the dead letters of a topic's new settings go together with other topics (rule T3)."""
    letter_copies.check(topics, name, settings, declaration.settings, is_view=declaration.view is not None)
    if settings.dead_letter and settings.on_missing is OnMissing.RETAIN:
        letter_posting.undelivered(draft)  # from now on it can be watched
