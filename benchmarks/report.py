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
    if row.met is None:
        return ""
    return "met" if row.met else "MISSED"


HEADINGS = ("measured", "ours", "peer", "judged", "target", "")


def cells(row: Row) -> tuple[str, str, str, str, str]:
    """Ours, peer, the ratio or figure judged, target, verdict."""
    return (
        str(row.ours),
        "" if row.peer is None else str(row.peer),
        "" if row.judged is None or row.skipped else str(row.judged),
        "" if row.target is None else str(row.target),
        verdict(row),
    )


def print_report(console: Console, report: Report) -> None:
    """The table: one line of figures per row, below it the case, the shares of the limits and the note."""
    table = Table(title=escape(_title(report)), title_justify="left", show_lines=True)
    table.add_column(HEADINGS[0], ratio=1, min_width=40, overflow="fold")
    for heading in HEADINGS[1:-1]:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column(HEADINGS[-1], max_width=24, overflow="fold")
    for result in report.results:
        for row in result.rows:
            style = "green" if row.met else "red" if row.met is False else "yellow"
            described = f"[bold]{escape(result.title)}[/]\n{escape(row.case)}"
            described += "".join(f"\n[cyan]{escape(str(limit))}[/]" for limit in row.limits)
            described += f"\n[dim]{escape(row.note)}[/]" if row.note else ""
            ours, peer, judged, target, said = map(escape, cells(row))
            table.add_row(described, ours, peer, f"[bold]{judged}[/]", target, f"[{style}]{said}[/]")
        if result.failure:
            table.add_row(f"[bold]{escape(result.title)}[/]\n[red]failed: {escape(result.failure)}[/]")
    console.print(table)


def _title(report: Report) -> str:
    sizes = "reduced sizes, for a look: targets hold for the full ones" if report.quick else "full sizes"
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
        "met": row.met,
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
    """A page with one table."""
    lines = ["# Benchmark results", "", f"{_title(report)}.", ""]
    lines += ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    for result in report.results:
        for row in result.rows:
            described = [f"**{result.title}**", row.case, *map(str, row.limits), *([row.note] if row.note else [])]
            lines.append(_line("\n".join(described), *cells(row)))
        if result.failure:
            lines.append(_line(f"**{result.title}**<br>failed: {result.failure}", *[""] * 5))
    return "\n".join(lines) + "\n"


def _line(*fields: str) -> str:
    return "| " + " | ".join(field.replace("|", "\\|").replace("\n", "<br>") for field in fields) + " |"


def failed(reports: Sequence[Result]) -> bool:
    """Whether a benchmark did not finish. A missed target is a result, not a failure."""
    return any(result.failure for result in reports)
