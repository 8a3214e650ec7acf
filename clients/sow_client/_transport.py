"""A client's way to its server, or to one of several: the channels, whether they are connected, and the moves.

    [1]  A call to a server that is not there fails as Unavailable (UNREACHABLE) after about `connect_timeout` seconds,
         not after the call's own deadline: calls are made only on a channel that is connected.
    [2]  A client with one address uses its channel as it is. A client with several uses that of an instance that said
         that it serves, and keeps a call open there that tells when that ends (rule F1).
    [3]  One search for an instance runs at a time; all who wait use its result.
    [4]  `on_failover` is called once for each move, by the thread or task whose call has moved, without a lock.

`Transport` and `AioTransport` are written by hand. Threads and tasks differ here: gRPC reports the state of a blocking
channel on a thread of its own; an asynchronous channel is asked.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Final, TypeAlias, cast

import grpc
import grpc.aio

from sow.v1 import admin_pb2, admin_pb2_grpc
from sow_client import _failover
from sow_client._addresses import Address, Prefer, host_and_port
from sow_client._channel import Tls, open_aio_channel, open_channel
from sow_client._connection import (
    CLOSE_SECONDS_MAX,
    HEALTH_CHECK,
    AioConnection,
    Connection,
    cause_of,
    task_is_cancelled,
    unless_closed,
)
from sow_client._failover import Instance, Search
from sow_client._lines import ASKED, Cancellable, CurrentChannel, Home, Line, Lines, OnFailover
from sow_client._statuses import EndedCall, closed, error_of_status, explained, reason_of, unreachable
from sow_client._tokens import Token
from sow_client.errors import SowError, Unavailable

__all__ = ["RECONNECT_SECONDS", "AioTransport", "Transport", "task_is_cancelled", "unless_closed"]

RECONNECT_SECONDS: Final = 0.5
"""Publishers and subscriptions repeat their attempts, so each attempt waits only this long for a connection. Closing a
publisher or a subscription may take as long."""
GO_BACK_SECONDS: Final = 1.0
"""How long `go_back` looks for the preferred instances."""
LOOK_AGAIN_SECONDS: Final = 1.0
"""While the instance in use does not serve, and no other did, the client looks for one that does no more often."""

_HEALTH_OF_SOW: Final = b"\n\x11sow.v1.SowService"
"""The request for the health of sow's service. An older server, which does not describe itself, answers it."""
_SERVING: Final = b"\x08\x01"

_Line: TypeAlias = Line[grpc.Channel]
_AioLine: TypeAlias = Line[grpc.aio.Channel]
_Found: TypeAlias = Mapping[str, Sequence[str]]


