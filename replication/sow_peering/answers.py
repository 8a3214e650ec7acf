"""Answers that come later: of a writer, or of peers.

[1]  An answer is given once, on the thread that owns the answers. Its listeners are called in that turn, in their
     order.
[2]  Whoever listens later is called at once, and none is called twice, whatever threads they are on.
[3]  Nobody has to listen. Cancelling an awaiter cancels nothing else, and an answer that nobody takes is no fault.
[4]  Where a listener raises, the others hear the answer all the same. Then whoever answered gets the error.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")
E = TypeVar("E", bound=Exception)


class Unanswered(enum.Enum):
    """The value of an answer that has not come."""

    YET = "yet"


class Answer(Generic[T, E]):
    """A `T`, or the `E` that refuses it. `await` it where there is a loop; a machine without one calls `then`."""

    __slots__ = ("_listeners", "given")

    def __init__(self) -> None:
        self.given: T | E | Unanswered = Unanswered.YET
        self._listeners: list[Callable[[T | E], object]] = []

    def __await__(self) -> Generator[Any, None, T]:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        given = self.given
        if isinstance(given, Unanswered):  # for sure: awaiters are on the thread of the answers
            self._listeners.append(partial(_wake, future))
        else:
            _wake(future, given)
        return future.__await__()

    def then(self, listener: Callable[[T | E], object]) -> None:
        """`listener` hears the answer, or the refusal."""
        self._listeners.append(listener)
        if not isinstance(self.given, Unanswered):
            self.settle(self.given)

    def settle(self, given: T | E) -> None:
        """Answers."""
        self.given = given  # first: a listener that comes now, on another thread, finds it ([2])
        listeners = self._listeners
        while listeners:
            try:
                listener = listeners.pop(0)
            except IndexError:  # the other thread was faster
                return
            try:
                listener(given)
            except BaseException:
                self.settle(given)  # the others do not wait for ever ([4])
                raise


def _wake(future: asyncio.Future[T], given: T | Exception) -> None:
    if future.done():  # its awaiter was cancelled ([3])
        return
    if isinstance(given, Exception):
        future.set_exception(given)
    else:
        future.set_result(given)
