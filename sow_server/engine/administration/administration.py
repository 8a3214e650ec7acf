"""The door for administrators: creates, alters and deletes topics and policies, and tells which settings are in force.

[1]  A change is queued at once or raises StoreError. Its `done` hears the answer, or the StoreError that refused
     it, once it is on disk.
[2]  A change of settings is in force, on disk and in memory, before its answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from sow_server.engine.administration.altering import AlterTopic, ReleaseTopic
from sow_server.engine.administration.creating import TopicCreation
from sow_server.engine.administration.deleting import DeleteTopic, DeleteUnused
from sow_server.engine.administration.parts import Parts
from sow_server.engine.administration.policies import DeletePolicy, NewPolicies, SetPolicy
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit.commits import Commits
from sow_server.engine.values.errors import StoreError
from sow_server.engine.values.policies import (
    Declared,
    Effective,
    Policies,
    Policy,
    PolicyTarget,
    durable_origins,
)

TopicDone = Callable[[Topic | StoreError], None]
PolicyDone = Callable[[Policy | StoreError], None]


class Administration:
    """Queues changes of topics and policies."""

    def __init__(self, parts: Parts, commits: Commits, creation: TopicCreation, *, dynamic_topics: bool) -> None:
        self._parts = parts
        self._commits = commits
        self._creation = creation
        self.dynamic_topics = dynamic_topics
        """True if the first publish to a topic creates it (rule K1)."""

    # -- topics -----------------------------------------------------------------------------------------------------

    def create_topic(self, name: str, declared: Declared, done: TopicDone, *, in_config: bool = False) -> None:
        """Creates a topic that declares these settings. TOPIC_NAME_INVALID, TOPIC_EXISTS, INVALID_ARGUMENT."""
        self._creation.create(name, declared, done, in_config=in_config)

    def alter_topic(
        self, name: str, change: Callable[[Declared], Declared], done: TopicDone, *, in_config: bool = False
    ) -> None:
        """Changes the declared settings of a topic; stamps never change (rule L12). Disabling expiration first expires
        the overdue records, in the same commit. SET_IN_CONFIG unless `in_config`, TOPIC_NOT_FOUND, TOPIC_NOT_EMPTY,
        INVALID_ARGUMENT."""
        self._commits.run_in_rounds(AlterTopic(self._parts, name, change, in_config=in_config), done)

    def release_topic(self, name: str, done: TopicDone) -> None:
        """A topic that has left the configuration file stays, as if an administrator had created it (rule K1)."""
        self._commits.run_in_rounds(ReleaseTopic(self._parts, name), done)

    def delete_topic(self, name: str, done: Callable[[int | StoreError], None], *, force: bool = False) -> None:
        """Deletes a topic with its records, indexes and journal; answers how many live records it had. PEER_BEHIND
        unless `force` (rule T5)."""
        # Overdue records would have their dead letters by now, had the sweep been a moment faster.
        found = self._parts.core.topics.by_name.get(name)
        sweep_first = found is not None and bool(found.settings.dead_letter)
        self._commits.run(DeleteTopic(self._parts, name, force=force), done, sweep_first=sweep_first)

    def delete_unused(
        self, topic: Topic, is_unused: Callable[[Topic, int], bool], done: Callable[[bool | StoreError], None]
    ) -> None:
        """Deletes a topic if nobody uses it when the writer comes to it: `is_unused` says so, of the topic and that
        time, it has no live records or may have some (rule T1), and peers do not share it (rule T5). Answers whether it
        was deleted."""
        step = DeleteUnused(self._parts, topic, is_unused)
        self._commits.run(step, done, sweep_first=bool(topic.settings.dead_letter))

    # -- policies ---------------------------------------------------------------------------------------------------

    @property
    def policies(self) -> Policies:
        """Those in force."""
        return self._parts.policies.current

    def set_policy(self, policy: Policy, done: PolicyDone) -> None:
        """Sets a policy, in the place of the one of its name, and with it the settings of its topics, in one commit
        (rule T4). INVALID_ARGUMENT."""
        self._commits.run_in_rounds(SetPolicy(self._parts, policy), done)

    def delete_policy(self, name: str, done: PolicyDone, *, operator: bool) -> None:
        """Deletes a policy; answers it. POLICY_NOT_FOUND."""
        self._commits.run_in_rounds(DeletePolicy(self._parts, name, operator=operator), done)

    def resolve_all(self, done: Callable[[bool | StoreError], None]) -> bool:
        """Stores the settings of all topics anew where the server's defaults are others than the last process had.
        Returns whether there are any; `done` hears of it only then."""
        topics, policies = self._parts.core.topics.by_id.values(), self._parts.policies
        if all(policies.effective(topic).settings == topic.settings for topic in topics):
            return False
        self._commits.run_in_rounds(NewPolicies(self._parts, policies.current), done)
        return True

    def effective(self, topic: Topic) -> Effective:
        """The settings of a topic with their origins."""
        return self._parts.policies.effective(topic)

    def policy_matches(self) -> Counter[tuple[PolicyTarget, str]]:
        """How many topics, and durables, take something from each origin, see `Effective`; looks at all of them."""
        policies, taken = self.policies, Counter[tuple[PolicyTarget, str]]()
        for topic in tuple(self._parts.core.topics.by_id.values()):
            taken.update({(PolicyTarget.TOPICS, origin) for origin in self.effective(topic).origins.values()})
            if policies.of(PolicyTarget.DURABLES):
                for durable in self._parts.durables.of(topic):
                    _, origins = durable_origins(topic.settings, topic.name, durable.name, durable.declared, policies)
                    taken.update({(PolicyTarget.DURABLES, origin) for origin in origins.values()})
        return taken
