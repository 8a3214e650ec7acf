"""Expiry under load: its delay, and the effect of a million records due at once on a publisher."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

import grpc

from benchmarks.documents import documents
from benchmarks.processes import TOPIC, SowServer
from benchmarks.publishing import publish
from benchmarks.rows import MILLISECONDS, SECONDS, TIMES, Figure, Row, Target, bucket_percentile, percentile
from benchmarks.setting import Setting
from benchmarks.singly import SinglePublisher
from sow_client import Client

LAG_METRIC: Final = "sow_expiry_lag_seconds"
EXPIRED_METRIC: Final = "sow_records_expired_total"

LAG_TARGET: Final = Target(10.0, MILLISECONDS, at_least=False)
FLAT_TARGET: Final = Target(2.0, f"{TIMES} the least", at_least=False)
EXPIRIES_PER_SECOND: Final = 10_000
TICK_SECONDS: Final = 0.01
SHORT_TTL_SECONDS: Final = 1.5
"""Lifetime of the records that are published at the rate at which they then expire."""

DRAIN_TARGET: Final = Target(12.0, SECONDS, at_least=False, ambition=6.0)
DISTURBANCE_TARGET: Final = Target(3.0, f"{TIMES} idle", at_least=False, ambition=2.0)
IDLE_SECONDS: Final = 10.0
LOAD_CHUNK: Final = 50_000
SURELY_SECONDS: Final = 120.0
MICROS: Final = 1_000_000


def lag(setting: Setting) -> Iterator[Row]:
    """Row 5: records are published and expire at 10,000/s, over more and more records that are not yet due."""
    seconds = setting.size(10, quick=3)
    backlogs = (0, 10_000, 100_000) if setting.quick else (0, 10_000, 100_000, 1_000_000)
    lags: list[float] = []
    with ExitStack() as stack:
        server = stack.enter_context(SowServer(setting.directory / "sow"))
        client = stack.enter_context(Client(server.address))
        loaded = 0
        for backlog in backlogs:
            setting.say(f"{backlog:,} not yet due, {seconds} s")
            for first in range(loaded, backlog, LOAD_CHUNK):
                publish(client, documents(range(first, min(first + LOAD_CHUNK, backlog))), "buffered")
            loaded = backlog
            window = expire_steadily(server, client, first_number=2_000_000_000, seconds=seconds)
            lags.append(window.p99_milliseconds)
            yield Row(
                f"p99 at {window.expiries_per_second:,.0f} expiries/s, {backlog:,} not yet due",
                Figure(window.p99_milliseconds, MILLISECONDS),
                judged=Figure(window.p99_milliseconds, MILLISECONDS),
                target=LAG_TARGET,
                note=f"p50 {window.p50_milliseconds:.1f} ms; machine: {setting.machine}",
            )
    spread = Figure(max(lags) / min(lags), TIMES)
    yield Row("flat: greatest p99 to least", spread, judged=spread, target=FLAT_TARGET)


@dataclass(frozen=True, slots=True)
class Window:
    """The server's measurements of a period, and the records that were published before and in it."""

    published: int
    expiries_per_second: float
    p50_milliseconds: float
    p99_milliseconds: float


def expire_steadily(server: SowServer, client: Client, *, first_number: int, seconds: float) -> Window:
    """Publishes at the rate for a lifetime, then for `seconds` more. Returns the server's measurements of the
    latter."""
    per_tick = round(EXPIRIES_PER_SECOND * TICK_SECONDS)
    warm = SHORT_TTL_SECONDS + 1.0
    payloads = documents(range(first_number, first_number + round(EXPIRIES_PER_SECOND * (warm + seconds))))
    at = 0
    with client.publisher(TOPIC, ttl=SHORT_TTL_SECONDS, durability="buffered", batch_records=per_tick) as publisher:

        def run(ticks: int) -> None:
            nonlocal at
            begin = time.perf_counter()
            for tick in range(ticks):
                for payload in payloads[at : at + per_tick]:
                    publisher.publish(payload)
                at += per_tick
                time.sleep(max(0.0, begin + (tick + 1) * TICK_SECONDS - time.perf_counter()))

        run(round(warm / TICK_SECONDS))
        before, began = server.metrics().buckets(LAG_METRIC), time.perf_counter()
        run(round(seconds / TICK_SECONDS))
        after, ended = server.metrics().buckets(LAG_METRIC), time.perf_counter()
    expired = after[float("inf")] - before.get(float("inf"), 0.0)
    return Window(
        len(payloads),
        expired / (ended - began),
        bucket_percentile(before, after, 0.50) * 1000,
        bucket_percentile(before, after, 0.99) * 1000,
    )


