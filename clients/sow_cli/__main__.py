"""Entry point of the console script `sow` and of `python -m sow_cli`."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Runs the command line of this process and exits with its code (see `sow_cli.exits`)."""
    # gRPC would write remarks about failing connections between ours. The user may set this variable to see them.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        from sow_cli.command import sow  # after that, as it is read when grpc is imported

        sow(prog_name="sow")
    except KeyboardInterrupt:  # while still importing; later ones end in sow_cli.exits
        sys.exit(130)


if __name__ == "__main__":
    main()
