"""Which records a lease takes for its own when they are not at the versions that it knows (rule L21)."""

from __future__ import annotations

import asyncio
from typing import NoReturn

import pytest

from sow.v1 import sow_pb2
from sow_client import AsyncLease, InvalidArgument, NotFound, Published, Record, SowError
from sow_client._lease_core import LeaseCore, Seen, lease_now
from sow_client._reads import TOUCHED_TOGETHER_MAX, records
from sow_client.aio._leasing import AsyncLeasing

PAYLOAD = b'{"by":1}'
OTHER = b'{"by":2}'
TTL = 15.0
SENT = 100.0


def published(version: int) -> Published:
    return Published("k", version, expire_time_micros=1, sequence=1, ttl_ignored=False, duplicate=not version)


def held(version: int = 10) -> LeaseCore:
    """A lease of one record, which has been published at this version."""
    core = LeaseCore(TTL)
    publish(core, version, PAYLOAD)
    return core


def publish(core: LeaseCore, version: int, payload: bytes) -> None:
    joining = core.joins("t", payload, SENT)
    core.joined(joining, published(version), SENT)
    core.left(joining)


def renew(core: LeaseCore, version: int) -> None:
    core.renewed("t", sow_pb2.TouchResponse(results=[sow_pb2.PublishResult(key="k", version=version)]))


def found(version: int, payload: bytes = PAYLOAD) -> list[Record]:
    response = sow_pb2.GetResponse()
    response.records.add(topic="t", key="k", payload=payload, version=version)
    return records("t", response)


def names(core: LeaseCore) -> list[int]:
    """The versions that the next renewal names."""
    return list(core.renewal("t", None).versions)


def test_an_instance_that_lags_has_an_earlier_version_which_is_the_leases() -> None:
    """Story: a client went on at an instance that had not got the last renewal yet, and the lease was lost, though
    nobody had touched its records and its time was not over."""
    core = held(10)
    renew(core, 20)
    renew(core, 30)
    assert core.recognize("t", found(20), SENT) is Seen.OWN
    assert names(core) == [20]
    assert core.recognize("t", found(30), SENT) is Seen.OWN, "it has come meanwhile"
    assert names(core) == [30]
    assert core.recognize("t", found(9), SENT) is Seen.BEHIND, "a record from before those that it knows"
    assert names(core) == [30], "which may be of a former holder, and is not renewed"
    assert core.recognize("t", [], SENT) is Seen.OTHER
    assert core.recognize("t", found(20, OTHER), SENT) is Seen.OTHER


def test_a_later_version_is_the_leases_only_after_a_failed_renewal_and_for_the_time_of_the_lease() -> None:
    core = held(10)
    assert core.recognize("t", found(20), SENT) is Seen.OTHER
    core.failed("t", SowError("cut", reason="STREAM_CUT"), SENT)
    assert core.recognize("t", found(20, OTHER), SENT + 1) is Seen.OTHER
    assert core.recognize("t", found(20), SENT + 1) is Seen.OWN
    renew(core, 25)
    assert core.recognize("t", found(40), SENT + TTL) is Seen.OWN, "from an instance whose clock is ahead"
    assert core.recognize("t", found(50), SENT + 2 * TTL) is Seen.OTHER


def test_a_publish_of_unknown_outcome_may_have_replaced_a_record_of_the_lease() -> None:
    """Story: a record was published once more, and the answer was lost. The next renewal took it for another's."""
    core = held(10)
    core.doubtful("t", OTHER, SENT)
    assert core.recognize("t", found(20, OTHER), SENT + 1) is Seen.OWN
    core.failed("t", SowError("cut", reason="STREAM_CUT"), SENT + 2)
    assert core.recognize("t", found(30, OTHER), SENT + 3) is Seen.OWN
    assert core.recognize("t", found(40, b"{}"), SENT + 3) is Seen.OTHER


def test_a_record_that_was_published_twice_is_the_leases_at_its_earlier_version_too() -> None:
    core = held(10)
    publish(core, 20, OTHER)
    assert core.recognize("t", found(10), SENT) is Seen.OWN
    assert core.recognize("t", found(20, OTHER), SENT) is Seen.OWN
    assert core.recognize("t", found(15, b"{}"), SENT) is Seen.OTHER