def mass_expiry(setting: Setting) -> Iterator[Row]:
    """Row 6: records due within one second, spread over it, while single durable publishes continue."""
    records = setting.size(1_000_000, quick=100_000)
    with ExitStack() as stack:
        server = stack.enter_context(SowServer(setting.directory / "sow"))
        client = stack.enter_context(Client(server.address))
        publisher = SinglePublisher(stack.enter_context(grpc.insecure_channel(server.address)))
        idle_seconds = setting.size(int(IDLE_SECONDS), quick=4)

        # Due late enough for loading and some idle time before. The rate is measured on the first chunk.
        rate = publish(client, documents(range(5_000_000, 5_000_000 + LOAD_CHUNK)), "buffered")
        due = time.time() + 3 * records / rate + idle_seconds + 10
        setting.say(f"loading {records:,} records, due in {due - time.time():.0f} s")
        load_due(client, records, round(due * MICROS), over_micros=MICROS)
        spare = due - time.time()
        assert spare > idle_seconds, f"loaded only {spare:.1f} s before they are due: the machine is busy, try again"

        setting.say(f"idle for {spare:.0f} s")
        idle = publisher.run(until=due - 0.5)
        before = publisher.sequence
        time.sleep(max(0.0, due - time.time()))
        setting.say("due")
        during = publisher.run(until=due + SURELY_SECONDS, expired_after=(before, records))
        to_drain = time.time() - due
        expired = server.metrics().total(EXPIRED_METRIC)
        assert expired == records, f"{expired:,.0f} of {records:,} records expired within {to_drain:.0f} s"

    case = f"{records:,} records due in the same second"
    seconds = Figure(to_drain, SECONDS)
    yield Row(
        f"drained: {case}",
        seconds,
        judged=seconds,
        target=DRAIN_TARGET,
        note=f"{records / to_drain / 1000:.0f} k expiries/s; machine: {setting.machine}",
    )
    p99_idle, p99_during = percentile(idle, 0.99), percentile(during, 0.99)
    yield Row(
        f"publish p99 during the drain ({len(during):,} calls) to idle ({len(idle):,} calls)",
        Figure(p99_during, MILLISECONDS),
        peer=Figure(p99_idle, MILLISECONDS),
        judged=Figure(p99_during / p99_idle, TIMES),
        target=DISTURBANCE_TARGET,
        note=f"p50 {percentile(during, 0.5):.2f} ms, idle {percentile(idle, 0.5):.2f} ms; machine: {setting.machine}",
    )


def load_due(client: Client, records: int, due_micros: int, *, over_micros: int, first_number: int = 0) -> None:
    """Publishes records whose expire times are spread over `over_micros` from `due_micros` on."""
    with client.publisher(TOPIC, durability="buffered") as publisher:
        for first in range(0, records, LOAD_CHUNK):
            chunk: Sequence[bytes] = documents(
                range(first_number + first, first_number + min(first + LOAD_CHUNK, records))
            )
            for offset, payload in enumerate(chunk, first):
                # Scattered, so that the order of expiry is not the order of publishing.
                publisher.publish(payload, expire_at=due_micros + offset * 7_919 % over_micros)
        publisher.flush()
    assert publisher.applied == records, f"{publisher.applied} of {records} were applied"
