"""The part of `sow.v1.AdminService` for cells: the placement of topics, and its reload."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import closing
from typing import Final

from sow.v1 import admin_pb2
from sow_server.access.caller import Call
from sow_server.access.needs import Action
from sow_server.cells import NO_PLACEMENT, Cells, Reloaded
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.doors import Reads
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.placement import Places
from sow_server.prepared import SOURCES_MAX, TOPICS_MAX
from sow_server.services.wire import convert

TEXT_CHARACTERS_MAX: Final = 2_000_000
"""The bound of a placement file that comes with a call: 10,000 patterns of 200 characters."""


class PlacementService:
    """Asks the cells, translates; owns nothing."""

    def __init__(self, reading: Reads, cells: Cells | None, readers: Executor) -> None:
        """`cells` None: this server has no placement."""
        self._reading = reading
        self._cells = cells
        self._readers = readers

    async def GetPlacement(self, request: admin_pb2.GetPlacementRequest, call: Call) -> admin_pb2.GetPlacementResponse:
        cells = self._cells
        if cells is None:
            return admin_pb2.GetPlacementResponse()
        places = cells.places
        placement = places.placement
        version, digest = cells.told
        response = admin_pb2.GetPlacementResponse(cell=places.cell, version=version, digest=digest)
        if not (call.unrestricted or call.owner):
            return response
        response.cells.extend(
            [admin_pb2.Cell(name=name, servers=servers) for name, servers in sorted(placement.cells.items())]
        )
        if request.topic and call.sees(request.topic):
            response.topic_cell = places.elsewhere(request.topic) or places.cell
        if not call.may(Action.OBSERVE):
            return response
        if call.may(Action.OPERATOR):
            response.text = placement.text
        response.default_cell = placement.default
        response.topics.extend(
            [admin_pb2.PlacedTopics(pattern=placed.pattern, cell=placed.cell) for placed in placement.topics]
        )
        if (waiting := cells.prepared) is not None:
            response.prepared.CopyFrom(
                admin_pb2.PreparedPlacement(
                    version=waiting.placement.version,
                    digest=waiting.placement.digest,
                    since_micros=waiting.since_micros,
                    topics=sorted(waiting.leaves),
                    message=cells.waits_for,
                )
            )
        strays = call.topics(stray=True)
        topic = call.existing(request.topic)
        run = asyncio.get_running_loop().run_in_executor
        response.strays.extend(await run(self._readers, self._described, places, strays))
        if topic is not None:
            (copy,) = await run(self._readers, self._described, places, [topic])
            response.copy.CopyFrom(copy)
        response.problems.extend(
            [
                admin_pb2.CellProblem(
                    cell=problem.cell,
                    kind=admin_pb2.CellProblem.Kind.ValueType(problem.kind.value),
                    since_micros=problem.since_micros,
                    message=problem.message,
                )
                for problem in cells.problems.values()
            ]
        )
        return response

    def _described(self, places: Places, strays: Sequence[Topic]) -> list[admin_pb2.Stray]:
        counts = self._reading.cuts.counts(strays)
        found: list[admin_pb2.Stray] = []
        with closing(self._reading.cuts.journal()) as journal:
            for topic in strays:
                last = topic.statistics.last_sequence
                commit = journal.commit_before(last) if last else None
                found.append(
                    admin_pb2.Stray(
                        topic=topic.name,
                        cell=places.elsewhere(topic.name) or places.cell,
                        records=counts[topic.id].live if topic.id in counts else 0,
                        last_change_micros=0 if commit is None else commit.commit_time_micros,
                    )
                )
        return found

    async def ReloadPlacement(
        self, request: admin_pb2.ReloadPlacementRequest, call: Call
    ) -> admin_pb2.ReloadPlacementResponse:
        cells = self._cells
        if cells is None:
            raise StoreError(Reason.INVALID_ARGUMENT, NO_PLACEMENT)
        reloaded = await self._placed(cells, request, call)
        call.notes.update(version=reloaded.version, ended_calls=reloaded.ended_calls)
        return admin_pb2.ReloadPlacementResponse(
            version=reloaded.version,
            digest=reloaded.digest,
            changed=reloaded.changed,
            ended_calls=reloaded.ended_calls,
            prepared=reloaded.prepared,
        )

    async def _placed(self, cells: Cells, request: admin_pb2.ReloadPlacementRequest, call: Call) -> Reloaded:
        text = request.placement
        if request.drop_prepared:
            if text or request.HasField("prepare"):
                raise convert.invalid("drop_prepared", "goes with neither placement nor prepare")
            call.notes.update(drops=True)
            return await cells.drop_prepared()
        if len(text) > TEXT_CHARACTERS_MAX:
            raise convert.invalid("placement", f"{len(text)} characters are more than {TEXT_CHARACTERS_MAX}")
        if not request.HasField("prepare"):
            return await cells.reload(text)
        topics, sources = request.prepare.topics, request.prepare.sources
        if not text:
            raise convert.invalid("prepare", "needs placement, the text to be prepared")
        if not 1 <= len(topics) <= TOPICS_MAX:
            raise convert.invalid("prepare.topics", f"{len(topics)} are not 1 to {TOPICS_MAX}")
        if len(sources) > SOURCES_MAX:
            raise convert.invalid("prepare.sources", f"{len(sources)} are more than {SOURCES_MAX}")
        call.notes.update(prepares=" ".join(topics))
        return await cells.prepare(text, topics, sources, self._reading.clock.now_micros())
