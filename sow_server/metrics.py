"""The metrics: one registry, filled by the writer (as its observer), by the RPCs, and at a scrape from the store.

    [1]  Methods that are called per commit or per call only add to plain numbers, without a lock or an allocation per
         label. So a hundred thousand expiries a second are counted at almost no cost. Each number has one writing
         thread.
    [2]  The cost of a scrape is proportional to the topics shown and the overdue records counted; both are bounded.
    [3]  After `release` no scrape touches the store: it may be closed.

Every name is in docs/metrics.md; a test compares the two.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from sow.v1 import admin_pb2
from sow_server import __version__
from sow_server.access.audit import Outcome
from sow_server.cell_metrics import cell_metrics
from sow_server.cells import Cells
from sow_server.certificates import Expiry
from sow_server.distributions import Distribution
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.doors import Reads, Writes
from sow_server.engine.values.errors import Reason
from sow_server.engine.values.model import MICROS
from sow_server.link_metrics import link_metrics
from sow_server.query.sort_memory import SortMemory
from sow_server.retention.idle import IdleTopics
from sow_server.services.figures import Counts
from sow_server.services.records.admission import Admission
from sow_server.subscription_metrics import result_metrics, subscription_metrics
from sow_server.subscriptions.durable.consumer_registry import Consumers
from sow_server.subscriptions.hub import Hub
from sow_server.subscriptions.results.live_results import LiveResults
from sow_server.timers import PeriodicJob
from sow_server.view_metrics import view_metrics

TOPICS_MAX: Final = 1000
"""Topics with separate figures, the first by name; the others are added up under `OTHER_TOPICS`."""
OTHER_TOPICS: Final = "_other"
"""No topic has this name: a leading underscore is reserved (rule K1)."""
OVERDUE_MAX: Final = 2000
"""A scrape counts at most this many overdue records, over all topics, so that it stays cheap during a mass expiry."""
FAILURES: Final = (Reason.DISK_FULL, Reason.STORE_FAILED, Reason.DATA_DAMAGED, Reason.INTERNAL)
"""Reasons why writing may have ended (rule X3). All are always shown, so that an alert has a series to look at."""

DISCARDS: Final = (
    *("retention", "max_age", "max_bytes", "max_entries"),
    *("evicted", "conflated", "backlog_ttl", "delivery_limit"),
)
"""Reasons for which the journal, or a durable, discards changes (rules J3, J5, J8, J9, J15)."""

_LAG_SECONDS: Final = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 600.0, 3600.0),
)
_COMMIT_SECONDS: Final = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_COMMIT_RECORDS: Final = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10_000.0)
_RPC_SECONDS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0)

LATENCIES: Final = ("Publish", "Get", "Query", "Touch")
"""Calls whose times WatchFigures tells; a stream's is that of its whole life, which says nothing."""


class ReaderFigures(Protocol):
    """Counts of the reader processes."""

    starts_total: int
    queries_total: int
    exports_total: int

    @property
    def running(self) -> int:
        """Processes that are ready."""


class ExportCounts(Protocol):
    """Counts of exports."""

    records_total: int
    """Records that were read from them since the start."""

    @property
    def count(self) -> int:
        """Open ones."""


@dataclass(frozen=True, slots=True)
class StoreFigures:
    """The doors of the store that a scrape reads."""

    reads: Reads
    writes: Writes


