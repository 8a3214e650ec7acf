"""A caller's filter within a restriction: as if it asked about records without the hidden fields (rules A4, A5)."""

from __future__ import annotations

import pathlib
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sow_server.engine.formats.field_format import FieldFormat
from sow_server.engine.formats.json_format import JsonFormat
from sow_server.engine.formats.msgpack_format import MsgpackFormat
from sow_server.engine.formats.payloads import Projection
from sow_server.engine.values.model import TopicSettings
from sow_server.filters import Filter, Meta, compile_filter, parse, print_filter
from sow_server.filters.restriction import UNRESTRICTED, Restriction, Steps, hides, joined, without
from sow_server.filters.tree import (
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
    children,
    walk,
)
from sow_server.query.ordering import callers_order, print_order
from tests.property.test_filters import KEYS, documents, filters, metas
from tests.support.oracles.examples import examples
from tests.support.oracles.naive_filter import NaiveFilter
from tests.support.stores.stores import Rig

HIDDEN: list[Steps] = [
    ("a",),
    ("b",),
    ("b", "x"),
    ("a", "x"),
    ("l",),
    ("l", "x"),
    ("o", "x"),
    ("o", "x", "y"),
    ("a", "y"),
]
"""Of the paths that the random filters read; none is a key, or has one below."""

hidden_fields = st.lists(st.sampled_from(HIDDEN), max_size=3).map(lambda found: tuple(sorted(set(found))))


def removed(value: object, hidden: Steps) -> object:
    """A value without one field, in each element of an array, too."""
    if isinstance(value, list):
        return [removed(element, hidden) for element in value]
    if not isinstance(value, dict):
        return value
    if len(hidden) == 1:
        return {name: below for name, below in value.items() if name != hidden[0]}
    return {name: removed(below, hidden[1:]) if name == hidden[0] else below for name, below in value.items()}


def all_removed(value: object, hidden: tuple[Steps, ...]) -> object:
    for steps in hidden:
        value = removed(value, steps)
    return value


class Blindfolded(NaiveFilter):
    """The naive filter on a record without the hidden fields. One thing differs from a record that never had them: the
    number of elements that a field has in an array is the array's, and is null where the field is hidden."""

    def __init__(self, document: object, meta: Meta, hidden: tuple[Steps, ...]) -> None:
        super().__init__(all_removed(document, hidden), meta, KEYS)
        self._hidden = hidden

    def value(self, node: Expression) -> object:
        match node:
            case FunctionCall(Function.ARRAY_COUNT, (Path(steps),)):
                names = [step for step in steps if isinstance(step, str)]
                if any(names[: len(one)] == list(one) for one in self._hidden):
                    return None
            case FunctionCall(Function.MESSAGE_SIZE) if self._hidden:
                return None
        return super().value(node)


@pytest.mark.slow
@given(filters, st.none() | filters, hidden_fields, documents, metas)
@settings(max_examples=examples(300))
def test_a_restricted_filter_is_the_rows_and_the_filter_on_what_may_be_seen(
    asked: Filter, rows: Filter | None, hidden: tuple[Steps, ...], examples: list[dict[str, object]], meta: Meta
) -> None:
    tree = joined(asked, Restriction(rows, hidden))
    assert tree is not None
    predicate = compile_filter(tree, key_paths=KEYS)
    assert print_filter(tree)
    for document in examples:
        expected = Blindfolded(document, meta, hidden).matches(asked)
        if rows is not None:
            expected = expected and NaiveFilter(document, meta, KEYS).matches(rows)
        assert predicate(document, meta) is expected


@pytest.mark.slow
@given(filters, hidden_fields, documents, metas)
@settings(max_examples=examples(200))
def test_no_answer_depends_on_a_hidden_value(
    asked: Filter, hidden: tuple[Steps, ...], examples: list[dict[str, object]], meta: Meta
) -> None:
    """No filter, negated or not, tells a record from the same one without its hidden fields."""
    for condition in (asked, Not(asked), IsNull(asked)):
        predicate = compile_filter(without(condition, hidden), key_paths=KEYS)
        for document in examples:
            bare = all_removed(document, hidden)
            assert isinstance(bare, dict)
            assert predicate(document, meta) is predicate(bare, meta)


@given(filters, hidden_fields)
@settings(max_examples=examples(200))
def test_no_hidden_path_is_left_in_a_tree(asked: Filter, hidden: tuple[Steps, ...]) -> None:
    for node in walk(without(asked, hidden)):
        assert not (isinstance(node, Path) and hides(hidden, node.steps))


@given(filters)
@settings(max_examples=examples(50))
def test_without_a_restriction_a_filter_is_itself(asked: Filter) -> None:
    assert joined(asked, UNRESTRICTED) == asked
    assert without(asked, ()) is asked
    assert joined(None, Restriction(asked, (("a",),))) == asked, "the rows may read hidden fields"


def test_nothing_asked_and_nothing_restricted_is_every_record() -> None:
    assert joined(None, UNRESTRICTED) is None
    assert joined(None, Restriction(None, (("a",),))) is None


# --- every kind of node ----------------------------------------------------------------------------------------------

