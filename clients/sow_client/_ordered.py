"""A snapshot in an order: a query, and then a subscription from its bookmark, as the frames of one call (rule S1).

    view ──▶ records ──▶ changes
    the name of what the caller sees (F4), the answer to the query, and the changes after the position of the query

`OrderedSnapshot` decides, without I/O. The two calls only make the calls that it asks for, and take the place of a
Subscribe for the machines of subscriptions: a snapshot that breaks off begins anew, with a "resync".

    [1]  The subscription begins at the position at which the query was cut. So no change is lost, and none comes twice.
    [2]  It has the name of what the caller saw before the query. If that has changed, the server asks for another
         snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from sow.v1 import sow_pb2
from sow_client import _reads, _transport
from sow_client._records import invalid

Asked = sow_pb2.SubscribeRequest | sow_pb2.QueryRequest


class _Call(Protocol):
    def cancel(self) -> object: ...


class ReadCall(_Call, Protocol):
    """A stream of responses."""

    def __next__(self) -> object: ...


class AioReadCall(_Call, Protocol):
    """A stream of responses."""

    async def read(self) -> object: ...


class OrderedSnapshot:
    """Owns where one such call stands."""

    def __init__(self, request: sow_pb2.SubscribeRequest, query: sow_pb2.QueryRequest) -> None:
        self._request = request
        self._query = query
        self._view = b""
        self._bookmark = ""
        self.asks: Asked | None = self._first()
        """The next call to make, in the place of the one before; None: go on with that one."""

    def _first(self) -> sow_pb2.SubscribeRequest:
        """A snapshot of the same view, of which only the beginning is read. With all options: those that the server
        refuses are told before the first record."""
        request = sow_pb2.SubscribeRequest()
        request.CopyFrom(self._request)
        request.snapshot_max = request.batch_size = 1
        return request

    def take(self, response: object) -> object | None:
        """The frame that a response makes; None: read on."""
        if isinstance(response, sow_pb2.QueryResponse):
            return self._take_answer(response)
        if self._bookmark or not isinstance(response, sow_pb2.SubscribeResponse):
            return response  # a change; or the end, which the subscription takes for a cut
        self._view = response.snapshot_begin.view
        self.asks = self._query
        return None

    def _take_answer(self, response: sow_pb2.QueryResponse) -> sow_pb2.SubscribeResponse | None:
        frame = sow_pb2.SubscribeResponse()
        match response.WhichOneof("response"):
            case "header":
                header = response.header
                self._bookmark = header.bookmark
                frame.snapshot_begin.bookmark = header.bookmark
                frame.snapshot_begin.as_of_micros = header.as_of_micros
                frame.snapshot_begin.view = self._view
            case "batch":
                frame.snapshot.topic = self._request.topic
                frame.snapshot.records.CopyFrom(response.batch)
            case "footer":
                footer = response.footer
                frame.snapshot_end.bookmark = self._bookmark
                frame.snapshot_end.truncated = footer.matched > footer.returned
                frame.snapshot_end.absent_fields.extend(footer.absent_fields)
                self.asks = self._rest()
            case _:
                return None  # of a newer server
        return frame

    def _rest(self) -> sow_pb2.SubscribeRequest:
        """The changes after the position of the query ([1], [2])."""
        request = sow_pb2.SubscribeRequest()
        request.CopyFrom(self._request)
        request.sow = False
        request.bookmark = self._bookmark
        request.view = self._view
        return request


class OrderedCall:
    """Takes the place of a Subscribe in the blocking client. One thread reads; any thread cancels."""

    def __init__(self, snapshot: OrderedSnapshot, call_of: Callable[[Asked], ReadCall]) -> None:
        """`call_of`: makes a call."""
        self._snapshot = snapshot
        self._call_of = call_of
        self._call: ReadCall | None = None
        self._cancelled = False

    def __next__(self) -> sow_pb2.SubscribeResponse:
        while True:
            asked, self._snapshot.asks = self._snapshot.asks, None
            if asked is not None:
                self._end()
                self._call = self._call_of(asked)
            if self._cancelled:  # looked at after the call is known to `cancel`: one of both sees the other
                self._end()
            assert self._call is not None, "the first one was asked for"
            frame = self._snapshot.take(next(self._call))
            if isinstance(frame, sow_pb2.SubscribeResponse):
                return frame

    def cancel(self) -> None:
        """Ends it."""
        self._cancelled = True
        self._end()

    def _end(self) -> None:
        call = self._call
        if call is not None:
            call.cancel()


class AioOrderedCall:
    """`OrderedCall` for tasks."""

    def __init__(self, snapshot: OrderedSnapshot, call_of: Callable[[Asked], AioReadCall]) -> None:
        self._snapshot = snapshot
        self._call_of = call_of
        self._call: AioReadCall | None = None
        self._cancelled = False

    async def read(self) -> object:
        """The next frame; anything else is the end."""
        while not self._cancelled:
            asked, self._snapshot.asks = self._snapshot.asks, None
            if asked is not None:
                self._end()
                with _transport.unless_closed():
                    self._call = self._call_of(asked)
            assert self._call is not None, "the first one was asked for"
            response = await self._call.read()
            frame = self._snapshot.take(response)
            if frame is not None:
                return frame
        return None

    def cancel(self) -> None:
        """Ends it."""
        self._cancelled = True
        self._end()

    def _end(self) -> None:
        if self._call is not None:
            self._call.cancel()


def snapshot_query(
    request: sow_pb2.SubscribeRequest, order_by: str | Iterable[str] | None, top_n: int | None
) -> sow_pb2.QueryRequest | None:
    """The query for the snapshot of a request; None: it is in the order of keys, and part of the subscription. Raises
    InvalidArgument for options that do not go together."""
    if order_by is None:
        if top_n is not None:
            raise invalid("top_n", "only with order_by; snapshot_max bounds a snapshot in the order of keys")
        return None
    if not request.topic:
        raise invalid("order_by", "only with one topic")
    if request.snapshot_max:
        raise invalid("snapshot_max", "not with order_by, where top_n bounds the snapshot")
    query = _reads.query_request(
        request.topic, request.filter, order_by=order_by, batch_size=request.batch_size, top_n=top_n
    )
    query.select.CopyFrom(request.select)
    for name, value in request.parameters.items():
        query.parameters[name].CopyFrom(value)
    return query
