"""Expressions over groups of records: their names, their texts, and the results of a group (rules Q11, Q12). Pure.

plan = aggregation([("", "/account")], [("n", "COUNT(*)"), ("px", "SUM(/px * /qty) / SUM(/qty)")])
group = plan.group()
...                                   # rows of `plan.rows` go into the states of their group
plan.results(key, group, meta)        # {"account": "A1", "n": 2, "px": 10.5}

[1]  A field of a record stands in the expression of a group, or in an aggregate. An expression of a result sees
     groups and aggregates alone, and is an expression of the filter language over these.
[2]  The first columns of a row are the values that name its group; the others are the arguments of aggregates, each
     once. A state belongs to one column, and may serve several aggregates: SUM and AVG have one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import Final, NamedTuple, TypeAlias

from sow_server.engine.values import keys
from sow_server.filters.aggregate_calls import KEY_BYTES_MAX, Aggregate, AggregateCalls, AggregateFunction, place_of
from sow_server.filters.aggregate_values import Count, Distinct, Extreme, State, Sum
from sow_server.filters.compiler import compile_filter, compile_values
from sow_server.filters.filter_errors import FilterError
from sow_server.filters.parser import FUNCTIONS_MAX, LENGTH_BYTES_MAX, PATTERNS_MAX, TERMS_MAX, parse
from sow_server.filters.predicate import Meta, Predicate, Rows
from sow_server.filters.restriction import without
from sow_server.filters.tree import LITERALS, Expression, Function, FunctionCall, Like, Metadata, Path, replaces, walk
from sow_server.filters.values import texts_of

GROUPS_BY_MAX: Final = 8
AGGREGATES_MAX: Final = 64
NAME_BYTES_MAX: Final = 256
ALL: Final = "*"
"""The key of the one group, where nothing groups."""

Named: TypeAlias = tuple[str, str]
"""A name and an expression."""
Scalar: TypeAlias = bool | int | float | str | None


class ExpressionError(FilterError):
    """A fault in the expressions of a request. `field`: where, such as `aggregate[1]`."""

    def __init__(self, field: str, error: FilterError) -> None:
        super().__init__(error.message)
        self.position = error.position
        self.message = f"{field}: {error.message}"
        self.field: Final = field


@dataclass(slots=True)
class Group:
    """One group of records."""

    states: list[State]
    is_text: list[bool]
    """For each value that names it: true if one of its records has a text there."""
    records: int = 0


class _Slot(NamedTuple):
    """The value of an aggregate in a group."""

    state: int
    """The number of the state; -1: the group itself."""
    value: Callable[[State], Scalar]


@dataclass(frozen=True, slots=True)
class Aggregation:
    """The groups and the results of one request. From any thread."""

    names: tuple[str, ...]
    """The names of the values of a group's key."""
    items: tuple[str, ...]
    """The names of the results."""
    columns: tuple[Expression, ...]
    """The values of a record that are read [2]; hidden fields are null."""
    rows: Rows
    states: tuple[tuple[int, Callable[[], State]], ...]
    """The column of each state, and how it is made."""
    slots: tuple[_Slot, ...]
    plain: tuple[int, ...] | None
    """The slot of each item, where all items are aggregates and nothing more; else None."""
    results_of: Rows
    having: Predicate | None

    def group(self) -> Group:
        """A group without records."""
        return Group([make() for _, make in self.states], [False] * len(self.names))

    def results(self, key: str, group: Group, meta: Meta) -> dict[str, Scalar] | None:
        """The results of a group; None: `having` leaves it out. `meta` has the `now` of the request."""
        known = self.named(key, group.is_text)
        found = self.slot_values(group)
        known.update(zip(self.items, self.values(known, found, meta), strict=True))
        if self.having is not None and not self.having.matches({**known, **self._placed(found)}, meta):
            return None
        return known

    def named(self, key: str, is_text: Sequence[bool]) -> dict[str, Scalar]:
        """The values that name a group."""
        texts = keys.split(key) if self.names else ()
        named = zip(self.names, texts, is_text, strict=True)
        return {name: text if stays else _shown(text) for name, text, stays in named}

    def slot_values(self, group: Group) -> list[Scalar]:
        """The values of the aggregates of a group."""
        states = group.states
        return [value(states[state]) if state >= 0 else group.records for state, value in self.slots]

    def values(self, named: Mapping[str, Scalar], found: Sequence[Scalar], meta: Meta) -> list[Scalar]:
        """The values of the items of a group, from the values that name it and those of its aggregates."""
        if self.plain is not None:
            return [_finite(found[slot]) for slot in self.plain]
        rows: list[tuple[object, ...]] = []
        self.results_of(({**named, **self._placed(found)},), (meta,), rows.append)
        return list(map(_finite, rows[0]))

    def _placed(self, found: Sequence[Scalar]) -> dict[str, Scalar]:
        return {place_of(number): value for number, value in enumerate(found)}


