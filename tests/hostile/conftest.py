"""Tests of callers and peers that do their worst, against real servers."""

from __future__ import annotations

from tests.support.server import pytest_runtest_makereport

__all__ = ["pytest_runtest_makereport"]
