"""What a command imports. `sow get` takes 0.2 s, most of it for imports, so none comes in unnoticed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Final

from tests.support.server import ROOT

MODULES_MAX: Final = 95
"""Of the project, so that one more is noticed. There were 99 when `sow` imported all of its subcommands, and the
asynchronous client."""
FORBIDDEN: Final = (
    "numpy",
    "pandas",
    "polars",
    "prompt_toolkit",
    "pyarrow",
    "pygments",
    "rich",
    "sow_client.aio",
    "sow_cli.arrow",
    "sow_cli.completion",
    "sow_cli.contexts",
    "sow_cli.inputs",
    "sow_cli.publishing",
    "sow_cli.shell",
    "sow_cli.subscribing",
    "sow_cli.topics",
    "sow_server",
    "tomllib",
    "urllib.request",
)
PROGRAM: Final = """
import atexit, json, sys
atexit.register(lambda: print(json.dumps(sorted(sys.modules))))
from sow_cli.command import sow
from tests.support.fake_client import FakeClient
client = FakeClient()
client.add("orders", records=[{"id": 1}])
sow(["get", "orders", "1", "--format", "ndjson"], prog_name="sow", obj=lambda session: client)
"""


def test_get_imports_little() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proto"), str(ROOT / "clients")])},
    )
    record, modules = map(json.loads, done.stdout.splitlines())
    assert record["key"] == "1"
    for forbidden in FORBIDDEN:
        assert forbidden not in modules, f"{forbidden} takes time; import it where it is used"
    own = [name for name in modules if name.partition(".")[0] in ("sow", "sow_client", "sow_cli")]
    assert len(own) <= MODULES_MAX, own
