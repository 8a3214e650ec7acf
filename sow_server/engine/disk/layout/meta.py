"""Column family `meta`: every key of it, and the rows that no feature owns.

"format"    u32
"instance"  JSON: id, epoch, origins
"bounds"    version i64 | sequence i64: up to where they are reserved
"clock"     i64
"accepted"  i64: the last sequence when an operator last accepted the clock; no time up to it counts for the clock
"sweep"     expiry key: the floor of the expiry index
"placement" JSON: version, digest and number of cells of the placement that was in force last

"next_topic"   u32
"topic/"       u32   JSON
"stats/"       u32   twelve i64
"rearm/"       u32   where putting the expiry entries of a topic goes on
"index/"       u32 u16   where building an index goes on; without this row the index is complete
"deliver/"     u32   where moving the dead letters that have waited for a topic goes on
"view/"        u32   where building a view goes on in its source; without this row the view is complete
"policy/"      name  JSON, a policy that a client has set
"opolicy/"     name  JSON, a policy of the operator

"publisher/"   id    see commit/publishers.py
"told/"        u16 id u32   what peers have passed on of a publisher of that length, and of a topic: commit/told.py
"durable/"     u32 name   JSON, see durables/
"next_load"    u32
"load/"        u32   JSON, see loads/
"peer/"        name  JSON, see replicas/, as are the next five
"link/"        name  JSON
"next_source"  u32
"source/"      name  JSON
"seed/"        name "/" u32   how far a topic has been seeded
"taken/"       name  u32 | u32   the numbers of sources and of origins that a source has taken
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

from sow_server.engine.stored.words import i64, u16, u32, unpack_i64, unpack_u32
from sow_server.engine.values.model import BacklogAction, Expiration, MessageType, OnMissing, TopicSettings

FORMAT_KEY: Final = b"format"
INSTANCE_KEY: Final = b"instance"
BOUNDS_KEY: Final = b"bounds"
CLOCK_KEY: Final = b"clock"
ACCEPTED_KEY: Final = b"accepted"
SWEEP_FLOOR_KEY: Final = b"sweep"
PLACEMENT_KEY: Final = b"placement"

NEXT_TOPIC_KEY: Final = b"next_topic"
TOPIC_KEY: Final = b"topic/"
STATISTICS_KEY: Final = b"stats/"
REARM_KEY: Final = b"rearm/"
INDEX_KEY: Final = b"index/"
DELIVER_KEY: Final = b"deliver/"
VIEW_KEY: Final = b"view/"
POLICY_KEY: Final = b"policy/"
OPERATOR_POLICY_KEY: Final = b"opolicy/"

PUBLISHER_KEY: Final = b"publisher/"
PASSED_ON_KEY: Final = b"told/"
"""Behind the keys of publishers: peers are sent these first."""
DURABLE_KEY: Final = b"durable/"
NEXT_LOAD_KEY: Final = b"next_load"
LOAD_KEY: Final = b"load/"
PEER_KEY: Final = b"peer/"
LINK_KEY: Final = b"link/"
NEXT_SOURCE_KEY: Final = b"next_source"
SOURCE_KEY: Final = b"source/"
SEED_KEY: Final = b"seed/"
TAKEN_KEY: Final = b"taken/"

_PASSED_ON_PUBLISHER: Final = slice(len(PASSED_ON_KEY) + 2, -4)
_PASSED_ON_TOPIC: Final = slice(-4, None)
_DURABLE_TOPIC: Final = slice(len(DURABLE_KEY), len(DURABLE_KEY) + 4)
_DURABLE_NAME: Final = slice(len(DURABLE_KEY) + 4, None)
SEED_STATE: Final = slice(0, 1)
"""The state in the row of a seed."""
SEED_UPTO: Final = slice(1, None)
"""The last record key that came, in the row of a seed."""
_REACHED: Final = Struct(">qq")


def publisher_key(publisher_id: str) -> bytes:
    """The key of a publisher."""
    return PUBLISHER_KEY + publisher_id.encode()


def passed_on_prefix(publisher_id: str) -> bytes:
    """The beginning of the keys of all that peers have passed on of a publisher; the topic's id follows. No key of
    another publisher begins so: an id that a peer tells may have any characters."""
    name = publisher_id.encode()
    return PASSED_ON_KEY + u16(len(name)) + name


def passed_on_publisher(key: bytes) -> str:
    """The id of the publisher, by the key of a row."""
    return key[_PASSED_ON_PUBLISHER].decode()


def passed_on_topic(key: bytes) -> int:
    """The topic's id, by the key of its row."""
    return unpack_u32(key[_PASSED_ON_TOPIC])


