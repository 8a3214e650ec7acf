"""Live views on a `Rig`, driven in the test's own thread: the machine of the client against the real server parts.

server = LiveServer(rig)
view = Viewer(fake_time)
view.call(server)            # a call, up to the point at which nothing more is to come
view.cut()                   # the connection breaks
assert view.map() == state(rig)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from sow.v1 import sow_pb2
from sow_client import Change, Record, SowError, Unavailable
from sow_client._live_view import LiveCore
from sow_client.errors import error_of_reason
from sow_server.access.caller import Granted
from sow_server.engine.values.errors import StoreError
from sow_server.filters.restriction import UNRESTRICTED, Restriction
from sow_server.services.wire import result_convert, subscribe_convert
from tests.support.stores.parts import reading_of
from tests.support.stores.stores import FakeTime, Rig
from tests.support.stores.subscribers import Follower, Subscribers

TOPIC: Final = "orders"
CUT: Final = Unavailable("the connection broke", reason="UNREACHABLE")


class LiveServer:
    """The parts of a server that subscribers of a rig's store meet; make another one when the rig is opened again."""

    def __init__(self, rig: Rig, restriction: Restriction = UNRESTRICTED, *, rights: str = "") -> None:
        """`restriction`: the part of each topic that the subscribers may see. `rights` names it."""
        self.rig = rig
        self.subscribers = Subscribers(rig)
        self.restriction = restriction
        self.rights = rights

    def subscribe(self, request: sow_pb2.SubscribeRequest) -> Follower:
        """A call. Raises StoreError."""
        given = sow_pb2.SubscribeRequest.FromString(request.SerializeToString())
        if result_convert.is_asked(given):
            result_convert.check_result(given)
            granted = Granted(self.rig.topic(given.topic), self.restriction)
            asked_list = result_convert.asked_list(given, reading_of(self.rig.store), granted)
            return self.subscribers.follow(asked_list, batch_size=given.batch_size or 1000)
        asked = subscribe_convert.request(
            given, reading_of(self.rig.store), lambda topic: self.restriction, rights=self.rights
        )
        return Follower(self.subscribers, asked)

    def frames(self, follower: Follower, *, frames_max: int = 10_000) -> list[sow_pb2.SubscribeResponse]:
        """What there is for a subscriber now. Raises StoreError once there is nothing more."""
        self.subscribers.settle()
        found = follower.pump(frames_max=frames_max)
        reading = reading_of(self.rig.store)
        frames = [sow_pb2.SubscribeResponse.FromString(subscribe_convert.response(one, reading)) for one in found]
        if not frames and follower.error is not None:
            raise follower.error
        return frames


class Viewer:
    """Owns a live view, its calls, and everything that it told."""

    def __init__(
        self,
        time: FakeTime | None = None,
        text: str = "",
        *,
        batch_size: int = 7,
        progress: int = 0,
        retry_for: float = float("inf"),
        on_interruption: Callable[[SowError | None], object] | None = None,
    ) -> None:
        """`time`: of the client; its elapsed time counts."""
        request = sow_pb2.SubscribeRequest(
            topic=TOPIC, filter=text, sow=True, oof=True, batch_size=batch_size, progress_micros=progress
        )
        self.time = time or FakeTime()
        self.core = LiveCore(
            request,
            retry_for=retry_for,
            connect_timeout=5.0,
            on_interruption=on_interruption,
            clock=lambda: self.time.elapsed_micros / 1_000_000,
        )
        self.requests: list[sow_pb2.SubscribeRequest] = []
        self.frames: list[sow_pb2.SubscribeResponse] = []
        self.told: list[Change] = []
        self._follower: Follower | None = None
        self._server: LiveServer | None = None

    def call(self, server: LiveServer, *, frames_max: int = 10_000, between: Callable[[], object] = int) -> None:
        """Calls the server until it lets it, and hears what there is. `between` happens once the call stands."""
        while True:
            request = self.core.request(now=0.0)
            self.core.hold(request)
            self.requests.append(request)
            try:
                self._follower, self._server = server.subscribe(request), server
                between()
                self.hear(frames_max=frames_max)
                return
            except StoreError as error:
                self.end(error_of_reason(error.reason.name, error.message))

    def hear(self, *, frames_max: int = 10_000) -> None:
        """Takes in what there is."""
        assert self._follower is not None, "it has called"
        assert self._server is not None, "it has called"
        for frame in self._server.frames(self._follower, frames_max=frames_max):
            self.feed(frame)

    def feed(self, frame: sow_pb2.SubscribeResponse) -> None:
        """Takes in a frame."""
        self.frames.append(frame)
        self.core.feed(frame)
        self._take()

    def cut(self) -> None:
        """The connection breaks."""
        if self._follower is not None:
            self._follower.close()
            self._follower = None
        self.end(CUT)

    def end(self, error: SowError) -> None:
        """The call ends with an error."""
        self.core.ended(error, now=0.0, jitter=0.5)
        self._take()

    def _take(self) -> None:
        self.told += iter(self.core.take, None)

    # ---- what it shows ----

    def is_current(self) -> bool:
        """Whether it is current now."""
        return self.core.current

    def map(self) -> dict[str, tuple[int, bytes]]:
        """The records that it shows."""
        hidden = self.core.hidden()
        return _state({key: record for key, record in self.core.records.items() if key not in hidden})

    def told_map(self) -> dict[str, tuple[int, bytes]]:
        """The records that a program has which applies everything that it is told."""
        records: dict[str, Record] = {}
        for change in self.told:
            if change.op == "put":
                assert change.record is not None, "a put has its record"
                records[change.key] = change.record
            else:
                del records[change.key]  # it is told only of records that it has
        return _state(records)

    @property
    def rows_sent(self) -> int:
        """Records of snapshots that came so far."""
        return sum(len(frame.snapshot.records.key) for frame in self.frames)


def _state(records: dict[str, Record]) -> dict[str, tuple[int, bytes]]:
    return {key: (record.version, record.payload) for key, record in records.items()}


def state_of(rig: Rig, topic: str = TOPIC) -> dict[str, tuple[int, bytes]]:
    """The live records of a store."""
    return {key.decode(): (record.version, record.payload) for key, record in rig.live(topic).items()}
