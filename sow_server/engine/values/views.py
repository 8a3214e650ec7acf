"""Views: topics whose content follows from another topic, their source (rules V1 to V9). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from sow_server.engine.values.errors import Reason, StoreError

Named: TypeAlias = tuple[str, str]
"""A name and an expression; the name may be empty where the expression has one of its own, such as a field."""

VIEWS_MAX: Final = 8
"""Views of one source (rule V1): each of its commits settles all of them."""
RETRY_MICROS: Final = 1_000_000
"""When to ask again for a view that is being built."""


@dataclass(frozen=True, slots=True)
class ViewDefinition:
    """The definition of a view, as its creator gave it."""

    source: str
    """The name of the topic that it is computed from."""
    group_by: tuple[Named, ...] = ()
    select: tuple[Named, ...] = ()
    """Aggregates of the groups; fields of each record if there is neither a group nor an aggregate (rule V3)."""
    where: str = ""
    """A filter of the source's records; empty: all of them."""


class ViewStatus(NamedTuple):
    """How far a view is (rule V6)."""

    complete: bool
    records_read: int
    """Records of the source that have been read to build it."""
    groups: int
    """Its records."""
    ungrouped: int
    """Records of the source that match `where` and are in no group (rule Q12)."""


def view_building(name: str) -> StoreError:
    """The refusal of a read of a view that is not complete (rule V6)."""
    return StoreError(
        Reason.VIEW_BUILDING,
        f"topic: view {name} is still being built from the records of its source",
        field="topic",
        retry_after_micros=RETRY_MICROS,
        details={"topic": name},
    )


def view_read_only(name: str) -> StoreError:
    """The refusal of a write to a view (rule V1)."""
    return StoreError(
        Reason.VIEW_READ_ONLY,
        f"topic: {name} is a view; its records follow from its source and are not written",
        field="topic",
        details={"topic": name},
    )


def has_views(source: str, seen: Sequence[str], change: str) -> StoreError:
    """The refusal to delete or alter a topic that has views (rule V7). `seen`: those that the caller sees."""
    named = f": {', '.join(seen)}" if seen else ""
    return StoreError(
        Reason.TOPIC_HAS_VIEWS,
        f"topic: {source} has views{named}; delete them before you {change}",
        field="name",
        details={"topic": source, "views": ",".join(seen)},
    )


def everything(name: str) -> bool:
    """True for each topic: the store itself sees all of them."""
    return True
