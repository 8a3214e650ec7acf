"""Topic: its figures, and every setting in force with its origin."""

from __future__ import annotations

from sow_client import PermissionDenied, Policy
from sow_console.pages import cells
from sow_console.pages.page import Facts, View


async def facts(view: View) -> Facts:
    """The settings of a topic, and the policies of the server."""
    topic = view.argument("topic")
    policies: list[Policy] = []
    try:
        policies = await view.client.policies()
    except PermissionDenied:
        pass  # the settings below still name those that apply
    if not topic:
        return {
            "topic": "",
            "names": await cells.names(view),
            "policies": policies,
            "command": view.command("policy", "list"),
        }
    return {
        "topic": topic,
        "described": await view.client.describe_topic(topic),
        "policies": policies,
        "command": view.command("topic", "describe", topic),
    }
