"""Regular expressions, for LIKE and for the names of topics and durables. The only module that imports re2.

RE2 takes time linear in the text, whatever the pattern, so no filter can stall the server. For that it has no
look-around and no back-references.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import re2  # type: ignore[import-untyped]  # ships no annotations

PATTERN_MEMORY_BYTES_MAX: Final = 2 << 20
"""What one compiled pattern may take, with all that RE2 caches while it searches."""


class PatternError(ValueError):
    """What RE2 finds wrong with a pattern."""


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
    searcher(pattern)  # by itself it must be well-formed: `a)|(b` would be inside of the group
    return searcher(rf"\A(?:{pattern})\z")
