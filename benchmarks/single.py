"""One durable publish at a time against an etcd put, both called with plain grpcio from this process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import count
from typing import Final

import grpc

from benchmarks.bare_rocks import BareRocks
from benchmarks.bare_server import BareServer
from benchmarks.documents import TTL_SECONDS, document
from benchmarks.etcd_peer import EtcdServer
from benchmarks.processes import TOPIC, NotInstalled, SowServer, free_port
from benchmarks.rows import MILLISECONDS, TIMES, Figure, Limit, Row, Target, percentile, ratio, ratio_range, take_turns
from benchmarks.setting import Setting
from sow.v1 import sow_pb2, sow_pb2_grpc, types_pb2
from sow_client import Client

TARGET: Final = Target(3.0, f"{TIMES} etcd", at_least=False, ambition=1.7)
CALL_SECONDS: Final = 10
PLACED_TARGET: Final = Target(1.02, f"{TIMES} a server without", at_least=False)
PATTERNS: Final = 100


def durable_publish(setting: Setting) -> Iterator[Row]:
    """Row 4: p50 of blocks of calls, in turns."""
    calls = setting.size(1_000, quick=200)
    rounds = setting.size(7, quick=3)
    etcd: EtcdServer | None = None
    skipped = ""
    with ExitStack() as stack:
        address = stack.enter_context(SowServer(setting.directory / "sow")).address
        stub = sow_pb2_grpc.SowServiceStub(stack.enter_context(grpc.insecure_channel(address)))
        client = stack.enter_context(Client(address))
        bare_address = stack.enter_context(BareServer()).address
        bare = sow_pb2_grpc.SowServiceStub(stack.enter_context(grpc.insecure_channel(bare_address)))
        bare_rocks = stack.enter_context(closing(BareRocks(setting.directory / "rocks")))
        try:
            etcd = stack.enter_context(EtcdServer(setting.directory / "etcd"))
        except NotInstalled as missing:
            skipped = str(missing)

        number = 0

        def median_call(call: Callable[[int], object]) -> Callable[[], float]:
            def block() -> float:
                nonlocal number
                milliseconds = []
                for _ in range(calls):
                    number += 1
                    begin = time.perf_counter()
                    call(number)
                    milliseconds.append((time.perf_counter() - begin) * 1000)
                return percentile(milliseconds, 0.5)

            return block

        def publish_with(one: sow_pb2_grpc.SowServiceStub) -> Callable[[int], object]:
            return lambda number: one.Publish(_request(number), timeout=CALL_SECONDS)

        contestants: dict[str, Callable[[], float]] = {"sow": median_call(publish_with(stub))}
        if etcd is not None:
            put = etcd.put
            contestants["etcd"] = median_call(lambda number: put(b"%d" % number, document(number)))
        contestants["sow_client"] = median_call(
            lambda number: client.publish(TOPIC, document(number), ttl=TTL_SECONDS, durability="fsync")
        )
        contestants["bare call"] = median_call(publish_with(bare))
        contestants["bare put"] = median_call(
            lambda number: bare_rocks.put_rate([str(number)], [document(number)], new=True, sync=True)
        )
        setting.say(f"{rounds} rounds of {calls:,} calls")
        take_turns(1, contestants)  # connections are made, caches are warm
        p50 = take_turns(rounds, contestants)

    yield from _judged(p50, f"p50 of {rounds} × {calls:,} calls, one after the other", skipped=skipped)


def placed_publish(setting: Setting) -> Iterator[Row]:
    """The p50 of a call to a server with a placement, to that of one without. They take turns every few calls, so that
    a slow second is one of both."""
    rounds, calls = setting.size(300, quick=30), 20
    topics = "".join(f'[[topics]]\npattern = "others-{number}\\\\..*"\ncell = "b"\n' for number in range(PATTERNS))
    with ExitStack() as stack:
        placed = setting.directory / "placed"
        placed.mkdir(parents=True)
        port = free_port()
        cells = f'[cells]\na = ["127.0.0.1:{port}"]\nb = ["127.0.0.1:{free_port()}"]\n'
        (placed / "placement.toml").write_text(f'version = 1\ndefault = "a"\n{cells}{topics}')
        more = '[placement]\ncell = "a"\nfile = "placement.toml"\n'
        servers = {
            "placed": stack.enter_context(SowServer(placed, more=more, port=port)),
            "plain": stack.enter_context(SowServer(setting.directory / "plain")),
        }
        stubs = {
            name: sow_pb2_grpc.SowServiceStub(stack.enter_context(grpc.insecure_channel(server.address)))
            for name, server in servers.items()
        }
        milliseconds: dict[str, list[float]] = {name: [] for name in stubs}
        numbers = count(1)

        def some(name: str) -> float:
            begun = len(milliseconds[name])
            for _ in range(calls):
                request = _request(next(numbers))
                begin = time.perf_counter()
                stubs[name].Publish(request, timeout=CALL_SECONDS)
                milliseconds[name].append((time.perf_counter() - begin) * 1000)
            return percentile(milliseconds[name][begun:], 0.5)

        contestants = {name: partial(some, name) for name in stubs}
        setting.say(f"{rounds} rounds of {calls} calls")
        take_turns(5, contestants)
        for measured in milliseconds.values():
            measured.clear()
        p50 = take_turns(rounds, contestants)
    ours, plain = (percentile(milliseconds[name], 0.5) for name in ("placed", "plain"))
    yield Row(
        f"plain grpcio: p50 of {rounds * calls:,} calls, one after the other; {PATTERNS} patterns in the placement",
        Figure(ours, MILLISECONDS),
        Figure(plain, MILLISECONDS),
        Figure(ours / plain, TIMES),
        PLACED_TARGET,
        note=f"the quarters of rounds: {_quarters(p50['placed'], p50['plain'])} ×",
    )


def _quarters(ours: Sequence[float], others: Sequence[float]) -> str:
    """The first and the third quarter of the ratios of rounds."""
    first, _, third = statistics.quantiles([one / other for one, other in zip(ours, others, strict=True)], n=4)
    return f"{first:.2f}–{third:.2f}"


def _judged(p50: Mapping[str, Sequence[float]], case: str, *, skipped: str) -> Iterator[Row]:
    """The rows of the latencies of all contestants. Without etcd its row says why it is `skipped`."""
    limit = statistics.median(p50["bare call"]) + statistics.median(p50["bare put"])

    def limits(of: str) -> tuple[Limit, ...]:
        # A latency: the limit is the smallest possible figure, so the share is inverted.
        name = "a bare gRPC call plus a bare rocksdict put and sync"
        return (Limit(name, Figure(limit, MILLISECONDS), limit / statistics.median(p50[of])),)

    ours = Figure(statistics.median(p50["sow"]), MILLISECONDS)
    if "etcd" not in p50:
        yield Row(f"plain grpcio: {case}", ours, target=TARGET, limits=limits("sow"), skipped=skipped)
    else:
        yield Row(
            f"plain grpcio: {case}",
            ours,
            peer=Figure(statistics.median(p50["etcd"]), MILLISECONDS),
            judged=ratio(p50["sow"], p50["etcd"]),
            target=TARGET,
            limits=limits("sow"),
            note=ratio_range(p50["sow"], p50["etcd"]),
        )
    yield Row(
        f"sow_client: {case}",
        Figure(statistics.median(p50["sow_client"]), MILLISECONDS),
        limits=limits("sow_client"),
        note="for information: with the client's checks and its safe retry",
    )


def _request(number: int) -> sow_pb2.PublishRequest:
    return sow_pb2.PublishRequest(
        topic=TOPIC,
        records=[sow_pb2.PublishRecord(payload=document(number))],
        lifetime=types_pb2.Lifetime(ttl_micros=TTL_SECONDS * 1_000_000),
        durability=types_pb2.DURABILITY_FSYNC,
    )
