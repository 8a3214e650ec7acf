"""The policies in force, and the settings that they give to topics (rules T2, T4)."""

from __future__ import annotations

from typing import Final

from sow_server.engine.catalog.topics import UNDELIVERED, Declaration, Topic
from sow_server.engine.values.policies import Declared, Effective, Policies, resolve_topic


class PoliciesInForce:
    """Owns the policies. Replaced by the writer's thread, after the commit that stored a change; any thread reads."""

    def __init__(self, policies: Policies, defaults: Declared) -> None:
        """`defaults`: the settings of topics for which neither the topic nor a policy declares a value."""
        self.current = policies
        self._defaults: Final = defaults

    def resolve(self, name: str, declaration: Declaration, policies: Policies | None = None) -> Effective:
        """The settings of a topic with this declaration, under `policies`; None: under those in force."""
        declared, in_config, expiring = declaration
        if name == UNDELIVERED:  # the store's own: no policy applies to it
            return resolve_topic(name, declared)
        policies = self.current if policies is None else policies
        return resolve_topic(name, declared, policies, self._defaults, in_config=in_config, expiring=expiring)

    def effective(self, topic: Topic, policies: Policies | None = None) -> Effective:
        """The settings of a topic with their origins, under `policies`; None: under those in force."""
        return self.resolve(topic.name, topic.declaration, policies)
