"""A round: a cluster of three, clients, a nemesis that causes faults, healing, and the judgement.

All random choices come from one seed. The order of threads and of messages, which the operating system adds,
is not: a seed that fails once fails often, not always.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from tests.robustness.checker import Problem, check
from tests.robustness.history import Dropped, Fault, History
from tests.robustness.workload import (
    ACTING,
    TOPICS,
    Consumer,
    Follower,
    Reader,
    Retrier,
    Roamer,
    Worker,
    Writer,
    end_all,
    now,
    read_topic,
)
from tests.support.servers.cluster import Cluster, Link

NAMES: Final = ("a", "b", "c")
SHAPES: Final[dict[str, list[Link]]] = {
    "mesh": [(a, b) for a in NAMES for b in NAMES if a != b],
    "ring": [("a", "b"), ("b", "c"), ("c", "a")],
    "line": [("a", "b"), ("b", "a"), ("b", "c"), ("c", "b")],
}
SECOND: Final = 1_000_000
KNOBS: Final = {
    "backoff_max_micros": SECOND,
    "backoff_operator_micros": SECOND,
    "heartbeat_micros": SECOND // 5,
    "silence_micros": 2 * SECOND,
    "settle_micros": SECOND,
    "cursor_micros": SECOND // 2,
}
"""Settings that are smaller than in service, as a round is short."""
HEAL_SECONDS: Final = 90.0
QUIET_SECONDS: Final = 0.3


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings of a round."""

    seed: int
    shape: str
    grace_micros: int
    """How long tombstones are kept; 0: as configured by default."""
    replicated: bool
    """Whether links are sync, and half of the writes REPLICATED."""
    retained: bool
    """False: the journal is kept for peers alone."""
    seconds: float
    faults: tuple[str, ...]
    """The faults that the nemesis chooses from."""
    victim: str
    """The one instance that may lose its data."""

    @classmethod
    def of(cls, seed: int, *, shape: str = "", seconds: float = 0.0, grace_micros: int = -1, faults: str = "") -> Plan:
        """The plan of a seed; given values are not drawn."""
        draw = random.Random(f"plan {seed}")
        drawn_shape = draw.choice(sorted(SHAPES))
        drawn_grace = draw.choice([0, 0, 60 * SECOND])
        replicated, retained = draw.random() < 0.5, draw.random() < 0.8
        drawn_faults = tuple(draw.sample(sorted(NEMESIS), draw.randint(2, 5)))
        return cls(
            seed,
            shape or drawn_shape,
            drawn_grace if grace_micros < 0 else grace_micros,
            replicated,
            retained,
            seconds or 4.0,
            tuple(faults.split(",")) if faults else drawn_faults,
            # In a line not the one in the middle: the other end may undo changes that it alone had passed on to one end
            # (docs/replication.md).
            draw.choice(("a", "c") if (shape or drawn_shape) == "line" else NAMES),
        )


@dataclass
class Outcome:
    """The outcome of a round."""

    plan: Plan
    history: History
    problems: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def figures(self) -> str:
        """A line about it."""
        ops = self.history.ops
        counts = {outcome: sum(op.outcome == outcome for op in ops) for outcome in ("ok", "refused", "unknown")}
        took = " ".join(f"{name} {seconds:.1f}s" for name, seconds in self.seconds.items())
        return (
            f"seed={self.plan.seed} {self.plan.shape} grace={self.plan.grace_micros / SECOND:g}s "
            f"{'replicated ' if self.plan.replicated else ''}{'' if self.plan.retained else 'pruned '}"
            f"faults={','.join(self.plan.faults)}×{len(self.history.faults)} ops={counts['ok']}+{counts['unknown']}?"
            f"-{counts['refused']} seen={len(self.history.seen)} reads={len(self.history.reads)} "
            f"dropped={len(self.history.dropped)} {took} problems={len(self.problems)}"
        )


