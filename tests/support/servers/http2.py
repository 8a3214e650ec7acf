"""A client of HTTP/2 that keeps to no bound: it opens streams, and resets them, as fast as the server reads.

A library would keep to the server's settings, so the frames are written by hand: RFC 9113 for frames, and literals
without indexing of RFC 7541 for headers.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import Counter
from types import TracebackType
from typing import Final, Self

DATA: Final = 0
HEADERS: Final = 1
RESET: Final = 3
SETTINGS: Final = 4
PING: Final = 6
END_STREAM: Final = 1
END_HEADERS: Final = 4
ACK: Final = 1
REFUSED_STREAM: Final = 7
CANCEL: Final = 8
HEADER_BYTES: Final = 9
SECONDS: Final = 30.0


class RawClient:
    """Owns a connection, and a thread that counts the frames that come."""

    def __init__(self, address: str) -> None:
        """Connects, and agrees on the settings."""
        host, _, port = address.rpartition(":")
        self._authority = address.encode()
        self._socket = socket.create_connection((host, int(port)), timeout=SECONDS)
        self._next = 1
        self._settled, self._answered = threading.Event(), threading.Event()
        self._codes: Counter[int] = Counter()
        self._socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(SETTINGS, 0, 0))
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        assert self._settled.wait(SECONDS), "the server sent no settings"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._reading.join(SECONDS)
        self._socket.close()

    @property
    def refused(self) -> int:
        """The number of streams that the server has refused."""
        return self._codes[REFUSED_STREAM]

    def open(self, path: str, message: bytes, count: int, *, reset: bool = False, token: str = "") -> None:
        """Opens `count` streams, each with a whole call, and resets each at once if so told. Returns once the server
        has read them."""
        body = struct.pack(">BI", 0, len(message)) + message
        for _ in range(count):
            stream = self._begin(path, token)
            call = _frame(DATA, END_STREAM, stream, body)
            self._socket.sendall(call + (_frame(RESET, 0, stream, struct.pack(">I", CANCEL)) if reset else b""))
        self._await_reading()

    def begin(self, path: str, count: int, *, token: str = "") -> None:
        """Opens `count` streams with calls that send nothing more. Returns once the server has read them."""
        for _ in range(count):
            self._begin(path, token)
        self._await_reading()

    def _begin(self, path: str, token: str) -> int:
        headers = [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", path.encode()),
            (b":authority", self._authority),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
        ]
        if token:
            headers.append((b"authorization", b"Bearer " + token.encode()))
        stream, self._next = self._next, self._next + 2
        self._socket.sendall(_frame(HEADERS, END_HEADERS, stream, b"".join(_literal(*header) for header in headers)))
        return stream

    def _await_reading(self) -> None:
        self._answered.clear()
        self._socket.sendall(_frame(PING, 0, 0, bytes(8)))
        assert self._answered.wait(SECONDS), "the server does not read any more"

    def _read(self) -> None:
        try:
            with self._socket.makefile("rb") as stream:
                while header := stream.read(HEADER_BYTES):
                    size, kind, flags = int.from_bytes(header[:3], "big"), header[3], header[4]
                    self._take(kind, flags, stream.read(size))
        except OSError:
            return

    def _take(self, kind: int, flags: int, body: bytes) -> None:
        if kind == RESET:
            self._codes[int.from_bytes(body, "big")] += 1
        elif kind == SETTINGS and not flags & ACK:
            self._socket.sendall(_frame(SETTINGS, ACK, 0))
            self._settled.set()
        elif kind == PING and flags & ACK:
            self._answered.set()
        elif kind == PING:
            self._socket.sendall(_frame(PING, ACK, 0, body))


def _frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    return struct.pack(">I", len(body))[1:] + struct.pack(">BBI", kind, flags, stream) + body


def _literal(name: bytes, value: bytes) -> bytes:
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value
