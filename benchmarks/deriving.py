"""Views: the CPU of the server for updates of a topic that has a view, beside updates of one that has none."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final, NamedTuple

from benchmarks.processes import SowServer
from benchmarks.rows import MICROSECONDS, TIMES, Figure, Row, Target, ratio, ratio_range, take_turns
from benchmarks.setting import Setting
from sow_client import Client

BATCH_RECORDS: Final = 1_000
PLAIN: Final = "plain"
SEED: Final = 7
SUMS: Final = ("COUNT(*) AS n", "SUM(/px) AS px", "SUM(/qty) AS qty", "AVG(/px) AS mean")
_FORM: Final = b'{"id":%d,"g20":%d,"g1000":%d,"px":%d.%02d,"qty":%d,"text":"%s"}'


class _Case(NamedTuple):
    """A source with a view. The bounds are those of the table of targets."""

    topic: str
    groups: int
    select: Sequence[str]
    target: Target


CASES: Final = (
    _Case("sums1000", 1_000, SUMS, Target(0.2, f"{TIMES} plain updates", ambition=0.3)),
    _Case("sums20", 20, SUMS, Target(0.35, f"{TIMES} plain updates", ambition=0.5)),
    _Case("highs1000", 1_000, (*SUMS, "MAX(/px) AS high"), Target(0.13, f"{TIMES} plain updates", ambition=0.2)),
    _Case("highs20", 20, (*SUMS, "MAX(/px) AS high"), Target(0.24, f"{TIMES} plain updates", ambition=0.33)),
)


def document(number: int, revision: int) -> bytes:
    """About 200 bytes. The groups of a record stay; its price and quantity change with `revision`."""
    mixed = (number * 2_654_435_761 + revision * 40_503) & 0xFFFFFFFF
    return _FORM % (number, number % 20, number % 1_000, mixed % 997, mixed % 100, mixed % 10_000, b"%08x" % mixed * 15)


def views(setting: Setting) -> Iterator[Row]:
    """Random updates, a thousand a request, of a topic with a view of its groups and of one without, in turns."""
    records = setting.size(200_000, quick=20_000)
    updates = setting.size(200_000, quick=20_000)
    rounds = setting.size(5, quick=3)
    more = "".join([f'[topics.{topic}]\nkey = ["/id"]\n' for topic in (PLAIN, *[case.topic for case in CASES])])
    with ExitStack() as stack:
        server = stack.enter_context(SowServer(setting.directory / "sow", more=more))
        client = stack.enter_context(Client(server.address))
        chance = random.Random(SEED)
        setting.say(f"loading {records:,} records into each of {len(CASES) + 1} topics")
        for topic in (PLAIN, *[case.topic for case in CASES]):
            _publish(client, topic, range(records), 0)
        for case in CASES:
            client.create_view(f"view.{case.topic}", source=case.topic, group_by=f"/g{case.groups}", select=case.select)
        _await_complete(client)
        revision = 0

        def rate(topic: str) -> float:
            """Updates for a second of CPU."""
            nonlocal revision
            revision += 1
            numbers = [chance.randrange(records) for _ in range(updates)]
            before = server.cpu_seconds()
            _publish(client, topic, numbers, revision)
            return updates / (server.cpu_seconds() - before)

        setting.say(f"{rounds} rounds")
        rates = take_turns(rounds, {topic: partial(rate, topic) for topic in (PLAIN, *[case.topic for case in CASES])})
        for case in CASES:
            _check(client, case, records)
    for case in CASES:
        extreme = " and MAX" if len(case.select) > len(SUMS) else ""
        yield Row(
            f"a view of COUNT, 2 SUM, AVG{extreme}, {case.groups:,} groups, CPU an update: {rounds} × {updates:,}",
            Figure(1e6 / statistics.median(rates[case.topic]), MICROSECONDS),
            peer=Figure(1e6 / statistics.median(rates[PLAIN]), MICROSECONDS),
            judged=ratio(rates[case.topic], rates[PLAIN]),
            target=case.target,
            note=f"{ratio_range(rates[case.topic], rates[PLAIN])}; the peer is our own topic without a view",
        )


def _publish(client: Client, topic: str, numbers: Sequence[int], revision: int) -> None:
    with client.publisher(topic, durability="buffered", batch_records=BATCH_RECORDS) as publisher:
        for number in numbers:
            publisher.publish(document(number, revision))
    assert publisher.applied == len(numbers), f"{publisher.applied} of {len(numbers)} were applied"


def _await_complete(client: Client) -> None:
    while not all(status.complete for topic in client.topics() if (status := topic.view_status) is not None):
        time.sleep(0.1)


def _check(client: Client, case: _Case, records: int) -> None:
    """A view that has lost a change would be no measure."""
    found = {record.key: record.data for record in client.query(f"view.{case.topic}")}
    asked = client.query(case.topic, group_by=f"/g{case.groups}", aggregate=case.select)
    assert found == {record.key: record.data for record in asked}, f"{case.topic} differs from its source"
    assert sum(data["n"] for data in found.values()) == records, f"{case.topic} has not all records"
