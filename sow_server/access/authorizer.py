"""Admits each call, or refuses it: finds its identity, checks the need of its method, counts it, writes the audit log.

[1]  A call runs only with a `Call`, which `Listener.admit` alone makes.
[2]  A call that lasts is ended when the permissions of its caller change, or its credential expires (rule A6).
[3]  A reload takes effect as a whole, or not at all (rule A2).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from sow_server.access.audit import Audit, Part, Value
from sow_server.access.caller import ANYBODY, Call, Caller
from sow_server.access.credentials import (
    REMEMBERED,
    Asked,
    Claim,
    Directory,
    Prover,
    Shown,
    check_expiry,
    unknown,
)
from sow_server.access.failed_attempts import FailedAttempts
from sow_server.access.limits import Usage
from sow_server.access.model import AccessFile, Credential, Identity, Peer
from sow_server.access.needs import Action, Need, Scope
from sow_server.access.permissions import Decision, Permissions
from sow_server.access.tally import Tally
from sow_server.engine.catalog.topics import Topics
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import MICROS
from sow_server.placement import Places

DENIALS_TOLD_MAX: Final = 100
"""Denials of one identity in a minute that are told one by one; the others are counted."""
_ADMINISTRATION: Final = frozenset({Action.OPERATOR, Action.TOPIC_ADMIN})

NOBODY: Final = Caller(Identity("", Credential(), ()), Permissions(Identity("", Credential(), ())))
"""A caller without a credential, of a method that tells such callers less (Scope.TIERED)."""


class AccessObserver(Protocol):
    """Counts decisions (the metrics)."""

    def authentication_failed(self) -> None:
        """A call showed no credential that the server knows."""

    def access_denied(self, method: str, action: str) -> None:
        """An action of a call was refused."""


@dataclass(eq=False, slots=True)
class Session:
    """A caller with calls under way: one credential from one connection."""

    id: str
    identity: str
    credential: str
    fingerprint: str
    address: str
    since_micros: int
    expire_micros: int | None
    withdrawn: Callable[[], str]
    """As of its claim."""
    calls: dict[Call, None] = field(default_factory=dict)


class Authorizer:
    """Owns the identities, their sessions and their use of limits. Event loop only."""

    def __init__(
        self,
        topics: Topics,
        file: AccessFile | None,
        audit: Audit,
        observer: AccessObserver,
        *,
        now_micros: Callable[[], int],
        elapsed: Callable[[], float],
        audit_reads: bool = False,
        places: Places | None = None,
    ) -> None:
        """`file` None: every caller may do everything. `now_micros`: wall time, by which credentials expire. `places`:
        the cells of topics; None: there are no cells."""
        self.topics: Final = topics
        self.places: Final = places
        self._audit = audit
        self._audit_reads = audit_reads
        self._observer = observer
        self._now_micros = now_micros
        self._elapsed = elapsed
        self._sessions: dict[tuple[str, str, str], Session] = {}
        """Keyed by identity, fingerprint and address. A session without calls stays until `forget_idle`, because most
        callers make one call after the other."""
        self._numbers = itertools.count(1)
        self.failures: Final = FailedAttempts(elapsed)
        self._denials: Final = Tally(elapsed, DENIALS_TOLD_MAX)
        self._usage: dict[str, Usage] = {}
        self._permissions: dict[str, Permissions] = {}
        self._callers: dict[Claim, Caller] = {}
        """Identities by their claims, as long as the access file is the same. A call looks up this alone."""
        self.enforces: Final = file is not None
        self._file = file or AccessFile()
        self._directory = Directory.of(self._file)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def admit(
        self,
        prover: Prover,
        method: str,
        need: Need,
        shown: Shown,
        address: str,
        seconds_left: Callable[[], float | None],
    ) -> tuple[Call, Session | None]:
        """Admits a call. Raises StoreError."""
        if need.scope is Scope.OPEN:
            return Call(method, need, self, address=address, seconds_left=seconds_left), None
        try:
            if need.scope is Scope.TIERED and self.enforces and self._is_nobody(prover, shown):
                return Call(method, need, self, NOBODY, address=address, seconds_left=seconds_left), None
            claim = prover.prove(shown)
            if not self.enforces:
                return self._anybody(method, need, claim, address, seconds_left)
            caller = self._peer_of(claim, need) or self._caller_of(claim)
            holder = caller.holder
            expire_micros = check_expiry(claim, holder.credential, self._now_micros())
        except StoreError as error:
            self._failed(method, address, error)
            raise
        usage = caller.usage
        call = Call(
            method,
            need,
            self,
            caller,
            claim,
            address=address,
            seconds_left=seconds_left,
            expire_micros=expire_micros,
        )
        if usage is not None:
            usage.request()
            usage.take_call(need.counts_as)
        try:
            if need.scope is Scope.SERVER or need.action is Action.REPLICATE:
                self._check_server_need(call, holder)
            if self._is_told(call):
                self._tell_begin(call)
        except BaseException:
            call.leave()
            raise
        return call, self._enter(call, claim, expire_micros)

    def _is_nobody(self, prover: Prover, shown: Shown) -> bool:
        """True for a caller that has no identity, and has not guessed at one either: it shows nothing, or a good
        certificate that the access file does not name. Raises StoreError UNAUTHENTICATED for a bad one."""
        if prover.asks in (Asked.TOKEN, Asked.BOTH):
            return not shown.token
        return self._directory.identity(prover.prove(shown)) is None

    def _anybody(
        self, method: str, need: Need, claim: Claim, address: str, seconds_left: Callable[[], float | None]
    ) -> tuple[Call, Session]:
        """The call of a caller that may do everything, as long as its certificate is good, if it has one. Raises
        StoreError."""
        expire_micros = check_expiry(claim, Credential(), self._now_micros())
        call = Call(
            method,
            need,
            self,
            ANYBODY,
            claim,
            address=address,
            seconds_left=seconds_left,
            expire_micros=expire_micros,
        )
        return call, self._enter(call, claim, expire_micros)

    def _peer_of(self, claim: Claim, need: Need) -> Caller | None:
        if need.action is not Action.REPLICATE:
            return None
        peer = self._directory.peer(claim)
        return None if peer is None else Caller(peer, Permissions(Identity(peer.name, peer.credential, ())), None)

    def _caller_of(self, claim: Claim) -> Caller:
        """Raises StoreError UNAUTHENTICATED."""
        found = self._callers.get(claim)
        if found is None:
            identity = self._directory.identity(claim)
            if identity is None:
                raise unknown(claim)
            if len(self._callers) >= REMEMBERED:
                self._callers.clear()
            found = Caller(identity, self._permissions_of(identity), self.usage_of(identity))
            self._callers[claim] = found
        return found

    def _permissions_of(self, identity: Identity) -> Permissions:
        found = self._permissions.get(identity.name)
        if found is None or found.identity is not identity:
            found = self._permissions[identity.name] = Permissions(identity)
        return found

    def usage_of(self, identity: Identity) -> Usage:
        """The use that an identity makes of its limits."""
        found = self._usage.get(identity.name)
        if found is None:
            found = self._usage[identity.name] = Usage(identity.limits, self._elapsed)
        return found

    def _check_server_need(self, call: Call, holder: Identity | Peer) -> None:
        if call.need.action is Action.REPLICATE:
            if not isinstance(holder, Peer):
                self.denied(call, Action.REPLICATE, "", Decision(allowed=False))
                raise StoreError(Reason.PERMISSION_DENIED, f"{holder.name} is no peer of this instance")
        else:
            assert call.need.action is not None, "the scope is that of an action"
            call.require_on_server(call.need.action)

    def _enter(self, call: Call, claim: Claim, expire_micros: int | None) -> Session:
        key = (call.owner, call.fingerprint, call.address)
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = Session(
                f"s{next(self._numbers)}",
                call.owner,
                claim.kind,
                claim.fingerprint,
                call.address,
                self._now_micros(),
                expire_micros,
                claim.withdrawn,
            )
        else:
            # A reload may have changed them.
            session.expire_micros, session.withdrawn = expire_micros, claim.withdrawn
        session.calls[call] = None
        call.session = session.id
        return session

    def finished(self, call: Call, session: Session | None, code: str) -> None:
        """A call has ended with the gRPC status `code`."""
        if session is None:
            return
        del session.calls[call]
        if not self.enforces:
            return
        call.leave()
        if self._is_told(call):
            self._tell(call, "end", {"code": code, **call.notes})

    # -- audit ---------------------------------------------------------------------------------------------------------

    def _is_told(self, call: Call) -> bool:
        """True if the log has the begin and the end of a call. Where no grant allows the action on anything, it has the
        denial alone, so that it has room for those who may do something."""
        return self._audit_reads or call.deletes or (call.need.audited and call.may_ever)

    def _tell(self, call: Call, event: str, fields: Mapping[str, Value]) -> bool:
        need = call.need
        part = Part.ADMINISTRATION if need.audited and need.action in _ADMINISTRATION and call.may_ever else Part.CALLS
        return self._audit.write(part, event, {**_described(call), **fields}, reserved=need.withdraws)

    def _tell_begin(self, call: Call) -> None:
        """Raises StoreError AUDIT_UNAVAILABLE for a call that must be audited, and cannot be."""
        told = self._tell(call, "begin", {"decision": "allowed"})
        if not told and (call.need.audited or call.deletes) and not call.need.withdraws:
            raise StoreError(
                Reason.AUDIT_UNAVAILABLE,
                "the audit log cannot be written, so this call is refused",
                retry_after_micros=MICROS,
            )

    def deletes(self, call: Call) -> None:
        """As `caller.Authority`."""
        told, call.deletes = self._is_told(call), True
        if not told:
            self._tell_begin(call)

    def denied(self, call: Call, action: Action, topic: str, decision: Decision) -> None:
        """An action was refused (`caller.Authority`)."""
        self._observer.access_denied(call.method.rpartition("/")[2], action.value)
        if not self._denials.told(call.owner):
            return
        fields = _described(call)
        if topic:
            fields["topic"] = topic
        self._audit.write(
            Part.REFUSALS,
            "denied",
            {**fields, "action": action.value, "decision": "denied", "decided_by": decision.place},
        )

    def _failed(self, method: str, address: str, error: StoreError) -> None:
        """Counts a failed attempt. Many of one address are told together, so that a flood cannot fill the disk."""
        self._observer.authentication_failed()
        if self.failures.failed(address):
            self._audit.write(
                Part.REFUSALS,
                "authentication_failed",
                {"method": method, "address": address, "decision": "unauthenticated", "why": error.message},
            )

    def _tell_untold(self, *, at_the_end: bool = False) -> None:
        for host, attempts in self.failures.due(at_the_end=at_the_end):
            self._audit.write(Part.REFUSALS, "authentications_failed", {"address": host, "attempts_not_told": attempts})
        for identity, denials in self._denials.due(at_the_end=at_the_end):
            self._audit.write(Part.REFUSALS, "denials", {"identity": identity, "denials_not_told": denials})

    def tell_signal(self, event: str, signal: str, fields: Mapping[str, Value]) -> None:
        """Tells the begin or the end of a reload that a signal has asked for. Nobody is refused anything if the log
        cannot be written: it may take access away."""
        described = {"identity": "", "credential": "signal", "fingerprint": "", "address": "", "method": signal}
        self._audit.write(Part.ADMINISTRATION, event, {**described, **fields}, reserved=True)

    # -- reload and sessions -------------------------------------------------------------------------------------------

    @property
    def identities(self) -> Mapping[str, Identity]:
        """The identities of the access file, by name."""
        return self._file.identities

    def replace(self, file: AccessFile) -> int:
        """Takes a new access file into use; returns the number of calls that were ended [2]."""
        before, self._file = self._file, file
        self._directory = Directory.of(file)
        self._permissions.clear()
        self._callers.clear()
        for name, usage in self._usage.items():
            identity = file.identities.get(name)
            if identity is not None:
                usage.limits = identity.limits
        changed = StoreError(
            Reason.ACCESS_CHANGED,
            "the permissions of this caller have changed; call again",
            retry_after_micros=MICROS // 10,
        )
        ended = 0
        for session in list(self._sessions.values()):
            name = session.identity
            if _may(before, name) != _may(file, name):
                ended += end_calls(session, changed)
        return ended

    def placement_changed(self) -> int:
        """Ends the calls whose topics a new placement has taken away (rule C4); returns their number."""
        ended = 0
        for session in list(self._sessions.values()):
            for call in list(session.calls):
                if call.lasts and call.ended is None and (error := call.cells.displaced()) is not None:
                    if call.leaves is not None and call.cells.hands_over:
                        call.cells.stay()
                        call.leaves(error)
                    else:
                        call.end(error)
                    ended += 1
        return ended

    def look(self) -> int:
        """Ends the calls of credentials that have expired or are withdrawn, and tells the counts of failed attempts and
        denials that are due. Returns the number of calls that were ended. To be called every second or so."""
        self._tell_untold()
        self._audit.catch_up()
        now, ended = self._now_micros(), 0
        for session in list(self._sessions.values()):
            if session.expire_micros is not None and session.expire_micros <= now:
                why = "has expired"
            else:
                why = session.withdrawn()
            if not why:
                continue
            error = StoreError(Reason.ACCESS_CHANGED, f"the {session.credential} of this caller {why}")
            ended += end_calls(session, error)
        return ended

    def forget_idle(self) -> None:
        """Forgets sessions without calls. To be called every second or so."""
        for key, session in list(self._sessions.items()):
            if not session.calls:
                del self._sessions[key]

    def sessions(self) -> Iterator[Session]:
        """The sessions with calls, in the order of their begin."""
        return iter([session for session in self._sessions.values() if session.calls])

    def permissions(self, identity: str) -> Permissions | None:
        """The permissions of an identity, for a decision without a call."""
        found = self._file.identities.get(identity)
        return None if found is None else self._permissions_of(found)

    def peer(self, name: str) -> Peer | None:
        """A peer of the access file."""
        return self._file.peers.get(name)

    def close(self) -> None:
        """Tells the last counts of failed attempts and denials, and closes the audit log."""
        self._tell_untold(at_the_end=True)
        self._audit.close()


class Listener:
    """One listener: it asks for one kind of credential."""

    def __init__(self, authorizer: Authorizer, prover: Prover) -> None:
        self.authorizer: Final = authorizer
        self.prover: Final = prover


def _may(file: AccessFile, name: str) -> tuple[object, ...]:
    """All of a file that decides what streams of a caller may do. Limits are no part of it: new ones hold at once."""
    identity = file.identities.get(name)
    grants = None if identity is None else [grant for role in identity.roles for grant in role.grants]
    return None if identity is None else identity.credential, grants, file.peers.get(name)


def end_calls(session: Session, error: StoreError) -> int:
    """Ends the calls of a session that last; returns their number, without those that end already. Other calls are soon
    over by themselves, and a write that was begun must be answered."""
    ending = [call for call in session.calls if call.lasts and call.ended is None]
    for call in ending:
        call.end(error)
    return len(ending)


def _described(call: Call) -> dict[str, Value]:
    return {
        "identity": call.owner,
        "credential": call.credential,
        "fingerprint": call.fingerprint,
        "address": call.address,
        "method": call.method,
    }
