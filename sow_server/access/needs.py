"""The need of each RPC (rule A3): one table, which must name every method that the server serves."""

from __future__ import annotations

import enum
from typing import Final, NamedTuple


class Action(enum.Enum):
    """Something that a grant allows or denies."""

    __hash__ = object.__hash__  # Enum's own runs Python, and decisions are looked up by action for every call

    READ = "read"
    CONSUME = "consume"
    PUBLISH = "publish"
    DELETE = "delete"
    CREATE = "create"
    LOAD = "load"
    TOPIC_ADMIN = "topic-admin"
    OBSERVE = "observe"
    OPERATOR = "operator"
    REPLICATE = "replicate"


SERVER_ACTIONS: Final = frozenset({Action.OBSERVE, Action.OPERATOR})
"""Actions on the server; all others are on a topic, except REPLICATE, which only peers have."""
GRANTABLE: Final = tuple(action for action in Action if action is not Action.REPLICATE)


WATCHES: Final = "watches"
"""The name under which calls that watch health, and stay, are counted (rule N5)."""


class Scope(enum.Enum):
    """The place where an action is checked."""

    OPEN = "open"
    """Nowhere: callers without a credential may call it, too."""
    TIERED = "tiered"
    """Nowhere, and callers without a credential learn less than those with one."""
    KNOWN = "known"
    """Every identity may call it, and sees only its own things."""
    SERVER = "server"
    """Before the handler runs."""
    TOPIC = "topic"
    """The handler checks the need, for each topic of the request (access [3])."""


class Need(NamedTuple):
    """The needs of one method."""

    scope: Scope
    action: Action | None = None
    audited: bool = False
    """True if the audit log has each call, also those that are allowed. Denied calls are always there."""
    counts_as: str = "rpcs"
    """The name under which its calls under way count (rules A7, N5)."""
    withdraws: bool = False
    """True if it takes access away. It is never refused because the audit log cannot be written (rule A8)."""


class MissingNeed(Exception):
    """A method that is served and not in the table: the server does not start with it."""


_OPEN: Final = Need(Scope.OPEN)
_WATCHES: Final = Need(Scope.OPEN, counts_as=WATCHES)
_TIERED: Final = Need(Scope.TIERED)
_KNOWN: Final = Need(Scope.KNOWN)
_DESCRIBES: Final = Need(Scope.KNOWN, counts_as="descriptions")
_READ: Final = Need(Scope.TOPIC, Action.READ)
_CONSUME: Final = Need(Scope.TOPIC, Action.CONSUME)
_PUBLISH: Final = Need(Scope.TOPIC, Action.PUBLISH)
_LOAD: Final = Need(Scope.TOPIC, Action.LOAD, audited=True)
_TOPIC_ADMIN: Final = Need(Scope.TOPIC, Action.TOPIC_ADMIN, audited=True)
_OBSERVE: Final = Need(Scope.SERVER, Action.OBSERVE)
_OPERATOR: Final = Need(Scope.SERVER, Action.OPERATOR, audited=True)
_WITHDRAWS: Final = Need(Scope.SERVER, Action.OPERATOR, audited=True, withdraws=True)
_REPLICATE: Final = Need(Scope.SERVER, Action.REPLICATE, audited=True)

