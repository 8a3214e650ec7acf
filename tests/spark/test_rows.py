"""The meaning of each column of a DataFrame, and rows that cannot be records: without Spark, without a server."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DateType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    VariantType,
    VariantVal,
    YearMonthIntervalType,
)

from sow_spark import rows
from sow_spark.documents import arrow_schema
from sow_spark.errors import SowSourceError
from sow_spark.options import Connecting, Writing
from sow_spark.rows import BadRow, Puts, Removals, RowPlan, TopicFacts, plan_rows
from sow_spark.schemas import METADATA_COLUMNS
from sow_spark.task_input import require_whole_input

KINDS: dict[str, DataType] = {
    "int": IntegerType(),
    "bigint": LongType(),
    "double": DoubleType(),
    "decimal(9,3)": DecimalType(9, 3),
    "string": StringType(),
    "binary": BinaryType(),
    "date": DateType(),
    "timestamp": TimestampType(),
    "timestamp_ntz": TimestampNTZType(),
    "interval day to second": DayTimeIntervalType(),
    "struct<a:array<double>>": StructType([StructField("a", ArrayType(DoubleType()))]),
    "map<string,float>": MapType(StringType(), FloatType()),
    "map<struct<x:int>,int>": MapType(StructType([StructField("x", IntegerType())]), IntegerType()),
    "variant": VariantType(),
    "struct<b:interval year to month>": StructType([StructField("b", YearMonthIntervalType())]),
}
"""By the names that Spark's parser of schemas knows them by; that one runs in a JVM."""
KEYED = TopicFacts("json", keyed=True)
KEYLESS = TopicFacts("json", keyed=False)


def plan(schema: str, topic: TopicFacts = KEYED, **options: object) -> RowPlan:
    columns = [column.split(" ", 1) for column in schema.split(", ")]
    fields = [StructField(name, KINDS[kind]) for name, kind in columns]
    return plan_rows(StructType(fields), Writing(Connecting(), "orders", **options), topic)  # type: ignore[arg-type]  # keywords of several types


def puts(of: RowPlan, columns: dict[str, pa.Array]) -> tuple[Puts, list[BadRow]]:
    bad: list[BadRow] = []
    (step,) = of.steps(pa.RecordBatch.from_pydict(columns), 100, bad)
    assert isinstance(step, Puts)
    return step, bad


@pytest.mark.parametrize(
    ("kind", "column", "kinds", "micros"),
    [
        ("string", pa.array(["30s", "never", None]), [1, 3, 0], [30_000_000, 0, 0]),
        ("int", pa.array([30, 0, None], pa.int32()), [1, 1, 0], [30_000_000, 0, 0]),
        ("double", pa.array([1.5, -2.0, None]), [1, 1, 0], [1_500_000, -2_000_000, 0]),
        ("decimal(9,3)", pa.array([Decimal("1.500"), Decimal("0.001"), None]), [1, 1, 0], [1_500_000, 1_000, 0]),
        (
            "interval day to second",
            pa.array([timedelta(days=1), timedelta(0), None]),
            [1, 1, 0],
            [86_400_000_000, 0, 0],
        ),
    ],
    ids=["text", "int", "double", "decimal", "interval"],
)
def test_a_ttl_is_text_seconds_or_an_interval(kind: str, column: pa.Array, kinds: list[int], micros: list[int]) -> None:
    """given a ttlColumn of each kind / when planned / then rows have that lifetime, and nulls none (L2)"""
    step, bad = puts(plan(f"id int, t {kind}", ttl_column="t"), {"id": pa.array([1, 2, 3]), "t": column})
    assert (step.lifetime_kinds, step.lifetime_micros) == (kinds, micros)
    assert step.payloads == [b'{"id":1}', b'{"id":2}', b'{"id":3}']
    assert not bad


