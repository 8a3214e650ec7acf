"""Replication between two instances on this machine: its cost, its delay, and the speed at which a peer catches up.

Sender, receiver and client share the cores. Between machines each end has its own.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import grpc

from benchmarks.documents import documents, keys
from benchmarks.followers import Followers, lag_percentiles
from benchmarks.processes import TOPIC, CpuMeter, SowServer, free_port
from benchmarks.publishing import publish
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
from sow.v1 import types_pb2
from sow_client import Client, OutgoingLink

SHARE_TARGET: Final = Target(0.35, f"{TIMES} of without")
LAG_TARGET: Final = Target(30.0, MILLISECONDS, at_least=False)
CATCH_UP_TARGET: Final = Target(60_000, PER_SECOND)
RESYNC_TARGET: Final = Target(0.8, f"{TIMES} the load")
DISTURBANCE_TARGET: Final = Target(6.0, f"{TIMES} idle", at_least=False, ambition=2.0)
OFFERED_PER_SECOND: Final = 5_000
TICK_SECONDS: Final = 0.01
PER_TICK: Final = round(OFFERED_PER_SECOND * TICK_SECONDS)
LOAD_CHUNK: Final = 50_000
POLL_SECONDS: Final = 0.005
PATIENCE_SECONDS: Final = 300.0
SENDING: Final = ("seeding", "streaming")


class _Pair:
    """An instance that sends to another one, which may be down."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory = directory
        self._port = free_port()
        peer = f'[[replication.peers]]\nname = "receiver"\naddress = "127.0.0.1:{self._port}"\n'
        self.sender = stack.enter_context(SowServer(directory / "sender", instance="sender", more=peer))
        self.client = stack.enter_context(Client(self.sender.address))

    @contextmanager
    def receiver(self, *, anew: bool = False) -> Iterator[SowServer]:
        """Runs the other one, with its former data, or with none (`anew`)."""
        if anew:
            shutil.rmtree(self._directory / "receiver", ignore_errors=True)
        more = '[replication]\naccept = ["sender"]\n'
        with SowServer(self._directory / "receiver", instance="receiver", port=self._port, more=more) as server:
            yield server

    def link(self) -> OutgoingLink:
        """The status of the link."""
        (link,) = self.client.replication_status().outgoing
        return link

    def wait_connected(self) -> None:
        """Waits until the link is up. A new attempt to dial takes up to five seconds."""
        self._wait(lambda link: link.state in SENDING)

    def wait_acknowledged(self) -> None:
        """Waits until the receiver has acknowledged everything that is on the sender's disk."""
        self._wait(_is_even)

    def _wait(self, holds: Callable[[OutgoingLink], bool]) -> None:
        give_up = time.monotonic() + PATIENCE_SECONDS
        while not holds(link := self.link()):
            assert time.monotonic() < give_up, f"the peer has not reached that state: {link}"
            time.sleep(POLL_SECONDS)


def _is_even(link: OutgoingLink) -> bool:
    return link.state == "streaming" and link.lag_sequences == 0


# ---- cost ----


def replicated_publish(setting: Setting) -> Iterator[Row]:
    """Stream publishing with a peer, until it has everything on its disk, against the same without a peer."""
    round_records = setting.size(200_000, quick=30_000)
    rounds = setting.size(5, quick=3)
    with ExitStack() as stack:
        pair = _Pair(setting.directory, stack)
        receiver = stack.enter_context(pair.receiver())
        alone = stack.enter_context(SowServer(setting.directory / "alone"))
        alone_client = stack.enter_context(Client(alone.address))
        pair.wait_acknowledged()
        payloads: Sequence[bytes] = ()
        number = 0
        sent, taken = CpuMeter(pair.sender), CpuMeter(receiver)

        def prepare() -> None:
            nonlocal payloads, number
            payloads = documents(range(number, number + round_records))
            number += round_records

        def replicated() -> float:
            begin = time.perf_counter()
            publish(pair.client, payloads, "fsync")
            pair.wait_acknowledged()
            return round_records / (time.perf_counter() - begin)

        setting.say(f"{rounds} rounds")
        rates = take_turns(
            rounds,
            {
                "with": lambda: sent.measured(round_records, lambda: taken.measured(round_records, replicated)),
                "without": lambda: publish(alone_client, payloads, "fsync"),
            },
            before_round=prepare,
        )
    yield Row(
        f"{rounds} rounds of {round_records:,} new keys, FSYNC, until the peer has acknowledged all",
        Figure(statistics.median(rates["with"]), PER_SECOND),
        peer=Figure(statistics.median(rates["without"]), PER_SECOND),
        judged=ratio(rates["with"], rates["without"]),
        target=SHARE_TARGET,
        note=f"{ratio_range(rates['with'], rates['without'])}; sender: {sent}; receiver: {taken}",
    )


# ---- delay ----


