"""The last lines of the log, in memory, for those who may see them (rule X10). Any thread adds; any thread reads.

[1]  At most LINES_MAX lines are kept, of LINE_BYTES_MAX each.
[2]  A line has no secret: not the known ones, nothing that looks like a credential, and no value of a field whose name
     says that it is one.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping
from threading import Lock
from typing import Final, NamedTuple

import msgspec

LINES_MAX: Final = 1_000
LINE_BYTES_MAX: Final = 8_192
EVENT_CHARACTERS_MAX: Final = 500
LEVELS: Final = ("debug", "info", "warning", "error", "critical")
HIDDEN: Final = "***"
_SECRET_NAMES: Final = re.compile("token|passw|secret|authorization|cookie|credential|private_key", re.IGNORECASE)
_SECRET_TEXTS: Final = (
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{8,}"), rf"\1 {HIDDEN}"),
    (re.compile(r"://[^/\s@]+@"), f"://{HIDDEN}@"),
    (re.compile(r"\beyJ[\w-]+\.[\w-]+\.[\w-]*"), HIDDEN),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|$)", re.DOTALL), HIDDEN),
)
_SECRET_CHARACTERS_MIN: Final = 4
"""A shorter secret would take ordinary words away."""


class Line(NamedTuple):
    """One line."""

    number: int
    """From 1, in the order in which they were written."""
    time_micros: int
    level: str
    event: str
    logger: str
    fields: str
    """A JSON object."""


class LogTail:
    """Owns the last lines."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        """`secrets`: texts that no line may have."""
        self._secrets = sorted((one for one in secrets if len(one) >= _SECRET_CHARACTERS_MIN), key=len, reverse=True)
        self._lines: deque[Line] = deque(maxlen=LINES_MAX)
        self._number = 0
        self._lock = Lock()

    def add(self, time_micros: int, event: Mapping[str, object]) -> None:
        """A line, as an event with fields; `level`, `event` and `logger` are among them."""
        rest = {
            name: self._masked(name, value)
            for name, value in event.items()
            if name not in ("time", "level", "event", "logger")
        }
        text = msgspec.json.encode(rest)
        if len(text) > LINE_BYTES_MAX:
            cut = text[: LINE_BYTES_MAX // 2].decode("utf-8", "ignore")
            text = msgspec.json.encode({"cut": cut})
        said = str(self._masked("", str(event.get("event", ""))))[:EVENT_CHARACTERS_MAX]
        level, logger = str(event.get("level", "info")), str(event.get("logger", ""))
        with self._lock:
            self._number += 1
            self._lines.append(Line(self._number, time_micros, level, said, logger, text.decode()))

    def last(self, lines_max: int, level: str = "") -> tuple[list[Line], int]:
        """The last lines of this level or a worse one, and the number of the last of all."""
        with self._lock:
            found = [line for line in self._lines if _is_as_bad(line, level)]
            return found[-lines_max:], self._number

    def after(self, number: int, level: str = "") -> tuple[list[Line], int, int]:
        """The lines behind a number, the number of the last of all, and how many behind it are gone already."""
        with self._lock:
            found = [line for line in self._lines if line.number > number]
            missed = self._number - number - len(found)
            return [line for line in found if _is_as_bad(line, level)], self._number, missed

    def _masked(self, name: str, value: object) -> object:
        """A value without secrets ([2])."""
        if name and _SECRET_NAMES.search(name) and value not in (None, "", False, True):
            return HIDDEN
        if isinstance(value, Mapping):
            return {str(key): self._masked(str(key), one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self._masked("", one) for one in value]
        if isinstance(value, int | float | None):
            return value
        text = str(value)
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        for pattern, instead in _SECRET_TEXTS:
            text = pattern.sub(instead, text)
        return text


def _is_as_bad(line: Line, level: str) -> bool:
    return not level or line.level not in LEVELS or LEVELS.index(line.level) >= LEVELS.index(level)
