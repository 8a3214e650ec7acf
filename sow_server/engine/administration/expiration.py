"""New settings come into force: their part that is about expiration, and about all of a topic (rule L12)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sow_server.engine.administration.parts import Parts
from sow_server.engine.background import Rearming
from sow_server.engine.catalog.indexes import Indexes
from sow_server.engine.catalog.topics import ONLY_WHILE_EMPTY, Topic
from sow_server.engine.commit.draft import Draft
from sow_server.engine.commit.steps import Staged
from sow_server.engine.disk.rocks import EXPIRY
from sow_server.engine.reading import is_rearming
from sow_server.engine.values.model import TopicSettings

REARM_ROUND: Final = 10_000
"""Expiry entries after which a commit takes no further topic that is to be disabled while it is re-armed."""

SWEEP_ROUND: Final = 1_000
"""Expiry entries that a commit visits before the settings come into force, or come with it."""


def stage_expiration(parts: Parts, draft: Draft, changes: Sequence[tuple[Topic, TopicSettings]]) -> Staged:
    """Stages the effect of new settings on expiration: before a topic is disabled, or takes records of another kind,
    its overdue records expire. When it is enabled, its expiry index begins to be filled."""
    emptied = [topic for topic, settings in changes if _expires_first(topic, settings)]
    rearming = [topic for topic in emptied if is_rearming(parts.core.rocks, topic)]
    for topic in rearming:
        # An overdue record without an expiry entry yet would reappear: re-arming is brought to its end first.
        Rearming(parts.core.rocks, topic).stage(draft)
        if len(draft.batch.puts[EXPIRY]) >= REARM_ROUND:
            break
    if rearming:
        return Staged.AGAIN
    if emptied and parts.sweep.leaves_overdue(draft, parts.sweep.stage(draft, SWEEP_ROUND)):
        return Staged.AGAIN
    for topic, settings in changes:
        if settings.acts_on_expiration and not topic.acts:
            parts.background.stage_rearm(draft, topic)
    return Staged.DONE


def take_into_force(parts: Parts, draft: Draft, changes: Sequence[tuple[Topic, TopicSettings, Indexes]]) -> None:
    """Takes new settings into force, after the commit."""
    enabled: list[Topic] = []
    for topic, settings, indexes in changes:
        if settings.acts_on_expiration and not topic.acts:
            enabled.append(topic)
        topic.apply(settings, indexes)
        parts.core.topics.settled(topic)
    parts.core.topics.version += 1
    parts.background.rearm(enabled)


def changes_kind(topic: Topic, settings: TopicSettings) -> bool:
    """True if a topic will take records of another kind: with other keys, or of another type (rule K1)."""
    return any(getattr(settings, name) != getattr(topic.settings, name) for name in ONLY_WHILE_EMPTY)


def _expires_first(topic: Topic, settings: TopicSettings) -> bool:
    """True if overdue records have to go before these settings come: else they would reappear (rule L12), or leave dead
    letters of the wrong kind."""
    return topic.acts and (not settings.acts_on_expiration or changes_kind(topic, settings))
