"""The checks of `sow doctor` about the placement of topics in cells."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace

from sow_cli import display
from sow_cli.findings import Finding
from sow_cli.session import Session
from sow_client import Placement, SeparatedTopic, SowError, Stray


def judged_cells(found: Placement, session: Session, addresses: Mapping[str, str]) -> Iterator[Finding]:
    """Checks the placement of topics in cells, where there is one. Only servers of `addresses` are asked for a copy of
    a topic, whatever addresses the placement has (rule C11)."""
    if not found.cell:
        return
    if not found.default:
        yield Finding("cells", "skipped", "the problems of cells need the permission observe")
        return
    for problem in found.problems:
        since = f"since {problem.since:%Y-%m-%d %H:%M:%S} UTC"
        if problem.kind == "DIFFERS":
            advice = "give all servers the same placement file, and run sow cells reload --all"
            yield Finding("cells", "fault", f"the cell {problem.cell} differs {since}: {problem.message}", advice)
        elif problem.kind == "STRAYS":
            said = f"the cell {problem.cell} has topics of this one {since}: {problem.message}"
            servers = addresses.get(problem.cell)  # rule C11: a person would send a token where the advice says
            there = "" if servers is None else f": {replace(session, server=servers).command} doctor"
            yield Finding("cells", "warning", said, f"ask it which copy is newer{there}")
        else:
            said = f"the cell {problem.cell} does not answer {since}: {problem.message}"
            yield Finding("cells", "warning", said, "its topics may be unavailable: look whether it runs")
    if (waiting := found.prepared) is not None:
        said = f"version {waiting.version} of the placement waits since {waiting.since:%Y-%m-%d %H:%M:%S} UTC, for "
        said += f"{', '.join(waiting.topics)}{f': {waiting.message}' if waiting.message else ''}"
        advice = "run the same sow cells move again, or undo it with --abort"
        yield Finding("cells", "warning", said, advice)
    faults: dict[str, str] = {}  # by cell: one that is away is waited for once
    for stray in found.strays:
        other = faults.get(stray.cell) or _copy_at(session, addresses.get(stray.cell), stray.topic)
        if isinstance(other, str):
            faults[stray.cell] = other
        yield stray_finding(stray, other, found.cell, session.command)
    for one in found.separated:
        yield _separated(one, found.cell)
    if not found.problems and not found.strays and not found.separated and found.prepared is None:
        yield Finding("cells", "ok", f"{display.counted(len(found.cells), 'cell')} have the same placement")


def _copy_at(session: Session, servers: str | None, topic: str) -> Stray | str | None:
    """The topic as the cell has it that it is placed in; a text: the fault for which that is not known."""
    if servers is None:
        return "its addresses are not known"
    try:
        with replace(session, server=servers).client() as client:
            return client.placement(topic).copy
    except SowError as error:
        return f"{error.reason}: {error.message}"


def _separated(one: SeparatedTopic, cell: str) -> Finding:
    """A topic that needs one of another cell."""
    place = f"place {one.topic} and {one.other} in one cell"
    if one.setting == "dead_letter":
        said = f"the dead letters of {one.topic} go to {one.other}, which lives in the cell {one.cell}: they stay in "
        said += f"{cell}, where nobody can read them"
        return Finding("cells", "fault", said, f"{place}, or set another dead_letter")
    said = f"the view {one.topic} has the source {one.other}, which lives in the cell {one.cell}"
    return Finding("cells", "fault", f"{said}: nothing new comes into the view", place)


def stray_finding(stray: Stray, other: Stray | str | None, cell: str, command: str) -> Finding:
    """Checks which copy of a topic is newer: the one that is left in a cell, or that of the cell it is placed in.
    `command`: the beginning of a command to the server that has the former."""
    begin = f"the topic {stray.topic} lives in the cell {stray.cell}, and {display.counted(stray.records, 'record')} "
    begin += f"of it are left in {cell}"
    delete = f"{command} topic delete {shlex.quote(stray.topic)} --here"
    if isinstance(other, str):
        return Finding("cells", "warning", f"{begin}; {stray.cell} does not say what it has ({other})", "ask it later")
    if other is None:
        advice = "if the copy here is wanted, correct the placement, or copy the topic there"
        return Finding("cells", "fault", f"{begin}; {stray.cell} has no such topic", advice)
    if stray.last_change is None or other.last_change is None:
        advice = f"compare the two; if the one here is not wanted: {delete}"
        said = f"{begin}; which copy is newer is not known, as the journal of one has no change of it"
        return Finding("cells", "warning", said, advice)
    times = f"last changes: {stray.last_change:%Y-%m-%d %H:%M:%S} here, {other.last_change:%Y-%m-%d %H:%M:%S} there"
    if stray.last_change > other.last_change:
        advice = "changes may be missing there: compare the two before you delete one"
        return Finding("cells", "fault", f"{begin}; the copy here is newer ({times})", advice)
    return Finding("cells", "warning", f"{begin}; the copy there is newer ({times})", delete)