def test_seconds_too_many_for_64_bits_are_left_to_the_server_to_refuse() -> None:
    """given numbers of seconds beyond all bounds / when planned / then they stay too long (L18)"""
    step, _ = puts(plan("t bigint", ttl_column="t"), {"t": pa.array([2**63 - 1, -(2**63)])})
    assert step.lifetime_micros == [4 * 10**18, -4 * 10**18]
    step, _ = puts(plan("t double", ttl_column="t"), {"t": pa.array([1e300, float("-inf")])})
    assert step.lifetime_micros == [4 * 10**18, -4 * 10**18]


def test_an_expire_time_is_a_timestamp() -> None:
    """given an expireTimeColumn / when planned / then rows expire then, nulls as the topic says"""
    moment = datetime(2026, 1, 1, 0, 0, 0, 5, tzinfo=UTC)
    columns = {"id": pa.array([1, 2]), "e": pa.array([moment, None], pa.timestamp("us", "UTC"))}
    step, _ = puts(plan("id int, e timestamp", expire_time_column="e"), columns)
    assert step.lifetime_kinds == [2, 0]
    assert step.lifetime_micros == [int(moment.timestamp()) * 1_000_000 + 5, 0]


def test_keys_are_text_integers_or_dates() -> None:
    """given keyColumns of the kinds that have one text / when planned / then keys are that"""
    step, _ = puts(plan("k int, v int", KEYLESS, key_column="K"), {"k": pa.array([7]), "v": pa.array([1])})
    assert (step.keys, step.payloads) == (["7"], [b'{"v":1}'])
    columns = {"_key": pa.array(["a"]), "_version": pa.array([5]), "v": pa.array([1])}
    step, _ = puts(plan("_key string, _version bigint, v int", KEYLESS), columns)
    assert (step.keys, step.payloads) == (["a"], [b'{"v":1}'])
    step, _ = puts(plan("_key string, _version bigint, v int", KEYED), columns)
    assert (step.keys, step.payloads) == (None, [b'{"v":1}'])


def test_rows_that_are_no_records_are_recognised() -> None:
    """given rows without a key, with lifetimes that are none, not UTF-8 / when planned / then the others go on
    (sow_spark/rows [2])"""
    columns = {
        "k": pa.array([b"a", None, b"c", b"\xff", b"e"], pa.binary()).view(pa.string()),
        "t": pa.array(["1s", "1s", "soon", "1s", None]),
        "v": pa.array([1, 2, 3, 4, 5]),
    }
    step, bad = puts(plan("k string, t string, v int", KEYLESS, key_column="k", ttl_column="t"), columns)
    assert (step.keys, list(step.rows), step.lifetime_kinds) == (["a", "e"], [100, 104], [1, 0])
    assert step.payloads == [b'{"v":1}', b'{"v":5}']
    assert [(row.row, row.reason) for row in bad] == [
        (101, "KEY_REQUIRED"),
        (102, "INVALID_ARGUMENT"),
        (103, "KEY_NOT_UTF8"),
    ]
    assert '"v":2' in bad[0].value
    assert "soon" in bad[1].message


def test_a_variant_that_is_nested_too_deep_is_a_bad_row() -> None:
    """given variants, one of them nested almost as deep as a topic takes / when planned / then the others go on. The
    task ended with a RecursionError, whatever `onBadRow` was."""
    (kind,) = arrow_schema(StructType().add("v", VariantType())).types
    made = [VariantVal.parseJson(text) for text in ("1", "[" * 250 + "]" * 250, '{"a":[2]}')]
    variants = pa.array([{"value": one.value, "metadata": one.metadata} for one in made], kind)
    step, bad = puts(
        plan("k string, v variant", KEYLESS, key_column="k"), {"k": pa.array(["a", "b", "c"]), "v": variants}
    )
    assert (step.keys, step.payloads) == (["a", "c"], [b'{"v":1}', b'{"v":{"a":[2]}}'])
    assert [(row.row, row.reason) for row in bad] == [(101, "PAYLOAD_MALFORMED")]