def lag(setting: Setting) -> Iterator[Row]:
    """The time from the due time of a record at one instance to its arrival at a subscriber of the other."""
    records = OFFERED_PER_SECOND * setting.size(20, quick=4)
    with ExitStack() as stack:
        pair = _Pair(setting.directory, stack)
        receiver = stack.enter_context(pair.receiver())
        side = stack.enter_context(Followers(receiver.address, publish_to=pair.sender.address))
        (follower,) = side.subscribe([""])
        pair.wait_acknowledged()
        warm = documents(range(records, records + OFFERED_PER_SECOND))
        payloads = documents(range(records))
        sent, taken = CpuMeter(pair.sender), CpuMeter(receiver)

        def offer(load: Sequence[bytes]) -> list[float]:
            follower.forget()
            offered = side.publish(
                load, per_tick=PER_TICK, tick_seconds=TICK_SECONDS, durability=types_pb2.DURABILITY_FSYNC
            )
            side.run(follower.receive(len(load)))
            return follower.lags_milliseconds(offered.at_a_peer(follower.sequences[-1]))

        offer(warm)
        setting.say(f"{records:,} records at {OFFERED_PER_SECOND:,}/s")
        lags = sent.measured(records, lambda: taken.measured(records, lambda: offer(payloads)))
        assert follower.keys == keys(range(records)), "some were lost, doubled, or came in another order"
    p99 = Figure(percentile(lags, 0.99), MILLISECONDS)
    yield Row(
        f"p99 of {records:,} records at {OFFERED_PER_SECOND:,}/s, FSYNC, {PER_TICK} at a time",
        p99,
        judged=p99,
        target=LAG_TARGET,
        note=f"{lag_percentiles(lags)}; sender: {sent}; receiver: {taken}; machine: {setting.machine}",
    )


# ---- catching up ----


def catching_up(setting: Setting) -> Iterator[Row]:
    """A peer was down while records were published: the rate at which it gets them from the journal."""
    records = setting.size(1_000_000, quick=100_000)
    with ExitStack() as stack:
        pair = _Pair(setting.directory, stack)
        with pair.receiver():
            pair.wait_acknowledged()
        setting.say(f"loading {records:,} records while the peer is down")
        _load(pair.client, records)
        receiver = stack.enter_context(pair.receiver())
        setting.say("the peer is back")
        taken, sent = CpuMeter(receiver), CpuMeter(pair.sender)
        seconds = sent.measured(records, lambda: taken.measured(records, lambda: _until_even(pair)))
        assert _records_at(receiver) == records, "the peer has other records"
    rate = Figure(records / seconds, PER_SECOND)
    yield Row(
        f"{records:,} changes from the journal, from when the link is up until all are acknowledged",
        rate,
        judged=rate,
        target=CATCH_UP_TARGET,
        note=f"sender: {sent}; receiver: {taken}; machine: {setting.machine}",
    )


def resync(setting: Setting) -> Iterator[Row]:
    """In each round a new peer without data is seeded while single durable publishes to the sender continue."""
    records = setting.size(1_000_000, quick=100_000)
    rounds = setting.size(3, quick=2)
    idle_seconds = setting.size(10, quick=4)
    rates: list[float] = []
    shares: list[float] = []
    idle: list[float] = []
    during: list[float] = []
    with ExitStack() as stack:
        pair = _Pair(setting.directory, stack)
        publisher = SinglePublisher(stack.enter_context(grpc.insecure_channel(pair.sender.address)))
        setting.say(f"loading {records:,} records")
        begin = time.perf_counter()
        _load(pair.client, records)
        load = records / (time.perf_counter() - begin)
        sent = CpuMeter(pair.sender)
        taken: list[CpuMeter] = []

        def seed(calls: list[float]) -> float:
            pair.wait_connected()
            begin = time.perf_counter()
            while pair.link().state != "streaming":
                assert time.perf_counter() - begin < PATIENCE_SECONDS, "the peer is not seeded"
                calls += publisher.run(until=time.time() + 0.1)
            return time.perf_counter() - begin

        for number in range(1, rounds + 1):
            setting.say(f"round {number} of {rounds}")
            waited = publisher.run(until=time.time() + idle_seconds)
            disturbed: list[float] = []
            with pair.receiver(anew=True) as receiver:
                taken.append(CpuMeter(receiver))
                seconds = sent.measured(records, partial(taken[-1].measured, records, partial(seed, disturbed)))
                idle += waited
                during += disturbed
                pair.wait_acknowledged()
                assert _records_at(receiver) == records + len(idle) + len(during), "the peer has other records"
            rates.append(records / seconds)
            shares.append(percentile(disturbed, 0.99) / percentile(waited, 0.99))
    rate = Figure(statistics.median(rates), PER_SECOND)
    yield Row(
        f"{rounds} rounds of {records:,} records, from when the link is up until the last part is acknowledged",
        rate,
        peer=Figure(load, PER_SECOND),
        judged=Figure(rate.value / load, TIMES),
        target=RESYNC_TARGET,
        note="peer: the load of the same records with FSYNC, before;"
        f" rounds {Figure(min(rates), PER_SECOND)}–{Figure(max(rates), PER_SECOND)}; sender: {sent};"
        f" last receiver: {taken[-1]}; machine: {setting.machine}",
    )
    p99_idle, p99_during = percentile(idle, 0.99), percentile(during, 0.99)
    yield Row(
        f"publish p99 at the sender meanwhile ({len(during):,} calls) to idle ({len(idle):,} calls)",
        Figure(p99_during, MILLISECONDS),
        peer=Figure(p99_idle, MILLISECONDS),
        judged=Figure(p99_during / p99_idle, TIMES),
        target=DISTURBANCE_TARGET,
        note=f"rounds {min(shares):.2f}–{max(shares):.2f} ×; p50 {percentile(during, 0.5):.2f} ms,"
        f" idle {percentile(idle, 0.5):.2f} ms; machine: {setting.machine}",
    )


def _until_even(pair: _Pair) -> float:
    pair.wait_connected()
    begin = time.perf_counter()
    pair.wait_acknowledged()
    return time.perf_counter() - begin


def _load(client: Client, records: int) -> None:
    for first in range(0, records, LOAD_CHUNK):
        publish(client, documents(range(first, min(first + LOAD_CHUNK, records))), "fsync")


def _records_at(server: SowServer) -> int:
    with Client(server.address) as client:
        figures = client.describe_topic(TOPIC).statistics
    assert figures is not None, "describing a topic gives its figures"
    return figures.live_records
