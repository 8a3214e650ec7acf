"""The lines of a client: one for each address, with its channel; which of them is in use; and what keeps to one.

`Lines` is the part that both transports share: it opens channels, and makes no calls.

    [1]  At most one line is in use. The others keep their channels. Such a channel closes its connection once its last
         call has ended, and connects again when it is asked.
    [2]  A move ends the subscriptions on the line that was left, so that they begin again on the new one.
    [3]  The cluster of a client is that of the first instance that has one; it never changes.
    [4]  After a fork the child opens channels of its own, and keeps those of the parent (_process [2]).
"""

from __future__ import annotations

import os
import random
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar, cast

import grpc

from sow_client import _channel, _process
from sow_client._addresses import Address, Prefer, checked_preference, expanded, is_name, ordered, parsed
from sow_client._channel import CheckedChannel, Options, Tls, bearer, credentials_of
from sow_client._failover import Instance
from sow_client._statuses import closed, error_like
from sow_client._tokens import Bearer, Token
from sow_client.errors import SowError

OnFailover = Callable[[Instance, Instance, str], object]
"""Gets the instance that was left, the one now in use, and the reason, such as "UNREACHABLE" or "ASKED"."""
ASKED: Final = "ASKED"
"""The reason of a move that the program has asked for."""
KEPT_MAX: Final = 10_000
"""Exports, loads and publishers whose instance a client remembers; of more, the oldest are forgotten."""

_Channel = TypeVar("_Channel")
_Method = TypeVar("_Method")


class Cancellable(Protocol):
    """A call."""

    def cancel(self) -> object: ...


def cancel(calls: Iterable[Cancellable]) -> None:
    """Ends calls."""
    for call in calls:
        call.cancel()


