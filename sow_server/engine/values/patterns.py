"""Regular expressions, for LIKE and for the names of topics and durables. The only module that imports re2.

RE2 takes time linear in the text, whatever the pattern, so no filter can stall the server. The price: it has no
look-around and no back-references.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import re2  # type: ignore[import-untyped]  # ships no annotations

PATTERN_MEMORY_BYTES_MAX: Final = 2 << 20
"""Memory of one compiled pattern, including everything that RE2 caches while it searches."""


class PatternError(ValueError):
    """A pattern that RE2 rejects, with its reason."""


def searcher(pattern: str) -> Callable[[str], bool]:
    """A function that says whether a text contains a match. Raises PatternError."""
    options = re2.Options()
    options.never_capture = True
    options.log_errors = False
    options.max_mem = PATTERN_MEMORY_BYTES_MAX
    try:
        # Bytes in and out: with a str, re2 would compute the character positions of every match.
        search = re2.compile(pattern.encode(), options).search
    except re2.error as error:
        what = error.args[0] if error.args else "unknown error"
        raise PatternError(what.decode(errors="replace") if isinstance(what, bytes) else str(what)) from None

    def found(text: str) -> bool:
        return search(text.encode(errors="replace")) is not None

    return found


def matcher(pattern: str) -> Callable[[str], bool]:
    """A function that says whether a pattern matches the whole of a text. Raises PatternError."""
    searcher(pattern)  # the pattern must be well-formed by itself: `a)|(b` would become so inside of the group
    return searcher(rf"\A(?:{pattern})\z")
