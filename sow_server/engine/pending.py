"""One answer of the writer, as the caller has it who asked for a change.

[1]  It is answered once, on the thread that owns the answers (`Writer.start`), or, without the writer's thread, in the
     one that drives the writer. Its listeners are called in that turn, in their order.
[2]  Whoever listens later is called at once, and none is called twice, whatever threads they are on.
[3]  Nobody has to listen: a change is committed all the same. Cancelling an awaiter cancels no change, and an answer
     that nobody takes is no fault.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, Generic, TypeVar

from sow_server.engine.values.errors import StoreError

T = TypeVar("T")
U = TypeVar("U")


class Unanswered(enum.Enum):
    """The answer of a change that the writer has not come to."""

    YET = "yet"


class Pending(Generic[T]):
    """`await` it for the answer, or for the StoreError that refused the change. `then` is for those who must hear of
    both in the turn of the answer, before anybody else has one."""

    __slots__ = ("_listeners", "answer")

    def __init__(self) -> None:
        self.answer: T | StoreError | Unanswered = Unanswered.YET
        self._listeners: list[Callable[[T | StoreError], object]] = []

    def __await__(self) -> Generator[Any, None, T]:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        answer = self.answer
        if isinstance(answer, Unanswered):  # for sure: awaiters are on the thread of the answers
            self._listeners.append(partial(_wake, future))
        else:
            _wake(future, answer)
        return future.__await__()

    def then(self, listener: Callable[[T | StoreError], object]) -> None:
        """`listener` hears the answer, or the StoreError that refused the change."""
        self._listeners.append(listener)
        if not isinstance(self.answer, Unanswered):
            self.settle(self.answer)

    def map(self, change: Callable[[T], U]) -> Pending[U]:
        """The answer that `change` makes of this one, in its turn. A refusal stays as it is, and a StoreError that
        `change` raises is one."""
        mapped: Pending[U] = Pending()

        def answered(answer: T | StoreError) -> None:
            if isinstance(answer, StoreError):
                mapped.settle(answer)
                return
            try:
                changed = change(answer)
            except StoreError as error:
                mapped.settle(error)
            else:
                mapped.settle(changed)

        self.then(answered)
        return mapped

    def settle(self, answer: T | StoreError) -> None:
        """Answers; for the writer, and for those who make one answer of several."""
        self.answer = answer  # first: a listener that comes now, on another thread, finds it ([2])
        listeners = self._listeners
        while listeners:
            try:
                listener = listeners.pop(0)
            except IndexError:  # the other thread was faster
                return
            listener(answer)


def answered(answer: T | StoreError) -> Pending[T]:
    """The answer of a change that there was no need for, or that was refused at once."""
    pending: Pending[T] = Pending()
    pending.settle(answer)
    return pending


def _wake(future: asyncio.Future[T], answer: T | StoreError) -> None:
    if future.done():  # its awaiter was cancelled ([3])
        return
    if isinstance(answer, StoreError):
        future.set_exception(answer)
    else:
        future.set_result(answer)
