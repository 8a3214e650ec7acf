"""Fields of requests that make no sense: each is refused by its name, whatever a client sends."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from typing import Any, Final

import pytest

from sow.v1 import snapshot_pb2, sow_pb2, types_pb2
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import (
    ABSENT,
    PERMANENT,
    Condition,
    ConditionKind,
    Durability,
    PublishChannel,
    TtlMode,
)
from sow_server.services import changes_service
from sow_server.services.wire import convert


def refusal(call: Callable[[], object]) -> str:
    """The message of the refusal; it begins with the field."""
    with pytest.raises(StoreError) as refused:
        call()
    assert refused.value.reason is Reason.INVALID_ARGUMENT
    assert refused.value.message.startswith(f"{refused.value.field}: ")
    return refused.value.message


def publish(**fields: Any) -> object:
    return convert.publish(sow_pb2.PublishRequest(topic="t", **fields), Durability.FSYNC)


def streamed(**fields: Any) -> object:
    return convert.publish_stream(sow_pb2.PublishStreamRequest(**fields), "t", Durability.FSYNC, PublishChannel())


def touch(**fields: Any) -> object:
    return convert.touch(sow_pb2.TouchRequest(topic="t", **fields), Durability.FSYNC)


def position(**fields: Any) -> object:
    given: dict[str, Any] = {"publisher_id": "p", "first_sequence": 1} | fields
    return convert.position(types_pb2.PublisherPosition(**given))


KINDS: Final = types_pb2.LifetimeKind
RECORD: Final = sow_pb2.PublishRecord


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: publish(durability=99), "durability: 99 is not a durability of this server"),
        (lambda: publish(ttl_mode=99), "ttl_mode: 99 is not a ttl mode of this server"),
        (lambda: publish(lifetime=types_pb2.Lifetime(never=False)), "lifetime.never: false has no meaning"),
        (
            lambda: publish(records=[RECORD(condition=types_pb2.Condition(only_if_absent=False))]),
            "records[0].condition.only_if_absent: false has no meaning",
        ),
        (
            lambda: streamed(condition=types_pb2.Condition(only_if_present=False)),
            "condition.only_if_present: false has no meaning",
        ),
        (lambda: publish(records=[RECORD(key="a"), RECORD()]), "records[1].key: is missing, while other records have"),
        (lambda: position(publisher_id="a b"), "publisher.publisher_id: must be 1 to 200 characters"),
        (lambda: position(publisher_epoch=-1), "publisher.publisher_epoch: must not be negative"),
        (lambda: position(first_sequence=0), "publisher.first_sequence: must be between 1 and 2^62"),
        (lambda: position(first_sequence=2**62 + 1), "publisher.first_sequence: must be between 1 and 2^62"),
        (lambda: position(publisher_token=-1), "publisher.publisher_token: must not be negative"),
        (lambda: position(unit=-1), "publisher.unit: must not be negative"),
        (lambda: position(unit_done=True), "publisher.unit_done: needs the number of the unit"),
        (
            lambda: convert.acting(types_pb2.PublisherPosition(publisher_id="p", unit=1, unit_done=True)),
            "publisher.first_sequence: has no meaning for a delete",
        ),
        (lambda: streamed(payload=[b"{}"], lifetime_kind=[1]), "lifetime_micros: has 0 entries for 1 payloads"),
        (lambda: streamed(payload=[b"{}"], lifetime_micros=[1]), "lifetime_kind: has 0 entries for 1 payloads"),
        (
            lambda: streamed(payload=[b"{}"] * 2, lifetime_kind=[1, 9], lifetime_micros=[1, 1]),
            "lifetime_kind[1]: 9 is not a kind of lifetime",
        ),
        (
            lambda: streamed(payload=[b"{}"] * 2, lifetime_kind=[1, KINDS.LIFETIME_KIND_NEVER], lifetime_micros=[1, 1]),
            "lifetime_micros[1]: must be 0 for this kind of lifetime",
        ),
        (lambda: touch(only=99), "only: 99 is not a condition of this server"),
        (lambda: touch(keys=["a", "b"], versions=[1]), "versions: has 1 entries for 2 keys"),
        (
            lambda: touch(keys=["a"], versions=[1], condition=types_pb2.Condition(only_if_version=1)),
            "versions: are conditions of their own",
        ),
    ],
)
def test_a_field_of_a_write_that_makes_no_sense_is_refused_by_name(call: Callable[[], object], message: str) -> None:
    assert message in refusal(call)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"touch_below_micros": 5}, "touch_below_micros: has a meaning only with touch"),
        ({"touch": types_pb2.Lifetime(), "touch_below_micros": -1}, "touch_below_micros: must not be negative"),
        ({"touch": types_pb2.Lifetime(never=False)}, "touch.never: false has no meaning"),
    ],
)
def test_a_renewal_that_makes_no_sense_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    assert message in refusal(lambda: convert.renewal(sow_pb2.GetRequest(topic="t", **fields), Durability.FSYNC))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "start: one of bookmark, start_time_micros, earliest or latest is needed"),
        ({"start_time_micros": -1}, "start_time_micros: must not be negative"),
        ({"earliest": False}, "earliest: false has no meaning"),
        ({"latest": False}, "latest: false has no meaning"),
    ],
)
def test_a_plan_of_changes_begins_somewhere(fields: dict[str, Any], message: str) -> None:
    assert message in refusal(lambda: changes_service._start(snapshot_pb2.PlanChangesRequest(**fields)))


def test_a_reader_of_changes_has_keys_or_a_share_of_them() -> None:
    def keys(**fields: Any) -> object:
        return changes_service._keys(snapshot_pb2.ReadChangesRequest(**fields))

    assert keys() is None
    assert "keys: cannot be combined with shares" in refusal(lambda: keys(keys=["a"], shares=2))
    many = ["a"] * (changes_service.KEYS_MAX + 1)
    assert f"keys: has {len(many)} keys" in refusal(lambda: keys(keys=many))
    share = changes_service._share
    assert share(0, 0) is share(0, 1) is None, "everything"
    assert share(1, 2) is not None
    assert "share: must be below shares, which is 2" in refusal(lambda: share(2, 2))
    assert "share: is given without shares" in refusal(lambda: share(1, 0))
    assert "shares: must be at most" in refusal(lambda: share(0, changes_service.SHARES_MAX + 1))


def test_what_is_not_given_has_the_meaning_of_absence() -> None:
    assert convert.durability(0, Durability.BUFFERED) is Durability.BUFFERED
    assert convert.ttl_mode(0) is TtlMode.RESET
    assert convert.lifetime(types_pb2.Lifetime()) is ABSENT
    assert convert.lifetime(types_pb2.Lifetime(never=True)) is PERMANENT
    assert convert.condition(types_pb2.Condition()) is None
    assert convert.condition(types_pb2.Condition(only_if_version=0)) == Condition(ConditionKind.IF_VERSION, 0)
    assert convert.condition(types_pb2.Condition(only_if_present=True)) == Condition(ConditionKind.IF_PRESENT)
    assert convert.renewal(sow_pb2.GetRequest(topic="t"), Durability.FSYNC) is None


def test_packed_numbers_are_little_endian_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    column = array("q", [1, -2])
    expected = bytes.fromhex("0100000000000000feffffffffffffff")
    assert sys.byteorder == "little", "of the machines that run this"
    assert convert._packed(b"", column)[-16:] == expected
    swapped = array("q", column)
    swapped.byteswap()  # as such a machine has it
    monkeypatch.setattr(sys, "byteorder", "big")
    assert convert._packed(b"", swapped)[-16:] == expected
    assert list(column) == [1, -2], "the column itself stays"
