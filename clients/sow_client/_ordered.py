"""A snapshot in an order: a query, and then a subscription from its bookmark, as the frames of one call (rule S1).

    view ──▶ position ──▶ begin ──▶ records ──▶ changes
    the name of what the caller sees (F4), the header of the answer to the query, the subscription from the position of
    the query, the records of the answer, and the changes after that position

`OrderedSnapshot` decides, without I/O. The two calls only make the calls that it asks for, and take the place of a
Subscribe for the machines of subscriptions: a snapshot that breaks off begins anew, with a "resync".

    [1]  The subscription begins at the position at which the query was cut. So no change is lost, and none comes twice.
    [2]  It has the name of what the caller saw before the query. If that has changed, the server asks for another
         snapshot.
    [3]  It has begun before the first record is handed out, so a refusal comes before all records. NO_JOURNAL came
         behind them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

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


class _Step(enum.Enum):
    """The response that comes next."""

    VIEW = enum.auto()
    POSITION = enum.auto()
    BEGIN = enum.auto()
    RECORDS = enum.auto()
    CHANGES = enum.auto()


class OrderedSnapshot:
    """Owns where one such call stands."""

    def __init__(self, request: sow_pb2.SubscribeRequest, query: sow_pb2.QueryRequest) -> None:
        self._request = request
        self._query = query
        self._view = b""
        self._header = sow_pb2.QueryHeader()
        self._begun: sow_pb2.SubscribeResponse | None = None
        """The first frame of the subscription, until the records before it have been handed out."""
        self._step = _Step.VIEW
        self.asks: Asked | None = self._first()
        """The next call to make; None: go on with those that there are."""

    @property
    def reads_answer(self) -> bool:
        """True if the next response is one of the query, False if it is one of the subscription."""
        return self._step in (_Step.POSITION, _Step.RECORDS)

    def _first(self) -> sow_pb2.SubscribeRequest:
        """A snapshot of the same view, of which only the beginning is read. With all options: those that the server
        refuses are told before the first record."""
        request = sow_pb2.SubscribeRequest()
        request.CopyFrom(self._request)
        request.snapshot_max = request.batch_size = 1
        return request

    def kept(self) -> sow_pb2.SubscribeResponse | None:
        """The first frame of the subscription, once the records have been handed out."""
        if self._step is not _Step.CHANGES:
            return None
        frame, self._begun = self._begun, None
        return frame

    def take(self, response: object) -> object | None:
        """The frame that a response makes; None: read on."""
        expected = sow_pb2.QueryResponse if self.reads_answer else sow_pb2.SubscribeResponse
        if not isinstance(response, expected):
            return response  # the end, which the subscription takes for a cut
        if isinstance(response, sow_pb2.QueryResponse):
            return self._take_answer(response)
        assert isinstance(response, sow_pb2.SubscribeResponse), "the other kind"
        if self._step is _Step.VIEW:
            self._view = response.snapshot_begin.view
            self._step, self.asks = _Step.POSITION, self._query
            return None
        if self._step is _Step.BEGIN:
            self._step, self._begun = _Step.RECORDS, response
            frame = sow_pb2.SubscribeResponse()
            frame.snapshot_begin.bookmark = self._header.bookmark
            frame.snapshot_begin.as_of_micros = self._header.as_of_micros
            frame.snapshot_begin.view = self._view
            return frame
        return response

    def _take_answer(self, response: sow_pb2.QueryResponse) -> sow_pb2.SubscribeResponse | None:
        frame = sow_pb2.SubscribeResponse()
        match response.WhichOneof("response"):
            case "header":
                self._header.CopyFrom(response.header)
                self._step, self.asks = _Step.BEGIN, self._changes()
                return None
            case "batch":
                frame.snapshot.topic = self._request.topic
                frame.snapshot.records.CopyFrom(response.batch)
            case "footer":
                footer = response.footer
                frame.snapshot_end.bookmark = self._header.bookmark
                frame.snapshot_end.truncated = footer.matched > footer.returned
                frame.snapshot_end.absent_fields.extend(footer.absent_fields)
                self._step = _Step.CHANGES
            case _:
                return None  # of a newer server
        return frame

    def _changes(self) -> sow_pb2.SubscribeRequest:
        """The changes after the position of the query ([1], [2])."""
        request = sow_pb2.SubscribeRequest()
        request.CopyFrom(self._request)
        request.sow = False
        request.bookmark = self._header.bookmark
        request.view = self._view
        return request


_OneCall = TypeVar("_OneCall", bound=_Call)


class _Calls(Generic[_OneCall]):
    """Owns the calls of a snapshot: the query, and the subscription."""

    def __init__(self, snapshot: OrderedSnapshot, call_of: Callable[[Asked], _OneCall]) -> None:
        """`call_of`: makes a call."""
        self._snapshot = snapshot
        self._call_of = call_of
        self._answer: _OneCall | None = None
        self._changes: _OneCall | None = None
        self._cancelled = False

    def _make(self) -> None:
        """Makes the call that is asked for. That of the view ends first."""
        asked, self._snapshot.asks = self._snapshot.asks, None
        if isinstance(asked, sow_pb2.QueryRequest):
            self._end()
            self._answer = self._call_of(asked)
        elif asked is not None:
            self._changes = self._call_of(asked)
        if self._cancelled:  # looked at after the call is known to `cancel`: one of both sees the other
            self._end()

    def _kept(self) -> sow_pb2.SubscribeResponse | None:
        frame = self._snapshot.kept()
        if frame is not None and self._answer is not None:
            self._answer.cancel()  # all of it has been read
        return frame

    def _next(self) -> _OneCall:
        """The call that has the next response."""
        call = self._answer if self._snapshot.reads_answer else self._changes
        assert call is not None, "it was asked for"
        return call

    def cancel(self) -> None:
        """Ends it."""
        self._cancelled = True
        self._end()

    def _end(self) -> None:
        for call in (self._answer, self._changes):
            if call is not None:
                call.cancel()


class OrderedCall(_Calls[ReadCall]):
    """Takes the place of a Subscribe in the blocking client. One thread reads; any thread cancels."""

    def __next__(self) -> sow_pb2.SubscribeResponse:
        while True:
            if (kept := self._kept()) is not None:
                return kept
            self._make()
            try:
                response = next(self._next())
            except Exception:
                self._end()  # where one of both breaks off, the other one is of no use
                raise
            frame = self._snapshot.take(response)
            if isinstance(frame, sow_pb2.SubscribeResponse):
                return frame


class AioOrderedCall(_Calls[AioReadCall]):
    """`OrderedCall` for tasks."""

    async def read(self) -> object:
        """The next frame; anything else is the end."""
        while not self._cancelled:
            if (kept := self._kept()) is not None:
                return kept
            with _transport.unless_closed():
                self._make()
            try:
                response = await self._next().read()
            except Exception:
                self._end()
                raise
            frame = self._snapshot.take(response)
            if frame is None:
                continue
            if not isinstance(frame, sow_pb2.SubscribeResponse):
                self._end()
            return frame
        return None


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
