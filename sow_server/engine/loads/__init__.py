"""Loads: rows staged where nobody sees them, which a commit makes the content of a topic.

[1]  Until its commit a load changes nothing but its own rows in `staging`. When it is aborted, or its lease ends,
     the topic stays as it was.
[2]  The commit is one row, synced. From then on the load is applied to its end, also after restarts.
[3]  The position up to which a load is applied moves in the commit that applies. So no row is applied twice, not
     even one that has expired or was deleted since.
[4]  A record that others have changed or removed since the load was opened stays as they have left it. "Since" is
     by the sequence of the change here: a change of another instance may come late, with an old version. A removal
     leaves a mark (loads/removal_marks [1]). Whether a row is superseded is decided in the writer's turn.
[5]  Rows of an attempt have positions without gaps. A row that was seen is not staged or counted again, so a
     request may be repeated. Only the stager of an attempt may do so: the rows of another one would be taken for
     repeated.
[6]  Lifetimes start when the row is applied (rule L5).

       open            stage*                     commit                                     rows removed
──────────▶ STAGING ──────────▶ STAGING ─────────────────────▶ APPLYING ──▶ DELETING ──▶ DONE ───────────▶ forgotten
               │ abort, end of the lease: all is removed           └──── cannot go on ──▶ FAILED ─────────▶

model     a load, its row and its figures
registry  all loads of the store, for readers on any thread; how rows of loads change
staging   rows are checked and staged
applying  committed rows are read and applied, and other records deleted
loads     a load is opened, committed, aborted, and ends
"""

from __future__ import annotations

from sow_server.engine.loads.applying import LoadApplying, LoadWork
from sow_server.engine.loads.loads import CreateTopic, Loads
from sow_server.engine.loads.model import (
    LEASE_MICROS,
    LEASE_MICROS_MAX,
    PARTS_MAX,
    Load,
    LoadContent,
    LoadFigures,
    LoadOptions,
    LoadPart,
    LoadPhase,
    LoadRow,
    load_not_found,
)
from sow_server.engine.loads.registry import LoadRegistry
from sow_server.engine.loads.staging import LoadStaging, RowsToStage

__all__ = [
    "LEASE_MICROS",
    "LEASE_MICROS_MAX",
    "PARTS_MAX",
    "CreateTopic",
    "Load",
    "LoadApplying",
    "LoadContent",
    "LoadFigures",
    "LoadOptions",
    "LoadPart",
    "LoadPhase",
    "LoadRegistry",
    "LoadRow",
    "LoadStaging",
    "LoadWork",
    "Loads",
    "RowsToStage",
    "load_not_found",
]
