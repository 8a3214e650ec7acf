"""Administration of topics and the server: arguments into requests, responses into values."""

from __future__ import annotations

from collections.abc import Iterable

from sow.v1 import admin_pb2, sow_pb2
from sow_client._grouping import Expressions, expressions
from sow_client._lifetimes import moment
from sow_client._records import invalid
from sow_client._reports import (
    ClockAccepted,
    Compacted,
    EffectiveSetting,
    IndexStatus,
    Status,
    Topic,
    TopicStatistics,
    ViewDefinition,
    ViewStatus,
)
from sow_client._setting_values import TopicSettings, TopicSettingsArguments
from sow_client._settings import PATHS, one_expiration, settings_of, topic_message, topic_settings


def settings_message(arguments: TopicSettingsArguments) -> admin_pb2.TopicSettings:
    """The settings that are named and not None."""
    arguments = one_expiration(arguments)
    named = [name for name, value in arguments.items() if value is not None]
    return topic_message(topic_settings(arguments), named)


def create_request(
    name: str, values: TopicSettings | None, arguments: TopicSettingsArguments
) -> admin_pb2.CreateTopicRequest:
    """A new topic, from a `TopicSettings` or from keyword arguments."""
    if values is None:
        return admin_pb2.CreateTopicRequest(name=name, settings=settings_message(arguments))
    if arguments:
        raise invalid("settings", "give a TopicSettings or single settings, not both")
    return admin_pb2.CreateTopicRequest(name=name, settings=topic_message(values, values.named()))


def create_view_request(
    name: str,
    source: str,
    where: str | None,
    group_by: Expressions | None,
    select: Expressions | None,
    arguments: TopicSettingsArguments,
) -> admin_pb2.CreateTopicRequest:
    """A new view (rule V1)."""
    if not source:
        raise invalid("source", "names no topic")
    definition = admin_pb2.ViewDefinition(
        source=source,
        group_by=expressions(group_by, "group_by"),
        select=expressions(select, "select"),
        where=where or "",
    )
    return admin_pb2.CreateTopicRequest(name=name, settings=settings_message(arguments), view=definition)


def alter_request(name: str, arguments: TopicSettingsArguments) -> admin_pb2.AlterTopicRequest:
    """A change of the named settings; None: no longer set, so that a policy or the default applies."""
    if not arguments:
        raise invalid("settings", "names no setting to change")
    arguments = one_expiration(arguments)
    return admin_pb2.AlterTopicRequest(
        name=name,
        settings=settings_message(arguments),
        update_paths=[path for argument in arguments for path in PATHS[argument]],
    )


def topic(response: admin_pb2.Topic, warnings: Iterable[str] = ()) -> Topic:
    """A topic as the server has it."""
    return Topic(
        name=response.name,
        settings=settings_of(response.settings),
        set_in_config=response.set_in_config,
        create_time=moment(response.create_time),
        statistics=_statistics(response.statistics) if response.HasField("statistics") else None,
        indexes=tuple(IndexStatus(index.path, index.complete) for index in response.indexes),
        effective=tuple(EffectiveSetting(one.name, one.value, one.origin) for one in response.effective),
        planned_journal_bytes=response.planned_journal_bytes if response.effective else None,
        view=_view(response.view) if response.HasField("view") else None,
        view_status=_view_status(response.view_status) if response.HasField("view_status") else None,
        warnings=tuple(warnings),
    )


def _view(values: admin_pb2.ViewDefinition) -> ViewDefinition:
    return ViewDefinition(values.source, _texts(values.group_by), _texts(values.select), values.where)


def _texts(named: Iterable[sow_pb2.NamedExpression]) -> tuple[str, ...]:
    return tuple([f"{one.expression} AS {one.name}" if one.name else one.expression for one in named])


def _view_status(values: admin_pb2.ViewStatus) -> ViewStatus:
    return ViewStatus(values.complete, values.records_read, values.groups, values.ungrouped)


def _statistics(values: admin_pb2.TopicStatistics) -> TopicStatistics:
    return TopicStatistics(
        live_records=values.live_records,
        stored_bytes=values.stored_bytes,
        overdue_records=values.overdue_records,
        journal_bytes=values.journal_bytes,
        journal_entries=values.journal_entries,
        floor_sequence=values.floor_sequence,
        durables=values.durables,
        backlog_bytes=values.backlog_bytes,
        slowest_durable=values.slowest_durable,
        backlog_entries=values.backlog_entries,
        backlog_age=values.backlog_age.ToTimedelta() if values.HasField("backlog_age") else None,
        tombstones=values.tombstones,
        full_refusals=values.full_refusals,
    )


def status(response: admin_pb2.GetStatusResponse) -> Status:
    """The state of the server."""
    return Status(
        instance=response.instance,
        instance_id=response.instance_id,
        journal_epoch=response.journal_epoch,
        server_version=response.server_version,
        state=response.state,
        failure=response.failure,
        ready_time=moment(response.ready_time),
        clock_time=moment(response.clock_time),
        sweep_paused=response.sweep_paused,
        last_sequence=response.last_sequence,
        live_records=response.live_records,
        overdue_records=response.overdue_records,
        topics=response.topics,
        disk_bytes=response.disk_bytes,
        disk_free_bytes=response.disk_free_bytes if response.HasField("disk_free_bytes") else None,
        disk_size_bytes=response.disk_size_bytes if response.HasField("disk_size_bytes") else None,
    )


def clock_accepted(response: admin_pb2.AcceptClockResponse) -> ClockAccepted:
    """The guarded clock before and after."""
    return ClockAccepted(moment(response.before), moment(response.after))


def compacted(response: admin_pb2.CompactResponse) -> Compacted:
    """Bytes before and after."""
    return Compacted(response.bytes_before, response.bytes_after)
