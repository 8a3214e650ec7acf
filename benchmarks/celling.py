"""Several cells on one machine against one server: the same publishers, each with a topic of its own.

Each publisher is a process, so that clients do not take turns. It is given the address of its cell. The CPU time
of a record tells what the supervisor and the division cost, on any machine. The rate tells what a machine has room for,
where there are cores for servers and publishers. `python -m benchmarks.celling …` is one publisher.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from benchmarks.documents import KEY_PATHS, documents
from benchmarks.processes import SowServer, free_port
from benchmarks.publishing import publish
from benchmarks.rows import MICROSECONDS, PER_SECOND, TIMES, Figure, Row, Target, ratio, ratio_range, take_turns
from benchmarks.setting import Setting
from sow_client import Client

CELLS: Final = 4
CORES_MIN: Final = 8
"""With fewer cores the rate is that of the machine, whatever the number of servers."""
CPU_TARGET: Final = Target(1.05, f"{TIMES} one server", at_least=False)
RATE_TARGET: Final = Target(3.3, f"{TIMES} one server")


def cells(setting: Setting) -> Iterator[Row]:
    """Four publishers at one server, then at four cells, in turns."""
    records, rounds = setting.size(100_000, quick=10_000), setting.size(7, quick=2)
    with ExitStack() as stack:
        one = stack.enter_context(SowServer(setting.directory / "one", more=_TOPICS))
        several = stack.enter_context(_four(setting.directory / "four"))
        sides = {
            "one": _Side(one, [one.address] * CELLS, records),
            "four": _Side(several, [f"127.0.0.1:{several.port + number}" for number in range(CELLS)], records),
        }
        setting.say(f"{rounds} rounds of {CELLS} × {records:,} records")
        rates = take_turns(rounds, {name: side.run for name, side in sides.items()})
        cpu = {name: side.cpu_micros for name, side in sides.items()}
    sizes = f"{rounds} rounds of {CELLS} publishers × {records:,} records, BUFFERED"
    yield Row(
        f"CPU of a record at {CELLS} cells, to one server: {sizes}",
        Figure(statistics.median(cpu["four"]), MICROSECONDS),
        Figure(statistics.median(cpu["one"]), MICROSECONDS),
        ratio(cpu["four"], cpu["one"]),
        CPU_TARGET,
        note=f"{ratio_range(cpu['four'], cpu['one'])}; the supervisor is counted",
    )
    cores = len(os.sched_getaffinity(0))
    enough = cores >= CORES_MIN
    yield Row(
        f"all publishers together, {CELLS} cells to one server: {sizes}",
        Figure(statistics.median(rates["four"]), PER_SECOND),
        Figure(statistics.median(rates["one"]), PER_SECOND),
        ratio(rates["four"], rates["one"]),
        RATE_TARGET if enough else None,
        note=f"{ratio_range(rates['four'], rates['one'])}; {cores} cores, which servers and publishers share"
        + ("" if enough else f": judged from {CORES_MIN} on"),
    )


_TOPICS: Final = "".join(
    f'[topics.part-{number}]\nkey = {KEY_PATHS}\nexpiration = "enabled"\n' for number in range(1, CELLS + 1)
)


def _four(directory: Path) -> SowServer:
    directory.mkdir(parents=True, exist_ok=True)
    port = free_port()
    placed = [f'cell-{number} = ["127.0.0.1:{port + number - 1}"]\n' for number in range(1, CELLS + 1)]
    topics = [f'[[topics]]\npattern = "part-{number}"\ncell = "cell-{number}"\n' for number in range(1, CELLS + 1)]
    text = f'version = 1\ndefault = "cell-1"\n[cells]\n{"".join(placed)}{"".join(topics)}'
    (directory / "placement.toml").write_text(text)
    more = f'{_TOPICS}[placement]\nfile = "placement.toml"\n'
    return SowServer(directory, more=more, port=port, arguments=("--cells", str(CELLS)))


class _Side:
    """A server, or several, and what its rounds cost."""

    def __init__(self, server: SowServer, addresses: Sequence[str], records: int) -> None:
        self.cpu_micros: list[float] = []
        """CPU time of each record, by round."""
        self._server = server
        self._addresses = addresses
        self._records = records
        self._revision = 0

    def run(self) -> float:
        """A round; records a second."""
        self._revision += 1
        with ExitStack() as stack:
            publishers = [
                stack.enter_context(_publisher(address, f"part-{number}", self._records, self._revision))
                for number, address in enumerate(self._addresses, 1)
            ]
            for publisher in publishers:
                _hear(publisher)
            before, begin = self._server.cpu_seconds(), time.perf_counter()
            for publisher in publishers:
                assert publisher.stdin is not None, "a pipe"
                publisher.stdin.write("go\n")
                publisher.stdin.flush()
            for publisher in publishers:
                _hear(publisher)
            seconds, spent = time.perf_counter() - begin, self._server.cpu_seconds() - before
        total = self._records * len(self._addresses)
        self.cpu_micros.append(spent / total * 1e6)
        return total / seconds


def _publisher(address: str, topic: str, records: int, revision: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.celling", address, topic, str(records), str(revision)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _hear(publisher: subprocess.Popen[str]) -> None:
    """Waits for its next line. Raises RuntimeError if it has ended."""
    assert publisher.stdout is not None, "a pipe"
    if not publisher.stdout.readline():
        raise RuntimeError(f"a publisher ended with code {publisher.wait()}")


def main() -> None:
    """One publisher: makes its records, says so, waits for a line, publishes them, says so."""
    address, topic, records, revision = sys.argv[1:]
    payloads = documents(range(int(records)), int(revision))
    with Client(address) as client:
        client.get(topic, "0")
        print("ready", flush=True)
        sys.stdin.readline()
        publish(client, payloads, "buffered", topic=topic)
        print("done", flush=True)


if __name__ == "__main__":
    main()
