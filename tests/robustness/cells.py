"""A round with three cells: one of them at a time is killed, stopped or cut off, under clients of the topics of all.

[1]  Each server is behind a proxy, and the placement names the proxies, so clients and cells meet its faults.
[2]  A client has one cell as its home, drawn by chance, and works on the topics of all: it follows them.
[3]  Judged by the checker: nothing acknowledged is lost, no expired record is shown, and followers miss nothing.
     Judged here: no call of a topic of the other cells fails while one has a fault, and each cell serves in the end.
[4]  How long calls of the other cells took beside a fault, and in the quiet phase before, is told and not judged:
     the machine may have other things to do.
"""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, NamedTuple

from sow_client import EARLIEST, Client, SowError, Subscription
from tests.robustness.checker import check
from tests.robustness.history import Fault, History, Op, Read
from tests.robustness.workload import (
    Consumer,
    Follower,
    Lives,
    Reader,
    Retrier,
    Worker,
    Writer,
    end_all,
    now,
    read_topic,
)
from tests.support.servers.cells import CellServer, placement
from tests.support.servers.proxy import Proxy
from tests.support.servers.server import free_port, until

NAMES: Final = ("a", "b", "c")
FAULTS: Final = ("kill", "stop", "cut", "stall")
PATIENT_SECONDS: Final = 20.0
"""How long a call of the probes may take: none of another cell is to fail because the machine is busy."""
HEAL_SECONDS: Final = 60.0
PROBE_KEYS: Final = 8
Call = Literal["get", "publish"]


@dataclass(frozen=True, slots=True)
class CellsPlan:
    """The settings of a round."""

    seed: int
    faults: tuple[str, ...]
    """One after the other."""
    seconds: float
    """How long each lasts, and the quiet phase before the first."""

    @classmethod
    def of(cls, seed: int, *, seconds: float = 0.0, faults: str = "") -> CellsPlan:
        """The plan of a seed; given values are not drawn."""
        draw = random.Random(f"cells {seed}")
        drawn = tuple(draw.sample(FAULTS, len(FAULTS)))
        return cls(seed, tuple(faults.split(",")) if faults else drawn, seconds or draw.choice((1.0, 2.0, 4.0)))


class Timed(NamedTuple):
    """A call of a probe; the error is "" for one that has succeeded. Times in microseconds."""

    cell: str
    call: Call
    begin: int
    end: int
    error: str


class Phase(NamedTuple):
    """A time in which a cell had a fault; the cell is "" in the quiet phase."""

    cell: str
    begin: int
    end: int


@dataclass
class CellsOutcome:
    """The outcome of a round."""

    plan: CellsPlan
    history: History
    calls: list[Timed] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def micros(self, call: Call, *, quiet: bool) -> list[int]:
        """How long the calls of a phase took; beside a fault those of the other cells."""
        return sorted(
            timed.end - timed.begin
            for timed in self.calls
            for phase in self.phases
            if timed.call == call and (not phase.cell) is quiet and _beside(timed, phase)
        )

    @property
    def figures(self) -> str:
        """A line about it."""
        ops = self.history.ops
        counts = {outcome: sum(op.outcome == outcome for op in ops) for outcome in ("ok", "refused", "unknown")}
        told = [f"seed={self.plan.seed} cells faults={','.join(self.plan.faults)}×{self.plan.seconds:g}s"]
        told.append(f"ops={counts['ok']}+{counts['unknown']}?-{counts['refused']} seen={len(self.history.seen)}")
        for call in ("get", "publish"):
            quiet, beside = self.micros(call, quiet=True), self.micros(call, quiet=False)
            if quiet and beside:
                before, after = percentile(quiet, 0.99), percentile(beside, 0.99)
                told.append(
                    f"{call}: p50 {percentile(quiet, 0.5) / 1000:.1f} → {percentile(beside, 0.5) / 1000:.1f} ms, "
                    f"p99 {before / 1000:.1f} → {after / 1000:.1f} ms ({after / before:.2f} ×, {len(beside)} calls)"
                )
        return f"{' '.join(told)} problems={len(self.problems)}"


def percentile(micros: list[int], part: float) -> int:
    """The value below which such a part of sorted ones is."""
    return micros[min(len(micros) - 1, int(len(micros) * part))]


def _beside(timed: Timed, phase: Phase) -> bool:
    return timed.cell != phase.cell and phase.begin <= timed.begin and timed.end <= phase.end


def undisturbed(calls: list[Timed], phases: list[Phase]) -> Iterator[str]:
    """Calls of the cells that had no fault, and that failed ([3])."""
    for timed in calls:
        faulty = {phase.cell for phase in phases if phase.begin <= timed.end and timed.begin <= phase.end}
        if timed.error and timed.cell not in faulty:
            yield f"[3] a {timed.call} of the cell {timed.cell} failed, and it had no fault: {timed.error}"


