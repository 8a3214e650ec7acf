"""Checks of command line text. Most functions are the `type=` of an option; wrong text is a usage error (exit code 2).

They are plain functions, not `click.ParamType` classes: click wraps them, and adds the option's name to the message.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Final, TypeVar

import click
import msgspec

from sow.durations import DurationError, parse_micros
from sow.sizes import SizeError, parse_bytes
from sow_cli.columns import METADATA, Path, steps
from sow_client import UNLIMITED
from sow_client._keys import key_text

Command = TypeVar("Command", bound=Callable[..., object])

NONE: Final = "none"
"""Removes a setting."""

NO_INDEX: Final = NONE
"""As an `--index`: the topic has none."""

_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_EXPIRATIONS: Final = ("disabled", "enabled", "reject")


def refuse_other_bytes(ctx: click.Context) -> None:
    """Raises a usage error for a text that is no UTF-8: no name, key or filter is one. Files may have such names, and
    UNPROCESSED arguments are passed on."""
    for param in ctx.command.params:
        if param.type is click.UNPROCESSED or isinstance(param.type, (click.Path, click.File)):
            continue
        _refuse_other_bytes(ctx.params.get(param.name or ""), param)


def _refuse_other_bytes(value: object, param: click.Parameter) -> None:
    if isinstance(value, (tuple, list)):
        for one in value:
            _refuse_other_bytes(one, param)
    elif isinstance(value, str) and not is_utf8(value):
        raise click.BadParameter("the text is not UTF-8", param=param)


def is_utf8(text: str) -> bool:
    """True if an argument was UTF-8. Python keeps other bytes as halves of surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def duration(text: str) -> str:
    """`30s`, `1h30m`, `2d` (rule L1). A bare number is refused, as its unit is unknown."""
    try:
        parse_micros(text)
    except DurationError as error:
        raise click.BadParameter(str(error)) from error
    return text


def _duration_or(text: str, *words: str) -> str:
    """A duration, or one of `words`. A refusal names the words: a setting that takes `none` often gets `never`."""
    if text in words:
        return text
    try:
        return duration(text)
    except click.BadParameter as error:
        raise click.BadParameter(f"{text!r} is not a duration or {' or '.join(words)}: {error.message}") from error


def ttl(text: str) -> str:
    """A lifetime: a duration, or `never`."""
    return _duration_or(text, "never")


def bound(text: str) -> str:
    """A duration, or `none` to remove a bound."""
    return _duration_or(text, NONE)


def retain_time(text: str) -> str:
    """A duration, `unlimited`, or `none`."""
    return _duration_or(text, "unlimited", NONE)


def size(text: str) -> int | str:
    """A size such as `64MiB` or `1GB`, `unlimited` (-1), or `none`. A bare number other than `0` is refused."""
    if text == NONE:
        return text
    if text == "unlimited":
        return UNLIMITED
    try:
        return parse_bytes(text)
    except SizeError as error:
        raise click.BadParameter(str(error)) from error


def entries(text: str) -> int | str:
    """A number of entries or times, `unlimited` (-1), or `none`."""
    if text == NONE:
        return text
    if text == "unlimited":
        return UNLIMITED
    if re.fullmatch(r"-[0-9]+", text) is not None:
        raise click.BadParameter(f"{text} is negative; it must be 0 or more, unlimited or none")
    if re.fullmatch(r"[0-9]{1,18}", text) is None:
        raise click.BadParameter(f"{text!r} is not a whole number, unlimited or none")
    return int(text)


def position(text: str) -> str | datetime:
    """A time, or `earliest`, a bookmark or a sequence, which the client takes unchanged. The server checks bookmarks;
    text that resembles none of these is refused here, because only the command knows that all of them are allowed."""
    if _DATE.match(text):
        return instant(text)
    if text == "earliest" or "." in text or text.isdecimal():
        return text
    raise click.BadParameter(
        f"{text!r} is not earliest, a bookmark such as 0d4c5b7e8f90.17, or a time such as 2026-01-31T12:00:00Z"
    )


def positions(text: str) -> str | datetime | Mapping[str, str]:
    """As `position`; also the bookmarks of several cells, as a JSON object."""
    if not text.startswith("{"):
        return position(text)
    try:
        return msgspec.json.decode(text, type=dict[str, str])
    except msgspec.MsgspecError as error:
        raise click.BadParameter(f"{text!r} is no JSON object of cells and bookmarks: {error}") from error


