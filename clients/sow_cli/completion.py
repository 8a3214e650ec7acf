"""Completion in bash, zsh, fish and the interactive shell: commands, options, topics, fields, words of filters.

[1]  Names come from the server within a short time. Where it does not answer, there are none, and nothing is said.
     Names with control characters are left out: the terminal of bash would act on them (rule X7).
[2]  A word is written as a quoted word of the shell is: a name such as `a$(reboot)` stays a name.
[3]  Fields are those of the topic's first records: a record has no schema that could tell them.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import click
import msgspec
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    ShellComplete,
    add_completion_class,
    get_completion_class,
)

from sow_cli.columns import step
from sow_cli.connection import COMPLETE_VARIABLE, found_settings, session_of
from sow_cli.context_files import ContextFiles
from sow_cli.session import Connect, Session, connect
from sow_cli.shell_lines import PATH_OPTIONS, Token, tokens
from sow_client import Client, SowError

NAMES_SECONDS_MAX: Final = 0.5
"""The longest time that a person waits for names."""
CONNECT_SECONDS_MAX: Final = 0.3
REMEMBERED_SECONDS: Final = 5.0
"""How long the interactive shell does not ask again."""
REMEMBERED_MAX: Final = 100
RECORDS_SEEN: Final = 20
"""The fields of so many records are offered."""
FIELDS_MAX: Final = 500
FIELD_DEPTH_MAX: Final = 4

KEYWORDS: Final = (
    "AND", "OR", "NOT", "IN", "BETWEEN", "LIKE", "BEGINS WITH", "ENDS WITH", "CONTAINS", "IS NULL", "IS NOT NULL",
    "TRUE", "FALSE", "NULL",
)  # fmt: skip
METADATA: Final = ("@key", "@version", "@publish_time", "@expire_time", "@topic", "@sequence", "@origin")
FUNCTIONS: Final = (
    "ABS(", "ARRAY_COUNT(", "CEIL(", "COALESCE(", "CONCAT(", "DATE_MICROS(", "FLOOR(", "FORMAT_TIME(", "IF(", "INSTR(",
    "LENGTH(", "LOWER(", "MESSAGE_SIZE(", "NOW_MICROS(", "REGEXP_REPLACE(", "REPLACE(", "REVERSE(", "ROUND(",
    "SUBSTR(", "TRIM(", "UPPER(",
)  # fmt: skip

_LAST_WORD: Final = re.compile(r"[^\s()=<>!,+*%]*\Z")
_FILTER_OPTIONS: Final = frozenset({"--filter", "--where"})
_OF_TOPICS: Final = frozenset({"sow_cli.topics", "sow_cli.views"})
"""Modules whose arguments NAME are topics."""
_SHELLS: Final = ("bash", "zsh", "fish")

if TYPE_CHECKING:
    _Type = click.ParamType[Any]
else:
    _Type = click.ParamType  # generic since click 8.2 only

Finder: TypeAlias = Callable[[click.Context, str], Iterable[str]]


@click.command(short_help="Print what makes a shell complete commands of sow.")
@click.argument("shell", type=click.Choice(_SHELLS))
def completion(shell: str) -> None:
    """Print the script that makes SHELL complete the commands of sow, their options, and names of topics and fields.

    The names come from the server of the line, of the environment or of the context in use. Where it does not answer
    within half a second, there are none.

    \b
    Examples:
      sow completion bash > ~/.local/share/bash-completion/completions/sow
      sow completion zsh > "${fpath[1]}/_sow"
      sow completion fish > ~/.config/fish/completions/sow.fish
    """
    found = get_completion_class(shell)
    assert found is not None, "click knows these shells"
    root = click.get_current_context().find_root().command
    script = found(root, {}, "sow", COMPLETE_VARIABLE)
    click.echo(script.source_template % script.source_vars())


class _Bash(BashComplete):
    """bash cuts words at `:` and `=`, and so every address in two. The script hands over the whole line."""

    source_template = """\
