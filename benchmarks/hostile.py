"""While one caller does its worst: how long the others wait, and how much memory the server takes.

For each attack of `tests.support.oracles.attacks` a server is started. The others are a process of their own, and so
is the attacker. First the others are alone, then the attacker does its worst beside them.

[1]  A wait counts from the moment at which the call was due to begin. A call that is not answered when the attack ends
     has waited so long, and counts.
[2]  The attacker's process has the lowest priority. In truth it has a machine of its own, so its use of these cores is
     no part of the attack.
[3]  Memory is that of the server and its reader processes, the greatest of many looks, less the greatest while the
     others were alone.
[4]  Given other checkouts (`--server-root`), the servers of each take turns, attack by attack, with the same callers.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.processes import Process, ProcessFailed, SowServer
from benchmarks.rows import MEBIBYTES, MILLISECONDS, TIMES, Figure, Row, Target, percentile
from benchmarks.setting import Setting
from sow_client import Client
from tests.support.oracles.attacks import ATTACKS, Attack, prepare_others, tables, write_rights
from tests.support.servers.others import Sample

NOISE_MS: Final = 15.0
"""An idle p99 below this counts as this: two equal runs on a shared machine differ by as much."""
GET_TARGET: Final = Target(3.0, f"{TIMES} idle", at_least=False)
MEMORY_TARGET: Final = Target(512.0, MEBIBYTES, at_least=False)
LOOK_SECONDS: Final = 0.02
SETTLE_SECONDS: Final = 0.5
ANSWER_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Waits:
    """How long calls of one kind waited."""

    calls: int
    p50: float
    p99: float
    longest: float

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Waits:
        """In milliseconds."""
        seconds = [sample.seconds for sample in samples]
        return cls(len(seconds), *(percentile(seconds, share) * 1_000 for share in (0.5, 0.99, 1.0)))

    def __str__(self) -> str:
        return f"{self.p50:,.1f} / {self.p99:,.1f} / {self.longest:,.0f}"


@dataclass(frozen=True, slots=True)
class Seen:
    """The figures of one attack on one server."""

    idle: dict[str, Waits]
    attacked: dict[str, Waits]
    failures: Counter[str]
    """The failures of the others' calls under the attack."""
    memory: float
    """MiB above idle."""
    journal: float
    """MiB of the journal of the topic that the others publish to, at the end."""
    attacker: str
    """The answers that the attacker got."""

    @property
    def longest(self) -> float:
        """The longest wait of all calls of the others under the attack."""
        return max(waits.longest for waits in self.attacked.values())


class _Others:
    """The process of the others."""

    def __init__(self, address: str, attack: Attack) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.servers.others", address, attack.published, str(attack.payload)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None, "a pipe"
        if self._process.stdout.readline() != "ready\n":
            self._process.kill()
            raise ProcessFailed(f"the others ended with {self._process.wait()}")

    def samples(self) -> list[Sample]:
        """Ends it; all its calls."""
        output, _ = self._process.communicate("end\n", timeout=ANSWER_SECONDS)
        return [Sample(**fields) for fields in json.loads(output)]

    def end(self) -> None:
        """Whatever has become of it."""
        self._process.kill()
        self._process.communicate()


