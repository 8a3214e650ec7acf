"""Durable subscriptions and policies (rules J1 to J17, T2): arguments into requests, responses into values. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Final, cast, get_args

import msgspec

from sow.v1 import admin_pb2, sow_pb2
from sow_client import _admin, _lifetimes, _reads
from sow_client._cells import in_cell
from sow_client._change_frames import changes_of, prefix_of
from sow_client._parameters import Parameters
from sow_client._records import EARLIEST, Change, Start, Ttl, datetime_of, invalid
from sow_client._reports import Browsed, Durable, DurableConsumer, DurableFigures, Policy, PolicyTargetName, Rewound
from sow_client._setting_values import DurableSettingsArguments, SettingValue, TopicSettingsArguments
from sow_client._settings import (
    NOT_IN_POLICIES,
    durable_message,
    durable_settings,
    durable_settings_of,
    durable_values,
    topic_values,
)

BROWSE_ENTRIES_MAX: Final = 10_000
"""The most entries of one call; the server's limit."""

# ---- durable subscriptions ----


def durable_request(
    topic: str,
    name: str,
    filter_text: str | None,
    parameters: Parameters | None = None,
    *,
    start: Start | None,
    force: bool,
    oof: bool,
    changes: bool,
    settings: DurableSettingsArguments,
    progress: Ttl | None,
    select: Iterable[str] | None,
    exclude: Iterable[str] | None,
    batch_size: int,
) -> sow_pb2.SubscribeRequest:
    """The consumer of a durable subscription."""
    request = _reads.subscribe_request(
        topic,
        filter_text,
        parameters,
        topic_pattern=None,
        sow=False,
        oof=oof,
        delta=False,
        changes=changes,
        start=start,
        conflation=None,
        progress=progress,
        empty_deltas=False,
        select=select,
        exclude=exclude,
        batch_size=batch_size,
    )
    request.durable.name = _named(name)
    request.durable.force = force
    message = durable_message(durable_settings(settings))
    if message.ByteSize():
        request.durable.settings.CopyFrom(message)
    return request


def _named(name: str) -> str:
    if not name:
        raise invalid("name", "is empty")
    return name


def rewind_request(topic: str, name: str, to: Start, *, force: bool) -> sow_pb2.RewindRequest:
    """Moves a durable subscription (rule J6)."""
    request = sow_pb2.RewindRequest(topic=topic, durable=_named(name), force=force)
    match to:
        case datetime():
            request.time_micros = _lifetimes.zoned_micros(to, "to")
        case "earliest":  # no bookmark looks like it
            request.earliest = True
        case str():
            request.bookmark = to
        case _:
            if to is not EARLIEST:
                raise invalid("to", f"a {type(to).__name__} is not a bookmark, a datetime or EARLIEST")
            request.earliest = True
    return request


def browse_request(topic: str, name: str, *, entries_max: int, after: str | None) -> sow_pb2.BrowseDurableRequest:
    """The request for unacknowledged entries."""
    if not 1 <= entries_max <= BROWSE_ENTRIES_MAX:
        raise invalid("entries_max", f"{entries_max} is not between 1 and {BROWSE_ENTRIES_MAX}")
    return sow_pb2.BrowseDurableRequest(
        topic=topic, durable=_named(name), max_entries=entries_max, after_bookmark=after or ""
    )


class Browsing:
    """The answers to one call, as they come."""

    def __init__(self) -> None:
        self._entries: list[Change] = []

    def feed(self, response: sow_pb2.BrowseDurableResponse) -> Browsed | None:
        """Takes an answer. Returns all entries with the last one, else None."""
        if response.bookmark:
            return Browsed(tuple(self._entries), response.bookmark, response.complete)
        changes, counted = changes_of(response.changes, prefix_of(response.changes.bookmark)), response.changes
        if not counted.delivery_count:
            changes = [msgspec.structs.replace(change, delivery_count=0) for change in changes]
        self._entries += changes
        return None


def rewound(response: sow_pb2.RewindResponse) -> Rewound:
    """The new position."""
    return Rewound(response.bookmark, response.unacknowledged_entries)


def durable(response: admin_pb2.Durable, cell: str = "") -> Durable:
    """A durable subscription as the server has it. `cell`: in front of the id of its consumer."""
    return Durable(
        topic=response.topic,
        name=response.name,
        filter=response.filter,
        acknowledged=response.acknowledged,
        earliest=response.earliest,
        attached=response.attached,
        create_time=_lifetimes.moment(response.create_time),
        last_use_time=_lifetimes.moment(response.last_use_time),
        settings=durable_settings_of(response.settings),
        figures=_figures(response.figures) if response.HasField("figures") else None,
        replicated=response.replicated,
        consumer_at=response.consumer_at,
        consumer=_consumer(response.consumer, cell) if response.HasField("consumer") else None,
        pin=response.pin,
        owner=response.owner,
        reader=response.reader,
    )


