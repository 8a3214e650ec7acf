"""Bearer tokens: where they come from, and where they may go.

[1]  No message and no error contains a token.
[2]  A token goes to another machine over TLS only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

from sow_client._records import invalid

Token: TypeAlias = "str | os.PathLike[str] | Callable[[], str]"
"""A bearer token: the text itself, a file that holds it, or a function that gives it. A file is read again when it has
changed, and a function is called before each call: so a token can be renewed while the client runs."""

_TOKEN: Final = re.compile(r"[\x21-\x7e]{1,16384}")
"""All that a header of HTTP carries unchanged; sow-server refuses longer ones."""


class Bearer:
    """Gives the metadata that shows a token."""

    def __init__(self, token: Token) -> None:
        """Raises InvalidArgument if there is no token to show."""
        self._token = token
        self._stamp: tuple[int, int] | None = None
        self._read = ""
        if isinstance(token, str):
            if os.path.isfile(token):  # no error for a token that is longer than a name may be
                raise invalid("token", f"{token!r} is the name of a file, not a token; give it as a Path")
            self._read = _checked(token, "the text")
        elif not isinstance(token, os.PathLike) and not callable(token):
            raise invalid("token", f"expected a text, a Path or a function, found {type(token).__name__}")
        elif not callable(token):
            self._text()

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of the next call. Raises InvalidArgument if there is no token to show."""
        return (("authorization", f"Bearer {self._text()}"),)

    def _text(self) -> str:
        if isinstance(self._token, str):
            return self._read
        if callable(self._token):
            return _checked(self._token(), "the result of the function")
        path = Path(self._token)
        try:
            state = path.stat()
            stamp = (state.st_mtime_ns, state.st_ino)
            if stamp != self._stamp:
                if state.st_mode & 0o077:
                    raise invalid("token", f"other users may read {path}; run: chmod 600 {path}")
                self._read = _checked(path.read_bytes().decode("latin-1"), str(path))
                self._stamp = stamp
        except OSError as error:
            raise invalid("token", f"cannot read {path}: {error.strerror}") from error
        return self._read


def _checked(given: object, source: str) -> str:
    """The token, without the end of its line."""
    text = given.strip() if isinstance(given, str) else ""
    if _TOKEN.fullmatch(text) is None:
        raise invalid("token", f"{source} is no token: expected one line of 1 to 16384 visible ASCII characters")
    return text
