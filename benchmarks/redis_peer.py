"""Redis as a peer: Debian's redis-server, driven by redis-py the way its users do, and by Redis' own client in C. The
only module that imports redis-py.

The server gets every advantage: no snapshots, and no rewriting of the append-only file during a measurement.
"""

from __future__ import annotations

import importlib.util
import re
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from benchmarks.documents import DOCUMENT_BYTES, TTL_SECONDS, document
from benchmarks.processes import NotInstalled, Process, ProcessFailed, free_port, program

if TYPE_CHECKING:
    import redis

Fsync = Literal["everysec", "always"]
SCAN_COUNT: Final = 1_000
ANY_KEY: Final = 2**31 - 1
"""Keys to choose from, for `set_in_c`, where all are to be new."""
_SET: Final = b"*5\r\n$3\r\nSET\r\n$%%d\r\n%%b\r\n$%d\r\n%%b\r\n$2\r\nEX\r\n$%d\r\n%d\r\n" % (
    DOCUMENT_BYTES,
    len(str(TTL_SECONDS)),
    TTL_SECONDS,
)
_OK: Final = b"+OK\r\n"


class RedisServer(Process):
    """A redis-server with an append-only file, and a redis-py connection to it."""

    def __init__(self, directory: Path) -> None:
        """Starts it and waits until it answers. Raises NotInstalled."""
        path = program("redis-server", "redis-server")
        self._client_in_c = program("redis-benchmark", "redis-tools")
        if importlib.util.find_spec("redis") is None:
            raise NotInstalled("redis-py not installed (pip install 'redis[hiredis]')")
        import redis  # a peer: the benchmarks also run without it

        directory.mkdir(parents=True)
        self.port = free_port()
        super().__init__(
            [
                *(path, "--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(directory)),
                *("--save", "", "--appendonly", "yes", "--appendfsync", "everysec"),
                *("--auto-aof-rewrite-percentage", "0"),
            ]
        )
        self._client = redis.Redis(port=self.port)
        try:
            self.wait_until(self._answers)
        except BaseException:
            self.stop()
            raise

    def _answers(self) -> bool:
        import redis

        try:
            return bool(self._client.ping())
        except redis.ConnectionError:
            return False

    @property
    def described(self) -> str:
        """Versions of both sides, and which parser the client uses."""
        import redis
        from redis.utils import HIREDIS_AVAILABLE

        info = self._client.info("server")
        assert isinstance(info, dict), "the blocking client answers at once"
        parser = "with hiredis" if HIREDIS_AVAILABLE else "without hiredis"
        return f"redis-server {info['redis_version']}, redis-py {redis.__version__} {parser}"

    def sync_policy(self, policy: Fsync) -> None:
        """The mode of syncing the append-only file."""
        self._client.config_set("appendfsync", policy)

    def set_pipelined(self, keys: Sequence[str], payloads: Sequence[bytes], batch_records: int) -> None:
        """SET … EX in pipelines of `batch_records`."""
        for first in range(0, len(keys), batch_records):
            last = first + batch_records
            pipeline = self._client.pipeline(transaction=False)
            for key, payload in zip(keys[first:last], payloads[first:last], strict=True):
                pipeline.set(key, payload, ex=TTL_SECONDS)
            pipeline.execute()

    def set_in_c(self, records: int, among: int, batch_records: int) -> float:
        """The same by redis-benchmark, Redis' own client in C, on one connection: SETs per second. It chooses its keys
        among so many by chance, and all values are the same document."""
        arguments = [
            *(self._client_in_c, "-p", str(self.port), "-c", "1", "-q"),
            *("-n", str(records), "-r", str(among), "-P", str(batch_records)),
            *("SET", "__rand_int__", document(0).decode(), "EX", str(TTL_SECONDS)),
        ]
        said = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
        found = re.search(r"([0-9.]+) requests per second", said)
        if found is None:
            raise ProcessFailed(f"redis-benchmark said {said[-200:]!r}")
        return float(found[1])

    def load(self, keys: Sequence[str], payloads: Sequence[bytes]) -> None:
        """The same without redis-py, several times as fast, for steps that are not measured."""
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            for first in range(0, len(keys), 1_000):
                last = first + 1_000
                commands = [
                    _SET % (len(key), key.encode(), payload)
                    for key, payload in zip(keys[first:last], payloads[first:last], strict=True)
                ]
                connection.sendall(b"".join(commands))
                _expect(connection, _OK * len(commands))

    def scan(self) -> Iterator[tuple[bytes, bytes]]:
        """Every key with its value: SCAN, then MGET of its keys."""
        cursor = 0
        while True:
            cursor, keys = _scanned(self._client, cursor)
            if keys:
                values = self._client.mget(keys)
                assert isinstance(values, list), "the blocking client answers at once"
                yield from zip(keys, values, strict=True)
            if cursor == 0:
                return

    def stop(self) -> None:
        """Ends the connection and the process."""
        self._client.close()
        super().stop()


def _scanned(client: redis.Redis, cursor: int) -> tuple[int, list[bytes]]:
    answer = client.scan(cursor, count=SCAN_COUNT)
    assert isinstance(answer, tuple | list), "the blocking client answers at once"
    return int(answer[0]), [key for key in answer[1] if isinstance(key, bytes)]


def _expect(connection: socket.socket, answer: bytes) -> None:
    received = bytearray()
    while len(received) < len(answer):
        part = connection.recv(65_536)
        if not part:
            break
        received += part
    assert received == answer, f"redis-server said {bytes(received[:200])!r}"
