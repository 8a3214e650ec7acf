"""A step of the demo: a view of late flights by carrier, right after a kill, and as bars while others are published."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from examples.asking import LATE, LATE_MINUTES, delay_of
from examples.flights import Flight
from examples.narration import Narration, Show
from sow_client import Client, Record

VIEW: Final = "late_by_carrier"
SELECT: Final = {"flights": "COUNT(*)", "minutes": "AVG(/dep_delay)", "longest": "MAX(/dep_delay)"}
HEADINGS: Final = ("carrier", "late flights", "minutes", "longest", "")
NUMBERS: Final = HEADINGS[1:4]
BAR_WIDTH: Final = 40
SHOWN_EACH: Final = 1_000
"""Flights between two looks at the bars."""


def make_view(client: Client, topic: str) -> None:
    """Makes the view of an empty topic, so that it is complete when the flights come."""
    client.create_view(VIEW, source=topic, where=LATE, group_by="/carrier", select=SELECT)


def delays(tell: Narration, client: Client, topic: str, flights: Sequence[Flight]) -> None:
    """Claims that the view is right, publishes the `flights` beside its bars, and claims it again. Raises
    ClaimFailed."""
    tell.step(
        "A view: late flights by carrier, right after the kill",
        f"The view was made before the kill: {LATE}, a record for each /carrier, with",
        ", ".join(f"{text} AS {name}" for name, text in SELECT.items()) + ".",
        "It is kept in the commit of every publish, so no kill leaves it behind. The expected sums are computed here.",
    )
    _claim(tell, client, topic, "after the kill")
    with client.live_view(VIEW) as late, tell.board(HEADINGS, right=NUMBERS) as show:
        with client.publisher(topic, ttl="1h") as publisher:
            for number, flight in enumerate(flights, 1):
                publisher.publish(flight.document)
                if number % SHOWN_EACH == 0:
                    _show(show, late.copy(), f"{number:,} of {len(flights):,} flights")
    found = _claim(tell, client, topic, f"after {len(flights):,} more flights")
    tell.table(HEADINGS, _bars(found), right=NUMBERS)


def _claim(tell: Narration, client: Client, topic: str, when: str) -> dict[str, Record]:
    minutes: defaultdict[str, list[float]] = defaultdict(list)
    for record in client.query(topic):
        if (delay := delay_of(record)) is not None and delay > LATE_MINUTES:
            minutes[record.data["carrier"]].append(delay)
    expected = {
        carrier: {"carrier": carrier, "flights": len(each), "minutes": sum(each) / len(each), "longest": max(each)}
        for carrier, each in minutes.items()
    }
    found = {record.key: record for record in client.query(VIEW)}
    late = sum(map(len, minutes.values()))
    tell.claim(
        f"{when}: {late:,} late flights of {len(expected)} carriers, exactly as all records add up",
        {key: record.data for key, record in found.items()} == expected,
        found=f"{ {key: record.data for key, record in found.items()} }, not {expected}",
    )
    return found


def _show(show: Show, records: Mapping[str, Record], title: str) -> None:
    show(title, _bars(records))


def _bars(records: Mapping[str, Record]) -> list[tuple[str, ...]]:
    ordered = sorted(records.values(), key=lambda record: (-record.data["flights"], record.key))
    most = max([record.data["flights"] for record in ordered], default=1)
    return [
        (
            record.key,
            f"{record.data['flights']:,}",
            f"{record.data['minutes']:.0f}",
            f"{record.data['longest']:.0f}",
            "█" * max(1, round(BAR_WIDTH * record.data["flights"] / most)),
        )
        for record in ordered
    ]
