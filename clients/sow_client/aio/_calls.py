"""The base of the client: its connection, and calls that have one answer."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Self, TypeVar

import grpc
import grpc.aio

from sow.v1 import access_pb2_grpc, admin_pb2_grpc, load_pb2_grpc, snapshot_pb2_grpc, sow_pb2_grpc
from sow_client import _statuses, _transport, _writes
from sow_client._channel import DEFAULT_SERVER, Tls, from_environment
from sow_client._tokens import Token

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class AsyncCalls:
    """Owns the connection and the stubs."""

    def __init__(
        self,
        server: str = DEFAULT_SERVER,
        *,
        tls: Tls | None = None,
        token: Token | None = None,
        timeout: float = 30.0,
        connect_timeout: float = 5.0,
        channel: grpc.aio.Channel | None = None,
    ) -> None:
        """`server` is HOST or HOST:PORT.

        `timeout` bounds each call that has one answer, `connect_timeout` the wait for a connection; both in seconds.
        A `channel` from the program is used as it is, and stays open; it shows its own credentials.
        `token` is shown with each call: a text, a file, or a function. It never goes to another machine in plain text.
        """
        self._transport = _transport.AioTransport(server, tls, connect_timeout, channel, token)
        self._timeout = timeout
        self._connect_timeout = connect_timeout
        self._sow = sow_pb2_grpc.SowServiceStub(self._transport.calls)
        self._admin = admin_pb2_grpc.AdminServiceStub(self._transport.calls)
        self._snapshots = snapshot_pb2_grpc.SnapshotServiceStub(self._transport.calls)
        self._access = access_pb2_grpc.AccessServiceStub(self._transport.calls)
        self._load = load_pb2_grpc.LoadServiceStub(self._transport.calls)
        self._sequencer = _writes.Sequencer()

    @classmethod
    def from_environment(cls, *, timeout: float = 30.0, connect_timeout: float = 5.0) -> Self:
        """A client of the server, with the token and TLS files, that the environment names: SOW_SERVER, SOW_TOKEN_FILE,
        SOW_TLS_CA, SOW_TLS_CERT, SOW_TLS_KEY, SOW_TLS_SERVER_NAME, as for the command `sow`."""
        server, tls, token = from_environment(os.environ)
        return cls(server, tls=tls, token=token, timeout=timeout, connect_timeout=connect_timeout)

    async def close(self) -> None:
        """Closes the connection; calls in progress end."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._transport.leave(error)

    async def _call(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[_Request, _Response],
        request: _Request,
        *,
        once: bool = False,
        unbounded: bool = False,
        at_least: float = 0.0,
        at_most: float | None = None,
    ) -> _Response:
        """Makes a call with one answer. A second attempt follows when the connection breaks, unless `once`.

        The deadline is `timeout`, or `at_least` seconds if that is more; none with `unbounded`. `at_most` bounds it,
        and before it the wait for a connection.
        """
        seconds = None if unbounded else max(self._timeout, at_least)
        if at_most is not None:
            seconds = at_most if seconds is None else min(seconds, at_most)
        again = not once and self._transport.is_own
        while True:
            await self._transport.await_ready(at_most)
            try:
                with _transport.unless_closed():
                    return await method(request, timeout=seconds)
            except grpc.RpcError as error:
                translated = _statuses.call_error(error, client_closed=self._transport.is_closed)
                if not again or translated.reason != "UNREACHABLE":
                    raise translated from error
                again = False