class Transport:
    """The lines of a blocking client. A channel that the program brings is used as it is, and stays open."""

    def __init__(
        self,
        server: str,
        tls: Tls | None,
        connect_timeout: float,
        channel: grpc.Channel | None,
        token: Token | None = None,
        *,
        prefer: Prefer = "first",
        on_failover: OnFailover | None = None,
    ) -> None:
        self.lines: Lines[grpc.Channel] = Lines(server, tls, channel, token, open_channel, prefer=prefer)
        self.server = ",".join(self.lines.servers)
        self.is_closed = False
        self.is_own = self.lines.is_own
        """The client opened its channels, and closes them."""
        self.calls = cast(grpc.Channel, CurrentChannel(self.lines.present))
        """The channel in use, as the generated stubs get it."""
        self._timeout = connect_timeout
        self._on_failover = on_failover
        self._connection: Connection | None = None
        self._watch_single()
        self._searching = threading.Lock()
        self._closing = threading.Event()
        self._look_again = 0.0

    def _watch_single(self) -> None:
        line = self.lines.single
        if line is not None and self.is_own:
            self._connection = Connection(line.channel, line.address.target, self._timeout)

    @property
    def moves_max(self) -> int:
        """How often one call may go on elsewhere; 0: the client has one address."""
        return 0 if self.lines.single is not None else max(2, len(self.lines.opened))

    def await_ready(self, seconds: float | None = None, home: Home | None = None) -> _Line:
        """Returns the line for a call once the call can be made: that of `home` if it has one, else the one in use.
        `seconds` and `connect_timeout` both bound the wait.

        Raises Unavailable (UNREACHABLE), Cancelled (CLOSED) when the client is closed, or the error of a search.
        """
        if self.is_closed:
            raise closed("client")
        if home is not None and home.line is not None and home.line is not self.lines.current:
            return self._reach(home, seconds)
        line = self.lines.current
        if line is not None and line is self.lines.single:
            if self._connection is not None:
                self._connection.await_ready(seconds)
        elif line is None or self._is_to_look(line):
            line = self._find(seconds)
        if home is not None:
            home.line = line
        return line

    def doubt(self, reason: str) -> None:
        """A call has failed with this reason."""
        if reason in _failover.LOSSES:
            self.lines.doubt(reason)

    def failure(self, error: grpc.RpcError) -> SowError:
        """The error of a call that is not repeated."""
        translated = error_of_status(error)
        self.doubt(translated.reason)
        return self.lines.named(translated)

    def follows(self, line: _Line, call: Cancellable) -> None:
        """A subscription has begun; a move ends it."""
        if not self.lines.follows(line, call):
            call.cancel()

    def go_back(self) -> Instance | None:
        """Moves to the first instance of the order that serves, if that is not the one in use. Returns the one in use;
        None where the client has one address."""
        line = self.await_ready()
        if self.lines.single is not None:
            return None
        with self._held(self._timeout):
            order = self.lines.order(self._resolved(self._timeout))
            before = order[: order.index(line.address)] if line.address in order else order
            give_up = time.monotonic() + GO_BACK_SECONDS
            search = self._search(before, give_up, serving_only=True) if before else None
            move = None if search is None or search.found is None else self._use(search, ASKED)
        self._tell(move)
        return self.lines.present().instance

    def close(self) -> None:
        """Closes the channels; calls in progress end."""
        self._stop_watching()
        if self.is_own:
            for line in self.lines.opened:
                line.channel.close()

    def leave(self, error: BaseException | None) -> None:
        """Closes the channels at the end of a `with` block, which `error` may have ended.

        After Ctrl-C it waits no longer than `CLOSE_SECONDS_MAX`. Closing waits until each call has ended, and a
        KeyboardInterrupt between two lines of gRPC may leave a call whose end nobody reads. Closing would then take for
        ever, and the program could not be interrupted again.
        """
        if error is None or isinstance(error, Exception):
            self.close()
            return
        self._stop_watching()
        if self.is_own:
            for line in self.lines.opened:
                thread = threading.Thread(target=line.channel.close, name="sow-close", daemon=True)
                thread.start()
                thread.join(CLOSE_SECONDS_MAX)

    def _stop_watching(self) -> None:
        self.is_closed = True
        self._closing.set()
        if self._connection is not None:
            self._connection.close()
        for line in self.lines.opened:
            if line.watch is not None:
                line.watch.cancel()

    # ---- several addresses ----

    @contextmanager
    def _held(self, seconds: float) -> Iterator[None]:
        """The right to search [3]. Raises Unavailable (UNREACHABLE) if another search takes longer."""
        if not self._searching.acquire(timeout=seconds):
            raise unreachable(self.server, seconds)
        try:
            yield
        finally:
            self._searching.release()

    def _is_to_look(self, line: _Line) -> bool:
        return line.instance is not None and not line.instance.serving and time.monotonic() > self._look_again

    def _find(self, seconds: float | None) -> _Line:
        timeout = self._timeout if seconds is None else min(seconds, self._timeout)
        give_up = time.monotonic() + timeout
        with self._held(timeout):
            line = self.lines.current
            if line is not None and not self._is_to_look(line):
                return line  # another thread has found it
            order = self.lines.order(self._resolved(timeout))
            if self.lines.single is None and len(order) == 1:
                self.lines.use_single(self.lines.line(order[0], of_many=False))
                self._watch_single()
            if (line := self.lines.single) is not None:
                if self._connection is not None:
                    self._connection.await_ready(give_up - time.monotonic())
                return line
            search = self._search(_last_first(order, self.lines.last), give_up)
            if self.is_closed:
                raise closed("client")
            if search.found is None:
                raise search.failure()
            move = self._use(search, self.lines.lost)
            line = self.lines.present()
        self._tell(move)
        return line

    def _resolved(self, seconds: float) -> _Found:
        """The IP addresses of the names. A resolver may take long, and cannot be interrupted."""
        found: dict[str, Sequence[str]] = {}
        looking = [
            threading.Thread(target=_look_up, args=(name, found), name="sow-resolve", daemon=True)
            for name in self.lines.names
        ]
        for thread in looking:
            thread.start()
        give_up = time.monotonic() + seconds / 2
        for thread in looking:
            thread.join(max(0.0, give_up - time.monotonic()))
        return dict(found)

    def _search(self, order: Sequence[Address], give_up: float, *, serving_only: bool = False) -> Search:
        seconds = give_up - time.monotonic()
        search = Search(
            order,
            now=time.monotonic(),
            seconds=seconds,
            cluster=self.lines.cluster,
            serving_only=serving_only,
        )
        while not self.is_closed and (step := search.step(time.monotonic())) is not None:
            if isinstance(step, float):
                self._closing.wait(step)
            else:
                search.heard(self.ask(self.lines.line(step), search.attempt_seconds(time.monotonic())))
        return search

    def ask(self, line: _Line, seconds: float) -> Instance | SowError:
        """The instance at an address, or why there is none."""
        address = line.address.target
        call = None
        try:
            call = admin_pb2_grpc.AdminServiceStub(_on(line)).DescribeInstance(
                admin_pb2.DescribeInstanceRequest(), timeout=seconds
            )
            for response in call:
                return _failover.instance_of(line.address, response)
            return _failover.no_server(address)
        except grpc.RpcError as error:
            if not _is_unknown(error):
                return _answer_of(error, address, seconds)
        except SowError as error:
            return error  # the client is closed
        finally:
            if call is not None:
                call.cancel()
        try:
            check: grpc.UnaryUnaryMultiCallable[bytes, bytes] = line.channel.unary_unary(HEALTH_CHECK)
            health = check(_HEALTH_OF_SOW, timeout=seconds)
            return _failover.undescribed(line.address, serving=health == _SERVING)
        except grpc.RpcError as error:
            return _answer_of(error, address, seconds)
        except ValueError:  # from gRPC: the channel was closed in the meantime
            return closed("client")

    def _reach(self, home: Home, seconds: float | None) -> _Line:
        """The line of something that keeps to it, once it answers. It need not serve: its reads go on."""
        line = home.line
        assert line is not None, "it has begun"
        timeout = self._timeout if seconds is None else min(seconds, self._timeout)
        search = Search((line.address,), now=time.monotonic(), seconds=timeout)
        while not self.is_closed and (step := search.step(time.monotonic())) is not None:
            if isinstance(step, float):
                self._closing.wait(step)
            else:
                search.heard(self.ask(line, search.attempt_seconds(time.monotonic())))
        if self.is_closed:
            raise closed("client")
        if search.found is None:
            raise _failover.keeps_to(home.what, line.address.target, search.failure())
        return line

    def _use(self, search: Search, reason: str) -> _Move | None:
        """Uses the line that a search has chosen."""
        assert search.found is not None, "the search has found one"
        address, instance = search.found
        line = self.lines.line(address)
        ended, move = self.lines.use(line, instance)
        self._look_again = time.monotonic() + LOOK_AGAIN_SECONDS
        if line.watch is None and instance.name:
            line.watch = _Watch()
            weakref.finalize(self, line.watch.cancel).atexit = False
            threading.Thread(
                target=_watch, args=(line, line.watch, self.lines, self._closing), name="sow-watch", daemon=True
            ).start()
        _cancel(ended)
        return None if move is None else (*move, reason)

    def _tell(self, move: _Move | None) -> None:
        if move is not None and self._on_failover is not None:
            self._on_failover(*move)


