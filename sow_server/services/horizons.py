"""The expiry horizon of `AdminService`: validates, counts on the reader threads, translates."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from concurrent.futures import Executor
from itertools import pairwise
from typing import Final

from sow.v1 import admin_pb2
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.reading import Cuts
from sow_server.engine.values.model import MICROS, TTL_MAX_MICROS
from sow_server.query.horizon import Horizon
from sow_server.services.records.answering import close_after, opened
from sow_server.services.wire.convert import invalid

EDGES_MAX: Final = 1_000
CELLS_MAX: Final = 1_000_000
"""The most counts of one answer: spans times topics."""
EDGES: Final = tuple(seconds * MICROS for seconds in (60, 600, 3_600, 21_600, 86_400, 604_800))


def edges_of(request: admin_pb2.GetExpiryHorizonRequest) -> Sequence[int]:
    """The ends of the spans. Raises StoreError."""
    edges = list(request.edge_micros)
    if len(edges) > EDGES_MAX:
        raise invalid("edge_micros", f"has {len(edges)} ends, and {EDGES_MAX} are allowed")
    if any(one >= other for one, other in pairwise([0, *edges])):
        raise invalid("edge_micros", "must rise, and be above 0")
    if edges and edges[-1] > TTL_MAX_MICROS:
        raise invalid("edge_micros", f"{edges[-1]} is beyond the longest lifetime, {TTL_MAX_MICROS}")
    return edges or EDGES


async def counted(
    cuts: Cuts, readers: Executor, topics: Collection[Topic], edges: Sequence[int], *, exact: bool
) -> admin_pb2.GetExpiryHorizonResponse:
    """The answer. Raises StoreError."""
    if len(edges) * len(topics) > CELLS_MAX:
        most = CELLS_MAX // len(topics)
        raise invalid("edge_micros", f"has {len(edges)} ends, and {most} are allowed for {len(topics)} topics")
    loop = asyncio.get_running_loop()
    horizon = await opened(loop.run_in_executor(readers, lambda: Horizon(cuts, topics, edges, exact=exact)))
    piece: asyncio.Future[None] | None = None
    try:
        while not horizon.done:
            piece = loop.run_in_executor(readers, horizon.read)
            await asyncio.shield(piece)
    finally:
        close_after(horizon, piece)
    # Not on the event loop: a million counts take some ten milliseconds.
    return await loop.run_in_executor(readers, _answer, horizon, edges)


def _answer(horizon: Horizon, edges: Sequence[int]) -> admin_pb2.GetExpiryHorizonResponse:
    return admin_pb2.GetExpiryHorizonResponse(
        as_of_micros=horizon.now_micros,
        edge_micros=edges,
        topics=[
            admin_pb2.TopicHorizon(
                topic=one.topic.name,
                overdue=one.due[0],
                due=one.due[1:],
                next_micros=one.next_micros,
                incomplete=one.incomplete,
            )
            for one in sorted(horizon.counted.values(), key=lambda one: one.topic.name)
        ],
        upto_micros=horizon.upto_micros,
        exact_upto_micros=horizon.exact_upto_micros,
    )
