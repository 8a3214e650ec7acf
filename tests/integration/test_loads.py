"""Loads over the wire: what both clients get, and what bad requests are told. And full topics, whose loads are such."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path

import grpc
import pytest

from sow.v1 import load_pb2, load_pb2_grpc, types_pb2
from sow_client import AsyncClient, Client, LoadPart, PublishFailed, Refusal, ResourceExhausted, SowError
from sow_client._statuses import error_of_status
from tests.support.servers.proxy import Proxy
from tests.support.servers.server import ServerProcess, reason_of, until
from tests.support.simulation.clients import Connect, connect

CONFIG = """
[server]
dynamic_topics = true
[topics.t]
key = ["/id"]
expiration = "enabled"
[limits]
loads_max = 2
"""

__all__ = ["connect"]  # a fixture
_numbers = count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(Path(tmp_path_factory.mktemp("loads")), CONFIG) as server:
        yield server
        assert server.faults() == []


@pytest.fixture
def client(server: ServerProcess, connect: Connect) -> Iterator[Client]:
    with connect(server.address) as client:
        yield client
        for load in client.loads():
            if load.phase == "staging":
                client.abort_load(load.id)


def rows(*ids: int) -> list[bytes]:
    return [json.dumps({"id": number}).encode() for number in ids]


def refused(client: Client, method: str, request: object) -> tuple[str, str]:
    """Reason and field with which a request of one message is refused."""
    with grpc.insecure_channel(client._transport.server) as channel:
        call = getattr(load_pb2_grpc.LoadServiceStub(channel), method)
        if method == "StageLoad":
            ask = partial(next, call(iter([request])))
        elif method == "CommitLoad":
            ask = partial(next, call(request))
        else:
            ask = partial(call, request)
        with pytest.raises(grpc.RpcError) as error:
            ask()
    known = error_of_status(error.value)
    return known.reason, known.details.get("field", "")


def test_a_load_is_staged_committed_and_over(client: Client) -> None:
    client.publish("t", {"id": 1})
    load = client.open_load("t", lease=timedelta(minutes=2))
    assert load.lease == timedelta(minutes=2)
    assert client.renew_load(load.id) == timedelta(minutes=2)
    with client.stage_load(load.id, 3, 9) as stager:
        stager.stage(rows(2, 3), lifetime="1h")
        stager.stage([b"{}", *rows(4)], lifetime_kinds=[0, 1], lifetime_micros=[0, 60_000_000])
    assert (stager.staged, stager.refused) == (3, 1)
    assert [(refusal.index, refusal.reason) for refusal in stager.refusals] == [(2, "KEY_FIELD_MISSING")]
    assert stager.part() == LoadPart(3, 9, 3)
    assert client.get_load(load.id).figures.staged == 3
    *_, last = client.commit_load(load.id, [stager.part()])
    assert last.phase == "done"
    assert (last.figures.applied, last.figures.deleted) == (3, 1)
    assert {record.key for record in client.query("t")} == {"2", "3", "4"}
    assert [found.phase for found in client.loads("t") if found.id == load.id] == ["done"]
    with pytest.raises(SowError, match="committed"):
        client.abort_load(load.id)


def test_an_asynchronous_stager_goes_on_over_connections_that_break(server: ServerProcess) -> None:
    """Unanswered rows are sent again, in order, and counted once; an end of the load is told at once."""

    async def run(address: str, proxy: Proxy) -> None:
        async with AsyncClient(address) as client:
            load = await client.open_load("t")
            async with client.stage_load(load.id, 0, 1) as stager:
                for start in range(0, 60_000, 3000):
                    if start in (9000, 30_000):
                        proxy.cut_after(100_000)
                    await stager.stage([*rows(*range(start, start + 2999)), b"{}"])
                await stager.flush()
                assert not proxy.armed
            assert (stager.staged, stager.refused) == (60_000 - 20, 20)
            assert [refusal.index for refusal in stager.refusals] == [*range(2999, 60_000, 3000)]
            assert (await client.get_load(load.id)).figures.staged == stager.staged
            late = client.stage_load(load.id, 0, 2)
            await client.abort_load(load.id)
            with pytest.raises(SowError) as error:
                async with late:
                    await late.stage(rows(1))
            assert error.value.reason == "LOAD_NOT_FOUND"

    with Proxy(server.address) as proxy:
        asyncio.run(run(proxy.address, proxy))


def test_two_stagers_do_not_share_an_attempt(client: Client) -> None:
    load = client.open_load("t")
    with client.stage_load(load.id, 0, 1) as stager:
        stager.stage(rows(1))
    with pytest.raises(SowError, match="choose another number") as error, client.stage_load(load.id, 0, 1) as stager:
        stager.stage(rows(2))
    assert error.value.reason == "LOAD_INCOMPLETE"


def test_a_load_makes_a_topic_where_a_publish_would(client: Client) -> None:
    load = client.open_load("new")
    with client.stage_load(load.id, 0, 1) as stager:
        stager.stage([b"{}", b"{}"], keys=["a", "b"])
    assert list(client.commit_load(load.id, [stager.part()]))[-1].figures.applied == 2
    assert client.count("new") == 2


def test_a_lease_that_ends_drops_the_load(client: Client) -> None:
    load = client.open_load("t", lease=timedelta(milliseconds=100))
    until(lambda: all(found.id != load.id for found in client.loads()), 10, "the lease to end")
    with pytest.raises(SowError) as error, client.stage_load(load.id, 0, 1) as stager:
        stager.stage(rows(1))
    assert error.value.reason == "LOAD_NOT_FOUND"


def test_refusals_of_bad_requests_name_the_field(client: Client) -> None:
    stage = load_pb2.StageLoadRequest
    load = client.open_load("t").id
    assert refused(client, "OpenLoad", load_pb2.OpenLoadRequest(topic="t", lease_micros=-1)) == (
        "INVALID_ARGUMENT",
        "lease_micros",
    )
    assert refused(client, "OpenLoad", load_pb2.OpenLoadRequest(topic="_undelivered"))[0] == "TOPIC_NAME_INVALID"
    assert refused(client, "StageLoad", stage(load_id=load, payload=rows(1))) == ("INVALID_ARGUMENT", "first_row")
    assert refused(client, "StageLoad", stage(load_id=load, first_row=1)) == ("INVALID_ARGUMENT", "payload")
    assert refused(client, "StageLoad", stage(load_id=load, first_row=2, payload=rows(1))) == (
        "LOAD_INCOMPLETE",
        "first_row",
    )
    assert refused(client, "StageLoad", stage(load_id=load, first_row=1, payload=rows(1), key=["a"])) == (
        "KEY_NOT_ALLOWED",
        "key",
    )
    assert refused(
        client,
        "StageLoad",
        stage(load_id=load, first_row=1, payload=rows(1), lifetime_kind=[types_pb2.LIFETIME_KIND_TTL]),
    ) == (
        "INVALID_ARGUMENT",
        "lifetime_micros",
    )
    assert refused(client, "GetLoad", load_pb2.GetLoadRequest(load_id="x.1")) == ("LOAD_NOT_FOUND", "load_id")
    parts = [load_pb2.LoadPart(part=1, attempt=1, rows=5)]
    assert refused(client, "CommitLoad", load_pb2.CommitLoadRequest(load_id=load, parts=parts)) == (
        "LOAD_INCOMPLETE",
        "parts[0].rows",
    )
    client.open_load("t")
    assert refused(client, "OpenLoad", load_pb2.OpenLoadRequest(topic="t"))[0] == "OVERLOADED"


def test_a_full_topic_refuses_what_would_let_it_grow(client: Client) -> None:
    """T6, T7: one record, many, a stream, a load. No client tries again by itself."""
    topic = f"full-{next(_numbers)}"
    client.create_topic(topic, max_records=2)
    client.publish_many(topic, [{}, {}], keys=["1", "2"])
    with pytest.raises(ResourceExhausted, match="is full, max_records has no room for this record") as refused:
        client.publish(topic, {}, key="3")
    assert (refused.value.reason, refused.value.retry_after) == ("TOPIC_FULL", None)
    results = client.publish_many(topic, [{"n": 1}, {}], keys=["1", "3"], refusals="return")
    assert [isinstance(one, Refusal) and one.reason for one in results] == [False, "TOPIC_FULL"]
    publisher = client.publisher(topic)
    for key in ("3", "2", "1"):
        publisher.publish({"n": 2}, key=key)
    with pytest.raises(PublishFailed) as failed:
        publisher.close()
    assert [(one.index, one.reason) for one in failed.value.refusals] == [(0, "TOPIC_FULL")]
    assert publisher.applied == 2
    load = client.open_load(topic)
    with client.stage_load(load.id, 0, 1) as stager:
        stager.stage([b"{}"] * 3, keys=["a", "b", "c"])
    assert reason_of(lambda: list(client.commit_load(load.id, [stager.part()]))) == "TOPIC_FULL"
    described = client.describe_topic(topic)
    assert described.statistics is not None
    assert (described.statistics.live_records, described.statistics.full_refusals) == (2, 3)
    assert client.alter_topic(topic, max_records=1).warnings[0].startswith("max_records: is 1")
