"""S6, S15: at each bookmark, a client of conflated records, or of their deltas, has the documents of a reader of all.

It takes over each message as it comes, as the clients do, also of an emission that breaks off in the middle.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sow_server.subscriptions.frames import ChangeFrame, ChangeOp, Frame, Progress, Row, SnapshotBatch
from sow_server.subscriptions.live import conflation
from sow_server.subscriptions.request import FROM_NOW, Start
from tests.support.oracles.examples import examples
from tests.support.stores.stores import SECOND, FakeTime, Rig
from tests.support.stores.subscribers import JSON, Follower, Subscribers, at

Document = dict[str, object]
KEYS = ("a", "b", "c", "d")
FILTER = "/px > 2"

documents = st.fixed_dictionaries(
    {"px": st.integers(0, 5)}, optional={"in": st.fixed_dictionaries({"x": st.integers(0, 1)})}
)
operations = st.one_of(
    st.tuples(st.just("put"), st.sampled_from(KEYS), documents, st.sampled_from([None, None, SECOND // 4, SECOND])),
    st.tuples(st.just("put"), st.sampled_from(KEYS), documents, st.none()),
    st.tuples(st.just("touch"), st.sampled_from(KEYS), st.just({}), st.sampled_from([SECOND // 4, SECOND, 9 * SECOND])),
    st.tuples(st.just("delete"), st.sampled_from(KEYS), st.just({}), st.none()),
    st.tuples(st.just("tick"), st.just(""), st.just({}), st.sampled_from([SECOND // 4, SECOND])),
    st.tuples(st.sampled_from(["settle", "sweep", "read", "read one", "break"]), st.just(""), st.just({}), st.none()),
)


class Version(NamedTuple):
    document: Document
    expire_time: int


class Client:
    """Applies what it is sent at once."""

    def __init__(self) -> None:
        self.records: dict[str, Version] = {}

    def hear(self, frame: Frame) -> None:
        if isinstance(frame, SnapshotBatch):
            for key, payload, due in zip(frame.keys, frame.payloads, frame.headers.expire_time, strict=True):
                self.records[key.decode()] = Version(json.loads(payload), due)
        elif isinstance(frame, ChangeFrame):
            for row in frame.rows:
                self._apply(row)

    def _apply(self, row: Row) -> None:
        key = row.key.decode()
        if row.op is not ChangeOp.PUT:
            self.records.pop(key, None)
            return
        document: Document = json.loads(row.payload)
        if row.is_delta:
            document = _merged(self.records[key].document, document)
            for path in row.unset_paths:
                *parents, name = path[1:].split("/")
                inner: object = document
                for step in parents:
                    assert isinstance(inner, dict)
                    inner = inner[step]
                assert isinstance(inner, dict)
                del inner[name]
        self.records[key] = Version(document, row.expire_time)


def _merged(old: object, new: object) -> Document:
    assert isinstance(new, dict)
    if not isinstance(old, dict):
        return new
    return {
        **old,
        **{name: _merged(old.get(name), value) if isinstance(value, dict) else value for name, value in new.items()},
    }


def documents_of(records: dict[str, Version]) -> dict[str, Document]:
    """Without lifetimes: a touch changes no field, so it makes no delta (S3)."""
    return {key: version.document for key, version in records.items()}


class Sides:
    """A reader of every change, and a subscriber to conflated deltas."""

    def __init__(self, rig: Rig, *, oof: bool, delta: bool, batch_size: int, queue: int) -> None:
        self.rig = rig
        self.subscribers = Subscribers(rig, queue_bytes_max=queue)
        self.oof, self.delta, self.batch_size = oof, delta, batch_size
        self.records: dict[str, Version] = {}
        self.at: dict[int, dict[str, Version]] = {}
        self.conflated = Client()
        self.heard = self.conflated_heard = self.bookmark = 0
        self.reader = self.subscribers.subscribe("orders", changes=True)
        self.other = self._follow(sow=True)
        self.look()
        self.read(10_000)

    def _follow(self, *, sow: bool = False, start: Start = FROM_NOW) -> Follower:
        return self.subscribers.subscribe(
            "orders",
            filter=FILTER,
            sow=sow,
            start=start,
            oof=self.oof,
            delta=self.delta,
            conflation=SECOND,
            batch_size=self.batch_size,
            settled=False,
        )

    def look(self) -> None:
        """The records that match, as of each change. A reader of changes is told also those that are due."""
        self.subscribers.settle()
        self.reader.pump()
        rows = self.reader.changes()
        for row in rows[self.heard :]:
            key, document = row.key.decode(), json.loads(row.payload)
            self.records.pop(key, None)
            if row.op is ChangeOp.PUT and document["px"] > 2:
                self.records[key] = Version(document, row.expire_time)
            self.at[row.sequence] = dict(self.records)
        self.heard = len(rows)

    def read(self, frames_max: int) -> None:
        self.other.pump(frames_max=frames_max)
        for frame in self.other.frames[self.conflated_heard :]:
            self.conflated.hear(frame)
            if (isinstance(frame, ChangeFrame) and not frame.more) or isinstance(frame, Progress):
                self.check(frame.bookmark if isinstance(frame, ChangeFrame) else frame.sequence)
        self.conflated_heard = len(self.other.frames)

    def check(self, bookmark: int) -> None:
        """All records are as they were at this bookmark, except for those that are due (J12)."""
        sequence = max([sequence for sequence in self.at if sequence <= bookmark], default=None)
        if sequence is None:
            return
        now = self.rig.clock.now_micros()
        wanted = self.at[sequence]
        for key in KEYS:
            want, have = wanted.get(key), self.conflated.records.get(key)
            if want is None:
                # Without oof it keeps what has left; nothing else.
                assert have is None or not self.oof, (key, bookmark)
            elif now < want.expire_time:
                assert have is not None, (key, bookmark)
                assert have.document == want.document, (key, bookmark)

    def break_off(self) -> None:
        """The connection is lost, perhaps in the middle of an emission."""
        self.bookmark = self.other.bookmark or self.bookmark
        self.other.close()
        self.other = self._follow(start=at(self.bookmark, self.rig))
        self.conflated_heard = 0


def _run(
    traffic: list[tuple[str, str, Document, int | None]], *, oof: bool, delta: bool, batch_size: int, queue: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        rig = Rig(Path(directory), time=FakeTime())
        try:
            rig.create_topic("orders", JSON)
            sides = Sides(rig, oof=oof, delta=delta, batch_size=batch_size, queue=queue)
            for what, key, document, micros in traffic:
                match what:
                    case "put" | "touch" | "delete" | "tick":
                        rig.play("orders", what, key, document, micros)
                    case "settle":
                        sides.look()
                    case "sweep":
                        rig.store.sweep()
                    case "break":
                        sides.look()
                        sides.break_off()
                    case _:
                        sides.look()
                        sides.read(1 if what == "read one" else 10_000)
            for sweeps in (True, True, True, False):  # what the last sweep removes is told an interval later
                rig.time.tick(SECOND)
                if sweeps:
                    rig.store.sweep()
                sides.look()
                sides.read(10_000)
            if oof:
                assert documents_of(sides.conflated.records) == documents_of(sides.records)
        finally:
            rig.close()


@pytest.mark.slow
@settings(max_examples=examples(240), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    traffic=st.lists(operations, min_size=5, max_size=40),
    oof=st.booleans(),
    delta=st.sampled_from([True, True, False]),
    batch_size=st.sampled_from([1, 1000]),
    queue=st.sampled_from([1_500, 10**6]),
    reader=st.booleans(),
)
def test_conflated_deltas_make_the_same_documents(
    traffic: list[tuple[str, str, Document, int | None]],
    oof: bool,
    delta: bool,
    batch_size: int,
    queue: int,
    reader: bool,
) -> None:
    with mock.patch.object(conflation, "COMPARING_NANOS_MAX", 0 if reader else 10**9):
        _run(traffic, oof=oof, delta=delta, batch_size=batch_size, queue=queue)
