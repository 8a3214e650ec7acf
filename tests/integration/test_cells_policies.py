"""Policies, which are settings of all cells (rule C19)."""

from __future__ import annotations

from pathlib import Path

import pytest

from sow_client import Client, SowError
from tests.support.servers.cells import TwoCells
from tests.support.simulation.clients import Connect, connect

__all__ = ["connect"]  # a fixture
pytestmark = pytest.mark.one_client


def _cap(client: Client, topic: str) -> tuple[str, str]:
    (found,) = [one for one in client.describe_topic(topic).effective if one.name == "max_ttl"]
    return found.value, found.origin


def test_a_policy_holds_for_the_topics_of_all_cells(connect: Connect, tmp_path: Path) -> None:
    """It was set at home alone, and limited no topic of another cell."""
    with TwoCells(tmp_path) as cells, connect(cells.home, connect_timeout=0.5) as client:
        here, there = cells.topic("a"), cells.topic("b")
        for topic in (here, there):
            client.create_topic(topic)
        done = client.set_policy("cap", ".*", topics={"max_ttl": "20s"})
        assert done.matches == 2
        assert _cap(client, here) == _cap(client, there) == ("20s", "policy cap")
        assert [(one.name, one.matches) for one in client.policies()] == [("cap", 2)]
        client.set_policy("first", "b-.*", topics={"max_ttl": "10s"}, priority=7)
        assert _cap(client, there) == ("10s", "policy first")
        assert [one.name for one in client.policies()] == ["first", "cap"]

        cells.servers["b"].kill9()
        with pytest.raises(SowError, match="the cell b: ") as refused:
            client.set_policy("cap", ".*", topics={"max_ttl": "30s"})
        assert (refused.value.reason, refused.value.details["cell"]) == ("UNREACHABLE", "b")
        cells.servers["b"].start()
        assert [_cap(client, topic)[0] for topic in (here, there)] == ["30s", "10s"]
        assert client.set_policy("cap", ".*", topics={"max_ttl": "30s"}).matches == 1, "b has a better one"

        of_b = client.cells()["b"]
        of_b.delete_policy("first")
        assert [one.name for one in of_b.policies()] == ["cap"]
        assert [one.name for one in client.policies()] == ["first", "cap"]
        client.delete_policy("cap")
        assert of_b.policies() == []
        with pytest.raises(SowError, match="there is no policy 'cap'"):
            client.delete_policy("cap")
        client.delete_policy("first")  # the cell a alone has it
        assert client.policies() == []
