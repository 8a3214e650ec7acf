"""`sow subscribe` against a fake client: its calls, its output in each format, the live table, its end."""

from __future__ import annotations

import csv
import io
import json
import random
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner, Result, _NamedTextIOWrapper
from rich.cells import cell_len

from sow_cli.command import sow
from sow_cli.context_files import ContextFiles
from sow_cli.live import HIGHLIGHT_SECONDS, LiveTable, Term
from sow_cli.messages import TopicForms
from sow_client import Change, Client, Gap, NotFound, Unavailable
from tests.support.fakes.fake_client import FakeClient
from tests.support.fakes.fake_results import NOW_MICROS


@pytest.fixture
def client() -> FakeClient:
    client = FakeClient()
    client.add("orders", records=[{"id": 1}, {"id": 2}])
    client.coming = changes(client)
    return client


def changes(client: FakeClient) -> list[Change]:
    """One message of each kind."""
    new = client.record("orders", "3", b'{"id": 3,\n"x": 1.50}', expire_time_micros=NOW_MICROS + 1_000_000)
    delta = client.record("orders", "1", b'{"id":1,"y":2}')
    touched = client.record("orders", "1", b'{"id":1}')
    gone = client.record("orders", "2", b'{"id":2}')
    unmatched = client.record("orders", "1", b'{"id":1,"y":9}')
    return [
        Change("put", record=new, bookmark="epoch.3", topic="orders"),
        Change("put", record=delta, topic="orders", is_delta=True, unset_paths=("/a/b", "/c")),
        Change("put", "touched", touched, None, "epoch.5", "orders"),
        Change("oof", "deleted", None, gone, "epoch.6", "orders"),
        Change("oof", "match", unmatched, None, "epoch.7", "orders"),
    ]


def run(client: FakeClient, *arguments: str) -> Result:
    return CliRunner().invoke(sow, ["subscribe", *arguments], obj=lambda _session: client)


def rows(result: Result) -> list[dict[str, object]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


# ---- requests ----


def test_options_reach_the_subscription(client: FakeClient) -> None:
    run(client, "orders", "/id > 1", "--oof", "--from", "epoch.1", "--conflation", "500ms", "--count", "1")

    assert client.arguments_of("subscribe") == {
        "topic": "orders",
        "filter": "/id > 1",
        "topic_pattern": None,
        "oof": True,
        "delta": False,
        "changes": False,
        "start": "epoch.1",
        "conflation": "500ms",
        "select": None,
    }
    run(client, "or.*", "--pattern", "--changes", "--from", "2030-01-31T13:00:00+01:00", "--count", "1")
    asked = client.arguments_of("subscribe")
    assert (asked["topic"], asked["topic_pattern"], asked["changes"]) == (None, "or.*", True)
    assert asked["start"] == datetime(2030, 1, 31, 12, tzinfo=UTC)
    run(client, "orders", "--sow", "--delta", "--count", "1")
    asked = client.arguments_of("sow_and_subscribe")
    assert (asked["topic"], asked["delta"], asked["oof"]) == ("orders", True, False)
    run(client, "orders", "--sow", "--snapshot-max", "7", "--count", "1")
    assert client.arguments_of("sow_and_subscribe")["snapshot_max"] == 7
    run(client, "orders", "--sow", "--order-by", "/px DESC", "--order-by", "/id", "--top", "5", "--count", "1")
    asked = client.arguments_of("sow_and_subscribe")
    assert (asked["order_by"], asked["top_n"], asked["snapshot_max"]) == ("/px DESC, /id", 5, None)
    run(client, "orders", "--delta", "--conflation", "1s", "--count", "1")
    asked = client.arguments_of("subscribe")
    assert (asked["delta"], asked["conflation"]) == (True, "1s")


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("orders", "--sow", "--from", "earliest"),
        ("orders", "--snapshot-max", "3"),
        ("orders", "--changes", "--oof"),
        ("orders", "--changes", "--delta"),
        ("orders", "--changes", "--conflation", "1s"),
        ("orders", "--count", "0"),
        ("orders", "--for", "10"),
        ("orders", "--conflation", "often"),
        ("orders", "--from", "2030-01-31T12:00:00"),
        ("orders", "--from", "yesterday"),
        ("orders", "--force"),
        ("orders", "--no-ack"),
        ("orders", "--durable", "billing", "--sow"),
        ("orders", "--durable", "billing", "--delta"),
        ("orders", "--durable", "billing", "--conflation", "1s"),
        ("orders", "--durable", "billing", "--pattern"),
        ("orders", "--durable", "billing", "--changes", "--oof"),
        ("orders", "--order-by", "/px"),
        ("orders", "--sow", "--top", "3"),
        ("orders", "--sow", "--order-by", "/px", "--snapshot-max", "3"),
        ("o.*", "--sow", "--order-by", "/px", "--pattern"),
        ("orders", "--select", "px"),
        ("orders", "--select", "/px", "--delta"),
    ],
)
def test_wrong_usage_ends_with_2_before_the_server_is_asked(client: FakeClient, options: tuple[str, ...]) -> None:
    result = run(client, *options)

    assert (result.exit_code, result.stdout) == (2, "")
    assert [name for name, _ in client.calls if name != "publish"] == []


