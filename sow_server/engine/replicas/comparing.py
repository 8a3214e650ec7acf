"""The comparison of a topic between two instances: checksums over its live records, bucket by bucket, and versions
(rule R10).

    [1]  Equal live records give equal checksums, whatever the order they were written in, and whatever the numbers that
         an instance gives to topics, sequences and origins: a checksum is over key, version, the origin's name, stamp
         and payload.
    [2]  A change of any of these in one record changes the checksum of its bucket (except for one case in 2^64) and of
         no other. The bucket depends on the key alone.
    [3]  All of it is of one instant, and shows the state at `now_micros`: records that are due by then are left out,
         whether this instance acts on expiration or not, because the other one may have dropped them.
    [4]  Two instances that answer for the same `now_micros` leave out the same records. So an instance that acts on
         expiration refuses (CLOCK_SKEW) if its own clock is beyond: it has dropped records that the other one counts.

Another instance, perhaps of another release, computes the same: the bucket and the hashed layout are part of the
protocol.

          bucket    CRC-32 of the record key, modulo the number of buckets
          checksum  BLAKE2b, 8 bytes, big-endian, of: version i64 | expire time i64 | origin length u16 | key length u16
                    | origin's name | record key | payload
          sum       of the checksums, modulo 2^64
"""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Collection, Iterator, Sequence
from hashlib import blake2b
from itertools import compress
from struct import Struct
from typing import Final, TypeAlias
from zlib import crc32

from sow_peering import Checksums, RecordVersion
from sow_server.engine.catalog.topics import Topic
from sow_server.engine.commit.origins import Origins
from sow_server.engine.reading import Cuts, ManyCut
from sow_server.engine.stored import EXPIRE_TIME, ORIGIN, PAYLOAD, VERSION, header_columns, i64, u16
from sow_server.engine.values.errors import Reason, StoreError, no_topic

BUCKETS_MAX: Final = 65_536
VERSIONS_MAX: Final = 1_000_000
"""Versions that one answer lists: some 200 MB. For more, a caller requests fewer buckets at a time."""
CHUNK: Final = 500
"""Records between two moments at which other threads may run: some two milliseconds. The bytes of a chunk are bounded
as in every `fill`."""
_MODULUS_MASK: Final = 2**64 - 1
_LENGTHS: Final = Struct(">HH").pack
_Names: TypeAlias = dict[bytes, bytes]
"""Names, by the two bytes that stand for them in a header."""


def checksums(cuts: Cuts, origins: Origins, topic: str, buckets: int, now_micros: int) -> Checksums:
    """The checksums of the records of a topic that are not due by `now_micros`. Reads all of them, from any thread.

    Raises StoreError: TOPIC_NOT_FOUND; CLOCK_SKEW ([4]); INVALID_ARGUMENT for a number of buckets outside of 1 to
    `BUCKETS_MAX`.
    """
    _check_buckets(buckets)
    sums, records = [0] * buckets, [0] * buckets
    unreadable = Skips()
    for names, keys, values in _chunks(cuts, origins, topic, now_micros, unreadable):
        places = [crc32(key) % buckets for key in keys]
        for place, checksum in zip(places, _checksums(names, keys, values), strict=True):
            sums[place] += checksum
            records[place] += 1
    return Checksums([total & _MODULUS_MASK for total in sums], records, unreadable.count)


