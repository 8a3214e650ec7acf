"""The process that the objects of a client belong to (rule P10).

A fork copies all objects into the child, and of the threads only the one that forks. In the child

    [1]  whatever identifies a writer is made anew before the first request;
    [2]  a client uses channels of its own. The parent's channels and calls are kept until the child ends, and are
         neither used nor finalized: their connections are the parent's;
    [3]  an object with a buffer, a position or a lease of the parent raises FORKED at each use, and its end does
         nothing;
    [4]  no lock that another thread of the parent has held is taken;
    [5]  gRPC is not used if it has not survived the fork. It does not if another thread was inside of it, as the thread
         that reads a stream always is: a child that used it all the same would crash, or wait for ever. It is tried
         once, in bounded time, before it is relied on.
    [6]  With gRPC's whole support, its handler in the child takes the locks of all calls of the parent. Threads of ours
         take them for a moment, each tenth of a second, to look at their calls. For one that such a thread has held the
         child would wait for ever, in `os.fork` itself. So a fork takes these locks before, in bounded time.

There is one hook, which tells every object that has asked for it by `tell`.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from operator import methodcaller
from typing import ClassVar, Final, Protocol

import grpc

from sow_client._flags import Flag
from sow_client.errors import FailedPrecondition, SowError

TRIED_SECONDS_MAX: Final = 5.0
"""The longest time that gRPC may take to answer in a forked process; a working one takes hundredths of a second."""
QUIET_SECONDS_MAX: Final = 0.05
"""How long a fork waits for other threads to leave gRPC, such as that of a stream which has just ended."""
HELD_SECONDS_MAX = 0.2
"""How long a fork waits for the locks of calls ([6]). Threads of ours hold them for microseconds. While a publisher is
sending, a thread of gRPC holds one for the time of the fork; for that one gRPC gives the child another."""
_CALL_SECONDS: Final = 0.01
_NOWHERE: Final = "unix:/nonexistent/sow"
_METHOD: Final = "/sow.v1.SowService/Get"


class Told(Protocol):
    """An object that a fork changes in the child."""

    def _forked(self) -> None:
        """Called in the child, while it has one thread. It makes no call of gRPC and takes no lock."""


class Lock(Protocol):
    """A lock, or the condition that has it."""

    def acquire(self, blocking: bool) -> bool: ...

    def release(self) -> None: ...


_locks: Final[list[Callable[[], Iterable[Lock]]]] = []
_held: Final[dict[int, list[Lock]]] = {}
"""The locks that a fork holds, by its thread."""
_told: Final[dict[int, weakref.ref[Told]]] = {}
_kept: Final[list[object]] = []
inside: Final[set[int]] = set()
"""The threads that make a call, or wait for a connection."""
_SUPPORT: Final = os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "").lower()
"""As gRPC has read it. It counts as true by default, and then still lacks the part for threads of Python."""
_used = False  # this process, or its parent, has opened a channel
_aio_users: set[int] = set()  # forks, as `_forks` counts them, in whose child a channel of asyncio was opened
_lost = ""  # why gRPC does not work in this process
_forks = 0  # between the process that has loaded this module and the present one
_tried = 0  # the fork in whose child gRPC works


def tell(owner: Told) -> None:
    """The object hears of forks while it lives."""
    # All in C: an exception of Ctrl-C that came in the middle of it would be lost. The reference itself comes as the
    # second argument of `pop`.
    key = id(owner)
    _told[key] = weakref.ref(owner, partial(_told.pop, key))


def keep(*of_parent: object) -> None:
    """Keeps parts of the parent from being finalized ([2])."""
    _kept.extend(of_parent)


def uses_grpc(*, asynchronous: bool = False) -> None:
    """A channel is about to be opened. Raises FailedPrecondition (FORKED) where gRPC has not survived the fork."""
    global _used
    if _lost:
        raise _broken(_lost)
    if asynchronous:
        if _aio_users - {_forks}:
            raise _broken(_ASYNCHRONOUS)
        _aio_users.add(_forks)
    _used = True


@contextmanager
def inside_grpc() -> Iterator[None]:
    """The thread uses gRPC meanwhile, outside of the threads of gRPC's own."""
    thread = threading.get_ident()
    inside.add(thread)
    try:
        yield
    finally:
        inside.discard(thread)


def _before() -> None:
    global _busy
    give_up = time.monotonic() + QUIET_SECONDS_MAX
    while (_busy := _users()) and time.monotonic() < give_up:
        time.sleep(QUIET_SECONDS_MAX / 50)
    if _SUPPORT in _TRUE:
        _hold_all(time.monotonic() + HELD_SECONDS_MAX)


