"""Long results on a terminal: the pager of the user, and where there is none."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("no pseudo-terminals", allow_module_level=True)

from tests.support.servers.forked_commands import commands
from tests.support.servers.screens import CTRL_D, OnScreen
from tests.support.servers.terminals import FAKES, SECONDS_MAX, Terminal, plain, start

LONG = ("query", "many", "--keys-only", "--format", "csv", "--top", "200")
Run = Callable[..., Terminal]


@pytest.fixture
def run() -> Iterator[Run]:
    opened: list[Terminal] = []

    def run(*arguments: str, **variables: str) -> Terminal:
        opened.append(Terminal(*arguments, **variables))
        return opened[-1]

    yield run
    for terminal in opened:
        terminal.close()


@pytest.fixture
def pager(tmp_path: Path) -> Path:
    """A pager that keeps in a file what it gets, and shows it between two lines of its own."""
    program = tmp_path / "pager"
    program.write_text(f"#!/bin/sh\necho PAGER\ntee '{tmp_path}/seen'\necho \"$* $LESS\"\n")
    program.chmod(0o700)
    return program


def ended(terminal: Terminal) -> tuple[int, str]:
    text = plain(terminal.read_until(None)).replace("\r\n", "\n")
    return terminal.process.wait(SECONDS_MAX), text


def test_a_long_result_goes_through_the_pager_and_remarks_come_behind_it(run: Run, pager: Path) -> None:
    code, text = ended(run("query", "many", "--top", "100", SOW_PAGER=f"{pager} 'an argument'", PAGER="false"))

    first, heading, *rows, own, remark = text.splitlines()
    assert (code, first, own) == (0, "PAGER", "an argument FRX")
    assert heading.split() == ["key", "expires", "id", "text"]
    assert len(rows) == 100
    assert remark.startswith("100 of 3,000 records, as of "), "on the terminal, and not in the pager's text"
    assert plain((pager.parent / "seen").read_text()).splitlines() == [heading, *rows]


@pytest.mark.parametrize("arguments", [("--no-pager", *LONG), (*LONG, "--no-pager")], ids=["in front", "behind"])
def test_no_pager_where_none_is_wanted(run: Run, pager: Path, arguments: tuple[str, ...]) -> None:
    _, text = ended(run(*arguments, SOW_PAGER=str(pager)))
    assert "PAGER" not in text
    assert len(text.splitlines()) == 201


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        (("query", "orders"), {}),
        (LONG, {"SOW_PAGER": "cat"}),
        (LONG, {"SOW_PAGER": ""}),
        (("subscribe", "many", "--sow", "--format", "ndjson", "--count", "200"), {}),
        (("subscribe", "many", "--sow", "--format", "table", "--count", "200"), {}),
    ],
    ids=["a short result", "cat", "empty", "a stream", "a stream as lines"],
)
def test_results_that_are_not_paged(
    run: Run, pager: Path, arguments: tuple[str, ...], variables: dict[str, str]
) -> None:
    code, text = ended(run(*arguments, **{"SOW_PAGER": str(pager), "PAGER": str(pager)} | variables))
    assert (code, "PAGER" in text, (pager.parent / "seen").exists()) == (0, False, False)


def test_a_pipe_gets_no_pager(pager: Path) -> None:
    process = start(
        *LONG, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, SOW_PAGER=str(pager)
    )
    data, _ = process.communicate(timeout=SECONDS_MAX)
    assert (data.count(b"\n"), b"PAGER" in data) == (201, False)


def test_a_pager_that_is_left_early_ends_the_query_quietly(run: Run) -> None:
    code, text = ended(run("query", "many", "--format", "json", "--top", "3000", SOW_PAGER="head -n 2"))
    assert code == 0
    assert len(text.splitlines()) == 2


def test_a_pager_that_is_missing_is_told_and_the_result_is_there(run: Run) -> None:
    for variables in ({"SOW_PAGER": "no-such-pager -x"}, {"SOW_PAGER": "'no-such-pager"}):
        code, text = ended(run(*LONG, **variables))
        first, *rows = text.splitlines()
        assert (code, len(rows)) == (0, 201)
        assert first.startswith("sow: SOW_PAGER: there is no program ")
        assert first.endswith("; see --no-pager")


@pytest.mark.parametrize("content", ["", "no script", "#!/no/such/interpreter"])
def test_a_pager_that_cannot_be_started_is_told_and_the_result_is_there(run: Run, pager: Path, content: str) -> None:
    """Story: the command ended with "cannot write: Exec format error", and a part of the result."""
    pager.write_text(content)
    code, text = ended(run(*LONG, SOW_PAGER=str(pager)))
    *rows, told = text.splitlines()
    assert (code, len(rows)) == (0, 201)
    assert told.startswith(f"sow: cannot start {pager}: ")


def test_a_pager_gets_no_control_characters_of_the_data(run: Run, pager: Path) -> None:
    """X7."""
    for output_format in ("json", "table"):
        code, _ = ended(run("query", "hostile", "--format", output_format, SOW_PAGER=str(pager), LINES="1"))
        seen = re.sub(r"\x1b\[[0-9;]*m", "", (pager.parent / "seen").read_text())
        assert code == 0
        assert "x1b[2J" in seen or "u001b[2J" in seen
        assert re.findall("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", seen) == []


@pytest.mark.skipif(shutil.which("less") is None, reason="there is no less")
def test_less_is_the_pager_where_none_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PAGER", "LESS"):
        monkeypatch.delenv(name, raising=False)
    terminal = run(*LONG, SOW_PAGER="less")
    terminal.read_until(":\x1b[K")
    assert terminal.process.poll() is None
    terminal.type("q")
    code, text = ended(terminal)
    assert code == 0
    assert "Traceback" not in text


@pytest.mark.skipif(shutil.which("less") is None, reason="there is no less")
@pytest.mark.parametrize(("interrupt", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_ends_the_command_with_its_pager(run: Run, interrupt: signal.Signals, code: int) -> None:
    terminal = run("query", "many", "--format", "ndjson", "--top", "3000", SOW_PAGER="less")
    terminal.read_until(":\x1b[K")  # the command waits: less has not taken all
    terminal.process.send_signal(interrupt)
    if interrupt == signal.SIGINT:  # less goes on, as it does when it gets Ctrl-C itself
        terminal.type("q")
    assert ended(terminal)[0] == code


def test_results_in_the_shell_are_paged_also_field_by_field(pager: Path, tmp_path: Path) -> None:
    variables = {"SOW_PAGER": str(pager), "XDG_STATE_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    shell = OnScreen(str(commands().programs / FAKES), (), variables)
    try:
        shell.until("> ", last=True)
        for line, shown, paged in (
            ("query many --top 50 --keys-only", "FRX", "1045"),
            (r"count orders; query many --top 20 --keys-only \G", "20. row", "*** 20. row ***"),
        ):
            shell.type(f"{line}\r")
            shell.until(shown)
            shell.until("> ", last=True)
            assert paged in (tmp_path / "seen").read_text()
        shell.type("query many --top 50 --keys-only | wc -l\r")
        shell.until("50")
        shell.type("count orders\r")
        shell.until("3 records")
        shell.until("> ", last=True)  # before, the terminal is not the shell's
        shell.type(CTRL_D)
        assert shell.end() == 0
    finally:
        shell.close()
