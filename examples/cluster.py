"""`make demo-cluster`: three real servers in a ring take real flights at the same time. Each step checks its claims.

It leaves the configurations and the data in `sow-cluster`. Exit codes are those of the demo: 0 if every claim held, 1
if one did not, 2 if it could not run, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec

from examples.demo import PROJECT, exit_code
from examples.flights import DEPARTURE_FIELDS, RECORDS_ALL, Flight, departure_key, read_flights
from examples.narration import Narration
from examples.server_process import HOST, ServerProcess, free_port, remove_data
from examples.story import DEPARTURES, MICROS, Snapshot, live_keys, snapshot
from examples.wire import Wire
from sow_client import Ack, Client, OutgoingLink, Record, SowError

RING: Final = {"a": "b", "b": "c", "c": "a"}
"""The links: sender and receiver."""
FOLDER: Final = "sow-cluster"
RECORDS: Final = 30_000
CONTESTED: Final = 300
"""Records that are updated at all three instances while a link is cut."""
DELETED: Final = 100
"""Number of those records that the last of the three deletes."""
QUIET_SECONDS_MAX: Final = 60.0
LOOK_SECONDS: Final = 0.1

CONFIG: Final = """\
# Written by `make demo-cluster`: instance {name} of the ring a → b → c → a.

[server]
listen = "{listen}"
data_dir = "{data}"
instance = "{name}"

[replication]
accept = ["{source}"]       # it sends here
token_file = "links.token"

[[replication.peers]]    # this one sends there{remark}
name = "{peer}"
address = "{address}"
mode = "sync"