def hold_at_fork(locks: Callable[[], Iterable[Lock]]) -> None:
    """A fork holds the locks that this function gives ([6])."""
    _locks.append(locks)


def _hold_all(give_up: float) -> None:
    held = _held[threading.get_ident()] = []
    left = [lock for locks in _locks for lock in locks()]
    while True:
        # All in C: a lock that was taken when Ctrl-C came, and is not among them yet, would be held for ever.
        held.extend(filter(_TAKE, left))
        taken = set(map(id, held))
        left = [lock for lock in left if id(lock) not in taken]
        if not left or time.monotonic() >= give_up:
            return
        time.sleep(QUIET_SECONDS_MAX / 50)


_TAKE: Final = methodcaller("acquire", False)


def _let_go() -> None:
    for lock in _held.pop(threading.get_ident(), ()):
        lock.release()


_busy = ""


def _users() -> str:
    """The work of the other threads in gRPC. Empty: there are none that a fork harms."""
    asynchronous = False
    streams = bool(inside - {threading.get_ident()})
    for thread in threading.enumerate():
        target = getattr(thread, "_target", None)  # there is no public way to tell gRPC's threads
        if (getattr(target, "__module__", None) or "").startswith("grpc"):
            managed = "_run_with_context" in getattr(target, "__qualname__", "")
            streams = streams or managed
            asynchronous = asynchronous or not managed
    if asynchronous:
        return _ASYNCHRONOUS
    # With the whole support, gRPC stops these threads for the time of the fork.
    return _THREADS if streams and _SUPPORT not in _TRUE else ""


_ASYNCHRONOUS: Final = "its parent has used an AsyncClient: fork before the first one"
_THREADS: Final = (
    "other threads were using it at the fork: fork before the first subscription or publisher, or set "
    "GRPC_ENABLE_FORK_SUPPORT=1 before the program starts"
)
_TRUE: Final = frozenset({"1", "true", "yes", "y", "t"})
_FALSE: Final = frozenset({"0", "false", "no", "n", "f"})


def _in_child() -> None:
    global _forks, _lost
    _let_go()
    _held.clear()
    _forks += 1
    inside.clear()
    if _SUPPORT in _FALSE and _used:
        _lost = _lost or "GRPC_ENABLE_FORK_SUPPORT is off: fork before the first Client"
    elif _busy:
        _lost = _lost or _busy
    for known in list(_told.values()):
        if (owner := known()) is not None:
            with suppress(AttributeError):  # half made, by a thread that this process has not
                owner._forked()


os.register_at_fork(before=_before, after_in_parent=_let_go, after_in_child=_in_child)


def forked(what: str) -> SowError:
    """The error of something that belongs to the parent."""
    return FailedPrecondition(
        f"the {what} belongs to the process that made it, and this one was forked from that: make another one here",
        reason="FORKED",
    )


class Owned:
    """The base of what belongs to the process that made it ([3])."""

    _what: ClassVar[str] = "object"
    _is_parents = False

    def _forked(self) -> None:
        self._is_parents = True

    def _check_process(self) -> None:
        """Raises FailedPrecondition (FORKED) in a child of the process that made it."""
        if self._is_parents:
            raise forked(self._what)


class ParentsCall:
    """Takes the place of a stream of the parent ([2])."""

    async def read(self) -> object:
        """Raises FailedPrecondition (FORKED)."""
        raise forked("answer")

    def cancel(self) -> bool:
        """Does nothing."""
        return False

    def done(self) -> bool:
        """It is over here."""
        return True


# ---- gRPC after a fork ----


def check_grpc(seconds: float) -> None:
    """Raises FailedPrecondition (FORKED) where gRPC does not work because of a fork ([5]), after `seconds` at most."""
    global _tried
    if _tried == _forks:
        return
    if _lost:
        raise _broken(_lost)
    answered = Flag()
    threading.Thread(target=_try, args=(answered,), name="sow-try-grpc", daemon=True).start()
    if not answered.wait(min(seconds, TRIED_SECONDS_MAX)):
        raise _broken(_THREADS)
    _tried = _forks


def _try(answered: Flag) -> None:
    with grpc.insecure_channel(_NOWHERE) as channel, suppress(grpc.RpcError):
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(_METHOD)
        call(b"", timeout=_CALL_SECONDS, wait_for_ready=True)
    answered.set()


async def aio_check_grpc(seconds: float) -> None:
    """As `check_grpc`, for a task. A channel of asyncio is not even opened where the parent has had one."""
    if _tried != _forks:
        await asyncio.to_thread(check_grpc, seconds)


def _broken(why: str) -> SowError:
    return FailedPrecondition(
        f'gRPC does not work in this process, which was forked, as {why}, or start processes by "spawn"',
        reason="FORKED",
    )
