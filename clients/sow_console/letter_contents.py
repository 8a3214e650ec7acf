"""Dead letters: where a copy comes from, why and when it was made, and the payload to publish again. Pure.

[1]  Numbers of a payload keep their text, also in the payload that is published again (documents [1]).
[2]  A letter without the list `dead_letter`, of fix or binary, tells by its key what it can (rule T3).
[3]  The message type of a letter is that of its topic. A binary one takes letters of every type. In `_undelivered` the
     key tells the type; elsewhere it is the type of the topic that the letter comes from, or the one type of all topics
     that send there. Where none of these is known, the list itself tells it: json or msgpack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, NamedTuple, TypeAlias, TypeVar, cast, get_args

import msgspec

from sow_client import MessageTypeName, PayloadForm, Record, Topic
from sow_console import documents, texts

UNDELIVERED: Final = "_undelivered"
"""The reserved topic of letters whose topic is missing."""
FIELD: Final = "dead_letter"
_MICROSECOND: Final = timedelta(microseconds=1)
_Decoded = TypeVar("_Decoded")


@dataclass(frozen=True, slots=True)
class Box:
    """A topic of dead letters, and the topics that send there."""

    topic: str
    sources: tuple[str, ...]
    letters: int | None
    """None: the topic is missing, or the person may not see it."""


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter."""

    key: str
    version: int
    time: datetime
    """When it was made."""
    expire_time: datetime | None
    topic: str
    """Where it comes from; empty: the letter does not tell."""
    record_key: str
    reason: str
    """ "expired" or "delivery_limit"; empty: the letter does not tell."""
    durable: str
    """The durable that has set it aside."""
    was_due: datetime | None
    """The expire time that the record had."""
    hops: int
    """The topics in which it has been."""
    payload: bytes
    """As it was before it became a letter."""
    text: str
    """For reading."""


class Hop(msgspec.Struct, frozen=True):
    """An item of the list: one topic that the record has left."""

    topic: str
    key: str
    version: int
    expire_time_micros: int | None = None
    """None: never."""
    reason: str = ""
    durable: str = ""
    replaced: msgspec.Raw = msgspec.Raw()
    """The record's own field `dead_letter`, before it became a letter."""


def boxes(topics: Sequence[Topic]) -> tuple[Box, ...]:
    """The topics of dead letters, also those that are missing, by name."""
    known = {topic.name: topic for topic in topics}
    sources: dict[str, list[str]] = {}
    for topic in topics:
        if topic.settings.dead_letter:
            sources.setdefault(topic.settings.dead_letter, []).append(topic.name)
    missing = sorted(name for target, names in sources.items() if target not in known for name in names)
    if UNDELIVERED in known and (missing or _count(known[UNDELIVERED])):
        sources.setdefault(UNDELIVERED, missing)
    return tuple(Box(name, tuple(sources[name]), _count(known.get(name))) for name in sorted(sources))


def read(record: Record, topics: Sequence[Topic] = ()) -> Letter:
    """A record of a topic of dead letters. `topics`: those that are known ([3])."""
    form = form_of(record, topics)
    payload, hops = opened(record.payload, form)
    if hops:
        first = hops[0]
        topic, key, reason, durable = first.topic, first.key, first.reason, first.durable
        was_due = _moment(first.expire_time_micros)
    else:
        topic, key, reason, durable = _told_by_key(record)
        was_due = None
    return Letter(
        record.key,
        record.version,
        record.publish_time,
        record.expire_time,
        topic,
        key,
        reason,
        durable,
        was_due,
        max(1, len(hops)),
        payload,
        documents.pretty(form.json(payload) or payload),
    )


def _moment(time_micros: int | None) -> datetime | None:
    """None: never, or no time that there is, as a publisher may write anything into the list."""
    try:
        return None if time_micros is None else texts.EPOCH + time_micros * _MICROSECOND
    except OverflowError:
        return None