def test_a_publish_under_way_may_have_replaced_a_record_that_is_renewed() -> None:
    """Story: a holder published its record again while it was renewed. The renewal was refused, and took the new
    version for another's: the lease was lost while it was well."""
    core = held(10)
    joining = core.joins("t", OTHER, SENT)
    assert core.recognize("t", found(20, b"{}"), SENT) is Seen.OTHER
    assert core.recognize("t", found(20, OTHER), SENT) is Seen.OWN
    assert names(core) == [20]
    renew(core, 30)
    core.joined(joining, published(20), SENT)
    core.left(joining)
    assert names(core) == [30], "it was renewed since"
    assert core.recognize("t", found(30, OTHER), SENT) is Seen.OWN
    assert core.recognize("t", found(40, OTHER), SENT) is Seen.OTHER


def test_of_two_publishes_of_a_record_at_once_the_later_one_counts_in_whatever_order_they_are_answered() -> None:
    core = held(10)
    first, second = core.joins("t", b"1", SENT), core.joins("t", b"2", SENT)
    for joining, version in ((second, 30), (first, 20)):
        core.joined(joining, published(version), SENT)
        core.left(joining)
    assert names(core) == [30]
    assert core.recognize("t", found(30, b"2"), SENT) is Seen.OWN


@pytest.mark.parametrize("payload", [PAYLOAD, OTHER])
def test_a_publish_that_was_known_elsewhere_has_no_version_and_is_recognized_by_its_payload(payload: bytes) -> None:
    """F12. Story: the answer to the publish of a lease was lost, and its retry at another instance was a duplicate,
    whose version is 0. The next renewal named that, and the lease was lost."""
    core = held(0)
    assert core.recognize("t", found(20, payload), SENT + 1) is (Seen.OWN if payload == PAYLOAD else Seen.OTHER)


def test_a_publish_that_is_given_up_twice_frees_its_place() -> None:
    """Story: the place of the key was given back under the lease's lock. A second cancellation, while another had the
    lock, left the place taken for ever: one of 1,000."""

    class Client(AsyncLeasing):
        def __init__(self) -> None:
            self.asked = asyncio.Event()

        async def describe_topic(self, topic: str) -> NoReturn:
            raise NotFound("it does not matter", reason="TOPIC_NOT_FOUND")

        async def _publish(self, request: object, **_: object) -> NoReturn:
            self.asked.set()
            await asyncio.Event().wait()
            raise AssertionError("it is given up")

    async def give_up_twice() -> LeaseCore:
        client, core = Client(), LeaseCore(TTL)
        lease = AsyncLease(client, core)
        publish = asyncio.create_task(lease.publish("t", PAYLOAD, key="k"))
        await client.asked.wait()
        async with lease._lock:  # as a renewal that waits for its answer
            for _ in range(2):
                publish.cancel()
                await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await publish
        return core

    core = asyncio.run(give_up_twice())
    for _ in range(TOUCHED_TOGETHER_MAX):
        core.joins("t", PAYLOAD, SENT)
    with pytest.raises(InvalidArgument):
        core.joins("t", PAYLOAD, SENT)


@pytest.mark.parametrize("goes", [True, False])
def test_a_publish_that_may_have_been_made_at_two_instances_has_two_versions(goes: bool) -> None:
    """Story: the answer of the first instance was lost, and the second one gave a lower version, as its clock was
    behind. When the first one's version came to the second by replication, the lease was lost."""

    class Client(AsyncLeasing):
        async def describe_topic(self, topic: str) -> NoReturn:
            raise NotFound("it does not matter", reason="TOPIC_NOT_FOUND")

        async def _publish(self, request: object, **_: object) -> sow_pb2.PublishResponse:
            return sow_pb2.PublishResponse(results=[sow_pb2.PublishResult(key="k", version=10)])

        def _goes(self, request: object) -> bool:
            return goes

    async def publish() -> LeaseCore:
        core = LeaseCore(TTL)
        lease = AsyncLease(Client(), core)
        await lease.publish("t", PAYLOAD, key="k")
        await lease._ticker.stop()
        return core

    core = asyncio.run(publish())
    assert core.recognize("t", found(20), lease_now()) is (Seen.OWN if goes else Seen.OTHER)
    assert core.recognize("t", found(20, OTHER), lease_now()) is Seen.OTHER