class Metrics(Collector):
    """Owns the registry and every number in it. An `engine.writer.Observer`, and the observer of the RPCs."""

    def __init__(self) -> None:
        self.registry: Final = CollectorRegistry()
        self._store: StoreFigures | None = None
        self._hub: Hub | None = None
        self._results: LiveResults | None = None
        self._consumers: Consumers | None = None
        self._admission: Admission | None = None
        self._idle: IdleTopics | None = None
        self._exports: ExportCounts | None = None
        self._jobs: Sequence[PeriodicJob] = ()
        self._certificates: Callable[[], Iterable[tuple[str, Expiry]]] = tuple
        self._sorts: SortMemory | None = None
        self._reader_processes: ReaderFigures | None = None
        self._scrape = threading.Lock()
        # Written by the writer's thread.
        self._commit_seconds = Distribution(_COMMIT_SECONDS)
        self._commit_records = Distribution(_COMMIT_RECORDS)
        self._lag_micros = Distribution([bound * MICROS for bound in _LAG_SECONDS])
        self._stalls = 0
        self._authentication_failures = 0
        self._access_denied: dict[tuple[str, str], int] = {}
        self._audited: dict[tuple[str, str], int] = {}
        # Written by the event loop.
        self._rpcs: dict[tuple[str, str], int] = {}
        self._rpc_seconds: dict[str, Distribution] = {}
        self._links: admin_pb2.GetReplicationStatusResponse | None = None
        self._cells: Cells | None = None
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def watch(self, store: StoreFigures) -> None:
        """From now on a scrape also reads the store."""
        with self._scrape:
            self._store = store

    def watch_subscriptions(self, hub: Hub) -> None:
        """From now on a scrape shows the subscriptions, too."""
        with self._scrape:
            self._hub = hub

    def watch_results(self, results: LiveResults) -> None:
        """From now on a scrape shows the live results, too."""
        with self._scrape:
            self._results = results

    def watch_durables(self, consumers: Consumers, admission: Admission) -> None:
        """From now on a scrape shows the durables, too."""
        with self._scrape:
            self._consumers, self._admission = consumers, admission

    def watch_idle(self, idle: IdleTopics) -> None:
        """From now on a scrape shows deleted topics, too."""
        with self._scrape:
            self._idle = idle

    def watch_jobs(self, jobs: Sequence[PeriodicJob], cells: Cells | None = None) -> None:
        """From now on a scrape shows the periodic jobs, too, and the cells if there are any."""
        self._jobs = jobs
        self._cells = cells

    def watch_certificates(self, expiries: Callable[[], Iterable[tuple[str, Expiry]]]) -> None:
        """From now on a scrape shows when certificates expire; `expiries` has the listener and the file of each."""
        self._certificates = expiries

    def watch_sorts(self, sorts: SortMemory) -> None:
        """From now on a scrape shows the memory of ordered queries, too."""
        self._sorts = sorts

    def watch_reader_processes(self, processes: ReaderFigures) -> None:
        """From now on a scrape shows the reader processes, too."""
        self._reader_processes = processes

    def watch_exports(self, exports: ExportCounts) -> None:
        """From now on a scrape shows the exports, too."""
        with self._scrape:
            self._exports = exports

    def release(self) -> None:
        """Waits for a scrape that is under way; later ones do not touch the store ([3]). To be called before the store
        is closed."""
        with self._scrape:
            self._store = self._hub = self._consumers = self._admission = None
            self._idle = self._exports = self._results = None

    # -- from the writer: its Observer ------------------------------------------------------------------------------

    def committed(self, records: int, seconds: float) -> None:
        """A commit of `records` applied records took `seconds`, sync included."""
        self._commit_seconds.add(seconds)
        self._commit_records.add(records)

    def expired(self, lags_micros: list[int]) -> None:
        """The sweep removed records; `lags_micros` are the times from their expire times to their removal."""
        self._lag_micros.add_all(lags_micros)

    def stalled(self) -> None:
        """A write found RocksDB stalled."""
        self._stalls += 1

    # -- from the services ------------------------------------------------------------------------------------------

    def rpc_finished(self, method: str, code: str, seconds: float) -> None:
        """A call of `method` ended with the gRPC status `code` after `seconds`; for a stream, of the whole stream."""
        ended = (method, code)
        self._rpcs[ended] = self._rpcs.get(ended, 0) + 1
        taken = self._rpc_seconds.get(method)
        if taken is None:
            taken = self._rpc_seconds[method] = Distribution(_RPC_SECONDS)
        taken.add(seconds)

    def latencies(self) -> list[Counts]:
        """The times that commits, expiries and the usual calls took since the start."""
        found = [
            Counts("commit", _COMMIT_SECONDS, self._commit_seconds.counts()),
            Counts("expiry", _LAG_SECONDS, self._lag_micros.counts()),
        ]
        known = [(method, self._rpc_seconds.get(method)) for method in LATENCIES]
        return found + [Counts(name, _RPC_SECONDS, taken.counts()) for name, taken in known if taken is not None]

    # -- from access control ----------------------------------------------------------------------------------------

    def authentication_failed(self) -> None:
        """A call showed no credential that the server knows."""
        self._authentication_failures += 1

    def access_denied(self, method: str, action: str) -> None:
        """A call was refused something."""
        denied = (method, action)
        self._access_denied[denied] = self._access_denied.get(denied, 0) + 1

    def audited(self, event: str, outcome: Outcome) -> None:
        """A line about an event was written to the audit log, or could not be."""
        line = (event, outcome.value)
        self._audited[line] = self._audited.get(line, 0) + 1

    # -- from the links ---------------------------------------------------------------------------------------------

    def links_are(self, status: admin_pb2.GetReplicationStatusResponse) -> None:
        """Takes the current state of the links with other instances. Called about once a second on the event loop,
        which owns the links; a scrape runs on another thread."""
        self._links = status

    # -- for Prometheus --------------------------------------------------------------------------------------------

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not read the store."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Every metric with its current value."""
        build = GaugeMetricFamily("sow_build_info", "The version that runs; always 1.", labels=["version"])
        build.add_metric([__version__], 1)
        yield build
        yield from self._writer_metrics()
        yield from self._rpc_metrics()
        yield from _job_metrics(self._jobs)
        yield _certificate_metric(self._certificates())
        if (sorts := self._sorts) is not None:
            yield GaugeMetricFamily("sow_sort_bytes", "Memory that ordered queries hold.", sorts.held_bytes)
            yield GaugeMetricFamily("sow_sorts_waiting", "Ordered queries that wait for memory.", sorts.waiting)
        if (processes := self._reader_processes) is not None:
            yield from _reader_process_metrics(processes)
        if (links := self._links) is not None:
            yield from link_metrics(links)
        with self._scrape:
            store = self._store
            # A list, so that the store is read under the lock.
            held: list[Metric] = []
            if store is not None:
                held += [*_store_metrics(store), *_topic_metrics(store), *_unreadable_metrics(store)]
                views, derived = store.reads.topics.by_id.values(), store.writes.commits.derived_seconds
                held += view_metrics(views, derived, most=TOPICS_MAX)
                held += [] if self._cells is None else cell_metrics(self._cells, list(views))
            if self._hub is not None:
                held += subscription_metrics(self._hub)
            if self._results is not None:
                held += result_metrics(self._results)
            if store is not None:
                held += [*_durable_metrics(store), *_load_metrics(store)]
            if self._idle is not None:
                held += _idle_metrics(self._idle)
            if self._exports is not None:
                held += _export_metrics(self._exports)
            if self._consumers is not None and self._admission is not None:
                held += _consumer_metrics(self._consumers, self._admission)
        yield from held

    def _writer_metrics(self) -> Iterator[Metric]:
        yield HistogramMetricFamily(
            "sow_commit_seconds",
            "Time to commit published, touched and deleted records, from staging to the end of the sync.",
            buckets=self._commit_seconds.buckets(),
            sum_value=self._commit_seconds.total,
        )
        yield HistogramMetricFamily(
            "sow_commit_records",
            "Applied records per commit.",
            buckets=self._commit_records.buckets(),
            sum_value=self._commit_records.total,
        )
        yield HistogramMetricFamily(
            "sow_expiry_lag_seconds",
            "Time between the expire time of a record and its removal by the sweep.",
            buckets=self._lag_micros.buckets(MICROS),
            sum_value=self._lag_micros.total / MICROS,
        )
        yield CounterMetricFamily("sow_write_stalls", "Writes that found RocksDB stalled.", value=self._stalls)

    def _rpc_metrics(self) -> Iterator[Metric]:
        # dict() copies in one step, whatever the event loop adds meanwhile.
        failures = CounterMetricFamily(
            "sow_authentication_failures", "Calls refused for want of a credential that the server knows."
        )
        failures.add_metric([], self._authentication_failures)
        yield failures
        denied = CounterMetricFamily(
            "sow_access_denied", "Refusals for want of a permission, by method and action.", labels=["method", "action"]
        )
        for labels, count in sorted(self._access_denied.items()):
            denied.add_metric(labels, count)
        yield denied
        audited = CounterMetricFamily(
            "sow_audit_lines",
            "Lines of the audit log by event; failed ones could not be written, reserved ones are written later.",
            labels=["event", "outcome"],
        )
        for labels, count in sorted(dict(self._audited).items()):
            audited.add_metric(labels, count)
        yield audited
        calls = CounterMetricFamily("sow_rpcs", "Calls that have ended, by gRPC status.", labels=["method", "code"])
        for (method, code), count in sorted(dict(self._rpcs).items()):
            calls.add_metric([method, code], count)
        yield calls
        seconds = HistogramMetricFamily(
            "sow_rpc_seconds", "Duration of calls; of a stream, the whole stream.", labels=["method"]
        )
        for method, taken in sorted(dict(self._rpc_seconds).items()):
            seconds.add_metric([method], taken.buckets(), taken.total)
        yield seconds


