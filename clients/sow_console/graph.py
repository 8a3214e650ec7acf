"""The graph of replication as one instance sees it: places and arrows to draw. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from sow_client import IncomingLink, OutgoingLink, ReplicationStatus

WIDTH: Final = 720
HEIGHT: Final = 320
_RADIUS_X: Final = 250
_RADIUS_Y: Final = 110
_GAP: Final = 62
"""From the middle of a node to the begin of an arrow."""


@dataclass(frozen=True, slots=True)
class Node:
    """An instance: this one in the middle, its peers around it."""

    name: str
    x: float
    y: float
    here: bool
    skew: timedelta | None
    """Its clock minus this one's; None: it is this one, or not known."""


@dataclass(frozen=True, slots=True)
class Arrow:
    """A link."""

    x1: float
    y1: float
    x2: float
    y2: float
    text: str
    text_x: float
    text_y: float
    good: bool
    """True if changes flow."""


@dataclass(frozen=True, slots=True)
class Graph:
    """All of it."""

    nodes: tuple[Node, ...]
    arrows: tuple[Arrow, ...]


def drawn(status: ReplicationStatus) -> Graph:
    """The graph of an instance's links, the peers in the order of their names."""
    outgoing = {link.peer: link for link in status.outgoing}
    incoming = {link.peer: link for link in status.incoming}
    peers = sorted(outgoing.keys() | incoming.keys())
    middle = (WIDTH / 2, HEIGHT / 2)
    nodes = [Node(status.instance, *middle, here=True, skew=None)]
    arrows = []
    for index, peer in enumerate(peers):
        angle = 2 * math.pi * index / len(peers)
        x, y = middle[0] + _RADIUS_X * math.cos(angle), middle[1] + _RADIUS_Y * math.sin(angle)
        sends, receives = outgoing.get(peer), incoming.get(peer)
        nodes.append(Node(peer, x, y, here=False, skew=_skew(sends, receives)))
        if sends is not None:
            label = "paused" if sends.state == "paused" else f"{sends.state}, {sends.lag_sequences:,} behind"
            arrows.append(_arrow(middle, (x, y), label, sends.state == "streaming"))
        if receives is not None:
            label = f"{receives.state}, {max(0, receives.head_sequence - receives.cursor):,} behind"
            arrows.append(_arrow((x, y), middle, label, receives.state == "connected"))
    return Graph(tuple(nodes), tuple(arrows))


def _skew(sends: OutgoingLink | None, receives: IncomingLink | None) -> timedelta | None:
    if sends is not None:
        return sends.skew
    return None if receives is None else receives.skew


def _arrow(begin: tuple[float, float], end: tuple[float, float], label: str, good: bool) -> Arrow:
    dx, dy = end[0] - begin[0], end[1] - begin[1]
    length = math.hypot(dx, dy)
    dx, dy = dx / length, dy / length
    # To the left of its direction, so that two arrows between the same nodes stand side by side.
    left_x, left_y = dy * 7, -dx * 7
    gap = _GAP if abs(dx) > 0.5 else _GAP * 0.5
    x1, y1 = begin[0] + dx * gap + left_x, begin[1] + dy * gap + left_y
    x2, y2 = end[0] - dx * gap + left_x, end[1] - dy * gap + left_y
    return Arrow(x1, y1, x2, y2, label, (x1 + x2) / 2 + left_x, (y1 + y2) / 2 + left_y * 1.6, good)
