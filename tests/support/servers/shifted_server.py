"""A server whose wall clock is off, or whose times of replication are shorter than a configuration may make them:

    python -m tests.support.servers.shifted_server OFFSET_MICROS [KNOB=NUMBER…] SERVER_ARGUMENTS…

The offset is that of the machine's clock; the guarded clock, and everything else, is the server's own. A knob is a
field of `NodeOptions`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from unittest import mock

from sow_replication.options import NodeOptions
from sow_server import __main__
from sow_server.config import Config
from sow_server.engine.replicas import CommandedPeer
from sow_server.engine.values.clock import TimeSource, wall_micros
from sow_server.linking import node_options


def run(offset_micros: int, arguments: list[str], knobs: Mapping[str, int] | None = None) -> int:
    """Runs the server; returns its exit code."""
    shifted = TimeSource(wall=lambda: wall_micros() + offset_micros)

    def options(config: Config, added: Sequence[CommandedPeer] = ()) -> NodeOptions:
        return replace(node_options(config, added), **(knobs or {}))  # type: ignore[arg-type]  # each is an int

    with mock.patch("sow_server.linking.node_options", options):
        return __main__.main(arguments, time_source=shifted)


def main(arguments: list[str]) -> int:
    """Runs the server with the arguments of this module in front of its own; returns its exit code."""
    offset, *others = arguments
    given = [argument for argument in others if "=" in argument and not argument.startswith("-")]
    pairs = [argument.split("=", 1) for argument in given]
    rest = [argument for argument in others if argument not in given]
    return run(int(offset), rest, {name: int(number) for name, number in pairs})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
