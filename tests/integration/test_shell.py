"""The interactive shell of `sow`, and completion in bash, on a terminal with a real server."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.servers.forked_commands import sow
from tests.support.servers.screens import CTRL_C, CTRL_D, PYTHONPATH, TAB, UP, OnScreen, sow_on_screen
from tests.support.servers.server import ServerProcess, free_port

WAIT_SECONDS: Final = 60
Begin = Callable[..., OnScreen]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("shell")
    with ServerProcess(folder, "[topics.orders]\nkey = ['/id']\n[topics.quotes]\nkey = ['/symbol']\n") as made:
        with made.client() as client:
            for number in range(3):
                client.publish("orders", {"id": number, "price": {"bid": number + 0.5}, "symbol": "IBM"})
        yield made


@pytest.fixture
def begin(server: ServerProcess, tmp_path: Path) -> Iterator[Begin]:
    """Begins a shell, in the same home as the others of the test."""
    begun: list[OnScreen] = []

    def begin(*arguments: str, address: str = server.address) -> OnScreen:
        variables = {
            "SOW_SERVER": address,
            "XDG_STATE_HOME": str(tmp_path),
            "XDG_CONFIG_HOME": str(tmp_path / "config"),
        }
        begun.append(sow_on_screen(*arguments, variables=variables))
        return begun[-1]

    yield begin
    for shell in begun:
        shell.close()


def test_commands_run_one_after_the_other_until_ctrl_d(server: ServerProcess, begin: Begin) -> None:
    shell = begin()
    greeting = shell.until(f"{server.address}> ", last=True)
    assert f"{server.address}" in greeting[0]
    assert greeting[0].startswith("sow 0.")
    assert "Ctrl-D leaves" in greeting[1]
    shell.type("count orders\r")
    shell.until("3 records")
    shell.until("> ", last=True)
    shell.type("sow get orders 7\r")
    shell.until("there is no live record '7'")
    shell.type("query orders '/price >'\r")
    shell.until("FILTER_INVALID")
    shell.type("nonsense\r")
    shell.until("No such command 'nonsense'")
    shell.type("query orders /price > 9\r")
    shell.until("a filter stands in quotation marks; a file of this name is meant by > ./NAME at 20")
    shell.type("count quotes\r")
    shell.until("0 records")
    shell.until("> ", last=True)
    shell.type(CTRL_D)
    assert shell.end() == 0


def test_tab_completes_commands_options_topics_fields_and_words_of_filters(begin: Begin) -> None:
    shell = begin()
    shell.until("> ", last=True)
    for typed, shown in (
        ("cou", "> count"),
        (" ord", "> count orders"),
        (' "/sy', '> count orders "/symbol'),
        (" = 'IBM' AN", "> count orders \"/symbol = 'IBM' AND"),
        (" /price/b", "> count orders \"/symbol = 'IBM' AND /price/bid"),
        (' > 1" --form', "> count orders \"/symbol = 'IBM' AND /price/bid > 1\" --format"),
        (" nd", "> count orders \"/symbol = 'IBM' AND /price/bid > 1\" --format ndjson"),
    ):
        shell.type(typed + TAB)
        shell.until(shown, last=True)
    shell.type("\r")
    shell.until('{"topic":"orders","count":2}')
    shell.until("> ", last=True)
    shell.type("topic describe q" + TAB)
    shell.until("> topic describe quotes", last=True)


def test_ctrl_c_ends_the_command_and_not_the_shell(begin: Begin) -> None:
    shell = begin()
    shell.until("> ", last=True)
    shell.type("subscribe orders --sow\r")
    shell.until("3 records · 0 changes")  # a live table
    shell.type(CTRL_C)
    shell.until("> ", last=True)
    shell.type("count orders")
    shell.until("> count orders", last=True)
    shell.type(CTRL_C)  # at the prompt it empties the line
    shell.until("> ", last=True)
    shell.type("count quotes\r")
    shell.until("0 records")
    assert "count  3 records" not in shell.lines
    shell.type("quit\r")
    assert shell.end() == 0


def test_a_line_goes_on_until_its_quotation_marks_and_brackets_close(begin: Begin) -> None:
    shell = begin()
    shell.until("> ", last=True)
    shell.type("query orders '/id = 1\r")
    shell.until("...", last=True)
    shell.type(CTRL_C)  # empties all of it
    shell.until(":", last=True)
    shell.type('publish quotes --data {"symbol": "A;B>C",\r')
    shell.until("...", last=True)
    shell.type('"a": ["|"\r')
    shell.type("]}; get quotes 'A;B>C' --raw; delete quotes \\\r")
    shell.until("... ", last=True)
    shell.type("'A;B>C'; count quotes\r")
    shell.until('{"symbol": "A;B>C",')
    shell.until('"a": ["|"')
    shell.until("0 records")
    shell.until("> ", last=True)
    shell.type(UP)  # all lines come back as one
    shell.until("count quotes", last=True)
    assert any(line.endswith('{"symbol": "A;B>C",') for line in shell.lines[-6:])


def test_output_goes_to_programs_and_files_as_in_a_pipe(begin: Begin, tmp_path: Path) -> None:
    shell = begin()
    shell.until("> ", last=True)
    shell.type("query orders --keys-only | cut -c 1-26 | head -n 2; count quotes\r")
    shell.until("0 records")
    assert shell.lines.count('{"topic":"orders","key":"0') == 1
    assert '{"topic":"orders","key":"2' not in shell.lines
    shell.type(f"query orders --format csv > {tmp_path}/out; count nothing\r")
    shell.until("TOPIC_NOT_FOUND")
    shell.until("> ", last=True)
    assert len((tmp_path / "out").read_text().splitlines()) == 4
    shell.type("cou" + TAB + " qu" + TAB + "; count or" + TAB)
    shell.until("; count orders", last=True)
    shell.type("\r")
    shell.until("3 records")


def test_the_shell_goes_on_after_a_command_whose_file_cannot_be_written(begin: Begin, tmp_path: Path) -> None:
    """Story: the output of the shell went to /dev/null from then on."""
    (tmp_path / "bad.ndjson").write_bytes(b"{bad\n")
    shell = begin()
    shell.until("> ", last=True)
    shell.type(f"publish orders {tmp_path}/bad.ndjson --errors /dev/full\r")
    shell.until("cannot write: No space left on device")
    shell.until("> ", last=True)
    shell.type("count orders\r")
    shell.until("3 records")


def test_backslash_g_shows_a_line_for_each_field(begin: Begin) -> None:
    shell = begin()
    shell.until("> ", last=True)
    shell.type("query orders --top 2 \\G\r")
    shell.until("2. row")
    lines = shell.until("> ", last=True)
    stars = "*" * 27
    first = lines.index(f"{stars} 1. row {stars}")
    names = [line.partition(":")[0].strip() for line in lines[first + 1 :]]
    assert names[:9] == [
        "topic", "key", "version", "publish_time", "origin", "sequence", "/id", "/price/bid", "/symbol"
    ]  # fmt: skip
    assert f"{stars} 2. row {stars}" in lines
    assert any(line.strip().startswith("publish_time: 20") and line.endswith("Z") for line in lines)


def test_lines_are_remembered_for_the_next_shell_in_a_private_file(begin: Begin, tmp_path: Path) -> None:
    shell = begin()
    shell.until("> ", last=True)
    shell.type("count orders\r")
    shell.until("3 records")
    shell.until("> ", last=True)
    shell.type(CTRL_D)
    assert shell.end() == 0
    again = begin()
    again.until("> ", last=True)
    again.type(UP)
    again.until("> count orders", last=True)
    assert stat.S_IMODE((tmp_path / "sow" / "history").stat().st_mode) == 0o600


def test_options_of_the_shell_count_for_its_commands_and_a_context_can_be_changed_in_it(
    server: ServerProcess, begin: Begin
) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    shell = begin("--server", server.address, address=nobody)
    shell.until(f"{server.address}> ", last=True)
    shell.type("count orders\r")
    shell.until("3 records")
    shell.until("> ", last=True)
    shell.type(CTRL_D)
    assert shell.end() == 0
    other = begin(address="")
    other.until("127.0.0.1:7450> ", last=True)
    other.type(f"context add here --server {server.address} --use\r")
    other.until(f"{server.address}> ", last=True)
    other.type("count orders\r")
    other.until("3 records")


def test_a_shell_begins_without_a_server(begin: Begin) -> None:
    shell = begin(address=f"127.0.0.1:{free_port()}")
    assert "server" in shell.until("> ", last=True)[0]
    shell.type("count ord" + TAB + "\r")
    shell.until("UNREACHABLE")
    shell.until("> ", last=True)
    shell.type(CTRL_D)
    assert shell.end() == 0


def test_sigterm_leaves_the_terminal_in_order(begin: Begin) -> None:
    shell = begin()
    before = termios.tcgetattr(shell.process.child_fd)
    shell.until("> ", last=True)
    assert not termios.tcgetattr(shell.process.child_fd)[3] & termios.ECHO, "the prompt reads single keys"
    shell.process.kill(signal.SIGTERM)
    assert shell.end() == 143
    assert termios.tcgetattr(shell.process.child_fd)[3] & termios.ECHO == before[3] & termios.ECHO


def test_bash_completes_topics(server: ServerProcess, tmp_path: Path) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    program = tmp_path / "sow"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m sow_cli "$@"\n')
    program.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    terminal = OnScreen(bash, ["--norc", "--noprofile"], {"SOW_SERVER": server.address, "PATH": path, "PS1": "bash> "})
    try:
        terminal.until("bash> ", last=True)
        terminal.type("bind 'set enable-bracketed-paste off'; eval \"$(sow completion bash)\"; echo ready$((1))\r")
        terminal.until("ready1")
        terminal.until("bash> ", last=True)
        terminal.type("sow get ord" + TAB)
        terminal.until("sow get orders", last=True)
        terminal.type("0 --format ndjson\r")
        terminal.until('"key":"0"')
        terminal.until("bash> ", last=True)
        nobody = f"127.0.0.1:{free_port()}"
        terminal.type(f"export SOW_SERVER={nobody}\r")
        terminal.until("bash> ", last=True)
        terminal.type(f"sow --server {server.address} --prefer=ra{TAB}")
        terminal.until("--prefer=random ", last=True)
        terminal.type(f"get --context '' quo{TAB}")
        terminal.until("--prefer=random get --context '' quotes", last=True)
    finally:
        terminal.close()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_of_completion_is_for_its_shell(shell: str) -> None:
    done = subprocess.run(
        [sow(), "completion", shell],
        check=True, capture_output=True, text=True, timeout=WAIT_SECONDS, env=os.environ | {"PYTHONPATH": PYTHONPATH},
    )  # fmt: skip
    assert f"{shell}_complete" in done.stdout
    program = shutil.which(shell)
    if program is not None:
        subprocess.run([program, "-n"], check=True, input=done.stdout, text=True, timeout=WAIT_SECONDS)


def test_completion_without_a_server_is_silent() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sow_cli"],
        check=True, capture_output=True, text=True, timeout=WAIT_SECONDS,
        env=os.environ
        | {"PYTHONPATH": PYTHONPATH, "SOW_SERVER": f"127.0.0.1:{free_port()}", "_SOW_COMPLETE": "bash_complete"}
        | {"COMP_WORDS": "sow get o", "COMP_CWORD": "2"},
    )  # fmt: skip
    assert (done.stdout.strip(), done.stderr) == ("", "")
