"""Filters: printed filters parse back, the compiler agrees with the naive interpreter, bounds narrow from outside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sow_server.filters import Filter, Meta, compile_filter, parse, print_filter
from sow_server.filters.bounds import Bound, bounds_of, entries, key_prefixes, key_texts
from sow_server.filters.parser import may_be_condition
from sow_server.filters.tree import (
    ARGUMENTS,
    And,
    Arithmetic,
    Between,
    Boolean,
    Compare,
    Comparison,
    Expression,
    Field,
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
    Text,
    TextTest,
    literal,
)
from tests.support.oracles.examples import examples
from tests.support.oracles.naive_filter import NaiveFilter, text

KEYS = [("id",), ("o", "k")]

# Few values, so that they meet; those that are easily taken for one another.
WORDS = [
    "",
    "a",
    "b",
    "ab",
    "A",
    "x1",
    "true",
    "1",
    "1.0",
    "01",
    "2",
    "-2",
    "1e2",
    "100",
    " 1",
    "1_0",
    "inf",
    "nan",
    "٣",
]
INTEGERS = [0, 1, 2, -2, 3, 10, 100, 2**53, 2**53 + 1, 2**63, -(2**63), 2**64 - 1, 2**64, 2**64 + 1, -(10**30), 10**23]
FLOATS = [
    *[0.0, -0.0, 1.0, 1.5, 2.5, -0.5, 100.0, 1e-3, 1e16, 1e23, 1e300],
    *[2.0**53, 2.0**63, 2.0**64, float("inf"), float("-inf")],
]
PATTERNS = [
    "a",
    "^a",
    "1$",
    "^1$",
    "^$",
    "",
    "a.",
    "^[ab1]+$",
    "(?i)a",
    "^ab?",
    "^a|1",
    r"\.",
    r"^1\.0",
    "^t",
    "^-",
    "b*",
]

# A handful comes up most, so that filters often meet values for which they are true, or nearly.
COMMON = [1, 2, "1", "1.0", "a", "ab", True, None]
scalars: st.SearchStrategy[object] = st.one_of(
    *[st.sampled_from(COMMON)] * 4,
    st.sampled_from([*INTEGERS, *FLOATS, float("nan")]),
    st.sampled_from([*WORDS, False]),
    st.integers(-3, 3),
    st.text(max_size=3),
)
objects = st.dictionaries(st.sampled_from(["x", "y", "k"]), scalars, max_size=3)
values = st.one_of(
    *[scalars] * 5,
    st.lists(scalars, max_size=3),
    st.lists(st.lists(scalars, max_size=2) | scalars, max_size=2),
    objects,
    st.lists(objects | scalars, max_size=3),
    st.dictionaries(st.sampled_from(["x", "y"]), st.lists(scalars, max_size=2) | objects, max_size=2),
)
json_documents = st.fixed_dictionaries(
    {"a": values, "id": scalars.filter(lambda value: value is not None)},
    optional={
        "b": values,
        "l": st.lists(objects | scalars, max_size=3),
        "o": st.fixed_dictionaries({}, optional={"x": values, "k": scalars}),
    },
)
fix_documents = st.dictionaries(st.sampled_from(["a", "b", "id", "o", "l"]), st.sampled_from(WORDS), max_size=5)
# Several for one filter: compiling is what takes time.
documents = st.lists(st.one_of(json_documents, json_documents, fix_documents), min_size=4, max_size=8)
metas = st.builds(
    Meta,
    key=st.sampled_from(WORDS[1:]),
    version=st.sampled_from([1, 2, 100]),
    publish_time_micros=st.sampled_from([1, 2, 100]),
    expire_time_micros=st.none() | st.sampled_from([1, 2, 100]),
    topic=st.sampled_from(["a", "b"]),
    now_micros=st.sampled_from([1, 2, 100]),
    sequence=st.sampled_from([1, 2, 100]),
    size=st.sampled_from([1, 2, 100]),
    origin=st.sampled_from(["a", "b", "1"]),
)


def path(written: str) -> Path:
    tree = parse(written)
    assert isinstance(tree, Path)
    return tree


literals: st.SearchStrategy[Literal] = scalars.map(literal)
usual_paths = st.sampled_from([Path((name,)) for name in ("a", "a", "b", "id")])
other_paths = st.sampled_from(
    [
        "/o/x",
        "/o/k",
        "/o/x/y",
        "/o/x/y/z/q",
        "/o",
        "/l",
        "/l/x",
        "/l[1]/y",
        "/a[0]",
        "/a/x[0]",
        "/b/x",
    ]  # as in the documents above
).map(path)
paths = usual_paths | usual_paths | other_paths
fields: st.SearchStrategy[Field] = st.one_of(paths, paths, paths, st.sampled_from(MetadataName).map(Metadata))


@st.composite
def value_expressions(draw: st.DrawFn, depth: int = 2) -> Expression:
    if depth == 0 or draw(st.integers(0, 2)) > 0:
        return draw(st.one_of(fields, fields, literals))
    below = value_expressions(depth=depth - 1)
    match draw(st.integers(0, 6)):
        case 0:
            return Negate(draw(below))
        case 1 | 2:
            return Arithmetic(draw(st.sampled_from(Operator)), draw(below), draw(below))
        case 3:
            return draw(condition_expressions(depth=depth - 1))
        case _:
            function = draw(st.sampled_from(Function))
            least, most = ARGUMENTS[function]
            if function is Function.ARRAY_COUNT:
                return FunctionCall(function, (draw(paths),))
            size = draw(st.integers(least, least + 1 if most is None else most))
            arguments = [draw(below) for _ in range(size)]
            if function is Function.IF:
                arguments[0] = draw(condition_expressions(depth=depth - 1))
            if function is Function.REGEXP_REPLACE:
                arguments[1] = Text(draw(st.sampled_from(PATTERNS)))
            return FunctionCall(function, tuple(arguments))


@st.composite
def condition_expressions(draw: st.DrawFn, depth: int = 3) -> Expression:
    kind = draw(st.integers(0, 6 if depth == 0 else 10))
    # Mostly a field against literals, as in real filters, and as the compiler does inline.
    operands = st.one_of(fields, fields, value_expressions(depth=min(depth, 2)))
    others = st.one_of(literals, literals, operands)
    match kind:
        case 0 | 1:
            sides = draw(operands), draw(others)
            return Compare(draw(st.sampled_from(Comparison)), *(sides if draw(st.booleans()) else sides[::-1]))
        case 2:
            return In(draw(operands), tuple(draw(st.lists(literals, min_size=1, max_size=3))))
        case 3:
            return Between(draw(operands), draw(others), draw(others))
        case 4:
            return Like(draw(operands), draw(st.sampled_from(PATTERNS)))
        case 5:
            several = draw(st.booleans())
            texts = draw(st.lists(literals if several else others, min_size=1, max_size=3 if several else 1))
            return Matches(draw(st.sampled_from(TextTest)), draw(operands), tuple(texts))
        case 6:
            return draw(
                st.one_of(
                    operands.map(IsNull), paths, st.booleans().map(Boolean), st.just(Null()),
                    value_expressions(depth=min(depth, 2)).filter(may_be_condition),
                )
            )  # fmt: skip
        case 7 | 8:
            return Not(draw(condition_expressions(depth=depth - 1)))
        case _:
            chain = tuple(draw(st.lists(condition_expressions(depth=depth - 1), min_size=2, max_size=3)))
            return And(chain) if kind == 9 else Or(chain)


filters: st.SearchStrategy[Filter] = condition_expressions()

# All of a small world, where the random filters above are samples of a large one.
SMALL_LITERALS: list[Literal] = [
    literal(value) for value in [1, 2, 1.5, 2**64 + 1, 2.0**64, "1", "1.0", "2", "ab", "", True, False, None]
]
SMALL_VALUES: list[object] = [
    None, True, False, 0, 1, 2, 1.0, 1.5, 3, 2**53 + 1, 2**64, 2**64 + 1, 2.0**64, float("nan"), float("inf"),
    "18446744073709551617", "", "1", "1.0", "2", "15", "ab",
    "abc", "b", "true", "inf", {}, {"x": 1}, [], [1], ["ab"], [None], [1, "ab"], [True, 5], [[2], "x"], [{"x": 1}],
]  # fmt: skip


def small_conditions(field: Expression) -> Iterator[Filter]:
    yield from [field, IsNull(field), Compare(Comparison.EQUAL, field, field), Compare(Comparison.LESS, field, field)]
    for one in SMALL_LITERALS:
        for comparison in Comparison:
            yield Compare(comparison, field, one)
        yield Compare(Comparison.LESS, one, field)
        for test in TextTest:
            yield Matches(test, field, (one,))
        # A function of a field is compared as one value, and not as the types of a field.
        for other in SMALL_LITERALS[:: 3 if isinstance(field, FunctionCall) else 1]:
            yield In(field, (one, other))
            yield Between(field, one, other)
        yield Matches(TextTest.BEGINS_WITH, field, (one, Text("2")))
        yield Compare(Comparison.EQUAL, Arithmetic(Operator.MULTIPLY, field, one), Number(2))
    for pattern in PATTERNS:
        yield Like(field, pattern)


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5)


@st.composite
def odd_filters(draw: st.DrawFn) -> Filter:
    """Names and texts of any characters."""
    steps: list[str | int] = [draw(names), *draw(st.lists(names | st.integers(0, 2**64 - 1), max_size=3))]
    numbers = st.floats(allow_nan=False) | st.integers(-(2**63), 2**64 - 1) | st.integers()
    value = draw(numbers.map(Number) | names.map(Text))
    return Compare(Comparison.EQUAL, Path(tuple(steps)), draw(st.sampled_from([value, Negate(value)])))


@given(filters | odd_filters())
@settings(max_examples=examples(200))
def test_a_printed_filter_parses_to_the_same_tree(tree: Filter) -> None:
    """Compared by repr: 1 and 1.0 are equal in Python."""
    assert repr(parse(print_filter(tree))) == repr(tree)


@pytest.mark.slow
@given(filters, documents, metas)
@settings(max_examples=examples(200))
def test_the_compiler_agrees_with_the_naive_interpreter(
    tree: Filter, examples: list[dict[str, object]], meta: Meta
) -> None:
    # Negated too, which compiles every part of it the other way.
    for condition in (tree, Not(tree)):
        predicate = compile_filter(condition, key_paths=KEYS)
        needed = {str(path[0]) for path in predicate.paths}
        assert predicate.uses_payload is bool(needed)
        for document in examples:
            expected = NaiveFilter(document, meta, KEYS).matches(condition)
            assert predicate(document, meta) is expected
            assert predicate.constant in (None, expected)
            assert predicate({name: document[name] for name in needed & document.keys()}, meta) is expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "field",
    [
        Path(("a",)),
        Path(("id",)),
        Metadata(MetadataName.EXPIRE_TIME),
        Metadata(MetadataName.KEY),
        FunctionCall(Function.LOWER, (Path(("a",)),)),
        FunctionCall(Function.COALESCE, (Path(("a",)),)),
    ],
    ids=print_filter,
)
def test_the_small_world(field: Expression) -> None:
    """Every simple condition on every kind of value, and its bounds."""
    for condition in small_conditions(field):
        yes, no = compile_filter(condition, key_paths=KEYS), compile_filter(Not(condition), key_paths=KEYS)
        plans, plans_of_not = plans_of(condition), plans_of(Not(condition))
        for value in SMALL_VALUES:
            document = {"a": value, "id": value}
            meta = Meta(str(value), 1, 1, value if type(value) is int else None, "t", 1)
            truth = NaiveFilter(document, meta, KEYS).truth(condition)
            assert (yes(document, meta), no(document, meta)) == (truth is True, truth is False), (condition, value)
            if truth is not None:
                check_plans(plans if truth else plans_of_not, document, meta)


@pytest.mark.slow
def test_and_or_not_of_all_truths() -> None:
    truths = [Path((name,)) for name in ("yes", "no", "unknown")]
    document, meta = {"yes": True, "no": False}, Meta("k", 1, 1, None, "t", 1)
    pairs = [node((one, other)) for node in (And, Or) for one in truths for other in truths]
    nested = [node((pair, one)) for node in (And, Or) for pair in pairs for one in truths]
    for tree in [*pairs, *nested, *[And((Not(pair), one)) for pair in pairs for one in truths]]:
        for condition in (tree, Not(tree), Compare(Comparison.EQUAL, tree, Boolean(False)), IsNull(tree)):
            assert compile_filter(condition)(document, meta) is NaiveFilter(document, meta, []).matches(condition)


@given(filters, documents, metas)
@settings(max_examples=examples(100))
def test_matches_lie_within_the_bounds(tree: Filter, examples: list[dict[str, object]], meta: Meta) -> None:
    """bounds [1] and bounds [2]."""
    check_bounds(tree, examples, meta)


plannable_conditions: st.SearchStrategy[Filter] = st.one_of(
    st.builds(Compare, st.sampled_from(Comparison), fields, literals),
    st.builds(Compare, st.sampled_from(Comparison), literals, fields),
    st.builds(In, fields, st.lists(literals, min_size=1, max_size=3).map(tuple)),
    st.builds(Between, fields, literals, literals),
    st.builds(Like, fields, st.sampled_from(PATTERNS)),
    st.builds(Matches, st.just(TextTest.BEGINS_WITH), fields, literals.map(lambda one: (one,))),
    paths,
)


@st.composite
def plannable_filters(draw: st.DrawFn, depth: int = 2) -> Filter:
    """A field against literals, AND, OR, NOT: the parts of plans."""
    kind = draw(st.integers(0, 4)) if depth else 0
    if kind < 2:
        return draw(plannable_conditions)
    if kind == 2:
        return Not(draw(plannable_filters(depth=depth - 1)))
    operands = draw(plannable_filters(depth=depth - 1)), draw(plannable_filters(depth=depth - 1))
    return And(operands) if kind == 3 else Or(operands)


@given(plannable_filters(), documents, metas)
@settings(max_examples=examples(150))
def test_matches_of_a_plannable_filter_lie_within_the_bounds(
    tree: Filter, examples: list[dict[str, object]], meta: Meta
) -> None:
    """bounds [1] and bounds [2]."""
    check_bounds(tree, examples, meta)


def check_bounds(tree: Filter, examples: list[dict[str, object]], meta: Meta) -> None:
    predicate = compile_filter(tree, key_paths=KEYS)
    plans = plans_of(tree)
    for document in examples:
        if predicate(document, meta):
            check_plans(plans, document, meta)


Plans = tuple[
    Mapping[Field, tuple[Bound, ...]], Mapping[Field, frozenset[str]], Mapping[Field, frozenset[str]]
]  # fmt: skip


def plans_of(tree: Filter) -> Plans:
    return bounds_of(tree, KEYS), key_texts(tree, KEYS), key_prefixes(tree, KEYS)


def check_plans(plans: Plans, document: dict[str, object], meta: Meta) -> None:
    """A record that matches lies within all bounds of its filter."""
    whole: dict[str, object] = {**document, **{f"@{name}": value for name, value in meta._asdict().items()}}
    of_fields, texts_of, prefixes_of = plans
    for field, bounds in of_fields.items():
        found = entries(whole, steps_of(field))
        for bound in bounds:
            assert any(interval.holds(entry) for interval in bound for entry in found), (field, bound, found)
    naive = NaiveFilter(document, meta, KEYS)
    if not isinstance(document.get("id"), (list, dict)):  # a key field is a scalar, so terms on it count on that
        for field, texts in texts_of.items():
            assert text(naive.one(field)) in texts
        for field, prefixes in prefixes_of.items():
            assert str(text(naive.one(field))).startswith(tuple(prefixes))


def steps_of(field: Field) -> tuple[str | int, ...]:
    if isinstance(field, Path):
        return field.steps
    times = {MetadataName.PUBLISH_TIME: "@publish_time_micros", MetadataName.EXPIRE_TIME: "@expire_time_micros"}
    return (times.get(field.name, f"@{field.name.value}"),)
