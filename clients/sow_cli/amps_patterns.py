"""Regular expressions of PCRE, which AMPS has, as RE2 takes them. Pure.

[1]  A pattern that is passed on means the same in both, and RE2 compiles it. So everything is refused that only PCRE
     has, or that the two read in different ways.
[2]  RE2 has 2 MiB for a pattern here. WEIGHT_MAX stays below that, so some large ones are refused that it would take.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

REPEATS_MAX: Final = 1_000
"""RE2's largest count of a repetition, and of repetitions inside each other together."""
WEIGHT_MAX: Final = 20_000
"""Steps of RE2's program, estimated from above."""
_DEPTH_MAX: Final = 50
_LETTER_WEIGHT: Final = 8
_CLASS_WEIGHT: Final = 80
"""The weight of a class such as `\\W`, which has characters of one to four bytes."""
_UNICODE_WEIGHT: Final = 2_000
"""The weight of a class such as `\\pL`."""

_ONLY_PCRE: Final = (
    ("?<=", "look-behind"),
    ("?<!", "look-behind"),
    ("?=", "look-ahead"),
    ("?!", "look-ahead"),
    ("?>", "an atomic group"),
    ("?|", "a group that counts its branches anew"),
    ("?(", "a condition"),
    ("?P=", "a back-reference"),
    ("?#", "a comment"),
    ("*", "a verb"),
)
_GROUP: Final = re.compile(r"\?(?:P?<[A-Za-z_]\w*>|'[A-Za-z_]\w*')", re.ASCII)
_FLAGS: Final = re.compile(r"\?[ims]*(?:-[ims]+)?[:)]")
_COUNT: Final = re.compile(r"\{([0-9]{1,5})(,?)([0-9]{0,5})\}")
_SIGN: Final = re.compile(r"[*+?]")
_ESCAPE: Final = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|x\{[0-9a-fA-F]{1,6}\}|[pP](?:[LMNPSZ]|\{[LMNPSZ]\})|[^\W\d_]|[\x20-\x7e])"
)
_POSIX: Final = re.compile(
    r"\[:\^?(?:alnum|alpha|ascii|blank|cntrl|digit|graph|lower|print|punct|space|upper|word|xdigit):\]"
)
_BACK: Final = re.compile(r"\\(?:[1-9]|g|k)")


class PatternFault(Exception):
    """RE2 does not take the pattern; `position` is in it."""

    def __init__(self, what: str, position: int) -> None:
        super().__init__(what)
        self.what = what
        self.position = position


class _Size(NamedTuple):
    weight: int
    repeats: int
    """The counts of repetitions inside each other, multiplied."""


def converted(pattern: str) -> str:
    """The same pattern for RE2 [1]. Raises PatternFault."""
    reader = _Reader(pattern)
    reader.branches(0)
    if reader.at < len(pattern):
        raise PatternFault("a parenthesis closes no group", reader.at)
    return "".join(reader.made)


