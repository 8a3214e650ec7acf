"""The part of `sow.v1.AdminService` for topics and policies, and for the data: checks, restamps, backups."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import aclosing, contextmanager
from typing import Final, TypeVar

import structlog

from sow.v1 import admin_pb2, types_pb2
from sow_server.access.caller import Call
from sow_server.access.needs import Action
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit.soundness import Fault, row_fault
from sow_server.engine.doors import Reads, Writes
from sow_server.engine.reading import Counts
from sow_server.engine.stored import read_header
from sow_server.engine.values import lifetimes, model
from sow_server.engine.values.errors import Reason, StoreError, no_topic
from sow_server.engine.values.policies import (
    CAPS,
    Declared,
    Policy,
    declared_warnings,
    planned_journal_bytes,
    warnings,
)
from sow_server.engine.values.views import ViewDefinition
from sow_server.filters.restriction import UNRESTRICTED
from sow_server.services.records.selection import checked, count_selected, selected
from sow_server.services.records.submissions import Submissions
from sow_server.services.wire import convert, settings_convert
from sow_server.services.wire.filter_values import values_read

log = structlog.get_logger(__name__)
T = TypeVar("T")

ROWS_LISTED: Final = 100
ROWS_LISTED_MAX: Final = 100_000
MESSAGE_CHARACTERS_MAX: Final = 500
"""Characters of the fault of a row."""


class AdminService:
    """Validates, calls the store, translates. Owns nothing."""

    def __init__(self, reading: Reads, writes: Writes, changes: Submissions, readers: Executor) -> None:
        self._reading = reading
        self._administration = writes.administration
        self._durable_commits = writes.durables
        self._upkeep = writes.upkeep
        self._row_limits = writes.replicas.changes.limits
        """The limits that `CheckTopic` checks rows against."""
        self._changes = changes
        self._readers = readers
        self._clock = reading.clock

    async def _read(self, read: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._readers, read)

    async def CreateTopic(self, request: admin_pb2.CreateTopicRequest, call: Call) -> admin_pb2.CreateTopicResponse:
        here = request.here
        if here:
            call.require_on_server(Action.OPERATOR)  # of a topic and those that belong to it, wherever they are
        else:
            call.require_create(request.name)
        call.creates("topics", request.name)
        declared = settings_convert.settings(request.settings)
        view = settings_convert.view(request.view) if request.HasField("view") else None
        if not here:
            self._check_dead_letter(call, request.name, declared)
            if view is not None:
                self._check_view(call, view)
        created = await self._administration.create_topic(request.name, declared, view=view, stray=here)
        log.info("topic_created", topic=created.name, source="" if view is None else view.source, here=here)
        return admin_pb2.CreateTopicResponse(topic=self._message(call, created), warnings=warnings(created.settings))

    async def AlterTopic(self, request: admin_pb2.AlterTopicRequest, call: Call) -> admin_pb2.AlterTopicResponse:
        call.topic(request.name, whole=True)
        given = settings_convert.settings(request.settings)
        self._check_dead_letter(call, request.name, given)
        paths = list(request.update_paths)
        altered = await self._administration.alter_topic(
            request.name,
            lambda before: settings_convert.altered(before, given, paths),
            sees=_views_seen(call, request.name),
        )
        log.info("topic_altered", topic=altered.name, settings=paths)
        found = warnings(altered.settings)
        if self._figures_told(call, altered):
            found += altered.above_caps
        message = self._message(call, altered)
        return admin_pb2.AlterTopicResponse(topic=message, warnings=found)

    async def DescribeTopic(
        self, request: admin_pb2.DescribeTopicRequest, call: Call
    ) -> admin_pb2.DescribeTopicResponse:
        found = call.seen(request.name)
        told = self._figures_told(call, found)

        def describe() -> admin_pb2.Topic:
            if not told:
                return self._message(call, found)
            message = self._message(call, found, self._reading.cuts.counts([found])[found.id])
            _show_own_durable(call, message)
            message.effective.extend(settings_convert.effective(self._administration.effective(found)))
            planned = planned_journal_bytes(found.settings)
            message.planned_journal_bytes = -1 if planned is None else planned
            return message

        message = await self._read(describe)
        return admin_pb2.DescribeTopicResponse(topic=message)

    async def ListTopics(self, request: admin_pb2.ListTopicsRequest, call: Call) -> admin_pb2.ListTopicsResponse:
        topics = call.topics()
        told = [self._figures_told(call, topic) for topic in topics]

        def messages() -> list[admin_pb2.Topic]:
            counts = self._reading.cuts.counts(topics) if request.with_statistics else {}
            found = [
                self._message(call, topic, counts.get(topic.id) if with_figures else None)
                for topic, with_figures in zip(topics, told, strict=True)
            ]
            for message in found:
                _show_own_durable(call, message)
            return found

        return admin_pb2.ListTopicsResponse(topics=await self._read(messages))

    async def DeleteTopic(self, request: admin_pb2.DeleteTopicRequest, call: Call) -> admin_pb2.DeleteTopicResponse:
        if request.here:
            _check_stray(call, request.name)
        else:
            call.topic(request.name, whole=True)
        deleted = await self._administration.delete_topic(
            request.name,
            force=request.force,
            stray=request.here,
            in_config=request.here,  # the configuration declares it for the cell that it is placed in
            sees=_views_seen(call, request.name),
        )
        log.info("topic_deleted", topic=request.name, records=deleted, forced=request.force, here=request.here)
        return admin_pb2.DeleteTopicResponse(deleted_records=deleted)

    async def SetPolicy(self, request: admin_pb2.SetPolicyRequest, call: Call) -> admin_pb2.SetPolicyResponse:
        given = settings_convert.policy(request.policy)
        policy = await self._administration.set_policy(given)
        log.info("policy_set", policy=policy.name, operator=policy.operator, pattern=policy.pattern)
        (message,) = await self._read(lambda: self._policies([policy]))
        found = declared_warnings(policy)
        if not set(CAPS).isdisjoint(policy.settings):
            full = sum(bool(topic.above_caps) for topic in call.topics() if self._figures_told(call, topic))
            if full:
                found.append(f"{full} of the topics have more than their caps now; see rule T7")
        return admin_pb2.SetPolicyResponse(policy=message, warnings=found)

    async def GetPolicy(self, request: admin_pb2.GetPolicyRequest, call: Call) -> admin_pb2.GetPolicyResponse:
        policy = self._administration.policies.find(request.name, operator=request.operator)
        (message,) = await self._read(lambda: self._policies([policy]))
        return admin_pb2.GetPolicyResponse(policy=message)

    async def ListPolicies(self, request: admin_pb2.ListPoliciesRequest, call: Call) -> admin_pb2.ListPoliciesResponse:
        policies = list(self._administration.policies)
        return admin_pb2.ListPoliciesResponse(policies=await self._read(lambda: self._policies(policies)))

    def _policies(self, policies: Sequence[Policy]) -> list[admin_pb2.Policy]:
        matches = self._administration.policy_matches()
        return [settings_convert.policy_message(policy, matches[policy.target, policy.origin]) for policy in policies]

    async def DeletePolicy(self, request: admin_pb2.DeletePolicyRequest, call: Call) -> admin_pb2.DeletePolicyResponse:
        deleted = await self._administration.delete_policy(request.name, operator=request.operator)
        log.info("policy_deleted", policy=deleted.name, operator=deleted.operator)
        return admin_pb2.DeletePolicyResponse()

    def _figures_told(self, call: Call, topic: Topic) -> bool:
        """True if a caller may know how much a topic has. Figures count records and fields that the caller may not
        see."""
        return call.may(Action.OBSERVE) or call.part_of(topic, Action.READ) == UNRESTRICTED

    def _check_dead_letter(self, call: Call, topic: str, declared: Declared) -> None:
        """Dead letters are whole records of the topic, written to their target as if the caller had published them: it
        must be allowed to read them all, and to write them all there. Raises StoreError."""
        target = declared.get("dead_letter")
        if isinstance(target, str) and target:
            with _in_one_cell("settings.dead_letter"):
                call.require(target, Action.PUBLISH, all_rows=True)
            call.require(topic, Action.READ, whole=True)

    def _check_view(self, call: Call, view: ViewDefinition) -> None:
        """The maker of a view must be allowed to read all of its source, which others then see through it (rule V8). A
        source that the caller may not see is refused as one that does not exist. Raises StoreError."""
        try:
            with _in_one_cell("view.source"):
                call.topic(view.source, Action.READ, whole=True)
        except StoreError as error:
            error.field = "view.source"
            raise

    def _message(self, call: Call, topic: Topic, counts: Counts | None = None) -> admin_pb2.Topic:
        """A topic as the caller may know it: its definition tells of the source (rule V8), its state counts records."""
        message = settings_convert.topic(self._durable_commits, topic, counts)
        if topic.view is not None:
            if call.sees(topic.view.source):
                message.view.CopyFrom(settings_convert.view_message(topic.view))
            if self._figures_told(call, topic):
                message.view_status.CopyFrom(settings_convert.view_status(topic.view_status))
        return message

    async def CheckTopic(
        self, request: admin_pb2.CheckTopicRequest, call: Call
    ) -> AsyncGenerator[admin_pb2.CheckTopicResponse, None]:
        topic = call.topic(request.name, whole=True).topic
        left = request.rows_max if request.HasField("rows_max") else ROWS_LISTED
        if left > ROWS_LISTED_MAX:
            raise convert.invalid("rows_max", f"{left} is more than the limit of {ROWS_LISTED_MAX}")

        def is_unsound(key: bytes, value: bytes) -> bool:
            return row_fault(topic, key, value, self._row_limits, self._clock.now_micros()) is not None

        progress = admin_pb2.CheckTopicResponse()
        async with aclosing(checked(self._reading.cuts, self._readers, topic, self._row_limits)) as steps:
            async for step in steps:
                progress.checked += step.rows
                progress.unsound += len(step.unsound)
                del progress.rows[:]
                progress.rows.extend([self._unsound_row(*row) for row in step.unsound[:left]])
                left -= len(progress.rows)
                if request.repair and step.unsound:
                    keys = [key for key, _, _ in step.unsound]
                    submitted = await self._changes.submit_patiently(
                        model.Delete(topic.name, keys, topic_id=topic.id, matches=is_unsound)
                    )
                    progress.removed += (await submitted).applied
                yield progress
        if progress.unsound:
            log.warning("topic_checked", topic=topic.name, unsound=progress.unsound, removed=progress.removed)
        del progress.rows[:]
        progress.done = True
        yield progress

    def _unsound_row(self, key: bytes, value: bytes, fault: Fault) -> admin_pb2.UnsoundRow:
        head = read_header(value)
        return admin_pb2.UnsoundRow(
            key=key,
            reason=types_pb2.ErrorReason.ValueType(fault.reason.value),
            message=fault.message[:MESSAGE_CHARACTERS_MAX],
            version=head.version,
            origin=self._reading.origins.names[head.origin],
            payload_bytes=head.payload_bytes,
        )

    async def Restamp(
        self, request: admin_pb2.RestampRequest, call: Call
    ) -> AsyncGenerator[admin_pb2.RestampResponse, None]:
        granted = call.topic(request.topic)
        topic = granted.topic
        mode, lifetime = convert.restamp(request)
        try:  # an impossible lifetime is refused even when no record matches
            lifetimes.restamp_time(topic.settings, mode, lifetime, self._clock.now_micros())
        except lifetimes.LifetimeError as error:
            raise StoreError(error.reason, error.message, field="lifetime") from None
        text = request.filter or "true"
        given = await values_read(self._readers, request.parameters)
        progress = admin_pb2.RestampResponse()
        if request.dry_run:
            counted = await count_selected(self._reading.cuts, self._readers, granted, text, given=given)
            progress = admin_pb2.RestampResponse(matched=counted.matched, absent_fields=counted.absent_fields)
        else:
            async with aclosing(selected(self._reading.cuts, self._readers, granted, text, given=given)) as batches:
                async for keys, matches, absent_fields in batches:
                    progress.absent_fields[:] = absent_fields
                    if not keys:
                        continue
                    submitted = await self._changes.submit_patiently(
                        model.Restamp(topic.name, keys, mode, lifetime, topic_id=topic.id, matches=matches)
                    )
                    outcome = await submitted
                    progress.matched += len(keys)
                    progress.restamped += outcome.applied
                    progress.last_sequence = outcome.last_sequence or progress.last_sequence
                    yield progress
            log.info("restamped", topic=topic.name, mode=mode.name, records=progress.restamped)
        progress.done = True
        yield progress

    async def AcceptClock(self, request: admin_pb2.AcceptClockRequest, call: Call) -> admin_pb2.AcceptClockResponse:
        before, after = self._clock.accept()
        log.warning("clock_accepted", before_micros=before, after_micros=after)
        return admin_pb2.AcceptClockResponse(before=convert.timestamp(before), after=convert.timestamp(after))

    async def Compact(self, request: admin_pb2.CompactRequest, call: Call) -> admin_pb2.CompactResponse:
        before = await self._read(self._upkeep.disk_bytes)
        await self._read(self._upkeep.compact)
        after = await self._read(self._upkeep.disk_bytes)
        log.info("compacted", bytes_before=before, bytes_after=after)
        return admin_pb2.CompactResponse(bytes_before=before, bytes_after=after)

    async def Backup(self, request: admin_pb2.BackupRequest, call: Call) -> admin_pb2.BackupResponse:
        made = await self._read(lambda: self._upkeep.backup(request.name))
        log.info("backup_made", backup=request.name, sequence=made.sequence, bytes=made.bytes)
        return admin_pb2.BackupResponse(name=request.name, sequence=made.sequence, bytes=made.bytes)


def _check_stray(call: Call, name: str) -> None:
    """Checks that the caller may delete a topic that exists here and is placed in another cell (rule C5). Raises
    StoreError."""
    call.require_on_server(Action.OPERATOR)
    if call.existing(name) is None:
        raise no_topic(name)
    if call.cells.have(name):
        raise convert.invalid("here", f"{name!r} is placed in this cell; it is for a copy that was left behind")
    if call.cells.expect(name):
        raise convert.invalid("here", f"{name!r} is on its way to this cell: undo that first (sow cells move --abort)")


@contextmanager
def _in_one_cell(field: str) -> Iterator[None]:
    """Refuses a topic of another cell in a setting of one that is here (rule C6): no client can go there for it."""
    try:
        yield
    except StoreError as error:
        if error.reason is not Reason.TOPIC_ELSEWHERE:
            raise
        told = error.details
        raise convert.invalid(
            field, f"{told['topic']!r} lives in the cell {told['cell']}, and must live in this one, {told['from_cell']}"
        ) from error


def _views_seen(call: Call, source: str) -> Callable[[str], bool]:
    """Tells of the views of a topic which the caller sees: on any thread, so it is decided before."""
    topic = call.existing(source)
    views = () if topic is None else topic.views
    return frozenset([view.name for view in views if call.sees(view.name)]).__contains__


def _show_own_durable(call: Call, message: admin_pb2.Topic) -> None:
    """Takes the name of another caller's durable out of a topic's figures, and the owner from the caller's own."""
    if message.HasField("statistics"):
        message.statistics.slowest_durable = call.shown_name(message.statistics.slowest_durable) or ""
