"""The checker finds every problem, and none in a correct history: histories by hand, each with one thing planted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from tests.robustness.checker import check
from tests.robustness.history import NEVER, Covered, Dropped, History, Op, Rank, Read, Row, Seen

K: Final = "k"
LATE: Final = 1_000_000
"""Of the instances' clocks, at the end."""


def op(kind: str, version: int, at: int, **more: object) -> Op:
    """A write at `a`, acknowledged one tick after it began; its tag is its version."""
    tag = f"t{version or at}" if kind in ("put", "delta") else ""
    written = Op("a", 0, "w", "orders", K, kind, tag, at, at + 1, "ok", version)  # type: ignore[arg-type]  # one of its kinds
    for name, value in more.items():
        setattr(written, name, value)
    return written


def row(version: int, **more: object) -> Row:
    """The record that the put of a version leaves."""
    return replace(Row("orders", K, version, "a", NEVER, f"t{version}", ""), **more)  # type: ignore[arg-type]  # its fields


def told(what: str, sequence: int, of: Row, stream: str = "f1", *, repeats: bool = False) -> Seen:
    """A change as a follower of `a` was told it."""
    return Seen("a", "e", stream, what, sequence, of, sequence, repeats)  # type: ignore[arg-type]  # one of its words


def held(*rows: Row, instance: str = "a", as_of: int = LATE, begin: int = 900, life: int = 0) -> Read:
    """All that an instance holds."""
    return Read(instance, life, "orders", begin, begin + 1, as_of, list(rows))


def ended(ops: list[Op], *rows: Row, **more: object) -> History:
    """A round that leaves the same rows at two instances, also after the restart."""
    history = History(acting=("orders",), ops=ops)
    history.finals = [held(*rows), held(*rows, instance="b")]
    history.restarted = [held(*rows), held(*rows, instance="b")]
    for name, value in more.items():
        setattr(history, name, value)
    return history


def wrongs(history: History) -> set[str]:
    """The checker's findings."""
    return {problem.what for problem in check(history)}


PUTS: Final = [op("put", 10, 1), op("put", 20, 3)]
UNKNOWN: Final = op("put", 0, 5, outcome="unknown", tag="t30")
TOUCH: Final = op("touch", 30, 5, expire=500)
OVER: Final = row(20, expire=100)

ANEW: Final = [op("put", 50, 1), op("put", 20, 10, life=1)]
"""Written before the data were lost, with a clock that was ahead, and after."""

RIGHT: Final[dict[str, Callable[[], History]]] = {
    "nothing": lambda: ended([]),
    "the last put": lambda: ended(PUTS, row(20)),
    "the last put handed over": lambda: ended(PUTS, row(20), roams=True, handed=[row(20), row(10)]),
    "not handed over, as a journal was lost": lambda: ended(PUTS, row(20), roams=True, wipes={"b": 1}),
    "not handed over, as a journal was cut off": lambda: ended(PUTS, row(20), roams=True, pruned=True),
    "an unanswered put that happened": lambda: ended([*PUTS, UNKNOWN], row(30)),
    "an unanswered put that did not": lambda: ended([*PUTS, UNKNOWN], row(20)),
    "a delete": lambda: ended([*PUTS, op("delete", 0, 5)]),
    "an unanswered delete that happened": lambda: ended([*PUTS, op("delete", 0, 5, outcome="unknown")]),
    "an unanswered delete that did not": lambda: ended([*PUTS, op("delete", 0, 5, outcome="unknown")], row(20)),
    "a delete that found nothing": lambda: ended([op("delete", 0, 1, effective=False), *PUTS], row(20)),
    "expired": lambda: ended([op("put", 20, 1, expire=100)]),
    "a touch to an end": lambda: ended([*PUTS, TOUCH]),
    "expired though not known when": lambda: ended([op("put", 0, 1, ttl=1000)]),
    "a duplicate of which only the version is known": lambda: ended(
        [op("put", 20, 1, ttl=1000, expire_known=False)], reads=[held(row(20, expire=100), as_of=50, begin=50)]
    ),
    "expired where a clock is ahead": lambda: ended(
        [op("put", 20, 1, expire=LATE + 5)],
        finals=[held(), held(instance="b", as_of=LATE + 9)],
        restarted=[held(), held(instance="b", as_of=LATE + 9)],
    ),
    "the greater of two": lambda: ended([*PUTS, op("put", 25, 1, instance="b")], row(25, origin="b")),
    "a delta": lambda: ended([*PUTS, op("delta", 30, 5)], row(30, value="t20", delta="t30")),
    "lost with the data": lambda: ended(PUTS, wipes={"a": 1}),
    "lost in part with the data": lambda: ended(
        PUTS, wipes={"a": 1}, finals=[held(row(10), life=1)], restarted=[held(row(10), life=1)]
    ),
    "followed": lambda: ended(
        PUTS, row(20), seen=[told("put", 1, row(10)), told("put", 2, row(20))], covered=[followed(0, 2)]
    ),
    "followed where the journal begins": lambda: ended(
        PUTS,
        row(20),
        seen=[told("put", 1, row(10), "f2"), told("put", 2, row(20)), told("put", 2, row(20), "f2")],
        covered=[followed(0, 2)],
        pruned=True,
    ),
    "told again by a durable": lambda: ended(
        PUTS, row(20), seen=[told("put", n, row(v), repeats=True) for n, v in ((1, 10), (2, 20), (1, 10), (2, 20))]
    ),
    "expired between the looks": lambda: ended(
        [op("put", 20, 1, expire=LATE + 5)],
        finals=[held(row(20, expire=LATE + 5)), held(instance="b", as_of=LATE + 9)],
        restarted=[held(as_of=LATE + 9), held(instance="b", as_of=LATE + 9)],
    ),
    "dropped as somebody was away": lambda: ended(
        PUTS, dropped=[Dropped("a", "orders", K, 20, "a")], drops_allowed=True
    ),
    "put anew above what an earlier life wrote": lambda: ended(ANEW, row(51, value="t20"), wipes={"a": 1}),
    "sent twice to two lives": lambda: ended([op("put", 20, 1, once=False)], row(25, value="t20"), wipes={"a": 1}),
}


