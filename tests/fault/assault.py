"""Rounds of load, end and check on one server: it is killed, or its power is cut, again and again.

[1]  Acknowledged changes are there afterwards. A power cut may take changes acknowledged as BUFFERED within the last
     moments, and of each client the last of it (rule P5).
[2]  Nothing expired is seen, and nothing that was never sent.
[3]  Sequences and versions that were acknowledged, lost ones included, are never given out again (rule K7).
[4]  A durable subscription goes on where the last confirmed acknowledgement put it, and is handed nothing from
     before.
[5]  Each record that expires has one dead letter, in the commit of its expiry.
[6]  A load is applied whole or not at all, and a committed one is finished.
[7]  Views are what a query of their source says (rule V2), also where they were being built at the end.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from sow_client import Client, SowError
from sow_server.engine.store import Store, StoreOptions
from sow_server.query.view_plans import view_plan
from tests.fault.assault_loads import Acks, DurableLoad, LetterLoad, Load, MixedLoad, Reading, ReplacingLoad, StreamLoad
from tests.fault.audit import Audit
from tests.support.servers.power import Power
from tests.support.servers.server import ServerProcess, until

CONFIG: Final = """
[server]
instance = "sow"
[storage]
memtable = "1MiB"        # so that flushes and compactions run while it is killed
other_memtable = "1MiB"
wal_bytes_max = "4MiB"
[journal]
prune_interval = "200ms"
[topics.kept]
retain_time = "unlimited"
retain_bytes = "unlimited"
[topics.mixed]
expiration = "enabled"
retain_time = "unlimited"
retain_bytes = "unlimited"
[topics.brief]
expiration = "enabled"
retain_time = "1s"
retain_bytes = "256KiB"
[topics.lettered]
expiration = "enabled"
dead_letter = "letters"
dead_letter_by_key = true
[topics.letters]
[topics.loaded]
key = ["/id"]
[views.sums]
source = "kept"
select = ["COUNT(*) AS records", "SUM(/n) AS total", "MAX(/n) AS most"]
[views.mirror]
source = "mixed"
select = ["/n"]
"""
INDEXES: Final[tuple[list[str], ...]] = ([], ["/n"], ["/pad", "/n"], ["/pad"])
"""The topics' indexed fields, which change from start to start, so that builds are killed, too."""


