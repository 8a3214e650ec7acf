"""The base of the client: its connection, and calls that have one answer."""

from __future__ import annotations

import asyncio
import copy
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import Final, Self, TypeVar

import grpc
import grpc.aio

from sow.v1 import access_pb2_grpc, admin_pb2, admin_pb2_grpc, load_pb2_grpc, snapshot_pb2_grpc, sow_pb2, sow_pb2_grpc
from sow_client import _failover, _lines, _statuses, _timeouts, _transport
from sow_client._addresses import Prefer, checked_preference
from sow_client._cells import ELSEWHERE, Cells, Place, Way, topic_of
from sow_client._channel import (
    CONNECT_SECONDS,
    FAILOVER_PUBLISH_VARIABLE,
    PREFER_VARIABLE,
    Tls,
    from_environment,
)
from sow_client._contract import KNOWN_ELSEWHERE, Needed, needed
from sow_client._documents import Document, encode
from sow_client._failover import FailoverPublish, Instance, Step
from sow_client._lines import Home, Homes, Line, OnFailover
from sow_client._payloads import Encoded, PayloadForm
from sow_client._publish_core import OpenedPublisher
from sow_client._records import UNKNOWN_FORM, invalid
from sow_client._settings import form_of_settings
from sow_client._tokens import Token
from sow_client._workers import aio_together
from sow_client.aio._moving import AsyncTransport
from sow_client.errors import InvalidArgument, NotFound, SowError

