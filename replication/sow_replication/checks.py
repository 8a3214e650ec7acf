"""The checks of what other instances send: every field of every message, before anything of it is used or stored.

    check(request)                    # Refused INVALID_ARGUMENT: "changes.origins: 70000 entries, more than 65536"

A peer is another trust domain: its credential says which topics it may send, and nothing says that it runs this
program.

    [1]  Every field of every message of `replication.proto` has a rule here. A field without one fails the import, so a
         new field cannot be forgotten.
    [2]  A rule refuses only what no sound instance of any release sends: a user of one instance must not be able to
         break its links by a key, a name or a lifetime that is accepted there. The one exception is the number of
         topics of a link: beyond it the refusal says so, and a narrower pattern mends it (rule R15).
    [3]  A refusal names the field. It ends the link or the call, and nothing of the message is used.
    [4]  A check costs less than the use of the message: counts are looked at before elements, chunks not at all.

Other places judge three things. Rows in chunks: `engine/commit/soundness`, row by row (rule R13). Versions ahead of the
clock: the store, which has the clock (rule K7). What a mark of a publisher counts for: `engine/commit/publishers`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias, TypeVar

from google.protobuf import duration_pb2
from google.protobuf.message import Message

from sow.v1 import replication_pb2, types_pb2
from sow_peering.bounds import (
    FILTER_BYTES_MAX,
    ID_CHARACTERS_MAX,
    NUMBER_MAX,
    PATTERN_BYTES_MAX,
    number_fault,
    text_fault,
)
from sow_replication.ports import LinkTexts, Refused

M = TypeVar("M", bound=Message)

KEY_BYTES_MAX: Final = 2**16 - 1
"""The bound of a record key: the journal has two bytes for its length."""
KEY_PATHS_MAX: Final = 1_000
PATH_BYTES_MAX: Final = 64 << 10
TOPICS_MAX: Final = 10_000
"""Topics of a link. They are answered at one go on the event loop, in some 8 µs each: a
hundred thousand of them would hold it for a second or more."""
CHUNKS_MAX: Final = 2**16
"""The bound of the chunks of one message. A chunk has the changes of one topic of one request, so there may be
thousands."""
ORIGINS_MAX: Final = 2**16
"""The number of origins that two bytes can count."""
MARKS_MAX: Final = 2**16
"""Marks of publishers of one message; they are bounded by their bytes where they are read."""
MARK_TOPICS_MAX: Final = 1_000
"""Topics of one mark; an instance remembers a few dozen of a publisher."""
REFUSED_MAX: Final = 100_000
"""Records of one request that were refused."""
DURABLES_MAX: Final = 10_000
VERSIONS_MAX: Final = 100_000
"""Versions in one answer; more than `verify.MESSAGE_VERSIONS`."""
BUCKETS_MAX: Final = 2**16
TRACES_MAX: Final = 1_000
"""A receiver takes the first ones of a later release that sends more of them."""
OWNED_NAME_BYTES_MAX: Final = 1_000
"""The bound of the name of a durable or the id of a publisher, with its owner."""
MESSAGE_BYTES_MAX: Final = 1 << 20
"""The bound of a message for people, and of a filter in canonical form, which is longer than the given text."""
STAMP_MAX: Final = 2**62
"""The bound of the number of a stamp: the next one is greater, and has to fit into 64 bits."""
INT64_MAX: Final = 2**63 - 1
SECONDS_MAX: Final = 10**10
"""The bound of a duration; the store has the bounds of each setting."""
SHOWN_CHARACTERS: Final = 300
"""The bound of the text of a fault, which may repeat a part of the message."""


class Rule(Protocol):
    """Judges the value of one field."""

    def fault(self, value: object) -> str:
        """The fault, beginning with the place in the field, if any. Empty: there is none."""


@dataclass(frozen=True, slots=True)
class Anything:
    """A value that is checked where it is used, or that needs no check: a flag, a checksum, a chunk."""

    def fault(self, value: object) -> str:
        """None."""
        return ""


@dataclass(frozen=True, slots=True)
class Number:
    """An integer within bounds."""

    low: int = 0
    high: int = NUMBER_MAX

    def fault(self, value: object) -> str:
        """Outside of the bounds."""
        assert isinstance(value, int), "by the contract"
        return number_fault(value, self.low, self.high)


@dataclass(frozen=True, slots=True)
class Name:
    """A name or an id: no control characters."""

    bytes_max: int = ID_CHARACTERS_MAX
    empty: bool = False
    form: str = ""
    """A pattern for the whole of it; empty: any form."""

    def fault(self, value: object) -> str:
        """Empty, too long, or of another form."""
        assert isinstance(value, str), "by the contract"
        fault = text_fault(value, self.bytes_max, empty=self.empty)
        if not fault and self.form and not re.fullmatch(self.form, value):
            return f"is not of the form {self.form}"
        return fault


@dataclass(frozen=True, slots=True)
class Size:
    """Text or bytes with any content: keys, paths, filters, messages for people."""

    bytes_max: int

    def fault(self, value: object) -> str:
        """The fault of a value that is too long."""
        assert isinstance(value, str | bytes), "by the contract"
        long = len(value) > self.bytes_max or (isinstance(value, str) and len(value.encode()) > self.bytes_max)
        return f"is longer than {self.bytes_max} bytes" if long else ""


@dataclass(frozen=True, slots=True)
class Part:
    """A message: its own fields are judged. `optional`: it may be absent."""

    optional: bool = False

    def fault(self, value: object) -> str:
        """The fault of one of its fields."""
        assert isinstance(value, Message), "by the contract"
        return _fault(value)


@dataclass(frozen=True, slots=True)
class Several:
    """A repeated field: the count, then each element."""

    each: Rule
    count_max: int

    def fault(self, value: object) -> str:
        """The fault of too many elements, or of one of them."""
        assert isinstance(value, Sequence), "by the contract"
        if len(value) > self.count_max:
            return f"{len(value)} entries, more than {self.count_max}"
        if isinstance(self.each, Anything):
            return ""
        if isinstance(self.each, Number):  # in one go: there may be very many
            ends = (min(value), max(value)) if value else ()
            return next(filter(None, map(self.each.fault, ends)), "")
        if isinstance(self.each, Size) and 4 * max(map(len, value), default=0) <= self.each.bytes_max:
            return ""  # as above; a character has at most four bytes
        for index, element in enumerate(value):
            if fault := self.each.fault(element):
                return _at(f"[{index}]", fault)
        return ""


@dataclass(frozen=True, slots=True)
class Chunks:
    """Chunks of changes: the count, then each topic once, as one of them may have thousands."""

    def fault(self, value: object) -> str:
        """The fault of too many topics, or of the name of one."""
        assert isinstance(value, Sequence), "by the contract"
        if len(value) > CHUNKS_MAX:
            return f"{len(value)} entries, more than {CHUNKS_MAX}"
        faults = map(_TOPIC.fault, {chunk.topic for chunk in value})
        return next((_at(".topic", fault) for fault in faults if fault), "")


def _at(place: str, fault: str) -> str:
    """A fault of a part, behind its place: `topics` and `[3].name: is empty` make `topics[3].name: is empty`."""
    return f"{place}{fault}" if fault.startswith(("[", ".")) else f"{place}: {fault}"


_ANY: Final = Anything()
_SEQUENCE: Final = Number()
_TIME: Final = Number()
_TOPIC: Final = Name(200, form="[A-Za-z0-9_.:-]+")
_PART: Final = Part()
_KEY: Final = Size(KEY_BYTES_MAX)
_ORIGINS: Final = Several(Size(1_000), ORIGINS_MAX)
"""A row whose origin is not the name of an instance is refused by itself (rule R13)."""
_INSTANCE: Final = {
    "name": Name(empty=True),  # an unknown one is not accepted, and that has its own refusal
    "id": Name(),
    "epoch": Name(),
    "cluster": Name(empty=True),
}

Rules: TypeAlias = Mapping[str, Rule]
RULES: Final[Mapping[type[Message], Rules]] = {
    replication_pb2.Instance: _INSTANCE,
    replication_pb2.ReplicatedTopic: {
        "name": _TOPIC,
        "key": Several(Size(PATH_BYTES_MAX), KEY_PATHS_MAX),
        "message_type": Name(),
        "separator": Size(16),
        "acts_on_expiration": _ANY,
    },
    replication_pb2.Sealed: {"message": _ANY, "crc32": _ANY, "number": _ANY},  # `wire.opened` checks these
    replication_pb2.ReplicateRequest: dict.fromkeys(
        ("hello", "topics", "changes", "seed", "heartbeat", "durables"), _PART
    ),
    replication_pb2.Hello: {
        "protocol": _ANY,  # another one has its own refusal
        "instance": _PART,
        "topics_pattern": Size(PATTERN_BYTES_MAX),  # and `check_texts`
        "filter": Size(FILTER_BYTES_MAX),  # as above
        "topics": Several(_PART, TOPICS_MAX),
        "head_sequence": _SEQUENCE,
        "now_micros": _TIME,
        "waiting": _ANY,
        "authoritative": _ANY,
    },
    replication_pb2.Topics: {"topics": Several(_PART, TOPICS_MAX)},
    replication_pb2.Changes: {
        "after": _SEQUENCE,
        "upto": _SEQUENCE,
        "chunks": Chunks(),
        "origins": _ORIGINS,
        "crc32": _ANY,
        "head_sequence": _SEQUENCE,
        "now_micros": _TIME,
        "probe": Number(),
        "commit_time_micros": _TIME,
        "publishers": Several(_PART, MARKS_MAX),
        "traces": Several(Size(1_000), TRACES_MAX),
    },
    replication_pb2.PublisherMark: {
        "publisher_id": Name(OWNED_NAME_BYTES_MAX),
        "epoch": Number(0, INT64_MAX),  # any that a publisher may choose ([2])
        "token": Number(0, INT64_MAX),
        "first": Number(1, INT64_MAX),
        "last": Number(1, INT64_MAX),
        "topics": Several(_TOPIC, MARK_TOPICS_MAX),
        "refused": Several(Number(0, INT64_MAX), REFUSED_MAX),
        "used_micros": _TIME,
        "whole": _ANY,
    },
    replication_pb2.Packed: {"topic": _TOPIC, "chunk": _ANY},
    replication_pb2.Seed: {
        "topic": _TOPIC,
        "first": _ANY,
        "last": _ANY,
        "after_key": _KEY,
        "upto_key": _KEY,
        "chunk": _ANY,
        "origins": _ORIGINS,
        "crc32": _ANY,
        "purged_version": Number(0, INT64_MAX),  # the store compares it with its clock
        "purged_origin": Name(empty=True, form="(?:[A-Za-z0-9.:-][A-Za-z0-9_.:-]*)?"),
    },
    replication_pb2.Heartbeat: {
        "head_sequence": _SEQUENCE,
        "upto": _SEQUENCE,
        "now_micros": _TIME,
        "probe": Number(),
    },
    replication_pb2.Durables: {"durables": Several(_PART, DURABLES_MAX)},
    replication_pb2.ReplicatedDurable: {
        "topic": _TOPIC,
        "name": Name(OWNED_NAME_BYTES_MAX),
        "filter": Size(MESSAGE_BYTES_MAX),  # the store compiles that of a new one
        "declared": _PART,
        "born": _PART,
        "buried": _PART,
        "removed": _ANY,
        "rewinds": Several(_PART, 1_000),
        "sequence": _SEQUENCE,
        "swept_micros": Number(-1),  # just below the stamp that is due next, which may be 0
        "idle_micros": _TIME,
        "consumer_since": _TIME,
        "forced": _ANY,
    },
    replication_pb2.Stamp: {"number": Number(0, STAMP_MAX), "instance": Name(empty=True)},
    types_pb2.DurableSettings: {
        "retain_time": _PART,
        "retain_time_unlimited": _ANY,
        "retain_bytes": Number(-1, INT64_MAX),
        "backlog_ttl": _PART,
        "idle_ttl": _PART,
        "delivery_limit": Number(-1, INT64_MAX),
        "replicated": _ANY,
    },
    duration_pb2.Duration: {"seconds": Number(0, SECONDS_MAX), "nanos": Number(0, 10**9 - 1)},
    replication_pb2.ReplicateResponse: dict.fromkeys(("welcome", "acknowledged", "topic"), _PART),
    replication_pb2.Welcome: {
        "instance": _PART,
        "cursor": _SEQUENCE,
        "topics": Several(_PART, TOPICS_MAX),
        "returning": _ANY,
        "now_micros": _TIME,
    },
    replication_pb2.TopicAnswer: {
        "topic": _TOPIC,
        "state": Number(1, max(replication_pb2.TopicState.values())),
        "after_key": _KEY,
        "reason": Number(0, 2**31 - 1),  # a later release may have others
        "message": Size(MESSAGE_BYTES_MAX),
    },
    replication_pb2.Acknowledged: {
        "sequence": _SEQUENCE,
        "probe": Number(),
        "now_micros": _TIME,
        "seeds": Number(),
    },
    replication_pb2.ChecksumRequest: {
        "instance": _PART,
        "topic": _PART,
        "buckets": _ANY,  # `verify` has the bounds, as it has those of a request by an operator
        "now_micros": _TIME,
    },
    replication_pb2.ChecksumResponse: {
        "checksum": Several(_ANY, BUCKETS_MAX),
        "records": Several(_ANY, BUCKETS_MAX),
        "instance": Part(optional=True),
        "unreadable": Number(),
    },
    replication_pb2.ListVersionsRequest: {
        "topic": _TOPIC,
        "buckets": _ANY,  # as above
        "bucket": Several(_ANY, BUCKETS_MAX),
        "now_micros": _TIME,
        "instance": _PART,
    },
    replication_pb2.ListVersionsResponse: {
        "key": Several(_KEY, VERSIONS_MAX),
        "version": Several(_ANY, VERSIONS_MAX),  # a row that an earlier release accepted may have any
        "checksum": Several(_ANY, VERSIONS_MAX),
    },
    replication_pb2.FetchRowsRequest: {
        "topic": _TOPIC,
        "key": Several(_KEY, VERSIONS_MAX),  # `repair` has a lower bound, with its own refusal
        "instance": _PART,
    },
    replication_pb2.FetchRowsResponse: {"chunk": _ANY, "origins": _ORIGINS},
    replication_pb2.MergeRowsRequest: {
        "instance": _PART,
        "topic": _PART,
        "chunk": _ANY,
        "origins": _ORIGINS,
        "crc32": _ANY,
    },
    replication_pb2.MergeRowsResponse: dict.fromkeys(("applied", "passed_over", "refused"), Number()),
}


def _seed_fault(seed: Message) -> str:
    assert isinstance(seed, replication_pb2.Seed), "its own relation"
    if seed.purged_version and not seed.purged_origin:
        return ".purged_origin: is empty, and there is a purged_version"
    if seed.first != (not seed.after_key):
        return ".after_key: must be empty in the first part, and in no other"
    if seed.last != (not seed.upto_key):
        return ".upto_key: must be empty in the last part, and in no other"
    if not seed.last and seed.upto_key <= seed.after_key:
        return ".upto_key: is not behind after_key"
    return ""


def _mark_fault(mark: Message) -> str:
    assert isinstance(mark, replication_pb2.PublisherMark), "its own relation"
    return f".last: {mark.last} is below first, {mark.first}" if mark.last < mark.first else ""


_RELATIONS: Final[Mapping[type[Message], Callable[[Message], str]]] = {
    replication_pb2.Seed: _seed_fault,
    replication_pb2.PublisherMark: _mark_fault,
}
"""The rules about several fields of one message."""


def check(message: Message) -> None:
    """Raises Refused INVALID_ARGUMENT, with the field at fault."""
    if fault := _fault(message):
        raise _refused(fault.removeprefix("."))


def checked(message: M) -> M:
    """A message, once it is checked. Raises Refused INVALID_ARGUMENT."""
    check(message)
    return message


def check_texts(request: replication_pb2.ReplicateRequest, texts: LinkTexts) -> None:
    """As `check`, and whether the pattern and the filter of a greeting can be read. A long filter takes 0.2 s, so not
    on the event loop."""
    check(request)  # the sizes first
    hello = request.hello
    if fault := texts.pattern_fault(hello.topics_pattern):
        raise _refused(f"hello.topics_pattern: {fault}")
    if hello.filter and (fault := texts.filter_fault(hello.filter)):
        raise _refused(f"hello.filter: {fault}")


def _refused(fault: str) -> Refused:
    return Refused(types_pb2.ERROR_REASON_INVALID_ARGUMENT, fault[:SHOWN_CHARACTERS])


def _fault(message: Message) -> str:
    """The first fault, with a dot in front of the field."""
    for name, rule, may_be_absent in _FIELDS[type(message)]:
        if may_be_absent and not message.HasField(name):
            continue
        if fault := rule.fault(getattr(message, name)):
            return _at(f".{name}", fault)
    relation = _RELATIONS.get(type(message))
    return "" if relation is None else relation(message)


def _fields(kind: type[Message], rules: Rules) -> Iterator[tuple[str, Rule, bool]]:
    """The fields to look at, each with its rule, and whether it may be absent. `Anything` is not looked at: reading a
    chunk copies it."""
    for field in kind.DESCRIPTOR.fields:
        rule = rules[field.name]
        if isinstance(rule, Anything):
            continue
        one_of_several = field.containing_oneof is not None  # or declared as optional
        yield field.name, rule, one_of_several or (isinstance(rule, Part) and rule.optional)


def _check_rules() -> None:
    """[1]."""
    for name in replication_pb2.DESCRIPTOR.message_types_by_name:
        assert getattr(replication_pb2, name) in RULES, f"sow_replication.checks has no rules for {name}"
    for kind, rules in RULES.items():
        fields = {field.name for field in kind.DESCRIPTOR.fields}
        assert fields == rules.keys(), f"sow_replication.checks of {kind.__name__}: {fields ^ rules.keys()}"


_check_rules()
_FIELDS: Final = {kind: tuple(_fields(kind, rules)) for kind, rules in RULES.items()}
