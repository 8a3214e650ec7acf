"""Turns text into a tree, in time linear in the length of the text. Every error has its position. Pure.

LENGTH_BYTES_MAX, NESTING_MAX, TERMS_MAX, FUNCTIONS_MAX, LIST_ITEMS_MAX and PATTERNS_MAX bound the cost of one filter;
each has its own error. Nesting counts parentheses, functions, NOT, minus and chains of arithmetic, but not the operands
of AND and OR. The value of a parameter is put into the tree where its name stands (parameters [1]).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Final, NamedTuple, TypeAlias

from lark import Lark, Token, Transformer
from lark.exceptions import UnexpectedInput

from sow_server.engine.values.fields import INTEGER_DIGITS_MAX
from sow_server.engine.values.patterns import PatternError, searcher
from sow_server.filters.aggregate_calls import AGGREGATES, AggregateCalls, AggregateFunction
from sow_server.filters.expectations import unexpected
from sow_server.filters.filter_errors import FilterError
from sow_server.filters.parameters import Parameter, Parameters
from sow_server.filters.printer import print_filter
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
    replaces,
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


def parse(
    text: str, parameters: Parameters = (), start: str = "start", calls: AggregateCalls | None = None
) -> Expression:
    """The tree of a filter, with the values of its parameters in it. Raises FilterError.

    With `calls` it is an expression of an answer of groups: `calls` takes its aggregates and its fields. With `start`
    "value" it need not be a condition.
    """
    try:
        length = len(text.encode())
    except UnicodeEncodeError as error:
        raise FilterError("not a Unicode character", error.start, text.encode(errors="replace").decode()) from None
    if length > LENGTH_BYTES_MAX:
        raise FilterError(f"a filter of {length} bytes, more than the limit of {LENGTH_BYTES_MAX}")
    by_name, room = {each.name: each for each in parameters}, LENGTH_BYTES_MAX - length
    given = _Given(by_name, room, calls)
    token = _GIVEN.set(given)
    try:
        tree: object = _lark().parse(text, start)
    except UnexpectedInput as error:
        again = None if calls is None else AggregateCalls()
        _GIVEN.set(_Given(by_name, room, again))  # it is parsed once more, and nothing is to count twice
        raise unexpected(error, text, _lark().parse_interactive(text, start)) from None
    except _Fault as fault:
        raise FilterError(fault.what, fault.position, text) from None
    finally:
        _GIVEN.reset(token)
    assert isinstance(tree, _Part), "the transformer makes a part of every rule"
    if unused := given.by_name.keys() - given.used:
        raise FilterError(f"there is no parameter :{min(unused)} in it, and a value of this name is given")
    return tree.node


def may_be_condition(expression: Expression) -> bool:
    """True if an expression can be true or false. A field can; only its value decides it."""
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
    parameter: Parameter | None = None
    """The parameter of which it is the value. While this is a list, the node stands for nothing."""


class _Given:
    """The parameters of the text that is being parsed."""

    def __init__(self, by_name: dict[str, Parameter], room: int, calls: AggregateCalls | None) -> None:
        """`room`: the bytes that their values may add to the filter (parameters [2]). `calls`: None in a filter."""
        self.by_name = by_name
        self.calls: Final = calls
        self.used: set[str] = set()
        self._room = room

    def use(self, token: Token) -> Parameter:
        name = token[1:]
        parameter = self.by_name.get(name)
        if parameter is None:
            others = ", ".join([f":{other}" for other in list(self.by_name)[:10]])
            raise _Fault(
                f"no value is given for the parameter :{name:.80}" + (f"; there is {others}" if others else ""),
                _position(token),
            )
        self.used.add(name)
        if len(parameter.literals) > LIST_ITEMS_MAX:
            count = len(parameter.literals)
            raise _Fault(
                f"the parameter :{name} is a list of {count}, more than the limit of {LIST_ITEMS_MAX},",
                _position(token),
            )
        self.take(parameter.length_bytes, _position(token), f"with the value of :{name}")
        return parameter

    def take(self, size: int, position: int, why: str) -> None:
        """Counts bytes that the filter has beyond its text."""
        self._room -= size
        if self._room < 0:
            raise _Fault(f"{why} the filter is longer than the limit of {LENGTH_BYTES_MAX} bytes", position)


_GIVEN: Final[ContextVar[_Given]] = ContextVar("given")
"""The parser is made once, with its builder; so the parameters of one text reach the builder from the side."""


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
    patterns = 1 if isinstance(node, Like) or replaces(node) else 0
    for piece in pieces:
        for part in (piece,) if isinstance(piece, _Part) else piece.parts if isinstance(piece, _List) else ():
            _refuse_list(part)
            depth = max(depth, part.depth + 1)
            terms += part.terms
            functions += part.functions
            patterns += part.patterns
            _check_counts(_Part(node, position, depth, terms, functions, patterns), part.position)
    if depth > NESTING_MAX:
        raise _Fault(f"nested deeper than the limit of {NESTING_MAX}", position)
    return _Part(node, position, depth, terms, functions, patterns)


def _aggregated(function: AggregateFunction, argument: _Part | None, pieces: Sequence[_Child]) -> _Part:
    """The aggregate, in whose place a field of the groups stands."""
    position, calls = _position(pieces[0]), _GIVEN.get().calls
    if calls is None:
        raise _Fault(f"{function.value} is an aggregate; a filter looks at one record, and has none", position)
    place = calls.aggregate(function, None if argument is None else argument.node, position)
    if isinstance(place, int):
        raise _Fault("an aggregate in an aggregate", place)
    return _built(place, pieces)


def _check_counts(part: _Part, position: int) -> None:
    if part.terms > TERMS_MAX:
        raise _Fault(f"more conditions and functions than the limit of {TERMS_MAX}", position)
    if part.functions > FUNCTIONS_MAX:
        raise _Fault(f"more functions than the limit of {FUNCTIONS_MAX}", position)
    if part.patterns > PATTERNS_MAX:
        raise _Fault(f"more regular expressions than the limit of {PATTERNS_MAX}", position)


def _nodes(pieces: Sequence[_Child]) -> list[Expression]:
    return [piece.node for piece in pieces if isinstance(piece, _Part)]


def _refuse_list(part: _Part) -> None:
    if part.parameter is not None and part.parameter.is_list:
        name = part.parameter.name
        raise _Fault(
            f"the parameter :{name} is a list, which only IN, BEGINS WITH, ENDS WITH and CONTAINS take,", part.position
        )


def _condition(part: _Part) -> Expression:
    _refuse_list(part)
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

    def value(self, pieces: list[_Child]) -> _Part:
        (part,) = pieces
        assert isinstance(part, _Part), "value is a disjunction"
        _refuse_list(part)
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
        assert isinstance(items, _List), "IN ( items )"
        others = [part.node for part in items.parts if not isinstance(part.node, LITERALS)]
        if not others:
            return self._perhaps_not(_member_of(operand, _literals(items)), pieces)
        # Literals in one list are looked up; whatever else is compared with is a comparison of its own.
        known = [In(operand, _literals(items))] if len(others) < len(items.parts) else []
        each: list[Expression] = [*known, *[Compare(Comparison.EQUAL, operand, other) for other in others]]
        part = self._perhaps_not(Or(tuple(each)) if len(each) > 1 else each[0], pieces)
        return _repeated(part, pieces[0], len(each))

    def listed_by_name(self, pieces: list[_Child]) -> _Part:
        (operand,) = _nodes(pieces[:-1])
        part = pieces[-1]
        assert isinstance(part, _Part), "IN parameter"
        assert part.parameter is not None, "its value"
        if not part.parameter.is_list:
            kind = part.parameter.kind
            raise _Fault(f"the parameter :{part.parameter.name} is {kind}, and IN takes a list,", part.position)
        return self._perhaps_not(_member_of(operand, part.parameter.literals), pieces[:-1])

    def between(self, pieces: list[_Child]) -> _Part:
        operand, low, high = _nodes(pieces)
        return self._perhaps_not(Between(operand, low, high), pieces)

    def like(self, pieces: list[_Child]) -> _Part:
        (operand,) = _nodes(pieces)
        token = pieces[-1]
        assert isinstance(token, Token), "LIKE TEXT"
        return self._perhaps_not(_like(operand, _unquoted(token), _position(token)), pieces)

    def like_by_name(self, pieces: list[_Child]) -> _Part:
        (operand,) = _nodes(pieces[:-1])
        part = pieces[-1]
        assert isinstance(part, _Part), "LIKE parameter"
        assert part.parameter is not None, "its value"
        if not isinstance(part.node, Text) or part.parameter.is_list:
            name, kind = part.parameter.name, part.parameter.kind
            raise _Fault(f"the parameter :{name} is {kind}, and LIKE takes a text,", part.position)
        return self._perhaps_not(_like(operand, part.node.value, part.position), pieces[:-1])

    def tested(self, pieces: list[_Child]) -> _Part:
        part = pieces[-1]
        if isinstance(part, _Part) and part.parameter is not None and part.parameter.is_list:
            (operand,) = _nodes(pieces[:-1])
            return self._perhaps_not(_any_text(_text_test(pieces[-2]), operand, part.parameter.literals), pieces[:-1])
        operand, wanted = _nodes(pieces)
        return self._perhaps_not(Matches(_text_test(pieces[-2]), operand, (wanted,)), pieces)

    def tested_several(self, pieces: list[_Child]) -> _Part:
        (operand,) = _nodes(pieces)
        wanted = pieces[-2]
        assert isinstance(wanted, _List), "TEXT_TEST ( several )"
        return self._perhaps_not(_any_text(_text_test(pieces[-4]), operand, _literals(wanted)), pieces)

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
            part = _built(Path(tuple(steps)), pieces)
        except ValueError as error:
            raise _Fault(str(error), _position(pieces[0])) from None
        if (calls := _GIVEN.get().calls) is not None:
            calls.field(part.node, part.position)
        return part

    def metadata(self, pieces: list[_Child]) -> _Part:
        try:
            part = _built(Metadata(MetadataName(str(pieces[0])[1:].lower())), pieces)
        except ValueError:
            names = ", ".join(f"@{name.value}" for name in MetadataName)
            raise _Fault(f"expected one of {names}", _position(pieces[0])) from None
        if (calls := _GIVEN.get().calls) is not None:
            calls.field(part.node, part.position)
        return part

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

    def parameter(self, pieces: list[_Child]) -> _Part:
        (token,) = pieces
        assert isinstance(token, Token), "PARAMETER"
        parameter = _GIVEN.get().use(token)
        node = Null() if parameter.is_list else parameter.literals[0]
        return _built(node, pieces)._replace(parameter=parameter)

    def call(self, pieces: list[_Child]) -> _Part:
        word, _, arguments, _ = pieces
        assert isinstance(arguments, _List), "WORD ( arguments )"
        if (aggregate := AGGREGATES.get(str(word).upper())) is not None:
            if len(arguments.parts) != 1:
                raise _Fault(f"{aggregate.value} takes 1 argument, not {len(arguments.parts)},", _position(word))
            return _aggregated(aggregate, arguments.parts[0], [word, *arguments.parts])
        try:
            function = Function(str(word).upper())
        except ValueError:
            known = AGGREGATES if _GIVEN.get().calls is not None else ()
            names = ", ".join([*known, *[function.value for function in Function]])
            raise _Fault(f"no function {word}; there are {names}", _position(word)) from None
        least, most = ARGUMENTS[function]
        if len(arguments.parts) < least or (most is not None and len(arguments.parts) > most):
            given = len(arguments.parts)
            raise _Fault(f"{function.value} takes {arguments_text(function)}, not {given},", _position(word))
        if function is Function.IF:
            _condition(arguments.parts[0])
        if function is Function.ARRAY_COUNT and not isinstance(arguments.parts[0].node, Path):
            raise _Fault("expected a field", arguments.parts[0].position)
        if function is Function.REGEXP_REPLACE:
            pattern = arguments.parts[1]
            _refuse_list(pattern)
            if not isinstance(pattern.node, Text):
                raise _Fault("expected a text, the pattern", pattern.position)
            _check_pattern(pattern.node.value, pattern.position)
        part = _built(FunctionCall(function, tuple(_nodes(arguments.parts))), pieces)
        if function is Function.MESSAGE_SIZE and (calls := _GIVEN.get().calls) is not None:
            calls.field(part.node, part.position)
        return part

    def counted(self, pieces: list[_Child]) -> _Part:
        """COUNT(*), or COUNT(DISTINCT …), which has an argument."""
        argument = next((piece for piece in pieces if isinstance(piece, _Part)), None)
        function = AggregateFunction.COUNT if argument is None else AggregateFunction.COUNT_DISTINCT
        return _aggregated(function, argument, pieces)

    def parenthesised(self, pieces: list[_Child]) -> _Part:
        (inner,) = [piece for piece in pieces if isinstance(piece, _Part)]
        if inner.depth >= NESTING_MAX:
            raise _Fault(f"nested deeper than the limit of {NESTING_MAX}", _position(pieces[0]))
        return inner._replace(position=_position(pieces[0]), depth=inner.depth + 1)

    def arguments(self, pieces: list[_Child]) -> _List:
        return _List([piece for piece in pieces if isinstance(piece, _Part)])

    def items(self, pieces: list[_Child]) -> _List:
        items: list[_Part] = []
        for part in self.arguments(pieces).parts:
            if part.parameter is not None and part.parameter.is_list:  # its members stand in its place
                items += [part._replace(node=each, parameter=None) for each in part.parameter.literals]
            else:
                items.append(part)
        if len(items) > LIST_ITEMS_MAX:
            raise _Fault(f"a list of {len(items)}, more than the limit of {LIST_ITEMS_MAX},", _position(pieces[0]))
        return _List(items)

    several = items


def _literals(items: _List) -> tuple[Literal, ...]:
    return tuple([part.node for part in items.parts if isinstance(part.node, (Null, Boolean, Number, Text))])


def _member_of(operand: Expression, items: tuple[Literal, ...]) -> Expression:
    """IN; false for the list of a parameter that has no member, whatever the operand."""
    return In(operand, items) if items else Boolean(False)


def _repeated(part: _Part, operand: _Child, count: int) -> _Part:
    """The part with the bounded things that come of an operand that stands in it `count` times. Without this, lists in
    operands of lists would double a filter with every few characters."""
    assert isinstance(operand, _Part), "a sum"
    more = count - 1
    _GIVEN.get().take(more * len(print_filter(operand.node).encode()), part.position, "with this list")
    made = part._replace(
        terms=part.terms + count + more * operand.terms,
        functions=part.functions + more * operand.functions,
        patterns=part.patterns + more * operand.patterns,
    )
    _check_counts(made, part.position)
    return made


def _any_text(test: TextTest, operand: Expression, texts: tuple[Literal, ...]) -> Expression:
    """BEGINS WITH and the like, for a list."""
    return Matches(test, operand, texts) if texts else Boolean(False)


def _like(operand: Expression, pattern: str, position: int) -> Like:
    _check_pattern(pattern, position)
    return Like(operand, pattern)


def _check_pattern(pattern: str, position: int) -> None:
    try:
        searcher(pattern)
    except PatternError as error:
        raise _Fault(f"expected a regular expression; {error}", position) from None


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
    return Lark.open(
        "grammar.lark",
        rel_to=__file__,
        parser="lalr",
        start=["start", "value"],
        transformer=_Builder(),
        maybe_placeholders=False,
    )
