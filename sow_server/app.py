"""The composition root: builds, starts and stops all parts, in one visible order.

start   config → metrics endpoint → clock → store (verified, topics declared, overdue expired) → writer → timers → gRPC
        → links → healthy → `ready`
stop    the same parts in the opposite order: unhealthy → end subscriptions and exports → receive no more from peers →
        refuse new calls, end calls → timers → end links → drain the writer, sync → close RocksDB → metrics endpoint

Every part that has started is on one exit stack, so a start that fails half-way stops exactly the parts that run.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, TypeVar

import grpc
import structlog
import uvloop
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection

from sow.v1 import access_pb2, admin_pb2, load_pb2, snapshot_pb2, sow_pb2
from sow_server import __version__, malloc
from sow_server.access_control import AccessControl, AccessControlError
from sow_server.cell_watch import WATCH_SECONDS, CellWatch
from sow_server.cells import Cells, applying, arriving
from sow_server.config import (
    Config,
    ListenerConfig,
    MetricsConfig,
    clock_options,
    described,
    reader_processes,
    store_options,
)
from sow_server.declaring import CellStore, declare, warn_of_settings
from sow_server.engine.commit.pace import CallsUnderWay
from sow_server.engine.store import Store
from sow_server.engine.values.clock import GuardedClock, TimeSource
from sow_server.engine.values.model import MICROS
from sow_server.linking import InstanceLinks, LinkingError, link
from sow_server.listening import Listeners, ListeningError, Register
from sow_server.metrics import Metrics, StoreFigures
from sow_server.metrics_pages import Readiness
from sow_server.metrics_server import ListenError, serve_metrics
from sow_server.placement import Places
from sow_server.prepared import PreparedFile
from sow_server.query.exports import ExportOptions, Exports
from sow_server.query.sort_memory import SortMemory
from sow_server.query.view_plans import view_plan
from sow_server.reader_processes.pool import ReaderOptions, ReaderProcesses
from sow_server.retention.idle import IdleTopics
from sow_server.services.access_service import AccessService
from sow_server.services.admin_service import AdminService
from sow_server.services.changes_service import ChangesService
from sow_server.services.door.capacity import InFlight
from sow_server.services.door.fair_readers import FairReaders
from sow_server.services.door.guard import CallAdmission, handlers, standard_handlers
from sow_server.services.durables_service import DurablesService
from sow_server.services.exporting import ServedExport
from sow_server.services.figure_history import SAMPLE_SECONDS, FigureHistory
from sow_server.services.followers import Followers, Subscribing
from sow_server.services.health_service import HealthService
from sow_server.services.inspection_service import InspectionService, ThisServer
from sow_server.services.links_service import LinksService
from sow_server.services.live_queries import LiveQueries
from sow_server.services.load_jobs import LoadJobs
from sow_server.services.load_service import LoadService
from sow_server.services.log_tail import LogTail
from sow_server.services.ownership import DurableOwners
from sow_server.services.placement_service import PlacementService
from sow_server.services.reader_pieces import ReaderPieces
from sow_server.services.records.admission import Admission
from sow_server.services.records.positions import Positions
from sow_server.services.records.queries import Queries
from sow_server.services.records.submissions import Submissions
from sow_server.services.snapshot_service import SnapshotService
from sow_server.services.sow_service import PublishOptions, SowService
from sow_server.services.subscribe_service import SubscribeService
from sow_server.services.wire.topic_filters import AskedView, TopicFilters
from sow_server.signals import ignore_reloads
from sow_server.subscriptions.durable.consumer_registry import Consumers
from sow_server.subscriptions.durable.replicated import ReplicatedDurables
from sow_server.subscriptions.hub import Hub, HubOptions
from sow_server.subscriptions.results.live_results import LiveResults
from sow_server.subscriptions.stream import Background
from sow_server.timers import JobOptions, PeriodicJob, ScrubPace, Timers

if TYPE_CHECKING:
    from sow_server.tracing import Tracing

log = structlog.get_logger(__name__)
T = TypeVar("T")

SWITCH_SECONDS: Final = 0.001
"""How long a thread keeps the GIL while another wants it. With the default of 5 ms a publish would wait that long while
the writer sweeps. Switching five times as often costs less than a percent."""
SCAN_RECORDS: Final = 1000
"""Entries per frame where durables are scanned; these frames are not sent."""
SERVICES: Final[tuple[str, ...]] = (
    "sow.v1.SowService",
    "sow.v1.AdminService",
    "sow.v1.SnapshotService",
    "sow.v1.LoadService",
    "sow.v1.AccessService",
)


class StartError(Exception):
    """The server cannot start: one message with the reason and the remedy."""


def run(config: Config, tail: LogTail | None = None, *, time_source: TimeSource | None = None) -> int:
    """Runs the server until SIGTERM or SIGINT; returns the exit status. `tail`: the last lines of the log;
    `time_source`: in place of the machine's clocks, for tests. Raises StartError, OpenError."""
    sys.setswitchinterval(SWITCH_SECONDS)
    malloc.tune()
    return uvloop.run(_serve(config, tail or LogTail(), time_source or TimeSource()))


