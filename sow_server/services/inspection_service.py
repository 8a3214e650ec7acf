"""The part of `sow.v1.AdminService` that looks at a running server: its state, what falls due, who follows what,
figures, the configuration, the log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from sow.contract import CONTRACT
from sow.v1 import admin_pb2
from sow_server.access.caller import Call
from sow_server.cells import Cells
from sow_server.config import Setting
from sow_server.engine.doors import Reads, Writes
from sow_server.engine.values.model import MICROS
from sow_server.services import horizons
from sow_server.services.figure_history import KEPT_MICROS, FigureHistory
from sow_server.services.figures import Figures
from sow_server.services.followers import Followers
from sow_server.services.health_service import HealthService
from sow_server.services.log_tail import LEVELS, LINES_MAX, Line, LogTail
from sow_server.services.wire.convert import invalid, timestamp

INTERVAL_MICROS: Final = MICROS
INTERVAL_MICROS_MIN: Final = MICROS // 10
INTERVAL_MICROS_MAX: Final = 3_600 * MICROS
TOPICS: Final = 100
TOPICS_MAX: Final = 1_000
LINES: Final = 100
LOG_SECONDS: Final = 0.25
"""Between two looks for new lines: lines come from any thread, and few enough that nobody needs a wake-up for each."""


@dataclass(frozen=True, slots=True)
class ThisServer:
    """Sources of what a server tells about itself, beside its store."""

    instance: str
    version: str
    healthy: HealthService
    figures: FigureHistory
    cluster: str = ""
    settings: Sequence[Setting] = ()
    """Those that the server runs with."""
    tail: LogTail = field(default_factory=LogTail)
    cells: Cells | None = None
    """None: this server has no placement."""


class InspectionService:
    """Validates, asks, translates. Owns the time when the server became ready."""

    def __init__(
        self,
        reading: Reads,
        writes: Writes,
        followers: Followers,
        readers: Executor,
        server: ThisServer,
    ) -> None:
        self._reading = reading
        self._commits = writes.commits
        self._upkeep = writes.upkeep
        self._followers = followers
        self._readers = readers
        self._server = server
        self._healthy = server.healthy
        self._clock = reading.clock
        self._ready_micros = reading.clock.now_micros()

    async def GetExpiryHorizon(
        self, request: admin_pb2.GetExpiryHorizonRequest, call: Call
    ) -> admin_pb2.GetExpiryHorizonResponse:
        edges = horizons.edges_of(request)
        if request.topic:
            call.require(request.topic, all_rows=True)
            topics = [call.topic(request.topic).topic]
        else:
            parts = [(topic, call.part_of(topic)) for topic in call.topics()]
            topics = [topic for topic, part in parts if part is not None and part.rows is None]
        return await horizons.counted(self._reading.cuts, self._readers, topics, edges, exact=request.exact)

    async def GetStatus(self, request: admin_pb2.GetStatusRequest, call: Call) -> admin_pb2.GetStatusResponse:
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._status)

    def _status(self) -> admin_pb2.GetStatusResponse:
        reading, failure = self._reading, self._commits.failure
        counts = reading.cuts.counts()
        disk = self._upkeep.disk()
        return admin_pb2.GetStatusResponse(
            instance=self._server.instance,
            instance_id=reading.instance.id,
            journal_epoch=reading.instance.epoch,
            server_version=self._server.version,
            state="serving" if failure is None else "failed",
            failure="" if failure is None else f"{failure.reason.name}: {failure.message}",
            ready_time=timestamp(self._ready_micros),
            clock_time=timestamp(self._clock.now_micros()),
            sweep_paused=self._clock.paused,
            last_sequence=self._commits.last_sequence,
            live_records=sum(one.live for one in counts.values()),
            overdue_records=sum(one.overdue for one in counts.values()),
            topics=len(counts),
            disk_bytes=self._upkeep.disk_bytes(),
            disk_free_bytes=disk.free,
            disk_size_bytes=disk.size,
        )

    async def DescribeInstance(
        self, request: admin_pb2.DescribeInstanceRequest, call: Call
    ) -> AsyncGenerator[admin_pb2.DescribeInstanceResponse, None]:
        told: bool | None = None
        while True:
            # A failed commit shows at once: health follows up to a fifth of a second later.
            serving = self._healthy.serving and self._commits.failure is None
            if serving != told:
                told = serving
                yield admin_pb2.DescribeInstanceResponse(
                    name=self._server.instance,
                    id=self._reading.instance.id,
                    journal_epoch=self._reading.instance.epoch,
                    cluster=self._server.cluster,
                    serving=serving,
                    server_version=self._server.version,
                    contract=CONTRACT,
                )
                if not request.watch:
                    return
            elif self._healthy.is_stopping:
                return  # a call that goes on would delay the stop
            else:
                await self._healthy.changed()

    async def GetConfig(self, request: admin_pb2.GetConfigRequest, call: Call) -> admin_pb2.GetConfigResponse:
        return admin_pb2.GetConfigResponse(
            settings=[admin_pb2.ConfigSetting(**setting._asdict()) for setting in self._server.settings]
        )

    async def ListSubscriptions(
        self, request: admin_pb2.ListSubscriptionsRequest, call: Call
    ) -> admin_pb2.ListSubscriptionsResponse:
        if request.topic:
            call.cells.check(request.topic)
        instance = self._reading.instance
        return admin_pb2.ListSubscriptionsResponse(
            subscriptions=[follower.described(instance) for follower in self._followers.of(request.topic)],
            head_bookmark=instance.bookmark(self._commits.last_sequence),
        )

    async def EndSubscription(
        self, request: admin_pb2.EndSubscriptionRequest, call: Call
    ) -> admin_pb2.EndSubscriptionResponse:
        ended = self._followers.end(request.id)
        call.notes.update(subscription=ended.id, ended_identity=ended.call.owner)
        return admin_pb2.EndSubscriptionResponse()

    async def WatchFigures(
        self, request: admin_pb2.WatchFiguresRequest, call: Call
    ) -> AsyncGenerator[admin_pb2.WatchFiguresResponse, None]:
        interval = request.interval_micros or INTERVAL_MICROS
        if not INTERVAL_MICROS_MIN <= interval <= INTERVAL_MICROS_MAX:
            raise invalid("interval_micros", "must be between 100 ms and 1 h, or 0 for 1 s")
        if request.topics_max > TOPICS_MAX:
            raise invalid("topics_max", f"must be at most {TOPICS_MAX}, or 0 for {TOPICS}")
        if not 0 <= request.history_micros <= KEPT_MICROS:
            raise invalid("history_micros", "must be between 0 and 1 h")
        topics_max = request.topics_max or TOPICS
        if request.history_micros:
            for past in self._server.figures.since(request.history_micros, call.topics(), topics_max):
                yield past
        figures = Figures(topics_max)
        while not self._healthy.is_stopping:  # a call that goes on would delay the stop
            yield await self._server.figures.now(figures, call.topics())
            await self._pause(interval / MICROS)

    async def WatchLog(
        self, request: admin_pb2.WatchLogRequest, call: Call
    ) -> AsyncGenerator[admin_pb2.WatchLogResponse, None]:
        if request.level and request.level not in LEVELS:
            raise invalid("level", f"must be one of {', '.join(LEVELS)}, or empty for all")
        if request.lines_max > LINES_MAX:
            raise invalid("lines_max", f"must be at most {LINES_MAX}, or 0 for {LINES}")
        tail = self._server.tail
        lines, number = tail.last(request.lines_max or LINES, request.level)
        yield admin_pb2.WatchLogResponse(lines=map(_log_line, lines))
        while request.follow and not self._healthy.is_stopping:
            await self._pause(LOG_SECONDS)
            lines, number, missed = tail.after(number, request.level)
            if lines or missed:
                yield admin_pb2.WatchLogResponse(lines=map(_log_line, lines), missed=missed)

    async def _pause(self, seconds: float) -> None:
        """Waits; a stop of the server ends it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self._healthy.is_stopping:
                    await self._healthy.changed()


def _log_line(line: Line) -> admin_pb2.LogLine:
    return admin_pb2.LogLine(
        time_micros=line.time_micros, level=line.level, event=line.event, logger=line.logger, fields=line.fields
    )