_UNTOLD: Final = frozenset({"PERMISSION_DENIED", "UNIMPLEMENTED"})
"""Reasons for which a server does not tell the message type of a topic. Then documents are JSON."""
_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class AsyncCalls:
    """Owns the connection and the stubs."""

    def __init__(
        self,
        server: str | Iterable[str] | None = None,
        *,
        tls: Tls | None = None,
        token: Token | None = None,
        timeout: float | None = 30.0,
        connect_timeout: float | None = None,
        channel: grpc.aio.Channel | None = None,
        prefer: Prefer | None = None,
        failover_publish: FailoverPublish | None = None,
        on_failover: OnFailover | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`server` is HOST or HOST:PORT, or several instances: "a:7450,b:7450" or ["a:7450", "b:7450"]. The client uses
        one of them at a time, the first that serves, or with `prefer="random"` one that it draws.

        An argument that is not given comes from the environment, as for the command `sow`: SOW_SERVER (else
        127.0.0.1:7450), SOW_TLS_CA, SOW_TLS_CERT, SOW_TLS_KEY and SOW_TLS_SERVER_NAME (any of them turns TLS on),
        SOW_TOKEN_FILE, SOW_PREFER, SOW_FAILOVER_PUBLISH. `environment` has other variables than those of the process;
        with {} only the arguments count.

        `timeout` bounds each call that has one answer, `connect_timeout` the wait for a connection; both in seconds.
        `math.inf` is no bound, nor is None for `timeout`. By default `connect_timeout` is 5 s, and the first call does
        not wait where the server refuses, or all of several do. A `channel` from the program is used as it is, and
        stays open; it shows its own credentials. `token` is shown with each call: a text, a file, or a function. It
        never goes to another machine in plain text. A publish of which it is unknown whether the lost instance has it
        is made again at another one, where it is a duplicate if it has arrived; with `failover_publish="unsent"` it
        fails instead. `on_failover` gets the instance that was left, the one now in use, and the reason of the move:
        reads may be older from then on.

        Where there are several cells, these are the addresses of one of them. The client goes to the other ones by
        itself, with the same TLS and token, as this cell names them.

        Rules: F1, F12, F13, F3, C10.
        """
        variables: Mapping[str, str] = os.environ if environment is None else environment
        named = from_environment({} if channel is not None else variables)
        self._timeout = _timeouts.SECONDS_MAX if timeout is None else _timeouts.seconds(timeout, "timeout")
        given = CONNECT_SECONDS if connect_timeout is None else connect_timeout
        self._connect_timeout = _timeouts.seconds(given, "connect_timeout")
        opened = partial(
            AsyncTransport,
            tls=tls or named.tls,
            connect_timeout=self._connect_timeout,
            channel=None,
            token=named.token if token is None else token,
            prefer=checked_preference(prefer or variables.get(PREFER_VARIABLE) or "first"),
            on_failover=on_failover,
            patient=connect_timeout is not None,
        )
        self._failover_publish = _failover.checked_mode(
            failover_publish or variables.get(FAILOVER_PUBLISH_VARIABLE) or "again"
        )
        self._is_part = False
        """It is a client of `cells()`, whose channels are another's."""
        transport = opened(named.server if server is None else server, channel=channel)
        self._begin(transport, opened if channel is None else None)

    def _begin(self, transport: AsyncTransport, opened: Callable[[str], AsyncTransport] | None) -> None:
        """`opened`: as that of `Cells`."""
        self._transport = transport
        """The way to the addresses that were given; `_cells` has those of all cells."""
        self._cells = Cells(transport, opened)
        self._parts: dict[str, Self] = {}
        """The clients of `cells()`, by the keys of their places."""
        self._homes = Homes()
        self._sow = sow_pb2_grpc.SowServiceStub(self._transport.calls)
        self._admin = admin_pb2_grpc.AdminServiceStub(self._transport.calls)
        self._snapshots = snapshot_pb2_grpc.SnapshotServiceStub(self._transport.calls)
        self._access = access_pb2_grpc.AccessServiceStub(self._transport.calls)
        self._load = load_pb2_grpc.LoadServiceStub(self._transport.calls)
        self._forms: dict[str, PayloadForm] = {}
        """The forms of the topics to which documents were published."""

    def __repr__(self) -> str:
        others = ", ".join(dict.fromkeys(place.cell for place in self._cells.others))
        state = (f", also of the cells {others}" if others else "") + (", closed" if self._transport.is_closed else "")
        return f"{type(self).__name__}({self._transport.server!r}{state})"

    @property
    def instance(self) -> Instance | None:
        """The instance in use; None before the first call, and where the client has one address. Of several cells it is
        that of the client's own."""
        return self._transport.lines.present_instance

    def instance_of(self, topic: str) -> Instance | None:
        """`instance`, in the cell of a topic, as far as the client knows it by now. Rule: C10."""
        return self._cells.way(topic).place.transport.lines.present_instance

    def servers_of(self, topic: str) -> str:
        """The addresses to which calls for a topic go: those of its cell, as far as the client knows it by now, such as
        "a:7450,b:7450". Rule: C10."""
        return self._cells.way(topic).place.transport.server

    async def go_back(self) -> Instance | None:
        """Moves to the first instance of the list that serves, if that is another one than the one in use; a client
        never does so by itself. Returns the instance in use; None where the client has one address. It does so in each
        cell that the client uses."""
        instance = await self._transport.go_back()
        for place in self._cells.others:
            await place.transport.go_back()
        return instance

    @property
    def here(self) -> Self:
        """A client of the same server that stays in its cell: its lists are of that cell alone, and it raises
        TOPIC_ELSEWHERE for a topic of another one. It has the settings and connections of this client, and ends with
        it. Rule: C19."""
        return self._part(self._cells.home)

    async def cells(self) -> dict[str, Self]:
        """A client of each cell of the name space, by its name, such as `client.cells()["b"].status()`. Each stays in
        its cell, as that of `here`. The server names the cells: where there are none, {"": …}; with a `channel` of the
        program, its cell alone. Raises InvalidArgument where this client cannot go to one of them.

        Rules: C11, C19.
        """
        return {cell: self._part(place) for cell, place in (await self._all_places()).items()}

    async def in_each_cell(self, ask: Callable[[Self], Awaitable[_Response]]) -> dict[str, _Response | SowError]:
        """Makes a call in all cells at the same time, such as `client.in_each_cell(lambda one: one.status())`. Returns
        its results by cell, and its error where it has failed. `ask` gets the clients of `cells`.

        Rule: C19.
        """
        return await self._in_cells(lambda place: ask(self._part(place)))

    def _part(self, place: Place[AsyncTransport]) -> Self:
        if self._is_part:
            return self
        part = self._parts.get(place.key)
        if part is None:
            part = copy.copy(self)
            part._begin(place.transport, None)
            part._is_part = True
            part = self._parts.setdefault(place.key, part)
        return part

    async def _all_places(self) -> Mapping[str, Place[AsyncTransport]]:
        """All cells by their names, as home names them now. Raises InvalidArgument where this client cannot go to one
        of them. Rule: C19."""
        await self._learn_cells()
        for refused in self._cells.refused.values():
            raise refused
        return self._cells.all

    async def _learn_cells(self) -> None:
        if not self._cells.is_to_ask(self._transport.connection):
            return
        told = None
        try:
            told = await self._call(self._admin.GetPlacement, admin_pb2.GetPlacementRequest())
        except SowError as error:
            if error.reason != "UNIMPLEMENTED":
                raise
        self._cells.placed(told, self._transport.connection)

    async def _in_cells(
        self, ask: Callable[[Place[AsyncTransport]], Awaitable[_Response]]
    ) -> dict[str, _Response | SowError]:
        """The results of a call in all cells, by their names, and errors. Raises that of home if it names no cells."""
        answers: dict[Place[AsyncTransport], _Response | SowError] = {}

        async def asked(place: Place[AsyncTransport]) -> None:
            try:
                answer: _Response = await ask(place)
            except SowError as error:
                answers[place] = error
            else:
                answers[place] = answer

        calls: list[Callable[[], Awaitable[object]]] = [partial(asked, place) for place in self._cells.all.values()]
        if asks := self._cells.is_to_ask(self._transport.connection):
            calls.append(self._learn_cells)
        await aio_together(calls)
        if not asks:
            await self._learn_cells()  # the call may have connected anew
        places = self._cells.all
        if new := [partial(asked, place) for place in places.values() if place not in answers]:
            await aio_together(new)
        return {cell: answers[place] for cell, place in places.items()} | dict(self._cells.refused)

    async def _everywhere(
        self, method: grpc.aio.UnaryUnaryMultiCallable[_Request, _Response], request: _Request
    ) -> dict[str, _Response]:
        """The answers of all cells to a request that changes nothing, by the names of the cells. Whole, or the error of
        the first cell that has not answered. A request with a topic goes to its cell alone; the name of home is "" if
        it is the only one. Rule: C19."""
        if topic := topic_of(request):
            way = self._cells.way(topic)
            response = await self._call(method, request, way=way)
            return {await self._name_of(way): response}
        found: dict[str, _Response] = {}
        answers = await self._in_cells(lambda place: self._call(method, request, way=self._cells.at(place)))
        for cell, answer in answers.items():
            if isinstance(answer, SowError):
                raise answer
            found[cell] = answer
        return found

    async def _name_of(self, way: Way[AsyncTransport]) -> str:
        """The name of the cell in which a call has ended, as lists of all cells have it; "" if it is the only one."""
        if way.place is self._cells.home:
            await self._learn_cells()
        return self._cells.name_of(way.place)

    async def _in_each(
        self, method: grpc.aio.UnaryUnaryMultiCallable[_Request, _Response], request: _Request, *, missing: str = ""
    ) -> list[_Response]:
        """The answers of all cells to a change of something that each of them has, such as a policy. One that fails
        keeps no other from making the change; then the first error is raised. `missing`: the reason for which cells may
        refuse, unless all do. Rule: C19."""
        found = await self._in_cells(lambda place: self._call(method, request, once=True, way=self._cells.at(place)))
        answers = [one for one in found.values() if not isinstance(one, SowError)]
        errors = [one for one in found.values() if isinstance(one, SowError)]
        refused = [error for error in errors if error.reason != missing]
        if refused or not answers:
            raise (refused or errors)[0]
        return answers

    async def _way_of(self, shown: str) -> tuple[Way[AsyncTransport], str]:
        """The way to something by its id in a list over all cells, and its id there."""
        cell, slash, number = shown.partition("/")
        if slash:
            await self._learn_cells()
            places, refused = self._cells.all, self._cells.refused
            if cell in refused:
                raise refused[cell]
            if len(places) + len(refused) > 1:
                if cell not in places:
                    raise invalid("id", f"{shown!r}: there is no cell {cell}")
                return self._cells.at(places[cell]), number
        return self._cells.way(""), shown

    async def close(self) -> None:
        """Closes the connections; calls in progress end. A client of `cells` ends with the one that it comes from."""
        if self._is_part:
            return
        for transport in self._cells.close():
            await transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _encoded(self, topic: str, data: Document) -> tuple[bytes, str]:
        """The payload of a document for a topic, and how it was encoded: in the topic's message type. Bytes and text
        are the program's own."""
        if isinstance(data, bytes | bytearray | memoryview | str):
            return encode(data), data.encoded_as if isinstance(data, Encoded) else ""
        form = await self._form(topic)
        return form.encode(data), form.encoded_as

    async def _form(self, topic: str, anew: bool = False, *, at_most: float | None = None) -> PayloadForm:
        """The form of a topic's payloads, asked for once, or `anew`. A topic that is not there is a json topic, once a
        publish makes it; until then its form is not known."""
        form = None if anew else self._forms.get(topic)
        if form is None:
            request = admin_pb2.DescribeTopicRequest(name=topic)
            try:
                response = await self._call(self._admin.DescribeTopic, request, at_most=at_most)
            except (NotFound, InvalidArgument):
                return UNKNOWN_FORM
            except SowError as error:
                if error.reason not in _UNTOLD:
                    raise
                form = PayloadForm()
            else:
                form = form_of_settings(response.topic.settings)
            self._forms[topic] = form
        return form

    def _failover_in(self, place: Place[AsyncTransport]) -> FailoverPublish:
        # With one address there is no other instance: a full disk ends a publisher at once.
        return self._failover_publish if place.transport.moves_max else "unsent"

    async def _begin_epoch(self, way: Way[AsyncTransport], publisher_id: str, unit: int) -> OpenedPublisher:
        request = sow_pb2.OpenPublisherRequest(publisher_id=publisher_id, unit=unit)
        home = Home(f"the publisher {publisher_id}")
        response = await self._call(self._sow.OpenPublisher, request, home=home, way=way)
        self._homes.keep(f"publisher {publisher_id}", home)
        return OpenedPublisher(
            response.publisher_epoch, response.unit_done, response.unit_records, response.publisher_token
        )

    async def _call(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[_Request, _Response],
        request: _Request,
        *,
        once: bool = False,
        unbounded: bool = False,
        at_least: float = 0.0,
        at_most: float | None = None,
        home: Home | None = None,
        goes: bool = True,
        renews: bool = False,
        way: Way[AsyncTransport] | None = None,
    ) -> _Response:
        """Makes a call with one answer, in the cell of its topic. A second attempt follows when the connection breaks,
        unless `once`; where it may go, `_failover.CALLS` says. `home`: it keeps to that instance. `goes`: false if it
        goes elsewhere only if it was not sent. `renews`: it is a get with `touch`. `way`: the caller's own, of a
        request that names no topic.

        The deadline is `timeout`, or `at_least` seconds if that is more; none with `unbounded`. `at_most` bounds it,
        and before it the wait for a connection.
        """
        way = way or self._cells.way(topic_of(request), home)
        while True:
            try:
                return await self._call_at(
                    way.place,
                    method,
                    request,
                    once=once,
                    unbounded=unbounded,
                    at_least=at_least,
                    at_most=at_most,
                    home=home,
                    goes=goes,
                    renews=renews,
                )
            except SowError as error:
                await asyncio.sleep(way.follow(error))

    async def _call_at(
        self,
        place: Place[AsyncTransport],
        method: grpc.aio.UnaryUnaryMultiCallable[_Request, _Response],
        request: _Request,
        *,
        once: bool = False,
        unbounded: bool = False,
        at_least: float = 0.0,
        at_most: float | None = None,
        home: Home | None = None,
        goes: bool = True,
        renews: bool = False,
    ) -> _Response:
        """`_call` in a certain cell."""
        transport = place.transport
        place.begins(home)
        deadline = None if unbounded else max(self._timeout, at_least)
        if at_most is not None:
            deadline = at_most if deadline is None else min(deadline, at_most)
        path = _lines.path_of(method)
        again = not once and transport.is_own
        publishes, needs = path == _failover.REPEATED_HERE, needed(request)
        seconds, moved, doubted = at_most, 0, None
        unknown: SowError | None = None  # why the outcome of an attempt is not known
        while True:
            kept = home is not None and home.line is not None
            line = await transport.await_ready(seconds, home, needs)
            known = line.contract >= KNOWN_ELSEWHERE.contract
            if doubted is not None and not known:
                raise doubted  # this instance would apply it once more
            try:
                with _transport.unless_closed():
                    return await _lines.at(line, method)(request, timeout=deadline)
            except grpc.RpcError as error:
                translated = _statuses.call_error(error, client_closed=transport.is_closed)
                moves, sent = transport.moves_max, not _statuses.never_sent(error)
                step = _failover.next_step(
                    path,
                    translated.reason,
                    again=again,
                    moves=max(0, moves - moved),
                    kept=kept,
                    goes=goes and (known or not publishes),
                    sent=sent,
                    renews=renews,
                )
                transport.doubt(translated.reason)
                if translated.reason == ELSEWHERE and unknown is not None:
                    raise unknown from unknown.__cause__  # the cell that the topic has left may have applied it
                if sent and translated.reason not in _failover.NOT_APPLIED and not _failover.only_reads(path, renews):
                    unknown, unknown.__cause__ = translated, error
                if step is Step.RAISE:
                    raise await transport.explained(translated, line) from error
                if step is Step.ELSEWHERE:
                    if publishes and sent and translated.reason not in _failover.NOT_APPLIED:
                        doubted, doubted.__cause__ = translated, error
                    moved += 1
                    if home is not None:
                        home.line = None
                else:
                    again = False
                    if publishes and goes and known and moves:
                        doubted, doubted.__cause__ = translated, error  # if the instance is lost now, it goes elsewhere
                    elif moves and not kept:
                        home, seconds = Home("a call of unknown outcome", line), _transport.RECONNECT_SECONDS

    async def _answers(
        self,
        method: grpc.aio.UnaryStreamMultiCallable[_Request, _Response],
        request: _Request,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - of the call
    ) -> AsyncGenerator[_Response, None]:
        """The answers of a call that is not repeated, in the cell of its topic. Its end ends the call."""
        way, begun = self._cells.way(topic_of(request)), False
        while True:
            line = await self._ready(way, needs=needed(request))
            call = None
            try:
                with _transport.unless_closed():
                    call = _lines.at(line, method)(request, timeout=timeout)
                    async for response in call:
                        begun = True
                        yield response
                return
            except grpc.RpcError as error:
                failed = await way.place.transport.failure(error)
                if begun:
                    raise way.told(failed) from error
                await asyncio.sleep(way.follow(failed))
            finally:
                if call is not None:
                    call.cancel()

    async def _ready(
        self,
        way: Way[AsyncTransport],
        seconds: float | None = None,
        home: Home | None = None,
        needs: Needed | None = None,
    ) -> Line[grpc.aio.Channel]:
        """The line for the next call of a way, as `await_ready` has it."""
        way.place.begins(home)
        try:
            return await way.place.transport.await_ready(seconds, home, needs)
        except SowError as error:
            raise way.told(error) from error.__cause__
