"""Values as messages of the contract, and back."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from google.protobuf.duration_pb2 import Duration

from sow.v1 import replication_pb2, types_pb2
from sow_peering import DurableMark, InstanceIdentity, JournalPart, PublisherMark, SeedPart, Stamp, TopicKind

PROTOCOL: Final = 1
"""The version of the replication protocol."""


def instance_of(identity: InstanceIdentity, cluster: str = "") -> replication_pb2.Instance:
    """An identity as a message. A caller tells its cluster, and the callee compares (rule R11)."""
    return replication_pb2.Instance(name=identity.name, id=identity.id, epoch=identity.epoch, cluster=cluster)


def topic_of(kind: TopicKind) -> replication_pb2.ReplicatedTopic:
    """A topic as a message."""
    return replication_pb2.ReplicatedTopic(
        name=kind.name,
        key=kind.key,
        message_type=kind.message_type,
        separator=kind.separator,
        acts_on_expiration=kind.acts,
    )


def kind_of(topic: replication_pb2.ReplicatedTopic) -> TopicKind:
    """The topic in a message; topics without a journal are not sent."""
    return TopicKind(topic.name, tuple(topic.key), topic.message_type, topic.separator, acts=topic.acts_on_expiration)


def identity_of(instance: replication_pb2.Instance) -> InstanceIdentity:
    """The identity in a message."""
    return InstanceIdentity(instance.name, instance.id, instance.epoch)


def changes_message(part: JournalPart) -> replication_pb2.ReplicateRequest:
    """The message for changes. The sender adds the head and the clock when it sends it."""
    message = replication_pb2.ReplicateRequest()
    changes = message.changes
    crc = 0
    for topic, chunk in part.chunks:
        crc = zlib.crc32(chunk, crc)
        changes.chunks.add(topic=topic, chunk=chunk)
    changes.after = part.after
    changes.upto = part.upto
    changes.origins.extend(part.origins)
    changes.crc32 = crc
    changes.commit_time_micros = part.last_commit_micros
    changes.publishers.extend(map(mark_message, part.publishers))
    changes.traces.extend(part.traces)
    return message


def mark_message(mark: PublisherMark) -> replication_pb2.PublisherMark:
    """A mark of a publisher as a message."""
    return replication_pb2.PublisherMark(
        publisher_id=mark.publisher_id,
        epoch=mark.epoch,
        token=mark.token,
        first=mark.first,
        last=mark.last,
        topics=mark.topics,
        refused=mark.refused,
        used_micros=mark.used_micros,
        whole=mark.whole,
    )


def mark_of(message: replication_pb2.PublisherMark) -> PublisherMark:
    """The mark of a publisher in a message."""
    return PublisherMark(
        message.publisher_id,
        message.epoch,
        message.token,
        message.first,
        message.last,
        tuple(message.topics),
        tuple(message.refused),
        message.used_micros,
        message.whole,
    )


def durable_message(mark: DurableMark) -> replication_pb2.ReplicatedDurable:
    """A replicated durable as a message."""
    return replication_pb2.ReplicatedDurable(
        topic=mark.topic,
        name=mark.name,
        filter=mark.filter,
        declared=_declared_message(mark.declared),
        born=_stamp_message(mark.born),
        buried=_stamp_message(mark.buried),
        removed=mark.removed,
        rewinds=map(_stamp_message, mark.rewinds),
        sequence=mark.sequence,
        swept_micros=mark.swept_micros,
        idle_micros=mark.idle_micros,
        consumer_since=mark.consumer_since,
        forced=mark.forced,
    )


def durable_of(message: replication_pb2.ReplicatedDurable) -> DurableMark:
    """The replicated durable in a message."""
    return DurableMark(
        message.topic,
        message.name,
        message.filter,
        MappingProxyType(_declared_of(message.declared)),
        _stamp_of(message.born),
        _stamp_of(message.buried),
        message.removed,
        tuple(map(_stamp_of, message.rewinds)),
        message.sequence if message.HasField("sequence") else None,
        message.swept_micros,
        message.idle_micros,
        message.consumer_since,
        message.forced,
    )


def _stamp_message(stamp: Stamp) -> replication_pb2.Stamp:
    return replication_pb2.Stamp(number=stamp.number, instance=stamp.instance)


def _stamp_of(message: replication_pb2.Stamp) -> Stamp:
    return Stamp(message.number, message.instance)


def _declared_message(declared: Mapping[str, int | None]) -> types_pb2.DurableSettings:
    message = types_pb2.DurableSettings()
    for name, value in declared.items():
        if name == "retain_time_micros" and value is None:
            message.retain_time_unlimited = True
        elif name in _DURATIONS and value is not None:
            _DURATIONS[name](message).FromMicroseconds(value)
            _DURATIONS[name](message).SetInParent()  # a zero duration is a value
        elif name == "replicated":
            message.replicated = bool(value)
        elif name == "retain_bytes":
            message.retain_bytes = _UNLIMITED if value is None else value
        elif name == "delivery_limit":
            message.delivery_limit = _UNLIMITED if value is None else value
    return message


def _declared_of(message: types_pb2.DurableSettings) -> dict[str, int | None]:
    declared: dict[str, int | None] = {}
    present = {descriptor.name for descriptor, _ in message.ListFields()}
    for name, duration in _DURATIONS.items():
        if name.removesuffix("_micros") in present:
            declared[name] = duration(message).ToMicroseconds()
    if message.retain_time_unlimited:
        declared["retain_time_micros"] = None
    if message.HasField("retain_bytes"):
        declared["retain_bytes"] = None if message.retain_bytes == _UNLIMITED else message.retain_bytes
    if message.HasField("delivery_limit"):
        declared["delivery_limit"] = None if message.delivery_limit == _UNLIMITED else message.delivery_limit
    if message.HasField("replicated"):
        declared["replicated"] = message.replicated
    return declared


_UNLIMITED: Final = -1
_DURATIONS: Final[Mapping[str, Callable[[types_pb2.DurableSettings], Duration]]] = {
    "retain_time_micros": lambda message: message.retain_time,
    "backlog_ttl_micros": lambda message: message.backlog_ttl,
    "idle_ttl_micros": lambda message: message.idle_ttl,
}


def seed_message(topic: str, after_key: bytes, part: SeedPart) -> replication_pb2.ReplicateRequest:
    """The message for a part of a topic's seed. The sender adds the purge mark."""
    message = replication_pb2.ReplicateRequest()
    seed = message.seed
    seed.topic = topic
    seed.first = not after_key
    seed.last = not part.upto_key
    seed.after_key = after_key
    seed.upto_key = part.upto_key
    seed.chunk = part.chunk
    seed.origins.extend(part.origins)
    seed.crc32 = zlib.crc32(part.chunk)
    return message
