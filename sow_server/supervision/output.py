"""One log from the lines of all cells, on standard error, in the format of [log].

[1]  A line goes out whole, and no other one comes in between. Each has a field `cell`. A field of this name that a cell
     writes itself, about another cell, becomes `about_cell`.
[2]  A cell logs JSON. A line of it that is no event, such as one of a library, becomes an event `cell_output`. No line
     can end the reading of a cell's output, because the cell would then wait for ever to write the next one.
[3]  The memory for a line that does not end is bounded.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final

import msgspec
import structlog

from sow_server import logs
from sow_server.config import LogConfig

LINE_BYTES_MAX: Final = 2**20
TROUBLE: Final = "sow-server: "
"""A server that cannot start says why in a line that begins so."""
TEXTS: Final = ("event", "level", "exception", "stack")
"""The fields of an event that are text wherever it has them."""
LEVELS: Final = ("debug", "info", "warning", "error")
log = structlog.get_logger(__name__)
_decode: Final = msgspec.json.Decoder(dict[str, object]).decode


class Output:
    """Writes the lines of all cells."""

    def __init__(self, config: LogConfig, stream: logs.Stream) -> None:
        self._stream: Final = stream
        self._levels: Final = LEVELS[LEVELS.index(config.level) :]
        self._console: Final = logs.console_renderer(self._stream) if logs.is_console(config, self._stream) else None

    def event(self, cell: str, line: bytes, event: dict[str, object]) -> None:
        """Writes an event of a cell, which its line has."""
        if event.get("level") in LEVELS and event["level"] not in self._levels:
            return
        about_other = "cell" in event
        if about_other:
            event = {"about_cell" if name == "cell" else name: value for name, value in event.items()}
        if self._console is not None:
            text = str(self._console(None, "", event | {"cell": cell}))
        elif about_other:
            text = json.dumps(event | {"cell": cell})
        else:
            text = f'{line.decode().rstrip().removesuffix("}")}, "cell": "{cell}"}}'
        try:
            self._stream.write(f"{text}\n")
            self._stream.flush()
        except (OSError, ValueError):
            pass  # as with every handler of logs: who reads it has gone, and the cells go on


class Lines:
    """The output of one cell as it comes in."""

    def __init__(self, cell: str, output: Output, is_ready: Callable[[dict[str, object]], None]) -> None:
        """`is_ready` gets the event `ready`, which is not written: the log has that name for all cells together."""
        self._cell = cell
        self._output = output
        self._is_ready = is_ready
        self._begun = b""
        self.trouble = ""
        """The last message about a start that went wrong."""

    def feed(self, data: bytes) -> None:
        """Takes a piece of the output, wherever it ends."""
        *whole, self._begun = (self._begun + data).split(b"\n")
        for line in whole:
            self._line(line)
        if len(self._begun) > LINE_BYTES_MAX:
            self.end()

    def end(self) -> None:
        """The output has ended: writes what has no end of line."""
        line, self._begun = self._begun, b""
        if line:
            self._line(line)

    def _line(self, line: bytes) -> None:
        event = _event(line)
        if event is None:
            text = line.decode(errors="backslashreplace").rstrip()
            if text.startswith(TROUBLE):
                self.trouble = text.removeprefix(TROUBLE)
            elif text:
                log.warning("cell_output", cell=self._cell, text=text)
            return
        if event.get("event") == "ready":
            self._is_ready(event)
        else:
            self._output.event(self._cell, line, event)


def _event(line: bytes) -> dict[str, object] | None:
    """The event that a line has; None: it has none ([2])."""
    try:
        event = _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return event if "event" in event and all(isinstance(event.get(name, ""), str) for name in TEXTS) else None
