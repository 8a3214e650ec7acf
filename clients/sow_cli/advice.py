"""The next step after a command line that is wrong, or that the server refused for its key.

click compares the letters of names alone. Whoever comes from another store, or from another command of `sow`, writes a
name that is right there and looks like nothing here, or like an option that does something else.
"""

from __future__ import annotations

from typing import Final

import click
import msgspec

from sow_client import SowError

_COMMANDS: Final = {
    ".schema": "topic",
    ".tables": "topics",
    "\\d": "topics",
    "\\dt": "topics",
    "add": "publish",
    "create": "topic",
    "del": "delete",
    "expire": "touch",
    "find": "query",
    "insert": "publish",
    "keys": "query",
    "list": "topics",
    "ls": "topics",
    "lock": "lease",
    "pub": "publish",
    "put": "publish",
    "remove": "delete",
    "rm": "delete",
    "scan": "query",
    "search": "query",
    "select": "sql",
    "send": "publish",
    "set": "publish",
    "show": "topics",
    "sub": "subscribe",
    "tables": "topics",
    "ttl": "touch",
    "update": "publish",
    "watch": "subscribe",
}
"""The names of commands in other stores."""
_FILTERS: Final = frozenset({"--filter", "--where"})
_OPTIONS: Final = {
    "--columns": "--select",
    "--fields": "--select",
    "--limit": "--top",
    "--offset": "--skip",
    "--order": "--order-by",
    "--port": "--listen",
    "--sort": "--order-by",
    "--topn": "--top",
    "--top-n": "--top",
    "--ttl": "--default-ttl",
    "--where": "--filter",
}
"""The names of options in other commands, or in other stores. It counts where the command has the option named here."""


def command_for(name: str, known: list[str]) -> list[str]:
    """The commands that a name which is none may mean; the best one first."""
    import difflib

    if (meant := _COMMANDS.get(name.lower())) is not None:
        return [meant]
    return difflib.get_close_matches(name.lower(), known, n=2)


def better(error: click.UsageError) -> click.UsageError | None:
    """The error with what to do; None where that is not known."""
    if isinstance(error, click.NoSuchOption):
        told = _of_option(error)
        return click.UsageError(f"No such option '{error.option_name}'. {told}", error.ctx) if told else None
    hint = ""
    if "extra argument" in error.message:
        if error.ctx is not None and error.ctx.command.name == "sql":
            hint = "the text stands in quotation marks; in the shell `.sql SELECT …` needs none"
        elif _takes_filter(error, click.Argument):
            hint = "a filter stands in quotation marks"
        elif _takes_filter(error, click.Option) and "(/" in error.message:
            hint = "a filter is given as --filter, in quotation marks"
    elif isinstance(error, click.BadParameter) and error.param is not None and error.param.name == "files":
        if error.message.startswith(("'{", '"{', "'[")):
            hint = "a document is given as --data, or in a pipe"
    return click.UsageError(f"{error.format_message()}\n  hint: {hint}", error.ctx) if hint else None


def _of_option(error: click.NoSuchOption) -> str:
    name = error.option_name
    if name in _FILTERS and _takes_filter(error, click.Argument):
        return "The filter is the argument behind TOPIC, in quotation marks."
    meant = _OPTIONS.get(name)
    known = [option for param in _params(error) for option in param.opts]
    return f"Did you mean '{meant}'?" if meant in known else ""


def _takes_filter(error: click.UsageError, how: type[click.Parameter]) -> bool:
    return any(
        isinstance(param, how) and (param.name == "filter_text" or "--filter" in param.opts) for param in _params(error)
    )


def _params(error: click.UsageError) -> list[click.Parameter]:
    return [] if error.ctx is None else error.ctx.command.params


def of_refusal(error: SowError, command: str) -> str:
    """A next step after the server's refusal of a key or of the name of a durable subscription, and where there is no
    server; "": the message says all."""
    if error.reason == "KEY_REQUIRED" and "no key fields" in error.message:
        return {
            "publish": "--key KEY is the key of one record, --key-field NAME the field that has the keys of many",
            "lease": "--key KEY names the record",
            "load": "--key-field NAME is the field that has the keys",
        }.get(command, "")
    if error.reason == "KEY_NOT_ALLOWED":
        return {
            "publish": "leave --key or --key-field out: the document has the key",
            "load": "leave --key-field out: the documents have the keys",
            "lease": "give the document with the key, as --data '{…}', in place of --key",
        }.get(command, "")
    if error.reason == "UNREACHABLE" and "cell" in error.details:  # of another one, so another server has no use
        return "start that cell; `sow cells list` shows its servers. The topics of other cells are served"
    if error.reason == "UNREACHABLE" and "tls" not in error.details and "refused" in error.message:
        return "start the server there, as `sow-server`, or name another one with --server or SOW_SERVER"
    if error.reason == "DURABLE_NOT_FOUND":
        return "`sow durable list` shows those that there are"
    return ""


def field_for(message: str, payload: bytes) -> str:
    """The field of a document that looks like the key field that it lacks, which the message names; "": none."""
    import difflib
    import re

    missing = re.match(r"key field /([^/]+) is missing or null", message)
    if missing is None:
        return ""
    try:
        document = msgspec.json.decode(payload)
    except (msgspec.DecodeError, RecursionError):
        return ""
    names = {str(name).lower(): str(name) for name in document} if isinstance(document, dict) else {}
    if missing[1] in names.values():
        return ""  # its value is null
    near = difflib.get_close_matches(missing[1].lower(), names, n=1)
    return names[near[0]] if near else ""