_Move: TypeAlias = tuple[Instance, Instance, str]


class _Watch:
    """The call that watches an instance, also before it is made."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._over = False
        self._call: Cancellable | None = None

    def begins(self, call: Cancellable) -> bool:
        """The call is made. False: it was cancelled before."""
        with self._lock:
            self._call = call
            over = self._over
        if over:
            call.cancel()
        return not over

    def cancel(self) -> None:
        """Ends the call."""
        with self._lock:
            self._over = True
            call = self._call
        if call is not None:
            call.cancel()


def _watch(line: _Line, watch: _Watch, lines: Lines[grpc.Channel], closing: threading.Event) -> None:
    """Waits until the instance of a line no longer serves. It does not refer to the transport, so dropping the last
    reference to a client ends it."""
    while line.watch is watch and not closing.is_set():
        reason = "UNREACHABLE"
        try:
            call = admin_pb2_grpc.AdminServiceStub(_on(line)).DescribeInstance(
                admin_pb2.DescribeInstanceRequest(watch=True)
            )
            if not watch.begins(call):
                return
            for response in call:
                if not response.serving and line.instance is not None and line.instance.serving:
                    reason = "NOT_SERVING"
                    break
            else:
                reason = "STOPPING"
        except grpc.RpcError as error:
            told = reason_of(error)
            if (told is not None and told not in _failover.LOSSES) or _is_unknown(error):
                closing.wait(LOOK_AGAIN_SECONDS)  # refused for now; the next call tells more
                continue
            reason = told or reason
        except SowError:
            return  # the client is closed
        if line.watch is watch:
            _cancel(lines.leave(line, reason))
        watch.cancel()
        return


def _on(line: _Line) -> grpc.Channel:
    """The channel of a line as stubs get it."""
    return cast(grpc.Channel, line.calls)


def _aio_on(line: _AioLine) -> grpc.aio.Channel:
    return cast(grpc.aio.Channel, line.calls)


def _cancel(calls: Iterable[Cancellable]) -> None:
    for call in calls:
        call.cancel()


def _last_first(order: Sequence[Address], last: Line[grpc.Channel] | Line[grpc.aio.Channel] | None) -> list[Address]:
    """The order of a search: the instance in use first (failover [2])."""
    first = [] if last is None else [address for address in order if address == last.address]
    return [*first, *(address for address in order if address not in first)]


def _look_up(name: str, found: dict[str, Sequence[str]]) -> None:
    host, port = host_and_port(name)
    try:
        found[name] = [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except OSError:
        pass  # gRPC looks it up again, and names the cause


def _is_unknown(error: BaseException) -> bool:
    """The server does not know the method."""
    return isinstance(error, EndedCall) and error.code() is grpc.StatusCode.UNIMPLEMENTED and reason_of(error) is None


def _answer_of(error: grpc.RpcError, address: str, seconds: float) -> SowError:
    """Why there is no instance at an address."""
    translated = error_of_status(error)
    if reason_of(error) is not None:
        if translated.reason in _failover.LOSSES:
            return Unavailable(f"{address}: {translated.message}", reason=translated.reason)
        return translated
    if translated.reason in ("UNIMPLEMENTED", "NOT_FOUND"):
        return _failover.no_server(address)
    if translated.reason == "DEADLINE_EXCEEDED":
        return Unavailable(f"{address}: no answer within {seconds:.2g} s", reason="UNREACHABLE")
    return Unavailable(f"{address}: {explained(cause_of(error) or translated.message)}", reason="UNREACHABLE")


class AioTransport:
    """The lines of an asynchronous client. A channel that the program brings is used as it is, and stays open."""

    def __init__(
        self,
        server: str,
        tls: Tls | None,
        connect_timeout: float,
        channel: grpc.aio.Channel | None,
        token: Token | None = None,
        *,
        prefer: Prefer = "first",
        on_failover: OnFailover | None = None,
    ) -> None:
        self.lines: Lines[grpc.aio.Channel] = Lines(server, tls, channel, token, open_aio_channel, prefer=prefer)
        self.server = ",".join(self.lines.servers)
        self.is_closed = False
        self.is_own = self.lines.is_own
        """The client opened its channels, and closes them."""
        self.calls = cast(grpc.aio.Channel, CurrentChannel(self.lines.present))
        """The channel in use, as the generated stubs get it."""
        self._timeout = connect_timeout
        self._on_failover = on_failover
        self._connection: AioConnection | None = None
        self._watch_single()
        self._searching = asyncio.Lock()
        self._look_again = 0.0

    def _watch_single(self) -> None:
        line = self.lines.single
        if line is not None and self.is_own:
            self._connection = AioConnection(line.channel, line.address.target, self._timeout)

    @property
    def moves_max(self) -> int:
        """As `Transport.moves_max`."""
        return 0 if self.lines.single is not None else max(2, len(self.lines.opened))

    async def await_ready(self, seconds: float | None = None, home: Home | None = None) -> _AioLine:
        """As `Transport.await_ready`."""
        if self.is_closed:
            raise closed("client")
        if home is not None and home.line is not None and home.line is not self.lines.current:
            return await self._reach(home, seconds)
        line = self.lines.current
        if line is not None and line is self.lines.single:
            if self._connection is not None:
                await self._connection.await_ready(seconds)
        elif line is None or self._is_to_look(line):
            line = await self._find(seconds)
        if home is not None:
            home.line = line
        return line

    def doubt(self, reason: str) -> None:
        """As `Transport.doubt`."""
        if reason in _failover.LOSSES:
            self.lines.doubt(reason)

    def failure(self, error: grpc.RpcError) -> SowError:
        """As `Transport.failure`."""
        translated = error_of_status(error)
        self.doubt(translated.reason)
        return self.lines.named(translated)

    def follows(self, line: _AioLine, call: Cancellable) -> None:
        """As `Transport.follows`."""
        if not self.lines.follows(line, call):
            call.cancel()

    async def go_back(self) -> Instance | None:
        """As `Transport.go_back`."""
        line = await self.await_ready()
        if self.lines.single is not None:
            return None
        async with self._searching:
            order = self.lines.order(await self._resolved(self._timeout))
            before = order[: order.index(line.address)] if line.address in order else order
            give_up = time.monotonic() + GO_BACK_SECONDS
            search = await self._search(before, give_up, serving_only=True) if before else None
            move = None if search is None or search.found is None else self._use(search, ASKED)
        self._tell(move)
        return self.lines.present().instance

    async def close(self) -> None:
        """Closes the channels; calls in progress end."""
        self.is_closed = True
        for line in self.lines.opened:
            if line.watch is not None:
                line.watch.cancel()
        if self.is_own:
            for line in self.lines.opened:
                await line.channel.close()

    async def leave(self, error: BaseException | None) -> None:
        """Closes the channels at the end of an `async with` block, however it ended."""
        await self.close()

    # ---- several addresses ----

    def _is_to_look(self, line: _AioLine) -> bool:
        return line.instance is not None and not line.instance.serving and time.monotonic() > self._look_again

    async def _find(self, seconds: float | None) -> _AioLine:
        timeout = self._timeout if seconds is None else min(seconds, self._timeout)
        give_up = time.monotonic() + timeout
        move = None
        try:
            async with asyncio.timeout(timeout):
                await self._searching.acquire()
        except TimeoutError as error:
            raise unreachable(self.server, timeout) from error
        try:
            line = self.lines.current
            if line is not None and not self._is_to_look(line):
                return line  # another task has found it
            order = self.lines.order(await self._resolved(timeout))
            if self.lines.single is None and len(order) == 1:
                self.lines.use_single(self.lines.line(order[0], of_many=False))
                self._watch_single()
            if (line := self.lines.single) is not None:
                if self._connection is not None:
                    await self._connection.await_ready(give_up - time.monotonic())
                return line
            search = await self._search(_last_first(order, self.lines.last), give_up)
            if self.is_closed:
                raise closed("client")
            if search.found is None:
                raise search.failure()
            move = self._use(search, self.lines.lost)
            line = self.lines.present()
        finally:
            self._searching.release()
        self._tell(move)
        return line

    async def _resolved(self, seconds: float) -> _Found:
        """The IP addresses of the names."""
        found: dict[str, Sequence[str]] = {}
        names = self.lines.names
        if names:
            looking = [asyncio.to_thread(_look_up, name, found) for name in names]
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds / 2):
                    await asyncio.gather(*looking)
        return dict(found)

    async def _search(self, order: Sequence[Address], give_up: float, *, serving_only: bool = False) -> Search:
        seconds = give_up - time.monotonic()
        search = Search(
            order,
            now=time.monotonic(),
            seconds=seconds,
            cluster=self.lines.cluster,
            serving_only=serving_only,
        )
        while not self.is_closed and (step := search.step(time.monotonic())) is not None:
            if isinstance(step, float):
                await asyncio.sleep(step)
            else:
                search.heard(await self.ask(self.lines.line(step), search.attempt_seconds(time.monotonic())))
        return search

    async def ask(self, line: _AioLine, seconds: float) -> Instance | SowError:
        """As `Transport.ask`."""
        address = line.address.target
        call = None
        try:
            with unless_closed():
                call = admin_pb2_grpc.AdminServiceStub(_aio_on(line)).DescribeInstance(
                    admin_pb2.DescribeInstanceRequest(), timeout=seconds
                )
                async for response in call:
                    return _failover.instance_of(line.address, response)
            return _failover.no_server(address)
        except grpc.RpcError as error:
            if not _is_unknown(error):
                return _answer_of(error, address, seconds)
        except SowError as error:
            return error  # the client is closed
        finally:
            if call is not None:
                call.cancel()
        try:
            with unless_closed():
                check: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = line.channel.unary_unary(HEALTH_CHECK)
                return _failover.undescribed(
                    line.address, serving=await check(_HEALTH_OF_SOW, timeout=seconds) == _SERVING
                )
        except grpc.RpcError as error:
            return _answer_of(error, address, seconds)
        except SowError as error:
            return error  # the client is closed

    async def _reach(self, home: Home, seconds: float | None) -> _AioLine:
        """As `Transport._reach`."""
        line = home.line
        assert line is not None, "it has begun"
        timeout = self._timeout if seconds is None else min(seconds, self._timeout)
        search = Search((line.address,), now=time.monotonic(), seconds=timeout)
        while not self.is_closed and (step := search.step(time.monotonic())) is not None:
            if isinstance(step, float):
                await asyncio.sleep(step)
            else:
                search.heard(await self.ask(line, search.attempt_seconds(time.monotonic())))
        if self.is_closed:
            raise closed("client")
        if search.found is None:
            raise _failover.keeps_to(home.what, line.address.target, search.failure())
        return line

    def _use(self, search: Search, reason: str) -> _Move | None:
        """As `Transport._use`."""
        assert search.found is not None, "the search has found one"
        address, instance = search.found
        line = self.lines.line(address)
        ended, move = self.lines.use(line, instance)
        self._look_again = time.monotonic() + LOOK_AGAIN_SECONDS
        if line.watch is None and instance.name:
            line.watch = asyncio.create_task(self._watch(line), name="sow-watch")
        _cancel(ended)
        return None if move is None else (*move, reason)

    def _tell(self, move: _Move | None) -> None:
        if move is not None and self._on_failover is not None:
            self._on_failover(*move)

    async def _watch(self, line: _AioLine) -> None:
        """As `_watch` of a blocking client."""
        watch = asyncio.current_task()
        while line.watch is watch and not self.is_closed:
            reason, call = "UNREACHABLE", None
            try:
                with unless_closed():
                    call = admin_pb2_grpc.AdminServiceStub(_aio_on(line)).DescribeInstance(
                        admin_pb2.DescribeInstanceRequest(watch=True)
                    )
                    async for response in call:
                        if not response.serving and line.instance is not None and line.instance.serving:
                            reason = "NOT_SERVING"
                            break
                    else:
                        reason = "STOPPING"
            except grpc.RpcError as error:
                told = reason_of(error)
                if (told is not None and told not in _failover.LOSSES) or _is_unknown(error):
                    await asyncio.sleep(LOOK_AGAIN_SECONDS)  # refused for now; the next call tells more
                    continue
                reason = told or reason
            except SowError:
                return  # the client is closed
            finally:
                if call is not None:
                    call.cancel()
            if line.watch is watch:
                line.watch = None
                _cancel(self.lines.leave(line, reason))
            return
