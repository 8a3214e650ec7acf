"""Times to wait, as programs give them. Pure."""

from __future__ import annotations

import math
from typing import Final

from sow_client._records import invalid

SECONDS_MAX: Final = 315_360_000.0
"""Ten years. Longer waits, `math.inf` among them, have no bound; the clocks of gRPC and of asyncio take this one."""


def seconds(value: object, field: str) -> float:
    """The time as every clock takes it. Raises InvalidArgument with the argument's name."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise invalid(field, f"{value!r} is no number of seconds")
    if isinstance(value, float) and math.isnan(value):
        raise invalid(field, "is not a number")
    if value < 0:
        raise invalid(field, f"{value} is negative")
    return SECONDS_MAX if value > SECONDS_MAX else float(value)


def perhaps(value: object, field: str) -> float | None:
    """As `seconds`; None stays None."""
    return None if value is None else seconds(value, field)
