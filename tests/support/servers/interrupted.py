"""Ctrl-C at the n-th point of a run: the same point in each run, however fast the machine is.

CPython 3.11 looks for a signal when a function of Python begins and when a call of C has returned (and at the end of a
loop's turn). A profile function hears of both, so the exception comes where one of a signal may come, and nowhere else.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

Deed = Callable[[], object]


def interrupt() -> None:
    """As Ctrl-C: it reaches the handler that is installed."""
    signal.raise_signal(signal.SIGINT)


class Points:
    """Counts the points of the present thread, and does something at one of them. Its end is the end of the block."""

    def __init__(self, at: int, deed: Deed = interrupt, count: Callable[[int], object] | None = None) -> None:
        """`at`: the number of the point, from 1; 0: none. `count` hears of each, where nobody can look afterwards."""
        self._at = at
        self._deed = deed
        self._count = count
        self.passed = 0

    def begin(self) -> None:
        """Counts from here on."""
        sys.setprofile(self._look)

    def __enter__(self) -> Points:
        self.begin()
        return self

    def __exit__(self, *_error: object) -> None:
        sys.setprofile(None)

    def _look(self, frame: FrameType, event: str, _arg: Any) -> None:
        if event not in ("call", "c_return") or frame.f_globals is globals():
            return
        self.passed += 1
        if self._count is not None:
            self._count(self.passed)
        if self.passed == self._at:
            sys.setprofile(None)
            self._deed()


def points_of(run: Deed) -> int:
    """How many points a run has, without those of the end of its result."""
    with Points(0) as points:
        result = run()
    del result
    return points.passed


def spread(points: int, most: int) -> range:
    """The numbers of at most so many points, spread evenly, the first one among them."""
    return range(1, points + 1, max(1, -(-points // most)))


def raised_at(point: int, run: Deed, error: type[BaseException] = KeyboardInterrupt) -> BaseException | None:
    """Runs it, with an exception at that point. Returns what came out; None: it went on, or was over before."""
    assert threading.current_thread() is threading.main_thread(), "interrupts come there"

    def deed() -> None:
        raise error

    try:
        with Points(point, deed):
            result = run()
        del result  # only now, as in `points_of`
    except BaseException as raised:
        return raised
    return None