NEEDS: Final[dict[str, Need]] = {
    "/sow.v1.SowService/Publish": _PUBLISH,
    "/sow.v1.SowService/PublishStream": _PUBLISH,
    "/sow.v1.SowService/Get": _READ,  # and, with `touch`, PUBLISH
    "/sow.v1.SowService/Query": _READ,
    "/sow.v1.SowService/Subscribe": _READ,
    "/sow.v1.SowService/SowDelete": Need(Scope.TOPIC, Action.DELETE, audited=True),
    "/sow.v1.SowService/Touch": _PUBLISH,
    "/sow.v1.SowService/GetPublisher": _KNOWN,
    "/sow.v1.SowService/OpenPublisher": _KNOWN,
    "/sow.v1.SowService/Acknowledge": _CONSUME,
    "/sow.v1.SowService/Rewind": _CONSUME,
    "/sow.v1.SowService/BrowseDurable": _CONSUME,
    "/sow.v1.SowService/ReadHistory": _READ,
    "/sow.v1.AdminService/CreateTopic": Need(Scope.TOPIC, Action.CREATE, audited=True),
    "/sow.v1.AdminService/AlterTopic": _TOPIC_ADMIN,
    "/sow.v1.AdminService/DescribeTopic": _KNOWN,
    "/sow.v1.AdminService/ListTopics": _KNOWN,
    "/sow.v1.AdminService/DeleteTopic": _TOPIC_ADMIN,
    "/sow.v1.AdminService/CheckTopic": _TOPIC_ADMIN,
    "/sow.v1.AdminService/Restamp": _TOPIC_ADMIN,
    "/sow.v1.AdminService/GetStatus": _OBSERVE,
    "/sow.v1.AdminService/DescribeInstance": _DESCRIBES,
    "/sow.v1.AdminService/GetPlacement": _TIERED,
    "/sow.v1.AdminService/ReloadPlacement": _OPERATOR,
    "/sow.v1.AdminService/GetExpiryHorizon": _READ,
    "/sow.v1.AdminService/ListSubscriptions": _OBSERVE,
    "/sow.v1.AdminService/EndSubscription": _WITHDRAWS,
    "/sow.v1.AdminService/WatchFigures": _OBSERVE,
    "/sow.v1.AdminService/GetConfig": _OPERATOR,
    "/sow.v1.AdminService/WatchLog": _OPERATOR,
    "/sow.v1.AdminService/AcceptClock": _OPERATOR,
    "/sow.v1.AdminService/Compact": _OPERATOR,
    "/sow.v1.AdminService/SetPolicy": _OPERATOR,
    "/sow.v1.AdminService/GetPolicy": _OBSERVE,
    "/sow.v1.AdminService/ListPolicies": _OBSERVE,
    "/sow.v1.AdminService/DeletePolicy": _OPERATOR,
    "/sow.v1.AdminService/ListDurables": _KNOWN,
    "/sow.v1.AdminService/DescribeDurable": _CONSUME,
    "/sow.v1.AdminService/DeleteDurable": Need(Scope.TOPIC, Action.CONSUME, audited=True),
    "/sow.v1.AdminService/ClearBacklog": Need(Scope.TOPIC, Action.CONSUME, audited=True),
    "/sow.v1.AdminService/GetReplicationStatus": _OBSERVE,
    "/sow.v1.AdminService/VerifyReplication": _OPERATOR,
    "/sow.v1.AdminService/RepairReplication": _OPERATOR,
    "/sow.v1.AdminService/AddPeer": _OPERATOR,
    "/sow.v1.AdminService/RemovePeer": _WITHDRAWS,
    "/sow.v1.AdminService/PausePeer": _WITHDRAWS,
    "/sow.v1.AdminService/ResumePeer": _OPERATOR,
    "/sow.v1.AdminService/Backup": _OPERATOR,
    "/sow.v1.LoadService/OpenLoad": _LOAD,
    "/sow.v1.LoadService/StageLoad": Need(Scope.TOPIC, Action.LOAD),
    "/sow.v1.LoadService/CommitLoad": _LOAD,
    "/sow.v1.LoadService/GetLoad": Need(Scope.TOPIC, Action.LOAD),
    "/sow.v1.LoadService/RenewLoad": Need(Scope.TOPIC, Action.LOAD),
    "/sow.v1.LoadService/AbortLoad": _LOAD,
    "/sow.v1.LoadService/ListLoads": _KNOWN,
    "/sow.v1.SnapshotService/OpenExport": _READ,
    "/sow.v1.SnapshotService/ReadExport": _READ,
    "/sow.v1.SnapshotService/RenewExport": _READ,
    "/sow.v1.SnapshotService/CloseExport": _READ,
    "/sow.v1.SnapshotService/PlanChanges": _READ,
    "/sow.v1.SnapshotService/ReadChanges": _READ,
    "/sow.v1.SnapshotService/PinJournal": _CONSUME,
    "/sow.v1.AccessService/WhoAmI": _KNOWN,
    "/sow.v1.AccessService/CheckAccess": _OPERATOR,
    "/sow.v1.AccessService/ReloadAccess": _WITHDRAWS,
    "/sow.v1.AccessService/ListSessions": _OBSERVE,
    "/sow.v1.AccessService/EndSession": _WITHDRAWS,
    "/sow.v1.ReplicationService/Replicate": _REPLICATE,
    "/sow.v1.ReplicationService/Checksum": _REPLICATE,
    "/sow.v1.ReplicationService/ListVersions": _REPLICATE,
    "/sow.v1.ReplicationService/FetchRows": _REPLICATE,
    "/sow.v1.ReplicationService/MergeRows": _REPLICATE,
    "/grpc.health.v1.Health/Check": _OPEN,
    "/grpc.health.v1.Health/Watch": _WATCHES,
    "/grpc.health.v1.Health/List": _OPEN,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _KNOWN,
}
"""Keyed by the method's path."""


def need_of(path: str) -> Need:
    """The need of a method. Raises MissingNeed."""
    try:
        return NEEDS[path]
    except KeyError:
        raise MissingNeed(f"{path} is served, but sow_server/access/needs.py has no need for it") from None