SEEN = Path(("seen",))
SECRET = Path(("secret", 0, "x"))
LEAVES: list[Expression] = [Null(), Boolean(True), Number(1), Text("secret"), Metadata(MetadataName.KEY)]
SIZE = FunctionCall(Function.MESSAGE_SIZE, ())
# Each place of an expression below has the secret.
NODES: list[Expression] = [
    *LEAVES,
    SECRET,
    Negate(SECRET),
    *[Arithmetic(operator, SECRET, SECRET) for operator in Operator],
    *[Compare(comparison, SECRET, SECRET) for comparison in Comparison],
    In(SECRET, (Text("secret"), Number(1))),
    Between(SECRET, SECRET, SECRET),
    Like(SECRET, "secret"),
    *[Matches(test, SECRET, (SECRET,)) for test in TextTest],
    Matches(TextTest.CONTAINS, SECRET, (Text("a"), Text("b"))),
    IsNull(SECRET),
    Not(SECRET),
    And((SECRET, SECRET, SEEN)),
    Or((SECRET, SECRET, SEEN)),
    FunctionCall(Function.LENGTH, (SECRET,)),
    FunctionCall(Function.SUBSTR, (SECRET, SECRET, SECRET)),
    FunctionCall(Function.REPLACE, (SECRET, SECRET, SECRET)),
    FunctionCall(Function.ROUND, (SECRET, SECRET)),
    FunctionCall(Function.IF, (SECRET, SECRET, SECRET)),
    FunctionCall(Function.COALESCE, (SECRET, SECRET, SEEN)),
    FunctionCall(Function.CONCAT, (SECRET, SECRET, SEEN)),
    FunctionCall(Function.ARRAY_COUNT, (SECRET,)),
    FunctionCall(Function.NOW_MICROS, ()),
    FunctionCall(Function.INSTR, (SECRET, SECRET)),
    FunctionCall(Function.FORMAT_TIME, (SECRET, SECRET)),
    FunctionCall(Function.DATE_MICROS, (SECRET,)),
    FunctionCall(Function.REVERSE, (SECRET,)),
    FunctionCall(Function.REGEXP_REPLACE, (SECRET, Text("a"), SECRET)),
    SIZE,
    *[
        FunctionCall(function, (SECRET,))
        for function in (Function.LOWER, Function.UPPER, Function.TRIM, Function.ABS, Function.FLOOR, Function.CEIL)
    ],
]


def test_every_kind_of_node_and_function_is_among_the_examples() -> None:
    """A new kind of node needs a place in `without`, and an example here."""
    kinds = {kind for part in get_args(Expression) for kind in (get_args(part) or (part,))}
    assert {type(node) for node in NODES} == kinds
    assert {node.function for node in NODES if isinstance(node, FunctionCall)} == set(Function)


@pytest.mark.parametrize("node", NODES, ids=repr)
def test_no_place_of_a_node_keeps_a_hidden_path(node: Expression) -> None:
    if node not in (*LEAVES, SECRET) and children(node):
        assert SECRET in children(node)
    for tree in (node, Not(IsNull(node)), And((SEEN, Or((SEEN, node))))):
        hidden = without(tree, (("secret",),))
        assert SECRET not in list(walk(hidden))
        assert list(walk(hidden)).count(SEEN) == list(walk(tree)).count(SEEN)
        if node != SIZE:  # that tells of every hidden field
            assert without(tree, (("secret", "y"), ("seen", "x"))) == tree


# --- paths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "is_hidden"),
    [
        ("/client/iban", True),
        ("/client/iban/country", True),
        ("/client[0]/iban", True),
        ("/client[0]/iban[2]/country", True),
        ("/client", False),
        ("/client/ibans", False),
        ("/client/Iban", False),
        ("/iban", False),
        ("/x/client/iban", False),
        ("/client/name/iban", False),
    ],
)
def test_paths_that_lead_to_a_hidden_field(path: str, is_hidden: bool) -> None:
    node = parse(path)
    assert isinstance(node, Path)
    assert hides((("client", "iban"),), node.steps) is is_hidden


def test_a_filter_cannot_close_the_brackets_of_the_rows() -> None:
    rows = parse("/region = 'eu' OR /region = 'uk'")
    tree = joined(parse("/price = 1 OR /price = 2"), Restriction(rows))
    assert tree is not None
    assert print_filter(tree) == "(/region = 'eu' OR /region = 'uk') AND (/price = 1 OR /price = 2)"


# --- payloads --------------------------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=3),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.sampled_from("abxlo"), below, max_size=3),
    max_leaves=10,
)
payloads = st.dictionaries(st.sampled_from("abxlo"), json_values, max_size=4)


@given(payloads, hidden_fields)
@settings(max_examples=examples(200))
def test_payloads_lose_exactly_the_hidden_fields(document: dict[str, object], hidden: tuple[Steps, ...]) -> None:
    projection = Projection(hidden=hidden)
    expected = all_removed(document, hidden)
    assert msgspec.json.decode(JsonFormat().project(msgspec.json.encode(document), projection)) == expected
    assert msgspec.msgpack.decode(MsgpackFormat().project(msgspec.msgpack.encode(document), projection)) == expected


def test_a_field_of_a_flat_payload_is_hidden_by_its_own_path_only() -> None:
    """Story: /client/iban hid the field `client` of FIX from answers, while filters could still read it."""
    fields = FieldFormat(b"|", tags=False)
    document = b"client=a|iban=b|"
    assert fields.project(document, Projection(hidden=(("client", "iban"),))) == document
    assert fields.project(document, Projection(hidden=(("client",),))) == b"iban=b|"


# --- orders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("/iban", "@key"),
        ("/iban DESC, /client/iban[0]", "@key"),
        ("/iban/country, /name", "/name"),
        ("/name, /client[1]/iban", "/name"),
        ("/name DESC, /client, @key", "/name DESC, /client, @key"),
        ("@version, /iban", "@version"),
    ],
)
def test_an_order_by_a_hidden_field_decides_nothing(tmp_path: pathlib.Path, text: str, left: str) -> None:
    rig = Rig(tmp_path)
    try:
        topic = rig.create_topic("orders", TopicSettings())
        found = callers_order(topic, text, (("iban",), ("client", "iban")))
        assert found is not None
        assert print_order(found.terms) == left
    finally:
        rig.close()
