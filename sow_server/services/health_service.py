"""`grpc.health.v1.Health`: whether the server answers, for load balancers.

The library's own servicer forgets all watchers of a service with the first that leaves, and makes the server wait for a
watcher that does not read.

    [1]  A watcher hears the last status. It does not hear each one if several come before it has read.
    [2]  Nobody waits for a watcher.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Final, TypeAlias

import grpc
from grpc_health.v1 import health_pb2

Context = grpc.aio.ServicerContext[Any, Any]
Status: TypeAlias = int

SERVING: Final = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN: Final = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthService:
    """Owns the status of each service. Event loop only."""

    def __init__(self) -> None:
        self._statuses: dict[str, Status] = {}
        self.is_stopping = False
        """Nothing serves any more."""
        self._change = asyncio.Event()
        """Set, and replaced by another one, at the next change."""

    def set(self, service: str, *, serving: bool) -> None:
        """Sets the status of a service; "": of the server. During a stop nothing serves."""
        self._statuses[service] = SERVING if serving and not self.is_stopping else NOT_SERVING
        self._change.set()
        self._change = asyncio.Event()

    @property
    def serving(self) -> bool:
        """True if the server serves."""
        return self._statuses.get("") == SERVING

    async def changed(self) -> None:
        """Waits for the next change, of whatever service."""
        await self._change.wait()

    def stopping(self) -> None:
        """Nothing serves from now on."""
        self.is_stopping = True
        for service in self._statuses:
            self.set(service, serving=False)

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncGenerator[health_pb2.HealthCheckResponse, None]:
        told: Status | None = None
        while True:
            change, status = self._change, self._statuses.get(request.service, UNKNOWN)
            if status == told:
                await change.wait()
            else:
                told = status
                yield health_pb2.HealthCheckResponse(status=status)

    async def List(self, request: Any, context: Context) -> Any:
        """A method of later versions of the contract. The oldest version that is supported does not have it."""
        return health_pb2.HealthListResponse(  # type: ignore[attr-defined]  # as above
            statuses={
                service: health_pb2.HealthCheckResponse(status=status) for service, status in self._statuses.items()
            }
        )
