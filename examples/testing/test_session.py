"""Tests of a program that uses sow, `examples.sessions`, with the fixtures that come with sow (docs/howto/testing.md).

.venv/bin/python -m pytest examples/testing
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from examples.sessions import add_to_cart, sign_in
from sow_client import Client

if TYPE_CHECKING:
    from sow_pytest.views import Clock


@pytest.fixture
def client(sow_client: Client) -> Client:
    """A client of a server that has the topic of the program, and nothing else."""
    sow_client.create_topic("shop.sessions", key=["/id"], expiration="20m")
    return sow_client


def test_an_id_is_given_out_once(client: Client) -> None:
    assert sign_in(client, "s-1", "alice")
    assert not sign_in(client, "s-1", "mallory")


def test_a_session_ends_twenty_minutes_after_its_last_use(client: Client, sow_clock: Clock) -> None:
    sign_in(client, "s-1", "alice")
    sow_clock.advance("19m")
    add_to_cart(client, "s-1", "bread")
    sow_clock.advance("19m")
    add_to_cart(client, "s-1", "milk")
    sow_clock.advance("20m")
    with pytest.raises(LookupError):
        add_to_cart(client, "s-1", "tea")
    assert sign_in(client, "s-1", "bob"), "the id is free again"
