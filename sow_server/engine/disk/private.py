"""The modes of a data directory: nobody but its owner reads or writes anything in it (rule X5).

New files are private because the program sets its umask. This module mends those that are there already: the data of
an earlier version, and copies that somebody has put into place.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from sow_server.engine.disk.backups import BACKUP, DATABASE, DROPPED, MARKER
from sow_server.engine.disk.mark import MARK

OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
"""The permissions of the group and of all others."""
_OWN: Final = (DATABASE, MARKER, BACKUP, MARK, DROPPED)
"""The files and directories of a store. Others that lie beside them are not the store's to change; the mode of the
data directory protects them."""


def tighten(data: Path) -> int:
    """Takes the permissions of all others from a data directory and from the store's files in it. Returns how many
    files and directories had some. Raises OSError."""
    # The directory first: with that the rest is out of reach already.
    changed = [_tighten(data)]
    for top in (data / name for name in _OWN):
        if top.exists():
            changed.append(_tighten(top))
        for folder, folders, files in os.walk(top):
            inside = (Path(folder, name) for name in (*folders, *files))
            changed += [_tighten(path) for path in inside if not path.is_symlink()]
    return sum(changed)


def _tighten(path: Path) -> bool:
    mode = stat.S_IMODE(path.stat().st_mode)
    if not mode & OTHERS:
        return False
    path.chmod(mode & ~OTHERS)
    return True
