"""Pushed filters: what Spark keeps, the server keeps."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from decimal import Context, Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringEndsWith,
    StringStartsWith,
)
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    LongType,
    StringType,
    StructType,
    TimestampType,
)

from sow_server.filters import Meta, compile_filter, parse
from sow_spark.converting import Misfit
from sow_spark.decoding import Decoder
from sow_spark.filters import combined, pushed
from sow_spark.options import ParseMode
from sow_spark.schemas import METADATA_COLUMNS, layout
from tests.spark.test_decoding import NUMBERS, TEXTS, VALUES, packed
from tests.support.oracles.examples import examples

SCHEMA = (
    StructType()
    .add("n", LongType())
    .add("d", DoubleType())
    .add("f", FloatType())
    .add("c", DecimalType(10, 2))
    .add("w", DecimalType(38, 2))
    .add("t", StringType())
    .add("b", BooleanType())
    .add("when", TimestampType())
    .add("day", DateType())
    .add("bytes", BinaryType())
    .add("list", ArrayType(LongType()))
    .add("plain", StringType("UTF8_LCASE"))
    .add("s", StructType().add("n", LongType()).add("odd ]\\/name", StringType()).add("", LongType()))
)
for _name, _kind in METADATA_COLUMNS.items():
    SCHEMA.add(_name, _kind)
LAYOUT = layout(SCHEMA, metadata=True)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (EqualTo(("n",), 5), "/n = 5"),
        (EqualNullSafe(("n",), None), "/n IS NULL"),
        (Not(EqualTo(("n",), 5)), "NOT (/n = 5)"),
        (In(("n",), (1, None, -2)), "/n IN (1, -2)"),
        (GreaterThan(("s", "n"), 5), "/s/n > 5"),
        (EqualTo(("s", "odd ]\\/name"), "it's \\ \n"), "/s/[odd \\]\\\\/name] = 'it\\'s \\\\ \\u000a'"),
        (EqualTo(("b",), True), "/b = true"),
        (LessThan(("d",), 1.5), "(/d < 1.5 OR /d IN ('-Infinity', '-INF'))"),
        (GreaterThan(("c",), Decimal("1.50")), "/c >= 1.50"),
        (LessThan(("w",), Decimal("9007199254740993.00")), "/w <= 9007199254740993"),
        (GreaterThan(("w",), Decimal("9007199254740993.00")), "/w >= 9007199254740992"),
        (
            EqualTo(("w",), Decimal("123456789012345680000.00")),
            "(/w >= 123456789012345680000 AND /w <= 123456789012345683968)",
        ),
        (StringStartsWith(("t",), "ab"), "/t BEGINS WITH 'ab'"),
        (IsNotNull(("s",)), "/s IS NOT NULL"),
        (StringContains(("_key",), "1"), "@key CONTAINS '1'"),
        (GreaterThan(("_publish_time",), EPOCH + timedelta(seconds=1)), "@publish_time > 1000000"),
        (IsNull(("_expire_time",)), "@expire_time IS NULL"),
        (Not(In(("_version",), (1, 2))), "NOT (@version IN (1, 2))"),
        (In(("d",), (1.5, None, 0.0)), "/d IN (1.5, 0)"),
        (GreaterThanOrEqual(("d",), 1.5), "(/d >= 1.5 OR /d IN ('NaN', 'Infinity', '+Infinity', 'INF', '+INF'))"),
        (LessThan(("f",), 0.5), "(/f < 0.5 OR /f IN ('-Infinity', '-INF'))"),
        (StringEndsWith(("t",), "ab"), "/t ENDS WITH 'ab'"),
        (StringContains(("t",), "ab"), "(/t CONTAINS 'ab' OR LENGTH(/t) IS NULL OR ARRAY_COUNT(/t) IS NOT NULL)"),
    ],
    ids=str,
)
def test_conditions_that_the_language_can_express_are_pushed(one: Filter, text: str) -> None:
    assert pushed([one], LAYOUT, "FAILFAST") == [text]
    parse(text)


@pytest.mark.parametrize(
    "one",
    [
        Not(EqualTo(("t",), "a")),
        Not(EqualNullSafe(("n",), 1)),
        Not(GreaterThan(("d",), 1.0)),
        Not(In(("n",), (1, None))),
        GreaterThan(("t",), "a"),
        EqualTo(("t",), "1.0"),
        EqualTo(("t",), "true"),
        StringStartsWith(("t",), "1"),
        StringContains(("t",), "1"),
        EqualTo(("d",), math.nan),
        EqualTo(("d",), 1e300),
        EqualTo(("f",), 0.5),
        EqualTo(("when",), EPOCH),
        EqualTo(("day",), EPOCH.date()),
        EqualTo(("bytes",), b"a"),
        IsNotNull(("list",)),
        EqualTo(("list",), [1]),
        EqualTo(("s", ""), 1),
        EqualTo(("_origin",), "here"),
        EqualTo(("_sequence",), 1),
        EqualTo(("nowhere",), 1),
        In(("n",), tuple(range(10_001))),
        In(("n",), (None,)),
        EqualTo((), 1),
        EqualTo(("n", "deeper"), 1),
        IsNull(("_version",)),
        StringEndsWith(("t",), "1"),
        StringContains(("b",), "x"),
        In(("c",), (Decimal(1),)),
        GreaterThanOrEqual(("f",), 0.5),
        StringContains(("d",), "x"),
        GreaterThan(("b",), False),
        EqualTo(("plain",), "x"),
        # Literals of another type than their column, which Spark sends none of:
        EqualTo(("t",), 5),
        EqualTo(("_key",), 5),
        EqualTo(("b",), 1),
        EqualTo(("n",), True),
        EqualTo(("n",), 2**63),
        EqualTo(("_publish_time",), EPOCH.replace(tzinfo=None)),
        EqualTo(("c",), 1.5),
        GreaterThan(("c",), Decimal("NaN")),
    ],
    ids=lambda one: str(one)[:80],
)
def test_conditions_that_the_language_cannot_express_stay_with_spark(one: Filter) -> None:
    assert pushed([one], LAYOUT, "FAILFAST") == []


def test_null_is_not_asked_for_where_a_misfit_is_null() -> None:
    assert pushed([IsNull(("n",))], LAYOUT, "PERMISSIVE") == []
    assert pushed([IsNotNull(("n",))], LAYOUT, "PERMISSIVE") == ["/n IS NOT NULL"]


def test_the_users_filter_keeps_its_own_parentheses() -> None:
    text = combined("/a = 1 OR /b = 2", [EqualTo(("n",), 5)], LAYOUT, "FAILFAST")
    assert text == "(/a = 1 OR /b = 2) AND /n = 5"
    assert combined("/a = 1", [], LAYOUT, "FAILFAST") == "/a = 1"
    assert combined("", [], LAYOUT, "FAILFAST") == ""


def test_filters_that_are_too_long_are_left_out() -> None:
    long = In(("t",), tuple(f"name-{number}" for number in range(9_000)))
    assert combined("/a = 1", [EqualTo(("n",), 5), long], LAYOUT, "FAILFAST") == "(/a = 1) AND /n = 5"


# ---- pushing never changes a result ----


def kept(one: Filter, row: dict[str, object]) -> bool | None:
    """Whether Spark keeps the row; None is null."""
    if isinstance(one, Not):
        truth = kept(one.child, row)
        return None if truth is None else not truth
    value: object = row
    for name in one.attribute:  # type: ignore[attr-defined]  # all of the others have one
        value = value[name] if isinstance(value, dict) else None
    match one:
        case IsNull():
            return value is None
        case IsNotNull():
            return value is not None
        case EqualNullSafe(_, literal):
            return value is None if literal is None else value is not None and order(value, literal) == 0
    if value is None:
        return None
    match one:
        case In(_, literals):
            if any(literal is not None and order(value, literal) == 0 for literal in literals):
                return True
            return None if None in literals else False
        case EqualTo(_, literal):
            return order(value, literal) == 0
        case GreaterThan(_, literal):
            return order(value, literal) > 0
        case GreaterThanOrEqual(_, literal):
            return order(value, literal) >= 0
        case LessThan(_, literal):
            return order(value, literal) < 0
        case LessThanOrEqual(_, literal):
            return order(value, literal) <= 0
    assert isinstance(value, str)
    match one:
        case StringStartsWith(_, text):
            return value.startswith(text)
        case StringEndsWith(_, text):
            return value.endswith(text)
        case StringContains(_, text):
            return text in value
    raise AssertionError(one)


def order(one: object, other: object) -> int:
    """As Spark orders: NaN is equal to itself, and above all others."""
    if isinstance(one, float) and isinstance(other, float):
        if math.isnan(one) or math.isnan(other):
            return math.isnan(one) - math.isnan(other)
        return (one > other) - (one < other)
    if isinstance(one, str) and isinstance(other, str):
        return (one.encode() > other.encode()) - (one.encode() < other.encode())
    assert isinstance(one, int | Decimal | datetime)
    assert isinstance(other, int | Decimal | datetime)
    return int(one > other) - int(one < other)  # type: ignore[operator]  # both of one type


LARGE_DECIMALS = st.builds(
    lambda base, away, sign: Decimal(sign * (base + away)).quantize(Decimal("0.01"), context=Context(prec=50)),
    st.sampled_from([2**53, 2**63, 2**64, 10**30, 123456789012345680000]),
    st.integers(-3, 3),
    st.sampled_from([1, -1]),
)
LITERALS: dict[str, st.SearchStrategy[object]] = {
    "n": st.one_of(st.integers(-5, 5), st.integers(-(2**63), 2**63 - 1), st.sampled_from([2**53, 2**53 + 1])),
    "d": st.one_of(
        st.integers(-3, 3).map(float), st.floats(), st.sampled_from([-0.0, 1.5, 0.1, 2.0**53, math.nan, math.inf])
    ),
    "f": st.one_of(st.integers(-3, 3).map(float), st.floats(width=32), st.sampled_from([16777216.0, math.nan])),
    "c": st.decimals(-5, 5, places=2),
    "w": st.one_of(LARGE_DECIMALS, LARGE_DECIMALS.map(lambda value: value + Decimal("0.51"))),
    "t": st.one_of(
        st.text(max_size=3),
        st.sampled_from(
            ["5", "5.0", "-0", "1e2", "true", "null", "{", "[1]", "NaN", "ab'c\\", "😀", "e", "", "1", "."]
        ),
    ),
    "b": st.booleans(),
}
CLOSE: dict[str, st.SearchStrategy[str]] = {
    "n": st.one_of(st.integers(-5, 5), st.sampled_from([2**53, 2**53 + 1, 2**63 - 1])).map(str),
    "d": st.one_of(
        NUMBERS, st.sampled_from(["1", "-0", "0", "1.5", "15e-1", '"NaN"', '"INF"', '"-INF"', "1" + "0" * 30])
    ),
    "f": st.one_of(NUMBERS, st.sampled_from(["0.1", "16777217", "16777216", '"NaN"', "1.00000001"])),
    "c": st.one_of(
        st.decimals(-5, 5, places=2).map(str), st.sampled_from(['"1.50"', "1.50", "1.5", "15e-1", "2", '"2"'])
    ),
    "w": st.one_of(
        LARGE_DECIMALS.map(str),
        LARGE_DECIMALS.map(lambda value: f'"{value}"'),
        LARGE_DECIMALS.map(lambda value: str(int(value))),
        LARGE_DECIMALS.map(lambda value: repr(float(value))),
    ),
    "t": st.one_of(
        TEXTS, VALUES, st.sampled_from(["5", "5.0", "-0", "1e2", "true", '"5"', '"5.0"', "[]", "{}", '{"a":"ab"}'])
    ),
    "b": st.sampled_from(["true", "false"]),
}


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, Filter, str]:
    """A column, a filter on it, and a value in a document."""
    name = draw(st.sampled_from(sorted(LITERALS)))
    literals = LITERALS[name]
    if draw(st.booleans()):  # a literal that the value may equal
        same = draw(CLOSE[name])
        try:
            found = row_of(f'{{"{name}":{same}}}')[name]
        except Misfit:
            found = None
        if found is not None:
            literals = st.one_of(literals, st.just(found))
        value = draw(st.one_of(st.just(same), CLOSE[name], st.just("null")))
    else:
        value = draw(st.one_of(CLOSE[name], st.just("null"), VALUES))
    kinds = [EqualTo, EqualNullSafe, GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual]
    if name == "t":
        kinds += [StringStartsWith, StringEndsWith, StringContains]
    filters = st.one_of(
        st.sampled_from(kinds).flatmap(lambda kind: literals.map(lambda literal: kind((name,), literal))),
        st.lists(st.one_of(literals, st.none()), min_size=1, max_size=3).map(lambda chosen: In((name,), tuple(chosen))),
        st.sampled_from([IsNull((name,)), IsNotNull((name,))]),
    )
    one = draw(filters)
    return name, Not(one) if draw(st.booleans()) else one, value


ROWS = StructType([field for field in SCHEMA.fields if field.name in LITERALS])


def row_of(document: str, mode: ParseMode = "FAILFAST") -> dict[str, object]:
    """The row that a document becomes."""
    decoder = Decoder(layout(ROWS, metadata=True), "columns", mode)
    row: dict[str, object] = decoder.decode(packed([document.encode()])).to_pylist()[0]
    return row


META = Meta("k0", 10, 5, None, "topic", 7)


@settings(max_examples=examples(500))
@given(cases(), st.sampled_from(["FAILFAST", "PERMISSIVE"]), st.booleans())
def test_records_that_spark_keeps_match_the_pushed_filter(
    case: tuple[str, Filter, str], mode: ParseMode, is_key: bool
) -> None:
    name, one, value = case
    document = f'{{"{name}":{value}}}'
    try:
        row = row_of(document, mode)
    except Misfit:
        return
    if kept(one, row) is True:
        for text in pushed([one], LAYOUT, mode):
            matches = compile_filter(parse(text), key_paths=[(name,)] if is_key else [])
            assert matches(json.loads(document), META), f"{text} on {document}"


METADATA: Sequence[tuple[str, object]] = [
    ("_key", "k0"),
    ("_version", 10),
    ("_publish_time", EPOCH + timedelta(microseconds=5)),
    ("_expire_time", None),
]


@given(
    st.sampled_from(METADATA),
    st.sampled_from([EqualTo, GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual, IsNull, IsNotNull]),
    st.integers(-1, 1),
    st.booleans(),
)
def test_metadata_is_asked_for_exactly(
    column: tuple[str, object], kind: type[Filter], away: int, negated: bool
) -> None:
    name, value = column
    literals: dict[str, object] = {
        "_key": ["k", "k0", "k00"][away + 1],
        "_version": 10 + away,
        "_publish_time": EPOCH + timedelta(microseconds=5 + away),
        "_expire_time": EPOCH,
    }
    one = kind((name,)) if kind in (IsNull, IsNotNull) else kind((name,), literals[name])  # type: ignore[call-arg]  # the kinds take one or two arguments
    one = Not(one) if negated else one
    for text in pushed([one], LAYOUT, "FAILFAST"):
        assert compile_filter(parse(text), key_paths=[])({}, META) is (kept(one, {name: value}) is True)
