"""The offsets of a stream: positions in the journal, which Spark keeps as JSON in the checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    marks: str
    """With several instances: the end of the bookmark, which tells positions of other instances (rule F6)."""
    after: str
    """With several instances: the bookmark at which the micro-batch begins that ends here."""
    each: dict[str, str]
    """With several cells: the bookmarks of topics that are known in another cell, or have come from one and begin at a
    position of their own (rule C24)."""
    each_after: dict[str, str]
    """As `after`, of topics with a bookmark of their own there."""
    held: dict[str, int]
    """The position up to which changes were read at another instance, which this one may lack, keyed by epoch."""
    cells: dict[str, Offset]
    """With several cells: the position in each that has topics of the query. All else is in these (rule C24)."""
    # Only in Spark's progress:
    recordsBehind: int
    secondsBehind: int
    server: str


def offset_of(bookmark: str, pin: str | None = None, created: str | None = None) -> Offset:
    """The offset of a bookmark, which is an epoch, a dot and a sequence."""
    epoch, _, sequence = bookmark.rpartition(".")
    offset = Offset(epoch=epoch, sequence=int(sequence))
    if pin is not None:
        offset["pin"] = pin
    if created is not None:
        offset["created"] = created
    return offset


def epoch_of(bookmark: str) -> str | None:
    """The epoch of a bookmark, which may have marks. None: it has none, and the server will refuse it."""
    epoch, dot, _ = bookmark.partition(";")[0].rpartition(".")
    return epoch if dot else None


def bookmark_of(offset: Offset) -> str:
    """The bookmark of an offset."""
    return f"{offset['epoch']}.{offset['sequence']}"


def marked(offset: Offset, topic: str = "") -> str:
    """The bookmark of an offset, with its marks, from which a topic is read; "": any without one of its own."""
    return offset.get("each", {}).get(topic) or bookmark_of(offset) + offset.get("marks", "")


def plain(bookmark: str) -> str:
    """A bookmark without its marks."""
    return bookmark.partition(";")[0]


def apart(offset: Offset) -> set[str]:
    """The topics that begin at a position of their own. The micro-batch that ends at the offset has nothing of them."""
    return {topic for topic, bookmark in offset.get("each", {}).items() if plain(bookmark) != bookmark_of(offset)}


def moved_to(offset: Offset, bookmark: str, each: Mapping[str, str] | None = None) -> Offset:
    """The same offset at another bookmark, which may have marks. `each`: the bookmarks of topics there. Those that
    begin at a position of their own keep it."""
    at, semicolon, marks = bookmark.partition(";")
    found = offset_of(at)
    moved = offset.copy()
    moved["epoch"], moved["sequence"], moved["marks"] = found["epoch"], found["sequence"], semicolon + marks
    moved["each"] = {**(each or {}), **{topic: offset["each"][topic] for topic in apart(offset)}}
    return moved


def without(offset: Offset, topics: Iterable[str]) -> Offset:
    """The same offset, from which these topics are not read."""
    gone = offset["topics"].keys() & set(topics)
    if not gone:
        return offset
    left = offset.copy()
    left["topics"] = {name: created for name, created in offset["topics"].items() if name not in gone}
    left["each"] = {name: bookmark for name, bookmark in offset.get("each", {}).items() if name not in gone}
    return left


def sources_of(marks: str) -> dict[str, int]:
    """The positions that marks tell, by epoch."""
    positions = [part.rpartition(".") for part in marks.split(";") if part and "=" not in part]
    return {epoch: int(sequence) for epoch, _, sequence in positions}


def joined(all_marks: Iterable[str]) -> str:
    """Marks that hold for several topics: the earliest positions. Empty if one topic has none."""
    times: list[int] = []
    common: dict[str, int] | None = None
    for marks in all_marks:
        if not marks:
            return ""
        times.append(int(marks.split(";")[1].removeprefix("t=")))
        sources = sources_of(marks)
        if common is None:
            common = sources
        else:
            common = {epoch: min(at, sources[epoch]) for epoch, at in common.items() if epoch in sources}
    if common is None:
        return ""
    return "".join([f";t={min(times)}", *[f";{epoch}.{at}" for epoch, at in common.items()]])


def sequence_of(bookmark: str) -> int:
    """The sequence of a bookmark."""
    return offset_of(bookmark)["sequence"]


def is_behind(bookmark: str, end: str) -> bool:
    """True if a position is at another one, or behind it, in the same journal."""
    return epoch_of(bookmark) == epoch_of(end) and sequence_of(bookmark) >= sequence_of(plain(end))


def topics_of(offset: Offset, topic: str) -> Mapping[str, str | None]:
    """The topics that are read from an offset, each with the time of its creation, if that is known. `topic`: that of a
    stream of one topic."""
    return offset["topics"] if "topics" in offset else {topic: offset.get("created")}
