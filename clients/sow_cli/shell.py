r"""The interactive shell: `sow` without a command, on a terminal.

[1]  A line is a command as outside, without `sow` in front. It ends with an exit code, as outside, and not the shell.
[2]  All commands of a shell share one connection for each server that they name.
[3]  Ctrl-C ends the command that runs, with the rest of its line, or empties the line. Ctrl-D leaves.
"""

from __future__ import annotations

import os
import shlex
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, cast

import click
from click.shell_completion import CompletionItem
from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory

from sow.version import __version__
from sow_cli import display, outlets
from sow_cli.completion import Line, Names, Values, before_last_word, completions, line_of
from sow_cli.connection import found_settings, given_words, session_of
from sow_cli.filters import place
from sow_cli.interrupts import INTERRUPTED, TERMINATED, Terminated, heeded, through_asyncio
from sow_cli.session import Connect, Session
from sow_cli.shell_lines import WIDE, LineError, ShellCommand, at_cursor, commands, goes_on
from sow_cli.wide import WideLines
from sow_client import Client, SowError

GREETING_SECONDS_MAX: Final = 0.5
HISTORY_BYTES_MAX: Final = 2**20
"""The history is cut to the half of this when it is longer at the start."""
CLIENTS_MAX: Final = 8
"""Connections that a shell keeps."""
GOES_ON: Final = "... "
"""The prompt of a line that continues the one before."""
LEAVE: Final = frozenset({"exit", "quit", "\\q"})
HELP: Final = frozenset({"?", "\\?"})
_GREETING: Final = (
    rf"help lists the commands, Tab completes, {WIDE} at the end shows fields line by line, Ctrl-D leaves"
)


def run_shell(ctx: click.Context, root: click.Group, connect: Connect) -> int:
    """Runs the shell until its user leaves; returns the exit code. `ctx`: the context of `root`, with the options of
    the connection."""
    if isinstance(connect, Clients):
        raise click.UsageError("Missing command.")
    with Clients(connect) as clients:
        return Shell(root, given_words(ctx), clients).run()


