"""The commands of `sow` on a fake client, as a script runs them."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from sow_cli.command import sow
from tests.support.fakes.fake_client import FakeClient


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


def run(client: FakeClient, *arguments: str, stdin: bytes | None = None) -> Result:
    """Runs one command line as a script would: nothing is a terminal."""
    return CliRunner().invoke(sow, arguments, input=stdin, obj=lambda _session: client)


def rows(result: Result) -> list[dict[str, object]]:
    """The NDJSON that a command wrote."""
    return [json.loads(line) for line in result.stdout.splitlines()]
