"""Turns text into a tree, in time linear in the length of the text. Every error has its position. Pure.

LENGTH_BYTES_MAX, NESTING_MAX, TERMS_MAX, FUNCTIONS_MAX, LIST_ITEMS_MAX and PATTERNS_MAX bound the cost of one filter;
each has its own error. Nesting counts parentheses, functions, NOT, minus and chains of arithmetic, but not the operands
of AND and OR.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

from lark import Lark, Token, Transformer
from lark.exceptions import UnexpectedInput, UnexpectedToken

from sow_server.engine.values.fields import INTEGER_DIGITS_MAX
from sow_server.engine.values.patterns import PatternError, searcher
from sow_server.filters.errors import FilterError
from sow_server.filters.tree import (
    ARGUMENTS,
    LITERALS,
    STEPS_MAX,
    And,
    Arithmetic,
    Between,
    Boolean,
    Compare,
    Comparison,
    Expression,
    Filter,
    Function,
    FunctionCall,
    In,
    IsNull,
    Like,
    Literal,
    Matches,
    Metadata,
    MetadataName,
    Negate,
    Not,
    Null,
    Number,
    Operator,
    Or,
    Path,
    Step,
    Text,
    TextTest,
    arguments_text,
)

LENGTH_BYTES_MAX: Final = 64 << 10
NESTING_MAX: Final = 64
TERMS_MAX: Final = 6_000
"""Comparisons, conditions, functions and calculations in a filter. Compiling them is one call that holds the GIL, for
about 20 µs each."""
FUNCTIONS_MAX: Final = 250
"""Functions in a filter. Each may take milliseconds of a reader thread on a large text."""
LIST_ITEMS_MAX: Final = 10_000
PATTERNS_MAX: Final = 100
"""LIKE conditions in a filter: each keeps a compiled pattern in memory."""


def parse(text: str) -> Filter:
    """The tree of a filter. Raises FilterError."""
    try:
        length = len(text.encode())
    except UnicodeEncodeError as error:
        raise FilterError("not a Unicode character", error.start, text.encode(errors="replace").decode()) from None
    if length > LENGTH_BYTES_MAX:
        raise FilterError(f"a filter of {length} bytes, more than the limit of {LENGTH_BYTES_MAX}")
    try:
        tree: object = _lark().parse(text)
    except UnexpectedInput as error:
        raise _unexpected(error, text) from None
    except _Fault as fault:
        raise FilterError(fault.what, fault.position, text) from None
    assert isinstance(tree, _Part), "the transformer makes a part of every rule"
    return tree.node


def may_be_condition(expression: Expression) -> bool:
    """Whether an expression can be true or false. A field can; only its value decides it."""
    match expression:
        case Number() | Text() | Metadata() | Negate() | Arithmetic():
            return False
        case FunctionCall(Function.IF, (_, *branches)):
            return any(may_be_condition(branch) for branch in branches)
        case FunctionCall(Function.COALESCE, arguments):
            return any(may_be_condition(argument) for argument in arguments)
        case FunctionCall():
            return False
        case _:
            return True


# --- from the rules of the grammar to nodes --------------------------------------------------------------------------


class _Part(NamedTuple):
    """A node, the position of its text, its depth, and its counts of bounded things, itself included."""

    node: Expression
    position: int
    depth: int
    terms: int
    functions: int
    patterns: int


class _List(NamedTuple):
    parts: list[_Part]


class _Fault(Exception):
    """A fault that is found where the text of the filter is not at hand."""

    def __init__(self, what: str, position: int) -> None:
        self.what = what
        self.position = position


_Child: TypeAlias = Token | _Part | _List
_LEAVES: Final = (Path, Metadata, *LITERALS)
_ESCAPE: Final = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_ESCAPED: Final = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", "'": "'", '"': '"'}
_STEP: Final = re.compile(r"/\[((?:[^\]\\]|\\.)+)\]|/([^/\[]+)|\[([0-9]+)\]", re.DOTALL)
_WHOLE_STEP: Final = re.compile(r"/((?:[^/\\]|\\.)+)", re.DOTALL)
_NAME_ESCAPE: Final = re.compile(r"\\([\]\\/])")
_COMPARISONS: Final = {operator.value: operator for operator in Comparison} | {
    "==": Comparison.EQUAL,
    "<>": Comparison.NOT_EQUAL,
}


def _position(piece: _Child) -> int:
    if isinstance(piece, Token):
        return piece.start_pos or 0
    return piece.position if isinstance(piece, _Part) else _position(piece.parts[0])


def _built(node: Expression, pieces: Sequence[_Child]) -> _Part:
    position = _position(pieces[0])
    depth = 1
    terms = 0 if isinstance(node, _LEAVES) else 1
    functions = 1 if isinstance(node, FunctionCall) else 0
    patterns = 1 if isinstance(node, Like) else 0
    for piece in pieces:
        for part in (piece,) if isinstance(piece, _Part) else piece.parts if isinstance(piece, _List) else ():
            depth = max(depth, part.depth + 1)
            terms += part.terms
            functions += part.functions
            patterns += part.patterns
            if terms > TERMS_MAX:
                raise _Fault(f"more conditions and functions than the limit of {TERMS_MAX}", part.position)
            if functions > FUNCTIONS_MAX:
                raise _Fault(f"more functions than the limit of {FUNCTIONS_MAX}", part.position)
            if patterns > PATTERNS_MAX:
                raise _Fault(f"more LIKE conditions than the limit of {PATTERNS_MAX}", part.position)
    if depth > NESTING_MAX:
        raise _Fault(f"nested deeper than the limit of {NESTING_MAX}", position)
    return _Part(node, position, depth, terms, functions, patterns)


def _nodes(pieces: Sequence[_Child]) -> list[Expression]:
    return [piece.node for piece in pieces if isinstance(piece, _Part)]


def _condition(part: _Part) -> Expression:
    if not may_be_condition(part.node):
        raise _Fault("expected a condition", part.position)
    return part.node


class _Builder(Transformer[Token, _Part]):
    """Runs inside the parser, one call for each recognised rule; methods are named after the grammar's aliases."""

    def start(self, pieces: list[_Child]) -> _Part:
        (part,) = pieces
        assert isinstance(part, _Part), "start is a disjunction"
        _condition(part)
        return part

    def any_of(self, pieces: list[_Child]) -> _Part:
        return self._chain(pieces, Or)

    def all_of(self, pieces: list[_Child]) -> _Part:
        return self._chain(pieces, And)

    def _chain(self, pieces: list[_Child], node: type[And | Or]) -> _Part:
        return _built(node(tuple([_condition(piece) for piece in pieces if isinstance(piece, _Part)])), pieces)

    def negated(self, pieces: list[_Child]) -> _Part:
        _, operand = pieces
        assert isinstance(operand, _Part), "NOT has an operand"
        return _built(Not(_condition(operand)), pieces)

    def compared(self, pieces: list[_Child]) -> _Part:
        left, right = _nodes(pieces)
        return _built(Compare(_COMPARISONS[str(pieces[1])], left, right), pieces)

    def listed(self, pieces: list[_Child]) -> _Part:
        (operand,) = _nodes(pieces)
        items = pieces[-2]
        assert isinstance(items, _List), "IN ( literals )"
        return self._perhaps_not(In(operand, _literals(items)), pieces)

    def between(self, pieces: list[_Child]) -> _Part:
        operand, low, high = _nodes(pieces)
        return self._perhaps_not(Between(operand, low, high), pieces)

    def like(self, pieces: list[_Child]) -> _Part:
        (operand,) = _nodes(pieces)
        token = pieces[-1]
        assert isinstance(token, Token), "LIKE TEXT"
        pattern = _unquoted(token)
        try:
            searcher(pattern)
        except PatternError as error:
            raise _Fault(f"expected a regular expression; {error}", _position(token)) from None
        return self._perhaps_not(Like(operand, pattern), pieces)

    def tested(self, pieces: list[_Child]) -> _Part:
        operand, wanted = _nodes(pieces)
        return self._perhaps_not(Matches(_text_test(pieces[-2]), operand, (wanted,)), pieces)

    def tested_several(self, pieces: list[_Child]) -> _Part:
        (operand,) = _nodes(pieces)
        wanted = pieces[-2]
        assert isinstance(wanted, _List), "TEXT_TEST ( several )"
        return self._perhaps_not(Matches(_text_test(pieces[-4]), operand, _literals(wanted)), pieces)

    def is_null(self, pieces: list[_Child]) -> _Part:
        (operand,) = _nodes(pieces)
        return self._perhaps_not(IsNull(operand), pieces)

    def _perhaps_not(self, node: Expression, pieces: list[_Child]) -> _Part:
        negated = any(isinstance(piece, Token) and piece.type == "NOT" for piece in pieces)
        part = _built(node, pieces)
        return part._replace(node=Not(node)) if negated else part

    def arithmetic(self, pieces: list[_Child]) -> _Part:
        left, right = _nodes(pieces)
        return _built(Arithmetic(Operator(str(pieces[1])), left, right), pieces)

    def negate(self, pieces: list[_Child]) -> _Part:
        (operand,) = _nodes(pieces)
        return _built(Negate(operand), pieces)

    def number(self, pieces: list[_Child]) -> _Part:
        return _built(_number(pieces[0], ""), pieces)

    def negative_number(self, pieces: list[_Child]) -> _Part:
        return _built(_number(pieces[1], "-"), pieces)

    def path(self, pieces: list[_Child]) -> _Part:
        text = str(pieces[0])
        steps: list[Step] = []
        if text.startswith("["):  # [/odd name/b]: brackets around the whole path
            end = re.compile(r"(?:[^\]\\]|\\.)*", re.DOTALL).match(text, 1)
            assert end is not None, "the grammar has matched it"
            steps += [_name(name) for name in _WHOLE_STEP.findall(text[1 : end.end()])]
            text = text[end.end() + 1 :]
        for bracketed, plain, subscript in _STEP.findall(text):
            steps.append(int(subscript.lstrip("0")[:21] or "0") if subscript else plain or _name(bracketed))
        if len(steps) > STEPS_MAX:
            raise _Fault(f"a path of {len(steps)} steps, more than the limit of {STEPS_MAX},", _position(pieces[0]))
        try:
            return _built(Path(tuple(steps)), pieces)
        except ValueError as error:
            raise _Fault(str(error), _position(pieces[0])) from None

    def metadata(self, pieces: list[_Child]) -> _Part:
        try:
            return _built(Metadata(MetadataName(str(pieces[0])[1:].lower())), pieces)
        except ValueError:
            names = ", ".join(f"@{name.value}" for name in MetadataName)
            raise _Fault(f"expected one of {names}", _position(pieces[0])) from None

    def text(self, pieces: list[_Child]) -> _Part:
        (token,) = pieces
        assert isinstance(token, Token), "TEXT"
        return _built(Text(_unquoted(token)), pieces)

    def true(self, pieces: list[_Child]) -> _Part:
        return _built(Boolean(True), pieces)

    def false(self, pieces: list[_Child]) -> _Part:
        return _built(Boolean(False), pieces)

    def null(self, pieces: list[_Child]) -> _Part:
        return _built(Null(), pieces)

    def call(self, pieces: list[_Child]) -> _Part:
        word, _, arguments, _ = pieces
        assert isinstance(arguments, _List), "WORD ( arguments )"
        try:
            function = Function(str(word).upper())
        except ValueError:
            names = ", ".join(function.value for function in Function)
            raise _Fault(f"no function {word}; there are {names}", _position(word)) from None
        least, most = ARGUMENTS[function]
        if len(arguments.parts) < least or (most is not None and len(arguments.parts) > most):
            given = len(arguments.parts)
            raise _Fault(f"{function.value} takes {arguments_text(function)}, not {given},", _position(word))
        if function is Function.IF:
            _condition(arguments.parts[0])
        if function is Function.ARRAY_COUNT and not isinstance(arguments.parts[0].node, Path):
            raise _Fault("expected a field", arguments.parts[0].position)
        return _built(FunctionCall(function, tuple(_nodes(arguments.parts))), pieces)

    def parenthesised(self, pieces: list[_Child]) -> _Part:
        (inner,) = [piece for piece in pieces if isinstance(piece, _Part)]
        if inner.depth >= NESTING_MAX:
            raise _Fault(f"nested deeper than the limit of {NESTING_MAX}", _position(pieces[0]))
        return inner._replace(position=_position(pieces[0]), depth=inner.depth + 1)

    def arguments(self, pieces: list[_Child]) -> _List:
        return _List([piece for piece in pieces if isinstance(piece, _Part)])

    def literals(self, pieces: list[_Child]) -> _List:
        if len(pieces) > LIST_ITEMS_MAX:
            raise _Fault(f"a list of {len(pieces)}, more than the limit of {LIST_ITEMS_MAX},", _position(pieces[0]))
        return self.arguments(pieces)

    several = literals


