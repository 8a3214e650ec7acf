"""Administration: topics, policies, the server, its peers and backups."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import aclosing
from dataclasses import replace
from operator import attrgetter
from typing import Unpack

from sow.v1 import access_pb2, admin_pb2
from sow_client import _access, _admin, _failover, _replication, _retention, _statuses, _writes
from sow_client._access import AccessDecision, CallerSession, Identity
from sow_client._cells import Way, in_cell
from sow_client._failover import Instance
from sow_client._grouping import Expressions
from sow_client._parameters import Parameters
from sow_client._records import ExpireAt, Restamped, RestampMode, Ttl
from sow_client._reports import (
    BackupMade,
    ClockAccepted,
    Compacted,
    Policy,
    Repaired,
    ReplicationStatus,
    Status,
    Topic,
    TopicChecked,
    Verified,
)
from sow_client._setting_values import DurableSettingsArguments, TopicSettings, TopicSettingsArguments
from sow_client.aio._calls import AsyncCalls
from sow_client.aio._moving import AsyncTransport
from sow_client.errors import AlreadyExists


class AsyncAdministration(AsyncCalls):
    """The calls of operators."""

    async def topics(self, with_statistics: bool = False) -> list[Topic]:
        """All topics of all cells, by name. Rule: C19."""
        request = admin_pb2.ListTopicsRequest(with_statistics=with_statistics)
        answers = await self._everywhere(self._admin.ListTopics, request)
        found = [_admin.topic(topic) for response in answers.values() for topic in response.topics]
        return found if len(answers) == 1 else sorted(found, key=attrgetter("name"))

    async def create_topic(
        self,
        name: str,
        settings: TopicSettings | None = None,
        *,
        exist_ok: bool = False,
        here: bool = False,
        **named: Unpack[TopicSettingsArguments],
    ) -> Topic:
        """Creates a topic, from a TopicSettings or from its fields as keyword arguments.

        A topic that exists already raises AlreadyExists, and is not changed. With `exist_ok` it is returned as it is;
        its settings may be others than those given here: see `Topic.settings`. `here` creates it in the cell of this
        server, although it is placed in another one, as a copy that is to get its records; it needs `operator`.

        Rules: K1, C15.
        """
        request = _admin.create_request(name, settings, named)
        request.here = here
        try:
            response = await self._call(self._admin.CreateTopic, request, once=True, way=self._here(here))
        except AlreadyExists:
            if not exist_ok:
                raise
            return await self.describe_topic(name)
        return _admin.topic(response.topic, response.warnings)

    async def create_view(
        self,
        name: str,
        *,
        source: str,
        where: str | None = None,
        group_by: Expressions | None = None,
        select: Expressions | None = None,
        exist_ok: bool = False,
        here: bool = False,
        **named: Unpack[TopicSettingsArguments],
    ) -> Topic:
        """Creates a view: a topic whose records follow from those of `source` that match `where`, in each commit.

        With `group_by`, or with aggregates in `select` such as "SUM(/qty) AS qty", it has a record for each group; both
        are as in `query`, `select` as `aggregate` there. Without them it has a record for each one of the source, under
        its key, with the fields and expressions of `select`. The other arguments are settings of the topic, such as
        `index`. The view can be read once it is built: until then reads raise Unavailable with VIEW_BUILDING, and
        `describe_topic` tells how far it is. `exist_ok` and `here` as in `create_topic`.

        Rules: V1, V3, V6.
        """
        request = _admin.create_view_request(name, source, where, group_by, select, named)
        request.here = here
        try:
            response = await self._call(self._admin.CreateTopic, request, once=True, way=self._here(here))
        except AlreadyExists:
            if not exist_ok:
                raise
            return await self.describe_topic(name)
        return _admin.topic(response.topic, response.warnings)

    async def alter_topic(self, name: str, **named: Unpack[TopicSettingsArguments]) -> Topic:
        """Changes the named settings; None: no longer set, so that policies or defaults apply. Expire times of stored
        records do not change.

        Rules: T2, L12.
        """
        response = await self._call(self._admin.AlterTopic, _admin.alter_request(name, named), once=True)
        return _admin.topic(response.topic, response.warnings)

    async def describe_topic(self, name: str) -> Topic:
        """One topic: its settings, the effective settings with their origins, and statistics. Rule: T2."""
        response = await self._call(self._admin.DescribeTopic, admin_pb2.DescribeTopicRequest(name=name))
        return _admin.topic(response.topic)

    async def delete_topic(self, name: str, *, force: bool = False, here: bool = False) -> int:
        """Deletes a topic with its records and journal; returns the number of its live records. `force` deletes it also
        while a peer has not received all of its changes; that peer then never gets them. `here` deletes the copy that
        is left in the cell of this server, although the topic is placed in another one; it needs `operator`.

        Rules: T5, C5.
        """
        request = admin_pb2.DeleteTopicRequest(name=name, force=force, here=here)
        response = await self._call(self._admin.DeleteTopic, request, once=True, way=self._here(here))
        return response.deleted_records

    def _here(self, here: bool) -> Way[AsyncTransport] | None:
        """The way of a call about a copy in the cell of this server: the topic is elsewhere."""
        return self._cells.way("") if here else None

    async def restamp(
        self,
        topic: str,
        mode: RestampMode,
        *,
        ttl: Ttl | None = None,
        expire_at: ExpireAt | None = None,
        filter: str | None = None,  # noqa: A002 - the name that users know from the contract
        parameters: Parameters | None = None,
        dry_run: bool = False,
        on_progress: Callable[[Restamped], object] | None = None,
    ) -> Restamped:
        """Applies a lifetime to existing records, or to those that match `filter`.

        `parameters`: the values of the names in the filter. "set": `ttl` or `expire_at` replaces each record's
        lifetime; "cap": it lowers longer lifetimes, and never, to it; "clear": the records never expire, unless the
        topic has a max_ttl. `dry_run` only counts. Many records are restamped in steps, each record only if it still
        matches at its step; `on_progress` gets the figures after each step. When the connection breaks, completed steps
        stay done.

        Rule: L13.
        """
        request = _writes.restamp_request(
            topic, mode, filter, parameters, ttl=ttl, expire_at=expire_at, dry_run=dry_run
        )
        async with aclosing(self._answers(self._admin.Restamp, request)) as responses:
            async for response in responses:
                restamped = _writes.restamped(response)
                if on_progress is not None:
                    on_progress(restamped)
                if response.done:
                    return restamped
        raise _statuses.cut("the answer to the restamp")

    async def check_topic(
        self,
        topic: str,
        *,
        repair: bool = False,
        rows_max: int = 100,
        on_progress: Callable[[TopicChecked], object] | None = None,
    ) -> TopicChecked:
        """Checks all rows of a topic for rows that no publish could have made, and lists up to `rows_max` of them. With
        `repair` they are removed, here and at the peers. `on_progress` gets the figures after each step. When the
        connection breaks, removed rows stay removed.

        Rule: R13.
        """
        request = _replication.check_request(topic, repair=repair, rows_max=rows_max)
        found = _replication.NOTHING_CHECKED
        async with aclosing(self._answers(self._admin.CheckTopic, request)) as responses:
            async for response in responses:
                found = _replication.topic_checked(found, response)
                if on_progress is not None:
                    on_progress(found)
                if response.done:
                    return found
        raise _statuses.cut("the answer to the check")

    async def status(self) -> Status:
        """The state of the server."""
        return _admin.status(await self._call(self._admin.GetStatus, admin_pb2.GetStatusRequest()))

    async def describe_instance(self) -> Instance:
        """The instance that answers: name, id, cluster, version, and whether it serves. Every caller may ask."""
        while True:
            line = await self._transport.await_ready()
            found = await self._transport.ask(line, self._timeout)
            if isinstance(found, Instance):
                return found
            if not self._transport.moves_max or found.reason not in _failover.LOSSES:
                raise found
            self._transport.doubt(found.reason)

    async def accept_clock(self) -> ClockAccepted:
        """Confirms that the wall clock is right after a jump. Rule: L15."""
        return _admin.clock_accepted(
            await self._call(self._admin.AcceptClock, admin_pb2.AcceptClockRequest(), once=True)
        )

    async def compact(self) -> Compacted:
        """Compacts the data files now. This can take long; there is no deadline. Rule: L17."""
        return _admin.compacted(
            await self._call(self._admin.Compact, admin_pb2.CompactRequest(), once=True, unbounded=True)
        )

    async def set_policy(
        self,
        name: str,
        pattern: str,
        *,
        topics: TopicSettingsArguments | None = None,
        durables: DurableSettingsArguments | None = None,
        priority: int = 0,
        operator: bool = False,
    ) -> Policy:
        """Sets a policy: settings for `topics`, or for `durables`, whose whole names match the pattern (RE2).

        The name of a durable is `topic/name` here. The policy replaces an earlier one of that name. Of several matching
        policies the one with the highest `priority` applies. `operator`: an operator policy, whose limits no topic and
        no other policy can exceed.

        Where there are several cells, it is set in all. The error of a cell names it, and the others have the policy;
        the same call once more sets it there, too.

        Rules: T2, C19.
        """
        request = _retention.set_policy_request(
            name, pattern, topics=topics, durables=durables, priority=priority, operator=operator
        )
        answers = await self._in_each(self._admin.SetPolicy, request)
        (joined,) = _retention.joined_policies([answer.policy] for answer in answers)
        warnings = dict.fromkeys(warning for answer in answers for warning in answer.warnings)
        return _retention.policy(joined, warnings)

    async def get_policy(self, name: str, *, operator: bool = False) -> Policy:
        """One policy; `operator`: one operator policy."""
        request = admin_pb2.GetPolicyRequest(name=name, operator=operator)
        answers = await self._everywhere(self._admin.GetPolicy, request)
        (joined,) = _retention.joined_policies([answer.policy] for answer in answers.values())
        return _retention.policy(joined)

    async def policies(self) -> list[Policy]:
        """All policies: operator policies first, then by priority, the highest first."""
        answers = await self._everywhere(self._admin.ListPolicies, admin_pb2.ListPoliciesRequest())
        return [*map(_retention.policy, _retention.joined_policies(answer.policies for answer in answers.values()))]

    async def delete_policy(self, name: str, *, operator: bool = False) -> None:
        """Deletes a policy, or operator policy. Its settings then come from the next policy or default."""
        request = admin_pb2.DeletePolicyRequest(name=name, operator=operator)
        await self._in_each(self._admin.DeletePolicy, request, missing="POLICY_NOT_FOUND")

    async def replication_status(self) -> ReplicationStatus:
        """The state of the links with other instances."""
        request = admin_pb2.GetReplicationStatusRequest()
        return _replication.status(await self._call(self._admin.GetReplicationStatus, request))

    async def verify_replication(
        self,
        peer: str,
        topics: Iterable[str] | None = None,
        *,
        keys_max: int = 100,
        on_topic: Callable[[Verified], object] | None = None,
    ) -> list[Verified]:
        """Compares all topics of the link with a peer, or the named ones, and lists up to `keys_max` differing keys of
        each. `on_topic` gets each result. Records that change meanwhile may differ for a moment.

        Rule: R10.
        """
        request = _replication.verify_request(peer, topics, keys_max)
        done: list[Verified] = []
        async with aclosing(self._answers(self._admin.VerifyReplication, request)) as responses:
            async for response in responses:
                done.append(_replication.verified(response))
                if on_topic is not None:
                    on_topic(done[-1])
        return done

    async def repair_replication(
        self,
        peer: str,
        topics: Iterable[str] | None = None,
        *,
        on_topic: Callable[[Repaired], object] | None = None,
    ) -> list[Repaired]:
        """Makes this instance and a peer send each other their differences: afterwards both have the greatest version
        of each key. When the connection breaks, completed topics stay done.

        Rule: R10.
        """
        request = _replication.repair_request(peer, topics)
        done: list[Repaired] = []
        async with aclosing(self._answers(self._admin.RepairReplication, request)) as responses:
            async for response in responses:
                done.append(_replication.repaired(response))
                if on_topic is not None:
                    on_topic(done[-1])
        return done

    async def add_peer(
        self,
        name: str,
        address: str = "",
        *,
        accept: bool = False,
        topics_pattern: str = "",
        sync: bool = False,
        filter_text: str = "",
        ca: str = "",
        certificate: str = "",
        key: str = "",
        token_file: str = "",
        replace: bool = False,
    ) -> None:
        """Makes the server send to another instance, and accept its links, without a restart. Without an address, and
        with `accept`, the other one only sends here. `sync`: REPLICATED waits for it. Files are on the server's
        machine, with absolute paths. `replace`: of a peer that was added before; its link continues with the new
        settings.

        Rules: R14, R8.
        """
        request = _replication.add_request(
            name,
            address,
            accept=accept,
            topics_pattern=topics_pattern,
            sync=sync,
            filter_text=filter_text,
            ca=ca,
            certificate=certificate,
            key=key,
            token_file=token_file,
            replace=replace,
        )
        await self._call(self._admin.AddPeer, request, once=True)

    async def remove_peer(self, name: str) -> None:
        """Removes an instance that was added with `add_peer`: nothing is kept for it any more. If it comes back, it
        first takes the data here, so for a while rather pause it.

        Rule: R14.
        """
        await self._call(self._admin.RemovePeer, admin_pb2.RemovePeerRequest(name=_replication.named(name)), once=True)

    async def pause_peer(self, name: str) -> None:
        """Stops sending to a peer until `resume_peer`. The changes are kept for it. Rules: R9, R14."""
        await self._call(self._admin.PausePeer, admin_pb2.PausePeerRequest(name=_replication.named(name)))

    async def resume_peer(self, name: str) -> None:
        """Sends to a paused peer again."""
        await self._call(self._admin.ResumePeer, admin_pb2.ResumePeerRequest(name=_replication.named(name)))

    async def backup(self, name: str) -> BackupMade:
        """Makes a backup `name` on the server's machine, below the root that its configuration sets. The name is 1 to
        100 of [A-Za-z0-9_.-] without a '.' at its beginning. This can take long; there is no deadline.

        Rule: J14.
        """
        request = admin_pb2.BackupRequest(name=name)
        return _replication.backup_made(await self._call(self._admin.Backup, request, once=True, unbounded=True))

    # ---- access ----

    async def whoami(self) -> Identity:
        """The identity of this client, with its roles and limits. Rule: A1."""
        return _access.identity(await self._call(self._access.WhoAmI, access_pb2.WhoAmIRequest()))

    async def check_access(
        self,
        identity: str,
        action: str,
        topic: str = "",
        *,
        record: bytes | str | os.PathLike[str] | None = None,
        key: str = "",
    ) -> AccessDecision:
        """Asks whether an identity may do an action, such as "read", on a topic, and which line of the access file
        decides. With `record`, a payload or a file that has it, the decision is about this record."""
        request = _access.check_request(identity, action, topic, record, key)
        return _access.decision(await self._call(self._access.CheckAccess, request))

    async def reload_access(self) -> tuple[int, int]:
        """Makes the server read its access file again, and those of all other cells theirs. Returns the number of
        identities, of all cells the lowest, and of the calls that were ended. The error of a cell names it; the others
        have read their files.

        Rules: A2, C19.
        """
        answers = await self._in_each(self._access.ReloadAccess, access_pb2.ReloadAccessRequest())
        return min(one.identities for one in answers), sum(one.ended_calls for one in answers)

    async def sessions(self) -> list[CallerSession]:
        """The callers that have calls under way, in all cells. Where there are several cells, an id has the name of its
        cell in front of it, such as "b/s17".

        Rule: C19.
        """
        answers = await self._everywhere(self._access.ListSessions, access_pb2.ListSessionsRequest())
        return [
            replace(one, id=in_cell(cell, one.id)) if len(answers) > 1 else one
            for cell, answer in answers.items()
            for one in map(_access.session, answer.sessions)
        ]

    async def end_session(self, id: str) -> int:  # noqa: A002 - the name that sessions() shows
        """Ends the calls of a session that last; returns their number. `id` as `sessions` has it; without a cell in
        front, one of the client's own."""
        way, number = await self._way_of(id)
        request = access_pb2.EndSessionRequest(id=number)
        return (await self._call(self._access.EndSession, request, once=True, way=way)).ended_calls
