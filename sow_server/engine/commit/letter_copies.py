"""Dead letters: the copies of expired records, and of entries that a durable has set aside, in the topic named by
`dead_letter` (rules T3, J15). Pure.

    [1]  A copy is made in the commit of the expiry, so there is exactly one for each.
    [2]  The copy of a json, msgpack or nvfix record has a list `dead_letter`, newest first, of the topics in which it
         expired. A target that is in the list already gets no further copy, so a pure expiry cycle ends after one
         round.
    [3]  fix and binary have no room for that list: their payload is copied unchanged, and the key tells its origin. So
         a setting that makes a cycle among them is refused, and a cycle that arises otherwise is ended here.
    [4]  A target that does not exist, or cannot take the copies, counts as missing: the copies are retained in
         `_undelivered`.

Limits of keys and payloads are for publishers (rule K8): a copy may exceed them by the added parts.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec

from sow_server.engine.catalog.topics import UNDELIVERED_ID, Topic, Topics, check_name
from sow_server.engine.formats.payloads import Projection
from sow_server.engine.formats.topic_formats import format_of
from sow_server.engine.stored import PAYLOAD, read_header
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.keys import TOPIC_NAME, join, split
from sow_server.engine.values.model import NEVER, MessageType, OnMissing, TopicSettings
from sow_server.engine.values.policies import Declared

HOPS_MAX: Final = 16
"""How many times a record may be copied from topic to topic, each copy expiring in turn."""
KEY_BYTES_MAX: Final = 8192
"""The most bytes of the key of a copy. Escaping may double a key with every hop. A longer key is replaced by its
digest."""
FIELD: Final = "dead_letter"
EXPIRED: Final = "expired"
SET_ASIDE: Final = "delivery_limit"
_FIELD: Final = FIELD.encode()
_OTHER_FIELDS: Final = Projection(exclude=((FIELD,),))
LETTERS_BYTES_MAX: Final = HOPS_MAX * (KEY_BYTES_MAX + 512)
"""The bytes that a list of letters adds to a payload; a key of many control characters may take more when it is
escaped."""
_SPACE: Final = b" \t\r\n"
_JSON_STRUCTURE: Final = frozenset(b'{}[]:,"\\-_.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ')
"""Bytes that the text of a list itself uses, so that none of them may be escaped in it."""


class Fate(enum.StrEnum):
    """The outcome of a dead letter."""

    DELIVERED = "delivered"
    RETAINED = "retained"
    """Its target is missing: it waits in `_undelivered`."""
    DROPPED = "dropped"
    """Its target is missing and the topic's settings do not retain it; or it has been through `HOPS_MAX` topics."""
    ENDED = "ended"
    """It would have returned to a topic in which it had already expired."""


class Letter(msgspec.Struct, frozen=True):
    """One expiry or setting aside, as an item of the list on a copy."""

    topic: str
    key: str
    version: int
    expire_time_micros: int | None
    """None: never."""
    reason: str = EXPIRED
    durable: str | msgspec.UnsetType = msgspec.UNSET
    """The durable that has set it aside."""
    replaced: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    """The document's own field `dead_letter`, in whose place the list is. The oldest letter has it."""


class Post(NamedTuple):
    """Copies that go to one topic."""

    target: Topic | None
    """None: nowhere; or, when they are retained, `_undelivered`."""
    fate: Fate
    keys: list[bytes]
    payloads: list[bytes]
    dropped: int = 0
    ended: int = 0


def post(topics: Topics, topic: Topic, keys: Sequence[bytes], values: Sequence[bytes], durable: str = "") -> Post:
    """The copies of records of `topic`, given by their keys and stored values, that have expired or that `durable` has
    set aside."""
    settings = topic.settings
    name = settings.dead_letter
    if name == topic.name:  # a policy for many topics may name one of them
        return Post(None, Fate.ENDED, [], [], ended=len(keys))
    add = _adder(settings)
    if add is None and _leads_back(topics, topic.name, settings):
        return Post(None, Fate.ENDED, [], [], ended=len(keys))
    target = topics.by_name.get(name)
    fate = Fate.DELIVERED
    if target is None or target.view is not None or not fits(settings, target.settings):
        if settings.on_missing is OnMissing.DROP:
            return Post(None, Fate.DROPPED, [], [], dropped=len(keys))
        target, fate = None, Fate.RETAINED
    copy_keys: list[bytes] = []
    payloads: list[bytes] = []
    dropped = ended = 0
    for key, value in zip(keys, values, strict=True):
        head, text = read_header(value), key.decode(errors="backslashreplace")  # soundness [2]
        payload = value[PAYLOAD]
        if add is not None:
            expire_time = None if head.expire_time_micros == NEVER else head.expire_time_micros
            letter = Letter(topic.name, text, head.version, expire_time)
            if durable:
                letter = Letter(topic.name, text, head.version, expire_time, SET_ASIDE, durable)
            before, payload = add(payload, letter)
            if any(letter.topic == name for letter in before):
                ended += 1
                continue
            if len(before) >= HOPS_MAX:
                dropped += 1
                continue
        if not settings.dead_letter_by_key:
            text = _copy_key(topic.name, text, head.version, durable)
        copy_keys.append(text.encode() if fate is Fate.DELIVERED else _undelivered_key(settings, text))
        payloads.append(payload)
    return Post(target, fate, copy_keys, payloads, dropped, ended)


