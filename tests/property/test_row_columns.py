"""Rows in columns against rows one by one: equal rows, equal frames, equal messages, for chunks of any kind."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sow.v1 import sow_pb2
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit.soundness import is_utf8
from sow_server.engine.stored import BURY, DELETE, EXPIRE, PUT, TOUCH, Changes, Entry, HeaderColumns
from sow_server.engine.stored.columns import Column
from sow_server.engine.values.model import NEVER, Expiration, TopicSettings
from sow_server.query.filtering import record_filter
from sow_server.query.projection import projection
from sow_server.services.wire import subscribe_convert
from sow_server.subscriptions import frames
from sow_server.subscriptions.changes import changes_of
from sow_server.subscriptions.frames import ChangeFrame, Row, frames_of, within
from sow_server.subscriptions.journal.row_columns import PUTS, columns_of, gets_all, gets_matches
from sow_server.subscriptions.live import focus
from sow_server.subscriptions.live.matching import VersionMatcher
from sow_server.subscriptions.request import Wants
from tests.support.oracles.examples import examples
from tests.support.stores.stores import Rig

NOW = 1000
KEYS = [b"a", b"b", "é".encode(), b"", b"\xff"]
TIMES = [NEVER, 0, NOW - 1, NOW, NOW + 1]
ONE = st.tuples(
    st.sampled_from([PUT, PUT, PUT, TOUCH, DELETE, EXPIRE, BURY]),
    st.sampled_from(KEYS + KEYS[:3] * 5),
    st.integers(0, 3),
    st.sampled_from(TIMES),
    st.integers(0, 1),
)
"""Kind, key, the payload's field, expire time, origin."""
CHUNK = st.lists(ONE, min_size=1, max_size=12)
PLACE = st.integers(0, 12)
DUE = [(PUT, b"a", 2, stamp, 0) for stamp in TIMES]
"""Some have been due before, one falls due now."""
WANTS = st.sampled_from([Wants(), Wants(oof=True), Wants(changes=True), Wants(delta=True)])


class World:
    """Two topics: records of one expire, those of the other only carry their expire times."""

    def __init__(self, directory: Path) -> None:
        self.rig = Rig(directory)
        self.rig.store.origins.names += ("other",)
        self.rig.create_topic("acts", TopicSettings(expiration=Expiration.ENABLED))
        self.rig.create_topic("idle", TopicSettings(expiration=Expiration.DISABLED))


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with TemporaryDirectory() as directory:
        world = World(Path(directory))
        yield world
        world.rig.close()


def changes(rows: list[tuple[int, bytes, int, int, int]], *, first: int = 50) -> Changes:
    """A chunk of the journal."""
    removed = [kind in (DELETE, EXPIRE) for kind, *_ in rows]
    return Changes(
        first,
        NOW - 5,
        bytes([kind for kind, *_ in rows]),
        Column(range(900, 900 + len(rows))),
        Column([700 + index % 2 for index in range(len(rows))]),
        Column([row[3] for row in rows]),
        Column([row[4] for row in rows]),
        Column([0] * len(rows)),
        Column([500 * gone for gone in removed]),
        Column([gone and 1 - row[4] for gone, row in zip(removed, rows, strict=True)]),
        [row[1] for row in rows],
        [b'{"a":%d,"b":1}' % row[2] for row in rows],
    )


def _nothing(sequence: int) -> Entry | None:
    raise AssertionError("no previous record is looked up")


def one_by_one(topic: Topic, chunk: Changes, start: int, stop: int, wants: Wants, matcher: VersionMatcher) -> list[Row]:
    """The rows by the rules."""
    found = changes_of(topic, chunk, start=start, stop=stop, find=_nothing)
    return [row for change in found if (row := focus.row_of(change, wants, matcher, NOW)) is not None]


