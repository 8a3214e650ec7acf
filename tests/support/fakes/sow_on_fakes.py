"""The command `sow` on the fake client, as a program: topics with records of every kind, and a `status` that waits."""

from __future__ import annotations

import sys
import time

from sow_cli.command import sow
from tests.support.fakes.fake_client import FakeClient
from tests.support.fakes.fake_results import Row


def main() -> None:
    """Runs the command line of this process."""
    client = FakeClient()
    client.add("orders", records=[{"id": one, "text": "x" * 100} for one in range(3)])
    client.add("hostile").rows["\x1b[2J"] = Row('{"id":"\x7f\x9b31m"}'.encode(), 1, None, 1)
    client.add("many", records=[{"id": one, "text": "x" * 1000} for one in range(3000)])
    client.status = _wait  # type: ignore[assignment, method-assign]  # it returns nothing, as it never returns
    sow(prog_name="sow", obj=lambda session: client)


def _wait() -> None:
    print("waiting", file=sys.stderr, flush=True)
    while True:
        time.sleep(0.05)  # in short steps: a signal that comes just before the system call would be seen only after it


if __name__ == "__main__":
    main()
