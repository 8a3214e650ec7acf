"""Changes of policies, each with the settings of all topics that it is about, in one commit (rule T4)."""

from __future__ import annotations

from sow_server.engine.administration.expiration import stage_expiration, take_into_force
from sow_server.engine.administration.parts import Parts
from sow_server.engine.catalog.rows import encode_topic
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit.draft import Draft
from sow_server.engine.commit.steps import Staged
from sow_server.engine.disk.layout import TOPIC_KEY, policy_key
from sow_server.engine.disk.rocks import META
from sow_server.engine.durables import DurableEditor
from sow_server.engine.values.model import TopicSettings
from sow_server.engine.values.policies import Policies, Policy, PolicyTarget, check_policy, encode_policy


class SetPolicy:
    """Sets a policy, in the place of the one of its name, in rounds; answers it."""

    def __init__(self, parts: Parts, policy: Policy) -> None:
        self._parts = parts
        self._policy = policy
        self._new: NewPolicies | None = None

    def stage(self, draft: Draft) -> Staged:
        """Stages the policy, and the settings of its topics. INVALID_ARGUMENT."""
        policy = self._policy
        check_policy(policy)
        self._new = NewPolicies(self._parts, self._parts.policies.current.including(policy))
        staged = self._new.stage(draft)
        if staged is Staged.DONE:
            draft.batch.puts[META][policy_key(policy.name, operator=policy.operator)] = encode_policy(policy)
        return staged

    def committed(self) -> Policy:
        """The policy, which is in force."""
        assert self._new is not None, "it was staged"
        self._new.committed()
        return self._policy


class DeletePolicy:
    """Deletes a policy, in rounds; answers it. Its settings take their next source."""

    def __init__(self, parts: Parts, name: str, *, operator: bool) -> None:
        self._parts = parts
        self._name = name
        self._operator = operator
        self._policy: Policy | None = None
        self._new: NewPolicies | None = None

    def stage(self, draft: Draft) -> Staged:
        """Stages the deletion, and the settings of its topics. POLICY_NOT_FOUND."""
        policies = self._parts.policies.current
        policy = self._policy = policies.find(self._name, operator=self._operator)
        self._new = NewPolicies(self._parts, policies.without(policy))
        staged = self._new.stage(draft)
        if staged is Staged.DONE:
            draft.batch.deletes[META].append(policy_key(policy.name, operator=policy.operator))
        return staged

    def committed(self) -> Policy:
        """The policy that was."""
        assert self._new is not None, "it was staged"
        assert self._policy is not None, "it was staged"
        self._new.committed()
        return self._policy


class NewPolicies:
    """The settings of all topics as some policies make them, in rounds. One commit for all of them: a crash leaves no
    topic behind, and the commit is short, some 50 µs a topic that changes."""

    def __init__(self, parts: Parts, policies: Policies) -> None:
        self._parts = parts
        self._policies = policies
        self._draft: Draft | None = None
        self._changes: list[tuple[Topic, TopicSettings]] = []
        self._touched: set[int] = set()

    def stage(self, draft: Draft) -> Staged:
        """Stages the settings that differ."""
        parts = self._parts
        self._changes = changes = self._find_changes()
        if stage_expiration(parts, draft, changes) is Staged.AGAIN:
            return Staged.AGAIN
        # Retention may be longer from now on: entries that are gone for a durable stay gone.
        by_id, policies, before = parts.core.topics.by_id, self._policies, parts.policies.current
        touched = {topic.id for topic, _ in changes}
        if policies.of(PolicyTarget.DURABLES) != before.of(PolicyTarget.DURABLES):
            touched.update(parts.durables.topic_ids())
        self._touched = touched = touched & by_id.keys()
        with DurableEditor(parts.durables, draft, by_id) as durables:
            for topic_id in touched:
                durables.freeze(by_id[topic_id])
        for topic, settings in changes:
            draft.batch.puts[META][TOPIC_KEY + topic.prefix] = encode_topic(
                topic, settings, topic.indexes, topic.declaration
            )
        self._draft = draft
        return Staged.DONE

    def _find_changes(self) -> list[tuple[Topic, TopicSettings]]:
        parts, policies = self._parts, self._policies
        changed = set(policies) ^ set(parts.policies.current)
        changes: list[tuple[Topic, TopicSettings]] = []
        for topic in parts.core.topics.by_id.values():
            if changed and not any(policy.matches(topic.name) for policy in changed):
                continue
            settings = parts.policies.effective(topic, policies).settings
            if settings != topic.settings:
                changes.append((topic, settings))
        return changes

    def committed(self) -> bool:
        """Takes policies and settings into force."""
        assert self._draft is not None, "it was staged"
        parts = self._parts
        parts.policies.current = self._policies
        # A policy sets nothing that an index depends on.
        take_into_force(parts, self._draft, [(topic, settings, topic.indexes) for topic, settings in self._changes])
        for topic_id in self._touched.difference([topic.id for topic, _ in self._changes]):
            parts.core.topics.settled(parts.core.topics.by_id[topic_id])
        return True
