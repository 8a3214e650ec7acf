"""Server: the configuration that it runs with, each setting with its origin. Secrets never leave the server."""

from __future__ import annotations

from sow_console.pages.page import Facts, View


async def facts(view: View) -> Facts:
    """The settings, all of them or those that are no defaults."""
    is_short = view.argument("changed") == "1"
    settings = await view.client.config()
    return {
        "instance": await view.client.describe_instance(),
        "settings": [one for one in settings if not is_short or one.origin != "default"],
        "is_short": is_short,
        "command": view.command("config", "show", *(["--changed"] if is_short else [])),
    }