def group_key(values: Sequence[object]) -> str | None:
    """The key of the group that these values name; None: they name none."""
    if len(values) == 1 and type(text := values[0]) is str and len(text) <= KEY_BYTES_MAX // 4:
        return keys.escape(text)  # as below, in a fifth of the time
    texts = texts_of(values)
    if texts is None:
        return None
    key = keys.join(texts)
    try:
        return key if len(key.encode()) <= KEY_BYTES_MAX else None
    except UnicodeEncodeError:  # no record has such a key (rule K5)
        return None


def as_json(results: Mapping[str, Scalar]) -> bytes:
    """The payload of a result."""
    return payload_of([f"{encode_basestring(name)}:{scalar_json(value)}" for name, value in results.items()])


def payload_of(members: Iterable[str]) -> bytes:
    """The payload of an object with these members. A text that is no Unicode has `?` in place of what is none."""
    return f"{{{','.join(members)}}}".encode(errors="replace")


def scalar_json(value: Scalar) -> str:
    """A value as JSON has it: three times as quick as `json.dumps`, with the same text."""
    kind = type(value)
    if kind is int or kind is float:
        return repr(value)
    if kind is str:
        return encode_basestring(value)  # type: ignore[arg-type]  # narrowed by `type() is`
    return "null" if value is None else "true" if value else "false"


def _shown(text: str) -> Scalar:
    """The value of a key's part that is no text in any record: a boolean or a number."""
    if text in ("true", "false"):
        return text == "true"
    if text.lstrip("-").isdigit():
        return int(text)
    number = float(text)
    return number if math.isfinite(number) else text


def _finite(value: object) -> Scalar:
    if type(value) is float:
        return value if math.isfinite(value) else None
    return value if value is None or type(value) in (bool, int, str) else None  # type: ignore[return-value]  # narrowed by `type() in`


# --- from texts ------------------------------------------------------------------------------------------------------


def aggregation(
    groups: Sequence[Named],
    items: Sequence[Named],
    having: str = "",
    *,
    key_paths: Sequence[Sequence[str]] = (),
    hidden: tuple[tuple[str, ...], ...] = (),
    numeric: bool = False,
) -> Aggregation:
    """The aggregation of a request. Fields that are `hidden` are null. `numeric`: numeric texts are in the order of
    numbers, as in fix and nvfix. Raises ExpressionError."""
    _check_counts(groups, items, having)
    parsed = [_parsed(f"group_by[{at}]", text) for at, (_, text) in enumerate(groups)]
    names = [_group_name(f"group_by[{at}]", name, text, parsed[at]) for at, (name, text) in enumerate(groups)]
    calls = AggregateCalls()
    trees: list[Expression] = []
    for at, (name, text) in enumerate(items):
        where = f"aggregate[{at}]"
        if not name:
            raise _refused(where, f"{text:.80} needs a name, as in COUNT(*) AS n")
        names.append(_checked_name(where, name))
        trees.append(_outer(where, text, calls, names[: len(groups)]))
    for at, (name, (_, text)) in enumerate(zip(names, (*groups, *items), strict=True)):
        if name in names[:at]:
            where = f"group_by[{at}]" if at < len(groups) else f"aggregate[{at - len(groups)}]"
            other = f"{text:.80} AS {name:.80}_2"
            raise _refused(where, f"there is another {name!r}; each needs a name of its own, as in {other}")
    condition = None if not having else _outer("having", having, calls, names, condition=True)
    arguments = [each.argument for each in calls.found if each.argument is not None]
    _check_cost([*parsed, *arguments, *trees, *([] if condition is None else [condition])], items)
    columns = [without(tree, hidden) for tree in parsed]
    made = _States(first=len(columns), numeric=numeric)
    slots = [made.slot(each, columns, hidden) for each in calls.found]
    return Aggregation(
        tuple(names[: len(groups)]),
        tuple(names[len(groups) :]),
        tuple(columns),
        compile_values(columns, key_paths=key_paths),
        tuple(made.states),
        tuple(slots),
        _plain(trees),
        compile_values(trees),
        None if condition is None else compile_filter(condition),
    )


