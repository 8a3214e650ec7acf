"""The pure parts of the console, and its frames over scripted clients."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import cast

import pytest
from starlette.types import Message
from starlette.websockets import WebSocket

from sow.v1 import types_pb2
from sow_client import (
    AsyncClient,
    Change,
    ExpiryHorizon,
    FailedPrecondition,
    NotFound,
    PastChange,
    PayloadForm,
    QueryFooter,
    QueryHeader,
    Record,
    RecordBatch,
    ReplicationStatus,
    ResyncRequired,
    SowError,
    TopicDue,
    Unavailable,
)
from sow_client._records import record_of
from sow_console import documents, graph, horizon, live, story, texts
from sow_console.pages import records
from sow_console.pages.page import DEFAULT_SERVER, View, operands
from sow_console.sessions import Session
from tests.support.servers.console import Clock

NOW = datetime(2030, 1, 31, 12, tzinfo=UTC)
BIG = 2**63 + 1


def record(key: str, payload: bytes, sequence: int = 1) -> Record:
    columns = types_pb2.RecordColumns(
        key=[key],
        payload=[payload],
        version=[2**60 + 1],
        publish_time_micros=[1],
        expire_time_micros=[2**63 - 1],
        sequence=[sequence],
        origins=["ldn"],
    )
    return next(iter(RecordBatch("orders", columns)))


# ---- documents ----


@pytest.mark.parametrize("payload", [b'{"n":NaN}', b'{"n":"\xff"}', '{"n":1}'.encode("utf-16-le"), b'{"a":' * 5_000])
def test_a_payload_that_is_no_json_does_not_break_the_json_around_it(payload: bytes) -> None:
    twin = json.loads(documents.encoded(documents.twin(record("1", payload))))
    assert isinstance(twin["payload"], str)


def test_of_a_large_payload_the_begin_is_shown() -> None:
    payload = b'{"a":"%s"}' % (b"x" * documents.SHOWN_BYTES_MAX)
    for shown in (documents.pretty(payload), documents.row(record("1", payload))[1]):
        assert isinstance(shown, str)
        assert shown.startswith('{"a":"xx')
        assert shown.endswith(f" … ({len(payload):,} bytes)")


def test_numbers_keep_their_text() -> None:
    payload = b'{"big": 9223372036854775809, "price": 9.50, "e": 1e400, "in": {"a/b": [1.0, {"x": 2.10}]}, "t": "1"}'
    assert documents.leaves(payload) == {
        "/big": str(BIG),
        "/price": "9.50",
        "/e": "1e400",
        "/in/a~1b": '[1.0,{"x":2.10}]',
        "/t": '"1"',
    }
    assert f'"big": {BIG}' in documents.pretty(payload)


@pytest.mark.parametrize("payload", [b"", b"\x81\xa1a\x01", b"[1]", b"{", b"{\xff}", b'{"a":' * 5_000])
def test_a_payload_that_is_no_json_object_has_no_fields(payload: bytes) -> None:
    assert documents.leaves(payload) is None
    assert isinstance(documents.pretty(payload), str)


def test_the_json_of_a_page_has_the_payload_as_it_was_published() -> None:
    encoded = documents.encoded({"record": documents.twin(record("1", b'{"n":9223372036854775809,"p":9.50}'))})
    assert b'"payload":{"n":9223372036854775809,"p":9.50}' in encoded
    assert (
        json.loads(documents.encoded({"record": documents.twin(record("1", b"\xff"))}))["record"]["payload"] == "\\xff"
    )


def test_numbers_beyond_those_of_a_browser_travel_as_text() -> None:
    row = documents.row(record("1", b"{}"))
    assert row[4] == str(2**60 + 1)
    assert all(not isinstance(one, int) or one < 2**53 for one in row)


# ---- story ----


def past(op: str, payload: bytes, reason: str | None = None) -> PastChange:
    return PastChange(op, reason, record("1", payload), NOW, "nyc")  # type: ignore[arg-type]  # names of a Literal


def test_a_story_names_what_happened_and_which_fields_changed() -> None:
    told = story.chapters(
        [
            past("put", b'{"a":1}'),
            past("expire", b'{"a":2}'),
            past("put", b'{"a":2}', "touched"),
            past("put", b'{"a":2,"c":9.50}'),
            past("put", b'{"a":1,"b":true}'),
        ],
        "ldn",
        whole=True,
    )
    assert [one.event for one in told] == ["published", "expired", "touched", "changed", "published"]
    assert told[3].fields == (
        story.Field("/a", "1", "2"),
        story.Field("/c", None, "9.50"),
        story.Field("/b", "true", None),
    )
    assert all(one.replicated for one in told)
    assert told[1].payload == "", "a removed record is not shown"


def test_the_oldest_change_of_a_cut_story_is_not_called_the_first() -> None:
    assert story.chapters([past("put", b"{}")], "ldn", whole=False)[0].event == "changed"


def test_a_record_that_left_the_rows_of_the_reader_is_not_shown() -> None:
    (told,) = story.chapters([past("delete", b'{"a":1}', "not_permitted")], "nyc", whole=True)
    assert (told.event, told.payload, told.fields) == ("left your rows", "", ())


# ---- horizon, graph, texts ----


def test_bars_add_up_the_topics_and_say_which_spans_were_not_counted() -> None:
    spans = (timedelta(minutes=1), timedelta(minutes=2))
    topics = (TopicDue("a", 0, (1, 4), NOW, False), TopicDue("b", 0, (1, 0), NOW, False))
    first, second = horizon.bars(ExpiryHorizon(NOW, spans, topics, NOW + spans[0], NOW + spans[0]))
    assert (first.due, first.share, first.counted) == (2, 0.5, True)
    assert (second.due, second.share, second.counted) == (4, 1.0, False)
    assert second.begin == first.end
    assert [bar.due for bar in horizon.bars(ExpiryHorizon(NOW, spans, (), NOW + spans[1], NOW + spans[1]))] == [0, 0]


@pytest.mark.parametrize("within", horizon.WITHIN)
def test_spans_rise_up_to_the_end(within: str) -> None:
    spans = horizon.spans(horizon.WITHIN[within])
    assert spans == sorted(set(spans))
    assert spans[-1] == horizon.WITHIN[within]


def test_an_instance_without_peers_stands_alone() -> None:
    drawn = graph.drawn(ReplicationStatus("ldn", 1, (), ()))
    assert [node.name for node in drawn.nodes] == ["ldn"]
    assert drawn.arrows == ()


@pytest.mark.parametrize(
    ("length", "text"),
    [
        (timedelta(0), "0"),
        (timedelta(microseconds=1500), "1.5ms"),
        (timedelta(seconds=59.94), "59.9s"),
        (timedelta(seconds=59.96), "1m00s"),
        (timedelta(hours=3, minutes=20), "3h20m"),
        (timedelta(days=2, hours=4), "2d4h"),
        (-timedelta(seconds=2), "-2.0s"),
    ],
)
def test_lengths_of_time_are_short(length: timedelta, text: str) -> None:
    assert texts.duration(length) == text


# ---- frames ----


def put(key: str, payload: bytes) -> Change:
    return Change("put", record=record(key, payload))


def test_the_newest_of_each_key_waits() -> None:
    newest = live.Newest()
    for number in range(1_000):
        newest.take_in(put("1", b"%d" % number))
    newest.take_in(put("2", b"x"))
    newest.take_in(Change("oof", reason="expired", previous=record("2", b"x")))
    frame = newest.frame()
    assert [row[:2] for row in cast(list[list[object]], frame["rows"])] == [["1", "999"]]
    assert frame["gone"] == [["2", "expired"]]
    assert frame["changes"] == 1_002
    assert newest.frame() == {"rows": [], "gone": [], "changes": 0}


def _set() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass
class Script:
    """A client whose queries and subscriptions are written down."""

    answers: list[list[Record] | SowError]
    changes: asyncio.Queue[Change | SowError] = field(default_factory=asyncio.Queue)
    starts: list[str] = field(default_factory=list)
    counted: int = 0
    answering: asyncio.Event = field(default_factory=_set)
    """Set: it answers."""
    interrupt: Callable[[SowError | None], object] = lambda error: None

    def query(
        self, topic: str, filter: str | None, parameters: object, **named: object  # noqa: A002 - as the client has it
    ) -> object:  # fmt: skip
        return Result(self.answers.pop(0), self.answering)

    async def describe_topic(self, topic: str) -> object:
        return SimpleNamespace(statistics=SimpleNamespace(live_records=records.AGAIN_MAX + 1))

    async def count(self, *about: object) -> int:
        self.counted += 1
        return 7

    async def describe_instance(self) -> None:
        await self.answering.wait()

    def subscribe(
        self, topic: str, filter: str | None, parameters: object, *, oof: bool, start: str,  # noqa: A002 - likewise
        on_interruption: Callable[[SowError | None], object],
    ) -> Subscribed:  # fmt: skip
        self.starts.append(start)
        self.interrupt = on_interruption
        return Subscribed(self.changes)


class Result:
    def __init__(self, answer: list[Record] | SowError, answering: asyncio.Event) -> None:
        self._answer = answer
        self._answering = answering
        count = 0 if isinstance(answer, SowError) else len(answer)
        self.header = QueryHeader("e.7", 5)
        self.footer = QueryFooter(count + 3, count, 100, "")
        self.plan = None

    async def __aenter__(self) -> Result:
        return self

    async def __aexit__(self, *about: object) -> None:
        pass

    async def __aiter__(self) -> AsyncIterator[Record]:
        await self._answering.wait()
        if isinstance(self._answer, SowError):
            raise self._answer
        for one in self._answer:
            yield one


class Subscribed:
    def __init__(self, changes: asyncio.Queue[Change | SowError]) -> None:
        self._changes = changes

    async def __aenter__(self) -> Subscribed:
        return self

    async def __aexit__(self, *about: object) -> None:
        pass

    async def __aiter__(self) -> AsyncIterator[Change]:
        while True:
            change = await self._changes.get()
            if isinstance(change, SowError):
                raise change
            yield change


def frames(script: Script) -> live.RecordFrames:
    asked = records.asked({"topic": "orders", "filter": "/a > 1"})
    return live.RecordFrames(cast(AsyncClient, script), asked, now_micros=lambda: 77, heartbeat=0.001)


def go(work: Callable[[], Coroutine[object, object, None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 30))


async def eventually(source: live.RecordFrames, wanted: Callable[[live.Frame], bool]) -> live.Frame:
    while not wanted(frame := await source.frame()):
        pass
    return frame


def test_changes_follow_the_answer_from_its_position_on() -> None:
    async def work() -> None:
        script = Script([[record("1", b"{}")]])
        source = frames(script)
        first = await source.frame()
        assert (first["reset"], first["matched"], first["read"], first["as_of"]) == (True, 1, 100, 5)
        script.changes.put_nowait(put("2", b"{}"))
        second = await eventually(source, lambda frame: bool(frame["rows"]))
        assert script.starts == ["e.7"]
        assert second["as_of"] == 77
        await source.close()

    go(work)


def test_more_matches_than_wanted_are_not_called_all() -> None:
    async def work() -> None:
        script = Script([[record(str(number), b"{}") for number in range(3)]])
        asked = records.asked({"topic": "orders", "rows": "2"})
        found = await records.answer(cast(AsyncClient, script), asked, documents.row)
        assert ([one[0] for one in found.records], found.more, found.matched) == (["0", "1"], True, None)
        assert script.counted == 0, "the topic is too large to be counted unasked"

    go(work)


def test_large_payloads_are_not_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "ANSWER_BYTES_MAX", 5_000)

    async def work() -> None:
        large = [record(str(number), b"x" * 2_000) for number in range(4)]
        asked = records.asked({"topic": "orders"})
        rows = await records.answer(cast(AsyncClient, Script([large])), asked, documents.row)
        assert [len(cast(str, one[1])) < 1_100 for one in rows.records] == [False, False, True, True]
        twins = await records.answer(cast(AsyncClient, Script([large])), asked, documents.twin)
        assert [one["payload"] is None for one in twins.records] == [False, False, True, True]

    go(work)


def test_payloads_that_wait_have_a_bound_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "WAITING_BYTES_MAX", 100)
    newest = live.Newest()
    seen = []
    for step in (lambda: newest.take_in(put("1", b"x" * 99)), lambda: newest.take_in(put("2", b"x")), newest.frame):
        step()
        seen.append(newest.is_full)
    assert seen == [False, True, False]


def test_a_lost_server_is_told_and_does_not_look_fresh() -> None:
    async def work() -> None:
        script = Script([[record("1", b"{}")]])
        source = frames(script)
        await source.frame()
        await eventually(source, lambda frame: bool(script.starts))
        before = (await source.frame())["as_of"]
        source._now_micros = lambda: 99
        script.interrupt(Unavailable("gone", reason="UNREACHABLE"))
        frame = await source.frame()
        assert (frame["away_since"], frame["as_of"]) == (99, before)
        script.interrupt(None)
        assert (await source.frame())["away_since"] is None
        await source.close()

    go(work)


def test_a_stuck_server_is_told_and_does_not_look_fresh() -> None:
    """A server that was stopped without its connection being cut was called live for three quarters of a minute."""

    async def work() -> None:
        script = Script([[record("1", b"{}")]])
        source = frames(script)
        await source.frame()
        before = (await eventually(source, lambda frame: bool(script.starts)))["as_of"]
        source._now_micros = lambda: 99
        script.answering.clear()
        frame = await eventually(source, lambda frame: frame["away_since"] is not None)
        assert (frame["away_since"], frame["as_of"]) == (99, before)
        script.answering.set()
        assert (await eventually(source, lambda frame: frame["away_since"] is None))["as_of"] == 99
        await source.close()

    go(work)


def test_while_a_query_runs_frames_come_and_its_end_is_the_end_of_the_page() -> None:
    async def work() -> None:
        script = Script([[record("1", b"{}")]])
        script.answering.clear()
        source = frames(script)
        frame = await source.frame()
        assert "reset" not in frame
        assert frame["away_since"] is None
        assert source._asking is not None
        await source.close()
        assert source._asking.cancelled(), "the query runs for nobody"

    go(work)


def test_lifetimes_count_by_the_clock_of_the_server_when_the_answer_is_sent() -> None:
    async def work() -> None:
        script = Script([[record("1", b"{}")]])
        source = frames(script)
        times = iter([1_000, 1_700])
        source._now_micros = lambda: next(times)
        assert (await source.frame())["clock"] == 5 + 700
        await source.close()

    go(work)


def test_a_position_that_is_gone_is_asked_about_anew() -> None:
    async def work() -> None:
        script = Script([[record("1", b"{}")], [record("9", b"{}")]])
        source = frames(script)
        await source.frame()
        script.changes.put_nowait(Unavailable("cut", reason="STREAM_CUT"))
        again = await eventually(source, lambda frame: "reset" in frame)
        assert [row[0] for row in cast(list[list[object]], again["rows"])] == ["9"]
        await source.close()

    go(work)


def test_changes_that_break_off_each_time_are_asked_about_with_a_growing_wait() -> None:
    """A grid asked its whole query anew up to ten times a second."""

    async def work() -> None:
        script, slept, clock = Script([[] for _ in range(9)]), [], Clock()

        async def sleep(seconds: float) -> None:
            slept.append(seconds)

        asked = records.asked({"topic": "orders"})
        source = live.RecordFrames(cast(AsyncClient, script), asked, heartbeat=0.001, clock=clock, sleep=sleep)
        for number in range(8):
            await eventually(source, lambda frame: "reset" in frame)
            if number == 6:
                clock.now += live.CALM_SECONDS
            script.changes.put_nowait(ResyncRequired("gone", reason="RESYNC_REQUIRED"))
        last = await eventually(source, lambda frame: "reset" in frame)
        assert slept == [1, 2, 4, 8, 10]
        assert last["away_since"] is None
        await source.close()

    go(work)


def test_a_wrong_filter_is_told_with_its_column() -> None:
    async def work() -> None:
        error = FailedPrecondition("no", reason="FILTER_INVALID", details={"field": "filter", "position": "8"})
        source = frames(Script([error]))
        told = cast(dict[str, object], (await source.frame())["error"])
        assert (told["field"], told["position"]) == ("filter", 8)
        await source.close()

    go(work)


def test_the_horizon_of_a_filter_counts_each_record_in_its_span() -> None:
    spans = [timedelta(seconds=10), timedelta(seconds=20)]
    times = [NOW + timedelta(seconds=seconds) for seconds in (15, 1, 10, 20, 21)]
    found = horizon.counted("orders", times, NOW, spans)
    assert found.topics[0].due == (2, 2), "the one behind the end is in no span"
    assert found.topics[0].next_time == NOW + timedelta(seconds=1)
    assert found.complete
    assert horizon.counted("orders", [], NOW, spans).topics[0].next_time is None


def test_a_page_that_takes_long_is_made_less_often() -> None:
    async def run() -> None:
        now, slept = 0.0, []

        async def content() -> str:
            nonlocal now
            now += 2.0
            return "page"

        async def sleep(seconds: float) -> None:
            slept.append(seconds)

        source = live.PageFrames(content, 1.0, clock=lambda: now, sleep=sleep)
        seconds = 2.0 * live.REST
        while sum(slept) < 1.0 + seconds:
            await source.frame()
        assert slept == [1.0] + [live.HEARTBEAT_SECONDS] * round(seconds / live.HEARTBEAT_SECONDS)

    asyncio.run(run())


def test_a_page_that_gets_no_answer_says_since_when() -> None:
    async def work() -> None:
        answers: list[str | SowError] = ["<p>", Unavailable("gone", reason="UNREACHABLE"), "<b>"]
        now = SimpleNamespace(micros=10)

        async def content() -> str:
            answer = answers.pop(0)
            if isinstance(answer, SowError):
                raise answer
            return answer

        source = live.PageFrames(content, 0, now_micros=lambda: now.micros)
        first = await source.frame()
        now.micros = 20
        second = await source.frame()
        now.micros = 30
        third = await source.frame()
        assert (first["html"], first["as_of"], first["away_since"]) == ("<p>", 10, None)
        assert (second["html"], second["as_of"], second["away_since"]) == (None, 10, 20)
        assert (third["html"], third["as_of"], third["away_since"]) == ("<b>", 30, None)

    go(work)


def test_a_refusal_is_an_answer_and_no_silence() -> None:
    async def work() -> None:
        async def content() -> str:
            raise NotFound("there is no topic 'x'", reason="TOPIC_NOT_FOUND")

        frame = await live.PageFrames(content, 0).frame()
        assert frame["away_since"] is None
        assert cast(dict[str, object], frame["error"])["reason"] == "TOPIC_NOT_FOUND"

    go(work)


def test_between_two_looks_a_page_hears_that_the_console_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages that are made anew every ten seconds said for a moment, each time, that they were disconnected."""
    monkeypatch.setattr(live, "HEARTBEAT_SECONDS", 0)

    async def work() -> None:
        async def content() -> str:
            raise AssertionError("it is too early")

        assert (await live.PageFrames(content, 10).frame())["html"] is None

    go(work)