class Line(Generic[_Channel]):
    """The channel to one address, and what is known of the instance there."""

    def __init__(self, address: Address, channel: _Channel, *, measured: bool, shown: Bearer | None) -> None:
        self.address = address
        self.channel = channel
        self.instance: Instance | None = None
        """The last that was found there."""
        self.contract = 0
        """The version of the contract that it serves; 0: not known."""
        self.watch: Cancellable | None = None
        """The call that tells when it no longer serves."""
        self.followers: weakref.WeakSet[Cancellable] = weakref.WeakSet()
        """The subscriptions that a move ends ([2])."""
        self.calls = CheckedChannel(cast(grpc.Channel, channel), measured=measured, bearer=shown)
        self._methods: dict[str, Callable[..., Any]] = {}

    def method(self, kind: str, path: str, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Callable[..., Any]:
        """A method on this channel, made at its first use."""
        found = self._methods.get(path)
        if found is None:
            found = self._methods[path] = getattr(self.calls, kind)(path, *arguments, **named)
        return found


class Home:
    """Something that is at one instance at a time, such as an export: its calls go there, also after a move."""

    __slots__ = ("__weakref__", "call", "cell", "line", "moves", "what")

    def __init__(self, what: str, line: Line[Any] | None = None) -> None:
        """`what` names it in errors. `line`: None until its first call."""
        self.what = what
        self.line = line
        self.moves = False
        """It goes on elsewhere after all: it is a replicated durable (rule F17)."""
        self.call: Cancellable | None = None
        """The call of its consumer."""
        self.cell = ""
        """The key of the cell to which `line` belongs; "": the client's own (_cells)."""

    def cancel(self) -> None:
        """A move of the client takes it along, if it moves."""
        if self.moves and self.call is not None:
            self.call.cancel()


class Homes:
    """Remembers the instance of things by their ids. Owned by a client; from any thread."""

    def __init__(self) -> None:
        self._found: dict[str, Home] = {}
        self._lock = threading.Lock()
        _process.tell(self)

    def _forked(self) -> None:
        self._lock = threading.Lock()  # `Lines.own` finds the lines of this process

    def keep(self, thing: str, home: Home) -> None:
        """Remembers one, by the id of an export, a load or a publisher."""
        with self._lock:
            self._found[thing] = home
            if len(self._found) > KEPT_MAX:
                del self._found[next(iter(self._found))]

    def of(self, thing: str) -> Home | None:
        """The home of what another call has made; None: another client made it, or it was long ago."""
        return self._found.get(thing)


class Method:
    """A method as the generated stubs get it: each call finds the line in use."""

    __slots__ = ("_arguments", "_current", "_kind", "_named", "path")

    def __init__(
        self,
        current: Callable[[], Line[Any]],
        kind: str,
        path: str,
        arguments: tuple[Any, ...],
        named: Mapping[str, Any],
    ) -> None:
        self.path = path
        self._current = current
        self._kind = kind
        self._arguments = arguments
        self._named = named

    def __call__(self, request: Any, timeout: float | None = None) -> Any:
        return self.at(self._current())(request, timeout)

    def at(self, line: Line[Any]) -> Callable[..., Any]:
        """The method on a certain line."""
        return line.method(self._kind, self.path, self._arguments, self._named)


class CurrentChannel:
    """A channel for the generated stubs: calls go to the line that is in use at that time."""

    def __init__(self, current: Callable[[], Line[Any]]) -> None:
        self._current = current

    def unary_unary(self, path: str, *arguments: Any, **named: Any) -> Method:
        """As gRPC's."""
        return Method(self._current, "unary_unary", path, arguments, named)

    def unary_stream(self, path: str, *arguments: Any, **named: Any) -> Method:
        """As gRPC's."""
        return Method(self._current, "unary_stream", path, arguments, named)

    def stream_stream(self, path: str, *arguments: Any, **named: Any) -> Method:
        """As gRPC's."""
        return Method(self._current, "stream_stream", path, arguments, named)


def path_of(method: object) -> str:
    """The path of a method of a stub; "": it is not on a channel of a client's own."""
    return method.path if isinstance(method, Method) else ""


def at(line: Line[Any], method: _Method) -> _Method:
    """A method of a stub on a certain line."""
    return cast(_Method, method.at(line)) if isinstance(method, Method) else method


class Lines(Generic[_Channel]):
    """Owns the lines of a client, and knows which one is in use."""

    def __init__(
        self,
        server: str | Iterable[str],
        tls: Tls | None,
        channel: _Channel | None,
        token: Token | None,
        opened: Callable[[str, grpc.ChannelCredentials | None, Options], _Channel],
        *,
        prefer: Prefer,
    ) -> None:
        """`channel`: the program's own. `opened` opens one. Raises InvalidArgument."""
        self.servers = parsed(server)
        self.current: Line[_Channel] | None = None
        """The line in use; None: there is none yet, or its instance is lost."""
        self.last: Line[_Channel] | None = None
        """The last one in use."""
        self.lost = ""
        """Why `last` is not in use any more."""
        self.cluster = ""
        self.is_own = channel is None
        """The client opened its channels, and closes them."""
        self.single: Line[_Channel] | None = None
        """The only line, where the client has one address."""
        self.tls: Final = tls
        self._credentials = credentials_of(tls) if channel is None else None
        self._shown = None if channel is not None else self._checked_bearer(token)
        self._opened = opened
        self._lines: dict[Address, Line[_Channel]] = {}
        self._prefer: Final = checked_preference(prefer)
        self._seed = random.getrandbits(64)
        self._lock = threading.Lock()  # of the lines, their followers, and the end
        self._is_closed = False
        if channel is not None:
            self.use_single(Line(Address(self.servers[0]), channel, measured=False, shown=None))
        elif len(self.servers) == 1 and not self.names:
            self.use_single(self.line(Address(self.servers[0]), of_many=False))

    def _checked_bearer(self, token: Token | None) -> Bearer | None:
        shown = None
        for server in self.servers:
            shown = bearer(token, server, self.tls)
        return shown

    @property
    def names(self) -> tuple[str, ...]:
        """The addresses whose name may have several."""
        return tuple(server for server in self.servers if is_name(server, os.environ))

    def order(self, found: Mapping[str, Sequence[str]]) -> tuple[Address, ...]:
        """All addresses, the preferred one first. `found`: the IP addresses of `names`."""
        return ordered(expanded(self.servers, found), self._prefer, self._seed)

    def line(self, address: Address, *, of_many: bool = True) -> Line[_Channel]:
        """The line of an address, made at its first use. Raises Cancelled (CLOSED) after `close`."""
        with self._lock:  # else a search, beside `close`, could open a channel that nobody closes
            if self._is_closed:
                raise closed("client")
            found = self._lines.get(address)
            if found is None:
                chosen = _channel.options(address.target, self.tls, host=address.host, of_many=of_many)
                channel = self._opened(address.target, self._credentials, chosen)
                found = self._lines[address] = Line(address, channel, measured=True, shown=self._shown)
            return found

    def forked(self) -> None:
        """This is a child: the lines are the parent's. No channel is opened yet ([4])."""
        _process.keep(self._lines, self.single, self.last, self.current)
        self._lock = threading.Lock()
        self._lines = {}
        self._seed = random.getrandbits(64)
        self.current, self.lost = None, ""
        if self.single is None:
            self.last = None

    def begin_anew(self) -> None:
        """The first call of a child. Raises FailedPrecondition (FORKED) for a channel of the program's."""
        if not self.is_own:
            raise _process.forked("channel")
        if (parents := self.single) is not None:
            self.use_single(self.line(parents.address, of_many=False))

    def own(self, line: Line[_Channel]) -> Line[_Channel]:
        """The line of this process to the address of a line."""
        return line if line is self.single or not self.is_own else self.line(line.address)

    def close(self) -> list[_Channel]:
        """No channel is opened from now on. Returns those that the client has opened."""
        with self._lock:
            self._is_closed = True
            return [line.channel for line in self._lines.values()]

    @property
    def opened(self) -> list[Line[_Channel]]:
        """The lines with a channel of the client's own."""
        with self._lock:
            return list(self._lines.values())

    def use_single(self, line: Line[_Channel]) -> None:
        """The client has one address."""
        self.single = self.current = self.last = line

    def present(self) -> Line[_Channel]:
        """The line for a call: the one in use, or the last one, where the call will find that it is lost."""
        line = self.current or self.last
        assert line is not None, "a call is made once a line is ready"
        return line

    @property
    def present_instance(self) -> Instance | None:
        """The instance in use, or the last one."""
        return None if self.last is None else self.last.instance

    def named(self, error: SowError) -> SowError:
        """The error of a call, with the address where the server does not know the call at all."""
        if error.reason != "UNIMPLEMENTED":
            return error
        return error_like(error, f"{self.present().address.target}: {error.message}")

    def leave(self, line: Line[_Channel], reason: str) -> list[Cancellable]:
        """The instance of a line no longer serves. Returns the calls to end, if it was the last one in use: the failure
        of another call may have told so before."""
        if self.last is not line or line is self.single:
            return []
        if self.current is line:
            self.current, self.lost = None, reason
        return self._ended(line)

    def doubt(self, reason: str) -> None:
        """A call has failed in a way that a lost instance would explain: the next call looks for one that serves."""
        if self.single is not None:
            self.single.contract = 0  # the next one at its address may be an older one
        elif self.current is not None:
            self.current, self.lost = None, reason

    def use(
        self, line: Line[_Channel], instance: Instance
    ) -> tuple[list[Cancellable], tuple[Instance, Instance] | None]:
        """Uses a line from now on. Returns calls of the last one to end, and the two instances if that is a move."""
        before, last = None if self.last is None else self.last.instance, self.last
        self.current = self.last = line
        line.instance, line.contract = instance, instance.contract
        self.cluster = self.cluster or instance.cluster
        ended = [] if last is None or last is line else self._ended(last)
        if before is None or (before.address, before.id) == (instance.address, instance.id):
            return ended, None
        return ended, (before, instance)

    def _ended(self, line: Line[_Channel]) -> list[Cancellable]:
        with self._lock:
            calls = list(line.followers)
        if line.watch is not None:
            calls.append(line.watch)
            line.watch = None
        return calls

    def follows(self, line: Line[_Channel], call: Cancellable) -> bool:
        """A subscription has begun on a line. False: the line was left meanwhile, so it is to be ended."""
        if line is self.single:
            return True
        with self._lock:
            line.followers.add(call)
        return line is self.current or line is self.last


def last_first(order: Sequence[Address], last: Line[Any] | None) -> list[Address]:
    """The order of a search: the instance in use first (failover [2])."""
    first = [] if last is None else [address for address in order if address == last.address]
    return [*first, *(address for address in order if address not in first)]
