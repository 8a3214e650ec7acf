"""Tests of the whole: the real client and the real command against a real server."""

from __future__ import annotations

from tests.support.servers.server import pytest_runtest_makereport

__all__ = ["pytest_runtest_makereport"]
