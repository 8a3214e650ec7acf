"""The store of a cell: the placement that was in force, and the topics of the configuration (rules C1, C4, C25)."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from sow_server.config import Config, ConfigError, load
from sow_server.declaring import CellStore, declare_topics, placed_here, use_placement
from sow_server.engine.values.model import Publish
from sow_server.placement import Places, load_placement
from tests.support.servers.cells import NOBODY, placement
from tests.support.stores.stores import Rig


class Place:
    """A data directory, and the placement file of its cell, a."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "placement.toml"
        self.rig = Rig(folder)

    def places(self, text: str) -> Places:
        self.file.write_text(text)
        return Places("a", self.file, load_placement(self.file))

    def start(self, text: str) -> Places:
        """As a start does it."""
        self.rig.crash()
        places = self.places(text)
        use_placement(self.rig.store, places)
        return places


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.rig.close()


def test_a_start_refuses_a_placement_that_is_older_than_the_one_that_was_in_force(place: Place) -> None:
    """A server that came back with an old file served topics that had gone to another cell."""
    place.start(placement(3))
    with pytest.raises(ConfigError) as refused:
        place.start(placement(2, ("orders", "b")))
    assert str(refused.value) == (
        f"{place.file}: version: 2 is below 3, which was in force here before; give this server the file that the "
        "others have, or raise the version"
    )
    with pytest.raises(ConfigError, match="version: 3 was in force here with another content; raise it"):
        place.start(placement(3, ("orders", "b")))
    place.start(placement(3))
    place.start(placement(4, ("orders", "b")))
    with pytest.raises(ConfigError, match="version: 3 is below 4"):
        place.start(placement(3))


def test_the_placement_of_a_reload_counts_at_the_next_start(place: Place) -> None:
    places = place.start(placement(3))
    store = CellStore(place.rig.store, Config(), places)
    asyncio.run(done(place.rig, store.keep(place.places(placement(5)).placement)))
    with pytest.raises(ConfigError, match="version: 4 is below 5"):
        place.start(placement(4))


async def done(rig: Rig, change: Coroutine[Any, Any, None]) -> None:
    """Drives the writer until the change is done."""
    doing = asyncio.ensure_future(change)
    async with asyncio.timeout(10):
        while not doing.done():
            await asyncio.sleep(0)
            rig.store.writer.step()
    await doing


def test_a_cell_does_not_become_a_server_alone_by_leaving_the_placement_out(place: Place) -> None:
    place.start(placement(3))
    place.rig.crash()
    with pytest.raises(ConfigError) as refused:
        use_placement(place.rig.store, None)
    assert str(refused.value) == (
        "[placement] file: is missing, although these data are of a cell: a placement of 2 cells, version 3, was in "
        "force here. To make it a server alone, start it once with a placement of this one cell, and a higher version"
    )
    place.start(placement(4, cells={"a": [NOBODY]}))
    place.rig.crash()
    use_placement(place.rig.store, None)
    place.start(placement(1))  # it is a cell again


def test_a_topic_of_the_configuration_that_comes_by_a_reload_is_made_then(place: Place) -> None:
    """It was made by the next start, and until then a publish made it with the settings of any topic."""
    text = '[topics.comes]\nkey = ["/id"]\n[topics.goes]\nkey = ["/id"]\n[topics.met]\nkey = ["/id"]\n'
    (place.file.parent / "sow.toml").write_text(text)
    config = load(place.file.parent / "sow.toml")
    rig = place.rig
    places = place.start(placement(1, ("comes|met", "b")))
    declare_topics(rig.store, placed_here(config.topics, places))
    assert list(rig.store.topics.by_name) == ["goes"]
    rig.create_topic("met")
    assert not rig.store.topics.by_name["met"].in_config

    places.use(place.places(placement(2, ("goes", "b"))).placement)
    with capture_logs() as logs:
        asyncio.run(done(rig, CellStore(rig.store, config, places).declare()))
    assert not logs
    topics = {name: (topic.in_config, topic.settings.key) for name, topic in rig.store.topics.by_name.items()}
    assert topics == {"comes": (True, ("/id",)), "goes": (False, ("/id",)), "met": (True, ("/id",))}


def test_a_topic_of_the_configuration_that_cannot_be_made_is_told_and_the_placement_stays(place: Place) -> None:
    (place.file.parent / "sow.toml").write_text('[topics.comes]\nkey = ["/id"]\n')
    config = load(place.file.parent / "sow.toml")
    places = place.start(placement(1))
    place.rig.create_topic("comes")
    place.rig.run(Publish("comes", [b"{}"], ["1"]))
    with capture_logs() as logs:
        asyncio.run(done(place.rig, CellStore(place.rig.store, config, places).declare()))
    (log,) = logs
    assert (log["event"], log["log_level"]) == ("declaration_failed", "error")
    assert str(log["cause"]).startswith("[topics.comes]: ")
