"""Compiles a tree to one Python function, straight-line and short-circuiting. Pure.

The function is made as a tree of Python's own `ast`, never as text, so nothing in a filter can become code.

    [1]  Three-valued logic is compiled away: an expression is compiled for "is it true" and, below NOT, for "is it
         false". Unknown is neither, so AND and OR become Python's `and` and `or`. The truth of a comparison exists as a
         value only where it is compared itself.
    [2]  The frequent types are tested inline: a number with a number, a text with a text. Everything else (numeric
         texts, arrays, objects) takes a call to the function in `values` that covers all cases.
    [3]  A field that has surely been read is not read again, and no field is read when an earlier operand decides.
    [4]  Subtrees without fields are computed once, here, by the code that would have computed them for each record.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from sow_server.engine.values import fields
from sow_server.engine.values.keys import EXACT_MAX
from sow_server.engine.values.patterns import PatternError, replacer, searcher
from sow_server.filters import pycode as py
from sow_server.filters import values
from sow_server.filters.aggregate_calls import bounded
from sow_server.filters.common_subexpressions import CommonSubexpressions
from sow_server.filters.filter_errors import FilterError
from sow_server.filters.inline_tests import InlineTests, Operand
from sow_server.filters.predicate import KeyedRows, Matcher, Predicate, Rows
from sow_server.filters.result_kinds import ANY, MAYBE_BOOLEAN, MAYBE_NUMBER, MAYBE_TEXT, METADATA, RESULTS
from sow_server.filters.tree import (
    LITERALS,
    MIRRORED,
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
    Text,
    TextTest,
    ValueKinds,
    children,
    literal,
    walk,
)


def compile_filter(tree: Filter, *, key_paths: Sequence[Sequence[str]] = (), allow_now: bool = True) -> Predicate:
    """The predicate of a filter. On `key_paths` and `@key`, `=`, `!=` and IN compare canonical texts (rule K4).

    Without `allow_now` the answer for an unchanged record must not change, so NOW_MICROS raises FilterError.
    """
    if not allow_now and any(
        isinstance(node, FunctionCall) and node.function is Function.NOW_MICROS for node in walk(tree)
    ):
        raise FilterError("NOW_MICROS() changes without any change of a record, so a subscription cannot use it")
    return Compilation([tree], frozenset([tuple(path) for path in key_paths])).predicate(tree)


def compile_values(trees: Sequence[Expression], *, key_paths: Sequence[Sequence[str]] = ()) -> Rows:
    """A function from documents and metadata to rows with the values of `trees`, which are not changed meanwhile. Each
    common part of them is computed once. A value may be an array, or a float that is not a number."""
    return Compilation(trees, frozenset([tuple(path) for path in key_paths])).rows(trees)


_Made = TypeVar("_Made")


_INVERSE: Final = {
    Comparison.EQUAL: Comparison.NOT_EQUAL,
    Comparison.NOT_EQUAL: Comparison.EQUAL,
    Comparison.LESS: Comparison.GREATER_OR_EQUAL,
    Comparison.LESS_OR_EQUAL: Comparison.GREATER,
    Comparison.GREATER: Comparison.LESS_OR_EQUAL,
    Comparison.GREATER_OR_EQUAL: Comparison.LESS,
}
_EQUALITIES: Final = (Comparison.EQUAL, Comparison.NOT_EQUAL)
_INLINE_STEPS_MAX: Final = 4
"""A deeper field is read by a call: nested conditional expressions are not faster then."""
# A pattern that needs no regular expression: no special characters except ^ at its beginning, $ at its end, and escaped
# ones.
_PLAIN_PATTERN: Final = re.compile(r"(\^?)((?:[^\\.+*?()|\[\]{}^$]|\\[^\w\s])*)(\$?)", re.DOTALL)


_NO_OBJECT: Final = ast.If(
    test=py.compare(py.call(py.name("type"), py.name("document")), ast.IsNot(), py.name("dict")),
    body=[ast.Assign(targets=[ast.Name("document", ast.Store())], value=ast.Dict([], []))],
    orelse=[],
)
"""Code: a document that is no object has no fields."""


class Compilation:
    """Compiles one filter, or some expressions that are evaluated together."""

    def __init__(self, trees: Sequence[Expression], keys: frozenset[tuple[str, ...]], *, folding: bool = True) -> None:
        self._keys = keys
        self._folding = folding
        self._namespace: dict[str, object] = {
            "__builtins__": {},
            "type": type,
            "int": int,
            "float": float,
            "str": str,
            "bool": bool,
            "list": list,
            "dict": dict,
            "value_at": fields.value_at,
        }
        self._bound: dict[object, ast.expr] = {}
        self._subexpressions = CommonSubexpressions()
        self._tests = InlineTests(self._subexpressions)
        self._operands: dict[Expression, Operand] = {}
        self._constant: dict[int, bool] = {}  # by id: the tree outlives this object
        if folding:
            for tree in trees:
                self._find_constants(tree)

    def predicate(self, tree: Filter) -> Predicate:
        condition = self._truth(tree, True)
        placed, names = self._subexpressions.place(condition)
        constant = bool(condition.value) if isinstance(condition, ast.Constant) else None
        paths = tuple(operand.steps for name in names if isinstance(operand := self._subexpressions.of[name], Path))
        body: list[ast.stmt] = [_NO_OBJECT] if paths else []
        body.append(ast.Return(ast.IfExp(placed, ast.Constant(True), ast.Constant(False))))
        matches: Matcher = self._function(body, ["document", "meta"])  # type: ignore[assignment]  # made just above
        return Predicate(matches, paths, bool(paths), constant)

    def rows(self, trees: Sequence[Expression]) -> Rows:
        body = self._each_row(trees, None, ["document", "meta"])
        return self._function(body, ["documents", "metas", "append"])  # type: ignore[return-value]  # made here

    def keyed_rows(self, trees: Sequence[Expression], where: Filter | None) -> KeyedRows:
        body = self._each_row(trees, where, ["document", "meta", "key"])
        return self._function(body, ["documents", "metas", "keys", "append"])  # type: ignore[return-value]  # as above

    def _each_row(self, trees: Sequence[Expression], where: Filter | None, parts: list[str]) -> list[ast.stmt]:
        """The loop over records, each given by these parts. A row has the values of `trees`, and the third part."""
        test = None if where is None else self._subexpressions.place(self._truth(where, True))[0]
        placed, _ = self._subexpressions.place(py.call(py.name("append"), *map(self._column, trees)))
        assert isinstance(placed, ast.Call), "it stays a call"
        placed.args = [ast.Tuple([*placed.args, *map(py.name, parts[2:])], ast.Load())]
        found: ast.stmt = ast.Expr(placed)
        if test is not None:
            found = ast.If(test=test, body=[found], orelse=[])
        self._namespace["zip"] = zip
        each = ast.For(
            target=ast.Tuple([ast.Name(part, ast.Store()) for part in parts], ast.Store()),
            iter=py.call(py.name("zip"), *[py.name(f"{part}s") for part in parts]),
            body=[_NO_OBJECT, found],
            orelse=[],
        )
        return [each]

    def _column(self, tree: Expression) -> ast.expr:
        operand = self._raw(tree)
        if isinstance(tree, Path) or ValueKinds.TEXT not in operand.kinds:
            return operand.name
        return self._apply(bounded, operand.name)

    def _function(self, body: list[ast.stmt], arguments: list[str]) -> Callable[..., object]:
        function = ast.FunctionDef(
            name="matches",
            args=ast.arguments(
                posonlyargs=[],
                args=[ast.arg(argument) for argument in arguments],
                kwonlyargs=[],
                kw_defaults=[],
                defaults=[],
            ),
            body=body,
            decorator_list=[],
        )
        module = ast.fix_missing_locations(ast.Module([function], []))
        exec(compile(module, "<filter>", "exec"), self._namespace)
        made = self._namespace["matches"]
        assert callable(made), "the module defines it"
        return made

    # --- constants ---------------------------------------------------------------------------------------------------

    def _find_constants(self, tree: Expression) -> bool:
        constant = not isinstance(tree, (Path, Metadata)) and not (
            isinstance(tree, FunctionCall) and tree.function in (Function.NOW_MICROS, Function.MESSAGE_SIZE)
        )
        for child in children(tree):
            constant = self._find_constants(child) and constant
        self._constant[id(tree)] = constant
        return constant

    def _folded(self, expression: Expression) -> Expression:
        """The literal that an expression without fields evaluates to; other expressions unchanged."""
        if isinstance(expression, LITERALS) or not self._constant.get(id(expression), False):
            return expression
        inner = Compilation([expression], frozenset(), folding=False)
        value, _ = inner._subexpressions.place(inner._single(expression).name)
        return literal(inner._function([ast.Return(value)], [])())

    # --- conditions --------------------------------------------------------------------------------------------------

    def _truth(self, expression: Expression, wanted: bool) -> ast.expr:
        """Code that is truthy exactly when `expression` is `wanted`, true or false, and not unknown [1]."""
        expression = self._folded(expression)
        match expression:
            case Boolean(value):
                return ast.Constant(value is wanted)
            case Null() | Number() | Text() | Metadata() | Negate() | Arithmetic():
                return ast.Constant(False)
            case Not(operand):
                return self._truth(operand, not wanted)
            case And(operands):
                return self._chain(operands, wanted, all_of=wanted)
            case Or(operands):
                return self._chain(operands, wanted, all_of=not wanted)
            case Path():
                operand_ = self._raw(expression)
                exactly = py.compare(operand_.name, ast.Is(), ast.Constant(wanted))
                return py.or_(
                    [
                        exactly,
                        py.and_([self._tests.is_list(operand_), py.settled(self._truth_value(expression), wanted)]),
                    ]
                )
            case Compare():
                return self._compared(expression, wanted)
            case In():
                return self._in(expression, wanted)
            case Between():
                return self._between(expression, wanted)
            case Like():
                return self._like(expression, wanted)
            case Matches():
                return self._matches(expression, wanted)
            case IsNull(operand):
                return self._is_null(operand, wanted)
            case FunctionCall(Function.IF, (condition, yes, no)):
                return py.if_(self._truth(condition, True), self._branch(yes, wanted), self._branch(no, wanted))
            case FunctionCall(function):
                if function is not Function.COALESCE:
                    return ast.Constant(False)
                return py.compare(self._raw(expression).name, ast.Is(), ast.Constant(wanted))

    def _branch(self, expression: Expression, wanted: bool) -> ast.expr:
        if isinstance(expression, Path):  # the first element of an array, as everywhere in functions
            return py.compare(self._passed_on(expression).name, ast.Is(), ast.Constant(wanted))
        return self._truth(expression, wanted)

    def _chain(self, operands: tuple[Expression, ...], wanted: bool, *, all_of: bool) -> ast.expr:
        truths: list[ast.expr] = []
        for operand in operands:
            truth = self._truth(operand, wanted)
            if isinstance(truth, ast.Constant):
                if bool(truth.value) is not all_of:
                    return ast.Constant(not all_of)  # it decides; the rest is not even compiled
                continue
            truths.append(truth)
        return py.and_(truths) if all_of else py.or_(truths)

    def _truth_value(self, expression: Expression) -> ast.expr:
        """Code whose value is True, False or None, for a condition that is used as a value. It covers every case, and
        tests nothing inline."""
        match expression:
            case Not(operand):
                return self._apply(values.inverse, self._condition_value(operand))
            case And(operands):
                return self._apply(values.both, *[self._condition_value(operand) for operand in operands])
            case Or(operands):
                return self._apply(values.either, *[self._condition_value(operand) for operand in operands])
            case Compare(comparison, left, right):
                if comparison in _EQUALITIES and (self._is_key(left) or self._is_key(right)):
                    return self._apply(_KEYS[comparison], self._raw(left).name, self._raw(right).name)
                return self._apply(_GENERAL[comparison], self._raw(left).name, self._raw(right).name)
            case In(operand, items):
                member = values.member_of([_value(item) for item in items], key=self._is_key(operand))
                return self._apply(member, self._raw(operand).name)
            case Between(operand, low, high):
                ends = self._single(low).name, self._single(high).name
                return self._apply(values.between, self._raw(operand).name, *ends)
            case Like(operand, pattern):
                return self._apply(values.searching(_searcher(pattern)), self._raw(operand).name)
            case Matches(test, operand, texts):
                wanted = [self._single(text).name for text in texts]
                return self._apply(_TEXT_TESTS[test], self._raw(operand).name, *wanted)
            case IsNull(operand):
                return self._apply(values.is_null, self._raw(operand).name)
            case _:
                return self._apply(values.is_true, self._raw(expression).name)

    def _condition_value(self, expression: Expression) -> ast.expr:
        return self._truth_value(self._folded(expression))

    def _compared(self, compare: Compare, wanted: bool) -> ast.expr:
        comparison, left, right = compare.operator, self._folded(compare.left), self._folded(compare.right)
        if isinstance(left, LITERALS):
            comparison, left, right = MIRRORED[comparison], right, left
        if isinstance(left, Null) or isinstance(right, Null):
            operand = self._raw(right if isinstance(left, Null) else left)
            return self._tests.never_true(
                operand, self._apply(_GENERAL[comparison], operand.name, ast.Constant(None)), wanted
            )
        key = comparison in _EQUALITIES and (self._is_key(left) or self._is_key(right))
        effective = comparison if wanted else _INVERSE[comparison]
        one = self._raw(left)
        if isinstance(right, LITERALS):
            return self._compared_with(comparison, one, _value(right), wanted, key=key)
        other = self._raw(right)
        both = one.kinds | other.kinds
        general = _KEYS[comparison] if key else _GENERAL[comparison]
        slow = py.settled(self._apply(general, one.name, other.name), wanted)
        for kinds, kind in ((MAYBE_NUMBER, ValueKinds.NUMBER), (MAYBE_TEXT, ValueKinds.TEXT)):
            if both in kinds:
                alive = [
                    self._tests.is_not_null(operand) for operand in (one, other) if ValueKinds.NULL in operand.kinds
                ]
                return py.and_([*alive, self._tests.compared(one, effective, other.name, kind)])
        alike = py.and_(
            [
                py.compare(self._tests.type_of(one), ast.Is(), self._tests.type_of(other)),
                py.or_(
                    [py.compare(self._tests.type_of(one), ast.Is(), py.name(name)) for name in ("float", "str", "int")]
                ),
            ]
        )
        return py.if_(alike, self._tests.compared(one, effective, other.name, ValueKinds.NUMBER), slow)

    def _compared_with(
        self, comparison: Comparison, operand: Operand, constant: fields.Scalar | None, wanted: bool, *, key: bool
    ) -> ast.expr:
        assert constant is not None, "null has been compared already"
        effective = comparison if wanted else _INVERSE[comparison]
        if key and not (ValueKinds.NUMBER in operand.kinds and _equal_as_texts(constant)):
            constant = values.text_of(constant)
            assert constant is not None, "a literal that is not null has a text"
        if key:
            general = _KEYS[comparison]
            slow = self._apply(general, operand.name, ast.Constant(constant))
        else:
            slow = self._apply(values.comparing_with(comparison, constant), operand.name)
        kind = _kind(constant)
        fast = self._tests.compared(operand, effective, ast.Constant(constant), kind)
        if kind is ValueKinds.BOOLEAN and comparison in _EQUALITIES:
            fast = py.compare(operand.name, ast.Is(), ast.Constant(constant is (effective is Comparison.EQUAL)))
        coerces = key or kind is ValueKinds.NUMBER or fields.number_of(constant) is not None
        return self._tests.fast_or_slow(operand, kind, fast, py.settled(slow, wanted), coerces=coerces)

    def _in(self, listed: In, wanted: bool) -> ast.expr:
        subject = self._folded(listed.operand)
        items = [_value(item) for item in listed.items]
        present = [item for item in items if item is not None]
        key = self._is_key(subject)
        operand = self._raw(subject)
        truth = self._apply(values.member_of(items, key=key), operand.name)
        if not present:
            return self._tests.never_true(operand, truth, wanted)
        slow = py.settled(truth, wanted)
        kinds = {_kind(item) for item in present}
        if key and not all(_equal_as_texts(item) for item in present):
            kinds, present = (
                {ValueKinds.TEXT},
                [text for item in present if (text := values.text_of(item)) is not None],
            )
        if kinds not in ({ValueKinds.NUMBER}, {ValueKinds.TEXT}):
            return slow
        (kind,) = kinds
        if wanted:
            fast = py.compare(operand.name, ast.In(), py.constant(frozenset(present)))
        elif len(present) < len(items):
            fast = ast.Constant(False)  # a value that equals no item may still equal the null among them
        else:
            fast = py.compare(operand.name, ast.NotIn(), py.constant(frozenset(present)))
            fast = self._tests.unless_nan(operand, fast, kind)
        coerces = key or kind is ValueKinds.NUMBER or any(fields.number_of(item) is not None for item in present)
        return self._tests.fast_or_slow(operand, kind, fast, slow, coerces=coerces)

    def _between(self, node: Between, wanted: bool) -> ast.expr:
        subject, low, high = self._folded(node.operand), self._folded(node.low), self._folded(node.high)
        operand = self._raw(subject)
        if not (isinstance(low, Number) and isinstance(high, Number)) and not (
            isinstance(low, Text) and isinstance(high, Text)
        ):
            ends = self._single(low).name, self._single(high).name
            return py.settled(self._apply(values.between, operand.name, *ends), wanted)
        slow = self._apply(values.between_constants(low.value, high.value), operand.name)
        if wanted:
            fast: ast.expr = ast.Compare(
                ast.Constant(low.value), [ast.LtE(), ast.LtE()], [operand.name, ast.Constant(high.value)]
            )
        else:
            fast = py.or_(
                [
                    py.compare(operand.name, ast.Lt(), ast.Constant(low.value)),
                    py.compare(operand.name, ast.Gt(), ast.Constant(high.value)),
                ]
            )
        coerces = any(fields.number_of(end.value) is not None for end in (low, high))
        return self._tests.fast_or_slow(operand, _kind(low.value), fast, py.settled(slow, wanted), coerces=coerces)

    def _like(self, like: Like, wanted: bool) -> ast.expr:
        operand = self._raw(self._folded(like.operand))
        search = _searcher(like.pattern)
        plain = _PLAIN_PATTERN.fullmatch(like.pattern)
        if plain:
            text = ast.Constant(re.sub(r"\\(.)", r"\1", plain[2], flags=re.DOTALL))
            if plain[1] and plain[3]:
                fast = py.compare(operand.name, ast.Eq(), text)
            elif plain[1] or plain[3]:
                fast = py.method(operand.name, "startswith" if plain[1] else "endswith", text)
            else:
                fast = py.compare(text, ast.In(), operand.name)
        else:
            fast = self._apply(search, operand.name)
        slow = py.settled(self._apply(values.searching(search), operand.name), wanted)
        return self._tests.fast_or_slow(operand, ValueKinds.TEXT, fast if wanted else py.not_(fast), slow, coerces=True)

    def _matches(self, node: Matches, wanted: bool) -> ast.expr:
        operand = self._raw(self._folded(node.operand))
        folded = [self._folded(text) for text in node.texts]
        truth = self._apply(_TEXT_TESTS[node.test], operand.name, *[self._single(text).name for text in folded])
        slow = py.settled(truth, wanted)
        if not all(isinstance(text, LITERALS) for text in folded):
            return slow
        texts = [values.text_of(_value(text)) for text in folded]
        present = [text for text in texts if text is not None]
        if not present or (len(present) < len(texts) and not wanted):
            return self._tests.never_true(operand, truth, wanted)
        if node.test is TextTest.CONTAINS:
            fast = py.or_([py.compare(ast.Constant(text), ast.In(), operand.name) for text in present])
        else:
            method = "startswith" if node.test is TextTest.BEGINS_WITH else "endswith"
            constant = py.constant(present[0] if len(present) == 1 else tuple(present))
            fast = py.method(operand.name, method, constant)
        return self._tests.fast_or_slow(operand, ValueKinds.TEXT, fast if wanted else py.not_(fast), slow, coerces=True)

    def _is_null(self, subject: Expression, wanted: bool) -> ast.expr:
        operand = self._raw(self._folded(subject))
        if isinstance(subject, Path):
            lists_and_floats = py.or_(
                [self._tests.is_list(operand), py.compare(self._tests.type_of(operand), ast.Is(), py.name("float"))]
            )
            null = py.or_(
                [
                    py.compare(operand.name, ast.Is(), ast.Constant(None)),
                    py.and_([lists_and_floats, self._apply(values.is_null, operand.name)]),
                ]
            )
        elif ValueKinds.NULL in operand.kinds:
            null = py.compare(operand.name, ast.Is(), ast.Constant(None))
        else:
            null = ast.Constant(False)
        return null if wanted else py.not_(null)

    # --- values ------------------------------------------------------------------------------------------------------

    def _raw(self, expression: Expression) -> Operand:
        """An operand of a comparison: an array stays an array."""
        known = self._operands.get(expression)
        if known is None:
            known = self._operands[expression] = self._new_operand(self._folded(expression))
        return known

    def _single(self, expression: Expression) -> Operand:
        """An operand of which only one value is wanted (values [3])."""
        operand = self._raw(expression)
        if not isinstance(expression, Path):
            return operand
        load = py.if_(self._tests.is_list(operand), self._apply(values.first, operand.name), operand.name)
        return Operand(self._subexpressions.name(("single", expression), load), ANY)

    def _passed_on(self, expression: Expression) -> Operand:
        """A single value that becomes the value of an expression, so that null has to be None (values [1])."""
        operand = self._raw(expression)
        if not isinstance(expression, Path):
            return operand
        simple = py.or_([py.compare(self._tests.type_of(operand), ast.Is(), py.name(name)) for name in ("str", "int")])
        load = py.if_(simple, operand.name, self._apply(values.first, operand.name))
        return Operand(self._subexpressions.name(("passed on", expression), load), ANY)

    def _new_operand(self, expression: Expression) -> Operand:
        match expression:
            case Null() | Boolean() | Number() | Text():
                value = _value(expression)
                return Operand(ast.Constant(value), _kind(value))
            case Path(steps):
                return self._place(expression, py.load_field(py.name("document"), steps, _INLINE_STEPS_MAX), ANY)
            case Metadata(name):
                attribute, kinds = METADATA[name]
                return self._place(expression, ast.Attribute(py.name("meta"), attribute, ast.Load()), kinds)
            case Negate(operand):
                return self._place(expression, self._apply(values.negated, self._single(operand).name), MAYBE_NUMBER)
            case Arithmetic(sign, left, right):
                operands = self._single(left).name, self._single(right).name
                return self._place(expression, self._apply(_CALCULATIONS[sign], *operands), MAYBE_NUMBER)
            case FunctionCall(Function.NOW_MICROS):
                now = ast.Attribute(py.name("meta"), "now_micros", ast.Load())
                return self._place(expression, now, ValueKinds.NUMBER)
            case FunctionCall(Function.MESSAGE_SIZE):
                size = ast.Attribute(py.name("meta"), "size", ast.Load())
                return self._place(expression, size, ValueKinds.NUMBER)
            case FunctionCall(Function.REGEXP_REPLACE, (subject, Text(pattern), new)):
                replaced = values.replacing(_checked(replacer, pattern))
                texts = self._single(subject).name, self._single(new).name
                return self._place(expression, self._apply(replaced, *texts), MAYBE_TEXT)
            case FunctionCall(Function.ARRAY_COUNT, (array,)):
                return self._place(expression, self._apply(values.array_count, self._raw(array).name), MAYBE_NUMBER)
            case FunctionCall(Function.IF, (condition, yes, no)):
                one, other = self._passed_on(yes), self._passed_on(no)
                chosen = py.if_(self._truth(condition, True), one.name, other.name)
                return self._place(expression, chosen, one.kinds | other.kinds)
            case FunctionCall(function, arguments):
                taken = self._passed_on if function is Function.COALESCE else self._single
                operands_ = [taken(argument).name for argument in arguments]
                return self._place(expression, self._apply(values.FUNCTIONS[function], *operands_), RESULTS[function])
            case _:
                return self._place(expression, self._truth_value(expression), MAYBE_BOOLEAN)

    def _place(self, expression: Expression, load: ast.expr, kinds: ValueKinds) -> Operand:
        return Operand(self._subexpressions.name(expression, load), kinds)

    def _is_key(self, expression: Expression) -> bool:
        match expression:
            case Path(steps):
                return steps in self._keys
            case Metadata(name):
                return name is MetadataName.KEY
            case _:
                return False

    def _apply(self, function: Callable[..., object], *arguments: ast.expr) -> ast.expr:
        name = self._bound.get(function)
        if name is None:
            text = f"f{len(self._bound)}"
            self._namespace[text] = function
            name = self._bound[function] = py.name(text)
        return py.call(name, *arguments)


def _value(expression: Expression) -> fields.Scalar | None:
    """The value of a literal."""
    match expression:
        case Boolean(value) | Text(value):
            return value
        case Number(number):
            return number
        case _:
            return None


def _kind(value: fields.Scalar | None) -> ValueKinds:
    match value:
        case None:
            return ValueKinds.NULL
        case bool():
            return ValueKinds.BOOLEAN
        case str():
            return ValueKinds.TEXT
        case _:
            return ValueKinds.NUMBER


def _equal_as_texts(value: fields.Scalar | None) -> bool:
    """True if another number is equal to this one exactly when their texts are (rule K4). Then the texts of a key's
    numbers are not needed. A large float has the text of an integer that may have another value."""
    return type(value) in (int, float) and -EXACT_MAX < value < EXACT_MAX  # type: ignore[operator]  # no text


def _searcher(pattern: str) -> Callable[[str], bool]:
    return _checked(searcher, pattern)


def _checked(compiled: Callable[[str], _Made], pattern: str) -> _Made:
    try:
        return compiled(pattern)
    except PatternError as error:  # only in a tree that does not come from the parser
        raise FilterError(f"expected a regular expression: {error}") from None


_GENERAL: Final = {comparison: values.comparing(comparison) for comparison in Comparison}
_KEYS: Final = {comparison: values.comparing_keys(equal=comparison is Comparison.EQUAL) for comparison in _EQUALITIES}
_CALCULATIONS: Final = {operator: values.calculating(operator) for operator in Operator}
_TEXT_TESTS: Final = {test: values.testing(test) for test in TextTest}