def form_of(record: Record, topics: Sequence[Topic] = ()) -> PayloadForm:
    """The form of a letter's payload ([3])."""
    if record.form.message_type not in ("binary", ""):
        return record.form
    parts = _split(record.key)
    if record.topic == UNDELIVERED and len(parts) == 3:
        kind, _, code = parts[1].partition(":")
        if kind in get_args(MessageTypeName):
            return PayloadForm(cast(MessageTypeName, kind), bytes.fromhex(code).decode("latin-1") or "\x01")
    source = _told_by_key(record)[0]
    origins = [topic for topic in topics if topic.name == source] or [
        topic for topic in topics if topic.settings.dead_letter == record.topic
    ]
    forms = {PayloadForm(topic.settings.message_type, topic.settings.fix_separator) for topic in origins}
    if len(forms) == 1:
        return forms.pop()
    known = (PayloadForm(kind) for kind in ("json", "msgpack"))
    return next((form for form in known if opened(record.payload, form)[1]), record.form)


def opened(payload: bytes, form: PayloadForm) -> tuple[bytes, list[Hop]]:
    """The payload without the list, and the list, newest first; empty where there is none ([2])."""
    try:
        if (codec := _CODECS.get(form.message_type)) is not None:
            level = codec.level.decode(payload)
            hops = codec.hops.decode(level.pop(FIELD))
            if hops and hops[-1].replaced:
                level[FIELD] = hops[-1].replaced
            return codec.encode(level), hops
        if form.message_type != "nvfix":
            return payload, []
        separator = form.separator.encode("latin-1")
        fields = payload.split(separator)
        marked = [field for field in fields if field.startswith(FIELD.encode() + b"=")]
        if marked:
            hops = _CODECS["json"].hops.decode(marked[0].partition(b"=")[2])
            kept = [field for field in fields if field != marked[0]]
            if hops and hops[-1].replaced:
                own = msgspec.json.decode(hops[-1].replaced, type=str)
                kept.insert(-1 if kept and not kept[-1] else len(kept), f"{FIELD}={own}".encode())
            return separator.join(kept), hops
    except (KeyError, ValueError, RecursionError):
        pass  # no letter, or a publisher's own field of that name
    return payload, []


def copy_key(topic: str, key: str, version: int, durable: str = "") -> str:
    """The key that a letter has by default."""
    parts = (topic, key, str(version), *([durable] if durable else []))
    return "|".join(part.replace("\\", "\\\\").replace("|", "\\|") for part in parts)


def _told_by_key(record: Record) -> tuple[str, str, str, str]:
    parts = _split(record.key)
    if record.topic == UNDELIVERED and len(parts) == 3:  # target, type, key
        parts = _split(parts[2])
    if len(parts) == 3 and parts[2].isdecimal():
        return parts[0], parts[1], "expired", ""
    if len(parts) == 4 and parts[2].isdecimal():
        return parts[0], parts[1], "delivery_limit", parts[3]
    return "", record.key, "", ""


def _split(key: str) -> list[str]:
    parts, part = [], ""
    characters = iter(key)
    for character in characters:
        if character == "\\":
            part += next(characters, "")
        elif character == "|":
            parts.append(part)
            part = ""
        else:
            part += character
    return [*parts, part]


def _count(topic: Topic | None) -> int | None:
    return topic.statistics.live_records if topic is not None and topic.statistics is not None else None


class _Codec(NamedTuple):
    """A message type whose payloads are objects: their first level, the list, and back."""

    level: _Decoder[dict[str, msgspec.Raw]]
    hops: _Decoder[list[Hop]]
    encode: Callable[[dict[str, msgspec.Raw]], bytes]


_Decoder: TypeAlias = msgspec.json.Decoder[_Decoded] | msgspec.msgpack.Decoder[_Decoded]
_CODECS: Final = {
    "json": _Codec(msgspec.json.Decoder(dict[str, msgspec.Raw]), msgspec.json.Decoder(list[Hop]), msgspec.json.encode),
    "msgpack": _Codec(
        msgspec.msgpack.Decoder(dict[str, msgspec.Raw]), msgspec.msgpack.Decoder(list[Hop]), msgspec.msgpack.encode
    ),
}