def test_content_that_is_the_same_is_not_sent_again() -> None:
    async def work() -> None:
        async def content() -> str:
            return "<p>"

        source = live.PageFrames(content, 0)
        assert [(await source.frame())["html"] for _ in range(2)] == ["<p>", None]

    go(work)


# ---- commands ----


def view() -> View:
    return View(cast(Session, None), DEFAULT_SERVER, (DEFAULT_SERVER,), {}, datetime.now(UTC))


@pytest.mark.parametrize("key", ["a'b\\c", "two\nlines", "\x1b[201~\nrm x\n", "\u202egnp", "é", "\u2029'\\x41"])
def test_a_command_gives_the_shell_the_key_and_the_terminal_no_control_character(key: str) -> None:
    command = view().command("get", "orders", key)
    assert command.isprintable()
    shell = ["bash", "-c", f"printf %s {command.removeprefix('sow get orders ')}"]
    done = subprocess.run(shell, capture_output=True, env={"LC_ALL": "C.UTF-8"}, check=True)
    assert done.stdout.decode() == key


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        ("orders.eu", "orders.eu"),
        ("/id", "/id"),
        ("köln", "köln"),
        ("a=b", "a=b"),
        ("=ls", "'=ls'"),
        ("", "''"),
        ("/price > 9", "'/price > 9'"),
        ("/who = 'Ann'", "\"/who = 'Ann'\""),
        ('{"id": 1}', """'{"id": 1}'"""),
        ("""{"who": "O'Brien"}""", """'{"who": "O'\\''Brien"}'"""),
        ("'a' < $b", "\"'a' < \\$b\""),
        ("it's $(rm) `x` \\", "'it'\\''s $(rm) `x` \\'"),
        ("/a != 'b'!", "'/a != '\\''b'\\''!'"),
    ],
)
def test_a_command_is_quoted_only_where_needed_and_as_people_do(argument: str, shown: str) -> None:
    assert view().command("get", argument) == f"sow get {shown}"
    done = subprocess.run(["bash", "-c", f"printf %s {shown}"], capture_output=True, check=True)
    assert done.stdout.decode() == argument


