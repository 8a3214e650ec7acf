"""Values as messages of the contract, and back."""

from __future__ import annotations

import zlib
from typing import Final

from sow.v1 import replication_pb2
from sow_peering import InstanceIdentity, JournalPart, PublisherMark, SeedPart, TopicKind

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