def _certificate_metric(expiries: Iterable[tuple[str, Expiry]]) -> Metric:
    found = GaugeMetricFamily(
        "sow_certificate_expiry_timestamp_seconds",
        "The time at which a certificate in use expires, in seconds since 1970.",
        labels=["listener", "file"],
    )
    for listener, expiry in expiries:
        found.add_metric([listener, str(expiry.file)], expiry.at.timestamp())
    return found


def _store_metrics(store: StoreFigures) -> Iterator[Metric]:
    clock, commits = store.reads.clock, store.writes.commits
    requests, size = commits.queue_depth
    yield GaugeMetricFamily("sow_write_queue_requests", "Requests in the writer's queue, or being committed.", requests)
    yield GaugeMetricFamily("sow_write_queue_bytes", "Payload bytes of these requests.", size)
    yield GaugeMetricFamily(
        "sow_write_stalled",
        "1 while RocksDB slows writes down or stops them.",
        int(store.writes.upkeep.write_stalled()),
    )
    yield CounterMetricFamily("sow_records_expired", "Expired records that were removed.", commits.expired_total)
    letters = CounterMetricFamily("sow_dead_letters", "Dead letters of expired records.", labels=["fate"])
    for fate, count in commits.letters_total.items():
        letters.add_metric([fate], count)
    yield letters
    yield GaugeMetricFamily("sow_last_sequence", "The last sequence written to the journal.", commits.last_sequence)
    yield CounterMetricFamily("sow_clock_jumps", "Forward jumps of the wall clock, see rule L15.", clock.jumps_total)
    yield GaugeMetricFamily(
        "sow_sweep_paused", "1 while the sweep is paused by a jump of the wall clock.", int(clock.paused)
    )
    failed = GaugeMetricFamily("sow_store_failed", "1 after writing has ended for this reason.", labels=["reason"])
    failure = commits.failure
    reasons = FAILURES if failure is None or failure.reason in FAILURES else (*FAILURES, failure.reason)
    for reason in reasons:
        failed.add_metric([reason.name], int(failure is not None and failure.reason is reason))
    yield failed
    yield GaugeMetricFamily("sow_disk_bytes", "Size of the data directory on disk.", store.writes.upkeep.disk_bytes())
    yield GaugeMetricFamily("sow_topics", "Topics.", len(store.reads.topics.by_name))


