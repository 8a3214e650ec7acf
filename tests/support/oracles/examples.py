"""How many random examples a test tries: a part of them by default, all in the nightly profile."""

from __future__ import annotations

from typing import Final

from hypothesis import settings

NIGHTLY: Final = "nightly"


def examples(nightly: int, share: int = 8) -> int:
    """The number for this run, for a property with a number of its own: by default one in `share`, which is more where
    an example takes long."""
    return nightly if settings.get_current_profile_name() == NIGHTLY else max(1, nightly // share)


def lives(nightly: int) -> int:
    """The number of random lives of several instances in this run: one in 24 by default. A life takes half a second of
    CPU, and `make test-lives` lives thousands of them."""
    return nightly if settings.get_current_profile_name() == NIGHTLY else max(1, nightly // 24)
