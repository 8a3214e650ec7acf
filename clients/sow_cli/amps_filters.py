"""A filter of AMPS in the language of this store, and what it cannot keep. Pure.

[1]  The result is a filter that the server takes, or there is an AmpsError with a position: its bounds are checked
     here, as they are there (docs/filters.md, "Errors and bounds").
[2]  An empty text is null in AMPS. A comparison with it becomes a test that is true for a missing field, and for an
     empty text; below NOT, and inside functions, one that is never unknown.
[3]  Whatever may select other records than in AMPS is a remark, or an error where nothing comes near.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final, NamedTuple, assert_never

from sow_cli import amps_patterns
from sow_cli.amps_syntax import (
    LENGTH_BYTES_MAX,
    Among,
    AmpsError,
    Arithmetic,
    Between,
    Call,
    Chain,
    Compare,
    Constant,
    Field,
    IsNull,
    Like,
    Negate,
    Node,
    Not,
    Number,
    Text,
    TextTest,
    parse,
)

_NESTING_MAX: Final = 64
_TERMS_MAX: Final = 6_000
_FUNCTIONS_MAX: Final = 250
_ITEMS_MAX: Final = 10_000
_PATTERNS_MAX: Final = 100


class Remark(NamedTuple):
    """Something that the converted filter does not keep."""

    position: int
    text: str


class Converted(NamedTuple):
    """A filter of this store."""

    filter: str
    remarks: tuple[Remark, ...]
    """The remarks in the order of their positions."""


def from_amps(text: str) -> Converted:
    """The filter of this store that selects what `text` selects in AMPS. Raises AmpsError."""
    writer = _Writer()
    made = writer.condition(parse(text), exact=False)
    return Converted(made.text, tuple(sorted(writer.remarks.values())))


# How tightly an expression binds; an operand that binds less than its place needs gets parentheses.
_OR, _AND, _NOT, _COMPARISON, _SUM, _PRODUCT, _UNARY, _ATOM = range(8)


class _Made(NamedTuple):
    """Text of a filter, and its counts of what is bounded [1]."""

    text: str
    binds: int
    depth: int = 1
    terms: int = 0
    functions: int = 0
    patterns: int = 0


_FUNCTIONS: Final[dict[str, tuple[str, int, int | None]]] = {
    "LENGTH": ("LENGTH", 1, 1),
    "LOWER": ("LOWER", 1, 1),
    "UPPER": ("UPPER", 1, 1),
    "TRIM": ("TRIM", 1, 1),
    "CONCAT": ("CONCAT", 1, None),
    "SUBSTR": ("SUBSTR", 2, 3),
    "REPLACE": ("REPLACE", 3, 3),
    "ABS": ("ABS", 1, 1),
    "ROUND": ("ROUND", 1, 2),
    "FLOOR": ("FLOOR", 1, 1),
    "CEIL": ("CEIL", 1, 1),
    "CEILING": ("CEIL", 1, 1),
    "COALESCE": ("COALESCE", 1, None),
    "IF": ("IF", 3, 3),
    "INSTR": ("INSTR", 2, 2),
    "INSTR_I": ("INSTR", 2, 2),
    "STREQUAL_I": ("LOWER", 2, 2),
    "REVERSE": ("REVERSE", 1, 1),
    "REGEXP_REPLACE": ("REGEXP_REPLACE", 3, 3),
    "LEFT": ("SUBSTR", 2, 2),
    "MESSAGE_SIZE": ("MESSAGE_SIZE", 0, 0),
}
"""The functions of AMPS that have a counterpart: its name, and how many arguments they take."""
_INSTEAD: Final = {
    "UNIX_TIMESTAMP": "NOW_MICROS() counts microseconds",
    "NOW": "NOW_MICROS() counts microseconds",
    "STRFTIME": "FORMAT_TIME(micros, '%Y-%m-%d') writes a time",
    "STRPTIME": "DATE_MICROS(text) reads a time",
    "REPLACE_I": "REPLACE heeds upper and lower case",
    "RIGHT": "SUBSTR(/a, -3) is the end of a text",
    "SOW_KEY": "the key of a record is @key",
    "TOPIC": "the topic is @topic",
}
_CHARACTERS: Final = frozenset({"LENGTH", "SUBSTR", "LEFT"})
_FOUND: Final = {("!=", "0"), (">", "0"), (">=", "1")}
_NOT_FOUND: Final = {("=", "0"), ("<", "1"), ("<=", "0")}
_MIRRORED: Final = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
_WANTED: Final[dict[tuple[str, bool | None], bool]] = {
    ("=", True): True,
    ("=", False): False,
    ("!=", True): False,
    ("!=", False): True,
    (">", False): True,
    (">=", True): True,
    ("<", True): False,
    ("<=", False): False,
}
"""Comparisons of a condition that ask whether it is true, or false."""
_NUMERIC: Final = re.compile(r"[+-]?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_LITERALS: Final = (Text, Number, Constant)
_CONDITIONS: Final = (Compare, Among, Between, Like, TextTest, IsNull, Not, Chain)


class _Writer:
    def __init__(self) -> None:
        self.remarks: dict[tuple[str, str], Remark] = {}

    # -- conditions ------------------------------------------------------------------------------------------------

    def condition(self, node: Node, *, exact: bool) -> _Made:
        """A condition. `exact`: it must be false, and not only unknown, where AMPS has false: below NOT [2]."""
        match node:
            case Chain(position, word, operands):
                place, binds = (_AND, _OR) if word == "OR" else (_NOT, _AND)
                parts = [self.condition(operand, exact=exact) for operand in operands]
                return _joined(f" {word} ", [_in(part, place) for part in parts], binds, position)
            case Not(position, operand):
                return self._negated(operand, position)
            case Compare():
                return self._compared(node, exact=exact)
            case Among() | Between() | Like() | TextTest():
                return self._predicate(node, exact=exact)
            case IsNull(position, operand):
                return self._empty(operand, position, exact=exact)
            case Field(position, path):
                self._remark("truth", path, position, f"{path} alone is true only for the value true")
                if exact:
                    self._differs(node, position)
                return _Made(path, _ATOM)
            case Constant(_, name):
                return _Made("false" if name == "null" else name, _ATOM)  # no unknown [2]
            case Call(_, "STREQUAL_I" | "INSTR" | "INSTR_I", _):
                return self._tested_by(node, exact=exact)
            case Call(_, "IF" | "COALESCE", _) if _may_be_condition(node):
                return self._chosen(node, exact=exact)
        raise AmpsError("expected a condition", node.position)

    def _negated(self, operand: Node, position: int) -> _Made:
        match operand:
            case IsNull(at, inner):
                return self._not_empty(inner, at)
            case Among(_, _, items) if any(map(_is_null, items)):
                pass
            case Among() | Between() | Like() | TextTest():
                return self._predicate(operand, exact=True, negation="NOT ")
        return _made("NOT {}", [_in(self.condition(operand, exact=True), _NOT)], _NOT, position)

    def _compared(self, node: Compare, *, exact: bool) -> _Made:
        position, operator, left, right = node.position, node.operator, node.left, node.right
        if isinstance(left, _LITERALS) and not isinstance(right, _LITERALS):
            left, right, operator = right, left, _MIRRORED.get(operator, operator)
        if _is_null(left) or (isinstance(left, _LITERALS) and type(left) is not type(right) and not _is_null(right)):
            raise AmpsError("a comparison of two literals has no field", position)
        if _is_null(right):
            if operator not in ("=", "!="):
                raise AmpsError(f"{operator} with '', which is null in AMPS, has no counterpart", position)
            return self._empty(left, position, exact=exact) if operator == "=" else self._not_empty(left, position)
        if _is_condition(left) or _is_condition(right):
            return self._compared_truth(replace(node, operator=operator, left=left, right=right), exact=exact)
        if isinstance(left, Call) and left.function in ("INSTR", "INSTR_I") and isinstance(right, Number):
            if (operator, right.digits) in _FOUND:
                return self._tested_by(left, exact=exact)
            if (operator, right.digits) in _NOT_FOUND:
                return self._negated(left, position)
        if not isinstance(right, _LITERALS):
            self._differs(left, position)
            self._differs(right, position)
        elif operator != "=" or exact or _is_length_of_null(left, right):
            number = isinstance(right, Number) and (exact or operator in (">", ">=", "!="))
            self._differs(left, position, number=number, text=_is_no_number(right))
        if isinstance(left, Field) and isinstance(right, Text) and right.value.lower() in ("true", "false"):
            instead = f"{left.path} {operator} {right.value.lower()}"
            self._remark("boolean", left.path, position, f"if {left.path} is a boolean of JSON, write {instead}")
        return _made(f"{{}} {operator} {{}}", [self.sum(left), self.sum(right)], _COMPARISON, position)

    def _compared_truth(self, node: Compare, *, exact: bool) -> _Made:
        """A comparison of a condition, which is 1 or 0 in AMPS, and here a boolean that equals no number."""
        position, operator, left, right = node.position, node.operator, node.left, node.right
        if operator in ("=", "!=") and _is_condition(left) and _is_condition(right):
            parts = [_in(self.condition(side, exact=True), _SUM) for side in (left, right)]
            return _made(f"{{}} {operator} {{}}", parts, _COMPARISON, position)
        wanted = _WANTED.get((operator, _truth(right)))
        if wanted is None or (isinstance(right, Constant) and operator not in ("=", "!=")):
            what = "a condition is compared only with another one, and with true, false, 1 and 0,"
            raise AmpsError(what, position)
        return self.condition(left, exact=exact) if wanted else self._negated(left, position)

    def _predicate(self, node: Among | Between | Like | TextTest, *, exact: bool, negation: str = "") -> _Made:
        """`x IN (…)`, or with a negation `x NOT IN (…)`."""
        position = node.position
        if isinstance(node.operand, _LITERALS):
            raise AmpsError("a comparison of literals has no field", position)
        match node:
            case Among(_, operand, items):
                if any(map(_is_null, items)):
                    return self._among_empty(node, exact=exact)
                for item in items:
                    if not isinstance(item, _LITERALS):
                        raise AmpsError("expected a literal", item.position)
                number, text = any(isinstance(item, Number) for item in items), any(map(_is_no_number, items))
                exact = exact or any(_is_length_of_null(operand, item) for item in items)
                parts, form = self._several(items, position), f"IN ({', '.join(['{}'] * len(items))})"
            case Between(_, operand, low, high):
                number, text = isinstance(low, Number) or isinstance(high, Number), _is_no_number(low)
                parts, form = [self._end(low), self._end(high)], "BETWEEN {} AND {}"
            case Like(_, operand, pattern):
                number, text, parts, form = False, False, [_Made(_quoted(_pattern(pattern)), _ATOM, 0)], "LIKE {}"
            case TextTest(_, test, operand, texts):
                for one in texts:
                    if _is_null(one):
                        what = "'' is null in AMPS, and here it is in each text; leave it out"
                        raise AmpsError(what, one.position)
                    if len(texts) > 1 and not isinstance(one, _LITERALS):
                        raise AmpsError("expected a text", one.position)
                number = text = False
                if len(texts) == 1:
                    self._may_be_empty(texts[0])
                    parts, form = [self.sum(texts[0])], f"{test} {{}}"
                else:
                    parts, form = self._several(texts, position), f"{test} ({', '.join(['{}'] * len(texts))})"
            case _:
                assert_never(node)
        if exact or isinstance(node, Between):
            self._differs(operand, position, number=number, text=text)
        made = _made(f"{{}} {negation}{form}", [self.sum(operand), *parts], _COMPARISON, position)
        if isinstance(node, Like):
            made = _checked(made._replace(patterns=made.patterns + 1), position)
        return made

    def _several(self, items: tuple[Node, ...], position: int) -> list[_Made]:
        if len(items) > _ITEMS_MAX:
            raise AmpsError(f"a list of {len(items)} is longer than the limit of {_ITEMS_MAX}", position)
        return [self.value(item) for item in items]

    def _among_empty(self, node: Among, *, exact: bool) -> _Made:
        """A list with '' in it."""
        others = tuple([item for item in node.items if not _is_null(item)])
        empty = self._empty(node.operand, node.position, exact=exact)
        if not others:
            return empty
        listed = self._predicate(replace(node, items=others), exact=exact)
        return _joined(" OR ", [_in(empty, _AND), _in(listed, _AND)], _OR, node.position)

    def _tested_by(self, node: Call, *, exact: bool) -> _Made:
        """STREQUAL_I, and INSTR as a condition."""
        _check_arguments(node)
        text, part = node.arguments
        for argument in node.arguments:
            if _is_null(argument):
                raise AmpsError("'' is null in AMPS, and an empty text here; leave it out", argument.position)
        self._may_be_empty(part)
        if exact:
            self._differs(text, node.position)
            self._differs(part, node.position)
        if node.function == "INSTR":
            return _made("{} CONTAINS {}", [self.sum(text), self.sum(part)], _COMPARISON, node.position)
        word = "=" if node.function == "STREQUAL_I" else "CONTAINS"
        return _made(f"{{}} {word} {{}}", [self._lower(text), self._lower(part)], _COMPARISON, node.position)

    def _lower(self, node: Node) -> _Made:
        if isinstance(node, Text):
            return _Made(_quoted(node.value.lower()), _ATOM)
        return _called("LOWER", [self.value(node)], node.position)

    def _empty(self, operand: Node, position: int, *, exact: bool) -> _Made:
        """True where AMPS has null: for an empty text, too."""
        made = self.value(operand)
        if not exact:
            return _made("{} = {}", [_called("COALESCE", [made, _EMPTY], position), _EMPTY], _COMPARISON, position)
        return _by_emptiness(made, "true", "IS NULL", position)

    def _not_empty(self, operand: Node, position: int) -> _Made:
        # COALESCE(/x, '') != '' would be unknown for a number.
        return _by_emptiness(self.value(operand), "false", "IS NOT NULL", position)

    # -- values ----------------------------------------------------------------------------------------------------

    def sum(self, node: Node) -> _Made:
        """An operand of a comparison."""
        return _in(self.value(node), _SUM)

    def _end(self, node: Node) -> _Made:
        if _is_null(node):
            raise AmpsError("'' is null in AMPS; a range has no such end here", node.position)
        return self.sum(node)

    def value(self, node: Node) -> _Made:
        """An expression, as an argument of a function."""
        match node:
            case Text(_, value):
                return _Made(_quoted(value), _ATOM)
            case Number(position, digits):
                whole = digits.lstrip("-").lstrip("0")  # Python counts zeros as digits, of which it takes 4,300
                if whole.isdecimal() and not -(2**63) <= int("-" * digits.startswith("-") + whole) < 2**63:
                    self._remark("large", digits, position, "an integer beyond 64 bits is exact here")
                return _Made(digits, _UNARY if digits.startswith("-") else _ATOM)
            case Constant(_, name):
                return _Made(name, _ATOM)
            case Field(_, path):
                return _Made(path, _ATOM)
            case Negate(position, operand):
                return _made("-{}", [_within(self.value(operand))], _UNARY, position)
            case Arithmetic(position, operator, left, right):
                level = _SUM if operator in "+-" else _PRODUCT
                parts = [_in(self.value(left), level), _in(self.value(right), level + 1)]
                return _made(f"{{}} {operator} {{}}", parts, level, position)
            case Call() if not _is_condition(node):
                return self._call(node)
        raise AmpsError("expected a value; a condition is neither a number nor a text here", node.position)

    def _chosen(self, node: Call, *, exact: bool) -> _Made:
        """IF and COALESCE as conditions."""
        _check_arguments(node)
        number = 1 if node.function == "IF" else 0
        parts = [self.condition(one, exact=True) for one in node.arguments[:number]]
        for branch in node.arguments[number:]:
            truth = _truth(branch)
            made = self.condition(branch, exact=exact) if truth is None else _Made(str(truth).lower(), _ATOM)
            parts.append(made)
        return _called(node.function, parts, node.position)

    def _call(self, node: Call) -> _Made:
        position = node.position
        name = _check_arguments(node)
        arguments = node.arguments
        for argument in arguments:
            if isinstance(argument, Text) and not argument.value:
                self._remark("empty", "", argument.position, "'' was null as an argument, and is an empty text here")
        if node.function in _CHARACTERS or name == "INSTR":
            self._remark("characters", name, position, f"{node.function} counts characters here, and counted bytes")
        match node.function:
            case "INSTR_I":
                return _called(name, [self._lower(argument) for argument in arguments], position)
            case "LEFT":
                begin = _Made("1", _ATOM)
                return _called(name, [self.value(arguments[0]), begin, self.value(arguments[1])], position)
            case "IF":
                condition = self.condition(arguments[0], exact=True)
                return _called(name, [condition, *map(self.value, arguments[1:])], position)
            case "REGEXP_REPLACE":
                return self._replaced(node)
            case "COALESCE":
                self._remark(
                    "coalesce", "", position, "COALESCE takes an empty text for a value here, and for null there"
                )
            case "CONCAT":
                self._remark("concat", "", position, "CONCAT is null here where one of its texts is missing")
        return _called(name, [self.value(argument) for argument in arguments], position)

    def _replaced(self, node: Call) -> _Made:
        text, pattern, new = node.arguments
        if not isinstance(new, Text) or "\\" in new.value or "$" in new.value:
            raise AmpsError("expected a text without \\ and $; groups cannot be put into a replacement", new.position)
        parts = [self.value(text), _Made(_quoted(_pattern(pattern)), _ATOM), self.value(new)]
        made = _called("REGEXP_REPLACE", parts, node.position)
        return _checked(made._replace(patterns=made.patterns + 1), node.position)

    # -- remarks ---------------------------------------------------------------------------------------------------

    def _differs(self, node: Node, position: int, *, number: bool = False, text: bool = False) -> None:
        """A comparison of something that may be missing; with a `number`, or a `text` that is none, it may be of
        another type."""
        field = _field_of(node)
        if field is None:
            return
        also = ", or is a text that is no number," if number else ", or is a number or a boolean," if text else ""
        self._remark(
            "differs",
            field + also,
            position,
            f"where {field} is missing{also} this is unknown here, also below NOT, and AMPS may select the record",
        )

    def _may_be_empty(self, node: Node) -> None:
        """A text that is looked for, and may come from a field."""
        if (field := _field_of(node)) is not None:
            self._remark("part", field, node.position, f"an empty text in {field} is one here, and is null there")

    def _remark(self, kind: str, about: str, position: int, text: str) -> None:
        """Each remark is told once, at its first place."""
        self.remarks.setdefault((kind, about), Remark(position, text))


_EMPTY: Final = _Made("''", _ATOM)


def _by_emptiness(made: _Made, empty: str, otherwise: str, position: int) -> _Made:
    """`empty` for an empty text, else the test for null: never unknown, whatever the type of the value."""
    operand = _in(made, _SUM)
    is_empty = _made("{} = {}", [operand, _EMPTY], _COMPARISON, position)
    is_null = _made(f"{{}} {otherwise}", [operand], _COMPARISON, position)
    return _called("IF", [is_empty, _Made(empty, _ATOM), is_null], position)


def _is_null(node: Node) -> bool:
    return (isinstance(node, Text) and not node.value) or (isinstance(node, Constant) and node.name == "null")


def _is_condition(node: Node) -> bool:
    """True if its value is true or false."""
    match node:
        case Call(_, "IF", (_, *branches)) | Call(_, "COALESCE", branches):
            return any(map(_is_condition, branches))
        case Call(_, "STREQUAL_I", _):
            return True
    return isinstance(node, _CONDITIONS)


def _may_be_condition(node: Node) -> bool:
    """True if it may stand for a condition: also a field, which may be true."""
    match node:
        case Call(_, "IF", (_, *branches)) | Call(_, "COALESCE", branches):
            return any(map(_may_be_condition, branches))
    return isinstance(node, (Constant, Field)) or _is_condition(node)


def _truth(node: Node) -> bool | None:
    """The truth of 1, 0, true and false. None: the node is none of these."""
    match node:
        case Number(_, digits):
            return {0.0: False, 1.0: True}.get(float(digits))
        case Constant(_, "true" | "false" as name):
            return name == "true"
    return None


def _is_no_number(node: Node) -> bool:
    """True if it is a text that equals no number."""
    return isinstance(node, Text) and _NUMERIC.fullmatch(node.value) is None


def _is_length_of_null(node: Node, other: Node) -> bool:
    """LENGTH(/a) = 0, which is unknown here where /a is missing."""
    return isinstance(node, Call) and node.function == "LENGTH" and _truth(other) is False


def _field_of(node: Node) -> str | None:
    """The first field in an expression."""
    waiting: list[Node] = [node]
    while waiting:
        match waiting.pop():
            case Field(_, path):
                return path
            case Call(_, _, arguments):
                waiting += reversed(arguments)
            case Negate(_, operand):
                waiting.append(operand)
            case Arithmetic(_, _, left, right):
                waiting += (right, left)
    return None


def _check_arguments(node: Call) -> str:
    """The name of a function here. Raises AmpsError."""
    known = _FUNCTIONS.get(node.function)
    if known is None:
        instead = _INSTEAD.get(node.function)
        more = f"; {instead}" if instead else ""
        raise AmpsError(f"the function {node.function:.60} has no counterpart{more}", node.position)
    name, least, most = known
    if len(node.arguments) < least or (most is not None and len(node.arguments) > most):
        count = f"at least {least}" if most is None else str(least) if least == most else f"{least} or {most}"
        raise AmpsError(f"{node.function} takes {count} arguments, not {len(node.arguments)},", node.position)
    return name


def _pattern(node: Node) -> str:
    """A regular expression for RE2."""
    if not isinstance(node, Text) or not node.value:
        raise AmpsError("expected a regular expression, a text that is not empty,", node.position)
    if not node.raw and (at := _open_escape(node.source)) is not None:
        shown = node.source[at : at + 2]
        raise AmpsError(
            f"AMPS reads {shown} in a text as {shown[1]}; write \\{shown}, or r'{shown}', for the regular expression",
            node.position + 1 + at,
        )
    try:
        return amps_patterns.converted(node.value)
    except amps_patterns.PatternFault as fault:
        at = node.position + 2 + fault.position if node.raw else node.position
        raise AmpsError(f"expected a regular expression of RE2; it has {fault.what}", at) from None


def _open_escape(source: str) -> int | None:
    """The place of a backslash that AMPS drops, and that its writer most likely meant for the regular expression."""
    at = 0
    while (at := source.find("\\", at)) >= 0:
        if source[at + 1] not in "\\'\"abtnfrx01234567":
            return at
        at += 2
    return None


def _quoted(text: str) -> str:
    """A text as a literal of this store."""
    short = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "'": "\\'", "\\": "\\\\"}
    return "'" + "".join([short.get(one) or (one if one.isprintable() else _escaped(one)) for one in text]) + "'"


def _escaped(letter: str) -> str:
    return "".join([f"\\u{int.from_bytes(pair):04x}" for pair in _pairs(letter.encode("utf-16-be"))])


def _pairs(content: bytes) -> list[bytes]:
    return [content[at : at + 2] for at in range(0, len(content), 2)]


# --- text, and its bounds --------------------------------------------------------------------------------------------


def _made(form: str, parts: list[_Made], binds: int, position: int) -> _Made:
    """An expression that is no function. `form` has {} for each part."""
    pieces = form.split("{}")
    text = pieces[0] + "".join([part.text + piece for part, piece in zip(parts, pieces[1:], strict=True)])
    return _summed(text, parts, binds, position)


def _joined(word: str, parts: list[_Made], binds: int, position: int) -> _Made:
    return _summed(word.join([part.text for part in parts]), parts, binds, position)


def _called(name: str, arguments: list[_Made], position: int) -> _Made:
    made = _summed(f"{name}({', '.join([one.text for one in arguments])})", arguments, _ATOM, position)
    return _checked(made._replace(functions=made.functions + 1), position)


def _summed(text: str, parts: list[_Made], binds: int, position: int) -> _Made:
    return _checked(
        _Made(
            text,
            binds,
            1 + max([part.depth for part in parts], default=0),
            1 + sum([part.terms for part in parts]),
            sum([part.functions for part in parts]),
            sum([part.patterns for part in parts]),
        ),
        position,
    )


def _in(made: _Made, place: int) -> _Made:
    """An operand at its place, with the parentheses that it needs there."""
    return made if made.binds >= place else _within(made)


def _within(made: _Made) -> _Made:
    return made._replace(text=f"({made.text})", binds=_ATOM, depth=made.depth + 1)


def _checked(made: _Made, position: int) -> _Made:
    """Raises AmpsError beyond a bound of filters [1]."""
    if len(made.text.encode()) > LENGTH_BYTES_MAX:
        raise AmpsError(f"the filter becomes longer than the limit of {LENGTH_BYTES_MAX} bytes", position)
    if made.depth > _NESTING_MAX:
        raise AmpsError(f"nested deeper than the limit of {_NESTING_MAX}", position)
    for count, what, most in (
        (made.terms, "conditions and functions", _TERMS_MAX),
        (made.functions, "functions", _FUNCTIONS_MAX),
        (made.patterns, "regular expressions", _PATTERNS_MAX),
    ):
        if count > most:
            raise AmpsError(f"more {what} than the limit of {most}", position)
    return made
