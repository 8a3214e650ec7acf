"""A topic whose expired records go to a dead-letter topic.

`rig` is a fixture for test modules to import.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from sow_server.engine.disk.rocks import COMMITS
from tests.support.stores.stores import SECOND, Rig
from tests.support.stores.subscribers import JSON

TTL = 10 * SECOND


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    """`orders` sends its dead letters to `dead`."""
    rig = Rig(tmp_path)
    rig.create_topic("dead", JSON)
    rig.create_topic("orders", JSON, dead_letter="dead")
    return rig


def copy_of(rig: Rig, topic: str = "dead") -> tuple[str, bytes]:
    """Key and payload of the only record of a topic."""
    ((key, found),) = rig.live(topic).items()
    return key.decode(), found.payload


def fates(rig: Rig) -> dict[str, int]:
    """The number of dead letters, by each fate that occurred."""
    return {fate: count for fate, count in rig.store.writer.letters_total.items() if count}


def commits(rig: Rig) -> int:
    """Commits with changes."""
    return len(rig.rows(COMMITS))
