"""Prints where the packages come from that a server would import."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence

PACKAGES = ("sow_server", "sow", "sow_client", "sow_cli", "sow_peering", "sow_replication", "sow_spark", "pyspark_sow")


def main(arguments: Sequence[str]) -> int:
    """Prints a folder a package. The arguments are a server's, and do not matter."""
    del arguments
    print(json.dumps([importlib.import_module(name).__path__[0] for name in PACKAGES]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
