"""The kinds of values that a key of the file can have: how each is read, checked and written."""

from __future__ import annotations

import difflib
import enum
import ipaddress
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, TypeVar

from sow.durations import DurationError, format_micros, parse_micros
from sow.sizes import format_bytes, parse_bytes
from sow_server.engine.values.keys import INSTANCE_NAME
from sow_server.engine.values.patterns import PatternError, matcher
from sow_server.engine.values.views import Named
from sow_server.filters.filter_errors import FilterError
from sow_server.filters.parser import parse as parse_filter

T = TypeVar("T")


class ValueKind(Protocol[T]):
    """A kind of value. `read` raises ValueError; the text before its message names the key."""

    def read(self, value: object, folder: Path) -> T:
        """The value for an entry of the file; relative paths begin at `folder`."""

    def show(self, value: T) -> str:
        """The value as TOML."""


def _expected(expected: str, value: object) -> ValueError:
    return ValueError(f"expected {expected}, found {noun(value)}")


def noun(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            # Python refuses to print one of thousands of digits, which base 16 may give.
            return f"the integer {value}" if abs(value) < 2**64 else "an integer of more than 64 bits"
        case float():
            return f"the number {value}"
        case str():
            return f"the text {quoted(value)}"
        case list():
            return "an array"
        case dict():
            return "a table"
        case _:
            return "a date or time"


def quoted(text: str) -> str:
    # JSON's strings are TOML's, except that TOML wants DEL escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


@dataclass(frozen=True, slots=True)
class Flag:
    def read(self, value: object, folder: Path) -> bool:
        if not isinstance(value, bool):
            raise _expected("true or false", value)
        return value

    def show(self, value: bool) -> str:
        return "true" if value else "false"


@dataclass(frozen=True, slots=True)
class Text:
    pattern: str = ".*"
    expected: str = "text"

    def read(self, value: object, folder: Path) -> str:
        if not isinstance(value, str) or not re.fullmatch(self.pattern, value, re.DOTALL):
            raise _expected(self.expected, value)
        return value

    def show(self, value: str) -> str:
        return quoted(value)


INSTANCE_KIND: Final = Text(INSTANCE_NAME.pattern, "1 to 100 of [A-Za-z0-9_.:-], no leading '_'")
CLUSTER_KIND: Final = Text(f"(?:{INSTANCE_NAME.pattern})?", "a name as of an instance, or empty for none")
CELL_KIND: Final = Text(f"(?:{INSTANCE_NAME.pattern})?", "the name of a cell, as that of an instance")


@dataclass(frozen=True, slots=True)
class Texts:
    expected: str

    def read(self, value: object, folder: Path) -> tuple[str, ...]:
        if not isinstance(value, list):
            raise _expected(self.expected, value)
        for entry in value:
            if not isinstance(entry, str):
                raise _expected(f"{self.expected}, all of them texts", entry)
        return tuple(value)

    def show(self, value: tuple[str, ...]) -> str:
        return "[" + ", ".join(map(quoted, value)) + "]"


@dataclass(frozen=True, slots=True)
class NamedExpressions:
    """Expressions with their names: a list of texts such as "SUM(/qty) AS qty", or a table of the texts by name. A name
    may be empty in a list: that of a field is its last step."""

    def read(self, value: object, folder: Path) -> tuple[Named, ...]:
        expected = 'expressions such as ["/account", "SUM(/qty) AS qty"], or { qty = "SUM(/qty)" }'
        if not isinstance(value, (list, dict)):
            raise _expected(expected, value)
        for entry in value.values() if isinstance(value, dict) else value:
            if not isinstance(entry, str):
                raise _expected(f"{expected}, all of them texts", entry)
        return tuple(value.items()) if isinstance(value, dict) else tuple(map(_named, value))

    def show(self, value: tuple[Named, ...]) -> str:
        if value and all(name for name, _ in value):
            return "{ " + ", ".join([f"{quoted(name)} = {quoted(text)}" for name, text in value]) + " }"
        return "[" + ", ".join([quoted(f"{text} AS {name}" if name else text) for name, text in value]) + "]"


_NAMED: Final = re.compile(r"(.+?)\s+AS\s+(\w[\w.-]*)\s*", re.DOTALL | re.IGNORECASE)


def _named(text: str) -> Named:
    found = _NAMED.fullmatch(text)
    return ("", text) if found is None else (found[2], found[1])


@dataclass(frozen=True, slots=True)
class Count:
    low: int
    high: int

    def read(self, value: object, folder: Path) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise _expected("an integer", value)
        return _bounded(value, self.low, self.high, str)

    def show(self, value: int) -> str:
        return str(value)


@dataclass(frozen=True, slots=True)
class Size:
    low: int
    high: int

    def read(self, value: object, folder: Path) -> int:
        if isinstance(value, str):
            size = parse_bytes(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            size = value
        else:
            raise _expected('a size such as "64MiB", or bytes as an integer', value)
        return _bounded(size, self.low, self.high, format_bytes)

    def show(self, value: int) -> str:
        return quoted(format_bytes(value))


@dataclass(frozen=True, slots=True)
class Duration:
    low: int
    high: int

    def read(self, value: object, folder: Path) -> int:
        if not isinstance(value, str):
            raise _expected('a duration such as "30s" or "1h30m"', value)
        return _bounded(micros(value), self.low, self.high, format_micros)

    def show(self, value: int) -> str:
        return quoted(format_micros(value))


@dataclass(frozen=True, slots=True)
class Choice:
    words: tuple[str, ...]

    def read(self, value: object, folder: Path) -> str:
        if not isinstance(value, str) or value not in self.words:
            near = difflib.get_close_matches(value, self.words, n=1) if isinstance(value, str) else []
            hint = f", did you mean {quoted(near[0])}?" if near else ""
            raise ValueError(f"expected one of {', '.join(map(quoted, self.words))}, found {noun(value)}{hint}")
        return value

    def show(self, value: str) -> str:
        return quoted(value)


@dataclass(frozen=True, slots=True)
class EnumChoice:
    """A choice among the members of an enum, by their names in lower case."""

    members: tuple[enum.Enum, ...]

    def read(self, value: object, folder: Path) -> enum.Enum:
        word = Choice(tuple(member.name.lower() for member in self.members)).read(value, folder)
        return next(member for member in self.members if member.name.lower() == word)

    def show(self, value: enum.Enum) -> str:
        return quoted(value.name.lower())


@dataclass(frozen=True, slots=True)
class Pattern:
    """An RE2 expression that has to match a whole name."""

    def read(self, value: object, folder: Path) -> str:
        if not isinstance(value, str):
            raise _expected('a pattern such as "orders\\\\..*"', value)
        try:
            matcher(value)
        except PatternError as error:
            raise ValueError(f"{quoted(value)} is not an RE2 expression ({error})") from None
        return value

    def show(self, value: str) -> str:
        return quoted(value)


@dataclass(frozen=True, slots=True)
class FilterText:
    """A filter; "": everything."""

    def read(self, value: object, folder: Path) -> str:
        if not isinstance(value, str):
            raise _expected("a filter such as \"/region = 'eu'\"", value)
        if value:
            try:
                parse_filter(value)
            except FilterError as error:
                raise ValueError(str(error)) from None
        return value

    def show(self, value: str) -> str:
        return quoted(value)


@dataclass(frozen=True, slots=True)
class InstanceNames:
    """Names of instances, each once."""

    def read(self, value: object, folder: Path) -> tuple[str, ...]:
        if not isinstance(value, list):
            raise _expected('an array of names of instances such as ["ldn-1"]', value)
        names = tuple(INSTANCE_KIND.read(entry, folder) for entry in value)
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{quoted(name)} occurs twice")
        return names

    def show(self, value: tuple[str, ...]) -> str:
        return "[" + ", ".join(map(quoted, value)) + "]"


@dataclass(frozen=True, slots=True)
class JwtAlgorithms:
    """Algorithms of signatures with a public key: with a shared secret, who checks tokens could make them."""

    known: tuple[str, ...] = ("ES256", "ES384", "ES512", "EdDSA", "PS256", "PS384", "PS512", "RS256", "RS384", "RS512")

    def read(self, value: object, folder: Path) -> tuple[str, ...]:
        words = Texts('algorithms such as ["ES256"]').read(value, folder)
        if not words:
            raise ValueError("names no algorithm")
        return tuple(Choice(self.known).read(word, folder) for word in words)

    def show(self, value: tuple[str, ...]) -> str:
        return Texts("").show(value)


@dataclass(frozen=True, slots=True)
class FilePath:
    expected: str

    def read(self, value: object, folder: Path) -> Path:
        if not isinstance(value, str) or not value or "\0" in value:
            raise _expected(self.expected, value)
        return (folder / value).absolute()

    def show(self, value: Path) -> str:
        return quoted(str(value))


@dataclass(frozen=True, slots=True)
class Address:
    may_be_empty: bool = False

    def read(self, value: object, folder: Path) -> str:
        if not isinstance(value, str):
            raise _expected('an address such as "127.0.0.1:7450"', value)
        if value or not self.may_be_empty:
            split_address(value)
        return value

    def show(self, value: str) -> str:
        return quoted(value)


@dataclass(frozen=True, slots=True)
class UnlessWord(ValueKind[T | None]):
    """A value, or a word for None."""

    kind: ValueKind[T]
    word: str

    def read(self, value: object, folder: Path) -> T | None:
        return None if value == self.word else self.kind.read(value, folder)

    def show(self, value: T | None) -> str:
        return quoted(self.word) if value is None else self.kind.show(value)


@dataclass(frozen=True, slots=True)
class MayBeAbsent(ValueKind[T | None]):
    """A value that the file may leave out. Then it is None, and `render` leaves it out, too."""

    kind: ValueKind[T]

    def read(self, value: object, folder: Path) -> T | None:
        return self.kind.read(value, folder)

    def show(self, value: T | None) -> str:
        assert value is not None, "render leaves it out"
        return self.kind.show(value)


def _bounded(value: int, low: int, high: int, show: Callable[[int], str]) -> int:
    if value < low:
        raise ValueError(f"{show(value)} is below the minimum, {show(low)}")
    if value > high:
        raise ValueError(f"{show(value)} is above the maximum, {show(high)}")
    return value


def micros(text: str) -> int:
    try:
        return parse_micros(text)
    except DurationError as error:
        raise ValueError(str(error)) from None


def split_address(text: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[ipv6]:port`; port 0 lets the system choose. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    if not colon or not host:
        raise ValueError(f"{quoted(text)} is not host:port, such as 127.0.0.1:7450 or [::1]:7450")
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65_535:
        raise ValueError(f"{quoted(text)} has no port between 0 and 65535 after the last ':'")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise ValueError(f"{quoted(text)}: {host!r} is not an IPv6 address") from None
    elif ":" in host:
        raise ValueError(f"{quoted(text)}: an IPv6 address is written in brackets, such as [::1]:7450")
    elif not re.fullmatch(r"[A-Za-z0-9._-]+", host):
        raise ValueError(f"{quoted(text)}: {host!r} is not a host name")
    return host, int(port)


def is_loopback(address: str) -> bool:
    """True if only programs on this machine reach `address` (host:port)."""
    host, _ = split_address(address)
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
