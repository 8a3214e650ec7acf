"""The decision of a receiver about a Hello (rules R4, R6, R11, J14): a pure function."""

from __future__ import annotations

from dataclasses import dataclass

from sow.v1 import replication_pb2, types_pb2
from sow_peering import InstanceIdentity, PeerState
from sow_replication.messages import PROTOCOL, identity_of
from sow_replication.ports import Reason, Refused, SourceState


@dataclass(frozen=True, slots=True)
class Continue:
    """The changes continue after the cursor."""

    cursor: int


@dataclass(frozen=True, slots=True)
class Begin:
    """Every topic has to be seeded; changes start at the sender's head."""

    missing_is_deleted: bool
    """As in `ports.SourceState`."""


@dataclass(frozen=True, slots=True)
class Wait:
    """The sender first has to take the changes of this instance. The store remembers that."""


Decision = Continue | Begin | Wait | Refused


@dataclass(frozen=True, slots=True)
class Known:
    """The state of this instance when the Hello comes."""

    own: InstanceIdentity
    accepted: bool
    """True if the configuration names the sender."""
    live: InstanceIdentity | None
    """The instance that has a link under this name at the moment."""
    row: SourceState | None
    sends: PeerState | None
    """The state of the opposite direction; None: this instance does not send back everything that it receives."""
    head: int
    """The last sequence of this instance; 0: it has never had a change."""
    cluster: str = ""
    """The cluster of this instance; empty: none."""
    disabled: str = ""
    """The fault of the stored state of the sender; empty: it has none."""


def decide(hello: replication_pb2.Hello, known: Known) -> Decision:
    """Decides about a sender."""
    own = known.own
    peer = identity_of(hello.instance)
    objection = _objection(hello, peer, known)
    if objection is not None:
        return objection
    row = known.row
    if row is None:
        return Begin(missing_is_deleted=False)
    same = row.identity == peer
    carries = (row.topics, row.filter) == (hello.topics_pattern, hello.filter)
    if same and row.wait_for == 0:
        if carries and row.cursor <= hello.head_sequence:
            return Continue(row.cursor)
        if not carries:
            return Begin(missing_is_deleted=False)  # nothing was lost or purged: only the pattern or filter differs
    if hello.authoritative and row.identity.epoch != peer.epoch:
        return Begin(missing_is_deleted=False)
    # The sender may hold rows that were deleted here.
    if known.sends is None:
        return Begin(missing_is_deleted=True)
    if hello.waiting and own.name > peer.name:
        return Begin(missing_is_deleted=True)  # otherwise each would wait for the other
    if known.head == 0:
        # This instance never had a record, so it has deleted none, and has no reason to wait.
        return Begin(missing_is_deleted=False)
    if row.wait_for == 0:
        return Wait()
    if known.sends.identity == peer and known.sends.acknowledged >= row.wait_for:
        return Begin(missing_is_deleted=False)
    return pending(own.name, peer.name)


def _objection(hello: replication_pb2.Hello, peer: InstanceIdentity, known: Known) -> Refused | None:
    own = known.own
    if hello.protocol != PROTOCOL:
        return Refused(
            types_pb2.ERROR_REASON_PROTOCOL_MISMATCH,
            f"{own.name} speaks version {PROTOCOL} of the replication protocol, {peer.name} version {hello.protocol}",
        )
    objection = not_itself(own, peer) or of_other_cluster(own, known.cluster, hello.instance)
    if objection is not None:
        return objection
    if not known.accepted:
        return not_accepted(own, peer.name)
    if known.disabled:
        return disabled(own, peer.name, known.disabled)
    if known.live is not None and known.live.id != peer.id:
        return Refused(
            types_pb2.ERROR_REASON_INSTANCE_NAME_CLASH, f"another instance is connected as {peer.name} to {own.name}"
        )
    return None


def not_itself(own: InstanceIdentity, peer: InstanceIdentity) -> Refused | None:
    """An objection if the other end is this instance or has its name (rule R11)."""
    if peer.id == own.id:
        return Refused(types_pb2.ERROR_REASON_PEER_IS_SELF, f"{own.name} would replicate to itself")
    if peer.name == own.name:
        return Refused(types_pb2.ERROR_REASON_INSTANCE_NAME_CLASH, f"both instances are named {own.name}")
    return None


def of_other_cluster(own: InstanceIdentity, cluster: str, peer: replication_pb2.Instance) -> Refused | None:
    """An objection if both ends have a cluster, and not the same (rule R11). An instance without one is accepted, so
    that the setting can be given to one instance after the other."""
    if not cluster or not peer.cluster or peer.cluster == cluster:
        return None
    return Refused(
        types_pb2.ERROR_REASON_PEER_OTHER_CLUSTER,
        f"{own.name} is of the cluster {cluster}, {peer.name[:200]} of the cluster {peer.cluster[:200]}",
    )


def pending(own: str, peer: str) -> Refused:
    """The peer first has to take the changes of this instance. Both ends show the message, so it names them."""
    reason: Reason = types_pb2.ERROR_REASON_RESEED_PENDING
    return Refused(
        reason,
        f"{peer} has been away for too long, or is new or restored: it first takes the changes of {own}, by itself",
    )


def disabled(own: InstanceIdentity, name: str, fault: str) -> Refused:
    """The stored state of the peer cannot be used. Both ends show the message."""
    return Refused(
        types_pb2.ERROR_REASON_DATA_DAMAGED,
        f"what {own.name} has stored of {name} cannot be used ({fault}): remove it there, by "
        f"`sow replication remove-peer {name}`",
    )


def not_accepted(own: InstanceIdentity, name: str) -> Refused:
    """The configuration names no such instance (rule R1)."""
    return Refused(
        types_pb2.ERROR_REASON_PEER_NOT_ACCEPTED,
        f"{own.name} does not accept {name[:200]}: it is neither one of its peers nor in its `accept`; add it there",
    )