@pytest.mark.slow
@settings(max_examples=examples(1600), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CHUNK, WANTS, st.sampled_from(["acts", "idle"]), st.booleans(), st.booleans(), PLACE, PLACE)
@example(DUE, Wants(), "acts", False, False, 0, len(DUE))
@example(DUE, Wants(oof=True), "acts", True, False, 0, len(DUE))
def test_rows_in_columns_are_those_that_are_made_one_by_one(
    world: World,
    rows: list[tuple[int, bytes, int, int, int]],
    wants: Wants,
    name: str,
    filtered: bool,
    selects: bool,
    start: int,
    count: int,
) -> None:
    topic = world.rig.topic(name)
    start %= len(rows)
    stop = start + count % (len(rows) - start + 1)
    chunk = changes(rows)
    matcher = VersionMatcher(record_filter(topic, "/a > 1", 0) if filtered else None)
    if selects and not wants.delta:
        wants = Wants(oof=wants.oof, changes=wants.changes, projection=projection(topic, ["/a"], []))
    judge = matcher.of_payloads(topic)
    assert (judge is not None) == filtered
    choice: list[bool] | None = None
    if judge is not None:
        if not gets_matches(wants):
            return
        choice = [
            kind in PUTS and judge(payload)
            for kind, payload in zip(chunk.change[start:stop], chunk.payloads[start:stop], strict=True)
        ]
    elif not gets_all(matcher, wants):
        assert wants.delta
        return
    columns = columns_of(topic, chunk, start, stop, wants, NOW, choice)
    taken = rows[start:stop]
    if any(kind == BURY or not key or not is_utf8(key) for kind, key, *_ in taken):
        assert columns is None
        return
    expected = one_by_one(topic, chunk, start, stop, wants, matcher)
    assert columns is not None
    assert list(columns) == expected
    assert columns[1:] == expected[1:]
    assert columns.joined(columns) == expected + expected

    def framed(rows: Sequence[Row]) -> list[ChangeFrame]:
        return frames_of(name, rows, batch_size=5, after=49, bookmark=90, judged=not wants.changes)

    ours, theirs = framed(columns), framed(expected)
    for later in (NOW, NOW + 1, NEVER - 1):
        assert _told(ours, later) == _told(theirs, later)
        assert _sent(world, ours, later) == _sent(world, theirs, later)


def _told(found: list[ChangeFrame], now: int) -> list[tuple[list[Row], int, int, int]]:
    return [(list(frame.at(now).rows), frame.after, frame.bookmark, frame.skip_from) for frame in found]


def _sent(world: World, found: list[ChangeFrame], now: int) -> list[sow_pb2.ChangeBatch]:
    store = world.rig.store
    reading = store.reads
    sent: list[sow_pb2.ChangeBatch] = []
    for frame in found:
        message = sow_pb2.ChangeBatch()
        subscribe_convert.fill_changes(message, frame.at(now), reading)
        sent.append(message)
    return sent


@settings(max_examples=examples(200))
@given(st.lists(st.integers(0, 40), min_size=1, max_size=20), st.integers(1, 6), st.booleans())
def test_frames_of_columns_are_bounded_in_rows_and_bytes(sizes: list[int], batch_size: int, together: bool) -> None:
    """A frame goes beyond the bytes only with a single row; the rows of all frames are all rows."""
    limit = 3 * (frames.COLUMN_ROW_BYTES + 20)
    keys, payloads = [b"k"] * len(sizes), [b"x" * size for size in sizes]
    columns = frames.RowColumns(
        bytes([1] * len(sizes)),
        bytes(len(sizes)),
        keys,
        payloads,
        _headers(len(sizes)),
        falls_due=False,
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(frames, "FRAME_BYTES", limit)
        found = frames_of("t", columns, batch_size=batch_size, after=4, bookmark=99, together=together)
    assert [row for frame in found for row in frame.rows] == list(columns)
    for frame in found:
        assert len(frame.rows) <= batch_size
        assert frame.size == sum(frames.COLUMN_ROW_BYTES + len(row.key) + len(row.payload) for row in frame.rows)
        assert frame.size <= limit or len(frame.rows) == 1
    for frame, after in pairwise(found):
        whole = len(frame.rows) == batch_size
        assert whole or frame.size + frames.COLUMN_ROW_BYTES + 1 + len(after.rows[0].payload) > limit
    room = within(keys, payloads, limit)
    assert room == len(sizes) or sum(columns.sizes[:room]) >= limit
    assert sum(columns.sizes[: room - 1]) < limit


def _headers(count: int) -> HeaderColumns:
    column = array("q", range(count))
    return HeaderColumns(column, column, column, column, array("H", bytes(2 * count)))