def _literals(items: _List) -> tuple[Literal, ...]:
    return tuple([part.node for part in items.parts if isinstance(part.node, (Null, Boolean, Number, Text))])


def _text_test(piece: _Child) -> TextTest:
    return TextTest(" ".join(str(piece).upper().split()))


def _number(token: _Child, sign: str) -> Literal:
    text = str(token)
    if not text.isdigit():
        return Number(float(sign + text))
    digits = text.lstrip("0") or "0"
    if len(digits) > INTEGER_DIGITS_MAX:  # it would be infinite, and so equal to every other one
        what = f"an integer of {len(digits)} digits, more than the limit of {INTEGER_DIGITS_MAX},"
        raise _Fault(what, _position(token))
    return Number(int(sign + digits))


def _name(text: str) -> str:
    return _NAME_ESCAPE.sub(r"\1", text)


def _unquoted(token: Token) -> str:
    """The text of a literal. A backslash that begins no escape stays, so that patterns can be written plainly:
    '\\d+'."""

    def replaced(escape: re.Match[str]) -> str:
        return chr(int(escape[1], 16)) if escape[1] else _ESCAPED.get(escape[2], escape[0])

    text = _ESCAPE.sub(replaced, token[1:-1])
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")  # joins surrogate halves from two \u escapes
    except UnicodeDecodeError:
        raise _Fault("half a Unicode character in a text", _position(token)) from None


