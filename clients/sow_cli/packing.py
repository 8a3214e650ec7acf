"""Compressed files: gzip and Zstandard, which are read and written; others get a sentence that says what to do.

[1]  A file is unpacked piece by piece: memory does not depend on its size.
[2]  A file that breaks off, or whose checksum is wrong, ends the command. It never counts as shorter than it was.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from io import BufferedReader, RawIOBase
from pathlib import Path, PurePath
from typing import IO, Any, Final, Literal, TypeAlias, cast

import click

from sow_cli import display

Packing: TypeAlias = Literal["gzip", "zstd"]
SUFFIXES: Final[Mapping[str, Packing]] = {".gz": "gzip", ".zst": "zstd"}

_STARTS: Final[Mapping[bytes, Packing]] = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_REFUSED: Final = {
    b"BZh": "the input is compressed by bzip2; decompress it: bunzip2 -c {name} | sow …",
    b"\xfd7zXZ\x00": "the input is compressed by xz; decompress it: xz -dc {name} | sow …",
    b"PK\x03\x04": "the input is a zip archive; take the file out of it: unzip -p {name} | sow … --as KIND",
    b"PAR1": "the input is Parquet; say so: --as parquet",
    b"ARROW1": "the input is Arrow; say so: --as arrow",
}
_WORKBOOK: Final = "the input is a workbook of a spreadsheet; save it as CSV, and publish that"
_WORKBOOKS: Final = (".xlsx", ".xlsm", ".xls", ".ods")
_GZIP_LEVEL: Final = 6
_CHUNK_BYTES: Final = 256 * 1024


def unpacked_name(name: str) -> tuple[PurePath, Packing | None]:
    """A name without the end that stands for a compression, and that compression."""
    path = PurePath(name)
    packing = SUFFIXES.get(path.suffix.lower())
    return (path.with_suffix("") if packing else path), packing


def unpacked(file: BufferedReader, name: str, *, as_it_is: bool) -> BufferedReader:
    """The content of a file, unpacked if it is compressed. Its name shows that, or its first bytes, unless the bytes
    are records `as_it_is`. Raises a usage error for a compression that is not read."""
    packing = unpacked_name(name)[1]
    if file.isatty():
        return file
    if packing is None and not as_it_is:
        start = file.peek(4)
        packing = next((one for mark, one in _STARTS.items() if start.startswith(mark)), None)
    if packing is None:
        return file
    if not file.peek(1):
        raise click.UsageError(f"{display.safe(name)} is no complete file of {packing}: it is empty")
    return BufferedReader(_Unpacking(file, name, packing), _CHUNK_BYTES)


def refuse_others(file: BufferedReader, name: str) -> None:
    """Raises a usage error where the file begins like one that holds no lines of text."""
    start = file.peek(8)
    for mark, told in _REFUSED.items():
        if start.startswith(mark):
            is_workbook = mark == b"PK\x03\x04" and (
                PurePath(name).suffix.lower() in _WORKBOOKS or b"[Content_Types].xml" in start[:64]
            )
            raise click.UsageError(_WORKBOOK if is_workbook else told.format(name=display.safe(name)))
    if start.startswith(b"\xd0\xcf\x11\xe0"):
        raise click.UsageError(_WORKBOOK)


@contextmanager
def packed(sink: IO[bytes], name: str) -> Iterator[IO[bytes]]:
    """A file that compresses into the sink, which stays open, as the end of the name tells."""
    packing = unpacked_name(name)[1]
    if packing is None:
        yield sink
    elif packing == "gzip":
        # Without a name and a time, the same records are the same bytes.
        with gzip.GzipFile("", "wb", _GZIP_LEVEL, sink, mtime=0) as file:
            yield cast(IO[bytes], file)
    else:
        pa = _zstd()
        from sow_cli.arrow import Sink

        file = pa.CompressedOutputStream(pa.PythonFile(Sink(sink), mode="w"), "zstd")
        try:
            yield file
        finally:
            file.close()


def check(name: str) -> None:
    """Raises a usage error where a package is missing that the compression of this name needs."""
    if unpacked_name(name)[1] == "zstd":
        _zstd()


def checked(_context: click.Context, _parameter: click.Parameter, path: Path | None) -> Path | None:
    """The same of an option."""
    if path is not None:
        check(path.name)
    return path


def write(path: Path, data: bytes) -> None:
    """Writes a file, compressed as its name tells."""
    with path.open("wb") as plain, packed(plain, path.name) as sink:
        sink.write(data)


def _zstd() -> Any:
    try:
        return import_module("pyarrow")
    except ImportError as error:
        raise click.UsageError(
            ".zst needs the Python package pyarrow: pip install 'sow[arrow]', or in a checkout: pip install '.[arrow]'"
        ) from error


class _Unpacking(RawIOBase):
    """The content of a compressed file ([2])."""

    def __init__(self, file: BufferedReader, name: str, packing: Packing) -> None:
        self._name = name
        self._packing = packing
        self._read: Callable[[int], bytes]
        if packing == "gzip":
            self._read = gzip.GzipFile(fileobj=file, mode="rb").read1
        else:
            self._read = _zstd().CompressedInputStream(file, "zstd").read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._read(len(buffer))
        except (OSError, EOFError, zlib.error) as error:
            raise click.UsageError(
                f"{display.safe(self._name)} is no complete file of {self._packing}: {display.safe(str(error))}"
            ) from error
        buffer[: len(data)] = data
        return len(data)