@pytest.mark.parametrize("form", ["columns", "string"])
def test_a_row_that_fits_in_no_request_is_a_bad_row(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """given rows without a key and with too large a document / when planned / then the others go on. The client refused
    the whole call, so `onBadRow=drop` did not help."""
    monkeypatch.setattr(rows, "REQUEST_BYTES_MAX", 20)
    columns = {"k": pa.array(["a", None, "c", "d"]), "v": pa.array(["1", "2", "3" * 21, "4"])}
    step, bad = puts(plan("k string, v string", KEYLESS, key_column="k", payload=form), columns)
    assert (step.keys, list(step.rows), len(step.payloads)) == (["a", "d"], [100, 103], 2)
    assert [(row.row, row.reason) for row in bad] == [(101, "KEY_REQUIRED"), (102, "PAYLOAD_TOO_LARGE")]


def test_a_row_with_a_number_that_is_not_finite_is_a_bad_row_with_its_path() -> None:
    """It was written as the text "NaN", so that the type of a field depended on its value."""
    nested = pa.array(
        [{"a": [1.0]}, {"a": [1.0, math.nan]}, None, {"a": None}, {"a": [-math.inf]}],
        pa.struct([("a", pa.list_(pa.float64()))]),
    )
    maps = pa.array([[("x", 1.0)], None, [("y", math.inf)], [], []], pa.map_(pa.string(), pa.float32()))
    columns = {
        "id": pa.array([1, 2, 3, 4, 5]),
        "price": pa.array([1.5, None, 2.5, math.nan, 3.5]),
        "s": nested,
        "m": maps,
    }
    of = plan("id int, price double, s struct<a:array<double>>, m map<string,float>")
    step, bad = puts(of, columns)
    assert [(row.row, row.reason) for row in bad] == [(row, "PAYLOAD_MALFORMED") for row in (101, 102, 103, 104)]
    for row, path in zip(bad, ("/s/a[1]", "/m/y", "/price", "/s/a[0]"), strict=True):
        assert f" {path} " in row.message
    assert step.payloads == [b'{"id":1,"price":1.5,"s":{"a":[1.0]},"m":{"x":1.0}}']


def test_a_removed_row_may_have_a_number_that_is_not_finite() -> None:
    of = plan("id int, price double, _op string", on_delete="delete")
    bad: list[BadRow] = []
    batch = pa.RecordBatch.from_pydict(
        {"id": pa.array([1]), "price": pa.array([math.nan]), "_op": pa.array(["delete"])}
    )
    (step,) = of.steps(batch, 0, bad)
    assert isinstance(step, Removals)
    assert not bad


def test_documents_are_written_as_they_are() -> None:
    """given one column of documents / when planned with payload=binary / then they are the payloads"""
    of = plan("value string, _version bigint", TopicFacts("msgpack", keyed=True), payload="binary")
    step, bad = puts(of, {"value": pa.array(["\x81", None]), "_version": pa.array([1, 2])})
    assert step.payloads == ["\x81".encode()]
    assert [row.reason for row in bad] == ["PAYLOAD_MALFORMED"]


def test_changes_are_puts_and_removals_in_their_order() -> None:
    """given rows with _op / when planned / then runs of puts and removals come in the order of the rows"""
    of = plan("id int, _op string", KEYED)
    batch = pa.RecordBatch.from_pydict(
        {"id": pa.array([1, 2, 3, 4, 5]), "_op": pa.array(["put", "delete", "expire", None, "odd"])}
    )
    bad: list[BadRow] = []
    steps = list(of.steps(batch, 0, bad))
    assert [(type(step), list(step.rows)) for step in steps] == [(Puts, [0]), (Removals, [1, 2]), (Puts, [3])]
    assert [(row.row, row.reason) for row in bad] == [(4, "ROW_MALFORMED")]
    ignoring = plan("id int, _op string", KEYED, on_delete="ignore")
    assert [list(step.rows) for step in ignoring.steps(batch, 0, [])] == [[0], [3]]
    failing = plan("id int, _op string", KEYED, on_delete="fail")
    bad = []
    assert [list(step.rows) for step in failing.steps(batch, 0, bad)] == [[0, 3]]
    assert [row.row for row in bad] == [1, 2, 4]


@pytest.mark.parametrize("name", METADATA_COLUMNS)
def test_a_metadata_column_is_no_part_of_the_document(name: str) -> None:
    """given a frame that was read, with a column of metadata / then it is written without: `_key` is the key where the
    topic has no key fields, and `_op` the operation"""
    schema = StructType([StructField("id", IntegerType()), StructField(name, METADATA_COLUMNS[name])])
    for topic, key in ((KEYED, None), (KEYLESS, "_key")):
        if topic is KEYLESS and name != "_key":
            schema.add("_key", StringType())
        of = plan_rows(schema, Writing(Connecting(), "orders"), topic)
        assert (of.payload, of.key, of.op) == (("id",), key, "_op" if name == "_op" else None)


@pytest.mark.parametrize(
    ("schema", "topic", "options", "said"),
    [
        ("id int", KEYLESS, {}, "option keyColumn: is missing"),
        ("id int, _payload string", KEYED, {}, "column _payload has whole records of an exported file"),
        ("id int", KEYED, {"key_column": "id"}, "option keyColumn: topic orders has key fields"),
        ("id int", KEYLESS, {"key_column": "x"}, "there is no column 'x'; the columns are id"),
        ("id double", KEYLESS, {"key_column": "id"}, "cast it to string"),
        ("id int, t date", KEYED, {"ttl_column": "t"}, "option ttlColumn: column t is date"),
        ("id int, t bigint", KEYED, {"expire_time_column": "t"}, "option expireTimeColumn: column t is bigint"),
        ("id int, t timestamp_ntz", KEYED, {"expire_time_column": "t"}, "not timestamp (with a time zone)"),
        ("a int, b timestamp", KEYED, {"ttl_column": "a", "expire_time_column": "b"}, "exclude each other"),
        ("id int", TopicFacts("msgpack", keyed=True), {}, "option payload: topic orders holds msgpack"),
        ("a binary, b binary", KEYED, {"payload": "binary"}, "needs exactly one string or binary column"),
        ("a int, _op int", KEYED, {}, "column _op is int, not string"),
        ("a int", KEYED, {"given": {"onDelete"}}, "option onDelete: there is no column _op; the columns are a"),
        ("a map<struct<x:int>,int>", KEYED, {}, "column a is a map with nested keys"),
        ("a struct<b:interval year to month>", KEYED, {}, "column a.b is interval year to month"),
        ("a int, a int", KEYED, {}, "column a is there twice"),
    ],
)
def test_the_driver_refuses_columns_that_cannot_be_written(
    schema: str, topic: TopicFacts, options: dict[str, object], said: str
) -> None:
    """given a schema that does not suit / when planned / then the error names option or column (sow_spark/rows [1])"""
    with pytest.raises(SowSourceError) as caught:
        plan(schema, topic, **options)
    assert said in str(caught.value)


class Stream:
    """The end of a task, after its rows."""

    def __init__(self, rest: bytes) -> None:
        self.rest = rest

    def peek(self, size: int) -> bytes:
        return self.rest


def in_worker(rest: bytes) -> None:
    """Asks as in a task of PySpark, whose worker program has its input in a variable."""
    space = {"__name__": "pyspark.worker", "ask": require_whole_input}
    exec("def main(infile, outfile):\n    ask()\n", space)
    main = space["main"]
    assert callable(main)
    main(Stream(rest), None)


def test_rows_that_end_early_are_not_taken_for_whole() -> None:
    """given an input that was closed, or goes on with something else / when asked / then it is not whole"""
    in_worker(b"\xff\xff\xff\xfc")
    in_worker(b"\xff\xff\xff\xfc\x00\x00")
    in_worker(b"\xff\xff")  # the rest of the mark is still under way
    for rest in (b"", b"\xff\x00", b"\x00\x00\x00\x01"):
        with pytest.raises(SowSourceError) as caught:
            in_worker(rest)
        assert caught.value.reason == "INPUT_CUT"


def test_an_input_that_cannot_be_seen_is_not_taken_for_whole() -> None:
    """given no worker program underneath / when asked / then it is an error, not a yes"""
    with pytest.raises(SowSourceError) as caught:
        require_whole_input()
    assert caught.value.reason == "INPUT_UNKNOWN"