def test_a_topic_that_is_not_there_ends_with_1(client: FakeClient) -> None:
    result = run(client, "nothing")

    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("sow: TOPIC_NOT_FOUND: ")


# ---- output ----


def test_each_message_is_a_line_of_json(client: FakeClient) -> None:
    result = run(client, "orders", "--sow", "--oof", "--count", "7")

    assert result.exit_code == 0, result.output
    told = rows(result)
    assert [(one["op"], one.get("reason"), one.get("key"), one.get("bookmark")) for one in told] == [
        ("sow", None, "1", None),
        ("sow", None, "2", None),
        ("snapshot_end", None, None, "epoch.7"),
        ("put", None, "3", "epoch.3"),
        ("put", None, "1", None),
        ("put", "touched", "1", "epoch.5"),
        ("oof", "deleted", "2", "epoch.6"),
        ("oof", "match", "1", "epoch.7"),
    ]
    assert told[2] == {"op": "snapshot_end", "topic": "orders", "bookmark": "epoch.7"}
    assert told[3] == {
        "op": "put",
        "topic": "orders",
        "key": "3",
        "version": NOW_MICROS + 3,
        "publish_time_micros": NOW_MICROS - 5_000_000,
        "expire_time_micros": NOW_MICROS + 1_000_000,
        "origin": "fake-1",
        "sequence": 3,
        "payload": {"id": 3, "x": 1.5},
        "bookmark": "epoch.3",
    }
    assert '"x":1.50' in result.stdout.splitlines()[3]
    assert (told[4]["is_delta"], told[4]["unset_paths"]) == (True, ["/a/b", "/c"])
    assert all("is_delta" not in one and "unset_paths" not in one for one in told if one is not told[4])
    assert told[6] == {
        "op": "oof",
        "reason": "deleted",
        "topic": "orders",
        "key": "2",
        "sequence": 6,
        "previous": {
            "topic": "orders",
            "key": "2",
            "version": NOW_MICROS + 6,
            "publish_time_micros": NOW_MICROS - 5_000_000,
            "origin": "fake-1",
            "sequence": 6,
            "payload": {"id": 2},
        },
        "bookmark": "epoch.6",
    }
    assert told[7]["payload"] == {"id": 1, "y": 9}


def test_a_resync_has_a_line_of_its_own(client: FakeClient) -> None:
    client.coming.insert(0, Change("resync", topic="orders"))

    assert rows(run(client, "orders", "--count", "1"))[0] == {"op": "resync", "topic": "orders"}


