"""The server as one test sees it, and its clock."""

from __future__ import annotations

import re
import time
from typing import Final, Unpack

from sow_client import AsyncClient, Client, TopicSettingsArguments
from sow_client._records import Ttl, ttl_micros
from sow_pytest.process import ServerOfSession

NAME_MAX: Final = 40
LOG_CHARACTERS_MAX: Final = 8_000
SWEEP_SECONDS: Final = 30.0
LOOK_SECONDS: Final = 0.005
NUDGE_TOPIC: Final = "sow-pytest.clock"


class ServerOfTest:
    """A server whose topics and policies of other tests are gone. Owns the clients that `connect` has made."""

    def __init__(self, server: ServerOfSession, test: str) -> None:
        server.number += 1
        self.prefix: Final = f"test_{server.number}_{re.sub(r'[^A-Za-z0-9]+', '_', test)[:NAME_MAX].strip('_')}_"
        """The begin of the names that `topic` makes."""
        self.process: Final = server
        self._log_begin = server.log_bytes()
        self._clients: list[Client] = []
        self.client: Final = self.connect()
        """A client of the test's own."""
        self._topics_before = {topic.name for topic in self.client.topics()}
        self._policies_before = {(policy.name, policy.operator) for policy in self.client.policies()}

    @property
    def address(self) -> str:
        """Host and port."""
        return self.process.address

    @property
    def log(self) -> str:
        """The end of what the server has logged since the test began."""
        return self.process.log(self._log_begin)[-LOG_CHARACTERS_MAX:]

    def connect(self) -> Client:
        """Another client. It is closed at the end of the test."""
        self._clients.append(Client(self.address))
        return self._clients[-1]

    def async_client(self) -> AsyncClient:
        """A client for asyncio, to be closed by the test: `async with sow_server.async_client() as client`."""
        return AsyncClient(self.address)

    def topic(self, name: str, **settings: Unpack[TopicSettingsArguments]) -> str:
        """Creates a topic for this test, with the settings of `Client.create_topic`, and returns its whole name, which
        no other test has. If the test has made it before, it stays as it is."""
        return self.client.create_topic(self.prefix + name, exist_ok=True, **settings).name

    def close(self) -> None:
        """Deletes what the test has made, and closes its clients."""
        try:
            with Client(self.address) as client:  # the test may have closed its own
                made = [topic for topic in client.topics() if topic.name not in self._topics_before]
                for topic in sorted(made, key=lambda topic: not topic.is_view):  # a view goes before its source
                    for durable in client.durables(topic.name):
                        client.delete_durable(topic.name, durable.name, force=True)
                    client.delete_topic(topic.name, force=True)
                for policy in client.policies():
                    if (policy.name, policy.operator) not in self._policies_before:
                        client.delete_policy(policy.name, operator=policy.operator)
        finally:
            for one in self._clients:
                one.close()


class Clock:
    """Moves the time of the server: lifetimes end, and their subscribers hear of it, without waiting."""

    def __init__(self, server: ServerOfTest) -> None:
        self._server = server

    def advance(self, by: Ttl) -> None:
        """Moves it forward by a duration such as "1h", a timedelta, or seconds. When this returns, no record whose
        lifetime is over by then is left: its expiry is committed and on its way to subscribers. Raises InvalidArgument
        for a negative duration, as the time of a server never goes back."""
        self._server.process.move(ttl_micros(by, "by"))
        client, give_up = self._server.client, time.monotonic() + SWEEP_SECONDS
        client.create_topic(NUDGE_TOPIC, exist_ok=True)  # a configuration of the user may allow no dynamic topics
        while True:
            # A write wakes the writer, which would otherwise look at the clock once a second.
            client.publish(NUDGE_TOPIC, b"{}", key="now", durability="buffered")
            if not any(topic.overdue for topic in client.expiry_horizon(spans=[]).topics):
                return
            if time.monotonic() > give_up:
                raise TimeoutError(f"the server has not removed all overdue records within {SWEEP_SECONDS:g} s")
            time.sleep(LOOK_SECONDS)
