"""Formulas of the cost of a server, fitted to the figures of a sweep, and the model of more cores. Pure.

[1]  A formula is a sum of terms with coefficients that are not negative. Least squares over the relative errors, so
     that small servers count as much as large ones.
[2]  The error of a formula is the median, and the greatest, of its relative errors over the sweep.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Final

import numpy as np

FIGURES: Final = Path(__file__).with_name("sizing.json")
"""The raw figures of the sweep that docs/sizing.md is made from."""
MEBI: Final = 2**20
CACHE_BYTES: Final = 128 * MEBI
"""`[storage] block_cache`, as it is by default."""


@dataclass(frozen=True, slots=True)
class Point:
    """One server of the sweep, and what was measured on it."""

    records: int
    payload_bytes: int
    indexes: int
    subscribers: int
    topics: int
    follow_all: bool
    cpu_micros: Mapping[str, float]
    """The CPU time of one operation of `sow bench`, keyed by work."""
    memory_bytes: int
    """Resident memory at the end."""
    disk_bytes: int
    """After a compaction, without journal."""

    @property
    def stored_bytes(self) -> int:
        """The bytes of the payloads."""
        return self.records * self.payload_bytes


Term = Callable[[Point], float]


@dataclass(frozen=True, slots=True)
class Formula:
    """A figure of a server as a sum of terms."""

    name: str
    unit: str
    figure: Callable[[Point], float | None]
    """None: the point tells nothing about it."""
    terms: Mapping[str, Term]
    """Keyed by their text."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A formula with its coefficients and its error [2]."""

    formula: Formula
    coefficients: Mapping[str, float]
    points: int
    median_error: float
    greatest_error: float

    def predict(self, point: Point) -> float:
        """The figure of a server."""
        return sum(value * self.formula.terms[text](point) for text, value in self.coefficients.items())

    def __str__(self) -> str:
        """The line of docs/sizing.md."""
        parts = [_part(value, text) for text, value in self.coefficients.items()]
        return (
            f"| {self.formula.name} | {' + '.join(parts)} | {self.formula.unit} "
            f"| {self.median_error:.0%} | {self.greatest_error:.0%} |"
        )


def _part(value: float, text: str) -> str:
    shown = f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2g}"
    return shown if text == "1" else f"{shown} · {text}"


def _cpu(work: str) -> Callable[[Point], float | None]:
    return lambda point: point.cpu_micros.get(work)


def _of_all(point: Point) -> float | None:
    return point.cpu_micros.get("deliver") if point.follow_all else None


def _of_own(point: Point) -> float | None:
    return None if point.follow_all else point.cpu_micros.get("deliver")


def _one(_point: Point) -> float:
    return 1.0


def _kib(point: Point) -> float:
    return point.payload_bytes / 1024


def _indexes(point: Point) -> float:
    return float(point.indexes)


def _tens(point: Point) -> float:
    return float(np.log10(point.records / 1e5))


def _memory_mib(point: Point) -> float:
    return point.memory_bytes / MEBI


_WRITE: Final[Mapping[str, Term]] = {"1": _one, "P": _kib, "I": _indexes, "L": _tens}
FORMULAS: Final = (
    Formula(
        "resident memory",
        "MiB",
        _memory_mib,
        {
            "1": _one,
            "min(R · P / 1 KiB, 128 MiB)": lambda point: min(point.stored_bytes, CACHE_BYTES) / MEBI,
            "R / 10⁶": lambda point: point.records / 1e6,
            "P": _kib,
            "T": lambda point: float(point.topics),
            "S": lambda point: float(point.subscribers),
        },
    ),
    Formula(
        "disk of a record",
        "B",
        lambda point: point.disk_bytes / point.records if point.stored_bytes > 4 * MEBI else None,
        {"1": _one, "P": _kib, "I": _indexes},
    ),
    Formula("publish of a new record", "µs", _cpu("publish"), _WRITE),
    Formula("update of a random record", "µs", _cpu("update"), _WRITE),
    Formula("single publish", "µs", _cpu("single"), _WRITE),
    Formula("single get", "µs", _cpu("get"), {"1": _one, "P": _kib, "L": _tens}),
    Formula("record of a whole-topic query", "µs", _cpu("query"), {"1": _one, "P": _kib}),
    Formula("query by an index, ten records", "µs", _cpu("index"), {"1": _one, "P": _kib, "L": _tens}),
    Formula("expiry", "µs", _cpu("expire"), _WRITE),
    Formula("change delivered to one of S", "µs", _of_own, {"1": _one, "S": lambda point: float(point.subscribers)}),
    Formula("delivery to each of S", "µs", _of_all, {"1": _one, "1 / S": lambda point: 1.0 / point.subscribers}),
)


