"""A family of topics: one large topic as 64 small ones, each with its share of the keys, in the cells of a placement.

    sow-server --cells 2                                  # in one terminal, with the placement of docs/scale.md
    .venv/bin/python -m examples.family [HOST:PORT]       # in another

publishes flights to the topics `flights.00` to `flights.63`, asks for one of them, and follows all.

    [1]  The topic of a key is that of its CRC-32 modulo 64. So the number of topics belongs to the data, and the cells
         do not: a topic may move to another cell, and no program notices.
    [2]  All that concerns one key holds as in one topic. What concerns all topics is no cut.
"""

from __future__ import annotations

import sys
from typing import Final

from examples.flights import KEY_FIELDS, read_flights
from sow_client import Change, Client, Key, Record, View, share_of

SHARES: Final = 64
FLIGHTS: Final = 20_000


class Family:
    """The topics of a family, by the client of any of its cells."""

    def __init__(self, client: Client, name: str, shares: int = SHARES) -> None:
        digits = len(str(shares - 1))
        self.client = client
        self.topics = [f"{name}.{number:0{digits}}" for number in range(shares)]
        self.pattern = f"{name}[.][0-9]{{{digits}}}"

    def of(self, key: Key) -> str:
        """The topic that has a key [1]."""
        return self.topics[share_of(key, len(self.topics))]

    def get(self, key: Key) -> Record | None:
        """The record of a key: one call, in the cell of its topic."""
        return self.client.get(self.of(key), key)

    def count(self, wanted: str = "") -> int:
        """The number of records that match a filter [2]."""
        return sum(self.client.count(topic, wanted) for topic in self.topics)


class Live:
    """The records of a family, kept up to date by one subscription over all cells."""

    def __init__(self, family: Family) -> None:
        self.views = {topic: View() for topic in family.topics}  # each by itself, as a "resync" may be about one topic

    def apply(self, change: Change) -> None:
        """Takes in the next message."""
        for view in [self.views[change.topic]] if change.topic else self.views.values():
            view.apply(change)

    def __len__(self) -> int:
        return sum(map(len, self.views.values()))


def main(server: str = "127.0.0.1:7450", flights: int = FLIGHTS) -> None:
    """Publishes flights, and reads them in several ways."""
    with Client(server) as client:
        family = Family(client, "flights")
        for topic in family.topics:
            client.create_topic(topic, key=[f"/{name}" for name in KEY_FIELDS], expiration="enabled", exist_ok=True)
        for cell, part in client.cells().items():
            mine = {topic.name for topic in part.topics()}
            print(f"{cell or 'the server'} has {len(mine.intersection(family.topics))} topics of the family")
        with client.topics_publisher(ttl="1h") as publisher:
            for flight in read_flights(flights):
                publisher.publish(family.of(flight.key), flight.document)
        print(f"{flights:,} flights published, the last departure of each of {family.count():,} numbers is there")
        key = ("UA", 1545, "EWR")
        found = family.get(key)
        print(f"{family.of(key)} has {found.key if found else 'nothing'}")
        live = Live(family)
        with client.sow_and_subscribe(topic_pattern=family.pattern, oof=True) as changes:
            for change in changes:
                live.apply(change)
                if change.op == "snapshot_end":
                    break  # a real program goes on
        print(f"{len(live):,} flights are followed, {family.count('/dep_delay > 60'):,} of them are an hour late")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7450")