class Assault:
    """Rounds of load, end and check on one server."""

    def __init__(self, folder: Path, seed: str, *, power: bool = False, plant: str = "") -> None:
        """`power`: its power is cut, and else it is killed. `plant`: a mistake to plant, see `Power`."""
        self.draw = random.Random(seed)
        self.server = ServerProcess(folder, CONFIG, start=False)
        self.power = Power(self.server, plant=plant) if power else None
        self.dropped_bytes = 0
        self.audit = Audit()
        short = (5_000, 30_000, 100_000, 400_000, 2_000_000, 60_000_000)
        self.streams = [
            StreamLoad("fsync", "kept", "fsync", draw=self._draw(), acks=Acks(power)),
            StreamLoad("buffered", "kept", "buffered", draw=self._draw(), acks=Acks(power)),
            StreamLoad("brief", "brief", "buffered", short, draw=self._draw(), acks=Acks(power)),
        ]
        self.mixed = MixedLoad("mixed", "mixed", draw=self._draw(), acks=Acks(power))
        self.letters = LetterLoad(self._draw(), acks=Acks(power))
        self.acks = [*(stream.acks for stream in self.streams), self.mixed.acks, self.letters.acks]
        self.loads: list[Load] = [
            *self.streams,
            self.mixed,
            self.letters,
            DurableLoad("follower", "kept"),
            ReplacingLoad(),
        ]
        self.highest = (0, 0)
        self._configure()

    def _configure(self) -> None:
        """Draws the indexes of each topic."""
        text = CONFIG
        for topic in ("kept", "mixed", "brief"):
            text = text.replace(f"[topics.{topic}]", f"[topics.{topic}]\nindex = {self.draw.choice(INDEXES)}")
        self.server.configure(text)

    def _draw(self) -> random.Random:
        return random.Random(self.draw.randrange(2**32))

    def rounds(self, count: int) -> None:
        """Ends the server `count` times."""
        self.server.start()
        for number in range(1, count + 1):
            print(f"round {number}", flush=True)
            self._load_until_ended()
            if number % 2 == 0:
                self._configure()
            if number % 5 == 0:
                self._check_store()
            if number % 7 == 0:
                self._end_while_starting()
            self.server.start()
            self._check_server()
        assert self.server.terminate() == 0
        self._check_store()
        assert not self.server.faults()
        oldest = max(stream.lost_seconds for stream in self.streams)
        print(f"dropped {self.dropped_bytes} bytes of logs; the oldest lost acknowledgement: {oldest * 1000:.0f} ms")

    def _load_until_ended(self) -> None:
        reading = Reading()
        workers = [*(load.run for load in self.loads), reading.run]
        for acks in self.acks:
            acks.clear()
        failures: list[BaseException] = []
        ending = threading.Event()
        clients = [self.server.client(timeout=10) for _ in workers]

        def work(run: Callable[[Client], None], client: Client) -> None:
            try:
                run(client)
            except SowError as error:
                if not ending.is_set():
                    failures.append(error)
            except BaseException as error:
                failures.append(error)

        threads = [
            threading.Thread(target=work, args=(run, client), daemon=True)
            for run, client in zip(workers, clients, strict=True)
        ]
        for thread in threads:
            thread.start()
        until(lambda: failures or all(load.worked for load in self.loads), 20, "acknowledgements")
        time.sleep(self.draw.uniform(0.02, 0.35))
        ending.set()
        self.server.kill9()
        for client in clients:
            client.close()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        assert not failures, failures
        assert not reading.wrong
        self._drop()
        self._check_acks()

    def _drop(self) -> None:
        if self.power is not None:
            self.dropped_bytes += self.power.drop(self.draw)

    def _check_acks(self) -> None:
        """No version and no sequence is acknowledged twice, or out of order, over all rounds."""
        acks = [ack for some in self.acks for ack in some.all]
        assert len(set(acks)) == len(acks)
        for some in self.acks:
            assert some.all == sorted(some.all)
        sequences, versions = [ack[0] for ack in acks], [ack[1] for ack in acks]
        assert min(sequences) > self.highest[0], "a sequence from before the end was given out again"
        assert min(versions) > self.highest[1], "a version from before the end was given out again"
        self.highest = (max(sequences), max(versions))

    def _end_while_starting(self) -> None:
        self.server.launch()
        time.sleep(self.draw.uniform(0.3, 1.2))
        self.server.kill9()
        self._drop()

    def _check_store(self) -> None:
        store = Store.open(self.server.data, options=StoreOptions(plan_of=view_plan))
        try:
            self.audit.check(store)
        finally:
            store.close()
        for acks in (self.streams[0].acks, self.streams[1].acks, self.mixed.acks):
            for sequence, version in acks.all[: acks.kept]:
                assert self.audit.version_of.get(sequence) == version, "an acknowledged write is in the journal"

    def _check_server(self) -> None:
        with self.server.client() as client:
            for load in self.loads:
                load.check(client)
            until(lambda: _found(client, "sums") == _sums(client), 20, "sums of what is stored")
            # A record leaves the view with its expiry, a moment behind its end.
            until(lambda: _found(client, "mirror") == _found(client, "mixed", "/n"), 20, "the fields of all records")


def _sums(client: Client) -> dict[str, object]:
    aggregate = {"records": "COUNT(*)", "total": "SUM(/n)", "most": "MAX(/n)"}
    (found,) = client.query("kept", aggregate=aggregate)
    return {} if found.data["records"] == 0 else {"*": found.data}


def _found(client: Client, topic: str, *select: str) -> dict[str, object]:
    return {record.key: record.data for record in client.query(topic, select=select or None)}
