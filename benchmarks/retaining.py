"""Durable subscriptions and retention: the cost of consuming, keeping, pruning and doing nothing."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final

import grpc
import grpc.aio

from benchmarks.documents import documents
from benchmarks.followers import CHANNEL_OPTIONS, STREAMS_PER_CHANNEL
from benchmarks.processes import CpuMeter, SowServer
from benchmarks.rows import (
    MILLISECONDS,
    PER_SECOND,
    TIMES,
    Figure,
    Row,
    Target,
    percentile,
    ratio,
    ratio_range,
    take_turns,
)
from benchmarks.setting import Setting
from benchmarks.singly import SinglePublisher
from sow.v1 import sow_pb2, sow_pb2_grpc
from sow_client import UNLIMITED, Client

PERCENT: Final = "%"
RATE_TARGET: Final = Target(100_000, PER_SECOND)
QUERY_TARGET: Final = Target(0.35, f"{TIMES} the query stream")
FALL_TARGET: Final = Target(0.8, f"{TIMES} of without")
DISTURBANCE_TARGET: Final = Target(3.0, f"{TIMES} idle", at_least=False)
IDLE_TARGET: Final = Target(3.0, f"{PERCENT} of a core", at_least=False)
LOAD_CHUNK: Final = 50_000
ACKNOWLEDGE_EVERY: Final = 100
PRUNE_BATCH_RECORDS: Final = 100
"""Records of a commit. Pruning looks at commits, so smaller ones are more work."""
PRUNED_SECONDS: Final = 120.0
IDLE_SECONDS: Final = 60
ATTACHED_AT_ONCE: Final = 500


# ---- consuming ----


def durable_consumer(setting: Setting) -> Iterator[Row]:
    """A durable consumer reads the journal from its beginning and acknowledges, against a query of the same topic."""
    records = setting.size(1_000_000, quick=100_000)
    rounds = setting.size(5, quick=3)
    with ExitStack() as stack:
        server = stack.enter_context(SowServer(setting.directory / "sow"))
        client = stack.enter_context(Client(server.address))
        client.create_topic("journaled", key=["/id"], retain_time="unlimited", retain_bytes=UNLIMITED)
        setting.say(f"loading {records:,} records")
        _load(client, "journaled", records)
        cpu = CpuMeter(server)
        number = 0

        def consume() -> float:
            nonlocal number
            number += 1
            return cpu.measured(records, lambda: _consume(client, f"consumer-{number}", records))

        setting.say(f"{rounds} rounds")
        rates = take_turns(rounds, {"durable": consume, "query": lambda: _query(client, records)})
    ours, peer = (Figure(statistics.median(rates[name]), PER_SECOND) for name in ("durable", "query"))
    case = f"{rounds} rounds of {records:,} changes from the journal, one in {ACKNOWLEDGE_EVERY} acknowledged"
    yield Row(case, ours, judged=ours, target=RATE_TARGET, note=f"{cpu}; machine: {setting.machine}")
    yield Row(
        "to the query stream of the same topic, both through sow_client",
        ours,
        peer=peer,
        judged=ratio(rates["durable"], rates["query"]),
        target=QUERY_TARGET,
        note=ratio_range(rates["durable"], rates["query"]),
    )


def _consume(client: Client, name: str, records: int) -> float:
    begin = time.perf_counter()
    count = 0
    with client.durable("journaled", name, start="earliest") as durable:
        for change in durable:
            count += 1
            if count % ACKNOWLEDGE_EVERY == 0 or count == records:
                durable.acknowledge(change)
            if count == records:
                break
        durable.flush()
    seconds = time.perf_counter() - begin
    client.delete_durable("journaled", name)
    return count / seconds


def _query(client: Client, records: int) -> float:
    begin = time.perf_counter()
    count = sum(1 for _ in client.query("journaled"))
    seconds = time.perf_counter() - begin
    assert count == records, f"{count} records came"
    return count / seconds


# ---- keeping ----


def detached_durables(setting: Setting) -> Iterator[Row]:
    """Stream publishing to a topic with many durables without consumers, against a topic without durables."""
    durables = setting.size(1000, quick=100)
    records = setting.size(200_000, quick=30_000)
    rounds = setting.size(5, quick=3)
    with ExitStack() as stack:
        server = stack.enter_context(SowServer(setting.directory / "sow"))
        client = stack.enter_context(Client(server.address))
        for name in ("with", "without"):
            client.create_topic(name, key=["/id"])
        setting.say(f"creating {durables:,} durables")
        asyncio.run(_create_durables(server.address, [("with", f"durable-{number}") for number in range(durables)]))
        payloads = documents(range(records))
        rates = take_turns(
            rounds,
            {name: partial(_publish, client, name, payloads) for name in ("with", "without")},
        )
    yield Row(
        f"{rounds} rounds of {records:,} records, {durables:,} detached durables, FSYNC",
        Figure(statistics.median(rates["with"]), PER_SECOND),
        peer=Figure(statistics.median(rates["without"]), PER_SECOND),
        judged=ratio(rates["with"], rates["without"]),
        target=FALL_TARGET,
        note=ratio_range(rates["with"], rates["without"]),
    )


# ---- pruning ----


def pruning(setting: Setting) -> Iterator[Row]:
    """Entries fall out of retention all at once, while single durable publishes to another topic continue."""
    records = setting.size(1_000_000, quick=100_000)
    with ExitStack() as stack:
        server = stack.enter_context(SowServer(setting.directory / "sow", more='[journal]\nprune_interval = "1s"\n'))
        client = stack.enter_context(Client(server.address))
        publisher = SinglePublisher(stack.enter_context(grpc.insecure_channel(server.address)))
        client.create_topic("journaled", key=["/id"], retain_time="unlimited", retain_bytes=UNLIMITED)
        setting.say(f"loading {records:,} records")
        _load(client, "journaled", records, batch_records=PRUNE_BATCH_RECORDS)
        setting.say("idle")
        idle = publisher.run(until=time.time() + setting.size(10, quick=4))
        setting.say("pruning")
        client.alter_topic("journaled", retain_time="0s", retain_bytes=0)
        begin = time.time()
        during: list[float] = []
        while _journal_entries(client):
            assert time.time() - begin < PRUNED_SECONDS, "the journal is not pruned"
            during += publisher.run(until=time.time() + 0.25)
        seconds = time.time() - begin
    p99_idle, p99_during = percentile(idle, 0.99), percentile(during, 0.99)
    yield Row(
        f"publish p99 while {records:,} entries are pruned ({len(during):,} calls) to idle ({len(idle):,} calls)",
        Figure(p99_during, MILLISECONDS),
        peer=Figure(p99_idle, MILLISECONDS),
        judged=Figure(p99_during / p99_idle, TIMES),
        target=DISTURBANCE_TARGET,
        note=f"within {seconds:.1f} s, the wait for the interval of 1 s included; machine: {setting.machine}",
    )


def _journal_entries(client: Client) -> int:
    statistics_of_topic = client.describe_topic("journaled").statistics
    assert statistics_of_topic is not None, "describing a topic gives its figures"
    return statistics_of_topic.journal_entries


# ---- doing nothing ----


def idle(setting: Setting) -> Iterator[Row]:
    """CPU time of a server with many unused topics and durables."""
    topics = setting.size(10_000, quick=500)
    each = 10
    with ExitStack() as stack:
        server = stack.enter_context(SowServer(setting.directory / "sow"))
        client = stack.enter_context(Client(server.address))
        setting.say(f"creating {topics:,} topics")
        names = [f"topic-{number}" for number in range(topics)]
        for name in names:
            client.create_topic(name, key=["/id"], retain_time="1h", durable_idle_ttl="30d")
            client.publish(name, {"id": 1}, durability="buffered")
        setting.say(f"creating {topics * each:,} durables")
        asyncio.run(
            _create_durables(server.address, [(name, f"durable-{number}") for name in names for number in range(each)])
        )
        seconds = setting.size(IDLE_SECONDS, quick=20)
        setting.say(f"idle for {seconds} s")
        time.sleep(5)
        before, begin = server.cpu_seconds(), time.perf_counter()
        time.sleep(seconds)
        share = Figure(100 * (server.cpu_seconds() - before) / (time.perf_counter() - begin), PERCENT)
        resident = server.resident_mebibytes()
    yield Row(
        f"CPU of an idle server with {topics:,} topics and {topics * each:,} durables, {seconds} s",
        share,
        judged=share,
        target=IDLE_TARGET,
        note=f"VmRSS {resident:.0f} MiB; machine: {setting.machine}",
    )


# ---- shared ----


def _load(client: Client, topic: str, records: int, *, batch_records: int = 1000) -> None:
    with client.publisher(topic, durability="buffered", batch_records=batch_records) as publisher:
        for first in range(0, records, LOAD_CHUNK):
            for payload in documents(range(first, min(first + LOAD_CHUNK, records))):
                publisher.publish(payload)
        publisher.flush()
    assert publisher.applied == records, f"{publisher.applied} of {records} were applied"


def _publish(client: Client, topic: str, payloads: Sequence[bytes]) -> float:
    begin = time.perf_counter()
    with client.publisher(topic, durability="fsync") as publisher:
        for payload in payloads:
            publisher.publish(payload)
        publisher.flush()
    return len(payloads) / (time.perf_counter() - begin)


async def _create_durables(address: str, names: Sequence[tuple[str, str]]) -> None:
    """Attaches to each of them once, (topic, name)."""
    channels = [
        grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        for _ in range(ATTACHED_AT_ONCE // STREAMS_PER_CHANNEL)
    ]
    stubs = [sow_pb2_grpc.SowServiceStub(channel) for channel in channels]
    room = asyncio.Semaphore(ATTACHED_AT_ONCE)

    async def attach(number: int, topic: str, name: str) -> None:
        request = sow_pb2.SubscribeRequest(topic=topic, durable=sow_pb2.DurableAttachment(name=name))
        async with room:
            call = stubs[number % len(stubs)].Subscribe(request)
            first = await call.read()
            assert isinstance(first, sow_pb2.SubscribeResponse), "a subscription does not end by itself"
            assert first.durable_begin.created, f"{topic}/{name} was there already"
            call.cancel()

    await asyncio.gather(*(attach(number, topic, name) for number, (topic, name) in enumerate(names)))
    for channel in channels:
        await channel.close()
