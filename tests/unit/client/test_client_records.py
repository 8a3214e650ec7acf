"""Records as views on the columns they came in."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, assert_type

import msgspec
import pydantic
import pytest

from sow.v1 import sow_pb2, types_pb2
from sow_client import InternalError, Record, RecordBatch, Unavailable, _reads

NEVER_MICROS = 2**63 - 1


def columns(**changes: object) -> types_pb2.RecordColumns:
    """Two records."""
    values: dict[str, object] = {
        "key": ["1", "2"],
        "payload": [b'{"id":1}', b'{"id":2}'],
        "version": [11, 12],
        "publish_time_micros": [1_000_001, 2_000_000],
        "expire_time_micros": [3_000_000, NEVER_MICROS],
        "sequence": [21, 22],
        "origin": [1, 0],
        "origins": ["nyc", "ldn"],
    }
    return types_pb2.RecordColumns(**(values | changes))  # type: ignore[arg-type]  # keywords of several types


def test_a_record_reads_its_row_of_the_columns() -> None:
    first, second = RecordBatch("orders", columns())
    assert (first.topic, first.key, first.payload, first.version) == ("orders", "1", b'{"id":1}', 11)
    assert (first.origin, first.sequence) == ("ldn", 21)
    assert first.publish_time == datetime(1970, 1, 1, 0, 0, 1, 1, tzinfo=UTC)
    assert first.expire_time == datetime(1970, 1, 1, 0, 0, 3, tzinfo=UTC)
    assert (second.expire_time, second.expire_time_micros, second.origin) == (None, None, "nyc")
    assert repr(first) == "Record(topic='orders', key='1', version=11, payload=b'{\"id\":1}')"


def test_one_origin_for_all_needs_no_column() -> None:
    batch = RecordBatch("orders", columns(origin=[], origins=["nyc"]))
    assert [record.origin for record in batch] == ["nyc", "nyc"] == batch.origins


def test_keys_only_gives_empty_payloads() -> None:
    batch = RecordBatch("orders", columns(payload=[]))
    assert [record.payload for record in batch] == [b"", b""]
    assert len(batch) == 2


def test_an_empty_batch_is_no_fault() -> None:
    assert list(RecordBatch("orders", types_pb2.RecordColumns())) == []


@pytest.mark.parametrize(
    "fault", [{"payload": [b"1"]}, {"version": []}, {"sequence": [1, 2, 3]}, {"origin": [0]}, {"origins": []}]
)
def test_columns_of_unequal_length_are_not_read(fault: dict[str, object]) -> None:
    with pytest.raises(InternalError) as caught:
        RecordBatch("orders", columns(**fault))
    assert caught.value.reason == "MALFORMED_RESPONSE"


@pytest.mark.parametrize(
    ("payload", "data"),
    [
        (b'{"id":1}', {"id": 1}),
        (b' \n{"a":[1,null]}', {"a": [1, None]}),
        (b"8=FIX.4.4\x0155=IBM", b"8=FIX.4.4\x0155=IBM"),
        (b"\x81\xa2id\x01", b"\x81\xa2id\x01"),
        (b"123", b"123"),  # a binary topic's bytes, not the number
        (b"{not json", b"{not json"),
        (b"", b""),
    ],
)
def test_data_is_the_json_object_or_the_bytes(payload: bytes, data: object) -> None:
    record = next(iter(RecordBatch("orders", columns(payload=[payload, b""]))))
    assert record.data == data
    assert record.data is record.data  # decoded once


def test_records_of_a_get_look_like_those_of_a_query() -> None:
    response = sow_pb2.GetResponse(
        records=[
            types_pb2.Record(topic="orders", key="1", payload=b"x", version=3, origin="nyc", sequence=4),
            types_pb2.Record(topic="orders", key="2", version=5, expire_time_micros=0, origin="ldn", sequence=6),
        ]
    )
    first, second = _reads.records("orders", response)
    assert isinstance(first, Record)
    assert (first.key, first.expire_time_micros, first.origin) == ("1", None, "nyc")
    assert (second.key, second.expire_time_micros, second.origin, second.payload) == ("2", 0, "ldn", b"")
    assert _reads.records("orders", sow_pb2.GetResponse()) == []


def test_an_answer_without_its_footer_was_cut() -> None:
    progress = _reads.QueryProgress("orders")
    progress.batch(sow_pb2.QueryResponse(header=sow_pb2.QueryHeader(bookmark="e:1", as_of_micros=5)))
    assert progress.batch(sow_pb2.QueryResponse(batch=columns())) is not None
    with pytest.raises(Unavailable) as caught:
        progress.finished()
    assert caught.value.reason == "STREAM_CUT"
    progress.batch(sow_pb2.QueryResponse(footer=sow_pb2.QueryFooter(matched=2, returned=2, scanned=3)))
    progress.finished()
    assert progress.header is not None
    assert progress.header.bookmark == "e:1"
    assert progress.footer is not None
    assert (progress.footer.matched, progress.footer.scanned) == (2, 3)


def test_records_before_the_header_are_not_believed() -> None:
    with pytest.raises(InternalError):
        _reads.QueryProgress("orders").batch(sow_pb2.QueryResponse(batch=columns()))


# ---- records are values ----


def record(**changes: object) -> Record:
    return next(iter(RecordBatch("orders", columns(**changes))))


def test_records_are_equal_when_all_that_they_tell_is_equal() -> None:
    """Story: two gets of one record gave two different values."""
    one, other = record(), record(key=["1", "3"], origins=["par", "ldn"])
    assert one == other
    assert hash(one) == hash(other)
    assert {one} == {other}
    assert one.data == {"id": 1}  # which it keeps
    assert one == other
    assert one != next(iter(RecordBatch("quotes", columns())))
    assert one != "1"


@pytest.mark.parametrize(
    "change",
    [
        {"key": ["9", "2"]},
        {"payload": [b"{}", b""]},
        {"version": [9, 12]},
        {"publish_time_micros": [9, 9]},
        {"expire_time_micros": [NEVER_MICROS, 9]},
        {"sequence": [9, 9]},
        {"origin": [0, 0]},
    ],
)
def test_records_that_differ_in_anything_are_not_equal(change: dict[str, object]) -> None:
    assert record() != record(**change)


def test_a_record_does_not_change() -> None:
    with pytest.raises(AttributeError):
        record().key = "2"  # type: ignore[misc]  # it is frozen


def test_a_pickled_record_leaves_its_batch_behind() -> None:
    """Story: 405 KB for a document of 18 bytes, as the thousand records of its batch came along."""
    count = 1_000
    many = columns(
        key=[str(number) for number in range(count)],
        payload=[b'{"id":1,"price":2}'] * count,
        version=range(count),
        publish_time_micros=range(count),
        expire_time_micros=[NEVER_MICROS] * count,
        sequence=range(count),
        origin=[1] * count,
    )
    for one in list(RecordBatch("orders", many))[:2]:
        pickled = pickle.dumps(one)
        assert len(pickled) < 300
        for again in (pickle.loads(pickled), copy.deepcopy(one), copy.copy(one)):
            assert again == one
            assert (again.topic, again.origin, again.expire_time, again.data) == ("orders", "ldn", None, one.data)


def test_a_repr_has_a_bound() -> None:
    assert len(repr(record(payload=[b"x" * 2**20, b""]))) < 500
    assert "of 1048576 bytes" in repr(record(payload=[b"x" * 2**20, b""]))


# ---- documents of a type ----


class Order(msgspec.Struct):
    id: int
    price: float


@dataclass
class PlainOrder:
    id: int
    price: Decimal


class Quote(pydantic.BaseModel):
    id: int
    best_price: Decimal = pydantic.Field(alias="bestPrice")
    at: datetime


@pydantic.dataclasses.dataclass
class Checked:
    id: int
    size: int = pydantic.Field(gt=0)


def with_payload(payload: bytes) -> Record:
    return record(payload=[payload, b""])


def test_a_record_is_read_as_a_type_of_the_program() -> None:
    one = with_payload(b'{"id":1,"price":9.50,"more":null}')
    order = one.as_(Order)
    assert_type(order, Order)
    assert order == Order(1, 9.5)
    assert one.as_(PlainOrder) == PlainOrder(1, Decimal("9.50"))  # with all digits
    assert one.as_(dict[str, Any])["price"] == 9.5
    quote = with_payload(b'{"id":1,"bestPrice":"9.50","at":"2026-01-31T12:00:00Z"}').as_(Quote)
    assert_type(quote, Quote)
    assert quote == Quote(id=1, bestPrice=Decimal("9.50"), at=datetime(2026, 1, 31, 12, tzinfo=UTC))
    assert with_payload(b'{"id":1,"size":2}').as_(Checked) == Checked(1, 2)


@pytest.mark.parametrize("kind", [Order, PlainOrder, Quote, Checked])
@pytest.mark.parametrize("payload", [b'{"id":"x"}', b"8=FIX.4.4", b""])
def test_a_document_that_does_not_fit_is_an_error_that_names_its_record(kind: type, payload: bytes) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        with_payload(payload).as_(kind)
    assert caught.value.__notes__ == ["the record '1' of the topic 'orders'"]


def test_data_needs_no_cast() -> None:
    """mypy checks this, too."""
    price: float = with_payload(b'{"price":9.5}').data["price"]
    assert price == 9.5
