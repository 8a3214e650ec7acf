"""Converts between messages of the administration and the settings of topics, durables and policies.

An unset field is not declared (rule T2). Each check of a field names it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, cast

from google.protobuf.duration_pb2 import Duration

from sow.v1 import admin_pb2, sow_pb2, types_pb2
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.durables.commits import DurableCommits
from sow_server.engine.reading import Counts
from sow_server.engine.values.model import (
    BacklogAction,
    DurableSettings,
    Expiration,
    MessageType,
    OnMissing,
    TopicSettings,
)
from sow_server.engine.values.policies import Declared, Effective, Policy, PolicyTarget, public_name, show, tidy
from sow_server.engine.values.views import Named, ViewDefinition, ViewStatus
from sow_server.services.wire.convert import invalid, timestamp

_NUMBERS: Final[Mapping[str, Mapping[enum.StrEnum, int]]] = {
    "message_type": {
        MessageType.JSON: admin_pb2.MESSAGE_TYPE_JSON,
        MessageType.MSGPACK: admin_pb2.MESSAGE_TYPE_MSGPACK,
        MessageType.FIX: admin_pb2.MESSAGE_TYPE_FIX,
        MessageType.NVFIX: admin_pb2.MESSAGE_TYPE_NVFIX,
        MessageType.BINARY: admin_pb2.MESSAGE_TYPE_BINARY,
    },
    "expiration": {
        Expiration.DISABLED: admin_pb2.EXPIRATION_DISABLED,
        Expiration.ENABLED: admin_pb2.EXPIRATION_ENABLED,
        Expiration.REJECT: admin_pb2.EXPIRATION_REJECT,
    },
    "backlog_action": {
        BacklogAction.HOLD: admin_pb2.BACKLOG_ACTION_HOLD,
        BacklogAction.REJECT: admin_pb2.BACKLOG_ACTION_REJECT,
        BacklogAction.EVICT: admin_pb2.BACKLOG_ACTION_EVICT,
        BacklogAction.CONFLATE: admin_pb2.BACKLOG_ACTION_CONFLATE,
    },
    "on_missing": {
        OnMissing.RETAIN: admin_pb2.ON_MISSING_RETAIN,
        OnMissing.DROP: admin_pb2.ON_MISSING_DROP,
    },
}
"""The numbers of enum values, by setting."""
_WORDS: Final = {name: {number: word for word, number in words.items()} for name, words in _NUMBERS.items()}
_POLICY_TARGETS: Final = {
    admin_pb2.POLICY_TARGET_UNSPECIFIED: PolicyTarget.TOPICS,
    admin_pb2.POLICY_TARGET_TOPICS: PolicyTarget.TOPICS,
    admin_pb2.POLICY_TARGET_DURABLES: PolicyTarget.DURABLES,
}
_TARGET_NUMBERS: Final = {target: number for number, target in _POLICY_TARGETS.items() if number}
_FIELDS: Final = {public_name(field): field for field in TopicSettings._fields}
_UPDATE_PATHS: Final = {**_FIELDS, "retain_time_unlimited": "retain_time_micros"}
_DURABLE_FIELDS: Final = {public_name(field): field for field in DurableSettings._fields}


def settings(message: admin_pb2.TopicSettings, where: str = "settings") -> Declared:
    """The declared settings of a topic: an unset field is not declared (rule T2)."""
    declared = _declared(message, _FIELDS, where)
    if "separator" in declared:
        try:
            declared["separator"] = message.fix_separator.encode("latin-1")
        except UnicodeEncodeError:
            raise invalid(f"{where}.fix_separator", "must be one byte") from None
    return tidy(declared)


def durable_settings(message: types_pb2.DurableSettings, where: str = "settings") -> Declared:
    """The declared settings of a durable."""
    return tidy(_declared(message, _DURABLE_FIELDS, where))


def _declared(
    message: admin_pb2.TopicSettings | types_pb2.DurableSettings, fields: Mapping[str, str], where: str
) -> dict[str, object]:
    declared: dict[str, object] = {}
    set_names = {descriptor.name: value for descriptor, value in message.ListFields()}
    for name, value in set_names.items():
        field = fields.get(name)
        if field is None:
            continue  # retain_time_unlimited
        if isinstance(value, Duration):
            declared[field] = value.ToMicroseconds()
        elif name in _WORDS:
            word = _WORDS[name].get(value)
            if word is None:
                raise invalid(f"{where}.{name}", f"{value} is unknown to this server")
            declared[field] = word
        elif name in ("key", "index"):
            declared[field] = tuple(value)
        else:
            declared[field] = None if value == -1 else value  # -1: unlimited, for sizes and numbers only
    if message.retain_time_unlimited:
        if "retain_time" in set_names:
            raise invalid(f"{where}.retain_time", "is given, and unlimited as well")
        declared["retain_time_micros"] = None
    return declared


def altered(before: Declared, given: Declared, update_paths: Sequence[str]) -> Declared:
    """The declared settings after an update of the fields `update_paths` with `given`. A field that is unset in `given`
    is no longer declared."""
    if not update_paths:
        raise invalid("update_paths", "names no setting to change")
    declared = dict(before)
    for path in update_paths:
        field = _UPDATE_PATHS.get(path)
        if field is None:
            raise invalid("update_paths", f"there is no setting {path!r}; there are {', '.join(sorted(_UPDATE_PATHS))}")
        declared.pop(field, None)
        if field in given:
            declared[field] = given[field]
    return declared


def settings_message(declared: Declared) -> admin_pb2.TopicSettings:
    """Declared settings as a message. For settings in force (`_asdict()`) every default is filled in."""
    message = admin_pb2.TopicSettings()
    separated = declared.get("message_type") in (MessageType.FIX, MessageType.NVFIX)
    _fill(message, {field: value for field, value in declared.items() if field != "separator" or separated})
    return message


def durable_settings_message(declared: Declared) -> types_pb2.DurableSettings:
    """As `settings_message`, for a durable."""
    message = types_pb2.DurableSettings()
    _fill(message, declared)
    return message


def _fill(message: admin_pb2.TopicSettings | types_pb2.DurableSettings, declared: Declared) -> None:
    for field, value in declared.items():
        name = public_name(field)
        if value is None:
            if field == "retain_time_micros":
                message.retain_time_unlimited = True
            elif field in ("retain_bytes", "delivery_limit"):
                setattr(message, name, -1)
        elif field.endswith("_micros"):
            getattr(message, name).FromMicroseconds(value)
        elif name in _NUMBERS:
            setattr(message, name, _NUMBERS[name][cast(enum.StrEnum, value)])
        elif isinstance(value, tuple):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value.decode("latin-1") if isinstance(value, bytes) else value)


def policy(message: admin_pb2.Policy) -> Policy:
    """The policy in a message."""
    target = _POLICY_TARGETS.get(message.applies_to)
    if target is None:
        raise invalid("policy.applies_to", f"{message.applies_to} is not a target of policies of this server")
    for_topics = target is PolicyTarget.TOPICS
    if message.HasField("durable" if for_topics else "topic"):
        other, own = ("durable", "topic") if for_topics else ("topic", "durable")
        raise invalid(f"policy.{other}", f"has no meaning with applies_to = {target.value}; set {own}")
    return Policy(
        message.name,
        message.pattern,
        settings(message.topic, "policy.topic") if for_topics else durable_settings(message.durable, "policy.durable"),
        priority=message.priority,
        target=target,
        operator=message.operator,
    )


def policy_message(found: Policy, matches: int) -> admin_pb2.Policy:
    """A policy, and the number of topics or durables that take a setting from it."""
    message = admin_pb2.Policy(
        name=found.name,
        pattern=found.pattern,
        priority=found.priority,
        applies_to=_TARGET_NUMBERS[found.target],
        operator=found.operator,
        matches=matches,
    )
    if found.target is PolicyTarget.TOPICS:
        message.topic.CopyFrom(settings_message(found.settings))
    else:
        message.durable.CopyFrom(durable_settings_message(found.settings))
    return message


def effective(found: Effective) -> list[admin_pb2.EffectiveSetting]:
    """Every setting in force with its origin, in the order of the contract."""
    numbers = admin_pb2.TopicSettings.DESCRIPTOR.fields_by_name
    names = sorted(_FIELDS, key=lambda name: numbers[name].number)
    return [
        admin_pb2.EffectiveSetting(
            name=name,
            value=show(_FIELDS[name], getattr(found.settings, _FIELDS[name])),
            origin=found.origins[_FIELDS[name]],
        )
        for name in names
    ]


def view(message: admin_pb2.ViewDefinition) -> ViewDefinition:
    """The definition of a view (rule V1). Raises StoreError; the expressions are read by the engine."""
    if not message.source:
        raise invalid("view.source", "names no topic")
    return ViewDefinition(message.source, _named(message.group_by), _named(message.select), message.where)


def _named(expressions: Iterable[sow_pb2.NamedExpression]) -> tuple[Named, ...]:
    return tuple([(each.name, each.expression) for each in expressions])


def view_message(definition: ViewDefinition) -> admin_pb2.ViewDefinition:
    """The same as a message."""
    return admin_pb2.ViewDefinition(
        source=definition.source,
        group_by=_named_messages(definition.group_by),
        select=_named_messages(definition.select),
        where=definition.where,
    )


def _named_messages(expressions: Iterable[Named]) -> list[sow_pb2.NamedExpression]:
    return [sow_pb2.NamedExpression(name=name, expression=text) for name, text in expressions]


def view_status(status: ViewStatus) -> admin_pb2.ViewStatus:
    """The state of a view (rule V6)."""
    return admin_pb2.ViewStatus(
        complete=status.complete,
        records_read=status.records_read,
        groups=status.groups,
        ungrouped=status.ungrouped,
    )


def topic(durables: DurableCommits, found: Topic, counts: Counts | None = None) -> admin_pb2.Topic:
    """A topic; with its figures if `counts` are given."""
    message = admin_pb2.Topic(
        name=found.name,
        settings=settings_message(found.settings._asdict()),
        set_in_config=found.in_config,
        create_time=timestamp(found.create_time_micros),
        indexes=[admin_pb2.IndexStatus(path=index.path, complete=index.complete) for index in found.indexes.all],
    )
    if counts is not None:
        figures = durables.topic_statistics(found)
        message.statistics.CopyFrom(
            admin_pb2.TopicStatistics(
                live_records=counts.live,
                stored_bytes=figures.stored_bytes,
                overdue_records=counts.overdue,
                journal_bytes=figures.journal_bytes,
                journal_entries=figures.journal_entries,
                tombstones=figures.tombstones,
                floor_sequence=figures.floor_sequence,
                durables=figures.durables,
                backlog_bytes=figures.backlog_bytes,
                slowest_durable=figures.slowest_durable,
                backlog_entries=figures.backlog_entries,
                full_refusals=figures.full_refusals,
            )
        )
        if figures.backlog_age_micros is not None:
            message.statistics.backlog_age.FromMicroseconds(figures.backlog_age_micros)
    return message