async def _serve(config: Config, tail: LogTail, time_source: TimeSource) -> int:
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    async with AsyncExitStack() as running:
        await _start(config, tail, time_source, running)
        await stopping.wait()
        ignore_reloads()
        log.info("stopping")
    log.info("stopped")
    return 0


async def _start(config: Config, tail: LogTail, time_source: TimeSource, running: AsyncExitStack) -> None:
    """Starts one part after the other. `running` stops them in the opposite order, also where a later one cannot
    start."""
    metrics = Metrics()
    readiness = Readiness()
    _serve_metrics(config.metrics, metrics, readiness, running)
    stopped = threading.Event()
    store = _open_store(config, metrics, time_source, running)
    readers = _readers(config)
    running.callback(readers.shutdown, wait=True)
    running.callback(stopped.set)
    running.callback(metrics.release)
    places = declare(store, config)
    tracing = _tracing(config, store, running)
    metrics.watch(StoreFigures(store.reads, store.writes))
    parts = _Parts.on(store, config, metrics, readers)
    links = _link(parts, config, readers, running, tracing)
    store.start(asyncio.get_running_loop().call_soon_threadsafe)
    figures = FigureHistory(store.reads, store.writes, parts.followers, links, readers, metrics.latencies)
    load_jobs = LoadJobs(store.reads, store.writes, parts.admission, readers)
    services = (*SERVICES, *links.services)
    healthy = HealthService()
    access = _access(config, parts, metrics, readers, links, running, places)
    cells, jobs = _cells(config, places, access, parts, links, readers, running)
    timers = _timers(parts, readers, config, figures, jobs, lambda: not stopped.is_set())
    metrics.watch_jobs(timers.jobs, cells)
    processes = _reader_processes(store, config, metrics, running)
    this = _this_server(config, healthy, figures, tail, cells)
    own = _services(parts, links, load_jobs, readers, processes, config, access, this, tracing=tracing)
    admission_of = _admissions(config, access, metrics, store.commits.calls, tracing)

    def register(server: grpc.aio.Server, listener: ListenerConfig) -> None:
        admission = admission_of(listener)
        server.add_generic_rpc_handlers(tuple(handlers(of, one, admission) for of, one in own))
        server.add_generic_rpc_handlers(_standard_handlers(healthy, services, admission, reflects=config.reflects))
        if listener.links:
            server.add_generic_rpc_handlers(links.handlers(admission))

    listeners, addresses = _listen(config, register, links)
    metrics.watch_certificates(listeners.expiries)

    access.start()
    timers.start()
    running.callback(timers.stop)
    load_jobs.start()
    running.push_async_callback(load_jobs.stop)
    await listeners.start()
    running.push_async_callback(listeners.stop, config.server.stop_grace_micros / MICROS)
    await links.start(metrics.links_are)
    running.callback(links.stop_receiving)
    running.callback(parts.end_streams)
    _set_health(healthy, services, serving=True)
    readiness.ready()
    watch = asyncio.create_task(_watch_failure(store, healthy, services, readiness))
    running.callback(healthy.stopping)
    running.callback(watch.cancel)
    running.callback(readiness.stopping)
    running.callback(stopped.set)  # first of all: a scrub or compaction gives way

    _tune_gc()
    warn_of_settings(store.topics)
    log.info(
        "ready",
        address=addresses[0],
        addresses=addresses,
        instance=config.server.instance,
        data_dir=str(config.server.data_dir),
    )
    if not store.upkeep.verified_at_start:
        readers.submit(store.upkeep.scrub, ScrubPace(stopped))


def _readers(config: Config) -> FairReaders:
    threads = config.server.reader_threads
    return FairReaders(threads, threads if config.access.file is None else 0)


