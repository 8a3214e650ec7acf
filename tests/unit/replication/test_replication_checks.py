"""The checks of what other instances send (sow_replication.checks)."""

from __future__ import annotations

from typing import Any, Final

import pytest
from google.protobuf.message import Message

from sow.v1 import replication_pb2, types_pb2
from sow_replication.checks import RULES, TOPICS_MAX, Anything, check, check_texts
from sow_replication.ports import Refused
from tests.support.oracles.odd_fields import Odd, odd_fields, with_odd

INSTANCE: Final = replication_pb2.Instance(name="a", id="1", epoch="e")
TOPIC: Final = replication_pb2.ReplicatedTopic(name="t", key=["/id"], message_type="json")
ROOTS: Final[dict[type[Message], Message]] = {
    replication_pb2.ReplicateRequest: replication_pb2.ReplicateRequest(),
    replication_pb2.ReplicateResponse: replication_pb2.ReplicateResponse(),
    replication_pb2.ChecksumRequest: replication_pb2.ChecksumRequest(instance=INSTANCE, topic=TOPIC),
    replication_pb2.ChecksumResponse: replication_pb2.ChecksumResponse(),
    replication_pb2.ListVersionsRequest: replication_pb2.ListVersionsRequest(instance=INSTANCE, topic="t"),
    replication_pb2.ListVersionsResponse: replication_pb2.ListVersionsResponse(),
    replication_pb2.FetchRowsRequest: replication_pb2.FetchRowsRequest(instance=INSTANCE, topic="t"),
    replication_pb2.FetchRowsResponse: replication_pb2.FetchRowsResponse(),
    replication_pb2.MergeRowsRequest: replication_pb2.MergeRowsRequest(instance=INSTANCE, topic=TOPIC),
    replication_pb2.MergeRowsResponse: replication_pb2.MergeRowsResponse(),
}
"""What a call or a stream carries, each as a sound message."""
FLAG: Final = 8
"""The type of a field that has two values."""


def fault_of(message: Message) -> str:
    try:
        check(message)
    except Refused as refused:
        return refused.message if refused.reason == types_pb2.ERROR_REASON_INVALID_ARGUMENT else repr(refused)
    return ""


def test_every_field_of_the_contract_has_a_rule() -> None:
    """checks [1]. The module refuses to be imported without one; so this is the same in other words."""
    for name, descriptor in replication_pb2.DESCRIPTOR.message_types_by_name.items():
        rules = RULES[getattr(replication_pb2, name)]
        assert rules.keys() == {field.name for field in descriptor.fields}, name


@pytest.mark.slow
@pytest.mark.parametrize("root", ROOTS, ids=lambda kind: kind.__name__)
def test_an_odd_value_is_refused_by_the_name_of_its_field_or_is_harmless(root: type[Message]) -> None:
    """checks [3]."""
    for odds in odd_fields(root):
        for odd in odds:
            fault = fault_of(with_odd(ROOTS[root], odd))
            assert len(fault) <= 300
            if fault:
                place = fault.partition(": ")[0]
                assert place.partition("[")[0].partition(".")[0] == odd.path[0], f"{odd.name}: {fault}"


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("hello.head_sequence", (-1, 2**53 + 1, 2**62, 2**63 - 1)),
        ("hello.now_micros", (-(2**63), -1, 2**63 - 1)),
        ("hello.instance.id", ("", "\0", "x" * 101)),
        ("hello.instance.epoch", ("", "\n", "x" * 100_000)),
        ("hello.instance.cluster", ("\0", "x" * 101)),
        ("hello.filter", ("x" * 100_000,)),
        ("hello.topics_pattern", ("x" * 100_000, "\U0010ffff" * 20_000)),
        ("changes.after", (-1, 2**62)),
        ("changes.upto", (-1, 2**62)),
        ("changes.probe", (-1, 2**62)),
        ("changes.chunks.topic", ("", "a/b", "x" * 201)),
        ("changes.publishers.first", (0, -1)),
        ("changes.publishers.epoch", (-1,)),
        ("changes.publishers.refused", (-1,)),
        ("seed.purged_version", (-1,)),
        ("seed.purged_origin", ("_a", "a b", "\0")),
        ("seed.after_key", (b"x" * 70_000,)),
        ("heartbeat.upto", (-1, 2**62)),
        ("durables.durables.name", ("", "\0", "x" * 2_000)),
        ("durables.durables.idle_micros", (-1, 2**62)),
        ("durables.durables.born.number", (-1, 2**63 - 1)),
        ("durables.durables.declared.retain_time.seconds", (-1, 2**62)),
        ("durables.durables.declared.retain_time.nanos", (-1, 2**31 - 1)),
        ("durables.durables.declared.retain_bytes", (-2,)),
    ],
)
def test_values_beyond_the_bounds_are_refused(path: str, values: tuple[object, ...]) -> None:
    kind = path.partition(".")[0]
    for value in values:
        fault = fault_of(with_odd(SOUND[kind], Odd(tuple(path.split(".")), value)))
        assert fault.replace("[0]", "").startswith(f"{path}: "), f"{path} = {value!r:.60}: {fault}"


