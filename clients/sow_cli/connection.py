"""The options that lead to a server, before the subcommand or after it, and the order of all sources of a setting.

[1]  A setting comes from the first of these that has it: its option, the context that `--context` names, its variable
     of the environment, the context of SOW_CONTEXT or in use, the default.
[2]  The files of contexts are read once a command runs: help and usage errors need none.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Final, get_args

import click

from sow_cli import arguments
from sow_cli.context_files import FILES, NAMES, ContextFiles, Settings
from sow_cli.output import NO_PAGER
from sow_cli.session import DEFAULT_SERVER, Connect, Session, connect
from sow_client import FailoverPublish, Prefer, Tls

CONTEXT_VARIABLE: Final = "SOW_CONTEXT"
COMPLETE_VARIABLE: Final = "_SOW_COMPLETE"
"""Set while bash, zsh or fish asks for completions."""
DEFAULTS: Final[Settings] = {"server": DEFAULT_SERVER, "prefer": "first", "failover_publish": "again"}
_GIVEN: Final = "sow_cli.given"
"""Where the contexts of click keep the options that were given, in front of the subcommand or behind it."""
_CONNECT: Final = "sow_cli.connect"
_OF: Final = "connection_"
"""In front of the names of the parameters: no command has such one of its own."""
_EXISTING_FILE: Final = click.Path(exists=True, dir_okay=False)
_EPILOG: Final = "The options of the connection, such as --server and --context, may stand here too: see sow --help."


class ConnectionOption(click.Option):
    """An option of the connection, or of the terminal. `again`: behind a subcommand, whose help does not list it."""

    def __init__(self, name: str, *, again: bool, **attributes: Any) -> None:
        setting = name[2:].replace("-", "_")
        super().__init__(
            [name, _OF + setting],
            envvar=None if again or setting not in ("context", *NAMES) else f"SOW_{setting.upper()}",
            show_envvar=not again,
            expose_value=False,
            callback=_noted,
            **attributes,
        )
        self._again = again

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """As click's."""
        return None if self._again else super().get_help_record(ctx)


_COLOURS: Final = {"auto": None, "always": True, "never": False}
_FORMAT: Final = "How results are written, where no --format stands behind the command."


def connection_options(*, again: bool = False) -> Iterator[ConnectionOption]:
    """The options, in the order of the help."""

    def option(name: str, help: str, **attributes: Any) -> ConnectionOption:  # noqa: A002  # as click names it
        return ConnectionOption(name, again=again, help=help, **attributes)

    yield option(
        "--context",
        "Settings that `sow context add` has saved, such as the server and its token.",
        metavar="NAME",
        is_eager=True,  # a context has a default of --format
    )
    yield option(
        "--server",
        "Address of the server, or of several instances: the first that serves is used, and a move is a line on "
        f"stderr. Without a port it is 7450.  [default: {DEFAULT_SERVER}]",
        metavar="HOST:PORT[,…]",
    )
    yield option(
        "--prefer",
        "Of several instances: the order of the list, or one that is drawn.  [default: first]",
        type=click.Choice(get_args(Prefer)),
    )
    yield option(
        "--failover-publish",
        "Records that a lost instance may have: publish them again elsewhere, or fail.  [default: again]",
        type=click.Choice(get_args(FailoverPublish)),
    )
    yield option("--tls-ca", "PEM certificates to trust; turns TLS on.", type=_EXISTING_FILE, metavar="FILE")
    yield option("--tls-cert", "PEM certificate of this client; turns TLS on.", type=_EXISTING_FILE, metavar="FILE")
    yield option("--tls-key", "PEM key of --tls-cert.", type=_EXISTING_FILE, metavar="FILE")
    yield option(
        "--token-file",
        "A file with the token to show, which only its owner can read.",
        type=_EXISTING_FILE,
        metavar="FILE",
    )
    yield option("--tls-server-name", "Name to expect in the server's certificate; turns TLS on.", metavar="NAME")
    if not again:
        yield option("--format", _FORMAT, metavar="FORMAT")
    yield option(
        "--color",
        "Colours in results; auto: on a terminal, unless NO_COLOR or CLICOLOR_FORCE says otherwise. SOW_COLORS has a "
        "theme.  [default: auto]",
        type=click.Choice(list(_COLOURS)),
    )
    yield option("--no-pager", "Do not show long results through SOW_PAGER, PAGER or less.", is_flag=True, default=None)


