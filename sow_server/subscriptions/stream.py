"""Drives subscriptions on the event loop: sends frames, runs reads on reader threads, waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor, Future
from contextlib import aclosing
from typing import Any, Protocol

import structlog

from sow_server.engine.values.clock import boot_micros
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import MICROS
from sow_server.subscriptions.frames import Frame
from sow_server.subscriptions.subscription import Read, Send, Step

log = structlog.get_logger(__name__)


class Machine(Protocol):
    """One side of a subscription: a subscriber, the consumer of a durable, or a part of a live result."""

    wake: Callable[[], None]
    """Set here."""

    def step(self) -> Step:
        """The next step. Raises StoreError at the end."""

    def took(self, result: Any) -> None:  # each machine takes what its own reads return
        """Takes the result of a `Read`."""

    def close(self) -> None:
        """Releases everything. No `Read` of it may be running."""


async def stream(
    machine: Machine, readers: Executor, elapsed: Callable[[], int] = boot_micros
) -> AsyncGenerator[Frame, None]:
    """The frames of a machine, which is closed at the end. Raises StoreError."""
    loop = asyncio.get_running_loop()
    woken: asyncio.Future[None] | None = None
    reading: Future[Any] | None = None
    found: asyncio.Future[Any] | None = None
    """The same on the event loop."""
    timer: asyncio.TimerHandle | None = None
    rings_micros = 0
    """When the timer rings. It may be early: most waits end with a change, and each would need another timer."""

    def wake() -> None:
        if woken is not None and not woken.done():
            woken.set_result(None)

    def ring() -> None:
        nonlocal timer
        timer = None
        if woken is not None and not woken.done():
            woken.set_result(None)

    machine.wake = wake
    try:
        while True:
            step = machine.step()
            if isinstance(step, Send):
                yield step.frame
            elif isinstance(step, Read):
                reading = readers.submit(step.run)
                found = asyncio.wrap_future(reading)
                machine.took(await asyncio.shield(found))
            else:
                # Nothing else ran on this thread since `step`, so no wake-up is missed.
                woken = loop.create_future()
                # The loop's clock stands while the machine is suspended: a timer that is late is as good as none.
                if timer is None or step.until_micros < rings_micros or rings_micros < elapsed():
                    if timer is not None:
                        timer.cancel()
                    rings_micros = step.until_micros
                    timer = loop.call_later(max(0, rings_micros - elapsed()) / MICROS, ring)
                await woken
    finally:
        if timer is not None:
            timer.cancel()
        if reading is None or reading.done() or reading.cancel():
            machine.close()
        else:
            # A cursor must not be closed while a reader uses it. Nobody listens to an error of the read.
            assert found is not None, "it is waited for"
            found.add_done_callback(_ignore_error)
            reading.add_done_callback(lambda done: loop.call_soon_threadsafe(machine.close))


class Background:
    """Drives machines of the server itself, each in a task."""

    def __init__(self, readers: Executor) -> None:
        self._readers = readers
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(
        self, machine: Machine, hear: Callable[[Frame], None], ended: Callable[[StoreError], None]
    ) -> Callable[[], object]:
        """Begins. `hear` gets the frames, `ended` the error at the end. The result ends it without `ended`."""
        begun = False

        async def run() -> None:
            nonlocal begun
            begun = True
            try:
                async with aclosing(stream(machine, self._readers)) as frames:
                    async for frame in frames:
                        hear(frame)
            except StoreError as error:
                ended(error)
            except Exception:
                log.exception("live_result_failed")
                ended(StoreError(Reason.INTERNAL, "an unexpected fault; the server's log has the details"))

        def over(done: asyncio.Task[None]) -> None:
            self._tasks.discard(done)
            if not begun:
                machine.close()

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(over)
        return task.cancel


def _ignore_error(done: asyncio.Future[Any]) -> None:
    if not done.cancelled():
        done.exception()  # else it would be logged as one that nobody has looked at