def fit(formula: Formula, points: Sequence[Point]) -> Fit:
    """The formula with the coefficients that suit these points best [1]."""
    if not points:
        return Fit(formula, {}, 0, 0.0, 0.0)
    known = [(point, value) for point in points if (value := formula.figure(point)) is not None]
    texts = list(formula.terms)
    # Relative errors: each row is divided by its figure.
    rows = np.array([[formula.terms[text](point) / value for text in texts] for point, value in known])
    chosen = _not_negative(rows)
    coefficients = {text: float(value) for text, value in zip(texts, chosen, strict=True) if value > 0}
    errors = [
        abs(sum(value * formula.terms[text](point) for text, value in coefficients.items()) / figure - 1)
        for point, figure in known
    ]
    return Fit(formula, coefficients, len(known), statistics.median(errors), max(errors))


def _not_negative(rows: np.ndarray) -> Sequence[float]:
    """The least squares solution of `rows @ x = 1` with no x below 0: the best over all sets of terms, as there are few
    terms."""
    count = rows.shape[1]
    best, least = [0.0] * count, float("inf")
    for size in range(1, count + 1):
        for kept in combinations(range(count), size):
            part = rows[:, kept]
            found = np.linalg.lstsq(part, np.ones(len(part)), rcond=None)[0]
            if (found < 0).any():
                continue
            residual = float(((part @ found - 1) ** 2).sum())
            if residual < least - 1e-12:
                least = residual
                best = [0.0] * count
                for place, value in zip(kept, found, strict=True):
                    best[place] = float(value)
    return best


@dataclass(frozen=True, slots=True)
class Load:
    """The CPU time of one operation, by who spends it, in microseconds."""

    name: str
    server_serial: float
    """The CPU time of the server's threads that share one interpreter: no two of them run at a time."""
    server_parallel: float
    """The CPU time of its other threads and processes: RocksDB's, gRPC's, reader processes."""
    client: float
    """The CPU time of the client, which is one interpreter, too."""

    def per_second(self, cores: int, *, client_elsewhere: bool = False) -> float:
        """The greatest rate on so many cores: either all cores are busy, or one interpreter is."""
        client = 0.0 if client_elsewhere else self.client
        total = self.server_serial + self.server_parallel + client
        return 1e6 / max(total / cores, self.server_serial, client)


@dataclass(frozen=True, slots=True)
class Pinned:
    """A load, and the rates that were measured on one core and on two, server and client together."""

    load: Load
    measured: Mapping[int, float]
    """Operations per second, keyed by cores."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The bytes of records and of their changes, of one size of payload."""

    payload_bytes: int
    records: int
    disk_bytes: int
    """The disk space of the records, after a compaction, without journal."""
    journal_bytes: int
    """The bytes of their changes, as the settings of retention count them, before compression."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """All raw figures."""

    machine: str
    points: Sequence[Point]
    pinned: Sequence[Pinned]
    kept: Sequence[Kept] = ()


def to_json(sweep: Sweep) -> str:
    """For `read`."""
    return json.dumps(asdict(sweep), indent=1) + "\n"


def read(text: str) -> Sweep:
    """The figures of a file."""
    raw = json.loads(text)
    return Sweep(
        raw["machine"],
        [Point(**point) for point in raw["points"]],
        [
            Pinned(Load(**one["load"]), {int(cores): rate for cores, rate in one["measured"].items()})
            for one in raw["pinned"]
        ],
        tuple(Kept(**one) for one in raw["kept"]),
    )
