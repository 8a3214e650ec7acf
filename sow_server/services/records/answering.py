"""The answer to one query, from its request to messages as bytes: the same in the server's process and in a reader
process.

    [1]  A piece of work is done ahead: while the records of one piece are sent, the next one is read.
    [2]  A piece that is under way is never given up: its thread uses a cursor. The scan is closed after it. A piece
         that waits for its turn does nothing once its caller has gone.
    [3]  An answer whose client does not read holds some 4 MiB: the message that is being sent, the one that was made
         ahead, and the records of its piece that did not fit into it, each of a megabyte or of one record (rule N5).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Executor
from typing import Final, Protocol, TypeVar

from sow.v1 import sow_pb2
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import MICROS
from sow_server.filters.restriction import Restriction
from sow_server.query.aggregating import aggregating
from sow_server.query.filtering import callers_filter
from sow_server.query.ordering import callers_order
from sow_server.query.projection import projection
from sow_server.query.scan import Query, Scan, point_keys
from sow_server.query.sort_memory import SortShare
from sow_server.services.wire import convert
from sow_server.services.wire.filter_values import filter_values

T = TypeVar("T")

SORT_PATIENCE_SECONDS: Final = 30.0
"""How long an ordered query waits for memory while nobody gives any back."""
SORT_LOOK_SECONDS: Final = 0.1
"""How often it has memory taken back from those who do not read."""


def query_of(topic: Topic, request: sow_pb2.QueryRequest, restriction: Restriction) -> Query:
    """The query of a request, within the part of the topic that its caller may see. Parsing and compiling may take
    milliseconds. Raises StoreError."""
    asked = None
    if request.group_by or request.aggregate or request.having:
        asked = aggregating(
            topic,
            [(each.name, each.expression) for each in request.group_by],
            [(each.name, each.expression) for each in request.aggregate],
            request.having,
            request.order_by,
            restriction,
        )
    # Where no payloads are returned, no field has to be left out of them.
    hidden = () if request.count_only or request.keys_only or asked is not None else restriction.hidden
    convert.check_key_parts(topic.settings.key, request.keys)
    return Query(
        topic,
        keys=point_keys(request.keys),
        projection=projection(topic, request.select.include, request.select.exclude, hidden),
        batch_size=request.batch_size or 1000,
        keys_only=request.keys_only,
        count_only=request.count_only,
        skip_n=request.skip_n,
        top_n=request.top_n,
        page_size=request.page_size,
        page_token=request.page_token,
        # With `now` 0: the scan takes the `now` of its cut.
        filter=callers_filter(topic, request.filter, restriction, given=filter_values(request.parameters)),
        order=None if asked is not None else callers_order(topic, request.order_by, restriction.hidden),
        aggregating=asked,
        explain=request.explain,
        plan_only=request.plan_only,
        with_plan=request.with_plan,
    )


class Closeable(Protocol):
    """Something that holds a cut."""

    def close(self) -> None:
        """Releases it."""


C = TypeVar("C", bound=Closeable)


class QueryAnswer:
    """Owns the scan of a query. Its steps run on one thread at a time."""

    def __init__(self, scan: Scan, *, restricted: bool) -> None:
        """`restricted`: the caller may see a part of the records only, so no figure counts the others (rule A4)."""
        self.scan: Final = scan
        self._restricted = restricted

    def close(self) -> None:
        """Releases the cut. `messages` does so itself, once it has begun."""
        self.scan.close()

    def step(self, origins: Sequence[str]) -> bytes | None:
        """Does a piece of work: the message with the records that it found, b"" if there are none, None at the end.
        `origins`: the names of the instances that wrote the records, by number. Raises StoreError."""
        batch = self.scan.step()
        if batch is None:
            return None
        if not batch.keys:
            return b""
        response, query = sow_pb2.QueryResponse(), self.scan.query
        settings = query.topic.settings if query.aggregating is None else convert.RESULTS
        convert.fill_columns(response.batch, origins, batch, settings)
        return response.SerializeToString()

    def footer(self) -> bytes:
        """The last message, after the last piece."""
        footer, aggregator = self.scan.footer(), self.scan.aggregator
        return sow_pb2.QueryResponse(
            footer=sow_pb2.QueryFooter(
                matched=footer.matched,
                returned=footer.returned,
                scanned=footer.matched if self._restricted else footer.scanned,
                next_page_token=footer.next_page_token,
                plan=convert.query_plan(self.scan) if self.scan.query.tells_plan else None,
                absent_fields=self.scan.absent_fields,
                groups=0 if aggregator is None else aggregator.groups,
                ungrouped=0 if aggregator is None else aggregator.ungrouped,
            )
        ).SerializeToString()

    async def messages(self, executor: Executor, origins: Callable[[], Sequence[str]]) -> AsyncGenerator[bytes, None]:
        """A message for each piece, b"" for one without records, and the footer [1]. It closes the scan [2]. Raises
        StoreError."""
        run = asyncio.get_running_loop().run_in_executor

        def step() -> bytes | None:
            return self.step(origins())

        ahead = run(executor, step)
        try:
            while (message := await asyncio.shield(ahead)) is not None:
                if (share := self.scan.waits_for) is not None:
                    await until_ready(share)
                ahead = run(executor, step)
                yield message
            yield self.footer()
        finally:
            self.scan.give_up()
            close_after(self.scan, ahead)


async def until_ready(share: SortShare) -> None:
    """Waits until there is room to sort in, and has memory taken back from those who do not read. Raises StoreError
    OVERLOADED when nobody has taken or given back any memory for a while."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    moves, moved = share.memory.moves, loop.time()
    while not share.when_ready(lambda: _set_soon(loop, ready)):
        share.memory.take_back()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ready.wait(), SORT_LOOK_SECONDS)
        if share.memory.moves != moves:
            moves, moved = share.memory.moves, loop.time()
        elif loop.time() - moved >= SORT_PATIENCE_SECONDS:
            raise StoreError(
                Reason.OVERLOADED,
                f"{share.field}: the memory to sort and group in is held by queries that do not end; try again later",
                field=share.field,
                retry_after_micros=MICROS,
            )
        ready.clear()


def _set_soon(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits
        loop.call_soon_threadsafe(event.set)


async def opened(opening: asyncio.Future[C]) -> C:
    """Waits for something that a thread opens, and closes it if its caller goes meanwhile."""

    def give_up(done: asyncio.Future[C]) -> None:
        if not done.cancelled() and done.exception() is None:
            done.result().close()

    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(give_up)
        raise


def close_after(held: Closeable, reading: asyncio.Future[T] | None) -> None:
    """Closes a scan or a cut once its last step has ended: a cursor must not be closed while a reader uses it."""

    def close(done: asyncio.Future[T]) -> None:
        if not done.cancelled():
            done.exception()  # its caller has got it, or has gone
        held.close()

    if reading is None:
        held.close()
    else:
        reading.add_done_callback(close)
