"""The periodic jobs of a rig's store."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from sow_server.engine.commit.reclaim import RECLAIM_RECORDS
from sow_server.query.export_parts import Export
from sow_server.query.exports import Exports
from sow_server.query.sort_memory import SortMemory
from sow_server.retention.idle import IdleTopics
from sow_server.subscriptions.durable.consumer_registry import Consumers
from sow_server.subscriptions.hub import Hub
from sow_server.subscriptions.request import View
from sow_server.timers import JobOptions, Timers
from tests.support.stores.stores import MINUTE, SECOND, Rig


def hub_of(rig: Rig) -> Hub:
    """The hub of the rig's store."""
    return Hub(
        rig.store.reads,
        rig.store.writes,
        lambda run: run(),
    )


def consumers_of(rig: Rig, hub: Hub) -> Consumers:
    """The consumers of durables of the rig's store, of views without a filter."""
    return Consumers(
        rig.store.reads,
        rig.store.writes,
        hub,
        lambda text, part: lambda topic: View(),
    )


def timers(
    rig: Rig,
    readers: ThreadPoolExecutor,
    go_on: Callable[[], bool] = lambda: True,
    *,
    mark_interval_micros: int = SECOND,
    prune_interval_micros: int = MINUTE,
    reclaim_interval_micros: int = MINUTE,
    reclaim_records: int = RECLAIM_RECORDS,
    consumers: Consumers | None = None,
    sorts: SortMemory | None = None,
) -> Timers:
    """Timers of the rig's store; their scheduler is not started."""
    options = JobOptions(
        prune_interval_micros=prune_interval_micros,
        mark_interval_micros=mark_interval_micros,
        reclaim_interval_micros=reclaim_interval_micros,
        reclaim_records=reclaim_records,
        go_on=go_on,
    )
    return Timers(
        rig.store.reads,
        rig.store.writes,
        options,
        readers=readers,
        consumers=consumers or consumers_of(rig, hub_of(rig)),
        idle=IdleTopics(rig.store.reads, rig.store.writes),
        exports=Exports[Export](rig.store.reads),
        sorts=sorts or SortMemory(),
    )
