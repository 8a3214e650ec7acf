"""The parts of the interactive shell and of completion, without a terminal."""

from __future__ import annotations

import io
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import NoReturn

import click
import pytest
from click.shell_completion import CompletionItem

from sow_cli import completion, interrupts, shell
from sow_cli.columns import steps
from sow_cli.command import _shell, sow
from sow_cli.completion import FUNCTIONS, KEYWORDS, METADATA, Line, Names, Values, completions, split
from sow_cli.context_files import ContextFiles
from sow_cli.session import Session
from sow_cli.shell_lines import tokens
from sow_cli.wide import WideLines, block
from sow_client import Unavailable
from sow_server.filters import parse, tree
from sow_server.filters.tree import Function, MetadataName, walk
from tests.support.fakes.fake_client import FakeClient

GRAMMAR = Path(__file__).parents[3] / "sow_server" / "filters" / "grammar.lark"


class Connected:
    """Connects to fakes, and counts them."""

    def __init__(self) -> None:
        self.made: list[FakeClient] = []

    def __call__(self, _session: Session) -> FakeClient:
        client = FakeClient()
        client.add("orders", records=[{"id": 1, "price": {"bid": 1}, "odd name": 2}])
        client.add("quotes")
        self.made.append(client)
        return client


def closed(client: FakeClient) -> int:
    return [name for name, _ in client.calls].count("close")


# ---- one connection ----


def test_commands_of_a_shell_share_the_connection_of_their_session() -> None:
    connect = Connected()
    here, there = Session("a", None, connect), Session("b", None, connect)  # type: ignore[arg-type]  # fakes
    with shell.Clients(connect) as clients:  # type: ignore[arg-type]  # fakes
        for session in (here, there, here):
            with clients(session) as client:
                assert client.topics()
        assert len(connect.made) == 2
        assert [closed(client) for client in connect.made] == [0, 0]
    assert [closed(client) for client in connect.made] == [1, 1]


def test_an_interrupted_command_takes_its_connection_along_and_a_refused_one_does_not() -> None:
    connect = Connected()
    session = Session("a", None, connect)  # type: ignore[arg-type]  # fakes
    with shell.Clients(connect) as clients:  # type: ignore[arg-type]  # fakes
        for raised, made in (
            (Unavailable("gone", reason="UNREACHABLE"), 1),
            (click.exceptions.Exit(1), 1),
            (KeyboardInterrupt(), 2),
        ):
            with pytest.raises(type(raised)), clients(session):
                raise raised
            with clients(session) as client:
                assert client.topics()
            assert len(connect.made) == made
        assert closed(connect.made[0]) == 1


def test_a_shell_keeps_a_bounded_number_of_connections() -> None:
    connect = Connected()
    with shell.Clients(connect) as clients:  # type: ignore[arg-type]  # fakes
        for number in range(shell.CLIENTS_MAX + 1):
            with clients(Session(f"a{number}", None, connect)):  # type: ignore[arg-type]  # fakes
                pass
        assert [closed(client) for client in connect.made] == [1] + [0] * shell.CLIENTS_MAX


def test_a_shell_inside_a_shell_is_wrong_usage() -> None:
    with shell.Clients(Connected()) as clients, pytest.raises(click.UsageError):  # type: ignore[arg-type]  # fakes
        shell.run_shell(click.Context(sow), sow, clients)


def test_without_prompt_toolkit_the_shell_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "sow_cli.shell")
    monkeypatch.setitem(sys.modules, "prompt_toolkit", None)
    with pytest.raises(click.UsageError) as caught:
        _shell(click.Context(sow))
    assert "pip install prompt_toolkit" in caught.value.message


# ---- completion ----


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", Line((), "", 0, "")),
        ("get", Line((), "get", 0, "")),
        ("get ", Line(("get",), "", 4, "")),
        ("get  or", Line(("get",), "or", 5, "")),
        ("query orders '/a > 1 AN", Line(("query", "orders"), "/a > 1 AN", 13, "'")),
        ('query orders "/a = \\"x', Line(("query", "orders"), '/a = "x', 13, '"')),
        ("query orders '/a' --t", Line(("query", "orders", "/a"), "--t", 18, "")),
        ("a\\ b c", Line(("a b",), "c", 5, "")),
        ("a''", Line((), "a", 0, "")),
    ],
)
def test_a_line_is_split_as_a_shell_does_it(text: str, line: Line) -> None:
    assert split(text) == line


@pytest.fixture(scope="module")
def prepared() -> click.Group:
    context = click.Context(sow)
    values = Values(Names())
    values.prepare(sow)
    for name in sow.list_commands(context):
        command = sow.get_command(context, name)
        assert command is not None
        values.prepare(command)
    return sow


