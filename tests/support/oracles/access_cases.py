"""One request, or several, for each method that a server serves: well-formed, and about things that exist.

So the answer shows the decision about the caller, and no fault of the request. A case makes its request for one caller:
a thing that a call uses up, such as a load or a topic to delete, is there once for each, with the caller's name.

`world.SetUp` makes those things. Callers own the things with their names, made while they could do everything.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from sow.v1 import access_pb2, admin_pb2, load_pb2, replication_pb2, snapshot_pb2, sow_pb2, types_pb2
from sow_replication.wire import sealed
from tests.support.stores.bad_rows import Bad, packed

OWNER: Final = "owner"
"""An identity that is no column of the table, and owns things."""
PEERS: Final = ("ldn", "par")
"""Peers, and the topic that both may send is `orders`."""
NO_BOOKMARK: Final = "no bookmark"


class Things(NamedTuple):
    """The things of one caller, by which a request is made."""

    caller: str
    loads: dict[str, str]
    """Ids of loads, by the case that uses them."""
    exports: dict[str, str]
    session: str = ""
    """Of a consumer of the durable `ack` that has been handed an entry."""
    handed: str = NO_BOOKMARK
    """The bookmark of that entry."""
    victim: str = ""
    """The id of a session that may be ended."""
    head: str = NO_BOOKMARK
    """A bookmark of the present."""


MakeRequest: TypeAlias = Callable[[Things], Message]


@dataclass(frozen=True, slots=True)
class Case:
    """A row of the table."""

    method: str
    """Its service and name, without the package."""
    request: MakeRequest
    note: str = ""
    """Tells cases of one method apart."""
    fails: str = ""
    """The reason for which it fails once it is allowed."""

    @property
    def name(self) -> str:
        """The name of its row."""
        return f"{self.method} ({self.note})" if self.note else self.method


def _publish(topic: str, name: str, region: str = "eu", *, key: str | None = None) -> sow_pb2.PublishRequest:
    record = sow_pb2.PublishRecord(payload=_document(name, region), key=key)
    return sow_pb2.PublishRequest(topic=topic, records=[record])


def _document(key: str, region: str = "eu") -> bytes:
    return f'{{"id":"{key}","region":"{region}"}}'.encode()


def _sealed(message: Message) -> replication_pb2.Sealed:
    return sealed(message)


def _shared(name: str) -> replication_pb2.ReplicatedTopic:
    return replication_pb2.ReplicatedTopic(
        name=name, key=["/id"], message_type="json", separator=b"\x01", acts_on_expiration=True
    )


ORDERS: Final = _shared("orders")
SECRET: Final = _shared("secret")


def _instance(name: str) -> replication_pb2.Instance:
    return replication_pb2.Instance(name=name, id=f"id-{name}", epoch="epoch")


def _own(things: Things) -> replication_pb2.Instance:
    return _instance(things.caller if things.caller in PEERS else PEERS[0])


def _posing(things: Things) -> replication_pb2.Instance:
    return _instance(PEERS[0] if things.caller == PEERS[1] else PEERS[1])


def _now_micros() -> int:
    return time.time_ns() // 1000 + 1_000_000  # an answer is refused when that has passed


def _hello(instance: replication_pb2.Instance) -> Message:
    hello = replication_pb2.Hello(protocol=1, instance=instance, topics_pattern=".*", topics=[ORDERS])
    return _sealed(replication_pb2.ReplicateRequest(hello=hello))


def _checksum(instance: replication_pb2.Instance, topic: replication_pb2.ReplicatedTopic = ORDERS) -> Message:
    return _sealed(
        replication_pb2.ChecksumRequest(instance=instance, topic=topic, buckets=16, now_micros=_now_micros())
    )


def _versions(instance: replication_pb2.Instance, topic: str = "orders") -> Message:
    return _sealed(
        replication_pb2.ListVersionsRequest(
            instance=instance, topic=topic, buckets=1, bucket=[0], now_micros=_now_micros()
        )
    )


def _fetch(instance: replication_pb2.Instance, topic: str = "orders") -> Message:
    return _sealed(replication_pb2.FetchRowsRequest(instance=instance, topic=topic, key=["eu"]))


def _merge(instance: replication_pb2.Instance, topic: replication_pb2.ReplicatedTopic = ORDERS) -> Message:
    chunk = packed([Bad(key=b"merged", payload=_document("merged"))])
    return _sealed(
        replication_pb2.MergeRowsRequest(
            instance=instance, topic=topic, chunk=chunk, origins=[instance.name], crc32=zlib.crc32(chunk)
        )
    )


_TTL: Final = types_pb2.Lifetime(ttl_micros=3_600_000_000)
COUNTED: Final = (sow_pb2.NamedExpression(name="n", expression="COUNT(*)"),)
_SETTINGS: Final = admin_pb2.TopicSettings(key=["/id"])


def policy(name: str) -> admin_pb2.Policy:
    """A policy that matches nothing."""
    settings = types_pb2.DurableSettings(delivery_limit=3)
    return admin_pb2.Policy(
        name=name, pattern=r"unused\..*", applies_to=admin_pb2.POLICY_TARGET_DURABLES, durable=settings
    )


def _constant(message: Message) -> MakeRequest:
    return lambda things: message


def _delete(key: str) -> Message:
    return sow_pb2.SowDeleteRequest(topic="orders", by_keys=sow_pb2.KeyList(keys=[key]))


def _foreign(name: str) -> str:
    """The stored name of a durable of the owner: the worst that another caller can guess."""
    return f"{OWNER}/{name}"


SOW_CASES: Final = (
    Case("SowService.Publish", lambda things: _publish("orders", f"p-{things.caller}")),
    Case("SowService.Publish", lambda things: _publish("orders", f"us-{things.caller}"), "over a record of other rows"),
    Case("SowService.Publish", _constant(_publish("orders", "us", "us")), "of a record of other rows"),
    Case(
        "SowService.Publish",
        lambda things: _publish(f"new-{things.caller}", "1", key="1"),
        "to a topic that is not there",
    ),
    Case(
        "SowService.PublishStream",
        lambda things: sow_pb2.PublishStreamRequest(topic="orders", payload=[_document(f"s-{things.caller}")]),
    ),
    Case(
        "SowService.PublishStream",
        lambda things: sow_pb2.PublishStreamRequest(
            topic="orders", payload=[_document(f"r-{things.caller}")], remove=[True]
        ),
        "of a removal",
    ),
    Case("SowService.Get", _constant(sow_pb2.GetRequest(topic="orders", keys=["eu"]))),
    Case("SowService.Get", _constant(sow_pb2.GetRequest(topic="orders", keys=["us"])), "a record of other rows"),
    Case("SowService.Get", _constant(sow_pb2.GetRequest(topic="absent", keys=["eu"])), "of a topic that is not there"),
    Case("SowService.Get", _constant(sow_pb2.GetRequest(topic="orders", keys=["eu"], touch=_TTL)), "that touches"),
    Case(
        "SowService.Get",
        _constant(sow_pb2.GetRequest(topic="orders", keys=["us"], touch=_TTL)),
        "that touches a record of other rows",
    ),
    Case("SowService.Query", _constant(sow_pb2.QueryRequest(topic="orders"))),
    Case("SowService.Query", _constant(sow_pb2.QueryRequest(topic="orders", filter="/id = 'us'")), "other rows"),
    Case("SowService.Query", _constant(sow_pb2.QueryRequest(topic="orders", aggregate=COUNTED)), "groups"),
    Case("SowService.Subscribe", _constant(sow_pb2.SubscribeRequest(topic="orders", sow=True))),
    Case("SowService.Subscribe", _constant(sow_pb2.SubscribeRequest(topic_pattern="ord.*", sow=True)), "to a pattern"),
    Case(
        "SowService.Subscribe",
        _constant(
            sow_pb2.SubscribeRequest(topic="orders", earliest=True, durable=sow_pb2.DurableAttachment(name="fresh"))
        ),
        "as a durable",
    ),
    Case("SowService.SowDelete", lambda things: _delete(f"d-{things.caller}")),
    Case("SowService.SowDelete", lambda things: _delete(f"us-d-{things.caller}"), "a record of other rows"),
    Case("SowService.Touch", _constant(sow_pb2.TouchRequest(topic="orders", keys=["eu"], lifetime=_TTL))),
    Case(
        "SowService.Touch",
        _constant(sow_pb2.TouchRequest(topic="orders", keys=["us"], lifetime=_TTL)),
        "a record of other rows",
    ),
    Case("SowService.GetPublisher", _constant(sow_pb2.GetPublisherRequest(publisher_id="publisher"))),
    Case("SowService.OpenPublisher", _constant(sow_pb2.OpenPublisherRequest(publisher_id="publisher"))),
    Case(
        "SowService.Acknowledge",
        lambda things: sow_pb2.AcknowledgeRequest(
            topic="orders", durable="ack", session=things.session, bookmark=things.handed
        ),
    ),
    Case(
        "SowService.Acknowledge",
        lambda things: sow_pb2.AcknowledgeRequest(
            topic="orders", durable=_foreign("kept"), session="guessed", bookmark=things.head
        ),
        "another's",
        fails="DURABLE_DETACHED",  # the session is guessed
    ),
    Case(
        "SowService.Acknowledge",
        _constant(sow_pb2.AcknowledgeRequest(topic="orders", durable=_foreign("kept"), session="guessed", detach=True)),
        "another's, whose consumer stays",
    ),
    Case("SowService.Rewind", _constant(sow_pb2.RewindRequest(topic="orders", durable="rewind", earliest=True))),
    Case(
        "SowService.Rewind",
        _constant(sow_pb2.RewindRequest(topic="orders", durable=_foreign("kept"), earliest=True)),
        "another's",
    ),
    Case("SowService.BrowseDurable", _constant(sow_pb2.BrowseDurableRequest(topic="orders", durable="rewind"))),
    Case(
        "SowService.BrowseDurable",
        _constant(sow_pb2.BrowseDurableRequest(topic="orders", durable=_foreign("kept"))),
        "another's",
    ),
    Case("SowService.ReadHistory", _constant(sow_pb2.ReadHistoryRequest(topic="orders", key="eu"))),
    Case(
        "SowService.ReadHistory",
        _constant(sow_pb2.ReadHistoryRequest(topic="orders", key="us")),
        "of a record of other rows",
    ),
    Case(
        "SowService.ReadHistory",
        _constant(sow_pb2.ReadHistoryRequest(topic="absent", key="eu")),
        "of a topic that is not there",
    ),
)
ADMIN_CASES: Final = (
    Case(
        "AdminService.CreateTopic",
        lambda things: admin_pb2.CreateTopicRequest(name=f"made-{things.caller}", settings=_SETTINGS),
    ),
    Case(
        "AdminService.CreateTopic",
        _constant(admin_pb2.CreateTopicRequest(name="orders", settings=_SETTINGS)),
        "that is there",
        fails="TOPIC_EXISTS",
    ),
    Case(
        "AdminService.CreateTopic",
        lambda things: admin_pb2.CreateTopicRequest(name=f"copied-{things.caller}", settings=_SETTINGS, here=True),
        "of another cell",
    ),
    Case(
        "AdminService.AlterTopic",
        _constant(
            admin_pb2.AlterTopicRequest(
                name="orders", settings=admin_pb2.TopicSettings(max_entries=1_000_000), update_paths=["max_entries"]
            )
        ),
    ),
    Case("AdminService.DescribeTopic", _constant(admin_pb2.DescribeTopicRequest(name="orders"))),
    Case("AdminService.ListTopics", _constant(admin_pb2.ListTopicsRequest())),
    Case("AdminService.DeleteTopic", lambda things: admin_pb2.DeleteTopicRequest(name=f"doomed-{things.caller}")),
    Case("AdminService.CheckTopic", _constant(admin_pb2.CheckTopicRequest(name="orders"))),
    Case(
        "AdminService.Restamp",
        _constant(admin_pb2.RestampRequest(topic="orders", mode=admin_pb2.RESTAMP_MODE_CLEAR, dry_run=True)),
    ),
    Case("AdminService.GetStatus", _constant(admin_pb2.GetStatusRequest())),
    Case("AdminService.DescribeInstance", _constant(admin_pb2.DescribeInstanceRequest())),
    Case("AdminService.GetPlacement", _constant(admin_pb2.GetPlacementRequest())),
    Case(
        "AdminService.ReloadPlacement",
        _constant(admin_pb2.ReloadPlacementRequest()),
        fails="INVALID_ARGUMENT",  # this server has none
    ),
    Case(
        "AdminService.ReloadPlacement",
        _constant(admin_pb2.ReloadPlacementRequest(placement="version = 2")),
        "with a text",
        fails="INVALID_ARGUMENT",
    ),
    Case("AdminService.GetExpiryHorizon", _constant(admin_pb2.GetExpiryHorizonRequest(topic="orders"))),
    Case("AdminService.GetExpiryHorizon", _constant(admin_pb2.GetExpiryHorizonRequest()), "of all topics"),
    Case("AdminService.ListSubscriptions", _constant(admin_pb2.ListSubscriptionsRequest())),
    Case(
        "AdminService.EndSubscription",
        _constant(admin_pb2.EndSubscriptionRequest(id="none")),
        fails="INVALID_ARGUMENT",  # there is none of this id
    ),
    Case("AdminService.WatchFigures", _constant(admin_pb2.WatchFiguresRequest())),
    Case("AdminService.WatchLog", _constant(admin_pb2.WatchLogRequest())),
    Case("AdminService.GetConfig", _constant(admin_pb2.GetConfigRequest())),
    Case("AdminService.AcceptClock", _constant(admin_pb2.AcceptClockRequest())),
    Case("AdminService.Compact", _constant(admin_pb2.CompactRequest())),
    Case("AdminService.SetPolicy", _constant(admin_pb2.SetPolicyRequest(policy=policy("set")))),
    Case("AdminService.GetPolicy", _constant(admin_pb2.GetPolicyRequest(name="kept"))),
    Case("AdminService.ListPolicies", _constant(admin_pb2.ListPoliciesRequest())),
    Case("AdminService.DeletePolicy", lambda things: admin_pb2.DeletePolicyRequest(name=f"doomed-{things.caller}")),
    Case("AdminService.ListDurables", _constant(admin_pb2.ListDurablesRequest(topic="orders"))),
    Case("AdminService.DescribeDurable", _constant(admin_pb2.DescribeDurableRequest(topic="orders", name="rewind"))),
    Case(
        "AdminService.DescribeDurable",
        _constant(admin_pb2.DescribeDurableRequest(topic="orders", name=_foreign("kept"))),
        "another's",
    ),
    Case("AdminService.DeleteDurable", _constant(admin_pb2.DeleteDurableRequest(topic="orders", name="doomed"))),
    Case(
        "AdminService.DeleteDurable",
        lambda things: admin_pb2.DeleteDurableRequest(topic="orders", name=_foreign(f"doomed-{things.caller}")),
        "another's",
    ),
    Case("AdminService.ClearBacklog", _constant(admin_pb2.ClearBacklogRequest(topic="orders", name="rewind"))),
    Case(
        "AdminService.ClearBacklog",
        _constant(admin_pb2.ClearBacklogRequest(topic="orders", name=_foreign("kept"))),
        "another's",
    ),
    Case("AdminService.ClearBacklog", _constant(admin_pb2.ClearBacklogRequest(topic="orders")), "of all durables"),
    Case("AdminService.GetReplicationStatus", _constant(admin_pb2.GetReplicationStatusRequest())),
    Case(
        "AdminService.VerifyReplication",
        _constant(admin_pb2.VerifyReplicationRequest(peer=PEERS[0])),
        fails="REPLICATION_UNAVAILABLE",  # the peer is not there
    ),
    Case(
        "AdminService.RepairReplication",
        _constant(admin_pb2.RepairReplicationRequest(peer=PEERS[0])),
        fails="REPLICATION_UNAVAILABLE",  # the peer is not there
    ),
    Case(
        "AdminService.AddPeer",
        _constant(admin_pb2.AddPeerRequest(name=PEERS[0], address="127.0.0.1:1")),
        fails="SET_IN_CONFIG",  # it is in the file
    ),
    Case("AdminService.RemovePeer", _constant(admin_pb2.RemovePeerRequest(name=PEERS[0])), fails="SET_IN_CONFIG"),
    Case("AdminService.PausePeer", _constant(admin_pb2.PausePeerRequest(name=PEERS[0]))),
    Case("AdminService.ResumePeer", _constant(admin_pb2.ResumePeerRequest(name=PEERS[0]))),
    Case("AdminService.Backup", lambda things: admin_pb2.BackupRequest(name=f"by-{things.caller}")),
)
SNAPSHOT_CASES: Final = (
    Case("SnapshotService.OpenExport", _constant(snapshot_pb2.OpenExportRequest(topic="orders"))),
    *(
        Case(f"SnapshotService.{name}", make(kind), note)
        for name, make in (
            (
                "ReadExport",
                lambda kind: (
                    lambda things: snapshot_pb2.ReadExportRequest(
                        export_id=things.exports[kind], columns=[snapshot_pb2.PACKED_COLUMN_KEY]
                    )
                ),
            ),
            (
                "RenewExport",
                lambda kind: lambda things: snapshot_pb2.RenewExportRequest(export_id=things.exports[kind]),
            ),
            (
                "CloseExport",
                lambda kind: lambda things: snapshot_pb2.CloseExportRequest(export_id=things.exports[kind]),
            ),
        )
        for kind, note in (("own", ""), ("another's", "another's"))
    ),
    Case(
        "SnapshotService.PlanChanges",
        _constant(snapshot_pb2.PlanChangesRequest(topic="orders", earliest=True)),
    ),
    Case(
        "SnapshotService.ReadChanges",
        lambda things: snapshot_pb2.ReadChangesRequest(
            topic="orders",
            start_bookmark=things.head,
            end_bookmark=things.head,
            columns=[snapshot_pb2.PACKED_COLUMN_KEY],
        ),
    ),
    Case(
        "SnapshotService.PinJournal",
        lambda things: snapshot_pb2.PinJournalRequest(topic="orders", name="pin", bookmark=things.head),
    ),
)


def _load(make: Callable[[str], Message], use: str) -> MakeRequest:
    return lambda things: make(things.loads[use])


def _staged(load: str) -> Message:
    return load_pb2.StageLoadRequest(load_id=load, first_row=1, payload=[_document("loaded")])


LOAD_CASES: Final = (
    Case("LoadService.OpenLoad", _constant(load_pb2.OpenLoadRequest(topic="loaded"))),
    Case("LoadService.StageLoad", _load(_staged, "own")),
    Case("LoadService.StageLoad", _load(_staged, "another's"), "another's"),
    Case("LoadService.CommitLoad", _load(lambda load: load_pb2.CommitLoadRequest(load_id=load), "commit")),
    Case(
        "LoadService.CommitLoad",
        _load(lambda load: load_pb2.CommitLoadRequest(load_id=load), "another's commit"),
        "another's",
    ),
    Case("LoadService.GetLoad", _load(lambda load: load_pb2.GetLoadRequest(load_id=load), "own")),
    Case("LoadService.GetLoad", _load(lambda load: load_pb2.GetLoadRequest(load_id=load), "another's"), "another's"),
    Case("LoadService.RenewLoad", _load(lambda load: load_pb2.RenewLoadRequest(load_id=load), "own")),
    Case(
        "LoadService.RenewLoad", _load(lambda load: load_pb2.RenewLoadRequest(load_id=load), "another's"), "another's"
    ),
    Case("LoadService.AbortLoad", _load(lambda load: load_pb2.AbortLoadRequest(load_id=load), "own")),
    Case(
        "LoadService.AbortLoad", _load(lambda load: load_pb2.AbortLoadRequest(load_id=load), "another's"), "another's"
    ),
    Case("LoadService.ListLoads", _constant(load_pb2.ListLoadsRequest())),
)
ACCESS_CASES: Final = (
    Case("AccessService.WhoAmI", _constant(access_pb2.WhoAmIRequest())),
    Case(
        "AccessService.CheckAccess",
        _constant(access_pb2.CheckAccessRequest(identity=OWNER, action="read", topic="orders")),
    ),
    Case("AccessService.ReloadAccess", _constant(access_pb2.ReloadAccessRequest())),
    Case("AccessService.ListSessions", _constant(access_pb2.ListSessionsRequest())),
    Case("AccessService.EndSession", lambda things: access_pb2.EndSessionRequest(id=things.victim)),
)
LINK_CASES: Final = tuple(
    Case(f"ReplicationService.{name}", make, note)
    for name, make, note in (
        ("Replicate", lambda things: _hello(_own(things)), ""),
        ("Replicate", lambda things: _hello(_posing(things)), "as another peer"),
        ("Checksum", lambda things: _checksum(_own(things)), ""),
        ("Checksum", lambda things: _checksum(_posing(things)), "as another peer"),
        ("Checksum", lambda things: _checksum(_own(things), SECRET), "of a topic that is not its own"),
        ("ListVersions", lambda things: _versions(_own(things)), ""),
        ("ListVersions", lambda things: _versions(_posing(things)), "as another peer"),
        ("ListVersions", lambda things: _versions(_own(things), "secret"), "of a topic that is not its own"),
        ("FetchRows", lambda things: _fetch(_own(things)), ""),
        ("FetchRows", lambda things: _fetch(_posing(things)), "as another peer"),
        ("FetchRows", lambda things: _fetch(_own(things), "secret"), "of a topic that is not its own"),
        ("MergeRows", lambda things: _merge(_own(things)), ""),
        ("MergeRows", lambda things: _merge(_posing(things)), "as another peer"),
        ("MergeRows", lambda things: _merge(_own(things), SECRET), "of a topic that is not its own"),
    )
)
STANDARD_CASES: Final = (
    Case("Health.Check", _constant(health_pb2.HealthCheckRequest())),
    Case("Health.Watch", _constant(health_pb2.HealthCheckRequest())),
    Case(
        "ServerReflection.ServerReflectionInfo",
        _constant(reflection_pb2.ServerReflectionRequest(list_services="*")),
    ),
)
CASES: Final[tuple[Case, ...]] = (
    *SOW_CASES,
    *ADMIN_CASES,
    *SNAPSHOT_CASES,
    *LOAD_CASES,
    *ACCESS_CASES,
    *LINK_CASES,
    *STANDARD_CASES,
)
