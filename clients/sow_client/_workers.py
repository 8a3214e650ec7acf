"""Threads and tasks: the parts in which they differ for classes of both clients.

Each part is a pair with one interface. The classes are in `aio`, and the generator puts the other one of each pair.

    [1]  A worker runs its function once, also if an interrupt has ended an earlier start.
    [2]  Tasks take turns only where they wait, so state that is changed between two waits needs no lock. Threads need
         one. The source of both clients takes it: for tasks it is a guard that does nothing.
    [3]  Calls that are made together all end before anything is raised, unless the caller itself is ended. One of them
         runs in the caller's own thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import nullcontext, suppress
from typing import Final, TypeVarTuple

from sow_client import _ends

_Arguments = TypeVarTuple("_Arguments")

TOGETHER_MAX: Final = 256
"""Threads of calls that are made together; further calls wait for one. There are as many as cells of a placement, so
cells that hang cost a list one timeout, and not one after the other."""

Lock = threading.Lock
AioLock = asyncio.Lock
"""A lock that is held over waits."""

Guard = threading.Lock
AioGuard = nullcontext[None]
"""A lock that is held between waits. `with` takes it and not its condition: where Ctrl-C comes in the method by which a
condition takes its lock, nobody gives it back."""

Condition = threading.Condition


class AioCondition:
    """`Condition` for tasks."""

    def __init__(self, _guard: AioGuard) -> None:
        self._notified = asyncio.Event()

    async def wait(self, seconds: float | None = None) -> None:
        """As a Condition's."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._notified.wait()

    async def wait_for(self, predicate: Callable[[], bool], seconds: float | None = None) -> None:
        """As a Condition's."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not predicate():
                    await self._notified.wait()

    def notify_all(self) -> None:
        """As a Condition's."""
        self._notified.set()
        self._notified = asyncio.Event()


Fault = BaseException
"""Ends no more than the function of a worker."""
AioFault = Exception
"""As `Fault`. What else there is ends tasks, or their loop."""


class Worker:
    """A thread that runs a function, from `start` on. A start that an interrupt has ended may be tried again ([1])."""

    def __init__(self, name: str, end: Callable[[], object] | None = None) -> None:
        """`end` ends the function soon, and returns at once. With it, the end of the process waits a little for the
        thread (_ends [4])."""
        self._name = name
        self._end = end
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self, run: Callable[[*_Arguments], None], *arguments: *_Arguments) -> None:
        """Begins, once."""
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    if self._end is None:
                        thread = threading.Thread(
                            target=self._run, name=self._name, daemon=True, args=(run, *arguments)
                        )
                    else:
                        thread = _ends.StreamThread(self._run, self._name, self._end, args=(run, *arguments))
                    thread.start()
                    self._thread = thread

    def _run(self, run: Callable[[*_Arguments], None], *arguments: *_Arguments) -> None:
        with self._lock:
            if self._thread is not threading.current_thread():
                return  # an interrupt has ended `start` before it was known
        run(*arguments)

    def pause(self) -> bool:
        """The function has no work for now. True: it has to return, and `start` begins again."""
        return False  # to wait costs less than to start a thread

    def end(self) -> None:
        """Ends the function soon."""
        if self._end is not None:
            self._end()

    def join(self, seconds: float | None = None) -> None:
        """Returns once the function has ended, or after `seconds`; at once in the thread itself."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)

    def drop(self, end: Callable[[], object]) -> None:
        """Ends the work, from a finalizer: it takes no lock."""
        _ends.hand_over(end)


class AioWorker:
    """`Worker` with a task."""

    def __init__(self, name: str, _end: Callable[[], object] | None = None) -> None:
        self._name = name
        self._task: asyncio.Task[None] | None = None

    def start(self, run: Callable[[*_Arguments], Coroutine[None, None, None]], *arguments: *_Arguments) -> None:
        """As `Worker.start`."""
        if self._task is None:
            self._task = asyncio.create_task(run(*arguments), name=self._name)

    def pause(self) -> bool:
        """As `Worker.pause`."""
        self._task = None  # nobody ends a task that waits when its owner was dropped
        return True

    def end(self) -> None:
        """As `Worker.end`."""
        if self._task is not None:
            self._task.cancel()

    async def join(self, seconds: float | None = None) -> None:
        """As `Worker.join`."""
        if self._task is not None and self._task is not asyncio.current_task():
            await asyncio.wait([self._task], timeout=seconds)

    def drop(self, _end: Callable[[], object]) -> None:
        """As `Worker.drop`."""
        # The garbage collector may run in any thread, and after the end of the loop, which also ends the task.
        if self._task is not None and not self._task.done():
            with suppress(RuntimeError):
                self._task.get_loop().call_soon_threadsafe(self._task.cancel)


def together(calls: Sequence[Callable[[], object]]) -> None:
    """Makes calls at the same time ([3]). Raises what the first of them, in their order, has raised."""
    faults: dict[int, Exception] = {}
    left = iter(range(len(calls)))

    def run() -> None:
        for number in left:
            try:
                calls[number]()
            except Exception as fault:  # noqa: BLE001 - the caller raises it
                faults[number] = fault

    threads = [
        threading.Thread(target=run, name="sow-together", daemon=True) for _ in range(min(len(calls), TOGETHER_MAX) - 1)
    ]
    for thread in threads:
        thread.start()
    run()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[min(faults)]


async def aio_together(calls: Sequence[Callable[[], Awaitable[object]]]) -> None:
    """As `together`."""
    if len(calls) == 1:
        await calls[0]()
        return
    for outcome in await asyncio.gather(*(call() for call in calls), return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
