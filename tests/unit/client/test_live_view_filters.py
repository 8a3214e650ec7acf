"""A live view changes its filter: at each moment its map has the records of one filter (rule S14, _live_view [6])."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from sow.v1 import sow_pb2
from sow_client._live_view import ViewFilter
from sow_client.errors import SowError
from tests.support.stores.live_views import LiveServer, Viewer
from tests.support.stores.stores import Rig
from tests.support.stores.subscribers import JSON, px


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    rig.create_topic("orders", JSON)
    yield rig
    rig.close()


def filter_of(text: str) -> ViewFilter:
    return ViewFilter.of(sow_pb2.SubscribeRequest(filter=text))


def above(rig: Rig, least: int) -> set[str]:
    return {key.decode() for key, record in rig.live("orders").items() if int(record.payload[6:-1]) > least}


def change(view: Viewer, server: LiveServer, text: str) -> None:
    view.core.change(filter_of(text))
    view.cut()
    view.call(server)


def test_the_map_shows_the_filter_before_until_all_is_there(rig: Rig) -> None:
    for number in range(40):
        rig.put("orders", f"k{number:02}", px(number))
    server = LiveServer(rig)
    view = Viewer(text="/px > 9")
    view.call(server)
    assert set(view.map()) == above(rig, 9)
    view.core.change(filter_of("/px > 4"))
    assert not view.is_current()
    view.cut()
    view.call(server, frames_max=2)
    assert set(view.map()) == above(rig, 9)
    assert not view.is_current()
    view.hear()
    assert set(view.map()) == above(rig, 4)
    assert view.is_current()
    assert view.told_map() == view.map()


def test_what_is_held_does_not_come_again(rig: Rig) -> None:
    for number in range(500):
        rig.put("orders", f"k{number:03}", px(number))
    server = LiveServer(rig)
    view = Viewer(text="/px > 9", batch_size=1000)
    view.call(server)
    sent = view.rows_sent
    change(view, server, "/px > 499")
    change(view, server, "/px > 9 AND @key != 'k100'")
    assert set(view.map()) == above(rig, 9) - {"k100"}
    before = view.rows_sent
    change(view, server, "/px > 9")
    assert view.rows_sent - before < sent / 4
    assert set(view.map()) == above(rig, 9)


def test_frames_of_the_filter_before_are_not_taken_any_more(rig: Rig) -> None:
    rig.put("orders", "a", px(9))
    server = LiveServer(rig)
    view = Viewer(text="/px > 5")
    view.call(server)
    view.core.change(filter_of("/px > 7"))
    rig.put("orders", "b", px(6))
    with pytest.raises(Exception, match="the filter before"):
        view.hear()
    view.cut()
    view.call(server)
    assert set(view.map()) == {"a"}


def test_a_filter_that_is_refused_changes_nothing(rig: Rig) -> None:
    rig.put("orders", "a", px(9))
    server = LiveServer(rig)
    view = Viewer(text="/px > 5")
    view.call(server)
    change(view, server, "(")
    assert view.core.refused is not None
    assert view.core.refused.reason == "FILTER_INVALID"
    assert view.is_current()
    rig.put("orders", "b", px(6))
    view.hear()
    assert set(view.map()) == {"a", "b"}


def test_only_the_connection_is_told_to_be_interrupted(rig: Rig) -> None:
    """A program that heard of an outage in which it had changed the filter never heard of its end."""
    server = LiveServer(rig)
    told: list[SowError | None] = []
    view = Viewer(text="/px > 5", on_interruption=told.append)
    view.call(server)
    change(view, server, "/px > 6")
    assert told == []
    view.cut()
    assert len(told) == 1
    view.core.change(filter_of("/px > 7"))
    view.call(server)
    assert len(told) == 2
    assert told[1] is None
    change(view, server, "/px > 8")
    view.core.change(filter_of("/px > 9"))
    view.cut()
    view.core.request(now=0.0)
    view.cut()  # before the server has answered
    assert len(told) == 3
    view.call(server)
    assert told[3:] == [None]


def test_another_filter_costs_no_retry(rig: Rig) -> None:
    server = LiveServer(rig)
    view = Viewer(text="/px > 5", retry_for=0.0)
    view.call(server)
    change(view, server, "/px > 6")
    assert view.is_current()


@pytest.mark.parametrize("seed", range(8))
def test_whatever_the_filters_are_the_map_is_that_of_the_last_one(rig: Rig, seed: int) -> None:
    """Changes of filters while others publish, and while the connection breaks."""
    chance = random.Random(seed)
    server = LiveServer(rig)
    least = 3
    view = Viewer(text="/px > 3")
    view.call(server)
    for _ in range(25):
        for _ in range(chance.randint(0, 3)):
            key = f"k{chance.randrange(12)}"
            if chance.random() < 0.3:
                rig.delete("orders", key)
            else:
                rig.put("orders", key, px(chance.randrange(10)))
        match chance.randrange(4):
            case 0:
                least = chance.randrange(9)
                view.core.change(filter_of(f"/px > {least}"))
                if chance.random() < 0.3:
                    least = chance.randrange(9)
                    view.core.change(filter_of(f"/px > {least}"))
                view.cut()
                view.call(server, frames_max=chance.choice([2, 10_000]))
            case 1:
                view.cut()
                view.call(server)
            case _:
                view.hear()
        assert view.told_map() == view.map()
    view.hear()
    assert set(view.map()) == above(rig, least)
