"""The cost of a record while a topic grows: publish, update, get, index, expiry, start and memory at each size.

One server grows through the sizes. The figure is the server's CPU time, which does not depend on other users of the
machine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from benchmarks.expiring import expire_steadily
from benchmarks.processes import TOPIC, SowServer
from benchmarks.publishing import publish
from benchmarks.rows import MEBIBYTES, MICROSECONDS, MILLISECONDS, SECONDS, TIMES, Figure, Row, Target
from benchmarks.setting import Setting
from sow_client import Client

SIZES: Final = (100_000, 300_000, 1_000_000, 3_000_000, 10_000_000, 30_000_000)
FLAT_TARGET: Final = Target(8.0, f"{TIMES} the least", at_least=False, ambition=1.5)
READY_TARGET: Final = Target(3.0, SECONDS, at_least=False)
MEMORY_TARGET: Final = Target(1024.0, MEBIBYTES, at_least=False)
GROUP: Final = 10
"""So many records have the same value in the indexed field, whatever the size."""
CHUNK: Final = 50_000
KEYS_TOGETHER: Final = 1_000
SEED: Final = 7
SETTLE_SECONDS: Final = 300.0
QUIET_SHARE: Final = 0.05
"""A server that takes less than this share of a core has nothing to do."""
LATER: Final = 1_000_000_000
"""The keys of records that expire begin here."""
_FORM: Final = b'{"id":%d,"group":%d,"revision":%d,"text":"%s"}'
_CONFIG: Final = 'index = ["/group"]\n'


def document(number: int, revision: int = 0) -> bytes:
    """About 160 bytes; ten records of a group have neighbouring numbers."""
    mixed = (number * 2_654_435_761 + revision * 40_503) & 0xFFFFFFFF
    return _FORM % (number, number // GROUP, revision, (b"%08x" % mixed) * 12)


class _Growing:
    """Owns the server, which is started anew on the same records. Use it in a `with` block."""

    def __init__(self, home: Path, rounds: int) -> None:
        self.records = 0
        self._home = home
        self._rounds = rounds
        self._chance = random.Random(SEED)
        self._revision = 0
        self.server = SowServer(home, more=_CONFIG)
        self.client = Client(self.server.address)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.client.close()
        self.server.stop()

    def restart(self, end: Callable[[SowServer], None]) -> float:
        """Ends the server in this way; seconds until it is ready again."""
        self.client.close()
        end(self.server)
        self.server = SowServer(self._home, more=_CONFIG)
        self.client = Client(self.server.address)
        assert self.client.count(TOPIC, "/group = 0") == GROUP, "records are missing"
        return self.server.ready_seconds

    def _cpu_micros(self, operations: int, run: Callable[[], object], *, writes: bool = False) -> float:
        """Each operation pays for the compaction that it has caused, and for no other."""
        before = self.server.cpu_seconds()
        run()
        if writes:
            self._settle()
        return (self.server.cpu_seconds() - before) / operations * 1e6

    def _settle(self) -> None:
        """Returns once the server does nothing any more."""
        give_up = time.monotonic() + SETTLE_SECONDS
        quiet = 0
        while quiet < 2 and time.monotonic() < give_up:
            before = self.server.cpu_seconds()
            time.sleep(0.5)
            quiet = quiet + 1 if self.server.cpu_seconds() - before < QUIET_SHARE * 0.5 else 0

    def publish_until(self, records: int) -> float:
        """The CPU time of a new record, compaction included."""
        added, first = records - self.records, self.records

        def run() -> None:
            for start in range(first, records, CHUNK):
                payloads = [document(number) for number in range(start, min(start + CHUNK, records))]
                publish(self.client, payloads, "buffered")

        micros = self._cpu_micros(added, run, writes=True)
        self.records = records
        return micros

    def update(self) -> float:
        """The CPU time of the update of a random record, whose indexed value stays."""
        self._revision += 1
        payloads = [document(number, self._revision) for number in self._random(CHUNK * self._rounds)]
        return self._cpu_micros(len(payloads), lambda: publish(self.client, payloads, "buffered"), writes=True)

    def get(self) -> float:
        """The CPU time of a call for one random record."""
        calls = 1_000 * self._rounds

        def run() -> None:
            for number in self._random(calls):
                assert self.client.get(TOPIC, str(number)) is not None, f"record {number} is missing"

        return self._cpu_micros(calls, run)

    def get_many(self) -> float:
        """The CPU time of one of many random records in a call."""
        calls = 20 * self._rounds

        def run() -> None:
            for _ in range(calls):
                # A key that comes twice is answered once.
                keys = sorted({str(number) for number in self._random(KEYS_TOGETHER)})
                assert len(self.client.get_many(TOPIC, keys)) == len(keys), "records are missing"

        return self._cpu_micros(calls * KEYS_TOGETHER, run)

    def by_index(self) -> float:
        """The CPU time of a query for the records of one value."""
        calls = 300 * self._rounds

        def run() -> None:
            for number in self._random(calls):
                found = sum(len(batch) for batch in self.client.query(TOPIC, f"/group = {number // GROUP}").batches())
                assert found == GROUP, f"{found} records of the group of {number}"

        return self._cpu_micros(calls, run)

    def _random(self, count: int) -> Sequence[int]:
        return self._chance.choices(range(self.records), k=count)


def growth(setting: Setting) -> Iterator[Row]:
    """The cost of each kind of operation at each size: the greatest to the least, and all of them in the note."""
    most = setting.count(SIZES[-1], quick=300_000)
    sizes = [size for size in SIZES if size < most] + [most]
    rounds = setting.size(4, quick=1)
    home = setting.directory / "sow"
    micros: dict[str, list[float]] = {}
    lags: list[float] = []
    ready: dict[str, list[float]] = {"an orderly stop": [], "SIGKILL": []}
    memory: list[float] = []
    with _Growing(home, rounds) as growing:
        for size in sizes:
            setting.say(f"{size:,} records")
            micros.setdefault("a publish of a new record", []).append(growing.publish_until(size))
            micros.setdefault("an update of a random record", []).append(growing.update())
            micros.setdefault("a get of one", []).append(growing.get())
            micros.setdefault("a get of one of a thousand", []).append(growing.get_many())
            micros.setdefault("a query by an index, ten records", []).append(growing.by_index())
            before = growing.server.cpu_seconds()
            seconds = setting.size(6, quick=2)
            window = expire_steadily(growing.server, growing.client, first_number=LATER, seconds=seconds)
            spent = growing.server.cpu_seconds() - before
            micros.setdefault("a publish and its expiry at 10,000/s", []).append(spent / window.published * 1e6)
            lags.append(window.p99_milliseconds)
            memory.append(growing.server.resident_peak_mebibytes())
            setting.say(
                ", ".join(f"{name} {of[-1]:.1f} µs" for name, of in micros.items()) + f", lag {lags[-1]:.1f} ms"
            )
            for how, end in (("an orderly stop", SowServer.stop), ("SIGKILL", SowServer.kill)):
                ready[how].append(growing.restart(end))

    at = ", ".join(f"{size:,}" for size in sizes)
    for name, figures in micros.items():
        yield _flat(f"CPU of {name}", figures, MICROSECONDS, at)
    yield _flat("expiry lag p99 at 10,000/s", lags, MILLISECONDS, at)
    for how, figures in ready.items():
        figure = Figure(figures[-1], SECONDS)
        yield Row(
            f"start after {how}, {sizes[-1]:,} records",
            figure,
            judged=figure,
            target=READY_TARGET,
            note=f"{_all(figures)} s at {at} records",
        )
    figure = Figure(memory[-1], MEBIBYTES)
    yield Row(
        f"VmHWM with {sizes[-1]:,} records, after all of these",
        figure,
        judged=figure,
        target=MEMORY_TARGET,
        note=f"{_all(memory)} MiB at {at} records",
    )


def _flat(case: str, figures: Sequence[float], unit: str, at: str) -> Row:
    spread = Figure(max(figures) / min(figures), TIMES)
    note = f"{_all(figures)} {unit} at {at} records"
    return Row(case, Figure(figures[-1], unit), judged=spread, target=FLAT_TARGET, note=note)


def _all(figures: Sequence[float]) -> str:
    return ", ".join(f"{figure:.2f}" if figure < 10 else f"{figure:.0f}" for figure in figures)