class _Memory(threading.Thread):
    """Looks at the memory of a server and its reader processes."""

    def __init__(self, pid: int) -> None:
        super().__init__(name="memory", daemon=True)
        self._pid = pid
        self._ended = threading.Event()
        self.greatest = 0
        """Bytes, since it was set to 0."""
        self.start()

    def run(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self.greatest = max(self.greatest, _resident_bytes(self._pid))

    def end(self) -> None:
        """No more looks."""
        self._ended.set()
        self.join()


def _resident_bytes(pid: int) -> int:
    """The resident bytes of a process and its children. A page that they share, of the interpreter, counts for each."""
    found = 0
    for one in (pid, *_children(pid)):
        try:
            found += int(Path(f"/proc/{one}/statm").read_text().split()[1])
        except (OSError, IndexError):
            continue  # it has ended meanwhile
    return found * os.sysconf("SC_PAGE_SIZE")


def _children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []


@contextmanager
def _attacker(attack: Attack, address: str) -> Iterator[Process]:
    nice = shutil.which("nice")
    assert nice is not None, "of every system"
    arguments = [nice, "-n", "19", sys.executable, "-m", "tests.support.oracles.attacks", attack.name, "whole", address]
    process = Process(arguments, lambda _line: True)  # its first line comes when it begins
    try:
        process.wait_ready()
        yield process
    finally:
        process.kill()


def see(attack: Attack, program: Path, home: Path, *, idle_seconds: float, seconds: float) -> Seen:
    """Starts the server of a Python in the folder `home`, and attacks it with all might."""
    assault = attack.whole
    with ExitStack() as stack:
        server = _server(attack, program, home)
        stack.callback(server.kill)  # one that was attacked takes long to end in order
        with Client(server.address, token="root", timeout=ANSWER_SECONDS) as client:
            prepare_others(client)
            assault.prepare(client, attack.topic)
        others = _Others(server.address, attack)
        stack.callback(others.end)
        memory = _Memory(server.pid)
        stack.callback(memory.end)
        time.sleep(SETTLE_SECONDS)
        memory.greatest, begun = 0, time.monotonic()
        time.sleep(idle_seconds)
        idle_bytes, memory.greatest = memory.greatest, 0
        with _attacker(attack, server.address) as attacker:
            attacked = time.monotonic()
            time.sleep(seconds)
            server.check_alive()
            ended = time.monotonic()
            greatest = memory.greatest
            told = attacker.last_line
        samples = others.samples()
        journal = _journal_mebibytes(server, attack.published)
    idle = [sample for sample in samples if begun <= sample.begun and sample.begun + sample.seconds < attacked]
    under = [sample for sample in samples if attacked <= sample.begun + sample.seconds and sample.begun <= ended]
    return Seen(
        _by_kind(idle),
        _by_kind(under),
        Counter(f"{sample.kind}: {sample.failure}" for sample in under if sample.failure),
        (greatest - idle_bytes) / 2**20,
        journal,
        told,
    )


def _server(attack: Attack, program: Path, home: Path) -> SowServer:
    access = f'[access]\nfile = "{home / "auth.toml"}"\naudit = "{home / "audit.jsonl"}"\n'

    def started(*, bounds: bool) -> SowServer:
        write_rights(home, [attack], limits=bounds)
        more = access + tables([attack], bounds=bounds)
        return SowServer(home, server='auth = "token"\n', more=more, program=program)

    try:
        return started(bounds=True)
    except ProcessFailed:
        if not attack.limits and not attack.bounds:
            raise
        return started(bounds=False)  # an older server does not know them


def _by_kind(samples: Sequence[Sample]) -> dict[str, Waits]:
    kinds = dict.fromkeys(sample.kind for sample in samples)
    return {kind: Waits.of([sample for sample in samples if sample.kind == kind]) for kind in sorted(kinds)}


def _journal_mebibytes(server: SowServer, topic: str) -> float:
    try:
        with Client(server.address, token="root", timeout=5.0) as client:
            statistics = client.describe_topic(topic).statistics
    except Exception:  # noqa: BLE001  # a server that stands tells nothing
        return float("nan")
    return float("nan") if statistics is None else statistics.journal_bytes / 2**20


def hostile(setting: Setting) -> Iterator[Row]:
    """Every attack on the servers of all checkouts in turns."""
    programs = {root: root / ".venv" / "bin" / "python" for root in setting.server_roots}
    programs = programs or {Path(__file__).parents[1]: Path(sys.executable)}
    chosen = [attack for attack in ATTACKS if not setting.cases or attack.name in setting.cases]
    for attack in chosen:
        for number, root in enumerate(programs):
            setting.say(f"{attack.name}, {root.name}")
            seen = see(
                attack,
                programs[root],
                setting.directory / f"{attack.name}-{number}",
                idle_seconds=setting.size(5, quick=3),
                seconds=setting.size(15, quick=5),
            )
            yield from _rows(attack, root.name if len(programs) > 1 else "", seen, setting)


def _rows(attack: Attack, checkout: str, seen: Seen, setting: Setting) -> Iterator[Row]:
    of = f"{attack.title}{f' ({checkout})' if checkout else ''}"
    idle, attacked = seen.idle["get"], seen.attacked["get"]
    kinds = "; ".join(f"{kind} {seen.idle.get(kind, '–')} → {waits}" for kind, waits in seen.attacked.items())
    failures = ", ".join(f"{count} × {what}" for what, count in seen.failures.most_common(4)) or "none"
    yield Row(
        f"others' get p99: {of}",
        Figure(attacked.p99, MILLISECONDS),
        peer=Figure(idle.p99, MILLISECONDS),
        judged=Figure(attacked.p99 / max(idle.p99, NOISE_MS), TIMES),
        target=GET_TARGET,
        note=f"p50 / p99 / longest in ms, idle → attacked: {kinds}; failed: {failures}; the attacker: {seen.attacker}; "
        f"machine: {setting.machine}",
    )
    longest = Figure(seen.longest, MILLISECONDS)
    target = Target(attack.longest, MILLISECONDS, at_least=False)
    yield Row(f"others' longest wait: {of}", longest, judged=longest, target=target)
    memory = Figure(seen.memory, MEBIBYTES)
    yield Row(f"memory above idle: {of}", memory, judged=memory, target=MEMORY_TARGET)
    if attack.journal < math.inf:
        journal = Figure(seen.journal, MEBIBYTES)
        most = Target(attack.journal, MEBIBYTES, at_least=False)
        yield Row(f"journal of the topic: {of}", journal, judged=journal, target=most)
