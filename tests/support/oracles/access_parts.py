"""Parts of the access control for unit tests: clocks that a test moves, an audit log in memory, calls that last."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final, cast

from sow_server.access.audit import Outcome, Part, Value
from sow_server.access.authorizer import Authorizer, Session
from sow_server.access.caller import Call
from sow_server.access.credentials import Prover, Shown, Tokens
from sow_server.access.file import load_access
from sow_server.access.model import AccessFile
from sow_server.access.needs import NEEDS
from sow_server.engine.catalog.topics import Topics
from sow_server.engine.values.model import MICROS

HERE: Final = "ipv4:10.0.0.1:5000"
BEGIN_MICROS: Final = 1_800_000_000 * MICROS
"""15 January 2027, 8:00."""


def sha256(token: str) -> str:
    """As an access file has it."""
    return hashlib.sha256(token.encode()).hexdigest()


def access_of(folder: Path, text: str) -> AccessFile:
    """Reads an access file with this text."""
    path = folder / "auth.toml"
    path.touch(0o600)
    path.write_text(text, encoding="utf-8")
    return load_access(path)


class Clocks:
    """Wall time and monotonic time, moved by the test."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now_micros(self) -> int:
        return BEGIN_MICROS + round(self.seconds * MICROS)

    def elapsed(self) -> float:
        return self.seconds


class AuditInMemory:
    """Keeps the lines. `fails`: as on a full disk."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Value]] = []
        self.parts: list[Part] = []
        """Of each line."""
        self.fails = False
        self.closed = False

    def write(self, part: Part, event: str, fields: Mapping[str, Value], *, reserved: bool = False) -> bool:
        kept = not self.fails or reserved
        if kept:
            self.lines.append({"event": event, **fields})
            self.parts.append(part)
        return kept

    def catch_up(self) -> None: ...

    def close(self) -> None:
        self.closed = True

    def of(self, event: str) -> list[dict[str, Value]]:
        """The lines of an event."""
        return [line for line in self.lines if line["event"] == event]


class Counted:
    """Counts, as the metrics do."""

    def __init__(self) -> None:
        self.failed = 0
        self.denied: list[tuple[str, str]] = []
        self.audits: list[tuple[str, Outcome]] = []

    def authentication_failed(self) -> None:
        self.failed += 1

    def access_denied(self, method: str, action: str) -> None:
        self.denied.append((method, action))

    def audited(self, event: str, outcome: Outcome) -> None:
        self.audits.append((event, outcome))


class LastingTask:
    """The task of a call that answers with a stream."""

    def __init__(self) -> None:
        self.cancels = 0

    def cancel(self) -> None:
        self.cancels += 1


class Guarded:
    """An authorizer, and calls to it with tokens."""

    def __init__(self, file: AccessFile | None, *, audit_reads: bool = False, topics: Topics | None = None) -> None:
        self.clocks = Clocks()
        self.audit = AuditInMemory()
        self.counted = Counted()
        self.authorizer = Authorizer(
            topics or Topics(),
            file,
            self.audit,
            self.counted,
            now_micros=self.clocks.now_micros,
            elapsed=self.clocks.elapsed,
            audit_reads=audit_reads,
        )

    def admit(
        self, method: str, token: str = "", address: str = HERE, prover: Prover | None = None
    ) -> tuple[Call, Session | None]:
        """Admits a call by the name of its method. Raises StoreError."""
        path, need = next((path, need) for path, need in NEEDS.items() if path.endswith(f"/{method}"))
        return self.authorizer.admit(prover or Tokens(), path, need, Shown(token), address, lambda: None)

    def lasting(self, method: str, token: str, address: str = HERE) -> tuple[Call, Session | None]:
        """The same, of a call that lasts."""
        call, session = self.admit(method, token, address)
        call.runs(cast("asyncio.Task[object]", LastingTask()))
        return call, session
