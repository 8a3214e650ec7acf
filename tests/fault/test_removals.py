"""A publisher that mixes puts and removals, while its server is killed again and again (rules P6, P11).

[1]  The journal has the changes of the publisher exactly as it made them: each once, in their order. A removal that
     found no record is none of them.
[2]  A removal that is sent again never removes a record that somebody else has put meanwhile.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

import pytest

from sow_client import EARLIEST, Ack, Client, Publisher, SowError
from tests.support.servers.server import ServerProcess, until

CONFIG: Final = """
[storage]
memtable = "1MiB"        # so that flushes and compactions run while it is killed
other_memtable = "1MiB"
wal_bytes_max = "4MiB"
[topics.mixed]
key = ["/id"]
retain_time = "unlimited"
retain_bytes = "unlimited"
"""
KEYS: Final = 9
PAUSE_EVERY: Final = 20
"""Changes after which the publisher rests a little: the point is to be killed, not to fill the disk."""
SHARED_EVERY: Final = 60
SHARED_MAX: Final = 2_000
LAST: Final = "last"
END_SECONDS: Final = 120.0
Told = tuple[str, str, int]
"""Key, put or delete, and the number of the record: of a delete that of the one before."""


class Mixer:
    """Owns the publisher. It knows the state that each of its changes makes."""

    def __init__(self, draw: random.Random, durability: Literal["fsync", "buffered"]) -> None:
        self._draw = draw
        self._durability: Literal["fsync", "buffered"] = durability
        self._n = 0
        self.state: dict[str, int] = {}
        self.made: list[Told] = []
        """The changes that the journal must have, without those of shared keys."""
        self.free: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        """Shared keys whose record was there, and whose removal is on its way; None: there are no more."""
        self.shared = 0
        self.acknowledged = self.duplicates = 0
        self.ending = threading.Event()

    def run(self, client: Client) -> None:
        """Publishes until the test ends. What breaks is sent again by the publisher."""
        try:
            with client.publisher(
                "mixed",
                durability=self._durability,
                batch_records=7,
                max_in_flight=8,
                linger=0.001,
                retry_for=END_SECONDS,
                on_ack=self._heard,
            ) as publisher:
                while not self.ending.is_set():
                    self._change(publisher)
        finally:
            self.free.put(None)

    def _heard(self, ack: Ack) -> None:
        assert not ack.refusals, ack.refusals
        self.acknowledged += ack.applied
        self.duplicates += ack.duplicates

    def _change(self, publisher: Publisher) -> None:
        key = f"own-{self._draw.randrange(KEYS)}"
        if self._draw.random() < 0.5:
            self._put(publisher, key)
        else:
            if (former := self.state.pop(key, None)) is not None:
                self.made.append((key, "delete", former))
            if self._draw.random() < 0.5:
                publisher.remove(key)
            else:
                publisher.remove(data={"id": key})
        if self._n % PAUSE_EVERY == 0:
            time.sleep(0.002)
        if self._n % SHARED_EVERY == 0 and self.shared < SHARED_MAX:
            self.shared += 1
            key = f"shared-{self.shared}"
            publisher.publish({"id": key, "n": 1})
            publisher.flush()  # it is there, so whoever finds it absent from now on is behind the removal
            publisher.remove(key)
            self.free.put(key)

    def _put(self, publisher: Publisher, key: str) -> None:
        self._n += 1
        self.state[key] = self._n
        self.made.append((key, "put", self._n))
        publisher.publish({"id": key, "n": self._n, "pad": "x" * self._draw.randrange(100)})


def put_what_was_removed(mixer: Mixer, client: Client) -> None:
    """Puts a record of each shared key, once its removal has been applied."""
    while (key := mixer.free.get()) is not None:
        insisting(lambda key=key: client.get_many("mixed", [key]) == [] or _again())  # type: ignore[misc]  # a lambda's default
        insisting(lambda key=key: client.publish("mixed", {"id": key, "n": 2}))  # type: ignore[misc]  # likewise


class _Later(Exception):
    """Not yet."""


def _again() -> bool:
    raise _Later


def insisting(call: Callable[[], object]) -> None:
    """Makes a call until it has an answer."""
    end = time.monotonic() + END_SECONDS
    while True:
        try:
            call()
            return
        except (SowError, _Later):
            assert time.monotonic() < end, "no answer"
            time.sleep(0.005)


def told(client: Client) -> list[Told]:
    """All changes in the journal."""
    found: list[Told] = []
    client.publish("mixed", {"id": LAST})
    with client.subscribe("mixed", changes=True, start=EARLIEST) as changes:
        for change in changes:
            record = change.record if change.op == "put" else change.previous
            assert record is not None, "it is a change reader"
            assert change.op in ("put", "delete"), change.op
            if record.key == LAST:
                return found
            found.append((record.key, change.op, record.data["n"]))
    raise AssertionError("the subscription has ended")


def check(mixer: Mixer, client: Client) -> None:
    """[1] and [2]."""
    found = told(client)
    assert [one for one in found if not one[0].startswith("shared-")] == mixer.made
    records = {record.key: record.data["n"] for record in client.query("mixed", f"@key != '{LAST}'")}
    own = {key: n for key, n in records.items() if not key.startswith("shared-")}
    assert own == mixer.state
    for number in range(1, mixer.shared + 1):
        key = f"shared-{number}"
        first, second, *others = [(op, n) for one, op, n in found if one == key]
        assert (first, second, set(others)) == (("put", 1), ("delete", 1), {("put", 2)}), key
        assert records[key] == 2


def killed(folder: Path, seed: str, rounds: int, durability: Literal["fsync", "buffered"]) -> Mixer:
    """Kills the server `rounds` times."""
    draw = random.Random(seed)
    mixer = Mixer(random.Random(draw.randrange(2**32)), durability)
    failures: list[BaseException] = []
    with ServerProcess(folder, CONFIG) as server, server.client() as client, server.client(timeout=5) as other:

        def work(run: Callable[[Client], None], of: Client) -> None:
            try:
                run(of)
            except BaseException as failure:
                failures.append(failure)
                raise

        threads = [
            threading.Thread(target=work, args=(mixer.run, client), daemon=True),
            threading.Thread(target=work, args=(lambda of: put_what_was_removed(mixer, of), other), daemon=True),
        ]
        for thread in threads:
            thread.start()
        for _ in range(rounds):
            before = mixer.acknowledged
            until(lambda before=before: failures or mixer.acknowledged > before + 100, 60, "acknowledgements")  # type: ignore[misc]  # a lambda's default
            time.sleep(draw.uniform(0.0, 0.15))
            server.kill9()
            server.start()
        mixer.ending.set()
        for thread in threads:
            thread.join(END_SECONDS)
            assert not thread.is_alive()
        assert not failures, failures
        with server.client() as reader:
            check(mixer, reader)
        assert not server.faults()
    print(f"{mixer.acknowledged} acknowledged, {mixer.duplicates} of them sent again; {mixer.shared} shared keys")
    return mixer


def test_a_publisher_that_removes_survives_kills(tmp_path: Path, seed: int) -> None:
    mixer = killed(tmp_path, f"{seed} removals", 3, "buffered")
    assert mixer.shared > 0


@pytest.mark.long
@pytest.mark.parametrize("durability", ["fsync", "buffered"])
def test_the_same_for_many_rounds(tmp_path: Path, seed: int, durability: Literal["fsync", "buffered"]) -> None:
    mixer = killed(tmp_path, f"{seed} {durability}", 60, durability)
    assert mixer.duplicates > 0, "some were applied, and their answers were lost"
