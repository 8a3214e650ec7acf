"""Work for several callers in one thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sow_server.engine.values.turns import CALLER


@contextmanager
def working_for(caller: str) -> Iterator[None]:
    """As if the guard had admitted a call of this caller."""
    token = CALLER.set(caller)
    try:
        yield
    finally:
        CALLER.reset(token)