%(complete_func)s() {
    local kind value
    COMPREPLY=()
    while IFS=, read -r kind value; do
        case "$kind" in
            file | dir) compopt -o default ;;
            plain) COMPREPLY+=("$value") ;;
        esac
    done < <(COMP_WORDS="${COMP_LINE:0:COMP_POINT}" %(complete_var)s=bash_complete "$1")
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""

    def get_completion_args(self) -> tuple[list[str], str]:
        """As click's."""
        line = split(os.environ["COMP_WORDS"])
        return list(line.words[1:]), line.last

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        """As click's, without what stands before the last `:` or `=` of the word: bash keeps it."""
        found = super().get_completions(args, incomplete)
        quote = split(os.environ["COMP_WORDS"]).quote
        kept = "" if quote else incomplete[: max(incomplete.rfind(":"), incomplete.rfind("=")) + 1]
        return [
            CompletionItem(_escaped(item.value.removeprefix(kept), quote), item.type, item.help)
            if item.type == "plain"
            else item
            for item in found
        ]


def _escaped(text: str, quote: str) -> str:
    """A text within a quotation mark of bash that is open, or without one ([2])."""
    if quote == "'":
        return text.replace("'", "'\\''")
    return re.sub(r'([$`"\\])' if quote else r"([^\w@%+=:,./~-])", r"\\\1", text)


add_completion_class(_Bash)


class Names:
    """Names that a server knows, asked for in a thread and remembered for a while."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._found: dict[tuple[object, ...], tuple[float, Sequence[str]]] = {}

    def get(self, key: tuple[object, ...], fetch: Callable[[], Sequence[str]]) -> Sequence[str]:
        """The names of this key: as remembered, or as `fetch` returns them within `NAMES_SECONDS_MAX`; else none ([1]).
        Names that come later are there the next time."""
        if key in self._found and self._now() - self._found[key][0] < REMEMBERED_SECONDS:
            return self._found[key][1]
        if len(self._found) >= REMEMBERED_MAX:
            self._found.clear()
        before = self._found.get(key, (0.0, ()))[1]
        self._found[key] = self._now(), before  # nobody else asks in the meantime

        def ask() -> None:
            try:
                names = fetch()
            except (SowError, click.UsageError):
                names = ()
            self._found[key] = self._now(), names

        thread = threading.Thread(target=ask, name="sow-names", daemon=True)
        thread.start()
        thread.join(NAMES_SECONDS_MAX)
        return self._found[key][1]


class Values:
    """Completes values of arguments and options."""

    def __init__(self, names: Names) -> None:
        self._names = names

    def prepare(self, command: click.Command) -> None:
        """Lets the parameters of a command, or of all commands of a group, find their values."""
        if isinstance(command, click.Group):
            for one in command.commands.values():
                self.prepare(one)
        for param in command.params:
            finder = self._finder(command, param)
            if finder is not None and not isinstance(param.type, _Completed):
                param.type = _Completed(param.type, finder)

    def _finder(self, command: click.Command, param: click.Parameter) -> Finder | None:
        options = set(param.opts)
        module = getattr(command.callback, "__module__", "")
        of_topics = module in _OF_TOPICS and command.name != "create"
        if isinstance(param, click.Argument) and (param.name == "topic" or (of_topics and param.name == "name")):
            return self.topics
        if param.name == "source" and module in _OF_TOPICS:
            return self.topics
        if param.name == "filter_text" or options & _FILTER_OPTIONS:
            return self.filters
        if options & PATH_OPTIONS:
            return self.paths
        of_contexts = getattr(command.callback, "__module__", "") == "sow_cli.contexts" and command.name != "add"
        return _contexts if "--context" in options or (of_contexts and param.name == "name") else None

    def topics(self, ctx: click.Context, incomplete: str) -> Iterable[str]:
        """Names of topics."""
        session, connection = _reached(ctx)

        def fetch() -> Sequence[str]:
            with connection(session) as client:
                answers = client.in_each_cell(lambda one: one.topics()).values()
            return [topic.name for topics in answers if not isinstance(topics, SowError) for topic in topics]

        return _beginning(incomplete, self._names.get(("topics", session), fetch))

    def fields(self, ctx: click.Context) -> Sequence[str]:
        """The paths of fields that records of the command's topic have ([3])."""
        named = ctx.params.get("topic") or ctx.params.get("source") or ctx.params.get("name")
        if named is None and ctx.args:
            named = ctx.args[0]  # click reads no arguments on a line that ends with an option without its value
        if not isinstance(named, str) or not named:
            return ()
        session, connection = _reached(ctx)

        def fetch() -> Sequence[str]:
            with connection(session) as client:
                return _fields(client, named)

        return self._names.get(("fields", session, named), fetch)

    def paths(self, ctx: click.Context, incomplete: str) -> Iterable[str]:
        """Paths of fields, the last one of a list with commas."""
        head, comma, last = incomplete.rpartition(",")
        space = last[: len(last) - len(last.lstrip())]
        return (head + comma + space + path for path in _beginning(last.strip(), self.fields(ctx)))

    def filters(self, ctx: click.Context, incomplete: str) -> Iterable[str]:
        """Filters, continued by one word: a field, a keyword, a function, metadata."""
        head = before_last_word(incomplete)
        last = incomplete[len(head) :]
        words = [*_beginning(last, self.fields(ctx)), *_beginning(last, METADATA)]
        if not last.startswith(("/", "@")):
            if head.strip():
                words += [word for word in KEYWORDS if word.startswith(last.upper())]
            words += [word for word in FUNCTIONS if last and word.startswith(last.upper())]
        return (head + word for word in words)