[topics.{topic}]
key = [{key}]
expiration = "enabled"
"""


@dataclass(slots=True)
class Instance:
    """One of the three: its process, and a connection to it."""

    name: str
    folder: Path
    port: int
    server: ServerProcess
    client: Client

    @property
    def data_name(self) -> str:
        """The data directory, in the folder."""
        return f"{self.name}-data"

    def link(self) -> OutgoingLink:
        """The status of its link to the next one."""
        (link,) = self.client.replication_status().outgoing
        return link


class Cluster:
    """The story, step by step. Owns the three instances, and the state that one step leaves to the next."""

    def __init__(self, narration: Narration, instances: Mapping[str, Instance], wire: Wire) -> None:
        self._narration = narration
        self._instances = instances
        self._wire = wire
        self._latest: dict[str, bytes] = {}
        """The expected document of each key, unless it expires."""
        self._short: set[str] = set()
        """Keys with a short lifetime."""

    def run(self, flights: Sequence[Flight]) -> None:
        """Runs every step. Raises ClaimFailed."""
        third = len(flights) // 3
        first, second, last = flights[:third], flights[third : 2 * third], flights[2 * third :]
        self.publish_everywhere(first, short_seconds=5 + 10 * len(flights) // RECORDS)
        self.cut_and_heal(second)
        self.lose_a_disk(last)
        self.verify()

    # ---- the steps ----

    def publish_everywhere(self, flights: Sequence[Flight], *, short_seconds: int) -> None:
        """All three take flights at once."""
        tell = self._narration
        tell.step(
            f"Publish {len(flights):,} flights at all three at once",
            "Each takes the flights of some carriers. Those under 500 miles live for seconds, the longest for ever.",
            "Then the cancelled flights are deleted, all of them at c, wherever they were published.",
        )
        started = time.monotonic()
        acknowledged = self._publish(_parts(flights, self._instances), short=f"{short_seconds}s")
        seconds = time.monotonic() - started
        tell.claim(
            f"all {len(flights):,} are acknowledged: "
            + ", ".join(f"{count:,} by {name}" for name, count in acknowledged.items())
            + f"; {len(flights) / seconds:,.0f}/s",
            sum(acknowledged.values()) == len(flights),
            found=acknowledged,
        )
        self._short = {departure_key(flight) for flight in flights if _ttl(flight, "") == ""}
        quiet = self._wait_until_quiet()
        tell.say(f"lag 0 on all links {quiet:.1f} s later")
        deleted = self._instances["c"].client.sow_delete(DEPARTURES, filter="/dep_time IS NULL")
        tell.say(f"c has deleted {deleted.deleted:,} cancelled flights")
        for key in [key for key, payload in self._latest.items() if _cancelled(payload)]:
            del self._latest[key]
        self._wait_until_quiet()
        self._show_links()
        self._claim_equal("all three hold the same flights, byte for byte, with the same versions and expire times")

    def cut_and_heal(self, flights: Sequence[Flight]) -> None:
        """A link is cut while publishing continues."""
        tell = self._narration
        a, b, c = self._instances.values()
        tell.step(
            "Cut the link a → b while publishing continues",
            f"{len(flights):,} more flights. Meanwhile {CONTESTED} old ones are updated at a, then at b, then at c,",
            f"which finally deletes {DELETED} of them: the last writer wins. And short lifetimes end.",
        )
        contested = sorted(key for key, payload in self._latest.items() if key not in self._short)[:CONTESTED]
        tell.claim(f"there are {CONTESTED} flights to update", len(contested) == CONTESTED, found=len(contested))
        lost_before = sum(self._superseded().values())
        cut = threading.Event()

        def on_progress(done: int) -> None:
            if done >= len(flights) // 4 and not cut.is_set():
                cut.set()
                self._wire.cut()

        self._publish(_parts(flights, self._instances), on_progress=on_progress)
        for instance in (a, b, c):
            for key in contested:
                seen = {**msgspec.json.decode(self._latest[key]), "seen_by": instance.name}
                self._latest[key] = msgspec.json.encode(seen)
            instance.client.publish_many(DEPARTURES, [self._latest[key] for key in contested], ttl="1h")
        c.client.sow_delete(DEPARTURES, keys=contested[:DELETED])
        for key in contested[:DELETED]:
            del self._latest[key]
        link = a.link()
        tell.claim(
            f"a knows that b is behind: {link.lag_sequences:,} changes, state {link.state}",
            link.lag_sequences > len(contested) and link.state not in {"streaming", "seeding"},
            found=link,
        )
        self._show_links()
        self._watch_expiry()
        self._wire.heal()
        quiet = self._wait_until_quiet()
        tell.say(f"the link is healed: lag 0 on all links {quiet:.1f} s later")
        self._show_links()
        lost = sum(self._superseded().values()) - lost_before
        tell.claim(f"{lost:,} updates have come late and lost, as they should", lost >= CONTESTED, found=lost)
        _, keys = live_keys(b.client, DEPARTURES)
        tell.claim(f"the {DELETED} that c deleted stay deleted", not keys & set(contested[:DELETED]))
        self._claim_equal(f"all three hold the same, the other {CONTESTED - DELETED} as c wrote them")

    def lose_a_disk(self, flights: Sequence[Flight]) -> None:
        """One instance dies, and its data are lost."""
        tell = self._narration
        b = self._instances["b"]
        tell.step(
            "kill -9 of b, its data directory is lost, and publishing continues",
            f"{len(flights):,} more flights. Writes that b acknowledged as REPLICATED are also at c, so none is lost.",
            "An empty b starts under its name, with a new id, and a seeds it. Half of the flights for a and c come",
            "while b is away, the other half while it is seeded.",
        )
        parts = _parts(flights, self._instances)
        seconds_to_ready: list[float] = []
        ready = threading.Event()
        id_before = b.client.status().instance_id

        def start_again() -> None:
            b.client.close()
            b.server.wait()
            remove_data(b.folder, b.data_name)
            seconds_to_ready.append(b.server.start())
            b.client = Client(f"{HOST}:{b.port}")

        def publish_on() -> int:
            others = {name: parts[name] for name in ("a", "c")}
            away = self._publish({name: part[: len(part) // 2] for name, part in others.items()})
            ready.wait()
            self._publish({name: part[len(part) // 2 :] for name, part in others.items()})
            return sum(away.values())

        with ThreadPoolExecutor(1) as others:
            try:
                acknowledged = self._publish_until_killed(parts["b"], len(parts["b"]) // 3)
                rest = others.submit(publish_on)
                start_again()
            finally:
                ready.set()  # otherwise a failure here would leave the thread waiting for ever
            away = rest.result()
        kept = parts["b"][:acknowledged]
        for flight in kept:
            self._latest[departure_key(flight)] = flight.document
        tell.say(
            f"b had acknowledged {acknowledged:,} of {len(parts['b']):,}; "
            f"empty, it was ready {seconds_to_ready[0]:.2f} s after the start of its process; "
            f"meanwhile a and c took {away:,}"
        )
        id_after = b.client.status().instance_id
        tell.claim("b is another instance of the same name", id_after != id_before, found=id_after)
        quiet = self._wait_until_quiet()
        tell.say(f"b is seeded: lag 0 on all links {quiet:.1f} s later")
        self._show_links()
        wanted = {departure_key(flight) for flight in kept}
        for instance in self._instances.values():
            _, keys = live_keys(instance.client, DEPARTURES)
            tell.claim(
                f"{instance.name} has all {len(wanted):,} that b had acknowledged as REPLICATED",
                wanted <= keys,
                found=f"{len(wanted - keys):,} are missing",
            )
        # A flight that b took and did not acknowledge may or may not have reached c.
        maybe = {departure_key(flight) for flight in parts["b"][acknowledged:]}
        self._claim_equal("all three hold the same again", maybe=maybe)

    def _publish_until_killed(self, flights: Sequence[Flight], enough: int) -> int:
        """Publishes at b, kills b once it has acknowledged `enough` flights, and returns the number acknowledged."""
        b = self._instances["b"]
        done = 0

        def on_ack(ack: Ack) -> None:
            nonlocal done
            if done < enough <= done + ack.records:
                b.server.kill()
            done += ack.records

        try:
            with b.client.publisher(
                DEPARTURES, ttl="1h", durability="replicated", batch_records=100, retry_for=0, on_ack=on_ack
            ) as publisher:
                for flight in flights:
                    publisher.publish(flight.document)
        except SowError as error:
            self._narration.say(f"the publisher at b was told {error.reason}")
        return done

    def verify(self) -> None:
        """Compares the ends of each link, as `sow replication verify` does."""
        tell = self._narration
        tell.step("Verify each link", "As `sow replication verify` does: checksums of buckets, then versions.")
        for name, peer in RING.items():
            (found,) = self._instances[name].client.verify_replication(peer)
            tell.claim(
                f"{name} → {peer}: {found.records:,} records compared, none differs",
                found.records > 0 and found.differing == 0 and not found.left_out,
                found=found,
            )

    # ---- helpers of several steps ----

    def _publish(
        self,
        parts: Mapping[str, Sequence[Flight]],
        *,
        short: str = "1h",
        batch_records: int = 500,
        on_progress: Callable[[int], None] = lambda done: None,
    ) -> dict[str, int]:
        """Publishes at all instances at once. Returns the number that each has acknowledged. `short`: of short
        flights."""
        lock = threading.Lock()
        done: Counter[str] = Counter()

        def publish(name: str, part: Sequence[Flight]) -> None:
            def on_ack(ack: Ack) -> None:
                with lock:
                    done[name] += ack.records
                    on_progress(done.total())

            with self._instances[name].client.publisher(
                DEPARTURES, batch_records=batch_records, on_ack=on_ack
            ) as publisher:
                for flight in part:
                    publisher.publish(flight.document, ttl=_ttl(flight, short))

        with ThreadPoolExecutor(len(parts)) as publishers:
            for end in [publishers.submit(publish, name, part) for name, part in parts.items()]:
                end.result()
        self._latest |= {departure_key(flight): flight.document for part in parts.values() for flight in part}
        return dict(sorted(done.items()))

    def _wait_until_quiet(self) -> float:
        """Waits until every link is up with lag 0, and nothing has changed between two looks. Returns the seconds."""
        started = time.monotonic()
        before: list[int] = []
        while True:
            links = [instance.link() for instance in self._instances.values()]
            heads = [instance.client.status().last_sequence for instance in self._instances.values()]
            if heads == before and all(link.state == "streaming" and not link.lag_sequences for link in links):
                return time.monotonic() - started
            before = heads
            if time.monotonic() - started > QUIET_SECONDS_MAX:
                self._show_links()
                self._narration.claim(f"lag is 0 within {QUIET_SECONDS_MAX:.0f} s", False)
            time.sleep(LOOK_SECONDS)

    def _superseded(self) -> dict[str, int]:
        return {
            name: sum(link.superseded for link in instance.client.replication_status().incoming)
            for name, instance in self._instances.items()
        }

    def _show_links(self) -> None:
        rows = []
        for name, peer in RING.items():
            link = self._instances[name].link()
            (end,) = self._instances[peer].client.replication_status().incoming
            figures = (link.lag_sequences, end.applied, end.superseded)
            rows.append((f"{name} → {peer}", link.state, link.mode, *(f"{figure:,}" for figure in figures)))
        headings = ("link", "state", "mode", "behind", "applied", "superseded")
        self._narration.table(headings, rows, right=headings[3:])

    def _claim_equal(self, what: str, *, maybe: Iterable[str] = ()) -> None:
        """Claims that all instances hold the same records, those published last. `maybe`: keys that may be present."""
        found = {name: snapshot(instance.client, DEPARTURES) for name, instance in self._instances.items()}
        instant = max(one.as_of_micros for one in found.values())  # short lifetimes end during the read
        looks = {name: _look(one, instant) for name, one in found.items()}
        first, *others = looks.values()
        differing = {key for other in others for key in first.keys() | other.keys() if first.get(key) != other.get(key)}
        self._narration.claim(
            f"{what}: {len(first):,} records",
            not differing,
            found=f"{len(differing):,} differ, as {sorted(differing)[:3]}",
        )
        wrong = {key for key, look in first.items() if key in self._latest and look[0] != self._latest[key]}
        extra = first.keys() - self._latest.keys() - set(maybe)
        missing = self._latest.keys() - self._short - first.keys()
        self._narration.claim(
            "they are the last published record of each key, without deleted and expired ones",
            not wrong | extra | missing,
            found=f"{len(wrong):,} older, {len(extra):,} too many, {len(missing):,} missing",
        )

    def _watch_expiry(self) -> None:
        """Waits for the end of the short lifetimes. Expiries are not replicated."""
        deadline = max(
            [
                record.expire_time_micros or 0
                for instance in self._instances.values()
                for key, record in snapshot(instance.client, DEPARTURES).records.items()
                if key in self._short
            ],
            default=0,
        )
        wait = deadline / MICROS - time.time()
        if wait > 0:
            self._narration.say(f"{wait:.1f} s until the last short lifetime ends")
            time.sleep(wait)
        for name, instance in self._instances.items():
            as_of, keys = live_keys(instance.client, DEPARTURES)
            self._narration.claim(
                f"{name} has expired all {len(self._short):,} by itself, while nothing goes from a to b",
                as_of >= deadline and not keys & self._short,
                found=f"{len(keys & self._short):,} are left",
            )


def _parts(flights: Sequence[Flight], names: Iterable[str]) -> dict[str, list[Flight]]:
    """Divides the flights by carrier into parts of about equal size."""
    parts: dict[str, list[Flight]] = {name: [] for name in names}
    by_carrier: dict[str, list[Flight]] = {}
    for flight in flights:
        by_carrier.setdefault(flight.carrier, []).append(flight)
    for part in sorted(by_carrier.values(), key=len, reverse=True):
        min(parts.values(), key=len).extend(part)
    return parts


def _ttl(flight: Flight, short: str) -> str:
    if flight.miles < 500:
        return short
    return "1h" if flight.miles < 2_000 else "never"


def _cancelled(payload: bytes) -> bool:
    document: dict[str, object] = msgspec.json.decode(payload)
    return document["dep_time"] is None


def _look(found: Snapshot, instant: int) -> dict[str, tuple[object, ...]]:
    """For each record that is live at that instant, the values that must be the same everywhere."""
    return {key: _identity(found.records[key]) for key in found.live_at(instant)}


def _identity(record: Record) -> tuple[object, ...]:
    return record.payload, record.version, record.origin, record.expire_time_micros, record.publish_time_micros


def _write_configs(folder: Path, ports: Mapping[str, int], wire: Wire) -> None:
    _write_private(folder / "links.token", secrets.token_urlsafe(32) + "\n")
    sources = {peer: name for name, peer in RING.items()}
    for name, peer in RING.items():
        over_wire = name == "a"
        text = CONFIG.format(
            name=name,
            listen=f"{HOST}:{ports[name]}",
            data=f"{name}-data",
            source=sources[name],
            remark=", over a wire that can be cut" if over_wire else "",
            peer=peer,
            address=f"{HOST}:{wire.port if over_wire else ports[peer]}",
            topic=DEPARTURES,
            key=", ".join(f'"/{field}"' for field in DEPARTURE_FIELDS),
        )
        (folder / f"{name}.toml").write_text(text, encoding="utf-8")


def _write_private(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


def _tell(narration: Narration, folder: Path, *, records: int) -> None:
    started = time.monotonic()
    narration.title("sow: three instances in a ring, a → b → c → a, and the flights that left New York in 2013")
    narration.step("Start three servers", "Real ones, each with its configuration and its data.")
    folder.mkdir(parents=True, exist_ok=True)
    for name in RING:
        remove_data(folder, f"{name}-data")
    flights = list(islice(read_flights(records), records))
    with ExitStack() as stack:
        ports = dict(zip(RING, _free_ports(len(RING)), strict=True))
        wire = stack.enter_context(Wire(ports["b"]))
        _write_configs(folder, ports, wire)
        instances: dict[str, Instance] = {}
        with ExitStack() as clients:
            for name in RING:
                server = stack.enter_context(ServerProcess(folder, f"{name}.toml"))
                seconds = server.start()
                narration.say(f"sow-server --config {name}.toml: ready on {HOST}:{ports[name]} after {seconds:.2f} s")
                client = clients.enter_context(Client(f"{HOST}:{ports[name]}"))
                instances[name] = Instance(name, folder, ports[name], server, client)
            Cluster(narration, instances, wire).run(flights)
        narration.step("The end")
        codes = [instance.server.stop().code for instance in instances.values()]
        narration.claim("all servers have stopped in order", codes == [0, 0, 0], found=codes)
    narration.say(f"{narration.claims} claims, all of them hold; {time.monotonic() - started:.0f} s")


def _free_ports(count: int) -> list[int]:
    """Different free ports."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port(0))
    return sorted(ports)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.cluster", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--records", type=int, default=RECORDS, metavar="N", help="only the first N flights")
    parser.add_argument(
        "--folder",
        type=Path,
        default=PROJECT / FOLDER,
        metavar="DIR",
        help="the folder for the configurations and the data",
    )
    given = parser.parse_args(arguments)
    if not 3_000 <= given.records <= RECORDS_ALL:
        parser.error(f"--records: not 3,000 to {RECORDS_ALL:,}")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    narration = Narration()
    return exit_code(narration, lambda: _tell(narration, given.folder, records=given.records))


if __name__ == "__main__":
    sys.exit(main())
