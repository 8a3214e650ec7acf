"""Several real servers that replicate to each other over the loopback, with a proxy in each link.

with Cluster(tmp_path, "a", "b", topics="[topics.orders]\\nkey = ['/id']") as cluster:
    cluster["a"].client.publish("orders", {"id": 1})
    cluster.await_equal()

    [1]  Unless other links are given, each instance sends to each other one.
    [2]  Every wait looks at the status of the instances, and has a bound.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import pytest

from sow_client import IncomingLink, OutgoingLink, Record, SowError, Verified
from tests.support.servers.proxy import Proxy
from tests.support.servers.server import ServerProcess, free_port, until

WAIT_SECONDS: Final = 60.0
SLACK_MICROS: Final = 100_000
TOKEN: Final = "an-agreed-secret"
Link = tuple[str, str]
"""The links, from sender to receiver."""


State = dict[str, tuple[int, int | None, bytes]]
"""Version, stamp and payload, by key."""


def lasting(state: State, due_micros: int) -> State:
    """The records that live beyond a time."""
    return {key: value for key, value in state.items() if value[1] is None or value[1] > due_micros}


class Instance:
    """One server of a cluster, and a client of it, which connects again by itself."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name: Final = name
        self.server: Final = ServerProcess(folder, "", port=free_port(), start=False)
        self.client: Final = self.server.client()

    def out(self, peer: str) -> OutgoingLink:
        """The link to a peer, as it is now."""
        (found,) = [link for link in self.client.replication_status().outgoing if link.peer == peer]
        return found

    def incoming(self, peer: str) -> IncomingLink | None:
        """The link from a source, as it is now; None: nothing is known of it."""
        found = [link for link in self.client.replication_status().incoming if link.peer == peer]
        return found[0] if found else None

    def records(self, topic: str) -> dict[str, Record]:
        """All of a topic, by key."""
        return {record.key: record for record in self.client.query(topic)}

    def state(self, topic: str) -> State:
        """All of a topic."""
        return {
            key: (record.version, record.expire_time_micros, record.payload)
            for key, record in self.records(topic).items()
        }

    def wipe(self) -> None:
        """Loses its data. It must not be running."""
        assert not self.server.alive
        shutil.rmtree(self.server.data)

    def shift(self, micros: int, **knobs: int) -> None:
        """From the next start on its wall clock is off by so much; `knobs`: see `shifted_server`."""
        given = [f"{name}={number}" for name, number in knobs.items()]
        self.server.module = "tests.support.servers.shifted_server"
        self.server.first_arguments = [str(micros), *given]


