"""Server: charts of the last hour, the log, and the configuration with origins. Secrets never leave the server."""

from __future__ import annotations

from typing import Final

from sow_client import ConfigSetting, Figures, LogLine, PermissionDenied
from sow_console import charts, documents
from sow_console.pages.page import Facts, View

LINES: Final = 200
"""Lines of the log that are shown."""
LEVELS: Final = ("debug", "info", "warning", "error")


async def facts(view: View) -> Facts:
    """The parts that the person may see, each with the reason where it is not to be seen."""
    is_short = view.argument("changed") == "1"
    level = view.argument("level")
    within = "2m" if view.argument("within") == "2m" else "1h"
    denied: dict[str, str] = {}
    figures: tuple[Figures, ...] = ()
    lines: tuple[LogLine, ...] = ()
    settings: list[ConfigSetting] = []
    try:
        figures = await view.session.figures(view.server, hour=within == "1h").look()
    except PermissionDenied as error:
        denied["figures"] = error.message
    try:
        lines = await view.session.log(view.server).look()
    except PermissionDenied as error:
        denied["log"] = error.message
    try:
        settings = await view.session.settings(view.server, anew=view.is_first)
    except PermissionDenied as error:
        denied["settings"] = error.message
    worse = LEVELS[LEVELS.index(level) :] if level in LEVELS else ()
    shown = [line for line in lines if not worse or line.level in worse or line.level not in LEVELS]
    drawn = charts.charts(figures)
    return {
        "instance": await view.client.describe_instance(),
        "denied": denied,
        "charts": drawn,
        "within": within,
        "span": charts.span(figures),
        "data": [documents.encoded(one).decode() for one in drawn],
        "lines": shown[: -LINES - 1 : -1],
        "level": level if level in LEVELS else "",
        "levels": LEVELS,
        "settings": [one for one in settings if not is_short or one.origin != "default"],
        "is_short": is_short,
        "command": view.command("config", "show", *(["--changed"] if is_short else [])),
        "log_command": view.command("log", "--follow", *(["--level", level] if worse else [])),
        "watch_command": view.command("status", "--watch"),
    }


async def twin(view: View) -> Facts:
    """The same, without the charts' own form."""
    return {name: value for name, value in (await facts(view)).items() if name not in ("data", "levels")}
