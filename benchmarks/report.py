"""The output of results: a table on the terminal, JSON, Markdown. Pure except for the terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.rows import Figure, Row
from benchmarks.setting import Machine


@dataclass(frozen=True, slots=True)
class Result:
    """The rows of one benchmark, or the reason why it has none."""

    name: str
    title: str
    rows: tuple[Row, ...]
    seconds: float
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """One run."""

    quick: bool
    started: str
    platform: str
    filesystem: str
    machine: Machine
    results: tuple[Result, ...]


def verdict(row: Row) -> str:
    """One word, or the reason why there is none."""
    if row.skipped:
        return f"skipped: {row.skipped}"
    if row.held is None:
        return ""
    return "held" if row.held else "REGRESSION"


HEADINGS = ("measured", "ours", "peer", "judged", "bound", "")
AMBITION_HEADINGS = ("measured", "judged", "ambition", "")
INFORMATION_HEADINGS = ("measured", "ours", "peer", "ratio")
HELD_TEXT = (
    "Each row has a bound. A figure beyond its bound is a regression: a full run of `python -m benchmarks` then exits "
    "with status 1."
)
AMBITION_TEXT = "How fast these should become one day. Missing an ambition is no fault and fails nothing."


def cells(row: Row) -> tuple[str, str, str, str, str]:
    """Ours, peer, the ratio or figure judged, bound, verdict."""
    return (
        str(row.ours),
        "" if row.peer is None else str(row.peer),
        "" if row.judged is None or row.skipped else str(row.judged),
        "" if row.target is None else str(row.target),
        verdict(row),
    )


def ambition_cells(row: Row) -> tuple[str, str, str]:
    """The ratio or figure judged, the ambition, and whether it is reached."""
    assert row.target is not None, "a row without a target has no ambition"
    judged = "" if row.judged is None else str(row.judged)
    return judged, row.target.ambition_said, "reached" if row.reached else "not reached"


def print_report(console: Console, report: Report) -> None:
    """The table: one line of figures per row, below it the case, the shares of the limits and the note."""
    table = Table(title=escape(_title(report)), title_justify="left", show_lines=True)
    table.add_column(HEADINGS[0], ratio=1, min_width=40, overflow="fold")
    for heading in HEADINGS[1:-1]:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column(HEADINGS[-1], max_width=24, overflow="fold")
    for result in report.results:
        for row in result.rows:
            style = "green" if row.held else "red" if row.held is False else "yellow"
            described = f"[bold]{escape(result.title)}[/]\n{escape(row.case)}"
            described += "".join(f"\n[cyan]{escape(str(limit))}[/]" for limit in row.limits)
            described += f"\n[dim]{escape(row.note)}[/]" if row.note else ""
            ours, peer, judged, target, said = map(escape, cells(row))
            table.add_row(described, ours, peer, f"[bold]{judged}[/]", target, f"[{style}]{said}[/]")
        if result.failure:
            table.add_row(f"[bold]{escape(result.title)}[/]\n[red]failed: {escape(result.failure)}[/]")
    console.print(table)
    if ambitious := _ambitious(report):
        ambitions = Table(title="Ambitions", title_justify="left")
        for heading in AMBITION_HEADINGS:
            ambitions.add_column(heading, overflow="fold")
        for result, row in ambitious:
            ambitions.add_row(escape(f"{result.title}, {row.case}"), *map(escape, ambition_cells(row)))
        console.print(ambitions)


def _ambitious(report: Report) -> list[tuple[Result, Row]]:
    """The rows that have an ambition and were judged."""
    return [(result, row) for result in report.results for row in result.rows if row.reached is not None]


def _title(report: Report) -> str:
    sizes = "reduced sizes, for a look: bounds count for the full ones" if report.quick else "full sizes"
    return f"{report.started}, {sizes}; {report.platform}, data on {report.filesystem}; {report.machine}"


def to_json(report: Report) -> str:
    """Everything, with figures as numbers and their units."""
    return json.dumps(
        {
            "quick": report.quick,
            "started": report.started,
            "platform": report.platform,
            "filesystem": report.filesystem,
            "machine": {
                "loop_milliseconds": report.machine.loop_milliseconds,
                "puts_per_second": report.machine.puts_per_second,
                "sync_milliseconds": report.machine.sync_milliseconds,
            },
            "benchmarks": [
                {
                    "name": result.name,
                    "title": result.title,
                    "seconds": round(result.seconds, 1),
                    "failure": result.failure or None,
                    "rows": [_row_fields(row) for row in result.rows],
                }
                for result in report.results
            ],
        },
        indent=2,
        ensure_ascii=False,
    )


def _row_fields(row: Row) -> dict[str, object]:
    return {
        "case": row.case,
        "ours": _figure_fields(row.ours),
        "peer": _figure_fields(row.peer),
        "judged": _figure_fields(row.judged),
        "target": None if row.target is None else str(row.target),
        "held": row.held,
        "ambition": None if row.target is None else row.target.ambition_said or None,
        "reached": row.reached,
        "limits": [
            {"name": limit.name, "figure": _figure_fields(limit.figure), "share": round(limit.share, 3)}
            for limit in row.limits
        ],
        "note": row.note,
        "skipped": row.skipped or None,
    }


def _figure_fields(figure: Figure | None) -> dict[str, object] | None:
    return None if figure is None else {"value": float(f"{figure.value:.5g}"), "unit": figure.unit}


def to_markdown(report: Report) -> str:
    """A page with a table of what is held, one of ambitions, and one of figures that nothing judges."""
    rows = [(result, row) for result in report.results for row in result.rows]
    held = [_line(_described(result, row), *cells(row)) for result, row in rows if row.target is not None]
    held += [
        _line(f"**{result.title}**\nfailed: {result.failure}", *[""] * 5) for result in report.results if result.failure
    ]
    lines = ["# Benchmark results", "", f"{_title(report)}.", ""]
    lines += ["## Held", "", HELD_TEXT, "", *_table(HEADINGS, held)]
    ambitions = [_line(f"**{one.title}**\n{row.case}", *ambition_cells(row)) for one, row in _ambitious(report)]
    lines += ["", "## Ambitions", "", AMBITION_TEXT, "", *_table(AMBITION_HEADINGS, ambitions)]
    information = [_line(_described(result, row), *cells(row)[:3]) for result, row in rows if row.target is None]
    lines += ["", "## For information", "", *_table(INFORMATION_HEADINGS, information)]
    return "\n".join(lines) + "\n"


def _described(result: Result, row: Row) -> str:
    return "\n".join([f"**{result.title}**", row.case, *map(str, row.limits), *([row.note] if row.note else [])])


def _table(headings: Sequence[str], lines: Sequence[str]) -> list[str]:
    return ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings), *lines]


def _line(*fields: str) -> str:
    return "| " + " | ".join(field.replace("|", "\\|").replace("\n", "<br>") for field in fields) + " |"


def failed(report: Report) -> bool:
    """True if a benchmark did not finish, or a full run found a figure beyond its bound. A quick run judges nothing."""
    regressed = any(row.held is False and not row.skipped for result in report.results for row in result.rows)
    return any(result.failure for result in report.results) or (regressed and not report.quick)
