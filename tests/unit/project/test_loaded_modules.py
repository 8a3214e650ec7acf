"""What a module loads: one without state loads little, so that it is cheap to import and to test."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Final

import pytest

LOADED: Final = {
    "sow_server.engine.values.errors": 4,
    "sow_server.engine.values.model": 5,
    "sow_server.engine.values.lifetimes": 6,
    "sow_server.engine.values.policies": 8,
    "sow_server.engine.formats.json_format": 13,
    "sow_server.engine.stored": 15,
    "sow_server.filters.parser": 22,
    "sow_server.filters.compiler": 22,
    "sow_server.query.ordering": 50,
    "sow_server.access.model": 26,
    "sow_replication": 1,
}
"""By module: modules of the server and of replication that its import loads, itself and its packages among them."""
OURS: Final = ("sow_server", "sow_peering", "sow_replication")


def loaded(module: str) -> list[str]:
    program = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    names: list[str] = json.loads(done.stdout)
    return names


@pytest.mark.slow
@pytest.mark.parametrize("module", LOADED)
def test_an_import_loads_no_more_than_before(module: str) -> None:
    names = loaded(module)
    own = [name for name in names if name.partition(".")[0] in OURS]
    assert len(own) <= LOADED[module], own
    assert not {"grpc", "rocksdict"} & set(names)
