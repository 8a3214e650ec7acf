"""Documents of the client: the JSON of each Python value, and the refused numbers."""

from __future__ import annotations

import enum
import json
import math
from collections import UserDict
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from types import MappingProxyType
from typing import Any
from uuid import UUID

import msgspec
import numpy
import pydantic
import pytest

from sow.v1 import types_pb2
from sow_client import InvalidArgument, Record, RecordBatch
from sow_client._documents import decode, encode

NAN, INF = float("nan"), float("inf")


class Side(enum.Enum):
    BUY = "buy"
    ODD = NAN


class Price(float):
    """A float of another name."""


@dataclass
class Order:
    id: int
    price: float


class Trade(msgspec.Struct, rename="camel"):
    best_price: float


class Model(pydantic.BaseModel):
    id: int = 1
    best_price: float | Decimal | None = pydantic.Field(default=None, alias="bestPrice")
    parts: list[float] = []
    at: datetime | None = None


@pydantic.dataclasses.dataclass
class Checked:
    price: float


@pytest.mark.parametrize(
    ("document", "path"),
    [
        ({"a": NAN}, "/a"),
        ({"a": INF}, "/a"),
        ({"a": -INF}, "/a"),
        ({"x": None, "a": {"b": [1, 2.5, None, NAN]}}, "/a/b[3]"),
        ({"a": [[1.0], [INF]]}, "/a[1][0]"),
        ({"a": (1, NAN)}, "/a[1]"),
        ({"a": {NAN}}, "/a[0]"),
        ({"a": Decimal("NaN")}, "/a"),
        ({"a": Decimal("-sNaN")}, "/a"),
        ({"a": [Decimal("-Infinity")]}, "/a[0]"),
        ({"a": Price("nan")}, "/a"),
        ({"a": Side.ODD}, "/a"),
        ({"a": Order(1, INF)}, "/a/price"),
        ({"a": [Trade(NAN)]}, "/a[0]/bestPrice"),
        ({"a": UserDict(b=NAN)}, "/a/b"),
        ({"a": numpy.float64("nan")}, "/a"),
        ({"a": numpy.float32("inf")}, "/a"),
        ({"a/b": NAN}, "/[a/b]"),
        ({"": NAN}, "/[]"),
        ({7: NAN}, "/7"),
        (MappingProxyType({"a": NAN}), "/a"),
        (Order(1, NAN), "/price"),
        (Trade(INF), "/bestPrice"),
        (Model(bestPrice=NAN), "/bestPrice"),
        (Model(parts=[1, -INF]), "/parts[1]"),
        ({"a": [Model(parts=[NAN])]}, "/a[0]/parts[0]"),
        (Checked(NAN), "/price"),
    ],
)
def test_a_number_that_is_not_finite_is_refused_with_its_path(document: Any, path: str) -> None:
    """It became null: a delta with it was acknowledged, and the old value stayed."""
    with pytest.raises(InvalidArgument) as refused:
        encode(document)
    assert refused.value.reason == "PAYLOAD_MALFORMED"
    assert refused.value.details == {"field": "data", "path": path}
    assert path in refused.value.message


def test_a_model_of_pydantic_is_written_as_pydantic_writes_it() -> None:
    model = Model(bestPrice=Decimal("1.10"), at=datetime(2026, 1, 31, 12, tzinfo=UTC))
    assert encode(model) == model.model_dump_json(by_alias=True).encode()
    assert json.loads(encode({"a": model})) == {"a": model.model_dump(mode="json", by_alias=True)}
    assert encode(Checked(2.5)) == b'{"price":2.5}'


