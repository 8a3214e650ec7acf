"""The policies in force, and the settings that they give to topics (rules T2, T4)."""

from __future__ import annotations

from typing import Final

from sow_server.engine.catalog.topics import UNDELIVERED, Declaration, Topic
from sow_server.engine.values.policies import BUILT_IN, Declared, Effective, Policies, refusal, resolve_topic


class PoliciesInForce:
    """Owns the policies. Replaced by the writer's thread, after the commit that stored a change; any thread reads."""

    def __init__(self, policies: Policies, defaults: Declared) -> None:
        """`defaults`: the settings of topics for which neither the topic nor a policy declares a value."""
        self.current = policies
        self._defaults: Final = defaults

    def resolve(self, name: str, declaration: Declaration, policies: Policies | None = None) -> Effective:
        """The settings of a topic with this declaration, under `policies`; None: under those in force."""
        declared, in_config, expiring, view = declaration
        if name == UNDELIVERED:  # the store's own: no policy applies to it
            return resolve_topic(name, declared)
        policies = self.current if policies is None else policies
        found = resolve_topic(name, declared, policies, self._defaults, in_config=in_config, expiring=expiring)
        return found if view is None else of_view(found)

    def effective(self, topic: Topic, policies: Policies | None = None) -> Effective:
        """The settings of a topic with their origins, under `policies`; None: under those in force."""
        return self.resolve(topic.name, topic.declaration, policies)


VIEW_SETTINGS: Final = frozenset(
    {
        "journal",
        "retain_time_micros",
        "retain_bytes",
        "index",
        "max_age_micros",
        "max_bytes",
        "max_entries",
        "backlog_ttl_micros",
        "backlog_quota_bytes",
        "backlog_quota_age_micros",
        "backlog_quota_entries",
        "backlog_action",
        "durable_idle_ttl_micros",
        "idle_ttl_micros",
        "auto_delete",
        "delivery_limit",
    }
)
"""The settings of a view (rule V1): of its journal, its indexes, its durables and its use. Nobody publishes to it."""


def of_view(found: Effective) -> Effective:
    """The settings of a view, whose other settings are built in, whatever a policy declares."""
    kept = {name: value for name, value in found.settings._asdict().items() if name in VIEW_SETTINGS}
    origins = {name: origin if name in VIEW_SETTINGS else "default" for name, origin in found.origins.items()}
    return Effective(BUILT_IN._replace(**kept), origins)


def check_view_settings(declared: Declared) -> None:
    """Raises StoreError INVALID_ARGUMENT for a setting that a view does not have."""
    for name in sorted(declared.keys() - VIEW_SETTINGS):
        raise refusal("settings", name, "is no setting of a view, whose records follow from its source")
