"""Tests of the edges: files that people have, texts of users, values at the ends of their ranges."""

from __future__ import annotations

from tests.support.servers.server import pytest_runtest_makereport

__all__ = ["pytest_runtest_makereport"]