def followed(after: int, upto: int, stream: str = "f1") -> Covered:
    """The changes that a follower was told without a gap."""
    return Covered("a", "e", stream, ("orders",), after, upto)


WRONG: Final[dict[str, tuple[str, Callable[[], History]]]] = {
    "an older put": ("an acknowledged write is lost", lambda: ended(PUTS, row(10))),
    "no put": ("gone", lambda: ended(PUTS)),
    "no put whose version is not known": ("gone", lambda: ended([op("put", 0, 1)])),
    "an older put than one of unknown version": (
        "an acknowledged write is lost",
        lambda: ended([*PUTS, op("put", 0, 5)], row(20)),
    ),
    "a deleted record": ("a delete that did not last", lambda: ended([*PUTS, op("delete", 0, 5)], row(20))),
    "gone, and only an older delete": ("gone", lambda: ended([op("put", 10, 1), op("delete", 0, 3), op("put", 20, 5)])),
    "gone before its time": ("gone", lambda: ended([op("put", 20, 1, expire=LATE + 50)])),
    "expired where nothing expires": ("gone", lambda: replace(ended([op("put", 20, 1, expire=100)]), acting=())),
    "expired, and a newer one has not": ("gone", lambda: ended([op("put", 10, 1, expire=100), op("put", 20, 3)])),
    "a replicated one lost with the data": ("gone", lambda: ended([op("put", 10, 1, replicated=True)], wipes={"a": 1})),
    "one that another instance has shown": (
        "gone",
        lambda: ended(PUTS, wipes={"a": 1}, reads=[held(row(20), instance="b", begin=50)]),
    ),
    "older, by an earlier life whose clock was ahead": (
        "an acknowledged write is lost",
        lambda: ended(ANEW, row(50), wipes={"a": 1}, seen=[told("put", 1, row(50))]),
    ),
    "deleted since by a later life": (
        "a delete that did not last",
        lambda: ended([ANEW[0], op("delete", 0, 10, life=1)], row(50), wipes={"a": 1}),
    ),
    "written in the life that was not lost": ("gone", lambda: ended([op("put", 10, 1, life=1)], wipes={"a": 1})),
    "nobody wrote it": ("nobody wrote it", lambda: ended(PUTS, row(20), reads=[held(row(15))])),
    "an unanswered one before its time": ("nobody wrote it", lambda: ended([*PUTS, UNKNOWN], row(15, value="t30"))),
    "an unanswered one of a process that had ended": (
        "nobody wrote it",
        lambda: ended(
            [UNKNOWN, op("put", 40, 20), op("put", 60, 30)],
            row(60),
            reads=[held(row(50, value="t30"))],
            deaths=[("a", 10)],
        ),
    ),
    "a refused one": (
        "a write that was refused",
        lambda: ended([*PUTS, op("put", 0, 5, outcome="refused", tag="t30")], row(30)),
    ),
    "another payload": ("not as acknowledged", lambda: ended(PUTS, row(20, value="t10"))),
    "another stamp": ("not as acknowledged", lambda: ended(PUTS, row(20, expire=LATE * 2))),
    "a delta without its field": (
        "not as acknowledged",
        lambda: ended([*PUTS, op("delta", 30, 5)], row(30, value="t20")),
    ),
    "one version, two stamps": (
        "two records of one version",
        lambda: ended([UNKNOWN], row(30), reads=[held(row(30, expire=LATE * 3))]),
    ),
    "expired and shown": ("shown though expired", lambda: ended([op("put", 20, 1, expire=100)], OVER)),
    "a stale read": (
        "older than known there before",
        lambda: ended(PUTS, row(20), reads=[held(row(10), begin=50)]),
    ),
    "a read behind a read": (
        "older than known there before",
        lambda: ended(
            [replace(one, instance="b") for one in PUTS],
            row(20, origin="b"),
            reads=[held(row(20, origin="b"), begin=50), held(row(10, origin="b"), begin=60)],
        ),
    ),
    "a clock that runs backwards": (
        "the clock ran backwards",
        lambda: ended([], reads=[held(as_of=9 * LATE, begin=50), held(as_of=LATE, begin=60)]),
    ),
    "older than told before": (
        "older than told before",
        lambda: ended(PUTS, row(20), seen=[told("put", 1, row(20)), told("put", 2, row(10))]),
    ),
    "back after a delete": (
        "older than told before",
        lambda: ended(
            PUTS, row(20), seen=[told("put", 1, row(20)), told("delete", 2, row(20)), told("put", 3, row(20))]
        ),
    ),
    "a delete of another record than was told": (
        "older than told before",
        lambda: ended(PUTS, seen=[told("put", 1, row(20)), told("delete", 2, row(10))]),
    ),
    "out of order": (
        "out of order",
        lambda: ended(PUTS, row(20), seen=[told("put", 2, row(20)), told("put", 1, row(10))]),
    ),
    "one sequence, two changes": (
        "one sequence, two changes",
        lambda: ended(PUTS, row(20), seen=[told("put", 1, row(10)), told("put", 1, row(20), "f2")]),
    ),
    "left out": (
        "left out",
        lambda: ended(
            PUTS,
            row(20),
            seen=[told("put", 1, row(10)), told("put", 2, row(20)), told("put", 2, row(20), "f2")],
            covered=[followed(0, 2), followed(0, 2, "f2")],
        ),
    ),
    "left out where the journal had begun": (
        "left out",
        lambda: ended(
            [*PUTS, op("put", 30, 5)],
            row(30),
            seen=[told("put", n, row(10 * n), stream) for stream in "fg" for n in (1, 2, 3) if (n, stream) != (2, "f")],
            covered=[followed(0, 3, "f"), followed(0, 3, "g")],
            pruned=True,
        ),
    ),
    "differ": ("differ", lambda: ended(PUTS, row(20), finals=[held(row(20)), held(row(10), instance="b")])),
    "one lacks it": ("differ", lambda: ended(PUTS, row(20), finals=[held(row(20)), held(instance="b")])),
    "changed by a restart": (
        "changed by a restart",
        lambda: ended(PUTS, row(20), finals=[held(row(10)), held(row(10), instance="b")]),
    ),
    "dropped": ("dropped", lambda: ended(PUTS, row(20), dropped=[Dropped("a", "orders", K, 5, "a")])),
    "applied twice": (
        "applied twice",
        lambda: ended([op("put", 0, 1, tag="t1")], row(30, value="t1"), reads=[held(row(10, value="t1"), begin=50)]),
    ),
    "an older one handed over": ("never handed over", lambda: ended(PUTS, row(20), roams=True, handed=[row(10)])),
    "one handed over that nobody wrote": (
        "nobody wrote it",
        lambda: ended(PUTS, row(20), roams=True, handed=[row(15), row(20)]),
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_correct_history_passes(name: str) -> None:
    assert check(RIGHT[name]()) == []


@pytest.mark.parametrize("name", WRONG)
def test_planted_faults_are_found(name: str) -> None:
    what, history = WRONG[name]
    assert what in wrongs(history())


def test_a_history_that_was_saved_is_judged_as_before(tmp_path: Path) -> None:
    for what, make in WRONG.values():
        history = make()
        history.save(tmp_path)
        assert what in wrongs(History.load(tmp_path))
        assert check(History.load(tmp_path)) == check(history)


def test_versions_of_one_key_are_compared_with_their_origins() -> None:
    assert Rank(1, "b") > Rank(1, "a")
    two = [op("put", 10, 1), op("put", 10, 1, instance="b")]
    assert wrongs(ended(two, row(10, origin="b"))) == set()
    assert "an acknowledged write is lost" in wrongs(ended(two, row(10)))