@pytest.mark.parametrize(
    "document",
    [
        {"a": None, "b": "null"},
        {"note": "NaN is Not a number, Infinity neither, null too"},
        {"null": 1.5, "NaN": [None, {"Infinity": None}]},
        {"a": Decimal("1.5"), "N": "NaN"},
        {"a": msgspec.Raw(b"null")},
        Order(1, 2.5),
    ],
)
def test_texts_and_nulls_that_look_like_such_a_number_are_none(document: Any) -> None:
    assert json.loads(encode(document)) is not None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"\x00\xff", '"AP8="'),
        (bytearray(b"ab"), '"YWI="'),
        (memoryview(b"ab"), '"YWI="'),
        ({3}, "[3]"),
        (frozenset({3}), "[3]"),
        ((1, "a"), '[1,"a"]'),
        (UUID(int=1), '"00000000-0000-0000-0000-000000000001"'),
        (datetime(2026, 1, 31, 12, tzinfo=UTC), '"2026-01-31T12:00:00Z"'),
        (datetime(2026, 1, 31, 12, 0, 0, 5, tzinfo=UTC).replace(tzinfo=None), '"2026-01-31T12:00:00.000005"'),
        (date(2026, 1, 31), '"2026-01-31"'),
        (time(12, 30), '"12:30:00"'),
        (timedelta(days=1, seconds=1), '"P1DT1S"'),
        (Decimal("1.10"), "1.10"),
        (Decimal("1E+400"), "1E+400"),
        (10**40, "1" + "0" * 40),
        (Side.BUY, '"buy"'),
        (Order(1, 2.5), '{"id":1,"price":2.5}'),
        (Trade(2.5), '{"bestPrice":2.5}'),
        (UserDict(a=1), '{"a":1}'),
        (MappingProxyType({"a": 1}), '{"a":1}'),
        (Price(2.5), "2.5"),
        (numpy.float64(2.5), "2.5"),
        (numpy.float32(2.5), "2.5"),
        (numpy.int64(3), "3"),
        (numpy.uint8(3), "3"),
        (numpy.bool_(True), "true"),
        (numpy.str_("x"), '"x"'),
        (numpy.bytes_(b"ab"), '"YWI="'),
    ],
)
def test_each_type_has_its_form_in_json(value: Any, text: str) -> None:
    """docs/reference/documents.md has this as a table."""
    assert encode({"a": value}) == f'{{"a":{text}}}'.encode()


@pytest.mark.parametrize(
    "value", [object(), 1j, range(3), Order, numpy.array([1.0]), numpy.datetime64("2026-01-31"), "\ud800", {None: 1}]
)
def test_a_type_without_a_form_is_refused(value: Any) -> None:
    with pytest.raises(InvalidArgument) as refused:
        encode({"a": value})
    assert refused.value.reason == "PAYLOAD_MALFORMED"
    assert refused.value.details["field"] == "data"


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (b'{"a":1e400,"b":1.5}', {"a": Decimal("1E+400"), "b": 1.5}),
        (b'{"a":[-1e400],"b":2}', {"a": [Decimal("-1E+400")], "b": 2}),
        (b'{"a":' + b"7" * 5000 + b"}", {"a": Decimal("7" * 5000)}),
        (b'{"a":1e99999999999999999999}', {"a": INF}),
        (b'{"a":123456789012345678901234567890}', {"a": 123456789012345678901234567890}),
    ],
)
def test_a_number_that_no_float_reaches_is_read_as_a_decimal(payload: bytes, expected: object) -> None:
    """The whole document was given as bytes, without a word."""
    assert decode(payload) == expected
    assert _record(payload).data == expected


def test_a_payload_that_only_begins_like_json_stays_bytes() -> None:
    for payload in (b"{", b'{"a":1e400,"b":NaN}', b'{"a":1e400', b'{"a":Infinity}'):
        assert _record(payload).data == payload


def test_a_number_read_as_a_decimal_is_published_as_the_same_number() -> None:
    assert encode(_record(b'{"a":1E+400}').data) == b'{"a":1E+400}'


def test_a_float_that_was_published_is_read_as_itself() -> None:
    for value in (0.1, 1e308, 5e-324, -0.0, 1.7976931348623157e308):
        document = decode(encode({"a": value}))
        assert isinstance(document, dict)
        assert math.copysign(1, document["a"]) == math.copysign(1, value)
        assert document["a"] == value


def _record(payload: bytes) -> Record:
    columns = types_pb2.RecordColumns(
        key=["1"],
        payload=[payload],
        version=[1],
        publish_time_micros=[1],
        expire_time_micros=[1],
        sequence=[1],
        origins=["one"],
    )
    return next(iter(RecordBatch("orders", columns)))
