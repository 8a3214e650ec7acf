"""Comparison of two instances: comparing [1] to [4], on stores that number origins differently."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple
from zlib import crc32

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sow_peering import Checksums, RecordVersion
from sow_server.engine.disk.rocks import RECORDS, Batch
from sow_server.engine.replicas import comparing
from sow_server.engine.replicas.comparing import checksums, versions
from sow_server.engine.stored import header
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.model import NEVER, Expiration
from tests.support.stores.stores import HOUR, SECOND, START, Rig

TOPIC = "orders"
NAMES = ("a", "b", "ab")


def bucket_of(key: bytes, buckets: int) -> int:
    """The bucket of a record key, as comparing defines it."""
    return crc32(key) % buckets


class Row(NamedTuple):
    """A record, as it is the same on every instance."""

    key: bytes
    version: int = 1
    origin: str = "a"
    expire_time: int = NEVER
    payload: bytes = b"x"


class Instance:
    """One of the two: a store with its own numbers for origins, the topic and sequences."""

    def __init__(self, rig: Rig, origins: Sequence[str]) -> None:
        self.rig = rig
        self.origins = tuple(origins)
        rig.store.origins.names = self.origins
        self.topic = rig.create_topic(TOPIC, expiration=Expiration.ENABLED)
        self._sequence = 0

    def holds(self, rows: Sequence[Row]) -> None:
        """Makes these the records of the topic, written one after the other."""
        rocks = self.rig.store._rocks
        cleared = Batch()
        cleared.ranges.append((RECORDS, self.topic.prefix, self.topic.stop))
        rocks.write(cleared)
        for row in rows:
            self._sequence += 1
            batch = Batch()
            batch.puts[RECORDS][self.topic.prefix + row.key] = (
                header(
                    origin=self.origins.index(row.origin),
                    payload_bytes=len(row.payload),
                    version=row.version,
                    publish_time=START + self._sequence,
                    expire_time=row.expire_time,
                    sequence=self._sequence,
                )
                + row.payload
            )
            rocks.write(batch)

    def checksums(self, buckets: int = 8, *, at: int = START) -> Checksums:
        """As the engine gives them."""
        return checksums(self.rig.store.cuts, self.rig.store.origins, TOPIC, buckets, at)

    def versions(self, buckets: int, wanted: Sequence[int], *, at: int = START) -> list[RecordVersion]:
        """As the engine gives them."""
        return versions(self.rig.store.cuts, self.rig.store.origins, TOPIC, buckets, wanted, at)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Instance, Instance]]:
    one, other = Rig(tmp_path_factory.mktemp("one")), Rig(tmp_path_factory.mktemp("other"))
    other.create_topic("first")
    yield Instance(one, NAMES), Instance(other, NAMES[::-1])
    one.close()
    other.close()


KEYS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=4).map(str.encode)


ROWS = st.lists(
    st.builds(
        Row,
        key=KEYS,
        version=st.integers(1, 2**62),
        origin=st.sampled_from(NAMES),
        expire_time=st.sampled_from([NEVER, START + 1, START + HOUR]),
        payload=st.binary(max_size=6),
    ),
    unique_by=lambda row: row.key,
    max_size=12,
)


@given(rows=ROWS, data=st.data())
def test_equal_records_have_equal_checksums_in_whatever_order_they_were_written(
    two: tuple[Instance, Instance], rows: list[Row], data: st.DataObject
) -> None:
    one, other = two

    one.holds(rows)
    other.holds(data.draw(st.permutations(rows)))

    assert one.checksums() == other.checksums()
    assert one.versions(8, range(8)) == other.versions(8, range(8))


@given(rows=ROWS, data=st.data())
def test_a_single_difference_shows_in_exactly_the_bucket_of_its_key(
    two: tuple[Instance, Instance], rows: list[Row], data: st.DataObject
) -> None:
    one, other = two
    assume(rows)
    index = data.draw(st.integers(0, len(rows) - 1))
    row = rows[index]
    changes = {
        "payload": row._replace(payload=row.payload + b"\0"),
        "version": row._replace(version=row.version + 1),
        "origin": row._replace(origin=NAMES[NAMES.index(row.origin) - 1]),
        "stamp": row._replace(expire_time=row.expire_time - 1 if row.expire_time == NEVER else row.expire_time + 1),
        "missing": None,
    }
    changed = changes[data.draw(st.sampled_from(sorted(changes)))]

    one.holds(rows)
    other.holds([*rows[:index], *([] if changed is None else [changed]), *rows[index + 1 :]])

    sums, others = one.checksums().sums, other.checksums().sums
    assert [bucket for bucket in range(8) if sums[bucket] != others[bucket]] == [bucket_of(row.key, 8)]
    there = {version.key: version for version in other.versions(8, range(8))}
    differing = {version.key for version in one.versions(8, range(8)) if there.get(version.key) != version}
    assert differing == {row.key}


@given(rows=ROWS, data=st.data())
def test_another_key_shows_in_its_bucket_and_in_that_of_the_old_one(
    two: tuple[Instance, Instance], rows: list[Row], data: st.DataObject
) -> None:
    one, other = two
    assume(rows)
    key = data.draw(KEYS)
    assume(key not in [row.key for row in rows])

    one.holds(rows)
    other.holds([rows[0]._replace(key=key), *rows[1:]])

    sums, others = one.checksums().sums, other.checksums().sums
    differing = {bucket for bucket in range(8) if sums[bucket] != others[bucket]}
    assert differing == {bucket_of(key, 8), bucket_of(rows[0].key, 8)}


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (Row(b"k", origin="a", payload=b"bx"), Row(b"k", origin="ab", payload=b"x")),
        (Row(b"k", origin="a", payload=b"x"), Row(b"kx", origin="a", payload=b"")),
    ],
)
def test_documents_cut_at_another_place_do_not_compare_as_equal(
    two: tuple[Instance, Instance], here: Row, there: Row
) -> None:
    """The parts are framed: without, the same bytes in a row could be two different records."""
    one, other = two

    one.holds([here])
    other.holds([there])

    assert one.checksums(1).sums != other.checksums(1).sums


def test_a_checksum_is_the_one_that_the_protocol_says(two: tuple[Instance, Instance]) -> None:
    """Instances of two releases compare each other: neither the bucket nor the hashed layout can change."""
    one, _ = two

    one.holds([Row(b"key", version=7, origin="ab", expire_time=START + HOUR, payload=b"payload")])

    (found,) = one.versions(1000, [bucket_of(b"key", 1000)])
    assert (found.key, found.version, hex(found.checksum)) == (b"key", 7, "0x6ca647beebfd54a")
    assert bucket_of(b"key", 1000) == 937


def test_sums_wrap_at_64_bits(two: tuple[Instance, Instance]) -> None:
    one, _ = two
    one.holds([Row(b"%d" % number) for number in range(100)])

    (total,), (records,), _ = one.checksums(1)

    assert records == 100
    assert total == sum(version.checksum for version in one.versions(1, [0])) % 2**64


def test_due_records_are_left_out(two: tuple[Instance, Instance]) -> None:
    """comparing [3]: one instance may have dropped it already."""
    one, other = two

    one.holds([Row(b"stays"), Row(b"due", expire_time=START + 5), Row(b"later", expire_time=START + 6)])
    other.holds([Row(b"stays"), Row(b"later", expire_time=START + 6)])

    assert one.checksums(at=START + 5) == other.checksums(at=START + 5)
    assert one.checksums(at=START + 4) != other.checksums(at=START + 4)
    assert [version.key for version in one.versions(8, range(8), at=START + 5)] == [b"later", b"stays"]


def test_due_records_are_left_out_where_expiration_is_disabled(tmp_path_factory: pytest.TempPathFactory) -> None:
    rig = Rig(tmp_path_factory.mktemp("rig"))
    rig.create_topic("kept", expiration=Expiration.DISABLED)
    rig.put("kept", "1", ttl=SECOND)
    rig.put("kept", "2", ttl=HOUR)
    rig.time.tick(2 * SECOND)

    found = versions(rig.store.cuts, rig.store.origins, "kept", 1, [0], START + 2 * SECOND)

    assert [version.key for version in found] == [b"2"]
    rig.close()


def test_an_instance_whose_clock_is_beyond_refuses_where_it_expires_records(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """comparing [4]: it has dropped records that the other one counts, and no true differences would be found."""
    rig = Rig(tmp_path_factory.mktemp("rig"))
    rig.create_topic("acts", expiration=Expiration.ENABLED)
    rig.create_topic("keeps", expiration=Expiration.DISABLED)
    now = rig.clock.now_micros()

    for refused in (
        lambda: checksums(rig.store.cuts, rig.store.origins, "acts", 8, now - 1),
        lambda: versions(rig.store.cuts, rig.store.origins, "acts", 8, [0], now - 1),
    ):
        with pytest.raises(StoreError) as error:
            refused()
        assert error.value.reason is Reason.CLOCK_SKEW
    checksums(rig.store.cuts, rig.store.origins, "acts", 8, now)
    checksums(rig.store.cuts, rig.store.origins, "keeps", 8, now - 1)
    rig.close()


def test_a_topic_of_several_chunks_is_read_whole(
    two: tuple[Instance, Instance], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two
    rows = [Row(b"%03d" % number) for number in range(20)]
    one.holds(rows)
    other.holds(rows)
    whole = other.checksums()

    monkeypatch.setattr(comparing, "CHUNK", 3)

    assert one.checksums() == whole
    assert [version.key for version in one.versions(8, range(8))] == [row.key for row in rows]


def test_only_the_wanted_buckets_are_listed(two: tuple[Instance, Instance]) -> None:
    one, _ = two
    rows = [Row(b"%03d" % number) for number in range(50)]
    one.holds(rows)

    found = one.versions(8, [1, 5])

    assert [version.key for version in found] == [row.key for row in rows if bucket_of(row.key, 8) in (1, 5)]
    assert one.versions(8, []) == []


def test_a_commit_in_the_middle_is_not_seen(two: tuple[Instance, Instance], monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it is of one instant: a record written between two chunks belongs to the next look."""
    one, _ = two
    rows = [Row(b"%03d" % number) for number in range(20)]
    one.holds(rows)
    before = one.checksums()

    monkeypatch.setattr(comparing, "CHUNK", 3)
    chunks = comparing._chunks(one.rig.store.cuts, one.rig.store.origins, TOPIC, START, comparing.Skips())
    first = next(chunks)
    one.holds([Row(b"999", version=2)])
    keys = first[1] + [key for _, more, _ in chunks for key in more]

    assert keys == [row.key for row in rows]
    assert one.checksums() != before


