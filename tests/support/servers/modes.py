"""The modes of files below a directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def paths_below(top: Path) -> Iterator[Path]:
    """A directory and everything in it."""
    yield top
    yield from top.rglob("*")


def open_to_all(top: Path) -> int:
    """Lets everybody read and write everything; returns the number of files and directories."""
    paths = list(paths_below(top))
    for path in paths:
        path.chmod(0o777 if path.is_dir() else 0o666)
    return len(paths)


def not_private(top: Path) -> dict[str, str]:
    """By path: the modes that are neither those of a private directory (0700) nor of a private file (0600)."""
    modes = {path: path.stat().st_mode & 0o7777 for path in paths_below(top)}
    return {str(path): f"{mode:04o}" for path, mode in modes.items() if mode != (0o700 if path.is_dir() else 0o600)}
