# Generated from aio/_moving.py by clients/generate_blocking.py. Change that file, then run `make client`.
"""A client's way to its server, or to one of several: the channels, whether they are connected, and the moves.

[1]  A call to a server that is not there fails as Unavailable (UNREACHABLE) after about `connect_timeout` seconds,
     not after the call's own deadline: calls are made only on a channel that is connected.
[2]  A client with one address uses its channel as it is. A client with several uses that of an instance that said
     that it serves, and keeps a call open there that tells when that ends (rule F1).
[3]  One search for an instance runs at a time; all who wait use its result.
[4]  `on_failover` is called once for each move, by the thread or task whose call has moved, without a lock.
[5]  A client that is closed opens no channel and begins no call.
[6]  A request with a field that an older server would ignore is not sent to one (_contract [1]).
[7]  A forked child has channels of its own from its first call on, as if it was made there (_process [2]).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from typing import TypeAlias, cast

import grpc

from sow.v1 import admin_pb2, admin_pb2_grpc
from sow_client import _failover, _process, _transport
from sow_client._addresses import Address, Prefer
from sow_client._channel import Tls, open_channel
from sow_client._connection import CAUSE_SECONDS_MAX, HEALTH_CHECK, Connection
from sow_client._contract import Needed, too_old
from sow_client._failover import Instance, Search
from sow_client._flags import Flag
from sow_client._lines import ASKED, Cancellable, CurrentChannel, Home, Line, Lines, OnFailover, cancel, last_first
from sow_client._statuses import closed, crowded, error_like, error_of_status, reason_of
from sow_client._tokens import Token
from sow_client._transport import Turn, Watch
from sow_client.errors import DeadlineExceeded, SowError

_Line: TypeAlias = Line[grpc.Channel]
_Move: TypeAlias = tuple[Instance, Instance, str]


class Transport:
    """The lines of a client. A channel that the program brings is used as it is, and stays open."""

    def __init__(
        self,
        server: str | Iterable[str],
        tls: Tls | None,
        connect_timeout: float,
        channel: grpc.Channel | None,
        token: Token | None = None,
        *,
        prefer: Prefer = "first",
        on_failover: OnFailover | None = None,
        patient: bool = True,
    ) -> None:
        """`patient`: the first call waits for `connect_timeout` although all addresses refuse (failover [5])."""
        self.lines: Lines[grpc.Channel] = Lines(server, tls, channel, token, open_channel, prefer=prefer)
        self.server = ",".join(self.lines.servers)
        self.is_own = self.lines.is_own
        """The client opened its channels, and closes them."""
        self.calls = cast(grpc.Channel, CurrentChannel(self.lines.present))
        """The channel in use, as the generated stubs get it."""
        self._timeout = connect_timeout
        self._on_failover = on_failover
        self._patient = patient
        self._connection: Connection | None = None
        self._connected = 0
        """The connection on which the server's contract was asked for, by its number."""
        self._searching = Turn()
        self._closing = Flag()
        self._look_again = 0.0
        self._is_parents = False
        """This is a forked child, which has not begun anew ([7])."""
        self._beginning = threading.Lock()
        self._watch_single()
        _process.tell(self)

    def _forked(self) -> None:
        is_closed = self.is_closed
        _process.keep(self._connection)
        self.lines.forked()
        self._connection, self._connected, self._look_again = None, 0, 0.0
        self._searching, self._closing, self._beginning = Turn(), Flag(), threading.Lock()
        if is_closed:
            self._closing.set()
        self._is_parents = True

    def _begin_anew(self) -> None:
        with self._beginning:
            if self._is_parents:
                self.lines.begin_anew()
                self._watch_single()
                self._is_parents = False

    def _watch_single(self) -> None:
        line = self.lines.single
        if line is not None and self.is_own:
            self._connection = Connection(
                line.channel, line.address.target, self._timeout, self.lines.tls, patient=self._patient
            )

    @property
    def is_closed(self) -> bool:
        """True if the client is closed."""
        return self._closing.is_set()

    @property
    def connection(self) -> object:
        """The connection in use; another value as soon as a call has noticed that it is another one."""
        line = self.lines.current
        return line, line and line.watch, self._connection and self._connection.connected

    @property
    def moves_max(self) -> int:
        """The number of times that one call may go on elsewhere; 0: the client has one address."""
        return 0 if self.lines.single is not None else max(2, len(self.lines.opened))

    def await_ready(self, seconds: float | None = None, home: Home | None = None, needs: Needed | None = None) -> _Line:
        """Returns the line for a call once the call can be made: that of `home` if it has one, else the one in use.
        `seconds` and `connect_timeout` both bound the wait. `needs`: what its server has to know ([6]).

        Raises Unavailable (UNREACHABLE), Cancelled (CLOSED) when the client is closed, FailedPrecondition
        (SERVER_TOO_OLD), or the error of a search.
        """
        line = self._ready(seconds, home)
        if needs is not None:
            contract = self._contract_at(line, seconds)
            if contract < needs.contract:
                raise too_old(needs, line.address.target, contract)
        return line

    def _ready(self, seconds: float | None, home: Home | None) -> _Line:
        if self.is_closed:
            raise closed("client")
        _process.check_grpc(self._timeout)
        if self._is_parents:
            self._begin_anew()
        if home is not None and home.line is not None and home.line is not self.lines.current:
            home.line = self.lines.own(home.line)
        if home is not None and home.line is not None and home.line is not self.lines.current:
            return self._reach(home, seconds)
        line = self.lines.current
        if line is not None and line is self.lines.single:
            if self._connection is not None:
                self._connection.await_ready(seconds, looks=seconds is None)
        elif line is None or self._is_to_look(line):
            line = self._find(seconds)
        if home is not None:
            home.line = line
        return line

    def _contract_at(self, line: _Line, seconds: float | None) -> int:
        """The contract that a line's server has, as it said at the beginning of this connection."""
        if self._connection is not None and self._connected != (connected := self._connection.follow()):
            self._connected, line.contract = connected, 0
        if not line.contract:
            found = self.ask(line, self._timeout if seconds is None else min(seconds, self._timeout))
            if isinstance(found, _failover.NoAnswer) and self._is_crowded(line):
                raise DeadlineExceeded(crowded(found.message, line.calls.open_streams), reason="DEADLINE_EXCEEDED")
            if not isinstance(found, Instance):
                raise found
            line.contract = found.contract
        return line.contract

    def doubt(self, reason: str) -> None:
        """A call has failed with this reason."""
        if reason in _failover.LOSSES:
            self.lines.doubt(reason)

    def failure(self, error: grpc.RpcError) -> SowError:
        """The error of a call that is not repeated."""
        translated = error_of_status(error)
        self.doubt(translated.reason)
        return self.explained(translated, self.lines.present())

    def explained(self, error: SowError, line: _Line) -> SowError:
        """An error as the program gets it. Of a call whose time is over it tells whether the client's streams have all
        places of the connection (rule N4)."""
        if error.reason != "DEADLINE_EXCEEDED" or not self._is_crowded(line):
            return self.lines.named(error)
        return error_like(error, crowded(error.message, line.calls.open_streams))

    def _is_crowded(self, line: _Line) -> bool:
        """True if streams are open on a connection, and it answers no other call. In gRPC a call that waits for a place
        looks like one that the server works on."""
        if not line.calls.open_streams:
            return False
        check: grpc.UnaryUnaryMultiCallable[bytes, bytes] = line.channel.unary_unary(HEALTH_CHECK)
        try:
            check(b"", timeout=CAUSE_SECONDS_MAX)
        except grpc.RpcError as error:
            return error_of_status(error).reason == "DEADLINE_EXCEEDED"
        except (SowError, ValueError):  # the client is closed; ValueError comes from gRPC
            pass
        return False

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
        with self._searching.held(self.server, self._timeout):
            order = self.lines.order(_transport.resolved(self.lines.names, self._timeout / 2))
            before = order[: order.index(line.address)] if line.address in order else order
            give_up = time.monotonic() + _transport.GO_BACK_SECONDS
            search = self._search(before, give_up, serving_only=True) if before else None
            move = None if search is None or search.found is None else self._use(search, ASKED)
        self._tell(move)
        return self.lines.present().instance

    def close(self) -> None:
        """Closes the channels; calls in progress end."""
        self._closing.set()
        if self._connection is not None:
            self._connection.close()
        channels = self.lines.close()
        for line in self.lines.opened:
            if line.watch is not None:
                line.watch.cancel()
        _transport.close_channels(channels)

    # ---- several addresses ----

    def _is_to_look(self, line: _Line) -> bool:
        return line.instance is not None and not line.instance.serving and time.monotonic() > self._look_again

    def _find(self, seconds: float | None) -> _Line:
        timeout = self._timeout if seconds is None else min(seconds, self._timeout)
        give_up = time.monotonic() + timeout
        with self._searching.held(self.server, timeout):
            line = self.lines.current
            if line is not None and not self._is_to_look(line):
                return line  # another has found it
            order = self.lines.order(_transport.resolved(self.lines.names, timeout / 2))
            if self.lines.single is None and len(order) == 1:
                self.lines.use_single(self.lines.line(order[0], of_many=False))
                self._watch_single()
                if self.is_closed:  # `close` came before there was a connection, and could not end its waits
                    raise closed("client")
            if (line := self.lines.single) is not None:
                if self._connection is not None:
                    self._connection.await_ready(give_up - time.monotonic(), looks=seconds is None)
                return line
            search = self._search(last_first(order, self.lines.last), give_up)
            if search.found is None:
                raise search.failure()
            move = self._use(search, self.lines.lost)
            line = self.lines.present()
        self._tell(move)
        return line

    def _search(self, order: Sequence[Address], give_up: float, *, serving_only: bool = False) -> Search:
        now = time.monotonic()
        search = Search(
            order,
            now=now,
            seconds=give_up - now,
            cluster=self.lines.cluster,
            serving_only=serving_only,
            patient=self._patient or self.lines.last is not None,
        )
        self._ask_each(search)
        return search

    def _ask_each(self, search: Search) -> None:
        """Asks the addresses of a search until it is over. Raises Cancelled (CLOSED) when the client is closed."""
        while (step := search.step(time.monotonic())) is not None:
            if isinstance(step, float):
                self._closing.wait(step)
            else:
                line = self.lines.line(step)
                search.heard(self.ask(line, search.attempt_seconds(time.monotonic())))
            if self.is_closed:
                raise closed("client")

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
            if not _transport.is_unknown(error):
                return _transport.answer_of(error, address, seconds)
        except SowError as error:
            return error  # the client is closed
        finally:
            if call is not None:
                call.cancel()
        try:
            check: grpc.UnaryUnaryMultiCallable[bytes, bytes] = line.channel.unary_unary(HEALTH_CHECK)
            health = check(_transport.HEALTH_OF_SOW, timeout=seconds)
            return _failover.undescribed(line.address, serving=health == _transport.SERVING)
        except grpc.RpcError as error:
            return _transport.answer_of(error, address, seconds)
        except (SowError, ValueError):  # ValueError comes from gRPC
            return closed("client")

    def _reach(self, home: Home, seconds: float | None) -> _Line:
        """The line of something that keeps to it, once it answers. It need not serve: its reads go on."""
        line = home.line
        assert line is not None, "it has begun"
        timeout = self._timeout if seconds is None else min(seconds, self._timeout)
        search = Search((line.address,), now=time.monotonic(), seconds=timeout)
        self._ask_each(search)
        if search.found is None:
            raise _failover.keeps_to(home.what, line.address.target, search.failure())
        line.contract = search.found[1].contract
        return line

    def _use(self, search: Search, reason: str) -> _Move | None:
        """Uses the line that a search has chosen."""
        assert search.found is not None, "the search has found one"
        address, instance = search.found
        line = self.lines.line(address)
        ended, move = self.lines.use(line, instance)
        self._look_again = time.monotonic() + _transport.LOOK_AGAIN_SECONDS
        if line.watch is None and instance.name:
            line.watch = watch = Watch(self)
            watch.start(_keep_watch, line, watch, self.lines, self._closing)
        cancel(ended)
        return None if move is None else (*move, reason)

    def _tell(self, move: _Move | None) -> None:
        if move is not None and self._on_failover is not None:
            self._on_failover(*move)


def _keep_watch(line: _Line, watch: Watch, lines: Lines[grpc.Channel], closing: Flag) -> None:
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
            if (told is not None and told not in _failover.LOSSES) or _transport.is_unknown(error):
                closing.wait(_transport.LOOK_AGAIN_SECONDS)  # refused for now; the next call tells more
                continue
            reason = told or reason
        except SowError:
            return  # the client is closed, or dropped
        if line.watch is watch:
            cancel(lines.leave(line, reason))
        watch.cancel()
        return


def _on(line: _Line) -> grpc.Channel:
    """The channel of a line as stubs get it."""
    return cast(grpc.Channel, line.calls)
