"""The pages of the documentation, followed as a reader follows them: each block of a page runs, in its order.

[1]  A `sh` block runs in bash, in an empty folder. With `sow-server` at its beginning it starts the server of the page.
     With the line `# in a second terminal` at its beginning it runs beside the blocks after it, until the page ends.
[2]  A `toml` or `python` block that begins with a comment of a file name alone is written to that file. Any other
     `python` block runs, with the names of those before it.
[3]  A `text` block is the output of the block before it, or with the title `second terminal` of that one. `…` stands
     for anything in a line, and for any lines where it is alone.
[4]  A row of a table with the columns SYSTEM and `sow` has a command in its second cell, `sow …`, or a call,
     `client.…`. It runs. Whoever has the other system runs the commands of the first cell.
[5]  A block whose title ends with `(not tested)` is not run. Its page says what it needs.
[6]  Port 7450 is replaced by that of the server; 9464, of the metrics, and 7481, of HTTP, by free ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.support.servers.forked_commands import PATHS, ForkedCommands
from tests.support.servers.server import ROOT, START_SECONDS, STOP_SECONDS, free_port, until

SECONDS_MAX: Final = 120.0
MODULES: Final = {"sow": "-m sow_cli", "sow-server": "-m sow_server", "python": ""}
FENCE: Final = re.compile(r'^( *)```(\w+)(?: title="([^"]*)")?\n(.*?)^\1```$', re.MULTILINE | re.DOTALL)
FILE: Final = re.compile(r"# ([\w./-]+\.(?:toml|py))(?:\s|,|$)")
SECOND: Final = "# in a second terminal"
ANSI: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLUMNS: Final = 120


ROW: Final = re.compile(r"^\|(.+?)(?<!\\)\|(.+?)(?<!\\)\|.*$", re.MULTILINE)
SPAN: Final = re.compile(r"`([^`]+)`")
RUN: Final = ("sow ", "echo ", "client.")
"""How commands in tables begin. Everything else in these cells is for people."""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page, or a row with commands of two systems: then the language is `row`."""

    language: str
    title: str
    """Of a row: the other system."""
    text: str
    line: int
    other: tuple[str, ...] = ()
    """Of a row: the commands of the other system."""

    @property
    def is_run(self) -> bool:
        return not self.title.endswith("(not tested)")

    @property
    def is_server(self) -> bool:
        """Whether it starts the server of the page [1]."""
        last = self.text.split("&&")[-1].lstrip()
        return self.language == "sh" and last.startswith("sow-server") and "--check" not in last

    @property
    def file(self) -> str | None:
        """The file that it is [2]."""
        found = FILE.match(self.text) if self.language in ("toml", "python") else None
        return None if found is None else found[1]


