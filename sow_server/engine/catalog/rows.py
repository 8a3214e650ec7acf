"""Rows of topics and policies in `meta`: written in the commits of their changes, read at a start."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sow_server.engine.catalog.indexes import NO_INDEXES, Index, Indexes
from sow_server.engine.catalog.topics import Declaration, Topic
from sow_server.engine.disk.layout import (
    INDEX_KEY,
    OPERATOR_POLICY_KEY,
    POLICY_KEY,
    STATISTICS_KEY,
    TOPIC_KEY,
    index_prefix,
    settings_from_json,
    settings_to_json,
)
from sow_server.engine.disk.rocks import META, Rocks
from sow_server.engine.formats.topic_formats import index_paths
from sow_server.engine.stored import StoredStatistics, decode_statistics, unpack_u32
from sow_server.engine.values.fields import Steps
from sow_server.engine.values.model import TopicSettings
from sow_server.engine.values.policies import (
    Policies,
    Policy,
    declared_from_json,
    declared_of,
    declared_to_json,
    decode_policy,
)
from sow_server.engine.values.views import ViewDefinition


def topic_row(topic: Topic) -> tuple[bytes, bytes]:
    """The key and the value of a topic's row."""
    return TOPIC_KEY + topic.prefix, encode_topic(topic, topic.settings, topic.indexes, topic.declaration)


def encode_topic(topic: Topic, settings: TopicSettings, indexes: Indexes, declaration: Declaration) -> bytes:
    """The value of a topic's row, with new settings."""
    return json.dumps(
        {
            "name": topic.name,
            "in_config": declaration.in_config,
            "dynamic": declaration.expiring,
            "declared": declared_to_json(declaration.settings),
            "create_time_micros": topic.create_time_micros,
            "settings": settings_to_json(settings),
            "indexes": {index.path: index.id for index in indexes.all},
            "next_index": indexes.next_id,
            **({} if declaration.view is None else {"view": asdict(declaration.view)}),
        }
    ).encode()


def load_topics(rocks: Rocks) -> list[Topic]:
    """All topics, with their figures and indexes."""
    cursor = rocks.cursor(META)
    try:
        rows = list(cursor.rows(TOPIC_KEY, TOPIC_KEY + b"\xff"))
    finally:
        cursor.close()
    return [_load_topic(rocks, key[len(TOPIC_KEY) :], value) for key, value in rows]


def _load_topic(rocks: Rocks, prefix: bytes, row: bytes) -> Topic:
    fields = json.loads(row)
    topic_id, settings = unpack_u32(prefix), settings_from_json(fields["settings"])
    figures = rocks.get(META, STATISTICS_KEY + prefix)
    declaration = Declaration(
        # Data of a release without policies have only the settings in force.
        declared_from_json(fields["declared"]) if "declared" in fields else declared_of(settings),
        fields["in_config"],
        # Its old name. Topics that an administrator made with an older release do not have it, and stay as they are.
        expiring=fields.get("dynamic", False),
        view=_load_view(fields.get("view")),
    )
    return Topic(
        topic_id,
        fields["name"],
        settings,
        create_time_micros=fields["create_time_micros"],
        statistics=decode_statistics(figures) if figures else StoredStatistics(),
        # Data of a release without indexes have neither.
        indexes=_load_indexes(
            rocks, topic_id, settings, fields.get("indexes", {}), fields.get("next_index", NO_INDEXES.next_id)
        ),
        declaration=declaration,
    )


def _load_view(fields: Mapping[str, Any] | None) -> ViewDefinition | None:
    if fields is None:
        return None
    named = {name: tuple([(one, text) for one, text in fields[name]]) for name in ("group_by", "select")}
    return ViewDefinition(fields["source"], named["group_by"], named["select"], fields["where"])


def _load_indexes(
    rocks: Rocks, topic_id: int, settings: TopicSettings, ids: Mapping[str, int], next_id: int
) -> Indexes:
    found: list[Index] = []
    for path, steps in paths_and_steps(settings):
        prefix = index_prefix(topic_id, ids[path])
        complete = rocks.get(META, INDEX_KEY + prefix) is None
        found.append(Index(ids[path], path, steps, prefix, complete))
    return Indexes(tuple(found), next_id)


def paths_and_steps(settings: TopicSettings) -> list[tuple[str, Steps]]:
    """The paths of the indexes as texts, and their steps."""
    return list(zip(settings.index, index_paths(settings), strict=True))


def load_policies(rocks: Rocks) -> Policies:
    """All policies."""
    found: list[Policy] = []
    cursor = rocks.cursor(META)
    try:
        for prefix, operator in ((POLICY_KEY, False), (OPERATOR_POLICY_KEY, True)):
            for key, row in cursor.rows(prefix, prefix + b"\xff"):
                found.append(decode_policy(key[len(prefix) :].decode(), row, operator=operator))
    finally:
        cursor.close()
    return Policies(found)
