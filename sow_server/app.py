"""The composition root: builds, starts and stops everything, in one visible order.

start   config → clock → store (verified, topics declared, overdue expired) → writer → gRPC → timers → links → healthy
        → `ready`
stop    unhealthy → end subscriptions, exports → end links → refuse new calls → end calls → timers
        → drain the writer, sync → close RocksDB
"""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Final

import grpc
import structlog
import uvloop
from google.protobuf import descriptor_pool
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection

from sow.v1 import admin_pb2, load_pb2, replication_pb2, snapshot_pb2, sow_pb2
from sow_replication.service import Replication
from sow_server import __version__, malloc
from sow_server.config import Config, TlsConfig, clock_options, store_options
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.store import Store
from sow_server.engine.values import policies
from sow_server.engine.values.clock import GuardedClock
from sow_server.engine.values.errors import StoreError
from sow_server.engine.values.model import MICROS
from sow_server.engine.values.policies import Declared
from sow_server.linking import Linked, link
from sow_server.metrics import ListenError, Metrics, serve_metrics
from sow_server.peers import PeerStore
from sow_server.query.exports import ExportOptions, Exports
from sow_server.query.sort_memory import SortMemory
from sow_server.retention.idle import IdleTopics
from sow_server.services.admin_service import AdminService
from sow_server.services.admission import Admission
from sow_server.services.guard import guarded_handlers, handlers
from sow_server.services.load_service import LoadService
from sow_server.services.loading import Loading
from sow_server.services.replication import NoReplicas
from sow_server.services.snapshot_service import SnapshotService
from sow_server.services.sow_service import SowService
from sow_server.services.submissions import Submissions
from sow_server.services.topic_filters import TopicFilters
from sow_server.subscriptions.consumers import Consumers
from sow_server.subscriptions.hub import Hub, HubOptions
from sow_server.timers import Timers

log = structlog.get_logger(__name__)

SWITCH_SECONDS: Final = 0.001
"""How long a thread keeps the GIL from another that wants it. The default of 5 ms is what a publish would wait while
the writer sweeps; switching five times as often costs less than a percent."""
SCAN_RECORDS: Final = 1000
"""Entries that a frame holds where durables are scanned; nobody is sent these."""
LINKS_SECONDS: Final = 1.0
SERVICES: Final[tuple[str, ...]] = (
    "sow.v1.SowService",
    "sow.v1.AdminService",
    "sow.v1.SnapshotService",
    "sow.v1.LoadService",
)
REPLICATION: Final = "sow.v1.ReplicationService"
"""Only where there are peers, or some are accepted."""


class StartError(Exception):
    """The server cannot start: one message that says why, and what to do."""


def run(config: Config) -> int:
    """Runs the server until SIGTERM or SIGINT; returns the exit status. Raises StartError, OpenError."""
    sys.setswitchinterval(SWITCH_SECONDS)
    malloc.tune()
    return uvloop.run(_serve(config))


