"""A load: its row, its figures, its phases, and the bounds of loads.

A load is a row in `meta`, JSON with the fields of `LoadRow`. The writer's thread changes it; leases are in memory.
"""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from typing import Final, NamedTuple

from sow_server.engine.disk.layout import AttemptCounts
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import MICROS

PARTS_MAX: Final = 100_000
LEASE_MICROS: Final = 600 * MICROS
LEASE_MICROS_MAX: Final = 86_400 * MICROS


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Bounds of loads."""

    open_max: int = 16
    """Loads that have not ended, at one time."""
    staged_bytes_max: int = 64 * 2**30
    """Keys and payloads that all of them may have staged."""
    disk_free_min: int = 2**30
    """Bytes of the disk that stay free when rows are staged, besides room to apply all staged rows."""


class LoadPhase(enum.IntEnum):
    """The current phase of a load; numbered as in `sow.v1.LoadPhase`."""

    STAGING = 1
    APPLYING = 2
    DELETING = 3
    DONE = 4
    FAILED = 5


class LoadPart(NamedTuple):
    """An attempt that counts, and the number of rows that it has staged."""

    part: int
    attempt: int
    rows: int


class LoadContent(NamedTuple):
    """The records that the rows of a load make, each key once."""

    records: int
    size: int
    """Bytes of their keys and payloads."""


class LoadFigures(NamedTuple):
    """Counts of a load, as in `sow.v1.LoadFigures`."""

    staged: int = 0
    applied: int = 0
    superseded: int = 0
    repeated: int = 0
    deleted: int = 0


class LoadRow(NamedTuple):
    """A load as stored."""

    number: int
    epoch: str
    """The journal's when it was opened: clients of a store that was restored since do not know it."""
    topic_id: int
    topic: str
    open_micros: int
    begin_sequence: int
    begin_version: int
    lease_micros: int
    phase: LoadPhase = LoadPhase.STAGING
    figures: LoadFigures = LoadFigures()
    position: bytes = b""
    """APPLYING: where the next staged row is read. DELETING: the store key at which the search goes on."""
    parts_digest: str = ""
    """The digest of the parts that were committed. It shows whether a repeated commit means the same."""
    failure: str = ""
    end_micros: int = 0
    owner: str = ""
    """The identity that has opened it (rule A7)."""

    @property
    def id(self) -> str:
        """The name that clients use."""
        return f"{self.epoch}.{self.number}"

    @property
    def open(self) -> bool:
        """True if it has not ended."""
        return self.phase in _OPEN

    @property
    def working(self) -> bool:
        """True if it is committed and not at its end."""
        return self.phase in (LoadPhase.APPLYING, LoadPhase.DELETING)


_OPEN: Final = frozenset({LoadPhase.STAGING, LoadPhase.APPLYING, LoadPhase.DELETING})


def encode_load(row: LoadRow) -> bytes:
    """The stored row."""
    return json.dumps({**row._asdict(), "position": row.position.hex()}).encode()


def decode_load(value: bytes) -> LoadRow:
    """The load of a stored row."""
    fields = json.loads(value)
    fields["phase"] = LoadPhase(fields["phase"])
    fields["figures"] = LoadFigures(*fields["figures"])
    fields["position"] = bytes.fromhex(fields["position"])
    return LoadRow(**fields)


class Load:
    """A load while the process runs. The writer's thread changes it, after the commit; any thread reads it."""

    __slots__ = ("attempts", "ending", "lease_end_micros", "named", "row", "staged_bytes", "staged_rows")

    def __init__(self, row: LoadRow, lease_end_micros: int) -> None:
        self.row = row
        self.lease_end_micros = lease_end_micros
        self.attempts: dict[tuple[int, int], AttemptCounts] = {}
        """Keyed by part and attempt; empty once the load has ended."""
        self.named: dict[int, int] | None = None
        """The attempt that counts, by part, once they have been read."""
        self.staged_rows = 0
        self.staged_bytes = 0
        self.ending = False
        """Its end is queued."""

    def count(self, attempt: tuple[int, int], counts: AttemptCounts) -> None:
        """Takes the counts of an attempt over."""
        before = self.attempts.get(attempt, AttemptCounts())
        self.attempts[attempt] = counts
        self.staged_rows += counts.staged - before.staged
        self.staged_bytes += counts.bytes - before.bytes

    def renew(self, now_micros: int) -> None:
        """Begins the lease anew."""
        self.lease_end_micros = now_micros + self.row.lease_micros

    @property
    def figures(self) -> LoadFigures:
        """Its figures so far; before the commit all attempts count."""
        row = self.row
        return row.figures._replace(staged=self.staged_rows) if row.phase is LoadPhase.STAGING else row.figures


def load_not_found(load_id: str) -> StoreError:
    """The error for the id of no load."""
    return StoreError(
        Reason.LOAD_NOT_FOUND,
        f"load_id: there is no load {load_id[:80]!r}: it was aborted, or its lease has ended, or it never was",
        field="load_id",
    )


def load_failed(load: Load, why: str) -> StoreError:
    """A load cannot go on."""
    return StoreError(Reason.LOAD_FAILED, f"load_id: the load of {load.row.topic} cannot go on: {why}", field="load_id")
