"""Durable subscriptions: how far each has acknowledged its topic, and which of the journal is therefore kept (rules J2
to J10, J15).

    [1]  A durable's row changes in the commit of the change itself, on the writer's thread alone. The registry follows
         after the write, under the cut lock.
    [2]  A topic's floor is the highest of two positions: that of the hard limits, and the last one that neither the
         topic's retention nor any durable holds. A durable holds its unacknowledged entries, and those that its own
         retention covers.
    [3]  The floor rises in the commit that lets go: an acknowledgement, a clearing, a deletion. Entries that only time
         lets go are found by pruning. Until then they exist, but outside every durable's readable range.
    [4]  Entries that a durable has not handed over and will not are told in a gap. The gap stays in the durable's row
         until its consumer has acknowledged beyond it.
    [5]  The number of deliveries of an entry follows from where sessions ended that began at or before the acknowledged
         position: no entry after it was handed over more often than an entry in front of it. So a short list of steps
         is enough. It is written when a consumer attaches or leaves, not for each delivery (rule J15).

This package does not interpret filters: a filter is text. `subscriptions.consumers` knows the attached consumers; a row
only has the fact that one is attached, so that a crash is not taken for idleness.

    model     a durable, its gaps and deliveries, and the answers to its changes
    rows      durables as stored
    registry  all durables of the store, for readers on any thread
    drafted   durables as a commit under construction leaves them
    floors    how far a topic's floor may rise, and its rise
    editor    the changes of durables in one commit; pruning
    merging   replicated durables: what other instances tell of them
"""

from __future__ import annotations

from sow_server.engine.durables.editor import DurableEditor, prune_topic
from sow_server.engine.durables.merging import restarts_by
from sow_server.engine.durables.model import (
    AttachedDurable,
    ClearedBacklogs,
    DeliveryStep,
    Durable,
    DurableBacklog,
    DurableFigures,
    DurableGap,
    GapReason,
    Life,
    Merged,
    RemovedDurable,
    RewindTo,
    check_same,
    delivered,
    detached,
    in_use,
    not_found,
)
from sow_server.engine.durables.registry import Durables

__all__ = [
    "AttachedDurable",
    "ClearedBacklogs",
    "DeliveryStep",
    "Durable",
    "DurableBacklog",
    "DurableEditor",
    "DurableFigures",
    "DurableGap",
    "Durables",
    "GapReason",
    "Life",
    "Merged",
    "RemovedDurable",
    "RewindTo",
    "check_same",
    "delivered",
    "detached",
    "in_use",
    "not_found",
    "prune_topic",
    "restarts_by",
]