def fits(source: TopicSettings, target: TopicSettings) -> bool:
    """True if a topic can take copies of another's records."""
    return not target.key and (
        target.message_type is MessageType.BINARY
        or (source.message_type, source.separator) == (target.message_type, target.separator)
    )


# --- keys ------------------------------------------------------------------------------------------------------------


def _copy_key(topic: str, key: str, version: int, durable: str) -> str:
    # Entries set aside by several durables, and the expiry besides, each make a copy.
    last = [str(version), durable] if durable else [str(version)]
    joined = join([topic, key, *last])
    if len(joined) > KEY_BYTES_MAX // 4 and len(joined.encode()) > KEY_BYTES_MAX:
        joined = join([topic, f"sha256:{hashlib.sha256(key.encode()).hexdigest()}", *last])
    return joined


def _undelivered_key(source: TopicSettings, key: str) -> bytes:
    return join([source.dead_letter, _type_text(source), key]).encode()


def undelivered_prefix(target: str) -> bytes:
    """The prefix of the keys of the copies that wait for a topic: its name has nothing to escape."""
    return target.encode() + b"|"


def undelivered_stop(target: str) -> bytes:
    """The end of the range of these keys."""
    return target.encode() + bytes((ord("|") + 1,))


def waiting_for(key: bytes, target: Topic) -> bytes | None:
    """The key that a copy in `_undelivered` will have in `target`; None for one that the topic cannot take."""
    name, kind, copy_key = split(key.decode())
    takes = not target.settings.key and (
        target.settings.message_type is MessageType.BINARY or kind == _type_text(target.settings)
    )
    return copy_key.encode() if takes and name == target.name else None


def rivals(key: bytes, target: Topic) -> list[bytes]:
    """The keys under which copies of other types may wait in `_undelivered` for the same key in `target`."""
    if target.settings.message_type is not MessageType.BINARY:
        return []
    name, own, copy_key = split(key.decode())
    kinds = [kind.value for kind in MessageType if kind.value != own]
    return [join([name, kind, copy_key]).encode() for kind in kinds]


def _type_text(settings: TopicSettings) -> str:
    if settings.separator == b"\x01":
        return settings.message_type.value
    return f"{settings.message_type.value}:{settings.separator.hex()}"


def may_be_copy(topic: Topic, key: bytes) -> bool:
    """True if `post` can have made a key, which is well-formed UTF-8. The key of a copy may be longer than a
    publisher's."""
    if topic.id == UNDELIVERED_ID:
        return True  # no publisher writes there
    if topic.settings.key or len(key) > KEY_BYTES_MAX:
        return False
    name, *rest = split(key.decode())
    # Topic, key, version; and the durable that has set it aside.
    return len(rest) in (2, 3) and TOPIC_NAME.match(name) is not None and rest[1].isdecimal()


def original_bytes(settings: TopicSettings, payload: bytes) -> int:
    """The least length of a payload before letters were added to it, in bytes."""
    return len(payload) - (LETTERS_BYTES_MAX if not settings.key and _FIELD in payload else 0)


# --- payloads --------------------------------------------------------------------------------------------------------

_Adder = Callable[[bytes, Letter], tuple[list[Letter], bytes]]
"""A function from a payload to its letters, and to the payload with one more letter in front of them."""

_json_level: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_json_letters: Final = msgspec.json.Decoder(list[Letter])
_msgpack_level: Final = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_msgpack_letters: Final = msgspec.msgpack.Decoder(list[Letter])


def _adder(settings: TopicSettings) -> _Adder | None:
    """How a letter is added to a payload; None for a type without room for one ([3])."""
    match settings.message_type:
        case MessageType.JSON:
            return _add_to_json
        case MessageType.MSGPACK:
            return _add_to_msgpack
        case MessageType.NVFIX if settings.separator[0] not in _JSON_STRUCTURE:
            return lambda payload, letter: _add_to_nvfix(settings, payload, letter)
        case _:
            return None


def _add_to_json(payload: bytes, letter: Letter) -> tuple[list[Letter], bytes]:
    if _FIELD not in payload and b"\\u" not in payload:
        # The usual case: the field is put in front of the last bracket, and the rest stays as it was published.
        fields = payload.rstrip(_SPACE)[:-1].rstrip(_SPACE)
        comma = b"" if fields.endswith(b"{") else b","
        return [], b'%s%s"%s":[%s]}' % (fields, comma, _FIELD, msgspec.json.encode(letter))
    try:
        level = _json_level.decode(payload)
        before, own = _letters(level.pop(FIELD, None), _json_letters.decode)
        level[FIELD] = msgspec.Raw(msgspec.json.encode([_replacing(letter, own), *before]))
        return before, msgspec.json.encode(level)
    except (msgspec.MsgspecError, RecursionError):
        return [], payload  # valid by its syntax, undecodable in fact


