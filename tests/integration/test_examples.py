"""The examples, run as a reader runs them: one command each, against a running server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sow_client import Client
from tests.support.servers.server import DYNAMIC, ROOT, ServerProcess

SECONDS_MAX = 120
"""Far longer than they take: the machine may be busy."""
LINES_MAX = 60
"""Lines of an example, at most: a reader takes it in at once."""

# Their records expire while they run.
pytestmark = pytest.mark.smoke


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path, DYNAMIC) as running:
        yield running


def run(name: str, server: ServerProcess) -> list[str]:
    """The output of an example."""
    done = subprocess.run(
        [sys.executable, "-m", f"examples.{name}", server.address],
        cwd=ROOT,
        env={**os.environ, "PYTHONUTF8": "1"},
        check=False,
        capture_output=True,
        encoding="utf-8",
        timeout=SECONDS_MAX,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    return done.stdout.splitlines()


def test_the_quote_board_gets_changes_and_empties_by_itself(server: ServerProcess) -> None:
    for _ in range(2):  # again, on the data of the first run
        told = run("quotes", server)

        assert [line.split()[:2] for line in told[:4]] == [
            ["sow", "ACME"],
            ["sow", "FIRM"],
            ["sow", "PEAR"],
            ["snapshot_end"],
        ]
        assert told[4].endswith('{"symbol":"ACME","bid":99.5}'), "only what changed, and the key"
        assert told[6].endswith('{"symbol":"ACME","size":{"bid":300}}')
        assert "'size': {'bid': 300, 'ask': 200}" in told[7]
        assert "'note'" in told[5]
        assert "'note'" not in told[7]
        assert [line.split()[:3] for line in told[8:11]] == [
            ["oof", "PEAR", "match"],
            ["oof", "FIRM", "deleted"],
            ["oof", "ACME", "expired"],
        ]
        assert told[11:] == ["the board is empty"]


def test_a_session_lives_while_it_is_used_and_loses_no_change(server: ServerProcess) -> None:
    """The example once failed for readers of docs/cli.md, whose topic `sessions` has no key fields."""
    with Client(server.address) as client:
        client.create_topic("sessions", expiration="enabled")

    told = run("sessions", server)

    assert told[:2] == ["alice signs in: True - bob: True", "mallory signs in with alice's id: False"]
    left, shopped = told[2:]
    assert left == "ended: expired {'id': 's-2', 'user': 'bob', 'cart': []}", (
        "though alice came first, she stays longer"
    )
    assert shopped.startswith("ended: expired {'id': 's-1', 'user': 'alice', 'cart': [")
    assert all(f"'{item}'" in shopped for item in ("bread", "milk", "tea", "jam")), "whichever came first"


def test_the_billing_service_misses_no_order_though_it_crashes(server: ServerProcess) -> None:
    for _ in range(2):  # again, on the data of the first run
        told = run("billing", server)

        assert told == [
            "invoice for o-1",
            "invoice for o-2",
            "crashed: a crash, after the invoice and before its acknowledgement",
            "waiting: 5 entries",
            "invoice for o-2",
            "invoice for o-3",
            "invoice for o-4",
            "waiting: 0 entries",
            "twice, as it was not acknowledged: ['o-2']",
        ]


@pytest.mark.parametrize("name", ["billing", "quotes", "sessions"])
def test_an_example_is_short(name: str) -> None:
    assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) < LINES_MAX