def _open_store(config: Config, metrics: Metrics, time_source: TimeSource, running: AsyncExitStack) -> Store:
    store = Store.open(
        config.server.data_dir,
        clock=GuardedClock(wall=time_source.wall, elapsed=time_source.elapsed, options=clock_options(config)),
        options=replace(store_options(config), plan_of=view_plan),
        observer=metrics,
        accept_clock=config.accept_clock,
        accept_loss=config.accept_loss,
        authoritative=config.authoritative,
    )
    # Draining waits for the writer's thread, whose answers go through the event loop: so it must not block the loop.
    running.push_async_callback(asyncio.to_thread, store.close)
    return store


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts between the store and the services. They need no start; `end_streams` ends them."""

    store: Store
    hub: Hub
    consumers: Consumers
    replicated: ReplicatedDurables
    positions: Positions
    admission: Admission
    idle: IdleTopics
    exports: Exports[ServedExport]
    sorts: SortMemory
    results: LiveResults
    followers: Followers

    @classmethod
    def on(cls, store: Store, config: Config, metrics: Metrics, readers: Executor) -> _Parts:
        """Builds the parts, watched by the metrics."""
        reads, writes = store.reads, store.writes
        hub = Hub(
            reads,
            writes,
            asyncio.get_running_loop().call_soon,
            options=HubOptions(
                queue_bytes_max=config.subscriptions.queue_bytes_max,
                subscriptions_max=config.subscriptions.subscriptions_max,
            ),
        )
        consumers = Consumers(
            reads,
            writes,
            hub,
            lambda text, part: TopicFilters(store.cuts, AskedView(text), SCAN_RECORDS, lambda topic: part).view,
            instance=config.server.instance,
            hold_micros=config.journal.hold_max_micros,
        )
        parts = cls(
            store,
            hub,
            consumers,
            ReplicatedDurables(consumers, reads, writes),
            Positions(reads, writes),
            Admission(reads, writes, consumers.backlogs.held, passed_over=consumers.backlogs.passed_over),
            IdleTopics(reads, writes),
            Exports(store.reads, options=ExportOptions(config.limits.exports_max)),
            SortMemory(config.limits.sort_bytes_max, config.limits.sorts_waiting_max),
            LiveResults(hub, reads, Background(readers), bytes_max=config.subscriptions.result_bytes_max),
            Followers(reads.clock.now_micros),
        )
        metrics.watch_sorts(parts.sorts)
        metrics.watch_subscriptions(hub)
        metrics.watch_results(parts.results)
        metrics.watch_durables(parts.consumers, parts.admission)
        metrics.watch_idle(parts.idle)
        metrics.watch_exports(parts.exports)
        return parts

    def end_streams(self) -> None:
        """Ends subscriptions and exports, so that their calls end."""
        self.idle.stop()
        self.hub.stop()
        self.exports.stop()


def _timers(
    parts: _Parts,
    readers: Executor,
    config: Config,
    figures: FigureHistory,
    jobs: Sequence[PeriodicJob],
    go_on: Callable[[], bool],
) -> Timers:
    options = JobOptions(
        prune_interval_micros=config.journal.prune_interval_micros,
        mark_interval_micros=config.clock.mark_interval_micros,
        reclaim_interval_micros=config.storage.reclaim_interval_micros,
        reclaim_records=config.storage.reclaim_records,
        go_on=go_on,
        more=[PeriodicJob("figures", figures.sample, SAMPLE_SECONDS), *jobs],
    )
    return Timers(
        parts.store.reads,
        parts.store.writes,
        options,
        readers=readers,
        consumers=parts.consumers,
        idle=parts.idle,
        exports=parts.exports,
        sorts=parts.sorts,
    )


def _access(
    config: Config,
    parts: _Parts,
    metrics: Metrics,
    readers: Executor,
    links: InstanceLinks,
    running: AsyncExitStack,
    places: Places | None,
) -> AccessControl:
    try:
        access = AccessControl(config, parts.store.topics, metrics, readers, places)
    except AccessControlError as error:
        raise StartError(str(error)) from error
    running.callback(access.stop)
    if config.access.file is not None:
        links.ask_access(lambda name: access.authorizer.peer(name) is not None)
        parts.consumers.backlogs.owners = DurableOwners(access.authorizer)
    return access


def _cells(
    config: Config,
    places: Places | None,
    access: AccessControl,
    parts: _Parts,
    links: InstanceLinks,
    readers: Executor,
    running: AsyncExitStack,
) -> tuple[Cells | None, list[PeriodicJob]]:
    """The cell of this server, and its jobs. From now on, SIGHUP reads the access file again, or the placement."""
    loop = asyncio.get_running_loop()
    if places is None:
        loop.add_signal_handler(signal.SIGHUP, access.reload_soon)
        return None, []
    store = parts.store
    files = PreparedFile(config.server.data_dir, places.file)
    cells = Cells(places, readers, access.authorizer, CellStore(store, config, places), files, files.load())
    cells.lacks = arriving(store.topics, links, places.cell)
    cells.applies = applying(store.loads.registry, places)
    watch = CellWatch(config.placement, cells, store.reads.clock.now_micros)
    cells.unanswered = watch.unanswered
    running.push_async_callback(watch.close)
    waiting = loop.create_task(watch.await_prepared(links))
    running.callback(waiting.cancel)
    reloads = [cells.reload_soon, *([] if config.access.file is None else [access.reload_soon])]
    loop.add_signal_handler(signal.SIGHUP, lambda: [reload() for reload in reloads])
    job = PeriodicJob("cells", watch.look, WATCH_SECONDS, at_once=True)
    cells.look = job.run
    return cells, [job]


def _reader_processes(store: Store, config: Config, metrics: Metrics, running: AsyncExitStack) -> ReaderProcesses:
    wanted = config.server.reader_processes
    if wanted is None:
        wanted = reader_processes(len(os.sched_getaffinity(0)))
    options = ReaderOptions(
        processes=wanted,
        data_dir=config.server.data_dir,
        block_cache_bytes=config.storage.block_cache_bytes // 2,
        sort_bytes_max=config.limits.sort_bytes_max // max(1, wanted),
        sorts_waiting_max=config.limits.sorts_waiting_max,
    )
    processes = ReaderProcesses(options, store.reads, store.writes, store.beats)
    metrics.watch_reader_processes(processes)
    running.push_async_callback(processes.stop)
    return processes


def _tracing(config: Config, store: Store, running: AsyncExitStack) -> Tracing | None:
    if not config.tracing.endpoint:
        return None
    try:
        from sow_server.tracing import Tracing, exporting  # only here: it needs an extra
    except ModuleNotFoundError as error:
        raise StartError(
            f"[tracing] endpoint: the Python package {error.name!r} is missing; install it with: pip install "
            "'sow[otel]', or in a checkout: pip install '.[otel]'"
        ) from error
    tracing = Tracing(
        config.tracing,
        exporting(config.tracing),
        instance=config.server.instance,
        version=__version__,
        last_sequence=store.commits.last_sequence,
        later=asyncio.get_running_loop().call_later,
    )
    store.commits.follow(tracing.committed)
    running.push_async_callback(asyncio.to_thread, tracing.close)
    return tracing


def _admissions(
    config: Config, access: AccessControl, metrics: Metrics, publishes: CallsUnderWay, tracing: Tracing | None
) -> Callable[[ListenerConfig], CallAdmission]:
    """Makes the admission of each listener. The bytes in flight are those of all listeners together."""
    in_flight = InFlight(config.limits.in_flight_bytes_max, shared=config.access.file is not None)

    def admission(listener: ListenerConfig) -> CallAdmission:
        return CallAdmission(
            access.listener(listener),
            metrics,
            in_flight,
            calls_max=listener.max_concurrent_rpcs or config.server.max_concurrent_rpcs,
            message_bytes_max=config.limits.message_bytes_max,
            publishes=publishes,
            traces=tracing,
        )

    return admission


def _services(
    parts: _Parts,
    links: InstanceLinks,
    load_jobs: LoadJobs,
    readers: Executor,
    processes: ReaderProcesses,
    config: Config,
    access: AccessControl,
    server: ThisServer,
    *,
    tracing: Tracing | None,
) -> tuple[tuple[ServiceDescriptor, tuple[object, ...]], ...]:
    """This project's own services with their parts, without those of the links."""
    store, hub, consumers = parts.store, parts.hub, parts.consumers
    changes = Submissions(store.reads, store.writes, links, parts.admission)
    reading = store.reads
    followers = parts.followers
    queries = Queries(reading, readers, parts.sorts, processes)
    runs = LiveQueries(queries, parts.sorts, config.subscriptions.result_bytes_max)
    subscribing = Subscribing(hub, consumers, followers, parts.results, deliveries=tracing)
    sow = SowService(
        reading,
        store.writes,
        subscribing,
        changes,
        readers,
        queries,
        parts.positions,
        PublishOptions(config.server.durability, dynamic_topics=config.server.dynamic_topics),
    )
    admin = (
        AdminService(reading, store.writes, Submissions(store.reads, store.writes, links), readers),
        DurablesService(reading, store.writes, consumers, followers, readers),
        InspectionService(reading, store.writes, followers, readers, server),
        LinksService(links),
        PlacementService(reading, server.cells, readers),
    )
    pieces = ReaderPieces(readers)
    idle_max = config.limits.pin_idle_ttl_max_micros
    snapshot = (
        SnapshotService(reading, store.writes, parts.exports, readers, processes, pieces),
        ChangesService(reading, store.writes, hub, consumers, pieces, pin_idle_max=idle_max),
    )
    loads = LoadService(
        store.writes,
        load_jobs,
        readers,
        store.limits,
        dynamic_topics=config.server.dynamic_topics,
    )
    return (
        # The most used one first: gRPC asks each service in this order whether a method is its own.
        (
            sow_pb2.DESCRIPTOR.services_by_name["SowService"],
            (sow, SubscribeService(reading, subscribing, readers, runs)),
        ),
        (load_pb2.DESCRIPTOR.services_by_name["LoadService"], (loads,)),
        (admin_pb2.DESCRIPTOR.services_by_name["AdminService"], admin),
        (snapshot_pb2.DESCRIPTOR.services_by_name["SnapshotService"], snapshot),
        (access_pb2.DESCRIPTOR.services_by_name["AccessService"], (AccessService(access),)),
    )


