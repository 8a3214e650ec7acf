"""The topics and limits of one call. A handler gets its topics here, and from nowhere else (access [3])."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Final, NamedTuple, Protocol

from sow_server.access.audit import Value
from sow_server.access.credentials import NO_CLAIM, Claim
from sow_server.access.limits import Usage
from sow_server.access.model import Credential, Identity, Peer
from sow_server.access.needs import Action, Need
from sow_server.access.permissions import ALLOWED, Decision, Permissions
from sow_server.access.topic_cells import EVERY_TOPIC_HERE, TopicCells
from sow_server.engine.catalog.topics import Topic, Topics, check_name
from sow_server.engine.formats.topic_formats import zeros_before
from sow_server.engine.values.errors import Reason, StoreError, no_topic, with_meant
from sow_server.engine.values.keys import parse_path
from sow_server.engine.values.model import MessageType
from sow_server.engine.values.views import view_building
from sow_server.filters.restriction import UNRESTRICTED, Restriction
from sow_server.filters.tree import Path, walk
from sow_server.placement import Places

RESEMBLING_MAX: Final = 200
"""Names that are compared with a mistyped one, on the event loop; the longest ones take 20 µs each."""
_READS: Final = frozenset({Action.READ, Action.CONSUME})


class Granted(NamedTuple):
    """A topic, and the part of it that the call may see or change."""

    topic: Topic
    restriction: Restriction


class Caller(NamedTuple):
    """An identity or a peer, and what its calls share."""

    holder: Identity | Peer = Identity("", Credential(), ())
    """The one without a name is anybody."""
    permissions: Permissions | None = None
    """None: there is no access file, and everything is allowed."""
    usage: Usage | None = None
    """None: it has no limits, as a peer."""


ANYBODY: Final = Caller()


class Authority(Protocol):
    """Knows the topics, and hears of the decisions of a call."""

    @property
    def topics(self) -> Topics:
        """All that there are."""

    @property
    def places(self) -> Places | None:
        """The cells of topics; None: every topic is placed here."""

    def denied(self, call: Call, action: Action, topic: str, decision: Decision) -> None:
        """Something was refused. `topic` is "" for an action on the server."""

    def deletes(self, call: Call) -> None:
        """A call deletes records, although its method need not: the audit log has it from now on. Raises StoreError
        AUDIT_UNAVAILABLE."""


class CallTrace(Protocol):
    """The trace of one call."""

    def answered(self, sequence: int) -> None:
        """A change of the call has this sequence; 0: it has changed nothing."""

    def ended(self, code: str, notes: Mapping[str, Value]) -> None:
        """The call has ended with the gRPC status of this name."""


class CallPlace(Protocol):
    """The place of a call among those that the server takes at a time."""

    def leave(self) -> None:
        """The call has ended."""


class Call:
    """One call of an RPC: its caller, and what that caller may do."""

    __slots__ = (
        "_authority",
        "_permissions",
        "_task",
        "_topics",
        "_usage",
        "address",
        "cells",
        "credential",
        "deletes",
        "ended",
        "expire_micros",
        "fingerprint",
        "leaves",
        "method",
        "need",
        "notes",
        "owner",
        "peer",
        "place",
        "seconds_left",
        "session",
        "trace",
    )

    def __init__(
        self,
        method: str,
        need: Need,
        authority: Authority,
        caller: Caller = ANYBODY,
        claim: Claim = NO_CLAIM,
        *,
        address: str = "",
        seconds_left: Callable[[], float | None] = lambda: None,
        expire_micros: int | None = None,
    ) -> None:
        holder = caller.holder
        self.method: Final = method
        self.need: Final = need
        self.owner: Final = holder.name
        """The name of the identity or the peer."""
        self.credential: Final = claim.kind
        self.fingerprint: Final = claim.fingerprint
        self.address: Final = address
        self.expire_micros: Final = expire_micros
        """When its credential expires; None: never."""
        self.seconds_left: Final = seconds_left
        """The time until the caller's deadline; None: it has none."""
        self.notes: dict[str, Value] = {}
        """Facts for the audit log, such as counts."""
        self.deletes = False
        """True once it has been found to delete records, although its method need not."""
        self.leaves: Callable[[StoreError], None] | None = None
        """Ends a subscription once it has handed over what was changed before a new placement; None: it is none."""
        self.ended: StoreError | None = None
        """The reason for which the server has ended the call."""
        self.session = ""
        """The id of its session, once it has one."""
        self.place: CallPlace | None = None
        """None: it has none yet."""
        self.trace: CallTrace | None = None
        """None: the call is not traced."""
        self._authority = authority
        self._topics = authority.topics
        places = authority.places
        self.cells: Final = EVERY_TOPIC_HERE if places is None else TopicCells(places)
        self._permissions = caller.permissions
        self._usage = caller.usage
        self.peer: Final = holder if isinstance(holder, Peer) else None
        """The peer that calls, if it is one."""
        self._task: asyncio.Task[object] | None = None

    # -- decisions -----------------------------------------------------------------------------------------------------

    @property
    def unrestricted(self) -> bool:
        """True if there is no access file."""
        return self._permissions is None

    def topic(self, name: str, action: Action | None = None, *, whole: bool = False) -> Granted:
        """The topic of a request, for the action that the method needs, or another one. `whole`: the action is on all
        of it, so a caller that may see only a part of it is denied. Raises StoreError:
        TOPIC_NOT_FOUND if there is none, and likewise if the caller has no grant on the name; PERMISSION_DENIED if it
        has another grant on it; TOPIC_ELSEWHERE if it is placed in another cell (rule C2); VIEW_BUILDING for a read of
        a view that is not complete (rule V6)."""
        restriction = UNRESTRICTED
        if self._permissions is None:
            if self.cells is not EVERY_TOPIC_HERE:
                self.cells.check(name)
            topic = self._topics.find(name)
        else:
            action = action or self._action
            decision = self.require(name, action, whole=whole)
            topic, restriction = self._topics.find(name), decision.restriction
            if not fits(topic, restriction):
                raise self._denied(action, name, Decision(allowed=False, place=decision.place))
        if not topic.complete and (action or self.need.action) in _READS:
            raise view_building(name)
        return Granted(topic, restriction)

    def require(
        self, name: str, action: Action | None = None, *, all_rows: bool = False, whole: bool = False
    ) -> Decision:
        """The decision about a topic that may not exist. `all_rows`: the action is on all rows, so a caller with `rows`
        is denied; `whole`: so is one with hidden fields. Raises StoreError as `topic`, if the action is denied or the
        topic is placed in another cell."""
        if self._permissions is None:
            if self.cells is not EVERY_TOPIC_HERE:
                self.cells.check(name)
            return ALLOWED
        check_name(name)  # first: no pattern runs over it, and no decision about it is remembered, unless it can exist
        action = action or self._action
        decision = self._permissions.decide(action, name)
        limited = (all_rows and decision.restriction.rows is not None) or (
            whole and decision.restriction != UNRESTRICTED
        )
        if not decision.allowed or limited:
            raise self._denied(action, name, Decision(allowed=False, place=decision.place))
        if self.cells is not EVERY_TOPIC_HERE:
            self.cells.check(name)  # last: who may not reach a topic does not learn its cell
        return decision

    def require_create(self, name: str) -> None:
        """Raises StoreError as `topic`, unless the caller may create a topic. Its settings decide about all rows, so a
        caller with `rows` may not."""
        self.require(name, Action.CREATE, all_rows=True)

    def may_create(self, name: str) -> bool:
        """True if `require_create` passes; it is not audited."""
        return self._permissions is None or (
            (decision := self._permissions.decide(Action.CREATE, name)).allowed and decision.restriction.rows is None
        )

    def require_on_server(self, action: Action) -> None:
        """Raises StoreError PERMISSION_DENIED unless an action on the server is allowed."""
        if self._permissions is None:
            return
        decision = self._permissions.decide(action)
        if not decision.allowed:
            self._authority.denied(self, action, "", decision)
            raise StoreError(Reason.PERMISSION_DENIED, f"{self.owner} lacks the permission {action.value}")

    @property
    def may_ever(self) -> bool:
        """True if a grant allows the action that the method needs, on whatever topic; a peer may replicate, and an
        operator reaches what others own."""
        permissions, action = self._permissions, self.need.action
        if permissions is None or self.peer is not None or action is None:
            return True
        return permissions.holds(action) or permissions.holds(Action.OPERATOR)

    def may(self, action: Action, topic: str = "") -> bool:
        """True if an action is allowed; it is not audited."""
        return self._permissions is None or self._permissions.decide(action, topic).allowed

    def seen(self, name: str) -> Topic:
        """A topic that exists for the caller, whatever it may do with it. Raises StoreError TOPIC_NOT_FOUND, and
        TOPIC_ELSEWHERE for one that it would see and that is placed in another cell."""
        found, sees = self.existing(name), self.sees(name)
        if sees:
            self.cells.check(name)
        if found is None or not sees:
            check_name(name)
            raise no_topic(name)
        return found

    def sees(self, name: str) -> bool:
        """True if the caller may know of a topic of this name: it has a grant on it, or may know of all topics."""
        return self._permissions is None or self._permissions.sees(name) or self.may(Action.OBSERVE)

    def part_of(self, topic: Topic, action: Action | None = None) -> Restriction | None:
        """The part of a topic that the action is allowed on; None: no part. For patterns: a topic that may not be seen
        does not match, nor does one that is placed in another cell."""
        if self.cells is not EVERY_TOPIC_HERE and not self.cells.match(topic.name):
            return None
        if self._permissions is None:
            return UNRESTRICTED
        decision = self._permissions.decide(action or self._action, topic.name)
        return decision.restriction if decision.allowed and fits(topic, decision.restriction) else None

    def rights(self, action: Action) -> str:
        """Names the part of all topics that the action is allowed on: equal rights have equal names, everywhere."""
        names = "" if self._permissions is None else self._permissions.name(action)
        return names if self.cells is EVERY_TOPIC_HERE else f"{self.cells.digest} {names}"

    def owns(self, owner: str) -> bool:
        """True if the caller owns something: otherwise it does not exist for it. An operator owns everything."""
        return self._permissions is None or owner == self.owner or self.may(Action.OPERATOR)

    def own_name(self, name: str) -> str:
        """The name by which the store knows something of the caller's own: two callers may use the same name. No name
        that a client gives has a slash."""
        return name if self._permissions is None else f"{self.owner}/{name}"

    def shown_name(self, stored: str) -> str | None:
        """The name that the caller has given; None: it is another one's. An operator sees the stored name."""
        owner, slash, name = stored.rpartition("/")
        if self._permissions is None or not slash:
            return stored
        if owner == self.owner:
            return name
        return stored if self.may(Action.OPERATOR) else None

    def topics(self, *, stray: bool = False) -> list[Topic]:
        """The topics that exist for the caller, by name. `stray`: instead of them those that are left here, although
        they are placed in another cell (rule C5)."""
        return [
            topic
            for name, topic in sorted(self._topics.by_name.items())
            if self.sees(name) and self.cells.have(name) is not stray
        ]

    def explained(self, error: StoreError) -> StoreError:
        """The error of the call. That there is no topic of a name is told with the names that resemble it, of topics
        that exist for the caller."""
        name = error.details.get("topic", "") if error.reason is Reason.TOPIC_NOT_FOUND else ""
        alike = resembling(name, self._topics.by_name) if name else ()
        meant = list(islice((one for one in alike if self.sees(one) and self.cells.have(one)), 2))
        return with_meant(error, meant) if meant else error

    def begin_deleting(self, topic: str) -> None:
        """Called before the call deletes records, where its method need not. Raises StoreError AUDIT_UNAVAILABLE."""
        self.notes["topic"] = topic
        if not self.deletes:
            self._authority.deletes(self)

    def has_removed(self, records: int) -> None:
        """Counts records that such a call has deleted, for the audit log."""
        before = self.notes.get("removed", 0)
        assert isinstance(before, int), "it is a count"
        self.notes["removed"] = before + records

    def existing(self, name: str) -> Topic | None:
        """A topic by its name, once the caller has passed `require` for it."""
        return self._topics.by_name.get(name)

    # -- limits --------------------------------------------------------------------------------------------------------

    @contextmanager
    def holding(self, limit: str) -> Iterator[None]:
        """Holds one of what a limit counts, until the end of the block. Raises StoreError LIMIT_EXCEEDED."""
        usage = self._usage
        if usage is None:
            yield
            return
        usage.take(limit, usage.limits.of(limit))
        try:
            yield
        finally:
            usage.free(limit)

    @property
    def counts_bytes(self) -> bool:
        """True if `holding_bytes` has an effect."""
        return self._usage is not None and self._usage.limits.bytes_in_flight is not None

    @contextmanager
    def holding_bytes(self, size: int) -> Iterator[None]:
        """Counts the bytes of a request against the caller's limit. Raises StoreError LIMIT_EXCEEDED."""
        usage = self._usage
        if usage is None or usage.limits.bytes_in_flight is None:
            yield
            return
        usage.take("bytes_in_flight", usage.limits.bytes_in_flight, size)
        try:
            yield
        finally:
            usage.free("bytes_in_flight", size)

    def creates(self, kind: str, name: str) -> None:
        """Counts a topic or a publisher that the caller makes. Raises StoreError LIMIT_EXCEEDED."""
        if self._usage is not None:
            self._usage.creates(kind, name, self._usage.limits.of(kind))

    @contextmanager
    def making(self, limit: str, held: int) -> Iterator[None]:
        """Makes one more of something within the block, of which the caller has `held` already. Those that it is about
        to make count, too. Raises StoreError LIMIT_EXCEEDED."""
        usage = self._usage
        if usage is None:
            yield
            return
        usage.make(limit, held, usage.limits.of(limit))
        try:
            yield
        finally:
            usage.made(limit)

    @property
    def _action(self) -> Action:
        assert self.need.action is not None, "a method whose handler asks for topics needs an action"
        return self.need.action

    def _denied(self, action: Action, name: str, decision: Decision) -> StoreError:
        self._authority.denied(self, action, name, decision)
        # Who may not create a topic learns nothing from a denial: it is the same whether the topic exists or not.
        if action is Action.CREATE or self.sees(name):
            return StoreError(
                Reason.PERMISSION_DENIED,
                f"topic: {self.owner} lacks the permission {action.value} on {name}",
                field="topic",
            )
        return no_topic(name)

    def leave(self) -> None:
        """Gives back the limits that it has held since it was admitted."""
        if self._usage is not None:
            self._usage.free(self.need.counts_as)

    # -- its life ------------------------------------------------------------------------------------------------------

    def runs(self, task: asyncio.Task[object]) -> None:
        """The task of a call that answers with a stream; `end` stops it."""
        self._task = task
        if self.cells is not EVERY_TOPIC_HERE:
            self.cells.remember = self.need.action is not Action.PUBLISH  # the requests of such a stream are refused

    @property
    def lasts(self) -> bool:
        """True if it answers with a stream, so that it may last for days."""
        return self._task is not None

    def end(self, error: StoreError) -> None:
        """Ends a call that lasts, with an error."""
        if self.ended is None and self._task is not None:
            self.ended = error
            self._task.cancel()