def blocks(page: Path) -> list[Block]:
    """All of a page, in its order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for fence in FENCE.finditer(text):
        body = re.sub(f"^{fence[1]}", "", fence[4], flags=re.MULTILINE)
        found.append(Block(fence[2], fence[3] or "", body, text[: fence.start()].count("\n") + 1))
    without = FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text)
    return sorted([*found, *_rows(without)], key=lambda block: block.line)


def _rows(text: str) -> Iterator[Block]:
    system = ""
    for number, line in enumerate(text.split("\n"), 1):
        row = ROW.fullmatch(line)
        if row is None:  # the end of a table
            system = ""
            continue
        left, right = row[1].strip(), row[2].strip()
        if right == "sow":
            system = left
        elif system and right.startswith("`"):
            commands = [_unescaped(span) for span in SPAN.findall(right) if span.startswith(RUN)]
            if commands:
                yield Block("row", system, "\n".join(commands), number, tuple(map(_unescaped, SPAN.findall(left))))


def _unescaped(span: str) -> str:
    return span.replace("\\|", "|")


class Reader:
    """Does what a page says, in a folder of its own: writes its files, runs its commands, has one server at a time."""

    def __init__(self, folder: Path, commands: ForkedCommands | None = None, *, port: int | None = None) -> None:
        """`commands`: where those of the page come from; None: each is a new interpreter. `port`: of a server that runs
        already."""
        self.folder = folder
        self.port = str(port or free_port())
        self.places = {"7450": self.port, "9464": str(free_port()), "7481": str(free_port())}
        """By the ports that pages name [6]."""
        self.server: subprocess.Popen[bytes] | None = None
        self._second: _Terminal | None = None
        self._names: dict[str, object] = {"__name__": "page"}
        self._exports = ""
        self.told = ""
        """The output of the last block."""
        programs = folder / "bin"
        programs.mkdir()
        for name, module in MODULES.items():  # of this checkout, whatever is installed
            (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
            (programs / name).chmod(0o755)
        if commands is not None:
            commands.install(programs)
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("SOW_")} | {
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")]),
            "SOW_SERVER": f"127.0.0.1:{self.port}",
            "XDG_CONFIG_HOME": str(folder / "config"),  # no contexts of whoever runs the test
            "TERM": "xterm",
            "SOW_PAGER": "",
            "NO_COLOR": "1",
            "COLUMNS": str(COLUMNS),
        }

    def follow_page(self, page: Path) -> None:
        """Follows a whole page. The name of the block is part of what fails."""
        name = page.relative_to(ROOT)
        there = blocks(page)
        for number, block in enumerate(there):
            following = there[number + 1] if number + 1 < len(there) else None
            if not block.is_run:
                continue
            shown = following is not None and following.language == "text" and not following.title
            try:
                self.follow_block(block, on_terminal=shown)
            except BaseException as error:
                error.add_note(f"{name}:{block.line}")
                raise

    def follow_block(self, block: Block, *, on_terminal: bool = False) -> None:
        """Follows a block. `on_terminal`: a command writes to a terminal, as its output is shown."""
        if block.language == "text":
            if block.title == "second terminal":
                assert self._second is not None
                self._second.read_until(block.text)
            elif not block.title:
                assert matches(block.text, self.told), f"shown:\n{block.text}\nfound:\n{self.told}"
        elif block.language == "row":
            for command in block.text.split("\n"):
                if command.startswith("client."):
                    self._execute(Block("python", "", command, block.line))
                else:
                    self.run(command)
        elif block.file is not None:
            self.told = ""
            self._write(block.file, block.text)
        elif block.language == "python":
            self.told = self._execute(block)
        elif block.language == "sh":
            if block.text.startswith(SECOND):
                self.end_second()
                self._second = _Terminal(self._located(block.text), self.folder, self._environment)
            elif block.is_server:
                self.told = ""
                self.serve(self._located(block.text))
            else:
                self.told = self.run(block.text, on_terminal=on_terminal)

    def run(self, text: str, *, on_terminal: bool = False) -> str:
        """Runs commands; returns what they wrote: to standard output, or to the terminal."""
        text = self._located(text)
        if on_terminal:
            terminal = _Terminal(f"set -eo pipefail\n{self._exports}{text}", self.folder, self._environment)
            told, code = terminal.finish()
        else:
            done = self._run(f"set -eo pipefail\n{self._exports}{text}")
            told, code = done.stdout, done.returncode
            assert code == 0, f"{text}\n{told}{done.stderr}"
        assert code == 0, f"{text}\n{told}"
        self._exports += "".join(re.findall(r"^export .*\n", text, re.MULTILINE))
        return told

    def refusal(self, command: str) -> str:
        """The output of a command to standard error."""
        return self._run(self._exports + self._located(command)).stderr

    def serve(self, text: str) -> None:
        """Starts the server by this command, in place of the one before."""
        self.end_second()
        self.stop()
        if "--config" not in text and "--listen" not in text:
            text = f"{text.rstrip()} --listen 127.0.0.1:{self.port}"
        log = self.folder / "server.log"
        with log.open("wb") as file:
            self.server = subprocess.Popen(
                ["bash", "-ec", text], cwd=self.folder, env=self._environment, stderr=file, start_new_session=True
            )
        server = self.server
        until(lambda: '"event": "ready"' in log.read_text() or server.poll() is not None, START_SECONDS, "the server")
        assert server.poll() is None, log.read_text()

    def stop(self) -> None:
        """Ends the server, and the shell that started it."""
        server, self.server = self.server, None
        if server is not None and server.poll() is None:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(STOP_SECONDS)

    def end_second(self) -> None:
        """Ends what runs in the second terminal, as by Ctrl-C."""
        second, self._second = self._second, None
        if second is not None:
            second.interrupt()

    def close(self) -> None:
        self.end_second()
        self.stop()

    def _write(self, name: str, text: str) -> None:
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self._located(text), encoding="utf-8")

    def _execute(self, block: Block) -> str:
        told = io.StringIO()
        code = "\n" * block.line + self._located(block.text)
        with contextlib.redirect_stdout(told), contextlib.chdir(self.folder):
            exec(compile(code, "page", "exec"), self._names)
        return told.getvalue()

    def _located(self, text: str) -> str:
        for shown, used in self.places.items():
            text = text.replace(shown, used)
        return text

    def _run(self, text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-ec", text],
            check=False,
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
        )


class _Terminal:
    """A shell whose output goes to a pseudo-terminal."""

    def __init__(self, text: str, folder: Path, environment: dict[str, str]) -> None:
        self._end, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
        self._process = subprocess.Popen(
            ["bash", "-ec", text],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=other,
            stderr=other,
            start_new_session=True,
        )
        os.close(other)
        self._told = ""

    def read_until(self, wanted: str) -> None:
        """Reads until it has shown these lines, somewhere."""
        pattern = re.compile(_pattern(wanted), re.DOTALL)
        for _ in self._read():
            if pattern.search(plain(self._told)):
                return
        raise AssertionError(f"shown:\n{wanted}\nfound:\n{plain(self._told)}")

    def finish(self) -> tuple[str, int]:
        """Its whole output, and its exit code."""
        for _ in self._read():
            pass
        os.close(self._end)
        return plain(self._told), self._process.wait(SECONDS_MAX)

    def interrupt(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGINT)
        self.finish()

    def _read(self) -> Iterator[None]:
        yield
        give_up = time.monotonic() + SECONDS_MAX
        while select.select([self._end], [], [], max(0.0, give_up - time.monotonic()))[0]:
            try:
                data = os.read(self._end, 65_536)
            except OSError:  # Linux says so where nobody has the other end open
                return
            if not data:
                return
            self._told += data.decode()
            yield
        os.killpg(self._process.pid, signal.SIGKILL)
        raise AssertionError(f"it does not end:\n{self._told}")


def plain(text: str) -> str:
    """Without colours, cursor movements, and spaces at the ends of lines."""
    return "".join(f"{line.rstrip()}\n" for line in ANSI.sub("", text).replace("\r", "").splitlines())


def matches(expected: str, told: str) -> bool:
    """Whether an output is the shown one [3]."""
    return re.fullmatch(_pattern(expected), plain(told), re.DOTALL) is not None


def _pattern(expected: str) -> str:
    lines = [
        "(?:[^\n]*\n)*?" if line.strip() == "…" else re.escape(line.rstrip()).replace("…", "[^\n]*?") + "\n"
        for line in expected.strip("\n").split("\n")
    ]
    return "".join(lines)
