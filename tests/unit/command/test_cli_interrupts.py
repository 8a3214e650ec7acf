"""Ctrl-C and SIGTERM in the command: which exit code, and which way."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator

import pytest

from sow_cli import interrupts
from sow_cli.interrupts import Terminated, exit_code_of, raised, through_asyncio


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    hooks = sys.unraisablehook, threading.excepthook
    yield
    sys.unraisablehook, threading.excepthook = hooks
    for number, handler in before:
        signal.signal(number, handler)


def test_ctrl_c_raises_while_the_command_works_and_ends_it_at_once_before_and_after() -> None:
    interrupts.end_at_once()
    assert signal.getsignal(signal.SIGINT) is interrupts._end
    with pytest.raises(KeyboardInterrupt), raised():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is interrupts._end
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_an_ignored_interrupt_stays_ignored() -> None:
    """As in the background of a script."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupts.end_at_once()
    with raised():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_an_interrupt_that_a_finalizer_has_swallowed_comes_once_more(
    number: signal.Signals, error: type[BaseException]
) -> None:
    class Dropped:
        def __del__(self) -> None:
            signal.raise_signal(number)

    def work(seconds: float) -> None:
        dropped = Dropped()
        del dropped
        threading.Event().wait(seconds)

    interrupts.end_at_once()
    for seconds in (20, 0):  # the second one is over before the signal comes again
        with pytest.raises(error), raised():
            work(seconds)


def test_an_interrupt_that_some_code_swallows_ends_the_command_all_the_same() -> None:
    def work() -> int:
        with contextlib.suppress(BaseException):  # as gRPC does at the end of a channel
            signal.raise_signal(signal.SIGINT)
        return 0

    interrupts.end_at_once()
    with pytest.raises(KeyboardInterrupt), raised():
        work()


def test_an_interrupt_of_one_command_of_the_shell_ends_no_other() -> None:
    def command() -> None:
        with pytest.raises(KeyboardInterrupt), raised():
            signal.raise_signal(signal.SIGINT)

    def prompt() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        interrupts.heeded()

    interrupts.end_at_once()
    with raised():
        command()
        prompt()
        with raised():
            pass


def test_after_an_interrupt_nobody_is_told_of_what_is_half_made(capsys: pytest.CaptureFixture[str]) -> None:
    """gRPC's own finalizers fail after an exception between two of its lines, and its threads."""

    class HalfMade:
        def __del__(self) -> None:
            raise AttributeError("'HalfMade' object has no attribute '_state'")

    def fails() -> None:
        raise RuntimeError("release unlocked lock")

    def ends() -> None:
        half_made = HalfMade()
        del half_made
        thread = threading.Thread(target=fails)
        thread.start()
        thread.join()

    interrupts.end_at_once()
    with raised():
        ends()
    assert {"_state", "release"} <= set(capsys.readouterr().err.replace("'", " ").split()), "a fault is told"
    with pytest.raises(KeyboardInterrupt), raised():
        signal.raise_signal(signal.SIGINT)
    ends()
    assert capsys.readouterr().err == ""


def test_an_error_that_came_of_an_interrupt_ends_the_command_as_the_interrupt() -> None:
    def fails(interrupt: BaseException) -> BaseException:
        try:
            try:
                raise interrupt
            finally:
                raise RuntimeError("release unlocked lock")
        except RuntimeError as error:
            return error

    assert exit_code_of(fails(KeyboardInterrupt())) == 130
    assert exit_code_of(fails(Terminated())) == 143
    assert exit_code_of(fails(ValueError())) is None
    assert exit_code_of(None) is None


def test_a_sigterm_ends_the_tasks_of_a_loop_in_order() -> None:
    """Story: the exception came in the middle of the loop, where gRPC made a channel, and `sow bench` crashed and left
    its topic behind."""
    ended: list[str] = []

    async def work() -> None:
        signal.raise_signal(signal.SIGTERM)
        ended.append("the line behind it")  # an exception would have come before
        try:
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    interrupts.end_at_once()
    with raised(), pytest.raises(Terminated), through_asyncio(), asyncio.Runner() as runner:
        runner.run(work())
    assert ended == ["the line behind it", "cancelled"]
