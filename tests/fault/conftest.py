"""Tests that kill servers, fill disks, damage files and send invalid requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.servers.server import pytest_runtest_makereport

__all__ = ["pytest_runtest_makereport"]

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.fault)
