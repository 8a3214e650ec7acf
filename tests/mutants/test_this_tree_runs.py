"""This tree runs, whatever is installed: in the tests' own process, and in the servers that they start.

An editable install points at one checkout. Tests of a copy of it, in which a mistake is planted, would import the
original, and find nothing.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path

from tests.mutants.imported import PACKAGES
from tests.support.servers.server import ServerProcess

TREE = Path(__file__).parents[2]


def test_the_packages_that_are_imported_here_are_those_of_this_tree() -> None:
    for name in PACKAGES:
        assert Path(importlib.import_module(name).__path__[0]).is_relative_to(TREE), name


def test_the_packages_that_a_started_server_imports_are_those_of_this_tree(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path, start=False)
    server.module = "tests.mutants.imported"
    server.launch()
    assert server.wait() == 0
    for path in json.loads(server.said):
        assert Path(path).is_relative_to(TREE)
