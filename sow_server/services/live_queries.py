"""Runs of queries for live results of groups (rule S12): where a query is asked, long ones in a reader process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Final

import structlog

from sow.v1 import sow_pb2
from sow_server.access.caller import Granted
from sow_server.engine.doors import Reads
from sow_server.engine.values.bookmarks import parse
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import MICROS
from sow_server.filters.aggregates import reads_now
from sow_server.query.sort_memory import SortMemory
from sow_server.services.records.answering import query_of
from sow_server.services.records.queries import Queries
from sow_server.services.wire import result_convert
from sow_server.subscriptions.live.groups import layout
from sow_server.subscriptions.results.aggregates import RESULTS_MAX, AskedAggregates, BeginRun, Run, too_large

AGGREGATES_CONFLATION_MICROS: Final = MICROS

log = structlog.get_logger(__name__)


class LiveQueries:
    """Owns the runs that are under way."""

    def __init__(self, queries: Queries, sorts: SortMemory, bytes_max: int) -> None:
        """`sorts`: the memory that ordered queries share. `bytes_max`: of one result."""
        self.sorts: Final = sorts
        self._queries = queries
        self._bytes_max = bytes_max
        self._tasks: set[asyncio.Task[None]] = set()

    def of(self, granted: Granted, request: sow_pb2.QueryRequest) -> BeginRun:
        """Runs of one query. Who asks it, and which part it may see, was decided when the result was asked for."""

        def begin(done: Callable[[Run | StoreError], None]) -> Callable[[], object]:
            async def run() -> None:
                try:
                    answer: Run | StoreError = await self._answered(granted, request)
                except StoreError as error:
                    answer = error
                except Exception:
                    log.exception("live_result_failed")
                    answer = StoreError(Reason.INTERNAL, "an unexpected fault; the server's log has the details")
                done(answer)

            task = asyncio.get_running_loop().create_task(run())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return task.cancel

        return begin

    async def _answered(self, granted: Granted, request: sow_pb2.QueryRequest) -> Run:
        sequence = size = 0
        keys: list[bytes] = []
        payloads: list[bytes] = []
        absent: list[str] = []
        async with aclosing(self._queries.answer(granted, request)) as messages:
            async for message in messages:
                response = sow_pb2.QueryResponse.FromString(message)
                match response.WhichOneof("response"):
                    case "header":
                        sequence = parse(response.header.bookmark).at.sequence
                    case "batch":
                        keys += [key.encode() for key in response.batch.key]
                        payloads += response.batch.payload
                        size += sum(map(len, response.batch.key)) + sum(map(len, response.batch.payload))
                        if size > self._bytes_max:  # not only at the end: it is held by nobody's leave
                            raise too_large(self._bytes_max)
                    case _:
                        absent = list(response.footer.absent_fields)
        return Run(sequence, keys, payloads, absent)


def asked_aggregates(
    message: sow_pb2.SubscribeRequest, reading: Reads, granted: Granted, runs: LiveQueries
) -> AskedAggregates:
    """The results of groups of a request that `check_result` has passed. Parsing and compiling may take milliseconds.
    Raises StoreError."""
    topic, restriction = granted
    query = sow_pb2.QueryRequest(
        topic=message.topic,
        filter=message.filter,
        group_by=message.group_by,
        aggregate=message.aggregate,
        having=message.having,
        order_by=message.order_by,
        skip_n=message.skip_n,
        top_n=message.top_n or RESULTS_MAX + 1,
    )
    for name, value in message.parameters.items():
        query.parameters[name].CopyFrom(value)
    query_of(topic, query, restriction)  # refuses what cannot be asked
    _check_now(message)
    fed = result_convert.feed(message, reading, granted)
    text = "" if fed.filter is None else fed.filter.text
    conflation = message.conflation_micros or AGGREGATES_CONFLATION_MICROS
    asked = query.SerializeToString(deterministic=True)
    shared = ("aggregates", topic.id, layout(topic), fed.name, text, asked, conflation)
    return AskedAggregates(shared, topic, fed.request, fed.name, conflation, runs.of(granted, query))


def _check_now(message: sow_pb2.SubscribeRequest) -> None:
    """Raises StoreError for an expression whose value changes with time: nobody would ask again."""
    texts = [
        (f"{name}[{at}]", one.expression)
        for name, each in (("group_by", message.group_by), ("aggregate", message.aggregate))
        for at, one in enumerate(each)
    ]
    found = [field for field, text in texts if reads_now(text)]
    if message.having and reads_now(message.having, condition=True):
        found.append("having")
    for field in found:
        told = f"{field}: NOW_MICROS() changes without any change of a record, so a live result cannot use it"
        raise StoreError(Reason.EXPRESSION_INVALID, told, field=field)
