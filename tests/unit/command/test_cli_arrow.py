"""Columns of Parquet and Arrow: one type for all values of a field, and no value lost."""

from __future__ import annotations

import subprocess
import sys
from array import array
from collections.abc import Sequence
from dataclasses import replace

import click
import msgspec
import pytest
from click.testing import CliRunner

from sow_cli.arrow import ArrowSchema
from sow_cli.command import sow
from sow_cli.rows import NEVER_MICROS, BatchColumns, RecordForm
from tests.support.fakes.fake_client import FakeClient


def columns(*documents: object) -> BatchColumns:
    payloads = [msgspec.json.encode(one) for one in documents]
    some = len(payloads)
    numbers: Sequence[int] = array("q", range(some))
    return BatchColumns(
        list("abcdefghij"[:some]), numbers, numbers, [NEVER_MICROS] * some, ["x"] * some, numbers, payloads
    )


def typed(*batches: Sequence[object]) -> tuple[str, list[object]]:
    """The type of the field `v`, and its values, of documents that came in these batches."""
    schema = ArrowSchema(RecordForm("t", message_type="json"))
    seen = [columns(*({"v": value} for value in values)) for values in batches]
    for batch in seen:
        schema.look(batch.payloads)
    values = [value for batch in seen for value in schema.batch(batch).column("v").to_pylist()]
    return str(schema.schema().field("v").type), values


@pytest.mark.parametrize(
    ("batches", "kind", "values"),
    [
        ([[1, 2], [3]], "int64", [1, 2, 3]),
        ([[1], [2.5]], "double", [1.0, 2.5]),
        ([[None], [True]], "bool", [None, True]),
        ([[None], [None]], "string", [None, None]),
        ([["a"], [1]], "string", ["a", "1"]),
        ([[1], [True]], "string", ["1", "true"]),
        ([[2**53 + 1], [0.5]], "string", [str(2**53 + 1), "0.5"]),
        ([[2**63], [1]], "uint64", [2**63, 1]),
        ([[2**64 - 1, 1], [-1]], "string", [str(2**64 - 1), "1", "-1"]),
        ([[2**64]], "string", [str(2**64)]),
        ([[{"a": 2**63}], [{"a": 0}]], "struct<a: uint64>", [{"a": 2**63}, {"a": 0}]),
        ([[[2**63]], [[-1]]], "string", [f"[{2**63}]", "[-1]"]),
        ([[[1]], [[2.5]], [None]], "list<item: double>", [[1.0], [2.5], None]),
        ([[{"a": 1}], [{"b": None}]], "struct<a: int64, b: string>", [{"a": 1, "b": None}, {"a": None, "b": None}]),
        ([[{"a": 1}], [{"a": "x"}]], "string", ['{"a":1}', '{"a":"x"}']),
        ([[{"a": 1}], [[1]]], "string", ['{"a":1}', "[1]"]),
        ([[{}], [{}]], "string", ["{}", "{}"]),
    ],
)
def test_a_column_has_the_narrowest_type_that_holds_all_values(
    batches: list[list[object]], kind: str, values: list[object]
) -> None:
    assert typed(*batches) == (kind, values)


@pytest.mark.parametrize(("first", "later"), [(1, 2.5), (1, "x"), ({"a": 1}, {"a": 1, "b": 2}), ([1], ["x"])])
def test_a_value_that_does_not_fit_a_stream_ends_it(first: object, later: object) -> None:
    """Story: Arrow drops the fields that its struct does not have, without a word."""
    schema = ArrowSchema(RecordForm("t", message_type="json"))
    schema.look(columns({"v": first}).payloads)

    with pytest.raises(click.ClickException, match="a value of v, in the record b, does not fit"):
        schema.batch(columns({"v": first}, {"v": later}))


def test_fields_that_only_later_records_have_are_told() -> None:
    schema = ArrowSchema(RecordForm("t", message_type="json"))
    schema.look(columns({"v": 1}).payloads)
    schema.batch(columns({"v": 1, "w": 2}))
    assert list(schema.left_out) == ["w"]


def test_numbers_beyond_a_float_are_texts() -> None:
    schema = ArrowSchema(RecordForm("t", message_type="json"))
    beyond = replace(columns({"v": 1}), payloads=[b'{"v":1e400}'])
    schema.look(beyond.payloads)
    assert schema.batch(beyond).column("v").to_pylist() == ["1e400"]


@pytest.mark.parametrize(
    "arguments",
    [("query", "orders", "--format", "parquet"), ("export", "orders", "orders.arrow")],
    ids=["query", "export"],
)
def test_without_pyarrow_the_command_tells_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    result = CliRunner().invoke(sow, arguments, obj=lambda _session: FakeClient())
    assert result.exit_code == 2
    assert "pip install 'sow[arrow]'" in result.stderr


@pytest.mark.slow
def test_other_commands_do_not_import_pyarrow() -> None:
    """It takes a quarter of a second."""
    program = "import sys, sow_cli.command; assert not {'pyarrow', 'pandas', 'numpy'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], check=False, env={"PYTHONPATH": ":".join(sys.path)})
    assert done.returncode == 0
