"""A TCP proxy in front of a server, for tests with network faults: it cuts, delays, stalls and damages.

    with Proxy(server.address) as proxy:
        client = Client(proxy.address)
        proxy.stall()

    [1]  It forwards bytes in order, unchanged except for the bytes that it was told to damage.
    [2]  It acts on connections by itself; who made them learns of it as he would of a network.

Each proxy has an event loop in a thread of its own, so that a test that blocks does not hold up the bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self, TypeVar

CHUNK_BYTES: Final = 64 * 2**10
START_SECONDS: Final = 10.0
T = TypeVar("T")


class Proxy:
    """Owns a port, and the connections through it."""

    def __init__(self, target: str) -> None:
        """`target`: host and port; nothing need listen there yet."""
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._down = False
        self._delay_seconds = 0.0
        self._flow = asyncio.Event()
        self._flow.set()
        self._cut_after: int | None = None
        self._damage_after: int | None = None
        self._damage_mask = 0
        self._bytes = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address: Final = f"127.0.0.1:{self._listening.getsockname()[1]}"
        """Where to connect."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(START_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends it and its connections."""
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(START_SECONDS)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(START_SECONDS)
            self._loop.close()

    # -- faults -----------------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Breaks the connections of now; new ones are taken."""
        self._call(self._cut)

    def cut_after(self, count: int) -> None:
        """Breaks all connections once so many more bytes have gone forward to the target, in the middle of whatever
        it is."""
        self._call(lambda: setattr(self, "_cut_after", count))

    def damage_after(self, count: int, mask: int = 0x10) -> None:
        """Lets so many bytes go forward, and flips the bits of `mask` in the next one."""

        def arm() -> None:
            self._damage_after, self._damage_mask = count, mask

        self._call(arm)

    def refuse(self) -> None:
        """Breaks all connections, and each new one at once, until `mend`."""

        def act() -> None:
            self._down = True
            self._cut()

        self._call(act)

    def stall(self) -> None:
        """Passes nothing on, and keeps the connections, until `mend`."""
        self._call(self._flow.clear)

    def delay(self, seconds: float) -> None:
        """Holds back each byte for so long, both ways."""
        self._call(lambda: setattr(self, "_delay_seconds", seconds))

    def mend(self) -> None:
        """Ends the fault; held messages go on. Connections that were broken stay broken."""

        def act() -> None:
            self._down = False
            self._delay_seconds = 0.0
            self._cut_after = self._damage_after = None
            self._flow.set()

        self._call(act)

    @property
    def bytes_forward(self) -> int:
        """The bytes that have gone to the target so far."""
        return self._bytes

    @property
    def armed(self) -> bool:
        """Whether a cut or a damage is still to come."""
        return self._cut_after is not None or self._damage_after is not None

    # -- on the loop ------------------------------------------------------------------------------------------------

    def _call(self, act: Callable[[], T]) -> T:
        async def run() -> T:
            return act()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(START_SECONDS)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, sock=self._listening)

    async def _end(self) -> None:
        self._server.close()
        self._cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _cut(self) -> None:
        for writer in list(self._writers):
            transport = writer.transport
            transport.abort()
        self._writers.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._down:
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None, "it runs"
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._writers.add(writer)
        there: asyncio.StreamWriter | None = None
        try:
            answers, there = await asyncio.open_connection(self._host, self._port)
            if writer.transport.is_closing():
                there.transport.abort()
                return
            self._writers.add(there)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, there, forward=True))
                group.create_task(self._pump(answers, writer, forward=False))
        except* (OSError, asyncio.CancelledError):
            pass  # one end has gone, and the other one hears of it below; or the proxy has
        finally:
            for one in (writer, there):
                if one is not None:
                    self._writers.discard(one)
                    one.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, forward: bool) -> None:
        """Reads, and hands over to what writes, so that a delay costs no throughput."""
        held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(1000)
        writing = asyncio.create_task(self._write(held, writer, forward=forward))
        try:
            while chunk := await reader.read(CHUNK_BYTES):
                await held.put((self._loop.time() + self._delay_seconds, chunk))
            await held.put((0.0, b""))
            await writing
        finally:
            writing.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await writing

    async def _write(
        self, held: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter, *, forward: bool
    ) -> None:
        while True:
            due, chunk = await held.get()
            if not chunk:
                if writer.can_write_eof():
                    writer.write_eof()
                return
            await asyncio.sleep(max(0.0, due - self._loop.time()))
            await self._flow.wait()
            if forward:
                chunk = self._harmed(chunk)
                self._bytes += len(chunk)
            writer.write(chunk)
            if forward and self._cut_after == 0:
                self._cut_after = None
                # The written bytes must be on their way, or nothing is cut in its middle.
                with contextlib.suppress(OSError, TimeoutError):
                    async with asyncio.timeout(1):
                        await writer.drain()
                self._cut()
                return
            await writer.drain()

    def _harmed(self, chunk: bytes) -> bytes:
        if self._damage_after is not None:
            if self._damage_after < len(chunk):
                spoiled = bytearray(chunk)
                spoiled[self._damage_after] ^= self._damage_mask
                self._damage_after = None
                chunk = bytes(spoiled)
            else:
                self._damage_after -= len(chunk)
        if self._cut_after is not None:
            chunk = chunk[: self._cut_after]
            self._cut_after -= len(chunk)
        return chunk
