"""Single durable publishes while other clients read the whole topic, with reader processes and without."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Final

import grpc

from benchmarks.documents import documents
from benchmarks.processes import TOPIC, SowServer
from benchmarks.rows import MILLISECONDS, PER_SECOND, TIMES, Figure, Row, Target, percentile, ratio, ratio_range
from benchmarks.setting import Setting
from benchmarks.singly import SinglePublisher
from sow_client import Client

TARGET: Final = Target(5.0, f"{TIMES} idle", at_least=False, ambition=2.0)
SCANNERS: Final = 2
READY_SECONDS: Final = 60.0
SIDES: Final = {"reader process": "reader_processes = 1", "none": "reader_processes = 0"}


def publishes_beside_scans(setting: Setting) -> Iterator[Row]:
    """The p99 of single publishes while two clients read the whole topic again and again, against an idle server."""
    records = setting.size(1_000_000, quick=100_000)
    rounds = setting.size(5, quick=3)
    seconds = setting.size(10, quick=4)
    idle: dict[str, list[float]] = {name: [] for name in SIDES}
    during: dict[str, list[float]] = {name: [] for name in SIDES}
    rates: dict[str, list[float]] = {name: [] for name in SIDES}
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(SowServer(setting.directory / f"sow-{number}", server=server))
            for number, (name, server) in enumerate(SIDES.items())
        }
        publishers: dict[str, SinglePublisher] = {}
        for name, server in servers.items():
            setting.say(f"loading {records:,} records, {name}")
            with Client(server.address) as client:
                _load(client, records)
                _await_reader(client, server, wanted=name != "none")
            publishers[name] = SinglePublisher(stack.enter_context(grpc.insecure_channel(server.address)))
        for number in range(rounds):
            setting.say(f"round {number + 1} of {rounds}")
            for name, server in servers.items():
                idle[name] += publishers[name].run(until=time.time() + seconds)
                scanners = [_scanner(server.address, 2 * seconds) for _ in range(SCANNERS)]
                time.sleep(seconds / 2)  # until they have begun
                during[name] += publishers[name].run(until=time.time() + seconds)
                rates[name].append(sum(float(scanner.communicate()[0]) for scanner in scanners))
    for name in SIDES:
        p99, p99_idle = percentile(during[name], 0.99), percentile(idle[name], 0.99)
        yield Row(
            f"publish p99 beside {SCANNERS} whole-topic scans of {records:,} records ({len(during[name]):,} calls) to "
            f"idle ({len(idle[name]):,} calls), {name}",
            Figure(p99, MILLISECONDS),
            peer=Figure(p99_idle, MILLISECONDS),
            judged=Figure(p99 / p99_idle, TIMES),
            target=TARGET if name != "none" else None,
            note=f"p50 {statistics.median(during[name]):.2f} ms, idle {statistics.median(idle[name]):.2f} ms; machine: "
            f"{setting.machine}",
        )
    yield Row(
        f"records read by the {SCANNERS} scans beside the publishes, to those without a reader process",
        Figure(statistics.median(rates["reader process"]), PER_SECOND),
        peer=Figure(statistics.median(rates["none"]), PER_SECOND),
        judged=ratio(rates["reader process"], rates["none"]),
        note=ratio_range(rates["reader process"], rates["none"]),
    )


def _load(client: Client, records: int) -> None:
    with client.publisher(TOPIC, durability="buffered") as publisher:
        for payload in documents(range(records)):
            publisher.publish(payload)


def _await_reader(client: Client, server: SowServer, *, wanted: bool) -> None:
    """The first long query starts the reader process."""
    give_up = time.time() + READY_SECONDS
    _read(client)
    while wanted and not server.metrics().total("sow_reader_processes"):
        assert time.time() < give_up, "there is no reader process"
        time.sleep(0.1)


def _read(client: Client) -> int:
    return sum(len(batch.keys) for batch in client.query(TOPIC).batches())


def _scanner(address: str, seconds: float) -> subprocess.Popen[str]:
    """A process that reads the whole topic again and again, and prints the records per second."""
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.scanning", address, str(seconds)], stdout=subprocess.PIPE, text=True
    )


def main() -> None:
    """Scans: `python -m benchmarks.scanning ADDRESS SECONDS`."""
    address, seconds = sys.argv[1], float(sys.argv[2])
    begin, records = time.time(), 0
    with Client(address) as client:
        while time.time() < begin + seconds:
            records += _read(client)
    print(records / (time.time() - begin))


if __name__ == "__main__":
    main()
