"""The instance that a stream reads from, of those that the option `server` names.

[1]  An instance stays in use as long as it answers. If it is lost, the next one is the instance whose journal the
     offsets belong to, if that serves, and otherwise the first of the list that serves.
[2]  A stream of one topic is in the cell of its topic. If the topic moves to another cell, the attempt under way is
     made again there (rule C10). While no cell takes the topic, it is made again, too (rule C17). Without cells one
     address stays one instance: behind a proxy another one may lack changes of the first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Final, TypeVar

from sow_client import Client, Instance, SowError
from sow_spark.connection import connect, in_cell, kept, retried
from sow_spark.errors import HINTS, SowSourceError, translated
from sow_spark.options import Connecting

LOSSES: Final = frozenset({"UNREACHABLE", "NOT_SERVING", "STOPPING", "STORE_FAILED", "DISK_FULL"})
"""The reasons for which another instance is looked for (rule F1)."""
ASK_MICROS: Final = 2_000_000
"""The longest time to wait for one instance, while another one may serve."""
PAUSE_SECONDS: Final = 0.5
ELSEWHERE: Final = "TOPIC_ELSEWHERE"

_Answer = TypeVar("_Answer")


class Elsewhere(Exception):
    """The topic is in another cell than before. The next call goes there [2]."""


class InstanceInUse:
    """Owns the client of a stream."""

    def __init__(
        self,
        connecting: Connecting,
        named: str,
        topic: str | None = "",
        *,
        now: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """`named`: the topics, for messages. `topic`: its cell is looked for; "" for topics in the cell of
        `connecting`, where the calls stay; None for calls of any cell."""
        self._given = connecting
        self._named = named
        self._topic = topic
        self._is_looked_at = False  # the one instance
        self._now = now
        self._pause = pause
        self.connecting = connecting
        """The connection to the instance in use."""
        self.epoch: str | None = None
        """The epoch of its journal. None if none is in use, or there is no other one to which the query could go."""
        self.life: ExitStack | None = None
        """Ends with the use of the instance."""
        self.client: Client | None = None

    @property
    def several(self) -> bool:
        """True if there are several instances."""
        return "," in self._given.server

    def anywhere(self, epoch: str | None, attempt: Callable[[], _Answer]) -> _Answer:
        """The result of `attempt`, which uses `call`. If the instance is lost meanwhile, the attempt is made again at
        another one, for the option `retryFor`. `epoch`: that of the offsets [1]."""
        give_up = self._now() + self._given.retry_for_micros / 1e6
        while True:
            try:
                self._use(epoch)
                return attempt()
            except Elsewhere:
                continue
            except SowSourceError as error:
                moves = bool(self._topic) and error.reason == ELSEWHERE
                if not moves and not (self.several and error.reason in LOSSES):
                    raise
                self.close()
                if self._now() >= give_up:
                    raise
                self._pause(PAUSE_SECONDS)

    def _use(self, epoch: str | None) -> None:
        """Chooses an instance, if there is a choice and none is in use."""
        if self.epoch is not None:
            return
        if not self.several:
            if self._topic and not self._is_looked_at:
                self.epoch = self.call("looking at the instance", _epoch_in_a_cell)
                self._is_looked_at = True
            return
        found: tuple[Connecting, Instance] | None = None
        for to, instance in self._ask_all():
            if isinstance(instance, Instance) and instance.serving:
                if epoch in (None, instance.journal_epoch):
                    found = to, instance
                    break
                found = found or (to, instance)
        if found is None:
            raise SowSourceError("UNREACHABLE", f"no instance of {self._given.server} serves", HINTS["UNREACHABLE"])
        self.connecting, self.epoch = found[0], found[1].journal_epoch

    def _ask_all(self) -> Iterator[tuple[Connecting, Instance | SowError]]:
        given = self._given
        for address in filter(None, map(str.strip, given.server.split(","))):
            to = replace(
                given, server=address, retry_for_micros=min(given.retry_for_micros, given.connect_timeout_micros)
            )
            quick = replace(to, connect_timeout_micros=min(given.connect_timeout_micros, ASK_MICROS))
            try:
                with connect(quick) as client:
                    yield to, client.describe_instance()
            except SowError as error:
                yield to, error

    def others(self) -> Iterator[Connecting]:
        """The connections to the instances that are not in use, each for one question."""
        for address in filter(None, map(str.strip, self._given.server.split(","))):
            if address != self.connecting.server:
                limit = min(self._given.connect_timeout_micros, ASK_MICROS)
                yield replace(self._given, server=address, connect_timeout_micros=limit, retry_for_micros=0)

    def call(self, doing: str, call: Callable[[Client], _Answer]) -> _Answer:
        """The result of a call, which is repeated while the instance is unreachable. Raises Elsewhere [2]."""
        if self.client is None:
            self.life = ExitStack()
            self.client = self.life.enter_context(connect(self.connecting))
        client = self.client
        try:
            with translated(f"{doing}, {self._named}"):
                answer = retried(self.connecting, lambda: call(client.here if self._topic == "" else client))
        except SowSourceError as error:
            if error.reason != ELSEWHERE:
                self._follow(client)  # the error is about a position in the former cell
            raise
        self._follow(client)
        if client.instance is not None:
            # A name with several addresses. The offsets are bookmarks of this one, so the query waits for it.
            self.connecting = kept(self.connecting, client)  # its only cell
            self._end()
        return answer

    def _follow(self, client: Client) -> None:
        """Raises Elsewhere if the call that has ended has found the topic in another cell [2]."""
        to = in_cell(self._given, client, self._topic) if self._topic else self._given
        if to is not self._given:
            self._end()
            self._given = self.connecting = to
            self.epoch, self._is_looked_at = None, False
            raise Elsewhere

    def close(self) -> None:
        """Ends the use of the instance."""
        self._end()
        if self.several:
            self.epoch = None

    def _end(self) -> None:
        if self.life is not None:
            self.life.close()
            self.life = self.client = None


def cell_at(client: Client) -> str:
    """The cell of a server; "": it has no placement."""
    try:
        return client.placement().cell
    except SowError as error:
        if error.reason != "UNIMPLEMENTED":
            raise
        return ""  # an older server has none


def _epoch_in_a_cell(client: Client) -> str | None:
    """The epoch of the journal of a server that is in a cell; None: it has no placement."""
    return client.describe_instance().journal_epoch if cell_at(client) else None
