"""The history of a round as its clients saw it. The checker judges it, and it is kept when a round fails."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, Literal, NamedTuple

Kind = Literal["put", "delta", "touch", "delete"]
Outcome = Literal["ok", "refused", "unknown"]
"""Acknowledged, certainly not applied, or applied or not."""

NEVER: Final = 2**63 - 1


class Rank(NamedTuple):
    """The pair that decides between two writes of a key (rule R3)."""

    version: int
    origin: str


@dataclass(frozen=True, slots=True)
class Row:
    """A record as somebody saw it."""

    topic: str
    key: str
    version: int
    origin: str
    expire: int
    """NEVER: never."""
    value: str
    """The tag of the publish that it holds; empty: it was made by deltas alone."""
    delta: str
    """The tag of the last delta that was merged into it; empty: none."""

    @property
    def rank(self) -> Rank:
        """Its place among the writes of its key."""
        return Rank(self.version, self.origin)


@dataclass(slots=True)
class Op:
    """A write of a client, and what became of it. Times are of the monotonic clock of the test, in microseconds."""

    instance: str
    life: int
    """How often the data of the instance had been lost when the write began."""
    writer: str
    topic: str
    key: str
    kind: Kind
    tag: str
    """A value that only this payload has; empty for deletes and touches."""
    begin: int
    end: int = 0
    outcome: Outcome = "unknown"
    version: int = 0
    """0: not known."""
    expire: int = NEVER
    """As it was answered; only of an acknowledged write whose version is known."""
    expire_known: bool = True
    """False: it was a duplicate, of which only the version is remembered."""
    ttl: int | None = None
    """As it was asked for, microseconds; None: none."""
    effective: bool = True
    """False: an acknowledged delete that found nothing."""
    replicated: bool = False
    """Whether it was acknowledged as REPLICATED."""
    once: bool = True
    """False: its client may have sent it to two lives of an instance."""
    reason: str = ""


@dataclass(slots=True)
class Seen:
    """A change that a follower was handed."""

    instance: str
    epoch: str
    """Of the journal: another one once the data were lost."""
    stream: str
    """One follower, as long as it went on from where it was."""
    op: Literal["put", "delete", "expire"]
    sequence: int
    row: Row
    """For a delete or an expiry the record that went."""
    time: int
    repeats: bool = False
    """Whether it may come again: it comes from a durable subscription."""


@dataclass(slots=True)
class Covered:
    """A range that a stream was handed without a gap: everything after `after`, up to `upto`."""

    instance: str
    epoch: str
    stream: str
    topics: tuple[str, ...]
    after: int
    upto: int


@dataclass(slots=True)
class Read:
    """The answer to a query of a whole topic."""

    instance: str
    life: int
    topic: str
    begin: int
    end: int
    as_of: int
    rows: list[Row]


@dataclass(slots=True)
class Dropped:
    """A record that an instance has dropped as dead (rule R4)."""

    instance: str
    topic: str
    key: str
    version: int
    origin: str


@dataclass(slots=True)
class Fault:
    """One act of the nemesis."""

    time: int
    what: str


@dataclass(slots=True)
class History:
    """A round. `finals`: what each instance held in the end; `restarted`: and after a restart of all."""

    acting: tuple[str, ...] = ()
    """The topics that act on expiration."""
    ops: list[Op] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    covered: list[Covered] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    roams: bool = False
    """Whether a consumer of a replicated durable has gone from instance to instance."""
    handed: list[Row] = field(default_factory=list)
    """The records that it was handed."""
    dropped: list[Dropped] = field(default_factory=list)
    pruned: bool = False
    """Whether the journal is kept for peers alone, so that followers do not begin with the first change."""
    drops_allowed: bool = False
    """Whether somebody was away for longer than tombstones are kept, or has lost its data."""
    wipes: dict[str, int] = field(default_factory=dict)
    """How often instances have lost their data."""
    deaths: list[tuple[str, int]] = field(default_factory=list)
    """When a process ended, and of which instance."""
    faults: list[Fault] = field(default_factory=list)
    finals: list[Read] = field(default_factory=list)
    restarted: list[Read] = field(default_factory=list)

    def save(self, folder: Path) -> None:
        """Writes it down, a line for each event."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("ops", "seen", "covered", "reads", "handed", "dropped", "faults", "finals", "restarted"):
            _write(folder / f"{name}.ndjson", [asdict(one) for one in getattr(self, name)])
        rest = {"acting": self.acting, "wipes": self.wipes, "deaths": self.deaths, "pruned": self.pruned}
        _write(folder / "round.ndjson", [rest | {"drops_allowed": self.drops_allowed, "roams": self.roams}])

    @classmethod
    def load(cls, folder: Path) -> History:
        """Reads one that was saved."""
        (rest,) = _read(folder / "round.ndjson")
        return cls(
            acting=tuple(rest["acting"]),
            ops=[Op(**one) for one in _read(folder / "ops.ndjson")],
            seen=[Seen(**(one | {"row": Row(**one["row"])})) for one in _read(folder / "seen.ndjson")],
            covered=[Covered(**(one | {"topics": tuple(one["topics"])})) for one in _read(folder / "covered.ndjson")],
            reads=[_query(one) for one in _read(folder / "reads.ndjson")],
            roams=rest["roams"],
            handed=[Row(**one) for one in _read(folder / "handed.ndjson")],
            dropped=[Dropped(**one) for one in _read(folder / "dropped.ndjson")],
            pruned=rest["pruned"],
            drops_allowed=rest["drops_allowed"],
            wipes=rest["wipes"],
            deaths=[(name, time) for name, time in rest["deaths"]],
            faults=[Fault(**one) for one in _read(folder / "faults.ndjson")],
            finals=[_query(one) for one in _read(folder / "finals.ndjson")],
            restarted=[_query(one) for one in _read(folder / "restarted.ndjson")],
        )


def _query(one: dict) -> Read:  # type: ignore[type-arg]  # JSON
    return Read(**(one | {"rows": [Row(**row) for row in one["rows"]]}))


def _write(path: Path, lines: Iterable[object]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _read(path: Path) -> list[dict]:  # type: ignore[type-arg]  # JSON
    return [json.loads(line) for line in path.read_text().splitlines()]