def _idle_metrics(idle: IdleTopics) -> Iterator[Metric]:
    deleted = CounterMetricFamily("sow_topics_unused", "Topics deleted because nobody used them.", labels=["cause"])
    for cause, count in idle.deleted_total.items():
        deleted.add_metric([cause.value], count)
    yield deleted


def _reader_process_metrics(processes: ReaderFigures) -> Iterator[Metric]:
    yield GaugeMetricFamily("sow_reader_processes", "Reader processes that are ready.", processes.running)
    yield CounterMetricFamily(
        "sow_reader_process_starts", "Reader processes that were started.", processes.starts_total
    )
    yield CounterMetricFamily(
        "sow_reader_queries", "Queries that reader processes have answered.", processes.queries_total
    )
    yield CounterMetricFamily(
        "sow_reader_exports", "Exports that reader processes have opened.", processes.exports_total
    )


def _job_metrics(jobs: Sequence[PeriodicJob]) -> Iterator[Metric]:
    running = GaugeMetricFamily(
        "sow_job_running_seconds", "Duration of a periodic job's current run; 0 between runs.", labels=["job"]
    )
    for job in jobs:
        running.add_metric([job.name], job.running_seconds)
    yield running


def _load_metrics(store: StoreFigures) -> Iterator[Metric]:
    loads = store.writes.loads.registry.all()
    yield GaugeMetricFamily("sow_loads", "Loads that have not ended.", sum(load.row.open for load in loads))
    yield GaugeMetricFamily(
        "sow_load_staged_rows", "Rows staged by loads that have not ended.", sum(load.staged_rows for load in loads)
    )
    yield GaugeMetricFamily(
        "sow_load_staged_bytes", "Bytes of the staged rows, keys included.", sum(load.staged_bytes for load in loads)
    )
    applying = store.writes.loads.applying
    yield CounterMetricFamily("sow_load_applied", "Rows that loads have published.", applying.applied_total)
    yield CounterMetricFamily(
        "sow_load_deleted", "Records deleted because a load did not contain them.", applying.deleted_total
    )


