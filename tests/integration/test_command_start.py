"""What a command imports. `sow get` takes 0.2 s, most of it for imports, so none comes in unnoticed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Final

from tests.support.servers.server import ROOT, unmeasured

MODULES_MAX: Final = 107
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
from tests.support.fakes.fake_client import FakeClient
client = FakeClient()
client.add("orders", records=[{"id": 1}])
sow(sys.argv[1:], prog_name="sow", obj=lambda session: client)
"""


def started(*arguments: str) -> tuple[str, list[str]]:
    """The output of a command, and the modules that it has imported."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        env=unmeasured() | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proto"), str(ROOT / "clients")])},
    )
    output, _, modules = done.stdout.rstrip("\n").rpartition("\n")
    return output, json.loads(modules)


def test_a_table_is_written_without_rich() -> None:
    """It takes 0.1 s to import, and 200 times as long for a row."""
    table, modules = started("topics", "--format", "table")
    assert table.splitlines()[2].startswith("orders")
    assert [name for name in modules if name.partition(".")[0] == "rich"] == []


def test_get_imports_little() -> None:
    record, modules = started("get", "orders", "1", "--format", "ndjson")
    assert json.loads(record)["key"] == "1"
    for forbidden in FORBIDDEN:
        assert forbidden not in modules, f"{forbidden} takes time; import it where it is used"
    own = [name for name in modules if name.partition(".")[0] in ("sow", "sow_client", "sow_cli")]
    assert len(own) <= MODULES_MAX, own