class RecordValues(NamedTuple):
    """Named values of single records."""

    names: list[str]
    trees: list[Expression]


def record_values(items: Sequence[Named]) -> RecordValues | None:
    """The values that expressions without aggregates give for a record; None: one of them has an aggregate. Raises
    ExpressionError, about items as `aggregation` does."""
    _check_counts((), items, "")
    names: list[str] = []
    trees: list[Expression] = []
    for at, (name, text) in enumerate(items):
        where, calls = f"aggregate[{at}]", AggregateCalls()
        tree = _read(where, text, calls)
        if calls.found:
            return None
        own = _group_name(where, name, text, tree)
        if own in names:
            raise _refused(where, f"there is another {own!r}; each needs a name of its own")
        names.append(own)
        trees.append(tree)
    _check_cost(trees, items)
    return RecordValues(names, trees)


def _plain(trees: Sequence[Expression]) -> tuple[int, ...] | None:
    """The slots that items are; None: one of them is something else."""
    places = {place_of(number): number for number in range(AGGREGATES_MAX)}
    found = [places.get(str(tree.steps[0])) if isinstance(tree, Path) else None for tree in trees]
    return None if None in found else tuple([slot for slot in found if slot is not None])


@dataclass(slots=True)
class _States:
    """The states of a group, as the aggregates ask for them."""

    first: int
    """The first column that is no value of a group's key: those have bounds of their own."""
    numeric: bool
    states: list[tuple[int, Callable[[], State]]] = field(default_factory=list)
    _known: dict[tuple[int, str], int] = field(default_factory=dict)

    def slot(self, aggregate: Aggregate, columns: list[Expression], hidden: tuple[tuple[str, ...], ...]) -> _Slot:
        """The slot of an aggregate. Its argument becomes a column, unless there is an equal one."""
        if aggregate.argument is None:
            return _Slot(-1, _nothing)
        argument = without(aggregate.argument, hidden)
        if argument not in columns[self.first :]:
            columns.append(argument)
        column = columns.index(argument, self.first)
        make, value = self._kind(aggregate.function)
        kind = "SUM" if aggregate.function is AggregateFunction.AVG else aggregate.function.value
        number = self._known.setdefault((column, kind), len(self.states))
        if number == len(self.states):
            self.states.append((column, make))
        return _Slot(number, value)

    def _kind(self, function: AggregateFunction) -> tuple[Callable[[], State], Callable[[State], Scalar]]:
        numeric = self.numeric
        match function:
            case AggregateFunction.COUNT:
                return Count, _count
            case AggregateFunction.COUNT_DISTINCT:
                return Distinct, _count
            case AggregateFunction.SUM:
                return Sum, _total
            case AggregateFunction.AVG:
                return Sum, _average
            case AggregateFunction.MIN:
                return (lambda: Extreme(greatest=False, numeric=numeric)), _extreme
            case AggregateFunction.MAX:
                return (lambda: Extreme(greatest=True, numeric=numeric)), _extreme


def _nothing(state: State) -> Scalar:
    raise AssertionError("the count of a group's records needs no state")


def _count(state: State) -> Scalar:
    assert isinstance(state, (Count, Distinct)), "it was made so"
    return state.count


def _total(state: State) -> Scalar:
    return state.total  # type: ignore[attr-defined,no-any-return]  # a Sum, as it was made


def _average(state: State) -> Scalar:
    return state.average  # type: ignore[attr-defined,no-any-return]  # as above