class Round:
    """Owns a cluster and its clients for one round."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan: Final = plan
        self.folder: Final = folder
        self.history: Final = History(acting=(ACTING,), pruned=not plan.retained, roams=True)
        self.draw: Final = random.Random(f"nemesis {plan.seed}")
        self.cluster: Final = self._cluster()
        self.busy: Final[dict[str, threading.Lock]] = {name: threading.Lock() for name in NAMES}
        """Of each instance: held while something is done to its process."""
        self._lives = dict.fromkeys(NAMES, 0)
        self._clock = 0.0

    def life(self, name: str) -> int:
        """How often the data of an instance have been lost so far."""
        return self._lives[name]

    def _cluster(self) -> Cluster:
        plan = self.plan
        more = 'sync_timeout = "500ms"\nmax_clock_skew = "1m"\n'
        if plan.grace_micros >= 60 * SECOND:
            more += f'tombstone_grace = "{plan.grace_micros // SECOND}s"\n'
        retention = "" if plan.retained else 'retain_time = "0s"\nretain_bytes = "0B"\n'
        topics = "".join(
            f'[topics.{topic}]\nkey = ["/id"]\n{retention}' + ('expiration = "enabled"\n' if topic == ACTING else "")
            for topic in TOPICS
        )
        cluster = Cluster(
            self.folder,
            *NAMES,
            topics=topics,
            links=SHAPES[plan.shape],
            mode="sync" if plan.replicated else "async",
            more=more,
            start=False,
        )
        for name in NAMES:
            self.shift(cluster, name, 0)
        return cluster

    def shift(self, cluster: Cluster, name: str, micros: int) -> None:
        """From the next start on the clock of an instance is off by so much."""
        knobs = dict(KNOBS)
        if 0 < self.plan.grace_micros < 60 * SECOND:
            knobs["tombstone_grace_micros"] = self.plan.grace_micros
        cluster[name].shift(micros, **knobs)

    def run(self) -> Outcome:
        """Runs it, and judges."""
        outcome = Outcome(self.plan, self.history)
        try:
            with self.cluster, contextlib.ExitStack() as stack:
                with self._timed(outcome, "start"):
                    self.cluster.start()
                    self.cluster.await_streaming()
                workers = self._workers()
                followers = [worker for worker in workers if isinstance(worker, Follower)]
                roamer = Roamer([self.cluster[name] for name in NAMES], self.history, self, self._drawn("roamer"))
                writers = [worker for worker in workers if worker not in followers]
                for worker in [*workers, roamer]:
                    stack.callback(worker.stop)
                    worker.start()
                with self._timed(outcome, "faults"):
                    self._attack()
                with self._timed(outcome, "heal"):
                    self._heal()
                    end_all(writers)
                    self._settle(outcome)
                    self._await_followers(followers)
                    self._await_roamer(roamer)
                    end_all([*followers, roamer])
                with self._timed(outcome, "restart"):
                    self._restart_all()
                    self._note_dropped(*NAMES)
                # gRPC itself complains of bytes that were damaged on their way; that is no fault of ours.
                outcome.problems += [line for line in self.cluster.faults() if '"logger": "grpc.' not in line]
        except (Exception, pytest.fail.Exception) as failure:
            outcome.problems.append(f"the round itself: {type(failure).__name__}: {failure}")
        self.history.drops_allowed = bool(self.history.wipes) or 0 < self.plan.grace_micros < 60 * SECOND
        outcome.problems += map(str, check(self.history))
        return outcome

    @contextlib.contextmanager
    def _timed(self, outcome: Outcome, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            outcome.seconds[name] = time.monotonic() - began

    # -- clients ----------------------------------------------------------------------------------------------------

    def _workers(self) -> list[Worker]:
        workers: list[Worker] = []
        for name in NAMES:
            instance = self.cluster[name]

            def draw(what: str, name: str = name) -> random.Random:
                return self._drawn(f"{what} {name}")

            workers += [
                Writer(
                    number,
                    instance,
                    self.history,
                    self,
                    draw(f"writer {number}"),
                    rest_seconds=0.03,
                    replicated=self.plan.replicated,
                )
                for number in range(2)
            ]
            workers.append(Retrier(instance, self.history, self, draw("publisher"), rest_seconds=0.03))
            workers.append(Reader(instance, self.history, self, draw("reader")))
            workers.append(Follower(0, instance, self.history, self, draw("follower")))
            workers.append(Consumer(0, instance, self.history, self, draw("durable")))
        return workers

    def _drawn(self, what: str) -> random.Random:
        return random.Random(f"{what} {self.plan.seed}")

    def _await_roamer(self, roamer: Roamer) -> None:
        """Waits until it was handed all records that are there in the end; it is judged later whether it was."""
        if self.history.pruned or self.history.wipes:
            return
        rows = [row for read in self.history.finals for row in read.rows if row.topic == ACTING]
        give_up = time.monotonic() + HEAL_SECONDS
        while not roamer.has_all(rows) and roamer.failure is None and time.monotonic() < give_up:
            time.sleep(0.05)

    def _await_followers(self, followers: list[Follower]) -> None:
        heads = {}
        for name in NAMES:
            status = self.cluster[name].client.status()
            heads[name] = status.last_sequence, status.journal_epoch
        give_up = time.monotonic() + HEAL_SECONDS
        for follower in followers:
            while not follower.reached(*heads[follower.instance.name]):
                if follower.failure is not None or time.monotonic() > give_up:
                    raise AssertionError(
                        f"{follower.name} is at {follower.bookmark}, not at {heads}"
                    ) from follower.failure
                time.sleep(0.02)

    # -- faults -----------------------------------------------------------------------------------------------------

    def _attack(self) -> None:
        """Faults until the time is over: each lasts for a while, and several may last at the same time."""
        ends = time.monotonic() + self.plan.seconds
        running: list[threading.Thread] = []
        while (left := ends - time.monotonic()) > 0:
            time.sleep(min(left, self.draw.uniform(0.05, 0.5)))
            what = self.draw.choice(self.plan.faults)
            lasts = min(self.draw.choice((0.1, 0.4, 1.0, 2.5)), max(0.1, ends - time.monotonic()))
            act = NEMESIS[what](self, random.Random(self.draw.random()), lasts)
            if act is not None:
                thread = threading.Thread(target=act, name=what, daemon=True)
                thread.start()
                running.append(thread)
        for thread in running:
            thread.join(60)
            assert not thread.is_alive(), f"{thread.name} does not end"

    def note(self, what: str) -> None:
        """Writes a fault down."""
        self.history.faults.append(Fault(now(), what))

    def lose(self, name: str) -> None:
        """Deletes the data of an instance that does not run."""
        self._note_dropped(name)
        self._lives[name] += 1
        self.history.wipes[name] = self._lives[name]
        self.cluster[name].wipe()

    def died(self, name: str) -> None:
        """Writes down that a process has ended."""
        self.history.deaths.append((name, now()))

    def _note_dropped(self, *names: str) -> None:
        for name in names:
            for path in (self.cluster[name].server.data / "dropped").glob("*.ndjson"):
                for line in path.read_text().splitlines():
                    row = json.loads(line)
                    topic = path.name.partition(".from-")[0]
                    self.history.dropped.append(Dropped(name, topic, row["key"], row["version"], row["origin"]))

    # -- healing ----------------------------------------------------------------------------------------------------

    def _heal(self) -> None:
        for proxy in self.cluster.proxies.values():
            proxy.mend()
            proxy.cut()
        dead = [name for name in NAMES if not self.cluster[name].server.alive]
        if dead:
            self.cluster.start(*dead)

    def _settle(self, outcome: Outcome) -> None:
        """Waits until all is quiet, and notes what all instances hold. They may still differ: that is judged."""
        give_up = time.monotonic() + HEAL_SECONDS
        before: object = None
        while True:
            self.cluster.await_streaming(seconds=HEAL_SECONDS)
            marks = self._marks()
            if marks == before and self._are_equal():
                break
            before = marks
            if time.monotonic() > give_up:
                outcome.problems.append("checker [5]: no quiet, or no equality")
                break
            time.sleep(QUIET_SECONDS)
        for sender, receiver in self.cluster.links:
            for verified in self.cluster.verified(sender, receiver):
                if verified.differing or verified.left_out:
                    outcome.problems.append(f"checker [5] verify {sender} {receiver}: {verified}")

    def _marks(self) -> object:
        return [(name, self.cluster[name].client.status().journal_epoch, self._versions(name)) for name in NAMES]

    def _versions(self, name: str) -> object:
        return [
            (link.peer, link.cursor, link.head_sequence)
            for link in self.cluster[name].client.replication_status().incoming
        ]

    def _are_equal(self) -> bool:
        finals = [read_topic(self.cluster[name].client, name, topic, [], self) for topic in TOPICS for name in NAMES]
        alone = History(acting=(ACTING,), finals=finals)
        self.history.finals = finals
        return not check_equal(alone)

    def _restart_all(self) -> None:
        for name in NAMES:
            server = self.cluster[name].server
            if self.draw.random() < 0.5:
                server.kill9()
            else:
                server.signal(signal.SIGTERM)
        for name in NAMES:
            if self.cluster[name].server.alive or self.cluster[name].server._process is not None:
                self.cluster[name].server.wait()
            self.shift(self.cluster, name, 0)
        self.cluster.start()
        self.cluster.await_streaming()
        self.history.restarted = [
            read_topic(self.cluster[name].client, name, topic, [], self) for topic in TOPICS for name in NAMES
        ]


def check_equal(history: History) -> list[Problem]:
    """The differences between instances."""
    return [problem for problem in check(history) if problem.rule == "[5]"]


# -- the nemesis ------------------------------------------------------------------------------------------------------

Act = Callable[[], None]


def _link(what: str) -> Callable[[Round, random.Random, float], Act]:
    """A fault of one link, or of all that end at one instance."""

    def choose(round_: Round, draw: random.Random, lasts: float) -> Act:
        links = [draw.choice(round_.cluster.links)]
        if draw.random() < 0.3:
            name = draw.choice(NAMES)
            links = [link for link in round_.cluster.links if name in link]
        after, mask, delay = draw.randrange(1, 4000), 1 << draw.randrange(8), draw.choice((0.02, 0.1, 0.3))

        def act() -> None:
            round_.note(f"{what} {links} for {lasts:.1f} s")
            proxies = [round_.cluster.proxies[link] for link in links]
            for proxy in proxies:
                match what:
                    case "cut":
                        proxy.cut_after(after)
                    case "damage":
                        proxy.damage_after(after, mask)
                    case "refuse":
                        proxy.refuse()
                    case "stall":
                        proxy.stall()
                    case "delay":
                        proxy.delay(delay)
            time.sleep(lasts)
            for proxy in proxies:
                if what in ("refuse", "stall", "delay"):
                    proxy.mend()

        return act

    return choose


def _process(what: str) -> Callable[[Round, random.Random, float], Act | None]:
    """A fault of one process."""

    def choose(round_: Round, draw: random.Random, lasts: float) -> Act | None:
        name = round_.plan.victim if what == "wipe" else draw.choice(NAMES)
        shift = draw.randint(-5 * SECOND, 5 * SECOND)
        if not round_.busy[name].acquire(blocking=False):
            return None
        server = round_.cluster[name].server

        def act() -> None:
            try:
                round_.note(f"{what} {name} for {lasts:.1f} s" + (f", clock {shift}" if what == "clock" else ""))
                if what == "stop":
                    server.signal(signal.SIGSTOP)
                    time.sleep(lasts)
                    server.signal(signal.SIGCONT)
                    return
                if what == "restart":
                    server.terminate()
                else:
                    server.kill9()
                round_.died(name)
                if what == "wipe":
                    round_.lose(name)
                if what == "clock":
                    round_.shift(round_.cluster, name, shift)
                time.sleep(lasts)
                server.start()
                round_.note(f"{name} is back")
            finally:
                round_.busy[name].release()

        return act

    return choose


NEMESIS: Final[dict[str, Callable[[Round, random.Random, float], Act | None]]] = {
    **{what: _link(what) for what in ("cut", "damage", "refuse", "stall", "delay")},
    **{what: _process(what) for what in ("kill", "stop", "wipe", "clock", "restart")},
}
