"""The machine of a live result against the real parts of a server (rules S11, S13). No time passes here."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sow.v1 import sow_pb2
from sow_client import Change, InvalidArgument, Record
from sow_client._live_result import ResultCore, applied, differences, result_request
from sow_client.errors import InternalError, SowError, Unavailable
from sow_server.subscriptions.results import window
from tests.support.stores.live_views import CUT, LiveServer
from tests.support.stores.stores import SECOND, Rig
from tests.support.stores.subscribers import JSON, Follower, px

State = list[tuple[str, int, bytes]]


def query(top: int, skip: int, field: str = "/px", *, batch_size: int = 2) -> sow_pb2.SubscribeRequest:
    return result_request(
        "orders",
        "/px > 0",
        None,
        order_by=[f"{field} DESC", "@key"],
        top_n=top,
        skip_n=skip,
        group_by=None,
        aggregate=None,
        having=None,
        conflation="1s",
        progress="1s",
        select=None,
        exclude=None,
        batch_size=batch_size,
    )


class Program:
    """A live result, its calls, and a list that applies everything that it tells."""

    def __init__(
        self,
        server: LiveServer,
        *,
        top: int = 3,
        skip: int = 0,
        batch_size: int = 2,
        on_interruption: Callable[[SowError | None], object] | None = None,
    ) -> None:
        request = query(top, skip, batch_size=batch_size)
        self.top, self.skip = top, skip
        self.server = server
        self.core = ResultCore(request, retry_for=float("inf"), connect_timeout=5.0, on_interruption=on_interruption)
        self.told: list[Change] = []
        self.list: list[Record] = []
        self._follower: Follower | None = None

    def call(self) -> None:
        """A call, which takes what there is."""
        request = self.core.request(now=0.0)
        assert request.sow
        assert not request.bookmark
        self._follower = self.server.subscribe(request)
        self.hear()

    def hear(self, frames_max: int = 10_000) -> None:
        """Takes in what there is, an interval later."""
        assert self._follower is not None, "it has called"
        for frame in self.server.frames(self._follower, frames_max=frames_max):
            first = self.core.reached is None
            self.core.feed(frame)
            changes = list(iter(self.core.take, None))
            self.told += changes
            if first and self.core.reached is not None:
                self.list = list(self.core.rows)
            self.list = applied(self.list, changes)

    def cut(self) -> None:
        """The connection breaks."""
        if self._follower is not None:
            self._follower.close()
            self._follower = None
            self.core.ended(CUT, now=0.0, jitter=0.5)

    def change(self, *, top: int, skip: int, field: str = "/px") -> None:
        """Asks for another query."""
        self.core.change(query(top, skip, field))
        if self._follower is not None:
            with pytest.raises(Unavailable):
                self.core.feed(sow_pb2.SubscribeResponse())
        self.cut()
        if field == "/px":
            self.top, self.skip = top, skip

    def state(self) -> State:
        return state(self.core.rows)

    def wanted(self) -> State:
        found = [(key.decode(), record) for key, record in self.server.rig.live("orders").items()]
        matching = [(key, record) for key, record in found if b'"px":0' not in record.payload]
        matching.sort(key=lambda pair: (-int(pair[1].payload[6:-1]), pair[0]))
        best = matching[self.skip : self.skip + self.top]
        return [(key, record.version, record.payload) for key, record in best]


def state(rows: object) -> State:
    return [(record.key, record.version, record.payload) for record in rows]  # type: ignore[attr-defined]  # they are records


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    rig.create_topic("orders", JSON)
    yield rig
    rig.close()


@pytest.mark.parametrize("seed", range(12))
def test_a_program_that_applies_the_changes_has_the_list(rig: Rig, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens to the connection, and however small the reserve of the server is."""
    monkeypatch.setattr(window, "RESERVE_MIN", 1)
    chance = random.Random(seed)
    program = Program(LiveServer(rig), top=chance.randint(1, 4), skip=chance.choice([0, 2]))
    program.call()
    for _ in range(40):
        for _ in range(chance.randint(0, 4)):
            key = f"k{chance.randrange(10)}"
            match chance.randrange(4):
                case 0:
                    rig.delete("orders", key)
                case 1:
                    rig.put("orders", key, px(chance.randrange(6)), ttl=SECOND)
                case _:
                    rig.put("orders", key, px(chance.randrange(6)))
        match chance.randrange(7):
            case 0:
                program.cut()
                program.call()
            case 1:
                program.hear(frames_max=1)
                program.cut()
                program.call()
            case 2:
                rig.time.tick(SECOND)
                rig.store.sweep()
            case 3:
                program.change(top=chance.randint(1, 4), skip=chance.choice([0, 2]))
                program.call()
                assert not program.core.changing
            case _:
                program.hear()
        assert state(program.list) == program.state(), seed
    rig.store.sweep()
    for _ in range(3):
        rig.time.tick(SECOND)
        rig.store.sweep()
        program.hear()
    assert program.state() == program.wanted()
    assert state(program.list) == program.state()