def _add_to_msgpack(payload: bytes, letter: Letter) -> tuple[list[Letter], bytes]:
    try:
        level = _msgpack_level.decode(payload)
        before, own = _letters(level.pop(FIELD, None), _msgpack_letters.decode)
        level[FIELD] = msgspec.Raw(msgspec.msgpack.encode([_replacing(letter, own), *before]))
        return before, msgspec.msgpack.encode(level)
    except (msgspec.MsgspecError, RecursionError):
        return [], payload


def _add_to_nvfix(settings: TopicSettings, payload: bytes, letter: Letter) -> tuple[list[Letter], bytes]:
    separator = settings.separator
    before: list[Letter] = []
    if _FIELD + b"=" in payload:
        form = format_of(settings)
        field = form.decode(payload).get(FIELD)
        before, own = _letters(field.encode() if isinstance(field, str) else None, _json_letters.decode)
        if own is not None:
            letter = _replacing(letter, msgspec.Raw(msgspec.json.encode(field)))
        payload = form.project(payload, _OTHER_FIELDS)
    letters = json.loads(msgspec.json.encode([letter, *before]))
    # ASCII alone, so that only the separator itself is left to escape; it can occur only in texts.
    text = json.dumps(letters, separators=(",", ":")).replace(separator.decode("latin-1"), f"\\u{separator[0]:04x}")
    closed = payload.endswith(separator) or not payload
    field_text = b"%s=%s" % (_FIELD, text.encode())
    return before, payload + field_text + separator if closed else payload + separator + field_text


def _letters(
    raw: msgspec.Raw | bytes | None, decode: Callable[[bytes], list[Letter]]
) -> tuple[list[Letter], msgspec.Raw | None]:
    """The letters of a field; or none, and the value that a publisher has put there."""
    if raw is None:
        return [], None
    try:
        return decode(bytes(raw)), None
    except (msgspec.MsgspecError, RecursionError):
        return [], msgspec.Raw(bytes(raw))


def _replacing(letter: Letter, own: msgspec.Raw | None) -> Letter:
    return letter if own is None else msgspec.structs.replace(letter, replaced=own)


# --- checks of settings ----------------------------------------------------------------------------------------------


def check(topics: Topics, name: str, settings: TopicSettings, declared: Declared, *, is_view: bool = False) -> None:
    """Raises StoreError INVALID_ARGUMENT when a topic called `name`, which declares `declared`, cannot have these
    settings because of the dead letters that it sends, or gets from existing topics.

    Only declarations of topics themselves are refused. A policy or a default that does not suit one of its topics gives
    way: the target of that topic counts as missing ([4]).
    """

    def refuse(field: str, message: str) -> StoreError:
        return StoreError(Reason.INVALID_ARGUMENT, f"{field}: {message}", field=f"settings.{field}")

    wanted = settings.dead_letter
    if wanted and FIELD in declared:
        try:
            check_name(wanted)
        except StoreError as error:
            raise refuse(FIELD, error.message.removeprefix("topic: ")) from None
        if wanted == name:
            raise refuse(FIELD, f"{wanted!r} is the topic itself")
        target = topics.by_name.get(wanted)
        if target is not None and target.view is not None:
            raise refuse(FIELD, f"topic {wanted} is a view, and takes no records")
        if target is not None and not fits(settings, target.settings):
            field, why = _misfit(settings, target.settings)
            raise refuse(FIELD, f"topic {wanted} has {field} = {why}")
        if _adder(settings) is None and (way := _leads_back(topics, name, settings)):
            raise refuse(
                FIELD,
                f"{wanted!r} leads back to {name!r} ({' > '.join(way)}), and with message_type ="
                f" {settings.message_type.value!r} a copy cannot record where it has been",
            )
    for other in topics.by_name.values():
        own = other.declaration.settings.get(FIELD) == name and other.name != name
        if own and is_view:
            raise refuse(FIELD, f"topic {other.name} has {FIELD} = {name!r}, and a view takes no records")
        if own and not fits(other.settings, settings):
            field, why = _misfit(other.settings, settings)
            raise refuse(field, f"{why}, and topic {other.name} has {FIELD} = {name!r}")


def _misfit(source: TopicSettings, target: TopicSettings) -> tuple[str, str]:
    """The setting because of which a topic cannot take copies; its value, with the value that is needed."""
    if target.key:
        return "key", f"{list(target.key)}, but dead letters have keys of their own"
    if source.message_type is not target.message_type:
        needed = " or ".join(dict.fromkeys([repr(source.message_type.value), repr(MessageType.BINARY.value)]))
        return "message_type", f"{target.message_type.value!r}, but its dead letters need {needed}"
    return "fix_separator", f"{target.separator!r}, but its dead letters have {source.separator!r}"


def _leads_back(topics: Topics, name: str, settings: TopicSettings) -> list[str]:
    """The path of dead letters from a topic back to itself; empty if they do not return."""
    way = [name]
    following = settings.dead_letter
    while following and following not in way:
        way.append(following)
        topic = topics.by_name.get(following)
        following = "" if topic is None else topic.settings.dead_letter
    return [*way, name] if following == name else []
