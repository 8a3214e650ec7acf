"""Drives a subscription on the event loop: sends frames, runs reads on reader threads, waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor, Future
from typing import Any

from sow_server.engine.values.clock import boot_micros
from sow_server.engine.values.model import MICROS
from sow_server.subscriptions.durable.consumer import Consumer
from sow_server.subscriptions.frames import Frame
from sow_server.subscriptions.subscription import Read, Send, Subscription


async def stream(
    subscription: Subscription | Consumer, readers: Executor, elapsed: Callable[[], int] = boot_micros
) -> AsyncGenerator[Frame, None]:
    """The frames of a subscription or of a durable's consumer, which is closed at the end. Raises StoreError."""
    loop = asyncio.get_running_loop()
    woken: asyncio.Future[None] | None = None
    reading: Future[Any] | None = None
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

    subscription.wake = wake
    try:
        while True:
            step = subscription.step()
            if isinstance(step, Send):
                yield step.frame
            elif isinstance(step, Read):
                reading = readers.submit(step.run)
                subscription.took(await asyncio.shield(asyncio.wrap_future(reading)))
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
            subscription.close()
        else:
            # A cursor must not be closed while a reader uses it. An error of the read has been told, or nobody listens.
            reading.add_done_callback(lambda done: loop.call_soon_threadsafe(subscription.close))