@functools.cache
def _lark() -> Lark:
    return Lark.open("grammar.lark", rel_to=__file__, parser="lalr", transformer=_Builder(), maybe_placeholders=False)


# --- expectations ----------------------------------------------------------------------------------------------------

_KEYWORDS: Final = re.compile(
    r"(?:AND|OR|NOT|IN|BETWEEN|LIKE|BEGINS|ENDS|CONTAINS|IS|TRUE|FALSE|NULL)\Z", re.IGNORECASE
)
_TEXT: Final = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
_BARE_WORD: Final = re.compile(r"[^\W\d][\w.:$#-]{0,40}")


def _unexpected(error: UnexpectedInput, text: str) -> FilterError:
    position = error.pos_in_stream
    if isinstance(error, UnexpectedToken) and error.token.type == "$END":
        position = len(text)
    assert position is not None, "an unexpected token has a position"
    found = text[position : position + 1]
    # Parse again to ask the parser for everything it would accept: the error knows only some of it.
    once_more = _lark().parse_interactive(text)
    with contextlib.suppress(UnexpectedInput):
        once_more.exhaust_lexer()
    accepted: set[str] = once_more.accepts()  # type: ignore[no-untyped-call]  # lark's annotations are incomplete
    if found in ("'", '"') and not _TEXT.match(text, position):
        return FilterError("expected the end of a text; its quote is never closed", position, text)
    what = f"expected {_expected(accepted)}"
    word = _BARE_WORD.match(text, position)
    if "PATH" in accepted and word and not _KEYWORDS.match(word[0]):
        if text[position - 1 : position] == "-":
            what += "; a name with a hyphen is put in brackets: /[a-b]"
        else:
            what += f"; a field is written /{word[0]}, a text '{word[0]}'"
    return FilterError(what, position, text)


def _expected(accepted: set[str]) -> str:
    """The tokens that the parser would accept, in a reader's words."""
    if "PATH" in accepted:
        choices = ["a value"]
    elif "NUMBER" in accepted:
        choices = ["a literal"] if "TEXT" in accepted else ["a number"]
    elif "IN" in accepted:
        choices = ["an operator" if "COMPARISON" in accepted else "IN, LIKE, BETWEEN, BEGINS WITH, ENDS WITH, CONTAINS"]
    elif "TEXT" in accepted:
        choices = ["a text"]
    elif "NULL" in accepted:
        choices = ["NULL", "NOT NULL"] if "NOT" in accepted else ["NULL"]
    elif "LPAR" in accepted:
        choices = ["'('"]
    else:
        choices = []
    if "AND" in accepted:
        choices += ["AND", "OR"] if "OR" in accepted else ["AND"]
    if "_COMMA" in accepted:
        choices.append("','")
    if "RPAR" in accepted:
        choices.append("')'")
    if "$END" in accepted:
        choices.append("the end")
    return choices[0] if len(choices) == 1 else f"{', '.join(choices[:-1])} or {choices[-1]}"
