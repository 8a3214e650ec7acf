"""Ctrl-C and SIGTERM, from the first line of `sow` to its last.

    [1]  While the command starts, reads its arguments, or says its last, Ctrl-C ends the process at once: nothing is
         under way that has to be put in order. An exception would come in the middle of an import, a callback or a line
         of click, which would print it or make another error of it.
    [2]  While it works Ctrl-C is a KeyboardInterrupt, and SIGTERM is Terminated.
    [3]  An exception that comes in a finalizer or a callback is lost there: the signal is sent once more then. Where
         some code swallows it, as gRPC does at the end of a channel, the command still ends as if it had not.
    [4]  After an interrupt nobody is told of errors in finalizers and threads: an exception between two lines of gRPC
         leaves objects that are half made.
    [5]  An interrupt that the command was started to ignore, as in the background of a script, stays ignored.

It imports little, as it is the first thing that the command runs.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Final, NoReturn

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

INTERRUPTED: Final = 130
TERMINATED: Final = 143
_AGAIN_SECONDS: Final = 0.01


class Terminated(KeyboardInterrupt):
    """SIGTERM. The command ends as after Ctrl-C: displays on the terminal are closed properly, and the cursor
    returns."""


def exit_code_of(error: BaseException | None) -> int | None:
    """The exit code of a command that an interrupt has ended; None: it was another error.

    An error that came of the interrupt counts as one: its end may fail, and the standard library makes a RuntimeError
    of one that comes at a bad place in the start of a thread ("release unlocked lock").
    """
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return TERMINATED if isinstance(error, Terminated) else INTERRUPTED
        error = error.__context__
    return None


def end_at_once() -> None:
    """From now on Ctrl-C ends the process ([1], [5])."""
    sys.unraisablehook = _unraisable
    threading.excepthook = _thread_ended
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def _end(_number: int, _frame: FrameType | None) -> NoReturn:
    os._exit(INTERRUPTED)


class _Came:
    """The interrupts of the present command."""

    last: type[KeyboardInterrupt] | None = None
    lost: object = None
    """Stands for one that nobody has seen ([3])."""


@contextmanager
def raised() -> Iterator[None]:
    """The command works ([2]), unless somebody else handles the signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    quiet = ((signal.SIGINT, _end), (signal.SIGTERM, signal.SIG_DFL))
    taken = [(number, before) for number, handler in quiet if (before := signal.getsignal(number)) is handler]
    outer, _Came.last, _Came.lost = _Came.last, None, None
    try:
        for number, _ in taken:
            signal.signal(number, _raise)
        yield
    finally:
        for number, before in taken:
            signal.signal(number, before)
        came, _Came.lost = _Came.last, None
        if not taken:  # a command of the shell
            _Came.last = outer
        if came is not None:
            raise came


def _raise(number: int, _frame: FrameType | None) -> NoReturn:
    _Came.last = Terminated if number == signal.SIGTERM else KeyboardInterrupt
    raise _Came.last


def heeded() -> None:
    """The command goes on after the interrupt."""
    _Came.last = None


@contextmanager
def through_asyncio() -> Iterator[None]:
    """Both signals end the tasks of an event loop in order, as asyncio does it with Ctrl-C where Python's own handler
    is installed. Story: an exception in the middle of the loop, while gRPC made a channel, crashed the process."""
    handlers = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    if any(handler is not _raise for _, handler in handlers):
        yield
        return
    terminated = False

    def terminate(_number: int, _frame: FrameType | None) -> None:
        nonlocal terminated
        terminated = True
        signal.raise_signal(signal.SIGINT)

    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, terminate)
        yield
    except KeyboardInterrupt as error:
        if terminated:
            raise Terminated from error
        raise
    finally:
        for number, handler in handlers:
            signal.signal(number, handler)


# ---- errors that nobody catches ([3], [4]) ----


def _unraisable(found: UnraisableHookArgs) -> None:
    error = found.exc_value
    if isinstance(error, KeyboardInterrupt):
        _Came.last, _Came.lost = type(error), object()
        # Not here: the next exception would be lost as well.
        number = signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT
        _thread.start_new_thread(_send_again, (number, _Came.lost))
    elif _Came.last is None:
        sys.__unraisablehook__(found)


def _thread_ended(found: threading.ExceptHookArgs) -> None:
    if _Came.last is None:
        threading.__excepthook__(found)


def _send_again(number: int, lost: object) -> None:
    main = threading.main_thread().ident
    assert main is not None, "it runs"
    # A pause first: a signal that comes just before the main thread begins to wait does not end the wait.
    time.sleep(_AGAIN_SECONDS)
    while _is_in(_unraisable.__code__, sys._current_frames().get(main)):
        time.sleep(_AGAIN_SECONDS)
    if _Came.lost is not lost:  # the command has ended by it
        return
    _Came.lost = None
    if sys.platform == "win32":
        _thread.interrupt_main(number)
    else:
        signal.pthread_kill(main, number)  # it also ends a wait


def _is_in(code: object, frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None