class Homes:
    """Opens clients of a home that is drawn by chance."""

    def __init__(self, addresses: list[str], draw: random.Random) -> None:
        self._addresses = addresses
        self._draw = draw

    def client(self, *, timeout: float) -> Client:
        return Client(self._draw.choice(self._addresses), timeout=timeout)


@dataclass(frozen=True)
class Place:
    """A cell as workers see it: its name, and how they get at it ([2])."""

    name: str
    server: Homes

    @property
    def topics(self) -> tuple[str, str]:
        """Its topics; the first one acts on expiration."""
        return f"{self.name}-orders", f"{self.name}-kept"


class TopicFollower(Follower):
    """Follows one topic."""

    def _open(self, client: Client) -> Subscription:
        return client.subscribe(
            self.topics[0], changes=True, start=self.bookmark or EARLIEST, progress="200ms", retry_for=1.0
        )


class Probe(Worker):
    """Gets and publishes of one topic by a client that others use for other cells; each call is timed."""

    def __init__(
        self, place: Place, shared: Client, history: History, lives: Lives, draw: random.Random, number: int
    ) -> None:
        super().__init__(f"probe {place.name}{number}", place, history, lives, draw)
        self.calls: list[Timed] = []
        self._shared = shared
        self._prefix = f"probe{number}"
        self._topic = place.topics[1]
        self._count = 0

    def run(self) -> None:
        try:
            self.work(self._shared)
        except BaseException as failure:
            self.failure = failure
            raise

    def work(self, client: Client) -> None:
        while not self.ending.wait(self.draw.random() * 0.02):
            key = f"{self._prefix}-{self.draw.randrange(PROBE_KEYS)}"
            if self.draw.random() < 0.5:
                self._timed("get", lambda key=key: client.get(self._topic, key))  # type: ignore[misc]  # of this turn
            else:
                self._publish(client, key)

    def _publish(self, client: Client, key: str) -> None:
        self._count += 1
        tag = f"{self._prefix}.{self._count}"
        op = Op(self.instance.name, 0, self.name, self._topic, key, "put", tag, now())
        self.history.ops.append(op)

        def act() -> None:
            op.version = client.publish(self._topic, {"id": key, "n": tag}).version
            op.outcome = "ok"

        self._timed("publish", act)
        op.end = now()

    def _timed(self, call: Call, act: Callable[[], object]) -> None:
        begin, error = now(), ""
        try:
            act()
        except SowError as failure:
            error = f"{failure.reason}: {failure.message}"
        self.calls.append(Timed(self.instance.name, call, begin, now(), error))


