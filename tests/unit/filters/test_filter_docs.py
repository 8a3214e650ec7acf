"""docs/filters.md describes the language that there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sow_server.filters import FilterError, Meta, compile_filter, parse, print_filter
from sow_server.filters.tree import Comparison, Function, MetadataName, Operator, TextTest

DOCUMENT = (Path(__file__).parents[3] / "docs/filters.md").read_text()
META = Meta("k", 1, 1, None, "t", 1)


def test_every_example_is_a_filter() -> None:
    examples = [
        line for block in re.findall(r"```filter\n(.*?)```", DOCUMENT, re.DOTALL) for line in block.splitlines() if line
    ]
    assert len(examples) > 15
    for example in examples:
        tree = parse(example)
        assert parse(print_filter(tree)) == tree
        compile_filter(tree)({}, META)


def test_every_function_operator_and_metadata_is_described() -> None:
    for function in Function:
        assert f"`{function.value}(" in DOCUMENT
    for name in MetadataName:
        assert f"`@{name.value}`" in DOCUMENT
    for operator in (*Operator, *Comparison, *TextTest):
        assert operator.value in DOCUMENT


def test_the_example_of_an_error_is_one() -> None:
    expected, line, caret = re.findall(r"```\n(expected .*?)\n```", DOCUMENT, re.DOTALL)[0].splitlines()
    with pytest.raises(FilterError) as caught:
        parse(line.strip())
    assert caught.value.message.splitlines() == [expected, line, caret]