def test_payloads_that_are_no_json_are_base64(client: FakeClient) -> None:
    client.add("images", message_type="binary", key=())
    client.coming = [
        Change("put", record=client.record("images", "a", b"\x00\xff"), bookmark="e.1", topic="images"),
        Change("put", record=client.record("orders", "b", b'{"id":1}'), bookmark="e.2", topic="orders"),
        Change("delete", previous=client.record("gone", "c", b'{"id":1}'), bookmark="e.3", topic="gone"),
    ]

    told = rows(run(client, ".*", "--pattern", "--count", "3"))

    assert [one.get("payload") for one in told] == ["AP8=", {"id": 1}, None]
    previous = told[2]["previous"]
    assert isinstance(previous, dict)
    assert previous["payload"] == "eyJpZCI6MX0="  # nobody knows any more what its topic was


def test_json_is_one_array_also_when_interrupted(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = json.loads(run(client, "orders", "--count", "3", "--format", "json").stdout)
    nothing = run(client, "orders", "--for", "0s", "--format", "json").stdout

    def interrupted() -> Iterator[Change]:
        yield client.coming[0]
        raise KeyboardInterrupt

    class Interrupted:
        bookmark = None

        def __enter__(self) -> Iterator[Change]:
            return interrupted()

        def __exit__(self, *_: object) -> None: ...

        def __iter__(self) -> Iterator[Change]:
            return interrupted()

        def close(self) -> None: ...

    monkeypatch.setattr(client, "subscribe", lambda *_, **__: Interrupted())
    cut = run(client, "orders", "--format", "json")

    assert [one["key"] for one in whole] == ["3", "1", "1"]
    assert nothing == "[]\n"
    assert cut.exit_code == 130
    assert [one["key"] for one in json.loads(cut.stdout)] == ["3"]


def test_csv_shows_a_removed_record_in_its_columns(client: FakeClient) -> None:
    told = list(csv.DictReader(io.StringIO(run(client, "orders", "--count", "4", "--format", "csv").stdout)))

    assert [(one["op"], one["reason"], one["key"], one["payload"]) for one in told] == [
        ("put", "", "3", '{"id":3,"x":1.50}'),
        ("put", "", "1", '{"id":1,"y":2}'),
        ("put", "touched", "1", '{"id":1}'),
        ("oof", "deleted", "2", '{"id":2}'),
    ]
    assert (told[1]["is_delta"], told[1]["unset_paths"], told[1]["bookmark"]) == ("true", "/a/b /c", "")


def test_a_table_has_a_readable_line_for_each_message(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    long = client.record("orders", "4", b'{"id":"' + "ü\u202e".encode() * 100 + b'"}')
    client.coming.append(Change("put", record=long, topic="orders"))

    result = run(client, "orders", "--sow", "--count", "8", "--format", "table")

    lines = result.stdout.splitlines()
    assert [re.sub(r" +", " ", line[13:]).rstrip() for line in lines[:11]] == [
        " op reason key id",
        " sow 1 1",
        " sow 2 2",
        " snapshot end",
        " op reason key id x",  # a field without a column has come
        " put 3 3 1.50",
        ' put delta 1 unset /a/b /c {"id":1,"y":2}',
        " put touched 1 1",
        " oof deleted 2 2",
        " op reason key id x y",
        " oof match 1 1 9",
    ]
    assert len(lines[11]) <= 70
    assert "…" in lines[11]
    assert "\u202e" not in lines[11]
    assert result.stderr == "8 messages; bookmark epoch.7\n"


def test_a_pattern_that_no_topic_matches_waits_for_one(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was refused: a program that is started before its first topic is there had to try again by itself. The topic
    that comes is followed from its first change."""
    refused = iter([True, True, False])
    subscribe = client.subscribe

    def late(*arguments: object, **named: object) -> object:
        if next(refused):
            raise NotFound("topic_pattern: no topic matches", reason="TOPIC_NOT_FOUND")
        return subscribe(*arguments, **named)  # type: ignore[arg-type]  # as the client is called

    monkeypatch.setattr(client, "subscribe", late)
    monkeypatch.setattr("sow_cli.subscribing._WAIT_SECONDS", 0.0)
    result = run(client, "eu-.*", "--pattern", "--count", "1")
    assert result.exit_code == 0, result.output
    assert result.stderr == "no topic matches eu-.* yet: waiting for one\n"
    assert client.arguments_of("subscribe")["start"] == "earliest"


def test_the_wait_for_a_topic_ends_with_its_time(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited for ever while no topic matched."""

    def refused(*_: object, **__: object) -> object:
        raise NotFound("topic_pattern: no topic matches", reason="PATTERN_MATCHES_NOTHING")

    monkeypatch.setattr(client, "subscribe", refused)
    result = run(client, "eu-.*", "--pattern", "--for", "50ms")
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[0] == "no topic matches eu-.* yet: waiting for one"


# ---- how it ends ----


def test_marks_do_not_count(client: FakeClient) -> None:
    assert [one["op"] for one in rows(run(client, "orders", "--sow", "--count", "3"))] == [
        "sow",
        "sow",
        "snapshot_end",
        "put",
    ]


def test_it_ends_after_its_time_though_nothing_comes(client: FakeClient) -> None:
    client.coming = []

    result = run(client, "orders", "--for", "50ms")

    assert (result.exit_code, result.output) == (0, "")


@pytest.mark.parametrize("options", [(), ("--sow",)])
def test_a_lost_and_restored_connection_is_reported_on_stderr(client: FakeClient, options: tuple[str, ...]) -> None:
    """Story: it was silent for up to five minutes, which looked as if nothing happened in the topic."""
    client.interruption = Unavailable("the subscription was cut off", reason="STREAM_CUT")

    result = run(client, "orders", *options, "--count", "1")

    assert result.exit_code == 0
    assert result.stderr.splitlines() == [
        "reconnecting … (STREAM_CUT: the subscription was cut off)",
        "connected again",
    ]
    assert len(rows(result)) == 1


# ---- the live table ----


@pytest.mark.parametrize(
    ("before", "variables"),
    [
        ((), {"SOW_FORMAT": "ndjson"}),
        (("--format", "ndjson"), {}),
        (("--context", "lines"), {}),
    ],
    ids=["the environment", "in front of the command", "a context"],
)
def test_a_format_that_is_chosen_anywhere_is_written_instead_of_the_live_table(
    client: FakeClient,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    before: tuple[str, ...],
    variables: dict[str, str],
) -> None:
    """Story: only `--format` behind the command counted. `SOW_FORMAT=ndjson`, and `\\G` in the shell, got the table."""
    monkeypatch.setattr(_NamedTextIOWrapper, "isatty", lambda _: True, raising=False)
    environment = {"XDG_CONFIG_HOME": str(tmp_path)} | variables
    ContextFiles(environment).write("lines", {"format": "ndjson"})
    arguments = [*before, "subscribe", "orders", "--sow", "--count", "3", "--color", "never"]
    result = CliRunner().invoke(sow, arguments, env=environment, obj=lambda _session: client)
    assert [one["op"] for one in rows(result)] == ["sow", "sow", "snapshot_end", "put"]


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def live_table(client: FakeClient, clock: Clock, *, several_topics: bool = False) -> LiveTable:
    asked: Client = client  # type: ignore[assignment]  # the fake stands in for it
    return LiveTable(TopicForms(asked), several_topics=several_topics, clock=clock, now_micros=lambda: NOW_MICROS)


def shown_keys(table: LiveTable, height: int) -> list[str]:
    lines = table.render(80, height).plain.splitlines()
    return [line.split()[0] for line in lines[2:] if not line.startswith("…")]


def test_the_table_shows_the_view_of_the_messages(client: FakeClient) -> None:
    clock = Clock()
    table = live_table(client, clock)
    for row in client.sow_and_subscribe("orders", None):
        table.apply(row)
        if row.op == "snapshot_end":
            break
    table.apply(client.coming[0])
    table.apply(client.coming[3])

    lines = table.render(60, 24).plain.splitlines()

    assert lines == [
        "2 records · 2 changes · 2.0 changes/s · bookmark epoch.6",
        "key  expires  id     x",
        "  1  never     1",
        "  3  in 1.0s   3  1.50",
    ]


def filled(table: LiveTable, client: FakeClient, *records: Mapping[str, object]) -> None:
    """Has the table show these records."""
    client.add("orders", records=list(map(dict, records)))
    for change in client.sow_and_subscribe("orders", None):
        table.apply(change)
        if change.op == "snapshot_end":
            return


def ordered(client: FakeClient, *order: Term, top: int | None = None, select: tuple[str, ...] = ()) -> LiveTable:
    asked: Client = client  # type: ignore[assignment]  # the fake stands in for it
    return LiveTable(
        TopicForms(asked),
        several_topics=False,
        order=order,
        top=top,
        select=select,
        clock=Clock(),
        now_micros=lambda: NOW_MICROS,
    )


def test_the_table_knows_the_fields_of_its_order_that_no_record_has(client: FakeClient) -> None:
    """For a remark (rule Q10): the server does not know that order."""
    table = ordered(client, Term("/prcie", True), Term("/id", False), Term("@version", False), Term("/a/b", False))
    assert table.absent_fields == []
    filled(table, client, {"id": 1, "a": {"c": 1}}, {"id": 2, "a": {"b": 0}})
    assert table.absent_fields == ["/prcie"]


def test_keys_are_sorted_as_numbers_where_they_are_numbers(client: FakeClient) -> None:
    """10 came before 9."""
    table = live_table(client, Clock())
    filled(table, client, *[{"id": one} for one in (10, 9, "b", 100, -1, "a", 1.5)])
    assert shown_keys(table, 24) == ["-1", "1.5", "9", "10", "100", "a", "b"]


def test_the_rows_follow_the_order_that_was_asked_for(client: FakeClient) -> None:
    """Missing values come last, either way; a change moves its row."""
    table = ordered(client, Term("/px", descending=True), Term("/name"), top=4)
    rows = [(1, 9, "b"), (2, 10, "a"), (3, None, "c"), (4, 9, "a"), (5, "much", "a")]
    filled(table, client, *[{"id": one, "px": px, "name": name} for one, px, name in rows])
    assert shown_keys(table, 24) == ["5", "2", "4", "1"]
    assert table.render(80, 24).plain.splitlines()[-1] == "… and 1 more"
    table.apply(Change("put", record=client.record("orders", "1", b'{"id":1,"px":11,"name":"b"}'), topic="orders"))
    assert shown_keys(table, 24) == ["5", "1", "2", "4"]
    table.apply(Change("oof", "deleted", None, client.record("orders", "5", b"{}"), None, "orders"))
    assert shown_keys(table, 24) == ["1", "2", "4", "3"]


@pytest.mark.parametrize("seed", range(3))
def test_the_first_rows_are_shown_whatever_moves(
    client: FakeClient, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sow_cli.live._WINDOW_MAX", 8)
    chance = random.Random(seed)
    table = ordered(client, Term("/n"))
    table.apply(Change("snapshot_end", topic="orders"))
    there: dict[str, int] = {}
    for step in range(300):
        key, value = f"{chance.randrange(30):02}", chance.randrange(100)
        record = client.record("orders", key, b'{"n":%d}' % value)
        if chance.random() < (0.3 if step // 100 % 2 else 0.8):
            table.apply(Change("put", record=record, topic="orders"))
            there[key] = value
        else:
            table.apply(Change("oof", "deleted", None, record, None, "orders"))
            there.pop(key, None)
        if chance.random() < 0.3:
            assert shown_keys(table, 9) == sorted(there, key=lambda one: (there[one], one))[:5]


def test_only_the_fields_that_were_asked_for_are_columns(client: FakeClient) -> None:
    table = ordered(client, select=("/px/bid", "/id"))
    filled(table, client, {"id": 1, "px": {"bid": 2.5}}, {"id": 2})
    assert table.render(80, 24).plain.splitlines()[1:] == [
        "key  expires  /px/bid  id",
        "  1  never        2.5   1",
        "  2  never              2",
    ]


def test_the_table_says_since_when_it_is_disconnected(client: FakeClient) -> None:
    """The remarks about an interruption stood above the table, for ever."""
    table = live_table(client, Clock())
    filled(table, client, {"id": 1})
    table.interrupted(Unavailable("gone", reason="STREAM_CUT"))
    assert (
        table.render(80, 24).plain.splitlines()[0] == "disconnected since 17:46:40Z (STREAM_CUT) · 1 record as of then"
    )
    table.interrupted(None)
    assert table.render(80, 24).plain.startswith("1 record · ")


def test_a_bookmark_with_the_marks_of_other_instances_can_be_copied(client: FakeClient) -> None:
    """The table cut it off, and a shell takes its semicolons for the ends of commands (rule F6)."""
    marked = "epoch.6;t=5;other.7"
    client.coming = [Change("put", None, client.record("orders", "1", b'{"id":1}'), None, marked, "orders")]
    table = live_table(client, Clock())
    for row in client.sow_and_subscribe("orders", None):
        table.apply(row)
        if row.op == "snapshot_end":
            break
    table.apply(client.coming[-1])

    assert table.render(80, 24).plain.splitlines()[0].endswith(" · bookmark epoch.6")
    done = run(client, "orders", "--count", "1", "--format", "table")
    assert done.stderr.endswith(f"; bookmark '{marked}'\n")


def test_changed_rows_are_highlighted_for_a_while(client: FakeClient) -> None:
    clock = Clock()
    table = live_table(client, clock)
    table.apply(Change("snapshot_end", topic="orders"))
    table.apply(client.coming[0])
    clock.seconds += HIGHLIGHT_SECONDS - 0.1
    fresh = [str(span.style) for span in table.render(60, 24).spans]
    clock.seconds += 0.2
    stale = [str(span.style) for span in table.render(60, 24).spans]

    assert "bold green" in fresh
    assert "bold green" not in stale


def test_the_rate_is_that_of_the_last_seconds(client: FakeClient) -> None:
    clock = Clock()
    table = live_table(client, clock)
    table.apply(Change("snapshot_end", topic="orders"))
    for _ in range(20):
        table.apply(client.coming[0])
        clock.seconds += 0.5

    assert "20 changes · 2.0 changes/s" in table.render(80, 24).plain
    clock.seconds += 60
    assert "20 changes · 0.0 changes/s" in table.render(80, 24).plain


def test_a_resync_empties_the_table_until_the_new_snapshot_is_in(client: FakeClient) -> None:
    table = live_table(client, Clock())
    table.apply(Change("snapshot_end", topic="orders"))
    table.apply(client.coming[0])
    table.apply(Change("resync", topic="orders"))

    assert table.render(60, 24).plain == "reading the snapshot: 0 records"


def test_fields_beyond_the_bound_have_no_column_and_are_told(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: one record with many fields went beyond the bound, and nobody was told of those that came later."""
    monkeypatch.setattr("sow_cli.columns.GROWN_MAX", 3)
    client.coming = [Change("put", record=client.record("orders", "1", b'{"id":1,"a":2,"b":3,"c":4}'), topic="orders")]
    lines = run(client, "orders", "--count", "1", "--format", "table")
    assert lines.stdout.splitlines()[0].split()[-3:] == ["id", "a", "b"]
    assert "fields that have no column: c; see --select" in lines.stderr.splitlines()
    table = live_table(client, Clock())
    filled(table, client, {"id": 1, "a": 2, "b": 3, "c": 4, "/d": 5})
    assert table.render(80, 24).plain.splitlines()[1].split() == ["key", "expires", "id", "a", "b"]
    assert table.left_out == ["c", "/[/d]"]


def test_a_small_terminal_is_not_overrun(client: FakeClient) -> None:
    client.add("wide", records=[{"id": "ü" * 200 + str(number), "text": "漢" * 100} for number in range(9)])
    table = live_table(client, Clock(), several_topics=True)
    for change in client.sow_and_subscribe(None, None):
        table.apply(change)
        if change.op == "snapshot_end":
            break

    for width, height in ((80, 8), (20, 4), (5, 2), (1, 1)):
        text = table.render(width, height)
        lines = text.plain.splitlines()
        assert len(lines) <= max(1, height - 1)
        assert all(cell_len(line) <= width for line in lines)


@pytest.mark.parametrize("seed", range(5))
def test_the_first_keys_are_shown_whatever_comes_and_goes(
    client: FakeClient, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sow_cli.live._WINDOW_MAX", 8)
    chance = random.Random(seed)
    table = live_table(client, Clock())
    table.apply(Change("snapshot_end", topic="orders"))
    there: set[str] = set()
    for step in range(400):
        key = f"{chance.randrange(40):02}"
        record = client.record("orders", key, b"{}")
        if chance.random() < (0.3 if step // 100 % 2 else 0.7):
            table.apply(Change("put", record=record, topic="orders"))
            there.add(key)
        else:
            table.apply(Change("oof", "deleted", None, record, None, "orders"))
            there.discard(key)
        if chance.random() < 0.3:
            assert shown_keys(table, 9) == sorted(there)[:5]
            assert table.render(80, 9).plain.startswith("1 record ·" if len(there) == 1 else f"{len(there)} records ·")


# ---- durable subscriptions ----


def test_a_durable_subscription_acknowledges_printed_changes(client: FakeClient) -> None:
    result = run(client, "orders", "/id > 1", "--durable", "billing", "--oof", "--from", "earliest", "--count", "4")

    assert result.exit_code == 0, result.output
    assert [one["bookmark"] for one in rows(result) if "bookmark" in one] == ["epoch.3", "epoch.5", "epoch.6"]
    assert client.acknowledged == ["epoch.3", "epoch.5", "epoch.6"]
    assert client.arguments_of("durable") == {
        "topic": "orders",
        "name": "billing",
        "filter": "/id > 1",
        "start": "earliest",
        "force": False,
        "oof": True,
        "changes": False,
        "select": None,
    }
    run(client, "orders", "--durable", "billing", "--force", "--changes", "--count", "1")
    asked = client.arguments_of("durable")
    assert (asked["force"], asked["changes"], "replicated" in asked) == (True, True, False)
    run(client, "orders", "--durable", "billing", "--replicated", "--count", "1")
    assert client.arguments_of("durable")["replicated"]


def test_without_acknowledgements_all_comes_again(client: FakeClient) -> None:
    result = run(client, "orders", "--durable", "billing", "--no-ack", "--for", "100ms")

    assert result.exit_code == 0, result.output
    assert len(rows(result)) == len(client.coming)
    assert client.acknowledged == []


def test_a_gap_is_a_line_of_its_own_in_each_format(client: FakeClient) -> None:
    client.gaps = [Gap("evicted", "epoch.1", "epoch.2", 17), Gap("reset", "", "epoch.2", None)]
    arguments = ("orders", "--durable", "billing", "--count", "1")

    told = rows(run(client, *arguments))
    listed = json.loads(run(client, *arguments, "--format", "json").stdout)
    written = list(csv.DictReader(io.StringIO(run(client, *arguments, "--format", "csv").stdout)))
    table = run(client, *arguments, "--format", "table")

    evicted = {
        "op": "gap",
        "reason": "evicted",
        "topic": "orders",
        "after": "epoch.1",
        "entries": 17,
        "bookmark": "epoch.2",
    }
    assert told[0] == evicted
    assert told[1] == {"op": "gap", "reason": "reset", "topic": "orders", "bookmark": "epoch.2"}
    assert told[2]["op"] == "put"
    assert [one["op"] for one in listed] == ["gap", "gap", "put"]
    assert [(one["op"], one["reason"], one["bookmark"]) for one in written][:1] == [("gap", "evicted", "epoch.2")]
    assert "after" not in written[0]
    assert "gap  evicted: 17 entries before filtering up to epoch.2" in table.stdout
    assert "gap  reset: begins anew" in table.stdout
    assert table.stderr == "1 message; bookmark epoch.3\n"