def _this_server(
    config: Config, healthy: HealthService, figures: FigureHistory, tail: LogTail, cells: Cells | None
) -> ThisServer:
    return ThisServer(
        config.server.instance,
        __version__,
        healthy,
        figures,
        cluster=config.server.cluster,
        settings=described(config),
        tail=tail,
        cells=cells,
    )


def _standard_handlers(
    healthy: HealthService, services: Sequence[str], admission: CallAdmission, *, reflects: bool
) -> tuple[grpc.GenericRpcHandler, ...]:
    """The handlers of health, and of reflection if it is to be served."""
    of_health = health_pb2.DESCRIPTOR.services_by_name["Health"]
    found = standard_handlers(of_health, healthy, admission)  # type: ignore[arg-type]  # the stubs name another base
    if not reflects:
        return (found,)
    of_reflection = descriptor_pool.Default().FindServiceByName(reflection.SERVICE_NAME)
    reflecting = reflection.aio.ReflectionServicer((*services, of_health.full_name, of_reflection.full_name))
    return (found, standard_handlers(of_reflection, reflecting, admission))


def _link(
    parts: _Parts, config: Config, readers: Executor, running: AsyncExitStack, tracing: Tracing | None
) -> InstanceLinks:
    try:
        links = link(parts.store, config, readers, parts.replicated, tracing)
    except LinkingError as error:
        raise StartError(str(error)) from error
    except OSError as error:
        raise StartError(f"[[replication.peers]]: {error.filename}: {error.strerror}") from error
    running.push_async_callback(links.stop)  # after the calls: some wait until peers have their writes
    return links