class CellsRound:
    """Owns three cells and their clients for one round."""

    def __init__(self, plan: CellsPlan, folder: Path) -> None:
        self.plan: Final = plan
        self._draw = random.Random(f"nemesis {plan.seed}")
        ports = {name: free_port() for name in NAMES}
        self.proxies: Final = {name: Proxy(f"127.0.0.1:{ports[name]}") for name in NAMES}
        homes = Homes([proxy.address for proxy in self.proxies.values()], random.Random(f"homes {plan.seed}"))
        self.places: Final = {name: Place(name, homes) for name in NAMES}
        acting = tuple(place.topics[0] for place in self.places.values())
        self.history: Final = History(acting=acting)
        addresses = {name: [proxy.address] for name, proxy in self.proxies.items()}
        text = placement(1, *((f"{name}-.*", name) for name in NAMES), cells=addresses)
        self.servers: Final = {
            name: CellServer(folder / name, name, text, config=self._config(name), port=ports[name], start=False)
            for name in NAMES
        }

    def _config(self, name: str) -> str:
        return f'[server]\ninstance = "{name}"\n[storage]\nmemtable = "1MiB"\nother_memtable = "1MiB"\n' + "".join(
            f'[topics.{topic}]\nkey = ["/id"]\n' + ('expiration = "enabled"\n' if topic in self.history.acting else "")
            for place in self.places.values()
            for topic in place.topics
        )

    def life(self, name: str) -> int:
        """No cell loses its data."""
        return 0

    def run(self) -> CellsOutcome:
        """Runs it, and judges."""
        outcome = CellsOutcome(self.plan, self.history)
        try:
            with contextlib.ExitStack() as stack:
                for name in NAMES:
                    stack.callback(self.proxies[name].close)
                    stack.callback(self.servers[name].kill9)
                    self.servers[name].launch()
                for server in self.servers.values():
                    server.await_ready()
                self._play(outcome, stack)
                outcome.problems += [line for server in self.servers.values() for line in server.faults()]
        except Exception as failure:
            outcome.problems.append(f"the round itself: {type(failure).__name__}: {failure}")
        outcome.problems += undisturbed(outcome.calls, outcome.phases)
        outcome.problems += map(str, check(self.history))
        return outcome

    def _play(self, outcome: CellsOutcome, stack: contextlib.ExitStack) -> None:
        shared = [
            stack.enter_context(Client(self.proxies[name].address, timeout=PATIENT_SECONDS))
            for name in self._draw.sample(NAMES, 2)
        ]
        probes = [
            Probe(place, client, self.history, self, self._drawn(f"probe {place.name}{number}"), number)
            for number, client in enumerate(shared)
            for place in self.places.values()
        ]
        workers = self._workers()
        for worker in [*workers, *probes]:
            stack.callback(worker.stop)
            worker.start()
        try:
            # All know their way, and the caches are warm, before the quiet phase is timed.
            until(lambda: all(len(probe.calls) >= 20 for probe in probes), HEAL_SECONDS, "the first calls")
            self._phase(outcome, "", lambda: time.sleep(self.plan.seconds))
            for what in self.plan.faults:
                self._fault(outcome, what, self._draw.choice(NAMES), probes)
        finally:
            outcome.calls += [timed for probe in probes for timed in probe.calls]
        followers = [worker for worker in workers if isinstance(worker, Follower)]
        end_all([*probes, *(worker for worker in workers if worker not in followers)])
        self._await_followers(followers)
        end_all(followers)
        self.history.finals = self._read_all()
        self._restart_all()
        self.history.restarted = self._read_all()

    def _workers(self) -> list[Worker]:
        workers: list[Worker] = []
        for place in self.places.values():

            def draw(what: str, name: str = place.name) -> random.Random:
                return self._drawn(f"{what} {name}")

            of_both: list[Worker] = [
                Writer(0, place, self.history, self, draw("writer"), rest_seconds=0.03, replicated=False),
                Retrier(place, self.history, self, draw("publisher"), rest_seconds=0.03),
                Reader(place, self.history, self, draw("reader")),
            ]
            for worker in of_both:
                worker.topics = place.topics
            of_one: list[Worker] = [
                TopicFollower(0, place, self.history, self, draw("follower")),
                TopicFollower(1, place, self.history, self, draw("follower 1")),
                Consumer(0, place, self.history, self, draw("durable")),
            ]
            for number, worker in enumerate(of_one):
                worker.topics = (place.topics[number % 2],)
            workers += [*of_both, *of_one]
        return workers

    def _drawn(self, what: str) -> random.Random:
        return random.Random(f"{what} {self.plan.seed}")

    # -- faults -------------------------------------------------------------------------------------------------------

    def _phase(self, outcome: CellsOutcome, cell: str, act: Callable[[], object]) -> None:
        begin = now()
        try:
            act()
        finally:
            outcome.phases.append(Phase(cell, begin, now()))

    def _fault(self, outcome: CellsOutcome, what: str, name: str, probes: list[Probe]) -> None:
        """A cell has a fault for a while; it is over once the cell serves every client again."""
        self.history.faults.append(Fault(now(), f"{what} {name} for {self.plan.seconds:g} s"))
        server, proxy = self.servers[name], self.proxies[name]

        def act() -> None:
            match what:
                case "kill":
                    server.kill9()
                case "stop":
                    server.signal(signal.SIGSTOP)
                case "cut":
                    proxy.refuse()
                case "stall":
                    proxy.stall()
            time.sleep(self.plan.seconds)
            match what:
                case "kill":
                    server.start()
                case "stop":
                    server.signal(signal.SIGCONT)
                case _:
                    proxy.mend()
            healed = now()
            own = [probe for probe in probes if probe.instance.name == name]
            until(lambda: all(_serves(probe, healed) for probe in own), HEAL_SECONDS, f"{name} to serve after a {what}")

        self._phase(outcome, name, act)

    # -- the end ------------------------------------------------------------------------------------------------------

    def _direct(self, name: str) -> Client:
        return self.servers[name].client(timeout=PATIENT_SECONDS)

    def _await_followers(self, followers: list[Follower]) -> None:
        heads = {}
        for name in NAMES:
            with self._direct(name) as client:
                status = client.status()
            heads[name] = status.last_sequence, status.journal_epoch
        for follower in followers:
            until(
                lambda follower=follower: (  # type: ignore[misc]  # of this turn
                    follower.failure is not None or follower.reached(*heads[follower.instance.name])
                ),
                HEAL_SECONDS,
                f"{follower.name}, at {follower.bookmark}, to reach {heads}",
            )

    def _read_all(self) -> list[Read]:
        found = []
        for name, place in self.places.items():
            with self._direct(name) as client:
                found += [read_topic(client, name, topic, [], self) for topic in place.topics]
        return found

    def _restart_all(self) -> None:
        for server in self.servers.values():
            if self._draw.random() < 0.5:
                server.kill9()
            else:
                server.terminate()
            server.launch()
        for server in self.servers.values():
            server.await_ready()


def _serves(probe: Probe, since: int) -> bool:
    return any(not timed.error and timed.begin >= since for timed in probe.calls[-20:])
