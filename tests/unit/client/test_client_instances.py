"""Replication, backups and REPLICATED writes in both clients, against a scripted server."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial

import grpc
import grpc.aio
import pytest
from google.protobuf import timestamp_pb2

from sow.v1 import admin_pb2, types_pb2
from sow_client import (
    BackupMade,
    Difference,
    InvalidArgument,
    LinkTopic,
    Repaired,
    ReplicationUnavailable,
    Unavailable,
    Verified,
)
from tests.support.fakes.called_server import (
    Server,
    loop,
    script,
    server,
)
from tests.support.fakes.scripted import SECONDS_MAX

__all__ = ["loop", "script", "server"]  # fixtures


def test_replication_status(server: Server) -> None:
    call = server.begin(server.client.replication_status)
    seconds = timestamp_pb2.Timestamp
    response = admin_pb2.GetReplicationStatusResponse(
        instance="nyc-1",
        last_sequence=9,
        outgoing=[
            admin_pb2.OutgoingLink(
                peer="ldn-1",
                address="ldn:1",
                state="refused",
                mode="sync",
                topics_pattern=".*",
                acknowledged_sequence=4,
                lag_sequences=5,
                lag_micros=1_500_000,
                skew_micros=-2,
                last_error="no",
                last_error_reason=types_pb2.ERROR_REASON_PEER_NOT_ACCEPTED,
                last_error_time=seconds(seconds=2),
                since=seconds(seconds=1),
                topics=[admin_pb2.LinkTopic(topic="orders", state="seeding")],
            )
        ],
        incoming=[admin_pb2.IncomingLink(peer="ldn-1", state="away", cursor=1, head_sequence=2, applied=3)],
    )
    server.answer("GetReplicationStatus", response)
    status = call.result(SECONDS_MAX)
    assert (status.instance, status.last_sequence) == ("nyc-1", 9)
    (out,), (into,) = status.outgoing, status.incoming
    assert (out.peer, out.state, out.mode, out.lag_sequences) == ("ldn-1", "refused", "sync", 5)
    assert (out.lag, out.skew) == (timedelta(seconds=1.5), timedelta(microseconds=-2))
    assert (out.last_error_reason, out.topics) == ("PEER_NOT_ACCEPTED", (LinkTopic("orders", "seeding", ""),))
    assert out.since == datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)
    assert out.last_error_time == datetime(1970, 1, 1, 0, 0, 2, tzinfo=UTC)
    assert (into.peer, into.cursor, into.applied) == ("ldn-1", 1, 3)
    assert (into.last_error_reason, into.last_error_time) == ("", None)


def test_a_reason_of_a_newer_server_is_its_number(server: Server) -> None:
    call = server.begin(server.client.replication_status)
    link = admin_pb2.IncomingLink.FromString(admin_pb2.IncomingLink(peer="p").SerializeToString() + b"\x60\xe7\x07")
    server.answer("GetReplicationStatus", admin_pb2.GetReplicationStatusResponse(incoming=[link]))
    assert call.result(SECONDS_MAX).incoming[0].last_error_reason == "999"


def test_verify_and_repair_tell_topic_by_topic(server: Server) -> None:
    told: list[Verified | Repaired] = []
    call = server.begin(lambda: server.client.verify_replication("ldn-1", ["orders"], keys_max=0, on_topic=told.append))
    request = server.stream(
        "VerifyReplication",
        admin_pb2.VerifyReplicationResponse(
            topic="orders",
            records=9,
            differing=1,
            differences=[admin_pb2.Difference(key="a", version_here=1, version_there=2)],
        ),
        admin_pb2.VerifyReplicationResponse(topic="ticks", left_out="no"),
    )
    assert request == admin_pb2.VerifyReplicationRequest(peer="ldn-1", topics=["orders"], keys_max=0)
    assert request.HasField("keys_max")
    verified = call.result(SECONDS_MAX)
    assert verified == [Verified("orders", 9, 1, (Difference("a", 1, 2),), ""), Verified("ticks", 0, 0, (), "no")]

    repairing = server.begin(lambda: server.client.repair_replication("ldn-1", on_topic=told.append))
    response = admin_pb2.RepairReplicationResponse(topic="orders", differing=3, sent=2, received=1)
    assert server.stream("RepairReplication", response) == admin_pb2.RepairReplicationRequest(peer="ldn-1")
    repaired = repairing.result(SECONDS_MAX)
    assert repaired == [Repaired("orders", 3, 2, 1, "")]
    assert told == [*verified, *repaired]


@pytest.mark.parametrize(
    ("peer", "topics", "keys_max", "field"),
    [("", None, 1, "peer"), ("p", [], 1, "topics"), ("p", "orders", 1, "topics"), ("p", None, -1, "keys_max")],
)
def test_a_comparison_that_makes_no_sense_is_refused_here(
    server: Server, peer: str, topics: list[str] | None, keys_max: int, field: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        server.client.verify_replication(peer, topics, keys_max=keys_max)
    assert caught.value.details["field"] == field


def test_peers_come_and_go(server: Server) -> None:
    """Rule R14."""
    adding = server.begin(
        lambda: server.client.add_peer(
            "ldn-2",
            "ldn:7450",
            accept=True,
            topics_pattern="o.*",
            sync=True,
            filter_text="/a = 1",
            ca="/ca",
            certificate="/c",
            key="/k",
            token_file="/t",
            replace=True,
        )
    )
    assert server.answer("AddPeer", admin_pb2.AddPeerResponse()) == admin_pb2.AddPeerRequest(
        name="ldn-2",
        address="ldn:7450",
        accept=True,
        topics_pattern="o.*",
        sync=True,
        filter="/a = 1",
        ca="/ca",
        certificate="/c",
        key="/k",
        token_file="/t",
        replace=True,
    )
    adding.result(SECONDS_MAX)
    pausing = server.begin(lambda: server.client.pause_peer("ldn-2"))
    assert server.answer("PausePeer", admin_pb2.PausePeerResponse()).name == "ldn-2"
    pausing.result(SECONDS_MAX)
    resuming = server.begin(lambda: server.client.resume_peer("ldn-2"))
    assert server.answer("ResumePeer", admin_pb2.ResumePeerResponse()).name == "ldn-2"
    resuming.result(SECONDS_MAX)
    removing = server.begin(lambda: server.client.remove_peer("ldn-2"))
    assert server.answer("RemovePeer", admin_pb2.RemovePeerResponse()).name == "ldn-2"
    removing.result(SECONDS_MAX)
    with pytest.raises(InvalidArgument):
        server.client.remove_peer("")


def test_a_backup(server: Server) -> None:
    call = server.begin(lambda: server.client.backup("b"))
    response = admin_pb2.BackupResponse(name="b", sequence=7, bytes=8)
    assert server.answer("Backup", response) == admin_pb2.BackupRequest(name="b")
    assert call.result(SECONDS_MAX) == BackupMade("b", 7, 8)


def test_deleting_a_topic_can_be_forced(server: Server) -> None:
    """Rule T5."""
    for force in (False, True):
        call = server.begin(partial(server.client.delete_topic, "orders", force=force))
        request = server.answer("DeleteTopic", admin_pb2.DeleteTopicResponse(deleted_records=2))
        assert request == admin_pb2.DeleteTopicRequest(name="orders", force=force)
        assert call.result(SECONDS_MAX) == 2


def test_replicated_is_sent_and_a_refusal_has_the_number_of_stored_records(server: Server) -> None:
    """Rule P5: it is no failure of the write, so nobody writes it again by itself."""
    call = server.begin(lambda: server.client.publish("orders", {"id": 1}, durability="replicated"))
    request = server.refuse(
        "Publish", grpc.StatusCode.UNAVAILABLE, "REPLICATION_UNAVAILABLE", "it stands here", applied="1"
    )
    assert request.durability == types_pb2.DURABILITY_REPLICATED
    with pytest.raises(ReplicationUnavailable, match="it stands here") as caught:
        call.result(SECONDS_MAX)
    assert isinstance(caught.value, Unavailable)
    assert caught.value.applied == 1