def _extreme(state: State) -> Scalar:
    assert isinstance(state, Extreme), "it was made so"
    return state.value


def reads_now(text: str, *, condition: bool = False) -> bool:
    """True if the value of an expression may change without a change of any record. Raises FilterError."""
    calls = AggregateCalls()
    trees = [parse(text, (), "start" if condition else "value", calls)]
    trees += [one.argument for one in calls.found if one.argument is not None]
    nodes = [node for tree in trees for node in walk(tree)]
    return any(isinstance(node, FunctionCall) and node.function is Function.NOW_MICROS for node in nodes)


def _check_counts(groups: Sequence[Named], items: Sequence[Named], having: str) -> None:
    for where, count, most in (
        ("group_by", len(groups), GROUPS_BY_MAX),
        ("aggregate", len(items), AGGREGATES_MAX),
    ):
        if count > most:
            raise _refused(where, f"{count} expressions, more than the limit of {most}")
    length = sum([len(text) for _, text in (*groups, *items)]) + len(having)
    if length > LENGTH_BYTES_MAX:
        raise _refused(
            "aggregate" if items else "group_by",
            f"expressions of {length} characters together, more than the limit of {LENGTH_BYTES_MAX}",
        )
    if having and not (groups or items):
        raise _refused("having", "needs group_by or aggregate; the records themselves are chosen by filter")


def _check_cost(trees: Sequence[Expression], items: Sequence[Named]) -> None:
    """Refuses expressions that together cost more than one filter may: they are compiled, and evaluated, in one go."""
    nodes = [node for tree in trees for node in walk(tree) if not isinstance(node, (Path, Metadata, *LITERALS))]
    for what, count, most in (
        ("conditions and functions", len(nodes), TERMS_MAX),
        ("functions", sum([isinstance(node, FunctionCall) for node in nodes]), FUNCTIONS_MAX),
        ("regular expressions", sum([isinstance(node, Like) or replaces(node) for node in nodes]), PATTERNS_MAX),
    ):
        if count > most:
            where = "aggregate" if items else "group_by"
            raise _refused(where, f"expressions with {count} {what} together, more than the limit of {most}")


def _parsed(where: str, text: str) -> Expression:
    calls = AggregateCalls()
    tree = _read(where, text, calls)
    if calls.found:
        raise _refused(where, "an aggregate does not group; put it into aggregate", max(0, calls.first), text)
    return tree


def _outer(
    where: str, text: str, calls: AggregateCalls, names: Sequence[str], *, condition: bool = False
) -> Expression:
    """An expression over aggregates and the fields of a group [1]."""
    tree = _read(where, text, calls, condition=condition)
    for position, node in calls.take_outside():
        if isinstance(node, Path) and len(node.steps) == 1 and node.steps[0] in names:
            continue
        there = ", ".join([f"/{name}" for name in names[:10]])
        of_group = f"; of a group there is {there}" if names else ""
        what = "metadata of a record" if isinstance(node, Metadata) else "a field of a record"
        raise _refused(where, f"{what} stands outside of an aggregate{of_group}", position, text)
    return tree


def _read(where: str, text: str, calls: AggregateCalls, *, condition: bool = False) -> Expression:
    try:
        return parse(text, (), "start" if condition else "value", calls)
    except FilterError as error:
        raise ExpressionError(where, error) from None


def _group_name(where: str, name: str, text: str, tree: Expression) -> str:
    """The name of a group's value: that of a field is its last step."""
    if not name:
        if isinstance(tree, Path):
            name = str([step for step in tree.steps if isinstance(step, str)][-1])
        elif isinstance(tree, Metadata):
            name = tree.name.value
        else:
            raise _refused(where, f"{text:.80} needs a name, as in {text:.80} AS name")
    return _checked_name(where, name)


def _checked_name(where: str, name: str) -> str:
    if len(name.encode(errors="replace")) > NAME_BYTES_MAX or not name.isprintable():
        raise _refused(where, f"the name {name!r:.80} has control characters, or more than {NAME_BYTES_MAX} bytes")
    return name


def _refused(where: str, what: str, position: int = -1, text: str = "") -> ExpressionError:
    return ExpressionError(where, FilterError(what, position, text))
