"""The pins of a streaming query: durable subscriptions that keep the journals for it. If a journal was not kept all the
same, `check_loss` and `tell_loss` say so.

    [1]  Each topic has a pin of the same name. It is renewed in the background, because a micro-batch may take longer
         than its lease.
    [2]  A note is a pin at another instance: it tells that a micro-batch which ends at the first one was read there
         (stream_reading [4]).
    [3]  Spark ends the process of a reader with SIGKILL, whether a query is stopped, fails or ends by itself, and calls
         nothing before. So a pin stays for its lease, unless `stop_for_good` removes it.
"""

from __future__ import annotations

import getpass
import logging
import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Final

import pyspark

from sow_client import SowError
from sow_spark.connection import connect
from sow_spark.errors import SowSourceError
from sow_spark.options import Connecting, Reading
from sow_spark.reading import RENEWALS_PER_LEASE, renewed
from sow_spark.stream_instances import ELSEWHERE, Elsewhere, InstanceInUse
from sow_spark.stream_offsets import Offset, bookmark_of, marked, plain, topics_of

RENEWED_SECONDS: Final = 60.0
"""At least so often, so that one can tell the pin of a dead query from others."""
NOTE: Final = ".moved"
"""Behind the name of the pin: the name of the pin that notes a move [2]."""

_log: Final = logging.getLogger("sow_spark")


class Pins:
    """Owns the pins and the notes of a query. It is pickled before any call, as its reader is."""

    def __init__(self, reading: Reading, instance: InstanceInUse) -> None:
        self.noted: str | None = None
        """The end of a micro-batch that is noted at another instance [2]."""
        self._reading = reading
        self._instance = instance
        self._pinned: dict[str, str] = {}  # the position of the pin of each topic
        self._renewing: ExitStack | None = None  # the life of the client that renews

    def hold_all(self, offset: Offset) -> None:
        """Pins the journal of each topic that is read from an offset."""
        for name in topics_of(offset, self._reading.topic):
            self.hold(name, offset, plain(marked(offset, name)))

    def hold(self, topic: str, offset: Offset, bookmark: str) -> bool:
        """Pins the journal of a topic after a bookmark, under the query's pin, and renews the pin from then on.
        Returns True if the pin was made."""
        name = self._reading.pin_name or offset.get("pin")
        if name is None:
            return False  # a checkpoint of a query that named its pin then, and does not now
        if self._renewing is None or self._renewing is not self._instance.life:
            self._pinned = {}  # another client, perhaps of another instance
        if bookmark == self._pinned.get(topic):
            return False  # it is renewed in the background
        lease = f"{self._reading.pin_lease_micros}us"
        try:
            pin = self._instance.call(
                "keeping the journal",
                lambda client: client.pin_journal(topic, name, bookmark, idle_ttl=lease, reader=reader()),
            )
        except SowSourceError as error:
            if error.reason in ("TOPIC_NOT_FOUND", ELSEWHERE) and self._reading.several:
                return False  # its loss has been told, or the next look finds it in another cell
            check_loss(error, self._reading, topic, bookmark_of(offset))
            return False
        self._pinned = {**self._pinned, topic: bookmark}  # the thread that renews iterates over the former one
        if self._renewing is not self._instance.life:
            self._renew(name)
        return pin.created

    def remove(self, offset: Offset, topics: Sequence[str]) -> None:
        """Removes the pins that a query has made which does not start."""
        name = self._reading.pin_name or offset["pin"]
        self._pinned = {}
        for topic in topics:
            with suppress(SowSourceError, Elsewhere):  # it goes by itself, after `pinLease`
                self._instance.call("removing a pin", lambda client, topic=topic: client.delete_durable(topic, name))  # type: ignore[misc]  # a lambda's default argument

    def _renew(self, name: str) -> None:
        """Renews the pins in the background: a micro-batch may take longer than their lease."""
        client, life = self._instance.client, self._instance.life
        assert client is not None, "it has just been called"
        assert life is not None, "it owns the client"
        self._renewing = life

        def again() -> None:
            for topic, position in self._pinned.items():
                with suppress(SowError):  # this topic may be gone, and the others need their pins
                    # With the lease: a pin that has ended, as while the machine slept, is made again.
                    client.pin_journal(topic, name, position, idle_ttl=lease, reader=reader())

        lease = f"{self._reading.pin_lease_micros}us"
        seconds = min(self._reading.pin_lease_micros / 1e6, RENEWALS_PER_LEASE * RENEWED_SECONDS)
        life.enter_context(renewed(again, seconds))

    # ---- notes ----

    def _note_name(self, offset: Offset) -> str | None:
        name = self._reading.pin_name or offset.get("pin")
        return None if name is None else f"{name}{NOTE}"

    def note(self, topic: str, end: Offset, bookmark: str) -> None:
        """Notes at the instance in use that it reads a micro-batch that ends at another one [2]."""
        name = self._note_name(end)
        if name is not None:
            lease = f"{self._reading.pin_lease_micros}us"
            self._instance.call(
                "noting a move", lambda client: client.pin_journal(topic, name, bookmark, idle_ttl=lease)
            )

    def forget_note(self, end: Offset) -> None:
        """Removes the notes once a micro-batch after the noted one is finished."""
        name = self._note_name(end)
        if self.noted is None or name is None or self.noted == bookmark_of(end):
            return
        for topic in topics_of(end, self._reading.topic):
            with suppress(SowSourceError):  # it goes by itself
                self._instance.call("finishing a move", lambda client, topic=topic: client.delete_durable(topic, name))  # type: ignore[misc]  # a lambda's default argument
        self.noted = None

    def is_noted(self, connecting: Connecting, end: Offset) -> bool:
        """True if another instance has read the micro-batch that ends here, or may have."""
        name = self._note_name(end)
        if name is None:
            return False
        try:
            with connect(connecting) as client:
                return any(one.name == name for one in client.here.durables())
        except SowError:
            return True  # it may have


def check_loss(error: SowSourceError, reading: Reading, topic: str, start: str) -> None:
    """Raises or logs DATA_LOST. Any other error is raised unchanged."""
    if error.reason not in _LOSSES:
        raise error
    tell_loss(reading, topic, start, error.reason)


def tell_loss(reading: Reading, topic: str, start: str, why: str) -> None:
    """Raises or logs DATA_LOST."""
    lost = SowSourceError(
        "DATA_LOST",
        f"changes of topic {topic} after {start} are gone ({why})",
        "start a query with a new checkpoint, from a snapshot or from earliest; "
        "or give failOnDataLoss=false to continue with the earliest change",
    )
    if reading.fail_on_data_loss:
        raise lost from None  # the cause would only repeat it, above the line that people look for
    _log.warning("%s: continuing with the earliest change", lost.message)


def reader() -> str:
    """Tells people who keeps the journal: the program that runs the query."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "?"
    text = f"Spark {pyspark.__version__}, {user} on {socket.gethostname()}, process {os.getppid()}"
    return "".join(filter(str.isprintable, text))[:200]


_LOSSES: Final = frozenset({"BOOKMARK_TOO_OLD", "BOOKMARK_OTHER_EPOCH", "BOOKMARK_IN_FUTURE", "RESYNC_REQUIRED"})
