"""Entry point of the console script `sow` and of `python -m sow_cli`."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn

from sow_cli import interrupts


def main() -> None:
    """Runs the command line of this process and exits with its code (see `sow_cli.exits`)."""
    try:
        interrupts.end_at_once()  # the first thing: see there
    except KeyboardInterrupt:
        os._exit(interrupts.INTERRUPTED)
    # gRPC would write remarks about failing connections between ours. The user may set this variable to see them.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    for name in ("stdin", "stdout", "stderr"):  # closed ones; a file or a socket would get their numbers
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (until the end)
    try:
        from sow_cli.command import sow  # after that, as it is read when grpc is imported

        sow(prog_name="sow")
    except OSError:  # an error that cannot be written either: both outputs are full
        os._exit(1)
    except SystemExit as end:
        _leave(end.code if isinstance(end.code, int) else 0 if end.code is None else 1)


def _leave(code: int) -> NoReturn:
    """Ends the process without taking the interpreter apart, which takes a tenth of the time of a short command."""
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):  # closed, its reader gone, or the disk full: the interpreter says so
        sys.exit(code)
    os._exit(code)


if __name__ == "__main__":
    main()
