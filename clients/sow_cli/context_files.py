"""The contexts of a user: named settings that lead to a server, each in a file of its own, and the one in use.

    ~/.config/sow/contexts/prod.toml        server = "ldn:7450,nyc:7450"
                                            token_file = "/home/ann/prod.token"
    ~/.config/sow/context                   prod

[1]  The files are their owner's alone (0600). A context that others may read or write is refused: whoever writes it
     decides where a token goes (rule X9).
[2]  An error names the file, and the line where there is one.
[3]  A file is replaced as a whole, so nobody reads half of one.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeAlias, get_args

import click

from sow_cli.output import RESULT_FORMATS
from sow_client import FailoverPublish, Prefer

Settings: TypeAlias = Mapping[str, str]
"""Settings of a context by name, those of `NAMES` that it has."""

NAMES: Final = (
    "server",
    "prefer",
    "failover_publish",
    "tls_ca",
    "tls_cert",
    "tls_key",
    "tls_server_name",
    "token_file",
    "format",
)
FILES: Final = ("tls_ca", "tls_cert", "tls_key", "token_file")
"""The settings that name files."""
_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "prefer": get_args(Prefer),
    "failover_publish": get_args(FailoverPublish),
    "format": tuple([one.value for one in RESULT_FORMATS]),  # those that every command has
}
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_BYTES_MAX: Final = 65_536


def checked_name(name: str) -> str:
    """The name of a context, as it may be: it is also the name of a file. Raises UsageError."""
    if _NAME.fullmatch(name) is None:
        raise click.UsageError(f"{name!r} is no name of a context: expected letters, digits and ._-, at most 64")
    return name


class ContextFiles:
    """The folder of the files."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        """`variables`: the environment, which may name the user's folder for configurations."""
        configured = variables.get("XDG_CONFIG_HOME", "")
        try:
            home = Path(configured) if os.path.isabs(configured) else Path.home() / ".config"
        except RuntimeError:  # no HOME, and a user that the system does not know, as in many containers
            self._folder = None
        else:
            self._folder = home / "sow"

    @property
    def folder(self) -> Path:
        """The folder. Raises UsageError where there can be none."""
        if self._folder is None:
            raise click.UsageError("there is no home directory for contexts: set HOME or XDG_CONFIG_HOME")
        return self._folder

    def names(self) -> list[str]:
        """The names of all contexts, in order."""
        if self._folder is None:
            return []
        found = (path.stem for path in (self.folder / "contexts").glob("*.toml"))
        return sorted(name for name in found if _NAME.fullmatch(name))

    def path(self, name: str) -> Path:
        """The file of a context."""
        return self.folder / "contexts" / f"{checked_name(name)}.toml"

    def current(self) -> str:
        """The name of the context in use; "": none. Raises UsageError."""
        if self._folder is None:
            return ""
        try:
            name = (self.folder / "context").read_text(encoding="utf-8").strip()
        except (FileNotFoundError, NotADirectoryError):
            return ""
        except (OSError, UnicodeDecodeError) as error:
            raise click.UsageError(f"cannot read {self.folder / 'context'}: {error}") from error
        if name and _NAME.fullmatch(name) is None:
            raise click.UsageError(f"{self.folder / 'context'}, line 1: {name!r} is no name of a context")
        return name

    def read(self, name: str) -> Settings:
        """The settings of a context. Raises UsageError where there is none, and for a fault of its file ([2])."""
        path = self.path(name)
        try:
            with path.open("rb") as file:
                others = os.fstat(file.fileno()).st_mode & 0o077
                data = file.read(_BYTES_MAX)
        except FileNotFoundError:
            there_are = ", ".join(self.names()) or "none"
            raise click.UsageError(f"there is no context {name!r}; there are: {there_are}") from None
        except OSError as error:
            raise click.UsageError(f"cannot read {path}: {error.strerror}") from error
        if others and os.name == "posix":
            raise click.UsageError(f"other users may read or write {path}; run: chmod 600 {path}")
        return _parsed(path, data)

    def write(self, name: str, settings: Settings) -> None:
        """Writes a context. Raises UsageError where the folder does not allow it."""
        lines = [f"{key} = {_quoted(settings[key])}" for key in NAMES if key in settings]
        self._replace(self.path(name), "".join(f"{line}\n" for line in lines))

    def use(self, name: str) -> None:
        """Makes a context the one in use; "": none."""
        self._replace(self.folder / "context", f"{name}\n" if name else "")

    def remove(self, name: str) -> None:
        """Removes a context. Raises UsageError where there is none."""
        path = self.path(name)
        try:
            path.unlink()
        except FileNotFoundError:
            raise click.UsageError(f"there is no context {name!r}") from None
        except OSError as error:
            raise click.UsageError(f"cannot remove {path}: {error.strerror}") from error
        if self.current() == name:
            self.use("")

    def _replace(self, path: Path, text: str) -> None:
        new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
                file.write(text)
            new.replace(path)
        except OSError as error:
            raise click.UsageError(f"cannot write {path}: {error.strerror}") from error


def _parsed(path: Path, data: bytes) -> Settings:
    import tomllib  # only a command with a context needs it

    try:
        text = data.decode()
        table = tomllib.loads(text)
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise click.UsageError(f"{path}, line {line}: not UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise click.UsageError(f"{path}: {error}") from error  # it names line and column
    for key, value in table.items():
        if (fault := _fault(key, value)) is not None:
            raise click.UsageError(f"{path}, line {_line(text, key)}: {fault}")
    return {key: str(value) for key, value in table.items()}


def _fault(key: str, value: object) -> str | None:
    """The fault of one setting; None: it has none."""
    if key not in NAMES:
        from difflib import get_close_matches

        near = get_close_matches(key, NAMES, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; there are: {', '.join(NAMES)}"
        return f"unknown setting {key!r}{hint}"
    if not isinstance(value, str) or not value:
        return f"{key} is a text in quotation marks"
    if key in _CHOICES and value not in _CHOICES[key]:
        *others, last = _CHOICES[key]
        return f"{key} is {', '.join(others)} or {last}, not {value!r}"
    return None


def _line(text: str, key: str) -> int:
    """The line of a key. The text is valid TOML, so a key stands at the begin of one, perhaps in brackets or quotes."""
    place = re.compile(rf"""\s*\[*\s*["']?{re.escape(key)}["']?\s*[.=\]]""")
    return next((number for number, line in enumerate(text.split("\n"), 1) if place.match(line)), 1)


def _quoted(text: str) -> str:
    """A text in TOML, whose escapes are those of JSON."""
    import msgspec

    return msgspec.json.encode(text).decode().replace("\x7f", "\\u007f")
