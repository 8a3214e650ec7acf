"""The format, the key paths and the index paths that the settings of a topic name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from sow_server.engine.formats.binary_format import BinaryFormat
from sow_server.engine.formats.field_format import FieldFormat
from sow_server.engine.formats.json_format import JsonFormat
from sow_server.engine.formats.msgpack_format import MsgpackFormat
from sow_server.engine.formats.paths import Steps
from sow_server.engine.formats.payloads import Format
from sow_server.engine.values.keys import parse_path, path_text
from sow_server.engine.values.model import MessageType, TopicSettings

KEY_STEPS_MAX: Final = 32
"""How deep a key field may lie."""
INDEX_STEPS_MAX: Final = 32
"""How deep an indexed field may lie."""
_SUBSCRIPT: Final = re.compile(r"\[[0-9]+\]\Z")
_UNFIT_NAME: Final = re.compile(r'["\\\x00-\x1f]')
"""Characters that msgspec refuses in the name of a struct field: its encoder writes names unescaped."""

_JSON: Final = JsonFormat()
_MSGPACK: Final = MsgpackFormat()
_BINARY: Final = BinaryFormat()


def format_of(settings: TopicSettings) -> Format:
    """The format of a topic's payloads."""
    match settings.message_type:
        case MessageType.JSON:
            return _JSON
        case MessageType.MSGPACK:
            return _MSGPACK
        case MessageType.FIX | MessageType.NVFIX:
            return FieldFormat(settings.separator, tags=settings.message_type is MessageType.FIX)
        case MessageType.BINARY:
            return _BINARY


def index_paths(settings: TopicSettings) -> list[Steps]:
    """The parsed paths of a topic's indexes. Raises ValueError naming the path at fault."""
    paths = [_field_path(settings, path) for path in settings.index]
    if paths and settings.message_type is MessageType.BINARY:
        raise ValueError("a binary topic has no fields")
    for index, path in enumerate(paths):
        if len(path) > INDEX_STEPS_MAX:
            raise ValueError(f"{path_text(path)[:80]}… has {len(path)} steps, more than the limit of {INDEX_STEPS_MAX}")
        if any(_SUBSCRIPT.search(step) for step in path):
            raise ValueError(f"{path_text(path)}: an index holds all elements of an array; leave out the subscript")
        check_flat(settings, path)
        if path in paths[:index]:
            raise ValueError(f"{path_text(path)} is there twice")
    return paths


def _field_path(settings: TopicSettings, path: str) -> Steps:
    """The parsed path of a field. /055 of a fix topic is /55."""
    steps = parse_path(path)
    if settings.message_type is MessageType.FIX and len(steps) == 1 and steps[0].startswith("0"):
        return (steps[0].lstrip("0") or "0",)
    return steps


def zeros_before(names: Iterable[str]) -> str:
    """The fault of tags that a filter or an order names: zeros in front, with which it would find no field. Empty:
    nothing."""
    odd = next((name for name in names if len(name) > 1 and name[0] == "0" and name.isascii() and name.isdigit()), "")
    return (
        f"{path_text((odd,))}: a tag is a number without zeros in front; write /{odd.lstrip('0') or '0'}" if odd else ""
    )


def check_flat(settings: TopicSettings, path: Steps) -> None:
    """Raises ValueError for a path that a fix or nvfix payload does not have."""
    if settings.message_type in (MessageType.FIX, MessageType.NVFIX) and len(path) != 1:
        raise ValueError(f"{path_text(path)}: a {settings.message_type} payload is flat")
    if settings.message_type is MessageType.FIX and not (path[0].isascii() and path[0].isdigit()):
        raise ValueError(f"{path_text(path)}: a fix field is a tag such as /55")


def key_paths(settings: TopicSettings) -> list[Steps]:
    """The parsed key paths of a topic. Raises ValueError naming the path at fault."""
    paths = [_field_path(settings, path) for path in settings.key]
    if paths and settings.message_type is MessageType.BINARY:
        raise ValueError("a binary topic has no fields, so its publishers supply the key")
    for index, path in enumerate(paths):
        if len(path) > KEY_STEPS_MAX:
            raise ValueError(f"{path_text(path)[:80]}… has {len(path)} steps, more than the limit of {KEY_STEPS_MAX}")
        if settings.message_type is MessageType.JSON and any(_UNFIT_NAME.search(step) for step in path):
            raise ValueError(f"{path_text(path)}: a key field's name has no quotes, backslashes or control characters")
        check_flat(settings, path)
        for other in paths[:index]:
            shared = min(len(path), len(other))
            if path[:shared] == other[:shared]:
                raise ValueError(f"{path_text(other)} and {path_text(path)} overlap")
    return paths
