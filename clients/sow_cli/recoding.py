"""Text files in another encoding than UTF-8, or with the line ends of old Macs, as UTF-8 with line feeds."""

from __future__ import annotations

import codecs
from io import BufferedReader, RawIOBase
from typing import Any, Final

import click

from sow_cli import display

_MARKS: Final = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
"""Marks in front of a text, the longer ones first: one of UTF-32 begins like one of UTF-16."""
_CHUNK_BYTES: Final = 64 * 1024


def encoding(value: str) -> str:
    """A name of an encoding, for an option. Raises a usage error."""
    try:
        "".encode(value)  # `codecs.lookup` knows others as well, such as hex, which are no encodings of text
    except LookupError as error:
        raise click.BadParameter(f"{value!r} is no encoding of text; for example utf-16, cp1252 or latin-1") from error
    return codecs.lookup(value).name


def recoded(file: BufferedReader, name: str, given: str | None) -> BufferedReader:
    """The text of a file in UTF-8. Without a `given` encoding a mark in front of the text tells it, else it is UTF-8
    already."""
    if file.isatty():
        return file
    chosen = given or next((one for mark, one in _MARKS if file.peek(4).startswith(mark)), None)
    if chosen is None or codecs.lookup(chosen).name == "utf-8":
        return file
    return BufferedReader(_Recoding(file, name, chosen), _CHUNK_BYTES)


def line_end(file: BufferedReader) -> bytes:
    """The end of each line of a text: a line feed, or a carriage return alone."""
    start = b"" if file.isatty() else file.peek(1)
    # Behind the last byte that is there a line feed may come.
    return b"\r" if b"\n" not in start and b"\r" in start[:-1] else b"\n"


class _Recoding(RawIOBase):
    """The text of a file, piece by piece. A byte that the encoding does not have ends the command."""

    def __init__(self, file: BufferedReader, name: str, encoding: str) -> None:
        self._file = file
        self._name = name
        self._encoding = encoding
        self._decoder = codecs.getincrementaldecoder(encoding)()
        self._rest = b""
        self._read = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            data = self._file.read1(_CHUNK_BYTES)
            try:
                self._rest = self._decoder.decode(data, final=not data).encode()
            except UnicodeError as error:
                raise click.UsageError(
                    f"{display.safe(self._name)} is no text in {self._encoding}, near byte {self._read}: {error}"
                ) from error
            self._read += len(data)
            if not data:
                break
        taken, self._rest = self._rest[: len(buffer)], self._rest[len(buffer) :]
        buffer[: len(taken)] = taken
        return len(taken)
