"""Connections: who is connected with which calls, and the subscriptions with their positions and queues."""

from __future__ import annotations

from sow_console.pages.page import Facts, View


async def facts(view: View) -> Facts:
    """The callers and the subscriptions of a topic, or of all."""
    topic = view.argument("topic")
    return {
        "topic": topic,
        "sessions": await view.client.sessions(),
        "subscriptions": await view.client.subscriptions(topic or None),
        "command": view.command("sessions", "--subscriptions", *(["--topic", topic] if topic else [])),
    }
