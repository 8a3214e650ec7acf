"""The end of a streaming query that is not to go on: it is stopped, and its pins are removed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from pyspark.sql.streaming.query import StreamingQuery

from sow_spark.connection import cell_of, connect, retried
from sow_spark.errors import translated
from sow_spark.option_parsing import parse_reading
from sow_spark.options import Reading
from sow_spark.over_cells import cells_of
from sow_spark.stream_pins import NOTE


def stop_for_good(query: StreamingQuery, options: Mapping[str, str]) -> list[str]:
    """Stops a query, and removes its pins at once, so that the journals are no longer kept for it. A query that has
    ended already is no error. Returns the removed pins as TOPIC/NAME.

    Otherwise the pins stay for `pinLease`, because a query goes on from its checkpoint after a stop or a failure. After
    this it may find its changes gone (DATA_LOST). `options` are those with which the query reads. Its progress tells
    the name of its pins; before the first one only `pinName` does.

    Raises SowSourceError where an instance cannot be reached; its pins end with their lease.
    """
    reading = parse_reading(options, "stream")
    query.stop()
    names = set(_pins_of(query)) if reading.pin_name is None else {reading.pin_name}
    names |= {f"{name}{NOTE}" for name in names}
    removed: list[str] = []
    with translated("removing the pins of a query"), connect(reading.connecting) as client:
        given = reading.connecting
        if not reading.several:
            cells = {"": cell_of(given, reading.topic)}
        else:
            found = retried(given, lambda: cells_of(given, client))
            cells = {name: to for name, (to, _) in found.items()}
    for to in cells.values():
        for address in filter(None, map(str.strip, to.server.split(","))):
            connecting = replace(to, server=address)
            with translated("removing the pins of a query"), connect(connecting) as client:
                for pin in retried(connecting, client.here.durables):
                    if pin.pin and pin.name in names and _reads(reading, pin.topic):
                        client.delete_durable(pin.topic, pin.name)
                        removed.append(f"{pin.topic}/{pin.name}")
    return removed


def _reads(reading: Reading, topic: str) -> bool:
    """True if a query with these options reads a topic: another query may have given its pins the same name."""
    if reading.topic_pattern is not None:
        return re.fullmatch(reading.topic_pattern, topic) is not None
    return topic in (reading.topics or (reading.topic,))


def _pins_of(query: StreamingQuery) -> Iterator[str]:
    """The names of the pins that the progress of a query tells."""
    for progress in query.recentProgress:
        for source in json.loads(progress.json)["sources"]:
            for offset in (source.get("endOffset"), source.get("latestOffset")):
                if not isinstance(offset, dict):
                    continue
                for one in (offset, *offset.get("cells", {}).values()):
                    if isinstance(name := one.get("pin"), str):
                        yield name
