"""The checks of `sow doctor` about the placement of topics in cells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from sow_cli import display
from sow_cli.findings import Finding
from sow_cli.session import Session
from sow_client import Placement, SowError, Stray


def judged_cells(
    found: Placement, session: Session, addresses: Mapping[str, str], command: str = "sow"
) -> Iterator[Finding]:
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
            advice = "give all servers the same placement file, and run sow cells reload at each"
            yield Finding("cells", "fault", f"the cell {problem.cell} differs {since}: {problem.message}", advice)
        else:
            said = f"the cell {problem.cell} does not answer {since}: {problem.message}"
            yield Finding("cells", "warning", said, "its topics may be unavailable: look whether it runs")
    for stray in found.strays:
        other = _copy_at(session, addresses.get(stray.cell), stray.topic)
        yield stray_finding(stray, other, found.cell, command)
    if not found.problems and not found.strays:
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


def stray_finding(stray: Stray, other: Stray | str | None, cell: str, command: str = "sow") -> Finding:
    """Checks which copy of a topic is newer: the one that is left in a cell, or that of the cell it is placed in."""
    begin = f"the topic {stray.topic} lives in the cell {stray.cell}, and {display.counted(stray.records, 'record')} "
    begin += f"of it are left in {cell}"
    delete = f"{command} topic delete {stray.topic} --here"
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