SOUND: Final = {
    "hello": replication_pb2.ReplicateRequest(hello=replication_pb2.Hello(instance=INSTANCE)),
    "changes": replication_pb2.ReplicateRequest(
        changes=replication_pb2.Changes(publishers=[replication_pb2.PublisherMark(publisher_id="p", first=1, last=1)])
    ),
    "seed": replication_pb2.ReplicateRequest(seed=replication_pb2.Seed(topic="t", first=True, last=True)),
    "heartbeat": replication_pb2.ReplicateRequest(),
    "durables": replication_pb2.ReplicateRequest(
        durables=replication_pb2.Durables(durables=[replication_pb2.ReplicatedDurable(topic="t", name="d")])
    ),
}
"""Messages in which every part that is asked for is complete."""


@pytest.mark.parametrize("kind", SOUND)
def test_sound_messages_pass(kind: str) -> None:
    assert fault_of(SOUND[kind]) == ""


@pytest.mark.parametrize(
    ("seed", "field"),
    [
        ({"purged_version": 5}, "purged_origin"),
        ({"first": False}, "after_key"),
        ({"after_key": b"k"}, "after_key"),
        ({"last": False}, "upto_key"),
        ({"first": False, "after_key": b"k", "last": False, "upto_key": b"k"}, "upto_key"),
        ({"topic": ""}, "topic"),
    ],
)
def test_the_fields_of_a_part_of_a_seed_agree(seed: dict[str, Any], field: str) -> None:
    given: dict[str, Any] = {"topic": "t", "first": True, "last": True} | seed
    message = replication_pb2.ReplicateRequest(seed=replication_pb2.Seed(**given))
    assert fault_of(message).startswith(f"seed.{field}: ")


def test_numbers_of_entries_are_looked_at_before_the_entries() -> None:
    """checks [4]: the entries here have faults of their own."""
    topics = replication_pb2.ReplicateRequest()
    topics.topics.topics.extend([replication_pb2.ReplicatedTopic()] * (TOPICS_MAX + 1))
    assert fault_of(topics) == f"topics.topics: {TOPICS_MAX + 1} entries, more than {TOPICS_MAX}"


def test_a_link_with_too_many_topics_is_refused_by_the_field() -> None:
    """R15: the status shows this, so it has to tell the bound."""
    hello = replication_pb2.ReplicateRequest()
    hello.CopyFrom(SOUND["hello"])
    del hello.hello.topics[:]
    topics = [replication_pb2.ReplicatedTopic(name=f"t{n}", message_type="json") for n in range(10_001)]
    hello.hello.topics.extend(topics[:-1])
    assert fault_of(hello) == ""
    hello.hello.topics.append(topics[-1])
    assert fault_of(hello) == "hello.topics: 10001 entries, more than 10000"


class Texts:
    """The languages of a link, as far as one test needs them."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def pattern_fault(self, text: str) -> str:
        self.asked.append(text)
        return "is no pattern" if text == "(" else ""

    def filter_fault(self, text: str) -> str:
        return "is no filter" if text == "/a =" else ""


@pytest.mark.parametrize(
    ("pattern", "filter_text", "fault"),
    [
        ("(", "", "hello.topics_pattern: is no pattern"),
        (".*", "/a =", "hello.filter: is no filter"),
        ("x" * 100_000, "", "hello.topics_pattern: is longer than 65536 bytes"),
    ],
)
def test_a_greeting_with_texts_that_cannot_be_read_is_refused(pattern: str, filter_text: str, fault: str) -> None:
    texts = Texts()
    hello = replication_pb2.Hello(instance=INSTANCE, topics_pattern=pattern, filter=filter_text)
    with pytest.raises(Refused) as refused:
        check_texts(replication_pb2.ReplicateRequest(hello=hello), texts)
    assert refused.value.message == fault
    assert not texts.asked or len(pattern) < 100_000, "the size comes first"


def test_what_is_left_to_other_places_is_listed() -> None:
    """A rule that judges nothing is a decision: a field that is to have one belongs into this list, too."""
    unjudged = {
        f"{kind.__name__}.{name}"
        for kind, rules in RULES.items()
        for name, rule in rules.items()
        if isinstance(rule, Anything) and kind.DESCRIPTOR.fields_by_name[name].type != FLAG
    }
    assert unjudged == {
        "Sealed.message",
        "Sealed.crc32",
        "Sealed.number",
        "Hello.protocol",
        "Changes.crc32",
        "Packed.chunk",
        "Seed.chunk",
        "Seed.crc32",
        "ChecksumRequest.buckets",
        "ListVersionsRequest.buckets",
        "FetchRowsResponse.chunk",
        "MergeRowsRequest.chunk",
        "MergeRowsRequest.crc32",
    }