def _listen(config: Config, register: Register, links: InstanceLinks) -> tuple[Listeners, tuple[str, ...]]:
    """The listeners, whose ports are open but not served yet, and their addresses."""
    try:
        listeners = Listeners(config, register, link_bytes_max=links.message_bytes_max)
        return listeners, listeners.bind()
    except (ListeningError, AccessControlError) as error:
        raise StartError(str(error)) from error


def _serve_metrics(settings: MetricsConfig, metrics: Metrics, readiness: Readiness, running: AsyncExitStack) -> None:
    """Serves the metrics from the first part's start to the last one's end, so that /readyz also tells of a start or a
    stop that takes long. Raises StartError."""
    try:
        server = serve_metrics(settings, metrics, readiness)
    except ListenError as error:
        raise StartError(str(error)) from error
    if server is not None:
        running.callback(server.close)
        log.info("metrics_served", address=f"{settings.listen.rpartition(':')[0]}:{server.address[1]}")


def _set_health(healthy: HealthService, services: Sequence[str], *, serving: bool) -> None:
    for service in ("", *services):
        healthy.set(service, serving=serving)


async def _watch_failure(store: Store, healthy: HealthService, services: Sequence[str], readiness: Readiness) -> None:
    """A store that has stopped writing is not healthy, though its reads go on (rule X3)."""
    # It is set on the writer's thread, and a fifth of a second is soon.
    while (failure := store.commits.failure) is None:  # noqa: ASYNC110 - of a thread
        await asyncio.sleep(0.2)
    readiness.failed(failure.reason.name)
    _set_health(healthy, services, serving=False)


def _tune_gc() -> None:
    """The objects of now live as long as the process; later ones are mostly short-lived and without cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)