def _export_metrics(exports: ExportCounts) -> Iterator[Metric]:
    yield GaugeMetricFamily("sow_exports", "Exports that are open.", exports.count)
    yield CounterMetricFamily("sow_export_records", "Records read from exports.", exports.records_total)


def _durable_metrics(store: StoreFigures) -> Iterator[Metric]:
    discarded = CounterMetricFamily(
        "sow_journal_discarded", "Changes discarded by the journal, or by a durable, by reason.", labels=["reason"]
    )
    for reason in DISCARDS:
        discarded.add_metric([reason], store.reads.durables.discarded.get(reason, 0))
    yield discarded
    durables = GaugeMetricFamily("sow_durables", "Durable subscriptions.", labels=["topic"])
    entries = GaugeMetricFamily(
        "sow_backlog_entries", "Changes in the backlog of the topic's slowest durable.", labels=["topic"]
    )
    size = GaugeMetricFamily("sow_backlog_bytes", "Bytes of that backlog.", labels=["topic"])
    age = GaugeMetricFamily("sow_backlog_age_seconds", "Age of the oldest change in that backlog.", labels=["topic"])
    size_quota = GaugeMetricFamily("sow_backlog_quota_bytes", "The topic's backlog_quota_bytes.", labels=["topic"])
    age_quota = GaugeMetricFamily("sow_backlog_quota_seconds", "The topic's backlog_quota_age.", labels=["topic"])
    entries_quota = GaugeMetricFamily(
        "sow_backlog_quota_entries", "The topic's backlog_quota_entries.", labels=["topic"]
    )
    # One series per topic, although a label names the durable: the number of series does not grow with durables.
    slowest_age = GaugeMetricFamily(
        "sow_slowest_durable_age_seconds",
        "Age of the oldest change in the backlog of the topic's slowest durable.",
        labels=["topic", "durable"],
    )
    now = store.reads.clock.now_micros()
    topics = [topic for topic in store.reads.topics.by_id.values() if _has_backlog(store, topic)]
    for topic in sorted(topics, key=lambda topic: topic.name)[:TOPICS_MAX]:
        label, settings = [topic.name], topic.settings
        backlog = store.reads.durables.backlog(topic)
        durables.add_metric(label, store.reads.durables.count(topic))
        entries.add_metric(label, 0 if backlog is None else backlog.entries)
        size.add_metric(label, 0 if backlog is None else backlog.bytes)
        oldest = None if backlog is None else backlog.oldest_micros
        seconds = 0 if oldest is None else max(0, now - oldest) / MICROS
        age.add_metric(label, seconds)
        if backlog is not None:
            slowest_age.add_metric([topic.name, backlog.name], seconds)
        if settings.backlog_quota_bytes is not None:
            size_quota.add_metric(label, settings.backlog_quota_bytes)
        if settings.backlog_quota_age_micros is not None:
            age_quota.add_metric(label, settings.backlog_quota_age_micros / MICROS)
        if settings.backlog_quota_entries is not None:
            entries_quota.add_metric(label, settings.backlog_quota_entries)
    yield from (durables, entries, size, age, size_quota, age_quota, entries_quota, slowest_age)
    yield from _pin_metrics(store, topics, now)