def _noted(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    assert param.name, "an option has a name"
    if value is not None and not is_from_environment(ctx, param.name):
        given(ctx)[param.name.removeprefix(_OF)] = value
    if value and param.name == f"{_OF}color":
        ctx.color = _COLOURS[value]
    elif value and param.name == f"{_OF}no_pager":
        ctx.meta[NO_PAGER] = True


def is_from_environment(ctx: click.Context, name: str) -> bool:
    """True if a parameter has its value from a variable."""
    return ctx.get_parameter_source(name) is click.core.ParameterSource.ENVIRONMENT


def given(ctx: click.Context) -> dict[str, str]:
    """The options of the connection that were given on the command line, by the names of settings, `context`, and those
    of the terminal."""
    found: dict[str, str] = ctx.meta.setdefault(_GIVEN, {})
    return found


def given_words(ctx: click.Context) -> list[str]:
    """The same as words of a command line."""
    options = [(f"--{name.replace('_', '-')}", value) for name, value in given(ctx).items()]
    return [word for name, value in options for word in ((name, value) if name != "--no-pager" else (name,))]


@dataclass(frozen=True, slots=True)
class Source:
    """The value of a setting, and where it comes from."""

    value: str
    source: str


def settings(options: Settings, variables: Mapping[str, str], files: ContextFiles) -> dict[str, Source]:
    """Each setting that has a value, from the first source that has one ([1]). `options`: as `given`. Raises UsageError
    for a context that is not there, or has a fault."""
    found: dict[str, Source] = {}

    def take(values: Mapping[str, str], source: Callable[[str], str]) -> None:
        for name in NAMES:
            if name not in found and values.get(name):
                if name not in FILES and not arguments.is_utf8(values[name]):
                    raise click.UsageError(f"{source(name)}: the text is not UTF-8")
                found[name] = Source(values[name], source(name))

    take(options, lambda name: f"--{name.replace('_', '-')}")
    named = options.get("context", "")
    if named:
        take(files.read(named), lambda _: f"context {named}")
    take({name: variables.get(f"SOW_{name.upper()}", "") for name in NAMES}, lambda name: f"SOW_{name.upper()}")
    if not named and (used := variables.get(CONTEXT_VARIABLE) or files.current()):
        take(files.read(used), lambda _: f"context {used}")
    take(DEFAULTS, lambda _: "default")
    return found


def found_settings(ctx: click.Context) -> dict[str, Source]:
    """`settings` of a command that runs."""
    return settings(given(ctx), os.environ, ContextFiles(os.environ))


def session_of(found: Mapping[str, Source], connect: Connect) -> Session:
    """The session that settings describe. Raises UsageError."""
    value = {name: found[name].value if name in found else None for name in NAMES}
    if (value["tls_cert"] is None) != (value["tls_key"] is None):
        raise click.UsageError("--tls-cert and --tls-key belong together: give both or none")
    tls = None
    if value["tls_ca"] or value["tls_cert"] or value["tls_server_name"]:
        ca, cert, key = (
            Path(path) if path else None for path in (value["tls_ca"], value["tls_cert"], value["tls_key"])
        )
        tls = Tls(ca=ca, certificate=cert, key=key, server_name=value["tls_server_name"])
    return Session(
        found["server"].value,
        tls,
        connect,
        Path(value["token_file"]) if value["token_file"] else None,
        "random" if value["prefer"] == "random" else "first",
        "unsent" if value["failover_publish"] == "unsent" else "again",
    )


def begin(ctx: click.Context) -> None:
    """Notes how this invocation connects, until a command runs. `ctx`: the root's."""
    ctx.meta[_CONNECT] = ctx.obj or connect


def connect_of(ctx: click.Context) -> Connect:
    """The way to connect of this invocation."""
    found: Connect = ctx.meta[_CONNECT]
    return found


def settle(ctx: click.Context) -> Session:
    """Gives a command that runs its session, and `exits` too."""
    session = session_of(found_settings(ctx), connect_of(ctx))
    ctx.obj = ctx.find_root().obj = session
    return session


def default_format() -> str | None:
    """The format of a command without `--format`; None: as stdout is."""
    ctx = click.get_current_context()
    if ctx.resilient_parsing:
        return None
    found = found_settings(ctx)
    return found["format"].value if "format" in found else None


def connected(command: click.Command, *, connects: bool = True) -> click.Command:
    """Gives a command, or all commands of a group, the options of the connection, and a session when it runs.
    `connects`: false for one that needs no server, and also runs where a context has a fault."""
    if isinstance(command, click.Group):
        for one in command.commands.values():
            connected(one, connects=connects)
        return command
    taken = {text for param in command.params for text in param.opts}
    command.params += [option for option in connection_options(again=True) if not taken & set(option.opts)]
    command.epilog = _EPILOG
    if not connects:
        return command
    for param in command.params:
        if param.name == "output":  # --format
            param.default = default_format
    callback = command.callback
    assert callback is not None, "a command does something"

    @wraps(callback)
    def settled(*positions: object, **options: object) -> object:
        ctx = click.get_current_context()
        arguments.refuse_other_bytes(ctx)
        settle(ctx)
        result: object = callback(*positions, **options)
        return result

    command.callback = settled
    return command