@pytest.mark.parametrize(
    ("words", "last", "found"),
    [
        ((), "que", ["query"]),
        (("topic",), "des", ["describe"]),
        (("get",), "", ["orders", "quotes"]),
        (("subscribe",), "or", ["orders"]),
        (("topic", "describe"), "q", ["quotes"]),
        (("topic", "create"), "q", []),
        (("query", "orders"), "/p", ["/price", "/price/bid"]),
        (("query", "orders"), "/[", ["/[odd name]"]),
        (("query", "orders"), "@pub", ["@publish_time"]),
        (("query", "orders"), "/price > 1 o", ["/price > 1 OR"]),
        (("query", "orders"), "/price > 1 AND (/id", ["/price > 1 AND (/id"]),
        (("delete", "orders", "--filter"), "/i", ["/id"]),
        (("query", "orders", "--select"), "/id,/pr", ["/id,/price", "/id,/price/bid"]),
        (("query", "orders", "--order-by"), "/id DESC, /i", ["/id DESC, /id"]),
        (("query", "orders", "--format"), "j", ["json"]),
        (("query", "orders"), "--ser", ["--server"]),
        (("query", "missing"), "/", []),
        (("--context", "missing", "get"), "o", []),
    ],
)
def test_completions(prepared: click.Group, words: tuple[str, ...], last: str, found: list[str]) -> None:
    connect = Connected()
    assert [item.value for item in completions(prepared, connect, words, last)] == found  # type: ignore[arg-type]  # fakes


def test_names_that_a_terminal_would_act_on_are_not_offered(prepared: click.Group) -> None:
    """X7: bash writes them as they are."""

    def connect(_session: Session) -> FakeClient:
        client = FakeClient()
        client.add("or\x1b[2J", records=[{"id": 1}])
        client.add("orders", records=[{"id": 1, "\u009b31m": 1, "i\n": 2}])
        return client

    def found(*words: str) -> list[str]:
        return [item.value for item in completions(prepared, connect, words[:-1], words[-1])]  # type: ignore[arg-type]  # fakes

    assert found("get", "or") == ["orders"]
    assert found("query", "orders", "/") == ["/id"]


@pytest.mark.parametrize("name", ["a]b/c", "a\\b", "[a", "first-name", "@key", "é", "a.b:c$#"])
def test_a_field_is_offered_as_filters_and_options_take_it(prepared: click.Group, name: str) -> None:
    """Story: `/[a]b/c]` was offered for the field `a]b/c`, and then refused as a path."""

    def connect(_session: Session) -> FakeClient:
        client = FakeClient()
        client.add("orders", records=[{"id": 1, name: 1}])
        return client

    found = completions(prepared, connect, ("query", "orders", "--select"), "/")  # type: ignore[arg-type]  # fakes
    (offered,) = [item.value for item in found if item.value != "/id"]
    assert steps(offered) == (name,)
    assert [one.steps for one in walk(parse(f"{offered} = 1")) if isinstance(one, tree.Path)] == [(name,)]


