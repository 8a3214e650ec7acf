"""A program that drops streams in reference cycles while it publishes and queries, with a collection at each
allocation. It prints the stacks of all threads and exits with 3 when one of its threads stops."""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

from sow_client import Client, Record

STUCK_SECONDS = 15.0


class Cycle:
    """Holds a stream, and itself: only the collector frees it."""

    def __init__(self, *held: object) -> None:
        self.held = held
        self.itself = self


def main(address: str, rounds: int) -> None:
    """Runs `rounds` rounds in each thread."""
    client = Client(address)
    beats: dict[str, float] = {}

    def publish(turn: int) -> None:
        client.publish("t", {"id": turn % 50, "n": turn})

    def query(_turn: int) -> None:
        assert len(list(client.query("t"))) == 50

    def drop(turn: int) -> None:
        match turn % 5:
            case 0:
                Cycle(client.subscribe("t"))
            case 1:
                Cycle(client.live_view("t"))
            case 2:
                durable = client.durable("t", f"{threading.get_ident()}-{turn}")
                durable.acknowledge(durable.bookmark or "")
                Cycle(durable)
            case 3:
                records: Iterator[Record] = iter(client.query("t", batch_size=2))
                Cycle(records, next(records))
            case _:
                with Client(address) as other:
                    other.count("t")
                Cycle(Client(address).subscribe("t"))

    def run(name: str, turn: Callable[[int], None]) -> None:
        for number in range(rounds):
            turn(number)
            beats[name] = time.monotonic()
        del beats[name]

    threads = []
    for name, turn in (("publish", publish), ("query", query), *((f"drop {one}", drop) for one in range(3))):
        beats[name] = time.monotonic()
        threads.append(threading.Thread(target=run, args=(name, turn), daemon=True))
    gc.set_threshold(1)
    for thread in threads:
        thread.start()
    while beats:
        threads[0].join(0.2)
        late = [name for name, beat in list(beats.items()) if time.monotonic() - beat > STUCK_SECONDS]
        if late or not any(thread.is_alive() for thread in threads):
            print("stuck:", late or list(beats), file=sys.stderr, flush=True)
            faulthandler.dump_traceback(all_threads=True)
            os._exit(3)
        time.sleep(0.05)
    print("ended", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
