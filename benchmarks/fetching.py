"""Records over HTTP: the CPU of a get through `sow http` beside that of the Python client, and of many event streams.

The caller of HTTP is not counted: it may be written in any language. Here it is a bare socket.
"""

from __future__ import annotations

import selectors
import socket
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Final

from benchmarks.documents import document
from benchmarks.processes import TOPIC, Process, SowServer
from benchmarks.rows import MICROSECONDS, TIMES, Figure, Row, Target, ratio, ratio_range, take_turns
from benchmarks.setting import Setting
from sow_client import Client

GET_TARGET: Final = Target(3.0, f"{TIMES} the Python client", at_least=False)
CORE: Final = "%"
STREAMS_TARGET: Final = Target(100.0, f"{CORE} of a core", at_least=False)
CHANGES_A_SECOND: Final = 1_000
BEATS_A_SECOND: Final = 100
KEYS: Final = 1_000
READ_BYTES: Final = 256 * 1024
WAIT_SECONDS: Final = 120.0
LAST: Final = b'"key":"last"'


def http(setting: Setting) -> Iterator[Row]:
    """A get of a record over HTTP, and the event streams of one topic."""
    with ExitStack() as stack:
        server = stack.enter_context(SowServer(setting.directory / "sow"))
        client = stack.enter_context(Client(server.address))
        for number in range(KEYS):
            client.publish(TOPIC, document(number), ttl="never", durability="buffered")
        yield _gets(setting, server, client, stack.enter_context(door_of(server)))
        yield _streams(setting, client, stack.enter_context(door_of(server)))


def door_of(server: SowServer) -> Process:
    """`sow http` in a process of its own, once it serves."""
    arguments = [sys.executable, "-m", "sow_cli", "--server", server.address, "http", "--listen", "127.0.0.1:0"]
    door = Process(arguments, lambda line: " at http://" in line)
    try:
        door.wait_ready()
    except BaseException:
        door.stop()
        raise
    return door


def _connected(door: Process) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(door.last_line.rpartition(":")[2])))


def _gets(setting: Setting, server: SowServer, client: Client, door: Process) -> Row:
    calls = setting.size(500, quick=300)
    rounds = setting.size(5, quick=3)
    http_client = _connected(door)

    def spent_on(seconds: float) -> float:
        return seconds / calls * 1e6

    def fetched() -> float:
        """Microseconds of the CPU of the door and the server."""
        before = server.cpu_seconds() + door.cpu_seconds()
        for number in range(calls):
            path = f"/v1/topics/{TOPIC}/records/{number % KEYS}"
            http_client.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            answer = http_client.recv(READ_BYTES)
            while not answer.endswith(b'"}'):
                answer += http_client.recv(READ_BYTES)
            assert answer.startswith(b"HTTP/1.1 200"), answer[:200]
        return spent_on(server.cpu_seconds() + door.cpu_seconds() - before)

    def called() -> float:
        """Microseconds of the CPU of this process and the server."""
        before = server.cpu_seconds() + time.process_time()
        for number in range(calls):
            assert client.get(TOPIC, str(number % KEYS)) is not None
        return spent_on(server.cpu_seconds() + time.process_time() - before)

    contestants = {"http": fetched, "grpc": called}
    with http_client:
        take_turns(1, contestants)
        setting.say(f"{rounds} rounds")
        spent = take_turns(rounds, contestants)
    return Row(
        f"a get of 160 bytes, CPU of sow http and the server: {rounds} rounds of {calls:,} calls, one after the other",
        Figure(statistics.median(spent["http"]), MICROSECONDS),
        peer=Figure(statistics.median(spent["grpc"]), MICROSECONDS),
        judged=ratio(spent["http"], spent["grpc"]),
        target=GET_TARGET,
        note=f"{ratio_range(spent['http'], spent['grpc'])}; the peer is a get of our blocking Python client, CPU of "
        "its process and the server; the caller of HTTP is not counted",
    )


def _streams(setting: Setting, client: Client, door: Process) -> Row:
    streams = setting.size(1_000, quick=200)
    seconds = setting.size(20, quick=5)
    with _Listeners(door, streams) as listeners:
        setting.say(f"{streams:,} streams, {seconds} s")
        before, begin = door.cpu_seconds(), time.monotonic()
        with client.publisher(TOPIC, ttl="never", durability="buffered") as publisher:
            for beat in range(seconds * BEATS_A_SECOND):
                for number in range(CHANGES_A_SECOND // BEATS_A_SECOND):
                    publisher.publish(document(number, revision=beat))
                publisher.flush()
                time.sleep(max(0.0, begin + (beat + 1) / BEATS_A_SECOND - time.monotonic()))
        took = time.monotonic() - begin
        client.publish(TOPIC, document(0).replace(b'"id":0', b'"id":"last"'), ttl="never")
        listeners.wait()
        spent = door.cpu_seconds() - before
        resident = door.resident_mebibytes()
    changes = seconds * CHANGES_A_SECOND
    used = Figure(spent / took * 100, CORE)
    return Row(
        f"{streams:,} event streams of one topic, {changes / took:,.0f} changes/s, {took:.0f} s",
        used,
        judged=used,
        target=STREAMS_TARGET,
        note=f"each stream got the same {listeners.bytes / 1e6:,.1f} MB to its last event; CPU of sow http for a "
        f"change and stream {spent / changes / streams * 1e6:.2f} µs, {resident:.0f} MiB; machine: {setting.machine}",
    )


class _Listeners:
    """Owns the streams and a thread that reads them all."""

    def __init__(self, door: Process, streams: int) -> None:
        self.bytes = 0
        """The bytes of the events of one stream; of each the same."""
        self._selector = selectors.DefaultSelector()
        self._taken: dict[socket.socket, int] = {}
        self._at_end: set[socket.socket] = set()
        self._all_at_end = threading.Event()
        for _ in range(streams):
            stream = _connected(door)
            stream.sendall(f"GET /v1/topics/{TOPIC}/changes HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            head = b""
            while b": \n\n" not in head:  # the subscription stands
                head += stream.recv(READ_BYTES)
            assert head.startswith(b"HTTP/1.1 200"), head
            self._taken[stream] = 0
            self._selector.register(stream, selectors.EVENT_READ)
        self._reader = threading.Thread(target=self._read, daemon=True)

    def _read(self) -> None:
        while len(self._at_end) < len(self._taken):
            for key, _ in self._selector.select():
                stream = key.fileobj
                assert isinstance(stream, socket.socket), "as registered"
                piece = stream.recv(READ_BYTES)
                assert piece, "a stream has ended"
                self._taken[stream] += len(piece)
                if LAST in piece[-1_000:]:
                    self._at_end.add(stream)
        self._all_at_end.set()

    def wait(self) -> None:
        """Until each stream has had the last event."""
        assert self._all_at_end.wait(WAIT_SECONDS), f"{len(self._at_end)} of {len(self._taken)} streams are complete"
        self.bytes = min(self._taken.values())

    def __enter__(self) -> _Listeners:
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._taken:
            with suppress(OSError):
                stream.close()
