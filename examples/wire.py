"""A wire between two servers that can be cut: it forwards the connections of its own port to another port.

[1]  After `cut` has returned, nothing is forwarded until `heal`: present connections are closed, and new ones at
     once.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Final, Self

from examples.server_process import HOST

CHUNK_BYTES: Final = 64 * 1024


class Wire:
    """Owns its port, the connections, and two threads per connection."""

    def __init__(self, port_to: int) -> None:
        self._port_to = port_to
        self._lock = threading.Lock()
        self._whole = True
        self._ends: set[socket.socket] = set()
        self._listener = socket.create_server((HOST, 0))
        self.port: Final[int] = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cut()
        # Closing alone would not wake the accepting thread.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def cut(self) -> None:
        """Cuts it."""
        with self._lock:
            self._whole = False
            for end in self._ends:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)  # its thread closes it

    def heal(self) -> None:
        """Forwards new connections from now on."""
        with self._lock:
            self._whole = True

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return  # closed
            try:
                far = socket.create_connection((HOST, self._port_to))
            except OSError:
                near.close()  # no server is there, as without the wire
                continue
            with self._lock:
                if not self._whole:
                    near.close()
                    far.close()
                    continue
                self._ends |= {near, far}
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK_BYTES):
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)  # so that the other thread ends, too
        with self._lock:
            self._ends.discard(source)
        source.close()