def _pin_metrics(store: StoreFigures, topics: Iterable[Topic], now: int) -> Iterator[Metric]:
    """Readers of ranges: how many, how far the slowest is behind, and for how long the most idle one was not seen. One
    series per topic, as of durables."""
    pins = GaugeMetricFamily("sow_pins", "Pins of the journal.", labels=["topic"])
    labels = ["topic", "pin"]
    entries = GaugeMetricFamily("sow_pin_behind_entries", "Changes after the topic's slowest pin.", labels=labels)
    age = GaugeMetricFamily("sow_pin_behind_seconds", "Age of the oldest change after that pin.", labels=labels)
    idle = GaugeMetricFamily("sow_pin_idle_seconds", "Time since the most idle pin was renewed.", labels=labels)
    for topic in sorted(topics, key=lambda topic: topic.name)[:TOPICS_MAX]:
        found = [durable for durable in store.reads.durables.of(topic) if durable.pin]
        if not found:
            continue
        slowest, longest = found[0], min(found, key=lambda durable: durable.last_use_micros)
        oldest = store.reads.durables.oldest(topic, slowest.position)
        pins.add_metric([topic.name], len(found))
        entries.add_metric([topic.name, slowest.name], max(0, topic.statistics.appended_entries - slowest.entries))
        age.add_metric([topic.name, slowest.name], 0 if oldest is None else max(0, now - oldest) / MICROS)
        idle.add_metric([topic.name, longest.name], max(0, now - longest.last_use_micros) / MICROS)
    yield from (pins, entries, age, idle)


def _has_backlog(store: StoreFigures, topic: Topic) -> bool:
    return store.reads.durables.count(topic) > 0 or topic.settings.has_quota


def _consumer_metrics(consumers: Consumers, admission: Admission) -> Iterator[Metric]:
    yield GaugeMetricFamily("sow_durables_attached", "Durables with a consumer.", consumers.attached_count)
    yield CounterMetricFamily(
        "sow_publishes_held", "Publish requests that waited for a backlog quota.", admission.held_total
    )
    yield CounterMetricFamily(
        "sow_publishes_rejected", "Publish requests that a backlog quota refused.", admission.rejected_total
    )


def _unreadable_metrics(store: StoreFigures) -> Iterator[Metric]:
    skipped = CounterMetricFamily(
        "sow_rows_unreadable",
        "Stored rows that reads skipped because their key is empty or not UTF-8; counted by each read.",
        labels=["topic"],
    )
    for topic, rows in store.reads.unsound.skipped.copy().items():
        skipped.add_metric([topic], rows)
    yield skipped


def _topic_metrics(store: StoreFigures) -> Iterator[Metric]:
    topics = sorted(store.reads.topics.by_name.values(), key=lambda topic: topic.name)
    counts = store.reads.cuts.counts(topics, at_most=OVERDUE_MAX)
    live = GaugeMetricFamily("sow_records_live", "Live records.", labels=["topic"])
    late = GaugeMetricFamily(
        "sow_records_overdue", f"Expired records not yet removed, counted up to {OVERDUE_MAX}.", labels=["topic"]
    )
    stored = GaugeMetricFamily("sow_records_bytes", "Key and payload bytes of the stored records.", labels=["topic"])
    journal_bytes = GaugeMetricFamily("sow_journal_bytes", "Bytes of the retained journal.", labels=["topic"])
    entries = GaugeMetricFamily("sow_journal_entries", "Changes in the retained journal.", labels=["topic"])
    dead = GaugeMetricFamily("sow_tombstones", "Tombstones kept for peers, not yet purged.", labels=["topic"])
    families = (live, late, stored, journal_bytes, entries, dead)
    caps = GaugeMetricFamily("sow_records_max", "The topic's max_records.", labels=["topic"])
    size_caps = GaugeMetricFamily("sow_records_bytes_max", "The topic's max_stored_bytes.", labels=["topic"])
    full = CounterMetricFamily(
        "sow_topic_full_refusals", "Records that were refused because the topic was full.", labels=["topic"]
    )
    others = [0] * len(families)
    for index, topic in enumerate(topics):
        figures = topic.statistics
        records = counts[topic.id]
        values = (
            records.live,
            records.overdue,
            figures.record_bytes,
            figures.journal_bytes,
            figures.journal_entries,
            figures.tombstones,
        )
        if index < TOPICS_MAX:
            for family, value in zip(families, values, strict=True):
                family.add_metric([topic.name], value)
            if topic.settings.max_records is not None:
                caps.add_metric([topic.name], topic.settings.max_records)
            if topic.settings.max_stored_bytes is not None:
                size_caps.add_metric([topic.name], topic.settings.max_stored_bytes)
            if topic.caps is not None:
                full.add_metric([topic.name], topic.full_refusals)
        else:
            others = [total + value for total, value in zip(others, values, strict=True)]
    if len(topics) > TOPICS_MAX:
        for family, total in zip(families, others, strict=True):
            family.add_metric([OTHER_TOPICS], total)
    yield from (*families, caps, size_caps, full)
