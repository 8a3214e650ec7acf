"""A step of the demo: filters, orders, and the two ways to an answer: a scan or an index."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from examples.narration import Narration
from sow_client import Client, Record

LATE_MINUTES: Final = 120
LATE: Final = f"/dep_delay > {LATE_MINUTES}"
ORDER: Final = "/dep_delay DESC"
SHOWN: Final = 10
INDEXED: Final = "/dep_delay"
INDEX_SECONDS_MAX: Final = 60.0
"""An index of some ten thousand records is complete within a second; the machine may be busy."""


def ask(tell: Narration, client: Client, topic: str, records: Mapping[str, Record]) -> None:
    """Queries a topic with `records` for the latest flights, without and with an index. Raises ClaimFailed."""
    tell.step(
        "Ask: which flights left late?",
        f"A filter, an order, a limit: {LATE}, by {ORDER}, the first {SHOWN}. The expected",
        "answer is computed here, from all records. explain shows how the server finds it: first by a scan of all",
        "records, and after an index was added to the running topic, by reading little more than the matches.",
    )
    delays = {key: delay for key, record in records.items() if (delay := delay_of(record)) is not None}
    late = {key for key, delay in delays.items() if delay > LATE_MINUTES}
    latest = sorted(late, key=lambda key: (-delays[key], key))[:SHOWN]

    found = list(client.query(topic, LATE, order_by=ORDER, top_n=SHOWN))
    tell.table(
        ("key", "flight", "minutes late"),
        [(record.key, route_of(record), f"{delay_of(record):.0f}") for record in found],
        right=("minutes late",),
    )
    tell.claim(
        f"the {len(found)} latest of {len(late):,} flights that left more than {LATE_MINUTES} minutes late, in order",
        bool(latest) and [record.key for record in found] == latest,
        found=[record.key for record in found],
    )
    count = client.count(topic, LATE)
    tell.claim(f"count: {count:,}", count == len(late), found=f"{count:,}, not {len(late):,}")

    scan = client.explain(topic, LATE)
    tell.claim(
        f"explain: a scan, which reads all {scan.scanned:,} records to find {scan.matched:,}",
        (scan.access, scan.scanned, scan.matched) == ("scan", len(records), len(late)),
        found=scan,
    )
    by_scan, scan_seconds = _timed(client, topic)
    started = time.monotonic()
    client.alter_topic(topic, index=[INDEXED])
    while not (complete := _complete(client, topic)) and time.monotonic() < started + INDEX_SECONDS_MAX:
        time.sleep(0.02)
    seconds = time.monotonic() - started
    tell.claim(f"an index on {INDEXED} is built in the background, within {seconds:.2f} s", complete)
    plan = client.explain(topic, LATE)
    at_the_bound = sum(delay == LATE_MINUTES for delay in delays.values())
    tell.claim(
        f"explain: the index on {plan.index_path}, which reads {plan.scanned:,} records to find {plan.matched:,}",
        (plan.access, plan.index_path, plan.matched) == ("index", INDEXED, len(late))
        and plan.scanned <= len(late) + at_the_bound,
        found=plan,
    )
    by_index, index_seconds = _timed(client, topic)
    tell.claim(
        f"the same answer either way; {scan_seconds * 1e3:.1f} ms by scan, {index_seconds * 1e3:.1f} ms by index",
        by_index == by_scan and set(by_index) == late,
        found=f"{len(by_scan):,} records by scan, {len(by_index):,} by index",
    )


def _complete(client: Client, topic: str) -> bool:
    return all(index.complete for index in client.describe_topic(topic).indexes)


def _timed(client: Client, topic: str) -> tuple[list[str], float]:
    """The keys of the late flights, and the best of three response times."""
    keys: list[str] = []
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        keys = [record.key for record in client.query(topic, LATE)]
        best = min(best, time.perf_counter() - started)
    return keys, best


def delay_of(record: Record) -> float | None:
    """Minutes of delay at departure. None for a flight that has not departed."""
    document = record.data
    assert isinstance(document, dict), "flights are JSON objects"
    delay: float | None = document.get("dep_delay")
    return delay


def route_of(record: Record) -> str:
    """Route and time."""
    document = record.data
    assert isinstance(document, dict), "flights are JSON objects"
    day = f"{document['year']}-{document['month']:02}-{document['day']:02}"
    return f"{document['origin']} → {document['dest']}, {day} {document['hour']:02}:{document['minute']:02}"
