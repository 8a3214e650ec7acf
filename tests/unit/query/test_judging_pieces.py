"""Filters judge in pieces that are bounded by time (sieve [1], scan [3])."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from sow_server.engine.values.model import Publish
from sow_server.filters import parse
from sow_server.filters.restriction import Restriction
from sow_server.query import sieve
from sow_server.query.filtering import record_filter
from sow_server.query.ordering import order
from sow_server.query.scan import Query, Scan
from sow_server.query.sieve import JUDGED_FIRST, JUDGING_SECONDS, Judging
from tests.support.stores.stores import Rig

KEYS = [b"%04d" % number for number in range(1000)]


class SlowFilter:
    """Each record takes so much time of a fake clock. Every third one matches."""

    def __init__(self, seconds: float) -> None:
        self.now = 0.0
        self.seconds = seconds
        self.judged: list[int] = []

    def __call__(self, keys: Sequence[bytes], values: Sequence[bytes]) -> list[bool]:
        self.judged.append(len(keys))
        self.now += self.seconds * len(keys)
        return [int(key) % 3 == 0 for key in keys]


def pieces(slow: SlowFilter) -> list[float]:
    """The time of each piece until all records are judged."""
    judging = Judging(slow, lambda: slow.now)
    judging.take(list(KEYS), [b"v" + key for key in KEYS])
    found: list[bytes] = []
    values: list[bytes] = []
    times = []
    while judging.waits:
        before = slow.now
        judging.judge(found, values)
        times.append(slow.now - before)
    assert found == KEYS[::3]
    assert values == [b"v" + key for key in found]
    return times


def test_a_quick_filter_judges_all_in_one_piece() -> None:
    slow = SlowFilter(1e-9)
    assert len(pieces(slow)) == 1
    assert len(slow.judged) < 10, "and looks at the clock rarely"


@pytest.mark.parametrize("seconds", [0.0001, 0.0005, JUDGING_SECONDS / 2])
def test_a_slow_filter_judges_a_few_records_in_a_piece(seconds: float) -> None:
    """Story: 10,000 records under a filter of a millisecond held a thread for ten seconds."""
    times = pieces(SlowFilter(seconds))
    assert max(times[1:]) <= 2 * JUDGING_SECONDS
    assert times[0] <= JUDGING_SECONDS + 2 * JUDGED_FIRST * seconds


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    rig = Rig(tmp_path)
    rig.create_topic("t")
    rig.run(Publish("t", [b"x"] * len(KEYS), keys=[key.decode() for key in KEYS]))
    return rig


@pytest.mark.parametrize("restricted", [False, True])
@pytest.mark.parametrize(
    "more",
    [{}, {"top_n": 50}, {"page_size": 77}, {"skip_n": 13, "batch_size": 7}, {"count_only": True}, {"order": "@key"}],
    ids=str,
)
def test_a_slow_filter_changes_no_answer(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, more: dict[str, object], restricted: bool
) -> None:
    """Also where a page or the first few records end within a piece."""
    topic = rig.topic("t")
    given = dict(more)
    if "order" in given:
        given["order"] = order(topic, f"{given['order']} DESC")
    restriction = Restriction(rows=parse("@key < '0500'") if restricted else None)
    text = "@key LIKE '[05]$'"

    def answer(seconds: float) -> tuple[list[bytes], object, int]:
        now = 0.0

        def clock() -> float:
            nonlocal now
            now += seconds
            return now

        query = Query(topic, filter=record_filter(topic, text, 0, restriction=restriction), **given)  # type: ignore[arg-type]  # fields of a query
        scan = Scan(rig.store.cuts, query, clock=clock)
        keys: list[bytes] = []
        steps = 0
        while (batch := scan.step()) is not None:
            keys += batch.keys
            steps += 1
        footer = scan.footer()
        scan.close()
        return keys, footer, steps

    monkeypatch.setattr(sieve, "JUDGED_FIRST", 4)
    quick, slow = answer(0.0), answer(JUDGING_SECONDS)
    assert slow[:2] == quick[:2]
    assert slow[2] > quick[2]