class Cluster:
    """Owns servers and proxies."""

    def __init__(
        self,
        folder: Path,
        *names: str,
        topics: str,
        links: Sequence[Link] | None = None,
        mode: str = "async",
        more: str = "",
        start: bool = True,
    ) -> None:
        """`topics`: TOML of all instances; `more`: of their [replication] tables."""
        self.folder: Final = folder
        self.links: Final = (
            [(a, b) for a in names for b in names if a != b] if links is None else [(a, b) for a, b in links]
        )
        self.instances: Final = {name: Instance(name, folder / name) for name in names}
        self.proxies: Final = {link: Proxy(self[link[1]].server.address) for link in self.links}
        self._topics = topics
        self._more = more
        self._mode = mode
        for name in names:
            self.configure(name)
        if start:
            self.start()

    def __getitem__(self, name: str) -> Instance:
        return self.instances[name]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.ExitStack() as stack:
            for proxy in self.proxies.values():
                stack.callback(proxy.close)
            for instance in self.instances.values():
                stack.callback(instance.client.close)
                stack.callback(instance.server.kill9)

    def configure(
        self,
        name: str,
        *,
        topics: str | None = None,
        token: str = TOKEN,
        accepted: Sequence[str] = (),
    ) -> None:
        """Writes the configuration of an instance, for its next start; `accepted`: who may send besides the others."""
        accept = sorted({sender for sender, receiver in self.links if receiver == name} | {*accepted})
        text = f'[server]\ninstance = "{name}"\n'
        text += '[storage]\nmemtable = "1MiB"\nother_memtable = "1MiB"\nwal_bytes_max = "4MiB"\n'
        text += '[journal]\nprune_interval = "200ms"\n'
        text += f'[replication]\ntoken = "{token}"\naccept = {accept}\n{self._more}\n'
        for sender, receiver in self.links:
            if sender == name:
                address = self.proxies[sender, receiver].address
                text += f'[[replication.peers]]\nname = "{receiver}"\naddress = "{address}"\nmode = "{self._mode}"\n'
        text += self._topics if topics is None else topics
        self[name].server.configure(text)

    def start(self, *names: str) -> None:
        """Starts instances, all unless some are named, at the same time."""
        chosen = [self[name].server for name in names or self.instances]
        for server in chosen:
            server.launch()
        for server in chosen:
            server.await_ready()

    # -- waiting ----------------------------------------------------------------------------------------------------

    def await_streaming(self, links: Iterable[Link] | None = None, seconds: float = WAIT_SECONDS) -> None:
        """Waits until links are up, all unless some are given, with nothing left to be acknowledged."""
        for sender, receiver in self.links if links is None else links:
            self.await_out(
                sender,
                receiver,
                lambda link: link.state == "streaming" and not link.lag_sequences and not link.topics,
                seconds,
            )

    def await_out(
        self,
        sender: str,
        receiver: str,
        holds: Callable[[OutgoingLink], bool],
        seconds: float = WAIT_SECONDS,
    ) -> OutgoingLink:
        """Waits until something holds of a link, as its sender shows it; returns the link."""
        seen: list[OutgoingLink] = []

        def look() -> bool:
            seen[:] = [self[sender].out(receiver)]
            return holds(seen[0])

        self._await(look, seconds, f"the link {sender} → {receiver}", seen)
        return seen[0]

    def await_in(
        self,
        receiver: str,
        sender: str,
        holds: Callable[[IncomingLink], bool],
        seconds: float = WAIT_SECONDS,
    ) -> IncomingLink:
        """Waits until something holds of a link, as its receiver shows it; returns the link."""
        seen: list[IncomingLink] = []

        def look() -> bool:
            link = self[receiver].incoming(sender)
            seen[:] = [] if link is None else [link]
            return link is not None and holds(link)

        self._await(look, seconds, f"the link {sender} → {receiver} at {receiver}", seen)
        return seen[0]

    def await_equal(self, *, topics: Sequence[str] = (), seconds: float = WAIT_SECONDS) -> None:
        """Waits until every link has nothing left to send, and holds that all instances are equal then: as `verify`
        tells, and record by record with versions and stamps."""
        self.await_streaming(seconds=seconds)
        for sender, receiver in self.links:
            verified = self[sender].client.verify_replication(receiver)
            assert verified, "some topic was compared"
            differing = [one for one in verified if one.differing or one.left_out]
            assert not differing, f"{sender} and {receiver} differ: {differing}"
        first, *others = self.instances.values()
        for topic in topics:
            for other in others:
                here, there = first.state(topic), other.state(topic)
                # Records that fall due between two queries do not count. The clocks are the same, but for their guards.
                due = time.time_ns() // 1000 + SLACK_MICROS
                assert lasting(here, due) == lasting(there, due), f"{topic} at {first.name} and at {other.name}"

    def verified(self, sender: str, receiver: str) -> list[Verified]:
        """The answers of `verify`, topic by topic."""
        return self[sender].client.verify_replication(receiver)

    def _await(self, look: Callable[[], bool], seconds: float, what: str, seen: Sequence[object]) -> None:
        def safely() -> bool:
            try:
                return look()
            except SowError:
                return False  # it is on its way up, or down

        try:
            until(safely, seconds, what)
        except pytest.fail.Exception as failed:
            shown = [f"{what}: {link}" for link in seen]
            raise AssertionError("\n".join([str(failed), *shown])) from failed

    def faults(self) -> list[str]:
        """Log lines that tell of a fault of the servers' own."""
        return [line for instance in self.instances.values() for line in instance.server.faults()]
