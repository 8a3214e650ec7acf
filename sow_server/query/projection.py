"""Checks a `select` against its topic (rule Q2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sow_server.engine.catalog.topics import Topic
from sow_server.engine.formats.paths import Steps
from sow_server.engine.formats.payloads import Projection
from sow_server.engine.values.errors import Reason, StoreError
from sow_server.engine.values.keys import parse_path
from sow_server.engine.values.model import MessageType

PATHS_MAX: Final = 1000
CHARACTERS_MAX: Final = 64 << 10
"""The bound of all paths together. Each step takes some 200 bytes once the paths are compiled."""


def projection(
    topic: Topic, include: Sequence[str], exclude: Sequence[str], hidden: tuple[Steps, ...] = ()
) -> Projection | None:
    """The projection of a request, without the fields that are hidden from its caller; None: whole payloads. Raises
    StoreError naming the path at fault."""
    if not include and not exclude:
        return Projection(hidden=hidden) if hidden else None
    if include and exclude:
        raise StoreError(
            Reason.INVALID_ARGUMENT, "select: gives both include and exclude; give one of them", field="select"
        )
    if topic.settings.message_type is MessageType.BINARY:
        raise StoreError(
            Reason.UNSUPPORTED_FOR_MESSAGE_TYPE,
            f"select: topic {topic.name} is binary, its payloads have no fields",
            field="select",
        )
    if len(include) + len(exclude) > PATHS_MAX:
        raise StoreError(Reason.INVALID_ARGUMENT, f"select: more than {PATHS_MAX} paths", field="select")
    if (characters := sum(map(len, include)) + sum(map(len, exclude))) > CHARACTERS_MAX:
        raise StoreError(
            Reason.INVALID_ARGUMENT,
            f"select: {characters} characters are more than the limit of {CHARACTERS_MAX}",
            field="select",
        )
    try:
        return Projection(
            tuple(parse_path(path) for path in include), tuple(parse_path(path) for path in exclude), hidden
        )
    except ValueError as error:
        raise StoreError(Reason.INVALID_ARGUMENT, f"select: {error}", field="select") from None
