"""Going on at another instance: what becomes of each call, and the search for an instance that serves (F1 to F3).

Pure: no I/O, no clock. The transports make the calls that `Search` asks for. The client asks `next_step` after a
failure.

    [1]  `CALLS` names every RPC that clients make, and says once for all what becomes of it when an instance is lost.
    [2]  A search asks the instance in use first, then the others in their order. So a client never goes back to a
         preferred instance without being asked, and an instance that comes back at once is no reason to move.
    [3]  An instance of another cluster, and an address without a sow server, are never chosen.
    [4]  If no instance serves, the first that answers is taken: its reads go on (rule X3).
    [5]  A client that has used no instance yet, and whose program has set no time to wait, does not wait for addresses
         that all refuse. Later it does, because an instance may be restarting.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

from sow.contract import UNDESCRIBED
from sow.v1 import admin_pb2
from sow_client._addresses import Address
from sow_client._records import invalid
from sow_client._statuses import REFUSED_SECONDS, AllRefused
from sow_client.errors import FailedPrecondition, SowError, Unavailable

FailoverPublish: TypeAlias = Literal["again", "unsent"]
"""The choice for a publish that a lost instance may have: made again at another one, or not."""


class Elsewhere(enum.Enum):
    """The ways in which a call continues when the instance in use is lost."""

    AGAIN = "again"
    """It is made again at another instance."""
    IF_NOT_SENT = "if not sent"
    """It goes on at another instance if it was certainly not applied; else its error is raised."""
    NEVER = "never"
    """It belongs to something that is at one instance only: it keeps to that instance."""


class Row(NamedTuple):
    """The way in which the calls of one RPC continue."""

    elsewhere: Elsewhere
    note: str = ""
    """Where it depends on the request; the documentation has the same words."""


_AGAIN: Final = Row(Elsewhere.AGAIN)
_IF_NOT_SENT: Final = Row(Elsewhere.IF_NOT_SENT)
_NEVER: Final = Row(Elsewhere.NEVER)

CALLS: Final[dict[str, Row]] = {
    "/sow.v1.SowService/Publish": Row(
        Elsewhere.AGAIN, 'if not sent: with a condition, or with `failover_publish="unsent"`'
    ),
    "/sow.v1.SowService/PublishStream": Row(
        Elsewhere.AGAIN, 'if not sent: with `failover_publish="unsent"`; with a unit, or an epoch without token: never'
    ),
    "/sow.v1.SowService/Get": Row(Elsewhere.AGAIN, "with `touch`: only if it was certainly not applied"),
    "/sow.v1.SowService/Query": Row(Elsewhere.AGAIN, "until its first batch has come; each page is a call of its own"),
    "/sow.v1.SowService/Subscribe": Row(
        Elsewhere.AGAIN, "from its bookmark; the consumer of a durable that is not replicated: never"
    ),
    "/sow.v1.SowService/SowDelete": _IF_NOT_SENT,
    "/sow.v1.SowService/Touch": _IF_NOT_SENT,
    "/sow.v1.SowService/GetPublisher": _NEVER,
    "/sow.v1.SowService/OpenPublisher": Row(
        Elsewhere.IF_NOT_SENT, "its epoch holds everywhere, its unit is at one instance"
    ),
    "/sow.v1.SowService/Acknowledge": Row(Elsewhere.NEVER, "at the instance where the consumer is"),
    "/sow.v1.SowService/Rewind": _NEVER,
    "/sow.v1.SowService/BrowseDurable": _NEVER,
    "/sow.v1.SowService/ReadHistory": _NEVER,
    "/sow.v1.AdminService/CreateTopic": _IF_NOT_SENT,
    "/sow.v1.AdminService/AlterTopic": _IF_NOT_SENT,
    "/sow.v1.AdminService/DescribeTopic": _AGAIN,
    "/sow.v1.AdminService/ListTopics": _AGAIN,
    "/sow.v1.AdminService/DeleteTopic": _IF_NOT_SENT,
    "/sow.v1.AdminService/CheckTopic": _IF_NOT_SENT,
    "/sow.v1.AdminService/Restamp": _IF_NOT_SENT,
    "/sow.v1.AdminService/GetStatus": _AGAIN,
    "/sow.v1.AdminService/DescribeInstance": _AGAIN,
    "/sow.v1.AdminService/GetPlacement": _AGAIN,
    "/sow.v1.AdminService/ReloadPlacement": _NEVER,
    "/sow.v1.AdminService/GetExpiryHorizon": _AGAIN,
    "/sow.v1.AdminService/ListSubscriptions": _AGAIN,
    "/sow.v1.AdminService/EndSubscription": _NEVER,
    "/sow.v1.AdminService/WatchFigures": _NEVER,
    "/sow.v1.AdminService/GetConfig": _AGAIN,
    "/sow.v1.AdminService/WatchLog": _NEVER,
    "/sow.v1.AdminService/AcceptClock": _IF_NOT_SENT,
    "/sow.v1.AdminService/Compact": _IF_NOT_SENT,
    "/sow.v1.AdminService/SetPolicy": _IF_NOT_SENT,
    "/sow.v1.AdminService/GetPolicy": _AGAIN,
    "/sow.v1.AdminService/ListPolicies": _AGAIN,
    "/sow.v1.AdminService/DeletePolicy": _IF_NOT_SENT,
    "/sow.v1.AdminService/ListDurables": _AGAIN,
    "/sow.v1.AdminService/DescribeDurable": _AGAIN,
    "/sow.v1.AdminService/DeleteDurable": _NEVER,
    "/sow.v1.AdminService/ClearBacklog": _NEVER,
    "/sow.v1.AdminService/GetReplicationStatus": _AGAIN,
    "/sow.v1.AdminService/VerifyReplication": _IF_NOT_SENT,
    "/sow.v1.AdminService/RepairReplication": _IF_NOT_SENT,
    "/sow.v1.AdminService/AddPeer": _NEVER,
    "/sow.v1.AdminService/RemovePeer": _NEVER,
    "/sow.v1.AdminService/PausePeer": _NEVER,
    "/sow.v1.AdminService/ResumePeer": _NEVER,
    "/sow.v1.AdminService/Backup": _IF_NOT_SENT,
    "/sow.v1.LoadService/OpenLoad": Row(Elsewhere.IF_NOT_SENT, "the load is at the instance that opened it"),
    "/sow.v1.LoadService/StageLoad": _NEVER,
    "/sow.v1.LoadService/CommitLoad": _NEVER,
    "/sow.v1.LoadService/GetLoad": _NEVER,
    "/sow.v1.LoadService/RenewLoad": _NEVER,
    "/sow.v1.LoadService/AbortLoad": _NEVER,
    "/sow.v1.LoadService/ListLoads": _AGAIN,
    "/sow.v1.SnapshotService/OpenExport": Row(Elsewhere.IF_NOT_SENT, "the export is at the instance that opened it"),
    "/sow.v1.SnapshotService/ReadExport": _NEVER,
    "/sow.v1.SnapshotService/RenewExport": _NEVER,
    "/sow.v1.SnapshotService/CloseExport": _NEVER,
    "/sow.v1.SnapshotService/PlanChanges": _NEVER,
    "/sow.v1.SnapshotService/ReadChanges": _NEVER,
    "/sow.v1.SnapshotService/PinJournal": _NEVER,
    "/sow.v1.AccessService/WhoAmI": _AGAIN,
    "/sow.v1.AccessService/CheckAccess": _AGAIN,
    "/sow.v1.AccessService/ReloadAccess": _IF_NOT_SENT,
    "/sow.v1.AccessService/ListSessions": _AGAIN,
    "/sow.v1.AccessService/EndSession": _IF_NOT_SENT,
}
"""Keyed by the path of the RPC. Only instances call the service of links."""

LOSSES: Final = frozenset({"UNREACHABLE", "NOT_SERVING", "STORE_FAILED", "STOPPING", "DISK_FULL"})
"""Errors after which a client looks for another instance. It stays if the instance says that it serves."""
NOT_APPLIED: Final = frozenset({"STOPPING"})
"""The instance has refused the whole call, and nothing of it is on its disk. STORE_FAILED and DISK_FULL do not say so:
the commit that failed may be found after a restart."""


class Step(enum.Enum):
    """The next step after a call with one answer has failed."""

    RAISE = enum.auto()
    SAME = enum.auto()
    """The same call once more, at the same instance."""
    ELSEWHERE = enum.auto()
    """The same call once more, at the instance in use after a search."""


def next_step(
    path: str,
    reason: str,
    *,
    again: bool,
    moves: int,
    kept: bool,
    goes: bool = True,
    sent: bool = True,
    renews: bool = False,
) -> Step:
    """The next step after a call has failed with `reason`.

    `again`: it may be repeated at the same instance. `moves`: how often it may still go elsewhere; 0 where the client
    has one address. `kept`: it keeps to an instance already. `goes`: false if this request goes elsewhere only if it
    was not sent. `sent`: the instance may have got it. `renews`: it is a get with `touch`; gRPC repeats gets, so it
    counts as sent.
    """
    row = CALLS.get(path)
    if moves and not kept and row is not None and reason in LOSSES:
        if renews:
            return Step.ELSEWHERE if reason in NOT_APPLIED else Step.RAISE
        if row.elsewhere is Elsewhere.AGAIN and goes:
            return Step.ELSEWHERE
        if row.elsewhere is not Elsewhere.NEVER and (reason in NOT_APPLIED or not sent):
            return Step.ELSEWHERE
    if moves and path == REPEATED_HERE and reason in _PASSING:
        return Step.SAME if again else Step.RAISE
    return Step.SAME if again and reason == "UNREACHABLE" else Step.RAISE


REPEATED_HERE: Final = "/sow.v1.SowService/Publish"
"""gRPC does not repeat it on channels of several, so that it is known whether it was sent."""
_PASSING: Final = frozenset({"REPLICATION_UNAVAILABLE", "ACCESS_CHANGED"})
"""Errors after which gRPC would repeat it (UNAVAILABLE), and which are no loss."""


@dataclass(frozen=True, slots=True)
class Instance:
    """An instance, as it describes itself."""

    address: str
    """Where the client has found it."""
    name: str
    """Its `[server] instance`. Empty: an older server, which does not describe itself."""
    id: str
    """Made with its data, so it tells instances of the same name apart."""
    journal_epoch: str
    cluster: str
    """Its `[server] cluster`; empty: none."""
    serving: bool
    """It takes reads and writes. False: it starts or stops, or its writes have stopped. Rule: X3."""
    server_version: str
    host: str = ""
    """The name that the address is one of several of; empty: the address was given itself."""
    contract: int = UNDESCRIBED
    """The version of the contract that it serves."""

    @property
    def shown(self) -> str:
        """Its name and address, for messages."""
        return f"{self.name} at {self.address}" if self.name else self.address


def instance_of(address: Address, response: admin_pb2.DescribeInstanceResponse) -> Instance:
    """The instance in an answer."""
    return Instance(
        address.target,
        response.name,
        response.id,
        response.journal_epoch,
        response.cluster,
        response.serving,
        response.server_version,
        address.host,
        response.contract or UNDESCRIBED,
    )


def undescribed(address: Address, *, serving: bool) -> Instance:
    """An instance of a release that does not describe itself."""
    return Instance(address.target, "", "", "", "", serving, "", address.host)


class NoAnswer(Unavailable):
    """An address that says nothing. The connection may go on being made."""


def no_server(address: str) -> SowError:
    """The error of an address where something else answers."""
    return FailedPrecondition(
        f"{address} is no sow server: it speaks gRPC, and has none of sow's services",
        reason="NO_SOW_SERVER",
        details={"server": address},
    )


ATTEMPT_SECONDS_FIRST: Final = 0.25
"""How long one address may take to answer in the first round. Its connection may go on being made meanwhile."""
ATTEMPT_SECONDS_MAX: Final = 1.0
PAUSE_SECONDS_FIRST: Final = 0.05
PAUSE_SECONDS_MAX: Final = 0.5
"""Between two rounds over all addresses."""


class Search:
    """A search for an instance that serves: which address to ask next, and whether its answer is taken."""

    def __init__(
        self,
        addresses: Sequence[Address],
        *,
        now: float,
        seconds: float,
        cluster: str = "",
        serving_only: bool = False,
        patient: bool = True,
    ) -> None:
        """`addresses` in the order in which they are asked. `now` is a monotonic clock, `cluster` that of the client's
        first instance. It ends after `seconds`. `serving_only`: without [4]. Not `patient`: it ends as soon as every
        address has refused twice ([5])."""
        assert addresses, "a client has at least one address"
        self._found: tuple[Address, Instance] | None = None
        self._addresses = addresses
        self._left = deque(addresses)
        self._round = 1
        self._seconds = seconds
        self._give_up = now + seconds
        self._cluster = cluster
        self._serving_only = serving_only
        self._why: dict[Address, SowError] = {}
        self._answering: tuple[Address, Instance] | None = None  # the first that answers and does not serve ([4])
        self._may_refuse = None if patient else now + REFUSED_SECONDS
        self._silent = False  # whether an address has said nothing in this round
        self._refused = False

    def step(self, now: float) -> Address | float | None:
        """The address to ask now, or seconds to pause, or None at the end."""
        if self._found is not None:
            return None
        if self._left:
            return self._left[0] if now < self._give_up or self._round == 1 else None
        if self._answering is not None and not self._serving_only:
            self._found = self._answering
            return None
        if self._may_refuse is not None and now >= self._may_refuse and not self._silent:
            self._refused = True
            return None
        pause = min(PAUSE_SECONDS_FIRST * 2.0 ** (self._round - 1), PAUSE_SECONDS_MAX)
        if now + pause > self._give_up:
            return None
        self._round += 1
        self._silent = False
        self._left.extend(self._addresses)
        return pause

    def attempt_seconds(self, now: float) -> float:
        """The seconds that the answer may take."""
        patience = min(ATTEMPT_SECONDS_FIRST * 2.0 ** (self._round - 1), ATTEMPT_SECONDS_MAX)
        return max(0.01, min(patience, self._give_up - now))

    def heard(self, answer: Instance | SowError) -> None:
        """The answer of the address that `step` has returned. Raises an error that is none of the address: the
        instance refuses this caller, or has too many."""
        address = self._left.popleft()
        if isinstance(answer, SowError):
            if answer.reason not in _OF_ADDRESSES:
                raise answer
            self._silent = self._silent or isinstance(answer, NoAnswer)
            if answer.reason != "UNREACHABLE" or address not in self._why:
                self._why[address] = answer  # silence, such as in the last moment, tells less than an earlier answer
        elif self._cluster and answer.cluster and answer.cluster != self._cluster:
            self._why[address] = other_cluster(answer, self._cluster)
        elif answer.serving:
            self._found = address, answer
        else:
            self._why[address] = Unavailable(f"{answer.shown} does not serve", reason="NOT_SERVING")
            self._answering = self._answering or (address, answer)

    @property
    def found(self) -> tuple[Address, Instance] | None:
        """The address that was chosen, and its instance."""
        return self._found

    def failure(self) -> SowError:
        """The error when no address was chosen. Where one was not reached, it may pass: UNREACHABLE."""
        why = [self._why[address] for address in self._addresses if address in self._why]
        passing = [error for error in why if isinstance(error, Unavailable)]
        if why and not passing:
            return why[0] if len(why) == 1 else type(why[0])(_told(why), reason=why[0].reason, details=why[0].details)
        servers = ", ".join(address.target for address in self._addresses)
        told = f": {_told(why)}" if why else ""
        # A problem of TLS is told as such where it is one at every address.
        details = why[0].details if all("tls" in error.details for error in why) and why else {}
        if self._refused:
            return AllRefused(f"no instance of {servers} serves{told}", reason="UNREACHABLE", details=details)
        within = f"within {self._seconds:.3g} s"
        return Unavailable(f"no instance of {servers} serves {within}{told}", reason="UNREACHABLE", details=details)


_OF_ADDRESSES: Final = frozenset({"NO_SOW_SERVER", *LOSSES})


def _told(why: Sequence[SowError]) -> str:
    return "; ".join(error.message for error in why)


def other_cluster(found: Instance, cluster: str) -> SowError:
    """The error of an instance of another cluster: it has other data."""
    return FailedPrecondition(
        f"{found.shown} is of the cluster {found.cluster}, and this client is of the cluster {cluster}",
        reason="OTHER_CLUSTER",
        details={"server": found.address, "cluster": found.cluster, "expected": cluster},
    )


def keeps_to(what: str, address: str, error: SowError) -> SowError:
    """The error of a call that keeps to an instance that is lost."""
    return type(error)(
        f"{what} keeps to {address}, where it began, and does not go on at another instance: {error.message}",
        reason=error.reason,
        details=error.details | {"server": address},
    )


def checked_mode(failover_publish: str) -> FailoverPublish:
    """Raises InvalidArgument for another text."""
    if failover_publish not in ("unsent", "again"):
        raise invalid("failover_publish", f'{failover_publish!r} is neither "unsent" nor "again"')
    return "again" if failover_publish == "again" else "unsent"
