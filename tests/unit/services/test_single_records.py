"""Requests and answers of one record: what is left out for one record is the same on the wire."""

from __future__ import annotations

from array import array

import pytest

from sow.v1 import sow_pb2, types_pb2
from sow_server.engine.stored import HeaderColumns
from sow_server.engine.values.errors import StoreError
from sow_server.engine.values.model import (
    ABSENT,
    NEVER,
    Applied,
    Condition,
    ConditionKind,
    Durability,
    Lifetime,
    LifetimeKind,
    Publish,
)
from sow_server.query.scan import RecordBatch
from sow_server.services.wire import convert

TTL = types_pb2.Lifetime(ttl_micros=5)
ABSENT_ONLY = types_pb2.Condition(only_if_absent=True)


def published(*records: sow_pb2.PublishRecord, **fields: object) -> Publish:
    request = sow_pb2.PublishRequest(topic="t", records=records, **fields)  # type: ignore[arg-type]  # its own fields
    return convert.publish(request, Durability.FSYNC)


def test_a_plain_record_has_no_columns() -> None:
    found = published(sow_pb2.PublishRecord(payload=b"{}"))
    assert (found.payloads, found.keys, found.lifetimes, found.conditions) == ([b"{}"], None, None, None)
    assert found.lifetime is ABSENT
    assert found.unset_paths == ()


def test_an_empty_lifetime_or_condition_of_a_record_is_none() -> None:
    empty = sow_pb2.PublishRecord(payload=b"{}", lifetime=types_pb2.Lifetime(), condition=types_pb2.Condition())
    found = published(empty)
    assert (found.lifetimes, found.conditions) == (None, None)


def test_records_with_parts_and_without_are_told_apart_by_their_places() -> None:
    found = published(
        sow_pb2.PublishRecord(payload=b"0", key="a"),
        sow_pb2.PublishRecord(payload=b"1", key="b", lifetime=TTL),
        sow_pb2.PublishRecord(payload=b"2", key="", condition=ABSENT_ONLY),
        lifetime=types_pb2.Lifetime(never=True),
        unset_paths=["/x"],
    )
    assert found.keys == ["a", "b", ""], "an empty key is a key"
    assert found.lifetimes == [ABSENT, Lifetime(LifetimeKind.TTL, 5), ABSENT]
    assert found.conditions == [None, None, Condition(ConditionKind.IF_ABSENT)]
    assert found.lifetime.kind is LifetimeKind.NEVER
    assert found.unset_paths == ("/x",)


@pytest.mark.parametrize(("keys", "missing"), [((None, "b"), 0), (("a", None), 1), (("a", "b", None, "d"), 2)])
def test_the_first_record_without_a_key_is_named(keys: tuple[str | None, ...], missing: int) -> None:
    with pytest.raises(StoreError, match=rf"^records\[{missing}\]\.key: is missing"):
        published(*[sow_pb2.PublishRecord(payload=b"{}", key=key) for key in keys])


@pytest.mark.parametrize(
    "entry",
    [
        Applied("k", 7, NEVER, 9),
        Applied("k", 7, 0, 9),
        Applied("k", 7, 8, 9, ttl_ignored=True),
        Applied("", 0, NEVER, 0, duplicate=True, expire_time_known=False),
        Applied("k", 7, 8, 9, delivered=0),
        Applied("k", 7, 8, 9, ttl_ignored=True, duplicate=True, expire_time_known=False, delivered=3),
    ],
)
def test_a_result_has_the_bytes_of_all_its_fields(entry: Applied) -> None:
    whole = sow_pb2.PublishResult(
        key=entry.key,
        version=entry.version,
        expire_time_micros=None if entry.expire_time_micros == NEVER else entry.expire_time_micros,
        sequence=entry.sequence,
        ttl_ignored=entry.ttl_ignored,
        duplicate=entry.duplicate,
        expire_time_unknown=not entry.expire_time_known,
        delivered=entry.delivered,
    )
    assert convert.result(entry).SerializeToString(deterministic=True) == whole.SerializeToString(deterministic=True)


@pytest.mark.parametrize("count", [1, 2, convert.PACKED_MIN])
def test_few_records_have_the_bytes_of_packed_columns(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    origins = array("H", range(count))
    version, published_at, expire_time, sequence = (array("q", [sign * 2**62] * count) for sign in (1, -1, 1, -1))
    headers = HeaderColumns(version, published_at, expire_time, sequence, origins)
    batch = RecordBatch([b"k"] * count, [b"{}"] * count, headers)

    def encoded() -> bytes:
        columns = types_pb2.RecordColumns()
        convert.fill_columns(columns, list(map(str, origins)), batch, None)
        return columns.SerializeToString(deterministic=True)

    found = encoded()
    monkeypatch.setattr(convert, "PACKED_MIN", 0)
    assert encoded() == found
    monkeypatch.setattr(convert, "PACKED_MIN", count + 1)
    assert encoded() == found