HOSTILE = (
    "x$(touch made)",
    "x`touch made`",
    "x; touch made; ",
    'x" | touch made; "',
    "x' | touch made; '",
    "x\\",
    "x!:",
)


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize("quote", ["", '"', "'"])
@pytest.mark.parametrize("name", HOSTILE)
def test_bash_gets_each_field_as_a_word(
    prepared: click.Group, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, quote: str
) -> None:
    """Story: `"/[x` and Tab made `"/[x$(touch made)]"` of a record's field, and Enter ran it."""

    def connect(_session: Session) -> FakeClient:
        client = FakeClient()
        client.add("orders", records=[{"id": 1, name: 1}])
        return client

    monkeypatch.setenv("COMP_WORDS", f"sow query orders --select {quote}/[x")
    root = completion._Bash(prepared, {"obj": connect}, "sow", "_SOW_COMPLETE")
    (found,) = root.get_completions(*root.get_completion_args())
    ran = subprocess.run(
        ["bash", "-c", f"printf %s {quote}{found.value}{quote}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert steps(ran.stdout) == (name,)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("quote", ["", '"', "'"])
@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("name", HOSTILE)
def test_the_shell_gets_each_field_as_a_word(name: str, quote: str, goes_on: bool) -> None:
    """Story: the rest of such a name stood behind the quotation mark, and `/bin/sh` got it."""
    written = shell._written(CompletionItem(f"/[{name}]", goes_on=goes_on), quote)
    (word,) = tokens(written)
    assert word.text == f"/[{name}]"


def test_names_of_contexts_are_completed(
    prepared: click.Group, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    ContextFiles({"XDG_CONFIG_HOME": str(tmp_path)}).write("prod", {"server": "a"})
    for words in (("context", "use"), ("context", "remove"), ("--context",), ("get", "--context")):
        assert [item.value for item in completions(prepared, None, words, "p")] == ["prod"]
    assert completions(prepared, None, ("context", "add"), "p") == []


def test_a_command_that_is_completed_runs_as_before(prepared: click.Group) -> None:
    connect = Connected()
    code = prepared.main(
        ["count", "orders", "--format", "ndjson"], prog_name="sow", standalone_mode=False, obj=connect
    )  # fmt: skip
    assert code in (0, None)


def test_keywords_functions_and_metadata_are_those_of_the_grammar() -> None:
    text = GRAMMAR.read_text()
    reserved = re.search(r"WORD: /\(\?!\(\?:([A-Z|]+)\)", text)
    assert reserved is not None
    assert {word for keyword in KEYWORDS for word in keyword.split()} - {"WITH"} == set(reserved[1].split("|"))
    assert sorted(FUNCTIONS) == sorted(f"{function.value}(" for function in Function)
    assert set(METADATA) == {f"@{name.value}" for name in MetadataName}
    parse("/a BEGINS WITH 'x' AND /b IS NOT NULL")


def test_names_are_asked_for_once_in_a_while_and_nobody_waits_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion, "NAMES_SECONDS_MAX", 0.01)
    now = [0.0]
    names = Names(lambda: now[0])
    answer, asked = threading.Event(), []

    def slow() -> list[str]:
        asked.append(threading.current_thread())
        answer.wait(10)
        return ["orders"]

    assert names.get(("topics",), slow) == (), "it takes too long"
    answer.set()
    asked[0].join(10)
    assert names.get(("topics",), slow) == ["orders"], "it has come in the meantime"
    assert len(asked) == 1
    now[0] = completion.REMEMBERED_SECONDS
    names.get(("topics",), slow)
    assert len(asked) == 2

    def fails() -> list[str]:
        raise Unavailable("nobody there", reason="UNREACHABLE")

    monkeypatch.setattr(completion, "NAMES_SECONDS_MAX", 10)
    assert names.get(("fields",), fails) == ()


# ---- wide results ----


def test_each_line_becomes_a_block_and_other_text_stays() -> None:
    """X7: no control character of the data."""
    out = io.BytesIO()
    wide = WideLines(out)
    wide.write(b'{"topic":"orders","publish_time_micros":0,"payload":{"id":1,"a":{"b":[1,2]},"t":"\\u001b[2J"}}\n{"x":')
    wide.write(b'null,"y":[{"a":1},{"a":2}]}\nno records\n{')
    wide.finish()
    stars = "*" * 27
    assert out.getvalue().decode().splitlines() == [
        f"{stars} 1. row {stars}",
        "       topic: orders",
        "publish_time: 1970-01-01T00:00:00.000Z",
        "         /id: 1",
        "        /a/b: [1,2]",
        "          /t: \\x1b[2J",
        f"{stars} 2. row {stars}",
        "   x: null",
        'y[0]: {"a":1}',
        'y[1]: {"a":2}',
        "no records",
        "{",
    ]


@pytest.mark.parametrize(
    ("name", "is_time"),
    [
        ("time_micros", True),
        ("publish_time_micros", True),
        ("since_micros", True),
        ("as_of_micros", True),
        ("before_micros", True),
        ("elapsed_micros", False),
        ("lag_micros", False),
        ("server_cpu_micros", False),
        ("oldest_unacknowledged_age_micros", False),
    ],
)
def test_times_are_shown_as_times_and_lengths_as_they_are(name: str, is_time: bool) -> None:
    """Story: `time_micros` of a history and `since_micros` of sessions stayed numbers."""
    shown = block({name: 0}, 1).splitlines()[1]
    assert shown == (f"{name.removesuffix('_micros')}: 1970-01-01T00:00:00.000Z" if is_time else f"{name}: 0")


# ---- history ----


def test_a_long_history_is_cut_at_the_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "HISTORY_BYTES_MAX", 200)
    path = tmp_path / "sow" / "history"
    path.parent.mkdir()
    path.write_text("".join(f"\n# 2026-01-01\n+count {number:04}\n" for number in range(100)))
    history = shell._history({"XDG_STATE_HOME": str(tmp_path)})
    kept = list(history.load_history_strings())
    assert kept[0] == "count 0099"
    assert kept == [f"count {number:04}" for number in range(99, 99 - len(kept), -1)]
    assert 1 < len(kept) < 10


def test_without_a_place_for_a_history_the_shell_still_has_one(tmp_path: Path) -> None:
    (tmp_path / "sow").write_text("a file")
    history = shell._history({"XDG_STATE_HOME": str(tmp_path)})
    history.append_string("count orders")
    assert history.get_strings() == ["count orders"]


# ---- signals ----


def test_no_exception_comes_into_the_event_loop_of_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: one SIGTERM in fifty left the terminal without an echo."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    meanwhile: list[object] = []

    class Prompt:
        def __init__(self, **_options: object) -> None:
            pass

        def prompt(self, _text: str) -> str:
            meanwhile.extend(map(signal.getsignal, numbers))
            raise EOFError

    def unreachable(_session: Session) -> NoReturn:
        raise Unavailable("gone", reason="UNREACHABLE")

    monkeypatch.setattr(shell, "PromptSession", Prompt)
    before = [signal.signal(number, interrupts._raise) for number in numbers]
    try:
        with shell.Clients(unreachable) as clients:
            assert shell.Shell(sow, [], clients).run() == 0
        assert list(map(signal.getsignal, numbers)) == [interrupts._raise] * 2
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    assert interrupts._raise not in meanwhile
    assert len(meanwhile) == 2
