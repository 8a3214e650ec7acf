r"""Results with a line for each field, as `\G` at the end of a command of the shell asks for.

[1]  Written as it comes: the commands write NDJSON, and each of its lines becomes a block. Other text stays.
[2]  No control character of the data reaches the terminal.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import BinaryIO, Final

import msgspec

from sow_cli import display

_TIME: Final = re.compile(r"(?:(?:.*_)?time|since|as_of|before|after)_micros")
"""The names of times; other names in `_micros` are those of lengths."""


class WideLines(io.RawIOBase):
    """Takes NDJSON, and writes blocks."""

    def __init__(self, out: BinaryIO) -> None:
        super().__init__()
        self.out = out
        self._rest = b""
        self._rows = 0

    def isatty(self) -> bool:
        """As the terminal below."""
        return self.out.isatty()

    def fileno(self) -> int:
        """As the terminal below."""
        return self.out.fileno()

    @contextmanager
    def onto(self, out: BinaryIO) -> Iterator[None]:
        """In the block, blocks are written there."""
        before, self.out = self.out, out
        try:
            yield
        finally:
            self.out = before

    def writable(self) -> bool:
        """Yes."""
        return True

    def write(self, data: object) -> int:
        """Writes a block for each line that is complete."""
        taken = bytes(data)  # type: ignore[call-overload]  # any buffer
        lines = (self._rest + taken).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            self.out.write(self._block(line))
        self.out.flush()
        return len(taken)

    def finish(self) -> None:
        """Writes what is left."""
        if self._rest:
            self.out.write(self._block(self._rest))
            self.out.flush()
            self._rest = b""

    def _block(self, line: bytes) -> bytes:
        try:
            row = msgspec.json.decode(line)
        except msgspec.DecodeError:
            row = None
        if not isinstance(row, dict):
            return line + b"\n"
        self._rows += 1
        return block(row, self._rows).encode()


def block(row: Mapping[str, object], number: int) -> str:
    """One result, with a line for each field."""
    fields = list(_fields(row, ""))
    width = max((len(name) for name, _ in fields), default=0)
    lines = [f"{name:>{width}}: {shown}\n" for name, shown in fields]
    return f"{'*' * 27} {number}. row {'*' * 27}\n" + "".join(lines)


def _fields(value: Mapping[str, object], above: str) -> Iterator[tuple[str, str]]:
    """Names and texts. The fields of a payload have the paths that filters use, those of other parts their names."""
    for name, field in value.items():
        path = f"{above}{name}"
        if isinstance(field, Mapping) and field:
            yield from _fields(field, "/" if path == "payload" else f"{path}/")
        elif isinstance(field, list) and field and all(isinstance(one, Mapping) for one in field):
            for number, one in enumerate(field):
                yield display.safe(f"{path}[{number}]"), display.safe(msgspec.json.encode(one).decode())
        elif isinstance(field, int) and not above and _TIME.fullmatch(name):
            yield name.removesuffix("_micros"), display.instant(field)
        else:
            text = field if isinstance(field, str) else msgspec.json.encode(field).decode()
            yield display.safe(path), display.safe(text)