def test_a_key_that_looks_like_an_option_is_none() -> None:
    assert operands("orders", "-1") == ["--", "orders", "-1"]
    assert operands("orders", "1") == ["orders", "1"]


# ---- sockets ----


class Numbers:
    """A source of frames that never waits."""

    async def frame(self) -> live.Frame:
        return {}

    async def close(self) -> None:
        """It has no calls."""


def test_a_socket_overhears_what_is_no_number_of_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """A binary message ended the socket with an exception, and its story stood in the terminal."""
    monkeypatch.setattr(live, "FRAMES_APART_SECONDS", 0)
    said: list[Message] = [{"type": "websocket.connect"}, {"type": "websocket.receive", "bytes": b"1"}]
    said += [{"type": "websocket.receive", "text": text} for text in ("", "2", "1e0", "1")]
    said += [{"type": "websocket.disconnect", "code": 1001}]
    sent: list[Message] = []

    async def receive() -> Message:
        return said.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    async def work() -> None:
        session = Session({}, None, lambda server, token: cast(AsyncClient, None), 0.0)
        await live.serve(WebSocket({"type": "websocket"}, receive, send), session, Numbers(), still=lambda: True)

    asyncio.run(work())
    assert [message["type"] for message in sent] == ["websocket.accept", "websocket.send", "websocket.send"]
    assert said == []


@pytest.mark.parametrize(
    ("form", "payload", "shown"),
    [
        (PayloadForm("msgpack"), b"\x82\xa2id\x01\xa1b\xc4\x01\xff", {"id": 1, "b": "/w=="}),
        (PayloadForm("fix", "|"), b"95=6|96=a|55=Z|055=ACME|", {"95": "6", "96": "a|55=Z", "55": "ACME"}),
        (PayloadForm("nvfix", ";"), b"id=a;px=1;", {"id": "a", "px": "1"}),
    ],
)
def test_payloads_of_every_type_are_shown_as_json(form: PayloadForm, payload: bytes, shown: dict[str, object]) -> None:
    record = record_of("t", "k", payload, 1, 1, 1, 1, "nyc", form=form)
    assert json.loads(documents.encoded(documents.twin(record)))["payload"] == shown
    assert json.loads(str(documents.row(record)[1])) == shown