def versions(
    cuts: Cuts,
    origins: Origins,
    topic: str,
    buckets: int,
    wanted: Collection[int],
    now_micros: int,
    *,
    versions_max: int = VERSIONS_MAX,
) -> list[RecordVersion]:
    """The versions of the records in the `wanted` ones of so many buckets that are not due by `now_micros`, by key.
    Reads all of the topic, from any thread.

    Raises StoreError as `checksums` does; INVALID_ARGUMENT, too, for an unknown bucket, and RESULT_TOO_LARGE for more
    than `versions_max`.
    """
    _check_buckets(buckets)
    chosen = bytearray(buckets)
    for bucket in wanted:
        if not 0 <= bucket < buckets:
            raise StoreError(
                Reason.INVALID_ARGUMENT, f"bucket: {bucket} is not one of 0 to {buckets - 1}", field="bucket"
            )
        chosen[bucket] = True
    found: list[RecordVersion] = []
    for names, keys, values in _chunks(cuts, origins, topic, now_micros, Skips()):
        inside = [chosen[crc32(key) % buckets] for key in keys]
        if True not in inside:
            continue
        chosen_keys, chosen_values = list(compress(keys, inside)), list(compress(values, inside))
        if len(found) + len(chosen_keys) > versions_max:
            raise StoreError(
                Reason.RESULT_TOO_LARGE,
                f"bucket: the {len(wanted)} buckets of {topic!r} hold more than the limit of {versions_max} records",
                field="bucket",
            )
        version = header_columns(chosen_values).version
        found += map(RecordVersion, chosen_keys, version, _checksums(names, chosen_keys, chosen_values))
    return found


def _check_buckets(buckets: int) -> None:
    if not 1 <= buckets <= BUCKETS_MAX:
        raise StoreError(
            Reason.INVALID_ARGUMENT, f"buckets: {buckets} is not between 1 and {BUCKETS_MAX}", field="buckets"
        )


class Skips:
    """Counts the records of a topic that are not compared. It logs nothing, because the comparison reports their
    number."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, topic: Topic, keys: Sequence[bytes], now_micros: int) -> None:
        """Some of them."""
        self.count += len(keys)


def _chunks(
    cuts: Cuts, origins: Origins, topic: str, now_micros: int, skips: Skips
) -> Iterator[tuple[_Names, list[bytes], list[bytes]]]:
    """The records of a topic, cut at one instant, that are not due by `now_micros`, a chunk at a time."""
    cut = _cut(cuts, topic, skips)
    try:
        (one,) = cut.topics
        if one.acts and cut.now_micros > now_micros:
            raise StoreError(
                Reason.CLOCK_SKEW,
                f"now_micros: {now_micros} is {cut.now_micros - now_micros} microseconds behind this clock, and "
                f"{topic!r} acts on expiration",
                field="now_micros",
            )
        # Names are only added, and before the records that refer to them: all names of the cut exist.
        names = {u16(number): name.encode() for number, name in enumerate(origins.names)}
        due = i64(now_micros)
        following: bytes | None = one.topic.prefix
        while following is not None:
            keys: list[bytes] = []
            values: list[bytes] = []
            following, _ = one.fill(following, CHUNK, keys, values)
            lasting = [value[EXPIRE_TIME] > due for value in values]
            if False in lasting:
                keys, values = list(compress(keys, lasting)), list(compress(values, lasting))
            yield names, keys, values
            time.sleep(0)  # releases the GIL; otherwise each wake-up of the event loop would wait for its interval
    finally:
        cut.close()


def _cut(cuts: Cuts, topic: str, skips: Skips) -> ManyCut:
    """The one topic, looked up within the cut: a topic that is deleted at this moment must not look empty. It does not
    call `Cuts.records`, because comparing does not count as a use of a topic (rule T1)."""
    cut = cuts.many(lambda topics: [found for found in topics if found.name == topic], skipped=skips)
    if not cut.topics:
        cut.close()
        raise no_topic(topic)
    return cut


def _checksums(names: _Names, keys: Sequence[bytes], values: Sequence[bytes]) -> array[int]:
    digests: list[bytes] = []
    add = digests.append
    for key, value in zip(keys, values, strict=True):
        origin = names[value[ORIGIN]]
        framed = b"".join(
            (value[VERSION], value[EXPIRE_TIME], _LENGTHS(len(origin), len(key)), origin, key, value[PAYLOAD])
        )
        add(blake2b(framed, digest_size=8).digest())
    numbers = array("Q", b"".join(digests))
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers
