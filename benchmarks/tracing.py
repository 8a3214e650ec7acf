"""The cost of traces: a server with a collector, whose calls are traced or not, against one without a collector.

Servers with the same records take turns (`turns`). A ratio is that of CPU times, without to with, so 0.97 × means that
the server with a collector spends 3 % more on a record or a call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Final

from benchmarks.comparing import Comparison, Figures, Measurement, measure, row
from benchmarks.documents import documents
from benchmarks.processes import SowServer
from benchmarks.publishing import publish
from benchmarks.rows import TIMES, Row, Target
from benchmarks.setting import Setting
from benchmarks.turns import Cases, Side
from sow_client import Client
from tests.support.servers.collector import Collector

CALLS: Final = 50
"""Single calls of a round."""
OFF: Final = "no collector"
AGAIN: Final = "no collector, another server"
UNTRACED: Final = "a collector, no call traced"
TRACED: Final = "a collector, every call traced"
_COMPARISONS: Final = (
    Comparison(UNTRACED, OFF, Target(0.85, f"{TIMES} of without", ambition=0.97)),
    Comparison(TRACED, OFF, None),
    Comparison(AGAIN, OFF, None),  # the same twice: how much two equal servers differ
)


def traces(setting: Setting) -> Iterator[Row]:
    """Writes and single calls with and without traces, in turns."""
    starts = setting.size(3, quick=1)
    rounds = setting.size(4, quick=2)
    cases = Cases(
        records=setting.size(30_000, quick=10_000), calls=CALLS, delivered=0, loaded=setting.size(60_000, quick=20_000)
    )
    streams = (Measurement(f"stream publish, {cases.records:,} new records", cases.new_keys, _COMPARISONS),)
    singles = (
        Measurement(f"{CALLS} single publishes", cases.single_publishes, _COMPARISONS),
        Measurement(f"{CALLS} single gets", cases.single_gets, _COMPARISONS),
    )
    spent: Figures = {}
    for start in range(starts):
        setting.say(f"start {start + 1} of {starts}")
        with ExitStack() as stack:
            collector = stack.enter_context(closing(Collector()))
            tables = f'[tracing]\nendpoint = "http://{collector.address}"\n'
            sides: dict[str, Side] = {}
            for name, more in (
                (OFF, ""),
                (AGAIN, ""),
                (UNTRACED, tables),
                (TRACED, f"{tables}sample_every = 1\n"),
            ):
                server = stack.enter_context(SowServer(setting.directory / f"{start}-{len(sides)}", more=more))
                client = stack.enter_context(Client(server.address))
                publish(client, documents(range(2 * cases.loaded)), "buffered")
                sides[name] = Side(server, client)
            measure(sides, streams, rounds, spent)
            # A single call costs so much that a few percent of it show only where the sides take turns often.
            measure(sides, singles, 15 * rounds, spent)
    for one in (*streams, *singles):
        for comparison in one.comparisons:
            yield row(one.name, spent[one.name], comparison)
