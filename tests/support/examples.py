"""How many random examples a test tries: a quarter by default, all of them in the nightly profile."""

from __future__ import annotations

from typing import Final

from hypothesis import settings

NIGHTLY: Final = "nightly"


def examples(nightly: int) -> int:
    """The number for this run, for a property with a number of its own."""
    return nightly if settings.get_current_profile_name() == NIGHTLY else max(1, nightly // 4)
