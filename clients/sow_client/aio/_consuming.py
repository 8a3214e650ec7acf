"""Consuming durable subscriptions, as `_durable` says it."""

from __future__ import annotations

import contextlib
import random
import time
import weakref
from collections.abc import Awaitable
from types import TracebackType
from typing import Protocol

from sow.v1 import sow_pb2
from sow_client import _durable, _statuses
from sow_client._aio_subscription import AioOpenSubscription, AsyncSubscription
from sow_client._arguments import refused_by_name
from sow_client._durable import Acknowledgements, DurableCore, aio_dropped
from sow_client._records import Change
from sow_client._reports import Gap
from sow_client._workers import AioCondition, AioGuard, AioWorker
from sow_client.errors import SowError


class AioCallAcknowledge(Protocol):
    """A client's call of Acknowledge."""

    def __call__(self, request: sow_pb2.AcknowledgeRequest, /) -> Awaitable[object]: ...


class AioAcknowledger:
    """Sends acknowledgements beside the program, from the first one on."""

    def __init__(self, acknowledgements: Acknowledgements, call: AioCallAcknowledge) -> None:
        self._acknowledgements = acknowledgements
        self._call = call
        self._lock = acknowledgements.lock = AioGuard()  # of the fields below, too
        self._changed = AioCondition(self._lock)
        self._worker = AioWorker("sow-acknowledge")
        acknowledgements.hears = weakref.WeakMethod(self._attached)
        self._over = False
        self._hurried = False
        self._idle = False

    def add(self, bookmark: str) -> None:
        """Sends it soon. Raises a failure of an earlier one."""
        with self._lock:
            if self._over:
                raise _statuses.closed("durable subscription")
            self._worker.start(self._run)
            if self._acknowledgements.add(bookmark) and self._idle:
                self._changed.notify_all()

    async def flush(self, seconds: float | None = None) -> None:
        """Returns once everything is acknowledged, or after `seconds`. Raises a failure."""
        acknowledgements = self._acknowledgements
        with self._lock:
            self._hurried = True
            self._changed.notify_all()
            try:
                await self._changed.wait_for(
                    lambda: acknowledgements.is_settled or acknowledgements.has_failed or self._over, seconds
                )
            finally:
                self._hurried = False
            acknowledgements.raise_failure()

    def stop(self) -> bool:
        """Ends sending. False: it has ended before."""
        with self._lock:
            was_over, self._over = self._over, True
            self._changed.notify_all()
        self._worker.end()
        return not was_over

    def _attached(self) -> None:
        """Whoever calls it holds the lock."""
        if not self._over and self._acknowledgements.wait(time.monotonic(), hurried=False) is not None:
            self._worker.start(self._run)
            self._changed.notify_all()

    async def _run(self) -> None:
        acknowledgements = self._acknowledgements
        while True:
            with self._lock:
                while (wait := acknowledgements.wait(time.monotonic(), hurried=self._hurried)) != 0.0:
                    if self._over or (wait is None and self._worker.pause()):
                        return
                    self._idle = wait is None
                    await self._changed.wait(wait)
                if self._over:
                    return
                self._idle = False
                request = acknowledgements.take(time.monotonic())
            error: SowError | None = None
            try:
                await self._call(request)
            except SowError as refused:
                error = refused
            except Exception as unexpected:  # noqa: BLE001 - the program must get it
                error = _statuses.error_of_status(unexpected)
            with self._lock:
                if error is None:
                    acknowledgements.done(request)
                else:
                    acknowledgements.failed(request, error, now=time.monotonic(), jitter=random.random())
                self._changed.notify_all()


@refused_by_name
class AsyncDurableSubscription(AsyncSubscription):
    """The consumer of a durable subscription: an iterator of changes without an end, used by one task.

    Made by `AsyncClient.durable`. The server keeps the position: acknowledged changes do not come again, and the next
    consumer of that name gets all others. When the connection breaks, the consumer calls again and continues at its
    position. Iterating raises Aborted when another consumer takes over (DURABLE_TAKEN_OVER), or when the durable is
    rewound, deleted or cleared by force (DURABLE_DETACHED). The end of an `async with` block, or `close`, sends the
    acknowledgements that wait and ends the call.

    Rule: J2.
    """

    def __init__(
        self,
        core: DurableCore,
        open_call: AioOpenSubscription,
        acknowledgements: Acknowledgements,
        call_acknowledge: AioCallAcknowledge,
    ) -> None:
        super().__init__(core, open_call)
        self._durable = core
        self._acknowledgements = acknowledgements
        self._call_acknowledge = call_acknowledge
        self._acknowledger = AioAcknowledger(acknowledgements, call_acknowledge)

    _what = "durable subscription"

    async def acknowledge(self, done: Change | str) -> None:
        """Acknowledges everything up to this change, or bookmark: it does not come again. From any task.

        Returns at once. The acknowledgement is sent in the background, and one covers all before it, so acknowledge
        each change when it is processed. A change without a bookmark, in a snapshot or inside an atomic request, is
        acknowledged with the next change that has one. Raises the error of an earlier one that failed for good.
        """
        self._check_process()
        bookmark = done.bookmark if isinstance(done, Change) else done
        if bookmark is not None:
            self._acknowledger.add(bookmark)

    async def flush(self) -> None:
        """Returns once the server has all acknowledgements; raises why it has not. After a lost connection they are
        sent once the iteration has connected again."""
        self._check_process()
        await self._acknowledger.flush()
        self._acknowledgements.raise_held()

    @property
    def created(self) -> bool:
        """True: the durable subscription did not exist, and began with this consumer."""
        return self._durable.created

    @property
    def reset(self) -> bool:
        """True: it existed before, was removed, and began anew; changes may have been missed. Rule: J10."""
        return self._durable.reset

    @property
    def gap(self) -> Gap | None:
        """The last gap; None: nothing is missing so far."""
        return self._durable.gap

    async def close(self) -> None:
        """Sends the acknowledgements that wait, for 5 seconds at most, and ends the call. Another consumer can attach
        at once. A task that waits for the next change finds the iteration ended. Raises the error of a failed
        acknowledgement."""
        await self._end(_durable.CLOSE_SECONDS_MAX)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.close()
            return
        with contextlib.suppress(SowError):  # the error that ended the block is the one to raise
            await self._end(_durable.INTERRUPTED_SECONDS_MAX)

    def __del__(self) -> None:
        if not self._is_parents and hasattr(self, "_acknowledger"):  # else it was never made
            aio_dropped(self._acknowledger.stop)
            super().__del__()

    async def _end(self, seconds: float) -> None:
        self._check_process()
        try:
            await self._acknowledger.flush(seconds)
        finally:
            is_attached = self._acknowledger.stop() and self._durable.is_attached
            await super().close()
            if is_attached:
                with contextlib.suppress(SowError):  # the end of the stream says the same, a little later
                    await self._call_acknowledge(self._acknowledgements.leaving())
