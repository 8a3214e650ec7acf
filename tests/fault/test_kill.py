"""A server that is killed under load, again and again: nothing acknowledged is lost, nothing expired is seen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.assault import Assault


@pytest.fixture
def assault(tmp_path: Path, seed: int, request: pytest.FixtureRequest) -> Iterator[Assault]:
    made = Assault(tmp_path, f"{seed} {request.node.name}")
    with made.server:
        yield made


def test_a_killed_server_loses_no_acknowledged_change_and_shows_no_expired_record(assault: Assault) -> None:
    assault.rounds(5)


@pytest.mark.long
def test_the_same_for_five_hundred_rounds(assault: Assault) -> None:
    assault.rounds(500)
