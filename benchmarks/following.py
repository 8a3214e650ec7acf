"""Subscriptions: the delay of a change, and the cost of many followers, of followers with filters, and of stopped ones.

Publisher and followers are in this process, with plain grpc.aio. Publishes use the default durability (FSYNC) unless a
row says otherwise, because followers hear of a change only once it is on disk (rule S7).
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from benchmarks.bare_rocks import BareRocks
from benchmarks.bare_server import BareServer
from benchmarks.documents import TTL_SECONDS, document, documents
from benchmarks.followers import (
    AT_ONCE_RECORDS,
    MANY,
    MICROS,
    NOTHING,
    Followers,
    Offered,
    lag_percentiles,
)
from benchmarks.processes import TOPIC, CpuMeter, SowServer
from benchmarks.rows import (
    MEBIBYTES,
    MILLISECONDS,
    PER_SECOND,
    TIMES,
    Figure,
    Limit,
    Row,
    Target,
    percentile,
    ratio,
    ratio_range,
    take_turns,
)
from benchmarks.setting import Setting
from sow.v1 import sow_pb2, types_pb2

OFFERED_PER_SECOND: Final = 20_000
TICK_SECONDS: Final = 0.01
PER_TICK: Final = round(OFFERED_PER_SECOND * TICK_SECONDS)

DELIVERY_TARGET: Final = Target(3.5, f"{TIMES} the bare hop", at_least=False, ambition=1.7)
LAG_TARGET: Final = Target(100.0, MILLISECONDS, at_least=False)
FALL_TARGET: Final = Target(0.8, f"{TIMES} of without")
MEMORY_TARGET: Final = Target(32.0, MEBIBYTES, at_least=False)


# ---- publish → delivery ----


def delivery(setting: Setting) -> Iterator[Row]:
    """One record published by a unary call until the change is read from an open stream, one after the other."""
    calls = setting.size(1_000, quick=200)
    rounds = setting.size(7, quick=3)
    with ExitStack() as stack:
        server = stack.enter_context(SowServer(setting.directory / "sow"))
        bare_server = stack.enter_context(BareServer())
        bare_rocks = stack.enter_context(closing(BareRocks(setting.directory / "rocks")))
        sides = {
            name: _Side(stack.enter_context(Followers(address)), calls)
            for name, address in (("sow", server.address), ("bare", bare_server.address))
        }
        number = 0

        def synced_puts() -> float:
            nonlocal number
            milliseconds = []
            for _ in range(calls):
                number += 1
                milliseconds.append(1000 / bare_rocks.put_rate([str(number)], [document(number)], new=True, sync=True))
            return percentile(milliseconds, 0.5)

        setting.say(f"{rounds} rounds of {calls:,} calls")
        contestants = {"sow": sides["sow"].p50, "bare": sides["bare"].p50, "put": synced_puts}
        take_turns(1, contestants)  # connections are made, caches are warm
        p50 = take_turns(rounds, contestants)

    ours, bare = (statistics.median(p50[name]) for name in ("sow", "bare"))
    least = bare + statistics.median(p50["put"])
    yield Row(
        f"p50 of {rounds} × {calls:,} publishes, each delivered before the next, FSYNC",
        Figure(ours, MILLISECONDS),
        peer=Figure(bare, MILLISECONDS),
        judged=ratio(p50["sow"], p50["bare"]),
        target=DELIVERY_TARGET,
        limits=(Limit("the bare hop plus a bare rocksdict put and sync", Figure(least, MILLISECONDS), least / ours),),
        note=f"{ratio_range(p50['sow'], p50['bare'])}; peer: a unary call whose payload is pushed to an open stream",
    )


class _Side:
    """One server, and one follower of everything on it."""

    def __init__(self, followers: Followers, calls: int) -> None:
        self._followers = followers
        self._calls = calls
        self._number = 0
        (self._follower,) = followers.subscribe([""], reading=False)

    def p50(self) -> float:
        """Milliseconds from the call to the change, the median of a block of calls."""
        return self._followers.run(self._block())

    async def _block(self) -> float:
        publisher = self._followers.publisher()
        milliseconds = []
        for _ in range(self._calls):
            self._number += 1
            request = sow_pb2.PublishRequest(
                topic=TOPIC,
                records=[sow_pb2.PublishRecord(payload=document(self._number))],
                lifetime=types_pb2.Lifetime(ttl_micros=TTL_SECONDS * MICROS),
            )
            begin = time.perf_counter()
            call = publisher.Publish(request)
            milliseconds.append((await self._follower.next_change() - begin) * 1000)
            await call
        return percentile(milliseconds, 0.5)


# ---- ten followers with different filters ----


@dataclass(frozen=True, slots=True)
class AskedFilter:
    """A filter, and the same in Python."""

    text: str
    matches: Callable[[dict[str, Any]], bool]


TEN_FILTERS: Final = (
    AskedFilter("/side = 'buy'", lambda record: record["side"] == "buy"),
    AskedFilter("/symbol = 'S007'", lambda record: record["symbol"] == "S007"),
    AskedFilter("/symbol IN ('S001', 'S002', 'S003')", lambda record: record["symbol"] in ("S001", "S002", "S003")),
    AskedFilter("/symbol LIKE '^S1[0-4]'", lambda record: "S100" <= record["symbol"] <= "S149"),
    AskedFilter("/price > 900 AND /side = 'sell'", lambda record: record["price"] > 900 and record["side"] == "sell"),
    AskedFilter("/quantity BETWEEN 1000 AND 1999", lambda record: 1000 <= record["quantity"] <= 1999),
    AskedFilter("/account BEGINS WITH 'A-00'", lambda record: record["account"].startswith("A-00")),
    AskedFilter(
        "NOT (/price < 500 OR /quantity > 5000)", lambda record: record["price"] >= 500 and record["quantity"] <= 5000
    ),
    AskedFilter("/id % 100 = 0", lambda record: record["id"] % 100 == 0),
    AskedFilter(
        "/symbol >= 'S400' OR /quantity < 100", lambda record: record["symbol"] >= "S400" or record["quantity"] < 100
    ),
)

EVERYTHING: Final = AskedFilter("", lambda record: True)


def ten_filters(setting: Setting) -> Iterator[Row]:
    """Every follower must receive exactly the changes for which its filter is true, in order."""
    records = OFFERED_PER_SECOND * setting.size(20, quick=4)
    with ExitStack() as stack:
        server = stack.enter_context(SowServer(setting.directory / "sow"))
        side = stack.enter_context(Followers(server.address))
        followers = side.subscribe([one.text for one in TEN_FILTERS])

        def row(durability: types_pb2.Durability.ValueType, first: int) -> Row:
            name = types_pb2.Durability.Name(durability).removeprefix("DURABILITY_")
            setting.say(f"{name}: {records:,} records at {OFFERED_PER_SECOND:,}/s")
            payloads = documents(range(first, first + records))
            for follower in followers:
                follower.forget()
            meter = CpuMeter(server)
            offered = meter.measured(
                records,
                lambda: side.publish(
                    payloads, per_tick=PER_TICK, tick_seconds=TICK_SECONDS, durability=durability, until=followers
                ),
            )
            for follower, one in zip(followers, TEN_FILTERS, strict=True):
                assert_complete(follower.sequences, follower.keys, offered, payloads, one)
            delivered = sum(len(follower.keys) for follower in followers)
            lags = [follower.lags_milliseconds(offered) for follower in followers]
            worst = Figure(max(percentile(of_one, 0.99) for of_one in lags), MILLISECONDS)
            return Row(
                f"{name}: lag p99 of the latest of {len(TEN_FILTERS)} followers, {records:,} records published,"
                f" {delivered:,} delivered: none is lost, none comes twice, all are in order",
                worst,
                judged=worst,
                target=LAG_TARGET,
                note=f"all: {lag_percentiles([lag for of_one in lags for lag in of_one])};"
                f" acknowledged {Figure(offered.rate, PER_SECOND)}; {meter}; machine: {setting.machine}",
            )

        yield row(types_pb2.DURABILITY_FSYNC, 0)
        yield row(types_pb2.DURABILITY_BUFFERED, records)


def assert_complete(
    sequences: Sequence[int], keys: Sequence[str], offered: Offered, payloads: Sequence[bytes], one: AskedFilter
) -> None:
    """Loss has no target: a change that is missing, wrong or out of order ends the benchmark with an error."""
    expected = [
        (offered.first_sequence + at, str(record["id"]))
        for at, record in enumerate(map(json.loads, payloads))
        if one.matches(record)
    ]
    found = list(zip(sequences, keys, strict=True))
    if found != expected:
        lost, wrong = len(set(expected) - set(found)), len(set(found) - set(expected))
        raise AssertionError(
            f"{one.text}: {len(found):,} changes came where {len(expected):,} match; {lost:,} are lost, {wrong:,} wrong"
        )


# ---- many followers of nothing ----


def idle_followers(setting: Setting) -> Iterator[Row]:
    """The same load without followers and with many followers of one filter, in turns."""
    seconds = setting.size(10, quick=3)
    rounds = setting.size(5, quick=2)
    at_once = setting.size(200_000, quick=30_000)
    with ExitStack() as stack:
        server = stack.enter_context(SowServer(setting.directory / "sow"))
        side = stack.enter_context(Followers(server.address))
        number = 0
        meters = {MANY: CpuMeter(server), 0: CpuMeter(server)}

        def rate_with(count: int, records: int, *, tick_seconds: float) -> float:
            nonlocal number
            payloads = documents(range(number, number + records))
            number += records
            # The server's default interval of progress, which is part of the cost of such a follower.
            followers = side.subscribe([NOTHING] * count, progress_micros=0)
            per_tick = PER_TICK if tick_seconds else AT_ONCE_RECORDS
            offered = meters[count].measured(
                records, lambda: side.publish(payloads, per_tick=per_tick, tick_seconds=tick_seconds)
            )
            assert not any(follower.keys for follower in followers), "the filter matches nothing"
            side.unsubscribe(followers)
            return offered.rate

        def in_turns(records: int, tick_seconds: float) -> dict[str, list[float]]:
            contestants: dict[str, Callable[[], float]] = {
                name: partial(rate_with, count, records, tick_seconds=tick_seconds)
                for name, count in (("many", MANY), ("none", 0))
            }
            return take_turns(rounds, contestants)

        rate_with(0, at_once, tick_seconds=0.0)  # caches are warm
        setting.say(f"{rounds} rounds of {seconds} s at {OFFERED_PER_SECOND:,}/s")
        steady = in_turns(OFFERED_PER_SECOND * seconds, TICK_SECONDS)
        described = "; ".join(f"{count} followers: {meter}" for count, meter in meters.items())
        setting.say(f"{rounds} rounds of {at_once:,} records at once")
        greatest = in_turns(at_once, 0.0)

    def row(case: str, rates: dict[str, list[float]], target: Target | None, note: str) -> Row:
        return Row(
            f"{MANY} followers of one filter, matching nothing, against none: {case}",
            Figure(statistics.median(rates["many"]), PER_SECOND),
            peer=Figure(statistics.median(rates["none"]), PER_SECOND),
            judged=ratio(rates["many"], rates["none"]),
            target=target,
            note=f"{ratio_range(rates['many'], rates['none'])}; {note}",
        )

    yield row(
        f"{rounds} rounds of {seconds} s, {OFFERED_PER_SECOND:,} records/s offered", steady, FALL_TARGET, described
    )
    yield row(f"{rounds} rounds of {at_once:,} records as fast as they are taken", greatest, None, "for information")


# ---- a follower that does not read ----


def stopped_follower(setting: Setting) -> Iterator[Row]:
    """The same updates without and then with a follower that has stopped reading. Others continue."""
    seconds = setting.size(30, quick=5)
    keys = setting.size(100_000, quick=20_000)
    with ExitStack() as stack:
        server = stack.enter_context(SowServer(setting.directory / "sow"))
        side = stack.enter_context(Followers(server.address))
        others = side.subscribe(["", TEN_FILTERS[0].text])
        everything, some = others
        revision = 0

        def updates(records: int) -> list[bytes]:
            nonlocal revision
            revision += 1
            return [document(number % keys, revision + number // keys) for number in range(records)]

        def measure() -> tuple[Offered, list[float], float]:
            payloads = updates(OFFERED_PER_SECOND * seconds)
            for follower in others:
                follower.forget()
            samples: list[float] = []
            offered = side.publish(
                payloads,
                per_tick=PER_TICK,
                tick_seconds=TICK_SECONDS,
                until=others,
                meanwhile=lambda: samples.append(server.resident_mebibytes()),
            )
            assert_complete(everything.sequences, everything.keys, offered, payloads, EVERYTHING)
            assert_complete(some.sequences, some.keys, offered, payloads, TEN_FILTERS[0])
            return offered, everything.lags_milliseconds(offered), max(samples)

        # Twice: the first load makes memory grow in any case, and a larger one would leave free memory that hides a
        # growth.
        setting.say(f"twice {seconds} s without it")
        measure()
        _, lags_without, peak_without = measure()
        (stopped,) = side.subscribe([""], reading=False)
        setting.say(f"{seconds} s with it")
        offered, lags, peak = measure()

        setting.say("it reads again")
        side.run(stopped.catch_up(offered.last_sequence))
        assert stopped.sequences == everything.sequences, "it must get the unread changes from the journal"

    case = f"{offered.records:,} updates in {seconds} s"
    growth = Figure(max(0.0, peak - peak_without), MEBIBYTES)
    yield Row(
        f"greatest VmRSS with a follower that does not read, over that without: {case}",
        growth,
        judged=growth,
        target=MEMORY_TARGET,
        note=f"without {peak_without:.0f}, with {peak:.0f} MiB; reading again it got all of it from the journal",
    )
    p99 = Figure(percentile(lags, 0.99), MILLISECONDS)
    yield Row(
        f"lag p99 of another follower meanwhile, which got every change: {case}",
        p99,
        peer=Figure(percentile(lags_without, 0.99), MILLISECONDS),
        judged=p99,
        target=LAG_TARGET,
        note=f"{lag_percentiles(lags)}; peer: without the stopped one; machine: {setting.machine}",
    )
