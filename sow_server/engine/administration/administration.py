"""The door for administrators: creates, alters and deletes topics and policies, and tells which settings are in force.

[1]  A change is queued at once or raises StoreError. Its answer comes once it is on disk.
[2]  A change of settings is in force, on disk and in memory, before its answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from sow_server.engine.administration.altering import AlterTopic, ReleaseTopic
from sow_server.engine.administration.creating import TopicCreation
from sow_server.engine.administration.deleting import DeleteTopic, DeleteUnused
from sow_server.engine.administration.parts import Parts
from sow_server.engine.administration.policy_changes import DeletePolicy, NewPolicies, SetPolicy
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit.commits import Commits
from sow_server.engine.pending import Pending
from sow_server.engine.values.policies import (
    Declared,
    Effective,
    Policies,
    Policy,
    PolicyTarget,
    durable_origins,
)
from sow_server.engine.values.views import ViewDefinition, everything


class Administration:
    """Queues changes of topics and policies."""

    def __init__(self, parts: Parts, commits: Commits, creation: TopicCreation, *, dynamic_topics: bool) -> None:
        self._parts = parts
        self._commits = commits
        self._creation = creation
        self.dynamic_topics = dynamic_topics
        """True if the first publish to a topic creates it (rule K1)."""

    # -- topics -----------------------------------------------------------------------------------------------------

    def create_topic(
        self,
        name: str,
        declared: Declared,
        *,
        in_config: bool = False,
        stray: bool = False,
        view: ViewDefinition | None = None,
    ) -> Pending[Topic]:
        """Creates a topic that declares these settings, or a view (rule V1). TOPIC_NAME_INVALID, TOPIC_EXISTS,
        INVALID_ARGUMENT; for a view TOPIC_NOT_FOUND, EXPRESSION_INVALID, FILTER_INVALID. TOPIC_ELSEWHERE
        unless it is to be a `stray`, as every change of a topic."""
        return self._creation.create(name, declared, in_config=in_config, stray=stray, view=view)

    def alter_topic(
        self,
        name: str,
        change: Callable[[Declared], Declared],
        *,
        in_config: bool = False,
        sees: Callable[[str], bool] = everything,
    ) -> Pending[Topic]:
        """Changes the declared settings of a topic; stamps never change (rule L12). Disabling expiration first expires
        the overdue records, in the same commit. SET_IN_CONFIG unless `in_config`, TOPIC_NOT_FOUND, TOPIC_NOT_EMPTY,
        INVALID_ARGUMENT; TOPIC_HAS_VIEWS with those of the views that `sees` is true for, by their names."""
        step = AlterTopic(self._parts, name, change, in_config=in_config, sees=sees)
        return self._commits.run_in_rounds(step, topic=name)

    def release_topic(self, name: str) -> Pending[Topic]:
        """A topic that has left the configuration file stays, as if an administrator had created it (rule K1)."""
        return self._commits.run_in_rounds(ReleaseTopic(self._parts, name))

    def delete_topic(
        self,
        name: str,
        *,
        force: bool = False,
        in_config: bool = False,
        stray: bool = False,
        sees: Callable[[str], bool] = everything,
    ) -> Pending[int]:
        """Deletes a topic with its records, indexes and journal; answers how many live records it had. PEER_BEHIND
        unless `force` (rule T5); SET_IN_CONFIG unless `in_config`; TOPIC_HAS_VIEWS as `alter_topic`; TOPIC_ELSEWHERE
        unless it is a `stray` (rule C5)."""
        # Overdue records would have their dead letters by now, had the sweep been a moment faster.
        found = self._parts.core.topics.by_name.get(name)
        sweep_first = found is not None and bool(found.settings.dead_letter)
        step = DeleteTopic(self._parts, name, force=force, in_config=in_config, sees=sees)
        return self._commits.run(step, sweep_first=sweep_first, topic="" if stray else name)

    def delete_unused(self, topic: Topic, is_unused: Callable[[Topic, int], bool]) -> Pending[bool]:
        """Deletes a topic if nobody uses it when the writer comes to it: `is_unused` says so, of the topic and that
        time, it has no live records or may have some (rule T1), and peers do not share it (rule T5). Answers whether it
        was deleted."""
        step = DeleteUnused(self._parts, topic, is_unused)
        return self._commits.run(step, sweep_first=bool(topic.settings.dead_letter))

    # -- policies ---------------------------------------------------------------------------------------------------

    @property
    def policies(self) -> Policies:
        """Those in force."""
        return self._parts.policies.current

    def set_policy(self, policy: Policy) -> Pending[Policy]:
        """Sets a policy, in the place of the one of its name, and with it the settings of its topics, in one commit
        (rule T4). INVALID_ARGUMENT."""
        return self._commits.run_in_rounds(SetPolicy(self._parts, policy))

    def delete_policy(self, name: str, *, operator: bool) -> Pending[Policy]:
        """Deletes a policy; answers it. POLICY_NOT_FOUND."""
        return self._commits.run_in_rounds(DeletePolicy(self._parts, name, operator=operator))

    def resolve_all(self) -> Pending[bool] | None:
        """Stores the settings of all topics anew where the server's defaults are others than the last process had;
        None: nowhere."""
        topics, policies = self._parts.core.topics.by_id.values(), self._parts.policies
        if all(policies.effective(topic).settings == topic.settings for topic in topics):
            return None
        return self._commits.run_in_rounds(NewPolicies(self._parts, policies.current))

    def effective(self, topic: Topic) -> Effective:
        """The settings of a topic with their origins."""
        return self._parts.policies.effective(topic)

    def policy_matches(self) -> Counter[tuple[PolicyTarget, str]]:
        """The number of topics, and of durables, that take something from each origin, see `Effective`. Looks at all of
        them."""
        policies, taken = self.policies, Counter[tuple[PolicyTarget, str]]()
        for topic in tuple(self._parts.core.topics.by_id.values()):
            taken.update({(PolicyTarget.TOPICS, origin) for origin in self.effective(topic).origins.values()})
            if policies.of(PolicyTarget.DURABLES):
                for durable in self._parts.durables.of(topic):
                    _, origins = durable_origins(topic.settings, topic.name, durable.name, durable.declared, policies)
                    taken.update({(PolicyTarget.DURABLES, origin) for origin in origins.values()})
        return taken
