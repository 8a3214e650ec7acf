"""Tests that kill servers, fill disks, damage files and send invalid requests."""

from __future__ import annotations

import pytest

from tests.support.servers.server import pytest_runtest_makereport

__all__ = ["pytest_runtest_makereport"]


def pytest_itemcollected(item: pytest.Item) -> None:
    # Unlike pytest_collection_modifyitems, it is called for the tests of this folder alone.
    item.add_marker(pytest.mark.fault)