def _consumer(message: admin_pb2.DurableConsumer, cell: str) -> DurableConsumer:
    return DurableConsumer(
        in_cell(cell, message.subscription) if message.subscription else "",
        message.identity,
        message.address,
        datetime_of(message.since_micros),
        message.position,
        message.behind,
        message.queued_bytes,
    )


def _figures(values: admin_pb2.DurableFigures) -> DurableFigures:
    age = values.oldest_unacknowledged_age.ToTimedelta() if values.HasField("oldest_unacknowledged_age") else None
    return DurableFigures(
        total_entries=values.total_entries,
        total_bytes=values.total_bytes,
        unacknowledged_entries=values.unacknowledged_entries,
        unacknowledged_bytes=values.unacknowledged_bytes,
        oldest_unacknowledged_age=age,
        exact=values.exact,
        set_aside_entries=values.set_aside_entries,
    )


def describe_request(topic: str, name: str, *, exact: bool) -> admin_pb2.DescribeDurableRequest:
    """One durable subscription."""
    return admin_pb2.DescribeDurableRequest(topic=topic, name=_named(name), exact=exact)


def delete_request(topic: str, name: str, *, force: bool) -> admin_pb2.DeleteDurableRequest:
    """One durable subscription."""
    return admin_pb2.DeleteDurableRequest(topic=topic, name=_named(name), force=force)


def clear_request(topic: str, name: str | None) -> admin_pb2.ClearBacklogRequest:
    """The backlog of one durable, or of all. An empty name would mean all on the wire, so it is refused."""
    return admin_pb2.ClearBacklogRequest(topic=topic, name="" if name is None else _named(name))


# ---- policies ----

_TARGETS: Final[Mapping[PolicyTargetName, admin_pb2.PolicyTarget.ValueType]] = {
    "topics": admin_pb2.POLICY_TARGET_TOPICS,
    "durables": admin_pb2.POLICY_TARGET_DURABLES,
}
assert get_args(PolicyTargetName) == tuple(_TARGETS), "every target has its number"


def set_policy_request(
    name: str,
    pattern: str,
    *,
    topics: TopicSettingsArguments | None,
    durables: DurableSettingsArguments | None,
    priority: int,
    operator: bool,
) -> admin_pb2.SetPolicyRequest:
    """A policy for topics or for durables. The server checks which settings an operator policy may have."""
    if (topics is None) == (durables is None):
        raise invalid("topics", "give exactly one of topics and durables")
    if not -(2**31) <= priority < 2**31:
        raise invalid("priority", f"{priority} is no 32-bit number")
    policy = admin_pb2.Policy(name=_named(name), pattern=pattern, priority=priority, operator=operator)
    if topics is not None:
        refused = NOT_IN_POLICIES.intersection(topics)
        if refused:
            raise invalid(min(refused), "is a property of the topic itself; a policy cannot set it")
        policy.applies_to = _TARGETS["topics"]
        policy.topic.CopyFrom(_admin.settings_message(topics))
    elif durables is not None:
        policy.applies_to = _TARGETS["durables"]
        policy.durable.CopyFrom(durable_message(durable_settings(durables)))
    return admin_pb2.SetPolicyRequest(policy=policy)


def joined_policies(of_cells: Iterable[Iterable[admin_pb2.Policy]]) -> list[admin_pb2.Policy]:
    """The policies of all cells: each once, with what it matches in all of them (rule C19)."""
    found: dict[tuple[str, bool], admin_pb2.Policy] = {}
    for policies in of_cells:
        for one in policies:
            if (known := found.setdefault((one.name, one.operator), one)) is not one:
                known.matches += one.matches
    return sorted(found.values(), key=lambda one: (not one.operator, -one.priority))


def policy(response: admin_pb2.Policy, warnings: Iterable[str] = ()) -> Policy:
    """A policy as the server has it."""
    of_durables = response.applies_to == admin_pb2.POLICY_TARGET_DURABLES
    settings = durable_values(response.durable) if of_durables else topic_values(response.topic)
    return Policy(
        name=response.name,
        pattern=response.pattern,
        priority=response.priority,
        applies_to="durables" if of_durables else "topics",
        operator=response.operator,
        settings=cast(Mapping[str, SettingValue], settings),  # without the lists, which are not in policies
        matches=response.matches,
        warnings=tuple(warnings),
    )