async def _serve(config: Config) -> int:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)

    metrics = Metrics()
    clock = GuardedClock(options=clock_options(config))
    store = Store.open(
        config.server.data_dir,
        clock=clock,
        options=store_options(config),
        observer=metrics,
        accept_clock=config.accept_clock,
        accept_loss=config.accept_loss,
        authoritative=config.authoritative,
    )
    readers = ThreadPoolExecutor(config.server.reader_threads, thread_name_prefix="sow-reader")
    stopped = threading.Event()
    try:
        declare_topics(store, config.topics)
        metrics.watch(store, clock)
        hub = Hub(
            store,
            clock,
            loop.call_soon,
            options=HubOptions(
                queue_bytes_max=config.subscriptions.queue_bytes_max,
                subscriptions_max=config.subscriptions.subscriptions_max,
            ),
        )
        consumers = Consumers(store, clock, hub, lambda text: TopicFilters(store, text, (), (), SCAN_RECORDS).view)
        admission = Admission(store, clock)
        sorts = SortMemory(config.limits.sort_bytes_max, config.limits.sorts_waiting_max)
        metrics.watch_sorts(sorts)
        metrics.watch_subscriptions(hub)
        metrics.watch_durables(consumers, admission)
        idle = IdleTopics(store, clock)
        metrics.watch_idle(idle)
        exports = Exports(store, options=ExportOptions(config.limits.exports_max))
        metrics.watch_exports(exports)
        links = _link(store, clock, config, readers) if config.replicates else None
        if links is not None:
            store.writer.follow(lambda commits, synced: links.wake())
        store.start(loop.call_soon_threadsafe)
        timers = Timers(
            store,
            clock,
            readers,
            consumers,
            idle,
            exports,
            sorts,
            prune_interval_micros=config.journal.prune_interval_micros,
            mark_interval_micros=config.clock.mark_interval_micros,
            reclaim_interval_micros=config.storage.reclaim_interval_micros,
            reclaim_records=config.storage.reclaim_records,
            go_on=lambda: not stopped.is_set(),
        )
        metrics.watch_jobs(timers.jobs)
        message_bytes_max = config.limits.message_bytes_max if links is None else config.limits.link_bytes_max
        server = grpc.aio.server(
            options=(
                ("grpc.max_receive_message_length", message_bytes_max),
                ("grpc.max_send_message_length", message_bytes_max),
                # A client that vanished without a word holds a cut or a stream open: it is asked every minute.
                ("grpc.keepalive_time_ms", 60_000),
                ("grpc.keepalive_timeout_ms", 20_000),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),  # clients may ask twice a minute
                ("grpc.so_reuseport", 0),  # a second server on the port is to fail, not to share it
            ),
            maximum_concurrent_rpcs=config.server.max_concurrent_rpcs,
        )
        replicas = NoReplicas(store, config.server.instance) if links is None else Linked(links)
        changes = Submissions(store, replicas, admission)
        sow = SowService(store, hub, consumers, changes, readers, config.server.durability, metrics, sorts)
        admin = AdminService(
            store, clock, consumers, replicas, readers, metrics, instance=config.server.instance, version=__version__
        )
        snapshot = SnapshotService(store, exports, hub, consumers, readers, metrics)
        loading = Loading(store, clock, admission, readers)
        loads = LoadService(store, loading, readers, store_options(config).writer.limits, metrics)
        server.add_generic_rpc_handlers(
            (
                handlers(load_pb2.DESCRIPTOR.services_by_name["LoadService"], loads),
                handlers(sow_pb2.DESCRIPTOR.services_by_name["SowService"], sow),
                handlers(admin_pb2.DESCRIPTOR.services_by_name["AdminService"], admin),
                handlers(snapshot_pb2.DESCRIPTOR.services_by_name["SnapshotService"], snapshot),
            )
        )
        services = SERVICES
        if links is not None:
            services += (REPLICATION,)
            service = replication_pb2.DESCRIPTOR.services_by_name["ReplicationService"]
            server.add_generic_rpc_handlers((guarded_handlers(service, links.servicer),))
        healthy = health.aio.HealthServicer()
        of_health = health_pb2.DESCRIPTOR.services_by_name["Health"]
        of_reflection = descriptor_pool.Default().FindServiceByName(reflection.SERVICE_NAME)
        reflecting = reflection.aio.ReflectionServicer((*services, of_health.full_name, of_reflection.full_name))
        server.add_generic_rpc_handlers(
            (
                guarded_handlers(of_health, healthy),  # type: ignore[arg-type]  # the stubs name another base
                guarded_handlers(of_reflection, reflecting),
            )
        )
        address = _bind(server, config)
        _serve_metrics(config.metrics.listen, metrics)
        await server.start()
        timers.start()
        loading.start()
        watches = [asyncio.create_task(_watch_failure(store, healthy, services))]
        if links is not None:
            await links.start()
            watches.append(asyncio.create_task(_watch_links(links, metrics)))
        await _set_health(healthy, services, serving=True)
        _tune_gc()
        for topic in list(store.topics.by_id.values()):
            for warning in policies.warnings(topic.settings):
                log.warning("settings_questionable", topic=topic.name, warning=warning)
        log.info("ready", address=address, instance=config.server.instance, data_dir=str(config.server.data_dir))
        if not store.verified_at_start:
            readers.submit(store.scrub, lambda: _pace(stopped))

        await stopping.wait()

        log.info("stopping")
        stopped.set()
        for watch in watches:
            watch.cancel()
        await healthy.enter_graceful_shutdown()
        idle.stop()
        hub.stop()
        exports.stop()
        if links is not None:
            await links.stop()
        await server.stop(config.server.stop_grace_micros / MICROS)
        await loading.stop()
        timers.stop()
    finally:
        metrics.release()
        stopped.set()
        readers.shutdown(wait=True)
        # Draining waits for the writer's thread, whose answers go through this loop: so not on it.
        await loop.run_in_executor(None, store.close)
    log.info("stopped")
    return 0