def resembling(name: str, names: Iterable[str]) -> list[str]:
    """The names that may have been meant by a mistyped one, the best one first: they differ from it in one place, by a
    third of its letters at most. Among very many names of its length nothing is guessed."""
    room = len(name) // 3
    near = (one for one in names if abs(len(one) - len(name)) <= room and one != name)
    alike = list(islice(near, RESEMBLING_MAX + 1))
    if len(alike) > RESEMBLING_MAX:
        return []
    apart = [(_apart(name.lower(), one.lower()), one) for one in alike]
    return [one for distance, one in sorted(apart) if distance <= room]


def _apart(one: str, other: str) -> int:
    """The letters between the common beginning and the common end of two texts, of the longer one. In linear time,
    which neither an edit distance nor difflib has."""
    begin = _alike(one, other)
    return max(len(one), len(other)) - begin - _alike(one[begin:][::-1], other[begin:][::-1])


def _alike(one: str, other: str) -> int:
    """How many letters two texts have in common at their beginnings."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def fits(topic: Topic, restriction: Restriction) -> bool:
    """True if a restriction can be applied to a topic: a binary payload has no fields, a tag of fix has no zeros in
    front, and a key cannot be hidden."""
    if restriction == UNRESTRICTED:
        return True
    if topic.settings.message_type is MessageType.FIX and zeros_before(steps[0] for steps in restriction.hidden):
        return False
    if topic.settings.message_type is MessageType.BINARY:
        reads = restriction.rows is not None and any(isinstance(node, Path) for node in walk(restriction.rows))
        if restriction.hidden or reads:
            return False
    keys = [parse_path(path) for path in topic.settings.key]
    return not any(key[: len(steps)] == steps for steps in restriction.hidden for key in keys)