def test_comparing_is_no_use_of_a_topic(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Rule T1: or a topic that nobody uses would stay because it is verified every day."""
    rig = Rig(tmp_path_factory.mktemp("rig"))
    used = rig.create_topic(TOPIC).last_use_micros
    rig.time.tick(SECOND)

    checksums(rig.store.cuts, rig.store.origins, TOPIC, 8, START + HOUR)

    assert rig.topic(TOPIC).last_use_micros == used
    rig.close()


@pytest.mark.parametrize("buckets", [0, -1, comparing.BUCKETS_MAX + 1])
def test_a_number_of_buckets_out_of_bounds_is_refused(two: tuple[Instance, Instance], buckets: int) -> None:
    one, _ = two
    for refused in (lambda: one.checksums(buckets, at=NEVER), lambda: one.versions(buckets, [], at=NEVER)):
        with pytest.raises(StoreError) as error:
            refused()
        assert (error.value.reason, error.value.field) == (Reason.INVALID_ARGUMENT, "buckets")


@pytest.mark.parametrize("bucket", [-1, 8])
def test_a_bucket_that_there_is_not_is_refused(two: tuple[Instance, Instance], bucket: int) -> None:
    one, _ = two
    with pytest.raises(StoreError) as error:
        one.versions(8, [0, bucket], at=NEVER)
    assert (error.value.reason, error.value.field) == (Reason.INVALID_ARGUMENT, "bucket")


def test_a_list_has_a_bound(two: tuple[Instance, Instance]) -> None:
    one, _ = two
    one.holds([Row(b"%03d" % number) for number in range(20)])

    assert len(versions(one.rig.store.cuts, one.rig.store.origins, TOPIC, 1, [0], START, versions_max=20)) == 20
    with pytest.raises(StoreError) as error:
        versions(one.rig.store.cuts, one.rig.store.origins, TOPIC, 1, [0], START, versions_max=19)
    assert error.value.reason is Reason.RESULT_TOO_LARGE


def test_a_topic_that_is_not_there_is_refused(two: tuple[Instance, Instance]) -> None:
    one, _ = two
    with pytest.raises(StoreError) as error:
        checksums(one.rig.store.cuts, one.rig.store.origins, "nothing", 8, NEVER)
    assert error.value.reason is Reason.TOPIC_NOT_FOUND
