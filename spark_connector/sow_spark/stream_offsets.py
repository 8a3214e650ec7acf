"""The offsets of a stream: positions in the journal, which Spark keeps as JSON in the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict


class Offset(TypedDict, total=False):
    """A position in the journal of an instance, which all topics share."""

    epoch: str
    sequence: int
    pin: str
    """The name of the pin, if the user has not given one."""
    created: str
    """The time of the topic's creation."""
    topics: dict[str, str]
    """With several topics: the time of creation of each that is read from here. Others are read from their earliest
    change, if that is later."""


def offset_of(bookmark: str, pin: str | None = None, created: str | None = None) -> Offset:
    """The offset of a bookmark, which is an epoch, a dot and a sequence."""
    epoch, _, sequence = bookmark.rpartition(".")
    offset = Offset(epoch=epoch, sequence=int(sequence))
    if pin is not None:
        offset["pin"] = pin
    if created is not None:
        offset["created"] = created
    return offset


def bookmark_of(offset: Offset) -> str:
    """The bookmark of an offset."""
    return f"{offset['epoch']}.{offset['sequence']}"


def sequence_of(bookmark: str) -> int:
    """The sequence of a bookmark."""
    return offset_of(bookmark)["sequence"]


def topics_of(offset: Offset, topic: str) -> Mapping[str, str | None]:
    """The topics that are read from an offset, each with the time of its creation, if that is known. `topic`: that of a
    stream of one topic."""
    return offset["topics"] if "topics" in offset else {topic: offset.get("created")}