def policy_key(name: str, *, operator: bool) -> bytes:
    """The key of a policy."""
    return (OPERATOR_POLICY_KEY if operator else POLICY_KEY) + name.encode()


def durable_key(topic_id: int, name: str) -> bytes:
    """The key of a durable."""
    return DURABLE_KEY + u32(topic_id) + name.encode()


def read_durable_key(key: bytes) -> tuple[int, str]:
    """The topic's id and the name of a durable, by the key of its row."""
    topic_id, name = key[_DURABLE_TOPIC], key[_DURABLE_NAME]
    return unpack_u32(topic_id), name.decode()


def peer_key(name: str) -> bytes:
    """The key of a peer that this instance sends to."""
    return PEER_KEY + name.encode()


def link_key(name: str) -> bytes:
    """The row of a peer that was added by command, or is paused."""
    return LINK_KEY + name.encode()


def source_key(name: str) -> bytes:
    """The key of a peer that sends to this instance."""
    return SOURCE_KEY + name.encode()


def taken_key(source: str) -> bytes:
    """The key of what a source has taken of the numbers that all sources share."""
    return TAKEN_KEY + source.encode()


def seeds_prefix(source: str) -> bytes:
    """The beginning of the keys of all seeds from a source."""
    return SEED_KEY + source.encode() + b"/"


def seed_key(source: str, topic_id: int) -> bytes:
    """The key of the seed of a topic from a source."""
    return seeds_prefix(source) + u32(topic_id)


class Reached(NamedTuple):
    """The last commit: its last sequence, and its time."""

    sequence: int
    commit_time_micros: int


def encode_reached(reached: Reached) -> bytes:
    """The note of the last commit, for processes that follow the database (rocks [15])."""
    return _REACHED.pack(*reached)


def decode_reached(note: bytes) -> Reached:
    """The last commit, by its note."""
    return Reached(*_REACHED.unpack(note))


class Reserved(NamedTuple):
    """Versions and sequences up to these are reserved."""

    version: int = 0
    sequence: int = 0


class Taken(NamedTuple):
    """The numbers that a source has taken of those that all sources share."""

    begun: int = 0
    """The number of times that a source has begun."""
    named: int = 0
    """The number of instances whose records a source has brought."""


def encode_taken(taken: Taken) -> bytes:
    """Two words."""
    return u32(taken.begun) + u32(taken.named)


def decode_taken(row: bytes | None) -> Taken:
    """Reads the numbers that a source has taken from its row. A damaged row counts as none."""
    return Taken() if row is None or len(row) != 8 else Taken(unpack_u32(row[:4]), unpack_u32(row[4:]))


def encode_bounds(reserved: Reserved) -> bytes:
    """The row of the bounds."""
    return i64(reserved.version) + i64(reserved.sequence)


def decode_bounds(row: bytes | None) -> Reserved:
    """The bounds of a row; a new store has no row."""
    return Reserved() if row is None else Reserved(unpack_i64(row[:8]), unpack_i64(row[8:]))


def settings_to_json(settings: TopicSettings) -> dict[str, object]:
    """Settings as a JSON object; the names are those of `TopicSettings`."""
    fields = settings._asdict()
    fields["separator"] = settings.separator.decode("latin-1")
    return fields


def settings_from_json(fields: dict[str, object]) -> TopicSettings:
    """The settings of a stored JSON object."""
    known: dict[str, object] = {name: value for name, value in fields.items() if name in TopicSettings._fields}
    known["key"] = tuple(known["key"])  # type: ignore[arg-type]  # JSON as settings_to_json wrote it
    known["index"] = tuple(known.get("index", ()))  # type: ignore[arg-type]  # as above
    known["message_type"] = MessageType(str(known["message_type"]))
    known["expiration"] = Expiration(str(known["expiration"]))
    known["backlog_action"] = BacklogAction(str(known.get("backlog_action", BacklogAction.HOLD.value)))
    known["on_missing"] = OnMissing(str(known.get("on_missing", OnMissing.RETAIN.value)))
    known["separator"] = str(known["separator"]).encode("latin-1")
    return TopicSettings(**known)  # type: ignore[arg-type]  # as above
