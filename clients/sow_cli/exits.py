"""Exit codes, and the one place that turns errors into them.

| code | meaning |
|---|---|
| 0   | done; also when the reader of a pipe went away (`sow query … | head`) |
| 1   | the server refused the request or some records; you declined when asked; output cannot be written |
| 2   | wrong usage: arguments, options, input that cannot be read |
| 3   | the server is not reachable, or gave no answer in time |
| 4   | no secure connection: TLS at one end only, or a certificate that is not accepted |
| 130 | Ctrl-C |
| 143 | SIGTERM |

Errors go to stderr: the server's reason, its message, then its details (field, position), one per line. A message of
several lines keeps them: that of a filter shows the filter, and a caret below the position of the error.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Final, NoReturn

import click

from sow_cli import display
from sow_cli.interrupts import INTERRUPTED, exit_code_of, raised
from sow_cli.session import Session
from sow_client import DeadlineExceeded, SowError, Unavailable

SERVER_SAID_NO: Final = 1
NOT_REACHABLE: Final = 3
NOT_SECURE: Final = 4

_NO_ANSWER: Final = frozenset({"UNREACHABLE", "STREAM_CUT", "UNAVAILABLE"})


class Refused(click.ClickException):
    """The server refused something."""

    exit_code = SERVER_SAID_NO

    def show(self, file: object = None) -> None:
        click.echo(f"sow: {self.message}", err=True)


class NotReached(Refused):
    """No answer came from the server."""

    exit_code = NOT_REACHABLE


class NotSecure(Refused):
    """There is a server, and no secure connection to it."""

    exit_code = NOT_SECURE


class RootGroup(click.Group):
    """The command `sow`: every error of a subcommand passes through here."""

    def make_context(self, *arguments: Any, **named: Any) -> click.Context:
        try:
            return super().make_context(*arguments, **named)
        except BrokenPipeError as error:  # of --help and --version; click would end with 1
            _discard_output()
            raise click.exceptions.Exit(0) from error
        except click.ClickException as error:
            raise _harmless(error) from error.__cause__
        except OSError as error:
            raise _unwritten(error) from error
        except KeyboardInterrupt as interrupt:  # in the shell; click would say that it was aborted, and end with 1
            raise click.exceptions.Exit(exit_code_of(interrupt) or INTERRUPTED) from interrupt

    def invoke(self, ctx: click.Context) -> object:
        try:
            with raised():
                result: object = super().invoke(ctx)
                sys.stdout.flush()
        except click.exceptions.Exit:
            raise
        except BaseException as error:  # noqa: BLE001 - it is told, or raised again
            code = exit_code_of(error)
            if code is None:
                _end(ctx, error)
            if isinstance(error, click.Abort):  # at a question, behind which the terminal has shown ^C
                click.echo(err=True)
            ctx.exit(code)
        return result


def _end(ctx: click.Context, error: BaseException) -> NoReturn:
    from sow_cli import advice  # only where there is something to advise

    match error:
        case BrokenPipeError():
            _leave_quietly(ctx)
        case OSError():
            raise _unwritten(error) from error
        case click.UsageError():
            if (better := advice.better(error)) is not None:
                raise _harmless(better) from error
        case SowError():
            failure = Refused
            if is_unanswered(error):
                failure = NotSecure if "tls" in error.details else NotReached
            hint = advice.of_refusal(error, ctx.invoked_subcommand or "")
            if not hint and isinstance(ctx.obj, Session):
                hint = ctx.obj.hint(error)
            raise failure(describe(error) + (f"\n  hint: {hint}" if hint else "")) from error
    if isinstance(error, click.ClickException):
        _harmless(error)
    raise error


def _harmless(error: click.ClickException) -> click.ClickException:
    """The same error. click's own messages have names of files, and words of the line, as they are (rule X7)."""
    error.message = display.safe_lines(error.message)  # type: ignore[misc]  # click shows it, and calls it final
    return error


def _unwritten(error: OSError) -> Refused:
    """A full disk, above all: of a file, or of the output, whose rest cannot be written at the end."""
    try:
        sys.stdout.flush()
    except OSError:
        _discard_output()
    return Refused(f"cannot write: {error.strerror or error}")


def is_unanswered(error: SowError) -> bool:
    """True when the server gave no answer.

    A server that is stopping, or whose store has failed, answers UNAVAILABLE, too, but with a reason of its own.
    """
    return isinstance(error, DeadlineExceeded) or (isinstance(error, Unavailable) and error.reason in _NO_ANSWER)


def describe(error: SowError) -> str:
    """Reason and message, then each detail on a line of its own."""
    lines = [f"{error.reason}: {display.safe_lines(error.message)}"]
    # The message has the name of the topic that is missing, and the fields of the key, which are told for programs.
    told = {name: value for name, value in error.details.items() if name not in ("topic", "key_fields")}
    lines += [f"  {name}: {display.safe(str(value))}" for name, value in sorted(told.items())]
    if error.retry_after is not None:
        lines.append(f"  retry after: {error.retry_after:g} s")
    return "\n".join(lines)


def _leave_quietly(ctx: click.Context) -> NoReturn:
    """Ends with 0."""
    _discard_output()
    ctx.exit(0)


def _discard_output() -> None:
    """Prevents an error when the interpreter flushes stdout once more at its end."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):
        descriptor = -1
    if descriptor >= 0:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor)
        os.close(null)
