"""The asynchronous client: the calls of `Client`, with `await` and `async for`, on the running event loop.

This package is the source of both clients: clients/generate_blocking.py makes `sow_client.blocking` from its modules.

    [1]  Every error is a SowError with gRPC's error as its cause, or a mistake of the calling program.
    [2]  A publish that is repeated, by gRPC or by a publisher, is applied once (rule P6).
"""

from __future__ import annotations

from sow_client._arguments import refused_by_name
from sow_client.aio._following import AsyncFollowing
from sow_client.aio._inspecting import AsyncInspecting
from sow_client.aio._leasing import AsyncLeasing
from sow_client.aio._loading import AsyncLoading
from sow_client.aio._querying_sql import AsyncSql
from sow_client.aio._snapshots import AsyncSnapshots


@refused_by_name
class AsyncClient(AsyncLeasing, AsyncSql, AsyncSnapshots, AsyncFollowing, AsyncLoading, AsyncInspecting):
    """A connection to a sow server. It connects at the first call, and again by itself after a break.

    It may be made before its event loop runs: it belongs to the loop that makes its first call. All tasks of that loop
    may use it; a publisher, a query result and a subscription belong to one task. It raises SowError and its
    subclasses.
    """