def test_the_first_list_is_not_told_and_later_ones_are(rig: Rig) -> None:
    program = Program(LiveServer(rig))
    for key, price in {"a": 1, "b": 2}.items():
        rig.put("orders", key, px(price))
    program.call()
    assert program.told == []
    assert program.core.bookmark == program.core.reached
    program.cut()
    rig.delete("orders", "a")
    rig.put("orders", "c", px(9))
    program.call()
    assert [(one.op, one.reason, one.key, one.position) for one in program.told] == [
        ("oof", None, "a", None),
        ("put", None, "c", 0),
    ]
    assert program.told[-1].bookmark == program.core.reached
    assert program.told[0].bookmark is None


def test_an_oof_has_the_record_that_was_in_the_list(rig: Rig) -> None:
    rig.put("orders", "a", px(4))
    program = Program(LiveServer(rig))
    program.call()
    rig.delete("orders", "a")
    for _ in range(2):
        rig.time.tick(SECOND)
        program.hear()
    (left,) = program.told
    assert (left.op, left.reason) == ("oof", "deleted")
    assert left.previous is not None
    assert left.previous.payload == px(4)


def test_records_that_only_have_another_order_elsewhere_are_told(rig: Rig) -> None:
    """Another instance has other sequences, so an order by them may differ for equal records."""
    rig.put("orders", "a", px(1))
    rig.put("orders", "b", px(2))
    program = Program(LiveServer(rig))
    program.call()
    before = list(program.core.rows)
    after = before[::-1]
    told = list(differences(before, after, "orders"))
    assert [(one.op, one.key) for one in told] == [("put", one.key) for one in after]
    assert applied(before, told) == after


def test_places_that_cannot_be_are_refused(rig: Rig) -> None:
    program = Program(LiveServer(rig))
    rig.put("orders", "a", px(1))
    program.call()
    frame = sow_pb2.SubscribeResponse()
    frame.changes.topic, frame.changes.bookmark = "orders", "x.9"
    frame.changes.op.append(sow_pb2.CHANGE_OP_OOF)
    with pytest.raises(InternalError):
        program.core.feed(frame)


@pytest.mark.parametrize(("options", "field"), [({"top_n": 0}, "top_n"), ({"skip_n": -1}, "skip_n")])
def test_bounds_that_mean_nothing_are_refused_here(options: dict[str, int], field: str) -> None:
    given = {"top_n": 1, "skip_n": 0, **options}
    with pytest.raises(InvalidArgument, match=field):
        result_request(
            "orders",
            None,
            None,
            order_by="@key",
            top_n=given["top_n"],
            skip_n=given["skip_n"],
            group_by=None,
            aggregate=None,
            having=None,
            conflation=None,
            progress=None,
            select=None,
            exclude=None,
            batch_size=1,
        )


def test_changes_that_were_not_handed_out_come_before_those_of_the_next_query(rig: Rig) -> None:
    for number in range(1, 7):
        rig.put("orders", f"k{number}", px(number))
    program = Program(LiveServer(rig), top=2)
    program.call()
    rig.put("orders", "k7", px(7))
    server, core = program.server, program.core
    assert program._follower is not None
    while core.rows[0].key != "k7":
        rig.time.tick(SECOND)
        for frame in server.frames(program._follower, frames_max=1):
            core.feed(frame)
    first = core.take()
    assert first is not None
    assert (first.op, first.key) == ("oof", "k5")
    core.change(query(2, 2))
    program._follower.close()
    assert core.ended(CUT, now=0.0, jitter=0.0) == 0.0
    assert [record.key for record in core.rows] == ["k7", "k6"], "the list before, until the next one is there"
    program.call()
    assert [(change.op, change.key) for change in program.told] == [
        ("put", "k7"),
        ("oof", "k7"),
        ("oof", "k6"),
        ("put", "k5"),
        ("put", "k4"),
    ]
    assert [record.key for record in core.rows] == ["k5", "k4"]


def test_a_query_that_is_refused_changes_nothing(rig: Rig) -> None:
    rig.put("orders", "k1", px(1))
    interruptions: list[SowError | None] = []
    program = Program(LiveServer(rig), on_interruption=interruptions.append)
    program.call()
    program.change(top=2, skip=0, field="px")
    program.core.request(now=0.0)
    error = InvalidArgument("no", reason="FILTER_INVALID")
    assert program.core.ended(error, now=0.0, jitter=0.0) == 0.0
    assert (program.core.changing, program.core.refused) == (False, error)
    rig.put("orders", "k2", px(2))
    program.call()
    assert [change.key for change in program.told] == ["k2"]
    assert program.state() == program.wanted()
    assert interruptions == [], "the calls have ended on purpose"