def of_one_cell(start: str | datetime | Mapping[str, str] | None) -> str | datetime | None:
    """The same. Raises a usage error for the bookmarks of several cells."""
    if isinstance(start, Mapping):
        raise click.BadParameter("has the bookmarks of cells, and a topic is in one", param_hint="--from")
    return start


def instant(text: str) -> datetime:
    """An ISO 8601 time with a zone, as UTC. Without a zone it is refused: the server may be in another zone."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not a time; write it like 2030-01-31T12:00:00Z") from error
    if time.tzinfo is None:
        raise click.BadParameter(f"{text!r} has no time zone; add Z for UTC, or an offset such as +02:00")
    return time.astimezone(UTC)


def expiration(text: str) -> str:
    """`disabled`, `enabled`, `reject`, or a duration: enabled with that as the default lifetime (L3); or `none`."""
    if text in _EXPIRATIONS or text == NONE:
        return text
    try:
        parse_micros(text)
    except DurationError as error:
        raise click.BadParameter(f"{text!r} is not {', '.join(_EXPIRATIONS)} or a duration: {error}") from error
    return text


def key(text: str) -> str:
    """A record key. A shell can pass bytes that are not UTF-8; such keys are refused."""
    if not is_utf8(text):
        raise click.BadParameter(f"{text!r} is not UTF-8")
    return text


parts_option: Final = click.option(
    "--parts",
    is_flag=True,
    help="The KEYs are the parts of one key, one for each key field in their order, such as LH 400. A | or \\ in a "
    "part is escaped.",
)


def whole_keys(keys: tuple[str, ...], *, parts: bool) -> tuple[str, ...]:
    """The keys; with `parts` the one key that they are the parts of, in which a | or \\ of a part is escaped (K4)."""
    return (key_text(keys),) if parts and keys else keys


def if_version_option(text: str) -> Callable[[Command], Command]:
    """The option of the commands that change records only at given versions; `check_versions` checks its value."""
    return click.option("--if-version", "versions", type=click.IntRange(min=1), multiple=True, metavar="N", help=text)


def check_versions(versions: tuple[int, ...], keys: tuple[str, ...]) -> None:
    """Raises a usage error where only some of the keys have a version."""
    if versions and len(versions) != len(keys):
        raise click.UsageError("--if-version is given once for each KEY, in their order")


def index(text: str) -> str:
    """The path of an index, or `none`. The server checks the path."""
    if text != NO_INDEX and not text.startswith("/"):
        raise click.BadParameter(f"{text!r} is neither a path such as /symbol nor {NO_INDEX}")
    return key(text)


def refuse_together(*options: tuple[str, bool]) -> None:
    """Raises a usage error when more than one of these (name, is it given) is given."""
    given = [name for name, is_given in options if is_given]
    if len(given) > 1:
        raise click.UsageError(f"{' and '.join(given)} exclude each other")


def field_path(text: str, option: str) -> Path:
    """The names on the way to a field, of a path such as /price/bid that `option` has."""
    try:
        return steps(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=option) from error


def column(text: str, option: str) -> None:
    """Refuses a text of `option` that is neither the path of a payload field nor metadata such as `@key`."""
    if not text.startswith("@"):
        field_path(text, option)
    elif text[1:] not in METADATA:
        known = ", ".join([f"@{name}" for name in METADATA])
        raise click.BadParameter(f"{text!r} is none of {known}", param_hint=option)


def comma_separated(text: str) -> tuple[str, ...]:
    """`a,b,c` as its parts. There is no escape; the options that take such a list may be repeated instead."""
    parts = tuple(key(text).split(","))
    if not all(parts):
        raise click.BadParameter(f"{text!r} has an empty part")
    return parts


def separator(text: str) -> str:
    r"""One byte as text; `\x01` and `SOH` name bytes that a shell does not type easily."""
    named = {"SOH": "\x01", "soh": "\x01"}.get(text, text)
    if match := re.fullmatch(r"\\x([0-9a-fA-F]{2})", named):
        named = chr(int(match[1], 16))
    if len(named) != 1 or ord(named) > 127:
        raise click.BadParameter(rf"{text!r} is not one ASCII character; write it as it is, as \x01, or SOH")
    return named