class Clients:
    """The clients of a shell ([2]): they stay connected when a command ends."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._clients: dict[Session, Client] = {}
        self._lock = threading.Lock()  # completion asks from a thread of its own

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *_error: object) -> None:
        for session in list(self._clients):
            self.drop(session)

    def __call__(self, session: Session) -> Client:
        """The client of a session, for a `with` block that does not close it."""
        with self._lock:
            session = replace(session, waits=None)
            client = self._clients.get(session)
            if client is None:
                while len(self._clients) >= CLIENTS_MAX:
                    self._drop(next(iter(self._clients)), None)
                client = self._clients[session] = self._connect(session)
        return cast(Client, _Lent(client, session, self))

    def drop(self, session: Session, error: BaseException | None = None) -> None:
        """Closes the client of a session, whose `with` block `error` may have ended."""
        with self._lock:
            self._drop(session, error)

    def _drop(self, session: Session, error: BaseException | None) -> None:
        client = self._clients.pop(session, None)
        if client is not None:
            client.__exit__(None if error is None else type(error), error, None)


class _Lent:
    """A client in a `with` block that does not close it."""

    def __init__(self, client: Client, session: Session, owner: Clients) -> None:
        self._client = client
        self._session = session
        self._owner = owner

    def __enter__(self) -> Client:
        return self._client

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        # Ctrl-C between two lines of gRPC may leave a call whose end nobody reads. The next command connects anew.
        if error is not None and not isinstance(error, Exception) and not isinstance(error, click.exceptions.Exit):
            self._owner.drop(self._session, error)


class Shell:
    """Reads lines, and runs them."""

    def __init__(self, root: click.Group, outer: Sequence[str], clients: Clients) -> None:
        """`outer`: the options that the shell was started with; they count for each command."""
        self._root = root
        self._outer = list(outer)
        self._clients = clients
        values = Values(Names())
        values.prepare(root)
        context = click.Context(root)
        for name in root.list_commands(context):
            command = root.get_command(context, name)
            assert command is not None, "it is listed"
            values.prepare(command)

    def run(self) -> int:
        """Reads and runs lines until Ctrl-D. Returns the exit code."""
        self._greet()
        lines: PromptSession[str] = PromptSession(
            history=_history(os.environ),
            completer=LineCompleter(self._root, self._clients, self._outer),
            complete_in_thread=True,
            complete_while_typing=False,  # a Tab asks the server, typing does not
            auto_suggest=AutoSuggestFromHistory(),
            multiline=Condition(lambda: goes_on(get_app().current_buffer.text)),  # what the Enter key asks
            prompt_continuation=GOES_ON,
        )
        while True:
            try:
                # An exception anywhere in the event loop of the prompt once left the terminal without an echo.
                with through_asyncio():
                    line = lines.prompt(self._prompt()).strip()
            except EOFError:
                return 0
            except KeyboardInterrupt as interrupt:
                if isinstance(interrupt, Terminated):
                    raise
                heeded()
                continue
            try:
                code = self.execute(line)
            except EOFError:
                return 0
            if code == TERMINATED:
                return TERMINATED
            if code == INTERRUPTED:
                click.echo()  # the terminal has shown ^C

    def execute(self, text: str) -> int:
        """Runs the commands of a text; returns the exit code of the last one ([1], [3]). Raises EOFError at a word that
        leaves the shell."""
        code = 0
        try:
            found = commands(text)
        except LineError as error:
            click.echo(f"sow: {error} at {error.position}\n{place(text, error.position)}", err=True)
            return 2
        for command in found:
            code = self._run(command)
            if code in (INTERRUPTED, TERMINATED):
                break
        return code

    def _run(self, command: ShellCommand) -> int:
        words = list(command.words)
        if words[:1] == ["sow"]:
            del words[0]
        if not words:
            return 0
        if len(words) == 1 and words[0] in LEAVE:
            raise EOFError
        if words[0] == ".sql":  # its text keeps its quotation marks
            words[0] = "sql"
        if words[0] in HELP:
            words[0] = "help"
        before = [*self._outer, *(("--format", "ndjson", "--color", "never") if command.is_wide else ())]
        try:
            with _outlet(command), _wide() if command.is_wide else nullcontext():
                return _ended(self._root, [*before, *words], self._clients)
        except OSError as error:
            click.echo(
                f"sow: cannot write to {display.safe(command.file or command.program)}: {error.strerror}", err=True
            )
            return 1

    def _session(self) -> Session:
        """The session of the next command: another context may be in use since the last one."""
        with self._root.make_context("sow", list(self._outer), resilient_parsing=True) as ctx:
            return session_of(found_settings(ctx), self._clients)

    def _prompt(self) -> str:
        try:
            return f"{display.safe(self._session().server)}> "
        except click.UsageError:
            return "sow> "  # the next command tells

    def _greet(self) -> None:
        said: list[str] = []

        def ask() -> None:
            try:
                session = self._session()
                with self._clients(session) as client:
                    found = client.describe_instance()
                said.append(f"server {display.safe(found.server_version)}, {display.safe(found.shown)}")
            except (SowError, click.UsageError) as error:
                said.append(f"no server yet: {display.safe_lines(error.message)}")

        asking = threading.Thread(target=ask, name="sow-greeting", daemon=True)
        asking.start()
        asking.join(GREETING_SECONDS_MAX)
        click.echo(f"sow {__version__}, {said[0] if said else 'no answer of the server yet'}\n{_GREETING}")


def _ended(root: click.Group, words: Sequence[str], connect: Connect) -> int:
    """Runs a command to its end, as click does where it is the whole program."""
    try:
        code = root.main(list(words), prog_name="sow", standalone_mode=False, obj=connect)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        click.echo("Aborted!", err=True)
        return 1
    except SystemExit as end:
        code = end.code
    return code if isinstance(code, int) else 0


class LineCompleter(Completer):
    """Completes lines of the shell."""

    def __init__(self, root: click.Group, connect: Connect, outer: Sequence[str]) -> None:
        self._root = root
        self._connect = connect
        self._outer = list(outer)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """As prompt_toolkit calls it, in a thread."""
        text = document.text_before_cursor
        found, operator = at_cursor(text)
        line = line_of(text, found)
        if operator == "|":  # the words of another program
            return
        if operator:
            yield from _paths(line, text)
            return
        words = line.words[1:] if line.words[:1] == ("sow",) else line.words
        if not words:
            for word in sorted({*LEAVE, *HELP}):
                if word.isalpha() and word.startswith(line.last):
                    yield Completion(word, line.start - len(text))
        for item in completions(self._root, self._connect, [*self._outer, *words], line.last):
            if item.type in ("file", "dir"):
                yield from _paths(line, text)
                continue
            shown = item.value[len(before_last_word(line.last)) :] if item.goes_on else item.value
            yield Completion(
                _written(item, line.quote),
                line.start - len(text),
                display=shown,
                display_meta=(item.help or "").strip(),
            )


def _written(item: CompletionItem, quote: str) -> str:
    """A word as it stands on the line. A filter goes on behind its first word, so its quotation mark stays open."""
    text: str = item.value
    return _quoted(text, quote or ('"' if item.goes_on else ""))


def _quoted(text: str, quote: str) -> str:
    """One word behind this quotation mark, which stays open, or a whole one."""
    if quote == "'":
        return "'" + text.replace("'", "'\\''")
    if quote:
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"')
    return shlex.quote(text)


def _paths(line: Line, text: str) -> Iterator[Completion]:
    for path in _files(line.last):
        yield Completion(_quoted(path, line.quote), line.start - len(text), display=path)


def _files(beginning: str) -> Iterator[str]:
    folder, name = os.path.split(beginning)
    try:
        found = sorted(os.scandir(os.path.expanduser(folder) or "."), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in found:
        if entry.name.startswith(name) and (name or not entry.name.startswith(".")):
            yield os.path.join(folder, entry.name) + ("/" if entry.is_dir() else "")


def _outlet(command: ShellCommand) -> AbstractContextManager[None]:
    if command.file:
        return outlets.into_file(os.path.expanduser(command.file), appends=command.appends)
    return outlets.into_program("/bin/sh", "-c", command.program) if command.program else nullcontext()


@contextmanager
def _wide() -> Iterator[None]:
    """Results with a line for each field."""
    lines = WideLines(sys.stdout.buffer)
    try:
        with outlets.stdout_to(cast(BinaryIO, lines)):
            yield
    finally:
        lines.finish()


def _history(variables: Mapping[str, str]) -> History:
    """The lines of earlier shells; only their owner can read them. Without a place for them, those of this one."""
    configured = variables.get("XDG_STATE_HOME", "")
    try:
        home = Path(configured) if os.path.isabs(configured) else Path.home() / ".local" / "state"
        path = home / "sow" / "history"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        path.chmod(0o600)
        if path.stat().st_size > HISTORY_BYTES_MAX:
            end = path.read_bytes()[-HISTORY_BYTES_MAX // 2 :]
            path.write_bytes(end[end.find(b"\n# ") :])  # an entry begins with the time
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return InMemoryHistory()
    return FileHistory(str(path))
