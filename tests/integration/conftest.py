"""Tests of the whole: the real client and the real command against a real server."""

from __future__ import annotations

import zlib

import pytest

from tests.support.servers import spread
from tests.support.servers.server import pytest_runtest_makereport
from tests.support.simulation.clients import CLIENT_KINDS

__all__ = ["pytest_runtest_makereport"]


def pytest_itemcollected(item: pytest.Item) -> None:
    """A test in a file with the mark `one_client` has one of the two clients by default, which its name decides: the
    blocking client is generated from the asyncio one, and each file has both. The other client is for the long run. A
    test with the mark `both_clients` keeps both.

    With `--cells` a test that holds for one server alone is left out."""
    if spread.cells_wanted() and isinstance(item, pytest.Function):
        reasons = spread.left_out()
        file = item.path.name
        names = (file, f"{file}::{item.originalname}", f"{file}::{item.name}")
        if reason := next((reasons[name] for name in names if name in reasons), ""):
            item.add_marker(pytest.mark.skip(reason=f"one server: {reason}"))
    if item.get_closest_marker("both_clients"):
        return
    if isinstance(item, pytest.Function) and item.get_closest_marker("one_client") and hasattr(item, "callspec"):
        chosen = CLIENT_KINDS[(zlib.crc32(item.originalname.encode()) >> 1) % len(CLIENT_KINDS)]
        if any(value in CLIENT_KINDS and value != chosen for value in item.callspec.params.values()):
            item.add_marker(pytest.mark.long)
