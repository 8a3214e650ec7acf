"""The other end of a metrics endpoint: requests, byte by byte if need be, and connections that stay idle."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
from collections.abc import Iterator

Address = tuple[str, int]

SCRAPE = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"


def said(address: Address, request: bytes = SCRAPE, tls: ssl.SSLContext | None = None) -> bytes:
    """All that is answered to these bytes, until the server ends the connection."""
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.create_connection(address, timeout=30))
        if tls is not None:
            connection = stack.enter_context(tls.wrap_socket(connection, server_hostname=address[0]))
        connection.sendall(request)
        answer = b""
        while received := connection.recv(65536):
            answer += received
        return answer


def page(address: Address, path: str, *headers: str, tls: ssl.SSLContext | None = None) -> tuple[int, bytes]:
    """Status and body of a page."""
    request = "\r\n".join([f"GET {path} HTTP/1.1", "Host: x", *headers, "", ""])
    head, _, body = said(address, request.encode(), tls).partition(b"\r\n\r\n")
    return int(head.split()[1]), body


@contextlib.contextmanager
def idle_connections(address: Address, number: int, *, source: str = "127.0.0.1") -> Iterator[list[socket.socket]]:
    """Connections from a source address that say nothing."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection(address, timeout=30, source_address=(source, 0)))
            for _ in range(number)
        ]


def is_open(connection: socket.socket) -> bool:
    """Whether the server has not ended an idle connection."""
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False


def drips_until_ended(connection: socket.socket, seconds_max: float) -> bool:
    """Sends a byte of a request now and then, as a slow loris does; whether the server ends the connection in time."""
    for _ in range(int(seconds_max / 0.01)):
        try:
            connection.sendall(b"G")
            if select.select([connection], [], [], 0.01)[0]:
                return connection.recv(1) == b""
        except (ConnectionResetError, BrokenPipeError):
            return True
    return False