def before_last_word(text: str) -> str:
    """A filter up to the word at its end."""
    match = _LAST_WORD.search(text)
    assert match is not None, "it matches the empty end"
    return text[: match.start()]


class _Completed(_Type):
    """A type with another completion."""

    def __init__(self, inner: _Type, finder: Finder) -> None:
        self.name = inner.name
        self._inner = inner
        self._finder = finder

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """As the type's own."""
        return self._inner.convert(value, param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """As click's."""
        goes_on = param.name == "filter_text" or not _FILTER_OPTIONS.isdisjoint(param.opts)
        return [CompletionItem(found, goes_on=goes_on) for found in self._finder(ctx, incomplete)]


def _reached(ctx: click.Context) -> tuple[Session, Connect]:
    """The session of a command line that is being written. Raises UsageError."""
    given: Connect | None = ctx.find_root().obj
    session = session_of(found_settings(ctx), given or connect)
    return (session, given) if given is not None else (replace(session, waits=CONNECT_SECONDS_MAX), connect)


def _contexts(_ctx: click.Context, incomplete: str) -> Iterable[str]:
    return _beginning(incomplete, ContextFiles(os.environ).names())


def _beginning(beginning: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(beginning) and name.isprintable()]  # [1]


def _fields(client: Client, topic: str) -> Sequence[str]:
    paths: dict[str, None] = {}
    with client.query(topic, top_n=RECORDS_SEEN) as result:
        for payload in (payload for batch in result.batches() for payload in batch.payloads):
            try:
                document = msgspec.json.decode(payload)
            except msgspec.DecodeError:
                continue  # not a json topic
            paths |= dict.fromkeys(_paths(document, "", FIELD_DEPTH_MAX))
    return tuple(paths)[:FIELDS_MAX]


def _paths(document: object, above: str, depth: int) -> Iterator[str]:
    if isinstance(document, Mapping) and depth:
        for name, value in document.items():
            path = above + step(name, in_filter=True)
            yield path
            yield from _paths(value, path, depth - 1)


@dataclass(frozen=True, slots=True)
class Line:
    """A command line up to the cursor."""

    words: tuple[str, ...]
    """The words that are complete."""
    last: str
    """The word at the cursor, without quotation marks; perhaps empty."""
    start: int
    """Where the last word begins, with its quotation mark."""
    quote: str
    """The quotation mark that is open; "": none."""


def split(text: str) -> Line:
    """Splits a line as a shell does, though its last word may be open."""
    return line_of(text, list(tokens(text, operators=False)))


def line_of(text: str, found: Sequence[Token]) -> Line:
    """The same of words that are known. A text that ends with a space has an empty word there."""
    at_word = bool(found) and found[-1].end == len(text)
    *words, last = found if at_word else [*found, Token("", len(text), len(text))]
    return Line(tuple(one.text for one in words), last.text, last.start, last.open if last.open in ("'", '"') else "")


def completions(root: click.Command, connect: Connect | None, words: Sequence[str], last: str) -> list[CompletionItem]:
    """The texts that may stand in place of `last`, behind `words`. There are none if the line, or a context, has a
    fault."""
    try:
        return ShellComplete(root, {"obj": connect}, "sow", "").get_completions(list(words), last)
    except click.UsageError:
        return []
