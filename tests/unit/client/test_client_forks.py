"""What a fork does in the process that forks (_process [6]). tests/edges/test_forks.py forks."""

from __future__ import annotations

import ctypes
import signal
import threading
from functools import partial
from types import SimpleNamespace

import pytest

from sow_client import _process


def test_an_interrupt_leaves_no_lock_of_a_call_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """P10: locks that were taken when Ctrl-C came, while others were awaited, are let go. The streams of the parent
    would wait for them for ever."""
    first, last = threading.RLock(), threading.Lock()
    # In C, as the acquiring of a lock is: the interrupt is seen when the interpreter goes on.
    interrupted = SimpleNamespace(acquire=partial(ctypes.CDLL(None)["raise"], signal.SIGINT))
    monkeypatch.setattr(_process, "_locks", [lambda: [first, interrupted, last]])
    taken: list[bool] = []
    with pytest.raises(KeyboardInterrupt):
        _process._hold_all(0.0)
    _process._let_go()
    other = threading.Thread(target=lambda: taken.append(first.acquire(blocking=False)))
    other.start()
    other.join()
    assert taken == [True]
    assert not last.locked()
    assert not _process._held
