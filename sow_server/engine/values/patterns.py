"""Regular expressions, for LIKE, REGEXP_REPLACE and the names of topics and durables. The only module that imports re2.

RE2 takes time linear in the text, whatever the pattern, so no filter can stall the server. The price: it has no
look-around and no back-references. Only one search is linear: to find every match may take a search through the rest
of the text for each, so replacing has a bound of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import re2  # type: ignore[import-untyped]  # ships no annotations

PATTERN_MEMORY_BYTES_MAX: Final = 2 << 20
"""Memory of one compiled pattern, including everything that RE2 caches while it searches."""
QUICK_SIZE_MAX: Final = 200
"""Steps of the program that RE2 makes of a quick pattern. At worst, RE2 takes each of them for each character."""
QUICK_LIST_CHARACTERS_MAX: Final = 16 << 10
"""The bound of a list of names, some hundreds. For a character of a text, RE2 then takes the few steps of the names
that still fit."""
REPLACING_BYTES_MAX: Final = 4 << 20
"""Bytes that the searches of one replacement may read, if each reads the rest of its text. Mostly they read far
less."""
_LISTED: Final = re.compile(r"(?:[A-Za-z0-9_:-]|\\[.:-])+(?:\.\*)?")
"""A name in a list, or the beginning of names."""


class PatternError(ValueError):
    """A pattern that RE2 rejects, with its reason."""


def searcher(pattern: str) -> Callable[[str], bool]:
    """A function that says whether a text contains a match. Raises PatternError."""
    search = _compiled(pattern).search

    def found(text: str) -> bool:
        return search(text.encode(errors="replace")) is not None

    return found


def replacer(pattern: str) -> Callable[[str, str, int], str | None]:
    """A function of a text, what stands in place of each match, and the most characters of the result. None: the result
    would be longer, or the matches are so many that finding them may take too long. An empty match is not replaced.
    Raises PatternError."""
    search = _compiled(pattern).search

    def replaced(text: str, new: str, most: int) -> str | None:
        content, instead = text.encode(errors="replace"), new.encode(errors="replace")
        pieces: list[bytes] = []
        begin = at = 0
        room, effort = most - len(text), REPLACING_BYTES_MAX
        while (match := search(content, at)) is not None:
            start, end = match.span()
            effort -= len(content) - at
            if effort < 0:
                return None
            at = end
            if start == end:
                at += 1
                if at > len(content):
                    break
                continue
            room -= len(new) - len(content[start:end].decode(errors="replace"))
            pieces += [content[begin:start], instead]
            begin = end
        if not pieces:
            return text if room >= 0 else None
        pieces.append(content[begin:])
        return b"".join(pieces).decode(errors="replace") if room >= 0 else None

    return replaced


def _compiled(pattern: str) -> re2._Regexp:
    options = re2.Options()
    options.never_capture = True
    options.log_errors = False
    options.max_mem = PATTERN_MEMORY_BYTES_MAX
    try:
        # Bytes in and out: with a str, re2 would compute the character positions of every match.
        return re2.compile(pattern.encode(), options)
    except re2.error as error:
        what = error.args[0] if error.args else "unknown error"
        raise PatternError(what.decode(errors="replace") if isinstance(what, bytes) else str(what)) from None


def is_quick(pattern: str) -> bool:
    """True if a name of a topic is matched in some tens of microseconds, and one of 200 characters in less than a
    millisecond, whatever the characters. True for a small pattern, and for a list of names and beginnings of names.
    Raises PatternError."""
    if _compiled(pattern).programsize <= QUICK_SIZE_MAX:
        return True
    return len(pattern) <= QUICK_LIST_CHARACTERS_MAX and all(map(_LISTED.fullmatch, pattern.split("|")))


def matcher(pattern: str) -> Callable[[str], bool]:
    """A function that says whether a pattern matches the whole of a text. Raises PatternError."""
    searcher(pattern)  # the pattern must be well-formed by itself: `a)|(b` would become so inside of the group
    return searcher(rf"\A(?:{pattern})\z")
