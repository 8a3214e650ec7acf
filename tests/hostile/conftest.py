"""Hostile callers and peers against a real server: nobody can stop, starve or deceive the others."""

from __future__ import annotations

from tests.support.servers.server import pytest_runtest_makereport

__all__ = ["pytest_runtest_makereport"]
