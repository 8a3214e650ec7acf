"""The answer to a get: what is read and projected, and where (rules N5, N7; getting [1] to [4])."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

from sow.v1 import sow_pb2
from sow_server.access.caller import Granted
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import (
    ABSENT,
    Expiration,
    Lifetime,
    LifetimeKind,
    MessageType,
    Publish,
    TopicSettings,
)
from sow_server.engine.values.turns import CALLER
from sow_server.filters import parse
from sow_server.filters.restriction import UNRESTRICTED, Restriction
from sow_server.services.records import getting
from sow_server.services.records.getting import Getting, LongGets
from tests.support.stores.parts import reading_of
from tests.support.stores.stores import SECOND, Rig

T = TypeVar("T")


@dataclass
class Work:
    """What a get has had done."""

    read: list[bytes] = field(default_factory=list)
    projected: list[bytes] = field(default_factory=list)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    rig.create_topic("t", TopicSettings(message_type=MessageType.JSON, key=("/id",)))
    yield rig
    rig.close()


@pytest.fixture
def work(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Work:
    """Counts the reads and the projections of the topic."""
    done, cuts, kind = Work(), rig.store.cuts, type(rig.topic("t").format)
    get, each, project = cuts.get, cuts.each, kind.project

    def counted_get(topic: Topic, keys: Sequence[bytes]) -> tuple[int, list[bytes | None]]:
        done.read += keys
        return get(topic, keys)

    def counted_each(topic: Topic, keys: Sequence[bytes]) -> tuple[int, Iterator[bytes | None]]:
        now, values = each(topic, keys)

        def counted() -> Iterator[bytes | None]:
            for key, value in zip(list(keys), values, strict=False):
                done.read.append(key)
                yield value

        return now, counted()

    def counted_project(self: Any, payload: bytes, projection: Any) -> bytes:
        done.projected.append(payload)
        return project(self, payload, projection)

    monkeypatch.setattr(cuts, "get", counted_get)
    monkeypatch.setattr(cuts, "each", counted_each)
    monkeypatch.setattr(kind, "project", counted_project)
    return done


def put(rig: Rig, *sizes: int) -> list[str]:
    """Records with the keys 0, 1, … and payloads of about these sizes."""
    for number, size in enumerate(sizes):
        rig.run(Publish("t", [json.dumps({"id": str(number), "n": number, "pad": "x" * size}).encode()]))
    return [str(number) for number in range(len(sizes))]


def begun(
    rig: Rig,
    keys: Sequence[str],
    *,
    include: Sequence[str] = (),
    restriction: Restriction = UNRESTRICTED,
    below_micros: int = 0,
    clock: Callable[[], float] = lambda: 0.0,
) -> Getting:
    request = sow_pb2.GetRequest(topic="t", keys=keys, select=sow_pb2.Projection(include=include))
    granted = Granted(rig.topic("t"), restriction)
    return Getting(reading_of(rig.store), granted, request, below_micros, clock=clock)


def whole(made: Getting) -> tuple[list[str], int]:
    """The keys of an answer that is made in pieces, and the number of pieces."""
    for pieces in itertools.count(1):
        if (answer := made.step()) is not None:
            return [record.key for record in sow_pb2.GetResponse.FromString(answer).records], pieces
    raise AssertionError


def test_a_few_small_records_are_answered_on_the_loop(rig: Rig, work: Work) -> None:
    keys = put(rig, 10, 10, 10)
    made = begun(rig, [*reversed(keys), "none"], include=["/n"])
    assert made.here()
    assert [json.loads(record.payload) for record in made.response.records] == [{"n": 2}, {"n": 1}, {"n": 0}]
    assert made.as_of_micros


@pytest.mark.parametrize("where", ["loop", "thread"])
def test_equal_keys_are_read_and_projected_once(rig: Rig, work: Work, where: str) -> None:
    """getting [2]. Story: 256 equal keys with 1,000 paths occupied the loop for 0.65 s a call."""
    put(rig, 100, 100)
    made = begun(rig, ["1", "0", *["1"] * 30, "none", "none"], include=["/n"])
    if where == "loop":
        assert made.here()
        found = list(made.response.records)
    else:
        answer = made.step()
        assert answer is not None
        found = list(sow_pb2.GetResponse.FromString(answer).records)
    assert [record.key for record in found] == ["1", "0", *["1"] * 30]
    assert {record.payload for record in found if record.key == "1"} == {b'{"n":1}'}
    assert work.read == [b"1", b"0", b"none"]
    assert len(work.projected) == 2


def test_the_loop_projects_no_large_record(rig: Rig, work: Work) -> None:
    """getting [1]. Story: a record of 1 MB in a topic of small ones was projected on the loop."""
    keys = put(rig, *[10] * 200, getting.HERE_BYTES // getting.DECODED, 10)
    made = begun(rig, ["0", keys[-2], keys[-1]], include=["/n"])
    assert not made.here()
    assert work.projected == []
    assert work.read == [b"0", keys[-2].encode()], "it stops at the bytes that were too many"
    assert whole(made) == (["0", keys[-2], keys[-1]], 1)
    assert work.read == [b"0", keys[-2].encode(), keys[-1].encode()], "nothing is read twice"


def test_whole_records_may_have_more_bytes_on_the_loop(rig: Rig) -> None:
    """getting [1]: a byte that is copied costs less than one that is decoded."""
    (key,) = put(rig, getting.HERE_BYTES // getting.DECODED)
    assert begun(rig, [key]).here()
    assert not begun(rig, [key], include=["/n"]).here()
    assert not begun(rig, [key], restriction=Restriction(hidden=(("n",),))).here()
    assert not begun(rig, [key], restriction=Restriction(rows=parse("/n = 0"))).here()
    assert not begun(rig, [key] * 16).here(), "copies count"


@pytest.mark.parametrize(
    ("keys", "paths"),
    [(getting.HERE_KEYS + 1, 0), (getting.HERE_KEYS_DECODED + 1, 1), (1, getting.HERE_PATHS + 1)],
    ids=["keys", "decoded keys", "paths"],
)
def test_many_keys_or_paths_are_left_to_threads(rig: Rig, work: Work, keys: int, paths: int) -> None:
    put(rig, 10)
    made = begun(rig, ["0"] * keys, include=[f"/n{number}" for number in range(paths)])
    assert not made.here()
    assert work.read == []
    assert len(whole(made)[0]) == keys


def test_many_large_records_are_not_even_read_on_the_loop(rig: Rig, work: Work) -> None:
    keys = put(rig, *[20_000] * 20)
    assert not begun(rig, keys).here()
    assert work.read == []


def test_a_piece_ends_in_time_and_the_next_one_goes_on(rig: Rig, work: Work) -> None:
    """getting [3]"""
    keys = put(rig, *[getting.GROUP_BYTES] * 6)
    ticks = itertools.count()
    made = begun(rig, [*keys, keys[0]], include=["/n"], clock=lambda: next(ticks) * getting.PIECE_SECONDS)
    found, pieces = whole(made)
    assert found == [*keys, keys[0]]
    assert pieces == 6
    assert len(work.read) == len(work.projected) == 6


def test_records_in_memory_are_bounded_in_bytes(rig: Rig, work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getting, "READ_BYTES", 10_000)
    keys = put(rig, *[20_000] * 10)
    made = begun(rig, keys, clock=itertools.count().__next__)
    assert made.step() is None
    assert len(work.read) == 1, "each of them is more than is read at a time"
    assert whole(made)[0] == keys


def test_rows_that_are_not_granted_are_left_out_wherever_they_are_read(rig: Rig) -> None:
    put(rig, 10, 10, getting.HERE_BYTES, 10)
    rows = Restriction(rows=parse("/n >= 1"))
    small = begun(rig, ["0", "1", "3"], restriction=rows)
    assert small.here()
    assert [record.key for record in small.response.records] == ["1", "3"]
    large = begun(rig, ["0", "1", "2", "3", "1"], restriction=rows)
    assert not large.here()
    assert whole(large)[0] == ["1", "2", "3", "1"]


def test_a_get_of_some_keys_on_the_loop_is_of_one_instant(rig: Rig) -> None:
    put(rig, 10, 10)
    _, values = rig.store.cuts.each(rig.topic("t"), [b"0", b"none", b"1"])
    before = next(values)
    rig.run(Publish("t", [b'{"id": "0", "n": "new"}', b'{"id": "1", "n": "new"}']))
    assert before is not None
    assert next(values) is None
    value = next(values)
    assert value is not None
    assert b"new" not in before + value


@pytest.mark.parametrize("expiration", list(Expiration))
def test_a_get_of_one_key_on_the_loop_shows_what_a_get_of_many_shows(rig: Rig, expiration: Expiration) -> None:
    """The one is read without a snapshot, at the same `now` (rule L8)."""
    rig.create_topic("one", TopicSettings(key=("/id",), expiration=expiration))
    lifetime = ABSENT if expiration is Expiration.REJECT else Lifetime(LifetimeKind.TTL, SECOND)
    rig.run(Publish("one", [b'{"id": "lasts"}']))
    rig.run(Publish("one", [b'{"id": "ends"}'], lifetime=lifetime))
    keys = [b"lasts", b"ends", b"none"]
    shown = []
    for _ in range(2):
        now, values = rig.store.cuts.get(rig.topic("one"), keys)
        for key, value in zip(keys, values, strict=True):
            at, found = rig.store.cuts.each(rig.topic("one"), [key])
            assert (at, list(found)) == (now, [value])
        shown.append([value is not None for value in values])
        rig.time.tick(SECOND)
    ended = expiration is Expiration.ENABLED
    assert shown == [[True, True, False], [True, not ended, False]]


def test_the_answer_is_bounded_also_where_keys_repeat(rig: Rig) -> None:
    (key,) = put(rig, 1_000_000)
    made = begun(rig, [key] * 17)
    with pytest.raises(StoreError) as caught:
        whole(made)
    assert caught.value.reason is Reason.REQUEST_TOO_LARGE


# --- long gets of one caller -----------------------------------------------------------------------------------------


class Held(Executor):
    """Runs a piece when the test says so."""

    def __init__(self) -> None:
        self.waiting: list[tuple[str, Callable[[], None], Future[Any]]] = []

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                future.set_result(fn(*args, **kwargs))

        self.waiting.append((CALLER.get(), run, future))
        return future


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def asked(long: LongGets, made: Getting, readers: Executor, caller: str) -> bytes:
    CALLER.set(caller)
    return await long.whole(made, readers)


def endless(rig: Rig) -> Getting:
    """A get with many pieces."""
    keys = [str(number) for number in range(20)]
    ticks = itertools.count()
    return begun(rig, keys * 10, clock=lambda: next(ticks) * getting.PIECE_SECONDS)


def test_a_caller_that_has_gone_has_no_more_pieces(rig: Rig) -> None:
    """getting [3]"""
    put(rig, *[getting.GROUP_BYTES] * 20)

    async def scenario() -> None:
        readers, long = Held(), LongGets()
        task = asyncio.create_task(asked(long, endless(rig), readers, "a"))
        for _ in range(3):
            await settled()
            readers.waiting.pop()[1]()
        await settled()
        _, run, future = readers.waiting.pop()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert future.cancelled()
        run()
        await settled()
        assert readers.waiting == []
        assert not long._places

    asyncio.run(scenario())


@pytest.mark.slow
def test_of_one_caller_few_long_gets_hold_records(rig: Rig) -> None:
    """getting [4]: another caller does not wait for them."""
    put(rig, *[getting.GROUP_BYTES] * 20)

    async def scenario() -> None:
        readers, long = Held(), LongGets()
        tasks = [asyncio.create_task(asked(long, endless(rig), readers, "much")) for _ in range(10)]
        tasks.append(asyncio.create_task(asked(long, endless(rig), readers, "other")))
        await settled()
        assert [caller for caller, _, _ in readers.waiting] == ["much"] * getting.LONG_GETS + ["other"]
        while not all(task.done() for task in tasks):
            await settled()
            for _, run, _ in [readers.waiting.pop(0) for _ in range(len(readers.waiting))]:
                run()
        assert {len(sow_pb2.GetResponse.FromString(task.result()).records) for task in tasks} == {200}
        assert not long._places

    asyncio.run(scenario())
