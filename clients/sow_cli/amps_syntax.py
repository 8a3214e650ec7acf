"""Filters in the language of AMPS: text into a tree, by its public documentation. Pure.

[1]  Every error has the position of its cause, from 0. A text whose meaning is open is an error: nothing is guessed.
[2]  The time is linear in the length of the text, and NESTING_MAX bounds the depth of the tree.
[3]  Texts are read by their escapes here, and nowhere else: no later step looks into the text of a filter.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

LENGTH_BYTES_MAX: Final = 64 << 10
NESTING_MAX: Final = 60
"""Below the limit of 64 of a filter here, which has parentheses of its own, and far below that of Python."""


class AmpsError(Exception):
    """The text is no filter of AMPS, or has no counterpart here."""

    def __init__(self, what: str, position: int) -> None:
        fault, semicolon, advice = what.partition(";")  # the fault, its place, and only then the advice
        super().__init__(f"{fault} at {position}{semicolon}{advice}")
        self.position = position


# Every node has the position at which its text begins.


@dataclass(frozen=True, slots=True)
class Text:
    position: int
    value: str
    source: str
    """As it is written, between its quotes."""
    raw: bool
    """True if it is written as r'…': a backslash is one."""


@dataclass(frozen=True, slots=True)
class Number:
    position: int
    digits: str
    """As it is written, perhaps with a minus."""


@dataclass(frozen=True, slots=True)
class Constant:
    position: int
    name: str
    """`true`, `false` or `null`."""


@dataclass(frozen=True, slots=True)
class Field:
    position: int
    path: str
    """As it is written, which is its form here, too."""


@dataclass(frozen=True, slots=True)
class Call:
    position: int
    function: str
    """Its name in upper case."""
    arguments: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Negate:
    position: int
    operand: Node


@dataclass(frozen=True, slots=True)
class Arithmetic:
    position: int
    operator: str
    left: Node
    right: Node


@dataclass(frozen=True, slots=True)
class Compare:
    position: int
    operator: str
    """One of `=`, `!=`, `<`, `<=`, `>`, `>=`."""
    left: Node
    right: Node


@dataclass(frozen=True, slots=True)
class Among:
    """IN."""

    position: int
    operand: Node
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Between:
    position: int
    operand: Node
    low: Node
    high: Node


@dataclass(frozen=True, slots=True)
class Like:
    position: int
    operand: Node
    pattern: Node


@dataclass(frozen=True, slots=True)
class TextTest:
    position: int
    test: str
    """`BEGINS WITH`, `ENDS WITH` or `CONTAINS`."""
    operand: Node
    texts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class IsNull:
    position: int
    operand: Node


@dataclass(frozen=True, slots=True)
class Not:
    position: int
    operand: Node


@dataclass(frozen=True, slots=True)
class Chain:
    """AND, OR."""

    position: int
    word: str
    operands: tuple[Node, ...]


Node: TypeAlias = (
    Text
    | Number
    | Constant
    | Field
    | Call
    | Negate
    | Arithmetic
    | Compare
    | Among
    | Between
    | Like
    | TextTest
    | IsNull
    | Not
    | Chain
)


def parse(text: str) -> Node:
    """The tree of a filter. Raises AmpsError."""
    try:
        length = len(text.encode())
    except UnicodeEncodeError as error:
        raise AmpsError("not a Unicode character", error.start) from None
    if length > LENGTH_BYTES_MAX:
        raise AmpsError(f"a filter of {length} bytes is longer than the limit of {LENGTH_BYTES_MAX}", 0)
    parser = _Parser(_tokens(text))
    tree = parser.condition()
    parser.end()
    return tree


# --- tokens ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    """`word`, `text`, `number`, `field`, `end`; of a sign the sign itself."""
    position: int
    text: str


_SPACE: Final = re.compile(r"\s*")
_WORD: Final = re.compile(r"[^\W\d]\w*")
_QUOTED: Final = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
_RAW: Final = re.compile(r"""[rR](?:'[^']*'|"[^"]*")""")
_NUMBER: Final = re.compile(r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?(?![\w.])")
_STEP: Final = r"/(?:[\w.:$#]+|\[(?:[^\]\\]|\\.)+\])(?:\[[0-9]{1,18}\])*"
_FIELD: Final = re.compile(rf"(?:{_STEP})+", re.DOTALL)
_ELEMENT: Final = re.compile(r"/\[[0-9]+\]")
_SIGNS: Final = ("&&", "||", "==", "!=", "<>", "<=", ">=", *"=<>+-*/%(),!")
_SAME: Final = {"==": "=", "<>": "!="}
_CONSTANTS: Final = frozenset({"TRUE", "FALSE", "NULL"})
_KEYWORDS: Final = frozenset(
    {"AND", "OR", "NOT", "IN", "LIKE", "BETWEEN", "BEGINS", "ENDS", "WITH", "CONTAINS", "IS", "NAN"}
)


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    at, after_value = 0, False
    while True:
        space = _SPACE.match(text, at)
        assert space is not None, "it matches nothing, too"
        at = space.end()
        if at == len(text):
            tokens.append(_Token("end", at, ""))
            return tokens
        token = _token(text, at, after_value=after_value)
        tokens.append(token)
        at += len(token.text)
        after_value = token.kind in ("text", "number", "field", ")") or (
            token.kind == "word" and token.text.upper() in _CONSTANTS
        )


def _token(text: str, at: int, *, after_value: bool) -> _Token:
    if text[at] == "/" and not after_value:
        return _field(text, at)
    if raw := _RAW.match(text, at):
        return _Token("text", at, raw[0])
    if text[at] in "'\"":
        quoted = _QUOTED.match(text, at)
        if quoted is None:
            raise AmpsError("expected the end of a text; its quote is never closed", at)
        return _Token("text", at, quoted[0])
    for kind, form in (("number", _NUMBER), ("word", _WORD)):
        if found := form.match(text, at):
            return _Token(kind, at, found[0])
    for sign in _SIGNS:
        if text.startswith(sign, at):
            return _Token(_SAME.get(sign, sign), at, sign)
    if text[at].isdigit() or text[at] == ".":
        raise AmpsError("expected a number", at)
    if text[at] == "@":
        raise AmpsError("expected a value; an attribute of XML has no counterpart", at)
    raise AmpsError("expected a value or an operator", at)


def _field(text: str, at: int) -> _Token:
    found = _FIELD.match(text, at)
    end = at if found is None else found.end()
    follows = text[end : end + 2]
    if follows == "/@":
        raise AmpsError("an attribute of XML has no counterpart", end)
    if found is None:
        raise AmpsError("expected the name of a field behind /", at)
    if element := _ELEMENT.search(found[0]):
        raise AmpsError("expected a name; an element of an array is written /a[0]", at + element.start())
    # A name of AMPS may have a hyphen, and here it may not: /a-b is open to both readings.
    if re.fullmatch(r"-\w", follows):
        raise AmpsError(f"this may be one name or a subtraction; write {_both_readings(found[0], text[end:])}", end)
    if follows[:1] in ("[", "~", "\\") or re.fullmatch(r"/[^\s\d(]", follows):
        raise AmpsError("expected the end of a field", end)
    steps = len(re.findall(_STEP, found[0], re.DOTALL)) + found[0].count("[")
    if steps > 64:
        raise AmpsError(f"a path of {steps} steps is longer than the limit of 64", at)
    return _Token("field", at, found[0])


def _both_readings(field: str, rest: str) -> str:
    """The two ways to write a field and the hyphen behind it."""
    stem, _, name = field.rpartition("/")
    further = re.findall(r"-(\w+)", (re.match(r"(?:-\w+)+", rest) or [""])[0])
    if not further or "]" in name:
        return "/[a-b] or /a - /b"
    operands = [field, *(part if part.isdigit() else f"/{part}" for part in further)]
    return f"{stem}/[{'-'.join([name, *further])}] or {' - '.join(operands)}"


# --- the grammar -----------------------------------------------------------------------------------------------------


class _Parser:
    """A parser by recursive descent: each method takes the tokens of what it is named after."""

    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens = tokens
        self._next = 0
        self._depth = 0

    def end(self) -> None:
        """Raises AmpsError unless all is read."""
        if self._token.kind != "end":
            raise AmpsError("expected AND, OR or the end", self._token.position)

    def condition(self) -> Node:
        return self._chain("OR", "||")

    def _chain(self, word: str, sign: str) -> Node:
        operands = [self._operand(word)]
        while self._takes_word(word) or self._takes(sign):
            operands.append(self._operand(word))
        return operands[0] if len(operands) == 1 else Chain(operands[0].position, word, tuple(operands))

    def _operand(self, of: str) -> Node:
        return self._chain("AND", "&&") if of == "OR" else self._negation()

    def _negation(self) -> Node:
        at = self._token.position
        if not (self._takes_word("NOT") or self._takes("!")):
            return self._comparison()
        self._deeper(at)
        operand = self._negation()
        self._depth -= 1
        return Not(at, operand)

    def _comparison(self) -> Node:
        left = self._sum()
        at = self._token.position
        if self._token.kind in ("=", "!=", "<", "<=", ">", ">="):
            operator = self._take().kind
            return Compare(at, operator, left, self._sum())
        negated = self._takes_word("NOT")
        if self._takes_word("IS"):
            if negated:
                raise AmpsError("expected IN, LIKE, BETWEEN, BEGINS WITH or ENDS WITH", at)
            negated = self._takes_word("NOT")
            if self._takes_word("NAN"):
                raise AmpsError("IS NAN has no counterpart; a float that is no number is null here", at)
            self._expect_word("NULL")
            found: Node = IsNull(at, left)
        elif self._takes_word("IN"):
            found = Among(at, left, self._list("a list in parentheses"))
        elif self._takes_word("LIKE"):
            found = Like(at, left, self._sum())
        elif self._takes_word("BETWEEN"):
            low = self._sum()
            self._expect_word("AND")
            found = Between(at, left, low, self._sum())
        elif test := self._text_test():
            several = self._token.kind == "("
            found = TextTest(at, test, left, self._list("texts") if several else (self._sum(),))
        elif negated:
            raise AmpsError("expected IN, LIKE, BETWEEN, BEGINS WITH or ENDS WITH", self._token.position)
        else:
            return left
        return Not(at, found) if negated else found

    def _text_test(self) -> str:
        for word in ("BEGINS", "ENDS"):
            if self._takes_word(word):
                self._expect_word("WITH")
                return f"{word} WITH"
        return "CONTAINS" if self._takes_word("CONTAINS") else ""

    def _sum(self) -> Node:
        return self._arithmetic(("+", "-"), self._product)

    def _product(self) -> Node:
        return self._arithmetic(("*", "/", "%"), self._unary)

    def _arithmetic(self, operators: tuple[str, ...], operand: Callable[[], Node]) -> Node:
        """A chain, which is as deep as it is long."""
        left, depth = operand(), self._depth
        while self._token.kind in operators:
            operator = self._take()
            self._deeper(operator.position)
            left = Arithmetic(left.position, operator.kind, left, operand())
        self._depth = depth
        return left

    def _unary(self) -> Node:
        at = self._token.position
        if not self._takes("-"):
            return self._atom()
        self._deeper(at)
        operand = self._unary()
        self._depth -= 1
        if isinstance(operand, Number) and not operand.digits.startswith("-"):
            return Number(at, f"-{operand.digits}")
        return Negate(at, operand)

    def _atom(self) -> Node:
        token = self._token
        match token.kind:
            case "text":
                return _text(self._take())
            case "number":
                self._take()
                digits = token.text.lstrip("0")
                if token.text.isdecimal() and len(digits) > 4_300:
                    raise AmpsError("a number of more than 4300 digits", token.position)
                return Number(token.position, token.text)
            case "field":
                return Field(self._take().position, token.text)
            case "(":
                self._take()
                self._deeper(token.position)
                inner = self.condition()
                self._expect(")")
                self._depth -= 1
                return inner
            case "word" if token.text.upper() in _CONSTANTS:
                return Constant(self._take().position, token.text.lower())
            case "word" if token.text.upper() not in _KEYWORDS:
                return self._call()
            case _:
                raise AmpsError("expected a value", token.position)

    def _call(self) -> Node:
        name = self._take()
        if self._token.kind != "(":
            what = f"expected a value; a field is written /{name.text:.40}, a text '{name.text:.40}'"
            raise AmpsError(what, name.position)
        return Call(name.position, name.text.upper(), self._list("arguments", empty=True))

    def _list(self, what: str, *, empty: bool = False) -> tuple[Node, ...]:
        if self._token.kind != "(":
            raise AmpsError(f"expected {what}", self._token.position)
        self._deeper(self._take().position)
        items: list[Node] = []
        if not (empty and self._token.kind == ")"):
            items.append(self.condition())
            while self._takes(","):
                items.append(self.condition())
        self._expect(")")
        self._depth -= 1
        return tuple(items)

    # -- tokens ----------------------------------------------------------------------------------------------------

    @property
    def _token(self) -> _Token:
        return self._tokens[self._next]

    def _take(self) -> _Token:
        token = self._token
        self._next += 1
        return token

    def _takes(self, kind: str) -> bool:
        found = self._token.kind == kind
        self._next += found
        return found

    def _takes_word(self, word: str) -> bool:
        found = self._token.kind == "word" and self._token.text.upper() == word
        self._next += found
        return found

    def _expect(self, kind: str) -> None:
        if not self._takes(kind):
            raise AmpsError(f"expected '{kind}'", self._token.position)

    def _expect_word(self, word: str) -> None:
        if not self._takes_word(word):
            raise AmpsError(f"expected {word}", self._token.position)

    def _deeper(self, position: int) -> None:
        self._depth += 1
        if self._depth > NESTING_MAX:
            raise AmpsError(f"nested deeper than the limit of {NESTING_MAX}", position)


# --- texts -----------------------------------------------------------------------------------------------------------

_ESCAPE: Final = re.compile(r"\\(?:x([0-9a-fA-F]{2})|([0-7]{3})|(.))", re.DOTALL)
_CONTROLS: Final = {"a": b"\a", "b": b"\b", "t": b"\t", "n": b"\n", "f": b"\f", "r": b"\r"}


def _text(token: _Token) -> Text:
    """The text of a literal. AMPS has the escapes of C for control characters and bytes; any other character behind a
    backslash is itself."""
    if token.text[0] in "rR":
        return Text(token.position, token.text[2:-1], token.text[2:-1], raw=True)
    source = token.text[1:-1]
    pieces: list[bytes] = []
    at = 0
    for escape in _ESCAPE.finditer(source):
        pieces.append(source[at : escape.start()].encode())
        at = escape.end()
        hexadecimal, octal, other = escape.groups()
        if other is not None:
            pieces.append(_CONTROLS.get(other) or other.encode())
            continue
        value = int(hexadecimal, 16) if hexadecimal else int(octal, 8)
        if value > 0xFF:
            raise AmpsError("expected a byte, at most \\377,", token.position + 1 + escape.start())
        pieces.append(bytes([value]))
    pieces.append(source[at:].encode())
    try:
        return Text(token.position, b"".join(pieces).decode(), source, raw=False)
    except UnicodeDecodeError:
        raise AmpsError("the bytes of a text are not UTF-8", token.position) from None
