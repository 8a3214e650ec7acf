"""The benchmarks by name: one per line of the table of targets for speed and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks import (
    celling,
    commanding,
    deriving,
    dispatching,
    expiring,
    fetching,
    filtering,
    following,
    grouping,
    growing,
    guarding,
    hostile,
    keeping,
    looking,
    moving,
    publishing,
    querying,
    replicating,
    residing,
    retaining,
    scanning,
    single,
    sparking,
    tracing,
    viewing,
)
from benchmarks.rows import Row
from benchmarks.setting import Setting


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One program: its measurement, and its time limit."""

    name: str
    title: str
    run: Callable[[Setting], Iterator[Row]]
    seconds_max: int


BENCHMARKS: Final = (
    Benchmark("publish-new", "stream publish, new keys", publishing.new_keys, 900),
    Benchmark("publish-updates", "stream publish, random updates", publishing.updates, 1800),
    Benchmark("query", "whole-topic query stream", querying.whole_topic, 900),
    Benchmark("scans", "publishing beside whole-topic scans", scanning.publishes_beside_scans, 1800),
    Benchmark("single-publish", "single durable publish", single.durable_publish, 600),
    Benchmark("expiry-lag", "expiry lag at 10,000 expiries/s", expiring.lag, 900),
    Benchmark("mass-expiry", "one million records due at once", expiring.mass_expiry, 900),
    Benchmark("restart", "ready after a restart", residing.restart, 3600),
    Benchmark("memory", "resident memory", residing.memory, 1800),
    Benchmark("growth", "from 100,000 records to 30 million", growing.growth, 5400),
    Benchmark("filtered-scan", "filtered scan, three predicates", filtering.filtered_scan, 900),
    Benchmark("index-equality", "equality on an index", filtering.index_equality, 900),
    Benchmark("aggregates", "groups and aggregates", grouping.aggregates, 600),
    Benchmark("views", "updates of a topic with a view", deriving.views, 900),
    Benchmark("delivery", "publish to delivery", following.delivery, 600),
    Benchmark("ten-filters", "ten followers with different filters", following.ten_filters, 600),
    Benchmark("idle-followers", "many followers of nothing", following.idle_followers, 900),
    Benchmark("dispatch", "many followers, each of its own value", dispatching.by_value, 900),
    Benchmark("stopped-follower", "a follower that does not read", following.stopped_follower, 900),
    Benchmark("live-view", "a live view comes back after an outage", viewing.live_view, 900),
    Benchmark("durable-consumer", "a durable consumer that acknowledges", retaining.durable_consumer, 900),
    Benchmark("detached-durables", "many durables that nobody consumes", retaining.detached_durables, 900),
    Benchmark("pruning", "a million journal entries pruned", retaining.pruning, 900),
    Benchmark("idle", "many topics and durables that nobody uses", retaining.idle, 1800),
    Benchmark("replicated-publish", "publishing with a peer", replicating.replicated_publish, 900),
    Benchmark("replication-lag", "from a publish to a subscriber of a peer", replicating.lag, 600),
    Benchmark("catching-up", "a peer that was down catches up", replicating.catching_up, 900),
    Benchmark("resync", "a new peer is seeded", replicating.resync, 900),
    Benchmark("cells", "several cells on one machine", celling.cells, 900),
    Benchmark("moves", "a topic that moves between cells", moving.moves, 600),
    Benchmark("access", "credentials, grants and rows", guarding.access, 1800),
    Benchmark("hostile", "while one caller does its worst", hostile.hostile, 3600),
    Benchmark("traces", "OpenTelemetry", tracing.traces, 1800),
    Benchmark("command", "the time of a command", commanding.get, 600),
    Benchmark("console", "the console", looking.console, 900),
    Benchmark("http", "records over HTTP", fetching.http, 900),
    Benchmark("spark-snapshot", "a snapshot of a topic in Spark", sparking.snapshot, 900),
    Benchmark("spark-write", "a bulk load from Spark", sparking.bulk_write, 900),
    Benchmark("spark-scale", "ten million records through Spark", sparking.scale, 3600),
    Benchmark("spark-disturbance", "publishing while Spark takes snapshots", sparking.disturbance, 900),
    Benchmark("spark-state", "the last value of each key, in Spark", keeping.state, 1800),
    Benchmark("spark-sinks", "a state in Spark into servers and a lake", keeping.sinks, 1800),
    Benchmark("spark-state-scale", "ten million keys in an executor of 2 GiB", keeping.scale, 3600),
)


class UnknownBenchmark(Exception):
    """A name that is not in the registry. The text lists the known names."""


def chosen(names: Sequence[str]) -> tuple[Benchmark, ...]:
    """The benchmarks of these names in the registry's order; without names all of them. Raises UnknownBenchmark."""
    known = {benchmark.name for benchmark in BENCHMARKS}
    for name in names:
        if name not in known:
            raise UnknownBenchmark(f"no benchmark {name!r}; there are {', '.join(b.name for b in BENCHMARKS)}")
    return tuple(benchmark for benchmark in BENCHMARKS if not names or benchmark.name in names)