class _Reader:
    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.at = 0
        self.made: list[str] = []

    def branches(self, depth: int) -> _Size:
        """Reads to the end, or to the parenthesis that closes the group."""
        if depth > _DEPTH_MAX:
            raise PatternFault(f"groups are nested deeper than {_DEPTH_MAX}", self.at)
        weight, repeats = 0, 1
        while self._here and self._here != ")":
            start = self.at
            if self._here == "|":
                self._pass("|")
                continue
            size = self._repeated(self._atom(depth), start)
            weight, repeats = weight + size.weight, max(repeats, size.repeats)
            if weight > WEIGHT_MAX:
                raise PatternFault("the pattern may be too large", start)
        return _Size(weight, repeats)

    @property
    def _here(self) -> str:
        return self.pattern[self.at : self.at + 1]

    def _pass(self, text: str, *, made: str | None = None) -> None:
        """Goes on behind `text`, which is here."""
        self.made.append(text if made is None else made)
        self.at += len(text)

    def _atom(self, depth: int) -> _Size | None:
        """Reads one thing that may be repeated; None: it may not be."""
        match self._here:
            case "(":
                return self._group(depth)
            case "[":
                return self._class()
            case "\\":
                return self._escape(in_class=False)
            case "^" | "$":
                self._pass(self._here)
                return None
            case ".":
                self._pass(".")
                return _Size(_CLASS_WEIGHT, 1)
            case "*" | "+" | "?":
                raise PatternFault("there is nothing to repeat", self.at)
            case "{" if _COUNT.match(self.pattern, self.at):
                raise PatternFault("there is nothing to repeat", self.at)
            case "{":
                self._pass("{", made="\\{")  # both take it for itself here; RE2 only as long as no count follows
            case other:
                self._pass(other)
        return _Size(_LETTER_WEIGHT, 1)

    def _repeated(self, atom: _Size | None, start: int) -> _Size:
        """Reads the repetition behind an atom, if there is one."""
        count = _COUNT.match(self.pattern, self.at)
        sign = _SIGN.match(self.pattern, self.at)
        found = count or sign
        if found is None:
            return atom or _Size(_LETTER_WEIGHT, 1)
        if atom is None:
            raise PatternFault("there is nothing to repeat", self.at)
        times = 1
        if count is not None:
            least, most = int(count[1]), int(count[3] or count[1])
            if most < least:
                raise PatternFault("a repetition ends below its beginning", self.at)
            times = max(most, 1)
        if atom.repeats * times > REPEATS_MAX:
            raise PatternFault(f"RE2 repeats nothing more than {REPEATS_MAX} times", self.at)
        weight = atom.weight * (times + 1)
        if weight > WEIGHT_MAX:
            raise PatternFault("the pattern may be too large", start)
        self._pass(found[0])
        if self._here == "+":
            raise PatternFault("a possessive repetition, which RE2 lacks", self.at)
        if self._here == "?":
            self._pass("?")
        if _COUNT.match(self.pattern, self.at) or _SIGN.match(self.pattern, self.at):
            raise PatternFault("a repetition is repeated", self.at)
        return _Size(weight, atom.repeats * times)

    def _group(self, depth: int) -> _Size | None:
        start = self.at
        self._pass("(")
        for sign, what in _ONLY_PCRE:
            if self.pattern.startswith(sign, self.at):
                raise PatternFault(f"{what}, which RE2 lacks", start)
        if named := _GROUP.match(self.pattern, self.at):
            self._pass(named[0], made="")  # nothing asks for the name
        elif flags := _FLAGS.match(self.pattern, self.at):
            self._pass(flags[0])
            if flags[0].endswith(")"):
                if flags[0] == "?)":
                    raise PatternFault("a group of no kind that RE2 has", start)
                return None
        elif self._here == "?":
            raise PatternFault("a group of no kind that RE2 has", start)
        size = self.branches(depth + 1)
        if self._here != ")":
            raise PatternFault("a group is never closed", start)
        self._pass(")")
        return size

    def _class(self) -> _Size:
        start = self.at
        self._pass("[^" if self.pattern.startswith("[^", self.at) else "[")
        weight, low, first = _CLASS_WEIGHT, "", True
        while True:
            if not self._here:
                raise PatternFault("a class is never closed", start)
            if self._here == "]" and not first:
                self._pass("]")
                return _Size(weight, 1)
            begin = self.at
            is_range = bool(low) and self._here == "-" and self.pattern[self.at + 1 : self.at + 2] not in ("", "]")
            if is_range:
                self._pass("-")
            letter, more = self._member(start)
            weight += more
            if is_range and (not letter or ord(letter) < ord(low)):
                raise PatternFault("a range in a class has no two ends in order", begin)
            if not is_range and letter == "-" and not first and self._here != "]":
                raise PatternFault("a hyphen in a class that may begin a range; put it last", begin)
            low, first = ("" if is_range else letter), False

    def _member(self, start: int) -> tuple[str, int]:
        """Reads one member of a class: its character, or "" for a class inside; and its weight."""
        if self._here == "[" and self.pattern[self.at + 1 : self.at + 2] in (":", ".", "="):
            posix = _POSIX.match(self.pattern, self.at)
            if posix is None:
                raise PatternFault("a class inside a class that RE2 lacks", self.at)
            self._pass(posix[0])
            return "", _CLASS_WEIGHT
        if self._here != "\\":
            letter = self._here
            self._pass(letter, made="\\[" if letter == "[" else letter)
            return letter, _LETTER_WEIGHT
        at = self.at
        size = self._escape(in_class=True)
        assert size is not None, "no assertion stands in a class"
        return _letter(self.pattern[at : self.at]), size.weight

    def _escape(self, *, in_class: bool) -> _Size | None:
        if _BACK.match(self.pattern, self.at):
            raise PatternFault("a back-reference, which RE2 lacks", self.at)
        found = _ESCAPE.match(self.pattern, self.at)
        letter = self.pattern[self.at + 1 : self.at + 2]
        if found is None or (letter.isalnum() and len(found[0]) == 2 and letter not in "dDwWsSntrfabBAz"):
            raise PatternFault("an escape that RE2 lacks", self.at)
        if letter in "bBAz" and len(found[0]) == 2:
            if in_class:
                raise PatternFault("an escape that RE2 lacks in a class", self.at)
            self._pass(found[0])
            return None
        if letter == "x":
            code = int(found[0][2:].strip("{}"), 16)
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                raise PatternFault("an escape of no character", self.at)
            if code > 0x7F and len(found[0]) == 4:
                raise PatternFault("an escape of a byte, which RE2 takes for a character", self.at)
        self._pass(found[0])
        if letter in "pP" and len(found[0]) > 2:
            return _Size(_UNICODE_WEIGHT, 1)
        return _Size(_CLASS_WEIGHT if letter in "dDwWsS" else _LETTER_WEIGHT, 1)


def _letter(escape: str) -> str:
    """The character of an escape; "" for a class."""
    if escape[1] == "x" and len(escape) > 2:
        return chr(int(escape[2:].strip("{}"), 16))
    if escape[1] in "dDwWsSpP":
        return ""
    return {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "a": "\a"}.get(escape[1], escape[1])
