"""A server whose power is cut under load: writes acknowledged as on disk are there, and a mistake would be seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from sow_server.engine.commit.committer import Committer
from sow_server.engine.commit.draft import Draft
from sow_server.engine.disk.rocks import Rocks
from sow_server.engine.values.errors import StoreError
from tests.fault.assault import Assault

PLANTS: Final = "tests.fault.test_power"


def acknowledge_before_the_sync() -> None:
    """A mistake to plant: FSYNC is treated as BUFFERED, so that the sync comes some milliseconds after the answer."""
    write: Callable[..., StoreError | None] = Committer.write

    def written(self: Committer, draft: Draft, *, sync: bool) -> StoreError | None:
        return write(self, draft, sync=False)

    Committer.write = written  # type: ignore[method-assign]  # that is the mistake


def flush_without_syncing() -> None:
    """A mistake to plant: the log reaches the operating system, and not the disk."""

    def sync(self: Rocks) -> None:
        self._open().flush_wal(False)

    Rocks.sync = sync  # type: ignore[method-assign]  # that is the mistake


@pytest.fixture
def cut(tmp_path: Path, seed: int, request: pytest.FixtureRequest) -> Callable[[int, str], None]:
    """Cuts the power of a server so many times, in which a mistake may be planted."""

    def rounds(count: int, plant: str = "") -> None:
        assault = Assault(tmp_path, f"{seed} {request.node.name}", power=True, plant=plant)
        with assault.server:
            assault.rounds(count)

    return rounds


def test_writes_acknowledged_as_on_disk_survive_a_power_cut(cut: Callable[..., None]) -> None:
    cut(3)


@pytest.mark.parametrize("plant", [acknowledge_before_the_sync, flush_without_syncing])
def test_a_server_that_acknowledges_before_the_sync_is_caught(
    cut: Callable[..., None], plant: Callable[[], None]
) -> None:
    """The first cut or the second shows it; on a busy machine, where little is sent between two syncs, a later one."""
    with pytest.raises(AssertionError, match=r"acknowledged|found|confirmed|of one load"):
        cut(40, f"{PLANTS}:{plant.__name__}")


@pytest.mark.long
def test_the_same_for_two_hundred_cuts(cut: Callable[..., None]) -> None:
    cut(200)