def _link(store: Store, clock: GuardedClock, config: Config, readers: Executor) -> Replication:
    """The links with other instances. Raises StartError."""
    try:
        return link(PeerStore(store, clock, name=config.server.instance), config, readers)
    except OSError as error:
        raise StartError(f"[[replication.peers]]: {error.filename}: {error.strerror}") from error


def declare_topics(store: Store, declared: Mapping[str, Declared]) -> None:
    """Makes the topics of the configuration file what it says; the ones that have left it stay, as an
    administrator's (rule K1). Raises StartError."""

    def finish(name: str, start: Callable[[Callable[[Topic | StoreError], None]], None]) -> None:
        results: list[Topic | StoreError] = []
        start(results.append)
        store.writer.step()
        if isinstance(results[0], StoreError):
            raise StartError(f"[topics.{name}]: {results[0].message}")

    for name, settings in declared.items():
        found = store.topics.by_name.get(name)
        if found is None:
            finish(name, partial(store.create_topic, name, settings, in_config=True))
        elif found.declared != settings or not found.in_config:
            finish(name, partial(store.alter_topic, name, _replaced_by(settings), in_config=True))
    for name, topic in store.topics.by_name.items():
        if topic.in_config and name not in declared:
            finish(name, partial(store.release_topic, name))


def _replaced_by(settings: Declared) -> Callable[[Declared], Declared]:
    return lambda _: settings


def _bind(server: grpc.aio.Server, config: Config) -> str:
    """Opens the port; returns the address with the port that was given out. Raises StartError."""
    listen = config.server.listen
    try:
        if config.tls is None:
            port = server.add_insecure_port(listen)
        else:
            port = server.add_secure_port(listen, _credentials(config.tls))
    except RuntimeError as error:
        raise StartError(f"cannot listen on {listen}: is the port taken, the address this machine's?") from error
    if port == 0:
        raise StartError(f"cannot listen on {listen}: is the port taken, the address this machine's?")
    return f"{listen.rpartition(':')[0]}:{port}"


def _serve_metrics(listen: str, metrics: Metrics) -> None:
    try:
        serve_metrics(listen, metrics)
    except ListenError as error:
        raise StartError(str(error)) from error


def _credentials(tls: TlsConfig) -> grpc.ServerCredentials:
    try:
        pair = (tls.key.read_bytes(), tls.certificate.read_bytes())
        client_ca = None if tls.client_ca is None else tls.client_ca.read_bytes()
    except OSError as error:
        raise StartError(f"[server.tls]: {error.filename}: {error.strerror}") from error
    return grpc.ssl_server_credentials([pair], root_certificates=client_ca, require_client_auth=client_ca is not None)


async def _set_health(healthy: health.aio.HealthServicer, services: Sequence[str], *, serving: bool) -> None:
    status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
    for service in ("", *services):
        await healthy.set(service, status)


async def _watch_failure(store: Store, healthy: health.aio.HealthServicer, services: Sequence[str]) -> None:
    """A store that has stopped writing is not healthy, though its reads go on (rule X3)."""
    while store.writer.failure is None:  # noqa: ASYNC110  # set on the writer's thread, and a fifth of a second is soon
        await asyncio.sleep(0.2)
    await _set_health(healthy, services, serving=False)


async def _watch_links(links: Replication, metrics: Metrics) -> None:
    """Links belong to the event loop, and scrapes come on threads of their own."""
    while True:
        metrics.links_are(links.status())
        await asyncio.sleep(LINKS_SECONDS)


def _pace(stopped: threading.Event) -> bool:
    """Leaves the scrub a fraction of a core; False once the server stops."""
    time.sleep(0.005)
    return not stopped.is_set()


def _tune_gc() -> None:
    """What is there now lives as long as the process; what comes is mostly short-lived and without cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)
