"""Files that hold a secret: keys and tokens (rule X5)."""

from __future__ import annotations

import shlex
import stat
from pathlib import Path
from typing import Final

_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


def check_private_file(file: Path) -> None:
    """Raises ValueError if the group or others have a permission on a file; a link counts as the file that it leads
    to. An access control list shows in the permissions of the group. Raises OSError if there is no such file."""
    mode = stat.S_IMODE(file.stat().st_mode)
    if mode & _OTHERS:
        raise ValueError(
            f"{file} holds a secret, and other users may access it (mode {mode:04o}); run: "
            f"chmod 600 {shlex.quote(str(file))}"
        )
